"""CUDA kernels, compiled by g++: each thread of a block is one of the system's, and blocks take turns."""

from collections.abc import Callable
from ctypes import CDLL, c_double, c_int, c_void_p
from pathlib import Path
from shutil import which
from subprocess import run
from typing import Any

import pytest
import torch

from runtime.host import device_kernels

NEEDS_A_COMPILER = pytest.mark.skipif(which("g++") is None, reason="no compiler")
HEAD = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
using std::min;
#define __device__ static
#define __global__
#define __shared__ static
static thread_local struct { int x; } threadIdx, blockIdx, blockDim, gridDim;
static std::barrier<>* all_threads;
static void __syncthreads() { all_threads->arrive_and_wait(); }
static float __fmaf_rn(float a, float b, float c) { return FUSED ? std::fma(a, b, c) : a * b + c; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static double __dadd_rn(double a, double b) { return a + b; }
static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
"""
LAUNCH = """
template <typename... Given> static void perform(void (*kernel)(Given...), int grid, int block, Given... given) {
    std::barrier<> met(block);
    all_threads = &met;
    std::vector<std::thread> threads;
    for (int t = 0; t < block; t++)
        threads.emplace_back([=] {
            threadIdx.x = t, blockDim.x = block, gridDim.x = grid;
            for (int b = 0; b < grid; b++) blockIdx.x = b, kernel(given...), __syncthreads();
        });
    for (auto& thread : threads) thread.join();
}
"""
# What a launch is given, by the kernel's name
SIGNATURES = {
    "squares": "const ELEMENT* x, int n, float* out",
    "sums": "const float* x, int n, double* out",
    "update": "WEIGHT* w, short* r, float* m, float* v, const GRADIENT* g, int n, "
    "double a, double b, double c, double d, double e, double f, double h, double i",
    "update_less": "WEIGHT* w, short* r, MOMENT* m, MOMENT* v, const GRADIENT* g, int n, int t, int k, int l, int o, "
    "double a, double b, double c, double d, double e, double f, double h, double i",
}


def in_cpp(folder: Path, file: str, name: str, fused: bool = True, **defined: str | int) -> Callable[..., None]:
    """A kernel of a file of the runtime's, to be called as CUDA's are."""
    source = Path(device_kernels.__file__).with_name(file).read_text()
    given = SIGNATURES[name]
    names = ", ".join(word.split()[-1] for word in given.split(","))
    launch = f'extern "C" void launch(int grid, int block, {given}) {{ perform(&{name}, grid, block, {names}); }}\n'
    head = "".join(f"#define {key} {value}\n" for key, value in ({"FUSED": int(fused)} | defined).items())
    (folder / f"{name}.cpp").write_text(head + HEAD + source + LAUNCH + launch)
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    run(["g++", *flags, folder / f"{name}.cpp", "-o", folder / f"{name}.so"], check=True)
    library = CDLL(folder / f"{name}.so")

    def kernel(grid: tuple[int, ...], block: tuple[int, ...], args: list[Any]) -> None:
        kinds = {torch.Tensor: lambda t: c_void_p(t.data_ptr()), int: c_int, float: c_double}
        library.launch(c_int(grid[0]), c_int(block[0]), *(kinds[type(arg)](arg) for arg in args))

    return kernel
