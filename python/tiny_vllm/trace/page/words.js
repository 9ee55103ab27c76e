// What happened in a step, in words. A part of a sentence is a string, or a number: the sequence whose name stands there.

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function whole(number) {
  return Math.round(number).toLocaleString("en");
}

function seconds(time) {
  // With spaces at which no line ends.
  if (time === 0) return "0\u00a0s";
  return time < 0.1 ? `${(time * 1000).toPrecision(3)}\u00a0ms` : `${time.toPrecision(3)}\u00a0s`;
}

function shorten(text, most) {
  const letters = Array.from(text); // not in the middle of a character
  return letters.length <= most ? text : `${letters.slice(0, most - 1).join("")}…`;
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

const MOST_NAMES = 10;

function names(sequences) {
  const parts = [];
  sequences.slice(0, MOST_NAMES).forEach((sequence, i) => parts.push(i ? ", " : " ", sequence));
  if (sequences.length > MOST_NAMES) parts.push(` and ${sequences.length - MOST_NAMES} more`);
  return parts;
}

// The events of the record before `position`: a list of {kind, parts}.
function eventsOf(replay, position) {
  if (position === 0) return [{ kind: "note", parts: ["all blocks are free, and all seats are empty"] }];
  const record = replay.records[position - 1];
  const kinds = replay.chunkKinds[position - 1];
  const events = [];
  const add = (kind, ...parts) => events.push({ kind, parts });

  for (const sequence of replay.endedUnsaid[position - 1]) {
    add("finish", sequence, ` ended: ${replay.sequences[sequence].finish_reason}`);
  }
  const returned = replay.returned[position - 1];
  if (returned.length) {
    add("release", ...names(returned).slice(1), ` gave ${returned.length > 1 ? "their" : "its"} blocks back`);
  }
  for (const parts of preemptionsOf(replay, record)) add("preempt", ...parts);
  for (const [sequence, found] of record.admitted.slice(0, MOST_NAMES)) {
    const note = found ? ` (${whole(found)} cached)` : "";
    add("admit", "admitted ", sequence, note);
  }
  if (record.admitted.length > MOST_NAMES) {
    add("admit", `admitted ${plural(record.admitted.length - MOST_NAMES, "more sequence")}`);
  }

  for (const [sequence, tokens] of replay.foundLater[position - 1].slice(0, MOST_NAMES)) {
    add("admit", sequence, ` found ${whole(tokens)} in the cache`);
  }

  const chunks = (kind) => record.chunks.filter((_, c) => kinds[c] === kind);
  const prefills = chunks(PREFILL);
  for (const [sequence, start, count] of prefills.slice(0, MOST_NAMES)) {
    const verb = replay.sequences[sequence].num_prompt_tokens < start + count ? "compute again " : "prefill ";
    add("prefill", verb, sequence, ` [${start}, ${start + count})`);
  }
  if (prefills.length > MOST_NAMES) add("prefill", `prefill ${plural(prefills.length - MOST_NAMES, "more sequence")}`);
  const decodes = chunks(DECODE).map(([sequence]) => sequence);
  if (decodes.length) add("decode", "decode", ...names(decodes));
  const inVain = chunks(IN_VAIN).map(([sequence]) => sequence);
  if (inVain.length) add("vain", "computed in vain, had ended:", ...names(inVain));

  const created = replay.newBlocks[position - 1];
  if (created) add("block", plural(created, "new block"));
  for (const [source, copy] of record.copies.slice(0, MOST_NAMES)) {
    add("block", `copied block ${source} to ${copy}, to write there`);
  }
  if (record.evicted.length) {
    const shown = record.evicted.slice(0, MOST_NAMES).join(", ");
    const more = record.evicted.length > MOST_NAMES ? ` and ${record.evicted.length - MOST_NAMES} more` : "";
    add("block", `evicted block${record.evicted.length === 1 ? "" : "s"} ${shown}${more}`);
  }
  for (const [sequence, , reason] of record.sampled) {
    if (reason !== null) add("finish", sequence, ` ended: ${reason}`);
  }
  if (!events.length) add("note", "nothing to do");
  return events;
}

// Who had to go, and why: because a request that goes first took the place, or because there was no block left.
function preemptionsOf(replay, record) {
  const priorityOf = (sequence) => replay.sequences[sequence].priority;
  const named = (sequence) => [sequence, ` (priority ${priorityOf(sequence)})`];
  const sentences = [], others = [];
  const takers = new Set();
  for (const victim of record.preempted) {
    const before = !replay.byPriority ? [] : record.admitted.map(([sequence]) => sequence)
      .filter((sequence) => priorityOf(sequence) < priorityOf(victim));
    if (!before.length) {
      const next = replay.byPriority ? waitingBefore(replay, record, priorityOf(victim)) : -1;
      if (next >= 0) sentences.push(["preempted ", ...named(victim), ": ", ...named(next), " goes first"]);
      else others.push(victim);
      continue;
    }
    // One who took several places is named for each of them; the first to come first.
    const taker = before.find((sequence) => !takers.has(sequence)) ?? before[before.length - 1];
    takers.add(taker);
    sentences.push(["preempted ", ...named(victim), ": ", ...named(taker), " took its place"]);
  }
  if (others.length) sentences.push(["preempted", ...names(others), ": no block was left"]);
  if (sentences.length <= MOST_NAMES) return sentences;
  return [...sentences.slice(0, MOST_NAMES), [`preempted ${sentences.length - MOST_NAMES} more`]];
}

// Who waits after this record, which is the one shown, and has a smaller priority number than this one.
function waitingBefore(replay, record, priority) {
  return replay.sequences.findIndex((s, sequence) => s.priority < priority && replay.status[sequence] === WAITING &&
    s.arrival <= record.times[0] && (s.end === null || s.end > record.times[0]) && s.parent === null);
}

function headingOf(replay, position) {
  if (position === 0) return "Before the first step";
  if (position > replay.numSteps) return "After the last step";
  const record = replay.records[position - 1];
  const budget = replay.engine.max_num_batched_tokens;
  return `Step ${record.step}: ${whole(record.num_tokens)} of ${plural(budget, "token")}, ` +
    `${seconds(record.times[3] - record.times[0])}`;
}

// The numbers of the whole run: [label, value, note].
function summaryOf(replay, seats) {
  const empty = replay.emptiness(seats);
  const most = replay.engine.max_num_seqs;
  const allowed = seats < most ? ` in use, ${most} allowed` : "";
  const perSecond = replay.seconds > 0 ? replay.numGenerated / replay.seconds : 0;
  const where = `of ${plural(seats, "seat")}${allowed}, in ${plural(replay.numSteps, "step")}`;
  return [
    ["of seat-steps were empty", percent(empty), where],
    ["steps", whole(replay.numSteps), `in ${seconds(replay.seconds)}`],
    ["tokens computed", whole(replay.tokens), `${(replay.tokens / replay.numSteps).toFixed(1)} a step`],
    ["tokens generated", whole(replay.numGenerated), `${whole(perSecond)} a second`],
    ["tokens from the prefix cache", whole(replay.foundTokens), "found, not computed"],
    ["preemptions", whole(replay.preemptions.length), "blocks given back, waited again"],
  ];
}

// What two runs of the same requests say together; "" where they are not the same requests.
function comparisonOf(first, second, titles) {
  const asked = (replay) => replay.sequences.map((s, i) => `${replay.keyOf(i)} ${s.num_prompt_tokens}`).sort().join();
  if (asked(first) !== asked(second)) return "";
  const [a, b] = [first.numSteps, second.numSteps];
  if (a === b) return `Both needed ${plural(a, "step")}.`;
  const [quick, slow] = a < b ? [first, second] : [second, first];
  const title = titles[a < b ? 0 : 1];
  const reason = quick.engine.scheduler === "continuous" && slow.engine.scheduler === "static"
    ? ": a seat that is free is given to the next request at once" : "";
  return `${title} needed ${plural(quick.numSteps, "step")} in place of ${whole(slow.numSteps)}${reason}.`;
}
