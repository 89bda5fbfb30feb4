// SPDX-License-Identifier: MIT
// read_bandwidth.c - the bare speed of reading memory: sums 1, 2 or 4 streams per thread, without software prefetch.
#include <omp.h>
#include <stdint.h>
#include <time.h>

typedef uint64_t v4 __attribute__((vector_size(32)));

static uint64_t sum_streams(const char *p, size_t bytes, int streams) {
    v4 s[4] = { { 0 } };
    const size_t part = bytes / (size_t)streams / 128 * 128;
    for (size_t i = 0; i < part; i += 128)
        for (int k = 0; k < streams; k++) {
            const v4 *q = (const v4 *)(const void *)(p + (size_t)k * part + i);
            s[0] ^= q[0], s[1] ^= q[1], s[2] ^= q[2], s[3] ^= q[3];
        }
    s[0] ^= s[1] ^ s[2] ^ s[3];
    return s[0][0] ^ s[0][1] ^ s[0][2] ^ s[0][3];
}

// Bytes per second of one pass over the block. The block is aligned to 32 bytes.
double read_pass(const char *block, size_t bytes, int threads, int streams, uint64_t *result) {
    struct timespec a, b;
    uint64_t all = 0;
    clock_gettime(CLOCK_MONOTONIC, &a);
    #pragma omp parallel num_threads(threads) reduction(^:all)
    {
        const size_t part = bytes / (size_t)omp_get_num_threads() / 4096 * 4096;
        all ^= sum_streams(block + part * (size_t)omp_get_thread_num(), part, streams);
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    *result = all;
    return (double)bytes / ((double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec));
}
