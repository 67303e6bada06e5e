"""Plans that change when profiles change.

    python -m benchmarks.decisions -o after.json            # in this tree; in another one: the same, before.json
    python -m benchmarks.decisions before.json after.json > docs/benchmarks/decisions_DATE.md

Five model sizes on nine machines, 4096 tokens a sequence, 16 sequences per GPU, 2 TB of host memory unless it is soldered. Policy
and speed are found with each tree's profiles and costs. Some five minutes of two cores per tree.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import penstock
from benchmarks.any_memory import with_any_memory
from penstock.hwprofiles.schema import read_profile
from penstock.runtime.errors import PenstockError
from penstock.runtime.units import TB

MODELS = ("qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b", "qwen3-32b", "llama-3.1-70b")
MACHINES = ("h100-sxm", "h200-pcie5", "gh200", "b200", "gb300", "rtx4090-server", "rtx5090-server", "8xh100", "8xrtx4090")
PER_GPU, SEQ_LEN = 16, 4096

Cell = dict[str, Any]


def cell(name: str, machine: str) -> Cell:
    """Return one plan's speed and policy, or the reason without a plan."""
    profile = with_any_memory(read_profile(machine), None, 2 * TB)
    n = profile.n_devices if machine[0].isdigit() else 1
    where = {"model": name, "machine": machine}
    try:
        plan = penstock.plan(name, profile, seq_len=SEQ_LEN, batch_size=PER_GPU * n, gpus=n)
    except PenstockError as error:
        return where | {"why_not": str(error)}
    gap, sizes = plan.certificate.gap_fraction, plan.plan.semantics
    chosen = {"micro_batch": sizes.micro_batch, "attention": sizes.attention_kernel} | policy_in_numbers(asdict(plan.plan.policy))
    return where | {"tokens_per_s": sizes.all_ranks.tokens_per_step / plan.step_s, "gap_fraction": gap, "chosen": chosen}


def policy_in_numbers(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy with counts in place of lists of blocks."""
    counted: dict[str, Any] = {}
    for key, value in policy.items():
        if key == "save":
            for kind in map(str, value):
                counted[f"save {kind}"] = counted.get(f"save {kind}", 0) + 1
        else:
            counted[key] = len(value) if isinstance(value, list | tuple | set | frozenset) else value
    return counted


def page(old_cells: list[Cell], new_cells: list[Cell]) -> Iterator[str]:
    """Yield a table of both trees with the changes."""
    yield "| model | machine | tokens/s before | after | | gap before | after | changes |"
    yield "|---|---|--:|--:|--:|--:|--:|---|"
    known = {(c["model"], c["machine"]): c for c in old_cells}
    for new in new_cells:
        old = known[new["model"], new["machine"]]
        head = f"| {new['model']} | {new['machine']} |"
        if "why_not" in new or "why_not" in old:
            yield f"{head} {_rate(old)} | {_rate(new)} | | | | |"
            continue
        change = new["tokens_per_s"] / old["tokens_per_s"] - 1
        gaps = f"{old['gap_fraction']:.1%} | {new['gap_fraction']:.1%}"
        yield f"{head} {_rate(old)} | {_rate(new)} | {change:+.0%} | {gaps} | {'; '.join(_changes(old['chosen'], new['chosen']))} |"


def _rate(c: Cell) -> str:
    return "does not fit" if "why_not" in c else f"{c['tokens_per_s']:,.0f}"


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            yield f"{key.replace('_', ' ')}: {old.get(key, 0)} → {new.get(key, 0)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("-o", dest="output", type=Path)
    arguments = parser.parse_args()
    if arguments.files:
        old_cells, new_cells = (json.loads(path.read_text()) for path in arguments.files)
        print("\n".join(page(old_cells, new_cells)))
        return
    names, machines = zip(*product(MODELS, MACHINES), strict=True)
    with ProcessPoolExecutor(os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()) as pool:
        cells = list(pool.map(cell, names, machines))
    text = json.dumps(cells, indent=1)
    print(text) if arguments.output is None else arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
