"""Settled steps: clipped, skipped or taken, with speculation, at any time of the host's update."""

import dataclasses
import math

import torch

from penstock.runtime.batch import Batch
from penstock.runtime.executor import execute
from penstock.runtime.host.norms import clip_factor
from penstock.runtime.plan import Kind, Policy, Update
from tests import reference, training
from tests.lanes import mostly_slow
from tests.tiny import tiny_config
from tests.training import N_STEPS, Hostile, differences, same_bits, same_state, semantics_of, settings_of_torch, state_of, streamed


def test_an_infinite_loss_is_skipped_by_both():
    """One logit overflows in the second step: the plain loop computes the same norm and skips the same step."""
    semantics = semantics_of("llama", on_nonfinite="skip", compute_dtype="fp32", batch_size=2)
    config = tiny_config("llama", vocab_size=97)
    plan = training.plan_of(config, semantics, Policy(update=Update.DEFERRED, accumulation_group=2))
    batches = [Batch(b.input_ids.clone().clamp(max=95), b.targets) for b in training.batches_of(96, 2, 16)]
    batches[1].input_ids[1, 3] = 96  # a token of this step only
    machine = training.machine_for(plan, Hostile, batches)
    embedding = machine.host.param_state(plan.workload.blocks[0].parameters[0]).master.values().view(97, 32)
    embedding[96] = float("inf")
    start = state_of(machine)[0]
    execute(plan, machine, N_STEPS)
    expected = reference.train(config, semantics, start, batches, settings_of_torch(N_STEPS))
    assert [machine.results[step].skipped for step in range(N_STEPS)] == [False, True, False]
    assert not math.isfinite(expected.norms[1])
    for got, wanted in zip(state_of(machine), (expected.masters, expected.exp_avg, expected.exp_avg_sq), strict=True):
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


def test_a_norm_at_the_threshold_is_clipped_as_torch_clips_it():
    """A far smaller norm is not clipped: the bits equal those of a plan without clipping."""
    config = tiny_config("llama")
    free = streamed(config, semantics_of("llama", clip_norm=None), Policy())
    assert differences(streamed(config, semantics_of("llama", clip_norm=free.results[0].grad_norm), Policy())) == []
    assert same_state(free, streamed(config, semantics_of("llama", clip_norm=1e6), Policy(update=Update.DEFERRED)))
    gradient = torch.nn.Parameter(torch.zeros(1))
    gradient.grad = torch.ones(1)
    torch.nn.utils.clip_grad_norm_([gradient], 1.0)
    assert clip_factor(1.0, 1.0) == float(gradient.grad) < 1.0


SPECULATING = [  # each layout of a state in its slot
    (Policy(speculate_blocks=(0, 1, 2, 3)), {}),
    (Policy(speculate_blocks=(1, 3)), {}),
    (Policy(speculate_blocks=(0, 2)), {}),
    (Policy(speculate_blocks=(1, 2)), {"master_dtype": "bf16"}),
    (Policy(speculate_blocks=(1, 2, 3)), {"compute_dtype": "fp32"}),
]


@mostly_slow(("policy", "fields"), SPECULATING)
def test_a_speculation_taken_or_left_is_the_plain_loop(policy, fields):
    """State and shadow exchange places if the speculation holds."""
    semantics = training.clip_some_steps("llama", semantics_of("llama", **fields))
    policy = dataclasses.replace(policy, update=Update.DEFERRED, accumulation_group=4)
    machine = streamed(tiny_config("llama"), semantics, policy, machine_type=Settling)
    clipped = {step for step in range(N_STEPS) if machine.results[step].grad_norm > semantics.clip_norm}
    assert 0 < len(clipped) < N_STEPS
    assert {step for step, _, moved in machine.settled if not moved} == clipped
    assert {step for step, _, moved in machine.settled if moved} == set(range(N_STEPS)) - clipped
    assert {block for _, block, _ in machine.settled} == set(policy.speculate_blocks)
    assert differences(machine) == []


class Settling(Hostile):
    """Record for each settle if the state moved; if so, both places must be unchanged."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.settled = []

    def perform(self, index, op, step):
        if op.kind is not Kind.SETTLE:
            super().perform(index, op, step)
            return
        state, shadow = self.arenas.raw(op["state"]), self.arenas.raw(op["shadow"])
        state_before, shadow_before = state.clone(), shadow.clone()
        super().perform(index, op, step)
        now = self.arenas.raw(op["state"])
        moved = now.data_ptr() != state.data_ptr()
        if moved:
            assert now.data_ptr() == shadow.data_ptr()
            assert torch.equal(now, shadow_before)
            poisoned = op["shadow"] in self.released[index]
            assert bool((state == 0xFF).all()) if poisoned else torch.equal(state, state_before)
        self.settled.append((step, op.block, moved))
