"""Page of predicted LoRA and QLoRA speeds for models that do not fit their GPU.

    python -m benchmarks.adapters > docs/benchmarks/adapters_DATE.md

Each cell is a search like `penstock plan`, with adapters of rank 16 at every projection and the base in bf16 or packed, and a
second search with all weights trained. Published adapter runs of other systems are listed next to our plan of the same step.
Nothing is measured. Two and a half minutes of one core.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import penstock
from benchmarks.any_memory import with_any_memory
from benchmarks.common import without_arguments
from penstock.hwprofiles.schema import read_profile
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.resident import resident, tiers
from penstock.planner.search.result import SearchResult
from penstock.results import Planned
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.units import GB, TB, show_bytes, show_seconds

PUBLISHED = Path(__file__).parent / "published_adapters.json"
SEQ_LEN = 4096
DPO_BYTES, DPO_BEFORE_BYTES = 19.08 * GB, 31.09 * GB  # published for LoRA of Qwen2.5-7B; with a precomputed reference


@dataclass(frozen=True, slots=True)
class Cell:
    """A model, base and machine. `host_bytes` replaces the machine's memory."""

    model: str
    machine: str
    batch_size: int
    base: str
    host_bytes: int | None = None


CELLS = (
    Cell("llama-3.1-8b", "rtx3090-desktop", 4, "bf16"),
    Cell("llama-3.1-8b", "rtx4090-desktop", 1, "bf16"),
    Cell("llama-3.1-8b", "rtx4090-desktop", 4, "bf16"),
    Cell("llama-3.1-8b", "rtx4090-desktop", 4, "nf4", 32 * GB),
    Cell("llama-3.1-8b", "rtx5090-desktop", 4, "bf16"),
    Cell("qwen2.5-32b", "rtx4090-desktop", 4, "bf16"),
    Cell("qwen2.5-32b", "rtx4090-desktop", 4, "nf4", 64 * GB),
    Cell("qwen3-30b-a3b", "rtx4090-desktop", 4, "bf16"),
    Cell("qwen3-30b-a3b", "rtx4090-desktop", 4, "nf4", 64 * GB),
    Cell("llama-3.1-70b", "rtx3090-desktop", 4, "nf4", 64 * GB),
    Cell("llama-3.1-70b", "rtx4090-desktop", 1, "nf4", 64 * GB),
    Cell("llama-3.1-70b", "rtx4090-desktop", 4, "nf4", 64 * GB),
    Cell("llama-3.1-70b", "rtx4090-desktop", 4, "int8", 128 * GB),
    Cell("llama-3.1-70b", "rtx4090-desktop", 1, "bf16", 192 * GB),
    Cell("llama-3.1-70b", "rtx4090-desktop", 4, "bf16", 192 * GB),
    Cell("llama-3.1-70b", "rtx5090-desktop", 4, "nf4", 64 * GB),
    Cell("llama-3.1-70b", "h100-sxm", 4, "bf16"),
    Cell("llama-3.1-405b", "rtx4090-server", 4, "nf4"),
)


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A measured run of another system."""

    id: str
    system: str
    model: str
    machine: str
    device_memory_bytes: int | None
    base: str
    seq: int
    batch: int
    tokens_per_s: float | None  # None: not published, or no profile of the card
    full_tokens_per_s: float | None
    host_bytes: int | None
    source: str
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Published:
    """Contents of the file."""

    about: str
    runs: list[PublishedRun]


def read_published(path: Path = PUBLISHED) -> Published:
    return TypeAdapter(Published).validate_json(path.read_bytes(), strict=True)


def planned(cell: Cell, train: str) -> Planned | None:
    """Return our plan, or None if it does not fit."""
    base = cell.base if train == "lora" else "bf16"
    try:
        return penstock.plan(
            cell.model, with_any_memory(read_profile(cell.machine), None, cell.host_bytes), seq_len=SEQ_LEN,
            batch_size=cell.batch_size, train=train, base=base,
        )  # fmt: skip
    except DoesNotFitError:
        return None


def _memory(answer: SearchResult) -> str:
    return f"{show_bytes(answer.needs.device_peak_bytes)} | {show_bytes(answer.needs.host_peak_bytes)}"


def _where(answer: SearchResult) -> str:
    """Return where adapters are updated."""
    return "device" if answer.plan.policy.device_blocks else "host"


def row(cell: Cell) -> str:
    """Format a cell with adapters, and with all weights trained in sufficient host memory."""
    lora = planned(cell, "lora")
    host = "" if cell.host_bytes is None else f", {cell.host_bytes // GB} GB"
    head = f"| {cell.model} | {cell.machine}{host} | {cell.batch_size * SEQ_LEN:,} | {cell.base} |"
    if lora is None:
        return f"{head} does not fit | | | | | | | |"
    full_plan = planned(Cell(cell.model, cell.machine, cell.batch_size, "bf16", 4 * TB), "all")
    full = "does not fit | |"
    if full_plan is not None:
        ratio = lora.tokens_per_s / full_plan.tokens_per_s
        full = f"{full_plan.tokens_per_s:,.0f}, {show_bytes(full_plan.answer.needs.host_peak_bytes)} | {ratio:.2f} |"
    proof = lora.certificate
    return (
        f"{head} {show_seconds(lora.step_s)} | {lora.tokens_per_s:,.0f} | {proof.gap_fraction:.1%} | {proof.binding} | "
        f"{_where(lora.answer)} | {_memory(lora.answer)} | {full}"
    )


def published_rows() -> Iterator[str]:
    """Yield published measurements and our plan of the same step. The plan does not predict the other system."""
    yield "| system | machine | GPUs | model | base | a step | published | planned | ratio | gap | device | host |"
    yield "|---|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for run in read_published().runs:
        sizes: dict[str, Any] = {"gpus": run.gpus, "sum_groups": 8} if run.gpus > 1 or run.machine.startswith("8x") else {}
        sizes |= {"seq_len": run.seq, "batch_size": run.batch, "device_memory_bytes": run.device_memory_bytes}
        device = "" if run.device_memory_bytes is None else f", {show_bytes(run.device_memory_bytes)}"
        step = f"{run.batch} x {run.seq:,}"
        rate = "" if run.tokens_per_s is None else f"{run.tokens_per_s:,.1f}"
        head = f"| {run.system} | {run.machine}{device} | {run.gpus} | {run.model} | {run.base} | {step} | {rate} | "
        try:
            plan = penstock.plan(run.model, run.machine, train="lora", base=run.base, **sizes)
        except DoesNotFitError as error:
            short = f"needs {show_bytes(error.short_device_bytes + (run.device_memory_bytes or 0))}"
            yield f"{head}does not fit: {short} of the device | | | | |"
            continue
        ratio = "" if run.tokens_per_s is None else f"{plan.tokens_per_s / run.tokens_per_s:.2f}"
        figures = f"{plan.tokens_per_s:,.1f} | {ratio} | {plan.certificate.gap_fraction:.1%} | {_memory(plan.answer)} |"
        yield head + figures


def section() -> Iterator[str]:
    """Yield the section for docs/accuracy.md."""
    yield """
## Adapters

Runs of other systems with adapters and a streamed frozen base (`benchmarks/published_adapters.json`), and our plan of the
same step on the same machine, with adapters of rank 16 at every projection of attention, and of MLPs without experts. The plan
does not predict another system: a ratio far from one shows different methods, not an error. Soup computes one sequence of
512 tokens at a time, and so does our plan. If nothing is published, or the card has no profile, the row is the speed of our plan in
the same amount of device memory: Soup's 8B in 3.45 GB of an RTX 3050 (122.5 tokens/s there), and the
30B-A3B of Axolotl's pull request in about 7 GB of an RTX A2000. Device and host are of one GPU; all share one copy of the base.
Of the 14 s of our 30B-A3B on the RTX 5090 21 % are recompute and 27 % eager modules, most of it on the rows of experts;
without both it would reach 9,000 tokens/s. The same shares of FlexTrain's step are not published.
"""
    yield from published_rows()
    yield f"""
Memory of DPO of Qwen2.5-7B by LoRA, as the data set `odyn-network/benchmark-finetune-dpo-v1` has it: {DPO_BYTES / GB:.2f} GB of a
GPU, and {DPO_BEFORE_BYTES / GB:.2f} GB where the reference was computed before. Rank, length, batch and recompute
are not published. With all on the device, rank 16 and a pair at a time we count, with all layers recomputed and with none, and
without the process's own memory:

| tokens of a sequence | all recomputed | nothing recomputed | 19.08 GB between |
|---:|---:|---:|---|"""
    yield from dpo_rows()
    yield """
The published figure is possible, which confirms little. A precomputed reference adds nothing here, so the second figure,
from another program, is missed."""


def dpo_rows() -> Iterator[str]:
    """Yield the memory of DPO with all state on the device."""
    for seq_len in (256, 512, 1024, 2048):
        how = {"train": "lora:r=16", "loss": "dpo", "seq_len": seq_len, "batch_size": 2, "micro_batch": 2}
        result = penstock.plan("qwen2.5-7b", "h100-sxm", **how)  # type: ignore[arg-type]
        cost = CostModel(result.profile)
        needs = resident(result.plan, cost)
        assert needs is not None, "a GPU has memory of its own"
        state_bytes = needs.needs.device["state"]
        sizes = sorted(state_bytes + n_bytes for n_bytes, _ in tiers(result.plan, cost))
        is_between = sizes[0] <= DPO_BYTES <= sizes[-1]
        yield f"| {seq_len:,} | {show_bytes(sizes[0])} | {show_bytes(sizes[-1])} | {'yes' if is_between else 'no'} |"


def main() -> None:
    without_arguments(__doc__)
    rows = []
    for i, cell in enumerate(CELLS, start=1):
        print(f"{i} of {len(CELLS)}: {cell.model} on {cell.machine}", file=sys.stderr, flush=True)
        rows.append(row(cell))
    print(f"""# Predicted cost of adapters for models that do not fit their GPU

{"".join((__doc__ or "").partition("Each cell")[1:]).strip()}

"Updated": where the plan runs the adapters' AdamW. "All trained": tokens/s with sufficient host memory, up to 4 TB.

| model | machine | tokens a step | base | step | tokens/s | gap | binding | updated | device | host | all trained | times |
|---|---|---:|---|---:|---:|---:|---|---|---:|---:|---|---:|""")
    print("\n".join(rows))
    print("\n".join(section()))


if __name__ == "__main__":
    main()
