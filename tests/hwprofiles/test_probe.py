"""Does the probe measure, and say what it measured?

Nothing here says how fast a machine must be: only that the result is whole, consistent and honest.
"""

import itertools
import json
import os
import subprocess
import sys
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

from hwprofiles.probe import host, instruments, measure, timings, works
from hwprofiles.probe.cliffs import optimizer_cliffs
from hwprofiles.probe.host import Processor
from hwprofiles.probe.instruments import Bench, Patience
from hwprofiles.probe.timings import Timing
from hwprofiles.schema import Profile
from penstock.cli.probe import headline, probe, remarks, text_of
from runtime.errors import ProfileError
from runtime.host.optimizer import ParamState, SplitMaster, adamw_
from runtime.machines.cores import split_beside_gpu, split_cores

ROOT = Path(__file__).resolve().parents[2]
GLANCE = measure.Effort(
    Patience(least_repeats=3, most_repeats=5, point_s=0.01, window_s=0.03, longest_s=0.3),
    tokens=(64, 512),
    widths=(128, 512),
    odd_shapes=((512, 128, 2048),),
    seq_lens=(128, 512),
    copy_bytes=(2**20, 16 * 2**20),
    cold_bytes=96 * 2**20,
    patient_s=5.0,
)
times = st.lists(st.floats(min_value=1e-6, max_value=10), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def probed() -> tuple[Profile, list[tuple[str, float]]]:
    steps: list[tuple[str, float]] = []
    return measure.probe_cpu(GLANCE, lambda what, fraction: steps.append((what, fraction)), "mine"), steps


def bench(cores: list[int] | None = None) -> Bench:
    here = cores or sorted(os.sched_getaffinity(0))
    return Bench(GLANCE.patience, *split_cores(here))


def test_a_probe_is_a_profile_that_reads_back(probed: tuple[Profile, object]) -> None:
    profile = probed[0]
    assert Profile.from_json(json.loads(text_of(profile))) == profile
    assert profile.name == "mine"
    assert profile.device.kind == "cpu"
    assert profile.device.compute_threads == len(split_cores(sorted(os.sched_getaffinity(0)))[0])
    assert profile.host.n_cores == len(split_cores(sorted(os.sched_getaffinity(0)))[1])


def test_a_probe_calls_measured_all_but_what_a_cpu_has_by_nature(probed: tuple[Profile, object]) -> None:
    profile = probed[0]
    not_measured = {place for place, q in profile.quantities() if profile.sources[q.source].kind != "measured"}
    assert not_measured == {"device.context_bytes", "device.workspace_bytes", "link.host_cores_per_copy", "host.runtime_bytes"}
    for source in profile.sources.values():
        assert source.date
        assert source.device
        assert source.driver
        assert "torch" in source.driver


def test_a_probe_covers_both_precisions_and_shapes_that_are_not_square(probed: tuple[Profile, object]) -> None:
    device = probed[0].device
    for dtype in ("bf16", "fp32"):
        assert len({p.m for p in device.matmul[dtype]}) > 1
        assert any(p.k != p.n for p in device.matmul[dtype])
        assert {p.head_dim for p in device.attention["flash"][dtype]} == {64, 128}


def test_a_probe_tells_what_copies_and_the_optimizer_do_to_each_other(probed: tuple[Profile, object]) -> None:
    link = probed[0].link
    both = [curve.duplex_bytes_per_s for curve in (link.h2d, link.d2h)]
    assert sum(q.value for q in both if q is not None) == pytest.approx(link.duplex_bytes_per_s.value, rel=1e-4)
    for curve in (link.h2d, link.d2h):
        assert curve.under_optimizer_bytes_per_s is not None
    counts = timings.thread_counts(probed[0].host.n_cores)
    assert [point.threads for point in probed[0].host.optimizer] == counts


def test_device_and_host_share_the_memory_and_book_none_of_it_twice(probed: tuple[Profile, object]) -> None:
    profile = probed[0]
    total = profile.device.memory_bytes.value + profile.host.memory_bytes.value
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < total <= physical


def test_progress_never_goes_back_and_ends_at_one(probed: tuple[object, list[tuple[str, float]]]) -> None:
    fractions = [fraction for _, fraction in probed[1]]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_the_table_and_the_remarks_tell_what_the_numbers_rest_on(probed: tuple[Profile, object]) -> None:
    profile = probed[0]
    assert headline(profile).row_count > 15
    counts = profile.count_sources()
    assert remarks(profile)[0] == f"numbers: {counts['measured']} measured, {counts['assumed']} assumed"
    assert "while the other lanes work" in " ".join(remarks(profile))


# -- the instruments --------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(min_value=0, max_value=300), min_size=1))
def test_compute_and_host_lanes_have_cores_of_their_own_unless_there_is_only_one(cores: set[int]) -> None:
    compute, host = split_cores(sorted(cores))
    assert compute
    assert host
    assert {*compute, *host} == cores
    assert len(cores) == 1 or not {*compute} & {*host}
    assert len(cores) == 1 or len(compute) == len(cores) // 2


@pytest.mark.parametrize(("n_cores", "n_issuing", "n_host"), [(1, 1, 1), (2, 1, 1), (4, 1, 3), (7, 1, 6), (8, 2, 6), (16, 2, 14)])
def test_the_lanes_that_feed_a_gpu_have_a_core_and_from_eight_cores_on_two(n_cores: int, n_issuing: int, n_host: int) -> None:
    cores = list(range(10, 10 + n_cores))
    issuing, host = split_beside_gpu(cores[::-1])
    assert (issuing, host) == (cores[:n_issuing], cores[-n_host:])
    assert {*issuing, *host} == {*cores}


@pytest.mark.parametrize("split", [split_cores, split_beside_gpu])
def test_without_cores_there_is_nothing_to_split(split: Callable[[list[int]], object]) -> None:
    with pytest.raises(ValueError, match="no cores"):
        split([])


def test_work_runs_on_the_cores_and_threads_of_its_lane_and_this_thread_keeps_its_own() -> None:
    mine = os.sched_getaffinity(0)
    b = bench()
    seen: list[tuple[set[int], int, bool]] = []

    def look() -> None:
        seen.append((os.sched_getaffinity(0), torch.get_num_threads(), torch.is_grad_enabled()))

    b.compute(look)
    compute = seen[-1]
    b.host(look)
    host = seen[-1]
    assert compute == ({*b.compute_cores}, len(b.compute_cores), False)
    assert host == ({*b.host_cores}, 1, False)
    assert os.sched_getaffinity(0) == mine


def test_the_time_of_repeats_is_the_median_and_one_outlier_moves_neither_it_nor_the_spread() -> None:
    assert Timing.of([1.0, 1.1, 0.9]).seconds == 1.0
    assert Timing.of([1.0, 1.0, 1.0, 1.0, 50.0]) == Timing(1.0, timings.LEAST_SPREAD)
    assert Timing.of([1.0, 1.2, 0.8]).spread_fraction == pytest.approx(1.9 * 0.2)


def test_a_work_is_repeated_as_often_as_the_effort_says_and_a_very_long_one_not_at_all() -> None:
    ticks = iter(range(1000))
    b = bench()
    b.clock = lambda: next(ticks) * 0.02  # every look at the clock is 20 ms later: beyond the time for a point
    n = [0]

    def work() -> None:
        n[0] += 1

    timing = b.repeat(work)
    assert n[0] == 1 + GLANCE.patience.least_repeats
    assert timing.seconds == pytest.approx(0.02)
    b.clock = lambda: next(ticks) * 10.0
    n[0] = 0
    assert b.repeat(work).seconds == pytest.approx(10.0)
    assert n[0] == 1


def test_a_run_in_which_the_thread_had_no_core_does_not_count_where_calm_ones_are_left() -> None:
    b = bench()
    now_s, queued_s = [0.0], [0.0]
    b.clock, b.queue_clock = lambda: now_s[0], lambda: queued_s[0]
    runs = iter([(0.001, 0.0), (1.0, 0.0), (5.0, 2.0), (1.0, 0.0), (4.0, 2.0), (1.2, 0.0)])
    b.patience = replace(GLANCE.patience, most_repeats=5, point_s=100.0, longest_s=100.0)

    def work() -> None:
        seconds, in_queue_s = next(runs)
        now_s[0] += seconds
        queued_s[0] += in_queue_s

    assert b.repeat(work).seconds == pytest.approx(1.0)
    assert b.stolen_s / b.measured_s == pytest.approx(4 / 12.2)
    runs = iter([(0.001, 0.0)] + [(2.0, 1.0)] * 5)
    assert b.repeat(work).seconds == pytest.approx(1.0)  # no calm run: what the others took is left out


def test_lanes_measured_together_really_run_at_the_same_time() -> None:
    """Each lane sees the other's count move while it is running."""
    counts = [0, 0]
    moved = [False, False]

    def lane(me: int) -> None:
        other = counts[1 - me]
        time.sleep(0.002)
        counts[me] += 1
        moved[me] |= counts[1 - me] != other

    b = bench()
    first, second = b.together([(b.host_cores, lambda: lane(0)), (b.compute_cores, lambda: lane(1))])
    assert all(moved)
    if b.host_cores != b.compute_cores:  # on one core, what nobody computes counts as taken by others
        assert min(first.seconds, second.seconds) >= 0.002


def test_what_fails_in_a_lane_fails_the_probe() -> None:
    def fail() -> None:
        raise ProfileError("broken")

    b = bench()
    with pytest.raises(ProfileError, match="broken"):
        b.compute(fail)
    with pytest.raises(ProfileError, match="broken"), instruments.repeating(b.host_cores, [fail]):
        pass


def test_time_in_the_queue_for_a_core_is_seen_and_sleep_is_not() -> None:
    """Two threads that compute on one core each wait for about half of the time."""
    b = bench()
    core = b.host_cores[:1]
    seen: list[float] = []

    def asleep() -> float:
        before_s = instruments.queued_s()
        time.sleep(0.2)
        return instruments.queued_s() - before_s

    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not count")
    slept_s = instruments.on_cores(core, 1, asleep)
    busy = [torch.rand(600, 600) for _ in range(2)]

    def multiply(x: torch.Tensor) -> None:  # releases the interpreter's lock, so that both really want the core
        before_s, start_s = instruments.queued_s(), time.thread_time()
        while time.thread_time() - start_s < 0.2:
            _ = x @ x
        seen.append(instruments.queued_s() - before_s)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(instruments.on_cores, core, 1, lambda x=x: multiply(x)) for x in busy]:
            future.result()
    assert max(seen) > 0.05
    assert max(seen) > slept_s


@given(times)
def test_lifted_times_rise_and_are_never_lowered(seconds: list[float]) -> None:
    points = [(float(i), Timing(s, 0.1)) for i, s in enumerate(seconds)]
    lifted = [*points]
    timings.raise_times(lifted)
    after = [timing.seconds for _, timing in lifted]
    assert all(a < b for a, b in itertools.pairwise(after))
    for (_, was), (_, now) in zip(points, lifted, strict=True):
        assert now == was or (now.seconds > was.seconds and now.spread_fraction > was.spread_fraction)


@given(st.lists(st.floats(min_value=1e-6, max_value=10), min_size=9, max_size=9))
def test_lifted_products_pass_the_schemas_own_check(seconds: list[float]) -> None:
    shapes = [(m, w, w) for m in (64, 256, 1024) for w in (128, 256, 512)]
    by_shape = dict(zip(shapes, (Timing(s, 0.1) for s in seconds), strict=True))
    timings.raise_products(by_shape)
    for (m, k, _), timing in by_shape.items():
        for (m0, k0, _), other in by_shape.items():
            assert not (m0 <= m and k0 <= k and (m0, k0) != (m, k)) or other.seconds < timing.seconds


def test_walking_copies_copy_every_byte_in_the_end() -> None:
    source = torch.arange(256 * 1024, dtype=torch.int64).to(torch.uint8)
    to = torch.zeros_like(source)
    work = works.walking_copy(to, source, 64 * 1024)
    for _ in range(4):
        work()
    assert to[: 192 * 1024].equal(source[: 192 * 1024])


def test_the_walking_update_is_the_runtimes_own_and_walks_through_all_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    piece, updated = 65_536, []

    def update(to: ParamState, *rest: Any) -> None:
        assert isinstance(to.master, SplitMaster)
        before = to.master.joined(slice(None))
        adamw_(to, *rest)
        master = to.master.joined(slice(None))
        assert (master != before).float().mean() > 0.5
        assert (to.master.weight.float() - master).abs().max() <= master.abs().max() * 2**-8
        updated.append((to.master.weight.data_ptr(), to.master.numel()))

    monkeypatch.setattr(works, "adamw_", update)
    work, other = works.walking_updates(3 * piece, piece, 2)
    for _ in range(4):
        work()
    start = updated[0][0]
    other()
    assert updated.pop()[0] not in {at for at, _ in updated}, "two lanes share their state"
    assert updated == [(start + i * piece * 2, piece) for i in (0, 1, 2, 0)]


@given(st.integers(min_value=1, max_value=256))
def test_every_thread_has_optimizer_state_of_its_own_however_many_there_are(n_threads: int) -> None:
    for effort in (measure.QUICK, measure.THOROUGH):
        assert Processor.params_per_thread(effort.cold_bytes, n_threads) >= 4 * works.UPDATE_PARAMS
        assert effort.needed_bytes(2 * n_threads, n_threads) < effort.needed_bytes(2 * n_threads + 2, n_threads + 1)


def test_a_machine_with_more_host_cores_than_a_small_probe_has_state_for_is_measured() -> None:
    b = bench()
    b.host_cores = b.host_cores[:1] * 4  # four lanes on one real core
    fields = measure._host(b, Processor(b, GLANCE.cold_bytes), lambda: None)
    assert [point["threads"] for point in fields["optimizer"]] == [1, 2, 4]


@given(st.integers(min_value=1, max_value=1000))
def test_threads_are_tried_in_powers_of_two_and_all_of_them(n_cores: int) -> None:
    counts = timings.thread_counts(n_cores)
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, n_cores)
    assert all(later <= 2 * before for before, later in itertools.pairwise(counts))


def test_a_probe_that_has_used_up_its_time_on_a_busy_machine_looks_less_often() -> None:
    b = bench()
    now_s, runs = [0.0], [0]
    b.clock, b.queue_clock = lambda: now_s[0], lambda: now_s[0] / 2  # every run is half stolen: none is calm
    b.patience = Patience(least_repeats=5, most_repeats=50, point_s=1.0, window_s=1.0, longest_s=100.0)

    def work() -> None:
        now_s[0] += 0.3
        runs[0] += 1

    b.repeat(work)
    patient, runs[0] = runs[0], 0
    b.hurry_after_s = 0.0
    b.repeat(work)
    assert runs[0] < patient / 2
    b.patience = replace(b.patience, point_s=0.01)
    runs[0] = 0
    b.repeat(work)
    assert runs[0] == 1 + instruments.HURRIED_REPEATS


def test_memory_nodes_are_read_with_the_cores_that_we_may_use(tmp_path: Path) -> None:
    for node, cores in enumerate(("0-3,8", "4-7", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    (tmp_path / "node9x").mkdir()
    assert host.memory_nodes([0, 1, 5, 8], tmp_path) == ((0, 1, 8), (5,), ())
    assert host.memory_nodes([0, 1], tmp_path / "nowhere") == ((0, 1),)


def points(*rates: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"threads": threads, "params_per_s": {"value": rate}} for threads, rate in rates]


@pytest.mark.parametrize(
    ("rates", "dram_bytes_per_s", "flagged"),
    [
        (points((1, 1e9)), 1e12, False),
        (points((1, 1e9), (8, 7e9)), 1e12, False),
        (points((1, 1e9), (4, 3e9), (8, 3e9)), 1e12, True),
        (points((1, 1e9), (8, 3e9)), 100e9, False),  # 28 bytes each: the memory is used up
        (points((1, 1e9), (8, 0.5e9)), 100e9, True),
    ],
)
def test_an_optimizer_that_does_not_scale_is_a_cliff_unless_the_memory_is_why(
    rates: list[dict[str, Any]], dram_bytes_per_s: float, flagged: bool
) -> None:
    assert bool(optimizer_cliffs(rates, dram_bytes_per_s)) == flagged


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_json_to_standard_output_and_the_table_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "THOROUGH", GLANCE)
    result = CliRunner().invoke(probe, ["--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0
    assert Profile.from_json(json.loads(result.stdout)).name == "this-machine"
    assert "numbers:" in result.stderr
    assert result.stderr.startswith("measuring: copies\nmeasuring: optimizer\n"), "what is done is said when it is done"


def test_a_probe_written_to_a_file_is_named_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, probed: tuple[Profile, object]
) -> None:
    def quick(effort: object, progress: object, name: str) -> Profile:
        return Profile.from_json(probed[0].to_json() | {"name": name})

    monkeypatch.setattr(measure, "probe_cpu", quick)
    result = CliRunner().invoke(probe, ["--device", "cpu", "-o", str(tmp_path / "desk.json")], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert json.loads((tmp_path / "desk.json").read_text())["name"] == "desk"
    assert [p.name for p in tmp_path.iterdir()] == ["desk.json"]


@pytest.mark.parametrize("output", ["nowhere/mine.json", "."])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str
) -> None:
    monkeypatch.setattr(measure, "probe_cpu", lambda *_: pytest.fail("measured first"))
    with pytest.raises(ProfileError, match="-o"):
        CliRunner().invoke(probe, ["--device", "cpu", "-o", str(tmp_path / output)], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_the_error_is_one_line_that_says_what_to_do() -> None:
    with pytest.raises(ProfileError, match="--device cpu") as caught:
        CliRunner().invoke(probe, ["--device", "cuda"], catch_exceptions=False)
    assert "\n" not in str(caught.value)


def test_too_little_memory_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 10**8)
    with pytest.raises(ProfileError, match="100 MB of memory are free"):
        measure.probe_cpu(GLANCE, lambda what, fraction: None)


def test_asking_for_help_does_not_wake_torch() -> None:
    code = "import sys, penstock.cli.probe, hwprofiles.schema; assert not {'torch', 'hwprofiles.probe.measure'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
