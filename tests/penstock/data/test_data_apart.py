"""Is a row that becomes several documents kept, counted and streamed like any other?"""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import token_cache
from penstock.data.chat import Encoded, Templated
from penstock.data.data import Data, read_data
from penstock.data.encoders import read_encoder
from penstock.data.files.sources import DataSource
from penstock.data.map_style import MapStyleData
from penstock.data.streamed import ShuffleBuffer, StreamedData
from penstock.data.token_cache import cached_tokens
from penstock.settings import DataSettings
from runtime.batch import UNSUPERVISED, Batch
from runtime.errors import DataError
from tests.chats import write_talker

N = 17  # conversations, of one, two and three answers
ANSWERS = Counter(f"a{i}.{k}" for i in range(N) for k in range(i % 3 + 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, int]:
    """A model whose template rewrites earlier turns, and its token ids."""
    folder = tmp_path_factory.mktemp("model")
    return folder, write_talker(folder, "qwen 3")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for f, rows in enumerate((range(9), range(9, N))):
        turns = [
            [{"role": role, "content": f"{role[0]}{i}.{k}"} for k in range(i % 3 + 1) for role in ("user", "assistant")]
            for i in rows
        ]
        (folder / f"{f}.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return folder


def read(path: Path, model: tuple[Path, int], **fields: object) -> Data:
    settings = DataSettings(str(path), **({"packing": "documents", "shuffle_buffer": 4} | fields))
    return read_data(settings, *model, 160, 1, 3, model[0].parent / "run" / "tokens", by_document=True)


def learned(batches: list[Batch], model: tuple[Path, int]) -> Counter[str]:
    """The answers that are learned, and how often."""
    encoder = read_encoder(model[0])
    said = "".join(encoder.decode(batch.targets[batch.targets != UNSUPERVISED].tolist()) for batch in batches)
    found = Counter(re.findall(r"a\d+\.\d+", said))
    assert said.count("<think>\n\n</think>\n\n") == found.total(), "each as it would be given"
    return found


def test_every_answer_is_learned_once_an_epoch_and_conversations_taken_apart_are_counted(path, model):
    for _ in range(2):  # the second time from the cache
        data = read(path, model)
        assert isinstance(data, MapStyleData)
        assert learned([data.batch(step) for step in range(data.n_steps)], model) == ANSWERS
        assert (data.counts.n_documents, data.counts.n_apart) == (33, 11)
        assert data.words()["rows"] == "33 documents, 11 conversations taken apart answer by answer"
        assert [data.documents.where(d) for d in range(4)] == [f"{path}/0.jsonl:{row}" for row in (1, 2, 2, 3)]
    with pytest.raises(DataError, match=r"0\.jsonl:3: \d+ tokens, and a sequence holds"):
        read_data(DataSettings(str(path), too_long="refuse", shuffle=False), *model, 60, 1, 3, path.parent / "run" / "tokens")


@pytest.mark.fast("some")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_of_them_is_resumed_anywhere(path, model, monkeypatch, shuffle):
    monkeypatch.setattr(Templated, "close", lambda speech: None)  # one process for all
    data = read(path, model, streaming=True, shuffle=shuffle)
    assert isinstance(data, StreamedData)
    try:
        batches, positions = [], []
        while data.position(len(batches) + 1)["epoch"] < 2:
            positions.append(data.position(len(batches)))
            batches.append(data.batch(len(batches)))
            if len(batches) == 1:
                assert re.search(
                    r"; so far [456] documents, [23] conversations taken apart answer by answer$", data.words()["rows"]
                )
        of = [data.position(step + 1)["epoch"] for step in range(len(batches))]
        for epoch in (0, 1):
            assert learned([batch for batch, at in zip(batches, of, strict=True) if at == epoch], model) == ANSWERS
        for left in range(len(batches)):
            data.resume(left, positions[left])
            for step in range(left, min(left + 4, len(batches))):
                assert torch.equal(data.batch(step).input_ids, batches[step].input_ids)
                assert torch.equal(data.batch(step).targets, batches[step].targets)
                assert data.batch(step).document_tokens == batches[step].document_tokens
                assert data.position(step) == positions[step]
    finally:
        data.reading.chat_format.template.close()


rows = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=12).map(
    lambda pairs: [(file, row) for row, (file, n) in enumerate(sorted(pairs), start=1) for _ in range(n)]
)


@given(places=rows, few_at_once=st.booleans())
def test_rows_of_several_documents_are_counted_wherever_they_lie(tmp_path_factory, places, few_at_once):
    source = DataSource(Path("data"), tuple(Path("data", f"{f}.jsonl") for f in range(3)))
    one = Encoded(np.arange(3), np.array([[1, 3]]))
    made = [(file, row, one) for file, row in places]
    expected = sum(n > 1 for n in Counter(places).values())
    size, token_cache.BATCH_TOKENS = token_cache.BATCH_TOKENS, 5 if few_at_once else token_cache.BATCH_TOKENS
    try:
        kept = cached_tokens(tmp_path_factory.mktemp("cache"), "key", source, True, lambda left_out: made)
    finally:
        token_cache.BATCH_TOKENS = size
    assert len(kept.lengths) == len(places)
    assert kept.n_apart == expected
    assert ShuffleBuffer.of([one] * len(places), places, source).n_apart == expected
