"""Repeated steps: folded plans train the bits of the plain loop, and write the same files as unrolled plans."""

import random
import time

import pytest

from penstock.planner.check.check import check
from penstock.planner.lower.lower import folded_ops
from penstock.runtime.plan import PlanFile, Policy, Update, saves
from tests.edits import plan_by
from tests.lanes import mostly_slow
from tests.running import lines_of, make_home, penstock, plan_anew, plan_in, train, weights_sha
from tests.tiny import tiny_config
from tests.training import Remembering, clip_some_steps, differences, plan_of, semantics_of, trained


class Delayed(Remembering):
    rng = random.Random(3)

    def perform(self, index, op, step):
        if self.rng.random() < 0.1:
            time.sleep(self.rng.random() * 0.003)
        super().perform(index, op, step)


def folded_plan_of(config, semantics, policy):
    written = plan_of(config, semantics, policy)
    plan = plan_by(folded_ops, written.model, written.workload, semantics, policy)
    assert plan is not None
    check(plan)
    return plan


POLICIES = {
    "lean": Policy(update=Update.DEFERRED),
    "barrier, groups of two": Policy(accumulation_group=2, gradient_slots=2, prefetch_depth=2),
    "groups of three that spill": Policy(accumulation_group=3, spill_blocks=(1, 2), update=Update.DEFERRED, gradient_slots=3),
    "kept, resident, speculating": Policy(
        save=saves(all=(2,)), resident_blocks=(1, 5), speculate_blocks=(0, 2), update=Update.DEFERRED
    ),
    "shared boundaries": Policy(boundary_stride=3, update=Update.DEFERRED),
}


@mostly_slow(("model_type", "name"), [*(("llama", name) for name in POLICIES), ("qwen3_moe", "shared boundaries")])
def test_training_in_repetitions_is_the_plain_loop_bit_for_bit(model_type, name):
    overrides = (("num_hidden_layers", 4),)
    semantics = clip_some_steps(model_type, semantics_of(model_type, batch_size=18, seq_len=8), overrides)
    plan = folded_plan_of(tiny_config(model_type, **dict(overrides)), semantics, POLICIES[name])
    assert plan.repeat.times >= 3
    assert differences(trained(plan, Delayed)) == []


@pytest.mark.slow
def test_a_long_step_is_planned_checked_run_resumed_and_reported(tmp_path, monkeypatch):
    """Start with the folded plan and resume with the unrolled one, and vice versa: the files are equal."""
    home = make_home(tmp_path)
    sizes = ("--batch-size", "16", "--micro-batch", "1", "--policy", "megatrain-plus")
    written = plan_in(home, *sizes, name="written.json")
    monkeypatch.setattr("penstock.planner.lower.lower.FEWEST_FOLDED", 10)
    repeats = plan_anew(home, *sizes, name="repeats.json")
    assert PlanFile.read(written).plan.repeat is None
    assert PlanFile.read(repeats).plan.repeat is not None
    outputs = [penstock("check", path).output.partition(": ")[2] for path in (written, repeats)]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("valid: ")
    constant = ("--schedule", "constant")
    for out, first, second in (("a", repeats, written), ("b", written, repeats)):
        for plan, n_steps, options in ((first, 2, ()), (second, 4, ("--resume",))):
            result = train(home, plan, *constant, *options, out=out, steps=n_steps)
            assert result.exit_code == 0, result.output
    files = [home / out / "checkpoint-4" for out in ("a", "b")]
    assert weights_sha(files[0]) == weights_sha(files[1])
    assert [line["loss"] for line in lines_of(home, "a")] == [line["loss"] for line in lines_of(home, "b")]
    for page in ("page.html", "trace.json"):
        result = penstock("report", repeats, home / "b", "-o", home / page)
        assert result.exit_code == 0, result.output
