"""Tiny models trained by plans and by the plain loop, and what differs between the two."""

import json
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import torch

from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.planner.model.kernels import FUSED
from penstock.planner.model.workload import build_workload, fusible
from penstock.runtime.batch import Batch
from penstock.runtime.executor import execute
from penstock.runtime.host.memory import Arenas
from penstock.runtime.layers.packed_weights import unpack_into
from penstock.runtime.machines.torch_machine import CpuMachine
from penstock.runtime.plan import Kind, Lane, Op, Plan, Policy, Semantics, Slot, Update, saves
from penstock.runtime.plan.optimizer import AdamW, Optimizer, optimizing
from penstock.runtime.plan.workload import Model

from . import reference
from .strategies import PROFILE
from .tiny import EAGER_ONLY, tiny_config

N_STEPS = 3
# What less an optimizer may keep: all that can be said, and other forms of master
SAID = [f"{of}{':,'[':' in of]}master={master}" for of in Optimizer for master in ("bf16", "split24")]
LEAN: dict[str, dict] = {
    **{text: optimizing(text, None) for text in sorted({*Optimizer, *SAID} - {"adamw"})},
    "adamw:moments=bf16 fp32": {"optimizer": Optimizer.ADAMW_BF16, "compute_dtype": "fp32", "gradient_dtype": "fp32"},
    "adamw:moments=bf16 half up": {"optimizer": Optimizer.ADAMW_BF16, "master_dtype": "bf16"},
}
KEPT = ("master", "exp_avg", "exp_avg_sq", "frozen")  # of every parameter, or of one that is not trained
ADAMW = AdamW(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
Tensors = dict[str, torch.Tensor]
# Most of what a policy can ask for at once, of a model of at least four layers.
_UPDATES = {"update": Update.DEFERRED, "speculate_blocks": (0, 2), "gradient_slots": 2, "accumulation_group": 4}
EVERYTHING = Policy(save=saves(products=(1,)), offload_blocks=(1,), spill_blocks=(2, 3), **_UPDATES)


def scheduled(step: int) -> AdamW:
    """A learning rate that is another one in every step."""
    return replace(ADAMW, lr=ADAMW.lr / (step + 1))


def settings_of_torch(n_steps: int) -> list[dict]:
    """The same, as torch.optim.AdamW takes them."""
    a = [scheduled(step) for step in range(n_steps)]
    return [{"lr": s.lr, "betas": (s.beta1, s.beta2), "eps": s.eps, "weight_decay": s.weight_decay} for s in a]


def semantics_of(model_type: str, **fields) -> Semantics:
    """Small semantics that are legal for the type: 16 tokens a sequence, tiles that do not divide them."""
    attention = "eager" if model_type in EAGER_ONLY else "sdpa"
    defaults = {"seq_len": 16, "batch_size": 4, "micro_batch": 1, "clip_norm": 0.5, "loss_tile_tokens": 5, "attention": attention}
    return Semantics(**(defaults | fields))


def fused(model_type: str, attention_kernel: str = "flash") -> dict[str, str]:
    """Every kernel that can be fused for a model type, as fields of the semantics."""
    return {part: FUSED[part] for part in fusible(Model(tiny_config(model_type)))} | {"attention_kernel": attention_kernel}


def asked(thing) -> str:
    """The fields of a policy, or of semantics, that are not the defaults: the name of a case."""
    fields = thing if isinstance(thing, dict) else {k: v for k, v in asdict(thing).items() if v != getattr(Policy(), k)}
    return " ".join(f"{key}={value}" for key, value in fields.items()) or "defaults"


def plan_of(config: dict, semantics: Semantics, policy: Policy) -> Plan:
    counted = Model(config | {"attention_dropout": 0.0})  # the planner does not count dropout masks yet; the runtime replays them
    return lower(Model(config), build_workload(counted, semantics), semantics, policy, PROFILE)


@lru_cache(maxsize=64)
def batches_of(vocab_size: int, batch_size: int, seq_len: int, n_steps: int = N_STEPS) -> tuple[Batch, ...]:
    """Random tokens; a fifth of the targets, and with them an unequal share of each micro-batch, are unsupervised.

    In the second step the last sequence of several has no supervised token at all.
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
    """Of every step a machine keeps what it hands over."""

    def result(self, step: int):
        result = super().result(step)
        self.__dict__.setdefault("results", {})[step] = result
        return result


class Remembering(Remembers, CpuMachine):
    pass


class Hostile(Remembers, CpuMachine):
    """A CpuMachine on which every race shows: lanes are delayed at random, and a slot is filled with NaN when it is released.

    A slot is released by the last op that uses it before an op that only writes it.
    """

    def __init__(self, plan: Plan, *args, delay_seed: int | None = None, **kwargs) -> None:
        super().__init__(plan, *args, **kwargs)
        self.released = released_slots(plan)
        self.rng = random.Random(delay_seed) if delay_seed is not None else None

    def work(self, index: int, op: Op, step: int) -> None:
        self.around(super().work, self.released, index, op, step)

    def around(self, work, released, index: int, op: Op, step: int) -> None:
        """Some work on an op, made hostile."""
        if self.rng is not None and self.rng.random() < 0.15:
            time.sleep(self.rng.random() * 0.004)
        work(index, op, step)
        for slot in released[index]:
            poison(self.arenas, slot)


def poison(arenas: Arenas, slot: Slot) -> None:
    """Fill the slot with 0xFF bytes, which are NaN in every float dtype: a read that comes too late is seen."""
    for piece in arenas.pieces(slot):
        piece.fill_(0xFF)


def released_slots(plan: Plan) -> dict[int, list[Slot]]:
    """For each op, the slots whose content no later op reads. One that two lanes read is left out: neither is the last."""
    blocks = range(len(plan.workload.blocks))
    goes_on = {Slot("norm", 0), *map(plan.state_slot, blocks), *map(plan.source_slot, blocks)}  # into the next step; no shadow does
    goes_on |= {plan.weights_slot(b) for b in blocks if plan.stays_loaded(b)}
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
    """What `begin` puts into the host store, by name: masters, and the weights that are frozen. However large a step, and whatever
    is clipped, they are the same."""
    found = _initial(json.dumps(config), replace(semantics, batch_size=semantics.micro_batch, sum_groups=1, clip_norm=None))
    return {name: x.clone() for name, x in found.items()}


@lru_cache(maxsize=64)
def _initial(config_json: str, semantics: Semantics) -> Tensors:
    machine = machine_for(plan_of(json.loads(config_json), semantics, Policy()), CpuMachine)
    return state_of(machine)[0] | frozen_of(machine)


def begin(machine: CpuMachine, seed: int = 7) -> None:
    """Random weights. Adapters are as if they had been trained for a while: one that does nothing yet hides much."""
    machine.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    for p in (p for b in range(len(machine.plan.workload.blocks)) for p in machine.host.owned[b]):
        if p.name.endswith("lora_B.weight"):
            machine.host.set_weight(p, torch.randn(p.shape, generator=generator) * 0.1)


def state_of(machine: CpuMachine) -> tuple[Tensors, Tensors, Tensors]:
    """Masters, first and second moments by name, as copies."""
    masters, exp_avg, exp_avg_sq = {}, {}, {}
    for number in range(len(machine.plan.workload.blocks)):
        for p in machine.host.owned[number]:
            of = machine.host.param_state(p)
            masters[p.name] = of.master.whole().clone().view(p.shape).cpu()
            for kept, name in zip((exp_avg, exp_avg_sq), machine.plan.semantics.optimizer.moments, strict=False):  # Lion has one
                held = machine.host.moment(p, name)
                kept[p.name] = (held.clone() if isinstance(held, torch.Tensor) else held.whole()).view(p.shape).cpu()
    return masters, exp_avg, exp_avg_sq


def frozen_of(machine: CpuMachine) -> Tensors:
    """The weights that are frozen, by name, as copies; packed ones are unpacked."""
    host, found, of = machine.host, Tensors(), machine.plan.semantics
    for p in (p for b in range(len(machine.plan.workload.blocks)) for p in host.frozen[b]):
        if machine.plan.is_packed(p):
            found[p.name] = torch.empty(p.shape, dtype=reference.DTYPE[of.compute_dtype])
            unpack_into(host.packed(p), found[p.name], of.base)
        else:
            found[p.name] = host.compute_weight(p).clone()
    return found


def machine_for(plan: Plan, machine_type=Remembering, batches: Sequence[Batch] = (), **options):
    """A machine that trains `plan` from weights drawn by `begin`, on batches that come round again."""
    whole = plan.semantics.all_ranks
    batches = batches or batches_of(plan.model.config["vocab_size"], whole.batch_size, whole.seq_len)
    folder = Path(tempfile.mkdtemp(prefix="disk-")) if plan.policy.disk_blocks else None
    if folder is not None:
        options = {"disk": folder / "base", **options}
    machine = machine_type(plan, lambda step: batches[step % len(batches)], scheduled, **options)
    if folder is not None:
        weakref.finalize(machine, shutil.rmtree, folder, ignore_errors=True)
    begin(machine)
    return machine


def trained(plan: Plan, machine_type=Remembering, n_steps: int = N_STEPS, **options):
    """The machine after its first steps."""
    machine = machine_for(plan, machine_type, **options)
    execute(plan, machine, n_steps)
    return machine


def streamed(config: dict, semantics: Semantics, policy: Policy, delay_seed: int | None = None, machine_type=Hostile):
    """The machine after N_STEPS of the policy's plan, which the checker must pass."""
    plan = plan_of(config, semantics, policy)
    check(plan)
    return trained(plan, machine_type, **({"delay_seed": delay_seed} if machine_type is Hostile else {}))


def plain(model_type: str, semantics: Semantics, overrides: tuple = ()) -> reference.Reference:
    """The same steps by the plain resident loop."""
    return _plain(json.dumps(tiny_config(model_type, **dict(overrides))), semantics)


@lru_cache(maxsize=64)
def _plain(config_json: str, semantics: Semantics) -> reference.Reference:
    config = json.loads(config_json)
    batches = batches_of(config["vocab_size"], semantics.batch_size, semantics.seq_len)
    return reference.train(config, semantics, initial_masters(config, semantics), list(batches), settings_of_torch(N_STEPS))


@lru_cache(maxsize=64)
def kept_whole(model_type: str, semantics: Semantics, overrides: tuple = ()) -> reference.Reference:
    """The same steps by a plan that keeps everything and computes nothing twice: the standard where dropout is drawn."""
    config = tiny_config(model_type, **dict(overrides))
    layers = tuple(range(1, config["num_hidden_layers"] + 1))
    return as_expected(streamed(config, semantics, Policy(save=saves(all=layers), accumulation_group=semantics.n_micro_batches)))


def as_expected(machine: CpuMachine) -> reference.Reference:
    """What a machine came to, as `differences` takes it."""
    results = [machine.results[step] for step in range(N_STEPS)]
    return reference.Reference(*state_of(machine), [r.loss for r in results], [r.grad_norm for r in results], frozen_of(machine))


@lru_cache(maxsize=64)
def clip_some_steps(model_type: str, semantics: Semantics, overrides: tuple = ()) -> Semantics:
    """The semantics with a clip norm that some of the steps exceed and others do not."""
    free = replace(semantics, clip_norm=None)
    norms = plain(model_type, free, overrides).norms
    return replace(semantics, clip_norm=(min(norms) + max(norms)) / 2)


def differences(machine: CpuMachine, expected: reference.Reference | None = None) -> list[str]:
    """Names of the tensors, losses and norms that are not bit for bit those expected, which is of the plain loop by default."""
    expected = expected or _plain(json.dumps(machine.plan.model.config), machine.plan.semantics)
    of_expected = (expected.masters, expected.exp_avg, expected.exp_avg_sq, expected.frozen)
    found = []
    for kind, got, wanted in zip(KEPT, (*state_of(machine), frozen_of(machine)), of_expected, strict=True):
        assert got.keys() == wanted.keys()
        found += [f"{kind} {name}" for name in got if not same_bits(got[name], wanted[name])]
    for step in range(N_STEPS):
        if machine.results[step].loss != expected.losses[step]:
            found.append(f"loss of step {step}")
        if machine.results[step].grad_norm != expected.norms[step]:
            found.append(f"norm of step {step}")
    return found


def same_state(a: CpuMachine, b: CpuMachine) -> bool:
    """Masters and moments equal to the last bit."""
    return all(same_bits(x[name], y[name]) for x, y in zip(state_of(a), state_of(b), strict=True) for name in x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit: also the sign of zero, and NaN equals itself."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
