"""Hypothesis strategies of legal workloads, semantics, policies and plans (tests need no `assume`), and small fixed ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.lower import lower
from penstock.planner.predict.cost import costs, region_of
from penstock.planner.predict.simulate import Prediction, simulate
from penstock.planner.search.policies import Way, with_ways
from penstock.runtime.plan import Plan, Policy, Semantics, Update
from penstock.runtime.plan.legality import can_read, can_stay, joins_tied, vocabulary
from penstock.runtime.plan.optimizer import Optimizer
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import ITEM_BYTES, Attention, Block, BlockKind, Matmul, Model, Parameter, Saved, Tier, Workload

EVERYTHING = Train()
MODEL = Model({"model_type": "synthetic"}, name="synthetic")


def _q(value: float) -> dict[str, Any]:
    return {"value": value, "spread_fraction": 0.1, "source": "made_up"}


def _rates(*values: float) -> list[dict[str, Any]]:
    return [{"n_bytes": n, "rate": _q(v)} for n, v in zip((10**3, 10**8), values, strict=True)]


PROFILE: dict[str, Any] = {
    "format_version": 2,
    "name": "made-up",
    "summary": "a machine for tests, with memory for anything",
    "sources": {"made_up": {"kind": "assumed", "detail": "round numbers", "date": None, "device": None, "driver": None}},
    "device": {
        "name": "made up",
        "kind": "cuda",
        "memory_bytes": _q(1e12),
        "context_bytes": _q(1e3),
        "memory_bytes_per_s": _q(1e12),
        "kernel_overhead_s": _q(1e-6),
        "op_overhead_s": _q(1e-5),
        "compute_threads": None,
        "fp8_rate_fraction": _q(1.5),
        "matmul": {dtype: [{"m": 64, "k": 64, "n": 64, "flop_per_s": _q(1e12)}] for dtype in ITEM_BYTES},
        "attention": {
            "flash": {
                dtype: [{"seq_len": 64, "head_dim": 64, "forward_flop_per_s": _q(1e12), "backward_flop_per_s": _q(1e12)}]
                for dtype in ITEM_BYTES
            }
        },
    },
    "link": {
        **{
            way: {"latency_s": _q(1e-5), "bytes_per_s": _rates(1e8, 1e10), "pageable_bytes_per_s": _q(1e8)}
            for way in ("h2d", "d2h")
        },
        "duplex_bytes_per_s": _q(1.5e10),
        "host_cores_per_copy": {"value": 0.0, "spread_fraction": 0.0, "source": "made_up"},
        "dram_bytes_per_byte": 1.0,
    },
    "host": {
        "memory_bytes": _q(1e12),
        "runtime_bytes": _q(1e3),
        "n_cores": 4,
        "dram_bytes_per_s": _q(1e11),
        "optimizer": [{"threads": 4, "params_per_s": _q(1e9), "params_per_s_under_copies": _q(5e8)}],
        "reduce_bytes_per_s": _q(1e10),
        "page_fault_bytes_per_s": _q(1e9),
    },
    "disk": {"read_bytes_per_s": _q(1e9)},
    "price": {"usd_per_hour": None, "ram_usd_per_gb": None, "date": None},
}


MADE_UP = Profile.from_json(PROFILE)


def predicted(plan: Plan, profile: Profile = MADE_UP, max_steps: int = 32) -> Prediction:
    return simulate(plan, costs(plan, profile), region_of(profile), max_steps)


@st.composite
def semantics(draw: st.DrawFn, max_micro_batches: int = 4) -> Semantics:
    """Sample micro-batches with or without a smaller last one, sum groups, ranks, dtypes, optimizer, clipping."""
    together = [(c, g, m) for c in ITEM_BYTES for g in ITEM_BYTES for m in ITEM_BYTES if (c, m) != ("fp32", "bf16")]
    seq_len, micro_batch, n = draw(st.integers(1, 64)), draw(st.integers(1, 3)), draw(st.integers(1, max_micro_batches))
    n_missing, (compute_dtype, gradient_dtype, master_dtype) = draw(st.integers(0, 2)), draw(st.sampled_from(together))
    clip_norm, on_nonfinite = draw(st.sampled_from([None, 1.0])), draw(st.sampled_from(["stop", "skip"]))
    most_groups, ranks = draw(st.sampled_from([1, 1, 2, 4, 8])), draw(st.sampled_from([1, 1, 1, 1, 2, 4]))
    return Semantics(
        ranks=ranks,
        sum_groups=min(most_groups, n & -n),
        seq_len=seq_len,
        micro_batch=micro_batch,
        batch_size=micro_batch * n - (n_missing % micro_batch if n > 1 and ranks == 1 else 0),
        compute_dtype=compute_dtype,
        gradient_dtype=gradient_dtype,
        master_dtype=master_dtype,
        weight_rounding=draw(st.sampled_from(["half_up", "stochastic"])) if master_dtype == "bf16" else "half_up",
        optimizer=draw(st.sampled_from([Optimizer.ADAMW, *Optimizer])),
        clip_norm=clip_norm,
        on_nonfinite=on_nonfinite,
    )


# Values of `train` with at least one trained parameter in every workload
_MLP = ("up_proj", "down_proj")
ADAPTED = tuple(Train(lora=Lora(rank=n, targets=targets)) for n, targets in ((8, _MLP), (16, _MLP), (3, ("up_proj",))))
PARTS = (
    Train(names=("*norm.weight",)),
    Train(names=("norm.weight", "*.down_proj.weight")),
    Train(names=("embed.weight", "*.0.mlp.up_proj.weight")),
    Train(names=("*.0.*", "*.norm.weight", "norm.weight")),  # some blocks completely, others partially
    Train(layers=(0, 0)),
    Train(layers=(0, 1)),
    Train(layers=(1, 1)),
)


@st.composite
def frozen(draw: st.DrawFn, all_trained: Semantics) -> Semantics:
    """Sample frozen parameters for these semantics, packed or not."""
    train = draw(st.sampled_from(ADAPTED) | st.sampled_from(PARTS))
    base = draw(st.sampled_from(["bf16", "nf4", "nf4", "int8", "fp8", "fp8-rows"]))
    if base == "fp8-rows" and (train.lora is None or all_trained.compute_dtype == "fp32"):
        base = "fp8"
    may_multiply = train.lora is None and base == "bf16" and all_trained.compute_dtype == "bf16"
    products = "fp8" if base == "fp8-rows" or (may_multiply and draw(st.booleans())) else "compute"
    gradient_dtype = draw(st.sampled_from(["fp32", "fp32", all_trained.gradient_dtype]))
    return replace(all_trained, train=train, base=base, gradient_dtype=gradient_dtype, products=products)


def as_trained(blocks: Sequence[Block], train: Train) -> tuple[Block, ...]:
    """Return the blocks with only `train` trained, with adapters added to matrices of layers."""

    def changed(block: Block) -> Block:
        parameters = [replace(p, frozen=not train.trains(p.tied_to or p.name)) for p in block.parameters]
        for p in block.parameters:
            name = p.name.removesuffix(".weight")
            if train.lora is not None and len(p.shape) == 2 and name.endswith("_proj") and train.lora.adapts(name):
                (n_out, n_in), rank = p.shape, train.lora.rank
                parameters.append(Parameter(f"{name}.lora_A.weight", (rank, n_in)))
                parameters.append(Parameter(f"{name}.lora_B.weight", (n_out, rank)))
        matrices = [p.frozen for p in parameters[: len(block.parameters)] if len(p.shape) == 2]
        matmuls = tuple(replace(m, frozen=all(matrices)) for m in block.matmuls)
        return replace(block, parameters=tuple(parameters), matmuls=matmuls)

    return tuple(map(changed, blocks))


@st.composite
def tiers(draw: st.DrawFn) -> tuple[Tier, ...]:
    """Sample recomputation tiers: all, none (recompute the whole forward), or a subset."""
    ways = [Saved.INPUT, Saved.ATTENTION, Saved.PRODUCTS]
    chosen = draw(st.sampled_from([ways, ways, []]) | st.lists(st.sampled_from(ways), unique=True))
    return tuple(draw(_tier(saved)) for saved in chosen)


@st.composite
def _tier(draw: st.DrawFn, saved: Saved) -> Tier:
    """Sample a tier. One that saves more than the input has up to nine saved tensors, some of them copied into the slot."""
    saved_bytes = 0 if saved is Saved.INPUT else draw(st.integers(0, 10**5))
    return Tier(
        saved,
        saved_bytes,
        transient_bytes=draw(st.integers(0, 10**6)),
        n_matmuls=0 if saved is Saved.PRODUCTS else draw(st.integers(1, 2)),
        attention=saved is Saved.INPUT,
        pointwise_bytes=draw(st.integers(0, 10**5)),
        n_kernels=draw(st.integers(0, 9)),
        n_saved=0 if saved is Saved.INPUT else draw(st.integers(0, 9)),
        copied_bytes=draw(st.sampled_from([0, saved_bytes]) | st.integers(0, saved_bytes)),
    )


@st.composite
def workloads(draw: st.DrawFn, semantics: Semantics, max_layers: int = 5) -> Workload:
    """Sample an embedding, one to `max_layers` layers of different sizes, and a head, tied or not."""
    tokens, item = semantics.tokens_per_micro_batch, ITEM_BYTES[semantics.compute_dtype]
    widths = st.sampled_from([8, 16]) | st.integers(1, 32) if semantics.base == "bf16" else st.sampled_from([16, 64])
    width, vocabulary = draw(widths), draw(st.integers(2, 64))
    boundary_bytes = tokens * width * item
    embed = (Parameter("embed.weight", (vocabulary, width)),)
    sizes = {"pointwise_bytes": 2 * boundary_bytes, "boundary_bytes": boundary_bytes, "transient_bytes": 4 * vocabulary * width}
    embedding = Block("embedding", BlockKind.EMBEDDING, embed, n_kernels=1, **sizes)
    layers = []
    for i in range(draw(st.integers(1 if semantics.train.layers is None else semantics.train.layers[1] + 1, max_layers))):
        inner = draw(st.integers(1, 64))
        shapes: dict[str, tuple[int, ...]] = {"mlp.up_proj": (inner, width), "norm": (width,), "mlp.down_proj": (width, inner)}
        parameters = [Parameter(f"model.layers.{i}.{name}.weight", shape) for name, shape in shapes.items()]
        layers.append(
            Block(
                f"layer {i}",
                BlockKind.LAYER,
                tuple(parameters[: draw(st.integers(1, 3))]),
                matmuls=(Matmul(tokens, width, inner), Matmul(tokens, inner, width)),
                attention=draw(st.sampled_from([None, Attention(semantics.micro_batch, 2, 8, semantics.seq_len)])),
                pointwise_bytes=draw(st.integers(0, 10**6)),
                n_kernels=draw(st.integers(1, 20)),
                boundary_bytes=boundary_bytes,
                kept_bytes=draw(st.integers(0, 10**6)),
                transient_bytes=draw(st.integers(0, 10**6)),
                tile_sum_bytes=draw(st.sampled_from([0, 10**5])),
                tiers=draw(tiers()),
            )
        )
    head = Block(
        "head",
        BlockKind.HEAD,
        (
            Parameter("norm.weight", (width,)),
            Parameter("lm_head.weight", (vocabulary, width), draw(st.sampled_from([None, "embed.weight"]))),
        ),
        matmuls=(Matmul(tokens, width, vocabulary),),
        n_kernels=4,
        transient_bytes=draw(st.integers(0, 10**6)),
    )
    return with_smaller(as_trained((embedding, *layers, head), semantics.train), semantics)


def with_smaller(blocks: tuple[Block, ...], semantics: Semantics) -> Workload:
    """Return the workload; a smaller last micro-batch has proportional sizes."""
    n, n_left = semantics.micro_batch, semantics.n_left

    def smaller(block: Block) -> Block:
        sizes = ("pointwise_bytes", "fused_bytes", "boundary_bytes", "kept_bytes", "transient_bytes")
        share: dict[str, Any] = {name: getattr(block, name) // n * n_left for name in sizes}
        if block.attention is not None:
            share["attention"] = replace(block.attention, n_sequences=n_left)
        matmuls = tuple(replace(m, m=m.m // n * n_left) for m in block.matmuls)
        return replace(block, matmuls=matmuls, tiers=tuple(map(smaller_tier, block.tiers)), **share)

    def smaller_tier(tier: Tier) -> Tier:
        sizes = ("saved_bytes", "transient_bytes", "pointwise_bytes", "copied_bytes")
        share: dict[str, Any] = {name: getattr(tier, name) // n * n_left for name in sizes}
        return replace(tier, **share)

    return Workload(blocks, tuple(map(smaller, blocks)) if n_left else ())


def small_workload(n_layers: int, tied: bool, saving: bool = False, train: Train = EVERYTHING) -> Workload:
    """Return a fixed workload of layers with different sizes and small weights. `saving`: layers have the tier PRODUCTS."""
    layers = tuple(
        Block(
            f"layer {i}",
            BlockKind.LAYER,
            (Parameter(f"model.layers.{i}.up_proj.weight", (8, 100 + 50 * i)), Parameter(f"model.layers.{i}.norm.weight", (8,))),
            matmuls=(Matmul(4, 8, 100 + 50 * i),),
            n_kernels=2,
            boundary_bytes=64,
            kept_bytes=100 * (i + 1),
            transient_bytes=1000,
            tiers=(Tier(Saved.PRODUCTS, 300 * (i + 1), 900, 0, False, 0, 1, n_saved=2),) if saving else (),
        )
        for i in range(n_layers)
    )
    tied_to = "embed.weight" if tied else None
    head = (Parameter("norm.weight", (8,)), Parameter("lm_head.weight", (40, 8), tied_to))
    blocks = (
        Block("embedding", BlockKind.EMBEDDING, (Parameter("embed.weight", (40, 8)),), boundary_bytes=64),
        *layers,
        Block("head", BlockKind.HEAD, head, matmuls=(Matmul(4, 8, 40),), n_kernels=4, transient_bytes=500),
    )
    return Workload(as_trained(blocks, train))


def _subset(draw: st.DrawFn, blocks: Sequence[int]) -> tuple[int, ...]:
    """Sample no block with probability 1/2, else any subset."""
    return tuple(b for b in blocks if draw(st.booleans())) if draw(st.booleans()) else ()


@st.composite
def _saving(draw: st.DrawFn, workload: Workload) -> dict[str, Any]:
    """Sample the knobs of activations: boundary stride, or boundary offload, saved tiers and their offload."""
    blocks, n, first = workload.blocks, workload.n_layers, workload.first_trained
    if draw(st.integers(0, 2)) == 0:
        return {"boundary_stride": draw(st.integers(1, n))}
    spill = _subset(draw, range(max(first - 1, 0), n))
    save = []
    for b in range(1, n + 1):
        can = [saved for saved in Saved if blocks[b].recompute(saved)] if b >= first else [Saved.INPUT]
        save.append(draw(st.sampled_from([saved for saved in can if saved is not Saved.ALL or b - 1 not in spill])))
    away = tuple(b for b, saved in enumerate(save, start=1) if saved in (Saved.ATTENTION, Saved.PRODUCTS) and draw(st.booleans()))
    policy = with_ways(Policy(), {b: Way(saved, b in away) for b, saved in enumerate(save, start=1)})
    return {"spill_blocks": spill, "offload_blocks": policy.offload_blocks, "save": policy.save}


@st.composite
def policies(draw: st.DrawFn, semantics: Semantics, workload: Workload) -> Policy:
    """Sample a legal combination of knobs; up to n_layers + 1 slots."""
    n, trains_all = workload.n_layers, workload.trains_all
    eager_is_legal = semantics.clip_norm is None and semantics.on_nonfinite == "stop" and trains_all
    updates = list(Update) if eager_is_legal else [Update.BARRIER, Update.DEFERRED]
    update = draw(st.sampled_from(updates))
    gradient_slots = draw(st.integers(1, n + 1))
    saving = draw(_saving(workload))
    may_sum = saving.get("boundary_stride", 1) == 1 and draw(st.booleans())
    group = draw(st.integers(1 if may_sum else semantics.least_group, semantics.n_micro_batches))
    one_group = group == semantics.n_micro_batches
    mixed: tuple[int, ...] = ()
    if not trains_all:
        can_be_apart = semantics.gradient_dtype == "fp32" and {*workload.mixed} <= {*can_stay(workload, semantics)}
        mixed = workload.mixed if can_be_apart and draw(st.integers(0, 3)) else ()
    summed = _summed(draw, semantics, workload, mixed, one_group) if may_sum else ()
    on_device, is_joined = mixed, joins_tied(workload, semantics, Policy(sum_blocks=summed))
    if trains_all and update is Update.DEFERRED:
        may_stay = [b for b in can_stay(workload, semantics) if is_joined or not workload.tied or 0 < b <= n]
        on_device = _subset(draw, [b for b in may_stay if one_group or b in summed])
        if workload.tied and not {*on_device}.isdisjoint(both := vocabulary(workload)):
            on_device = (
                tuple(sorted({*on_device, *both})) if {*both} <= {*may_stay} else tuple(b for b in on_device if b not in both)
            )
    speculating = _subset(draw, range(n + 2)) if update is Update.DEFERRED and trains_all else ()
    resident = _subset(draw, range(n + 2))
    on_disk = _subset(draw, can_read(workload, semantics))
    return Policy(
        disk_blocks=tuple(b for b in on_disk if b not in resident or b in on_device or not workload.blocks[b].trained),
        prefetch_depth=draw(st.integers(1, n + 1)),
        gradient_slots=gradient_slots,
        saved_slots=draw(st.integers(1, 3)),
        square_on_device=(one_group or bool(summed)) and trains_all and semantics.ranks == 1 and draw(st.booleans()),
        device_blocks=on_device,
        accumulation_group=group,
        update=update,
        speculate_blocks=tuple(b for b in speculating if b not in on_device),
        resident_blocks=resident,
        sum_blocks=summed,
        **saving,
    )


def _summed(draw: st.DrawFn, semantics: Semantics, workload: Workload, mixed: Sequence[int], one_group: bool) -> tuple[int, ...]:
    """Sample blocks with sums on the device: the vocabulary's, and any layers."""
    trained = [b for b, block in enumerate(workload.blocks) if block.trained and b not in mixed]
    of_vocabulary = [b for b in vocabulary(workload) if b not in mixed]
    if one_group:
        return tuple(of_vocabulary) if workload.tied and semantics.ranks == 1 and not mixed else ()
    if semantics.ranks > 1:
        return tuple(trained)
    return tuple(sorted({*of_vocabulary, *_subset(draw, trained)}))


@dataclass(frozen=True, slots=True)
class Case:
    semantics: Semantics
    workload: Workload
    policy: Policy

    @property
    def plan(self) -> Plan:
        return lower(MODEL, self.workload, self.semantics, self.policy, PROFILE)


@st.composite
def cases(draw: st.DrawFn, max_layers: int = 5, max_micro_batches: int = 4) -> Case:
    """Sample a legal combination of semantics, workload and policy; one in three has frozen parameters."""
    case_semantics = draw(semantics(max_micro_batches))
    if max_layers > 1 and draw(st.integers(0, 2)) == 2:
        case_semantics = draw(frozen(case_semantics))
    workload = draw(workloads(case_semantics, max_layers))
    return Case(case_semantics, workload, draw(policies(case_semantics, workload)))


def plans(max_layers: int = 5, max_micro_batches: int = 4) -> st.SearchStrategy[Plan]:
    """Sample a plan of a small synthetic model on PROFILE."""
    return cases(max_layers, max_micro_batches).map(lambda case: case.plan)
