"""GPU streams and events, emulated by delayed CPU streams (`late_streams`): bits, waits, errors, tokens, commands."""

import gc
import os
import threading
import time
import weakref
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.errors import PenstockError
from penstock.runtime.executor import Execution, OpError, execute
from penstock.runtime.plan import Kind, Lane, Policy, Update, saves
from penstock.training.device import device_of
from penstock.training.validation import evaluate, generate
from tests.forwards import LateForBoth, sequences, sequences_of, watch_forwards
from tests.lanes import examples, mostly_slow
from tests.late_streams import LateStreams, Poisoned, machine_of
from tests.running import lines_of, make_home, one_line, plan_in, train
from tests.tiny import tiny_config
from tests.training import EVERYTHING, N_STEPS, differences, plain, semantics_of

from .test_exactness import LAW, sampled

HASTE = (0.0, 0.5, 0.9)


@settings(LAW, max_examples=examples(24))
@given(data=st.data())
def test_late_streams_train_the_bits_of_the_plain_loop(data):
    config, semantics, policy, expected = sampled(data, ["llama", "gemma2", "qwen3_moe"])
    seed, haste = data.draw(st.integers(0, 99), label="seed"), data.draw(st.sampled_from(HASTE), label="haste")
    machine = machine_of(config, semantics, policy, seed, haste)
    execute(machine.plan, machine, N_STEPS)
    assert differences(machine, expected) == []


EDGES = {  # (waiting lane, awaited lane) for all waits on streams
    (Lane.GPU, Lane.H2D), (Lane.GPU, Lane.D2H), (Lane.H2D, Lane.GPU),
    (Lane.H2D, Lane.D2H), (Lane.D2H, Lane.GPU), (Lane.CPU, Lane.D2H),
}  # fmt: skip


@mostly_slow(("waiting", "marking"), sorted(EDGES), ids=str)
def test_events_between_no_two_lanes_may_be_left_out(waiting, marking):
    """Show that the law above can fail: remove the events of one lane for another, delay streams, and bits differ."""
    left_out = 0

    class Deaf(Poisoned):
        def mark(self, op):
            token = super().mark(op)
            return None if token is None else (op.lane, token)

        def follow(self, lane, marked):
            nonlocal left_out
            marker, token = marked
            if lane is Lane.CPU:
                time.sleep(0.03)  # streams can run ahead of a delayed host too
            if (lane, marker) == (waiting, marking):
                left_out += 1
            else:
                super().follow(lane, token)

    for seed in range(list(Lane).index(marking), 40, 4):  # seeds that delay the stream of the ignored event
        machine = machine_of(tiny_config("llama", num_hidden_layers=4), semantics_of("llama"), EVERYTHING, seed, 0.97, Deaf)
        try:
            execute(machine.plan, machine, N_STEPS)
        except (PenstockError, OpError):  # NaN reached a gradient
            break
        if differences(machine):
            break
    else:
        raise AssertionError("it made no difference")
    assert left_out


def test_everything_at_once_is_the_plain_loop():
    """Run the machine of the test above with all events of EDGES."""
    for seed, haste in enumerate(HASTE):
        machine = machine_of(tiny_config("llama", num_hidden_layers=4), semantics_of("llama"), EVERYTHING, seed, haste)
        execute(machine.plan, machine, N_STEPS)
        assert differences(machine) == []
    ops = machine.plan.ops
    assert {(op.lane, ops[w.op].lane) for op in ops for w in op.waits if ops[w.op].lane is not Lane.CPU} == EDGES


LEAN = Policy()


def small_machine(policy=LEAN, **how):
    return machine_of(tiny_config("llama"), semantics_of("llama"), policy, **how)


def test_a_reported_steps_loss_is_there_and_is_waited_for_once():
    machine = small_machine(Policy(update=Update.DEFERRED))
    with Execution(machine.plan, machine, N_STEPS) as steps:
        losses = [step.result.loss for step in steps]
    assert losses == plain("llama", machine.plan.semantics).losses
    assert machine._losses == {}
    machine = small_machine()
    execute(machine.plan, machine, N_STEPS)
    n_before = machine.lanes.streams.n_waits
    assert machine.results[1].loss == machine.results[1].loss > 0.0
    assert machine.lanes.streams.n_waits == n_before + 1


def test_a_long_run_makes_no_more_streams():
    machine = small_machine(EVERYTHING_SMALL, haste=0.5)
    for first_step, n_steps in ((0, 4), (4, 4), (8, 8)):
        with Execution(machine.plan, machine, n_steps, first_step) as steps:
            assert all(machine.results.pop(step.number).loss for step in steps)
    assert len(machine.lanes.streams.streams) == 3
    assert machine._losses == {}


EVERYTHING_SMALL = Policy(save=saves(products=(1,)), update=Update.DEFERRED, speculate_blocks=(0, 2))


class NotesThreads(LateForBoth):
    """Record the thread that issues ops of each lane. Hold the thread object: identifiers of ended threads are reused."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.threads = defaultdict(list)
        self.fails_at = None

        watch_forwards(self, lambda op, step: self._note(op))

    def _note(self, op):
        if threading.current_thread() not in self.threads[op.lane]:
            self.threads[op.lane].append(threading.current_thread())

    def perform(self, index, op, step):
        self._note(op)
        if (op.kind, step) == self.fails_at:
            raise OSError("the disk is gone")
        super().perform(index, op, step)


def test_one_thread_issues_all_that_a_machine_computes():
    """Run, evaluate, sample, and fail in any lane. The thread ends with the machine."""
    config = tiny_config("llama")
    machine = small_machine(machine_type=NotesThreads)
    execute(machine.plan, machine, 2)
    evaluate(machine, sequences_of(sequences(config["vocab_size"], 3)), 3)
    generate(machine, [[1, 2, 3]], 2)
    for kind in (Kind.BACKWARD, Kind.OFFLOAD_GRADIENT):  # in the lane itself, and in another
        machine.fails_at = (kind, 2)
        with pytest.raises(OpError, match=rf"step 3, lane .*: {kind} .* failed: OSError: the disk is gone"):
            execute(machine.plan, machine, 1, 2)
    machine.fails_at = None
    execute(machine.plan, machine, 1, 2)
    assert differences(machine) == []
    assert len(machine.threads[Lane.H2D]) > 5, "each run has new ones, but for the lane that computes"
    (thread,) = machine.threads[Lane.GPU]
    assert (thread.name, thread.is_alive()) == ("lane-gpu", True)
    del machine
    gc.collect()  # the failed object refers to itself and to the machine
    thread.join(10)
    assert not thread.is_alive()


def test_when_a_run_ends_or_fails_every_stream_has_ended():
    """Repeat a step on the same machine after a failure before its first update."""

    class FailsOnce(Poisoned):
        has_failed = False

        def work(self, index, op, step):
            if op.kind is Kind.NORM and not self.has_failed:
                self.has_failed = True
                time.sleep(0.1)  # meanwhile other lanes issue more
                raise OSError("the disk is gone")
            super().work(index, op, step)

    machine = small_machine(machine_type=FailsOnce)
    with pytest.raises(OpError, match=r"norm cpu .* the disk is gone"):
        execute(machine.plan, machine, N_STEPS)
    assert [len(stream.todo) for stream in machine.lanes.streams.streams] == [0, 0, 0]
    execute(machine.plan, machine, N_STEPS)
    assert [len(stream.todo) for stream in machine.lanes.streams.streams] == [0, 0, 0]
    assert differences(machine) == []


@pytest.mark.parametrize("kind", [Kind.LOAD, Kind.BACKWARD])
def test_an_error_in_a_kernel_stops_the_run_and_is_said(kind):
    class Faulty(Poisoned):
        def work(self, index, op, step):
            if op.kind is kind and step == 1:
                raise RuntimeError("an illegal memory access was encountered")
            super().work(index, op, step)

    machine = small_machine(machine_type=Faulty)
    with pytest.raises(OpError, match=r"(?s)step [123], lane .* failed: .*illegal memory access"):
        execute(machine.plan, machine, N_STEPS)


def test_a_machine_without_users_is_gone_at_once():
    """Release the machine's gigabytes of pinned memory."""
    machine = small_machine(EVERYTHING_SMALL)
    execute(machine.plan, machine, N_STEPS)
    arenas = weakref.ref(machine.arenas)
    gc.disable()
    try:
        del machine
        assert arenas() is None
    finally:
        gc.enable()


# -- `penstock run --device cuda` ----------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Create a plan, text, and a "GPU" with delayed streams."""
    monkeypatch.setattr("penstock.runtime.machines.lanes.CudaStreams", lambda: LateStreams(1, 0.5))
    monkeypatch.setattr("penstock.runtime.machines.streams.has_cuda", lambda: True)
    monkeypatch.setattr("penstock.runtime.machines.streams.free_cuda_bytes", lambda: 10**10)
    plan_in(make_home(tmp_path))
    return tmp_path


def run(home, out, *extra):
    return train(home, home / "plan.json", *extra, out=out)


def test_a_run_on_a_gpu_and_one_on_a_cpu_write_the_same_files(home):
    result = run(home, "on_gpu", "--save-every", 2)
    assert result.exit_code == 0, result.output
    assert "not comparable with this GPU" in result.stdout
    assert result.stdout.startswith("\tmeasured on "), "the prediction for a CPU is left out"
    assert "%" not in result.stdout
    assert run(home, "on_cpu", "--device", "cpu", "--save-every", 2).exit_code == 0
    for name in ("model-00002-of-00005.safetensors", "optimizer-00001.safetensors"):
        a, b = ((home / out / "checkpoint-4" / name).read_bytes() for out in ("on_gpu", "on_cpu"))
        assert a == b
    a, b = ([line["loss"] for line in lines_of(home, out)] for out in ("on_gpu", "on_cpu"))
    assert a == b
    assert len(a) == 4


def test_a_plan_too_large_for_the_gpu_is_refused_at_once(home, monkeypatch):
    monkeypatch.setattr("penstock.runtime.machines.streams.free_cuda_bytes", lambda: 1000)
    one_line(run(home, "o"), 3, "of the GPU's memory")
    assert not (home / "o").exists()


def test_without_a_gpu_a_run_is_the_cpus_unless_it_asks_for_one(home, monkeypatch):
    monkeypatch.setattr("penstock.runtime.machines.streams.has_cuda", lambda: False)
    one_line(run(home, "o", "--device", "cuda"), 2, "--device cuda: torch sees no CUDA device")
    monkeypatch.setattr("penstock.runtime.machines.lanes.CudaStreams", None)
    assert run(home, "o").exit_code == 0


@pytest.mark.parametrize(
    ("device", "variables", "expected"),
    [
        ("auto", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ("cpu", {}, {}),
    ],
)
def test_segments_of_the_allocator_may_grow_unless_the_user_says(monkeypatch, device, variables, expected):
    """The setting is fixed before the first device query, when torch may read it."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, variables.get(name, ""))  # restores the previous value
        if name not in variables:
            monkeypatch.delenv(name)

    def look():
        assert {name: os.environ[name] for name in names if name in os.environ} == expected
        return True

    monkeypatch.setattr("penstock.runtime.machines.streams.has_cuda", look)
    assert device_of(device) == ("cpu" if device == "cpu" else "cuda")


def test_machines_add_parts_of_products_in_fp32():
    products, kinds = torch.backends.cuda.matmul, [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    for kind in kinds:
        setattr(products, kind, True)
    torch.set_float32_matmul_precision("high")
    small_machine()
    assert [getattr(products, kind) for kind in kinds] == [False, False]
    assert torch.get_float32_matmul_precision() == "highest"


def test_deterministic_kernels_are_asked_for_before_computing(home, monkeypatch):
    workspaces = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(
        "penstock.runtime.machines.streams.use_same_kernels", lambda: workspaces.append(os.environ["CUBLAS_WORKSPACE_CONFIG"])
    )
    one_line(run(home, "refused", "--deterministic"), 2, "plan again with --deterministic")
    assert run(home, "usual").exit_code == 0
    assert workspaces == []
    monkeypatch.setattr("penstock.model_checks.missing_kernels._can_use", lambda *args: True)
    plan_in(home, "--deterministic")
    assert run(home, "again").exit_code == 0  # the plan stores the setting
    assert workspaces == [":4096:8"]
