"""Settings of a run: read from a file and flags, clear errors, and a lossless round trip."""

import json
import string
from contextlib import suppress
from dataclasses import asdict

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock import settings as run_settings
from penstock.run_config import RunConfigError, read_run, run_text
from penstock.settings import DataPart, DataSettings, EvaluationSettings, OptimizerSettings, RunSettings, ScheduleSettings

DATA = "data: {path: corpus}\n"

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=40)
COUNT, ABOVE_0 = st.integers(1, 2**53 - 1), st.floats(0, 1e6, exclude_min=True)
RUN = st.builds(
    RunSettings,
    data=st.builds(DataSettings, TEXT, split=st.none() | TEXT, streaming=st.booleans()),
    plan=st.none() | TEXT,
    out=TEXT,
    steps=st.none() | COUNT,
    seed=st.integers(0, 2**63 - 1),
    optimizer=st.builds(
        OptimizerSettings,
        ABOVE_0,
        st.floats(0, 1, exclude_max=True),
        no_decay=st.lists(TEXT, max_size=3).map(tuple),
        schedule=st.builds(ScheduleSettings, st.just("linear"), COUNT)
        | st.builds(ScheduleSettings, st.just("warmup-stable-decay"), COUNT, st.none() | COUNT, st.floats(0, 1)),
    ),
    checkpoint=st.builds(run_settings.CheckpointSettings, st.none() | COUNT, minutes=st.just(0.0) | ABOVE_0),
    evaluation=st.builds(EvaluationSettings, st.none() | TEXT, prompts=st.lists(TEXT, max_size=3).map(tuple)),
    monitors=st.lists(st.sampled_from(["tensorboard", "wandb", "mlflow"]), max_size=3).map(tuple),
)
# Strings that YAML could read as other values, or as markup
LIKE_VALUES = EvaluationSettings("2026-11-20", prompts=("1:30", "0x1f", "=", "<<"))
LIKE_MARKUP = EvaluationSettings(prompts=("a\nb\n", " x ", "&a *a !t", "🙂\x7f"))


@given(RUN)
@settings(max_examples=60, deadline=None)
@example(RunSettings(DataSettings("no"), out="1e-5", plan="null", model="~", evaluation=LIKE_VALUES))
@example(RunSettings(DataSettings("0"), optimizer=OptimizerSettings(1.0, no_decay=("\x85", "\u2028", "\r", "a\n"))))
@example(RunSettings(DataSettings("\x85 \u2028\ufeff"), out="'\"\\", evaluation=LIKE_MARKUP))
def test_settings_are_read_back_as_they_were_written(tmp_path_factory, run):
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(run_text(run))
    assert read_run(path, {}) == run
    written = yaml.safe_load(path.read_text())
    assert written == json.loads(json.dumps(asdict(run))), "any reader of YAML reads the same"


YAML = """
plan: plan.json  # what a run is, but for its plan
data: {path: chats.jsonl, format: messages}
epochs: 2.5
optimizer:
  lr: 2e-5  # text, in YAML 1.1
  no_decay: [embed_tokens]
  schedule: {kind: warmup-stable-decay, warmup_steps: 1_00}
checkpoint:
evaluation:
  data: held-out.jsonl
  prompts: [Or not to be, "Why?"]
monitors: [tensorboard]
"""
TOML = """
plan = "plan.json"
epochs = 2.5
monitors = ["tensorboard"]
data = {path = "chats.jsonl", format = "messages"}
evaluation = {data = "held-out.jsonl", prompts = ["Or not to be", "Why?"]}
[optimizer]
lr = 2e-5
no_decay = ["embed_tokens"]
schedule = {kind = "warmup-stable-decay", warmup_steps = 100}
"""


def test_yaml_and_toml_say_the_same_and_the_rest_is_default(tmp_path):
    expected = RunSettings(
        DataSettings("chats.jsonl", "messages"),
        plan="plan.json",
        epochs=2.5,
        optimizer=OptimizerSettings(2e-5, no_decay=("embed_tokens",), schedule=ScheduleSettings("warmup-stable-decay", 100)),
        evaluation=EvaluationSettings("held-out.jsonl", prompts=("Or not to be", "Why?")),
        monitors=("tensorboard",),
    )
    assert read(tmp_path, YAML) == read(tmp_path, TOML, name="run.toml") == expected


def read(tmp_path, text, flags=None, name="run.yaml"):
    (tmp_path / name).write_text(text)
    return read_run(tmp_path / name, flags or {})


def test_the_settings_of_an_older_run_are_resumed(tmp_path):
    """Removed settings are dropped on resume; in a user's file they are an error that lists the existing settings."""
    folder, older = tmp_path / "run", ("evaluation: {prompts: [a], temperature: 1.0, top_p: 0.9}", "data: {path: a, workers: 2}")
    folder.mkdir()
    text = "\n".join([*older, "steps: 3", f"out: {folder}", f"plan: {folder}/run-plan.json"])
    assert read(folder, text) == read(folder, text.replace(", workers: 2", "").replace(", temperature: 1.0, top_p: 0.9", ""))
    with pytest.raises(RunConfigError, match=r"not needed.*greedy decoding"):
        read(folder, text, name="mine.yaml")


def test_flags_override_the_file(tmp_path):
    text = DATA + "epochs: 3\noptimizer: {lr: 1e-3, beta1: 0.8}\nmonitors: [wandb]\n"
    flags = {"steps": 5, "optimizer.lr": 1e-4, "optimizer.schedule.kind": "linear", "monitors": ("mlflow",), "data.path": "other"}
    run = read(tmp_path, text, flags)
    assert run.optimizer == OptimizerSettings(1e-4, 0.8, schedule=ScheduleSettings("linear"))
    assert (run.steps, run.epochs, run.monitors, run.data.path) == (5, None, ("mlflow",), "other"), "--steps instead of epochs"
    assert read_run(None, {"data.path": "corpus", "steps": 3}) == RunSettings(DataSettings("corpus"), steps=3)
    with pytest.raises(RunConfigError, match="no data to train on: give --data"):
        read_run(None, {"steps": 3})


def test_data_are_a_path_or_several_with_weights_or_without(tmp_path):
    parts = (DataPart("a", 0.7), DataPart("b", 0.3))
    for text, expected in {
        "data: a": DataSettings("a"),
        "data: [a, b]": DataSettings(mix=(DataPart("a"), DataPart("b"))),
        "data: [a:0.7, {path: b, weight: 0.3}]": DataSettings(mix=parts),
        "data: {path: [{path: a, weight: 0.7}, {path: b, weight: 0.3}], packing: one}": DataSettings(mix=parts, packing="one"),
        "data: {path: a, columns: {prompt: question}}": DataSettings("a", columns={"prompt": "question"}),
    }.items():
        run = read(tmp_path, text)
        assert run.data == expected
        (tmp_path / "again.yaml").write_text(run_text(run))
        assert read_run(tmp_path / "again.yaml", {}) == run
    for wrong in ("{mix: [{path: a}, b: 1]}", "{path: a, mix: [{path: b}]}", "[{path: a, weight: -0.5}]", "[]"):
        with pytest.raises(RunConfigError):
            read(tmp_path, f"data: {wrong}")
    mixed = DataSettings(mix=(DataPart("a", format="text", columns={"text": "body"}), DataPart("b")), format="messages", split="x")
    assert mixed.parts == (DataSettings("a", "text", columns={"text": "body"}, split="x"), DataSettings("b", "messages", split="x"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer: {lerning_rate: 1e-5}", ("run.yaml: optimizer.lerning_rate: no such key", "did you mean optimizer.lr?")),
        ("optimizer: {lr: fast}", ("run.yaml: optimizer.lr: should be a valid number", "found 'fast'")),
        ("steps: 3\nepochs: 1", ("steps and epochs are both given",)),
        ("optimizer: {schedule: {kind: cosine, decay_steps: 2}}", ("decay_steps does nothing without warmup-stable-decay",)),
        ("evaluation: {every: 5}", ("evaluation.every does nothing without evaluation.data or prompts",)),
        ('out: "a\\0b"', ("out: should hold no NUL",)),
        ("model: !!python/object/apply:os.system [echo]", ("run.yaml:2", "not YAML")),
    ],
)
def test_a_wrong_setting_is_one_line_with_place_and_remedy(tmp_path, text, words):
    with pytest.raises(RunConfigError) as refused:
        read(tmp_path, DATA + text + "\n")
    message = str(refused.value)
    assert message.isprintable()
    assert len(message) < 600
    for word in words:
        assert word in message


@given(st.text(string.printable, max_size=200) | st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_settings_or_one_line(tmp_path_factory, content):
    for name in ("run.yaml", "run.toml"):
        path = tmp_path_factory.mktemp("run") / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with suppress(RunConfigError):
            assert isinstance(read_run(path, {"data.path": "corpus"}), RunSettings)
