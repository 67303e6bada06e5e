"""How many sequences and tokens are computed at a time, when the user does not say?"""

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

from hwprofiles.schema import Profile
from runtime.plan import Policy, Semantics
from runtime.workload import Model, Workload

from .memory import footprint, frame
from .workload import build_workload, can_tile_mlp

LEAST_FRACTION = 0.6  # of device memory for the least working set of a micro-batch: the rest is the policy's to use
# Tokens whose logits exist at a time, where they are not too many. More read the sum of the head's gradient less often; as fused
# kernels leave little else to do, that shows.
LOSS_TILE = {"eager": 1024, "fused": 4096}
# Tokens: each tile reads its weights' gradient and adds it to a sum, ten bytes a parameter, for six FLOP a parameter and token
LEAST_MLP_TILE, LEAST_LOSS_TILE = 1024, 128
SIZES = frozenset({"micro_batch", "mlp_tile_tokens", "loss_tile_tokens"})  # fields of Semantics that are proposed here


def with_micro_batch(
    model: Model, semantics: Semantics, profile: Profile, free: frozenset[str] = SIZES
) -> tuple[Semantics, Workload]:
    """The semantics with micro-batch and tiles pinned: a function of model, machine, batch and sequence.

    Only the sizes named in `free` are proposed, the others stay. The micro-batch is the largest divisor of the batch whose least
    working set leaves room: everything recomputed from boundaries, one micro-batch at a time, with one weight slot ahead and
    one gradient. Where not even the smallest leaves room, the MLP runs by the largest tiles with which it does; else those with
    which it does when boundaries go to the host; else those with which it fits so, without room; else those that need least.
    """
    defaults = {"mlp_tile_tokens": None, "loss_tile_tokens": LOSS_TILE[semantics.loss]}
    semantics = replace(semantics, **{name: value for name, value in defaults.items() if name in free})  # type: ignore[arg-type]
    memory_bytes = profile.device.memory_bytes.value
    for micro_batch in divisors(semantics.batch_size) if "micro_batch" in free else [semantics.micro_batch]:
        semantics = replace(semantics, micro_batch=micro_batch)
        workload = build_workload(model, semantics)
        if _device_bytes(model, semantics, workload, Policy(), profile) <= LEAST_FRACTION * memory_bytes:
            return semantics, workload
    spilled = Policy(spill_blocks=tuple(range(workload.n_layers)))
    by_tiles = list(_by_tiles(model, semantics, free))
    for policy, fraction in ((Policy(), LEAST_FRACTION), (spilled, LEAST_FRACTION), (spilled, 1.0)):
        for tried, workload in by_tiles:
            if _device_bytes(model, tried, workload, policy, profile) <= fraction * memory_bytes:
                return tried, workload
    return min(by_tiles, key=lambda sizes: _device_bytes(model, sizes[0], sizes[1], spilled, profile))


def _by_tiles(model: Model, semantics: Semantics, free: frozenset[str]) -> Iterator[tuple[Semantics, Workload]]:
    """Tiles that may be chosen, the largest first; those of the loss only shrink while no other block needs more."""
    mlp_tiles: list[int | None] = [semantics.mlp_tile_tokens]
    if "mlp_tile_tokens" in free and can_tile_mlp(model):
        mlp_tiles += _powers_of_two(LEAST_MLP_TILE, semantics.tokens_per_micro_batch - 1)
    for mlp_tile in mlp_tiles:
        loss_tiles = [semantics.loss_tile_tokens]
        if "loss_tile_tokens" in free:
            loss_tiles = _powers_of_two(LEAST_LOSS_TILE, LOSS_TILE[semantics.loss])
        for loss_tile in loss_tiles:
            tried = replace(semantics, mlp_tile_tokens=mlp_tile, loss_tile_tokens=loss_tile)
            workload = build_workload(model, tried)
            yield tried, workload
            *others, head = workload.blocks
            if head.transient_bytes <= max(block.transient_bytes for block in others):
                break


def _device_bytes(model: Model, semantics: Semantics, workload: Workload, policy: Policy, profile: Profile) -> int:
    return footprint(frame(model, workload, semantics, policy), profile).device_peak_bytes


def _powers_of_two(least: int, most: int) -> list[int]:
    """All from `most` down to `least`."""
    return [1 << n for n in range(most.bit_length() - 1, -1, -1) if least <= 1 << n <= most]


def divisors(n: int) -> list[int]:
    """All divisors, the largest first."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)}, reverse=True)
