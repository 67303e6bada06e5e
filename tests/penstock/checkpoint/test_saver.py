"""Background checkpoints: state between two steps, without effect on training."""

import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import pytest

from penstock.checkpoint import checkpoint, saver
from penstock.checkpoint.checkpoint import complete_checkpoints, load_state
from penstock.checkpoint.snapshot import Snapshots, order_of_updates
from penstock.runtime.errors import CheckpointError
from penstock.runtime.host import host_state
from penstock.runtime.plan import Kind, Policy, Update
from penstock.training.session import Session
from tests.accidents import in_time
from tests.lanes import mostly_slow
from tests.late_streams import LateStreams, Poisoned
from tests.sessions import files_of, resumed, same_state, session_of, steps_of, train
from tests.training import LEAN, Hostile

pytestmark = pytest.mark.usefixtures("no_fsync")

N_STEPS = 4
SPECULATING = Policy(update=Update.DEFERRED, speculate_blocks=(0, 1, 3), accumulation_group=4)
ONE_GROUP = Policy(update=Update.DEFERRED, accumulation_group=4)
UNCLIPPED = {"clip_norm": 100.0}
WAYS = {
    "barrier": ("llama", Policy(), {}),
    "deferred": ("llama", Policy(update=Update.DEFERRED), {}),
    "eager": ("llama", Policy(update=Update.EAGER, accumulation_group=4), {"clip_norm": None}),
    "deferred, one group": ("llama", ONE_GROUP, {}),
    "on speculation, in vain": ("llama", SPECULATING, {}),
    "on speculation, taken": ("llama", SPECULATING, UNCLIPPED),
    "barrier, one group": ("llama", Policy(accumulation_group=4), {}),
    "layers on speculation, taken": ("llama", replace(ONE_GROUP, speculate_blocks=(1, 2)), UNCLIPPED),
    "tied": ("gemma2", Policy(update=Update.DEFERRED, accumulation_group=4), {}),
    "state on the device": ("llama", replace(ONE_GROUP, device_blocks=(1, 2)), {}),
    "device, the other on speculation": ("llama", replace(ONE_GROUP, device_blocks=(1,), speculate_blocks=(2,)), UNCLIPPED),
    "bf16 master": ("llama", ONE_GROUP, {"master_dtype": "bf16"}),
    "less state": ("llama", SPECULATING, LEAN["adamw:moments=int8,master=bf16"]),
    "Lion": ("llama", ONE_GROUP, LEAN["lion:moments=bf16,master=bf16"]),
    "fp32": ("llama", SPECULATING, {"compute_dtype": "fp32", "gradient_dtype": "fp32"}),
    "experts": ("mixtral", replace(ONE_GROUP, speculate_blocks=(1,)), UNCLIPPED),
    "experts, eager": ("qwen3_moe", Policy(update=Update.EAGER, accumulation_group=4), {"clip_norm": None}),
}

# Lanes are delayed at random times, set by the seed.
Slow = partial(Hostile, delay_seed=3)


def in_way(folder, way: str, machine_type=Slow, **fields) -> Session:
    model_type, policy, semantics = WAYS[way]
    return session_of(folder, policy, machine_type, model_type, **({"every": 1} | semantics | fields))


def run(session: Session, n_steps: int = N_STEPS, on_step=lambda metrics: None) -> Session:
    return in_time(lambda: train(session, n_steps, on_step))


@pytest.fixture(scope="module")
def drained(tmp_path_factory):
    """Run each variant with a save after every step while all lanes are idle: (files by checkpoint, last session)."""

    @lru_cache
    def left_by(way: str) -> tuple[dict[str, bytes], Session]:
        session = run(in_way(tmp_path_factory.mktemp("drained"), way, background=False))
        return files_of(session.folder), session

    return left_by


def only(files: dict[str, bytes], *steps: int) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.split("/")[0] in [f"checkpoint-{n}" for n in steps]}


def noticed(monkeypatch) -> list[Snapshots]:
    snapshots = []

    class Noticed(Snapshots):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.met_before: dict[int, int] = {}  # by step: `n_met` at the start of its snapshot
            snapshots.append(self)

        def _begin(self, step: int) -> None:
            self.met_before[step] = n_met(self)
            super()._begin(step)

    monkeypatch.setattr(saver, "Snapshots", Noticed)
    return snapshots


def n_met(snapshots: Snapshots) -> int:
    """Count updates that preceded the write of their block."""
    return snapshots.n_copied + snapshots.n_waited_for


def before_each_tensor(monkeypatch, work) -> None:
    """Call `work(step)` before a tensor of this step's checkpoint is written."""
    write = checkpoint.write_tensors

    def slowly(path, outlines, contents):
        def pieces():
            work(step := int(path.parent.name.removeprefix("checkpoint-").removesuffix(".partial")))
            for piece in contents:
                yield piece
                work(step)

        return write(path, outlines, pieces())

    monkeypatch.setattr(checkpoint, "write_tensors", slowly)


def late_writer(monkeypatch, snapshots: list[Snapshots], seed: int, longest_s: float = 0.002, last: int = N_STEPS) -> None:
    """Delay the writer thread until the first update of the next step, then at random times."""
    rng, begun = random.Random(seed), {last}  # no update follows the last step

    def late(step):
        if threading.current_thread().name.startswith("saver"):
            met_before, until_s = snapshots[0].met_before[step], time.perf_counter() + 60
            while step not in begun and n_met(snapshots[0]) == met_before and time.perf_counter() < until_s:
                time.sleep(0.0005)
            begun.add(step)
            if rng.random() < 0.3:
                time.sleep(rng.random() * longest_s)

    before_each_tensor(monkeypatch, late)


def held_writer(monkeypatch) -> threading.Event:
    """Hold the writer thread until the event is set."""
    may_write = threading.Event()
    before_each_tensor(monkeypatch, lambda _: may_write.wait(60))
    return may_write


def once(condition: Callable[[], object], work: Callable[[], object]) -> None:
    """Start a thread that works as soon as the condition holds."""

    def watch() -> None:
        while not condition():
            time.sleep(0.001)
        work()

    threading.Thread(target=watch, daemon=True).start()


@mostly_slow(("way", "copy_bytes"), [*((way, 160_000) for way in WAYS), ("deferred", 0), ("deferred", 10**9)])
def test_a_background_checkpoint_is_that_of_idle_lanes(tmp_path, monkeypatch, drained, way, copy_bytes):
    """Files of every step and the training are bitwise identical."""
    expected, idle = drained(way)
    late_writer(monkeypatch, snapshots := noticed(monkeypatch), seed=len(way))
    behind = run(in_way(tmp_path, way, copy_bytes=copy_bytes))
    files = files_of(tmp_path)
    assert len({name.split("/")[0] for name in expected}) == N_STEPS
    assert expected.keys() == files.keys()
    assert [name for name in expected if expected[name] != files[name]] == []
    assert same_state(behind, idle)
    assert n_met(snapshots[0]) >= N_STEPS - 1, "no update came before its block was written: nothing is shown"
    assert (snapshots[0].n_copied > 0) == (copy_bytes > 0)


# Lanes of the second machine only issue; its streams run late within the limits of their events
MACHINES = {"cpu": Slow, "late streams": lambda *args: Poisoned(*args, streams=LateStreams(seed=2, haste=0.3))}


@mostly_slow(
    ("way", "second_way", "first", "second"),
    [
        ("deferred", "barrier, one group", "cpu", "late streams"),
        ("on speculation, in vain", "deferred, one group", "late streams", "cpu"),
        ("barrier, one group", "deferred", "late streams", "late streams"),
    ],
)
def test_a_run_resumes_on_another_plan_and_machine_exactly(tmp_path, monkeypatch, drained, way, second_way, first, second):
    late_writer(monkeypatch, noticed(monkeypatch), seed=1, last=2)
    run(in_way(tmp_path, way, MACHINES[first], copy_bytes=60_000), 2)
    monkeypatch.undo()
    session = run(resumed(in_way(tmp_path, second_way, MACHINES[second], copy_bytes=0)))
    assert same_state(session, drained("barrier")[1])
    assert files_of(tmp_path) == drained("barrier")[0]


@mostly_slow("way", ["deferred, one group", "on speculation, taken", "eager"])
def test_with_memory_for_copies_at_most_one_update_waits(tmp_path, monkeypatch, drained, way):
    snapshots, may_write = noticed(monkeypatch), held_writer(monkeypatch)
    behind = in_way(tmp_path, way, every=2, copy_bytes=10**9)
    n_blocks = len(order_of_updates(behind.plan))
    once(lambda: snapshots and (snapshots[0].n_waited_for or n_met(snapshots[0]) >= n_blocks - 1), may_write.set)
    run(behind, 3)
    assert files_of(tmp_path).items() >= only(drained(way)[0], 2).items()
    assert snapshots[0].n_waited_for <= 1
    assert snapshots[0].n_copied >= n_blocks - 2


@mostly_slow("way", ["barrier", "eager", "on speculation, taken"])
def test_without_the_gate_a_checkpoint_would_be_torn(tmp_path, monkeypatch, drained, way):
    monkeypatch.setattr(Snapshots, "before_change", lambda self, block, workers: None)
    before_each_tensor(monkeypatch, lambda _: time.sleep(0.01))
    files = files_of(run(in_way(tmp_path, way, every=2), 3).folder)
    wrong = [name for name, content in only(drained(way)[0], 2).items() if content != files[name]]
    assert any("optimizer" in name for name in wrong)


def test_without_memory_for_a_copy_an_update_waits_for_its_block(tmp_path, monkeypatch):
    snapshots, may_write, copied, reached = noticed(monkeypatch), held_writer(monkeypatch), [], []
    monkeypatch.setattr(host_state.HostState, "copied", lambda *args: copied.append(args))
    let_go = lambda: (reached.append(snapshots[0].n_waited_for), may_write.set())  # noqa: E731
    once(lambda: snapshots and snapshots[0].n_waited_for, let_go)
    run(in_way(tmp_path, "deferred", every=2, copy_bytes=0), 3)
    assert reached == [1]
    assert not copied


def test_copies_never_take_more_memory_than_they_may(tmp_path, monkeypatch):
    alive, peak, copied, n_bytes = {}, 0, host_state.HostState.copied, 160_000

    def counted(self, block, workers):
        nonlocal peak
        copy = copied(self, block, workers)
        alive[id(copy)] = copy.nbytes
        weakref.finalize(copy, alive.pop, id(copy))
        peak = max(peak, sum(alive.values()))
        return copy

    monkeypatch.setattr(host_state.HostState, "copied", counted)
    late_writer(monkeypatch, noticed(monkeypatch), seed=2)
    run(in_way(tmp_path, "deferred, one group", copy_bytes=n_bytes))
    assert 0 < peak <= n_bytes
    assert alive == {}


def test_a_checkpoint_due_while_another_is_written_waits(tmp_path, monkeypatch, drained):
    """Only one message is printed."""
    messages: list[str] = []
    late_writer(monkeypatch, snapshots := noticed(monkeypatch), seed=1, longest_s=0.03)
    run(replace(in_way(tmp_path, "deferred", copy_bytes=10**9), say=messages.append))
    assert files_of(tmp_path) == drained("deferred")[0]
    assert snapshots[0].n_begun_late > 1
    assert len(messages) == 1
    assert "save less often" in messages[0]


def test_a_checkpoint_gets_its_name_once_its_step_is_logged(tmp_path, monkeypatch):
    logged, permit = list[int](), saver.Saver._permit

    def late(self, step):
        time.sleep(0.05)  # the files are already on disk
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step
        assert step in logged or step not in steps_of(tmp_path)
        logged.append(step)
        permit(self, step)

    monkeypatch.setattr(saver.Saver, "_permit", late)
    run(in_way(tmp_path, "barrier"))
    assert sorted(set(logged)) == steps_of(tmp_path) == list(range(1, N_STEPS + 1))


@mostly_slow(("n_files", "background"), [(1, True), (6, False), (8, True)])
def test_a_disk_that_fills_up_ends_the_run_and_it_resumes(tmp_path, monkeypatch, drained, n_files, background):
    fsync, n_calls = saver.os.fsync, 0

    def full(descriptor):
        nonlocal n_calls
        if (tmp_path / "checkpoint-3.partial").exists():
            n_calls += 1
            if n_calls >= n_files:
                raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"(checkpoint-3|jsonl): cannot be written \(No space left on device\); make room"):
        run(in_way(tmp_path, "deferred", copy_bytes=60_000, background=background))
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.partial"))
    assert files_of(tmp_path) == only(drained("deferred")[0], 1, 2)
    session = run(resumed(in_way(tmp_path, "deferred")))
    assert files_of(tmp_path) == drained("deferred")[0]
    assert same_state(session, drained("deferred")[1])


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_by_time_is_replaced_by_the_next(tmp_path, drained, background):
    timed = run(in_way(tmp_path, "deferred", every=3, background=background, minutes=1e-9))
    assert files_of(tmp_path) == only(drained("deferred")[0], 3, 4)
    assert same_state(timed, drained("deferred")[1])


@pytest.mark.parametrize("background", [True, False])
def test_weights_alone_are_a_checkpoints_model_and_not_resumed(tmp_path, drained, background):
    run(in_way(tmp_path, "deferred", weights_only=True, background=background))
    files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in tmp_path.glob("checkpoint-*/*")}
    state = [name for name in files if name.endswith("trainer_state.json")]
    expected = {name: content for name, content in drained("deferred")[0].items() if "optimizer-" not in name and name not in state}
    assert {name: content for name, content in files.items() if name not in state} == expected
    with pytest.raises(CheckpointError, match=r"checkpoint-4: the model's weights alone .*--model .*checkpoint-4"):
        load_state(tmp_path / "checkpoint-4")


def test_a_fault_in_the_thread_ends_the_run_as_what_it_is(tmp_path, monkeypatch):
    def broken(_):
        raise KeyError("ours")

    before_each_tensor(monkeypatch, broken)
    with pytest.raises(KeyError, match="ours"):
        run(in_way(tmp_path, "deferred"))
    assert not list(tmp_path.glob("checkpoint-*"))


class Fails(Hostile):
    def perform(self, index, op, step):
        if step == 3 and op.kind is Kind.LOSS:
            raise OSError("gone")
        super().perform(index, op, step)


def test_a_run_that_fails_still_ends_the_checkpoint_it_writes(tmp_path, monkeypatch, drained):
    before_each_tensor(monkeypatch, lambda _: time.sleep(0.01))
    with pytest.raises(RuntimeError, match="loss gpu"):
        run(in_way(tmp_path, "barrier", Fails, every=3))
    assert files_of(tmp_path) == only(drained("barrier")[0], 3)


def test_an_interrupt_waits_for_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    may_write, snapshots = held_writer(monkeypatch), noticed(monkeypatch)
    old_threads, lanes_ended = set(threading.enumerate()), []  # a machine of another test may still have threads

    def lanes():
        return [t for t in set(threading.enumerate()) - old_threads if t.name.startswith("lane")]

    def interrupt(metrics):
        while not snapshots[0].n_waited_for:  # a lane waits for the writer thread's block
            time.sleep(0.001)
        until_s = time.perf_counter() + 20  # the writer thread is inside a tensor until the lanes have ended
        let_go = lambda: (lanes_ended.append(not lanes()), may_write.set())  # noqa: E731
        once(lambda: not lanes() or time.perf_counter() > until_s, let_go)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(in_way(tmp_path, "deferred", copy_bytes=0), 5, interrupt)
    assert list(tmp_path.glob("checkpoint-*")) == []
    assert lanes_ended == [True], "a lane waited for a snapshot that is given up"
    assert set(threading.enumerate()) <= old_threads
    assert complete_checkpoints(tmp_path) == []
