"""Robust regression: the fewest factors that explain measured times.

Least squares over logarithms (Gauss-Newton), with the prior belief in each factor as one more observation, and Cauchy's loss for
outliers: an op that the cost model gets wrong in a way of its own moves little. In every round the model is taken to be as steep as
it is near the factors found so far, and factors are taken in one by one, the one that explains most first, until no other explains
enough: many sets of factors give nearly the same times, and the fewest causes are the likeliest.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

BELIEF = 0.5  # standard deviation of a factor's logarithm before anything was seen: two of three within 1.65 times as fast or slow
TRUSTED = 0.02  # relative difference of rows of one cause: a cost model is no nearer
LEAST_SCALE = 0.005  # however well the rows agree in the end
LEAST_GAIN = 4.0  # of the sum of squares, in these units: two standard deviations
LOSS_WIDTH = 2.385  # in such units: a row beyond it is an outlier; at this width 95 % of what normal rows tell is used
MEDIAN_TO_DEVIATION = 1.4826  # of a normal distribution
PROBES = (0.4, 0.4, 0.1, 0.1, 0.05)  # steps of a logarithm for finite differences, one a round: wide at first, then narrower
LARGEST_MOVE = 0.7  # of a logarithm in one round: twice as fast
N_REWEIGHTED = 12  # solutions of a robust problem, each with outliers weighed by the one before

Floats = NDArray[np.float64]


def fit_factors(
    measured: Floats, weights: Floats, kinds: NDArray[np.str_], n_factors: int, model: Callable[[list[float]], Floats]
) -> tuple[Floats, Floats]:
    """Logarithms of the fewest and likeliest factors, zero for those that are not needed, and the standard deviation of each.

    A row is the logarithm of a measured time, the number of independent observations that it counts for, and its kind. `model`
    gives the logarithm of each row for logarithms of the factors.
    """

    def left(logs: Floats) -> Floats:
        return measured - np.asarray(model([*logs]))

    widths, logs = np.full(len(measured), TRUSTED), np.zeros(n_factors)
    for probe in PROBES:
        near = _Near(weights, widths, left, logs, probe)
        logs = logs + np.clip(near.fewest() - logs, -LARGEST_MOVE, LARGEST_MOVE)
        # A later factor may have made an earlier one superfluous.
        for k in sorted(np.flatnonzero(logs), key=np.abs(logs).__getitem__):
            without = np.where(np.arange(n_factors) == k, 0.0, logs)
            if near.unexplained(left(without), without) - near.unexplained(left(logs), logs) < LEAST_GAIN:
                logs = without
    sizes = np.abs(left(logs))
    for kind in np.unique(kinds):  # how far its rows are to be trusted: by the median of what is left, which outliers do not move
        of = np.flatnonzero(kinds == kind)
        of = of[np.argsort(sizes[of], kind="stable")]
        passed = np.cumsum(weights[of])
        widths[of] = max(LEAST_SCALE, MEDIAN_TO_DEVIATION * sizes[of[np.searchsorted(passed, passed[-1] / 2)]])
    near = _Near(weights, widths, left, logs, PROBES[-1])
    _, logs = near.solved(np.flatnonzero(logs).tolist())
    # Of all factors, chosen or not: one that might be the cause as well makes the others less sure.
    return logs, np.sqrt(np.diag(np.linalg.inv(near.normal(logs)[0])))


class _Near:
    """The rows, and the model as steep as it is near some logarithms: central differences of each row for a factor, at most
    proportional, for ops of several lanes that meet otherwise make a step, which is no slope."""

    def __init__(self, weights: Floats, widths: Floats, left: Callable[[Floats], Floats], logs: Floats, probe: float) -> None:
        falls = [left(logs - move) - left(logs + move) for move in probe * np.eye(len(logs))]
        self.slopes: Floats = np.clip(np.stack(falls, axis=1) / (2 * probe), -1.0, 1.0)
        self.wanted: Floats = left(logs) + self.slopes @ logs
        self.weights, self.widths = weights * LOSS_WIDTH**2, widths * LOSS_WIDTH

    def fewest(self) -> Floats:
        """The logarithms of as few factors as explain enough."""
        chosen, (least, logs) = list[int](), self.solved([])
        while others := [k for k in range(len(logs)) if k not in chosen]:
            tried, k = min((self.solved([*chosen, k])[0], k) for k in others)
            if least - tried < LEAST_GAIN:
                break
            chosen.append(k)
            least, logs = self.solved(chosen)
        return logs

    def solved(self, chosen: Sequence[int]) -> tuple[float, Floats]:
        """What the likeliest logarithms of the chosen factors leave unexplained, and these: by reweighted least squares."""
        logs = np.zeros(self.slopes.shape[1])
        for _ in range(N_REWEIGHTED if chosen else 0):
            normal, trust = self.normal(logs)
            logs[chosen] = np.linalg.solve(normal[np.ix_(chosen, chosen)], self.slopes[:, chosen].T @ (trust * self.wanted))
        return self.unexplained(self.wanted - self.slopes @ logs, logs), logs

    def normal(self, logs: Floats) -> tuple[Floats, Floats]:
        """The matrix of the normal equations, with the prior belief as a row for each factor; and the weights of the rows, of which
        outliers have small ones."""
        trust = self.weights / (self.widths**2 + (self.wanted - self.slopes @ logs) ** 2)
        return self.slopes.T @ (trust[:, None] * self.slopes) + np.eye(len(logs)) / BELIEF**2, trust

    def unexplained(self, left: Floats, logs: Floats) -> float:
        """The objective: the robust loss of the residuals, and how unlikely the factors are."""
        return float((self.weights * np.log1p((left / self.widths) ** 2)).sum() + ((logs / BELIEF) ** 2).sum())
