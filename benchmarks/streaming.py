"""Streaming against the same model resident.

`python -m benchmarks.streaming` prints a page of Markdown: steps of a streamed model and of a plain PyTorch loop with everything in
memory and the same checkpointed layers, in interleaved pairs on the same cores.
"""

# N tokens of a micro-batch, V vocabulary
import argparse
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import provenance
from benchmarks.small import CONFIG
from penstock.hwprofiles.schema import read_profile
from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload
from penstock.runtime.batch import Batch
from penstock.runtime.executor import execute
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.machines.lanes import CpuDevice
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Policy, Semantics, Update
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.workload import Model

N_PAIRS = 5
STEPS_PER_TURN = 1  # for each, after a warm-up step
SETTINGS = AdamW(lr=1e-4)
POLICY = Policy(update=Update.DEFERRED)  # PyTorch's checkpointing also stops recompute early


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes, precision, and cores for compute, and for copies and optimizer."""

    compute_dtype: str
    seq_len: int
    batch_size: int
    micro_batch: int
    compute_cores: tuple[int, ...]
    host_cores: tuple[int, ...]

    @property
    def semantics(self) -> Semantics:
        dtype, sizes = self.compute_dtype, (self.seq_len, self.batch_size, self.micro_batch)
        return Semantics(*sizes, gradient_dtype=dtype, compute_dtype=dtype, attention="sdpa")  # type: ignore[arg-type]


class Resident:
    """Plain loop: transformers' model and gradient checkpointing, fp32 masters, clipping and PyTorch's fused AdamW."""

    def __init__(self, case: Case, batch: Batch) -> None:
        self.case, self.batch = case, batch
        config, dtype = AutoConfig.for_model(**CONFIG), DTYPE[case.compute_dtype]
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.weights = list(self.model.parameters())
        self.masters = [w.detach().float().clone() for w in self.weights] if dtype is not torch.float32 else self.weights
        self.optimizer = torch.optim.AdamW(self.masters, lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay, fused=True)

    def step(self) -> float:
        """Run one step. Return the mean loss."""
        n_supervised = int((self.batch.targets != -100).sum())
        total = 0.0
        for rows in torch.arange(self.case.batch_size).split(self.case.micro_batch):
            logits_NV = self.model(input_ids=self.batch.input_ids[rows], use_cache=False).logits.flatten(0, 1).float()
            loss = F.cross_entropy(logits_NV, self.batch.targets[rows].flatten(), ignore_index=-100, reduction="sum") / n_supervised
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            if self.masters is not self.weights:
                for master, weight in zip(self.masters, self.weights, strict=True):
                    assert weight.grad is not None
                    master.grad, weight.grad = weight.grad.float(), None
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.masters is not self.weights:
                for master, weight in zip(self.masters, self.weights, strict=True):
                    weight.copy_(master)
        return total


def batch_of(case: Case) -> Batch:
    """Return random tokens with the next token as target."""
    tokens = torch.randint(0, CONFIG["vocab_size"], (case.batch_size, case.seq_len), generator=torch.Generator().manual_seed(0))
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    return Batch(tokens, targets)


def streamed(case: Case, batch: Batch) -> TorchMachine:
    """Return a machine with the streamed model and seeded weights."""
    model = Model(CONFIG)
    semantics = case.semantics
    policy = replace(POLICY, accumulation_group=semantics.n_micro_batches)
    plan = lower(model, build_workload(model, semantics), semantics, policy, read_profile("cpu-2core").to_json())
    check(plan)
    device = CpuDevice(pin_threads=True, cores=(list(case.compute_cores), list(case.host_cores)))
    machine = TorchMachine(plan, lambda step: batch, lambda step: SETTINGS, n_workers=1, device=device)
    machine.initialise(0)
    return machine


def on_cores(cores: Sequence[int], work: Callable[[], None]) -> None:
    """Run work in a thread pinned to these cores, with one compute thread per core."""

    def placed() -> None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        work()

    thread = threading.Thread(target=placed)
    thread.start()
    thread.join()


def pairs(case: Case, n_pairs: int) -> tuple[list[float], list[float]]:
    """Return mean seconds per step of each turn, streamed and resident."""
    batch = batch_of(case)
    machine, resident = streamed(case, batch), Resident(case, batch)
    streamed_s, resident_s, n_done = list[float](), list[float](), 0

    def resident_turn() -> None:
        resident.step()
        began_s = time.perf_counter()
        for _ in range(STEPS_PER_TURN):
            resident.step()
        resident_s.append((time.perf_counter() - began_s) / STEPS_PER_TURN)

    for _ in range(n_pairs):
        timeline = execute(machine.plan, machine, 1 + STEPS_PER_TURN, n_done)
        n_done += 1 + STEPS_PER_TURN
        streamed_s.append(sum(timeline.step_times_s[-STEPS_PER_TURN:]) / STEPS_PER_TURN)
        on_cores(sorted({*case.compute_cores, *case.host_cores}), resident_turn)
    return streamed_s, resident_s


def row(case: Case, streamed_s: Sequence[float], resident_s: Sequence[float]) -> str:
    """Format one row of the table."""
    ratios = sorted(a / b for a, b in zip(streamed_s, resident_s, strict=True))
    n_tokens = case.seq_len * case.batch_size
    cores = sorted({*case.compute_cores, *case.host_cores})
    return (
        f"| {case.compute_dtype} | {n_tokens} in {case.batch_size // case.micro_batch} | {len(cores)} | {median(streamed_s):.3f} | "
        f"{median(resident_s):.3f} | **{median(ratios):.3f}** | {ratios[0]:.3f} to {ratios[-1]:.3f} |"
    )


def cases(cores: Sequence[int]) -> Iterable[Case]:
    """Yield cases with all work on one core, and with compute on all cores."""
    for dtype, micro_batch in (("fp32", 4), ("bf16", 4), ("bf16", 1)):
        yield Case(dtype, 512, 4, micro_batch, (cores[0],), (cores[0],))
    if len(cores) > 1:
        for dtype in ("fp32", "bf16"):
            yield Case(dtype, 512, 4, 4, tuple(cores), tuple(cores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=N_PAIRS)
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    arguments = parser.parse_args()
    print(f"{provenance()}\n")
    print("| compute | tokens in micro-batches | cores | streamed, s | resident, s | ratio | lowest to highest |")
    print("|---|---|---:|---:|---:|---:|---|")
    for case in cases(sorted(os.sched_getaffinity(0))):
        if arguments.dtype in (None, case.compute_dtype):
            print(row(case, *pairs(case, arguments.pairs)), flush=True)


if __name__ == "__main__":
    main()
