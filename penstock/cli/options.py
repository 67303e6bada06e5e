"""How are sizes, counts, norms, machines and tables written on the command line?"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from runtime.units import parse_bytes, parse_count

MAX_COUNT = 10**9
SHORT_CELL = 16  # characters of a table's cell that is not broken into lines


class Command(click.Command):
    """A command that knows what other trainers call its flags: what means the same is taken, and what does not is answered."""

    def also(self) -> Mapping[str, str]:
        """Our flag for each of their names."""
        return {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            said = error.option_name
            ours = self.also().get(said.lstrip("-").replace("-", "_"), said.replace("_", "-"))
            if ours == said or not any(ours in param.opts for param in self.params):
                raise self._unknown(error) from None
            at = next(i for i, arg in enumerate(args) if arg.partition("=")[0] == said)
            return self.parse_args(ctx, [*args[:at], ours + args[at].removeprefix(said), *args[at + 1 :]])

    def _unknown(self, error: click.NoSuchOption) -> click.UsageError:
        """What to do instead, where that is known; else which flags are near."""
        from penstock.run_config import ALSO_KNOWN_AS, advice

        name = error.option_name.lstrip("-").replace("-", "_")
        words = advice(name)
        if words.startswith(("did you mean", "there are")):
            if name not in ALSO_KNOWN_AS:
                return error
            words = f"it is {ALSO_KNOWN_AS[name]} in the file of `penstock run --config`"
        return click.UsageError(f"{error.option_name}: no such option; {words}")


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A size such as 80GB, 1.5TB or 24GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_bytes(value)


class Tokens(click.ParamType):  # type: ignore[type-arg]
    """A count of tokens such as 100M or 1.5B."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_count(value)


class ClipNorm(click.ParamType):  # type: ignore[type-arg]
    """A norm above zero, or `none`."""

    name = "norm|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value == "none" or isinstance(value, float):
            return value  # type: ignore[no-any-return]
        try:
            norm = float(value)
        except ValueError:
            norm = 0.0
        if not 0 < norm < float("inf"):
            self.fail(f"{value!r} is not a norm above zero; write for example 1.0, or none", param, ctx)
        return norm


class Count(click.IntRange):
    """A whole number. `--help` leaves out the upper end, which nobody means."""

    def _describe_range(self) -> str:
        return f"{self.min} or more"


COUNT = Count(1, MAX_COUNT)


def refuse_endless(machine: str) -> None:
    """A profile is a file: reading a pipe or a device might never end."""
    if os.path.exists(machine) and not os.path.isfile(machine):
        raise click.UsageError(
            f"--machine {machine}: a folder, pipe or device; give a shipped name or a file of `penstock probe -o`"
        )


def refuse_larger(micro_batch: int, batch_size: int) -> None:
    """A micro-batch is a part of the batch. It need not divide it: the last one has what is left."""
    if micro_batch > batch_size:
        raise click.UsageError(f"--micro-batch {micro_batch} is more than the batch of {batch_size}; choose at most {batch_size}")


def sequences_of_a_step(batch_size: int | None, tokens_per_step: int | None, seq_len: int) -> int:
    """Sequences of a step, however they were given."""
    if tokens_per_step is None:
        return batch_size or 16
    if batch_size is not None:
        raise click.UsageError("--batch-size and --tokens-per-step say the same; give one of them")
    if tokens_per_step % seq_len:
        near = max(1, round(tokens_per_step / seq_len)) * seq_len
        raise click.UsageError(f"--tokens-per-step {tokens_per_step} is no multiple of --seq-len {seq_len}; {near} is")
    return tokens_per_step // seq_len


def with_gpus(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of how many devices share a step, of every command that plans for several."""
    gbit = click.FloatRange(min=0, min_open=True, max=99_999)
    for option in (
        click.option("--network-gbit", type=gbit, help="Gbit/s of each host's network.  [default: the profile's]"),
        click.option("--hosts", type=COUNT, default=1, show_default=True, help="Hosts of that machine, each with as many --gpus."),
        click.option(
            "--gpus",
            type=COUNT,
            default=1,
            show_default=True,
            help="Devices that share each step, and a host. The bits of the result do not depend on it, for the same --sum-groups.",
        ),
    ):
        command = option(command)
    return command


def with_training(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of what is trained, of every command that plans."""
    for option in (
        click.option(
            "--base",
            type=click.Choice(["bf16", "nf4", "int8", "fp8"]),
            help="How weights that are not trained lie in memory: packed in 4 or 8 bits, they mean other numbers.  [default: bf16]",
        ),
        click.option(
            "--train",
            metavar="WHAT",
            help="all, lora (or lora:r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj), names:*norm.weight, layers:20-31; "
            "the rest is frozen.  [default: all]",
        ),
    ):
        command = option(command)
    return command


def with_prices(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of what a machine and a job cost, of every command that speaks of money."""
    price = click.FloatRange(min=0, min_open=True, max=9_999_999)
    for option in (
        click.option("--usd-per-kwh", type=price, help="Price of power.  [default: 0.15]"),
        click.option("--usd", type=price, help="Price of the whole machine, bought.  [default: the profile's]"),
        click.option("--usd-per-hour", type=price, help="Rent of the machine.  [default: the profile's]"),
        click.option("--tokens", type=Tokens(), help="Also how long so many tokens take, and what they cost: 100M."),
    ):
        command = option(command)
    return command


def _parts(text: str) -> list[str]:
    """What of a cell stays on one line: all of a short one, a word of a sentence."""
    return [text] if len(text) <= SHORT_CELL else text.split()


def show_table(titles: Sequence[str], rows: Sequence[Sequence[str]], matter: Sequence[str] = ()) -> None:
    """On a terminal with lines around it, elsewhere with tabs. No cell is cut: where a terminal is too narrow, the titles that
    matter least are left out, and that is said."""
    from rich.console import Console
    from rich.table import Table

    if not sys.stdout.isatty():
        for row in (titles, *rows):
            click.echo("\t".join(row))
        return
    console = Console()
    words = {
        title: max(len(word) for text in (*title.split(), *(row[i] for row in rows)) for word in _parts(text))
        for i, title in enumerate(titles)
    }
    shown = set[str]()
    for title in [t for t in matter if t in titles] or titles:
        if sum(words[t] + 3 for t in (*shown, title)) < console.width:
            shown.add(title)
    kept = [i for i, title in enumerate(titles) if title in shown] or [0]
    table, spare = Table(), console.width - 1 - sum(words[titles[i]] + 3 for i in kept)
    widths = dict[int, int]()
    for longest, i in sorted((max(len(text) for text in (titles[i], *(row[i] for row in rows))), i) for i in kept):
        widths[i] = words[titles[i]] + min(
            longest - words[titles[i]], max(spare, 0)
        )  # no less than a word, and more while there is
        spare -= widths[i] - words[titles[i]]
    for i in kept:
        table.add_column(titles[i], width=widths[i])
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    console.print(table)
    if left := [title for title in titles if title not in shown]:
        click.echo(f"Left out at this width: {', '.join(left)}; a wider terminal, a pipe or --json has all.")
