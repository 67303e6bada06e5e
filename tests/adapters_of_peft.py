"""Adapters of tiny models: saved by PEFT, written as a checkpoint writes them, and computed by hand."""

import copy
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint.adapter_files import CONFIG_FILE, PREFIX, TENSOR_FILE, config_bytes
from penstock.runtime.plan.train import EXPERTS, TARGETS, Lora

from .every_type import tiny
from .real_layers import hf_model
from .tiny import EXPERT_TYPES, MODEL_TYPES, tiny_config

ATTENTION = TARGETS[:4]
LORA = Lora(rank=4, alpha=6.0, dropout=0.0, targets=TARGETS)
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 96


def model_of(model_type: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    torch.manual_seed(7)
    config = tiny_config(model_type, **overrides) if model_type in MODEL_TYPES else tiny(model_type) | overrides
    return hf_model(config, dtype=dtype).eval()


def lora_of(model_type: str) -> Lora:
    """Return targets for the type. In models with experts PEFT applies MLP names to the experts, so they are left out."""
    targets = (*ATTENTION, EXPERTS) if model_type in EXPERT_TYPES else TARGETS if model_type in MODEL_TYPES else (*TARGETS, EXPERTS)
    return Lora(rank=4, alpha=6.0, targets=targets, rslora=model_type in ("gemma", "qwen3_moe"))


def factors_of(model: Any, lora: Lora = LORA) -> dict[str, Tensor]:
    """Return random factors, by name, for every target: linear modules, and stacks of experts."""
    torch.manual_seed(8)
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in lora.targets:
            factors[f"{name}.lora_A.weight"] = torch.randn(lora.rank, module.in_features) / 8
            factors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, lora.rank) / 8
    for name, module, stack in stacks_of(model) if EXPERTS in lora.targets else ():
        n_experts, n_in, n_out = stack.shape if module.is_transposed else stack.transpose(1, 2).shape
        factors[f"{name}.lora_A.weight"] = torch.randn(lora.rank * n_experts, n_in) / 8
        factors[f"{name}.lora_B.weight"] = torch.randn(n_out, lora.rank * n_experts) / 8
    return factors


def stacks_of(model: Any) -> Iterator[tuple[str, Any, Tensor]]:
    """Yield (PEFT's name of the adapter, experts module, weight) of each stack of experts."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            yield from ((f"{name}.base_layer", module, module.gate_up_proj), (name, module, module.down_proj))


def with_deltas(model: Any, lora: Lora, factors: dict[str, Tensor]) -> Any:
    """Return a copy with adapters merged into the experts. The expert index is the outer one in A and the inner one in B."""
    model = copy.deepcopy(model)
    for name, module, stack in stacks_of(model) if EXPERTS in lora.targets else ():
        a, b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
        for e, weight in enumerate(stack.data):
            delta = lora.scale * (b[:, e :: len(stack)] @ a[e * lora.rank :][: lora.rank])
            weight.copy_((delta.T if module.is_transposed else delta) + weight.float())
    return model


def write_adapter(
    folder: Path, lora: Lora, factors: dict[str, Tensor], base: str | None = None, other_weights: Collection[str] = ()
) -> Path:
    folder.mkdir(parents=True)
    save_file({PREFIX + name: factor for name, factor in factors.items()}, folder / TENSOR_FILE)
    (folder / CONFIG_FILE).write_bytes(config_bytes(lora, factors, base, other_weights))
    return folder


def peft_saved(folder: Path, model: Any, **settings: Any) -> dict[str, Tensor]:
    """Save an adapter of random factors with PEFT; return the factors by Penstock's names."""
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings}))
    torch.manual_seed(9)
    factors = {}
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_()
            factors[name.removeprefix(PREFIX).replace(".default", "")] = parameter.detach()
    adapted.save_pretrained(folder)
    return factors


def logits_with(model: Any, lora: Lora, factors: dict[str, Tensor]) -> Tensor:
    """Compute logits by hand: add the product of each adapter to its projection."""

    def add_product(name: str) -> Callable[..., Tensor]:
        a, b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
        return lambda _, inputs, output: output + lora.scale * (inputs[0] @ a.T @ b.T)

    model = with_deltas(model, lora, factors)
    for name, module in model.named_modules():
        if f"{name}.lora_A.weight" in factors and not name.endswith("experts"):
            module.register_forward_hook(add_product(name))
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits
