// SPDX-License-Identifier: MIT
// checks.h - what the runtime tells the checks of memory accesses (checks.cpp), which are in checked builds only.
#ifndef LLAMAC_EMULATOR_CHECKS_H
#define LLAMAC_EMULATOR_CHECKS_H
#include <stddef.h>
#include <stdint.h>

namespace emulator {

// What the checks ask the runtime.
struct Running { int number; const unsigned char *stack; size_t stack_bytes; };   // the thread, and its stack
Running running();
[[noreturn]] void report_access(const char *text);   // ends the launch

#ifdef EMULATOR_CHECKED
// ranges: the start and the end of each allocation, ascending.
void check_launch(const uint64_t *ranges, uint64_t n_ranges, uint64_t n_blocks);
void check_block(uint64_t block, const unsigned char *dynamic_shared, size_t bytes);
void check_barrier();            // every thread has arrived
void check_warp(int warp);       // every lane has called __syncwarp
void check_fence();
void check_atomic(const void *address, size_t bytes);
void check_access(const void *address, size_t bytes, bool writes, const void *caller);
void check_copy_issued(void *to, const void *from, size_t bytes, const void *caller);
void check_copy_arrives(void *to, const void *from, size_t bytes, const void *caller);   // its thread has waited for it
#else
inline void check_launch(const uint64_t *, uint64_t, uint64_t) {}
inline void check_block(uint64_t, const unsigned char *, size_t) {}
inline void check_barrier() {}
inline void check_warp(int) {}
inline void check_fence() {}
inline void check_atomic(const void *, size_t) {}
inline void check_access(const void *, size_t, bool, const void *) {}
inline void check_copy_issued(void *, const void *, size_t, const void *) {}
inline void check_copy_arrives(void *, const void *, size_t, const void *) {}
#endif

}  // namespace emulator
#endif
