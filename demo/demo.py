"""Demo: plan, fine-tune a small model on two cores, kill, resume, compare files bitwise, report.

Measures this machine and plans a byte-level model on it with half of the memory of its training state. Teaches it the Zen of
Python by question and answer, and compares measured times with the plan. Repeats the run, kills it half-way and resumes it: results
are bitwise identical. Plans for two larger machines, and prints answers of the model before and after training.
"""

import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import penstock

FOLDER = Path(__file__).resolve().parent
OUT = FOLDER / "out"
MODEL = OUT / "qwen3-small"
N_STEPS, SAVE_EVERY, KILL_AFTER = 80, 20, 45
SHOWN_EVERY = 10  # steps per printed step
SEQ_LEN, BATCH_SIZE = 256, 4
DTYPES = ("bf16", "fp32")  # compute dtypes, the preferred one first
PHRASINGS = ("What comes after '{}'", "Go on: {}", "Which line is next? {}")
SHOWN_APART = 9  # questions per printed question
Pairs = list[tuple[str, str]]  # (question, answer)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
STATE_BYTES_PER_PARAM = 2 + 4 + 8 + 2  # bf16 weight, fp32 master, two fp32 moments, bf16 gradient; the same total in fp32
TRAINING = {
    "optimizer.schedule.kind": "cosine",
    "optimizer.schedule.warmup_steps": 10,
    "optimizer.weight_decay": 0.1,
    "checkpoint.every": SAVE_EVERY,
}
COMMON_SETTINGS = {"tokenizer": "bytes", "evaluation.data": str(OUT / "held-out.jsonl"), "evaluation.max_new_tokens": 70}


def call(function: Callable[..., Any], *values: object, **options: object) -> Any:
    """Print and make a call of the Python interface. Stop the demo if it fails."""
    words = [*map(_shown, values), *(f"{name}={_shown(value)}" for name, value in options.items())]
    print(f"\n>>> penstock.{function.__name__}({', '.join(words)})", flush=True)
    try:
        return function(*values, **options)
    except penstock.PenstockError as error:
        sys.exit(f"the demo stopped: {error}")


def _shown(value: object) -> str:
    """Format an argument; a long value is replaced by its type or name."""
    match value:
        case Path():
            return repr(str(value.relative_to(FOLDER)))
        case str() | bool() | int() | float():
            return repr(value)
        case dict():
            return "settings"
    return getattr(value, "__name__", type(value).__name__).lower()


def train(plan: Path, out: Path, resume: bool = False, **changes: Any) -> Any:
    """Train: the full run, the killed run and the resumed run are equal. `other` changes the run of the untrained model."""
    prompts = {"evaluation.prompts": [question for question, _ in questions()[0][::SHOWN_APART]]}
    always = {"resume": resume, "from_scratch": True, "on_step": progress}
    options = {"steps": N_STEPS, "lr": 1e-3, "settings": TRAINING} | always | changes
    options["settings"] = COMMON_SETTINGS | prompts | options["settings"]
    return call(penstock.train, plan, OUT / "chats.jsonl", out=out, **options)


def progress(metrics: Any) -> None:
    if metrics.step % SHOWN_EVERY:
        return
    lanes = "  ".join(f"{lane} {share:.0%}" for lane, share in metrics.busy_fractions().items())
    words = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s:,.0f} tokens/s  {lanes}"
    print(
        f"step {metrics.step}/{N_STEPS}  {words}  {metrics.step_s / metrics.predicted_step_s - 1:+.1%} against the plan", flush=True
    )


def compare(planned: Any, trained: Any) -> None:
    """Print predicted and measured times of a step and of each lane."""
    prediction, (_, *settled) = penstock.predict(planned), trained.metrics
    busy_s = prediction.busy_s(planned.plan)
    rows = {"step": (prediction.step_s, median(m.step_s for m in settled))}
    rows |= {
        f"busy, {lane}": (s, median(m.busy_s[lane] for m in settled)) for lane, s in busy_s.items() if lane in settled[0].busy_s
    }
    print("\n                  predicted   measured")
    for name, (predicted_s, measured_s) in rows.items():
        print(f"{name:16}  {predicted_s:7.3f} s  {measured_s:7.3f} s  {measured_s / predicted_s - 1:+.1%}")


def train_killed(plan: Path, out: Path) -> None:
    """Train in another process, and kill it once its log holds KILL_AFTER steps."""
    process, log = multiprocessing.get_context("spawn").Process(target=train, args=(plan, out)), out / "metrics.jsonl"
    process.start()
    while process.is_alive() and (not log.exists() or len(losses(log)) < KILL_AFTER):
        time.sleep(0.05)
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        sys.exit(f"the demo stopped: the run was to be killed, and left with exit code {process.exitcode} before")
    print(f"killed with SIGKILL after step {len(losses(log))}", flush=True)


def losses(log: Path) -> list[float]:
    """Return the training losses in a metrics.jsonl. Its last line may be half written."""
    lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [fields["loss"] for line in lines if "loss" in (fields := json.loads(line))]


@cache
def questions() -> tuple[Pairs, Pairs]:
    """Return (training, held-out) questions for the next line of the Zen of Python. Each line has one held-out wording."""
    with redirect_stdout(io.StringIO()) as output:
        import this  # noqa: F401
    _, *lines = filter(None, output.getvalue().splitlines())
    learned: Pairs = []
    held_out: Pairs = []
    for number, (line, following) in enumerate(pairwise(lines)):
        for way, words in enumerate(PHRASINGS):
            (held_out if way == number % len(PHRASINGS) else learned).append((words.format(line), following))
    return learned, held_out


def write_chats(file: Path, pairs: Pairs) -> None:
    """Write one conversation per line, in the `messages` format."""
    chats = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in pairs]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))


def show_what_was_learned(untrained: Path, trained: Path) -> None:
    """Print answers to some questions from the last samples of both runs."""
    answers = [{s["prompt"]: s["text"] for s in map(json.loads, (run / "samples.jsonl").open())} for run in (untrained, trained)]
    print("\nAnswers of the model, before and after training:")
    for question, answer in questions()[0][::SHOWN_APART]:
        first, last = (" ".join(ascii(samples[question])[1:-1].split()) for samples in answers)
        print(f"  {question}\n    before: {first[:70]}\n    after:  {last}{'' if answers[1][question] == answer else '  (wrong)'}")


def sums(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of every file: weights, masters, moments, position in the data."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(checkpoint.iterdir())}


def n_params() -> int:
    """Return the planner's parameter count of the demo's model."""
    from penstock.planner.model.workload import build_workload, read_model

    return build_workload(read_model(str(MODEL)), penstock.Semantics(SEQ_LEN, BATCH_SIZE, 1)).n_params


def faster_dtype(profile: Any) -> str:
    """Return the faster compute dtype. A processor without bf16 instructions is many times slower in bf16 than in fp32."""
    rates = {
        dtype: profile.matmul_rate(dtype, SEQ_LEN, CONFIG["hidden_size"], CONFIG["intermediate_size"]).value for dtype in DTYPES
    }
    return max(DTYPES, key=rates.__getitem__)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    os.environ["PENSTOCK_CACHE"] = str(OUT / "cache")  # nothing is written elsewhere
    MODEL.mkdir(parents=True)
    (MODEL / "config.json").write_text(json.dumps(CONFIG, indent=1))
    for name, pairs in zip(("chats", "held-out"), questions(), strict=True):
        write_chats(OUT / f"{name}.jsonl", pairs)
    state_bytes = n_params() * STATE_BYTES_PER_PARAM
    print(f"A Qwen3 of {n_params() / 1e6:.1f} M parameters: its training state is {state_bytes / 1e6:.0f} MB.")
    print(f"The 'device' gets half of that, {state_bytes / 2e6:.1f} MB; everything else lives in host memory.")

    profile = call(penstock.probe, "cpu", quick=True)
    print(profile.summary)
    (OUT / "this-machine.json").write_text(json.dumps(profile.to_json(), indent=1))
    sizes: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, "device_memory_bytes": state_bytes // 2}
    if (dtype := faster_dtype(profile)) != DTYPES[0]:
        sizes |= {"compute_dtype": dtype, "gradient_dtype": dtype}
    planned = call(penstock.plan, MODEL, profile, **sizes)
    print(planned)
    plan = planned.save(OUT / "plan.json")
    print(call(penstock.check, plan))
    print("\nOne step at a learning rate near zero: answers of the model before training")
    untrained, run = OUT / "untrained", OUT / "run"
    train(plan, untrained, steps=1, lr=1e-9, settings={})
    trained = train(plan, run)
    compare(planned, trained)
    run_losses = losses(run / "metrics.jsonl")
    print(f"\nloss {run_losses[0]:.3f} at the first step, {run_losses[-1]:.3f} at the last (guessing bytes blindly is 5.77)")
    (OUT / "report.html").write_text(trained.page(), encoding="utf-8")

    print("\nThe same run, killed in the middle and resumed:", flush=True)
    killed = OUT / "killed"
    train_killed(plan, killed)
    train(plan, killed, resume=True)
    last = f"checkpoint-{N_STEPS}"
    is_same = sums(run / last) == sums(killed / last) and run_losses == losses(killed / "metrics.jsonl")
    if not is_same:
        sys.exit("the demo stopped: the resumed run is NOT the unbroken one")
    print(f"\nThe resumed run is bit-identical to the unbroken one: every loss, and every file of {last}.")

    print("\nAnd without the hardware:")
    print(call(penstock.plan, "gpt-oss-120b", "h200-pcie5", host_memory_bytes=1_500 * 10**9, master_dtype="bf16"))
    print(call(penstock.plan, "qwen2.5-32b", "rtx4090-server"))
    show_what_was_learned(untrained, run)
    print("\nThe checkpoints, the logs and the report are in demo/out: open demo/out/report.html in a browser.")


if __name__ == "__main__":
    main()
