// SPDX-License-Identifier: MIT
// dtype.h - memory layouts of matrices: strips of 16 rows, stored line by line along the columns. One table describes
// every dtype; kernels, quantizer, regrouping and tests derive sizes and steps from it. docs/format.md specifies the
// layouts for other readers. The KV cache uses the float layouts as well.
//
// A strip holds 16 rows (the last strip of a matrix is padded with zero rows). A line is 64 bytes, one cache line.
//
// f32: a line holds the 16 rows' values of one column. f16, bf16: a line holds two columns: the 16 values of column
// k, then those of column k + 1. An odd number of columns is padded with a zero column.
//
// Quantized dtypes: a strip starts with one line of row scales D (16 f32), if the dtype has them. Blocks of
// `block_columns` columns follow; the last block may have fewer groups of 32. Columns are padded to a multiple of 32.
// A block consists of a scale area and the codes of its groups. The scale area, zero-padded to whole lines, holds
//     the super-scales, if the dtype has them: d (16 f16), then, if it has minimums, d_min (16 f16);
//     the scales: 16 (one per row) for each span of `scale_columns` columns;
//     the minimums, if it has them: 16 for each span.
// A group's codes take `code_bits` lines, in which each row owns 4 bytes per line. Bit 0 is the lowest:
//     8 bits           byte 4 r + i of line j is row r, column 4 j + i, plus 128.
//     4, 5 and 6 bits  the low and high nibbles of byte 4 r + i of line j < 4 are the low 4 bits of row r, columns
//                      8 j + i and 8 j + 4 + i.
//     2 and 3 bits     bits 2 v and 2 v + 1 of byte 4 r + i of line h < 2 are the low 2 bits of row r, column
//                      16 h + 8 (v % 2) + 4 (v / 2) + i. A shift and a mask make them the nibbles of 4 bits.
//     3 bits           bit 4 u + w of byte 4 r + i of line 2 is bit 2 of row r, column 8 w + 4 u + i.
//     5 bits           bit w of byte 4 r + i of line 4 is bit 4 of row r, column 4 w + i.
//     6 bits           bits 2 v and 2 v + 1 of byte 4 r + i of line 4 + h are bits 4 and 5 of row r, column
//                      16 h + 4 v + i.
//
// A weight is S * c + M. c is code - offset, or codebook[code] (with int8 inputs: plus s & 3, so that the low two bits
// of the scale s select one of four grids, which the quantizer picks). S and M are
//     D * s       and 0                    with row scales
//     d * s       and 0 or -d_min * m      with super-scales
//     s           and 0 or m               otherwise
// with the scale s and the minimum m as stored: int8, f16, or e8m0, whose byte e stands for 2^(e - 128). t2 stores no
// scales: s is 1.
#ifndef LLAMAC_DTYPE_H
#define LLAMAC_DTYPE_H
#include <stddef.h>
#include <stdint.h>
#include "llamac.h"

enum {
    STRIP_ROWS = 16, LINE_BYTES = 64,
    GROUP_COLUMNS = 32,             // columns are padded to it; int8 inputs have one scale per group
    BLOCK_COLUMNS = 128,            // columns that share the scale of int16 inputs; in most dtypes also a block
    BLOCK_GROUPS = BLOCK_COLUMNS / GROUP_COLUMNS,
    CODE_LIMIT = 32,                // bounds |codebook[code] + 3| with int8 inputs: a sum of 8 products fits int16
    Q8_OFFSET = 128,
};

// What the inputs of a product become before they are multiplied by codes (kernels.h).
enum input_type { INPUT_F32, INPUT_INT8, INPUT_INT16, INPUT_BF16, N_INPUT_TYPES };
enum scale_kind { SCALE_INT8, SCALE_F16, SCALE_E8M0, SCALE_NONE };

struct dtype_info {
    const char *name;
    uint8_t code_bits;              // 32 or 16: a float dtype, for which the fields below are 0, except `input`
    uint8_t offset;                 // of linear codes
    uint8_t scale_columns;          // 16 or 32
    uint8_t scale;                  // enum scale_kind
    uint8_t has_row_scales;         // the dtypes that llamac's quantizer produces
    uint8_t has_super_scales, has_minimums;
    uint8_t input;                  // enum input_type; INPUT_INT8 marks dtypes of at most 4 bits whose codes have grids
    uint16_t block_columns;         // 128 or 256
    const int8_t *codebook;         // 16 values, of which codes of fewer bits use the first; NULL for linear codes
};

// What follows is a constant expression for kernels, which are C++ on a GPU.
#ifdef __cplusplus
#define DTYPE_CONSTANT static constexpr
#else
#define DTYPE_CONSTANT static const
#endif

// The values that 4-bit codes stand for. q4 and q4s: fitted by local search over integers: the least squared error on
// weights drawn from a normal and a Student-t(6) distribution when each block gets its best scale.
DTYPE_CONSTANT int8_t q4_codebook[16] = { -32, -23, -18, -14, -11, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 26 };
// The same for codes of 3 and 2 bits, whose error depends more on the four grids.
DTYPE_CONSTANT int8_t q3_codebook[16] = { -19, -13, -8, -4, -1, 2, 6, 10 };
DTYPE_CONSTANT int8_t q2_codebook[16] = { -12, -5, -1, 4 };
// Plus the grid of the scale 1: -1, 0, 1, and 2, which is not used.
DTYPE_CONSTANT int8_t t2_codebook[16] = { -2, -1, 0, 1 };
// Defined by GGUF (IQ4_NL, IQ4_XS) and by the OCP Microscaling Formats (MXFP4's E2M1, here times 2).
DTYPE_CONSTANT int8_t iq4_codebook[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
DTYPE_CONSTANT int8_t fp4_codebook[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

// The table of dtypes in the order of enum llamac_dtype, whose numbers start at 1. Defined here so that kernels
// compiled for one dtype see constants.
DTYPE_CONSTANT struct dtype_info dtype_table[LLAMAC_N_DTYPES] = {
    { .name = NULL },
    { .name = "f32", .code_bits = 32 },
    { .name = "f16", .code_bits = 16 },
    { .name = "bf16", .code_bits = 16, .input = INPUT_BF16 },
    { .name = "q8", .code_bits = 8, .offset = Q8_OFFSET, .scale_columns = 32, .scale = SCALE_INT8,
      .has_row_scales = 1, .input = INPUT_INT16, .block_columns = 128 },
    { .name = "q4", .code_bits = 4, .scale_columns = 16, .scale = SCALE_INT8, .has_row_scales = 1,
      .input = INPUT_INT8, .block_columns = 128, .codebook = q4_codebook },
    { .name = "q4s", .code_bits = 4, .scale_columns = 32, .scale = SCALE_INT8, .has_row_scales = 1,
      .input = INPUT_INT8, .block_columns = 128, .codebook = q4_codebook },
    { .name = "q4_0", .code_bits = 4, .offset = 8, .scale_columns = 32, .scale = SCALE_F16,
      .input = INPUT_INT16, .block_columns = 128 },
    { .name = "q4_1", .code_bits = 4, .scale_columns = 32, .scale = SCALE_F16, .has_minimums = 1,
      .input = INPUT_INT16, .block_columns = 128 },
    { .name = "q5_0", .code_bits = 5, .offset = 16, .scale_columns = 32, .scale = SCALE_F16,
      .input = INPUT_INT16, .block_columns = 128 },
    { .name = "q5_1", .code_bits = 5, .scale_columns = 32, .scale = SCALE_F16, .has_minimums = 1,
      .input = INPUT_INT16, .block_columns = 128 },
    { .name = "q8_0", .code_bits = 8, .offset = Q8_OFFSET, .scale_columns = 32, .scale = SCALE_F16,
      .input = INPUT_INT16, .block_columns = 128 },
    { .name = "q4_k", .code_bits = 4, .scale_columns = 32, .scale = SCALE_INT8, .has_super_scales = 1,
      .has_minimums = 1, .input = INPUT_INT16, .block_columns = 256 },
    { .name = "q5_k", .code_bits = 5, .scale_columns = 32, .scale = SCALE_INT8, .has_super_scales = 1,
      .has_minimums = 1, .input = INPUT_INT16, .block_columns = 256 },
    { .name = "q6_k", .code_bits = 6, .offset = 32, .scale_columns = 16, .scale = SCALE_INT8,
      .has_super_scales = 1, .input = INPUT_INT16, .block_columns = 256 },
    { .name = "iq4_nl", .code_bits = 4, .scale_columns = 32, .scale = SCALE_F16,
      .input = INPUT_INT16, .block_columns = 128, .codebook = iq4_codebook },
    { .name = "iq4_xs", .code_bits = 4, .scale_columns = 32, .scale = SCALE_INT8,
      .has_super_scales = 1, .input = INPUT_INT16, .block_columns = 256, .codebook = iq4_codebook },
    { .name = "mxfp4", .code_bits = 4, .scale_columns = 32, .scale = SCALE_E8M0,
      .input = INPUT_INT16, .block_columns = 128, .codebook = fp4_codebook },
    { .name = "q6", .code_bits = 6, .offset = 32, .scale_columns = 32, .scale = SCALE_INT8,
      .has_row_scales = 1, .input = INPUT_INT16, .block_columns = 128 },
    { .name = "q3", .code_bits = 3, .scale_columns = 16, .scale = SCALE_INT8, .has_row_scales = 1,
      .input = INPUT_INT8, .block_columns = 128, .codebook = q3_codebook },
    { .name = "q2", .code_bits = 2, .scale_columns = 16, .scale = SCALE_INT8, .has_row_scales = 1,
      .input = INPUT_INT8, .block_columns = 128, .codebook = q2_codebook },
    { .name = "t2", .code_bits = 2, .scale_columns = 32, .scale = SCALE_NONE, .has_row_scales = 1,
      .input = INPUT_INT8, .block_columns = 128, .codebook = t2_codebook },
};

// Whether the low bits of a scale select a grid of codes: q4, q4s, q3, q2 and t2.
static inline int dtype_has_grids(int dtype) { return dtype_table[dtype].input == INPUT_INT8; }
static inline int dtype_is_quantized(int dtype) { return dtype_table[dtype].code_bits <= 8; }
static inline int scale_columns(int dtype) { return dtype_table[dtype].scale_columns; }
static inline int block_columns(int dtype) { return dtype_table[dtype].block_columns; }
static inline int block_groups(int dtype) { return block_columns(dtype) / GROUP_COLUMNS; }
static inline int scale_element_bytes(int dtype) {
    const int kind = dtype_table[dtype].scale;
    return kind == SCALE_NONE ? 0 : kind == SCALE_F16 ? 2 : 1;
}

// Offsets in a quantized block of `groups` groups, and sizes of its parts.
static inline size_t scales_offset(int dtype) {
    return dtype_table[dtype].has_super_scales ? (size_t)STRIP_ROWS * 2 * (1 + dtype_table[dtype].has_minimums) : 0;
}
static inline size_t span_scale_bytes(int dtype) { return (size_t)STRIP_ROWS * (size_t)scale_element_bytes(dtype); }
static inline size_t minimums_offset(int dtype, int groups) {
    return scales_offset(dtype) + (size_t)(groups * (GROUP_COLUMNS / scale_columns(dtype))) * span_scale_bytes(dtype);
}
static inline size_t block_scale_bytes(int dtype, int groups) {
    const size_t scales = minimums_offset(dtype, groups) - scales_offset(dtype);
    const size_t bytes = scales_offset(dtype) + scales * (1 + (size_t)dtype_table[dtype].has_minimums);
    return (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}
static inline size_t group_code_bytes(int dtype) { return (size_t)dtype_table[dtype].code_bits * LINE_BYTES; }
static inline size_t block_bytes(int dtype, int groups) {
    return block_scale_bytes(dtype, groups) + (size_t)groups * group_code_bytes(dtype);
}
static inline size_t row_scale_bytes(int dtype) { return dtype_table[dtype].has_row_scales ? LINE_BYTES : 0; }

// Bytes of one strip; 0 for an unknown dtype or if the size overflows.
size_t dtype_strip_bytes(int dtype, uint64_t columns);

// The same for a float dtype and a size known to be valid. For inner loops.
static inline size_t float_strip_bytes(int dtype, int columns) {
    return dtype == LLAMAC_F32 ? (size_t)columns * LINE_BYTES : (size_t)(columns + 1) / 2 * LINE_BYTES;
}
// The same for any dtype. For kernels on a GPU.
static inline size_t valid_strip_bytes(int dtype, int columns) {
    if (!dtype_is_quantized(dtype)) return float_strip_bytes(dtype, columns);
    const int groups = (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS, per_block = block_groups(dtype);
    const size_t rest = groups % per_block ? block_bytes(dtype, groups % per_block) : 0;
    return row_scale_bytes(dtype) + (size_t)(groups / per_block) * block_bytes(dtype, per_block) + rest;
}

// ---- quantizing to dtypes with grids
//
// The values that codes 0 to `last` stand for in grid 0, ascending.
struct code_values { const int8_t *at; int last; };
static inline struct code_values code_values_of(int dtype) {
    const struct code_values values = { dtype_table[dtype].codebook, (1 << dtype_table[dtype].code_bits) - 1 };
    return values;
}
// Positions on the axis of codes, in units of half a code: code 0 is at CODE_POSITIONS / 2. Code number j (1 to `last`)
// of the grid with this offset is nearest from code_start, its midpoint with code j - 1, on.
enum { CODE_POSITIONS = 160 };
static inline int code_start(struct code_values codes, int j, int offset) {
    return CODE_POSITIONS / 2 + codes.at[j - 1] + codes.at[j] + 2 * offset;
}

// Positions of a grid in quarters of a code, from -128 to 127, code 0 at 0, in cells of 16, in which at most two codes
// start. Cell i starts at 16 i, or from i = 8 on at 16 (i - 16). code: the first code of each cell. first, second: the
// positions before those where the next two codes start, or 127. twice: twice the value of each code.
struct code_cells { int8_t code[16], first[16], second[16], twice[16]; };
static inline void code_cells_init(struct code_cells *cells, struct code_values codes, int offset) {
    for (int i = -8; i < 8; i++) {
        int j = 0, before[2];
        while (j < codes.last && 2 * code_start(codes, j + 1, offset) - CODE_POSITIONS <= 16 * i) j++;
        for (int next = 0; next < 2; next++) {
            const int start =
                j + next < codes.last ? 2 * code_start(codes, j + 1 + next, offset) - CODE_POSITIONS : 128;
            before[next] = start < 16 * i + 16 ? start - 1 : 127;
        }
        cells->code[i & 15] = (int8_t)j;
        cells->first[i & 15] = (int8_t)before[0], cells->second[i & 15] = (int8_t)before[1];
    }
    for (int j = 0; j < 16; j++) cells->twice[j] = (int8_t)(2 * (codes.at[j] + offset));
}
#endif
