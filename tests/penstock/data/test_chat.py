"""Does a model learn what the assistant says, where that ends, and nothing else?"""

import json
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from penstock.data import chat, templates
from penstock.data.chat import Encoded, Plain, Templated, read_chat_format
from penstock.data.encoders import ByteEncoder, Encoder, read_encoder
from penstock.data.formats import Chat
from runtime.errors import DataError
from tests.chats import CHATML, QWEN3, STYLES, write_talker

TALK = (
    {"role": "user", "content": "Hello, how are you?"},
    {"role": "assistant", "content": "Fine, thanks! 20 €"},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
)
TOLD = ({"role": "system", "content": "You are the river."}, *TALK)
MARKED = ["chatml", "chatml, marked short"]
STABLE = [*MARKED, "chatml, unmarked", "llama 3", "mistral"]
FORGETFUL = ["qwen 3", "gpt-oss"]


def speech_of(folder: Path, style: str, template: str | None = None) -> Templated:
    write_talker(folder, style, template)
    speech = read_chat_format(folder, read_encoder(folder))
    assert isinstance(speech, Templated)
    return speech


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """The speech of a style: one for all tests, as its process takes a second to start."""
    known: dict[str, Templated] = {}

    def of(style: str) -> Templated:
        if style not in known:
            known[style] = speech_of(tmp_path_factory.mktemp("model"), style)
        return known[style]

    yield of
    for speech in known.values():
        speech.close()


def learned(encoder: Encoder, encoded: Encoded) -> list[str]:
    """What is learned, run by run, special tokens and all."""
    tokenizer = encoder.tokenizer
    return [tokenizer.decode(encoded.ids[a:b].tolist(), skip_special_tokens=False) for a, b in encoded.runs]


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    ("style", "messages", "text", "answers"),
    [
        (
            "chatml",
            TOLD,
            "<|im_start|>system\nYou are the river.<|im_end|>\n<|im_start|>user\nHello, how are you?<|im_end|>\n"
            "<|im_start|>assistant\nFine, thanks! 20 €<|im_end|>\n<|im_start|>user\nWhat is two and two?<|im_end|>\n"
            "<|im_start|>assistant\nIt is four.<|im_end|>\n",
            ["Fine, thanks! 20 €<|im_end|>", "It is four.<|im_end|>"],
        ),
        ("chatml, marked short", TOLD, None, ["Fine, thanks! 20 €<|im_end|>", "It is four.<|im_end|>"]),
        ("chatml, unmarked", TOLD, None, ["Fine, thanks! 20 €<|im_end|>", "It is four.<|im_end|>"]),
        (
            "llama 3",
            TOLD,
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are the river.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHello, how are you?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nFine, thanks! 20 €<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhat is two and two?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nIt is four.<|eot_id|>",
            ["Fine, thanks! 20 €<|eot_id|>", "It is four.<|eot_id|>"],
        ),
        (
            "mistral",
            TALK,
            "<s>[INST] Hello, how are you? [/INST] Fine, thanks! 20 €</s>[INST] What is two and two? [/INST] It is four.</s>",
            ["Fine, thanks! 20 €</s>", "It is four.</s>"],
        ),
    ],
)
def test_the_answers_and_their_ends_are_learned(talker, style, messages, text, answers):
    speech = talker(style)
    (encoded,) = speech.encode(Chat(messages), "here")
    if text is not None:
        assert encoded.ids.tolist() == speech.encoder.spans(text)[0].tolist()
    assert [answer.lstrip(" ") for answer in learned(speech.encoder, encoded)] == answers


@pytest.mark.parametrize("style", STABLE)
def test_tokens_are_those_of_transformers(talker, style):
    speech = talker(style)
    theirs = AutoTokenizer.from_pretrained(speech.place.parent)
    (encoded,) = speech.encode(Chat(TALK), "here")
    assert encoded.ids.tolist() == theirs.apply_chat_template(list(TALK), return_dict=True)["input_ids"]
    prompt = theirs.apply_chat_template(list(TALK[:3]), add_generation_prompt=True, return_dict=True)["input_ids"]
    assert speech.prompt(list(TALK[:3])).tolist() == prompt
    begin = theirs.bos_token_id
    assert begin is None or encoded.ids.tolist().count(begin) == 1, "it begins once"


def test_what_is_learned_is_what_transformers_masks(talker):
    speech = talker("chatml")
    theirs = AutoTokenizer.from_pretrained(speech.place.parent).apply_chat_template(
        list(TOLD), return_dict=True, return_assistant_tokens_mask=True
    )
    mask = np.zeros(len(theirs["input_ids"]), dtype=int)
    (encoded,) = speech.encode(Chat(TOLD), "here")
    for first, stop in encoded.runs:
        mask[first:stop] = 1
    assert mask.tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("style", ["chatml", "chatml, unmarked", "llama 3"])
def test_an_answer_follows_exactly_what_the_model_is_prompted_with(talker, style):
    """Otherwise it would be trained on what it never sees."""
    speech = talker(style)
    (encoded,) = speech.encode(Chat(TALK), "here")
    for turn, (first, _) in zip((1, 3), encoded.runs, strict=True):
        assert encoded.ids[:first].tolist() == speech.prompt(list(TALK[:turn])).tolist()


@pytest.mark.parametrize("style", [*STABLE, *FORGETFUL, None])
def test_an_answer_that_is_not_to_be_learned_is_read_and_the_others_are_learned_as_ever(talker, style):
    """As `weight` 0 says of a message, and of what comes before a completion."""
    speech = talker(style) if style is not None else Plain(ByteEncoder())
    whole = speech.encode(Chat(TALK), "here")
    for silent, kept in ((1, 3), (3, 1)):
        found = speech.encode(Chat(TALK, None, frozenset({0, silent})), "here")
        assert sum(len(one.runs) for one in found) == 1
        (one,) = found
        first, second = [(of, run) for of in whole for run in of.runs.tolist()]
        of, run = first if kept == 1 else second
        assert one.ids[: run[1]].tolist() == of.ids[: run[1]].tolist()
        assert one.runs.tolist() == [run]
        if style in STABLE:
            assert one.ids.tolist() == of.ids.tolist(), "all of it is read"


def test_a_conversation_that_nobody_answers_teaches_nothing(talker):
    for style in ("chatml", "llama 3", "qwen 3"):
        speech = talker(style)
        for messages in (TALK[:1], ()):
            (encoded,) = speech.encode(Chat(messages), "here")
            assert encoded.runs.tolist() == []


ASKED, SAID, AGAIN, THEN = TALK
HELLO, TWO = ASKED["content"], AGAIN["content"]
CALL, RESULT = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}, {"role": "tool", "content": "4"}
APART = {
    "no reasoning": (
        "qwen 3",
        ({"role": "system", "content": "You are the river."}, *TALK),
        [
            (
                f"<|im_start|>system\nYou are the river.<|im_end|>\n<|im_start|>user\n{HELLO}<|im_end|>\n<|im_start|>assistant\n",
                "<think>\n\n</think>\n\nFine, thanks! 20 €<|im_end|>",
            ),
            (
                f"<|im_start|>system\nYou are the river.<|im_end|>\n<|im_start|>user\n{HELLO}<|im_end|>\n"
                f"<|im_start|>assistant\nFine, thanks! 20 €<|im_end|>\n<|im_start|>user\n{TWO}<|im_end|>\n<|im_start|>assistant\n",
                "<think>\n\n</think>\n\nIt is four.<|im_end|>",
            ),
        ],
    ),
    "reasoning, and a question that nobody answers": (
        "qwen 3",
        (
            ASKED,
            {**SAID, "reasoning_content": "Who asks?"},
            AGAIN,
            {**THEN, "content": "<think>\n2 + 2\n</think>\n\nIt is four."},
            ASKED,
        ),
        [
            (
                f"<|im_start|>user\n{HELLO}<|im_end|>\n<|im_start|>assistant\n",
                "<think>\nWho asks?\n</think>\n\nFine, thanks! 20 €<|im_end|>",
            ),
            (
                f"<|im_start|>user\n{HELLO}<|im_end|>\n<|im_start|>assistant\nFine, thanks! 20 €<|im_end|>\n"
                f"<|im_start|>user\n{TWO}<|im_end|>\n<|im_start|>assistant\n",
                "<think>\n2 + 2\n</think>\n\nIt is four.<|im_end|>",
            ),
        ],
    ),
    "a call without reasoning": (
        "qwen 3",
        (AGAIN, CALL, RESULT, THEN),
        [
            (f"<|im_start|>user\n{TWO}<|im_end|>\n<|im_start|>assistant\n", '<think>\n\n</think>\n\n{"name": "add"}<|im_end|>'),
            (
                f'<|im_start|>user\n{TWO}<|im_end|>\n<|im_start|>assistant\n{{"name": "add"}}<|im_end|>\n'
                "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
                "<think>\n\n</think>\n\nIt is four.<|im_end|>",
            ),
        ],
    ),
    "thinking": (
        "gpt-oss",
        (ASKED, {**SAID, "thinking": "Who asks?"}, AGAIN, {**THEN, "thinking": "2 + 2"}),
        [
            (
                f"<|start|>user<|message|>{HELLO}<|end|><|start|>assistant",
                "<|channel|>analysis<|message|>Who asks?<|end|>"
                "<|start|>assistant<|channel|>final<|message|>Fine, thanks! 20 €<|return|>",
            ),
            (
                f"<|start|>user<|message|>{HELLO}<|end|><|start|>assistant<|channel|>final<|message|>Fine, thanks! 20 €<|end|>"
                f"<|start|>user<|message|>{TWO}<|end|><|start|>assistant",
                "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>It is four.<|return|>",
            ),
        ],
    ),
}


@pytest.mark.parametrize("case", APART)
def test_where_earlier_turns_are_rewritten_each_answer_is_learned_as_it_would_be_given(talker, case):
    style, messages, expected = APART[case]
    speech = talker(style)
    found = speech.encode(Chat(messages), "here")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for encoded, (before, answer), i in zip(found, expected, answers, strict=True):
        end = "\n" if style == "qwen 3" else ""
        assert encoded.ids.tolist() == speech.encoder.spans(before + answer + end)[0].tolist()
        assert learned(speech.encoder, encoded) == [answer]
        assert encoded.ids[: encoded.runs[0, 0]].tolist() == speech.prompt(list(messages[:i])).tolist()


@pytest.mark.parametrize(
    ("style", "messages"),
    [
        *((style, TALK[:2]) for style in FORGETFUL),
        ("qwen 3", (AGAIN, {**CALL, "reasoning_content": "add them"}, RESULT, {**THEN, "reasoning_content": "so"})),
    ],
)
def test_a_conversation_of_which_nothing_is_rewritten_stays_whole(talker, style, messages):
    speech = talker(style)
    (encoded,) = speech.encode(Chat(messages), "here")
    assert len(learned(speech.encoder, encoded)) == sum(message["role"] == "assistant" for message in messages)
    assert encoded.ids.tolist() == speech.encoder.spans(speech.template.write(list(messages)).text)[0].tolist()


def test_tools_are_shown_before_each_answer(tmp_path):
    speech = speech_of(tmp_path, "qwen 3", "{{ tools | tojson }}" + QWEN3)
    first, second = speech.encode(Chat(TALK, tools=({"name": "add"},)), "here")
    for encoded, answer in ((first, "Fine, thanks! 20 €"), (second, "It is four.")):
        assert learned(speech.encoder, encoded) == [f"<think>\n\n</think>\n\n{answer}<|im_end|>"]
        assert speech.encoder.decode(encoded.ids.tolist()).startswith('[{"name": "add"}]user')
    speech.close()


def test_an_answer_that_is_not_written_as_it_is_prompted_for_is_refused(talker):
    for messages, i in ((TALK, 1), (TALK[:2], 1), (TOLD[:3], 2)):
        with pytest.raises(DataError, match=rf"data.jsonl:7: .*writes message {i} differently from how it prompts") as caught:
            talker("silent").encode(Chat(messages), "data.jsonl:7")
        assert len(str(caught.value).splitlines()) == 1


def test_what_an_endless_conversation_becomes_is_bounded(talker, monkeypatch):
    """Each answer brings all that came before it once more."""
    monkeypatch.setattr(chat, "MAX_APART_CHARACTERS", 2000)
    assert len(talker("qwen 3").encode(Chat(TALK * 2), "here")) == 4
    with pytest.raises(DataError, match=r"data.jsonl:7: .*more than 2,000 characters; split the conversation") as caught:
        talker("qwen 3").encode(Chat(TALK * 9), "data.jsonl:7")
    assert len(str(caught.value).splitlines()) == 1


def test_what_a_template_refuses_is_named_with_its_place(talker):
    speech = talker("mistral")
    with pytest.raises(DataError, match=r"data.jsonl:3: .*user and assistant must alternate") as caught:
        speech.encode(Chat(TOLD), "data.jsonl:3")
    assert len(str(caught.value).splitlines()) == 1
    (encoded,) = speech.encode(Chat(TALK), "here")
    assert encoded.runs.any(), "and the next one is taken"


def test_tools_and_calls_reach_the_template(tmp_path):
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.tool_calls | default([]) | tojson }};{% endfor %}"
    speech = speech_of(tmp_path, "chatml", source)
    messages = ({"role": "user", "content": "Hello"}, {"role": "tool", "content": "four", "tool_calls": [{"name": "add"}]})
    (encoded,) = speech.encode(Chat(messages, tools=({"name": "add"},)), "here")
    assert speech.encoder.decode(encoded.ids.tolist()) == '[{"name": "add"}]user[];tool[{"name": "add"}];'
    speech.close()


def test_today_is_always_the_same_day(tmp_path):
    """A stream that is resumed tomorrow must give the tokens of today."""
    speech = speech_of(tmp_path, "chatml", "{{ strftime_now('%Y-%m-%d') }}")
    said = speech.encoder.decode(speech.prompt([]).tolist())
    assert said == date(*templates.TODAY).isoformat()
    assert said != date.today().isoformat()
    speech.close()


def test_the_template_is_found_where_transformers_finds_it(tmp_path):
    for named in (CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]):
        speech = speech_of(tmp_path, "chatml", named)
        assert speech.template.source == AutoTokenizer.from_pretrained(tmp_path).get_chat_template() == CHATML
    (tmp_path / "chat_template.jinja").write_text("other")
    speech = read_chat_format(tmp_path, read_encoder(tmp_path))
    assert speech.template.source == AutoTokenizer.from_pretrained(tmp_path).get_chat_template() == "other"


def test_special_tokens_reach_the_template_however_they_are_written(tmp_path):
    write_talker(tmp_path, "llama 3", bos_token={"content": "<|begin_of_text|>", "lstrip": False})
    speech = read_chat_format(tmp_path, read_encoder(tmp_path))
    (encoded,) = speech.encode(Chat(TALK), "here")
    assert encoded.ids.tolist()[0] == read_encoder(tmp_path).tokenizer.token_to_id("<|begin_of_text|>")
    speech.close()


# Without a template


def test_a_model_of_bytes_talks_plainly():
    speech = Plain(ByteEncoder())
    (encoded,) = speech.encode(Chat(TALK[:2]), "here")
    asked, said = b"<|user|>\nHello, how are you?", "Fine, thanks! 20 €".encode()
    assert encoded.ids.tolist() == [*asked, 256, *b"<|assistant|>\n", *said, 256]
    assert [encoded.ids[a:b].tolist() for a, b in encoded.runs] == [[*said, 256]]
    first = int(encoded.runs[0][0])
    assert speech.prompt(list(TALK[:1])).tolist() == encoded.ids[:first].tolist()


def test_a_tokenizer_without_a_template_talks_plainly_and_begins_once(tmp_path):
    write_talker(tmp_path, "llama 3")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    speech = read_chat_format(tmp_path, read_encoder(tmp_path))
    assert isinstance(speech, Plain)
    (encoded,) = speech.encode(Chat(TALK), "here")
    assert learned(speech.encoder, encoded) == ["Fine, thanks! 20 €<|eot_id|>", "It is four.<|eot_id|>"]
    assert encoded.ids.tolist().count(speech.encoder.tokenizer.token_to_id("<|begin_of_text|>")) == 1
    assert "no chat template" in speech.words()


def test_tools_without_a_template_are_refused():
    with pytest.raises(DataError, match="data:1: tools"):
        Plain(ByteEncoder()).encode(Chat(TALK, tools=({"name": "add"},)), "data:1")
    with pytest.raises(DataError, match="data:1: tools"):
        Plain(ByteEncoder()).encode(Chat(({"role": "assistant", "content": "", "tool_calls": [{}]},)), "data:1")


# Templates that mean harm


HOSTILE = {
    "unfinished": "{% for message in messages %}",
    "unknown": "{{ messages | explode }}",
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}" + "{% endfor %}" * 3,
    "large": "{{ 'x' * 10 ** 11 }}",
    "doubling": "{% set s = namespace(t='x') %}{% for i in range(50) %}{% set s.t = s.t + s.t %}{% endfor %}{{ s.t }}",
    "deep": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "files": "{{ messages.__class__.__base__.__subclasses__() }}",
    "includes": "{% include '/etc/passwd' %}",
    "shouting": "{{ raise_exception('a\nb' * 10000) }}",
}


@pytest.mark.fast("some")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(tmp_path, monkeypatch, name):
    source = Path(templates.__file__).read_text().replace("MAX_SECONDS = 20", "MAX_SECONDS = 2").replace("2 * 2**30", "2**28")
    (tmp_path / "quick.py").write_text(source)
    monkeypatch.setattr(templates, "__file__", str(tmp_path / "quick.py"))
    speech = speech_of(tmp_path / "model", "chatml", HOSTILE[name] + "{% generation %}{% endgeneration %}" * (len(name) % 2))
    with pytest.raises(DataError) as caught:
        speech.encode(Chat(TALK), "data:1")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500
    assert str(caught.value).startswith("data:1: the chat template of ")
    speech.close()


@pytest.mark.parametrize(
    ("named", "says"), [(3, "tokenizer_config.json"), ("x" * 2**21, "tokenizer_config.json"), ({}, "no template")]
)
def test_what_is_no_template_is_refused(tmp_path, named, says):
    write_talker(tmp_path, "chatml", named)
    with pytest.raises(DataError, match=says):
        read_chat_format(tmp_path, read_encoder(tmp_path))


def test_a_file_that_is_no_template_is_refused(tmp_path):
    write_talker(tmp_path, "chatml")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"chat_template\.jinja"):
        read_chat_format(tmp_path, read_encoder(tmp_path))


def test_the_process_of_a_template_ends_with_it(tmp_path):
    speech = speech_of(tmp_path, "chatml")
    speech.prompt(list(TALK[:1]))
    process = speech.template._process
    assert process.poll() is None
    speech.close()
    assert process.poll() is not None
    assert speech.prompt(list(TALK[:1])).size, "and another is started when it is needed again"
    process = speech.template._process
    process.kill()
    process.wait()
    with pytest.raises(DataError, match="was ended"):
        speech.prompt(list(TALK[:1]))
    assert speech.prompt(list(TALK[:1])).size
    speech.close()


def test_every_style_is_tried():
    assert set(STYLES) == {*STABLE, *FORGETFUL, "silent"}
