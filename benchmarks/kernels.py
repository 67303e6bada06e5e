"""Predicted effect of fused kernels on plans.

    python -m benchmarks.kernels > docs/benchmarks/kernels_DATE.md

Every cell is planned twice: with `--kernels eager` (modules of transformers and FlashAttention-2), and with the fastest set for
which the machine's profile has rates. 2 TB of host memory everywhere; nothing is measured. Some ten minutes on two cores.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.any_memory import with_any_memory
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import read_model, supported_attention
from penstock.planner.search.micro_batch import SIZES, sizes_of
from penstock.planner.search.result import SearchResult
from penstock.planner.search.search import search
from penstock.planner.show.schedule import kernels_in_words
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import Semantics
from penstock.runtime.units import show_seconds

MODELS = ("qwen2.5-7b", "qwen3-8b", "qwen2.5-14b", "llama-3.1-70b")
MACHINES = ("h100-sxm", "h200-pcie5", "rtx4090-server", "gh200")
SHAPES = ((64, 2048), (4, 16384), (1, 65536))  # sequences per step, tokens per sequence
HOST_BYTES = 2 * 10**12
WANTED = {
    ("qwen2.5-7b", 64): 1.2, ("qwen2.5-7b", 4): 1.28, ("qwen2.5-7b", 1): 1.4, ("qwen3-8b", 4): 1.37,
}  # fmt: skip  # on an H100
BEST_PUBLISHED_TOKENS_PER_S = (10_700, 11_400)  # 8B on one H100 with resident state, 8k tokens a sequence


def planned(model_name: str, profile: Profile, shape: tuple[int, int], **kernels: Any) -> SearchResult | None:
    """Return the best plan with these kernels, or None if none fits. `pointwise` overrides the set."""
    model, (n_sequences, seq_len) = read_model(model_name), shape
    request = Semantics(seq_len, n_sequences, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
    pointwise = kernels.pop("pointwise", None)
    semantics = with_kernels(model, request, profile, **kernels)
    semantics = replace(semantics, pointwise=pointwise or semantics.pointwise)
    try:
        return search(model, sizes_of(model, semantics, profile), profile, None, SIZES)
    except DoesNotFitError:
        return None


def tokens_per_s(answer: SearchResult) -> float:
    return answer.plan.semantics.tokens_per_step / answer.step_s


def row(model: str, machine: str, shape: tuple[int, int]) -> str:
    """Format one cell with both kernel sets; for target figures also with eager activation and rotary embedding."""
    profile = with_any_memory(read_profile(machine), None, HOST_BYTES)
    eager, fused = planned(model, profile, shape, kernels="eager"), planned(model, profile, shape)
    name = f"| {model} | {machine} | {shape[0]} x {shape[1]:,} |"
    if eager is None or fused is None:
        speeds = ("does not fit" if answer is None else f"{tokens_per_s(answer):,.0f}" for answer in (eager, fused))
        return f"{name} | | {' | '.join(speeds)} | | |"
    ratio, wanted = eager.step_s / fused.step_s, WANTED.get((model, shape[0])) if machine == "h100-sxm" else None
    call_by_call = planned(model, profile, shape, pointwise="eager") if wanted else None
    of_these = "" if call_by_call is None else f"{eager.step_s / call_by_call.step_s:.2f}"
    return (
        f"{name} {show_seconds(eager.step_s)} | {show_seconds(fused.step_s)} | {tokens_per_s(eager):,.0f} | "
        f"{tokens_per_s(fused):,.0f} | {ratio:.2f}{f' (wanted {wanted})' if wanted else ''} | {of_these} |"
    )


def rests_on() -> Iterator[str]:
    """Yield the sources of rates that only the fused plans use, per machine."""
    for machine in MACHINES:
        profile, model = read_profile(machine), read_model(MODELS[0])
        semantics = with_kernels(model, Semantics(16384, 4, 4), profile)
        yield f"- **{machine}**: {kernels_in_words(semantics)}."
        for name in ("cudnn_8k", "cudnn", "cudnn_ends"):
            if (source := profile.sources.get(name)) is not None:
                yield f"  - {source.kind}: {source.detail}."


def main() -> None:
    print("# Effect of fused kernels on plans\n")
    print("**Predicted, not measured: we have run none of these kernels on a GPU.**\n")
    print((__doc__ or "").split("\n\n", 1)[1])
    print("| model | machine | sequences x tokens | eager | fused | tokens/s | tokens/s, fused | times as fast | call by call |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    cells = [(model, machine, shape) for machine in MACHINES for model in MODELS for shape in SHAPES]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for line in pool.map(row, *zip(*cells, strict=True)):
            print(line, flush=True)
    print(
        "\n*Call by call*: speed-up without compiled activation and rotary embedding. A run compiles them only if the result\n"
        "is bitwise identical to eager modules on its GPU, which no plan can predict.\n"
    )
    low, high = BEST_PUBLISHED_TOKENS_PER_S
    print(
        f"The best published stacks that keep an 8B resident on one H100 reach {low:,} to {high:,} tokens/s at 8k tokens a\n"
        "sequence.\n"
    )
    print("Sources of the fused figures, in addition to those of the eager ones:\n")
    print("\n".join(rests_on()))
    print(
        "- **Everywhere**: a fused norm, loss, activation and rotary embedding read and write their operands once, at the rate\n"
        "  of an isolated pointwise kernel (in the profile); the 0.841 of it for eager modules, fitted to published eager\n"
        "  systems, is still used for residual additions and for products."
    )


if __name__ == "__main__":
    main()
