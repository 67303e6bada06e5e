// A step of AdamW or Lion on less state, in place, by the operations of lean.py: to its bits.
//
// The caller defines WEIGHT, MOMENT and GRADIENT (float, or unsigned short for the bits of bf16), IS_SPLIT (a bf16 weight has a
// remainder, by which it lacks its master), IS_DRAWN (a bf16 master is rounded stochastically) and IS_LION.

__device__ float widened(float x) { return x; }
__device__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ void put(float* to, float x, unsigned) { *to = x; }
__device__ void put(unsigned short* to, float x, unsigned random) {  // up where what is cut off and the number carry; NaN stays NaN
    *to = x != x ? 0x7FC0 : (unsigned short)((__float_as_uint(x) + random) >> 16);
}

__device__ unsigned drawn(unsigned key, unsigned turn, unsigned within) {
    unsigned x = key + turn;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x2C1B3C6Du;
    x = ((x ^ (x >> 16)) + within) & 0xFFFFu;
    x = ((x ^ (x >> 8)) * 0x88B5u) & 0xFFFFu;
    x = ((x ^ (x >> 7)) * 0xDB2Du) & 0xFFFFu;
    return x ^ (x >> 9);
}

extern "C" __global__ void update_less(
    WEIGHT* weight, short* remainder, MOMENT* m, MOMENT* v, const GRADIENT* gradients, int n_elements, int first_turn, int of_weight,
    int of_m, int of_v, double scale, double by0, double by1, double by2, double by3, double by4, double by5, double by6) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n_elements; i += gridDim.x * blockDim.x) {
        const unsigned turn = first_turn + (i >> 16), within = i & 0xFFFF;
        const float g = __fmul_rn(widened(gradients[i]), (float)scale), first = widened(m[i]), d = __fsub_rn(g, first);
        float w = widened(weight[i]), after = __fadd_rn(first, __fmul_rn((float)by1, d));
        if (IS_SPLIT) w = __uint_as_float(__float_as_uint(w) + (unsigned)(int)remainder[i]);
        w = __fmul_rn(w, (float)by0);
        if (IS_LION) {
            w = __fsub_rn(w, after > 0 ? (float)by3 : (after < 0 ? -(float)by3 : after));
            after = __fadd_rn(first, __fmul_rn((float)by2, d));
        } else {
            const float second = __fadd_rn(__fmul_rn(widened(v[i]), (float)by2), __fmul_rn(__fmul_rn((float)by3, g), g));
            const float below = __fadd_rn(__fmul_rn(__fsqrt_rn(second), (float)by4), (float)by5);
            w = __fadd_rn(w, __fdiv_rn(__fmul_rn((float)by6, after), below));
            put(&v[i], second, drawn(of_v, turn, within));
        }
        put(&m[i], after, drawn(of_m, turn, within));
        if (IS_SPLIT) remainder[i] = (short)__float_as_uint(w);
        put(&weight[i], w, IS_DRAWN ? drawn(of_weight, turn, within) : 0x8000u);
    }
}
