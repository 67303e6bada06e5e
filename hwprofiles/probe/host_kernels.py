"""Host benchmarks: AdamW updates, sums of squares, memory copies and first touch, on a slab of memory in the layout of a run.

The slab holds optimizer state in slots of one layer each, arrays one after another as in `runtime/host/host_state.py`:

    weight bf16 | remainder int16 | first moment fp32 | second moment fp32 | next slot ... | gradients bf16, layer by layer

Successive calls continue through the slab, so that no call finds the previous call's memory in a cache. Arrays have the sizes of
real layers, not powers of two, because arrays 2^28 bytes apart take three times as long.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from penstock.hwprofiles.components import ITEM_BYTES
from penstock.runtime.host import norms, optimizer
from penstock.runtime.host.chunks import Scratch
from penstock.runtime.plan import Lane
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.units import GB, KiB, MiB

from .kernels_to_time import Benchmark

Task = Callable[[Scratch], object]  # part of a benchmark, for any thread
Together = Callable[[Sequence[Callable[[None], object]]], None]  # performs calls on all host threads

SETTINGS = AdamW(lr=1e-5, weight_decay=0.1)
CLIP_FACTOR = 0.5  # not 1, which would skip the multiplication
LAYER_ELEMENTS = (233_057_792, 46_797_824, 14_912_384)  # Qwen2.5-7B, 1.5B and 0.5B; the largest that fits SLOTS times is used
SLOTS = 3
STATE_BYTES, GRADIENT_BYTES = 12, 2  # per element
ALIGN_ELEMENTS = 128
TRAFFIC_BYTES = 8 * MiB + 12 * KiB  # one copy within host memory
TASKS_PER_THREAD = 8  # per call, so that uneven ends of threads matter little
FRESH_BYTES = 130 * MiB  # so large that the allocator returns untouched pages
MEMORY_FRACTION, MOST_FRACTION = 1 / 3, 1 / 2  # slab over free host memory: by default, and at most, if caches require more
LEAST_BYTES = GB // 4
CACHES, CACHES_FACTOR = Path("/sys/devices/system/cpu"), 4


def slab_bytes(free_bytes: int, most_bytes: int) -> int:
    """Return the slab size: min(memory / 3, `most_bytes`), raised to four times all last-level caches but at most memory / 2."""
    caches_bytes = min(CACHES_FACTOR * cache_bytes(), int(MOST_FRACTION * free_bytes))
    return max(min(int(MEMORY_FRACTION * free_bytes), most_bytes), caches_bytes) // (4 * KiB) * (4 * KiB)


@lru_cache
def cache_bytes() -> int:
    """Return the total size of the last-level caches."""
    last: dict[str, int] = {}
    for cache in CACHES.glob("cpu[0-9]*/cache/index3"):
        with suppress(OSError, ValueError):
            last[(cache / "shared_cpu_list").read_text()] = int((cache / "size").read_text().removesuffix("K\n")) * KiB
    return sum(last.values())


def layer_elements(n_bytes: int) -> int:
    """Return the elements of a slot: the largest layer with SLOTS slots in `n_bytes`, or one slot that fills a smaller slab."""
    each_bytes = STATE_BYTES + GRADIENT_BYTES
    fits = (n for n in LAYER_ELEMENTS if SLOTS * each_bytes * n <= n_bytes)
    return next(fits, n_bytes // each_bytes // ALIGN_ELEMENTS * ALIGN_ELEMENTS)


def updates(n_threads: int, n_bytes: int = LEAST_BYTES) -> Benchmark:
    """Time AdamW on split master weights and bf16 gradients."""
    return _of_threads(Benchmark("optimizer", "optimizer", tasks=update_tasks, amount=optimizer.TASK_ELEMENTS), n_threads, n_bytes)


def squares(n_threads: int, n_bytes: int = LEAST_BYTES) -> Benchmark:
    """Time sums of squares for the gradient norm, over bf16 gradients that fill the slab."""
    amount = optimizer.TASK_ELEMENTS * ITEM_BYTES["bf16"]
    return _of_threads(Benchmark("host memory", "sum of squares", tasks=square_tasks, amount=amount), n_threads, n_bytes)


def traffic(n_cores: int, n_bytes: int = LEAST_BYTES) -> Benchmark:
    """Time copies within host memory on all cores; every byte counts twice, as read and written."""
    task = Benchmark("host memory", "host copies", tasks=copy_tasks, amount=2 * TRAFFIC_BYTES, is_on_all_cores=True)
    return _of_threads(task, n_cores, n_bytes)


def first_touch(n_bytes: int = LEAST_BYTES) -> Benchmark:
    """Time the first write to fresh memory of the allocator; the slab is not used."""
    return Benchmark("host memory", "first touch", None, Lane.CPU, FRESH_BYTES, tasks=touch_tasks, n_tasks=1, slab_bytes=n_bytes)


def _of_threads(task: Benchmark, n: int, slab_bytes: int) -> Benchmark:
    """Return the benchmark on n threads, with TASKS_PER_THREAD tasks of the size of `task` per thread and call."""
    work = replace(task, name=f"{task.name} on {n} threads", lane=Lane.CPU, slab_bytes=slab_bytes, n_tasks=TASKS_PER_THREAD * n)
    return replace(work, amount=work.n_tasks * task.amount, point={"threads": n}, n_threads=n)


# -- tasks of one pass over a slab; creating them fills the slab ----------------------------------------------------------


def update_tasks(slab: torch.Tensor, together: Together) -> list[Task]:
    """Return the full tasks of AdamW over every slot, without the shorter last task of a slot, so that tasks are equal."""
    n = layer_elements(slab.numel())
    n_slots = slab.numel() // ((STATE_BYTES + GRADIENT_BYTES) * n)
    states, gradients, _ = slab.tensor_split([n_slots * STATE_BYTES * n, n_slots * (STATE_BYTES + GRADIENT_BYTES) * n])
    tasks, fills = list[Task](), list[Callable[[None], None]]()
    block = _random_state()
    for slot, gradient in zip(states.split(STATE_BYTES * n), _arrays(gradients, n), strict=True):
        weight, remainder, moments = slot[: 2 * n], slot[2 * n : 4 * n], slot[4 * n :].view(torch.float32)
        master = optimizer.Master(weight.view(torch.bfloat16), remainder.view(torch.int16))
        state = optimizer.ParamState(master, (moments[:n], moments[n:]))
        step = optimizer.Step(state, optimizer.summed(gradient), CLIP_FACTOR, 10, SETTINGS)
        tasks += step.tasks()[: max(1, n // optimizer.TASK_ELEMENTS)]
        fills += [partial(_fill, *pair) for pair in zip((*state.tensors, gradient), block, strict=True)]
    together(fills)
    return tasks


def square_tasks(slab: torch.Tensor, together: Together) -> list[Task]:
    """Return the full tasks over layer gradients that fill the slab."""
    n = min(LAYER_ELEMENTS[0], slab.numel() // GRADIENT_BYTES)
    gradients, values = list(_arrays(slab, n)), _random_state()[-1]
    together([partial(_fill, gradient, values) for gradient in gradients])
    n_tasks = max(1, n // optimizer.TASK_ELEMENTS)
    return [task for gradient in gradients for task in norms.squares_tasks(optimizer.summed(gradient))[:n_tasks]]


def copy_tasks(slab: torch.Tensor, together: Together) -> list[Task]:
    """Return copies from the first half of the slab to the second."""
    half = slab.numel() // 2
    n = half // TRAFFIC_BYTES * TRAFFIC_BYTES
    pairs = zip(slab[half : half + n].split(TRAFFIC_BYTES), slab[:n].split(TRAFFIC_BYTES), strict=True)
    return [lambda _, target=target, source=source: target.copy_(source) for target, source in pairs]  # type: ignore[misc]


def touch_tasks(slab: torch.Tensor, together: Together) -> list[Task]:
    return [lambda _: torch.empty(FRESH_BYTES, dtype=torch.uint8).fill_(1)]


def _arrays(memory: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    """Return views of the memory as consecutive bf16 arrays of n elements, without the remainder."""
    return (part.view(torch.bfloat16) for part in memory[: memory.numel() // (2 * n) * 2 * n].split(2 * n))


def _random_state() -> list[torch.Tensor]:
    """Return weight, remainder, moments and gradient of one task, random."""
    values, moment, gradient = (torch.randn(optimizer.TASK_ELEMENTS) for _ in range(3))
    remainder = torch.empty_like(values, dtype=torch.int16)
    master = optimizer.Master(torch.empty_like(values, dtype=torch.bfloat16), remainder)
    master.put(slice(None), values)
    return [master.weight, remainder, moment * 1e-3, moment.square() * 1e-6, gradient.bfloat16()]


def _fill(array: torch.Tensor, block: torch.Tensor, _: None) -> None:
    """Repeat a block through an array."""
    for part in array.split(block.numel()):
        part.copy_(block[: part.numel()])
