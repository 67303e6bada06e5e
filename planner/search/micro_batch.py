"""Micro-batch and tile sizes worth searching, and cuts of a machine's one memory (a GB10's), where the user leaves them free."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.hwprofiles.schema import Profile
from penstock.planner.model.workload import build_workload, can_tile_mlp
from penstock.planner.predict.memory import Footprint, footprint, frame
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.legality import refuse_sum_groups
from penstock.runtime.plan.workload import Model, Workload
from penstock.runtime.units import GB

from .claim import CUT
from .space import families, leanest

LEAST_FRACTION = 0.6  # of device memory for the least working set of one sequence: with more, it is cut into tiles
MUCH_FRACTION = 0.02  # of device memory: what logits take that is worth a smaller tile
# Numbers of equal parts of a batch: no size between two neighbours is much faster than both. Into more only
# where fewer do not fit, for then a plan is long, and what a part loses by being small is a small share of the step.
N_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MORE_PARTS = tuple(1 << n for n in range(9, 31))
MOST_MICRO_BATCHES = 20_000  # of a step that is looked at: even what groups more could have takes long to list
# Tokens whose logits exist at a time, where they are not too many. More read the sum of the head's gradient less often; as fused
# kernels leave little else to do, that shows.
LOSS_TILE = {"eager": 1024, "online": 4096}
SMALLER_LOSS_TILE = 4  # times: a quarter of the logits, as a smaller tile still costs little
# Tokens: each tile reads its weights' gradient and adds it to a sum, ten bytes a parameter, for six FLOP a parameter and token
LEAST_MLP_TILE, LEAST_LOSS_TILE = 1024, 128
USUAL_SUM_GROUPS = 8  # where several GPUs are asked for: then 2, 4 and 8 of them give the same bits
SIZES = frozenset({"micro_batch", "mlp_tile_tokens", "loss_tile_tokens"})  # fields of Semantics that are proposed here
HOST_FRACTIONS = (1.0, 1.15)  # of what the leanest plan needs of the host; the device has the rest

Size = tuple[Semantics, Workload]  # with a micro-batch and tiles


def shared_step(asked: Semantics, gpus: int, has_groups: bool) -> Semantics:
    """Each rank's part of a step. Where no sum groups were asked for, the usual number, if the step can be cut so."""
    if not has_groups:
        n = asked.n_micro_batches
        fitting = [1 << i for i in range(max(USUAL_SUM_GROUPS, gpus).bit_length()) if n % (1 << i) == 0]
        asked = replace(asked, sum_groups=fitting[-1])
    return asked.shared_by(gpus)


def sizes_of(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str] = SIZES) -> Sequence[Size]:
    """The sizes to search: those possible that make few enough micro-batches; where there are none, the one that needs least."""
    sizes = possible_sizes(model, semantics, profile, free)
    return [size for size in sizes if size[0].n_micro_batches <= MOST_MICRO_BATCHES] or sizes[-1:]


def possible_sizes(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str] = SIZES) -> list[Size]:
    """Micro-batch and tiles, a function of model, machine, batch and sequence; the largest micro-batch first.

    Only the sizes named in `free` are proposed, the others stay. The last micro-batch of a step may be smaller than the others.

    Those with which the leanest plan fits the device: with the usual tile of the loss, and where its logits would take much of the
    device also with a smaller one. And by tiles, of the MLP too, the smallest micro-batch that does not fit otherwise, and
    the least of all where it does not leave room: the largest tiles that leave room; else those that do when boundaries go to the
    host; else those with which it fits so, without room; else those that need least.
    """
    defaults = {"mlp_tile_tokens": None, "loss_tile_tokens": LOSS_TILE[semantics.loss]}
    semantics = replace(semantics, **{name: value for name, value in defaults.items() if name in free})  # type: ignore[arg-type]
    memory_bytes = profile.device.memory_bytes.value
    found: dict[Semantics, Workload] = {}
    too_large: Semantics | None = None
    for n in candidates(semantics, "micro_batch" in free):
        if found and n * max(N_PARTS) < semantics.batch_size:
            break
        usual = replace(semantics, micro_batch=n)
        for of, workload in _by_loss_tiles(model, usual, profile, free):
            lean = Policy(accumulation_group=of.least_group, spill_blocks=tuple(range(workload.n_layers)))
            if _device_bytes(model, of, workload, lean, profile) <= memory_bytes:
                found[of] = workload
        if usual not in found:
            too_large = usual
    least, workload = usual, build_workload(model, usual)
    lean = Policy(accumulation_group=least.least_group)
    leaves_room = _device_bytes(model, least, workload, lean, profile) <= LEAST_FRACTION * memory_bytes
    tiled = [_in_tiles(model, of, profile, free) for of in (too_large, None if leaves_room else least) if of is not None]
    found |= {of: workload for of, workload in tiled if of not in found}
    return sorted(found.items(), key=lambda size: -size[0].micro_batch)


def _by_loss_tiles(model: Model, of: Semantics, profile: Profile, free: frozenset[str]) -> Iterator[Size]:
    """The sizes themselves; and with a smaller tile of the loss, if that saves much and may be chosen."""
    workload = build_workload(model, of)
    yield of, workload
    spare_bytes = _head_bytes_above_others(workload)
    if "loss_tile_tokens" in free and spare_bytes >= MUCH_FRACTION * profile.device.memory_bytes.value:
        of = replace(of, loss_tile_tokens=of.loss_tile_tokens // SMALLER_LOSS_TILE)
        yield of, build_workload(model, of)


def _head_bytes_above_others(workload: Workload) -> int:
    *others, head = workload.blocks
    return head.transient_bytes - max(block.transient_bytes for block in others)


def candidates(semantics: Semantics, is_free: bool = True) -> list[int]:
    """Micro-batches worth trying, the largest first: the batch in equal parts, but for what the last one lacks; or the one that was
    chosen. PlanError where none makes the groups that are to be summed apart."""
    if not is_free:
        refuse_sum_groups(semantics)
        return [semantics.micro_batch]
    each = semantics.objective.rows_each
    sizes = sorted({-(-semantics.batch_size // (n * each)) * each for n in (*N_PARTS, *MORE_PARTS)}, reverse=True)
    of_size = {n: replace(semantics, micro_batch=n) for n in sizes}
    found = [n for n, of in of_size.items() if of.n_micro_batches % of.sum_groups == 0 and not (of.ranks > 1 and of.n_left)]
    if not found:
        refuse_sum_groups(replace(semantics, micro_batch=1))
        raise PlanError(f"{semantics.sum_groups} sum groups are more than any step is cut into; choose fewer")
    return found


def _in_tiles(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Size:
    """The same micro-batch with the tiles that leave room, or come nearest to it."""
    memory_bytes, by_tiles = profile.device.memory_bytes.value, [*_by_tiles(model, semantics, free)]
    lean = Policy(accumulation_group=semantics.least_group)
    spilled = replace(lean, spill_blocks=tuple(range(by_tiles[0][1].n_layers)))
    for policy, fraction in ((lean, LEAST_FRACTION), (spilled, LEAST_FRACTION), (spilled, 1.0)):
        for size in by_tiles:
            if _device_bytes(model, *size, policy, profile) <= fraction * memory_bytes:
                return size
    return min(by_tiles, key=lambda size: _device_bytes(model, size[0], size[1], spilled, profile))


def _by_tiles(model: Model, semantics: Semantics, free: frozenset[str]) -> Iterator[Size]:
    """Tiles that may be chosen, the largest first; those of the loss only shrink while no other block needs more."""
    mlp_tiles: list[int | None] = [semantics.mlp_tile_tokens]
    if "mlp_tile_tokens" in free and semantics.train.all and can_tile_mlp(model):
        mlp_tiles += _powers_of_two(LEAST_MLP_TILE, semantics.tokens_per_micro_batch - 1)
    is_free, most = "loss_tile_tokens" in free, LOSS_TILE[semantics.loss]
    loss_tiles = _powers_of_two(LEAST_LOSS_TILE, most) if is_free else [semantics.loss_tile_tokens]
    for mlp_tile in mlp_tiles:
        for loss_tile in loss_tiles:
            tried = replace(semantics, mlp_tile_tokens=mlp_tile, loss_tile_tokens=loss_tile)
            workload = build_workload(model, tried)
            yield tried, workload
            if _head_bytes_above_others(workload) <= 0:
                break


def _device_bytes(model: Model, semantics: Semantics, workload: Workload, policy: Policy, profile: Profile) -> int:
    return footprint(frame(model, workload, semantics, policy), profile).device_peak_bytes


def _powers_of_two(least: int, most: int) -> list[int]:
    """All from `most` down to `least`."""
    return [1 << n for n in range(most.bit_length() - 1, -1, -1) if least <= 1 << n <= most]


def cuts(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Iterator[Profile]:
    """The machine cut so that some policy fits, if it has one memory and may be cut: what lies on the device is not copied to it,
    and takes no more than it would on the host, so the device has all that the host can do without, or a little less."""
    if CUT not in free or (pool := profile.device.pool_bytes) is None:
        return
    of, workload = sizes_of(model, semantics, profile, free)[-1]
    lean = (frame(model, workload, of, family.policy()) for family in families(of, workload))
    least_bytes = min(footprint(setup, profile).host_peak_bytes for setup in lean)
    for fraction in HOST_FRACTIONS:
        host_bytes = -(-int(fraction * least_bytes) // GB) * GB
        if 0 < host_bytes < pool.value:
            cut = profile.with_memory(int(pool.value) - host_bytes, host_bytes, author="the plan")
            if any(
                needs.fits for size in sizes_of(model, semantics, cut, free) for _, needs in leanest(model, size[1], size[0], cut)
            ):
                yield cut


def uncut(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Profile:
    """A machine that can do what it can with any cut: the host has all of the memory, the device all but what some policy on that
    machine asks of the host at least."""
    pool = profile.device.pool_bytes
    assert pool is not None, "only one memory can be cut"

    def having(device_bytes: float) -> Profile:
        memory = {"memory_bytes": pool.model_copy(update={"value": device_bytes}), "pool_bytes": None}
        host = profile.host.model_copy(update={"memory_bytes": pool})
        return profile.model_copy(update={"device": profile.device.model_copy(update=memory), "host": host})

    lean = _leanest(model, semantics, having(pool.value), free)
    return having(pool.value - min(needs.host_peak_bytes for needs in lean))


def _leanest(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Iterator[Footprint]:
    """Needs of the policies that ask least, with each size."""
    for of, workload in sizes_of(model, semantics, profile, free):
        yield from (needs for _, needs in leanest(model, workload, of, profile))
