"""Functions of `penstock` for programs and notebooks: probe, plan, check, predict, train, stream and forward.

Modules that import slowly are imported inside functions: the search, the simulator, reports and torch.
"""

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, get_args

from pydantic import TypeAdapter, ValidationError

from penstock.hwprofiles.device_parts import part_of
from penstock.hwprofiles.rented import rented
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.check.check import check as prove
from penstock.planner.check.check import summary
from penstock.planner.model.config import without_dropout
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import read_model, spelled_out, supported_attention
from penstock.planner.search.claim import CUT, claimed
from penstock.runtime.errors import PlanError, ProfileError, WrongPlanError, user_code
from penstock.runtime.executor import Stop
from penstock.runtime.files import read_whole
from penstock.runtime.plan import Kernel, Plan, PlanFile, Policy, Semantics
from penstock.runtime.plan.legality import refuse_half_pairs
from penstock.runtime.plan.objective import CROSS_ENTROPY, Objective, parse_objective
from penstock.runtime.plan.optimizer import optimizing
from penstock.runtime.plan.policy import COMPUTES, computing
from penstock.runtime.plan.train import training
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import on_one_line

from .arguments.keywords import named_arguments
from .arguments.options import AnyPlan, StepOptions, TrainOptions, named_settings
from .caches import cache_layer_traces
from .ranks import joined
from .results import Planned, Trained
from .run_config import PLAN_FILE, RunRequest, read_run
from .run_files import read_measured
from .settings import DataSettings, RunSettings

if TYPE_CHECKING:
    from penstock.arguments.objects import GivenData
    from penstock.arguments.options import Data
    from penstock.planner.predict.simulate import Prediction
    from penstock.runtime.machines.processes import Processes
    from penstock.training.trainer import Metrics, Trainer, Turn

Fields = TypeVar("Fields")
MAX_POLICY_FILE_BYTES = 512 * 2**20  # also accepts a plan file
DEFAULT_OUT = RunSettings(DataSettings()).out


@named_arguments()
def probe(
    device: str = "auto",
    quick: bool = False,
    *,
    gpu: int = 0,
    name: str = "this-machine",
    disk: str | Path | None = None,
    report: Callable[[str, float], None] = lambda stage, fraction: None,
) -> Profile:
    """Measure the profile of this machine: 90 seconds (a GPU: four minutes), or 20 with `quick`.
    `report(stage, fraction)` is called with the progress. `disk`: a folder on a disk for frozen weights, which is measured too."""
    from penstock.hwprofiles.probe import cpu, cuda, measurements
    from penstock.hwprofiles.probe.disk import with_disk
    from penstock.hwprofiles.probe.probe import probed
    from penstock.runtime.machines.streams import has_cuda

    is_cpu = device == "cpu" or (device == "auto" and not has_cuda())
    effort = measurements.CPU if is_cpu else measurements.GPU
    target = cpu.CpuDevice() if is_cpu else cuda.CudaDevice(gpu)
    profile = probed(target, effort.quick() if quick else effort, report, name)
    return profile if disk is None else with_disk(profile, target, Path(disk), report)


@named_arguments(StepOptions)
def plan(
    model: str | Path,
    machine: str | Path | Profile,
    *,
    seq_len: int = 4096,
    batch_size: int = 16,
    clip_norm: float | None = 1.0,
    policy: Policy | Mapping[str, Any] | str | Path | None = None,
    host_memory_bytes: int | None = None,
    device_memory_bytes: int | None = None,
    host_cores: int | None = None,
    link_bytes_per_s: float | None = None,
    host_bandwidth_bytes_per_s: float | None = None,
    disk_read_bytes_per_s: float | None = None,
    kernels: Kernel | None = None,
    deterministic: bool = False,
    clipped_fraction: float | None = None,
    gpus: int = 1,
    hosts: int = 1,
    network_gbit: float | None = None,
    loss: "str | Callable[..., Any] | None" = None,
    measured: str | Path | None = None,
    no_dropout: bool = False,
    **semantics: Unpack[StepOptions],
) -> Planned:
    """Search for the fastest schedule of `model` on `machine`. With several GPUs: the schedule of each rank.

    `model`: a shipped name, or a folder or config.json in Hugging Face form; `machine`: a shipped name, a profile's file, or a
    Profile. `policy`: a Policy, its fields, a plan file, or the name of another system, instead of a search. `semantics`:
    StepOptions, for example `micro_batch=2`, `optimizer="adamw:moments=bf16"` or `train="lora:r=16"`; None or absent: the fastest.
    `compute_dtype="fp8"`: products with projections in FP8, all else in bf16 (docs/fp8.md).
    `clipped_fraction`: known share of steps with a clipped gradient. `host_cores`, `link_bytes_per_s` (each direction),
    `host_bandwidth_bytes_per_s`: of the whole host, instead of the profile's. `network_gbit`: Gbit/s of each host, instead of the
    profile's. `disk_read_bytes_per_s`: read rate of a disk for frozen layers. `loss`: by name (`dpo:beta=0.1`), or a function
    (docs/losses.md). `no_dropout`: train with the configuration's dropout off. `measured`: the folder of a run of this model
    on this machine, which scales predicted op times. DoesNotFitError names the smallest changes that would fit.
    """
    from penstock.planner.search.micro_batch import SIZES, shared_step
    from penstock.planner.search.search import search_machine

    cache_layer_traces()
    if clipped_fraction is not None and not 0 <= clipped_fraction <= 1:
        raise PlanError(f"clipped_fraction is {clipped_fraction}; it is a share of the steps, from 0 to 1")
    requested = _profile(machine).with_memory(device_memory_bytes, host_memory_bytes)
    requested = rented(requested, host_cores, link_bytes_per_s, host_bandwidth_bytes_per_s)
    if disk_read_bytes_per_s is not None:
        requested = requested.with_disk(disk_read_bytes_per_s)
    profile = part_of(requested, gpus, hosts, network_gbit)
    described = without_dropout(read_model(str(model))) if no_dropout else read_model(str(model))
    fields = {name: value for name, value in semantics.items() if value is not None}
    fields |= {"seq_len": seq_len, "batch_size": batch_size, "clip_norm": clip_norm, "objective": _objective(loss)}
    step = semantics_of(fields, described, profile, kernels, deterministic)
    if gpus * hosts > 1:
        step = shared_step(step, gpus * hosts, "sum_groups" in fields)
    if measured is not None:
        profile = read_measured(Path(measured)).scaled(profile, described, step, measured)
    may_cut = host_memory_bytes is None and device_memory_bytes is None
    free = (SIZES - fields.keys()) | ({CUT} if may_cut else set())
    return Planned(*search_machine(described, step, profile, _policy(policy), free, clipped_fraction))


def _profile(machine: str | Path | Profile) -> Profile:
    return machine if isinstance(machine, Profile) else read_profile(str(machine))


def semantics_of(raw: Mapping[str, Any], model: Model, profile: Profile, kernels: Kernel | None, deterministic: bool) -> Semantics:
    """Return the semantics of a step, with defaults and kernels for the model and the machine."""
    from penstock.planner.search.tuning import LOSS_TILE

    if kernels not in (None, *get_args(Kernel)):
        raise PlanError(f"no kernels {kernels!r}; give one of {', '.join(get_args(Kernel))}, or None for the machine's fastest")
    if raw.get("compute_dtype") not in (None, *COMPUTES):
        raise PlanError(f"compute_dtype: should be {', '.join(COMPUTES)}, found {raw['compute_dtype']!r}")
    if raw.get("compute_dtype") == "fp8":  # products alone; all else is computed in bf16
        raw = {**raw, **computing("fp8")}
    objective = raw["objective"]
    defaults = {"loss_tile_tokens": LOSS_TILE["eager"], "attention": supported_attention(model)[0]}
    fields = {"micro_batch": objective.rows_each, **defaults, **raw}
    fields |= training(raw.get("train"), raw.get("base"), raw.get("gradient_dtype"))
    fields |= optimizing(raw.get("optimizer"), raw.get("master_dtype"))
    del fields["objective"]
    named = spelled_out(model, replace(_validated(Semantics, fields, "semantics"), objective=objective))
    semantics = with_kernels(model, named, profile, kernels, deterministic)
    if raw.get("micro_batch") is None and semantics.batch_size < objective.rows_each:
        raise PlanError(f"--loss {objective.name}: a step has at least {objective.rows_each} sequences; give a larger --batch-size")
    if (n := semantics.micro_batch) > semantics.batch_size:
        raise PlanError(f"a micro-batch of {n} is more than the batch of {semantics.batch_size}; choose at most that")
    refuse_half_pairs(semantics)
    return semantics


def _objective(loss: "str | Callable[..., Any] | None") -> Objective:
    """Return the objective of a named loss, or of a function, which is checked on a tiny call."""
    match loss:
        case None:
            return CROSS_ENTROPY
        case str() if ".py:" not in loss:
            return parse_objective(loss)
    from penstock.user_loss import user_loss

    return user_loss(loss).objective


def _policy(policy: Policy | Mapping[str, Any] | str | Path | None) -> Policy | str | None:
    """Return a policy, the name of a baseline system, or None to search. Of a plan file, the policy is read."""
    from penstock.planner.search.policies import BASELINES

    if policy is None or policy == "search":
        return None
    fields: Any = policy.to_json() if isinstance(policy, Policy) else policy
    if isinstance(policy, str | Path):
        if policy in BASELINES:
            return str(policy)
        if not os.path.isfile(policy):  # False for a name that is too long
            near = get_close_matches(str(policy), ["search", *BASELINES], n=1)
            meant = f"did you mean {near[0]}?" if near else f"give search, {', '.join(BASELINES)}, a file or a Policy"
            raise PlanError(f"no policy or file {str(policy)!r}; {meant}")
        try:
            fields = json.loads(read_whole(Path(policy), MAX_POLICY_FILE_BYTES).decode("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            advice = 'give a plan file, or for example {"prefetch_depth": 2}'
            raise PlanError(f"policy file {policy}: not JSON ({str(error)[:80]}); {advice}") from None
        fields = fields.get("policy", fields) if isinstance(fields, dict) else fields
    return _validated(Policy, fields, "policy")


def _validated(kind: type[Fields], fields: Mapping[str, Any], label: str) -> Fields:
    """Validate fields from a program or a file. PlanError names the first wrong one."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(fields, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        place = on_one_line("".join(f"{part}: " for part in first["loc"]), 120)
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        value = f", found {reprlib.repr(first['input'])}" if place else ""  # not the whole object
        raise PlanError(f"{label}: {place}{problem}{value}") from None


@named_arguments()
def check(plan: AnyPlan, search: bool = False) -> str:
    """Check a plan and the claim of its file. Return a summary that names the unchecked parts. WrongPlanError names a fault.

    `search`: repeat the search too, which takes the time of `plan`. Without a claim, only the plan itself is checked.
    """
    return proven(*_file_of(plan), search)


def proven(where: str, file: PlanFile, search: bool) -> str:
    """Return the summary of `check` for a file that was read. A damaged claim or profile raises another PenstockError."""
    from penstock.planner.check.claim import check_claim, check_origin, check_search

    plan, claim = file.plan, None if file.claim is None else claimed(file.claim, where)
    Profile.from_json(plan.profile, f"{where}: profile")
    try:
        prove(plan)
        unchecked = check_origin(plan, claim)
        if claim is None:
            return f"{summary(plan)}; without a claim"
        unchecked += check_search(plan, claim) if search else check_claim(plan, claim)
    except (PlanError, ProfileError) as error:
        raise WrongPlanError(f"{where}: {error}") from None
    if not search:
        unchecked.append("the bounds over policies and sizes, and n_simulated (--search repeats the search)")
    if (often := claim.certificate.clipped_fraction) and plan.policy.speculate_blocks:
        unchecked.append(f"the given share of clipped steps, {often:.1%}")
    return f"{summary(plan)}; claim recomputed" + (f"; not checked: {'; '.join(unchecked)}" if unchecked else ", search and all")


@named_arguments()
def predict(plan: AnyPlan, machine: str | Path | Profile | None = None) -> "Prediction":
    """Simulate a step of the plan, op by op, on its machine or another. The result has `step_s` and `timeline`."""
    from penstock.planner.predict.cost import costs, region_of
    from penstock.planner.predict.simulate import simulate

    where, file = _file_of(plan)
    profile = Profile.from_json(file.plan.profile, f"{where}: profile") if machine is None else _profile(machine)
    return simulate(file.plan, costs(file.plan, profile), region_of(profile))


@named_arguments(TrainOptions)
def train(plan: AnyPlan, data: "Data", **options: Unpack[TrainOptions]) -> Trained:
    """Train with a plan and save checkpoints. The result is bitwise identical to `penstock run` and to a loop over `stream`.

    `data`: a folder or file; a list of them, or of entries of `data.mix`; rows in any layout that files have, as a list of dicts, a
    `datasets.Dataset` or an `IterableDataset`; a DataLoader or another iterable of dict batches (docs/losses.md); or an object with
    `batch(step)`. `eval_data`: the same, but for `batch(step)`. `settings`: other settings of a run by dotted name, for example
    `{"optimizer.weight_decay": 0.1}`. `model` is required unless the plan's folder has weights, or `from_scratch` starts from
    random ones. `on_step` is called after every step. `stop.request()`, in `on_step` or in another thread, ends training after the
    current step and saves.
    """
    history = list["Metrics"]()

    def step(metrics: "Metrics") -> None:
        history.append(metrics)
        if on_step := options.get("on_step"):
            on_step(metrics)

    run: RunRequest | None = _run_request(plan, data, options, None)
    assert run is not None
    out = run.settings.out
    with joined(run) as ranks:
        while run is not None:  # again with each plan of the run
            with _trainer(run, step, ranks) as trainer:
                timeline, _ = trainer.train()
                first_step, late, following = trainer.session.first_step, trainer.session.late_fraction, trainer.following
            del trainer  # and its memory
            run = None if following is None else replace(following, settings=run.settings)
    return Trained(Path(out), history[-1].step if history else first_step, tuple(history), timeline, late)


@named_arguments(TrainOptions)
def stream(plan: AnyPlan, data: "Data", *, every: int = 1, **options: Unpack[TrainOptions]) -> "Iterator[Turn]":
    """Train like `train`, under the control of a loop: `for turn in penstock.stream(plan, data, steps=100): ...`.

    After `every` steps all lanes are idle and the loop body runs; the next step waits for it, so that two steps cannot overlap.
    The body may read `turn.metrics` and `turn.weights()`, evaluate, save, set `turn.lr` or stop. `options`: arguments of `train`.
    After `break` nothing more is saved; `turn.stop()` saves. Results are bitwise identical to `train`.
    On several GPUs torchrun starts the program: rank 0 runs the loop body, the programs of the other ranks end here.
    """
    if every < 1:
        raise PlanError(f"every is {every}; give 1 step or more")
    run = _run_request(plan, data, options, every)
    with joined(run) as ranks, _trainer(run, options.get("on_step"), ranks, every) as trainer:
        yield from trainer.turns()


@contextmanager
def _trainer(
    run: RunRequest, on_step: "Callable[[Metrics], None] | None", ranks: "Processes | None", every: int | None = None
) -> "Iterator[Trainer]":
    from penstock.training.run_folder import write_settings
    from penstock.training.session import open_session
    from penstock.training.trainer import Trainer

    def named_step(metrics: "Metrics") -> None:
        with user_code(f"on_step, after step {metrics.step},"):
            if on_step is not None:
                on_step(metrics)

    cache_layer_traces()
    with open_session(run, ranks) as session:
        trainer = Trainer(session, named_step, every=every)
        write_settings(replace(run, file=session.inputs.request.file))
        yield trainer


def _run_request(plan: AnyPlan, data: "Data", options: TrainOptions, every: int | None) -> RunRequest:
    """Return the run that a program requests. `every`: steps between turns of its loop, if it has one."""
    file, settings = _file_of(plan)[1], named_settings(options)
    for name, reason in (("checkpoint.background", "saves between steps"), ("replan", "holds one plan")):
        if every is not None and settings.get(name):
            raise PlanError(f"settings: {name} has no effect in a loop, which {reason}; leave it out")
    if not isinstance(stop := options.get("stop") or Stop(), Stop):
        raise PlanError(f"stop is a {type(stop).__name__}; give a penstock.Stop")
    # No background thread: an error in the loop body would leave it waiting
    settings |= {} if every is None else {"checkpoint.background": False}
    training, held_out = _data(data, options.get("eval_data"), file.plan, settings)
    settings |= {**held_out.settings, **training.settings, "plan": str(Path(settings.get("out", DEFAULT_OUT)) / PLAN_FILE)}
    return RunRequest(
        read_run(None, settings),
        file,
        resume=options.get("resume", False),
        resume_from=None if (checkpoint := options.get("resume_from")) is None else str(checkpoint),
        time_scale=options.get("time_scale"),
        batches=training.batches,
        rows=training.rows,
        held_out=held_out.batches,
        loss=options.get("loss"),
        stop=stop,
    )


@named_arguments()
def forward(
    plan: AnyPlan,
    data: "Data",
    out: str | Path,
    *,
    eval_data: "Data | None" = None,
    model: str | Path | None = None,
    adapter: str | Path | None = None,
    from_scratch: bool = False,
    tokenizer: Literal["model", "bytes"] = "model",
    seed: int | None = None,
    device: str = "auto",
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the log-probability of each answer in `data` and `eval_data` under the plan's model to `out`, like `penstock forward`.
    For a loss `distill`: its most likely tokens at each position. The argument `reference` of `train` names this file. `data`:
    files, or rows as a list or a Dataset; `settings`: other settings of a run by dotted name, as of `train`."""
    from penstock.training.session import write_forward

    where, file = _file_of(plan)
    options: TrainOptions = {"model": model, "adapter": adapter, "from_scratch": from_scratch, "seed": seed, "device": device}
    named = named_settings(options | {"settings": {"tokenizer": tokenizer} | dict(settings or {})})
    sources = _data(data, eval_data, file.plan, named)
    if any(source.batches is not None or source.rows is not None for source in sources):
        raise PlanError("forward: its data is read before the pass; give files, a list of rows or a Dataset")
    named |= {**sources[1].settings, **sources[0].settings, "plan": where, "out": f"{out}.work"}
    write_forward(RunRequest(read_run(None, named), file, where), Path(out))
    return Path(out)


def _data(data: "Data", eval_data: "Data | None", plan: Plan, settings: Mapping[str, Any]) -> "tuple[GivenData, GivenData]":
    """Return the training data and the held-out data of a program."""
    from penstock.arguments.objects import GivenData, held_out_data, training_data

    columns = settings.get("data.columns")
    read = [*columns.values()] if isinstance(columns, Mapping) else []
    held_out = GivenData() if eval_data is None else held_out_data(eval_data, plan, read)
    return training_data(data, plan, read), held_out


def _file_of(plan: AnyPlan) -> tuple[str, PlanFile]:
    """Return a name for messages, and the plan file with its claim."""
    match plan:
        case Planned():
            return "the plan", plan.file
        case PlanFile():
            return "the plan", plan
        case Plan():
            return "the plan", PlanFile(plan, None)
    if not isinstance(plan, str | Path):
        raise PlanError(f"plan is a {type(plan).__name__}; give a result of `penstock plan`, or its file")
    return str(plan), PlanFile.read(Path(plan))
