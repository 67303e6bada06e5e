"""Base weights on a disk: identical bits, reads past the page cache, and one line if the disk fails."""

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.runtime.errors import DiskError
from penstock.runtime.executor import execute
from penstock.runtime.host import base_file
from penstock.runtime.host.base_file import BaseFile, is_in_memory
from penstock.runtime.host.updates import NonFiniteError
from penstock.runtime.plan import Lane, Plan, Policy, Update, saves
from penstock.runtime.plan.train import Lora, Train
from tests.lanes import diagonal, mostly_slow
from tests.late_streams import Poisoned, machine_of
from tests.tiny import tiny_config
from tests.training import differences, machine_for, plain, plan_of, semantics_of, streamed, trained

LORA = Train(lora=Lora(rank=4, alpha=8.0))
LAYERS = (("num_hidden_layers", 4),)
POLICIES = [
    Policy(disk_blocks=(1, 2, 3, 4)),
    Policy(accumulation_group=4, prefetch_depth=2, save=saves(products=(1, 2)), update=Update.DEFERRED, disk_blocks=(2, 4)),
    Policy(accumulation_group=2, boundary_stride=2, resident_blocks=(1,), disk_blocks=(3,)),
    Policy(accumulation_group=4, device_blocks=(1, 2, 3, 4), resident_blocks=(2, 3), disk_blocks=(1, 2, 4)),
    Policy(accumulation_group=3, save=saves(products=(1,), attention=(2,)), offload_blocks=(1, 2), disk_blocks=(1, 2)),
]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the read size: several threads then share a tiny layer."""
    monkeypatch.setattr(base_file, "PIECE_BYTES", 4096)


@diagonal(("policy", POLICIES), ("base", ["bf16", "nf4"]))
def test_the_bits_are_those_of_the_plain_loop(policy: Policy, base: str, small_pieces: None) -> None:
    """Slots are poisoned on release, and lanes have random delays."""
    semantics = semantics_of("llama", train=LORA, base=base, gradient_dtype="fp32" if policy.device_blocks else "bf16")
    machine = streamed(tiny_config("llama", **dict(LAYERS)), semantics, policy, delay_seed=1)
    assert differences(machine, plain("llama", semantics, LAYERS)) == []


@mostly_slow("seed", range(3))
def test_reads_wait_for_the_loads_of_streams_that_are_late(seed: int) -> None:
    """Remove the load-completion events: bits must then differ."""

    class Deaf(Poisoned):
        def follow(self, lane: Lane, token: Any) -> None:
            if lane is not Lane.DISK:
                super().follow(lane, token)

    config, semantics = tiny_config("llama", **dict(LAYERS)), semantics_of("llama", train=LORA)
    machine, deaf = (machine_of(config, semantics, POLICIES[0], seed, 0.3, machine_type) for machine_type in (Poisoned, Deaf))
    execute(machine.plan, machine, 3)
    assert differences(machine, plain("llama", semantics, LAYERS)) == []
    with pytest.raises(NonFiniteError):  # a slot is poisoned after its load
        execute(deaf.plan, deaf, 3)


def planned(**fields: object) -> Plan:
    policy = replace(POLICIES[0], **fields)  # type: ignore[arg-type]
    return plan_of(tiny_config("llama", hidden_size=128, **dict(LAYERS)), semantics_of("llama", train=LORA), policy)


SIZES = {b: planned().read_bytes(b) for b in (1, 2, 3, 4)}


def cached_pages(path: Path) -> int:
    """Count pages of a file in the page cache by mincore(2)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        n = -(-len(mapping) // mmap.PAGESIZE)
        in_cache = (ctypes.c_ubyte * n)()
        first = ctypes.addressof(buffer := ctypes.c_char.from_buffer(mapping))
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(mapping)), in_cache) == 0
        del buffer
        return sum(page & 1 for page in in_cache)


def read_here() -> int:
    """Return bytes that this process read from disk."""
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes")).split()[1])


def test_a_step_reads_as_planned_and_leaves_no_page_cache(tmp_path: Path) -> None:
    plan, n_steps = planned(), 3
    machine = machine_for(plan, disk=tmp_path / "base")
    execute(plan, machine, 1)  # written pages can remain in the page cache until the file system flushes its journal
    first_bytes = read_here()
    execute(plan, machine, n_steps, 1)
    n_bytes = sum(plan.read_bytes(op.block) for op in plan.ops if op.kind == "read")
    assert 0 <= read_here() - first_bytes - n_steps * n_bytes <= 65536
    assert cached_pages(tmp_path / "base") == 0
    machine.host.compute_weight(machine.host.frozen[1][0]).sum()
    assert cached_pages(tmp_path / "base") > 0, "the measure sees pages"


def test_a_whole_file_is_read_by_other_runs_and_written_by_none(tmp_path: Path) -> None:
    first = trained(planned(), disk=tmp_path / "base")
    written = (tmp_path / "base").stat().st_mtime_ns, (tmp_path / "base").read_bytes()
    again = trained(planned(prefetch_depth=2), disk=tmp_path / "base")
    assert written == ((tmp_path / "base").stat().st_mtime_ns, (tmp_path / "base").read_bytes())
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    states = [machine.host.param_state(machine.host.owned[2][0]).master.values() for machine in (first, again)]
    assert torch.equal(*states)


def test_one_run_at_a_time_writes_the_file(tmp_path: Path) -> None:
    one = BaseFile(tmp_path / "base", SIZES)
    with pytest.raises(DiskError, match=r"base\.partial: another run is writing it; start this run when the other one trains"):
        BaseFile(tmp_path / "base", SIZES)
    one.settle()
    assert BaseFile(tmp_path / "base", SIZES).is_whole


def failing(monkeypatch: pytest.MonkeyPatch, fails: object, n_good: int) -> None:
    """Replace `os.preadv` by `fails` from some read on."""
    real, n_reads = os.preadv, [0]

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        n_reads[0] += 1
        return fails(real, file, buffers, offset) if n_reads[0] > n_good else real(file, buffers, offset)  # type: ignore[operator]

    monkeypatch.setattr(base_file.os, "preadv", preadv)


def error(code: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (error(errno.EIO), r"base: cannot be read at byte \d+ \(Input/output error\); check the disk"),
        (error(errno.ENODEV), r"base: cannot be read at byte \d+ \(No such device\); check the disk"),
        (lambda *_: 0, r"base: ends at byte \d+, within a layer: it is truncated; delete it, and continue with --resume"),
    ],
    ids=["EIO", "ENODEV", "the end"],
)
def test_a_disk_that_fails_in_mid_run_is_one_line(tmp_path, monkeypatch, fails, says):
    machine = machine_for(planned(), disk=tmp_path / "base")
    failing(monkeypatch, fails, n_good=10)
    with pytest.raises(DiskError, match=says) as caught:
        execute(machine.plan, machine, 3)
    assert "\n" not in str(caught.value)


def test_a_short_read_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda real, file, buffers, offset: real(file, [memoryview(buffers[0])[:4096]], offset), n_good=0)
    semantics = semantics_of("llama", train=LORA)
    machine = trained(plan_of(tiny_config("llama", **dict(LAYERS)), semantics, POLICIES[0]), disk=tmp_path / "base")
    assert differences(machine, plain("llama", semantics, LAYERS)) == []


def test_a_file_cut_short_in_mid_run_is_one_line_and_made_again(tmp_path: Path) -> None:
    machine = machine_for(planned(), disk=tmp_path / "base")
    execute(machine.plan, machine, 1)
    os.truncate(tmp_path / "base", 4096 + 100)
    with pytest.raises(DiskError, match="ends at byte 4196, within a layer: it is truncated"):
        execute(machine.plan, machine, 1, 1)
    assert not BaseFile(tmp_path / "base", SIZES).is_whole


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        ("preadv", errno.EINVAL, r"rejects direct reads \(O_DIRECT\); choose a folder on another disk with --disk"),
        ("posix_fallocate", errno.ENOSPC, r"cannot be opened \(No space left on device\); make room"),
    ],
)
def test_a_disk_of_no_use_is_refused_before_a_byte_is_written(tmp_path, monkeypatch, call: str, code: int, says: str) -> None:
    monkeypatch.setattr(base_file.os, call, error(code))
    with pytest.raises(DiskError, match=says):
        BaseFile(tmp_path / "base", SIZES)
    assert (tmp_path / "base.partial").stat().st_blocks == 0


IN_MEMORY = Path("/dev/shm")


@pytest.mark.skipif(not (IN_MEMORY.is_dir() and is_in_memory(IN_MEMORY)), reason="needs a file system in memory")
def test_a_file_system_in_memory_is_no_disk() -> None:
    """tmpfs accepts direct reads, but occupies the memory that a disk is meant to save."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        with pytest.raises(DiskError, match="its file system is in memory; choose a folder on a disk with --disk"):
            BaseFile(Path(folder) / "base", SIZES)
        assert not [*Path(folder).iterdir()]
