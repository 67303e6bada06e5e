"""`penstock run`: train with a plan, in one process or in several ranks, until the last step or a signal."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from penstock.ranks import is_follower, is_rank, joined, refuse_several_hosts, start
from penstock.run_config import RUN_FILE, RunRequest, read_run
from penstock.runtime.plan import PlanFile
from penstock.runtime.units import in_shell
from penstock.settings import RunSettings
from penstock.signals import handled

from .options import PATH, RunCommand, above_0, given_settings, setting_flags
from .progress import Preparing, Progress, overview, show_outcome, show_overview

if TYPE_CHECKING:
    from penstock.runtime.machines.processes import Processes
    from penstock.training.session import Session

STATES = "checkpoint-*/trainer_state.json"


@click.command("run", cls=RunCommand)
@click.argument("plan_file", metavar="[PLAN]", required=False, type=PATH)
@click.option("--config", type=PATH, help="YAML or TOML file of settings; flags override it.")
@setting_flags
@click.option("--resume", is_flag=True, help="Resume from the last checkpoint in --out.")
@click.option("--resume-from", metavar="CHECKPOINT", help="Resume from this one, as checkpoint-20.")
@click.option(
    "--time-scale", type=above_0(1e6), help="With --device emulated: how many times slower.  [default: the median op lasts 20 ms]"
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    plan_file: Path | None,
    config: Path | None,
    resume: bool,
    resume_from: str | None,
    time_scale: float | None,
    **flags: Any,
) -> None:
    """Train with PLAN and compare the prediction with measurements.

    Writes metrics.jsonl, run.yaml (all settings), run-plan.json, timeline.json and checkpoint-N/ (which transformers loads) into
    --out, a folder that may be moved. SIGTERM, Ctrl-C and a closed terminal finish the step and save; a second signal ends at once.
    Exit code 3: the plan does not fit this machine; 4: the run was lost, with --stop-if-lost.
    """
    options = given_settings(flags) | ({"plan": str(plan_file)} if plan_file is not None else {})
    with Preparing() as report:
        settings = read_run(config, options)
        if settings.plan is None:
            raise click.UsageError("no plan: give PLAN, or `plan` in the file of --config")
        _refuse_contradictions(settings, options, resume or resume_from is not None, time_scale)
        if resume and not resume_from and config and any(config.parent.glob(STATES)) and not any(Path(settings.out).glob(STATES)):
            problem = f"no checkpoint in {settings.out}, but some next to {config}"
            raise click.UsageError(f"{problem}; give --out {in_shell(config.parent)}")
        report("reading the plan")
        file = PlanFile.read(Path(settings.plan))
        if (n := file.plan.semantics.ranks) > 1 and settings.device != "emulated" and not is_rank():
            report.stop()
            refuse_several_hosts(file.plan)
            code = start(n, sys.argv[1:])
        else:
            if is_follower():
                report.stop()
            request = RunRequest(settings, file, settings.plan, resume, resume_from, time_scale, report=report)
            code = _train(request, report)
    ctx.exit(code)


def _train(request: RunRequest, display: Preparing) -> int:
    """Train, with each plan of the run in turn. Return the exit code."""
    with joined(request) as ranks:
        outcome: int | RunRequest = request
        while isinstance(outcome, RunRequest):
            outcome = _train_with_plan(outcome, display, ranks)
    return outcome


def _train_with_plan(request: RunRequest, display: Preparing, ranks: "Processes | None") -> int | RunRequest:
    """Perform the steps and show the outcome. Return the exit code, or the run that goes on with another plan. Settings are written
    as given, without the defaults of the plan's optimizer, so that a resume with another optimizer gets its default rate."""
    from penstock.training.run_folder import write_settings
    from penstock.training.session import open_session
    from penstock.training.trainer import Trainer

    with open_session(request, ranks) as session:
        display.stop()
        stop, n_steps, progress = session.stop, session.n_steps, Progress(session)
        trainer = Trainer(session, progress.step)
        write_settings(replace(request, file=session.inputs.request.file))
        if request.replaced is None:
            show_overview(overview(session))
        received = list[int]()

        def ask(number: int, frame: FrameType | None) -> None:
            """Request an end after the current step. A second signal ends the command at once."""
            received.append(number)
            stop.request()
            progress.tell("finishing the step, then saving; once more ends at once")

        with handled(ask, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, once=True), progress:
            timeline, times_s = trainer.train()
        if trainer.following is not None:
            return replace(trainer.following, settings=request.settings)
        if stop.is_requested and (progress.n_done < n_steps or trainer.due_validations(n_steps)):
            word = "terminated" if signal.SIGTERM in received else "hung up" if signal.SIGHUP in received else "interrupted"
            click.echo(f"{word}: {_stopped(session, progress.n_done)}", err=True)
            return 128 + signal.SIGINT if signal.SIGINT in received else 0  # after SIGTERM or SIGHUP, saving is success
        if session.first_step < progress.n_done:
            show_outcome(session, timeline, times_s)
    return 0


def _stopped(session: "Session", n_done: int) -> str:
    """Describe the saved state of a stopped run, and how to resume."""
    status, out, is_new = f"stopped after step {n_done} of {session.n_steps}", session.settings.out, n_done > session.first_step
    if not session.saves:
        return f"{status}, and nothing is saved"
    if session.settings.checkpoint.weights_only and is_new:
        return f"{status}; its weights alone are saved: train on from them with --model {in_shell(f'{out}/checkpoint-{n_done}')}"
    again = f"penstock run --config {in_shell(f'{out}/{RUN_FILE}')} --resume"
    return f"{status}, {'saved' if is_new else 'nothing to save'}; resume with: {again}"


def _refuse_contradictions(settings: RunSettings, options: dict[str, Any], resumes: bool, time_scale: float | None) -> None:
    """Raise UsageError for flags that contradict --device."""
    idle = ("evaluation.data", "evaluation.prompts")
    is_idle = resumes or any(name.startswith("checkpoint.") or name in idle for name in options)
    if settings.device == "emulated" and is_idle:
        flags = "--resume, --save-every and other flags of checkpoints, --eval-data, --prompt"
        raise click.UsageError(f"an emulated run trains a stand-in and saves nothing: leave out {flags}, or --device emulated")
    if time_scale is not None and settings.device != "emulated":
        raise click.UsageError("--time-scale slows an emulated machine; add --device emulated")
