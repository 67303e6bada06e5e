"""Gain of activation offload, and of optimizer state on the device.

    python -m benchmarks.offload > docs/benchmarks/offload_DATE.md
    python -m benchmarks.offload state > docs/benchmarks/state_DATE.md

Each cell is a search like `penstock plan`, repeated without `offload_blocks` (or `device_blocks`): such plans are then neither
suggested, bounded nor reached by a climb, and sizes are chosen without them. The fastest schedule of another system under the same
semantics, with the sizes of the first search, is listed next to it. Cells are those of `grid.py` and some with published figures;
for state, small steps on devices with free memory. Nothing is measured. Half an hour of one core, a quarter for state.
"""

import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product

import penstock
from benchmarks.any_memory import with_any_memory
from benchmarks.grid import MACHINES, MODELS, SEQ_LEN, TOKENS_PER_STEP
from benchmarks.knobs import Cell, step_s
from penstock.hwprofiles.schema import read_profile
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan.workload import Saved
from penstock.runtime.units import TB, show_seconds

PUBLISHED = (
    Cell("llama-3.1-8b", "h100-sxm", 8192, 65536),
    Cell("llama-3.1-8b", "rtx5090-server", 2048, 65536),
    Cell("llama-3.1-70b", "h100-sxm", 8192, 65536),
    Cell("qwen2.5-7b", "h200-pcie5", 4096, 8192),
    *(Cell("qwen2.5-14b", machine, 4096, n) for machine in ("rtx4090-server", "h100-sxm") for n in (8192, 16384, 32768, 65536)),
)


SMALL_STEPS = tuple(
    Cell(model, machine, 4096, n)
    for model, machine, n in product(
        ("qwen2.5-7b", "qwen2.5-14b"), ("h100-sxm", "gh200", "h200-pcie5", "b200"), (8192, 16384, 32768)
    )
)


@dataclass(frozen=True, slots=True)
class Found:
    """A cell's plan, and the best plan without the choice."""

    step_s: float
    without_s: float | None
    other_s: float | None  # fastest schedule of another system
    gap_fraction: float
    above_machine_fraction: float  # step time above the machine bound
    what: str
    binding: str


def found(knob: str, cell: Cell) -> Found | None:
    """Run both searches. Return None if nothing fits."""
    profile = with_any_memory(read_profile(cell.machine), None, cell.host_bytes)
    try:
        planned = penstock.plan(cell.model, profile, seq_len=cell.seq_len, batch_size=cell.n_tokens // cell.seq_len)
    except DoesNotFitError:
        return None
    answer, policy = planned.answer, planned.plan.policy
    others = [of["step_s"] for of in answer.baselines.values() if "step_s" in of]
    counts: dict[str, int] = {saved: sum(policy.saved(b) is saved for b in policy.offload_blocks) for saved in Saved}
    if knob == "device_blocks":
        counts = {"state": len(policy.device_blocks)}
    what = ", ".join(f"{name} of {n}" for name, n in counts.items() if n)
    proof = answer.certificate
    above = answer.step_s / proof.machine_bound_s - 1
    return Found(answer.step_s, step_s(cell, knob), min(others, default=None), proof.gap_fraction, above, what, proof.binding)


def row(cell: Cell, of: Found | None) -> str:
    head = f"| {cell.model} | {cell.machine} | {cell.n_tokens:,} of {cell.seq_len:,} |"
    if of is None:
        return f"{head} does not fit" + " |" * 8
    without = "does not fit | " if of.without_s is None else f"{show_seconds(of.without_s)} | {of.without_s / of.step_s:.2f}"
    other = "does not fit" if of.other_s is None else f"{of.other_s / of.step_s:.2f}"
    tokens_per_s = f"{cell.n_tokens / of.step_s:,.0f}"
    return (
        f"{head} {show_seconds(of.step_s)} | {tokens_per_s} | {without} | {other} | {of.gap_fraction:.1%} | "
        f"{of.above_machine_fraction:.0%} | {of.what or 'nothing'}; {of.binding} |"
    )


def main() -> None:
    if unknown := [argument for argument in sys.argv[1:] if argument != "state" and not argument.isdigit()]:
        sys.exit(f"{unknown[0]!r}: what is there is `state`, and a number of processes")
    knob = "device_blocks" if "state" in sys.argv[1:] else "offload_blocks"
    grid = [Cell(m, machine, SEQ_LEN, n) for m, machine, n in product(MODELS, MACHINES, TOKENS_PER_STEP)]
    cells = list(SMALL_STEPS) if knob == "device_blocks" else list(dict.fromkeys([*PUBLISHED, *grid]))
    n_processes = next((int(argument) for argument in sys.argv[1:] if argument.isdigit()), 2)
    rows: list[tuple[Cell, Found | None]] = []
    with ProcessPoolExecutor(n_processes) as processes:
        for cell, of in zip(cells, processes.map(partial(found, knob), cells), strict=True):
            rows.append((cell, of))
            print(row(cell, of), file=sys.stderr, flush=True)
    place = "state is kept on the device" if knob == "device_blocks" else "saved activations may wait on the host"
    print(f"# What is gained where {place}?\n")
    print((__doc__ or "").split("\n\n", 2)[2])
    faster = [of.without_s / of.step_s for _, of in rows if of is not None and of.without_s is not None]
    gaps = [of.gap_fraction for _, of in rows if of is not None]
    above = [of.above_machine_fraction for _, of in rows if of is not None]
    print(
        f"- {sum(f > 1.01 for f in faster)} of {len(faster)} cells are faster by more than 1 %, the fastest {max(faster):.2f} "
        f"times; median {statistics.median(faster):.2f}, least {min(faster):.3f}."
    )
    print(f"- Gap to the bound of all policies: median {statistics.median(gaps):.1%}, worst {max(gaps):.1%}.")
    print(
        f"- Steps lie above what no schedule goes below by {statistics.median(above):.0%} in the median, {max(above):.0%} at most."
    )
    print(f"- Host memory: {2 * TB // 10**12} TB.\n")
    print(
        "| model | machine | tokens | step | tokens/s | without | times | best other system, times | gap | above machine bound |",
        end="",
    )
    print(" blocks of which that is so; what binds |")
    print("|---" * 3 + "|---:" * 7 + "|---|")
    print("\n".join(row(cell, of) for cell, of in rows))


if __name__ == "__main__":
    main()
