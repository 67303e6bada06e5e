"""Plans of four jobs on an H200 with 16 cores: with its shipped profile, and with the rates expected of kernels that have not run.

`python -m benchmarks.expected_plans` prints a Markdown table, in a minute. The expected rates are estimates, marked as assumed in
the profile. `--write FILE` writes that profile, for `penstock plan --machine FILE`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import penstock
from penstock.hwprofiles.schema import Profile, read_profile

SHIPPED = "h200-16core"
GPU_RATES = {"fused_bytes_per_s": 3.5e12, "loss_bytes_per_s": 3.0e12, "unpack_bytes_per_s": 3.5e12}
UPDATED_PER_S, SQUARED_BYTES_PER_S = 3.1e9, 40e9  # by all cores
SPREAD = 0.15
LORA = {"train": "lora:r=16"}
# Model, sequences of 2,048 tokens, training; seconds measured on 27 November 2026, and the target
JOBS: dict[str, tuple[str, int, dict[str, Any], float, float]] = {
    "7B whole, 64 sequences": ("qwen2.5-7b", 64, {}, 12.816, 11.0),
    "14B whole, 16 sequences": ("qwen2.5-14b", 16, {}, 8.067, 6.5),
    "7B, LoRA, 16 sequences": ("qwen2.5-7b", 16, LORA, 2.059, 1.80),
    "72B, LoRA on int8, 4 sequences": ("qwen2.5-72b", 4, {**LORA, "base": "int8"}, 5.229, 4.4),
}


def expected_fields() -> dict[str, Any]:
    """Return the JSON fields of the shipped profile with the expected rates, under a source of their own."""
    fields = read_profile(SHIPPED).to_json()
    fields["name"] = f"{SHIPPED}-expected"
    detail = "expected of kernels and host loops that have not run on this machine; an estimate, no measurement"
    fields["sources"]["expected"] = {**fields["sources"]["copies"], "kind": "assumed", "detail": detail}

    def rate(value: float) -> dict[str, Any]:
        return {"value": value, "spread_fraction": SPREAD, "source": "expected"}

    points = fields["host"]["optimizer"]
    factor = UPDATED_PER_S / points[-1]["params_per_s"]["value"]
    for point in points:
        point |= {name: rate(point[name]["value"] * factor) for name in ("params_per_s", "params_per_s_under_copies")}
    fields["host"]["reduce_bytes_per_s"] = rate(SQUARED_BYTES_PER_S)
    fields["device"] |= {name: rate(value) for name, value in GPU_RATES.items()}
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the profile with expected rates, and make no plan")
    options = parser.parse_args()
    if options.write is not None:
        options.write.write_text(json.dumps(expected_fields(), indent=1), encoding="utf-8")
        return
    machines = read_profile(SHIPPED), Profile.from_json(expected_fields(), "expected")
    print("| job | measured, 27 November | plan, shipped profile | plan, expected rates | target |\n|---|---:|---:|---:|---:|")
    for name, (model, batch_size, options_of_job, measured_s, target_s) in JOBS.items():
        job = {"seq_len": 2048, "batch_size": batch_size, "host_memory_bytes": 114 * 10**9, **options_of_job}
        steps = [penstock.plan(model, machine, **job).step_s for machine in machines]
        print(f"| {name} | {measured_s:.2f} s | {steps[0]:.2f} s | {steps[1]:.3f} s | {target_s:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
