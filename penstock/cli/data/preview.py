"""What is learned of the first documents of a data set, and of all of them in figures?"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.data.encoders import Encoder
    from penstock.data.map_style import MapStyleData


_COUNTED = {
    "n_documents": "documents",
    "n_unsupervised": "left_out_with_nothing_to_learn",
    "n_skipped": "left_out_as_too_long",
    "n_cut": "cut",
    "n_split": "split",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A document as the model reads it: its text in parts, and whether each is learned."""

    where: str
    n_tokens: int
    n_learned: int
    n_cut: int  # tokens beyond a sequence's length, which are not shown
    parts: tuple[tuple[str, bool], ...]


def samples(data: "MapStyleData", encoder: "Encoder", n: int) -> Iterator[Sample]:
    """The first documents in the order of the files."""
    documents, seq_len = data.documents, data.shape.seq_len
    for d in range(min(n, len(documents.lengths))):
        ids, runs = [int(i) for i in documents.ids(d)], documents.runs(d)
        shown = ids if data.shape.packing == "joined" else ids[:seq_len]  # a joined document goes on in the next sequence
        edges = [0, *(int(edge) for edge in runs.reshape(-1).clip(0, len(shown))), len(shown)]
        texts = [encoder.shown(shown[:edge]) for edge in edges]
        parts = [(after[len(before) :], i % 2 == 1) for i, (before, after) in enumerate(pairwise(texts))]
        n_learned = int((runs[:, 1] - runs[:, 0]).sum())
        yield Sample(documents.where(d), len(ids), n_learned, len(ids) - len(shown), tuple(part for part in parts if part[0]))


def figures(parts: "tuple[MapStyleData, ...]") -> dict[str, Any]:
    """What became of the rows of several sets, and what their sequences hold."""
    totals = [_tokens(part) for part in parts]
    counts = [asdict(part.counts) for part in parts]
    return {
        "rows": sum(len({part.documents.where(d) for d in range(part.counts.n_documents)}) for part in parts),
        **{words: sum(of[name] for of in counts) for name, words in _COUNTED.items()},
        "sequences": sum(part.n_sequences for part in parts),
        "tokens": sum(n for n, _ in totals),
        "learned_tokens": sum(n for _, n in totals),
    }


def _tokens(data: "MapStyleData") -> tuple[int, int]:
    """Tokens in the sequences of a set, and those of them that are learned."""
    from penstock.data.packing import n_targets_of

    n_learned, joined = 0, data.shape.packing == "joined"
    for i in range(data.n_sequences):
        at = 0
        for document, start, stop in data.sequences[i]:
            first = start + int(not joined or at == 0)  # nothing comes before it that it could be learned from
            n_learned += n_targets_of(data.documents.runs(document), first, stop)
            at += stop - start
    return int((data.sequences.stop - data.sequences.start).sum()), n_learned
