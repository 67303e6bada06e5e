// A step of AdamW on a flat parameter, in place, by the operations of torch's fused kernel on a processor: to its bits.
//
// The caller defines WEIGHT and GRADIENT (float, or unsigned short for the bits of bf16) and IS_SPLIT: whether a bf16 weight has a
// remainder, by which it lacks its master (`optimizer.Master`).

__device__ float widened(float x) { return x; }
__device__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ void put(float* weight, float master) { *weight = master; }
__device__ void put(unsigned short* weight, float master) {  // half up; NaN stays NaN
    *weight = master != master ? 0x7FC0 : (unsigned short)((__float_as_uint(master) + 0x8000u) >> 16);
}

extern "C" __global__ void update(
    WEIGHT* weight, short* remainder, float* exp_avg, float* exp_avg_sq, const GRADIENT* gradients, int n_elements, double scale,
    double decay, double towards_, double beta2, double of_square, double correction, double eps, double rate) {
    const float towards = towards_;
    const bool is_near = fabsf(towards) < 0.5f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n_elements; i += gridDim.x * blockDim.x) {
        float gradient = __fmul_rn(widened(gradients[i]), (float)scale), master = widened(weight[i]), first = exp_avg[i];
        if (IS_SPLIT) master = __uint_as_float(__float_as_uint(master) + (unsigned)(int)remainder[i]);
        first = __fmaf_rn(is_near ? towards : __fsub_rn(towards, 1.0f), __fsub_rn(gradient, first), is_near ? first : gradient);
        float second = __fmaf_rn(__fmul_rn((float)of_square, gradient), gradient, __fmul_rn(exp_avg_sq[i], (float)beta2));
        float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), (float)correction), (float)eps);
        master = __fadd_rn(__fmul_rn(master, (float)decay), __fdiv_rn(__fmul_rn((float)rate, first), denominator));
        exp_avg[i] = first;
        exp_avg_sq[i] = second;
        if (IS_SPLIT) remainder[i] = (short)__float_as_uint(master);
        put(&weight[i], master);
    }
}
