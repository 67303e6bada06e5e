"""Stored outputs of a vision tower: a folder of memory-mapped files, written once, which runs and ranks share.

Each file holds the features of some images by the digest of their pixels, and a key: tower weights, processor, precision, kind of
device, versions, and the stage, before a trained projector or after a frozen one. A folder with another key is rejected. A killed
pass continues with the missing images.
"""

# B sequences, T tokens, N image tokens, D width of the decoder
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.disk import writing
from penstock.checkpoint.tensor_files import Shards, read_metadata, write_tensors
from penstock.data.documents import Documents
from penstock.data.image_processor import ImageReader
from penstock.data.images import pillow_version
from penstock.data.sampling import MapStyleData
from penstock.data.tokenizer import reason_of
from penstock.runtime.batch import Batch, Images
from penstock.runtime.errors import CheckpointError, DataError
from penstock.runtime.executor import Stop
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.layers.transformers_patches import types_argument, version
from penstock.runtime.plan import Plan

from .tower import Tower, tower_digest, tower_model

FORMAT = 1
FILE_BYTES, FILE_IMAGES = 2**28, 256  # limits of one file, so of the work that a killed pass repeats
STAGES = ("before the projector", "after the projector")
_PREFIX, _UNFINISHED = "images-", ".partial"
OLD_S = 24 * 3600  # an unfinished file is of a pass that was killed
Report = Callable[[str], None]
Rows = Sequence[tuple[Documents, set[tuple[int, int]]]]  # (file, row) by data set


def attach_images(
    sets: Sequence[MapStyleData],
    plan: Plan,
    model: Path | None,
    where: tuple[str | None, Path],
    device: str,
    report: Report,
    stop: Stop,
) -> int:
    """Attach the features of all images of the data sets, after computing missing ones. Return the number of images, 0 for texts.

    `model`: its folder; `where`: a folder of the user, or the cache, which has a folder per key.
    """
    tables = [part.documents for data in sets for part in data.parts]
    readers = [table.reader.images for table in tables if table.has_images and table.reader is not None]
    if model is None or not readers or readers[0] is None:
        return 0
    projects = not plan.semantics.train.projector
    key = {
        **{"format": FORMAT, "stage": STAGES[projects], "tower": tower_digest(model, plan.model.config, projects)},
        **{"processor": readers[0].digest, "dtype": plan.semantics.compute_dtype, "device": device},
        **{"transformers": version, "torch": torch.__version__, "pillow": pillow_version()},
    }
    named, cache = where
    folder = Path(named) if named is not None else cache / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    stored = StoredOutputs(folder, key, plan.model.config, readers[0])
    n_images = stored.complete(tables, model, torch.device(device), report, stop)
    for data in sets:
        data.add_images = stored.add_to
    return n_images


class StoredOutputs:
    """Features of images by digest, in the files of a folder."""

    def __init__(self, folder: Path, key: dict[str, Any], config: dict[str, Any], reader: ImageReader) -> None:
        """CheckpointError for a folder with another key."""
        self.folder, self.key, self.config, self.reader, self._lock = folder, key, config, reader, Lock()
        self._body = tower_model(config, torch.float32).base_model  # for positions
        self._has_positions = callable(getattr(self._body, "get_rope_index", None))
        self._takes_types = types_argument(self._body) is not None
        self._files = Shards(files := sorted(folder.glob(f"{_PREFIX}*.safetensors")))
        self.form: dict[str, Any] = {}
        for path in files:
            fields, stored_key = read_metadata(path), dict[str, Any]()
            with suppress(ValueError, KeyError):
                stored_key, self.form = json.loads(fields["key"]), json.loads(fields["form"])
            odd = next((name for name, value in key.items() if stored_key.get(name) != value), None)
            if odd is not None:
                problem = f"image features of another {odd} than this run's ({str(key[odd])[:40]})"
                raise CheckpointError(f"{path}: {problem}; name another folder, or make them with `penstock forward --tower`")

    def complete(self, tables: Sequence[Documents], model: Path, device: torch.device, report: Report, stop: Stop) -> int:
        """Compute the features of images that are not stored yet. Return the number of images. CheckpointError after a stop."""
        wanted, rows, known = dict[str, int](), list[tuple[Documents, set[tuple[int, int]]]](), {*self._files}
        for documents in tables:
            places = set[tuple[int, int]]()
            for d in range(len(documents.lengths)):
                images = {image["sha256"]: image["n_tokens"] for image in documents.images(d)}
                wanted |= images
                places |= {documents.place(d)} if images.keys() - known else set()
            rows.append((documents, places))
        if missing := {sha: n for sha, n in wanted.items() if sha not in known}:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            report(f"the vision tower: 0 of {len(missing):,} images")
            tower = Tower(model, self.config, DTYPE[self.key["dtype"]], device, self.key["stage"] == STAGES[True])
            self._compute(rows, missing, tower, report, stop)
        if gone := missing.keys() - {*self._files}:
            numbered = ((table, d) for table in tables for d in range(len(table.lengths)))
            where = next(table.where(d) for table, d in numbered if any(image["sha256"] in gone for image in table.images(d)))
            raise DataError(f"{where}: an image changed after this row was read; run again")
        return len(wanted)

    def _compute(self, rows: Rows, missing: dict[str, int], tower: Tower, report: Report, stop: Stop) -> None:
        batch = dict[str, Tensor]()
        for n_done, (sha, tensors) in enumerate(self._features(rows, missing, tower), start=1):
            batch |= {sha if kind == "features" else f"{sha}.{kind}": tensor for kind, tensor in tensors.items()}
            if n_done % FILE_IMAGES == 0 or sum(t.nbytes for t in batch.values()) >= FILE_BYTES:
                self._write(batch, tower)
                report(f"the vision tower: {n_done:,} of {len(missing):,} images")
                batch = {}
            if stop.is_requested:
                raise CheckpointError("asked to end while image features were made: those that are done are kept; run again")
        self._write(batch, tower)
        self._files = Shards(sorted(self.folder.glob(f"{_PREFIX}*.safetensors")))

    def _features(self, rows: Rows, missing: dict[str, int], tower: Tower) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the digest of each missing image, once, and its features by kind."""
        finished = set[str]()
        for documents, places in rows:
            assert documents.reader is not None
            for where, source in documents.reader.images_of(places):
                assert documents.reader.images is not None
                sha, inputs = documents.reader.images.tower_inputs(source, where)
                if sha in missing and sha not in finished:
                    finished.add(sha)
                    with _fitting(where):
                        tensors = tower.features(inputs)
                    if (n := len(tensors["features"])) != missing[sha]:
                        problem = f"its processor makes {missing[sha]:,} tokens of an image, its tower {n:,} features"
                        raise DataError(f"{where}: {problem}; copy the processor again from the model")
                    yield sha, tensors

    def _write(self, batch: dict[str, Tensor], tower: Tower) -> None:
        if not batch:
            return
        self.form = {"is_listed": tower.is_listed, "n_added": tower.n_added, "width": tower.width, "shape": tower.shape}
        batch = dict(sorted(batch.items(), key=lambda item: -item[1].itemsize))  # for alignment
        path = self.folder / f"{_PREFIX}{hashlib.sha256(''.join(batch).encode()).hexdigest()[:24]}.safetensors"
        unfinished = path.with_name(f"{path.name}.{os.getpid()}{_UNFINISHED}")
        with writing(path):
            unfinished.unlink(missing_ok=True)
            write_tensors(unfinished, batch, batch.values(), {"key": json.dumps(self.key), "form": json.dumps(self.form)})
            os.replace(unfinished, path)

    def _remove_unfinished(self) -> None:
        """Remove the files of killed passes, not those of other processes at work."""
        for path in self.folder.glob(f"{_PREFIX}*{_UNFINISHED}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > OLD_S:
                    path.unlink()

    def add_to(self, batch: Batch, rows: Sequence[tuple[Documents, Sequence[Sequence[Sequence[int]]]]]) -> Batch:
        """Return the batch with the features, positions and token types of its rows. Batches of text have them, too, because
        evaluation joins batches."""
        kinds, places = {kind: list[Tensor]() for kind in self._kinds}, list[tuple[Tensor | None, Tensor | None]]()
        for ids_T, (documents, of_row) in zip(batch.input_ids, rows, strict=True):
            shown = [[image for d, start, _ in part if start == 0 for image in documents.images(d)] for part in of_row]
            digests = [image["sha256"] for images in shown for image in images]
            for kind, tensors in kinds.items():
                tensors.append(self._concatenated(kind, digests))
            lengths = [sum(stop - start for _, start, stop in part) for part in of_row]
            if batch.document_tokens is None:  # positions go on in the padding, as in the model's own forward
                lengths[-1] = len(ids_T) - sum(lengths[:-1])
            places.append(self._places(ids_T, lengths, shown))
        positions_of_images = tuple((ids_T == self.reader.token_id).nonzero()[:, 0] for ids_T in batch.input_ids)
        positions, types = map(_stacked, zip(*places, strict=True))
        fields = {**self.form, "shape": (*self.form["shape"],), **{kind: tuple(tensors) for kind, tensors in kinds.items()}}
        return replace(batch, images=Images(places=positions_of_images, positions=positions, token_types=types, **fields))

    @cached_property
    def _kinds(self) -> dict[str, None]:
        """Kinds of stored tensors: `features`, and those that a trained projector reads."""
        return {"features": None} | dict.fromkeys(sorted({name.partition(".")[2] for name in self._files} - {""}))

    def _concatenated(self, kind: str, digests: Sequence[str]) -> Tensor:
        """Return the stored tensors of some images, concatenated; without images an empty one."""
        first = next(name for name in self._files if "." not in name)
        with self._lock:
            stored = [self._tensor(kind, sha) for sha in digests or [first]]
        return torch.cat(stored) if digests else stored[0][:0]

    def _tensor(self, kind: str, sha: str) -> Tensor:
        name = sha if kind == "features" else f"{sha}.{kind}"
        return self._files[name] if name in self._files else torch.zeros(len(self._files[sha]), dtype=torch.int64)

    def _places(
        self, ids_T: Tensor, lengths: Sequence[int], shown: Sequence[list[dict[str, Any]]]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Positions (3, T) of each document by the model's own function, and token types (T); None for models without these."""
        if not self._has_positions and not self._takes_types:
            return None, None
        types_T = torch.tensor(self.reader.processor.create_mm_token_type_ids([ids_T.tolist()])[0])
        types_T[sum(lengths) :] = 0
        if not self._has_positions:
            return None, types_T
        parts, offset = [], 0
        for n, images in zip(lengths, shown, strict=True):
            ids, types = ids_T[None, offset : offset + n], types_T[None, offset : offset + n]
            grids = torch.tensor([image["grid"] for image in images]) if images else None
            parts.append(self._body.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)[0][:, 0])
            offset += n
        parts.append(torch.arange(len(ids_T) - offset).expand(3, -1))
        return torch.cat(parts, dim=1), None


@contextmanager
def _fitting(where: str) -> Iterator[None]:
    """Convert an error of a tower that gets pixels of other shapes to a DataError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"the tower does not take the pixels of its processor ({reason_of(error)})"
        raise DataError(f"{where}: {problem}; copy the processor again from the model") from None


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None
