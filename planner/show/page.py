"""HTML report of a plan and of a run of it, as a single self-contained file.

Names come from untrusted files. The template escapes every value, data is JSON where no tag can start, and a
Content-Security-Policy allows only the inline script and style: no network, no frames. Tables and bars are plain HTML, so that the
page is complete without its script.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from math import inf
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from penstock.planner.predict.abridged import N_KEPT, abridged, abridged_plan
from penstock.planner.predict.cost import region_of
from penstock.planner.predict.simulate import simulate
from penstock.runtime.units import show_bytes, show_count, show_duration, show_rate

from . import report_lines
from .facts import Facts
from .memory import Occupancy, occupancy
from .step import Stretch, measured_stretch, predicted_stretch

SCRIPTS = ("draw.js", "step.js", "memory.js", "curves.js")
MOST_LINES_OPS = 30_000  # of a plan; with more, the text of the ops (about 100 bytes each) would make the page too large
MOST_STRETCHES = 750  # of a curve: half the pixels of a wide screen
TICKS = 5_000_000  # of the longer stretch: integer times are short to write


def page(facts: Facts, where: str, created: str = "") -> str:
    """Render the page. `where`: the plan file; `created`: date, version and command for the last line."""
    plan, run = facts.plan, facts.run
    shown, prediction = abridged_plan(plan), facts.prediction
    if plan.repeat is not None:
        prediction = simulate(shown, facts.cost.demands(shown), region_of(facts.profile))
    stretches = {"predicted": predicted_stretch(shown, prediction)}
    if run is not None and run.timeline is not None and run.timeline.spans:
        stretches["measured"] = measured_stretch(shown, abridged(plan, run.timeline))
    memory = occupancy(shown, facts.profile, stretches["predicted"])
    data = {
        "lanes": [[str(lane), report_lines.LANE_TITLE[lane]] for lane in shown.lanes],
        "gloss": report_lines.GLOSS,
        "n_blocks": len(plan.workload.blocks),
        "ops": [str(op) if len(shown.ops) <= MOST_LINES_OPS else op.name for op in shown.ops],
        "tracks": [_track(name, stretch, stretches["predicted"], facts.is_comparable) for name, stretch in stretches.items()],
        "memory": [_memory_json(one) for one in memory],
        "curves": _curves(facts),
    }
    context = {"f": facts, "report": report_lines, "stretches": stretches, "occupancy": memory, "where": where, "n_kept": N_KEPT}
    return rendered("page.html", SCRIPTS, data, created, **context)


def rendered(template: str, scripts: Sequence[str], data: dict[str, Any], created: str, **context: Any) -> str:
    """Render a template that extends base.html. `scripts`: files for its only script, which reads `data`."""
    script, style = "\n".join(map(_file, scripts)), _file("page.css")
    context |= {"data": data, "created": created, "script": Markup(script), "style": Markup(style)}
    return _environment().get_template(template).render(context).encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, finalize=_printable)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    shown = {"exact": report_lines.exact, "bytes": show_bytes, "count": show_count, "rate": show_rate, "duration": show_duration}
    environment.filters |= shown | {"digest": _digest}
    return environment


def _file(name: str) -> str:
    return (resources.files("penstock.planner.show") / "page" / name).read_text(encoding="utf-8")


def _printable(value: object) -> object:
    """Escape control characters and bidirectional overrides in text."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in value)


def _digest(content: str) -> str:
    """Content-Security-Policy hash of a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")


def _track(name: str, stretch: Stretch, predicted: Stretch, is_comparable: bool) -> dict[str, Any]:
    """Encode a stretch. Start times are stored as differences, to keep the numbers short. `zoom`: factor to the time axis of the
    prediction; a run that is not comparable with it is drawn at the same width."""
    tick_s = max(stretch.length_s, 1e-12) / TICKS
    pieces = sorted(stretch.within(), key=lambda s: (s.start_s, s.step, s.op))
    starts = [round(p.start_s / tick_s) for p in pieces]
    return {
        "name": name,
        "length_s": stretch.length_s,
        "zoom": 1.0 if is_comparable else max(predicted.length_s, 1e-12) / max(stretch.length_s, 1e-12),
        "tick_s": tick_s,
        "op": [p.op for p in pieces],
        "start": [b - a for a, b in zip([0, *starts], starts, strict=False)],
        "length": [round(p.end_s / tick_s) - start for p, start in zip(pieces, starts, strict=True)],
        "later": [p.step for p in pieces] if any(p.step for p in pieces) else [],
    }


def _memory_json(one: Occupancy) -> dict[str, Any]:
    """Encode memory occupancy; constant series are stored as one number."""
    # Steady series at the bottom keep the others level.
    names = sorted(one.series, key=lambda name: (max(one.series[name]) - min(one.series[name]), name))
    packed = {name: values[0] if len(set(values)) == 1 else list(values) for name, values in one.series.items()}
    return {
        "place": str(one.place),
        "length_s": one.length_s,
        "times": [float(f"{t:.9g}") for t in one.times_s],
        "series": [{"name": name, "most": max(one.series[name]), "bytes": packed[name]} for name in names],
        "peak_bytes": one.peak_bytes,
        "reserved_bytes": sum(one.reserved.values()),
        "memory_bytes": one.memory_bytes,
    }


def _worth_drawing(values: Sequence[float | None]) -> list[int]:
    """Indices of the minimum and maximum in each of MOST_STRETCHES intervals of a curve; a gap counts as the minimum."""
    width = -(-len(values) // MOST_STRETCHES) or 1
    stretches = (range(i, min(i + width, len(values))) for i in range(0, len(values), width))
    height = [-inf if v is None else v for v in values]
    pairs = ((min(stretch, key=height.__getitem__), max(stretch, key=height.__getitem__)) for stretch in stretches)
    return sorted({i for pair in pairs for i in pair})


def _curves(facts: Facts) -> list[dict[str, Any]]:
    """Encode the curves with data: loss with evaluations, speed with its prediction, and learning rate."""
    if facts.run is None:
        return []
    log, n_tokens = facts.run.log, facts.plan.semantics.tokens_per_step

    def line(name: str, ink: str, values: Sequence[float | None], steps: Sequence[int] = log.steps, dots: bool = False) -> Any:
        indices = _worth_drawing(values)
        points = [None if (v := values[i]) is None else float(f"{v:.6g}") for i in indices]
        return {"name": name, "colour": ink, "steps": [steps[i] for i in indices], "values": points, "dots": dots}

    eval_steps = [step for step, _ in log.evaluated]
    held_out = line("held-out", "gradients", [loss for _, loss in log.evaluated], eval_steps, dots=True)
    loss = [line("training", "forward", log.columns["loss"]), held_out]
    speed, rate = line("measured", "weights", log.columns["tokens_per_s"]), line("learning rate", "update", log.columns["lr"])
    level = {"level": {"name": "predicted", "value": n_tokens / facts.step_s, "colour": "ink"}} if facts.is_comparable else {}
    curves: list[dict[str, Any]] = [
        {"id": "loss", "title": "Loss", "height": 260, "lines": [curve for curve in loss if curve["steps"]]},
        {"id": "speed", "title": "Tokens per second", "height": 170, "from_zero": True, **level}
        | {"lines": [speed] if log.has_step_size(n_tokens) else []},
        {"id": "rate", "title": "Learning rate", "height": 170, "from_zero": True, "lines": [rate]},
    ]
    return [curve for curve in curves if any(v is not None for one in curve["lines"] for v in one["values"])]
