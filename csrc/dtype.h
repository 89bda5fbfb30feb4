// SPDX-License-Identifier: MIT
// dtype.h - how a matrix lies in memory: strips of 16 rows, in which k runs from line to line.
//
// A line is 64 bytes. f32: the 16 rows' values of one k. f16, bf16: two planes of 16 rows, k and then k+1; an odd number of
// columns leaves the last plane zero. Rows are padded to 16 with zeros. The KV cache uses the same layout.
//
// q8, q4, q4s: a strip begins with one line of row scales D (16 f32); then blocks of 128 columns, the last with fewer groups of 32. A
// block of n groups is its block scales s, 16 int8 (one per row) for each scale block, zeros up to a full line; then its codes, n times 8 lines
// (q8) or 4 (q4, q4s), in which each row has 4 bytes. The weight is D * s * c, with
//     q8:       c = byte - 128, -127 .. 127;  byte 4 r + i of line j is column 4 j + i
//     q4, q4s:  c = codebook[nibble] + (s & 3);  low and high nibble of byte 4 r + i of line j are columns 8 j + i and 8 j + 4 + i
// Columns are padded to 32. The lowest bits of s thus choose one of four grids: a block's scale is tried with each.
#ifndef LLAMAC_DTYPE_H
#define LLAMAC_DTYPE_H
#include <stddef.h>
#include <stdint.h>
#include "llamac.h"

enum {
    STRIP_ROWS = 16, LINE_BYTES = 64,
    GROUP_COLUMNS = 32,             // activations of q4 and q4s share a scale; columns are padded to it
    BLOCK_COLUMNS = 128,
    BLOCK_GROUPS = BLOCK_COLUMNS / GROUP_COLUMNS,
    CODE_LIMIT = 32,                // |codebook[nibble] + 3| stays below or at: sums of 8 products with int8 fit int16
    Q8_OFFSET = 128,
};

static inline int dtype_is_quantized(int dtype) { return dtype >= LLAMAC_Q8; }
// Columns that share a block scale, of a quantized dtype.
static inline int scale_columns(int dtype) { return dtype == LLAMAC_Q4 ? 16 : GROUP_COLUMNS; }
// Bytes of a block of `groups` groups: of its scales, and of the codes after them.
static inline size_t block_scale_bytes(int dtype, int groups) {
    return (size_t)(groups * (GROUP_COLUMNS / scale_columns(dtype)) * STRIP_ROWS + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}
static inline size_t group_code_bytes(int dtype) { return dtype == LLAMAC_Q8 ? 8 * LINE_BYTES : 4 * LINE_BYTES; }
static inline size_t block_bytes(int dtype, int groups) { return block_scale_bytes(dtype, groups) + (size_t)groups * group_code_bytes(dtype); }

// The 16 values of a nibble.
extern const int8_t q4_codebook[16];

// Bytes of one strip of `columns` columns; 0 if the number is no dtype or the size overflows.
size_t dtype_strip_bytes(int dtype, uint64_t columns);

// The same for a float dtype and a size that is known to be fine, for inner loops.
static inline size_t float_strip_bytes(int dtype, int columns) {
    return dtype == LLAMAC_F32 ? (size_t)columns * LINE_BYTES : (size_t)(columns + 1) / 2 * LINE_BYTES;
}
#endif
