"""Loss on held-out data: equal to transformers, without effect on training."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.planner.lower.forward import forward_plan, most_micro_batches
from penstock.planner.model.workload import build_workload
from penstock.runtime.compute.head import OutputHead
from penstock.runtime.errors import DataError
from penstock.runtime.executor import OpError, Stop, execute
from penstock.runtime.machines.torch_machine import Abandoned, TorchMachine
from penstock.runtime.plan import Kind, Lane, Policy
from penstock.runtime.plan.workload import Model
from penstock.training.validation import evaluate
from tests.forwards import POLICIES, LateForBoth, exact, machine_of, resident, sequences, sequences_of, watch_forwards
from tests.lanes import diagonal, examples, mostly_slow
from tests.late_streams import LateStreams
from tests.real_layers import peak_bytes
from tests.strategies import policies
from tests.tiny import STRUCTURES, WITH_SINKS, tiny_config
from tests.training import EVERYTHING, N_STEPS, batches_of, clip_some_steps, differences, plain, semantics_of

LAW = settings(max_examples=examples(6), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@mostly_slow("model_type", STRUCTURES)
def test_the_loss_is_that_of_transformers_without_dropout(model_type):
    """Nine sequences in arenas for two micro-batches of two: one is half padding, another is padding only."""
    config = tiny_config(model_type, attention_dropout=0.5 * (model_type not in WITH_SINKS))
    semantics = exact(model_type, micro_batch=2)
    machine = machine_of(config, semantics, Policy(accumulation_group=2), delay_seed=1)
    held_out = sequences(config["vocab_size"], 9)
    evaluated = evaluate(machine, sequences_of(held_out), 9)
    with torch.no_grad():
        logits = resident(config, semantics)(input_ids=held_out.input_ids, use_cache=False).logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), held_out.targets.flatten(), ignore_index=-100)
    assert evaluated["eval_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert evaluated["eval_tokens"] == held_out.n_supervised
    assert evaluated["eval_perplexity"] == pytest.approx(math.exp(evaluated["eval_loss"]))
    assert evaluated["eval_s"] > 0


@diagonal(("model_type", ["llama", "gemma2", "qwen3_moe", "gpt_oss"]), ("name", POLICIES))
def test_the_loss_of_a_training_batch_is_the_steps_own(model_type, name):
    """Bitwise identical, with tiled MLPs, too."""
    policy = POLICIES[name]
    if model_type == "gpt_oss" and policy.device_blocks:
        pytest.skip("parameters of four elements, whose state stays on the host")
    tiles = {"mlp_tile_tokens": 5} if model_type == "llama" else {}
    semantics, config = semantics_of(model_type, loss_tile_tokens=7, **tiles), tiny_config(model_type, num_hidden_layers=3)
    machine = machine_of(config, semantics, policy, delay_seed=2)
    batch = batches_of(config["vocab_size"], 4, 16)[0]
    loss = evaluate(machine, sequences_of(batch), 4)
    execute(machine.plan, machine, 1)
    assert (loss["eval_loss"], loss["eval_tokens"]) == (machine.results[0].loss, batch.n_supervised)


@mostly_slow("model_type", ["llama", "gemma2", "mixtral"])
@LAW
@given(data=st.data())
def test_evaluations_between_steps_change_no_bit_of_training(model_type, data):
    """Before the first step, between steps and after the last, on any plan."""
    n_layers = data.draw(st.integers(1, 4), label="n_layers")
    key = (("num_hidden_layers", n_layers), ("tie_word_embeddings", data.draw(st.booleans(), label="tied")))
    semantics = clip_some_steps(model_type, semantics_of(model_type), key)
    config = tiny_config(model_type, **dict(key))
    policy = data.draw(policies(semantics, build_workload(Model(config), semantics)), label="policy")
    machine = machine_of(config, semantics, policy, delay_seed=data.draw(st.integers(0, 9), label="delay"))
    held_out = sequences_of(sequences(config["vocab_size"], 3))
    losses = [evaluate(machine, held_out, 3)["eval_loss"]]
    for step in range(N_STEPS):
        execute(machine.plan, machine, 1, step)
        losses.append(evaluate(machine, held_out, 3)["eval_loss"])
    assert differences(machine, plain(model_type, semantics, key)) == []
    assert len(set(losses)) == N_STEPS + 1, "the weights changed in between"


@mostly_slow("model_type", ["llama", "qwen3_moe"])
def test_late_streams_evaluate_and_train_the_same(model_type):
    semantics, key = semantics_of(model_type), (("num_hidden_layers", 4),)
    config = tiny_config(model_type, **dict(key))
    held_out = sequences_of(sequences(config["vocab_size"], 7))
    on_time = evaluate(machine_of(config, semantics, EVERYTHING), held_out, 7)
    for seed, haste in ((0, 0.0), (1, 0.7)):
        machine = machine_of(config, semantics, EVERYTHING, LateForBoth, streams=LateStreams(seed, haste))
        assert evaluate(machine, held_out, 7)["eval_loss"] == on_time["eval_loss"]
        for step in range(N_STEPS):
            execute(machine.plan, machine, 1, step)
            evaluate(machine, held_out, 7)
        assert differences(machine, plain(model_type, semantics, key)) == []


def test_a_failed_evaluation_leaves_nothing_in_the_layers():
    """Masks of another length, graphs, results and modes are removed."""
    semantics, config = semantics_of("gemma2"), tiny_config("gemma2")
    machine = machine_of(config, semantics, Policy(accumulation_group=4))
    execute(machine.plan, machine, 1)
    modules = [m for layer in (*machine.compute.templates.layers, machine.compute.templates.model) for m in layer.modules()]
    initial = [id(machine.compute.inputs.first), list(machine.results), len(machine.compute._graphs)]

    def fails(last):
        assert not any(m.training for m in modules)
        raise RuntimeError("no")

    plan = forward_plan(machine.plan, 2, seq_len=8)
    with pytest.raises(OpError, match="no"):
        execute(plan, machine.forwards(plan, lambda step: sequences(96, 2, 8), fails), 1)
    assert all(m.training for m in modules)
    assert [id(machine.compute.inputs.first), list(machine.results), len(machine.compute._graphs)] == initial
    execute(machine.plan, machine, 2, 1)
    assert differences(machine, plain("gemma2", semantics)) == []


def test_no_more_than_a_tile_of_logits_exists(monkeypatch):
    semantics, config = semantics_of("llama", loss_tile_tokens=5, micro_batch=2), tiny_config("llama")
    machine, rows = machine_of(config, semantics, Policy()), []
    logits = OutputHead._logits

    def counted(self, head_VD, normed_ND):
        rows.append(len(normed_ND))
        assert not torch.is_grad_enabled()
        return logits(self, head_VD, normed_ND)

    monkeypatch.setattr(OutputHead, "_logits", counted)
    evaluate(machine, sequences_of(sequences(96, 4)), 4)
    assert sum(rows) == 4 * 16
    assert max(rows) == 5


def test_weights_are_loaded_once_for_as_many_sequences_as_fit():
    semantics, config = semantics_of("llama", micro_batch=1), tiny_config("llama", num_hidden_layers=4)
    counts = {}
    for n in (4, 8, 9):
        machine = machine_of(config, semantics, Policy(accumulation_group=2), TorchMachine)
        assert most_micro_batches(machine.plan) == 5
        performed = []
        watch_forwards(machine, lambda op, step, performed=performed: performed.append(op))
        evaluate(machine, sequences_of(sequences(96, n)), n)
        counts[n] = sum(op.kind is Kind.LOAD for op in performed)
    assert counts == {4: 6, 8: 12, 9: 12}


def test_held_out_data_without_a_supervised_token_is_refused():
    machine = machine_of(tiny_config("llama"), semantics_of("llama"), Policy())
    batch = sequences(96, 2)
    with pytest.raises(DataError, match=r"^the evaluation data has no token to be predicted; choose other data$"):
        evaluate(machine, sequences_of(replace(batch, targets=torch.full_like(batch.targets, -100))), 2)


def test_an_evaluation_asked_to_end_ends_after_its_pass():
    semantics, config = semantics_of("llama"), tiny_config("llama")
    machine = machine_of(config, semantics, Policy())
    n, stop, passes = most_micro_batches(machine.plan) * semantics.micro_batch, Stop(), set[int]()

    def count(op, step):
        passes.add(step)
        if len(passes) == 2:
            stop.request()

    watch_forwards(machine, count)
    with pytest.raises(Abandoned):
        evaluate(machine, sequences_of(sequences(config["vocab_size"], 6 * n)), 6 * n, stop)
    assert len(passes) in (2, 3), "the pass in progress, or that which some lane had begun already"
    with pytest.raises(Abandoned):
        evaluate(machine, sequences_of(sequences(config["vocab_size"], n)), n, stop)
    execute(machine.plan, machine, N_STEPS)
    assert differences(machine, plain("llama", semantics)) == []


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_a_forward_needs_no_more_of_the_device_than_a_step(model_type):
    """Compares allocator memory without arenas. Extra arguments of layers exist in training, too."""
    semantics = exact(model_type, seq_len=96, micro_batch=2, loss_tile_tokens=64)
    config = tiny_config(model_type, hidden_size=128, intermediate_size=352)
    machine = machine_of(config, semantics, Policy(), TorchMachine)
    plan = forward_plan(machine.plan, 1)
    batch, losses = sequences(config["vocab_size"], 2, 96), []

    def score(last):
        losses.append(last.templates.head.summed_losses(last.weights, last.hidden_BTD, last.targets_BT))

    def work():
        forward = machine.forwards(plan, lambda step: batch, score)
        with forward.lane(Lane.GPU):
            for index, op in enumerate(plan.ops):
                forward.perform(index, op, 0)
        return losses

    assert peak_bytes(work) <= machine.plan.transient_bytes
