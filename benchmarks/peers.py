"""Throughput that other systems publish, and our plan for the same job: wins and losses.

    python -m benchmarks.peers > docs/benchmarks/peers_2026-11-29.md

Plans every row of `benchmarks/published/published_rows.json` with a known machine, model and batch; the others are listed with the
reason. Equal jobs are planned once. Three minutes on one core.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from benchmarks.common import conformal_factor, without_arguments
from penstock.results import Planned
from penstock.runtime.errors import PenstockError

ROWS = Path(__file__).parent / "published" / "published_rows.json"
MACHINES = {"H100 80GB": "h100-sxm", "H100": "h100-sxm", "RTX 4090": "rtx4090-server", "RTX 5090": "rtx5090-desktop"}
SEVERAL = {"RTX 4090": "8xrtx4090", "H100": "8xh100"}
LLMQ_SEQUENCES = 512  # also of rows without a batch: "about 500", and four GPUs
LORA, EXPERTS = "lora:r=16", "lora:r=16,targets=all-linear+experts"
IN_BF16 = "adamw:moments=bf16,master=bf16"
ONE_SEQUENCE = (("seq_len", 4096), ("batch_size", 4), ("micro_batch", 1))
UNNAMED = "ktransformers"  # its GPU is not named: planned on rtx4090-server with a whole model


class Job(NamedTuple):
    """Arguments of a plan, and how the job differs from the published one."""

    machine: str
    model: str
    arguments: tuple[tuple[str, Any], ...]
    differs: tuple[str, ...]

    @property
    def tokens_per_step(self) -> int:
        arguments = dict(self.arguments)
        return int(arguments["seq_len"] * arguments["batch_size"])


def job_of(row: Mapping[str, Any]) -> Job | str:
    """Return the job of a published row, or the reason why no plan can express it."""
    n, kind, differs = row.get("gpus", 1), row["what"], []
    machine = (SEVERAL if n > 1 else MACHINES).get(row["gpu"])
    batch, seq_len = row.get("batch"), row.get("seq")
    if row["system"] == UNNAMED and kind == "full":
        machine, batch, seq_len = "rtx4090-server", 1, row["tokens_per_step"]
        differs.append("the published GPU has no name, and its host computes experts")
    if batch is None and (row["system"] == "llmq" or "500 sequences" in (row.get("note") or "")):
        batch = LLMQ_SEQUENCES
        differs.append("sequences a step: about 500" if row.get("note") else "sequences a step are not published")
    reasons = {
        f"no profile of {n} x {row['gpu']}": machine is None,
        "sequences a step, or their tokens, are not published": batch is None or seq_len is None,
        "tokens/s are not published": row.get("tokens_per_s") is None,
    }
    if any(reasons.values()):
        return "; ".join(reason for reason, is_true in reasons.items() if is_true)
    assert machine is not None
    fields = {"seq_len": seq_len, "batch_size": batch}
    if (compute := row.get("compute", "bf16")) == "fp8" and "lora" not in kind:
        fields["compute_dtype"] = "fp8"
        differs.append("ours: a scale per row, weight gradients in bf16")
    elif compute != "bf16":
        differs.append(f"it computes in {compute}, ours in bf16")
    if "lora" in kind:
        fields |= {"train": EXPERTS if "experts" in kind else LORA} | ({"base": "nf4"} if "nf4" in kind else {})
        differs += ["its adapters' moments have 8 bits"] if "adamw_8bit" in kind else []
    elif row["system"] == "llmq":
        fields["optimizer"] = IN_BF16
    fields |= {"gpus": n} if n > 1 else {}
    return Job(machine, row["model"].split()[0], tuple(fields.items()), tuple(differs))


@cache
def planned(machine: str, model: str, arguments: tuple[tuple[str, Any], ...]) -> Planned | str:
    try:
        return penstock.plan(model, machine, **dict(arguments))
    except PenstockError as error:
        return str(error)


class Cell(NamedTuple):
    """A planned row: published tokens/s, ours, and our P10 and P90. `line` has a place for the interval of the peer."""

    line: str
    system: str
    published: float
    planned: float
    low: float
    high: float
    is_bf16: bool

    @property
    def is_held(self) -> bool:
        return self.low <= self.published <= self.high


def of_peers(cells: list[Cell]) -> list[Cell]:
    """Move the ends of each interval by the conformal factors of the rows of all *other* systems, in bf16: the time that schedules
    of peers lose or gain against our plan. A plan's own interval has no such factor."""
    result = []
    for cell in cells:
        rivals = [rival for rival in cells if rival.is_bf16 and rival.system != cell.system]
        loses, gains = (
            conformal_factor(x) for x in ((c.low / c.published for c in rivals), (c.published / c.high for c in rivals))
        )
        result.append(cell._replace(low=cell.low / loses, high=cell.high * gains))
    return result


def rows() -> tuple[list[Cell], list[str]]:
    """Return planned rows, and lines of the others with their reasons."""
    cells, unplanned = [], []
    for row in json.loads(ROWS.read_text())["rows"]:
        compute, n = row.get("compute", "bf16"), row.get("gpus", 1)
        name = f"{row['system']}, {row['what']}, {row['model']}, {n} x {row['gpu']}, {compute}"
        job = job_of(row)
        plan = job if isinstance(job, str) else planned(*job[:3])
        if isinstance(job, str) or isinstance(plan, str):
            unplanned.append(f"- {name}: {plan}.")
            continue
        claim, published = plan.answer.claim.prediction, float(row["tokens_per_s"])
        low, high = (job.tokens_per_step / s for s in (claim.p90_step_s, claim.p10_step_s))
        cell = Cell("", row["system"].split()[0], published, plan.tokens_per_s, low, high, compute == "bf16")
        wins, s = "ours" if cell.planned >= published else "theirs", plan.plan.semantics
        state = f"{s.master_dtype}, {s.optimizer_in_words}" if s.train.all else f"adapters beside {s.base}"
        size = f"{s.all_ranks.batch_size} x {s.seq_len:,}"
        figures = (
            f"{published:,.0f} | {cell.planned:,.0f} | {low:,.0f} to {high:,.0f} | PEER | {cell.planned / published:.2f} | {wins}"
        )
        line = f"| {name} | {job.machine} | {job.tokens_per_step:,} ({size}) | {state} | {figures} | {'; '.join(job.differs)} |"
        cells.append(cell._replace(line=line))
    return cells, unplanned


def page() -> Iterator[str]:
    """Yield the page."""
    cells, unplanned = rows()
    peers, in_bf16 = of_peers(cells), [cell for cell in cells if cell.is_bf16]
    held, held_peers = (sum(cell.is_held for cell in part if cell.is_bf16) for part in (cells, peers))
    factors = sorted(cell.low / peer.low for cell, peer in zip(cells, peers, strict=True))
    faster, faster_in_bf16 = (sum(cell.planned >= cell.published for cell in part) for part in (cells, in_bf16))
    yield f"""# Peers: published throughput and our plan for the same job

Written by `python -m benchmarks.peers`; sources are with each row in `benchmarks/published/published_rows.json`. Ours are
plans, not runs: the shipped profile of the machine, its usual host, and the fastest micro-batch and kernels. Tokens a step,
sequence length and state precision are equal, except as in the last column. A plan does not predict another system: a
published rate outside our P10 to P90 shows different methods, or an error in our prediction.

**The two intervals.** `P10 to P90` is the one of `plan`, of our step. `of a peer` is that of a published rate of another
system, with the conformal factors of the rows of all other systems ([own steps](../accuracy.md#gpu-steps-that-we-measured) have
the same kind of factor): the time that peers' schedules lose or gain against our plan. Only this page uses it. It is wide,
{factors[0]:.2f} to {factors[-1]:.2f} times further down, and of little use for one peer.

The plan is the faster one in {faster} of {len(cells)} rows, and in {faster_in_bf16} of the {len(in_bf16)} in bf16. P10 to P90 \
hold {held} of the {len(in_bf16)} rates in bf16, those of a peer {held_peers} (wanted: 75 to 90 %).

| system and job | our machine | tokens a step | our state | published tokens/s | ours | P10 to P90 | of a peer \
| ratio | faster | differs |
|---|---|---:|---|---:|---:|---:|---:|---:|---|---|"""
    yield from (cell.line.replace("PEER", f"{cell.low:,.0f} to {cell.high:,.0f}") for cell in peers)
    yield """
Experts' products: torch has a kernel for all experts in one call on Hopper and data center Blackwell only. There they are
planned at 1.25 times the seconds of single products (1.18 to 1.25 published on an H200; two published layers of small experts on an
H100 imply at most 1.8). On other GPUs, such as the RTX 5090, torch issues a product per expert, planned at 8 us at least, so
that a plan with few rows per expert, or narrow products of adapters, waits for calls. The rows of 30B-A3B with adapters differ
in the method, too: their micro-batches have one sequence, so that each layer is unpacked and issued four times, and our plan
has one micro-batch of four.
"""
    one = planned("rtx5090-desktop", "qwen3-30b-a3b", (*ONE_SEQUENCE, ("train", EXPERTS), ("base", "nf4")))
    assert isinstance(one, Planned), one
    low, high = (4 * 4096 / s for s in (one.answer.claim.prediction.p90_step_s, one.answer.claim.prediction.p10_step_s))
    yield f"With one sequence at a time, as there, our plan has {one.tokens_per_s:,.0f} tokens/s ({low:,.0f} to {high:,.0f}).\n"
    yield "## Rows without a plan\n"
    yield from unplanned


def main() -> None:
    without_arguments(__doc__)
    print("\n".join(page()))


if __name__ == "__main__":
    main()
