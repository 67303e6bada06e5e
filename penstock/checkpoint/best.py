"""Best checkpoint of a run by a metric of its evaluations, and the number of evaluations without a gain.

Both are computed from the evaluations in the log, so that a resumed run has those of an uninterrupted one. BEST_FILE in the run's
folder names the best checkpoint, once that is on disk.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from penstock.planner.show.run_log import number
from penstock.run_config import RunConfigError
from penstock.runtime.errors import CheckpointError
from penstock.runtime.files import read_whole, write_whole
from penstock.runtime.plan.objective import LossUnit, Objective
from penstock.runtime.plan.workload import FILE, Count
from penstock.settings import EvaluationSettings, Metric

from .disk import writing

BEST_FILE = "best.json"
MAX_BYTES = 2**16
HIGHER = frozenset({"accuracy"})  # metrics with a higher best value


@dataclass(frozen=True, slots=True)
class Best:
    """Contents of BEST_FILE."""

    metric: Metric
    step: Count
    value: Annotated[float, Field(allow_inf_nan=False)]
    __pydantic_config__ = FILE

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4f} after step {self.step}"


_BEST = TypeAdapter(Best)


def best_of(
    lines: Iterable[Mapping[str, Any]], settings: EvaluationSettings, held_out: str | None = None
) -> tuple[Best | None, int]:
    """Return the best evaluation in a log, and the number of evaluations since the last gain of more than `min_gain`. The one
    before the first step does not count, because it has no checkpoint. Values that are not finite are no gain. `held_out`: digest
    of the held-out data; evaluations on other data do not count."""
    best, base, n_without_gain = None, math.inf, 0
    if (metric := settings.metric) is None:
        return None, 0
    sign = -1 if metric in HIGHER else 1
    for fields in lines:
        if "eval_loss" not in fields or not fields["step"] or is_of_other_data(fields, held_out):
            continue
        value = number(fields.get(f"eval_{metric}"))
        score = math.inf if value is None else sign * value
        if value is not None and (best is None or score < sign * best.value):
            best = Best(metric, fields["step"], value)
        n_without_gain += 1
        if score < base - settings.min_gain:
            base, n_without_gain = score, 0
    return best, n_without_gain


def is_of_other_data(fields: Mapping[str, Any], held_out: str | None) -> bool:
    """True for an evaluation of a checkpoint on other held-out data than that with this digest."""
    return "eval_loss" in fields and bool(fields["step"]) and fields.get("held_out", held_out) != held_out


def write_best(folder: Path, best: Best) -> None:
    with writing(folder / BEST_FILE):
        write_whole(folder / BEST_FILE, _BEST.dump_json(best, indent=1).decode() + "\n")


def read_best(folder: Path) -> Best | None:
    """Read the best checkpoint that a run named, or None. CheckpointError if the file is damaged."""
    path = folder / BEST_FILE
    try:
        return _BEST.validate_json(read_whole(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        raise CheckpointError(
            f"{path}: not written by a run; remove it: a resumed run writes it again, from metrics.jsonl"
        ) from None


def refuse_another_log(folder: Path, lines: Iterable[Mapping[str, Any]], first_step: int) -> None:
    """CheckpointError if the log up to the resumed step lacks the evaluation that BEST_FILE names."""
    best = read_best(folder)
    if best is None or best.step > first_step:
        return
    if (best.step, best.value) not in ((fields["step"], fields.get(f"eval_{best.metric}")) for fields in lines):
        log = f"metrics.jsonl lacks the evaluation that {BEST_FILE} names ({best})"
        raise CheckpointError(f"{folder}: {log}; put the log back, or remove {BEST_FILE} to begin to compare again")


def refuse_unreported(settings: EvaluationSettings, objective: Objective) -> None:
    """RunConfigError if evaluations of the loss do not report the metric."""
    reported = ["loss"]
    if objective.of is LossUnit.TOKENS:
        reported += ["perplexity"] + ["divergence"] * (objective.n_top is not None)
    elif objective.of in (LossUnit.PAIRS, LossUnit.ANSWERS) or objective.n_labels is not None:
        reported.append("accuracy")
    if settings.metric is not None and settings.metric not in reported:
        problem = f"is not reported by evaluations of this plan's loss; give {' or '.join(reported)}"
        raise RunConfigError(f"evaluation.best: {settings.metric} {problem}")
