"""`penstock merge`: merge a LoRA adapter into its base model."""

from pathlib import Path

import click

from penstock.runtime.units import on_one_line, show_bytes

from .progress import Preparing


@click.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The new model's folder.")
def merge(base: Path, adapter: Path, out: Path) -> None:
    """Merge the LoRA adapter in ADAPTER into the model in BASE, and write the model to a new folder, tensor by tensor.

    ADAPTER is a folder in PEFT's format, such as a checkpoint of a run with adapters. Each adapted weight is computed in fp32 and
    rounded once, to its dtype in BASE. A tokenizer or chat template in ADAPTER replaces that of BASE. An adapter with a head that
    scores sequences gives a model for transformers' AutoModelForSequenceClassification. Two models are never in memory at once.
    """
    from penstock.checkpoint.merging import merge as merged
    from penstock.data.tokenizer import read_tokenizer

    def pad_id() -> int:
        """Return the padding token. Without a tokenizer, the run read bytes and padded with their end token."""
        return read_tokenizer(base if (base / "tokenizer.json").is_file() else None).end_id

    ends = [read_tokenizer(adapter).end_id] if (adapter / "tokenizer.json").is_file() else []
    with Preparing() as show:
        summary = merged(
            base, adapter, out, lambda _, n, total: show(f"merging: {show_bytes(n)} of {show_bytes(total)}"), pad_id, ends
        )
    click.echo(f"{on_one_line(str(out))}: {summary}")
