"""How many wrong plans does the checker refuse, and how long does it take over a right one?

Prints a page in markdown: `python -m benchmarks.check_mutants` from the root of the repository, about two minutes.
"""

import time
from statistics import median
from typing import Any

from planner.check.check import check
from planner.lower.lower import lower
from runtime.plan import Policy, Semantics, Update
from tests.mutants import sample_plans, table, tally
from tests.strategies import MODEL, PROFILE, small_workload

N_RUNS = 7
PLANS: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (24, 1, 1, {}),
    (80, 8, 8, {}),
    (80, 8, 1, {}),
    (80, 64, 8, {}),
    (120, 64, 64, {}),
    (120, 64, 64, {"boundary_stride": 11}),
    (120, 64, 64, {"speculate_blocks": tuple(range(122))}),
)


def main() -> None:
    """Every mutant of every sample plan, then the time of the check on growing plans."""
    counts, survivors, condemned = tally()
    print(f"Mutants of {len(sample_plans())} plans, all there are:\n\n{table(counts)}\n")
    print("Survivors, all held harmless by the oracle, by mutation and by the kinds of op concerned:\n")
    for family, n in sorted(survivors.items(), key=lambda item: (-item[1], item[0])):
        print(f"- {n} x {family}")
    for what in condemned:
        print(f"- WRONG: {what}")
    print(f"\nTime of one check, median of {N_RUNS} (spread: slowest over fastest):\n")
    print("| layers | micro-batches, group | besides | ops | check_s | spread |\n|---:|---|---|---:|---:|---:|")
    for n_layers, n_micro_batches, group, besides in PLANS:
        semantics = Semantics(seq_len=4, batch_size=n_micro_batches, micro_batch=1)
        policy = Policy(2, 2, 0, group, update=Update.DEFERRED, **besides)
        plan = lower(MODEL, small_workload(n_layers, tied=True), semantics, policy, PROFILE)
        times_s = []
        for _ in range(N_RUNS):
            start_s = time.perf_counter()
            check(plan)
            times_s.append(time.perf_counter() - start_s)
        spread = max(times_s) / min(times_s)
        knobs = ", ".join(besides) or "nothing"
        print(f"| {n_layers} | {n_micro_batches}, {group} | {knobs} | {len(plan.ops)} | {median(times_s):.3f} | {spread:.2f} |")


if __name__ == "__main__":
    main()
