"""Commands `plan`, `check` and `report`: the interface that scripts rely on."""

import json
import os
import subprocess
import sys

import pytest

from penstock import api
from penstock.planner.check.check import check
from penstock.planner.check.claim import name_conflicts
from penstock.planner.search.policies import BASELINES
from penstock.runtime.plan import PlanFile
from tests.running import one_line
from tests.running import penstock as invoke

# A fixed micro-batch halves the search time
SMALL = ["plan", "qwen2.5-0.5b", "--machine", "rtx4090-desktop", "--micro-batch", "2", "--seq-len", "512", "--batch-size", "4"]
GPT_OSS = ["plan", "gpt-oss-120b", "--machine", "h200-pcie5", "--batch-size", "64", "--seq-len", "1024", "--json"]
NEXT = "penstock run {} --data FOLDER --model Qwen2.5-0.5B-Instruct, after"


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Result of the small search with `--json -o`, and its plan file; shared by tests that do not modify it."""
    path = tmp_path_factory.mktemp("small") / "p.json"
    return invoke(*SMALL, "--json", "-o", path), path


def changed(path, plan, change):
    fields = json.loads(plan.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    return path


def test_json_has_the_keys_of_the_contract(answered):
    answer = json.loads(answered[0].stdout)
    assert set(answer) == {
        *("semantics", "policy", "prediction", "certificate", "baselines", "next_best"),
        *("usd_per_million_tokens", "bought_usd_per_million_tokens", "rests_on", "tokens_per_s_in_fp8"),
    }
    assert answer["next_best"]["step_s"] >= answer["prediction"]["step_s"]
    assert set(answer["prediction"]) == {
        "step_s", "p10_step_s", "p90_step_s", "tokens_per_s", "model_flop_per_s", "device_peak_bytes", "host_peak_bytes", "busy_s",
    }  # fmt: skip
    assert set(answer["prediction"]["busy_s"]) == {"gpu", "h2d", "d2h", "cpu"}
    assert set(answer["certificate"]) >= {"policy_bound_s", "machine_bound_s", "gap_fraction", "binding"}
    assert set(answer["baselines"]) == {*BASELINES, "resident"}
    assert all(set(baseline) in ({"step_s"}, {"does_not_fit"}) for baseline in answer["baselines"].values())
    assert answer["prediction"]["tokens_per_s"] == pytest.approx(4 * 512 / answer["prediction"]["step_s"])


def test_the_plan_file_holds_the_claim_and_passes_the_check(answered):
    result, path = answered
    answer, file = json.loads(result.stdout), PlanFile.read(path)
    check(file.plan)
    assert file.claim == {"prediction": answer["prediction"], "certificate": answer["certificate"]}
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]
    assert result.stderr.count("\n") == 1
    assert f"next: penstock check {path}, then {NEXT.format(path)}" in result.stderr
    result = invoke("check", path)
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)


def test_a_rented_host_is_planned_with_its_cores_and_link(answered, tmp_path):
    """The step is longer, the answer names cores and link that bind, and Python has the same options."""
    host = ("--host-cores", "4", "--link", "1GB/s", "--host-bandwidth", "20GB")
    result = invoke(*SMALL, "--machine", "RTX 4090 desktop", "--policy", "zero3-offload", *host, "-o", tmp_path / "p.json")
    assert "note: machine 'RTX 4090 desktop' is taken as rtx4090-desktop" in result.stderr
    assert "3 cores for copies and optimizer" in result.stdout
    assert "link 1 GB/s up and 1 GB/s down" in " ".join(result.stdout.split())
    sizes = {"seq_len": 512, "batch_size": 4, "micro_batch": 2, "policy": "zero3-offload"}
    rates = {"host_cores": 4, "link_bytes_per_s": 1e9, "host_bandwidth_bytes_per_s": 20e9}
    planned = api.plan("qwen2.5-0.5b", "rtx4090-desktop", **sizes, **rates)
    assert planned.plan.profile == PlanFile.read(tmp_path / "p.json").plan.profile
    assert planned.step_s > 2 * json.loads(answered[0].stdout)["baselines"]["zero3-offload"]["step_s"]
    assert not any("another" in conflict for conflict in name_conflicts(planned.plan)), "the user's values are no other machine"
    one_line(invoke(*SMALL, "--link", "12Gb/s"), 2, "is not a rate in bytes")
    one_line(invoke(*SMALL, "--link", "12"), 2, "is not a rate in bytes; write for example 12GB/s")
    one_line(invoke(*SMALL, "--host-cores", "5000"), 2, "--host-cores 5000: is not between 2 and 1024")


def test_the_same_question_gives_the_same_file(tmp_path, answered):
    """Default text output is a dozen lines; details are printed on demand."""
    short = invoke(*SMALL, "-o", tmp_path / "b.json", "--tokens", "1B").stdout
    words = invoke(*SMALL, "--policy", tmp_path / "b.json", "-v").stdout  # because a found plan needs no search
    assert answered[1].read_bytes() == (tmp_path / "b.json").read_bytes()
    assert len(short.splitlines()) <= 12
    assert all(word in short for word in ("tokens/s", "(gap ", "it fits: device", "USD rented", "plan -v"))
    assert all(name in words for name in BASELINES)
    assert "\x1b" not in words + short


def test_what_does_not_fit_says_by_how_much_and_what_would(tmp_path):
    result = invoke(*GPT_OSS, "--host-memory", "1.5TB", "-o", tmp_path / "p.json")
    assert result.exit_code == 3
    answer = json.loads(result.stdout)
    assert answer["fits"] is False
    # 116.8 G parameters: 4 bytes of master (includes the weight), 8 of moments, 2 of gradient; process 6 GB; part on the GPU
    n_bytes = 116.83e9 * 14 + 6e9 - 1.5e12
    assert n_bytes - 141e9 < answer["short_bytes"]["host"] < n_bytes - 70e9
    assert "--optimizer adamw:moments=bf16 (10 bytes a parameter" in answer["smallest_change"]
    assert "--host-memory 15" in answer["smallest_change"]
    assert answer["smallest_change"] in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "needle"),
    [
        (["plan", "qwen2.5-7b", "--machine", "gh20"], "gh200"),
        ([*SMALL, "--micro-batch", "0"], "micro_batch: should be greater than 0, found 0"),
        ([*SMALL, "--seq-len", "99999999999"], "a micro-batch of 2 x 99,999,999,999 tokens is not planned"),
        ([*SMALL, "--batch-size", "99999999999", "--micro-batch", "99999999999"], "99,999,999,999 x 512 tokens is not planned"),
        ([*SMALL, "--train", "lora:r=0"], "rank is 0"),
        ([*SMALL, "--micro-batch", "300"], "more than the batch"),
        ([*SMALL, "--sum-groups", "3"], "a step of 2 micro-batches has no 3 sum groups; choose a power of two that divides them"),
        ([*SMALL[:-2], "--tokens-per-step", "1000"], "1024 is"),
        ([*SMALL, "--device-memory", "12 parsecs"], "not a size"),
        ([*SMALL, "--usd", "nan"], "not a number"),
        ([*SMALL, "--max-grad-norm", "0"], "--clip-norm"),
        ([*SMALL, "--policy", "megatrian"], "megatrain"),
        ([*SMALL, "--compute", "fp32", "--master", "bf16"], "fp32"),
        ([*SMALL, "--learning-rate", "1"], "--learning-rate: no such option; it is optimizer.lr in the file of"),
        (["frobnicate"], "frobnicate"),
        ([*SMALL, "--device-memory", "1KB"], "device memory is"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, needle):
    """A memory far too small has exit code 3."""
    one_line(invoke(*args), 3 if "1KB" in args else 2, needle)


def test_a_wrong_plan_or_claim_is_exit_code_1(tmp_path, answered):
    def without_wait(fields):
        index = next(i for i, op in enumerate(fields["ops"]) if op.startswith("forward") and "^" in op)
        fields["ops"][index] = fields["ops"][index].split(" ^ ")[0]

    one_line(invoke("check", changed(tmp_path / "a.json", answered[1], without_wait)), 1)
    faster = changed(tmp_path / "b.json", answered[1], lambda fields: fields["claim"]["prediction"].update(step_s=1e-3))
    one_line(invoke("check", faster), 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prefetch": 2}', "prefetch: Unexpected keyword argument"),
        ("{", "not JSON"),
        ('{"save": {"all": [25]}}', "save names layer 25, but the model has 24"),
        ('{"save": {"all": [3], "products": [3]}}', "save names layer 3 twice; a layer saves one of attention, products, all"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(tmp_path, answered, text, words):
    """Policies are read from a policy file; a wrong `save` is tested in a plan, too."""
    (tmp_path / "policy.json").write_text(text)
    refused = invoke(*SMALL, "--policy", tmp_path / "policy.json")
    one_line(refused, 2, words)
    assert "Value error" not in refused.stderr
    if "save" in text:
        plan = changed(tmp_path / "plan.json", answered[1], lambda fields: fields["policy"].update(json.loads(text)))
        checked = invoke("check", plan)
        one_line(checked, checked.exit_code, words)


def test_nothing_is_searched_where_a_plan_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.api.plan", lambda *_: pytest.fail("searched"))
    for place, words in (("no/such/p.json", "cannot be written (No such file or directory)"), (".", "Invalid value for '-o'")):
        one_line(invoke(*SMALL, "-o", tmp_path / place), 2, words)
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import json, sys; from click.testing import CliRunner; from penstock.cli.main import cli\n"
        "print(json.dumps([CliRunner().invoke(cli, ['--help']).output, sorted(sys.modules)]))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    text, modules = json.loads(result.stdout)
    assert all(f"\n  {name} " in text for name in ("plan", "check", "run", "probe", "report"))
    assert not {"torch", "transformers", "scipy", "networkx", "pydantic", "rich"} & set(modules)


@pytest.mark.slow
def test_a_first_plan_says_that_it_compiles(tmp_path):
    """Only the first: it compiles for some seconds, into a cache."""
    command = [sys.executable, "-m", "penstock", *SMALL, "--policy", "zero3-offload"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for expected in ("note: compiling the simulator: seconds, once on this machine\n", ""):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert result.stderr == expected
