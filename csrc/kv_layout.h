// SPDX-License-Identifier: MIT
// kv_layout.h - where the pages of the KV cache hold keys and values, and the blocks of positions that attention
// computes. A GPU's kernels include this file as well.
#ifndef LLAMAC_KV_LAYOUT_H
#define LLAMAC_KV_LAYOUT_H
#include "dtype.h"

enum {
    KV_PAGE = 64,            // positions per KV page
    ATTENTION_BLOCK = 256,   // positions per partial softmax, aligned to multiples of this position
    NUMERATOR_LIMIT = 255,   // largest code of a softmax numerator, with a cache in q8
};

// The KV cache is in f32, f16 or q8. In a page, the keys of one KV head are strips of 16 positions; its values are
// strips of 16 dimensions whose columns are positions. Strips of f32 and f16 are those of matrices.
//
// The cache's q8 is not the q8 of matrices. Keys are strips of q8_0: a scale per 32 dimensions. A value has one scale.
// KV_PAGE of them (f16) come before the strips of values, which hold codes as q8_0 does. A scale d is max|x| / 127,
// rounded up to an f16 of at most 65504. A code is x * (1 / d), rounded to nearest even and clamped to -127 .. 127.
static inline size_t kv_key_strip_bytes(int dtype, int head_dim) {
    if (dtype != LLAMAC_Q8) return float_strip_bytes(dtype, head_dim);
    const int groups = (head_dim + GROUP_COLUMNS - 1) / GROUP_COLUMNS, rest = groups % BLOCK_GROUPS;
    return (size_t)(groups / BLOCK_GROUPS) * block_bytes(LLAMAC_Q8_0, BLOCK_GROUPS) +
           (rest ? block_bytes(LLAMAC_Q8_0, rest) : 0);
}
static inline size_t kv_value_strip_bytes(int dtype) {
    return dtype == LLAMAC_Q8 ? KV_PAGE * STRIP_ROWS : float_strip_bytes(dtype, KV_PAGE);
}
static inline size_t kv_value_scale_bytes(int dtype) { return dtype == LLAMAC_Q8 ? KV_PAGE * sizeof(uint16_t) : 0; }
// Where a position's code of one dimension is in the q8 values of a page.
static inline size_t kv_value_code_offset(int slot, int d) {
    return kv_value_scale_bytes(LLAMAC_Q8) + (size_t)(d / STRIP_ROWS) * kv_value_strip_bytes(LLAMAC_Q8) +
           (size_t)(slot / 4 * LINE_BYTES + d % STRIP_ROWS * 4 + slot % 4);
}
// Bytes of the keys, and of the values, of one KV head in a page.
static inline int padded_head_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }
static inline size_t kv_keys_bytes(int dtype, int head_dim) {
    return KV_PAGE / STRIP_ROWS * kv_key_strip_bytes(dtype, head_dim);
}
static inline size_t kv_values_bytes(int dtype, int head_dim) {
    return kv_value_scale_bytes(dtype) + (size_t)padded_head_dim(head_dim) / STRIP_ROWS * kv_value_strip_bytes(dtype);
}

// Floats of a query's partial result in one block: m, l, whether it sees the block, padding; then o.
enum { PARTIAL_M, PARTIAL_L, PARTIAL_VISIBLE, PARTIAL_O = 16 };
static inline size_t partial_floats(int head_dim) { return PARTIAL_O + (size_t)padded_head_dim(head_dim); }
#endif
