"""Gradient norms on the device: cost, bounds, training bits, and non-finite squares."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.bounds.machine import machine_bound, machine_facets, staying_bytes
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.memory import frame
from penstock.planner.predict.region import Resource
from penstock.runtime.cuda.nvrtc import ELEMENT, THREADS
from penstock.runtime.errors import PlanError
from penstock.runtime.host import chunks as reference
from penstock.runtime.host import norms, optimizer
from penstock.runtime.host.chunks import CHUNK_ELEMENTS
from penstock.runtime.host.norms import added, squares_at_once, squares_on_device, sum_of_squares
from penstock.runtime.host.optimizer import SummedGradient
from penstock.runtime.plan import Lane, Policy, Semantics, Update
from penstock.runtime.plan.legality import can_square
from tests.cuda_in_cpp import NEEDS_A_COMPILER, in_cpp
from tests.lanes import examples, mostly_slow
from tests.reference import halved
from tests.tiny import tiny_config
from tests.training import clip_some_steps, differences, semantics_of, streamed


@pytest.mark.parametrize("tied", [False, True])
def test_the_host_reads_no_gradient_twice(tied):
    """Host memory saves one read per gradient, except tied weights. The device reads the gradient at its own rate."""
    model, profile = read_model("qwen2.5-0.5b" if tied else "qwen2.5-7b"), read_profile("gh200")
    semantics = Semantics(512, 2, 1)
    workload = build_workload(model, semantics)
    assert workload.tied == tied
    dram_bytes, seconds = {}, {}
    for squares in (False, True):
        plan = lower(model, workload, semantics, Policy(accumulation_group=2, square_on_device=squares), {})
        demands = CostModel(profile).demands(plan)
        dram_bytes[squares] = sum(dict(d.uses).get(Resource.DRAM, 0.0) * d.alone_s for d in demands)
        of_ops = [*zip(plan.ops, demands, strict=True)]
        seconds[squares] = {lane: sum(d.alone_s for op, d in of_ops if op.lane is lane) for lane in Lane}
    elements = sum(b.slot_elements for b in workload.blocks[1:-1])
    elements += 0 if tied else workload.blocks[0].slot_elements + workload.blocks[-1].slot_elements
    assert dram_bytes[False] - dram_bytes[True] == pytest.approx(2 * elements, rel=1e-6)
    saved_s = 2 * elements / profile.host.reduce_bytes_per_s.value
    assert seconds[False][Lane.CPU] - seconds[True][Lane.CPU] == pytest.approx(saved_s, rel=1e-6)
    read_s = 2 * elements / profile.device.memory_bytes_per_s.value
    n_kernels = (seconds[True][Lane.GPU] - seconds[False][Lane.GPU] - read_s) / profile.device.kernel_overhead_s.value
    n_tensors = sum(len(workload.blocks[b].parameters) for b in can_square(workload, semantics))
    assert n_tensors < n_kernels < 2 * n_tensors + 5 * len(workload.blocks)


@given(st.data())
@settings(deadline=None, max_examples=examples(20))
def test_the_machine_bound_is_the_least_of_any_device_shares(data):
    """Compare with a fine grid of shares, on machines bound by either side, with memory for part or all of the state."""
    fields = read_profile("gh200").to_json()
    fields["host"]["reduce_bytes_per_s"]["value"] *= 10.0 ** data.draw(st.floats(-3, 1))
    fields["device"]["memory_bytes_per_s"]["value"] *= 10.0 ** data.draw(st.floats(-3, 1))
    model, s = read_model("qwen2.5-7b"), Semantics(64, 1, 1)
    fields["device"]["memory_bytes"]["value"] = data.draw(st.sampled_from([10**9, 4 * 10**10, 10**12]))
    plan, cost = frame(model, build_workload(model, s), s, Policy()), CostModel(Profile.from_json(fields))
    blocks = can_square(plan.workload, s)
    host, squared, resident = (dict(machine_facets(plan, cost, *on_device)) for on_device in (((), ()), (blocks, ()), ((), blocks)))
    largest_share = min(1.0, fields["device"]["memory_bytes"]["value"] / sum(staying_bytes(plan, b) for b in blocks))

    def largest_s(of_squares, of_state):
        return max(host[k] + of_squares * (squared[k] - host[k]) + of_state * (resident[k] - host[k]) for k in host)

    grid_s = min(largest_s(n / 100, k / 100 * largest_share) for n in range(101) for k in range(101))
    bound = machine_bound(plan, cost)
    assert bound.seconds <= grid_s * (1 + 1e-12)
    assert bound.seconds >= grid_s * 0.97
    assert bound.binding in host


WAYS = {
    "barrier": Policy(square_on_device=True, accumulation_group=4, gradient_slots=2),
    "speculating": Policy(square_on_device=True, accumulation_group=4, update=Update.DEFERRED, speculate_blocks=(0, 2, 3)),
    "eager": Policy(square_on_device=True, accumulation_group=4, update=Update.EAGER, gradient_slots=2),
}


@mostly_slow(
    ("model_type", "tied", "way"), [("llama", False, "barrier"), ("llama", True, "speculating"), ("gpt_oss", False, "eager")]
)
def test_a_model_normed_on_the_device_is_the_plain_loop(model_type, tied, way):
    """Use a vocabulary larger than a chunk, and clip in some steps."""
    key = (("tie_word_embeddings", tied), ("vocab_size", 2200))
    semantics = semantics_of(model_type, clip_norm=None)
    if way != "eager":
        semantics = clip_some_steps(model_type, semantics, key)
    assert differences(streamed(tiny_config(model_type, **dict(key)), semantics, WAYS[way], delay_seed=3)) == []


SIZES = [1, 5, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 77]
sizes_drawn, dtypes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), [torch.bfloat16, torch.float32]
gradients_drawn = st.tuples(sizes_drawn, st.sampled_from(dtypes), st.integers(0, 9))


def cut_gradients(sizes, dtype, seed):
    """Return random gradients with their cuts: the first into three."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [(torch.randn(n, generator=generator) * 10.0 ** (seed - 6)).to(dtype) for n in sizes]
    n = sizes[0]
    of_first = [part for part in (range(n // 3), range(n // 3, n // 2), range(n // 2, n)) if len(part)]
    return gradients, [of_first, *([range(n)] for n in sizes[1:])]


@given(gradients_drawn)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_the_kernel_and_the_definition_add_in_one_order(sample):
    gradients, cuts = cut_gradients(*sample)
    for gradient, parts in zip(gradients, cuts, strict=True):
        sums = {sum_of_squares(gradient, None, parts)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(norms, "squares_kernel", lambda dtype: reference.squares)
            sums.add(sum_of_squares(gradient, None, parts))
        chunks = [chunk for part in parts for chunk in gradient[part.start : part.stop].split(CHUNK_ELEMENTS)]
        plain = [halved(chunk.float().square())[0] for chunk in chunks]
        assert sums == {added(map(float, plain))}


@NEEDS_A_COMPILER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_of_a_gpu_give_the_hosts_bits_in_cpp_too(dtype, tmp_path):
    defined = {"ELEMENT": ELEMENT[dtype], "CHUNK": CHUNK_ELEMENTS, "THREADS": THREADS}
    kernels = [in_cpp(tmp_path, "squares.cu", name, **defined) for name in ("squares", "sums")]
    gradients, cuts = cut_gradients(SIZES[::-1], dtype, 6)
    sums = torch.full((len(gradients),), math.nan, dtype=torch.float64)
    pieces = [[g[cut.start : cut.stop] for cut in parts] for g, parts in zip(gradients, cuts, strict=True)]
    squares_at_once(pieces, sums, *kernels)
    assert sums.tolist() == [sum_of_squares(g, None, parts) for g, parts in zip(gradients, cuts, strict=True)]
    for total, gradient in zip(sums.tolist(), gradients, strict=True):
        assert total == pytest.approx(float((gradient.double() ** 2).sum()), rel=1e-6)


def test_kernels_that_do_not_compile_are_refused_in_one_line(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(norms, "compiled_kernel", fail)
    with pytest.raises(PlanError, match=r"cpu does not sum squares to the host's bits here \(no compiler\); plan with --policy"):
        norms.squares_kernels(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(optimizer, "compiled_kernel", fail)
    with pytest.raises(PlanError, match=r"adamw on cuda does not give the host's bits here \(no compiler\); plan with --policy"):
        optimizer.device_kernel(torch.device("cuda"), optimizer.KernelLayout(torch.bfloat16, True, torch.bfloat16))


@pytest.mark.gpu
@given(gradients_drawn)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_gpu_sums_squares_to_the_hosts_bits(sample):
    gradients, cuts = cut_gradients(*sample)
    sums = torch.full((len(gradients),), math.nan, dtype=torch.float64, device="cuda")
    squares_on_device([g.cuda() for g in gradients], cuts, sums)
    assert sums.tolist() == [sum_of_squares(g, None, parts) for g, parts in zip(gradients, cuts, strict=True)]


def test_sums_keep_values_that_are_not_finite():
    for bad, position in product([math.inf, -math.inf, math.nan, 1e38], [0, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS]):
        gradient = torch.ones(2 * CHUNK_ELEMENTS + 3)
        gradient[position] = bad
        for dtype in (torch.float32, torch.bfloat16):
            assert not math.isfinite(sum_of_squares(SummedGradient((gradient,), dtype)))
    assert [sum_of_squares(torch.ones(n, dtype=torch.bfloat16)) for n in SIZES] == [float(n) for n in SIZES]
