"use strict";
// Curves of a run's log: loss, speed and learning rate by step.

function curvePicture(curve) {
  const canvas = document.getElementById(curve.id);
  const finite = curve.lines.flatMap((line) => line.values.filter((value) => value !== null)).concat(curve.level ? [curve.level.value] : []);
  const steps = curve.lines.flatMap((line) => line.steps);
  if (!canvas || !finite.length) return;
  const firstStep = Math.min(...extremes(steps)), lastStep = Math.max(...extremes(steps));
  let [low, high] = extremes(finite);
  if (curve.from_zero) low = Math.min(low, 0);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = [curve.from_zero && low === 0 ? 0 : low - room, high + room];
  const frame = { left: 56, right: 10, top: 8, bottom: 24 };
  let hovered = null;

  const xOfStep = (step, width) => frame.left + (lastStep > firstStep ? (step - firstStep) / (lastStep - firstStep) : 0.5) * (width - frame.left - frame.right);
  const yOfValue = (value, height) => height - frame.bottom - ((value - low) / (high - low)) * (height - frame.top - frame.bottom);

  function draw() {
    const { context, width, height } = fit(canvas, curve.height);
    drawGrid(context, width, height);
    if (curve.level) drawLevel(context, width, height);
    for (const line of curve.lines) drawLine(context, line, width, height);
    if (hovered !== null) {
      context.fillStyle = colour("soft");
      context.fillRect(xOfStep(hovered, width), frame.top, 1, height - frame.top - frame.bottom);
    }
  }

  function drawGrid(context, width, height) {
    const found = ticks(low, high, (height - 40) / 34);
    for (const value of found.values) {
      context.fillStyle = colour("rule");
      context.fillRect(frame.left, Math.round(yOfValue(value, height)), width - frame.left - frame.right, 1);
      context.fillStyle = colour("soft");
      context.textAlign = "right";
      context.fillText(level(value, found.step), frame.left - 8, yOfValue(value, height));
    }
    const most = Math.min((width - frame.left) / 70, lastStep - firstStep || 1);
    for (const step of ticks(firstStep, lastStep, most).values.filter(Number.isInteger)) {
      context.fillStyle = colour("soft");
      context.textAlign = "center";
      context.fillText(step.toLocaleString("en"), xOfStep(step, width), height - 10);
    }
  }

  function drawLevel(context, width, height) {
    context.strokeStyle = colour(curve.level.colour);
    context.setLineDash([6, 4]);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(frame.left, yOfValue(curve.level.value, height));
    context.lineTo(width - frame.right, yOfValue(curve.level.value, height));
    context.stroke();
    context.setLineDash([]);
  }

  /** Draw a line with gaps at missing values, or dots for sparse data. */
  function drawLine(context, line, width, height) {
    context.strokeStyle = context.fillStyle = colour(line.colour);
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.beginPath();
    let isDown = false;
    line.steps.forEach((step, i) => {
      const value = line.values[i];
      if (value === null) {
        isDown = false;
        return;
      }
      if (isDown) context.lineTo(xOfStep(step, width), yOfValue(value, height));
      else context.moveTo(xOfStep(step, width), yOfValue(value, height));
      isDown = true;
    });
    context.stroke();
    const isAlone = (i) => line.values[i] !== null && (line.values[i - 1] ?? null) === null && (line.values[i + 1] ?? null) === null;
    line.steps.forEach((step, i) => {
      if (line.values[i] === null || !(line.dots || isAlone(i))) return;
      context.beginPath();
      context.arc(xOfStep(step, width), yOfValue(line.values[i], height), line.dots ? 4 : 2, 0, 7);
      context.fill();
    });
  }

  canvas.addEventListener("pointermove", (event) => {
    const x = event.clientX - canvas.getBoundingClientRect().left, width = canvas.clientWidth;
    const wanted = firstStep + ((x - frame.left) / (width - frame.left - frame.right)) * (lastStep - firstStep);
    const all = curve.lines[0].steps, at = Math.max(0, placeOf(all, wanted));
    hovered = at + 1 < all.length && all[at + 1] - wanted < wanted - all[at] ? all[at + 1] : all[at];
    const lines = ["step " + hovered.toLocaleString("en")];
    for (const line of curve.lines) {
      const i = placeOf(line.steps, hovered);
      if (i >= 0) lines.push(`${line.name}: ${line.values[i] === null ? "not finite" : digits(line.values[i], 5)}${line.steps[i] === hovered ? "" : " at step " + line.steps[i].toLocaleString("en")}`);
    }
    if (curve.level) lines.push(`${curve.level.name}: ${digits(curve.level.value, 4)}`);
    showTip(event, lines);
    drawAll();
  });
  canvas.addEventListener("pointerleave", () => { hovered = null; hideTip(); drawAll(); });
  pictures.push(draw);
  const legend = document.getElementById(curve.id + "-legend");
  pictures.push(() => legend.replaceChildren(
    ...curve.lines.map((line) => swatch(line.name, colour(line.colour), line.dots ? "" : "line")),
    ...(curve.level ? [swatch(curve.level.name, colour(curve.level.colour), "line dashed")] : []),
  ));
}

data.curves.forEach(curvePicture);
