"""How does a user start a run?"""

import math
import resource
import stat
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import CheckpointError, DoesNotFitError, PlanError
from .units import on_one_line, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from planner.simulate import Prediction

    from .cpu import CpuMachine
    from .data import Tokens
    from .emulated import EmulatedMachine
    from .optimizer import AdamW
    from .plan import Plan, PlanFile, Policy
    from .region import Demand, Region
    from .trainer import Metrics, Training

MAX_STEPS = 10**9
MAX_NUMBER = 1e6


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
    help="What performs the plan: this CPU (auto), or the machine of the plan, emulated on a tiny stand-in model.",
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
        training, scale = _real(file.plan, data, model, out, seed, settings, save_every), 1.0
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
    with _Progress(first_step, n_steps, speed_up) as progress:
        timeline, times_s = training.run(first_step, n_steps, progress.step)
    _show_outcome(plan_file, file, training, device, scale, timeline, times_s)


def _checked_plan(path: Path) -> "PlanFile":
    """The plan, proven by the checker; PlanError names what is wrong."""
    from planner.check import check

    from .performs import refuse_not_yet_performed
    from .plan import PlanFile

    file = PlanFile.read(path)
    try:
        check(file.plan, file.claim)
    except PlanError as error:
        raise PlanError(f"{path}: refused: {error}") from None
    refuse_not_yet_performed(file.plan.semantics, file.plan.policy)
    return file


def _device(device: str, time_scale: float | None, resume: bool, save_every: int | None) -> str:
    if device == "emulated" and (resume or save_every is not None):
        raise click.UsageError("an emulated run saves nothing: leave out --resume and --save-every, or --device emulated")
    if time_scale is not None and device != "emulated":
        raise click.UsageError("--time-scale slows an emulated machine; add --device emulated")
    if device == "cuda":
        raise PlanError("--device cuda: this version performs plans on the CPU only; use --device cpu, or --device emulated")
    return "cpu" if device == "auto" else device


def _real(
    plan: "Plan", data: Path, model: Path | None, out: Path, seed: int, settings: "AdamW", save_every: int | None
) -> "Training":
    """A run of the plan's own model on this machine's CPU."""
    from .checkpoint import has_weights, writable_folder
    from .trainer import Training, load_model

    folder = _model_folder(plan, model)
    tokens = _tokens(plan, data, folder, seed)
    _refuse_what_does_not_fit(plan)
    writable_folder(out)
    store = _cpu_machine(plan, tokens, settings, seed)
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

    demands, region = _demands(plan)
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


def _demands(plan: "Plan") -> "tuple[list[Demand], Region]":
    from hwprofiles.schema import Profile
    from planner.cost import costs, region_of

    profile = Profile.from_json(plan.profile, "the plan's profile")
    return costs(plan, profile), region_of(profile)


def _cpu_machine(plan: "Plan", tokens: "Tokens", settings: "AdamW", seed: int) -> "CpuMachine":
    from .cpu import CpuMachine

    return CpuMachine(plan, tokens.batch, lambda step: settings, seed, pin_threads=True)


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


def _refuse_what_does_not_fit(plan: "Plan") -> None:
    from .memory import available_host_bytes

    available_bytes = available_host_bytes()
    needed_bytes = plan.device_arena_bytes + plan.host_arena_bytes + plan.kept_bytes + plan.transient_bytes
    if available_bytes is not None and needed_bytes > available_bytes:
        short_bytes = needed_bytes - available_bytes
        remedy = "run it on a machine with more memory, or plan a smaller model or batch"
        raise DoesNotFitError(
            f"the plan needs {show_bytes(needed_bytes)} here, {show_bytes(short_bytes)} more than are free; {remedy}",
            short_device_bytes=0,
            short_host_bytes=short_bytes,
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


class _Progress:
    """A bar on a terminal, a line per step elsewhere; both on stderr. `speed_up`: tokens/s shown over those of the run."""

    def __init__(self, first_step: int, n_steps: int, speed_up: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.n_steps, self.speed_up, self.plain = n_steps, speed_up, not console.is_terminal
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=console, disable=self.plain)
        self.task = self.bar.add_task("", total=n_steps, completed=first_step)

    def __enter__(self) -> "_Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, metrics: "Metrics") -> None:
        words = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s * self.speed_up:,.0f} tokens/s"
        words += "  skipped: not finite" if metrics.skipped else ""
        if self.plain:
            click.echo(f"step {metrics.step}/{self.n_steps}  {words}", err=True)
        self.bar.update(self.task, completed=metrics.step, description=words)


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    predicted: float
    measured: float
    show: Callable[[float], str]

    def cells(self) -> tuple[str, str, str, str]:
        error = f"{self.measured / self.predicted - 1:+.1%}" if self.predicted > 0 else ""
        return self.name, self.show(self.predicted), self.show(self.measured), error


def _show_outcome(
    plan_file: Path, file: "PlanFile", training: "Training", device: str, scale: float, timeline: Any, times_s: list[float]
) -> None:
    """The final table on stdout: predicted, measured, error; and where things lie."""
    from planner.simulate import simulate

    from .trainer import scaled, write_timeline

    plan = file.plan
    demands, region = _demands(plan)
    prediction = simulate(plan, demands, region)
    if scale != 1.0:
        timeline, times_s = scaled(timeline, scale), [t / scale for t in times_s]
        write_timeline(training.folder / "timeline.json", timeline)
    _table(_rows(plan, prediction, timeline, times_s, training, device))
    if times_s:
        ordered = sorted(times_s)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        click.echo(f"step: median of {len(times_s)} after warm-up, P10 to P90 {show_seconds(low)} to {show_seconds(high)}")
    _notes(plan_file, plan, training, device, scale)


def _rows(
    plan: "Plan", prediction: "Prediction", timeline: Any, times_s: list[float], training: "Training", device: str
) -> list[_Row]:
    step_s = statistics.median(times_s) if times_s else timeline.total_s
    rows = [_Row("step", prediction.step_s, step_s, show_seconds)]
    settled = timeline.from_step(min((s.step for s in timeline.spans), default=0) + 1) if times_s else timeline
    predicted_busy_s, measured_busy_s = prediction.busy_s(plan), settled.busy_s(plan)
    rows += [_Row(f"busy, {lane}", predicted_busy_s[lane], measured_busy_s[lane], show_seconds) for lane in predicted_busy_s]
    n_tokens = plan.semantics.tokens_per_step
    rows.append(_Row("tokens/s", n_tokens / prediction.step_s, n_tokens / step_s, lambda v: f"{v:.4g}"))
    if device == "cpu":
        by_arena = training.store.arenas.n_bytes
        on_device = sum(by_arena[a.name] for a in plan.arenas if a.place == "device")
        rows.append(_Row("device arenas", plan.device_arena_bytes, on_device, show_bytes))
        rows.append(_Row("host arenas", plan.host_arena_bytes, sum(by_arena.values()) - on_device, show_bytes))
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        runtime_bytes = float(plan.profile["host"]["runtime_bytes"]["value"])
        everything = plan.device_arena_bytes + plan.host_arena_bytes + plan.kept_bytes + plan.transient_bytes + runtime_bytes
        rows.append(_Row("process, peak", everything, peak_bytes, show_bytes))
    return rows


def _table(rows: list[_Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not sys.stdout.isatty():
        click.echo("\t".join(("", "predicted", "measured", "error")))
        for row in rows:
            click.echo("\t".join(row.cells()))
        return
    table = Table("", "predicted", "measured", "error")
    for row in rows:
        table.add_row(*row.cells())
    Console().print(table)


def _notes(plan_file: Path, plan: "Plan", training: "Training", device: str, scale: float) -> None:
    from .checkpoint import latest

    if device == "emulated":
        machine: EmulatedMachine | Any = training.machine
        bound = machine.n_real_work_binds / max(machine.n_performed, 1)
        click.echo(
            f"emulated {plan.profile['name']}, {scale:.3g} times slower: times and tokens/s above are that machine's; "
            f"{bound:.1%} of the ops took this computer longer than that"
        )
    elif plan.profile["device"]["kind"] != "cpu":
        click.echo(f"the plan was made for {plan.profile['name']}: its prediction is not comparable with this CPU")
    if training.saves:
        click.echo(f"checkpoint: {on_one_line(str(latest(training.folder)))}")
    folder = on_one_line(str(training.folder))
    click.echo(f"log: {folder}/metrics.jsonl   trace: penstock report {on_one_line(str(plan_file))} {folder} -o trace.json")
