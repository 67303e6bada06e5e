"""Documents: the token cache is written once and remains valid until its inputs change."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import documents as room
from penstock.data.data import DataRequest, read_data
from penstock.runtime.errors import DataError
from penstock.settings import DataSettings
from tests.accidents import forked_to_die
from tests.bytes_of_files import END, only, read, refused, tokens_of, write_lines
from tests.chats import LLAMA3, write_talker


@pytest.fixture
def lines(tmp_path):
    return write_lines(tmp_path / "data" / "a.jsonl", ({"text": f"text {i}"} for i in range(30)))


@pytest.fixture
def made(monkeypatch):
    rows: list[int] = []
    read_row = room.Reader._read
    monkeypatch.setattr(room.Reader, "_read", lambda reader, value, f, row: rows.append(row) or read_row(reader, value, f, row))
    return rows


@given(pairs=st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), min_size=1, max_size=40))
def test_cached_tokens_are_those_of_the_rows(tmp_path_factory, pairs):
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    path = write_lines(tmp_path_factory.mktemp("data") / "a.jsonl", [*rows, {"prompt": "a", "completion": "b"}])
    data = read(path, by_document=True, seq_len=2000)
    documents = only(data).documents
    assert tokens_of(data)[:-1] == [[*f"{a}{b}".encode(), END] if a + b else [] for a, b in pairs]
    for d, (prompt, completion) in enumerate(pairs):
        n_before, n = len(prompt.encode()), len((prompt + completion).encode()) + 1
        assert documents.runs(d).tolist() == ([[n_before, n]] if n > 1 else [])
        assert documents.lengths[d] == (n if n > 1 else 0)
        assert documents.n_learned[d] == (n - n_before if n > 1 else 0)
        assert documents.n_targets[d] == documents.n_learned[d] - (n > 1 and not prompt)
        assert documents.where(d) == f"{path}:{d + 1}"


def test_tokens_are_made_once_for_all_settings_that_share_them(lines, made):
    assert len({read(lines, packing=packing).fingerprint for packing in ("joined", "one")}) == 2
    assert read(lines).fingerprint != read(lines, shuffle=False).fingerprint
    assert len(made) == 30


def test_moved_data_is_the_same_and_changed_data_is_not(lines, made):
    initial = read(lines)
    stat, content = lines.stat(), lines.read_bytes()
    moved = lines.rename(lines.with_name("b.jsonl"))
    assert read(moved).fingerprint == initial.fingerprint
    for changed in (content.replace(b"text 17", b"Text 17"), content[:-20]):
        moved.write_bytes(changed)
        os.utime(moved, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert read(moved).fingerprint != initial.fingerprint
    assert len(made) == 30 + 30 + 30 + 29
    assert initial.batch(0).n_supervised, "what a run has open stays"


def test_another_tokenizer_or_template_makes_other_tokens(tmp_path, made):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = write_lines(tmp_path / "chat.jsonl", [chat])

    def fingerprint(template: str, **config: object) -> str:
        size = write_talker(tmp_path / "model", "llama 3", template, **config)
        cache = tmp_path / "run" / "tokens"
        return read_data(DataRequest(DataSettings(str(path)), tmp_path / "model", size, 64, 1, 0, cache)).fingerprint

    first = fingerprint(LLAMA3)
    assert fingerprint(LLAMA3) == first
    assert len(made) == 1
    assert len({first, fingerprint(LLAMA3.replace("\n\n", "\n")), fingerprint(LLAMA3, bos_token="<|eot_id|>")}) == 3
    assert len(made) == 3


def test_a_run_that_is_killed_leaves_nothing_that_is_believed(lines, made, monkeypatch):
    for name in ("DOCUMENTS_AT_ONCE", "ROWS_AT_ONCE"):
        monkeypatch.setattr(room, name, 2)
    forked_to_die(lambda: read(lines), (room.Reader, "_read"), 20)
    assert tokens_of(read(lines)) == [[*f"text {i}".encode(), END] for i in range(30)]
    assert len(made) == 30


def test_runs_that_begin_together_make_tokens_once(lines, made):
    with ThreadPoolExecutor(4) as runs:
        assert len(set(runs.map(lambda _: read(lines).fingerprint, range(4)))) == 1
    assert len(made) == 30


def test_bad_rows_are_listed_counted_and_left_out_up_to_a_share(lines, made):
    """Tokens do not depend on the accepted share; sequences equal those of the good rows alone."""
    good = read(lines)
    bad = ['{"text": 3}\n', "{\n"] * 12
    lines.write_text(bad[0] + lines.read_text() + "".join(bad[1:]))
    with pytest.raises(DataError, match=r'a\.jsonl:1: no string under "text".*24 of 54 rows are bad.*--bad-rows 44\.5%') as caught:
        read(lines, bad_rows=0.44)
    assert f"(and 11 more like it, up to {lines}:53)" in str(caught.value)
    (second,) = caught.value.__notes__
    assert second.startswith(f"{lines}:32: Expecting")
    assert second.endswith(f"(and 11 more like it, up to {lines}:54)")
    n_made = len(made)
    dataset = read(lines, bad_rows=0.445)
    assert len(made) == n_made == 30 + 54
    assert dataset.words()["rows"] == "30 documents"
    assert dataset.words()["bad rows"].startswith(f'24 of 54, left out: {lines}:1: no string under "text"; {lines}:32: Expecting')
    assert dataset.batch(0).input_ids.equal(good.batch(0).input_ids)
    with pytest.raises(DataError, match="24 of 54 rows are bad"):
        read(lines, streaming=True).batch(0)


def test_a_cache_that_cannot_be_written_or_read_is_one_line(lines, monkeypatch):
    read(lines)
    (cache_file,) = lines.parent.rglob("*.arrow")
    os.truncate(cache_file, cache_file.stat().st_size // 2)
    assert "tokens cannot be kept there (" in refused(lines)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.ExamplesIterable, "__iter__", full)
    lines.write_text(json.dumps({"text": "other"}))
    assert "tokens cannot be kept there (No space left on device); make room" in refused(lines)


def test_reading_makes_no_semaphore_that_a_kill_leaves(lines, monkeypatch):
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", lambda *_, **__: pytest.fail("a semaphore of the system"))
    read(lines)
