"""Memory and speed of a model of a billion parameters on a small computer.

`python -m benchmarks.one_billion` probes this machine, plans a model of 1.1 G parameters (random weights, split masters), runs a
few steps, and prints a page of Markdown: tokens/s, the binding resource, and sampled process memory next to the plan's.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import penstock
from benchmarks.text import standard_library
from penstock.runtime.units import GB

PENSTOCK = Path(sys.executable).with_name("penstock")
SAMPLE_S = 0.2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}
SIZES = {"seq_len": 512, "batch_size": 4, "device_memory_bytes": 3 * GB, "host_memory_bytes": 20 * GB}


def watched(words: list[str]) -> tuple[str, list[int]]:
    """Run a command. Return its standard output, and samples of its resident set in bytes."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    samples: list[int] = []
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            samples += [int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmRSS:")]
        except OSError:  # it has just ended
            break
        time.sleep(SAMPLE_S)
    assert process.stdout is not None
    output = process.stdout.read()
    if process.wait():
        sys.exit(f"{' '.join(words)} left with exit code {process.returncode}")
    return output, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    n_steps = parser.parse_args().steps
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"commit {commit}; {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "model").mkdir()
        (home / "model" / "config.json").write_text(json.dumps(CONFIG))
        standard_library(home / "stdlib.jsonl")
        planned = penstock.plan(home / "model", penstock.probe("cpu"), **SIZES)
        plan, path, proof = planned.plan, planned.save(home / "plan.json"), planned.certificate
        runtime_bytes = planned.profile.host.runtime_bytes.value
        planned_bytes = sum(arena.n_bytes for arena in plan.arenas) + plan.kept_bytes + plan.transient_bytes + runtime_bytes
        print(f"{plan.workload.n_params:,} parameters; binding: {proof.binding}; gap {proof.gap_fraction:.1%}\n")
        words = [
            str(PENSTOCK),
            "run",
            str(path),
            "--data",
            str(home / "stdlib.jsonl"),
            "--steps",
            str(n_steps),
            "--out",
            str(home / "out"),
            *("--from-scratch", "--tokenizer", "bytes"),
        ]
        table, samples = watched(words)
    print("```\n" + table.rstrip().replace(str(folder), "") + "\n```\n")
    peak_bytes = max(samples)
    print(f"| resident set | GB | against the plan's {planned_bytes / 1e9:.2f} GB |\n|---|---:|---:|")
    middle = sorted(samples[len(samples) // 2 :])[len(samples) // 4]
    for name, n_bytes in (("peak of all samples", peak_bytes), ("median of the second half of the run", middle)):
        print(f"| {name} | {n_bytes / 1e9:.2f} | {n_bytes / planned_bytes - 1:+.1%} |")


if __name__ == "__main__":
    main()
