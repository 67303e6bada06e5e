"""Which factors explain measured times best?

Least squares over logarithms, with what was believed before as one more observation of each factor, and with a loss that grows
slowly for odd rows (Cauchy's): an op that the model gets wrong in a way of its own moves little. Factors are taken in one by one,
the one that explains most first, until no other explains enough: many sets of factors give nearly the same times, and the fewest
causes are the likeliest.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

BELIEF = 0.5  # standard deviation of a factor's logarithm before anything was seen: two of three within 1.65 times as fast or slow
TRUSTED = 0.02  # what rows of one cause may differ by, as a share: a model of costs is no nearer
LEAST_SCALE = 0.005  # however well the rows agree in the end
LEAST_GAIN = 4.0  # of the sum of squares, in these units: two standard deviations
LOSS_WIDTH = 2.385  # in such units: beyond it a row counts as odd; at this width 95 % of what normal rows tell is used
MEDIAN_TO_DEVIATION = 1.4826  # of a normal distribution
PROBES = (0.4, 0.1, 0.05)  # how far a logarithm is moved to see what answers: far at first, then nearer
LARGEST_MOVE = 0.7  # of a logarithm in one round: twice as fast
N_CANDIDATES = 2  # that are tried in earnest before one is taken in
# Damping, and share of the step taken, tried in this order until one is a step forward.
DAMPINGS = ((0.0, 1.0), (0.0, 0.4), (0.3, 1.0), (3.0, 1.0))

Model = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation: the logarithm of what was measured, how many independent ones it counts for, and whom it agrees with."""

    measured: float
    weight: float
    kind: str


@dataclass(frozen=True, slots=True)
class Fit:
    """Logarithms of the factors, zero for those that were not needed; and the standard deviation of each."""

    logs: tuple[float, ...]
    deviations: tuple[float, ...]


def fit_factors(rows: Sequence[Observation], n_factors: int, model: Model) -> Fit:
    """The fewest and likeliest factors. `model` answers the logarithm of each row for logarithms of the factors."""
    search = _Search(rows, n_factors, model, {row.kind: TRUSTED for row in rows})
    best = search.at([0.0] * n_factors)
    chosen: list[int] = []
    while len(chosen) < n_factors:
        found = [(search.refined(best, [*chosen, k], PROBES[:2]), k) for k in search.candidates(best, chosen)]
        if not found:
            break
        tried, k = min(found, key=lambda pair: pair[0].objective)
        if best.objective - tried.objective < LEAST_GAIN:
            break
        best, chosen = tried, [*chosen, k]
    for k in sorted(chosen, key=lambda k: abs(best.logs[k])):  # what came later may have made an earlier one superfluous
        others = [c for c in chosen if c != k]
        without = search.refined(search.at([x * (i != k) for i, x in enumerate(best.logs)]), others)
        if without.objective - best.objective < LEAST_GAIN:
            best, chosen = without, others
    search = _Search(rows, n_factors, model, _scales(rows, best.left))
    best = search.refined(search.at(best.logs), chosen)
    return Fit(best.logs, search.deviations(best))


@dataclass(frozen=True, slots=True)
class _Point:
    """Logarithms of the factors, what they leave unexplained of each row, and what is to be made small."""

    logs: tuple[float, ...]
    left: tuple[float, ...]
    objective: float


@dataclass(frozen=True, slots=True)
class _Search:
    """The rows, the model of them, and how far a row of each kind is to be trusted."""

    rows: Sequence[Observation]
    n_factors: int
    model: Model
    scales: dict[str, float]

    def at(self, logs: Sequence[float]) -> _Point:
        left = tuple(row.measured - explained for row, explained in zip(self.rows, self.model(logs), strict=True))
        squares = ((row.weight, (x / self.scales[row.kind]) ** 2) for row, x in zip(self.rows, left, strict=True))
        unexplained = sum(weight * LOSS_WIDTH**2 * math.log1p(square / LOSS_WIDTH**2) for weight, square in squares)
        return _Point(tuple(logs), left, unexplained + sum((x / BELIEF) ** 2 for x in logs))

    def candidates(self, point: _Point, chosen: Sequence[int]) -> list[int]:
        """The factors that seem to explain most of what is left, besides those already chosen."""
        everything = range(self.n_factors)
        normal, towards = self._equations(point, everything, self._slopes(point, everything, PROBES[0]))
        gains = []
        for k in (k for k in everything if k not in chosen):
            some = [*chosen, k]
            step = _solved([[normal[i][j] for j in some] for i in some], [towards[i] for i in some])
            gains.append((-sum(towards[i] * x for i, x in zip(some, step, strict=True)), k))
        return [k for gain, k in sorted(gains)[:N_CANDIDATES] if gain < 0]

    def refined(self, point: _Point, chosen: Sequence[int], probes: Sequence[float] = PROBES) -> _Point:
        """The best point near this one that differs in the chosen factors only. Rounds of Levenberg and Marquardt's."""
        for probe in probes if chosen else ():
            normal, towards = self._equations(point, chosen, self._slopes(point, chosen, probe))
            for damping, share in DAMPINGS:
                damped = [[x * (1 + damping * (i == j)) for j, x in enumerate(row)] for i, row in enumerate(normal)]
                moves = [share * min(max(x, -LARGEST_MOVE), LARGEST_MOVE) for x in _solved(damped, towards)]
                by_factor = dict(zip(chosen, moves, strict=True))
                tried = self.at([x + by_factor.get(k, 0.0) for k, x in enumerate(point.logs)])
                if tried.objective < point.objective:
                    point = tried
                    break
        return point

    def deviations(self, point: _Point) -> tuple[float, ...]:
        """Of every factor, whether chosen or not: one that might as well have been the cause makes the others less sure."""
        everything = range(self.n_factors)
        normal, _ = self._equations(point, everything, self._slopes(point, everything, PROBES[-1]))
        return tuple(math.sqrt(_solved(normal, [float(i == k) for i in everything])[k]) for k in everything)

    def _slopes(self, point: _Point, factors: Sequence[int], probe: float) -> list[list[float]]:
        """How each row answers to each factor, at most in proportion: where ops of several lanes meet otherwise than before, a step
        is no slope. Seen from both sides: what another resource holds up answers to one of them only."""
        slopes = []
        for k in factors:
            below, above = (self.model([x + side * (i == k) for i, x in enumerate(point.logs)]) for side in (-probe, probe))
            slopes.append([min(max((b - a) / (2 * probe), -1.0), 1.0) for a, b in zip(below, above, strict=True)])
        return slopes

    def _equations(
        self, point: _Point, factors: Sequence[int], slopes: Sequence[Sequence[float]]
    ) -> tuple[list[list[float]], list[float]]:
        """The normal equations of one round: odd rows count less, and what was believed counts as a row for each factor."""
        n = len(factors)
        normal = [[(i == j) / BELIEF**2 for j in range(n)] for i in range(n)]
        towards = [-point.logs[k] / BELIEF**2 for k in factors]
        for number, (row, x) in enumerate(zip(self.rows, point.left, strict=True)):
            scale = self.scales[row.kind]
            trust = row.weight / (scale**2 * (1 + (x / (LOSS_WIDTH * scale)) ** 2))
            answers = [(i, slope) for i in range(n) if (slope := slopes[i][number])]
            for i, slope in answers:
                towards[i] += trust * slope * x
                for j, other in answers:
                    normal[i][j] += trust * slope * other
        return normal, towards


def _scales(rows: Sequence[Observation], left: Sequence[float]) -> dict[str, float]:
    """For each kind of row how far one is to be trusted: by the weighted median of what is left, which odd ones do not move."""
    scales = {}
    for kind in {row.kind for row in rows}:
        sizes = sorted((abs(x), row.weight) for row, x in zip(rows, left, strict=True) if row.kind == kind)
        passed = list(accumulate(weight for _, weight in sizes))
        middle = sizes[bisect_left(passed, passed[-1] / 2)][0]
        scales[kind] = max(LEAST_SCALE, MEDIAN_TO_DEVIATION * middle)
    return scales


def _solved(normal: Sequence[Sequence[float]], towards: Sequence[float]) -> list[float]:
    """The x with `normal` x = `towards`, by Cholesky's factors: what was believed makes the matrix positive definite."""
    n = len(towards)
    lower = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = normal[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    forward: list[float] = []
    for i in range(n):
        forward.append((towards[i] - sum(lower[i][k] * forward[k] for k in range(i))) / lower[i][i])
    solved = [0.0] * n
    for i in reversed(range(n)):
        solved[i] = (forward[i] - sum(lower[k][i] * solved[k] for k in range(i + 1, n))) / lower[i][i]
    return solved
