"use strict";
// Memory of device and host over the same time axis: stacked arenas, allocated bytes, capacity.

// Colours of the ops that fill an arena, and their lightening: weights as uploads, gradients as downloads, state as updates.
const SERIES = {
  weights: ["weights", 0], packed: ["weights", 0.5], frozen: ["weights", 0.5], gradients: ["gradients", 0], sums: ["gradients", 0.5], squares: ["norm", 0], norm: ["norm", 0],
  host_gradients: ["gradients", 0], staging: ["gradients", 0.5], received: ["gradients", 0.75],
  "kept activations": ["activations", 0], activations: ["activations", 0.5], saved: ["activations", 0.75],
  spilled: ["activations", 0.5], offloaded: ["activations", 0],
  state: ["update", 0.3], device_state: ["update", 0.3],
  "block being computed": ["forward", 0], context: ["norm", 0], runtime: ["norm", 0], compiler: ["norm", 0.25], other: ["norm", 0.5],
};

function seriesColour(name) {
  const [family, paler] = SERIES[name];
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const from = parts(colour(family)), to = parts(colour("page"));
  return `rgb(${from.map((n, i) => Math.round(n + (to[i] - n) * paler)).join(" ")})`;
}

function valueAt(series, at) {
  return typeof series.bytes === "number" ? series.bytes : series.bytes[at];
}

function memoryPicture(held) {
  const panel = make("div", "", "chart"), picture = make("canvas"), legend = make("div", "", "legend");
  const title = make("p", `${held.place}: peak use ${bytes(held.peak_bytes)}, allocated ${bytes(held.reserved_bytes)}, capacity ${bytes(held.memory_bytes)}`, "lead");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", `Bytes in use in ${held.place} memory over the step; the table below lists them`);
  panel.append(title, picture, legend);
  document.getElementById("memory").append(panel);

  function draw() {
    const { context, width, height } = fit(picture, 190);
    const left = gutter(width), bottom = height - 24, top = 14;
    const isNear = held.memory_bytes < held.reserved_bytes * 2.2;
    const most = (isNear ? Math.max(held.memory_bytes, held.reserved_bytes) : held.reserved_bytes) * 1.06;
    const yOf = (n) => bottom - (n / most) * (bottom - top);
    drawTimes(context, width, bottom);
    drawStack(context, held, width, yOf);
    drawLevels(context, held, width, yOf, isNear, most);
    if (view.cursor !== null) {
      context.fillStyle = colour("soft");
      context.fillRect(Math.round(xOf(view.cursor, width)), 0, 1, bottom);
    }
    const entries = held.series.map((series) => swatch(`${series.name.replaceAll("_", " ")} ${bytes(series.most)}`, seriesColour(series.name), "", data.gloss[series.name.replaceAll("_", " ")]));
    legend.replaceChildren(...entries, swatch("reserved", colour("ink"), "line dashed"), ...(isNear ? [swatch("capacity", colour("bad"), "line")] : []));
  }
  picture.addEventListener("pointermove", (event) => {
    const t = timeAt(event.clientX - picture.getBoundingClientRect().left, picture.clientWidth);
    if (t > held.length_s) return hideTip();
    view.cursor = t;
    const at = Math.max(0, placeOf(held.times, t));
    const shown = held.series.map((s) => [s.name.replaceAll("_", " "), valueAt(s, at)]).filter(([, n]) => n > 0);
    const total = shown.reduce((sum, [, n]) => sum + n, 0);
    showTip(event, [`${held.place} at ${seconds(t)}: ${bytes(total)}`, ...shown.map(([name, n]) => `${name}: ${bytes(n)}`).reverse()]);
    drawAll();
  });
  picture.addEventListener("pointerleave", () => { view.cursor = null; hideTip(); drawAll(); });
  pictures.push(draw);
}

/** Stacked series, the steadiest and largest at the bottom. */
function drawStack(context, held, width, yOf) {
  const first = Math.max(0, placeOf(held.times, view.from));
  let after = first;
  while (after < held.times.length && held.times[after] < view.to) after++;
  const base = new Array(after - first).fill(0);
  const edges = [];
  for (let at = first; at <= after; at++) edges.push(xOf(Math.min(at < held.times.length ? held.times[at] : held.length_s, held.length_s), width));
  context.save();
  context.beginPath();
  context.rect(gutter(width), 0, width, yOf(0) + 1);
  context.clip();
  context.strokeStyle = colour("page");
  context.lineWidth = 1;
  held.series.forEach((series) => {
    context.fillStyle = seriesColour(series.name);
    context.beginPath();
    context.moveTo(edges[0], yOf(base[0]));
    const tops = base.map((below, n) => below + valueAt(series, first + n));
    tops.forEach((n, at) => { context.lineTo(edges[at], yOf(n)); context.lineTo(edges[at + 1], yOf(n)); });
    for (let at = base.length - 1; at >= 0; at--) { context.lineTo(edges[at + 1], yOf(base[at])); context.lineTo(edges[at], yOf(base[at])); }
    context.fill();
    context.stroke();
    tops.forEach((n, at) => { base[at] = n; });
  });
  context.restore();
}

function drawLevels(context, held, width, yOf, isNear, most) {
  const left = gutter(width), right = Math.min(width, Math.max(left, xOf(held.length_s, width)));
  context.fillStyle = colour("soft");
  context.textAlign = left ? "right" : "left";
  for (const n of ticks(0, most, 4).values) {
    if (left) context.fillText(bytes(n), left - 8, Math.max(8, yOf(n)));
    context.globalAlpha = 0.25;
    context.fillRect(left, Math.round(yOf(n)), right - left, 1);
    context.globalAlpha = 1;
  }
  const levels = [["ink", held.reserved_bytes, [5, 4]]];
  if (isNear) levels.push(["bad", held.memory_bytes, []]);
  for (const [ink, n, dashes] of levels) {
    context.strokeStyle = colour(ink);
    context.setLineDash(dashes);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(left, yOf(n));
    context.lineTo(right, yOf(n));
    context.stroke();
  }
  context.setLineDash([]);
  if (!left) for (const n of ticks(0, most, 4).values) if (n) drawOnPaper(context, bytes(n), 4, Math.max(9, yOf(n) - 9));
}

/** A label on top of the plot, with a background so that it is readable on any colour. */
function drawOnPaper(context, label, x, y) {
  context.textAlign = "left";
  context.fillStyle = colour("page");
  context.globalAlpha = 0.85;
  context.fillRect(x - 3, y - 8, context.measureText(label).width + 6, 16);
  context.globalAlpha = 1;
  context.fillStyle = colour("ink");
  context.fillText(label, x, y);
}

data.memory.forEach(memoryPicture);
drawAll();
