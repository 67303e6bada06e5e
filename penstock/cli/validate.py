"""How does a user see how right the predictions are?"""

import json

import click


@click.command()
@click.argument("measured", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def validate(measured: str, as_json: bool) -> None:
    """Predict what was MEASURED, and say how far off the predictions are: whole runs, published or your own, from JSON, or single
    ops, copies and collectives from CSV, with the columns of benchmarks/published_ops.csv."""
    from planner.ledger.ops import OpLedger, validate_ops
    from planner.ledger.validate import Ledger, validate_file

    from .options import refuse_endless

    refuse_endless(measured)
    ledger: Ledger | OpLedger = validate_ops(measured) if measured.lower().endswith(".csv") else validate_file(measured)
    click.echo(json.dumps(ledger.to_json()) if as_json else ledger.table())
