"""Host AdamW, norms and sums in chunks by several threads: bitwise equal to a reference implementation."""

import os
import platform
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.runtime.compiled import compiled_loop
from penstock.runtime.executor import OpError, execute
from penstock.runtime.host import chunks, compiled_loops, optimizer, rounding, updates
from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.host.norms import added, squares_tasks, sum_of_squares
from penstock.runtime.host.optimizer import KernelLayout, Master, ParamState, Step, SummedGradient, summed
from penstock.runtime.host.workers import Workers
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.optimizer import AdamW, optimizing
from tests.lanes import diagonal, mostly_slow
from tests.reference import half_up, halved, lean_step
from tests.tiny import tiny_config
from tests.training import machine_for, plan_of, same_bits, semantics_of

KINDS = ("split", "bf16", "fp32")
GRADIENTS = (torch.bfloat16, torch.float32)
SETTINGS = AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1)
ODD = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3e38, 3.4e38, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8)
SIZES = (1, 15, 127, 4096, chunks.UPDATE_ELEMENTS + 65)


def random_state(kind: str, n: int, seed: int, odd: bool = False) -> ParamState:
    """Return a parameter in the middle of training; `odd`: with zeros, infinities, NaN and ties among its elements."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(n, generator=generator)
    if odd:
        wide[torch.arange(min(n, len(ODD)))] = torch.tensor(ODD[:n])
    m, v = torch.randn(n, generator=generator) * 1e-2, torch.rand(n, generator=generator) * 1e-4
    match kind:
        case "split":
            master = Master(torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int16))
            master.put(slice(None), wide)
        case "split24":
            master = Master(torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int8))
            master.put(slice(None), wide)
        case "bf16":
            master = Master(wide.bfloat16())
        case _:
            master = Master(wide)
    return ParamState(master, (m, v))


def copied(state: ParamState) -> ParamState:
    master = Master(state.master.weight.clone(), None if state.master.remainder is None else state.master.remainder.clone())
    return ParamState(master, tuple(moment.clone() for moment in state.moments))


def update_(state: ParamState, gradient, factor: float, n_updates: int, settings=SETTINGS, start_from=None) -> None:
    """Update `state`, starting from `start_from` or itself. `gradient`: a tensor or a SummedGradient."""
    for task in Step(state, summed(gradient), factor, n_updates, settings, start_from).tasks():
        task(Scratch())


def wide_master(state: ParamState) -> torch.Tensor:
    if state.master.remainder is not None:  # as in the design: bits of the weight, and the residual
        lacks = state.master.remainder.long() << 8 * (state.master.remainder.itemsize == 1)
        bits = (state.master.weight.view(torch.int16).long() << 16) + lacks
        return bits.to(torch.int32).view(torch.float32)
    return state.master.weight.float()


def plainly(state: ParamState, gradient: torch.Tensor, factor: float, n_updates: int) -> tuple[torch.Tensor, ...]:
    """Return master, moments after one step, on the whole parameter at once."""
    wide, m, v = wide_master(state).clone(), *(moment.clone() for moment in state.moments)
    s = SETTINGS
    torch._fused_adamw_(
        [wide], [gradient.float() * factor], [m], [v], [], [torch.tensor(float(n_updates))],
        lr=s.lr, beta1=s.beta1, beta2=s.beta2, weight_decay=s.weight_decay, eps=s.eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    return wide, m, v


def equal_but_for_nans_payload(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("odd", [False, True], ids=["common numbers", "odd numbers"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in place", "into a shadow"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunk_by_chunk_is_the_whole_parameter_at_once(kind, elsewhere, odd, n):
    initial = random_state(kind, n, seed=n, odd=odd)
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide, m, v = plainly(initial, gradient, 0.25, 3)
    target = random_state(kind, n, seed=99) if elsewhere else copied(initial)
    untouched = copied(initial)
    update_(target, gradient, 0.25, 3, SETTINGS, initial if elsewhere else None)
    same = equal_but_for_nans_payload if odd else same_bits
    expected_weight = torch.where(wide.isnan(), wide, half_up(wide).float()).bfloat16()
    assert same(target.moments[0], m)
    assert same(target.moments[1], v)
    assert same(wide_master(target), expected_weight.float() if kind == "bf16" else wide)
    if kind == "split":
        assert same(target.master.weight, expected_weight)
    if elsewhere:
        assert same(wide_master(initial), wide_master(untouched)), "the source of the update was changed"
        assert same_bits(initial.moments[0], untouched.moments[0])


LEAN_KINDS = [*product(("adamw", "lion"), ("split", "bf16", "split24"), ("fp32", "bf16", "int8"))][1:]  # the first saves everything
LEAN_KINDS += [("lion", "fp32", "bf16")]


@diagonal(("rule,kind,moments", LEAN_KINDS), ("elsewhere", [False, True]), ("n", [1, 300, 2 * rounding.TURN + 65]))
def test_less_state_is_updated_as_by_a_plain_loop_whole_or_cut(rule, kind, moments, elsewhere, n):
    """Include ranks with a part each, and infinities and NaN among masters."""
    initial = random_state(kind, n, seed=n, odd=True)
    old_moments = initial.moments[: 2 - (rule == "lion")]
    if moments == "int8":
        old_moments = tuple(torch.from_numpy(rounding.packed(m.numpy(), is_root=i == 1)) for i, m in enumerate(old_moments))
    initial = ParamState(initial.master, tuple(moment.to(DTYPE[moments]) for moment in old_moments))
    parts = tuple(torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    cut, results = min(n, 128 * 700), []
    keys, is_drawn, _ = rounding.stochastic_rounding(0, 3, "p", 0, kind in ("bf16", "split24"))
    for pieces in ([slice(0, n)], [slice(0, cut), slice(cut, n)]):
        target = copied(random_state(kind, n, seed=99) if elsewhere else initial)
        target = ParamState(target.master, tuple(moment.clone() for moment in initial.moments))
        for part in pieces if n > cut else pieces[:1]:
            mine, start_from = (of_part(state, part) for state in (target, initial))
            gradient = SummedGradient(tuple(p[part] for p in parts), torch.bfloat16)
            stochastic = rounding.StochasticRounding(keys, is_drawn, part.start)
            step = Step(mine, gradient, 0.3, 3, SETTINGS, start_from if elsewhere else None, rule, stochastic)
            for task in step.tasks():
                task(Scratch())
        results.append(target)
    assert all(map(equal_but_for_nans_payload, *([t.float() for t in result.tensors] for result in results)))
    how = optimizing(f"{rule}:moments={moments}" + (f",master={kind}" if is_drawn else ""), None)
    semantics = Semantics(1, 1, 1, **how)
    wide = [in_fp32(moment, i == 1, n) for i, moment in enumerate(initial.moments)]
    s = {"betas": (SETTINGS.beta1, SETTINGS.beta2), **{name: getattr(SETTINGS, name) for name in ("lr", "eps", "weight_decay")}}
    gradient = (parts[0] + parts[1]).bfloat16().float() * torch.tensor(0.3)
    master, expected = lean_step(semantics, "p", wide_master(initial), wide, gradient, s, 3)
    is_finite = wide_master(initial).isfinite() & master.isfinite()
    assert torch.equal(wide_master(results[0])[is_finite], master[is_finite])
    for i, moment in enumerate(expected):
        assert torch.equal(in_fp32(results[0].moments[i], i == 1, n), moment.float())


def in_fp32(moment: torch.Tensor, is_root: bool, n: int) -> torch.Tensor:
    return rounding.Int8Moment(moment, n, is_root).values() if moment.dtype is torch.uint8 else moment.float()


def test_a_full_disk_does_not_end_what_is_compiled(tmp_path):
    """Fail every write: the loop runs without a cache."""
    code = """if 1:
        import resource, torch
        from penstock.runtime.host import compiled_loops
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        total = torch.ones(3)
        compiled_loops.add_part(total, torch.full((3,), 0.5), True, 0, 3)
        print(compiled_loops.begin(5, 6), total.tolist(), len(compiled_loops.add.signatures))"""
    environ = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    process = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert process.stdout == f"{begin_plainly(5 + 6)} [0.5, 0.5, 0.5] 1\n"
    assert [path for path in tmp_path.rglob("*.nb?") if path.stat().st_size] == []


def begin_plainly(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x2C1B3C6D), (16, 1)):
        x = (x ^ x >> shift) * factor % 2**32
    return x % 2**16


@pytest.mark.parametrize("is_root", [False, True])
def test_packing_what_was_unpacked_changes_no_bit(is_root):
    """Pack every code at scales of every size, and a short last group."""
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 256, (4000, 32), np.uint8)
    codes[::3] = np.arange(256, dtype=np.uint8).reshape(8, 32)[np.arange(1334) % 8]
    if not is_root:
        codes[codes == 128] = 127  # never the result of packing
    codes[:, 5] = 255 if is_root else 127  # the largest
    scales = generator.integers(127 - 40 << 7, 127 + 50 << 7, (4000, 1), np.uint16)
    codes[7] = scales[7] = codes[-1, 12:] = 0
    groups, n = np.concatenate([codes.reshape(1000, 128), scales.view(np.uint8).reshape(1000, 8)], 1), 4000 * 32 - 20
    again = rounding.packed(rounding.unpacked(groups.reshape(-1), n, is_root), is_root, np.full(4000, 0xFFFF))
    assert (again == groups.reshape(-1)).all()
    stored = rounding.Int8Moment(torch.zeros(rounding.group_bytes(n), dtype=torch.uint8), n, is_root)
    stored.copy_(torch.from_numpy(rounding.unpacked(groups.reshape(-1), n, is_root)))
    assert torch.equal(stored.groups, torch.from_numpy(groups.reshape(-1)))


@pytest.mark.parametrize("is_root", [False, True])
def test_groups_of_every_size_are_rounded_once(is_root):
    """Include rounded scales, the least and the greatest stored scale, and non-finite elements."""
    generator, bits = np.random.default_rng(0), np.uint32([0x7FC00000, 0x7FFFFFFF, 0x7F800000])
    x = generator.random((3000, 32), np.float32) * 2.0 ** generator.integers(-70, 122, (3000, 1))
    x[::3] *= (255 if is_root else 1) * 2.0**-58 * generator.uniform(0.99, 1.01, (1000, 1)) / x[::3].max(1, keepdims=True)
    x = (np.minimum(x, 1e19) ** 2 if is_root else x).astype(np.float32)
    x[5:20:5, 7] = bits.view(np.float32)
    packed = rounding.packed(x.ravel(), is_root, generator.integers(0, 2**16, 3000))
    unpacked = rounding.unpacked(packed, x.size, is_root)
    assert (rounding.packed(unpacked, is_root) == packed).all()
    assert {*np.flatnonzero(np.isnan(unpacked[: 32 * 100])) // 32} >= {5, 10, 15}
    nearest = rounding.unpacked(rounding.packed(np.ones(3200, np.float32) * np.float32(1.0078), is_root), 3200, is_root)
    assert nearest == pytest.approx(1.0078, rel=4e-3)


def of_part(state: ParamState, part: slice) -> ParamState:
    remainder = None if state.master.remainder is None else state.master.remainder[part]
    groups = slice(rounding.group_bytes(part.start), rounding.group_bytes(part.stop))
    moments = tuple(moment[groups if moment.dtype is torch.uint8 else part] for moment in state.moments)
    return ParamState(Master(state.master.weight[part], remainder), moments)


def test_a_moment_of_fewer_bits_decays_as_it_should_on_average():
    """Decay by 0.1 % an update, less than half a bf16 ulp: rounding to nearest never decays. Use int8, too, and roots of 1e-5, for
    which fp16 scales never decay."""
    assert sorted(compiled_loops.order()[: rounding.TURN].tolist()) == [*range(rounding.TURN)], "some numbers are likelier"
    n, settings, small = 4096, replace(SETTINGS, beta2=0.999), np.full(2**17, 1e-10, np.float32)
    groups = tuple(torch.from_numpy(rounding.packed(x, is_root)) for x, is_root in ((0 * small, False), (small, True)))
    of_groups = ParamState(Master(torch.zeros(2**17)), groups)
    state = ParamState(Master(torch.zeros(n)), (torch.zeros(n).bfloat16(), torch.ones(n).bfloat16()))
    for n_updates in range(1, 301):
        stochastic = rounding.stochastic_rounding(0, n_updates, "p", 0, is_master_stochastic=False)
        for param in (state, of_groups):
            gradient = summed(torch.zeros_like(param.master.weight))
            for task in Step(param, gradient, 1.0, n_updates, settings, None, "adamw", stochastic).tasks():
                task(Scratch())
    assert float(rounding.Int8Moment(groups[1], 2**17, True).values().mean()) == pytest.approx(1e-10 * 0.999**300, rel=2e-2)
    assert float(state.moments[1].float().mean()) == pytest.approx(0.999**300, rel=2e-3)
    assert 0.02 < float(state.moments[1].float().std()) < 0.05, "elements go down together"


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize(
    ("n_parts", "part_dtype", "dtype"),
    [(1, "bf16", "bf16"), (1, "fp32", "fp32"), (1, "fp32", "bf16"), (2, "fp32", "bf16"), (2, "fp32", "fp32"), (1, "bf16", "fp32")],
)
def test_a_gradient_is_summed_rounded_widened_and_scaled(n_parts, part_dtype, dtype, factor):
    types, n = {"bf16": torch.bfloat16, "fp32": torch.float32}, 1000
    generator = torch.Generator().manual_seed(2)
    parts = tuple(torch.randn(n, generator=generator).to(types[part_dtype]) for _ in range(n_parts))
    total = (parts[0] + parts[1] if n_parts == 2 else parts[0]).to(types[dtype]).float()
    state = random_state("fp32", n, seed=5)
    wide, m, _ = plainly(state, total, factor, 1)
    gradient = SummedGradient(parts, types[dtype])
    update_(state, gradient, factor, 1, SETTINGS)
    assert same_bits(state.master.weight, wide)
    assert same_bits(state.moments[0], m)
    assert sum_of_squares(gradient) == float(halved(total.square()))


def test_a_gradient_that_is_no_number_is_none_when_it_is_rounded():
    """Include NaN as GPUs write it, with all bits set: rounding carries into its sign."""
    parts = torch.full((300,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32), torch.zeros(300)
    for n_parts in (1, 2):
        gradient, state = SummedGradient(parts[:n_parts], torch.bfloat16), random_state("fp32", 300, seed=5)
        update_(state, gradient, 1.0, 1, SETTINGS)
        assert np.isnan(sum_of_squares(gradient))
        assert bool(state.master.weight.isnan().all())


# Every layout of a plan: weight or master, split or not, gradient, moments, rule, stochastic rounding
MASTERS = ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False))
TABLE = [KernelLayout(weight, is_split, gradient) for weight, is_split in MASTERS for gradient in GRADIENTS]
TABLE += [
    KernelLayout(DTYPE["fp32" if master == "fp32" else "bf16"], "split" in master, torch.bfloat16, DTYPE[moments], rule, is_drawn)
    for rule, (master, is_drawn), moments in product(
        ("adamw", "lion"), (("split", False), ("split24", True), ("bf16", True), ("fp32", False)), ("fp32", "bf16", "int8")
    )
]


@mostly_slow("layout", TABLE, ids=str)
def test_every_kernel_gives_the_definitions_bits_with_packed_roots_and_quotients(layout, monkeypatch):
    """Scalar instructions are ten times slower: LLVM emits them if it cannot prove that arrays do not overlap."""
    fresh = compiled_loop(compiled_loops.update.py_func)  # numba has no assembly of machine code that it loads from its cache
    if is_adamw := layout.rule == "adamw":  # Lion has no roots and quotients
        monkeypatch.setattr(compiled_loops, "update", fresh)
    assert optimizer.host_differences(layout) == []
    if platform.machine() != "x86_64":
        pytest.skip("the assembly of x86 is read")
    assert len(fresh.signatures) == is_adamw
    packed = ["sqrtps", "divps", *["pmaxud"] * (layout.moments is torch.uint8)]  # the last: largest element of a group
    for signature in fresh.signatures:
        assembly = fresh.inspect_asm(signature)
        assert all(re.findall(rf"\bv?{name}\b.*%[xyz]mm", assembly) for name in packed), f"{layout} is scalar"


def test_a_kernel_whose_bits_differ_is_named_and_not_used(monkeypatch):
    """Without numba, too, the definition runs, with one warning line."""
    layout = KernelLayout(torch.float32, False, torch.float32)
    monkeypatch.setattr(optimizer, "host_differences", lambda layout: ["weight"])
    optimizer._tell_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"times as long: the compiled adamw on .* differs .*weight"):
        assert optimizer.update_kernel.__wrapped__(layout) is optimizer._reference_tasks
    monkeypatch.setattr(optimizer, "IS_COMPILED", False)
    with pytest.warns(RuntimeWarning, match="numba is not installed"):
        assert optimizer.squares_kernel.__wrapped__(torch.float32) is chunks.squares
    assert optimizer.add_kernel.__wrapped__(torch.float32) is chunks.add


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
@example(0x7F800001)  # NaN with a payload that half up rounds away, or carries into the sign
@example(0x7FFFFFFF)
@example(0xFFFFFFFF)
@example(0xFF800001)
@example(0x7F7FFFFF)  # the largest number; its weight is infinite
def test_a_master_survives_being_cut_and_joined_to_the_last_bit(bits):
    wide = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    short = Master(torch.zeros(1, dtype=torch.bfloat16), torch.full((1,), 7, dtype=torch.int8))
    short.put(slice(None), wide.clone())
    rounded = ((wide.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32) if wide.isfinite() else wide
    assert equal_but_for_nans_payload(short.values(), rounded)
    assert equal_but_for_nans_payload(short.weight, half_up(rounded) if wide.isfinite() else wide.bfloat16())
    master = Master(torch.zeros(1, dtype=torch.bfloat16), torch.full((1,), 7, dtype=torch.int16))
    master.put(slice(None), wide.clone())
    if bool(wide.isnan()):
        assert bool(master.weight.isnan())
        assert bool(master.values().isnan())
    else:
        assert same_bits(master.weight, half_up(wide))
        assert same_bits(master.values(), wide)


@pytest.mark.parametrize("n_threads", [2, 3, 7])
def test_the_number_of_workers_changes_no_bit(n_threads):
    """Use one large parameter of several tasks: its update, its sum of squares, and a sum of gradients."""
    n = 3 * optimizer.TASK_ELEMENTS + chunks.CHUNK_ELEMENTS + 77
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(0))
    summed = SummedGradient((gradient,), torch.float32)
    expected, total = random_state("split", n, seed=1), torch.zeros(n)
    state, running = copied(expected), torch.ones(n)
    update_(expected, gradient, 0.5, 2, SETTINGS)
    total += gradient
    workers = Workers(n_threads, Scratch)
    with workers.helped(no_grad):
        workers.run(Step(state, summed, 0.5, 2, SETTINGS).tasks())
        squares = workers.run(squares_tasks(summed))
        workers.run(optimizer.add_tasks(running, gradient, is_first=True))
    assert same_bits(state.master.weight, expected.master.weight)
    assert same_bits(wide_master(state), wide_master(expected))
    assert same_bits(state.moments[1], expected.moments[1])
    assert same_bits(running, total)
    assert added(s for chunk in squares for s in chunk) == sum_of_squares(gradient)
    obvious = 0.0
    for chunk in gradient.split(65_536):
        obvious += float(halved(chunk.square()))
    assert sum_of_squares(gradient) == obvious


@contextmanager
def no_grad():
    """Set up a lane like a machine, with one thread per kernel: otherwise a chunk's sum has several parts."""
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.lists(st.booleans(), max_size=12), st.integers(1, 3))
def test_the_first_error_of_a_task_is_raised_and_workers_go_on(n_threads, fails, n_rounds):
    n_before = threading.active_count()
    workers = Workers(n_threads, lambda: None)

    def task(number, fail):
        def work(scratch):
            if fail:
                raise ZeroDivisionError(number)
            return number

        return work

    with workers.helped():
        for _ in range(n_rounds):
            if any(fails):
                with pytest.raises(ZeroDivisionError) as caught:
                    workers.run([task(i, f) for i, f in enumerate(fails)])
                if n_threads == 1:
                    assert caught.value.args == (fails.index(True),)
            else:
                assert workers.run([task(i, f) for i, f in enumerate(fails)]) == list(range(len(fails)))
        assert workers.run([task(5, False)]) == [5], "an error stuck"
    assert threading.active_count() == n_before
    assert workers.run([task(6, False)]) == [6], "without helpers the caller does it"


@pytest.mark.parametrize("in_helper", [False, True], ids=["in the lane's own thread", "in a helper"])
def test_an_error_in_a_worker_is_the_ops_error(in_helper, monkeypatch):
    """Every thread ends."""
    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy(accumulation_group=4))
    machine, has_failed = machine_for(plan, n_workers=2), threading.Event()

    def broken(*args, **kwargs):
        def work(scratch):
            if threading.current_thread().name.startswith("worker") == in_helper:
                has_failed.set()
                raise FloatingPointError("a broken kernel")
            has_failed.wait(30)

        return [work, work]

    monkeypatch.setattr(updates.Step, "tasks", broken)
    n_threads = threading.active_count()
    with pytest.raises(OpError, match=r"lane cpu: update .*b0 failed: FloatingPointError: a broken kernel"):
        execute(plan, machine, 1)
    assert threading.active_count() == n_threads
