"use strict";
// Shared by all plots: data, colours of the current scheme, canvases at screen resolution, axes, units.

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const NARROW = 640; // pixels; on narrower screens, labels are placed above their rows
const FONT = 'system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif';
const pictures = []; // functions that redraw a canvas completely

document.documentElement.classList.add("scripted");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

/** Drawing context in CSS pixels, at the resolution of the screen. */
function fit(canvas, height) {
  const width = canvas.clientWidth, fine = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * fine);
  canvas.height = Math.round(height * fine);
  const context = canvas.getContext("2d");
  context.scale(fine, fine);
  context.clearRect(0, 0, width, height);
  context.font = "12px " + FONT;
  context.textBaseline = "middle";
  return { context, width, height };
}

/** About `most` round tick values between two ends. */
function ticks(from, to, most) {
  const raw = (to - from) / Math.max(most, 1);
  if (!(raw > 0)) return { values: [from], step: 1 };
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((n) => n * power >= raw * 0.999) * power;
  const first = Math.ceil(from / step - 1e-9), values = [];
  // Multiples of the step, because adding it to a very large number may not change it.
  for (let n = 0; n <= 2 * most + 2 && (first + n) * step <= to + step * 1e-9; n++) values.push((first + n) * step);
  return { values, step };
}

/** Format with three digits and a suitable unit. */
function seconds(s) {
  const size = Math.abs(s);
  if (size >= 1 || size === 0) return digits(s) + " s";
  return size >= 1e-3 ? digits(s * 1e3) + " ms" : digits(s * 1e6) + " µs";
}

function digits(value, most = 3) {
  if (Math.abs(value) >= 10 ** most) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(most)));
}

/** Tick label of a time axis: enough decimals to distinguish neighbours. */
function moment(s, step) {
  const [scale, unit] = step >= 0.1 ? [1, "s"] : step >= 1e-4 ? [1e3, "ms"] : [1e6, "µs"];
  return (s * scale).toFixed(Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9))) + " " + unit;
}

/** Tick label of a value axis: enough decimals to distinguish neighbours, or a power of ten for very small values. */
function level(value, step) {
  if (Math.abs(value) < step / 2) return "0";
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return decimals > 4 ? String(Number(value.toPrecision(3))) : value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

function bytes(n) {
  const [scale, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]].find(([s]) => n >= s) || [1, "B"];
  return digits(n / scale) + " " + unit;
}

function showTip(event, lines) {
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  const right = event.clientX + 16 + tip.offsetWidth > document.documentElement.clientWidth;
  const left = right ? Math.max(4, event.clientX - 16 - tip.offsetWidth) : event.clientX + 16;
  const below = event.clientY + 20 + tip.offsetHeight > window.innerHeight;
  tip.style.left = left + window.scrollX + "px";
  tip.style.top = (below ? Math.max(4, event.clientY - 12 - tip.offsetHeight) : event.clientY + 20) + window.scrollY + "px";
}

function hideTip() {
  tip.hidden = true;
}

function swatch(label, fill, className = "", gloss = "") {
  const entry = make("span"), mark = make("i", "", className);
  if (gloss) entry.title = gloss;
  if (className) mark.style.borderColor = fill; else mark.style.background = fill;
  entry.append(mark, label);
  return entry;
}

/** Index of the last value <= x in ascending `values`, or -1. */
function placeOf(values, x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}

let isDrawing = false;
function drawAll() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    for (const draw of pictures) draw();
  });
}

drawAll();
window.addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
