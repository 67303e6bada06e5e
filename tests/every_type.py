"""Every type of causal language model that transformers can build, tiny: `python -m tests.every_type` writes docs/models.md.

A type is accepted when its first streamed step has the loss and the gradients of transformers' own `forward(labels=...)`.
"""

import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.tour import ROOT

PAGE = ROOT / "docs" / "models.md"
MOST_S = 240

TINY = json.loads((ROOT / "tests" / "tiny_types.json").read_text())  # keys of any type made small, and others of some types


def every_type() -> list[str]:
    """Types that transformers' AutoModelForCausalLM knows, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(model_type: str) -> dict[str, Any]:
    """A small configuration of the type: the keys that it has are made small, some by hand."""
    from transformers import AutoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = AutoConfig.for_model(model_type).to_dict()
        kept = ("n_group", "topk_group", "sliding_window")  # where these are null, there is no such thing
        small = {k: v for k, v in TINY["small"].items() if k in there and not (there[k] is None and k in kept)}
        config = AutoConfig.for_model(model_type, **{**small, **TINY["by_hand"].get(model_type, {})}).to_dict()
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = False
    return json.loads(json.dumps(config, default=str)) | {"model_type": model_type}  # type: ignore[no-any-return]


def verdict(model_type: str) -> str:
    """`accepted`, or why not."""
    from planner.model.workload import supported_attention
    from runtime.errors import PenstockError
    from runtime.plan.workload import Model
    from tests.runtime.test_outside import faults

    try:
        config = tiny(model_type)
        attention = supported_attention(Model(config))[0]
        found = faults(config, compute_dtype="fp32", attention=attention)
    except PenstockError as error:
        return f"refused: {error}"
    except Exception as error:  # its configuration or its code asks for more than a test gives it
        return f"not tried: {' '.join(f'{type(error).__name__}: {error}'.split())[:160]}"
    # Decoders of the BART family do not shift labels in their `forward`; no other type has been seen here
    return "accepted" if not found else "not the same: another loss than that of its own forward(labels=...)"


def asked(model_type: str) -> str:
    """The verdict of a process of its own: of some types transformers' code ends it, or does not end."""
    command = [sys.executable, "-m", "tests.every_type", model_type]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MOST_S, check=False)
    except subprocess.TimeoutExpired:
        return f"failed: not done after {MOST_S} s"
    lines = done.stdout.splitlines() if done.returncode == 0 else [f"failed: {(done.stderr.splitlines() or ['?'])[-1]}"]
    return lines[-1][:300]


def page(verdicts: dict[str, str]) -> str:
    """The page of all types."""
    import transformers

    version = transformers.__version__
    n = sum(word == "accepted" for word in verdicts.values())
    others = {name: word for name, word in verdicts.items() if word != "accepted"}
    return f"""# Models

Any causal language model of transformers is trained that is a chain of layers by proof, not by a list
([design](design.md), [measured](benchmarks/models_2026-11-26.md)).
Of the {len(verdicts)} types that transformers {version} builds, {n} are accepted: the first streamed
step of a tiny one has the loss and every gradient of transformers' own `forward(labels=...)`. `python -m tests.every_type` asks
all of them again.

Accepted: {", ".join(name for name, word in verdicts.items() if word == "accepted")}.

| refused, or not accepted | why |
| --- | --- |
""" + "".join(f"| {name} | {word.partition(': ')[2].replace('|', '/')} |\n" for name, word in others.items())


if __name__ == "__main__":
    if sys.argv[1:]:
        print(verdict(sys.argv[1]))
    else:
        with ThreadPoolExecutor(2) as pool:
            verdicts = dict(zip(every_type(), pool.map(asked, every_type()), strict=True))
        PAGE.write_text(page(verdicts), encoding="utf-8")
