"""Learning rate schedules: same rates as transformers' schedulers."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.run_config import RunConfigError, RunRequest
from penstock.runtime.plan import PlanFile, Policy, Update
from penstock.runtime.plan.optimizer import RateGroup
from penstock.runtime.plan.train import parse_train
from penstock.settings import DataSettings, OptimizerSettings, RunSettings, ScheduleSettings
from penstock.training.inputs import with_defaults
from penstock.training.schedules import learning_rates, run_rates
from tests import reference
from tests.penstock.test_api import planned, train_new
from tests.running import one_line, succeeded, train, weights_sha
from tests.tiny import tiny_config
from tests.training import ADAMW, N_STEPS, Remembering, batches_of, differences, initial_masters, plan_of, semantics_of, trained

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


@pytest.mark.parametrize(
    "policy",
    [Policy(update=Update.DEFERRED), Policy(accumulation_group=4, device_blocks=(0, 1, 2, 3), update=Update.DEFERRED)],
    ids=["host", "device"],
)
def test_groups_of_parameters_have_the_bits_of_torchs_parameter_groups(policy: Policy) -> None:
    """Groups of rates by name, under a schedule, on the host and on the device."""
    semantics, config = semantics_of("qwen3"), tiny_config("qwen3", tie_word_embeddings=False)
    groups = (RateGroup("*norm*", lr=1e-2, weight_decay=0.3), RateGroup("*mlp*", lr=3e-4), RateGroup("*up_proj*", lr=1.0))
    fields = asdict(ADAMW) | {"groups": groups, "schedule": ScheduleSettings("linear")}
    rates = run_rates(OptimizerSettings(**fields), 5)
    machine = trained(plan_of(config, semantics, policy), lambda plan, batches, _, **how: Remembering(plan, batches, rates, **how))
    falling = [(5 - step) / 5 for step in range(N_STEPS)]
    shared = {"betas": (ADAMW.beta1, ADAMW.beta2), "eps": ADAMW.eps, "weight_decay": ADAMW.weight_decay}
    settings = [shared | {"lr": ADAMW.lr * share} for share in falling]
    by_name = [("norm", [1e-2 * share for share in falling], 0.3), ("mlp", [3e-4 * share for share in falling], 0.1)]
    batches = [*batches_of(config["vocab_size"], semantics.batch_size, semantics.seq_len)]
    expected = reference.train(config, semantics, initial_masters(config, semantics), batches, settings, by_name)
    assert differences(machine, expected) == []
    rates.fixed_lr = 2 * ADAMW.lr
    assert [group.lr for group in rates(3).groups] == pytest.approx([2e-2, 6e-4, 2.0]), "groups keep their ratio"


def test_groups_are_settings_and_flags_and_bind_a_resumed_run(home: Path) -> None:
    plan = planned(home)
    groups = [{"pattern": "*norm*", "lr_factor": 0.5, "weight_decay": 0.1}, {"pattern": "*mlp*", "lr": 2e-3}]
    how: dict[str, Any] = {"settings": {"optimizer.groups": groups}, "lr": 1e-3}
    by_program = train_new(plan, home / "data", out=home / "a", steps=2, **how)
    plain = train_new(plan, home / "data", out=home / "c", steps=2, lr=1e-3)
    flags = ["--lr-group", "*norm*=0.5x,decay=0.1", "--lr-group", "*mlp*=2e-3"]
    succeeded(train(home, plan.save(home / "plan.json"), *flags, out="b", steps=2))
    assert weights_sha(by_program.checkpoint) == weights_sha(home / "b" / "checkpoint-2") != weights_sha(plain.checkpoint)
    succeeded(train(home, home / "plan.json", *flags, "--resume", out="b", steps=3))
    one_line(train(home, home / "plan.json", "--resume", out="b", steps=4), 2, "optimizer")
    for text, words in (
        ("norm", "write PATTERN=RATE"),
        ("*gate_norm*=1", "no trained parameter's name"),
        ("*norm*=", "give lr"),
        ("*=x", "write PATTERN=RATE"),
    ):
        one_line(train(home, home / "plan.json", "--lr-group", text, out="d"), 2, words)


@pytest.mark.parametrize(
    ("train", "patterns", "message"),
    [
        ("lora:r=2", ["*layernorm*"], "matches no trained parameter's name"),
        ("names:*norm*", ["*mlp*"], "matches no trained parameter's name"),
        ("all", ["*lm_head*"], r"\(a tied weight has that of the embedding\)"),
        ("all", ["*", "*norm*"], r"'\*norm\*': earlier patterns match all its parameters, .*; put it first"),
        ("all", ["*norm*", "*norm*"], "earlier patterns match all"),
        ("all", ["*input_layernorm*", "*norm*"], None),
        ("lora:r=2", ["*lora_B*"], None),
    ],
)
def test_a_group_without_a_parameter_of_its_own_is_refused(train: str, patterns: list[str], message: str | None) -> None:
    fields = {"train": parse_train(train)} if train != "all" else {}
    plan = plan_of(tiny_config("qwen3", tie_word_embeddings=True), semantics_of("qwen3", **fields), Policy())
    groups = tuple(RateGroup(pattern, lr=1e-3) for pattern in patterns)
    settings = RunSettings(DataSettings("x"), optimizer=OptimizerSettings(groups=groups))
    with nullcontext() if message is None else pytest.raises(RunConfigError, match=message):
        with_defaults(RunRequest(settings, PlanFile(plan, None)))
