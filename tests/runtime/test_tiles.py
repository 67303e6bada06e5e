"""Tiled MLPs in the runtime: calls and bytes of the plan, rounding, and long contexts that train in the planned memory."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.workload import build_workload
from penstock.planner.predict.memory import footprint, frame
from penstock.planner.search.micro_batch import sizes_of
from penstock.planner.search.result import forward_flop
from penstock.planner.search.search import search
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Kind, Plan, Policy, Semantics, saves
from penstock.runtime.plan.workload import Block, Model, Saved
from tests import real_layers
from tests.lanes import mostly_slow
from tests.real_layers import Work, hf_model, layer_calls
from tests.tiny import EAGER_ONLY, EXPERT_TYPES, STRUCTURES, families, tiny_config
from tests.training import differences, machine_for, plan_of, same_bits, semantics_of, state_of, streamed, trained

from .test_replay import BY_TILES, REMEMBERING, WIDE, device_bytes, wide

DENSE_TYPES = [t for t in STRUCTURES if t not in EXPERT_TYPES]


def plan_by_tiles(model_type: str, way: str, tile: int = 40) -> Plan:
    policy = replace(REMEMBERING[way], accumulation_group=2)
    return plan_of(tiny_config(model_type, **WIDE), replace(wide(model_type), mlp_tile_tokens=tile), policy)


@mostly_slow(("model_type", "way", "tile"), BY_TILES)
def test_products_run_by_tiles_are_those_of_the_plan(model_type: str, way: str, tile: int) -> None:
    """In forward, and again in backward: each tile is computed as often as planned."""
    plan = plan_by_tiles(model_type, way, tile)
    machine, checked = machine_for(plan), set()
    for index, op in enumerate(plan.ops):
        with torch.no_grad(), Work() as work:
            machine.perform(index, op, 0)
        block, recompute = plan.workload.blocks[op.block], None
        if op.kind not in (Kind.FORWARD, Kind.BACKWARD) or block.attention is None:
            continue
        a, products = block.attention, sum(m.flop for m in block.matmuls)
        squares = 4 * a.n_sequences * a.n_heads * a.head_dim * a.seq_len**2 if model_type in EAGER_ONLY else 0
        if op.kind is Kind.BACKWARD and plan.policy.saved(op.block) is not Saved.ALL:
            recompute = block.recompute(plan.policy.saved(op.block))
            assert recompute is not None
        again = sum(m.flop for m in block.matmuls[: recompute.n_matmuls]) + squares * recompute.attention if recompute else 0
        assert work.flop == again + (products + squares) * (2 if op.kind is Kind.BACKWARD else 1), op
        checked.add((op.kind, op.block))
    assert len(checked) == 6


@mostly_slow("model_type", DENSE_TYPES, fast=(0, 4, 5))
def test_a_forward_by_tiles_makes_the_calls_that_are_counted(model_type: str) -> None:
    """One more: tiles are concatenated, then added to the residual; the plan counts an addition per tile."""
    plan = plan_by_tiles(model_type, "boundaries")
    templates = Templates(plan.model.config, plan.workload, plan.semantics, plan.policy)
    model = hf_model(plan.model.config, attn_implementation=plan.semantics.attention)
    for number, (layer, x, kwargs) in enumerate(layer_calls(model, 96, 1, 96), start=1):
        weights = {f"model.layers.{number - 1}.{name}": p for name, p in layer.named_parameters()}
        with torch.no_grad(), Work() as work:
            templates.layer(number, weights, x, real_layers.call_of(kwargs))
        block = plan.workload.blocks[number]
        assert 0 <= work.calls.total() - block.n_kernels <= 2
        assert work.n_bytes - 2 * block.boundary_bytes == pytest.approx(block.pointwise_bytes, rel=0.07)


@mostly_slow(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
@mostly_slow("model_type", ["llama", "gemma2"])
def test_one_tile_for_all_tokens_is_none_and_smaller_ones_round(model_type: str, dtype: str, tolerance: float) -> None:
    """Compare each weight's gradient relative to its norm; the first moment after a step is proportional to the gradient."""
    gradients = {}
    for tile in (None, 32, 33, 5, 1):
        dtypes = {"compute_dtype": dtype, "gradient_dtype": "fp32"}
        how = semantics_of(model_type, micro_batch=2, clip_norm=None, mlp_tile_tokens=tile, **dtypes)
        gradients[tile] = state_of(trained(plan_of(tiny_config(model_type), how, Policy()), n_steps=1))[1]
    expected = gradients[None]
    for tile, tiled in gradients.items():
        same = all(same_bits(tiled[name], expected[name]) for name in expected)
        assert same == (tile in (None, 32, 33)), "tiles that change nothing would prove nothing"
        for name, m in tiled.items():
            assert torch.dist(m, expected[name]) <= tolerance * expected[name].norm(), (tile, name)


@mostly_slow("model_type", [first for first, *_ in families(DENSE_TYPES)])
def test_tiles_do_the_same_work_and_add_their_sums(model_type: str) -> None:
    """One tile of all tokens is no tile. A second MLP width adds the weights and one tile, for any sequence length."""

    def blocks_of(tile: int | None, seq_len: int = 160, **overrides: int) -> tuple[Block, ...]:
        how = semantics_of(model_type, seq_len=seq_len, compute_dtype="fp32", mlp_tile_tokens=tile)
        return build_workload(Model(tiny_config(model_type, **overrides)), how).blocks[1:-1]

    assert blocks_of(160) == blocks_of(10**6) == blocks_of(None)
    for untiled, tiled in zip(blocks_of(None), blocks_of(48), strict=True):
        assert (forward_flop(untiled), untiled.parameters) == (forward_flop(tiled), tiled.parameters)
        weights = sum(p.n_elements for p in tiled.parameters if ".mlp." in p.name or "post_feedforward" in p.name)
        assert (untiled.tile_sum_bytes, tiled.tile_sum_bytes) == (0, weights * (4 + 4 * (4 + 8)))  # four tiles, fp32
    wide, narrow = ([blocks_of(16, n, **size)[0] for n in (1024, 4096)] for size in ({"intermediate_size": 128}, {}))
    grown = [a.transient_bytes - b.transient_bytes for a, b in zip(wide, narrow, strict=True)]
    assert grown[0] == grown[1] <= 3 * 64 * 32 * 8 + 16 * 64 * 4 * 8


def test_a_type_with_experts_runs_by_tiles_where_it_has_none() -> None:
    how, dense = semantics_of("qwen3_moe", mlp_tile_tokens=7), tiny_config("qwen3_moe", decoder_sparse_step=9, num_hidden_layers=2)
    assert differences(streamed(dense, how, Policy(save=saves(products=(2,))))) == []
    config = tiny_config("qwen3_moe")
    workload = build_workload(Model(config), replace(how, mlp_tile_tokens=None))
    for refuses in (lambda: build_workload(Model(config), how), lambda: Templates(config, workload, how)):
        with pytest.raises(WorkloadError, match="mlp_tile_tokens: layers with experts cannot be tiled"):
            refuses()


NARROW = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
LONG, LONGER = 4096, 12288
DEVICE_BYTES = 43 * 10**6
LEAN = Policy(spill_blocks=(0, 1))


def narrow_config(inner: int, n_layers: int = 2) -> dict[str, Any]:
    return tiny_config("llama", **NARROW, intermediate_size=inner, num_hidden_layers=n_layers)


def long_semantics(seq_len: int, tile: int | None, dtype: str = "fp32") -> Semantics:
    return Semantics(seq_len, 1, 1, compute_dtype=dtype, mlp_tile_tokens=tile, loss_tile_tokens=256)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def most_bytes(seq_len: int, inner: int, tile: int | None) -> int:
    """Return the peak of computing two steps beyond the arenas."""
    return device_bytes(plan_of(narrow_config(inner), long_semantics(seq_len, tile), LEAN))[1]


@mostly_slow(("few", "many"), [(1024, LONG), (LONG, LONGER)])
def test_by_tiles_memory_grows_as_attention_and_a_boundary_do(few: int, many: int) -> None:
    """Allow a dozen tensors of the layer's input size: norms, queries, keys, values, and their gradients."""
    boundary_bytes = build_workload(Model(narrow_config(512)), long_semantics(many - few, None)).blocks[1].boundary_bytes
    grown = most_bytes(many, 128, 128) - most_bytes(few, 128, 128)
    assert grown < 13 * boundary_bytes
    assert most_bytes(many, 512, None) - most_bytes(few, 512, None) > 100 * boundary_bytes


def test_spilled_boundaries_take_no_more_for_more_layers() -> None:
    def arenas(n_layers: int, spill: bool) -> int:
        policy = Policy(spill_blocks=tuple(range(n_layers)) if spill else ())
        return plan_of(narrow_config(512, n_layers), long_semantics(LONGER, 128), policy).device_arena_bytes

    assert arenas(4, spill=True) == arenas(40, spill=True) < arenas(4, spill=False) < arenas(40, spill=False) / 5


@pytest.mark.slow
def test_a_searched_plan_trains_a_context_four_times_the_device() -> None:
    """The planner selects tiles and offloads; arenas plus peak fit the device's memory."""
    model, semantics = Model(narrow_config(512, n_layers=4)), long_semantics(LONGER, None)
    profile = read_profile("cpu-2core").with_memory(DEVICE_BYTES, None)
    untiled = frame(model, build_workload(model, semantics), semantics, Policy())
    assert footprint(untiled, profile).device_peak_bytes > 4 * DEVICE_BYTES
    plan = search(model, sizes_of(model, semantics, profile), profile).plan
    assert plan.semantics.mlp_tile_tokens is not None
    assert any(op.kind is Kind.OFFLOAD_ACTIVATION for op in plan.ops)
    assert plan.device_arena_bytes + device_bytes(plan)[1] <= DEVICE_BYTES
