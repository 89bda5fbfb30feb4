// SPDX-License-Identifier: MIT
// dtype.c - see dtype.h.
#include "dtype.h"

#include "common.h"

static const struct { const char *name; int columns_per_line; } dtypes[LLAMAC_N_DTYPES] = {
    [LLAMAC_F32] = { "f32", 1 }, [LLAMAC_F16] = { "f16", 2 }, [LLAMAC_BF16] = { "bf16", 2 },
    [LLAMAC_Q8] = { "q8", 0 },   [LLAMAC_Q4] = { "q4", 0 },   [LLAMAC_Q4S] = { "q4s", 0 },
};

const char *llamac_dtype_name(int dtype) { return dtype > 0 && dtype < LLAMAC_N_DTYPES ? dtypes[dtype].name : NULL; }

size_t dtype_strip_bytes(int dtype, uint64_t columns) {
    uint64_t bytes;
    if (dtype <= 0 || dtype >= LLAMAC_N_DTYPES || !dtypes[dtype].columns_per_line) return 0;
    uint64_t per_line = (uint64_t)dtypes[dtype].columns_per_line;
    if (mul_overflows(columns / per_line + (columns % per_line != 0), LINE_BYTES, &bytes) || bytes > SIZE_MAX) return 0;
    return (size_t)bytes;
}

size_t llamac_matrix_bytes(int dtype, uint64_t rows, uint64_t columns) {
    uint64_t bytes;
    if (mul_overflows(rows / STRIP_ROWS + (rows % STRIP_ROWS != 0), dtype_strip_bytes(dtype, columns), &bytes) || bytes > SIZE_MAX) return 0;
    return (size_t)bytes;
}
