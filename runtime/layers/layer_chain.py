"""Split a model into prologue, layers and epilogue by running its own forward with recorders in place of the layers.

A recorder stores the arguments of its layer (masks, rotary tables, positions). It also checks that the layers form a chain: the
input of each must be the tensor that the previous one returned. WorkloadError, with the reason, for any other model.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from penstock.runtime.errors import WorkloadError

from .meta_models import sees_images

Documents = tuple[tuple[int, ...], ...]  # tokens per document, by packed sequence, e.g. ((5, 11, 1), (17,))


@dataclass(frozen=True, slots=True)
class Carried:
    """Hidden state and keys and values for later layers, concatenated to one tensor (B, T, D + E), zero until computed. Layers
    exchange one tensor, and gradients of shared tensors accumulate. Several residual streams are flattened into D."""

    width: int  # D, of all streams
    heads: Mapping[str, tuple[tuple[int, int], ...]]  # number and width of heads of each tensor, by the key that layers read
    streams: tuple[int, int] | None = None  # number of streams, and their dimension in the model's tensor

    @property
    def sizes(self) -> list[int]:
        """Elements per token of the hidden state and of each tensor; their sum is D + E."""
        return [self.width, *(n * width for shapes in self.heads.values() for n, width in shapes)]

    def padded(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Pad the first layer's input with zeros for keys and values."""
        return nn.functional.pad(self._joined(hidden_BTD), (0, sum(self.sizes) - self.width))

    def _joined(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.streams is None or hidden.dim() < 4 else hidden.movedim(self.streams[1], 2).flatten(2)

    def hidden_state(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden state in the model's shape."""
        hidden = x[..., : self.width]
        if self.streams is not None:
            hidden = hidden.unflatten(-1, (self.streams[0], -1)).movedim(2, self.streams[1])
        return hidden.contiguous()

    def hidden_and_states(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, ...]]]:
        """Hidden state; keys and values (B, H, T, W) by key."""
        t = iter(x.split(self.sizes, -1)[1:])
        heads = self.heads.items()
        return self.hidden_state(x), {key: tuple(next(t).unflatten(-1, n).transpose(1, 2) for n in shapes) for key, shapes in heads}

    def concatenated(self, hidden_BTD: torch.Tensor, states: Mapping[str, tuple[torch.Tensor, ...]]) -> torch.Tensor:
        return torch.cat([self._joined(hidden_BTD), *(t.transpose(1, 2).flatten(2) for key in self.heads for t in states[key])], -1)


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a layer without the hidden state. `hidden_index`, `output_index`: its leaf index in arguments and result."""

    leaves: tuple[Any, ...]
    spec: Any
    hidden_index: int
    output_index: int
    carried: Carried | None = None
    documents: Documents | None = None  # None: not packed

    def run(self, layer: Callable[..., Any], hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Next hidden state (B, T, D)."""
        leaves = list(self.leaves)
        if self.carried is None:
            leaves[self.hidden_index] = hidden_BTD
        else:
            leaves[self.hidden_index], states = self.carried.hidden_and_states(hidden_BTD)
            shared = next((type(t)(states) for t in leaves if isinstance(t, UserDict)), UserDict(states))
            # also holds zeros for keys of later layers; `_layer_result` has run the layer without these
            leaves = [shared if isinstance(t, UserDict) else t for t in leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        out_BTD: torch.Tensor = tree_leaves(layer(*args, **kwargs))[self.output_index]
        return out_BTD if self.carried is None else self.carried.concatenated(out_BTD, shared)

    @property
    def grad_arguments(self) -> dict[int, torch.Tensor]:
        """Differentiable arguments, by leaf index."""
        return {j: t for j, t in enumerate(self.leaves) if isinstance(t, torch.Tensor) and t.requires_grad}

    def with_leaves(self, replacements: Mapping[int, Any]) -> "Call":
        return replace(self, leaves=tuple(replacements.get(j, t) for j, t in enumerate(self.leaves))) if replacements else self

    def window(self, seq_len: int) -> int | None:
        """Smallest attention window among the masks, in tokens; None if every mask is fully causal."""
        masks = (t for t in self.leaves if isinstance(t, torch.Tensor) and t.dim() == 4 and t.shape[-2:] == (seq_len, seq_len))
        n_visible = [int((t if t.dtype is torch.bool else t == 0)[0, 0].sum(-1).max()) for t in masks]
        return min((n for n in n_visible if n < seq_len), default=None)


@dataclass(frozen=True, slots=True)
class _LayerResult:
    """Leaves of a layer's result, index of the hidden state among them, and keys and values for later layers."""

    leaves: list[Any]
    spec: Any
    hidden_index: int
    states: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    shared_inputs: tuple[tuple[str, ...], ...] = ()


_NOT_IN_KIND = ("layer_idx", "training")
_UNREAD = "unread output of another layer"
_LAST_NORMS = ("norm", "final_layernorm", "ln_f", "norm_f", "final_layer_norm", "embedding_norm")


class _Stop(Exception):
    """Ends a forward pass at the last layer."""


class _Output(BaseModelOutputWithPast):
    """Output of a body: its last hidden state; other attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Temporarily replace the `forward` of these modules, and no other attribute."""
    originals = {part: vars(part).get("forward") for part in forwards}
    for part, forward in forwards.items():
        vars(part)["forward"] = forward
    try:
        yield
    finally:
        for part, original in originals.items():
            vars(part).pop("forward") if original is None else vars(part).update(forward=original)


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


class LayerChain:
    """Prologue, layers and epilogue of a model with layers on the meta device. Names are those in the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """WorkloadError for a model without a list of layers, or with a weight in two layers."""
        self.model, layers = model, _layer_list(model)
        names = {id(module): name for name, module in model.named_modules()}
        self.layers_name = names[id(layers)]
        owner = model.get_submodule(self.layers_name.rpartition(".")[0])
        body = owner if model.base_model is model else model.base_model  # Llama 4's prefix names a larger model
        self.body = model.get_decoder() if sees_images(model.config) and body is not owner else body
        self.body_name, self._whole_body = names[id(self.body)], body
        self.embedding_name = names[id(model.get_input_embeddings())]
        self.head: Any = getattr(model, "score", None) or model.get_output_embeddings()
        self.head_name = names[id(self.head)] if self.head is not None else self._fail("it has no output matrix")
        self.layers = list(layers)
        self._check_shared_weights()
        norms = [name for name, part in owner.named_children() if "norm" in type(part).__name__.lower()]
        norms = norms if len(norms) == 1 else [name for name in norms if name in _LAST_NORMS]
        self._owner, self._owner_name = owner, names[id(owner)]
        self.norm: nn.Module = getattr(owner, norms[0]) if len(norms) == 1 else Epilogue(self)
        self.norm_name = names.get(id(self.norm), self._owner_name)
        self._forwards = [layer.forward for layer in self.layers]
        self._results: dict[int, _LayerResult] = {}  # by layer
        config = model.config.to_json_string(use_diff=False)
        self._results_by_kind = _results_of(type(model).__name__, config, model.config._attn_implementation)
        self._states: dict[str, tuple[torch.Tensor, ...]] = {}  # keys and values for later layers, on the meta device
        self.carried: Carried | None = None
        self.calls: list[Call] = []
        self.grad_arguments: list[tuple[int, ...]] = []  # leaf indices of differentiable arguments, by layer
        self._created: list[tuple[nn.Module, str]] = []  # buffers missing from checkpoint files

    def _fail(self, why: str) -> NoReturn:
        raise WorkloadError(f"{type(self.model).__name__} cannot be trained by layers: {why}")

    def _check_shared_weights(self) -> None:
        owners: dict[int, int] = {}
        for i, layer in enumerate(self.layers):
            for p in layer.parameters():
                if owners.setdefault(id(p), i) != i:
                    self._fail(f"layers {owners[id(p)]} and {i} share a weight")
        if any(id(p) in owners for m in self._outside() for p in m.parameters(recurse=False)):
            self._fail("a layer's weight is used outside of it")

    def _outside(self) -> list[nn.Module]:
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        return [m for m in self.model.modules() if id(m) not in inside]

    def _record(self, i: int, /, *args: Any, **kwargs: Any) -> Any:
        """Record a layer's arguments, and return its hidden state unchanged."""
        leaves, spec = tree_flatten((args, kwargs))
        if i != len(self.calls):
            self._fail(f"layer {i} runs in place of layer {len(self.calls)}")
        if i == 0:
            index = next(j for j, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.is_floating_point())
            self._hidden, self._version = leaves[index], leaves[index]._version
            self.hidden_BTD = self._hidden if self.carried is None else self.carried.padded(self._hidden)
        else:
            matches = [j for j, t in enumerate(leaves) if is_view_of_all(t, self._hidden)]
            index = matches[0] if matches else self._fail(f"it computes something between layers {i - 1} and {i}")
        if self._hidden._version != self._version:
            self._fail(f"the hidden state is changed in place before layer {i}")
        leaves = [_UNREAD if id(t) in self._unread else t for t in leaves]
        if i not in self._results:
            self._results[i] = self._layer_result(i, leaves, spec, index)
            self._states |= self._results[i].states
        result, leaves[index] = self._results[i], None
        self.calls.append(Call(tuple(leaves), spec, index, result.hidden_index, self.carried))
        if i == len(self.layers) - 1:
            if self._last_BTD is None:
                raise _Stop
            self._hidden, self._version = self._last_BTD, self._last_BTD._version
        out = [torch.empty(0) if isinstance(t, torch.Tensor) else t for t in result.leaves]
        self._unread |= {id(t): t for t in out if isinstance(t, torch.Tensor)}
        out[result.hidden_index] = self._hidden
        return tree_unflatten(out, result.spec)

    def _layer_result(self, i: int, leaves: list[Any], spec: Any, index: int) -> _LayerResult:
        arguments = tuple(None if j == index else t for j, t in enumerate(leaves))
        key = self.kind(self.layers[i], Call(arguments, spec, index, 0), by_identity=False)
        if key not in self._results_by_kind:
            shared = UserDict(self._states)

            def on_meta(t: Any) -> Any:
                if isinstance(t, torch.Tensor):  # bf16: grouped_mm on the meta device takes no other float
                    return t.to("meta", torch.bfloat16 if t.is_floating_point() else t.dtype)
                return shared if isinstance(t, UserDict) else t

            args, kwargs = tree_unflatten(list(map(on_meta, leaves)), spec)
            with _replaced_forwards({self.layers[i]: self._forwards[i]}):
                layer = copy.deepcopy(self.layers[i]).bfloat16()
            try:
                with torch.no_grad(), shared_inputs(layer) as groups:
                    out_leaves, out_spec = tree_flatten(layer(*args, **kwargs))
            except (AttributeError, TypeError):
                if _UNREAD not in map(str, leaves):
                    raise
                self._fail(f"layer {i} reads an output of another layer other than the hidden state")
            if len(tree_leaves((args, kwargs))) != len(leaves):
                self._fail("a layer stores values for later layers in its arguments")
            shape = leaves[index].shape
            output_index = next((j for j, t in enumerate(out_leaves) if isinstance(t, torch.Tensor) and t.shape == shape), None)
            if output_index is None:
                self._fail("a layer returns no hidden state")
            states = {name: tensors for name, tensors in shared.items() if tensors is not self._states.get(name)}
            if any(t.dim() != 4 or (t.shape[0], t.shape[2]) != self._size for tensors in states.values() for t in tensors):
                self._fail("a layer stores values for later layers that are not keys and values")
            self._results_by_kind[key] = _LayerResult(out_leaves, out_spec, output_index, states, tuple(groups))
        return self._results_by_kind[key]

    def shared_inputs(self, i: int) -> tuple[tuple[str, ...], ...]:
        """Names of a layer's linear modules with the same input."""
        return self._results[i].shared_inputs

    def run_body(self, weights: Mapping[str, torch.Tensor] | None, last_BTD: Any = None, **batch: Any) -> Any:
        """Run the body with recorders in place of its layers (records: `take_calls`). With `last_BTD` as the last layer's output,
        return the body's output; without, stop at the last layer. `weights`: by names in the body."""
        self.calls, self._last_BTD, self._size = [], last_BTD, batch["input_ids"].shape
        self._unread: dict[int, torch.Tensor] = {}
        with _replaced_forwards({layer: partial(self._record, i) for i, layer in enumerate(self.layers)}), suppress(_Stop):
            out = self.body(**batch) if weights is None else functional_call(self.body, dict(weights), (), batch, strict=False)
        if len(self.calls) != len(self.layers):
            self._fail(f"{len(self.calls)} of {len(self.layers)} layers were run")
        return last_BTD if last_BTD is None else out[0]

    def take_calls(self) -> tuple[torch.Tensor, list[Call]]:
        """Return and clear the recorded input of the first layer and the call of each layer."""
        hidden_BTD, calls = self.hidden_BTD, self.calls
        del self.hidden_BTD, self._hidden
        self.calls = []
        self._unread.clear()
        return hidden_BTD, calls

    def norm_input(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Input of the final norm, given the last layer's output."""
        return hidden_BTD if self.carried is None else self.carried.hidden_state(hidden_BTD)

    def _is_norm(self, tokens_BT: torch.Tensor) -> bool:
        """True if the body's output is exactly norm(last hidden state)."""
        calls: list[tuple[Any, Any]] = []
        last_BTD = torch.zeros_like(self.hidden_BTD)
        with self.norm.register_forward_hook(lambda _, inputs, out: calls.append((inputs[0], out))):
            out = self.run_body(None, last_BTD, input_ids=tokens_BT, use_cache=False)
        is_single = len(calls) == 1 or not list(self.norm.parameters())  # a norm without weights may run before the layers, too
        return is_single and bool(calls) and calls[-1][0] is last_BTD and is_view_of_all(out, calls[-1][1])

    def _find_epilogue(self, tokens_BT: torch.Tensor) -> None:
        """Replace the norm by an `Epilogue` with the modules that get a gradient after the layers."""
        last_BTD, start = torch.zeros_like(self.hidden_BTD).requires_grad_(), f"{self._owner_name}."
        try:
            with torch.enable_grad():
                total = (out_BTD := self.run_body(None, last_BTD, input_ids=tokens_BT[:, :1], use_cache=False)).sum()
        except RuntimeError:  # the epilogue depends on the number of tokens
            self._fail("its computation after the layers is not supported")
        weights = {n: p for n, p in self.model.named_parameters() if not p.is_meta}
        gradients = torch.autograd.grad(total, [*weights.values(), last_BTD], allow_unused=True)
        used = [n for n, gradient in zip(weights, gradients, strict=False) if gradient is not None]
        if out_BTD.shape[:2] != tokens_BT.shape or not all(n.startswith(start) and "." in n.removeprefix(start) for n in used):
            self._fail("its computation after the layers is not supported")
        self.norm = Epilogue(self, {n.removeprefix(start).partition(".")[0] for n in used})
        self.norm_name = self._owner_name

    def logits(self, weights: Mapping[str, torch.Tensor] | None, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Logits of the model's own head, given the body's output; weights by names in the model."""
        batch = {"input_ids": torch.zeros(hidden_BTD.shape[:2], dtype=torch.long, device=hidden_BTD.device), "use_cache": False}
        parts = [self._whole_body, *self._whole_body.children()]  # heads may call a child
        with _replaced_forwards({part: lambda *_, **__: _Output(last_hidden_state=hidden_BTD) for part in parts}):
            out = self.model(**batch) if weights is None else functional_call(self.model, dict(weights), (), batch, strict=False)
        return out.logits  # type: ignore[no-any-return]

    @property
    def prologue_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters before the layers, by names in the model."""
        excluded = tuple(f"{name}." for name in (self.layers_name, self.head_name))
        return {n: p for n, p in self.model.named_parameters() if not n.startswith(excluded) and n not in self.epilogue_parameters}

    @property
    def epilogue_parameters(self) -> dict[str, nn.Parameter]:
        return {f"{self.norm_name}.{name}": p for name, p in self.norm.named_parameters()}

    @contextmanager
    def zero_parameters(self, device: torch.device | str = "cpu") -> Iterator[None]:
        """Temporarily replace parameters outside the layers and the epilogue by expanded zero scalars, which take no memory."""
        epilogue = set(self.norm.modules()) if isinstance(self.norm, Epilogue) else set()
        originals = [(part, dict(part._parameters)) for part in self._outside() if part not in epilogue]
        for part, parameters in originals:
            for name, p in parameters.items():
                if p is not None:
                    part._parameters[name] = nn.Parameter(torch.zeros(1, dtype=p.dtype, device=device).expand(p.shape))
        try:
            yield
        finally:
            for part, parameters in originals:
                part._parameters.update(parameters)

    def trace(self) -> None:
        """Trace the layers in one forward pass, before adapters and kernels change them."""
        self.make_buffers("cpu")
        with self.zero_parameters():
            tokens_BT = torch.zeros(1, 2, dtype=torch.long)
            self.run_body(None, input_ids=tokens_BT, use_cache=False)
            if isinstance(self.norm, Epilogue) or not self._is_norm(tokens_BT):
                self._find_epilogue(tokens_BT)
        hidden_BTD, calls = self.take_calls()
        self.grad_arguments = [tuple(call.grad_arguments) for call in calls]
        shape = hidden_BTD.shape
        dim = 2 if shape[:2] == self._size else 0
        self.width = shape[-1] if len(shape) == 3 else shape[dim] * shape[-1]  # elements per token between layers
        if self._states or len(shape) > 3:
            heads = {key: tuple((t.shape[1], t.shape[3]) for t in tensors) for key, tensors in self._states.items()}
            self.carried = Carried(self.width, heads, (shape[dim], dim) if len(shape) > 3 else None)
            self.width = sum(self.carried.sizes)

    @staticmethod
    def kind(layer: nn.Module, call: Call, by_identity: bool = True) -> object:
        """A key that is equal for layers with the same computation: module types and scalar attributes, parameter shapes, argument
        shapes. `by_identity`: different masks of equal shape give different keys."""
        plain = int, float, str, bool, type(None)
        numbers = [
            (name, type(m).__name__, *sorted((k, str(v)) for k, v in vars(m).items() if type(v) in plain and k not in _NOT_IN_KIND))
            for name, m in layer.named_modules()
        ]
        arguments = [
            (id(t) if by_identity and not t.requires_grad else 0, t.shape, t.dtype) if isinstance(t, torch.Tensor) else str(t)[:80]
            for t in call.leaves
        ]
        return (*numbers, *((name, p.shape, p.dtype) for name, p in layer.named_parameters()), *arguments)

    def make_buffers(self, device: torch.device | str, of_layers: bool = False) -> None:
        """Compute buffers missing from checkpoint files (frequencies, scales), outside of the layers or in the whole model."""
        unfilled = list[tuple[nn.Module, str]]()
        models = [m for m in self.model.modules() if isinstance(m, PreTrainedModel)]
        owner = {part: model for model in models for part in model.modules()}  # the innermost: `modules` yields it last
        for part in list(self.model.modules()) if of_layers else self._outside():
            buffers = {n: b for n, b in part.named_buffers(recurse=False) if b.is_meta or (part, n) in self._created}
            for name, buffer in buffers.items():
                initial = torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device=device)  # until filled
                part.register_buffer(name, initial, name not in part._non_persistent_buffers_set)
                self._created.append((part, name))
            if buffers:
                owner[part]._init_weights(part)
            unfilled += [(part, n) for n in buffers.keys() & part._non_persistent_buffers_set if part.get_buffer(n).isnan().any()]
        if unfilled:
            self.model._init_weights(self.body)  # Falcon H1 fills buffers of its layers there
        for part, name in unfilled:
            if part.get_buffer(name).isnan().any():
                self._fail(f"buffer {name} is computed only when its module is created")


class Epilogue(nn.Module):
    """Computation after the layers, if more than a norm: the body's forward on one token, then on the last layer's output."""

    def __init__(self, chain: LayerChain, children: Collection[str] = ()) -> None:
        super().__init__()
        self.chain = chain
        for name, part in chain._owner.named_children():
            if name in children:
                self.add_module(name, part)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        device = "cpu" if hidden.is_meta else hidden.device
        with self.chain.zero_parameters(device):
            one = torch.zeros(1, 1, dtype=torch.long, device=device)
            out_BTD: torch.Tensor = self.chain.run_body(None, hidden, input_ids=one, use_cache=False)
        self.chain.take_calls()
        return out_BTD


@lru_cache(maxsize=64)
def _results_of(*model: object) -> dict[object, _LayerResult]:
    """Results of layers by kind, shared by equal models, because a run builds several."""
    return {}


def is_view_of_all(view: Any, tensor: torch.Tensor) -> bool:
    """True if `view` is this tensor or a view of all of it."""
    if view is tensor or not isinstance(view, torch.Tensor) or view.is_meta:
        return view is tensor
    return view.shape == tensor.shape and view.stride() == tensor.stride() and view.data_ptr() == tensor.data_ptr()


def _layer_list(model: PreTrainedModel) -> nn.ModuleList:
    """Return the largest list of modules of the classes in `_no_split_modules`, which FSDP wraps."""
    classes = set(model._no_split_modules or ())
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    named = [m for m in lists if {type(layer).__name__ for layer in m} <= classes] or lists
    if not named:
        raise WorkloadError(f"{type(model).__name__} cannot be trained by layers: it has no list of layers")
    return max(named, key=lambda m: sum(p.numel() for p in m.parameters()))
