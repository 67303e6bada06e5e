"""Predicted scaling over hosts of eight GPUs, and the scale at which the network binds.

Prints a page in markdown: `python -m benchmarks.hosts` from the root of the repository, some ten minutes. Plans only, no runs. Weak
scaling: tokens per GPU and step are constant. Hosts are those of `8xh100`.
"""

from collections.abc import Iterator
from itertools import product

import click

import penstock
from penstock.results import Planned
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import Lane

MACHINE, DEVICES, SEQ_LEN = "8xh100", 8, 8192
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
GPUS = tuple(1 << i for i in range(11))
PER_GPU = 8  # sequences per GPU
GBIT = (400, 3200)  # per host: one adapter, or one for each GPU
FEWER = (1, 2, 4)  # sequences per GPU that stress the network
MANY = 128  # GPUs in that test


def planned(model: str, gpus: int, gbit: int, per_gpu: int) -> Planned | str:
    """Return the plan, or the reason without one."""
    n_local = min(gpus, DEVICES)
    try:
        sizes = {"seq_len": SEQ_LEN, "batch_size": per_gpu * gpus, "gpus": n_local, "hosts": gpus // n_local}
        return penstock.plan(model, MACHINE, network_gbit=gbit if gpus > n_local else None, **sizes)  # type: ignore[arg-type]
    except DoesNotFitError as error:
        return str(error).partition(";")[0]


def network_s(plan: Planned) -> float:
    """Return the busy seconds per step of the lane for gathers and exchanges."""
    return plan.answer.prediction.busy_s(plan.plan).get(Lane.NET, 0.0)


def row(model: str, gpus: int, gbit: int, per_gpu: int, alone: float) -> tuple[str, float]:
    """Return a line of the page, and tokens per second and GPU."""
    plan, head = planned(model, gpus, gbit, per_gpu), f"| {model} | {gpus:,} | {gbit} | {per_gpu * SEQ_LEN:,} |"
    if isinstance(plan, str):
        return f"{head} {plan} | | | | | |", 0.0
    speed, proof = plan.tokens_per_s / gpus, plan.certificate
    relative = f"{speed / alone:.0%}" if alone else "100%"
    share = f"{network_s(plan) / plan.step_s:.0%}"
    return f"{head} {plan.tokens_per_s:,.0f} | {relative} | {share} | {proof.gap_fraction:.1%} | {proof.binding} |", speed


def page() -> Iterator[str]:
    """Yield the lines of both tables."""
    titles = ("model", "GPUs", "Gbit/s a host", "tokens a GPU", "tokens/s", "relative to eight GPUs", "net lane", "gap", "binding")
    of_eight: dict[tuple[str, int], float] = {}
    for many in (False, True):
        yield f"| {' | '.join(titles)} |"
        yield f"|---{'|---:' * 7}|---|"
        for model in MODELS:
            cells = product((MANY,), GBIT, FEWER) if many else ((gpus, GBIT[0], PER_GPU) for gpus in GPUS)
            for gpus, gbit, per_gpu in cells:
                if (alone := of_eight.get((model, per_gpu), 0.0)) == 0.0 and gpus != DEVICES:
                    alone = of_eight[model, per_gpu] = row(model, DEVICES, gbit, per_gpu, 0.0)[1]
                line, speed = row(model, gpus, gbit, per_gpu, alone)
                of_eight.setdefault((model, per_gpu), speed)
                yield line
        yield ""


@click.command(help=__doc__)
def main() -> None:
    for line in page():
        print(line, flush=True)


if __name__ == "__main__":
    main()
