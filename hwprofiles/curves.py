"""What is a rate between the measured points?

Rates over size are points of a measured grid. Between points they are interpolated in log space, so that more work takes longer
wherever it does at the points themselves, which `check_rising` holds. Outside the points the nearest one holds, and the answer
says that it was outside.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

Row = tuple[float, list[tuple[float, float]]]  # at this x, the (y, rate) points by rising y


class Rate(NamedTuple):
    """A rate between measured points, or clamped to the nearest one outside of them."""

    value: float
    inside_measured: bool


def rows_of(points: Iterable[tuple[float, float, float]]) -> list[Row]:
    """Points grouped by x; several at the same (x, y), as tall and wide products of one width, become their geometric mean."""
    rows: dict[float, dict[float, list[float]]] = {}
    for x, y, rate in points:
        rows.setdefault(x, {}).setdefault(y, []).append(math.log(rate))
    return [(x, [(y, math.exp(sum(logs) / len(logs))) for y, logs in sorted(row.items())]) for x, row in sorted(rows.items())]


def interpolated(rows: list[Row], x: float, y: float) -> Rate:
    """Log-linear along y in the rows around x, then between the two rows; the nearest point outside."""
    value = along([(row_x, along(row, y)) for row_x, row in rows], x)
    near = [row for row_x, row in rows if row_x in _around([r[0] for r in rows], x)]
    inside = rows[0][0] <= x <= rows[-1][0] and all(row[0][0] <= y <= row[-1][0] for row in near)
    return Rate(value, inside)


def _around(xs: Sequence[float], x: float) -> tuple[float, float]:
    """The two neighbours that x lies between; twice the same one where x is one of them or outside."""
    if x in xs:
        return x, x
    i = bisect_right(xs, x)
    return xs[max(i - 1, 0)], xs[min(i, len(xs) - 1)]


def along(points: Sequence[tuple[float, float]], x: float) -> float:
    """Log-linear interpolation of (x, value) points by rising x; the end value outside."""
    i = bisect_right([p[0] for p in points], x)
    if i == 0 or i == len(points):
        return points[max(i - 1, 0)][1]
    (x0, v0), (x1, v1) = points[i - 1], points[i]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(v0) + share * math.log(v1))


def check_rising(rows: list[Row], y_power: int, where: str) -> None:
    """More work takes longer, along every row and from row to row: log-linear interpolation keeps what its corners hold.

    Work grows as x, and as y to the power `y_power`. ValueError names, after `where`, the first points that contradict it.
    """
    for x, row in rows:
        for (y0, rate0), (y1, rate1) in pairwise(row):
            if y1**y_power / rate1 <= y0**y_power / rate0:
                raise ValueError(f"{where}: more work takes less time between {y0:.6g} and {y1:.6g} at {x:.6g}; measure again")
    ys = sorted({y for _, row in rows for y, _ in row})
    for (x0, row0), (x1, row1) in pairwise(rows):
        for y in ys:
            if x1 / along(row1, y) <= x0 / along(row0, y):
                raise ValueError(f"{where}: more work takes less time between {x0:.6g} and {x1:.6g} at {y:.6g}; measure again")
