"""Options shared by commands, and flags generated from the fields of settings and semantics.

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
from penstock.runtime.plan.optimizer import RULES
from penstock.runtime.plan.policy import COMPUTES
from penstock.runtime.units import parse_bytes, parse_count
from penstock.settings import Flag, Fraction, settings_of

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


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
BYTES, TOKENS = Parsed("size", parse_bytes), Parsed("count", parse_count)


def parse_rate(text: str) -> int:
    """Parse bytes per second: `12GB` or `12GB/s`. Raise PenstockError for bits and numbers without a unit."""
    size = text.strip().removesuffix("/s")
    if not re.fullmatch(r"[0-9.]+\s*(?:[kKMGT][iI]?B?|[kmgt]i?b)|[0-9]{7,}", size):
        raise PenstockError(f"{text[:40]!r} is not a rate in bytes; write for example 12GB/s (bits: divide by 8)")
    return parse_bytes(size)


RATE = Parsed("rate", parse_rate)


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


with_batch = together(
    click.option("--batch-size", type=COUNT, help="Sequences of a step.  [default: 16]"),
    click.option("--tokens-per-step", type=COUNT, help="Instead of --batch-size: a multiple of --seq-len."),
)
# Other options that define a step
with_work = together(
    click.option("--seq-len", type=COUNT, default=4096, show_default=True, help="Tokens of a sequence."),
    click.option(
        "--clip-norm",
        type=Parsed("norm|none", lambda text: None if text == "none" else above_0(1e12).parse(text)),
        default=1.0,
        show_default=True,
        help="Largest norm of the whole gradient.",
    ),
    click.option(
        "--train",
        metavar="WHAT",
        help="all, lora (or lora:r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj: names, an expression /.*_proj/, by default "
        "all-linear; experts are a target, too, without dropout), "
        "names:*norm.weight, layers:20-31; the rest is frozen.  [default: all]",
    ),
    click.option(
        "--base",
        type=click.Choice(["bf16", "nf4", "int8", "fp8", "mxfp4", "fp8-rows"]),
        help="Storage of frozen weights: in bf16, or quantized to 4 or 8 bits; mxfp4: gpt-oss, as published; fp8-rows: for "
        "--compute fp8.  [default: bf16]",
    ),
    click.option(
        "--optimizer",
        metavar="WHAT",
        help=f"{' or '.join(RULES)}, optionally with low-bit state: adamw:moments=int8,master=split24.  [default: adamw]",
    ),
    click.option(
        "--gpus",
        type=COUNT,
        default=1,
        show_default=True,
        help="GPUs of a host that share each step (compare: all of a machine, unless given). Results are bitwise identical for any "
        "number of GPUs with the same --sum-groups.",
    ),
    click.option("--hosts", type=COUNT, default=1, show_default=True, help="Hosts, each with --gpus GPUs."),
    click.option("--network-gbit", type=above_0(99_999), help="Gbit/s of each host's network.  [default: the profile's]"),
)
# The host of a rented machine, as it differs from the profile's: the arguments of `rented`
with_host = together(
    click.option("--host-cores", type=COUNT, help="Cores of the host; more than its profile's add nothing."),
    click.option(
        "--link", "link_bytes_per_s", type=RATE, help="Rate of host to GPU, each direction: 12GB/s.  [default: the profile's]"
    ),
    click.option(
        "--host-bandwidth",
        "host_bandwidth_bytes_per_s",
        type=RATE,
        help="Rate of host memory: 100GB/s.  [default: the profile's, with fewer --host-cores their share of it]",
    ),
)
HOST = ("host_cores", "link_bytes_per_s", "host_bandwidth_bytes_per_s")
NO_DROPOUT = click.option("--no-dropout", is_flag=True, help="Train with all dropout of the model's config.json off.")
PRICES = ("usd_per_hour", "usd", "usd_per_kwh")
with_prices = together(
    click.option("--tokens", type=TOKENS, help="Also the time and the price of this many tokens: 100M."),
    click.option("--usd-per-hour", type=above_0(9_999_999), help="Rent of the machine.  [default: the profile's]"),
    click.option("--usd", type=above_0(9_999_999), help="Price of the whole machine, bought.  [default: the profile's]"),
    click.option("--usd-per-kwh", type=above_0(9_999_999), help="Price of power.  [default: 0.15]"),
)

# -- generated from fields --------------------------------------------------------------------------------------------------

_SETTINGS = {name: setting for name, setting in settings_of() if "flag" in setting.metadata}
_SEMANTICS = {
    "micro_batch": Flag("--micro-batch", "Sequences computed at a time; the last may be fewer.", "the fastest"),
    "on_nonfinite": Flag("--on-nonfinite", "When a gradient is not finite."),
    "master_dtype": Flag("--master", "Dtype of the master weights."),
    "compute_dtype": Flag("--compute", "Compute dtype (matmuls); fp8: of products with frozen weights, all else in bf16."),
    "gradient_dtype": Flag("--gradient-dtype", "Dtype of gradients.", "bf16; adapters: fp32"),
    "attention": Flag("--attention", "Attention implementation.", "the best that the model supports"),
    "loss_tile_tokens": Flag(
        "--loss-tile-tokens", "Tokens per tile of logits.", "4096 with fused kernels, else 1024; fewer if memory is short"
    ),
    "mlp_tile_tokens": Flag("--mlp-tile-tokens", "Tokens per tile of an MLP.", "all; fewer if memory is short"),
    "router_loss": Flag("--router-loss", "Weight of the loss of routers, as a config's router_aux_loss_coef.", "none"),
    "sum_groups": Flag(
        "--sum-groups",
        "Tree-reduce gradients in this many groups. Results are identical on 1, 2, 4, ... up to that many GPUs.",
        "1; with several GPUs 8, or fewer that divide the batch",
    ),
}


class RunCommand(Command):
    """Command that accepts other trainers' names of settings."""

    also = {alias: _SETTINGS[name].metadata["flag"].name for alias, name in ALSO_KNOWN_AS.items() if name in _SETTINGS}


def option(flag: Flag, param: str, field: Field[Any]) -> Option:
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


def flag_of(name: str) -> Option:
    """Return the flag of a setting, for example `optimizer.lr`."""
    return option(_SETTINGS[name].metadata["flag"], name.replace(".", "__"), _SETTINGS[name])


setting_flags = together(*map(flag_of, _SETTINGS))
semantics_flags = together(*(option(_SEMANTICS[f.name], f.name, f) for f in fields(Semantics) if f.name in _SEMANTICS))


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
