"""Replay: digests of plans, reports, error lines and trained states, to prove that a refactoring changed no behaviour.

Run `python -m tests.replay write FILE` before the first change and `python -m tests.replay compare FILE` after each, on the same
machine. Digests cover the text of 2,000 plans; policy, step and bounds over the grid; outputs of `plan` and `report` for ten plans;
fifty error lines; and the demo's model after some steps: full training, adapters, two ranks. The file is not committed, because
trained bits depend on the processor.
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
# Policies of the demo's model that use every part of a step
POLICIES: dict[str, dict[str, Any]] = {
    "searched": {},
    "lean": {"accumulation_group": 2, "spill_blocks": [0, 1, 2, 3], "prefetch_depth": 1, "gradient_slots": 1},
    "early": {
        "update": "deferred",
        "accumulation_group": 4,
        "save": {"all": [11, 12]},
        "speculate_blocks": [2, 5],
        "square_on_device": True,
    },
}
# Arguments of `plan`
REPORTED = """
qwen2.5-0.5b --machine h100-sxm --seq-len 512 --batch-size 8
qwen2.5-0.5b --machine gh200 --seq-len 512 --batch-size 8
qwen2.5-0.5b --machine rtx4090-desktop --seq-len 512 --batch-size 8
qwen2.5-0.5b --machine gb10 --seq-len 512 --batch-size 8
llama-3.1-8b --machine b200 --batch-size 8
llama-3.1-8b --machine rtx5090-server --batch-size 8 --kernels eager
qwen3-4b --machine 8xh100 --gpus 4 --batch-size 16
qwen3-4b --machine 8xh100 --gpus 8 --hosts 2 --network-gbit 400 --batch-size 32
qwen2.5-7b --machine rtx4090-server --train lora --base nf4 --batch-size 4
smollm2-360m --machine mi355x --policy zero3-offload --tokens 10M
""".strip().splitlines()
# Commands that fail, by common prefix; MODEL, PLAN, DATA and HOME are replaced by existing paths, and PLAN is a plan of MODEL
REFUSALS = {
    "plan": "nobody --machine h100-sxm | MODEL --machine h1000 | MODEL --machine / | MODEL | HOME --machine h100-sxm",
    "plan MODEL --machine cpu-2core": (
        "--seq-len 0 | --batch-size -1 | --micro-batch 3 --batch-size 8 | --kernels odd | --policy nobody | --policy DATA | "
        "--device-memory 1KB | --host-memory 1KB | --host-memory big | --train lora:r=0 | --train lora:targets=nobody | "
        "--train nothing.* | --base nf4 | --gpus 0 | --hosts 2 | --network-gbit 400 | --clip-norm -1 | --master int8 | "
        "--compute fp8 | --tokens many | -o HOME/no/such/folder.json | --sum-groups 3 --batch-size 8 | --attention none"
    ),
    "check": "nothing.json | DATA | HOME",
    "report": "nothing.json -o x.html | DATA -o x.html",
    "compare": "MODEL --machines odd | MODEL",
    "fits": "odd",
    "data": "nothing --model MODEL | DATA --model nobody",
    "merge": "MODEL HOME --out HOME/merged | MODEL nothing --out x",
    "run PLAN --model MODEL": "--data nothing | --data DATA | --data HOME --from-scratch",
    "run PLAN --model MODEL --data DATA": "--from-scratch --resume HOME | --steps 0 | --lr -1 | --config DATA | --monitor odd",
    "run PLAN --model MODEL --config nothing.yaml": "--data DATA",
    "run PLAN --model MODEL --data DATA --from-scratch --tokenizer bytes": "--device odd | --out PLAN",
    "run": "DATA --data DATA | PLAN | nothing.json --data DATA",
    "odd": "",
    "probe": "--device odd | --host-memory odd",
}
REFUSED = [f"{begin} {rest}".strip() for begin, rests in REFUSALS.items() for rest in rests.split(" | ")]
ADAPTED, RANKED = ("--train", "lora:r=4,alpha=8"), ("--gpus", 2)


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def plans() -> str:
    """Return the digest of plans of random legal cases, derandomized."""
    texts: list[str] = []

    @settings(max_examples=N_PLANS, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(cases())
    def look(case: Case) -> None:
        texts.append(str(case.plan))

    look()
    return f"{len(texts)} plans {digest(chr(10).join(texts))}"


def searched(cell: tuple[str, str, int]) -> tuple[str, str]:
    """Return name and digest of one cell of the grid."""
    answer = grid.searched(*cell).answer
    if isinstance(answer, str):
        return " ".join(map(str, cell)), answer
    results = [answer.plan.policy, answer.step_s, answer.certificate.policy_bound_s, answer.certificate.machine_bound_s]
    return " ".join(map(str, cell)), digest(repr(results))


def reported(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield digests of ten plans as text, as JSON and as a page."""
    for i, arguments in enumerate(REPORTED):
        plan, page = folder / f"reported-{i}.json", folder / f"reported-{i}.html"
        yield f"text of {arguments}", digest(_output("plan", *arguments.split(), "-o", plan).stdout)
        yield f"fields of {arguments}", digest(plan.read_bytes())
        _penstock("report", plan, "-o", page)
        yield f"page of {arguments}", digest(page.read_bytes())


def refused(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield, for each failing command, exit code and number of lines, and separately a digest of the message."""
    model, data, plan = _home(folder / "refused")
    _penstock("plan", model, "--machine", "cpu-2core", *SIZES, "-o", plan)
    paths = {"MODEL": model, "DATA": data, "PLAN": plan, "HOME": folder / "refused"}
    for line in REFUSED:
        words = " ".join(line.split())
        for name, path in paths.items():
            words = words.replace(name, str(path))
        run = _output(*words.split())
        yield f"refused {line}", f"{run.returncode}, {run.stderr.count(chr(10))} lines, traceback {'Traceback' in run.stderr}"
        yield f"words of {line}", digest(run.stderr.replace(str(folder), "FOLDER"))


SIZES = ("--seq-len", 128, "--batch-size", 8, "--micro-batch", 2)


def _home(folder: Path) -> tuple[Path, Path, Path]:
    """Write a model and training text; return their paths, and a path for a plan."""
    model, data = folder / "model", folder / "text.jsonl"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    data.write_text("".join(json.dumps({"text": f"{n} and {n * n} are {n} squared, and so on. " * 9}) + "\n" for n in range(300)))
    return model, data, folder / "plan.json"


def trained(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield digests of runs: files of the checkpoint, and the ops of the timeline by step."""
    model, data, plan = _home(folder / "trained")
    ways: dict[str, tuple[object, ...]] = {"adapter": ADAPTED, "two ranks": RANKED}
    for name, policy in POLICIES.items():
        file = folder / f"policy-{name}.json"
        file.write_text(json.dumps(policy))
        ways[name] = ("--policy", file) if policy else ()
    for name, chosen in ways.items():
        out = folder / name
        _penstock("plan", model, "--machine", "cpu-2core", *SIZES, *chosen, "-o", plan)
        _penstock("run", plan, "--data", data, "--steps", 3, "--save-every", 3, "--out", out, *SCRATCH)
        for path in sorted((out / "checkpoint-3").iterdir()):
            yield f"{name} {path.name}", digest(path.read_bytes()) if path.is_file() else "a folder"
        timeline = out / "timeline.json"
        if timeline.exists():
            spans = json.loads(timeline.read_text())["spans"]
            yield f"{name} timeline", digest(json.dumps(sorted([span["step"], span["op"]] for span in spans)))


def _output(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PENSTOCK, *map(str, args)], check=False, capture_output=True, text=True)


def _penstock(*args: object) -> None:
    subprocess.run([PENSTOCK, *map(str, args)], check=True, stdout=subprocess.DEVNULL)


def digests() -> dict[str, str]:
    with ProcessPoolExecutor(2) as pool, TemporaryDirectory() as folder:
        of_grid = pool.map(searched, product(grid.MODELS, grid.MACHINES, grid.TOKENS_PER_STEP))
        home = Path(folder)
        return {"plans": plans(), **dict(trained(home)), **dict(reported(home)), **dict(refused(home)), **dict(of_grid)}


@click.command()
@click.argument("action", type=click.Choice(["write", "compare"]))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def main(action: str, file: Path) -> None:
    """Write the digests, or compare them with FILE and print the names of those that differ."""
    current = digests()
    if action == "write":
        file.write_text(json.dumps(current, indent=1))
        return
    written = json.loads(file.read_text())
    differing = sorted(name for name in {*written, *current} if written.get(name) != current.get(name))
    print(f"{len(current)} digests, {len(differing)} differ", *differing, sep="\n")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
