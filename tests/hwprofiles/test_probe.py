"""The probe of this CPU, and what it is made of: threads on their cores, statistics, works.

Nothing here says how fast a machine must be: only that the result is whole, consistent and honest.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.probe import cpu, disk, measurements, works
from hwprofiles.probe.cpu import CpuDevice
from hwprofiles.probe.device import Ready, Run
from hwprofiles.probe.disk import with_disk
from hwprofiles.probe.probe import probed
from hwprofiles.probe.timings import Stopwatch, Timing, lifted
from hwprofiles.schema import Profile
from penstock.cli.outputs import json_text
from penstock.cli.probe import probe
from runtime.errors import DiskError, ProfileError
from runtime.host import base_file, optimizer
from runtime.host.chunks import Scratch
from runtime.machines.lanes import split_beside_gpu, split_cores

GLANCE = replace(
    measurements.CPU,
    repeats=(3, 5),
    point_s=0.01,
    window_s=0.03,
    longest_s=0.3,
    tokens=(64, 512),
    widths=(128, 512),
    odd_shapes=((512, 128, 2048),),
    seq_lens=(128, 512),
    copy_bytes=(2**20, 16 * 2**20),
)
HERE = sorted(os.sched_getaffinity(0))
Steps = list[tuple[str, float]]


@pytest.fixture(scope="module")
def found() -> tuple[Profile, Steps]:
    steps = Steps()
    return probed(CpuDevice(), GLANCE, lambda what, fraction: steps.append((what, fraction)), "mine"), steps


def test_a_probe_is_a_profile_that_reads_back(found: tuple[Profile, Steps]) -> None:
    profile, (compute, host) = found[0], split_cores(HERE)
    assert Profile.from_json(json.loads(json_text(profile.to_json()))) == profile
    assert (profile.name, profile.device.kind) == ("mine", "cpu")
    assert (profile.device.compute_threads, profile.host.n_cores) == (len(compute), len(host))
    for dtype in ("bf16", "fp32"):
        assert {(p.m, p.k, p.n) for p in profile.device.matmul[dtype]} >= {(512, 128, 2048), (64, 128, 128)}
        assert {(p.seq_len, p.head_dim) for p in profile.device.attention["flash"][dtype]} >= {(128, 64), (512, 128)}


def test_all_is_measured_but_what_a_cpu_has_by_nature(found: tuple[Profile, Steps]) -> None:
    profile = found[0]
    not_measured = {place for place, q in profile.quantities() if profile.sources[q.source].kind != "measured"}
    assert not_measured == {"device.context_bytes", "device.workspace_bytes", "link.host_cores_per_copy", "host.runtime_bytes"}
    assert all(source.date and source.device and "torch" in str(source.driver) for source in profile.sources.values())


def test_what_lanes_do_to_each_other_is_measured(found: tuple[Profile, Steps]) -> None:
    link, host = found[0].link, found[0].host
    both = [curve.duplex_bytes_per_s for curve in (link.h2d, link.d2h)]
    assert sum(q.value for q in both if q is not None) == pytest.approx(link.duplex_bytes_per_s.value, rel=1e-4)
    assert all(curve.under_optimizer_bytes_per_s is not None for curve in (link.h2d, link.d2h))
    assert host.optimizer[-1].threads == host.n_cores


def test_a_disk_is_read_as_a_run_reads_it_and_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: tuple[Profile, Steps]
) -> None:
    monkeypatch.setattr(disk, "LAYER_BYTES", 2**20)
    monkeypatch.setattr(disk, "N_LAYERS", 3)
    monkeypatch.setattr(disk, "FILE_BYTES", 3 * 2**20)
    read: list[int] = []
    real = os.preadv
    monkeypatch.setattr(base_file.os, "preadv", lambda *of: read.append(n := real(*of)) or n)
    profile = with_disk(found[0], CpuDevice(), tmp_path, lambda what, fraction: None)
    assert sum(read) == 2 * disk.N_PASSES * 3 * 2**20 + 4096  # and a page, to try
    assert profile.disk is not None
    assert profile.read_bytes_per_s == profile.disk.under_copies_bytes_per_s.value
    assert profile.sources[profile.disk.read_bytes_per_s.source].kind == "measured"
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot be opened"):
        with_disk(found[0], CpuDevice(), tmp_path / "file", lambda what, fraction: None)


def test_device_and_host_share_memory_and_book_none_twice(found: tuple[Profile, Steps]) -> None:
    total = found[0].device.memory_bytes.value + found[0].host.memory_bytes.value
    assert 0 < total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_command_writes_json_to_standard_output(monkeypatch: pytest.MonkeyPatch, found: tuple[Profile, Steps]) -> None:
    def probe_again(quick: bool, report: Callable[[str, float], None], **_: Any) -> Profile:
        for step in found[1]:
            report(*step)
        return found[0]

    monkeypatch.setattr("penstock.api.probe", lambda device, quick, **fields: probe_again(quick, **fields))
    result = CliRunner().invoke(probe, ["--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0
    assert Profile.from_json(json.loads(result.stdout)) == found[0]
    assert "numbers:" in result.stderr
    assert result.stderr.startswith("measuring device memory\nmeasuring copies\nmeasuring optimizer\n")


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
    assert {*CpuDevice(split_beside_gpu).host_cores} == {*split_beside_gpu(HERE)[1]}


def called(call: Callable[[], object], **fields: Any) -> Ready:
    return Ready(works.Work("any", "any", **fields), call)


def test_work_runs_on_the_cores_and_threads_of_its_lane() -> None:
    mine, device, seen = os.sched_getaffinity(0), CpuDevice(), []

    def look() -> None:
        seen.append((os.sched_getaffinity(0), torch.get_num_threads(), torch.is_grad_enabled()))

    for lane, n_threads in ((works.Lane.GPU, 1), (works.Lane.H2D, 1), (works.Lane.CPU, 1)):
        device.run(called(look, lane=lane, n_threads=n_threads), 1)
    host = ({*device.host_cores}, 1, False)
    assert seen == [({*device.compute_cores}, len(device.compute_cores), False), host, host]
    assert os.sched_getaffinity(0) == mine
    with device.prepared(replace(works.updates(3), tasks=lambda: [lambda _: (look(), time.sleep(0.05))] * 3)) as ready:
        device.run(ready, 1)
    assert seen[3:] == [host] * 3


def test_company_runs_as_long_as_its_context_and_fails_there() -> None:
    device, counts = CpuDevice(), [0]

    def count() -> None:
        counts[0] += 1

    with device.beside([called(count, lane=works.Lane.H2D)]):
        before = counts[0]
        device.run(called(lambda: time.sleep(0.05)), 1)
        assert counts[0] > before > 0
    ended = counts[0]
    time.sleep(0.01)
    assert counts[0] == ended
    with pytest.raises(ProfileError, match="broken"):
        device.run(called(fail), 1)
    with pytest.raises(ProfileError, match="broken"), device.beside([called(fail)]):
        pass


def fail() -> None:
    raise ProfileError("broken")


def test_time_that_other_programs_take_is_seen_and_ours_is_not() -> None:
    """Two threads that compute on one core each wait for half of the time; if both are the probe's, neither is robbed."""
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not count")
    device, x = CpuDevice(), torch.rand(600, 600)
    multiply = called(lambda: x @ x, lane=works.Lane.H2D)
    other = called(lambda: x @ x, lane=works.Lane.D2H)
    with device.beside([other]):
        ours = device.run(multiply, 100)
    stop = [False]

    def rob() -> None:
        while not stop[0]:
            _ = x @ x

    with ThreadPoolExecutor(1, initializer=lambda: os.sched_setaffinity(0, device.host_cores)) as pool:
        robber = pool.submit(rob)
        robbed = device.run(multiply, 100)
        stop[0] = True
        robber.result()
    assert robbed.stolen_s > 0.25 * robbed.seconds / len(device.host_cores)
    assert ours.stolen_s / ours.seconds < robbed.stolen_s / robbed.seconds + 0.1


# -- statistics -------------------------------------------------------------------------------------------------------


class Scripted:
    """A device whose runs take as long as it is told, and then as long as the last one."""

    def __init__(self, *runs: Run) -> None:
        self.runs, self.n_runs = [*runs], 0

    def run(self, ready: Ready, n: int) -> Run:
        self.n_runs += 1
        run = self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
        return Run(n * run.seconds, n * run.stolen_s)


def timed(*runs: Run, **effort: Any) -> tuple[Timing, int]:
    device: Any = Scripted(*runs)
    watch = Stopwatch(device, replace(GLANCE, **effort))
    return watch.timing(called(fail)), device.n_runs


def test_disturbed_repeats_count_only_if_too_few_are_left() -> None:
    calm, cut = Run(0.1), Run(0.5, 0.2)
    runs = [calm, calm, calm, cut, cut, calm, cut, calm, cut]  # of which two come before the repeats
    assert timed(*runs, repeats=(3, 7), point_s=100.0)[0].value == pytest.approx(0.1)
    assert timed(calm, calm, Run(0.2, 0.1), point_s=100.0)[0].value == pytest.approx(0.1), "what the others took is left out"


sizes = st.tuples(st.sampled_from([64, 256, 1024]), st.sampled_from([128, 256, 512]))


@given(st.dictionaries(sizes, st.floats(min_value=1e-6, max_value=10), min_size=1))
def test_lifted_times_rise_with_work_and_are_never_lowered(seconds: dict[tuple[int, int], float]) -> None:
    keyed = {i: (size, Timing(s, 0.1)) for i, (size, s) in enumerate(seconds.items())}
    after = lifted(keyed)  # type: ignore[arg-type]
    for i, (size, was) in keyed.items():
        assert after[i] == was or (after[i].value > was.value and after[i].spread_fraction > was.spread_fraction)
        for j, (other, _) in keyed.items():
            assert not (other[0] <= size[0] and other[1] <= size[1] and other != size) or after[j].value < after[i].value


# -- works ------------------------------------------------------------------------------------------------------------


def test_the_optimizer_is_the_runtimes_own_on_cold_state(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[optimizer.Step] = []

    def remembered(step: optimizer.Step) -> Any:
        steps.append(step)
        return tasks_of(step)

    tasks_of = optimizer.Step.tasks
    monkeypatch.setattr(optimizer.Step, "tasks", remembered)
    work = works.updates(2)
    assert work.tasks is not None
    tasks = work.tasks()
    assert len(tasks) * optimizer.TASK_ELEMENTS == work.amount
    master = steps[0].to.master
    assert master.remainder is not None
    assert 14 * master.weight.numel() > 10**8
    before = master.whole()
    for task in tasks:
        task(Scratch())
    assert (master.whole() != before).float().mean() > 0.5


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


def test_cold_is_what_all_caches_together_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core, (shared, size) in enumerate([("0-1", "307200K"), ("0-1", "307200K"), ("2", "307200K"), ("3", "none")]):
        (at := tmp_path / f"cpu{core}" / "cache" / "index3").mkdir(parents=True)
        (at / "shared_cpu_list").write_text(shared + "\n")
        (at / "size").write_text(size + "\n")
    monkeypatch.setattr(works, "CACHES", tmp_path)
    assert works.cold_bytes.__wrapped__() == 4 * 300 * 2**20
    monkeypatch.setattr(works, "CACHES", tmp_path / "nowhere")
    assert works.cold_bytes.__wrapped__() == works.COLD_BYTES
