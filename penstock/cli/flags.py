"""Command-line flags made of dataclass fields: the settings of a run and the semantics of a plan.

A field says the type of its flag, and a `Flag` its name and help. A flag that is not given is None: then the file of `--config`, or
else the default, holds. Values out of range are found where all settings, or all semantics, are validated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from penstock.run_config import ALSO_KNOWN_AS, part_of
from penstock.settings import Flag, settings_of
from runtime.plan import Semantics

from .options import Command, Option, together

PATH = click.Path(path_type=Path)
_SETTINGS = {setting.name: setting for setting in settings_of()}
_FLAGS = {setting.name: setting.flag for setting in settings_of() if setting.flag is not None}
_SEMANTICS = {
    "micro_batch": Flag("--micro-batch", "Sequences computed at a time; the last may be fewer.", "the fastest"),
    "on_nonfinite": Flag("--on-nonfinite", "When a gradient is not finite."),
    "master_dtype": Flag("--master", "Dtype of the master weights."),
    "compute_dtype": Flag("--compute", "Compute dtype (matmuls)."),
    "gradient_dtype": Flag("--gradient-dtype", "Dtype of gradients.", "bf16; of adapters fp32"),
    "attention": Flag("--attention", "Attention implementation.", "the better one of the model's"),
    "loss_tile_tokens": Flag(
        "--loss-tile-tokens", "Tokens whose logits exist at a time.", "4096 with fused kernels, else 1024, or what fits"
    ),
    "mlp_tile_tokens": Flag("--mlp-tile-tokens", "Tokens that go through an MLP at a time.", "all, or what fits"),
    "sum_groups": Flag(
        "--sum-groups",
        "Groups of micro-batches whose gradients are summed apart, then as a tree: an order that up to as many GPUs keep.",
        "1; of several GPUs 8, or as many as divide the batch",
    ),
}


class RunCommand(Command):
    """A command that takes settings by the names that other trainers give them, too."""

    also = {other: _FLAGS[name].name for other, name in ALSO_KNOWN_AS.items() if name in _FLAGS}


def option(flag: Flag, param: str, kind: Any, default: Any) -> Option:
    """A click option for a field of this type and default."""
    if default is False:
        return click.option(flag.name, param, is_flag=True, default=None, help=flag.help)
    shown = default if flag.default is None else flag.default
    text = flag.help + " Can be repeated." * flag.repeats + (f"  [default: {shown}]" if shown not in (None, ()) else "")
    return click.option(flag.name, param, type=_type(kind), multiple=flag.repeats, metavar=flag.metavar, help=text)


def _type(kind: Any) -> Any:
    """What click parses: a choice, a number or text."""
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    inner = get_args(kind)
    return _type(inner[0]) if inner else {int: click.INT, float: click.FLOAT}.get(kind, click.STRING)


def flag_of(name: str) -> Option:
    """The flag of one setting, as `optimizer.lr`."""
    setting = _SETTINGS[name]
    return option(_FLAGS[name], name.replace(".", "__"), setting.type, setting.default)


setting_flags = together(*map(flag_of, _FLAGS))
semantics_flags = together(
    *(
        option(_SEMANTICS[field.name], field.name, field.type, field.default)
        for field in fields(Semantics)
        if field.name in _SEMANTICS
    )
)


def given_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given as flags, by dotted names."""
    given = {param.replace("__", "."): value for param, value in params.items() if value not in (None, ())}
    if "data.columns" in given:
        given["data.columns"] = dict(_column(text) for text in given["data.columns"])
    return given | (data_settings(given["data.path"]) if "data.path" in given else {})


def data_settings(paths: Sequence[str]) -> dict[str, Any]:
    """The settings of training data: one path, or several, each perhaps with a weight behind a colon."""
    parts = [part_of(path) for path in paths]
    if len(parts) == 1 and "weight" not in parts[0]:
        return {"data.path": parts[0]["path"], "data.mix": ()}
    return {"data.path": None, "data.mix": parts}


def _column(text: str) -> tuple[str, str]:
    name, _, column = text.partition("=")
    if not name or not column:
        raise click.UsageError(f"--columns {text[:60]}: say which column of the file is meant, as prompt=question")
    return name, column
