"""`penstock compare`: machines ranked for a model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import BYTES, COUNT, sequences_of_a_step, with_batch, with_prices
from penstock.cli.outputs import show_table

from .sweep import semantics_of, swept, with_work

if TYPE_CHECKING:
    from hwprofiles.schema import Profile

COMMON = "rtx3090-desktop,rtx4090-desktop,rtx4090-server,rtx5090-server,gb10,h100-sxm,gh200"


@click.command()
@click.argument("model")
@click.option(
    "--machines",
    default=COMMON,
    help=f"Shipped machines, or files of profiles, with commas between; or all.  [default: {COMMON}]",
)
@with_batch
@click.option("--micro-batch", type=COUNT, help="Sequences computed at a time.  [default: each machine's own]")
@click.option("--host-memory", type=BYTES, help="Host memory of every machine, for example 2TB.  [default: the profiles']")
@with_prices
@with_work
def compare(
    model: str,
    machines: str,
    batch_size: int | None,
    tokens_per_step: int | None,
    micro_batch: int | None,
    host_memory: int | None,
    gpus: int,
    hosts: int,
    network_gbit: float | None,
    tokens: int | None,
    usd_per_hour: float | None,
    usd: float | None,
    usd_per_kwh: float | None,
    as_json: bool,
    **work: Any,
) -> None:
    """Rank machines for training MODEL, the fastest first; those that it does not fit come last, with what would make it fit.

    Prices that are given hold for every machine.
    """
    from hwprofiles.several import part_of
    from planner.model.workload import read_model, supported_attention
    from planner.search.micro_batch import SIZES
    from planner.show.compare import COLUMNS, JOB_TITLES, MATTER, candidate, ranked

    described = read_model(model)
    profiles = []
    for profile in _machines(machines, gpus):
        profile = profile.with_prices(usd_per_hour=usd_per_hour, usd=usd, usd_per_kwh=usd_per_kwh)
        if host_memory is not None and profile.most_host_bytes is None:
            profile = profile.with_memory(None, host_memory)
        elif host_memory is not None:
            click.echo(f"{profile.name}: its memory is soldered, and stays as it is", err=True)
        profiles.append(part_of(profile, gpus, hosts, network_gbit))
    if not profiles:
        raise click.UsageError(f"--machines {machines!r} names none; write for example gh200,h100-sxm")
    n_sequences = sequences_of_a_step(batch_size, tokens_per_step, work["seq_len"])
    asked = semantics_of(batch_size=n_sequences, micro_batch=micro_batch or 1, n_gpus=gpus * hosts, **work)
    asked = replace(asked, attention=supported_attention(described)[0])  # type: ignore[arg-type]
    if asked.micro_batch > asked.batch_size:
        raise click.UsageError(f"--micro-batch {micro_batch} is more than the batch of {asked.batch_size}; choose at most that")
    free = SIZES if micro_batch is None else SIZES - {"micro_batch"}
    found = ranked(described, asked, swept(candidate, [(described, of, asked, None, free) for of in profiles], "machines"))
    if as_json:
        click.echo(json.dumps(found.to_json(tokens)))
        return
    show_table((*COLUMNS, *(JOB_TITLES if tokens else ())), [of.row(tokens) for of in found.candidates], MATTER)
    for note in found.notes():
        click.echo(note)


def _machines(names: str, n_gpus: int) -> "Iterator[Profile]":
    """The named machines, each once; of all of them those with one GPU, or with as many as are asked for."""
    from hwprofiles.schema import read_profile, shipped_profiles

    is_all = names.strip() == "all"
    for name in dict.fromkeys(part.strip() for part in (shipped_profiles() if is_all else names.split(",")) if part.strip()):
        profile = read_profile(name)
        if not is_all or (profile.n_devices >= n_gpus and (profile.n_devices > 1) == (n_gpus > 1)):
            yield profile
