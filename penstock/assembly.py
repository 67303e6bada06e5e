"""What is a run put together from?

A plan, the settings and a machine come together here: weights and data are read, what does not fit is refused, and what comes out
only waits to be started.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import DoesNotFitError, PlanError, WorkloadError
from runtime.train.run_config import RunConfigError
from runtime.units import show_bytes

if TYPE_CHECKING:
    from planner.predict.simulate import Prediction
    from runtime.data.data import Data
    from runtime.machines.torch_machine import TorchMachine
    from runtime.plan import Plan, PlanFile
    from runtime.plan.region import Demand, Region
    from runtime.settings import AdamW, OptimizerSettings, RunSettings
    from runtime.train.trainer import Training

TOKENS_FOLDER = "tokens"  # in the run's folder: data as the model reads it, for the next start


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
    held_out: "Data | None" = None  # a sequence is a batch of its own there
    prompts: "Prompts | None" = None

    @property
    def is_comparable(self) -> bool:
        """Whether the machine is of the kind that the prediction is for."""
        return self.device == "emulated" or self.plan.profile["device"]["kind"] == self.device


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the model is asked, and how it hears and answers."""

    texts: tuple[str, ...]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    end_ids: frozenset[int]


def checked_plan(path: Path) -> "PlanFile":
    """The plan in a file, proven by the checker; PlanError names what is wrong."""
    from runtime.plan import PlanFile

    return checked(PlanFile.read(path), str(path))


def checked(file: "PlanFile", where: str) -> "PlanFile":
    """The plan, proven by the checker, its blocks and arenas those of its model and policy; PlanError names what is wrong."""
    from planner.check.check import check
    from planner.check.claimed import claimed
    from planner.check.recount import check_origin, is_by_this_code
    from planner.model.config import refuse_another

    claim = None if file.claim is None else claimed(file.claim, where)
    try:
        check(file.plan, file.claim)
        refuse_another(file.plan.model, file.plan.workload.n_layers)
        check_origin(file.plan, is_by_this_code(claim))
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
) -> Session:
    """Everything but the start. PenstockError for what cannot be; nothing is written but the cache of tokens.

    What is opened here is closed with `until_the_end`. `data`: batches that are not read from where the settings say.
    """
    from planner.predict.simulate import simulate

    demands, region = demands_of(plan)
    _refuse_parts_of_no_name(settings.optimizer, plan)
    prediction = simulate(plan, demands, region)
    if device == "emulated":
        if data is not None:
            raise RunConfigError("an emulated run trains a stand-in with a vocabulary of its own: give it files, not batches")
        run = _emulated(settings, plan, prediction, demands, region, time_scale, until_the_end)
    else:
        run = _real(settings, plan, prediction, device, until_the_end, data)
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
) -> Session:
    """A run of the plan's own model on this machine's GPU or CPU. What is quickly refused is read before the weights are."""
    from runtime.checkpoint.checkpoint import has_weights
    from runtime.train.trainer import Training, load_model

    folder, out = _model_folder(plan, settings.model), Path(settings.out)
    _refuse_what_does_not_fit(plan, device)
    data = data or _data(settings, plan, folder, until_the_end)
    held_out = _held_out(settings, plan, folder, until_the_end)
    prompts = _prompts(settings, plan, folder, until_the_end)
    n_steps = _n_steps(settings, data)
    of_step, kept = _optimizer(settings.optimizer, n_steps)
    store = _machine(device, plan, data, of_step, settings.seed)
    if folder is not None and has_weights(folder):
        load_model(store, folder)
    else:
        store.initialise(settings.seed)
    training = Training(
        plan, store, store, data, settings.seed, out, True, tokenizer_from=folder, checkpoint=settings.checkpoint, optimizer=kept
    )
    return Session(settings, plan, device, training, n_steps, 1.0, prediction, held_out, prompts)


def _emulated(
    settings: "RunSettings",
    plan: "Plan",
    prediction: "Prediction",
    demands: "list[Demand]",
    region: "Region",
    time_scale: float | None,
    until_the_end: ExitStack,
) -> Session:
    """A run of the plan at the pace of the machine in its profile, on a stand-in model, whose weights nobody saves or asks."""
    from runtime.machines.emulated import EmulatedMachine, time_scale_for
    from runtime.train.trainer import Training

    small = _stand_in(plan)
    data = _data(settings, small, None, until_the_end)
    n_steps = _n_steps(settings, data)
    of_step, kept = _optimizer(settings.optimizer, n_steps)
    store = _machine("cpu", small, data, of_step, settings.seed)
    store.initialise(settings.seed)
    scale = time_scale or time_scale_for(demands)
    machine = EmulatedMachine(store, demands, region, scale)
    training = Training(small, machine, store, data, settings.seed, Path(settings.out), saves=False, optimizer=kept)
    return Session(settings, plan, "emulated", training, n_steps, scale, prediction)


# -- the parts ------------------------------------------------------------------------------------------------------------


def _data(
    settings: "RunSettings", plan: "Plan", folder: Path | None, until_the_end: ExitStack, batch_size: int | None = None
) -> "Data":
    from runtime.compute.documents import supports_documents
    from runtime.data.data import read_data

    semantics = plan.semantics
    data = read_data(
        settings.data,
        folder,
        _vocab_size(plan),
        semantics.seq_len,
        batch_size or semantics.batch_size,
        settings.seed,
        Path(settings.out) / TOKENS_FOLDER,
        by_document=supports_documents(plan.model.config, semantics) is None,
    )
    until_the_end.callback(data.close)
    return data


def _vocab_size(plan: "Plan") -> int:
    return plan.workload.blocks[0].parameters[0].shape[0]


def _held_out(settings: "RunSettings", plan: "Plan", folder: Path | None, until_the_end: ExitStack) -> "Data | None":
    """The data to evaluate on, in its own order."""
    path = settings.evaluation.data
    if path is None:
        return None
    of = replace(settings.data, path=path, shuffle=False, streaming=False, workers=0)
    return _data(replace(settings, data=of), plan, folder, until_the_end, batch_size=1)


def _prompts(settings: "RunSettings", plan: "Plan", folder: Path | None, until_the_end: ExitStack) -> Prompts | None:
    """What is asked. A model that is trained on conversations answers; one that is trained on text continues it."""
    from runtime.data.reading import read_set
    from runtime.train.generation import check_prompts

    texts = settings.evaluation.prompts
    if not texts:
        return None
    reading = read_set(settings.data, folder, _vocab_size(plan), Path(settings.out) / TOKENS_FOLDER)
    until_the_end.callback(reading.close)

    def encode(text: str) -> list[int]:
        is_text = reading.format == "text"
        ids = reading.encoder.encode(text) if is_text else reading.chat_format.prompt([{"role": "user", "content": text}])
        return [int(i) for i in ids]

    check_prompts([encode(text) for text in texts], plan.semantics.seq_len)
    return Prompts(texts, encode, reading.encoder.decode, reading.encoder.answer_ends | {reading.encoder.end_id})


def _n_steps(settings: "RunSettings", data: "Data") -> int:
    """Steps of the whole run."""
    if settings.steps is not None:
        return settings.steps
    if data.n_steps is None:
        raise RunConfigError("how long streamed data is shows only at its end: say how many --steps to take")
    return max(1, math.ceil(Fraction(str(settings.epochs or 1)) * data.n_steps))  # 0.1 of 30 is 3, which no float says


def _optimizer(settings: "OptimizerSettings", n_steps: int) -> "tuple[Callable[[int], AdamW], dict[str, Any]]":
    """The hyperparameters of each step, and what a checkpoint keeps of them: a resumed run must use the same."""
    from runtime.train.schedules import learning_rates

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


def _machine(device: str, plan: "Plan", data: "Data", of_step: "Callable[[int], AdamW]", seed: int) -> "TorchMachine":
    from runtime.machines.cpu import CpuMachine
    from runtime.machines.cuda import CudaMachine

    if device == "cuda":
        return CudaMachine(plan, data.batch, of_step, seed)
    return CpuMachine(plan, data.batch, of_step, seed, pin_threads=True)


def _model_folder(plan: "Plan", given: str | None) -> Path | None:
    """Where weights and tokenizer come from; None: random weights, and bytes for tokens."""
    from planner.model.workload import read_model

    folder = Path(given) if given is not None else Path(plan.model.path) if plan.model.path is not None else None
    if folder is None:
        return None
    if not folder.is_dir():
        raise PlanError(f"{folder}: the model's folder is not there; name it with --model")
    found = read_model(str(folder))
    if _as_built(found.config) != _as_built(plan.model.config):
        raise PlanError(f"{folder}: its config.json is not the one the plan was made for; plan again with this model")
    return folder


def _as_built(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what says nothing of the modules, which a checkpoint or another version writes otherwise."""
    about_files = ("dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path", "use_cache")
    return {key: value for key, value in config.items() if key not in about_files}


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


def _refuse_what_does_not_fit(plan: "Plan", device: str) -> None:
    """What the plan books must be free. A CPU's own memory has the place of the device's."""
    from runtime.host.memory import available_host_bytes
    from runtime.plan.footprint import host_needs, planned_device_needs

    on_device, on_host = sum(planned_device_needs(plan, device == "cuda").values()), sum(host_needs(plan).values())
    where = "here"
    if device == "cuda":
        from runtime.machines.streams import free_cuda_bytes

        if (short_bytes := on_device - free_cuda_bytes()) > 0:
            raise _does_not_fit(f"{show_bytes(on_device)} of the GPU's memory", short_bytes, 0)
        where = "of pinned memory"
    else:
        on_host += on_device
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
