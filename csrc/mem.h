// SPDX-License-Identifier: MIT
// mem.h - the core's allocator: zeroed, aligned to cache lines, with failures on request for tests.
#ifndef LLAMAC_MEM_H
#define LLAMAC_MEM_H
#include <stddef.h>
#include "llamac.h"

// Zeroed memory of count * size bytes, aligned to 64. NULL and an error that says what it was for if there is none.
void *mem_alloc(size_t count, size_t size, const char *purpose, llamac_error *err);
// Likewise for memory that is large and often gone through: not zeroed, in huge pages where the system has them.
void *mem_alloc_huge(size_t bytes, const char *purpose, llamac_error *err);
void mem_free(void *memory);
// Counts models and sessions that are alive.
void mem_count_object(int change);
#endif
