"""Streamed data: every document once an epoch, and exact resume at any step."""

import json
from collections import Counter
from itertools import count
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data import documents
from penstock.data import files as room
from penstock.data.data import DataRequest, RunData, read_data
from penstock.runtime.batch import Batch
from penstock.runtime.errors import CheckpointError, DataError
from penstock.settings import DataSettings
from tests.bytes_of_files import END, read, same, write_lines
from tests.chats import write_talker
from tests.lanes import examples

few = settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
files = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def write_sets(folder: Path, ns: list[int]) -> Path:
    """Write files of every kind; documents have distinct texts."""
    texts = (f"{i:03d}" + "x" * (i % 7) for i in count())
    for f, n in enumerate(ns):
        rows = [{"text": next(texts)} for _ in range(n)]
        write_lines(folder / f"{f}.jsonl", rows)
        if f % 2 and rows:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{f}.parquet")
            (folder / f"{f}.jsonl").unlink()
    (folder / "note.txt").write_text("999")
    return folder


def stream(path: Path, seed: int = 3, seq_len: int = 24, batch_size: int = 2, **fields: object) -> RunData:
    return read(path, seq_len, batch_size, seed, True, streaming=True, **({"packing": "documents", "shuffle_buffer": 5} | fields))


def documents_of(batch: Batch) -> list[bytes]:
    """Return the documents in a batch, without padding."""
    rows = zip(batch.input_ids, batch.document_tokens, strict=True)
    documents = [document.tolist() for row, lengths in rows for document in row.split([*lengths])]
    return [bytes(document[:-1]) for document in documents if set(document) != {END}]


def epochs_of(data: RunData, n: int) -> list[list[list[bytes]]]:
    """Return the documents of each sequence of some epochs, with one sequence per batch."""
    epochs: list[list[list[bytes]]] = [[] for _ in range(n)]
    for step in count():
        documents = documents_of(data.batch(step))
        if (epoch := data.position(step + 1)["epoch"]) == n:
            return epochs
        epochs[epoch].append(documents)
    raise AssertionError


@few
@given(ns=files, seed=st.integers(0, 2**63 - 1), shuffle=st.booleans())
def test_every_epoch_holds_every_document_once(tmp_path_factory, ns, seed, shuffle):
    data = stream(write_sets(tmp_path_factory.mktemp("data"), ns), seed, batch_size=1, shuffle=shuffle)
    expected = Counter([*(f"{i:03d}{'x' * (i % 7)}".encode() for i in range(sum(ns))), b"999"])
    first, second = ([document for sequence in epoch for document in sequence] for epoch in epochs_of(data, 2))
    assert Counter(first) == Counter(second) == expected
    assert shuffle or first == second


def test_epochs_and_seeds_have_orders_and_sequences_of_their_own(tmp_path):
    path = write_sets(tmp_path, [6, 6, 6, 6])
    epochs = epochs_of(stream(path, batch_size=1, seq_len=12), 6)
    assert len({int(epoch[0][0][:3]) // 6 for epoch in epochs}) > 1, "another file comes first"
    assert len({frozenset(map(frozenset, epoch)) for epoch in epochs}) == 6, "others are packed together"
    assert epochs_of(stream(path, batch_size=1, seq_len=12), 1) == epochs[:1]
    assert epochs_of(stream(path, 2**40, batch_size=1, seq_len=12), 1) != epochs[:1]


@few
@given(
    ns=files,
    places=st.lists(st.integers(0, 20), min_size=1, max_size=3).map(sorted),
    packing=st.sampled_from(["documents", "joined", "one"]),
    shuffle=st.booleans(),
)
def test_a_resumed_stream_equals_an_unbroken_one(tmp_path_factory, ns, places, packing, shuffle):
    path = write_sets(tmp_path_factory.mktemp("data"), ns)
    unbroken, broken, offset = stream(path, packing=packing, shuffle=shuffle), stream(path, packing=packing, shuffle=shuffle), 0
    expected = [unbroken.batch(step) for step in range(places[-1] + 9)]
    for n_done in [*places, places[-1] + 9]:
        assert all(same(broken.batch(step), expected[step]) for step in range(offset, n_done))
        position, offset = json.loads(json.dumps(broken.position(n_done))), n_done
        broken = stream(path, packing=packing, shuffle=shuffle)
        assert broken.resume(n_done, position)
        assert (broken.position(n_done), broken.fingerprint) == (position, unbroken.fingerprint)


def test_a_step_that_is_asked_again_is_the_same(tmp_path):
    data = stream(write_sets(tmp_path, [9, 9]))
    batches = [data.batch(step) for step in range(8)]
    for step in (7, 2, 6, 3):
        assert same(data.batch(step), batches[step])
    with pytest.raises(CheckpointError, match="where step 30 of a stream begins shows once the step before it is done"):
        data.batch(30)
    assert not data.resume(1, {"sample": 4})


def test_what_is_wrong_with_a_row_is_said_when_its_step_comes(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", [*({"text": f"{i}"} for i in range(40)), {"text": 3}])
    failing = stream(path, shuffle=False)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^/.*data\.jsonl:41: no string under"):
            [failing.batch(step) for step in range(99)]
    with pytest.raises(DataError, match=r":41: no string under"):
        failing.batch(failing._next)


def test_conversations_in_several_documents_are_resumed_within(tmp_path):
    """A template that rewrites earlier turns makes one document per answer."""
    roles = ("user", "assistant")
    turns = [[{"role": role, "content": f"{role[0]}{i}.{k}"} for k in range(i % 3 + 1) for role in roles] for i in range(9)]
    path = write_lines(tmp_path / "data" / "a.jsonl", ({"messages": messages} for messages in turns))
    chosen = DataSettings(str(path), streaming=True, packing="documents", shuffle_buffer=4)
    size = write_talker(tmp_path / "model", "qwen 3")

    def chats() -> RunData:
        return read_data(DataRequest(chosen, tmp_path / "model", size, 160, 1, 3, tmp_path / "run" / "tokens", by_document=True))

    unbroken = chats()
    batches = [unbroken.batch(step) for step in range(30)]
    for n_done in range(0, 20, 3):
        again = chats()
        again.resume(n_done, unbroken.position(n_done))
        assert all(same(again.batch(step), batches[step]) for step in range(n_done, n_done + 4))


def test_going_on_reads_no_file_that_was_read_before(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROWS_AT_ONCE", 2)
    data = stream(write_sets(tmp_path, [8, 8, 8, 8]), shuffle=False, batch_size=1)
    step = next(step for step in count() if "025" in str(documents_of(data.batch(step))))
    position, expected = data.position(step), data.batch(step)
    opened: list[str] = []
    monkeypatch.setattr(room, "_opened", lambda file: opened.append(file.name) or file.open("rb"))
    data = stream(tmp_path, shuffle=False, batch_size=1)
    data.resume(step, position)
    opened.clear()
    assert same(data.batch(step), expected)
    assert not {"0.jsonl", "1.parquet"} & set(opened)


def test_a_changed_stream_has_another_fingerprint(tmp_path):
    path = write_sets(tmp_path, [9, 9])
    initial, content = stream(path).fingerprint, (path / "0.jsonl").read_bytes()
    (path / "0.jsonl").write_bytes(content.replace(b"001", b"901"))
    assert stream(path).fingerprint != initial
    (path / "0.jsonl").write_bytes(content)
    assert stream(path).fingerprint == initial
    ends = []
    for end in "ab":
        (path / "long.txt").write_text("x" * 400_000 + end)
        ends.append(stream(path).fingerprint)
    (path / "long.txt").unlink()
    variants = [{"seed": 4}, {"seq_len": 25}, {"batch_size": 1}, {"shuffle_buffer": 6}, {"packing": "one"}, {"too_long": "split"}]
    assert len({initial, *ends, *(stream(path, **variant).fingerprint for variant in variants)}) == 3 + len(variants)
