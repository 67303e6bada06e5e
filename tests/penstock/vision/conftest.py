"""Pixtral's processor imports torchvision, of which the PIL image processor uses nothing; tests run without it."""

import sys
from types import ModuleType

import pytest
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.mistral3 import Mistral3Config

from penstock.data import image_processor


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch):
    if not getattr(PROCESSOR_MAPPING[Mistral3Config], "is_dummy", False):
        return
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-2]].functional = sys.modules[names[-1]]
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    class Mapping:
        def __getitem__(self, config):
            return PixtralProcessor if config is Mistral3Config else PROCESSOR_MAPPING[config]

    monkeypatch.setattr(image_processor, "PROCESSOR_MAPPING", Mapping())
