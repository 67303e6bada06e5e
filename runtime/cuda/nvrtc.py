"""Compile the CUDA sources of this folder with NVRTC. Callers compare each kernel with its definition before they use it."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from penstock.runtime.errors import SlowKernelWarning
from penstock.runtime.units import on_one_line

# C types of the bits; uint8: groups of int8 moments
ELEMENT = {torch.bfloat16: "unsigned short", torch.float32: "float", torch.uint8: "unsigned char"}
THREADS = 256  # of a block
MOST_ELEMENTS = 2**30  # per launch, because kernels count in 32 bits
VECTOR_BYTES = 16  # of the widest load and store

K = TypeVar("K")
Kernel = Callable[[tuple[int, int, int], tuple[int, int, int], list[Any]], None]  # (grid, block, arguments)


def source(file: str, **defined: str | int) -> str:
    """Source text of a file of this folder after `#define` lines, with its includes expanded."""
    head = "".join(f"#define {key} {value}\n" for key, value in defined.items())
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return head + re.sub(r'^#include "(.+)"$', lambda include: source(include[1]), text, flags=re.MULTILINE)


@lru_cache(maxsize=32)
def compiled_kernel(file: str, name: str, *, device: torch.device, **defined: str | int) -> Kernel:
    """Compile a kernel of a file of this folder; RuntimeError, OSError or AttributeError if that fails."""
    with torch.cuda.device(device), without_toolkit():
        return torch.cuda._compile_kernel(source(file, **defined), name)  # type: ignore[no-any-return]


def checked(compile_kernel: Callable[[], K], fault_of: Callable[[K], str], consequence: str) -> K | None:
    """Compile a kernel and compare it with its definition. None, with a warning of the consequence, if it cannot be used."""
    try:
        kernel = compile_kernel()
        if not (fault := fault_of(kernel)):
            return kernel
    except (AttributeError, OSError, RuntimeError) as error:  # any failure of a compiler or driver
        fault = f"its kernel cannot be used ({on_one_line(str(error), 120) or type(error).__name__})"
    warnings.warn(f"{consequence}: {fault}", SlowKernelWarning, stacklevel=3)
    return None


@contextmanager
def without_toolkit() -> Iterator[None]:
    """Let torch compile without a CUDA toolkit. It would add the toolkit's headers to the search path; these sources need none."""
    from torch.utils import cpp_extension  # it imports setuptools

    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or "/usr"  # torch omits its include folder
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home
