"""Fixtures and marks of every test."""

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

# Shared machines are slow at times, which proves nothing; and a build must not depend on which examples were drawn.
settings.register_profile("house", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("house")
# A shell has its background jobs ignore interrupts, as nohup does hang-ups, and whatever they start inherits that: no test of these
# could pass.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if is_in_memory(Path(tempfile.gettempdir())):  # as some systems' /tmp is, from which no disk can be read
    on_disk = Path(__file__).parents[1] / ".pytest_cache" / "tmp"
    on_disk.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(on_disk)


LANES = pytest.StashKey[dict[pytest.Item, bool]]()  # of every item collected, whether the fast lane leaves it out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the long lane's cases, draw fewer examples in the fast one, and begin with what takes longest, so that no core waits."""
    left = long_lane(items)
    config.stash[LANES] = {item: item in left for item in items}
    for item in items:
        if item in left:
            item.add_marker(pytest.mark.soak)
        elif item.get_closest_marker("drawn"):
            if config.option.markexpr == "not soak":
                draw_a_share(item)
            else:
                item.add_marker(pytest.mark.soak)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def draw_a_share(item: Any) -> None:
    """Hypothesis keeps a test's settings on its function, and takes them only once."""
    function = item.obj
    of: settings = function._hypothesis_internal_use_settings
    function._hypothesis_internal_use_settings = settings(of, max_examples=share(of.max_examples))


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """What was imported and made by now: no collection, and no test that counts what is alive, goes through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _files_of_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test keeps tokens in the home. None takes the power from a disk, so none but those with processes of their own waits for
    it: to sync is to ask for an open file."""
    os.environ["PENSTOCK_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.fsync = os.fstat  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _one_compute_thread() -> Iterator[None]:
    """The laws hold at a fixed count of compute threads, and tests share two cores. Tests without torch stay without it."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)
