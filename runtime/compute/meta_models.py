"""Which modules does transformers build from a configuration?

On the meta device: they hold no weights.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runtime.errors import WorkloadError
from runtime.host.memory import DTYPE
from runtime.plan import Semantics

OURS = ("torch_dtype", "dtype", "model_type", "auto_map")  # what a plan decides, and what a file has no say in


def read_config(config: dict[str, Any]) -> Any:
    """A configuration as transformers completes it; WorkloadError when it refuses."""
    try:
        return AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k not in OURS})
    except Exception as error:  # whatever its code makes of a value that nobody expected
        raise _refused(error) from None


def meta_model(config: dict[str, Any], semantics: Semantics) -> PreTrainedModel:
    """transformers' own model; WorkloadError when transformers refuses the configuration."""
    has_experts = any(key in config for key in ("num_experts", "num_local_experts"))  # a dense model refuses the option
    as_read = read_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
                as_read,
                dtype=DTYPE[semantics.compute_dtype],
                attn_implementation=semantics.attention,
                **({"experts_implementation": semantics.experts} if has_experts else {}),
                trust_remote_code=False,
            )
    except Exception as error:
        raise _refused(error) from None


def _refused(error: Exception) -> WorkloadError:
    words = " ".join((str(error) or type(error).__name__).split())
    return WorkloadError(f"transformers cannot build this model: {words[:160]}")
