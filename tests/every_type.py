"""Tiny models of every causal language model type in transformers: `python -m tests.every_type` writes docs/models.md.

A type is accepted if its first streamed step has the loss and the gradients of transformers' `forward(labels=...)`.
"""

import json
import signal
import sys
import warnings
from typing import Any

from tests.tour import ROOT

PAGE = ROOT / "docs" / "models.md"
MOST_S = 120  # per type

TINY = json.loads((ROOT / "tests" / "tiny_types.json").read_text())  # small values by key, and more keys for some types


def every_type() -> list[str]:
    """Return the types of transformers' AutoModelForCausalLM and AutoModelForImageTextToText, sorted."""
    from transformers.models.auto import modeling_auto as auto

    return sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def tiny(model_type: str) -> dict[str, Any]:
    """Return a small configuration of the type: its size keys get small values, some by hand."""
    from transformers import AutoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        defaults = AutoConfig.for_model(model_type).to_dict()
        if isinstance(text := defaults.get("text_config"), dict) and "vision_config" in defaults:
            parts = {"text_config": tiny(text["model_type"]), "vision_config": dict(TINY["vision"])}
            for name, fields in TINY["parts_by_hand"].get(model_type, {}).items():
                parts[name] = parts.get(name, {}) | fields
            if "rope_type" in (rope := parts["text_config"].get("rope_parameters") or {}):
                n = int((parts["text_config"].get("head_dim") or 16) * rope.get("partial_rotary_factor", 1)) // 2
                rope["mrope_section"] = [n - 2 * (n // 3), n // 3, n // 3]
            return json.loads(json.dumps(AutoConfig.for_model(model_type, **parts).to_dict())) | {"model_type": model_type}
        optional = ("n_group", "topk_group", "sliding_window")  # null disables the feature
        small = {k: v for k, v in TINY["small"].items() if k in defaults and not (defaults[k] is None and k in optional)}
        config = AutoConfig.for_model(model_type, **{**small, **TINY["by_hand"].get(model_type, {})}).to_dict()
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = False
    return json.loads(json.dumps(config, default=str)) | {"model_type": model_type}  # type: ignore[no-any-return]


def verdict(model_type: str) -> str:
    """Return `accepted`, or the reason."""
    from penstock.runtime.errors import PenstockError
    from tests.runtime.test_outside import faults

    try:
        differing = faults(config := tiny(model_type))
        if unread := unread_names(config):
            return f"not the same: {unread[0]} is saved under a name that is not read as that weight again"
    except PenstockError as error:
        return f"refused: {error}"
    except Exception as error:  # the configuration needs more than small values
        return f"not tried: {' '.join(f'{type(error).__name__}: {error}'.split())[:160]}"
    # Decoders of the BART family do not shift labels in `forward`; no other type reached this line so far
    return "accepted" if not differing else "not the same: another loss than that of its own forward(labels=...)"


def unread_names(config: dict[str, Any]) -> list[str]:
    """Return weights with a checkpoint name that is not read back as the same weight."""
    from penstock.checkpoint.conversion import Conversion

    conversion = Conversion(config)
    weights = {name: tensor for name, tensor in conversion.weights.items() if tensor.requires_grad}
    read = conversion.sources(stored for name, tensor in weights.items() for stored, _ in conversion.published(name, tensor))
    return [name for name in weights if name not in read]


def meeting(model_type: str) -> str | None:
    """Return the reason why models of this type cannot isolate documents of a packed sequence; None if they can."""
    from penstock.model_checks.document_isolation import supports_documents
    from penstock.planner.model.workload import supported_attention
    from penstock.runtime.plan.workload import Model
    from tests.training import semantics_of

    config = tiny(model_type)
    return supports_documents(config, semantics_of(model_type, attention=supported_attention(Model(config))[0]))


def attention_table() -> str:
    """Return a Markdown table: attention kernels of the shipped models at 4,096 tokens, with the models that use each."""
    from penstock.planner.model.config import read_model, shipped_models, supported_attention
    from penstock.planner.model.workload import attention_kernels
    from penstock.runtime.plan import Semantics

    models = dict[str, list[str]]()
    for name in shipped_models():
        model = read_model(name)
        semantics: Any = Semantics(4096, 1, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
        kernels = {kernel: n for kernel, (n, _) in attention_kernels(model, semantics).items()}
        words = "; ".join(f"{kernel} in {n} layers" if len(kernels) > 1 else kernel for kernel, n in kernels.items())
        models.setdefault(words, []).append(name)
    rows = (f"| {words} | {', '.join(names)} |{chr(10)}" for words, names in models.items())
    return f"| attention at 4,096 tokens | shipped models |{chr(10)}| --- | --- |{chr(10)}{''.join(rows)}"


def page(verdicts: dict[str, str]) -> str:
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    from penstock.data.image_processor import TYPES

    version, sees = transformers.__version__, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    texts, images = ({name: word for name, word in verdicts.items() if (name in sees) is is_in} for is_in in (False, True))
    accepted, as_text = ([name for name, word in verdicts_of.items() if word == "accepted"] for verdicts_of in (texts, images))
    meet = {name: why.partition(": ")[2] for name in [*accepted, *as_text] if (why := meeting(name))}
    n_apart = [len({*verdicts_of} - meet.keys()) for verdicts_of in (accepted, as_text)]
    kinds = {name: IMAGE_PROCESSOR_MAPPING_NAMES.get(name) or {} for name in as_text}
    without_pil = [name for name in as_text if "torchvision" in kinds[name] and "pil" not in kinds[name]]
    untried = [name for name in as_text if name not in {*TYPES, *without_pil, "ovis2", "idefics2", "hunyuan_vl"}]
    rejected = {name: word for name, word in verdicts.items() if word != "accepted"}
    return f"""# Models

Any causal language model of transformers is trained that is a chain of layers by proof, not by a list
([design](design.md#models), [measured](benchmarks/models_2026-11-27.md)).
Of the {len(texts)} types that transformers {version} builds, {len(accepted)} are accepted: the first streamed
step of a tiny one has the bits of the loss, and of every gradient, of transformers' own `forward(labels=...)`, in fp32 on a CPU.
`python -m tests.every_type` asks all of them again, and a [self-test](design.md#models) asks yours at its first run.

Accepted: {", ".join(accepted)}.

Of {len(images)} vision-language types {len(as_text)} are accepted, held to the same: their decoder of text is
trained, and their towers are saved along, unchanged: {", ".join(as_text)}.
[With images](images.md), the frozen tower's features of which have the bits of the model's own forward: {", ".join(TYPES)}.
The others are trained on text alone, and rows with images are refused: {", ".join(without_pil)} (their image processors need
torchvision), ovis2 (its decoder takes indicators next to features), idefics2 and hunyuan_vl (their processors do not give the
places of images that they expand) and, not held to their own forward so far, {", ".join(untried)}.

In {n_apart[0]} of the former, and {n_apart[1]} of the latter, documents of a packed sequence are kept apart, which is proven of
each model when it is run ([how](design.md)). The others are refused that packing, and take documents joined, or one a sequence;
here is why, of a tiny one.

Attention is fused where torch, or our kernel for sinks, has it. `plan -v` names the kernels, and the time that fused attention
would save. A GPU has no FlashAttention with a dense mask: such layers are predicted at its rate over the window, and take longer.
Keys and values of different widths (latent attention) are planned as unfused; PyTorch may use a faster kernel.

{attention_table()}
| accepted, but not with documents packed | why |
| --- | --- |
{"".join(f"| {name} | {why} |{chr(10)}" for name, why in meet.items())}
| refused, or not accepted | why |
| --- | --- |
""" + "".join(f"| {name} | {word.partition(': ')[2].replace('|', '/')} |\n" for name, word in rejected.items())


def _late(*_: object) -> None:
    raise TimeoutError(f"not done after {MOST_S} s")


if __name__ == "__main__":
    verdicts = {}
    signal.signal(signal.SIGALRM, _late)
    for model_type in sys.argv[1:] or every_type():
        signal.alarm(MOST_S)
        verdicts[model_type] = verdict(model_type)
        signal.alarm(0)
        print(model_type, verdicts[model_type], flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(page(verdicts), encoding="utf-8")
