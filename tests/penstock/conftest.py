"""Folders shared by the tests of commands."""

import shutil
from pathlib import Path

import pytest

from tests.hostile import make_house
from tests.running import make_home


@pytest.fixture
def home(tmp_path: Path, no_fsync: None) -> Path:
    """A tiny model and some text."""
    return make_home(tmp_path)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good file of every format."""
    home = tmp_path_factory.mktemp("good") / "house"
    home.mkdir()
    make_house(home)
    return home


@pytest.fixture
def house(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `good`, the working directory."""
    shutil.copytree(good.parent, tmp_path / "street")
    monkeypatch.chdir(tmp_path / "street" / "house")
    return tmp_path / "street" / "house"
