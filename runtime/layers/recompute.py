"""Activation checkpointing: what of a layer's forward is kept for its backward, and what is computed again.

Kept are all tensors that autograd saved, but for the weights (`Compute._keeping`); or some results, from which the rest is
recomputed (`Replay`: selective checkpointing; without results, full). Neither holds the forward's slots: the backward names those
of weights and input.
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

# Library calls as torch names them. On a GPU fused attention is whichever of its kernels torch chooses; all documents of packed
# sequences are one call (documents.py), and so is a product with its adapter (adapters.py).
PRODUCTS_WITH_WEIGHTS = frozenset({"mm", "addmm", "_grouped_mm", "adapted_linear", "adapted_stack"})
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FUSED_ATTENTION = frozenset({"attention_by_document", *(f"_scaled_dot_product_{kernel}" for kernel in _ATTENTION)})
_PRODUCTS = FUSED_ATTENTION | PRODUCTS_WITH_WEIGHTS
CALLS_SAVED = {Saved.INPUT: frozenset[str](), Saved.ATTENTION: FUSED_ATTENTION, Saved.PRODUCTS: _PRODUCTS}


@dataclass(slots=True)
class Graph:
    """A forward before its backward: gradient edge of the output, which is not kept alive, and differentiable inputs. `sides`: a
    layer's arguments that are inputs too, by index; the embedding's edges of these, by layer and index."""

    edge: GradientEdge
    inputs: list[torch.Tensor]
    names: list[str]  # of the weights, which are the last inputs
    sides: dict[Any, Any]


class Replay:
    """Saved tensors of one forward, empty until its backward needs the first one: then the forward runs again. That runs in a hook
    of autograd, on the thread of the backward: the lane's own, with its stream and random numbers. Results that the tier saves are
    not recomputed. The second run ends with the last tensor that autograd needs."""

    def __init__(self, saved: Saved, again: Callable[[], object], shelf: Shelf | None = None) -> None:
        """`again`: the same forward, under grad, with the same random numbers, on the current weights and input. `shelf`: a place
        for saved results; None: they stay where they are made."""
        self.calls, self._again, self.shelf = CALLS_SAVED[saved], again, shelf
        self._n_saved = 0  # by autograd, in the first run
        self._values: dict[int, torch.Tensor] | None = None  # what it saved in the second, until backward asks for it
        self.results: deque[tuple[Any, int]] = deque()  # of the calls, each with how full the shelf was before it
        self._n_results_needed = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        with saved_tensors_hooks(self._leave_empty, self._filled), self._mode(_Recording):
            yield
        while len(self.results) > self._n_results_needed:
            _, shelf_bytes = self.results.pop()
            if self.shelf is not None:
                self.shelf.n_bytes = shelf_bytes
        if self.shelf is not None:
            for noted, _ in self.results:
                tree_map(self.shelf.found, noted)

    def notes(self, func: Any, args: Sequence[Any]) -> bool:
        """True if a call's results are saved: attention's only if queries are as wide as values. A CPU, and a plan, compute others
        call by call; a GPU's kernel that takes them recomputes them."""
        name = func.overloadpacket.__name__
        is_odd = name in FUSED_ATTENTION and args[0].shape[-1] != args[2].shape[-1]
        return name in self.calls and not is_odd

    def _mode(self, mode: "type[_Recording | _Replaying]") -> AbstractContextManager[object]:
        return mode(self) if self.calls else nullcontext()

    def _leave_empty(self, tensor: torch.Tensor) -> int:
        self._n_results_needed = len(self.results)
        self._n_saved += 1
        return self._n_saved - 1

    def _filled(self, place: int) -> torch.Tensor:
        if self._values is None:
            self._values = self._run_again()
        return self._values.pop(place)

    def _run_again(self) -> dict[int, torch.Tensor]:
        values: dict[int, torch.Tensor] = {}

        def fill(tensor: torch.Tensor) -> None:
            values[len(values)] = tensor.detach()
            if len(values) == self._n_saved:
                raise _Enough

        with suppress(_Enough), saved_tensors_hooks(fill, _no_backward), self._mode(_Replaying), torch.enable_grad():
            self._again()
        assert len(values) == self._n_saved, f"a forward saves {len(values)} tensors when it runs again, not {self._n_saved}"
        assert not self.results, "a forward that runs again makes fewer results"
        return values


class _Enough(Exception):
    """Backward has all tensors that it needs."""


def _no_backward(_: object) -> torch.Tensor:
    raise AssertionError("the second run of a forward only makes tensors: the first one's graph goes back")


class _Recording(TorchDispatchMode):
    def __init__(self, replay: Replay) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replay = replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.replay.notes(func, args):
            return func(*args, **(kwargs or {}))
        if (shelf := self.replay.shelf) is None:
            out, before_bytes = func(*args, **(kwargs or {})), 0
            noted = tree_map_only(torch.Tensor, torch.Tensor.detach, out)  # from the graph that it gets as soon as autograd sees it
        else:
            before_bytes = shelf.n_bytes
            out, noted = shelf.computed(func, args, kwargs or {})
        self.replay.results.append((noted, before_bytes))
        return out


class _Replaying(_Recording):
    """Answers those calls with the noted results, in the same order, instead of computing them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.replay.notes(func, args):
            return func(*args, **(kwargs or {}))
        noted, _ = self.replay.results.popleft()
        return noted if self.replay.shelf is None else tree_map(self.replay.shelf.found, noted)


def unnoticed() -> AbstractContextManager[object]:
    """Context of calls whose results are neither recorded nor replayed."""
    return _pop_mode_temporarily() if isinstance(_get_current_dispatch_mode(), _Recording) else nullcontext()


def shelf_in_use() -> Shelf | None:
    mode = _get_current_dispatch_mode()
    return mode.replay.shelf if isinstance(mode, _Recording) else None
