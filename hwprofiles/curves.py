"""Rates between measured points: interpolation that keeps more work taking longer.

Log-linear, so that more work takes longer wherever it does at the points (`check_rising`). Outside, the nearest point is taken.
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
    xs = [row_x for row_x, _ in rows]
    i = bisect_right(xs, x)
    near = [x] if x in xs else xs[max(i - 1, 0) : i + 1]
    inside = xs[0] <= x <= xs[-1] and all(row[0][0] <= y <= row[-1][0] for row_x, row in rows if row_x in near)
    return Rate(value, inside)


def along(points: Sequence[tuple[float, float]], x: float) -> float:
    """Log-linear interpolation of (x, value) points by rising x; the end value outside."""
    i = bisect_right([p[0] for p in points], x)
    if i == 0 or i == len(points):
        return points[max(i - 1, 0)][1]
    (x0, v0), (x1, v1) = points[i - 1], points[i]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(v0) + share * math.log(v1))


def check_rising(rows: list[Row], y_power: int) -> None:
    """ValueError where more work, which grows as x and as y to the power `y_power`, takes less time along a row or from row to row:
    interpolation is monotonic if its corners are."""
    ys = sorted({y for _, row in rows for y, _ in row})
    along_y = [(x, y0, y1, y0**y_power / r0, y1**y_power / r1) for x, row in rows for (y0, r0), (y1, r1) in pairwise(row)]
    along_x = [(y, x0, x1, x0 / along(row0, y), x1 / along(row1, y)) for (x0, row0), (x1, row1) in pairwise(rows) for y in ys]
    for at, less, more, less_s, more_s in (*along_y, *along_x):
        if more_s <= less_s:
            raise ValueError(f"more work takes less time between {less:.6g} and {more:.6g} at {at:.6g}; measure again")
