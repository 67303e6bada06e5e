"""Integer programs over affine quantities, solved by HiGHS (scipy)."""

import ctypes
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from .facets import Array

OPTIMAL, INFEASIBLE = 0, 2  # scipy's status codes
MOST_NODES = 2000  # limit on the branch-and-bound tree of HiGHS; a time limit would make results depend on the machine
# Primal heuristics of HiGHS that take longer than the tree search of these small programs (half of a policy search). Versions
# without one of these options warn and run it.
FIRST_TRIED = ("feasibility_jump", "rens", "rins", "root_reduced_cost")
OPTIONS = {"mip_rel_gap": 1e-4, "node_limit": MOST_NODES} | {f"mip_heuristic_run_{name}": False for name in FIRST_TRIED}


@dataclass(slots=True)
class Program:
    """Mixed-integer program: minimize cost @ x subject to rows @ x <= limits."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    # Sparse rows: column indices, coefficients, and the end of each row
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])

    def variable(self, low: float, high: float, integer: bool = True, cost: float = 0.0) -> int:
        """Add a variable and return its index."""
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def at_most(self, row: Mapping[int, float], limit: float) -> None:
        """Add the constraint row @ x <= limit."""
        self.columns += row
        self.values += row.values()
        self.ends.append(len(self.columns))
        self.limits.append(limit)

    def at_most_each(self, rows: Array, limits: Array) -> None:
        """Add rows @ x <= limits for a dense matrix of rows."""
        (places,) = rows.ravel().nonzero()  # faster than in two dimensions
        row_index, columns = np.divmod(places, rows.shape[1])
        self.ends += (len(self.columns) + np.searchsorted(row_index, np.arange(1, len(rows) + 1))).tolist()
        self.columns += columns.tolist()
        self.values += rows.ravel()[places].tolist()
        self.limits += limits.tolist()

    @property
    def matrix(self) -> csr_array:
        return csr_array((self.values, self.columns, self.ends), (len(self.limits), len(self.cost)))

    def solve(self, integers: bool = True) -> tuple[float, list[float]] | None:
        """Return (dual bound, best solution), or None if infeasible. The solution has every variable at its lower limit if none was
        found. With `integers=False`, solve the linear relaxation, a lower bound."""
        result = self._solved(integers, presolve=False)  # presolve would double the time for a linear program of this size
        if not integers and result.status not in (OPTIMAL, INFEASIBLE):  # without presolve, programs far from feasible may fail
            result = self._solved(integers, presolve=True)
        if result.status == INFEASIBLE:
            return None
        bound = result.mip_dual_bound if integers and any(self.integer) else result.fun  # for a linear program both are equal
        if bound is None and integers:  # numerical failure of the solver; the linear bound is valid, too
            linear = self.solve(integers=False)
            return None if linear is None else (linear[0], self.low)
        assert bound is not None, f"no bound from the solver: {result.message}"
        return float(bound), self.low if result.x is None else [float(x) for x in result.x]

    def _solved(self, integers: bool, presolve: bool) -> Any:
        with _nothing_printed(), warnings.catch_warnings(action="ignore"):
            return milp(
                np.array(self.cost),
                constraints=LinearConstraint(self.matrix, -np.inf, np.array(self.limits)),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                integrality=np.array(self.integer) * integers,
                options=OPTIONS if integers else {"presolve": presolve},
            )


class Rows:
    """Affine functions of a program's variables, in units of `scale`. The maximum of several functions is represented by a new
    variable with a constraint for each."""

    def __init__(self, program: Program, width: int, scale: float) -> None:
        """`width`: 1 for the constant term plus the final number of variables of the program."""
        self.program, self.width, self.scale = program, width, scale

    def variable(self, number: int) -> Array:
        """The variable as an affine function."""
        row = np.zeros(self.width)
        row[1 + number] = 1.0
        return row

    def at_least(self, numbers: int | Sequence[int], quantities: Array) -> None:
        """Constrain variable >= quantity for each row. `numbers`: one variable for all rows, or one per row."""
        rows = quantities[:, 1:] / self.scale
        rows[np.arange(len(rows)), numbers] -= 1.0
        self.program.at_most_each(rows, -quantities[:, 0] / self.scale)

    def longest(self, quantities: Array | Sequence[Array]) -> Array:
        number, row = self.program.variable(0, inf, integer=False), np.zeros(self.width)
        self.at_least(number, np.array(quantities))
        row[1 + number] = self.scale
        return row

    def positive(self, quantities: Array) -> Array:
        """Elementwise max(0, row). Rows without positive coefficients are at most 0, as variables are not negative."""
        result = np.zeros_like(quantities)
        is_constant = ~quantities[:, 1:].any(axis=1)
        result[is_constant, 0] = np.maximum(0.0, quantities[is_constant, 0])
        variable_rows = np.flatnonzero(~is_constant & (quantities > 0).any(axis=1))
        numbers = [self.program.variable(0, inf, integer=False) for _ in variable_rows]
        result[variable_rows, 1 + np.array(numbers, dtype=np.int64)] = self.scale
        self.at_least(numbers, quantities[variable_rows])
        return result


@cache
def _flush() -> Any:
    return ctypes.CDLL(None).fflush  # looked up in every loaded library


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Redirect standard output to /dev/null: HiGHS prints lines even with `disp` off, which would corrupt `--json` output."""
    try:
        stdout = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        _flush()(None)  # flush C buffers before the descriptor is restored
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
