"""Are the sizes that nobody named a function of model, machine, batch and sequence, and no smaller than they must be?"""

from dataclasses import replace

import pytest

from hwprofiles.schema import Profile, read_profile
from planner.memory import footprint, frame
from planner.micro_batch import LEAST_FRACTION, LEAST_LOSS_TILE, LEAST_MLP_TILE, SIZES, with_micro_batch
from planner.micro_batch import LOSS_TILE as LOSS_TILES
from planner.workload import build_workload, read_model, shipped_models, supported_attention
from runtime.plan import Policy, Semantics
from runtime.workload import Model

from .tiny import tiny_config

GIB = 2**30
MACHINES = ("h200-pcie5", "gh200", "rtx4090-server")
LONG = 512 * 1024

LOSS_TILE = LOSS_TILES["eager"]


def proposed(name: str, machine: str, seq_len: int, batch: int) -> tuple[Model, Semantics, Profile]:
    model, profile = read_model(name), read_profile(machine)
    start = Semantics(seq_len, batch, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
    return model, with_micro_batch(model, start, profile)[0], profile


def device_bytes(model: Model, semantics: Semantics, profile: Profile, spilled: bool = False) -> int:
    workload = build_workload(model, semantics)
    policy = Policy(spill_blocks=tuple(range(workload.n_layers)) if spilled else ())
    return footprint(frame(model, workload, semantics, policy), profile).device_peak_bytes


def test_nothing_is_cut_into_tiles_where_whole_micro_batches_leave_room() -> None:
    n_whole = 0
    for name in shipped_models():
        for machine in MACHINES:
            model, semantics, profile = proposed(name, machine, 4096, 16)
            one = replace(semantics, micro_batch=1, mlp_tile_tokens=None, loss_tile_tokens=LOSS_TILE)
            if device_bytes(model, one, profile) <= LEAST_FRACTION * profile.device.memory_bytes.value:
                assert (semantics.mlp_tile_tokens, semantics.loss_tile_tokens) == (None, LOSS_TILE)
                n_whole += 1
    assert n_whole > 40


@pytest.mark.parametrize(
    ("name", "machine", "seq_len"),
    [
        ("qwen2.5-7b", "gh200", 2**17),
        ("qwen2.5-7b", "rtx4090-server", 2**15),
        ("llama-3.2-1b", "rtx4090-server", 2**16),
        ("qwen2.5-14b", "h200-pcie5", 2**18),
    ],
)
def test_a_tile_is_the_largest_power_of_two_that_leaves_room(name: str, machine: str, seq_len: int) -> None:
    model, semantics, profile = proposed(name, machine, seq_len, 2)
    tile, room = semantics.mlp_tile_tokens, LEAST_FRACTION * profile.device.memory_bytes.value
    assert (semantics.micro_batch, semantics.loss_tile_tokens) == (1, LOSS_TILE)
    assert tile is not None
    assert tile >= LEAST_MLP_TILE
    assert tile & (tile - 1) == 0
    at_hand = device_bytes(model, semantics, profile) <= room
    assert at_hand or device_bytes(model, semantics, profile, spilled=True) <= room
    assert at_hand or device_bytes(model, replace(semantics, mlp_tile_tokens=LEAST_MLP_TILE), profile) > room
    larger = replace(semantics, mlp_tile_tokens=2 * tile if 2 * tile < seq_len else None)
    assert device_bytes(model, larger, profile, spilled=not at_hand) > room


@pytest.mark.parametrize("machine", ["gh200", "h200-pcie5"])
def test_half_a_million_tokens_of_a_7b_model_fit_by_tiles_and_not_without(machine: str) -> None:
    model, semantics, profile = proposed("qwen2.5-7b", machine, LONG, 1)
    assert semantics.mlp_tile_tokens is not None
    assert device_bytes(model, semantics, profile, spilled=True) <= profile.device.memory_bytes.value
    assert device_bytes(model, replace(semantics, mlp_tile_tokens=None), profile, spilled=True) > profile.device.memory_bytes.value


@pytest.mark.parametrize("seq_len", [4096, 2**15, 2**17])
def test_proposing_twice_proposes_the_same_whatever_stood_there(seq_len: int) -> None:
    model, semantics, profile = proposed("qwen2.5-7b", "rtx4090-server", seq_len, 4)
    other = replace(semantics, micro_batch=4, mlp_tile_tokens=16, loss_tile_tokens=7)
    again, workload = with_micro_batch(model, other, profile)
    assert again == semantics
    assert workload == build_workload(model, semantics)


@pytest.mark.parametrize("field", sorted(SIZES))
def test_a_size_that_was_named_stays(field: str) -> None:
    model, profile = read_model("qwen2.5-7b"), read_profile("rtx4090-server")
    named = Semantics(2**15, 4, 2, mlp_tile_tokens=48, loss_tile_tokens=7)
    found, workload = with_micro_batch(model, named, profile, SIZES - {field})
    assert getattr(found, field) == getattr(named, field)
    assert workload == build_workload(model, found)
    assert with_micro_batch(model, named, profile, frozenset())[0] == named


def test_models_with_experts_get_no_tiles_of_their_mlp() -> None:
    _, semantics, _ = proposed("qwen3-30b-a3b", "rtx4090-server", LONG, 1)
    assert (semantics.micro_batch, semantics.mlp_tile_tokens) == (1, None)


def test_tiles_of_the_loss_shrink_only_where_logits_are_what_does_not_fit() -> None:
    """A vocabulary far larger than the layers, on ever smaller devices."""
    model, profile = Model(tiny_config("llama", vocab_size=100_000)), read_profile("cpu-2core")
    seen = []
    for memory_bytes in (GIB * 4, GIB * 2, GIB, GIB // 2, GIB // 4):
        semantics, workload = with_micro_batch(model, Semantics(2048, 1, 1), profile.with_memory(memory_bytes, None))
        seen.append(semantics.loss_tile_tokens)
        assert semantics.mlp_tile_tokens is None
        *others, head = workload.blocks
        if semantics.loss_tile_tokens < LOSS_TILE:
            before = build_workload(model, replace(semantics, loss_tile_tokens=2 * semantics.loss_tile_tokens)).blocks[-1]
            assert head.transient_bytes < before.transient_bytes > max(b.transient_bytes for b in others)
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == LOSS_TILE
    assert seen[-1] == LEAST_LOSS_TILE


def test_what_never_fits_is_proposed_as_it_needs_least() -> None:
    model, profile = read_model("qwen2.5-7b"), read_profile("cpu-2core")
    semantics, _ = with_micro_batch(model, Semantics(2**15, 1, 1), profile)
    least = device_bytes(model, semantics, profile, spilled=True)
    assert least > profile.device.memory_bytes.value
    for tile in (None, 1024, 2048, 16384):
        for loss in (128, 512, 1024):
            assert (
                device_bytes(model, replace(semantics, mlp_tile_tokens=tile, loss_tile_tokens=loss), profile, spilled=True) >= least
            )
