"""Inference: a forward plan performed over a training machine's arenas; the caller's head gets what the last layer made."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from runtime.batch import Batch
from runtime.host.copies import Copies
from runtime.host.memory import Arenas
from runtime.layers.views import Views, Weights
from runtime.plan import Kind, Lane, Op, Plan

from .blocks import Templates
from .compute import Inputs


@dataclass(frozen=True, slots=True)
class LastHidden:
    """A micro-batch as the last layer leaves it. Views of slots: what is to outlive them must be another tensor."""

    templates: Templates
    weights: Weights  # the head's
    hidden_BTD: torch.Tensor
    targets_BT: torch.Tensor
    step: int
    micro_batch: int


Head = Callable[[LastHidden], None]  # called on the thread of the lane that computes, in its stream


class Abandoned(Exception):
    """The run was asked to end during a forward, whose result is not there."""


class Inference:
    """The ops of a forward plan. No step of training sees anything of it, and nothing is left behind."""

    def __init__(
        self,
        plan: Plan,
        arenas: Arenas,
        templates: Templates,
        batches: Callable[[int], Batch],
        head: Head | None,
        rank: int = 0,
        gather: Callable[[Op], None] | None = None,
    ) -> None:
        """`batches` gives a step's tokens on the device. Several ranks `gather` weights; one without a head does only that."""
        self.templates, self.head = templates, head
        self._copies, self._gather = Copies(plan, arenas, rank), gather
        self._views, self._inputs = Views(plan, arenas), Inputs(templates, batches)
        self._head_block = len(plan.workload.blocks) - 1

    def at_work(self, lane: Lane) -> AbstractContextManager[None]:
        return self.templates.evaluating() if lane is Lane.GPU else nullcontext()

    def perform(self, index: int, op: Op, step: int) -> None:
        if op.kind is Kind.LOAD:
            self._copies.load(op)
        elif op.kind is Kind.GATHER:
            assert self._gather is not None
            self._gather(op)
        elif op.kind is Kind.DEQUANTISE:
            self._views.unpack(op)
        elif self.head is not None:
            assert op.kind is Kind.FORWARD, "a forward plan has no other ops"
            self._forward(op, step, self.head)

    def result(self, step: int, loss_is_there: Callable[[], None]) -> None:
        return None  # the head has all that there is

    def _forward(self, op: Op, step: int, head: Head) -> None:
        m, views, inputs = op.micro_batch, self._views, self._inputs
        assert m is not None
        weights = views.weights(op.block, op["weights"], op.get("trained"))
        inputs.begin(step)
        if op.block == self._head_block:
            head(LastHidden(self.templates, weights, views.activation(op["x"], m), inputs.of(m).targets, step, m))
        elif op.block == 0:
            views.activation(op["y"], m).copy_(inputs.embed(weights, m))
        else:
            hidden_BTD = self.templates.layer(op.block, weights, views.activation(op["x"], m), inputs.of_layer(op.block, m))
            views.activation(op["y"], m).copy_(hidden_BTD)
