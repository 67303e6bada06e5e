"""MLPs by tiles as plans count them: products, calls, traffic and memory of a plain loop over tiles."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.model.workload import build_workload
from runtime.plan.workload import Block, Model, Saved
from tests.real_layers import DTYPES, Work, hf_model, layer_calls, peak_bytes, semantics
from tests.tiny import EXPERT_TYPES, STRUCTURES, tiny_config

DENSE_TYPES = [t for t in STRUCTURES if t not in EXPERT_TYPES]
BATCH, SEQ_LEN = 2, 80
PACKED_BYTES = 64 * 1024  # the CPU's bf16 products rearrange their operands aside; negligible at real sizes
# Weights that weigh more than a tile, and weights that weigh less
SHAPES = [{"hidden_size": 128, "intermediate_size": 352}, {"hidden_size": 32, "intermediate_size": 512}]


def blocks_of(config: dict[str, Any], tile: int | None, **how: Any) -> tuple[Block, ...]:
    return build_workload(Model(config), semantics(BATCH, SEQ_LEN, attention="eager", mlp_tile_tokens=tile, **how)).blocks[1:-1]


class Unrun(torch.autograd.Function):
    """A last product that is never made: its gradients need only what goes in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(1, 1).expand(len(x), len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Tiled:
    """A layer's backward as a loop over tiles, in plain PyTorch."""

    def __init__(self, layer: Any, x: torch.Tensor, kwargs: dict[str, Any], tile: int) -> None:
        self.layer, self.x, self.kwargs, self.tile = layer, x, kwargs, tile
        self.sandwich = "pre_feedforward_layernorm" in dict(layer.named_children())
        parts = [layer.mlp, *([layer.post_feedforward_layernorm] if self.sandwich else [])]
        self.tiled = [w for part in parts for w in part.parameters()]
        self.others = [w for w in layer.parameters() if all(w is not t for t in self.tiled)]
        self.slots = [torch.empty_like(w) for w in self.tiled]  # gradients, rounded once

    def until_the_mlp(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layer
        mixed, _ = layer.self_attn(hidden_states=layer.input_layernorm(self.x), **self.kwargs)
        mixed = layer.post_attention_layernorm(mixed) if self.sandwich else mixed
        hidden = self.x + mixed
        del mixed
        return hidden, (layer.pre_feedforward_layernorm if self.sandwich else layer.post_attention_layernorm)(hidden)

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        y = self.layer.mlp(rows)
        return self.layer.post_feedforward_layernorm(y) if self.sandwich else y

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            hidden, normed = self.until_the_mlp()
            out = torch.empty_like(hidden)
            for at in self.tiles():
                torch.add(flat(hidden)[at], self.of_rows(flat(normed)[at]), out=flat(out)[at])
        return out

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of the input and of the weights that are not tiled; those of the others go to `slots`."""
        hidden, normed = self.until_the_mlp()
        sums = [torch.zeros(w.shape) for w in self.tiled]
        towards = torch.empty_like(normed)
        for at in self.tiles():
            rows = flat(normed).detach()[at].requires_grad_()
            back = self.back_after_the_norm if self.sandwich else self.back
            of_rows, *of_weights = back(rows, flat(gradient)[at])
            flat(towards)[at] = of_rows
            for total, of_weight in zip(sums, of_weights, strict=True):
                for row_sum, of_row in zip(total, of_weight, strict=True):
                    row_sum += of_row  # by rows: on the CPU, adding bf16 to fp32 makes an fp32 copy first
            del rows, of_rows, of_weights, of_weight, of_row
        for slot, total in zip(self.slots, sums, strict=True):
            slot.copy_(total)
        return list(torch.autograd.grad([hidden, normed], [self.x, *self.others], [gradient, towards]))

    def back_after_the_norm(self, rows: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Its norm after the MLP needs what the last product makes."""
        return torch.autograd.grad(self.of_rows(rows), [rows, *self.tiled], gradient)

    def back(self, rows: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mlp = self.layer.mlp
        out = Unrun.apply(mlp.act_fn(mlp.gate_proj(rows)) * mlp.up_proj(rows), mlp.down_proj.weight)
        return torch.autograd.grad(out, [rows, *self.tiled], gradient)

    def tiles(self) -> list[slice]:
        n = self.x.shape[0] * self.x.shape[1]
        return [slice(at, min(at + self.tile, n)) for at in range(0, n, self.tile)]


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])


def tiled_layers(model_type: str, dtype: str, tile: int, shape: dict[str, Any]) -> Iterator[tuple[Block, Tiled]]:
    config = tiny_config(model_type, **shape)
    torch.manual_seed(0)
    model = hf_model(config, attn_implementation="eager").to(DTYPES[dtype]).train()
    blocks = blocks_of(config, tile, dtype=dtype)
    for block, (layer, x, kwargs) in zip(blocks, layer_calls(model, config["vocab_size"], BATCH, SEQ_LEN), strict=True):
        yield block, Tiled(layer, x.requires_grad_(), kwargs, tile)


@pytest.mark.fast("pairs")
@pytest.mark.parametrize("model_type", DENSE_TYPES)
@pytest.mark.parametrize("tile", [16, 48, 159])
def test_forward_and_backward_by_tiles_count_what_the_loop_does(model_type: str, tile: int) -> None:
    """In backward, each tile is computed again once."""
    for dtype in DTYPES:
        for block, loop in tiled_layers(model_type, dtype, tile, SHAPES[0]):
            with Work() as work:
                loop.forward()
            a, again = block.attention, block.recompute(Saved.INPUT)
            assert a is not None
            assert again is not None
            squares = 4 * a.n_sequences * a.n_heads * a.head_dim * SEQ_LEN**2
            once = sum(m.flop for m in block.matmuls) + squares
            assert once == work.flop
            assert sum(m.count for m in block.matmuls) == work.calls["mm"] + work.calls["addmm"]
            assert abs(block.n_kernels - work.calls.total()) <= 1
            assert block.pointwise_bytes == pytest.approx(work.n_bytes, rel=0.07)
            with Work() as work:
                loop.backward(torch.randn_like(loop.x))
            assert sum(m.flop for m in block.matmuls[: again.n_matmuls]) + squares + 2 * once == work.flop


@pytest.mark.fast("some")
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_a_backward_by_tiles_stays_within_its_transient_bytes(model_type: str) -> None:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        for block, loop in itertools.islice(tiled_layers(model_type, dtype, 48, shape), 1):
            gradient, again = torch.randn_like(loop.x), block.recompute(Saved.INPUT)
            assert again is not None
            peak = peak_bytes(lambda: loop.backward(gradient))  # noqa: B023
            aside = PACKED_BYTES if dtype == "bf16" else 0
            assert peak - aside <= again.transient_bytes <= 1.3 * peak


@pytest.mark.parametrize("model_type", DENSE_TYPES)
def test_tiles_change_gradients_by_rounding_only(model_type: str) -> None:
    for _, loop in tiled_layers(model_type, "fp32", 48, SHAPES[0]):
        gradient = torch.randn_like(loop.x)
        whole = loop.layer(loop.x, **loop.kwargs)
        torch.testing.assert_close(loop.forward(), whole, rtol=1e-5, atol=1e-5)
        plain = torch.autograd.grad(whole, [loop.x, *loop.others, *loop.tiled], gradient)
        for ours, theirs in zip([*loop.backward(gradient), *loop.slots], plain, strict=True):
            assert torch.linalg.vector_norm(ours - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs)


@pytest.mark.parametrize("model_type", DENSE_TYPES)
def test_tiles_do_the_same_work_and_add_their_sums(model_type: str) -> None:
    """One tile of all tokens is no tile."""
    config = tiny_config(model_type)
    assert blocks_of(config, BATCH * SEQ_LEN) == blocks_of(config, 10**6) == blocks_of(config, None)
    for whole, tiled in zip(blocks_of(config, None), blocks_of(config, 48), strict=True):
        assert (whole.forward_flop, whole.parameters) == (tiled.forward_flop, tiled.parameters)
        assert tiled.kept_bytes == pytest.approx(whole.kept_bytes, rel=1e-3)  # a norm's weight, in fp32, for each tile
        weights = sum(p.n_elements for p in tiled.parameters if ".mlp." in p.name or "post_feedforward" in p.name)
        assert (whole.tile_sum_bytes, tiled.tile_sum_bytes) == (0, weights * (4 + 4 * (4 + 8)))  # four tiles, fp32
        for tier in whole.tiers:
            same = tiled.recompute(tier.saved)
            assert same is not None
            assert same.saved_bytes == tier.saved_bytes
            assert sum(m.flop for m in tiled.matmuls[: same.n_matmuls]) == sum(m.flop for m in whole.matmuls[: tier.n_matmuls])


def test_memory_of_a_tiled_mlp_does_not_grow_with_the_sequence() -> None:
    """Only what attention and residuals need does: a second MLP width adds what the weights and one tile add."""
    narrow, wide = (tiny_config("llama", intermediate_size=n) for n in (64, 128))

    def extra_bytes(seq_len: int) -> int:
        how = replace(semantics(1, seq_len, mlp_tile_tokens=16))
        pair = [build_workload(Model(c), how).blocks[1].transient_bytes for c in (narrow, wide)]
        return pair[1] - pair[0]

    assert extra_bytes(4096) == extra_bytes(64 * 1024) <= 3 * 64 * 32 * 8 + 16 * 64 * 4 * 8
