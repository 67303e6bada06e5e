"""Recording of a module: its own forward is run on tensors without numbers, call by call.

Of each call is noted what it reads, makes and uses of the weights, what autograd saves of it, and what else lies there meanwhile.
Tensors are known by their storages, so a view is the tensor that it is a view of.
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
from penstock.runtime.layers.kernels import (
    EAGER_ATTENTION,
    LIBRARY_KERNELS,
    PLAIN_MLP,
    ROTARY,
    gate_of,
    is_rms_norm,
    is_rotary_call,
    rotates,
)

from .outline import FUSED_ATTENTION, OWN_FUNCTION, RECORDED_ITEM_BYTES, Called, Group, Made

_SHAPED = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", FUSED_ATTENTION}


class _Functions(TorchFunctionMode):
    """Fused attention stays one call, and a function of torch's is told from the next."""

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
        if learns or args[0].shape[-1] != args[2].shape[-1]:  # not every kernel's: spelled out
            with self.recorder.group("attention", "", []):
                return func(*args, **kwargs)
        if mask is not None and mask.dtype is torch.bool:
            kwargs = kwargs | {"attn_mask": torch.empty_like(mask, dtype=args[0].dtype)}
            self.recorder.calls[-1].name = "bias_of_mask"
        chosen = {k: v for k, v in kwargs.items() if k in ("dropout_p", "is_causal", "attn_mask", "scale")}
        return getattr(torch.ops.aten, FUSED_ATTENTION)(*args[:3], **chosen)[0]


class _Recorder(TorchDispatchMode):
    def __init__(self, module: nn.Module, hidden: torch.Tensor | None, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {storage_of(p): name for name, p in module.named_parameters()}
        self.made: list[Made] = []
        self.calls: list[Called] = []
        self.groups: list[Group] = []
        self.ids: dict[int, int] = {}
        self.refs: list[StorageWeakRef] = []  # kept, so that no other storage gets the address
        self.pending: list[int] = []  # saved before the call that they are saved for
        self.needed: set[str] = set()  # weights that autograd saves
        self.is_new = True  # a function has begun, and called nothing yet
        self.attention: list[int | None] | None = None  # heads, those of keys and values, and their width
        for t in [*([] if hidden is None else [hidden]), *given]:
            if storage_of(t) not in self.names:
                self.number(t, ours=False)

    def number(self, t: torch.Tensor, ours: bool = True) -> int:
        ref = StorageWeakRef(t.untyped_storage())
        if ref.cdata not in self.ids:
            self.ids[ref.cdata] = len(self.made)
            self.refs.append(ref)
            n_elements = t.untyped_storage().nbytes() // t.element_size()
            self.made.append(Made(n_elements, t.element_size(), ours, t.is_floating_point()))
        return self.ids[ref.cdata]

    def saved(self, t: torch.Tensor) -> torch.Tensor:
        """A hook: autograd saves a tensor."""
        if (key := storage_of(t)) in self.names:
            self.needed.add(self.names[key])
        else:
            i = self.number(t)
            (self.pending if self.is_new or i not in self.calls[-1].makes else self.calls[-1].saves).append(i)
        return t

    @contextmanager
    def group(self, kind: str, name: str, operands: Sequence[Any]) -> Iterator[list[Any]]:
        """Around a part of the pass; its results are to be put in the list."""
        first, results = len(self.calls), list[Any]()
        if self.pending and self.calls:  # by a function of the module's own, when it was done
            self.calls[-1].name, self.calls[-1].saves = OWN_FUNCTION, [*self.calls[-1].saves, *self.pending]
            self.pending = []
        known = [self.number(t) for t in operands if isinstance(t, torch.Tensor)]
        yield results
        if len(self.calls) > first:
            found = [self.number(t) for t in results if isinstance(t, torch.Tensor)]
            self.groups.append(Group(kind, name, first, len(self.calls), known, found))

    def part(self, own: Callable[..., Any], kind: str, name: str) -> Callable[..., Any]:
        """A function whose calls are a group, or that is one call where a library has it as one kernel."""

        def function(*args: Any, **kwargs: Any) -> Any:
            if kind in LIBRARY_KERNELS.values():
                operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                return self.at_once(kind, operands, lambda: own(*args, **kwargs))
            if kind == "rotary" and not is_rotary_call(args, kwargs):
                return own(*args, **kwargs)
            if kind == "attention":
                self.attends(*args[1:4])
            with self.group(kind, name, [*args, *kwargs.values()]) as results:
                results.extend(tree_leaves(out := own(*args, **kwargs)))
            return out

        return function

    def at_once(self, name: str, operands: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        """What a part of the pass returns, recorded as one call: of what lies in between nothing stays."""
        n_calls, n_made, before = len(self.calls), len(self.made), self.pending
        out = run()
        del self.calls[n_calls:], self.made[n_made:], self.refs[n_made:]
        self.ids = {key: i for key, i in self.ids.items() if i < n_made}
        reads = [self.number(t) for t in operands if storage_of(t) not in self.names]
        weights = [self.names[storage_of(t)] for t in operands if storage_of(t) in self.names]
        makes = [self.number(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.calls.append(Called(name, reads, weights, makes, before, [], [list(t.shape) for t in operands], [0, 0]))
        self.pending, self.is_new = [], False
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs):
            raise WorkloadError(
                f"a layer draws random numbers ({func.overloadpacket.__name__}); set its dropout to 0 in config.json"
            )
        before = {storage_of(t) for t in reads}
        out = func(*args, **(kwargs or {}))
        makes = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in makes if storage_of(t) not in before]
        if not fresh and not func._schema.is_mutable:
            return out
        name = func.overloadpacket.__name__
        others = [t for t in reads if storage_of(t) not in self.names]
        moved = [0, 0]
        for t in _moving(name, reads, makes):
            wide = t.element_size() != RECORDED_ITEM_BYTES or not t.is_floating_point()
            moved[wide] += min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) * (t.element_size() if wide else 1)
        weights = [self.names[storage_of(t)] for t in reads if storage_of(t) in self.names]
        shapes = [list(t.shape) for t in reads] if name in _SHAPED else []
        known, made = [self.number(t) for t in others], [self.number(t) for t in fresh]
        self.calls.append(Called(name, known, weights, made, self.pending, [], shapes, moved))
        self.pending, self.is_new = [], False
        self.calls[-1].held.extend(i for i, ref in enumerate(self.refs) if self.made[i].ours and not ref.expired())
        return out

    def attends(self, q_BHTE: torch.Tensor, k_BHTE: torch.Tensor, v_BHTE: torch.Tensor) -> None:
        self.attention = [q_BHTE.shape[1], k_BHTE.shape[1], (q_BHTE.shape[-1] + v_BHTE.shape[-1]) // 2]

    def finished(self) -> None:
        """Keep of what lay there beside each call only what dies next, and is neither read by it nor saved by any."""
        saved = {i for call in self.calls for i in call.saves}
        last = {i: n for n, call in enumerate(self.calls) for i in call.held}
        for n, call in enumerate(self.calls):
            call.held[:] = [i for i in call.held if last[i] == n and i not in saved and i not in (*call.reads, *call.makes)]


def storage_of(t: torch.Tensor) -> int:
    """A tensor's storage, as long as that is kept."""
    return StorageWeakRef(t.untyped_storage()).cdata  # type: ignore[no-any-return]


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call that may draw has a probability of zero."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
    return not given.get("dropout_p", given.get("p", 1.0 if "dropout" in func.overloadpacket.__name__ else 0.0))


def _moving(name: str, reads: list[torch.Tensor], makes: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a call reads and writes: a gathering one of its source no more than it makes, one that only finds room nothing."""
    if name in ("empty_like", "new_empty", "empty"):
        return []
    if name in ("index", "index_select", "gather", "embedding"):
        return [*makes, *makes, *reads[1:]]
    return [*reads, *makes]


def record(
    module: nn.Module,
    run: Callable[[], torch.Tensor],
    hidden: torch.Tensor | None,
    given: Sequence[torch.Tensor],
    library_kernels: Sequence[str] = (),
) -> dict[str, Any]:
    """The tree of an outline: of what `run` computes with the module, of a hidden state and of what else is given."""
    recorder = _Recorder(module, hidden, given)
    with ExitStack() as stack:
        for place, name, own, kind, of in _parts(module, library_kernels):
            stack.enter_context(_instead(place, name, recorder.part(own, kind, of)))
        stack.enter_context(saved_tensors_hooks(recorder.saved, lambda t: t))
        stack.enter_context(_Functions(recorder))
        stack.enter_context(recorder)
        out = run()
    del out
    recorder.finished()
    sides = [recorder.number(t) for t in given if t.requires_grad]
    more: dict[str, Any] = {"sides": sides} if sides else {}
    if hidden is None and recorder.needed:
        more["needed"] = sorted(recorder.needed)
    parameters = {name: list(p.shape) for name, p in module.named_parameters()}
    return {
        "parameters": parameters,
        **{key: [[getattr(each, f) for f in each.__slots__] for each in of] for key, of in
           (("made", recorder.made), ("calls", recorder.calls), ("groups", recorder.groups))},
        "attention": recorder.attention, **more,
    }  # fmt: skip


def _kind(part: nn.Module) -> str | None:
    if is_rms_norm(part):
        return "norm"
    if type(part).forward is nn.Linear.forward:
        return "linear"
    if {name for name, _ in part.named_children()} != PLAIN_MLP:
        return None
    return "mlp" if gate_of(part) is None else "gated"


# The names that a function is found among, its own, itself, its kind, and its module's name
Place = tuple[dict[str, Any], str, Callable[..., Any], str, str]


def _parts(module: nn.Module, library_kernels: Sequence[str]) -> Iterator[Place]:
    """The parts that are told apart: forwards of modules, and functions that these call."""
    for name, part in module.named_modules():
        if (kind := _kind(part)) is not None:
            yield vars(part), "forward", part.forward, kind, name
    yield from functions(module, library_kernels).values()


def functions(module: nn.Module, library_kernels: Sequence[str]) -> dict[tuple[int, str], Place]:
    """The functions of a rotation, of attention and of these libraries that modules call by their names."""
    found = dict[tuple[int, str], Place]()
    libraries = [(name, kernel) for name, kernel in LIBRARY_KERNELS.items() if kernel in library_kernels]
    for part in module.modules():
        forward: Any = part.forward
        glob = getattr(forward, "__globals__", {})
        for name, kind in ((ROTARY, "rotary"), (EAGER_ATTENTION, "attention"), *libraries):
            if name in glob and name in forward.__code__.co_names and (kind != "rotary" or rotates(glob[name])):
                found[id(glob), name] = (glob, name, glob[name], kind, "")
    return found


@contextmanager
def _instead(place: dict[str, Any], name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Until the context ends, another function is found there."""
    before = {name: place[name]} if name in place else {}
    place[name] = function
    try:
        yield
    finally:
        del place[name]
        place.update(before)
