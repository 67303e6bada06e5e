"""Probe of this CPU: thread affinity, statistics and benchmarks; no test requires a speed."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.outputs import json_text
from penstock.cli.probe import probe
from penstock.hwprofiles.probe import cpu, disk, host_kernels, measurements
from penstock.hwprofiles.probe import kernels_to_time as kernels
from penstock.hwprofiles.probe.cpu import CpuDevice
from penstock.hwprofiles.probe.device import Ready, Run
from penstock.hwprofiles.probe.disk import with_disk
from penstock.hwprofiles.probe.probe import probed
from penstock.hwprofiles.probe.timings import Stopwatch, Timing, lifted
from penstock.hwprofiles.schema import Profile
from penstock.runtime.errors import DiskError, ProfileError
from penstock.runtime.host import base_file, optimizer
from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.workers import together
from penstock.runtime.machines.lanes import split_beside_gpu, split_cores
from penstock.runtime.units import GB

GLANCE = replace(
    measurements.CPU, repeats=(3, 5), point_s=0.01, window_s=0.03, longest_s=0.3, tokens=(64, 512), widths=(128, 512),
    odd_shapes=((512, 128, 2048),), seq_lens=(128, 512), copy_bytes=(2**20, 16 * 2**20), sustained_s=0.03, piece_s=0.01,
    host_bytes=100_000_000,
)  # fmt: skip
CORES = sorted(os.sched_getaffinity(0))
Steps = list[tuple[str, float]]


@pytest.fixture(scope="module")
def probed_cpu() -> tuple[Profile, Steps]:
    steps = Steps()
    return probed(CpuDevice(), GLANCE, lambda kind, fraction: steps.append((kind, fraction)), "mine"), steps


def test_a_probe_is_a_profile_that_reads_back(probed_cpu: tuple[Profile, Steps]) -> None:
    profile, (compute, host) = probed_cpu[0], split_cores(CORES)
    assert Profile.from_json(json.loads(json_text(profile.to_json()))) == profile
    assert (profile.name, profile.device.kind) == ("mine", "cpu")
    assert (profile.device.compute_threads, profile.host.n_cores) == (len(compute), len(host))
    for dtype in ("bf16", "fp32"):
        assert {(p.m, p.k, p.n) for p in profile.device.matmul[dtype]} >= {(512, 128, 2048), (64, 128, 128)}
        assert {(p.seq_len, p.head_dim) for p in profile.device.attention["flash"][dtype]} >= {(128, 64), (512, 128)}


def test_all_is_measured_but_what_a_cpu_has_by_nature(probed_cpu: tuple[Profile, Steps]) -> None:
    profile = probed_cpu[0]
    not_measured = {place for place, q in profile.quantities() if profile.sources[q.source].kind != "measured"}
    assert not_measured == {"device.context_bytes", "device.workspace_bytes", "link.host_cores_per_copy", "host.runtime_bytes"}
    assert all(source.date and source.device and "torch" in str(source.driver) for source in profile.sources.values())


def test_what_lanes_do_to_each_other_is_measured(probed_cpu: tuple[Profile, Steps]) -> None:
    link, host = probed_cpu[0].link, probed_cpu[0].host
    both = [curve.duplex_bytes_per_s for curve in (link.h2d, link.d2h)]
    assert sum(q.value for q in both if q is not None) == pytest.approx(link.duplex_bytes_per_s.value, rel=1e-4)
    assert all(curve.under_optimizer_bytes_per_s is not None for curve in (link.h2d, link.d2h))
    assert host.optimizer[-1].threads == host.n_cores


def test_a_disk_is_read_as_a_run_reads_it_and_left_as_it_was(monkeypatch, tmp_path, probed_cpu):
    monkeypatch.setattr(disk, "LAYER_BYTES", 2**20)
    monkeypatch.setattr(disk, "N_LAYERS", 3)
    monkeypatch.setattr(disk, "FILE_BYTES", 3 * 2**20)
    read: list[int] = []
    real = os.preadv
    monkeypatch.setattr(base_file.os, "preadv", lambda *args: read.append(n := real(*args)) or n)
    profile = with_disk(probed_cpu[0], CpuDevice(), tmp_path, lambda kind, fraction: None)
    assert sum(read) == 2 * disk.N_PASSES * 3 * 2**20 + 4096  # plus a page read to test the file
    assert profile.disk is not None
    assert profile.read_bytes_per_s == profile.disk.under_copies_bytes_per_s.value
    assert profile.sources[profile.disk.read_bytes_per_s.source].kind == "measured"
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot be opened"):
        with_disk(probed_cpu[0], CpuDevice(), tmp_path / "file", lambda kind, fraction: None)


def test_device_and_host_share_memory_and_book_none_twice(probed_cpu: tuple[Profile, Steps]) -> None:
    total = probed_cpu[0].device.memory_bytes.value + probed_cpu[0].host.memory_bytes.value
    assert 0 < total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_command_writes_json_to_standard_output(monkeypatch: pytest.MonkeyPatch, probed_cpu: tuple[Profile, Steps]) -> None:
    def probe_again(quick: bool, report: Callable[[str, float], None], **_: Any) -> Profile:
        for step in probed_cpu[1]:
            report(*step)
        return probed_cpu[0]

    monkeypatch.setattr("penstock.api.probe", lambda device, quick, **fields: probe_again(quick, **fields))
    result = CliRunner().invoke(probe, ["--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0
    assert Profile.from_json(json.loads(result.stdout)) == probed_cpu[0]
    assert "numbers:" in result.stderr
    assert result.stderr.startswith("measuring device memory\nmeasuring host memory\nmeasuring copies\nmeasuring optimizer\n")


# -- cores and threads ------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(min_value=0, max_value=300), min_size=1))
def test_compute_and_host_lanes_have_cores_of_their_own(cores: set[int]) -> None:
    compute, host = split_cores(sorted(cores))
    assert compute
    assert {*compute, *host} == cores
    assert len(cores) == 1 or (not {*compute} & {*host} and len(compute) == len(cores) // 2)


@pytest.mark.parametrize(("n_cores", "n_issuing", "n_host"), [(1, 1, 1), (2, 1, 1), (4, 1, 3), (7, 1, 6), (8, 2, 6), (16, 2, 14)])
def test_the_lanes_that_feed_a_gpu_have_a_core_or_two(n_cores: int, n_issuing: int, n_host: int) -> None:
    cores = list(range(10, 10 + n_cores))
    assert split_beside_gpu(cores) == (cores[:n_issuing], cores[-n_host:])
    assert {*CpuDevice(split_beside_gpu).host_cores} == {*split_beside_gpu(CORES)[1]}


def called(call: Callable[[], object], **fields: Any) -> Ready:
    return Ready(kernels.Benchmark("any", "any", **fields), call)


def test_work_runs_on_the_cores_and_threads_of_its_lane() -> None:
    mine, device, states = os.sched_getaffinity(0), CpuDevice(), []

    def look() -> None:
        states.append((os.sched_getaffinity(0), torch.get_num_threads(), torch.is_grad_enabled()))

    for lane, n_threads in ((kernels.Lane.GPU, 1), (kernels.Lane.H2D, 1), (kernels.Lane.CPU, 1)):
        device.run(called(look, lane=lane, n_threads=n_threads), 1)
    host = ({*device.host_cores}, 1, False)
    assert states == [({*device.compute_cores}, len(device.compute_cores), False), host, host]
    assert os.sched_getaffinity(0) == mine
    work = replace(
        host_kernels.updates(3, 10**7), tasks=lambda slab, together: [lambda _: (look(), time.sleep(0.05))] * 3, n_tasks=3
    )
    with device.prepared(work) as ready:
        device.run(ready, 1)
    assert states[3:] == [host] * 3


def test_company_runs_as_long_as_its_context_and_fails_there() -> None:
    device, counts = CpuDevice(), [0]

    def count() -> None:
        counts[0] += 1

    with device.background([called(count, lane=kernels.Lane.H2D)]):
        n_before = counts[0]
        device.run(called(lambda: time.sleep(0.05)), 1)
        assert counts[0] > n_before > 0
    ended = counts[0]
    time.sleep(0.01)
    assert counts[0] == ended
    with pytest.raises(ProfileError, match="broken"):
        device.run(called(fail), 1)
    with pytest.raises(ProfileError, match="broken"), device.background([called(fail)]):
        pass


def fail() -> None:
    raise ProfileError("broken")


def test_time_that_other_programs_take_is_seen_and_ours_is_not() -> None:
    """Two threads on one core wait half of the time. Waiting for another program counts as queue time, waiting for the probe's own
    threads does not. Wall time includes both."""
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not count")
    device, x = CpuDevice(), torch.rand(600, 600)
    multiply = called(lambda: x @ x, lane=kernels.Lane.H2D)
    background = called(lambda: x @ x, lane=kernels.Lane.D2H)
    with device.background([background]):
        shared = device.run(multiply, 100)
    stop = [False]

    def rob() -> None:
        while not stop[0]:
            _ = x @ x

    with ThreadPoolExecutor(1, initializer=lambda: os.sched_setaffinity(0, device.host_cores)) as pool:
        robber = pool.submit(rob)
        began_s = time.perf_counter()
        robbed = device.run(multiply, 100)
        wall_s = time.perf_counter() - began_s
        stop[0] = True
        robber.result()
    assert robbed.queued_s > 0.25 * robbed.seconds / len(device.host_cores)
    assert shared.queued_s / shared.seconds < robbed.queued_s / robbed.seconds + 0.1
    assert 0.9 * wall_s < robbed.seconds <= wall_s


# -- statistics -------------------------------------------------------------------------------------------------------


class Scripted:
    """Device with given times of runs; the last one repeats."""

    def __init__(self, *runs: Run) -> None:
        self.runs, self.n_runs = [*runs], 0

    def run(self, ready: Ready, n: int) -> Run:
        self.n_runs += 1
        run = self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
        return Run(n * run.seconds, n * run.queued_s, n * run.cpu_s, n * run.steal_s)


def timed(*runs: Run, **effort: Any) -> tuple[Timing, int]:
    device: Any = Scripted(*runs)
    watch = Stopwatch(device, replace(GLANCE, **effort))
    return watch.timing(called(fail)), device.n_runs


def test_disturbed_repeats_count_only_if_too_few_are_left() -> None:
    calm, cut = Run(0.1), Run(0.5, 0.2)
    runs = [calm, calm, calm, cut, cut, calm, cut, calm, cut]  # two runs precede the repeats
    assert timed(*runs, repeats=(3, 7), point_s=100.0)[0].value == pytest.approx(0.1)
    assert timed(calm, calm, Run(0.2, 0.1), point_s=100.0)[0].value == pytest.approx(0.2), "nothing is subtracted"


def test_a_sustained_work_is_the_median_of_its_pieces_with_what_it_had_of_its_cores() -> None:
    work = {"tasks": lambda slab, together: [], "n_threads": 2}
    runs = [Run(0.02)] * 2 + [Run(0.02, 0.0, 0.04, 0.0)] * 4 + [Run(0.04, 0.0, 0.04, 0.01)] * 2
    device: Any = Scripted(*runs)
    watch = Stopwatch(device, replace(GLANCE, piece_s=0.02, sustained_s=0.16))
    timing = watch.timing(called(fail, **work))
    assert timing.value == pytest.approx(0.02)
    assert timing.use == pytest.approx((0.24 / 0.16, 0.02 / 0.16, 0.5))
    assert watch.busy_s == pytest.approx(0.2), "wall time, twice to begin with and then without a pause"


sizes = st.tuples(st.sampled_from([64, 256, 1024]), st.sampled_from([128, 256, 512]))


@given(st.dictionaries(sizes, st.floats(min_value=1e-6, max_value=10), min_size=1))
def test_lifted_times_rise_with_work_and_are_never_lowered(seconds: dict[tuple[int, int], float]) -> None:
    keyed = {i: (size, Timing(s, 0.1)) for i, (size, s) in enumerate(seconds.items())}
    raised = lifted(keyed)  # type: ignore[arg-type]
    for i, (size, was) in keyed.items():
        assert raised[i] == was or (raised[i].value > was.value and raised[i].spread_fraction > was.spread_fraction)
        for j, (smaller, _) in keyed.items():
            assert not (smaller[0] <= size[0] and smaller[1] <= size[1] and smaller != size) or raised[j].value < raised[i].value


# -- benchmarks --------------------------------------------------------------------------------------------------------


class Walked(CpuDevice):
    """CpuDevice that records the order of tasks."""

    def _new_walk(self, tasks: Any, n_bytes: int) -> Any:
        self.slab = self._slab(n_bytes)
        every = tasks(self.slab, partial(together, n_threads=1))
        self.order = list[int]()

        def walk() -> Any:
            for i in cycle(range(len(every))):
                self.order.append(i)
                yield every[i]

        self.n_tasks = len(every)
        return walk()


def test_the_optimizer_is_the_runtimes_own_on_slots_of_a_real_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Successive calls continue through the slab."""
    steps: list[optimizer.Step] = []

    def remembered(step: optimizer.Step) -> Any:
        steps.append(step)
        return tasks_of(step)

    tasks_of = optimizer.Step.tasks
    monkeypatch.setattr(optimizer.Step, "tasks", remembered)
    n = 2 * optimizer.TASK_ELEMENTS + 2**17 + 2**9  # two tasks, and a remainder that is not used
    monkeypatch.setattr(host_kernels, "LAYER_ELEMENTS", (10**9, n))
    monkeypatch.setattr(host_kernels, "TASKS_PER_THREAD", 2)
    device = Walked()
    work = host_kernels.updates(2, 3 * 14 * n + 30_000_000)  # space for more gradients, but not for another slot
    with device.prepared(work) as ready:
        assert len(steps) == 3
        weight, remainder, first, second = steps[1].target.tensors
        arrays = weight, remainder, first, second, steps[1].gradient.parts[0]
        places = [array.data_ptr() - device.slab.data_ptr() for array in arrays]
        assert places == [12 * n, 14 * n, 16 * n, 20 * n, 3 * 12 * n + 2 * n], "one after another, as a run lays them out"
        masters = [step.target.master.values() for step in steps]
        device.run(ready, 1)
        assert device.order == [*range(4)]
        assert work.amount == 4 * optimizer.TASK_ELEMENTS
        device.run(ready, 2)
        assert device.order == [i % device.n_tasks for i in range(12)]
        for step, was in zip(steps, masters, strict=True):
            n_worked = n // optimizer.TASK_ELEMENTS * optimizer.TASK_ELEMENTS
            assert (step.target.master.values() != was)[:n_worked].float().mean() > 0.5
    device.release()


def test_works_of_the_host_compute_with_finite_numbers_of_every_size() -> None:
    """Zeros and subnormal numbers take longer on some processors, so slabs must not contain them."""
    for tasks in (host_kernels.update_tasks, host_kernels.square_tasks):
        slab = torch.zeros(20_000_000, dtype=torch.uint8)
        for task in tasks(slab, partial(together, n_threads=2)):
            task(Scratch())
    assert (slab.view(torch.bfloat16).float().abs() > 2.0**-126).float().mean() > 0.999


@pytest.mark.parametrize("n_bytes", [2 * 10**9, 12 * 10**9, 100_000_000])
def test_no_two_arrays_of_a_slab_are_a_power_of_two_apart(n_bytes: int) -> None:
    n = host_kernels.layer_elements(n_bytes)
    assert 14 * n * (3 if n in host_kernels.LAYER_ELEMENTS else 1) <= n_bytes
    starts = [0, 2 * n, 4 * n, 8 * n]
    distances = {b - a for i, a in enumerate(starts) for b in starts[i + 1 :]}
    assert all(distance % 2**28 for distance in distances)
    assert all(distance & (distance - 1) for distance in distances)


def test_the_slab_is_a_third_of_memory_at_most_and_larger_than_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kernels, "cache_bytes", lambda: 300 * 2**20)
    arguments = (100 * GB, 12 * GB), (9 * GB, 12 * GB), (100 * GB, GB), (2 * GB, GB)
    sizes = [host_kernels.slab_bytes(free, limit) for free, limit in arguments]
    assert sizes == pytest.approx([12 * GB, 3 * GB, 4 * 300 * 2**20, GB], abs=4096)


def test_memory_nodes_are_read_with_the_cores_we_may_use(tmp_path: Path) -> None:
    for node, cores in enumerate(("0-3,8", "4-7", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    (tmp_path / "node9x").mkdir()
    assert cpu.memory_nodes([0, 1, 5, 8], tmp_path) == ((0, 1, 8), (5,), ())
    assert cpu.memory_nodes([0, 1], tmp_path / "nowhere") == ((0, 1),)


def test_too_little_memory_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_host_bytes", lambda: 10**8)
    with pytest.raises(ProfileError, match="100 MB of memory are free"):
        CpuDevice()


def test_caches_of_the_last_level_are_counted_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core, (shared, size) in enumerate([("0-1", "307200K"), ("0-1", "307200K"), ("2", "307200K"), ("3", "none")]):
        (folder := tmp_path / f"cpu{core}" / "cache" / "index3").mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(shared + "\n")
        (folder / "size").write_text(size + "\n")
    monkeypatch.setattr(host_kernels, "CACHES", tmp_path)
    assert host_kernels.cache_bytes.__wrapped__() == 2 * 300 * 2**20
    monkeypatch.setattr(host_kernels, "CACHES", tmp_path / "nowhere")
    assert host_kernels.cache_bytes.__wrapped__() == 0


def test_steal_time_is_read_for_the_cores_of_a_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stolen = {"cpu ": 999, "cpu0": 200, "cpu1": 400, "cpu10": 800}
    (tmp_path / "stat").write_text("".join(f"{name} 1 2 3 4 5 6 7 {n} 0 0\n" for name, n in stolen.items()) + "intr 1\n")
    monkeypatch.setattr(cpu, "STAT", tmp_path / "stat")
    hz = os.sysconf("SC_CLK_TCK")
    assert [cpu.counters_s(cores)[1] for cores in ([0], [0, 1], [10])] == [200 / hz, 300 / hz, 800 / hz]
    monkeypatch.setattr(cpu, "STAT", tmp_path / "none")
    assert cpu.counters_s([0])[1] == 0
