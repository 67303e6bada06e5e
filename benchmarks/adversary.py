"""Random attack on the bounds: thousands of drawn policies against every lower bound, and how near they come.

Prints a page in markdown: `python -m benchmarks.adversary` from the root of the repository, some twenty minutes of a core;
`--cases 500` for fewer. A case is a policy in a cell (model, machine, memory, step) with all bounds that say something of it. Two
cells of three are hard ones (`hard_cells.py`).
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from unittest.mock import patch

import click

from penstock.planner.predict.resident import resident
from penstock.planner.search.search import search
from penstock.runtime.plan import Policy, Update
from tests.adversary import Cell, Held, cell, held, hill_climb, neighbour, relaxation_of, start_of, with_state_on_device

from .hard_cells import hard_cell, kinds_of, repeats

FAULT_FRACTION = 0.01  # a bound that is higher by that is to be caught
N_TRIES = 8  # of a climb
N_STAYING = 2  # policies drawn that keep state on the device
DRAWN_CELLS = 3  # one cell in three is drawn without regard to what is hard
SEARCHED_CELLS = 10  # one cell in ten is searched, too
N_NEIGHBOURS = 100
LEAST_GAIN_FRACTION = 0.005  # by which a climb is not to improve what a search found
MOST_SEARCHED_OPS = 800  # of a plan, where the search is attacked


@dataclass(slots=True)
class Row:
    """One bound in one situation."""

    n_cases: int = 0
    n_near: int = 0  # steps so near that the bound, made higher, would be caught
    tightest_fraction: float = float("inf")
    broken: list[str] = field(default_factory=list)

    def add(self, of: Held, number: int) -> None:
        if of.bound_s == 0.0:
            return  # it says nothing there
        self.n_cases += 1
        self.n_near += of.slack_fraction < FAULT_FRACTION
        self.tightest_fraction = min(self.tightest_fraction, of.slack_fraction)
        if of.is_broken:
            self.broken.append(f"cell {number}: {of.bound_s} above {of.step_s}, {of.policy}")


@dataclass(slots=True)
class Tally:
    """What became of some cells."""

    n_cases: int = 0
    n_empty: int = 0  # cells in which nothing fits
    rows: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    kinds: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))  # of what is hard
    n_of_kind: Counter[str] = field(default_factory=Counter)  # cases
    gaps: list[float] = field(default_factory=list)  # of certificates
    gains: list[float] = field(default_factory=list)  # of a climb from what the search found

    def add(self, other: "Tally") -> None:
        self.n_cases += other.n_cases
        self.n_empty += other.n_empty
        self.gaps += other.gaps
        self.gains += other.gains
        self.n_of_kind += other.n_of_kind
        for rows, others in ((self.rows, other.rows), (self.kinds, other.kinds)):
            for name, row in others.items():
                mine = rows[name]
                mine.n_cases, mine.n_near = mine.n_cases + row.n_cases, mine.n_near + row.n_near
                mine.tightest_fraction = min(mine.tightest_fraction, row.tightest_fraction)
                mine.broken += row.broken


def attacked(number: int) -> Tally:
    """One cell: policies of a climb against their bounds; of some cells, the search against a climb."""
    of, rng, tally = cell(number) if number % DRAWN_CELLS == 0 else hard_cell(number), random.Random(~number), Tally()
    start = start_of(rng, of)
    if start is None:
        tally.n_empty = 1
        return tally
    kinds, relaxation = kinds_of(of), relaxation_of(of)
    fastest = hill_climb(rng, of, start, N_TRIES)[0]
    staying = with_state_on_device(rng, of, N_STAYING)
    policies = dict.fromkeys((start, fastest, _near(rng, of, start), _near(rng, of, fastest), *staying))
    for policy in (policy for policy in policies if of.needs(policy).fits):
        found = held(of, policy, relaxation)
        tally.n_cases += bool(found)
        groups = "one group" if policy.accumulation_group == of.semantics.n_micro_batches else "groups"
        kept = ", state on the device" if policy.device_blocks else ""
        of_case = [*kinds, *(["plan with `repeat`"] if repeats(of, policy) else [])] if found else []
        tally.n_of_kind.update(of_case)
        for one in found:
            for row in (tally.rows[f"{one.name} | {policy.update}, {groups}{kept}"], *(tally.kinds[kind] for kind in of_case)):
                row.add(one, number)
    if number % SEARCHED_CELLS == 0 and 8 * of.semantics.n_micro_batches * (of.workload.n_layers + 2) <= MOST_SEARCHED_OPS:
        _attack_search(of, rng, tally)
    return tally


def _near(rng: random.Random, of: Cell, policy: Policy) -> Policy:
    """A neighbour, one that fits if any of those drawn does."""
    near = (neighbour(rng, of, policy) for _ in range(N_TRIES))
    return next((other for other in near if of.needs(other).fits), policy)


def _attack_search(of: Cell, rng: random.Random, tally: Tally) -> None:
    with patch("penstock.planner.search.answer.resident_in_parts", resident):  # a drawn model has no other micro-batch
        answer = search(of.model, [(of.semantics, of.workload)], of.profile, clipped_fraction=of.clipped_fraction)
    policy, fastest_s = hill_climb(rng, of, answer.plan.policy, N_NEIGHBOURS)
    bound_s = answer.certificate.policy_bound_s
    tally.gaps.append(answer.certificate.gap_fraction)
    tally.gains.append(max(0.0, 1 - fastest_s / answer.step_s))
    tally.rows[f"certificate of a search | {Update.DEFERRED}"].add(Held("certificate", bound_s, fastest_s, policy), of.number)


def page(tally: Tally, n_cells: int) -> Iterator[str]:
    """The tally in markdown."""
    broken = [said for row in tally.rows.values() for said in row.broken]
    tight = [row for row in tally.rows.values() if row.n_near]
    yield f"{n_cells} cells, in {tally.n_empty} of which nothing drawn fits; {tally.n_cases} cases; {len(broken)} below a bound.\n"
    yield from (f"- WRONG: {said}" for said in broken)
    yield f"{len(tight)} of {len(tally.rows)} planted faults are caught: a bound, in one situation, {FAULT_FRACTION:.0%} higher.\n"
    yield "| what is hard | cases | bounds | below | a fault is caught by | nearest step above |\n|---|---:|---:|---:|---:|---:|"
    for name, row in sorted(tally.kinds.items()):
        counts = f"{tally.n_of_kind[name]} | {row.n_cases} | {len(row.broken)} | {row.n_near}"
        yield f"| {name} | {counts} | {row.tightest_fraction:.2%} |"
    yield "\n| bound | situation | cases | a fault is caught by | nearest step above |\n|---|---|---:|---:|---:|"
    for name, row in sorted(tally.rows.items()):
        yield f"| {name} | {row.n_cases} | {row.n_near} | {row.tightest_fraction:.2%} |"
    if tally.gaps:
        gaps, gains = sorted(tally.gaps), sorted(tally.gains)
        more = sum(gain > LEAST_GAIN_FRACTION for gain in gains)
        yield f"\n{len(gaps)} searches: gap {gaps[len(gaps) // 2]:.2%} in the median, {gaps[-1]:.2%} at most."
        yield f"A climb over {N_NEIGHBOURS} neighbours gains {gains[len(gains) // 2]:.2%} in the median, {gains[-1]:.2%} at most,"
        yield f"and above {LEAST_GAIN_FRACTION:.1%} in {more}."


@click.command()
@click.option("--cases", "n_cases", default=5000, show_default=True)
@click.option("--first", default=10_000, show_default=True, help="the number of the first cell")
@click.option("--workers", default=2, show_default=True)
def main(n_cases: int, first: int, workers: int) -> None:
    """Attack until there are `n_cases`."""
    tally, number = Tally(), first
    with ProcessPoolExecutor(workers) as pool:
        while tally.n_cases < n_cases:
            for found in pool.map(attacked, range(number, number + 16 * workers)):
                tally.add(found)
            number += 16 * workers
    for line in page(tally, number - first):
        print(line)


if __name__ == "__main__":
    main()
