"""How fast does a GPU train a 7B-shaped model, how near to the prediction, and how much faster than with other systems?

`python -m benchmarks.gpu --home FOLDER` does all there is to do on a GPU and prints a page of Markdown: the tests marked `gpu`, the
probe, then the model with random weights at several batch sizes, under the searched policy and MegaTrain's schedule, and with
PyTorch's FSDP2 and DeepSpeed's ZeRO-3 in the same run. It goes on where it stopped: where a command may last ten minutes it can be
called several times, or with the stages that fit: `tests`, `probe`, `plan`, `train`, `others`, `page`. `--device cpu --tiny` tries
it all in a minute or two without a GPU.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from planner.workload import read_model
from runtime.plan import PlanFile

STAGES = ("tests", "probe", "plan", "train", "others", "page")
POLICIES = ("search", "megatrain")
WARM_UP_STEPS = 2
ROOT = Path(__file__).parents[1]
# Bytes on the host per parameter, by the hungriest of the systems compared: fp32 master, gradient and two moments, and a copy while
# something is converted.
HOST_BYTES_PER_PARAM = 20
MEMORY_SHARE = 0.75  # of what is free: pages of files, and of other programs, want some
NOT_INSTALLED = "not installed"
GRACE_S = 60.0  # for what runs when the time is up
TIME_IS_UP = "the time is up; call again with the same --home to go on"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is trained."""

    model: str | Path
    seq_len: int
    batch_sizes: tuple[int, ...]
    n_steps: int


FULL = Sizes("qwen2.5-7b", 2048, (4, 16, 64), 6)
TINY_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_dropout": 0.0,
}  # fmt: skip


# -- one measurement, in a process of its own ---------------------------------------------------------------------------


def batches_of(plan: Any) -> Callable[[int], Any]:
    """Random tokens, all of them supervised but the last."""
    import torch

    from runtime.batch import UNSUPERVISED, Batch

    s, vocab_size = plan.semantics, plan.workload.blocks[0].parameters[0].shape[0]

    def of_step(step: int) -> Batch:
        tokens = torch.randint(vocab_size, (s.batch_size, s.seq_len), generator=torch.Generator().manual_seed(step))
        targets = torch.full_like(tokens, UNSUPERVISED)
        targets[:, :-1] = tokens[:, 1:]
        return Batch(tokens, targets)

    return of_step


def ours(plan: Any, n_steps: int, device: str) -> dict[str, Any]:
    """Step times as streams saw them, and the most of the device's memory that was taken."""
    import torch

    from benchmarks.other_systems import LR, fill, pattern
    from runtime.cpu import CpuMachine
    from runtime.cuda import CudaMachine
    from runtime.executor import execute
    from runtime.optimizer import AdamW

    def settings(step: int) -> AdamW:
        return AdamW(lr=LR, weight_decay=0.0)

    batches = batches_of(plan)
    machine = CudaMachine(plan, batches, settings) if device == "cuda" else CpuMachine(plan, batches, settings, pin_threads=True)
    numbers = pattern()
    for block in range(len(plan.workload.blocks)):
        for p in machine.host.owned(block):
            weight = torch.empty(p.shape)
            fill(weight, numbers)
            machine.host.set_weight(p, weight)
    timeline = execute(plan, machine, n_steps)
    losses = [machine.results[step].loss for step in range(n_steps)]
    assert losses[-1] == losses[-1], "the loss is not a number"
    busy_s = {str(lane): s for lane, s in timeline.from_step(1).busy_s(plan).items()}
    return {
        "times_s": timeline.step_times_s[WARM_UP_STEPS - 1 :],
        "busy_s": busy_s,
        "device_peak_bytes": machine.device_peak_bytes(),
        "device_planned_bytes": plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes,
    }


def one(system: str, path: Path, n_steps: int, device: str) -> dict[str, Any]:
    """What a system measured with the model and the sizes of a plan."""
    from benchmarks import other_systems

    plan = PlanFile.read(path).plan
    if system == "penstock":
        return ours(plan, n_steps, device)
    if system == "zero3" and not other_systems.has_deepspeed():
        return {"failed": NOT_INSTALLED}
    run = {"fsdp2": other_systems.fsdp2, "zero3": other_systems.zero3}[system]
    return {"times_s": run(plan, batches_of(plan), n_steps, device)[WARM_UP_STEPS:]}


# -- stages -------------------------------------------------------------------------------------------------------------


class Benchmark:
    """What has been measured so far lies in the folder, one file for each measurement."""

    def __init__(self, home: Path, device: str, tiny: bool, limit_s: float) -> None:
        self.home, self.device, self.tiny, self.ends_s = home, device, tiny, time.monotonic() + limit_s
        home.mkdir(parents=True, exist_ok=True)
        if tiny:
            (home / "tiny.json").write_text(json.dumps(TINY_CONFIG))
        self.sizes = Sizes(home / "tiny.json", 32, (2, 4), 4) if tiny else FULL

    def noted(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is written under that name; measured now if nothing is."""
        path = self.home / f"{name}.result.json"
        if not path.exists():
            if time.monotonic() > self.ends_s:
                raise SystemExit(TIME_IS_UP)
            print(f"{name} ..", file=sys.stderr, flush=True)
            path.write_text(json.dumps(measure()))
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def _run(self, *words: object) -> subprocess.CompletedProcess[str]:
        left_s = max(1.0, self.ends_s - time.monotonic() + GRACE_S)
        command = [sys.executable, *map(str, words)]
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=left_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{TIME_IS_UP} ({' '.join(command[1:5])} was cut short)") from None

    def tests(self) -> dict[str, Any]:
        where = ["tests/test_on_a_gpu.py", "tests/test_cuda_device.py", "tests/test_cuda_machine.py"]
        done = self._run("-m", "pytest", "-q", "-m", "gpu", *(where[1:2] if self.tiny else where))
        (self.home / "tests.log").write_text(done.stdout + done.stderr)
        return {"said": done.stdout.strip().splitlines()[-1], "exit_code": done.returncode}

    def probe(self) -> dict[str, Any]:
        quick = ["--quick"] if self.tiny else []
        done = self._run("-m", "planner.cli", "probe", "--device", self.device, *quick, "-o", self.home / "profile.json")
        return {
            "exit_code": done.returncode,
            "said": done.stderr.strip().splitlines()[-1:] or done.stdout.strip().splitlines()[-1:],
        }

    def model(self) -> Path:
        """The model with as many of its layers as the host's memory allows."""
        from planner.workload import build_workload
        from runtime.memory import available_host_bytes
        from runtime.plan import Semantics

        path = self.home / "model.json"
        if not path.exists():
            config = dict(read_model(str(self.sizes.model)).config)
            whole = build_workload(read_model(str(self.sizes.model)), Semantics(self.sizes.seq_len, 1, 1))
            n_vocab = sum(p.n_elements for b in (whole.blocks[0], whole.blocks[-1]) for p in b.parameters if p.tied_to is None)
            n_layer = sum(p.n_elements for p in whole.blocks[1].parameters)
            most = MEMORY_SHARE * (available_host_bytes() or 0) / HOST_BYTES_PER_PARAM
            n_layers = min(int(config["num_hidden_layers"]), max(1, int((most - n_vocab) // n_layer)))
            path.write_text(json.dumps(config | {"num_hidden_layers": n_layers}))
        return path

    def plan(self, batch_size: int, policy: str) -> Path:
        path = self.home / f"{policy}-{batch_size}.plan.json"
        if not path.exists():
            profile = self.home / "profile.json"
            sizes = ("--seq-len", self.sizes.seq_len, "--batch-size", batch_size)
            if self.tiny:
                sizes += ("--micro-batch", 2, "--loss-tile-tokens", 16)
            machine = profile if profile.exists() else "cpu-2core"
            done = self._run(
                "-m",
                "planner.cli",
                "plan",
                self.model(),
                "--machine",
                machine,
                *sizes,
                "--policy",
                policy,
                "--runnable",
                "-o",
                path,
            )
            if done.returncode:
                raise SystemExit(f"{policy}, batch {batch_size}: {done.stderr.strip()}")
        return path

    def measured(self, system: str, batch_size: int, policy: str) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            words = (
                "--one",
                system,
                "--plan",
                self.plan(batch_size, policy),
                "--device",
                self.device,
                "--steps",
                self.sizes.n_steps,
            )
            done = self._run("-m", "benchmarks.gpu", *words)
            if done.returncode:
                (self.home / f"{name}.log").write_text(done.stderr)
                return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:160]}
            return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]

        name = f"{system}-{policy}-{batch_size}" if system == "penstock" else f"{system}-{batch_size}"
        return self.noted(name, measure)

    # -- the page -------------------------------------------------------------------------------------------------------

    def page(self) -> None:
        print(_machine_words(self.device))
        for name in ("tests", "probe"):
            if (path := self.home / f"{name}.result.json").exists():
                found = json.loads(path.read_text())
                print(f"\n{name}: {found['said']} (exit code {found['exit_code']})")
        print("\n| what | predicted, s | measured, s | error | tokens/s | of the bound | device peak, planned | steps |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
        for batch_size in self.sizes.batch_sizes:
            for policy in POLICIES:
                print(self._our_row(batch_size, policy))
            for system, name in (("fsdp2", "FSDP2, CPUOffloadPolicy"), ("zero3", "DeepSpeed ZeRO-3 offload")):
                print(self._their_row(batch_size, system, name))

    def _our_row(self, batch_size: int, policy: str) -> str:
        name = f"batch {batch_size}, {policy}"
        found = self._found(f"penstock-{policy}-{batch_size}")
        if "failed" in found:
            return f"| {name} | | {found['failed']} | | | | | |"
        file = PlanFile.read(self.plan(batch_size, policy))
        assert file.claim is not None
        predicted_s, bound_s = file.claim["prediction"]["step_s"], file.claim["certificate"]["machine_bound_s"]
        times_s = found["times_s"]
        step_s = median(times_s)
        peak, planned = found["device_peak_bytes"], found["device_planned_bytes"]
        memory = f"{peak / 1e9:.2f} GB, {planned / 1e9:.2f} GB" if peak is not None else f"{planned / 1e9:.3g} GB planned"
        n_tokens = file.plan.semantics.tokens_per_step
        return (
            f"| {name} | {predicted_s:.4g} | {step_s:.4g} | {step_s / predicted_s - 1:+.1%} | {n_tokens / step_s:,.0f} | "
            f"{bound_s / step_s:.0%} | {memory} | {len(times_s)} |"
        )

    def _their_row(self, batch_size: int, system: str, name: str) -> str:
        found = self._found(f"{system}-{batch_size}")
        if "failed" in found:
            return f"| batch {batch_size}, {name} | | {found['failed']} | | | | | |"
        step_s = median(found["times_s"])
        searched = self._found(f"penstock-search-{batch_size}")
        ratio = f" ({step_s / median(searched['times_s']):.2f} x the searched plan's)" if "failed" not in searched else ""
        n_tokens = batch_size * self.sizes.seq_len
        return f"| batch {batch_size}, {name} | | {step_s:.4g}{ratio} | | {n_tokens / step_s:,.0f} | | | {len(found['times_s'])} |"

    def _found(self, name: str) -> dict[str, Any]:
        path = self.home / f"{name}.result.json"
        return json.loads(path.read_text()) if path.exists() else {"failed": "not measured"}


def _machine_words(device: str) -> str:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout.strip()
    words = f"commit {commit or 'unknown'}; {platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"
    words += f", transformers {version('transformers')}"
    return words + (f"; {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}" if device == "cuda" else "; no GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", default=STAGES, help=f"of {', '.join(STAGES)}; all of them, in that order")
    parser.add_argument("--home", type=Path, default=Path("gpu-benchmark"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--limit-s", type=float, default=480.0, help="begin nothing after so long; one measurement lasts a minute or two"
    )
    parser.add_argument("--one", choices=("penstock", "fsdp2", "zero3"), help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.one, asked.plan, asked.steps, asked.device)))
        return
    if odd := set(asked.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(odd))}")
    benchmark = Benchmark(asked.home.resolve(), asked.device, asked.tiny, asked.limit_s)
    for stage in (stage for stage in STAGES if stage in asked.stages):
        match stage:
            case "tests":
                benchmark.noted("tests", benchmark.tests)
            case "probe":
                benchmark.noted("probe", benchmark.probe)
            case "plan":
                for batch_size in benchmark.sizes.batch_sizes:
                    for policy in POLICIES:
                        benchmark.plan(batch_size, policy)
            case "train":
                for batch_size in benchmark.sizes.batch_sizes:
                    for policy in POLICIES:
                        benchmark.measured("penstock", batch_size, policy)
            case "others":
                for batch_size in benchmark.sizes.batch_sizes:
                    for system in ("fsdp2", "zero3"):
                        benchmark.measured(system, batch_size, "search")
            case "page":
                benchmark.page()


if __name__ == "__main__":
    main()
