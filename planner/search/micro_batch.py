"""Candidate micro-batch and tile sizes, and candidate splits of a single memory (GB10), if the user leaves them free."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from penstock.hwprofiles.schema import Profile
from penstock.planner.model.workload import build_workload, can_tile_mlp
from penstock.planner.predict.memory import footprint, frame
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.legality import refuse_sum_groups
from penstock.runtime.plan.workload import Model, Workload
from penstock.runtime.units import GB

from . import tuning
from .claim import CUT
from .policies import families, smallest_plans

SIZES = frozenset({"micro_batch", "mlp_tile_tokens", "loss_tile_tokens"})  # fields of Semantics that are proposed here

Size = tuple[Semantics, Workload]  # with a micro-batch and tiles


def shared_step(semantics: Semantics, gpus: int, has_groups: bool) -> Semantics:
    """One rank's part of a step. Without requested sum groups, use the largest usual power of two that divides the step."""
    if not has_groups:
        n = semantics.n_micro_batches
        fitting = [1 << i for i in range(max(tuning.USUAL_SUM_GROUPS, gpus).bit_length()) if n % (1 << i) == 0]
        semantics = replace(semantics, sum_groups=fitting[-1])
    return semantics.shared_by(gpus)


def sizes_of(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str] = SIZES) -> Sequence[Size]:
    """Possible sizes with at most MOST_MICRO_BATCHES micro-batches; otherwise the one that needs the least memory."""
    sizes = possible_sizes(model, semantics, profile, free)
    return [size for size in sizes if size[0].n_micro_batches <= tuning.MOST_MICRO_BATCHES] or sizes[-1:]


def possible_sizes(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str] = SIZES) -> list[Size]:
    """Candidate micro-batches and tiles for a model, machine, batch and sequence length, the largest micro-batch first.

    Only the sizes named in `free` are proposed, others are kept. The last micro-batch of a step may be smaller.

    A micro-batch is a candidate if the smallest plan fits the device with the usual loss tile; where logits take much memory, also
    with a smaller tile. Tiles of loss and MLP are then added for the smallest micro-batch that does not fit, and for the smallest
    of all if it leaves too little memory. The choice of tiles is, in this order: the largest that leave memory; those that do with
    offloaded boundaries; those that just fit with offloaded boundaries; those that need the least.
    """
    defaults = {"mlp_tile_tokens": None, "loss_tile_tokens": tuning.LOSS_TILE[semantics.loss]}
    semantics = replace(semantics, **{name: value for name, value in defaults.items() if name in free})  # type: ignore[arg-type]
    memory_bytes = profile.device.memory_bytes.value
    sizes: dict[Semantics, Workload] = {}
    too_large: Semantics | None = None
    for n in candidates(semantics, "micro_batch" in free):
        if sizes and n * max(tuning.N_PARTS) < semantics.batch_size:
            break
        usual = replace(semantics, micro_batch=n)
        for sized, workload in _by_loss_tiles(model, usual, profile, free):
            smallest = Policy(accumulation_group=sized.least_group, spill_blocks=tuple(range(workload.n_layers)))
            if _device_bytes(model, sized, workload, smallest, profile) <= memory_bytes:
                sizes[sized] = workload
        if usual not in sizes:
            too_large = usual
    least, workload = usual, build_workload(model, usual)
    smallest = Policy(accumulation_group=least.least_group)
    leaves_room = _device_bytes(model, least, workload, smallest, profile) <= tuning.LEAST_FRACTION * memory_bytes
    tiled = [_in_tiles(model, sized, profile, free) for sized in (too_large, None if leaves_room else least) if sized is not None]
    sizes |= {sized: workload for sized, workload in tiled if sized not in sizes}
    return sorted(sizes.items(), key=lambda size: -size[0].micro_batch)


def _by_loss_tiles(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Iterator[Size]:
    """Yield the size itself, and a smaller loss tile if it may be chosen and saves much memory."""
    workload = build_workload(model, semantics)
    yield semantics, workload
    spare_bytes = _head_bytes_above_others(workload)
    if "loss_tile_tokens" in free and spare_bytes >= tuning.MUCH_FRACTION * profile.device.memory_bytes.value:
        semantics = replace(semantics, loss_tile_tokens=semantics.loss_tile_tokens // tuning.SMALLER_LOSS_TILE)
        yield semantics, build_workload(model, semantics)


def _head_bytes_above_others(workload: Workload) -> int:
    *rest, head = workload.blocks
    return head.transient_bytes - max(block.transient_bytes for block in rest)


def candidates(semantics: Semantics, is_free: bool = True) -> list[int]:
    """Candidate micro-batches, largest first: equal parts of the batch, or the fixed size. PlanError if none fits the groups."""
    if not is_free:
        refuse_sum_groups(semantics)
        return [semantics.micro_batch]
    rows = semantics.objective.rows_each
    sizes = sorted({-(-semantics.batch_size // (n * rows)) * rows for n in (*tuning.N_PARTS, *tuning.MORE_PARTS)}, reverse=True)
    of_size = {n: replace(semantics, micro_batch=n) for n in sizes}
    valid = [n for n, s in of_size.items() if s.n_micro_batches % s.sum_groups == 0 and not (s.ranks > 1 and s.n_left)]
    if not valid:
        refuse_sum_groups(replace(semantics, micro_batch=1))
        raise PlanError(f"{semantics.sum_groups} sum groups: no micro-batch divides the step into that number; choose fewer")
    return valid


def _in_tiles(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Size:
    """The largest tiles for this micro-batch that leave enough memory, otherwise those that need the least."""
    memory_bytes, by_tiles = profile.device.memory_bytes.value, [*_by_tiles(model, semantics, free)]
    smallest = Policy(accumulation_group=semantics.least_group)
    spilled = replace(smallest, spill_blocks=tuple(range(by_tiles[0][1].n_layers)))
    for policy, fraction in ((smallest, tuning.LEAST_FRACTION), (spilled, tuning.LEAST_FRACTION), (spilled, 1.0)):
        for size in by_tiles:
            if _device_bytes(model, *size, policy, profile) <= fraction * memory_bytes:
                return size
    return min(by_tiles, key=lambda size: _device_bytes(model, size[0], size[1], spilled, profile))


def _by_tiles(model: Model, semantics: Semantics, free: frozenset[str]) -> Iterator[Size]:
    """Candidate tiles, the largest first. Loss tiles shrink only while the head needs the most memory of all blocks."""
    mlp_tiles: list[int | None] = [semantics.mlp_tile_tokens]
    if "mlp_tile_tokens" in free and semantics.train.all and can_tile_mlp(model):
        mlp_tiles += _powers_of_two(tuning.LEAST_MLP_TILE, semantics.tokens_per_micro_batch - 1)
    is_free, largest = "loss_tile_tokens" in free, tuning.LOSS_TILE[semantics.loss]
    loss_tiles = _powers_of_two(tuning.LEAST_LOSS_TILE, largest) if is_free else [semantics.loss_tile_tokens]
    for mlp_tile in mlp_tiles:
        for loss_tile in loss_tiles:
            tried = replace(semantics, mlp_tile_tokens=mlp_tile, loss_tile_tokens=loss_tile)
            workload = build_workload(model, tried)
            yield tried, workload
            if _head_bytes_above_others(workload) <= 0:
                break


def _device_bytes(model: Model, semantics: Semantics, workload: Workload, policy: Policy, profile: Profile) -> int:
    return footprint(frame(model, workload, semantics, policy), profile).device_peak_bytes


def _powers_of_two(least: int, largest: int) -> list[int]:
    """Powers of two in this range, the largest first."""
    return [1 << n for n in range(largest.bit_length() - 1, -1, -1) if least <= 1 << n <= largest]


def cuts(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Iterator[Profile]:
    """Yield splits of a single memory in which some policy fits. Copies within one memory take no time, and data needs no more
    bytes on the device, so the device gets nearly everything that the host does not need."""
    if CUT not in free or (pool := profile.device.pool_bytes) is None:
        return
    sized, workload = sizes_of(model, semantics, profile, free)[-1]
    smallest = (frame(model, workload, sized, family.policy()) for family in families(sized, workload))
    least_bytes = min(footprint(setup, profile).host_peak_bytes for setup in smallest)
    for fraction in tuning.HOST_FRACTIONS:
        host_bytes = -(-int(fraction * least_bytes) // GB) * GB
        if 0 < host_bytes < pool.value:
            cut = profile.with_memory(int(pool.value) - host_bytes, host_bytes, author="the plan")
            sizes = sizes_of(model, semantics, cut, free)
            if any(needs.fits for sized, workload in sizes for _, needs in smallest_plans(model, workload, sized, cut)):
                yield cut


def uncut(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Profile:
    """Relaxed machine that bounds all splits: the host has all memory, the device all except the host's minimum for any policy."""
    pool = profile.device.pool_bytes
    assert pool is not None, "only a single memory can be split"

    def having(device_bytes: float) -> Profile:
        memory = {"memory_bytes": pool.model_copy(update={"value": device_bytes}), "pool_bytes": None}
        host = profile.host.model_copy(update={"memory_bytes": pool})
        return profile.model_copy(update={"device": profile.device.model_copy(update=memory), "host": host})

    pooled = having(pool.value)
    plans = (smallest_plans(model, workload, sized, pooled) for sized, workload in sizes_of(model, semantics, pooled, free))
    return having(pool.value - min(needs.host_peak_bytes for _, needs in chain.from_iterable(plans)))
