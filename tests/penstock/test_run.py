"""Runs from a plan to a checkpoint that transformers loads, and one-line errors."""

import json
import os
import shlex
import subprocess
import sys

import torch

from tests.chats import write_talker
from tests.forks import Forked
from tests.lanes import mostly_slow
from tests.real_layers import hf_model, load_model
from tests.running import SCRATCH, SIZES, UNSEARCHED, lines_of, one_line, penstock, plan_in, succeeded, train, weights_sha
from tests.tiny import tiny_config


def test_a_run_learns_logs_and_leaves_a_model(home):
    result = succeeded(train(home, plan_in(home), steps=12))
    lines = lines_of(home, "out")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert set(lines[0]) >= {"loss", "grad_norm", "lr", "tokens", "supervised_tokens", "step_s", "tokens_per_s"}
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert lines[0]["tokens"] == 128
    assert lines[0]["supervised_tokens"] <= 124
    assert load_model(home / "out" / "checkpoint-12", dtype="auto").dtype == torch.bfloat16
    rows = [line.split("\t") for line in result.stdout.splitlines() if "\t" in line]
    assert rows[0] == ["", "predicted", "measured", "error"]
    assert {row[0] for row in rows[1:]} >= {"step", "busy, gpu", "busy, h2d", "busy, d2h", "busy, cpu", "process, peak"}


# A user's command; True if the host optimizer's loops are compiled.
RUN = """
import sys
from penstock.cli.main import main
if sys.argv.pop(1) == "hidden":
    sys.modules["numba"] = None
try:
    main()
finally:
    loops = sys.modules.get("penstock.runtime.host.compiled_loops")
    print("compiled:", loops and bool(loops.update.signatures))
"""


LION = "lion:moments=bf16"


@mostly_slow(("optimizer", "numba", "value"), [(LION, "there", True), (LION, "hidden", None), ("adamw", "there", True)])
def test_the_optimizer_is_compiled_or_runs_its_definition(home, optimizer, numba, value):
    plan = plan_in(home, "--optimizer", optimizer)
    words = [numba, "run", plan, "--data", home / "data", "--out", home / "out", "--steps", 1, *SCRATCH]
    command, alone = [sys.executable, "-c", RUN, *map(str, words)], os.environ | {"OMP_NUM_THREADS": "1"}
    start = subprocess.Popen if numba == "hidden" else Forked  # about modules that are not imported
    result = start(command, env=alone, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    printed, errors = result.communicate()
    assert f"compiled: {value}" in printed
    assert (errors.count("as long: numba is not installed"), result.returncode) == (int(numba == "hidden"), 0)


def test_lion_has_no_eps(home):
    (home / "eps.yaml").write_text("optimizer: {eps: 1e-6}\n")
    plan = plan_in(home, "--optimizer", "lion")
    one_line(train(home, plan, "--config", home / "eps.yaml", steps=1), 2, "optimizer.eps: the plan's optimizer is Lion")


def real_model(home, **config):
    """Return a published model folder with weights and a tokenizer, for the short config in `home/model`."""
    folder = home / "real"
    config_fields = json.loads((home / "model" / "config.json").read_text()) | {"vocab_size": 420, "eos_token_id": 2, **config}
    write_talker(folder, "chatml")
    hf_model(config_fields).save_pretrained(folder)
    return folder


def test_a_plan_of_a_configuration_trains_the_models_weights(home):
    """The published config.json has more fields, which the checkpoint retains. A model with other computation is an error."""
    lean = json.loads((home / "model" / "config.json").read_text())
    (home / "model" / "config.json").write_text(json.dumps(lean | {"vocab_size": 420}))
    plan, folder = plan_in(home), real_model(home)
    assert "RANDOM" not in succeeded(train(home, plan, "--model", folder, steps=1, scratch=())).stderr
    assert json.loads((home / "out" / "checkpoint-1" / "config.json").read_text())["eos_token_id"] == 2
    assert (home / "out" / "checkpoint-1" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    one_line(train(home, plan, "--model", folder, out="o", scratch=()), 2, "rms_norm_eps is 0.001, not 1e-06", "plan again")


def test_missing_weights_or_tokenizer_are_refused(home):
    plan, model_flag = plan_in(home), ("--model", home / "model")
    one_line(train(home, plan, out="o", scratch=()), 2, "no folder of weights", "--model", "--from-scratch")
    one_line(train(home, plan, *model_flag, out="o", scratch=()), 2, "holds no weights", "--model", "--from-scratch")
    one_line(train(home, plan, out="o", scratch=SCRATCH[:1]), 2, "no tokenizer", "--model", "--tokenizer bytes")
    one_line(train(home, plan, *model_flag, out="o", scratch=SCRATCH[:1]), 2, "no tokenizer.json", "--tokenizer bytes")
    assert not (home / "o").exists()
    assert "RANDOM WEIGHTS" in train(home, plan, steps=1).stderr
    assert "RANDOM WEIGHTS" not in train(home, plan, "--resume", steps=2, scratch=SCRATCH[1:]).stderr


def test_what_plan_and_run_say_to_do_next_can_be_done(home, monkeypatch):
    """Names that a shell would take apart are quoted in the commands to copy."""
    monkeypatch.chdir(home)
    real_model(home)
    for model in ("model", "real"):
        stderr = penstock("plan", home / model, *SIZES, "-o", home / "a plan; $(echo).json").stderr
        words = shlex.split(stderr.strip().rpartition(", then penstock ")[2].replace("FOLDER", str(home / "data")))
        assert ("--from-scratch" in words) == (model == "model")
        result = succeeded(penstock(*words, "--steps", 1, "--out", home / f"out & {model}"))
        report = shlex.split(result.stdout.strip().rpartition("report: penstock ")[2])
        assert report == ["report", str(home / "a plan; $(echo).json"), str(home / f"out & {model}"), "-o", "report.html"]
        succeeded(penstock(*report))


def test_mistakes_are_one_line_and_leave_nothing(home):
    plan = plan_in(home)
    one_line(penstock("run", home / "none.json", "--data", home / "data"), 2, "none.json", "cannot be read")
    one_line(penstock("run", plan, "--data", home / "nowhere", "--out", home / "o", *SCRATCH), 2, "nowhere", "not found")
    one_line(train(home, plan, "--device", "cuda", out="o"), 2, "--device cuda")
    one_line(train(home, plan, "--time-scale", "3", out="o"), 2, "--device emulated")
    one_line(train(home, plan, "--lr", "0", out="o"), 2, "--lr")
    one_line(train(home, plan, "--model", home / "gone", out="o"), 2, "gone")
    (home / "file").write_text("")
    one_line(train(home, plan, out="file/o"), 2, "cannot be written")
    (home / "model" / "config.json").write_text(json.dumps(tiny_config("qwen3", vocab_size=272, num_hidden_layers=2)))
    one_line(train(home, plan, "--model", home / "model", out="o"), 2, "plan again with this model")
    fields = json.loads(plan.read_text())
    plan.write_text(json.dumps(fields | {"ops": [op.split(" ^ ")[0] for op in fields["ops"]]}))  # races
    one_line(train(home, plan, out="o"), 2, "refused")
    assert not (home / "o").exists()


def test_a_second_run_in_a_folder_is_refused_without_resume(home):
    plan = plan_in(home)
    succeeded(train(home, plan, steps=2))
    sha = weights_sha(home / "out" / "checkpoint-2")
    one_line(train(home, plan, steps=3), 2, "--resume")
    assert weights_sha(home / "out" / "checkpoint-2") == sha
    one_line(train(home, plan, "--resume", "--seed", 5, steps=3), 2, "seed")
    one_line(train(home, plan, "--resume", steps=2), 2, "--steps")


def test_a_plan_that_needs_more_memory_exits_with_3(home):
    how = ("--machine", "h200-pcie5", "--host-memory", "2TB", "--policy", "megatrain", "-o", home / "big.json")
    result = penstock("plan", "qwen2.5-14b", *how)
    assert result.exit_code == 0, result.output
    result = train(home, home / "big.json", out="o")
    one_line(result, 3, "more than are free", "the CPU's memory takes the place of the GPU's (no GPU was found)")
    assert result.stderr.startswith("no GPU found: the plan for h200-pcie5 trains on this CPU\n")
    assert not (home / "o").exists()


def test_a_plan_and_a_run_in_bf16_name_a_cpu_without_its_instructions(home, monkeypatch):
    monkeypatch.setattr("penstock.hwprofiles.instructions.instruction_set", lambda *_: ("no AVX-512", 17.0))
    advice = "this CPU has no AVX-512: steps in fp32 are about 17 times as fast as in bf16; plan with --compute fp32"
    for dtype, n_lines in (("bf16", 1), ("fp32", 0)):
        options = ["--compute", dtype, "--gradient-dtype", dtype]
        note = succeeded(penstock("plan", home / "model", *SIZES, *UNSEARCHED, *options, "-o", home / "p.json")).stderr
        assert note.count(f"note: cpu-2core was measured with AVX-512 with bf16, but {advice}\n") == n_lines
        result = succeeded(train(home, home / "p.json", out=f"in-{dtype}", steps=1))
        assert result.stderr.count(f"warning, bf16: {advice}\n") == n_lines
