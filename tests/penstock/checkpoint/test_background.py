"""Is a checkpoint that is written while training goes on the state between two steps, and training none the worse for it?"""

import math
import random
import threading
import time
import weakref
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from penstock.checkpoint import background, room
from penstock.checkpoint.checkpoint import load_state, whole
from penstock.checkpoint.saving import Writing
from penstock.checkpoint.snapshot import Snapshots, order_of_updates
from penstock.settings import CheckpointSettings
from penstock.training.trainer import Training
from runtime.errors import CheckpointError
from runtime.host import host_state
from runtime.plan import Kind, Policy, Update
from tests.accidents import in_time
from tests.late_streams import LateStreams, Poisoned
from tests.row_of_tokens import RowOfTokens
from tests.tiny import tiny_config
from tests.training import Hostile, plan_of, same_bits, scheduled, semantics_of, state_of

N_STEPS = 4
SPECULATING = Policy(update=Update.DEFERRED, speculate_blocks=(0, 1, 3), accumulation_group=4)
ONE_GROUP = Policy(update=Update.DEFERRED, accumulation_group=4)
WAYS = {
    "barrier": ("llama", Policy(), {}),
    "deferred": ("llama", Policy(update=Update.DEFERRED), {}),
    "eager": ("llama", Policy(update=Update.EAGER, accumulation_group=4), {"clip_norm": None}),
    "deferred, one group": ("llama", ONE_GROUP, {}),
    "on speculation, in vain": ("llama", SPECULATING, {}),
    "on speculation, taken": ("llama", SPECULATING, {"clip_norm": 100.0}),
    "barrier, one group": ("llama", Policy(accumulation_group=4), {}),
    "layers on speculation, taken": ("llama", replace(ONE_GROUP, speculate_blocks=(1, 2)), {"clip_norm": 100.0}),
    "tied": ("gemma2", Policy(update=Update.DEFERRED, accumulation_group=4), {}),
    "state on the device": ("llama", replace(ONE_GROUP, device_blocks=(1, 2)), {}),
    "one layer's, the other on speculation": (
        "llama",
        replace(ONE_GROUP, device_blocks=(1,), speculate_blocks=(2,)),
        {"clip_norm": 100.0},
    ),
    "bf16 master": ("llama", ONE_GROUP, {"master_dtype": "bf16"}),
    "fp32": ("llama", SPECULATING, {"compute_dtype": "fp32", "gradient_dtype": "fp32"}),
    "experts": ("mixtral", replace(ONE_GROUP, speculate_blocks=(1,)), {"clip_norm": 100.0}),
    "experts, eager": ("qwen3_moe", Policy(update=Update.EAGER, accumulation_group=4), {"clip_norm": None}),
}


class Slow(Hostile):
    """Every lane is late now and then; the seed says when."""

    def __init__(self, *args) -> None:
        super().__init__(*args, delay_seed=3)


def training(folder: Path, way: str, every: int | None = 1, machine_type=Slow, **settings) -> Training:
    model_type, policy, fields = WAYS[way]
    plan = plan_of(tiny_config(model_type), semantics_of(model_type, **fields), policy)
    ids = np.random.default_rng(5).integers(0, 96, 16 * 50, dtype=np.uint16)
    tokens = RowOfTokens(ids, seq_len=16, batch_size=4, pad_id=0, shuffle_seed=3)
    machine = machine_type(plan, tokens.batch, scheduled)
    machine.initialise(7)
    folder.mkdir(exist_ok=True)
    return Training(plan, machine, machine, tokens, 0, folder, True, checkpoint=CheckpointSettings(every=every, **settings))


def run(of: Training, n_steps: int = N_STEPS) -> Training:
    in_time(lambda: of.run(0, n_steps, lambda metrics: None))
    return of


def files_of(folder: Path) -> dict[str, bytes]:
    """Of all checkpoints, which must be whole."""
    for _, path in whole(folder):
        load_state(path)
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.glob("checkpoint-*/*")}


def same_state(a: Training, b: Training) -> bool:
    return all(same_bits(x[name], y[name]) for x, y in zip(state_of(a.store), state_of(b.store), strict=True) for name in y)


@pytest.fixture(scope="module")
def drained(tmp_path_factory):
    """Of each way, what a run leaves that saves after every step, all lanes idle: its files by checkpoint, and its last state."""

    @lru_cache
    def left_by(way: str) -> tuple[dict[str, bytes], Training]:
        done = run(training(tmp_path_factory.mktemp("drained"), way, background=False))
        return files_of(done.folder), done

    return left_by


def only(files: dict[str, bytes], *steps: int) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.split("/")[0] in [f"checkpoint-{n}" for n in steps]}


def noticed(monkeypatch) -> list[Snapshots]:
    """The snapshots of the runs to come."""
    made = []

    class Noticed(Snapshots):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.met_before: dict[int, int] = {}  # by step: what `n_met` was when its snapshot began
            made.append(self)

        def _begin(self, step: int) -> None:
            self.met_before[step] = n_met(self)
            super()._begin(step)

    monkeypatch.setattr(background, "Snapshots", Noticed)
    return made


def late_writer(monkeypatch, snapshots: list[Snapshots], seed: int, longest_s: float = 0.002, last: int = N_STEPS) -> None:
    """The thread that writes begins to when the next step has come to its first update, and is late now and then after that."""
    rng, put, begun = random.Random(seed), Writing.put, {last}  # after which no update comes

    def late(self, name, tensor):
        if threading.current_thread().name == "saver":
            met, until_s = snapshots[0].met_before[self.step], time.perf_counter() + 60
            while self.step not in begun and n_met(snapshots[0]) == met and time.perf_counter() < until_s:
                time.sleep(0.0005)
            begun.add(self.step)
            if rng.random() < 0.3:
                time.sleep(rng.random() * longest_s)
        put(self, name, tensor)

    monkeypatch.setattr(Writing, "put", late)


def n_met(snapshots: Snapshots) -> int:
    """How many updates came before their block was written."""
    return snapshots.n_copied + snapshots.n_waited_for


SOME = ("deferred", "deferred, one group", "on speculation, in vain")


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    ("way", "copy_bytes"), [*((way, 160_000) for way in WAYS), *((way, n_bytes) for way in SOME for n_bytes in (0, 10**9))]
)
def test_what_is_written_in_the_background_is_what_is_written_while_all_lanes_are_idle(
    tmp_path, monkeypatch, drained, way, copy_bytes
):
    """To the last bit, of every step; and what training itself does is the same."""
    expected, idle = drained(way)
    late_writer(monkeypatch, snapshots := noticed(monkeypatch), seed=len(way))
    behind = run(training(tmp_path, way, copy_bytes=copy_bytes))
    found = files_of(tmp_path)
    assert len({name.split("/")[0] for name in expected}) == N_STEPS
    assert expected.keys() == found.keys()
    assert [name for name in expected if expected[name] != found[name]] == []
    assert same_state(behind, idle)
    assert n_met(snapshots[0]) >= N_STEPS - 1, "no update came before its block was written: nothing is shown"
    assert (snapshots[0].n_copied > 0) == (copy_bytes > 0)


def on_late_streams(*args) -> Poisoned:
    """A device whose lanes only issue, and whose streams are as late as events allow."""
    return Poisoned(*args, streams=LateStreams(seed=2, haste=0.3))


MACHINES = {"cpu": Slow, "late streams": on_late_streams}


@pytest.mark.fast("some")
@pytest.mark.parametrize("second", MACHINES)
@pytest.mark.parametrize("first", MACHINES)
@pytest.mark.parametrize(
    ("way", "other"),
    [
        ("deferred", "barrier, one group"),
        ("on speculation, in vain", "deferred, one group"),
        ("barrier, one group", "deferred"),
    ],
)
def test_a_run_goes_on_to_the_same_bits_under_another_plan_and_on_another_machine(
    tmp_path, monkeypatch, drained, way, other, first, second
):
    """And each of them writes, in the background, what the others do."""
    late_writer(monkeypatch, noticed(monkeypatch), seed=1, last=2)
    run(training(tmp_path, way, machine_type=MACHINES[first], copy_bytes=60_000), 2)
    monkeypatch.undo()
    after = training(tmp_path, other, machine_type=MACHINES[second], copy_bytes=0)
    after.resume(load_state(tmp_path / "checkpoint-2"))
    in_time(lambda: after.run(2, N_STEPS, lambda metrics: None))
    assert same_state(after, drained("barrier")[1])
    assert files_of(tmp_path) == drained("barrier")[0]


def held_writer(monkeypatch, until: threading.Event) -> None:
    """Nothing is written before `until`."""
    put = Writing.put

    def late(self, name, tensor):
        until.wait(60)
        put(self, name, tensor)

    monkeypatch.setattr(Writing, "put", late)


def slow_writer(monkeypatch) -> None:
    put = Writing.put
    monkeypatch.setattr(Writing, "put", lambda self, name, tensor: (time.sleep(0.01), put(self, name, tensor)))


@pytest.mark.parametrize("way", ["deferred, one group", "on speculation, taken", "eager"])
def test_where_there_is_memory_for_copies_updates_wait_for_one_block_at_most(tmp_path, monkeypatch, drained, way):
    """That which is in the writer's hands when its update comes: all others are copied, though nothing is written yet."""
    snapshots, may_write = noticed(monkeypatch), threading.Event()
    held_writer(monkeypatch, may_write)
    behind = training(tmp_path, way, every=2, copy_bytes=10**9)
    n_blocks = len(order_of_updates(behind.plan))

    def let_go():
        while not snapshots or n_met(snapshots[0]) < n_blocks - (snapshots[0].n_waited_for == 0):
            time.sleep(0.001)
            if snapshots and snapshots[0].n_waited_for:
                break
        may_write.set()

    threading.Thread(target=let_go, daemon=True).start()
    run(behind, 3)
    assert files_of(tmp_path).items() >= only(drained(way)[0], 2).items()
    assert snapshots[0].n_waited_for <= 1
    assert snapshots[0].n_copied >= n_blocks - 2


@pytest.mark.fast("some")
@pytest.mark.parametrize("way", ["barrier", "eager", "on speculation, taken"])
def test_without_the_gate_the_law_would_be_seen_to_be_broken(tmp_path, monkeypatch, drained, way):
    """What the tests above show, they show of the gate: where updates do not ask, what is written is no state of any step."""
    monkeypatch.setattr(Snapshots, "before_change", lambda self, block, workers: None)
    slow_writer(monkeypatch)
    found = files_of(run(training(tmp_path, way, every=2), 3).folder)
    wrong = [name for name, content in only(drained(way)[0], 2).items() if content != found[name]]
    assert any("optimizer" in name for name in wrong)


def test_an_update_waits_for_its_block_where_there_is_no_memory_for_a_copy(tmp_path, monkeypatch):
    """And no other waits: those before it in the order of updates are written by then."""
    snapshots, may_write, copied = noticed(monkeypatch), threading.Event(), []
    held_writer(monkeypatch, may_write)
    monkeypatch.setattr(host_state.HostState, "copied", lambda *args: copied.append(args))
    behind = training(tmp_path, "deferred", every=2, copy_bytes=0)
    reached = []

    class Watch(threading.Thread):
        def run(self) -> None:
            while not snapshots or not snapshots[0].n_waited_for:
                time.sleep(0.001)
            reached.append(snapshots[0].n_waited_for)
            may_write.set()

    watch = Watch(daemon=True)
    watch.start()
    run(behind, 3)
    watch.join(10)
    assert reached == [1]
    assert not copied


def test_memory_that_is_short_after_all_makes_updates_wait(tmp_path, monkeypatch, drained):
    """The system had it when the run began, and refuses now."""
    late_writer(monkeypatch, snapshots := noticed(monkeypatch), seed=4)

    def refuse(n_bytes):
        raise MemoryError

    monkeypatch.setattr(host_state, "host_slab", refuse)
    run(training(tmp_path, "barrier, one group", copy_bytes=10**9))
    assert files_of(tmp_path) == drained("barrier, one group")[0]
    assert snapshots[0].n_copied == 0 < snapshots[0].n_waited_for


@pytest.mark.fast("some")
@pytest.mark.parametrize("n_bytes", [40_000, 160_000, 300_000])
def test_copies_never_take_more_memory_than_they_may(tmp_path, monkeypatch, n_bytes):
    alive, most, copied = {}, 0, host_state.HostState.copied

    def counted(self, block, workers):
        nonlocal most
        copy = copied(self, block, workers)
        alive[id(copy)] = copy.nbytes
        weakref.finalize(copy, alive.pop, id(copy))
        most = max(most, sum(alive.values()))
        return copy

    monkeypatch.setattr(host_state.HostState, "copied", counted)
    late_writer(monkeypatch, noticed(monkeypatch), seed=2)
    run(training(tmp_path, "deferred, one group", copy_bytes=n_bytes))
    assert 0 < most <= n_bytes
    assert alive == {}


def test_a_checkpoint_that_is_due_while_another_is_written_waits_and_that_is_said_once(tmp_path, monkeypatch, drained):
    said: list[str] = []
    late_writer(monkeypatch, snapshots := noticed(monkeypatch), seed=1, longest_s=0.03)
    run(replace(training(tmp_path, "deferred", copy_bytes=10**9), say=said.append))
    assert files_of(tmp_path) == drained("deferred")[0]
    assert snapshots[0].n_begun_late > 1
    assert len(said) == 1
    assert "save less often" in said[0]


def test_a_checkpoint_gets_its_name_only_when_its_step_is_logged(tmp_path, monkeypatch):
    """Else a run that is killed in between would go on with a line missing."""
    behind = training(tmp_path, "barrier")
    permitted: list[int] = []
    original = background.Saver.permit

    def permit(self, step):
        time.sleep(0.05)  # the files are on disk long before
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step
        assert step in permitted or step not in [at for at, _ in whole(tmp_path)]
        permitted.append(step)
        original(self, step)

    monkeypatch.setattr(background.Saver, "permit", permit)
    run(behind)
    assert sorted(set(permitted)) == list(range(1, N_STEPS + 1))
    assert [step for step, _ in whole(tmp_path)] == list(range(1, N_STEPS + 1))


@pytest.mark.fast("some")
@pytest.mark.parametrize("n_files", [1, 2, 6, 8])
def test_a_disk_that_fills_up_meanwhile_puts_the_save_off_and_training_goes_on(tmp_path, monkeypatch, drained, n_files):
    """Nothing half written is left, the room of it is free, and what is saved in the end is the state that it would have been."""
    fsync, n_calls, said, steps = background.os.fsync, 0, list[str](), list[int]()
    behind = replace(training(tmp_path, "deferred", every=2, copy_bytes=60_000), say=said.append)

    def full(descriptor):
        nonlocal n_calls
        if threading.current_thread().name == "saver" and (tmp_path / "checkpoint-2.partial").exists():
            n_calls += 1
            if n_calls == n_files:
                raise OSError(28, "No space left on device")
        fsync(descriptor)

    def told(metrics):
        until_s = time.perf_counter() + 20
        while metrics.step == N_STEPS - 1 and not said and time.perf_counter() < until_s:
            time.sleep(0.001)
        steps.append(metrics.step)

    monkeypatch.setattr("os.fsync", full)
    in_time(lambda: behind.run(0, N_STEPS, told))
    assert steps == [*range(1, N_STEPS + 1)]
    assert [line.split(": ")[1] for line in said] == ["not written yet", "checkpoint-4 is written"]
    assert files_of(tmp_path) == only(drained("deferred")[0], 4)
    assert not list(tmp_path.glob("*.partial"))
    assert same_state(behind, drained("deferred")[1])


class FullDisk:
    """A disk on which nothing more than the log can be written; how often that was tried, and until when it is so."""

    def __init__(self, monkeypatch, n_times: float) -> None:
        self.n_times, self.n_tried, begin = n_times, 0, Writing.begin

        def refused(writing):
            begin(writing)
            self.n_tried += 1
            if self.n_tried <= self.n_times:
                raise OSError(122, "Disk quota exceeded")

        monkeypatch.setattr(Writing, "begin", refused)
        monkeypatch.setattr(room, "POLL_S", 0.001)
        monkeypatch.setattr(room, "LONGEST_PAUSE_S", 0.001)


@pytest.mark.parametrize("behind", [True, False])
def test_a_run_whose_last_save_finds_no_room_waits_for_it(tmp_path, monkeypatch, drained, behind):
    disk, said = FullDisk(monkeypatch, 3), list[str]()
    run(replace(training(tmp_path, "barrier", every=None, background=behind), say=said.append))
    assert disk.n_tried == 4
    assert files_of(tmp_path) == only(drained("barrier")[0], N_STEPS)
    assert "the run waits until there is room" in said[-2]
    assert said[-1] == "there was room again: checkpoint-4 is written"


@pytest.mark.parametrize("behind", [True, False])
def test_who_asks_for_the_end_while_a_run_waits_for_room_gets_it_and_the_checkpoint_before_stands(tmp_path, monkeypatch, behind):
    run(training(tmp_path, "barrier", every=None), 2)
    FullDisk(monkeypatch, math.inf)
    after = training(tmp_path, "barrier", every=None, background=behind)
    after = replace(after, say=lambda words: threading.Timer(0.05, after.stop.request).start())
    after.resume(load_state(tmp_path / "checkpoint-2"))
    with pytest.raises(room.NoRoomError, match=r"checkpoint-4: not written: .* go on with --resume"):
        in_time(lambda: after.run(2, N_STEPS, lambda metrics: None))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    load_state(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("behind", [True, False])
def test_a_state_is_saved_when_it_is_time_and_the_next_takes_its_place(tmp_path, drained, behind):
    """Those that were asked for by number stay, and no bit depends on the clock."""
    timed = run(training(tmp_path, "deferred", every=3, background=behind, minutes=1e-9))
    assert [step for step, _ in whole(tmp_path)] == [3, 4]
    assert files_of(tmp_path) == only(drained("deferred")[0], 3, 4)
    assert same_state(timed, drained("deferred")[1])


@pytest.mark.parametrize("behind", [True, False])
def test_weights_alone_are_the_model_that_a_whole_checkpoint_holds_and_are_not_resumed(tmp_path, drained, behind):
    run(training(tmp_path, "deferred", weights_only=True, background=behind))
    found = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in tmp_path.glob("checkpoint-*/*")}
    state = [name for name in found if name.endswith("trainer_state.json")]
    expected = {name: content for name, content in drained("deferred")[0].items() if "optimizer-" not in name and name not in state}
    assert {name: content for name, content in found.items() if name not in state} == expected
    with pytest.raises(CheckpointError, match=r"checkpoint-4: the model's weights alone .*--model .*checkpoint-4"):
        load_state(tmp_path / "checkpoint-4")


def test_a_fault_of_our_own_in_the_thread_ends_the_run_as_what_it_is(tmp_path, monkeypatch):
    def broken(self, name, tensor):
        raise KeyError("ours")

    monkeypatch.setattr(Writing, "put", broken)
    with pytest.raises(KeyError, match="ours"):
        run(training(tmp_path, "deferred"))
    assert not list(tmp_path.glob("checkpoint-*"))


class Fails(Slow):
    def perform(self, index, op, step):
        if step == 3 and op.kind is Kind.LOSS:
            raise OSError("gone")
        super().perform(index, op, step)


def test_a_run_that_fails_still_ends_the_checkpoint_that_is_being_written(tmp_path, monkeypatch, drained):
    """Its state is kept until it is written, whatever the lanes do meanwhile."""
    slow_writer(monkeypatch)
    with pytest.raises(RuntimeError, match="loss gpu"):
        run(training(tmp_path, "barrier", every=3, machine_type=Fails))
    assert [step for step, _ in whole(tmp_path)] == [3]
    assert files_of(tmp_path) == only(drained("barrier")[0], 3)


def test_after_an_interrupt_nothing_is_waited_for_and_nothing_half_written_is_left(tmp_path, monkeypatch):
    held_writer(monkeypatch, may_write := threading.Event())
    snapshots, others = noticed(monkeypatch), set(threading.enumerate())  # a machine of another test may still have its own

    lanes_ended = []

    def lanes():
        return [t for t in set(threading.enumerate()) - others if t.name.startswith("lane")]

    def let_go():  # the thread that writes is in the midst of a tensor until then
        until_s = time.perf_counter() + 20
        while lanes() and time.perf_counter() < until_s:
            time.sleep(0.002)
        lanes_ended.append(not lanes())
        may_write.set()

    def interrupt(metrics):
        while not snapshots[0].n_waited_for:  # a lane waits for what the thread has in hand
            time.sleep(0.001)
        threading.Thread(target=let_go, daemon=True).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_time(lambda: training(tmp_path, "deferred", every=1, copy_bytes=0).run(0, 5, interrupt))
    assert list(tmp_path.glob("checkpoint-*")) == []
    assert lanes_ended == [True], "a lane waited for what nobody wants any more"
    assert set(threading.enumerate()) <= others
