"""`penstock fits`: the largest models for the memory there is."""

import json
import re
import sys
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import COUNT, TOKENS
from penstock.cli.outputs import show_table
from runtime.units import GB, parse_bytes, show_count, show_duration

from .sweep import semantics_of, swept, with_work

if TYPE_CHECKING:
    from collections.abc import Callable

    from hwprofiles.schema import Profile
    from planner.show.fits import Fit

MOST_SIZES = 32  # of host memory, in one question
TITLES = ("gpu", "host memory", "machine", "family", "model", "parameters", "tokens/s")
JOB_TITLES = ("time", "rented", "bought")


@click.command()
@click.argument("machines", nargs=-1)
@click.option("--host-memory", help="Sizes with commas between: 64GB,128GB.  [default: 32GB to 2048GB, by doubling]")
@click.option("--families", help="Families of models with commas between: qwen3,llama.  [default: all that are shipped]")
@click.option("--batch-size", type=COUNT, default=16, show_default=True, help="Sequences of a step.")
@click.option("--tokens", type=TOKENS, help="Also the time and the price of this many tokens: 100M.")
@click.option("--search", is_flag=True, help="Speeds of the plans that a search finds, not estimates: some 10 seconds for each.")
@with_work
def fits(
    machines: tuple[str, ...],
    host_memory: str | None,
    families: str | None,
    gpus: int,
    hosts: int,
    network_gbit: float | None,
    tokens: int | None,
    search: bool,
    as_json: bool,
    **work: Any,
) -> None:
    """The largest model of each family that host memory of 32 to 2048 GB can train, and about how fast.

    MACHINES are shipped ones, files of profiles, or a GPU that shipped machines begin with: rtx4090 is all of them, and each size
    of memory is asked of the one whose own is nearest; what is soldered stays as it is. Without MACHINES: rtx3090, rtx4090, rtx5090
    and h100-sxm.
    """
    from hwprofiles.several import name_of_shared, on_network, part_of
    from planner.show import fits as planned

    groups = {name: _machines(name) for name in dict.fromkeys(machines or planned.GPUS)}
    for profile in chain(*groups.values()):
        part_of(profile, gpus, hosts, network_gbit)  # or say why not
    groups = {name: [on_network(of, network_gbit) for of in profiles] for name, profiles in groups.items()}
    known = planned.families()
    asked = list(dict.fromkeys(part.strip() for part in families.split(","))) if families else list(known)
    if wrong := [name for name in asked if name not in known]:
        raise click.UsageError(f"--families: no shipped family {wrong[0]!r}; there are {', '.join(known)}")
    sizes = planned.HOST_MEMORIES if host_memory is None else tuple(sorted({parse_bytes(n) for n in host_memory.split(",")}))
    if len(sizes) > MOST_SIZES:
        raise click.UsageError(f"--host-memory names {len(sizes)} sizes; ask for at most {MOST_SIZES}")
    semantics = semantics_of(micro_batch=1, n_gpus=gpus * hosts, **work)
    tasks = [(gpu, of, family, semantics, sizes, search, hosts) for gpu, of in groups.items() for family in asked]
    found = [fit for column in swept(planned.fits, tasks, "models on GPUs") for fit in column]
    whole = semantics.whole
    if as_json:
        rows = [fit.to_json(tokens) for fit in found]
        click.echo(json.dumps({"seq_len": whole.seq_len, "batch_size": whole.batch_size, "is_estimate": not search, "fits": rows}))
    elif sys.stdout.isatty():
        _draw(found, tokens, partial(name_of_shared, n=gpus, n_hosts=hosts))
        how = (
            "of the plans that a search found" if search else "estimated from greedy plans; --search, or `penstock plan`, says more"
        )
        click.echo(f"Steps of {whole.batch_size} sequences of {whole.seq_len} tokens. Speeds are {how}.")
    else:
        titles = (*TITLES[:-1], TITLES[-1] if search else "about tokens/s", *(JOB_TITLES if tokens else ()))
        show_table(titles, [_row(fit, tokens) for fit in found])


def _machines(name: str) -> "list[Profile]":
    """The machine of that name or file; or all shipped ones of a GPU."""
    from hwprofiles.schema import read_profile, shipped_profiles

    of_gpu = [shipped for shipped in shipped_profiles() if shipped.startswith(f"{name}-")]
    return [read_profile(shipped) for shipped in of_gpu or [name]]


def _row(fit: "Fit", tokens: int | None) -> tuple[str, ...]:
    from planner.show.price import show_usd

    where = (fit.gpu, f"{fit.host_memory_bytes / GB:g} GB", fit.machine, fit.family)
    if fit.model is None or fit.n_params is None or fit.tokens_per_s is None:
        return (*where, "none fits", "-", "-", *("-",) * (3 if tokens else 0))
    row = (*where, fit.model, show_count(fit.n_params), f"{fit.tokens_per_s:,.0f}")
    job = fit.job(tokens) if tokens else None
    return row if job is None else (*row, show_duration(job.seconds), show_usd(job.rent_usd), show_usd(job.bought_usd))


def _draw(found: "list[Fit]", tokens: int | None, named: "Callable[[str], str]") -> None:
    """A table for each GPU: a row for each family, a column for each size of memory; readable at 80 columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for gpu, of_gpu in groupby(found, key=lambda fit: fit.gpu):
        rows = [list(row) for _, row in groupby(of_gpu, key=lambda fit: fit.family)]
        sizes = [f"{fit.host_memory_bytes / GB:g}" for fit in rows[0]]
        table = Table("GB", *sizes, title=f"{named(gpu)}: largest model, tokens/s", padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(row[0].family, *(Text(_cell(fit, tokens), no_wrap=True) for fit in row), end_section=True)
        console.print(table)
        for name, of in groupby(zip(sizes, rows[0], strict=True), key=lambda pair: pair[1].machine):
            console.print(f"{', '.join(size for size, _ in of)} GB: {name}", style="dim", highlight=False)
    if tokens:
        console.print("Dollars are those of renting, or of buying where no rent is known; --json has both.")


def _cell(fit: "Fit", tokens: int | None) -> str:
    """`32b` over `525`; under it days and dollars, where they were asked for."""
    if fit.model is None or fit.tokens_per_s is None:
        return "-"
    size = re.search(r"\d[\dx.]*[bm](-a\d+b)?$", fit.model)
    lines = [size[0] if size else fit.model, f"{fit.tokens_per_s:,.0f}"]
    if tokens and (job := fit.job(tokens)) is not None:
        usd = job.bought_usd if job.rent_usd is None else job.rent_usd
        lines += [show_duration(job.seconds), "no price" if usd is None else f"${usd:,.0f}"]
    return "\n".join(lines)
