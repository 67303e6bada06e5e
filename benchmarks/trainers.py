"""Scripts for transformers and TRL, run with their own trainers and with Penstock's: lines changed, losses, saved files.

    python -m benchmarks.trainers docs/benchmarks/trainers_2026-11-29.md

Each script of `examples/` runs twice, in fp32 on the CPU, on a tiny model with the same rows: as it is, and with the import of the
trainer from transformers or TRL. Losses are those of `log_history`. Each side's result is loaded by transformers or PEFT.
"""

import difflib
import json
import os
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import provenance
from penstock.hf.start import profile_path
from penstock.hwprofiles.schema import read_profile
from tests.chats import write_talker
from tests.real_layers import hf_model
from tests.tiny import tiny_config

ROOT, STEPS = Path(__file__).parents[1], 20
SCRIPTS = {  # script: (module of the original trainer, model, rows)
    "trl_sft_lora": ("trl", "model", "chats"),
    "trainer_sft": ("transformers", "model", "texts"),
    "trl_dpo_after_sft": ("trl", "model", "pairs"),
    "trl_kto": ("trl", "model", "answers"),
    "trl_reward": ("trl", "scorer", "pairs"),
    "trl_grpo_rollouts": ("trl", "model", "rollouts"),
}
WORDS = ("the", "river", "runs", "down", "to", "a", "sea", "and", "two", "of", "four", "are", "pipes", "that", "feed", "turbines")


def write_home(home: Path) -> None:
    """Write tiny models, a causal one and one with a scoring head, and rows of each kind: 23, so that epochs end with fewer."""
    draw, text = random.Random(7), lambda n: " ".join(draw.choices(WORDS, k=n))
    config = tiny_config("qwen3", vocab_size=write_talker(home / "model", "chatml"), eos_token_id=1, pad_token_id=1)
    write_talker(home / "scorer", "chatml")
    torch.manual_seed(1)
    model = hf_model(config)
    model.save_pretrained(home / "model")
    score = transformers.AutoConfig.from_pretrained(home / "model", num_labels=1)
    transformers.AutoModelForSequenceClassification.from_config(score).save_pretrained(home / "scorer")
    rows: dict[str, list[Any]] = {name: [] for name in ("chats", "texts", "pairs", "answers", "rollouts")}
    for i in range(23):
        prompt, good, bad = f"{text(draw.randint(3, 9))}?", f" {text(draw.randint(3, 9))}", f" {text(draw.randint(2, 6))}"
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": good}]
        rows["chats"].append({"messages": turns})
        rows["texts"].append({"text": prompt + good})
        rows["pairs"].append({"prompt": prompt, "chosen": good, "rejected": bad})
        rows["answers"] += [{"prompt": good, "completion": bad, "label": False}] if i == 0 else []  # 24: whole groups
        rows["answers"].append({"prompt": prompt, "completion": bad if i % 3 else good, "label": i % 3 == 0})
    for i in range(2):
        rows["rollouts"].append(_rollouts(model, f"group {i}", [draw.randrange(4, 200) for _ in range(5)], draw))
    for name, values in rows.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))


def _rollouts(model: Any, prompt: str, prompt_ids: list[int], draw: random.Random) -> dict[str, Any]:
    """Return a group of four random completions with their log-probabilities under the model."""
    group: dict[str, Any] = {"prompt": prompt, "prompt_ids": prompt_ids, "completion_ids": [], "logprobs": [], "rewards": []}
    for _ in range(4):
        ids = [draw.randrange(4, 200) for _ in range(draw.randint(3, 8))]
        with torch.no_grad():
            logps = model(torch.tensor([prompt_ids + ids])).logits[0].log_softmax(-1)[len(prompt_ids) - 1 : -1]
        group["completion_ids"].append(ids)
        group["logprobs"].append([logps[i, token].item() for i, token in enumerate(ids)])
        group["rewards"].append(draw.random())
    return group


def run(home: Path, name: str, module: str | None = None, steps: int = STEPS) -> tuple[list[float], int, Path]:
    """Run a script, with the trainer of `module` instead of Penstock's. Return losses, the number of changed lines, the output."""
    source = (ROOT / "examples" / f"{name}.py").read_text()
    text = source if module is None else source.replace("from penstock.hf import", f"from {module} import")
    changed = sum(line.startswith("+ ") for line in difflib.ndiff(source.splitlines(), text.splitlines()))
    out, (_, model, rows) = home / f"{name}-{module or 'penstock'}", SCRIPTS[name]
    (home / "script.py").write_text(text)
    command = [sys.executable, "script.py", model, f"{rows}.jsonl", str(out), str(steps)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CI": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_DATASETS_CACHE": str(home / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    completed = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RuntimeError(f"{name} with {module or 'penstock'}: {completed.stderr[-3000:]}")
    state = "hf_trainer_state.json" if module is None else "trainer_state.json"
    history = json.loads((out / f"checkpoint-{steps}" / state).read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry], changed, out / "final"


def loads(folder: Path, base: Path) -> bool:
    """True if transformers or PEFT load a result without a missing or unknown weight."""
    if (folder / "adapter_config.json").exists():
        from peft import PeftModel

        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        result = PeftModel.from_pretrained(model, folder).load_adapter(folder, "again")
        return not result.unexpected_keys and not [key for key in result.missing_keys if "lora" in key]
    kind = transformers.AutoModelForSequenceClassification if "reward" in str(folder) else transformers.AutoModelForCausalLM
    _, info = kind.from_pretrained(folder, output_loading_info=True)
    return not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def compared(home: Path, name: str, steps: int = STEPS) -> tuple[int, float, bool]:
    """Return lines changed, the largest relative difference of losses, and True if both sides' results load."""
    module, model, _ = SCRIPTS[name]
    reference, n_lines, their_folder = run(home, name, module, steps)
    streamed, _, our_folder = run(home, name, steps=steps)
    assert len(streamed) == len(reference) == steps, (len(streamed), len(reference))
    worst = max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(streamed, reference, strict=True))
    return n_lines, worst, loads(our_folder, home / model) and loads(their_folder, home / model)


HEAD = """# Scripts for transformers and TRL, with both trainers

`python -m benchmarks.trainers docs/benchmarks/{name}`: each script of [examples](../../examples) runs twice for {steps} steps, in
fp32 on the CPU with one thread, with Penstock's trainer and with the original, on a tiny Qwen3 of 2 layers with the same rows.
Lines: those that differ between the scripts. Difference: the largest one of a step's loss in `log_history`, relative to the
original's loss.
Files: {files}. {provenance}, TRL {trl}.

| script | original | lines | largest difference of losses | files load |
|---|---|---:|---:|---|
"""
FILES = "True if the final folders of both sides load in transformers or PEFT with no weight missing or unknown"


def main() -> None:
    page, lines = Path(sys.argv[1]), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_home(home)
        os.environ["PENSTOCK_CACHE"] = str(home / "penstock-cache")
        profile_path().parent.mkdir(parents=True)
        profile_path().write_text(json.dumps(read_profile("cpu-2core").to_json()))
        for name, (module, *_) in SCRIPTS.items():
            n_lines, worst, is_loaded = compared(home, name)
            lines.append(f"| [{name}](../../examples/{name}.py) | {module} | {n_lines} | {worst:.1e} | {is_loaded} |")
            print(lines[-1], flush=True)
    head = HEAD.format(name=page.name, steps=STEPS, files=FILES, provenance=provenance(), trl=version("trl"))
    page.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
