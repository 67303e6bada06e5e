"""Formats: detection of a row's format, and errors with its location."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.data import DataRequest, read_data
from penstock.data.formats import PREFERENCE, format_of, read_row
from penstock.data.messages import FLAGS, Chat, Completion
from penstock.runtime.errors import DataError
from penstock.settings import DataSettings
from tests.bytes_of_files import only, read, refused, texts_of, write_lines

QUESTION, ANSWER = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}
SYSTEM, RESULT, SILENT = {"role": "system", "content": "s"}, {"role": "tool", "content": "4"}, {**ANSWER, "weight": 0}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
PARTS = [{"type": "text", "text": "wh"}, {"type": "text", "text": "o?"}]
CALL = {"role": "assistant", "tool_calls": [{"id": 1}]}
CHAT, WEIGHED = Chat((QUESTION, ANSWER)), Chat((QUESTION, ANSWER, QUESTION, ANSWER), None, frozenset({0, 1, 2}))
QUESTIONS = Chat((SYSTEM, QUESTION, ANSWER), None, frozenset({0, 1}))
ROWS = [
    ("text", {"text": "one", "more": 1}, Completion("", "one")),
    ("messages", {"messages": [QUESTION, ANSWER]}, CHAT),
    ("messages", {"messages": []}, Chat(())),
    ("messages", {"messages": [{"role": "user", "content": PARTS}, {**ANSWER, "tool_calls": None}], "tools": None}, CHAT),
    ("messages", {"messages": [CALL], "tools": '[{"name": "add"}]'}, Chat(({**CALL, "content": ""},), ({"name": "add"},))),
    ("messages", {"messages": [QUESTION, SILENT, {**ANSWER, "weight": 1}]}, Chat((QUESTION, ANSWER, ANSWER), None, frozenset({1}))),
    ("alpaca", {"instruction": "who?", "input": "", "output": "me", "system": None}, CHAT),
    ("alpaca", {"instruction": "w", "input": "ho?", "output": "me"}, Chat(({"role": "user", "content": "w\nho?"}, ANSWER))),
    ("alpaca", {"instruction": "who?", "output": "me", "history": [["who?", "me"]]}, Chat((QUESTION, ANSWER, QUESTION, ANSWER))),
    ("sharegpt", {"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}]}, CHAT),
    ("sharegpt", {"conversations": [{"from": "observation", "value": "4"}], "system": "s"}, Chat((SYSTEM, RESULT))),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": "me", "weight": 0.0}]}, Chat((ANSWER,), None, frozenset({0}))),
    ("prompt-completion", {"prompt": "who? ", "completion": "me", "text": "x"}, Completion("who? ", "me")),
    ("prompt-completion", {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}, WEIGHED),
    ("question-answer", {"question": "who?", "answer": "me", "id": 3}, CHAT),
    ("messages", {"messages": [QUESTION, SILENT], "system": "s"}, Chat((SYSTEM, QUESTION, ANSWER), None, frozenset({2}))),
    ("messages", {"messages": [SYSTEM, QUESTION], "system": "s"}, Chat((SYSTEM, QUESTION))),
    ("prompt-completion", {"prompt": [QUESTION], "completion": [ANSWER], "system": "s"}, QUESTIONS),
    ("question-answer", {"question": "who?", "answer": "me", "system": "s"}, Chat((SYSTEM, QUESTION, ANSWER))),
]


@pytest.mark.parametrize(("format", "row", "expected"), ROWS)
def test_a_row_is_understood_and_tells_its_format(format, row, expected):
    assert read_row(row, format, "here") == [(expected, ())]
    assert format_of(row, "here") == format


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("text", {"text": None}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "audio", "url": "x"}]}]}),
        ("messages", {"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}),
        ("alpaca", {"instruction": "x", "output": "x", "history": [["a"]]}),
        ("prompt-completion", {"prompt": "who?", "completion": "me", "system": "s"}),
        ("text", {"a\nb\u2028c": 1}),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_an_example(format, row):
    with pytest.raises(DataError, match=r"^data\.jsonl:3: .*each row is {.*; its columns are ") as caught:
        read_row(row, format, "data.jsonl:3")
    assert len(str(caught.value).splitlines()) == 1


columns = ["messages", "conversations", "instruction", "output", "history", "prompt", "completion", "tools"]


@given(row=json_values | st.fixed_dictionaries({}, optional=dict.fromkeys(columns, json_values)))
def test_any_row_is_a_document_or_one_line(row):
    for format in {format for format, _, _ in ROWS}:
        try:
            ((item, _),) = read_row(row, format, "here")
            assert isinstance(item, Chat | Completion)
        except DataError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017


def test_the_first_row_decides_and_others_must_follow(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x", "messages": [QUESTION, ANSWER]}, {"text": "x"}])
    assert 'a.jsonl:2: no list under "messages"' in refused(path)
    assert texts_of(read(path, format="text")) == ["x", "x"]
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": [QUESTION], "completion": [ANSWER]}]
    assert "texts and messages in one data set" in refused(write_lines(tmp_path / "b.jsonl", rows))


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_other_trainers_are_obeyed_or_refused_by_name(flag):
    turn = {"from": "gpt", "value": "me"}
    for value, unlearned in ((False, {0}), (0, {0}), (0.0, {0}), (True, set()), (1, set()), (None, set())):
        expected = [(Chat((ANSWER,), None, frozenset(unlearned)), ())]
        assert read_row({"messages": [{**ANSWER, flag: value}]}, "messages", "here") == expected
        assert read_row({"conversations": [{**turn, flag: value}]}, "sharegpt", "here") == expected
    contradicting = {"weight": 1, "loss": 1} | {flag: 0}
    for message in ({**ANSWER, flag: "no"}, {**ANSWER, flag: [1, 0]}, {**QUESTION, flag: 1}, {**ANSWER, **contradicting}):
        with pytest.raises(DataError, match=flag):
            read_row({"messages": [message]}, "messages", "here")
    with pytest.raises(DataError, match="train_detail"):
        read_row({"messages": [{**ANSWER, "train_detail": [{"begin_offset": 0}]}]}, "messages", "here")
    with pytest.raises(DataError, match="another system message"):
        read_row({"messages": [SYSTEM, QUESTION], "system": "t"}, "messages", "here")


def test_pairs_of_questions_are_conversations(tmp_path):
    """Rows like Orca's are those of messages; other columns are listed."""
    answers = {"chosen": "me", "rejected": "you"}
    of_messages = {"prompt": [SYSTEM, QUESTION]} | {name: [{**ANSWER, "content": text}] for name, text in answers.items()}
    expected = read_row(of_messages, PREFERENCE, "here")
    for questions in ({"question": "who?"}, {"instruction": "who?", "input": ""}, {"instruction": "wh", "input": "o?"}):
        pair = read_row({"system": "s", **questions, **answers, "id": 1}, PREFERENCE, "here")
        question = {**QUESTION, "content": "wh\no?"} if questions.get("input") else QUESTION
        assert [chat.messages[1] for chat, _ in pair] == [question] * 2
        assert pair == expected or questions.get("input")
    rows = [{"system": "s", "question": "who?", **answers, "id": 1}, {"question": "x", **answers}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    data = read_data(DataRequest(DataSettings(str(path)), None, 300, 99, 2, 0, tmp_path / "t", objective=None))
    assert data.words()["data"].endswith("preference, conversations as <|role|> and text, not read: id")


def test_prompts_beyond_the_sequence_advise_a_longer_one(tmp_path):
    rows = [{"messages": [{**QUESTION, "content": "x" * 200}, ANSWER]}] * 4
    message = refused(write_lines(tmp_path / "a.jsonl", rows))
    assert "prompts fill the 64 tokens of a sequence, and the longest document has 227 tokens: choose a longer --seq-len" in message


def test_files_of_a_folder_have_the_same_columns(tmp_path):
    write_lines(tmp_path / "data" / "a.jsonl", [{"messages": [QUESTION, ANSWER]}])
    write_lines(tmp_path / "data" / "b.jsonl", [{"question": "who?", "answer": "me"}])
    message = refused(tmp_path / "data")
    assert "b.jsonl:1: columns of question-answer, and those of " in message
    assert "a.jsonl:1 are of messages; give files of different columns each a --data of its own" in message


def test_too_long_and_unsupervised_samples_are_counted(tmp_path):
    long = {"role": "assistant", "content": "x" * 90}
    rows = [{"messages": messages} for messages in ([QUESTION, ANSWER], [QUESTION], [QUESTION, long], [])]
    path = write_lines(tmp_path / "a.jsonl", rows)
    message = read(path).words()
    assert message["rows"] == "4 documents, 2 unsupervised, 1 cut"
    assert message["sequences"] == "2 of 64 tokens, 74% full, packing one"
    assert "warning" not in message
    assert read(write_lines(path, rows[2:3])).words()["warning"].startswith("data: many documents are cut, and the rest")
    long = {"messages": [{"role": "user", "content": "x" * 90}, ANSWER]}
    assert "nothing to learn in it (1 document, 1 unsupervised, 1 cut)" in refused(write_lines(path, [long]))


def test_packing_by_document_is_for_models_that_can(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [QUESTION, ANSWER]}])

    def packing(by_document: bool, **fields: object) -> str:
        data = read(path, by_document=by_document, **fields)
        assert (data.batch(0).document_tokens is not None) == (only(data).shape.packing == "documents")
        return only(data).shape.packing

    assert (packing(True), packing(False), packing(True, packing="joined")) == ("documents", "one", "joined")
    assert "cannot attend to each document" in refused(path, packing="documents")
    assert read(write_lines(path, [{"text": "one"}]), by_document=True).batch(0).document_tokens is None
