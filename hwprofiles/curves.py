"""Interpolation of rates between measured points.

Log-linear, which keeps time rising with work if it rises at the points (`check_rising`); clamped outside of the measured range.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

Row = tuple[float, list[tuple[float, float]]]  # x, and its (y, rate) points by rising y


class Rate(NamedTuple):
    """A rate between measured points, or clamped to the nearest one outside of them."""

    value: float
    inside_measured: bool


def rows_of(points: Iterable[tuple[float, float, float]]) -> list[Row]:
    """Group (x, y, rate) points by x. Points of equal (x, y), e.g. products of equal k n, become their geometric mean."""
    rows: dict[float, dict[float, list[float]]] = {}
    for x, y, rate in points:
        rows.setdefault(x, {}).setdefault(y, []).append(math.log(rate))
    return [(x, [(y, math.exp(sum(logs) / len(logs))) for y, logs in sorted(row.items())]) for x, row in sorted(rows.items())]


def interpolated(rows: list[Row], x: float, y: float) -> Rate:
    """Interpolate log-linearly along y in the two rows around x, then between these rows; clamp outside."""
    value = along([(row_x, along(row, y)) for row_x, row in rows], x)
    xs = [row_x for row_x, _ in rows]
    i = bisect_right(xs, x)
    near = [x] if x in xs else xs[max(i - 1, 0) : i + 1]
    inside = xs[0] <= x <= xs[-1] and all(row[0][0] <= y <= row[-1][0] for row_x, row in rows if row_x in near)
    return Rate(value, inside)


def along(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate (x, value) points, sorted by x, log-linearly; clamp outside."""
    i = bisect_right([p[0] for p in points], x)
    if i == 0 or i == len(points):
        return points[max(i - 1, 0)][1]
    (x0, v0), (x1, v1) = points[i - 1], points[i]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(v0) + share * math.log(v1))


def check_rising(rows: list[Row], y_power: int) -> None:
    """Raise ValueError if time does not rise with work along a row or from row to row. Work is proportional to x y**y_power.
    Checking the corners suffices: the interpolation between them is monotonic."""
    ys = sorted({y for _, row in rows for y, _ in row})
    along_y = [(x, y0, y1, y0**y_power / r0, y1**y_power / r1) for x, row in rows for (y0, r0), (y1, r1) in pairwise(row)]
    along_x = [(y, x0, x1, x0 / along(row0, y), x1 / along(row1, y)) for (x0, row0), (x1, row1) in pairwise(rows) for y in ys]
    for fixed, low, high, low_s, high_s in (*along_y, *along_x):
        if high_s <= low_s:
            raise ValueError(f"more work takes less time between {low:.6g} and {high:.6g} at {fixed:.6g}; measure again")
