"""Loading: batches are those of their steps, in whatever order they are asked for."""

from pathlib import Path

import pytest

from penstock.data.data import RunData
from runtime.errors import DataError
from tests.bytes_of_files import read, same, write_lines


@pytest.fixture
def path(tmp_path):
    asked = ({"role": "user", "content": "q" * (i % 7)} for i in range(40))
    rows = ({"messages": [ask, {"role": "assistant", "content": f"a{i}"}]} for i, ask in enumerate(asked))
    return write_lines(tmp_path / "data.jsonl", rows)


def loader(path: Path, **fields: object) -> RunData:
    return read(path, 64, 4, 3, True, packing="documents", shuffle_buffer=7, **fields)


@pytest.mark.parametrize("streaming", [False, True])
def test_any_step_that_was_there_is_made_again(path, streaming):
    plain, other = (loader(path, streaming=streaming) for _ in range(2))
    batches = [plain.batch(step) for step in range(9)]
    assert all(same(plain.batch(step), batches[step]) for step in (4, 5, 0))
    assert other.resume(5, plain.position(5))
    assert all(same(other.batch(step), batches[step]) for step in range(5, 9))
    assert other.position(7) == plain.position(7)


def test_what_is_wrong_with_a_row_is_said_when_its_step_comes(path):
    path.write_text(path.read_text() + '{"messages": 3}\n')
    failing = loader(path, streaming=True, shuffle=False)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^/.*data\.jsonl:41: no list under"):
            [failing.batch(step) for step in range(99)]
    with pytest.raises(DataError, match=r":41: no list under"):
        failing.batch(failing._next)
