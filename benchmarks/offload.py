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
class Gain:
    """A cell's plan, and the best plan without the choice."""

    step_s: float
    without_s: float | None
    other_s: float | None  # fastest schedule of another system
    gap_fraction: float
    above_machine_fraction: float  # step time above the machine bound
    chosen: str
    binding: str


def gain_of(knob: str, cell: Cell) -> Gain | None:
    """Run both searches. Return None if nothing fits."""
    profile = with_any_memory(read_profile(cell.machine), None, cell.host_bytes)
    try:
        planned = penstock.plan(cell.model, profile, seq_len=cell.seq_len, batch_size=cell.n_tokens // cell.seq_len)
    except DoesNotFitError:
        return None
    answer, policy = planned.answer, planned.plan.policy
    baselines = [entry["step_s"] for entry in answer.baselines.values() if "step_s" in entry]
    counts: dict[str, int] = {saved: sum(policy.saved(b) is saved for b in policy.offload_blocks) for saved in Saved}
    if knob == "device_blocks":
        counts = {"state": len(policy.device_blocks)}
    chosen = ", ".join(f"{name} of {n}" for name, n in counts.items() if n)
    proof = answer.certificate
    excess = answer.step_s / proof.machine_bound_s - 1
    return Gain(answer.step_s, step_s(cell, knob), min(baselines, default=None), proof.gap_fraction, excess, chosen, proof.binding)


def row(cell: Cell, gain: Gain | None) -> str:
    head = f"| {cell.model} | {cell.machine} | {cell.n_tokens:,} of {cell.seq_len:,} |"
    if gain is None:
        return f"{head} does not fit" + " |" * 8
    base = "does not fit | " if gain.without_s is None else f"{show_seconds(gain.without_s)} | {gain.without_s / gain.step_s:.2f}"
    baseline = "does not fit" if gain.other_s is None else f"{gain.other_s / gain.step_s:.2f}"
    tokens_per_s = f"{cell.n_tokens / gain.step_s:,.0f}"
    return (
        f"{head} {show_seconds(gain.step_s)} | {tokens_per_s} | {base} | {baseline} | {gain.gap_fraction:.1%} | "
        f"{gain.above_machine_fraction:.0%} | {gain.chosen or 'nothing'}; {gain.binding} |"
    )


def main() -> None:
    if unknown := [argument for argument in sys.argv[1:] if argument != "state" and not argument.isdigit()]:
        sys.exit(f"{unknown[0]!r}: arguments are `state`, and a number of processes")
    knob = "device_blocks" if "state" in sys.argv[1:] else "offload_blocks"
    grid = [Cell(m, machine, SEQ_LEN, n) for m, machine, n in product(MODELS, MACHINES, TOKENS_PER_STEP)]
    cells = list(SMALL_STEPS) if knob == "device_blocks" else list(dict.fromkeys([*PUBLISHED, *grid]))
    n_processes = next((int(argument) for argument in sys.argv[1:] if argument.isdigit()), 2)
    rows: list[tuple[Cell, Gain | None]] = []
    with ProcessPoolExecutor(n_processes) as processes:
        for cell, gain in zip(cells, processes.map(partial(gain_of, knob), cells), strict=True):
            rows.append((cell, gain))
            print(row(cell, gain), file=sys.stderr, flush=True)
    place = "optimizer state on the device" if knob == "device_blocks" else "activation offload"
    print(f"# Gain of {place}\n")
    print((__doc__ or "").split("\n\n", 2)[2])
    faster = [gain.without_s / gain.step_s for _, gain in rows if gain is not None and gain.without_s is not None]
    gaps = [gain.gap_fraction for _, gain in rows if gain is not None]
    extra = [gain.above_machine_fraction for _, gain in rows if gain is not None]
    print(
        f"- {sum(f > 1.01 for f in faster)} of {len(faster)} cells are faster by more than 1 %, the fastest {max(faster):.2f} "
        f"times; median {statistics.median(faster):.2f}, least {min(faster):.3f}."
    )
    print(f"- Gap to the bound of all policies: median {statistics.median(gaps):.1%}, worst {max(gaps):.1%}.")
    print(f"- Steps exceed the machine bound by {statistics.median(extra):.0%} in the median, {max(extra):.0%} at most.")
    print(f"- Host memory: {2 * TB // 10**12} TB.\n")
    print(
        "| model | machine | tokens | step | tokens/s | without | times | best other system, times | gap | above machine bound |",
        end="",
    )
    print(" affected blocks; binding resource |")
    print("|---" * 3 + "|---:" * 7 + "|---|")
    print("\n".join(row(cell, gain) for cell, gain in rows))


if __name__ == "__main__":
    main()
