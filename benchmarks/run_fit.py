"""Fit of a machine's unmeasured rates to published runs.

Least squares over logarithms with a robust loss moves constants from a prior (with spread) towards the runs, so that an outlier has
little effect. `STAGES` names every fitted constant, its prior and its runs. A stage uses the constants of earlier stages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.optimize import least_squares

from penstock.hwprofiles.schema import Profile

SOFTWARE = "software"
RUN_TOLERANCE = 0.02  # trusted difference of logarithms of a run; the loss flattens beyond


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant to fit, of a machine (`owner`: name of a profile) or of the systems' software."""

    owner: str
    key: str
    prior: float
    spread_fraction: float  # standard deviation of the prior, relative
    why: str  # source of the prior

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.key}"


@dataclass(frozen=True, slots=True)
class Stage:
    """Constants fitted together, their runs, and the quantities compared."""

    constants: tuple[Constant, ...]
    runs: tuple[str, ...]
    measured: tuple[str, ...]
    instead: tuple[str, ...] = ()  # runs to use if all of `runs` are held out


def fit(constants: Sequence[Constant], residuals: Callable[[dict[str, float]], Sequence[float]]) -> dict[str, float]:
    """Return fitted values by name. `residuals` maps values to log errors, predicted over measured."""

    def vector(steps: Sequence[float]) -> list[float]:
        errors = residuals(_values(constants, steps))
        return [r / RUN_TOLERANCE for r in errors] + [x / c.spread_fraction for x, c in zip(steps, constants, strict=True)]

    solved = least_squares(vector, [0.0] * len(constants), loss="soft_l1", diff_step=1e-3, x_scale=0.1)
    return _values(constants, [float(x) for x in solved.x])


def _values(constants: Sequence[Constant], steps: Sequence[float]) -> dict[str, float]:
    return {c.name: c.prior * math.exp(x) for c, x in zip(constants, steps, strict=True)}


def with_constants(profile: Profile, values: Mapping[str, float]) -> Profile:
    """Return the profile with its fitted constants. Names of other owners are ignored, and sources are kept."""
    constants = {name.partition(".")[2]: value for name, value in values.items() if name.partition(".")[0] == profile.name}
    fields = profile.to_json()
    for key, value in constants.items():
        quantity_of(fields, key)["value"] = value
    return Profile.from_json(fields, profile.name) if constants else profile


PLACES = {  # constant -> its quantity in a profile
    "products": "device.matmul.bf16.flop_per_s",
    "sustained": "device.sustained_fraction",
    "eager": "device.eager_bytes_per_s",
    "pageable_d2h": "link.d2h.pageable_bytes_per_s",
    "page_fault": "host.page_fault_bytes_per_s",
    "dram": "host.dram_bytes_per_s",
    "runtime": "host.runtime_bytes",
}


def quantity_of(fields: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the quantity of a constant in the JSON of a profile."""
    for name in PLACES[key].split("."):
        fields = fields[name]
    return fields


NO_BELIEF = "no belief: the order of magnitude that the runs show"
EAGER = "0.58 of the rate of memory, as published of single modules on A100 and H100"
UNDER_LOAD = "three published steps of an 8B on an H100, whose products take 1 / 0.93 of what they take in bursts"
# Priors are the values of profiles before any run was used, or of a source.
STAGES: dict[str, Stage] = {
    "serial tail": Stage(
        (
            Constant("mi355x", "page_fault", 3.7e9, 0.3, "first touch in MegaTrain's tail, published for another host"),
            Constant(SOFTWARE, "clip_bytes_per_s", 15e9, 1.0, f"{NO_BELIEF}; PyTorch's norm and scaling on a CPU"),
            Constant(SOFTWARE, "release_per_fault", 2.5, 1.0, NO_BELIEF),
        ),
        ("mi355x-megatrain-qwen2.5-14b-b16",),
        ("backward_s", "gradient_join_s", "clip_s", "zero_and_free_s"),
        instead=("mi355x-megatrain-qwen2.5-14b-b64",),
    ),
    "Hopper under load": Stage(
        (
            Constant("gh200", "sustained", 0.95, 0.04, UNDER_LOAD),
            Constant("h100-sxm", "sustained", 0.95, 0.04, UNDER_LOAD),
            Constant("gh200", "eager", 2.0e12, 0.25, EAGER),
            Constant("h100-sxm", "eager", 1.77e12, 0.25, EAGER),
        ),
        ("gh200-megatrain-qwen2.5-7b-s1024", "gh200-megatrain-qwen2.5-14b-b96-full", "h100-megatrain-qwen2.5-7b-b158"),
        ("step_s",),
    ),
    "mi355x compute": Stage(
        (
            Constant("mi355x", "products", 2.0e15, 0.15, "eight rows of products, of two sets (docs/ops.md)"),
            Constant("mi355x", "eager", 3.0e12, 0.25, EAGER),
            Constant("mi355x", "pageable_d2h", 17e9, 0.4, "a third of the pinned rate"),
        ),
        ("mi355x-megatrain-qwen2.5-14b-b16", "mi355x-megatrain-qwen2.5-14b-b64", "mi355x-zero3-qwen2.5-14b-b16"),
        ("forward_s", "backward_s"),
    ),
    "one pool": Stage(
        (
            Constant("gb10", "products", 107e12, 0.25, "the law of RTX PRO 6000 at 0.65-0.7 of a peak derived from the datasheet"),
            Constant("gb10", "dram", 140e9, 0.3, "half of the pool's rate"),
            Constant(SOFTWARE, "tensor_s", 0.5e-3, 1.0, f"{NO_BELIEF}; twenty cores of two kinds wake"),
            Constant(SOFTWARE, "issue_s", 50e-6, 1.0, "tens of microseconds of Python for a library call"),
        ),
        ("gb10-megatrain-qwen2.5-0.5b-b2", "gb10-megatrain-qwen2.5-7b-b2", "gb10-megatrain-plus-qwen2.5-7b-b4"),
        ("forward_s", "backward_s", "zero_grad_s"),
    ),
    "rtx4090 compute": Stage(
        (Constant("rtx4090-server", "sustained", 1.0, 0.05, "whole MLPs run at the rate of isolated products, published"),),
        ("rtx4090-slideformer-qwen3-8b-b64", "rtx4090-zero3-llama-3.1-8b-b32"),
        ("step_s",),
    ),
    "process memory": Stage(
        (
            Constant("mi355x", "runtime", 6e9, 0.3, "MegaTrain's runs elsewhere show 6-8 GiB beyond their arenas"),
            Constant("gb10", "runtime", 6e9, 0.6, "the same"),
        ),
        ("mi355x-megatrain-qwen2.5-14b-b16", "gb10-megatrain-qwen2.5-0.5b-b2"),
        ("host_rss_gib",),
    ),
}
