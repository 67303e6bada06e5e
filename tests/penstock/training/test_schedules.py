"""Learning rate schedules: same rates as transformers' schedulers."""

import pytest
import torch
import transformers

from penstock.run_config import RunConfigError
from penstock.settings import OptimizerSettings, ScheduleSettings
from penstock.training.schedules import learning_rates

LR = 3e-4
MIN_LR, WSD = {"kind": "cosine", "min_lr_fraction": 0.1}, {"kind": "warmup-stable-decay", "min_lr_fraction": 0.2}
SCHEDULES = [
    ({"kind": "constant"}, lambda o, w, n: transformers.get_constant_schedule_with_warmup(o, w)),
    ({"kind": "linear"}, transformers.get_linear_schedule_with_warmup),
    ({"kind": "cosine"}, transformers.get_cosine_schedule_with_warmup),
    (MIN_LR, lambda o, w, n: transformers.get_cosine_with_min_lr_schedule_with_warmup(o, w, n, min_lr_rate=0.1)),
    ({"kind": "warmup-stable-decay", "decay_steps": 1}, lambda o, w, n: transformers.get_wsd_schedule(o, w, 1, n)),
    (WSD, lambda o, w, n: transformers.get_wsd_schedule(o, w, {8: 1, 40: 4, 101: 10}[n], n, min_lr_ratio=0.2)),
]


def stepped(make, n_steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler, rates = make(optimizer), []
    for _ in range(n_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates_of(n_steps, **schedule):
    schedule_of = learning_rates(OptimizerSettings(lr=LR, schedule=ScheduleSettings(**schedule)), n_steps)
    return [schedule_of(step) for step in range(n_steps)]


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("n_steps", [8, 40, 101])
@pytest.mark.parametrize(("schedule", "make"), SCHEDULES, ids=[" ".join(map(str, s.values())) for s, _ in SCHEDULES])
def test_every_step_has_the_rate_of_transformers_scheduler(schedule, make, warmup_steps, n_steps):
    assert rates_of(n_steps, warmup_steps=warmup_steps, **schedule) == stepped(lambda o: make(o, warmup_steps, n_steps), n_steps)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"warmup_steps": 10}, "warm-up takes 10 steps .*--warmup-steps.* the run has 10"),
        ({"kind": "warmup-stable-decay", "warmup_steps": 5, "decay_steps": 6}, "decay 6 .* the run has 10"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(schedule, words):
    with pytest.raises(RunConfigError, match=words):
        rates_of(10, **schedule)
