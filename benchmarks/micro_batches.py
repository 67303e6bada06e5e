"""Step time of the chosen micro-batch against all others.

    python -m benchmarks.micro_batches > docs/benchmarks/micro-batches_DATE.md

Every figure is a search like `penstock plan`, with 2 TB of host memory; nothing is measured. *Before* is an earlier rule, kept here
for comparison: the largest divisor of the batch with a least working set of at most 60 % of the device. Kernels are each machine's
fastest in both. Half an hour of one core.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.any_memory import with_any_memory
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model, supported_attention
from penstock.planner.predict.memory import footprint, frame
from penstock.planner.search.micro_batch import SIZES, sizes_of
from penstock.planner.search.result import SearchResult
from penstock.planner.search.search import search
from penstock.planner.search.tuning import LOSS_TILE
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import GB, TB, show_seconds

CELLS = (
    ("llama-3.1-8b", "b200", 64, 4096),
    ("llama-3.1-8b", "mi355x", 64, 4096),
    ("llama-3.1-8b", "gb300", 64, 4096),
    ("qwen2.5-14b", "h200-pcie5", 64, 4096),
    ("qwen2.5-32b", "h200-pcie5", 64, 4096),
    ("llama-3.1-70b", "h200-pcie5", 64, 4096),
    ("qwen2.5-7b", "h100-sxm", 64, 2048),
    ("qwen2.5-3b", "h100-sxm", 32, 4096),
    ("llama-3.1-8b", "h200-pcie5", 16, 4096),
    ("qwen2.5-7b", "rtx5090-server", 64, 2048),
    ("qwen3-8b", "gh200", 64, 4096),
)
LADDERS = (("llama-3.1-8b", "h200-pcie5", 64, 4096), ("qwen2.5-7b", "h100-sxm", 64, 2048), ("qwen2.5-32b", "h200-pcie5", 64, 4096))
RUNGS = tuple(n * GB for n in (40, 64, 80, 149, 220, 400))
BATCHES = (16, 17, 32, 37, 64, 67)
BATCH_MODELS, BATCH_MACHINE, BATCH_SEQ_LEN = ("qwen2.5-7b", "qwen2.5-32b", "qwen3-30b-a3b"), "h100-sxm", 4096
BEFORE_FRACTION = 0.6


@dataclass(frozen=True, slots=True)
class Job:
    """A model, its semantics, and a machine."""

    model: Model
    semantics: Semantics
    profile: Profile

    @staticmethod
    def named(model_name: str, machine: str, batch: int, seq_len: int, device_bytes: int | None = None) -> "Job":
        model, profile = read_model(model_name), with_any_memory(read_profile(machine), device_bytes, 2 * TB)
        semantics = Semantics(seq_len, batch, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
        return Job(model, with_kernels(model, semantics, profile), profile)

    def earlier_rule(self) -> int:
        """Return the micro-batch of the earlier rule; 1 if no divisor fits, because no cell here needs tiles."""
        batch = self.semantics.batch_size
        room_bytes = BEFORE_FRACTION * self.profile.device.memory_bytes.value
        for n in (n for n in range(batch, 0, -1) if batch % n == 0):
            semantics = replace(self.semantics, micro_batch=n, loss_tile_tokens=LOSS_TILE[self.semantics.loss])
            plan = frame(self.model, build_workload(self.model, semantics), semantics, Policy())
            if footprint(plan, self.profile).device_peak_bytes <= room_bytes:
                return n
        return 1

    def chosen(self) -> tuple[int, float]:
        """Return the chosen micro-batch, and the CPU seconds of the search."""
        start_s = time.process_time()
        answer = search(self.model, sizes_of(self.model, self.semantics, self.profile), self.profile, free=SIZES)
        return answer.plan.semantics.micro_batch, time.process_time() - start_s

    def searched(self, micro_batch: int) -> SearchResult:
        """Return the best plan with this micro-batch and free tiles."""
        semantics = replace(self.semantics, micro_batch=micro_batch)
        free = SIZES - {"micro_batch"}
        return search(self.model, sizes_of(self.model, semantics, self.profile, free), self.profile, free=free)


def cell(model: str, machine: str, batch: int, seq_len: int) -> str:
    """Format one cell: the earlier rule, the choice, and the best power of two within a factor of four, each searched."""
    job = Job.named(model, machine, batch, seq_len)
    earlier, (now, seconds) = job.earlier_rule(), job.chosen()
    powers = [n for k in range(batch.bit_length()) if now / 4 <= (n := 1 << k) <= 4 * now]
    steps_s = {}
    for n in sorted({*powers, earlier, now}):
        try:
            steps_s[n] = job.searched(n).step_s
        except ValueError:  # does not fit
            continue
    best = min((n for n in powers if n in steps_s), key=lambda n: steps_s[n])
    return (
        f"| {model} | {machine} | {batch} x {seq_len} | {earlier} | {show_seconds(steps_s[earlier])} | {now} | "
        f"{show_seconds(steps_s[now])} | {1 - steps_s[now] / steps_s[earlier]:.1%} | {best} | {show_seconds(steps_s[best])} | "
        f"{steps_s[now] / steps_s[best] - 1:+.2%} | {seconds:.1f} |"
    )


def rung(model: str, machine: str, batch: int, seq_len: int, device_bytes: int) -> tuple[str, float, float]:
    """Return the row for a device memory, the step time, and its gap."""
    job = Job.named(model, machine, batch, seq_len, device_bytes)
    earlier, (now, _) = job.earlier_rule(), job.chosen()
    old, new = job.searched(earlier), job.searched(now)
    gap = new.certificate.gap_fraction
    steps = f"{earlier} | {show_seconds(old.step_s)} | {now} | {show_seconds(new.step_s)}"
    return f"| {model} | {device_bytes // GB} GB | {steps} | {gap:.2%} |", new.step_s, gap


def batch_row(model: str, batch: int) -> str:
    job = Job.named(model, BATCH_MACHINE, batch, BATCH_SEQ_LEN)
    earlier, (now, _) = job.earlier_rule(), job.chosen()
    speeds = [job.semantics.tokens_per_step / job.searched(n).step_s for n in (earlier, now)]
    n_left = batch % now
    last = f", the last {n_left}" if n_left else ""
    return f"| {model} | {batch} | {earlier} | {speeds[0]:,.0f} | {now}{last} | {speeds[1]:,.0f} |"


def _slower(rungs: Sequence[tuple[str, float, float]]) -> list[str]:
    """Append to each row its slowdown against a smaller device."""
    rows, fastest_s = [], float("inf")
    for row, step_s, gap in rungs:
        excess = step_s / fastest_s - 1
        rows.append(f"{row} {f'{excess:+.2%}' if excess > 0 else ''}{' beyond the gap' if excess > gap else ''} |")
        fastest_s = min(fastest_s, step_s)
    return rows


def main() -> None:
    print("# How fast is a step with the micro-batch that nobody named?\n")
    print((__doc__ or "").split("\n\n", 1)[1])
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        print("## Against the rule of before, and the best power of two\n")
        print(
            "| model | machine | batch | before | step | now | step | gained | best power of 2 | step | against it | s to choose |"
        )
        print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
        for line in pool.map(cell, *zip(*CELLS, strict=True)):
            print(line, flush=True)
        print("\n## More device memory\n")
        print("*Slower*: than with less memory, where it is.\n")
        print("| model | device | before | step | now | step | gap | slower |\n|---|---:|---:|---:|---:|---:|---:|---:|")
        for ladder in LADDERS:
            rungs = list(pool.map(rung, *zip(*((*ladder, n) for n in RUNGS), strict=True)))
            print("\n".join(_slower(rungs)), flush=True)
        print(f"\n## Batches with and without divisors ({BATCH_MACHINE}, {BATCH_SEQ_LEN} tokens a sequence)\n")
        print("| model | batch | before | tokens/s | now | tokens/s |\n|---|---:|---:|---:|---:|---:|")
        for line in pool.map(batch_row, *zip(*product(BATCH_MODELS, BATCHES), strict=True)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
