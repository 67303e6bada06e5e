"""`penstock compare`: the plans of a model on several machines, by speed and price."""

import json
from typing import TYPE_CHECKING

import click

from penstock.cli.options import (
    BYTES,
    COUNT,
    ClipNorm,
    refuse_larger,
    sequences_of_a_step,
    with_gpus,
    with_prices,
    with_training,
)
from penstock.cli.tables import show_table

from .workers import shared

if TYPE_CHECKING:
    from runtime.plan.packed import Base

COMMON = ("rtx3090-desktop", "rtx4090-desktop", "rtx4090-server", "rtx5090-server", "gb10", "h100-sxm", "gh200")


@click.command()
@click.argument("model")
@click.option(
    "--machines",
    default=",".join(COMMON),
    help=f"Shipped machines, or files of profiles, with commas between; or all.  [default: {','.join(COMMON)}]",
)
@click.option("--seq-len", type=COUNT, default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--batch-size", type=COUNT, help="Sequences of a step.  [default: 16]")
@click.option("--tokens-per-step", type=COUNT, help="Instead of --batch-size: a multiple of --seq-len.")
@click.option("--micro-batch", type=COUNT, help="Sequences computed at a time.  [default: each machine's own]")
@click.option("--host-memory", type=BYTES, help="Host memory of every machine, for example 2TB.  [default: the profiles']")
@with_training
@with_gpus
@click.option("--clip-norm", type=ClipNorm(), default=1.0, show_default=True, help="Largest norm of the whole gradient.")
@click.option("--master", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Precision of the weights.")
@with_prices
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def compare(
    model: str,
    machines: str,
    seq_len: int,
    batch_size: int | None,
    tokens_per_step: int | None,
    micro_batch: int | None,
    host_memory: int | None,
    train: str | None,
    base: "Base | None",
    gpus: int,
    hosts: int,
    network_gbit: float | None,
    clip_norm: float | str,
    master: str,
    tokens: int | None,
    usd_per_hour: float | None,
    usd: float | None,
    usd_per_kwh: float | None,
    as_json: bool,
) -> None:
    """Rank machines for training MODEL, the fastest first; those that it does not fit come last, with what would make it fit.

    Prices that are given hold for every machine.
    """
    from hwprofiles.schema import read_profile, shipped_profiles
    from hwprofiles.several import part_of
    from planner.model.workload import read_model, supported_attention
    from planner.search.micro_batch import SIZES, shared_step
    from planner.show.compare import JOB_TITLES, MATTER, TITLES, candidate, ranked
    from runtime.plan import Semantics
    from runtime.plan.policy import trained

    described = read_model(model)
    profiles = []
    is_all = machines.strip() == "all"
    for name in dict.fromkeys(part.strip() for part in (shipped_profiles() if is_all else machines.split(",")) if part.strip()):
        profile = read_profile(name)
        if is_all and (profile.n_devices < gpus or (profile.n_devices > 1) != (gpus > 1)):
            continue  # a machine of one device has no others, and one of several is not bought for one
        profile = profile.with_prices(usd_per_hour=usd_per_hour, usd=usd, usd_per_kwh=usd_per_kwh)
        if host_memory is not None and profile.most_host_bytes is None:
            profile = profile.with_memory(None, host_memory)
        elif host_memory is not None:
            click.echo(f"{profile.name}: its memory is soldered, and stays as it is", err=True)
        profiles.append(part_of(profile, gpus, hosts, network_gbit))
    if not profiles:
        raise click.UsageError(f"--machines {machines!r} names none; write for example gh200,h100-sxm")
    semantics = Semantics(
        seq_len=seq_len,
        batch_size=sequences_of_a_step(batch_size, tokens_per_step, seq_len),
        micro_batch=micro_batch or 1,
        master_dtype=master,  # type: ignore[arg-type]
        clip_norm=None if isinstance(clip_norm, str) else clip_norm,
        attention=supported_attention(described)[0],  # type: ignore[arg-type]
    )
    semantics = trained(semantics, train, base)
    if gpus * hosts > 1:
        semantics = shared_step(semantics, gpus * hosts, has_groups=False)
    refuse_larger(semantics.micro_batch, semantics.batch_size)
    free = SIZES if micro_batch is None else SIZES - {"micro_batch"}
    tasks = [(described, profile, semantics, None, free) for profile in profiles]
    found = ranked(described, semantics, shared(candidate, tasks, "machines"))
    if as_json:
        click.echo(json.dumps(found.to_json(tokens)))
        return
    show_table((*TITLES, *(JOB_TITLES if tokens else ())), found.rows(tokens), MATTER)
    for note in found.notes():
        click.echo(note)
