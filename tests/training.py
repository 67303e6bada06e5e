"""Tiny models trained by a plan and by the plain loop, and comparison of both."""

import json
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from penstock.planner.check.check import check
from penstock.planner.lower.arenas import source_slot, weights_slot
from penstock.planner.lower.lower import lower
from penstock.planner.model.kernels import FUSED
from penstock.planner.model.workload import build_workload, fusible
from penstock.runtime.batch import Batch
from penstock.runtime.errors import WorkloadError
from penstock.runtime.executor import execute
from penstock.runtime.host.memory import Arenas
from penstock.runtime.layers.packed_weights import unpack_into
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Kind, Lane, Op, Plan, Policy, Semantics, Slot, Update, saves
from penstock.runtime.plan.optimizer import AdamW, Optimizer, optimizing
from penstock.runtime.plan.workload import Model
from penstock.runtime.scaled_products import refuse_device

from . import reference
from .strategies import PROFILE
from .tiny import EAGER_ONLY, tiny_config

N_STEPS = 3
# Low-bit optimizer states: every value of --optimizer, and more forms of master weights
OPTIMIZERS = [f"{of}{':,'[':' in of]}master={master}" for of in Optimizer for master in ("bf16", "split24")]
LEAN: dict[str, dict] = {
    **{text: optimizing(text, None) for text in sorted({*Optimizer, *OPTIMIZERS} - {"adamw"})},
    "adamw:moments=bf16 fp32": {"optimizer": Optimizer.ADAMW_BF16, "compute_dtype": "fp32", "gradient_dtype": "fp32"},
    "adamw:moments=bf16 half up": {"optimizer": Optimizer.ADAMW_BF16, "master_dtype": "bf16"},
}
STATE_NAMES = ("master", "exp_avg", "exp_avg_sq", "frozen")  # tensors of a trained parameter; `frozen`: of a frozen one
ADAMW = AdamW(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
Tensors = dict[str, torch.Tensor]


def has_fp8_products() -> bool:
    """True if the CPU kernels of this torch multiply in FP8 with a scale per row; the oldest supported version may lack them."""
    try:
        refuse_device(torch.device("cpu"))
    except WorkloadError:
        return False
    return True


NEEDS_FP8 = pytest.mark.skipif(not has_fp8_products(), reason=f"torch {torch.__version__} has no row-wise FP8 products on a CPU")
# Policy with most knobs set, for a model of at least four layers
_UPDATES = {"update": Update.DEFERRED, "speculate_blocks": (0, 2), "gradient_slots": 2, "accumulation_group": 4}
EVERYTHING = Policy(save=saves(products=(1,)), offload_blocks=(1,), spill_blocks=(2, 3), **_UPDATES)


def scheduled(step: int) -> AdamW:
    """Return optimizer settings with a learning rate that differs in every step."""
    return replace(ADAMW, lr=ADAMW.lr / (step + 1))


def settings_of_torch(n_steps: int) -> list[dict]:
    """Return the settings of `scheduled` as keyword arguments of torch.optim.AdamW, by step."""
    a = [scheduled(step) for step in range(n_steps)]
    return [{"lr": s.lr, "betas": (s.beta1, s.beta2), "eps": s.eps, "weight_decay": s.weight_decay} for s in a]


def semantics_of(model_type: str, **fields) -> Semantics:
    """Return small legal semantics for the type: sequences of 16 tokens, and tiles that do not divide them."""
    attention = "eager" if model_type in EAGER_ONLY else "sdpa"
    fields |= {"products": "fp8"} if fields.get("base") == "fp8-rows" and "products" not in fields else {}
    defaults = {"seq_len": 16, "batch_size": 4, "micro_batch": 1, "clip_norm": 0.5, "loss_tile_tokens": 5, "attention": attention}
    return Semantics(**(defaults | fields))


def fused(model_type: str, attention_kernel: str = "flash") -> dict[str, str]:
    """Return the semantics' fields that enable every fused kernel of a model type."""
    return {part: FUSED[part] for part in fusible(Model(tiny_config(model_type)))} | {"attention_kernel": attention_kernel}


def plan_of(config: dict, semantics: Semantics, policy: Policy) -> Plan:
    counted = Model(config | {"attention_dropout": 0.0})  # the planner does not count dropout masks; the runtime replays them
    return lower(Model(config), build_workload(counted, semantics), semantics, policy, PROFILE)


@lru_cache(maxsize=64)
def batches_of(vocab_size: int, batch_size: int, seq_len: int, n_steps: int = N_STEPS) -> tuple[Batch, ...]:
    """Return random tokens with 20 % unsupervised targets, unequal between micro-batches.

    In the second step the last sequence of several has no supervised token.
    """
    generator = torch.Generator().manual_seed(batch_size * 1000 + seq_len)
    result = []
    for step in range(n_steps):
        tokens = torch.randint(0, vocab_size, (batch_size, seq_len), generator=generator)
        targets = torch.full_like(tokens, -100)
        targets[:, :-1] = tokens[:, 1:]
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        targets[0, : seq_len // 2] = -100
        if step == 1 and batch_size > 1:
            targets[-1] = -100
        result.append(Batch(tokens, targets))
    return tuple(result)


class Remembers:
    """Mixin that stores the result of every step."""

    def result(self, step: int):
        result = super().result(step)
        self.__dict__.setdefault("results", {})[step] = result
        return result


class Remembering(Remembers, TorchMachine):
    pass


class Hostile(Remembers, TorchMachine):
    """Machine that exposes races: random delays of lanes, and released slots filled with NaN.

    A slot is released by the last op that uses it before an op that only writes it.
    """

    def __init__(self, plan: Plan, *args, delay_seed: int | None = None, **kwargs) -> None:
        super().__init__(plan, *args, **kwargs)
        self.released = released_slots(plan)
        self.rng = random.Random(delay_seed) if delay_seed is not None else None

    def work(self, index: int, op: Op, step: int) -> None:
        self.around(super().work, self.released, index, op, step)

    def around(self, work, released, index: int, op: Op, step: int) -> None:
        """Perform the work of an op with a random delay, then poison released slots."""
        if self.rng is not None and self.rng.random() < 0.15:
            time.sleep(self.rng.random() * 0.004)
        work(index, op, step)
        for slot in released[index]:
            poison(self.arenas, slot)


def poison(arenas: Arenas, slot: Slot) -> None:
    """Fill the slot with 0xFF bytes, which are NaN in every float dtype, so that late reads give NaN."""
    for piece in arenas.pieces(slot):
        piece.fill_(0xFF)


def released_slots(plan: Plan) -> dict[int, list[Slot]]:
    """Return, by op, the slots with content that no later op reads, without slots that two lanes read: neither lane is last."""
    blocks = range(len(plan.workload.blocks))
    goes_on = {Slot("norm", 0), *map(plan.state_slot, blocks)} | {source_slot(plan, b) for b in blocks}  # live into the next step
    goes_on |= {weights_slot(plan, b) for b in blocks if plan.stays_loaded(b)}
    uses: dict[Slot, list[int]] = {}
    for index, op in enumerate(plan.ops):
        for slot in dict.fromkeys((*op.reads, *op.writes)):
            if slot not in goes_on:
                uses.setdefault(slot, []).append(index)
    released: dict[int, list[Slot]] = {index: [] for index in range(len(plan.ops))}
    for slot, indices in uses.items():
        readers: set[Lane] = set()
        for index, following in zip(indices, [*indices[1:], indices[0]], strict=True):
            if slot in plan.ops[index].reads and plan.ops[index].kind is not Kind.SQUARE:  # the offload waits for it
                readers.add(plan.ops[index].lane)
            if slot not in plan.ops[following].reads:
                if readers == {plan.ops[index].lane}:
                    released[index].append(slot)
                readers = set()
    return released


def initial_masters(config: dict, semantics: Semantics) -> Tensors:
    """Return copies of the initial master and frozen weights by name. They do not depend on batch size and clipping."""
    weights = _initial(json.dumps(config), replace(semantics, batch_size=semantics.micro_batch, sum_groups=1, clip_norm=None))
    return {name: x.clone() for name, x in weights.items()}


@lru_cache(maxsize=64)
def _initial(config_json: str, semantics: Semantics) -> Tensors:
    machine = machine_for(plan_of(json.loads(config_json), semantics, Policy()), TorchMachine)
    return state_of(machine)[0] | frozen_of(machine)


def begin(machine: TorchMachine, seed: int = 7) -> None:
    """Initialise random weights; lora_B gets random values instead of zeros, so that adapters have an effect."""
    machine.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    for p in (p for b in range(len(machine.plan.workload.blocks)) for p in machine.host.owned[b]):
        if p.name.endswith("lora_B.weight"):
            machine.host.set_weight(p, torch.randn(p.shape, generator=generator) * 0.1)


def state_of(machine: TorchMachine) -> tuple[Tensors, Tensors, Tensors]:
    """Return copies of master weights, first and second moments by name."""
    masters, exp_avg, exp_avg_sq = {}, {}, {}
    for number in range(len(machine.plan.workload.blocks)):
        for p in machine.host.owned[number]:
            state = machine.host.param_state(p)
            masters[p.name] = state.master.values().clone().view(p.shape).cpu()
            for moments, name in zip((exp_avg, exp_avg_sq), machine.plan.semantics.optimizer.moments, strict=False):  # Lion has one
                held = machine.host.moment(p, name)
                moments[p.name] = (held.clone() if isinstance(held, torch.Tensor) else held.values()).view(p.shape).cpu()
    return masters, exp_avg, exp_avg_sq


def frozen_of(machine: TorchMachine) -> Tensors:
    """Return copies of frozen weights by name; packed ones are unpacked, unless products use their bytes."""
    host, weights, semantics = machine.host, Tensors(), machine.plan.semantics
    for p in (p for b in range(len(machine.plan.workload.blocks)) for p in host.frozen[b]):
        if machine.plan.is_packed(p) and semantics.products == "fp8":
            weights[p.name] = host.packed(p).clone()
        elif machine.plan.is_packed(p):
            weights[p.name] = torch.empty(p.shape, dtype=reference.DTYPE[semantics.compute_dtype])
            unpack_into(host.packed(p), weights[p.name], semantics.base)
        else:
            weights[p.name] = host.compute_weight(p).clone()
    return weights


def machine_for(plan: Plan, machine_type=Remembering, batches: Sequence[Batch] = (), **options):
    """Return a machine that trains `plan` from the weights of `begin`, on a cycle of batches."""
    total = plan.semantics.all_ranks
    batches = batches or batches_of(plan.model.config["vocab_size"], total.batch_size, total.seq_len)
    folder = Path(tempfile.mkdtemp(prefix="disk-")) if plan.policy.disk_blocks else None
    if folder is not None:
        options = {"disk": folder / "base", **options}
    machine = machine_type(plan, lambda step: batches[step % len(batches)], scheduled, **options)
    if folder is not None:
        weakref.finalize(machine, shutil.rmtree, folder, ignore_errors=True)
    begin(machine)
    return machine


def trained(plan: Plan, machine_type=Remembering, n_steps: int = N_STEPS, **options):
    machine = machine_for(plan, machine_type, **options)
    execute(plan, machine, n_steps)
    return machine


def streamed(config: dict, semantics: Semantics, policy: Policy, delay_seed: int | None = None, machine_type=Hostile):
    """Return the machine after N_STEPS of the policy's plan, which the checker must accept."""
    plan = plan_of(config, semantics, policy)
    check(plan)
    return trained(plan, machine_type, **({"delay_seed": delay_seed} if machine_type is Hostile else {}))


def plain(model_type: str, semantics: Semantics, overrides: tuple = ()) -> reference.Reference:
    """Return the result of the same steps by the plain loop."""
    return _plain(json.dumps(tiny_config(model_type, **dict(overrides))), semantics)


@lru_cache(maxsize=64)
def _plain(config_json: str, semantics: Semantics) -> reference.Reference:
    config = json.loads(config_json)
    batches = batches_of(config["vocab_size"], semantics.batch_size, semantics.seq_len)
    return reference.train(config, semantics, initial_masters(config, semantics), list(batches), settings_of_torch(N_STEPS))


@lru_cache(maxsize=64)
def kept_whole(model_type: str, semantics: Semantics, overrides: tuple = ()) -> reference.Reference:
    """Return the result of the same steps by a plan without recomputation: the expected result for models with dropout."""
    config = tiny_config(model_type, **dict(overrides))
    layers = tuple(range(1, config["num_hidden_layers"] + 1))
    return as_expected(streamed(config, semantics, Policy(save=saves(all=layers), accumulation_group=semantics.n_micro_batches)))


def as_expected(machine: TorchMachine) -> reference.Reference:
    """Return the state and results of a machine as an argument for `differences`."""
    results = [machine.results[step] for step in range(N_STEPS)]
    return reference.Reference(*state_of(machine), [r.loss for r in results], [r.grad_norm for r in results], frozen_of(machine))


@lru_cache(maxsize=64)
def clip_some_steps(model_type: str, semantics: Semantics, overrides: tuple = ()) -> Semantics:
    """Return the semantics with a clip norm that some steps exceed and others do not."""
    free = replace(semantics, clip_norm=None)
    norms = plain(model_type, free, overrides).norms
    return replace(semantics, clip_norm=(min(norms) + max(norms)) / 2)


def differences(machine: TorchMachine, expected: reference.Reference | None = None) -> list[str]:
    """Return the names of tensors, losses and norms that are not bitwise equal to `expected`, by default the plain loop."""
    expected = expected or _plain(json.dumps(machine.plan.model.config), machine.plan.semantics)
    of_expected = (expected.masters, expected.exp_avg, expected.exp_avg_sq, expected.frozen)
    names = []
    for kind, got, wanted in zip(STATE_NAMES, (*state_of(machine), frozen_of(machine)), of_expected, strict=True):
        assert got.keys() == wanted.keys()
        names += [f"{kind} {name}" for name in got if not same_bits(got[name], wanted[name])]
    for step in range(N_STEPS):
        if machine.results[step].loss != expected.losses[step]:
            names.append(f"loss of step {step}")
        if machine.results[step].grad_norm != expected.norms[step]:
            names.append(f"norm of step {step}")
    return names


def same_state(a: TorchMachine, b: TorchMachine) -> bool:
    """True if master weights and moments are bitwise equal."""
    return all(same_bits(x[name], y[name]) for x, y in zip(state_of(a), state_of(b), strict=True) for name in x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if tensors are bitwise equal, including the sign of zero and NaN."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
