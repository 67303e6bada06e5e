"""Training loop: counts, logs and checkpoints between steps, and bitwise resume."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from transformers import Trainer as TrainerOfTransformers

from penstock.checkpoint.checkpoint import load_state
from penstock.runtime.errors import CheckpointError
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Kind, Policy, Update, saves
from penstock.runtime.plan.optimizer import decays
from penstock.settings import OptimizerSettings, ScheduleSettings
from penstock.training.trainer import DeviceMemoryError, Trainer
from tests.lanes import mostly_slow
from tests.real_layers import hf_model
from tests.running import weights_in
from tests.sessions import lines, resumed, same_state, session_of, steps_of, train
from tests.tiny import STRUCTURES, tiny_config
from tests.training import LEAN, state_of

pytestmark = pytest.mark.usefixtures("no_fsync")


class Infinite(TorchMachine):
    """Makes the embedding gradient, the last to arrive, infinite in the second step."""

    def perform(self, index, op, step):
        super().perform(index, op, step)
        if step == 1 and op.kind is Kind.OFFLOAD_GRADIENT and op.block == 0:
            self.arenas.raw(op.writes[0]).view(torch.bfloat16)[3] = float("inf")


def test_a_nonfinite_step_leaves_the_state_before_it(tmp_path):
    """Deferred updates of the previous step are applied, none of the non-finite step."""
    session = session_of(tmp_path, Policy(accumulation_group=4, update=Update.DEFERRED), Infinite, every=1)
    with pytest.raises(ValueError, match=r"step 2: the gradient of model.embed_tokens.weight is not finite"):
        train(session, 3)
    assert same_state(session, train(session_of(tmp_path / "good", Policy(accumulation_group=4)), 1))


STATES: dict[str, dict] = {"fp32": {}, "bf16": {"master_dtype": "bf16"}} | LEAN


@mostly_slow(("state", "every"), zip(STATES, cycle((2, 1, 5))))
def test_a_run_resumed_under_another_plan_is_the_unbroken_one(tmp_path, every, state):
    """Deferred updates are done before a checkpoint is written; a skipped step before it is not forgotten."""
    fields = {"on_nonfinite": "skip"} | STATES[state]
    policy = Policy(update=Update.DEFERRED, save=saves(all=(1, 2)), accumulation_group=4)
    unbroken = train(session_of(tmp_path / "whole", policy, Infinite, **fields), 9)
    train(session_of(tmp_path / "parts", policy, Infinite, every=every, **fields), 5)
    other_policy = Policy(prefetch_depth=3, accumulation_group=3, sum_blocks=(0, 2, 3))
    assert same_state(train(resumed(session_of(tmp_path / "parts", other_policy, Infinite, **fields)), 9), unbroken)
    logs = [[(line["step"], line["loss"], line["lr"]) for line in lines(tmp_path / name)] for name in ("parts", "whole")]
    assert logs[0] == logs[1]
    weights = [weights_in(tmp_path / name / "checkpoint-9") for name in ("parts", "whole")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("model_type", STRUCTURES)
def test_weight_decay_spares_what_transformers_spares(model_type):
    """Includes attention sinks of gpt_oss, one-dimensional like a bias; decay would pull them towards zero."""
    config = tiny_config(model_type, **({"attention_bias": True} if model_type in ("llama", "qwen3", "qwen3_moe") else {}))
    with torch.device("meta"):
        model = hf_model(config)
    reference = set(TrainerOfTransformers.get_decay_parameter_names(None, model))
    for name, p in model.named_parameters():
        assert decays(name, tuple(p.shape)) == (name in reference and not name.endswith(".sinks")), name


def test_each_step_logs_busy_lanes_and_its_prediction(tmp_path):
    metrics = []
    session = replace(session_of(tmp_path), n_steps=3, device="cuda")  # same kind as in the plan
    trainer = Trainer(session, validations=())
    trainer.monitors.log = lambda step, values: metrics.append((step, values))
    trainer.train()
    assert session.store.compute.losses == {}, "results are handed over as they are logged"
    for line, (step, values) in zip(lines(tmp_path), metrics, strict=True):
        assert step == line["step"]
        assert values["loss"] == line["loss"]
        assert line["predicted_step_s"] == values["predicted_step_s"] == session.prediction.step_s
        assert set(line["busy_s"]) == {"gpu", "h2d", "d2h", "cpu"}
        assert all(0 < s <= line["step_s"] * 1.5 for s in line["busy_s"].values())
        assert values["busy_fraction/gpu"] == pytest.approx(min(1.0, line["busy_s"]["gpu"] / line["step_s"]))


def test_other_optimizer_settings_are_refused_by_difference(tmp_path):
    first = session_of(tmp_path)

    def scheduled(kind):
        optimizer = OptimizerSettings(schedule=ScheduleSettings(kind))
        request = replace(first.inputs.request, settings=replace(first.settings, optimizer=optimizer, steps=4))
        return replace(first, inputs=replace(first.inputs, request=request))

    train(scheduled("cosine"), 1)
    with pytest.raises(CheckpointError, match=r'schedule.kind was "cosine", is "linear".*--model'):
        resumed(scheduled("linear"))
    resumed(scheduled("cosine"))


@mostly_slow(
    ("field", "value", "message"),
    [
        ("n_updates", 2, "n_updates"),
        ("data_position", {"epoch": 9}, "data position"),
        ("seed", 1, "of another seed"),
        ("model_fingerprint", "x", "of another model"),
        ("semantics", {"clip_norm": 0.25}, r"of another meaning of a step .*: batch_size was"),
    ],
)
def test_another_runs_state_is_refused_and_nothing_changed(tmp_path, field, value, message):
    train(session_of(tmp_path), 1)
    state = load_state(tmp_path / "checkpoint-1")
    session = session_of(tmp_path)
    initial = state_of(session.store)
    with pytest.raises(CheckpointError, match=rf"checkpoint-1.*{message}"):
        resumed(session, replace(state, fields=state.fields | {field: value}))
    assert same_state(session, initial)


def test_out_of_device_memory_is_one_line_and_resumable(tmp_path):
    class Short(TorchMachine):
        def perform(self, index, op, step):
            if step == 2 and op.kind is Kind.FORWARD:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.")
            super().perform(index, op, step)

    with pytest.raises(DeviceMemoryError) as caught:
        train(session_of(tmp_path, machine_type=Short, every=1, background=False))
    assert caught.value.exit_code == 3
    words = str(caught.value)
    assert len(words.splitlines()) == 1
    assert words.startswith("step 3, lane gpu: forward")
    assert "Tried to allocate 2.00 GiB." in words
    assert "--device-memory" in words
    assert steps_of(tmp_path) == [1, 2]
