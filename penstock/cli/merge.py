"""`penstock merge`: merge a LoRA adapter into its base model."""

from pathlib import Path

import click

from runtime.units import on_one_line, show_bytes

from .progress import Preparing


@click.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The new model's folder.")
def merge(base: Path, adapter: Path, out: Path) -> None:
    """Merge the LoRA adapter in ADAPTER into the model in BASE, and write the model to a new folder, tensor by tensor.

    ADAPTER is a folder as PEFT saves it, such as a checkpoint of a run with adapters. Each adapted weight is computed in fp32 and
    rounded once, to its dtype in BASE. At no time are two models in memory.
    """
    from penstock.checkpoint.merging import merge as merged

    with Preparing() as tell:
        found = merged(base, adapter, out, lambda _, done, of: tell(f"merging: {show_bytes(done)} of {show_bytes(of)}"))
    where, size = on_one_line(str(found.path)), show_bytes(found.n_bytes)
    click.echo(f"{where}: {found.n_tensors} tensors, {size}, {found.n_merged} of them with an adapter of rank {found.lora.rank}")
