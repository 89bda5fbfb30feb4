// SPDX-License-Identifier: MIT
// test_regroup.c - GGUF's blocks in strips and back, in buffers without a byte to spare, and sizes that do not fit.
#include "dtype.h"
#include "llamac.h"
#include "test.h"

static uint64_t random_state = 1;
static uint8_t random_byte(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint8_t)(random_state >> 56);
}

static int is_gguf(int dtype) { return llamac_gguf_row_bytes(dtype, 256) != 0; }

// Any bits, also those of infinite scales, pass through unchanged.
static void check_round_trip(int dtype, size_t rows, size_t columns) {
    const size_t blocks_size = rows * llamac_gguf_row_bytes(dtype, columns);
    const size_t strips_size = llamac_matrix_bytes(dtype, rows, columns);
    uint8_t *blocks = malloc(blocks_size), *strips = malloc(strips_size), *restored = malloc(blocks_size);
    llamac_error err;
    for (size_t i = 0; i < blocks_size; i++) blocks[i] = random_byte();
    memset(strips, 0xaa, strips_size);
    memset(restored, 0x55, blocks_size);
    const int finite = llamac_regroup(dtype, blocks, blocks_size, rows, columns, strips, strips_size, &err);
    CHECK(finite == 0 || finite == 1, "%s: %d", llamac_dtype_name(dtype), finite);
    CHECK(!llamac_ungroup(dtype, strips, strips_size, rows, columns, restored, blocks_size, &err), "%s", err.message);
    CHECK(!memcmp(blocks, restored, blocks_size), "%s, %zu x %zu", llamac_dtype_name(dtype), rows, columns);
    free(blocks);
    free(strips);
    free(restored);
}

static void blocks_come_back(void) {
    for (int dtype = 1; dtype < LLAMAC_N_DTYPES; dtype++) {
        if (!is_gguf(dtype)) continue;
        const size_t step = llamac_gguf_row_bytes(dtype, GROUP_COLUMNS) ? GROUP_COLUMNS : 256;
        for (size_t rows = 1; rows <= 33; rows += rows % 16 == 0 ? 1 : 5)
            for (size_t blocks = 1; blocks <= 9; blocks++) check_round_trip(dtype, rows, blocks * step);
    }
}

static void sizes_that_do_not_fit_are_refused(void) {
    static const size_t sizes[] = { 0, 1, 31, 32, 255, 256, 1 << 24, (1 << 24) + 256, SIZE_MAX / 18, SIZE_MAX - 255,
                                    SIZE_MAX };
    enum { N = sizeof sizes / sizeof *sizes };
    uint8_t byte = 0;
    llamac_error err;
    for (int dtype = -1; dtype <= LLAMAC_N_DTYPES; dtype++)
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++)
                for (int k = 0; k < N; k++) {
                    // one byte is enough for no matrix
                    CHECK(llamac_regroup(dtype, &byte, sizes[k], sizes[i], sizes[j], &byte, 1, &err) < 0,
                          "dtype %d, %zu x %zu", dtype, sizes[i], sizes[j]);
                    CHECK(llamac_ungroup(dtype, &byte, 1, sizes[i], sizes[j], &byte, sizes[k], &err) < 0,
                          "dtype %d, %zu x %zu", dtype, sizes[i], sizes[j]);
                }
}

int main(void) {
    RUN(blocks_come_back);
    RUN(sizes_that_do_not_fit_are_refused);
    return finish_tests("test_regroup");
}
