"""How does a user see what would be learned?"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import Command, Count, show_table
from penstock.cli.progress import Preparing, show_overview
from penstock.cli.run_options import PATH, data_settings, flag_of, given_settings
from penstock.run_config import read_run

if TYPE_CHECKING:
    from .preview import Sample

MOST_SAMPLES = 1000
LONGEST = 2**32  # token ids of a folder that holds a tokenizer and no config.json


@click.command("data", cls=Command)
@click.argument("paths", metavar="PATH[:WEIGHT]...", nargs=-1, required=True)
@click.option("--model", type=PATH, help="Folder with the tokenizer.  [default: none, and text is read as bytes]")
@click.option("--seq-len", type=Count(2, 10**9), default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--samples", "n_samples", type=Count(0, MOST_SAMPLES), default=3, show_default=True, help="Documents to show.")
@flag_of("data.format")
@flag_of("data.columns")
@flag_of("data.split")
@flag_of("data.packing")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def data(paths: Sequence[str], model: Path | None, seq_len: int, n_samples: int, as_json: bool, **flags: Any) -> None:
    """Show the first documents of PATH as the model reads them, with what is learned marked, and count all of them.

    Learned tokens are in green on a terminal, elsewhere in [[ ]].
    """
    from penstock.data.data import read_data
    from penstock.data.encoders import ByteEncoder, read_encoder
    from penstock.data.map_style import MapStyleData
    from penstock.data.mixed import MixedData

    from .preview import figures, samples

    settings = replace(read_run(None, given_settings(flags) | data_settings(paths)).data, shuffle=False)
    if model is not None and not model.is_dir():
        raise click.UsageError(f"--model {model}: no such folder; give one with config.json and tokenizer.json")
    vocab_size, by_document = _model(model, seq_len)
    encoder = read_encoder(model)
    with tempfile.TemporaryDirectory(prefix="penstock-data-") as folder, Preparing() as report:
        report("reading the data")
        found = read_data(settings, model, vocab_size, seq_len, 1, 0, Path(folder) / "tokens", by_document, report=report)
        assert isinstance(found, MapStyleData | MixedData)
        parts = found.parts if isinstance(found, MixedData) else (found,)
        first = [sample for part in parts for sample in samples(part, encoder, n_samples)]
        counted, about = figures(parts), found.words()
        found.close()
    if as_json:
        click.echo(json.dumps({"about": about, "samples": [asdict(sample) for sample in first], "counts": counted}))
        return
    if isinstance(encoder, ByteEncoder):
        click.echo("no tokenizer: text is read as bytes; give the model's folder with --model", err=True)
    warning = about.pop("warning", None)
    show_overview(about, warning)
    _show(first)
    show_table(("what", "count"), [(name.replace("_", " "), f"{n:,}") for name, n in counted.items()])


def _model(folder: Path | None, seq_len: int) -> tuple[int, bool]:
    """Token ids that the model knows, and whether it attends to each document alone."""
    from planner.model.workload import read_model
    from runtime.layers.documents import supports_documents
    from runtime.plan import Semantics

    if folder is None or not (folder / "config.json").exists():
        return LONGEST, True
    config = read_model(str(folder)).config
    return int(config["vocab_size"]), supports_documents(config, Semantics(seq_len=seq_len, batch_size=1, micro_batch=1)) is None


def _show(found: "Sequence[Sample]") -> None:
    """Whole on a terminal, elsewhere a line each."""
    if not sys.stdout.isatty():
        lines = [(s.where, str(s.n_tokens), str(s.n_learned), json.dumps(_marked(s), ensure_ascii=False)[1:-1]) for s in found]
        show_table(("where", "tokens", "learned", "text"), lines)
        return
    for sample in found:
        cut = f", {sample.n_cut:,} of them cut" if sample.n_cut else ""
        click.secho(f"{_plain(sample.where)}: {sample.n_tokens:,} tokens{cut}, {sample.n_learned:,} to be learned", bold=True)
        click.echo("".join(click.style(_plain(text), fg="green") if learned else _plain(text) for text, learned in sample.parts))
        click.echo()


def _marked(sample: "Sample") -> str:
    return "".join(f"[[{text}]]" if learned else text for text, learned in sample.parts)


def _plain(text: str) -> str:
    """Text for a terminal, which obeys nothing that a file says but line ends."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
