"""Cost of ignoring contention in a planner.

`python -m benchmarks.contention [MACHINE ...]` prints a page of Markdown. Two searches per machine and workload: on the machine in
its profile, and on a twin without shared resources (both directions of the link at once, unlimited host DRAM and host cores). The
plan of the second search is then costed on the real machine, with the model of the first.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.any_memory import with_any_memory
from penstock.hwprofiles.quantity import Share
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import read_model, supported_attention
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.predict.simulate import simulate
from penstock.planner.search.micro_batch import SIZES, sizes_of
from penstock.planner.search.search import search
from penstock.planner.search.tuning import MAX_STEPS
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.units import TB, show_seconds

MACHINES = ("gb300", "gh200", "b200", "h200-pcie5", "a100-sxm", "rtx5090-server", "rtx5090-desktop", "rtx4090-desktop")
SEQ_LEN = 4096
HOST_MEMORY_BYTES = 2 * TB  # on every machine, so that memory is not decisive
ENDLESS = 1e6  # factor on a capacity, so that it never binds
WORSE_FRACTION = 0.005  # five times the search's tolerance (CLOSE_FRACTION): worse, and not merely tied
HEAD = """
| machine | model | tokens | clipped | step | blind | worse by | promised | gap | with contention it picks |
|---|---|---:|---|---:|---:|---:|---:|---:|---|"""


@dataclass(frozen=True, slots=True)
class Work:
    """A training job. Without clipping, updates may overlap with the backward pass and share all resources."""

    model: str
    tokens_per_step: int
    clip_norm: float | None


WORKLOADS = (
    Work("qwen3-8b", 16384, None),
    Work("qwen3-8b", 32768, 1.0),
    Work("qwen3-30b-a3b", 32768, None),
    Work("qwen2.5-72b", 8192, None),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One machine and workload: step times of the plans found with and without contention."""

    machine: str
    work: Work
    step_s: float
    blind_step_s: float  # in the full model
    promised_s: float  # in the model without contention
    gap_fraction: float  # of the search with contention: upper bound on any further gain
    changed: tuple[str, ...]

    @property
    def worse_fraction(self) -> float:
        return self.blind_step_s / self.step_s - 1

    @property
    def late_fraction(self) -> float:
        return self.blind_step_s / self.promised_s - 1

    def __str__(self) -> str:
        job = (
            self.machine,
            self.work.model,
            f"{self.work.tokens_per_step // 1024}k",
            "no" if self.work.clip_norm is None else "yes",
        )
        seconds = (show_seconds(self.step_s), show_seconds(self.blind_step_s))
        shares = (f"{self.worse_fraction:+.1%}", show_seconds(self.promised_s), f"{self.gap_fraction:.1%}")
        return "| " + " | ".join((*job, *seconds, *shares, "; ".join(self.changed) or "the same plan")) + " |"


def unshared(profile: Profile) -> Profile:
    """Return the machine without contention, at the same speed per op."""
    free = faster(profile, {Group.DUPLEX: ENDLESS, Group.DRAM: ENDLESS})
    none = Share(value=0.0, spread_fraction=0.0, source=profile.link.host_cores_per_copy.source)
    return free.model_copy(update={"link": free.link.model_copy(update={"host_cores_per_copy": none})})


def compared(machine: str, work: Work) -> Row | None:
    """Return the comparison, or None if the model does not fit."""
    model, profile = read_model(work.model), with_any_memory(read_profile(machine), None, HOST_MEMORY_BYTES)
    attention = supported_attention(model)[0]
    n_sequences = work.tokens_per_step // SEQ_LEN
    request = Semantics(SEQ_LEN, n_sequences, 1, clip_norm=work.clip_norm, attention=attention)  # type: ignore[arg-type]

    try:
        seeing = search(model, sizes_of(model, request, profile), profile, free=SIZES)
        semantics, workload = seeing.plan.semantics, seeing.plan.workload
        blind = search(model, [(semantics, workload)], unshared(profile), free=SIZES)
    except DoesNotFitError:
        return None
    plan = lower(model, workload, semantics, blind.plan.policy, profile.to_json())
    real = simulate(plan, CostModel(profile).demands(plan), region_of(profile), MAX_STEPS)
    steps_s = (seeing.prediction.step_s, real.step_s, blind.prediction.step_s)
    changed = tuple(_differences(seeing.plan.policy, blind.plan.policy))
    return Row(machine, work, *steps_s, seeing.certificate.gap_fraction, changed)


def _differences(seeing: Policy, blind: Policy) -> Iterator[str]:
    """Yield the fields that differ between two policies. Lists of blocks are shown by length."""
    blind_fields = asdict(blind)
    for name, value in asdict(seeing).items():
        if value != blind_fields[name]:
            yield f"{name.replace('_', ' ')} {_short(value)}, not {_short(blind_fields[name])}"


def _short(value: object) -> str:
    return str(len(value)) if isinstance(value, tuple | list | dict) else str(value)


def page(rows: list[Row], seconds: float) -> Iterator[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    yield "# Cost of ignoring contention in a planner\n"
    yield "Command: `python -m benchmarks.contention > docs/benchmarks/contention_2026-11-20.md`.\n"
    yield f"Commit {commit}. Computed in {seconds:.0f} s of one of {os.cpu_count()} cores, {platform.machine()}, Python"
    yield f"{platform.python_version()}. Predicted on both sides: nothing here was measured on these machines.\n"
    yield "The search runs twice: with contention, and on a twin of the machine without shared resources, at the same"
    yield "speed per op (both directions of the link at once, unlimited host DRAM and host cores). *Step* is the first plan;"
    yield "*blind* is the second, costed by the full model on the real machine; *promised* is its prediction in the model"
    yield "without contention. *Gap* is the certificate of the search with contention: no policy of the space is better by more."
    yield f"Sequences of {SEQ_LEN} tokens, 2 TB of host memory. Without clipping an update may overlap with the backward."
    yield HEAD
    yield from map(str, rows)
    yield ""
    yield from _summary(rows)


def _summary(rows: list[Row]) -> Iterator[str]:
    for least in (0.0005, WORSE_FRACTION):
        worse = [row for row in rows if row.worse_fraction > least]
        machines = [name for name in dict.fromkeys(row.machine for row in rows) if name in {row.machine for row in worse}]
        yield f"- Picked without contention, the plan is worse by more than {least:.2%} in {len(worse)} of {len(rows)} cases, on"
        yield f"  {len(machines)} machines: {', '.join(machines) or 'none'}."
    n_same = sum(not row.changed for row in rows)
    yield f"- At worst it is {max(row.worse_fraction for row in rows):.1%} slower. In {n_same} cases it is the same plan."
    late = sorted(row.late_fraction for row in rows)
    yield f"- The prediction without contention is exceeded by {late[len(late) // 2]:.1%} in the median and"
    yield f"  {late[-1]:.1%} at worst, when its plan is run.\n"
    yield "This page does not validate the full model (the ledger does). Part of *worse by* is chance: plans that only differ"
    yield "under contention are equal to the blind search, which takes the first of them."


def main() -> None:
    rows = []
    for machine in sys.argv[1:] or MACHINES:
        for work in WORKLOADS:
            row = compared(machine, work)
            print(row or f"{work.model} does not fit {machine}", file=sys.stderr, flush=True)
            rows += [row] if row else []
    print("\n".join(page(rows, time.process_time())))


if __name__ == "__main__":
    main()
