"""Sparse robust regression: the fewest speed factors that explain measured times.

Gauss-Newton on log times, with a Gaussian prior on each log factor and Cauchy loss, so that one badly modelled op has little
influence. In every round the model is linearised at the current factors, and forward selection adds the factor with the largest
gain until the gain is too small: many sets of factors yield nearly the same times, and the smallest set is the most likely.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

BELIEF = 0.5  # prior standard deviation of a log factor: two of three are within a factor of 1.65
TRUSTED = 0.02  # initial scale of the residuals: relative error of a good cost model
LEAST_SCALE = 0.005  # lower limit of the residual scale
LEAST_GAIN = 4.0  # smallest decrease of the objective for a factor: two standard deviations, squared
LOSS_WIDTH = 2.385  # Cauchy width in units of the scale: 95 % efficiency on normal residuals
MEDIAN_TO_DEVIATION = 1.4826  # ratio of standard deviation to median absolute deviation, for a normal distribution
PROBES = (0.4, 0.4, 0.1, 0.1, 0.05)  # finite-difference steps of a log factor, one per round
LARGEST_MOVE = 0.7  # largest change of a log factor per round: a factor of two
N_REWEIGHTED = 12  # iterations of reweighted least squares

Floats = NDArray[np.float64]


def fit_factors(
    measured: Floats, weights: Floats, kinds: NDArray[np.str_], n_factors: int, model: Callable[[list[float]], Floats]
) -> tuple[Floats, Floats]:
    """Fit a sparse vector of log factors; return it and the standard deviation of each factor.

    A row is a measured log time, its weight (number of independent observations) and its kind. `model` maps log factors to
    predicted log times.
    """

    def residuals(logs: Floats) -> Floats:
        return measured - np.asarray(model([*logs]))

    widths, logs = np.full(len(measured), TRUSTED), np.zeros(n_factors)
    for probe in PROBES:
        near = _Linearisation(weights, widths, residuals, logs, probe)
        logs = logs + np.clip(near.fewest() - logs, -LARGEST_MOVE, LARGEST_MOVE)
        # Backward elimination: a later factor may have made an earlier one superfluous
        for k in sorted(np.flatnonzero(logs), key=np.abs(logs).__getitem__):
            reduced = np.where(np.arange(n_factors) == k, 0.0, logs)
            if near.unexplained(residuals(reduced), reduced) - near.unexplained(residuals(logs), logs) < LEAST_GAIN:
                logs = reduced
    sizes = np.abs(residuals(logs))
    for kind in np.unique(kinds):  # residual scale per kind: weighted median, robust to outliers
        rows = np.flatnonzero(kinds == kind)
        rows = rows[np.argsort(sizes[rows], kind="stable")]
        passed = np.cumsum(weights[rows])
        widths[rows] = max(LEAST_SCALE, MEDIAN_TO_DEVIATION * sizes[rows[np.searchsorted(passed, passed[-1] / 2)]])
    near = _Linearisation(weights, widths, residuals, logs, PROBES[-1])
    _, logs = near.solved(np.flatnonzero(logs).tolist())
    # Include unselected factors, because an alternative cause increases the uncertainty of the selected ones
    return logs, np.sqrt(np.diag(np.linalg.inv(near.normal(logs)[0])))


class _Linearisation:
    """Linearisation of the model at some log factors, by central differences. Slopes are clipped to [-1, 1], because a change of
    the contending ops causes a jump."""

    def __init__(self, weights: Floats, widths: Floats, residuals: Callable[[Floats], Floats], logs: Floats, probe: float) -> None:
        falls = [residuals(logs - move) - residuals(logs + move) for move in probe * np.eye(len(logs))]
        self.slopes: Floats = np.clip(np.stack(falls, axis=1) / (2 * probe), -1.0, 1.0)
        self.wanted: Floats = residuals(logs) + self.slopes @ logs
        self.weights, self.widths = weights * LOSS_WIDTH**2, widths * LOSS_WIDTH

    def fewest(self) -> Floats:
        """Forward selection of factors; return their log factors."""
        chosen, (least, logs) = list[int](), self.solved([])
        while candidates := [k for k in range(len(logs)) if k not in chosen]:
            tried, k = min((self.solved([*chosen, k])[0], k) for k in candidates)
            if least - tried < LEAST_GAIN:
                break
            chosen.append(k)
            least, logs = self.solved(chosen)
        return logs

    def solved(self, chosen: Sequence[int]) -> tuple[float, Floats]:
        """Fit the chosen factors by iteratively reweighted least squares; return the objective and the log factors."""
        logs = np.zeros(self.slopes.shape[1])
        for _ in range(N_REWEIGHTED if chosen else 0):
            normal, trust = self.normal(logs)
            logs[chosen] = np.linalg.solve(normal[np.ix_(chosen, chosen)], self.slopes[:, chosen].T @ (trust * self.wanted))
        return self.unexplained(self.wanted - self.slopes @ logs, logs), logs

    def normal(self, logs: Floats) -> tuple[Floats, Floats]:
        """Return the normal matrix, including the prior, and the row weights, which are small for outliers."""
        trust = self.weights / (self.widths**2 + (self.wanted - self.slopes @ logs) ** 2)
        return self.slopes.T @ (trust[:, None] * self.slopes) + np.eye(len(logs)) / BELIEF**2, trust

    def unexplained(self, residuals: Floats, logs: Floats) -> float:
        """Objective: Cauchy loss of the residuals plus the prior's penalty."""
        return float((self.weights * np.log1p((residuals / self.widths) ** 2)).sum() + ((logs / BELIEF) ** 2).sum())
