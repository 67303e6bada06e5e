"""Names of transformers on which layers rely: each exists in the installed version."""

import re
from inspect import unwrap
from pathlib import Path

import pytest
import transformers
from transformers.integrations import moe
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from penstock.runtime.layers import transformers_patches as names

MODEL_FILES = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
GLOBALS = {
    LlamaAttention.forward: (names.EAGER_ATTENTION, names.ROTARY),
    Qwen3NextGatedDeltaNet.forward: names.LIBRARY_KERNELS,
    moe.grouped_mm_experts_forward: (names._GROUPED_PRODUCT,),
}
IN_MODULES = (*names.FINAL_NORMS, names.MLP, *names.PLAIN_MLP, names.NORM_AFTER_MLP, names.NORM_EPS)


def test_attributes_exist() -> None:
    assert [name for owner, attributes in names.ATTRIBUTES.items() for name in attributes if name not in dir(owner)] == []


@pytest.mark.parametrize("function", GLOBALS)
def test_functions_use_these_global_names(function) -> None:
    assert {*GLOBALS[function]} <= {*unwrap(function).__code__.co_names} & unwrap(function).__globals__.keys()


def test_modules_have_these_children_and_attributes() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in MODEL_FILES)
    assert [name for name in IN_MODULES if re.search(rf"self\.{name}\b", source) is None] == []
    assert names.IS_TRANSPOSED in Path(moe.__file__).read_text(encoding="utf-8")
    assert {*names.ACTIVATIONS} <= names.ACT2FN.keys()


def test_functions_that_other_packages_replace_are_found() -> None:
    module = Qwen3NextGatedDeltaNet.__new__(Qwen3NextGatedDeltaNet)
    assert names.optional_functions(module).keys() >= names.LIBRARY_KERNELS.keys()
