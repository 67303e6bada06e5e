"""How are sizes, counts, norms, machines and tables written on the command line?"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from runtime.units import parse_bytes

MAX_COUNT = 10**9


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A size such as 80GB, 1.5TB or 24GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_bytes(value)


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


def show_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """On a terminal with lines around it, elsewhere with tabs."""
    from rich.console import Console
    from rich.table import Table

    if not sys.stdout.isatty():
        for row in (titles, *rows):
            click.echo("\t".join(row))
        return
    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
