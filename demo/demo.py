"""What does Penstock do, in three minutes on two cores?

Measures this machine, plans a byte-level model on it with a quarter of the memory its training state needs, trains it on the
standard library's own source, compares the clock with the plan, and then asks about two machines nobody here owns.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
PENSTOCK = Path(sys.executable).with_name("penstock")
N_STEPS = 30
SEQ_LEN, BATCH_SIZE = 256, 8
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


def penstock(*args: object) -> None:
    """Run a command and show it; stop the demo when it fails."""
    words = [str(a) for a in args]
    print(f"\n$ penstock {' '.join(w if ' ' not in w else repr(w) for w in words)}".replace(f"{HERE}/", ""), flush=True)
    done = subprocess.run([PENSTOCK, *words], check=False)
    if done.returncode:
        sys.exit(f"the demo stopped: penstock {words[0]} left with exit code {done.returncode}")


def standard_library(path: Path) -> None:
    """The standard library's own source as one JSONL, a line per file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip"}
    with path.open("w", encoding="utf-8") as out:
        for file in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
            if file.parent.name not in left_out:
                out.write(json.dumps({"text": file.read_text(encoding="utf-8", errors="ignore")}) + "\n")


def n_params() -> int:
    """Parameters of the demo's model, as the planner counts them."""
    from planner.workload import build_workload, read_model
    from runtime.plan import Semantics

    return build_workload(read_model(str(OUT / "model")), Semantics(SEQ_LEN, BATCH_SIZE, 1)).n_params


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "model").mkdir(parents=True)
    (OUT / "model" / "config.json").write_text(json.dumps(CONFIG, indent=1))
    standard_library(OUT / "stdlib.jsonl")
    state_bytes = n_params() * STATE_BYTES_PER_PARAM
    print(f"A Qwen3 of {n_params() / 1e6:.1f} M parameters: its training state is {state_bytes / 1e6:.0f} MB.")
    print(f"The 'device' gets a quarter of that, {state_bytes / 4e6:.0f} MB; everything else lives in host memory.")

    penstock("probe", "--device", "cpu", "--quick", "-o", OUT / "profile.json")
    plan = OUT / "plan.json"
    sizes = ("--seq-len", SEQ_LEN, "--batch-size", BATCH_SIZE, "--device-memory", state_bytes // 4)
    penstock("plan", OUT / "model", "--machine", OUT / "profile.json", *sizes, "-o", plan)
    penstock("check", plan)
    run = OUT / "run"
    penstock("run", plan, "--data", OUT / "stdlib.jsonl", "--steps", N_STEPS, "--lr", "6e-4", "--weight-decay", "0.1", "--out", run)
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    print(f"\nloss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last (guessing bytes blindly is 5.77)")
    penstock("report", plan, run, "-o", OUT / "trace.json")

    print("\nAnd without the hardware:")
    penstock("plan", "gpt-oss-120b", "--machine", "h200-pcie5", "--host-memory", "1.5TB", "--master", "bf16")
    penstock("plan", "qwen2.5-72b", "--machine", "gh200", "--host-memory", "2TB")
    print("\nThe checkpoint, the log and the trace lie in demo/out: open demo/out/trace.json at https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
