"""LoRA adapters: formula, rounding and training equal PEFT's under any checkpointing and placement."""

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.memory_replay import Tape, Tensor
from penstock.planner.model.workload import build_workload
from penstock.planner.predict.compute_time import ComputeTime, moved_bytes
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.errors import WorkloadError
from penstock.runtime.executor import execute
from penstock.runtime.layers.adapters import AdaptedExperts, AdaptedLinear, _adapted_linear, adapt, initial_factors
from penstock.runtime.layers.layer_chain import shared_inputs
from penstock.runtime.layers.packed_weights import pack, unpack_into
from penstock.runtime.plan import Policy, Semantics, saves
from penstock.runtime.plan.packed import Base
from penstock.runtime.plan.train import TARGETS, Lora, Train
from penstock.runtime.plan.workload import Model, Saved
from penstock.training.validation import evaluate
from tests import training
from tests.forwards import HostileToBoth, sequences_of
from tests.lanes import mostly_slow
from tests.real_layers import DTYPES, SIZES, Work, cases, hf_model, layers_of, tensors
from tests.tiny import EXPERT_TYPES, MODEL_TYPES, tiny_config
from tests.training import N_STEPS, Remembering, frozen_of, initial_masters, machine_for, plan_of, same_bits, semantics_of, streamed

from .test_replay import Case, can, replayed

LORA = Lora(rank=4, alpha=8.0)
DENSE = [t for t in MODEL_TYPES if t not in EXPERT_TYPES]


def test_only_gradients_that_are_asked_for_are_made() -> None:
    for needed, n_products in (((True, False, False), 3), ((False, True, False), 2), ((False, False, True), 2)):
        module = AdaptedLinear(nn.Linear(24, 40, dtype=torch.float64), Lora(rank=4, alpha=6.0)).requires_grad_(False)
        x = torch.randn(6, 24, dtype=torch.float64)
        operands = x, module.lora_A.weight, module.lora_B.weight
        for tensor, is_needed in zip(operands, needed, strict=True):
            tensor.requires_grad_(is_needed)
        y = module(x)
        with Work() as work:
            y.backward(torch.ones_like(y))
        assert [tensor.grad is not None for tensor in operands] == [*needed]
        assert work.calls["mm"] + work.calls["addmm_"] == n_products


def test_a_new_adapter_does_nothing_yet_and_is_drawn_as_pefts() -> None:
    """Base weights of the layer keep their initial values."""
    shapes = {"q.lora_A.weight": (8, 512), "q.lora_B.weight": (64, 8)}
    a, b = initial_factors(shapes, 3).values()
    assert not b.any()
    assert a.abs().max() <= 1 / math.sqrt(512)  # uniform in +-sqrt(6 / ((1 + 5) * in))
    assert a.std().item() == pytest.approx(1 / math.sqrt(3 * 512), rel=0.05)
    assert same_bits(initial_factors(shapes, 3)["q.lora_A.weight"], a)
    assert not torch.equal(initial_factors(shapes, 4)["q.lora_A.weight"], a)
    fields = [semantics_of("qwen2", compute_dtype="fp32", **train) for train in ({}, {"train": Train(lora=LORA)})]
    full, begun = (initial_masters(tiny_config("qwen2"), semantics) for semantics in fields)
    assert begun.keys() > full.keys()
    assert all(same_bits(begun[name], full[name]) for name in full)


class Attention(nn.Module):
    """Projections with biases of three widths, the first three with one input."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, n_in, n_out in (("q_proj", 64, 128), ("k_proj", 64, 32), ("v_proj", 64, 32), ("o_proj", 192, 64)):
            setattr(self, name, nn.Linear(n_in, n_out, bias=name != "o_proj", dtype=dtype).requires_grad_(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(torch.cat([q, k.sin(), v.square()], -1))  # type: ignore[no-any-return]


def sharing(targets: Sequence[str] = TARGETS[:4], dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    """Return an attention layer with adapters that share one input."""
    torch.manual_seed(0)
    layer = nn.ModuleDict({"a": Attention(dtype)})
    with shared_inputs(layer) as shared:
        layer["a"](torch.ones(1, 64, dtype=dtype))
    assert shared == [("a.q_proj", "a.k_proj", "a.v_proj")]
    adapt(layer, "l.", [f"l.a.{name}.lora_A.weight" for name in targets], replace(LORA, dropout=dropout), shared)
    for name, p in layer.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.3)
    return layer


def outcome(module: Any, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output and the gradients of a smooth function of it. Every call uses the same dropout mask."""
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    y = module(x)
    return [y, *torch.autograd.grad((y / 16).tanh(), [x, *parameters], torch.ones_like(y))]


def factors_in(module: nn.Module) -> list[torch.Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("base", ["fp32", "nf4", "int8", "fp8"])
@pytest.mark.parametrize(("dropout", "targets"), [(0.0, TARGETS[:4]), (0.0, ("q_proj", "v_proj")), (0.3, TARGETS[:4])])
def test_projections_with_one_input_are_pefts(base: Base, dropout: float, targets: tuple[str, ...]) -> None:
    """Compare fp32 outputs and gradients to 1e-5 of their largest element, on frozen weights that can be packed."""
    layer = sharing(targets, dropout)
    for name in TARGETS[:4]:
        weight = layer.get_submodule(f"a.{name}").weight
        if base != "fp32":
            unpack_into(pack(weight.data, base), weight.data, base)
    peft_config = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=[*targets], lora_dropout=dropout)
    peft_layer = nn.ModuleDict({"a": Attention()})
    peft: Any = get_peft_model(peft_layer, peft_config)  # type: ignore[arg-type]
    state = {penstock_name(name): p for name, p in peft.named_parameters()}
    assert state.keys() == dict(layer.named_parameters()).keys()
    for name, p in layer.named_parameters():
        state[name].data.copy_(p)
    x = torch.randn(2, 9, 64)
    results = outcome(layer["a"], x, factors_in(layer))
    wanted = outcome(peft_layer["a"], x, [state[name] for name, p in layer.named_parameters() if p.requires_grad])
    for result, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    with torch.no_grad():  # without the adapters
        for part in layer.modules():
            if isinstance(part, AdaptedLinear):
                part.is_disabled = True
        with peft.disable_adapter():
            assert torch.equal(layer["a"](x), peft_layer["a"](x))


def test_partners_are_computed_for_one_input_alone() -> None:
    """Compare gradients with plain formulas under autograd, also if partners have different inputs or are called twice."""
    layer, x, second = sharing(dtype=torch.float64), *torch.randn(2, 5, 64, dtype=torch.float64)
    parts = [layer.get_submodule(f"a.{name}") for name in TARGETS[:3]]
    for inputs in ((x, x, x), (x, second, x), (x, x, second), (second, x, x)):
        for order in ((0, 1, 2), (2, 0, 1), (0, 0, 1, 2)):
            leaves = {id(tensor): tensor.clone().requires_grad_() for tensor in (x, second)}
            calls = [(parts[i], leaves[id(inputs[i])]) for i in order]
            plain = [
                x @ p.weight.T + p.bias + LORA.scale * (x @ p.lora_A.weight.T) @ p.lora_B.weight.T  # type: ignore[union-attr]
                for p, x in calls
            ]
            targets = [*leaves.values(), *(p for part in parts for p in part.parameters() if p.requires_grad)]
            both = [[y.sin().sum() for y in outputs] for outputs in ([part(x) for part, x in calls], plain)]
            actual, wanted = (torch.autograd.grad(sums, targets, allow_unused=True) for sums in both)
            torch.testing.assert_close(actual, wanted)


def test_a_layer_leaves_nothing_with_its_partners() -> None:
    layer = sharing()
    layer["a"](torch.randn(5, 64))
    assert [part.ready for part in layer.modules() if isinstance(part, AdaptedLinear)] == [None] * 4


@mostly_slow("model_type", MODEL_TYPES)
def test_what_is_computed_together_is_what_the_plan_counts(model_type: str) -> None:
    """Compare stacked products of A in the modules of a run and in its plan, by width."""
    for targets in (TARGETS, ("q_proj", "v_proj", "up_proj")):
        if model_type in EXPERT_TYPES and "up_proj" in targets and targets != TARGETS:
            targets = ("q_proj", "v_proj")
        config, semantics = tiny_config(model_type), semantics_of(model_type, train=Train(lora=Lora(rank=3, targets=targets)))
        workload = build_workload(Model(config), semantics)
        for block, layer in zip(workload.blocks[1:-1], Templates(config, workload, semantics).layers, strict=True):
            adapters = [part for part in layer.modules() if isinstance(part, AdaptedLinear)]
            stacks = [3 * len(part.partners) for part in adapters if part is part.partners[0]]
            assert [m.n for m in block.matmuls if not m.frozen and m.n in (3, 6, 9)] == stacks
            assert len(adapters) > len(stacks) or len(targets) < len(TARGETS)


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])  # inputs before outputs in a stack, and after
def test_experts_and_their_adapters_are_those_that_peft_merges(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare fp32 outputs and gradients with stacks plus `get_delta_weight`. Penstock computes no delta."""
    config, lora = tiny_config(model_type, num_hidden_layers=1), Lora(rank=8, alpha=12.0, targets=("experts",))
    peft_model = hf_model(config, dtype=torch.float32).requires_grad_(False)
    peft_model.set_experts_implementation("grouped_mm")
    experts = copy.deepcopy(peft_model.model.layers[0].mlp.experts)
    peft_config = LoraConfig(r=8, lora_alpha=12, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    peft_model = get_peft_model(peft_model, peft_config)
    factors = {n: p for n, p in peft_model.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    for p in factors.values():
        nn.init.normal_(p, std=0.2)
    named = {n.replace(".default.", ".").partition(".mlp.experts.")[2]: p.detach() for n, p in factors.items()}
    adapt(nn.ModuleDict({"experts": experts}), "l.", [f"l.experts.{n}" for n in named], lora)
    experts.load_state_dict(named, strict=False)
    outer = peft_model.base_model.model.model.layers[0].mlp.experts
    x, ids = torch.randn(40, config["hidden_size"]), torch.randint(experts.num_experts - 1, (40, 2))  # the last one has no rows
    shares, gradient = torch.rand(40, 2), torch.randn(40, config["hidden_size"])

    def of_rows(module: Any, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        into = x.clone().requires_grad_()
        y = module(into, ids, shares)
        return [y, *torch.autograd.grad(y, [into, *parameters], gradient)]

    wrapped = [outer.get_parameter(name.replace(".weight", ".default.weight")) for name in named]
    results = of_rows(experts, [experts.get_parameter(name) for name in named])
    torch.testing.assert_close(results, of_rows(outer, wrapped), rtol=1e-4, atol=1e-5)
    adapted_y = experts(x, ids, shares)
    experts.base_layer.is_disabled = True
    assert not torch.allclose(adapted_y, base_y := experts(x, ids, shares))
    assert torch.equal(base_y, outer.base_layer.base_layer(x, ids, shares))
    monkeypatch.setattr("penstock.runtime.layers.transformers_patches.grouped_mm_experts_forward", lambda self, x, ids, shares: x)
    with pytest.raises(WorkloadError, match="adapters of experts do not support"):
        AdaptedExperts(peft_model.get_submodule("base_model.model.model.layers.0.mlp.experts.base_layer.base_layer"), lora)


def test_an_adapter_of_other_sizes_than_the_plans_is_refused() -> None:
    layer = nn.ModuleDict({"q_proj": nn.Linear(8, 16), "norm": nn.LayerNorm(8)})
    for name in ("norm", "experts"):
        with pytest.raises(WorkloadError, match="adapters do not support this module"):
            adapt(layer, "l.", [f"l.{name}.lora_A.weight", f"l.{name}.lora_B.weight"], LORA)
    config, semantics = tiny_config("llama"), semantics_of("llama", train=Train(lora=LORA))
    for a_shape in ((LORA.rank, 9), ()):
        workload = build_workload(Model(config), semantics)
        layer = workload.blocks[1]
        odd = next(p for p in layer.parameters if "lora_A" in p.name)
        replacement = (replace(odd, shape=a_shape),) if a_shape else ()
        parameters = tuple(p for p in layer.parameters if p is not odd) + replacement
        blocks = (workload.blocks[0], replace(layer, parameters=parameters), *workload.blocks[2:])
        with pytest.raises(WorkloadError, match=rf"builds other parameters .*first: {re.escape(odd.name)}"):
            Templates(config, replace(workload, blocks=blocks), semantics)


@mostly_slow("case", cases(("llama", "gemma2", "qwen3_moe", "gpt_oss")), ids="-".join)
def test_a_replay_of_adapters_saves_what_the_plan_says(case: Case) -> None:
    of_experts = replace(LORA, rank=8, targets=("q_proj", "experts"))
    loras = [of_experts] if case[0] in EXPERT_TYPES else [replace(LORA, dropout=0.3, targets=TARGETS[:4]), LORA]
    of_each = (layers_of(case, *SIZES[0], kernels={"train": Train(lora=lora)}) for lora in loras)
    for block, layer, x, kwargs in chain.from_iterable(of_each):
        for saved in (Saved.INPUT, Saved.ATTENTION, Saved.PRODUCTS):
            tier = block.recompute(saved)
            assert (tier is not None) == can(case, saved)
            if tier is None:
                continue
            wanted = gradients(layer, x, kwargs, None)
            assert all(map(torch.equal, wanted, gradients(layer, x, kwargs, saved)))
            _, replay = replayed(layer, x, kwargs, saved)
            assert sum(t.nbytes for t in tensors([noted for noted, _ in replay.results])) == tier.saved_bytes


def gradients(layer: Any, x: torch.Tensor, kwargs: dict[str, Any], saved: Saved | None) -> list[torch.Tensor]:
    """Return gradients of input and adapters, with the same dropout mask in every call."""

    def forward(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        torch.manual_seed(3)
        return layer(x, **kwargs)

    y = forward(x, **kwargs) if saved is None else replayed(forward, x, kwargs, saved)[0]
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(y, leaves, torch.ones_like(y)))


def peft_of(config: dict[str, Any], semantics: Semantics, begun: dict[str, torch.Tensor], lora: Lora) -> Any:
    """Return transformers' model with PEFT's fp32 adapters and the same weights."""
    model = hf_model(config, dtype=DTYPES[semantics.compute_dtype], attn_implementation=semantics.attention)
    of_peft = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", lora_dropout=0.0)
    model = get_peft_model(model, of_peft, autocast_adapter_dtype=True).train()
    named = {penstock_name(name): p for name, p in model.named_parameters()}
    assert named.keys() == begun.keys()
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(begun[name])
    return model


def penstock_name(name: str) -> str:
    """Map a parameter name of PEFT to its name in Penstock."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")


def trained_by_peft(
    config, semantics: Semantics, lora: Lora, begun, batches, settings
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train adapters in a common loop under autocast. Return adapters and losses."""
    model = peft_of(config, semantics, begun, lora)
    trained = {penstock_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, losses = torch.optim.AdamW(trained.values(), **settings[0]), []
    for batch, of_step in zip(batches, settings, strict=True):
        optimizer.param_groups[0]["lr"] = of_step["lr"]
        with torch.autocast("cpu", torch.bfloat16, enabled=semantics.compute_dtype == "bf16"):
            logits = model(input_ids=batch.input_ids, use_cache=False).logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        if semantics.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained.values(), semantics.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return {name: p.detach() for name, p in trained.items()}, losses


@mostly_slow(
    ("model_type", "dtype", "of_loss", "of_way"), [*((t, "fp32", 1e-6, 1e-4) for t in DENSE), ("llama", "bf16", 2e-4, 0.1)]
)
def test_training_is_what_peft_does(model_type: str, dtype: str, of_loss: float, of_way: float) -> None:
    """Compare losses, and the mean adapter error relative to its update, within rounding. Autocast rounds adapters to bf16, too,
    but sums in another order with eight bits."""
    semantics = semantics_of(model_type, train=Train(lora=LORA), compute_dtype=dtype, gradient_dtype="fp32")
    config = tiny_config(model_type)
    begun = initial_masters(config, semantics)
    machine = streamed(config, semantics, Policy(accumulation_group=4, save=saves(products=(1,))), machine_type=Remembering)
    data = training.batches_of(96, 4, 16), training.settings_of_torch(N_STEPS)
    masters, losses = trained_by_peft(config, semantics, LORA, begun, *data)
    assert [machine.results[step].loss for step in range(N_STEPS)] == pytest.approx(losses, rel=of_loss)
    trained = training.state_of(machine)[0]
    assert trained.keys() == masters.keys()
    off, way = (sum((a[n] - b[n]).abs().sum().item() for n in masters) for a, b in ((trained, masters), (begun, masters)))
    assert off < of_way * way


EVALUATED = {
    "on the host": ({}, Policy()),
    "on the host, packed": ({"base": "int8"}, Policy(accumulation_group=4, prefetch_depth=2, resident_blocks=(2,))),
    "on the device": ({"gradient_dtype": "fp32"}, Policy(accumulation_group=4)),
    "on the device, packed": ({"gradient_dtype": "fp32", "base": "nf4"}, Policy(prefetch_depth=2)),
}


@mostly_slow(("model_type", "way"), [*(("llama", way) for way in EVALUATED), ("gemma2", "on the device, packed")])
def test_an_evaluation_uses_adapters_and_changes_nothing(model_type: str, way: str) -> None:
    """Compare the loss of a batch bitwise with a training step without dropout."""
    fields, policy = EVALUATED[way]
    config = tiny_config(model_type, num_hidden_layers=3)
    no_dropout = semantics_of(model_type, train=Train(lora=LORA), **fields)
    semantics = replace(no_dropout, train=Train(lora=replace(LORA, dropout=0.4)))
    policy = replace(policy, device_blocks=build_workload(Model(config), semantics).mixed if "device" in way else ())
    machine = machine_for(plan_of(config, semantics, policy), HostileToBoth)
    batch, plain = training.batches_of(96, 4, 16)[0], streamed(config, no_dropout, policy)
    assert evaluate(machine, sequences_of(batch), 4)["eval_loss"] == plain.results[0].loss
    for step in range(N_STEPS):
        execute(machine.plan, machine, 1, step)
        evaluate(machine, sequences_of(batch), 4)
    assert training.differences(machine, training.kept_whole(model_type, semantics, (("num_hidden_layers", 3),))) == []
    assert all(map(torch.equal, frozen_of(machine).values(), frozen_of(plain).values()))


def test_a_frozen_weight_keeps_the_bits_of_its_file() -> None:
    """Round a wider weight to nearest even, like transformers."""
    machine = machine_for(plan_of(tiny_config("llama"), semantics_of("llama", train=Train(lora=LORA)), Policy()))
    p = machine.host.frozen[1][0]
    weight = torch.randn(p.shape)
    weight.view(-1)[0] = 1.0 + 2.0**-8  # half way between two bf16 numbers; the even one is below
    machine.host.set_weight(p, weight)
    assert same_bits(machine.host.compute_weight(p), weight.bfloat16())
    assert frozen_of(machine)[p.name].view(-1)[0] == 1.0
    names = [p.name for p in machine.host.all_owned()]
    assert names == [p.name for block in machine.plan.workload.blocks for p in block.parameters]


class Narrow(TorchDispatchMode):
    """Count bytes that products with an adapter factor read and write, for tensors of layer width."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths, self.n_bytes = {*widths}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            operands = [t for t in (*args[-2:], out) if t.numel() > 1]
            is_narrow = any(self.widths & {*t.shape} for t in args[-2:])
            self.n_bytes += sum(t.nbytes for t in operands if not self.widths & {*t.shape}) * is_narrow
        return out


def test_adapters_move_the_bytes_that_are_counted() -> None:
    """Narrow products have few FLOP per element: an H200 took 15 % longer than their FLOP predict. Forward: three projections with
    one input read it once, and write each output once. Backward: gradients and input are read once for B, once for A, and the input
    gradient is written once."""
    layer, x, m = sharing(), torch.randn(3000, 64).requires_grad_(), 3000
    parts = [layer.get_submodule(f"a.{name}") for name in TARGETS[:3]]
    operands = [[part.get_parameter(name) for part in parts] for name in ("weight", "bias", "lora_A.weight", "lora_B.weight")]
    with Narrow(4, 12) as forward, torch.no_grad():
        _adapted_linear(x, x, *operands, 2.0)  # type: ignore[arg-type]
    ys = [part(x) for part in parts]
    with Narrow(4, 12) as backward:
        torch.autograd.grad(ys, [x, *factors_in(layer["a"])[:6]], [torch.ones_like(y) for y in ys])
    assert forward.n_bytes == 4 * m * (64 + 128 + 32 + 32)
    assert backward.n_bytes == 2 * forward.n_bytes
    tape = Tape(4)
    tape.adapted(Tensor(m * 64, 4), m, 64, [128, 32, 32], 4)
    products, computing = [m for m in tape.matmuls if not m.frozen], ComputeTime(read_profile("h200-16core"))
    assert sum(moved_bytes(m, 4) for m in products) == pytest.approx(forward.n_bytes, rel=0.1)
    least_s = forward.n_bytes / computing.profile.device.memory_bytes_per_s.value
    assert sum(computing._matmul("fp32", m) for m in products) >= least_s
