"""Which settings of a run are flags?

Those that people change from run to run; all others stand in the file of `--config`. A flag that is not given says
nothing, so that the file, or else the default, holds.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import click

from runtime.settings import Device, Format, Packing, ScheduleKind, Service

from .options import Count

MAX_STEPS = 10**9
MAX_NUMBER = 1e6


class Number(click.FloatRange):
    """A number that is one: click lets `nan` through every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "above 0" if self.min_open else "0 or more"


POSITIVE = Number(min=0, min_open=True, max=MAX_NUMBER)
STEPS = Count(1, MAX_STEPS)
NATURAL = Count(0, MAX_STEPS)
PATH = click.Path(path_type=Path)


def _named(names: Any) -> click.Choice[str]:
    return click.Choice(get_args(names))


# Each flag that sets something: its name, the setting's, and what click is to know of it.
_SETTINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--data", "data.path", {"type": PATH, "help": "A folder of files, or one file: text, JSONL or Parquet."}),
    (
        "--format",
        "data.format",
        {"type": _named(Format), "help": "What a row holds.  [default: by its columns]"},
    ),
    (
        "--packing",
        "data.packing",
        {
            "type": _named(Packing),
            "help": "How documents share a sequence: joined and cut, whole and each by itself, or one in each.  [default: auto]",
        },
    ),
    ("--streaming", "data.streaming", {"is_flag": True, "default": None, "help": "Read data as it is needed; give --steps."}),
    ("--workers", "data.workers", {"type": Count(0, 1024), "help": "Processes that prepare data ahead.  [default: 0]"}),
    ("--model", "model", {"type": PATH, "help": "Folder with weights and tokenizer.  [default: the plan's model]"}),
    ("--steps", "steps", {"type": STEPS, "help": "Steps in all, resumed ones included.  [default: once through the data]"}),
    ("--epochs", "epochs", {"type": POSITIVE, "help": "Instead of --steps: times through the data."}),
    ("--out", "out", {"type": PATH, "help": "Where checkpoints and logs go.  [default: penstock-run]"}),
    ("--save-every", "checkpoint.every", {"type": STEPS, "help": "Steps between checkpoints.  [default: only at the end]"}),
    ("--keep", "checkpoint.keep", {"type": STEPS, "help": "Keep only the last N checkpoints.  [default: all]"}),
    (
        "--seed",
        "seed",
        {"type": Count(0, 2**63 - 1), "help": "Of random weights, dropout and the order of the data.  [default: 0]"},
    ),
    ("--lr", "optimizer.lr", {"type": POSITIVE, "help": "Learning rate of AdamW.  [default: 1e-05]"}),
    (
        "--schedule",
        "optimizer.schedule.kind",
        {
            "type": _named(ScheduleKind),
            "help": "The learning rate after warm-up.  [default: constant]",
        },
    ),
    ("--warmup-steps", "optimizer.schedule.warmup_steps", {"type": NATURAL, "help": "Steps of warm-up.  [default: 0]"}),
    (
        "--weight-decay",
        "optimizer.weight_decay",
        {"type": Number(min=0, max=MAX_NUMBER), "help": "Of weights that are matrices.  [default: 0]"},
    ),
    ("--eval-data", "evaluation.data", {"type": PATH, "help": "Held-out data, for its loss and perplexity."}),
    ("--eval-every", "evaluation.every", {"type": STEPS, "help": "Steps between evaluations.  [default: only at the end]"}),
    (
        "--prompt",
        "evaluation.prompts",
        {"multiple": True, "help": "Shown with what the model makes of it, at each evaluation. Can be repeated."},
    ),
    (
        "--monitor",
        "monitors",
        {"type": _named(Service), "multiple": True, "help": "Log there too. Can be repeated."},
    ),
    (
        "--device",
        "device",
        {
            "type": _named(Device),
            "help": "What performs the plan: a GPU if there is one, else this CPU (auto), or the plan's machine, emulated on a "
            "tiny model.  [default: auto]",
        },
    ),
    (
        "--deterministic",
        "deterministic",
        {
            "is_flag": True,
            "default": None,
            "help": "With a GPU: bits that do not depend on the plan, as on a CPU, of a plan made with --deterministic. "
            "Some kernels are slower.",
        },
    ),
)
_SETTING_OF = {flag.removeprefix("--").replace("-", "_"): setting for flag, setting, _ in _SETTINGS}


def setting_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every flag of a setting, in this order."""
    for flag, _, known in reversed(_SETTINGS):
        command = click.option(flag, **known)(command)
    return command


def given_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, by dotted names."""
    given = {_SETTING_OF[name]: value for name, value in params.items() if name in _SETTING_OF and value not in (None, ())}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
