"""How does a user start a run?"""

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli_outcome import Progress, demands_of, show_outcome
from .errors import CheckpointError, DoesNotFitError, PlanError
from .units import show_bytes, show_count

if TYPE_CHECKING:
    from .cpu import CpuMachine
    from .cuda import CudaMachine
    from .data import Tokens
    from .optimizer import AdamW
    from .plan import Plan, PlanFile, Policy
    from .trainer import Training

MAX_STEPS = 10**9
MAX_NUMBER = 1e6
CUDA_OWN_BYTES = 2**30  # assumed: kernels, loaded when first used, and workspaces of products, which no plan counts


class Number(click.FloatRange):
    """A number that is one: click lets `nan` through every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "above 0" if self.min_open else "0 or more"


class Count(click.IntRange):
    """A whole number. `--help` leaves out the upper end, which nobody means."""

    def _describe_range(self) -> str:
        return f"{self.min} or more"


POSITIVE = Number(min=0, min_open=True, max=MAX_NUMBER)


@click.command("run")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    help='A folder of text files, one text file, or a JSONL of {"text": ...}.',
)
@click.option("--model", type=click.Path(path_type=Path), help="Folder with weights and tokenizer.  [default: the plan's model]")
@click.option(
    "--steps", type=Count(1, MAX_STEPS), help="Steps in all, those of a resumed run included.  [default: once through the data]"
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("penstock-run"), show_default=True, help="Where checkpoints and logs go."
)
@click.option("--save-every", type=Count(1, MAX_STEPS), help="Steps between checkpoints.  [default: only at the end]")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --out.")
@click.option(
    "--seed",
    type=Count(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of random weights, dropout and the order of the data.",
)
@click.option("--lr", type=POSITIVE, default=1e-5, show_default=True, help="Learning rate of AdamW.")
@click.option(
    "--weight-decay", type=Number(min=0, max=MAX_NUMBER), default=0.0, show_default=True, help="Of weights that are matrices."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu", "emulated"]),
    default="auto",
    show_default=True,
    help="What performs the plan: a GPU if there is one, else this CPU (auto), or the plan's machine, emulated on a tiny model.",
)
@click.option(
    "--deterministic", is_flag=True, help="With a GPU: bits that do not depend on the plan, as on a CPU. Some kernels are slower."
)
@click.option(
    "--time-scale", type=POSITIVE, help="With --device emulated: how many times slower.  [default: the median op lasts 20 ms]"
)
def run(
    plan_file: Path,
    data: Path,
    model: Path | None,
    steps: int | None,
    out: Path,
    save_every: int | None,
    resume: bool,
    seed: int,
    lr: float,
    weight_decay: float,
    device: str,
    deterministic: bool,
    time_scale: float | None,
) -> None:
    """Train with PLAN and compare what was predicted with what was measured.

    Writes metrics.jsonl, timeline.json and checkpoint-N/ (which transformers loads) into --out. Exit code 3: the plan does not
    fit this machine.
    """
    from .optimizer import AdamW

    file = _checked_plan(plan_file)
    device = _device(device, time_scale, resume, save_every)
    _refuse_odd_files(out)
    if deterministic and device == "cuda":
        _use_same_kernels()
    settings = AdamW(lr=lr, weight_decay=weight_decay)
    with _no_empty_folder(out):
        _train(plan_file, file, data, model, steps, out, save_every, resume, seed, settings, device, time_scale)


def _train(
    plan_file: Path,
    file: "PlanFile",
    data: Path,
    model: Path | None,
    steps: int | None,
    out: Path,
    save_every: int | None,
    resume: bool,
    seed: int,
    settings: "AdamW",
    device: str,
    time_scale: float | None,
) -> None:
    if device == "emulated":
        training, scale = _emulated(file.plan, data, out, seed, settings, time_scale)
    else:
        training, scale = _real(file.plan, data, model, out, seed, settings, save_every, device), 1.0
    first_step = _first_step(training, out, resume)
    n_steps = steps or -(-training.tokens.n_sequences // training.tokens.batch_size)
    if first_step >= n_steps:
        raise CheckpointError(f"{out}: holds step {first_step} already; ask for more than {n_steps} with --steps")
    if device == "emulated":
        click.echo(
            f"{file.plan.profile['name']}, emulated {scale:.3g} times slower; the losses are a tiny stand-in model's", err=True
        )
    click.echo(f"{_words(file.plan, training.tokens)}; steps {first_step + 1} to {n_steps}", err=True)
    speed_up = scale * file.plan.semantics.tokens_per_step / training.plan.semantics.tokens_per_step
    with Progress(first_step, n_steps, speed_up) as progress:
        timeline, times_s = training.run(first_step, n_steps, progress.step)
    show_outcome(plan_file, file.plan, training, device, scale, timeline, times_s)


def _checked_plan(path: Path) -> "PlanFile":
    """The plan, proven by the checker; PlanError names what is wrong."""
    from planner.check import check

    from .plan import PlanFile

    file = PlanFile.read(path)
    try:
        check(file.plan, file.claim)
    except PlanError as error:
        raise PlanError(f"{path}: refused: {error}") from None
    return file


def _device(device: str, time_scale: float | None, resume: bool, save_every: int | None) -> str:
    if device == "emulated" and (resume or save_every is not None):
        raise click.UsageError("an emulated run saves nothing: leave out --resume and --save-every, or --device emulated")
    if time_scale is not None and device != "emulated":
        raise click.UsageError("--time-scale slows an emulated machine; add --device emulated")
    if device in ("cpu", "emulated"):
        return device
    from .streams import has_cuda

    if has_cuda():
        return "cuda"
    if device == "cuda":
        raise PlanError("--device cuda: torch sees no CUDA device; use --device cpu, or --device emulated")
    return "cpu"


def _use_same_kernels() -> None:
    from .streams import use_same_kernels

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    use_same_kernels()


def _real(
    plan: "Plan", data: Path, model: Path | None, out: Path, seed: int, settings: "AdamW", save_every: int | None, device: str
) -> "Training":
    """A run of the plan's own model on this machine's GPU or CPU."""
    from .checkpoint import has_weights, writable_folder
    from .trainer import Training, load_model

    folder = _model_folder(plan, model)
    tokens = _tokens(plan, data, folder, seed)
    _refuse_what_does_not_fit(plan, device)
    writable_folder(out)
    store = _cuda_machine(plan, tokens, settings, seed) if device == "cuda" else _cpu_machine(plan, tokens, settings, seed)
    if folder is not None and has_weights(folder):
        load_model(store, folder)
    else:
        store.initialise(seed)
    return Training(plan, store, store, tokens, seed, out, True, save_every, folder)


def _emulated(
    plan: "Plan", data: Path, out: Path, seed: int, settings: "AdamW", time_scale: float | None
) -> "tuple[Training, float]":
    """A run of the plan at the pace of the machine in its profile, on a stand-in model; and how many times slower."""
    from .checkpoint import writable_folder
    from .emulated import EmulatedMachine, time_scale_for
    from .trainer import Training

    demands, region = demands_of(plan)
    small = _stand_in(plan)
    tokens = _tokens(small, data, None, seed)
    writable_folder(out)
    store = _cpu_machine(small, tokens, settings, seed)
    store.initialise(seed)
    scale = time_scale or time_scale_for(demands)
    machine = EmulatedMachine(store, demands, region, scale)
    return Training(small, machine, store, tokens, seed, out, saves=False), scale


def _stand_in(plan: "Plan") -> "Plan":
    """The same ops on a tiny model with the same blocks."""
    from planner.lower import lower
    from planner.workload import build_workload

    from .emulated import stand_in_config, stand_in_semantics
    from .workload import Model

    semantics = stand_in_semantics(plan.semantics)
    model = Model(stand_in_config(plan.model.config), name="stand-in")
    workload = build_workload(model, semantics)
    small = lower(model, workload, semantics, _cut_alike(plan, replace(plan, workload=workload)), plan.profile)
    if [(a.name, len(a.slot_bytes)) for a in small.arenas] != [(a.name, len(a.slot_bytes)) for a in plan.arenas]:
        raise PlanError("this plan's arenas are not those of its policy; only plans of `penstock plan` can be emulated")
    return replace(small, ops=plan.ops)


def _cut_alike(plan: "Plan", small: "Plan") -> "Policy":
    """The plan's policy, with transfers that cut the layers of another model into as many chunks."""
    if plan.policy.transfer_chunk_bytes is None:
        return plan.policy
    wanted = [len(plan.chunks(b)) for b in range(len(plan.workload.blocks))]
    for n_bytes in range(1, 2 * max(block.slot_elements for block in small.workload.blocks), 256):
        policy = replace(plan.policy, transfer_chunk_bytes=n_bytes)
        if [len(replace(small, policy=policy).chunks(b)) for b in range(len(wanted))] == wanted:
            return policy
    raise PlanError("the stand-in's layers cannot be moved in as many parts as this plan's; plan without transfer_chunk_bytes")


def _cpu_machine(plan: "Plan", tokens: "Tokens", settings: "AdamW", seed: int) -> "CpuMachine":
    from .cpu import CpuMachine

    return CpuMachine(plan, tokens.batch, lambda step: settings, seed, pin_threads=True)


def _cuda_machine(plan: "Plan", tokens: "Tokens", settings: "AdamW", seed: int) -> "CudaMachine":
    from .cuda import CudaMachine

    return CudaMachine(plan, tokens.batch, lambda step: settings, seed)


def _model_folder(plan: "Plan", given: Path | None) -> Path | None:
    """Where weights and tokenizer come from; None: random weights, and bytes for tokens."""
    from planner.workload import read_model

    from .workload import Model

    folder = given if given is not None else Path(plan.model.path) if plan.model.path is not None else None
    if folder is None:
        return None
    if not folder.is_dir():
        raise PlanError(f"{folder}: the model's folder is not there; name it with --model")
    found = read_model(str(folder))
    if Model(found.config).fingerprint != plan.model.fingerprint:
        raise PlanError(f"{folder}: its config.json is not the one the plan was made for; plan again with this model")
    return folder


@contextmanager
def _no_empty_folder(out: Path) -> Iterator[None]:
    """A run that fails before it wrote anything leaves no folder that was not there before."""
    was_there = out.is_dir()
    try:
        yield
    except BaseException:
        if not was_there:
            with suppress(OSError):
                out.rmdir()  # only if empty
        raise


def _refuse_odd_files(out: Path) -> None:
    """A pipe where a log is to be written would hold up the run for ever."""
    for name in ("metrics.jsonl", "metrics.jsonl.partial", "timeline.json", "timeline.json.partial"):
        path = out / name
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # not there; a folder that cannot be searched is found out when it is tried
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path}: a folder, link, pipe or device where the run writes a file; choose another --out")


def _tokens(plan: "Plan", data: Path, folder: Path | None, seed: int) -> "Tokens":
    from .data import read_tokens

    semantics = plan.semantics
    vocab_size = plan.workload.blocks[0].parameters[0].shape[0]
    return read_tokens(data, folder, vocab_size, semantics.seq_len, semantics.batch_size, shuffle_seed=seed)


def _refuse_what_does_not_fit(plan: "Plan", device: str) -> None:
    from .memory import available_host_bytes

    on_device = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes
    if device == "cuda":
        from .streams import free_cuda_bytes

        needed_bytes = on_device + CUDA_OWN_BYTES
        short_device_bytes = max(0, needed_bytes - free_cuda_bytes())
        on_host, where = plan.host_arena_bytes, "of pinned memory"
        if short_device_bytes:
            raise _does_not_fit(f"{show_bytes(needed_bytes)} of the GPU's memory", short_device_bytes, 0)
    else:
        on_host, where = plan.host_arena_bytes + on_device, "here"
    available_bytes = available_host_bytes()
    if available_bytes is not None and on_host > available_bytes:
        raise _does_not_fit(f"{show_bytes(on_host)} {where}", 0, on_host - available_bytes)


def _does_not_fit(what: str, short_device_bytes: int, short_host_bytes: int) -> DoesNotFitError:
    remedy = "run it on a machine with more memory, or plan a smaller model or batch"
    return DoesNotFitError(
        f"the plan needs {what}, {show_bytes(short_device_bytes + short_host_bytes)} more than are free; {remedy}",
        short_device_bytes=short_device_bytes,
        short_host_bytes=short_host_bytes,
        smallest_change=remedy,
    )


def _first_step(training: "Training", out: Path, resume: bool) -> int:
    """0, or the step of the checkpoint to go on from, which is then loaded."""
    from .checkpoint import latest, load_state

    found = latest(out)
    if not resume:
        if found is not None:
            raise CheckpointError(f"{out}: holds {found.name} of an earlier run; go on with --resume, or choose another --out")
        return 0
    if found is None:
        click.echo(f"{out}: no checkpoint yet, starting from the beginning", err=True)
        return 0
    state = load_state(found)
    training.resume(state)
    return state.step


def _words(plan: "Plan", tokens: "Tokens") -> str:
    skipped = f", {tokens.n_skipped_files} files left out (not text)" if tokens.n_skipped_files else ""
    return (
        f"{show_count(plan.workload.n_params)} parameters, {tokens.n_documents} documents{skipped}, "
        f"{tokens.n_sequences} sequences of {tokens.seq_len}, {tokens.batch_size} a step"
    )
