"""Missing Python packages, installed from wheels.

This module imports no optional package.
"""

import subprocess
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from .stages import NEEDED, STAGES


class WheelsError(Exception):
    """A folder of wheels that cannot be used, with the reason."""


def missing(names: Iterable[str], extra: Path | None = None) -> list[str]:
    """Return the packages that cannot be imported here or from the folder `extra`."""
    folder = [str(extra)] if extra is not None else []
    return [name for name in names if find_spec(name) is None and PathFinder.find_spec(name, folder) is None]


def missing_words(extra: Path | None = None) -> tuple[list[str], list[str]]:
    """Return lines for missing packages: needed by all stages, and by one."""
    for_all, for_one = missing(NEEDED, extra), []
    for stage in STAGES:
        if names := missing(stage.needs, extra):
            for_one.append(f"missing for {stage.name}: {', '.join(names)}; that stage is skipped")
    words = f"missing, and every stage needs it: {', '.join(for_all)}; give a folder of its wheels with --wheels"
    return ([words] if for_all else []), for_one


def carried(wheels: Path, target: Path) -> list[str]:
    """Install missing packages from a folder of wheels, without an index. Return their names."""
    if not (files := sorted(wheels.glob("*.whl"))):
        raise WheelsError(f"{wheels}: holds no wheel")
    wanted = [path for path in files if not _is_installed(path.name.partition("-")[0])]
    if wanted:
        words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", target)
        process = subprocess.run([sys.executable, *map(str, (*words, *wanted))], check=False, capture_output=True, text=True)
        if process.returncode:
            raise WheelsError((process.stderr.strip().splitlines() or ["pip failed"])[-1])
    return [path.name.partition("-")[0] for path in wanted]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
