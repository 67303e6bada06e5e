"""A session: a run assembled from plan, settings, data and a machine, ready to start."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.checkpoint import State, identity, refuse_another, refuse_another_base
from penstock.checkpoint.conversion import scoring_config
from penstock.checkpoint.model_files import towers_bytes, weights_digest
from penstock.checkpoint.retention import refuse_without_room
from penstock.data.data import Report, RunData, no_report
from penstock.data.formats import required_format
from penstock.data.sampling import MapStyleData
from penstock.emulated import EmulatedMachine, EmulatedRanks, stand_in_config, stand_in_semantics, time_scale_for
from penstock.hwprofiles.schema import Profile
from penstock.model_checks.self_test import self_test
from penstock.planner.check.check import check
from penstock.planner.check.claim import check_origin
from penstock.planner.lower.lower import lower
from penstock.planner.model.config import refuse_another as refuse_another_model
from penstock.planner.model.workload import build_workload
from penstock.planner.predict.cost import costs, region_of
from penstock.planner.predict.region import Demand, Region
from penstock.planner.predict.simulate import Prediction, simulate
from penstock.planner.search.claim import claimed
from penstock.run_config import RunConfigError
from penstock.runtime.compute.losses import LossFunction
from penstock.runtime.errors import PlanError, ProfileError, WorkloadError
from penstock.runtime.executor import Machine, Stop, say
from penstock.runtime.machines.lanes import CpuDevice, CudaDevice
from penstock.runtime.machines.processes import Processes
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan, PlanFile
from penstock.runtime.plan.footprint import host_needs
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.workload import Model, has_towers
from penstock.runtime.ranks import Ranks
from penstock.runtime.units import on_one_line, show_bytes
from penstock.settings import ADAPTERS_LR, LION, CheckpointSettings, OptimizerSettings, RunSettings
from penstock.user_loss import planned_loss

from .device import device_of, refuse_what_does_not_fit, select_kernels
from .inputs import Prompts, are_saved_whole, data_of, file_on_disk, fill, held_out_of, plan_of_folder, prompts_of, weights_of
from .monitors import refuse_missing
from .rank0 import Leader, begin, wait_for_others
from .references import attach_base_reference, attach_reference, sets_with_reference, write_reference
from .run_folder import run_folder, state_to_resume
from .schedules import Rates, learning_rates


@dataclass(frozen=True, slots=True)
class Session:
    """A run ready to start."""

    settings: RunSettings
    plan: Plan  # the user's, with the configuration in the model's folder
    device: str  # cuda, cpu or emulated
    machine: Machine  # executes the ops
    store: TorchMachine  # holds the state; of a stand-in model if the machine is emulated
    data: RunData
    n_steps: int  # of the whole run
    prediction: Prediction
    identity: Mapping[str, Any] = field(default_factory=dict)  # fields that a resumed run must match
    first_step: int = 0  # number of finished steps
    scale: float = 1.0  # slowdown of an emulated machine against the plan's machine
    weights: str = ""  # their source, for the user
    tokenizer_from: Path | None = None  # copied into checkpoints; None: bytes
    towers_from: Path | None = None  # folder of a vision-language model, with the towers to copy into checkpoints
    checkpoint_bytes: int = 0  # of each: state, weights and towers
    held_out: RunData | None = None  # one sequence per batch
    prompts: Prompts | None = None
    leader: Leader | None = None  # with several ranks
    stop: Stop = field(default_factory=Stop)
    say: Callable[[str], None] = say

    @property
    def folder(self) -> Path:
        return Path(self.settings.out)

    @property
    def rates(self) -> Rates:
        """Hyperparameters of each step, which a turn may change."""
        assert isinstance(self.store.settings, Rates), "set by open_session"
        return self.store.settings

    @property
    def saves(self) -> bool:
        """True if checkpoints are written; an emulated run only has the state of a stand-in."""
        return self.device != "emulated"

    @property
    def checkpoint(self) -> CheckpointSettings:
        """When and how to save. With several ranks, never in the background."""
        settings = self.settings.checkpoint
        return settings if self.leader is None else replace(settings, background=False)

    @property
    def head_config(self) -> dict[str, Any]:
        """Configuration fields of a task head, for checkpoints."""
        config, n = self.plan.model.config, self.plan.semantics.objective.n_labels
        pad_id = self.data.parts[0].shape.pad_id if isinstance(self.data, MapStyleData) else config.get("pad_token_id")
        return {} if n is None else scoring_config(config, n, pad_id)

    @property
    def is_comparable(self) -> bool:
        """True if the prediction is for a machine of this kind."""
        return self.device == "emulated" or self.plan.profile["device"]["kind"] == self.device

    @property
    def predicted_step_s(self) -> float | None:
        """Predicted seconds of a step; None if the prediction is for another kind of machine."""
        return self.prediction.step_s * self.scale if self.is_comparable else None

    @property
    def late_fraction(self) -> float:
        """Share of emulated ops that took longer in real work than their emulated duration."""
        machine = self.machine
        return machine.n_real_work_binds / max(machine.n_performed, 1) if isinstance(machine, EmulatedMachine) else 0.0


@contextmanager
def open_session(
    settings: RunSettings,
    file: PlanFile,
    where: str = "the plan",
    *,
    resume: bool = False,
    resume_from: str | None = None,
    time_scale: float | None = None,
    data: RunData | None = None,
    report: Report = no_report,
    ranks: Processes | None = None,
    stop: Stop | None = None,
    loss: Callable[..., Any] | None = None,
) -> Iterator[Session]:
    """Assemble a run. PenstockError for invalid inputs, before anything but a cache of tokens is written.

    `where`: the plan's place, for errors. `data`: batches of a program, instead of the settings' data. `report`: receives progress.
    `ranks`: all ranks of the run, if this is rank 0. `loss`: the function of a plan with a user loss.
    """
    report("checking the plan")
    plan, device, out = checked(file, where).plan, device_of(settings.device), Path(settings.out)
    if ranks is None and plan.semantics.ranks > 1 and device != "emulated":
        n = plan.semantics.ranks
        raise PlanError(f"the plan is for {n} GPUs: start it with `penstock run`, or a program with torchrun --nproc-per-node {n}")
    if settings.device == "auto" and device == "cpu" and plan.profile["device"]["kind"] == "cuda":
        say(f"no GPU found: the plan for {on_one_line(plan.profile['name'])} trains on this CPU")
    refuse_missing(settings.monitors)
    select_kernels(plan, device, settings.deterministic)
    with run_folder(out):
        if resume or resume_from is not None:
            report("reading the checkpoint")
        state = state_to_resume(out, resume, resume_from)
        settings = with_defaults(settings, plan)
        _refuse_unknown_parameters(settings.optimizer, plan)
        if device == "emulated":
            if state is not None or data is not None:
                reason = "saves nothing and resumes nothing" if data is None else "trains a stand-in: give it files, not batches"
                raise RunConfigError(f"an emulated run {reason}; or choose another device")
            session = _emulated(settings, plan, report, time_scale)
        else:
            session = _real(settings, plan, device, state, resume_from is not None, data, ranks, report, loss, stop)
        session = replace(session, stop=stop or Stop())
        try:
            yield session
        except GeneratorExit:  # the user left the loop
            if session.leader is not None:
                session.leader.end()
            raise
        if session.leader is not None:
            session.leader.end()


def checked(file: PlanFile, where: str) -> PlanFile:
    """Return the plan if the checker proves it, with the blocks and arenas of its model and policy. Otherwise PlanError."""
    claim = None if file.claim is None else claimed(file.claim, where)
    try:
        check(file.plan)
        refuse_another_model(file.plan.model, file.plan.workload.n_layers)
        check_origin(file.plan, claim)
    except (PlanError, ProfileError, WorkloadError) as error:
        raise PlanError(f"{where}: refused: {error}") from None
    return file


def predicted(plan: Plan) -> tuple[list[Demand], Region, Prediction]:
    """Return the demands of the ops, the resources of the machine in the plan's profile, and the prediction."""
    profile = Profile.from_json(plan.profile, "the plan's profile")
    demands, region = costs(plan, profile), region_of(profile)
    return demands, region, simulate(plan, demands, region)


def _real(
    settings: RunSettings,
    plan: Plan,
    device: str,
    state: State | None,
    converts: bool,
    data: RunData | None,
    ranks: Processes | None,
    report: Report,
    user_loss: Callable[..., Any] | None = None,
    stop: Stop | None = None,
) -> Session:
    """Assemble a run of the plan's model on this machine. Cheap checks precede loading weights. `converts`: accept the state of
    another optimizer."""
    prediction, loss = predicted(plan)[2], planned_loss(plan.semantics.objective, user_loss or settings.loss)
    plan, folder = plan_of_folder(plan, settings.model)
    weights = weights_of(settings, plan, folder, state)
    of_weights = f"random, by seed {settings.seed}" if weights is None else weights_digest(weights)
    if state is None and settings.adapter is not None:
        refuse_another_base(Path(settings.adapter), lambda: of_weights)
    refuse_what_does_not_fit(plan, device, settings.device, 1 if ranks is None else ranks.n_here)
    disk = file_on_disk(settings, plan, of_weights)
    report("reading the data")
    data = data or data_of(settings, plan, folder, report=report)
    held_out = held_out_of(settings, plan, folder, report)
    maps = sets_with_reference(plan.semantics.objective, data, held_out)
    attach_reference(settings, plan, maps, folder)
    prompts = prompts_of(settings, plan, folder)
    n_steps, first_step = steps_of(settings, data), 0 if state is None else state.step
    saves_towers = has_towers(plan.model.config) and plan.semantics.train.lora is None
    towers_from, run_s = weights if saves_towers else None, prediction.step_s * (n_steps - first_step)
    each_bytes = plan.checkpoint_bytes(settings.checkpoint.weights_only)
    each_bytes += 0 if towers_from is None else towers_bytes(towers_from, plan.model.config)
    refuse_without_room(Path(settings.out), settings.checkpoint, each_bytes, first_step, n_steps, run_s)
    self_test(plan, report)
    if ranks is not None:
        begin(ranks, None if state is None else state.path)
    of_step, optimizer = optimizer_of(settings.optimizer, n_steps)
    host_bytes = sum(host_needs(plan, 1 if ranks is None else ranks.n_here).values())
    report(f"taking memory: {show_bytes(host_bytes + plan.device_arena_bytes)}")
    store = machine_of(device, plan, data, of_step, settings.seed, ranks, loss, disk)
    session = Session(
        *(settings, plan, device, store, store, data, n_steps, prediction),
        identity=identity(plan, data, settings.seed, optimizer, None if are_saved_whole(plan) else of_weights),
        first_step=first_step,
        weights=_weights_in_words(settings, weights, state),
        tokenizer_from=folder if settings.tokenizer == "model" else None,
        towers_from=towers_from,
        checkpoint_bytes=each_bytes,
        held_out=held_out,
        prompts=prompts,
        leader=None if ranks is None else Leader(store, ranks),
    )
    if state is not None:
        if (converted := refuse_another(state, session.identity, converts)) is not None:
            say(converted)
    elif weights is None:
        say("RANDOM WEIGHTS: trained from scratch (--from-scratch); the model is untrained at its first step")
    fill(store, settings, data, weights, state, report)
    if ranks is not None:
        report("waiting for all ranks")
        wait_for_others(ranks, input_digests(data, weights))
    reference_file = attach_base_reference(settings, store, maps, folder, state is None, report, stop)
    if reference_file is not None and session.leader is not None:
        session.leader.refer(reference_file)
    return session


def write_forward(settings: RunSettings, file: PlanFile, where: str, path: Path, report: Report = no_report) -> int:
    """Write a reference file for `--reference`: log-probabilities of each answer in training and held-out data. Return the number
    of answers. PenstockError for invalid inputs, before anything is written."""
    plan, device = checked(file, where).plan, device_of(settings.device)
    if plan.semantics.ranks > 1 or device == "emulated":
        raise PlanError(f"{where}: a forward that writes is one GPU's, or this CPU's; plan it without --gpus and --hosts")
    if plan.semantics.objective.n_labels is not None:
        raise PlanError(f"{where}: its loss scores texts, and has no log-probabilities to write; plan with another --loss")
    if settings.data.streaming:
        raise RunConfigError("a reference takes data that is read before training; leave out data.streaming")
    select_kernels(plan, device, settings.deterministic)
    loss = LossFunction(plan.semantics.objective, torch.zeros_like)  # not used in a forward pass
    plan, folder = plan_of_folder(plan, settings.model)
    weights = weights_of(settings, plan, folder, None)
    refuse_what_does_not_fit(plan, device, settings.device)
    report("reading the data")
    data = data_of(settings, plan, folder, report=report)
    sets = [source for source in (data, held_out_of(settings, plan, folder, report)) if isinstance(source, MapStyleData)]
    of_step, _ = optimizer_of(with_defaults(settings, plan).optimizer, 1)
    disk = file_on_disk(settings, plan, f"random, by seed {settings.seed}" if weights is None else weights_digest(weights))
    store = machine_of(device, plan, data, of_step, settings.seed, None, loss, disk)
    fill(store, settings, data, weights, None, report)
    return write_reference(path, settings, folder, store, sets, report)


def _weights_in_words(settings: RunSettings, weights: Path | None, state: State | None) -> str:
    if state is not None:
        return f"{state.path}, after step {state.step}"
    text = f"RANDOM, from scratch, by seed {settings.seed}" if weights is None else str(weights)
    return text if settings.adapter is None else f"{text}, with the adapter {settings.adapter}"


def input_digests(data: RunData, weights: Path | None) -> dict[str, str]:
    """Return digests of the inputs that every rank reads, by name."""
    return {"data": str(data.fingerprint)} | ({} if weights is None else {"weights": weights_digest(weights)})


def _emulated(settings: RunSettings, plan: Plan, report: Report, time_scale: float | None) -> Session:
    """Assemble a run at the pace of the machine in the profile, on a stand-in model without checkpoints."""
    if (kind := required_format(plan.semantics.objective)) is not None:
        raise RunConfigError(f"an emulated run trains on sequences too short for {kind} rows; emulate the plan of another --loss")
    attach_reference(settings, plan, [], None)  # raises if the settings name a reference
    small, (demands, region, prediction) = _stand_in(plan), predicted(plan)
    report("reading the data")
    data = data_of(replace(settings, tokenizer="bytes"), small, None, report=report)
    n_steps = steps_of(settings, data)
    of_step, _ = optimizer_of(settings.optimizer, n_steps)
    n, n_hosts = small.semantics.ranks, Profile.from_json(plan.profile).n_hosts
    disk = file_on_disk(settings, small, f"random, by seed {settings.seed}, of a stand-in")
    ranks = EmulatedRanks(n, max(1, n // n_hosts)) if n > 1 else None
    store = machine_of("cpu", small, data, of_step, settings.seed, ranks, disk=disk)
    store.initialise(settings.seed)
    scale = time_scale or time_scale_for(demands)
    machine = EmulatedMachine(store, demands, region, scale)
    of_run = (settings, plan, "emulated", machine, store, data, n_steps, prediction)
    return Session(*of_run, scale=scale, weights="random, of a tiny stand-in")


def _stand_in(plan: Plan) -> Plan:
    """Return the same ops for a tiny model with the same blocks."""
    semantics = stand_in_semantics(plan.semantics)
    model = Model(stand_in_config(plan.model.config), name="stand-in")
    small = lower(model, build_workload(model, semantics), semantics, plan.policy, plan.profile)
    if [(a.name, len(a.slot_bytes)) for a in small.arenas] != [(a.name, len(a.slot_bytes)) for a in plan.arenas]:
        raise PlanError("this plan's arenas are not those of its policy; only plans of `penstock plan` can be emulated")
    return replace(small, ops=plan.ops, repeat=plan.repeat)


def machine_of(
    device: str,
    plan: Plan,
    data: RunData,
    of_step: Rates,
    seed: int,
    ranks: Ranks | None,
    loss: LossFunction | None = None,
    disk: Path | None = None,
) -> TorchMachine:
    """Return a machine for the plan, with memory allocated. `loss`: a user loss; `disk`: the file of weights on disk."""
    target = CudaDevice() if device == "cuda" else CpuDevice(pin_threads=True)
    return TorchMachine(plan, data.batch, of_step, seed, ranks=ranks, loss=loss, disk=disk, device=target)


def steps_of(settings: RunSettings, data: RunData) -> int:
    """Return the number of steps of the whole run."""
    if settings.steps is not None:
        return settings.steps
    if data.n_steps is None:
        raise RunConfigError("the length of streamed data is unknown: give --steps")
    return max(1, math.ceil(Fraction(str(settings.epochs or 1)) * data.n_steps))  # exact: 0.1 of 30 is 3


def with_defaults(settings: RunSettings, plan: Plan) -> RunSettings:
    """Return the settings with learning rate and beta2. Defaults depend on the optimizer, and on adapters or full training."""
    optimizer, is_lion = settings.optimizer, plan.semantics.optimizer.rule == "lion"
    if is_lion and optimizer.eps != AdamW().eps:
        raise RunConfigError("optimizer.eps: the plan's optimizer is Lion, which has none; leave it out")
    usual = (AdamW().lr if plan.semantics.train.lora is None else ADAPTERS_LR) * (LION["lr_fraction"] if is_lion else 1)
    beta2 = optimizer.beta2 if optimizer.beta2 is not None else LION["beta2"] if is_lion else AdamW().beta2
    return replace(settings, optimizer=replace(optimizer, lr=optimizer.lr or usual, beta2=beta2))


def optimizer_of(settings: OptimizerSettings, n_steps: int) -> tuple[Rates, dict[str, Any]]:
    """Return the hyperparameters of each step, and the fields of them that a resumed run must match."""
    lr_of = learning_rates(settings, n_steps)
    horizon = n_steps if settings.schedule.kind != "constant" else None  # a constant rate does not depend on it
    saved = asdict(settings) | {"no_decay": list(settings.no_decay), "n_steps": horizon}
    return Rates(settings, lr_of), saved


def _refuse_unknown_parameters(settings: OptimizerSettings, plan: Plan) -> None:
    names = [p.name for block in plan.workload.blocks for p in block.parameters]
    for part in settings.no_decay:
        if not any(part in name for name in names):
            raise RunConfigError(f"optimizer.no_decay: no parameter's name holds {part[:60]!r}; names are for example {names[1]}")
