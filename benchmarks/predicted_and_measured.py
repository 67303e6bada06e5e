"""Steps on this computer against their predictions: time, and resident memory.

    python -m benchmarks.predicted_and_measured small|adapters|billion

`small`: a Qwen3 of 38 M parameters, by the searched policy and by MegaTrain's, with equal weights. `adapters`: the demo's model,
trained whole, with adapters and a base in bf16 and nf4, and its last layer alone. `billion`: a Llama of 1.1 G parameters.
The machine is probed just before. Each run is a separate process, and its resident set is sampled. Prints a page of Markdown after
some ten minutes; `billion` needs 24 GB of memory and 14 GB of disk.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from benchmarks.common import command, middle_and_range, provenance
from benchmarks.small import CONFIG, DEMO, state_bytes, write_sources
from penstock.results import Planned
from penstock.runtime.units import GB, show_seconds

SAMPLE_S = 0.2
BILLION = DEMO | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False, "mlp_bias": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """Runs of a model. `device_fraction`: device memory, relative to the state of full training; `cases`: arguments of `plan`."""

    config: dict[str, Any]
    sizes: dict[str, int]
    device_fraction: float
    cases: dict[str, dict[str, Any]]
    n_steps: int
    n_warm_up: int


ADAPTERS = {
    "everything": {"train": "all"},
    "adapters beside bf16": {"train": "lora:r=16"},
    "adapters beside nf4": {"train": "lora:r=16", "base": "nf4"},
    "the last layer": {"train": "layers:2"},
}
POLICIES = {"search": {}, "megatrain": {"policy": "megatrain"}}
JOBS = {
    "small": Job(CONFIG, {"seq_len": 256, "batch_size": 8, "micro_batch": 4}, 0.25, POLICIES, 11, 2),
    "adapters": Job(DEMO, {"seq_len": 256, "batch_size": 4}, 0.5, ADAPTERS, 40, 5),
    "billion": Job(BILLION, {"seq_len": 512, "batch_size": 4, "host_memory_bytes": 20 * GB}, 0.17, {"search": {}}, 4, 2),
}


def model_of(home: Path, job: Job, has_weights: bool) -> Path:
    """Write a model's configuration, and random weights if runs need some."""
    folder = home / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(job.config))
    if has_weights:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return folder


def run(plan: Path, data: Path, out: Path, n_steps: int, *flags: str) -> tuple[list[float], list[int], str]:
    """Train. Return seconds of every step, samples of the resident set in bytes, and the printed table."""
    words = command("run", plan, "--data", data, "--tokenizer", "bytes", "--steps", n_steps, "--lr", "6e-4", "--out", out, *flags)
    process, samples = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True), list[int]()
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        samples += [int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmRSS:")]
        time.sleep(SAMPLE_S)
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(words)} ended with exit code {process.returncode}")
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row["step_s"] for row in rows if "step_s" in row], samples, output


def row(name: str, planned: Planned, times_s: list[float], first: tuple[float, float], peak_bytes: int) -> str:
    """Format a run. `first`: predicted and measured step of the first one; a slowdown of a shared machine cancels in the ratio."""
    plan, (step_s, low_s, high_s) = planned.plan, middle_and_range(times_s)
    predicted, measured = planned.step_s / first[0], step_s / first[1]
    arena_bytes = sum(arena.n_bytes for arena in plan.arenas) + plan.kept_bytes + plan.transient_bytes
    planned_bytes = arena_bytes + planned.profile.host.runtime_bytes.value
    return (
        f"| {name} | {show_seconds(planned.step_s)} | {show_seconds(step_s)} | {show_seconds(low_s)} to {show_seconds(high_s)} | "
        f"{step_s / planned.step_s - 1:+.1%} | {predicted:.3f} | {measured:.3f} | {planned.certificate.gap_fraction:.1%} | "
        f"{planned_bytes / 1e9:.2f} | {peak_bytes / 1e9:.2f} | {peak_bytes / planned_bytes - 1:+.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    name = parser.parse_args().job
    job, has_weights, digests, outputs, first = JOBS[name], name == "adapters", {}, [], None
    print(f"{provenance()}\n")
    print(
        "| run | predicted | measured | P10 to P90 | error | to the first: predicted | measured | gap | GB planned | peak | over |"
    )
    print(f"|---{'|---:' * 10}|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model, data, profile = model_of(home, job, has_weights), write_sources(home / "stdlib.jsonl"), penstock.probe("cpu")
        memory = round(state_bytes(job.config) * job.device_fraction)
        for number, (case, fields) in enumerate(job.cases.items()):
            planned = penstock.plan(model, profile, device_memory_bytes=memory, **job.sizes, **fields)
            plan, out = planned.save(home / f"{number}.json"), home / f"out-{number}"
            times_s, samples, output = run(plan, data, out, job.n_steps, *([] if has_weights else ["--from-scratch"]))
            times_s = times_s[job.n_warm_up :]
            first = first or (planned.step_s, middle_and_range(times_s)[0])
            print(row(case, planned, times_s, first, max(samples)), flush=True)
            weights = b"".join(path.read_bytes() for path in sorted(out.glob("checkpoint-*/model-*.safetensors")))
            digests[case] = hashlib.sha256(weights).hexdigest()
            outputs.append(output.rstrip().replace(folder, ""))
    print("".join(f"\n```\n{output}\n```" for output in outputs))
    if name == "small" and len({*digests.values()}) != 1:
        sys.exit(f"two policies left different weights: {digests}")


if __name__ == "__main__":
    main()
