"""Machines for tests of forward passes between training steps, with fault injection in forward plans too, and held-out data."""

import torch

from penstock.planner.check.check import check
from penstock.runtime.batch import Batch
from penstock.runtime.machines.torch_machine import LaneMachine
from penstock.runtime.plan import Policy, Update, saves

from . import reference
from .late_streams import Poisoned
from .training import Hostile, initial_masters, machine_for, plan_of, released_slots, semantics_of

POLICIES = {
    "one by one": Policy(),
    "kept": Policy(save=saves(all=(1,)), accumulation_group=4, resident_blocks=(0, 2)),
    "one group": Policy(accumulation_group=4, prefetch_depth=2),
    "strided": Policy(accumulation_group=2, boundary_stride=2, update=Update.DEFERRED),
    "state on the device": Policy(accumulation_group=4, device_blocks=(1, 2), update=Update.DEFERRED),
    "spilled": Policy(accumulation_group=2, spill_blocks=(0, 1), resident_blocks=(3,)),
}


def sequences_of(rows: Batch):
    """Return a function from a number to the batch of that one sequence, as held-out data."""

    def batch(number: int) -> Batch:
        row = slice(number, number + 1)
        return Batch(rows.input_ids[row], rows.targets[row], rows.document_tokens and rows.document_tokens[row])

    return batch


class OfAnyPlan:
    """Mixin: apply the delays and poison of a training machine to its forward plans, too."""

    def forwards(self, plan, batches, head):
        machine = super().forwards(plan, batches, head)
        machine.__class__ = _Forward  # changing the class avoids a reference cycle, unlike assigning a bound method
        machine.trained, machine.released = self, released_slots(plan)
        return machine


class _Forward(LaneMachine):
    def work(self, index, op, step):
        self.trained.around(super().work, self.released, index, op, step)


class HostileToBoth(OfAnyPlan, Hostile):
    pass


class LateForBoth(OfAnyPlan, Poisoned):
    pass


def machine_of(config, semantics, policy, machine_type=HostileToBoth, **kwargs):
    plan = plan_of(config, semantics, policy)
    check(plan)
    return machine_for(plan, machine_type, **kwargs)


def watch_forwards(machine, report):
    """Call `report(op, step)` before each op of a forward plan."""
    forwards = machine.forwards

    def watched(*args):
        forward = forwards(*args)
        perform = forward.perform
        forward.perform = lambda index, op, step: (report(op, step), perform(index, op, step))[1]
        return forward

    machine.forwards = watched


def exact(model_type: str, **fields):
    return semantics_of(model_type, **({"compute_dtype": "fp32", "gradient_dtype": "fp32"} | fields))


def sequences(vocab_size: int, n: int, seq_len: int = 16, seed: int = 3) -> Batch:
    """Return random tokens with 30 % unsupervised targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (n, seq_len), generator=generator)
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    return Batch(tokens, targets)


def resident(config, semantics) -> torch.nn.Module:
    """Return the model of transformers with the initial weights, in evaluation mode."""
    model = reference.build(config, semantics, torch.float32).eval()
    model.load_state_dict(initial_masters(config, semantics), strict=False)
    model.tie_weights()
    return model
