"""Which settings of a run are flags?

Those that people change from run to run; all others stand in the file of `--config`. A flag that is not given says
nothing, so that the file, or else the default, holds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from penstock.run_config import ALSO_KNOWN_AS, part_of
from penstock.settings import Device, Format, Packing, ScheduleKind, Service, Tokenizer

from .options import Command, Count

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
    (
        "--data",
        "data.path",
        {
            "type": PATH,
            "multiple": True,
            "metavar": "PATH[:WEIGHT]",
            "help": "A folder of files, or one file: text, JSONL, JSON, CSV or Parquet. Can be repeated, with the share of samples "
            "that is to come from each.",
        },
    ),
    (
        "--format",
        "data.format",
        {"type": _named(Format), "help": "What a row holds.  [default: by its columns]"},
    ),
    (
        "--columns",
        "data.columns",
        {"multiple": True, "metavar": "NAME=COLUMN", "help": "What files call a column, as prompt=question. Can be repeated."},
    ),
    ("--split", "data.split", {"help": "Of a folder's splits those that begin so.  [default: train, where there are splits]"}),
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
    (
        "--from-scratch",
        "from_scratch",
        {"is_flag": True, "default": None, "help": "Train random weights, which know nothing; without it weights are a must."},
    ),
    (
        "--adapter",
        "adapter",
        {"type": PATH, "help": "Folder of an adapter, as PEFT saves it, to go on from.  [default: a new one]"},
    ),
    (
        "--packed",
        "packed",
        {"type": PATH, "help": "Folder that keeps weights once they are packed, for other runs too.  [default: in --out]"},
    ),
    ("--tokenizer", "tokenizer", {"type": _named(Tokenizer), "help": "The model's own, or UTF-8 bytes.  [default: model]"}),
    ("--steps", "steps", {"type": STEPS, "help": "Steps in all, resumed ones included.  [default: once through the data]"}),
    ("--epochs", "epochs", {"type": POSITIVE, "help": "Instead of --steps: times through the data."}),
    ("--out", "out", {"type": PATH, "help": "Where checkpoints and logs go.  [default: penstock-run]"}),
    (
        "--save-every",
        "checkpoint.every",
        {"type": STEPS, "help": "Steps between checkpoints.  [default: by time, and at the end]"},
    ),
    (
        "--save-minutes",
        "checkpoint.minutes",
        {"type": Number(min=0, max=MAX_NUMBER), "help": "The longest time between checkpoints; 0: any.  [default: 60]"},
    ),
    ("--keep", "checkpoint.keep", {"type": STEPS, "help": "Keep only the last N checkpoints.  [default: all]"}),
    (
        "--weights-only",
        "checkpoint.weights_only",
        {"is_flag": True, "default": None, "help": "Save the model alone, 2 bytes a parameter: nothing to resume from."},
    ),
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
    ("--eval-base", "evaluation.base", {"is_flag": True, "default": None, "help": "Evaluate the model without its adapter, too."}),
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


def flag_of(setting: str) -> Callable[..., Any]:
    """The flag of one setting."""
    (found,) = (click.option(flag, **known) for flag, name, known in _SETTINGS if name == setting)
    return found


def given_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, by dotted names."""
    given = {_SETTING_OF[name]: value for name, value in params.items() if name in _SETTING_OF and value not in (None, ())}
    if "data.columns" in given:
        given["data.columns"] = dict(_column(said) for said in given["data.columns"])
    if "data.path" in given:
        given |= data_settings([str(path) for path in given["data.path"]])
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def data_settings(paths: Sequence[str]) -> dict[str, Any]:
    """The settings that say what is trained on: one path, or several, each perhaps with a weight behind a colon."""
    parts = [part_of(path) for path in paths]
    if len(parts) == 1 and "weight" not in parts[0]:
        return {"data.path": parts[0]["path"], "data.mix": ()}
    return {"data.path": None, "data.mix": parts}


def _column(said: str) -> tuple[str, str]:
    name, _, column = said.partition("=")
    if not name or not column:
        raise click.UsageError(f"--columns {said[:60]}: say which column of the file is meant, as prompt=question")
    return name, column


class RunCommand(Command):
    """Takes settings of a run by the names of others too."""

    def also(self) -> Mapping[str, str]:
        flags = {setting: flag for flag, setting, _ in _SETTINGS}
        return {name: flags[setting] for name, setting in ALSO_KNOWN_AS.items() if setting in flags}
