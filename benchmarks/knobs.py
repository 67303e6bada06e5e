"""Ablation: the value of each choice of the search.

    python -m benchmarks.knobs > docs/benchmarks/knobs_DATE.md

Each cell is a search like `penstock plan`, repeated without each of the choices suspected to gain nothing: such plans are then
neither suggested, bounded nor reached by a climb. Cells are those of `grid.py`, and machines short of memory: 2 % more host memory
than the smallest plan needs, with and without shared boundaries. Nothing is measured. An hour of one core. (Transfers of layers in
parts were a choice, too, until this ablation.)
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

from benchmarks.any_memory import with_any_memory
from benchmarks.grid import MACHINES, MODELS, SEQ_LEN, TOKENS_PER_STEP
from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model, supported_attention
from penstock.planner.search import choices, evaluation, greedy, neighbours, policies, relax, tuning
from penstock.planner.search.micro_batch import SIZES, sizes_of
from penstock.planner.search.search import search
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Block, Saved
from penstock.runtime.units import TB, show_bytes, show_count, show_seconds

KNOBS: dict[str, Callable[[Policy], bool]] = {  # choice -> True if a policy makes it
    "boundary_stride": lambda policy: policy.boundary_stride > 1,
    "save: attention": lambda policy: Saved.ATTENTION in policy.save,
    "offload_blocks": lambda policy: bool(policy.offload_blocks),
    "device_blocks": lambda policy: bool(policy.device_blocks),
}
TIGHT_MODELS, TIGHT_MACHINES, TIGHT_SEQ_LENS = ("qwen3-8b", "qwen2.5-14b"), ("rtx4090-desktop", "h100-sxm"), (4096, 65536, 131072)
ENOUGH = 1.02


@dataclass(frozen=True, slots=True)
class Cell:
    """A model, a machine with this host memory, and a step."""

    model: str
    machine: str
    seq_len: int
    n_tokens: int
    host_bytes: int = 2 * TB

    def row(self, times: dict[str, float | None]) -> str:
        known = times[""]
        sizes = f"{show_count(self.n_tokens)} of {show_count(self.seq_len)} | {show_bytes(self.host_bytes)}"
        head = f"| {self.model} | {self.machine} | {sizes} |"
        if known is None:
            return f"{head} does not fit |" + " |" * len(KNOBS)
        worth = (
            "does not fit" if ablated is None else f"{ablated / known - 1:+.2%}" for knob in KNOBS for ablated in [times[knob]]
        )
        return f"{head} {show_seconds(known)} | {' | '.join(worth)} |"


def step_s(cell: Cell, knob: str) -> float | None:
    """Return the step time of the best plan without a choice ("": all choices), or None if none fits."""
    model, profile = read_model(cell.model), with_any_memory(read_profile(cell.machine), None, cell.host_bytes)
    semantics = Semantics(cell.seq_len, cell.n_tokens // cell.seq_len, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
    with ExitStack() as stack:
        if knob:
            fits, is_made = evaluation.Evaluator.fits, KNOBS[knob]
            stack.enter_context(
                patch.object(evaluation.Evaluator, "fits", lambda self, policy: not is_made(policy) and fits(self, policy))
            )
        if knob == "boundary_stride":
            stack.enter_context(patch.object(tuning, "STRIDES", (1,)))
        if knob == "save: attention":
            recompute = Block.recompute
            without_attention = lambda self, saved: None if saved is Saved.ATTENTION else recompute(self, saved)  # noqa: E731
            stack.enter_context(patch.object(Block, "recompute", without_attention))
        if knob == "offload_blocks":
            ways_of = policies.ways_of
            stay = lambda block, stride: [way for way in ways_of(block, stride) if not way.away]  # noqa: E731
            for room in (relax, choices):
                stack.enter_context(patch.object(room, "ways_of", stay))
            stack.enter_context(patch.object(neighbours, "WAYS", tuple(way for way in neighbours.WAYS if not way.away)))
            stack.enter_context(patch.object(greedy.Greedy, "_leaving", lambda self, saved: {}))
        if knob == "device_blocks":
            for room in (relax, choices, neighbours, policies):
                stack.enter_context(patch.object(room, "places_to_stay", lambda plan, profile: []))
        sizes = sizes_of(model, with_kernels(model, semantics, profile), profile)
        try:
            return search(model, sizes, profile, free=SIZES).step_s
        except DoesNotFitError:
            return None


def searched(cell: Cell) -> dict[str, float | None]:
    """Search with all choices, and without each of them."""
    return {knob: step_s(cell, knob) for knob in ("", *KNOBS)}


def tight() -> Iterator[Cell]:
    """Yield machines with barely more host memory than a step needs."""
    for model_name, machine, seq_len in product(TIGHT_MODELS, TIGHT_MACHINES, TIGHT_SEQ_LENS):
        model, profile = read_model(model_name), with_any_memory(read_profile(machine), None, 2 * TB)
        semantics = Semantics(seq_len, 1, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
        semantics = with_kernels(model, semantics, profile)
        workload = build_workload(model, semantics)
        lean = list(policies.smallest_plans(model, workload, semantics, profile))
        for strides in ([1], tuning.STRIDES):
            needs = [n.host_peak_bytes for plan, n in lean if n.fits and plan.policy.boundary_stride in strides]
            if needs:
                yield Cell(model_name, machine, seq_len, seq_len, round(min(needs) * ENOUGH))


def main() -> None:
    cells = [Cell(m, machine, SEQ_LEN, n) for m, machine, n in product(MODELS, MACHINES, TOKENS_PER_STEP)]
    cells = list(dict.fromkeys([*tight(), *cells]))
    rows: list[tuple[Cell, dict[str, float | None]]] = []
    with ProcessPoolExecutor(int(sys.argv[1]) if len(sys.argv) > 1 else 2) as processes:
        for cell, times in zip(cells, processes.map(searched, cells), strict=True):
            rows.append((cell, times))
            print(cell.row(times), file=sys.stderr, flush=True)
    print("# What is each choice of the search worth?\n")
    print((__doc__ or "").split("\n\n", 2)[2])
    for knob in KNOBS:
        worth = [f[knob] / f[""] - 1 for _, f in rows if f[""] is not None and f[knob] is not None]  # type: ignore[operator]
        n_unfit = sum(f[""] is not None and f[knob] is None for _, f in rows)
        spread = f"median {statistics.median(worth):+.2%}, worst {max(worth):+.2%}, best {min(worth):+.2%}"
        print(f"- Without `{knob}`: {spread}; {n_unfit} fit no more.")
    print(f"\n| model | machine | tokens | host memory | step | {' | '.join(f'no `{knob}`' for knob in KNOBS)} |")
    print("|---" * 4 + "|---:" * (1 + len(KNOBS)) + "|")
    print("\n".join(cell.row(times) for cell, times in rows))


if __name__ == "__main__":
    main()
