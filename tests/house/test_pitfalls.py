"""Tests named on docs/pitfalls.md that belong to no other file, and checks of the page."""

import ast
import os
import re
from contextlib import contextmanager
from dataclasses import asdict, fields, replace

import pytest
import torch

from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.cost import costs
from penstock.runtime.executor import OpError, execute
from penstock.runtime.machines.lanes import CpuDevice
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Kind, Lane, Op, Plan, Policy, Semantics, Update, saves
from penstock.runtime.plan.objective import parse_objective
from penstock.runtime.plan.optimizer import Optimizer
from penstock.runtime.plan.train import Lora, Train
from tests import training
from tests.runtime.test_replay import n_tensors
from tests.strategies import PROFILE
from tests.tiny import tiny_config
from tests.tour import ROOT
from tests.training import batches_of, clip_some_steps, differences, machine_for, plain, plan_of, semantics_of, state_of, streamed

PAGE = ROOT / "docs" / "pitfalls.md"


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.LOSS, Kind.BACKWARD, Kind.NORM])
def test_leftovers_of_a_failed_step_are_gone_after_the_next(kind):
    """Leftovers are autograd graphs without a backward, inputs of layers and partial sums."""
    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy(accumulation_group=4, save=saves(all=(1, 2))))
    last = max(i for i, op in enumerate(plan.ops) if op.kind is kind)

    class Fails(TorchMachine):
        fails = False

        def perform(self, index: int, op: Op, step: int) -> None:
            if self.fails and index == last:
                raise OSError("gone")
            super().perform(index, op, step)

    machine = machine_for(plan, Fails)
    execute(plan, machine, 2)
    n_before = n_tensors()
    machine.fails = True
    with pytest.raises(OpError):
        execute(plan, machine, 1)
    machine.fails = False
    execute(plan, machine, 1)
    assert n_tensors() == n_before


def test_experts_without_a_token_have_gradients_of_zero():
    """Two tokens choose two experts each, so at least four of eight experts get none, and these differ by micro-batch."""
    semantics = semantics_of("mixtral", seq_len=2, clip_norm=None, on_nonfinite="stop")
    overrides = {"num_local_experts": 8}
    machine = streamed(tiny_config("mixtral", **overrides), semantics, Policy(accumulation_group=4))
    expected = plain("mixtral", semantics, tuple(overrides.items()))
    assert differences(machine, expected) == []
    moments = [m for name, m in state_of(machine)[2].items() if "experts" in name]
    assert any(bool((m.flatten(1) == 0).all(dim=1).any()) for m in moments), "every expert got tokens: nothing was shown"


def test_the_number_of_threads_on_the_host_changes_no_bit():
    """Sums of squares have a fixed order, and an update reads nothing of another block."""
    semantics = clip_some_steps("llama", semantics_of("llama"))

    class ManyThreads(training.Remembering):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, n_workers=3, **kwargs)

        @contextmanager
        def lane(self, lane):
            with super().lane(lane):
                if lane is Lane.CPU:
                    torch.set_num_threads(2)
                yield

    machine = streamed(tiny_config("llama"), semantics, Policy(update=Update.DEFERRED), machine_type=ManyThreads)
    assert differences(machine, plain("llama", semantics)) == []


def test_a_bf16_master_loses_updates_that_an_fp32_master_keeps():
    """The reason for fp32 as the default: a learning rate of 1e-6 moves a bf16 weight of 0.02 by less than half its last bit."""

    def changed(master_dtype: str) -> float:
        plan = plan_of(tiny_config("llama"), semantics_of("llama", master_dtype=master_dtype), Policy())
        machine = TorchMachine(plan, lambda step: batches_of(96, 4, 16)[step], lambda step: replace(training.ADAMW, lr=1e-6))
        machine.initialise(7)
        initial = state_of(machine)[0]
        execute(plan, machine, training.N_STEPS)
        final = state_of(machine)[0]
        moved = torch.cat([(initial[n] != final[n]).flatten() for n in initial if "proj" in n])
        return float(moved.float().mean())

    assert changed("bf16") < 0.05
    assert changed("fp32") > 0.9


def test_a_lane_takes_cores_and_threads_for_itself_alone():
    """torchrun and others set one thread per process; threads and affinity of a lane must not affect the caller."""
    of_process, n_threads = os.sched_getaffinity(0), torch.get_num_threads()
    settings_of: dict[Lane, tuple[set[int], int]] = {}

    class Looks(TorchMachine):
        def perform(self, index: int, op: Op, step: int) -> None:
            settings_of[op.lane] = (os.sched_getaffinity(0), torch.get_num_threads())
            super().perform(index, op, step)

    torch.set_num_threads(1)
    try:
        plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy())
        execute(plan, machine_for(plan, Looks, device=CpuDevice(pin_threads=True)), 1)
    finally:
        torch.set_num_threads(n_threads)
    assert os.sched_getaffinity(0) == of_process
    compute_cores, compute_threads = settings_of[Lane.GPU]
    assert compute_threads == len(compute_cores)
    for lane in (Lane.H2D, Lane.D2H, Lane.CPU):
        cores, n = settings_of[lane]
        assert n == 1
        assert len(of_process) == 1 or not cores & compute_cores


def test_nothing_forks():
    """A process with hundreds of pinned gigabytes must not fork: pages would be copied, and the child cannot use the device."""
    forbidden = {"multiprocessing", "concurrent.futures.process", "fork", "forkpty", "ProcessPoolExecutor", "DataLoader"}
    uses = []
    for path in [p for room in ("penstock", "runtime", "planner", "hwprofiles") for p in (ROOT / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = {a.name for a in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            names |= {node.attr} if isinstance(node, ast.Attribute) else set()
            uses += [f"{path.name}: {name}" for name in names & forbidden]
    # Exception: a search of many machines spawns processes; a run does not import this module.
    assert {use.partition(":")[0] for use in uses} == {"fits_compare.py"}
    sweep = (ROOT / "penstock/cli/fits_compare.py").read_text()
    for use in ("get_context", 'get_context("spawn")', "ProcessPoolExecutor(n_workers, context"):
        assert sweep.count(use) == 1


# -- fields that nothing reads ------------------------------------------------------------------------------------------

SEMANTICS = semantics_of("qwen3_moe")
OTHER_SEMANTICS = {
    "seq_len": 32, "batch_size": 8, "micro_batch": 2, "compute_dtype": "fp32", "gradient_dtype": "fp32",
    "master_dtype": "bf16", "loss_tile_tokens": 16, "train": Train(lora=Lora(rank=4)), "base": "int8",
    "optimizer": Optimizer.ADAMW_BF16, "objective": parse_objective("z-loss"), "router_loss": 0.01,
    "weight_rounding": "stochastic", "mlp_tile_tokens": 4, "attention": "eager", "norm": "fused", "loss": "online",
    "pointwise": "fused", "attention_kernel": "deterministic", "sum_groups": 2, "ranks": 2,
    "products": "fp8",
}  # fmt: skip
OF_RESULTS = {"clip_norm", "on_nonfinite"}  # change no op; tested in tests/runtime/test_settling.py
# Fields with one value here; library_kernels of linear attention: tests/planner/test_layer_traces.py
OF_ONE_VALUE = {"experts", "lora_products", "library_kernels"}
POLICY = Policy(accumulation_group=4, update=Update.DEFERRED)
OTHER_POLICY = {
    "prefetch_depth": 2, "gradient_slots": 2, "accumulation_group": 2, "save": saves(products=(1,)),
    "offload_blocks": (1,), "update": Update.BARRIER, "resident_blocks": (1,), "spill_blocks": (0,),
    "boundary_stride": 2, "speculate_blocks": (1,), "square_on_device": True, "device_blocks": (1,), "saved_slots": 3,
    "disk_blocks": (1,), "sum_blocks": (0, 2, 5),
}  # fmt: skip


def planned(model_type: str, semantics: Semantics, policy: Policy) -> tuple[object, ...]:
    """Return everything that a field can change: ops, memory, and costs of ops."""
    plan: Plan = plan_of(tiny_config(model_type, num_hidden_layers=4), semantics, policy)
    memory = [(a.name, a.slot_bytes) for a in plan.arenas], plan.kept_bytes, plan.transient_bytes
    return plan.ops, memory, costs(plan, Profile.from_json(PROFILE))


@pytest.mark.parametrize("name", [f.name for f in fields(Semantics) if f.name not in OF_RESULTS | OF_ONE_VALUE])
def test_every_field_of_the_semantics_is_read(name):
    model_type = "llama" if name == "mlp_tile_tokens" else "qwen3_moe"
    base = SEMANTICS if model_type == "qwen3_moe" else semantics_of("llama")
    base = replace(base, train=Train(lora=Lora())) if name == "base" else base  # trained weights are not packed
    base = replace(base, master_dtype="bf16") if name == "weight_rounding" else base
    base = replace(base, train=Train(lora=Lora()), base="int8") if name == "products" else base
    assert getattr(base, name) != OTHER_SEMANTICS[name]
    format_of_fp8 = {"base": "fp8-rows"} if name == "products" else {}
    changed = replace(base, **{name: OTHER_SEMANTICS[name]} | format_of_fp8)
    plans = [planned(model_type, s, replace(POLICY, accumulation_group=s.n_micro_batches)) for s in (base, changed)]
    assert plans[0] != plans[1]


@pytest.mark.parametrize("name", [f.name for f in fields(Policy)])
def test_every_field_of_the_policy_is_read(name):
    policy = replace(POLICY, save=saves(products=(1,))) if name in ("offload_blocks", "saved_slots") else POLICY
    policy = replace(policy, offload_blocks=(1,)) if name == "saved_slots" else policy
    policy = replace(policy, accumulation_group=2) if name == "sum_blocks" else policy
    assert asdict(policy)[name] != OTHER_POLICY[name]
    changed = replace(policy, **{name: OTHER_POLICY[name]})
    semantics = semantics_of("llama", **({"train": Train(lora=Lora())} if name == "disk_blocks" else {}))  # frozen layers
    assert planned("llama", semantics, policy) != planned("llama", semantics, changed)


# -- the page -----------------------------------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [row for row in cells if row[0].isdigit()]


def named_in(text: str) -> list[tuple[str, str]]:
    """Return (test, file) of links such as [`test_x`](../tests/folder/test_file.py)."""
    return re.findall(r"\[`(test_\w+)`\]\(\.\./tests/([\w/]+/test_\w+\.py)\)", text)


def test_every_test_that_the_page_names_exists():
    for name, file in named_in(PAGE.read_text()):
        tree = ast.parse((ROOT / "tests" / file).read_text())
        tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in tests, f"{file} has no {name}"


def test_every_row_names_a_test_or_says_why_not():
    assert [int(row[0]) for row in rows()] == list(range(1, len(rows()) + 1))
    for number, _, held in rows():
        assert named_in(held) or held.startswith(("Does not apply: ", "Not yet: ")), f"row {number} says nothing"
        assert held.count("`test_") == len(named_in(held)), f"row {number} names a test without a link"
