"""Schedules of published systems.

The schedule of each system with its dtypes, buffers and serial tail, as the tasks of its threads and streams in order of issue;
simulation finds the overlap. Sources are in `docs/accuracy.md`. These schedules are not policies: the plan language has no form for
three uploads, a redundant forward or an extra optimizer barrier, and needs none, because nobody should run them.
"""

from dataclasses import dataclass, replace

from penstock.hwprofiles.schema import Profile
from penstock.planner.model.workload import build_workload, supported_attention
from penstock.planner.predict.compute_time import BACKWARD_MATMULS
from penstock.planner.predict.region import Demand
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.workload import Block, Model

from . import system_memory as memory
from .system_costs import BF16, FP32, Software, SystemCosts
from .system_pipeline import Program, ends_s

SYSTEMS = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload")
VARIANTS = ("full", "no-double-buffer", "checkpoint-every-layer", "no-slab-pool")
CHECKPOINT_INTERVAL = 4  # layers recomputed from one saved boundary
MEGATRAIN_UPDATE_BYTES = 22  # traffic per parameter: bf16 master and fp32 moments read and written, bf16 gradient read
SLIDEFORMER_UPDATE_BYTES = 26  # fp32 master and moments read and written, bf16 gradient read
ZERO3_UPDATE_BYTES = 36  # fp32 gradient read; separate passes convert it from bf16, and the weight to bf16
N_PLUS_BUFFERS = 3
N_SLIDE_SLOTS = 3  # uploads ahead of compute


@dataclass(frozen=True, slots=True)
class Run:
    """A published run: a system on a machine, with a model and a batch."""

    system: str
    machine: str
    model: str
    batch: int
    seq_len: int
    variant: str = "full"
    updates: bool = True  # False: no optimizer step


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a step and of its phases, and peak bytes."""

    step_s: float
    phases_s: dict[str, float]
    device_peak_bytes: int
    host_peak_bytes: int
    n_tokens: int
    claimed_flop: float  # by the formula of MegaTrain's authors


def predict(run: Run, model: Model, profile: Profile, software: Software) -> Outcome:
    """Predict the outcome of a run."""
    attention = supported_attention(model)[0]
    semantics = Semantics(run.seq_len, run.batch, run.batch, attention=attention)  # type: ignore[arg-type]
    workload = build_workload(model, semantics)
    c = SystemCosts(profile, software, workload, semantics)
    if run.system == "slideformer" or (run.system == "zero3-offload" and memory.logits_crowd_the_device(c)):
        c = replace(c, fused=True)
    match run.system:
        case "megatrain" | "megatrain-plus":
            phases, device, host = _megatrain(c, run)
        case "slideformer":
            phases, device, host = _slideformer(c)
        case "zero3-offload":
            phases, device, host = _zero3(c)
        case _:
            raise AssertionError(f"no system {run.system!r}")
    step_s = sum(seconds for name, seconds in phases.items() if name != "gradient_join_s")  # part of backward
    return Outcome(step_s, phases, device, host, c.n_tokens, claimed_flop(c))


def claimed_flop(c: SystemCosts) -> float:
    """Return 6 per parameter and token, embedding table included, plus attention over the whole square, not its causal half."""
    square = sum(
        12 * a.n_sequences * a.n_heads * a.head_dim * a.seq_len**2 for a in (b.attention for b in c.layers) if a is not None
    )
    return 6 * c.workload.n_params * c.n_tokens + square


class MegaTrain:
    """Issues the tasks of one step like MegaTrain's main thread."""

    def __init__(self, c: SystemCosts, run: Run) -> None:
        self.c, self.run = c, run
        self.program = Program()
        # Changes of the fork: backward runs one forward from every layer's saved input, template weights are views of the flat
        # buffer, and three buffers with two gradient threads.
        self.keeps_inputs = self.views = plus = run.system == "megatrain-plus"
        self.n_buffers = N_PLUS_BUFFERS if plus else 2 if self.prefetches else 1
        self.n_slabs = 1 if run.variant == "no-slab-pool" else memory.N_SLABS
        self.n_workers = 2 if plus else 1
        self.uploaded: dict[int, int] = {}  # per flat buffer: its last upload, which reads the pinned buffer
        self.flat_free: dict[int, int] = {}  # last reader of the flat buffer
        self.template_free: dict[int, int] = {}  # last gradient offload from the template
        self.main: int | None = None  # main thread's last task
        self.computed: int | None = None  # device's last task
        self.added: list[int] = []  # tasks of the gradient threads

    def task(self, queue: str, demand: Demand, *dependencies: int | None) -> int:
        turns = self.c.one_pool and queue in ("main", "h2d", "d2h")
        n = self.program.add("gpu" if turns else queue, demand, *dependencies)
        if queue == "main":
            self.main = n
        return n

    def load(self, layer: Block, buffer: int) -> int:
        n_bytes = layer.n_params * BF16
        wait = None if self.prefetches else self.computed
        flat = self.task("main", self.c.flatten(layer), self.uploaded.get(buffer), wait)
        self.uploaded[buffer] = self.task("h2d", self.c.copy("h2d", n_bytes), flat, self.flat_free.get(buffer))
        return self.uploaded[buffer]

    def compute(self, layer: Block, buffer: int, with_backward: bool = False) -> int:
        """Issue a layer's kernels. They wait for weights and the main thread, and end after all calls are issued."""
        start = [self.uploaded[buffer], self.template_free.get(buffer), self.main]
        n_tensors = len(layer.parameters)
        n_calls = (1 + (BACKWARD_MATMULS if with_backward else 0)) * layer.n_kernels
        if not self.views:
            self.flat_free[buffer] = self.task("gpu", self.c.unpack(layer.n_params * BF16, n_tensors), *start)
            n_calls += n_tensors
        self.task("gpu", self.c.forward(layer), *start)
        if with_backward:
            self.task("gpu", self.c.backward(layer))
        issued = self.task("main", self.c.issue(n_calls))
        self.computed = self.task("gpu", Demand(0.0, 0.0), issued)
        if self.views:
            self.flat_free[buffer] = self.computed
        return self.computed

    def collect(self, n_bytes: int, n_tensors: int, slab_of: int | None) -> int:
        """Offload gradients tensor by tensor. A thread accumulates them, which frees their slab."""
        issued = self.task("main", self.c.issue(n_tensors), slab_of)
        offloaded = self.task("d2h", self.c.copy("d2h", n_bytes, n_tensors), self.computed, issued)
        queue = f"worker {len(self.added) % self.n_workers}"
        self.added.append(self.task(queue, self.c.add(n_bytes, first_touch=self.run.updates), offloaded))
        return offloaded

    def forward(self) -> int:
        layers = self.c.layers
        n_ahead = 1 if self.prefetches else 0
        for i in range(-n_ahead, len(layers)):
            if i + n_ahead < len(layers):
                self.load(layers[i + n_ahead], (i + n_ahead) % self.n_buffers)
            if i >= 0:
                self.compute(layers[i], i % self.n_buffers)
        assert self.computed is not None
        return self.computed

    def loss(self) -> None:
        self.computed = self.task("gpu", self.c.loss(), self.computed)
        self.task("main", self.c.issue(1), self.computed)  # reading the loss synchronizes with the device
        if not self.c.workload.tied:
            self.collect(memory.table_bytes(self.c), 1, None)

    def backward(self) -> None:
        layers, interval = self.c.layers, self.interval
        slabs: list[int] = []
        for start in range((len(layers) - 1) // interval * interval, -1, -interval):
            block = range(start, min(start + interval, len(layers)))
            if not self.keeps_inputs:
                for i in block:
                    self.load(layers[i], i % self.n_buffers)
                    self.compute(layers[i], i % self.n_buffers)
            for i in reversed(block):
                layer, buffer = layers[i], i % self.n_buffers
                self.load(layer, buffer)
                self.compute(layer, buffer, with_backward=True)
                slab = slabs[-self.n_slabs] if len(slabs) >= self.n_slabs else None
                self.template_free[buffer] = self.collect(layer.n_params * BF16, len(layer.parameters), slab)
                slabs.append(self.added[-1])

    @property
    def prefetches(self) -> bool:
        return self.run.variant != "no-double-buffer"

    @property
    def interval(self) -> int:
        """Layers between saved boundaries."""
        return 1 if self.keeps_inputs or self.run.variant == "checkpoint-every-layer" else CHECKPOINT_INTERVAL

    def embedding(self) -> int:
        """Issue the embedding's backward. Copying ids from pageable memory makes the main thread wait for all layers."""
        waited = self.task("main", self.c.issue(1), self.computed)
        self.computed = self.task("gpu", self.c.embedding_backward(), waited)
        self.collect(memory.table_bytes(self.c), 1, None)
        return waited

    def phases_s(self) -> dict[str, float]:
        """Return seconds of forward and backward, and of the final part of backward with gradient accumulation only."""
        forward = self.forward()
        self.loss()
        self.backward()
        waited = self.embedding()
        ends = ends_s(self.program.tasks, self.c.region)
        end_s = max(ends)
        return {"forward_s": ends[forward], "backward_s": end_s - ends[forward], "gradient_join_s": end_s - ends[waited]}


def _megatrain(c: SystemCosts, run: Run) -> tuple[dict[str, float], int, int]:
    m = MegaTrain(c, run)
    phases = m.phases_s()
    gradient_bytes = c.workload.n_params * BF16
    if run.updates:
        update = c.update(c.workload.n_params, MEGATRAIN_UPDATE_BYTES)
        phases["clip_s"] = gradient_bytes / c.software.clip_bytes_per_s
        phases["optimizer_s"] = update.uncontended_s
        phases["sync_s"] = c.pageable_s("h2d", memory.n_tables(c) * memory.table_bytes(c))
        phases["zero_and_free_s"] = c.release_s(gradient_bytes)
    else:
        phases["zero_grad_s"] = c.zero_s()
    n_boundaries = memory.n_kept_boundaries(len(c.layers), m.interval)
    n_layer_buffers = m.n_buffers if m.views else 2 * m.n_buffers
    device = memory.megatrain_device_bytes(c, n_boundaries, n_layer_buffers, 0 if m.keeps_inputs else m.interval)
    host = memory.megatrain_host_bytes(c, m.n_slabs + m.n_buffers, run.updates)
    return phases, device, host


def _slideformer(c: SystemCosts) -> tuple[dict[str, float], int, int]:
    """Return phases, device and host bytes: uploads ahead of compute, boundaries in host memory, an optimizer step per layer."""
    p = Program()
    computed: list[int] = []
    table = memory.table_bytes(c) // BF16

    def upload(n_elements: int) -> int:
        return p.add("h2d", c.convert_and_copy(n_elements), computed[-N_SLIDE_SLOTS] if len(computed) >= N_SLIDE_SLOTS else None)

    def update(n_params: int, dependency: int) -> None:
        offloaded = p.add("d2h", c.copy("d2h", n_params * BF16), dependency)
        p.add("optimizer", c.update(n_params, SLIDEFORMER_UPDATE_BYTES), offloaded)

    for layer in c.layers:
        ready = upload(layer.n_params)
        spilled = p.add("gpu", c.forward(layer), ready)
        p.add("d2h", c.copy("d2h", c.boundary_bytes), spilled)
        computed.append(spilled)
    forward = computed[-1]
    computed.append(p.add("gpu", c.loss(), upload(table)))
    update(table, computed[-1])
    for layer in reversed(c.layers):
        ready = upload(layer.n_params)
        fetched = p.add("h2d", c.copy("h2d", c.boundary_bytes), computed[-2])
        p.add("gpu", c.forward(layer, but_last_product=True), ready, fetched)
        computed.append(p.add("gpu", c.backward(layer)))
        update(layer.n_params, computed[-1])
    if not c.workload.tied:
        update(table, p.add("gpu", c.embedding_backward()))
    ends = ends_s(p.tasks, c.region)
    phases = {"forward_s": ends[forward], "backward_s": max(ends) - ends[forward]}
    return phases, memory.slideformer_device_bytes(c, N_SLIDE_SLOTS), memory.slideformer_host_bytes(c)


def _zero3(c: SystemCosts) -> tuple[dict[str, float], int, int]:
    """Return phases in sequence: a layer exceeds the prefetch bucket, gradients use pageable memory, then the optimizer."""
    saves_all = memory.zero3_keeps_activations(c)
    uploads_s = sum(c.copy("h2d", b.n_params * BF16, len(b.parameters)).uncontended_s for b in c.workload.blocks)
    forward_s = sum(c.forward(b).uncontended_s for b in c.layers)
    recompute_s = 0.0 if saves_all else forward_s
    backward_s = sum(c.backward(b).uncontended_s for b in c.layers) + c.embedding_backward().uncontended_s
    loss_s = c.loss().uncontended_s
    offload_s = c.pageable_s("d2h", c.workload.n_params * BF16)
    update_s = c.update(c.workload.n_params, ZERO3_UPDATE_BYTES).uncontended_s + c.norm_s(c.workload.n_params * FP32)
    phases = {
        "forward_s": uploads_s + forward_s + loss_s / 3,  # one of the head's three products
        "backward_s": uploads_s + recompute_s + backward_s + loss_s * 2 / 3 + offload_s,
        "optimizer_s": update_s,
    }
    return phases, memory.zero3_device_bytes(c), memory.zero3_host_bytes(c)
