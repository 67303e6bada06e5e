"""Memory traffic and allocations of the host's optimizer, counted from the calls of its loops."""

from collections import OrderedDict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.predict.cost import update_bytes_per_param
from runtime.host import chunks, norms, optimizer
from runtime.host.chunks import Scratch
from runtime.host.norms import sum_of_squares
from runtime.plan import Policy, Update
from runtime.plan.workload import BlockKind
from tests.tiny import tiny_config
from tests.training import plan_of, semantics_of, trained
from tests.updating import update_

from .test_optimizer import KINDS, SETTINGS, random_state


class Cache(TorchDispatchMode):
    """What a cache that holds whole operands, and drops the least recently used, reads from memory and writes to it.

    An operand is a range of bytes. Those of scratch memory are in the cache from the start, and use up room like all others.
    """

    def __init__(self, n_bytes: int, scratch: Scratch) -> None:
        super().__init__()
        self.n_bytes, self.read_bytes, self.written_bytes = n_bytes, 0, 0
        names = ("wide", "bits", "gradient", "rounded")
        self._scratch = {getattr(scratch, name).untyped_storage().data_ptr() for name in names}
        self._lines: OrderedDict[tuple[int, int], tuple[bool, bool]] = OrderedDict()  # (address, bytes) to (dirty, of scratch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name.startswith(("aten::narrow", "aten::view", "aten::alias", "aten::slice", "aten::detach")):
            return out
        overwrites = func._schema.name in ("aten::copy_", "aten::zero_")
        for declared, found in self._given(func, args, kwargs or {}):
            for tensor in found if isinstance(found, (list, tuple)) else [found]:
                if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                    is_written = declared.alias_info is not None and declared.alias_info.is_write
                    self._touch(tensor, not is_written or not (overwrites or declared.is_out), is_written)
        return out

    @staticmethod
    def _given(func, args, kwargs):
        for number, declared in enumerate(func._schema.arguments):
            if number < len(args):
                yield declared, args[number]
            elif declared.name in kwargs:
                yield declared, kwargs[declared.name]

    def _touch(self, tensor: torch.Tensor, is_read: bool, is_written: bool) -> None:
        key = tensor.data_ptr(), tensor.nbytes
        dirty, is_scratch = self._lines.pop(key, (None, tensor.untyped_storage().data_ptr() in self._scratch))
        if is_read and dirty is None and not is_scratch:
            self.read_bytes += tensor.nbytes
        self._lines[key] = bool(dirty) or is_written, is_scratch
        while sum(n for _, n in self._lines) > self.n_bytes:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        (_, n), (dirty, is_scratch) = self._lines.popitem(last=False)
        self.written_bytes += n if dirty and not is_scratch else 0

    def moved_bytes(self) -> int:
        """Read and written until now, all that is in the cache going back."""
        while self._lines:
            self.drop_oldest()
        return self.read_bytes + self.written_bytes


def moved_per_param(kind: str, gradient_dtype: torch.dtype, monkeypatch) -> float:
    interpreted(monkeypatch)
    n, own = 8 * chunks.UPDATE_ELEMENTS, Scratch()
    state, gradient = random_state(kind, n, seed=1), torch.randn(n).to(gradient_dtype)
    with torch.no_grad(), Cache(4 * 2**20, own) as cache:
        update_(state, gradient, 0.5, 2, SETTINGS, scratch=own)
        return cache.moved_bytes() / n


def interpreted(monkeypatch):
    """Loops run by the interpreter, whose calls are seen."""
    monkeypatch.setattr(chunks, "run_update", chunks.update_chunks)
    monkeypatch.setattr(norms, "run_squares", chunks.squares_of_chunks)
    monkeypatch.setattr(chunks, "run_add", chunks.add_chunks)


MOVED_BYTES = {"split": 26, "bf16": 22, "fp32": 28}  # the last with fp32 gradients, as fp32 compute has
SEMANTICS = {"bf16": {"master_dtype": "bf16"}, "fp32": {"compute_dtype": "fp32", "gradient_dtype": "fp32"}}


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_moves_the_bytes_that_the_planner_counts(kind, monkeypatch):
    """Counted from what the loop's calls read and write: 26 for a split master."""
    semantics = semantics_of("llama", **SEMANTICS.get(kind, {}))
    plan = plan_of(tiny_config("llama"), semantics, Policy(accumulation_group=4))
    layer = next(b for b, block in enumerate(plan.workload.blocks) if block.kind is BlockKind.LAYER)
    assert moved_per_param(kind, torch.float32 if kind == "fp32" else torch.bfloat16, monkeypatch) == MOVED_BYTES[kind]
    assert update_bytes_per_param(plan, layer) == MOVED_BYTES[kind]


def test_norm_and_sum_pass_over_memory_once(monkeypatch):
    n, own = 8 * chunks.UPDATE_ELEMENTS, Scratch()
    part, total = torch.randn(n).bfloat16(), torch.zeros(n)
    interpreted(monkeypatch)
    with torch.no_grad(), Cache(4 * 2**20, own) as cache:
        sum_of_squares(part, own)
        assert cache.moved_bytes() == 2 * n
    with torch.no_grad(), Cache(4 * 2**20, own) as cache:
        for task in optimizer.add_tasks(total, part, is_first=False):
            task(own)
        assert cache.moved_bytes() == (2 + 4 + 4) * n


@pytest.mark.parametrize("tied", [False, True])
def test_the_hosts_lane_allocates_next_to_nothing(tied, monkeypatch):
    """Whole copies of a vocabulary's gradient would be gigabytes that no plan counts, and any copy page faults in every step."""
    interpreted(monkeypatch)
    policy = Policy(update=Update.DEFERRED, speculate_blocks=(0, 2))
    plan = plan_of(tiny_config("llama", tie_word_embeddings=tied), semantics_of("llama"), policy)
    machine = trained(plan, n_steps=1)
    scratch = [t for own in machine._workers._own for t in (own.wide, own.bits, own.gradient, own.rounded)]
    known = {tensor.untyped_storage().data_ptr() for tensor in scratch} | {
        slab.data_ptr() for slab in machine.arenas.slabs.values()
    }
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
