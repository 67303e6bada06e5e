"""Grid of models, machines and step sizes: optimality gaps, speed-ups over other schedules, search times.

    python benchmarks/grid.py > docs/benchmarks/grid_DATE.md

Six machines, five models, three step sizes, sequences of 4096 tokens, 2 TB of host memory. Each core does one cell at a time, five
minutes of one core in total. A cell is a search like `penstock plan`, and a check of its plan. Speed-ups are over the schedules of
other systems under the same semantics and costs (docs/design.md); published times of those systems are in docs/accuracy.md.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

from benchmarks.any_memory import with_any_memory
from benchmarks.common import without_arguments
from penstock.api import check
from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import read_model, supported_attention
from penstock.planner.search.micro_batch import SIZES, sizes_of
from penstock.planner.search.result import SearchResult
from penstock.planner.search.search import search
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import PlanFile, Semantics
from penstock.runtime.units import TB, show_count, show_seconds

MACHINES = ("h200-pcie5", "gh200", "h100-sxm", "rtx4090-server", "rtx4090-desktop", "gb10")
MODELS = ("qwen3-8b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b", "gpt-oss-120b")
TOKENS_PER_STEP = (8192, 65536, 262144)
SEQ_LEN = 4096
OTHER_SYSTEMS = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload")


@dataclass(frozen=True, slots=True)
class Cell:
    """A machine, a model, a step size, and the search result, or the reason without one."""

    model: str
    machine: str
    n_tokens: int
    answer: SearchResult | str
    search_s: float
    check_s: float

    @property
    def gap_fraction(self) -> float | None:
        return None if isinstance(self.answer, str) else self.answer.certificate.gap_fraction

    def speed_up(self, name: str) -> float | None:
        """Return the speed-up over another system's schedule, or None if that does not fit."""
        if isinstance(self.answer, str) or "step_s" not in self.answer.baselines[name]:
            return None
        return float(self.answer.baselines[name]["step_s"]) / self.answer.step_s

    def row(self) -> str:
        head = f"| {self.model} | {self.machine} | {show_count(self.n_tokens)} |"
        if isinstance(self.answer, str):
            return f"{head} does not fit: {self.answer} |" + " |" * 11
        a, prediction, c = self.answer, self.answer.claim.prediction, self.answer.certificate
        ups = (self.speed_up(name) for name in OTHER_SYSTEMS)
        cells = (
            str(a.plan.semantics.micro_batch),
            f"{show_seconds(a.step_s)} ({show_seconds(prediction.p10_step_s)} to {show_seconds(prediction.p90_step_s)})",
            f"{self.n_tokens / a.step_s:,.0f}",
            f"{c.gap_fraction:.1%}",
            f"{a.step_s / c.machine_bound_s - 1:.0%}",
            c.binding,
            *("-" if up is None else f"{up:.2f}" for up in ups),
            f"{self.search_s:.1f}",
            f"{self.check_s:.2f}",
        )
        return f"{head} {' | '.join(cells)} |"


def searched(name: str, machine: str, n_tokens: int) -> Cell:
    """Search one cell of the grid."""
    model, profile = read_model(name), with_any_memory(read_profile(machine), None, 2 * TB)
    start_s = time.process_time()
    semantics = Semantics(SEQ_LEN, n_tokens // SEQ_LEN, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
    sizes = sizes_of(model, with_kernels(model, semantics, profile), profile)
    try:
        answer: SearchResult | str = search(model, sizes, profile, free=SIZES)
    except DoesNotFitError as error:
        answer = str(error).split("; ")[0].split(": ", 1)[1]
    search_s = time.process_time() - start_s
    check_s = 0.0
    if not isinstance(answer, str):
        start_s = time.process_time()
        check(PlanFile(answer.plan, answer.claim.to_json()))
        check_s = time.process_time() - start_s
    return Cell(name, machine, n_tokens, answer, search_s, check_s)


def cells() -> Iterator[Cell]:
    """Yield the cells of the grid in order, with one process per core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        yield from processes.map(searched, *zip(*product(MODELS, MACHINES, TOKENS_PER_STEP), strict=True))


def summary(results: list[Cell]) -> Iterator[str]:
    """Yield the summary figures."""
    gaps = sorted(cell.gap_fraction for cell in results if cell.gap_fraction is not None)
    wide = sum(gap > 0.05 for gap in gaps)
    yield f"- {len(gaps)} of {len(results)} cells fit."
    yield f"- Policy gap: median {statistics.median(gaps):.1%}, worst {gaps[-1]:.1%}; above 5 %: {wide} cells."
    for name in OTHER_SYSTEMS:
        ups = sorted(up for cell in results if (up := cell.speed_up(name)) is not None)
        if ups:
            spread = f"from {ups[0]:.2f} to {ups[-1]:.2f}, where it fits ({len(ups)} cells)"
            yield f"- Over `{name}`: median {statistics.median(ups):.2f}, {spread}."
    slower = sum((cell.speed_up(name) or 1.0) < 1.0 for cell in results for name in OTHER_SYSTEMS)
    yield f"- Cells in which another system's schedule is faster: {slower}."
    searches, checks = sorted(cell.search_s for cell in results), sorted(cell.check_s for cell in results)
    yield f"- Search: median {statistics.median(searches):.1f} s, longest {searches[-1]:.1f} s. Check: longest {checks[-1]:.2f} s."


NOTES = """
Gap: to the bound of every policy in the space. Above: excess of the step over the machine bound, which excludes recompute.
`search` and `check` are seconds on one core.
"""


def main() -> None:
    without_arguments(__doc__)
    results = []
    for cell in cells():
        results.append(cell)
        print(cell.row(), file=sys.stderr)
    print("# How near to optimal are the plans, and how much faster than other schedules?\n")
    print(__doc__.split("\n\n", 2)[2])
    print("\n".join(summary(results)))
    print(NOTES)
    head = "| model | machine | tokens | micro-batch | step (P10 to P90) | tokens/s | gap | above | binding"
    print(f"{head} | {' | '.join(OTHER_SYSTEMS)} | search | check |")
    print("|---|---|---" + "|---:" * 5 + "|---" + "|---:" * 6 + "|")
    print("\n".join(cell.row() for cell in results))


if __name__ == "__main__":
    main()
