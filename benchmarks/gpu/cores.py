"""Plugin of pytest: each worker of pytest-xdist has cores of its own.

A machine pins its lanes to the first cores that its process may use. Begun side by side with all cores allowed, eight processes
would issue from one core, and laws of half a minute did not end in three.
"""

import os


def pytest_configure() -> None:
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number:
        cores, n_workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        each = max(1, len(cores) // n_workers)
        first = int(number) * each % len(cores)
        os.sched_setaffinity(0, cores[first : first + each])
