"""Compilation of array functions by numba if installed; otherwise they are interpreted, with bitwise identical results."""

import gc
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
    """Compile to machine code, cached between processes if a folder is writable. No float operation is reordered or fused."""
    if not IS_COMPILED:
        return function
    try:
        kernel = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no cache folder
        return cast(F, numba.njit(nogil=True, **options)(function))
    store = vars(kernel)["_cache"]
    store.load_overload, store.save_overload = map(_ignoring_os_errors, (store.load_overload, store.save_overload))
    return cast(F, kernel)


def compiled_bare(function: F) -> F:
    """Compile a function without allocations. Reference counting of its arrays would take ten times the event loop's other time."""
    return _announced(compiled(function, _nrt=False), "the simulator")


def compiled_inner(function: F) -> F:
    """Compile a function that only `compiled_bare` functions call, without wrappers for Python or a cache of its own."""
    options: dict[str, Any] = {"_nrt": False, "forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, numba.njit(nogil=True, **options)(function)) if IS_COMPILED else function


def compiled_loop(function: F) -> F:
    """Compile a loop with IEEE division, inlined into `compiled_kernel`s. For a call the linker could choose the code compiled for
    the loop alone, where LLVM may not vectorise."""
    return cast(F, numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)) if IS_COMPILED else function


def compiled_kernel(function: F) -> F:
    """Compile a kernel with IEEE division; warn once per process that compilation takes seconds."""
    return _announced(compiled(function, error_model="numpy"), "the host's optimizer")


def _announced(kernel: F, part: str) -> F:
    """Warn if a kernel is compiled because the cache does not have it. Then collect the compiler's garbage."""

    def loaded(*args: Any) -> Any:
        overload = load(*args)
        if overload is None:
            _announce(part)
        return overload

    def saved(*args: Any) -> None:
        save(*args)
        gc.collect()

    if IS_COMPILED:
        store = vars(kernel)["_cache"]
        load, save, store.load_overload, store.save_overload = store.load_overload, store.save_overload, loaded, saved
    return kernel


@cache
def _announce(part: str) -> None:
    warnings.warn(f"compiling {part}: seconds, once on this machine", RuntimeWarning, stacklevel=2)


def _ignoring_os_errors(access: Callable[..., Any]) -> Callable[..., Any]:
    """Ignore OSErrors of a cache access, such as a full disk, which would end a run."""

    def tried(*args: Any) -> Any:
        with suppress(OSError):
            return access(*args)
        return None

    return tried


def integers(values: Any) -> Any:
    """Return int64 values for compiled functions: an array, or a list, which the interpreter reads faster."""
    return np.array(values, dtype=np.int64) if IS_COMPILED else np.asarray(values).tolist()


def floats(values: Any) -> Any:
    """Return float64 values, as `integers`."""
    return np.array(values, dtype=np.float64) if IS_COMPILED else np.asarray(values, dtype=np.float64).tolist()
