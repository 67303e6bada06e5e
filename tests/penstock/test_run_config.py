"""Is what a user writes about a run understood, or refused in words that help?"""

import json
import string
from contextlib import suppress
from dataclasses import asdict

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.cli.run_options import _SETTINGS
from penstock.run_config import MAX_CONFIG_BYTES, MAX_DOTS, RunConfigError, names, read_run, run_text, write_run
from penstock.settings import (
    CheckpointSettings,
    DataPart,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
)

DATA = "data: {path: corpus}\n"

# -- the grammar of settings ----------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=40)
COUNT, NATURAL = st.integers(1, 2**53 - 1), st.integers(0, 2**53 - 1)
MAYBE = lambda strategy: st.none() | strategy  # noqa: E731
FRACTION = st.floats(0, 1)
ABOVE_0 = st.floats(0, 1e6, exclude_min=True)
SCHEDULE = st.builds(
    ScheduleSettings,
    st.sampled_from(["constant", "linear", "cosine", "warmup-stable-decay"]),
    NATURAL,
    MAYBE(NATURAL),
    FRACTION,
)
RUN = st.builds(
    RunSettings,
    data=st.builds(
        DataSettings,
        TEXT,
        st.sampled_from(["auto", "text", "messages", "alpaca", "sharegpt"]),
        streaming=st.booleans(),
        shuffle=st.booleans(),
        workers=NATURAL,
    ),
    plan=MAYBE(TEXT),
    model=MAYBE(TEXT),
    out=TEXT,
    steps=MAYBE(COUNT),
    seed=st.integers(0, 2**63 - 1),
    optimizer=st.builds(
        OptimizerSettings,
        ABOVE_0,
        st.floats(0, 1, exclude_max=True),
        no_decay=st.lists(TEXT, max_size=3).map(tuple),
        schedule=SCHEDULE,
    ),
    checkpoint=st.builds(CheckpointSettings, MAYBE(COUNT), MAYBE(COUNT), st.just(True), MAYBE(NATURAL))
    | st.builds(CheckpointSettings, MAYBE(COUNT), MAYBE(COUNT), st.just(False)),
    evaluation=st.builds(
        EvaluationSettings,
        MAYBE(TEXT),
        prompts=st.lists(TEXT, max_size=3).map(tuple),
        temperature=st.just(0.5),
        top_p=ABOVE_0.filter(lambda p: p <= 1),
    ),
    monitors=st.lists(st.sampled_from(["tensorboard", "wandb", "mlflow"]), max_size=3).map(tuple),
)


@given(RUN)
@settings(max_examples=60, deadline=None)
@example(
    RunSettings(
        DataSettings("no"),
        out="1e-5",
        plan="null",
        model="~",
        evaluation=EvaluationSettings("2026-11-20", prompts=("1:30", "0x1f", "=", "<<")),
    )
)
@example(RunSettings(DataSettings("0"), optimizer=OptimizerSettings(1.0, no_decay=("\x85", "\u2028", "\r", "a\n"))))
@example(
    RunSettings(
        DataSettings("\x85 \u2028\ufeff"),
        out="'\"\\",
        evaluation=EvaluationSettings(prompts=("a\nb\n", " x ", "&a *a !t", "🙂\x7f")),
    )
)
def test_settings_are_read_back_as_they_were_written(tmp_path_factory, run):
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    write_run(path, run)
    assert read_run(path, {}) == run
    written = yaml.safe_load(path.read_text())
    assert written == json.loads(json.dumps(asdict(run))), "any reader of YAML reads the same"


def test_every_setting_is_written_whether_it_was_said_or_not():
    written = yaml.safe_load(run_text(RunSettings(DataSettings("corpus"))))

    def leaves(fields, prefix=""):
        for key, value in fields.items():
            yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]

    assert list(leaves(written)) == list(names())


EXAMPLE = {
    "run.yaml": """
# What a run is, but for its plan
plan: plan.json
data:
  path: chats.jsonl
  format: messages
epochs: 2.5
seed: 7
optimizer:
  lr: 2e-5            # YAML 1.1 would take this for text
  weight_decay: 0.1
  no_decay: [embed_tokens]
  schedule:
    kind: warmup-stable-decay
    warmup_steps: 1_00
checkpoint:
evaluation:
  data: held-out.jsonl
  every: 50
  prompts:
    - no
    - "Why?"
monitors: [tensorboard]
""",
    "run.toml": """
plan = "plan.json"
epochs = 2.5
seed = 7
monitors = ["tensorboard"]
[data]
path = "chats.jsonl"
format = "messages"
[optimizer]
lr = 2e-5
weight_decay = 0.1
no_decay = ["embed_tokens"]
schedule = {kind = "warmup-stable-decay", warmup_steps = 100}
[evaluation]
data = "held-out.jsonl"
every = 50
prompts = ["no", "Why?"]
""",
}


def test_yaml_and_toml_say_the_same_and_what_is_not_said_has_its_default(tmp_path):
    expected = RunSettings(
        DataSettings("chats.jsonl", "messages"),
        plan="plan.json",
        epochs=2.5,
        seed=7,
        optimizer=OptimizerSettings(
            2e-5, weight_decay=0.1, no_decay=("embed_tokens",), schedule=ScheduleSettings("warmup-stable-decay", 100)
        ),
        evaluation=EvaluationSettings("held-out.jsonl", 50, prompts=("no", "Why?")),
        monitors=("tensorboard",),
    )
    for name, text in EXAMPLE.items():
        (tmp_path / name).write_text(text)
        assert read_run(tmp_path / name, {}) == expected


def read(tmp_path, text, flags=None, name="run.yaml"):
    (tmp_path / name).write_text(text)
    return read_run(tmp_path / name, flags or {})


def test_the_command_line_goes_before_the_file(tmp_path):
    text = DATA + "epochs: 3\noptimizer: {lr: 1e-3, beta1: 0.8}\nmonitors: [wandb]\n"
    flags = {"steps": 5, "optimizer.lr": 1e-4, "optimizer.schedule.kind": "linear", "monitors": ("mlflow",), "data.path": "other"}
    run = read(tmp_path, text, flags)
    assert run.optimizer == OptimizerSettings(1e-4, 0.8, schedule=ScheduleSettings("linear"))
    assert (run.steps, run.epochs, run.monitors, run.data.path) == (5, None, ("mlflow",), "other"), "--steps instead of epochs"
    unflagged = read(tmp_path, text)
    assert (unflagged.steps, unflagged.epochs, unflagged.monitors, unflagged.optimizer.lr) == (None, 3.0, ("wandb",), 1e-3)


def test_data_are_named_by_a_path_or_by_several_with_weights_or_without(tmp_path):
    parts = (DataPart("a", 0.7), DataPart("b", 0.3))
    for text, expected in {
        "data: a": DataSettings("a"),
        "data: [a, b]": DataSettings(mix=(DataPart("a"), DataPart("b"))),
        "data: [{path: a, weight: 0.7}, {path: b, weight: 0.3}]": DataSettings(mix=parts),
        "data: [a:0.7, {path: b, weight: 0.3}]": DataSettings(mix=parts),
        "data: {path: [{path: a, weight: 0.7}, {path: b, weight: 0.3}], packing: one}": DataSettings(mix=parts, packing="one"),
        "data: {path: a, columns: {prompt: question}}": DataSettings("a", columns={"prompt": "question"}),
        "data: {mix: [{path: a, format: text, columns: {text: body}}, b: 1]}": None,
        "data: {path: a, mix: [{path: b}]}": None,
        "data: [{path: a, weight: -0.5}]": None,
        "data: []": None,
    }.items():
        if expected is not None:
            run = read(tmp_path, text + "\n")
            assert run.data == expected
            write_run(tmp_path / "again.yaml", run)
            assert read_run(tmp_path / "again.yaml", {}) == run
        else:
            with pytest.raises(RunConfigError):
                read(tmp_path, text + "\n")
    own = DataSettings(mix=(DataPart("a", format="text", columns={"text": "body"}), DataPart("b")), format="messages", split="x")
    assert own.parts == (
        DataSettings("a", "text", columns={"text": "body"}, split="x"),
        DataSettings("b", "messages", split="x"),
    )


def test_flags_alone_are_a_run():
    assert read_run(None, {"data.path": "corpus", "steps": 3}) == RunSettings(DataSettings("corpus"), steps=3)
    with pytest.raises(RunConfigError, match="no data to train on: give --data"):
        read_run(None, {"steps": 3})


def test_every_flag_says_a_setting_that_is_there():
    assert {setting for _, setting, _ in _SETTINGS} <= set(names())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer: {lerning_rate: 1e-5}", ("run.yaml: optimizer.lerning_rate: no such key", "did you mean optimizer.lr?")),
        ("learning_rate: 1e-5", ("learning_rate: no such key", "did you mean optimizer.lr?")),
        ("lr: 1e-5", ("did you mean optimizer.lr?",)),
        ("optimiser: {lr: 1}", ("optimiser: no such key", "did you mean optimizer")),
        ("checkpoint: {evry: 2}", ("did you mean checkpoint.every?",)),
        ("evaluation: {evry: 2}", ("did you mean evaluation.every?",)),
        ("lr_scheduler_type: cosine", ("did you mean optimizer.schedule.kind?",)),
        ("num_train_epochs: 3", ("did you mean epochs?",)),
        ("save_total_limit: 3", ("did you mean checkpoint.keep?",)),
        ("max_grad_norm: 1", ("it is the plan's: say --clip-norm to `penstock plan`",)),
        ("cutoff_len: 1", ("--seq-len",)),
        ("lora_r: 8", ("lora_r: no such key; the plan says it: `penstock plan --train lora",)),
        ("load_in_4bit: true", ("the plan says it: weights that are not trained are packed by `penstock plan --base nf4`",)),
        (
            "lora_alpha: 16\noptimizer: {lerning_rate: 1}\nqqq: 1",
            (
                "lora_alpha: no such key; the plan says it",
                "; optimizer.lerning_rate: no such key; did you mean optimizer.lr?",
                "; qqq: no",
            ),
        ),
        ("a1: 1\na2: 1\na3: 1\na4: 1\na5: 1\na6: 1", ("6 keys that do not exist: a1, a2, a3, a4, a5, a6",)),
        ("qqq: 1", ("qqq: no such key; there are data, plan, model",)),
        ("trust_remote_code: true", ("trust_remote_code: no such key", "never run, and nothing turns that on")),
        ("evaluation: {trust_remote_code: true}", ("evaluation.trust_remote_code: no such key",)),
        ("optimizer: {lr: fast}", ("run.yaml: optimizer.lr: should be a valid number, found 'fast'",)),
        ("optimizer: {lr: -1}", ("optimizer.lr: should be greater than 0, found -1",)),
        ("optimizer: {lr: 1e999}", ("optimizer.lr", "finite")),
        ("optimizer: [1]", ("optimizer: should hold keys of its own (lr, beta1", "found [1]")),
        (
            "optimizer: {schedule: {kind: cosin}}",
            ("optimizer.schedule.kind: should be 'constant', 'linear', 'cosine' or", "'cosin'"),
        ),
        ("monitors: tensorboard", ("monitors: should be a list, found 'tensorboard'",)),
        ("steps: 2.5", ("steps: should be a valid integer, found 2.5",)),
        ("steps: 010", ("steps: should be a valid integer",)),
        ("deterministic: yes", ("deterministic: should be a valid boolean, found 'yes'",)),
        ("steps: 3\nepochs: 1", ("steps and epochs are both given",)),
        ("seed: " + "9" * 5000, ("run.yaml:2: '999", "is no number")),
        ("out: ''", ("out: String should have at least 1 character",)),
        ('out: "a\\0b"', ("out: should hold no NUL",)),
        ('out: "\\ud800"', ("should be UTF-8",)),
        ("seed: 1\nseed: 2", ("run.yaml:3: 'seed' stands twice",)),
        ("model: &m x\nout: *m", ("run.yaml:3", "an alias")),
        ("model: !!python/object/apply:os.system [echo]", ("run.yaml:2", "the tag")),
        ("model: !!binary aGk=", ("run.yaml:2", "the tag")),
        ("model: !here x", ("run.yaml:2", "the tag")),
        ("? [a]\n: 1", ("run.yaml:2: a key is a list",)),
        ("seed: 1\n\tmodel: x", ("run.yaml:3: not YAML",)),
        ("seed: 1\n---\nseed: 2", ("run.yaml:3: not YAML",)),
        ("model: \x07", ("not YAML",)),
    ],
)
def test_what_is_not_understood_is_one_line_with_the_place_and_what_to_write(tmp_path, text, words):
    with pytest.raises(RunConfigError) as refused:
        read(tmp_path, DATA + text + "\n")
    said = str(refused.value)
    assert said.isprintable()
    assert len(said) < 600
    for word in words:
        assert word in said


@pytest.mark.parametrize("text", ["- a list", "words", "5", "~", ""])
def test_a_file_without_keys_says_what_to_begin_with(tmp_path, text):
    with pytest.raises(RunConfigError, match="data"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", b"{}", "name it .yaml or .toml"),
        ("run.yaml", b"out: \xff", "not UTF-8 at byte 5"),
        ("run.yaml", b"#" * (MAX_CONFIG_BYTES + 1), "larger than"),
        ("run.toml", b"seed = 1\nseed = 2", "not TOML"),
        ("run.toml", b"seed = ", "not TOML"),
        ("run.toml", b"seed = " + b"9" * 5000, "not TOML"),
        ("run.toml", b"a." * (MAX_DOTS + 1) + b"b = 1", "more than 256 dots on one line"),
        ("run.toml", b"a = " + b"[" * 30_000, "nested far deeper"),
        ("run.yaml", b"a: " + b"[" * 30_000, "nested far deeper"),
        ("run.yaml", b"- " * 30_000, "nested far deeper"),
        ("run.yaml", b"{a: " * 15_000, "nested far deeper"),
        ("run.toml", b"data = {path = 'x', made = 2026-11-20}", "data.made: no such key"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunConfigError, match=words) as refused:
        read_run(tmp_path / name, {})
    assert str(refused.value).isprintable()


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(RunConfigError, match=r"none\.yaml: cannot be read"):
        read_run(tmp_path / "none.yaml", {})


@given(st.text(string.printable, max_size=200) | st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_settings_or_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in (path, path.rename(path.with_suffix(".toml"))):
        if not name.exists():
            name.write_bytes(content if isinstance(content, bytes) else content.encode())
        with suppress(RunConfigError):
            assert isinstance(read_run(name, {"data.path": "corpus"}), RunSettings)


def test_paths_are_those_of_the_working_directory_wherever_the_file_lies(tmp_path, monkeypatch):
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read(tmp_path / "far", "data: {path: corpus}\nout: here\n").out == "here"
