// SPDX-License-Identifier: MIT
// mem.c - see mem.h.
#include "mem.h"

#include <stdlib.h>
#include <string.h>
#include "common.h"
#include "error.h"

static _Thread_local long allocations, fail_at;
static long live_objects;

void *mem_take(size_t count, size_t size, const char *purpose, llamac_error *err) {
    uint64_t bytes, padded;
    void *memory = NULL;
    int overflow = mul_overflows(count, size, &bytes) || add_overflows(bytes, 64, &padded) || padded > SIZE_MAX / 2;
    allocations++;
    int refused = fail_at && allocations == fail_at;
    if (!overflow && !refused) memory = aligned_alloc(64, round_up(bytes ? bytes : 1, 64));
    if (!memory) {
        err_set(err, LLAMAC_NO_MEMORY, "out of memory: %zu x %zu bytes for %s", count, size, purpose);
        return NULL;
    }
    return memset(memory, 0, round_up(bytes ? bytes : 1, 64));
}

void mem_give(void *memory) { free(memory); }

void mem_count_object(int change) { __atomic_add_fetch(&live_objects, change, __ATOMIC_RELAXED); }
long llamac_live_objects(void) { return __atomic_load_n(&live_objects, __ATOMIC_RELAXED); }

long llamac_test_fail_allocation(long n) {
    long so_far = allocations;
    allocations = 0;
    fail_at = n;
    return so_far;
}
