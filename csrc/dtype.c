// SPDX-License-Identifier: MIT
// dtype.c - the table of dtypes, the 4-bit codebook, and checked sizes of matrices. See dtype.h.
#include "dtype.h"

#include "common.h"

// columns_per_line: float dtypes only; 0 marks a quantized dtype.
static const struct { const char *name; int columns_per_line; } dtypes[LLAMAC_N_DTYPES] = {
    [LLAMAC_F32] = { "f32", 1 }, [LLAMAC_F16] = { "f16", 2 }, [LLAMAC_BF16] = { "bf16", 2 },
    [LLAMAC_Q8] = { "q8", 0 },   [LLAMAC_Q4] = { "q4", 0 },   [LLAMAC_Q4S] = { "q4s", 0 },
};

// Fitted by local search over integers: the least squared error on weights drawn from a normal and a Student-t(6)
// distribution when each block gets its best scale.
const int8_t q4_codebook[16] = { -32, -23, -18, -14, -11, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 26 };

const char *llamac_dtype_name(int dtype) {
    return dtype > 0 && dtype < LLAMAC_N_DTYPES ? dtypes[dtype].name : NULL;
}

size_t dtype_strip_bytes(int dtype, uint64_t columns) {
    uint64_t bytes;
    if (dtype <= 0 || dtype >= LLAMAC_N_DTYPES || columns > INT64_MAX / 2) return 0;
    if (dtype_is_quantized(dtype)) {
        const uint64_t groups = (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
        if (mul_overflows(groups / BLOCK_GROUPS, block_bytes(dtype, BLOCK_GROUPS), &bytes)) return 0;
        if (groups % BLOCK_GROUPS && add_overflows(bytes, block_bytes(dtype, (int)(groups % BLOCK_GROUPS)), &bytes))
            return 0;
        if (add_overflows(bytes, LINE_BYTES, &bytes) || !columns) return 0;
    } else {
        const uint64_t per_line = (uint64_t)dtypes[dtype].columns_per_line;
        if (mul_overflows(columns / per_line + (columns % per_line != 0), LINE_BYTES, &bytes)) return 0;
    }
    return bytes > SIZE_MAX ? 0 : (size_t)bytes;
}

size_t llamac_matrix_bytes(int dtype, uint64_t rows, uint64_t columns) {
    uint64_t bytes;
    if (mul_overflows(rows / STRIP_ROWS + (rows % STRIP_ROWS != 0), dtype_strip_bytes(dtype, columns), &bytes) ||
        bytes > SIZE_MAX)
        return 0;
    return (size_t)bytes;
}
