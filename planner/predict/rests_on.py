"""What do the seconds of a step rest on: measurements of this device, those of another, or assumptions?

Seconds are sums of work over rates, so what rests on a rate is what they lose when it is a little faster. Each profile with one
rate faster is costed as any other: there is no second account of costs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hwprofiles.quantity import BASES, Basis, Quantity
from hwprofiles.schema import Profile
from planner.model.kernels import with_kernels
from planner.model.workload import build_workload, read_model
from runtime.plan import Lane, Plan, Semantics

from .cost import CostModel
from .faster import group_of, sped_up, with_quantities

FASTER = 1.001
N_WORST = 3
ENOUGH_FRACTION = 0.75  # of the seconds to rest on measurements of the device; below it the reader is told to measure
LEAST_FRACTION = 0.0005  # of the seconds, that a part is named for
STANDARD_MODEL, STANDARD_SEQUENCES, STANDARD_TOKENS = "qwen3-8b", 4, 4096  # of the work by which machines are compared
# What a rate is of, by the beginning of its place in a profile; the first that fits.
PARTS: dict[str, str] = {
    "device.matmul.": "matrix products",
    "device.sustained_fraction": "products under load",
    "device.attention.": "attention",
    "device.norms.": "fused norms",
    "device.eager_bytes_per_s": "eager modules",
    "device.memory_bytes_per_s": "device memory",
    "device.kernel_overhead_s": "kernels' overhead",
    "device.op_overhead_s": "ops' overhead",
    "link.": "copies",
    "host.optimizer": "the optimizer",
    "host.": "host memory",
    "peers.": "exchange between devices",
    "network.": "exchange between hosts",
}
UNDER_LOAD = "products under load"


@dataclass(frozen=True, slots=True)
class Part:
    """What of the seconds rests on rates of one sort with one source."""

    what: str
    basis: Basis
    fraction: float

    def __str__(self) -> str:
        return f"{self.what} {self.fraction:.1%}"


@dataclass(frozen=True, slots=True)
class RestsOn:
    """The parts of some seconds, the largest first."""

    parts: tuple[Part, ...]

    def fraction(self, basis: Basis) -> float:
        return sum(part.fraction for part in self.parts if part.basis == basis)

    @property
    def worst(self) -> list[Part]:
        """The largest parts that no measurement of this device stands for."""
        return [part for part in self.parts if part.basis != BASES[0] and part.fraction >= LEAST_FRACTION][:N_WORST]

    def to_json(self) -> dict[str, Any]:
        worst = [{"what": part.what, "basis": part.basis, "fraction": part.fraction} for part in self.worst]
        return {**{basis: self.fraction(basis) for basis in BASES}, "worst": worst}

    def words(self, whose: str) -> str:
        """`94 % of the device's seconds rest on measurements of this GPU, 4 % on those of another, 2 % on assumptions`."""
        this, another, assumed = (f"{self.fraction(basis):.0%}" for basis in BASES)
        least = f" (most of all: {', '.join(map(str, self.worst))})" if self.worst else ""
        here = f"{this} of {whose} seconds rest on measurements of this device"
        return f"{here}, {another} on those of another, {assumed} on assumptions{least}"


def rests_on(plan: Plan, profile: Profile) -> tuple[RestsOn, RestsOn | None]:
    """Of the device's seconds in a step of the plan, and of those of all other lanes; None: they have none to speak of."""
    base = CostModel(profile)
    alike: dict[tuple[bool, int], int] = {}  # ops that cost the same, as `CostModel` remembers them, by their first
    counts = Counter[int]()
    for i, op in enumerate(plan.ops):
        first = alike.setdefault((op.lane is Lane.GPU, id(base.demand(plan, op))), i)
        counts[first] += plan.often(i)

    def seconds(on_device: bool) -> Callable[[CostModel], float]:
        own = [(n, plan.ops[i]) for i, n in counts.items() if (plan.ops[i].lane is Lane.GPU) is on_device]
        return lambda cost: float(sum(n * cost.demand(plan, op).uncontended_s for n, op in own))

    others = seconds(on_device=False)
    return shares(profile, seconds(on_device=True)), shares(profile, others) if others(base) > 0 else None


def standard(profile: Profile) -> RestsOn:
    """Of a device's seconds in forward and backward of a standard model, with nothing computed again."""
    model = read_model(STANDARD_MODEL)
    asked = Semantics(STANDARD_TOKENS, STANDARD_SEQUENCES, STANDARD_SEQUENCES)
    semantics = with_kernels(model, asked, profile)
    embedding, layer, *_, head = build_workload(model, semantics).blocks
    n_layers = model.config["num_hidden_layers"]

    def seconds(cost: CostModel) -> float:
        layer_s = cost.forward_s(layer, semantics) + cost.backward_s(layer, semantics)
        return float(n_layers * layer_s) + cost.forward_s(embedding, semantics) + cost.loss_s(head, semantics)

    return shares(profile, seconds)


def shares(profile: Profile, seconds: Callable[[CostModel], float]) -> RestsOn:
    """What of some seconds rests on what."""
    whole_s = seconds(CostModel(profile))
    found: dict[tuple[str, Basis], float] = {}
    for (what, source), places in _rates(profile).items():
        faster_s = seconds(CostModel(_faster(profile, places)))
        key = what, profile.sources[source].basis
        found[key] = found.get(key, 0.0) + (whole_s - faster_s) / (whole_s * (1 - 1 / FASTER))
    sustained = profile.device.sustained_fraction
    if sustained is not None:  # all products run by its rate, but only what it takes from their own rests on it
        for what, basis in [key for key in found if key[0] == UNDER_LOAD]:
            products = found[what, basis]
            found[what, basis] = products * abs(1 - sustained.value)
            for key in [key for key in found if key[0] == PARTS["device.matmul."]]:
                found[key] *= 1 - abs(1 - sustained.value)
    total = sum(found.values())
    parts = (Part(what, basis, fraction / total) for (what, basis), fraction in found.items() if fraction > 0)
    return RestsOn(tuple(sorted(parts, key=lambda part: -part.fraction)))


def _rates(profile: Profile) -> Mapping[tuple[str, str], frozenset[str]]:
    """By what they are of, and their source, the places of a profile's rates and times."""
    found: dict[tuple[str, str], set[str]] = {}
    for place, quantity in profile.quantities():
        what = next((words for begins, words in PARTS.items() if place.startswith(begins)), None)
        if what is not None and (group_of(place) is not None or place == "device.op_overhead_s"):
            found.setdefault((what, quantity.source), set()).add(place)
    return {key: frozenset(places) for key, places in found.items()}


def _faster(profile: Profile, places: frozenset[str]) -> Profile:
    def change(place: str, quantity: Quantity) -> Quantity:
        return sped_up(place, quantity, FASTER) if place in places else quantity

    return with_quantities(profile, change)


def lines(plan: Plan, profile: Profile) -> Iterator[str]:
    """What a step rests on, for people."""
    device, others = rests_on(plan, profile)
    yield device.words("the device's")
    if device.fraction(BASES[0]) < ENOUGH_FRACTION:
        yield "measure the machine with `penstock probe` and plan again: the prediction is as good as what it rests on"
    if others is not None:
        yield others.words("the other lanes'")
