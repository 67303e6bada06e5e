"""Effects of the settings of a run, from its file and flags."""

import json
import sys
from itertools import product

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.run_config import read_run
from penstock.runtime.plan import PlanFile
from penstock.settings import DataSettings, EvaluationSettings, RunSettings
from penstock.training.inputs import prompts_of, repeated_samples, steps_of
from penstock.training.monitors import chosen
from tests.bytes_of_files import read, write_lines
from tests.lanes import mostly_slow
from tests.running import SCRATCH, lines_of, one_line, penstock, plan_in, succeeded, train, weights_sha

FILE = """
plan: {home}/plan.json
from_scratch: true
tokenizer: bytes
data:
  path: {home}/data
out: {home}/out
epochs: 1.5
seed: 3
optimizer:
  lr: 1e-3
  weight_decay: 0.1
  no_decay: [embed_tokens]
  schedule: {{kind: cosine, warmup_steps: 2}}
checkpoint: {{every: 3, keep: 2}}
evaluation:
  data: {home}/held-out.txt
  every: 4
  prompts: ["To be", "Why?\\nSay"]
  max_new_tokens: 5
monitors: [tensorboard]
"""


def write_file(home):
    plan_in(home)
    (home / "held-out.txt").write_text("The slings and arrows of outrageous fortune, or to take arms. " * 3)
    (home / "run.yaml").write_text(FILE.format(home=home))
    return home / "run.yaml"


def test_a_run_from_a_file_does_all_that_it_says(home):
    result = succeeded(penstock("run", "--config", write_file(home)))
    lines = lines_of(home, "out")
    trained, evaluated = ([line for line in lines if key in line] for key in ("loss", "eval_loss"))
    n = len(trained)
    assert [line["step"] for line in trained] == list(range(1, n + 1))
    assert [line["step"] for line in evaluated] == [*range(0, n, 4), n]
    assert trained[0]["lr"] == 0
    assert trained[2]["lr"] == 1e-3
    assert trained[-1]["lr"] < 1e-4
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert set(trained[0]["busy_s"]) == {"h2d", "gpu", "d2h", "cpu"}
    assert trained[0]["predicted_step_s"] > 0
    saved = sorted(int(path.name.removeprefix("checkpoint-")) for path in (home / "out").glob("checkpoint-*"))
    assert saved == [n - n % 3 - 3 * (n % 3 == 0), n], "the last two"
    events = EventAccumulator(str(home / "out" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, n + 1))
    assert [e.value for e in events.Scalars("eval/loss")] == pytest.approx([line["eval_loss"] for line in evaluated])
    samples = lines_of(home, "out", "samples.jsonl")
    assert [(line["step"], line["prompt"]) for line in samples] == [*product([*range(4, n, 4), n], ("To be", "Why?\nSay"))]
    assert all(0 <= len(line["text"]) <= 5 for line in samples)
    texts = events.Tensors("samples/1/text_summary")
    assert texts[-1].tensor_proto.string_val[0].decode() == "Why?\nSay\n\n" + samples[-1]["text"]
    loss = f"loss {evaluated[-1]['eval_loss']:.4f}"
    for message in (f'sample after step {n}: "Why?', f"evaluation after step {n}: {loss}", "held out: "):
        assert message in result.stderr


def test_a_model_that_learns_conversations_is_asked_as_in_one(home):
    turns = ((f"What is {n}?", "A number." * (n % 3 + 1)) for n in range(12))
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns]
    write_lines(home / "chats.jsonl", chats)
    plan = plan_in(home, "--seq-len", 96)
    flags = ["--packing", "documents", "--prompt", "What is 3?", "--eval-data", home / "chats.jsonl", "--schedule", "cosine"]
    args = ["--format", "messages", *SCRATCH]
    succeeded(penstock("run", plan, "--data", home / "chats.jsonl", "--out", home / "out", "--epochs", 2, *flags, *args))
    lines = lines_of(home, "out")
    assert all(line["supervised_tokens"] < line["tokens"] / 2 for line in lines if "loss" in line), "questions are not learned"
    assert lines[-1]["eval_tokens"] == sum(len(chat["messages"][1]["content"]) + 1 for chat in chats)
    assert len(lines_of(home, "out", "samples.jsonl")) == 1


@mostly_slow(
    ("row", "heard"), [({"text": "a"}, "Why?"), ({"instruction": "a", "output": "b"}, "<|user|>\nWhy?<|assistant|>\n")], ids=str
)
def test_prompts_are_turns_where_conversations_are_learned(home, row, heard):
    (home / "rows.jsonl").write_text(json.dumps(row))
    plan = PlanFile.read(plan_in(home)).plan
    settings = EvaluationSettings(prompts=("Why?",))
    run = RunSettings(DataSettings(str(home / "rows.jsonl")), out=str(home / "o"), tokenizer="bytes", evaluation=settings)
    prompts = prompts_of(run, plan, None)
    (ids,), tokenizer = prompts.ids, prompts.tokenizer
    assert tokenizer.decode([i for i in ids if i not in tokenizer.answer_ends]) == heard


def test_the_settings_in_the_folder_make_the_same_run_again(home):
    file = write_file(home)
    succeeded(penstock("run", home / "plan.json", "--config", file, "--steps", 4, "--seed", 5, "--out", home / "first"))
    written = home / "first" / "run.yaml"
    settings = {"steps": 4, "seed": 5, "out": str(home / "first"), "plan": str(home / "first" / "run-plan.json")}
    read = read_run(file, settings)
    assert read_run(written, {}) == read
    fields = yaml.safe_load(written.read_text())
    assert (fields["steps"], fields["epochs"], fields["seed"], fields["optimizer"]["beta2"]) == (4, None, 5, None), "as of the plan"
    succeeded(penstock("run", "--config", written, "--out", home / "second"))
    assert weights_sha(home / "first" / "checkpoint-4") == weights_sha(home / "second" / "checkpoint-4") != {}


def test_decay_spares_named_parameters_that_there_are(home):
    plan = plan_in(home)
    (home / "a.yaml").write_text("optimizer: {weight_decay: 0.5, no_decay: [mlp, self_attn, embed_tokens, lm_head]}")
    (home / "b.yaml").write_text("optimizer: {weight_decay: 0.5, no_decay: [no_such_weight]}")
    for out, args in {"none": [], "spared": ["--config", home / "a.yaml"], "all": ["--weight-decay", 0.5]}.items():
        succeeded(train(home, plan, *args, out=out, steps=2))
    none, spared, every = (weights_sha(home / out / "checkpoint-2") for out in ("none", "spared", "all"))
    assert none == spared != every
    one_line(train(home, plan, "--config", home / "b.yaml", out="o"), 2, "no_such_weight", "optimizer.no_decay")


@mostly_slow(
    ("flags", "words"),
    [
        (["--steps", "2", "--epochs", "1"], ("steps and epochs",)),
        (["--warmup-steps", "4"], ("warm-up takes 4 steps", "the run has 4")),
        (["--streaming", "--resume-from", "checkpoint-7"], ("no checkpoint 'checkpoint-7'", "it holds: ")),
        (["--recalibrate", "here.json"], ("--recalibrate: no such option", "plan with --measured RUN")),
        (["--device", "emulated", "--save-minutes", "5"], ("an emulated run trains a stand-in and saves nothing",)),
        (["--prompt", "x" * 40], ("prompt 1 has 40 tokens", "32")),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_wrong_settings_are_one_line_and_leave_nothing(home, monkeypatch, flags, words):
    monkeypatch.chdir(home)
    one_line(train(home, plan_in(home), *flags, out="o"), 2, *words)
    assert not (home / "o").exists()


def test_a_missing_monitor_is_refused_first(home, monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    result = train(home, plan_in(home), "--data", home / "nowhere", "--monitor", "tensorboard", "--monitor", "wandb", out="o")
    one_line(result, 2, "--monitor wandb: wandb is not installed here; pip install wandb")
    assert (chosen(["all"]), chosen(["none"])) == (["tensorboard"], [])
    result = train(home, home / "plan.json", "--report-to", "none", "--report-to", "tensorboard", out="o")
    one_line(result, 2, "--monitor none, tensorboard: all and none exclude others")
    assert not (home / "o").exists()


def test_a_run_without_plan_or_data_is_told_where_to_name_them(home):
    one_line(penstock("run", "--data", home / "data"), 2, "no plan", "--config")
    one_line(penstock("run", home / "plan.json"), 2, "no data", "--data", "--config")


@pytest.mark.parametrize(
    ("epochs", "n_rows", "batch_size", "n_steps", "n_again"),
    [
        *((None, 7, 1, 7, 0), (2.0, 7, 1, 14, 0), (0.07, 100, 1, 7, 0), (1.1, 10, 1, 11, 0), (0.001, 5, 1, 1, 0)),
        *((3, 17, 16, 4, 13), (3, 16, 16, 3, 0), (1, 17, 16, 2, 15), (2.5, 17, 16, 3, 0), (1, 3, 16, 1, 13), (4, 3, 16, 1, 4)),
    ],
)
def test_epochs_are_rounded_up_to_steps_once(tmp_path, epochs, n_rows, batch_size, n_steps, n_again):
    """The right value: ceil(epochs x rows / batch size). The last step continues in the next pass."""
    path = write_lines(tmp_path / "t.jsonl", [{"text": "a" * (1 + n)} for n in range(n_rows)])
    run, data = RunSettings(DataSettings(str(path)), epochs=epochs), read(path, 128, batch_size, packing="one")
    assert (steps_of(run, data), repeated_samples(run, data)) == (n_steps, n_again)


def test_a_part_of_held_out_data_is_a_sample_of_the_whole(home):
    """Rows sorted by length: the first six would be the shortest."""
    rows = write_lines(home / "held-out.jsonl", [{"text": "a" * n} for n in range(1, 25)])
    plan, n_tokens, lines = plan_in(home), {}, {}
    for limit, seed in ((24, 0), (6, 0), (6, 1), (6, 0)):
        (home / "few.yaml").write_text(f"evaluation: {{max_sequences: {limit}, first: false}}\ndata: {{packing: one}}\n")
        flags = ["--eval-data", rows, "--config", home / "few.yaml", "--seed", seed]
        out = f"out-{limit}-{seed}-{len(lines)}"
        result = succeeded(train(home, plan, *flags, out=out, steps=1))
        lines[out] = [line for line in result.stderr.splitlines() if line.startswith(("evaluation", "held out"))]
        n_tokens[out] = lines_of(home, out)[-1]["eval_tokens"]
    all_tokens, sample, other_seed, repeated = n_tokens.values()
    assert (all_tokens, sample) == (sum(range(1, 25)), repeated)
    assert sum(range(1, 7)) < sample != other_seed
    assert all("6 of 24 sequences" in line for line in lines[out]), lines
    assert not any(" of 24" in line for line in lines["out-24-0-0"])
