"""`penstock merge`: merge a LoRA adapter into its base model."""

from pathlib import Path

import click

from penstock.runtime.units import on_one_line, show_bytes

from .options import command
from .progress import Preparing


@command("merge")
def merge(base: Path, adapter: Path, out: Path) -> None:
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
