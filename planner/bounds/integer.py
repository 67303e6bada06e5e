"""Integer programs over affine quantities, solved by HiGHS (scipy)."""

import ctypes
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from .facets import Array

OPTIMAL, INFEASIBLE = 0, 2  # of scipy's statuses
MOST_NODES = 2000  # of the solver's tree: a limit in seconds would make the answer depend on the machine
# What HiGHS tries at first for good solutions takes longer than its tree of these small programs: half of a search. Versions that
# do not know one of these warn, and try it.
FIRST_TRIED = ("feasibility_jump", "rens", "rins", "root_reduced_cost")
OPTIONS = {"mip_rel_gap": 1e-4, "node_limit": MOST_NODES} | {f"mip_heuristic_run_{name}": False for name in FIRST_TRIED}


@dataclass(slots=True)
class Program:
    """minimize cost @ x, rows @ x <= limits, integers where said."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    # Of the rows: variables, their coefficients, and where each row ends
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])

    def variable(self, low: float, high: float, integer: bool = True, cost: float = 0.0) -> int:
        """A new variable's number."""
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def at_most(self, row: Mapping[int, float], limit: float) -> None:
        """row @ x <= limit."""
        self.columns += row
        self.values += row.values()
        self.ends.append(len(self.columns))
        self.limits.append(limit)

    def at_most_each(self, rows: Array, limits: Array) -> None:
        """The same of rows as a matrix."""
        of, columns = rows.nonzero()
        self.ends += (len(self.columns) + np.searchsorted(of, np.arange(1, len(rows) + 1))).tolist()
        self.columns += columns.tolist()
        self.values += rows[of, columns].tolist()
        self.limits += limits.tolist()

    @property
    def matrix(self) -> csr_array:
        """The rows."""
        return csr_array((self.values, self.columns, self.ends), (len(self.limits), len(self.cost)))

    def solve(self, integers: bool = True) -> tuple[float, list[float]] | None:
        """The dual bound, and the best solution found (all at their lowest if none was); None where there can be none. Without
        `integers` the bound of the linear program, which is lower."""
        found = self._solved(integers, presolve=False)  # which takes a linear program of this size as long again
        if not integers and found.status not in (OPTIMAL, INFEASIBLE):  # one far from feasible may lose the solver without
            found = self._solved(integers, presolve=True)
        if found.status == INFEASIBLE:
            return None
        bound = found.mip_dual_bound if integers and any(self.integer) else found.fun  # of a linear program the two are one
        if bound is None and integers:  # the solver lost its way among numbers; what a linear program says holds, too
            linear = self.solve(integers=False)
            return None if linear is None else (linear[0], self.low)
        assert bound is not None, f"the solver ends with {found.message}"
        return float(bound), self.low if found.x is None else [float(x) for x in found.x]

    def _solved(self, integers: bool, presolve: bool) -> Any:
        """The solver's own answer."""
        with _nothing_printed(), warnings.catch_warnings(action="ignore"):
            return milp(
                np.array(self.cost),
                constraints=LinearConstraint(self.matrix, -np.inf, np.array(self.limits)),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                integrality=np.array(self.integer) * integers,
                options=OPTIONS if integers else {"presolve": presolve},
            )


class Rows:
    """Quantities of a family: affine functions of a program's variables, in units of `scale`. The largest of several is a variable
    of its own, at least each of them."""

    def __init__(self, program: Program, width: int, scale: float) -> None:
        """`width`: one for the constant, and one for each variable that the program will ever have."""
        self.program, self.width, self.scale = program, width, scale

    def variable(self, number: int) -> Array:
        """A variable itself, as a quantity."""
        found = np.zeros(self.width)
        found[1 + number] = 1.0
        return found

    def at_least(self, numbers: int | Sequence[int], quantities: Array) -> None:
        """variable >= quantity, of each of some quantities, which may have a variable each."""
        rows = quantities[:, 1:] / self.scale
        rows[np.arange(len(rows)), numbers] -= 1.0
        self.program.at_most_each(rows, -quantities[:, 0] / self.scale)

    def longest(self, quantities: Array | Sequence[Array]) -> Array:
        number, found = self.program.variable(0, inf, integer=False), np.zeros(self.width)
        self.at_least(number, np.array(quantities))
        found[1 + number] = self.scale
        return found

    def positive(self, quantities: Array) -> Array:
        """Row by row. A row without positive coefficients is at most zero, as variables are not negative, and needs no variable."""
        found = np.zeros_like(quantities)
        is_constant = ~quantities[:, 1:].any(axis=1)
        found[is_constant, 0] = np.maximum(0.0, quantities[is_constant, 0])
        others = np.flatnonzero(~is_constant & (quantities > 0).any(axis=1))
        numbers = [self.program.variable(0, inf, integer=False) for _ in others]
        found[others, 1 + np.array(numbers, dtype=np.int64)] = self.scale
        self.at_least(numbers, quantities[others])
        return found


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Standard output closed: HiGHS prints a line now and then, even with `disp` off, which would damage what `--json` prints."""
    try:
        stdout = os.dup(1)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C keeps in its buffer belongs there too
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
