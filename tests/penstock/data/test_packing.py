"""Packing: every learned token is a target once; with isolation its context is its own document."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import packing as room
from penstock.data.packing import Shape, batch_of, pack, rows_of
from penstock.runtime.batch import UNSUPERVISED
from penstock.runtime.errors import DataError

PAD = 9999


@dataclass
class Listed:
    """Documents as lists of (token id, True if learned)."""

    tokens: list[list[tuple[int, bool]]]
    problems: tuple[()] = ()

    @property
    def has_images(self):
        return False

    def __post_init__(self):
        counts = [(len(t), sum(learn for _, learn in t), sum(learn for _, learn in t[1:])) for t in self.tokens]
        self.lengths, self.n_learned, self.n_targets = np.array(counts, dtype=np.int64).reshape(-1, 3).T

    def ids(self, document):
        return np.array([i for i, _ in self.tokens[document]], dtype=np.uint16)

    def runs(self, document):
        learn = [False, *(learn for _, learn in self.tokens[document]), False]
        return np.flatnonzero(np.diff(learn)).reshape(-1, 2)

    def where(self, document):
        return f"data:{document}"


@st.composite
def listed(draw):
    """Make documents with unique token ids, to find each token after packing."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=24) | st.integers(0, 24).map(lambda n: [True] * n), max_size=9))
    ids = iter(range(10**6))
    return Listed([[(next(ids), learn) for learn in mask] for mask in masks])


lengths = st.integers(2, 9)
ways = st.sampled_from(["cut", "split", "skip"])


def packed(documents, packing, seq_len, order=None, too_long="cut", unsupervised="skip"):
    """Return packed sequences, their rows, and counts of documents."""
    shape = Shape(packing, seq_len, PAD, too_long, unsupervised)
    order = range(len(documents.tokens)) if order is None else order
    sequences, counts = pack(documents, np.array(order, dtype=np.int64), shape)
    rows = [row for i in range(len(sequences)) for row in rows_of(documents, sequences[i], shape)]
    batch = batch_of(rows, shape, (), (), None) if rows else None
    sizes = (batch.document_tokens or batch.padded_documents or ()) if batch is not None else ()
    return sequences, [(ids.tolist(), targets.tolist(), size) for (ids, targets, _), size in zip(rows, sizes, strict=True)], counts


def obvious_targets(pieces: list[list[tuple[int, bool]]]) -> list[int]:
    """Return the learned tokens except the first of each piece."""
    return sorted(i for piece in pieces for i, learn in piece[1:] if learn)


@given(documents=listed(), seq_len=lengths, way=ways, packing=st.sampled_from(["documents", "one"]), data=st.data())
def test_every_learned_token_is_a_target_once_after_its_own(documents, seq_len, way, packing, data):
    order = data.draw(st.permutations(range(len(documents.tokens))))
    _, rows, counts = packed(documents, packing, seq_len, order, way)
    learned = sorted(target for _, targets, _ in rows for target in targets if target != UNSUPERVISED)
    packed_ids = {
        "cut": [document[:seq_len] for document in documents.tokens],
        "split": documents.tokens,
        "skip": [document for document in documents.tokens if len(document) <= seq_len],
    }[way]
    assert learned == obvious_targets(packed_ids)
    for ids, targets, spans in rows:
        assert sum(spans) == seq_len
        assert any(target != UNSUPERVISED for target in targets), "a sequence without a target"
        ends = np.cumsum(spans) - 1
        assert all(targets[end] == UNSUPERVISED for end in ends), "a target across the border of a document"
        assert all(target in (UNSUPERVISED, ids[t] + 1) for t, target in enumerate(targets)), "ids rise by one in a document"
        assert all(target == UNSUPERVISED or ids[t + 1] == target for t, target in enumerate(targets))
    long = [document for document in documents.tokens if len(document) > seq_len and any(learn for _, learn in document[1:])]
    assert counts[{"cut": "cut", "split": "split", "skip": "skipped"}[way]] == len(long)
    nothing = [document for document in documents.tokens if not obvious_targets([document])]
    lost = [document for document in long if not obvious_targets([document[:seq_len]])] if way == "cut" else []
    assert counts["unsupervised"] == len(nothing) + len(lost)


def test_a_pair_with_a_half_that_teaches_nothing_is_left_out():
    documents = Listed([[(0, False), (1, learn)] for learn in (True, False, True, True)])
    sequences, _, counts = packed(documents, "pairs", 4, [3, 1, 0, 2])
    assert (sequences.segments[:, 0].tolist(), counts["documents"], counts["unsupervised"]) == ([2, 3], 4, 1)
    with pytest.raises(DataError, match="data:1: nothing in it to learn from"):
        packed(documents, "pairs", 4, unsupervised="refuse")


def obvious_first_fit(lengths: list[int], seq_len: int, n_open: int) -> list[list[int]]:
    """Reference implementation: first fit over all open sequences."""
    sequences: list[list[int]] = []
    is_open: list[bool] = []
    for n in lengths:
        fits = [s for s, held in enumerate(sequences) if is_open[s] and sum(held) + n <= seq_len]
        if fits:
            sequences[fits[0]].append(n)
        else:
            sequences.append([n])
            is_open.append(True)
        while sum(is_open) > n_open:
            fullest = max((s for s in range(len(sequences)) if is_open[s]), key=lambda s: (sum(sequences[s]), -s))
            is_open[fullest] = False
    return sequences


@given(ns=st.lists(st.integers(2, 12), max_size=60), seq_len=st.integers(12, 40), n_open=st.integers(1, 5))
def test_documents_are_packed_as_the_obvious_packer_does(ns, seq_len, n_open):
    documents = Listed([[(i, True) for i in range(n)] for n in ns])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "OPEN_SEQUENCES", n_open)
        sequences, _, _ = packed(documents, "documents", seq_len, too_long="refuse", unsupervised="refuse")
    sizes = [[stop - start for _, start, stop in sequences[i]] for i in range(len(sequences))]
    assert sizes == obvious_first_fit(ns, seq_len, n_open)
    assert all(sum(held) <= seq_len for held in sizes)


@given(documents=listed(), seq_len=lengths, data=st.data())
def test_joined_documents_are_one_row_that_is_cut(documents, seq_len, data):
    order = data.draw(st.permutations(range(len(documents.tokens))))
    _, rows, counts = packed(documents, "joined", seq_len, order, "refuse")
    learns = [d for d in order if any(learn for _, learn in documents.tokens[d])]
    row = [token for d in learns for token in documents.tokens[d]]
    expected = []
    for piece in (row[i : i + seq_len] for i in range(0, len(row), seq_len)):
        if any(learn for _, learn in piece[1:]):
            n_pad = seq_len - len(piece)
            targets = [i if learn else UNSUPERVISED for i, learn in piece[1:]] + [UNSUPERVISED] * (n_pad + 1)
            expected.append(([i for i, _ in piece] + [PAD] * n_pad, targets, (len(piece), n_pad) if n_pad else (seq_len,)))
    assert rows == expected
    assert counts["unsupervised"] == len(documents.tokens) - len(learns)


@pytest.mark.parametrize("packing", ["documents", "one"])
def test_what_is_refused_is_named(packing):
    documents = Listed([[(1, False), (2, True)], [(3, False), (4, True), (5, True)], [(6, False), (7, False)]])
    with pytest.raises(DataError, match=r"data:2: nothing in it to learn"):
        packed(documents, packing, 3, unsupervised="refuse")
    with pytest.raises(DataError, match=r"data:1: 3 tokens, and a sequence holds 2"):
        packed(documents, packing, 2, too_long="refuse")
    assert len(packed(documents, packing, 3, [0, 1], "refuse", "refuse")[0]) == 2


def test_whole_documents_fill_most_of_every_sequence():
    """With one open sequence instead of a window, a fifth would be padding."""
    ns = np.random.RandomState(0).geometric(1 / 200, 3000).clip(2, 1024)
    sequences, _, _ = packed(Listed([[(i, True) for i in range(n)] for n in ns.tolist()]), "documents", 1024)
    assert ns.sum() / (len(sequences) * 1024) > 0.97
