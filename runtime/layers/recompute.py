"""Activation checkpointing: full or selective, by recomputing a layer's forward in its backward (`Replay`).

Without checkpointing all saved tensors except weights are kept (`Compute._weight_hooks`). Neither keeps the forward's slots: the
backward op names its slots of weights and input.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map, tree_map_only

from penstock.runtime.plan.workload import Saved

from .views import Shelf

# Names of library calls. Attention of packed documents (documents.py) is one call, like a product with its adapter (adapters.py).
PRODUCTS_WITH_WEIGHTS = frozenset(
    {"mm", "addmm", "_grouped_mm", "adapted_linear", "adapted_stack", "scaled_linear", "scaled_stack"}
)
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FUSED_ATTENTION = frozenset({"attention_by_document", *(f"_scaled_dot_product_{kernel}" for kernel in _ATTENTION)})
_PRODUCTS = FUSED_ATTENTION | PRODUCTS_WITH_WEIGHTS
CALLS_SAVED = {Saved.INPUT: frozenset[str](), Saved.ATTENTION: FUSED_ATTENTION, Saved.PRODUCTS: _PRODUCTS}


@dataclass(slots=True)
class Graph:
    """Autograd graph of a forward. `edge`: of the output, which it does not keep alive. `grad_arguments`: leaf indices of a
    layer's differentiable arguments; of the embedding, their edges by (layer, index)."""

    edge: GradientEdge
    inputs: list[torch.Tensor]
    names: list[str]  # weights, the last inputs
    grad_arguments: dict[Any, Any]


class Replay:
    """Recompute a forward's saved tensors when its backward reads the first one: in an unpack hook of autograd, on the backward's
    thread, stream and random state. Results of saved calls are not recomputed. Stops after the last saved tensor."""

    def __init__(self, saved: Saved, forward: Callable[[], object], shelf: Shelf | None = None) -> None:
        """`forward`: repeats the forward in grad mode, with equal random numbers. `shelf`: memory for saved results, if copied."""
        self.calls, self._forward, self.shelf = CALLS_SAVED[saved], forward, shelf
        self._n_saved = 0  # tensors, in the first run
        self._values: dict[int, torch.Tensor] | None = None  # saved tensors of the second run, until backward reads them
        self.results: deque[tuple[Any, int]] = deque()  # results of saved calls, with bytes used on the shelf before each
        self._n_results_needed = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack), self._mode(_Recording):
            yield
        while len(self.results) > self._n_results_needed:
            _, shelf_bytes = self.results.pop()
            if self.shelf is not None:
                self.shelf.n_bytes = shelf_bytes
        if self.shelf is not None:
            for result, _ in self.results:
                tree_map(self.shelf.restored, result)

    def is_saved(self, func: Any, args: Sequence[Any]) -> bool:
        """True if a call's results are saved. Excludes attention with different widths of queries and values, unfused on a CPU."""
        name = func.overloadpacket.__name__
        is_odd = name in FUSED_ATTENTION and args[0].shape[-1] != args[2].shape[-1]
        return name in self.calls and not is_odd

    def _mode(self, mode: "type[_Recording | _Replaying]") -> AbstractContextManager[object]:
        return mode(self) if self.calls else nullcontext()

    def _pack(self, tensor: torch.Tensor) -> int:
        self._n_results_needed = len(self.results)
        self._n_saved += 1
        return self._n_saved - 1

    def _unpack(self, place: int) -> torch.Tensor:
        if self._values is None:
            self._values = self._recompute()
        return self._values.pop(place)

    def _recompute(self) -> dict[int, torch.Tensor]:
        values: dict[int, torch.Tensor] = {}

        def fill(tensor: torch.Tensor) -> None:
            values[len(values)] = tensor.detach()
            if len(values) == self._n_saved:
                raise _Complete

        with suppress(_Complete), saved_tensors_hooks(fill, _no_backward), self._mode(_Replaying), torch.enable_grad():
            self._forward()
        assert len(values) == self._n_saved, f"a recompute saves {len(values)} tensors, not {self._n_saved}"
        assert not self.results, "a recompute has fewer results"
        return values


class _Complete(Exception):
    """Ends the second run when all saved tensors are recomputed."""


def _no_backward(_: object) -> torch.Tensor:
    raise AssertionError("backward uses the graph of the first forward, not of its recompute")


class _Recording(TorchDispatchMode):
    def __init__(self, replay: Replay) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replay = replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.replay.is_saved(func, args):
            return func(*args, **(kwargs or {}))
        if (shelf := self.replay.shelf) is None:
            out, before_bytes = func(*args, **(kwargs or {})), 0
            result = tree_map_only(torch.Tensor, torch.Tensor.detach, out)  # autograd attaches a graph to `out` next
        else:
            before_bytes = shelf.n_bytes
            out, result = shelf.compute(func, args, kwargs or {})
        self.replay.results.append((result, before_bytes))
        return out


class _Replaying(_Recording):
    """Return recorded results of saved calls, in order, instead of computing them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.replay.is_saved(func, args):
            return func(*args, **(kwargs or {}))
        result, _ = self.replay.results.popleft()
        return result if self.replay.shelf is None else tree_map(self.replay.shelf.restored, result)


def unrecorded() -> AbstractContextManager[object]:
    """Suspend recording and replay of results."""
    return _pop_mode_temporarily() if isinstance(_get_current_dispatch_mode(), _Recording) else nullcontext()


def shelf_in_use() -> Shelf | None:
    mode = _get_current_dispatch_mode()
    return mode.replay.shelf if isinstance(mode, _Recording) else None
