// SPDX-License-Identifier: MIT
// dtype.h - memory layouts of matrices: strips of 16 rows, stored line by line along the columns. docs/format.md
// specifies them for other readers. The KV cache uses the float layouts as well.
//
// A strip holds 16 rows (the last strip of a matrix is padded with zero rows). A line is 64 bytes, one cache line.
//
// f32: a line holds the 16 rows' values of one column. f16, bf16: a line holds two columns: the 16 values of column
// k, then those of column k + 1. An odd number of columns is padded with a zero column.
//
// q8, q4, q4s: a strip starts with one line of row scales D (16 f32). Blocks of 128 columns follow; the last block
// may have fewer groups of 32. Columns are padded to a multiple of 32. A block of n groups consists of
//     the block scales s, int8: 16 (one per row) per span of columns that shares a scale, zero-padded to a whole line;
//     the codes, n times 8 lines (q8) or 4 lines (q4, q4s), in which each row owns 4 bytes per line.
// A weight is D * s * c with
//     q8        c = byte - 128, in -127 .. 127. Byte 4 r + i of line j is row r, column 4 j + i.
//     q4, q4s   c = codebook[nibble] + (s & 3). The low and high nibbles of byte 4 r + i of line j are row r, columns
//               8 j + i and 8 j + 4 + i.
// So the low two bits of s select one of four grids of code values. The quantizer picks s, and with it the grid.
#ifndef LLAMAC_DTYPE_H
#define LLAMAC_DTYPE_H
#include <stddef.h>
#include <stdint.h>
#include "llamac.h"

enum {
    STRIP_ROWS = 16, LINE_BYTES = 64,
    GROUP_COLUMNS = 32,             // columns are padded to it; int8 inputs have one scale per group
    BLOCK_COLUMNS = 128,
    BLOCK_GROUPS = BLOCK_COLUMNS / GROUP_COLUMNS,
    CODE_LIMIT = 32,                // bounds |codebook[nibble] + 3|: a sum of 8 products with int8 fits int16
    Q8_OFFSET = 128,
};

static inline int dtype_is_quantized(int dtype) { return dtype >= LLAMAC_Q8; }
// Columns that share a block scale in a quantized dtype.
static inline int scale_columns(int dtype) { return dtype == LLAMAC_Q4 ? 16 : GROUP_COLUMNS; }
// Bytes of a quantized block of `groups` groups: its scales, one group of its codes, all of it.
static inline size_t block_scale_bytes(int dtype, int groups) {
    return (size_t)(groups * (GROUP_COLUMNS / scale_columns(dtype)) * STRIP_ROWS + LINE_BYTES - 1) /
           LINE_BYTES * LINE_BYTES;
}
static inline size_t group_code_bytes(int dtype) { return dtype == LLAMAC_Q8 ? 8 * LINE_BYTES : 4 * LINE_BYTES; }
static inline size_t block_bytes(int dtype, int groups) {
    return block_scale_bytes(dtype, groups) + (size_t)groups * group_code_bytes(dtype);
}

// The 16 code values that nibbles stand for.
extern const int8_t q4_codebook[16];

// Bytes of one strip; 0 for an unknown dtype or if the size overflows.
size_t dtype_strip_bytes(int dtype, uint64_t columns);

// The same for a float dtype and a size known to be valid. For inner loops.
static inline size_t float_strip_bytes(int dtype, int columns) {
    return dtype == LLAMAC_F32 ? (size_t)columns * LINE_BYTES : (size_t)(columns + 1) / 2 * LINE_BYTES;
}

// ---- quantizing to q4 and q4s
//
// Positions on the axis of codes, in units of half a code: code 0 is at CODE_POSITIONS / 2. Code number j (1 to 15) of
// the grid with this offset is nearest from code_start, its midpoint with code j - 1, on.
enum { CODE_POSITIONS = 160 };
static inline int code_start(int j, int offset) {
    return CODE_POSITIONS / 2 + q4_codebook[j - 1] + q4_codebook[j] + 2 * offset;
}
#endif
