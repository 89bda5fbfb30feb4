// SPDX-License-Identifier: MIT
// mem.c - the allocator. See mem.h.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE   // madvise
#endif
#include "mem.h"

#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include "common.h"
#include "error.h"
#include "nodes.h"

static long allocations, fail_at, live_objects;   // of all threads

// Returns NULL if the system has no memory, or if a test wants this allocation to fail.
//
// Does not use aligned_alloc: glibc cuts an aligned block out of a larger one and cannot reuse the rest for the next
// aligned block, so the heap of a process grew by 58 KB each time it opened and closed a model. A plain block with room
// to align is reused whole.
static void *allocate(size_t alignment, size_t bytes) {
    const long number = __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    const long at = __atomic_load_n(&fail_at, __ATOMIC_RELAXED);
    if (number == at || (at < 0 && number >= -at) || bytes > SIZE_MAX / 2) return NULL;
#if defined(EXACT_BLOCKS)
    return aligned_alloc(alignment, round_up(bytes ? bytes : 1, alignment));
#else
    uint8_t *block = malloc(bytes + alignment + sizeof block);
    if (!block) return NULL;
    uint8_t *memory = block + sizeof block;
    memory += -(uintptr_t)memory % alignment;
    memcpy(memory - sizeof block, &block, sizeof block);   // for mem_free
    return memory;
#endif
}

void mem_free(void *memory) {
#if !defined(EXACT_BLOCKS)
    if (memory) memcpy(&memory, (uint8_t *)memory - sizeof memory, sizeof memory);
#endif
    free(memory);
}

void *mem_alloc(size_t count, size_t size, const char *purpose, llamac_error *err) {
    uint64_t bytes;
    void *memory = mul_overflows(count, size, &bytes) ? NULL : allocate(64, bytes);
    if (memory) return memset(memory, 0, bytes);
    err_set(err, LLAMAC_NO_MEMORY, "out of memory: %zu x %zu bytes for %s", count, size, purpose);
    return NULL;
}

enum { HUGE_PAGE = 2 << 20 };

void *mem_alloc_huge(size_t bytes, const char *purpose, llamac_error *err) {
    void *memory = allocate(bytes < HUGE_PAGE ? 64 : HUGE_PAGE, bytes);
    if (!memory) {
        err_set(err, LLAMAC_NO_MEMORY, "out of memory: %zu bytes for %s", bytes, purpose);
        return NULL;
    }
#if defined(MADV_HUGEPAGE)
    // Advises on whole huge pages only, so that the rest of the block takes no more memory than it needs. A refusal is
    // harmless. With several NUMA nodes, the first thread to write to a page decides where it lies: small pages keep
    // the parts of different threads apart.
    const int advice = nodes_are_several() ? MADV_NOHUGEPAGE : MADV_HUGEPAGE;
    if (bytes >= HUGE_PAGE) (void)madvise(memory, bytes / HUGE_PAGE * HUGE_PAGE, advice);
#endif
    return memory;
}

void mem_count_object(int change) { __atomic_add_fetch(&live_objects, change, __ATOMIC_RELAXED); }
long llamac_live_objects(void) { return __atomic_load_n(&live_objects, __ATOMIC_RELAXED); }

long llamac_test_fail_allocation(long n) {
    __atomic_store_n(&fail_at, 0, __ATOMIC_RELAXED);   // so that no other thread meets n with the old count
    const long so_far = __atomic_exchange_n(&allocations, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&fail_at, n, __ATOMIC_RELAXED);
    return so_far;
}
