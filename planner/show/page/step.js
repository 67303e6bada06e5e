"use strict";
// Timeline of one step by lane, predicted above measured, on the time axis of the memory plots.

// Related kinds share a colour; colours of one lane are distinguishable with colour blindness.
const FAMILIES = [
  ["forward", "forward", ["forward"]], ["recompute", "recomputed", ["recompute"]], ["backward", "backward", ["backward"]],
  ["loss", "loss and head", ["loss"]], ["norm", "squares and norms", ["square", "norm", "clip"]], ["weights", "weights up", ["read", "load", "gather", "dequantise"]],
  ["activations", "activations out and back", ["offload_activation", "fetch_activation", "offload_saved", "fetch_saved"]], ["gradients", "gradients down and added up", ["offload_gradient", "accumulate", "offload_squares", "exchange"]],
  ["update", "update", ["update", "update_on_device", "settle"]], ["speculate", "early update", ["speculate"]],
];
const familyOf = new Map(FAMILIES.flatMap(([family, , kinds]) => kinds.map((kind) => [kind, family])));
const LIGHT_INK = new Set(["forward", "loss", "gradients", "weights"]); // bars dark enough for white text in the light scheme

const ops = data.ops.map((line) => {
  const [kind, lane, block] = line.split(" ", 3);
  return { line, kind, lane, block: Number(block.slice(1)), family: familyOf.get(kind) };
});
const tracks = data.tracks.map((track) => {
  const rows = new Map(data.lanes.map(([lane]) => [lane, { starts: [], ends: [], pieces: [] }]));
  const times = new Map();
  let start = 0;
  track.op.forEach((op, i) => {
    start += track.start[i];
    const tick = track.tick_s * track.zoom;
    const piece = { op, later: track.later[i] || 0, from: start * tick, to: (start + track.length[i]) * tick };
    const row = rows.get(ops[op].lane);
    row.starts.push(piece.from);
    row.pieces.push(piece);
    if (!times.has(op)) times.set(op, piece);
  });
  return { ...track, length_s: track.length_s * track.zoom, rows, times };
});
const ownAxis = tracks.find((track) => track.zoom !== 1); // the run of another kind of machine: with a second time axis
const whole = Math.max(...tracks.map((track) => track.length_s), 1e-12);
const view = { from: 0, to: whole, cursor: null, chosen: null, marked: null };
const canvas = document.getElementById("timeline");
let boxes = []; // rows of the last drawing: { track, lane, top, height }

function gutter(width) {
  return width < NARROW ? 0 : tracks.length > 1 ? 212 : 150;
}

function xOf(t, width) {
  const left = gutter(width);
  return left + ((t - view.from) / (view.to - view.from)) * (width - left);
}

function timeAt(x, width) {
  const left = gutter(width);
  return view.from + (Math.max(0, x - left) / (width - left)) * (view.to - view.from);
}

/** Set the visible stretch, limited by the precision of a double and the whole step. */
function look(from, to) {
  const span = Math.min(Math.max(to - from, whole * 1e-7), whole);
  view.from = Math.min(Math.max(0, from), whole - span);
  view.to = view.from + span;
  canvas.dataset.from = view.from;
  canvas.dataset.to = view.to;
  const isWhole = span >= whole * 0.999999;
  for (const button of document.querySelectorAll("[data-do=out], [data-do=reset]")) button.disabled = isWhole;
  drawAll();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  look(around - (around - view.from) * factor, around + (view.to - around) * factor);
}

function nameOf(op) {
  const where = op.block === 0 ? "embedding" : op.block === data.n_blocks - 1 ? "head" : "layer " + op.block;
  return op.kind + ", " + where;
}

function drawTimeline() {
  const isNarrow = canvas.clientWidth < NARROW, isSingle = tracks.length === 1;
  const rowHeight = isSingle ? 26 : 20, laneHeight = (isNarrow ? 18 : 0) + tracks.length * (rowHeight + 2) + 12;
  const { context, width, height } = fit(canvas, data.lanes.length * laneHeight + (ownAxis ? 44 : 26));
  const left = gutter(width), bottom = height - (ownAxis ? 42 : 24);
  drawTimes(context, width, bottom);
  if (ownAxis) drawTimes(context, width, bottom, ownAxis);
  boxes = [];
  data.lanes.forEach(([lane, title], n) => {
    let top = n * laneHeight + (isNarrow ? 18 : 0);
    context.textAlign = "left";
    context.fillStyle = colour("ink");
    context.font = "600 13px " + FONT;
    const middle = isNarrow ? top - 9 : top + (isSingle ? 7 : 10);
    if (isNarrow) context.clearRect(0, top - 18, width, 18);
    context.fillText(lane, 0, middle);
    context.fillStyle = colour("soft");
    context.font = "12px " + FONT;
    if (isNarrow) context.fillText(title + (isSingle ? "" : ": predicted, measured below"), 34, middle);
    else context.fillText(title, 0, middle + 16, left - (isSingle ? 8 : 72));
    for (const track of tracks) {
      if (!isNarrow && !isSingle) {
        context.textAlign = "right";
        context.fillStyle = colour("soft");
        context.fillText(track.name, left - 8, top + rowHeight / 2);
      }
      drawRow(context, track, lane, top, rowHeight, left, width);
      boxes.push({ track, lane, top, height: rowHeight });
      top += rowHeight + 2;
    }
  });
  drawOver(context, left, width, bottom);
}

/** Draw the time axis with lines, or the axis of one track below it. */
function drawTimes(context, width, bottom, track = null) {
  const zoom = track ? track.zoom : 1, left = gutter(width), found = ticks(view.from / zoom, view.to / zoom, (width - left) / 90);
  context.font = "12px " + FONT;
  found.values.forEach((t) => {
    const x = xOf(t * zoom, width), label = moment(t, found.step), half = context.measureText(label).width / 2;
    context.fillStyle = colour("rule");
    if (!track) context.fillRect(Math.round(x), 0, 1, bottom);
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    context.fillText(label, Math.min(Math.max(x, left + half), width - half), bottom + (track ? 32 : 14));
  });
  if (!ownAxis || !left) return;
  context.textAlign = "right";
  context.fillText(track ? track.name : "predicted", left - 8, bottom + (track ? 32 : 14));
}

/** Draw the pieces of one lane. Adjacent pieces that are too narrow are merged, lighter if there are gaps. */
function drawRow(context, track, lane, top, height, left, width) {
  const row = track.rows.get(lane), paper = colour("page"), isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const fills = new Map(FAMILIES.map(([family]) => [family, colour(family)]));
  let crowd = null; // merged narrow pieces: { family, inset, x, end, busy }
  const drawBar = (family, inset, x, wide) => {
    context.fillStyle = fills.get(family);
    context.fillRect(x, top + inset, wide, height - 2 * inset);
  };
  const drawCrowd = () => {
    if (!crowd) return;
    const wide = crowd.end - crowd.x;
    context.globalAlpha = wide > 1 ? Math.max(0.2, Math.min(1, crowd.busy / wide)) : 1;
    if (wide > 1.5) drawBar(crowd.family, crowd.inset, Math.round(crowd.x), Math.round(crowd.end) - Math.round(crowd.x));
    else drawBar(crowd.family, crowd.inset, crowd.x, Math.max(wide, 0.75));
    context.globalAlpha = 1;
    crowd = null;
  };
  context.save();
  context.beginPath();
  context.rect(left, top, width - left, height);
  context.clip();
  context.fillStyle = colour("panel");
  context.fillRect(left, top, xOf(track.length_s, width) - left, height);
  context.textAlign = "left";
  context.font = "12px " + FONT;
  for (let i = Math.max(0, placeOf(row.starts, view.from)); i < row.pieces.length && row.starts[i] < view.to; i++) {
    const piece = row.pieces[i], op = ops[piece.op], x = xOf(piece.from, width), end = xOf(piece.to, width);
    const wide = end - x, inset = piece.later ? height / 4 : 0;
    if (wide < 2) {
      const joins = crowd && crowd.family === op.family && crowd.inset === inset && x - crowd.end < 1 && end - crowd.x < 8;
      if (!joins) {
        drawCrowd();
        crowd = { family: op.family, inset, x, end, busy: 0 };
      }
      crowd.end = end;
      crowd.busy += wide;
      continue;
    }
    drawCrowd();
    drawBar(op.family, inset, x, wide - (wide > 5 ? 1 : 0));
    if (wide > 22 && !piece.later) {
      const from = Math.max(x, left), label = wide > 104 ? op.kind + " " + op.block : String(op.block);
      if (context.measureText(label).width + 8 < end - from) {
        context.fillStyle = isDark ? "#14181c" : LIGHT_INK.has(op.family) ? paper : "#1c2127";
        context.fillText(label, from + 4, top + height / 2 + 1);
      }
    }
  }
  drawCrowd();
  context.restore();
}

/** Draw the end of each track, the cursor, the selected op and the ops that it waits for. */
function drawOver(context, left, width, bottom) {
  context.save();
  context.beginPath();
  context.rect(left - 2, 0, width - left + 4, bottom);
  context.clip();
  for (const box of boxes) {
    if (box.track.length_s < whole * 0.999) {
      context.fillStyle = colour("soft");
      context.fillRect(xOf(box.track.length_s, width), box.top, 1, box.height);
    }
    if (!view.chosen) continue;
    const waits = waitsOf(ops[view.chosen.op]);
    for (const piece of box.track.rows.get(box.lane).pieces) {
      const isChosen = piece.op === view.chosen.op;
      if (!isChosen && !waits.has(piece.op)) continue;
      const x = xOf(piece.from, width);
      context.strokeStyle = isChosen ? colour("bad") : colour("ink");
      context.lineWidth = 2;
      context.strokeRect(x - 1, box.top, Math.max(xOf(piece.to, width) - x, 2) + 1, box.height);
    }
  }
  if (view.marked) {
    const [a, b] = view.marked.map((t) => xOf(t, width));
    context.globalAlpha = 0.18;
    context.fillStyle = colour("mark");
    context.fillRect(Math.min(a, b), 0, Math.abs(b - a), bottom);
    context.globalAlpha = 1;
  }
  if (view.cursor !== null) {
    context.fillStyle = colour("soft");
    context.fillRect(Math.round(xOf(view.cursor, width)), 0, 1, bottom);
  }
  context.restore();
}

function waitsOf(op) {
  const waits = op.line.split(" ^ ")[1];
  return new Set(waits ? waits.split(" ").map((wait) => Number(wait.split("@")[0])) : []);
}

/** The piece under the pointer and its row, or the nearest within a few pixels. */
function pieceAt(event) {
  const frame = canvas.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
  const box = boxes.find((b) => y >= b.top - 1 && y <= b.top + b.height + 1);
  if (!box || x < gutter(frame.width)) return null;
  const row = box.track.rows.get(box.lane), at = placeOf(row.starts, timeAt(x, frame.width));
  for (const piece of [row.pieces[at], row.pieces[at + 1]]) {
    if (piece && xOf(piece.from, frame.width) - 2 <= x && x <= xOf(piece.to, frame.width) + 2) return { ...piece, track: box.track };
  }
  return null;
}

function linesOf(found) {
  const op = ops[found.op], lines = [nameOf(op), op.line];
  for (const track of tracks) {
    const piece = track === found.track ? found : track.times.get(found.op);
    if (!piece) continue;
    const [from, to] = [piece.from / track.zoom, piece.to / track.zoom];
    lines.push(track.name + ": " + seconds(to - from) + ", from " + seconds(from) + " to " + seconds(to));
  }
  if (found.later) lines.push(found.later > 0 ? "of the next step: this lane is ahead" : "of the previous step: this lane is behind");
  return lines;
}

function choose(found) {
  view.chosen = found;
  if (found) {
    const [, line, ...times] = linesOf(found), waits = [...waitsOf(ops[found.op])].map((op) => nameOf(ops[op]));
    const where = document.getElementById("op");
    where.replaceChildren(make("code", "op " + found.op + ": " + line), "\n" + times.join("; ") + (waits.length ? "; waits for " + waits.join(" and ") : ""));
  }
  drawAll();
}

/** Select the next or previous op on the lane, and scroll it into view. */
function chooseNext(direction) {
  const track = view.chosen ? view.chosen.track : tracks[tracks.length - 1];
  const row = track.rows.get(view.chosen ? ops[view.chosen.op].lane : data.lanes[0][0]);
  const at = view.chosen ? row.pieces.findIndex((p) => p.op === view.chosen.op && p.from === view.chosen.from) + direction : 0;
  const piece = row.pieces[Math.min(Math.max(at, 0), row.pieces.length - 1)];
  if (!piece) return;
  choose({ ...piece, track });
  const middle = (piece.from + piece.to) / 2, half = (view.to - view.from) / 2;
  if (middle < view.from || middle > view.to) look(middle - half, middle + half);
}

function listenToTimeline() {
  const width = () => canvas.clientWidth, xIn = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== canvas) return; // scroll the page unless the canvas has focus
    event.preventDefault();
    if (event.deltaX && Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = (event.deltaX / width()) * (view.to - view.from);
      look(view.from + by, view.to + by);
    } else zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) * 0.003), timeAt(xIn(event), width()));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || xIn(event) < gutter(width())) return;
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    view.marked = [timeAt(xIn(event), width()), timeAt(xIn(event), width())];
  });
  canvas.addEventListener("pointermove", (event) => {
    view.cursor = timeAt(xIn(event), width());
    if (view.marked) view.marked[1] = view.cursor;
    const found = pieceAt(event);
    if (found && !(view.marked && Math.abs(xOf(view.marked[0], width()) - xIn(event)) > 4)) showTip(event, linesOf(found));
    else hideTip();
    drawAll();
  });
  canvas.addEventListener("pointerup", (event) => {
    const marked = view.marked;
    view.marked = null;
    if (!marked) return;
    if (Math.abs(xOf(marked[0], width()) - xOf(marked[1], width())) > 4) look(Math.min(...marked), Math.max(...marked));
    else choose(pieceAt(event));
  });
  canvas.addEventListener("pointercancel", () => { view.marked = null; drawAll(); });
  canvas.addEventListener("pointerleave", () => { view.cursor = null; hideTip(); drawAll(); });
  canvas.addEventListener("dblclick", () => look(0, whole));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = (view.to - view.from) * 0.2;
    const actions = {
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => look(0, whole), Escape: () => look(0, whole),
      ArrowLeft: () => look(view.from - by, view.to - by), ArrowRight: () => look(view.from + by, view.to + by),
      n: () => chooseNext(1), p: () => chooseNext(-1),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  });
  const buttons = { in: () => zoom(0.6), out: () => zoom(1 / 0.6), reset: () => look(0, whole) };
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", buttons[button.dataset.do]);
}

function drawKinds() {
  const present = new Set(tracks.flatMap((track) => [...track.times.keys()].map((op) => ops[op].family)));
  const entries = FAMILIES.filter(([family]) => present.has(family)).map(([family, title, kinds]) => swatch(title, colour(family), "", "ops: " + kinds.join(", ")));
  if (tracks.some((track) => track.later.some((n) => n))) entries.push(make("span", "low bars: of another step"));
  document.getElementById("kinds").replaceChildren(...entries);
}

pictures.push(drawTimeline, drawKinds);
listenToTimeline();
look(0, whole);
