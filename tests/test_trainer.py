"""Is what happens between steps counted, logged and saved as it was?"""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from runtime.checkpoint import load_state
from runtime.cpu import CpuMachine
from runtime.data import Tokens
from runtime.errors import CheckpointError
from runtime.executor import execute
from runtime.optimizer import decays
from runtime.plan import Kind, Policy, Update
from runtime.trainer import Training, keep_metrics_up_to

from .tiny import MODEL_TYPES, tiny_config
from .training import plan_of, same_bits, scheduled, semantics_of, state_of


def training(folder, policy: Policy, machine_type=CpuMachine, save_every=None, **fields) -> Training:
    semantics = semantics_of("llama", **fields)
    config = tiny_config("llama")
    plan = plan_of(config, semantics, policy)
    ids = np.random.default_rng(5).integers(0, 96, 16 * 50, dtype=np.uint16)
    tokens = Tokens(ids, seq_len=16, batch_size=4, pad_id=0, shuffle_seed=3)
    machine = machine_type(plan, tokens.batch, scheduled)
    machine.initialise(7)
    folder.mkdir(exist_ok=True)
    return Training(plan, machine, machine, tokens, 0, folder, saves=True, save_every=save_every)


def lines(folder):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Infinite(CpuMachine):
    """The gradient of the embedding, the last to arrive, is infinite in the second step."""

    def perform(self, index, op, step):
        super().perform(index, op, step)
        if step == 1 and op.kind is Kind.OFFLOAD and op.block == 0:
            self.arenas.view(op.writes[0], "bf16")[0] = float("inf")


def test_a_skipped_step_is_logged_in_json_that_others_can_read(tmp_path):
    run = training(tmp_path, Policy(group_micro_batches=4), Infinite, on_nonfinite="skip")
    seen = []
    run.run(0, 3, seen.append)
    assert [line["skipped"] for line in lines(tmp_path)] == [False, True, False]
    assert [line["grad_norm"] is None for line in lines(tmp_path)] == [False, True, False]
    assert [line["step"] for line in lines(tmp_path)] == [m.step for m in seen] == [1, 2, 3]
    assert load_state(tmp_path / "checkpoint-3").fields["n_updates"] == 2
    assert run.store.results == {}, "results are taken away as they are logged"


def test_a_step_that_stops_the_run_leaves_the_state_of_the_step_before(tmp_path):
    """Also under a deferred update: what was deferred is done by then, and nothing of the bad step is."""
    run = training(tmp_path, Policy(group_micro_batches=4, update=Update.DEFERRED), Infinite, save_every=1)
    with pytest.raises(ValueError, match=r"step 2: the gradient of model.embed_tokens.weight is not finite"):
        run.run(0, 3, lambda metrics: None)
    good = training(tmp_path / "good", Policy(group_micro_batches=4))
    good.run(0, 1, lambda metrics: None)
    for x, y in zip(state_of(run.store), state_of(good.store), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)


@pytest.mark.parametrize("save_every", [1, 2, 5])
@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
def test_a_run_that_is_saved_stopped_and_resumed_under_another_plan_is_the_unbroken_one(tmp_path, save_every, master_dtype):
    """Deferred updates are done before a checkpoint is written; a skipped step before it is not forgotten."""
    fields = {"on_nonfinite": "skip", "master_dtype": master_dtype}
    policy = Policy(update=Update.DEFERRED, keep_blocks=(1, 2), group_micro_batches=4)
    whole = training(tmp_path / "whole", policy, Infinite, **fields)
    whole.run(0, 9, lambda metrics: None)
    first = training(tmp_path / "parts", policy, Infinite, save_every=save_every, **fields)
    first.run(0, 5, lambda metrics: None)
    second = training(tmp_path / "parts", Policy(prefetch_depth=3, group_micro_batches=3), Infinite, **fields)
    state = load_state(tmp_path / "parts" / "checkpoint-5")
    second.resume(state)
    second.run(state.step, 9, lambda metrics: None)
    for x, y in zip(state_of(second.store), state_of(whole.store), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)
    weights = [{p.name: w for p, w in run.store.host.compute_weights()} for run in (second, whole)]
    assert all(same_bits(weights[0][name], weights[1][name]) for name in weights[0])
    assert [(a["step"], a["loss"], a["lr"]) for a in lines(tmp_path / "parts")] == [
        (b["step"], b["loss"], b["lr"]) for b in lines(tmp_path / "whole")
    ]


def test_another_meaning_is_not_resumed(tmp_path):
    run = training(tmp_path, Policy())
    run.run(0, 1, lambda metrics: None)
    other = training(tmp_path, Policy(), clip_norm=0.25)
    with pytest.raises(CheckpointError, match="its semantics is not this run's"):
        other.resume(load_state(tmp_path / "checkpoint-1"))


def test_what_was_logged_after_the_checkpoint_is_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)) + '{"step": 4, "lo')
    keep_metrics_up_to(path, 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_weight_decay_is_left_out_where_the_trainer_of_transformers_leaves_it_out(model_type):
    """And for the attention sinks of gpt_oss, which have one dimension like a bias; there it would pull them towards zero."""
    config = tiny_config(model_type, **({"attention_bias": True} if model_type in ("llama", "qwen3", "qwen3_moe") else {}))
    with torch.device("meta"):
        fields = {key: value for key, value in config.items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    for name, p in model.named_parameters():
        assert decays(name, tuple(p.shape)) == (name in theirs and not name.endswith(".sinks")), name


def test_a_machine_that_failed_in_an_update_is_put_right_by_a_checkpoint(tmp_path):
    """The same machine, its state half updated, resumes and ends as the unbroken run does."""

    class BreaksInUpdate(CpuMachine):
        broken = False

        def perform(self, index, op, step):
            if step == 3 and op.kind is Kind.UPDATE and op.block == 2 and not self.broken:
                self.broken = True
                raise OSError("gone")
            super().perform(index, op, step)

    whole = training(tmp_path / "whole", Policy())
    whole.run(0, 5, lambda metrics: None)
    run = training(tmp_path / "broken", Policy(keep_blocks=(1,)), BreaksInUpdate, save_every=2)
    with pytest.raises(RuntimeError, match="update cpu b2 failed: OSError: gone"):
        run.run(0, 5, lambda metrics: None)
    run.resume(load_state(tmp_path / "broken" / "checkpoint-2"))
    execute(run.plan, run.machine, 3, first_step=2)
    for x, y in zip(state_of(run.store), state_of(whole.store), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)
