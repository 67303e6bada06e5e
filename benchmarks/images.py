"""Steps and runs with images: `python -m benchmarks.images types`, `tower` and `run`, the tables of a page.

`types`: the loss and gradients of a step on an image against transformers' own forward, and documents packed against alone.
`tower`: seconds of a tower for an image, predicted and measured. `run`: held-out loss on captions of drawn shapes, with the images
and with those of other rows, by transformers.
"""

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from penstock.data.image_processor import TYPES
from penstock.hwprofiles.schema import read_profile
from penstock.model_checks.document_isolation import supports_documents
from penstock.planner.model.vision import vision_tower
from penstock.planner.model.workload import supported_attention
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.forward_pass import tower_s
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model
from penstock.vision.tower import Tower
from tests.penstock.vision.conftest import use_pixtral
from tests.running import UNSEARCHED, lines_of, penstock, succeeded
from tests.seers import data_with_images, length_of, own_inputs, own_model, streamed, write_drawings, write_seer

N_TRAINED, N_HELD_OUT, N_STEPS = 100, 24, 150


def of_type(home: Path, model_type: str) -> str:
    """Return a row of the table of types."""
    folder, rows, n_tokens = home / model_type, write_drawings(home / "rows", 3), length_of(model_type)
    fields: dict[str, Any] = {
        "compute_dtype": "fp32",
        "gradient_dtype": "fp32",
        "clip_norm": None,
        "loss_tile_tokens": length_of(model_type),
    }
    semantics = Semantics(n_tokens, 1, 1, attention=supported_attention(Model(write_seer(folder, model_type)))[0], **fields)
    data, model = data_with_images(folder, rows, home / model_type, semantics), own_model(folder, semantics)
    inputs = own_inputs(data, model, 0, n_tokens - data.parts[0].documents.lengths[0])
    expected = model(**inputs).loss
    expected.backward()
    loss, gradients = streamed(model, semantics, Policy(), data.batch(0))
    wanted = {name: p.grad for name, p in model.named_parameters() if name in gradients}
    n_same = sum(torch.equal(g, torch.zeros_like(g) if wanted[name] is None else wanted[name]) for name, g in gradients.items())
    is_same = torch.tensor(loss, dtype=torch.float32) == expected
    semantics = replace(semantics, seq_len=3 * n_tokens)
    packed = data_with_images(folder, rows, home / model_type, semantics, packing="documents").batch(0)
    n, alone = int((packed.targets >= 0).sum()), 0.0
    for document in range(3):
        inputs = own_inputs(data, model, document, 0)
        alone += model(**inputs).loss.item() * int((inputs["labels"][:, 1:] >= 0).sum()) / n
    together = streamed(model, semantics, Policy(), packed)[0]
    config = json.loads((folder / "config.json").read_text())
    packing = "refused" if supports_documents(config, semantics) else f"{abs(together - alone) / alone:.0e}"
    tokens = data.parts[0].documents.images(0)[0]["n_tokens"]
    return f"| {model_type} | {tokens} | {'equal' if is_same else 'NOT EQUAL'} | {n_same} of {len(gradients)} | {packing} |"


def types() -> None:
    """Print the table of types."""
    use_pixtral(pytest.MonkeyPatch())
    print("| type | tokens an image | loss | gradients with equal bits | packed, relative difference of loss |")
    print("|---|--:|---|--:|--:|")
    with tempfile.TemporaryDirectory() as home:
        for model_type in (*TYPES, "pixtral"):
            print(of_type(Path(home), model_type), flush=True)


def tower() -> None:
    """Print predicted and measured seconds of a small tower, on all threads."""
    profile = read_profile("cpu-2core", print)
    with tempfile.TemporaryDirectory() as home:
        sizes = {"image_size": 336, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
        config = write_seer(Path(home), "llava", sizes)
        small = Tower(Path(home), config, torch.float32, torch.device("cpu"))
        edge = config["vision_config"]["image_size"]
        planned, pixels, pairs = vision_tower(config, edge, edge), torch.randn(1, 3, edge, edge), list[tuple[float, float]]()
        operands = [(torch.randn(m.m, m.k), torch.randn(m.n, m.k), m.count) for m in planned.matmuls]
        for _ in range(10):  # interleaved: a shared machine changes its speed
            began_s = time.perf_counter()
            small.features({"pixel_values": pixels})
            middle_s = time.perf_counter()
            for a, b, count in operands:
                for _ in range(count):
                    torch.nn.functional.linear(a, b)
            pairs.append((middle_s - began_s, time.perf_counter() - middle_s))
    cost = CostModel(profile)
    predicted_s, products_s = tower_s(planned, "fp32", cost), sum(cost.product_s("fp32", m) for m in planned.matmuls)
    ratios, n_threads = sorted(seconds / products for seconds, products in pairs[3:]), torch.get_num_threads()
    print(
        f"{planned.flop / 1e9:.1f} GFLOP, predicted {predicted_s * 1e3:.0f} ms, {predicted_s / products_s:.2f} times its products"
    )
    print(f"measured {median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f}), with {n_threads} threads")


def held_out_loss(folder: Path, home: Path, rows: Path, semantics: Semantics) -> float:
    """Return the mean loss of a checkpoint on rows, by transformers."""
    data, model, total = data_with_images(folder, rows, home / "cache", semantics), own_model(folder, semantics), 0.0
    with torch.no_grad():
        for document in range(N_HELD_OUT):
            total += model(**own_inputs(data, model, document, 0)).loss.item()
    return total / N_HELD_OUT


def run() -> None:
    """Train all weights of a tiny decoder on captions, and print the held-out loss."""
    home = Path(tempfile.mkdtemp())
    write_seer(home / "model", "qwen2_5_vl")
    rows, held = write_drawings(home / "rows", N_TRAINED), write_drawings(home / "held", N_HELD_OUT, first=1000)
    swapped = [json.loads(line) for line in held.read_text().splitlines()]
    for i, row in enumerate(swapped):  # the image of a row three further on: of another colour
        row["messages"][0]["content"][0]["path"] = f"{1000 + (i + 3) % N_HELD_OUT}-0.png"
    (home / "held" / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in swapped))
    sizes = ["--machine", "cpu-2core", "--seq-len", 64, "--batch-size", 8, "--micro-batch", 4, "--compute", "fp32"]
    succeeded(penstock("plan", home / "model", *sizes, *UNSEARCHED, "-o", home / "plan.json"))
    words = ["run", home / "plan.json", "--data", rows, "--eval-data", held, "--out", home / "out", "--steps", N_STEPS]
    succeeded(penstock(*words, "--lr", "3e-3", "--eval-every", 25, "--schedule", "cosine", "--warmup-steps", 10))
    for line in lines_of(home, "out"):
        if "eval_loss" in line:
            print(f"| {line['step']} | {line['eval_loss']:.4f} |")
    semantics = Semantics(64, 1, 1, compute_dtype="fp32")
    last = home / "out" / f"checkpoint-{N_STEPS}"
    losses = [held_out_loss(last, home, path, semantics) for path in (held, home / "held" / "others.jsonl")]
    print(f"by transformers: {losses[0]:.4f} with the images, {losses[1]:.4f} with those of other rows")


if __name__ == "__main__":
    {"types": types, "tower": tower, "run": run}[sys.argv[1]]()
