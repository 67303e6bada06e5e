"""Chat templates: only the assistant's turns and their end tokens are learned."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.data.chat import MARKS, ChatTemplate, TooLargeError
from penstock.data.data import DataRequest, read_data
from penstock.data.documents import Reader
from penstock.data.files import DataFile, DataFiles, Limits
from penstock.data.formats import read_row
from penstock.data.messages import Chat
from penstock.data.tokenizer import read_template, read_tokenizer
from penstock.runtime.errors import DataError
from penstock.settings import DataSettings
from tests.bytes_of_files import write_lines
from tests.chats import CHATML, CHATML_UNMARKED, LLAMA3, QWEN3, STYLES, write_talker

QUESTION, ANSWER, AGAIN, THEN = TALK = (
    {"role": "user", "content": "Hello, how are you?"},
    {"role": "assistant", "content": "Fine, thanks! 20 €"},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
)
WITH_SYSTEM = ({"role": "system", "content": "You are the river."}, *TALK)
FORGETFUL = ["qwen 3", "gpt-oss"]  # they write earlier turns differently
STABLE = [style for style in STYLES if style not in (*FORGETFUL, "silent")]
FILES = DataFiles(Path("data"), (DataFile(Path("data.jsonl"), "data.jsonl", "lines"),))


@dataclass(frozen=True)
class Talker:
    """Folder of a model, and the tokens of conversations under its template."""

    folder: Path | None

    @property
    def template(self) -> ChatTemplate:
        return ChatTemplate(read_tokenizer(self.folder))

    def encode(self, messages: Any, tools: Any = None) -> list[tuple[list[int], list[list[int]]]]:
        """Return the documents of a conversation: ids, and [start, end) of each learned run."""
        reader = Reader(FILES, {}, "messages", self.template, 2**32, False)
        encoded = reader({"file": [0], "row": [7], "value": [{"messages": list(messages), "tools": tools}]})
        if encoded["problem"][0] is not None:
            raise DataError(encoded["problem"][0])
        return [(ids.tolist(), runs.reshape(-1, 2).tolist()) for ids, runs in zip(encoded["ids"], encoded["learned"], strict=True)]

    def learned(self, messages: Any) -> list[list[str]]:
        """Decode the learned runs of each document, with special tokens."""
        return [[self.shown(ids[first:stop]) for first, stop in runs] for ids, runs in self.encode(messages)]

    def shown(self, ids: list[int]) -> str:
        return self.template.tokenizer.decode(ids, special=True)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """Return the cached model of a style; None is a model of bytes without a template."""
    return cache(lambda style: Talker(None) if style is None else talker_in(tmp_path_factory.mktemp("model"), style))


def talker_in(folder: Path, style: str, template: object = None, **config: object) -> Talker:
    write_talker(folder, style, template, **config)
    return Talker(folder)


ENDS = {"llama 3": "<|eot_id|>", "mistral": "</s>", None: "<end>"}
PLAIN = "<|user|>\nHello, how are you?<end><|assistant|>\nFine, thanks! 20 €<end>"


@pytest.mark.parametrize("style", [*STABLE, None])
def test_the_answers_and_their_ends_are_learned(talker, style):
    ((ids, _),) = talker(style).encode(TALK)
    assert style is not None or talker(None).shown(ids).startswith(PLAIN)
    ((first, second),) = talker(style).learned(TALK)
    end = ENDS.get(style, "<|im_end|>")
    assert [first.lstrip(" "), second.lstrip(" ")] == [f"Fine, thanks! 20 €{end}", f"It is four.{end}"]


@pytest.mark.parametrize("style", [*STABLE, *FORGETFUL])
def test_tokens_are_those_of_transformers(talker, style):
    tokenizer = AutoTokenizer.from_pretrained(talker(style).folder)
    prompt = tokenizer.apply_chat_template(list(TALK[:3]), add_generation_prompt=True, return_dict=True)["input_ids"]
    assert talker(style).template.prompt(TALK[:3]) == prompt
    if style in STABLE:
        ((ids, _),) = talker(style).encode(TALK)
        assert ids == tokenizer.apply_chat_template(list(TALK), return_dict=True)["input_ids"]
        assert tokenizer.bos_token_id is None or ids.count(tokenizer.bos_token_id) == 1, "it begins once"


def test_learned_tokens_are_those_that_transformers_masks(talker):
    tokenizer = AutoTokenizer.from_pretrained(talker("chatml").folder)
    masks = tokenizer.apply_chat_template(list(WITH_SYSTEM), return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
    ((ids, runs),) = talker("chatml").encode(WITH_SYSTEM)
    assert [int(any(first <= t < stop for first, stop in runs)) for t in range(len(ids))] == masks


@pytest.mark.parametrize("style", [*STABLE, *FORGETFUL, None])
def test_an_answer_of_weight_0_is_read_and_not_learned(talker, style):
    answers = [(ids, run) for ids, runs in talker(style).encode(TALK) for run in runs]
    for silent, (expected, run) in zip((3, 1), answers, strict=True):
        weighed = [message | ({"weight": 0} if i == silent else {}) for i, message in enumerate(TALK)]
        ((ids, runs),) = talker(style).encode(weighed)
        assert runs == [run]
        assert ids[: run[1]] == expected[: run[1]]
        assert style in FORGETFUL or ids == expected, "all of it is read"


CALL, RESULT = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}, {"role": "tool", "content": "4"}
THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
REWRITTEN = {  # learned part of each answer
    "reasoning, and a question without an answer": (
        "qwen 3",
        (QUESTION, {**ANSWER, "reasoning_content": "Who asks?"}, AGAIN, THEN, QUESTION),
        ["<think>\nWho asks?\n</think>\n\nFine, thanks! 20 €<|im_end|>", "<think>\n\n</think>\n\nIt is four.<|im_end|>"],
    ),
    "a call without reasoning": (
        "qwen 3",
        (AGAIN, CALL, RESULT, THEN),
        ['<think>\n\n</think>\n\n{"name": "add"}<|im_end|>', "<think>\n\n</think>\n\nIt is four.<|im_end|>"],
    ),
    "thinking": (
        "gpt-oss",
        (QUESTION, {**ANSWER, "thinking": "Who asks?"}, AGAIN, {**THEN, "thinking": "2 + 2"}),
        [THOUGHT.format("Who asks?", "Fine, thanks! 20 €"), THOUGHT.format("2 + 2", "It is four.")],
    ),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_where_earlier_turns_change_each_answer_is_a_document(talker, case):
    style, messages, expected = REWRITTEN[case]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert talker(style).learned(messages) == [[answer] for answer in expected]
    for (ids, ((first, stop),)), i in zip(talker(style).encode(messages), answers, strict=True):
        assert ids[:first] == talker(style).template.prompt(messages[:i])
        assert talker(style).shown(ids[stop:]).strip() == ""


@pytest.mark.parametrize(
    ("style", "messages"),
    [
        *((style, TALK[:2]) for style in FORGETFUL),
        ("qwen 3", (AGAIN, {**CALL, "reasoning_content": "add them"}, RESULT, {**THEN, "reasoning_content": "so"})),
    ],
)
def test_a_conversation_whose_turns_stay_is_one_document(talker, style, messages):
    (learned,) = talker(style).learned(messages)
    assert len(learned) == sum(message["role"] == "assistant" for message in messages)


def test_tools_and_calls_reach_the_template(tmp_path, talker):
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.tool_calls | default([]) | tojson }};{% endfor %}"
    calling = talker_in(tmp_path / "a", "chatml", source)
    messages = (QUESTION, {"role": "tool", "content": "four", "tool_calls": [{"name": "add"}]})
    ((ids, _),) = calling.encode(messages, [{"name": "add"}])
    assert calling.shown(ids) == '[{"name": "add"}]user[];tool[{"name": "add"}];'
    forgetful = talker_in(tmp_path / "b", "qwen 3", "{{ tools | tojson }}" + QWEN3)
    for ids, _ in forgetful.encode(TALK, [{"name": "add"}]):
        assert forgetful.shown(ids).startswith('[{"name": "add"}]<|im_start|>user')
    for refused in ((TALK, [{"name": "add"}]), ([CALL], None)):
        with pytest.raises(DataError, match=r"data\.jsonl:7: .*tools and their calls need a chat template"):
            talker(None).encode(*refused)


def test_what_a_template_refuses_is_named_with_its_place(talker):
    with pytest.raises(DataError, match=r"data\.jsonl:7: .*user and assistant must alternate") as caught:
        talker("mistral").encode(WITH_SYSTEM)
    assert len(str(caught.value).splitlines()) == 1
    for messages, i in ((TALK, 1), (TALK[:2], 1), (WITH_SYSTEM[:3], 2)):
        with pytest.raises(DataError, match=rf"data\.jsonl:7: .*writes message {i} differently from how it prompts"):
            talker("silent").encode(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception('a\nb' * 10000) }}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_one_line(tmp_path, source):
    with pytest.raises(DataError, match=r"^data\.jsonl:7: the model's chat template rejects it") as caught:
        talker_in(tmp_path, "chatml", source).encode(TALK)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300


ENDLESS = {
    "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}": {"row_s": 0.2},
    "{% set r = range(100000) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}": {"row_s": 0.2},
    "{% set ns = namespace(x='x') %}{% for a in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": {"row_bytes": 10**6},
    "{{ messages[0].content * 1000000 }}": {"row_bytes": 10**6},
    **{
        f"{{{{ {code} }}}}": {}
        for code in ("'x' * 10**10", "'x'.ljust(10**10)", "'x' | center(10**10)", "'{:>99999999}'.format(1)")
    },
    **{f"{{{{ {code} }}}}": {} for code in ("'%99999999d' % 1", "3 ** (10 ** 9)")},
}


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_without_end_is_one_line(tmp_path, source):
    write_talker(tmp_path, "chatml", source)
    template = ChatTemplate(read_tokenizer(tmp_path), Limits(**{"row_s": 5.0} | ENDLESS[source]))
    with (
        pytest.raises(TooLargeError, match=r"^here: the chat template takes too long, or writes too much"),
        template.watch.at_work(),
    ):
        template.render(Chat(TALK), "here")
    write_talker(tmp_path, "chatml")
    with template.watch.at_work():
        assert ChatTemplate(read_tokenizer(tmp_path)).render(Chat(TALK), "here"), "nothing of a limit is left in the thread"


THOUGHT_OF = {name: {**ANSWER, name: "a hidden thought"} for name in ("reasoning_content", "thinking", "reasoning")}
THOUGHT_OF["<think> in contents"] = {**ANSWER, "content": "<think>\na hidden thought\n</think>\n\nFine."}
CUT = CHATML_UNMARKED.replace("message.content", "message.content.split('</think>')[-1]")
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}


@pytest.mark.parametrize("part", [*THOUGHT_OF, "tool_calls", "tools"])
def test_parts_of_answers_that_a_template_drops_are_counted(tmp_path, part):
    row = {"messages": [QUESTION, THOUGHT_OF.get(part, CALLING if part == "tool_calls" else ANSWER)]}
    row |= {"tools": [{"name": "add"}]} if part == "tools" else {}
    path = write_lines(tmp_path / "a.jsonl", [row, {"messages": TALK}, row])
    for source, drops in ((CUT, True), ("{{ tools | tojson }}{{ messages | tojson }}", False)):
        size = write_talker(tmp_path / "model", "chatml", source)
        request = DataRequest(DataSettings(str(path), packing="one"), tmp_path / "model", size, 999, 1, 0, tmp_path / "tokens")
        if drops:
            assert f"drops {part} (in 2 rows); choose another" in read_data(request).words()["warning, parts"]
        else:
            template = ChatTemplate(read_tokenizer(tmp_path / "model"))
            ((chat, _),) = read_row(row, "messages", "here")
            assert template.dropped_parts(chat, [template._text(chat.messages, chat.tools, "")]) == []


CALLS = "{% for m in messages %}{% for c in m.tool_calls or () %}{{ WRITE }}{% endfor %}{{ m.content }}<|im_end|>{% endfor %}"
WRITTEN = {  # expression of a template -> text
    "c.function.arguments | tojson": '{"a": 2}',
    "c.function.arguments": '{"a": 2}',
    "'(' + c.function.arguments + ')'": '({"a": 2})',
    "c.function | tojson": '{"name": "add", "arguments": {"a": 2}}',
    "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson": '{"a": 2}',
    "c.function.arguments.items() | list": "[('a', 2)]",
}


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
def test_arguments_of_tools_are_written_once(tmp_path, write, arguments):
    talker = talker_in(tmp_path, "chatml", CALLS.replace("WRITE", write))
    call = {**CALLING, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}]}
    chat = talker.template.with_arguments(Chat((QUESTION, call)), "here")
    text, _ = talker.template._text(chat.messages, None, "here")
    assert text == f"{QUESTION['content']}<|im_end|>{WRITTEN[write]}<|im_end|>"


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "qwen3.5-nothink", "qwen3.6", "gpt-oss", "deepseek-v3"])
def test_templates_of_trl_mark_every_answer_of_one_document(tmp_path, name):
    """The marks are those that transformers reads, and the last answer ends with its end token."""
    end = {"gpt-oss": "<|return|>", "deepseek-v3": "<\uff5cend\u2581of\u2581sentence\uff5c>"}.get(name, "<|im_end|>")
    write_talker(tmp_path, "gpt-oss" if name == "gpt-oss" else "chatml", eos_token=end)
    tokenizer = read_tokenizer(tmp_path, name)
    ((text, spans),) = ChatTemplate(tokenizer).render(Chat((*TALK[:3], {**THEN, "reasoning_content": "2 + 2"})), "here")
    reference = AutoTokenizer.from_pretrained(tmp_path, chat_template=read_template(name)[0])
    messages = [*TALK[:3], {**THEN, "reasoning_content": "2 + 2"}]
    assert text == reference.apply_chat_template(messages, tokenize=False)
    masks = reference.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    marked = [any(first < stop and a < stop and b > first for first, stop in spans) for a, b in encoding.offsets]
    assert sum(marked) >= sum(masks) > 0
    answers = [text[first:stop] for first, stop in spans]
    assert len(answers) == 2
    assert all(message["content"] in answer for message, answer in zip((ANSWER, THEN), answers, strict=True))
    assert answers[-1].rstrip().endswith(end)
    assert "2 + 2" in answers[-1] or name == "deepseek-v3"


def test_a_template_of_a_user_replaces_the_models(tmp_path):
    write_talker(tmp_path / "model", "llama 3")
    (tmp_path / "own.jinja").write_text(CHATML)
    assert read_tokenizer(tmp_path / "model", str(tmp_path / "own.jinja")).library.chat_template == CHATML
    with pytest.raises(DataError, match=r"qwen4 cannot be read \(No such file.*one of deepseek-v3, gpt-oss, qwen3"):
        read_tokenizer(tmp_path / "model", "qwen4")
    marked = CHATML.replace("{% generation %}", "{%- generation -%}\n")
    saved = talker_in(tmp_path / "saved", "chatml", MARKS.sub(r"{#\1\2#}", marked)).template
    assert saved._text(TALK, None, "")[0] == talker_in(tmp_path / "other", "chatml", marked).template._text(TALK, None, "")[0]


def test_a_model_without_a_template_begins_once(tmp_path):
    talker = talker_in(tmp_path, "llama 3")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')
    assert talker.learned(TALK) == [["Fine, thanks! 20 €<|eot_id|>", "It is four.<|eot_id|>"]]
    ((ids, _),) = talker.encode(TALK)
    assert talker.shown(ids).count("<|begin_of_text|>") == 1
    assert not talker.template.tokenizer.has_template


def test_roles_that_the_template_drops_are_named(tmp_path):
    """Dropped roles are found before the first step, by rendering without them; a search for their words would err."""
    template = "{% for m in messages if m.role != 'developer' %}" + LLAMA3.replace("message[", "m[").partition("%}")[2]
    size = write_talker(tmp_path / "model", "llama 3", template.replace("| trim", "| upper"))
    turn = {"role": "developer", "content": "Be a river."}
    path = write_lines(tmp_path / "data" / "a.jsonl", [{"messages": [*extra, *TALK]} for extra in ([turn], [], [turn, turn])])
    dataset = read_data(DataRequest(DataSettings(str(path)), tmp_path / "model", size, 64, 8, 0, tmp_path / "run" / "tokens"))
    message = dataset.words()
    assert "drops messages of developer (in 2 rows)" in message["warning, roles"]
    assert message["warning, few"].startswith("a step of 8 sequences trains on some of these 3 more than once")
