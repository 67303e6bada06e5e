"""Compute on the device: forward, loss and backward of one block, and what autograd keeps between them."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from penstock.runtime.batch import Batch, PreparedBatches, positions_of
from penstock.runtime.host.memory import Arenas
from penstock.runtime.layers.recompute import Graph, Replay
from penstock.runtime.layers.split import Call
from penstock.runtime.layers.views import Shelf, Spot, Views, Weights
from penstock.runtime.plan import Op, Plan, Slot
from penstock.runtime.plan.workload import Saved

from .blocks import Templates, op_seed


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of a step, summed on the device. The host reads none of them before the step is over."""

    n_supervised: int
    n_losses: int  # of which the step's is the mean
    total: torch.Tensor  # fp64
    each: list[torch.Tensor]  # of every micro-batch, where there are other ranks to tell


@dataclass(frozen=True, slots=True)
class LastHidden:
    """A micro-batch after the last layer. Its tensors are views of slots: copy what must outlive them."""

    templates: Templates
    weights: Weights  # the head's
    hidden_BTD: torch.Tensor
    targets_BT: torch.Tensor
    step: int
    micro_batch: int
    extras: Mapping[str, torch.Tensor]


Head = Callable[[LastHidden], None]  # called on the thread of the lane that computes, in its stream


class Compute:
    """The ops of the gpu lane that compute. Only that lane's thread may use it."""

    def __init__(
        self,
        plan: Plan,
        arenas: Arenas,
        templates: Templates,
        batches: PreparedBatches,
        seed: int,
        rank: int = 0,
        head: Head | None = None,
    ) -> None:
        """`batches` gives this rank's tokens of a step on the device. `head`: called with the last layer's output, for a forward
        plan, which has no backward."""
        self._head, self._head_block = head, len(plan.workload.blocks) - 1
        self._first_trained = plan.workload.first_trained if head is None else len(plan.workload.blocks)
        self._first = rank * plan.semantics.n_micro_batches  # micro-batch of the step that is this rank's first
        self.plan, self.arenas, self.seed = plan, arenas, seed
        # What dropout draws from. Seeding it is the host's own affair: no device is waited for
        on = templates.device
        self._generator = torch.default_generator if on.type == "cpu" else torch.cuda.default_generators[on.index]
        self.losses: dict[int, Losses] = {}  # of the steps that have begun, until they are taken
        self.templates, self._views, self.inputs = templates, Views(plan, arenas, templates.split.width), Inputs(templates, batches)
        self._shelves: dict[tuple[int, int], Shelf] = {}  # what forwards save, if it goes to the host, by block and micro-batch
        self._graphs: dict[tuple[int, int], Graph] = {}  # forwards whose backward is to come, likewise
        self._of_sides: dict[int, dict[tuple[int, int], torch.Tensor]] = {}  # gradients that go back to a micro-batch's embedding
        self.unpack = self._views.unpack
        self._site: tuple[Slot, Slot] | None = None  # of the backward that is running: the slots of weights and input

    def at_work(self) -> AbstractContextManager[None]:
        """Context of all ops of a run. Drops what a run that failed within a step has left."""
        self.inputs.batch = None
        self.losses.clear()
        if (balance := self.templates.balance) is not None:
            balance.forget()
        self._site = None
        self._graphs.clear()
        self._of_sides.clear()
        self._shelves.clear()
        return nullcontext() if self._head is None else self.templates.evaluating()

    def _begin(self, step: int) -> None:
        if (batch := self.inputs.begin(step)) is not None and self._head is None:
            total = torch.zeros((), dtype=torch.float64, device=batch.input_ids.device)
            n_supervised = batch.n_supervised
            self.losses[step] = Losses(n_supervised, self.plan.semantics.n_losses(n_supervised, batch.n_answers), total, [])

    def _seed(self, step: int, op: Op) -> None:
        if (balance := self.templates.balance) is not None and op.micro_batch is not None:
            balance.at = op.micro_batch, op.block
        self._generator.manual_seed(op_seed(self.seed, step, self._first + (op.micro_batch or 0), op.block))

    def _at(self, op: Op, slot: Slot) -> torch.Tensor:
        return self._views.activation(slot, op.micro_batch or 0)

    def _weights(self, op: Op) -> Weights:
        return self._views.weights(op.block, op["weights"], op.get("trained"))

    def forward(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        m, weight_slot, has_backward = op.micro_batch, op["weights"], op.block >= self._first_trained
        if self._head is None:  # else nothing is drawn
            self._seed(step, op)
        elif op.block == self._head_block:
            batch, hidden_BTD = self.inputs.of(m), self._at(op, op["x"])
            self._head(LastHidden(self.templates, self._weights(op), hidden_BTD, batch.targets, step, m, batch.extras))
            self.inputs.passed.pop(m, None)
            return
        if op.block == 0:
            self._begin(step)
            weights = self._views.leaves(op.block, weight_slot)
            with torch.set_grad_enabled(has_backward), self._keeping(op.block, weight_slot):
                output_BTD = self.inputs.embed(weights, m)
            if has_backward:
                self._graphs[0, m] = _graph(output_BTD, [], weights, self.inputs.cut(m))
        elif not has_backward or (remembering := self._remembering(op, step, weight_slot)) is None:
            hidden_BTD = self._at(op, op["x"])
            output_BTD = self.templates.layer(op.block, self._weights(op), hidden_BTD, self.inputs.passed[m][op.block - 1])
        else:
            with remembering:
                output_BTD = self._with_graph(op, m)
        self._at(op, op["y"]).copy_(output_BTD.detach())

    def _with_graph(self, op: Op, m: int) -> torch.Tensor:
        weights = self._views.leaves(op.block, op["weights"], op.get("trained"))
        hidden_BTD = self._at(op, op["x"]).requires_grad_()
        inputs = self.inputs.passed[m][op.block - 1]
        with torch.enable_grad():
            output_BTD = self.templates.layer(op.block, weights, hidden_BTD, inputs)
        self._graphs[op.block, m] = _graph(output_BTD, [hidden_BTD, *inputs.sides.values()], weights, dict.fromkeys(inputs.sides))
        return output_BTD

    def _remembering(self, op: Op, step: int, weight_slot: Slot) -> AbstractContextManager[None] | None:
        """Hooks for a layer's forward; None if its graph is kept already."""
        saved = self.plan.policy.saved(op.block)
        if (op.block, op.micro_batch) in self._graphs:  # of a boundary that was dropped and is computed again
            return None
        if saved is Saved.ALL:
            return self._keeping(op.block, weight_slot)
        shelf = None
        if (slot := op.get("saved")) is not None:
            moved = self.plan.recompute(op.block, op.micro_batch).slot_bytes  # of the slot, which may be larger; the rest stays
            shelf = self._shelves[op.block, op.micro_batch or 0] = Shelf(self.arenas.raw(slot)[:moved])
        return Replay(saved, lambda: self._again(op, step), shelf).recording()

    def _keeping(self, block: int, weight_slot: Slot) -> AbstractContextManager[None]:
        """Hooks under which autograd saves a weight as its spot, to be found in whichever slot holds the block at backward."""
        copies = dict[int, torch.Tensor]()  # of the embedding's weights, which are not there in its backward

        def pack(tensor: torch.Tensor) -> torch.Tensor | Spot:
            offset_bytes = self.arenas.offset_in(weight_slot, tensor)
            if offset_bytes is not None and block == 0:
                return copies.setdefault(offset_bytes, tensor.detach().clone()).as_strided(tensor.shape, tensor.stride(), 0)
            return tensor.detach() if offset_bytes is None else Spot(offset_bytes, tensor.dtype, tensor.shape, tensor.stride())

        def unpack(packed: torch.Tensor | Spot) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            assert self._site is not None, "a kept graph used weights while no backward was running"
            return packed.view(self.arenas.raw(self._site[0]))

        return saved_tensors_hooks(pack, unpack)

    def _again(self, op: Op, step: int) -> None:
        """Recompute a layer's forward during its backward, with weights and input in their slots of that time."""
        assert self._site is not None
        self._seed(step, op)
        weights = self._views.leaves(op.block, self._site[0], op.get("trained"))
        hidden_BTD = self._at(op, self._site[1]).requires_grad_()
        self.templates.layer(op.block, weights, hidden_BTD, self.inputs.passed[op.micro_batch or 0][op.block - 1], again=True)

    def backward(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        if op.block:
            self._site = (op["weights"], op["x"])
        if (slot := op.get("saved")) is not None:
            self._shelves.pop((op.block, op.micro_batch)).slot = self.arenas.raw(slot)
        graph = self._graphs.pop((op.block, op.micro_batch))
        sides = self._of_sides.setdefault(op.micro_batch, {})
        # In the embedding's the last layer's first, as autograd adds what several layers make of one
        keys = [] if op.block else sorted(sides, reverse=True)
        edges, of_edges = [graph.edge, *(graph.sides[key] for key in keys)], [self._at(op, op["y"]), *map(sides.pop, keys)]
        gradients = torch.autograd.grad(edges, graph.inputs, of_edges, allow_unused=True)
        del of_edges
        self._site = None
        if op.block == self._first_trained:
            self.inputs.passed.pop(op.micro_batch, None)
        if op.block:
            assert gradients[0] is not None
            self._at(op, op["x"]).copy_(gradients[0])
            sides |= {(op.block, j): g for j, g in zip(graph.sides, gradients[1:], strict=False) if g is not None}
            gradients = gradients[1 + len(graph.sides) :]
        of_weights = {name: gradient for name, gradient in zip(graph.names, gradients, strict=True) if gradient is not None}
        self._add(op, *self._running(op), of_weights)

    def loss(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        self._seed(step, op)
        self._begin(step)
        hidden_BTD, losses, batch = self._at(op, op["x"]), self.losses[step], self.inputs.of(op.micro_batch)
        running, begins = self._running(op)
        name = self.templates.head.weight
        head = running.get(name)
        # A micro-batch's own gradient is the sum over its tiles: with a running sum of earlier ones it needs a place for itself
        own = head if head is None or begins else torch.zeros_like(head)
        if head is not None and begins:
            head.zero_()
        of = self._weights(op), hidden_BTD, batch.targets, losses.n_losses, own
        loss_sum, hidden_gradient, found = self.templates.head.loss(*of, batch.extras)
        if (balance := self.templates.balance) is not None:
            loss_sum += balance.close(op.micro_batch) * losses.n_losses
        losses.total.add_(loss_sum)
        if self.plan.semantics.ranks > 1:
            losses.each.append(loss_sum)
        hidden_BTD.copy_(hidden_gradient)
        if own is not None and not begins:
            found[name] = own
        self._add(op, running, begins, found, in_place={name} if begins else ())

    def _running(self, op: Op) -> tuple[Weights, bool]:
        """The running sum of a micro-batch's gradients, and True if they begin it at zero; a single micro-batch's sum is its
        gradient. An unused weight (of an expert without tokens) has gradient zero."""
        plan, total = self.plan, op.get("sum")
        begins = total is None or plan.semantics.begins_sum(op.micro_batch or 0)
        if (slot := total or op.get("gradient")) is None:
            return {}, begins
        dtype = plan.gradient_dtype(op.block) if total is None else plan.sum_dtype(op.block)
        return self._views.gradients(op.block, slot, dtype), begins

    def _add(self, op: Op, running: Weights, begins: bool, found: Weights, in_place: Collection[str] = ()) -> None:
        """Add gradients to the running sum, and it to the sums `into`; the last sum is rounded into `gradient`. A first gradient is
        added to zero in one pass, which turns -0.0 into +0.0. Gradients `in_place` are there already."""
        assert found.keys() <= running.keys()
        for name, view in running.items():
            if name in found:
                torch.add(found[name], 0.0 if begins else view, out=view)
            elif begins and name not in in_place:
                view.zero_()
        for slot in op.every("into"):
            total = self._views.gradients(op.block, slot, "fp32")
            for name, view in total.items():
                view += running[name]
            running = total
        out = op.get("gradient")
        if out is not None and op.get("sum") is not None:
            for name, view in self._views.gradients(op.block, out, self.plan.gradient_dtype(op.block)).items():
                view.copy_(running[name])


def _graph(output_BTD: torch.Tensor, inputs: list[torch.Tensor], weights: Weights, sides: dict[Any, Any]) -> Graph:
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    return Graph(get_gradient_edge(output_BTD), [*inputs, *trained.values()], list(trained), sides)


class Inputs:
    """Tokens of a step; and masks and positions, recorded with the embedding and used by each layer. The model's own forward makes
    masks and positions and reads them on the host, which on a GPU waits for all issued work. It runs for the first two
    micro-batches of a shape; if these are equal, and the embedding is a lookup, the others only look up. Packed documents have
    positions of their own."""

    def __init__(self, templates: Templates, batches: PreparedBatches) -> None:
        self.templates, self._batches, self.prepare = templates, batches, batches.prepare
        self._micro_batch = templates.semantics.micro_batch
        self.batch: tuple[int, Batch] | None = None  # of the step at work
        self.first: dict[int, list[Call]] = {}  # by sequences: what the first such micro-batch's layers were passed
        self.alike: set[int] = set()  # of which the second one's were the same, and its embedding no more than the weight's rows
        self.passed: dict[int, list[Call]] = {}  # by micro-batch, until it is done

    def begin(self, step: int) -> Batch | None:
        """The batch of a step that begins now; None if it has begun."""
        if self.batch is not None and self.batch[0] == step:
            return None
        self.batch = (step, self._batches(step))
        return self.batch[1]

    def of(self, m: int) -> Batch:
        """The sequences of a micro-batch of the step that has begun."""
        assert self.batch is not None
        return self.batch[1].part(slice(m * self._micro_batch, (m + 1) * self._micro_batch))

    def embed(self, weights: Weights, m: int) -> torch.Tensor:
        """The first layer's input; records the layers' other arguments."""
        batch = self.of(m)
        tokens_BT, n_sequences = batch.input_ids, len(batch.input_ids)
        if batch.document_tokens is not None:
            if batch.positions_BT is None:
                batch = replace(batch, positions_BT=positions_of(batch.document_tokens))
            if n_sequences not in self.first:
                with torch.no_grad():
                    self._shared(n_sequences, self.templates.embed(weights, tokens_BT)[1])
            hidden_BTD, self.passed[m] = self.templates.embed_packed(weights, batch, self.first[n_sequences])
            return hidden_BTD
        if n_sequences in self.alike:
            self.passed[m] = self.first[n_sequences]
            return self.templates.looked_up(weights, tokens_BT)
        is_first = n_sequences not in self.first
        hidden_BTD, passed = self.templates.embed(weights, tokens_BT)
        self.passed[m] = passed = self._shared(n_sequences, passed)
        pairs = zip(passed, self.first[n_sequences], strict=True)
        is_alike = not is_first and all(new is old for a, b in pairs for new, old in zip(a.leaves, b.leaves, strict=True))
        if is_alike and torch.equal(hidden_BTD, self.templates.looked_up(weights, tokens_BT)):
            self.alike.add(n_sequences)
        return hidden_BTD

    def _shared(self, n_sequences: int, passed: list[Call]) -> list[Call]:
        """Calls of layers, with equal tensors replaced by those of the first such micro-batch, of which all but what depends on its
        tokens is kept."""
        if n_sequences not in self.first:
            of_tokens = self.templates.split.sides
            self.first[n_sequences] = [call.with_leaves(dict.fromkeys(at)) for call, at in zip(passed, of_tokens, strict=True)]
        firsts = zip(passed, self.first[n_sequences], strict=True)
        return [new.with_leaves({j: t for j, t in enumerate(old.leaves) if _same(new.leaves[j], t)}) for new, old in firsts]

    def cut(self, m: int) -> dict[tuple[int, int], GradientEdge]:
        """Gradient edges of layers' differentiable arguments, by layer and index; the layers get autograd leaves instead."""
        calls = self.passed[m]
        self.passed[m] = [call.with_leaves({j: t.detach().requires_grad_() for j, t in call.sides.items()}) for call in calls]
        return {(i, j): get_gradient_edge(t) for i, call in enumerate(calls, start=1) for j, t in call.sides.items()}


def _same(new: Any, old: Any) -> bool:
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        return new is old or (new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old))
    return bool(new is old or (type(new) is type(old) and new == old))
