"""Breakdown of a step by cause, and the gain from more of each resource.

The plan is simulated on a machine where only compute takes time, then with one further cause at a time: the increase in step time
is that cause's part. Fill and drain are copies that compute cannot hide, before the first layer starts and after the last one ends.
They come last, with fixed overheads per op.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.cost import costs, region_of
from penstock.planner.predict.region import Demand
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.predict.simulate import simulate
from penstock.planner.search.tuning import MAX_STEPS
from penstock.runtime.plan import Kind, Lane, Plan
from penstock.runtime.plan.workload import Saved

FREE = 1e18  # speed factor: takes no time
GAIN = 1.1  # speed factor of a gain
NOISE_FRACTION = 1e-9  # of the step: remainders of `FREE` are below it
RESOURCES: dict[str, tuple[Group, ...]] = {
    "device compute": (Group.MATMUL, Group.ATTENTION, Group.DEVICE_MEMORY),
    "link": (Group.UPLOAD, Group.DOWNLOAD, Group.DUPLEX, Group.PEERS, Group.NETWORK),
    "disk": (Group.DISK,),
    "host DRAM": (Group.DRAM, Group.PAGE_FAULTS),
    "optimizer": (Group.OPTIMIZER, Group.REDUCE),
    "launch and latency": (Group.LAUNCH,),
}


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Seconds of a step by cause. Parts are not negative, and their sum is the step."""

    ideal_compute_s: float  # one forward and backward on the device without launches, and norms if computed there
    recompute_s: float  # repeated forwards of activations that were not saved
    link_s: float  # waiting for copies and reads, with infinite host memory bandwidth and no optimizer
    host_dram_s: float  # contention of copies and optimizer for host memory bandwidth
    optimizer_s: float  # waiting for norm and update, at their uncontended rate
    fill_drain_and_launch_s: float  # copies that compute cannot hide, kernel and op overhead, copy latency

    @property
    def step_s(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True, slots=True)
class Gain:
    """Simulation of the plan with 10 % more of one resource. Contention can make `saved_s` negative."""

    resource: str
    step_s: float
    saved_s: float
    saved_fraction: float


def waterfall(plan: Plan, profile: Profile) -> Waterfall:
    """Compute the parts of the plan's step.

    Link, optimizer and host memory are added in this order, because contention for host memory only appears if all three use it.
    """
    burdens = ["device compute"]
    computing = _only(profile, *burdens)
    # Ops with all activations saved: backward recomputes nothing.
    policy = replace(plan.policy, save=(Saved.ALL,) * plan.workload.n_layers, offload_blocks=())
    levels = [_compute_s(replace(plan, policy=policy), computing, excluded=(Kind.RECOMPUTE,)), _compute_s(plan, computing)]
    for burden in (("link", "disk"), ("optimizer",), ("host DRAM",)):
        burdens += burden
        machine = _only(profile, *burdens)
        levels.append(_step_s(plan, machine, _hidden_edges(plan, machine)))
    ideal_s, recompute_s, link_s, optimizer_s, dram_s, rest_s = _growth(levels, _step_s(plan, profile))
    return Waterfall(ideal_s, recompute_s, link_s, dram_s, optimizer_s, rest_s)


def gains(plan: Plan, profile: Profile) -> tuple[Gain, ...]:
    """Gain from 10 % more of each resource, the largest first."""
    step_s, result = _step_s(plan, profile), []
    for resource, groups in RESOURCES.items():
        if resource == "disk" and not plan.policy.disk_blocks:
            continue
        with_more_s = _step_s(plan, faster(profile, dict.fromkeys(groups, GAIN)))
        result.append(Gain(resource, with_more_s, step_s - with_more_s, 1 - with_more_s / step_s))
    return tuple(sorted(result, key=lambda gain: -gain.saved_s))  # stable: ties keep the order of RESOURCES


def _growth(levels_s: Sequence[float], step_s: float) -> list[float]:
    """Increase of each level over the previous ones, and the remainder up to the step.

    With contention, a further cause can shorten a step. A level below the previous maximum then adds 0, and levels are capped at
    the step.
    """
    reached_s = 0.0
    grown_s: list[float] = []
    for level_s in levels_s:
        added_s = min(level_s, step_s) - reached_s
        grown_s.append(added_s if added_s > NOISE_FRACTION * step_s else 0.0)
        reached_s += grown_s[-1]
    return [*grown_s, max(0.0, step_s - reached_s)]


def _only(profile: Profile, *burdens: str) -> Profile:
    """Profile on which only these resources take time."""
    return faster(profile, {group: FREE for name, groups in RESOURCES.items() if name not in burdens for group in groups})


def _step_s(plan: Plan, profile: Profile, demands: list[Demand] | None = None) -> float:
    return simulate(plan, demands or costs(plan, profile), region_of(profile), MAX_STEPS).step_s


def _compute_s(plan: Plan, profile: Profile, excluded: Sequence[Kind] = ()) -> float:
    """Seconds of the device's ops, run alone, without ops of these kinds."""
    demands = zip(plan.ops, costs(plan, profile), strict=True)
    return sum(plan.often(i) * d.alone_s for i, (op, d) in enumerate(demands) if op.lane is Lane.GPU and op.kind not in excluded)


def _hidden_edges(plan: Plan, profile: Profile) -> list[Demand]:
    """Demands of the ops, with zero time for uploads up to the first layer's, and for downloads after the last layer's."""
    demands, layers = costs(plan, profile), range(1, plan.workload.n_layers + 1)
    for lane, order in ((Lane.H2D, 1), (Lane.D2H, -1)):
        copies = [i for i, op in enumerate(plan.ops) if op.lane is lane][::order]
        first = next((n for n, i in enumerate(copies) if plan.ops[i].block in layers), -1)
        for i in copies[: first + 1]:
            demands[i] = Demand(0.0, 0.0)
    return demands
