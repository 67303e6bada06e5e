// SwiGLU, GeGLU and rotary embedding, forward and backward. Results are bitwise identical to torch's CUDA kernels called one by one:
// activations use torch's formulas, so that both compilers fuse equal multiply-adds, and intermediate results are rounded where torch
// writes a tensor.
//
// The caller defines ELEMENT (float, or unsigned short for the bits of bf16), and for the kernels of an activation ACTIVATION (0:
// SiLU; 1: GELU by tanh; 2: GELU by erf); without it the file has the kernels of the rotary embedding. A thread loads and stores 16
// bytes at a time. Last elements that fill no vector are computed one at a time, and so are all elements if a pointer or a stride
// is not a multiple of 16 bytes.
#include "vectors.cu"

#define WIDTH (16 / (int)sizeof(ELEMENT))
#define THREAD ((int)(blockIdx.x * blockDim.x + threadIdx.x))
#define N_THREADS ((int)(gridDim.x * blockDim.x))

#ifdef ACTIVATION
__device__ __forceinline__ float activation(float x) {
    if (ACTIVATION == 0) return x / (1.0f + expf(-x));
    if (ACTIVATION == 1) {
        const float cube = x * x * x, inner = 0.7978845608028654f * (x + 0.044715f * cube);
        return 0.5f * x * (1.0f + tanhf(inner));
    }
    return x * 0.5f * (1.0f + erff(x * 0.7071067811865476f));
}

__device__ __forceinline__ float activation_gradient(float dy, float x) {
    if (ACTIVATION == 0) {
        const float sigmoid = 1.0f / (1.0f + expf(-x));
        return dy * sigmoid * (1.0f + x * (1.0f - sigmoid));
    }
    if (ACTIVATION == 1) {
        const float square = x * x, cube = square * x;
        const float inner = 0.7978845608028654f * (x + 0.044715f * cube), tanh_inner = tanhf(inner);
        const float left = 0.5f * x, right = 1.0f + tanh_inner, d_left = 0.5f * right;
        const float d_tanh = 1.0f - tanh_inner * tanh_inner;
        const float d_inner = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * square);
        const float d_right = left * d_tanh * d_inner;
        return dy * (d_left + d_right);
    }
    const float cdf = 0.5f * (1.0f + erff(x * 0.7071067811865476f));
    const float pdf = expf(-0.5f * x * x) * 0.3989422804014327f;
    return dy * (cdf + x * pdf);
}

template <int N> __device__ __forceinline__ void gate_at(const ELEMENT* gates, const ELEMENT* ups, ELEMENT* out, int first) {
    const Pack<ELEMENT, N> gate = load<N>(gates, first), up = load<N>(ups, first);
    Pack<ELEMENT, N> result;
    #pragma unroll
    for (int j = 0; j < N; j++)
        round_to(&result.x[j], __fmul_rn(rounded<ELEMENT>(activation(widen(gate.x[j]))), widen(up.x[j])));
    store<N>(out, first, result);
}

extern "C" __global__ void gated(const ELEMENT* gates, const ELEMENT* ups, ELEMENT* out, int n) {
    const bool aligned = is_aligned<WIDTH>(gates) && is_aligned<WIDTH>(ups) && is_aligned<WIDTH>(out);
    const int n_vectors = aligned ? n / WIDTH : 0;
    for (int i = THREAD; i < n_vectors; i += N_THREADS) gate_at<WIDTH>(gates, ups, out, i * WIDTH);
    #pragma unroll 1
    for (int i = n_vectors * WIDTH + THREAD; i < n; i += N_THREADS) gate_at<1>(gates, ups, out, i);
}

template <int N> __device__ __forceinline__ void gate_gradients_at(
    const ELEMENT* gradients, const ELEMENT* gates, const ELEMENT* ups, ELEMENT* to_gates, ELEMENT* to_ups, int first) {
    const Pack<ELEMENT, N> gradient = load<N>(gradients, first), gate = load<N>(gates, first), up = load<N>(ups, first);
    Pack<ELEMENT, N> to_gate, to_up;
    #pragma unroll
    for (int j = 0; j < N; j++) {
        const float dy = widen(gradient.x[j]), x = widen(gate.x[j]);
        round_to(&to_up.x[j], __fmul_rn(dy, rounded<ELEMENT>(activation(x))));
        round_to(&to_gate.x[j], activation_gradient(rounded<ELEMENT>(__fmul_rn(dy, widen(up.x[j]))), x));
    }
    store<N>(to_gates, first, to_gate);
    store<N>(to_ups, first, to_up);
}

extern "C" __global__ void gated_gradients(
    const ELEMENT* gradients, const ELEMENT* gates, const ELEMENT* ups, ELEMENT* to_gates, ELEMENT* to_ups, int n) {
    const bool inputs_aligned = is_aligned<WIDTH>(gradients) && is_aligned<WIDTH>(gates) && is_aligned<WIDTH>(ups);
    const int n_vectors = inputs_aligned && is_aligned<WIDTH>(to_gates) && is_aligned<WIDTH>(to_ups) ? n / WIDTH : 0;
    for (int i = THREAD; i < n_vectors; i += N_THREADS)
        gate_gradients_at<WIDTH>(gradients, gates, ups, to_gates, to_ups, i * WIDTH);
    #pragma unroll 1
    for (int i = n_vectors * WIDTH + THREAD; i < n; i += N_THREADS) gate_gradients_at<1>(gradients, gates, ups, to_gates, to_ups, i);
}

#else
// Rotate N elements of a head's first half with the N elements of its second half.
template <int N, bool IS_BACKWARD> __device__ __forceinline__ void rotate_at(
    const ELEMENT* x, const ELEMENT* cosines, const ELEMENT* sines, ELEMENT* out, int half) {
    const Pack<ELEMENT, N> x0 = load<N>(x, 0), cos0 = load<N>(cosines, 0), sin0 = load<N>(sines, 0);
    const Pack<ELEMENT, N> x1 = load<N>(x, half), cos1 = load<N>(cosines, half), sin1 = load<N>(sines, half);
    Pack<ELEMENT, N> out0, out1;
    #pragma unroll
    for (int j = 0; j < N; j++) {
        const float a = widen(x0.x[j]), b = widen(x1.x[j]);
        const float cos_a = rounded<ELEMENT>(__fmul_rn(a, widen(cos0.x[j])));
        const float cos_b = rounded<ELEMENT>(__fmul_rn(b, widen(cos1.x[j])));
        if (IS_BACKWARD) {  // autograd adds the gradient of each half to zeros: -0.0 becomes +0.0
            const float sin_a = rounded<ELEMENT>(__fmul_rn(a, widen(sin0.x[j])));
            const float sin_b = rounded<ELEMENT>(__fmul_rn(b, widen(sin1.x[j])));
            round_to(&out0.x[j], __fadd_rn(rounded<ELEMENT>(__fadd_rn(cos_a, sin_b)), 0.0f));
            round_to(&out1.x[j], __fadd_rn(rounded<ELEMENT>(__fadd_rn(cos_b, -sin_a)), 0.0f));
        } else {
            round_to(&out0.x[j], __fadd_rn(cos_a, rounded<ELEMENT>(__fmul_rn(-b, widen(sin0.x[j])))));
            round_to(&out1.x[j], __fadd_rn(cos_b, rounded<ELEMENT>(__fmul_rn(a, widen(sin1.x[j])))));
        }
    }
    store<N>(out, 0, out0);
    store<N>(out, half, out1);
}

// `n_pairs`: elements of x, divided by two. Strides of sequences, heads and tokens are in elements; a head's elements are contiguous.
// Neighbouring threads have neighbouring heads, which share cosines and sines.
template <bool IS_BACKWARD> __device__ __forceinline__ void rotate_all(
    const ELEMENT* x, const ELEMENT* cosines, const ELEMENT* sines, ELEMENT* out, int n_pairs, int n_heads, int n_tokens, int half,
    int x_sequence, int x_head, int x_token, int cos_sequence, int cos_token, int sin_sequence, int sin_token, int out_sequence,
    int out_head, int out_token) {
    const int strides = x_sequence | x_head | x_token | cos_sequence | cos_token | sin_sequence | sin_token | out_sequence | out_head;
    const bool aligned = is_aligned<WIDTH>(x) && is_aligned<WIDTH>(cosines) && is_aligned<WIDTH>(sines) && is_aligned<WIDTH>(out);
    const int width = aligned && (strides | out_token | half) % WIDTH == 0 ? WIDTH : 1;
    const unsigned n = n_pairs / width, per_head = half / width;
    for (unsigned i = THREAD; i < n; i += N_THREADS) {
        unsigned rest = i / per_head;
        const int within = (int)(i % per_head) * width, head = rest % n_heads;
        rest /= n_heads;
        const int token = rest % n_tokens, sequence = rest / n_tokens;
        const ELEMENT* from = x + sequence * x_sequence + head * x_head + token * x_token + within;
        const ELEMENT* cosine = cosines + sequence * cos_sequence + token * cos_token + within;
        const ELEMENT* sine = sines + sequence * sin_sequence + token * sin_token + within;
        ELEMENT* to = out + sequence * out_sequence + head * out_head + token * out_token + within;
        if (width == WIDTH) rotate_at<WIDTH, IS_BACKWARD>(from, cosine, sine, to, half);
        else rotate_at<1, IS_BACKWARD>(from, cosine, sine, to, half);
    }
}

#define ROTATION(NAME, IS_BACKWARD)                                                                                                   \
    extern "C" __global__ void NAME(                                                                                                  \
        const ELEMENT* x, const ELEMENT* cosines, const ELEMENT* sines, ELEMENT* out, int n_pairs, int n_heads, int n_tokens,         \
        int half, int x_sequence, int x_head, int x_token, int cos_sequence, int cos_token, int sin_sequence, int sin_token,          \
        int out_sequence, int out_head, int out_token) {                                                                              \
        rotate_all<IS_BACKWARD>(x, cosines, sines, out, n_pairs, n_heads, n_tokens, half, x_sequence, x_head, x_token, cos_sequence,  \
            cos_token, sin_sequence, sin_token, out_sequence, out_head, out_token);                                                   \
    }
ROTATION(rotate, false)
ROTATION(rotate_back, true)
#endif
