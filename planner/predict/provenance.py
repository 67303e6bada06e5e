"""Provenance of a prediction: shares of its seconds that depend on measurements of the device, other measurements, or assumptions.

Seconds are sums of work over rates, so the share of a rate is its elasticity: the relative decrease of seconds when the rate is a
little faster. It is computed from the cost model with a scaled profile.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from penstock.hwprofiles.quantity import BASES, Basis
from penstock.hwprofiles.schema import Profile
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model
from penstock.runtime.plan import Lane, Op, Plan, Semantics

from .cost import CostModel
from .scaled_profile import Group, scaled, speed_of

FASTER = 1.001
N_WORST = 3
LEAST_FRACTION = 0.0005  # smallest share that is reported
STANDARD_MODEL, STANDARD_SEQUENCES, STANDARD_TOKENS = "qwen3-8b", 4, 4096  # reference workload to compare machines


@dataclass(frozen=True, slots=True)
class Part:
    """Share of the seconds that depends on one speed, from one basis (measured on the device, elsewhere, assumed)."""

    what: str
    basis: Basis
    fraction: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """Provenance of some seconds; the largest part is first."""

    parts: tuple[Part, ...]

    def fraction(self, basis: Basis) -> float:
        return sum(part.fraction for part in self.parts if part.basis == basis)

    @property
    def worst(self) -> list[Part]:
        """Largest parts that are not measured on this device."""
        return [part for part in self.parts if part.basis != BASES[0] and part.fraction >= LEAST_FRACTION][:N_WORST]

    def to_json(self) -> dict[str, Any]:
        return {basis: self.fraction(basis) for basis in BASES} | {"worst": list(map(asdict, self.worst))}


def provenance_of(plan: Plan, profile: Profile) -> tuple[Provenance, Provenance | None]:
    """Return the provenance of the device's seconds in a step, and of all other lanes' seconds (None if these are zero)."""
    base = CostModel(profile)
    groups: dict[int, tuple[int, Op]] = {}  # cached demand -> (count, first op)
    for i, op in enumerate(plan.ops):
        n, first = groups.get(same := id(base.demand(plan, op)), (0, op))
        groups[same] = n + plan.often(i), first

    def seconds(on_device: bool) -> Callable[[CostModel], float]:
        counted = [(n, op) for n, op in groups.values() if (op.lane is Lane.GPU) is on_device]
        return lambda cost: float(sum(n * cost.demand(plan, op).uncontended_s for n, op in counted))

    other_seconds = seconds(on_device=False)
    return shares(profile, seconds(on_device=True)), shares(profile, other_seconds) if other_seconds(base) > 0 else None


def standard(profile: Profile) -> Provenance:
    """Return the provenance of compute time on the reference workload, without recompute."""
    model = read_model(STANDARD_MODEL)
    semantics = with_kernels(model, Semantics(STANDARD_TOKENS, STANDARD_SEQUENCES, STANDARD_SEQUENCES), profile)
    embedding, layer, *_, head = build_workload(model, semantics).blocks
    n_layers = model.config["num_hidden_layers"]

    def seconds(cost: CostModel) -> float:
        layer_s = cost.forward_s(layer, semantics) + cost.backward_s(layer, semantics)
        return float(n_layers * layer_s) + cost.forward_s(embedding, semantics) + cost.loss_s(head, semantics)

    return shares(profile, seconds)


def shares(profile: Profile, seconds: Callable[[CostModel], float]) -> Provenance:
    """Return the provenance of a function of the cost model."""
    places: dict[tuple[str, str], set[str]] = {}
    for place, quantity in profile.quantities():
        if (name := speed_of(place)) is not None:
            places.setdefault((name, quantity.source), set()).add(place)
    whole_s = seconds(CostModel(profile))
    fractions = Counter[tuple[str, Basis]]()
    for (name, source), paths in places.items():
        faster_s = seconds(CostModel(scaled(profile, dict.fromkeys(paths, FASTER))))
        fractions[name, profile.sources[source].basis] += (whole_s - faster_s) / (whole_s * (1 - 1 / FASTER))  # type: ignore[assignment]
    if (sustained := profile.device.sustained_fraction) is not None:
        # All products scale with the sustained fraction, but it accounts only for the slowdown that it causes
        slowdown = abs(1 - sustained.value)
        for name, basis in fractions:
            if name in (Group.MATMUL, Group.SUSTAINED):
                fractions[name, basis] *= slowdown if name == Group.SUSTAINED else 1 - slowdown  # type: ignore[assignment]
    total = sum(fractions.values())
    parts = (Part(name, basis, fraction / total) for (name, basis), fraction in fractions.items() if fraction > 0)
    return Provenance(tuple(sorted(parts, key=lambda part: -part.fraction)))
