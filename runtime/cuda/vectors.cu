// bf16 and fp32 numbers, and vectors of them, for the files that include this one (`nvrtc.source`).

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ __forceinline__ void round_to(float* to, float x) { *to = x; }
__device__ __forceinline__ void round_to(unsigned short* to, float x) {  // to nearest, ties to even
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(*to) : "f"(x));
#else
    const unsigned bits = __float_as_uint(x);
    *to = x != x ? 0x7FFF : (unsigned short)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
#endif
}

template <typename T> __device__ __forceinline__ float rounded(float x) {
    T result;
    round_to(&result, x);
    return widen(result);
}

// N numbers, loaded and stored by the fewest instructions of at most 16 bytes.
template <typename T, int N> struct __align__(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T x[N]; };

template <int N, typename T> __device__ __forceinline__ Pack<T, N> load(const T* from, int first) {
    return *(const Pack<T, N>*)(from + first);
}
template <int N, typename T> __device__ __forceinline__ void store(T* to, int first, Pack<T, N> numbers) {
    *(Pack<T, N>*)(to + first) = numbers;
}

// True if `load<N>` and `store<N>` may access the pointer.
template <int N, typename T> __device__ __forceinline__ bool is_aligned(const T* pointer) {
    return (unsigned long long)pointer % alignof(Pack<T, N>) == 0;
}
