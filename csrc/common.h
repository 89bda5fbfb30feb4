// SPDX-License-Identifier: MIT
// common.h - small helpers for every file of the core: integers, sizes, partitions. Includes no other header of the
// core.
#ifndef LLAMAC_COMMON_H
#define LLAMAC_COMMON_H
#include <stddef.h>
#include <stdint.h>

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }
static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Splits n items into `shares` contiguous shares whose sizes differ by at most 1. Returns the first item of a share,
// which is also the end of the share before it; share_start(n, shares, shares) is n.
static inline int share_start(int n, int share, int shares) { return (int)((int64_t)n * share / shares); }

// Checked arithmetic for sizes that come from a file or a caller. Returns 1 on overflow.
static inline int mul_overflows(uint64_t a, uint64_t b, uint64_t *product) {
    return __builtin_mul_overflow(a, b, product);
}
static inline int add_overflows(uint64_t a, uint64_t b, uint64_t *sum) { return __builtin_add_overflow(a, b, sum); }

// Rounds up to a multiple of a power of two. The caller rules out overflow.
static inline uint64_t round_up(uint64_t x, uint64_t power_of_two) {
    return (x + power_of_two - 1) & ~(power_of_two - 1);
}

// Compact kernels with the same accesses to memory, which compile several times faster under sanitizers: loops stay
// loops, all heights and dtypes share the code of a tile, and the operations of the scalar kernels are functions.
#if defined(LLAMAC_SMALL_KERNELS)
#undef UNROLL
#define UNROLL
#define SPECIALIZED static __attribute__((noinline, unused))
#endif

#endif
