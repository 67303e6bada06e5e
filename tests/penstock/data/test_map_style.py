"""Map-style data: every token once an epoch, weights of sets, order by seed and step."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.data import DataRequest, read_data
from penstock.data.sampling import SHARES, shares_of
from penstock.runtime.batch import UNSUPERVISED
from penstock.runtime.errors import DataError
from penstock.settings import DataPart, DataSettings
from tests.bytes_of_files import END, read, same, tokens_of, write_lines
from tests.row_of_tokens import RowOfTokens

texts = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=6)
lengths, batches, seeds = st.integers(2, 9), st.integers(1, 5), st.none() | st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """Return joined texts, in the order of the files without a seed."""

    def read_texts(documents, seq_len, batch_size, seed):
        path = write_lines(tmp_path_factory.mktemp("data") / "a.jsonl", ({"text": text} for text in documents))
        return read(path, seq_len, batch_size, seed or 0, shuffle=seed is not None)

    return read_texts


def rows_of(data, n_steps):
    """Recover the unpadded sequences of some steps from inputs and targets."""
    rows = []
    for step in range(n_steps):
        batch = data.batch(step)
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        for ids, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
            n = 1 + sum(target != UNSUPERVISED for target in targets)
            assert targets == ids[1:n] + [UNSUPERVISED] * (len(ids) - n + 1)
            assert set(ids[n:]) <= {END}
            rows.append(ids[:n])
    return rows


@given(documents=texts, seq_len=lengths, batch_size=batches, seed=seeds)
def test_every_epoch_holds_every_sequence_once(joined, documents, seq_len, batch_size, seed):
    ids = [i for text in documents for i in (*text.encode(), END)]
    expected = [ids[i : i + seq_len] for i in range(0, len(ids) - 1, seq_len)]  # a single token predicts nothing
    data = joined(documents, seq_len, batch_size, seed)
    assert data.n_steps == -(-len(expected) // batch_size)
    rows = rows_of(data, -(-2 * len(expected) // batch_size))
    for epoch in range(2):
        epoch_rows = rows[epoch * len(expected) : (epoch + 1) * len(expected)]
        assert epoch_rows == expected if seed is None else sorted(epoch_rows) == sorted(expected)


@given(documents=texts, seq_len=lengths, batch_size=batches, seed=seeds, steps=st.lists(st.integers(0, 99), max_size=9))
def test_a_step_sees_the_same_whatever_was_asked_before(joined, documents, seq_len, batch_size, seed, steps):
    data = joined(documents, seq_len, batch_size, seed)
    row = RowOfTokens(np.array([i for ids in tokens_of(data) for i in ids]), seq_len, batch_size, END, seed)
    for step in steps:
        assert same(data.batch(step), row.batch(step))
        assert data.resume(step, data.position(step))
        assert not data.resume(step, data.position(step + 1))


def test_epochs_and_seeds_have_orders_of_their_own(joined):
    data = {seed: joined([chr(65 + i) * 3 for i in range(24)], 4, 24, seed) for seed in (None, 0, 1, 2**32)}
    assert len({str(dataset.batch(step).input_ids.tolist()) for seed, dataset in data.items() for step in (0, 1)}) == 7
    assert same(data[None].batch(0), data[None].batch(1))
    assert len({dataset.fingerprint for dataset in data.values()}) == 4


SIZES = {"a": 5, "b": 3, "c": 11}


def mixed(folder, weights, seed=7, **fields):
    mix = tuple(
        DataPart(str(write_lines(folder / f"{name}.jsonl", ({"text": f"{name}{i:02}"} for i in range(n)))), weight)
        for (name, n), weight in zip(SIZES.items(), weights, strict=True)
    )
    settings = DataSettings(mix=mix, **({"packing": "one"} | fields))
    return read_data(DataRequest(settings, None, 300, 8, 4, seed, folder / "run" / "tokens", by_document=True))


def sample_texts(data, first, stop):
    ids = torch.cat([data.batch(step).input_ids for step in range(first, stop)])
    return [bytes(i for i in row if i < END).decode() for row in ids.tolist()]


def test_without_weights_an_epoch_holds_every_sample_of_all_sets(tmp_path):
    data = mixed(tmp_path, (None, None, None))
    every = sorted(f"{name}{i:02}" for name, n in SIZES.items() for i in range(n))
    texts = sample_texts(data, 0, 2 * data.n_steps)
    assert (len(every), data.n_steps) == (19, 5)
    assert sorted(texts[:19]) == sorted(texts[19:38]) == every
    assert texts[:19] != texts[19:38]
    assert sample_texts(mixed(tmp_path, (None, None, None), shuffle=False), 0, 1) == ["c00", "a00", "c01", "b00"], "spread evenly"


def test_weights_are_shares_and_a_set_begins_anew_when_through(tmp_path):
    data = mixed(tmp_path, (0.5, 0.2, 0.3))
    texts = sample_texts(data, 0, 250)
    assert Counter(text[0] for text in texts) == {"a": 500, "b": 200, "c": 300}
    for begin in range(0, 1000, 20):
        counts = Counter(text[0] for text in texts[begin : begin + 20])
        assert abs(counts["a"] - 10) + abs(counts["b"] - 4) + abs(counts["c"] - 6) <= 3, "in any stretch"
    for name, n in SIZES.items():
        set_texts = [text for text in texts if text[0] == name]
        epochs = [tuple(set_texts[i : i + n]) for i in range(0, len(set_texts) - n, n)]
        assert all(len(set(epoch)) == n for epoch in epochs)
        assert len(set(epochs)) > 1, "each in an order of its own"
    assert data.words()["data 1"].endswith("a.jsonl: text")
    assert data.words()["share 1"] == "50.0% of samples, 1.90 times an epoch"


@pytest.mark.parametrize("weights", [(None, None, None), (0.5, 0.2, 0.3)])
def test_a_mix_is_resumed_at_any_step(tmp_path, weights):
    unbroken, again = mixed(tmp_path, weights), mixed(tmp_path, weights)
    expected = sample_texts(unbroken, 0, 40)
    assert again.resume(31, unbroken.position(31))
    assert sample_texts(again, 31, 40) == expected[31 * 4 :]
    assert sample_texts(again, 3, 5) == expected[12:20]
    assert not again.resume(30, unbroken.position(31))
    variants = [mixed(tmp_path, weights, 8), mixed(tmp_path, (0.5, 0.3, 0.2)), unbroken]
    assert again.fingerprint == unbroken.fingerprint
    assert len({variant.fingerprint for variant in variants}) == 3


def test_texts_and_chats_mix_and_chats_see_themselves_alone(tmp_path):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "text.txt").write_text("x" * 200)
    mix = (DataPart(str(write_lines(tmp_path / "chats.jsonl", [chat] * 3))), DataPart(str(tmp_path / "text.txt")))
    data = read_data(DataRequest(DataSettings(mix=mix), None, 300, 64, 6, 0, tmp_path / "run" / "tokens", by_document=True))
    tokens = data.batch(0).document_tokens
    assert all(sum(lengths) == 64 for lengths in tokens)
    assert Counter(lengths == (64,) for lengths in tokens) == {True: 3, False: 3}
    assert (9, 55) in tokens, "the last of the text, and its padding"


def test_weights_that_are_no_shares_are_refused_in_one_line(tmp_path):
    for weights, says in {
        (0.7, 0.4): "add up to 1.1, not to 1",
        (0.5, 0.4): "add up to 0.9, not to 1",
        (0.5, None): "1 of 2 data sets have a weight",
        (0.9999, 0.0001): "0.001 is the least",
    }.items():
        with pytest.raises(DataError, match=says):
            shares_of(weights, (1, 1))
    assert sum(shares_of((0.333, 0.333, 0.333), (1, 1, 1))) == SHARES
    with pytest.raises(DataError, match="several --data are not streamed"):
        mixed(tmp_path, (0.5, 0.2, 0.3), streaming=True)
