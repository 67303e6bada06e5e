"""Is an evaluation right, and is it nothing to the training around it?"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.training.evaluation import Evaluator, perplexity
from planner.check.check import check
from planner.model.workload import build_workload
from runtime.batch import Batch
from runtime.compute.blocks import Templates
from runtime.compute.inference import Abandoned
from runtime.errors import DataError
from runtime.executor import OpError, Stop, execute
from runtime.forward_plan import forward_plan, most_micro_batches
from runtime.machines.cpu import CpuMachine
from runtime.machines.torch_machine import LaneMachine
from runtime.plan import Kind, Lane, Policy, Update, saves
from runtime.plan.workload import Model
from tests import reference
from tests.late_streams import LateStreams, Poisoned
from tests.real_layers import peak_bytes
from tests.strategies import policies
from tests.tiny import EXPERT_TYPES, STRUCTURES, tiny_config
from tests.training import (
    EVERYTHING,
    N_STEPS,
    Hostile,
    batches_of,
    clip_some_steps,
    differences,
    initial_masters,
    plain,
    plan_of,
    released_slots,
    same_bits,
    scheduled,
    semantics_of,
    state_of,
)

POLICIES = {
    "one by one": Policy(),
    "kept": Policy(save=saves(all=(1,)), accumulation_group=4, resident_blocks=(0, 2)),
    "one group": Policy(accumulation_group=4, prefetch_depth=2),
    "strided": Policy(accumulation_group=2, boundary_stride=2, update=Update.DEFERRED),
    "state on the device": Policy(accumulation_group=4, device_blocks=(1, 2), update=Update.DEFERRED),
    "spilled": Policy(accumulation_group=2, spill_blocks=(0, 1), resident_blocks=(3,)),
}
LAW = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class Several:
    """Batches in the order in which they are asked for by number."""

    def __init__(self, *batches: Batch) -> None:
        self.batches = batches

    def batch(self, step: int) -> Batch:
        return self.batches[step]


class OfAnyPlan:
    """As hostile to a forward plan as to its own."""

    def forwards(self, plan, batches, head):
        machine = super().forwards(plan, batches, head)
        machine.__class__ = _Forward  # not a method of its own, with which it would refer to itself
        machine.trained, machine.released = self, released_slots(plan)
        return machine


class _Forward(LaneMachine):
    def work(self, index, op, step):
        self.trained.around(super().work, self.released, index, op, step)


class HostileToBoth(OfAnyPlan, Hostile):
    pass


class LateForBoth(OfAnyPlan, Poisoned):
    pass


def machine_of(config, semantics, policy, machine_type=HostileToBoth, batches=None, **kwargs):
    plan = plan_of(config, semantics, policy)
    check(plan)
    batches = batches or batches_of(config["vocab_size"], semantics.batch_size, semantics.seq_len)
    machine = machine_type(plan, lambda step: batches[step % N_STEPS], scheduled, **kwargs)
    machine.initialise(7)
    return machine


def watch_forwards(machine, told):
    """Tell of each op of a forward plan, before it is performed."""
    forwards = machine.forwards

    def watched(*given):
        forward = forwards(*given)
        perform = forward.perform
        forward.perform = lambda index, op, step: (told(op, step), perform(index, op, step))
        return forward

    machine.forwards = watched


def exact(model_type: str, **fields):
    return semantics_of(model_type, **({"compute_dtype": "fp32", "gradient_dtype": "fp32"} | fields))


def sequences(vocab_size: int, n: int, seq_len: int = 16, seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (n, seq_len), generator=generator)
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    return Batch(tokens, targets)


def loss_of_transformers(config, semantics, weights, batch: Batch) -> float:
    """The model's own forward on resident weights, in evaluation mode."""
    model = reference.build(config, semantics, torch.float32).eval()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100).item()


@pytest.mark.parametrize("model_type", STRUCTURES)
def test_the_loss_is_that_of_transformers_on_the_same_weights_and_dropout_is_off(model_type):
    """Eleven sequences of four a batch, on arenas for two micro-batches of two: whole passes, a part of one, and padding."""
    semantics, config = exact(model_type, micro_batch=2), tiny_config(model_type, attention_dropout=0.5)
    machine = machine_of(config, semantics, Policy(accumulation_group=2), delay_seed=1)
    whole = sequences(config["vocab_size"], 12)
    data = Several(*(Batch(whole.input_ids[i : i + 4], whole.targets[i : i + 4]) for i in (0, 4, 8)))
    first = Batch(whole.input_ids[:11], whole.targets[:11])
    found = Evaluator(machine, data, 11).run()
    weights = initial_masters(config, semantics)
    assert found.loss == pytest.approx(loss_of_transformers(config, semantics, weights, first), abs=1e-5)
    assert found.n_tokens == first.n_supervised
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.seconds > 0


@pytest.mark.fast("values")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_of_the_same_batch_it_is_the_loss_of_the_training_step_to_the_bit(model_type, policy):
    if model_type == "gpt_oss" and policy.device_blocks:
        pytest.skip("parameters of four elements, whose state stays on the host")
    semantics, config = semantics_of(model_type, loss_tile_tokens=7), tiny_config(model_type, num_hidden_layers=3)
    machine = machine_of(config, semantics, policy, delay_seed=2)
    batch = batches_of(config["vocab_size"], 4, 16)[0]
    found = Evaluator(machine, Several(batch), 4).run()
    execute(machine.plan, machine, 1)
    assert (found.loss, found.n_tokens) == (machine.results[0].loss, batch.n_supervised)


def test_mlps_that_run_by_tiles_do_so_when_evaluated(monkeypatch):
    semantics, config = semantics_of("llama", mlp_tile_tokens=5), tiny_config("llama")
    machine = machine_of(config, semantics, Policy())
    batch = batches_of(config["vocab_size"], 4, 16)[0]
    found = Evaluator(machine, Several(batch), 4).run()
    execute(machine.plan, machine, 1)
    assert found.loss == machine.results[0].loss


@pytest.mark.soak_cases("gemma2", "mixtral")
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral"])
@LAW
@given(data=st.data())
def test_training_is_the_same_to_the_bit_with_evaluations_in_between(model_type, data):
    """Before the first step, between steps and after the last, on any plan, with dropout or without."""
    n_layers = data.draw(st.integers(1, 4), label="n_layers")
    key = (("num_hidden_layers", n_layers), ("tie_word_embeddings", data.draw(st.booleans(), label="tied")))
    semantics = clip_some_steps(model_type, semantics_of(model_type), key)
    config = tiny_config(model_type, **dict(key))
    policy = data.draw(policies(semantics, build_workload(Model(config), semantics)), label="policy")
    machine = machine_of(config, semantics, policy, delay_seed=data.draw(st.integers(0, 9), label="delay"))
    evaluator = Evaluator(machine, Several(sequences(config["vocab_size"], 3)), 3)
    losses = [evaluator.run().loss]
    for step in range(N_STEPS):
        execute(machine.plan, machine, 1, step)
        losses.append(evaluator.run().loss)
    assert differences(machine, plain(model_type, semantics, key)) == []
    assert len(set(losses)) == N_STEPS + 1, "the weights changed in between"


@pytest.mark.parametrize("policy", [Policy(save=saves(all=(1, 2))), Policy()], ids=["kept", "again"])
def test_dropout_draws_the_same_with_evaluations_in_between(policy):
    semantics, config = semantics_of("llama"), tiny_config("llama", attention_dropout=0.3)
    alone, evaluated = machine_of(config, semantics, policy), machine_of(config, semantics, policy)
    execute(alone.plan, alone, N_STEPS)
    for step in range(N_STEPS):
        Evaluator(evaluated, Several(sequences(config["vocab_size"], 4)), 4).run()
        execute(evaluated.plan, evaluated, 1, step)
    assert [evaluated.results[s].loss for s in range(N_STEPS)] == [alone.results[s].loss for s in range(N_STEPS)]
    for x, y in zip(state_of(evaluated), state_of(alone), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)


@pytest.mark.fast("some")
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_streams_that_dawdle_evaluate_and_train_the_same(model_type):
    semantics, key = semantics_of(model_type), (("num_hidden_layers", 4),)
    config = tiny_config(model_type, **dict(key))
    whole = sequences(config["vocab_size"], 7)
    on_time = Evaluator(machine_of(config, semantics, EVERYTHING), Several(whole), 7).run()
    for seed, haste in ((0, 0.0), (1, 0.7)):
        machine = machine_of(config, semantics, EVERYTHING, LateForBoth, streams=LateStreams(seed, haste))
        evaluator = Evaluator(machine, Several(whole), 7)
        assert evaluator.run().loss == on_time.loss
        for step in range(N_STEPS):
            execute(machine.plan, machine, 1, step)
            evaluator.run()
        assert differences(machine, plain(model_type, semantics, key)) == []
    assert machine._stopwatch is not None


def test_what_layers_remember_of_training_an_evaluation_does_not_see():
    """Neither masks of another length, nor graphs, results or modes are left over, also after a failure."""
    semantics, config = semantics_of("gemma2"), tiny_config("gemma2")
    machine = machine_of(config, semantics, Policy(accumulation_group=4))
    execute(machine.plan, machine, 1)
    modules = [m for layer in (*machine.compute.templates.layers, machine.compute.templates.model) for m in layer.modules()]
    before = [id(machine.compute.inputs.first), list(machine.results), len(machine.compute._graphs)]

    def fails(last):
        assert not any(m.training for m in modules)
        raise RuntimeError("no")

    plan = forward_plan(machine.plan, 2, seq_len=8)
    with pytest.raises(OpError, match="no"):
        execute(plan, machine.forwards(plan, lambda step: sequences(96, 2, 8), fails), 1)
    assert all(m.training for m in modules)
    assert [id(machine.compute.inputs.first), list(machine.results), len(machine.compute._graphs)] == before
    execute(machine.plan, machine, 2, 1)
    assert differences(machine, plain("gemma2", semantics)) == []


def test_no_more_than_a_tile_of_logits_exists(monkeypatch):
    semantics, config = semantics_of("llama", loss_tile_tokens=5, micro_batch=2), tiny_config("llama")
    machine, rows = machine_of(config, semantics, Policy()), []
    logits = Templates._logits

    def counted(self, head_VD, normed_ND):
        rows.append(len(normed_ND))
        assert not torch.is_grad_enabled()
        return logits(self, head_VD, normed_ND)

    monkeypatch.setattr(Templates, "_logits", counted)
    Evaluator(machine, Several(sequences(96, 4)), 4).run()
    assert sum(rows) == 4 * 16
    assert max(rows) == 5


def test_weights_are_streamed_once_for_as_many_sequences_as_activations_have_room():
    semantics, config = semantics_of("llama", micro_batch=1), tiny_config("llama", num_hidden_layers=4)
    counts = {}
    for n in (4, 8, 9):
        machine = machine_of(config, semantics, Policy(accumulation_group=2), CpuMachine)
        assert most_micro_batches(machine.plan) == 5
        done = []
        watch_forwards(machine, lambda op, step, done=done: done.append(op))
        Evaluator(machine, Several(sequences(96, n)), n).run()
        counts[n] = sum(op.kind is Kind.LOAD for op in done)
    assert counts == {4: 6, 8: 12, 9: 12}


def test_held_out_data_without_a_supervised_token_is_refused_in_one_line():
    machine = machine_of(tiny_config("llama"), semantics_of("llama"), Policy())
    batch = sequences(96, 2)
    with pytest.raises(DataError, match=r"^the evaluation data has no token to be predicted; choose other data$"):
        Evaluator(machine, Several(replace(batch, targets=torch.full_like(batch.targets, -100))), 2).run()


class _AfterSomePasses(Stop):
    """Asked to end while a pass goes on; counts how many begin."""

    def __init__(self, machine, n: int) -> None:
        super().__init__()
        self.n_passes = 0

        def count(op, step):
            self.n_passes = max(self.n_passes, step + 1)
            if self.n_passes == n:
                self.request()

        watch_forwards(machine, count)


def test_who_asks_for_the_end_waits_for_the_pass_in_progress_and_training_goes_on_as_if_nothing_had_been():
    semantics, config = semantics_of("llama"), tiny_config("llama")
    machine = machine_of(config, semantics, Policy())
    n = most_micro_batches(machine.plan) * semantics.micro_batch
    stop = _AfterSomePasses(machine, 2)
    with pytest.raises(Abandoned):
        Evaluator(machine, Several(sequences(config["vocab_size"], 6 * n)), 6 * n, stop).run()
    assert stop.n_passes in (2, 3), "the pass in progress, or that which some lane had begun already"
    stop.n_passes = -(10**6)
    with pytest.raises(Abandoned):
        Evaluator(machine, Several(sequences(config["vocab_size"], n)), n, stop).run()
    execute(machine.plan, machine, N_STEPS)
    assert differences(machine, plain("llama", semantics)) == []


def test_the_perplexity_of_a_hopeless_model_is_infinite():
    assert perplexity(1e4) == math.inf
    assert perplexity(0.0) == 1.0


def test_experts_do_not_see_padding_that_changes_what_they_say():
    """Rows of padding go through experts too; the loss of the others stays within rounding."""
    for model_type in EXPERT_TYPES:
        semantics, config = exact(model_type, micro_batch=4), tiny_config(model_type)
        machine = machine_of(config, semantics, Policy())
        whole = sequences(config["vocab_size"], 3)
        weights = initial_masters(config, semantics)
        expected = loss_of_transformers(config, semantics, weights, whole)
        assert Evaluator(machine, Several(whole), 3).run().loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_a_forward_needs_no_more_of_the_device_than_the_plan_books_for_a_step(model_type):
    """Of the allocator: beside the arenas. What layers are passed besides their input is there in training too."""
    semantics = exact(model_type, seq_len=96, micro_batch=2, loss_tile_tokens=64)
    config = tiny_config(model_type, hidden_size=128, intermediate_size=352)
    machine = machine_of(config, semantics, Policy(), CpuMachine)
    plan = forward_plan(machine.plan, 1)
    batch, found = sequences(config["vocab_size"], 2, 96), []

    def score(last):
        found.append(last.templates.scores(last.weights, last.hidden_BTD, last.targets_BT))

    def work():
        forward = machine.forwards(plan, lambda step: batch, score)
        with forward.lane(Lane.GPU):
            for index, op in enumerate(plan.ops):
                forward.perform(index, op, 0)
        return found

    assert peak_bytes(work) <= machine.plan.transient_bytes
