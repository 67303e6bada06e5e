"""`penstock run`: train with a plan, by one process or by several ranks, until it is done or a signal asks for its end."""

import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from penstock.ranks import GoneError, is_rank, joined, refuse_several_hosts, start, take_own_part
from penstock.run_config import RUN_FILE, read_run
from penstock.runtime.errors import RanksError
from penstock.runtime.plan import PlanFile
from penstock.runtime.units import on_one_line
from penstock.settings import RunSettings
from penstock.signals import handled

from .options import PATH, RunCommand, above_0, given_settings, setting_flags
from .progress import Preparing, Progress, overview, refuse_to_recalibrate, show_outcome, show_overview

if TYPE_CHECKING:
    from penstock.training.session import Session

STATES = "checkpoint-*/trainer_state.json"


@click.command("run", cls=RunCommand)
@click.argument("plan_file", metavar="[PLAN]", required=False, type=PATH)
@click.option("--config", type=PATH, help="YAML or TOML file of settings; flags override it.")
@setting_flags
@click.option("--resume", is_flag=True, help="Resume from the last checkpoint in --out.")
@click.option("--resume-from", metavar="CHECKPOINT", help="Resume from this one, as checkpoint-20.")
@click.option("--recalibrate", type=PATH, metavar="FILE.json", help="Write the machine's profile, corrected by this run.")
@click.option(
    "--time-scale",
    type=above_0(1e6),
    help="With --device emulated: how many times slower.  [default: the median op lasts 20 ms]",
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    plan_file: Path | None,
    config: Path | None,
    resume: bool,
    resume_from: str | None,
    recalibrate: Path | None,
    time_scale: float | None,
    **flags: Any,
) -> None:
    """Train with PLAN and compare what was predicted with what was measured.

    Writes metrics.jsonl, run.yaml (all settings), run-plan.json, timeline.json and checkpoint-N/ (which transformers loads) into
    --out, a folder that may be moved. SIGTERM, Ctrl-C and a closed terminal finish the step and save; a second signal ends at once.
    Exit code 3: the plan does not fit this machine; 4: the run was lost, with --stop-if-lost.
    """
    given = given_settings(flags) | ({"plan": str(plan_file)} if plan_file is not None else {})
    with Preparing() as report:
        settings = read_run(config, given)
        if settings.plan is None:
            raise click.UsageError("no plan: give PLAN, or `plan` in the file of --config")
        _refuse_contradictions(settings, given, resume or resume_from is not None, time_scale)
        if resume and not resume_from and config and any(config.parent.glob(STATES)) and not any(Path(settings.out).glob(STATES)):
            raise click.UsageError(f"no checkpoint in {settings.out}, and {config} lies beside some; say --out {config.parent}")
        how = {"resume": resume, "resume_from": resume_from, "time_scale": time_scale}
        code = _run(settings, how, recalibrate, report)
    ctx.exit(code)


def _run(settings: RunSettings, how: dict[str, Any], recalibrate: Path | None, report: Preparing) -> int:
    """Start the ranks of a run, or be one of them, or the only one; the exit code."""
    path = settings.plan or ""
    try:
        report("reading the plan")
        file = PlanFile.read(Path(path))
        n = file.plan.semantics.ranks
        if n > 1 and settings.device != "emulated" and not is_rank():
            report.stop()
            refuse_several_hosts(file.plan)
            return start(n, sys.argv[1:])
        if is_rank():
            take_own_part(settings.device)
        from penstock.training.device import device_of
        from penstock.training.follower import follow  # imports torch: once the plan is read and a GPU is chosen
        from penstock.training.session import checked, open_session

        device = device_of(settings.device)
        with joined(settings, file.plan, device) as ranks:
            if ranks is not None and ranks.rank > 0:
                report.stop()
                return follow(settings, file, device, ranks)
            if recalibrate is not None:
                refuse_to_recalibrate(recalibrate, Path(path), checked(file, path).plan, device)
            with open_session(settings, file, path, report=report, ranks=ranks, **how) as session:
                report.stop()
                return _train(session, settings, file, recalibrate)
    except GoneError as error:
        return error.exit_code
    except RanksError:
        if is_rank() and os.environ.get("RANK", "0") != "0":
            return 1  # rank 0 prints it
        raise


def _train(session: "Session", given: RunSettings, file: PlanFile, recalibrate: Path | None) -> int:
    """Perform the steps and show the outcome; the exit code. What is written is what was given: with a plan of another optimizer
    it has that one's rate."""
    from penstock.training.run_folder import write_settings
    from penstock.training.trainer import Trainer

    stop, n_steps, progress = session.stop, session.n_steps, Progress(session)
    trainer = Trainer(session, progress.step)
    write_settings(given, file)
    show_overview(overview(session))
    asked = list[int]()

    def ask(number: int, frame: FrameType | None) -> None:
        """The first signal requests an end after the step; a second one ends the command at once."""
        asked.append(number)
        stop.request()
        progress.tell("finishing the step, then saving; once more ends at once")

    with handled(ask, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, once=True), progress:
        timeline, times_s = trainer.train()
    if stop.is_requested and (progress.n_done < n_steps or trainer.due_validations(n_steps)):
        word = "terminated" if signal.SIGTERM in asked else "hung up" if signal.SIGHUP in asked else "interrupted"
        click.echo(f"{word}: {_stopped(session, progress.n_done)}", err=True)
        return 128 + signal.SIGINT if signal.SIGINT in asked else 0  # a run that saved on another has done all that was asked
    if session.first_step < n_steps:
        show_outcome(session, timeline, times_s, recalibrate)
    return 0


def _stopped(session: "Session", n_done: int) -> str:
    """What a run that was asked to end has saved, and how to resume."""
    at, out, is_new = f"stopped after step {n_done} of {session.n_steps}", session.settings.out, n_done > session.first_step
    if not session.saves:
        return f"{at}, and nothing is saved"
    if session.settings.checkpoint.weights_only and is_new:
        return f"{at}; its weights alone are saved: train on from them with --model {out}/checkpoint-{n_done}"
    again = f"penstock run --config {on_one_line(shlex.quote(f'{out}/{RUN_FILE}'))} --resume"
    return f"{at}, {'saved' if is_new else 'nothing to save'}; resume with: {again}"


def _refuse_contradictions(settings: RunSettings, given: dict[str, Any], resumes: bool, time_scale: float | None) -> None:
    """UsageError for flags that contradict --device."""
    is_idle = resumes or any(name.startswith("checkpoint.") or name in ("evaluation.data", "evaluation.prompts") for name in given)
    if settings.device == "emulated" and is_idle:
        about = "--resume, --save-every and all else about checkpoints, --eval-data and --prompt"
        raise click.UsageError(f"an emulated run saves nothing, of a stand-in's weights: leave out {about}, or --device emulated")
    if time_scale is not None and settings.device != "emulated":
        raise click.UsageError("--time-scale slows an emulated machine; add --device emulated")
