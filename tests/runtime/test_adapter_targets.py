"""Adapters beside every linear layer: names, values and files equal PEFT's, for every accepted type."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from torch import nn

from penstock.checkpoint.adapter_files import read_adapter
from penstock.checkpoint.merging import merge
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model, spelled_out, supported_attention, without_adapters
from penstock.runtime.errors import PlanError, WorkloadError
from penstock.runtime.executor import Execution
from penstock.runtime.machines.lanes import CpuDevice
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.train import TARGETS, Lora, Train, in_order, is_adapter, last_part, parse_train
from penstock.runtime.plan.workload import Model
from tests import training
from tests.adapters_of_peft import write_adapter
from tests.every_type import PAGE, tiny
from tests.lanes import mostly_slow
from tests.real_layers import hf_model, load_model

from .test_adapters import penstock_name

# Matrices of PEFT's all-linear without adapters here. PEFT trains none of them: its forward fails (routers, grouped products), the
# weight is read past its adapter (dt_proj, correction_coefs), or PEFT refuses it (out_proj). OUTSIDE: not in a layer
NOT_BESIDE = {
    **{model_type: {"out_proj"} for model_type in ("falcon_h1", "mamba2", "nemotron_h")},
    **{model_type: {"dt_proj", "out_proj"} for model_type in ("falcon_mamba", "mamba")},
    **{"jamba": {"dt_proj"}, "deepseek_v4": {"o_a_proj"}, "llama4_text": {"router"}, "phimoe": {"router"}},
    "gemma3n_text": {"correction_coefs"},
}
OUTSIDE = re.compile(r"model\.(?:altup_(?:un)?embed_projections\.\d|altup_projections\.\d|per_layer_model_projection)")
# Differences of fp32 sums over many steps; PEFT adds the adapter in another order: measured 3.3e-4 and 1.4e-4
WITHIN = {"bailing_hybrid": 1e-3, "qwen3_5_moe_text": 1e-3}
EAGER = ("flint", "granite_swa", "granitemoe_swa")  # sinks, computed by transformers in eager attention alone
SAMPLED = ("phi3", "deepseek_v3", "qwen3_next", "gpt2", "falcon", "llama4_text", "ctrl")
DIFFERENT = [t for t in re.search(r"Accepted: (.*)\.\n", PAGE.read_text())[1].split(", ") if t not in SAMPLED]  # type: ignore[index]


@mostly_slow("model_type", [*SAMPLED, *DIFFERENT], fast=range(len(SAMPLED)))
def test_adapters_of_all_linear_layers_equal_pefts(model_type: str, tmp_path: Path) -> None:
    """Compare the names with PEFT's all-linear, then loss and gradients in fp32 with PEFT's model of the written adapter."""
    config, lora = tiny(model_type), Lora(rank=4, alpha=6.0)
    semantics = Semantics(16, 2, 2, compute_dtype="fp32", gradient_dtype="fp32", clip_norm=None, train=Train(lora=lora))
    semantics = replace(semantics, attention=supported_attention(Model(config))[0])  # type: ignore[arg-type]
    spelled = spelled_out(Model(config), semantics)
    workload = build_workload(Model(config), semantics)
    assert build_workload(Model(config), spelled) == workload
    assert "all-linear" not in spelled.train.lora.targets  # type: ignore[union-attr]
    torch.manual_seed(0)
    model = hf_model(config, dtype=torch.float32, attn_implementation="eager" if model_type in EAGER else semantics.attention)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 + 0.2 * torch.randn(p.shape) if p.dim() == 1 else torch.randn(p.shape) * p.shape[-1] ** -0.5)
    weights, buffers = ({n: t.detach().clone() for n, t in named} for named in (model.named_parameters(), model.named_buffers()))
    factors = {p.name: torch.randn(p.shape) * 0.2 for block in workload.blocks for p in block.trained}
    all_linear = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    expected = {*_maybe_include_all_linear_layers(all_linear, model).target_modules}
    adapted = {name.rpartition(".lora_")[0] for name in factors}
    assert {last_part(name) for name in expected - adapted if not OUTSIDE.fullmatch(name)} == NOT_BESIDE.get(model_type, set())
    assert adapted <= expected
    folder = write_adapter(tmp_path / "adapter", lora, factors, other_weights=weights)
    read, tensors = read_adapter(folder, {name: tuple(weight.shape) for name, weight in weights.items()})
    assert adapted <= {name for name in expected if read.adapts(name)}
    assert tensors.keys() == factors.keys()
    if model_type == "laguna":  # PEFT does not find the factors of shared experts that it saves itself
        return
    peft = PeftModel.from_pretrained(model, folder, is_trainable=True).train()
    trained = {penstock_name(name): p for name, p in peft.named_parameters() if ".lora_" in name}
    assert trained.keys() == factors.keys()
    assert all(torch.equal(trained[name], factor) for name, factor in factors.items())
    batch = training.batches_of(96, 2, 16)[0]
    logits = peft(input_ids=batch.input_ids, use_cache=False).logits.float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    loss.backward()
    plan, exactly = lower(Model(config), workload, semantics, Policy(), {}), AdamW(lr=1e-9, beta1=0.0)  # the moment is the gradient
    machine = TorchMachine(plan, lambda _: batch, lambda _: exactly, device=CpuDevice(cores=([0], [0])))
    for block in range(len(workload.blocks)):
        for p in (*machine.host.owned[block], *machine.host.frozen[block]):
            machine.host.set_weight(p, (weights | factors)[p.name])
        machine.host.settle(block)
    for name in machine.compute.templates.constants():
        machine.compute.templates.set_constant(name, (weights | buffers)[name])  # a bias of a router may be a parameter
    with Execution(machine.plan, machine, 1) as steps:
        assert [step.result.loss for step in steps] == pytest.approx([loss.item()], rel=1e-5)  # type: ignore[union-attr]
    for p in filter(lambda p: is_adapter(p.name), machine.host.all_owned()):
        gradient, reference = machine.host.param_state(p).moments[0].view(p.shape), trained[p.name].grad
        reference = torch.zeros(p.shape) if reference is None else reference
        assert (gradient - reference).abs().max() <= WITHIN.get(model_type, 1e-4) * max(reference.abs().max().item(), 1e-6), p.name


@mostly_slow("model_type", ["gpt2", "kimi_linear", "phi3", "lfm3"], fast=(0, 1))  # transposed weights; other names in files
def test_merged_models_equal_pefts(model_type: str, tmp_path: Path) -> None:
    model, lora = hf_model(config := tiny(model_type), dtype=torch.float32), Lora(rank=4, alpha=6.0)
    model.save_pretrained(tmp_path / "base")
    semantics = Semantics(16, 1, 1, attention=supported_attention(Model(config))[0], train=Train(lora=lora))  # type: ignore[arg-type]
    factors = {p.name: torch.randn(p.shape) for block in build_workload(Model(config), semantics).blocks for p in block.trained}
    shapes = dict(model.named_parameters())
    adapter = write_adapter(tmp_path / "adapter", lora, factors, other_weights=shapes)
    merge(tmp_path / "base", adapter, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", dtype=torch.float32).state_dict()
    initial = {name: weight.clone() for name, weight in model.state_dict().items()}
    wanted = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    changed = {name for name, weight in wanted.items() if not weight.equal(initial[name])}
    assert changed == {f"{name.rpartition('.lora_')[0]}.weight" for name in factors}
    torch.testing.assert_close(merged, dict(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "millions", "omitted"),  # counted by PEFT's all-linear for rank 16
    [
        ("phi-4-14b", 55.7, []),
        ("deepseek-v3-671b", 126.4, ["mlp.gate", "mlp.experts"]),
        ("llama-3.1-8b", 41.9, []),
        ("qwen3-30b-a3b", 13.4, ["mlp.experts", "mlp.gate"]),
    ],
)
def test_adapter_sizes_of_shipped_models_equal_pefts(name: str, millions: float, omitted: list[str]) -> None:
    semantics = Semantics(64, 1, 1, train=Train(lora=Lora()))
    workload = build_workload(read_model(name), semantics)
    assert workload.n_trained / 1e6 == pytest.approx(millions, abs=0.05)
    assert {*without_adapters(workload)} == {*omitted}


def adapted_names(text: str, model_type: str) -> set[str]:
    attention = supported_attention(model := Model(tiny(model_type)))[0]
    workload = build_workload(model, Semantics(16, 1, 1, attention=attention, train=parse_train(text)))  # type: ignore[arg-type]
    return {p.name.removesuffix(".lora_A.weight") for b in workload.blocks for p in b.trained if p.name.endswith("lora_A.weight")}


def test_targets_are_module_names_or_an_expression() -> None:
    """PEFT's rule: a name is the end of a module's, an expression matches all of it."""
    layers = "model.layers"
    assert adapted_names("lora:targets=qkv_proj", "phi3") == {f"{layers}.{i}.self_attn.qkv_proj" for i in range(4)}
    assert adapted_names("lora:targets=mlp.down_proj", "deepseek_v3") == {f"{layers}.0.mlp.down_proj"}
    expression = r"lora:r=8,targets=/model\.layers\.(?:1|3)\..*\.(q|kv)_b_proj/"
    modules = {f"{layers}.{i}.self_attn.{name}_b_proj" for i in (1, 3) for name in ("q", "kv")}
    assert adapted_names(expression, "deepseek_v3") == modules
    assert adapted_names(expression.replace("targets=", "targets=kv_a_proj_with_mqa+"), "deepseek_v3") > modules
    # The default of earlier plans keeps its meaning, and nothing new is spelled like it
    older, newer = Semantics(16, 1, 1, train=Train(lora=Lora(targets=TARGETS))), Semantics(16, 1, 1, train=parse_train("lora"))
    model = Model(tiny("glm4_moe"))
    modules = {p.name.rpartition(".lora_")[0] for block in build_workload(model, older).blocks for p in block.trained}
    assert {name.split(".")[3] for name in modules} == {"self_attn"}
    for semantics in (older, newer):
        spelled = spelled_out(model, semantics)
        assert {"self_attn.q_proj", "mlp.up_proj", "shared_experts.up_proj"} <= {*spelled.train.lora.targets}  # type: ignore[union-attr]
        assert build_workload(model, spelled) == build_workload(model, newer)
    both = adapted_names("lora:r=8,targets=all-linear+experts", "glm4_moe")
    assert both > adapted_names("lora:r=8", "glm4_moe")
    assert f"{layers}.1.mlp.experts" in both


def test_train_is_parsed_from_its_text() -> None:
    for text in (
        "lora:r=4,alpha=8,targets=/.*a,b+c/",
        "lora:r=4,alpha=8,rslora,targets=q_proj+qkv_proj+experts+/.*x/",
        "lora:r=4,alpha=8",
    ):
        assert str(parse_train(text)) == text
    assert in_order(["experts", "z", "o_proj", "/x/", "a", "q_proj"]) == ("q_proj", "o_proj", "a", "z", "experts", "/x/")
    assert str(Train(lora=Lora(targets=TARGETS))) == "lora:r=16,alpha=32", "of plans from before there were others"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora:targets=/(/", "targets.0 is /(/; not a regular expression (missing )"),
        ("lora:targets=/x/,r=4", "targets.0 is /x/,r=4"),
        ("lora:targets=/x", "targets.0 is /x"),
        ("lora:r=4,/x/", "is not understood"),
        ("lora:targets=q_proj,/x/", "is not understood"),
        ("lora:targets=q proj", "targets.0 is q proj"),
        ("lora:targets=", "targets"),
    ],
)
def test_malformed_targets_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        parse_train(text)


@pytest.mark.parametrize(
    ("text", "model_type", "message"),
    [
        (
            "lora:targets=q_proj",
            "phi3",
            "has no linear layer q_proj that PEFT adapts; it has o_proj, down_proj, gate_up_proj, qkv_proj",
        ),
        ("lora:targets=/q_a_proj/", "deepseek_v3", "has no linear layer /q_a_proj/"),
        ("lora:targets=gate_proj", "mixtral", "outside experts (target name: experts)"),
        ("lora:targets=gate", "glm4_moe", "has no linear layer gate outside experts"),
        ("lora:targets=out_proj", "mamba2", "has no linear layer out_proj that PEFT adapts; it has in_proj"),
        ("lora:dropout=0.1", "deepseek_v3", "adapters of down_proj in a model with experts need dropout 0"),
    ],
)
def test_targets_missing_in_the_model_are_refused(text: str, model_type: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(message)):
        adapted_names(text, model_type)
