"""Schedules of published systems that shard a model over GPUs.

Two systems that shard training state over GPUs and gather each layer's weights for each forward and backward of a micro-batch. As
in `benchmarks/published/systems.py`, the tasks of their streams are listed and simulation finds the overlap. Compute and copy costs
are those of the ledger, exchange costs those of the planner (`planner/predict/cost.py`). Each GPU has an equal share of its host.

- `fsdp`: PyTorch's FullyShardedDataParallel, a unit per layer, vocabulary weights in the root. Prefetch of one unit, a limit of
  two gathered, one communicator for gathers and reduce-scatters, gradients exchanged with the last micro-batch alone (`no_sync`).
  `fsdp-offload`: fp32 shards are uploaded and rounded on the GPU; fp32 gradients are offloaded to pinned memory that is kept.
- `zero3-offload`: DeepSpeed's stage 3 with parameters and optimizer in host memory. 16-bit shards are uploaded. Gradients are
  exchanged with every micro-batch, offloaded to pageable memory, and uploaded again for accumulation (`stage3.py`).
"""

from dataclasses import dataclass

from benchmarks.published.system_costs import BF16, FP32, Software, SystemCosts
from benchmarks.published.system_memory import LOGIT_COPIES_BYTES, ZERO3_LIVE_ELEMENTS, n_tables, table_bytes
from benchmarks.published.system_pipeline import Program, ends_s
from benchmarks.published.systems import ZERO3_UPDATE_BYTES
from penstock.hwprofiles.device_parts import shared_by
from penstock.hwprofiles.schema import Profile
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.optimizer import Optimizer
from penstock.runtime.plan.workload import Block

SYSTEMS = ("fsdp", "fsdp-offload", "zero3-offload")
N_GATHERED = 2  # layers with whole weights at a time: FSDP's limit
# Traffic per parameter of torch.optim.Adam without a fused kernel, fp32, counted pass by pass: moments 12 + 8 + 12, square root and
# quotient 8 + 8, epsilon 8, step 16. This is the default on a CPU, like `foreach` on GPUs.
TORCH_ADAM_BYTES = 72
TORCH_ADAM_NEW_BYTES = 8  # written to two new tensors per parameter: page faults


@dataclass(frozen=True, slots=True)
class Sharded:
    """A run on several GPUs: sequences per GPU and step, and at a time."""

    system: str
    machine: str
    model: str
    gpus: int
    batch: int
    micro_batch: int
    seq: int

    @property
    def tokens_per_step(self) -> int:
        return self.gpus * self.batch * self.seq


@dataclass(frozen=True, slots=True)
class Shown:
    """Seconds per step, and peak bytes of one GPU."""

    step_s: float
    device_peak_bytes: int


def predict(run: Sharded, machine: Profile) -> Shown:
    """Predict the run on a machine shared equally by its GPUs."""
    share = shared_by(machine, run.gpus)
    semantics = Semantics(run.seq, run.micro_batch, run.micro_batch)
    c = SystemCosts(share, Software(), build_workload(read_model(run.model), semantics), semantics)
    n = -(-run.batch // run.micro_batch)
    first, last = (_micro_batch_s(run, c, is_first=k == 0, is_last=k == n - 1) for k in (0, n - 1))
    between_s = _micro_batch_s(run, c, is_first=False, is_last=False) if n > 2 else 0.0
    micro_batches_s = last + (first if n > 1 else 0.0) + max(0, n - 2) * between_s
    return Shown(micro_batches_s + _updating_s(run, c, machine), _device_bytes(run, c, n))


def _micro_batch_s(run: Sharded, c: SystemCosts, is_first: bool, is_last: bool) -> float:
    """Return seconds of a micro-batch that starts at the end of the previous one."""
    p, cost, ranks = Program(), CostModel(c.profile), run.gpus
    zero3, computed = run.system == "zero3-offload", list[int]()

    def gather(n_params: int) -> int:
        previous = computed[-N_GATHERED] if len(computed) >= N_GATHERED else None
        up_bytes = n_params // ranks * (BF16 if zero3 else FP32)
        up = None if run.system == "fsdp" else p.add("h2d", c.copy("h2d", up_bytes), previous)
        return p.add("net", cost.collective(ranks, n_params * BF16, "all_gather"), up, previous)

    def scatter(n_params: int, dependency: int) -> None:
        if not zero3 and not is_last:
            return
        scattered = p.add("net", cost.collective(ranks, n_params * BF16, "reduce_scatter"), dependency)
        if run.system == "fsdp-offload":
            p.add("d2h", c.copy("d2h", n_params // ranks * FP32), scattered)
        elif zero3:  # blocking copies of pageable memory delay later kernels
            n_bytes = n_params // ranks * BF16
            sum_up = None if is_first else p.add("gpu", c.pageable("h2d", n_bytes), scattered)
            p.add("gpu", c.pageable("d2h", n_bytes), sum_up, scattered)

    def backward(layer: Block, ready: int) -> int:
        p.add("gpu", c.forward(layer), ready)
        return p.add("gpu", c.backward(layer))

    vocabulary = n_tables(c) * table_bytes(c) // BF16
    root = gather(vocabulary)
    for layer in c.layers:
        computed.append(p.add("gpu", c.forward(layer), gather(layer.n_params), root))
    computed.append(p.add("gpu", c.loss()))
    for layer in reversed(c.layers):
        computed.append(backward(layer, gather(layer.n_params)))
        scatter(layer.n_params, computed[-1])
    scatter(vocabulary, p.add("gpu", c.embedding_backward()))
    return max(ends_s(p.tasks, c.region))


def _updating_s(run: Sharded, c: SystemCosts, machine: Profile) -> float:
    """Return seconds of Adam over a GPU's shard, after the last gradient."""
    n, dram = c.workload.n_params // run.gpus, c.profile.host.dram_bytes_per_s.value

    def on_host(bytes_per_param: int) -> float:
        return max(c.update(n, bytes_per_param).uncontended_s, n * bytes_per_param / dram)

    match run.system:
        case "fsdp":
            return n * TORCH_ADAM_BYTES / c.profile.device.memory_bytes_per_s.value
        case "fsdp-offload":  # the page-fault rate of the profile is per thread, and each rank has threads
            return on_host(TORCH_ADAM_BYTES) + n * TORCH_ADAM_NEW_BYTES / machine.host.page_fault_bytes_per_s.value
        case "zero3-offload":
            return on_host(ZERO3_UPDATE_BYTES) + c.norm_s(n * FP32)
        case _:
            raise AssertionError(f"no system {run.system!r}")


def _device_bytes(run: Sharded, c: SystemCosts, n_micro_batches: int) -> int:
    """Return peak bytes: state, whole weights, layer inputs, and the larger of logits and the last layer's backward with
    recompute."""
    n_params, vocabulary = c.workload.n_params, n_tables(c) * table_bytes(c)
    logits = c.n_tokens * c.vocab * LOGIT_COPIES_BYTES
    backward = max(layer.transient_bytes for layer in c.layers)
    held = len(c.layers) * c.boundary_bytes + round(c.profile.device.context_bytes.value)
    if run.system == "zero3-offload":
        return held + min(ZERO3_LIVE_ELEMENTS, n_params) * BF16 + max(logits, vocabulary + backward)
    held += vocabulary + N_GATHERED * max(layer.n_params for layer in c.layers) * BF16
    if n_micro_batches > 1:  # gradients not exchanged yet are whole
        held += n_params * BF16
    if run.system == "fsdp":
        held += n_params // run.gpus * (FP32 + Optimizer.ADAMW.moment_bytes)
        backward += n_params // run.gpus * FP32
    return held + max(logits, vocabulary + backward)
