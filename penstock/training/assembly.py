"""What is a run put together from?

A plan, the settings and a machine come together here: weights and data are read, what does not fit is refused, and what comes out
only waits to be started.
"""

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.run_config import RunConfigError
from runtime.errors import DoesNotFitError, PlanError, WorkloadError
from runtime.units import show_bytes

from .inputs import PACKED_FOLDER, data_of, held_out_of, own_model, prompts_of, weights_of

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoint import State
    from penstock.data.data import Data
    from penstock.settings import OptimizerSettings, RunSettings
    from planner.predict.simulate import Prediction
    from runtime.machines.processes import Processes
    from runtime.machines.torch_machine import TorchMachine
    from runtime.plan import Plan, PlanFile
    from runtime.plan.optimizer import AdamW
    from runtime.plan.region import Demand, Region
    from runtime.ranks import Ranks

    from .inputs import Prompts
    from .trainer import Training


ELSEWHERE = "run it on a machine with more memory, or plan a smaller model or batch"


@dataclass(frozen=True, slots=True)
class Session:
    """A run that waits to be started."""

    settings: "RunSettings"
    plan: "Plan"  # the user's; of an emulated run the training's own plan is a stand-in's
    device: str  # cuda, cpu or emulated
    training: "Training"
    n_steps: int
    scale: float  # how many times slower than the plan's machine; 1 unless emulated
    prediction: "Prediction"
    weights: str  # where they come from, in words
    tokenizer: str
    held_out: "Data | None" = None  # a sequence is a batch of its own there
    prompts: "Prompts | None" = None

    @property
    def is_comparable(self) -> bool:
        """Whether the machine is of the kind that the prediction is for."""
        return self.device == "emulated" or self.plan.profile["device"]["kind"] == self.device


def checked_plan(path: Path) -> "PlanFile":
    """The plan in a file, proven by the checker; PlanError names what is wrong."""
    from runtime.plan import PlanFile

    return checked(PlanFile.read(path), str(path))


def checked(file: "PlanFile", where: str) -> "PlanFile":
    """The plan, proven by the checker, its blocks and arenas those of its model and policy; PlanError names what is wrong."""
    from planner.check.check import check
    from planner.check.claim import check_origin, claimed
    from planner.model.config import refuse_another

    claim = None if file.claim is None else claimed(file.claim, where)
    try:
        check(file.plan)
        refuse_another(file.plan.model, file.plan.workload.n_layers)
        check_origin(file.plan, claim)
    except (PlanError, WorkloadError) as error:
        raise PlanError(f"{where}: refused: {error}") from None
    return file


def assemble(
    settings: "RunSettings",
    plan: "Plan",
    device: str,
    time_scale: float | None,
    until_the_end: ExitStack,
    data: "Data | None" = None,
    state: "State | None" = None,
    report: Callable[[str], None] = lambda words: None,
    ranks: "Processes | None" = None,
) -> Session:
    """Everything but the start. PenstockError for what cannot be; nothing is written but the cache of tokens.

    What is opened here is closed with `until_the_end`. `data`: batches that are not read from where the settings say; `state`: what
    is resumed from; `report` hears what is done.
    """
    from planner.predict.simulate import simulate

    demands, region = demands_of(plan)
    _refuse_parts_of_no_name(settings.optimizer, plan)
    prediction = simulate(plan, demands, region)
    if device == "emulated":
        if state is not None:
            raise RunConfigError("an emulated run saves nothing and resumes nothing: leave out resume, or choose another device")
        if data is not None:
            raise RunConfigError("an emulated run trains a stand-in with a vocabulary of its own: give it files, not batches")
        run = _emulated(settings, plan, prediction, demands, region, time_scale, until_the_end, report)
    else:
        run = _real(settings, plan, prediction, device, until_the_end, data, state, report, ranks)
    expected_s = prediction.step_s * run.scale if run.is_comparable else None
    return replace(run, training=replace(run.training, predicted_step_s=expected_s))


def demands_of(plan: "Plan") -> "tuple[list[Demand], Region]":
    """What the plan asks of the machine in its profile, op by op."""
    from hwprofiles.schema import Profile
    from planner.predict.cost import costs, region_of

    profile = Profile.from_json(plan.profile, "the plan's profile")
    return costs(plan, profile), region_of(profile)


def _real(
    settings: "RunSettings",
    plan: "Plan",
    prediction: "Prediction",
    device: str,
    until_the_end: ExitStack,
    data: "Data | None",
    state: "State | None",
    report: Callable[[str], None],
    ranks: "Processes | None",
) -> Session:
    """A run of the plan's own model on this machine's GPU or CPU. What is quickly refused is read before the weights are."""
    from penstock.checkpoint.room import refuse_what_has_no_room
    from runtime.executor import say

    from .crew import Lead, all_ready, begin
    from .trainer import Training, load_adapter, load_model

    plan, folder = own_model(plan, settings.model)
    out, first_step = Path(settings.out), 0 if state is None else state.step
    trains_all = plan.workload.trains_all  # else a state has no weights but those that are trained
    weights = None if settings.from_scratch or (state is not None and trains_all) else weights_of(plan, folder)
    _refuse_what_does_not_fit(plan, device, settings.device)
    report("reading the data")
    data = data or data_of(settings, plan, folder, until_the_end, report=report)
    held_out = held_out_of(settings, plan, folder, until_the_end, report)
    prompts = prompts_of(settings, plan, folder, until_the_end)
    n_steps = _n_steps(settings, data)
    each_bytes, run_s = plan.checkpoint_bytes(settings.checkpoint.weights_only), prediction.step_s * (n_steps - first_step)
    refuse_what_has_no_room(out, settings.checkpoint, each_bytes, first_step, n_steps, run_s)
    if ranks is not None:
        begin(ranks, None if state is None else state.path)
    of_step, kept = _optimizer(settings.optimizer, n_steps)
    report(f"taking memory: {show_bytes(plan.host_arena_bytes + plan.device_arena_bytes)}")
    store = _machine(device, plan, data, of_step, settings.seed, ranks)
    lead = None if ranks is None else Lead(store, ranks)
    said = f"{state.path}, after step {state.step}" if state is not None else str(weights)
    if state is None or not trains_all:
        if weights is not None:
            load_model(store, weights, report, out / PACKED_FOLDER if settings.packed is None else Path(settings.packed))
            store.initialise_adapters(settings.seed)
        else:
            if state is None:
                said = f"RANDOM, from scratch, by seed {settings.seed}"
                say("RANDOM WEIGHTS: trained from scratch, as was asked; the model knows nothing at its first step")
            report("making random weights")
            store.initialise(settings.seed)
    if settings.adapter is not None and state is None:
        load_adapter(store, Path(settings.adapter))
        said = f"{said}, with the adapter {settings.adapter}"
    training = Training(
        plan,
        store,
        store,
        data,
        settings.seed,
        Path(settings.out),
        saves=True,
        tokenizer_from=folder if settings.tokenizer == "model" else None,
        checkpoint=settings.checkpoint if ranks is None else replace(settings.checkpoint, background=False),
        optimizer=kept,
        lead=lead,
        frozen=None if trains_all else _told_apart(weights, settings.seed),
    )
    if state is not None:
        report("putting back the state")
        training.resume(state)
    tokenizer = str(folder) if settings.tokenizer == "model" and folder is not None else settings.tokenizer
    run = Session(settings, plan, device, training, n_steps, 1.0, prediction, said, tokenizer, held_out, prompts)
    if ranks is not None:
        report("waiting for all ranks")
        all_ready(ranks, _read_by_all(data, weights))
    return run


def _told_apart(weights: Path | None, seed: int) -> str:
    """What tells frozen weights from others."""
    from penstock.checkpoint.checkpoint import outline_of

    return f"random, by seed {seed}" if weights is None else outline_of(weights)


@dataclass(frozen=True, slots=True)
class Follower:
    """What a rank has that does not lead."""

    store: "TorchMachine"
    reads: dict[str, str]


def _read_by_all(data: "Data", weights: Path | None) -> dict[str, str]:
    """By name, what tells apart whatever every rank reads for itself."""
    from penstock.checkpoint.checkpoint import outline_of

    return {"data": str(data.fingerprint)} | ({} if weights is None else {"weights": outline_of(weights)})


def admit(plan: "Plan", device: str, asked: str, ranks: "Processes") -> None:
    """DoesNotFitError where a rank's device has no room for its part, or its host for those of all that are there: asked by the
    first of them, before any of them takes its own."""
    is_first_here = ranks.rank % ranks.n_here == 0
    if device == "cuda" or is_first_here:
        _refuse_what_does_not_fit(plan, device, asked, of_host=is_first_here)


def follower_of(
    settings: "RunSettings", plan: "Plan", device: str, ranks: "Processes", resume: str | None, until_the_end: ExitStack
) -> Follower:
    """A rank's part of a run that rank 0 has put together; PenstockError for what this one lacks."""
    from penstock.checkpoint.checkpoint import load_state
    from penstock.checkpoint.resuming import put_back

    from .trainer import load_model

    plan, folder = own_model(plan, settings.model)
    data = data_of(settings, plan, folder, until_the_end)
    of_step, _ = _optimizer(settings.optimizer, _n_steps(settings, data))
    weights = None if settings.from_scratch or resume is not None else weights_of(plan, folder)
    store = _machine(device, plan, data, of_step, settings.seed, ranks)
    if resume is not None:
        put_back(load_state(Path(resume)), store.host, data)
    elif weights is not None:
        load_model(store, weights)
    else:
        store.initialise(settings.seed)
    return Follower(store, _read_by_all(data, weights))


def _emulated(
    settings: "RunSettings",
    plan: "Plan",
    prediction: "Prediction",
    demands: "list[Demand]",
    region: "Region",
    time_scale: float | None,
    until_the_end: ExitStack,
    report: Callable[[str], None],
) -> Session:
    """A run of the plan at the pace of the machine in its profile, on a stand-in model, whose weights nobody saves or asks."""
    from hwprofiles.schema import Profile
    from runtime.machines.emulated import Alike, EmulatedMachine, time_scale_for

    from .trainer import Training

    small = _stand_in(plan)
    report("reading the data")
    data = data_of(replace(settings, tokenizer="bytes"), small, None, until_the_end, report=report)
    n_steps = _n_steps(settings, data)
    of_step, kept = _optimizer(settings.optimizer, n_steps)
    n, n_hosts = small.semantics.ranks, Profile.from_json(plan.profile).n_hosts
    ranks = Alike(n, max(1, n // n_hosts)) if n > 1 else None
    store = _machine("cpu", small, data, of_step, settings.seed, ranks)
    store.initialise(settings.seed)
    scale = time_scale or time_scale_for(demands)
    machine = EmulatedMachine(store, demands, region, scale)
    training = Training(small, machine, store, data, settings.seed, Path(settings.out), saves=False, optimizer=kept)
    return Session(settings, plan, "emulated", training, n_steps, scale, prediction, "random, of a tiny stand-in", "bytes")


def _n_steps(settings: "RunSettings", data: "Data") -> int:
    """Steps of the whole run."""
    if settings.steps is not None:
        return settings.steps
    if data.n_steps is None:
        raise RunConfigError("how long streamed data is shows only at its end: say how many --steps to take")
    return max(1, math.ceil(Fraction(str(settings.epochs or 1)) * data.n_steps))  # 0.1 of 30 is 3, which no float says


def _optimizer(settings: "OptimizerSettings", n_steps: int) -> "tuple[Callable[[int], AdamW], dict[str, Any]]":
    """The hyperparameters of each step, and what a checkpoint keeps of them: a resumed run must use the same."""
    from .schedules import learning_rates

    lr_of = learning_rates(settings, n_steps)

    def of_step(step: int) -> "AdamW":
        return replace(settings, lr=lr_of(step))

    horizon = n_steps if settings.schedule.kind != "constant" else None  # a constant rate knows of no end
    return of_step, asdict(settings) | {"no_decay": list(settings.no_decay), "n_steps": horizon}


def _refuse_parts_of_no_name(settings: "OptimizerSettings", plan: "Plan") -> None:
    names = [p.name for block in plan.workload.blocks for p in block.parameters]
    for part in settings.no_decay:
        if not any(part in name for name in names):
            raise RunConfigError(f"optimizer.no_decay: no parameter's name holds {part[:60]!r}; names are for example {names[1]}")


def _machine(
    device: str, plan: "Plan", data: "Data", of_step: "Callable[[int], AdamW]", seed: int, ranks: "Ranks | None" = None
) -> "TorchMachine":
    from runtime.machines.cpu import CpuMachine
    from runtime.machines.cuda import CudaMachine

    if device == "cuda":
        return CudaMachine(plan, data.batch, of_step, seed, ranks=ranks)
    return CpuMachine(plan, data.batch, of_step, seed, pin_threads=True, ranks=ranks)


def _stand_in(plan: "Plan") -> "Plan":
    """The same ops on a tiny model with the same blocks."""
    from planner.lower.lower import lower
    from planner.model.workload import build_workload
    from runtime.machines.emulated import stand_in_config, stand_in_semantics
    from runtime.plan.workload import Model

    semantics = stand_in_semantics(plan.semantics)
    model = Model(stand_in_config(plan.model.config), name="stand-in")
    workload = build_workload(model, semantics)
    small = lower(model, workload, semantics, plan.policy, plan.profile)
    if [(a.name, len(a.slot_bytes)) for a in small.arenas] != [(a.name, len(a.slot_bytes)) for a in plan.arenas]:
        raise PlanError("this plan's arenas are not those of its policy; only plans of `penstock plan` can be emulated")
    return replace(small, ops=plan.ops, repeat=plan.repeat)


def _refuse_what_does_not_fit(plan: "Plan", device: str, asked: str, of_host: bool = True) -> None:
    """What the plan books must be free. A CPU's own memory has the place of the device's."""
    from runtime.host.memory import available_host_bytes
    from runtime.plan.footprint import host_needs, planned_device_needs

    n = plan.semantics.ranks
    n_here = int(os.environ.get("LOCAL_WORLD_SIZE", n)) if n > 1 else 1  # ranks that share the host's memory
    on_device, on_host = sum(planned_device_needs(plan, device == "cuda").values()), n_here * sum(host_needs(plan).values())
    where = "here"
    if device == "cuda":
        from runtime.machines.streams import free_cuda_bytes

        if (short_bytes := on_device - free_cuda_bytes()) > 0:
            raise _does_not_fit(f"{show_bytes(on_device)} of the GPU's memory", short_bytes, 0)
        where = "of pinned memory"
    else:
        on_host += n_here * on_device
        if plan.profile["device"]["kind"] == "cuda":
            found = " (no GPU was found)" if asked == "auto" else ""
            where = f"here, where the CPU's memory takes the place of the GPU's{found}"
    available_bytes = available_host_bytes()
    if of_host and available_bytes is not None and on_host > available_bytes:
        remedy = _what_fits(plan, available_bytes, device)
        raise _does_not_fit(f"{show_bytes(on_host)} {where}", 0, on_host - available_bytes, remedy)


def _what_fits(plan: "Plan", available_bytes: int, device: str) -> str:
    """What to plan instead: less that is trained, or frozen weights in fewer bits, if so much is free."""
    from planner.model.workload import build_workload
    from planner.predict.memory import frame
    from planner.search.remedy import BASES
    from runtime.plan import Policy
    from runtime.plan.train import Lora, Train

    of = plan.semantics
    train = of.train if of.train.lora else Train(lora=Lora())
    for base in BASES if of.ranks == of.sum_groups == 1 else ():
        semantics = replace(of, train=train, base=base, gradient_dtype="fp32", mlp_tile_tokens=None)
        try:
            workload = build_workload(plan.model, semantics)
        except WorkloadError:  # a model that nobody plans for here
            return ELSEWHERE
        found = frame(plan.model, workload, semantics, Policy())
        needs_bytes = found.host_arena_bytes + (found.device_arena_bytes + found.transient_bytes) * (device != "cuda")
        if needs_bytes < available_bytes:
            how = f"plan with --train {train} --base {base}, which needs {show_bytes(needs_bytes)}"
            return f"{how}, or run it on a machine with more memory"
    return ELSEWHERE


def _does_not_fit(what: str, short_device_bytes: int, short_host_bytes: int, remedy: str = ELSEWHERE) -> DoesNotFitError:
    return DoesNotFitError(
        f"the plan needs {what}, {show_bytes(short_device_bytes + short_host_bytes)} more than are free; {remedy}",
        short_device_bytes=short_device_bytes,
        short_host_bytes=short_host_bytes,
        smallest_change=remedy,
    )


def device_of(asked: str) -> str:
    """`cuda`, `cpu` or `emulated`; PlanError where a GPU was asked for and there is none."""
    if asked in ("cpu", "emulated"):
        return asked
    from runtime.machines.streams import has_cuda

    if has_cuda():
        return "cuda"
    if asked == "cuda":
        raise PlanError("--device cuda: torch sees no CUDA device; use --device cpu, or --device emulated")
    return "cpu"
