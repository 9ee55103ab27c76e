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

  if (record.released.length) add("release", "released", ...names(record.released));
  if (record.preempted.length) add("preempt", "preempted", ...names(record.preempted), ": no block was left");
  for (const [sequence, found] of record.admitted.slice(0, MOST_NAMES)) {
    const note = found ? ` (${plural(found, "token")} from the prefix cache)` : "";
    add("admit", "admitted ", sequence, note);
  }
  if (record.admitted.length > MOST_NAMES) {
    add("admit", `admitted ${plural(record.admitted.length - MOST_NAMES, "more sequence")}`);
  }

  for (const [sequence, tokens] of replay.foundLater[position - 1].slice(0, MOST_NAMES)) {
    add("admit", sequence, ` found ${plural(tokens, "more token")} in the prefix cache`);
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
  if (inVain.length) add("vain", "in vain, they had ended:", ...names(inVain));

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
    if (reason !== null) add("finish", sequence, ` finished: ${reason}`);
  }
  if (!events.length) add("note", "nothing to do");
  return events;
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
  return [
    ["of seat-time was empty", percent(empty.time), `${plural(seats, "seat")}${allowed}`],
    ["of seat-steps were filled", percent(1 - empty.steps), "somebody sat there"],
    ["steps", whole(replay.numSteps), `in ${seconds(replay.seconds)}`],
    ["tokens computed", whole(replay.tokens), `${(replay.tokens / replay.numSteps).toFixed(1)} a step`],
    ["tokens generated", whole(replay.numGenerated), `${whole(perSecond)} a second`],
    ["tokens from the prefix cache", whole(replay.foundTokens), plural(replay.preemptions.length, "preemption")],
  ];
}
