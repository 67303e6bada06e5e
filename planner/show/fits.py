"""The largest model of each family that fits a given host memory, with an approximate speed.

Memory is computed exactly, from the smallest policies. Speed is an estimate unless a search is requested: the step of a greedy
plan, within a few per cent of the result of a search.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain, groupby
from math import inf, log
from typing import Any

from penstock.hwprofiles.device_parts import shared_by
from penstock.hwprofiles.schema import Profile
from penstock.planner.bounds.bounds import busy_s
from penstock.planner.model.config import library_kernels, shipped_models
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model, supported_attention
from penstock.planner.search.evaluation import Evaluator, without_collection
from penstock.planner.search.greedy import Greedy
from penstock.planner.search.micro_batch import Size, possible_sizes
from penstock.planner.search.policies import smallest_plans
from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import GB

from .compare import candidate
from .price import Hourly, hourly, moved_bytes

HOST_MEMORIES = tuple(n * GB for n in (32, 64, 128, 256, 512, 1024, 2048))
GPUS = ("rtx3090", "rtx4090", "rtx5090", "h100-sxm")  # prefixes of shipped profile names
LEAST_FROZEN_BYTES = 0.5  # of a frozen parameter: four bits
N_ESTIMATED = 8  # sizes with estimated greedy plans, largest micro-batches first (four of them: docs/log.md)


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest model of a family for one machine and host memory. Fields are None if no model fits."""

    gpu: str
    machine: str
    host_memory_bytes: int
    family: str
    hourly: Hourly  # with this host memory
    is_estimate: bool
    optimizer: str = "adamw"
    model: str | None = None
    n_params: int | None = None
    tokens_per_s: float | None = None
    moved_bytes: int = 0  # of weights and the last checkpoint

    def to_json(self, n_tokens: int | None = None) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "hourly"}
        return fields | self.hourly.job_fields(n_tokens, self.tokens_per_s, self.moved_bytes)


def family_of(name: str, model_type: str) -> str:
    """Family of a model: `qwen2.5-32b` -> qwen2.5; `qwen3-30b-a3b` with experts -> qwen3-moe; `mixtral-8x7b` -> mixtral."""
    stem = re.split(r"-(?=\d)", name)[0] if not name.startswith("mistral") else "mistral"
    return f"{stem}-moe" if model_type.endswith("_moe") else stem


SHORT = Semantics(seq_len=1, batch_size=1, micro_batch=1)  # training of a whole model, supported for all


@lru_cache(maxsize=1)
def known() -> dict[str, list[str]]:
    """Shipped models by family, sorted by family name."""
    by_family: dict[str, list[str]] = {}
    for name in shipped_models():
        by_family.setdefault(family_of(name, read_model(name).config["model_type"]), []).append(name)
    return dict(sorted(by_family.items()))


@lru_cache(maxsize=8)
def families(semantics: Semantics = SHORT, names: tuple[str, ...] | None = None) -> dict[str, list[str]]:
    """Shipped models that support these semantics, by family, the smallest first. WorkloadError if none does."""
    by_family: dict[str, list[str]] = {}
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
            by_family[family] = [name for _, name in sorted(sizes)]
        elif names is not None:
            raise refused[-1]
    if not by_family:
        raise refused[0]
    return by_family


def hosts(profiles: Sequence[Profile], host_memories: Sequence[int]) -> Iterator[tuple[Profile, int]]:
    """For each host memory size, yield the machine with one GPU that supports it and has the closest default. Machines with
    soldered memory are yielded unchanged."""
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
    """Return a `Fit` for each host memory size. `able`: models of the family, the smallest first. With ranks on `n_hosts`,
    semantics are one rank's part, profiles and memory those of one host."""
    models = [read_model(name) for name in reversed(able)]
    rows: list[Fit] = []
    # In order of decreasing memory: a model that did not fit is skipped from then on, and a best plan remains best while it fits.
    for _, of_machine in groupby(reversed([*hosts(profiles, host_memories)]), key=lambda host: host[0].name):
        candidates, best, best_bytes = list(models), dict[str, Any](), inf
        for machine, n_bytes in of_machine:
            profile = shared_by(machine, semantics.ranks // n_hosts, n_hosts)
            if best_bytes > profile.host.memory_bytes.value:
                while candidates and not (sizes := fitting_sizes(candidates[0], _semantics(candidates[0], semantics), profile)):
                    best = {}
                    candidates.pop(0)
                if candidates:
                    speed, best_bytes, moved = speed_of(candidates[0], sizes, profile, searched)
                    best = {"model": candidates[0].name, "n_params": sizes[0][1].n_params, "tokens_per_s": speed}
                    best["moved_bytes"] = moved
            optimizer = semantics.optimizer_in_words
            rows.append(replace(Fit(gpu, machine.name, n_bytes, family, hourly(profile), not searched, optimizer), **best))
    return rows[::-1]


def speed_of(model: Model, sizes: Sequence[Size], profile: Profile, searched: bool) -> tuple[float, int, int]:
    """Tokens per second of a model that fits, host bytes of one rank, and `moved_bytes`: from a search, or from a greedy plan."""
    semantics = sizes[-1][0]
    if searched:
        best = candidate(model, profile, semantics).speed
        assert best is not None, f"{model.name} fits {profile.name}"
        peak_bytes = best.predicted.host_peak_bytes * profile.n_hosts // semantics.ranks
        return best.predicted.tokens_per_s, peak_bytes, best.moved_bytes
    evaluators = [Evaluator(model, workload, sized, profile) for sized, workload in sizes]
    # The smallest tiles of each micro-batch except the largest: they cost little and save the most memory
    by_size = {e.semantics.micro_batch: e for e in evaluators[:N_ESTIMATED]}
    likely = [(e, policy) for e in dict.fromkeys([evaluators[0], *by_size.values()]) for policy in Greedy(e).policies()]
    if not likely:  # only the smallest policies fit
        smallest = ((e, smallest_plans(model, e.workload, e.semantics, profile)) for e in evaluators)
        likely = [(e, plan.policy) for e, plans in smallest for plan, needs in plans if needs.fits]
    evaluator, policy = lowest(likely)
    tokens_per_s, setup = semantics.tokens_per_step / evaluator.step_s(policy), evaluator.setup(policy)
    return tokens_per_s, evaluator.needs(policy).host_peak_bytes, moved_bytes(setup)


def lowest(likely: Sequence[tuple[Evaluator, Policy]]) -> tuple[Evaluator, Policy]:
    """Policy with the lowest bound. Bounds are slow: a policy with a busiest lane above the best bound is skipped."""
    busy = [(max(busy_s(e.setup(policy), e.cost).values()), i) for i, (e, policy) in enumerate(likely)]
    best_s, best = inf, 0
    for floor_s, i in sorted(busy):
        if floor_s > best_s:
            break
        evaluator, policy = likely[i]
        best_s, best = min((best_s, best), (evaluator.bound_s(policy), i))
    return likely[best]


def fitting_sizes(model: Model, semantics: Semantics, profile: Profile) -> Sequence[Size]:
    """Sizes to choose from if some policy fits with one of them; empty otherwise."""
    workload = build_workload(model, semantics)
    frozen_bytes = (workload.n_params - workload.n_trained) * LEAST_FROZEN_BYTES
    least_bytes = workload.n_trained * semantics.state_bytes + frozen_bytes  # on host and device
    if least_bytes > semantics.ranks * (profile.host.memory_bytes.value + profile.device.memory_bytes.value):
        return []
    sizes = possible_sizes(model, with_kernels(model, semantics, profile), profile)
    plans = (smallest_plans(model, workload, sized, profile) for sized, workload in reversed(sizes))  # most likely to fit first
    return sizes if any(needs.fits for _, needs in chain.from_iterable(plans)) else []


def _semantics(model: Model, semantics: Semantics) -> Semantics:
    """Use the model's best attention and its library kernels: traces for these are shipped, so torch is not needed."""
    return replace(semantics, attention=supported_attention(model)[0], library_kernels=library_kernels(model))  # type: ignore[arg-type]
