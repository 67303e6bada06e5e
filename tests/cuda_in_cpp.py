"""CUDA kernels compiled by g++: one system thread per CUDA thread of a block; blocks run one after another. Only C headers,
because the headers of C++ threads take longer to compile than the kernels."""

from collections.abc import Callable
from ctypes import CDLL, c_double, c_int, c_void_p
from pathlib import Path
from shutil import which
from subprocess import run
from typing import Any

import pytest
import torch

from penstock.runtime.cuda import nvrtc

NEEDS_A_COMPILER = pytest.mark.skipif(which("g++") is None, reason="no compiler")
HEAD = """
#include <math.h>
#include <pthread.h>
#include <string.h>
static int min(int a, int b) { return a < b ? a : b; }
#define __device__ static
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __global__
#define __shared__ static
static thread_local struct { int x; } threadIdx, blockIdx, blockDim, gridDim;
static pthread_barrier_t all_threads;
static void __syncthreads() { pthread_barrier_wait(&all_threads); }
static float __fmaf_rn(float a, float b, float c) { return FUSED ? fmaf(a, b, c) : a * b + c; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static double __dadd_rn(double a, double b) { return a + b; }
static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
"""
LAUNCH = """
template <typename Kernel> struct Thread {
    pthread_t id;
    int x, grid, block;
    Kernel* kernel;
    static void* of_blocks(void* given) {
        auto* of = (Thread*)given;
        threadIdx.x = of->x, blockDim.x = of->block, gridDim.x = of->grid;
        for (int b = 0; b < of->grid; b++) blockIdx.x = b, (*of->kernel)(), __syncthreads();
        return nullptr;
    }
};
template <typename Kernel> static void perform(int grid, int block, Kernel kernel) {
    pthread_barrier_init(&all_threads, nullptr, block);
    Thread<Kernel> threads[block];
    for (int t = 0; t < block; t++) {
        threads[t] = {0, t, grid, block, &kernel};
        pthread_create(&threads[t].id, nullptr, Thread<Kernel>::of_blocks, &threads[t]);
    }
    for (auto& thread : threads) pthread_join(thread.id, nullptr);
}
"""
_ROTATION = "const ELEMENT* x, const ELEMENT* c, const ELEMENT* s, ELEMENT* o, " + ", ".join(f"int i{n}" for n in range(14))
# Parameters of a launch, by the kernel's name
SIGNATURES = {
    "cross_entropy": "LOGIT* z, const long long* t, const float* e, float* l, int n, int g",
    "squares": "const ELEMENT* x, int n, float* out",
    "sums": "const float* x, int n, double* out",
    "update": "WEIGHT* w, short* r, float* m, float* v, const GRADIENT* g, int n, "
    "double a, double b, double c, double d, double e, double f, double h, double i",
    "gated": "const ELEMENT* g, const ELEMENT* u, ELEMENT* o, int n",
    "gated_gradients": "const ELEMENT* d, const ELEMENT* g, const ELEMENT* u, ELEMENT* a, ELEMENT* b, int n",
    **dict.fromkeys(("rotate", "rotate_back"), _ROTATION),
    "unpack": "const unsigned char* c, const SCALE* s, OUT* o, const float* q, int n, int r, int k, double f",
    "quantise": "const ELEMENT* x, const float* f, const int* e, unsigned char* c, float* s, int n, int k",
    "transpose": "const unsigned char* x, unsigned char* o, int m, int n, int k",
    "update_low_bit": "WEIGHT* w, REMAINDER* r, MOMENT* m, MOMENT* v, const GRADIENT* g, int n, int t, int k, int l, int o, "
    "double a, double b, double c, double d, double e, double f, double h, double i",
}


def in_cpp(folder: Path, file: str, name: str, fused: bool = True, **defined: str | int) -> Callable[..., None]:
    """Compile a kernel of a .cu file of the runtime; return it with the call signature of CUDA kernels."""
    source = nvrtc.source(file)
    parameters = SIGNATURES[name]
    names = ", ".join(word.split()[-1] for word in parameters.split(","))
    launch = f'extern "C" void launch(int grid, int block, {parameters}) {{ perform(grid, block, [=] {{ {name}({names}); }}); }}\n'
    head = "".join(f"#define {key} {value}\n" for key, value in ({"FUSED": int(fused)} | defined).items())
    (folder / f"{name}.cpp").write_text(head + HEAD + source + LAUNCH + launch)
    flags = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    run(["g++", *flags, folder / f"{name}.cpp", "-o", folder / f"{name}.so"], check=True)
    library = CDLL(folder / f"{name}.so")

    def kernel(grid: tuple[int, ...], block: tuple[int, ...], args: list[Any]) -> None:
        kinds = {torch.Tensor: lambda t: c_void_p(t.data_ptr()), int: c_int, float: c_double}
        library.launch(c_int(grid[0]), c_int(block[0]), *(kinds[type(arg)](arg) for arg in args))

    return kernel


def by_two_threads(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return the kernel with every launch reduced to two blocks of two threads."""
    return lambda grid, block, args: kernel((2,), (2,), args)
