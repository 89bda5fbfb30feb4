// SPDX-License-Identifier: MIT
// runtime.cpp - runs the threads of a kernel on one thread of the CPU: blocks one after the other, the threads of a
// block as fibers, which switch where they wait. Linked to each library of kernels (build.py).
#include "cuda.h"
#include "checks.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#ifdef WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

// Not in .bss, which holds the kernels' shared memory and is poisoned before each block.
#define KEPT __attribute__((section(".data.emulator")))
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];

namespace emulator {

KEPT State state = {};

namespace {

enum { WARP_LANES = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP_LANES };
enum { STACK_BYTES = 256 << 10, GUARD_BYTES = 4096 };   // of a fiber; the guard is part of the stack
enum { POISON = 0xff };   // NaN in every float type

// ---- fibers

// A stack pointer that execution can continue from, and the stack that it points into.
struct Context {
    void *stack_pointer;
    unsigned char *stack;
    size_t stack_bytes;
    void *fake_stack;   // of ASan
#if !defined(__x86_64__) && !defined(__aarch64__)
    ucontext_t machine;
#endif
};

void fiber_start();   // where a new fiber begins

#if defined(__x86_64__)
extern "C" void emulator_switch(void **from, void *to);
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
void prepare(Context *context) {   // to begin at fiber_start
    void **top = reinterpret_cast<void **>(context->stack + context->stack_bytes);
    *--top = nullptr;   // the return address of fiber_start, which does not return; aligns its frame
    *--top = reinterpret_cast<void *>(fiber_start);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    context->stack_pointer = top;
}
void raw_switch(Context *from, Context *to) { emulator_switch(&from->stack_pointer, to->stack_pointer); }
#elif defined(__aarch64__)
extern "C" void emulator_switch(void **from, void *to);
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, %function
emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emulator_switch, .-emulator_switch
)");
void prepare(Context *context) {
    unsigned char *top = context->stack + context->stack_bytes - 160;
    memset(top, 0, 160);
    void *start = reinterpret_cast<void *>(fiber_start);
    memcpy(top + 88, &start, sizeof start);   // x30
    context->stack_pointer = top;
}
void raw_switch(Context *from, Context *to) { emulator_switch(&from->stack_pointer, to->stack_pointer); }
#else
void prepare(Context *context) {
    getcontext(&context->machine);
    context->machine.uc_stack.ss_sp = context->stack;
    context->machine.uc_stack.ss_size = context->stack_bytes;
    context->machine.uc_link = nullptr;
    makecontext(&context->machine, fiber_start, 0);
}
void raw_switch(Context *from, Context *to) { swapcontext(&from->machine, &to->machine); }
#endif

// ---- the running block

enum Status { NEW, READY, AT_BARRIER, IN_WARP, DONE };

struct Thread {
    Context context;
    uint3 index;
    int number;        // in the block
    Status status;
    Place place;       // where it waits
    Lane *lane;        // of the operation that it waits in
    int n_groups;      // of asynchronous copies, committed
};

// An asynchronous copy that has not happened. It happens when its thread waits for it, as late as a device may do it.
struct Copy { void *to; const void *from; size_t bytes; int group; };

// What emulator_launch gets from Python (_Launch of emulator.py has the same fields).
struct Launch {
    const Kernel *kernel;
    void *const *arguments;
    uint32_t grid[3], threads[3];
    uint64_t shared_bytes;
    const uint64_t *ranges;   // the start and the end of each allocation, ascending
    uint64_t n_ranges;
    uint64_t seed;       // 0: threads run in their order; else in a random order that it determines
    char error[1024];    // what failed, or ""
};

struct Runtime {
    Launch *launch;
    uint64_t random;
    Context main;
    Thread *current;
    Thread threads[MAX_THREADS];
    uint32_t waiting[MAX_WARPS];   // lanes in a warp operation
    int n_threads, n_at_barrier, n_done, failed;
    int ready[MAX_THREADS], n_ready;
    unsigned char *stacks[MAX_THREADS], *free_stacks[MAX_THREADS];
    int n_stacks, n_free;
};
KEPT Runtime *runtime = nullptr;
KEPT std::vector<Copy> *copies = nullptr;   // of each thread

uint64_t next_random() {   // xorshift64*
    uint64_t &x = runtime->random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    return x * 0x2545f4914f6cdd1du >> 16;
}

unsigned char *take_stack() {
    Runtime *r = runtime;
    if (r->n_free > 0) return r->free_stacks[--r->n_free];
    void *memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE)) abort();
    return r->stacks[r->n_stacks++] = static_cast<unsigned char *>(memory);
}
// The bytes of a stack that a fiber uses. The tops of stacks are staggered; otherwise they would share cache sets.
size_t usable(const unsigned char *stack) {
    return STACK_BYTES - reinterpret_cast<uintptr_t>(stack) / STACK_BYTES * 320 % 16384;
}
void give_stack(unsigned char *stack) { runtime->free_stacks[runtime->n_free++] = stack; }

void begin(Context *context, unsigned char *stack) {
    context->stack = stack;
    context->stack_bytes = usable(stack);
    prepare(context);
}

void switch_to(Context *from, Context *to, bool from_ends) {
#ifdef WITH_ASAN
    __sanitizer_start_switch_fiber(from_ends ? nullptr : &from->fake_stack, to->stack, to->stack_bytes);
    raw_switch(from, to);
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#else
    (void)from_ends;
    raw_switch(from, to);
#endif
}

// The thread that runs next, or NULL if none can.
Thread *pick() {
    Runtime *r = runtime;
    if (r->n_ready == 0) return nullptr;
    if (r->launch->seed) {
        const int chosen = (int)(next_random() % (uint64_t)r->n_ready), last = r->n_ready - 1;
        const int number = r->ready[chosen];
        r->ready[chosen] = r->ready[last];
        r->ready[last] = number;
    }
    return &r->threads[r->ready[--r->n_ready]];
}
void make_ready(Thread *thread) {
    thread->status = READY;
    runtime->ready[runtime->n_ready++] = thread->number;
}
void enter(Thread *thread) {
    runtime->current = thread;
    state.thread = thread->index;
}

// Continues with another thread; returns when the running one has become ready and its turn has come.
void wait_in_line() {
    Runtime *r = runtime;
    Thread *self = r->current, *next = pick();
    if (next == self) return enter(self);
    if (next) {
        if (next->status == NEW) {
            begin(&next->context, take_stack());
        }
        enter(next);
    }
    switch_to(&self->context, next ? &next->context : &r->main, false);
}

void fiber_start() {
    Runtime *r = runtime;
#ifdef WITH_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (!r->main.stack) {
        r->main.stack = static_cast<unsigned char *>(const_cast<void *>(bottom));
        r->main.stack_bytes = bytes;
    }
#endif
    for (;;) {
        Thread *self = r->current;
        self->status = READY;
        self->n_groups = 0;
        copies[self->number].clear();
        r->launch->kernel->call(r->launch->arguments);
        self->status = DONE;
        r->n_done++;
        Thread *next = pick();
        if (next && next->status == NEW) {   // it runs on this stack
            next->context.stack = self->context.stack;
            next->context.stack_bytes = self->context.stack_bytes;
            enter(next);
            continue;
        }
        give_stack(self->context.stack);
        if (next) enter(next);
        switch_to(&self->context, next ? &next->context : &r->main, true);
    }
}

const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

__attribute__((format(printf, 1, 2))) void report(const char *format, ...) {
    Launch *launch = runtime->launch;
    if (launch->error[0]) return;
    int n = snprintf(launch->error, sizeof launch->error, "kernel %s, block (%u, %u, %u): ", launch->kernel->name,
                     state.block.x, state.block.y, state.block.z);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(launch->error + n, sizeof launch->error - (size_t)n, format, arguments);
    va_end(arguments);
}

// Ends the launch after a report.
[[noreturn]] void give_up() {
    runtime->failed = 1;
    switch_to(&runtime->current->context, &runtime->main, true);
    abort();
}

#define THREAD "thread (%u, %u, %u)"
#define INDEX(thread) (thread)->index.x, (thread)->index.y, (thread)->index.z
#define PLACE(place) base_name((place).file), (place).line

// No thread can run, but not all have returned.
void report_deadlock() {
    const Runtime *r = runtime;
    const Thread *waiting = nullptr, *other = nullptr;
    for (int i = 0; i < r->n_threads && !waiting; i++)
        if (r->threads[i].status == IN_WARP || r->threads[i].status == AT_BARRIER) waiting = &r->threads[i];
    for (int i = 0; i < r->n_threads && !other; i++) {
        const Thread *thread = &r->threads[i];
        const bool expected = waiting->status == AT_BARRIER ||
            (thread->number / WARP_LANES == waiting->number / WARP_LANES &&
             (waiting->lane->mask >> (thread->number % WARP_LANES) & 1));
        if (expected && (thread->status != waiting->status || thread->place.line != waiting->place.line))
            other = thread;
    }
    const char *what = waiting->status == AT_BARRIER ? "barrier" : "warp operation";
    if (!other)
        report(THREAD " waits at %s:%d for lanes that the block does not have", INDEX(waiting), PLACE(waiting->place));
    else if (other->status == DONE)
        report(THREAD " waits at the %s at %s:%d, but " THREAD " has returned", INDEX(waiting), what,
               PLACE(waiting->place), INDEX(other));
    else
        report(THREAD " waits at the %s at %s:%d, but " THREAD " waits at %s:%d", INDEX(waiting), what,
               PLACE(waiting->place), INDEX(other), PLACE(other->place));
}

void run_block() {
    Runtime *r = runtime;
    r->n_at_barrier = r->n_done = r->n_ready = 0;
    memset(r->waiting, 0, sizeof r->waiting);
#ifndef WITH_ASAN   // ASan forbids access to the gaps between variables
    memset(__bss_start, POISON, (size_t)(_end - __bss_start));
#endif
    memset(state.dynamic_shared, POISON, r->launch->shared_bytes);
    for (int i = r->n_threads - 1; i >= 0; i--) {   // thread 0 is on top
        r->threads[i].status = NEW;
        r->ready[r->n_ready++] = i;
    }
    Thread *first = pick();
    begin(&first->context, take_stack());
    enter(first);
    switch_to(&r->main, &first->context, false);
    if (!r->failed && r->n_done < r->n_threads) {
        report_deadlock();
        r->failed = 1;
    }
}

// The product of a 16 x 32 matrix and a 32 x 8 matrix of int8, added to 16 x 8 sums, in the fragments of
// mma.m16n8k32: lane l has columns (bytes) 4 (l % 4) + i of row l / 4 of `a` in its first word, of row l / 4 + 8 in its
// second, and 16 columns further in the third and fourth; of `b`, rows 4 (l % 4) + i of column l / 4, and 16 rows
// further; of the sums, row l / 4 (then l / 4 + 8), columns 2 (l % 4) and 2 (l % 4) + 1.
void multiply_s8(Lane *const *lanes) {
    int8_t a[16][32], b[8][32];
    for (int lane = 0; lane < WARP_LANES; lane++)
        for (int i = 0; i < 16; i++) {
            const int word = i / 4, column = 4 * (lane % 4) + i % 4;
            a[lane / 4 + word % 2 * 8][column + word / 2 * 16] = (int8_t)(lanes[lane]->a[word] >> 8 * (i % 4));
            if (word < 2) b[lane / 4][column + word * 16] = (int8_t)(lanes[lane]->b[word] >> 8 * (i % 4));
        }
    for (int lane = 0; lane < WARP_LANES; lane++)
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 32; k++)
                lanes[lane]->sums[i] += a[lane / 4 + i / 2 * 8][k] * b[2 * (lane % 4) + i % 2][k];
}

// Every lane of the mask has arrived: computes their results.
void complete(unsigned mask, Thread *warp, Thread *self) {
    Lane *lanes[WARP_LANES] = {};
    uint64_t values[WARP_LANES] = {};
    unsigned ballot = 0;
    int sum = 0, least = INT32_MAX, greatest = INT32_MIN;
    for (int i = 0; i < WARP_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        const Thread *thread = &warp[i];
        lanes[i] = thread->lane;
        if (lanes[i]->mask != mask || lanes[i]->operation != self->lane->operation ||
            thread->place.line != self->place.line) {
            report(THREAD " is in the warp operation at %s:%d, " THREAD " in another at %s:%d, or their masks differ",
                   INDEX(self), PLACE(self->place), INDEX(thread), PLACE(thread->place));
            give_up();
        }
        values[i] = lanes[i]->value;
        const int value = (int)(uint32_t)values[i];
        ballot |= (unsigned)(value & 1) << i;
        sum = (int)((unsigned)sum + (unsigned)value);
        if (value < least) least = value;
        if (value > greatest) greatest = value;
    }
    switch (self->lane->operation) {
    case SYNC: return;
    case MMA_S8:
        if (mask != 0xffffffff) fail("mma needs a full warp", self->place);
        return multiply_s8(lanes);
    case SHUFFLE:
        for (int i = 0; i < WARP_LANES; i++) {
            if (!lanes[i]) continue;
            const int source = lanes[i]->source & 31;
            if (!(mask >> source & 1)) fail("a lane shuffles from a lane outside the mask", self->place);
            lanes[i]->value = values[source];
        }
        return;
    case BALLOT: case ADD: case MIN: case MAX: break;
    }
    const WarpOperation operation = self->lane->operation;
    const int number = operation == ADD ? sum : operation == MIN ? least : greatest;
    for (int i = 0; i < WARP_LANES; i++)
        if (lanes[i]) lanes[i]->value = operation == BALLOT ? ballot : (uint32_t)number;
}

}  // namespace

// ---- what kernels call

void fail(const char *what, Place place) {
    report(THREAD ", %s:%d: %s", INDEX(runtime->current), PLACE(place), what);
    give_up();
}

int lane_number() { return runtime->current->number % WARP_LANES; }

void barrier(Place place) {
    Runtime *r = runtime;
    Thread *self = r->current;
    self->status = AT_BARRIER;
    self->place = place;
    if (++r->n_at_barrier == r->n_threads) {
        for (int i = r->n_threads - 1; i >= 0; i--) {
            Thread *thread = &r->threads[i];
            if (thread->place.line != place.line || strcmp(thread->place.file, place.file) != 0) {
                report(THREAD " waits at the barrier at %s:%d, but " THREAD " at that at %s:%d", INDEX(self),
                       PLACE(place), INDEX(thread), PLACE(thread->place));
                give_up();
            }
            make_ready(thread);
        }
        r->n_at_barrier = 0;
        check_barrier();
    }
    wait_in_line();
}

void warp_operation(Lane *lane, Place place) {
    Runtime *r = runtime;
    Thread *self = r->current;
    const int warp = self->number / WARP_LANES, first = warp * WARP_LANES;
    const unsigned bit = 1u << (self->number - first), mask = lane->mask;
    if (!(mask & bit)) fail("a lane calls a warp operation whose mask excludes it", place);
    self->status = IN_WARP;
    self->place = place;
    self->lane = lane;
    r->waiting[warp] |= bit;
    if ((r->waiting[warp] & mask) == mask) {
        complete(mask, &r->threads[first], self);
        if (lane->operation == SYNC && mask == 0xffffffff) check_warp(warp);
        for (int i = WARP_LANES - 1; i >= 0; i--)
            if (mask >> i & 1) make_ready(&r->threads[first + i]);
        r->waiting[warp] &= ~mask;
    }
    wait_in_line();
}

void fence() { check_fence(); }
void atomic(const void *address, size_t bytes) { check_atomic(address, bytes); }

void copy_async(void *to, const void *from, size_t bytes) {
    const Thread *self = runtime->current;
    check_copy_issued(to, from, bytes, __builtin_return_address(0));
    copies[self->number].push_back({to, from, bytes, self->n_groups});
}
void copy_async_commit() { runtime->current->n_groups++; }
void copy_async_wait(int groups) {
    const Thread *self = runtime->current;
    std::vector<Copy> &waiting = copies[self->number];
    size_t kept = 0;
    for (const Copy &copy : waiting) {
        if (copy.group >= self->n_groups - groups) {
            waiting[kept++] = copy;
            continue;
        }
        check_copy_arrives(copy.to, copy.from, copy.bytes, __builtin_return_address(0));
        memcpy(copy.to, copy.from, copy.bytes);
    }
    waiting.resize(kept);
}

// ---- what the checks ask

Running running() {
    const Thread *self = runtime->current;
    return {self->number, self->context.stack, STACK_BYTES};
}
void report_access(const char *text) {
    report("%s", text);
    give_up();
}

}  // namespace emulator

// Runs a kernel. Returns 0, or 1 with `error` set.
extern "C" __attribute__((visibility("default"))) int emulator_launch(emulator::Launch *launch) {
    using namespace emulator;
    if (!runtime) {
        runtime = static_cast<Runtime *>(calloc(1, sizeof *runtime));
        copies = new std::vector<Copy>[MAX_THREADS];
    }
    Runtime *r = runtime;
    r->launch = launch;
    r->random = launch->seed * 0x9e3779b97f4a7c15u | 1;
    r->failed = 0;
    r->main.stack = nullptr;
    r->n_free = r->n_stacks;   // also those of a launch that failed
    memcpy(r->free_stacks, r->stacks, sizeof r->stacks);
    launch->error[0] = 0;
    state.grid = {launch->grid[0], launch->grid[1], launch->grid[2]};
    state.threads = {launch->threads[0], launch->threads[1], launch->threads[2]};
    r->n_threads = (int)(state.threads.x * state.threads.y * state.threads.z);
    for (int i = 0; i < r->n_threads; i++) {
        const unsigned x = state.threads.x, y = state.threads.y, n = (unsigned)i;
        r->threads[i].number = i;
        r->threads[i].index = {n % x, n / x % y, n / x / y};
    }
    void *shared = nullptr;
    const uint64_t n_blocks = (uint64_t)state.grid.x * state.grid.y * state.grid.z;
    uint64_t *order = static_cast<uint64_t *>(malloc((n_blocks + 1) * sizeof *order));
    if (!order || posix_memalign(&shared, 128, launch->shared_bytes ? launch->shared_bytes : 1)) {
        free(order);
        snprintf(launch->error, sizeof launch->error, "out of memory");
        return 1;
    }
    state.dynamic_shared = static_cast<unsigned char *>(shared);
    for (uint64_t i = 0; i < n_blocks; i++) {
        const uint64_t place = launch->seed ? next_random() % (i + 1) : i;
        order[i] = order[place];
        order[place] = i;
    }
    check_launch(launch->ranges, launch->n_ranges, n_blocks);
    for (uint64_t i = 0; i < n_blocks && !r->failed; i++) {
        const uint64_t x = state.grid.x, y = state.grid.y, n = order[i];
        state.block = {(unsigned)(n % x), (unsigned)(n / x % y), (unsigned)(n / x / y)};
        check_block(n, state.dynamic_shared, launch->shared_bytes);
        run_block();
    }
#ifdef WITH_ASAN
    if (r->failed)
        for (int i = 0; i < r->n_stacks; i++)
            __asan_unpoison_memory_region(r->stacks[i] + GUARD_BYTES, STACK_BYTES - GUARD_BYTES);
#endif
    free(shared);
    free(order);
    return r->failed;
}
