"""Files: equal rows from every format, errors with file and line, splits, no access outside the folder."""

import csv
import gzip
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, load_from_disk

from penstock.data import files as rows
from penstock.data.data import DataRequest, read_data
from penstock.data.files import HELD_OUT, find_files
from penstock.runtime.errors import DataError
from penstock.settings import DataSettings
from tests.bytes_of_files import read, refused, texts_of, tokens_of, write_lines
from tests.chats import write_talker
from tests.tour import ROOT

ROWS = [{"question": f"who {i}?", "answer": answer} for i, answer in enumerate(("it's\n1, ö", "2020-01-01", "4", "NA", "007"))]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def as_csv(delimiter: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([["question", "answer"], *(row.values() for row in ROWS)])
    return text.getvalue().encode("utf-8-sig")


def as_parquet(rows: list[dict[str, object]]) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


FILES = {
    "a.jsonl": LINES.encode(),
    "a.json": json.dumps(ROWS, indent=1).encode("utf-8-sig"),
    "b.json": LINES.encode(),
    "a.jsonl.gz": gzip.compress(LINES.encode(), mtime=0),  # equal bytes, and so equal test names, in every process
    "a.jsonl.zst": pyarrow.Codec("zstd").compress(LINES.encode(), asbytes=True),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode(), mtime=0),
    "a.csv": as_csv(","),
    "a.tsv": as_csv("\t"),
    "a.parquet": as_parquet(ROWS),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_its_rows_as_written(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    (file,) = find_files(tmp_path, tmp_path / "run").files
    parsed = [rows.parse_line(row, "") if isinstance(row, bytes) else row for _, row in rows.rows_of(file.path, file.kind)]
    assert parsed == ROWS
    assert texts_of(read(tmp_path / name)) == [f"<|user|>\n{r['question']}<|assistant|>\n{r['answer']}" for r in ROWS]


CALLS = [{"type": "function", "function": {"name": "f", "arguments": a}} for a in ({"a": 1}, {"b": ["x", None]}, {})]
TOOLS = [{"name": "f", "parameters": {"properties": {"a": {"type": "number"}}}}, {"name": "g", "parameters": {"required": []}}]
OF_CALLS = [
    {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}, *more], "tools": TOOLS[:n]}
    for n, (call, more) in enumerate(zip(CALLS, ([], [{"role": "tool", "content": "4", "name": "f"}], []), strict=True))
]


@pytest.mark.parametrize("name", ["a.parquet", "mixed.parquet", "map.parquet", "a.feather", "saved"])
def test_rows_of_tables_have_no_keys_of_other_rows(tmp_path, name):
    """Tables give the tokens of the same rows as JSON lines."""
    write_lines(tmp_path / "rows" / "a.jsonl", OF_CALLS)
    size = write_talker(tmp_path / "model", "chatml", "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}")
    table, path = pyarrow.Table.from_pylist(OF_CALLS), tmp_path / "table" / name
    path.parent.mkdir()
    if name == "saved":
        Dataset.from_list(OF_CALLS).save_to_disk(path, num_shards=2)
    elif name == "mixed.parquet":  # a column of JSON in the library's own type
        Dataset.from_list(OF_CALLS, on_mixed_types="use_json").to_parquet(path)
    elif name == "map.parquet":
        kind = pyarrow.list_(
            pyarrow.struct({"name": pyarrow.string(), "parameters": pyarrow.map_(pyarrow.string(), pyarrow.string())})
        )
        maps = [[{"name": "f", "parameters": {"x": "y"}}], [{"name": "g", "parameters": {}}], None]
        pyarrow.parquet.write_table(table.set_column(1, "tools", pyarrow.array(maps, kind)), path)
        write_lines(tmp_path / "rows" / "a.jsonl", [row | {"tools": tools} for row, tools in zip(OF_CALLS, maps, strict=True)])
    else:
        (pyarrow.feather.write_feather if name == "a.feather" else pyarrow.parquet.write_table)(table, path)
    read_all = partial(DataRequest, model_folder=tmp_path / "model", vocab_size=size, seq_len=4000, batch_size=1, seed=0)
    as_table, as_lines = (
        tokens_of(read_data(read_all(DataSettings(str(folder), unsupervised="skip", packing="one"), cache=tmp_path / "t")))
        for folder in (path, tmp_path / "rows")
    )
    assert as_table == as_lines
    assert len(as_table) == len(OF_CALLS)


def test_a_saved_data_set_is_read_as_its_library_reads_it(tmp_path):
    parts = {"train": ROWS[:3], "test": ROWS[3:], "extra": ROWS[:1]}
    DatasetDict({name: Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(tmp_path / "all")
    (tmp_path / "all" / "train" / "cache-1234.arrow").write_bytes(b"of a map")  # a cache of `datasets`
    of_train, expected = read(tmp_path / "all"), texts_of(read(write_lines(tmp_path / "train.jsonl", parts["train"])))
    assert [row["answer"] for row in load_from_disk(tmp_path / "all")["train"]] == [row["answer"] for row in ROWS[:3]]
    assert texts_of(of_train) == texts_of(read(tmp_path / "all" / "train")) == expected
    assert "of train, leaving out extra, test" in of_train.words()["data"]
    assert len(texts_of(read(tmp_path / "all", split="extra"))) == 1
    (held_out,) = find_files(tmp_path / "all", tmp_path / "run", None, HELD_OUT).files
    assert held_out.name.startswith("test/")
    with pytest.raises(ValueError, match="no split 'val'"):
        find_files(tmp_path / "all", tmp_path / "run", "val")
    (tmp_path / "all" / "train" / "data-00000-of-00001.arrow").rename(tmp_path / "elsewhere")
    assert "state.json: lists 'data-00000-of-00001.arrow', which is not in its folder" in refused(tmp_path / "all")


NOT_ROWS = {
    "instances.json": {"type": "text2text", "instances": [{"text": "x"}]},
    "squad.json": {"version": "2.0", "data": [{"paragraphs": []}]},
    "by_index.json": {"0": {"text": "x"}, "1": {"text": "y"}},
    "package.json": {"name": "pump", "version": "1.0.0"},
    "splits.json": {"train": [{"text": "x"}], "test": []},
    "by_column.json": {"text": ["x", "y"]},
    "words.json": "words",
}


@pytest.mark.parametrize("name", NOT_ROWS)
def test_json_without_rows_is_refused_and_never_read_as_text(tmp_path, name):
    for path in (tmp_path / name, tmp_path / "data" / name):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(NOT_ROWS[name], indent=1))
    (path.parent / "a.txt").write_text("text")
    assert name in refused(tmp_path / name)
    assert str(path) in refused(path.parent)


NOT_TEXT = {
    "latin.txt": "l'été".encode("latin-1"),
    "windows.txt": "open".encode("utf-16"),
    "without a mark.txt": "open".encode("utf-16-le"),
    "paper.pdf": b"%PDF-1.1\n1 0 obj<</Type/Catalog>>endobj\n%%EOF\n",
    "letter.rtf": b"{\\rtf1 open}",
    "picture.png": b"\x89PNG\r\n\x1a\n\0\0",
    "archive.txt.xz": b"\xfd7zXZ\0",
}


def test_files_that_are_no_text_are_named_and_skipped_on_request(tmp_path):
    folder = write_lines(tmp_path / "data" / "a.jsonl", [{"text": "one"}]).parent
    for name, content in NOT_TEXT.items():
        (folder / name).write_bytes(content)
    with pytest.raises(
        DataError, match=rf"archive\.txt\.xz: no UTF-8 text.*{len(NOT_TEXT)} of {len(NOT_TEXT) + 1} rows are bad"
    ) as caught:
        read(folder)
    listed = " ".join([str(caught.value), *caught.value.__notes__])
    assert all(kind in listed for kind in ("a PDF", "RTF", "UTF-16", "latin.txt"))
    data = read(folder, bad_rows=0.875)
    assert [text for text in texts_of(data) if text] == ["one"]
    assert f"{len(NOT_TEXT)} of {len(NOT_TEXT) + 1}, left out: " in data.words()["bad rows"]


def test_a_table_that_expands_without_end_is_refused(tmp_path):
    text = pyarrow.array(["y" * 10**6])
    tables = {
        "many.parquet": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200, pyarrow.int32()), text),
        "large.parquet": pyarrow.array(["y" * 7 * 10**6]),
    }
    for name, column in tables.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / name, compression="zstd")
    assert "1,000 times the size of the file or more; if that is so, allow more with --max-row-mb" in refused(
        tmp_path / "many.parquet"
    )
    assert "large.parquet: row 1: above 6 MB" in refused(tmp_path / "large.parquet", max_row_mb=6)
    assert len(texts_of(read(tmp_path / "large.parquet", max_row_mb=8))[0]) == 7 * 10**6


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "cannot be read (Truncated compressed stream); copy it again"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": "cut\n', "a.jsonl:3: "),
        ("a.jsonl", b'{"text": "x"}\n{"text": "' + b"x" * 500 + b'"}\n', "a.jsonl:2: a line above 400 bytes"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:1: its text, or one soon after it, has no tokens"),
        ("a.jsonl", b'{"prompt": "x", "chosen": "a", "rejected": "b"}', "are preferences: plan with --loss dpo"),
        ("a.json", b'[{"text": "x"}, {"text": ]', "a.json: Expecting value"),
        ("a.csv", b"question,answer\na,b\nwho?\n", "a.csv:3: 1 values for 2 columns"),
        ("a.parquet", as_parquet([{"text": "one"}, {"text": None}]), 'a.parquet: row 2: no string under "text"'),
        ("a.parquet", as_parquet(ROWS)[:-20], "a.parquet: not a Parquet file that can be read"),
    ],
)
def test_a_damaged_file_is_one_line_with_its_place(tmp_path, monkeypatch, name, content, says):
    if "above" in says:
        monkeypatch.setattr(rows, "MAX_ROW_BYTES", 400)
    (tmp_path / name).write_bytes(content)
    assert says in refused(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_columns_are_taken_for_what_the_user_says(tmp_path, name):
    renamed_rows = [{"messages": "not these", "q": row["question"], "a": row["answer"]} for row in ROWS]
    path = write_lines(tmp_path / "a.jsonl", renamed_rows)
    (tmp_path / "a.parquet").write_bytes(as_parquet(renamed_rows))
    documents = read(tmp_path / name, columns={"question": "q", "answer": "a"})
    assert tokens_of(documents) == tokens_of(read(write_lines(tmp_path / "lines.jsonl", ROWS)))
    assert "no column 'nix', which --columns names; its columns are " in refused(path, columns={"text": "nix"})
    assert "--columns response=...: no such column; choose from messages, " in refused(path, columns={"response": "a"})
    assert "--columns ...=a: the column would be read twice" in refused(path, columns={"question": "a", "answer": "a"})


def test_a_mapped_column_is_not_read_under_its_own_name_too(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"input": "who?", "output": "me"}])
    plain = write_lines(tmp_path / "b.jsonl", [{"instruction": "who?", "output": "me"}])
    assert tokens_of(read(path, columns={"instruction": "input"})) == tokens_of(read(plain))


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    """Hidden files and pipes are skipped."""
    texts = {"b.txt": "B", "a/z.py": "Z", "a/b/c.md": "\ufeffC\r\n", "a.txt": "", "Ω": "ω", ".hidden": "no", ".git/config": "no"}
    for name, text in texts.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(text.encode())
    write_lines(tmp_path / "data" / "c.jsonl", [{"text": "J"}, {"text": "K", "source": 1}])
    (tmp_path / "data" / "circle").symlink_to(tmp_path / "data" / "circle")
    os.mkfifo(tmp_path / "data" / "pipe.jsonl")
    data = read(tmp_path / "data")
    assert texts_of(data) == ["C\r\n", "Z", "", "B", "J", "K", "ω"]
    assert data.words()["data"].endswith("text")
    assert data.words()["rows"] == "7 documents, 1 unsupervised"


@pytest.mark.parametrize("target", ["secret.txt", "elsewhere", "nowhere"])
def test_a_link_out_of_a_folder_is_refused(tmp_path, target):
    path = write_lines(tmp_path / "data" / "a.jsonl", ROWS).parent
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (path / "link.jsonl").symlink_to(tmp_path / target)
    assert "link.jsonl: a link out of the folder, which is not followed; copy its target" in refused(path)


def test_texts_of_a_set_of_chats_are_left_out_and_counted(tmp_path):
    path = write_lines(tmp_path / "data" / "a.jsonl", ROWS).parent
    (path / "README.md").write_text("about the data")
    (path / "dataset_infos.json").write_text(json.dumps({"default": {"features": {}}}))
    data = read(path)
    assert len(tokens_of(data)) == len(ROWS)
    assert "question-answer, conversations as <|role|> and text, 2 files left out" in data.words()["data"]
    assert 'a.jsonl:1: no string under "text"' in refused(path, format="text")


def test_what_a_run_writes_among_its_data_is_no_data(tmp_path):
    data = write_lines(tmp_path / "data" / "a.jsonl", [{"text": "text"}]).parent
    out = data / "runs" / "first"
    names = [file.name for file in find_files(data, out).files]
    write_lines(out / "samples.jsonl", [{"step": 1, "text": "said"}])
    (tmp_path / "link").symlink_to(data)
    for run in (out, data / ".." / "data" / "runs" / "first", tmp_path / "link" / "runs" / "first"):
        assert [file.name for file in find_files(data, run).files] == names == ["a.jsonl"]
    assert len(find_files(data, tmp_path).files) == 2, "to another run it is data"
    for run in (data, tmp_path / "link"):
        with pytest.raises(ValueError, match="choose another --out"):
            find_files(data, run)


def test_what_is_missing_or_empty_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert "nowhere: not found; give a folder" in refused(tmp_path / "nowhere")
    assert "folder: no text in it" in refused(tmp_path / "folder")
    assert "pipe: neither a file nor a folder" in refused(tmp_path / "pipe")


def layout(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            (folder / name).write_bytes(as_parquet([{"text": name}]))
        else:
            (folder / name).write_text(json.dumps({"text": name}) + "\n" if name.endswith(".jsonl") else "about it")
    return folder


IN_FOLDERS = ["train/a.jsonl", "train/x-00000-of-00001.parquet"]
HUB = ["README.md", *(f"data/{s}-0000{i}-of-00002-9a.parquet" for s in ("train_sft", "test_sft") for i in (0, 1))]


@pytest.mark.parametrize(
    ("names", "split", "read_from", "words"),
    [
        (HUB, None, HUB[1:3], "of train_sft, leaving out test_sft, 1 file of no split"),
        (["train.jsonl", "validation.jsonl", "test.jsonl"], None, ["train.jsonl"], "leaving out test, validation"),
        (["dev/a.jsonl", *IN_FOLDERS], None, IN_FOLDERS, "leaving out dev"),
        (["train.txt", "test.txt", "notes.txt"], None, ["train.txt"], "1 file of no split"),
        # Without several splits no file is left out.
        (["test_me.py", "train.py", "a test.md", "training.jsonl", "attest.jsonl"], None, None, ""),
    ],
)
def test_splits_are_told_apart_and_what_is_left_out_is_said(tmp_path, names, split, read_from, words):
    result = find_files(layout(tmp_path, names), tmp_path / "run", split)
    assert sorted(file.name for file in result.files) == sorted(names if read_from is None else read_from)
    assert words in result.about


def test_held_out_data_is_of_another_split(tmp_path):
    folder = layout(tmp_path / "a", [f"{split}.jsonl" for split in ("train", "test", "validation")])
    (held_out,) = find_files(folder, tmp_path / "run", None, HELD_OUT).files
    assert held_out.name == "validation.jsonl"
    with pytest.raises(ValueError, match="all of it is called train; say evaluation"):
        find_files(layout(tmp_path / "b", ["train.jsonl"]), tmp_path / "run", None, HELD_OUT)
    folder = layout(tmp_path / "c", ["dev.jsonl", "test.jsonl"])
    assert "no split 'train' in it; there are dev, test, and 0 files of no split; choose one with --split" in refused(folder)
    assert "no split 'val' in it" in refused(folder, split="val")
    assert "a file, and a split is chosen among a folder's files" in refused(folder / "dev.jsonl", split="dev")


ALONE = """
import sys
from pathlib import Path
sys.addaudithook(lambda event, _: event.startswith(("socket.connect", "socket.getaddrinfo")) and sys.exit(f"a connection: {event}"))
from tests.bytes_of_files import read
for path in sorted(Path(sys.argv[1]).iterdir()):
    for streaming in (False, True):
        assert read(path, streaming=streaming).batch(0).n_supervised
"""


@pytest.mark.slow
def test_no_data_reaches_the_network_or_the_home(tmp_path):
    for folder in ("data", "home"):
        (tmp_path / folder).mkdir()
    for name in ("a.jsonl", "a.json.gz", "a.csv", "a.parquet"):
        (tmp_path / "data" / name).write_bytes(FILES[name])
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", ALONE, tmp_path / "data"], env=environment, cwd=tmp_path, check=True)
    assert not list((tmp_path / "home").iterdir())
