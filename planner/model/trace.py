"""Layer traces: the library calls of a module's forward pass, with tensor sizes instead of data, and their replay on a `Tape`.

A trace is recorded once with torch (`layer_traces.py`) and replayed without it for any micro-batch size, kernel choice, adapter
and set of frozen weights. Traces are recorded in bf16: an element of 2 bytes represents the compute dtype.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from penstock.runtime.plan import Semantics
from penstock.runtime.plan.packed import is_packed, scaled_scratch_bytes
from penstock.runtime.plan.train import STACK, Lora
from penstock.runtime.plan.workload import Matmul

from . import fused
from .memory_replay import Call, Tape, Tensor

RECORDED_ITEM_BYTES = 2
NORM_AFTER = "post_feedforward_layernorm"  # norm after the MLP in some model types; part of the tile (`runtime/layers/tiles.py`)
FUSED_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # represents any fused attention kernel
OWN_FUNCTION, OWN_SCRATCH = "function", 4  # last call of a custom autograd.Function; assumed number of temporaries in its backward
# Library calls per recorded call, if not 1: conversion of a boolean mask to a bias; allocation only
_CALLS = {"bias_of_mask": 3, "empty_like": 0, "new_empty": 0, "empty": 0}
# Calls in which a saved operand is needed only for the gradient of the other operand
_MULTIPLY = {"mul", "div", "mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_LINEAR = ("linear", "as_linear", "conv1d")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor, identified by its storage. `internal`: computed by the traced module."""

    n_elements: int
    item_bytes: int
    internal: bool
    floating: bool


@dataclass(slots=True)
class LibraryCall:
    """A library call; tensors are numbers, weights are names. `shapes` are operand shapes of matrix products; `moved` is the memory
    traffic: elements of the compute dtype, and bytes of other dtypes.

    Example: `["mm", [1], ["proj.weight"], [2], [1], [], [[16, 8], [8, 4]], [224, 0]]`.
    """

    name: str
    reads: list[int]
    weights: list[str]
    makes: list[int]
    saves: list[int]
    held: list[int]  # last alive during this call, though neither read nor saved
    shapes: list[list[int]]
    moved: list[int]


@dataclass(frozen=True, slots=True)
class Group:
    """Calls first..end-1 of one module or function. Kinds: norm, mlp, gated (MLP), attention, rotary; linear; as_linear (a linear
    layer with a forward of its own), conv1d (the same with a transposed weight)."""

    kind: str
    name: str
    first: int
    end: int
    operands: list[int]
    results: list[int]


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """Trace of one forward pass; tensor 0 is its input."""

    parameters: dict[str, list[int]]
    tensors: list[TensorInfo]
    calls: list[LibraryCall]
    groups: list[Group]
    attention: list[int | None] | None = None  # heads, key-value heads, head width, window; with sinks, a fifth entry: 1
    sides: Sequence[int] = ()  # arguments that require grad, other than the hidden state

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "LayerTrace":
        """Parse the JSON form; all polynomials must have been evaluated."""
        tensors, calls = [TensorInfo(*row) for row in tree["made"]], [LibraryCall(*row) for row in tree["calls"]]
        groups, sides = [Group(*row) for row in tree["groups"]], tree.get("sides", ())
        return cls(tree["parameters"], tensors, calls, groups, tree["attention"], sides)

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each linear layer, by name, in the order of calls."""
        shapes = {g.name: (g.kind, self.parameters.get(f"{g.name}.weight")) for g in self.groups if g.kind in _LINEAR}
        return {name: (s[1], s[0]) if kind == "conv1d" else (s[0], s[1]) for name, (kind, s) in shapes.items() if s is not None}

    @property
    def plain_linear(self) -> frozenset[str]:
        """Names of linear layers with PyTorch's own forward."""
        return frozenset(g.name for g in self.groups if g.kind == "linear")

    @property
    def stacks(self) -> dict[str, tuple[int, int, int]]:
        """Experts, inputs and outputs of each stack of experts that may have adapters, by name, in the order of calls."""
        return {name: shape for name, shape in self.grouped.items() if STACK.search(name)}

    @property
    def grouped(self) -> dict[str, tuple[int, int, int]]:
        """Experts, inputs and outputs of each stack of experts, by name, in the order of calls."""
        calls = (call for call in self.calls if call.name == "_grouped_mm" and call.weights)
        return {call.weights[0]: tuple(call.shapes[1]) for call in calls}  # type: ignore[misc]

    @property
    def has_rows_of_inputs(self) -> bool:
        """True if stacks of experts have a row per input, (experts, inputs, outputs), in a layer with one that is not square."""
        return any(k != n and self.parameters[name] == [e, k, n] for name, (e, k, n) in self.grouped.items())

    @property
    def unfused_attention(self) -> list[LibraryCall]:
        """Calls of attention other than products, if no fused kernel computes it."""
        calls = (call for g in self.groups if g.kind == "attention" for call in self.calls[g.first : g.end])
        return [call for call in calls if call.name not in _PRODUCTS]


def mlp_of(trace: "LayerTrace") -> Group | None:
    """Return the MLP, down(act(gate(x)) * up(x)), if it can be tiled: only its norm and additions may follow."""
    mlp = next((group for group in trace.groups if group.kind in ("mlp", "gated") and group.name == "mlp"), None)
    if mlp is None:
        return None
    of_norm = {"_to_copy", "pow", "mean", "rsqrt", "mul"} if f"{NORM_AFTER}.weight" in trace.parameters else set()
    return mlp if {call.name for call in trace.calls[mlp.end :]} <= {"add"} | of_norm else None


@dataclass(frozen=True, slots=True)
class Part:
    """Trainable weights of a block (names within it), and its linear layers and stacks of experts with adapters."""

    trained: frozenset[str]
    adapted: frozenset[str] = frozenset()
    lora: Lora | None = None

    def rank(self, name: str) -> int:
        """Return the rank of the adapter on this module; 0 if it has none."""
        return self.lora.rank if self.lora is not None and name in self.adapted else 0

    @property
    def drops_out(self) -> bool:
        return self.lora is not None and self.lora.dropout > 0


def scaled_weights(trace: LayerTrace) -> list[str]:
    """Names within the layer of the weights that FP8 products multiply."""
    return [name for name, shape in trace.parameters.items() if is_packed(f"layers.0.{name}", tuple(shape), "fp8-rows")]


def replay(trace: LayerTrace, tape: Tape, semantics: Semantics, part: Part, n_rows: int) -> None:
    """Replay a trace on a tape with the kernels of the semantics; tile the MLP over its `n_rows` rows if they ask for that."""
    full, tile, end = _Replay(trace, tape, semantics, part), semantics.mlp_tile_tokens, len(trace.calls)
    mlp = mlp_of(trace)
    if tile is None or tile >= semantics.tokens_per_micro_batch or mlp is None:
        full.run(0, end)
        return
    full.run(0, mlp.first)
    # Inputs of a tile: existing tensors that the MLP and later row-wise calls read
    read = (i for call in trace.calls[mlp.first :] for i in call.reads)
    inputs = dict.fromkeys(i for i in read if i in full.tensors and trace.tensors[i].floating)

    def of_tile(tape: Tape, cut: Sequence[Tensor], rows: int) -> None:
        tile_replay = _Replay(trace, tape, semantics, part, (rows, n_rows))
        tile_replay.tensors |= dict(zip(inputs, cut, strict=True))
        tile_replay.run(mlp.first, end)

    tape.tile([full.tensors[i] for i in inputs], n_rows, min(tile, n_rows), of_tile)


class _Replay:
    """Replays the calls of a trace. `share` is (rows of this tile, rows of the trace)."""

    def __init__(self, trace: LayerTrace, tape: Tape, semantics: Semantics, part: Part, share: tuple[int, int] = (1, 1)) -> None:
        self.trace, self.tape, self.semantics, self.part, self.share = trace, tape, semantics, part, share
        self.linear = trace.linear
        self.as_weight: dict[int, str] = {}  # tensors that are weights cast to another dtype
        self.tensors = {
            i: self._tensor(info, i == 0 or i in trace.sides) for i, info in enumerate(trace.tensors) if not info.internal
        }  # fmt: skip
        self.groups = {group.first: group for group in trace.groups if self._at_once(group)}
        self.overwritten = {call.reads[0] for call in trace.calls if not call.makes and call.reads}
        self.spelled = {n for g in trace.groups if g.kind == "attention" for n in range(g.first, g.end)}

    def _tensor(self, info: TensorInfo, differentiable: bool = False) -> Tensor:
        return Tensor(info.n_elements, self._item_bytes(info), info.internal, differentiable)

    def _item_bytes(self, info: TensorInfo) -> int:
        return self.tape.item_bytes if info.item_bytes == RECORDED_ITEM_BYTES else info.item_bytes

    def _at_once(self, group: Group) -> bool:
        """True if the group is replayed as a unit instead of call by call."""
        match group.kind:
            case "norm":
                return self.semantics.norm == "fused"
            case "rotary" | "gated":
                return self.semantics.pointwise == "fused"
            case "linear":
                return self.trace.tensors[group.results[0]].item_bytes == RECORDED_ITEM_BYTES or self.part.rank(group.name) > 0
            case "as_linear" | "conv1d":
                return self.part.rank(group.name) > 0
        return False

    def run(self, first: int, end: int) -> None:
        n = first
        while n < end:
            if (group := self.groups.get(n)) is not None and group.end <= end:
                self.tensors |= zip(group.results, self._replay_group(group), strict=True)
                n = group.end
            else:
                self._replay_call(n, self.trace.calls[n])
                n += 1

    def _replay_group(self, group: Group) -> list[Tensor]:
        operands, tape, name = [self._get(i) for i in group.operands], self.tape, group.name
        x = operands[0]
        match group.kind:
            case "norm":
                weight = f"{name}.weight".removeprefix(".")
                return [fused.norm(tape, x, self._elements([weight]), weight in self.part.trained)]
            case "rotary":
                return [fused.rotation(tape, operand, operands[-1]) for operand in operands[:2]]
            case "gated":
                gate, up = self._project(x, f"{name}.gate_proj", f"{name}.up_proj")
                return self._project(fused.gate(tape, gate, up), f"{name}.down_proj")
        if group.results[0] not in self.tensors:  # else computed together with an earlier projection
            partners = [g for g in self.groups.values() if g is group or self._are_partners(group, g)]
            outputs = self._project(x, *(g.name for g in partners))
            self.tensors |= {g.results[0]: y for g, y in zip(partners, outputs, strict=True)}
        return [self.tensors[group.results[0]]]

    def _are_partners(self, *groups: Group) -> bool:
        """True if linear maps of one module share an input and have adapters without dropout, or no layer has adapters and they are
        in FP8: they are computed together."""
        inputs = {(group.kind, group.operands[0], group.name.rpartition(".")[0]) for group in groups}
        return len(inputs) == 1 and self._are_together(group.name for group in groups)

    def _are_together(self, names: Iterable[str]) -> bool:
        is_together = self._is_scaled if self.part.lora is None else self.part.rank
        return not self.part.drops_out and all(map(is_together, names))

    def _project(self, x: Tensor, *names: str) -> list[Tensor]:
        """Replay linear maps of one input: together or one after the other, as in `_are_partners`."""
        shapes = [self.linear[name] for name in names]
        widths, k, rank, drops_out = [n for n, _ in shapes], shapes[0][1], self.part.rank(names[0]), self.part.drops_out
        if len(names) > 1 and not self._are_together(names):
            return [y for name in names for y in self._project(x, name)]
        scaled, m = [self._is_scaled(name) for name in names], x.n_elements // k
        if rank:
            return self.tape.adapted(x, m, k, widths, rank, drops_out, scaled)
        learns = [[weight for weight in (f"{name}.weight", f"{name}.bias") if weight in self.part.trained] for name in names]
        frozen = [f"{name}.weight" not in weights for name, weights in zip(names, learns, strict=True)]
        if scaled[0]:
            products = zip(widths, map(self._elements, learns), frozen, strict=True)
            return self.tape.scaled(x, m, k, [*products], packed=self.semantics.base != "bf16")
        return [self.tape.linear(x, m, k, widths[0], self._elements(learns[0]), frozen[0])]

    def _is_scaled(self, name: str) -> bool:
        """True if the product of this linear layer is in FP8."""
        if self.semantics.products != "fp8":
            return False
        return f"{name}.weight" in scaled_weights(self.trace)

    def _replay_call(self, n: int, call: LibraryCall) -> None:
        if call.name == "_to_copy" and self._is_idle(call):
            self._replay_cast(call)
            return
        reads = [self._get(i) for i in call.reads]
        weights = [*call.weights, *(self.as_weight[i] for i in call.reads if i in self.as_weight)]
        learns = [weight for weight in weights if weight in self.part.trained]
        self.tape.held = tuple(self.tensors[i] for i in call.held if i in self.tensors)
        if call.name in fused.LIBRARY:
            n_weights, n_trained = map(self._elements, (weights, learns))
            outputs = [fused.LIBRARY[call.name](self.tape, reads, call.shapes, n_weights, n_trained)]
        elif call.name == FUSED_ATTENTION:
            _, *sinks = (self.trace.attention or [None] * 4)[3:]
            kernel, n_trained = self.semantics.attention_kernel, self._elements(learns)
            outputs = [fused.attention(self.tape, reads, call.shapes[0], kernel, bool(sinks), n_trained)]
            outputs += self.tape.steps[-1].outputs[1:]
        else:
            outputs = self._step(n, call, reads, weights, learns)
        self.tape.held = ()
        self.tensors |= zip(call.makes, outputs, strict=False)

    def _replay_cast(self, call: LibraryCall) -> None:
        """Alias the result of a no-op cast to its source, a tensor or a weight."""
        i = call.makes[0]
        if call.reads:
            self.tensors[i] = self._get(call.reads[0])
        else:
            self.tensors[i] = Tensor(self.trace.tensors[i].n_elements, self.tape.item_bytes, internal=False)
            self.as_weight[i] = call.weights[0]

    def _step(self, n: int, call: LibraryCall, reads: list[Tensor], weights: list[str], learns: list[str]) -> list[Tensor]:
        """Add a matrix product or pointwise call to the tape; return its outputs."""
        outputs, (rows, all_rows), frozen = [self.trace.tensors[i] for i in call.makes], self.share, not learns
        requires = bool(learns) or any(map(self._requires, call.reads))
        saved = [i for i in dict.fromkeys(call.saves) if i not in call.makes and requires and self._is_needed(call, i, learns)]
        out = outputs[0] if outputs else TensorInfo(0, RECORDED_ITEM_BYTES, True, False)
        extra_outputs = [self._tensor(info) for info in outputs[1:]]
        how: dict[str, Any] = {"saves": [self._get(i) for i in saved], "extra_outputs": extra_outputs}
        how |= {"n_trained": self._elements(learns), "moved": 0, "scratch": 0}
        if call.name in _PRODUCTS and n in self.spelled:
            how |= {"call": Call.ATTENTION, "scratch": None}
        elif call.name in _PRODUCTS:
            how |= {"call": Call.PRODUCT if call.weights else Call.POINTWISE, "matmuls": _matmuls(call, frozen)}
        elif call.name == "_grouped_mm":
            how |= {"call": Call.OVERWRITTEN if call.makes[0] in self.overwritten else Call.GROUPED}
            how |= self._grouped(call, frozen)
            if rank := self.part.rank(weights[0]) if weights else 0:
                how |= self._adapted(call, rank, reads[0], how)
        else:
            n_weights, (n_moved, others_bytes) = self._elements(weights), call.moved
            n_moved = (n_moved - n_weights) * rows // all_rows + n_weights if rows < all_rows else n_moved
            how |= {"moved": n_moved * self.tape.item_bytes + others_bytes * rows // all_rows}
            how |= {"scratch": self._scratch_bytes(call.name, reads, out.n_elements * rows // all_rows)}
            how |= {"n_calls": _CALLS.get(call.name, 1)}
        step = self.tape.step(
            reads, out.n_elements * rows // all_rows, item_bytes=self._item_bytes(out), differentiable=requires and out.floating,
            saves_out=requires and bool(outputs) and call.makes[0] in call.saves, **how,
        )  # fmt: skip
        return [step, *how["extra_outputs"]]

    def _grouped(self, call: LibraryCall, frozen: bool) -> dict[str, Any]:
        """Return the step fields of a grouped product of experts, which depend on FP8."""
        if not (call.weights and self.semantics.products == "fp8" and call.weights[0] in scaled_weights(self.trace)):
            return {"matmuls": _grouped(call.shapes, frozen)}
        (n_rows, k), (n_experts, *_, n) = call.shapes[:2]
        scratch_bytes = scaled_scratch_bytes(n_rows, k, n, self.tape.item_bytes, self.semantics.base != "bf16", n_experts)
        products, is_transposed = _grouped(call.shapes, frozen), self.trace.has_rows_of_inputs
        matmuls = [replace(product, scaled="transposed" if is_transposed else "own") for product in products]
        return {"matmuls": matmuls, "scratch": scratch_bytes, "n_calls": 2 + (self.semantics.base == "bf16")}

    def _adapted(self, call: LibraryCall, rank: int, x: Tensor, how: dict[str, Any]) -> dict[str, Any]:
        """Return the step fields that change if a grouped product of experts has adapters (`runtime/layers/adapters.py`)."""
        (n_rows, k), (n_experts, *_, n_out) = call.shapes[:2]
        item = self.tape.item_bytes
        down, up = (_grouped([[n_rows, a], [n_experts, a, b]], False) for a, b in ((k, rank), (rank, n_out)))
        return {
            "n_trained": how["n_trained"] + n_experts * rank * (k + n_out), "n_calls": 4 + how.get("n_calls", 1),
            "matmuls": how["matmuls"] + down + up,
            "extra_outputs": [Tensor(n_rows * rank, item)], "saves": [x, *how["saves"]],
            # B is permuted to have experts outermost; the second product is added to the experts' output
            "moved": (2 * n_experts * rank * n_out + 3 * n_rows * n_out) * item,
            "scratch": (n_rows * (rank + max(k, n_out)) + 2 * n_experts * rank * n_out) * item + how["scratch"],
        }  # fmt: skip

    @staticmethod
    def _scratch_bytes(name: str, reads: Sequence[Tensor], n_elements: int) -> int | None:
        """Return the temporary bytes in a pointwise call's backward; None: the default of `Step`."""
        wide = {tensor.item_bytes for tensor in reads if tensor.differentiable}
        if name == OWN_FUNCTION:
            return OWN_SCRATCH * max(t.n_bytes for t in reads)
        if name == "mul" and len(wide) > 1:  # one factor is also converted to the wider dtype
            return 2 * n_elements * max(wide)
        return 0 if name == "add" else None

    def _elements(self, names: Iterable[str]) -> int:
        return sum(prod(self.trace.parameters[name]) for name in names)

    def _get(self, i: int) -> Tensor:
        """Return a tensor by number; create it if a fused kernel replaced the calls that compute it."""
        return self.tensors.setdefault(i, self._tensor(self.trace.tensors[i]))

    def _requires(self, i: int) -> bool:
        return self.as_weight[i] in self.part.trained if i in self.as_weight else self._get(i).differentiable

    def _is_idle(self, call: LibraryCall) -> bool:
        """True if a cast does not change the dtype."""
        info = self.trace.tensors[call.makes[0]]
        item_bytes = self.tensors[call.reads[0]].item_bytes if call.reads else self.tape.item_bytes
        return info.floating and self._item_bytes(info) == item_bytes

    def _is_needed(self, call: LibraryCall, i: int, learns: Sequence[str]) -> bool:
        """True unless the saved operand of a product serves only gradients that are not computed."""
        if call.name not in _MULTIPLY or not self.trace.tensors[i].floating or call.reads.count(i) != 1:
            return True
        return bool(learns) or any(self._requires(j) for j in call.reads if j != i)


def _matmuls(call: LibraryCall, frozen: bool) -> list[Matmul]:
    (*batch, m, k), n = call.shapes[-2], call.shapes[-1][-1]
    return [Matmul(m, k, n, prod(batch), frozen and bool(call.weights))]


def _grouped(shapes: Sequence[Sequence[int]], frozen: bool) -> list[Matmul]:
    """Matrix products of balanced experts: row counts differ by at most one; experts without rows compute nothing."""
    (n_rows, k), (n_experts, *_, n) = shapes[:2]
    rows, remainder = divmod(n_rows, n_experts)
    sizes = ((rows, n_experts - remainder), (rows + 1, remainder))
    return [Matmul(m, k, n, count, frozen, grouped=True) for m, count in sizes if m and count]
