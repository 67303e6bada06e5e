"""Measured runs with adapters: step time against the prediction, kill and resume, merge and load.

    python -m benchmarks.adapter_run > docs/benchmarks/adapter-run_cpu-2core_DATE.md

The demo's model with random weights on this computer. Device memory is half of what full training takes. Cases: adapters with a
base in bf16 and in nf4, the last layer alone, and full training. A fresh probe gives the profile of each plan. One run is killed
(SIGKILL) half-way, resumed, and compared file by file with an undisturbed run. Its adapter is merged and loaded by transformers.
Ten minutes of two cores.
"""

import hashlib
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import penstock
from demo.demo import BATCH_SIZE, CONFIG, SEQ_LEN, STATE_BYTES_PER_PARAM
from penstock.runtime.units import show_seconds

N_STEPS, SAVE_EVERY, KILL_AFTER, WARM_UP_STEPS = 40, 10, 25, 5
CASES = {
    "everything": ("all", "bf16"),
    "adapters beside bf16": ("lora:r=16", "bf16"),
    "adapters beside nf4": ("lora:r=16", "nf4"),
    "the last layer": ("layers:2", "bf16"),
}
KILLED = "adapters beside nf4"


def with_weights(folder: Path) -> int:
    """Save the demo's model to a folder. Return its number of parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def command(home: Path, out: str, *options: str) -> list[str]:
    flags = ["--data", str(home / "text.txt"), "--tokenizer", "bytes", "--steps", str(N_STEPS), "--save-every", str(SAVE_EVERY)]
    return [sys.executable, "-m", "penstock", "run", *options, *flags, "--lr", "1e-3", "--out", str(home / out)]


def run(home: Path, plan: Path, out: str, *options: str) -> None:
    subprocess.run(command(home, out, str(plan), *options), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill(home: Path, plan: Path, out: str) -> int:
    """Start a run and kill it after some steps. Return the number of lines in its log."""
    log = home / out / "metrics.jsonl"
    process = subprocess.Popen(command(home, out, str(plan)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not log.exists() or len(lines(log)) < KILL_AFTER):
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was over before it was killed"
    return len(lines(log))


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def sums(checkpoint: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(checkpoint.iterdir())}


def row(name: str, predicted_s: float, steps_s: list[float], of_all: tuple[float, float], gap: float) -> str:
    """Format predicted and measured step time, median and spread after warm-up. `of_all`: both for full training."""
    low_s, *_, high_s = quantiles(steps_s, n=10)
    measured_s = median(steps_s)
    shares = predicted_s / of_all[0], measured_s / of_all[1]
    return (
        f"| {name} | {show_seconds(predicted_s)} | {show_seconds(measured_s)} | {show_seconds(low_s)} to {show_seconds(high_s)} | "
        f"{measured_s / predicted_s - 1:+.1%} | {shares[0]:.3f} | {shares[1]:.3f} | {shares[1] / shares[0] - 1:+.1%} | {gap:.1%} |"
    )


def measured(home: Path) -> Iterator[str]:
    n_params = with_weights(home / "model")
    (home / "text.txt").write_text("A penstock is the pipe that feeds a turbine from a reservoir. " * 2000)
    print("probing ...", file=sys.stderr, flush=True)
    profile = penstock.probe("cpu")
    sizes = {"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, "device_memory_bytes": n_params * STATE_BYTES_PER_PARAM // 2}
    yield "| trained | predicted | measured | P10 to P90 | error | of everything's, predicted | measured | error | gap |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    of_all: tuple[float, float] | None = None
    for name, (train, base) in CASES.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        planned = penstock.plan(home / "model", profile, train=train, base=base, **sizes)  # type: ignore[arg-type]
        plan, out = planned.save(home / f"{name}.json"), name.replace(" ", "-")
        run(home, plan, out)
        steps_s = [line["step_s"] for line in lines(home / out / "metrics.jsonl")][WARM_UP_STEPS:]
        of_all = of_all or (planned.step_s, median(steps_s))
        yield row(name, planned.step_s, steps_s, of_all, planned.certificate.gap_fraction)
    yield ""
    plan, checkpoint = home / f"{KILLED}.json", home / KILLED.replace(" ", "-") / f"checkpoint-{N_STEPS}"
    n_done = kill(home, plan, "killed")
    run(home, plan, "killed", "--resume")
    same = sums(checkpoint) == sums(home / "killed" / checkpoint.name)
    assert same, "a resumed run ended in other bits"
    yield f"The run with {KILLED} was killed after step {n_done}, and resumed: all {len(sums(checkpoint))} files of its last"
    yield "checkpoint are the same bytes as those of the run that was not killed."
    yield ""
    adapters = home / "adapters-beside-bf16" / f"checkpoint-{N_STEPS}"
    subprocess.run([sys.executable, "-m", "penstock", "merge", home / "model", adapters, "--out", home / "merged"], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    model, report = AutoModelForCausalLM.from_pretrained(home / "merged", output_loading_info=True, dtype="auto")
    assert not any(report[odd] for odd in ("missing_keys", "unexpected_keys")), "the merged model is not one of its type"
    all_bytes = sum(file.stat().st_size for file in adapters.glob("*.safetensors"))
    adapter_bytes, n_merged = (adapters / "adapter_model.safetensors").stat().st_size, sum(p.numel() for p in model.parameters())
    yield f"Checkpoints with adapters have {all_bytes / 1e6:.1f} MB of tensors, {adapter_bytes / 1e6:.1f} MB of them adapters. The"
    yield f"merged model has {n_merged / 1e6:.1f} M parameters; transformers misses none, and finds none left over."


def main() -> None:
    home = Path(tempfile.mkdtemp(prefix="adapters"))
    try:
        body = list(measured(home))
    finally:
        shutil.rmtree(home)
    print(f"""# Measured runs with adapters: step time, resume, merge

Made with `python -m benchmarks.adapter_run`, torch {torch.__version__}, transformers {transformers.__version__}, Python
{platform.python_version()}, on a shared machine of two cores. The demo's model with weights of its own, in steps of {BATCH_SIZE}
sequences of {SEQ_LEN} tokens, with half of the device memory of full training. Predicted from a profile probed just
before; measured: the median of {N_STEPS - WARM_UP_STEPS} steps. A step of everything is the first row's. A slowdown
of the shared machine cancels in that ratio.
""")
    print("\n".join(body))
    print("""
## Limits

No GPU: there, frozen weights are unpacked by kernels with a predicted traffic, and training on the device saves transfers over a
link that a CPU does not have.""")


if __name__ == "__main__":
    main()
