"""How does a user ask which machine to buy?"""

import json

import click

from .options import COUNT, Bytes, ClipNorm, refuse_endless, refuse_larger, sequences_of_a_step, show_table


@click.command()
@click.argument("model")
@click.option("--machines", required=True, help="Shipped machines, or files of profiles, with commas between: gh200,h100-sxm")
@click.option("--seq-len", type=COUNT, default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--batch-size", type=COUNT, help="Sequences of a step.  [default: 16]")
@click.option("--tokens-per-step", type=COUNT, help="Instead of --batch-size: a multiple of --seq-len.")
@click.option("--micro-batch", type=COUNT, help="Sequences computed at a time.  [default: each machine's own]")
@click.option("--host-memory", type=Bytes(), help="Host memory of every machine, for example 2TB.  [default: the profiles']")
@click.option("--clip-norm", type=ClipNorm(), default=1.0, show_default=True, help="Largest norm of the whole gradient.")
@click.option("--master", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Precision of the weights.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def compare(
    model: str,
    machines: str,
    seq_len: int,
    batch_size: int | None,
    tokens_per_step: int | None,
    micro_batch: int | None,
    host_memory: int | None,
    clip_norm: float | str,
    master: str,
    as_json: bool,
) -> None:
    """Rank machines for training MODEL, the fastest first; those that it does not fit come last, with what would make it fit."""
    from hwprofiles.schema import read_profile
    from planner.model.workload import read_model, supported_attention
    from planner.search.micro_batch import SIZES
    from planner.show.compare import TITLES
    from planner.show.compare import compare as rank
    from runtime.plan import Semantics

    described = read_model(model)
    profiles = []
    for name in dict.fromkeys(part.strip() for part in machines.split(",") if part.strip()):
        refuse_endless(name)
        profile = read_profile(name)
        profiles.append(profile if host_memory is None else profile.with_memory(None, host_memory))
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
    refuse_larger(semantics.micro_batch, semantics.batch_size)
    found = rank(described, profiles, semantics, free=SIZES if micro_batch is None else SIZES - {"micro_batch"})
    if as_json:
        click.echo(json.dumps(found.to_json()))
        return
    show_table(TITLES, found.rows())
    for note in found.notes():
        click.echo(note)
