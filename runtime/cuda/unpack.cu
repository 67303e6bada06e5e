// Unpack a weight in one pass, with the operations of `runtime/layers/packed_weights.py`: a product, or two, each rounded once.
//
// The caller defines OUT (float, or unsigned short for the bits of bf16) and BASE (0: nf4; 1: int8; 2: fp8; 3: mxfp4). The weight is a
// stack of matrices of n_rows by n_columns; nf4 is one matrix with a row for each block of 64. A thread unpacks 8 numbers: it loads 4 or
// 8 bytes of codes, and stores 16 bytes at a time. If n_columns is not a multiple of 8 or a pointer is not aligned, it unpacks one.
#include "vectors.cu"

#define NF4 0
#define INT8 1
#define FP8 2
#define MXFP4 3
#define PER_BYTE (BASE == NF4 || BASE == MXFP4 ? 2 : 1)
#define FP8_BLOCK 128
#define MXFP4_BLOCK 32
#if BASE == MXFP4
#define SCALE unsigned char
#else
#define SCALE float
#endif

// Exact: the bits of a small float, shifted, are an fp32 number with another exponent bias, which the factor corrects.
__device__ __forceinline__ float e4m3(unsigned code) {
    const float size = __fmul_rn(__uint_as_float((code & 0x7F) << 20), 0x1p120f);
    const float number = (code & 0x7F) == 0x7F ? __uint_as_float(0x7FC00000u) : size;
    return code & 0x80 ? -number : number;
}
__device__ __forceinline__ float e2m1(unsigned code) {
    const float size = __fmul_rn(__uint_as_float((code & 7) << 22), 0x1p126f);
    return code & 8 ? -size : size;
}
__device__ __forceinline__ float e8m0(unsigned code) { return __uint_as_float(code ? code << 23 : 0x00400000u); }

template <int N> __device__ __forceinline__ void unpack_at(
    const unsigned char* codes, const SCALE* scales, OUT* out, const float* table, int first, int n_rows, int n_columns, float step) {
    const int n_bytes = N / PER_BYTE > 0 ? N / PER_BYTE : 1;
    const Pack<unsigned char, n_bytes> code = load<n_bytes>(codes, first / PER_BYTE);
    const unsigned row = (unsigned)first / n_columns, column = first - row * n_columns;
    Pack<SCALE, BASE == MXFP4 ? N : 1> scale;
    if (BASE == NF4 || BASE == INT8) {
        scale.x[0] = scales[row];
    } else if (BASE == FP8) {
        const unsigned high = (n_rows + FP8_BLOCK - 1) / FP8_BLOCK, wide = (n_columns + FP8_BLOCK - 1) / FP8_BLOCK;
        scale.x[0] = scales[(row / n_rows * high + row % n_rows / FP8_BLOCK) * wide + column / FP8_BLOCK];
    } else {
        scale = load<BASE == MXFP4 ? N : 1>(scales, row / MXFP4_BLOCK * n_columns + column);
    }
    Pack<OUT, N> result;
    #pragma unroll
    for (int j = 0; j < N; j++) {
        const unsigned place = N == 1 ? first % PER_BYTE : j % PER_BYTE;
        const unsigned bits = PER_BYTE == 1 ? code.x[j] : code.x[j / 2] >> 4 * (BASE == NF4 ? 1 - place : place) & 15;
        float number;
        if (BASE == NF4) number = __fmul_rn(table[bits], (float)scale.x[0]);
        if (BASE == INT8) number = __fmul_rn(__fmul_rn((float)(signed char)bits, (float)scale.x[0]), step);
        if (BASE == FP8) number = __fmul_rn(e4m3(bits), (float)scale.x[0]);
        if (BASE == MXFP4) number = __fmul_rn(e2m1(bits), e8m0((unsigned)scale.x[BASE == MXFP4 ? j : 0]));
        round_to(&result.x[j], number);
    }
    store<N>(out, first, result);
}

// `quantiles`: 16 numbers, read by nf4 only. `step`: the factor of int8.
extern "C" __global__ void unpack(
    const unsigned char* codes, const SCALE* scales, OUT* out, const float* quantiles, int n, int n_rows, int n_columns, double step) {
    __shared__ float table[16];
    if (BASE == NF4) {
        for (int i = threadIdx.x; i < 16; i += blockDim.x) table[i] = quantiles[i];
        __syncthreads();
    }
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, n_threads = gridDim.x * blockDim.x;
    const bool aligned = is_aligned<8 / PER_BYTE>(codes) && is_aligned<8>(out) && (BASE != MXFP4 || is_aligned<8>(scales));
    const int n_vectors = aligned && n_columns % 8 == 0 ? n / 8 : 0;
    for (int i = thread; i < n_vectors; i += n_threads) unpack_at<8>(codes, scales, out, table, i * 8, n_rows, n_columns, (float)step);
    #pragma unroll 1
    for (int i = n_vectors * 8 + thread; i < n; i += n_threads)
        unpack_at<1>(codes, scales, out, table, i, n_rows, n_columns, (float)step);
}
