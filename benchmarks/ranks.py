"""Predicted step times by number of GPUs, and runs of several ranks against their plans.

Prints a page in markdown: `python -m benchmarks.ranks` from the root of the repository, some five minutes. Weak scaling: tokens per
GPU and step are constant, so an efficiency of 100 % means no loss by sharing the host and by exchanges.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click

import penstock
from penstock.results import Planned
from penstock.runtime.errors import DoesNotFitError

GPUS = (1, 2, 4, 8)
# Model, machine, tokens per sequence, sequences per step and GPU
CELLS = (
    ("llama-3.1-8b", "8xh100", 8192, 8),
    ("llama-3.1-70b", "8xh100", 8192, 8),
    ("llama-3.1-8b", "8xrtx4090", 2048, 16),
    ("qwen3-32b", "8xrtx4090", 2048, 16),
    ("qwen2.5-72b", "h200-pcie5", 4096, 16),
)
# Tokens per second of RoundPipe on RTX 4090 (its repository, commit e813c67), by number of GPUs
PUBLISHED = {("llama-3.1-8b", "8xrtx4090"): (3142, 6259, 12278, 24275), ("qwen3-32b", "8xrtx4090"): (740, 1476, 2897, 5516)}
EMULATED = (("llama-3.1-8b", "8xh100", 8), ("llama-3.1-8b", "8xrtx4090", 4), ("qwen2.5-7b", "h200-pcie5", 2))
EMULATED_STEPS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One cell with a number of GPUs."""

    gpus: int
    plan: Planned | None  # None: does not fit
    reason: str = ""


def planned(model: str, machine: str, seq_len: int, per_gpu: int, gpus: int) -> Row:
    """Plan for `gpus` GPUs, always with eight sum groups."""
    try:
        plan = penstock.plan(model, machine, seq_len=seq_len, batch_size=per_gpu * gpus, sum_groups=8, gpus=gpus)
    except DoesNotFitError as error:
        return Row(gpus, None, str(error))
    return Row(gpus, plan)


def page() -> Iterator[str]:
    yield "| model | machine | GPUs | tokens/s | efficiency | gap | binding | FSDP2, all on the devices | published |"
    yield "|---|---|---:|---:|---:|---:|---|---|---|"
    for model, machine, seq_len, per_gpu in CELLS:
        first: float | None = None
        for i, gpus in enumerate(GPUS):
            row = planned(model, machine, seq_len, per_gpu, gpus)
            speeds = PUBLISHED.get((model, machine))
            published = f"{speeds[i]:,}" if speeds else ""
            if row.plan is None:
                yield f"| {model} | {machine} | {gpus} | does not fit: {row.reason.partition(';')[0]} | | | | | {published} |"
                continue
            answer, speed = row.plan.answer, row.plan.tokens_per_s
            first = first or speed / gpus
            fsdp = answer.resident
            resident = "does not fit" if fsdp is None or fsdp.step_s is None else f"{speed * answer.step_s / fsdp.step_s:,.0f}"
            proof = answer.certificate
            yield (
                f"| {model} | {machine} | {gpus} | {speed:,.0f} | {speed / gpus / first:.0%} | {proof.gap_fraction:.1%} | "
                f"{proof.binding} | {resident} | {published} |"
            )
    yield ""
    yield "| emulated | GPUs | predicted | performed | off by |"
    yield "|---|---:|---:|---:|---:|"
    for model, machine, gpus in EMULATED:
        plan = penstock.plan(model, machine, seq_len=2048, batch_size=8 * gpus, sum_groups=8, gpus=gpus)
        measured_s = emulated(plan)
        off = measured_s / plan.step_s - 1
        yield f"| {model} on {machine} | {gpus} | {plan.step_s:.3f} s | {measured_s:.3f} s | {off:+.1%} |"


def emulated(plan: Planned) -> float:
    """Run a plan on this computer at the pace of its machine, with every rank simulated like the first. Return seconds per step."""
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("Every rank runs the same plan on other data. " * 4000)
        result = penstock.train(plan, text, out=Path(folder) / "out", steps=EMULATED_STEPS, device="emulated", from_scratch=True)
        times_s = sorted(result.timeline.step_times_s[2:])
        return times_s[len(times_s) // 2]


@click.command(help=__doc__)
def main() -> None:
    for line in page():
        print(line, flush=True)


if __name__ == "__main__":
    main()
