"""Record the forward pass of a module on meta tensors as a layer trace, with dispatch modes and saved-tensor hooks.

Each library call is recorded with its inputs, outputs and weights, the tensors that autograd saves, and other live tensors.
Tensors are identified by storage, so a view and its base are one tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.runtime.errors import WorkloadError
from penstock.runtime.layers.kernels import gate_of, is_rms_norm, is_rotary_call, rotates
from penstock.runtime.layers.transformers_patches import (
    ALL_ATTENTION_FUNCTIONS,
    EAGER_ATTENTION,
    LIBRARY_KERNELS,
    PLAIN_MLP,
    ROTARY,
    WITH_SINKS,
    Conv1D,
)

from .trace import FUSED_ATTENTION, OWN_FUNCTION, RECORDED_ITEM_BYTES, Group, LibraryCall, TensorInfo

_SHAPED = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", FUSED_ATTENTION}


class _Functions(TorchFunctionMode):
    """Records scaled_dot_product_attention as one call, and marks the start of each torch function."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.recorder.is_new = True
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.recorder.attends(*args[:3])
        mask = kwargs.get("attn_mask")
        learns = mask is not None and mask.requires_grad
        if learns or args[0].shape[-1] != args[2].shape[-1]:  # unsupported by some fused kernels: decompose
            with self.recorder.group("attention", "", []):
                return func(*args, **kwargs)
        if mask is not None and mask.dtype is torch.bool:
            kwargs = kwargs | {"attn_mask": torch.empty_like(mask, dtype=args[0].dtype)}
            self.recorder.calls[-1].name = "bias_of_mask"
        chosen = {k: v for k, v in kwargs.items() if k in ("dropout_p", "is_causal", "attn_mask", "scale")}
        return getattr(torch.ops.aten, FUSED_ATTENTION)(*args[:3], **chosen)[0]


class _Recorder(TorchDispatchMode):
    def __init__(self, module: nn.Module, hidden: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {storage_of(p): name for name, p in module.named_parameters()}
        self.tensors: list[TensorInfo] = []
        self.calls: list[LibraryCall] = []
        self.groups: list[Group] = []
        self.ids: dict[int, int] = {}
        self.refs: list[StorageWeakRef] = []  # kept alive, so that no other storage gets the address
        self.pending: list[int] = []  # tensors that autograd saved before their call was recorded
        self.needed: set[str] = set()  # weights that autograd saves
        self.is_new = True  # a torch function has begun and no call was recorded since
        self.attention: list[int | None] | None = None  # as in `LayerTrace`, without the window
        for t in [*([] if hidden is None else [hidden]), *inputs]:
            if storage_of(t) not in self.names:
                self.number(t, internal=False)

    def number(self, t: torch.Tensor, internal: bool = True) -> int:
        ref = StorageWeakRef(t.untyped_storage())
        if ref.cdata not in self.ids:
            self.ids[ref.cdata] = len(self.tensors)
            self.refs.append(ref)
            n_elements = t.untyped_storage().nbytes() // t.element_size()
            self.tensors.append(TensorInfo(n_elements, t.element_size(), internal, t.is_floating_point()))
        return self.ids[ref.cdata]

    def saved(self, t: torch.Tensor) -> torch.Tensor:
        """Pack hook of `saved_tensors_hooks`."""
        if (key := storage_of(t)) in self.names:
            self.needed.add(self.names[key])
        else:
            i = self.number(t)
            (self.pending if self.is_new or i not in self.calls[-1].makes else self.calls[-1].saves).append(i)
        return t

    @contextmanager
    def group(self, kind: str, name: str, operands: Sequence[Any]) -> Iterator[list[Any]]:
        """Record the calls in this context as a group; the caller appends the results to the list."""
        first, results = len(self.calls), list[Any]()
        if self.pending and self.calls:  # saved at the end of a custom autograd.Function
            self.calls[-1].name, self.calls[-1].saves = OWN_FUNCTION, [*self.calls[-1].saves, *self.pending]
            self.pending = []
        known = [self.number(t) for t in operands if isinstance(t, torch.Tensor)]
        yield results
        if len(self.calls) > first:
            outputs = [self.number(t) for t in results if isinstance(t, torch.Tensor)]
            self.groups.append(Group(kind, name, first, len(self.calls), known, outputs))

    def part(self, original: Callable[..., Any], kind: str, name: str) -> Callable[..., Any]:
        """Wrap a function so that its calls are recorded as a group, or as one call if it is a library kernel."""

        def function(*args: Any, **kwargs: Any) -> Any:
            if kind in LIBRARY_KERNELS.values():
                operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                return self.at_once(kind, operands, lambda: original(*args, **kwargs))
            if kind == "rotary" and not is_rotary_call(args, kwargs):
                return original(*args, **kwargs)
            if kind in ("attention", WITH_SINKS):
                self.attends(*args[1:4])
            if kind == WITH_SINKS:
                self.attention = [*(self.attention or ()), 1]
                return self.at_once(FUSED_ATTENTION, [*args[1:4], kwargs["s_aux"]], lambda: original(*args, **kwargs))
            with self.group(kind, name, [*args, *kwargs.values()]) as results:
                results.extend(tree_leaves(out := original(*args, **kwargs)))
            return out

        return function

    def at_once(self, name: str, operands: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Run a part of the pass and record it as one call; discard its inner calls and intermediate tensors."""
        n_calls, n_made, pending = len(self.calls), len(self.tensors), self.pending
        out = run()
        del self.calls[n_calls:], self.tensors[n_made:], self.refs[n_made:]
        self.ids = {key: i for key, i in self.ids.items() if i < n_made}
        reads = [self.number(t) for t in operands if storage_of(t) not in self.names]
        weights = [self.names[storage_of(t)] for t in operands if storage_of(t) in self.names]
        makes = [self.number(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.calls.append(LibraryCall(name, reads, weights, makes, pending, [], [list(t.shape) for t in operands], [0, 0]))
        self.pending, self.is_new = [], False
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and not _has_zero_dropout(func, args, kwargs):
            random_call = func.overloadpacket.__name__
            raise WorkloadError(
                f"a layer draws random numbers ({random_call}); plan with --no-dropout, which trains with dropout off"
            )
        input_storages = {storage_of(t) for t in reads}
        out = func(*args, **(kwargs or {}))
        makes = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in makes if storage_of(t) not in input_storages]
        if not fresh and not func._schema.is_mutable:
            return out
        name = func.overloadpacket.__name__
        tensors = [t for t in reads if storage_of(t) not in self.names]
        moved = [0, 0]
        for t in _moving(name, reads, makes):
            wide = t.element_size() != RECORDED_ITEM_BYTES or not t.is_floating_point()
            moved[wide] += min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) * (t.element_size() if wide else 1)
        weights = [self.names[storage_of(t)] for t in reads if storage_of(t) in self.names]
        shapes = [list(t.shape) for t in reads] if name in _SHAPED else []
        known, outputs = [self.number(t) for t in tensors], [self.number(t) for t in fresh]
        self.calls.append(LibraryCall(name, known, weights, outputs, self.pending, [], shapes, moved))
        self.pending, self.is_new = [], False
        self.calls[-1].held.extend(i for i, ref in enumerate(self.refs) if self.tensors[i].internal and not ref.expired())
        return out

    def attends(self, q_BHTE: torch.Tensor, k_BHTE: torch.Tensor, v_BHTE: torch.Tensor) -> None:
        self.attention = [q_BHTE.shape[1], k_BHTE.shape[1], (q_BHTE.shape[-1] + v_BHTE.shape[-1]) // 2]

    def finished(self) -> None:
        """Reduce the live tensors of each call to those that are freed next, and are neither its operands nor saved by any call.
        Drop the groups of modules that only look like linear layers."""
        self.groups = [g for g in self.groups if g.kind not in ("as_linear", "conv1d") or self._is_linear(g)]
        saved = {i for call in self.calls for i in call.saves}
        last = {i: n for n, call in enumerate(self.calls) for i in call.held}
        for n, call in enumerate(self.calls):
            call.held[:] = [i for i in call.held if last[i] == n and i not in saved and i not in (*call.reads, *call.makes)]

    def _is_linear(self, group: Group) -> bool:
        """True if the calls of a group are one product with the weight of its module, and at most the sum with its bias."""
        calls = self.calls[group.first : group.end]
        product = next((call for call in calls if call.name in ("mm", "addmm")), None)
        is_product = product is not None and f"{group.name}.weight" in product.weights and len(group.results) == 1
        return is_product and all(call is product or call.name == "add" for call in calls)


def storage_of(t: torch.Tensor) -> int:
    """Key of a tensor's storage, valid while the storage is alive."""
    return StorageWeakRef(t.untyped_storage()).cdata  # type: ignore[no-any-return]


def _has_zero_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """True if a random op has no effect, because its dropout probability is zero."""
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
    return not arguments.get("dropout_p", arguments.get("p", 1.0 if "dropout" in func.overloadpacket.__name__ else 0.0))


def _moving(name: str, reads: list[torch.Tensor], makes: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a call reads or writes: a gather reads as much of its source as it outputs, an allocation nothing."""
    if name in ("empty_like", "new_empty", "empty"):
        return []
    if name in ("index", "index_select", "gather", "embedding"):
        return [*makes, *makes, *reads[1:]]
    return [*reads, *makes]


def record(
    module: nn.Module,
    run: Callable[[], torch.Tensor],
    hidden: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    library_kernels: Sequence[str] = (),
) -> dict[str, Any]:
    """Record `run`, a forward pass of the module on `hidden` and other `inputs`; return the trace in JSON form."""
    recorder = _Recorder(module, hidden, inputs)
    with ExitStack() as stack:
        for place, name, original, kind, part in _parts(module, library_kernels):
            stack.enter_context(_replaced(place, name, recorder.part(original, kind, part)))
        stack.enter_context(saved_tensors_hooks(recorder.saved, lambda t: t))
        stack.enter_context(_Functions(recorder))
        stack.enter_context(recorder)
        out = run()
    del out
    recorder.finished()
    sides = [recorder.number(t) for t in inputs if t.requires_grad]
    optional: dict[str, Any] = {"sides": sides} if sides else {}
    if hidden is None and recorder.needed:
        optional["needed"] = sorted(recorder.needed)
    parameters = {name: list(p.shape) for name, p in module.named_parameters()}
    return {
        "parameters": parameters,
        **{key: [[getattr(row, f) for f in row.__slots__] for row in rows] for key, rows in
           (("made", recorder.tensors), ("calls", recorder.calls), ("groups", recorder.groups))},
        "attention": recorder.attention, **optional,
    }  # fmt: skip


def _kind(part: nn.Module) -> str | None:
    if is_rms_norm(part):
        return "norm"
    if isinstance(part, nn.Linear):
        return "linear" if type(part).forward is nn.Linear.forward else "as_linear"
    if isinstance(part, Conv1D):
        return "conv1d"
    if {name for name, _ in part.named_children()} != PLAIN_MLP:
        return None
    return "mlp" if gate_of(part) is None else "gated"


# Namespace that holds a function, its key there, the function, its group kind, and the name of its module
Place = tuple[dict[str, Any], str, Callable[..., Any], str, str]


def _parts(module: nn.Module, library_kernels: Sequence[str]) -> Iterator[Place]:
    """Yield the functions to record as groups: forwards of submodules, and module-level functions that they call."""
    for name, part in module.named_modules():
        if (kind := _kind(part)) is not None:
            yield vars(part), "forward", part.forward, kind, name
    yield from functions(module, library_kernels).values()


def functions(module: nn.Module, library_kernels: Sequence[str]) -> dict[tuple[int, str], Place]:
    """Find the rotary, attention and library functions that forwards call by global name; keys are (id of globals, name)."""
    places = dict[tuple[int, str], Place]()
    libraries = [(name, kernel) for name, kernel in LIBRARY_KERNELS.items() if kernel in library_kernels]
    for part in module.modules():
        forward: Any = part.forward
        glob = getattr(forward, "__globals__", {})
        for name, kind in ((ROTARY, "rotary"), (EAGER_ATTENTION, "attention"), *libraries):
            if name in glob and name in forward.__code__.co_names and (kind != "rotary" or rotates(glob[name])):
                places[id(glob), name] = (glob, name, glob[name], kind, "")
        if getattr(getattr(part, "config", None), "_attn_implementation", None) == WITH_SINKS:
            registry: Any = ALL_ATTENTION_FUNCTIONS
            places[id(registry), WITH_SINKS] = (registry, WITH_SINKS, registry[WITH_SINKS], WITH_SINKS, "")
    return places


@contextmanager
def _replaced(place: dict[str, Any], name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Temporarily replace an entry of a namespace."""
    original = {name: place[name]} if name in place else {}
    place[name] = function
    try:
        yield
    finally:
        del place[name]
        place.update(original)
