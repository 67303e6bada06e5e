"""The functions of `penstock`: probe, plan, check, predict and train, for programs and notebooks; the commands call them.

What takes long to import is imported where it is used: the search, the simulator, reports and torch.
"""

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.hwprofiles.several import part_of
from penstock.planner.check.check import check as prove
from penstock.planner.check.check import summary
from penstock.planner.model.kernels import FUSED, with_kernels
from penstock.planner.model.workload import read_model, supported_attention
from penstock.planner.search.claim import CUT, claimed
from penstock.runtime.errors import PlanError, RanksError, WrongPlanError
from penstock.runtime.plan import Kernel, Plan, PlanFile, Policy, Semantics
from penstock.runtime.plan.legality import refuse_half_pairs
from penstock.runtime.plan.objective import CROSS_ENTROPY, Objective, parse_objective
from penstock.runtime.plan.optimizer import optimizing
from penstock.runtime.plan.train import training
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import on_one_line

from .caches import keep_outlines
from .ranks import GoneError, is_rank, joined, take_own_part
from .results import Planned, Trained
from .run_config import PLAN_FILE, read_run

if TYPE_CHECKING:
    from penstock.data.given import Batches, Given
    from penstock.planner.predict.simulate import Prediction
    from penstock.runtime.executor import Stop
    from penstock.runtime.machines.processes import Processes
    from penstock.settings import RunSettings
    from penstock.training.trainer import Metrics, Trainer, Turn

Fields = TypeVar("Fields")


def probe(
    device: str = "auto",
    quick: bool = False,
    *,
    gpu: int = 0,
    name: str = "this-machine",
    disk: str | Path | None = None,
    report: Callable[[str, float], None] = lambda what, fraction: None,
) -> Profile:
    """Measure the profile of this machine: 90 seconds (a GPU: four minutes), or 20 if `quick`; `report` is told how far it is.
    `disk`: a folder on a disk that frozen weights are to be read from, which is measured, too."""
    from penstock.hwprofiles.probe import cpu, cuda, measurements
    from penstock.hwprofiles.probe.disk import with_disk
    from penstock.hwprofiles.probe.probe import probed
    from penstock.runtime.machines.streams import has_cuda

    is_cpu = device == "cpu" or (device == "auto" and not has_cuda())
    effort = measurements.CPU if is_cpu else measurements.GPU
    found = cpu.CpuDevice() if is_cpu else cuda.CudaDevice(gpu)
    profile = probed(found, effort.quick() if quick else effort, report, name)
    return profile if disk is None else with_disk(profile, found, Path(disk), report)


def plan(
    model: str | Path,
    machine: str | Path | Profile,
    *,
    seq_len: int = 4096,
    batch_size: int = 16,
    clip_norm: float | None = 1.0,
    policy: Policy | Mapping[str, Any] | str | None = None,
    host_memory_bytes: int | None = None,
    device_memory_bytes: int | None = None,
    disk_read_bytes_per_s: float | None = None,
    disk_write_bytes_per_s: float | None = None,
    disk_endurance_bytes: float | None = None,
    kernels: Kernel | None = None,
    deterministic: bool = False,
    clipped_fraction: float | None = None,
    gpus: int = 1,
    hosts: int = 1,
    network_gbit: float | None = None,
    loss: "str | Callable[..., Any] | None" = None,
    **semantics: Any,
) -> Planned:
    """Search the fastest schedule of `model` on `machine`; of several `gpus`, on each of `hosts`, each one's part of a step.

    `model`: a shipped name, or a folder or config.json in Hugging Face form; `machine`: a shipped name, a profile's file, or a
    Profile. `policy`: a Policy, its fields, or the name of another system's, in place of a search. `semantics`: further fields of
    Semantics, as `micro_batch=2`, `optimizer="adamw:moments=bf16"` or `train="lora:r=16"`, but for those that `kernels` and
    `deterministic` decide; None, or not given: the fastest. `clipped_fraction`: share of steps whose gradient is clipped, if known.
    `network_gbit`: Gbit/s of each host, if not the profile's; `disk_read_bytes_per_s`: of a disk that frozen layers are read
    from; the other two: for what masters on it would take. `loss`: as `--loss` takes it, or a function of one's own
    (docs/losses.md). DoesNotFitError names the smallest changes that would fit.
    """
    from penstock.planner.search.micro_batch import SIZES, shared_step
    from penstock.planner.search.search import searched

    keep_outlines()
    if clipped_fraction is not None and not 0 <= clipped_fraction <= 1:
        raise PlanError(f"clipped_fraction is {clipped_fraction}; it is a share of the steps, from 0 to 1")
    asked_for = _profile(machine).with_memory(device_memory_bytes, host_memory_bytes)
    asked_for = asked_for.with_disk(disk_read_bytes_per_s, disk_write_bytes_per_s, disk_endurance_bytes)
    profile = part_of(asked_for, gpus, hosts, network_gbit)
    described = read_model(str(model))
    given = {name: value for name, value in semantics.items() if value is not None}
    given |= {"seq_len": seq_len, "batch_size": batch_size, "clip_norm": clip_norm, "objective": _objective(loss)}
    asked = _semantics(given, described, profile, kernels, deterministic)
    if gpus * hosts > 1:
        asked = shared_step(asked, gpus * hosts, "sum_groups" in given)
    may_cut = host_memory_bytes is None and device_memory_bytes is None
    free = (SIZES - given.keys()) | ({CUT} if may_cut else set())
    return Planned(*searched(described, asked, profile, _policy(policy), free, clipped_fraction))


def _profile(machine: str | Path | Profile) -> Profile:
    return machine if isinstance(machine, Profile) else read_profile(str(machine))


def _semantics(given: Mapping[str, Any], model: Model, profile: Profile, kernels: Kernel | None, deterministic: bool) -> Semantics:
    """The semantics of a step, with defaults and kernels that suit the model and the machine."""
    from penstock.planner.search.micro_batch import LOSS_TILE

    if decided := sorted(given.keys() & {*FUSED, "attention_kernel", "library_kernels"}):
        raise PlanError(f"semantics: {decided[0]}: decided by `kernels` and `deterministic`; give kernels='eager' or 'fused'")
    if kernels not in (None, *get_args(Kernel)):
        raise PlanError(f"no kernels {kernels!r}; give one of {', '.join(get_args(Kernel))}, or None for the machine's fastest")
    objective = given["objective"]
    fields = {
        "micro_batch": objective.rows_each,
        "loss_tile_tokens": LOSS_TILE["eager"],
        "attention": supported_attention(model)[0],
        **given,
    }
    fields |= training(given.get("train"), given.get("base"), given.get("gradient_dtype"))
    fields |= optimizing(given.get("optimizer"), given.get("master_dtype"))
    del fields["objective"]
    named = replace(_validated(Semantics, fields, "semantics"), objective=objective)
    asked = with_kernels(model, named, profile, kernels, deterministic)
    if asked.micro_batch > asked.batch_size:
        raise PlanError(f"a micro-batch of {asked.micro_batch} is more than the batch of {asked.batch_size}; choose at most that")
    refuse_half_pairs(asked)
    return asked


def _objective(loss: "str | Callable[..., Any] | None") -> Objective:
    """What a step minimises: a loss that has a name, or a function, which is looked at."""
    match loss:
        case None:
            return CROSS_ENTROPY
        case str() if ".py:" not in loss:
            return parse_objective(loss)
    from penstock.own_loss import function_in, own_loss

    return (own_loss(function_in(loss), loss) if isinstance(loss, str) else own_loss(loss)).objective


def _policy(asked: Policy | Mapping[str, Any] | str | None) -> Policy | str | None:
    """The policy asked for, or the name of another system's; None to search one."""
    from penstock.planner.search.space import BASELINES

    if isinstance(asked, str) and asked not in BASELINES:
        near = get_close_matches(asked, ["search", *BASELINES], n=1)
        meant = f"did you mean {near[0]}?" if near else f"give search, {', '.join(BASELINES)}, a file or a Policy"
        raise PlanError(f"no policy or file {asked!r}; {meant}")
    if asked is None or isinstance(asked, str):
        return asked
    return _validated(Policy, asked.to_json() if isinstance(asked, Policy) else asked, "policy")


def _validated(kind: type[Fields], fields: Mapping[str, Any], what: str) -> Fields:
    """Fields from a program or a file, validated; PlanError names the first that is wrong."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        place = on_one_line("".join(f"{part}: " for part in first["loc"]), 120)
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise PlanError(f"{what}: {place}{problem}, found {reprlib.repr(first['input'])}") from None


def check(plan: Planned | PlanFile | Plan | str | Path, search: bool = False) -> str:
    """Prove a plan right, and true what its file claims; the words say what was not checked. WrongPlanError says what is wrong.

    `search`: search again, too, which takes as long as `plan` did. A plan without a claim is proven right, no more.
    """
    return proven(*_file_of(plan), search)


def proven(where: str, file: PlanFile, search: bool) -> str:
    """What `check` says of a file that was read; other PenstockErrors than WrongPlanError for a damaged claim or profile."""
    from penstock.planner.check.claim import check_claim, check_origin, check_search

    plan, claim = file.plan, None if file.claim is None else claimed(file.claim, where)
    Profile.from_json(plan.profile, f"{where}: profile")
    try:
        prove(plan)
        left = check_origin(plan, claim)
        if claim is None:
            return f"{summary(plan)}; nothing is claimed of it"
        left += check_search(plan, claim) if search else check_claim(plan, claim)
    except PlanError as error:
        raise WrongPlanError(f"{where}: {error}") from None
    if not search:
        left.append("the bounds over policies and sizes and n_simulated, for which --search searches again")
    if (often := claim.certificate.clipped_fraction) and plan.policy.speculate_blocks:
        left.append(f"that {often:.1%} of steps are clipped, as was said")
    return f"{summary(plan)}; claim recomputed" + (f"; not checked: {'; '.join(left)}" if left else ", search and all")


def predict(plan: Planned | PlanFile | Plan | str | Path, machine: str | Path | Profile | None = None) -> "Prediction":
    """Simulate a step of the plan, op by op, on its machine or another: `step_s`, `timeline`."""
    from penstock.planner.predict.cost import costs, region_of
    from penstock.planner.predict.simulate import simulate

    where, file = _file_of(plan)
    profile = Profile.from_json(file.plan.profile, f"{where}: profile") if machine is None else _profile(machine)
    return simulate(file.plan, costs(file.plan, profile), region_of(profile))


def train(
    plan: Planned | PlanFile | Plan | str | Path,
    data: "str | Path | Sequence[str | Path | Mapping[str, Any]] | Batches",
    *,
    out: str | Path = "penstock-run",
    steps: int | None = None,
    lr: float | None = None,
    device: str = "auto",
    resume: bool = False,
    from_scratch: bool = False,
    settings: Mapping[str, Any] | None = None,
    time_scale: float | None = None,
    on_step: "Callable[[Metrics], None]" = lambda metrics: None,
    stop: "Stop | None" = None,
    loss: "Callable[..., Any] | None" = None,
) -> Trained:
    """Train with a plan, and save checkpoints; the bits are those of `penstock run`, or of a loop of one's own over `stream`.

    `data`: a folder or file, as for `--data`; a list of them, or of entries of `data.mix`; or an object with `batch(step)`.
    `settings`: all other settings of a run by dotted names, as `{"model": "Qwen3-8B", "optimizer.weight_decay": 0.1}`; `model` is
    needed unless the plan's folder has weights, or `from_scratch` starts from random ones. `time_scale`: slowdown of an emulated
    machine. `on_step` is called after every step; `stop.request()`, there or in another thread, makes the step in progress the
    last, and saves. `loss`: the function of a plan whose loss is one's own.
    """
    given, made = dict(locals()), list["Metrics"]()

    def step(metrics: "Metrics") -> None:
        made.append(metrics)
        on_step(metrics)

    with _trainer(given | {"on_step": step}) as trainer:
        timeline, _ = trainer.train()
    session = trainer.session
    return Trained(Path(out), made[-1].step if made else session.first_step, tuple(made), timeline, session.late_fraction)


def stream(
    plan: Planned | PlanFile | Plan | str | Path,
    data: "str | Path | Sequence[str | Path | Mapping[str, Any]] | Batches",
    *,
    every: int = 1,
    **how: Any,
) -> "Iterator[Turn]":
    """Train as `train` does, in a loop of one's own: `for turn in penstock.stream(plan, data, steps=100): ...`.

    After `every` steps all lanes come to rest, which costs what of two steps would overlap, and the loop has its turn: it looks at
    `turn.metrics` and `turn.weights()`, evaluates, saves, sets `turn.lr`, stops. Until it is over the next step waits. `how`: what
    `train` takes. A loop that is left by `break` saves nothing more; `turn.stop()` does. The bits are those of `train`.
    On several GPUs torchrun starts the program: the first rank has the turns, the programs of the others end here.
    """
    if not isinstance(every, int) or every < 1:
        raise PlanError(f"every is {every}; a loop has its turn after 1 step, or more")
    try:
        given = signature(train).bind(plan, data, **how)
    except TypeError as error:
        raise PlanError(f"stream: {error}; it takes what train takes, and every") from None
    given.apply_defaults()
    with _trainer(given.arguments, every) as trainer:
        yield from trainer.turns()


@contextmanager
def _trainer(given: Mapping[str, Any], every: int | None = None) -> "Iterator[Trainer]":
    """What trains, of a session that is open until the context ends. `given`: the arguments of `train`, by name."""
    from penstock.training.run_folder import write_settings
    from penstock.training.session import open_session
    from penstock.training.trainer import Trainer

    keep_outlines()
    _, file = _file_of(given["plan"])
    settings = given["settings"] or {}
    arguments = ("data.path", "data.mix", "out", "device", "plan", "steps", "optimizer.lr", "from_scratch")
    if given_twice := [name for name in settings if name in arguments]:
        raise PlanError(f"settings: {given_twice[0]} is an argument of train; give it as one")
    if every is not None and settings.get("checkpoint.background"):
        raise PlanError("settings: checkpoint.background is not there in a loop, which saves in its turns; leave it out")
    named, batches = _data(given["data"], file.plan)
    known = {**named, "out": str(given["out"]), "device": given["device"], "from_scratch": given["from_scratch"]}
    known |= {name: given[of] for name, of in (("steps", "steps"), ("optimizer.lr", "lr")) if given[of] is not None}
    # A loop that an error has left would leave a thread behind that waits for what to save
    fixed = {"plan": str(Path(given["out"]) / PLAN_FILE)} | ({} if every is None else {"checkpoint.background": False})
    asked = read_run(None, {**known, **settings, **fixed})
    of_session = {name: given[name] for name in ("resume", "time_scale", "stop", "loss")}
    with (
        _as_rank(asked, file, batches, given["loss"]) as ranks,
        open_session(asked, file, data=batches, ranks=ranks, **of_session) as session,
    ):
        trainer = Trainer(session, given["on_step"], every=every)
        write_settings(asked, file)
        yield trainer


@contextmanager
def _as_rank(
    settings: "RunSettings", file: PlanFile, batches: "Given | None", loss: "Callable[..., Any] | None"
) -> "Iterator[Processes | None]":
    """All ranks, of a program that torchrun has started as the first of them. The program of each other one ends here."""
    if not is_rank():
        yield None
        return
    from penstock.training.device import device_of
    from penstock.training.following import follow

    rank = os.environ.get("RANK", "0")
    try:
        take_own_part(settings.device)
        with joined(settings, file.plan, device := device_of(settings.device)) as ranks:
            if ranks is not None and ranks.rank > 0:
                raise SystemExit(follow(settings, file, device, ranks, batches, loss))
            yield ranks
    except (GoneError, RanksError):
        if rank != "0":
            raise SystemExit(1) from None  # rank 0 says why
        raise
    finally:
        os.environ["WORLD_SIZE"] = "1"  # the others have gone


def forward(plan: Planned | PlanFile | Plan | str | Path, data: str | Path, out: str | Path, **settings: Any) -> Path:
    """Write the log-probabilities that the plan's model gives to each answer of `data`, or of a loss `distill` its likeliest
    tokens, as `penstock forward` does, into the file `out`, which `train` takes as its setting `reference`. `settings`: others of a
    run, as `model="Qwen3-8B"`."""
    from penstock.training.session import write_forward

    where, file = _file_of(plan)
    asked = read_run(None, {**settings, "data.path": str(data), "out": f"{out}.work", "plan": where})
    write_forward(asked, file, where, Path(out))
    return Path(out)


def _data(
    data: "str | Path | Sequence[str | Path | Mapping[str, Any]] | Batches", plan: Plan
) -> "tuple[dict[str, Any], Given | None]":
    """The settings that name the data, and the program's own batches, if it gives some, held to the plan's shape."""
    match data:
        case str() | Path():
            return {"data.path": str(data)}, None
        case list() | tuple():
            return {"data.mix": [dict(part) if isinstance(part, Mapping) else {"path": str(part)} for part in data]}, None
    kind = type(data).__qualname__
    if not callable(getattr(data, "batch", None)):
        raise PlanError(f"data: a {kind} has no batch(step); give a path, a list of paths, or what has one")
    from penstock.data.given import Given
    from penstock.runtime.layers.apart import supports_documents

    of, vocab_size = plan.semantics, plan.workload.blocks[0].parameters[0].shape[0]
    batches, n_sequences = cast("Batches", data), of.all_ranks.batch_size
    given = Given(batches, of.seq_len, n_sequences, vocab_size, supports_documents(plan.model.config, of), of.objective)
    return {"data.path": given.fingerprint}, given


def _file_of(plan: Planned | PlanFile | Plan | str | Path) -> tuple[str, PlanFile]:
    """A plan with its claim, and its name in messages."""
    match plan:
        case Planned():
            return "the plan", plan.file
        case PlanFile():
            return "the plan", plan
        case Plan():
            return "the plan", PlanFile(plan, None)
    return str(plan), PlanFile.read(Path(plan))
