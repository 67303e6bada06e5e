"""Tiled MLPs: a tile of tokens at a time, in forward and backward, so that inner activations of one tile exist.

Tiles decide bits: a weight's gradient is the fp32 sum of the tiles' gradients in ascending order, from zero, rounded once.
"""

# B sequences, T tokens, N = B * T, D width
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Policy
from penstock.runtime.plan.workload import Saved

from .recompute import Replay, shelf_in_use, unrecorded
from .transformers_patches import MLP, NORM_AFTER_MLP, PLAIN_MLP

# Elements added at a time: bounds the fp32 copy of bf16 operands on a CPU; large enough to hide kernel launches on a GPU
PIECE_ELEMENTS = 2**22


class TiledMlp(nn.Module):
    """Tiled replacement of a decoder layer's MLP and of the row-wise norm after it."""

    def __init__(self, layer: nn.Module, tile_tokens: int, policy: Policy, block: int) -> None:
        """Replace `forward` of the layer's modules, which keep weights and names. WorkloadError if its MLP may not be row-wise."""
        super().__init__()
        children: dict[str, Any] = dict(layer.named_children())
        if {name for name, _ in children[MLP].named_children()} != PLAIN_MLP:
            raise WorkloadError("mlp_tile_tokens: layers with experts cannot be tiled; leave it out")
        parts = [children[name] for name in (MLP, NORM_AFTER_MLP) if name in children]
        self.rows = nn.Sequential(*map(copy.copy, parts))  # share the modules' weights
        for part in parts:
            part.forward = lambda x: x
        children[MLP].forward = self.forward
        self.tile_tokens = tile_tokens
        self.graph_only = False  # True: build the autograd graph without computing the output
        self.is_kept = policy.saved(block) is Saved.ALL
        self.saved = Saved.PRODUCTS if policy.saved(block) is Saved.PRODUCTS else Saved.INPUT

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_ND = x_BTD.flatten(0, 1)
        if torch.is_grad_enabled():
            y_ND = _ByTiles.apply(self, x_ND, *self.rows.parameters())  # type: ignore[no-untyped-call]
        else:
            y_ND = self.output(x_ND, lambda tile: self.rows(x_ND[tile]))
        return y_ND.view_as(x_BTD)  # type: ignore[no-any-return]

    def output(self, x_ND: torch.Tensor, compute_tile: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        y_ND = torch.empty_like(x_ND)
        for tile in self.tiles(x_ND):
            y_ND[tile] = compute_tile(tile)
        return y_ND

    def tiles(self, x_ND: torch.Tensor) -> Iterator[slice]:
        for start in range(0, len(x_ND), self.tile_tokens):
            yield slice(start, min(start + self.tile_tokens, len(x_ND)))


class _ByTiles(torch.autograd.Function):
    """Save input and weights here, and other tensors per tile."""

    @staticmethod
    def forward(ctx: Any, mlp: TiledMlp, x_ND: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_ND, *weights)
        ctx.mlp, ctx.recorded, ctx.shelf = mlp, [], shelf_in_use()
        ctx.inputs = []  # input and weights during backward
        if mlp.graph_only:
            return x_ND.new_zeros(1).expand_as(x_ND)
        with unrecorded():  # by the layer's `Replay`: each tile has one
            return mlp.output(x_ND, lambda tile: _recorded_tile(ctx, tile, x_ND, weights))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_ND,) = gradients
        x_ND, *weights = ctx.saved_tensors  # read once: unpack hooks run at each access
        ctx.inputs += [x_ND, *weights]
        dx_ND = torch.empty_like(x_ND)
        sums = [torch.zeros(w.shape, dtype=torch.float32, device=w.device) for w in weights]
        for tile in ctx.mlp.tiles(x_ND):
            output, inputs = ctx.recorded.pop(0)
            dx_ND[tile] = _add_gradients(output, inputs, gradient_ND[tile], sums)
        ctx.inputs.clear()  # else alive until the layer's backward ends
        return None, dx_ND, *(total.to(w.dtype) for total, w in zip(sums, weights, strict=True))


def _recorded_tile(ctx: Any, tile: slice, x_ND: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Compute a tile's output, with its autograd graph checkpointed by the layer's policy."""
    mlp, inputs = ctx.mlp, ctx.inputs
    replay = Replay(mlp.saved, lambda: _recompute_tile(mlp, tile, *inputs), ctx.shelf)
    checkpointing: AbstractContextManager[None] = nullcontext() if mlp.is_kept else replay.recording()
    with torch.enable_grad():
        rows_ND = x_ND[tile]  # not a leaf, because a graph would keep a leaf alive, and with it the whole input
        with checkpointing:
            y_ND: torch.Tensor = mlp.rows(rows_ND)
    ctx.recorded.append((get_gradient_edge(y_ND), [get_gradient_edge(leaf) for leaf in (rows_ND, *weights)]))
    return y_ND.detach()


def _recompute_tile(mlp: TiledMlp, tile: slice, x_ND: torch.Tensor, *weights: torch.Tensor) -> None:
    """Recompute a tile's forward, under grad."""
    names = [name for name, _ in mlp.rows.named_parameters()]
    leaves = [w.detach().requires_grad_() for w in weights]
    with torch.enable_grad():
        functional_call(mlp.rows, dict(zip(names, leaves, strict=True)), (x_ND[tile].detach().requires_grad_(),), strict=True)


def _add_gradients(
    output: GradientEdge, inputs: list[GradientEdge], gradient_ND: torch.Tensor, sums: list[torch.Tensor]
) -> torch.Tensor:
    """Add a tile's weight gradients to the sums; return the gradient of its rows, the first input."""
    dx_ND, *gradients = torch.autograd.grad(output, inputs, gradient_ND)
    for total, gradient in zip(sums, gradients, strict=True):
        n_rows = max(1, PIECE_ELEMENTS * len(total) // total.numel())
        for piece, addend in zip(total.split(n_rows), gradient.split(n_rows), strict=True):
            piece += addend
    return dx_ND
