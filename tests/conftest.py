"""Hypothesis profiles and fixtures of all tests."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from penstock.runtime.host.base_file import is_in_memory

from .lanes import N_THOROUGH

# No deadline, because shared machines are slow at times; derandomized in CI, so that builds are reproducible.
for profile, n_examples in (("thorough", N_THOROUGH // 2), ("fast", 8)):
    settings.register_profile(profile, max_examples=n_examples, deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("fast")  # --hypothesis-profile=thorough replaces it
# Background jobs of a shell ignore SIGINT, and nohup ignores SIGHUP; processes inherit this, and tests of these signals would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if is_in_memory(Path(tempfile.gettempdir())):  # /tmp may be a tmpfs, which does not support direct reads
    on_disk = Path(__file__).parents[1] / ".pytest_cache" / "tmp"
    on_disk.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(on_disk)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """Exclude existing objects from garbage collection, and so from tests that count live objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _token_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["PENSTOCK_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fsync by fstat, in tests that write many files and simulate no power loss."""
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture(autouse=True)
def _one_compute_thread() -> Iterator[None]:
    """Set one intra-op thread, because bits depend on their number and tests share two cores. Does not import torch."""
    torch = sys.modules.get("torch")
    n_threads = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(n_threads)
