// SPDX-License-Identifier: MIT
// dtype.h - how a matrix lies in memory: strips of 16 rows, in which k runs from line to line.
//
// A line is 64 bytes. f32: the 16 rows' values of one k. f16, bf16: two planes of 16 rows, k and then k+1; an odd number of
// columns leaves the last plane zero. Rows are padded to 16 with zeros. The KV cache uses the same layout.
#ifndef LLAMAC_DTYPE_H
#define LLAMAC_DTYPE_H
#include <stddef.h>
#include <stdint.h>
#include "llamac.h"

enum { STRIP_ROWS = 16, LINE_BYTES = 64 };

// Bytes of one strip of `columns` columns; 0 if the dtype is reserved or the size overflows.
size_t dtype_strip_bytes(int dtype, uint64_t columns);

// The same for a float dtype and a size that is known to be fine, for inner loops.
static inline size_t float_strip_bytes(int dtype, int columns) {
    return dtype == LLAMAC_F32 ? (size_t)columns * LINE_BYTES : (size_t)(columns + 1) / 2 * LINE_BYTES;
}
#endif
