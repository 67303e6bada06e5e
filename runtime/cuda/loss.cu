// Cross entropy of rows of logits with gradients in place, one block per row. Reference implementation: `compute/cross_entropy.py`.
//
// The caller defines LOGIT (float, or unsigned short for the bits of bf16) and THREADS, a power of two. A row is read in vectors of 8
// logits, vector number i by thread i % THREADS. A thread has 8 lanes, each with a running maximum and the sum of exponentials relative
// to it. Lanes are added by halves, first the 8 of a thread. The order does not depend on a row's address: aligned rows use 16-byte
// accesses; unaligned rows and an incomplete last vector are read one logit at a time.

#ifndef EXP  // a test of the order defines functions with equal bits on all machines
#define EXP expf
#define LOG logf
#endif

struct alignas(16) Words { unsigned x, y, z, w; };
struct Vector { float v[8]; };

__device__ float widened(float x) { return x; }
__device__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ unsigned rounded(float x) {  // to bf16, half to even; NaN stays NaN
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
__device__ void put(float* to, float x) { *to = x; }
__device__ void put(unsigned short* to, float x) { *to = (unsigned short)rounded(x); }

__device__ Vector whole(const float* from) {
    const Words a = ((const Words*)from)[0], b = ((const Words*)from)[1];
    return {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
            __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
}
__device__ Vector whole(const unsigned short* from) {
    const Words a = *(const Words*)from;
    return {__uint_as_float(a.x << 16), __uint_as_float(a.x & 0xFFFF0000u), __uint_as_float(a.y << 16), __uint_as_float(a.y & 0xFFFF0000u),
            __uint_as_float(a.z << 16), __uint_as_float(a.z & 0xFFFF0000u), __uint_as_float(a.w << 16), __uint_as_float(a.w & 0xFFFF0000u)};
}
__device__ void put_whole(float* to, const Vector& x) {
    ((Words*)to)[0] = {__float_as_uint(x.v[0]), __float_as_uint(x.v[1]), __float_as_uint(x.v[2]), __float_as_uint(x.v[3])};
    ((Words*)to)[1] = {__float_as_uint(x.v[4]), __float_as_uint(x.v[5]), __float_as_uint(x.v[6]), __float_as_uint(x.v[7])};
}
__device__ void put_whole(unsigned short* to, const Vector& x) {
    *(Words*)to = {rounded(x.v[0]) | rounded(x.v[1]) << 16, rounded(x.v[2]) | rounded(x.v[3]) << 16,
                   rounded(x.v[4]) | rounded(x.v[5]) << 16, rounded(x.v[6]) | rounded(x.v[7]) << 16};
}

#define MINUS_INF __uint_as_float(0xFF800000u)
#define LOWEST __uint_as_float(0xFF7FFFFFu)  // initial maximum; finite, so that all differences are defined

// Vector number i of a row of n logits; minus infinity past its end.
__device__ Vector loaded(const LOGIT* row, int i, int n, bool is_aligned) {
    if (is_aligned && i * 8 + 8 <= n) return whole(row + i * 8);
    Vector x;
    #pragma unroll
    for (int k = 0; k < 8; k++) x.v[k] = i * 8 + k < n ? widened(row[i * 8 + k]) : MINUS_INF;
    return x;
}
__device__ void keep(LOGIT* row, int i, int n, bool is_aligned, const Vector& x) {
    if (is_aligned && i * 8 + 8 <= n) return put_whole(row + i * 8, x);
    #pragma unroll
    for (int k = 0; k < 8; k++)
        if (i * 8 + k < n) put(&row[i * 8 + k], x.v[k]);
}

// Loss of each row and, if `has_gradient`, its gradient times `each`, rounded. A row with a negative target is not supervised.
extern "C" __global__ void cross_entropy(
    LOGIT* logits, const long long* targets, const float* each, float* losses, int n, int has_gradient) {
    __shared__ float shared[THREADS];
    LOGIT* row = logits + (long long)blockIdx.x * n;
    const long long target = targets[blockIdx.x];
    const int t = threadIdx.x, last = (n + 7) / 8 - 1;
    const bool is_aligned = (unsigned long long)row % 16 == 0;
    if (target < 0) {
        if (t == 0) losses[blockIdx.x] = 0.0f;
        for (int i = t; has_gradient && i <= last; i += THREADS) keep(row, i, n, is_aligned, Vector{});
        return;
    }
    Vector top, sum, next;
    for (int k = 0; k < 8; k++) top.v[k] = LOWEST, sum.v[k] = 0.0f;
    if (t <= last) next = loaded(row, t, n, is_aligned);
    for (int i = t; i <= last; i += THREADS) {
        const Vector x = next;
        if (i + THREADS <= last) next = loaded(row, i + THREADS, n, is_aligned);
        #pragma unroll
        for (int k = 0; k < 8; k++) {  // one of the two factors is 1, the other is exp of a negative number
            const float e = EXP(-fabsf(__fsub_rn(x.v[k], top.v[k])));
            const bool is_new = x.v[k] > top.v[k];
            sum.v[k] = __fadd_rn(is_new ? __fmul_rn(sum.v[k], e) : sum.v[k], is_new ? 1.0f : e);
            top.v[k] = is_new ? x.v[k] : top.v[k];
        }
    }
    float maximum = top.v[0];
    for (int k = 1; k < 8; k++) maximum = fmaxf(maximum, top.v[k]);
    shared[t] = maximum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) shared[t] = fmaxf(shared[t], shared[t + half]);
    }
    __syncthreads();
    maximum = shared[0];
    __syncthreads();
    for (int k = 0; k < 8; k++) sum.v[k] = __fmul_rn(sum.v[k], EXP(__fsub_rn(top.v[k], maximum)));
    #pragma unroll
    for (int half = 4; half > 0; half /= 2)
        #pragma unroll
        for (int k = 0; k < half; k++) sum.v[k] = __fadd_rn(sum.v[k], sum.v[k + half]);
    shared[t] = sum.v[0];
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) shared[t] = __fadd_rn(shared[t], shared[t + half]);
    }
    __syncthreads();
    const float total = shared[0];
    if (t == 0) {
        const float target_logit = target < n ? widened(row[target]) : __uint_as_float(0x7FC00000u);
        losses[blockIdx.x] = __fadd_rn(__fsub_rn(maximum, target_logit), LOG(total));
    }
    if (!has_gradient) return;
    __syncthreads();  // the target's logit is overwritten below
    const float share = each[blockIdx.x], scale = __fdiv_rn(share, total);
    const int start = last - (last - t + THREADS) % THREADS;  // backwards: the row's end may still be in the cache
    if (start >= 0) next = loaded(row, start, n, is_aligned);
    for (int i = start; i >= 0; i -= THREADS) {
        Vector x = next;
        if (i >= THREADS) next = loaded(row, i - THREADS, n, is_aligned);
        #pragma unroll
        for (int k = 0; k < 8; k++) x.v[k] = __fmul_rn(EXP(__fsub_rn(x.v[k], maximum)), scale);
        if (target / 8 == i)
            #pragma unroll
            for (int k = 0; k < 8; k++) x.v[k] = target % 8 == k ? __fsub_rn(x.v[k], share) : x.v[k];
        keep(row, i, n, is_aligned, x);
    }
}
