"""Quality cost of low-bit optimizer state and of FP8 products: the same runs with each variant, from several seeds.

    python -m benchmarks.quality --home FOLDER [--device cuda --machine h100-16core] [--jobs 6] [--layers 3,10] [--steps 1000]

Byte-level models, the demo's with 3 layers and one with 10 (30 M parameters), trained on the sources of Python's standard library;
every tenth file is held out. A variant is an optimizer or `lora`, in bf16, and with ` fp8` or ` fp32` in that. `lora` adapts the
model that `adamw` with seed 0 trained, to the pages of docs. Runs with one seed start from equal weights and read equal data in
equal order. Runs in FOLDER are not repeated. A table of all finished runs is printed at the end, or alone with `--jobs 0`.
"""

import argparse
import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

from demo.demo import CONFIG

OPTIMIZERS = ("adamw", "adamw:moments=bf16", "adamw:moments=bf16,master=bf16", "lion", "lion:moments=bf16,master=bf16")
SEEDS, LR, LAST_STEPS = (0, 1, 2), 1e-3, 50
HELD_OUT_EVERY, MOST_FILES, HELD_OUT_TOKENS = 10, 400, 2**14
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
Run = tuple[int, str, int]  # layers, variant, seed


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--machine", default="cpu-2core", help="machine of the plan; it does not change the results")
    parser.add_argument("--optimizers", nargs="*", default=OPTIMIZERS)
    parser.add_argument("--layers", default="3,10")
    parser.add_argument("--llama", action="store_true", help="a llama instead of a Qwen3")
    parser.add_argument("--width", type=int, default=512, help="of a layer; 64 per head, three times the width in its MLP")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--perform", help=argparse.SUPPRESS)
    flags = parser.parse_args(words)
    if flags.perform:
        n_layers, optimizer, seed = json.loads(flags.perform)
        perform(flags, (n_layers, optimizer, seed))
        return 0
    if not flags.jobs:
        print("\n".join(table(flags.home)))
        return 0
    write_data(flags.home)
    runs = [(int(n), optimizer, seed) for n in flags.layers.split(",") for optimizer in flags.optimizers for seed in flags.seeds]
    with ThreadPoolExecutor(flags.jobs) as pool:
        codes = list(pool.map(lambda run: begin(flags.home, run, words), runs))
    print("\n".join(table(flags.home)))
    return max(codes)


def write_data(home: Path) -> None:
    """Write sources of the standard library to two folders, and pages of docs to two others."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:MOST_FILES]
    for prefix, files in (("", sources), ("docs-", sorted(Path("docs").rglob("*.md")))):
        for number, file in enumerate(files):
            target = home / f"{prefix}{'held-out' if number % HELD_OUT_EVERY == 0 else 'data'}" / f"{file.stem}.txt"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())


def folder(home: Path, run: Run) -> Path:
    return home / "-".join(map(str, run)).translate(str.maketrans(":=, ", "----"))


def begin(home: Path, run: Run, words: list[str]) -> int:
    """Run in a separate process."""
    out = folder(home, run)
    if any(out.glob("checkpoint-*")):
        return 0
    out.mkdir(exist_ok=True)
    (out / "run.json").write_text(json.dumps(run))
    with Path(f"{out}.log").open("w") as log:
        command = [sys.executable, "-m", "benchmarks.quality", *words, "--perform", json.dumps(run)]
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode


def perform(flags: argparse.Namespace, run: Run) -> None:
    import penstock

    n_layers, variant, seed = run
    optimizer, _, compute = variant.partition(" ")
    other = {"compute_dtype": compute} if compute else {}
    if is_lora := optimizer == "lora":
        (model,) = folder(flags.home, (n_layers, "adamw", 0)).glob("checkpoint-*")
        options = {"train": "lora:r=8", **other, **({"base": "fp8-rows"} if compute == "fp8" else {})}
    else:
        model, options = flags.home / f"model-{n_layers}-{optimizer.partition(':')[0]}-{seed}", {"optimizer": optimizer, **other}
        model.mkdir(exist_ok=True)
        width = {"hidden_size": flags.width, "intermediate_size": 3 * flags.width, "num_attention_heads": flags.width // 64}
        config = CONFIG | {"num_hidden_layers": n_layers, "num_key_value_heads": max(1, flags.width // 128)} | width
        (model / "config.json").write_text(json.dumps(config | (LLAMA if flags.llama else {})))
    plan = penstock.plan(model, flags.machine, seq_len=flags.seq_len, batch_size=flags.batch_size, **options)
    prefix = "docs-" if is_lora else ""
    settings = {
        "tokenizer": "bytes", "seed": seed, "evaluation.data": str(flags.home / f"{prefix}held-out"), "evaluation.first": is_lora,
        "optimizer.schedule.kind": "cosine", "optimizer.schedule.warmup_steps": flags.steps // 20, "optimizer.weight_decay": 0.1,
        "checkpoint.weights_only": True, "checkpoint.minutes": 0, "evaluation.max_sequences": HELD_OUT_TOKENS // flags.seq_len,
    }  # fmt: skip
    lr, data = LR * (0.3 if optimizer.startswith("lion") else 1.0), flags.home / f"{prefix}data"
    out = folder(flags.home, run)
    penstock.train(plan, data, out=out, steps=flags.steps, lr=lr, device=flags.device, from_scratch=not is_lora, settings=settings)


def table(home: Path) -> Iterator[str]:
    """Yield a row per model and variant over finished runs: mean training loss of the last steps, spread over seeds, differences
    from `adamw` or `lora` by seed; and the same for held-out loss, with the mean before the first step of an adapted model."""
    results: dict[Run, tuple[float, float]] = {}
    before: dict[tuple[int, str], list[float]] = {}
    for path in sorted(home.glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if "eval_loss" in rows[-1]:
            losses, run = [row["loss"] for row in rows if "loss" in row], tuple(json.loads((path.parent / "run.json").read_text()))
            results[run] = mean(losses[-LAST_STEPS:]), rows[-1]["eval_loss"]
            if rows[0] is not rows[-1] and "eval_loss" in rows[0]:
                before.setdefault(run[:2], []).append(rows[0]["eval_loss"])
    yield "| layers | variant | seeds | loss | spread of seeds | change, by seed | before | held out | spread | change, by seed |"
    yield "|---:|---|---:|---:|---:|---|---:|---:|---:|---|"
    for n_layers, variant in sorted({run[:2] for run in results}):
        seeds, first = [run[2] for run in results if run[:2] == (n_layers, variant)], re.split("[: ]", variant)[0]
        cells = [f"{n_layers}", f"`{variant}`", f"{len(seeds)}"]
        for column in (0, 1):
            loss = {seed: results[n_layers, variant, seed][column] for seed in seeds}
            pairs = {seed: results.get((n_layers, first, seed)) for seed in seeds if first != variant}
            gaps = [f"{loss[seed] - pair[column]:+.4f}" for seed, pair in pairs.items() if pair is not None]
            cells += [f"{mean(before[n_layers, variant]):.4f}" if (n_layers, variant) in before else ""] * column
            cells += [f"{mean(loss.values()):.4f}", f"{stdev(loss.values()):.4f}" if len(loss) > 1 else "", ", ".join(gaps)]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
