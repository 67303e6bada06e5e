"""How is a checkpoint written while training goes on?

By a thread of its own, block by block, from a snapshot. It gets its name once the trainer has logged the step: a run that resumes
from it finds the log complete up to there. What goes wrong in the thread ends the run at the next step.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from runtime.host.host_state import Copy, HostState
from runtime.host.memory import DTYPE, available_host_bytes
from runtime.host.optimizer import pieces_of
from runtime.plan.workload import Parameter
from runtime.settings import CheckpointSettings

from .retention import keep_last
from .saving import Writing, writing
from .snapshot import GivenUp, Snapshot, Snapshots
from .tensor_files import LazyTensor

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
        first_step: int | None = None,
    ) -> None:
        """`fields(step)` is what the state after `step` steps is besides its tensors, as JSON. That after `first_step`, with which
        a run began, needs no saving."""
        self._state, self._plan, self._folder, self._settings = state, state.plan, folder, settings
        self._fields, self._tokenizer_from = fields, tokenizer_from
        self.snapshots = Snapshots(state, self.is_due_meanwhile, copy_bytes(settings) if settings.background else 0, say)
        self._permitted: dict[int, Mapping[str, Any]] = {}  # by step, until it is saved: what its state says besides
        self._is_over = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._saved = first_step  # the step of the last that is on disk

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` steps is saved, though the run goes on."""
        return self._settings.every is not None and step % self._settings.every == 0

    def is_due_meanwhile(self, step: int) -> bool:
        """Whether that is done while lanes are at work."""
        return self._settings.background and self.is_due(step)

    # -- the trainer's thread ---------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within, states that are due are saved while lanes are at work. At the end all that may be saved has been; after an
        interrupt nothing is waited for."""
        if not self._settings.background:
            yield
            return
        is_ready = threading.Event()
        thread = threading.Thread(target=self._work, args=(is_ready,), name="saver", daemon=True)
        self._state.gate = self.snapshots
        thread.start()
        is_ready.wait()  # its settings come before those of the lanes, which are to stay
        try:
            yield
            self._finish()
            self.raise_failure()
        except Exception:
            self._finish()  # also when a lane has failed: the state of a snapshot is kept until it is written
            raise
        finally:
            self._state.gate = None
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            self.snapshots.end()
            thread.join()

    def is_logged(self, step: int) -> None:
        """Between steps; raises what went wrong in the thread."""
        self.raise_failure()
        if self.is_due_meanwhile(step):
            self.permit(step)

    def permit(self, step: int) -> None:
        """All that belongs to the step is logged: its checkpoint may get its name."""
        fields = self._fields(step)
        with self._changed:
            if step != self._saved:
                self._permitted[step] = fields
            self._changed.notify_all()

    def save(self, step: int) -> None:
        """While all lanes are idle: the state as it is, unless it is on disk. Returns at once if there is a thread to write it."""
        if step == self._saved:
            return
        self.snapshots.ask_for(step)
        self.permit(step)
        if self._state.gate is None:
            snapshot = self.snapshots.begun()
            assert snapshot is not None
            self._write(snapshot)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _finish(self) -> None:
        with self._changed:
            while self._permitted and self._failure is None:
                self._changed.wait()

    # -- the thread that writes -------------------------------------------------------------------------------------

    def _work(self, is_ready: threading.Event) -> None:
        with suppress(OSError, AttributeError):  # a system where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        torch.set_num_threads(1)
        is_ready.set()
        try:
            with torch.no_grad():
                while (snapshot := self.snapshots.begun()) is not None:
                    self._write(snapshot)
        except GivenUp:
            pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self.snapshots.end()  # nothing waits for what will not be written

    def _write(self, snapshot: Snapshot) -> None:
        state = self._state
        with writing(self._folder, snapshot.step) as files:
            self._expect(files)
            while (found := self.snapshots.next_block(snapshot)) is not None:
                block, copy = found
                state.settle(block)
                for p in state.owned(block):
                    self.snapshots.look()
                    self._put(files, p, copy)
                del copy, found
                self.snapshots.is_written(snapshot, block)
            fields = self._permission(snapshot.step)
            files.finish({**fields, "n_updates": snapshot.n_updates})
        if self._settings.keep is not None:
            keep_last(self._folder, self._settings.keep, snapshot.step)
        with self._changed:
            self._saved = snapshot.step
            del self._permitted[snapshot.step]
            self._changed.notify_all()

    def _permission(self, step: int) -> Mapping[str, Any]:
        with self._changed:
            while step not in self._permitted:
                if self._is_over:
                    raise GivenUp
                self._changed.wait()
            return self._permitted[step]

    def _expect(self, files: Writing) -> None:
        plan, blocks = self._plan, range(len(self._plan.workload.blocks))
        dtype = DTYPE[plan.semantics.compute_dtype]
        weights = {p.name: _outline(dtype, p) for b in blocks for p in self._state.owned(b)}
        files.expect_model(weights, plan.model.config, self._tokenizer_from)
        for block in blocks:
            tensors: dict[str, torch.Tensor] = {}
            for p in self._state.owned(block):
                tensors[f"master.{p.name}"] = _outline(DTYPE[plan.semantics.master_dtype], p)
                tensors |= {f"{moment}.{p.name}": _outline(torch.float32, p) for moment in ("exp_avg", "exp_avg_sq")}
            files.expect(f"optimizer-{block:05d}.safetensors", tensors)

    def _put(self, files: Writing, p: Parameter, copy: Copy | None) -> None:
        """Everything of a parameter. A split master is put together in pieces: whole, it would be a second one."""
        files.put_weight(p.name, self._state.compute_weight(p, copy).cpu())
        state, dtype = self._state.param_state(p, copy=copy), DTYPE[self._plan.semantics.master_dtype]
        files.put(f"master.{p.name}", LazyTensor(dtype, p.shape, lambda: (piece.cpu() for piece in pieces_of(state.master))))
        files.put(f"exp_avg.{p.name}", state.exp_avg.cpu())
        files.put(f"exp_avg_sq.{p.name}", state.exp_avg_sq.cpu())


def _outline(dtype: torch.dtype, p: Parameter) -> torch.Tensor:
    return torch.empty(p.shape, dtype=dtype, device="meta")


def copy_bytes(settings: CheckpointSettings) -> int:
    """How much memory copies may take. If nothing is said, half of what the host has free: the rest is for the files' own
    caches, and for what else runs there. Called when the plan's memory has been taken."""
    return settings.copy_bytes if settings.copy_bytes is not None else (available_host_bytes() or 0) // 2
