"""How is an integer program written down and solved?"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

INFEASIBLE = 2  # scipy's status
MOST_NODES = 2000  # of the solver's tree: a limit in seconds would make the answer depend on the machine


@dataclass(slots=True)
class Program:
    """minimize cost @ x, rows @ x <= limits, integers where said."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    rows: list[dict[int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def variable(self, low: float, high: float, integer: bool = True, cost: float = 0.0) -> int:
        """A new variable's number."""
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def at_most(self, row: Mapping[int, float], limit: float) -> None:
        """row @ x <= limit."""
        self.rows.append(dict(row))
        self.limits.append(limit)

    def solve(self) -> tuple[float, list[float]] | None:
        """The dual bound, and the best solution found (all at their lowest if none was); None where there can be none."""
        matrix = np.zeros((len(self.rows), len(self.cost)))
        for i, row in enumerate(self.rows):
            matrix[i, list(row)] = list(row.values())
        with _nothing_printed():
            found = milp(
                np.array(self.cost),
                constraints=LinearConstraint(matrix, -np.inf, np.array(self.limits)),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                integrality=np.array(self.integer),
                options={"mip_rel_gap": 1e-4, "node_limit": MOST_NODES},
            )
        if found.status == INFEASIBLE:
            return None
        bound = found.mip_dual_bound if any(self.integer) else found.fun  # of a linear program the two are one
        assert bound is not None, f"the solver ends with {found.message}"
        return float(bound), self.low if found.x is None else [float(x) for x in found.x]


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """HiGHS prints a line of its own now and then, whatever it is told, in the middle of what `--json` prints."""
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
