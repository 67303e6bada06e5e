"""Folders shared by the tests of commands."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile import make_house
from tests.running import make_home
from tests.tour import ROOT


@pytest.fixture
def home(tmp_path: Path, no_fsync: None) -> Path:
    """A tiny model and some text."""
    return make_home(tmp_path)


@pytest.fixture(scope="module")
def trainers_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tiny models, rows of each kind, and a profile of this host in the cache, `cache`."""
    from benchmarks.trainers import write_home
    from penstock.hf.start import profile_path

    home = tmp_path_factory.mktemp("home")
    write_home(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(home / "cache"))
        profile_path().parent.mkdir(parents=True)
        shutil.copy(ROOT / "hwprofiles" / "profiles" / "cpu-2core.json", profile_path())
        yield home


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
