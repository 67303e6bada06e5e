"""How does a user see how right the predictions are?"""

import json

import click


@click.command()
@click.argument("runs", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def validate(runs: str, as_json: bool) -> None:
    """Predict every run in the JSON file RUNS, published or your own: a row each, then median and 90th percentile error."""
    from planner.ledger.validate import validate_file

    from .options import refuse_endless

    refuse_endless(runs)
    ledger = validate_file(runs)
    click.echo(json.dumps(ledger.to_json()) if as_json else ledger.table())
