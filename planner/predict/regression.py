"""Robust regression: the fewest factors that explain measured times.

Least squares over logarithms (Levenberg-Marquardt), with the prior belief in each factor as one more observation, and Cauchy's loss
for outliers: an op that the cost model gets wrong in a way of its own moves little. Factors are taken in one by one, the one that
explains most first, until no other explains enough: many sets of factors give nearly the same times, and the fewest causes are the
likeliest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BELIEF = 0.5  # standard deviation of a factor's logarithm before anything was seen: two of three within 1.65 times as fast or slow
TRUSTED = 0.02  # relative difference of rows of one cause: a cost model is no nearer
LEAST_SCALE = 0.005  # however well the rows agree in the end
LEAST_GAIN = 4.0  # of the sum of squares, in these units: two standard deviations
LOSS_WIDTH = 2.385  # in such units: a row beyond it is an outlier; at this width 95 % of what normal rows tell is used
MEDIAN_TO_DEVIATION = 1.4826  # of a normal distribution
PROBES = (0.4, 0.1, 0.05)  # steps of a logarithm for finite differences: wide at first, then narrower
LARGEST_MOVE = 0.7  # of a logarithm in one round: twice as fast
N_CANDIDATES = 2  # factors that are fitted before one of them is taken in
DAMPINGS = ((0.0, 1.0), (0.0, 0.4), (0.3, 1.0), (3.0, 1.0))  # (damping, share of the step), tried until one is a step forward

Floats = NDArray[np.float64]
Model = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Observation:
    """The logarithm of a measured time, the number of independent observations that it counts for, and its kind."""

    measured: float
    weight: float
    kind: str


@dataclass(frozen=True, slots=True)
class Fit:
    """Logarithms of the factors, zero for those that were not needed; and the standard deviation of each."""

    logs: tuple[float, ...]
    deviations: tuple[float, ...]


def fit_factors(rows: Sequence[Observation], n_factors: int, model: Model) -> Fit:
    """The fewest and likeliest factors. `model` gives the logarithm of each row for logarithms of the factors."""
    search = _Search(rows, model, dict.fromkeys({row.kind for row in rows}, TRUSTED))
    best, chosen = search.at(np.zeros(n_factors)), list[int]()
    while found := [(search.refined(best, [*chosen, k], PROBES[:2]), k) for k in search.candidates(best, chosen)]:
        tried, k = min(found, key=lambda pair: pair[0].objective)
        if best.objective - tried.objective < LEAST_GAIN:
            break
        best, chosen = tried, [*chosen, k]
    for k in sorted(chosen, key=lambda k: abs(best.logs[k])):  # a later factor may have made an earlier one superfluous
        others = [other for other in chosen if other != k]
        without = search.refined(search.at(np.where(np.arange(n_factors) == k, 0.0, best.logs)), others)
        if without.objective - best.objective < LEAST_GAIN:
            best, chosen = without, others
    search = _Search(rows, model, _scales(rows, best.left))
    best = search.refined(search.at(best.logs), chosen)
    return Fit(tuple(map(float, best.logs)), tuple(map(float, search.deviations(best))))


@dataclass(frozen=True, slots=True)
class _Point:
    """Logarithms of the factors, the residual of each row, and the objective to be minimised."""

    logs: Floats
    left: Floats
    objective: float


class _Search:
    """The rows, their model, and how far a row of each kind is to be trusted."""

    def __init__(self, rows: Sequence[Observation], model: Model, scales: dict[str, float]) -> None:
        self.model = model
        self.measured, self.weights = np.array([row.measured for row in rows]), np.array([row.weight for row in rows])
        self.widths = LOSS_WIDTH * np.array([scales[row.kind] for row in rows])

    def at(self, logs: Floats) -> _Point:
        left = self.measured - self._modelled(logs)
        unexplained = self.weights * LOSS_WIDTH**2 * np.log1p((left / self.widths) ** 2)
        return _Point(logs, left, float(unexplained.sum() + ((logs / BELIEF) ** 2).sum()))

    def candidates(self, point: _Point, chosen: Sequence[int]) -> list[int]:
        """The factors that seem to explain most of the residuals, besides those already chosen."""
        n = len(point.logs)
        normal, towards = self._equations(point, range(n), PROBES[0])
        gains = []
        for k in (k for k in range(n) if k not in chosen):
            some = [*chosen, k]
            gains.append((-towards[some] @ np.linalg.solve(normal[np.ix_(some, some)], towards[some]), k))
        return [k for gain, k in sorted(gains)[:N_CANDIDATES] if gain < 0]

    def refined(self, point: _Point, chosen: Sequence[int], probes: Sequence[float] = PROBES) -> _Point:
        """The best point near this one that differs in the chosen factors alone; a Levenberg-Marquardt round for each probe."""
        for probe in probes if chosen else ():
            normal, towards = self._equations(point, chosen, probe)
            for damping, share in DAMPINGS:
                step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), towards)
                logs = point.logs.copy()
                logs[list(chosen)] += share * np.clip(step, -LARGEST_MOVE, LARGEST_MOVE)
                if (tried := self.at(logs)).objective < point.objective:
                    point = tried
                    break
        return point

    def deviations(self, point: _Point) -> Floats:
        """Standard deviations of all factors, chosen or not: one that might be the cause as well makes the others less sure."""
        normal, _ = self._equations(point, range(len(point.logs)), PROBES[-1])
        deviations: Floats = np.sqrt(np.diag(np.linalg.inv(normal)))
        return deviations

    def _equations(self, point: _Point, factors: Sequence[int], probe: float) -> tuple[Floats, Floats]:
        """The normal equations of one round: outliers weigh less, and the prior belief is a row for each factor."""
        slopes = np.stack([self._slopes(point.logs, k, probe) for k in factors], axis=1)
        trust = self.weights * LOSS_WIDTH**2 / (self.widths**2 + point.left**2)
        normal = slopes.T @ (trust[:, None] * slopes) + np.eye(len(factors)) / BELIEF**2
        return normal, slopes.T @ (trust * point.left) - point.logs[list(factors)] / BELIEF**2

    def _slopes(self, logs: Floats, k: int, probe: float) -> Floats:
        """Central differences of each row for a factor, at most proportional: ops of several lanes that meet otherwise make a step,
        which is no slope."""
        move = probe * (np.arange(len(logs)) == k)
        slopes: Floats = np.clip((self._modelled(logs + move) - self._modelled(logs - move)) / (2 * probe), -1.0, 1.0)
        return slopes

    def _modelled(self, logs: Floats) -> Floats:
        return np.array(self.model(logs.tolist()))


def _scales(rows: Sequence[Observation], left: Floats) -> dict[str, float]:
    """How far a row of each kind is to be trusted: by the weighted median of the residuals, which outliers do not move."""
    scales = {}
    for kind in {row.kind for row in rows}:
        sizes = sorted((abs(x), row.weight) for row, x in zip(rows, left.tolist(), strict=True) if row.kind == kind)
        passed = np.cumsum([weight for _, weight in sizes])
        scales[kind] = max(LEAST_SCALE, MEDIAN_TO_DEVIATION * sizes[int(np.searchsorted(passed, passed[-1] / 2))][0])
    return scales
