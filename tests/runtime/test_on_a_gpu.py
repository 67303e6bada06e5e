"""GPU runs: the laws of the CPU tests on a CUDA device (`test_cuda_machine` needs none)."""

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.planner.model.workload import build_workload
from penstock.runtime.batch import Batch
from penstock.runtime.executor import Execution, execute
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.host.optimizer import KernelLayout, device_kernel
from penstock.runtime.layers.recompute import FUSED_ATTENTION, Replay
from penstock.runtime.machines.streams import CudaStreams, use_same_kernels
from penstock.runtime.plan import Kind, Lane, Op, Plan, Policy, Semantics, saves
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Model, Saved
from penstock.runtime.scaled_products import LEAST_CAPABILITY
from penstock.training.validation import evaluate, generate
from tests import reference, training
from tests.every_type import tiny
from tests.forwards import OfAnyPlan, resident, sequences, sequences_of
from tests.late_streams import OnGpu
from tests.penstock.training.test_generation import PROMPTS, said_by_transformers
from tests.strategies import policies
from tests.tiny import EXPERT_TYPES, MODEL_TYPES, tiny_config
from tests.tour import ROOT
from tests.training import EVERYTHING, N_STEPS, as_expected, differences, machine_for, plan_of, semantics_of, trained

from .test_documents import CUTS, OTHER_CUTS, POLICIES, config_of, packed_batches
from .test_frozen import LORA, PACKED
from .test_losses import with_loss

pytestmark = pytest.mark.gpu
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it on first use

LAW = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

LONGEST_SLEEP_CYCLES = 2_000_000  # about a millisecond
# Models run by layer traces, and their attention
RECORDED = dict.fromkeys(("gemma3n_text", "deepseek_v3", "qwen3_next", "glm4_moe", "olmo2", "phi3", "gpt2"), "sdpa")
RECORDED |= dict.fromkeys(("bloom", "mamba2"), "eager")


@pytest.fixture(autouse=True)
def _same_kernels() -> Iterator[None]:
    use_same_kernels()
    yield
    torch.use_deterministic_algorithms(False)


class Remembering(training.Remembers, OnGpu):
    """Run on the GPU."""


class Sleepy(Remembering):
    """Sleep at random on each stream before and after an op, and fill released slots with NaN in stream order."""

    def __init__(self, plan: Plan, *args, sleep_seed: int = 0, **kwargs) -> None:
        super().__init__(plan, *args, **kwargs)
        self.released, self.rng = training.released_slots(plan), random.Random(sleep_seed)
        largest = max(n_bytes for arena in plan.arenas for n_bytes in arena.slot_bytes)
        self.nan = torch.full((largest,), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def work(self, index: int, op: Op, step: int) -> None:
        self.around(super().work, self.released, index, op, step)

    def around(self, work, released, index: int, op: Op, step: int) -> None:
        if op.lane is Lane.CPU:
            work(index, op, step)
            for slot in released[index]:
                training.poison(self.arenas, slot)
            return
        self._sleep()
        work(index, op, step)
        self._sleep()
        for slot in released[index]:
            memory = self.arenas.raw(slot)
            memory.copy_(self.nan[: memory.numel()], non_blocking=True)  # in stream order, for host memory too

    def _sleep(self) -> None:
        if self.rng.random() < 0.3:
            torch.cuda._sleep(self.rng.randrange(LONGEST_SLEEP_CYCLES))


def run(config, semantics: Semantics, policy: Policy, machine_type=Remembering, n_steps: int = N_STEPS, **options) -> Remembering:
    return trained(plan_of(config, semantics, policy), machine_type, n_steps, **options)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@LAW
@given(data=st.data())
def test_no_plan_changes_a_bit_on_a_gpu(model_type, data):
    """Poison slots on release, delay streams at random, apply dropout, use grouped products of experts."""
    dropout = data.draw(st.sampled_from([0.0, 0.2]), label="dropout")
    semantics = semantics_of(model_type, compute_dtype=data.draw(st.sampled_from(["bf16", "bf16", "fp32"]), label="compute_dtype"))
    n_layers = data.draw(st.integers(1, 4), label="n_layers")
    config = tiny_config(model_type, num_hidden_layers=n_layers)
    policy = data.draw(policies(semantics, build_workload(Model(config), semantics)), label="policy")
    config |= {"attention_dropout": dropout}
    sleepy = run(config, semantics, policy, Sleepy, sleep_seed=data.draw(st.integers(0, 99), label="seed"))
    layers = tuple(range(1, n_layers + 1))
    expected = run(config, semantics, Policy(save=saves(all=layers), accumulation_group=semantics.n_micro_batches))
    assert differences(sleepy, as_expected(expected)) == []


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "deterministic"])
def test_attention_at_2048_tokens_keeps_its_bits_on_a_gpu(kernel):
    """Use each attention kernel of a run; `cudnn` is the default. Only `deterministic` guarantees the result."""
    torch.use_deterministic_algorithms(kernel == "deterministic")
    semantics = semantics_of("llama", seq_len=2048, loss_tile_tokens=1024, **training.fused("llama", kernel))
    config = tiny_config("llama", head_dim=64)
    expected = run(config, semantics, Policy(save=saves(all=(1, 2)), accumulation_group=4))
    sleepy = run(config, semantics, Policy(save=saves(products=(2,)), spill_blocks=(1,)), Sleepy)
    faults = differences(sleepy, as_expected(expected))
    if faults and kernel != "deterministic":
        pytest.xfail(f"{kernel} adds in the order in which its threads come: {len(faults)} tensors differ")
    assert faults == []


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_gpu_trains_as_the_plain_loop_there_within_rounding(model_type):
    """The plain loop's optimizer runs on the GPU too, with another order of rounding: tolerance, not bits."""
    semantics, config = semantics_of(model_type, compute_dtype="fp32", gradient_dtype="fp32"), tiny_config(model_type)
    machine = run(config, semantics, Policy())
    masters = {name: master.cuda() for name, master in training.initial_masters(config, semantics).items()}
    batches = [Batch(b.input_ids.cuda(), b.targets.cuda()) for b in training.batches_of(config["vocab_size"], 4, 16)]
    torch.use_deterministic_algorithms(False)  # a common training loop
    with torch.device("cuda"):
        expected = reference.train(config, semantics, masters, batches, training.settings_of_torch(N_STEPS))
    for step in range(N_STEPS):
        assert machine.results[step].loss == pytest.approx(expected.losses[step], rel=1e-5)
        assert machine.results[step].grad_norm == pytest.approx(expected.norms[step], rel=1e-4)
    for name, master in training.state_of(machine)[0].items():
        off = (master - expected.masters[name].cpu()).abs()
        assert float((off > 1e-5).float().mean()) < 0.01, name  # AdamW magnifies the rounding of tiny gradients


@pytest.mark.parametrize(("model_type", "base", "on_device", "policy"), PACKED)
def test_adapters_beside_packed_weights_keep_their_bits(model_type, base, on_device, policy):
    """Keep their state on the host or on the device."""
    train = Train(lora=Lora(rank=8, targets=("q_proj", "experts"))) if model_type in EXPERT_TYPES else LORA
    semantics = semantics_of(model_type, train=train, base=base, gradient_dtype="fp32" if on_device else "bf16")
    config = tiny_config(model_type, num_hidden_layers=3)
    of_state = {"device_blocks": build_workload(Model(config), semantics).mixed} if on_device else {}
    sleepy = run(config, semantics, replace(policy, **of_state), Sleepy)
    expected = run(config, semantics, Policy(save=saves(all=(1, 2, 3)), accumulation_group=4))
    assert differences(sleepy, as_expected(expected)) == []
    initial, on_cpu = training.initial_masters(config, semantics), trained(plan_of(config, semantics, Policy()))
    assert all(training.same_bits(initial[name], weight) for name, weight in training.frozen_of(sleepy).items())
    for step in range(N_STEPS):
        assert expected.results[step].loss == pytest.approx(on_cpu.results[step].loss, rel=2e-2)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe"])
def test_fp8_products_of_trained_weights_keep_their_bits_on_a_gpu(model_type):
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        pytest.skip("this GPU has no FP8 products")
    config, semantics = tiny_config(model_type, num_hidden_layers=4), semantics_of(model_type, products="fp8")
    expected = run(config, semantics, Policy(save=saves(all=(1, 2, 3, 4)), accumulation_group=4))
    assert differences(run(config, semantics, EVERYTHING, Sleepy), as_expected(expected)) == []
    on_cpu = trained(plan_of(config, semantics, Policy()))
    for step in range(N_STEPS):
        assert expected.results[step].loss == pytest.approx(on_cpu.results[step].loss, rel=2e-2)


@pytest.mark.parametrize("policy", [EVERYTHING, Policy(boundary_stride=2)])
@pytest.mark.parametrize("model_type", RECORDED)
def test_recorded_models_keep_their_bits_on_a_gpu(model_type, policy):
    """Run models without a handwritten layer: side inputs, several streams, hybrid attention, experts of all kinds."""
    config = tiny(model_type)
    config |= {"num_hidden_layers": 4} if "layer_types" not in config else {}
    n_layers = len(build_workload(Model(config), semantics := semantics_of(model_type, attention=RECORDED[model_type])).blocks) - 2
    if n_layers < 4:
        policy = Policy(save=saves(products=(1,)), offload_blocks=(1,), accumulation_group=2)
    expected = run(config, semantics, Policy(save=saves(all=tuple(range(1, n_layers + 1))), accumulation_group=4))
    assert differences(run(config, semantics, policy, Sleepy), as_expected(expected)) == []
    on_cpu = trained(plan_of(config, semantics, Policy()), n_steps=1)
    assert expected.results[0].loss == pytest.approx(on_cpu.results[0].loss, rel=2e-2)


@pytest.mark.parametrize(
    ("name", "is_packed"),
    [*product(("dpo", "orpo", "kto:group=2", "grpo", "distill:9"), [False]), *product(("dpo", "grpo", "classify"), [True])],
)
def test_any_loss_keeps_its_bits_on_a_gpu(name, is_packed):
    semantics, batches = with_loss(name, is_packed)
    machines = [
        trained(plan_of(tiny_config("llama"), semantics, policy), machine_type, batches=batches)
        for policy, machine_type in ((Policy(save=saves(all=(1, 2))), Remembering), (Policy(spill_blocks=(0, 1)), Sleepy))
    ]
    assert differences(machines[1], as_expected(machines[0])) == []
    on_cpu = trained(machines[0].plan, batches=batches, n_steps=1)
    assert machines[0].results[0].loss == pytest.approx(on_cpu.results[0].loss, rel=2e-2, abs=1e-2)


class SleepyForBoth(OfAnyPlan, Sleepy):
    """Sleep during a forward plan, too."""


def machine_for_both(config, semantics: Semantics, policy: Policy, batches=()) -> SleepyForBoth:
    return machine_for(plan_of(config, semantics, policy), SleepyForBoth, batches)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_evaluations_between_steps_change_no_bit_of_training(model_type):
    semantics, config = semantics_of(model_type), tiny_config(model_type, num_hidden_layers=4)
    alone, evaluated = run(config, semantics, EVERYTHING), machine_for_both(config, semantics, EVERYTHING)
    for step, batch in enumerate(training.batches_of(config["vocab_size"], 4, 16)):
        evaluation = evaluate(evaluated, sequences_of(batch), 4)
        evaluate(evaluated, sequences_of(sequences(config["vocab_size"], 7)), 7)
        generate(evaluated, [[1, 2, 3]], 2)
        execute(evaluated.plan, evaluated, 1, step)
        assert evaluation["eval_loss"] == evaluated.results[step].loss
    assert differences(evaluated, as_expected(alone)) == []


@pytest.mark.parametrize("compute_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mixtral"])
def test_documents_on_a_gpu_are_the_cpus_on_every_plan(model_type, compute_dtype):
    config, semantics = config_of(model_type), semantics_of(model_type, compute_dtype=compute_dtype)
    batches, machines = packed_batches(CUTS, OTHER_CUTS, CUTS), []
    for policy in (POLICIES["kept"], *POLICIES.values()):
        machines.append(machine_for_both(config, semantics, policy, batches))
        execute(machines[-1].plan, machines[-1], N_STEPS)
        assert differences(machines[-1], as_expected(machines[0])) == [], policy
    on_cpu = trained(machines[0].plan, batches=batches)
    for step in range(N_STEPS):
        close = 1e-4 if compute_dtype == "fp32" else 2e-2
        assert machines[0].results[step].loss == pytest.approx(on_cpu.results[step].loss, rel=close)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_gpu_says_what_transformers_says_on_a_cpu(model_type):
    config = tiny_config(model_type, initializer_range=0.3, tie_word_embeddings=False)
    semantics = semantics_of(model_type, compute_dtype="fp32", gradient_dtype="fp32", seq_len=96, batch_size=3, micro_batch=3)
    model = resident(config, semantics)
    expected = [said_by_transformers(model, prompt, 6) for prompt in PROMPTS]
    assert generate(machine_for_both(config, semantics, Policy()), PROMPTS, 6) == expected


class NeverWaits(CudaStreams):
    """Raise an error from now on if a call waits for the device, except for the wait at a run's end."""

    def finish(self, stream) -> None:
        torch.cuda.set_sync_debug_mode("default")
        super().finish(stream)


@pytest.mark.parametrize("policy", [Policy(), EVERYTHING, Policy(save=saves(all=(1, 2))), Policy(boundary_stride=2)])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_after_its_first_step_no_lane_waits_for_the_device(model_type, policy):
    semantics = semantics_of(model_type)
    if model_type in ("gpt_oss",) and Saved.PRODUCTS in policy.save:
        pytest.skip("it adds biases to products in place, so none is saved")
    n_layers = 4 if policy is EVERYTHING else 2
    config = tiny_config(model_type, num_hidden_layers=n_layers)
    plan = plan_of(config, semantics, policy)
    machine = trained(plan, Remembering, 1, streams=NeverWaits())
    torch.cuda.set_sync_debug_mode("error")
    try:
        execute(plan, machine, 2, first_step=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert machine.results[2].loss > 0.0


def test_a_long_run_takes_no_more_memory_than_a_short_one():
    semantics, config = semantics_of("llama"), tiny_config("llama", num_hidden_layers=4)
    gc.collect()
    torch.cuda.empty_cache()  # otherwise streams of earlier machines can hold all required memory
    segments = {segment["address"] for segment in torch.cuda.memory_snapshot()}
    machine = run(config, semantics, EVERYTHING, n_steps=4)
    assert machine.results.pop(3).loss > 0.0  # the first query takes a little pinned memory

    def all_taken() -> tuple[int, ...]:
        of_device, n_of_host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()["num_host_alloc"]
        return torch.cuda.memory_reserved(), of_device["num_alloc_retries"], of_device["num_device_alloc"], n_of_host

    allocated = all_taken()
    for first_step in range(4, 204, 50):
        with Execution(machine.plan, machine, 50, first_step) as steps:
            assert all(machine.results.pop(step.number).loss for step in steps)
        assert all_taken() == allocated
    side = {machine.lanes.streams_of[lane].cuda_stream for lane in (Lane.H2D, Lane.D2H)}
    new = [segment for segment in torch.cuda.memory_snapshot() if segment["address"] not in segments]
    assert not side & {segment["stream"] for segment in new}


DTYPES = (torch.bfloat16, torch.float32, torch.uint8)  # moment dtypes: the last in int8


@pytest.mark.parametrize(("weight", "is_split"), [("fp32", False), ("bf16", True), ("bf16", False)])
@pytest.mark.parametrize("gradient", ["bf16", "fp32"])
def test_a_gpu_updates_to_the_hosts_bits(weight, is_split, gradient) -> None:
    of_torch = KernelLayout(DTYPE[weight], is_split, DTYPE[gradient])
    roundings = {"fp32": [False], "bf16": [False, True] if is_split else [True]}[weight]
    of_less = [(rule, moment, is_drawn) for rule in ("adamw", "lion") for moment in DTYPES for is_drawn in roundings]
    for layout in (of_torch, *(KernelLayout(*of_torch[:3], moment, rule, is_drawn) for rule, moment, is_drawn in of_less)):
        device_kernel(torch.device("cuda"), layout)  # warns otherwise


def test_every_arena_of_the_host_is_locked_and_let_go():
    machine = run(tiny_config("llama"), semantics_of("llama"), Policy(), n_steps=1)
    slabs = machine.arenas.host_slabs()
    assert all(slab.is_pinned() for slab in slabs.values() if slab.numel())
    del machine
    assert not any(slab.is_pinned() for slab in slabs.values())


def test_spans_are_in_order_and_a_kernel_is_as_long_as_it_is():
    class Slow(OnGpu):
        def work(self, index, op, step):
            super().work(index, op, step)
            if op.kind is Kind.OFFLOAD_GRADIENT and op.block == 1:
                torch.cuda._sleep(50 * LONGEST_SLEEP_CYCLES)

    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy())
    spans = execute(plan, machine_for(plan, Slow), 6).spans
    span_of = {(span.step, span.op): span for span in spans}
    assert len(span_of) == 6 * len(plan.ops)
    resolution_s = 50e-6  # covers the comparison of two clocks, and single precision
    for (step, number), span in span_of.items():
        assert span.end_s >= span.start_s
        for wait in plan.ops[number].waits:
            earlier = span_of.get((step - wait.distance, wait.op))
            if earlier is not None and Lane.CPU not in (plan.ops[number].lane, plan.ops[wait.op].lane):
                assert span.start_s >= earlier.end_s - resolution_s
    offloads = [(plan.ops[s.op].block, s.end_s - s.start_s) for s in spans if plan.ops[s.op].kind is Kind.OFFLOAD_GRADIENT]
    slow, usual = ([seconds for block, seconds in offloads if block == b] for b in (1, 2))
    assert min(slow) > 5 * sorted(usual)[len(usual) // 2]


@pytest.mark.parametrize(("dtype", "masked"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)])
def test_fused_attention_is_saved_by_the_name_it_has_on_this_gpu(dtype, masked):
    q = torch.randn(1, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 128, 128, device="cuda", dtype=torch.bool).tril() if masked else None
    assert FUSED_ATTENTION
    replay = Replay(Saved.ATTENTION, lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=not masked))
    with replay.recording():
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=not masked)
    assert len(replay.results) == 1
    wanted = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=not masked)
    (a,), (b,) = (torch.autograd.grad(o.square().sum(), [q]) for o in (out, wanted))
    assert torch.equal(a, b)


def test_an_illegal_access_ends_a_run_with_a_line_that_says_so():
    """Use a separate process: a failed device remains unusable for the whole process."""
    code = """
from tests.runtime.test_on_a_gpu import *
from penstock.runtime.batch import Batch
plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy())
bad = torch.full((4, 16), 10**6)
try:
    trained(plan, OnGpu, 2, batches=[Batch(bad, bad)])
except Exception as error:
    print("SAID", type(error).__name__, str(error).splitlines()[0])
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in process.stdout.splitlines() if line.startswith("SAID")]
    assert lines, process.stderr[-2000:]
    assert "OpError" in lines[0]
    assert "CUDA error" in lines[0]


def test_a_large_step_takes_the_memory_of_its_plan():
    """The allocator's peak beyond the arenas is at most the plan's bookings plus the memory of cuBLAS."""
    config = tiny_config("llama", hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=8)
    config |= {"vocab_size": 8192, "max_position_embeddings": 2048, "num_hidden_layers": 3}
    semantics = semantics_of("llama", seq_len=2048, batch_size=4, micro_batch=4, loss_tile_tokens=1024)
    plan = plan_of(config, semantics, Policy(save=saves(all=(2,))))
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    machine = machine_for(plan, OnGpu)
    torch.cuda.reset_peak_memory_stats()
    execute(plan, machine, 3)
    workspaces = 64 * 2**20
    peak = torch.cuda.max_memory_allocated() - before_bytes
    assert peak <= plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes + workspaces
