// The pictures: KV pages, seats over time, curves. All are canvases, because a trace may have 10,000 blocks and 2,000
// steps. Each function draws a whole picture; what moves with the slider (the cursor) is an element of its own.

// --- Colours and patterns ---

// Those of page.css, which has a set for light and one for dark.
class Palette {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    for (const name of ["ink", "muted", "line", "panel", "free", "cached", "hatch", "accent", "alarm"]) {
      this[name] = get(`--${name}`);
    }
    this.sequences = [0, 1, 2, 3, 4, 5, 6].map((i) => get(`--c${i}`));
    this.font = style.fontFamily;
    this.patterns = new Map();
  }

  of(colour) {
    return this.sequences[colour % this.sequences.length];
  }

  // Black or white, whichever can be read better on a colour #rrggbb.
  textOn(colour) {
    const [r, g, b] = [1, 3, 5].map((i) => {
      const c = parseInt(colour.slice(i, i + 2), 16) / 255;
      return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
    return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 ? "#ffffff" : "#000000";
  }

  // Diagonal lines; rising ones or falling ones.
  hatching(context, colour, distance, width, rising = true) {
    const key = `${colour} ${distance} ${width} ${rising}`;
    if (!this.patterns.has(key)) {
      const ratio = window.devicePixelRatio || 1;
      const tile = document.createElement("canvas");
      const size = Math.max(2, Math.round(distance * ratio));
      tile.width = tile.height = size;
      const c = tile.getContext("2d");
      c.strokeStyle = colour;
      c.lineWidth = width * ratio;
      for (const shift of [-size, 0, size]) {
        c.beginPath();
        c.moveTo(shift - 1, rising ? size + 1 : -1);
        c.lineTo(shift + size + 1, rising ? -1 : size + 1);
        c.stroke();
      }
      const pattern = context.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(1 / ratio));
      this.patterns.set(key, pattern);
    }
    return this.patterns.get(key);
  }
}

// Sets the canvas to a size in CSS pixels, sharp on any screen, and returns its context, cleared.
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// --- The KV pages ---

// The largest cells with which the blocks that are used fit into the space. The last row is filled up with others.
function gridLayout(numBlocks, used, width, maxHeight) {
  let cell = 40;
  while (cell > 3 && Math.ceil(used / Math.floor(width / cell)) * cell > maxHeight) cell -= 1;
  const columns = Math.max(1, Math.min(numBlocks, Math.floor(width / cell)));
  const rows = Math.ceil(used / columns);
  return { cell, columns, width, height: rows * cell, shown: Math.min(numBlocks, rows * columns) };
}

function blockAt(layout, x, y) {
  const column = Math.floor(x / layout.cell), row = Math.floor(y / layout.cell);
  const block = row * layout.columns + column;
  return column >= 0 && column < layout.columns && row >= 0 && block < layout.shown ? block : -1;
}

const MOST_STRIPES = 4;

// `look`: {palette, colourOf(sequence), isDim(sequence), focus: block or -1}
function drawGrid(canvas, replay, layout, look) {
  const { cell, columns } = layout;
  const { palette } = look;
  const c = prepare(canvas, layout.width, layout.height);
  const gap = cell >= 12 ? 3 : cell >= 6 ? 1 : 0;
  const size = cell - gap;
  const large = cell >= 12;
  const written = new Set(large ? writtenBlocks(replay) : []);
  c.textAlign = "center";
  c.textBaseline = "middle";
  for (let block = 0; block < layout.shown; ++block) {
    const x = (block % columns) * cell + gap / 2, y = Math.floor(block / columns) * cell + gap / 2;
    const owners = replay.owners[block];
    if (owners.length === 0) {
      c.fillStyle = palette.free;
      c.fillRect(x, y, size, size);
      if (replay.cached[block]) {
        c.fillStyle = palette.hatching(c, palette.cached, large ? 6 : 3, large ? 1.4 : 1);
        c.fillRect(x, y, size, size);
      }
      if (large) outline(c, x, y, size, size, palette.line, 1);
      continue;
    }
    const dim = owners.every(look.isDim);
    c.globalAlpha = dim ? 0.25 : 1;
    const stripes = owners.slice(0, MOST_STRIPES);
    const share = replay.filled[block] / replay.blockSize;
    stripes.forEach((sequence, k) => {
      const left = x + (size * k) / stripes.length, wide = size / stripes.length;
      const colour = palette.of(look.colourOf(sequence));
      if (large) {
        c.fillStyle = palette.panel;
        c.fillRect(left, y, wide, size);
        c.globalAlpha = dim ? 0.08 : 0.22;
        c.fillStyle = colour;
        c.fillRect(left, y, wide, size);
        c.globalAlpha = dim ? 0.25 : 1;
        c.fillRect(left, y + size * (1 - share), wide, size * share);
      } else {
        c.fillStyle = colour;
        c.fillRect(left, y, wide, size);
      }
    });
    if (large) outline(c, x, y, size, size, palette.of(look.colourOf(owners[0])), 1);
    if (owners.length > 1 && cell >= 18) badge(c, palette, `×${owners.length}`, x + size / 2, y + size / 2, cell);
    else if (cell >= 24) badge(c, palette, replay.labelOf(owners[0]), x + size / 2, y + size / 2, cell);
    if (written.has(block)) outline(c, x - 1, y - 1, size + 2, size + 2, palette.ink, 2);
    c.globalAlpha = 1;
  }
  if (look.focus >= 0) {
    const x = (look.focus % columns) * cell, y = Math.floor(look.focus / columns) * cell;
    outline(c, x - 1, y - 1, cell + 2, cell + 2, palette.accent, 3);
  }
}

// Those that the last record wrote keys and values to.
function writtenBlocks(replay) {
  const blocks = [];
  if (!replay.record) return blocks;
  for (const [sequence, start, count] of replay.record.chunks) {
    const table = replay.tables.get(sequence) || [];
    const last = Math.floor((start + count - 1) / replay.blockSize);
    for (let at = Math.floor(start / replay.blockSize); at <= last && at < table.length; ++at) blocks.push(table[at]);
  }
  return blocks;
}

function outline(c, x, y, width, height, colour, line) {
  c.strokeStyle = colour;
  c.lineWidth = line;
  c.strokeRect(x + line / 2, y + line / 2, width - line, height - line);
}

// A short text on a plate of its own, so that it can be read on every colour.
function badge(c, palette, text, x, y, cell) {
  const height = Math.min(13, cell * 0.5);
  c.font = `600 ${height - 2}px ${palette.font}`;
  const width = c.measureText(text).width + 4;
  if (width > cell - 3) return;
  c.fillStyle = palette.panel;
  c.fillRect(x - width / 2, y - height / 2, width, height);
  c.fillStyle = palette.ink;
  c.fillText(text, x, y + 0.5);
}

// --- The horizontal axis, which all pictures of the run share ---

const GUTTER = 30; // for the labels of the vertical axis
const MARGIN = 8;

// Steps or seconds to pixels. `domain` is the largest value, of all runs.
function makeAxis(replay, byTime, domain, width) {
  const inner = width - GUTTER - MARGIN;
  const scale = inner / (domain || 1);
  const start = byTime ? (i) => replay.starts[i] : (i) => i;
  const end = byTime ? (i) => replay.ends[i] : (i) => Math.min(i + 1, replay.numSteps);
  // Edges lie between the pixels of the screen: where one box ends and the next begins, nothing shines through.
  const ratio = window.devicePixelRatio || 1;
  const snap = (x) => Math.round(x * ratio) / ratio;
  return {
    byTime, domain, width, inner,
    pixel: 1 / ratio,
    left: (i) => snap(GUTTER + start(i) * scale),
    right: (i) => snap(GUTTER + end(i) * scale),
    at: (value) => GUTTER + value * scale,
    value: (x) => (x - GUTTER) / scale,
    // Where the cursor stands: at that time, or after so many steps.
    // A run that is done stays at its end.
    cursor: (value) => GUTTER + Math.min(domain, end(replay.numSteps - 1), Math.max(0, value)) * scale,
  };
}

function ticks(domain, most) {
  if (domain <= 0) return [0];
  const raw = domain / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  return Array.from({ length: Math.floor(domain / step + 1e-9) + 1 }, (_, i) => i * step);
}

function drawAxis(c, palette, axis, y) {
  c.fillStyle = palette.muted;
  c.font = `11px ${palette.font}`;
  c.textBaseline = "top";
  const marks = ticks(axis.domain, Math.max(2, axis.inner / 90)).filter((v) => axis.byTime || Number.isInteger(v));
  const unit = axis.byTime ? (axis.domain < 1 ? "ms" : "s") : "steps";
  for (const value of marks) {
    const x = axis.at(value);
    c.fillRect(x, y, 1, 4);
    const shown = axis.byTime && axis.domain < 1 ? value * 1000 : value;
    const text = `${Number(shown.toPrecision(6)).toLocaleString("en")}${value === 0 ? ` ${unit}` : ""}`;
    c.textAlign = value === 0 ? "left" : x > axis.width - 25 ? "right" : "center";
    c.fillText(text, value === 0 ? x - 2 : x, y + 6);
  }
}

// --- Seats over time ---

function ganttLayout(seats, maxHeight) {
  const row = Math.max(2, Math.min(22, Math.floor(maxHeight / seats)));
  return { row, seats, height: row * seats + 24 };
}

// `look`: as for the grid, and strong: whether empty seats are to jump to the eye
function drawGantt(canvas, replay, layout, axis, look) {
  const { row, seats } = layout;
  const { palette } = look;
  const c = prepare(canvas, axis.width, layout.height);
  const space = row >= 8 ? 2 : row >= 4 ? 1 : 0;
  const ends = axis.right(replay.numSteps - 1);
  c.fillStyle = palette.free;
  c.fillRect(GUTTER, 0, ends - GUTTER, row * seats);
  c.fillStyle = palette.hatching(c, palette.hatch, look.strong ? 6 : 9, look.strong ? 2 : 0.8, false);
  c.fillRect(GUTTER, 0, ends - GUTTER, row * seats);
  for (const visit of visitsOf(replay)) {
    const y = visit.seat * row;
    const colour = palette.of(look.colourOf(visit.sequence));
    for (const run of visit.runs) {
      c.fillStyle = palette.panel; // over the hatching of an empty seat
      c.fillRect(axis.left(run.from), y, axis.right(run.to) - axis.left(run.from), row);
    }
    c.globalAlpha = look.isDim(visit.sequence) ? 0.22 : 1;
    for (const run of visit.runs) {
      const x = axis.left(run.from), width = Math.max(axis.pixel, axis.right(run.to) - x);
      c.fillStyle = colour;
      drawRun(c, palette, run.kind, colour, x, y + space / 2, width, row - space);
    }
    c.globalAlpha = 1;
    nameVisit(c, replay, look, axis, visit, y, row);
  }
  drawPreemptions(c, replay, palette, axis, row);
  c.fillStyle = palette.muted;
  c.font = `11px ${palette.font}`;
  c.textAlign = "right";
  c.textBaseline = "middle";
  const every = [1, 2, 5, 10, 20, 50, 100].find((number) => number * row >= 13) || 200;
  for (let seat = 0; seat < seats; seat += every) c.fillText(seat, GUTTER - 6, seat * row + Math.max(row, 11) / 2);
  drawDone(c, replay, palette, axis, ends, (row * seats) / 2);
  drawAxis(c, palette, axis, row * seats + 3);
}

// Where a run ends before the axis does: when, in as many words as there is room for. The heading says it too.
function drawDone(c, replay, palette, axis, ends, y) {
  const room = axis.width - ends - 10;
  const end = axis.byTime ? seconds(replay.seconds) : plural(replay.numSteps, "step");
  c.textAlign = "left";
  c.fillStyle = palette.ink;
  c.font = `600 12px ${palette.font}`;
  const choices = [`◂ done ${axis.byTime ? "at" : "in"} ${end}`, `◂ ${end}`, "◂ done"];
  const words = choices.find((text) => c.measureText(text).width <= room);
  if (words !== undefined && ends < axis.width - MARGIN - 1) c.fillText(words, ends + 8, y);
}

// Who sat where, and when: {seat, sequence, from, to, runs: [{kind, from, to}]}, from and to counted in steps.
function visitsOf(replay) {
  if (replay.visits) return replay.visits;
  replay.visits = [];
  for (let seat = 0; seat < replay.numSeats; ++seat) {
    let visit = null, run = null;
    for (let i = 0; i < replay.numSteps; ++i) {
      const sequence = replay.seatSequence[i * replay.numSeats + seat];
      const kind = replay.seatKind[i * replay.numSeats + seat];
      if (!visit || visit.sequence !== sequence) {
        visit = sequence < 0 ? null : { seat, sequence, from: i, to: i, runs: [] };
        if (visit) replay.visits.push(visit);
        run = null;
      }
      if (!visit) continue;
      visit.to = i;
      // Prefill chunks stay apart: each is a decision. So do steps between which the engine had nothing to do.
      const adjoins = i > 0 && replay.starts[i] - replay.ends[i - 1] < 1e-3;
      if (run && run.kind === kind && kind !== PREFILL && adjoins) run.to = i;
      else visit.runs.push((run = { kind, from: i, to: i }));
    }
  }
  return replay.visits;
}

function drawRun(c, palette, kind, colour, x, y, width, height) {
  if (kind === PREFILL) {
    c.fillRect(x, y, width, height);
    if (height >= 6) {
      c.fillStyle = palette.hatching(c, palette.textOn(colour), 5, 1);
      c.globalAlpha *= 0.6;
      c.fillRect(x, y, width, height);
      c.globalAlpha /= 0.6;
      if (width >= 4) outline(c, x, y, width, height, palette.ink, 1);
    }
  } else if (kind === DECODE) {
    const rim = height >= 6 ? Math.round(height * 0.17) : 0;
    c.fillRect(x, y + rim, width, height - 2 * rim);
  } else if (kind === HELD) {
    c.fillRect(x, y + Math.max(0, Math.round(height / 2) - 1), width, Math.min(2, height));
  } else {
    outline(c, x, y, width, height, palette.alarm, 1);
    c.beginPath();
    c.moveTo(x, y);
    c.lineTo(x + width, y + height);
    c.moveTo(x, y + height);
    c.lineTo(x + width, y);
    c.stroke();
  }
}

function nameVisit(c, replay, look, axis, visit, y, row) {
  if (row < 14) return;
  const x = axis.left(visit.from), width = axis.right(visit.to) - x;
  c.font = `600 11px ${look.palette.font}`;
  const text = replay.labelOf(visit.sequence);
  const needed = Math.ceil(c.measureText(text).width) + 6;
  // After the prefill: its stripes say something too. Where the bar is too short, the pointer finds the name.
  const decode = visit.runs.find((run) => run.kind === DECODE);
  const left = decode ? axis.left(decode.from) : x + 2;
  if (needed > width * 0.7 || left + needed > x + width - 2) return;
  c.globalAlpha = look.isDim(visit.sequence) ? 0.4 : 1;
  c.fillStyle = look.palette.panel;
  c.fillRect(left, y + row / 2 - 7, needed, 14);
  c.fillStyle = look.palette.ink;
  c.textAlign = "left";
  c.textBaseline = "middle";
  c.fillText(text, left + 3, y + row / 2 + 0.5);
  c.globalAlpha = 1;
}

// A triangle where a sequence was thrown out.
function drawPreemptions(c, replay, palette, axis, row) {
  for (const [i, seat] of replay.preemptions) {
    if (seat < 0) continue;
    const x = axis.left(i), y = seat * row, size = Math.max(5, Math.min(9, row / 2));
    c.beginPath();
    c.moveTo(x, y + row / 2);
    c.lineTo(x + size, y + row / 2 - size);
    c.lineTo(x + size, y + row / 2 + size);
    c.closePath();
    c.fillStyle = palette.alarm;
    c.fill();
    c.strokeStyle = palette.panel;
    c.lineWidth = 1;
    c.stroke();
  }
}

function seatAt(replay, layout, axis, x, y) {
  const seat = Math.floor(y / layout.row);
  if (x < GUTTER || seat < 0 || seat >= Math.min(layout.seats, replay.numSeats)) return null;
  const value = axis.value(x);
  const i = axis.byTime ? replay.positionAt(value) - 1 : Math.floor(value);
  if (i < 0 || i >= replay.numSteps || (axis.byTime && value > replay.ends[i])) return null;
  const at = i * replay.numSeats + seat;
  return { i, seat, sequence: replay.seatSequence[at], kind: replay.seatKind[at] };
}

// --- Curves ---

const CURVE_HEIGHT = 96;

// `chart`: {max, areas: [{values, colour, hatched}] from the bottom up, lines: [{values, colour, dashed}], limit}
// The axis ends at max; what is above is cut off.
function drawCurve(canvas, replay, axis, chart, palette) {
  const height = CURVE_HEIGHT, base = height - 20, top = 6;
  const c = prepare(canvas, axis.width, height);
  const y = (value) => base - ((base - top) * value) / (chart.max || 1);
  const below = new Float64Array(replay.numSteps);
  for (const { values, colour, hatched } of chart.areas || []) {
    c.beginPath();
    for (let i = 0; i < replay.numSteps; ++i) {
      const bottom = y(below[i]);
      below[i] = Math.min(chart.max, below[i] + values[i]);
      const level = y(below[i]), x = axis.left(i);
      if (bottom > level) c.rect(x, level, Math.max(axis.pixel, axis.right(i) - x), bottom - level);
    }
    c.fillStyle = hatched ? palette.hatching(c, colour, 5, 1.4) : colour;
    c.fill();
  }
  for (const { values, colour, dashed } of chart.lines || []) {
    c.beginPath();
    for (let i = 0; i < replay.numSteps; ++i) {
      if (i === 0) c.moveTo(axis.left(0), y(values[0]));
      c.lineTo(axis.left(i), y(values[i]));
      c.lineTo(axis.right(i), y(values[i]));
    }
    c.strokeStyle = colour;
    c.lineWidth = 2;
    c.setLineDash(dashed ? [5, 3] : []);
    c.stroke();
    c.setLineDash([]);
  }
  c.fillStyle = palette.line;
  c.fillRect(GUTTER, base, axis.inner, 1);
  if (chart.limit) {
    c.fillStyle = palette.ink;
    const level = Math.round(y(chart.limit));
    for (let x = GUTTER; x < GUTTER + axis.inner; x += 6) c.fillRect(x, level, 3, 1);
  }
  c.fillStyle = palette.muted;
  c.font = `11px ${palette.font}`;
  c.textAlign = "right";
  c.textBaseline = "middle";
  c.fillText(shortNumber(chart.max), GUTTER - 4, top + 3);
  c.fillText("0", GUTTER - 4, base - 3);
  drawAxis(c, palette, axis, base + 1);
}

function shortNumber(value) {
  return value >= 10000 ? `${Math.round(value / 1000)}k` : String(value);
}
