"""Loading: batches that other processes make ahead are the batches that this one would make."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.data.loader import Loader
from runtime.errors import DataError
from tests.bytes_of_files import read, same, write_lines
from tests.tour import ROOT


@pytest.fixture
def path(tmp_path):
    asked = ({"role": "user", "content": "q" * (i % 7)} for i in range(40))
    rows = ({"messages": [ask, {"role": "assistant", "content": f"a{i}"}]} for i, ask in enumerate(asked))
    return write_lines(tmp_path / "data.jsonl", rows)


def loader(path: Path, workers: int, **fields: object) -> Loader:
    return read(path, 64, 4, 3, True, packing="documents", workers=workers, shuffle_buffer=7, **fields)


def children() -> set[int]:
    """Processes of this one; not the one that multiprocessing keeps to tidy up."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or a process has ended meanwhile: once more
            found = {int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()}
            return {pid for pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


def no_fork(*_: object) -> None:
    raise AssertionError("a fork")


@pytest.mark.soak
def test_workers_change_nothing_and_nothing_forks(path, monkeypatch):
    """Whatever is started has the cores of the run, and one that is killed is one line."""
    monkeypatch.setattr(os, "fork", no_fork)
    plain, ahead = loader(path, 0), loader(path, 2)
    assert (ahead.fingerprint, ahead.n_steps, ahead.position(0)) == (plain.fingerprint, plain.n_steps, plain.position(0))
    before, cores = children(), os.sched_getaffinity(0)
    lane = threading.Thread(target=lambda: (os.sched_setaffinity(0, {min(cores)}), ahead.batch(0)))
    lane.start()
    lane.join()
    workers = children() - before
    assert len(workers) == 2
    assert all(os.sched_getaffinity(pid) == cores for pid in workers), "workers do not share a lane's only core"
    assert all(same(ahead.batch(step), plain.batch(step)) for step in range(1, 9))
    assert same(ahead.batch(4), plain.batch(4)), "and one long gone"
    for pid in children() - before:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a process that prepares batches ended") as caught:
        [ahead.batch(step) for step in range(5, 99)]
    assert len(str(caught.value).splitlines()) == 1
    ahead.close()
    assert children() <= before


def test_a_stream_is_read_ahead_and_resumed_where_it_was(path):
    plain, ahead, before = loader(path, 0, streaming=True), loader(path, 2, streaming=True), children()
    assert ahead.n_steps is plain.n_steps is None
    assert all(same(ahead.batch(step), plain.batch(step)) for step in range(9))
    assert len(children() - before) == 1, "by one process"
    ahead.resume(5, plain.position(5))
    assert all(same(ahead.batch(step), plain.batch(step)) for step in range(5, 9))
    path.write_text(path.read_text() + '{"messages": 3}\n')
    failing = loader(path, 1, streaming=True, shuffle=False)
    with pytest.raises(DataError, match=r"^/.*data\.jsonl:41: no list under"):
        [failing.batch(step) for step in range(99)]
    ahead.close()
    gc.collect()  # the error holds the frames of the loader that failed
    assert children() <= before


RUN = """
import os, sys, time
from pathlib import Path
from tests.penstock.data.test_loader import loader, no_fork
if __name__ == "__main__":
    os.fork = no_fork
    data = loader(Path(sys.argv[1]), 2, streaming=True)
    assert data.batch(0).n_supervised
    print(*(open(f"/proc/{os.getpid()}/task/{t}/children").read() for t in os.listdir("/proc/self/task")), flush=True)
    time.sleep(600)
"""


@pytest.mark.soak
def test_a_worker_ends_when_the_run_is_killed(path):
    script = path.with_name("run.py")
    script.write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, script, path], cwd=ROOT, stdout=subprocess.PIPE, env=environment)
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert pids
    run.kill()
    run.communicate()
    while any(Path(f"/proc/{pid}").exists() and b"Z" not in Path(f"/proc/{pid}/stat").read_bytes() for pid in pids):
        time.sleep(0.1)
