"""How does a user start a run?"""

import fcntl
import os
import shlex
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from runtime.errors import CheckpointError
from runtime.train.run_config import RUN_FILE, WRITTEN_BY_A_RUN
from runtime.units import on_one_line, show_count

from .run_options import PATH, POSITIVE, said, setting_flags

if TYPE_CHECKING:
    from penstock.assembly import Assembled
    from runtime.checkpoint.checkpoint import State
    from runtime.executor import Stop
    from runtime.plan import Plan
    from runtime.settings import RunSettings

WRITTEN = ("metrics.jsonl", "samples.jsonl", "timeline.json", RUN_FILE)  # beside checkpoints, each perhaps in a .partial first


@click.command("run")
@click.argument("plan_file", metavar="[PLAN]", required=False, type=PATH)
@click.option("--config", type=PATH, help="YAML or TOML file of settings; flags override it.")
@setting_flags
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --out.")
@click.option("--resume-from", metavar="CHECKPOINT", help="Go on from this one, as checkpoint-20.")
@click.option("--recalibrate", type=PATH, metavar="FILE.json", help="Write the machine's profile as this run shows it to be.")
@click.option(
    "--time-scale", type=POSITIVE, help="With --device emulated: how many times slower.  [default: the median op lasts 20 ms]"
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

    Writes metrics.jsonl, run.yaml (all settings), timeline.json and checkpoint-N/ (which transformers loads) into --out. SIGTERM
    and Ctrl-C finish the step and save; a second one ends at once. Exit code 3: the plan does not fit this machine.
    """
    from runtime.train.run_config import read_run

    given = said(flags) | ({"plan": str(plan_file)} if plan_file is not None else {})
    settings = read_run(config, given)
    if settings.plan is None:
        raise click.UsageError("no plan: give PLAN, or `plan` in the file of --config")
    _refuse_what_makes_no_sense(settings, given, resume or resume_from is not None, time_scale)
    code = _run(settings, resume, resume_from, recalibrate, time_scale)
    ctx.exit(code)


def _run(settings: "RunSettings", resume: bool, resume_from: str | None, recalibrate: Path | None, time_scale: float | None) -> int:
    """Put the run together and perform it; the exit code."""
    from penstock.assembly import assemble, checked_plan, device_of
    from penstock.watch import lacks_evaluation
    from runtime.checkpoint.checkpoint import writable_folder
    from runtime.train.monitors import refuse_missing

    from .outcome import refuse_to_recalibrate

    assert settings.plan is not None
    if settings.device not in ("cpu", "emulated"):
        _let_segments_grow()
    file, device, out = checked_plan(Path(settings.plan)), device_of(settings.device), Path(settings.out)
    _refuse_odd_files(out)
    _refuse_what_others_wrote(out)
    refuse_missing(settings.monitors)
    if device == "cuda":
        _settle_kernels(file.plan, settings.deterministic)
    _tell_clients_of_monitors(settings)
    with _no_empty_folder(out), ExitStack() as until_the_end:
        writable_folder(out)
        until_the_end.enter_context(_alone_in(out))
        state = _state(out, resume, resume_from)
        if recalibrate is not None:
            refuse_to_recalibrate(recalibrate, file.plan, Path(settings.plan), device)
        assembled = assemble(settings, file.plan, device, time_scale, until_the_end)
        if state is not None:
            assembled.training.resume(state)
        first_step = state.step if state is not None else 0
        if first_step > assembled.n_steps or (first_step == assembled.n_steps and not lacks_evaluation(assembled, first_step)):
            raise CheckpointError(f"{out}: holds step {first_step} already; ask for more than {assembled.n_steps} with --steps")
        return _train(assembled, first_step, recalibrate)


def _train(run: "Assembled", first_step: int, recalibrate: Path | None) -> int:
    """Perform the steps and show what came of them; the exit code."""
    from penstock.watch import watched

    from .outcome import show_outcome
    from .progress import Progress

    plan, training = run.plan, run.training
    _write_settings(Path(run.settings.out), run.settings)
    if run.device == "emulated":
        name = plan.profile["name"]
        click.echo(f"{name}, emulated {run.scale:.3g} times slower; losses are a tiny stand-in's, nothing is saved", err=True)
    steps = f"steps {first_step + 1} to {run.n_steps}" if first_step < run.n_steps else "all steps are done, evaluating"
    click.echo(f"{_words(run)}; {steps}", err=True)
    speed_up = run.scale * plan.semantics.tokens_per_step / training.plan.semantics.tokens_per_step
    with ExitStack() as until_the_end:
        training = until_the_end.enter_context(watched(run, first_step, _online()))
        asked = until_the_end.enter_context(_first_signal_asks(training.stop))
        progress = until_the_end.enter_context(
            Progress(first_step, run.n_steps, speed_up, run.scale, training.store.device_peak_bytes)
        )
        timeline, times_s = training.run(first_step, run.n_steps, progress.step)
    if training.stop.is_requested and (progress.n_done < run.n_steps or training.lacks_evaluation(run.n_steps, run.n_steps)):
        click.echo(f"{asked.words}: {_stopped(run, first_step, progress.n_done)}", err=True)
        return asked.exit_code
    if first_step < run.n_steps:
        show_outcome(run, timeline, times_s, recalibrate)
    return 0


def _stopped(run: "Assembled", first_step: int, n_done: int) -> str:
    """What a run leaves that was asked to end."""
    at = f"stopped after step {n_done} of {run.n_steps}"
    if not run.training.saves:
        return f"{at}, and nothing is saved"
    saved = "saved" if n_done > first_step else "nothing to save"
    return f"{at}, {saved}; go on with: penstock run --config {on_one_line(shlex.quote(f'{run.settings.out}/{RUN_FILE}'))} --resume"


def _words(run: "Assembled") -> str:
    batch_size = run.training.plan.semantics.batch_size
    return f"{show_count(run.plan.workload.n_params)} parameters; {run.training.data.words()}, {batch_size} a step"


def _refuse_what_makes_no_sense(settings: "RunSettings", given: dict[str, Any], resumes: bool, time_scale: float | None) -> None:
    if settings.device == "emulated" and (resumes or "checkpoint.every" in given):
        raise click.UsageError("an emulated run saves nothing: leave out --resume and --save-every, or --device emulated")
    if settings.device == "emulated" and ("evaluation.data" in given or "evaluation.prompts" in given):
        raise click.UsageError("an emulated run has a stand-in's weights: leave out --eval-data and --prompt, or --device emulated")
    if time_scale is not None and settings.device != "emulated":
        raise click.UsageError("--time-scale slows an emulated machine; add --device emulated")


def _state(out: Path, resume: bool, resume_from: str | None) -> "State | None":
    """The checkpoint to go on from, found whole; None to begin at the beginning."""
    from runtime.checkpoint.checkpoint import latest
    from runtime.checkpoint.retention import clean

    if resume_from is not None:
        clean(out)
        return _offering(out, _named(out, resume_from))
    if not resume:
        found = latest(out)
        if found is not None:
            raise CheckpointError(f"{out}: holds {found.name} of an earlier run; go on with --resume, or choose another --out")
        return None
    clean(out)  # of a checkpoint that was being replaced, the old one comes back
    found = latest(out)
    if found is None:
        click.echo(f"{on_one_line(str(out))}: no checkpoint yet, starting from the beginning", err=True)
        return None
    return _offering(out, found)


def _named(out: Path, name: str) -> Path:
    """The checkpoint of this folder, or of another one that is taken up in an empty folder."""
    from runtime.checkpoint.checkpoint import latest, whole

    if name and Path(name).name == name and (out / name).is_dir():
        return out / name
    elsewhere = Path(name)
    if not name or not elsewhere.is_dir():
        there = ", ".join(path.name for _, path in whole(out)) or "none"
        raise CheckpointError(f"{out}: no checkpoint {name!r} in it; there are: {there}")
    if (own := latest(out)) is not None and elsewhere.resolve().parent != out.resolve():
        raise CheckpointError(f"{out}: holds {own.name} of another run than {elsewhere}; choose another --out")
    return elsewhere


def _offering(out: Path, found: Path) -> "State":
    """A checkpoint that is whole; CheckpointError offers the one before."""
    from runtime.checkpoint.checkpoint import load_state
    from runtime.checkpoint.retention import offers

    try:
        return load_state(found)
    except CheckpointError as error:
        before = offers(out, found)
        advice = f"resume with --resume-from {before.name}, which is whole" if before is not None else "none before it is whole"
        raise CheckpointError(f"{str(error).rpartition('; ')[0]}; {advice}") from None


# -- the environment ------------------------------------------------------------------------------------------------------


class _Asked:
    """Which signal asked the run to end."""

    def __init__(self) -> None:
        self.by: int | None = None

    @property
    def words(self) -> str:
        return "terminated" if self.by == signal.SIGTERM else "interrupted"

    @property
    def exit_code(self) -> int:
        """A SIGTERM is how a machine is taken back: a run that has saved has done all that was asked."""
        return 128 + signal.SIGINT if self.by == signal.SIGINT else 0


@contextmanager
def _first_signal_asks(stop: "Stop") -> Iterator[_Asked]:
    """The first SIGTERM or Ctrl-C asks for an end after the step; the second does what the first would have done before."""
    asked = _Asked()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heeded = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}

    def ask(number: int, frame: FrameType | None) -> None:
        asked.by = number
        stop.request()
        for other, handler in heeded.items():
            signal.signal(other, handler)
        with suppress(OSError):  # not `print`: whatever was being printed may be what the signal came into
            os.write(2, b"\nfinishing the step, then saving; once more ends at once\n")

    for number in heeded:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


def _settle_kernels(plan: "Plan", asked_in_order: bool) -> None:
    """Those that the plan names, and with them no others on a GPU. PlanError where it cannot be so."""
    from runtime.compute.attention import refuse_any_order, refuse_missing_attention
    from runtime.machines.streams import use_same_kernels

    if asked_in_order:
        refuse_any_order(plan.semantics)
    refuse_missing_attention(plan)
    if not asked_in_order and plan.semantics.attention_kernel != "deterministic":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    use_same_kernels()


def _let_segments_grow() -> None:
    """What is free of the device's memory can then be had in one piece. torch reads it when it first looks for a device."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _tell_clients_of_monitors(settings: "RunSettings") -> None:
    """What they would send elsewhere of their own accord stays here; who wants it otherwise has said so already."""
    for service, name, value in (("mlflow", "MLFLOW_DISABLE_TELEMETRY", "true"), ("wandb", "WANDB_ERROR_REPORTING", "false")):
        if service in settings.monitors:
            os.environ.setdefault(name, value)


def _online() -> bool:
    """Whether W&B can upload without asking for anything."""
    return "WANDB_API_KEY" in os.environ and os.environ.get("WANDB_MODE", "online") == "online"


# -- the folder -----------------------------------------------------------------------------------------------------------


@contextmanager
def _no_empty_folder(out: Path) -> Iterator[None]:
    """A run that fails before it wrote anything of its own leaves no folder that was not there before."""
    from penstock.assembly import TOKENS_FOLDER

    was_there = out.is_dir()
    try:
        yield
    except BaseException:
        if not was_there and not any((out / name).exists() for name in WRITTEN):
            shutil.rmtree(out / TOKENS_FOLDER, ignore_errors=True)
            with suppress(OSError):
                out.rmdir()  # only if empty
        raise


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """No second run in a folder: each would delete what the other is writing. The system lets go when the process ends."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{out}: another run is at work in it; wait until it ends, or choose another --out") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def _refuse_what_others_wrote(out: Path) -> None:
    """What is written there replaces what an earlier run wrote, and nothing else: a run's first file holds its settings."""
    with suppress(OSError):
        if (out / RUN_FILE).read_bytes().startswith(WRITTEN_BY_A_RUN.encode()):
            return
    for path in (out / name for name in WRITTEN):
        if path.exists():
            raise CheckpointError(f"{path}: not written by a run, which writes a file of that name; give it another name or place")


def _refuse_odd_files(out: Path) -> None:
    """A pipe where a log is to be written would hold up the run for ever."""
    for name in (*WRITTEN, *(f"{name}.partial" for name in WRITTEN)):
        path = out / name
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # not there; a folder that cannot be searched is found out when it is tried
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path}: a folder, link, pipe or device where the run writes a file; choose another --out")


def _write_settings(out: Path, settings: "RunSettings") -> None:
    from runtime.train.run_config import write_run

    path = out / RUN_FILE
    try:
        write_run(path, settings)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); make room, or choose another --out") from None
