// Buttons, keys and pointers; who is told when the moment changes.

const MOST_TEXTS = 40; // cards of requests that are shown at once

// --- Small helpers ---

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children); // strings become text, whatever is in them
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// --- One run: everything that is shown of one trace ---

class Run {
  constructor(page, replay, title) {
    this.page = page;
    this.replay = replay;
    this.title = title;
    this.focus = -1; // the block under the pointer or the keyboard's focus
    this.chart = document.getElementById("run-chart").content.firstElementChild.cloneNode(true);
    this.body = document.getElementById("run").content.firstElementChild.cloneNode(true);
    this.find = (selector) => this.body.querySelector(selector);
    this.gantt = this.chart.querySelector(".gantt");
    this.grid = this.find(".pages");
    this.cards = new Map(); // sequence -> its card
    this.byKey = new Map(replay.sequences.map((_, sequence) => [replay.keyOf(sequence), sequence]));
    setText(this.find(".run-title"), title);
    this.find(".run-title").hidden = page.runs.length === 0 && page.single;
    this.listen();
  }

  // --- What never changes ---

  drawSummary(seats) {
    const list = this.find(".summary");
    list.replaceChildren();
    for (const [label, value, note] of summaryOf(this.replay, seats)) {
      const name = element("dt", "", label);
      name.append(element("small", "", note));
      list.append(element("div", "", name, element("dd", "", value)));
    }
    const empty = this.replay.emptiness(seats);
    this.chart.querySelector("h3").replaceChildren(
      element("b", "", this.title), ": ", element("b", "", `${percent(empty)} of seat-steps were empty`),
      `, ${plural(this.replay.numSteps, "step")}, ${seconds(this.replay.seconds)}`);
  }

  // --- Pictures of the whole run: drawn anew when their size, axis or colours change ---

  drawWhole() {
    const { page, replay } = this;
    const look = this.look(page.palette);
    const plot = this.gantt.parentElement;
    this.axis = makeAxis(replay, page.byTime, page.domain, plot.clientWidth);
    this.ganttLayout = ganttLayout(page.seats, page.single ? 240 : 190);
    drawGantt(this.gantt, replay, this.ganttLayout, this.axis, { ...look, strong: !page.single });
    this.gantt.setAttribute("aria-label",
      `Seats over ${page.byTime ? "time" : "steps"}: who computed when. The step in words is below.`);
    this.curves = this.curveData();
    for (const figure of this.body.querySelectorAll(".curves figure")) {
      const canvas = figure.querySelector("canvas");
      const chart = this.curves[figure.dataset.chart];
      this.curveAxis = makeAxis(replay, page.byTime, page.domain, canvas.parentElement.clientWidth);
      const scale = figure.querySelector(".scale");
      if (scale) setText(scale, chart.scale);
      const limit = figure.querySelector(".limit-entry");
      if (limit) limit.hidden = !chart.limit;
      drawCurve(canvas, replay, this.curveAxis, chart, page.palette);
      canvas.setAttribute("aria-label", chart.name);
    }
    this.gridLayout = gridLayout(replay.numBlocks, page.usedBlocks(replay), this.grid.parentElement.clientWidth, 330);
  }

  curveData() {
    const { replay, page } = this;
    const records = replay.records.slice(0, replay.numSteps);
    const [first, second, , , , other] = page.palette.sequences;
    const budget = replay.engine.max_num_batched_tokens;
    const decodes = replay.chunkKinds.map((kinds) => kinds.filter((kind) => kind !== PREFILL).length);
    const running = records.map((r) => r.running), waiting = records.map((r) => r.waiting);
    return {
      queues: {
        name: "Running and waiting requests over the run",
        max: page.mostRequests,
        lines: [{ values: running, colour: first }, { values: waiting, colour: other, dashed: true }],
        values: (r) => ({ running: r.running, waiting: r.waiting }),
      },
      blocks: {
        name: "Owned, cached and free blocks over the run",
        ...page.scaleOf("blocks", replay.numBlocks, `there are ${plural(replay.numBlocks, "block")}`),
        areas: [
          { values: records.map((r) => replay.numBlocks - r.free_blocks), colour: first },
          { values: records.map((r) => r.cached_blocks), colour: page.palette.cached, hatched: true },
          { values: records.map((r) => r.free_blocks - r.cached_blocks), colour: page.palette.free },
        ],
        values: (r) => ({
          owned: replay.numBlocks - r.free_blocks, cached: r.cached_blocks, free: r.free_blocks - r.cached_blocks,
        }),
      },
      tokens: {
        name: "Tokens of each step",
        ...page.scaleOf("tokens", budget, `the budget is ${whole(budget)}`),
        areas: [
          { values: decodes, colour: first },
          { values: records.map((r, i) => r.num_tokens - decodes[i]), colour: second, hatched: true },
        ],
        values: (r, i) => ({ decode: decodes[i], prefill: r.num_tokens - decodes[i] }),
      },
    };
  }

  look(palette) {
    const { page, replay } = this;
    const lit = page.lit === null ? undefined : this.byKey.get(page.lit);
    return {
      palette,
      colourOf: (sequence) => page.colours.get(replay.keyOf(sequence)),
      isDim: lit === undefined ? () => false : (sequence) => sequence !== lit,
      focus: this.focus,
    };
  }

  // --- The moment ---

  show(position) {
    const { replay } = this;
    replay.seek(position);
    this.drawGrid();
    setText(this.find(".heading"), headingOf(replay, position));
    this.find(".events").replaceChildren(...eventsOf(replay, position).map((event) => this.sentence(event)));
    this.showCounts();
    this.showTexts();
    this.moveCursors();
  }

  drawGrid() {
    drawGrid(this.grid, this.replay, this.gridLayout, this.look(this.page.palette));
  }

  moveCursors() {
    const { page } = this;
    const move = (cursor, axis) => { cursor.style.transform = `translateX(${axis.cursor(page.stops[page.stop])}px)`; };
    move(this.chart.querySelector(".cursor"), this.axis);
    for (const cursor of this.body.querySelectorAll(".cursor")) move(cursor, this.curveAxis);
  }

  showCounts() {
    const { replay } = this;
    const owned = replay.owners.filter((owners) => owners.length > 0).length;
    const shared = replay.owners.filter((owners) => owners.length > 1).length;
    const cached = replay.cached.reduce((a, b) => a + b, 0);
    const free = replay.numBlocks - owned - cached;
    const text = `${whole(replay.numBlocks)} blocks of ${plural(replay.blockSize, "token")}: ` +
      `${whole(owned)} owned (${whole(shared)} shared), ${whole(cached)} cached, ${whole(free)} free`;
    const hidden = replay.numBlocks - this.gridLayout.shown;
    setText(this.find(".pages-count"), text);
    setText(this.find(".pages-rest"), hidden ? `… and ${whole(hidden)} that were never used` : "");
    this.grid.setAttribute("aria-label", `${text}. Arrow keys go from block to block.`);
    const i = Math.min(replay.position, replay.numSteps) - 1;
    for (const figure of this.body.querySelectorAll(".curves figure")) {
      const values = i < 0 ? {} : this.curves[figure.dataset.chart].values(replay.records[i], i);
      for (const output of figure.querySelectorAll("output")) {
        const value = values[output.dataset.value];
        setText(output, value === undefined ? "" : value.toLocaleString("en"));
      }
    }
  }

  sentence(event) {
    const made = element("span", `event ${event.kind}`);
    for (const part of event.parts) made.append(typeof part === "number" ? this.nameOf(part) : part);
    return made;
  }

  nameOf(sequence) {
    const key = this.replay.keyOf(sequence);
    const made = element("span", key === this.page.lit ? "name lit" : "name", this.replay.labelOf(sequence));
    made.dataset.key = key;
    made.style.setProperty("--own", this.page.palette.of(this.page.colours.get(key)));
    return made;
  }

  // --- Texts ---

  // Cards of all sequences while they are few; else of those that run, and of the chosen one. Always in order of
  // arrival, so that a card stays where it is, and is at the same place in both runs.
  sequencesWithCards() {
    const { replay, page } = this;
    if (replay.sequences.length <= MOST_TEXTS) {
      return replay.sequences.map((_, sequence) => sequence);
    }
    const chosen = page.chosen === null ? undefined : this.byKey.get(page.chosen);
    const running = replay.seats.filter((sequence) => sequence >= 0 && sequence !== chosen);
    const rest = running.sort((a, b) => a - b).slice(0, MOST_TEXTS - 1);
    return (chosen === undefined ? rest : [chosen, ...rest]).sort((a, b) => a - b);
  }

  showTexts() {
    const { replay, page } = this;
    const shown = this.sequencesWithCards();
    const few = shown.length === replay.sequences.length;
    setText(this.find(".texts-count"), few
      ? `${plural(shown.length, "sequence")}; click one to follow it`
      : `${shown.length} of ${replay.sequences.length.toLocaleString("en")} sequences: those that run`);
    const fresh = new Set(replay.record ? replay.record.sampled.map(([sequence]) => sequence) : []);
    const list = this.find(".texts");
    const cards = shown.map((sequence) => this.cardOf(sequence));
    if (cards.length !== list.children.length || cards.some((card, i) => card !== list.children[i])) {
      const focused = document.activeElement;
      list.replaceChildren(...cards);
      if (focused !== document.activeElement && list.contains(focused)) focused.focus({ preventScroll: true });
    }
    shown.forEach((sequence, i) => this.fillCard(cards[i], sequence, fresh.has(sequence)));
    if (this.cards.size > 4 * MOST_TEXTS && !few) this.cards = new Map(shown.map((s, i) => [s, cards[i]]));
    for (const card of cards) {
      card.classList.toggle("chosen", card.dataset.key === page.chosen);
      card.classList.toggle("hot", card.dataset.key === page.lit);
      card.firstChild.setAttribute("aria-pressed", String(card.dataset.key === page.chosen));
    }
  }

  // Scrolls the list, and not the page, to the card of a request.
  showCard(key) {
    this.showTexts();
    const list = this.find(".texts");
    const card = [...list.children].find((child) => child.dataset.key === key);
    if (!card) return;
    const [inner, outer] = [card.getBoundingClientRect(), list.getBoundingClientRect()];
    if (inner.top < outer.top || inner.bottom > outer.bottom) list.scrollTop += inner.top - outer.top - 4;
  }

  cardOf(sequence) {
    if (this.cards.has(sequence)) return this.cards.get(sequence);
    const { replay } = this;
    const name = element("button", "", element("b", "", replay.labelOf(sequence)));
    const topic = replay.topicOf(sequence);
    // Where the paragraph below begins with the same words, once is enough.
    if (topic && !promptOf(replay.sequences[sequence], false).startsWith(topic.replace(/…$/, ""))) {
      name.append(element("span", "topic", `“${topic}”`));
    }
    name.append(element("span", "state"), element("span", "note"));
    name.type = "button";
    name.title = replay.sequences[sequence].request_id;
    const text = element("p", "", element("span", "prompt"), element("span", "answer"), element("mark", "newest"));
    const card = element("div", "text", name, text);
    card.dataset.key = replay.keyOf(sequence);
    card.dataset.sequence = sequence;
    this.cards.set(sequence, card);
    return card;
  }

  fillCard(card, sequence, isFresh) {
    const { replay, page } = this;
    const s = replay.sequences[sequence];
    const made = replay.generated[sequence];
    const state = replay.stateOf(sequence);
    const [button, text] = card.children;
    card.style.setProperty("--own", page.palette.of(page.colours.get(card.dataset.key)));
    card.classList.toggle("away", /^(not|ended)/.test(state));
    const [label, note] = button.querySelectorAll(".state, .note");
    setText(label, state);
    label.dataset.state = state.split(/\W/)[0];
    const priority = replay.byPriority ? `priority ${s.priority}, ` : "";
    setText(note, `${priority}${s.num_prompt_tokens} + ${plural(made, "token")}`);
    const pieces = s.pieces !== null ? s.pieces : s.tokens.map((token) => ` ${token}`);
    const old = isFresh ? made - 1 : made;
    const isChosen = card.dataset.key === page.chosen;
    setText(text.querySelector(".prompt"), promptOf(s, isChosen));
    const answer = pieces.slice(0, old).join("");
    setText(text.querySelector(".answer"), isChosen ? answer : endOf(answer, 240));
    setText(text.querySelector(".newest"), isFresh ? pieces[old] || "∅" : "");
  }

  // --- Pointers and keys ---

  listen() {
    const { page, replay } = this;
    const point = (event) => {
      const block = blockAt(this.gridLayout, event.offsetX, event.offsetY);
      this.focusOn(block, event.clientX, event.clientY);
    };
    this.grid.addEventListener("pointermove", point);
    this.grid.addEventListener("pointerdown", point); // a finger does not hover
    this.grid.addEventListener("pointerleave", () => this.focusOn(-1));
    this.grid.addEventListener("blur", () => this.focusOn(-1));
    this.grid.addEventListener("click", (event) => {
      const block = blockAt(this.gridLayout, event.offsetX, event.offsetY);
      page.choose(block >= 0 && replay.owners[block].length ? replay.keyOf(replay.owners[block][0]) : null);
    });
    this.grid.addEventListener("keydown", (event) => this.walk(event));

    const under = (event) => seatAt(replay, this.ganttLayout, this.axis, event.offsetX, event.offsetY);
    this.gantt.addEventListener("pointermove", (event) => {
      const seat = under(event);
      page.light(seat && seat.sequence >= 0 ? replay.keyOf(seat.sequence) : null);
      page.tip(seat && this.describeSeat(seat), event.clientX, event.clientY);
    });
    this.gantt.addEventListener("pointerleave", () => { page.light(null); page.tip(null); });
    this.gantt.addEventListener("click", (event) => {
      const seat = under(event);
      if (seat) page.goTo(this, seat.i + 1);
    });

    // Names in sentences, and cards.
    const keyUnder = (event) => {
      const named = event.target.closest("[data-key]");
      return named ? named.dataset.key : null;
    };
    this.body.addEventListener("pointerover", (event) => {
      if (!event.target.closest("canvas")) page.light(keyUnder(event));
    });
    this.body.addEventListener("pointerleave", () => page.light(null));
    this.body.addEventListener("click", (event) => {
      const isCard = event.target.closest(".text button, .name");
      if (isCard) page.choose(keyUnder(event) === page.chosen ? null : keyUnder(event));
    });
  }

  focusOn(block, x, y) {
    if (block !== this.focus) {
      this.focus = block;
      const owners = block >= 0 ? this.replay.owners[block] : [];
      this.page.light(owners.length === 1 ? this.replay.keyOf(owners[0]) : null);
      this.drawGrid();
    }
    this.page.tip(block >= 0 ? this.describeBlock(block) : null, x, y);
  }

  // From block to block with the keyboard.
  walk(event) {
    const columns = this.gridLayout.columns;
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const block = this.focus < 0 ? 0 : Math.max(0, Math.min(this.gridLayout.shown - 1, this.focus + move));
    const box = this.grid.getBoundingClientRect();
    const { cell } = this.gridLayout;
    this.focusOn(block, box.left + (block % columns) * cell + cell, box.top + Math.floor(block / columns) * cell + cell);
    this.grid.setAttribute("aria-label", this.describeBlock(block));
  }

  describeBlock(block) {
    const { replay } = this;
    const owners = replay.owners[block];
    const size = replay.blockSize;
    const lines = [];
    if (!owners.length) {
      lines.push(replay.cached[block]
        ? `Block ${block}: cached. Nobody owns it, but its ${size} tokens can still be found.`
        : `Block ${block}: free.`);
    } else {
      const many = owners.length > 1 ? `, shared by ${owners.length}` : "";
      lines.push(`Block ${block}: ${replay.filled[block]} of ${size} tokens computed, ` +
        `reference count ${owners.length}${many}`);
      for (const sequence of owners.slice(0, 4)) lines.push(this.describeOwner(sequence, block));
      if (owners.length > 4) lines.push(`and ${owners.length - 4} more`);
    }
    return lines.join("\n");
  }

  // Which positions of a sequence are in the block, and what is written there.
  describeOwner(sequence, block) {
    const { replay } = this;
    const s = replay.sequences[sequence];
    const first = replay.tables.get(sequence).indexOf(block) * replay.blockSize;
    const end = first + replay.blockSize;
    const prompt = s.num_prompt_tokens;
    const parts = [];
    if (first < prompt) parts.push(s.prompt === null ? "of its prompt" : `of its prompt “${shorten(s.prompt, 70)}”`);
    if (end > prompt && s.pieces !== null) {
      const last = Math.min(end - prompt, replay.generated[sequence]);
      const made = s.pieces.slice(Math.max(0, first - prompt), last).join("");
      if (made) parts.push(`answer “${shorten(made, 90)}”`);
    }
    return `${replay.labelOf(sequence)}: positions ${first} to ${end - 1}${parts.length ? `, ${parts.join(", ")}` : ""}`;
  }

  describeSeat({ i, seat, sequence, kind }) {
    const { replay } = this;
    const step = `Step ${replay.records[i].step}, seat ${seat}`;
    if (kind === EMPTY) return `${step}: empty`;
    const chunk = replay.records[i].chunks.find(([s]) => s === sequence);
    const names = { [PREFILL]: "prefill", [DECODE]: "decode", [HELD]: "nothing computed", [IN_VAIN]: "computed in vain" };
    const topic = replay.topicOf(sequence);
    return `${step}: ${replay.labelOf(sequence)}, ${names[kind]}${chunk ? ` [${chunk[1]}, ${chunk[1] + chunk[2]})` : ""}` +
      (replay.byPriority ? `, priority ${replay.sequences[sequence].priority}` : "") + (topic ? `\n“${topic}”` : "");
  }
}

function endOf(text, most) {
  return text.length <= most ? text : `…${text.slice(-most).replace(/^[\udc00-\udfff]/, "")}`;
}

// The end of a prompt says more than its beginning, which is often the same for all.
function promptOf(sequence, whole) {
  if (sequence.prompt === null) return `(${plural(sequence.num_prompt_tokens, "prompt token")}) `;
  return whole ? sequence.prompt : endOf(sequence.prompt, 110);
}

// --- The page ---

class Page {
  constructor(data) {
    this.single = data.traces.length === 1;
    this.byTime = false;
    this.stop = 0; // which of this.stops is shown
    this.lit = null; // the key of the request under the pointer
    this.hovered = null;
    this.chosen = null; // and of the one that was clicked
    this.playing = false;
    this.palette = new Palette();
    this.runs = [];
    const replays = data.traces.map((trace, i) => new Replay(trace, data.names[i]));
    const kinds = replays.map((replay) => replay.engine.scheduler);
    const titles = kinds[0] !== kinds[1] ? kinds.map((kind) => `${kind} batching`) : data.names;
    replays.forEach((replay, i) => this.runs.push(new Run(this, replay, titles[i])));

    this.seats = Math.max(...replays.map((replay) => replay.numSeats));
    const most = (value) => Math.max(1, ...replays.map((replay) => (
      replay.records.reduce((a, record) => Math.max(a, value(record, replay)), 0))));
    this.mostRequests = most((record) => Math.max(record.running, record.waiting));
    this.most = {
      blocks: most((record, replay) => replay.numBlocks - record.free_blocks + record.cached_blocks),
      tokens: most((record) => record.num_tokens),
    };
    this.colours = new Map(); // the same request has the same colour in both runs
    for (const replay of replays) this.giveColours(replay);
    this.get = (id) => document.getElementById(id);
    this.build();
    this.listen();
    this.setAxis(false);
    if (!this.readHash()) this.show(this.opening());
  }

  // Where there is most to see: the first step in which somebody decodes while most sequences run.
  opening() {
    let best = 0, most = 0;
    for (let i = 0; i < this.stops.length - 1; ++i) {
      const active = this.runs.map((run) => run.replay).filter((replay) => i < replay.numSteps);
      if (!active.every((replay) => replay.chunkKinds[i].includes(DECODE))) continue;
      const running = active.reduce((sum, replay) => sum + replay.records[i].running, 0);
      if (running > most) [best, most] = [i + 1, running];
    }
    return best || 1;
  }

  // How far a vertical axis goes: to the limit if much of it is used, else to what the runs used at most.
  scaleOf(what, limit, words) {
    const used = this.most[what];
    if (2 * used >= limit) return { max: limit, limit: what === "tokens" ? limit : 0, scale: "" };
    const whose = this.single ? "run's" : "runs'";
    return { max: used, limit: 0, scale: `axis up to ${whole(used)}, the ${whose} maximum; ${words}` };
  }

  // How many blocks are shown: those up to the last one that any run ever gave to somebody.
  usedBlocks(replay) {
    return Math.min(replay.numBlocks, Math.max(1, ...this.runs.map((run) => run.replay.usedBlocks)));
  }

  // Whoever sits down gets the colour that is least used by those who sit there, and among these the one that was given
  // least recently.
  giveColours(replay) {
    const given = this.palette.sequences.map((_, colour) => colour); // least recently first
    for (const visit of [...visitsOf(replay)].sort((a, b) => a.from - b.from || a.seat - b.seat)) {
      const key = replay.keyOf(visit.sequence);
      if (this.colours.has(key)) continue;
      const uses = given.map(() => 0);
      for (let seat = 0; seat < replay.numSeats; ++seat) {
        const sequence = replay.seatSequence[visit.from * replay.numSeats + seat];
        const colour = sequence < 0 ? undefined : this.colours.get(replay.keyOf(sequence));
        if (colour !== undefined) uses[colour] += 1;
      }
      const colour = given.reduce((best, other) => (uses[other] < uses[best] ? other : best));
      given.push(...given.splice(given.indexOf(colour), 1));
      this.colours.set(key, colour);
    }
    // Those who never sat.
    replay.sequences.forEach((_, sequence) => {
      const key = replay.keyOf(sequence);
      if (!this.colours.has(key)) this.colours.set(key, sequence % given.length);
    });
  }

  build() {
    const facts = (engine) => `${engine.model} on ${engine.device}, ` +
      `${whole(engine.num_blocks)} blocks of ${engine.block_size}, ${plural(engine.max_num_seqs, "seat")}, ` +
      `up to ${plural(engine.max_num_batched_tokens, "token")} a step, ` +
      `prefix cache ${engine.enable_prefix_caching ? "on" : "off"}` +
      (engine.scheduling_policy === "priority" ? ", smaller priority numbers go first" : "");
    const engines = this.runs.map((run) => run.replay.engine);
    const all = engines.map((engine) => `${engine.scheduler} batching: ${facts(engine)}`);
    const same = engines.length === 2 && facts(engines[0]) === facts(engines[1]);
    setText(this.get("about"), same ? facts(engines[0]) : all.join(" | "));
    this.get("runs").classList.toggle("two", !this.single);
    const [replays, titles] = [this.runs.map((run) => run.replay), this.runs.map((run) => run.title)];
    const result = this.single ? "" : comparisonOf(...replays, titles);
    setText(this.get("result"), result);
    this.get("result").hidden = !result;
    for (const run of this.runs) {
      this.get("seats").append(run.chart);
      this.get("runs").append(run.body);
      run.drawSummary(this.seats);
    }
  }

  // --- The moment ---

  setAxis(byTime) {
    const time = this.timeNow();
    const position = this.runs[0].replay.position;
    this.byTime = byTime;
    const replays = this.runs.map((run) => run.replay);
    const longest = Math.max(...replays.map((replay) => replay.records.length));
    if (byTime) {
      const starts = new Set(replays.flatMap((replay) => replay.starts));
      this.stops = [-1, ...Array.from(starts).sort((a, b) => a - b)];
      this.domain = Math.max(...replays.map((replay) => replay.ends[replay.records.length - 1]));
    } else {
      this.stops = Array.from({ length: longest + 1 }, (_, i) => i);
      this.domain = Math.max(...replays.map((replay) => replay.numSteps));
    }
    this.get("slider").max = this.stops.length - 1;
    for (const radio of document.getElementsByName("axis")) radio.checked = (radio.value === "time") === byTime;
    this.drawWhole();
    this.show(byTime ? this.stopAt(time) : position);
  }

  // By the clock of the first run's steps: when the shown step began.
  timeNow() {
    if (this.byTime && this.stops) return this.stops[this.stop];
    const { replay } = this.runs[0];
    return replay.position > 0 ? replay.starts[replay.position - 1] : -1;
  }

  stopAt(time) {
    let stop = 0;
    while (stop + 1 < this.stops.length && this.stops[stop + 1] <= time) stop += 1;
    return stop;
  }

  positionOf(replay) {
    return this.byTime ? replay.positionAt(this.stops[this.stop]) : Math.min(this.stop, replay.records.length);
  }

  show(stop) {
    this.stop = Math.max(0, Math.min(this.stops.length - 1, Math.round(stop)));
    for (const run of this.runs) run.show(this.positionOf(run.replay));
    const slider = this.get("slider");
    slider.value = this.stop;
    const last = this.stops.length - 1;
    const time = Math.max(0, this.stops[this.stop]);
    const end = Math.max(...this.runs.map((run) => run.replay.numSteps));
    const words = this.byTime
      ? `${seconds(time)} of ${seconds(this.domain)}`
      : this.stop > end ? `end, ${end} steps` : `step ${this.stop} of ${end}`;
    setText(this.get("moment"), words);
    slider.setAttribute("aria-valuetext", words);
    if (this.stop === last) this.play(false);
    this.keepHash();
  }

  // To a position of one run.
  goTo(run, position) {
    this.play(false);
    this.show(this.byTime ? this.stopAt(run.replay.starts[position - 1]) : position);
  }

  // --- The address keeps the moment ---

  keepHash() {
    clearTimeout(this.hashTimer);
    // Not at every frame: browsers limit how often the address may change.
    this.hashTimer = setTimeout(() => this.writeHash(), this.playing ? 500 : 60);
  }

  writeHash() {
    const value = this.byTime ? `time=${Math.max(0, this.stops[this.stop])}` : `step=${this.stop}`;
    this.hash = `#${this.stop === 0 ? value.replace(/=.*/, "=0") : value}`;
    try {
      history.replaceState(null, "", this.hash);
    } catch (error) {
      // An opaque origin, a sandboxed frame for example, has no history.
    }
  }

  readHash() {
    const match = /^#(step|time)=(\d+(?:\.\d+)?(?:e-\d+)?)$/.exec(location.hash);
    if (!match) return false;
    const byTime = match[1] === "time";
    if (byTime !== this.byTime) this.setAxis(byTime);
    this.show(byTime ? this.stopAt(Number(match[2])) : Number(match[2]));
    return true;
  }

  // --- Playing ---

  play(on) {
    if (on === this.playing) return;
    this.playing = on;
    const button = this.get("play");
    setText(button, on ? "Pause" : "Play");
    button.setAttribute("aria-pressed", String(on));
    cancelAnimationFrame(this.frame);
    if (!on) return;
    if (this.stop === this.stops.length - 1) this.show(0);
    // In steps, or in seconds of the run: then a long step stays for longer.
    const longest = this.runs.map((run) => run.replay).reduce((a, b) => (a.numSteps > b.numSteps ? a : b));
    const perStep = this.byTime ? longest.seconds / longest.numSteps : 1;
    let now = Math.max(0, this.byTime ? this.stops[this.stop] : this.stop), last = performance.now();
    const tick = (time) => {
      if (!this.playing) return;
      now += (Math.max(0, time - last) / 1000) * Number(this.get("speed").value) * perStep;
      last = time;
      const stop = this.byTime ? this.stopAt(now) : Math.floor(now);
      if (stop !== this.stop) this.show(stop);
      if (this.playing) this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  // --- One request, everywhere ---

  light(key) {
    this.hovered = key;
    this.applyLight();
  }

  choose(key) {
    this.chosen = key;
    this.applyLight(true);
    if (key !== null) for (const run of this.runs) run.showCard(key);
  }

  applyLight(always = false) {
    const lit = this.hovered !== null ? this.hovered : this.chosen;
    if (lit === this.lit && !always) return;
    this.lit = lit;
    if (this.lightFrame) return;
    this.lightFrame = requestAnimationFrame(() => {
      this.lightFrame = 0;
      for (const run of this.runs) {
        drawGantt(run.gantt, run.replay, run.ganttLayout, run.axis, { ...run.look(this.palette), strong: !this.single });
        run.drawGrid();
        run.showTexts();
        for (const name of run.body.querySelectorAll(".name")) {
          name.classList.toggle("lit", name.dataset.key === this.lit);
        }
      }
    });
  }

  tip(text, x, y) {
    const tip = this.get("tip");
    tip.hidden = !text;
    if (!text) return;
    setText(tip, text);
    const left = Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8);
    const top = y + 16 + tip.offsetHeight > window.innerHeight ? y - tip.offsetHeight - 10 : y + 16;
    tip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
  }

  // --- Size, colours, keys ---

  drawWhole() {
    for (const run of this.runs) run.drawWhole();
  }

  redraw() {
    this.palette = new Palette();
    this.drawWhole();
    this.show(this.stop);
  }

  listen() {
    const { get } = this;
    get("slider").addEventListener("input", () => {
      this.play(false);
      cancelAnimationFrame(this.slideFrame);
      this.slideFrame = requestAnimationFrame(() => this.show(Number(get("slider").value)));
    });
    get("play").addEventListener("click", () => this.play(!this.playing));
    get("previous").addEventListener("click", () => { this.play(false); this.show(this.stop - 1); });
    get("next").addEventListener("click", () => { this.play(false); this.show(this.stop + 1); });
    for (const radio of document.getElementsByName("axis")) {
      radio.addEventListener("change", () => { this.play(false); this.setAxis(radio.value === "time"); });
    }
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => { if (location.hash !== this.hash) this.readHash(); });
    window.addEventListener("resize", () => {
      cancelAnimationFrame(this.resizeFrame);
      this.resizeFrame = requestAnimationFrame(() => this.redraw());
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const on = event.target;
    if (on.matches("select, input[type=radio]")) return; // they have a use for these keys themselves
    const scrolls = on.matches(".texts, .events") && /^(Home|End| )$/.test(event.key);
    const presses = on.matches("button") && event.key === " ";
    if (scrolls || presses) return;
    const far = event.shiftKey ? 10 : 1;
    const to = {
      ArrowLeft: this.stop - far, ArrowRight: this.stop + far,
      Home: 0, End: this.stops.length - 1,
    }[event.key];
    if (to !== undefined) {
      this.play(false);
      this.show(to);
    } else if (event.key === " ") {
      this.play(!this.playing);
    } else if (event.key === "Escape") {
      this.choose(null);
      this.tip(null);
      return;
    } else {
      return;
    }
    event.preventDefault();
  }
}

const page = new Page(JSON.parse(document.getElementById("data").textContent));
