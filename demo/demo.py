"""What does Penstock do, in a few minutes on two cores?

Measures this machine, plans a byte-level model on it with a quarter of the memory its training state needs, trains it on questions
and answers made of the docstrings of the standard library, and compares the clock with the plan. The same run is then begun again,
killed half-way and resumed: both end in the same bits. Last, it asks about two machines nobody here owns.
"""

import ast
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
MODEL, PROFILE = OUT / "qwen3-38m", OUT / "this-machine.json"
PENSTOCK = Path(sys.executable).with_name("penstock")
N_STEPS, SAVE_EVERY, KILL_AFTER = 24, 10, 14
SEQ_LEN, BATCH_SIZE = 256, 8
HELD_OUT = 40  # of so many questions, one is kept for evaluation
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


def show(words: list[str]) -> None:
    print(f"\n$ penstock {' '.join(w if ' ' not in w else repr(w) for w in words)}".replace(f"{HERE}/", ""), flush=True)


def penstock(*args: object) -> None:
    """Run a command and show it; stop the demo when it fails."""
    words = [str(a) for a in args]
    show(words)
    done = subprocess.run([PENSTOCK, *words], check=False)
    if done.returncode:
        sys.exit(f"the demo stopped: penstock {words[0]} left with exit code {done.returncode}")


def penstock_killed(log: Path, n_steps: int, *args: object) -> None:
    """Run a command, and kill it as soon as its log holds so many steps."""
    words = [str(a) for a in args]
    show(words)
    process = subprocess.Popen([PENSTOCK, *words])
    while process.poll() is None and (not log.exists() or len(losses(log)) < n_steps):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        sys.exit(f"the demo stopped: penstock {words[0]} was to be killed, and left with exit code {process.returncode} before")
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
    from runtime.plan import Semantics

    return build_workload(read_model(str(MODEL)), Semantics(SEQ_LEN, BATCH_SIZE, 1)).n_params


def train(plan: Path) -> tuple[object, ...]:
    """The words of a run of the plan, but for where it goes."""
    data = ("--data", OUT / "chats.jsonl", "--eval-data", OUT / "held-out.jsonl", "--eval-every", SAVE_EVERY)
    learning = ("--steps", N_STEPS, "--lr", "6e-4", "--schedule", "cosine", "--warmup-steps", 4, "--weight-decay", "0.1")
    return ("run", plan, *data, *learning, "--save-every", SAVE_EVERY, "--prompt", "What is json.loads for?")


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    MODEL.mkdir(parents=True)
    (MODEL / "config.json").write_text(json.dumps(CONFIG, indent=1))
    write_chats(OUT / "chats.jsonl", OUT / "held-out.jsonl")
    state_bytes = n_params() * STATE_BYTES_PER_PARAM
    print(f"A Qwen3 of {n_params() / 1e6:.1f} M parameters: its training state is {state_bytes / 1e6:.0f} MB.")
    print(f"The 'device' gets a quarter of that, {state_bytes / 4e6:.0f} MB; everything else lives in host memory.")

    penstock("probe", "--device", "cpu", "--quick", "-o", PROFILE)
    plan = OUT / "plan.json"
    sizes = ("--seq-len", SEQ_LEN, "--batch-size", BATCH_SIZE, "--device-memory", state_bytes // 4)
    penstock("plan", MODEL, "--machine", PROFILE, *sizes, "-o", plan)
    penstock("check", plan)
    run = OUT / "run"
    penstock(*train(plan), "--out", run)
    found = losses(run / "metrics.jsonl")
    print(f"\nloss {found[0]:.3f} at the first step, {found[-1]:.3f} at the last (guessing bytes blindly is 5.77)")
    penstock("report", plan, run, "-o", OUT / "report.html")

    print("\nThe same run, killed in the middle and resumed:")
    killed = OUT / "killed"
    penstock_killed(killed / "metrics.jsonl", KILL_AFTER, *train(plan), "--out", killed)
    penstock(*train(plan), "--out", killed, "--resume")
    last = f"checkpoint-{N_STEPS}"
    is_same = sums(run / last) == sums(killed / last) and found == losses(killed / "metrics.jsonl")
    if not is_same:
        sys.exit("the demo stopped: the resumed run is NOT the unbroken one")
    print(f"\nThe resumed run is bit-identical to the unbroken one: every loss, and every file of {last}.")

    print("\nAnd without the hardware:")
    penstock("plan", "gpt-oss-120b", "--machine", "h200-pcie5", "--host-memory", "1.5TB", "--master", "bf16")
    penstock("plan", "qwen2.5-72b", "--machine", "gh200", "--host-memory", "2TB")
    print("\nThe checkpoints, the logs and the report lie in demo/out: open demo/out/report.html in a browser.")


if __name__ == "__main__":
    main()
