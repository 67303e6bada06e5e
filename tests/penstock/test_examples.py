"""Example scripts and the notebook in `examples/` run on a tiny model."""

import json
import os
import re
import sys
from pathlib import Path
from subprocess import PIPE, run

import pytest

from tests.bytes_of_files import write_lines
from tests.chats import write_talker
from tests.forks import Forked
from tests.real_layers import hf_model
from tests.tiny import tiny_config
from tests.tour import ROOT

LINES = range(15, 46)  # of an example
ARGUMENTS = {
    "compare_machines": (["model", "cpu-2core", "rtx4090-server"], r"tokens/s"),
    "lora_chats": (["model", "chats.jsonl", "out", "2"], "loss "),
    "dpo_after_sft": (["model", "chats.jsonl", "preferences.jsonl", "out", "2"], "DPO loss 0.6931 "),
    "custom_loss": (["model", "chats.jsonl", "out", "2"], "focal loss "),
    "custom_loop": (["model", "chats.jsonl", "held-out.jsonl", "out", "4"], "step 4: loss "),
}
TRAINERS = {"trainer_sft": "texts", "trl_sft_lora": "chats", "trl_dpo_after_sft": "pairs", "trl_kto": "answers"}
TRAINERS |= {"trl_reward": "pairs", "trl_grpo_rollouts": "rollouts"}


def test_every_example_is_run_and_short() -> None:
    scripts = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == ARGUMENTS.keys() | TRAINERS.keys()
    assert {name: n for name, path in scripts.items() if (n := len(path.read_text().splitlines())) not in LINES} == {}
    assert all(f"examples/{name}.py" in (ROOT / "README.md").read_text() for name in scripts)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_runs_on_a_tiny_model(name: str, tmp_path: Path) -> None:
    config = tiny_config("qwen3", vocab_size=write_talker(tmp_path / "model", "chatml"))
    hf_model(config).save_pretrained(tmp_path / "model")
    turns = [("What is a penstock?", "The pipe that feeds a turbine."), ("And the reservoir?", "Host memory.")]
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns * 20]
    pairs = [{"prompt": q, "chosen": a, "rejected": "No."} for q, a in turns * 10]
    for file, rows in (("chats", chats), ("held-out", chats[:4]), ("preferences", pairs)):
        write_lines(tmp_path / f"{file}.jsonl", rows)
    arguments, printed = ARGUMENTS[name]
    program = f"import runpy; runpy.run_path({str(ROOT / 'examples' / name)!r} + '.py', run_name='__main__')"
    process = Forked([sys.executable, "-c", program, *arguments], cwd=tmp_path, stdout=PIPE, stderr=PIPE)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert printed in output


RUNNER = """
import ast, json, sys
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
names = {"__name__": "__main__"}
for cell in cells:
    *body, last = ast.parse("".join(cell["source"])).body
    is_shown = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if is_shown else [*body, last], []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if is_shown else None
    print(f"shows {value._repr_html_()[:8]}" if type(value).__name__ in ("Planned", "Trained") else value)
assert names["losses"][-1] < 0.7 * names["losses"][0] and len(names["losses"]) == 10, names["losses"]
assert names["answer"].strip()
"""


def test_the_notebook_runs_cell_by_cell(tmp_path: Path) -> None:
    """Its cells run in order in one process, as in a notebook; it is stored without outputs."""
    path = ROOT / "examples" / "train_and_plan.ipynb"
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) <= 12
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert "examples/train_and_plan.ipynb" in (ROOT / "README.md").read_text()
    command = [sys.executable, "-c", RUNNER, str(path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("shows <iframe ") == 2


@pytest.mark.parametrize("name", TRAINERS)
def test_a_script_for_another_trainer_runs_on_a_tiny_model(name: str, trainers_home: Path) -> None:
    program = f"import runpy; runpy.run_path({str(ROOT / 'examples' / name)!r} + '.py', run_name='__main__')"
    command = [sys.executable, "-c", program, "scorer" if name == "trl_reward" else "model", f"{TRAINERS[name]}.jsonl", name, "2"]
    env = os.environ | {"HF_DATASETS_CACHE": str(trainers_home / "datasets"), "HF_HUB_OFFLINE": "1"}
    process = Forked(command, cwd=trainers_home, env=env, stdout=PIPE, stderr=PIPE)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert re.search(r"loss -?[0-9.]+ -> ", output)
    assert (trainers_home / name / "final" / "tokenizer.json").exists()
