"""`penstock data`: show the first documents of a data set as the model reads them, and count all of them."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.run_config import read_run

from .options import AS_JSON, PATH, Command, flag_of, given_settings, together
from .outputs import show_table
from .progress import Preparing, show_overview

if TYPE_CHECKING:
    from penstock.data.sampling import PackedSet
    from penstock.data.tokenizer import ModelTokenizer

ANY_VOCAB_SIZE = 2**32  # vocabulary size without a config.json
_FLAGS = ("format", "columns", "split", "packing", "images", "bad_rows", "max_row_seconds", "max_row_mb", "chat_template")


@dataclass(frozen=True, slots=True)
class Sample:
    """A document as the model reads it. `parts`: (text, True if its tokens are learned)."""

    where: str
    n_tokens: int
    n_learned: int
    n_cut: int  # tokens beyond the sequence length, not shown
    parts: tuple[tuple[str, bool], ...]
    images: tuple[str, ...] = ()  # size and tokens of each, as `64 x 48: 12 tokens`


@click.command("data", cls=Command)
@click.argument("paths", metavar="PATH[:WEIGHT]...", nargs=-1, required=True)
@click.option("--model", type=PATH, help="Folder with the tokenizer.  [default: none, and text is read as bytes]")
@click.option("--seq-len", type=click.IntRange(2), default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--samples", "n_samples", type=click.IntRange(0), default=3, show_default=True, help="Documents to show.")
@together(*(flag_of(f"data.{name}") for name in _FLAGS))
@AS_JSON
def data(paths: Sequence[str], model: Path | None, seq_len: int, n_samples: int, as_json: bool, **flags: Any) -> None:
    """Show the first documents of PATH as the model reads them, mark the learned tokens, and count all documents.

    Learned tokens are green on a terminal, elsewhere in [[ ]].
    """
    from penstock.data.data import DataRequest, read_data
    from penstock.data.sampling import MapStyleData
    from penstock.data.tokenizer import read_tokenizer
    from penstock.training.inputs import tokens_folder

    settings = replace(read_run(None, given_settings(flags | {"data.path": paths})).data, shuffle=False)
    if model is not None and not model.is_dir():
        raise click.UsageError(f"--model {model}: no such folder; give one with config.json and tokenizer.json")
    vocab_size, by_document = _model(model, seq_len)
    with tempfile.TemporaryDirectory(prefix="penstock-data-") as folder, Preparing() as report:
        report("reading the data")
        cache = tokens_folder(Path(folder))
        request = DataRequest(settings, model, vocab_size, seq_len, 1, 0, cache, by_document, objective=None, vision=model)
        packed = read_data(request, report)
        assert isinstance(packed, MapStyleData)
        parts, about = packed.parts, packed.words()
        samples = [sample for part in parts for sample in _samples(part, read_tokenizer(model, settings.chat_template), n_samples)]
        counted = _counts(parts)
    if as_json:
        click.echo(json.dumps({"about": about, "samples": [asdict(sample) for sample in samples], "counts": counted}))
        return
    if model is None:
        click.echo("no tokenizer: text is read as bytes; give the model's folder with --model", err=True)
    show_overview(about)
    if sys.stdout.isatty():
        for sample in samples:
            cut = f", {sample.n_cut:,} of them cut" if sample.n_cut else ""
            title = f"{_printable(sample.where)}: {sample.n_tokens:,} tokens{cut}, {sample.n_learned:,} to be learned"
            title += f"; images of {'; '.join(sample.images)}" * bool(sample.images)
            texts = [click.style(_printable(text), fg="green" if learned else None) for text, learned in sample.parts]
            click.echo(f"{click.style(title, bold=True)}\n{''.join(texts)}\n")
    else:
        marked = ["".join(f"[[{text}]]" if learned else text for text, learned in sample.parts) for sample in samples]
        texts = [json.dumps(text, ensure_ascii=False)[1:-1] for text in marked]
        has_images, columns = any(s.images for s in samples), ["where", "tokens", "learned"]
        rows = [[s.where, str(s.n_tokens), str(s.n_learned), *(["; ".join(s.images)] * has_images)] for s in samples]
        show_table((*columns, *(["images"] * has_images), "text"), [(*row, t) for row, t in zip(rows, texts, strict=True)])
    show_table(("what", "count"), [(name.replace("_", " "), f"{n:,}") for name, n in counted.items()])


def _model(folder: Path | None, seq_len: int) -> tuple[int, bool]:
    """Return the vocabulary size of a model, and True if it supports document isolation."""
    from penstock.model_checks.document_isolation import supports_documents
    from penstock.planner.model.config import outlines, read_model, supported_attention, without_dropout
    from penstock.runtime.plan import Semantics

    if folder is None or not (folder / "config.json").exists():
        return ANY_VOCAB_SIZE, True
    model = without_dropout(read_model(str(folder)))
    semantics = Semantics(seq_len, 1, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
    return int(outlines(model, semantics.attention, 1, 16)["vocab"]), supports_documents(model.config, semantics) is None


def _samples(part: "PackedSet", tokenizer: "ModelTokenizer", n: int) -> Iterator[Sample]:
    """Yield the first valid documents in the order of the files."""
    documents, shape = part.documents, part.shape
    for d in [d for d in range(len(documents.lengths)) if d not in documents.problems][:n]:
        ids, runs = documents.ids(d).tolist(), documents.runs(d)
        shown = ids if shape.packing == "joined" else ids[: shape.seq_len]  # a joined document continues in the next sequence
        edges = [0, *runs.reshape(-1).clip(0, len(shown)).tolist(), len(shown)]
        texts = [tokenizer.decode(shown[:edge], special=True) for edge in edges]
        parts = tuple((longer[len(prefix) :], i % 2 == 1) for i, (prefix, longer) in enumerate(pairwise(texts)) if longer != prefix)
        images = tuple("{} x {}: {:,} tokens".format(*image["size"], image["n_tokens"]) for image in documents.images(d))
        if images:  # shorten runs of the token of images
            reads = documents.reader.images  # type: ignore[union-attr]
            token = re.escape(tokenizer.decode([reads.token_id], special=True))  # type: ignore[union-attr]
            parts = tuple((re.sub(f"({token})\\1+", _counted, text), learned) for text, learned in parts)
        yield Sample(documents.where(d), len(ids), int(documents.n_learned[d]), len(ids) - len(shown), parts, images)


def _counted(run: re.Match[str]) -> str:
    return f"{run[1]} x {len(run[0]) // len(run[1])}"


def _counts(parts: "Sequence[PackedSet]") -> dict[str, int]:
    """Count the rows and documents of all sets, and the tokens of their sequences."""
    from penstock.data.packing import Counts, n_targets_of

    counts = sum((part.counts for part in parts), Counts())
    packed = [(part, part.sequences[i]) for part in parts for i in range(len(part.sequences))]
    learned = (
        n_targets_of(part.documents.runs(d), start + (i == 0 or part.shape.packing != "joined"), stop)
        for part, segments in packed
        for i, (d, start, stop) in enumerate(segments)
    )
    return {
        "rows": sum(part.documents.n_rows for part in parts),
        "bad_rows": sum(len(part.documents.problems) for part in parts),
        "documents": counts["documents"],
        "left_out_with_nothing_to_learn": counts["unsupervised"],
        "left_out_as_too_long": counts["skipped"],
        "cut": counts["cut"],
        "split": counts["split"],
        "sequences": len(packed),
        "tokens": sum(stop - start for _, segments in packed for _, start, stop in segments),
        "learned_tokens": sum(learned),
    } | _image_counts(packed)


def _image_counts(packed: "Sequence[tuple[PackedSet, list[list[int]]]]") -> dict[str, int]:
    """Count the images of the sequences and their tokens; {} for texts."""
    used = [(part.documents, d) for part, segments in packed if part.documents.has_images for d, *_ in segments]
    images = [image for documents, d in used for image in documents.images(d)]
    return {"images": len(images), "image_tokens": sum(image["n_tokens"] for image in images)} if images else {}


def _printable(text: str) -> str:
    """Escape all control characters of a text, except line ends, for a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
