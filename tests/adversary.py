"""Adversary of lower bounds: search for plans that are faster than a bound.

Samples random models, machines, memory sizes, steps and policies from a seed, and hill-climbs to faster policies, because a bound
that is too high is violated near the optimum.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, get_args

from benchmarks.any_memory import with_any_memory
from penstock.hwprofiles.components import Collective, OpRatio
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.bounds.bounds import busy_s, places_to_stay, policy_bounds
from penstock.planner.bounds.machine import machine_bound
from penstock.planner.bounds.work import WorkCache
from penstock.planner.lower.lower import FEWEST_FOLDED, FEWEST_FOLDED_GROUPS, lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.memory import Footprint, footprint, frame
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.predict.simulate import simulate
from penstock.planner.search.evaluation import Evaluator
from penstock.planner.search.policies import (
    ANY_SLOTS,
    WAYS,
    eager_is_legal,
    family_of,
    mixed_options,
    slots_of,
    smallest_plans,
    staying,
    with_ways,
)
from penstock.planner.search.relax import Relaxation
from penstock.planner.search.tuning import LEAST_SAVED_SLOTS
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Kind, Lane, Policy, Semantics, Update
from penstock.runtime.plan.legality import refuse_illegal, vocabulary
from penstock.runtime.plan.train import parse_train
from penstock.runtime.plan.workload import Attention, Block, BlockKind, Matmul, Model, Parameter, Saved, Tier, Workload

MACHINES = ("h100-sxm", "h200-pcie5", "gh200", "rtx4090-desktop", "rtx4090-server", "rtx5090-desktop", "cpu-2core", "gb10")
MODELS = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-7b", "smollm2-360m", "qwen3-30b-a3b", "mixtral-8x7b", "qwen3-8b")
STARVED = (Group.UPLOAD, Group.DOWNLOAD, Group.DUPLEX, Group.DRAM, Group.OPTIMIZER, Group.REDUCE)
PLENTY_BYTES = 10**16
MOST_OPS = 1200  # approximate maximum per plan, so that a case takes 0.1 s
MAX_STEPS = 40
LONG_STEPS = (350, 700, 1500)  # numbers of micro-batches that give folded plans
LARGEST_REPEATED_GROUP = 8
ROUNDING = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Cell:
    """Model, semantics and machine of one case."""

    number: int
    model: Model
    workload: Workload
    semantics: Semantics
    profile: Profile
    clipped_fraction: float | None

    @property
    def largest_group(self) -> int:
        """Largest sampled accumulation group; in a long step one with a folded plan."""
        n = self.semantics.n_micro_batches
        is_short = n * len(self.workload.blocks) < FEWEST_FOLDED
        return n if is_short else max(1, min(LARGEST_REPEATED_GROUP, n // FEWEST_FOLDED_GROUPS))

    def needs(self, policy: Policy) -> Footprint:
        return footprint(frame(self.model, self.workload, self.semantics, policy), self.profile)

    def step_s(self, policy: Policy, clipped: bool = False) -> float | None:
        """Return the seconds of a step in steady state; None without steady state within MAX_STEPS."""
        plan = lower(self.model, self.workload, self.semantics, policy, {})
        demands = CostModel(self.profile, clipped=clipped).demands(plan)
        prediction = simulate(plan, demands, region_of(self.profile), MAX_STEPS)
        return prediction.step_s if prediction.periodic else None

    def busy_s(self, policy: Policy) -> dict[Lane, float]:
        """Return the uncontended seconds of the plan's ops by lane."""
        plan, seconds = lower(self.model, self.workload, self.semantics, policy, {}), dict.fromkeys(Lane, 0.0)
        for i, (op, demand) in enumerate(zip(plan.ops, CostModel(self.profile).demands(plan), strict=True)):
            seconds[op.lane] += plan.often(i) * demand.uncontended_s
        return seconds

    def mean_step_s(self, policy: Policy) -> float | None:
        """Return the mean seconds over clipped and unclipped steps."""
        often = self.clipped_fraction or 0.0
        step_s = self.step_s(policy)
        if step_s is None or not policy.speculate_blocks or not often:
            return step_s
        clipped_s = self.step_s(policy, clipped=True)
        return None if clipped_s is None else (1 - often) * step_s + often * clipped_s


@dataclass(frozen=True, slots=True)
class Held:
    """A lower bound, and the seconds of a step that must not be below it."""

    name: str
    bound_s: float
    step_s: float
    policy: Policy

    @property
    def is_broken(self) -> bool:
        return self.step_s < self.bound_s * ROUNDING

    @property
    def slack_fraction(self) -> float:
        """Relative distance of the step from the bound."""
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 else float("inf")


def cell(number: int) -> Cell:
    """Sample the case of this number; deterministic."""
    rng = random.Random(number)
    n_layers = rng.choice((1, 2, 3, 4, 6))
    n_micro_batches = rng.choice((1, 2, 3, 4, 5, 8, 11, 16, 24, 32, 48, 64))
    while n_micro_batches > 1 and 8 * n_micro_batches * (n_layers + 2) > MOST_OPS:
        n_micro_batches //= 2
    length = random.Random(f"length of cell {number}")
    is_long = length.random() < 0.15
    semantics = _semantics(rng, length.choice(LONG_STEPS) if is_long else n_micro_batches)
    semantics = semantics if is_long else _in_sum_groups(semantics, random.Random(f"sums of cell {number}"))
    is_real = rng.random() < 0.5
    sample = _real if is_real else lambda *args: (Model({}, name="drawn"), sample_workload(*args))
    model, workload = sample(rng, semantics, n_layers)
    semantics = semantics if is_long else _in_ranks(semantics, workload, random.Random(f"ranks of cell {number}"))
    if model.config and (partly := _trained_in_part(semantics, model, random.Random(f"trained of cell {number}"))) is not None:
        semantics, workload = partly
    machine = _with_peers(read_profile(rng.choice(MACHINES)), random.Random(f"peers of cell {number}"))
    if model.config and _multiplies_in_fp8(semantics, machine, random.Random(f"products of cell {number}")):
        semantics = replace(semantics, products="fp8")
        workload = build_workload(model, semantics)
    if rng.random() < 0.8:
        machine = faster(machine, {group: 10 ** rng.uniform(-1, 1) for group in Group if group is not Group.DISK})
    often = 0.0 if eager_is_legal(semantics) else rng.choice((None, None, 0.0, 0.3, 1.0))
    disk = random.Random(f"disk of cell {number}")
    if not workload.trains_all and disk.random() < 0.7:
        machine = machine.with_disk(10 ** disk.uniform(8.5, 11))
    if rng.random() < 0.3:  # one resource so slow that it dominates the step, so that rarely active bounds become active
        machine = faster(machine, {rng.choice(STARVED): 10 ** rng.uniform(-2.5, -1)})
    profile = with_any_memory(machine, PLENTY_BYTES, PLENTY_BYTES)
    sampled = Cell(number, model, workload, semantics, profile, often)
    if rng.random() < 0.6:  # memory of a sampled policy, or somewhat more
        needs = sampled.needs(sample_policy(rng, sampled))
        roomy = rng.choice((1.0, 1.0, 1.05, 1.3, 2.0))
        host_bytes = int(needs.host_peak_bytes * rng.choice((1.0, 1.2, 2.0)))
        profile = with_any_memory(machine, int(needs.device_peak_bytes * roomy), host_bytes)
    return replace(sampled, profile=profile)


def measured_cell(number: int) -> Cell:
    """Sample the case of this number, with measured ratios for most kinds of op and classes of blocks."""
    case, rng = cell(number), random.Random(f"ratios of cell {number}")
    groups = [(kind, blocks[0]) for kind in Kind for blocks in case.workload.classes if rng.random() < 0.8]
    ratios = [OpRatio(kind=str(kind), block=b, ratio=10 ** rng.uniform(-1, 1), n_samples=9) for kind, b in groups]
    return replace(case, profile=case.profile.model_copy(update={"op_ratios": tuple(ratios)}))


def _semantics(rng: random.Random, n_micro_batches: int) -> Semantics:
    micro_batch = rng.choice((1, 1, 2, 8))
    dtypes = rng.choice((("bf16", "bf16", "fp32"), ("bf16", "bf16", "fp32"), ("bf16", "bf16", "bf16"), ("fp32", "fp32", "fp32")))
    n_missing = rng.randrange(micro_batch) if rng.random() < 0.5 else 0  # in the last micro-batch
    return Semantics(
        seq_len=rng.choice((16, 128, 512, 1024, 4096)),
        batch_size=micro_batch * n_micro_batches - n_missing,
        micro_batch=micro_batch,
        compute_dtype=dtypes[0],
        gradient_dtype=dtypes[1],
        master_dtype=dtypes[2],
        clip_norm=rng.choice((1.0, 1.0, None)),
    )


def _in_sum_groups(semantics: Semantics, rng: random.Random) -> Semantics:
    """Sample the number of sum groups: one in half of the cases, the maximum, or a random power of two."""
    limit = semantics.n_micro_batches & -semantics.n_micro_batches
    return replace(semantics, sum_groups=rng.choice((1, 1, limit, 1 << rng.randrange(limit.bit_length()))))


def _in_ranks(semantics: Semantics, workload: Workload, rng: random.Random) -> Semantics:
    """Sample the number of ranks: more than one in a quarter of the cases without a smaller last micro-batch."""
    return semantics if semantics.n_left or rng.random() < 0.75 else replace(semantics, ranks=rng.choice((2, 4, 8, 64)))


def _trained_in_part(semantics: Semantics, model: Model, rng: random.Random) -> tuple[Semantics, Workload] | None:
    """Freeze parameters in a third of the cases with real models: train adapters, names or layers; the base may be packed."""
    if rng.random() < 0.66 or (semantics.compute_dtype, semantics.master_dtype) == ("bf16", "bf16"):
        return None
    last = model.config["num_hidden_layers"] - 1
    lora = ("lora", "lora:r=64", "lora:targets=q_proj")
    train = rng.choice((*lora, "names:*norm*", f"layers:{rng.randint(0, last)}-{last}", "layers:0"))
    base = rng.choice(("bf16", "nf4", "int8", "fp8")) if train.startswith("lora") else "bf16"
    gradient_dtype = rng.choice((semantics.gradient_dtype, "fp32"))
    semantics = replace(semantics, train=parse_train(train), base=base, gradient_dtype=gradient_dtype)
    return semantics, build_workload(model, semantics)


def _multiplies_in_fp8(semantics: Semantics, machine: Profile, rng: random.Random) -> bool:
    """Sample FP8 products of bf16 weights: in a third of the cases with real models that allow them."""
    can = machine.device.fp8_rate_fraction is not None and semantics.train.lora is None and semantics.compute_dtype == "bf16"
    return can and rng.random() < 0.33


def _with_peers(machine: Profile, rng: random.Random) -> Profile:
    """Sample links between devices: any rate, through the host, or unknown; with or without a second host."""
    if rng.random() < 0.3:
        return machine
    quantity = {"value": 10 ** rng.uniform(8, 12), "spread_fraction": 0.1, "source": next(iter(machine.sources))}
    latency = {**quantity, "value": 10 ** rng.uniform(-6, -3)}
    law = {"latency_s": latency, "bytes_per_s": quantity, "growth": rng.uniform(0, 2), "fill_s": 10 ** rng.uniform(-6, -3)}
    law |= {"fill_bytes": 10 ** rng.uniform(5, 8), "fill_growth": rng.uniform(0, 1), "crowding": rng.uniform(0, 1)}
    collectives = dict.fromkeys(get_args(Collective), law | {"here": rng.uniform(0, 2)})
    peers = {"n_devices": 8, "latency_s": latency, "collectives": collectives, "through_host": rng.random() < 0.3}
    network = {"bytes_per_s": {**quantity, "value": 10 ** rng.uniform(8, 11)}, "latency_s": latency, "n_hosts": 2}
    return Profile.from_json(machine.to_json() | {"peers": peers, "network": network if rng.random() < 0.4 else None})


@cache
def _read(name: str) -> dict[str, Any]:
    return read_model(name).config


def _real(rng: random.Random, semantics: Semantics, n_layers: int) -> tuple[Model, Workload]:
    """Return a shipped configuration with fewer layers, in 30 % of cases with another vocabulary."""
    config = _read(rng.choice(MODELS)) | {"num_hidden_layers": n_layers}
    config.pop("layer_types", None)
    if rng.random() < 0.3:
        config |= {"vocab_size": rng.choice((256, 8192, 400_000))}
    model = Model(config, name="shortened")
    return model, build_workload(model, semantics)


def sample_workload(rng: random.Random, semantics: Semantics, n_layers: int) -> Workload:
    """Sample blocks of any proportions: narrow or wide, tied or not, equal or not, with many weights for few products."""
    seed = rng.random()
    sizes = [semantics.micro_batch, *([semantics.n_left] if semantics.n_left else [])]
    blocks = [_sample_blocks(random.Random(seed), replace(semantics, batch_size=n, micro_batch=n), n_layers) for n in sizes]
    return Workload(blocks[0], smaller=blocks[1] if semantics.n_left else ())


def _sample_blocks(rng: random.Random, semantics: Semantics, n_layers: int) -> tuple[Block, ...]:
    tokens, width, vocab = semantics.tokens_per_micro_batch, rng.choice((64, 256, 1024, 4096)), rng.choice((256, 32768, 200_000))
    boundary = tokens * width * 2
    are_equal = rng.random() < 0.7
    layers: list[Block] = []
    for i in range(n_layers):
        inner, n_experts = rng.choice((64, 256, 1024, 4096)), rng.choice((1, 1, 1, 8))
        block = Block(
            f"layer {i}",
            BlockKind.LAYER,
            tuple(Parameter(f"{i}.{e}.{way}", (inner, width)) for e in range(n_experts) for way in ("in", "out")),
            (Matmul(tokens, width, inner), Matmul(tokens, inner, width)),
            attention=rng.choice((None, Attention(semantics.micro_batch, 4, 64, semantics.seq_len))),
            pointwise_bytes=boundary * rng.randint(1, 20),
            n_kernels=rng.randint(1, 20),
            boundary_bytes=boundary,
            kept_bytes=boundary * 3,
            transient_bytes=boundary * 6,
            tiers=(
                Tier(Saved.INPUT, 0, boundary * 6, 1, True, boundary, 1),
                Tier(Saved.ATTENTION, boundary, boundary * 6, 1, False, boundary, 1),
                Tier(Saved.PRODUCTS, boundary * 2, boundary * 6, 0, False, boundary, 1),
            ),
        )
        if are_equal and layers:
            named = tuple(replace(p, name=p.name.replace("0.", f"{i}.", 1)) for p in layers[0].parameters)
            block = replace(layers[0], name=f"layer {i}", parameters=named)
        layers.append(block)
    tied = "table" if rng.random() < 0.5 else None
    table = Parameter("table", (vocab, width))
    # Saved activations: factor on their size, number of tensors, and the fraction that is copied into the slot.
    times, n_saved, copied = rng.choice((1, 1, 4, 20)), rng.choice((0, 1, 3, 50)), rng.choice((0.0, rng.random(), 1.0))
    layers = [replace(block, tiers=tuple(_more_saved(tier, times, n_saved, copied) for tier in block.tiers)) for block in layers]
    embedding = Block("embedding", BlockKind.EMBEDDING, (table,), pointwise_bytes=boundary, n_kernels=1, boundary_bytes=boundary)
    head = (Parameter("norm", (width,)), Parameter("head", (vocab, width), tied))
    return embedding, *layers, Block("head", BlockKind.HEAD, head, (Matmul(tokens, width, vocab),), n_kernels=5)


def _more_saved(tier: Tier, times: int, n_saved: int, copied: float) -> Tier:
    if tier.saved is Saved.INPUT:
        return tier
    saved_bytes = tier.saved_bytes * times
    return replace(tier, saved_bytes=saved_bytes, n_saved=n_saved, copied_bytes=int(saved_bytes * copied))


def sample_policy(rng: random.Random, case: Cell) -> Policy:
    """Sample any legal policy, from one with smallest memory to one with all knobs set."""
    s, workload = case.semantics, case.workload
    limit, n_layers = case.largest_group, workload.n_layers
    policy = Policy(
        prefetch_depth=rng.choice((1, 1, 2, 3, n_layers + 1)),
        gradient_slots=rng.choice((1, 2, 3, 5, 8)),
        accumulation_group=max(s.least_group, rng.choice((1, 1, limit, rng.randint(1, limit), rng.randint(1, limit)))),
        update=rng.choice([u for u in Update if u is not Update.EAGER or eager_is_legal(s)]),
        boundary_stride=rng.choice((1, 1, 1, 1, 2, 4)),
    )
    policy = replace(policy, boundary_stride=min(policy.boundary_stride, n_layers))
    for _ in range(rng.choice((0, 1, 3, 6))):
        policy = neighbour(rng, case, policy)
    return policy


def neighbour(rng: random.Random, case: Cell, policy: Policy) -> Policy:
    """Sample a legal policy that differs in one knob."""
    changes = list(_changes(case, policy))
    while True:
        changed = rng.choice(changes)(rng)
        try:
            refuse_illegal(case.workload, case.semantics, changed)
        except PlanError:
            continue
        if changed.update is not Update.DEFERRED and changed.speculate_blocks:
            continue
        streams = {*range(1, case.workload.n_layers + 1)}.difference(changed.resident_blocks)
        return changed if streams else replace(changed, prefetch_depth=1)  # no load waits for a slot


def _changes(case: Cell, policy: Policy) -> Iterator[Any]:
    """Yield functions that map a random generator to a changed policy, legal or not."""
    s, workload = case.semantics, case.workload
    n, limit, n_layers = s.n_micro_batches, case.largest_group, workload.n_layers
    layers, everything = range(1, n_layers + 1), range(n_layers + 2)
    is_summed_anyway = {*policy.device_blocks}.intersection(workload.mixed)
    trained = tuple(b for b in everything if workload.blocks[b].trained and b not in is_summed_anyway)

    def group(rng: random.Random) -> Policy:
        half, double = max(1, policy.accumulation_group // 2), min(limit, policy.accumulation_group * 2)
        size = rng.choice((1, limit, half, double, rng.randint(1, limit)))
        reset: dict[str, Any] = {"square_on_device": False, "device_blocks": ()} if workload.trains_all else {}
        if size == n:
            return replace(policy, accumulation_group=n, sum_blocks=())
        if policy.sum_blocks and policy.accumulation_group < n:
            return replace(policy, accumulation_group=size)
        summed = rng.choice((trained, ()))
        return replace(policy, accumulation_group=size, sum_blocks=summed, **({} if summed else reset))

    def update(rng: random.Random) -> Policy:
        update_kind = rng.choice(list(Update)) if eager_is_legal(s) else Update.DEFERRED
        device_blocks = policy.device_blocks if update_kind is Update.DEFERRED else ()
        return replace(policy, update=update_kind, speculate_blocks=(), device_blocks=device_blocks)

    def stay(rng: random.Random) -> Policy:
        plan = frame(case.model, workload, s, policy)
        may = places_to_stay(plan, case.profile)
        blocks = rng.choice(((), may, {*policy.device_blocks} ^ {rng.choice(may or [0])}))
        return staying(plan, policy, blocks if may else ())

    def summing(rng: random.Random) -> Policy:
        of_vocabulary = tuple(b for b in vocabulary(workload) if b in trained)
        part = tuple(b for b in trained if b in (*of_vocabulary, *policy.device_blocks) or rng.random() < 0.5)
        if policy.accumulation_group == n:
            return replace(policy, sum_blocks=rng.choice((of_vocabulary, ())))
        return replace(policy, sum_blocks=rng.choice((trained, part, of_vocabulary, ())))

    def saving(rng: random.Random) -> Policy:
        block, way = rng.choice(layers), rng.choice(WAYS)
        every = layers if rng.random() < 0.5 else [block]
        changed = with_ways(policy, dict.fromkeys(every, way))
        return replace(changed, spill_blocks=tuple(b for b in policy.spill_blocks if changed.saved(b + 1) is not Saved.ALL))

    def toggled(name: str, blocks: range) -> Any:
        def change(rng: random.Random) -> Policy:
            every = rng.choice(((), tuple(blocks), None, None))
            chosen = tuple(sorted({*getattr(policy, name)} ^ {rng.choice(blocks)})) if every is None else every
            return replace(policy, **{name: chosen})  # type: ignore[arg-type]

        return change

    def buffers(rng: random.Random) -> Policy:
        name = rng.choice(("prefetch_depth", "gradient_slots", "saved_slots"))
        least = LEAST_SAVED_SLOTS if name == "saved_slots" else 1
        return replace(policy, **{name: max(least, getattr(policy, name) + rng.choice((-1, 1)))})  # type: ignore[arg-type]

    def elsewhere(rng: random.Random) -> Policy:
        blocks = rng.choice(mixed_options(s, workload))
        return replace(policy, device_blocks=blocks)

    yield from (group, update, saving, saving, buffers, buffers, summing, summing)
    if not workload.trains_all:
        yield from (elsewhere, elsewhere)
    yield toggled("spill_blocks", range(n_layers))
    yield toggled("resident_blocks", everything)
    if case.profile.disk is not None:
        yield toggled("disk_blocks", layers)
    if (policy.accumulation_group == n or policy.sum_blocks) and s.ranks == 1:
        yield lambda rng: replace(policy, square_on_device=not policy.square_on_device)
        yield from (stay, stay)
    if policy.update is Update.DEFERRED and case.clipped_fraction is not None:
        yield toggled("speculate_blocks", everything)


def held(case: Cell, policy: Policy, relaxation: Relaxation | None = None) -> list[Held]:
    """Return every bound that applies to this policy with its step; empty if the step has no steady state."""
    plan, cost = frame(case.model, case.workload, case.semantics, policy), CostModel(case.profile)
    step_s, mean_s = case.step_s(policy), case.mean_step_s(policy)
    if step_s is None or mean_s is None:
        return []
    bounds = [*policy_bounds(plan, WorkCache(cost)), machine_bound(plan, cost)]
    bounds_held = [Held(bound.name, bound.seconds, step_s, policy) for bound in bounds]
    there_s = case.busy_s(policy)
    bounds_held += [Held(f"ops on {lane}", counted_s, there_s[lane], policy) for lane, counted_s in busy_s(plan, cost).items()]
    if relaxation is not None:
        family = family_of(policy, case.semantics, case.workload)
        one_size = replace(family, accumulation_group=policy.accumulation_group, largest_group=policy.accumulation_group)
        bounds_held.append(Held("any choice", relaxation.least_s(family), mean_s, policy))
        for name, part, slots in (("family", family, ANY_SLOTS), ("buffers", one_size, slots_of(policy))):
            relaxed = relaxation.solve(part, slots)
            # A policy that fits refutes an infeasible relaxation.
            bounds_held.append(Held(name, relaxed.bound_s if relaxed else float("inf"), mean_s, policy))
    return bounds_held


def relaxation_of(case: Cell) -> Relaxation:
    return Relaxation(Evaluator(case.model, case.workload, case.semantics, case.profile, case.clipped_fraction))


def hill_climb(rng: random.Random, case: Cell, start: Policy, n_tries: int) -> tuple[Policy, float]:
    """Hill-climb: return the fastest of n policies, each a neighbour of the fastest so far, and its mean step."""
    best, best_s = start, case.mean_step_s(start) or float("inf")
    for _ in range(n_tries):
        tried = neighbour(rng, case, best)
        if case.needs(tried).fits:
            step_s = case.mean_step_s(tried)
            if step_s is not None and step_s < best_s:
                best, best_s = tried, step_s
    return best, best_s


def with_state_on_device(rng: random.Random, case: Cell, n: int) -> Iterator[Policy]:
    """Yield those of n sampled policies with training state on the device that fit the memory."""
    one_group = Policy(accumulation_group=case.semantics.n_micro_batches, update=Update.DEFERRED)
    plan = frame(case.model, case.workload, case.semantics, one_group)
    may = places_to_stay(plan, case.profile)
    for _ in range(n if may and one_group.accumulation_group <= case.largest_group else 0):
        policy = one_group
        for _ in range(rng.choice((0, 2, 5))):
            policy = neighbour(rng, case, policy)
        if policy.accumulation_group != one_group.accumulation_group or policy.update is not Update.DEFERRED:
            continue
        chosen = [b for b in may if rng.random() < 0.5]
        policy = staying(plan, policy, rng.choice((may, chosen, may[1:-1], [rng.choice(may)])))
        if rng.random() < 0.5:
            policy = replace(policy, square_on_device=True)
        with suppress(PlanError):
            refuse_illegal(case.workload, case.semantics, policy)
            if case.needs(policy).fits:
                yield policy


def start_of(rng: random.Random, case: Cell, n_tries: int = 30) -> Policy | None:
    """Return a policy that fits: a sampled one, else one with smallest memory; None if none fits."""
    sampled = (sample_policy(rng, case) for _ in range(n_tries))
    smallest = (plan.policy for plan, _ in smallest_plans(case.model, case.workload, case.semantics, case.profile))
    return next((policy for policy in chain(sampled, smallest) if case.needs(policy).fits), None)
