"""pytest plugin: separate cores for each worker of pytest-xdist.

A machine pins its lanes to the first cores of its process. With all cores allowed, eight parallel processes would issue from one
core; property tests of half a minute did not finish in three.
"""

import os


def pytest_configure() -> None:
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number:
        cores, n_workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        n_each = max(1, len(cores) // n_workers)
        first = int(number) * n_each % len(cores)
        os.sched_setaffinity(0, cores[first : first + n_each])
