// Sums of squares of a flat gradient in the order of `chunks.squares`, bitwise identical to it.
//
// The caller defines ELEMENT (float, or unsigned short for the bits of bf16), CHUNK (a power of two) and THREADS (CHUNK is
// THREADS squared). A chunk is a matrix of THREADS by THREADS, row after row; its second half of rows is added to the first,
// and so on; then that of columns.

__device__ float square(float x) { return __fmul_rn(x, x); }
__device__ float square(unsigned short bits) { return square(__uint_as_float((unsigned)bits << 16)); }

template <int N> __device__ float halved(float* x) {
    #pragma unroll
    for (int half = N / 2; half > 0; half /= 2)
        #pragma unroll
        for (int i = 0; i < half; i++) x[i] = __fadd_rn(x[i], x[i + half]);
    return x[0];
}

// Sum of squares of each chunk by one block: a thread adds a column, then the block adds the columns.
extern "C" __global__ void squares(const ELEMENT* x, int n_elements, float* chunk_sums) {
    const int n_groups = THREADS / 16;
    int start = blockIdx.x * CHUNK, n = min(n_elements - start, CHUNK);
    float group_sums[n_groups], group[16];
    #pragma unroll
    for (int row = 0; row < n_groups; row++) {
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            int offset = (row + n_groups * i) * THREADS + threadIdx.x;
            group[i] = offset < n ? square(x[start + offset]) : 0.0f;
        }
        group_sums[row] = halved<16>(group);
    }
    __shared__ float columns[THREADS];
    columns[threadIdx.x] = halved<n_groups>(group_sums);
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) columns[threadIdx.x] = __fadd_rn(columns[threadIdx.x], columns[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) chunk_sums[blockIdx.x] = columns[0];
}

// Sum of each gradient by one thread: its chunks, a row of `chunk_sums`, in order.
extern "C" __global__ void sums(const float* chunk_sums, int n_chunks, double* out) {
    double total = 0.0;
    #pragma unroll 16
    for (int i = 0; i < n_chunks; i++) total = __dadd_rn(total, (double)chunk_sums[(long long)blockIdx.x * n_chunks + i]);
    out[blockIdx.x] = total;
}
