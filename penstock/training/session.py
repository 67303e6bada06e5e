"""How is a run begun: alone in its folder, with the kernels of its plan, where it was left or at its beginning?"""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.run_config import RUN_FILE, WRITTEN_BY_A_RUN
from runtime.errors import CheckpointError, PlanError
from runtime.units import on_one_line

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoint import State
    from penstock.data.data import Data
    from penstock.settings import RunSettings
    from runtime.machines.processes import Processes
    from runtime.plan import Plan, PlanFile

    from .assembly import Session

WRITTEN = ("metrics.jsonl", "samples.jsonl", "timeline.json", RUN_FILE)  # beside checkpoints, each perhaps in a .partial first


@contextmanager
def begun(
    settings: "RunSettings",
    file: "PlanFile | None" = None,
    resume: bool = False,
    resume_from: str | None = None,
    time_scale: float | None = None,
    data: "Data | None" = None,
    refuse: "Callable[[Plan, str], None]" = lambda plan, device: None,
    report: "Callable[[str], None]" = lambda words: None,
    ranks: "Processes | None" = None,
    where: str = "the plan",
) -> "Iterator[tuple[Session, int]]":
    """A run that waits to be started, and how many of its steps are done. PenstockError for what cannot be, and nothing is written.

    `file`: a plan that is not read from where the settings say, but was from `where`; `data`: batches that are not read from there
    either; `refuse` may refuse a plan and a device before any weight is read; `report` hears what is done. Of several `ranks` this
    is the first.
    """
    from penstock.checkpoint.checkpoint import writable_folder
    from runtime.executor import say

    from .assembly import assemble, checked, checked_plan, device_of
    from .monitors import refuse_missing
    from .watch import lacks_evaluation

    let_segments_grow(settings.device)
    report("checking the plan")
    if file is None:
        assert settings.plan is not None
        file = checked_plan(Path(settings.plan))
    else:
        checked(file, where)
    device, out = device_of(settings.device), Path(settings.out)
    if ranks is None and file.plan.semantics.ranks > 1 and device != "emulated":
        n = file.plan.semantics.ranks
        raise PlanError(f"the plan is for {n} GPUs: start it with `penstock run`, or torchrun --nproc-per-node {n} -m penstock run")
    if settings.device == "auto" and device == "cpu" and file.plan.profile["device"]["kind"] == "cuda":
        say(f"no GPU found: the plan for {on_one_line(file.plan.profile['name'])} trains on this CPU")
    _refuse_odd_files(out)
    _refuse_what_others_wrote(out)
    refuse_missing(settings.monitors)
    if device == "cuda":
        settle_kernels(file.plan, settings.deterministic)
    _tell_clients_of_monitors(settings)
    with _no_empty_folder(out), ExitStack() as until_the_end:
        writable_folder(out)
        until_the_end.enter_context(_alone_in(out))
        if resume or resume_from is not None:
            report("reading the checkpoint")
        state = _state(out, resume, resume_from)
        refuse(file.plan, device)
        first_step = state.step if state is not None else 0
        run = assemble(settings, file.plan, device, time_scale, until_the_end, data, state, report, ranks)
        if first_step > run.n_steps or (first_step == run.n_steps and not lacks_evaluation(run, first_step)):
            raise CheckpointError(f"{out}: holds step {first_step} already; ask for more than {run.n_steps} with --steps")
        yield run, first_step
        if run.training.lead is not None:
            run.training.lead.end()


def _state(out: Path, resume: bool, resume_from: str | None) -> "State | None":
    """The checkpoint to resume, found whole; None to begin at the beginning."""
    from penstock.checkpoint.checkpoint import latest
    from penstock.checkpoint.retention import clean
    from runtime.executor import say

    if resume_from is not None:
        clean(out)
        return _offering(out, _named(out, resume_from))
    if not resume:
        found = latest(out)
        if found is not None:
            raise CheckpointError(f"{out}: holds {found.name} of an earlier run; add --resume, or choose another --out")
        return None
    clean(out)  # of a checkpoint that was being replaced, the old one comes back
    found = latest(out)
    if found is None:
        say(f"{on_one_line(str(out))}: no checkpoint yet, starting from the beginning")
        return None
    return _offering(out, found)


def _named(out: Path, name: str) -> Path:
    """The checkpoint of this folder, or of another one that is taken up in an empty folder."""
    from penstock.checkpoint.checkpoint import latest, whole

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
    from penstock.checkpoint.checkpoint import load_state
    from penstock.checkpoint.retention import offers

    try:
        return load_state(found)
    except CheckpointError as error:
        before = offers(out, found)
        advice = f"resume with --resume-from {before.name}, which is whole" if before is not None else "none before it is whole"
        raise CheckpointError(f"{str(error).rpartition('; ')[0]}; {advice}") from None


# -- the environment ---------------------------------------------------------------------------------------------------------


def settle_kernels(plan: "Plan", asked_in_order: bool) -> None:
    """Those that the plan names, and with them no others on a GPU. PlanError where it cannot be so."""
    from runtime.layers.attention import refuse_any_order, refuse_missing_attention
    from runtime.machines.streams import use_same_kernels

    if asked_in_order:
        refuse_any_order(plan.semantics)
    refuse_missing_attention(plan)
    if not asked_in_order and plan.semantics.attention_kernel != "deterministic":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    use_same_kernels()


def let_segments_grow(asked_device: str) -> None:
    """What is free of the device's memory can then be had in one piece. torch reads it when it first looks for a device."""
    if asked_device not in ("cpu", "emulated") and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _tell_clients_of_monitors(settings: "RunSettings") -> None:
    """What they would send elsewhere of their own accord stays here; who wants it otherwise has said so already."""
    for service, name, value in (("mlflow", "MLFLOW_DISABLE_TELEMETRY", "true"), ("wandb", "WANDB_ERROR_REPORTING", "false")):
        if service in settings.monitors:
            os.environ.setdefault(name, value)


def online() -> bool:
    """Whether W&B can upload without asking for anything."""
    return "WANDB_API_KEY" in os.environ and os.environ.get("WANDB_MODE", "online") == "online"


# -- the folder -----------------------------------------------------------------------------------------------------------


@contextmanager
def _no_empty_folder(out: Path) -> Iterator[None]:
    """A run that fails before it wrote anything of its own leaves no folder that was not there before."""
    from .inputs import TOKENS_FOLDER

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


def write_settings(out: Path, settings: "RunSettings") -> None:
    from penstock.run_config import write_run

    from .log import writing

    path = out / RUN_FILE
    with writing(path):
        write_run(path, settings)
