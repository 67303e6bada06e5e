"""Learning rate schedules: those of transformers, as a function of the step, so that a resumed run needs no state of them."""

import warnings
from collections.abc import Callable

import torch
from transformers import get_scheduler

from penstock.run_config import RunConfigError
from penstock.settings import OptimizerSettings

DECAY_FRACTION = 0.1  # of a run: the decay of warmup-stable-decay where the settings do not say

_NAMES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine_with_min_lr",
    "warmup-stable-decay": "warmup_stable_decay",
}


def learning_rates(settings: OptimizerSettings, n_steps: int) -> Callable[[int], float]:
    """The learning rate of a step, counted from 0, of a run of `n_steps`. RunConfigError where the parts do not fit into it.

    With warm-up the first step's is 0, as in transformers. Steps beyond the last are given what the scheduler gives them.
    """
    schedule, lr = settings.schedule, settings.lr
    assert lr is not None, "a session has one"
    decay_steps = 0
    if schedule.kind == "warmup-stable-decay":
        decay_steps = schedule.decay_steps if schedule.decay_steps is not None else max(1, round(n_steps * DECAY_FRACTION))
    if schedule.warmup_steps >= n_steps or schedule.warmup_steps + decay_steps > n_steps:
        warm_up = f"warm-up takes {schedule.warmup_steps} steps (optimizer.schedule.warmup_steps, --warmup-steps)"
        decay = f" and decay {decay_steps} (decay_steps)" if decay_steps else ""
        raise RunConfigError(f"{warm_up}{decay}, and the run has {n_steps}; give them fewer")
    particular = {
        "cosine": {"min_lr_rate": schedule.min_lr_fraction},
        "warmup-stable-decay": {"num_decay_steps": decay_steps, "min_lr_ratio": schedule.min_lr_fraction},
    }
    unused = torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that the scheduler steps before the optimizer
        scheduler = get_scheduler(
            _NAMES[schedule.kind], unused, schedule.warmup_steps, n_steps, scheduler_specific_kwargs=particular.get(schedule.kind)
        )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return lambda step: lr * factor(step)
