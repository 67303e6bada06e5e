"""Does a stream go on, wherever it was left, as if it had never stopped?"""

import json
import pickle
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data import streamed as room
from penstock.data.data import read_data
from penstock.data.streamed import StreamedData
from penstock.settings import DataSettings
from runtime.batch import UNSUPERVISED, Batch
from runtime.errors import CheckpointError, DataError

END = 256
few = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.input_ids, b.input_ids) and torch.equal(a.targets, b.targets) and a.document_tokens == b.document_tokens


def write_sets(folder: Path, ns: list[int]) -> Path:
    """Files of rows of every kind; each document is told from all others by its text."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for f, n in enumerate(ns):
        texts = [f"{number + i:03d}" + "x" * ((number + i) % 7) for i in range(n)]
        number += n
        if f % 2:
            pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}), folder / f"{f}.parquet")
        else:
            (folder / f"{f}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "note.txt").write_text("999")
    (folder / "picture").write_bytes(b"\xff\xfe")
    return folder


def stream(path: Path, seed: int = 3, seq_len: int = 24, batch_size: int = 2, **fields: object) -> StreamedData:
    chosen = DataSettings(str(path), streaming=True, **({"packing": "documents", "shuffle_buffer": 5} | fields))
    data = read_data(chosen, None, 300, seq_len, batch_size, seed, path / "run" / "tokens", by_document=True)
    assert isinstance(data, StreamedData)
    return data


def documents_of(batch: Batch) -> list[bytes]:
    """The documents in a batch, padding left out."""
    found = []
    for ids, lengths in zip(batch.input_ids.tolist(), batch.document_tokens, strict=True):
        at = 0
        for n in lengths:
            document = ids[at : at + n]
            at += n
            if set(document) != {END}:
                assert document[-1] == END
                found.append(bytes(document[:-1]))
    return found


def epoch_of(data: StreamedData, epoch: int) -> list[Batch]:
    """The batches of sequences of one epoch, one sequence each."""
    batches, step = [], 0
    while True:
        position = data.position(step)
        batch = data.batch(step)
        step += 1
        began = data.position(step)["epoch"]  # after its last sequence a position is still of its epoch
        if began == epoch:
            batches.append(batch)
        elif began > epoch:
            return batches
        assert position["epoch"] <= began


@few
@given(ns=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 2**63 - 1), shuffle=st.booleans())
def test_every_epoch_holds_every_document_once(tmp_path_factory, ns, seed, shuffle):
    path = write_sets(tmp_path_factory.mktemp("data"), ns)
    data = stream(path, seed, batch_size=1, shuffle=shuffle)
    expected = Counter([*(f"{i:03d}{'x' * (i % 7)}".encode() for i in range(sum(ns))), b"999"])
    seen = [[document for batch in epoch_of(data, epoch) for document in documents_of(batch)] for epoch in (0, 1)]
    assert Counter(seen[0]) == Counter(seen[1]) == expected
    if not shuffle:
        assert seen[0] == seen[1]


def test_epochs_blocks_and_seeds_have_orders_of_their_own(tmp_path):
    path = write_sets(tmp_path, [20, 20, 20])

    def orders(seed: int) -> list[list[bytes]]:
        data = stream(path, seed, batch_size=1)
        return [[document for batch in epoch_of(data, epoch) for document in documents_of(batch)] for epoch in (0, 1)]

    first, second = orders(0)
    assert len({tuple(first), tuple(second), tuple(orders(1)[0]), tuple(orders(2**40)[0])}) == 4
    assert first == orders(0)[0]


def test_an_epoch_begins_in_another_file_and_packs_others_together(tmp_path):
    data = stream(write_sets(tmp_path, [6, 6, 6, 6]), batch_size=1, seq_len=12)
    first, together = set(), []
    for epoch in range(6):
        batches = [documents_of(batch) for batch in epoch_of(data, epoch)]
        first.add(int(batches[0][0][:3]) // 6)
        together.append(frozenset(frozenset(batch) for batch in batches))
    assert len(first) > 2
    assert len(set(together)) == 6


def test_a_block_packs_others_together_in_each_epoch(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i:03d}"}) + "\n" for i in range(12)))
    data = stream(tmp_path, batch_size=1, seq_len=12, shuffle_buffer=1000)
    together = [frozenset(frozenset(documents_of(batch)) for batch in epoch_of(data, epoch)) for epoch in range(4)]
    assert len(set(together)) == 4


@few
@given(
    ns=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    left=st.integers(0, 12),
    packing=st.sampled_from(["documents", "joined", "one"]),
    shuffle=st.booleans(),
)
def test_a_resumed_stream_equals_an_unbroken_one(tmp_path_factory, ns, left, packing, shuffle):
    path = write_sets(tmp_path_factory.mktemp("data"), ns)
    whole = stream(path, packing=packing, shuffle=shuffle)
    expected = [whole.batch(step) for step in range(left + 9)]
    broken = stream(path, packing=packing, shuffle=shuffle)
    for step in range(left):
        broken.batch(step)
    position = json.loads(json.dumps(broken.position(left)))
    assert position == whole.position(left)
    resumed = stream(path, packing=packing, shuffle=shuffle)
    resumed.resume(left, position)
    assert resumed.fingerprint == whole.fingerprint
    assert resumed.position(left) == position
    assert all(same(resumed.batch(step), expected[step]) for step in range(left, left + 9))
    assert [resumed.position(step) for step in range(left, left + 9)] == [whole.position(step) for step in range(left, left + 9)]


def test_a_position_is_remembered_until_long_after_its_step(tmp_path):
    data = stream(write_sets(tmp_path, [9, 9]))
    positions = []
    for step in range(40):
        positions.append(data.position(step))
        data.batch(step)
    assert [data.position(step) for step in range(41)][:40] == positions


def test_a_step_that_is_asked_again_is_the_same_and_so_is_one_long_gone(tmp_path):
    path = write_sets(tmp_path, [9, 9])
    data = stream(path)
    batches = [data.batch(step) for step in range(8)]
    assert same(data.batch(7), batches[7])
    assert same(data.batch(2), batches[2])
    assert same(data.batch(6), batches[6])
    assert same(stream(path).batch(5), batches[5]), "steps may be passed over"
    resumed = stream(path)
    resumed.resume(4, data.position(4))
    assert same(resumed.batch(1), batches[1]), "also those before it was resumed"


def test_going_on_reads_no_file_that_was_read_before(tmp_path, monkeypatch):
    path = write_sets(tmp_path, [8, 8, 8, 8])
    whole = stream(path, shuffle=False, batch_size=1)
    steps = [step for step in range(60) if whole.batch(step) and whole.position(step)["file"] >= 2]
    expected, position = whole.batch(steps[0]), whole.position(steps[0])
    opened = []
    rows = room.DataSource.rows

    def noted(source, number):
        opened.append(source.files[number].name)
        return rows(source, number)

    monkeypatch.setattr(room.DataSource, "rows", noted)
    resumed = stream(path, shuffle=False, batch_size=1)
    opened.clear()
    resumed.resume(steps[0], position)
    assert same(resumed.batch(steps[0]), expected)
    assert opened
    assert not {"0.jsonl", "1.parquet"} & set(opened)


def test_a_block_ends_where_it_has_enough_tokens(tmp_path, monkeypatch):
    path = write_sets(tmp_path, [40])
    monkeypatch.setattr(room, "BUFFER_TOKENS", 30)
    data = stream(path, shuffle_buffer=1000)
    blocks = [data.position(step)["block"] for step in range(20) if data.batch(step)]
    assert max(blocks) > 3


def test_a_stream_travels_to_another_process_with_its_place(tmp_path):
    data = stream(write_sets(tmp_path, [9, 9]))
    expected = [data.batch(step) for step in range(9)]
    data.resume(4, data.position(4))
    there = pickle.loads(pickle.dumps(data))
    assert same(there.batch(4), expected[4])
    assert there.fingerprint == data.fingerprint


@pytest.mark.parametrize(
    "position",
    [
        {},
        {"epoch": 0, "sequence": 0},
        {"epoch": 0, "file": -1, "row": 0, "block": 0, "sequence": 0},
        {"epoch": 0, "file": "0", "row": 0, "block": 0, "sequence": 0},
        {"epoch": True, "file": 0, "row": 0, "block": 0, "sequence": 0},
        {"epoch": 2**32, "file": 0, "row": 0, "block": 0, "sequence": 0},
        {"epoch": 0, "file": 99, "row": 0, "block": 0, "sequence": 0},
        {"epoch": 0, "file": 0, "row": 0, "block": 0, "sequence": 0, "more": 1},
    ],
)
def test_a_position_of_something_else_is_refused(tmp_path, position):
    data = stream(write_sets(tmp_path, [3]))
    with pytest.raises(CheckpointError, match="data position"):
        data.resume(1, position)


def test_a_file_that_was_cut_or_grew_has_another_fingerprint(tmp_path):
    path = write_sets(tmp_path, [9, 9])
    before = stream(path).fingerprint
    assert stream(path).fingerprint == before
    file = path / "0.jsonl"
    content = file.read_bytes()
    for changed in (content[:-9], content + b'{"text": "more"}\n', content.replace(b"001", b"901")):
        file.write_bytes(changed)
        assert stream(path).fingerprint != before
    file.write_bytes(content)
    assert stream(path).fingerprint == before
    (path / "long.txt").write_text("x" * 400_000 + "a")
    end = stream(path).fingerprint
    (path / "long.txt").write_text("x" * 400_000 + "b")
    assert stream(path).fingerprint != end
    (path / "long.txt").unlink()
    others = [{"seed": 4}, {"seq_len": 25}, {"batch_size": 1}, {"shuffle_buffer": 6}, {"packing": "one"}, {"too_long": "split"}]
    assert len({stream(path, **other).fingerprint for other in others} | {before}) == len(others) + 1


def test_a_stream_without_anything_to_learn_ends_in_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "who?"}]}\n' * 7)
    with pytest.raises(DataError, match=r"nothing to learn in it .7 documents, 7 with nothing"):
        stream(tmp_path).batch(0)
    with pytest.raises(DataError, match=r"a\.jsonl:1: nothing in it to learn"):
        stream(tmp_path, unsupervised="refuse", shuffle=False).batch(0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text in it"):
        stream(tmp_path / "empty")


def test_a_bad_row_is_named_when_it_is_reached(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' * 7 + "{\n")
    data = stream(tmp_path, shuffle=False)
    assert data.batch(0).n_supervised
    with pytest.raises(DataError, match=r"a\.jsonl:8"):
        [data.batch(step) for step in range(9)]


def test_joined_blocks_have_targets_for_all_but_the_first_token(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefgh"}\n' * 6)
    data = stream(tmp_path, packing="joined", shuffle=False, shuffle_buffer=2, batch_size=1, seq_len=32)
    batch = data.batch(0)
    row = [*b"abcdefgh", END] * 2
    assert batch.input_ids[0].tolist() == row + [END] * 14
    assert batch.targets[0].tolist() == row[1:] + [UNSUPERVISED] * 15
    assert batch.document_tokens is None
