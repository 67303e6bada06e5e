"""Plans of four jobs on an H200 with 16 cores: with its shipped profile, and with the rates expected of new kernels.

`python -m benchmarks.expected_plans` prints a Markdown table. The expected rates are estimates, not measurements, and the profile
is marked accordingly; `docs/benchmarks/gpu_2026-11-27.md` accounts for the steps behind them. `--write FILE` writes the profile,
for `penstock plan --machine FILE`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import penstock

from .gpu.stages import ROOT

SHIPPED = "h200-16core"
GPU_RATES = {"fused_bytes_per_s": 3.5e12, "loss_bytes_per_s": 3.0e12, "unpack_bytes_per_s": 3.5e12}
UPDATED_PER_S, SQUARED_BYTES_PER_S = 3.1e9, 40e9  # with all cores
SPREAD = 0.15
LORA = {"train": "lora:r=16"}
# Model, sequences of 2,048 tokens, host memory, training; seconds measured on 27 November, and the target
JOBS: dict[str, tuple[str, int, dict[str, Any], float, float]] = {
    "7B whole": ("qwen2.5-7b", 64, {}, 12.816, 11.0),
    "14B whole": ("qwen2.5-14b", 16, {}, 8.067, 6.5),
    "7B, LoRA": ("qwen2.5-7b", 16, LORA, 2.059, 1.80),
    "72B, LoRA beside int8": ("qwen2.5-72b", 4, {**LORA, "base": "int8"}, 5.229, 4.4),
}
HOST_BYTES = 114 * 10**9


def expected_profile() -> dict[str, Any]:
    """Return the shipped profile with the expected rates, under a separate source."""
    fields: dict[str, Any] = json.loads((ROOT / "hwprofiles" / "profiles" / f"{SHIPPED}.json").read_text(encoding="utf-8"))
    fields["name"] = f"{SHIPPED}-expected"
    detail = "expected of kernels and host loops that have not run on this machine; an estimate, no measurement"
    fields["sources"]["expected"] = {**fields["sources"]["copies"], "kind": "assumed", "detail": detail}

    def rate(value: float) -> dict[str, Any]:
        return {"value": value, "spread_fraction": SPREAD, "source": "expected"}

    fields["device"] |= {name: rate(value) for name, value in GPU_RATES.items()}
    points = fields["host"]["optimizer"]
    factor = UPDATED_PER_S / points[-1]["params_per_s"]["value"]
    for point in points:
        point |= {name: rate(point[name]["value"] * factor) for name in ("params_per_s", "params_per_s_under_copies")}
    fields["host"]["reduce_bytes_per_s"] = rate(SQUARED_BYTES_PER_S)
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="write the profile with expected rates, and make no plan")
    options = parser.parse_args()
    text = json.dumps(expected_profile(), indent=1)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
        return
    print("| job | measured, 27 November | plan, shipped profile | plan, expected rates | target |\n|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder) / "expected.json"
        expected.write_text(text, encoding="utf-8")
        for name, (model, batch_size, trained, measured_s, target_s) in JOBS.items():
            job = {"seq_len": 2048, "batch_size": batch_size, "host_memory_bytes": HOST_BYTES, **trained}
            steps = [penstock.plan(model, machine, **job).step_s for machine in (SHIPPED, str(expected))]
            print(f"| {name} | {measured_s:.2f} s | {steps[0]:.2f} s | {steps[1]:.2f} s | {target_s:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
