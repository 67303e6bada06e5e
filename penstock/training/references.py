"""Reference and teacher files: log-probabilities of the data under frozen weights, from a streamed forward pass.

The file holds a tensor per data set, named by a digest of everything that affects its tokens, then a SHA-256 of these tensors, and
a key. A reference with other weights, precision or kernels is rejected; for a teacher, another top k or temperature. Reference
values are bitwise identical to those of a training step with these weights, at the same micro-batch and tile sizes.

A run's reference is the model that it begins with (`start`), including the adapter of `--adapter`; its model without an adapter
(`base`); or a file of either, or of the model merged with that adapter. Checkpoints record it, and a resumed run keeps it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from penstock.checkpoint.adapter_files import CONFIG_FILE, TENSOR_FILE
from penstock.checkpoint.checkpoint import put_back
from penstock.checkpoint.disk import writing
from penstock.checkpoint.merging import merged_digest
from penstock.checkpoint.model_files import weights_digest
from penstock.checkpoint.tensor_files import read_tensors, write_tensors
from penstock.data.data import RunData
from penstock.data.sampling import MapStyleData, PackedSet, Stream
from penstock.runtime.batch import Batch
from penstock.runtime.errors import CheckpointError, DataError, PlanError
from penstock.runtime.machines.torch_machine import Abandoned, TorchMachine
from penstock.runtime.plan import Plan
from penstock.runtime.plan.objective import TOKEN_REFERENCE, Objective, Source
from penstock.runtime.units import on_one_line, show_bytes
from penstock.settings import RunSettings

from .build import load_adapter
from .inputs import RunInputs
from .streamed_forward import forward_passes

FILE_NAME = "reference.safetensors"  # in a run's folder
START, BASE, FROM_FILE = "start", "base", "file"
_KERNELS = ("attention", "attention_kernel", "experts", "norm", "loss", "pointwise", "library_kernels")
_DECIDE = ("compute_dtype", "base", "products", *_KERNELS)
_HOW = "make it with `penstock forward PLAN --data DATA --out FILE`, of the model (and the --adapter) that the run begins with"
_HOW_TEACHER = "make it with `penstock forward PLAN --data DATA --out FILE`, of the teacher's PLAN with this --loss and --seq-len"
_ODD = {
    "tokenizer": "made with another tokenizer or chat template than this model's, so that tokens differ",
    "images": "made with other images, of the same rows",
    "sequences": "made from other sequences of this data: another --seq-len, --packing or --seed",
}
DIGEST, PIECE = "sha256", 2**24  # name of the checksum tensor; elements hashed at a time


def with_reference(inputs: RunInputs) -> RunInputs:
    """Return the inputs with the data sets that need log-probabilities, and attach those of the file in the settings."""
    settings, plan = inputs.settings, inputs.plan
    sets = sets_with_reference(plan.semantics.objective, inputs.data, inputs.held_out)
    is_teacher = plan.semantics.objective.n_top is not None
    if is_teacher and sets and _is_base(settings):
        raise PlanError("--loss distill learns from a teacher's file: make one with `penstock forward`, and say --reference FILE")
    if settings.reference is not None and not sets:
        raise PlanError("--reference: the plan's loss takes none, or its batches bring their own; leave it out")
    if not sets:
        return inputs
    inputs = replace(inputs, reference_sets=tuple(sets))
    if is_teacher:
        attach_file(Path(settings.reference or ""), plan, sets)
        return inputs
    saved = {} if inputs.state is None else inputs.state.fields
    recorded = saved.get("reference", {"of": BASE})  # for an older checkpoint without a record: the base, or a file
    record = recorded if inputs.state is not None and settings.reference is None else _record(inputs)
    is_known = inputs.state is not None and ("reference" in saved or record["of"] != FROM_FILE)
    if is_known and any(recorded.get(key) != record.get(key) for key in ("adapter", "merged")):
        problem = f"its reference is {in_words(recorded)}, and --reference {settings.reference} is {in_words(record)}"
        raise CheckpointError(f"{inputs.settings.out}: {problem}; leave it out, and the run keeps its own")
    if record["of"] == FROM_FILE:
        attach_file(Path(settings.reference or record["path"]), plan, sets, _weights_of(inputs, record))
    return replace(inputs, reference=record)


def _record(inputs: RunInputs) -> dict[str, Any]:
    """Return the reference in the settings: `of` (start, base, file), `path`, SHA-256 of the `adapter` that it includes,
    and for a file of a merged model the digest of its weights. Without an adapter `start` is `base`."""
    settings, adapter = inputs.settings, inputs.settings.adapter
    if _is_base(settings):
        if settings.reference == BASE or adapter is None:
            return {"of": BASE}
        return {"of": START, "path": os.path.abspath(adapter), "adapter": adapter_digest(Path(adapter))}
    path = Path(settings.reference or "")
    key, record = key_of_file(path), {"of": FROM_FILE, "path": os.path.abspath(path)}
    if "adapter" in key:
        record["adapter"] = str(key["adapter"])
    elif adapter is not None and inputs.folder is not None and key.get("weights") != _of_weights(inputs)["weights"]:
        inputs.request.report("merging the adapter, to compare with the reference")
        if (merged := merged_digest(inputs.folder, Path(adapter))) == key.get("weights"):
            record["merged"] = merged
    return record


def _weights_of(inputs: RunInputs, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the key fields of a file of the run's initial model: with its adapter, merged with it, or without."""
    settings, fields = inputs.settings, _of_weights(inputs)
    if (merged := record.get("merged")) is not None:
        return fields | {"weights": merged}
    if "adapter" not in record:
        return fields
    recorded = {} if inputs.state is None else inputs.state.fields.get("reference", {})
    adapter = None if settings.adapter is None else adapter_digest(Path(settings.adapter))
    return fields | {"adapter": adapter or str(recorded.get("adapter", "none, because the run has no --adapter"))}


def in_words(record: Mapping[str, Any]) -> str:
    """Describe a reference in one line."""
    adapter = str(record.get("adapter", ""))[:12]
    match record["of"]:
        case "start":
            return on_one_line(f"the model with the adapter that the run begins with, {record.get('path')} (SHA-256 {adapter}...)")
        case "base":
            return "the model without an adapter"
    subject = f" with adapter {adapter}..." if adapter else ", of the model merged with the adapter" if "merged" in record else ""
    return on_one_line(f"the file {record.get('path')}{subject}")


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's two files."""
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, folder / TENSOR_FILE):
        try:
            digest.update(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give an adapter's folder") from None
    return digest.hexdigest()


def attach_initial_reference(inputs: RunInputs, store: TorchMachine) -> Path | None:
    """Attach log-probabilities of the initial model from a file in the run's folder. Written before the first step, or again if the
    file is gone and only adapters are trained. Return the file, or None without such a reference."""
    record, state = inputs.reference, inputs.state
    if record is None or record["of"] == FROM_FILE:
        return None
    path, adapter = Path(inputs.settings.out) / FILE_NAME, record.get("adapter")
    if state is None or (inputs.plan.semantics.train.lora is not None and not path.is_file()):
        if state is not None and adapter is not None:
            _return_to_adapter(path, record, store)
        try:
            write_reference(path, inputs, store, adapter)
        except Abandoned:
            raise PlanError("asked to end while the reference was made, before any step: nothing is saved; run again") from None
        if state is not None and adapter is not None:
            put_back(state, store.host, inputs.data)
    # The run's file is accepted even if a resumed run has another model folder
    attach_file(path, inputs.plan, inputs.reference_sets, {} if adapter is None else {"adapter": adapter})
    return path


def _return_to_adapter(path: Path, record: Mapping[str, Any], store: TorchMachine) -> None:
    """Load the adapter that a resumed run began with, to write its reference again."""
    folder = Path(str(record.get("path")))
    if store.plan.semantics.ranks > 1:
        raise CheckpointError(f"{path}: is gone, and several GPUs make it only before the first step; put it back")
    if adapter_digest(folder) != record["adapter"]:
        raise CheckpointError(f"{path}: is gone, and {folder} is no longer the adapter that it was made with; put it back")
    load_adapter(store, folder)


def _is_base(settings: RunSettings) -> bool:
    return settings.reference in (None, START, BASE)


def key_of_file(path: Path) -> dict[str, Any]:
    """Return the key of a reference file, or {} if it has none."""
    try:
        key = json.loads(read_tensors(path)[0].get("key", ""))
    except ValueError:
        return {}
    return key if isinstance(key, dict) else {}


def _key(plan: Plan) -> dict[str, str]:
    """Return the fields of a file's key, without the weights: they affect its values."""
    return _kind(plan) | {"model": plan.model.fingerprint} | {name: str(getattr(plan.semantics, name)) for name in _DECIDE}


def _kind(plan: Plan) -> dict[str, str]:
    """Return type and sequence length of a file's values. A student's plan shares them with its teacher's."""
    objective = plan.semantics.objective
    unit = "token" if TOKEN_REFERENCE in objective.inputs else "answer"
    top = f"the {objective.n_top} likeliest ids at temperature {objective.numbers.get('temperature', 1):g}"
    return {"kind": f"log-probabilities by {unit}" if objective.n_top is None else top, "seq_len": str(plan.semantics.seq_len)}


def _of_weights(inputs: RunInputs) -> dict[str, str]:
    """Return a digest of the model's weights, also for a resumed run."""
    settings, folder = inputs.settings, inputs.folder
    digest = None if settings.from_scratch or folder is None else weights_digest(folder)
    return {"weights": digest or f"random, by seed {settings.seed}"}


def write_reference(path: Path, inputs: RunInputs, machine: TorchMachine, adapter: str | None = None) -> int:
    """Write log-probabilities of `reference_sets` under the current weights, pass by pass: with the adapter of this digest, or
    without. Return the number of sequences. Abandoned after a stop request."""
    sets, report = inputs.reference_sets, inputs.request.report
    templates, parts = machine.compute.templates, {_name(part): (data, k) for data in sets for k, part in enumerate(data.parts)}
    outlines = {name: _meta_tensor(data.parts[k], machine.plan) for name, (data, k) in parts.items()}
    read, digest = {name: dict(data.parts[k].read) for name, (data, k) in parts.items()}, hashlib.sha256()

    def contents() -> Iterator[torch.Tensor]:
        for name, (data, k) in parts.items():
            n = len(data.parts[k].sequences)
            report(f"log-probabilities of {n:,} samples under the reference")
            for outputs, _ in forward_passes(machine, partial(_sample, data, k), n, inputs.request.stop):
                values = outputs[:, :, : outlines[name].shape[2]].contiguous() if outputs.dim() > 2 else outputs
                digest.update(values.numpy().data)
                yield values
        yield torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)

    n_bytes, n_free_bytes = sum(outline.nbytes for outline in outlines.values()), shutil.disk_usage(path.absolute().parent).free
    report(f"log-probabilities: a file of {show_bytes(n_bytes)}")
    if n_bytes > n_free_bytes:
        fewer = ", or plan with a smaller k" if machine.plan.semantics.objective.n_top else ""
        how = f"is to hold {show_bytes(n_bytes)}, and {show_bytes(n_free_bytes)} are free; make room{fewer}"
        raise CheckpointError(f"{path}: {how}")
    key, unfinished = _key(machine.plan) | _of_weights(inputs), path.with_name(path.name + ".partial")
    key |= {} if adapter is None else {"adapter": adapter}
    with writing(path), ExitStack() as undo:
        undo.callback(unfinished.unlink, missing_ok=True)
        unfinished.unlink(missing_ok=True)
        with templates.without_adapters() if adapter is None else nullcontext():
            digests = {DIGEST: torch.empty(digest.digest_size, dtype=torch.uint8)}
            write_tensors(unfinished, outlines | digests, contents(), {"key": json.dumps(key), "sets": json.dumps(read)})
        os.replace(unfinished, path)
    rows = {name: data.parts[k] for name, (data, k) in parts.items()}
    # One per segment if answers share sequences; answers of a group also count with a mismatched prompt
    return sum(
        len(outlines[name]) * outlines[name].shape[1]
        if part.n_slots is None
        else len(part.sequences.segments) * part.shape.rows_each // part.shape.segments_each
        for name, part in rows.items()
    )


def _sample(data: MapStyleData, k: int, i: int) -> Batch:
    return data.batch_of_samples([(k, i)])


def _name(part: PackedSet) -> str:
    """Return the tensor name of a set: a digest of everything that affects its tokens."""
    return f"logps.{hashlib.sha256(json.dumps(part.read).encode()).hexdigest()}"


def _meta_tensor(part: PackedSet, plan: Plan) -> torch.Tensor:
    """Return a meta tensor with the shape and dtype of a set in a file."""
    row = plan.semantics.objective.forward_output
    sizes = row.sizes(part.shape.rows_each, plan.semantics.seq_len, part.n_slots)
    return torch.empty(len(part.sequences), *sizes, dtype=getattr(torch, row.dtype), device="meta")


def attach_file(path: Path, plan: Plan, sets: Iterable[MapStyleData], extra: Mapping[str, str] = MappingProxyType({})) -> None:
    """Memory-map a reference file and attach it to each data set. CheckpointError for a damaged file, or another key or `extra`."""
    objective = plan.semantics.objective
    key, (fields, tensors) = (_kind(plan) if objective.n_top else _key(plan)) | dict(extra), read_tensors(path)
    how = _HOW if objective.n_top is None else _HOW_TEACHER
    try:
        stored, read = (json.loads(fields.get(name, "")) for name in ("key", "sets"))
    except ValueError:
        stored = read = None
    if not isinstance(stored, dict) or not isinstance(read, dict) or (digest := tensors.pop(DIGEST, None)) is None:
        raise CheckpointError(f"{path}: no file of a reference; {how}")
    stored = {"products": "compute"} | stored  # files of versions without FP8 products have no such field
    if not extra and stored.get("loss") == "fused" and key.get("loss") == "online":  # a run's file, written before plan format 4
        del key["loss"]
    names = dict.fromkeys([*key, *({"adapter"} & stored.keys() if objective.n_top is None else ())])
    if odd := next((name for name in names if stored.get(name) != key.get(name)), None):
        was, now = (str(fields_of.get(odd))[:60] for fields_of in (stored, key))
        raise CheckpointError(f"{path}: a reference of another {odd} ({was}, and here it is {now}); {how}")
    for number, data in enumerate(sets):
        set_tensors = [tensors.get(_name(part)) for part in data.parts]
        if number and objective.n_top is not None and set_tensors == [None]:  # held-out data is optional in a teacher's file
            continue
        for part, of_set in zip(data.parts, set_tensors, strict=True):
            outline = _meta_tensor(part, plan)
            if of_set is None or (of_set.shape, of_set.dtype) != (outline.shape, outline.dtype):
                same = [entry for entry in read.values() if isinstance(entry, dict) and entry.get("data") == part.read["data"]]
                odd = next((name for name in part.read if same and same[0].get(name) != part.read[name]), None)
                problem = "holds nothing of this data" if odd is None else _ODD[odd]
                raise CheckpointError(f"{path}: {problem} ({part.about[:80]}); {how}")
        data.references = {objective.forward_output: [tensor for tensor in set_tensors if tensor is not None]}
        if objective.n_top and not number:  # the model and weights of a teacher are free, but a resumed run needs the same teacher
            data.fingerprint = hashlib.sha256(data.fingerprint.encode() + digest.numpy().tobytes()).hexdigest()
    checksum, largest = hashlib.sha256(), 0
    for tensor in (tensors[name] for name in read if name in tensors):  # in the order of writing
        for piece in tensor.flatten().split(PIECE):
            checksum.update(piece.numpy().data)
        if objective.n_top:
            largest = max(largest, *(int(row[..., : 2 * objective.n_top].contiguous().view(torch.int32).max()) for row in tensor))
    if checksum.digest() != digest.numpy().tobytes():
        raise CheckpointError(f"{path}: damaged, its bytes are not those that were written; {how}")
    if largest >= (n_ids := plan.workload.blocks[0].parameters[0].shape[0]):
        raise CheckpointError(f"{path}: the teacher has id {largest}, and this model has {n_ids} ids; distil into one that has it")


def sets_with_reference(objective: Objective, data: RunData, held_out: RunData | None = None) -> list[MapStyleData]:
    """Return the data sets that need a reference file. DataError if the loss requires extras that files cannot have."""
    is_used = objective.has_first_pass or objective.n_top is not None
    used = [data, held_out if is_used else None]
    missing = [row.name for row in objective.inputs if row.source is Source.PROGRAM]
    if missing and any(isinstance(source, MapStyleData | Stream) for source in used):
        how = "which no file provides; give `train` an object with batch(step)"
        raise DataError(f"the plan's loss requires {missing[0]!r}, {how}")
    if objective.has_file and isinstance(data, Stream):
        raise DataError("a loss that has a reference takes data that is read before training; leave out --streaming")
    return [source for source in used if isinstance(source, MapStyleData) and objective.has_file]
