"""Is a norm that the device makes the host's, at no cost to the host?"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hwprofiles.schema import Profile, read_profile
from planner.bounds.machine import machine_bound, machine_facets
from planner.check.check import check
from planner.lower.lower import lower
from planner.model.workload import build_workload, read_model
from planner.predict.cost import NORM_CHUNK_ELEMENTS, CostModel, region_of
from planner.predict.memory import frame
from planner.predict.simulate import simulate
from planner.search.relax import Relaxation
from planner.search.space import Family, family_of
from runtime.errors import PenstockError, PlanError
from runtime.executor import execute
from runtime.host import updates
from runtime.host.chunks import CHUNK_ELEMENTS
from runtime.host.norms import squares_at_once, sum_of_squares
from runtime.plan import Kind, Lane, Policy, Semantics, Slot, Update, Wait
from runtime.plan.legality import can_square
from runtime.plan.region import Resource
from tests.edits import error_of, index, small, with_op, with_slots
from tests.planner.test_search import MACHINES, NOBODY, semantics, workloads
from tests.tiny import STRUCTURES, tiny_config
from tests.training import (
    N_STEPS,
    Hostile,
    batches_of,
    clip_some_steps,
    differences,
    plain,
    plan_of,
    same_bits,
    scheduled,
    semantics_of,
    state_of,
    streamed,
)

BARRIER = Policy(square_on_device=True, accumulation_group=4, gradient_slots=2)
SPECULATING = Policy(
    square_on_device=True,
    accumulation_group=4,
    update=Update.DEFERRED,
    speculate_blocks=(0, 2, 3),
)
EAGER = Policy(square_on_device=True, accumulation_group=4, update=Update.EAGER, gradient_slots=2)


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", list(Update))
def test_each_gradient_is_squared_once_it_is_whole_and_the_sums_leave_with_it(update):
    plan = small(n_micro_batches=2, accumulation_group=2, update=update, gradient_slots=2, square_on_device=True)
    check(plan)
    last = {op.block: i for i, op in enumerate(plan.ops) if op.kind in (Kind.BACKWARD, Kind.LOSS)}
    for b in range(5):
        (square,) = (i for i, op in enumerate(plan.ops) if (op.kind, op.block) == (Kind.SQUARE, b))
        assert square == last[b] + 1
        (offload,) = (op for op in plan.ops if (op.kind, op.block) == (Kind.OFFLOAD_GRADIENT, b))
        assert (offload["squares"], offload["norm"]) == (Slot("squares", b), Slot("norm", b))
        assert plan.ops[square]["squares"] == offload["squares"]
        assert plan.ops[square]["gradient"] == offload["gradient"]
    assert not any(op.kind is Kind.NORM for op in plan.ops)
    (clip,) = (op for op in plan.ops if op.kind is Kind.CLIP)
    assert clip.every("norm") == tuple(Slot("norm", b) for b in range(5))


def test_a_tied_weight_is_normed_where_its_gradient_is_made_whole_on_the_host():
    plan = small(tied=True, square_on_device=True)
    check(plan)
    assert [op.block for op in plan.ops if op.kind is Kind.SQUARE] == [3, 2, 1]
    head, zero = (op for op in plan.ops if op.kind is Kind.NORM)
    assert str(replace(head, waits=())) == "norm cpu b4 arrived=host_gradients[4] norm=norm[4]"
    assert str(replace(zero, waits=())) == "norm cpu b0 arrived=host_gradients[0] tied=host_gradients[4] norm=norm[0]"


def test_a_gradient_that_the_host_sums_is_not_whole_on_the_device():
    plan = small(n_micro_batches=2)
    policy = replace(plan.policy, square_on_device=True)
    with pytest.raises(PlanError, match="square_on_device and device_blocks need all micro-batches in one group"):
        lower(plan.model, plan.workload, plan.semantics, policy, plan.profile)
    assert "square_on_device and device_blocks need all micro-batches in one group" in error_of(replace(plan, policy=policy))


def test_what_is_squared_too_soon_or_left_behind_is_refused_and_named():
    plan = small(n_micro_batches=2, accumulation_group=2, square_on_device=True, gradient_slots=2)
    square, backward = index(plan, "square gpu b2"), index(plan, "backward gpu b2 m1")
    waits = tuple(replace(w, op=backward) if w.op == square else w for w in plan.ops[index(plan, "offload_gradient d2h b2")].waits)
    assert "a race for squares[2]" in error_of(with_op(plan, "offload_gradient d2h b2", waits=waits))
    waits = (Wait(index(plan, "offload_gradient d2h b1")),)
    assert "a race for" in error_of(with_op(plan, "clip cpu b0", waits=waits))
    few = (("norm", Slot("norm", 0)), ("clip", Slot("norm", 5)))
    assert "must use norm=norm[0] norm=norm[1]" in error_of(with_op(plan, "clip cpu b0", operands=few))
    square = plan.ops[index(plan, "square gpu b2")]
    other = plan.ops[index(plan, "square gpu b3")]["gradient"]
    assert other != square["gradient"]
    message = error_of(with_slots(plan, "square gpu b2", gradient=other))
    assert "holds the gradient of block 3, step 0, not the gradient of block 2" in message or "a race" in message
    assert "twice" in error_of(replace(plan, ops=(*plan.ops, square)))
    assert "has no such op" in error_of(replace(plan, policy=replace(plan.policy, square_on_device=False)))


def test_a_square_of_a_sum_that_is_not_complete_is_refused():
    """Of the head, whose gradient lies where the last micro-batch rounds it."""
    plan = small(n_micro_batches=2, accumulation_group=2, square_on_device=True)
    loss, square = index(plan, "loss gpu b4 m1"), index(plan, "square gpu b4")
    order = [i for i in range(len(plan.ops)) if i != square]
    order.insert(loss, square)
    at = {old: new for new, old in enumerate(order)}
    ops = tuple(replace(plan.ops[i], waits=tuple(replace(w, op=at[w.op]) for w in plan.ops[i].waits)) for i in order)
    message = error_of(replace(plan, ops=ops))
    assert "square gpu b4" in message or "gradients[1]" in message


def test_an_eager_update_needs_the_sums_of_its_own_block():
    plan = small(update=Update.EAGER, square_on_device=True)
    check(plan)
    update = plan.ops[index(plan, "update cpu b2")]
    assert update["norm"] == Slot("norm", 2)
    for norm in (None, Slot("norm", 1), Slot("norm", 5)):
        message = error_of(with_slots(plan, "update cpu b2", norm=norm))
        assert "must use arrived=host_gradients[any] norm=norm[2] state=state[2]" in message


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_host_reads_no_gradient_twice(tied):
    """What host memory is spared is every gradient once, but for those of tied weights."""
    model, profile = read_model("qwen2.5-0.5b" if tied else "qwen2.5-7b"), read_profile("gh200")
    semantics = Semantics(512, 2, 1)
    workload = build_workload(model, semantics)
    assert workload.tied == tied
    drawn, seconds = {}, {}
    for squares in (False, True):
        policy = Policy(accumulation_group=2, square_on_device=squares)
        plan = lower(model, workload, semantics, policy, {})
        demands = CostModel(profile).demands(plan)
        drawn[squares] = sum(dict(d.uses).get(Resource.DRAM, 0.0) * d.alone_s for d in demands)
        seconds[squares] = {
            lane: sum(d.alone_s for op, d in zip(plan.ops, demands, strict=True) if op.lane is lane) for lane in Lane
        }
    elements = sum(b.slot_elements for b in workload.blocks[1:-1])
    elements += 0 if tied else workload.blocks[0].slot_elements + workload.blocks[-1].slot_elements
    assert drawn[False] - drawn[True] == pytest.approx(2 * elements, rel=1e-6)
    saved_s = 2 * elements / profile.host.reduce_bytes_per_s.value
    assert seconds[False][Lane.CPU] - seconds[True][Lane.CPU] == pytest.approx(saved_s, rel=1e-6)
    # The device reads it once, at its own rate; besides there is a kernel or two per tensor, and a few per block.
    more_s = seconds[True][Lane.GPU] - seconds[False][Lane.GPU]
    read_s = 2 * elements / profile.device.memory_bytes_per_s.value
    n_kernels = (more_s - read_s) / profile.device.kernel_overhead_s.value
    n_tensors = sum(len(workload.blocks[b].parameters) for b in can_square(workload, semantics))
    assert n_tensors < n_kernels < 2 * n_tensors + 5 * len(workload.blocks)


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_the_machine_bound_is_the_least_of_any_shares_squared_and_updated_on_the_device(data):
    """Held against a fine grid of shares, on machines on which either side binds, with room for some of the state or all of it."""
    fields = read_profile("gh200").to_json()
    fields["host"]["reduce_bytes_per_s"]["value"] *= 10.0 ** data.draw(st.floats(-3, 1))
    fields["device"]["memory_bytes_per_s"]["value"] *= 10.0 ** data.draw(st.floats(-3, 1))
    model, s = read_model("qwen2.5-7b"), Semantics(64, 1, 1)
    fields["device"]["memory_bytes"]["value"] = data.draw(st.sampled_from([10**9, 4 * 10**10, 10**12]))
    plan, cost = frame(model, build_workload(model, s), s, Policy()), CostModel(Profile.from_json(fields))
    blocks = can_square(plan.workload, s)
    host, squared, kept = (dict(machine_facets(plan, cost, *on_device)) for on_device in (((), ()), (blocks, ()), ((), blocks)))
    most = min(1.0, fields["device"]["memory_bytes"]["value"] / sum(map(plan.staying_bytes, blocks)))

    def largest_s(of_squares, of_state):
        return max(host[k] + of_squares * (squared[k] - host[k]) + of_state * (kept[k] - host[k]) for k in host)

    grid_s = min(largest_s(n / 100, k / 100 * most) for n in range(101) for k in range(101))
    bound = machine_bound(plan, cost)
    assert bound.seconds <= grid_s * (1 + 1e-12)
    assert bound.seconds >= grid_s * 0.97
    assert bound.binding in host


@pytest.mark.drawn
@given(st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_no_policy_is_faster_than_a_relaxation_that_may_square_gradients(data):
    """Where the host's norms bind, so that it counts what they are spared; the others are in tests/planner/test_search.py."""
    s = replace(
        data.draw(semantics().filter(lambda of: of.ranks == 1)), gradient_dtype=data.draw(st.sampled_from(["bf16", "fp32"]))
    )
    workload = data.draw(workloads(s, most_layers=3))
    machine = MACHINES[data.draw(st.sampled_from(["slow reduction", "slow reduction", "slow memory", "h200-pcie5", "cpu-2core"]))]
    updates = [u for u in Update if u is not Update.EAGER or s.clip_norm is None]
    n = s.n_micro_batches
    family = Family(data.draw(st.sampled_from(updates)), n, n, 1)
    speculates = family.update is Update.DEFERRED and data.draw(st.booleans())
    policy = replace(
        family.policy(s),
        prefetch_depth=data.draw(st.integers(1, 3)),
        gradient_slots=data.draw(st.integers(1, 2)),
        square_on_device=data.draw(st.booleans()),
        speculate_blocks=tuple(range(workload.n_layers + 2)) if speculates else (),
    )
    cost = CostModel(machine)
    plan = lower(NOBODY, workload, s, policy, {})
    prediction = simulate(plan, cost.demands(plan), region_of(machine))
    relaxation = Relaxation(NOBODY, workload, s, cost, 0.0 if speculates else None)
    for buffers in ((None, None), (policy.prefetch_depth, policy.gradient_slots)):
        relaxed = relaxation.solve(family_of(policy, s), *buffers)
        assert relaxed is not None
        if prediction.periodic:
            assert prediction.step_s >= relaxed.bound_s * (1 - 1e-9), (policy, buffers)


def test_the_planner_and_the_runtime_cut_gradients_alike():
    assert NORM_CHUNK_ELEMENTS == CHUNK_ELEMENTS


# -- the bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast("values")
@pytest.mark.parametrize("policy", [BARRIER, SPECULATING, EAGER], ids=["barrier", "speculating", "eager"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", STRUCTURES)
def test_a_model_normed_on_the_device_is_the_plain_loop_to_the_last_bit(model_type, tied, policy):
    """With more elements in the vocabulary than a chunk has, and clipping in some of the steps."""
    key = (("tie_word_embeddings", tied), ("vocab_size", 2200))
    semantics = semantics_of(model_type, clip_norm=None)
    if policy.update is not Update.EAGER:
        semantics = clip_some_steps(model_type, semantics, key)
    machine = streamed(tiny_config(model_type, **dict(key)), semantics, policy, delay_seed=3)
    assert differences(machine, plain(model_type, semantics, key)) == []


@pytest.mark.fast("some")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("policy", [BARRIER, SPECULATING, EAGER], ids=["barrier", "speculating", "eager"])
def test_the_host_sums_squares_of_nothing_but_tied_weights(policy, tied, monkeypatch):
    summed = []
    host = updates.squares_tasks

    def listening(gradient, cuts):
        summed.append(gradient.numel())
        return host(gradient)

    monkeypatch.setattr(updates, "squares_tasks", listening)
    semantics = semantics_of("llama", clip_norm=None)
    machine = streamed(tiny_config("llama", tie_word_embeddings=tied), semantics, policy)
    vocab = {p.n_elements for b in (0, 3) for p in machine.host.owned(b)}
    assert set(summed) == (vocab if tied else set())
    assert differences(machine, plain("llama", semantics, (("tie_word_embeddings", tied),))) == []


# -- what is not finite -----------------------------------------------------------------------------------------------


class PoisonedOnDevice(Hostile):
    """In step 1 one element of one block's gradient is infinite when it is complete, before anybody reads it."""

    poisoned_block = 1

    def perform(self, index, op, step):
        if step == 1 and op.kind is Kind.SQUARE and op.block == self.poisoned_block:
            last = self.plan.workload.blocks[op.block].parameters[-1]
            at = self.plan.workload.blocks[op.block].offsets()[0][last.name]
            self.arenas.view(op["gradient"], "bf16", (last.n_elements,), at)[-1] = float("inf")
        super().perform(index, op, step)


class WithoutSecondStep(Hostile):
    def perform(self, index, op, step):
        if not (step == 1 and op.kind in (Kind.UPDATE, Kind.SETTLE)):
            super().perform(index, op, step)


@pytest.mark.fast("some")
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("policy", [BARRIER, SPECULATING], ids=["barrier", "speculating"])
def test_a_step_whose_sums_are_not_finite_is_skipped_without_a_trace(policy, block):
    semantics = semantics_of("llama", on_nonfinite="skip")

    class Poisoned(PoisonedOnDevice):
        poisoned_block = block

    machine = streamed(tiny_config("llama"), semantics, policy, machine_type=Poisoned)
    undisturbed = streamed(tiny_config("llama"), semantics, BARRIER, machine_type=WithoutSecondStep)
    assert machine.host.n_updates == N_STEPS - 1
    assert [machine.results[i].skipped for i in range(N_STEPS)] == [False, True, False]
    assert not math.isfinite(machine.results[1].grad_norm)
    for x, y in zip(state_of(machine), state_of(undisturbed), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)


@pytest.mark.parametrize("policy", [BARRIER, SPECULATING, EAGER], ids=["barrier", "speculating", "eager"])
def test_it_stops_the_run_names_the_tensor_and_updates_nothing_with_it(policy):
    semantics = semantics_of("llama", clip_norm=None)
    config = tiny_config("llama")
    plan = plan_of(config, semantics, policy)
    batches = batches_of(config["vocab_size"], semantics.batch_size, semantics.seq_len)
    machine = PoisonedOnDevice(plan, lambda step: batches[step], scheduled)
    machine.initialise(7)
    last = plan.workload.blocks[1].parameters[-1].name
    with pytest.raises(PenstockError, match=rf"step 2: the gradient of {last} is not finite"):
        execute(plan, machine, N_STEPS)
    for state in state_of(machine):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


# -- on a device of many cores ----------------------------------------------------------------------------------------


def in_pieces(gradients):
    """The first cut into three, the others whole."""
    n = gradients[0].numel()
    return [
        [part for part in gradients[0].split([n // 3, n // 2 - n // 3, n - n // 2]) if part.numel()],
        *([g] for g in gradients[1:]),
    ]


SIZES = [1, 5, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 77]


@given(
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0, 9)
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_sums_made_at_once_are_those_of_the_host_within_rounding_and_always_the_same(sizes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    gradients = [(torch.randn(n, generator=generator) * 10.0 ** (seed - 6)).to(dtype) for n in sizes]
    sums = torch.full((len(sizes),), math.nan, dtype=torch.float64)
    squares_at_once(in_pieces(gradients), sums)
    again = torch.zeros_like(sums)
    squares_at_once(in_pieces(gradients), again)
    assert torch.equal(sums, again)
    for found, gradient in zip(sums.tolist(), gradients, strict=True):
        assert found == pytest.approx(sum_of_squares(gradient), rel=1e-5)  # vector_norm on a CPU adds one after the other
        assert found == pytest.approx(float((gradient.double() ** 2).sum()), rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e38])
@pytest.mark.parametrize("at", [0, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS])
def test_what_is_not_finite_is_not_lost_in_sums_made_at_once(bad, at):
    gradient = torch.ones(2 * CHUNK_ELEMENTS + 3)
    gradient[at] = bad
    sums = torch.empty(2, dtype=torch.float64)
    squares_at_once(in_pieces([gradient, torch.ones(3)]), sums)
    assert not math.isfinite(sums[0])
    assert not math.isfinite(sum_of_squares(gradient))
    assert sums[1] == 3.0


def test_sums_made_at_once_ask_for_no_number_and_for_little_memory():
    """No host waits for the device, and no gradient is copied."""
    gradients = [torch.ones(n, dtype=torch.bfloat16) for n in SIZES]
    sums = torch.empty(len(SIZES), dtype=torch.float64)
    called, made_bytes = [], 0

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal made_bytes
            called.append(str(func))
            out = func(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in (*gradients, sums)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                made_bytes += out.untyped_storage().nbytes()
            return out

    with Watching():
        squares_at_once([[gradient] for gradient in gradients], sums)
    assert sums.tolist() == [float(n) for n in SIZES]
    assert not any("_local_scalar_dense" in name or "_to_copy" in name for name in called)
    assert 0 < made_bytes <= 64 * len(called) * len(SIZES)
