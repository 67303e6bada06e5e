"""`penstock fits`: the models that fit a machine's memory."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import COUNT, TOKENS, ClipNorm, with_gpus, with_training
from penstock.cli.tables import show_table
from runtime.units import GB, parse_bytes, show_count

from .workers import shared

if TYPE_CHECKING:
    from hwprofiles.schema import Profile
    from planner.show.fits import Fit
    from planner.show.price import Job
    from runtime.plan import Semantics
    from runtime.plan.packed import Base

MOST_SIZES = 32  # of host memory, in one question
TITLES = ("gpu", "host memory", "machine", "family", "model", "parameters", "tokens/s")
JOB_TITLES = ("time", "rented", "bought")


@click.command()
@click.argument("machines", nargs=-1)
@click.option("--host-memory", help="Sizes with commas between: 64GB,128GB.  [default: 32GB to 2048GB, by doubling]")
@click.option("--families", help="Families of models with commas between: qwen3,llama.  [default: all that are shipped]")
@click.option("--seq-len", type=COUNT, default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--batch-size", type=COUNT, default=16, show_default=True, help="Sequences of a step.")
@click.option("--clip-norm", type=ClipNorm(), default=1.0, show_default=True, help="Largest norm of the whole gradient.")
@click.option("--master", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Precision of the weights.")
@with_training
@with_gpus
@click.option("--tokens", type=TOKENS, help="Also how long so many tokens take, and what they cost: 100M.")
@click.option("--search", is_flag=True, help="Speeds of the plans that a search finds, not estimates: some 10 seconds for each.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def fits(
    machines: tuple[str, ...],
    host_memory: str | None,
    families: str | None,
    seq_len: int,
    batch_size: int,
    clip_norm: float | str,
    master: str,
    train: str | None,
    base: "Base | None",
    gpus: int,
    hosts: int,
    network_gbit: float | None,
    tokens: int | None,
    search: bool,
    as_json: bool,
) -> None:
    """The largest model of each family that host memory of 32 to 2048 GB can train, and about how fast.

    MACHINES are shipped ones, files of profiles, or a GPU that shipped machines begin with: rtx4090 is all of them, and each size
    of memory is asked of the one whose own is nearest; what is soldered stays as it is. Without MACHINES: rtx3090, rtx4090, rtx5090
    and h100-sxm.
    """
    from hwprofiles.several import name_of_shared, on_network, part_of
    from planner.search.micro_batch import shared_step
    from planner.show import fits as which
    from runtime.plan import Semantics
    from runtime.plan.policy import trained

    groups = {name: _machines(name) for name in dict.fromkeys(machines or which.GPUS)}
    for profile in chain(*groups.values()):
        part_of(profile, gpus, hosts, network_gbit)  # or say why not
    groups = {name: [on_network(of, network_gbit) for of in profiles] for name, profiles in groups.items()}
    known = which.families()
    asked = list(dict.fromkeys(part.strip() for part in families.split(","))) if families else list(known)
    if wrong := [name for name in asked if name not in known]:
        raise click.UsageError(f"--families: no shipped family {wrong[0]!r}; there are {', '.join(known)}")
    sizes = which.HOST_MEMORIES if host_memory is None else tuple(sorted({parse_bytes(n) for n in host_memory.split(",")}))
    if len(sizes) > MOST_SIZES:
        raise click.UsageError(f"--host-memory names {len(sizes)} sizes; ask for at most {MOST_SIZES}")
    clip = None if isinstance(clip_norm, str) else clip_norm
    semantics = Semantics(seq_len=seq_len, batch_size=batch_size, micro_batch=1, master_dtype=master, clip_norm=clip)  # type: ignore[arg-type]
    semantics = trained(semantics, train, base)
    if gpus * hosts > 1:
        semantics = shared_step(semantics, gpus * hosts, has_groups=False)
    tasks = [(gpu, of, family, semantics, sizes, search, hosts) for gpu, of in groups.items() for family in asked]
    found = [fit for column in shared(which.fits, tasks, "models on GPUs") for fit in column]
    jobs = [None if tokens is None else _job(fit, groups[fit.gpu], tokens, gpus, hosts) for fit in found]
    if as_json:
        click.echo(json.dumps(_fields(semantics.whole, search, found, jobs)))
    elif sys.stdout.isatty():
        _draw(found, jobs, semantics.whole, search, partial(name_of_shared, n=gpus, n_hosts=hosts))
    else:
        titles = (*TITLES[:-1], TITLES[-1] if search else "about tokens/s", *(JOB_TITLES if tokens else ()))
        show_table(titles, [_row(fit, job, tokens is not None) for fit, job in zip(found, jobs, strict=True)])


def _machines(name: str) -> "list[Profile]":
    """The machine of that name or file; or all shipped ones of a GPU."""
    from hwprofiles.schema import read_profile, shipped_profiles

    of_gpu = [shipped for shipped in shipped_profiles() if shipped.startswith(f"{name}-")]
    return [read_profile(shipped) for shipped in of_gpu or [name]]


def _job(fit: "Fit", profiles: "Sequence[Profile]", n_tokens: int, gpus: int, hosts: int) -> "Job | None":
    from hwprofiles.several import shared_by
    from planner.show.price import hourly, job

    if fit.tokens_per_s is None:
        return None
    profile = next(profile for profile in profiles if profile.name == fit.machine)
    if profile.most_host_bytes is None:
        profile = profile.with_memory(None, fit.host_memory_bytes)
    return job(n_tokens, fit.tokens_per_s, hourly(shared_by(profile, gpus, hosts)))


def _fields(semantics: "Semantics", searched: bool, found: "list[Fit]", jobs: "list[Job | None]") -> dict[str, Any]:
    from dataclasses import asdict

    rows = [fit.to_json() | ({} if job is None else {"job": asdict(job)}) for fit, job in zip(found, jobs, strict=True)]
    return {"seq_len": semantics.seq_len, "batch_size": semantics.batch_size, "is_estimate": not searched, "fits": rows}


def _row(fit: "Fit", job: "Job | None", priced: bool) -> tuple[str, ...]:
    from planner.show.price import show_days, show_usd

    size = f"{fit.host_memory_bytes / GB:g} GB"
    if fit.model is None or fit.n_params is None or fit.tokens_per_s is None:
        return (fit.gpu, size, fit.machine, fit.family, "none fits", "-", "-", *("-",) * 3 * priced)
    row = (fit.gpu, size, fit.machine, fit.family, fit.model, show_count(fit.n_params), f"{fit.tokens_per_s:,.0f}")
    if job is None:
        return row
    return (*row, show_days(job.seconds), show_usd(job.rent_usd), show_usd(job.bought_usd))


def _draw(
    found: "list[Fit]", jobs: "list[Job | None]", semantics: "Semantics", searched: bool, named: Callable[[str], str]
) -> None:
    """A table for each GPU: a row for each family, a column for each size of memory; readable at 80 columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for gpu, of_gpu in groupby(zip(found, jobs, strict=True), key=lambda pair: pair[0].gpu):
        rows = [list(row) for _, row in groupby(of_gpu, key=lambda pair: pair[0].family)]
        head = [fit for fit, _ in rows[0]]
        table = Table(
            "GB",
            *(f"{fit.host_memory_bytes / GB:g}" for fit in head),
            title=f"{named(gpu)}: largest model, tokens/s",
            padding=(0, 1, 0, 0),
        )
        for row in rows:
            table.add_row(row[0][0].family, *(Text(_cell(fit, job), no_wrap=True) for fit, job in row), end_section=True)
        console.print(table)
        for name, of in groupby(head, key=lambda fit: fit.machine):
            console.print(f"{', '.join(f'{fit.host_memory_bytes / GB:g}' for fit in of)} GB: {name}", style="dim", highlight=False)
    how = "of the plans that a search found" if searched else "estimated from greedy plans; --search, or `penstock plan`, says more"
    if any(jobs):
        console.print("Dollars are those of renting, or of buying where no rent is known; --json has both.")
    console.print(f"Steps of {semantics.batch_size} sequences of {semantics.seq_len} tokens. Speeds are {how}.", highlight=False)


def _cell(fit: "Fit", job: "Job | None") -> str:
    """`32b` over `525`; under it days and dollars, where they were asked for."""
    from planner.show.price import show_days

    if fit.model is None or fit.tokens_per_s is None:
        return "-"
    size = re.search(r"\d[\dx.]*[bm](-a\d+b)?$", fit.model)
    lines = [size[0] if size else fit.model, f"{fit.tokens_per_s:,.0f}"]
    if job is not None:
        usd = job.bought_usd if job.rent_usd is None else job.rent_usd
        lines += [show_days(job.seconds), "no price" if usd is None else f"${usd:,.0f}"]
    return "\n".join(lines)
