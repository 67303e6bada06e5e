"""Names of the Python interface: typed keyword arguments, advice on names of other trainers, and messages without flags."""

import ast
import re
from dataclasses import fields
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import pytest

import penstock
from penstock.arguments import keywords
from penstock.arguments.keywords import in_python
from penstock.arguments.options import SETTINGS, StepOptions, TrainOptions
from penstock.cli.main import COMMANDS, cli
from penstock.run_config import ALSO_KNOWN_AS, PLAN_KEYS, RunConfigError, absent_advice
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Semantics
from penstock.settings import settings_of
from tests.penstock.test_api import planned, train_new

DECIDED = {"norm", "loss", "pointwise", "attention_kernel", "library_kernels", "products"}  # by other arguments
FUNCTIONS = [penstock.plan, penstock.train, penstock.stream, penstock.forward, penstock.check, penstock.predict, penstock.probe]


def test_typed_arguments_are_the_fields_of_the_semantics_and_of_a_run() -> None:
    arguments = {"seq_len", "batch_size", "clip_norm", "objective", "ranks"}  # arguments of `plan` by these or other names
    assert {field.name for field in fields(Semantics)} == StepOptions.__annotations__.keys() | arguments | DECIDED
    hints, expected = get_type_hints(StepOptions), get_type_hints(Semantics)
    for name in hints.keys() - {"train", "optimizer", "compute_dtype"}:  # parsed from text, or fp8, which is `products`
        assert {*get_args(hints[name])} - {type(None)} <= {expected[name], *get_args(expected[name])}, name
    assert SETTINGS.keys() < TrainOptions.__annotations__.keys()
    assert {*SETTINGS.values()} <= {name for name, _ in settings_of()}
    for function in FUNCTIONS:
        parameters = signature(function).parameters.values()
        assert all(p.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL) for p in parameters), function


@pytest.mark.parametrize(
    ("function", "name", "message"),
    [
        ("plan", "max_seq_length", "plan: no argument 'max_seq_length'; did you mean seq_len?"),
        ("plan", "bf16", "did you mean compute_dtype?"),
        ("plan", "products", "did you mean compute_dtype?"),
        ("train", "load_in_fp8", '(..., compute_dtype="fp8")`, for adapters with train="lora", base="fp8-rows"'),
        ("plan", "per_device_train_batch_size", "`penstock.plan(..., batch_size=16, micro_batch=1)`, sequences of a whole step"),
        ("plan", "gradient_accumulation_steps", "batch_size=16"),
        ("plan", "load_in_4bit", 'packed by `penstock.plan(..., base="nf4")`'),
        ("plan", "learning_rate", "it is lr= of `penstock.train`"),
        ("plan", "lr", "it is lr= of `penstock.train`"),
        ("plan", "norm", 'decided by kernels and determinism: `penstock.plan(..., kernels="fused")`'),
        ("train", "learning_rate", "did you mean lr?"),
        ("train", "num_train_epochs", "did you mean epochs?"),
        ("train", "seq_len", "the plan sets it: give seq_len= to `penstock.plan`"),
        ("train", "max_seq_length", "the plan sets it: give seq_len= to `penstock.plan`"),
        ("train", "fp16", 'the plan computes in bf16, or with compute_dtype="fp32"'),
        ("train", "weight_decay", 'it is settings={"optimizer.weight_decay": ...} of `penstock.train`'),
        ("train", "train_dataset", "did you mean data?"),
        ("train", "resume_from_checkpoint", "resume=True goes on from the last checkpoint, resume_from= from another"),
        ("train", "lora_alpha", 'the plan sets it: `penstock.plan(..., train="lora:r=16,alpha=32,targets=q_proj+v_proj")`'),
        ("stream", "evry", "did you mean every?"),
        ("forward", "output_dir", "did you mean out?"),
        ("train", "deepspeed", "`penstock.plan(..., gpus=8)`"),
        ("train", "template", 'it is settings={"data.chat_template": ...}'),
        ("predict", "machin", "did you mean machine?"),
        ("probe", "x", "it takes device, quick, gpu, name, disk, report"),
    ],
)
def test_an_unknown_argument_gets_true_advice(function: str, name: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)) as refused:
        getattr(penstock, function)(**{name: 1})
    assert "--" not in str(refused.value)


def names_of_transformers() -> list[str]:
    """Fields of TrainingArguments, from its source: transformers imports much to load the class."""
    spec = find_spec("transformers")
    assert spec is not None
    tree = ast.parse((Path(spec.origin or "").parent / "training_args.py").read_text(encoding="utf-8"))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    return [node.target.id for node in definition.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


def test_every_training_argument_of_transformers_is_in_the_table() -> None:
    keys = {name.rpartition(".")[2] for name, _ in settings_of()}
    names = names_of_transformers()
    assert len(names) > 90
    assert [name for name in names if not (absent_advice(name) or name in keys | PLAN_KEYS.keys() | ALSO_KNOWN_AS.keys())] == []


def test_settings_of_other_trainers_get_true_advice(home: Path) -> None:
    for name, words in (
        ("warmup_ratio", "warmup_ratio: no such key; there is no ratio: give optimizer.schedule.warmup_steps"),
        ("logging_steps", "every step is logged"),
        ("gradient_accumulation_steps", "batch_size=16"),
        ("mixed_precision", "give compute_dtype= to `penstock.plan`"),
        ("optimizer.wd", "did you mean optimizer.weight_decay?"),
    ):
        with pytest.raises(RunConfigError, match=f"^settings: .*{re.escape(words)}") as refused:
            train_new(planned(home), home / "data", {name: 0.1}, out=home / "out")
        assert "--" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no weights; name them with --model, or train with --from-scratch", "with model=, or train with from_scratch=True"),
        ("plan with --train lora --base nf4, or not", 'plan with train="lora", base="nf4", or not'),
        ("skip them with --bad-rows 3.2%)", 'skip them with settings={"data.bad_rows": 0.032})'),
        ("give --host-memory 64GB", "give host_memory_bytes=64_000_000_000"),
        ("need --clip-norm none and", "need clip_norm=None and"),
        ("with --columns prompt=COLUMN, or", 'with settings={"data.columns": {"prompt": "COLUMN"}}, or'),
        ("say `penstock forward PLAN --data DATA --out FILE`", "say `penstock.forward(PLAN, data=DATA, out=FILE)`"),
        ("plan again with --deterministic", "plan again with deterministic=True"),
        ("leave out --deterministic", 'leave out settings={"deterministic": True}'),
        ("the command line: seed: no", "settings: seed: no"),
        ("convert it, with --resume-from checkpoint-3, or", 'convert it, with resume_from="checkpoint-3", or'),
        ("--train all,projector: no", 'train="all,projector": no'),
        ("--train lora:r=4,projector: no", 'train="lora:r=4,projector": no'),
        ("hf download A --local-dir B", "hf download A --local-dir B"),
    ],
)
def test_a_message_has_keywords_in_place_of_flags(text: str, expected: str) -> None:
    assert in_python(text).endswith(expected)


def test_every_flag_has_a_keyword_or_setting_of_its_own() -> None:
    """A flag of `plan`, `run`, `forward` and `check` becomes an argument that a function takes, or a setting."""
    accepted = {name for function in FUNCTIONS for name in signature(function).parameters} | {name for name, _ in settings_of()}
    commands_only = "image-size tokens-per-step tokens usd-per-hour usd usd-per-kwh output json verbose config time-scale"
    ignored = {f"--{name}" for name in commands_only.split()}
    with click.Context(cli) as context:
        params = [p for name in ("plan", "run", "forward", "check") for p in (cli.get_command(context, name) or cli).params]
    flags = {flag for p in params for flag in p.opts if flag.startswith("--")} - ignored
    assert len(flags) > 60
    assert {*COMMANDS} > {"plan", "run"}
    wrong = {flag: name for flag in flags if (name := keywords._keywords().get(flag, ("", False))[0].rstrip("*")) not in accepted}
    assert wrong == {}


def test_named_arguments_are_settings_of_the_run_and_are_given_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(home)
    assert repr(plan).count("\n") == 0
    assert re.fullmatch(r"Planned\(\S*model on cpu-2core: .+ a step, [\d,]+ tokens/s\)", repr(plan))
    named: dict[str, Any] = {"epochs": 0.5, "seed": 7, "eval_data": home / "data", "eval_every": 2, "save_every": 3}
    trained = train_new(plan, home / "data", out=home / "out", model=home / "model", **named)
    assert "RANDOM WEIGHTS: trained from scratch (from_scratch=True)" in capsys.readouterr().err
    text = (trained.folder / "run.yaml").read_text()
    for line in ("epochs: 0.5", "seed: 7", "every: 2", "every: 3", f"data: {home}/data", f"model: {home}/model"):
        assert line in text
    for settings, message in (({"seed": 1}, "seed is an argument; give it as seed="), ({"optimizer.lr": 1}, "give it as lr=")):
        with pytest.raises(PlanError, match=message):
            train_new(plan, home / "data", settings, out=home / "other", seed=2)
    with pytest.raises(penstock.PenstockError, match=r"name it with model=$"):
        penstock.train(plan, home / "data", model=home / "none", out=home / "other")
