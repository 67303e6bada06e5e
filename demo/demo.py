"""What does Penstock do, in a few minutes on two cores?

Measures this machine, plans a byte-level model on it with a quarter of the memory its training state needs, trains it on questions
and answers made of the docstrings of the standard library, and compares the clock with the plan. The same run is then begun again,
killed half-way and resumed: both end in the same bits. Last, it asks about two machines nobody here owns.
"""

import ast
import hashlib
import json
import multiprocessing
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import penstock

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
MODEL = OUT / "qwen3-38m"
N_STEPS, SAVE_EVERY, KILL_AFTER = 24, 10, 14
SEQ_LEN, BATCH_SIZE = 256, 8
HELD_OUT = 40  # of that many questions, one is kept for evaluation
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
STATE_BYTES_PER_PARAM = 2 + 4 + 8 + 2  # bf16 weight, fp32 master, two fp32 moments, bf16 gradient
TRAINING = {
    "optimizer.schedule.kind": "cosine",
    "optimizer.schedule.warmup_steps": 4,
    "optimizer.weight_decay": 0.1,
    "checkpoint.every": SAVE_EVERY,
    "evaluation.data": str(OUT / "held-out.jsonl"),
    "evaluation.every": SAVE_EVERY,
    "evaluation.prompts": ["What is json.loads for?"],
}


def call(function: Callable[..., Any], *values: object, **options: object) -> Any:
    """Call a function of the Python face, shown as a program would write it; stop the demo when it fails."""
    words = [*map(_shown, values), *(f"{name}={_shown(value)}" for name, value in options.items())]
    print(f"\n>>> penstock.{function.__name__}({', '.join(words)})", flush=True)
    try:
        return function(*values, **options)
    except penstock.PenstockError as error:
        sys.exit(f"the demo stopped: {error}")


def _shown(value: object) -> str:
    """A value as it is written, or where that would be a page, the name of what it is."""
    match value:
        case Path():
            return repr(str(value.relative_to(HERE)))
        case str() | bool() | int() | float():
            return repr(value)
        case dict():
            return "settings"
    return getattr(value, "__name__", type(value).__name__).lower()


def train(plan: Path, out: Path, resume: bool = False) -> Any:
    """The run that is made three times: whole, killed, and resumed."""
    options = {"steps": N_STEPS, "lr": 6e-4, "resume": resume, "settings": TRAINING, "on_step": progress}
    return call(penstock.train, plan, OUT / "chats.jsonl", out=out, **options)


def progress(metrics: Any) -> None:
    lanes = "  ".join(f"{lane} {share:.0%}" for lane, share in metrics.busy_fractions().items())
    words = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s:,.0f} tokens/s  {lanes}"
    print(
        f"step {metrics.step}/{N_STEPS}  {words}  {metrics.step_s / metrics.predicted_step_s - 1:+.1%} against the plan", flush=True
    )


def compare(planned: Any, trained: Any) -> None:
    """Predicted and measured, for a step and for the lanes that share it."""
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
    """Train in another process, and kill it as soon as its log holds KILL_AFTER steps."""
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
    """The training losses in a metrics.jsonl; its last line may be half written."""
    lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [fields["loss"] for line in lines if "loss" in (fields := json.loads(line))]


def questions(root: Path) -> Iterator[tuple[str, str]]:
    """What the standard library's classes and functions are for, in the words of their docstrings."""
    left_out = {"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip"}
    for file in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if file.parent.name in left_out:
            continue
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="ignore"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                answer = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                if 20 <= len(answer) <= 200:
                    yield f"What is {module}.{node.name} for?", answer


def write_chats(training: Path, held_out: Path) -> None:
    """One conversation a line, in the `messages` format."""
    with training.open("w", encoding="utf-8") as most, held_out.open("w", encoding="utf-8") as some:
        for number, (question, answer) in enumerate(questions(Path(sysconfig.get_paths()["stdlib"]))):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            (most if number % HELD_OUT else some).write(json.dumps({"messages": messages}) + "\n")


def sums(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every file: weights, masters, moments, position in the data."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(checkpoint.iterdir())}


def n_params() -> int:
    """Parameters of the demo's model, as the planner counts them."""
    from planner.model.workload import build_workload, read_model

    return build_workload(read_model(str(MODEL)), penstock.Semantics(SEQ_LEN, BATCH_SIZE, 1)).n_params


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    MODEL.mkdir(parents=True)
    (MODEL / "config.json").write_text(json.dumps(CONFIG, indent=1))
    write_chats(OUT / "chats.jsonl", OUT / "held-out.jsonl")
    state_bytes = n_params() * STATE_BYTES_PER_PARAM
    print(f"A Qwen3 of {n_params() / 1e6:.1f} M parameters: its training state is {state_bytes / 1e6:.0f} MB.")
    print(f"The 'device' gets a quarter of that, {state_bytes / 4e6:.0f} MB; everything else lives in host memory.")

    profile = call(penstock.probe, "cpu", quick=True)
    print(profile.summary)
    (OUT / "this-machine.json").write_text(json.dumps(profile.to_json(), indent=1))
    sizes = {"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, "device_memory_bytes": state_bytes // 4}
    planned = call(penstock.plan, MODEL, profile, **sizes)
    print(planned)
    plan = planned.save(OUT / "plan.json")
    print(call(penstock.check, plan))
    run = OUT / "run"
    trained = train(plan, run)
    compare(planned, trained)
    found = losses(run / "metrics.jsonl")
    print(f"\nloss {found[0]:.3f} at the first step, {found[-1]:.3f} at the last (guessing bytes blindly is 5.77)")
    (OUT / "report.html").write_text(trained.page(), encoding="utf-8")

    print("\nThe same run, killed in the middle and resumed:", flush=True)
    killed = OUT / "killed"
    train_killed(plan, killed)
    train(plan, killed, resume=True)
    last = f"checkpoint-{N_STEPS}"
    is_same = sums(run / last) == sums(killed / last) and found == losses(killed / "metrics.jsonl")
    if not is_same:
        sys.exit("the demo stopped: the resumed run is NOT the unbroken one")
    print(f"\nThe resumed run is bit-identical to the unbroken one: every loss, and every file of {last}.")

    print("\nAnd without the hardware:")
    print(call(penstock.plan, "gpt-oss-120b", "h200-pcie5", host_memory_bytes=1_500 * 10**9, master_dtype="bf16"))
    print(call(penstock.plan, "qwen2.5-72b", "gh200", host_memory_bytes=2_000 * 10**9))
    print("\nThe checkpoints, the logs and the report lie in demo/out: open demo/out/report.html in a browser.")


if __name__ == "__main__":
    main()
