"""Hypothesis profile, marks and autouse fixtures of all tests."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from penstock.runtime.host.base_file import is_in_memory

from .soak import long_lane, share

# No deadline, because shared machines are slow at times; derandomized in CI, so that builds are reproducible.
settings.register_profile("house", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("house")
# Background jobs of a shell ignore SIGINT, and nohup ignores SIGHUP; processes inherit this, and tests of these signals would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if is_in_memory(Path(tempfile.gettempdir())):  # /tmp may be a tmpfs, which does not support direct reads
    on_disk = Path(__file__).parents[1] / ".pytest_cache" / "tmp"
    on_disk.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(on_disk)


LANES = pytest.StashKey[dict[pytest.Item, bool]]()  # True for items that the fast lane omits


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases of the long lane, reduce examples in the fast one, and put long tests first, so that no core idles at the end."""
    omitted = long_lane(items)
    config.stash[LANES] = {item: item in omitted for item in items}
    for item in items:
        if item in omitted:
            item.add_marker(pytest.mark.soak)
        elif item.get_closest_marker("drawn"):
            if config.option.markexpr == "not soak":
                draw_a_share(item)
            else:
                item.add_marker(pytest.mark.soak)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def draw_a_share(item: Any) -> None:
    """Reduce `max_examples`; Hypothesis stores the settings of a test on its function."""
    function = item.obj
    current: settings = function._hypothesis_internal_use_settings
    function._hypothesis_internal_use_settings = settings(current, max_examples=share(current.max_examples))


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """Exclude existing objects from garbage collection, and so from tests that count live objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _files_of_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cache tokens in a temporary folder. Replace fsync by fstat, because no in-process test simulates power loss."""
    os.environ["PENSTOCK_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.fsync = os.fstat  # type: ignore[assignment]


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
