"""A reference: log-probabilities of data under weights that are not trained, by a streamed forward, in a file that says of what.

The file holds a tensor for each set of data, by its fingerprint, and a key: a reference of other weights, precision or kernels is
refused. Its values are to the bit those that a step would have with these weights, under the same sizes of micro-batch and tile.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from penstock.checkpoint.disk import writing
from penstock.checkpoint.model_files import weights_digest
from penstock.checkpoint.tensor_files import read_tensors, write_tensors
from penstock.data.data import BRINGS, Report, RunData, needed, unheard
from penstock.data.sampling import MapStyleData, Stream
from penstock.settings import RunSettings
from runtime.batch import Batch
from runtime.errors import CheckpointError, DataError, PlanError
from runtime.executor import Stop
from runtime.machines.torch_machine import Abandoned, TorchMachine
from runtime.plan import Plan
from runtime.plan.objective import Objective

from .forwards import log_probabilities

FILE_NAME = "reference.safetensors"  # in a run's folder
REFERENCE, BASE = "reference", "base"  # of the extras, this one; and the reference that is the model before training
_KERNELS = ("attention", "attention_kernel", "experts", "norm", "loss", "pointwise", "library_kernels")
_DECIDE = ("seq_len", "compute_dtype", "base", *_KERNELS)
_HOW = "make it with `penstock forward PLAN --data DATA --out FILE`, of the model that the run begins with"


def refer(settings: RunSettings, plan: Plan, maps: Sequence[MapStyleData], folder: Path | None) -> None:
    """Give data its log-probabilities under the reference of the settings, where that is a file; before memory is taken."""
    if settings.reference is not None and not maps:
        raise PlanError("--reference: the plan's loss takes none, or its batches bring their own; leave it out")
    if maps and _is_base(settings) and plan.semantics.ranks > 1:
        raise PlanError("--reference base is one GPU's: make a file with `penstock forward` there, and say --reference FILE")
    if maps and not _is_base(settings):
        put_reference(Path(settings.reference or ""), plan, maps, _of_weights(settings, folder))


def refer_to_base(
    settings: RunSettings,
    store: TorchMachine,
    maps: Sequence[MapStyleData],
    folder: Path | None,
    is_first: bool,
    report: Report = unheard,
    stop: Stop | None = None,
) -> None:
    """The same where that is the model of the run's first step, or one without its adapter, by a file in the run's folder, which is
    made before that step (`is_first`), or where it has gone and can be made again."""
    if not maps or not _is_base(settings):
        return
    plan, path = store.plan, Path(settings.out) / FILE_NAME
    if is_first or (plan.semantics.train.lora is not None and not path.is_file()):
        try:
            write_reference(path, settings, folder, store, maps, report, stop)
        except Abandoned:
            raise PlanError("asked to end while the reference was made, before any step: nothing is saved; run again") from None
    put_reference(path, plan, maps)  # the run's own, whatever folder a resumed one is given


def _is_base(settings: RunSettings) -> bool:
    return settings.reference in (None, BASE)


def _key(plan: Plan) -> dict[str, str]:
    """What decides a reference's values besides the weights, by name."""
    return {"model": plan.model.fingerprint} | {name: str(getattr(plan.semantics, name)) for name in _DECIDE}


def _of_weights(settings: RunSettings, folder: Path | None) -> dict[str, str]:
    """A digest of those in `folder`."""
    found = None if settings.from_scratch or folder is None else weights_digest(folder)
    return {"weights": found or f"random, by seed {settings.seed}"}


def write_reference(
    path: Path,
    settings: RunSettings,
    folder: Path | None,
    machine: TorchMachine,
    sets: Iterable[MapStyleData],
    report: Report = unheard,
    stop: Stop | None = None,
) -> int:
    """Write the log-probabilities of all sets under the weights as they are, without adapters; how many answers these are.
    Abandoned after `stop.request()`."""
    found, templates = dict[str, torch.Tensor](), machine.compute.templates
    is_adapted = machine.plan.semantics.train.lora is not None
    for data in sets:
        for k, part in enumerate(data.parts):
            report(f"log-probabilities of {len(part.sequences):,} samples under the reference")
            one = partial(_sample, data, k)
            with templates.without_adapters() if is_adapted else nullcontext():
                found[f"logps.{part.fingerprint}"] = log_probabilities(machine, one, len(part.sequences), stop)[0]
    key = json.dumps(_key(machine.plan) | _of_weights(settings, folder))
    unfinished = path.with_name(path.name + ".partial")
    with writing(path):
        unfinished.unlink(missing_ok=True)
        write_tensors(unfinished, found, found.values(), {"key": key, "sha256": _digest(found)})
        os.replace(unfinished, path)
    return sum(len(tensor) * tensor.shape[1] for tensor in found.values())


def _sample(data: MapStyleData, k: int, i: int) -> Batch:
    return data.of([(k, i)])


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def put_reference(path: Path, plan: Plan, sets: Iterable[MapStyleData], more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Give each set of data the log-probabilities that a file holds of it; CheckpointError where they are others', or damaged.
    `more`: what its key has to hold besides the plan's."""
    key, (fields, tensors) = _key(plan) | dict(more), read_tensors(path)
    try:
        found = json.loads(fields.get("key", ""))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: no file of a reference; {_HOW}")
    if odd := next((name for name in key if found.get(name) != key[name]), None):
        was, now = (str(of.get(odd))[:16] for of in (found, key))
        raise CheckpointError(f"{path}: a reference of another {odd} ({was}, and here it is {now}); {_HOW}")
    if _digest(tensors) != fields.get("sha256"):
        raise CheckpointError(f"{path}: damaged, its bytes are not those that were written; {_HOW}")
    for data in sets:
        data.references = [*_of_parts(path, data, tensors, plan)]


def _of_parts(path: Path, data: MapStyleData, tensors: dict[str, torch.Tensor], plan: Plan) -> Iterator[torch.Tensor]:
    by_token = plan.semantics.objective.has_token_reference
    for part in data.parts:
        found, dtype = tensors.get(f"logps.{part.fingerprint}"), torch.float32 if by_token else torch.float64
        shape = [len(part.sequences), part.shape.rows_each, plan.semantics.seq_len][: 2 + by_token]
        if found is None or list(found.shape) != shape or found.dtype != dtype:
            raise CheckpointError(f"{path}: holds nothing of this data, template and length ({part.about[:80]}); {_HOW}")
        yield found


def mapped(objective: Objective, data: RunData, held_out: RunData | None = None) -> list[MapStyleData]:
    """What is read from files, if the loss has a reference; DataError where it asks more of a batch than files bring."""
    used = [data, held_out if objective.has_first_pass else None]
    brought = (REFERENCE, *BRINGS.get(needed(objective) or "", ()))
    for other in (name for name in objective.extras if name not in brought):
        if any(isinstance(each, MapStyleData | Stream) for each in used):
            raise DataError(
                f"the plan's loss asks batches for {other!r}, which no file brings; give `train` an object with batch(step)"
            )
    if REFERENCE in objective.extras and isinstance(data, Stream):
        raise DataError("a loss that has a reference takes data that is read before training; leave out --streaming")
    return [each for each in used if isinstance(each, MapStyleData) and REFERENCE in objective.extras]
