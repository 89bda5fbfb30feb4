// SPDX-License-Identifier: MIT
// mem.h - the only way to the heap: zeroed memory, aligned to cache lines, counted, and able to fail on request.
#ifndef LLAMAC_MEM_H
#define LLAMAC_MEM_H
#include <stddef.h>
#include "llamac.h"

// Zeroed memory of count * size bytes, aligned to 64. NULL and an error that says what it was for if there is none.
void *mem_take(size_t count, size_t size, const char *purpose, llamac_error *err);
// Likewise for memory that is large and often gone through: not zeroed, in huge pages where the system has them.
void *mem_take_huge(size_t bytes, const char *purpose, llamac_error *err);
void mem_give(void *memory);
// Counts models and sessions that are alive.
void mem_count_object(int change);
#endif
