"""Is a row understood as what it is, or named with its place?"""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.data import read_data
from penstock.data.files import tables
from penstock.data.files.sources import find_files
from penstock.data.formats import Chat, Completion, document, format_of
from penstock.settings import DataSettings
from runtime.errors import DataError
from tests.bytes_of_files import read, refused

ASKED, SAID = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ROWS = {
    "text": [({"text": "one", "more": 1}, "one")],
    "messages": [
        ({"messages": [ASKED, SAID]}, Chat((ASKED, SAID))),
        ({"messages": []}, Chat(())),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "o?"}]}, SAID]},
            Chat((ASKED, SAID)),
        ),
        (
            {"messages": [{**ASKED, "name": None}, {**SAID, "tool_calls": None}], "tools": None},
            Chat((ASKED, SAID)),
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}], "tools": '[{"name": "add"}]'},
            Chat(({"role": "assistant", "content": "", "tool_calls": [{"id": 1}]},), ({"name": "add"},)),
        ),
        (
            {"messages": [ASKED, {**SAID, "weight": 0}, ASKED, {**SAID, "weight": 1}, {**SAID, "weight": None}]},
            Chat((ASKED, SAID, ASKED, SAID, SAID), None, frozenset({1})),
        ),
    ],
    "alpaca": [
        ({"instruction": "who?", "output": "me"}, Chat((ASKED, SAID))),
        ({"instruction": "who?", "input": "", "output": "me", "system": None}, Chat((ASKED, SAID))),
        ({"instruction": "w", "input": "ho?", "output": "me"}, Chat(({"role": "user", "content": "w\nho?"}, SAID))),
        (
            {"instruction": "who?", "output": "me", "system": "s", "history": [["a", "b"]]},
            Chat(
                (
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    ASKED,
                    SAID,
                )
            ),
        ),
    ],
    "sharegpt": [
        ({"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}]}, Chat((ASKED, SAID))),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "observation", "value": "4"}]},
            Chat(({"role": "system", "content": "s"}, {"role": "tool", "content": "4"})),
        ),
        (
            {"conversations": [{"from": "user", "value": "who?"}], "system": "s"},
            Chat(({"role": "system", "content": "s"}, ASKED)),
        ),
        (
            {"conversations": [{"from": "human", "value": "who?", "weight": 0.0}, {"from": "gpt", "value": "me", "weight": 1.0}]},
            Chat((ASKED, SAID), None, frozenset({0})),
        ),
    ],
    "prompt-completion": [
        ({"prompt": "who? ", "completion": "me", "text": "x"}, Completion("who? ", "me")),
        ({"prompt": [ASKED], "completion": [SAID]}, Chat((ASKED, SAID), None, frozenset({0}))),
        ({"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}, Chat((ASKED, SAID, ASKED, SAID), None, frozenset({0, 1, 2}))),
    ],
    "question-answer": [
        ({"question": "who?", "answer": "me", "id": 3}, Chat((ASKED, SAID))),
        ({"question": "who?", "answer": "me", "system": "s"}, Chat(({"role": "system", "content": "s"}, ASKED, SAID))),
    ],
}


@pytest.mark.parametrize(("format", "row", "expected"), [(name, *pair) for name, pairs in ROWS.items() for pair in pairs])
def test_a_row_is_understood_and_tells_its_format(format, row, expected):
    assert document(row, format, "here") == expected
    assert format_of(row, "here") == format


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("text", {"text": None}),
        ("text", {"text": "\ud800"}),
        ("messages", {"text": "one"}),
        ("messages", {"messages": "one"}),
        ("messages", {"messages": ["one"]}),
        ("messages", {"messages": [{"content": "one"}]}),
        ("messages", {"messages": [{"role": "", "content": "one"}]}),
        ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": [{"role": "user", "content": 3}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("messages", {"messages": [{"role": "user", "content": "x", "name": b"\xff"}]}),
        ("messages", {"messages": [{**ASKED, "calls": json.loads("[" * 65 + "]" * 65)}]}),
        ("messages", {"messages": [ASKED], "tools": "["}),
        ("messages", {"messages": [ASKED], "tools": [3]}),
        ("alpaca", {"instruction": "x"}),
        ("alpaca", {"instruction": 3, "output": "x"}),
        ("alpaca", {"instruction": "x", "input": 3, "output": "x"}),
        ("alpaca", {"instruction": "x", "output": "x", "history": [["a"]]}),
        ("alpaca", {"instruction": "x", "output": "x", "history": "a"}),
        ("sharegpt", {"conversations": [{"from": "alien", "value": "x"}]}),
        ("sharegpt", {"conversations": [{"from": ["human"], "value": "x"}]}),
        ("sharegpt", {"conversations": [{"from": "human"}]}),
        ("sharegpt", {"conversations": {"from": "human"}}),
        ("messages", {"messages": [ASKED, {**SAID, "weight": 0.5}]}),
        ("messages", {"messages": [ASKED, {**SAID, "weight": True}]}),
        ("messages", {"messages": [{**ASKED, "weight": 1}, SAID]}),
        ("prompt-completion", {"prompt": "who?"}),
        ("prompt-completion", {"prompt": "who?", "completion": [SAID]}),
        ("prompt-completion", {"prompt": [ASKED], "completion": "me"}),
        ("prompt-completion", {"prompt": "who?", "completion": "me", "system": "s"}),
        ("question-answer", {"question": "who?", "answer": None}),
        ("text", {"a\nb\u2028c": 1}),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_the_shape_that_would(format, row):
    with pytest.raises(DataError) as caught:
        document(row, format, "data.jsonl:3")
    assert str(caught.value).startswith("data.jsonl:3: ")
    assert "each row is {" in str(caught.value)
    assert "; its columns are " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@given(
    row=json_values | st.fixed_dictionaries({}, optional=dict.fromkeys(["messages", "conversations", "instruction"], json_values))
)
def test_any_row_is_a_document_or_a_line_of_error(row):
    for format in ROWS:
        errors = []
        try:
            assert isinstance(document(row, format, "here"), str | Chat | Completion)
        except DataError as error:
            errors = str(error).splitlines()
        assert len(errors) <= 1


@pytest.mark.parametrize("depth", [60, 400, 900, 970, 990, 10**5])
@pytest.mark.parametrize("where", ['{"text": "x", "more": %s}', '{"messages": [{"role": "user", "content": "x", "more": %s}]}'])
def test_deeply_nested_rows_are_read_or_one_line(tmp_path, depth, where):
    """Whatever function looks into them must not go as deep as they do."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "messages": []}\n' + where % ("[" * depth + "]" * depth) + "\n")
    for format in ("text", "messages"):
        errors = []
        try:
            read(path, format=format)
        except DataError as error:
            errors = str(error).splitlines()
        assert len(errors) <= 1


# Files


@pytest.mark.parametrize("format", ["text", "messages", "alpaca", "sharegpt", "question-answer"])
def test_a_table_gives_the_samples_of_the_same_lines(tmp_path, format):
    rows = [row for row, _ in ROWS[format] if "tools" not in row]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [
        {**row, "messages": [m for m in row["messages"] if isinstance(m["content"], str)]} if "messages" in row else row
        for row in rows
    ]
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {name: [row.get(name) for row in rows] for name in {name for row in rows for name in row}}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet")
    lines, table = read(tmp_path / "same.jsonl"), read(tmp_path / "table.parquet")
    assert lines.documents.about.tokens_sha256 == table.documents.about.tokens_sha256
    assert len(lines.documents.lengths) == len(rows)


def test_a_table_is_read_a_few_rows_at_a_time_and_only_what_is_known_of_it(tmp_path):
    n = 100
    columns = {"text": [f"row {i}" for i in range(n)], "image": [b"\xff" * 100] * n}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=30)
    rows = list(find_files(tmp_path, tmp_path / "run" / "tokens").rows(0))
    assert rows == [(i + 1, {"text": f"row {i}"}) for i in range(n)]


def test_a_table_of_large_row_groups_is_read_a_row_at_a_time(tmp_path, monkeypatch):
    texts = [f"row {i} {'x' * 900 * (i % 2)}" for i in range(40)]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "me"}] for text in texts]
    columns = {"text": texts, "messages": chats}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=30, use_dictionary=False)
    monkeypatch.setattr(tables, "MAX_DOCUMENT_BYTES", 5000)
    at_once = []
    rows_of = tables._rows_of
    monkeypatch.setattr(tables, "_rows_of", lambda file, batch, n: at_once.append(batch.num_rows) or rows_of(file, batch, n))
    rows = [row for _, row in find_files(tmp_path, tmp_path / "run" / "tokens").rows(0)]
    assert rows == [{"text": text, "messages": chat} for text, chat in zip(texts, chats, strict=True)]
    assert set(at_once) == {1}
    monkeypatch.setattr(tables, "MAX_DOCUMENT_BYTES", 2**20)
    monkeypatch.setattr(tables, "BATCH_BYTES", 10_000)
    at_once.clear()
    assert [row for _, row in find_files(tmp_path, tmp_path / "run" / "tokens").rows(0)] == rows
    assert 5 < max(at_once) < 20, "of smaller ones so many as make a batch"


BOMBS = {
    # name: (column, limits, what is said)
    "one text, said often": ("text", {}, "row 3: a row above"),
    "a message, said often": ("messages", {}, "row 3: a row above"),
    "a list of nothing": ("nothing", {}, "row 3: a row above"),
    "too many bytes": ("text", {"MAX_GROUP_BYTES": 2**16}, "row group 1 holds 1,04.,... bytes, and 65,536 are the most"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_table_that_stands_for_much_is_refused_before_it_takes_memory(tmp_path, monkeypatch, name):
    """Dictionaries and runs of equal values let a few bytes stand for any number of them."""
    column, limits, says = BOMBS[name]
    once = pyarrow.array(["x" * 2**20])
    if column == "text":  # a table may also put a long text into each row, which is no harm
        values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 35, pyarrow.int32()), once)
        monkeypatch.setattr(tables, "MAX_DOCUMENT_BYTES", 2**20 - 1 if not limits else 2**30)
        says = says.replace("row 3", "row 1")
    elif column == "messages":
        said = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 70, pyarrow.int32()), once)
        roles = pyarrow.array(["user"] * 70)
        turns = pyarrow.StructArray.from_arrays([roles, said], ["role", "content"])
        values = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 70], pyarrow.int32()), turns)
        monkeypatch.setattr(tables, "MAX_DOCUMENT_BYTES", 2**25)
    else:
        values = pyarrow.array([[None], [None], [None] * 100_000, [None]], pyarrow.list_(pyarrow.int32()))
        monkeypatch.setattr(tables, "MAX_DOCUMENT_BYTES", 2**22)
    column = column if column == "text" else "messages"
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({column: values}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 5000
    for limit, value in limits.items():
        monkeypatch.setattr(tables, limit, value)
    before, seen = pyarrow.total_allocated_bytes(), []
    row_of = tables._rows_of

    def noted(file, batch, n):
        seen.append(pyarrow.total_allocated_bytes() - before)
        return row_of(file, batch, n)

    monkeypatch.setattr(tables, "_rows_of", noted)
    with pytest.raises(DataError, match=rf"a\.parquet: {says}") as caught:
        list(find_files(path, tmp_path / "run" / "tokens").rows(0))
    assert len(str(caught.value).splitlines()) == 1
    assert bool(limits) == (not seen), "what is known beforehand is not read"
    assert max(seen, default=0) < 2**23, "a text is held once"


def test_what_is_wrong_in_a_table_is_named_by_file_and_row(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), path)
    assert "a.parquet: row 2: no string" in refused(path)
    pyarrow.parquet.write_table(pyarrow.table({"story": ["one"], "n": [1]}), path)
    assert "a.parquet: its columns are story, n" in refused(path)
    whole = path.read_bytes()
    for damaged in (
        b"",
        b"PAR1",
        b"\x00" * 100,
        whole[:-20],
        whole[:4] + b"\xff" * 60 + whole[64:],
        b"PAR1" + b"\xff" * 50 + b"PAR1",
    ):
        path.write_bytes(damaged)
        assert "a.parquet" in refused(path)


@given(place=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_table_is_read_or_one_line(tmp_path_factory, place, value):
    folder = tmp_path_factory.mktemp("data")
    path = folder / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(20)]}), path)
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content)
    errors = []
    try:
        list(find_files(path, folder / "cache").rows(0))
    except DataError as error:
        errors = str(error).splitlines()
    assert len(errors) <= 1


def test_texts_beside_chats_are_left_out_and_counted(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "README.md").write_text("about the data")
    (data / "a.jsonl").write_text(json.dumps({"messages": [ASKED, SAID]}) + "\n")
    for format in ("auto", "messages"):
        samples = read(data, format=format)
        assert samples.counts.n_documents == 1
        assert "1 files left out" in samples.words()["data"]
        assert "messages" in samples.words()["data"]
    assert 'a.jsonl:1: no string under "text"' in refused(data, format="text")
    assert 'README.md: no list under "messages"' in refused(data / "README.md", format="messages")


def test_the_first_row_decides_and_others_must_follow(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x", "messages": [ASKED, SAID]}) + "\n" + json.dumps({"text": "x"}) + "\n")
    assert 'a.jsonl:2: no list under "messages"' in refused(path)
    assert read(path, format="text").counts.n_documents == 2


def test_what_is_too_long_or_teaches_nothing_is_counted_in_words(tmp_path):
    path = tmp_path / "a.jsonl"
    long = {"role": "assistant", "content": "x" * 90}
    rows = [[ASKED, SAID], [ASKED], [ASKED, long], []]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    said = read(path).words()
    assert said["rows"] == "4 documents, 2 with nothing to learn left out, 1 cut to a sequence's length"
    assert said["sequences"] == "2 of 64 tokens, one document each, padded, 74% full"
    assert "warning" not in said
    assert "2 with nothing to learn left out, 1 split" in read(path, too_long="split").words()["rows"]
    assert "1 too long and left out" in read(path, too_long="skip").words()["rows"]
    assert "a.jsonl:3: 119 tokens" in refused(path, too_long="refuse")
    assert "a.jsonl:2: nothing in it to learn" in refused(path, unsupervised="refuse")
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows[2:3]))
    assert read(path).words()["warning"].startswith("100% of the documents are cut to 64 tokens, and what follows is")
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 90}, SAID]}) + "\n")
    assert "what is to be learned of each of 1 documents begins after 64 tokens, where it is cut" in refused(path)
    path.write_text(json.dumps({"messages": [ASKED]}) + "\n")
    assert "a.jsonl: nothing to learn in it (1 documents, 1 with nothing to learn left out)" in refused(path)


def test_packing_by_document_is_for_models_that_can(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [ASKED, SAID]}) + "\n")

    def packing(by_document: bool, **fields: object) -> str:
        data = read_data(DataSettings(str(path), **fields), None, 300, 64, 1, 0, tmp_path / "cache", by_document)
        assert (data.batch(0).document_tokens is not None) == (data.shape.packing == "documents")
        return data.shape.packing

    assert packing(True) == "documents"
    assert packing(False) == "one"
    assert packing(True, packing="joined") == "joined"
    assert "cannot attend to each document" in refused(path, packing="documents")
    path.write_text('{"text": "one"}\n')
    assert packing(True) == "joined"


def test_a_pipe_among_the_rows_does_not_stop_the_reading(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n')
    assert read_data(DataSettings(str(tmp_path)), None, 300, 8, 1, 0, tmp_path / "run" / "tokens").n_sequences == 1
