"""Compilation of functions on arrays, by numba where it is installed; without it they are interpreted, to the same bits."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

try:
    import numba
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = not vars(numba.config)["DISABLE_JIT"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """The function in machine code, kept from one process to the next. No operation on floats is reordered or fused."""
    return cast(F, numba.njit(cache=True)(function)) if IS_COMPILED else function


def integers(values: Sequence[int]) -> Any:
    """Values that such functions read and write: an array of int64, or a list, which the interpreter reads faster."""
    return np.array(values, dtype=np.int64) if IS_COMPILED else list(values)


def floats(values: Sequence[float]) -> Any:
    """The same of float64."""
    return np.array(values, dtype=np.float64) if IS_COMPILED else list(values)


def zeros(n: int) -> Any:
    """That number of float64 zeros."""
    return np.zeros(n) if IS_COMPILED else [0.0] * n
