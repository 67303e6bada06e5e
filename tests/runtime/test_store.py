"""Memory of a run: slabs, slots of arenas and their views, registration for DMA, one copy of each weight, constant over steps."""

import faulthandler
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.probe.cpu import resident_bytes
from penstock.runtime.errors import PlanError
from penstock.runtime.executor import execute
from penstock.runtime.host import host_state, slabs
from penstock.runtime.host.memory import Arenas
from penstock.runtime.host.optimizer import Master
from penstock.runtime.host.slabs import host_slab, register_for_dma
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Arena, Lane, Place, Policy, Slot, Update
from penstock.runtime.units import MiB
from tests.fake_cuda import Driver
from tests.lanes import mostly_slow
from tests.tiny import tiny_config
from tests.tour import ROOT
from tests.training import differences, machine_for, plan_of, same_bits, semantics_of, streamed

PAGE_BYTES = resource.getpagesize()
CPU = torch.device("cpu")
POLICIES = {
    "barrier, summed on the host": Policy(),
    "deferred, on speculation": Policy(update=Update.DEFERRED, accumulation_group=4, speculate_blocks=(0, 1, 2)),
    "boundaries spilled": Policy(accumulation_group=4, spill_blocks=(1,)),
}


class Counting(TorchMachine):
    """Record minor page faults of each lane after its last op of a step, and of the workers."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.n_faults: dict[str, dict[int, int]] = {}

    def perform(self, index, op, step) -> None:
        super().perform(index, op, step)
        self.n_faults.setdefault(op.lane, {})[step] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        if op.lane is Lane.CPU:
            for thread in threading.enumerate():
                if thread.name.startswith("worker"):
                    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2]
                    self.n_faults.setdefault(thread.name, {})[step] = int(stat.split()[7])


@mostly_slow("policy", POLICIES.values(), ids=POLICIES)
def test_no_arena_moves_and_no_page_is_faulted_in_again(policy):
    """Check most of 10 steps: a temporary tensor causes hundreds of page faults in each; Python and a busy machine cause some."""
    config = tiny_config("llama", hidden_size=128, intermediate_size=512, vocab_size=2000)  # tensors of 256 pages and more
    machine = machine_for(plan_of(config, semantics_of("llama", seq_len=64), policy), Counting, n_workers=2)
    addresses = {name: slab.data_ptr() for name, slab in machine.arenas.slabs.items()}
    execute(machine.plan, machine, 12)
    assert {name: slab.data_ptr() for name, slab in machine.arenas.slabs.items()} == addresses
    assert {"h2d", "d2h", "cpu", "worker-1"} <= machine.n_faults.keys()
    for lane, by_step in machine.n_faults.items():
        if lane is not Lane.GPU:
            assert statistics.median(by_step[step + 1] - by_step[step] for step in range(1, 11)) < 64, lane


def test_every_page_of_the_arenas_is_there_before_the_first_step():
    arenas = Arenas([Arena("state", Place.HOST, (16 * MiB, 8 * MiB)), Arena("weights", Place.DEVICE, (8 * MiB,))], CPU)
    before_bytes = resident_bytes()
    arenas.touch(2)
    touched = resident_bytes()
    assert touched - before_bytes >= 0.98 * 32 * MiB
    for slot in (Slot("state", 0), Slot("state", 1), Slot("weights", 0)):
        assert not arenas.raw(slot).any(), "memory begins as zero"
        arenas.raw(slot).fill_(7)
    assert resident_bytes() - touched < MiB


def test_holes_in_the_heap_are_given_back_when_compute_begins():
    """Evaluations and saves leave free memory below the end of the heap."""
    machine = machine_for(plan_of(tiny_config("llama"), semantics_of("llama"), Policy()))
    tensors = [torch.ones(MiB // 4) for _ in range(200)]
    stays = torch.ones(1000)  # at the end
    del tensors
    before_bytes = resident_bytes()
    thread = threading.Thread(target=lambda: machine.lane(Lane.GPU).__enter__())
    thread.start()
    thread.join()
    assert before_bytes - resident_bytes() > 150 * MiB
    assert stays.sum() == 1000


@given(st.integers(0, 6 * MiB))
def test_a_slab_has_the_bytes_asked_for_and_starts_aligned(n_bytes):
    slab = host_slab(n_bytes)
    assert slab.numel() == slab.untyped_storage().nbytes() == n_bytes
    assert n_bytes == 0 or slab.data_ptr() % 64 == 0
    assert n_bytes < PAGE_BYTES or slab.data_ptr() % PAGE_BYTES == 0
    assert not slab.any()


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch):
    class Pages(slabs.mmap.mmap):
        def madvise(self, advice, *rest):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(slabs.mmap, "mmap", Pages)
    arenas = Arenas([Arena("state", Place.HOST, (4 * MiB, 4 * MiB)), Arena("weights", Place.DEVICE, (256,))], CPU)
    arenas.touch(1)
    assert not any(slab.any() for slab in arenas.host_slabs().values())


def test_a_child_process_does_not_get_the_arenas():
    """Otherwise the next write copies every page, and a device continues to read the old one."""
    slab, copied = host_slab(4 * MiB).fill_(5), torch.full((100,), 5, dtype=torch.uint8)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # must not return into the test
        try:
            faulthandler.disable()
            os.write(writer, bytes([int(copied[0])]))
            int(slab[0])  # segmentation fault: the memory does not exist
            os.write(writer, b"!")
        finally:
            os._exit(0)
    os.close(writer)
    status = os.waitpid(child, 0)[1]
    assert os.read(reader, 10) == b"\x05"
    os.close(reader)
    assert os.WIFSIGNALED(status)
    assert bool((slab == 5).all())


def test_an_arena_that_a_system_refuses_is_one_line():
    with pytest.raises(PlanError, match=r"\Aarena state of \d+ bytes cannot be allocated \(.*\)\Z"):
        Arenas([Arena("state", Place.HOST, (2**52,))], CPU)


HELD = {"state": (3 * MiB, 2 * MiB), "norm": (256,), "staging": ()}
ARENAS = [*(Arena(name, Place.HOST, sizes) for name, sizes in HELD.items()), Arena("weights", Place.DEVICE, (4 * MiB,))]


def test_every_arena_of_the_host_is_registered_once_and_whole():
    """No two arenas share a page, however small they are."""
    driver, arenas = Driver(), Arenas(ARENAS, CPU)
    addresses = register_for_dma(arenas.host_slabs(), driver)
    assert driver.registered == {arenas.slabs["state"].data_ptr(): 5 * MiB, arenas.slabs["norm"].data_ptr(): 256}
    slabs.unregister(addresses, driver)
    assert driver.registered == {}
    small = [Arena(f"small{i}", Place.HOST, (1 + 37 * i,)) for i in range(200)]
    arenas = Arenas(small, CPU)
    register_for_dma(arenas.host_slabs(), driver)
    assert driver.registered == {arenas.slabs[arena.name].data_ptr(): arena.n_bytes for arena in small}


def test_a_large_arena_has_several_slabs(monkeypatch):
    """A copy across two registrations can fail: each slot is within one."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", 2 * MiB)
    driver, arenas = Driver(), Arenas(ARENAS, CPU)
    register_for_dma(arenas.host_slabs(), driver)
    first, second, norm = (arenas.slabs[name].data_ptr() for name in ("state", "state.1", "norm"))
    assert driver.registered == {first: 3 * MiB, second: 2 * MiB, norm: 256}
    assert arenas.n_bytes == {"state": 5 * MiB, "norm": 256, "staging": 0, "weights": 4 * MiB}
    assert arenas.raw(Slot("state", 1)).data_ptr() == second


def test_an_arena_of_several_slabs_trains_the_same_bits(monkeypatch):
    policy = Policy(update=Update.DEFERRED, speculate_blocks=(0, 2), spill_blocks=(0,), accumulation_group=4)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 2048)
    machine = streamed(tiny_config("llama"), semantics_of("llama"), policy)
    for name, n_slabs in {"state": 6, "host_gradients": 4, "spilled": 2}.items():
        assert {f"{name}.{n}" for n in range(1, n_slabs)} <= machine.arenas.slabs.keys()
    assert differences(machine) == []


def test_memory_that_may_not_be_locked_is_one_line(monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", 2 * MiB)
    driver = Driver(limit=3 * MiB)
    with pytest.raises(PlanError, match=r"\A.*arena state.*3.15 MB of 5.24 MB.*CUDA error 2.*memlock.*ulimit -l.*\Z"):
        register_for_dma(Arenas(ARENAS[::-1], CPU).host_slabs(), driver)  # the small one first
    assert driver.registered == {}, "registered slabs are unregistered"


MANY_SLOTS = [Arena("state", Place.HOST, (MiB, 100, MiB - 100, 3 * MiB, *(5000 + 77 * i for i in range(400))))]


def test_several_threads_lock_an_arena_in_pieces_of_whole_slots(monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", MiB)
    driver, arenas, began = Driver(), Arenas(MANY_SLOTS, CPU), []

    @contextmanager
    def settled():
        began.append(threading.current_thread())
        yield

    addresses = register_for_dma(arenas.host_slabs(), driver, 3, settled)
    assert len(set(began)) == 3
    assert len(addresses) > 10
    assert sum(driver.registered.values()) == MANY_SLOTS[0].n_bytes
    for index in range(len(MANY_SLOTS[0].slot_bytes)):
        slot = arenas.raw(Slot("state", index))
        begin, end = slot.data_ptr(), slot.data_ptr() + slot.numel()
        held = driver.registered.items()
        assert any(address <= begin and end <= address + n for address, n in held), "a copy would be of two registrations"
    slabs.unregister(addresses, driver)
    assert driver.registered == {}


@pytest.mark.parametrize(("compute_dtype", "master_dtype"), [("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_a_weight_set_piece_by_piece_is_the_weight(monkeypatch, compute_dtype, master_dtype):
    """The master is the input, rounded half up for bf16; the weight is the master, rounded half up for bf16."""
    monkeypatch.setattr(host_state, "SET_ELEMENTS", 100)
    semantics = semantics_of("llama", compute_dtype=compute_dtype, master_dtype=master_dtype)
    machine = machine_for(plan_of(tiny_config("llama"), semantics, Policy()))
    host = machine.host
    for block in range(len(machine.plan.workload.blocks)):
        weights = {p.name: torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p.name))) for p in host.owned[block]}
        large = max(host.owned[block], key=lambda p: p.n_elements)
        weights[large.name].view(-1)[[5, 301]] = torch.tensor([torch.nan, torch.inf])
        host.set_weights(block, weights)
        for p in host.owned[block]:
            wide = weights[p.name].reshape(-1)
            rounded = torch.empty_like(wide, dtype=torch.bfloat16)
            Master(rounded).put(slice(None), wide)
            assert same_bits(host.param_state(p).master.values(), wide if master_dtype == "fp32" else rounded), p.name
            assert same_bits(host.compute_weight(p).reshape(-1), wide if compute_dtype == "fp32" else rounded), p.name
            assert not any(moment.any() for moment in host.param_state(p).moments)


HOLDING = """
import threading
import json, sys
from pathlib import Path
import torch
from penstock.checkpoint import tensor_files
from penstock.checkpoint.checkpoint import load_state
from penstock.training.trainer import Trainer
from penstock.training.build import load_model
from penstock.runtime.host.slabs import give_back_freed
from tests.checkpoints import save
from tests.sessions import resumed, session_of

torch.set_num_threads(1)
out = Path(sys.argv[1])
tensor_files.REOPEN_BYTES = 4 * 2**20


def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))


def growth(work):
    "Return the largest growth of the process in bytes, without pages of files."
    give_back_freed()
    before, most, over = kib("RssAnon"), [0], threading.Event()

    def look():
        while not over.wait(0.001):
            most[0] = max(most[0], kib("RssAnon"))

    looking = threading.Thread(target=look)
    looking.start()
    work()
    over.set()
    looking.join()
    return 1024 * (max(most[0], kib("RssAnon")) - before)


sizes = {"hidden_size": 768, "intermediate_size": 1536, "vocab_size": 4000, "num_hidden_layers": 3}
session = session_of(out, background=False, sizes=sizes)
first = session.store
owned = [p for b in range(len(first.plan.workload.blocks)) for p in first.host.owned[b]]
found = {"largest": max(4 * p.n_elements for p in owned), "model": sum(4 * p.n_elements for p in owned)}
trainer, warm = Trainer(session, validations=()), out / "checkpoint-1"
trainer.saver().save(1)
load_model(first, warm, out)
resumed(session, load_state(warm))
weights = {p.name: first.host.param_state(p).master.values().view(p.shape) for p in owned}  # as Hugging Face has them, in fp32
model = save(out / "model", 1, weights, [], first.plan.model.config, {})
del weights
found["save"] = growth(lambda: trainer.saver().save(2))
found["load"] = growth(lambda: load_model(first, model, out))
found["resume"] = growth(lambda: resumed(session, load_state(warm)))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_loading_saving_and_resuming_hold_one_tensor_at_most(tmp_path):
    """In addition to the arenas."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"}  # otherwise glibc retains up to twice its largest block
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    growth = json.loads(process.stdout.splitlines()[-1])
    allowed = growth["largest"] + 24 * MiB  # read buffer of a file, and inaccurate memory counters on many cores
    assert allowed < growth["model"] / 2
    assert growth["save"] < 16 * MiB, "a split master is put together in pieces, and nothing else is made"
    for name in ("load", "resume"):
        assert growth[name] < allowed, f"{name}: {growth[name] / 1e6:.0f} MB of {growth['model'] / 1e6:.0f} MB"


sizes = st.lists(st.integers(0, 6).map(lambda n: n * 256), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4))
def test_slots_have_the_bytes_asked_for_and_never_overlap(slot_bytes):
    """Slots begin as zeros and are filled with distinct numbers. No number changes afterwards."""
    requested = [Arena(f"arena_{'abcd'[i]}", Place.DEVICE, tuple(s)) for i, s in enumerate(slot_bytes)]
    arenas = Arenas(requested, CPU)
    assert arenas.n_bytes == {a.name: a.n_bytes for a in requested}
    slots = [Slot(a.name, i) for a in requested for i in range(len(a.slot_bytes))]
    for number, slot in enumerate(slots):
        assert not arenas.raw(slot).any()
        arenas.raw(slot).fill_(number)
    for number, slot in enumerate(slots):
        assert bool((arenas.raw(slot) == number).all())


def test_writing_a_view_keeps_what_autograd_saved_of_another():
    arenas = Arenas([Arena("activations", Place.DEVICE, (256,))], CPU)
    slot = Slot("activations", 0)
    x = arenas.view(slot, "fp32", (4,)).fill_(3.0).requires_grad_()
    y = (x * x).sum()
    arenas.view(slot, "fp32", (4,)).fill_(5.0)
    assert torch.autograd.grad(y, x)[0].tolist() == [10.0] * 4, "the slot's content now, as the plan says, and no error"
