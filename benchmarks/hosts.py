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
EACH = 8  # sequences per GPU
GBIT = (400, 3200)  # per host: one adapter, or one for each GPU
FEWER = (1, 2, 4)  # sequences per GPU that stress the network
MANY = 128  # GPUs in that test


def planned(model: str, gpus: int, gbit: int, each: int) -> Planned | str:
    """Return the plan, or the reason without one."""
    here = min(gpus, DEVICES)
    try:
        sizes = {"seq_len": SEQ_LEN, "batch_size": each * gpus, "gpus": here, "hosts": gpus // here}
        return penstock.plan(model, MACHINE, network_gbit=gbit if gpus > here else None, **sizes)  # type: ignore[arg-type]
    except DoesNotFitError as error:
        return str(error).partition(";")[0]


def network_s(plan: Planned) -> float:
    """Return the busy seconds per step of the lane for gathers and exchanges."""
    return plan.answer.prediction.busy_s(plan.plan).get(Lane.NET, 0.0)


def row(model: str, gpus: int, gbit: int, each: int, alone: float) -> tuple[str, float]:
    """Return a line of the page, and tokens per second and GPU."""
    found, head = planned(model, gpus, gbit, each), f"| {model} | {gpus:,} | {gbit} | {each * SEQ_LEN:,} |"
    if isinstance(found, str):
        return f"{head} {found} | | | | | |", 0.0
    speed, proof = found.tokens_per_s / gpus, found.certificate
    kept = f"{speed / alone:.0%}" if alone else "100%"
    share = f"{network_s(found) / found.step_s:.0%}"
    return f"{head} {found.tokens_per_s:,.0f} | {kept} | {share} | {proof.gap_fraction:.1%} | {proof.binding} |", speed


def page() -> Iterator[str]:
    """Yield the lines of both tables."""
    titles = ("model", "GPUs", "Gbit/s a host", "tokens a GPU", "tokens/s", "of eight GPUs' speed", "net lane", "gap", "binding")
    of_eight: dict[tuple[str, int], float] = {}
    for many in (False, True):
        yield f"| {' | '.join(titles)} |"
        yield f"|---{'|---:' * 7}|---|"
        for model in MODELS:
            cells = product((MANY,), GBIT, FEWER) if many else ((gpus, GBIT[0], EACH) for gpus in GPUS)
            for gpus, gbit, each in cells:
                if (alone := of_eight.get((model, each), 0.0)) == 0.0 and gpus != DEVICES:
                    alone = of_eight[model, each] = row(model, DEVICES, gbit, each, 0.0)[1]
                line, speed = row(model, gpus, gbit, each, alone)
                of_eight.setdefault((model, each), speed)
                yield line
        yield ""


@click.command(help=__doc__)
def main() -> None:
    for line in page():
        print(line, flush=True)


if __name__ == "__main__":
    main()
