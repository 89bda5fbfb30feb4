// SPDX-License-Identifier: MIT
// mem.h - the core's allocator: aligned to cache lines. Tests can make allocations fail.
#ifndef LLAMAC_MEM_H
#define LLAMAC_MEM_H
#include <stddef.h>
#include "llamac.h"

#if defined(__SANITIZE_ADDRESS__)
#define EXACT_BLOCKS 1   // AddressSanitizer misses overflows into slack after a block
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EXACT_BLOCKS 1
#endif
#endif
// Fills memory that is not zeroed in builds with EXACT_BLOCKS. Read as floats it is NaN, which shows in results.
enum { POISON = 0xff };

// Allocates count * size bytes, zeroed and aligned to 64. On failure returns NULL and fills err; the message names the
// purpose.
void *mem_alloc(size_t count, size_t size, const char *purpose, llamac_error *err);
// The same for large blocks that are often read sequentially: not zeroed, in huge pages if available.
void *mem_alloc_huge(size_t bytes, const char *purpose, llamac_error *err);
// Frees memory of either function. Accepts NULL.
void mem_free(void *memory);
// Adds `change` to the number of open models and sessions.
void mem_count_object(int change);

// ---- for tests of the core; not part of the library

// Makes the core's n-th allocation from now on fail, whichever thread wants it; negative: the -n-th and all later ones;
// 0: none. Returns the number of allocations since the last call.
long llamac_test_fail_allocation(long n);
// Returns the number of open models and sessions in this process.
long llamac_live_objects(void);
#endif
