"""Neighbourhood of a policy for local search.

The relaxation ignores the order of ops, so its best solution may have better neighbours. Moves are ordered by expected gain:
buffers, group sizes, then a number of evenly spaced blocks that get another treatment, and finally single blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.hwprofiles.schema import Profile
from penstock.planner.bounds.bounds import places_to_stay
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Policy, Setup, Update
from penstock.runtime.plan.legality import can_read, refuse_illegal, vocabulary
from penstock.runtime.plan.policy import RICHER
from penstock.runtime.plan.workload import Saved

from . import tuning
from .policies import WAYS, Way, can_spill, eager_is_legal, equivalent_sizes, evenly, evenly_to_last, staying, with_ways

Move = Callable[[Setup, Sequence[int]], Iterator[Policy]]  # (plan, blocks that may keep their state on the device) -> policies


class Omission(NamedTuple):
    """Kind of choice that a search may exclude. A restricted space often leads to a better plan: it has fewer local optima."""

    has: Callable[[Policy], bool]
    remove: Callable[[Policy], Policy]


def _saved_tier(saved: Saved) -> Omission:
    return Omission(lambda policy: saved in policy.save, lambda policy: _saving(policy, policy.saving(saved), Way(Saved.INPUT)))


OMISSIONS = (  # the effective ones of eight (docs/log.md)
    *map(_saved_tier, (Saved.ALL, Saved.ATTENTION)),
    Omission(lambda policy: bool(policy.spill_blocks), lambda policy: replace(policy, spill_blocks=())),
    Omission(lambda policy: bool(policy.resident_blocks), lambda policy: replace(policy, resident_blocks=())),
)


def neighbours(plan: Setup, profile: Profile, moves: Iterable[Move]) -> Iterator[tuple[Move, Policy]]:
    """Yield distinct legal policies that differ a little from the plan's. The plan needs no ops. Memory is not checked."""
    visited, may_stay = {plan.policy}, places_to_stay(plan, profile)
    for move, policy in ((m, policy) for m in moves for policy in m(plan, may_stay)):
        if policy not in visited:
            visited.add(policy)
            try:
                refuse_illegal(plan.workload, plan.semantics, policy)
            except PlanError:
                continue
            yield move, policy


def fewer_offloads(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    """Offload activations of fewer layers, first those with weights on the device: no loads compete with their fetches. The
    relaxation does not model loads that wait for fetches."""
    policy, away = plan.policy, plan.policy.offload_blocks
    on_device, saved = {*policy.device_blocks, *policy.resident_blocks}, [policy.saved(b) for b in away]
    first = [b for b in sorted(on_device) if b in away or (0 < b <= plan.workload.n_layers and policy.saved(b) is Saved.INPUT)]
    rest = [b for b in away if b not in on_device]
    for n in [round(share * len(away)) for share in tuning.LEAVING_SHARES] if first and away else ():
        stays = evenly(rest, max(0, len(first) + len(rest) - n)) if n > len(first) else rest
        offloading = [*first[:n], *(b for b in rest if b not in stays)]
        yield _saving(_saving(policy, away, Way(Saved.INPUT)), offloading, Way(max(saved, key=saved.count), away=True))


def early_updates(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    """Change the number of speculative updates. The relaxation ignores the order of host work. With more of them, the host gains
    more if norms are computed on the device."""
    policy, n_blocks = plan.policy, len(plan.workload.blocks)
    of_host, n = [b for b in range(n_blocks) if b not in policy.device_blocks], len(policy.speculate_blocks)
    numbers = [n + d for d in tuning.EARLY_STEPS if n] + [round(share * n_blocks) for share in tuning.EARLY_SHARES]
    for square in (policy.square_on_device, not policy.square_on_device):
        for n_early in dict.fromkeys(numbers):
            if 0 <= n_early <= len(of_host):
                speculating = replace(policy, update=Update.DEFERRED, speculate_blocks=tuple(evenly_to_last(of_host, n_early)))
                yield replace(speculating, square_on_device=square)


def _buffers(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    policy = plan.policy
    for change in tuning.STEPS:
        yield replace(policy, gradient_slots=max(1, policy.gradient_slots + change))
        yield replace(policy, prefetch_depth=max(1, policy.prefetch_depth + change))
    for change in tuning.SAVED_STEPS if policy.offload_blocks else ():
        yield replace(policy, saved_slots=max(tuning.LEAST_SAVED_SLOTS, policy.saved_slots + change))


def _groups(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    """Change the group size: equal number of groups, slightly more or fewer, half, double, or extremes."""
    policy, size, n = plan.policy, plan.policy.accumulation_group, plan.semantics.n_micro_batches
    equivalent, of_weight = equivalent_sizes(size, n), policy.sum_blocks
    if size < n and of_weight:
        of_weight = tuple(vocabulary(plan.workload)) if plan.joins_tied else ()
    one_group = {"square_on_device": False, "device_blocks": ()} if plan.workload.trains_all else {}
    for group in (equivalent[0], equivalent[-1], size - 1, size + 1, size // 2, 2 * size, (size + n) // 2, n, 1):
        if 1 <= group <= n and group != size:
            if group == n:
                yield replace(policy, accumulation_group=n, sum_blocks=of_weight)
            elif policy.sum_blocks and size < n:
                yield replace(policy, accumulation_group=group)
            else:
                yield replace(policy, accumulation_group=group, sum_blocks=_trained_on_host(plan))
                yield replace(policy, accumulation_group=group, sum_blocks=(), **one_group)  # type: ignore[arg-type]


def _trained_on_host(plan: Setup) -> tuple[int, ...]:
    """Trained blocks without those that the device sums in any case."""
    return tuple(b for b, block in enumerate(plan.workload.blocks) if block.trained and not plan.is_apart(b))


def _sums(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    """Sum all gradients on the device, those of the vocabulary and of every second layer, of the vocabulary, or none."""
    policy, trained = plan.policy, _trained_on_host(plan)
    of_vocabulary = tuple(b for b in vocabulary(plan.workload) if b in trained)
    half = tuple(sorted({*of_vocabulary, *evenly(trained, len(trained) // 2), *policy.device_blocks}))
    for summed in (of_vocabulary, ()) if plan.reduced else (trained, half, of_vocabulary, ()):
        yield replace(policy, sum_blocks=summed, square_on_device=policy.square_on_device and bool(summed or plan.reduced))


def _all_or_none(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    """Apply a treatment to all blocks, or to none."""
    policy, n_layers = plan.policy, plan.workload.n_layers
    layers = tuple(range(1, n_layers + 1))
    for blocks in (tuple(range(n_layers)), ()):
        yield replace(policy, spill_blocks=tuple(b for b in blocks if policy.saved(b + 1) is not Saved.ALL))
    for blocks in ((), layers, (0, *layers, n_layers + 1)):
        yield replace(policy, resident_blocks=blocks)
    for way in WAYS:
        yield _saving(policy, layers, way)
    yield from (replace(policy, speculate_blocks=()), replace(policy, speculate_blocks=(), square_on_device=False), _bare(policy))
    yield replace(policy, square_on_device=not policy.square_on_device)
    for stay in ([], may_stay, [b for b in may_stay if 0 < b <= n_layers]):
        yield from (staying(plan, policy, stay), staying(plan, _bare(policy), stay))
    if eager_is_legal(plan.semantics):
        yield replace(policy, update=Update.EAGER if policy.update is Update.DEFERRED else Update.DEFERRED, speculate_blocks=())


def _moved(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    """Move evenly spaced layers from one way of saving to another, optionally with as many layers that save only their input,
    because the memory of one layer may suffice for two."""
    policy, layers = plan.policy, range(max(1, plan.workload.first_trained), plan.workload.n_layers + 1)
    of_way: dict[Way, list[int]] = {}
    for b in layers:
        of_way.setdefault(Way(policy.saved(b), b in policy.offload_blocks), []).append(b)
    for n in (*reversed(tuning.MOVED), 0):
        for old, blocks in of_way.items():
            for new in WAYS:
                if new == old or n > len(blocks):
                    continue
                moved = evenly(blocks, n or -(-len(blocks) // 2))
                yield _saving(policy, moved, new)
                smallest = [b for b in of_way.get(Way(Saved.INPUT), []) if old.saved is not Saved.INPUT]
                if len(smallest) >= len(moved):
                    yield _saving(policy, [*moved, *evenly(smallest, len(moved))], new)


def _more_or_fewer(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    """Add or remove blocks with resident weights, offloaded boundaries, disk weights, or state on the device."""
    policy = plan.policy
    spilling = [b for b in can_spill(plan.workload) if policy.saved(b + 1) is not Saved.ALL]
    read = can_read(plan.workload, plan.semantics) if policy.disk_blocks else []
    choices = {"resident_blocks": range(len(plan.workload.blocks)), "spill_blocks": spilling, "disk_blocks": read}
    for change in (sign * n for n in tuning.MOVED for sign in (1, -1)):
        for name, candidates in choices.items():
            for blocks in _changed(getattr(policy, name), candidates, change):
                yield replace(policy, **{name: blocks})  # type: ignore[arg-type]
        for blocks in _changed(policy.device_blocks, may_stay, change):
            yield staying(plan, policy, blocks)
        layers = [b for b in _trained_on_host(plan) if 0 < b <= plan.workload.n_layers] if policy.sum_blocks else []
        for blocks in _changed(policy.sum_blocks, layers, change):
            yield replace(policy, sum_blocks=blocks)
    if policy.spill_blocks:
        yield replace(policy, spill_blocks=tuple(evenly(spilling, len(policy.spill_blocks))))


def _changed(blocks: Sequence[int], candidates: Sequence[int], change: int) -> Iterator[tuple[int, ...]]:
    """Yield `blocks` with `change` evenly spaced candidates added, or as many of its own removed."""
    pool = [b for b in candidates if b not in blocks] if change > 0 else list(blocks)
    if abs(change) <= len(pool):
        yield tuple(sorted({*blocks} ^ {*evenly(pool, abs(change))}))


def single_blocks(plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
    """Change one block."""
    policy, n_layers = plan.policy, plan.workload.n_layers
    for b in range(1, n_layers + 1):
        for way in (*map(Way, RICHER), *WAYS):
            yield _saving(policy, (b,), way)
    for name, blocks in {"resident_blocks": range(n_layers + 2), "spill_blocks": range(n_layers)}.items():
        for changed in ({*getattr(policy, name)} ^ {b} for b in blocks):
            yield replace(policy, **{name: tuple(sorted(changed))})  # type: ignore[arg-type]
    for changed in ({*policy.device_blocks} ^ {b} for b in may_stay):
        yield from (staying(plan, policy, changed), staying(plan, _bare(policy), changed))


def _bare(policy: Policy) -> Policy:
    """Policy without choices that are useless or impossible with state on the device."""
    return replace(policy, speculate_blocks=(), square_on_device=False, resident_blocks=(), gradient_slots=1)


def _saving(policy: Policy, layers: Iterable[int], way: Way) -> Policy:
    """Set how these layers save activations; a layer that saves everything keeps its input on the device."""
    policy = with_ways(policy, dict.fromkeys(layers, way))
    return replace(policy, spill_blocks=tuple(b for b in policy.spill_blocks if policy.saved(b + 1) is not Saved.ALL))


MOVES: tuple[Move, ...] = (fewer_offloads, _buffers, _groups, _sums, _all_or_none, _moved, _more_or_fewer)  # by expected gain
