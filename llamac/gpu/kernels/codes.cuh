// SPDX-License-Identifier: MIT
// codes.cuh - scales and codes of the inputs of quantized products, as kernels_quant.h computes them.
#ifndef LLAMAC_CODES_CUH
#define LLAMAC_CODES_CUH
#include "lane.cuh"

enum { INT8_LIMIT = 127, INT16_LIMIT = 16319 };   // the largest codes: kernels.h

INLINE int is_finite(float x) { return (f32_bits(x) & 0x7f800000) != 0x7f800000; }

// As input_scale of kernels_quant.h, for numbers whose largest magnitude (NaN left out) is `max`. is_bad: whether one
// of them is NaN or infinite.
struct InputScale { float scale, inverse; };
INLINE InputScale input_scale(float max, int is_bad, float limit) {
    const float inverse = max >= 0x1p-100f && !is_bad ? __fdiv_rn(limit, max) : 0.0f;
    return { is_bad ? f32_from_bits(0x7fc00000) : inverse > 0 ? __fdiv_rn(max, limit) : 0.0f, inverse };
}

// The maximum of x in each group of `lanes` lanes of a warp.
template <int lanes> static __device__ __forceinline__ float group_max(float x) {
#pragma unroll
    for (int bits = lanes / 2; bits > 0; bits /= 2) x = v16_max(x, __shfl_xor_sync(FULL_WARP, x, bits));
    return x;
}

// The scale of the numbers of each group of `lanes` lanes, four in a lane, and the numbers times its inverse.
struct Scaled { float x[4], scale; };
template <int lanes> static __device__ __forceinline__ Scaled scaled(const float (&x)[4], float limit) {
    float top = 0;
    int is_bad = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        top = v16_max(v16_abs(x[i]), top);
        is_bad |= !is_finite(x[i]);
    }
    const unsigned first = lanes == WARP_LANES ? FULL_WARP : (1u << lanes % WARP_LANES) - 1;
    const unsigned group = lanes == WARP_LANES ? first : first << threadIdx.x % WARP_LANES / lanes * lanes;
    const InputScale s = input_scale(group_max<lanes>(top), (__ballot_sync(FULL_WARP, is_bad) & group) != 0, limit);
    Scaled to = { {}, s.scale };
#pragma unroll
    for (int i = 0; i < 4; i++) to.x[i] = s.inverse > 0 ? __fmul_rn(x[i], s.inverse) : 0.0f;
    return to;
}

// Four bytes of int8, in ascending order.
INLINE int pack_bytes(const int (&x)[4]) {
    return (int)((x[0] & 255u) | (x[1] & 255u) << 8 | (x[2] & 255u) << 16 | (unsigned)x[3] << 24);
}

// Four numbers, rounded, as words of the halves of int16 codes 128 h + l, and the sum of the codes.
struct Halves { int high, low, sum; };
INLINE Halves halves_of(const float (&x)[4]) {
    int high[4], low[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int code = round_even(x[i]);
        high[i] = (code + 64) >> 7;
        low[i] = code - 128 * high[i];
        sum += code;
    }
    return { pack_bytes(high), pack_bytes(low), sum };
}
#endif
