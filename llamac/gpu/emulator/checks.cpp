// SPDX-License-Identifier: MIT
// checks.cpp - checks every access of a kernel to memory: that it is inside of an allocation or of the block's shared
// memory, and that accesses to the same byte, one of them a write, are ordered. (Every build fills new memory with
// poison, a NaN.) Kernels of a checked build are compiled with -fsanitize=thread, which calls the functions at
// the end of this file; ThreadSanitizer itself is not linked.
//
// Accesses are ordered if they are those of one thread; of a block, with a barrier between them; of a warp, with a
// __syncwarp between them; or of two blocks, the first after a __threadfence, the second after an atomic operation.
//
// An asynchronous copy may write at any time between its issue and the end of its thread's wait. So what others did
// before must be ordered before its issue, what they do later after that wait, and until then no one may access what it
// writes. What it reads counts as read at its issue and after the wait: a write in between, by its own thread or with a
// barrier on either side, is not found.
#ifdef EMULATOR_CHECKED
#include "checks.h"
#include "cuda.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <unordered_map>
#include <vector>

extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];

namespace emulator {
namespace {

enum { WARP_LANES = 32, MAX_WARPS = 32, PAGE_BYTES = 64 };

struct Access {
    uint32_t block;      // its number + 1; 0: no access
    uint32_t barriers, warp_barriers;   // how many the thread had passed
    uint32_t caller;     // the instruction, as an offset in the library
    int thread;
};
struct Byte {
    // The last write; reads since then by two threads, if possible of two warps. In device memory, a block's
    // reads replace those of an earlier block.
    Access write, reads[2];
    bool is_arriving;         // the write is an asynchronous copy, which its thread has not waited for yet
};
struct Page { Byte bytes[PAGE_BYTES]; };

struct Checks {
    const uint64_t *ranges;
    uint64_t n_ranges;
    uint32_t block;          // the running block's number + 1
    bool acquired;           // it has called an atomic operation
    uint32_t barriers, warp_barriers[MAX_WARPS];
    std::vector<bool> fenced;   // blocks that have called __threadfence
    std::vector<Byte> static_shared, dynamic_shared;
    const unsigned char *dynamic;
    std::unordered_map<uint64_t, Page> pages;   // of device memory, by address / PAGE_BYTES
    uint64_t library_start, library_end;
};
__attribute__((section(".data.emulator"))) Checks *checks = nullptr;   // not in .bss, the shared memory

uint64_t number(const void *address) { return reinterpret_cast<uint64_t>(address); }

void find_library(Checks *c) {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void *>(&check_access), &info)) abort();
    c->library_start = number(info.dli_fbase);
    dl_iterate_phdr([](dl_phdr_info *object, size_t, void *data) {
        Checks *checks = static_cast<Checks *>(data);
        if (object->dlpi_addr != checks->library_start) return 0;
        for (int i = 0; i < object->dlpi_phnum; i++) {
            const uint64_t end = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr + object->dlpi_phdr[i].p_memsz;
            if (object->dlpi_phdr[i].p_type == PT_LOAD && end > checks->library_end) checks->library_end = end;
        }
        return 1;
    }, c);
}

bool ordered(const Access &before, const Access &now) {
    const Checks *c = checks;
    if (!before.block) return true;
    if (before.block != now.block) return c->acquired && c->fenced[before.block - 1];
    if (before.thread == now.thread || before.barriers < now.barriers) return true;
    return before.thread / WARP_LANES == now.thread / WARP_LANES && before.warp_barriers < now.warp_barriers;
}

struct Where { const char *memory; uint64_t offset, bytes; };   // for messages

// Describes an access by its thread's indices and {pc:N}, which emulator.py replaces by the line.
void describe(char *text, size_t bytes, const Access &access) {
    const unsigned b = access.block - 1, t = (unsigned)access.thread, x = state.threads.x, y = state.threads.y;
    char block[80] = "";
    if (access.block != checks->block)
        snprintf(block, sizeof block, " of block (%u, %u, %u)", b % state.grid.x, b / state.grid.x % state.grid.y,
                 b / state.grid.x / state.grid.y);
    snprintf(text, bytes, "thread (%u, %u, %u)%s, {pc:%x},", t % x, t / x % y, t / x / y, block, access.caller);
}

[[noreturn]] void complain(const Access &now, bool writes, size_t bytes, const Where &where, const char *problem) {
    char who[160], text[700];
    describe(who, sizeof who, now);
    snprintf(text, sizeof text, "%s %s %zu bytes %s (byte %llu of %llu)%s", who, writes ? "writes" : "reads", bytes,
             where.memory, (unsigned long long)where.offset, (unsigned long long)where.bytes, problem);
    report_access(text);
}

void check_byte(Byte *byte, const Access &now, bool writes, size_t bytes, const Where &where) {
    const Access *conflict = ordered(byte->write, now) && !byte->is_arriving ? nullptr : &byte->write;
    if (writes && !conflict)
        for (const Access &read : byte->reads)
            if (!ordered(read, now)) conflict = &read;
    if (conflict) {
        char other[160], problem[240];
        describe(other, sizeof other, *conflict);
        snprintf(problem, sizeof problem, ", which %s %s", other,
                 byte->is_arriving ? "copies in the background, and has not waited for"
                 : conflict == &byte->write ? "wrote, and nothing orders the two" : "read, and nothing orders the two");
        complain(now, writes, bytes, where, problem);
    }
    if (writes) {
        *byte = {now, {}, false};
        return;
    }
    Access *kept = byte->reads;   // what the new read replaces: one that is ordered before it, or the second
    if (!ordered(*kept, now)) {
        const Access &first = *kept++;
        // Two warps' reads suffice: whoever writes before the next barrier is in conflict with one of them.
        if (first.block == now.block && kept->block == now.block && kept->barriers == now.barriers &&
            kept->thread / WARP_LANES != first.thread / WARP_LANES)
            return;
    }
    *kept = now;
}

Access access_of(const Running &thread, const void *caller) {
    const Checks *c = checks;
    return {c->block, c->barriers, c->warp_barriers[thread.number / WARP_LANES],
            (uint32_t)(number(caller) - 1 - c->library_start), thread.number};
}

// Returns the records of a block's shared memory from an address on; NULL if the address is elsewhere.
Byte *shared_bytes(uint64_t address, Where *where) {
    Checks *c = checks;
    if (address >= number(c->dynamic) && address < number(c->dynamic) + c->dynamic_shared.size()) {
        *where = {"of shared memory", address - number(c->dynamic), c->dynamic_shared.size()};
        return c->dynamic_shared.data() + where->offset;
    }
    if (address >= number(__bss_start) && address < number(_end)) {
        *where = {"of shared memory", address - number(__bss_start), c->static_shared.size()};
        return c->static_shared.data() + where->offset;
    }
    *where = {"of device memory", 0, 0};
    return nullptr;
}

// Complains unless an allocation contains all of the bytes from `start` on.
void find_allocation(uint64_t start, uint64_t bytes, const Access &now, bool writes, Where *where) {
    const Checks *c = checks;
    uint64_t low = 0, high = c->n_ranges;   // the last range that starts at or before the address
    while (low < high) {
        const uint64_t middle = (low + high) / 2;
        if (c->ranges[2 * middle] <= start) low = middle + 1;
        else high = middle;
    }
    if (low == 0) complain(now, writes, bytes, *where, ", at an address before every allocation");
    const uint64_t first = c->ranges[2 * low - 2], end = c->ranges[2 * low - 1];
    where->offset = start - first, where->bytes = end - first;
    if (start + bytes > end) complain(now, writes, bytes, *where, ", past the end of the allocation");
}

}  // namespace

void check_launch(const uint64_t *ranges, uint64_t n_ranges, uint64_t n_blocks) {
    if (!checks) find_library(checks = new Checks());
    Checks *c = checks;
    c->ranges = ranges;
    c->n_ranges = n_ranges;
    c->fenced.assign(n_blocks, false);
    c->pages.clear();
}

void check_block(uint64_t block, const unsigned char *dynamic_shared, size_t bytes) {
    Checks *c = checks;
    c->block = (uint32_t)block + 1;
    c->acquired = false;
    c->barriers = 0;
    memset(c->warp_barriers, 0, sizeof c->warp_barriers);
    c->static_shared.assign((size_t)(_end - __bss_start), Byte());
    c->dynamic_shared.assign(bytes, Byte());
    c->dynamic = dynamic_shared;
}

void check_barrier() { checks->barriers++; }
void check_warp(int warp) { checks->warp_barriers[warp]++; }
void check_fence() { checks->fenced[checks->block - 1] = true; }

// Atomic operations are ordered among themselves. Their writes are not recorded.
void check_atomic(const void *address, size_t bytes) {
    Checks *c = checks;
    c->acquired = true;
    for (uint64_t i = 0; i < c->n_ranges; i++)
        if (number(address) >= c->ranges[2 * i] && number(address) + bytes <= c->ranges[2 * i + 1]) return;
    Where where;
    const Byte *shadow = shared_bytes(number(address), &where);
    if (!shadow) report_access("an atomic operation outside of every allocation");
    for (size_t i = 0; i < bytes; i++)
        if (shadow[i].is_arriving) report_access("an atomic operation on what a thread copies in the background");
}

void check_access(const void *address, size_t bytes, bool writes, const void *caller) {
    Checks *c = checks;
    const uint64_t start = number(address), end = start + bytes;
    const Running thread = running();
    if (start >= number(thread.stack) && end <= number(thread.stack) + thread.stack_bytes) return;
    const Access now = access_of(thread, caller);
    Where where;
    if (Byte *shadow = shared_bytes(start, &where)) {
        if (where.offset + bytes > where.bytes) complain(now, writes, bytes, where, ", past its end");
        for (size_t i = 0; i < bytes; i++) check_byte(&shadow[i], now, writes, bytes, where);
        return;
    }
    if (start >= c->library_start && end <= c->library_end) return;   // constants
    find_allocation(start, bytes, now, writes, &where);
    for (uint64_t at = start; at < end; at++)
        check_byte(&c->pages[at / PAGE_BYTES].bytes[at % PAGE_BYTES], now, writes, bytes, where);
}

void check_copy_issued(void *to, const void *from, size_t bytes, const void *caller) {
    check_access(from, bytes, false, caller);
    check_access(to, bytes, true, caller);
    Where where;
    Byte *shadow = shared_bytes(number(to), &where);
    if (!shadow) {
        const Access now = access_of(running(), caller);
        find_allocation(number(to), bytes, now, true, &where);
        complain(now, true, bytes, where, ", which is not shared");
    }
    for (size_t i = 0; i < bytes; i++) shadow[i].is_arriving = true;
}

void check_copy_arrives(void *to, const void *from, size_t bytes, const void *caller) {
    Where where;
    Byte *shadow = shared_bytes(number(to), &where);
    for (size_t i = 0; i < bytes; i++) shadow[i].is_arriving = false;
    check_access(from, bytes, false, caller);
    check_access(to, bytes, true, caller);
}

}  // namespace emulator

// ---- the functions of ThreadSanitizer that compilers call

#define CALLED extern "C" __attribute__((visibility("hidden"), used)) void
#define CALLER __builtin_return_address(0)
#define ACCESSES(bytes) \
    CALLED __tsan_read##bytes(void *p) { emulator::check_access(p, bytes, false, CALLER); } \
    CALLED __tsan_write##bytes(void *p) { emulator::check_access(p, bytes, true, CALLER); } \
    CALLED __tsan_volatile_read##bytes(void *p) { emulator::check_access(p, bytes, false, CALLER); } \
    CALLED __tsan_volatile_write##bytes(void *p) { emulator::check_access(p, bytes, true, CALLER); } \
    CALLED __tsan_unaligned_read##bytes(void *p) { emulator::check_access(p, bytes, false, CALLER); } \
    CALLED __tsan_unaligned_write##bytes(void *p) { emulator::check_access(p, bytes, true, CALLER); } \
    CALLED __tsan_read_write##bytes(void *p) { emulator::check_access(p, bytes, true, CALLER); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
CALLED __tsan_read_range(void *p, size_t bytes) { emulator::check_access(p, bytes, false, CALLER); }
CALLED __tsan_write_range(void *p, size_t bytes) { emulator::check_access(p, bytes, true, CALLER); }
CALLED __tsan_func_entry(void *) {}
CALLED __tsan_func_exit() {}
CALLED __tsan_init() {}
extern "C" __attribute__((visibility("hidden"), used)) void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    emulator::check_access(from, bytes, false, CALLER);
    emulator::check_access(to, bytes, true, CALLER);
    return memcpy(to, from, bytes);
}
extern "C" __attribute__((visibility("hidden"), used)) void *__tsan_memset(void *to, int byte, size_t bytes) {
    emulator::check_access(to, bytes, true, CALLER);
    return memset(to, byte, bytes);
}
#endif
