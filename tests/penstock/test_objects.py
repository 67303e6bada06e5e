"""Data as Python objects: rows, datasets, streams and dict batches, compared with the same rows in a file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

import penstock
from penstock.arguments.objects import training_data, write_rows
from penstock.data.data import DataRequest, read_data
from penstock.data.dict_batches import DictBatches, batch_of_rows, rows_of_batch
from penstock.data.files import without_nulls
from penstock.runtime.errors import CheckpointError, DataError
from penstock.runtime.plan.objective import parse_objective
from penstock.settings import DataSettings
from tests.lanes import mostly_slow
from tests.penstock.test_api import losses, planned, train_new
from tests.running import weights_sha

TEXTS = [{"text": f"line {i}: to be, or not to be " + "x" * (i % 7)} for i in range(24)]
CHAT = [{"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": "One.", "tool_calls": None}]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "text": TEXTS,
    "messages": [{"messages": CHAT, "n": 1}, {"messages": [*CHAT, *CHAT]}],
    "prompt": [{"prompt": f"{i} + 1 = ", "completion": str(i + 1)} for i in range(9)],
    "question": [{"question": "Who?", "answer": "I."}, {"question": "Why?", "answer": "Because."}],
    "preference": [{"prompt": "Is it?", "chosen": " Yes.", "rejected": " No."}, {"prompt": "A", "chosen": "B", "rejected": "C"}],
    "labelled": [{"text": "good", "label": 1}, {"text": "bad", "label": 0}],
    "tokens": [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}],
}


def as_file(home: Path, rows: list[dict[str, Any]]) -> Path:
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home / "rows.jsonl"


def tokens(rows: list[Any]) -> Any:
    """Dict batches of 3 rows, from lists of token ids: labels as in Hugging Face, the first two tokens not learned."""
    ids = [torch.tensor(row) for row in rows]
    labels = [torch.cat([torch.tensor([-100, -100]), row[2:]]) for row in ids]
    return [{"input_ids": ids[i : i + 3], "labels": labels[i : i + 3]} for i in range(0, len(ids), 3)]


IDS = [[(7 * i + j) % 250 for j in range(5 + i % 28)] for i in range(20)]


@mostly_slow("layout", LAYOUTS)
def test_rows_of_any_layout_are_the_batches_of_their_file(home: Path, layout: str) -> None:
    rows = LAYOUTS[layout]
    loss = {"preference": "dpo", "labelled": "classify:2"}.get(layout, "cross-entropy")
    cut = Dataset.from_list(rows + rows).select(range(len(rows)))
    paths = [as_file(home, rows), write_rows(rows), Path(training_data(cut, planned(home).plan).settings["data.path"])]
    options = {"objective": parse_objective(loss)}
    requests = [DataRequest(DataSettings(str(path)), None, 272, 128, 4, 0, home / "cache", **options) for path in paths]
    expected, *copies = map(read_data, requests)
    for data in copies:
        for step in range(3):
            batch, reference = data.batch(step), expected.batch(step)
            assert torch.equal(batch.input_ids, reference.input_ids)
            assert torch.equal(batch.targets, reference.targets)
            assert all(torch.equal(batch.extras[name], value) for name, value in reference.extras.items())
    row = {"messages": [{"content": "a", "tool_calls": None}], "system": None}
    assert without_nulls(row) == {"messages": [{"content": "a"}], "system": None}, "as of a table"
    assert copies[0].fingerprint == expected.fingerprint, "the tokens in the cache are the same"


def test_a_dataset_trains_evaluates_and_resumes_as_its_file(home: Path) -> None:
    plan, dataset = planned(home), Dataset.from_list(TEXTS)
    how: dict[str, Any] = {"lr": 1e-3, "eval_every": 2, "save_every": 1, "seed": 3}
    expected = train_new(plan, as_file(home, TEXTS), out=home / "a", steps=4, eval_data=str(home / "rows.jsonl"), **how)
    train_new(plan, dataset, out=home / "b", steps=2, eval_data=TEXTS, **how)
    with pytest.raises(CheckpointError, match="data"):
        train_new(plan, dataset.select(range(20)), out=home / "b", steps=4, resume=True, eval_data=TEXTS, **how)
    rest = train_new(plan, TEXTS, out=home / "b", steps=4, resume=True, eval_data=dataset, **how)
    assert weights_sha(rest.checkpoint) == weights_sha(expected.checkpoint)
    logs = [map(json.loads, (home / out / "metrics.jsonl").read_text().splitlines()) for out in "ab"]
    evaluations = [[line["eval_loss"] for line in lines if "eval_loss" in line] for lines in logs]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == 3


def test_a_streamed_dataset_resumes_at_its_row(home: Path) -> None:
    plan = planned(home)
    stream = IterableDataset.from_generator(lambda: iter(TEXTS)).shuffle(seed=1, buffer_size=5)
    settings: dict[str, Any] = {"data.shuffle_buffer": 4}
    unbroken = train_new(plan, stream, settings, out=home / "a", steps=9, lr=1e-3)
    train_new(plan, stream, settings, out=home / "b", steps=3, lr=1e-3)
    rest = train_new(plan, stream, settings, out=home / "b", steps=9, lr=1e-3, resume=True)
    assert weights_sha(rest.checkpoint) == weights_sha(unbroken.checkpoint)
    as_rows = as_file(home, [*stream])
    of_file = train_new(plan, as_rows, settings | {"data.streaming": True}, out=home / "c", steps=9, lr=1e-3)
    assert weights_sha(of_file.checkpoint) == weights_sha(unbroken.checkpoint)
    with pytest.raises(penstock.PenstockError, match="the length of streamed data is unknown: give steps="):
        train_new(plan, stream, out=home / "d")
    with pytest.raises(CheckpointError, match="data"):
        train_new(plan, stream.skip(1), settings, out=home / "b", steps=10, resume=True)


class Rows(TorchDataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(i, i + 32, dtype=torch.int32)
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones(32)[:32].int()}


class Broken(Rows):
    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        raise KeyError("no row")


def test_a_loader_is_taken_row_by_row_and_resumed_to_the_bits(home: Path) -> None:
    """Batches of 3 rows for steps of 4; a shuffled loader without a seed is refused by the digest of its rows."""
    plan = planned(home)

    def loader(seed: int | None = 0) -> Any:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return DataLoader(Rows(), batch_size=3, shuffle=True, generator=generator)

    unbroken = train_new(plan, loader(), out=home / "a", steps=5, lr=1e-3)
    train_new(plan, loader(), out=home / "b", steps=3, lr=1e-3)
    with pytest.raises(CheckpointError, match="is not one of step 3; resume with the data it began with"):
        train_new(plan, loader(1), out=home / "b", steps=5, lr=1e-3, resume=True)
    rest = train_new(plan, loader(), out=home / "b", steps=5, lr=1e-3, resume=True)
    assert weights_sha(rest.checkpoint) == weights_sha(unbroken.checkpoint)
    ids = torch.cat([batch["input_ids"] for _ in range(2) for batch in [*loader(0)]])[:8].long()
    first = DictBatches(loader(), 32, 4).batch(0)
    assert torch.equal(first.input_ids, ids[:4])
    assert torch.equal(first.targets, torch.cat([ids[:4, 1:], torch.full((4, 1), -100)], dim=1))


def test_a_generator_is_read_once(home: Path) -> None:
    plan, batches = planned(home), tokens(IDS)
    unbroken = train_new(plan, batches, out=home / "a", steps=4, lr=1e-3)
    once = train_new(plan, (batch for batch in batches), out=home / "b", steps=4, lr=1e-3, eval_data=iter(batches[:2]))
    assert weights_sha(once.checkpoint) == weights_sha(unbroken.checkpoint)
    message = "a generator cannot be started again, and the run continues after step 4; give a list"
    with pytest.raises(CheckpointError, match=message):
        train_new(plan, (batch for batch in batches), out=home / "b", steps=5, lr=1e-3, resume=True)
    message = r"the generator ended after 20 rows; give more, or fewer steps=; the state after step 5 is saved, to resume from"
    with pytest.raises(penstock.PenstockError, match=f"^{message}$"):
        train_new(plan, (batch for batch in batches), out=home / "c", steps=9, lr=1e-3)
    assert len(losses(home / "c")) == 5


def test_padding_and_packed_documents_are_those_of_files(home: Path) -> None:
    """A slow twin: one document a row, written by hand."""
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    packed = {"input_ids": [rows[0] + rows[1]], "labels": [[-100, 2, 3, 4, 5, -100, 7, 8]]}
    packed["position_ids"] = [[0, 1, 2, 3, 4, 0, 1, 2]]
    batch = batch_of_rows(rows_of_batch(packed, "it", 10))
    assert batch.document_tokens == ((5, 3, 2),)
    assert batch.targets.tolist() == [[2, 3, 4, 5, -100, 7, 8, -100, -100, -100]]
    padded = {"input_ids": [[1, 2, 3, 0, 0]], "labels": [[1, 2, 3, -100, -100]], "attention_mask": [[1, 1, 1, 0, 0]]}
    batch = batch_of_rows(rows_of_batch(padded, "it", 8))
    assert (batch.n_tokens, batch.document_tokens) == ((3,), None)
    assert batch.targets.tolist() == [[2, 3, -100, -100, -100, -100, -100, -100]]


@mostly_slow(
    ("change", "message"),
    [
        ({"labels": None}, "has no labels"),
        ({"input_ids": [[0.5] * 4]}, "float32; give rows by tokens, of int32 or int64"),
        ({"input_ids": [[1] * 9], "labels": [[1] * 9]}, "row 0 has 9 tokens, and a sequence of the plan 8"),
        ({"labels": [[1, 2]]}, "row 0 has 4 input_ids, 2 labels"),
        ({"attention_mask": [[0, 1, 1, 1]]}, "zeros before tokens"),
        ({"attention_mask": [[1, 1, 2, 2]]}, "attention_mask is not 0 or 1; give packed documents position_ids"),
        ({"attention_mask": [[1, 1, 1, 0]]}, "labels of padding .* would be learned; set them to -100"),
        ({"position_ids": [[1, 2, 3, 4]]}, "neither go on by 1 nor begin again at 0"),
        ({"pixel_values": [[1]]}, "has pixel_values, which nothing reads"),
    ],
)
def test_a_wrong_dict_batch_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    batch: dict[str, Any] = {"input_ids": [[1, 2, 3, 4]], "labels": [[1, 2, 3, 4]]} | change
    with pytest.raises(DataError, match=message) as refused:
        rows_of_batch(batch, "batch 1", 8)
    assert "\n" not in str(refused.value)


def test_workers_of_a_loader_leave_the_folder_free(home: Path) -> None:
    plan, loader = planned(home), DataLoader(Rows(), batch_size=4, num_workers=1)  # its workers run on until it is collected
    for steps in (1, 2):
        train_new(plan, loader, out=home / "out", steps=steps, resume=steps > 1)


def test_other_objects_are_refused_with_advice(home: Path) -> None:
    plan = planned(home)
    packed = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]], "position_ids": [[0, 0]]})

    def endless() -> Iterator[dict[str, str]]:
        while True:
            yield {"text": "a"}

    def failing() -> Iterator[dict[str, str]]:
        yield TEXTS[0]
        raise ValueError("no row\nof many")

    for data, message in (
        ([{"path": "a.png", "text": "b"}], "item 0 of the list has path, as an entry of data.mix, and text, as a row"),
        ([str(home / "data"), {"text": "b"}], "item 1 of the list is a row, and item 0 a path"),
        ([{"text": "a"}, 3], "item 1 of the list is a int"),
        (Dataset.from_dict({"body": ["a"]}), "the Dataset: its columns are body; supported: messages"),
        (packed, r"holds packed tokens, with position_ids; give DataLoader\(dataset, batch_size=None\)"),
        ([], "data: the list is empty"),
        (Dataset.from_dict({"text": []}), "data: the Dataset is empty"),
        (IterableDataset.from_generator(failing), "an IterableDataset raised ValueError: no row; correct it$"),
        (DataLoader(Broken(), num_workers=1), r"batch\(0\) raised KeyError: 'no row'; correct it$"),
        ({"train": [{"text": "a"}]}, "a dict is not read"),
        (Rows(), "a Rows is not read; .* or put it into a DataLoader"),
        (endless(), "batch 1 of the generator has no input_ids .it has text.; give dicts of tokens, or give rows as a datasets"),
        ([{"text": b"a"}], "row 1: no JSON"),
    ):
        with pytest.raises(penstock.PenstockError, match=message) as refused:
            train_new(plan, data, out=home / "out", steps=1)
        assert "\n" not in str(refused.value)
        assert "--" not in str(refused.value)
    for held_out, message in (
        ([], "eval_data: the list is empty"),
        ({"a": TEXTS}, "eval_data: a dict is not read"),
        (3, "eval_data: a int is not read"),
        ([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [-100, -100]}], "eval_data: row 2 has nothing"),
    ):
        with pytest.raises(penstock.PenstockError, match=f"^{message}"):
            train_new(plan, TEXTS, out=home / "out", steps=1, eval_data=held_out)


def test_rows_of_every_format_and_tokens_of_every_integer_are_read(home: Path) -> None:
    plan, streamed = planned(home), Dataset.from_list(TEXTS).to_iterable_dataset()
    rows = [[*training_data(streamed.with_format(kind), plan.plan).rows] for kind in (None, "arrow", "torch")]
    assert rows == [TEXTS] * 3
    ids = [np.int64(i) for i in range(1, 5)]
    (row,) = rows_of_batch({"input_ids": ids, "labels": ids}, "it", 8)
    assert row.ids_T.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    ragged = Dataset.from_dict({"input_ids": IDS, "labels": IDS})
    first = DictBatches(DataLoader(ragged, batch_size=None), 64, 2).batch(0)  # as the refusal of a Dataset of tokens advises
    assert first.n_tokens == (5, 6)
