"""Does each of several data sets get its share, in an order that only the step decides?"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from penstock.data.data import read_data
from penstock.data.mixed import ROUND, MixedData, shares_of
from penstock.settings import DataPart, DataSettings
from runtime.errors import CheckpointError, DataError

SIZES = {"a": 5, "b": 3, "c": 11}


def parts_in(folder: Path) -> list[str]:
    for name, n in SIZES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{i:02}"}) + "\n" for i in range(n)))
    return [str(folder / f"{name}.jsonl") for name in SIZES]


def mixed(folder: Path, weights: tuple[float | None, ...], seed: int = 7, **fields: object) -> MixedData:
    mix = tuple(DataPart(path, weight) for path, weight in zip(parts_in(folder), weights, strict=True))
    settings = DataSettings(mix=mix, **({"packing": "one"} | fields))
    data = read_data(settings, None, 300, 8, 4, seed, folder / "run" / "tokens", by_document=True)
    assert isinstance(data, MixedData)
    return data


def seen(data: MixedData, first: int, stop: int) -> list[str]:
    """The texts of the samples of some steps."""
    ids = torch.cat([data.batch(step).input_ids for step in range(first, stop)])
    return [bytes(i for i in row if i < 256).decode() for row in ids.tolist()]


def test_without_weights_an_epoch_holds_every_sample_of_every_set_once(tmp_path):
    data = mixed(tmp_path, (None, None, None))
    every = sorted(f"{name}{i:02}" for name, n in SIZES.items() for i in range(n))
    texts = seen(data, 0, 2 * data.n_steps)
    assert (data.n_sequences, data.n_steps) == (19, 5)
    assert sorted(texts[:19]) == sorted(texts[19:38]) == every
    assert texts[:19] != texts[19:38] != every
    assert seen(mixed(tmp_path, (None, None, None), shuffle=False), 0, 1) == ["a00", "a01", "a02", "a03"]


def test_weights_are_shares_of_the_samples_and_a_set_is_gone_through_before_it_begins_anew(tmp_path):
    data = mixed(tmp_path, (0.5, 0.2, 0.3))
    texts = seen(data, 0, 250)
    assert Counter(text[0] for text in texts) == {"a": 500, "b": 200, "c": 300}
    for begin in range(0, 1000, 20):
        some = Counter(text[0] for text in texts[begin : begin + 20])
        assert abs(some["a"] - 10) + abs(some["b"] - 4) + abs(some["c"] - 6) <= 3, "in any stretch"
    drawn = [data.sample(n) for n in range(5 * ROUND // 2)]
    for k, n in enumerate(SIZES.values()):
        own = [sequence for of, sequence in drawn if of == k]
        epochs = [own[at : at + n] for at in range(0, len(own) - n, n)]
        assert all(len(set(epoch)) == n for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1, "each in an order of its own"
    assert data.words()["data 1"].endswith("a.jsonl: text")
    assert data.words()["share 1"] == "50.0% of samples, 1.90 times an epoch"


@pytest.mark.parametrize("weights", [(None, None, None), (0.5, 0.2, 0.3)])
def test_a_step_sees_the_same_whatever_was_asked_before(tmp_path, weights):
    whole, again = mixed(tmp_path, weights), mixed(tmp_path, weights)
    expected = seen(whole, 0, 40)
    again.resume(31, json.loads(json.dumps(whole.position(31))))
    assert seen(again, 31, 40) == expected[31 * 4 :]
    assert seen(again, 3, 5) == expected[12:20]
    assert again.fingerprint == whole.fingerprint
    with pytest.raises(CheckpointError, match="is not that of step 30"):
        again.resume(30, whole.position(31))


def test_another_weight_order_or_seed_is_another_set(tmp_path):
    prints = [
        mixed(tmp_path, w, seed).fingerprint for w, seed in (((0.5, 0.2, 0.3), 7), ((0.5, 0.3, 0.2), 7), ((0.5, 0.2, 0.3), 8))
    ]
    assert len({*prints, mixed(tmp_path, (None, None, None)).fingerprint}) == 4


def test_texts_and_chats_mix_and_each_document_of_a_chat_sees_itself_alone(tmp_path):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 3)
    (tmp_path / "text.txt").write_text("x" * 200)
    mix = (DataPart(str(tmp_path / "chats.jsonl")), DataPart(str(tmp_path / "text.txt")))
    for workers in (0, 1):
        data = read_data(DataSettings(mix=mix, workers=workers), None, 300, 64, 5, 0, tmp_path / "run" / "tokens", by_document=True)
        tokens = data.batch(0).document_tokens
        data.close()
        assert all(sum(lengths) == 64 for lengths in tokens)
        assert Counter(lengths == (64,) for lengths in tokens) == {True: 4, False: 1} or len(tokens) == 5


def test_weights_that_are_no_shares_are_refused_in_one_line(tmp_path):
    for weights, says in {
        (0.7, 0.4): "add up to 1.1, not to 1",
        (0.5, 0.4): "add up to 0.9, not to 1",
        (0.5, None): "1 of 2 data sets have a weight",
        (0.9999, 0.0001): "0.001 is the least",
    }.items():
        with pytest.raises(DataError, match=says):
            shares_of(weights)
    assert sum(shares_of((0.333, 0.333, 0.333))) == ROUND
    with pytest.raises(DataError, match="several --data are not streamed"):
        mixed(tmp_path, (0.5, 0.2, 0.3), streaming=True)
