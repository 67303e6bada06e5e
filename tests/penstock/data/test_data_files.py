"""Are files taken as people have them, and told apart where some are for testing?"""

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from penstock.data.files.sources import find_files
from penstock.data.files.splits import HELD_OUT
from penstock.data.reading import read_set
from penstock.settings import DataSettings
from tests.bytes_of_files import read, refused

ROWS = [{"question": f"who {i}?", "answer": f"it's\n{i}, ö"} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def gz(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)  # the same bytes, and so the same name of a test, in every process


def zst(content: bytes) -> bytes:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(content)
    return packed.getvalue().to_pybytes()


def as_csv(delimiter: str) -> bytes:
    lines: list[str] = []

    class Out:
        write = staticmethod(lines.append)

    csv.writer(Out, delimiter=delimiter).writerows([["question", "answer"], *([r["question"], r["answer"]] for r in ROWS)])
    return "".join(lines).encode("utf-8-sig")


FILES = {
    "a.jsonl": LINES.encode(),
    "a.json": json.dumps(ROWS, indent=1).encode("utf-8-sig"),
    "b.json": LINES.encode(),
    "a.jsonl.gz": gz(LINES),
    "a.jsonl.zst": zst(LINES.encode()),
    "a.json.gz": gz(json.dumps(ROWS)),
    "a.csv": as_csv(","),
    "a.tsv": as_csv("\t"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_rows_that_lines_give(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert [row for _, row in find_files(tmp_path, tmp_path / "run" / "tokens").rows(0)] == ROWS
    (tmp_path / "lines.jsonl").write_text(LINES)
    assert read(tmp_path / name).documents.about.tokens_sha256 == read(tmp_path / "lines.jsonl").documents.about.tokens_sha256


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", gz(LINES)[:-9], "cannot be read (Truncated compressed stream); copy it again"),
        ("a.jsonl.zst", zst(LINES.encode())[:-9], "cannot be read"),
        ("a.jsonl.gz", b"no gzip at all", "cannot be read"),
        ("a.json", b'[{"text": "x"}, {"text": ]', "a.json: after row 1: Expecting value"),
        ("a.json", b'[{"text": "x"}', "a.json: after row 1: the list does not end"),
        ("a.json", b'[{"text": "x"}] [1]', "a.json: after row 1: the list does not end"),
        ("a.json", b'[{"text": "\xff"}]', "a.json: after row 0"),
        ("a.json", b"[" * 10**5, "a.json: after row 0"),
        ("a.json", b'["x"]', "a.json: row 1: a row is no object"),
        ("a.json", b"[]", "no text in it"),
        ("a.json", b'{"data": [\n{"text": "x"}]}', "neither a list of objects nor objects, one a line"),
        ("a.csv", b"question,answer\nwho?\n", "a.csv: after row 0: 1 values, and there are 2 columns"),
        ("a.csv", b'question,answer\nwho?,"me\n', "a.csv: after row 0: unexpected end"),
        ("a.csv", b"text,text\na,b\n", "two columns have one name"),
        ("a.csv", b"text\n\xff\n", "a.csv: after row 0"),
        ("a.csv", b"date,price\n1,2\n", "a.csv: row 1: its columns are date, price; what is read: messages | conversations |"),
        ("a.jsonl", b'{"prompt": "x", "chosen": "a", "rejected": "b"}', "preference data (DPO), which is not trained on here"),
        ("a.jsonl", b'{"content": "x", "title": "y"}', "a.jsonl:1: its columns are content, title; what is read: messages |"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in refused(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_columns_of_any_name_are_taken_for_what_the_user_says_they_are(tmp_path: Path, name: str) -> None:
    theirs = [{"messages": "not these", "q": row["question"], "a": row["answer"]} for row in ROWS]
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({key: [row[key] for row in theirs] for key in theirs[0]}), tmp_path / name)
    elif name == "a.csv":
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([theirs[0].keys(), *(row.values() for row in theirs)])
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in theirs))
    (tmp_path / "lines.jsonl").write_text(LINES)
    mapped = read(tmp_path / name, columns={"question": "q", "answer": "a"})
    assert mapped.documents.about.tokens_sha256 == read(tmp_path / "lines.jsonl").documents.about.tokens_sha256
    assert "no column 'nix', which --columns names; its columns are " in refused(tmp_path / name, columns={"text": "nix"})
    assert "--columns response=...: no such column; there are text, " in refused(tmp_path / name, columns={"response": "a"})


def test_of_a_prompt_and_its_completion_the_completion_alone_is_learned(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "Wö is ", "completion": "here €"}))
    documents = read(tmp_path / "a.jsonl").documents
    (run,) = documents.runs(0).tolist()
    assert bytes(documents.ids(0)[: run[0]].tolist()).decode() == "Wö is "
    assert bytes(documents.ids(0)[run[0] : -1].tolist()).decode() == "here €"
    assert run[1] == len(documents.ids(0)), "and where it ends"


def layout(folder: Path, names: list[str]) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": [name]}), path)
        else:
            path.write_text(json.dumps({"text": name}) + "\n" if path.suffix == ".jsonl" else "about it")
    return folder


IN_FOLDERS = ["train/a.jsonl", "train/x-00000-of-00001.parquet"]
HUB = ["README.md", *(f"data/{s}-0000{i}-of-00002-9a.parquet" for s in ("train_sft", "test_sft") for i in (0, 1))]


@pytest.mark.parametrize(
    ("names", "split", "read_from", "words"),
    [
        (HUB, None, HUB[1:3], "of train_sft, leaving out test_sft, 1 files of no split"),
        (HUB, "test", HUB[3:], "of test_sft, leaving out train_sft"),
        (["train.jsonl", "validation.jsonl", "test.jsonl"], None, ["train.jsonl"], "leaving out test, validation"),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], None, ["gsm8k_train.jsonl"], ""),
        (["dev/a.jsonl", *IN_FOLDERS], None, IN_FOLDERS, "leaving out dev"),
        (["train/a.jsonl", "dev/a.jsonl"], "dev", ["dev/a.jsonl"], ""),
        (["train.txt", "test.txt", "notes.txt"], None, ["train.txt"], "1 files of no split"),
        # Where nothing is to be told apart, nothing is left out.
        (["train.jsonl", "more.jsonl"], None, ["more.jsonl", "train.jsonl"], ""),
        (["test-00000-of-00001.parquet", "README.md"], None, ["README.md", "test-00000-of-00001.parquet"], ""),
        (["test_me.py", "train.py", "a test.md", "training.jsonl", "attest.jsonl"], None, None, ""),
    ],
)  # fmt: skip
def test_splits_are_told_apart_and_what_is_left_out_is_said(
    tmp_path: Path, names: list[str], split: str | None, read_from: list[str] | None, words: str
) -> None:
    found = find_files(layout(tmp_path, names), tmp_path / "run" / "tokens", split)
    assert sorted(str(file.relative_to(tmp_path)) for file in found.files) == sorted(names if read_from is None else read_from)
    assert words in found.split


def test_held_out_data_are_of_another_split_than_what_is_trained_on(tmp_path: Path) -> None:
    folder = layout(tmp_path / "d", [f"{split}.jsonl" for split in ("train", "test", "validation")])
    (held_out,) = find_files(folder, tmp_path / "run" / "tokens", None, HELD_OUT).files
    assert held_out.name == "validation.jsonl"


def test_splits_that_nobody_can_choose_among_are_named(tmp_path: Path) -> None:
    assert "its splits are dev, test, none of them train; choose one" in refused(
        layout(tmp_path / "a", ["dev.jsonl", "test.jsonl"])
    )
    assert "its splits are test, and files of no split" in refused(layout(tmp_path / "b", ["chats.jsonl", "test.jsonl"]))
    assert "no split 'val' in it; there are: dev, test" in refused(tmp_path / "a", split="val")
    assert "a file, and a split is chosen of a folder's files" in refused(tmp_path / "a" / "dev.jsonl", split="dev")


def test_a_set_of_rows_leaves_out_the_json_that_lies_beside_it(tmp_path: Path) -> None:
    folder = layout(tmp_path / "d", ["data.parquet"])
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"features": {}}}))
    (folder / "state.json").write_text(json.dumps({"a": 1}, indent=2))
    reading = read_set(DataSettings(str(folder), format="messages"), None, 300, tmp_path / "run" / "tokens")
    assert ([file.name for file in reading.source.files], reading.n_set_aside) == (["data.parquet"], 2)
