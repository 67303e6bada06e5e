"""Pixtral's processor imports torchvision, of which the PIL image processor uses nothing; tests run without it."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers.models.mistral3 import Mistral3Config

from penstock.data import image_processor
from tests.seers import HAS_IMAGES, write_drawings

collect_ignore_glob = [] if HAS_IMAGES else ["test_*.py"]
_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def use_pixtral(monkeypatch):
    """Make Pixtral's processor usable without torchvision."""
    original = image_processor.processor_class
    if not getattr(original(Path("none"), Mistral3Config()), "is_dummy", False):
        return
    for name in _NAMES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[_NAMES[-2]].functional = sys.modules[_NAMES[-1]]
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    def own_class(folder, config):
        cls = original(folder, config)
        return PixtralProcessor if cls.__name__ == "PixtralProcessor" else cls

    monkeypatch.setattr(image_processor, "processor_class", own_class)


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch):
    use_pixtral(monkeypatch)


@pytest.fixture
def home(tmp_path, no_fsync, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    write_drawings(tmp_path / "rows", 12, n_each=2)
    write_drawings(tmp_path / "held", 3, first=20)
    return tmp_path
