"""Does everything come out as it did before a change that was to change nothing?

`python -m tests.replay write FILE` before the first change, `python -m tests.replay compare FILE` after every one, on one machine:
digests of the text of two thousand plans, of policy, step and bounds over the benchmark's grid, and of what the demo's model has
become after some steps. The bits of a training differ from processor to processor, so the file is not kept.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from hypothesis import HealthCheck, Phase, given, settings

from benchmarks import grid
from benchmarks.small import CONFIG
from tests.running import SCRATCH
from tests.strategies import Case, cases

N_PLANS = 2000
PENSTOCK = Path(sys.executable).with_name("penstock")
# Ways to train the demo's model that touch every part of a step
POLICIES: dict[str, dict[str, Any]] = {
    "searched": {},
    "lean": {"accumulation_group": 2, "spill_blocks": [0, 1, 2, 3], "prefetch_depth": 1, "gradient_slots": 1},
    "early": {
        "update": "deferred",
        "accumulation_group": 4,
        "save": {"all": [11, 12]},
        "speculate_blocks": [2, 5],
        "square_blocks": [3],
    },
}


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def plans() -> str:
    """Of plans of random legal cases, always the same ones."""
    found: list[str] = []

    @settings(max_examples=N_PLANS, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(cases())
    def look(case: Case) -> None:
        found.append(str(case.plan))

    look()
    return f"{len(found)} plans {digest(chr(10).join(found))}"


def searched(of: tuple[str, str, int]) -> tuple[str, str]:
    """Of one cell of the grid."""
    answer = grid.searched(*of).answer
    if isinstance(answer, str):
        return " ".join(map(str, of)), answer
    said = [answer.plan.policy, answer.step_s, answer.certificate.policy_bound_s, answer.certificate.machine_bound_s]
    return " ".join(map(str, of)), digest(repr(said))


def trained(folder: Path) -> Iterator[tuple[str, str]]:
    """Of what some steps of training leave: weights, masters, moments, and what was done when."""
    model, data = folder / "model", folder / "text.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    data.write_text("".join(json.dumps({"text": f"{n} and {n * n} are {n} squared, and so on. " * 9}) + "\n" for n in range(300)))
    for name, policy in POLICIES.items():
        plan, out = folder / f"{name}.json", folder / name
        (folder / "policy.json").write_text(json.dumps(policy))
        chosen = ["--policy", folder / "policy.json"] if policy else []
        sizes = ["--seq-len", 128, "--batch-size", 8, "--micro-batch", 2]
        _penstock("plan", model, "--machine", "cpu-2core", *sizes, *chosen, "-o", plan)
        _penstock("run", plan, "--data", data, "--steps", 3, "--save-every", 3, "--out", out, *SCRATCH)
        for file in sorted((out / "checkpoint-3").iterdir()):
            yield f"{name} {file.name}", digest(file.read_bytes())
        spans = json.loads((out / "timeline.json").read_text())["spans"]
        yield f"{name} timeline", digest(json.dumps(sorted([span["step"], span["op"]] for span in spans)))


def _penstock(*args: object) -> None:
    subprocess.run([PENSTOCK, *map(str, args)], check=True, stdout=subprocess.DEVNULL)


def digests() -> dict[str, str]:
    with ProcessPoolExecutor(2) as pool, TemporaryDirectory() as folder:
        of_grid = pool.map(searched, product(grid.MODELS, grid.MACHINES, grid.TOKENS_PER_STEP))
        return {"plans": plans(), **dict(trained(Path(folder))), **dict(of_grid)}


@click.command()
@click.argument("what", type=click.Choice(["write", "compare"]))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def main(what: str, file: Path) -> None:
    """Write the digests, or compare them with those written before; what differs is named."""
    found = digests()
    if what == "write":
        file.write_text(json.dumps(found, indent=1))
        return
    before = json.loads(file.read_text())
    differing = sorted(name for name in {*before, *found} if before.get(name) != found.get(name))
    print(f"{len(found)} digests, {len(differing)} differ", *differing, sep="\n")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
