"""Commands and their options: those of options.toml, and flags generated from the fields of settings and semantics.

An absent flag is None: the file of `--config` or the default applies. Ranges are checked where the settings or semantics are
validated.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

import click

from penstock.run_config import ALSO_KNOWN_AS, advice, data_named
from penstock.runtime.errors import PenstockError
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.packed import Base
from penstock.runtime.plan.policy import COMPUTES
from penstock.runtime.units import parse_bytes, parse_count
from penstock.settings import FLAGS, Flag, Fraction, read_table, settings_of

from .outputs import checked_page

COUNT = click.IntRange(min=1)
PATH = click.Path(path_type=Path)


class Command(click.Command):
    """Command that accepts other trainers' names of its flags, and gives advice on an unknown flag."""

    also: ClassVar[Mapping[str, str]] = {}  # our flag, by another trainer's name

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            name = error.option_name
            flag = self.also.get(name.lstrip("-").replace("-", "_"), name.replace("_", "-"))
            if flag == name or not any(flag in param.opts for param in self.params):
                raise _unknown(error) from None
            position = next(i for i, arg in enumerate(args) if arg.partition("=")[0] == name)
            return self.parse_args(ctx, [*args[:position], flag + args[position].removeprefix(name), *args[position + 1 :]])


def _unknown(error: click.NoSuchOption) -> click.UsageError:
    """Return an error with advice on an unknown flag, or with flags of similar names."""
    name = error.option_name.lstrip("-").replace("-", "_")
    words = advice(name)
    if words.startswith(("did you mean", "there are")):
        if name not in ALSO_KNOWN_AS:
            return error
        words = f"it is {ALSO_KNOWN_AS[name]} in the file of `penstock run --config`"
    return click.UsageError(f"{error.option_name}: no such option; {words}")


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """Text that is parsed by a function. Its ValueError becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def above_0(maximum: float) -> Parsed:
    """Return the parameter type of a number above 0, up to `maximum`."""

    def parse(text: str) -> float:
        if not 0 < (number := float(text)) <= maximum:
            raise ValueError(f"{text!r} is not a number above 0 and up to {maximum:,.0f}")
        return number

    return Parsed("number", parse)


def parse_rate(text: str) -> int:
    """Parse bytes per second: `12GB` or `12GB/s`. Raise PenstockError for bits and numbers without a unit."""
    size = text.strip().removesuffix("/s")
    if not re.fullmatch(r"[0-9.]+\s*(?:[kKMGT][iI]?B?|[kmgt]i?b)|[0-9]{7,}", size):
        raise PenstockError(f"{text[:40]!r} is not a rate in bytes; write for example 12GB/s (bits: divide by 8)")
    return parse_bytes(size)


def parse_pixels(text: str) -> tuple[int, int]:
    """Parse width and height: `1024x768`. ValueError for another text."""
    edges = [int(edge) if edge.isdecimal() else 0 for edge in text.lower().split("x")]
    if len(edges) != 2 or not all(0 < edge < 2**16 for edge in edges):
        raise ValueError(f"{text[:40]!r}: no width and height; write it as 1024x768")
    return edges[0], edges[1]


def sequences_of_a_step(batch_size: int | None, tokens_per_step: int | None, seq_len: int) -> int:
    """Return the sequences per step, given directly or as tokens."""
    if tokens_per_step is None:
        return batch_size or 16
    if batch_size is not None:
        raise click.UsageError("--batch-size and --tokens-per-step are alternatives; give one of them")
    if tokens_per_step % seq_len:
        near = max(1, round(tokens_per_step / seq_len)) * seq_len
        raise click.UsageError(f"--tokens-per-step {tokens_per_step} is no multiple of --seq-len {seq_len}; {near} is")
    return tokens_per_step // seq_len


Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*options: Option) -> Option:
    return lambda command: reduce(lambda command, option: option(command), reversed(options), command)


_TABLES = read_table("cli/options.toml")
_SETTINGS = {name: setting for name, setting in settings_of() if name in FLAGS}
HOST = ("host_cores", "link_bytes_per_s", "host_bandwidth_bytes_per_s")  # parameters of the group `host`
PRICES = ("usd_per_hour", "usd", "usd_per_kwh")
TYPES: dict[str, Any] = {
    "base": click.Choice(get_args(Base)),
    "bytes": Parsed("size", parse_bytes),
    "compute": click.Choice(COMPUTES),
    "count": COUNT,
    "file": click.Path(dir_okay=False, path_type=Path),
    "length": click.IntRange(2),
    "natural": click.IntRange(0),
    "norm": Parsed("norm|none", lambda text: None if text == "none" else above_0(1e12).parse(text)),
    "page": Parsed("file", checked_page),
    "path": PATH,
    "pixels": Parsed("WxH", parse_pixels),
    "rate": Parsed("rate", parse_rate),
    "share": click.FloatRange(0, 1),
    "temperature": click.FloatRange(0, 100),
    "tokens": Parsed("count", parse_count),
    "top-p": click.FloatRange(0, 1, min_open=True),
}


class RunCommand(Command):
    """Command that accepts other trainers' names of settings."""

    also = {alias: FLAGS[name].name for alias, name in ALSO_KNOWN_AS.items() if name in FLAGS}


def command(name: str, kind: type[click.Command] = click.Command) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a command of a function. Its help, arguments and options are in options.toml."""
    return lambda function: click.command(name, cls=kind, help=_TABLES[name]["help"])(_parameters(name)(function))


def _parameters(name: str) -> Option:
    """Return a decorator with the arguments and options of a command, of a group of options, or of a setting."""
    if name == "settings":
        return together(*map(_parameters, _SETTINGS))
    if name in _SETTINGS:
        return _flag(FLAGS[name], name.replace(".", "__"), _SETTINGS[name])
    if name == "semantics":
        flags = {name: Flag(**flag) for name, flag in _TABLES[name].items()}
        return together(*(_flag(flags[f.name], f.name, f) for f in fields(Semantics) if f.name in flags))
    entries = [(key, value) for key, value in _TABLES[name].items() if not isinstance(value, str)]  # without help
    return together(*(_parameters(key) if value is True else _parameter(key, **value) for key, value in entries))


def _parameter(declaration: str, type: str | float | list[str] | None = None, **arguments: Any) -> Option:
    kind = click.Choice(type) if isinstance(type, list) else TYPES[type] if isinstance(type, str) else type and above_0(type)
    if not declaration.startswith("-"):
        return click.argument(declaration, type=kind, **arguments)
    return click.option(*declaration.split(), type=kind, **{"show_default": "default" in arguments} | arguments)


def _flag(flag: Flag, param: str, field: Field[Any]) -> Option:
    if field.default is False:
        return click.option(flag.name, param, is_flag=True, default=None, help=flag.help)
    shown = field.default if flag.default is None else flag.default
    kind = click.Choice(COMPUTES) if param == "compute_dtype" else _type(field.type)
    text = flag.help + " Can be repeated." * flag.repeats + (f"  [default: {shown}]" if shown not in (None, ()) else "")
    return click.option(flag.name, param, type=kind, multiple=flag.repeats, metavar=flag.metavar, help=text)


def _type(kind: Any) -> Any:
    """Return the click type of a field: a choice, a number or text."""
    if kind is Fraction:
        return Parsed("share", _share)
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    inner = get_args(kind)
    return _type(inner[0]) if inner else {int: click.INT, float: click.FLOAT}.get(kind, click.STRING)


def _share(text: str) -> float:
    """Parse `1%` or `0.01`. ValueError for `1`, which may mean one percent, one row or all rows."""
    number, is_percent = text.removesuffix("%"), text.endswith("%")
    if number.replace(".", "", 1).isdecimal() and (is_percent or float(number) < 1):
        return float(number) / (100 if is_percent else 1)
    raise ValueError(f"{text[:40]!r} is no share of the rows; write 1% or 0.01")


def given_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given as flags, by dotted name."""
    settings = {param.replace("__", "."): value for param, value in params.items() if value not in (None, ())}
    if "data.columns" in settings:
        columns = [_column(text) for text in settings["data.columns"]]
        if len(dict(columns)) < len(columns):
            raise click.UsageError("--columns: a name is given two columns of the file; give each name one")
        settings["data.columns"] = dict(columns)
    if "optimizer.groups" in settings:
        settings["optimizer.groups"] = [_rate_group(text) for text in settings["optimizer.groups"]]
    if "data.path" in settings:
        settings |= {f"data.{key}": value for key, value in data_named(settings["data.path"]).items()}
    return settings


def _rate_group(text: str) -> dict[str, Any]:
    """Parse `*norm*=1e-5`, `*norm*=0.1x` (times the rate), or either with `,decay=0.1`, which may be alone: `*norm*=,decay=0`."""
    if (match := re.fullmatch(r"([^=]+)=(?:([0-9.e+-]+)(x)?)?(?:,decay=([0-9.e+-]+))?", text)) is None:
        raise click.UsageError(f"--lr-group {text[:60]}: write PATTERN=RATE, for example '*norm*=1e-5' or '*norm*=0.1x,decay=0'")
    pattern, rate, factor, decay = match.groups()
    fields = {"pattern": pattern, "lr_factor" if factor else "lr": rate, "weight_decay": decay}
    return {name: value for name, value in fields.items() if value is not None}


def _column(text: str) -> tuple[str, str]:
    name, _, column = text.partition("=")
    if not name or not column:
        raise click.UsageError(f"--columns {text[:60]}: write NAME=COLUMN, for example prompt=question")
    return name, column
