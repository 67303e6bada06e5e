"""Forward, loss and backward ops of blocks on the device, and their autograd graphs."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from penstock.runtime.batch import Batch, PreparedBatches, positions_of
from penstock.runtime.errors import StepError
from penstock.runtime.host.memory import DTYPE, Arenas
from penstock.runtime.layers.layer_chain import Call
from penstock.runtime.layers.recompute import Graph, Replay
from penstock.runtime.layers.views import Shelf, Spot, Views, Weights
from penstock.runtime.plan import Op, Plan, Slot
from penstock.runtime.plan.workload import Saved

from .blocks import Templates, op_seed

ROUNDED_ELEMENTS = 2**24  # at a time: a temporary of 32 MB, many times the cost of a launch


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of a step, summed on the device. The host reads them after the step."""

    n_supervised: int
    n_losses: int  # divisor of the step's mean loss
    total: torch.Tensor  # fp64
    by_micro_batch: list[torch.Tensor]  # empty with a single rank


@dataclass(frozen=True, slots=True)
class LastHidden:
    """Micro-batch after the last layer. Tensors are views of slots, valid during the op."""

    templates: Templates
    weights: Weights  # the head's
    hidden_BTD: torch.Tensor
    targets_BT: torch.Tensor
    step: int
    micro_batch: int
    extras: Mapping[str, torch.Tensor]


Head = Callable[[LastHidden], None]  # called on the gpu lane's thread and stream


class Compute:
    """Compute ops of the gpu lane; used by that lane's thread alone."""

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
        """`batches`: returns a step's tokens for this rank. `head`: called with the last hidden states in forward plans."""
        self._head, self._head_block = head, len(plan.workload.blocks) - 1
        self._first_trained = plan.workload.first_trained if head is None else len(plan.workload.blocks)
        self._first = rank * plan.semantics.n_micro_batches  # this rank's first micro-batch in the step
        self.plan, self.arenas, self.seed = plan, arenas, seed
        # Generator of dropout. Seeding it does not synchronise with the device
        device = templates.device
        self._generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        self.losses: dict[int, Losses] = {}  # by step, until read
        self.templates, self._views, self.inputs = templates, Views(plan, arenas, templates.chain.width), Inputs(templates, batches)
        self._shelves: dict[tuple[int, int], Shelf] = {}  # offloaded activations, by (block, micro-batch)
        self._graphs: dict[tuple[int, int], Graph] = {}  # until backward, by (block, micro-batch)
        self._argument_gradients: dict[int, dict[tuple[int, int], torch.Tensor]] = {}  # gradients for the embedding, by micro-batch
        self.unpack = self._views.unpack
        self._backward_slots: tuple[Slot, Slot] | None = None  # slots of weights and input of the running backward

    def at_work(self) -> AbstractContextManager[None]:
        """Context of the ops of a run. Clears the state of a run that failed within a step."""
        self.inputs.batch = None
        self.losses.clear()
        if (balance := self.templates.balance) is not None:
            balance.forget()
        self._backward_slots = None
        self._graphs.clear()
        self._argument_gradients.clear()
        self._shelves.clear()
        return nullcontext() if self._head is None else self.templates.evaluating()

    def _begin(self, step: int) -> None:
        if (batch := self.inputs.begin(step)) is not None and self._head is None:
            total = torch.zeros((), dtype=torch.float64, device=batch.input_ids.device)
            n_losses = self.plan.semantics.n_losses(batch.n_supervised, batch.n_answers)
            if not batch.n_supervised or not n_losses:
                raise StepError(f"the batch of step {step + 1} has nothing to learn: no token has a target; give other data")
            self.losses[step] = Losses(batch.n_supervised, n_losses, total, [])

    def _seed(self, step: int, op: Op) -> None:
        if (balance := self.templates.balance) is not None and op.micro_batch is not None:
            balance.position = op.micro_batch, op.block
        self._generator.manual_seed(op_seed(self.seed, step, self._first + (op.micro_batch or 0), op.block))

    def _activation(self, op: Op, slot: Slot) -> torch.Tensor:
        return self._views.activation(slot, op.micro_batch or 0)

    def _weights(self, op: Op) -> Weights:
        return self._views.weights(op.block, op["weights"], op.get("trained"))

    def forward(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        m, weight_slot, has_backward = op.micro_batch, op["weights"], op.block >= self._first_trained
        if self._head is None:  # a forward plan has no dropout
            self._seed(step, op)
        elif op.block == self._head_block:
            batch, hidden_BTD = self.inputs.micro_batch(m), self._activation(op, op["x"])
            self._head(LastHidden(self.templates, self._weights(op), hidden_BTD, batch.targets, step, m, batch.extras))
            self.inputs.calls.pop(m, None)
            return
        if op.block == 0:
            self._begin(step)
            weights = self._views.leaves(op.block, weight_slot)
            with torch.set_grad_enabled(has_backward), self._weight_hooks(op.block, weight_slot):
                output_BTD = self.inputs.embed(weights, m)
            if has_backward:
                output_BTD = output_BTD.requires_grad_()  # of texts if only a projector is trained: nothing gets a gradient
                self._graphs[0, m] = _graph(output_BTD, [], weights, self.inputs.detach_arguments(m))
        elif not has_backward or (checkpointing := self._checkpointing(op, step, weight_slot)) is None:
            hidden_BTD = self._activation(op, op["x"])
            output_BTD = self.templates.layer(op.block, self._weights(op), hidden_BTD, self.inputs.calls[m][op.block - 1])
        else:
            with checkpointing:
                output_BTD = self._with_graph(op, m)
        self._activation(op, op["y"]).copy_(output_BTD.detach())
        self.inputs.add_features(op.block, m, self._activation(op, op["y"]))

    def _with_graph(self, op: Op, m: int) -> torch.Tensor:
        weights = self._views.leaves(op.block, op["weights"], op.get("trained"))
        hidden_BTD = self._activation(op, op["x"]).requires_grad_()
        inputs = self.inputs.calls[m][op.block - 1]
        with torch.enable_grad():
            output_BTD = self.templates.layer(op.block, weights, hidden_BTD, inputs)
        arguments = inputs.grad_arguments
        self._graphs[op.block, m] = _graph(output_BTD, [hidden_BTD, *arguments.values()], weights, dict.fromkeys(arguments))
        return output_BTD

    def _checkpointing(self, op: Op, step: int, weight_slot: Slot) -> AbstractContextManager[None] | None:
        """Saved-tensor hooks for a layer's forward; None if its graph exists."""
        saved = self.plan.policy.saved(op.block)
        if (op.block, op.micro_batch) in self._graphs:  # recompute of a dropped boundary
            return None
        if saved is Saved.ALL:
            return self._weight_hooks(op.block, weight_slot)
        shelf = None
        if (slot := op.get("saved")) is not None:
            moved = self.plan.recompute(op.block, op.micro_batch).slot_bytes  # offloaded bytes; the slot may be larger
            shelf = self._shelves[op.block, op.micro_batch or 0] = Shelf(self.arenas.raw(slot)[:moved])
        return Replay(saved, lambda: self._recompute(op, step), shelf).recording()

    def _weight_hooks(self, block: int, weight_slot: Slot) -> AbstractContextManager[None]:
        """Saved-tensor hooks that save a weight as its spot, read from the slot of the block's weights in backward."""
        copies = dict[int, torch.Tensor]()  # the embedding's weights, because its backward has no slot of them

        def pack(tensor: torch.Tensor) -> torch.Tensor | Spot:
            offset_bytes = self.arenas.offset_in(weight_slot, tensor)
            if offset_bytes is not None and block == 0:
                return copies.setdefault(offset_bytes, tensor.detach().clone()).as_strided(tensor.shape, tensor.stride(), 0)
            return tensor.detach() if offset_bytes is None else Spot(offset_bytes, tensor.dtype, tensor.shape, tensor.stride())

        def unpack(packed: torch.Tensor | Spot) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            assert self._backward_slots is not None, "weights of a graph are read outside of its backward"
            return packed.view(self.arenas.raw(self._backward_slots[0]))

        return saved_tensors_hooks(pack, unpack)

    def _recompute(self, op: Op, step: int) -> None:
        """Recompute a layer's forward in its backward, from the backward's slots of weights and input."""
        assert self._backward_slots is not None
        self._seed(step, op)
        weights = self._views.leaves(op.block, self._backward_slots[0], op.get("trained"))
        hidden_BTD = self._activation(op, self._backward_slots[1]).requires_grad_()
        self.templates.layer(op.block, weights, hidden_BTD, self.inputs.calls[op.micro_batch or 0][op.block - 1], graph_only=True)

    def backward(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        if op.block:
            self._backward_slots = (op["weights"], op["x"])
        if (slot := op.get("saved")) is not None:
            self._shelves.pop((op.block, op.micro_batch)).slot = self.arenas.raw(slot)
        graph = self._graphs.pop((op.block, op.micro_batch))
        argument_gradients = self._argument_gradients.setdefault(op.micro_batch, {})
        # Last layer first, which is autograd's order of summing gradients from several layers
        keys = [] if op.block else sorted(argument_gradients, reverse=True)
        edges = [graph.edge, *(graph.grad_arguments[key] for key in keys)]
        edge_gradients = [self._activation(op, op["y"]), *map(argument_gradients.pop, keys)]
        gradients = torch.autograd.grad(edges, graph.inputs, edge_gradients, allow_unused=True)
        del edge_gradients
        self._backward_slots = None
        if op.block == self._first_trained:
            self.inputs.calls.pop(op.micro_batch, None)
        if op.block:
            assert gradients[0] is not None
            self._activation(op, op["x"]).copy_(gradients[0])
            rows = zip(graph.grad_arguments, gradients[1:], strict=False)
            argument_gradients |= {(op.block, j): gradient for j, gradient in rows if gradient is not None}
            gradients = gradients[1 + len(graph.grad_arguments) :]
        named = zip(graph.names, gradients, strict=True)
        self._add(op, *self._running_sum(op), {name: gradient for name, gradient in named if gradient is not None})

    def loss(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        self._seed(step, op)
        self._begin(step)
        hidden_BTD, losses, batch = self._activation(op, op["x"]), self.losses[step], self.inputs.micro_batch(op.micro_batch)
        running, begins = self._running_sum(op)
        name = self.templates.head.weight
        head = running.get(name)
        # Tiles are summed within the micro-batch: in a separate tensor if the running sum holds earlier micro-batches
        head_gradient = head if head is None or begins else torch.zeros_like(head)
        if head is not None and begins:
            head.zero_()
        arguments = self._weights(op), hidden_BTD, batch.targets, losses.n_losses, head_gradient
        loss_sum, hidden_gradient, gradients = self.templates.head.loss(*arguments, batch.extras)
        if (balance := self.templates.balance) is not None:
            loss_sum += balance.take_loss(op.micro_batch) * losses.n_losses
        losses.total.add_(loss_sum)
        if self.plan.semantics.ranks > 1:
            losses.by_micro_batch.append(loss_sum)
        hidden_BTD.copy_(hidden_gradient)
        if head_gradient is not None and not begins:
            gradients[name] = head_gradient
        self._add(op, running, begins, gradients, in_place={name} if begins else ())

    def _running_sum(self, op: Op) -> tuple[Weights, bool]:
        """Running sum of gradients, and True if this micro-batch begins it. The sum of a single micro-batch is its gradient."""
        plan, total = self.plan, op.get("sum")
        begins = total is None or plan.semantics.begins_sum(op.micro_batch or 0)
        if (slot := total or op.get("gradient")) is None:
            return {}, begins
        dtype = plan.gradient_dtype(op.block) if total is None else plan.sum_dtype(op.block)
        return self._views.gradients(op.block, slot, dtype), begins

    def _add(self, op: Op, running: Weights, begins: bool, gradients: Weights, in_place: Collection[str] = ()) -> None:
        """Add gradients to the running sum, and this to the sums `into`; round the last sum into `gradient`. A first gradient is
        added to zero in one pass, which turns -0.0 into +0.0. Weights without gradient (experts without tokens) have gradient zero.
        `in_place`: names of gradients that are already in the running sum."""
        assert gradients.keys() <= running.keys()
        for name, view in running.items():
            if name in gradients:
                torch.add(gradients[name], 0.0 if begins else view, out=view)
            elif begins and name not in in_place:
                view.zero_()
        for slot in op.every("into"):
            total = self._views.gradients(op.block, slot, "fp32")
            for name, view in total.items():
                view += running[name]
            running = total
        if (tied := op.get("tied")) is not None:
            for p, view in self._views.tied_gradients(tied):
                running[p] += view
        out = op.get("gradient")
        if out is not None and op.get("sum") is not None:
            for name, view in self._views.gradients(op.block, out, self.plan.gradient_dtype(op.block), is_sent=True).items():
                view.copy_(running[name])
        elif self.plan.sums_in_place(op.block) and op.micro_batch == self.plan.semantics.n_micro_batches - 1:
            self._round({name: running[name] for name in self._views.sent(op.block)})

    def _round(self, total: Weights) -> None:
        """Round complete sums to the gradient's dtype, in place and in pieces."""
        if (dtype := DTYPE[self.plan.semantics.gradient_dtype]) is not torch.float32:
            for view in total.values():
                for piece in view.view(-1).split(ROUNDED_ELEMENTS):
                    piece.copy_(piece.to(dtype))


def _graph(output_BTD: torch.Tensor, inputs: list[torch.Tensor], weights: Weights, grad_arguments: dict[Any, Any]) -> Graph:
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    return Graph(get_gradient_edge(output_BTD), [*inputs, *trained.values()], list(trained), grad_arguments)


class Inputs:
    """Tokens of a step, and the layers' masks and positions, recorded in the embedding's forward. The model's forward computes
    masks and positions and reads them on the host, which synchronises with a GPU. It runs for the first two micro-batches of a
    shape. If their masks and positions are equal, and the embedding is a lookup, other micro-batches only look up rows."""

    def __init__(self, templates: Templates, batches: PreparedBatches) -> None:
        self.templates, self._batches, self.prepare = templates, batches, batches.prepare
        self._micro_batch = templates.semantics.micro_batch
        self.batch: tuple[int, Batch] | None = None  # with its step
        self.first: dict[int, list[Call]] = {}  # calls of the first micro-batch, by number of sequences
        self.only_lookup: set[int] = set()  # numbers of sequences with equal calls and an embedding that only looks up rows
        self.calls: dict[int, list[Call]] = {}  # calls by micro-batch, until its last use

    def begin(self, step: int) -> Batch | None:
        """Start a step and return its batch; None if it has been started."""
        if self.batch is not None and self.batch[0] == step:
            return None
        self.batch = (step, self._batches(step))
        return self.batch[1]

    def micro_batch(self, m: int) -> Batch:
        """Sequences of a micro-batch of the current step."""
        assert self.batch is not None
        return self.batch[1].part(slice(m * self._micro_batch, (m + 1) * self._micro_batch))

    def embed(self, weights: Weights, m: int) -> torch.Tensor:
        """Compute the first layer's input, and record the layers' other arguments."""
        batch = self.micro_batch(m)
        tokens_BT, n_sequences = batch.input_ids, len(batch.input_ids)
        if batch.document_tokens is not None:
            if batch.positions_BT is None:
                batch = replace(batch, positions_BT=positions_of(batch.document_tokens))
            with torch.no_grad():
                if n_sequences not in self.first:
                    self._shared(n_sequences, self.templates.embed(weights, replace(batch, images=None))[1])
                has_masks = batch.images is not None and batch.images.token_types is not None
                plain = self.templates.embed(weights, batch)[1] if has_masks else self.first[n_sequences]
            hidden_BTD, self.calls[m] = self.templates.embed_packed(weights, batch, plain)
            return hidden_BTD
        if batch.has_images:
            hidden_BTD, self.calls[m] = self.templates.embed(weights, batch)
            return hidden_BTD
        if n_sequences in self.only_lookup and not self.templates.chain.length_dependent:
            self.calls[m] = self.first[n_sequences]
            return self.templates.look_up(weights, tokens_BT)
        is_first = n_sequences not in self.first
        hidden_BTD, calls = self.templates.embed(weights, batch)
        self.calls[m] = calls = self._shared(n_sequences, calls)
        pairs = zip(calls, self.first[n_sequences], strict=True)
        is_equal = not is_first and all(new is old for a, b in pairs for new, old in zip(a.leaves, b.leaves, strict=True))
        if is_equal and torch.equal(hidden_BTD, self.templates.look_up(weights, tokens_BT)):
            self.only_lookup.add(n_sequences)
        return hidden_BTD

    def add_features(self, block: int, m: int, hidden_BTD: torch.Tensor) -> None:
        """Add a tower's features to the output of an early layer, at the places of images. No gradient flows into them, and that of
        the output is unchanged."""
        assert self.batch is not None
        if (images := self.batch[1].images) is None or not 0 < block <= images.n_added:
            return
        batch = self.micro_batch(m)
        if batch.images is not None and batch.has_images:
            rows = torch.cat([places + b * hidden_BTD.shape[1] for b, places in enumerate(batch.images.places)])
            features_ND = batch.images.of_block(block, hidden_BTD.device)
            hidden_BTD.view(-1, hidden_BTD.shape[2]).index_add_(0, rows.to(hidden_BTD.device), features_ND)

    def _shared(self, n_sequences: int, calls: list[Call]) -> list[Call]:
        """Replace tensors of calls, other than differentiable ones, by equal ones of the first micro-batch with this shape."""
        if n_sequences not in self.first:
            not_shared = self.templates.chain.grad_arguments
            self.first[n_sequences] = [call.with_leaves(dict.fromkeys(i)) for call, i in zip(calls, not_shared, strict=True)]
        firsts = zip(calls, self.first[n_sequences], strict=True)
        return [new.with_leaves({j: t for j, t in enumerate(old.leaves) if _is_equal(new.leaves[j], t)}) for new, old in firsts]

    def detach_arguments(self, m: int) -> dict[tuple[int, int], GradientEdge]:
        """Replace differentiable arguments of layers by autograd leaves; return their gradient edges by (layer, index)."""
        calls, tensors = self.calls[m], [call.grad_arguments for call in self.calls[m]]
        leaves = [{j: t.detach().requires_grad_() for j, t in row.items()} for row in tensors]
        self.calls[m] = [call.with_leaves(row) for call, row in zip(calls, leaves, strict=True)]
        return {(i, j): get_gradient_edge(t) for i, row in enumerate(tensors, start=1) for j, t in row.items()}


def _is_equal(new: Any, old: Any) -> bool:
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        return new is old or (new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old))
    return bool(new is old or (type(new) is type(old) and new == old))
