// AdamW or Lion step on low-bit optimizer state, in place, by the operations of docs/optimizers.md; bitwise identical to the host.
//
// The caller defines WEIGHT, MOMENT and GRADIENT (float, or unsigned short for the bits of bf16; MOMENT also unsigned char, for int8
// groups), IS_SPLIT (a bf16 weight has a remainder) and its type REMAINDER (short, or signed char for a 24-bit master), IS_STOCHASTIC
// (a bf16 or 24-bit master is rounded stochastically) and IS_LION (IS_ADAMW is unused). A thread updates one element or one group at a time.

__device__ float widened(float x) { return x; }
__device__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ void put(float* to, float x, unsigned) { *to = x; }
__device__ void put(unsigned short* to, float x, unsigned random) {  // add and truncate; NaN remains NaN
    *to = x != x ? 0x7FC0 : (unsigned short)((__float_as_uint(x) + random) >> 16);
}

__device__ unsigned random16(unsigned key, unsigned turn, unsigned within) {
    unsigned x = key + turn;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x2C1B3C6Du;
    x = ((x ^ (x >> 16)) + within) & 0xFFFFu;
    x = ((x ^ (x >> 8)) * 0x88B5u) & 0xFFFFu;
    x = ((x ^ (x >> 7)) * 0xDB2Du) & 0xFFFFu;
    return x ^ (x >> 9);
}

#define LACKS (IS_SPLIT && sizeof(REMAINDER) == 1 ? 8 : 0)  // low bits of fp32 that a 24-bit master drops
#define GROUP (sizeof(MOMENT) == 1 ? 32 : 1)

template <typename T> __device__ float loaded(const T* values, int i, bool) { return widened(values[i]); }
__device__ float loaded(const unsigned char* groups, int i, bool is_root) {
    const unsigned char *pack = groups + i / 128 * 136, byte = pack[i % 128], *scales = pack + 128 + i % 128 / 32 * 2;
    const float scale = __uint_as_float((unsigned)scales[0] << 16 | (unsigned)scales[1] << 24);
    const float code = is_root ? (float)byte : (float)(signed char)byte, product = __fmul_rn(scale, code);
    return is_root ? __fmul_rn(product, product) : __fdiv_rn(product, __fsub_rn(254.0f, fabsf(code)));
}

template <typename T> __device__ void keep(T* to, int first, int, float* x, bool, unsigned random) { put(&to[first], *x, random); }
__device__ void keep(unsigned char* groups, int first, int n, float* x, bool is_root, unsigned random) {
    unsigned char *pack = groups + first / 128 * 136, *codes = pack + first % 128, *scales = pack + 128 + first % 128 / 32 * 2;
    unsigned max_bits = 0x22800000u;  // bounds of rounding.py
    for (int j = 0; j < n; j++) {
        if (is_root) x[j] = __fsqrt_rn(x[j]);
        const unsigned bits = __float_as_uint(x[j]) & 0x7FFFFFFFu;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    const float largest = __uint_as_float(max_bits > 0x7F800000u ? 0x7F800000u : max_bits), inverse = __fdiv_rn(255.0f, largest);
    unsigned scale = (__float_as_uint(is_root ? __fdiv_rn(largest, 255.0f) : largest) + random) >> 16;
    const bool is_regular = scale > 0x2280u && scale <= 0x7B80u;
    if (!is_regular) scale = scale > 0x2280u ? 0x7F80u : 0;
    for (int j = 0; j < 32; j++) {
        const float y = j < n && is_regular ? x[j] : 0.0f;
        const float code = is_root ? __fmul_rn(inverse, y) : __fdiv_rn(__fmul_rn(254.0f, y), __fadd_rn(largest, fabsf(y)));
        codes[j] = (unsigned char)__float_as_uint(__fadd_rn(code, 12582912.0f));
    }
    scales[0] = (unsigned char)scale, scales[1] = (unsigned char)(scale >> 8);
}

extern "C" __global__ void update_low_bit(
    WEIGHT* weight, REMAINDER* remainder, MOMENT* m, MOMENT* v, const GRADIENT* gradients, int n_elements, int first_turn,
    int weight_key, int m_key, int v_key, double scale, double s0, double s1, double s2, double s3, double s4, double s5, double s6) {
    float new_m[GROUP], new_v[GROUP];  // s0 .. s6: `chunks.scalars_of`
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < (n_elements + GROUP - 1) / GROUP; k += gridDim.x * blockDim.x) {
        const int begin = k * GROUP, n = n_elements - begin < GROUP ? n_elements - begin : GROUP;
        const unsigned turn = first_turn + (begin >> 16);
        for (int j = 0; j < n; j++) {
            const int i = begin + j;
            const float g = __fmul_rn(widened(gradients[i]), (float)scale), first = loaded(m, i, false), d = __fsub_rn(g, first);
            float w = widened(weight[i]);
            new_m[j] = __fadd_rn(first, __fmul_rn((float)s1, d));
            if (IS_SPLIT) w = __uint_as_float(__float_as_uint(w) + ((unsigned)(int)remainder[i] << LACKS));
            w = __fmul_rn(w, (float)s0);
            if (IS_LION) {
                w = __fsub_rn(w, new_m[j] > 0 ? (float)s3 : (new_m[j] < 0 ? -(float)s3 : new_m[j]));
                new_m[j] = __fadd_rn(first, __fmul_rn((float)s2, d));
            } else {
                new_v[j] = __fadd_rn(__fmul_rn(loaded(v, i, true), (float)s2), __fmul_rn(__fmul_rn((float)s3, g), g));
                const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(new_v[j]), (float)s4), (float)s5);
                w = __fadd_rn(w, __fdiv_rn(__fmul_rn((float)s6, new_m[j]), denominator));
            }
            const unsigned random = IS_STOCHASTIC ? random16(weight_key, turn, i & 0xFFFF) : 0x8000u;
            if (LACKS) w = __uint_as_float(w != w ? 0x7FC00000u : (__float_as_uint(w) + (random >> 8)) & 0xFFFFFF00u);
            if (IS_SPLIT) remainder[i] = (REMAINDER)(__float_as_uint(w) >> LACKS);
            put(&weight[i], w, IS_SPLIT ? 0x8000u : random);
        }
        keep(m, begin, n, new_m, false, random16(m_key, turn, begin & 0xFFFF));
        if (!IS_LION) keep(v, begin, n, new_v, true, random16(v_key, turn, begin & 0xFFFF));
    }
}
