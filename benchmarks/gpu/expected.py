"""Expected figures of a visit to a GPU, and the decision that follows from each.

The figures are estimates for an H200 with 16 cores, made before the visit from the account of the steps of 27 November 2026.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Expected(NamedTuple):
    """Estimate for a line, and the decision that follows from the measured figure."""

    figure: str
    decision: str


_STEP = "within P10 to P90: the profile is shipped; above P90: the table of kernels names the op that takes longer"
_UNPACK = "at least 2.5 TB/s: ship; else keep the torch operations"
# By stage and name of the line: its `what`, with its `name` if it has one
EXPECTED: Mapping[tuple[str, str], Expected] = {
    ("facts", "cores"): Expected("16 cores, pairs of siblings", "siblings: the sweep's line of one thread a core counts"),
    ("host", "update of 0.2 GB"): Expected("2.8 to 4 G params/s", "above the line of 12 GB: a cache holds it, so probes need more"),
    ("host", "update of 0.8 GB"): Expected("2.8 to 3.4 G params/s", "equal to 12 GB: the old probe's size was not the error"),
    ("host", "update of 3 GB"): Expected("2.8 to 3.4 G params/s", "the smallest size with a stable rate is a probe's size"),
    ("host", "update of 12 GB"): Expected("2.8 to 3.4 G params/s", "cores used below 0.9 of the threads: a quota, and a cliff"),
    ("host", "update of 41 GB"): Expected("2.8 to 3.4 G params/s", "below 12 GB: translation of addresses; ask for huge pages"),
    ("host", "update of 12 GB, a thread a core"): Expected("2.6 to 3.4 G params/s", "equal to all threads: plan with cores"),
    ("host", "update of 12 GB, half the threads"): Expected("1.8 to 3 G params/s", "equal to all threads: memory binds"),
    ("host", "update of 12 GB beside uploads"): Expected("1.7 to 2.4 G params/s", "the planner's rate while loads run"),
    ("host", "update of 12 GB beside copies"): Expected("1.4 to 2.2 G params/s", "the planner's rate during copies both ways"),
    ("host", "squares of 12 GB"): Expected("25 to 45 GB/s", "below 20 GB/s: look at cores used before the loop"),
    ("kernels", "kernel swiglu"): Expected("3.2 to 3.8 TB/s, bits equal", "below 2.5 TB/s: count bytes in flight by ncu"),
    ("kernels", "kernel swiglu_gradients"): Expected("3.2 to 3.8 TB/s, bits equal", "below 2.5 TB/s: share one reciprocal"),
    ("kernels", "kernel geglu"): Expected("3 to 3.8 TB/s, bits equal", "bits differ: call by call, and GeGLU remains eager"),
    ("kernels", "kernel geglu_gradients"): Expected("2.5 to 3.8 TB/s, bits equal", "bits differ: call by call"),
    ("kernels", "kernel rotate"): Expected("2.5 to 3.8 TB/s, bits equal", "below 2 TB/s: one head a block"),
    ("kernels", "kernel rotate_back"): Expected("2.5 to 3.8 TB/s, bits equal", "below 2 TB/s: one head a block"),
    ("kernels", "loss"): Expected("3.0 to 3.8 TB/s of 6 bytes a logit", "below 1.5 TB/s: no faster than three passes"),
    ("kernels", "head's weight gradient"): Expected("within 2 % of the product alone", "above 5 %: accumulate in a separate pass"),
    ("kernels", "product in fp8"): Expected("1.3 to 1.7; k, v 1 to 1.5", "the profile's fp8_rate_fraction; below 1.2: not advised"),
    ("kernels", "quantise"): Expected("2.5 to 3.8 TB/s, bits equal", "below 2 TB/s: quantise in the norm and in SwiGLU"),
    ("kernels", "transpose"): Expected("2 to 3.5 TB/s", "below 1 TB/s: wider tiles in quantise.cu"),
    ("kernels", "layer in fp8"): Expected("1.2 to 1.35 times as fast", "below 1.15, products as expected: fuse quantising first"),
    ("kernels", "unpack int8"): Expected("3.2 to 3.8 TB/s, bits equal", _UNPACK),
    ("kernels", "unpack nf4"): Expected("2.8 to 3.8 TB/s, bits equal", _UNPACK),
    ("kernels", "unpack fp8"): Expected("3.2 to 3.8 TB/s, bits equal", _UNPACK),
    ("kernels", "unpack mxfp4"): Expected("2.8 to 3.8 TB/s, bits equal", _UNPACK),
    ("kernels", "update adamw"): Expected("2.6 to 3.4 TB/s", "below 2.2 TB/s: vectors gain nothing, so take them out again"),
    ("probe", "measured"): Expected("70 to 100 s; fused activations 3.2 to 3.6 TB/s", "the profile of the plans that follow"),
    ("batch-64", "measured"): Expected("11.0 to 11.3 s, 510 TFLOP/s", _STEP),
    ("batch-64", "update alone"): Expected("2.8 to 3.4 G params/s", "the rate of the step: cores; faster: lanes interfere"),
    ("batch-64", "profile"): Expected("10.5 to 11 s of kernels", "a kernel above 1 % that no line here names is the next one"),
    ("lora", "measured"): Expected("1.75 to 1.90 s", _STEP),
    ("whole-14b", "measured"): Expected("6.4 to 6.9 s", "above 7.2 s: loads during updates bind; see the line with uploads"),
    ("lora-72b", "measured"): Expected("4.1 to 4.4 s", "above 4.8 s: unpacking or narrow products; see their lines"),
    ("lora-72b-fp8", "measured"): Expected("3.1 to 3.5 s", "above 0.85 of lora-72b's: FP8 is not advised on this GPU"),
    ("tests-of-kernels", "measured"): Expected("none fails", "a kernel with a failed test is not shipped"),
}
UNITS = {
    "step_s": (1.0, "s a step"), "seconds": (1.0, "s"), "total_s": (1.0, "s of kernels"), "params_per_s": (1e9, "G params/s"),
    "bytes_per_s": (1e12, "TB/s"), "host_bytes_per_s": (1e9, "GB/s"), "model_flop_per_s": (1e12, "TFLOP/s"),
    "cores_used": (1.0, "cores used"), "n_threads": (1.0, "threads"), "steal_fraction": (0.01, "% of the time stolen"),
    "speedup": (1.0, "times as fast as bf16"), "of_input_speedup": (1.0, "for the input's gradient"),
    "slowdown": (1.0, "times the product alone"), "n_failed": (1.0, "failed"), "h2d_bytes_per_s": (1e9, "GB/s up"),
    "d2h_bytes_per_s": (1e9, "GB/s down"), "forward_s": (1e-3, "ms forward"), "backward_s": (1e-3, "ms backward"),
    "forward_flop_per_s": (1e12, "TFLOP/s forward"), "backward_flop_per_s": (1e12, "TFLOP/s backward"),
    "of_input_flop_per_s": (1e12, "TFLOP/s for the input's gradient"), "flop_per_s": (1e12, "TFLOP/s with backward"),
    "of_weight_flop_per_s": (1e12, "TFLOP/s for the weight's gradient"),
}  # fmt: skip


def expectation(stage: str, line: str, values: Mapping[str, Any]) -> Expected | None:
    """Return the entry of a line: by its title, by its name, or by both."""
    names = (line, str(values.get("name")), f"{line} {values.get('name')}")
    return next((EXPECTED[stage, name] for name in names if (stage, name) in EXPECTED), None)


def figures(values: Mapping[str, Any]) -> str:
    """Format the measured figures of a line with units, and "bits equal" or "bits differ" if compared."""
    parts = [f"{values[key] / base:.3g} {unit}" for key, (base, unit) in UNITS.items() if isinstance(values.get(key), int | float)]
    if (equal := values.get("are_bits_equal")) is not None:
        parts.append("bits equal" if equal else "bits differ")
    return ", ".join(parts)
