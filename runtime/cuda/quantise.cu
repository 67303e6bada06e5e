// Quantise rows to E4M3 with a power of two as scale, as `quantise_by_calls` of `runtime/scaled_products.py`; and transpose bytes.
//
// The caller defines ELEMENT (float, or unsigned short for the bits of bf16) and FACTORS (1: multiply column j by factors[j] first; 2:
// by factors[experts[row]][j]).
// A block of threads quantises a row at a time: it finds the largest magnitude, then reads the row again, from a cache.
#include "vectors.cu"

#define MOST_THREADS 256
#define TILE 32
#define SMALLEST_SCALE 1  // exponent bits of 2^-126

// x is at most 448, or not a number.
__device__ __forceinline__ unsigned char e4m3(float x) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7FFFFFFFu, sign = bits >> 24 & 0x80u;
    if (size > 0x7F800000u) return (unsigned char)(sign | 0x7Fu);
    if (size >= 0x3C800000u) return (unsigned char)(sign | ((size + 0x7FFFFu + (size >> 20 & 1)) >> 20) - 960u);  // 2^-6: normal
    return (unsigned char)(sign | __float_as_uint(__fadd_rn(__uint_as_float(size), 16384.0f)) - 0x46800000u);  // in units of 2^-9
}

__device__ __forceinline__ float factored(ELEMENT x, const float* factors, int j) {
    return FACTORS ? __fmul_rn(widen(x), factors[j]) : widen(x);
}

extern "C" __global__ void quantise(
    const ELEMENT* x, const float* all_factors, const int* experts, unsigned char* codes, float* scales, int n_rows,
    int n_columns) {
    __shared__ unsigned largest[MOST_THREADS];
    const bool aligned = n_columns % 8 == 0 && is_aligned<8>(x) && is_aligned<8>(codes);
    for (int row = blockIdx.x; row < n_rows; row += gridDim.x) {
        const ELEMENT* from = x + (long long)row * n_columns;
        unsigned char* to = codes + (long long)row * n_columns;
        const float* factors = all_factors + (FACTORS == 2 ? (long long)experts[row] * n_columns : 0);
        unsigned most = 0;  // bits of magnitudes are in their order, and those of NaN are the largest
        for (int j = threadIdx.x * 8; j < n_columns; j += blockDim.x * 8) {
            Pack<ELEMENT, 8> part;
            if (aligned) part = load<8>(from, j);
            for (int i = 0; i < 8 && j + i < n_columns; i++) {
                const unsigned size = __float_as_uint(factored(aligned ? part.x[i] : from[j + i], factors, j + i)) & 0x7FFFFFFFu;
                most = size > most ? size : most;
            }
        }
        largest[threadIdx.x] = most;
        __syncthreads();
        for (int n = blockDim.x / 2; n > 0; n /= 2) {
            if (threadIdx.x < n && largest[threadIdx.x + n] > largest[threadIdx.x]) largest[threadIdx.x] = largest[threadIdx.x + n];
            __syncthreads();
        }
        most = largest[0];
        __syncthreads();
        // Smallest power of two with a quotient of at most 448 = 0x43E00000
        int exponent = (int)((most + 0x1FFFFFu) >> 23) - 8;
        exponent = exponent < SMALLEST_SCALE ? SMALLEST_SCALE : exponent;
        const bool finite = most < 0x7F800000u;
        const float inverse = finite ? __uint_as_float((unsigned)(254 - exponent) << 23) : __uint_as_float(0x7FC00000u);
        if (threadIdx.x == 0) scales[row] = finite ? __uint_as_float((unsigned)exponent << 23) : __uint_as_float(0x7FC00000u);
        for (int j = threadIdx.x * 8; j < n_columns; j += blockDim.x * 8) {
            Pack<ELEMENT, 8> part;
            if (aligned) part = load<8>(from, j);
            Pack<unsigned char, 8> result;
            for (int i = 0; i < 8 && j + i < n_columns; i++) {
                result.x[i] = e4m3(__fmul_rn(factored(aligned ? part.x[i] : from[j + i], factors, j + i), inverse));
                if (!aligned) to[j + i] = result.x[i];
            }
            if (aligned) store<8>(to, j, result);
        }
    }
}

// Transpose matrices (n_rows, n_columns), multiples of 16, by tiles. Threads of a block are a multiple of TILE, or fewer.
extern "C" __global__ void transpose(const unsigned char* x, unsigned char* out, int n_matrices, int n_rows, int n_columns) {
    __shared__ unsigned char tile[TILE][TILE + 4];
    const int across = (n_columns + TILE - 1) / TILE, n_tiles = across * ((n_rows + TILE - 1) / TILE);
    for (int t = blockIdx.x; t < n_tiles * n_matrices; t += gridDim.x) {
        const int row = t % n_tiles / across * TILE, column = t % n_tiles % across * TILE;
        const long long start = (long long)(t / n_tiles) * n_rows * n_columns;
        for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) {
            const int r = row + i / TILE, c = column + i % TILE;
            if (r < n_rows && c < n_columns) tile[i / TILE][i % TILE] = x[start + (long long)r * n_columns + c];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) {
            const int c = column + i / TILE, r = row + i % TILE;
            if (r < n_rows && c < n_columns) out[start + (long long)c * n_rows + r] = tile[i % TILE][i / TILE];
        }
        __syncthreads();
    }
}
