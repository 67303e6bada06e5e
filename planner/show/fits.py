"""The largest model of each family that host memory of a size can train, and about how fast.

Whether a model fits is computed exactly, from the leanest policies. Its speed is an estimate unless a search is asked for: the step
of a greedy plan, which a search beats, or misses, by a few per cent.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import inf, log
from typing import Any

from penstock.hwprofiles.device_parts import shared_by
from penstock.hwprofiles.schema import Profile
from penstock.planner.bounds.bounds import busy_s
from penstock.planner.model.config import library_kernels, shipped_models
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model, supported_attention
from penstock.planner.search.estimate import Greedy
from penstock.planner.search.micro_batch import Size, possible_sizes
from penstock.planner.search.space import leanest
from penstock.planner.search.trial import Trial, without_collection
from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import GB

from .compare import candidate
from .price import Hourly, hourly

HOST_MEMORIES = tuple(n * GB for n in (32, 64, 128, 256, 512, 1024, 2048))
GPUS = ("rtx3090", "rtx4090", "rtx5090", "h100-sxm")  # a name stands for all shipped machines that begin with it
LEAST_FROZEN_BYTES = 0.5  # of one that is not trained: four bits
N_ESTIMATED = 8  # sizes whose greedy plans are estimated, the largest micro-batches (of four: docs/log.md)


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest model of a family on a machine with so much host memory. All None: none of the family fits."""

    gpu: str
    machine: str
    host_memory_bytes: int
    family: str
    hourly: Hourly  # of the machine with that memory
    is_estimate: bool
    optimizer: str = "adamw"
    model: str | None = None
    n_params: int | None = None
    tokens_per_s: float | None = None

    def to_json(self, n_tokens: int | None = None) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "hourly"}
        return fields | self.hourly.job_fields(n_tokens, self.tokens_per_s)


def family_of(name: str, model_type: str) -> str:
    """`qwen2.5-32b`: qwen2.5; `qwen3-30b-a3b`, whose layers have experts: qwen3-moe; `mixtral-8x7b`: mixtral."""
    stem = re.split(r"-(?=\d)", name)[0] if not name.startswith("mistral") else "mistral"
    return f"{stem}-moe" if model_type.endswith("_moe") else stem


SHORT = Semantics(seq_len=1, batch_size=1, micro_batch=1)  # of a whole model, which all can


@lru_cache(maxsize=1)
def known() -> dict[str, list[str]]:
    """All shipped models, by family; families by name."""
    found: dict[str, list[str]] = {}
    for name in shipped_models():
        found.setdefault(family_of(name, read_model(name).config["model_type"]), []).append(name)
    return dict(sorted(found.items()))


@lru_cache(maxsize=8)
def families(semantics: Semantics = SHORT, names: tuple[str, ...] | None = None) -> dict[str, list[str]]:
    """The shipped models that can be trained so, by family, the smallest first. WorkloadError where none can: of all, or of one of
    the families that are named."""
    found: dict[str, list[str]] = {}
    refused: list[WorkloadError] = []
    for family in known() if names is None else names:
        sizes: list[tuple[int, str]] = []
        for name in known()[family]:
            model = read_model(name)
            try:
                sizes.append((build_workload(model, _semantics(model, semantics)).n_params, name))
            except WorkloadError as error:
                refused.append(error)
        if sizes:
            found[family] = [name for _, name in sorted(sizes)]
        elif names is not None:
            raise refused[-1]
    if not found:
        raise refused[0]
    return found


def hosts(profiles: Sequence[Profile], host_memories: Sequence[int]) -> Iterator[tuple[Profile, int]]:
    """For each size of host memory, of machines with one GPU that take so much the one whose own is nearest; soldered memory stays
    as it is."""
    yield from ((profile, int(profile.host.memory_bytes.value)) for profile in profiles if profile.is_soldered)
    for n_bytes in sorted(host_memories):
        if able := [profile for profile in profiles if not profile.is_soldered and profile.takes(n_bytes)]:
            nearest = min(able, key=lambda p: (abs(log(p.host.memory_bytes.value / n_bytes)), p.name))
            yield nearest.with_memory(None, n_bytes), n_bytes


@without_collection()
def fits(
    gpu: str,
    profiles: Sequence[Profile],
    family: str,
    able: Sequence[str],
    semantics: Semantics,
    host_memories: Sequence[int],
    searched: bool,
    n_hosts: int = 1,
) -> list[Fit]:
    """A `Fit` for each size of host memory, of the models of a family that are `able`, the smallest first. Of several ranks on
    `n_hosts` the semantics are one rank's part, the profiles and the memory a host's."""
    models = [read_model(name) for name in reversed(able)]
    found: list[Fit] = []
    # Of a machine with less and less memory: what did not fit does not fit again, and the best plan is the best while it fits.
    for _, of_machine in groupby(reversed([*hosts(profiles, host_memories)]), key=lambda host: host[0].name):
        left, best, best_bytes = list(models), dict[str, Any](), inf
        for whole, n_bytes in of_machine:
            profile = shared_by(whole, semantics.ranks // n_hosts, n_hosts)
            if best_bytes > profile.host.memory_bytes.value:
                while left and not (sizes := fitting_sizes(left[0], _semantics(left[0], semantics), profile)):
                    best = {}
                    left.pop(0)
                if left:
                    speed, best_bytes = speed_of(left[0], sizes, profile, searched)
                    best = {"model": left[0].name, "n_params": sizes[0][1].n_params, "tokens_per_s": speed}
            found.append(
                replace(Fit(gpu, whole.name, n_bytes, family, hourly(profile), not searched, semantics.optimizer_in_words), **best)
            )
    return found[::-1]


def speed_of(model: Model, sizes: Sequence[Size], profile: Profile, searched: bool) -> tuple[float, int]:
    """Tokens per second of a model that fits, and bytes of one rank's host: of the plan that a search finds, or of the greedy plan
    with the lowest bound."""
    semantics = sizes[-1][0]
    if searched:
        best = candidate(model, profile, semantics).speed
        assert best is not None, f"{model.name} fits {profile.name}"
        return best.predicted.tokens_per_s, best.predicted.host_peak_bytes * profile.n_hosts // semantics.ranks
    trials = [Trial(model, workload, of, profile, None) for of, workload in sizes]
    # Of each micro-batch but the largest the smallest tiles: they cost little, and leave the most room
    of_each = {of.semantics.micro_batch: of for of in trials[:N_ESTIMATED]}
    likely = [(of, policy) for of in dict.fromkeys([trials[0], *of_each.values()]) for policy in Greedy(of.frames).policies()]
    if not likely:  # so tight that only the leanest fit
        lean = ((of, leanest(model, of.workload, of.semantics, profile)) for of in trials)
        likely = [(of, plan.policy) for of, plans in lean for plan, needs in plans if needs.fits]
    of, policy = lowest(likely)
    return semantics.tokens_per_step / of.step_s(policy), of.frames.needs(policy).host_peak_bytes


def lowest(likely: Sequence[tuple[Trial, Policy]]) -> tuple[Trial, Policy]:
    """The policy with the lowest bound: bounds, which take long, only of those whose busiest lane alone is not above it."""
    busy = [(max(busy_s(of.frames.of(policy), of.cost).values()), i) for i, (of, policy) in enumerate(likely)]
    best_s, best = inf, 0
    for floor_s, i in sorted(busy):
        if floor_s > best_s:
            break
        of, policy = likely[i]
        best_s, best = min((best_s, best), (of.frames.bound_s(policy), i))
    return likely[best]


def fitting_sizes(model: Model, semantics: Semantics, profile: Profile) -> Sequence[Size]:
    """The sizes that may be chosen, if some policy fits with one of them; none, if not."""
    workload = build_workload(model, semantics)
    frozen_bytes = (workload.n_params - workload.n_trained) * LEAST_FROZEN_BYTES
    least_bytes = workload.n_trained * semantics.state_bytes + frozen_bytes  # on host and device together
    if least_bytes > semantics.ranks * (profile.host.memory_bytes.value + profile.device.memory_bytes.value):
        return []
    sizes = possible_sizes(model, with_kernels(model, semantics, profile), profile)
    leanest_first = reversed(sizes)  # the smallest micro-batch is the likeliest
    return sizes if any(needs.fits for of, workload in leanest_first for _, needs in leanest(model, workload, of, profile)) else []


def _semantics(model: Model, semantics: Semantics) -> Semantics:
    """With the model's best attention, and library kernels: its outlines are shipped with these, and not recorded by torch."""
    return replace(semantics, attention=supported_attention(model)[0], library_kernels=library_kernels(model))  # type: ignore[arg-type]
