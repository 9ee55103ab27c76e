// From the records of a trace to the state after each of them.
//
// A trace does not hold states, only what changed: this sequence was admitted, that block table got two more blocks.
// The Replay applies the changes in the order in which the scheduler made them:
//
//   released -> preempted -> admitted -> block tables, copies, evictions -> chunks -> sampled tokens
//
// Position p is the state after the first p records; at position 0 nothing has happened. To jump, it takes the nearest
// state that it has kept (a keyframe) and goes on from there. The first pass, which makes the keyframes, also notes
// what the pictures of the whole run need.

const WAITING = 0, RUNNING = 1, FINISHED = 2; // of a sequence
const EMPTY = 0, PREFILL = 1, DECODE = 2, HELD = 3, IN_VAIN = 4; // of a seat in a step

class Replay {
  constructor(trace, name) {
    this.trace = trace;
    this.name = name;
    this.engine = trace.engine;
    this.sequences = trace.sequences;
    this.records = trace.steps;
    this.blockSize = trace.engine.block_size;
    this.numBlocks = trace.engine.num_blocks;

    this.byPriority = trace.engine.scheduling_policy === "priority";

    // The last record may only say who left after the last step: then it is no step.
    const last = this.records[this.records.length - 1];
    const onlyReleases = !last.chunks.length && !last.preempted.length && !last.admitted.length;
    this.numSteps = this.records.length - (onlyReleases && this.records.length > 1 ? 1 : 0);

    // The time of a step. On a GPU the next step is scheduled while this one runs, so the steps' own times overlap. Here
    // each begins where the one before has ended, or later if the engine had nothing to do.
    this.starts = [];
    this.ends = [];
    for (const { times } of this.records) {
      const start = Math.max(times[0], this.ends.length ? this.ends[this.ends.length - 1] : 0);
      this.starts.push(start);
      this.ends.push(Math.max(start, times[3]));
    }

    this.clear();
    this.firstPass();
    this.seek(0);
  }

  clear() {
    this.position = 0;
    this.tables = new Map(); // sequence -> its blocks; a list in it is replaced, never changed
    this.owners = Array.from({ length: this.numBlocks }, () => []); // block -> sequences
    this.filled = new Int32Array(this.numBlocks); // tokens whose keys and values are in the block
    this.cached = new Uint8Array(this.numBlocks); // 1: nobody's, but its text can still be found
    this.computed = new Int32Array(this.sequences.length);
    this.generated = new Int32Array(this.sequences.length);
    this.status = new Uint8Array(this.sequences.length);
    this.seats = []; // seat -> sequence, or -1
  }

  // --- Moving ---

  seek(position) {
    position = Math.max(0, Math.min(this.records.length, position));
    const frame = Math.min(Math.floor(position / this.frameDistance), this.keyframes.length - 1);
    if (position < this.position || frame * this.frameDistance > this.position) this.restore(this.keyframes[frame]);
    while (this.position < position) this.apply(this.position);
  }

  keep() {
    return {
      position: this.position,
      tables: new Map(this.tables),
      filled: this.filled.slice(),
      cached: this.cached.slice(),
      computed: this.computed.slice(),
      generated: this.generated.slice(),
      status: this.status.slice(),
      seats: this.seats.slice(),
    };
  }

  restore(frame) {
    this.position = frame.position;
    this.tables = new Map(frame.tables);
    this.filled = frame.filled.slice();
    this.cached = frame.cached.slice();
    this.computed = frame.computed.slice();
    this.generated = frame.generated.slice();
    this.status = frame.status.slice();
    this.seats = frame.seats.slice();
    for (const list of this.owners) list.length = 0;
    for (const [sequence, table] of this.tables) for (const block of table) this.owners[block].push(sequence);
  }

  // --- One record ---

  apply(i) {
    const record = this.records[i];
    this.freed = [];
    this.retaken = []; // blocks that were nobody's and now are somebody's, and how: "evicted", "found" or "new"
    this.found = new Map(); // sequence -> tokens found after its admission
    for (const sequence of record.released) this.leave(sequence, FINISHED);
    for (const sequence of record.preempted) this.leave(sequence, WAITING);
    for (const [sequence, found] of record.admitted) {
      this.sit(sequence);
      this.computed[sequence] = found;
    }
    this.changeTables(record);
    for (const block of this.freed) {
      if (this.owners[block].length === 0) this.cached[block] = this.staysFindable(i, block);
    }
    for (const [sequence, start, count] of record.chunks) this.compute(sequence, start, start + count);
    for (const [sequence, , reason] of record.sampled) {
      this.fork(sequence);
      this.generated[sequence] += 1;
      if (reason !== null) this.status[sequence] = FINISHED; // it keeps seat and blocks until it is released
    }
    this.position = i + 1;
  }

  sit(sequence) {
    this.status[sequence] = RUNNING;
    if (this.seats.includes(sequence)) return;
    const free = this.seats.indexOf(-1);
    if (free >= 0) this.seats[free] = sequence;
    else this.seats.push(sequence);
  }

  leave(sequence, status) {
    const seat = this.seats.indexOf(sequence);
    if (seat >= 0) this.seats[seat] = -1;
    for (const block of this.tables.get(sequence) || []) this.disown(block, sequence);
    this.tables.delete(sequence);
    this.computed[sequence] = 0;
    if (this.status[sequence] !== FINISHED) this.status[sequence] = status;
  }

  disown(block, sequence) {
    const owners = this.owners[block];
    const place = owners.indexOf(sequence);
    if (place >= 0) owners.splice(place, 1);
    if (owners.length === 0) this.freed.push(block);
  }

  // The first token of a request with n > 1 makes more sequences of it. Each begins with the blocks of its parent.
  fork(sequence) {
    const parent = this.sequences[sequence].parent;
    if (parent === null || this.generated[sequence] > 0 || this.tables.has(sequence)) return;
    const table = this.tables.get(parent);
    if (!table) return;
    this.sit(sequence);
    this.tables.set(sequence, table);
    for (const block of table) this.owners[block].push(sequence);
    this.computed[sequence] = this.computed[parent];
  }

  changeTables(record) {
    const found = new Map(record.admitted);
    const evicted = new Set(record.evicted);
    const copied = new Map(record.copies.map(([source, copy]) => [copy, this.filled[source]]));
    // All that is given back first: the block that one sequence drops may be the one that another gets.
    const gains = [];
    for (const [sequence, first, blocks] of record.tables) {
      if (!this.tables.has(sequence)) this.sit(sequence);
      const old = this.tables.get(sequence) || [];
      const table = old.slice(0, first).concat(blocks);
      for (let at = first; at < Math.max(old.length, table.length); ++at) {
        if (old[at] === table[at]) continue;
        if (at < old.length) this.disown(old[at], sequence);
        if (at < table.length) gains.push([sequence, at, table[at], at < old.length]);
      }
      this.tables.set(sequence, table);
    }
    for (const [sequence, at, block, replaces] of gains) {
      if (replaces && !copied.has(block)) this.findMore(sequence, (at + 1) * this.blockSize);
      if (this.owners[block].length === 0) {
        // A block that was found in the prefix cache keeps what is in it. Blocks are found for a new sequence, as many
        // as its admission says, and later in place of blocks that it has not computed yet.
        const asked = replaces && !copied.has(block);
        const isFound = !evicted.has(block) && (asked || (at + 1) * this.blockSize <= (found.get(sequence) || 0));
        this.retaken.push([block, evicted.has(block) ? "evicted" : isFound ? "found" : "new"]);
        if (!isFound) this.filled[block] = 0;
        this.cached[block] = 0;
      }
      if (copied.has(block)) {
        this.filled[block] = Math.min(copied.get(block), Math.max(0, this.computed[sequence] - at * this.blockSize));
      }
      this.owners[block].push(sequence);
    }
  }

  // A running sequence has found the block that ends at this token in the prefix cache, in place of its own empty one.
  findMore(sequence, end) {
    const more = Math.max(0, end - this.computed[sequence]);
    if (more) this.found.set(sequence, (this.found.get(sequence) || 0) + more);
    this.computed[sequence] += more;
  }

  compute(sequence, start, end) {
    const table = this.tables.get(sequence) || [];
    for (let at = Math.floor(start / this.blockSize); at * this.blockSize < end && at < table.length; ++at) {
      const tokens = Math.min(this.blockSize, end - at * this.blockSize);
      this.filled[table[at]] = Math.max(this.filled[table[at]], tokens);
    }
    this.computed[sequence] = end;
  }

  // --- The first pass ---

  firstPass() {
    const records = this.records;
    this.frameDistance = Math.max(16, Math.ceil(records.length / 64));
    this.keyframes = [];
    this.findable = null; // not known yet
    const intervals = []; // in which a block is nobody's: {block, from, to, full, how}
    const open = new Map(); // block -> its interval
    const rows = []; // of each record: [seat, sequence, kind]...
    this.newBlocks = new Int32Array(records.length);
    this.chunkKinds = [];
    this.foundLater = []; // of each record: [sequence, tokens] found in the prefix cache after its admission
    this.returned = []; // of each record: those of the released that had blocks; who ends while waiting has none
    this.preemptions = []; // [record, seat, sequence]
    for (let i = 0; i < records.length; ++i) {
      const record = records[i];
      for (const sequence of record.preempted) {
        this.preemptions.push([i, this.seats.indexOf(sequence), sequence]);
      }
      const known = record.chunks.map(([s]) => this.sequences[s].num_prompt_tokens + this.generated[s]);
      this.returned.push(record.released.filter((sequence) => this.tables.has(sequence)));
      this.apply(i);
      this.foundLater.push([...this.found]);
      for (const [block, how] of this.retaken) {
        if (how !== "found") this.newBlocks[i] += 1;
        const interval = open.get(block);
        if (interval) Object.assign(interval, { how, to: i });
        open.delete(block);
      }
      for (const block of this.freed) {
        if (this.owners[block].length > 0 || open.has(block)) continue;
        const interval = { block, from: i, full: this.filled[block] === this.blockSize, to: -1, how: "" };
        open.set(block, interval);
        intervals.push(interval);
      }
      const kinds = this.kindsOfChunks(record, known);
      this.chunkKinds.push(kinds);
      rows.push(this.rowOf(record, kinds));
    }
    this.numSeats = Math.max(1, this.seats.length);
    this.usedBlocks = this.blocksEverUsed();
    this.findUnsaidEnds();
    this.fillSeats(rows);
    this.decideFindable(intervals);

    // Again, now that it is known which blocks stay findable.
    this.clear();
    for (let i = 0; i < records.length; ++i) {
      if (i % this.frameDistance === 0) this.keyframes.push(this.keep());
      this.apply(i);
    }
    this.summarize();
  }

  // The number of the last block that anybody ever had, plus one.
  blocksEverUsed() {
    let used = 0;
    for (const { tables } of this.records) {
      for (const [, , blocks] of tables) for (const block of blocks) used = Math.max(used, block + 1);
    }
    return used;
  }

  // Who ended without a token that says so, as by an abort: of each record, those of whom it is the first to know.
  findUnsaidEnds() {
    const place = new Map(); // sequence -> record
    this.records.forEach((record, i) => {
      for (const sequence of record.released) place.set(sequence, i);
    });
    for (const record of this.records) {
      for (const [sequence, , reason] of record.sampled) if (reason !== null) place.set(sequence, -1);
    }
    this.endedUnsaid = this.records.map(() => []);
    this.sequences.forEach((s, sequence) => {
      if (s.end === null || s.finish_reason === null) return;
      // Who waited may never be released.
      const at = place.has(sequence) ? place.get(sequence) : this.records.findIndex(({ times }) => times[0] >= s.end);
      if (at >= 0) this.endedUnsaid[at].push(sequence);
    });
  }

  // What the scheduler calls a prefill and a decode. `known` is how many tokens each sequence had before.
  kindsOfChunks(record, known) {
    const brought = new Set(record.sampled.map(([sequence]) => sequence));
    return record.chunks.map(([sequence, start, count], c) => {
      const { num_prompt_tokens: prompt, end, tokens } = this.sequences[sequence];
      // All known tokens were computed and no token came of it: the sequence ended while this step was under way.
      const isLast = end !== null && this.generated[sequence] === tokens.length;
      if (isLast && start + count >= known[c] && !brought.has(sequence)) return IN_VAIN;
      return start + count <= prompt || count > 1 ? PREFILL : DECODE;
    });
  }

  rowOf(record, kinds) {
    const kindOf = new Map(record.chunks.map(([sequence], c) => [sequence, kinds[c]]));
    const row = [];
    this.seats.forEach((sequence, seat) => {
      if (sequence >= 0) row.push([seat, sequence, kindOf.get(sequence) || HELD]);
    });
    return row;
  }

  fillSeats(rows) {
    this.seatKind = new Uint8Array(rows.length * this.numSeats); // [record * numSeats + seat]
    this.seatSequence = new Int32Array(rows.length * this.numSeats).fill(-1);
    rows.forEach((row, i) => {
      for (const [seat, sequence, kind] of row) {
        this.seatKind[i * this.numSeats + seat] = kind;
        this.seatSequence[i * this.numSeats + seat] = sequence;
      }
    });
  }

  // The trace says how many blocks are cached, not which. A block that is later found, or evicted, was; one that is
  // later taken without either was not. Of the others, those that are full may be, as many as the trace says. (When two
  // sequences have computed the same text, only one of the two blocks is findable.)
  decideFindable(intervals) {
    const count = new Int32Array(this.records.length + 1);
    const undecided = this.records.map(() => []);
    this.findable = this.records.map(() => new Set());
    for (const interval of intervals) {
      if (interval.how === "found" || interval.how === "evicted") {
        this.findable[interval.from].add(interval.block);
        count[interval.from] += 1;
        count[interval.to] -= 1;
      } else if (interval.how === "" && interval.full && this.engine.enable_prefix_caching) {
        undecided[interval.from].push(interval.block);
      }
    }
    let cached = 0;
    this.records.forEach((record, i) => {
      cached += count[i];
      for (const block of undecided[i].slice(0, Math.max(0, record.cached_blocks - cached))) {
        this.findable[i].add(block);
        cached += 1;
      }
    });
  }

  staysFindable(i, block) {
    return this.findable !== null && this.findable[i].has(block) ? 1 : 0;
  }

  summarize() {
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
    this.tokens = sum(this.records.map((record) => record.num_tokens));
    this.numGenerated = sum(this.records.map((record) => record.sampled.length));
    const found = (list) => sum(list.map(([, tokens]) => tokens));
    this.foundTokens = sum(this.records.map((record, i) => found(record.admitted) + found(this.foundLater[i])));
    this.seconds = this.ends[this.ends.length - 1] - this.starts[0];
  }

  // The share of seat-steps that nobody sat in: a seat-step is one of `seats` seats in one step, however long it took.
  emptiness(seats) {
    const filled = this.seatKind.subarray(0, this.numSteps * this.numSeats).filter((kind) => kind !== EMPTY).length;
    return 1 - filled / (this.numSteps * seats);
  }

  // --- Asking ---

  // The record that brought us to this position; null at the start.
  get record() {
    return this.position > 0 ? this.records[this.position - 1] : null;
  }

  // The position at a time: all steps that had begun by then.
  positionAt(time) {
    let low = 0, high = this.records.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The same request has the same key in every trace.
  keyOf(sequence) {
    const s = this.sequences[sequence];
    return `${s.index} ${s.request_id}`;
  }

  // As print(engine.events()) says it: of n outputs, all but the first have their index after the id.
  labelOf(sequence) {
    const s = this.sequences[sequence];
    const id = s.request_id.length > 12 ? `…${s.request_id.slice(-11)}` : s.request_id;
    return s.index ? `${id}[${s.index}]` : id;
  }

  // The first words of its prompt, to know it by. What all prompts begin with, and the marks of a chat, say nothing.
  topicOf(sequence) {
    const { prompt } = this.sequences[sequence];
    if (prompt === null) return "";
    const parts = prompt.slice(this.commonStart()).split(/<\|[^|<>]{1,40}\|>/);
    const words = parts.map((part) => part.replace(/^(system|user|assistant)\n/, "").replace(/\s+/g, " ").trim());
    return shorten(words.find((part) => part) || "", 48);
  }

  commonStart() {
    if (this.common !== undefined) return this.common;
    const prompts = [...new Set(this.sequences.map((s) => s.prompt).filter((prompt) => prompt !== null))];
    let end = prompts.length > 1 ? Math.min(...prompts.map((prompt) => prompt.length)) : 0;
    for (const prompt of prompts) {
      let same = 0;
      while (same < end && prompt[same] === prompts[0][same]) same += 1;
      end = same;
    }
    this.common = end ? Math.max(prompts[0].lastIndexOf(" ", end - 1), prompts[0].lastIndexOf("\n", end - 1)) + 1 : 0;
    return this.common;
  }

  // In words: what the sequence is doing.
  stateOf(sequence) {
    const s = this.sequences[sequence];
    const record = this.record;
    const now = record ? record.times[0] : -1;
    if (this.status[sequence] === FINISHED || (this.status[sequence] === WAITING && s.end !== null && s.end <= now)) {
      return s.finish_reason ? `ended: ${s.finish_reason}` : "ended";
    }
    if (this.status[sequence] === RUNNING) return this.generated[sequence] > 0 ? "running: decode" : "running: prefill";
    if (s.parent !== null && this.generated[sequence] === 0) return "not forked yet";
    if (s.arrival > now) return "not here yet";
    return this.generated[sequence] > 0 ? "preempted, waits" : "waiting";
  }

  textOf(sequence) {
    const s = this.sequences[sequence];
    return s.pieces === null ? "" : s.pieces.slice(0, this.generated[sequence]).join("");
  }
}
