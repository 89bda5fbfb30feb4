// SPDX-License-Identifier: MIT
// dtype.c - names of dtypes and checked sizes of matrices. See dtype.h.
#include "dtype.h"

#include "common.h"

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
