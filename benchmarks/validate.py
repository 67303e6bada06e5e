"""Command that predicts published runs, user runs or single ops, and tabulates the errors.

`python -m benchmarks.validate FILE [--json]`
"""

import json

import click

from benchmarks.published.ops import OpLedger, validate_ops
from benchmarks.published.validate import Ledger, validate_file
from penstock.cli.user_errors import OneLineErrors


@click.command(cls=OneLineErrors)
@click.argument("measured", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def validate(measured: str, as_json: bool) -> None:
    """Predict MEASURED and report the errors: whole runs, published or your own, from JSON, or single ops, copies and collectives
    from CSV, with the columns of benchmarks/published_ops.csv."""
    ledger: Ledger | OpLedger = validate_ops(measured) if measured.lower().endswith(".csv") else validate_file(measured)
    click.echo(json.dumps(ledger.to_json()) if as_json else ledger.table())


if __name__ == "__main__":
    validate()
