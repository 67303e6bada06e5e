"""Gradients summed in groups have the bits of a balanced tree of groups under any policy."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.checkpoint import load_state, refuse_another
from penstock.planner.check.shape import Shape
from penstock.planner.lower.lower import lower
from penstock.runtime.errors import CheckpointError, PlanError
from penstock.runtime.plan import Policy, Semantics
from tests.running import make_home, one_line, penstock, plan_in, train
from tests.strategies import MODEL, PROFILE, small_workload


@given(st.integers(0, 5), st.integers(1, 5))
def test_a_sum_waits_for_its_right_part_and_no_longer(log_groups, of_a_group):
    """Compare with a stack: complete neighbours are joined at once. The checker's result is equal."""
    n_groups = 1 << log_groups
    semantics = Semantics(seq_len=4, batch_size=n_groups * of_a_group, micro_batch=1, sum_groups=n_groups)
    shape = Shape(lower(MODEL, small_workload(1, tied=False), semantics, Policy(), PROFILE))
    stack, deepest = list[range](), 0
    for m in range(semantics.n_micro_batches):
        begins = not stack or len(stack[-1]) % of_a_group == 0
        assert semantics.begins_sum(m) == begins
        if begins:
            stack.append(range(m, m))
        stack[-1] = range(stack[-1].start, m + 1)
        deepest = max(deepest, len(stack))
        assert semantics.sum_level(m) == len(stack) - 1
        together = [stack[-1]]
        while len(stack) > 1 and len(stack[-1]) == len(stack[-2]):
            stack[-2:] = [range(stack[-2].start, m + 1)]
            together.append(stack[-1])
        assert semantics.n_joined(m) == len(together) - 1
        assert shape.summed_with(m) == together
    assert stack == [range(semantics.n_micro_batches)]
    assert semantics.n_sums >= deepest


def test_groups_that_a_step_cannot_have_are_one_line(tmp_path):
    with pytest.raises(PlanError, match="12 micro-batches has no 8 sum groups; choose a power of two that divides them"):
        lower(MODEL, small_workload(1, tied=False), Semantics(4, 12, 1, sum_groups=8), Policy(), PROFILE)
    home = make_home(tmp_path)
    for sizes in (("--sum-groups", 3), ("--sum-groups", 4, "--micro-batch", 2)):
        result = penstock("plan", home / "model", "--machine", "cpu-2core", "--seq-len", 32, "--batch-size", 4, *sizes)
        one_line(result, 2, f"no {sizes[1]} sum groups; choose a power of two that divides them")


def test_a_run_is_resumed_with_the_same_sum_groups_only(tmp_path):
    """A checkpoint without groups has one."""
    home = make_home(tmp_path)
    plan, second = (plan_in(home, "--policy", "megatrain", "--micro-batch", 1, "--sum-groups", n, name=f"{n}.json") for n in (4, 2))
    assert penstock("check", plan).exit_code == 0
    assert train(home, plan, steps=2).exit_code == 0
    one_line(train(home, second, "--resume", steps=4), 2, "of another meaning of a step", "sum_groups")
    state = load_state(home / "out" / "checkpoint-2")
    now = state.fields["semantics"]
    assert now["sum_groups"] == 4
    older = replace(state, fields={"semantics": {name: value for name, value in now.items() if name != "sum_groups"}})
    refuse_another(older, {"semantics": now | {"sum_groups": 1}})
    with pytest.raises(CheckpointError, match="sum_groups"):
        refuse_another(older, {"semantics": now})
