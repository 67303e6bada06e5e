"""Trace a model as prologue, layers and epilogue by running its own forward with recorders in place of the layers.

A recorder stores the arguments of its layer (masks, rotary tables, positions). It also checks that the layers form a chain: the
input of each must be the tensor that the previous one returned. WorkloadError, with the reason, for any other model.
"""

# B sequences, T tokens, D width
import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .model_parts import ModelParts
from .shared_kv import Carried, States, carried_of, with_states
from .transformers_patches import length_dependent, replaced_forwards, tables_by_document

Documents = tuple[tuple[int, ...], ...]  # tokens per document, by packed sequence, e.g. ((5, 11, 1), (17,))
_NOT_IN_KIND = ("layer_idx", "training")
_UNREAD = "unread output of another layer"
OF_TOWERS = "mm_encoder_outputs"  # argument of a vision-language model: outputs of its towers


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a layer without the hidden state. `hidden_index`, `output_index`: its leaf index in arguments and result."""

    leaves: tuple[Any, ...]
    spec: Any
    hidden_index: int
    output_index: int
    carried: Carried | None = None
    documents: Documents | None = None  # None: not packed
    has_own_masks: bool = False  # True: masks depend on the tokens, not on the distance alone

    def run(self, layer: Callable[..., Any], hidden_BTD: Tensor) -> Tensor:
        """Next hidden state (B, T, D)."""
        leaves, states = list(self.leaves), UserDict[str, tuple[Tensor, ...]]()
        if self.carried is not None:
            # also holds zeros for keys of later layers; `_Tracer` has run the layer without these
            leaves, states = with_states(leaves, self.carried.states(hidden_BTD))
            hidden_BTD = self.carried.hidden_state(hidden_BTD)
        leaves[self.hidden_index] = hidden_BTD
        args, kwargs = tree_unflatten(leaves, self.spec)
        out_BTD: Tensor = tree_leaves(layer(*args, **kwargs))[self.output_index]
        return out_BTD if self.carried is None else self.carried.concatenated(out_BTD, states)

    @property
    def grad_arguments(self) -> dict[int, Tensor]:
        """Differentiable arguments, by leaf index."""
        return {j: t for j, t in enumerate(self.leaves) if isinstance(t, Tensor) and t.requires_grad}

    def with_leaves(self, replacements: Mapping[int, Any]) -> "Call":
        return replace(self, leaves=tuple(replacements.get(j, t) for j, t in enumerate(self.leaves))) if replacements else self

    def window(self, seq_len: int) -> int | None:
        """Smallest attention window among the masks, in tokens; None if every mask is fully causal."""
        masks = (t for t in self.leaves if isinstance(t, Tensor) and t.dim() == 4 and t.shape[-2:] == (seq_len, seq_len))
        n_visible = [int((t if t.dtype is torch.bool else t == 0)[0, 0].sum(-1).max()) for t in masks]
        return min((n for n in n_visible if n < seq_len), default=None)


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Leaves of a layer's result, index of the hidden state among them, and keys and values for later layers. `shared_inputs`:
    names of the layer's linear modules with the same input."""

    leaves: list[Any]
    spec: Any
    hidden_index: int
    states: States
    shared_inputs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class LayerChain:
    """Traced model. `results`: by layer; `norm`: computation after the layers; `width`: elements per token between layers;
    `grad_arguments`: leaf indices of differentiable arguments, by layer."""

    parts: ModelParts
    results: tuple[LayerResult, ...]
    norm: nn.Module
    norm_name: str  # in the model
    carried: Carried | None
    width: int
    grad_arguments: tuple[tuple[int, ...], ...]

    def embed(
        self, weights: Mapping[str, Tensor] | None, tokens_BT: Tensor, documents: Documents | None = None, **options: Any
    ) -> tuple[Tensor, list[Call]]:
        """Run the prologue: the first layer's input and the call of each layer. `weights`: by names in the body; `documents`:
        their lengths, for length-dependent rotary tables (None: whole sequences). With OF_TOWERS in
        `options`, the body is the model around the text decoder."""
        recorder = _Recorder(self.parts, self.results, self.carried)
        with tables_by_document(self.length_dependent, documents or ((tokens_BT.shape[1],),)):
            recorder.run(weights, tokens_BT, **options)
        return recorder.first_BTD, recorder.calls

    @cached_property
    def length_dependent(self) -> list[nn.Module]:
        """Rotary embeddings with frequencies that depend on the length of a document. WorkloadError if a layer has one."""
        if any(length_dependent(layer) for layer in self.parts.layers):
            self.parts.fail("positions within its layers depend on the length of a document")
        return length_dependent(self.parts.body)

    def norm_input(self, hidden_BTD: Tensor) -> Tensor:
        """Input of the final norm, given the last layer's output."""
        return hidden_BTD if self.carried is None else self.carried.hidden_state(hidden_BTD)

    @property
    def prologue_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters before the layers, by names in the model."""
        excluded = tuple(f"{name}." for name in (self.parts.layers_name, self.parts.head_name))
        parameters = self.parts.model.named_parameters()
        return {n: p for n, p in parameters if not n.startswith(excluded) and n not in self.epilogue_parameters}

    @property
    def epilogue_parameters(self) -> dict[str, nn.Parameter]:
        return {f"{self.norm_name}.{name}": p for name, p in self.norm.named_parameters()}


def trace(parts: ModelParts) -> LayerChain:
    """Trace a model in one forward pass, before adapters and kernels change its layers. Makes the buffers outside the layers."""
    parts.make_buffers("cpu")
    tracer, norm, norm_name = _Tracer(parts, torch.zeros(1, 2, dtype=torch.long)), parts.norm, parts.norm_name
    with parts.zero_parameters():
        tracer.run(None, tracer.tokens_BT)
        carried = carried_of(tracer.first_BTD, tracer.tokens_BT.shape, tracer.states)
        if norm is None or not tracer.ends_with(norm):
            norm, norm_name = Epilogue(parts, tuple(tracer.results), carried, tracer.epilogue_modules()), parts.owner_name
    width = tracer.first_BTD.shape[-1] if carried is None else sum(carried.sizes)
    grad_arguments = tuple(tuple(call.grad_arguments) for call in tracer.calls)
    return LayerChain(parts, tuple(tracer.results), norm, norm_name, carried, width, grad_arguments)


class Epilogue(nn.Module):
    """Computation after the layers, if more than a norm: the body's forward on one token, then on the last layer's output."""

    def __init__(self, parts: ModelParts, results: Sequence[LayerResult], carried: Carried | None, children: set[str]) -> None:
        super().__init__()
        self._parts, self._results, self._carried = parts, results, carried
        for name, part in parts.owner.named_children():
            if name in children:
                self.add_module(name, part)

    def forward(self, hidden: Tensor) -> Tensor:
        device = "cpu" if hidden.is_meta else hidden.device
        with self._parts.zero_parameters(self, device):
            one = torch.zeros(1, 1, dtype=torch.long, device=device)
            out_BTD: Tensor = _Recorder(self._parts, self._results, self._carried, hidden).run(None, one)
        return out_BTD


class _Stop(Exception):
    """Ends a forward pass at the last layer."""


class _Recorder:
    """One run of a body with recorders in place of the layers, which return the hidden state unchanged."""

    first_BTD: Tensor  # input of the first layer

    def __init__(
        self, parts: ModelParts, results: Sequence[LayerResult], carried: Carried | None = None, last_BTD: Tensor | None = None
    ) -> None:
        self.parts, self.results, self.carried, self.last_BTD = parts, results, carried, last_BTD
        self.calls: list[Call] = []
        self._unread: dict[int, Tensor] = {}  # outputs of layers other than the hidden state, by id

    def run(self, weights: Mapping[str, Tensor] | None, tokens_BT: Tensor, **options: Any) -> Any:
        """Run the body with `last_BTD` as the last layer's output and return its output; without it, stop at the last layer."""
        layers, arguments = self.parts.layers, {"input_ids": tokens_BT, "use_cache": False, **options}
        body = self.parts.whole_body if OF_TOWERS in options else self.parts.body
        with replaced_forwards({layer: partial(self._record, i) for i, layer in enumerate(layers)}), suppress(_Stop):
            out = body(**arguments) if weights is None else functional_call(body, dict(weights), (), arguments, strict=False)
        if len(self.calls) != len(layers):
            self.parts.fail(f"{len(self.calls)} of {len(layers)} layers were run")
        return None if self.last_BTD is None else out[0]

    def _record(self, i: int, /, *args: Any, **kwargs: Any) -> Any:
        """Record a layer's arguments, and return its hidden state unchanged."""
        leaves, spec = tree_flatten((args, kwargs))
        if i != len(self.calls):
            self.parts.fail(f"layer {i} runs in place of layer {len(self.calls)}")
        if i == 0:
            index = next(j for j, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point())
            self._hidden, self._version = leaves[index], leaves[index]._version
            self.first_BTD = self._hidden if self.carried is None else self.carried.padded(self._hidden)
        else:
            matches = [j for j, t in enumerate(leaves) if is_view_of_all(t, self._hidden)]
            index = matches[0] if matches else self.parts.fail(f"it computes something between layers {i - 1} and {i}")
        if self._hidden._version != self._version:
            self.parts.fail(f"the hidden state is changed in place before layer {i}")
        leaves = [_UNREAD if id(t) in self._unread else t for t in leaves]
        result, leaves[index] = self._result(i, leaves, spec, index), None
        self.calls.append(Call(tuple(leaves), spec, index, result.hidden_index, self.carried))
        if i == len(self.parts.layers) - 1:
            if self.last_BTD is None:
                raise _Stop
            self._hidden, self._version = self.last_BTD, self.last_BTD._version
        out = [torch.empty(0) if isinstance(t, Tensor) else t for t in result.leaves]
        self._unread |= {id(t): t for t in out if isinstance(t, Tensor)}
        out[result.hidden_index] = self._hidden
        return tree_unflatten(out, result.spec)

    def _result(self, i: int, leaves: list[Any], spec: Any, index: int) -> LayerResult:
        return self.results[i]


class _Tracer(_Recorder):
    """First run of a body, in which a layer of each kind runs on the meta device."""

    results: list[LayerResult]

    def __init__(self, parts: ModelParts, tokens_BT: Tensor) -> None:
        super().__init__(parts, [])
        self.tokens_BT, self.results = tokens_BT, []
        self.states: dict[str, tuple[Tensor, ...]] = {}  # keys and values for later layers, on the meta device
        self._forwards = [layer.forward for layer in parts.layers]
        config = parts.model.config
        name, fields = type(parts.model).__name__, config.to_json_string(use_diff=False)
        self._by_kind = _results_by_kind(name, fields, config._attn_implementation)

    def _result(self, i: int, leaves: list[Any], spec: Any, index: int) -> LayerResult:
        arguments = tuple(None if j == index else t for j, t in enumerate(leaves))
        key = kind_of(self.parts.layers[i], Call(arguments, spec, index, 0), by_identity=False)
        if key not in self._by_kind:
            self._by_kind[key] = self._run_layer(i, leaves, spec, leaves[index].shape)
        self.results.append(self._by_kind[key])
        self.states |= self.results[i].states
        return self.results[i]

    def _run_layer(self, i: int, leaves: list[Any], spec: Any, shape: torch.Size) -> LayerResult:
        # bf16: grouped_mm on the meta device takes no other float
        dtypes = [torch.bfloat16 if isinstance(t, Tensor) and t.is_floating_point() else None for t in leaves]
        meta = [t.to("meta", dtype) if isinstance(t, Tensor) else t for t, dtype in zip(leaves, dtypes, strict=True)]
        leaves, shared = with_states(meta, self.states)
        args, kwargs = tree_unflatten(leaves, spec)
        with replaced_forwards({self.parts.layers[i]: self._forwards[i]}):
            layer = copy.deepcopy(self.parts.layers[i]).bfloat16()
        try:
            with torch.no_grad(), shared_inputs(layer) as groups:
                out_leaves, out_spec = tree_flatten(layer(*args, **kwargs))
        except (AttributeError, TypeError):
            if _UNREAD not in map(str, leaves):
                raise
            self.parts.fail(f"layer {i} reads an output of another layer other than the hidden state")
        if len(tree_leaves((args, kwargs))) != len(leaves):
            self.parts.fail("a layer stores values for later layers in its arguments")
        output_index = next((j for j, t in enumerate(out_leaves) if isinstance(t, Tensor) and t.shape == shape), None)
        if output_index is None:
            self.parts.fail("a layer returns no hidden state")
        states = {name: tensors for name, tensors in shared.items() if tensors is not self.states.get(name)}
        if any(t.dim() != 4 or (t.shape[0], t.shape[2]) != self.tokens_BT.shape for tensors in states.values() for t in tensors):
            self.parts.fail("a layer stores values for later layers that are not keys and values")
        return LayerResult(out_leaves, out_spec, output_index, states, tuple(groups))

    def ends_with(self, norm: nn.Module) -> bool:
        """True if the body's output is exactly norm(last hidden state)."""
        calls: list[tuple[Any, Any]] = []
        last_BTD = torch.zeros_like(self.first_BTD)
        with norm.register_forward_hook(lambda _, inputs, out: calls.append((inputs[0], out))):
            out = _Recorder(self.parts, self.results, last_BTD=last_BTD).run(None, self.tokens_BT)
        is_single = len(calls) == 1 or not list(norm.parameters())  # a norm without weights may run before the layers, too
        return is_single and bool(calls) and calls[-1][0] is last_BTD and is_view_of_all(out, calls[-1][1])

    def epilogue_modules(self) -> set[str]:
        """Names of the owner's children that get a gradient after the layers."""
        last_BTD, start = torch.zeros_like(self.first_BTD).requires_grad_(), f"{self.parts.owner_name}."
        try:
            with torch.enable_grad():
                out_BTD = _Recorder(self.parts, self.results, last_BTD=last_BTD).run(None, self.tokens_BT[:, :1])
                total = out_BTD.sum()
        except RuntimeError:  # the epilogue depends on the number of tokens
            self.parts.fail("its computation after the layers is not supported")
        weights = {n: p for n, p in self.parts.model.named_parameters() if not p.is_meta}
        gradients = torch.autograd.grad(total, [*weights.values(), last_BTD], allow_unused=True)
        used = [n for n, gradient in zip(weights, gradients, strict=False) if gradient is not None]
        has_others = any(not n.startswith(start) or "." not in n.removeprefix(start) for n in used)
        if has_others or out_BTD.shape[:2] != self.tokens_BT.shape:
            self.parts.fail("its computation after the layers is not supported")
        return {n.removeprefix(start).partition(".")[0] for n in used}


@lru_cache(maxsize=64)
def _results_by_kind(*model: object) -> dict[object, LayerResult]:
    """Results of layers by kind, shared by equal models, because a run builds several."""
    return {}


@contextmanager
def shared_inputs(layer: nn.Module) -> Iterator[list[tuple[str, ...]]]:
    """Collect names of linear modules that have one parent and the same input, and are called once within the context.
    Example: [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")]."""
    calls, groups, by_input = list[tuple[str, Any]](), list[tuple[str, ...]](), dict[tuple[str, int], list[str]]()
    linear = {name: part for name, part in layer.named_modules() if isinstance(part, nn.Linear)}
    hooks = {name: lambda _, inputs, name=name: calls.append((name, inputs)) for name in linear}
    handles = [part.register_forward_pre_hook(hooks[name]) for name, part in linear.items()]
    yield groups
    for handle in handles:
        handle.remove()
    for name, inputs in calls:
        if inputs and sum(name == called for called, _ in calls) == 1:
            by_input.setdefault((name.rpartition(".")[0], id(inputs[0])), []).append(name)
    groups += (tuple(names) for names in by_input.values() if len(names) > 1)


def kind_of(layer: nn.Module, call: Call, by_identity: bool = True) -> object:
    """A key that is equal for layers with the same computation: module types and scalar attributes, parameter shapes, argument
    shapes. `by_identity`: different masks of equal shape give different keys."""
    plain = int, float, str, bool, type(None)
    numbers = [
        (name, type(m).__name__, *sorted((k, str(v)) for k, v in vars(m).items() if type(v) in plain and k not in _NOT_IN_KIND))
        for name, m in layer.named_modules()
    ]
    arguments = [
        (id(t) if by_identity and not t.requires_grad else 0, t.shape, t.dtype) if isinstance(t, Tensor) else str(t)[:80]
        for t in call.leaves
    ]
    return (*numbers, *((name, p.shape, p.dtype) for name, p in layer.named_parameters()), *arguments)


def is_view_of_all(view: Any, tensor: Tensor) -> bool:
    """True if `view` is this tensor or a view of all of it."""
    if view is tensor or not isinstance(view, Tensor) or view.is_meta:
        return view is tensor
    return view.shape == tensor.shape and view.stride() == tensor.stride() and view.data_ptr() == tensor.data_ptr()
