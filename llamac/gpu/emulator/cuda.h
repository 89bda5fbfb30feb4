// SPDX-License-Identifier: MIT
// cuda.h - the CUDA language on a CPU, as far as the kernels use it: a kernel's text, with this header before it, is
// C++20. runtime.cpp runs its threads. Every operation rounds as the device's does; compile with -ffp-contract=off.
//
// Stricter than a device: a barrier or warp operation that some of its threads never reach is an error, even if they
// have returned, and so is a shuffle from a lane outside the mask. Not here: clusters, cooperative grids, textures.
#ifndef LLAMAC_EMULATOR_CUDA_H
#define LLAMAC_EMULATOR_CUDA_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <type_traits>
#include <utility>

#define LLAMAC_EMULATOR 1

// The build first preprocesses a kernel's text with __global__ kept as it is, to find the kernels (build.py).
#ifndef __global__
#define __global__
#endif
#define __device__
#define __host__
#define __constant__ static const
#if defined(__SANITIZE_ADDRESS__)   // compiling takes longer than running: one copy of each function
#define __forceinline__ inline
#else
#define __forceinline__ inline __attribute__((always_inline))
#endif
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((unused))   // of the block that runs: blocks run one after the other
#define __grid_constant__

// ---- types

struct dim3 { unsigned x, y, z; };
typedef dim3 uint3;
struct __align__(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(16) double2 { double x, y; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- the runtime (runtime.cpp)

namespace emulator {

struct Place { const char *file; int line; };   // in a kernel's text, for messages

// Where the running thread is, and what its launch has.
struct State {
    uint3 thread, block;
    dim3 threads, grid;
    unsigned char *dynamic_shared;
};
extern State state;

enum WarpOperation { SYNC, SHUFFLE, BALLOT, ADD, MIN, MAX, MMA_S8 };

// A lane's operands of a warp operation, and its result.
struct Lane {
    WarpOperation operation;
    unsigned mask;
    uint64_t value;        // of the lane; then its result
    int source;            // of a shuffle
    const uint32_t *a, *b; // of MMA_S8
    int32_t *sums;
};

void barrier(Place place);                       // __syncthreads
void warp_operation(Lane *lane, Place place);    // returns when all lanes of the mask have called it
void fence();                                    // __threadfence: what the thread has written is visible to all
void atomic(const void *address, size_t bytes);  // called before an atomic operation
void copy_async(void *to, const void *from, size_t bytes);   // of device.cuh: copies as late as allowed
void copy_async_commit();
void copy_async_wait(int groups);
[[noreturn]] void fail(const char *what, Place place);
int lane_number();

template <class T> T exchange(WarpOperation operation, unsigned mask, T value, int source, Place place) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    Lane lane = {operation, mask, 0, source, nullptr, nullptr, nullptr};
    memcpy(&lane.value, &value, sizeof value);
    warp_operation(&lane, place);
    memcpy(&value, &lane.value, sizeof value);
    return value;
}

#define EMULATOR_UNCHECKED __attribute__((noinline, no_sanitize("thread")))   // by checks.cpp

// A kernel as the launch sees it. kinds: a letter for each parameter: p pointer or uint64_t, i int32_t, f float,
// ? another type.
struct Kernel { const char *name, *kinds; void (*call)(void *const *arguments); };

template <class T> constexpr char kind() {
    if (std::is_pointer_v<T> || std::is_same_v<T, uint64_t> || std::is_same_v<T, unsigned long long>) return 'p';
    if (std::is_same_v<T, int32_t>) return 'i';
    return std::is_same_v<T, float> ? 'f' : '?';
}
template <auto kernel> struct Call;
template <class... A, void (*kernel)(A...)> struct Call<kernel> {
    static constexpr char kinds[] = {kind<A>()..., 0};
    template <size_t... I> EMULATOR_UNCHECKED static void unpack(void *const *arguments, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_cv_t<A> *>(arguments[I])...);
    }
    EMULATOR_UNCHECKED static void call(void *const *arguments) { unpack(arguments, std::index_sequence_for<A...>()); }
};
template <auto kernel> constexpr Kernel describe(const char *name) {
    return {name, Call<kernel>::kinds, Call<kernel>::call};
}

}  // namespace emulator

#define threadIdx (::emulator::state.thread)
#define blockIdx (::emulator::state.block)
#define blockDim (::emulator::state.threads)
#define gridDim (::emulator::state.grid)
#define warpSize 32

// ---- barriers, warps, atomics. Each records the line that calls it.

#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
static inline void __syncthreads(EMULATOR_PLACE) { emulator::barrier({file, line}); }
static inline void __syncwarp(unsigned mask = 0xffffffff, EMULATOR_PLACE) {
    emulator::exchange(emulator::SYNC, mask, 0, 0, {file, line});
}
template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMULATOR_PLACE) {
    const int first = emulator::lane_number() & ~(width - 1);
    return emulator::exchange(emulator::SHUFFLE, mask, value, first + (lane & (width - 1)), {file, line});
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_PLACE) {
    const int lane = emulator::lane_number(), source = lane ^ bits;
    const int other = (source & ~(width - 1)) > (lane & ~(width - 1));   // in a later part: the lane's own value
    return emulator::exchange(emulator::SHUFFLE, mask, value, other ? lane : source, {file, line});
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_PLACE) {
    const int lane = emulator::lane_number(), inside = (lane & (width - 1)) + (int)delta < width;
    return emulator::exchange(emulator::SHUFFLE, mask, value, inside ? lane + (int)delta : lane, {file, line});
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_PLACE) {
    const int lane = emulator::lane_number(), inside = (lane & (width - 1)) >= (int)delta;
    return emulator::exchange(emulator::SHUFFLE, mask, value, inside ? lane - (int)delta : lane, {file, line});
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
    return emulator::exchange(emulator::BALLOT, mask, (unsigned)(predicate != 0), 0, {file, line});
}
static inline int __any_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
    return __ballot_sync(mask, predicate, file, line) == mask;
}
static inline int __reduce_add_sync(unsigned mask, int value, EMULATOR_PLACE) {
    return emulator::exchange(emulator::ADD, mask, value, 0, {file, line});
}
static inline int __reduce_min_sync(unsigned mask, int value, EMULATOR_PLACE) {
    return emulator::exchange(emulator::MIN, mask, value, 0, {file, line});
}
static inline int __reduce_max_sync(unsigned mask, int value, EMULATOR_PLACE) {
    return emulator::exchange(emulator::MAX, mask, value, 0, {file, line});
}
namespace emulator {   // mma_s8 of device.cuh
static inline void multiply_s8(int (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATOR_PLACE) {
    Lane lane = {MMA_S8, 0xffffffff, 0, 0, a, b, sums};
    warp_operation(&lane, {file, line});
}
}
static inline void __threadfence() { emulator::fence(); }
static inline void __threadfence_block() {}
// No other thread runs, so these are plain operations, which checked builds do not check.
#define EMULATOR_ATOMIC(name, expression) \
    template <class T> EMULATOR_UNCHECKED T name(T *to, std::common_type_t<T> value) { \
        static_assert(std::is_integral_v<T>, "the sum of floats depends on their order"); \
        emulator::atomic(to, sizeof *to); \
        const T old = *to; \
        *to = (T)(expression); \
        return old; \
    }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicExch, value)
EMULATOR_ATOMIC(atomicMax, old < value ? value : old)
EMULATOR_ATOMIC(atomicMin, value < old ? value : old)
template <class T> EMULATOR_UNCHECKED T atomicCAS(T *to, std::common_type_t<T> expected, std::common_type_t<T> value) {
    emulator::atomic(to, sizeof *to);
    const T old = *to;
    if (old == expected) *to = value;
    return old;
}

// ---- arithmetic

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline int __float2int_rn(float x) {   // saturates; NaN gives 0
    if (x != x) return 0;
    return x >= 2147483648.0f ? INT32_MAX : x <= -2147483648.0f ? INT32_MIN : (int)rintf(x);
}
static inline int __float2int_rz(float x) {
    if (x != x) return 0;
    return x >= 2147483648.0f ? INT32_MAX : x <= -2147483648.0f ? INT32_MIN : (int)x;
}
static inline float __int2float_rn(int x) { return (float)x; }
static inline int __float_as_int(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
static inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline long long __double_as_longlong(double x) { long long bits; memcpy(&bits, &x, 8); return bits; }
static inline double __longlong_as_double(long long bits) { double x; memcpy(&x, &bits, 8); return x; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline int __dp4a(int a, int b, int sum) {   // four products of int8
    for (int i = 0; i < 32; i += 8) sum += (int8_t)((unsigned)a >> i) * (int8_t)((unsigned)b >> i);
    return sum;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 32; i += 8) sum += (uint8_t)(a >> i) * (uint8_t)(b >> i);
    return sum;
}
static inline int __dp2a_lo(int a, int b, int sum) {   // two products, of int16 and the low bytes of b
    for (int i = 0; i < 2; i++) sum += (int16_t)((unsigned)a >> 16 * i) * (int8_t)((unsigned)b >> 8 * i);
    return sum;
}
static inline unsigned __dp2a_lo(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 2; i++) sum += (uint16_t)(a >> 16 * i) * (uint8_t)(b >> 8 * i);
    return sum;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned select = selector >> 4 * i & 15;
        unsigned byte = (unsigned)(bytes >> 8 * (select & 7)) & 255;
        if (select & 8) byte = byte & 128 ? 255 : 0;   // the sign of the byte
        result |= byte << 8 * i;
    }
    return result;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
// Four bytes at a time.
#define EMULATOR_BYTES(name, type, expression) \
    static inline unsigned name(unsigned x, unsigned y) { \
        unsigned result = 0; \
        for (int i = 0; i < 32; i += 8) { \
            const type a = (type)(x >> i), b = (type)(y >> i); \
            result |= (unsigned)(uint8_t)(expression) << i; \
        } \
        return result; \
    }
EMULATOR_BYTES(__vadd4, uint8_t, a + b)
EMULATOR_BYTES(__vsub4, uint8_t, a - b)
EMULATOR_BYTES(__vcmpeq4, uint8_t, a == b ? 255 : 0)
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
template <class T> T __ldg(const T *address) { return *address; }
template <class T> T __ldcs(const T *address) { return *address; }
template <class T> T __ldcg(const T *address) { return *address; }
template <class T> void __stcs(T *address, T value) { *address = value; }
[[noreturn]] static inline void __trap(EMULATOR_PLACE) { emulator::fail("__trap was called", {file, line}); }
#endif
