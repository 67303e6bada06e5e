"""Are batches that other processes make ahead the batches that this one would make?"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.data import prefetch
from penstock.data.data import Data, read_data
from penstock.data.prefetch import Prefetched
from penstock.settings import DataSettings
from runtime.errors import DataError
from tests.tour import ROOT


@pytest.fixture
def path(tmp_path):
    rows = (
        {"messages": [{"role": "user", "content": "q" * (i % 7)}, {"role": "assistant", "content": f"a{i}"}]} for i in range(40)
    )
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(path: Path, workers: int, **fields: object) -> Data:
    settings = DataSettings(str(path), packing="documents", workers=workers, shuffle_buffer=7, **fields)
    return read_data(settings, None, 300, 64, 4, 3, path.parent / "cache", by_document=True)


def same(data: Data, other: Data, step: int) -> bool:
    a, b = data.batch(step), other.batch(step)
    tensors = torch.equal(a.input_ids, b.input_ids) and torch.equal(a.targets, b.targets)
    return tensors and a.document_tokens == b.document_tokens and data.position(step + 1) == other.position(step + 1)


def children() -> set[int]:
    """Processes of this one, the processes of templates and all; not the one that multiprocessing keeps to tidy up."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or a process has ended meanwhile: once more
            found = {int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()}
            return {pid for pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.fixture
def alone():
    """Whatever a test starts has ended when it ends."""
    before = children()
    yield
    assert children() <= before
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]


def no_fork(*_):
    raise AssertionError("a fork")


@pytest.fixture
def at_hand(monkeypatch):
    """The loader without its processes, which take seconds to start: batches come from the flow's own thread."""
    monkeypatch.setattr(prefetch, "DataLoader", lambda steps, **_: pickle.loads(pickle.dumps(steps)))


@pytest.mark.soak
@pytest.mark.usefixtures("alone")
def test_workers_change_nothing_nothing_forks_and_one_that_is_killed_is_one_line(path, monkeypatch):
    monkeypatch.setattr(os, "fork", no_fork)
    plain, ahead = read(path, 0), read(path, 2)
    assert isinstance(ahead, Prefetched)
    assert (ahead.fingerprint, ahead.n_steps, ahead.n_sequences) == (plain.fingerprint, plain.n_steps, plain.n_sequences)
    assert ahead.position(0) == plain.position(0)
    before, cores = children(), os.sched_getaffinity(0)
    lane = threading.Thread(target=lambda: (os.sched_setaffinity(0, {min(cores)}), ahead.batch(0)))
    lane.start()
    lane.join()
    workers = children() - before
    assert len(workers) == 2
    assert all(os.sched_getaffinity(pid) == cores for pid in workers), "workers do not share a lane's only core"
    assert all(same(ahead, plain, step) for step in range(9))
    assert same(ahead, plain, 8), "the last once more"
    assert ahead.words() == plain.words() | {"prepared": "ahead by 2 other processes"}
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a process that prepares batches ended") as caught:
        until_it_fails(ahead, 9)
    assert len(str(caught.value).splitlines()) == 1
    ahead.close()
    ahead.close()


@pytest.mark.usefixtures("alone", "at_hand")
@pytest.mark.parametrize("streaming", [False, True])
def test_only_so_many_batches_wait(path, streaming):
    ahead = read(path, 2, streaming=streaming)
    ahead.batch(0)
    flow = ahead._flow
    while not flow.arrived.full():
        time.sleep(0.01)
    assert flow.arrived.qsize() == flow.arrived.maxsize
    ahead.close()


@pytest.mark.usefixtures("alone", "at_hand")
def test_a_stream_that_is_read_ahead_is_resumed_where_it_was(path):
    plain, ahead = read(path, 0, streaming=True), read(path, 2, streaming=True)
    assert ahead.n_steps is plain.n_steps is None
    assert ahead.position(0) == plain.position(0)
    assert all(same(ahead, plain, step) for step in range(9))
    position = plain.position(5)
    assert ahead.position(5) == position
    ahead.resume(5, position)
    assert ahead.position(5) == position
    assert all(same(ahead, plain, step) for step in range(5, 12))
    assert same(ahead, plain, 8), "and one long gone"
    assert ahead.data.counts.n_documents == 0, "the run itself reads nothing"
    ahead.close()


def until_it_fails(data: Data, first_step: int = 0) -> None:
    for step in range(first_step, 99):
        data.batch(step)


@pytest.mark.usefixtures("alone", "at_hand")
def test_what_is_wrong_in_the_data_is_said_as_it_would_be_here(path):
    with path.open("a") as file:
        file.write('{"messages": 3}\n')
    plain, ahead = read(path, 0, streaming=True, shuffle=False), read(path, 1, streaming=True, shuffle=False)
    said = []
    for data in (plain, ahead):
        with pytest.raises(DataError) as caught:
            until_it_fails(data)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "data.jsonl:41: no list" in said[0]
    with pytest.raises(DataError, match=r"data\.jsonl:41"):
        ahead.batch(ahead._flow.next_step)
    ahead.close()


@pytest.mark.soak
def test_a_stream_is_read_in_a_process_of_its_own_that_ends_when_the_run_is_killed(path):
    code = (
        "import json, os, sys, time\nfrom pathlib import Path\n"
        "from penstock.data.data import read_data\nfrom penstock.settings import DataSettings\n"
        "def no_fork(*_): raise AssertionError('a fork')\n"
        "if __name__ == '__main__':\n"
        "    os.fork = no_fork\n"
        "    settings = DataSettings(sys.argv[1], workers=2, streaming=True, packing='documents', shuffle_buffer=7)\n"
        "    data = read_data(settings, None, 300, 64, 4, 3, Path(sys.argv[2]), by_document=True)\n"
        "    seen = [(data.batch(step).input_ids.tolist(), data.position(step + 1)) for step in range(9)]\n"
        "    assert data.data.counts.n_documents == 0, 'the run itself reads nothing'\n"
        "    print(json.dumps(seen))\n"
        "    print(*(open(f'/proc/{os.getpid()}/task/{t}/children').read() for t in os.listdir('/proc/self/task')), flush=True)\n"
        "    time.sleep(600)\n"
    )
    script = path.parent / "run.py"
    script.write_text(code)
    run = subprocess.Popen(
        [sys.executable, script, path, path.parent / "cache"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    plain = read(path, 0, streaming=True)
    assert json.loads(run.stdout.readline()) == [[plain.batch(s).input_ids.tolist(), plain.position(s + 1)] for s in range(9)]
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert pids
    run.kill()
    run.communicate()
    while any(Path(f"/proc/{pid}").exists() and b"Z" not in Path(f"/proc/{pid}/stat").read_bytes() for pid in pids):
        time.sleep(0.1)
