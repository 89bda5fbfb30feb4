// SPDX-License-Identifier: MIT
// test.h - named tests, checks that say where they failed, and a deterministic source of numbers.
#ifndef LLAMAC_TEST_H
#define LLAMAC_TEST_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures, checks;

#define CHECK(condition, ...) do { \
        checks++; \
        if (!(condition)) { \
            failures++; \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__); \
            printf("\n"); \
            if (failures > 20) { printf("too many failures\n"); exit(1); } \
        } } while (0)

#define RUN(test) do { int before = failures; test(); printf("%-44s %s\n", #test, failures == before ? "ok" : "FAILED"); fflush(stdout); } while (0)

static inline int finish_tests(const char *name) {
    printf("%s: %d checks, %d failed\n", name, checks, failures);
    return failures != 0;
}

// xorshift64*: the same numbers everywhere.
static inline uint64_t random_bits(uint64_t *state) {
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1d;
}
static inline float random_float(uint64_t *state) { return (float)((double)(random_bits(state) >> 11) * 0x1p-52 - 1.0); }   // [-1, 1)
static inline int random_below(uint64_t *state, int n) { return (int)((random_bits(state) >> 33) % (uint64_t)n); }

static inline void fill_random(float *x, size_t n, uint64_t *state) { for (size_t i = 0; i < n; i++) x[i] = random_float(state); }

// Zeroed memory, aligned to cache lines; never NULL.
static inline void *take(size_t bytes) {
    const size_t padded = bytes ? (bytes + 63) / 64 * 64 : 64;
    void *p = aligned_alloc(64, padded);
    if (!p) { printf("out of memory\n"); exit(1); }
    return memset(p, 0, padded);
}
#endif
