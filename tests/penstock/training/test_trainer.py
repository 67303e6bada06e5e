"""Is what happens between steps counted, logged and saved as it was?"""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from penstock.checkpoint.checkpoint import load_state
from penstock.cli.progress import Progress
from penstock.settings import CheckpointSettings
from penstock.training.log import keep_lines_up_to
from penstock.training.trainer import DeviceMemoryError, Metrics, Training
from runtime.errors import CheckpointError
from runtime.executor import Stop, execute
from runtime.machines.cpu import CpuMachine
from runtime.plan import Kind, Policy, Update, saves
from runtime.plan.optimizer import decays
from tests.row_of_tokens import RowOfTokens
from tests.tiny import STRUCTURES, tiny_config
from tests.training import plan_of, same_bits, scheduled, semantics_of, state_of


def training(folder, policy: Policy, machine_type=CpuMachine, save_every=None, background=True, **fields) -> Training:
    semantics = semantics_of("llama", **fields)
    config = tiny_config("llama")
    plan = plan_of(config, semantics, policy)
    ids = np.random.default_rng(5).integers(0, 96, 16 * 50, dtype=np.uint16)
    tokens = RowOfTokens(ids, seq_len=16, batch_size=4, pad_id=0, shuffle_seed=3)
    machine = machine_type(plan, tokens.batch, scheduled)
    machine.initialise(7)
    folder.mkdir(exist_ok=True)
    checkpoint = CheckpointSettings(every=save_every, background=background)
    return Training(plan, machine, machine, tokens, 0, folder, saves=True, checkpoint=checkpoint)


def lines(folder):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Infinite(CpuMachine):
    """The gradient of the embedding, the last to arrive, is infinite in the second step."""

    def perform(self, index, op, step):
        super().perform(index, op, step)
        if step == 1 and op.kind is Kind.OFFLOAD_GRADIENT and op.block == 0:
            self.arenas.view(op.writes[0], "bf16")[0] = float("inf")


def test_a_skipped_step_is_logged_in_json_that_others_can_read(tmp_path):
    run = training(tmp_path, Policy(accumulation_group=4), Infinite, on_nonfinite="skip")
    seen = []
    run.run(0, 3, seen.append)
    assert [line["skipped"] for line in lines(tmp_path)] == [False, True, False]
    assert [line["grad_norm"] is None for line in lines(tmp_path)] == [False, True, False]
    assert [line["step"] for line in lines(tmp_path)] == [m.step for m in seen] == [1, 2, 3]
    assert load_state(tmp_path / "checkpoint-3").fields["n_updates"] == 2
    assert run.store.compute.losses == {}, "results are handed over as they are logged"


def test_a_step_that_stops_the_run_leaves_the_state_of_the_step_before(tmp_path):
    """Also under a deferred update: what was deferred is done by then, and nothing of the bad step is."""
    run = training(tmp_path, Policy(accumulation_group=4, update=Update.DEFERRED), Infinite, save_every=1)
    with pytest.raises(ValueError, match=r"step 2: the gradient of model.embed_tokens.weight is not finite"):
        run.run(0, 3, lambda metrics: None)
    good = training(tmp_path / "good", Policy(accumulation_group=4))
    good.run(0, 1, lambda metrics: None)
    for x, y in zip(state_of(run.store), state_of(good.store), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)


@pytest.mark.fast("some")
@pytest.mark.parametrize("save_every", [1, 2, 5])
@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
def test_a_run_that_is_saved_stopped_and_resumed_under_another_plan_is_the_unbroken_one(tmp_path, save_every, master_dtype):
    """Deferred updates are done before a checkpoint is written; a skipped step before it is not forgotten."""
    fields = {"on_nonfinite": "skip", "master_dtype": master_dtype}
    policy = Policy(update=Update.DEFERRED, save=saves(all=(1, 2)), accumulation_group=4)
    whole = training(tmp_path / "whole", policy, Infinite, **fields)
    whole.run(0, 9, lambda metrics: None)
    first = training(tmp_path / "parts", policy, Infinite, save_every=save_every, **fields)
    first.run(0, 5, lambda metrics: None)
    second = training(tmp_path / "parts", Policy(prefetch_depth=3, accumulation_group=3), Infinite, **fields)
    state = load_state(tmp_path / "parts" / "checkpoint-5")
    second.resume(state)
    second.run(state.step, 9, lambda metrics: None)
    for x, y in zip(state_of(second.store), state_of(whole.store), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)
    weights = [
        {p.name: of.compute_weight(p) for b in range(len(of.plan.workload.blocks)) for p in of.owned(b)}
        for of in (second.store.host, whole.store.host)
    ]
    assert all(same_bits(weights[0][name], weights[1][name]) for name in weights[0])
    assert [(a["step"], a["loss"], a["lr"]) for a in lines(tmp_path / "parts")] == [
        (b["step"], b["loss"], b["lr"]) for b in lines(tmp_path / "whole")
    ]


@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
def test_a_checkpoint_takes_the_bytes_that_were_said_before(tmp_path, master_dtype):
    run = training(tmp_path, Policy(), master_dtype=master_dtype)
    run.run(0, 1, lambda metrics: None)
    tensors = [t for file in (tmp_path / "checkpoint-1").glob("*.safetensors") for t in load_file(file).values()]
    assert sum(t.nbytes for t in tensors) == run.plan.checkpoint_bytes()


def test_another_meaning_is_not_resumed(tmp_path):
    run = training(tmp_path, Policy())
    run.run(0, 1, lambda metrics: None)
    other = training(tmp_path, Policy(), clip_norm=0.25)
    with pytest.raises(CheckpointError, match=r"of another meaning of a step .*: clip_norm was"):
        other.resume(load_state(tmp_path / "checkpoint-1"))


def test_what_was_logged_after_the_checkpoint_is_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)) + '{"step": 4, "lo')
    keep_lines_up_to(path, 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("model_type", STRUCTURES)
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
    run = training(tmp_path / "broken", Policy(save=saves(all=(1,))), BreaksInUpdate, save_every=2)
    with pytest.raises(RuntimeError, match="update cpu b2 failed: OSError: gone"):
        run.run(0, 5, lambda metrics: None)
    run.resume(load_state(tmp_path / "broken" / "checkpoint-2"))
    execute(run.plan, run.machine, 3, first_step=2)
    for x, y in zip(state_of(run.store), state_of(whole.store), strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)


# -- an end before the end, and going on


class AsksAt(CpuMachine):
    """Somebody asks for the end while an op of some step is performed."""

    stop: Stop
    at: tuple[int, Kind]

    def perform(self, index, op, step):
        super().perform(index, op, step)
        if (step, op.kind) == self.at:
            self.stop.request()


@pytest.mark.fast("values")
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("save_every", [None, 1, 2])
@pytest.mark.parametrize("at", [(2, Kind.LOAD), (2, Kind.LOSS), (2, Kind.UPDATE), (1, Kind.OFFLOAD_GRADIENT)])
@pytest.mark.parametrize("update", [Update.BARRIER, Update.DEFERRED])
def test_a_run_that_was_asked_to_end_saves_the_step_in_progress_and_goes_on_to_the_same_bits(
    tmp_path, unbroken, update, at, save_every, background
):
    class Asked(AsksAt):
        pass

    policy = Policy(update=update, accumulation_group=4, save=saves(all=(1,)))
    first = training(tmp_path, policy, Asked, save_every, background)
    Asked.stop, Asked.at = first.stop, at
    first.run(0, 6, lambda metrics: None)
    done = len(lines(tmp_path))
    assert done in (at[0] + 1, at[0] + 2), "the step in progress, or that which some lane had begun already"
    state = load_state(tmp_path / f"checkpoint-{done}")
    second = training(tmp_path, Policy(accumulation_group=4), save_every=save_every)
    second.resume(state)
    second.run(state.step, 6, lambda metrics: None)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    for x, y in zip(state_of(second.store), unbroken, strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The state after six steps."""
    run = training(tmp_path_factory.mktemp("unbroken"), Policy())
    run.run(0, 6, lambda metrics: None)
    return state_of(run.store)


def test_of_all_checkpoints_the_last_few_stay(tmp_path):
    run = training(tmp_path, Policy(), save_every=1)
    run = replace(run, checkpoint=replace(run.checkpoint, keep=2))
    run.run(0, 5, lambda metrics: None)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


# -- what is told of a step


class Remembers:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, step, values):
        self.logged.append((step, dict(values)))

    def text(self, step, name, text): ...

    def close(self): ...


def test_each_step_says_how_long_lanes_were_busy_and_how_long_the_step_should_have_taken(tmp_path):
    monitor = Remembers()
    run = replace(training(tmp_path, Policy()), monitors=(monitor,), predicted_step_s=0.25)
    run.run(0, 3, lambda metrics: None)
    for line, (step, values) in zip(lines(tmp_path), monitor.logged, strict=True):
        assert step == line["step"]
        assert values["loss"] == line["loss"]
        assert line["predicted_step_s"] == values["predicted_step_s"] == 0.25
        assert set(line["busy_s"]) == {"gpu", "h2d", "d2h", "cpu"}
        assert all(0 < s <= line["step_s"] * 1.5 for s in line["busy_s"].values())
        assert values["busy_fraction/gpu"] == pytest.approx(min(1.0, line["busy_s"]["gpu"] / line["step_s"]))


def test_no_lane_is_shown_busier_than_all_the_time():
    """An op that began in the step before counts, with all its seconds, where it ended."""
    metrics = Metrics(1, 1.0, 1.0, 1e-3, 8, 8, 2.0, 4.0, False, {"cpu": 3.0, "gpu": 1.0})
    assert {k: v for k, v in metrics.values().items() if "busy" in k} == {"busy_fraction/cpu": 1.0, "busy_fraction/gpu": 0.5}
    assert asdict(metrics)["busy_s"] == {"cpu": 3.0, "gpu": 1.0}, "the log has what was measured"
    assert Progress(0, 1, 1.0)._lanes(metrics) == "cpu 100%  gpu 50%"


def test_lanes_that_only_issue_do_not_say_that_they_were_busy(tmp_path):
    """The host's own lane does, which works itself."""

    class OnADevice(CpuMachine):
        def device_name(self):
            return "some GPU"

    training(tmp_path, Policy(), OnADevice).run(0, 2, lambda metrics: None)
    assert [set(line["busy_s"]) for line in lines(tmp_path)] == [{"cpu"}] * 2


# -- what a state must share with the run that goes on from it


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ({"lr": 1e-5, "schedule": {"kind": "cosine"}}, {"lr": 2e-5, "schedule": {"kind": "cosine"}}, "lr was 1e-05, is 2e-05"),
        ({"schedule": {"kind": "cosine"}}, {"schedule": {"kind": "linear"}}, 'schedule.kind was "cosine", is "linear"'),
        ({"n_steps": 10}, {"n_steps": 20}, "n_steps was 10, is 20"),
        ({}, {"lr": 1e-5}, "lr was null, is 1e-05"),
    ],
)
def test_other_settings_of_the_optimizer_are_refused_with_what_differs_and_what_to_do(tmp_path, was, now, said):
    replace(training(tmp_path, Policy()), optimizer=was).run(0, 1, lambda metrics: None)
    with pytest.raises(CheckpointError, match=said) as caught:
        replace(training(tmp_path, Policy()), optimizer=now).resume(load_state(tmp_path / "checkpoint-1"))
    assert "--model" in str(caught.value)
    replace(training(tmp_path, Policy()), optimizer=json.loads(json.dumps(was))).resume(load_state(tmp_path / "checkpoint-1"))


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("n_updates", -1, "n_updates"),
        ("n_updates", 2, "n_updates"),
        ("n_updates", True, "n_updates"),
        ("n_updates", None, "n_updates"),
        ("data_position", [0, 4], "data_position"),
        ("data_position", {"epoch": 9}, "data position"),
        ("seed", 1, "of another seed"),
        ("data_fingerprint", "x", "of another set of data, or order of it"),
        ("model_fingerprint", "x", "of another model"),
    ],
)
def test_a_state_that_is_not_this_runs_is_refused_before_anything_is_changed(tmp_path, field, value, said):
    run = training(tmp_path, Policy())
    run.run(0, 1, lambda metrics: None)
    state = load_state(tmp_path / "checkpoint-1")
    other = training(tmp_path, Policy())
    before = state_of(other.store)
    with pytest.raises(CheckpointError, match=said) as caught:
        other.resume(replace(state, fields=state.fields | {field: value}))
    assert "checkpoint-1" in str(caught.value)
    for x, y in zip(state_of(other.store), before, strict=True):
        assert all(same_bits(x[name], y[name]) for name in x)


# -- memory of the device


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.LOAD])
def test_a_device_that_is_out_of_memory_is_one_line_and_the_run_goes_on_from_its_checkpoint(tmp_path, kind):
    class Short(CpuMachine):
        def perform(self, index, op, step):
            if step == 2 and op.kind is kind:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.")
            super().perform(index, op, step)

    with pytest.raises(DeviceMemoryError) as caught:
        training(tmp_path, Policy(), Short, save_every=1, background=False).run(0, 4, lambda metrics: None)
    assert caught.value.exit_code == 3
    words = str(caught.value)
    assert len(words.splitlines()) == 1
    assert words.startswith(f"step 3, lane {'gpu' if kind is Kind.FORWARD else 'h2d'}: {kind}")
    assert "Tried to allocate 2.00 GiB." in words
    assert "--device-memory" in words
    assert (tmp_path / "checkpoint-2").is_dir()
