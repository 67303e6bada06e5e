"""A session: a run assembled from plan, settings, data and a machine, ready to start."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.checkpoint.best import refuse_unreported
from penstock.checkpoint.checkpoint import State, refuse_another
from penstock.checkpoint.model_files import note_on_zeros
from penstock.checkpoint.retention import refuse_without_room
from penstock.checkpoint.saver import StateReader
from penstock.data.data import read_data
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
from penstock.run_config import PLAN_FILE, RunConfigError, RunRequest
from penstock.runtime.compute.losses import LossFunction
from penstock.runtime.errors import PlanError, ProfileError, WorkloadError
from penstock.runtime.executor import Machine, Stop, say
from penstock.runtime.machines.processes import Processes
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan, PlanFile
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import on_one_line
from penstock.settings import CheckpointSettings, RunSettings
from penstock.user_loss import planned_loss

from . import monitors
from .build import build
from .device import device_of, release_memory, select_kernels
from .inputs import (
    RunInputs,
    attach_stored,
    data_request,
    file_on_disk,
    prompts_of,
    read_inputs,
    with_defaults,
    with_ends_of_answers,
)
from .rank0 import Leader, begin, wait_for_others
from .references import adapter_digest, attach_initial_reference, in_words, with_reference, write_reference
from .run_folder import run_folder, state_to_resume, with_replanned
from .schedules import Rates


@dataclass(frozen=True, slots=True)
class Session:
    """A run ready to start."""

    inputs: RunInputs  # of a stand-in model if the machine is emulated
    plan: Plan  # the user's, with the configuration in the model's folder
    device: str  # cuda, cpu or emulated
    machine: Machine  # executes the ops
    store: TorchMachine  # holds the state; of a stand-in model if the machine is emulated
    n_steps: int  # of the whole run
    prediction: Prediction
    first_step: int = 0  # number of finished steps
    scale: float = 1.0  # slowdown of an emulated machine against the plan's machine
    leader: Leader | None = None  # with several ranks
    say: Callable[[str], None] = say

    @property
    def settings(self) -> RunSettings:
        return self.inputs.settings

    @property
    def stop(self) -> Stop:
        return self.inputs.request.stop

    @property
    def folder(self) -> Path:
        return Path(self.settings.out)

    @property
    def rates(self) -> Rates:
        """Hyperparameters of each step, which a turn may change."""
        assert isinstance(self.store.settings, Rates), "set by open_session"
        return self.store.settings

    @property
    def fixed_lr(self) -> float | None:
        """Learning rate that a loop has set instead of the schedule."""
        return self.store.settings.fixed_lr if isinstance(self.store.settings, Rates) else None

    @property
    def reader(self) -> StateReader:
        """Tensors of the state of all ranks."""
        return self.store.host if self.leader is None else self.leader

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
    def device_name(self) -> str:
        """Device that performs the steps."""
        name = self.store.device_name() or f"CPU, {len(os.sched_getaffinity(0))} cores"
        return f"{self.plan.profile['name']}, emulated on {name}" if self.device == "emulated" else name

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
def open_session(request: RunRequest, ranks: Processes | None = None) -> Iterator[Session]:
    """Assemble a run. PenstockError for invalid inputs, before anything but cached tokens is written. `ranks`: all, on rank 0."""
    settings, report = request.settings, request.report
    report("checking the plan")
    plan, device, out = checked(request.file, request.where).plan, device_of(settings.device), Path(settings.out)
    if request.replaced is not None:
        release_memory(device)
    if ranks is None and plan.semantics.ranks > 1 and device != "emulated":
        n = plan.semantics.ranks
        raise PlanError(f"the plan is for {n} GPUs: start it with `penstock run`, or a program with torchrun --nproc-per-node {n}")
    if settings.device == "auto" and device == "cpu" and plan.profile["device"]["kind"] == "cuda":
        say(f"no GPU found: the plan for {on_one_line(plan.profile['name'])} trains on this CPU")
    monitors.chosen(settings.monitors)
    select_kernels(plan, device, settings.deterministic)
    with run_folder(out):
        if request.resumes:
            report("reading the checkpoint")
        state = state_to_resume(request)
        first_file, request = request.file, with_replanned(request, state)
        if request.file is not first_file:
            checked(request.file, request.where)
        if device == "emulated" and (state is not None or request.batches is not None or settings.replan is not None):
            usual = "saves nothing, resumes nothing and keeps its plan"
            reason = "trains a stand-in: give it files, not batches" if request.batches else usual
            raise RunConfigError(f"an emulated run {reason}; or choose another device")
        session = _emulated(request) if device == "emulated" else _real(request, device, state, ranks)
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


def _real(request: RunRequest, device: str, state: State | None, ranks: Processes | None) -> Session:
    """Assemble a run of the plan's model on this machine. Nothing is allocated before all inputs are valid."""
    report, prediction = request.report, predicted(request.file.plan)[2]
    objective = request.file.plan.semantics.objective
    refuse_unreported(request.settings.evaluation, objective)
    loss = planned_loss(objective, request.loss or request.settings.loss)
    inputs = with_reference(read_inputs(request, device, loss, state, 1 if ranks is None else ranks.n_here))
    settings, plan = inputs.settings, inputs.plan
    inputs = replace(inputs, prompts=prompts_of(settings, plan, inputs.folder, request))
    inputs, ends = with_ends_of_answers(inputs)
    n_steps, first_step = inputs.n_steps, 0 if state is None else state.step
    run_s = prediction.step_s * (n_steps - first_step)
    best_every = None if settings.evaluation.metric is None else settings.evaluation.every
    refuse_without_room(Path(settings.out), settings.checkpoint, inputs.checkpoint_bytes, first_step, n_steps, run_s, best_every)
    self_test(plan, report)
    if ends is not None:
        say(ends)
    if off := [key for key, value in plan.model.config.items() if inputs.folder_config.get(key) != value]:
        say(f"dropout is off, as planned with --no-dropout: {', '.join(off)}")
    if state is not None:
        if (converted := refuse_another(state, inputs.identity, request.resume_from is not None)) is not None:
            say(converted)
    elif inputs.weights is None:
        say("RANDOM WEIGHTS: trained from scratch (--from-scratch); the model is untrained at its first step")
    elif (note := note_on_zeros(inputs.weights)) is not None:
        say(note)
    attach_stored(inputs)
    if ranks is not None:
        begin(ranks, None if state is None else state.path, Path(settings.out) / PLAN_FILE if request.replanned else None)
    store = build(inputs, ranks)
    leader = None if ranks is None else Leader(store, ranks)
    if ranks is not None:
        report("waiting for all ranks")
        wait_for_others(ranks, inputs.digests)
    if inputs.reference is not None:
        say(f"reference: {in_words(inputs.reference)}")
    reference_file = attach_initial_reference(inputs, store)
    if reference_file is not None and leader is not None:
        leader.refer(reference_file)
    return Session(inputs, plan, device, store, store, n_steps, prediction, first_step, leader=leader)


def write_forward(request: RunRequest, path: Path) -> int:
    """Write a reference file for `--reference`: log-probabilities of each answer in training and held-out data. Return the number
    of answers. PenstockError for invalid inputs, before anything is written."""
    if request.file.plan.semantics.objective.n_labels is not None:
        raise PlanError(f"{request.where}: its loss scores texts, and has no log-probabilities to write; plan with another --loss")
    inputs = _forward_inputs(request)
    attach_stored(inputs)
    sets = tuple(source for source in (inputs.data, inputs.held_out) if isinstance(source, MapStyleData))
    inputs = replace(inputs, reference_sets=sets)
    adapter = None if inputs.settings.adapter is None else adapter_digest(Path(inputs.settings.adapter))
    return write_reference(path, inputs, build(inputs), adapter)


def write_image_features(request: RunRequest) -> int:
    """Write the features of all images of the data into the folder `tower`. Return the number of images. PenstockError for none."""
    return attach_stored(_forward_inputs(request))


def _forward_inputs(request: RunRequest) -> RunInputs:
    """Inputs of a forward pass that writes: of one device, and of data that is read before."""
    plan, device = checked(request.file, request.where).plan, device_of(request.settings.device)
    if plan.semantics.ranks > 1 or device == "emulated":
        raise PlanError(f"{request.where}: a forward that writes is one GPU's, or this CPU's; plan it without --gpus and --hosts")
    if request.settings.data.streaming:
        raise RunConfigError("a reference takes data that is read before training; leave out data.streaming")
    select_kernels(plan, device, request.settings.deterministic)
    return read_inputs(request, device, LossFunction(plan.semantics.objective, torch.zeros_like))  # the loss is not used


def _emulated(request: RunRequest) -> Session:
    """Assemble a run at the pace of the machine in the profile, on a stand-in model without checkpoints."""
    request = with_defaults(request)
    settings, plan = request.settings, request.file.plan
    if (kind := required_format(plan.semantics.objective)) is not None:
        raise RunConfigError(f"an emulated run trains on sequences too short for {kind} rows; emulate the plan of another --loss")
    small, (demands, region, prediction) = _stand_in(plan), predicted(plan)
    request.report("reading the data")
    request = replace(request, settings=replace(settings, tokenizer="bytes", adapter=None))
    data = read_data(data_request(request.settings, small, None, rows=request.rows), request.report)
    disk = file_on_disk(settings, small, f"random, by seed {settings.seed}, of a stand-in")
    inputs = with_reference(RunInputs(request, small, "cpu", data, disk=disk))
    n, n_hosts = small.semantics.ranks, Profile.from_json(plan.profile).n_hosts
    store = build(inputs, EmulatedRanks(n, max(1, n // n_hosts)) if n > 1 else None)
    scale = request.time_scale or time_scale_for(demands)
    machine = EmulatedMachine(store, demands, region, scale)
    return Session(inputs, plan, "emulated", machine, store, inputs.n_steps, prediction, scale=scale)


def _stand_in(plan: Plan) -> Plan:
    """Return the same ops for a tiny model with the same blocks."""
    semantics = stand_in_semantics(plan.semantics)
    model = Model(stand_in_config(plan.model.config), name="stand-in")
    small = lower(model, build_workload(model, semantics), semantics, plan.policy, plan.profile)
    if [(a.name, len(a.slot_bytes)) for a in small.arenas] != [(a.name, len(a.slot_bytes)) for a in plan.arenas]:
        raise PlanError("this plan's arenas are not those of its policy; only plans of `penstock plan` can be emulated")
    return replace(small, ops=plan.ops, repeat=plan.repeat)
