"""Do `plan`, `check` and `report` keep the contract that scripts rely on?"""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hwprofiles.schema import read_profile
from penstock.cli.main import cli
from planner.check.check import check
from planner.search.space import BASELINES
from runtime.plan import PlanFile
from runtime.plan.timeline import Span, Timeline
from tests.tour import ROOT

# With a micro-batch that is named: a search in half the time
SMALL = ["plan", "qwen2.5-0.5b", "--machine", "rtx4090-server", "--micro-batch", "2", "--seq-len", "512", "--batch-size", "4"]
GPT_OSS = ["plan", "gpt-oss-120b", "--machine", "h200-pcie5", "--batch-size", "64", "--seq-len", "1024", "--json"]


def invoke(*args):
    return CliRunner().invoke(cli, [str(a) for a in args])


def refused(result, *, code=2):
    """One line on stderr, nothing on stdout, the right exit code; never a traceback."""
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """What the small question was answered with `--json -o`, and the file: one search for all tests that do not change it."""
    path = tmp_path_factory.mktemp("small") / "p.json"
    return invoke(*SMALL, "--json", "-o", path), path


def test_json_is_pure_and_has_the_fields_of_the_contract(answered):
    result, _ = answered
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert set(said) == {
        *("semantics", "policy", "prediction", "certificate", "baselines", "next_best"),
        *("usd_per_million_tokens", "bought_usd_per_million_tokens", "rests_on"),
    }
    assert said["next_best"]["step_s"] >= said["prediction"]["step_s"]
    assert set(said["prediction"]) == {
        "step_s", "p10_step_s", "p90_step_s", "tokens_per_s", "model_flop_per_s", "device_peak_bytes", "host_peak_bytes", "busy_s",
    }  # fmt: skip
    assert set(said["prediction"]["busy_s"]) == {"gpu", "h2d", "d2h", "cpu"}
    assert set(said["certificate"]) >= {"policy_bound_s", "machine_bound_s", "gap_fraction", "binding"}
    assert set(said["baselines"]) == {*BASELINES, "resident"}
    for baseline in said["baselines"].values():
        assert set(baseline) in ({"step_s"}, {"does_not_fit"})
    assert said["prediction"]["tokens_per_s"] == pytest.approx(4 * 512 / said["prediction"]["step_s"])


def test_the_plan_file_holds_the_plan_and_its_claim_and_passes_the_checker(answered):
    result, path = answered
    said = json.loads(result.stdout)
    file = PlanFile.read(path)
    check(file.plan)
    assert file.claim == {"prediction": said["prediction"], "certificate": said["certificate"]}
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]
    result = invoke("check", path)
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)


def test_the_same_question_gives_the_same_file(tmp_path, answered):
    invoke(*SMALL, "-o", tmp_path / "b.json")
    assert answered[1].read_bytes() == (tmp_path / "b.json").read_bytes()


def test_where_every_number_is_of_this_device_so_is_all_that_a_step_rests_on(tmp_path):
    fields = read_profile("h100-pcie").to_json()
    assert rests_on(tmp_path, fields)["this device"] < 0.2
    for source in fields["sources"].values():
        source |= {"kind": "measured", "device": fields["device"]["name"], "scaled": False}
    found = rests_on(tmp_path, fields)
    assert found["this device"] == pytest.approx(1)
    assert found == found | {"another device": 0, "assumptions": 0, "worst": []}


def rests_on(tmp_path, fields):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(fields))
    return json.loads(invoke(*SMALL[:3], path, *SMALL[4:], "--policy", "megatrain", "--json").stdout)["rests_on"]["device"]


def test_a_plan_that_was_written_says_what_to_do_with_it(tmp_path):
    path = tmp_path / "p.json"
    said = invoke(*SMALL, "--runnable", "-o", path).stderr
    assert said.count("\n") == 1
    assert f"next: penstock check {path}, then penstock run {path} --data FOLDER --model Qwen2.5-0.5B-Instruct, once it is" in said


def test_what_is_published_in_mxfp4_alone_is_said_when_it_is_planned():
    assert "in MXFP4 only, which `run` does not read" in invoke(*GPT_OSS, "--master", "bf16", "--policy", "megatrain").stderr
    assert "MXFP4" not in invoke(*SMALL).stderr


def test_a_name_of_the_hub_is_answered_with_how_to_get_it():
    words = refused(invoke("plan", "Qwen/Qwen3-8B", *SMALL[2:]))
    assert "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B" in words
    assert "the shipped qwen3-8b, which has no weights" in words


@pytest.mark.soak
def test_a_schedule_that_was_asked_for_and_is_slower_than_another_says_so():
    words = invoke("plan", "qwen2.5-7b", "--machine", "gh200", "--policy", "megatrain").stdout
    said = json.loads(invoke("plan", "qwen2.5-7b", "--machine", "gh200", "--policy", "megatrain", "--json").stdout)
    ratio = said["next_best"]["step_s"] / said["prediction"]["step_s"]
    assert ratio < 1
    assert f"({ratio - 1:+.1%}), with " in words
    assert "\nfaster " in words
    assert "next best" not in words


def test_a_micro_batch_need_not_divide_the_batch(tmp_path):
    """The last one has what is left, and the words say so."""
    path = tmp_path / "p.json"
    asked = ("plan", "qwen2.5-0.5b", "--machine", "gh200", "--seq-len", "1024", "--batch-size", "67", "--micro-batch", "16")
    asked += ("--policy", "megatrain")
    assert "67 sequences of 1,024 tokens, in 5 micro-batches of 16, the last of 3" in invoke(*asked, "-o", path).stdout
    assert invoke("check", path).exit_code == 0


def test_words_name_what_a_reader_needs():
    result = invoke(*SMALL)
    assert result.exit_code == 0
    for word in (
        "qwen2.5-0.5b",
        "tokens/s",
        "bound by",
        "P10 to P90",
        "no schedule at all with",
        "megatrain",
        "saved for backward",
        "of the device's seconds rest on measurements of this device",
    ):
        assert word in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.soak
def test_a_120_billion_parameter_model_fits_with_a_bf16_master_or_more_memory(tmp_path):
    path = tmp_path / "p.json"
    fits = invoke(*GPT_OSS, "--host-memory", "1.5TB", "--master", "bf16", "-o", path)
    assert fits.exit_code == 0
    assert json.loads(fits.stdout)["prediction"]["host_peak_bytes"] <= 1.5e12
    assert invoke("check", path).exit_code == 0
    assert invoke(*GPT_OSS, "--host-memory", "2TB").exit_code == 0


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_fit(tmp_path):
    path = tmp_path / "p.json"
    result = invoke(*GPT_OSS, "--host-memory", "1.5TB", "-o", path)
    assert result.exit_code == 3
    said = json.loads(result.stdout)
    assert said["fits"] is False
    # 116.8 G parameters: master 4, the weight in it, moments 8, gradient 2 bytes each; 6 GB for the process. The device holds some.
    most = 116.83e9 * 14 + 6e9 - 1.5e12
    assert most - 141e9 < said["short_bytes"]["host"] < most - 70e9
    assert "--master bf16" in said["smallest_change"]
    assert "--host-memory 15" in said["smallest_change"]
    assert said["smallest_change"] in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "needle"),
    [
        (["plan", "qwen2.5-7bb", "--machine", "gh200"], "qwen2.5-7b"),
        (["plan", "qwen2.5-7b", "--machine", "gh20"], "gh200"),
        (["plan", "no/such/folder", "--machine", "gh200"], "no/such/folder"),
        (["plan", "qwen2.5-7b"], "--machine"),
        ([*SMALL, "--seq-len", "0"], "--seq-len"),
        ([*SMALL, "--batch-size", "-1"], "--batch-size"),
        ([*SMALL, "--micro-batch", "0"], "--micro-batch"),
        ([*SMALL, "--micro-batch", "300"], "more than the batch"),
        ([*SMALL, "--tokens-per-step", "2048"], "one of them"),
        ([*SMALL[:-2], "--tokens-per-step", "1000"], "1024 is"),
        ([*SMALL, "--host-memory", "0GB"], "above zero"),
        ([*SMALL, "--host-memory", "-5GB"], "not a size"),
        ([*SMALL, "--device-memory", "12 parsecs"], "not a size"),
        ([*SMALL, "--clip-norm", "0"], "clip-norm"),
        ([*SMALL, "--clip-norm", "nan"], "clip-norm"),
        ([*SMALL, "--clip-norm", "inf"], "clip-norm"),
        ([*SMALL, "--policy", "megatrian"], "megatrain"),
        ([*SMALL, "--compute", "fp32", "--master", "bf16"], "fp32"),
        ([*SMALL, "--loss-tile-tokens", "0"], "--loss-tile-tokens"),
        ([*SMALL, "--batch-size", "999999999", "--micro-batch", "1"], "micro-batch"),
        ([*SMALL, "--policy", "megatrain", "-o", "/no/such/folder/p.json"], "cannot be written"),
        (["frobnicate"], "frobnicate"),
        (["check", "/no/such/plan.json"], "cannot be read"),
        (["report", "/no/such/plan.json", "-o", "t.json"], "cannot be read"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_exit_code_2(args, needle):
    assert needle in refused(invoke(*args))


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '{"a"', '{"claim": null, "fingerprint": ""}', "\x00\xff"])
def test_a_file_that_is_no_plan_is_exit_code_2_for_check(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    refused(invoke("check", path))
    refused(invoke("report", path, "-o", tmp_path / "t.json"))


def test_a_plan_that_is_wrong_is_exit_code_1_for_check(tmp_path, answered):
    path = tmp_path / "p.json"
    fields = json.loads(answered[1].read_text())
    first_forward = next(i for i, op in enumerate(fields["ops"]) if op.startswith("forward") and "^" in op)
    fields["ops"][first_forward] = fields["ops"][first_forward].split(" ^ ")[0]
    path.write_text(json.dumps(fields))
    refused(invoke("check", path), code=1)


@pytest.mark.fast("some")
@pytest.mark.parametrize("name", BASELINES)
def test_the_schedule_of_another_system_can_be_asked_for(tmp_path, name):
    path = tmp_path / "p.json"
    said = json.loads(invoke(*SMALL, "--policy", name, "--micro-batch", "1", "--json", "-o", path).stdout)
    assert said["prediction"]["step_s"] == said["baselines"][name]["step_s"]
    assert invoke("check", path).exit_code == 0


def test_a_policy_can_come_from_a_file_or_from_another_plan(tmp_path):
    policy, plan = tmp_path / "policy.json", tmp_path / "p.json"
    policy.write_text('{"prefetch_depth": 2, "gradient_slots": 2, "update": "deferred", "save": {"all": [24]}}')
    first = json.loads(invoke(*SMALL, "--policy", policy, "--json", "-o", plan).stdout)
    assert (first["policy"]["prefetch_depth"], first["policy"]["save"]) == (2, {"all": [24]})
    assert json.loads(invoke(*SMALL, "--policy", plan, "--json").stdout) == first


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    "text",
    [
        '{"prefetch": 2}',
        '{"prefetch_depth": 0}',
        '{"prefetch_depth": 9007199254740992}',
        "[]",
        "{",
        '{"update": "eager"}',
        '{"save": {"all": [99]}}',
        '{"save": {"all": [0]}}',
        '{"save": {"all": [9007199254740991]}}',
        '{"save": {"all": [3], "products": [3]}}',
        '{"save": {"all": "3"}}',
        '{"save": {"everything": [3]}}',
        '{"save": ["some"]}',
        '{"save": ["all", "input"]}',
        '{"accumulation_group": 64}',
    ],
)
def test_a_policy_that_cannot_be_is_refused(tmp_path, text):
    policy = tmp_path / "policy.json"
    policy.write_text(text)
    refused(invoke(*SMALL, "--policy", policy))


@pytest.mark.parametrize(
    ("save", "said"),
    [
        ('{"all": [25]}', "save names layer 25, but there are 24"),
        ('{"all": [65536]}', "save names layer 65536, but there are 24"),
        ('{"all": [65537]}', "save names layers, which are numbered from 1 to 65536"),
        ('{"all": [true]}', "save names layers, which are numbered from 1 to 65536"),
        ('{"input": [1]}', "save knows all, products and attention, not 'input'"),
        ('{"a\\nb": [1]}', "save knows all, products and attention, not 'a\\nb'"),
        ('{"all": [3], "products": [3]}', "save names layer 3 twice; a layer saves one of attention, products, all"),
        ('{"all": 3}', 'save names layers by what they save, as {"all": [3, 4], "products": [1]}'),
    ],
)
def test_what_is_wrong_with_what_layers_save_is_said_in_words(tmp_path, answered, save, said):
    """Of a policy in a file of its own, and of one in a plan."""
    policy, plan = tmp_path / "policy.json", tmp_path / "plan.json"
    policy.write_text(f'{{"save": {save}}}')
    fields = json.loads(answered[1].read_text())
    fields["policy"]["save"] = json.loads(save)
    plan.write_text(json.dumps(fields))
    checked = invoke("check", plan)
    for words in (refused(invoke(*SMALL, "--policy", policy)), refused(checked, code=checked.exit_code)):
        assert f": {said}" in words
        assert "Value error" not in words


@pytest.mark.parametrize(
    ("place", "why"), [("no/such/p.json", "No such file or directory"), ("file/p.json", "Not a directory"), (".", "a folder")]
)
def test_where_a_plan_cannot_be_written_nothing_is_searched(tmp_path, monkeypatch, place, why):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("penstock.api.answer_of", lambda *_: pytest.fail("searched"))
    said = refused(invoke(*SMALL, "-o", tmp_path / place))
    assert "Invalid value for '-o'" in said if place == "." else f"{place}: cannot be written ({why}); choose" in said
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_report_draws_predicted_and_measured_on_the_same_tracks(tmp_path, answered):
    plan, trace, run = answered[1], tmp_path / "t.json", tmp_path / "run"
    run.mkdir()
    timeline = {"spans": [{"op": 0, "step": 0, "start_s": 0.0, "end_s": 1.5}]}
    (run / "timeline.json").write_text(json.dumps(timeline))
    assert invoke("report", plan, run, "-o", trace).exit_code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) == {"predicted", "measured"}
    drawn = [e for e in events if e["ph"] == "X"]
    assert [e["dur"] for e in drawn if e["pid"] == names["measured"]] == [1.5e6]
    assert len([e for e in drawn if e["pid"] == names["predicted"]]) % len(PlanFile.read(plan).plan.ops) == 0
    assert Timeline((Span(0, 0, 0.0, 1.5),)).total_s == 1.5


def test_report_refuses_what_it_cannot_draw(tmp_path, answered):
    plan, run = answered[1], tmp_path / "run"
    run.mkdir()
    assert ".json" in refused(invoke("report", plan, "-o", tmp_path / "t.txt"))
    refused(invoke("report", plan, run, "-o", tmp_path / "t.json"))
    (run / "timeline.json").write_text('{"spans": [{"op": 99999999, "step": 0, "start_s": 0.0, "end_s": 1.0}]}')
    assert "another plan" in refused(invoke("report", plan, run, "-o", tmp_path / "t.json"))
    assert not (tmp_path / "t.json").exists()


def woken_by(args):
    """What the command prints, and which modules it leaves imported."""
    code = (
        "import json, sys; from click.testing import CliRunner; from penstock.cli.main import cli\n"
        f"r = CliRunner().invoke(cli, {args!r}); assert r.exit_code == 0, r.output\n"
        "print(json.dumps([r.output, sorted(sys.modules)]))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def test_help_names_every_command_and_imports_nothing_heavy():
    text, modules = woken_by(["--help"])
    for name in ("plan", "check", "run", "probe", "report"):
        assert f"\n  {name} " in text
    assert not {"torch", "transformers", "scipy", "networkx", "pydantic", "rich"} & set(modules)


@pytest.mark.soak
@pytest.mark.parametrize("args", [SMALL, [*SMALL, "--json"]])
def test_planning_wakes_no_torch(args):
    assert not {"torch", "transformers"} & set(woken_by(args)[1])


def test_the_command_itself_exits_with_the_code(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "check", "none.json"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
