"use strict";
// Machines of a comparison: tokens per second against dollars per million tokens, with P10 to P90 and ranges of prices, as an SVG with one label a machine.

const PRICES = [["rented", "usd_per_million_tokens"], ["bought", "bought_usd_per_million_tokens"]];
const LOG_RATIO = 6; // from this ratio of the extremes on, an axis is logarithmic; below, it begins at zero
const LABEL = { height: 16, pad: 2, rings: 24, angles: 20 }; // pixels of a line of text; places that are tried around a mark

const plot = document.getElementById("scatter");
const speeds = data.machines.filter((machine) => machine.fits).map((machine) => {
  const rates = [machine.p90_step_s, machine.step_s, machine.p10_step_s].map((step_s) => (machine.tokens_per_s * machine.step_s) / step_s);
  const priced = PRICES.filter(([, field]) => machine[field] !== null);
  const marks = priced.map(([way, field]) => ({
    way, usd: machine[field], usds: rates.map((rate) => (machine[field] * machine.tokens_per_s) / rate),
    ends: (machine[field + "_range"] ?? [0])[0] > 0 ? machine[field + "_range"] : [], // a logarithmic axis has no zero
  }));
  return { machine, rates, marks: marks.length ? marks : [{ way: "unpriced", usd: null, usds: [], ends: [] }] };
});
const hasUnpriced = speeds.some(({ marks }) => marks[0].usd === null);

function draw(parent, tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

/** Map of values to pixels from `from` to `to`, with ticks about `apart` pixels from each other. */
function axis(values, from, to, apart) {
  const [low, high] = extremes(values), isLog = high / low >= LOG_RATIO;
  const [start, end] = isLog ? [Math.log10(low) - 0.06, Math.log10(high) + 0.06] : [0, high * 1.05];
  const at = (value) => from + (((isLog ? Math.log10(value) : value) - start) / (end - start)) * (to - from);
  if (!isLog) {
    const found = ticks(0, end, Math.abs(to - from) / apart);
    return { at, ticks: found.values.map((value) => [value, level(value, found.step)]) };
  }
  const decade = Math.abs(to - from) / (end - start), steps = decade > 4.5 * apart ? [1, 2, 5] : decade > 2.5 * apart ? [1, 3] : [1];
  const powers = Array.from({ length: Math.ceil(end) - Math.floor(start) + 1 }, (_, i) => Math.floor(start) + i);
  const round = powers.flatMap((power) => steps.map((n) => n * 10 ** power)).filter((value) => Math.log10(value) >= start && Math.log10(value) <= end);
  return { at, ticks: round.map((value) => [value, value >= 1 ? value.toLocaleString("en") : String(Number(value.toPrecision(1)))]) };
}

const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
const around = (x, y, radius) => ({ left: x - radius, right: x + radius, top: y - radius, bottom: y + radius });
/** Small boxes along the line between two points. */
function along([x, y], [toX, toY]) {
  const n = Math.ceil(Math.hypot(toX - x, toY - y) / 5);
  return Array.from({ length: n + 1 }, (_, i) => around(x + ((toX - x) * i) / (n || 1), y + ((toY - y) * i) / (n || 1), 2));
}

/** The nearest place for a label that meets no mark, bar or label; null if there is none. */
function placeFor(width, points, taken, frame, isStrict) {
  const rings = (from, to) => points.flatMap(([x, y]) => Array.from({ length: to - from }, (_, i) => [x, y, from + i]));
  for (const [x, y, ring] of [...rings(0, 4), ...rings(4, LABEL.rings).sort((a, b) => a[2] - b[2])]) { // near the first mark, near the second, farther from either
    for (let i = 0; i < LABEL.angles; i++) {
      const angle = (2 * Math.PI * i) / LABEL.angles, far = 8 + 9 * ring;
      const centre = x + (far + width / 2) * Math.cos(angle), middle = y + (far + LABEL.height / 2) * Math.sin(angle);
      const [left, right] = [centre - width / 2 - LABEL.pad, centre + width / 2 + LABEL.pad], [top, bottom] = [middle - LABEL.height / 2, middle + LABEL.height / 2];
      if (left < frame.left || right > frame.right || top < frame.top || bottom > frame.bottom) continue;
      const start = [x + 10 * Math.cos(angle), y + 10 * Math.sin(angle)];
      const ends = [start, [Math.min(Math.max(start[0], left), right), Math.min(Math.max(start[1], top), bottom)]];
      const leader = ring > 1 ? along(...ends) : [], box = { left, right, top, bottom, isSolid: true };
      if (taken.some((other) => meets(box, other)) || (isStrict && leader.some((part) => taken.some((other) => other.isSolid && meets(part, other))))) continue;
      return { centre, middle, ends, taken: [box, ...leader] };
    }
  }
  return null;
}

/** Draw the figure at this height; return false if a label found no place. `isStrict`: no leader may cross a label or mark. */
function drawAt(height, isStrict) {
  const width = plot.clientWidth, frame = { left: 62, right: width - 8, top: 22, bottom: height - 46 };
  plot.setAttribute("height", height);
  plot.replaceChildren();
  const edge = frame.right - (hasUnpriced ? (width < NARROW ? 70 : 110) : 0), usds = speeds.flatMap(({ marks }) => marks.flatMap((mark) => [...mark.usds, ...mark.ends]));
  const y = axis(speeds.flatMap(({ rates }) => rates), frame.bottom, frame.top, 34);
  const x = usds.length ? axis(usds, frame.left, edge, 62) : { at: () => edge, ticks: [] };
  for (const [value, text] of y.ticks) {
    draw(plot, "line", { class: "rule", x1: frame.left, x2: frame.right, y1: y.at(value), y2: y.at(value) });
    draw(plot, "text", { class: "tick y", x: frame.left - 8, y: y.at(value) + 4, "text-anchor": "end", "data-value": value }, text);
  }
  for (const [value, text] of x.ticks) {
    draw(plot, "line", { class: "rule", x1: x.at(value), x2: x.at(value), y1: frame.top, y2: frame.bottom });
    draw(plot, "text", { class: "tick x", x: x.at(value), y: frame.bottom + 18, "text-anchor": "middle", "data-value": value }, text);
  }
  if (hasUnpriced) {
    draw(plot, "line", { class: "edge", x1: edge, x2: edge, y1: frame.top, y2: frame.bottom });
    draw(plot, "text", { class: "tick", x: (edge + frame.right) / 2, y: frame.bottom + 18, "text-anchor": "middle" }, "no price");
  }
  draw(plot, "text", { class: "tick", x: 0, y: 12 }, "tokens per second");
  if (usds.length) draw(plot, "text", { class: "tick", x: edge, y: height - 8, "text-anchor": "end" }, "USD per million tokens");
  const taken = [], points = new Map();
  for (const speed of speeds) {
    const [low, middle, high] = speed.rates.map(y.at), places = speed.marks.map(({ usd }) => [usd === null ? (edge + frame.right) / 2 : x.at(usd), middle]);
    points.set(speed, places);
    if (places.length > 1) draw(plot, "line", { class: "same", x1: places[0][0], x2: places[1][0], y1: middle, y2: middle });
    speed.marks.forEach((mark, i) => {
      const [lowX, highX] = mark.usd === null ? [places[i][0], places[i][0]] : [x.at(mark.usds[0]), x.at(mark.usds[2])];
      draw(plot, "line", { class: "range " + mark.way, x1: lowX, y1: low, x2: highX, y2: high });
      const [from, to] = mark.ends.map(x.at), isRange = to - from > 1; // lowest to highest published price
      if (isRange) draw(plot, "line", { class: "prices " + mark.way, "data-machine": speed.machine.machine, x1: from, y1: middle, x2: to, y2: middle });
      taken.push(...(isRange ? along([from, middle], [to, middle]) : []), ...along([lowX, low], [highX, high]), { ...around(...places[i], 6), isSolid: true }); // a leader may cross a bar
    });
  }
  for (const [speed, places] of points) {
    speed.marks.forEach((mark, i) => {
      const [centre, middle] = places[i], about = { class: "mark " + mark.way, "data-machine": speed.machine.machine };
      const drawn = mark.way === "bought" ? draw(plot, "rect", { ...about, x: centre - 5, y: middle - 5, width: 10, height: 10 }) : draw(plot, "circle", { ...about, cx: centre, cy: middle, r: 5.5 });
      drawn.addEventListener("pointermove", (event) => showTip(event, tipOf(speed)));
      drawn.addEventListener("pointerleave", hideTip);
    });
  }
  let areAllPlaced = true;
  for (const [speed, places] of points) {
    const text = draw(plot, "text", { class: "label", "text-anchor": "middle", "data-machine": speed.machine.machine }, shortened(speed.machine.machine));
    const place = placeFor(text.getComputedTextLength(), places, taken, frame, isStrict);
    if (place === null) {
      areAllPlaced = false;
      text.remove();
      continue;
    }
    text.setAttribute("x", place.centre);
    text.setAttribute("y", place.middle + 4);
    taken.push(...(isStrict ? place.taken : place.taken.slice(0, 1)));
    if (place.taken.length === 1) continue;
    const [[x1, y1], [x2, y2]] = place.ends;
    plot.insertBefore(draw(plot, "line", { class: "leader", x1, y1, x2, y2 }), plot.querySelector(".mark"));
  }
  return areAllPlaced;
}

function shortened(name) {
  return name.length > 28 ? name.slice(0, 27) + "…" : name;
}

function tipOf({ machine, rates, marks }) {
  const lines = [machine.machine, digits(rates[1], 4) + " tokens/s (P10 to P90: " + digits(rates[0], 4) + " to " + digits(rates[2], 4) + ")"];
  for (const { way, usd, usds, ends } of marks) {
    lines.push(usd === null ? "no price" : `${way}: ${digits(usd)} USD per million tokens (P10 to P90: ${digits(usds[2])} to ${digits(usds[0])})`);
    if (ends[1] > ends[0]) lines.push(`${way}, by its range of prices: ${digits(ends[0])} to ${digits(ends[1])}`);
  }
  return lines;
}

if (plot) {
  pictures.push(() => {
    const least = Math.max(420, 200 + 14 * speeds.length);
    if (![1, 1.3, 1.7].some((factor) => drawAt(least * factor, true))) [1, 2, 4].some((factor) => drawAt(least * factor, false));
  });
  const legend = document.getElementById("ways"), present = new Set(speeds.flatMap(({ marks }) => marks.map((mark) => mark.way)));
  const names = { rented: "rented", bought: "bought, over three years of full use, with power", unpriced: "no price" };
  for (const [way, name] of Object.entries(names)) {
    if (!present.has(way)) continue;
    const entry = make("span"), sample = draw(entry, "svg", { width: 14, height: 14 });
    if (way === "bought") draw(sample, "rect", { class: "mark bought", x: 2, y: 2, width: 10, height: 10 });
    else draw(sample, "circle", { class: "mark " + way, cx: 7, cy: 7, r: 5.5 });
    entry.append(name);
    legend.append(entry);
  }
}
