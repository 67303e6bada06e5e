"""What belongs on the page of a plan, or of a run?

Numbers and words are found elsewhere; here they are put in order, and what is drawn is packed. Tables and bars are plain HTML, so
that the page says the same without its script.
"""

from dataclasses import asdict
from statistics import median
from typing import Any

from hwprofiles.schema import Profile
from planner.predict.abridged import N_KEPT, abridged, abridged_plan, abridged_prediction
from planner.predict.cost import CostModel, region_of
from planner.predict.memory import footprint
from planner.predict.simulate import simulate
from runtime.plan import Plan, PlanFile
from runtime.plan.timeline import FIRST_KEPT, LAST_KEPT
from runtime.units import show_bytes, show_seconds

from .explain import GLOSS, LANE_TITLE, counted
from .report_html import bar, inline_json, lines, page, table, text
from .report_memory import OTHER, Held, held
from .report_run import LoggedRun
from .report_step import Stretch, measured_stretch, predicted_stretch
from .report_words import Known, claim_of, exact, facts, figures, heading, lane_rows, sureness, verdict, words
from .waterfall import TITLES, Waterfall, sensitivities, waterfall

MOST_ANALYSED_OPS = 60_000  # of a plan: beyond that the ten further simulations would take most of a minute
MOST_LINES_OPS = 30_000  # of a plan: beyond that the ops' own lines, some hundred bytes each, would make the page unwieldy
TICKS = 5_000_000  # of the longer stretch: times are drawn to that many parts, in whole numbers that are short to write
NOTHING_SAID = "(nothing but blanks)"
BAR_KINDS = ("ideal", "recompute", "link", "dram", "optimizer", "rest")  # in the order of a waterfall's parts


def report(file: PlanFile, where: str, run: LoggedRun | None, made: str = "") -> str:
    """The page: one HTML file that needs nothing else. PlanError for a plan, or a claim, that cannot be right. `made`: when, by
    which version and by which command, as its last line says it."""
    plan = file.plan
    profile = Profile.from_json(plan.profile, where)
    cost = CostModel(profile)
    prediction = simulate(plan, cost.demands(plan), region_of(profile))
    claim, outside = claim_of(file.claim, where), tuple(sorted(cost.outside))
    times_s = [] if run is None else sorted(run.step_times_s(plan.semantics.tokens_per_step))
    known = Known(plan, profile, prediction, footprint(plan, profile), claim, outside, run, times_s)
    drawn = abridged_plan(plan)
    stretches = {"predicted": predicted_stretch(drawn, abridged_prediction(plan, prediction))}
    if run is not None and run.timeline is not None and run.timeline.spans:
        stretches["measured"] = measured_stretch(drawn, abridged(plan, run.timeline))
    memory = held(drawn, profile, stretches["predicted"])
    return page(
        {
            "title": text(f"{heading(known)}: {'a run' if run else 'a plan'} of Penstock"),
            "heading": text(heading(known)),
            "facts": _facts(known),
            "figures": _figures(known),
            "verdict": '<div class="verdict">' + "".join(f"<p>{text(s)}</p>\n" for s in verdict(known)) + "</div>",
            "step_words": text(_step_words(plan, stretches, times_s)),
            "memory_words": text(_memory_words(stretches)),
            "lanes": _lanes(known),
            "memory": _memory_table(memory),
            "waterfall": _waterfall(known),
            "training": _training(known),
            "sureness": lines(list(sureness(known))),
            "footer": text(f"Made by penstock report from {where}, model {plan.model.fingerprint[:12]}. {made}".strip()),
            "words": "".join(f"<dt>{text(a)}</dt><dd>{text(b)}</dd>\n" for a, b in words(known)),
            "data": inline_json(_data(known, drawn, stretches, memory)),
        }
    )


def _facts(known: Known) -> str:
    """The policy, which takes many words, is folded."""
    rows = ((a, f"<details><summary>how the plan goes about it</summary>{text(b)}</details>" if a == "policy" else text(b))
            for a, b in facts(known))  # fmt: skip
    return '<dl class="facts">' + "".join(f"<dt>{text(a)}</dt><dd>{b}</dd>\n" for a, b in rows) + "</dl>"


def _figures(known: Known) -> str:
    tiles = ""
    for figure in figures(known):
        notes = "".join(f"<p>{text(note)}</p>" for note in figure.notes)
        below = f'<p class="measured">{text(figure.measured)}</p>' if figure.measured else ""
        tiles += (
            f'<div class="figure"><h2>{text(figure.title)}</h2><div class="value">{text(figure.value)}</div>{below}{notes}</div>\n'
        )
    return f'<div class="figures">{tiles}</div>'


def _memory_words(stretches: dict[str, Stretch]) -> str:
    """Over which part of the axis memory is drawn: it is predicted, and a measured step may be longer."""
    predicted_s, whole_s = stretches["predicted"].length_s, max(stretch.length_s for stretch in stretches.values())
    shorter = f", over the {exact(predicted_s)} of a predicted step" if predicted_s < 0.95 * whole_s else ""
    return f"What memory holds meanwhile, as predicted{shorter}"


def _step_words(plan: Plan, stretches: dict[str, Stretch], times_s: list[float]) -> str:
    """Which steps are drawn."""
    words = "From the device's first op of a step to that of the next, once the steps repeat. "
    if plan.repeat is not None and plan.repeat.times > N_KEPT:
        words += f"Of {plan.repeat.times:,} repetitions the first {FIRST_KEPT} and the last {LAST_KEPT} are drawn, "
        words += "and the time between them is left out. "
    if "measured" not in stretches:
        return words + "Predicted; a run of the plan would be drawn below each lane."
    took, step = exact(stretches["measured"].length_s), stretches["measured"].step + 1
    settled = (
        f" The measured step of all figures is the median of {counted(len(times_s), 'step')}, {exact(median(times_s))}."
        if times_s
        else ""
    )
    return (
        words
        + f"Above: predicted, {exact(stretches['predicted'].length_s)}. Below: a single measured step, step {step}, which took "
        f"{took}: the middle one of the settled steps whose ops are known.{settled}"
    )


def _lanes(known: Known) -> str:
    rows = [
        (f"{name}: {text(LANE_TITLE[lane])}", *cells)
        for lane, (name, *cells) in zip(known.plan.lanes, lane_rows(known), strict=True)
    ]
    head = ["lane", "predicted busy", "share", "measured busy", "share"][: len(rows[0])]
    return table(head, rows, "Busy in a step")


def _memory_table(memory: tuple[Held, Held]) -> str:
    rows = []
    for one in memory:
        rows.append((f"<b>{one.place}</b>", show_bytes(one.peak_bytes), show_bytes(sum(one.reserved.values()))))
        names = sorted(one.reserved, key=lambda name: (-one.reserved[name], name))
        rows += [
            (
                glossed(name.replace("_", " ")),
                show_bytes(max(one.series[name])) if name in one.series else "",
                show_bytes(one.reserved[name]),
            )
            for name in names
        ]
    body = table(("memory", "holds at most", "reserved"), rows)
    return f"<details><summary>Memory in numbers</summary>{body}</details>"


def glossed(name: str) -> str:
    """A part of memory, with what it holds where the cursor rests on it."""
    return f'<span title="{text(GLOSS[name])}">{text(name)}</span>' if name in GLOSS else text(name)


def _waterfall(known: Known) -> str:
    """The parts of the step one after the other, and what more of each resource would buy."""
    plan, profile = known.plan, known.profile
    if len(plan.ops) > MOST_ANALYSED_OPS:
        return f"<p>Left out: the plan has {len(plan.ops):,} ops, and this takes ten more simulations of them.</p>"
    found = waterfall(plan, profile)
    claim = known.claim if known.holds else None
    times_s = known.measured_s
    scale = max(found.step_s, *times_s[len(times_s) // 2 :][:1], claim.p90_step_s if claim else 0.0)
    rows = _waterfall_rows(found, scale)
    spread = (claim.p10_step_s, claim.p90_step_s) if claim else None
    rows.append(("the predicted step", exact(found.step_s), "100%", bar((("predicted", 0.0, found.step_s),), scale, spread)))
    if times_s:
        middle_s = median(times_s)
        rows.append(
            (
                "a measured step, the median",
                exact(middle_s),
                f"{middle_s / found.step_s:.0%}",
                bar((("measured", 0.0, middle_s),), scale),
            )
        )
    words = "The plan is simulated on a machine on which only computing takes time, then with one more burden after the other: "
    words += "what the step grows by is that burden's part." + (" The red range is P10 to P90." if claim else "")
    return f"<p class='lead'>{text(words)}</p>" + table(("part", "takes", "share", ""), rows) + _sensitivities(known)


def _waterfall_rows(found: Waterfall, scale: float) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    reached_s = 0.0
    for kind, (key, part_s) in zip(BAR_KINDS, asdict(found).items(), strict=True):
        picture = bar(((kind, reached_s, reached_s + part_s),), scale)
        rows.append((text(TITLES[key]), show_seconds(part_s), f"{part_s / found.step_s:.1%}", picture))
        reached_s += part_s
    return rows


def _sensitivities(known: Known) -> str:
    found = sensitivities(known.plan, known.profile)
    scale = max(*(abs(s.saved_s) for s in found), 1e-12)
    rows = []
    for s in found:
        picture = bar((("less" if s.saved_s < 0 else "gain", 0.0, abs(s.saved_s)),), scale)
        rows.append((text(s.resource), *s.row()[1:], picture))
    words = f"The same plan, simulated on {counted(len(found), 'machine')} that each have 10 % more of one thing. "
    words += "A search for such a machine may find a plan that gains more."
    return table(("10 % more of", "saves", "share", ""), rows, "What more of each would buy") + f"<p class='note'>{text(words)}</p>"


def _training(known: Known) -> str:
    """Where the curves go, and what the last samples say."""
    run = known.run
    if run is None or not (run.log.steps or run.log.evaluated or run.samples):
        return ""
    curves, log = _curves(known), run.log
    charts = "".join(
        f'<div class="chart"><h3>{text(c["title"])}</h3><canvas id="{c["id"]}" role="img" '
        f'aria-label="{text(c["title"])}, step by step"></canvas><div class="legend" id="{c["id"]}-legend"></div></div>'
        for c in curves
    )
    sentences = []
    if log.steps:
        of_loss = [loss for loss in log.columns["loss"] if loss is not None]
        ends = f": loss {of_loss[0]:.4g} at first, {of_loss[-1]:.4g} at last" if of_loss else ""
        sentences.append(f"Steps {log.steps[0]:,} to {log.steps[-1]:,}{ends}.")
    if log.evaluated and (last := log.evaluated[-1])[1] is not None:
        sentences.append(f"On held-out data {last[1]:.4g}, after step {last[0]:,}.")
    samples = "".join(
        f"<blockquote><b>{text(s.prompt)}</b>{text(s.text if s.text.strip() else NOTHING_SAID)}</blockquote>" for s in run.samples
    )
    if samples:
        samples = f"<h3>What the model said after step {run.samples[-1].step:,}</h3>{samples}"
    return (
        f'<section id="training"><h2>Training</h2><p>{text(" ".join(sentences))}</p>'
        f'<div class="needs-script charts">{charts}</div>{samples}</section>'
    )


# -- what the script draws ----------------------------------------------------------------------------------------------


def _data(known: Known, drawn: Plan, stretches: dict[str, Stretch], memory: tuple[Held, Held]) -> dict[str, Any]:
    ops = drawn.ops
    return {
        "lanes": [[str(lane), LANE_TITLE[lane]] for lane in drawn.lanes],
        "gloss": GLOSS,
        "n_blocks": len(known.plan.workload.blocks),
        "ops": [str(op) if len(ops) <= MOST_LINES_OPS else op.name for op in ops],
        "tracks": [_track(name, stretch) for name, stretch in stretches.items()],
        "memory": [_held_data(one) for one in memory],
        "curves": _curves(known),
    }


def _track(name: str, stretch: Stretch) -> dict[str, Any]:
    """The pieces of a stretch: their starts as differences, so that most numbers are short."""
    tick_s = max(stretch.length_s, 1e-12) / TICKS
    pieces = sorted(stretch.within(), key=lambda s: (s.start_s, s.step, s.op))
    starts = [round(p.start_s / tick_s) for p in pieces]
    return {
        "name": name,
        "length_s": stretch.length_s,
        "tick_s": tick_s,
        "op": [p.op for p in pieces],
        "start": [b - a for a, b in zip([0, *starts], starts, strict=False)],
        "length": [round(p.end_s / tick_s) - start for p, start in zip(pieces, starts, strict=True)],
        "later": [p.step for p in pieces] if any(p.step for p in pieces) else [],
    }


def _held_data(one: Held) -> dict[str, Any]:
    def packed(values: tuple[int, ...]) -> int | list[int]:
        return values[0] if len(set(values)) == 1 else list(values)

    # The steadiest lie at the bottom, so that what moves does not shake what does not; the small ones at the top.
    names = sorted(one.series, key=lambda name: (name == OTHER, max(one.series[name]) - min(one.series[name]), name))
    return {
        "place": str(one.place),
        "length_s": one.length_s,
        "times": [float(f"{t:.9g}") for t in one.times_s],
        "series": [{"name": n, "most": max(one.series[n]), "bytes": packed(one.series[n])} for n in names],
        "peak_bytes": one.peak_bytes,
        "reserved_bytes": sum(one.reserved.values()),
        "memory_bytes": one.memory_bytes,
    }


def _curves(known: Known) -> list[dict[str, Any]]:
    """Loss with evaluations, then speed with its prediction, then the learning rate: those of which there are numbers."""
    if known.run is None:
        return []
    log, n_tokens = known.run.log, known.plan.semantics.tokens_per_step

    def line(name: str, ink: str, steps: list[int], values: list[float | None], dots: bool = False) -> dict[str, Any]:
        shown = [None if v is None else float(f"{v:.6g}") for v in values]
        return {"name": name, "colour": ink, "steps": steps, "values": shown, "dots": dots}

    loss = [line("training", "forward", *log.curve("loss"))] if log.steps else []
    if log.evaluated:
        loss.append(line("held-out", "gradients", [step for step, _ in log.evaluated], [v for _, v in log.evaluated], dots=True))
    curves = [{"id": "loss", "title": "Loss", "height": 260, "lines": loss}]
    if log.steps and log.is_of(n_tokens):
        level = {"name": "predicted", "value": n_tokens / known.step_s, "colour": "ink"}
        speed = [line("measured", "weights", *log.curve("tokens_per_s"))]
        curves.append(
            {"id": "speed", "title": "Tokens per second", "height": 170, "lines": speed, "level": level, "from_zero": True}
        )
    if log.steps:
        rate = [line("learning rate", "update", *log.curve("lr"))]
        curves.append({"id": "rate", "title": "Learning rate", "height": 170, "lines": rate, "from_zero": True})
    return [c for c in curves if any(v is not None for one in c["lines"] for v in one["values"])]  # type: ignore[attr-defined]
