"""Ablation: the worth of one choice of the planner, by searches of the same steps with it and without it.

    python -m benchmarks.ablation CHOICE [--processes N] > docs/benchmarks/PAGE_DATE.md

`boundary_stride`, `attention`, `offload_blocks`, `device_blocks`: such plans are neither suggested, bounded nor reached by a climb.
`kernels`: against eager modules and FlashAttention-2. `micro_batch`: against the best power of two. `contention`: against the plan
of a machine without shared resources (both directions of the link at once, unlimited host DRAM and host cores), costed on the real
one. Every figure is a search like `penstock plan`; nothing is measured. A quarter of an hour to an hour of one core.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import penstock
from benchmarks.any_memory import with_any_memory
from benchmarks.grid import MACHINES, MODELS, SEQ_LEN, TOKENS_PER_STEP
from penstock.hwprofiles.quantity import Share
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model, supported_attention
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.search import choices, evaluation, greedy, neighbours, policies, relax, tuning
from penstock.planner.search.micro_batch import SIZES
from penstock.results import Planned
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Block, Saved
from penstock.runtime.units import TB, show_bytes, show_seconds

KNOBS: dict[str, Callable[[Policy], bool]] = {  # choice -> True if a policy makes it
    "boundary_stride": lambda policy: policy.boundary_stride > 1,
    "attention": lambda policy: Saved.ATTENTION in policy.save,
    "offload_blocks": lambda policy: bool(policy.offload_blocks),
    "device_blocks": lambda policy: bool(policy.device_blocks),
}
TIGHT_MODELS, TIGHT_MACHINES, TIGHT_SEQ_LENS = ("qwen3-8b", "qwen2.5-14b"), ("rtx4090-desktop", "h100-sxm"), (4096, 65536, 131072)
ENOUGH = 1.02  # host memory relative to the smallest plan's
ENDLESS = 1e6  # factor on a capacity, so that it never binds


@dataclass(frozen=True, slots=True)
class Cell:
    """A step of a model on a machine with this host memory."""

    model: str
    machine: str
    seq_len: int
    n_tokens: int
    host_bytes: int = 2 * TB
    clip_norm: float | None = 1.0

    @property
    def profile(self) -> Profile:
        return with_any_memory(read_profile(self.machine), None, self.host_bytes)

    def best(self, profile: Profile | None = None, **fields: Any) -> Planned | None:
        """Return the best plan with these arguments of `penstock.plan`, or None if none fits."""
        fields |= {"seq_len": self.seq_len, "batch_size": self.n_tokens // self.seq_len, "clip_norm": self.clip_norm}
        try:
            return penstock.plan(self.model, profile or self.profile, **fields)
        except DoesNotFitError:
            return None


GRID = tuple(Cell(m, machine, SEQ_LEN, n) for m, machine, n in product(MODELS, MACHINES, TOKENS_PER_STEP))
PUBLISHED = (
    Cell("llama-3.1-8b", "h100-sxm", 8192, 65536), Cell("llama-3.1-8b", "rtx5090-server", 2048, 65536),
    Cell("llama-3.1-70b", "h100-sxm", 8192, 65536), Cell("qwen2.5-7b", "h200-pcie5", 4096, 8192),
    *(Cell("qwen2.5-14b", machine, 4096, n) for machine in ("rtx4090-server", "h100-sxm") for n in (8192, 16384, 32768, 65536)),
)  # fmt: skip
# Small steps on devices with free memory
SMALL_STEPS = tuple(
    Cell(m, machine, 4096, n)
    for m in ("qwen2.5-7b", "qwen2.5-14b")
    for machine in ("h100-sxm", "gh200", "h200-pcie5", "b200")
    for n in (8192, 16384, 32768)
)
SHAPES = tuple(
    Cell(m, machine, seq_len, n)
    for machine in ("h100-sxm", "h200-pcie5", "rtx4090-server", "gh200")
    for m in ("qwen2.5-7b", "qwen3-8b", "qwen2.5-14b", "llama-3.1-70b")
    for seq_len, n in ((2048, 131072), (16384, 65536), (65536, 65536))
)
BATCHES = (
    *(Cell("llama-3.1-8b", machine, 4096, 64 * 4096) for machine in ("b200", "mi355x", "gb300")),
    *(Cell(m, "h200-pcie5", 4096, 64 * 4096) for m in ("qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b")),
    *(Cell("qwen2.5-7b", machine, 2048, 64 * 2048) for machine in ("h100-sxm", "rtx5090-server")),
    Cell("qwen2.5-3b", "h100-sxm", 4096, 32 * 4096), Cell("llama-3.1-8b", "h200-pcie5", 4096, 16 * 4096),
    Cell("qwen3-8b", "gh200", 4096, 64 * 4096), *(Cell("qwen2.5-7b", "h100-sxm", 4096, n * 4096) for n in (17, 37, 67)),
)  # fmt: skip
# Without clipping an update may overlap with the backward, and all resources are shared
SHARED_STEPS = (("qwen3-8b", 16384, None), ("qwen3-8b", 32768, 1.0), ("qwen3-30b-a3b", 32768, None), ("qwen2.5-72b", 8192, None))
SHARED = tuple(
    Cell(m, machine, 4096, n, clip_norm=clip_norm)
    for machine in ("gb300", "gh200", "b200", "h200-pcie5", "a100-sxm", "rtx5090-server", "rtx5090-desktop", "rtx4090-desktop")
    for m, n, clip_norm in SHARED_STEPS
)


def tight() -> Iterator[Cell]:
    """Yield machines with barely more host memory than a step needs, with and without shared boundaries."""
    for model_name, machine, seq_len in product(TIGHT_MODELS, TIGHT_MACHINES, TIGHT_SEQ_LENS):
        model, profile = read_model(model_name), with_any_memory(read_profile(machine), None, 2 * TB)
        semantics = Semantics(seq_len, 1, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
        semantics = with_kernels(model, semantics, profile)
        smallest = list(policies.smallest_plans(model, build_workload(model, semantics), semantics, profile))
        for strides in ([1], tuning.STRIDES):
            needs = [n.host_peak_bytes for plan, n in smallest if n.fits and plan.policy.boundary_stride in strides]
            if needs:
                yield Cell(model_name, machine, seq_len, seq_len, round(min(needs) * ENOUGH))


CELLS: dict[str, Callable[[], tuple[Cell, ...]]] = {
    "boundary_stride": lambda: (*dict.fromkeys(tight()), *GRID),
    "attention": lambda: (*dict.fromkeys(tight()), *GRID),
    "offload_blocks": lambda: tuple(dict.fromkeys((*PUBLISHED, *GRID))),
    "device_blocks": lambda: SMALL_STEPS,
    "kernels": lambda: SHAPES,
    "micro_batch": lambda: BATCHES,
    "contention": lambda: SHARED,
}


def without_knob(cell: Cell, knob: str) -> Planned | None:
    """Return the best plan of a search that cannot make a choice."""
    fits, is_made = evaluation.Evaluator.fits, KNOBS[knob]
    with ExitStack() as stack:
        change = lambda where, name, value: stack.enter_context(patch.object(where, name, value))  # noqa: E731
        change(evaluation.Evaluator, "fits", lambda self, policy: not is_made(policy) and fits(self, policy))
        match knob:
            case "boundary_stride":
                change(tuning, "STRIDES", (1,))
            case "attention":
                recompute = Block.recompute
                change(Block, "recompute", lambda self, saved: None if saved is Saved.ATTENTION else recompute(self, saved))
            case "offload_blocks":
                ways_of = policies.ways_of
                for module in (relax, choices):
                    change(module, "ways_of", lambda block, stride: [way for way in ways_of(block, stride) if not way.away])
                change(neighbours, "WAYS", tuple(way for way in neighbours.WAYS if not way.away))
                change(greedy.Greedy, "_leaving", lambda self, saved: {})
            case "device_blocks":
                for module in (relax, choices, neighbours, policies):
                    change(module, "places_to_stay", lambda plan, profile: [])
        return cell.best()


def unshared(profile: Profile) -> Profile:
    """Return the machine without contention, at the same speed per op."""
    free = faster(profile, {Group.DUPLEX: ENDLESS, Group.DRAM: ENDLESS})
    none = Share(value=0.0, spread_fraction=0.0, source=profile.link.host_cores_per_copy.source)
    return free.model_copy(update={"link": free.link.model_copy(update={"host_cores_per_copy": none})})


def ablated_plan(choice: str, cell: Cell, plan: Planned) -> tuple[Planned | None, str]:
    """Return the best plan without a choice, and a note."""
    semantics = plan.plan.semantics
    match choice:
        case "kernels":
            return cell.best(kernels="eager"), ""
        case "micro_batch":
            powers = (1 << i for i in range(semantics.batch_size.bit_length()))
            near = [n for n in powers if semantics.micro_batch / 4 <= n <= 4 * semantics.micro_batch]
            plans = [candidate for n in near if (candidate := cell.best(micro_batch=n)) is not None]
            return min(plans, key=lambda candidate: candidate.step_s, default=None), ""
        case "contention":
            sizes = {name: getattr(semantics, name) for name in SIZES}
            if (blind := cell.best(unshared(cell.profile), **sizes)) is None:
                return None, ""
            return cell.best(policy=blind.plan.policy, **sizes), f"promised {show_seconds(blind.step_s)}; "
    return without_knob(cell, choice), ""


@dataclass(frozen=True, slots=True)
class Row:
    """Predictions of a cell, with and without the choice."""

    cell: Cell
    step_s: float
    without_s: float | None  # None: does not fit
    other_s: float | None  # fastest schedule of another system with the sizes of the first search
    gap_fraction: float
    above_machine_fraction: float  # step time above the machine bound
    note: str

    def __str__(self) -> str:
        cell, step_s = self.cell, self.step_s
        speeds = f"{show_seconds(step_s)} | {cell.n_tokens / step_s:,.0f}"
        times = "does not fit | " if self.without_s is None else f"{show_seconds(self.without_s)} | {self.without_s / step_s:.3f}"
        baseline = "does not fit" if self.other_s is None else f"{self.other_s / step_s:.2f}"
        proof = f"{self.gap_fraction:.1%} | {self.above_machine_fraction:.0%}"
        return f"{head(cell)} | {speeds} | {times} | {baseline} | {proof} | {self.note} |"


def head(cell: Cell) -> str:
    clipped = "" if cell.clip_norm else ", not clipped"
    return f"| {cell.model} | {cell.machine} | {cell.n_tokens:,} of {cell.seq_len:,}{clipped} | {show_bytes(cell.host_bytes)}"


def compared(choice: str, cell: Cell) -> Row | None:
    """Run both searches. Return None if nothing fits."""
    plan = cell.best()
    if plan is None:
        return None
    ablated, note = ablated_plan(choice, cell, plan)
    baselines_s = [entry["step_s"] for entry in plan.answer.baselines.values() if "step_s" in entry]
    note += "" if ablated is None else "; ".join(differences(plan, ablated)) or "the same plan"
    proof, without_s = plan.certificate, None if ablated is None else ablated.step_s
    excess = plan.step_s / proof.machine_bound_s - 1
    binding = f"{note}; {proof.binding}" if note else proof.binding
    return Row(cell, plan.step_s, without_s, min(baselines_s, default=None), proof.gap_fraction, excess, binding)


def differences(plan: Planned, ablated: Planned) -> Iterator[str]:
    """Yield the fields that differ between two plans. Lists of blocks are shown by length."""
    mine, their = ({"micro batch": p.plan.semantics.micro_batch} | asdict(p.plan.policy) for p in (plan, ablated))
    for name, value in mine.items():
        a, b = (len(x) if isinstance(x, tuple | list | dict) else x for x in (value, their[name]))
        if a != b:
            yield f"{name.replace('_', ' ')} {a}, not {b}"


def page(choice: str, rows: list[Row | None], cells: tuple[Cell, ...]) -> Iterator[str]:
    fitting = [row for row in rows if row is not None]
    times = [row.without_s / row.step_s for row in fitting if row.without_s is not None]
    gaps, excess = ([getattr(row, f"{name}_fraction") for row in fitting] for name in ("gap", "above_machine"))
    yield f"# Worth of a choice: {choice}\n\nCommand: `python -m benchmarks.ablation {choice}`. Predicted, not measured.\n"
    yield (
        f"- {sum(x > 1.01 for x in times)} of {len(times)} cells are faster by more than 1 %; without the choice the step is "
        f"slower by a factor of {statistics.median(times):.3f} in the median, {min(times):.3f} to {max(times):.3f}."
    )
    yield f"- {len(fitting) - len(times)} cells fit with the choice alone; {len(rows) - len(fitting)} fit in neither case."
    yield f"- Gap to the bound of all policies: median {statistics.median(gaps):.1%}, worst {max(gaps):.1%}."
    yield f"- Steps exceed the machine bound by {statistics.median(excess):.0%} in the median, {max(excess):.0%} at most.\n"
    names = (
        "model | machine | tokens | host memory | step | tokens/s | without | times | best other system, times | gap | above bound"
    )
    yield f"| {names} | changes; binding resource |"
    yield "|---" * 4 + "|---:" * 7 + "|---|"
    yield from (f"{head(cell)} | does not fit |" if row is None else str(row) for cell, row in zip(cells, rows, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choice", choices=CELLS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cells", type=int, nargs="*", help="numbers of cells, from 0")
    options = parser.parse_args()
    every = CELLS[options.choice]()
    cells = every if options.cells is None else tuple(every[n] for n in options.cells)
    rows: list[Row | None] = []
    with ProcessPoolExecutor(options.processes) as processes:
        for row in processes.map(partial(compared, options.choice), cells):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    print("\n".join(page(options.choice, rows, cells)))


if __name__ == "__main__":
    main()
