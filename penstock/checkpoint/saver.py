"""The saver of a run: writes its checkpoints, by default on a thread of its own while training goes on.

A checkpoint gets its name once the trainer has logged its step, so that a run that resumes from it finds the log complete up to
there. A failure of the thread, a full disk too, ends the run at its next step; the checkpoint before stands.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from penstock.runtime.host.host_state import Copy, HostState
from penstock.runtime.host.memory import DTYPE, available_host_bytes
from penstock.runtime.host.rounding import group_bytes
from penstock.runtime.plan.workload import Parameter
from penstock.settings import CheckpointSettings

from .checkpoint import CheckpointWriter
from .disk import new_folder
from .retention import keep_last, remove
from .snapshot import GivenUp, Snapshot, Snapshots

NICE = 10  # where cores are short the lanes have them; a lane that waits for this thread leaves it one


class Saver:
    """Writes the checkpoints of a run."""

    def __init__(
        self,
        state: HostState,
        folder: Path,
        settings: CheckpointSettings,
        fields: Callable[[int], Mapping[str, Any]],
        tokenizer_from: Path | None,
        say: Callable[[str], None],
        first_step: int = 0,
        towers_from: Path | None = None,
        of_head: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`fields(step)`: the JSON part of the state after `step` steps. That after `first_step` is not saved. `of_head`: what the
        configuration says of a head of the run's own."""
        self._state, self._plan, self._folder, self._settings = state, state.plan, folder, settings
        self._fields, self._tokenizer_from, self._towers_from = fields, tokenizer_from, towers_from
        self._of_head = dict(of_head)
        # Where the settings do not say, half of what is free once the plan has taken its own; the rest is for the page cache.
        free_bytes = (available_host_bytes() or 0) // 2 if settings.copy_bytes is None else settings.copy_bytes
        copy_bytes = free_bytes if settings.background else 0
        self.snapshots = Snapshots(state, self.is_due_in_background, copy_bytes, say)
        self._changed = self.snapshots.changed
        self._stay = set[int]()  # asked for, which a later one does not replace
        self._logged: dict[int, Mapping[str, Any]] = {}  # by step to be saved: its `fields`
        self._written: Future[None] | None = None  # done when the thread has ended
        self._first = self._saved = first_step  # the step on disk that the run began with, and the last one
        self._decided, self._due = first_step, set[int]()  # the last step that `is_due` has decided; those that are
        self._next_s = self._in_time()

    # -- when -------------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` steps is saved while the run goes on: decided once, as lane and trainer both ask."""
        with self._changed:
            if step > self._decided:
                self._decided = step
                if self._is_scheduled(step) or self.is_time():
                    self._due.add(step)
                    self._next_s = self._in_time()
            return step in self._due

    def is_time(self) -> bool:
        """Whether the longest time without a checkpoint is over."""
        return self._next_s is not None and time.monotonic() >= self._next_s

    def _in_time(self) -> float | None:
        return time.monotonic() + self._settings.minutes * 60 if self._settings.minutes else None

    def _is_scheduled(self, step: int) -> bool:
        return self._settings.every is not None and step % self._settings.every == 0

    def is_due_in_background(self, step: int) -> bool:
        """Whether it is saved while lanes are at work."""
        return self._settings.background and self.is_due(step)

    # -- on the trainer's thread ------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within, states that are due are saved in the background; at the end all are written. An interrupt waits for nothing."""
        if not self._settings.background:
            yield
            return
        with ThreadPoolExecutor(1, "saver") as thread:
            thread.submit(_give_way).result()  # before the lanes make thread settings, which are to stay
            self._state.gate, self._written = self.snapshots, thread.submit(self._work)
            try:
                yield
                self.wait()
            except Exception:
                self._finish()  # also when a lane has failed: the state of a snapshot is kept until it is written
                raise
            finally:
                self._state.gate = None
                self.snapshots.end()

    def is_logged(self, step: int) -> None:
        """Called after each step's line in the log: its checkpoint may get its name. Raises what went wrong in the thread."""
        self.raise_failure()
        if self.is_due_in_background(step):
            self._permit(step)

    def save(self, step: int, stays: bool = False) -> None:
        """While all lanes are idle: save the state as it is, unless it is on disk; a thread that is at work is not waited for.
        `stays`: not only until the next is saved."""
        self._stay |= {step} if stays else set()
        if step == self._saved:
            return
        self.snapshots.ask_for(step)
        self._permit(step)
        if self._state.gate is None:
            snapshot = self.snapshots.begun()
            assert snapshot is not None
            self._write(snapshot)

    def _permit(self, step: int) -> None:
        fields = self._fields(step)
        with self._changed:
            if step != self._saved:
                self._logged[step] = fields
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all that was to be saved is written; raises what went wrong in the thread."""
        self._finish()
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.snapshots.is_over and self._written is not None:
            self._written.result()

    def _finish(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._logged or self.snapshots.is_over)

    # -- on the thread that writes ----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with suppress(GivenUp), torch.no_grad():
                while (snapshot := self.snapshots.begun()) is not None:
                    self._write(snapshot)
        finally:
            self.snapshots.end()  # nothing waits for what will not be written

    def _write(self, snapshot: Snapshot) -> None:
        plan, only_weights = self._plan, {"weights_only": True} if self._settings.weights_only else {}
        with new_folder(self._folder / f"checkpoint-{snapshot.step}") as folder:
            files = CheckpointWriter(folder)
            while (found := self.snapshots.next_block(snapshot)) is not None:
                block, copy = found
                self._state.settle(block)
                self._write_block(files, block, copy)
                del copy, found
                self.snapshots.is_written(snapshot, block)
            if plan.semantics.train.lora is not None:
                files.write_adapter(plan.semantics.train.lora, plan.model.path or plan.model.name)
            else:
                constants = self._state.constants
                outlines = {name: torch.empty_like(value, device="meta") for name, value in constants.items()}
                if constants:
                    files.write_weights("model-constants.safetensors", plan.model.config, outlines, constants.__getitem__)
                if self._towers_from is not None:
                    files.copy_towers(self._towers_from, plan.model.config)
                files.write_config(plan.model.config | self._of_head, DTYPE[plan.semantics.compute_dtype])
            if self._tokenizer_from is not None:
                files.copy_tokenizer(self._tokenizer_from)
            with self._changed:  # until the step is logged
                self._changed.wait_for(lambda: snapshot.step in self._logged or self.snapshots.is_over)
                if snapshot.step not in self._logged:
                    raise GivenUp
                fields = self._logged[snapshot.step]
            files.finish(snapshot.step, {**fields, "n_updates": snapshot.n_updates, **only_weights})
        if self._settings.keep is not None:
            keep_last(self._folder, self._settings.keep, snapshot.step)
        elif self._saved != self._first and not (self._is_scheduled(self._saved) or self._saved in self._stay):
            remove([self._folder / f"checkpoint-{self._saved}"])  # saved by time alone: a long run would fill the disk with these
        with self._changed:
            self._saved = snapshot.step
            del self._logged[snapshot.step]
            self._changed.notify_all()

    # -- the content -----------------------------------------------------------------------------------------------

    def _write_block(self, files: CheckpointWriter, block: int, copy: Copy | None) -> None:
        """A block's weights, and the optimizer's tensors of those that are trained; one weight at a time is in memory."""
        state, semantics, blocks = self._state, self._plan.semantics, self._plan.workload.blocks
        trained = state.owned[block]
        if semantics.train.lora is not None:
            files.adapter |= {p.name: torch.cat([*self._pieces(p, "master", copy)]).view(p.shape).float() for p in trained}
        else:
            owned = {p.name: p for p in blocks[block].parameters if p.tied_to is None}
            outlines = _outlines(owned.values(), semantics.compute_dtype)
            file = f"model-{block + 1:05d}-of-{len(blocks):05d}.safetensors"
            files.write_weights(
                file, self._plan.model.config, outlines, lambda name: self._looked().compute_weight(owned[name], copy)
            )
        if trained and not self._settings.weights_only:
            kinds = sorted(semantics.saved_state.items(), key=lambda kind: -DTYPE[kind[1]].itemsize)
            outlines = {f"{kind}.{name}": of for kind, dtype in kinds for name, of in _outlines(trained, dtype).items()}
            pieces = (self._pieces(p, kind, copy) for kind, _ in kinds for p in trained)
            files.write_tensors(f"optimizer-{block:05d}.safetensors", outlines, chain.from_iterable(pieces))

    def _pieces(self, p: Parameter, name: str, copy: Copy | None) -> Iterator[torch.Tensor]:
        """The master or a moment of a parameter; what is split comes in pieces, as a whole one would be a second copy."""
        held, dtype = self._looked().saved(p, name, copy), DTYPE[self._plan.semantics.saved_state[name]]
        return (piece.to("cpu", dtype) for piece in ((held,) if isinstance(held, torch.Tensor) else held.pieces()))

    def _looked(self) -> HostState:
        """The state; GivenUp if there is no need to go on writing."""
        self.snapshots.look()
        return self._state


def _give_way() -> None:
    """Let the lanes have the cores where these are short."""
    with suppress(OSError, AttributeError):  # a system where threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    torch.set_num_threads(1)


def _outlines(parameters: Iterable[Parameter], dtype: str) -> dict[str, torch.Tensor]:
    """Moments in int8 are flat groups, as they are kept."""
    shapes = {p.name: (group_bytes(p.n_elements),) if dtype == "int8" else p.shape for p in parameters}
    return {name: torch.empty(shape, dtype=DTYPE[dtype], device="meta") for name, shape in shapes.items()}
