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

// Four bytes of int8, in ascending order.
INLINE int pack_bytes(const int (&x)[4]) {
    return (int)((x[0] & 255u) | (x[1] & 255u) << 8 | (x[2] & 255u) << 16 | (unsigned)x[3] << 24);
}

// Four numbers as int16 codes 128 h + l, and their scale, which `lanes` lanes share: a warp, or a half-warp.
struct Codes { int high, low; float scale; };
template <int lanes> static __device__ __forceinline__ Codes codes_of(const float (&x)[4]) {
    float top = 0;
    int is_bad = 0, high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        top = v16_max(v16_abs(x[i]), top);
        is_bad |= !is_finite(x[i]);
    }
    const unsigned bad = __ballot_sync(FULL_WARP, is_bad) >> (lanes == LANES ? threadIdx.x & LANES : 0);
    const InputScale s = input_scale(lanes == LANES ? lanes_max(top) : warp_max(top),
                                     (lanes == LANES ? bad & 0xffff : bad) != 0, INT16_LIMIT);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int code = s.inverse > 0 ? round_even(__fmul_rn(x[i], s.inverse)) : 0;
        high[i] = (code + 64) >> 7;
        low[i] = code - 128 * high[i];
    }
    return { pack_bytes(high), pack_bytes(low), s.scale };
}
#endif
