"""Compilation of functions on arrays, by numba where it is installed; without it they are interpreted, to the same bits."""

from collections.abc import Callable
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
    """In machine code, kept between processes where a folder can be written. No operation on floats is reordered or fused."""
    if not IS_COMPILED:
        return function
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder to keep it in
        return cast(F, numba.njit(nogil=True)(function))


def integers(values: Any) -> Any:
    """Values that such functions read and write: an array of int64, or a list, which the interpreter reads faster."""
    return np.array(values, dtype=np.int64) if IS_COMPILED else np.asarray(values).tolist()


def floats(values: Any) -> Any:
    """The same of float64."""
    return np.array(values, dtype=np.float64) if IS_COMPILED else np.asarray(values, dtype=np.float64).tolist()
