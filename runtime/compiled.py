"""Compilation of functions on arrays, by numba where it is installed; without it they are interpreted, to the same bits."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np

try:
    import numba
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = not vars(numba.config)["DISABLE_JIT"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F, **options: Any) -> F:
    """In machine code, kept between processes where a folder can be written. No operation on floats is reordered or fused."""
    if not IS_COMPILED:
        return function
    try:
        found = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder to keep it in
        return cast(F, numba.njit(nogil=True, **options)(function))
    kept = vars(found)["_cache"]
    kept.load_overload, kept.save_overload = map(_if_the_disk_lets, (kept.load_overload, kept.save_overload))
    return cast(F, found)


def compiled_bare(function: F) -> F:
    """The same of a function that allocates nothing: references to its arrays are not counted at each access, which takes the event
    loop ten times as long as all else that it does."""
    return compiled(function, _nrt=False, forceinline=True)


def compiled_loop(function: F) -> F:
    """A part of `compiled_kernel`s, with IEEE's division. It is inlined and cached with them. If it were called, the linker could
    take the code that was compiled for it alone, whose loops LLVM may not vectorise."""
    return cast(F, numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)) if IS_COMPILED else function


def compiled_kernel(function: F) -> F:
    """The same of a kernel; a warning tells once that one is compiled, which takes seconds."""
    found = compiled(function, error_model="numpy")
    if IS_COMPILED:
        kept = vars(found)["_cache"]
        kept.load_overload = _or_announced(kept.load_overload)
    return found


def _or_announced(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(*args: Any) -> Any:
        found = load(*args)
        if found is None:
            _announce()
        return found

    return loaded


@cache
def _announce() -> None:
    warnings.warn("compiling the host's optimizer: seconds, once on this machine", RuntimeWarning, stacklevel=2)


def _if_the_disk_lets(access: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but nothing is found or kept where a disk is full or refuses: an OSError would end a run."""

    def tried(*args: Any) -> Any:
        with suppress(OSError):
            return access(*args)
        return None

    return tried


def integers(values: Any) -> Any:
    """Values that such functions read and write: an array of int64, or a list, which the interpreter reads faster."""
    return np.array(values, dtype=np.int64) if IS_COMPILED else np.asarray(values).tolist()


def floats(values: Any) -> Any:
    """The same of float64."""
    return np.array(values, dtype=np.float64) if IS_COMPILED else np.asarray(values, dtype=np.float64).tolist()
