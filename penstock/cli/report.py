"""`penstock check` and `penstock report`: check a plan, and draw a page or trace of it and of its run."""

from datetime import date
from inspect import unwrap
from pathlib import Path

import click

from penstock.api import predict, proven
from penstock.planner.search.claim import claimed
from penstock.run_files import refuse_another_plan
from penstock.runtime.errors import PlanError, WrongPlanError
from penstock.runtime.plan import PlanFile
from penstock.runtime.units import in_shell, on_one_line

from .outputs import PAGES, created, write_drawing

TRACES = (".json",)


@click.command(short_help="Prove that a plan is right and that its claim is true, or name the error.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--search", is_flag=True, help="Repeat the search too, to check the bound over all policies.")
def check(plan_file: Path, search: bool) -> None:
    """Prove that PLAN is right: no race, no deadlock, every gradient once, within the memory of its machine. Prove its claim: its
    blocks are the model's, and its memory, times and bounds follow from the profile.

    Exit code 0 and one line, which names unchecked parts, if it is right; 1 and the error if it is wrong; 2 if the file is no plan
    or has no claim. A check takes a second or two; with --search, the time of `plan`.
    """
    from penstock.planner.check.claim import name_conflicts

    where, file = on_one_line(str(plan_file)), PlanFile.read(plan_file)
    claimed(file.claim, str(plan_file))  # exit code 2 for an unreadable claim, 1 for a wrong one
    summary = proven(str(plan_file), file, search)
    for conflict in name_conflicts(file.plan):
        click.echo(f"note: {where}: {on_one_line(conflict)}", err=True)
    click.echo(f"{where}: {on_one_line(summary)}")


@click.command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="FILE.html: a page for any browser. FILE.json: a trace for ui.perfetto.dev or chrome://tracing.",
)
def report(plan_file: Path, run_dir: Path | None, output: Path) -> None:
    """Draw PLAN as predicted and, given the --out folder of a run, as measured.

    The page holds one step lane by lane, memory over it, where the seconds go, the certificate in words and, of a run, its curves.
    It is one file that needs no network.
    """
    if output.suffix.lower() not in (*PAGES, *TRACES):
        raise click.UsageError(f"{output}: write to a name that ends in .html, for a page, or in .json, for a trace")
    if output.exists() and plan_file.exists() and output.samefile(plan_file):
        raise click.UsageError(f"{output}: the plan itself would be overwritten; choose another name")
    file = PlanFile.read(plan_file)
    try:
        proven(str(plan_file), file, search=False)
    except WrongPlanError as error:
        raise PlanError(str(error)) from None
    if run_dir is not None:
        refuse_another_plan(run_dir, file.plan)
    is_page = output.suffix.lower() in PAGES
    where = "in a browser" if is_page else "at https://ui.perfetto.dev or chrome://tracing"
    write_drawing(output, (_page if is_page else _trace)(file, plan_file, run_dir), where)


def _page(file: PlanFile, plan_file: Path, run_dir: Path | None) -> str:
    from penstock.planner.show.facts import Facts
    from penstock.planner.show.page import page
    from penstock.run_files import read_logged_run

    run = None if run_dir is None else read_logged_run(run_dir, file.plan)
    names = " ".join(in_shell(path) for path in (plan_file, run_dir) if path is not None)
    where = on_one_line(plan_file.name)
    return page(Facts(file, where, run, today=date.today()), where, created(f"penstock report {names}"))


def _trace(file: PlanFile, plan_file: Path, run_dir: Path | None) -> str:
    from penstock.run_files import read_timeline
    from penstock.runtime.plan.timeline import chrome_trace

    tracks = {"predicted": unwrap(predict)(file).timeline}
    if run_dir is not None:
        tracks["measured"] = read_timeline(run_dir / "timeline.json", file.plan)
    return chrome_trace(file.plan, tracks)
