"""`penstock check`: prove a plan right, and recompute what it claims."""

from pathlib import Path

import click

from runtime.units import on_one_line


@click.command(short_help="Prove that a plan is right and what it claims true, or say what is wrong.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--search", is_flag=True, help="Search again, too: the bound on all policies is what the search finds.")
def check(plan_file: Path, search: bool) -> None:
    """Prove that PLAN is right: no race, no deadlock, every gradient once, within the memory of its machine; and that what it
    claims is so: its blocks are the model's, its memory, times and bounds follow from the profile.

    Exit code 0 and one line if it is, which also names what could not be checked; 1 and what is wrong if it is not; 2 if the file
    is no plan, or claims nothing. With --search it takes as long as `plan` did, else a second or two.
    """
    from penstock.api import proven
    from planner.check.claim import strangers
    from planner.search.claim import claimed
    from runtime.plan import PlanFile

    where, file = on_one_line(str(plan_file)), PlanFile.read(plan_file)
    claimed(file.claim, str(plan_file))  # a file that is no plan, or claims nothing, is refused otherwise than one that is wrong
    found = proven(str(plan_file), file, search)
    for stranger in strangers(file.plan):
        click.echo(f"note: {where}: {on_one_line(stranger)}", err=True)
    click.echo(f"{where}: {on_one_line(found)}")
