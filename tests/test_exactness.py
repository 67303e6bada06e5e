"""Does a schedule ever change a bit of the result?"""

import dataclasses
import itertools
import math
import time

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hwprofiles.schema import read_profile
from planner.check import check
from planner.lower import _Program, _with_waits
from runtime import optimizer
from runtime.blocks import Templates, op_seed
from runtime.cpu import CpuMachine
from runtime.data import Batch
from runtime.errors import PenstockError
from runtime.executor import OpError, execute
from runtime.optimizer import CHUNK_ELEMENTS, AdamW, adamw_, clip_factor, round_half_up, sum_of_squares
from runtime.plan import Kind, Policy, Slot, Update, Wait

from . import reference
from .tiny import EXPERT_TYPES, MODEL_TYPES, tiny_config
from .training import (
    ADAMW,
    N_STEPS,
    Hostile,
    batches_of,
    differences,
    initial_masters,
    plain,
    plan_of,
    same_bits,
    scheduled,
    semantics_of,
    settings_of_torch,
    state_of,
    streamed,
)

LAW = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def policies(draw, n_layers: int, n_micro_batches: int, clipped: bool, splits: bool) -> Policy:
    """Any policy that is legal for the model and its semantics."""
    kept = draw(st.sets(st.integers(1, n_layers)))
    gradient_slots, group = draw(st.integers(1, 3)), draw(st.integers(1, n_micro_batches))
    return Policy(
        prefetch_depth=draw(st.integers(1, 4)),
        gradient_slots=gradient_slots,
        offload_late_blocks=draw(st.integers(0, gradient_slots - 1)) if group == n_micro_batches else 0,
        group_micro_batches=group,
        keep_blocks=tuple(sorted(kept)),
        resident_blocks=tuple(sorted(draw(st.sets(st.integers(0, n_layers + 1))))),
        spill_blocks=tuple(b for b in sorted(draw(st.sets(st.integers(0, n_layers - 1)))) if b + 1 not in kept),
        storage=draw(st.sampled_from(["mirrored", "split"])) if splits else "mirrored",
        update=draw(st.sampled_from([Update.BARRIER, Update.DEFERRED] + ([] if clipped else [Update.EAGER]))),
    )


@pytest.mark.parametrize("compute_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@LAW
@given(data=st.data())
def test_streaming_a_model_under_any_policy_is_the_plain_loop_to_the_last_bit(model_type, compute_dtype, data):
    """With slots poisoned on release and lanes delayed at random."""
    tied = data.draw(st.booleans(), label="tied")
    clipped = data.draw(st.booleans(), label="clipped")
    gradient_dtype = data.draw(st.sampled_from(["bf16", "fp32"]), label="gradient_dtype")
    master_dtype = data.draw(st.sampled_from(["fp32", "bf16"]), label="master_dtype") if compute_dtype == "bf16" else "fp32"
    n_layers = data.draw(st.integers(1, 3), label="n_layers")
    batch_size, micro_batch = data.draw(st.sampled_from([(4, 1), (4, 2), (3, 3)]), label="batch")
    semantics = semantics_of(
        model_type,
        compute_dtype=compute_dtype,
        gradient_dtype=gradient_dtype,
        master_dtype=master_dtype,
        batch_size=batch_size,
        micro_batch=micro_batch,
        clip_norm=0.5 if clipped else None,
        experts=data.draw(st.sampled_from(["eager", "grouped_mm"]), label="experts") if model_type in EXPERT_TYPES else "eager",
    )
    overrides = {"tie_word_embeddings": tied, "num_hidden_layers": n_layers}
    splits = (compute_dtype, master_dtype) == ("bf16", "fp32")
    policy = data.draw(policies(n_layers, semantics.n_micro_batches, clipped, splits), label="policy")
    machine = streamed(
        tiny_config(model_type, **overrides), semantics, policy, delay_seed=data.draw(st.integers(0, 99), label="delays")
    )
    assert differences(machine, plain(model_type, semantics, tuple(overrides.items()))) == []


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_a_kept_forward_finds_its_weights_in_whichever_slot_the_backward_has_them(model_type):
    """Our lowering brings a layer back to the slot it was in; another planner need not: exchange the two last loads' slots."""
    overrides = {"num_hidden_layers": 4}
    config, semantics = tiny_config(model_type, **overrides), semantics_of(model_type)
    plan = plan_of(config, semantics, Policy(keep_blocks=(1, 2, 3, 4), group_micro_batches=4))
    last = {op.block: i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD and op.block in (1, 2)}
    other = {Slot("weights", 0): Slot("weights", 1), Slot("weights", 1): Slot("weights", 0)}

    def moved(index, op):
        if op.block not in last or index < last[op.block]:
            return dataclasses.replace(op, waits=())
        reads, writes = (tuple(other.get(slot, slot) for slot in slots) for slots in (op.reads, op.writes))
        return dataclasses.replace(op, reads=reads, writes=writes, waits=())

    ops = [moved(i, op) for i, op in enumerate(plan.ops)]
    forward = next(op for op in ops if op.kind is Kind.FORWARD and op.block == 2)
    assert ops[last[2]].writes[0] != forward.reads[0], "the slots are the same: the test would prove nothing"
    program = _Program(ops, {0: Wait(len(ops) - 1, distance=1)})
    exchanged = dataclasses.replace(plan, ops=_with_waits(program))
    check(dataclasses.replace(exchanged, profile=read_profile("cpu-2core").to_json()))
    batches = batches_of(config["vocab_size"], 4, 16)
    machine = Hostile(exchanged, lambda step: batches[step], scheduled)
    machine.initialise(7)
    execute(exchanged, machine, N_STEPS)
    assert differences(machine, plain(model_type, semantics, tuple(overrides.items()))) == []


def test_every_op_draws_random_numbers_of_its_own():
    seeds = {op_seed(*key) for key in itertools.product(range(3), repeat=4)}
    assert len(seeds) == 3**4
    seen = []

    class Listening(Hostile):
        def _seed(self, step, op):
            super()._seed(step, op)
            seen.append((step, op.block, op.micro_batch, torch.default_generator.initial_seed()))

    config, semantics = tiny_config("llama"), semantics_of("llama")
    machine = Listening(plan_of(config, semantics, Policy()), lambda step: batches_of(96, 4, 16)[step], scheduled)
    machine.initialise(7)
    execute(machine.plan, machine, 2)
    assert len(set(seen)) == len({seed for *_, seed in seen}) == 2 * 4 * 4  # steps, micro-batches, blocks; recompute repeats


def test_given_weights_are_rounded_half_up_into_a_bf16_master():
    semantics = semantics_of("llama", master_dtype="bf16")
    plan = plan_of(tiny_config("llama"), semantics, Policy())
    machine = CpuMachine(plan, lambda step: batches_of(96, 4, 16)[step], scheduled)
    head = plan.workload.blocks[-1]
    tie = 1.0 + 2.0**-8  # half way between two bf16 numbers; the even one is below
    machine.set_weights(3, {p.name: torch.full(p.shape, tie) for p in head.parameters})
    assert float(machine.master(3, head.parameters[0])[0]) == 1.0 + 2.0**-7


DTYPES = [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")]  # (compute, master), all that a plan may have
GROUPS = [(1, 1), (1, 3), (1, 4), (4, 1)]  # (micro-batch, micro-batches of a group): a group may not divide the step's four


@pytest.mark.parametrize("gradient_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("compute_dtype", "master_dtype"), DTYPES)
def test_every_combination_of_dtypes_ties_and_groups_is_the_plain_loop(compute_dtype, master_dtype, tied, gradient_dtype):
    """What the law above may not draw: here each way that a gradient can take is taken once in every dtype."""
    overrides = {"tie_word_embeddings": tied, "num_hidden_layers": 1, "vocab_size": 2200}  # more than a chunk of elements
    for number, (micro_batch, group) in enumerate(GROUPS):
        semantics = semantics_of(
            "llama",
            compute_dtype=compute_dtype,
            master_dtype=master_dtype,
            gradient_dtype=gradient_dtype,
            micro_batch=micro_batch,
            clip_norm=None if number % 2 else 0.5,
        )
        updates = [Update.EAGER, Update.DEFERRED] if number % 2 else [Update.BARRIER, Update.DEFERRED]
        for update in updates:
            policy = Policy(group_micro_batches=group, prefetch_depth=3, update=update, keep_blocks=(1,) if number > 1 else ())
            machine = streamed(tiny_config("llama", **overrides), semantics, policy)
            assert differences(machine, plain("llama", semantics, tuple(overrides.items()))) == [], policy


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_dropout_is_the_same_whether_kept_recomputed_or_reordered(model_type, attention):
    config = tiny_config(model_type, attention_dropout=0.2)
    semantics = semantics_of(model_type, attention=attention)
    kept = streamed(config, semantics, Policy(keep_blocks=(1, 2), group_micro_batches=4))
    recomputed = streamed(config, semantics, Policy(prefetch_depth=2, group_micro_batches=1))
    without = streamed(tiny_config(model_type), semantics, Policy())
    for x, y in zip(state_of(kept), state_of(recomputed), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)
    assert kept.results[0].loss != without.results[0].loss, "dropout did nothing: the test would prove nothing"


def test_a_plan_without_a_needed_wait_is_seen_by_poison_and_delay():
    """The laws above can fail: take away the wait of every layer's forward for its weights, and slow the loads."""
    semantics = semantics_of("llama")
    config = tiny_config("llama", num_hidden_layers=4)
    plan = plan_of(config, semantics, Policy(group_micro_batches=4))
    ops = tuple(dataclasses.replace(op, waits=()) if op.kind is Kind.FORWARD and op.block > 1 else op for op in plan.ops)

    class SlowLoads(Hostile):
        def perform(self, index, op, step):
            if op.kind is Kind.LOAD:
                time.sleep(0.02)
            super().perform(index, op, step)

    batches = batches_of(config["vocab_size"], 4, 16)
    outcomes = []
    for racy in (plan, dataclasses.replace(plan, ops=ops)):
        machine = SlowLoads(racy, lambda step: batches[step], lambda step: ADAMW)
        machine.initialise(7)
        try:
            execute(racy, machine, 2)
            outcomes.append(state_of(machine)[0]["model.norm.weight"])
        except PenstockError as error:  # NaN reached a gradient
            outcomes.append(str(error))
    assert isinstance(outcomes[0], torch.Tensor)
    assert isinstance(outcomes[1], str) or not same_bits(outcomes[0], outcomes[1])


def test_an_infinite_loss_is_skipped_by_both():
    """One logit overflows in the second step: the plain loop finds the same norm and skips the same step."""
    semantics = semantics_of("llama", on_nonfinite="skip", compute_dtype="fp32", batch_size=2)
    config = tiny_config("llama", vocab_size=97)
    plan = plan_of(config, semantics, Policy(update=Update.DEFERRED, group_micro_batches=2))
    batches = [Batch(b.input_ids.clone().clamp(max=95), b.targets) for b in batches_of(96, 2, 16)]
    batches[1].input_ids[1, 3] = 96  # a token that no other step has
    machine = Hostile(plan, lambda step: batches[step], scheduled)
    machine.initialise(7)
    embedding = machine.master(0, plan.workload.blocks[0].parameters[0]).view(97, 32)
    embedding[96] = float("inf")
    start = state_of(machine)[0]
    execute(plan, machine, N_STEPS)
    expected = reference.train(config, semantics, start, batches, settings_of_torch(N_STEPS))
    assert [machine.results[step].skipped for step in range(N_STEPS)] == [False, True, False]
    assert not math.isfinite(expected.norms[1])
    for got, wanted in zip(state_of(machine), (expected.masters, expected.exp_avg, expected.exp_avg_sq), strict=True):
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


def test_a_norm_just_at_the_threshold_is_clipped_as_torch_clips_it():
    """And one far below it not at all: then the bits are those of a plan that does not clip."""
    config, plan_free = tiny_config("llama"), semantics_of("llama", clip_norm=None)
    free = streamed(config, plan_free, Policy())
    at = streamed(config, semantics_of("llama", clip_norm=free.results[0].grad_norm), Policy())
    assert differences(at, plain("llama", at.plan.semantics)) == []
    above = streamed(config, semantics_of("llama", clip_norm=1e6), Policy(update=Update.DEFERRED))
    for x, y in zip(state_of(free), state_of(above), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)
    norm = torch.tensor(1.0)
    gradient = torch.nn.Parameter(torch.zeros(1))
    gradient.grad = norm.reshape(1).clone()
    torch.nn.utils.clip_grad_norm_([gradient], 1.0)
    assert clip_factor(1.0, 1.0) == float(gradient.grad) < 1.0


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data())
def test_after_an_op_has_failed_the_same_machine_does_the_step_again_as_if_nothing_had_been(data):
    """Any op before the first update: an update in place cannot be taken back."""
    config, semantics = tiny_config("llama"), semantics_of("llama")
    plan = plan_of(config, semantics, Policy(keep_blocks=(1, 2), group_micro_batches=data.draw(st.sampled_from([1, 4]))))
    last = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.UPDATE)
    batches = batches_of(config["vocab_size"], 4, 16)
    machine = FailsOnce(plan, lambda step: batches[step], scheduled)
    machine.initialise(7)
    machine.fails_at = data.draw(st.integers(0, last))
    with pytest.raises(OpError, match="the disk is gone"):
        execute(plan, machine, N_STEPS)
    execute(plan, machine, N_STEPS)
    assert differences(machine, plain("llama", semantics)) == []
    again = state_of(machine)[0]
    for step in range(N_STEPS):
        machine.results.pop(step)
    execute(plan, machine, 1)  # a step that has been done before, for its results were taken away
    assert machine.n_updates == N_STEPS + 1
    assert not same_bits(again["model.norm.weight"], state_of(machine)[0]["model.norm.weight"])


class FailsOnce(Hostile):
    fails_at: int | None = None

    def perform(self, index, op, step):
        if index == self.fails_at:
            self.fails_at = None
            raise OSError("the disk is gone")
        super().perform(index, op, step)


def test_the_norm_is_of_this_step_whichever_block_comes_last():
    """The checker allows the host any order of the blocks: swap the last two norms, whose gradients have both to arrive."""
    config, semantics = tiny_config("llama"), semantics_of("llama")
    plan = plan_of(config, semantics, Policy(group_micro_batches=4))
    (a, b) = [i for i, op in enumerate(plan.ops) if op.kind is Kind.NORM][-2:]
    assert plan.ops[b].block == 0
    order = list(range(len(plan.ops)))
    order.insert(b, order.pop(a))  # the last layer's norm after the embedding's
    number = {old: new for new, old in enumerate(order)}
    waits = {i: tuple(dataclasses.replace(w, op=number[w.op]) for w in plan.ops[i].waits) for i in order}
    swapped = dataclasses.replace(plan, ops=tuple(dataclasses.replace(plan.ops[i], waits=waits[i]) for i in order))
    check(dataclasses.replace(swapped, profile=read_profile("cpu-2core").to_json()))
    batches = batches_of(config["vocab_size"], 4, 16)
    machine = Hostile(swapped, lambda step: batches[step], scheduled)
    machine.initialise(7)
    execute(swapped, machine, N_STEPS)
    assert differences(machine, plain("llama", semantics)) == []


@pytest.mark.parametrize("tied", [False, True])
def test_the_hosts_work_on_a_gradient_makes_nothing_larger_than_a_chunk(tied, monkeypatch):
    """Whole copies of a vocabulary's gradient would be gigabytes that no plan counts."""
    monkeypatch.setattr(optimizer, "CHUNK_ELEMENTS", 256)
    semantics = semantics_of("llama")
    plan = plan_of(tiny_config("llama", tie_word_embeddings=tied), semantics, Policy())  # summed on the host in fp32
    machine = CpuMachine(plan, lambda step: batches_of(96, 4, 16)[step], scheduled)
    machine.initialise(7)
    execute(plan, machine, 1)
    largest = 0

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            slabs = {slab.data_ptr() for slab in machine.arenas._slabs.values()}
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in slabs:
                    largest = max(largest, tensor.numel())
            return out

    with torch.no_grad(), Watching():
        for index, op in enumerate(plan.ops):
            if op.kind in (Kind.NORM, Kind.UPDATE):
                machine.perform(index, op, 0)
    assert 0 < largest <= 256


@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("update", [Update.BARRIER, Update.DEFERRED])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_without_a_trace(update, block):
    """Be it in the first block whose gradient arrives, or in the last."""
    semantics = semantics_of("llama", on_nonfinite="skip")
    config = tiny_config("llama")

    class Poisoned(PoisonedSecondStep):
        poisoned_block = block

    machine = streamed(config, semantics, Policy(update=update, group_micro_batches=4), machine_type=Poisoned)
    undisturbed = streamed(config, semantics, Policy(update=update, group_micro_batches=4), machine_type=WithoutSecondStep)
    assert machine.n_updates == 2
    assert [machine.results[i].skipped for i in range(3)] == [False, True, False]
    for x, y in zip(state_of(machine), state_of(undisturbed), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)


class PoisonedSecondStep(Hostile):
    """The gradient of one block is infinite in step 1."""

    poisoned_block = 1

    def perform(self, index, op, step):
        super().perform(index, op, step)
        if step == 1 and op.kind is Kind.OFFLOAD and op.block == self.poisoned_block:
            self.arenas.view(op.writes[0], "bf16")[0] = float("inf")


class WithoutSecondStep(Hostile):
    """No update happens in step 1."""

    def perform(self, index, op, step):
        if not (step == 1 and op.kind is Kind.UPDATE):
            super().perform(index, op, step)


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_the_tensor():
    with pytest.raises(PenstockError, match=r"step 2: the gradient of model.layers.0.*not finite"):
        streamed(tiny_config("llama"), semantics_of("llama"), Policy(), machine_type=PoisonedSecondStep)


# -- against the world outside --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_loss_is_that_of_transformers(model_type):
    """On the same batch in fp32, within 1e-5 relative."""
    config = tiny_config(model_type)
    semantics = semantics_of(model_type, compute_dtype="fp32", micro_batch=4)
    machine = streamed(config, semantics, Policy())
    model = reference.build(config, semantics, torch.float32)
    fresh = initial_masters(config, semantics)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(fresh[name])
        batch = batches_of(config["vocab_size"], 4, 16)[0]
        labels = torch.cat([torch.full((4, 1), -100), batch.targets[:, :-1]], dim=1)  # transformers shifts them itself
        expected = float(model(input_ids=batch.input_ids, labels=labels, use_cache=False).loss)
    assert machine.results[0].loss == pytest.approx(expected, rel=1e-5)


def test_the_norm_and_the_clip_factor_are_those_of_clip_grad_norm_():
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(n, generator=generator) for n in (7, 65_536, 200_001)]
    norm = sum(sum_of_squares(t) for t in tensors) ** 0.5
    parameters = [torch.nn.Parameter(torch.zeros_like(t)) for t in tensors]
    for p, t in zip(parameters, tensors, strict=True):
        p.grad = t.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    assert norm == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(tensors[1] * clip_factor(norm, 1.0), parameters[1].grad, rtol=1e-5)
    wide = torch.cat(tensors).double()
    assert norm == pytest.approx(float(wide.square().sum().sqrt()), rel=1e-6)


def test_adamw_is_that_of_torch():
    """Three steps, against the loop that torch runs per tensor, at the tolerance of fp32."""
    generator = torch.Generator().manual_seed(4)
    n = CHUNK_ELEMENTS + 777
    start, gradients = torch.randn(n, generator=generator), [torch.randn(n, generator=generator) for _ in range(3)]
    master, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
    plain = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([plain], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for step, gradient in enumerate(gradients, start=1):
        adamw_(master, m, v, gradient, None, 1.0, step, AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1))
        plain.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(master, plain.data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [1, 63, 64, 1000, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 65])
def test_adamw_in_chunks_is_adamw_on_the_whole_tensor(n):
    generator = torch.Generator().manual_seed(n)
    start, gradient = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    master, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
    whole = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([whole], lr=1e-2, weight_decay=0.1, fused=True)
    for step in (1, 2, 3):
        adamw_(master, m, v, gradient, None, 1.0, step, AdamW(1e-2, weight_decay=0.1))
        whole.grad = gradient.clone()
        optimizer.step()
    assert same_bits(master, whole.data)
    assert same_bits(m, optimizer.state[whole]["exp_avg"])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_rounding_half_up_takes_the_nearest_and_breaks_ties_away_from_zero(bits):
    wide = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    out = torch.empty(1, dtype=torch.bfloat16)
    round_half_up(wide, out)
    if torch.isnan(wide).item():
        assert torch.isnan(out).item()
        return
    nearest_even = wide.to(torch.bfloat16)
    is_tie = bits & 0xFFFF == 0x8000
    if not is_tie:
        assert same_bits(out, nearest_even)
    else:
        assert abs(float(out)) >= abs(float(wide))


def test_a_tile_of_the_loss_is_part_of_the_meaning_and_only_rounds():
    """Other tile sizes give the same loss and gradient up to the rounding that the design states."""
    config = tiny_config("llama")
    results = []
    for tile in (3, 64):
        semantics = semantics_of("llama", compute_dtype="fp32", loss_tile_tokens=tile)
        plan = plan_of(config, semantics, Policy())
        templates = Templates(config, plan.workload, semantics)
        generator = torch.Generator().manual_seed(0)
        weights = {p.name: torch.randn(p.shape, generator=generator) for p in plan.workload.blocks[-1].parameters}
        hidden = torch.randn(1, 16, 32, generator=generator)
        targets = torch.randint(0, 96, (1, 16), generator=generator)
        total = torch.zeros(96, 32)
        loss, d_hidden, _ = templates.loss(weights, hidden, targets, 16, total)
        results.append((loss, d_hidden, total))
        normed = F.rms_norm(hidden, (32,), weights["model.norm.weight"], 1e-6)
        expected = F.cross_entropy(F.linear(normed, weights["lm_head.weight"])[0], targets[0])
        assert loss / 16 == pytest.approx(float(expected), rel=1e-5)
    (loss_a, d_a, w_a), (loss_b, d_b, w_b) = results
    assert loss_a == pytest.approx(loss_b, rel=1e-6)
    assert float((d_a - d_b).norm() / d_b.norm()) < 2e-6
    assert float((w_a - w_b).norm() / w_b.norm()) < 2e-6
