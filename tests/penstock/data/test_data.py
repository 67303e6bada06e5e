"""Does every token reach the model once an epoch, in an order that only the step decides?"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.data.data import read_data
from penstock.data.files import lines
from penstock.data.map_style import MapStyleData
from penstock.settings import DataSettings
from runtime.batch import UNSUPERVISED
from runtime.errors import CheckpointError, DataError
from tests.row_of_tokens import RowOfTokens

END = 256  # of a model that reads bytes

texts = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=6)
lengths = st.integers(2, 9)
batches = st.integers(1, 5)
seeds = st.none() | st.integers(0, 2**64 - 1)


def read(path: Path, folder: Path | None, vocab_size: int, seq_len: int, batch_size: int, seed: int | None = None) -> MapStyleData:
    """Text, joined; shuffled if there is a seed. The cache lies beside the data."""
    settings = DataSettings(str(path), shuffle=seed is not None)
    data = read_data(settings, folder, vocab_size, seq_len, batch_size, seed or 0, path.parent / "cache")
    assert isinstance(data, MapStyleData)
    return data


def tokens_of(data: MapStyleData) -> list[int]:
    return [i for d in range(len(data.documents.lengths)) for i in data.documents.ids(d).tolist()]


def write_jsonl(folder: Path, documents: list[str]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def obvious_sequences(documents: list[str], seq_len: int) -> list[list[int]]:
    """Plain packing: all bytes in one list, an end after each document, cut; a last single token is dropped."""
    ids = [i for text in documents for i in (*text.encode(), END)]
    sequences = [ids[at : at + seq_len] for at in range(0, len(ids), seq_len)]
    return [sequence for sequence in sequences if len(sequence) > 1]


def seen(tokens: MapStyleData, step: int) -> list[list[int]]:
    """The sequences of a step without their padding, recovered from inputs and targets."""
    batch = tokens.batch(step)
    rows = []
    for ids, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
        n = 1 + sum(target != UNSUPERVISED for target in targets)
        assert targets == ids[1:n] + [UNSUPERVISED] * (len(ids) - n + 1)
        assert set(ids[n:]) <= {END}
        rows.append(ids[:n])
    return rows


@pytest.mark.drawn
@given(documents=texts, seq_len=lengths, batch_size=batches)
def test_in_order_the_steps_spell_the_documents_epoch_after_epoch(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], seq_len: int, batch_size: int
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("data"), documents)
    tokens = read(path, None, 300, seq_len, batch_size)
    expected = obvious_sequences(documents, seq_len)
    assert tokens.n_sequences == len(expected)
    assert tokens.counts.n_documents == len(documents)
    n_steps = 2 * len(expected) // batch_size + 1
    rows = [row for step in range(n_steps) for row in seen(tokens, step)]
    assert rows == (expected * (len(rows) // len(expected) + 1))[: len(rows)]


@given(documents=texts, seq_len=lengths, batch_size=batches, seed=st.integers(0, 2**64 - 1))
def test_shuffled_every_epoch_holds_every_sequence_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], seq_len: int, batch_size: int, seed: int
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("data"), documents)
    tokens = read(path, None, 300, seq_len, batch_size, seed)
    expected = sorted(obvious_sequences(documents, seq_len))
    rows = [row for step in range(2 * tokens.n_sequences // batch_size + 1) for row in seen(tokens, step)]
    for epoch in range(2):
        assert sorted(rows[epoch * len(expected) : (epoch + 1) * len(expected)]) == expected[: len(rows)]


@pytest.mark.drawn
@given(documents=texts, seq_len=lengths, batch_size=batches, seed=seeds, steps=st.lists(st.integers(0, 99), max_size=9))
def test_a_step_sees_the_same_whatever_was_asked_before(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[str],
    seq_len: int,
    batch_size: int,
    seed: int | None,
    steps: list[int],
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("data"), documents)
    tokens = read(path, None, 300, seq_len, batch_size, seed)
    for step in steps:
        fresh = read(path, None, 300, seq_len, batch_size, seed)
        assert fresh.fingerprint == tokens.fingerprint
        assert torch.equal(fresh.batch(step).input_ids, tokens.batch(step).input_ids)
        assert torch.equal(fresh.batch(step).targets, tokens.batch(step).targets)


def test_epochs_and_seeds_give_different_orders(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [chr(65 + i) * 3 for i in range(24)])
    tokens = {seed: read(path, None, 300, 4, 24, seed) for seed in (None, 0, 1, 2**32)}
    orders = [str(seen(tokens[seed], step)) for seed in (0, 1, 2**32) for step in (0, 1)]
    assert len(set(orders)) == 6
    assert seen(tokens[None], 0) == seen(tokens[None], 1)
    assert len({t.fingerprint for t in tokens.values()}) == 4


@given(documents=texts, seq_len=lengths, batch_size=batches, seed=seeds, step=st.integers(0, 99))
def test_joined_texts_are_one_row_of_tokens(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], seq_len: int, batch_size: int, seed: int | None, step: int
) -> None:
    data = read(write_jsonl(tmp_path_factory.mktemp("data"), documents), None, 300, seq_len, batch_size, seed)
    row = RowOfTokens(np.array(tokens_of(data)), seq_len, batch_size, END, seed)
    assert (data.n_sequences, data.n_steps, data.position(step)) == (row.n_sequences, row.n_steps, row.position(step))
    assert torch.equal(data.batch(step).input_ids, row.batch(step).input_ids)
    assert torch.equal(data.batch(step).targets, row.batch(step).targets)
    data.resume(step, data.position(step))
    with pytest.raises(CheckpointError, match="data position"):
        data.resume(step, data.position(step + 1))


def test_the_position_counts_sequences_and_epochs(tmp_path: Path) -> None:
    tokens = read(write_jsonl(tmp_path, ["abc"] * 5), None, 300, 4, 3)
    assert tokens.n_sequences == 5
    positions = [tokens.position(step) for step in range(4)]
    assert [(p["epoch"], p["sequence"]) for p in positions] == [(0, 0), (0, 3), (1, 1), (1, 4)]


def test_batches_have_the_shape_and_type_that_embedding_and_loss_want(tmp_path: Path) -> None:
    batch = read(write_jsonl(tmp_path, ["hello"]), None, 257, 4, 3).batch(0)
    assert batch.input_ids.shape == batch.targets.shape == (3, 4)
    assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
    assert batch.input_ids.tolist() == [[104, 101, 108, 108], [111, 256, 256, 256], [104, 101, 108, 108]]
    assert batch.targets.tolist() == [[101, 108, 108, -100], [256, -100, -100, -100], [101, 108, 108, -100]]
    assert batch.n_supervised == 3 + 1 + 3


@pytest.mark.parametrize(("vocab_size", "n_bytes"), [(257, 2), (2**16, 2), (2**16 + 1, 4), (200_000, 4)])
def test_tokens_take_as_few_bytes_as_the_vocabulary_allows(tmp_path: Path, vocab_size: int, n_bytes: int) -> None:
    tokens = read(write_jsonl(tmp_path, ["hello"]), None, vocab_size, 4, 1)
    assert tokens.documents.ids(0).nbytes == n_bytes * 6
    assert tokens_of(tokens) == [*b"hello", END]


def test_the_loss_of_a_batch_is_the_one_transformers_computes_from_labels(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    batch = read(write_jsonl(tmp_path, ["some text", "more of it"]), None, 257, 6, 4).batch(0)
    config = LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    labels = batch.input_ids.clone()
    last = next(b for b, row in enumerate(seen_rows(batch.targets)) if row < 5)  # the padded sequence
    labels[last, seen_rows(batch.targets)[last] + 1 :] = UNSUPERVISED
    with torch.no_grad():
        theirs = model(input_ids=batch.input_ids, labels=labels)
    ours = torch.nn.functional.cross_entropy(theirs.logits.flatten(0, 1), batch.targets.flatten())
    torch.testing.assert_close(ours, theirs.loss, rtol=1e-6, atol=0)


def seen_rows(targets: torch.Tensor) -> list[int]:
    """How many positions of each sequence are supervised."""
    return (targets != UNSUPERVISED).sum(1).tolist()


# Folders of text


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    for name, text in {
        "b.txt": "B",
        "a/z.py": "Z",
        "a/b/c.md": "C",
        "a.txt": "A",
        "Ω": "ω",
        ".hidden": "no",
        ".git/config": "no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "J"}\n\n{"text": "K", "source": 1}\n')
    tokens = read(tmp_path, None, 257, 8, 1)
    assert bytes(i if i < 256 else 0 for i in tokens_of(tokens)).decode() == "C\0Z\0A\0B\0J\0K\0ω\0"


def test_line_ends_and_byte_order_marks_are_treated_alike_on_every_system(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert tokens_of(read(tmp_path, None, 257, 8, 1)) == [*b"one\r\ntwo\n", END]


def test_files_that_are_no_text_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.txt").write_text("")
    tokens = read(tmp_path, None, 257, 8, 1)
    assert (tokens.counts.n_documents, tokens.counts.n_unsupervised, tokens.documents.about.n_left_out) == (2, 1, 1)
    assert "1 files left out" in tokens.words()["data"]
    assert tokens.words()["rows"] == "2 documents, 1 with nothing to learn left out"
    assert tokens_of(tokens) == [*b"text", END]


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (inside / "a.txt").write_text("text")
    (inside / "file").symlink_to(outside / "secret.txt")
    (inside / "folder").symlink_to(outside)
    (inside / "circle").symlink_to(inside)
    (inside / "broken").symlink_to(inside / "nothing")
    tokens = read(inside, None, 257, 8, 1)
    assert tokens_of(tokens) == [*b"text", END]
    assert "1 files left out" in tokens.words()["data"]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_a_run_writes_among_its_data_is_no_data(tmp_path: Path, streaming: bool) -> None:
    """Otherwise a run that is resumed would be told that its data has changed, and one after it would learn metrics."""
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    (data / "more" / "a.txt").write_text("text")

    def fingerprint(out: Path) -> tuple[str, str]:
        read = read_data(DataSettings(str(data), streaming=streaming), None, 257, 8, 1, 0, out / "tokens")
        return read.fingerprint, read.words()["data"]

    out = data / "runs" / "first"
    before, said = fingerprint(out)
    assert "own" not in said
    (out / "checkpoint-1").mkdir(parents=True, exist_ok=True)
    (out / "samples.jsonl").write_text('{"step": 1, "text": "said"}\n')
    (out / "checkpoint-1" / "config.json").write_text("{}")
    (data / "runs" / "a link").symlink_to(out)
    for name in (out, data / "runs" / "a link", tmp_path / "data" / "more" / ".." / "runs" / "first"):
        assert fingerprint(name)[0] == before
        assert f"without the run's own {out}" in fingerprint(name)[1]
    assert fingerprint(tmp_path)[0] != before, "to another run it is data"
    assert fingerprint(data / "more")[0] != before
    for name in (data, data / "more" / ".."):
        with pytest.raises(DataError, match="choose another --out"):
            fingerprint(name)
    (tmp_path / "link").symlink_to(data)
    with pytest.raises(DataError, match="choose another --out"):
        read_data(DataSettings(str(tmp_path / "link"), streaming=streaming), None, 257, 8, 1, 0, data / "tokens")
    assert read_data(DataSettings(str(data / "more" / "a.txt")), None, 257, 8, 1, 0, data / "more" / "tokens").n_sequences == 1


def test_a_pipe_in_the_folder_does_not_stop_the_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("text")
    assert read(tmp_path, None, 257, 8, 1).counts.n_documents == 1


# Tokenizers


def write_tokenizer(folder: Path, config: dict[str, object] | None = None) -> Tokenizer:
    """Words to ids, `<s>` put in front, and saved with truncation and padding switched on, as some are."""
    words = ["<s>", "</s>", "<unk>", "the", "river", "runs", "down"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=16, pad_id=1)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>"} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def test_the_tokenizer_of_the_model_is_used_whole(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = write_jsonl(tmp_path, ["the river runs down the river", "down"])
    tokens = read(path, tmp_path, 7, 4, 1)
    assert tokens_of(tokens) == [0, 3, 4, 5, 6, 3, 4, 1, 0, 6, 1]


def test_a_document_that_brings_its_own_end_is_not_ended_twice(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert tokens_of(read(write_jsonl(tmp_path, ["down </s>"]), tmp_path, 7, 4, 1)) == [0, 6, 1]


@pytest.mark.parametrize(
    ("tokenizer_config", "config"),
    [
        ({"eos_token": {"content": "</s>", "lstrip": False}}, {}),
        ({}, {"eos_token_id": 1}),
        ({}, {"eos_token_id": [1, 2]}),
        ({"eos_token": "</s>"}, {"eos_token_id": 2}),
        ({"eos_token": None}, {"eos_token_id": 1}),
    ],
)
def test_the_end_token_is_the_tokenizers_own_or_else_the_models(
    tmp_path: Path, tokenizer_config: dict[str, object], config: dict[str, object]
) -> None:
    write_tokenizer(tmp_path, tokenizer_config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read(write_jsonl(tmp_path, ["river"]), tmp_path, 7, 4, 1).shape.pad_id == 1


def test_the_tokenizer_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    text = "the river runs down the river"
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = [*theirs(text)["input_ids"], theirs.eos_token_id]
    assert tokens_of(read(write_jsonl(tmp_path, [text]), tmp_path, 7, 4, 1)) == expected


# What can be wrong


def refused(data: Path, model_folder: Path | None = None, vocab_size: int = 300) -> str:
    with pytest.raises(DataError) as caught:
        read(data, model_folder, vocab_size, 4, 2)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    return message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut', "data.jsonl:3"),
        (b"plain text", "data.jsonl:3"),
        (b'"text"', 'data.jsonl:3: no string under "text"'),
        (b"[1]", 'data.jsonl:3: no string under "text"'),
        (b'{"text": 3}', 'data.jsonl:3: no string under "text"'),
        (b'{"text": null}', 'data.jsonl:3: no string under "text"'),
        (b'{"messages": []}', 'data.jsonl:3: no string under "text"'),
        (b'{"text": "\xff"}', "data.jsonl:3"),
        (b'{"text": "\\ud800"}', "data.jsonl:3"),
        (b'{"text": ' + b"[" * 10**5, "data.jsonl:3"),
        (b'{"text": ' + b"9" * 5000 + b"}", "data.jsonl:3"),
        (b'{"text": "' + b"x" * 200 + b'"}', "data.jsonl:3: a line above 128 bytes"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, says: str) -> None:
    if b"xxx" in line:
        monkeypatch.setattr(lines, "MAX_DOCUMENT_BYTES", 128)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    assert says in refused(path)


def test_a_file_larger_than_a_document_may_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_DOCUMENT_BYTES", 128)
    (tmp_path / "large.txt").write_text("x" * 129)
    assert "large.txt" in refused(tmp_path)


def test_data_that_is_missing_empty_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert "nowhere" in refused(tmp_path / "nowhere")
    assert "no text" in refused(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "no text" in refused(tmp_path / "empty.jsonl")
    (tmp_path / "object.json").write_text('{"text": "a"}')
    assert "object.json: neither a list of objects nor objects, one a line" in refused(tmp_path / "object.json")
    (tmp_path / "image").write_bytes(b"\x89PNG\xff")
    assert "1 files left out" in refused(tmp_path / "image")
    os.mkfifo(tmp_path / "pipe")
    assert "neither" in refused(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert "circle" in refused(tmp_path / "circle")


def test_tokens_outside_the_vocabulary_are_named_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("river")
    assert "257" in refused(tmp_path / "a.txt", None, 256)
    tokenizers = tmp_path / "model"
    tokenizers.mkdir()
    write_tokenizer(tokenizers)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "first.txt").write_text("the")
    (tmp_path / "b" / "second.txt").write_text("river")
    assert "second.txt: token 4" in refused(tmp_path / "b", tokenizers, 4)


@pytest.mark.parametrize("content", ["", "{}", "[", '{"model": {"type": "Unheard"}}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert "tokenizer.json" in refused(write_jsonl(tmp_path, ["a"]), tmp_path)


@pytest.mark.parametrize("eos", [{}, {"eos_token": 3}, {"eos_token": "<none>"}, []])
def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path, eos: dict[str, object]) -> None:
    write_tokenizer(tmp_path, eos)
    assert "tokenizer_config.json" in refused(write_jsonl(tmp_path, ["a"]), tmp_path)


def test_a_tokenizer_of_another_kind_is_not_mistaken_for_bytes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert "tokenizer.json" in refused(write_jsonl(tmp_path, ["a"]), tmp_path)


@pytest.mark.parametrize(("seq_len", "batch_size", "seed"), [(1, 1, None), (0, 1, None), (4, 0, None), (4, 1, -1)])
def test_sizes_that_cannot_learn_are_refused(tmp_path: Path, seq_len: int, batch_size: int, seed: int | None) -> None:
    with pytest.raises(DataError):
        read(write_jsonl(tmp_path, ["a"]), None, 300, seq_len, batch_size, seed)
