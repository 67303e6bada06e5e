"""Published claims about other systems, against the same quantities in our model.

Claims without a complete run, so no constant was fitted to them: ratios, ablations, limits, and times of single copies. Each is
computed with the shipped profiles and compared with its source, misses included.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.published.system_costs import Software, SystemCosts
from benchmarks.published.system_memory import zero3_device_bytes, zero3_keeps_activations
from benchmarks.published.systems import MegaTrain, Outcome, Run, predict
from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.workload import build_workload, read_model
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import GB, TB, GiB

TFLOP = 10**12
NEAR_FRACTION = 0.1  # a claim holds within this distance
PAPER, FORK, FLEX = "arXiv 2604.05091", "bdqnghi/MegaTrain-Plus, its author's notes", "als244/flextrain"
MOST_SEQUENCES = 512
_read_profile = cache(read_profile)


@dataclass(frozen=True, slots=True)
class PublishedClaim:
    """A published number, from `low` to `high` (None: unbounded), and our value."""

    quantity: str
    source: str
    low: float | None
    high: float | None
    value: float
    unit: str
    note: str = ""  # interpretation, or the reason of a miss

    @property
    def holds(self) -> bool:
        """True if our value is in the range, or within a tenth of it."""
        slack = NEAR_FRACTION * abs(self.value)
        return (self.low is None or self.value >= self.low - slack) and (self.high is None or self.value <= self.high + slack)

    def row(self) -> tuple[str, str, str, str, str, str]:
        """Return claim, source, published value, our value, verdict and note."""
        low, high = (None if x is None else f"{x:.4g}" for x in (self.low, self.high))
        words = (
            low if low == high else f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
        )
        verdict, value = "holds" if self.holds else "misses", f"{self.value:.4g} {self.unit}"
        return self.quantity, self.source, f"{words} {self.unit}", value, verdict, self.note


def claims() -> list[PublishedClaim]:
    """Return all definite claims of the sources that are not runs of the ledger."""
    return [*_megatrain(), *_limits(), *_fork(), *_other_systems()]


def _megatrain() -> Iterator[PublishedClaim]:
    def rate(model: str | Model, batch: int, variant: str = "full") -> float:
        return _claimed_rate(_outcome("megatrain", "gh200", model, batch, 1024, variant))

    def fits_32b(batch: int) -> bool:
        return _outcome("megatrain", "gh200", "qwen2.5-32b", batch, 1024).device_peak_bytes <= _usable_bytes("gh200")

    yield PublishedClaim(
        "GH200, 32B", PAPER, 250, None, rate("qwen2.5-32b", _largest(fits_32b)), "TFLOP/s", "at the largest batch that we say fits"
    )
    full, single = rate("qwen2.5-14b", 96), rate("qwen2.5-14b", 96, "no-slab-pool")
    yield PublishedClaim("GH200, 14B, 96 sequences, without the slab pool", PAPER, 257.6, 257.6, single, "TFLOP/s")
    yield PublishedClaim(
        "what that pool gives", PAPER, 3.4, 3.4, round(100 * (full / single - 1), 3), "%",
        "with one buffer the gradient thread, at the page-fault rate taken for Grace, still keeps ahead of a layer's backward; in "
        "the paper the main thread seems to wait for it",
    )  # fmt: skip
    n = _largest(lambda batch: zero3_keeps_activations(_costs("gh200", "qwen2.5-14b", batch)))
    zero3 = _claimed_rate(_outcome("zero3-offload", "gh200", "qwen2.5-14b", n, 1024))
    recomputing = _largest(lambda batch: zero3_device_bytes(_costs("gh200", "qwen2.5-14b", batch)) <= _usable_bytes("gh200"))
    better = _claimed_rate(_outcome("zero3-offload", "gh200", "qwen2.5-14b", recomputing, 1024))
    yield PublishedClaim(
        "GH200, 14B: MegaTrain over ZeRO-3 offload", PAPER, 1.84, 1.84, full / zero3, "times",
        f"the batch of ZeRO-3 is not given: here {n}, the largest that keeps all activations, as in the run on the MI355X; with "
        f"{recomputing} sequences and recompute we say {full / better:.2f}",
    )  # fmt: skip
    config = read_model("qwen2.5-7b").config
    deep = [rate(Model({**config, "num_hidden_layers": n}, None, f"{n} layers"), 158) for n in (28, 180)]
    yield PublishedClaim(
        "from 28 to 180 layers of one width, rate lost", PAPER, 20.1, 20.1, 100 * (1 - deep[1] / deep[0]), "%",
        "284 to 227 TFLOP/s; batch and machine are not given (180 layers of the 7B exceed a GH200's host memory). All our costs "
        "but fill and drain grow with the layers",
    )  # fmt: skip


def _limits() -> Iterator[PublishedClaim]:
    largest = _outcome("megatrain", "h200-pcie5", "gpt-oss-120b", 64, 1024)
    yield PublishedClaim(
        "H200 with 1.5 TB, GPT-OSS-120B: host memory", PAPER, None, 1.5 * TB / GB, largest.host_peak_bytes / GB, "GB",
        "over 1.5e12 bytes, within 1.5 TiB",
    )  # fmt: skip
    yield PublishedClaim("the same: device memory", PAPER, None, 139, largest.device_peak_bytes / GiB, "GiB")
    long = _outcome("megatrain", "gh200", "qwen2.5-7b", 1, 524288)
    yield PublishedClaim(
        "GH200, 7B, one sequence of 512 K: device memory", PAPER, None, 94.5, long.device_peak_bytes / GiB, "GiB",
        "neither the logits of this length nor an unfused MLP would fit: other code than the published one ran, as at 256 K",
    )  # fmt: skip
    swapping = _outcome("megatrain", "gb10", "qwen2.5-32b", 2, 512, updates=False)
    yield PublishedClaim(
        "GB10, 32B: a run that swapped, so host and device together need more than the pool", FORK, 119, None,
        (swapping.host_peak_bytes + swapping.device_peak_bytes) / GiB, "GiB",
    )  # fmt: skip


def _fork() -> Iterator[PublishedClaim]:
    """Yield the fork's changes one by one, on its machine, with a 7B and no optimizer."""
    costs = _costs("gb10", "qwen2.5-7b", 2, 512)
    base, inputs, views, third = (
        _phases(costs, *changes) for changes in ((False, False, 2), (True, False, 2), (True, True, 2), (True, True, 3))
    )
    step_s = {name: sum(phases) for name, phases in zip("biv3", (base, inputs, views, third), strict=True)}
    yield PublishedClaim("one forward in backward: backward", FORK, -30, -27, 100 * (inputs[1] / base[1] - 1), "%")
    yield PublishedClaim("one forward in backward: tokens/s", FORK, 23, 28, 100 * (step_s["b"] / step_s["i"] - 1), "%")
    yield PublishedClaim("weights as views: step", FORK, -8, -8, 100 * (step_s["v"] / step_s["i"] - 1), "%")
    yield PublishedClaim("a third buffer: step", FORK, 0, 0, 100 * (step_s["3"] / step_s["v"] - 1), "%")
    layer = costs.layers[0]
    n_bytes = layer.n_params * 2
    yield PublishedClaim("flattening a layer on the CPU", FORK, 10.4, 10.4, 1e3 * costs.flatten(layer).uncontended_s, "ms")
    yield PublishedClaim(
        "copying it on the device", FORK, 6.2, 6.2, 1e3 * costs.unpack(n_bytes, len(layer.parameters)).uncontended_s, "ms",
        "between buffers at the rate of pointwise kernels, 0.85 of the datasheet; the profile's copies within the pool take 6.2",
    )  # fmt: skip
    formula_ms = 5.7 + n_bytes / 25e9 * 1e3
    forward_ms = (
        1e3 * _outcome("megatrain-plus", "gb10", "qwen2.5-7b", 2, 512, updates=False).phases_s["forward_s"] / len(costs.layers)
    )
    yield PublishedClaim("a layer's forward: 5.7 ms and its bytes at 25 GB/s", FORK, formula_ms, formula_ms, forward_ms, "ms")


def _other_systems() -> Iterator[PublishedClaim]:
    for model, rate in (("llama-3.1-8b", 3723), ("qwen3-8b", 3533)):
        outcome = _outcome("slideformer", "rtx5090-server", model, 32, 1024)
        yield PublishedClaim(
            f"RTX 5090, {model}, full training", FLEX, rate, rate, outcome.n_tokens / outcome.step_s, "tokens/s",
            "another system: here SlideFormer with 32 sequences of 1024, for the order of magnitude",
        )  # fmt: skip


def _outcome(
    system: str, machine: str, model: str | Model, batch: int, seq_len: int, variant: str = "full", updates: bool = True
) -> Outcome:
    read = read_model(model) if isinstance(model, str) else model
    run = Run(system, machine, read.name or "", batch, seq_len, variant, updates)
    return predict(run, read, _read_profile(machine), Software())


def _claimed_rate(outcome: Outcome) -> float:
    return outcome.claimed_flop / outcome.step_s / TFLOP


def _costs(machine: str, model: str, batch: int, seq_len: int = 1024) -> SystemCosts:
    semantics = Semantics(seq_len, batch, batch)
    return SystemCosts(_read_profile(machine), Software(), build_workload(read_model(model), semantics), semantics)


def _phases(costs: SystemCosts, keeps_inputs: bool, views: bool, n_buffers: int) -> tuple[float, float, float]:
    """Return seconds of forward, backward and zeroing with some of the fork's changes."""
    run = Run("megatrain", costs.profile.name, "", costs.semantics.batch_size, costs.semantics.seq_len, updates=False)
    m = MegaTrain(replace(costs), run)
    m.keeps_inputs, m.views, m.n_buffers = keeps_inputs, views, n_buffers
    phases = m.phases_s()
    return phases["forward_s"], phases["backward_s"], costs.zero_s()


def _usable_bytes(machine: str) -> float:
    device = _read_profile(machine).device
    return device.memory_bytes.value - device.context_bytes.value


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest batch that fits, at least 1."""
    low, high = 1, MOST_SEQUENCES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
