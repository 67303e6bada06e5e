"""Memory traffic and allocations of the host's optimizer, counted from the arguments of its kernels."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.planner.predict.cost import update_bytes_per_param
from penstock.runtime.host import compiled_loops, optimizer
from penstock.runtime.host.chunks import Scratch
from penstock.runtime.plan import Policy, Update
from penstock.runtime.plan.workload import BlockKind
from penstock.runtime.units import KiB
from tests.tiny import tiny_config
from tests.training import plan_of, semantics_of, trained

from .test_optimizer import KINDS, SETTINGS, random_state, update_


def moved_per_param(kind: str, gradient_dtype: torch.dtype, monkeypatch) -> float:
    """Return bytes of a kernel's arrays: one load per element, one store per state element. Scratch is in a cache."""
    assert Scratch().block.nbytes <= 32 * KiB
    n, moved = 3 * optimizer.TASK_ELEMENTS // 2, list[int]()

    def update(start, end, state, random, gradient, scalars, scratch) -> None:
        (target, *_), (parts, n_parts, *_) = state, gradient
        arrays = [array for array in target if array is not None]
        moved.append((end - start) * (sum(2 * array.itemsize for array in arrays) + sum(part.itemsize for part in parts[:n_parts])))

    monkeypatch.setattr(compiled_loops, "update", update)
    monkeypatch.setattr(optimizer, "update_kernel", lambda layout: optimizer._compiled_tasks)
    update_(random_state(kind, n, seed=1), torch.randn(n).to(gradient_dtype), 0.5, 2, SETTINGS)
    return sum(moved) / n


MOVED_BYTES = {"split": 26, "bf16": 22, "fp32": 28}  # the last with fp32 gradients of fp32 compute
SEMANTICS = {"bf16": {"master_dtype": "bf16"}, "fp32": {"compute_dtype": "fp32", "gradient_dtype": "fp32"}}


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_moves_the_bytes_that_the_planner_counts(kind, monkeypatch):
    """26 for a split master."""
    semantics = semantics_of("llama", **SEMANTICS.get(kind, {}))
    plan = plan_of(tiny_config("llama"), semantics, Policy(accumulation_group=4))
    layer = next(b for b, block in enumerate(plan.workload.blocks) if block.kind is BlockKind.LAYER)
    assert moved_per_param(kind, torch.float32 if kind == "fp32" else torch.bfloat16, monkeypatch) == MOVED_BYTES[kind]
    assert update_bytes_per_param(plan, layer) == MOVED_BYTES[kind]


@pytest.mark.parametrize("tied", [False, True])
def test_the_hosts_lane_allocates_next_to_nothing(tied):
    """A copy of a vocabulary's gradient takes gigabytes outside the plan, and page faults in every step."""
    policy = Policy(update=Update.DEFERRED, speculate_blocks=(0, 2))
    plan = plan_of(tiny_config("llama", tie_word_embeddings=tied), semantics_of("llama"), policy)
    machine = trained(plan, n_steps=1)
    tensors = [*(scratch.block for scratch in machine._workers._scratch), *machine.arenas.slabs.values()]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    largest, n_calls = 0, 0

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest, n_calls
            out = func(*args, **(kwargs or {}))
            n_calls += 1
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    with torch.no_grad(), Watching():
        for index, op in enumerate(plan.ops):
            if op.lane == "cpu":
                machine.perform(index, op, 0)
    assert n_calls > 100
    assert largest <= 256  # a sum of squares for each parameter


def test_views_of_an_update_are_made_once(monkeypatch):
    """Except those of a block with a shadow: a commit moves its state."""
    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy(update=Update.DEFERRED, speculate_blocks=(2,)))
    machine, blocks = trained(plan, n_steps=1), set[int]()
    place = machine.host.place
    monkeypatch.setattr(machine.host, "place", lambda p: blocks.add(machine.host.block_of(p)) or place(p))
    with torch.no_grad():
        for index, op in enumerate(plan.ops):
            if op.lane == "cpu":
                machine.perform(index, op, 0)
    assert blocks == {2}
