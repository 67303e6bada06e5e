"""How is a checkpoint written while training goes on?

By a thread of its own, block by block, from a snapshot. It gets its name once the trainer has logged the step: a run that resumes
from it finds the log complete up to there. What goes wrong in the thread ends the run at the next step; but where the disk is full,
what is half written is removed, and the state is saved when there is room, as it then is. Training goes on; its end waits.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.settings import CheckpointSettings
from runtime.executor import Stop
from runtime.host.host_state import Copy, HostState
from runtime.host.memory import DTYPE, available_host_bytes
from runtime.host.optimizer import Master
from runtime.plan.workload import Parameter

from .adapter_files import peft_name
from .retention import keep_last, remove
from .room import NoRoomError, Wanted
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
        stop: Stop | None = None,
    ) -> None:
        """`fields(step)` is what the state after `step` steps is besides its tensors, as JSON. That after `first_step`, with which
        a run began, needs no saving. `stop.request()` ends a wait for room: NoRoomError."""
        self._state, self._plan, self._folder, self._settings = state, state.plan, folder, settings
        self._fields, self._tokenizer_from, self._say, self._stop = fields, tokenizer_from, say, stop or Stop()
        self.snapshots = Snapshots(state, self.is_due_meanwhile, copy_bytes(settings) if settings.background else 0, say)
        self._permitted: dict[int, Mapping[str, Any]] = {}  # by step, until it is saved: what its state says besides
        self._is_over = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._saved = first_step  # the step of the last that is on disk
        self._decided, self._due = first_step or 0, set[int]()  # the last step of which is known whether it is due; those that are
        self._next_s = self._in_time()
        self._wanted: Wanted | None = None  # room for a checkpoint that found none
        self._put_off = set[int]()  # steps whose state found no room
        self._n_tries = 0  # to write it
        self._by_clock = set[int]()  # steps after which it was time

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` steps is saved, though the run goes on. Decided when first asked: a lane and the trainer
        ask, and hear the same."""
        with self._changed:
            if step > self._decided:
                self._decided = step
                is_scheduled = self._settings.every is not None and step % self._settings.every == 0
                if self._wanted.has_come() if self._wanted is not None else is_scheduled or self.is_time():
                    self._due.add(step)
                    if self._wanted is None and not is_scheduled:
                        self._by_clock.add(step)
                    self._next_s, self._wanted = self._in_time(), None
            return step in self._due

    def is_time(self) -> bool:
        """Whether nothing was saved for as long as may be."""
        return self._next_s is not None and time.monotonic() >= self._next_s

    def _in_time(self) -> float | None:
        return time.monotonic() + self._settings.minutes * 60 if self._settings.minutes else None

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
            self._wait_for_room()
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

    def _wait_for_room(self) -> None:
        """Until the state after the last step, if it was put off, is written."""
        if self._put_off and self._wanted is not None and self._failure is None:
            self._say(self._wanted.words("no more steps are made, and the run waits"))
        is_last = self._stop.is_requested
        while self._put_off and self._wanted is not None and self._failure is None:
            self._wanted.wait(self._stop, is_last)
            self._ask_again(max(self._put_off))
            self._finish()

    def is_logged(self, step: int) -> None:
        """Between steps; raises what went wrong in the thread."""
        self.raise_failure()
        if self.is_due_meanwhile(step):
            self.permit(step)

    def permit(self, step: int) -> None:
        """All that belongs to the step is logged: its checkpoint may get its name."""
        fields = self._fields(step)
        with self._changed:
            if step != self._saved and step not in self._put_off:
                self._permitted[step] = fields
            self._changed.notify_all()

    def save(self, step: int) -> None:
        """While all lanes are idle: the state as it is, unless it is on disk. Returns at once if there is a thread to write it,
        else when it is written."""
        if step == self._saved:
            return
        is_last = self._stop.is_requested
        self._ask_again(step)
        while self._state.gate is None:
            snapshot = self.snapshots.begun()
            assert snapshot is not None
            self._write(snapshot)
            if self._wanted is None:
                return
            self._wanted.wait(self._stop, is_last)
            self._ask_again(step)

    def _ask_again(self, step: int) -> None:
        """For the state as it is; also where it found no room before."""
        with self._changed:
            self._put_off.discard(step)
            self.snapshots.ask_for(step)
            self.permit(step)

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
        """All of it, or nothing where there is no room."""
        try:
            self._written(snapshot)
        except NoRoomError:
            self._no_room(snapshot)
            return
        if self._settings.keep is not None:
            keep_last(self._folder, self._settings.keep, snapshot.step)
        elif self._saved in self._by_clock:  # what nobody asked for shall not fill the disk
            remove([self._folder / f"checkpoint-{self._saved}"])
        if self._n_tries:
            self._say(f"there was room again: checkpoint-{snapshot.step} is written")
        with self._changed:
            self._saved, self._wanted, self._n_tries = snapshot.step, None, 0
            self._put_off.clear()
            del self._permitted[snapshot.step]
            self._changed.notify_all()

    def _no_room(self, snapshot: Snapshot) -> None:
        """Save later: the state as it then is."""
        with self._changed:
            self.snapshots.drop(snapshot)
            self._n_tries += 1
            n_bytes = self._plan.checkpoint_bytes(self._settings.weights_only)
            self._wanted = wanted = Wanted(self._folder / f"checkpoint-{snapshot.step}", n_bytes, self._n_tries)
            self._put_off.add(snapshot.step)
            self._permitted.pop(snapshot.step, None)
            if self._n_tries == 1:
                self._say(wanted.words("the run waits" if self._state.gate is None else "it is tried again"))
            self._changed.notify_all()

    def _written(self, snapshot: Snapshot) -> None:
        state = self._state
        with writing(self._folder, snapshot.step) as files:
            self._expect(files)
            self._put_frozen(files)
            while (found := self.snapshots.next_block(snapshot)) is not None:
                block, copy = found
                state.settle(block)
                for p in state.owned(block):
                    self.snapshots.look()
                    self._put(files, p, copy)
                del copy, found
                self.snapshots.is_written(snapshot, block)
            fields = self._permission(snapshot.step)
            only = {"weights_only": True} if self._settings.weights_only else {}
            files.finish({**fields, "n_updates": snapshot.n_updates, **only})

    def _permission(self, step: int) -> Mapping[str, Any]:
        with self._changed:
            while step not in self._permitted:
                if self._is_over:
                    raise GivenUp
                self._changed.wait()
            return self._permitted[step]

    def _expect(self, files: Writing) -> None:
        plan, blocks, lora = self._plan, range(len(self._plan.workload.blocks)), self._plan.semantics.train.lora
        if lora is not None:
            factors = {p.name: p.shape for b in blocks for p in self._state.owned(b)}
            files.expect_adapter(lora, factors, plan.model.path or plan.model.name, self._tokenizer_from)
        else:
            dtype, owned = DTYPE[plan.semantics.compute_dtype], self._state.all_owned()
            files.expect_model({p.name: _outline(dtype, p) for p in owned}, plan.model.config, self._tokenizer_from)
        for block in blocks if not self._settings.weights_only else ():
            tensors: dict[str, torch.Tensor] = {}
            for p in self._state.owned(block):
                tensors |= {f"{kind}.{p.name}": _outline(DTYPE[of], p) for kind, of in plan.semantics.saved_state.items()}
            files.expect(f"optimizer-{block:05d}.safetensors", tensors)

    def _put_frozen(self, files: Writing) -> None:
        """What no step changes of a model that is trained in part. Of adapters there is no more than they are."""
        for p in self._state.all_owned() if self._plan.semantics.train.lora is None else ():
            if p.frozen:
                self.snapshots.look()
                files.put_weight(p.name, self._state.compute_weight(p))

    def _put(self, files: Writing, p: Parameter, copy: Copy | None) -> None:
        """Everything of a parameter. A split master is put together in pieces: whole, it would be a second one."""
        held_parts = dict(self._state.saved(p, copy))
        if self._plan.semantics.train.lora is not None:  # an adapter's files have its masters
            files.put(peft_name(p.name), _whole(held_parts["master"], torch.float32, p))
        else:
            files.put_weight(p.name, self._state.compute_weight(p, copy).cpu())
        if self._settings.weights_only:
            return
        for kind, dtype in self._plan.semantics.saved_state.items():
            files.put(f"{kind}.{p.name}", _whole(held_parts[kind], DTYPE[dtype], p))


def _whole(held: torch.Tensor | Master, dtype: torch.dtype, p: Parameter) -> torch.Tensor | LazyTensor:
    """What is held of a parameter, as a file has it."""
    if isinstance(held, Master):
        return LazyTensor(dtype, p.shape, partial(_pieces, held, dtype))
    return held.view(p.shape).to("cpu", dtype)


def _pieces(master: Master, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    return (piece.to("cpu", dtype) for piece in master.pieces())


def _outline(dtype: torch.dtype, p: Parameter) -> torch.Tensor:
    return torch.empty(p.shape, dtype=dtype, device="meta")


def copy_bytes(settings: CheckpointSettings) -> int:
    """How much memory copies may take. If nothing is said, half of what the host has free: the rest is for the files' own
    caches, and for what else runs there. Called when the plan's memory has been taken."""
    return settings.copy_bytes if settings.copy_bytes is not None else (available_host_bytes() or 0) // 2
