// SPDX-License-Identifier: MIT
// kv_cache.cuh - one layer's keys and values in the pages of a pass's sequences: addresses, loads and stores in the
// layouts of csrc/kv_layout.h.
#ifndef LLAMAC_KV_CACHE_CUH
#define LLAMAC_KV_CACHE_CUH
#include "codes.cuh"
#include "kv_layout.h"

// A layer's keys and values in the pages of a pass: tables (n, max_pages) holds a page's address for each 64
// positions of a table. `offset`: of the layer in a page; head_bytes: of a KV head's keys and values; value_offset: of
// the values in them.
struct Cache {
    const uint64_t *tables;
    int max_pages, offset, head_bytes, value_offset;

    __device__ __forceinline__ uint8_t *keys(int table, int position, int head) const {
        return (uint8_t *)tables[(size_t)table * max_pages + position / KV_PAGE] + offset + (size_t)head * head_bytes;
    }
    __device__ __forceinline__ uint8_t *values(int table, int position, int head) const {
        return keys(table, position, head) + value_offset;
    }
};

INLINE float load_float(const int dtype, const uint8_t *p) {
    return dtype == LLAMAC_F32 ? *(const float *)p : f16_to_f32(*(const uint16_t *)p);
}
INLINE void store_float(const int dtype, uint8_t *p, float x) {   // f16 saturates; NaN passes
    if (dtype == LLAMAC_F32) *(float *)p = x;
    else *(uint16_t *)p = f32_to_f16(v16_max(-65504.0f, v16_min(65504.0f, x)));
}
INLINE int float_bytes(const int dtype) { return dtype == LLAMAC_F32 ? 4 : 2; }

// Where a key's number d is, in f32 and f16, and a value's.
INLINE size_t key_at(const int dtype, int head_dim, int slot, int d) {
    return (size_t)(slot / STRIP_ROWS) * kv_key_strip_bytes(dtype, head_dim) +
           (size_t)(d * STRIP_ROWS + slot % STRIP_ROWS) * float_bytes(dtype);
}
INLINE size_t value_at(const int dtype, int slot, int d) {
    return (size_t)((d / STRIP_ROWS * KV_PAGE + slot) * STRIP_ROWS + d % STRIP_ROWS) * float_bytes(dtype);
}

// In q8: where a key's scale and its code of dimension d are. A block of 128 dimensions has its scales, then its codes.
struct KeyPlace { size_t scale, code; };
INLINE KeyPlace key_place_q8(int head_dim, int slot, int d) {
    const int block = d / BLOCK_COLUMNS, rest = head_dim - block * BLOCK_COLUMNS, column = d % BLOCK_COLUMNS;
    const int groups = (min(rest, (int)BLOCK_COLUMNS) + GROUP_COLUMNS - 1) / GROUP_COLUMNS, r = slot % STRIP_ROWS;
    const size_t start = (size_t)(slot / STRIP_ROWS) * kv_key_strip_bytes(LLAMAC_Q8, head_dim) +
                         (size_t)block * block_bytes(LLAMAC_Q8_0, BLOCK_GROUPS);
    return { start + (size_t)(column / GROUP_COLUMNS * STRIP_ROWS + r) * 2,
             start + block_scale_bytes(LLAMAC_Q8_0, groups) +
                 (size_t)(column / 4 * LINE_BYTES + 4 * r + column % 4) };
}

// As q8_scale of kernels_attention.h: the f16 scale of numbers whose largest magnitude is `max`, and its inverse.
struct CodeScale { uint16_t f16; float inverse; };
INLINE CodeScale q8_scale(float max, int is_bad) {
    const InputScale exact = input_scale(max, is_bad, INT8_LIMIT);
    const float limited = exact.scale > 65504 ? 65504 : exact.scale;
    uint16_t f16 = f32_to_f16(limited);
    f16 = (uint16_t)(f16 + (f16_to_f32(f16) < limited));   // rounds up
    return { f16, exact.inverse > 0 ? __fdiv_rn(1.0f, f16_to_f32(f16)) : exact.inverse };
}
INLINE uint8_t q8_code(float x, float inverse) {
    const float code = inverse > 0 ? __fmul_rn(x, inverse) : 0.0f, limit = INT8_LIMIT;
    return (uint8_t)(round_even(v16_max(-limit, v16_min(limit, code))) + Q8_OFFSET);
}

// A warp stores the key x (head_dim, in shared memory) at a slot of a page, as store_key.
template <int dtype> static __device__ void store_key(uint8_t *keys, int slot, int head_dim, const float *x) {
    const int lane = threadIdx.x % WARP_LANES;
    if constexpr (dtype == LLAMAC_Q8) {
        for (int first = 0; first < head_dim; first += GROUP_COLUMNS) {
            const int d = first + lane;   // codes are stored 16 at a time: beyond head_dim those of 0
            const float number = d < head_dim ? x[d] : 0.0f;
            const int is_bad = __any_sync(FULL_WARP, !is_finite(number));
            const CodeScale s = q8_scale(group_max<WARP_LANES>(v16_abs(number)), is_bad);
            const KeyPlace place = key_place_q8(head_dim, slot, first);
            if (lane == 0) *(uint16_t *)(keys + place.scale) = s.f16;
            if (d < padded_head_dim(head_dim)) keys[key_place_q8(head_dim, slot, d).code] = q8_code(number, s.inverse);
        }
    } else {
        for (int d = lane; d < head_dim; d += WARP_LANES)
            store_float(dtype, keys + key_at(dtype, head_dim, slot, d), x[d]);
    }
}

// The same for a value, as store_value.
template <int dtype> static __device__ void store_value(uint8_t *values, int slot, int head_dim, const float *x) {
    const int lane = threadIdx.x % WARP_LANES, width = padded_head_dim(head_dim);
    if constexpr (dtype == LLAMAC_Q8) {
        float max = 0;
        int is_bad = 0;
        for (int d = lane; d < head_dim; d += WARP_LANES) {
            max = v16_max(v16_abs(x[d]), max);
            is_bad |= !is_finite(x[d]);
        }
        const CodeScale s = q8_scale(group_max<WARP_LANES>(max), __any_sync(FULL_WARP, is_bad));
        if (lane == 0) ((uint16_t *)values)[slot] = s.f16;
        for (int d = lane; d < width; d += WARP_LANES)
            values[kv_value_code_offset(slot, d)] = q8_code(d < head_dim ? x[d] : 0.0f, s.inverse);
    } else {
        for (int d = lane; d < width; d += WARP_LANES)
            store_float(dtype, values + value_at(dtype, slot, d), d < head_dim ? x[d] : 0.0f);
    }
}

// One number of a key or a value, as load_key and load_value.
template <int dtype> static __device__ float load_key(const uint8_t *keys, int slot, int head_dim, int d) {
    if (dtype != LLAMAC_Q8) return load_float(dtype, keys + key_at(dtype, head_dim, slot, d));
    const KeyPlace place = key_place_q8(head_dim, slot, d);
    return __fmaf_rn(f16_to_f32(*(const uint16_t *)(keys + place.scale)), (float)(keys[place.code] - Q8_OFFSET), 0.0f);
}
template <int dtype> static __device__ float load_value(const uint8_t *values, int slot, int d) {
    if (dtype != LLAMAC_Q8) return load_float(dtype, values + value_at(dtype, slot, d));
    return __fmul_rn(f16_to_f32(((const uint16_t *)values)[slot]),
                     (float)(values[kv_value_code_offset(slot, d)] - Q8_OFFSET));
}
#endif
