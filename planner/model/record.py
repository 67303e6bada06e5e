"""Recording of outlines: a model's own modules run on tensors without numbers, call by call.

Of each call is noted what it reads, makes and uses of the weights, what autograd saves of it, and what else lies there meanwhile.
Tensors are known by their storages, so a view is the tensor that it is a view of. Sizes are recorded for some micro-batches, and
become polynomials (`sizes.py`); where there are none (loops over parts of a sequence), the size asked for is recorded itself.
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.errors import PenstockError, WorkloadError
from runtime.layers.kernels import EAGER_ATTENTION, LIBRARY_KERNELS, PLAIN_MLP, ROTARY, is_gated, is_rms_norm, rotates, turns_whole
from runtime.layers.meta_models import meta_model
from runtime.layers.split import Call as LayerCall
from runtime.layers.split import Split
from runtime.plan import Semantics
from runtime.plan.workload import text_of

from . import kept
from .outline import FUSED_ATTENTION, OWN_FUNCTION, RECORDED_ITEM_BYTES, Called, Group, Made
from .sizes import How, at_size, evaluated, of_any_size, polynomial

_SHAPED = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", FUSED_ATTENTION}
MOST_RECORDED = 2  # sequences; larger micro-batches follow
LONGEST_RECORDED = 256  # tokens of a sequence; what is known of longer ones follows, if it can


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
        self.names = {_key(p): name for name, p in module.named_parameters()}
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
            if _key(t) not in self.names:
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
        if (key := _key(t)) in self.names:
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
            if kind == "rotary" and not turns_whole(args, kwargs):
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
        reads = [self.number(t) for t in operands if _key(t) not in self.names]
        weights = [self.names[_key(t)] for t in operands if _key(t) in self.names]
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
        before = {_key(t) for t in reads}
        out = func(*args, **(kwargs or {}))
        makes = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in makes if _key(t) not in before]
        if not fresh and not func._schema.is_mutable:
            return out
        name = func.overloadpacket.__name__
        others = [t for t in reads if _key(t) not in self.names]
        moved = [0, 0]
        for t in _moving(name, reads, makes):
            wide = t.element_size() != RECORDED_ITEM_BYTES or not t.is_floating_point()
            moved[wide] += min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) * (t.element_size() if wide else 1)
        self.calls.append(Called(
            name, [self.number(t) for t in others],
            [self.names[_key(t)] for t in reads if _key(t) in self.names], [self.number(t) for t in fresh], self.pending, [],
            [list(t.shape) for t in reads] if name in _SHAPED else [], moved,
        ))  # fmt: skip
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


def _key(t: torch.Tensor) -> int:
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
    return "gated" if is_gated(part) else "mlp"


# The names that a function is found among, its own, itself, its kind, and its module's name
Place = tuple[dict[str, Any], str, Callable[..., Any], str, str]


def _parts(module: nn.Module, library_kernels: Sequence[str]) -> Iterator[Place]:
    """The parts that are told apart: forwards of modules, and functions that these call."""
    for name, part in module.named_modules():
        if (kind := _kind(part)) is not None:
            yield vars(part), "forward", part.forward, kind, name
    yield from _functions(module, library_kernels).values()


def _functions(module: nn.Module, library_kernels: Sequence[str]) -> dict[tuple[int, str], Place]:
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


# -- a whole model ------------------------------------------------------------------------------------------------------


@cache
def about(config: str) -> dict[str, list[str]]:
    """What transformers lets a configuration (JSON) run with: attention, the better one first, and kernels of other packages that
    its layers could compute with, sorted, if there are any."""
    try:
        attention, (split, _) = ["sdpa", "eager"], split_of(config, "sdpa")
    except WorkloadError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        attention, (split, _) = ["eager"], split_of(config, "eager")
    kinds = {place[3] for layer in split.layers for place in _functions(layer, [*LIBRARY_KERNELS.values()]).values()}
    kernels = sorted(kinds & {*LIBRARY_KERNELS.values()})
    return {"attention": attention, **({"library_kernels": kernels} if kernels else {})}


@lru_cache(maxsize=8)
def split_of(config: str, attention: str) -> tuple[Split, dict[str, Any]]:
    """A model of a configuration without numbers, and what its outlines say of it as a whole."""
    semantics = Semantics(1, 1, 1, attention=attention)  # type: ignore[arg-type]
    with _watched(config):
        split = Split(meta_model(json.loads(config), semantics))
        embedding: Any = split.model.get_submodule(split.embedding_name)
        head = split.head
        names = {"layers": split.layers_name, "norm": split.norm_name, "head": split.head_name, "embedding": split.embedding_name}
        names |= {} if getattr(head, "bias", None) is None else {"bias": f"{split.head_name}.bias"}
        about = {
            "names": names,
            "tied": f"{split.embedding_name}.weight" if head.weight is embedding.weight else None,
            "vocab": head.weight.shape[0],
            "logits": _of_logits(split, head.weight.shape[1]),
        }
        split.look()
        split.make_buffers("cpu", of_layers=True)  # so that it is known that a run can
        for layer in split.layers:
            layer.to("meta")
    return split, about


@contextmanager
def _watched(config: str) -> Iterator[None]:
    """Until the context ends nothing is logged of a model that never computes, and what its code raises is a WorkloadError."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except PenstockError:
        raise
    except Exception as error:  # whatever it makes of tensors without numbers
        words = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise WorkloadError(f"{json.loads(config)['model_type']} models cannot be recorded by layers ({words})") from error
    finally:
        logging.disable(before)


def window_of(config: dict[str, Any]) -> int | None:
    """Tokens below which no layer has a mask, if a configuration has windows that are used."""
    config = text_of(config)
    found = [config.get(key) for key in ("sliding_window", "attention_chunk_size")]
    widths = [width for width in found if isinstance(width, int) and config.get("use_sliding_window") is not False]
    return min(widths, default=None)


def outlines(config: str, how: How, n_sequences: int, seq_len: int) -> dict[str, Any]:
    """The outlines of a configuration (JSON) for a micro-batch; what they say of more than two sequences follows from fewer."""
    recorded, found = partial(_recorded, config, how), None
    if seq_len > LONGEST_RECORDED and [*how.library_kernels] == about(config).get("library_kernels", []):
        found = at_size(polynomials(config, how.attention), how, n_sequences, seq_len)
    if found is None and n_sequences > MOST_RECORDED:
        with suppress(ValueError):
            fewer = (MOST_RECORDED, MOST_RECORDED + 1)  # a single one may be computed otherwise
            found = evaluated(polynomial(recorded, fewer, (seq_len,), [(MOST_RECORDED + 2, seq_len)]), n_sequences, seq_len)
    return recorded(n_sequences, seq_len) if found is None else found


@lru_cache(maxsize=64)
def polynomials(config: str, attention: str) -> dict[str, Any]:
    """Outlines of any size, those that there are. They are of all the library kernels that layers could have, and kept for other
    processes."""
    whole = about(config)
    recorded = partial(_recorded, config, How(attention, tuple(whole.get("library_kernels", ()))))
    found = [whole | {"attention": attention} | of for of in of_any_size(recorded, window_of(json.loads(config)))]
    kept.write(config, attention, whole | {"outlines": found})
    return whole | {"outlines": found}


@lru_cache(maxsize=256)
def _recorded(config: str, how: How, n_sequences: int, seq_len: int) -> dict[str, Any]:
    split, about = split_of(config, how.attention)
    tokens_BT = torch.zeros(n_sequences, seq_len, dtype=torch.long)
    with _watched(config), split.blank():
        embedding = _of_embedding(split, tokens_BT)
        first_BTD, calls = split.noted()  # or masks would be kept as long as the split is
        hidden = first_BTD.detach().to("meta")
        kinds: dict[object, int] = {}
        trees, layers = list[dict[str, Any]](), list[int]()
        for layer, call in zip(split.layers, calls, strict=True):
            if (key := split.kind(layer, call)) not in kinds:
                kinds[key] = len(trees)
                trees.append(_of_layer(layer, call, hidden, seq_len, how))
            layers.append(kinds[key])
        norm = _of_norm(split, hidden)
    beside = {} if split.carried is None else {"carried": hidden.shape[-1] - split.carried.width}
    return about | beside | {
        "layers": layers, "kinds": trees, "embedding": embedding, "norm": norm, "shared": _shared(calls), "width": hidden.shape[-1],
        "has_experts": any(call[0] == "_grouped_mm" for tree in trees for call in tree["calls"]),
    }  # fmt: skip


def _of_embedding(split: Split, tokens_BT: torch.Tensor) -> dict[str, Any]:
    """The outline of what comes before the layers: of its calls those that a gradient goes back through.

    `handed`: elements and bytes of each of what layers are given of it that learns, and of each gradient of that; `needed`: weights
    that its backward uses. Where there are neither, no tensors are told."""
    tree = record(split.model, lambda: _prologue(split, tokens_BT), None, [tokens_BT])
    learns = set[int]()
    for call in tree["calls"]:
        if call[2] or learns & {*call[1]}:
            learns |= {*call[3]}
    calls = [call for call in tree["calls"] if learns & {*call[3]}]
    sides = [t for call in split.calls for t in call.leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    made = tree["made"] if sides or "needed" in tree else []
    more = {"handed": [*_sizes(sides), *([t.numel(), t.element_size()] for t in sides)]} if sides else {}
    parameters = {name: list(p.shape) for name, p in split.outside.items()}
    return tree | {"parameters": parameters, "calls": calls, "groups": [], "made": made} | more


def _prologue(split: Split, tokens_BT: torch.Tensor) -> Any:
    split.around(None, input_ids=tokens_BT, use_cache=False)
    return split.hidden_BTD


def _of_layer(layer: nn.Module, call: LayerCall, hidden: torch.Tensor, seq_len: int, how: How) -> dict[str, Any]:
    leaves = tuple(t.detach().to("meta").requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in call.leaves)
    meta, x = replace(call, leaves=leaves), hidden.detach().requires_grad_()
    tree = record(
        layer,
        lambda: meta.run(layer, x),
        x,
        [t for t in (*leaves, *layer.buffers()) if isinstance(t, torch.Tensor)],
        how.library_kernels,
    )
    if tree["attention"] is not None:
        tree["attention"].append(call.window(seq_len))
    return tree


def _of_norm(split: Split, hidden: torch.Tensor) -> dict[str, Any]:
    x = hidden.detach().requires_grad_()
    norm = copy.deepcopy(split.norm).to("meta")
    return record(norm, lambda: norm(split.last(x)), x, list(norm.buffers()))


def _of_logits(split: Split, width: int) -> list[int]:
    """Calls of the head besides its product, and how many of the tensors made after that autograd saves."""
    rows = torch.empty(1, 8, width, device="meta", dtype=split.model.dtype, requires_grad=True)
    tree = record(split.model, lambda: split.logits(None, rows), rows, [])
    products = [n for n, call in enumerate(tree["calls"]) if call[0] in ("mm", "addmm")]
    if len(products) != 1:
        raise WorkloadError("the head is no single product")
    after = tree["calls"][products[0] + 1 :]
    makes = {i for call in after for i in call[3]}
    besides = [call for call in tree["calls"] if any(tree["made"][i][3] for i in call[3])]  # what makes no floats is no logits'
    return [len(besides) - 1, len(makes & {i for call in after for i in call[4]})]


def _shared(calls: Sequence[LayerCall]) -> list[list[int]]:
    """Elements and bytes of each of what layers are given besides their hidden states: tables and masks."""
    leaves = (t for call in calls for t in call.leaves if isinstance(t, torch.Tensor))
    return _sizes([t for t in leaves if t.dtype is not torch.int64 and not t.requires_grad])


def _sizes(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Elements and bytes of each, of those that lie in one place once."""
    return [[t.untyped_storage().nbytes() // t.element_size(), t.element_size()] for t in {_key(t): t for t in tensors}.values()]
