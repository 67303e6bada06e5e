"""How does a GPU perform an op?

The lanes of compute and of the link's two directions each own a stream. Their threads only issue ops; that one op is done before
another is left to events: `mark` records one on the lane's stream, `follow` makes the other stream, or the host's own lane, wait
for it. So an executor's "done" means issued, and how far the host runs ahead is bounded by what its own lane, which does real
work, waits for.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from runtime.batch import Batch
from runtime.compute.attention import use_attention
from runtime.compute.inference import Head
from runtime.host.chunks import Scratch
from runtime.host.optimizer import AdamW
from runtime.host.workers import Workers
from runtime.lane_thread import LaneRun, LaneThread
from runtime.plan import Kind, Lane, Op, Plan
from runtime.plan.timeline import Span

from .cores import split_beside_gpu
from .staging import Staging
from .stopwatch import Stopwatch
from .streams import CudaStreams, Event, Stream, Streams
from .torch_machine import TorchMachine


class _Token:
    """An event that others may wait for. It goes back to the pool when nobody can ask for it any more."""

    __slots__ = ("event", "pool")

    def __init__(self, event: Event, pool: list[Event]) -> None:
        self.event, self.pool = event, pool

    def __del__(self) -> None:
        self.pool.append(self.event)


class _Losses:
    """For each step whose loss nobody has asked for: an event, reached when all of it that was issued has been added up."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.tokens: dict[int, _Token] = {}

    def are_there(self, step: int) -> None:
        if (token := self.tokens.pop(step, None)) is not None:
            self._streams.wait(token.event)


class CudaMachine(TorchMachine):
    """Performs a plan on a GPU. The optimizer has the host's cores; a lane that only issues needs little of one."""

    def __init__(
        self,
        plan: Plan,
        batches: Callable[[int], Batch],
        settings: Callable[[int], AdamW],
        seed: int = 0,
        streams: Streams | None = None,
    ) -> None:
        """Allocate and pin every arena and build the templates; the host state is zero until weights are set."""
        _sum_in_fp32()
        use_attention(plan.semantics.attention_kernel)
        self.streams = streams or CudaStreams()
        self._gpu_thread = LaneThread(Lane.GPU)  # for all runs: what cuDNN keeps per thread is then kept once
        self._stream: dict[Lane, Stream] = {lane: self.streams.stream() for lane in Lane if lane is not Lane.CPU}
        with self.streams.current(self._stream[Lane.GPU]):
            self._staging = Staging(plan.semantics, batches, self.streams, self._stream[Lane.GPU])
            self._losses = _Losses(self.streams)
            super().__init__(plan, self._staging.upload, settings, self.streams.device, seed, self._losses.are_there)
        self.streams.finish(self._stream[Lane.GPU])  # which has filled the arenas with zeros
        cores = sorted(os.sched_getaffinity(0))
        self.arenas.touch(len(cores))
        self.streams.lock(self.arenas)
        self._stopwatch: Stopwatch | None = Stopwatch(plan, self.streams, self._stream)
        self._awaited = _awaited(plan)
        self._last: dict[Lane, int] = {}  # the op that each lane has performed last
        self._cores = split_beside_gpu(cores)
        self._updates.workers = Workers(len(self._cores[1]), Scratch)
        self.host.n_threads = len(cores)
        self._events: list[Event] = []  # which no token holds

    @contextmanager
    def forwards(self, plan: Plan, batches: Callable[[int], Batch], head: Head) -> Iterator[None]:
        stream, own = self._stream[Lane.GPU], (self._staging, self._stopwatch, self._awaited)
        with self.streams.current(stream):
            self._staging = Staging(plan.semantics, batches, self.streams, stream)
        self._stopwatch, self._awaited = None, _awaited(plan)  # nobody asks how long which op took
        try:
            with super().forwards(plan, self._staging.upload, head):
                yield
        finally:
            self._staging, self._stopwatch, self._awaited = own

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> LaneRun:
        return self._gpu_thread.run(work) if lane is Lane.GPU else super().on_thread(lane, work)

    @contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        self.forget(lane)
        issuing_cores, host_cores = self._cores
        if lane is Lane.CPU:
            with self._settled(host_cores), self._updates.workers.helped(lambda: self._settled(host_cores)):
                yield
            return
        stream = self._stream[lane]
        with self._settled(issuing_cores), self.streams.current(stream):
            try:
                yield
            finally:  # also after a failure: no copy may still write to the host, and what a kernel did wrong is said
                self.streams.finish(stream)

    @contextmanager
    def _settled(self, cores: list[int]) -> Iterator[None]:
        """The calling thread, which is this lane's alone: its cores, one thread inside a kernel of the CPU, and no autograd."""
        os.sched_setaffinity(0, cores)  # 0: the calling thread
        torch.set_num_threads(1)
        with torch.no_grad():
            yield

    def perform(self, index: int, op: Op, step: int) -> None:
        self._last[op.lane] = index
        if op.lane is Lane.CPU:
            self.work(index, op, step)
            return
        streams, stream = self.streams, self._stream[op.lane]
        if op.lane is Lane.GPU:
            self._staging.fill(step)
        timers = self._stopwatch.around(index, step) if self._stopwatch is not None else ()
        for begin in timers[:1]:
            streams.record(begin, stream)
        streams.issue(stream, op.name, partial(self.work, index, op, step))
        for end in timers[1:]:
            streams.record(end, stream)
        if op.kind is Kind.LOSS or (op.kind is Kind.FORWARD and op.block == 0):  # which read tokens
            self._staging.issued(step)
        if op.kind is Kind.LOSS:
            self._losses.tokens[step] = self._recorded(op.lane)

    def work(self, index: int, op: Op, step: int) -> None:
        """What an op does, in its stream where it has one."""
        super().perform(index, op, step)

    def _recorded(self, lane: Lane) -> _Token:
        """Reached when the lane's stream has done all that it was given so far."""
        try:
            event = self._events.pop()
        except IndexError:
            event = self.streams.event()
        self.streams.record(event, self._stream[lane])
        return _Token(event, self._events)

    def mark(self, op: Op) -> object:
        if op.lane is Lane.CPU or self._last[op.lane] not in self._awaited:
            return None  # what the host did is done
        return self._recorded(op.lane)

    def follow(self, lane: Lane, token: object) -> None:
        assert isinstance(token, _Token)
        if lane is Lane.CPU:
            self.streams.wait(token.event)
        else:
            self.streams.order(self._stream[lane], token.event)

    def device_peak_bytes(self) -> int | None:
        return self.streams.peak_bytes()

    def device_name(self) -> str | None:
        return self.streams.name

    def measured(self, spans: Sequence[Span]) -> Sequence[Span]:
        return self._stopwatch.read(spans) if self._stopwatch is not None else spans


def _sum_in_fp32() -> None:
    """A product is rounded once, at its end, whatever the process did before.

    Else cuBLAS, where it splits the inner dimension (a weight's gradient has one of all tokens), adds the parts in bf16.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _awaited(plan: Plan) -> set[int]:
    return {wait.op for op in plan.ops for wait in op.waits}
