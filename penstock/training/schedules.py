"""Learning rate schedules: functions of the step, so that a resumed run needs no state. Bitwise identical to transformers.

Reimplemented because `transformers.get_scheduler` imports peft: 57 MB, and more than a second per start.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.run_config import RunConfigError
from penstock.settings import OptimizerSettings

DECAY_FRACTION = 0.1  # of a run: default decay of warmup-stable-decay


@dataclass(slots=True)
class Rates:
    """Hyperparameters of each step. `fixed_lr` overrides the scheduled learning rate; it is set while no lane is busy."""

    settings: OptimizerSettings
    scheduled: Callable[[int], float]
    fixed_lr: float | None = None
    of_groups: tuple[Callable[[int], float], ...] = ()  # scheduled rates of `settings.groups`

    def __call__(self, step: int) -> OptimizerSettings:
        groups, fixed_lr, base_lr = self.settings.groups, self.fixed_lr, self.settings.lr or 1.0
        rates = [
            rate(step) if fixed_lr is None else fixed_lr * ((group.lr or base_lr) / base_lr)
            for group, rate in zip(groups, self.of_groups, strict=True)
        ]
        groups = tuple(replace(group, lr=rate) for group, rate in zip(groups, rates, strict=True))
        return replace(self.settings, lr=self.scheduled(step) if fixed_lr is None else fixed_lr, groups=groups)


def run_rates(settings: OptimizerSettings, n_steps: int, fixed_lr: float | None = None) -> Rates:
    """Return the hyperparameters of the steps of a run. A group has the schedule of the optimizer, from a rate of its own."""
    of_groups = tuple(learning_rates(replace(settings, lr=group.lr or settings.lr), n_steps) for group in settings.groups)
    return Rates(settings, learning_rates(settings, n_steps), fixed_lr, of_groups)


def learning_rates(settings: OptimizerSettings, n_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0. RunConfigError if warm-up and decay exceed `n_steps`.

    As in transformers, the rate of the first step of a warm-up is 0, and steps beyond the last are extrapolated.
    """
    schedule, lr = settings.schedule, settings.lr
    assert lr is not None, "a session has one"
    warmup_steps, decay_steps, least = schedule.warmup_steps, 0, schedule.min_lr_fraction
    if schedule.kind == "warmup-stable-decay":
        decay_steps = schedule.decay_steps if schedule.decay_steps is not None else max(1, round(n_steps * DECAY_FRACTION))
    if warmup_steps >= n_steps or warmup_steps + decay_steps > n_steps:
        warm_up = f"warm-up takes {warmup_steps} steps (optimizer.schedule.warmup_steps, --warmup-steps)"
        decay = f" and decay {decay_steps} (decay_steps)" if decay_steps else ""
        raise RunConfigError(f"{warm_up}{decay}, and the run has {n_steps}; give them fewer")

    def falling(share: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * share)) * (1.0 - least) + least

    def factor(step: int) -> float:
        if step < warmup_steps:
            risen = step / warmup_steps
            return risen * (1.0 - least) + least if schedule.kind == "warmup-stable-decay" else risen
        remaining = n_steps - step
        match schedule.kind:
            case "linear":
                return max(0.0, remaining / (n_steps - warmup_steps))
            case "cosine":
                return falling((step - warmup_steps) / (n_steps - warmup_steps))
            case "warmup-stable-decay" if remaining <= decay_steps:
                return falling((decay_steps - remaining) / decay_steps) if remaining > 0 else least
        return 1.0

    return lambda step: lr * factor(step)
