"""Mutation score of the checker: the share of broken plans that it rejects, and its time on correct ones.

Prints a page in markdown: `python -m benchmarks.check_mutants` from the root of the repository, some minutes.
"""

import time
from statistics import median
from typing import Any

from benchmarks.common import without_arguments
from penstock.planner.check.check import check
from tests.edits import small
from tests.mutants import SAMPLES, tally

MOST_MUTANTS = 400  # mutants per mutation and plan
N_RUNS = 7
PLANS: tuple[dict[str, Any], ...] = (
    {"n_layers": 24, "n_micro_batches": 1},
    {"n_layers": 80, "n_micro_batches": 8, "accumulation_group": 8},
    {"n_layers": 80, "n_micro_batches": 8},
    {"n_layers": 80, "n_micro_batches": 64, "accumulation_group": 8},
    {"n_layers": 120, "n_micro_batches": 64, "accumulation_group": 64},
    {"n_layers": 120, "n_micro_batches": 64, "accumulation_group": 64, "boundary_stride": 11},
    {"n_layers": 120, "n_micro_batches": 64, "accumulation_group": 64, "speculate_blocks": tuple(range(122))},
)


def main() -> None:
    """Test mutants of every sample plan, then time the check on growing plans."""
    without_arguments(__doc__)
    results = tally(MOST_MUTANTS)
    print(f"Mutants of {len(SAMPLES)} plans, of each mutation and plan at most {MOST_MUTANTS}:\n\n{results.table()}\n")
    for problem in results.condemned:
        print(f"- WRONG: {problem}")
    print(f"\nTime of one check, median of {N_RUNS} (spread: slowest over fastest):\n")
    print("| layers | micro-batches, group | features | ops | check_s | spread |\n|---:|---|---|---:|---:|---:|")
    for choices in PLANS:
        plan = small(**{"tied": True, "prefetch_depth": 2, "gradient_slots": 2} | choices)
        times_s = []
        for _ in range(N_RUNS):
            start_s = time.perf_counter()
            check(plan)
            times_s.append(time.perf_counter() - start_s)
        sizes = f"{plan.workload.n_layers} | {plan.semantics.n_micro_batches}, {plan.policy.accumulation_group}"
        features = ", ".join({*choices} & {"boundary_stride", "speculate_blocks"}) or "nothing"
        print(f"| {sizes} | {features} | {len(plan.ops)} | {median(times_s):.3f} | {max(times_s) / min(times_s):.2f} |")


if __name__ == "__main__":
    main()
