"""Long contexts, scaled down to a narrow model: they train in the planned memory, which tiled MLPs keep small."""

from functools import lru_cache
from typing import Any

import pytest

from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.workload import build_workload
from penstock.planner.predict.memory import footprint, frame
from penstock.planner.search.micro_batch import sizes_of
from penstock.planner.search.search import search
from penstock.runtime.plan import Kind, Policy, Semantics
from penstock.runtime.plan.workload import Model
from tests.lanes import mostly_slow
from tests.tiny import tiny_config
from tests.training import plan_of

from .test_replay import device_bytes

NARROW = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
LONG, LONGER = 4096, 12288
DEVICE_BYTES = 43 * 10**6
LEAN = Policy(spill_blocks=(0, 1))


def config_of(inner: int, n_layers: int = 2) -> dict[str, Any]:
    return tiny_config("llama", **NARROW, intermediate_size=inner, num_hidden_layers=n_layers)


def semantics_of(seq_len: int, tile: int | None, dtype: str = "fp32") -> Semantics:
    return Semantics(seq_len, 1, 1, compute_dtype=dtype, mlp_tile_tokens=tile, loss_tile_tokens=256)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def most_bytes(seq_len: int, inner: int, tile: int | None) -> int:
    """Return the peak of computing two steps beyond the arenas."""
    return device_bytes(plan_of(config_of(inner), semantics_of(seq_len, tile), LEAN))[1]


@mostly_slow(("few", "many"), [(1024, LONG), (LONG, LONGER)])
def test_by_tiles_memory_grows_as_attention_and_a_boundary_do(few: int, many: int) -> None:
    """Allow a dozen tensors of the layer's input size: norms, queries, keys, values, and their gradients."""
    boundary_bytes = build_workload(Model(config_of(512)), semantics_of(many - few, None)).blocks[1].boundary_bytes
    grown = most_bytes(many, 128, 128) - most_bytes(few, 128, 128)
    assert grown < 13 * boundary_bytes
    assert most_bytes(many, 512, None) - most_bytes(few, 512, None) > 100 * boundary_bytes


def test_spilled_boundaries_take_no_more_for_more_layers() -> None:
    def arenas(n_layers: int, spill: bool) -> int:
        policy = Policy(spill_blocks=tuple(range(n_layers)) if spill else ())
        return plan_of(config_of(512, n_layers), semantics_of(LONGER, 128), policy).device_arena_bytes

    assert arenas(4, spill=True) == arenas(40, spill=True) < arenas(4, spill=False) < arenas(40, spill=False) / 5


@pytest.mark.slow
def test_a_searched_plan_trains_a_context_four_times_the_device() -> None:
    """The planner selects tiles and offloads; arenas plus peak fit the device's memory."""
    model, semantics = Model(config_of(512, n_layers=4)), semantics_of(LONGER, None)
    profile = read_profile("cpu-2core").with_memory(DEVICE_BYTES, None)
    untiled = frame(model, build_workload(model, semantics), semantics, Policy())
    assert footprint(untiled, profile).device_peak_bytes > 4 * DEVICE_BYTES
    plan = search(model, sizes_of(model, semantics, profile), profile).plan
    assert plan.semantics.mlp_tile_tokens is not None
    assert any(op.kind is Kind.OFFLOAD_ACTIVATION for op in plan.ops)
    assert plan.device_arena_bytes + device_bytes(plan)[1] <= DEVICE_BYTES
