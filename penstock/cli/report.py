"""`penstock report`: a page, or a trace for Perfetto, of a plan and of a run of it."""

import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.version import version_in_words
from runtime.units import on_one_line, show_bytes

if TYPE_CHECKING:
    from runtime.plan import PlanFile

PAGES, TRACES = (".html", ".htm"), (".json",)


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
    from hwprofiles.schema import Profile
    from planner.check.check import check
    from planner.check.claim import check_claim, check_origin
    from planner.search.claim import claimed
    from runtime.errors import PlanError
    from runtime.files import write_whole
    from runtime.plan import PlanFile

    if output.suffix.lower() not in (*PAGES, *TRACES):
        raise click.UsageError(f"{output}: write to a name that ends in .html, for a page, or in .json, for a trace")
    if output.exists() and plan_file.exists() and output.samefile(plan_file):
        raise click.UsageError(f"{output}: the plan itself would be overwritten; choose another name")
    file = PlanFile.read(plan_file)
    claim = None if file.claim is None else claimed(file.claim, str(plan_file))
    Profile.from_json(file.plan.profile, f"{plan_file}: profile")
    try:
        check(file.plan)
        check_origin(file.plan, claim)
        if claim is not None:
            check_claim(file.plan, claim)
    except PlanError as error:
        raise PlanError(f"{plan_file}: {error}") from None
    is_page = output.suffix.lower() in PAGES
    drawn = (_page if is_page else _trace)(file, plan_file, run_dir)
    try:
        write_whole(output, drawn)
    except OSError as error:
        raise click.UsageError(f"{output}: cannot be written ({error.strerror}); choose another place with -o") from None
    where = "in a browser" if is_page else "at https://ui.perfetto.dev or chrome://tracing"
    n_bytes = show_bytes(len(drawn.encode("utf-8", "backslashreplace")))
    click.echo(f"wrote {on_one_line(str(output))} ({n_bytes}); open it {where}", err=True)


def _page(file: "PlanFile", plan_file: Path, run_dir: Path | None) -> str:
    from planner.show.facts import facts
    from planner.show.page import page

    from .run_files import read_logged_run

    run = None if run_dir is None else read_logged_run(run_dir, file.plan)
    names = " ".join(on_one_line(str(path)) for path in (plan_file, run_dir) if path is not None)
    where = on_one_line(plan_file.name)
    return page(facts(file, where, run), where, f"{date.today().isoformat()}, {version_in_words()}: penstock report {names}")


def _trace(file: "PlanFile", plan_file: Path, run_dir: Path | None) -> str:
    from penstock.api import predict
    from runtime.plan.timeline import chrome_trace

    from .run_files import GIVE, read_timeline

    tracks = {"predicted": predict(file).timeline}
    if run_dir is not None:
        timeline_file = run_dir / "timeline.json"
        if not os.path.lexists(timeline_file):
            problem = "no timeline.json, which a run writes at its end; write a page, FILE.html, of what there is"
            raise click.UsageError(f"{run_dir}: {problem if run_dir.is_dir() else f'no such folder; {GIVE}'}")
        tracks["measured"] = read_timeline(timeline_file, file.plan)
    return chrome_trace(file.plan, tracks)
