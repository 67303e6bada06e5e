"""Random attack on the bounds: thousands of sampled policies against every lower bound, with the tightest margins.

Prints a page in markdown: `python -m benchmarks.adversary` from the root of the repository, some twenty minutes of a core; `--cases
500` for fewer. A case is a policy in a cell (model, machine, memory, step) with all nontrivial bounds on it. Two of three cells are
hard ones (`hard_cells.py`).
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from unittest.mock import patch

import click

from penstock.planner.search.search import search
from penstock.runtime.plan import Policy, Update
from tests.adversary import Cell, Held, cell, held, hill_climb, neighbour, relaxation_of, start_of, with_state_on_device

from .hard_cells import hard_cell, kinds_of, repeats

FAULT_FRACTION = 0.01  # a bound raised by this fraction should be caught
N_TRIES = 8  # of a climb
N_STAYING = 2  # sampled policies with state on the device
DRAWN_CELLS = 3  # one cell in three is sampled uniformly, not hard
SEARCHED_CELLS = 10  # one cell in ten is searched, too
N_NEIGHBOURS = 100
LEAST_GAIN_FRACTION = 0.005  # a climb should not improve a searched plan by more
MOST_SEARCHED_OPS = 800  # in a plan, for attacks on the search


@dataclass(slots=True)
class Row:
    """Tally of one bound in one situation."""

    n_cases: int = 0
    n_near: int = 0  # steps close enough to catch a raised bound
    tightest_fraction: float = float("inf")
    broken: list[str] = field(default_factory=list)

    def add(self, result: Held, number: int) -> None:
        if result.bound_s == 0.0:
            return  # trivial bound
        self.n_cases += 1
        self.n_near += result.slack_fraction < FAULT_FRACTION
        self.tightest_fraction = min(self.tightest_fraction, result.slack_fraction)
        if result.is_broken:
            self.broken.append(f"cell {number}: {result.bound_s} above {result.step_s}, {result.policy}")


@dataclass(slots=True)
class Tally:
    """Results of several cells."""

    n_cases: int = 0
    n_empty: int = 0  # cells without a policy that fits
    rows: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    kinds: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))  # by what is hard
    n_of_kind: Counter[str] = field(default_factory=Counter)  # number of cases
    gaps: list[float] = field(default_factory=list)  # of certificates
    gains: list[float] = field(default_factory=list)  # of a climb from the searched plan

    def add(self, tally: "Tally") -> None:
        self.n_cases += tally.n_cases
        self.n_empty += tally.n_empty
        self.gaps += tally.gaps
        self.gains += tally.gains
        self.n_of_kind += tally.n_of_kind
        for rows, other_rows in ((self.rows, tally.rows), (self.kinds, tally.kinds)):
            for name, row in other_rows.items():
                mine = rows[name]
                mine.n_cases, mine.n_near = mine.n_cases + row.n_cases, mine.n_near + row.n_near
                mine.tightest_fraction = min(mine.tightest_fraction, row.tightest_fraction)
                mine.broken += row.broken


def attacked(number: int) -> Tally:
    """Attack one cell: compare the policies of a climb with their bounds, and in some cells the search with a climb."""
    target, rng, tally = cell(number) if number % DRAWN_CELLS == 0 else hard_cell(number), random.Random(~number), Tally()
    start = start_of(rng, target)
    if start is None:
        tally.n_empty = 1
        return tally
    kinds, relaxation = kinds_of(target), relaxation_of(target)
    fastest = hill_climb(rng, target, start, N_TRIES)[0]
    staying = with_state_on_device(rng, target, N_STAYING)
    policies = dict.fromkeys((start, fastest, _near(rng, target, start), _near(rng, target, fastest), *staying))
    for policy in (policy for policy in policies if target.needs(policy).fits):
        results = held(target, policy, relaxation)
        tally.n_cases += bool(results)
        groups = "one group" if policy.accumulation_group == target.semantics.n_micro_batches else "groups"
        state = ", state on the device" if policy.device_blocks else ""
        of_case = [*kinds, *(["plan with `repeat`"] if repeats(target, policy) else [])] if results else []
        tally.n_of_kind.update(of_case)
        for one in results:
            for row in (tally.rows[f"{one.name} | {policy.update}, {groups}{state}"], *(tally.kinds[kind] for kind in of_case)):
                row.add(one, number)
    if number % SEARCHED_CELLS == 0 and 8 * target.semantics.n_micro_batches * (target.workload.n_layers + 2) <= MOST_SEARCHED_OPS:
        _attack_search(target, rng, tally)
    return tally


def _near(rng: random.Random, target: Cell, policy: Policy) -> Policy:
    """Return a neighbour, one that fits if possible."""
    near = (neighbour(rng, target, policy) for _ in range(N_TRIES))
    return next((candidate for candidate in near if target.needs(candidate).fits), policy)


def _attack_search(case: Cell, rng: random.Random, tally: Tally) -> None:
    with patch(
        "penstock.planner.search.result.resident_baseline", lambda evaluator, may_split: None
    ):  # a sampled model has no other micro-batch
        answer = search(case.model, [(case.semantics, case.workload)], case.profile, clipped_fraction=case.clipped_fraction)
    policy, fastest_s = hill_climb(rng, case, answer.plan.policy, N_NEIGHBOURS)
    bound_s = answer.certificate.policy_bound_s
    tally.gaps.append(answer.certificate.gap_fraction)
    tally.gains.append(max(0.0, 1 - fastest_s / answer.step_s))
    tally.rows[f"certificate of a search | {Update.DEFERRED}"].add(Held("certificate", bound_s, fastest_s, policy), case.number)


def page(tally: Tally, n_cells: int) -> Iterator[str]:
    """Yield the tally in markdown."""
    broken = [message for row in tally.rows.values() for message in row.broken]
    tight = [row for row in tally.rows.values() if row.n_near]
    yield f"{n_cells} cells, {tally.n_empty} without a fitting policy; {tally.n_cases} cases; {len(broken)} below a bound.\n"
    yield from (f"- WRONG: {message}" for message in broken)
    yield f"{len(tight)} of {len(tally.rows)} planted faults are caught: a bound, in one situation, {FAULT_FRACTION:.0%} higher.\n"
    yield "| hard feature | cases | bounds | below | a fault is caught by | nearest step above |\n|---|---:|---:|---:|---:|---:|"
    for name, row in sorted(tally.kinds.items()):
        counts = f"{tally.n_of_kind[name]} | {row.n_cases} | {len(row.broken)} | {row.n_near}"
        yield f"| {name} | {counts} | {row.tightest_fraction:.2%} |"
    yield "\n| bound | situation | cases | a fault is caught by | nearest step above |\n|---|---|---:|---:|---:|"
    for name, row in sorted(tally.rows.items()):
        yield f"| {name} | {row.n_cases} | {row.n_near} | {row.tightest_fraction:.2%} |"
    if tally.gaps:
        gaps, gains = sorted(tally.gaps), sorted(tally.gains)
        n_larger = sum(gain > LEAST_GAIN_FRACTION for gain in gains)
        yield f"\n{len(gaps)} searches: gap {gaps[len(gaps) // 2]:.2%} in the median, {gaps[-1]:.2%} at most."
        yield f"A climb over {N_NEIGHBOURS} neighbours gains {gains[len(gains) // 2]:.2%} in the median, {gains[-1]:.2%} at most,"
        yield f"and above {LEAST_GAIN_FRACTION:.1%} in {n_larger}."


@click.command()
@click.option("--cases", "n_cases", default=5000, show_default=True)
@click.option("--first", default=10_000, show_default=True, help="the number of the first cell")
@click.option("--workers", default=2, show_default=True)
def main(n_cases: int, first: int, workers: int) -> None:
    """Attack until `n_cases` are done."""
    tally, number = Tally(), first
    with ProcessPoolExecutor(workers) as pool:
        while tally.n_cases < n_cases:
            for result in pool.map(attacked, range(number, number + 16 * workers)):
                tally.add(result)
            number += 16 * workers
    for line in page(tally, number - first):
        print(line)


if __name__ == "__main__":
    main()
