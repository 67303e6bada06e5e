"""Compile the CUDA sources of this folder with NVRTC. Callers compare each kernel with its definition before they use it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# As kernels read them: by their bits; of moments in int8, groups
ELEMENT = {torch.bfloat16: "unsigned short", torch.float32: "float", torch.uint8: "unsigned char"}
THREADS = 256  # of a block
MOST_ELEMENTS = 2**30  # of one call: kernels count in 32 bits

VECTOR_BYTES = 16  # of the widest load and store

Kernel = Callable[[tuple[int, int, int], tuple[int, int, int], list[Any]], None]  # of a grid, a block, and arguments


def source(file: str, **defined: str | int) -> str:
    """The text of a file beside this one after these definitions, with the files that it includes."""
    head = "".join(f"#define {key} {value}\n" for key, value in defined.items())
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return head + re.sub(r'^#include "(.+)"$', lambda found: source(found[1]), text, flags=re.MULTILINE)


@lru_cache(maxsize=32)
def compiled_kernel(file: str, name: str, *, device: torch.device, **defined: str | int) -> Kernel:
    """A kernel of a file beside this one; RuntimeError, OSError or AttributeError where it cannot be made."""
    with torch.cuda.device(device), without_toolkit():
        return torch.cuda._compile_kernel(source(file, **defined), name)  # type: ignore[no-any-return]


@contextmanager
def without_toolkit() -> Iterator[None]:
    """Let torch compile without a CUDA toolkit, whose headers it would add to the search path: our sources include none."""
    from torch.utils import cpp_extension  # it imports setuptools

    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or "/usr"  # whose include folder torch leaves out
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home
