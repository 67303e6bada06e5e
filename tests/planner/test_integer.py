"""Integer programs: the optimum over all points, and suppressed solver output."""

import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import OptimizeResult, milp

from penstock.planner.bounds.integer import Program
from tests.tour import ROOT

NOISY = """
import ctypes, os
from penstock.planner.bounds import integer
solve = integer.milp
def noisy(*words, **options):
    ctypes.CDLL(None).puts(b"tmpSolver.run();")
    os.write(1, b"of the solver\\n")
    return solve(*words, **options)
integer.milp = noisy
print("before")
p = integer.Program()
p.variable(0, 3, cost=-1.0)
print(p.solve()[0])
"""


@given(st.data())
def test_the_bound_is_the_best_of_all_points(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3))
    integers = st.integers(-4, 4).map(float)
    program = Program()
    for _ in range(n):
        program.variable(0, 3, cost=data.draw(integers))
    for _ in range(data.draw(st.integers(0, 3))):
        program.at_most({i: data.draw(integers) for i in range(n)}, data.draw(integers))
    points = [point for point in product(range(4), repeat=n) if np.all(program.matrix @ point <= program.limits)]
    costs = (float(np.dot(program.cost, point)) for point in points)
    best, solution = min(costs, default=None), program.solve()
    assert (solution is None) == (best is None)
    if solution is not None and best is not None:
        assert solution[0] == pytest.approx(best, abs=1e-6)


def test_a_solver_that_gives_up_leaves_the_linear_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear program is solved again, with presolve."""

    def giving_up(*arguments: Any, integrality: Any, options: dict[str, Any], **keywords: Any) -> Any:
        lost = OptimizeResult(status=4, message="Solve error", mip_dual_bound=None, fun=None, x=None)
        is_lost = any(integrality) or not options["presolve"]
        return lost if is_lost else milp(*arguments, integrality=integrality, options=options, **keywords)

    program = Program()
    program.variable(0, 3, cost=-1.0)
    program.at_most({0: 2.0}, 5.0)
    assert program.solve() == (-2.0, [2.0])
    monkeypatch.setattr("penstock.planner.bounds.integer.milp", giving_up)
    assert program.solve() == (-2.5, [0.0])
    assert program.solve(integers=False) == (-2.5, [2.5])


def test_the_solvers_output_is_kept_out_of_ours() -> None:
    process = subprocess.run([sys.executable, "-c", NOISY], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "before\n-3.0\n"
