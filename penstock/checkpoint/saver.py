"""Saver of a run: writes its checkpoints, by default on a background thread during training.

A checkpoint gets its name after the trainer has logged its step, so that the log is complete for a run that resumes from it. An
error on the thread, such as a full disk, ends the run at its next step; the previous checkpoint remains.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.runtime.host.host_state import Copy, HostState
from penstock.runtime.host.memory import DTYPE, available_host_bytes
from penstock.runtime.host.optimizer import Master
from penstock.runtime.host.rounding import group_bytes
from penstock.runtime.plan.workload import Parameter
from penstock.settings import CheckpointSettings

from .best import Best, write_best
from .checkpoint import CheckpointWriter, rewrite_fields
from .disk import new_folder
from .retention import keep_last, remove
from .snapshot import GivenUp, Snapshot, Snapshots

NICE = 10  # lanes get scarce cores first; a lane that waits for this thread leaves it a core


class StateReader(Protocol):
    """Tensors of a run's whole state: a `HostState`, or the shards of all ranks."""

    def compute_weight(self, p: Parameter, copy: Copy | None = None) -> torch.Tensor: ...
    def saved(self, p: Parameter, name: str, copy: Copy | None = None) -> torch.Tensor | Master: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a run's checkpoints in addition to the state."""

    fields: Callable[[int], Mapping[str, Any]]  # JSON part of the state after a step
    kept_files: Mapping[str, Path]  # tokenizer and others to copy, by name
    ends: tuple[int, ...]  # learned end tokens, added to those of generation
    chat_template: str | None  # a user's, instead of the model's
    towers_from: Path | None
    config: dict[str, Any]  # of config.json


class Saver:
    def __init__(
        self,
        state: HostState,
        reader: StateReader,
        folder: Path,
        settings: CheckpointSettings,
        contents: Contents,
        say: Callable[[str], None],
        first_step: int,
        best: Best | None = None,
    ) -> None:
        """The state after `first_step` is not saved. `best`: the best checkpoint up to it."""
        self._state, self._reader, self._plan, self._folder = state, reader, state.plan, folder
        self._settings, self._contents = settings, contents
        # Default: half of the memory that the plan leaves free; the rest is for the page cache.
        free_bytes = (available_host_bytes() or 0) // 2 if settings.copy_bytes is None else settings.copy_bytes
        copy_bytes = free_bytes if settings.background else 0
        self.snapshots = Snapshots(state, self.is_due_in_background, copy_bytes, say)
        self._changed = self.snapshots.changed
        self._kept_steps = set[int]()  # steps that a later checkpoint does not replace
        self._best = [] if best is None else [best]  # the best on disk, and better ones to be written
        self._logged: dict[int, Mapping[str, Any]] = {}  # `fields` by step to be saved
        self._written: Future[None] | None = None  # done when the thread has ended
        self._first = self._saved = first_step  # steps on disk: at the start, and the latest
        self._decided, self._due = first_step, set[int]()  # last step that `is_due` has decided; steps that are due
        self._next_s = self._in_time()
        self.waits_for_pause = False  # due states are saved by the trainer, between steps

    # -- schedule ---------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """True if the state after `step` steps is saved during the run. Decided once, because lane and trainer both call it."""
        with self._changed:
            if step > self._decided:
                self._decided = step
                if self._is_scheduled(step) or self.is_time():
                    self._due.add(step)
                    self._next_s = self._in_time()
            return step in self._due

    def is_time(self) -> bool:
        """True if the longest time without a checkpoint has passed."""
        return self._next_s is not None and time.monotonic() >= self._next_s

    def _in_time(self) -> float | None:
        return time.monotonic() + self._settings.minutes * 60 if self._settings.minutes else None

    def _is_scheduled(self, step: int) -> bool:
        return self._settings.every is not None and step % self._settings.every == 0

    def is_due_in_background(self, step: int) -> bool:
        """True if the state after `step` steps is saved while lanes are running."""
        return self._settings.background and not self.waits_for_pause and self.is_due(step)

    # -- on the trainer's thread ------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Save due states in the background. Wait for them at the end, except after an interrupt."""
        if not self._settings.background:
            yield
            return
        with ThreadPoolExecutor(1, "saver") as thread:
            thread.submit(_lower_priority).result()  # before the lanes change thread settings, which must persist
            self._state.gate, self._written = self.snapshots, thread.submit(self._work)
            try:
                yield
                self.wait()
            except Exception:
                self._finish()  # also after a lane has failed: the state of a snapshot does not change until it is written
                raise
            finally:
                self._state.gate = None
                self.snapshots.end()

    def is_logged(self, step: int) -> None:
        """Permit the checkpoint of a step to get its name; called after the step was logged. Raise an error of the thread."""
        self.raise_failure()
        if self.is_due_in_background(step):
            self._permit(step)

    def save(self, step: int, stays: bool = False) -> None:
        """Save the current state, unless it is on disk, without waiting for the thread. All lanes must be idle. `stays`: keep this
        checkpoint after the next one."""
        self._kept_steps |= {step} if stays else set()
        if step == self._saved:
            return
        self.snapshots.ask_for(step)
        self._permit(step)
        if self._state.gate is None:
            snapshot = self.snapshots.begun()
            assert snapshot is not None
            self._write(snapshot)

    def keep_best(self, best: Best) -> None:
        """Save the current state, like `save`, as the best so far. The former best stays until this one is written."""
        with self._changed:
            self._best.append(best)
            is_written = best.step == self._saved
        self.save(best.step)
        if is_written:
            self._retain(best.step)

    def save_again(self, step: int) -> None:
        """Write the fields of a step again if its checkpoint is on disk: a loop has changed them."""
        if step == self._saved and step != self._first:
            rewrite_fields(self._folder / f"checkpoint-{step}", self._contents.fields(step))

    def _permit(self, step: int) -> None:
        fields = self._contents.fields(step)
        with self._changed:
            if step != self._saved:
                self._logged[step] = fields
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until every requested state is written. Raise an error of the thread."""
        self._finish()
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.snapshots.is_over and self._written is not None:
            self._written.result()

    def _finish(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._logged or self.snapshots.is_over)

    # -- on the writer thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with suppress(GivenUp), torch.no_grad():
                while (snapshot := self.snapshots.begun()) is not None:
                    self._write(snapshot)
        finally:
            self.snapshots.end()  # release all waiters, because nothing more is written

    def _write(self, snapshot: Snapshot) -> None:
        plan, contents, only_weights = self._plan, self._contents, {"weights_only": True} if self._settings.weights_only else {}
        with new_folder(self._folder / f"checkpoint-{snapshot.step}") as folder:
            files = CheckpointWriter(folder)
            while (entry := self.snapshots.next_block(snapshot)) is not None:
                block, copy = entry
                self._state.settle(block)
                self._write_block(files, block, copy)
                del copy, entry
                self.snapshots.is_written(snapshot, block)
            if plan.semantics.train.lora is not None:
                frozen = [p.name for block in plan.workload.blocks for p in block.parameters if p.frozen]
                files.write_adapter(plan.semantics.train.lora, plan.model, frozen)
            else:
                constants = dict(sorted(self._state.constants.items(), key=lambda item: -item[1].itemsize))  # for alignment
                outlines = {name: torch.empty_like(value, device="meta") for name, value in constants.items()}
                if constants:
                    files.write_weights("model-constants.safetensors", plan.model.config, outlines, constants.__getitem__)
                if contents.towers_from is not None:
                    files.copy_towers(contents.towers_from, plan.model.config, not plan.semantics.train.projector)
                files.write_config(contents.config, DTYPE[plan.semantics.compute_dtype])
            files.copy_files(contents.kept_files, plan.model.config, contents.ends, contents.chat_template)
            with self._changed:  # wait until the step is logged
                self._changed.wait_for(lambda: snapshot.step in self._logged or self.snapshots.is_over)
                if snapshot.step not in self._logged:
                    raise GivenUp
                fields = self._logged[snapshot.step]
            files.finish(snapshot.step, {**fields, "n_updates": snapshot.n_updates, **only_weights})
        self._retain(snapshot.step)
        with self._changed:
            self._saved = snapshot.step
            del self._logged[snapshot.step]
            self._changed.notify_all()

    def _retain(self, step: int) -> None:
        """Name the best checkpoint up to `step`, which is written, and delete checkpoints that the settings do not keep."""
        with self._changed:
            written = [best for best in self._best if best.step <= step]
            self._best = written[-1:] + [best for best in self._best if best.step > step]
            protected = {best.step for best in self._best}
        if written:
            write_best(self._folder, written[-1])
        if self._settings.keep is not None:
            keep_last(self._folder, self._settings.keep, step, protected)
            return
        # saved by time alone, or as the best of a time: a long run would fill the disk with these
        passing = {self._saved, *(best.step for best in written)} - {self._first, step} - protected - self._kept_steps
        remove(self._folder / f"checkpoint-{passed}" for passed in sorted(passing) if not self._is_scheduled(passed))

    # -- the content -----------------------------------------------------------------------------------------------

    def _write_block(self, files: CheckpointWriter, block: int, copy: Copy | None) -> None:
        """Write a block's weights, and the optimizer state of its trained parameters. One weight at a time is in memory."""
        state, semantics, blocks = self._state, self._plan.semantics, self._plan.workload.blocks
        trained = state.owned[block]
        if semantics.train.lora is not None:
            files.adapter |= {p.name: torch.cat([*self._pieces(p, "master", copy)]).view(p.shape).float() for p in trained}
        else:
            owned = {p.name: p for p in blocks[block].parameters if p.tied_to is None}
            outlines = _outlines(owned.values(), semantics.compute_dtype)
            file = f"model-{block + 1:05d}-of-{len(blocks):05d}.safetensors"
            files.write_weights(
                file, self._plan.model.config, outlines, lambda name: self._live_reader().compute_weight(owned[name], copy)
            )
        if trained and not self._settings.weights_only:
            kinds = sorted(semantics.saved_state.items(), key=lambda kind: -DTYPE[kind[1]].itemsize)
            outlines = {f"{kind}.{name}": outline for kind, dtype in kinds for name, outline in _outlines(trained, dtype).items()}
            pieces = (self._pieces(p, kind, copy) for kind, _ in kinds for p in trained)
            files.write_tensors(f"optimizer-{block:05d}.safetensors", outlines, chain.from_iterable(pieces))

    def _pieces(self, p: Parameter, name: str, copy: Copy | None) -> Iterator[torch.Tensor]:
        """Yield the master or a moment of a parameter. A split master is in pieces, because a whole one would be a second copy."""
        held, dtype = self._live_reader().saved(p, name, copy), DTYPE[self._plan.semantics.saved_state[name]]
        return (piece.to("cpu", dtype) for piece in ((held,) if isinstance(held, torch.Tensor) else held.pieces()))

    def _live_reader(self) -> StateReader:
        """Return the reader. Raise GivenUp if writing is no longer needed."""
        self.snapshots.look()
        return self._reader


def _lower_priority() -> None:
    """Lower the priority of this thread, so that lanes get scarce cores first."""
    with suppress(OSError, AttributeError):  # a system without thread priorities
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    torch.set_num_threads(1)


def _outlines(parameters: Iterable[Parameter], dtype: str) -> dict[str, torch.Tensor]:
    """Return meta tensors of the saved shapes. int8 moments are flat groups of bytes."""
    shapes = {p.name: (group_bytes(p.n_elements),) if dtype == "int8" else p.shape for p in parameters}
    return {name: torch.empty(shape, dtype=DTYPE[dtype], device="meta") for name, shape in shapes.items()}
