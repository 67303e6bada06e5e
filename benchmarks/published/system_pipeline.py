"""Simulation of task queues that share a machine.

The published systems are programs without a plan: one thread issues copies and kernels to streams, another thread follows. Each of
these is a queue. A queue runs one task at a time, in order of issue; a task also waits for tasks of other queues. Concurrent tasks
share the machine like elsewhere in Penstock (`planner.predict.region`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.planner.predict.region import Demand, Region, shares

TIE_FRACTION = 1e-12


@dataclass(frozen=True, slots=True)
class Task:
    """A task: its queue, its demand on the machine, and its dependencies."""

    queue: str
    demand: Demand
    dependencies: tuple[int, ...]


@dataclass(slots=True)
class Program:
    """Tasks in order of issue. `add` returns a task's number, for later tasks to depend on."""

    tasks: list[Task] = field(default_factory=list)

    def add(self, queue: str, demand: Demand, *dependencies: int | None) -> int:
        """Issue a task. None in `dependencies` is ignored."""
        earlier = tuple(sorted({i for i in dependencies if i is not None}))
        assert all(i < len(self.tasks) for i in earlier), "a task can only wait for earlier tasks"
        self.tasks.append(Task(queue, demand, earlier))
        return len(self.tasks) - 1


def ends_s(tasks: Sequence[Task], region: Region | None) -> list[float]:
    """Return the end time of each task. Without a region, tasks run at full speed."""
    names = sorted({task.queue for task in tasks})
    queues = [[i for i, task in enumerate(tasks) if task.queue == name] for name in names]
    position = [0] * len(queues)
    left_s: list[tuple[float, float] | None] = [None] * len(queues)  # remaining overhead and work of the current task
    finished: list[float | None] = [None] * len(tasks)
    now_s = 0.0
    while True:
        for q, queue in enumerate(queues):
            if left_s[q] is None and position[q] < len(queue):
                task = tasks[queue[position[q]]]
                if all(finished[i] is not None for i in task.dependencies):
                    left_s[q] = (task.demand.overhead_s, task.demand.alone_s)
        busy = [q for q, rest in enumerate(left_s) if rest is not None]
        if not busy:
            break
        working = [q for q in busy if left_s[q][0] <= 0.0]  # type: ignore[index]
        speed = dict.fromkeys(busy, 1.0)
        if region is not None and working:
            uses = tuple(tasks[queues[q][position[q]]].demand.uses for q in working)
            speed.update(zip(working, shares(uses, region), strict=True))
        next_s = {q: _stage_s(left_s[q], speed[q]) for q in busy}
        step_s = min(next_s.values())
        now_s += step_s
        for q in busy:
            remaining = left_s[q]
            assert remaining is not None
            overhead_s, work_s = remaining
            ends = next_s[q] <= step_s * (1 + TIE_FRACTION)
            if overhead_s > 0.0:
                left_s[q] = (0.0 if ends else overhead_s - step_s, work_s)
                if not ends or work_s > 0.0:
                    continue
            elif not ends:
                left_s[q] = (0.0, work_s - step_s * speed[q])
                continue
            finished[queues[q][position[q]]] = now_s
            left_s[q] = None
            position[q] += 1
    assert all(end is not None for end in finished), "a queue waits for a task that waits for it"
    return [end for end in finished if end is not None]


def _stage_s(remaining: tuple[float, float] | None, speed: float) -> float:
    assert remaining is not None
    overhead_s, work_s = remaining
    return overhead_s if overhead_s > 0.0 else work_s / speed
