"""Loading: batches that a thread makes ahead are the batches that would be made when they are needed."""

import os
import threading
from pathlib import Path

import pytest

from penstock.data.loader import Loader
from runtime.errors import DataError
from tests.bytes_of_files import read, same, write_lines


@pytest.fixture
def path(tmp_path):
    asked = ({"role": "user", "content": "q" * (i % 7)} for i in range(40))
    rows = ({"messages": [ask, {"role": "assistant", "content": f"a{i}"}]} for i, ask in enumerate(asked))
    return write_lines(tmp_path / "data.jsonl", rows)


def loader(path: Path, workers: int, **fields: object) -> Loader:
    return read(path, 64, 4, 3, True, packing="documents", workers=workers, shuffle_buffer=7, **fields)


def makers() -> list[threading.Thread]:
    """The threads that make batches."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("data")]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_thread_changes_nothing_and_ends_with_its_data(path, streaming):
    plain, ahead = (loader(path, n, streaming=streaming) for n in (0, 2))
    assert (ahead.fingerprint, ahead.n_steps, ahead.position(0)) == (plain.fingerprint, plain.n_steps, plain.position(0))
    assert all(same(ahead.batch(step), plain.batch(step)) for step in range(9))
    assert len(makers()) == 1
    assert same(ahead.batch(4), plain.batch(4)), "and one long gone"
    assert len(makers()) == 1, "the thread that was ahead has ended"
    ahead.resume(5, plain.position(5))
    assert all(same(ahead.batch(step), plain.batch(step)) for step in range(5, 9))
    assert ahead.position(7) == plain.position(7), "of a step that is done, whatever was made ahead"
    ahead.close()
    assert makers() == []


def test_what_is_wrong_with_a_row_is_said_when_its_step_comes(path):
    path.write_text(path.read_text() + '{"messages": 3}\n')
    failing = loader(path, 1, streaming=True, shuffle=False)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^/.*data\.jsonl:41: no list under"):
            [failing.batch(step) for step in range(99)]
    with pytest.raises(DataError, match=r":41: no list under"):
        failing.batch(failing._next)
    assert makers() == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core all have the same")
def test_the_thread_has_the_cores_of_the_run(path):
    """Not the only core of the lane that asks first."""
    cores, found = os.sched_getaffinity(0), []
    ahead = loader(path, 2)

    def ask() -> None:
        os.sched_setaffinity(0, {min(cores)})
        ahead.batch(0)
        found.extend(os.sched_getaffinity(thread.native_id) for thread in makers())

    lane = threading.Thread(target=ask)
    lane.start()
    lane.join()
    ahead.close()
    assert found == [cores]
