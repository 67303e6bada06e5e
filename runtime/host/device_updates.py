"""How does a device update the state that it holds?

To the host's bits: AdamW is one sequence of operations, each rounded once, that of torch's fused kernel for processors. A device
performs it in one kernel or call by call, in the first way that is found to give the host's bits; the slowest is made to give them.
A processor computes the last few elements of a parameter, those that fill no register, in another sequence: blocks with such
parameters stay on the host (`legality.can_stay`).
"""

# All tensors are flat fp32 chunks of one parameter, unless a name says otherwise.
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache

import torch

from runtime.errors import PlanError
from runtime.plan import Op, Plan
from runtime.plan.optimizer import AdamW
from runtime.plan.setup import DEVICE_UPDATE_ELEMENTS
from runtime.plan.workload import Parameter

from .chunks import Scratch, halves, join, round_up_half
from .host_state import HostState
from .memory import Arenas
from .optimizer import ParamState, SplitMaster, adamw_
from .updates import Updates
from .workers import Workers

CPU_ELEMENTS = 2**17  # that a processor updates at a time: what it makes of them stays in a cache
PROBE_ELEMENTS = 2**16 + 24

Tensor = torch.Tensor
MultiplyAdd = Callable[[Tensor, Tensor, Tensor], Tensor]  # a * b + c, rounded once


@dataclass(frozen=True, slots=True)
class Factors:
    """What one update multiplies by, divides by and adds: doubles, each rounded to fp32 where it is used."""

    decay: float  # of the weight
    towards: float  # the gradient, of the first moment
    beta2: float
    of_square: float
    correction: float  # of the second moment's root
    eps: float
    rate: float  # of the first moment, negative

    @staticmethod
    def of(settings: AdamW, n_updates: int) -> "Factors":
        """`n_updates` counts from 1, as the fused kernel's step does."""
        of_first, of_second = (1 - beta**n_updates for beta in (settings.beta1, settings.beta2))
        return Factors(
            1 - settings.lr * settings.weight_decay,
            1 - settings.beta1,
            settings.beta2,
            1 - settings.beta2,
            math.sqrt(of_second),
            settings.eps,
            -settings.lr / of_first,
        )


Step = Callable[[Tensor, Tensor, Tensor, Tensor, Factors], None]  # master, gradient, first and second moment: in place


def call_by_call(multiply_add: MultiplyAdd) -> Step:
    """AdamW in torch's own operations. Each but the one that is given rounds once, right, on every device."""

    def step(master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, by: Factors) -> None:
        def scalar(value: float) -> Tensor:
            """On the device: a quotient by a number of the host's would be a product with its reciprocal."""
            return torch.full((), value, dtype=torch.float32, device=master.device)

        master.mul_(scalar(by.decay))
        towards = scalar(by.towards)
        is_near = abs(by.towards) < 0.5
        coefficient, base = (towards, exp_avg) if is_near else (towards - 1, gradient)
        exp_avg.copy_(multiply_add(coefficient.expand_as(base), gradient - exp_avg, base))
        part = scalar(by.of_square) * gradient
        exp_avg_sq.copy_(multiply_add(part, gradient, exp_avg_sq * scalar(by.beta2)))
        # The root of a double, rounded, is the root of an fp32 rounded right; not every processor's own is.
        root = exp_avg_sq.double().sqrt_().float() if master.device.type == "cpu" else exp_avg_sq.sqrt()
        denominator = root.div_(scalar(by.correction)).add_(scalar(by.eps))
        master.add_((exp_avg * scalar(by.rate)).div_(denominator))

    return step


def emulated(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once, in doubles: the product is exact, and a sum that is not is made odd, so that it comes out right when
    it is rounded again (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008)."""
    product, wide = a.double() * b.double(), c.double()
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    is_even = (total.view(torch.int64) & 1) == 0
    further = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).to(total.dtype))
    return torch.where((error != 0) & is_even & torch.isfinite(total), further, total).float()


def by_addcmul(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """What torch computes so on many processors."""
    return torch.addcmul(c, a, b)


_KERNEL = """
template <typename T>
void adamw(T master, T gradient, T exp_avg, T exp_avg_sq, T decay, T towards, T beta2, T of_square, T correction, T eps, T rate,
           T& next, T& first, T& second) {
    bool is_near = fabsf(towards) < 0.5f;
    first = __fmaf_rn(is_near ? towards : __fsub_rn(towards, 1.0f), __fsub_rn(gradient, exp_avg), is_near ? exp_avg : gradient);
    second = __fmaf_rn(__fmul_rn(of_square, gradient), gradient, __fmul_rn(exp_avg_sq, beta2));
    T denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), correction), eps);
    next = __fadd_rn(__fmul_rn(master, decay), __fdiv_rn(__fmul_rn(rate, first), denominator));
}
"""


def one_kernel() -> Step:
    """AdamW in one kernel of a CUDA device, whose functions say how they round."""
    names = [field.name for field in fields(Factors)]
    kernel = torch.cuda.jiterator._create_multi_output_jit_fn(_KERNEL, num_outputs=3, **dict.fromkeys(names, 0.0))

    def step(master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, by: Factors) -> None:
        found = kernel(master, gradient, exp_avg, exp_avg_sq, **asdict(by))
        for place, value in zip((master, exp_avg, exp_avg_sq), found, strict=True):
            place.copy_(value)

    return step


@lru_cache(maxsize=8)
def exact_step(device: torch.device) -> Step:
    """The first way to perform AdamW there that gives the host's bits. PlanError where none does."""
    for candidate in _candidates(device):
        if gives_the_hosts_bits(candidate, device):
            return candidate
    raise PlanError(
        f"no AdamW on {device.type} gives the host's bits here; plan with --policy FILE, a policy with empty device_blocks"
    )


def _candidates(device: torch.device) -> Iterator[Step]:
    if device.type == "cuda":
        yield one_kernel()
    else:
        yield call_by_call(by_addcmul)
    yield call_by_call(emulated)


def gives_the_hosts_bits(step: Step, device: torch.device) -> bool:
    """Whether it does on numbers of every size; False also where it cannot be performed."""
    generator = torch.Generator().manual_seed(0)

    def numbers(spread: int) -> Tensor:
        exponents = torch.randint(-spread, spread, (PROBE_ELEMENTS,), generator=generator)
        return torch.randn(PROBE_ELEMENTS, generator=generator) * 10.0**exponents

    for settings in (AdamW(lr=1e-3), AdamW(lr=3e-5, beta1=0.4, beta2=0.99, weight_decay=0.1), AdamW(lr=0.1, weight_decay=0.0)):
        host = ParamState(numbers(2), numbers(6), numbers(6).square())
        found = [part.clone().to(device) for part in (host.master, host.exp_avg, host.exp_avg_sq) if isinstance(part, Tensor)]
        for n_updates in (1, 2, 1000):
            gradient = numbers(8)
            adamw_(host, gradient, 1.0, n_updates, settings)
            try:
                step(found[0], gradient.to(device), found[1], found[2], Factors.of(settings, n_updates))
            except RuntimeError:  # whatever a compiler makes of its machine
                return False
        assert isinstance(host.master, Tensor)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(found, (host.master, host.exp_avg, host.exp_avg_sq), strict=True)):
            return False
    return True


class DeviceUpdates:
    """The updates of `policy.device_blocks`. Only the gpu lane's thread may use it."""

    def __init__(self, plan: Plan, arenas: Arenas, state: HostState, updates: Updates, device: torch.device) -> None:
        self.plan, self.arenas, self.state, self.updates = plan, arenas, state, updates
        self._offsets = [block.offsets()[0] for block in plan.workload.blocks]
        self._step = exact_step(device) if plan.policy.device_blocks else None
        self._n_elements = CPU_ELEMENTS if device.type == "cpu" else DEVICE_UPDATE_ELEMENTS
        self._alone = Workers(1, Scratch)  # a snapshot's copy is made by this thread

    def update(self, op: Op, step: int) -> None:
        """AdamW on the block's state, by the gradient that is still on the device."""
        assert self._step is not None
        with self.updates.changing(op.block, step, self._alone):
            factor = self.updates.factor(step)
            if factor is None:
                return
            dtype = self.plan.gradient_dtype(op.block)
            for settings, run in self._runs(op.block, self.updates.settings(step)):
                n = sum(p.n_elements for p in run)
                gradient = self.arenas.view(op["gradient"], dtype, (n,), self._offsets[op.block][run[0].name])
                by = Factors.of(settings, self.state.n_updates)
                update_by_chunks(self._step, self.state.run_state(run), gradient, factor, by, self._n_elements)

    def _runs(self, block: int, settings: AdamW) -> Iterator[tuple[AdamW, list[Parameter]]]:
        """The block's parameters, those together that lie one after another and are updated alike: adapters are many, and small."""
        run, end, of_run = list[Parameter](), 0, settings
        for p in self.state.owned(block):
            at, own = self._offsets[block][p.name], settings.of(p.name, p.shape)
            if run and (at, own) != (end, of_run):
                yield of_run, run
                run = []
            run, end, of_run = [*run, p], at + p.n_elements, own
        if run:
            yield of_run, run


def update_by_chunks(step: Step, state: ParamState, gradient: Tensor, factor: float, by: Factors, n_elements: int) -> None:
    """One AdamW step on one flat parameter, so many elements at a time. Its gradient may have any dtype."""
    scale = torch.full((), factor, dtype=torch.float32, device=gradient.device) if factor != 1.0 else None
    for at in range(0, gradient.numel(), n_elements):
        n = min(n_elements, gradient.numel() - at)
        part = slice(at, at + n)
        wide_gradient = gradient[part].float() if scale is None else gradient[part].float().mul_(scale)
        moments = state.exp_avg[part], state.exp_avg_sq[part]
        match state.master:
            case SplitMaster(weight, remainder):
                wide, bits = torch.empty(n, device=gradient.device), torch.empty(n, dtype=torch.int32, device=gradient.device)
                join(weight[part], remainder[part], wide, wide.view(torch.int32), bits)
                step(wide, wide_gradient, *moments, by)
                remainder[part].copy_(wide.view(torch.int32))
                _round(wide, weight[part])
            case master if master.dtype is torch.float32:
                step(master[part], wide_gradient, *moments, by)
            case master:
                wide = master[part].float()
                step(wide, wide_gradient, *moments, by)
                _round(wide, master[part])


def _round(wide: Tensor, out: Tensor) -> None:
    """To bf16, half up, without asking the device for a number. `wide` is lost."""
    nan, bits = wide != wide, wide.view(torch.int32)
    round_up_half(bits, bits, halves(), nan, out.view(torch.int16))
