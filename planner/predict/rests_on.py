"""Provenance of a prediction: the share of its seconds that rests on measurements of the device, on others, or on assumptions.

Seconds are sums of work over rates, so what rests on a rate is what they lose when it is a little faster. A profile with one rate
faster is costed as any other: there is no second account of costs.
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
from .faster import Group, scaled, speed_of

FASTER = 1.001
N_WORST = 3
LEAST_FRACTION = 0.0005  # of the seconds, that a part is named for
STANDARD_MODEL, STANDARD_SEQUENCES, STANDARD_TOKENS = "qwen3-8b", 4, 4096  # the work by which machines are compared


@dataclass(frozen=True, slots=True)
class Part:
    """The share of some seconds that rests on one sort of speed, from one sort of source."""

    what: str
    basis: Basis
    fraction: float


@dataclass(frozen=True, slots=True)
class RestsOn:
    """The parts of some seconds, the largest first."""

    parts: tuple[Part, ...]

    def fraction(self, basis: Basis) -> float:
        return sum(part.fraction for part in self.parts if part.basis == basis)

    @property
    def worst(self) -> list[Part]:
        """The largest parts that rest on no measurement of this device."""
        return [part for part in self.parts if part.basis != BASES[0] and part.fraction >= LEAST_FRACTION][:N_WORST]

    def to_json(self) -> dict[str, Any]:
        return {basis: self.fraction(basis) for basis in BASES} | {"worst": list(map(asdict, self.worst))}


def rests_on(plan: Plan, profile: Profile) -> tuple[RestsOn, RestsOn | None]:
    """Provenance of the device's seconds in a step of the plan, and of all other lanes' seconds; None where they have none."""
    base = CostModel(profile)
    alike: dict[int, tuple[int, Op]] = {}  # ops that cost the same, as `CostModel` remembers them: how many, and the first
    for i, op in enumerate(plan.ops):
        n, first = alike.get(same := id(base.demand(plan, op)), (0, op))
        alike[same] = n + plan.often(i), first

    def seconds(on_device: bool) -> Callable[[CostModel], float]:
        own = [(n, op) for n, op in alike.values() if (op.lane is Lane.GPU) is on_device]
        return lambda cost: float(sum(n * cost.demand(plan, op).uncontended_s for n, op in own))

    others = seconds(on_device=False)
    return shares(profile, seconds(on_device=True)), shares(profile, others) if others(base) > 0 else None


def standard(profile: Profile) -> RestsOn:
    """Provenance of a device's seconds in forward and backward of a standard model, with nothing recomputed."""
    model = read_model(STANDARD_MODEL)
    semantics = with_kernels(model, Semantics(STANDARD_TOKENS, STANDARD_SEQUENCES, STANDARD_SEQUENCES), profile)
    embedding, layer, *_, head = build_workload(model, semantics).blocks
    n_layers = model.config["num_hidden_layers"]

    def seconds(cost: CostModel) -> float:
        layer_s = cost.forward_s(layer, semantics) + cost.backward_s(layer, semantics)
        return float(n_layers * layer_s) + cost.forward_s(embedding, semantics) + cost.loss_s(head, semantics)

    return shares(profile, seconds)


def shares(profile: Profile, seconds: Callable[[CostModel], float]) -> RestsOn:
    """Provenance of the seconds that a function gives for a machine's costs."""
    places: dict[tuple[str, str], set[str]] = {}
    for place, quantity in profile.quantities():
        if (name := speed_of(place)) is not None:
            places.setdefault((name, quantity.source), set()).add(place)
    whole_s = seconds(CostModel(profile))
    found = Counter[tuple[str, Basis]]()
    for (name, source), some in places.items():
        faster_s = seconds(CostModel(scaled(profile, dict.fromkeys(some, FASTER))))
        found[name, profile.sources[source].basis] += (whole_s - faster_s) / (whole_s * (1 - 1 / FASTER))  # type: ignore[assignment]
    if (sustained := profile.device.sustained_fraction) is not None:
        # All products run by its rate, but only what it takes from their own rests on it.
        taken = abs(1 - sustained.value)
        for name, basis in found:
            if name in (Group.MATMUL, Group.SUSTAINED):
                found[name, basis] *= taken if name == Group.SUSTAINED else 1 - taken  # type: ignore[assignment]
    total = sum(found.values())
    parts = (Part(name, basis, fraction / total) for (name, basis), fraction in found.items() if fraction > 0)
    return RestsOn(tuple(sorted(parts, key=lambda part: -part.fraction)))
