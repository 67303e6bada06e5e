"""Tokenizers: same ids as transformers for any saved options; errors are one line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from penstock.data.data import DataRequest, read_data
from penstock.data.tokenizer import read_tokenizer
from penstock.runtime.errors import DataError
from penstock.settings import DataSettings
from tests.bytes_of_files import tokens_of, write_lines


def write_tokenizer(folder: Path, config: object = None) -> Path:
    """Write a word tokenizer that prepends `<s>`, saved with truncation and padding enabled."""
    words = ["<s>", "</s>", "<unk>", "the", "river", "runs", "down"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=16, pad_id=1)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"} if config is None else config))
    return folder


def ids_of(folder: Path, texts: list[str], vocab_size: int = 7) -> list[list[int]]:
    path = write_lines(folder / "texts.jsonl", [{"text": text} for text in texts])
    return tokens_of(read_data(DataRequest(DataSettings(str(path)), folder, vocab_size, 4, 1, 0, folder / "run" / "tokens")))


def test_the_tokenizer_of_the_model_is_used_whole(tmp_path):
    write_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    texts = ["the river runs down the river", "down", "down </s>"]  # the last token ends the text
    expected = [[0, 3, 4, 5, 6, 3, 4, 1], [0, 6, 1], [0, 6, 1]]
    assert ids_of(tmp_path, texts) == expected
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts[:2]] == expected[:2]


@pytest.mark.parametrize(
    "row", [{"text": "TEXT"}, {"prompt": "<s> the ", "completion": "river"}, {"prompt": "<s>", "completion": "TEXT"}]
)
def test_a_text_that_begins_gets_no_second_beginning(tmp_path, row):
    """Texts that a template has written get the ids of transformers without it."""
    write_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"})
    row = {name: value.replace("TEXT", "<s> the river") for name, value in row.items()}
    path, tokenizer = write_lines(tmp_path / "texts.jsonl", [row, {**row, next(iter(row)): "down"}]), read_tokenizer(tmp_path)
    data = read_data(DataRequest(DataSettings(str(path), packing="one"), tmp_path, 7, 9, 1, 0, tmp_path / "run" / "tokens"))
    if not row.get("completion", "").startswith("<s>"):
        expected = [*AutoTokenizer.from_pretrained(tmp_path)("the river")["input_ids"], 1]
        assert tokens_of(data)[0] == expected == [0, 3, 4, 1]
        assert tokens_of(data)[1][0] == 0
        runs = data.parts[0].documents.runs(0).tolist()
        assert runs == [[2, 4]] if "prompt" in row else runs == [[0, 4]]
    assert tokenizer.encode("<s> the river") == tokenizer.encode("the river") == [0, 3, 4]


@given(text=st.text())
def test_bytes_are_the_bytes_of_the_text(text):
    tokenizer = read_tokenizer(None)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    encoded = tokenizer.backend.encode(text, add_special_tokens=False)
    assert encoded.offsets == [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]


@pytest.mark.parametrize(
    ("tokenizer_config", "config", "ends"),
    [({}, {"eos_token_id": 1}, {1}), ({}, {"eos_token_id": [1, 2]}, {1, 2}), ({"eos_token": "</s>"}, {"eos_token_id": 2}, {1, 2})],
)
def test_the_end_is_the_tokenizers_own_or_else_the_models(tmp_path, tokenizer_config, config, ends):
    write_tokenizer(tmp_path, tokenizer_config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.end_id, tokenizer.answer_ends) == (1, ends)


def random_merges(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.1}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


BROKEN = {
    "no tokenizer.json": lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"),
    "no end-of-text token": lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
    "set `dropout` to null": random_merges,
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_broken_tokenizer_is_one_line(tmp_path, says):
    BROKEN[says](write_tokenizer(tmp_path))
    with pytest.raises(DataError, match=says) as caught:
        read_tokenizer(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_tokens_beyond_the_vocabulary_are_named(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"texts\.jsonl:2: token 4 is outside the model's 4 token ids"):
        ids_of(tmp_path, ["the", "river"], vocab_size=4)
    with pytest.raises(DataError, match="end token 1 is outside the model's 1 token ids"):
        ids_of(tmp_path, ["the"], vocab_size=1)
