// SPDX-License-Identifier: MIT
// dtype.c - the 4-bit codebooks, and checked sizes of matrices. See dtype.h.
#include "dtype.h"

#include "common.h"

// Fitted by local search over integers: the least squared error on weights drawn from a normal and a Student-t(6)
// distribution when each block gets its best scale.
const int8_t q4_codebook[16] = { -32, -23, -18, -14, -11, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 26 };

// Defined by GGUF (IQ4_NL, IQ4_XS) and by the OCP Microscaling Formats (E2M1, here times 2).
const int8_t iq4_codebook[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
const int8_t fp4_codebook[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

const char *llamac_dtype_name(int dtype) {
    return dtype > 0 && dtype < LLAMAC_N_DTYPES ? dtype_table[dtype].name : NULL;
}

size_t dtype_strip_bytes(int dtype, uint64_t columns) {
    uint64_t bytes;
    if (dtype <= 0 || dtype >= LLAMAC_N_DTYPES || columns > INT64_MAX / 2) return 0;
    if (dtype_is_quantized(dtype)) {
        const uint64_t groups = (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
        const uint64_t per_block = (uint64_t)block_groups(dtype);
        if (mul_overflows(groups / per_block, block_bytes(dtype, (int)per_block), &bytes)) return 0;
        if (groups % per_block && add_overflows(bytes, block_bytes(dtype, (int)(groups % per_block)), &bytes))
            return 0;
        if (add_overflows(bytes, row_scale_bytes(dtype), &bytes) || !columns) return 0;
    } else {
        const uint64_t per_line = 32 / dtype_table[dtype].code_bits;
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
