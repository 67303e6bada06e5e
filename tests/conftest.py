"""What holds for every test?"""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from .soak import SOAK

# Shared machines are slow at times, which proves nothing; and a build must not depend on which examples were drawn.
settings.register_profile("house", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long lane is a list, so that it can be read."""
    for item in items:
        if item.nodeid.rpartition("/")[2] in SOAK:
            item.add_marker(pytest.mark.soak)


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
