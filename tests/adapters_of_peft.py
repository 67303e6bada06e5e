"""Adapters beside tiny models: saved by PEFT, written by us, and computed by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint.adapter_files import CONFIG_FILE, PREFIX, TENSOR_FILE, config_bytes
from runtime.plan.train import TARGETS, Lora

from .real_layers import hf_model
from .tiny import EXPERT_TYPES, tiny_config

ATTENTION = TARGETS[:4]
LORA = Lora(rank=4, alpha=6.0, dropout=0.0, targets=TARGETS)
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 96


def model_of(model_type: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    torch.manual_seed(7)
    return hf_model(tiny_config(model_type, **overrides), dtype=dtype).eval()


def lora_of(model_type: str) -> Lora:
    """Of models with experts PEFT takes the names of an MLP for those of the experts."""
    return Lora(rank=4, alpha=6.0, targets=ATTENTION if model_type in EXPERT_TYPES else TARGETS)


def factors_of(model: Any, lora: Lora = LORA) -> dict[str, Tensor]:
    """Factors, none of them zero, beside each target of a model that is a linear module."""
    torch.manual_seed(8)
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in lora.targets:
            factors[f"{name}.lora_A.weight"] = torch.randn(lora.rank, module.in_features) / 8
            factors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, lora.rank) / 8
    return factors


def write_adapter(folder: Path, lora: Lora, factors: dict[str, Tensor], base: str | None = None) -> Path:
    """The files as a checkpoint has them."""
    folder.mkdir(parents=True)
    save_file({PREFIX + name: factor for name, factor in factors.items()}, folder / TENSOR_FILE)
    (folder / CONFIG_FILE).write_bytes(config_bytes(lora, factors, base))
    return folder


def peft_saved(folder: Path, model: Any, **settings: Any) -> dict[str, Tensor]:
    """An adapter as PEFT saves it, with factors that are not zero; these by our names."""
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
    """By hand: each adapter's product is added to its projection's."""

    def beside(name: str) -> Callable[..., Tensor]:
        a, b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
        return lambda _, inputs, output: output + lora.scale * (inputs[0] @ a.T @ b.T)

    hooks = [
        module.register_forward_hook(beside(name)) for name, module in model.named_modules() if f"{name}.lora_A.weight" in factors
    ]
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    for hook in hooks:
        hook.remove()
    return logits
