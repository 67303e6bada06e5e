"""Device memory of a long context, planned and measured, with tiles and offloaded boundaries.

`python -m benchmarks.long_context` prints two tables of Markdown: a narrow model trained on this CPU, with every allocation of the
gpu lane recorded; and the results of `penstock plan` and `penstock check` for a large model with half a million tokens.
"""

import argparse
from collections.abc import Sequence

import penstock
from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload
from penstock.runtime.plan import Plan, Policy, Semantics
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import show_bytes, show_seconds
from tests.runtime.test_replay import device_bytes
from tests.strategies import PROFILE
from tests.tiny import tiny_config

N_LAYERS = 6
# MLP 5.3 times the model's width, like Qwen2.5-7B
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 344, "vocab_size": 1024}
TILE_TOKENS = 256
SPILLED = Policy(spill_blocks=tuple(range(N_LAYERS)))
WAYS = {
    "whole": (None, Policy()),
    "MLP by tiles": (TILE_TOKENS, Policy()),
    "boundaries spilled": (None, SPILLED),
    "tiles and spilled": (TILE_TOKENS, SPILLED),
}
LARGE = "qwen2.5-7b"
LARGE_SEQ_LEN = 2**19
MACHINES = ("gh200", "h200-pcie5")


def plan_of(seq_len: int, tile: int | None, policy: Policy) -> Plan:
    """Return a plan with one fp32 sequence per micro-batch. In bf16, products and sums on a CPU copy operands, unlike on a GPU."""
    model = Model(tiny_config("llama", **SHAPE, num_hidden_layers=N_LAYERS))
    semantics = Semantics(seq_len, 1, 1, compute_dtype="fp32", loss_tile_tokens=TILE_TOKENS, mlp_tile_tokens=tile)
    plan = lower(model, build_workload(model, semantics), semantics, policy, PROFILE)
    check(plan)
    return plan


def measured_row(seq_len: int, way: str) -> str:
    """Format planned and measured memory. Arenas are allocated as planned; the rest is the gpu lane's peak in two steps."""
    plan = plan_of(seq_len, *WAYS[way])
    planned_bytes = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes
    measured_bytes = plan.device_arena_bytes + device_bytes(plan)[1]
    sizes = " | ".join(f"{n / 1e6:.1f}" for n in (plan.device_arena_bytes, planned_bytes, measured_bytes))
    return f"| {seq_len:,} | {way} | {sizes} | {measured_bytes / planned_bytes:.3f} | {measured_bytes / seq_len:,.0f} |"


def predicted_row(machine: str) -> str:
    planned = penstock.plan(LARGE, machine, seq_len=LARGE_SEQ_LEN, batch_size=1)
    penstock.check(planned)  # raises if the plan is wrong
    tile, n_spilled = planned.plan.semantics.mlp_tile_tokens, len(planned.plan.policy.spill_blocks)
    sizes_of = f"{show_bytes(planned.answer.needs.device_peak_bytes)} | {show_bytes(planned.answer.needs.host_peak_bytes)}"
    return (
        f"| {machine} | {tile or 'none'} | {n_spilled} | {sizes_of} | {show_seconds(planned.step_s)} | "
        f"{planned.tokens_per_s:.0f} | {planned.certificate.gap_fraction:.1%} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[1024, 4096, 16384])
    seq_lens = parser.parse_args(arguments).seq_lens
    print("| tokens | how | arenas, MB | planned, MB | measured, MB | measured / planned | measured bytes a token |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for seq_len in seq_lens:
        for way in WAYS:
            print(measured_row(seq_len, way), flush=True)
    print("\n| machine | MLP tile, tokens | boundaries spilled | device | host | step | tokens/s | gap |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for machine in MACHINES:
        print(predicted_row(machine), flush=True)


if __name__ == "__main__":
    main()
