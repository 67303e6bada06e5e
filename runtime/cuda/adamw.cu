// AdamW step on a flat parameter, in place; bitwise identical to torch's fused CPU kernel.
//
// The caller defines WEIGHT and GRADIENT (float, or unsigned short for the bits of bf16) and IS_SPLIT (a bf16 weight has a remainder:
// `param_state.Master`). A thread updates four elements, by accesses of 8 and 16 bytes. Last elements that fill no vector are updated
// one at a time, and so are all elements if a pointer is not aligned.
#include "vectors.cu"

#define WIDTH 4

__device__ void put(float* weight, float master) { *weight = master; }
__device__ void put(unsigned short* weight, float master) {  // half up; NaN remains NaN
    *weight = master != master ? 0x7FC0 : (unsigned short)((__float_as_uint(master) + 0x8000u) >> 16);
}

struct Factors { float scale, decay, lerp_weight, beta2, one_minus_beta2, correction, eps, rate; };

template <int N> __device__ __forceinline__ void update_at(
    WEIGHT* weights, short* remainders, float* exp_avg, float* exp_avg_sq, const GRADIENT* gradients, int begin, const Factors& f) {
    Pack<WEIGHT, N> weight = load<N>(weights, begin);
    Pack<short, N> remainder;
    if (IS_SPLIT) remainder = load<N>(remainders, begin);
    Pack<float, N> firsts = load<N>(exp_avg, begin), seconds = load<N>(exp_avg_sq, begin);
    const Pack<GRADIENT, N> grads = load<N>(gradients, begin);
    const bool is_near = fabsf(f.lerp_weight) < 0.5f;  // torch's `lerp` starts at the nearer end
    const float nearer_weight = is_near ? f.lerp_weight : __fsub_rn(f.lerp_weight, 1.0f);
    #pragma unroll
    for (int j = 0; j < N; j++) {
        float gradient = __fmul_rn(widen(grads.x[j]), f.scale), master = widen(weight.x[j]), first = firsts.x[j];
        if (IS_SPLIT) master = __uint_as_float(__float_as_uint(master) + (unsigned)(int)remainder.x[j]);
        first = __fmaf_rn(nearer_weight, __fsub_rn(gradient, first), is_near ? first : gradient);
        float second = __fmaf_rn(__fmul_rn(f.one_minus_beta2, gradient), gradient, __fmul_rn(seconds.x[j], f.beta2));
        float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), f.correction), f.eps);
        master = __fadd_rn(__fmul_rn(master, f.decay), __fdiv_rn(__fmul_rn(f.rate, first), denominator));
        firsts.x[j] = first;
        seconds.x[j] = second;
        if (IS_SPLIT) remainder.x[j] = (short)__float_as_uint(master);
        put(&weight.x[j], master);
    }
    store<N>(weights, begin, weight);
    if (IS_SPLIT) store<N>(remainders, begin, remainder);
    store<N>(exp_avg, begin, firsts);
    store<N>(exp_avg_sq, begin, seconds);
}

extern "C" __global__ void update(
    WEIGHT* weight, short* remainder, float* exp_avg, float* exp_avg_sq, const GRADIENT* gradients, int n_elements, double scale,
    double decay, double lerp_weight, double beta2, double one_minus_beta2, double correction, double eps, double rate) {
    const Factors f = {(float)scale, (float)decay, (float)lerp_weight, (float)beta2, (float)one_minus_beta2, (float)correction,
                       (float)eps, (float)rate};
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, n_threads = gridDim.x * blockDim.x;
    const bool weights_aligned = is_aligned<WIDTH>(weight) && (!IS_SPLIT || is_aligned<WIDTH>(remainder));
    const bool aligned = weights_aligned && is_aligned<WIDTH>(exp_avg) && is_aligned<WIDTH>(exp_avg_sq) && is_aligned<WIDTH>(gradients);
    const int n_vectors = aligned ? n_elements / WIDTH : 0;
    for (int i = thread; i < n_vectors; i += n_threads)
        update_at<WIDTH>(weight, remainder, exp_avg, exp_avg_sq, gradients, i * WIDTH, f);
    #pragma unroll 1
    for (int i = n_vectors * WIDTH + thread; i < n_elements; i += n_threads)
        update_at<1>(weight, remainder, exp_avg, exp_avg_sq, gradients, i, f);
}
