"""Predicted speed of 1 to 1,024 GPUs at constant tokens per GPU (weak scaling). Plans only, no runs.

    python -m benchmarks.scaling gpus > docs/benchmarks/ranks_DATE.md      # GPUs of one host, with eight sum groups; five minutes
    python -m benchmarks.scaling hosts > docs/benchmarks/hosts_DATE.md     # hosts of eight GPUs, and where the network binds; ten

An efficiency of 100 % means no loss by sharing the host and by exchanges, relative to one GPU or, among hosts, to eight.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import penstock
from penstock.results import Planned
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import Lane

DEVICES = 8  # per host
# Tokens per second of RoundPipe on RTX 4090 (its repository, commit e813c67), on 1, 2, 4 and 8 GPUs
PUBLISHED = {("llama-3.1-8b", "8xrtx4090"): (3142, 6259, 12278, 24275), ("qwen3-32b", "8xrtx4090"): (740, 1476, 2897, 5516)}


@dataclass(frozen=True, slots=True)
class Cell:
    """A step on several GPUs. `per_gpu`: sequences for each; `gbit`: Gbit/s of each host, None for one host."""

    model: str
    machine: str
    seq_len: int
    per_gpu: int
    gpus: int
    gbit: int | None = None


ONE_HOST = tuple(
    Cell(*step, gpus)
    for step in (
        ("llama-3.1-8b", "8xh100", 8192, 8),
        ("llama-3.1-70b", "8xh100", 8192, 8),
        ("llama-3.1-8b", "8xrtx4090", 2048, 16),
        ("qwen3-32b", "8xrtx4090", 2048, 16),
        ("qwen2.5-72b", "h200-pcie5", 4096, 16),
    )
    for gpus in (1, 2, 4, 8)
)
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
HOSTS = tuple(Cell(model, "8xh100", 8192, 8, 1 << i, 400) for model in MODELS for i in range(11))
# Fewer tokens per GPU stress the network: one adapter per host, or one per GPU
NETWORK = tuple(Cell(model, "8xh100", 8192, n, 128, gbit) for model, gbit, n in product(MODELS, (400, 3200), (1, 2, 4)))


@cache
def planned(cell: Cell) -> Planned | str:
    """Return the plan, or the reason without one."""
    n_local = min(cell.gpus, DEVICES)
    n_hosts = cell.gpus // n_local
    groups = {"sum_groups": 8} if cell.gbit is None else {}
    try:
        return penstock.plan(
            cell.model, cell.machine, seq_len=cell.seq_len, batch_size=cell.per_gpu * cell.gpus, gpus=n_local, hosts=n_hosts,
            network_gbit=cell.gbit if n_hosts > 1 else None, **groups,
        )  # fmt: skip
    except DoesNotFitError as error:
        return str(error).partition(";")[0]


def row(cell: Cell, plan: Planned | str, base: Planned | str, n_base: int) -> str:
    """Format a plan. `base`: the same tokens per GPU on `n_base` GPUs."""
    head = f"| {cell.model} | {cell.machine} | {cell.gpus:,} | {cell.gbit or ''} | {cell.per_gpu * cell.seq_len:,} |"
    rates = PUBLISHED.get((cell.model, cell.machine))
    published = f"{rates[cell.gpus.bit_length() - 1]:,}" if rates else ""
    if isinstance(plan, str):
        return f"{head} {plan} | | | | | | {published} |"
    proof, speed, resident = plan.certificate, plan.tokens_per_s / cell.gpus, plan.answer.resident
    relative = "" if isinstance(base, str) else f"{speed * n_base / base.tokens_per_s:.0%}"
    net_s = plan.answer.prediction.busy_s(plan.plan).get(Lane.NET, 0.0)  # gathers and exchanges
    fsdp = "does not fit" if resident is None or resident.step_s is None else plan.tokens_per_s * plan.step_s / resident.step_s
    return (
        f"{head} {plan.tokens_per_s:,.0f} | {relative} | {net_s / plan.step_s:.0%} | {proof.gap_fraction:.1%} | {proof.binding} | "
        f"{fsdp if isinstance(fsdp, str) else f'{fsdp:,.0f}'} | {published} |"
    )


def table(cells: tuple[Cell, ...], n_base: int) -> Iterator[str]:
    titles = "model | machine | GPUs | Gbit/s a host | tokens a GPU | tokens/s | efficiency | net lane | gap | binding"
    yield f"| {titles} | FSDP2 | published |\n|---|---{'|---:' * 7}|---|---:|---:|"
    yield from (row(cell, planned(cell), planned(replace(cell, gpus=n_base)), n_base) for cell in cells)
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gpus", "hosts"))
    lines = table(ONE_HOST, 1) if parser.parse_args().what == "gpus" else (*table(HOSTS, DEVICES), *table(NETWORK, DEVICES))
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
