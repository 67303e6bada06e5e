"""Hard cells for the adversary: packed bases, mixed layer types, minimal memory, large models on small cards, long steps."""

import random
from dataclasses import replace

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.lower.lower import FEWEST_FOLDED, is_long, lower_ops
from penstock.planner.model.config import shipped_model
from penstock.planner.model.workload import build_workload, supported_attention
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.memory import frame
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.search.policies import smallest_plans
from penstock.runtime.plan import Kind, Op, Policy, Semantics
from penstock.runtime.plan.train import parse_train
from penstock.runtime.plan.workload import Model, Workload
from tests.adversary import MACHINES, PLENTY_BYTES, STARVED, Cell

from .any_memory import with_any_memory

# Models that mix linear or sliding with full attention, experts with dense layers, or layers with and without rotary embeddings
OF_TWO_KINDS = (
    *("qwen3.5-35b-a3b", "qwen3.5-0.8b", "qwen3-next-80b-a3b", "gemma3-1b", "gpt-oss-20b", "glm-4.5-air-106b"),
    *("llama-4-scout-109b", "smollm3-3b", "deepseek-v3-671b"),
)
LARGE = ("qwen2.5-32b", "qwen2.5-72b", "llama-3.1-70b", "mixtral-8x22b", "gpt-oss-120b", "qwen3.5-35b-a3b", "qwen3.5-27b")
SMALL_CARDS = ("rtx3090-desktop", "rtx4090-desktop", "rtx4090-server", "rtx5090-desktop")
HARDLY_MORE = 1.05  # factor on the least memory of any policy, device or host


def hard_cell(number: int) -> Cell:
    """Return the hard cell with this number."""
    rng = random.Random(f"hard cell {number}")
    is_large, is_packed, is_step_long = rng.random() < 0.25, rng.random() < 0.6, rng.random() < 0.35
    model = shipped_model(rng.choice(LARGE if is_large else OF_TWO_KINDS))
    n_layers = model.config["num_hidden_layers"] if is_large else rng.choice((4, 5, 8, 12))
    n = rng.choice((1, 1, 2, 3) if is_large else (1, 2, 3, 5, 8))
    if is_step_long:  # about the least number folded into `repeat`, or far more
        n = -(-FEWEST_FOLDED // (n_layers + 2)) * rng.choice((1, 1, 2, 5)) + rng.choice((0, 0, 1, 7))
    semantics = _semantics(rng, n, model, is_packed)
    workload = build_workload(model, semantics)
    workload = workload if is_large else _cut(rng, workload, n_layers)
    machine = read_profile(rng.choice(SMALL_CARDS if is_large else MACHINES))
    device_bytes = int(machine.device.memory_bytes.value) if is_large else PLENTY_BYTES
    if rng.random() < 0.6:
        machine = faster(machine, {group: 10 ** rng.uniform(-1, 1) for group in Group if group is not Group.DISK})
    if rng.random() < 0.3:
        machine = faster(machine, {rng.choice(STARVED): 10 ** rng.uniform(-2.5, -1)})
    if not workload.trains_all and rng.random() < 0.3:
        machine = machine.with_disk(10 ** rng.uniform(8.5, 11))
    often = rng.choice((None, None, 0.0, 0.3)) if semantics.clip_norm else 0.0
    result = Cell(number, model, workload, semantics, with_any_memory(machine, device_bytes, PLENTY_BYTES), often)
    return replace(result, profile=_with_least(rng, result, device_bytes)) if rng.random() < 0.6 else result


def _cut(rng: random.Random, workload: Workload, n_layers: int) -> Workload:
    """Keep a few layers, in random order, with at least one of each kind."""
    layers = [rng.choice(blocks) for blocks in workload.classes if blocks[0] in range(1, workload.n_layers + 1)]
    unused = [b for b in range(1, workload.n_layers + 1) if b not in layers]
    layers += rng.sample(unused, n_layers - len(layers))
    rng.shuffle(layers)
    blocks = (0, *layers, workload.n_layers + 1)
    return Workload(tuple(workload.blocks[b] for b in blocks), tuple(workload.smaller[b] for b in blocks if workload.smaller))


def _semantics(rng: random.Random, n_micro_batches: int, model: Model, is_packed: bool) -> Semantics:
    micro_batch = rng.choice((1, 1, 2, 4))
    n_missing = rng.randrange(micro_batch) if rng.random() < 0.5 else 0  # in the last micro-batch
    semantics = Semantics(
        seq_len=rng.choice((64, 256, 1024, 4096)),
        batch_size=micro_batch * n_micro_batches - n_missing,
        micro_batch=micro_batch,
        gradient_dtype=rng.choice(("bf16", "fp32")),
        clip_norm=rng.choice((1.0, 1.0, None)),
        attention=supported_attention(model)[0],
    )
    bases = ("nf4", "int8", "fp8", *(("mxfp4",) * 3 if model.config["model_type"] == "gpt_oss" else ()))
    train = rng.choice(("lora", "lora:r=64", "lora:targets=o_proj"))
    return replace(semantics, train=parse_train(train), base=rng.choice(bases)) if is_packed else semantics


def _with_least(rng: random.Random, cell: Cell, device_bytes: int) -> Profile:
    """Return the machine with barely more memory than one of the smallest policies needs."""
    lean = [needs for _, needs in smallest_plans(cell.model, cell.workload, cell.semantics, cell.profile) if needs.fits]
    if not lean:
        return cell.profile
    needs, least = rng.choice(lean), rng.choice(("device", "host", "both"))
    device, host = (int(peak * rng.choice((1.0, 1.005, 1.02, 1.1))) for peak in (needs.device_peak_bytes, needs.host_peak_bytes))
    return with_any_memory(cell.profile, device_bytes if least == "host" else device, PLENTY_BYTES if least == "device" else host)


def kinds_of(cell: Cell) -> list[str]:
    """Return what is hard about a cell."""
    lean = [(plan, needs) for plan, needs in smallest_plans(cell.model, cell.workload, cell.semantics, cell.profile)]
    device_bytes, host_bytes = cell.profile.device.memory_bytes.value, cell.profile.host.memory_bytes.value
    least_device, least_host = (
        min(peaks) for peaks in zip(*((n.device_peak_bytes, n.host_peak_bytes) for _, n in lean), strict=True)
    )
    plan, cost = lean[0][0], CostModel(cell.profile)
    load_s = {cost.demand(plan, Op(Kind.LOAD, b)).uncontended_s for b in range(1, cell.workload.n_layers + 1)}
    weight_bytes = sum(plan.stored_bytes(p) for block in cell.workload.blocks for p in block.parameters)
    kinds = {
        "packed base": cell.semantics.base != "bf16",
        "layers that load unlike": len(load_s) > 1,
        "hardly more than the least memory": device_bytes <= HARDLY_MORE * least_device or host_bytes <= HARDLY_MORE * least_host,
        "weights above the device's memory": weight_bytes > device_bytes,
    }
    return [kind for kind, is_so in kinds.items() if is_so]


def repeats(cell: Cell, policy: Policy) -> bool:
    """True if the policy's plan folds the repetition of a step."""
    plan = frame(cell.model, cell.workload, cell.semantics, policy)
    return is_long(cell.workload, cell.semantics, policy) and lower_ops(plan).repeat is not None
