"""What does a forward without a backward compute?"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from runtime.batch import Batch
from runtime.executor import Stop, execute
from runtime.host.memory import Arenas
from runtime.machine import Machine
from runtime.plan import Op, Plan

from .blocks import Templates, Weights
from .layer_inputs import NotedInputs
from .tokens import StepTokens
from .views import Views


class Head(Protocol):
    """What is made of the last layer's output. Called on the thread of the lane that computes, in its stream."""

    def __call__(
        self,
        templates: Templates,
        weights: Weights,
        hidden_BTD: torch.Tensor,
        targets_BT: torch.Tensor,
        step: int,
        micro_batch: int,
    ) -> None:
        """`weights` and `hidden_BTD` are views of slots: what is to outlive the call must be another tensor."""


class ForwardMachine(Machine, Protocol):
    """A machine that performs forward plans between steps of training, in the same arenas."""

    plan: Plan

    def forwards(self, plan: Plan, batches: Callable[[int], Batch], head: Head) -> AbstractContextManager[None]:
        """Until the context ends the machine performs this forward plan instead of its own. No lane may be at work."""


class Abandoned(Exception):
    """The run was asked to end; nobody waits for what would have been found."""


def perform(plan: Plan, machine: ForwardMachine, n_passes: int, stop: Stop | None) -> None:
    """So many passes of a forward plan, within its `forwards`; Abandoned when the run is asked to end meanwhile."""
    execute(plan, machine, n_passes, stop=stop)
    if stop is not None and stop.is_requested:
        raise Abandoned


class Inference:
    """The ops of the gpu lane of a forward plan. Nothing of a step of training is seen by it, nor is anything left behind."""

    def __init__(self, plan: Plan, arenas: Arenas, templates: Templates, batches: Callable[[int], Batch], head: Head) -> None:
        """`batches` gives a step's tokens on the device."""
        self.templates, self.head = templates, head
        self._views = Views(plan, arenas)
        self._tokens = StepTokens(plan.semantics, batches)
        self._inputs = NotedInputs(templates)
        self._head_block = len(plan.workload.blocks) - 1

    def forward(self, op: Op, step: int) -> None:
        m = op.micro_batch
        assert m is not None
        weights, views = self._views.weights(op.block, op["weights"]), self._views
        self._tokens.begin(step)
        if op.block == self._head_block:
            self.head(self.templates, weights, views.activation(op["x"], m), self._tokens.of(m).targets_BT, step, m)
            return
        if op.block == 0:
            tokens = self._tokens.of(m)
            output_BTD = self._inputs.embed(weights, m, tokens.input_ids_BT, tokens.documents)
        else:
            output_BTD = self.templates.layer(op.block, weights, views.activation(op["x"], m), self._inputs.of(op.block, m))
        views.activation(op["y"], m).copy_(output_BTD)
