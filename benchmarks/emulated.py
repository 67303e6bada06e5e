"""Emulated runs against the simulator: step times, and the speed-up of searched plans.

`python -m benchmarks.emulated` prints a page of Markdown: plans of models with 24 to 80 layers, for three other machines, run at
their pace, slowed until the median op lasts 20 ms. A quarter of an hour on two quiet cores; `--only` selects rows. `--replanned`
prints what comes back of the time that plans from a wrong profile lose, with the measured times of a run.
"""

import argparse
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import penstock
from benchmarks.any_memory import with_any_memory
from benchmarks.common import provenance
from benchmarks.small import write_sources
from penstock.emulated import MEDIAN_OP_S
from penstock.hwprofiles.schema import read_profile
from penstock.planner.predict.abridged import WARM_UP_STEPS
from penstock.planner.predict.cost import costs
from penstock.planner.predict.measured import op_ratios
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.runtime.plan import Plan, PlanFile, Policy, saves
from penstock.runtime.plan.timeline import Timeline
from penstock.runtime.plan.workload import Saved
from penstock.runtime.units import TB

N_STEPS = 7  # two are warm-up: five steps, end to end, are compared
MOST_OVER_PREDICTION, MOST_OFF_RATIO = 1.03, 0.05
AGAINST = ("search", "megatrain")


@dataclass(frozen=True, slots=True)
class Cell:
    """A model on a machine, and policies to run: names, or fields of a policy file."""

    model: str
    machine: str
    sizes: dict[str, int]
    policies: tuple[str | dict[str, object], ...] = AGAINST


# For the 66 blocks of qwen2.5-32b: also features that the search does not choose on these machines.
SPECULATES: dict[str, object] = {"update": "deferred", "speculate_blocks": [*range(0, 66, 2)], "save": saves(all=range(1, 33))}
SPILLS: dict[str, object] = {"update": "deferred", "spill_blocks": [*range(64)], "prefetch_depth": 2, "resident_blocks": [3, 9, 20]}
EVERYTHING: dict[str, object] = {**SPILLS, "speculate_blocks": [*range(0, 66, 2)], "save": saves(products=range(1, 65, 4))}
LEAVES: dict[str, object] = {
    "update": "deferred", "gradient_slots": 2, "save": saves(products=range(1, 49)), "offload_blocks": (*range(1, 49),),
}  # fmt: skip
SHORT, TWICE = ({"seq_len": 1024, "batch_size": n, "micro_batch": 4} for n in (4, 8))
CELLS = (
    Cell("qwen2.5-0.5b", "h200-pcie5", SHORT),
    Cell("qwen2.5-14b", "gh200", TWICE),
    Cell("qwen2.5-32b", "h200-pcie5", SHORT),
    Cell("qwen2.5-72b", "rtx4090-server", SHORT),
    Cell("qwen2.5-32b", "h200-pcie5", SHORT, (SPECULATES, SPILLS, EVERYTHING)),
    *(Cell("qwen2.5-14b", machine, TWICE, (LEAVES,)) for machine in ("gh200", "h200-pcie5", "rtx4090-server")),
    *(Cell("qwen2.5-7b", machine, SHORT) for machine in ("h100-sxm", "h200-pcie5", "b200")),  # state on the device
    *(  # the first of several ranks
        Cell(model, machine, {"seq_len": 2048, "batch_size": 8 * n, "sum_groups": 8, "gpus": n}, ("search",))
        for model, machine, n in (("llama-3.1-8b", "8xh100", 8), ("llama-3.1-8b", "8xrtx4090", 4), ("qwen2.5-7b", "h200-pcie5", 2))
    ),
)


def named(policy: str | dict[str, object]) -> str:
    """Return a policy in a few words."""
    if isinstance(policy, str):
        return policy
    words = {"speculate": "speculates", "spill": "spills", "resident": "resident", "offload": "offloads"}
    return ", ".join(word for name, word in words.items() if f"{name}_blocks" in policy)


def used(policy: Policy) -> str:
    """Return the features of a policy, with the number of their blocks."""
    kinds = {f"{kind} saved": policy.saving(kind) for kind in Saved if kind is not Saved.INPUT}
    lists = kinds | {name.removesuffix("_blocks"): blocks for name, blocks in asdict(policy).items() if name.endswith("_blocks")}
    return ", ".join([str(policy.update), *(f"{len(blocks)} {name}" for name, blocks in lists.items() if blocks)])


def time_scale(plan: Plan, profile: penstock.Profile) -> float:
    """Return the slowdown that gives the median op its target duration. Below 1 for slow machines."""
    return MEDIAN_OP_S / median(demand.uncontended_s for demand in costs(plan, profile))


@dataclass(frozen=True, slots=True)
class Row:
    """One measured policy of a cell."""

    cell: Cell
    policy: str
    n_layers: int
    n_ops: int
    scale: float
    late_fraction: float  # share of ops with real work longer than the emulated op
    uses: str
    predicted_s: float
    times_s: list[float]  # of steps after warm-up, in the planned machine's time

    @property
    def over_prediction(self) -> float:
        return median(self.times_s) / self.predicted_s

    def line(self) -> str:
        return (
            f"| {self.cell.model}, {self.n_layers} layers | {self.cell.machine} | {self.policy} | {self.uses} | {self.n_ops} | "
            f"{self.scale:.3g} | {self.predicted_s:.4g} | {median(self.times_s):.4g} | {self.over_prediction - 1:+.2%} | "
            f"{min(self.times_s):.4g} to {max(self.times_s):.4g} | {self.late_fraction:.1%} |"
        )


def performed(cell: Cell, policy: str | dict[str, object], home: Path, n_steps: int) -> Row:
    """Plan, run at the machine's pace, and compare."""
    name = named(policy)
    requested = Policy(**policy) if isinstance(policy, dict) else None if policy == "search" else policy
    planned = penstock.plan(cell.model, with_any_memory(read_profile(cell.machine), None, 2 * TB), policy=requested, **cell.sizes)
    plan, scale = planned.plan, time_scale(planned.plan, planned.profile)
    out = home / "out"
    options = {"out": out, "steps": n_steps, "device": "emulated", "time_scale": scale}
    trained = penstock.train(planned, home / "data.jsonl", **options)
    shutil.rmtree(out)
    uses, n_layers, times_s = used(plan.policy), len(plan.workload.blocks) - 2, trained.timeline.step_times_s[1:]
    return Row(cell, name, n_layers, len(plan.ops), scale, trained.late_fraction, uses, planned.step_s, times_s)


# Real speeds relative to the profile that makes the first plan
WRONG = dict.fromkeys((Group.MATMUL, Group.ATTENTION, Group.DEVICE_MEMORY), 0.8) | {Group.OPTIMIZER: 1.5}
WRONG |= dict.fromkeys((Group.UPLOAD, Group.DOWNLOAD, Group.DUPLEX), 0.6)
REPLANNED = (("qwen2.5-7b", "rtx4090-server"), ("llama-3.2-1b", "rtx4090-desktop"))


def replanned(model: str, machine: str, home: Path, n_steps: int) -> str:
    """Plan from a wrong profile, run on the emulated real machine, plan again with the measured ratios, and run that plan. Return a
    row: predictions and measurements, and those of the best plan for the real machine."""
    profile = with_any_memory(read_profile(machine), None, 2 * TB)
    real, sizes = faster(profile, WRONG), {"seq_len": 2048, "batch_size": 16}
    first = penstock.plan(model, profile, **sizes)
    sizes |= {name: getattr(first.plan.semantics, name) for name in ("micro_batch", "loss_tile_tokens", "mlp_tile_tokens")}
    best = penstock.plan(model, real, **sizes)

    def measured(plan: Plan) -> Timeline:
        performed = PlanFile(replace(plan, profile=real.to_json()), None)
        options = {"out": home / "out", "steps": n_steps, "device": "emulated", "time_scale": time_scale(best.plan, real)}
        trained = penstock.train(performed, home / "data.jsonl", **options)
        shutil.rmtree(home / "out")
        return trained.timeline.from_step(WARM_UP_STEPS)

    timeline = measured(first.plan)
    with_ratios = profile.model_copy(update={"op_ratios": op_ratios(first.plan, timeline)})
    again = penstock.plan(model, with_ratios, **sizes)
    lost_s, again_s, best_s = (median(t.step_times_s) for t in (timeline, measured(again.plan), measured(best.plan)))
    back = (lost_s - again_s) / (lost_s - best_s)
    steps = " | ".join(f"{s:.4g}" for s in (first.step_s, lost_s, again.step_s, again_s, best_s))
    return f"| {model} | {machine} | {steps} | {1 - again_s / lost_s:.1%} | {back:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=N_STEPS)
    parser.add_argument("--only", help="rows with this word in model, machine or policy")
    parser.add_argument("--replanned", action="store_true", help="only plans from a wrong profile, and again with measured times")
    options = parser.parse_args()
    print(f"{provenance()}\n")
    if options.replanned:
        with tempfile.TemporaryDirectory() as folder:
            write_sources(Path(folder) / "data.jsonl")
            print("| model | machine | promised, s | measured, s | again, promised | measured | best | gain | of the lost |")
            print("|---|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
            for model, machine in REPLANNED:
                print(replanned(model, machine, Path(folder), options.steps), flush=True)
        return
    print("| model | machine | policy | uses | ops | slower | predicted, s | measured, s | over | range | real binds |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---|---:|", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder) / "data.jsonl")
        for cell in CELLS:
            for policy in cell.policies:
                if options.only is None or options.only in f"{cell.model} {cell.machine} {named(policy)}":
                    rows.append(performed(cell, policy, Path(folder), options.steps))
                    print(rows[-1].line(), flush=True)
    over = median(row.over_prediction for row in rows)
    print(f"\nMeasured over predicted: {over:.4f} in the median of {len(rows)} policies; asked: at most {MOST_OVER_PREDICTION}.")
    off = [ratio_off(rows, cell) for cell in CELLS]
    sys.exit(over > MOST_OVER_PREDICTION or any(abs(x) > MOST_OFF_RATIO for x in off))


def ratio_off(rows: list[Row], cell: Cell) -> float:
    """Return the relative error of the predicted ratio of two policies; 0 if only one was run."""
    by_policy = {row.policy: row for row in rows if row.cell == cell and row.policy in AGAINST}
    if len(by_policy) < len(AGAINST):
        return 0.0
    searched, baseline = (by_policy[name] for name in AGAINST)
    predicted, measured = baseline.predicted_s / searched.predicted_s, median(baseline.times_s) / median(searched.times_s)
    off = measured / predicted - 1
    where = f"{cell.model} on {cell.machine}"
    print(f"{where}: searched {measured:.3f} times as fast as megatrain, predicted {predicted:.3f} ({off:+.2%}).")
    return off


if __name__ == "__main__":
    main()
