// SPDX-License-Identifier: MIT
// device.cuh - what kernels need of the machine beyond the CUDA language: the only place with PTX, and with what the
// emulator (llamac/gpu/emulator/cuda.h), HIP and devices without an instruction do in its place, with the same result.
#ifndef LLAMAC_DEVICE_CUH
#define LLAMAC_DEVICE_CUH
#include <stddef.h>
#include <stdint.h>
#include "half.h"

#if defined(LLAMAC_EMULATOR) || defined(__HIP__)
#define HAS_PTX 0
#define DEVICE_AT_LEAST(arch) 0   // __CUDA_ARCH__: 100 times the compute capability, as 800
#else
#define HAS_PTX 1
#define DEVICE_AT_LEAST(arch) (__CUDA_ARCH__ >= (arch))
#endif

enum { WARP_LANES = 32 };
#if defined(__HIP__) && defined(__HIP_DEVICE_COMPILE__) && __AMDGCN_WAVEFRONT_SIZE != 32
#error "the kernels need waves of 32 lanes (RDNA); this GPU's have 64"
#endif
static const unsigned FULL_WARP = 0xffffffffu;

// Declares `name`: a block's dynamic shared memory, as bytes, aligned to 16.
#if defined(LLAMAC_EMULATOR)
#define DYNAMIC_SHARED(name) unsigned char *const name = ::emulator::state.dynamic_shared
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// ---- conversions, as half.h defines them (a NaN may become another NaN)

static __device__ __forceinline__ float f16_to_f32(uint16_t h) {
#if !HAS_PTX
    return f32_from_f16(h);
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
#endif
}
static __device__ __forceinline__ uint16_t f32_to_f16(float x) {   // to nearest, ties to even
#if !HAS_PTX
    return f16_from_f32(x);
#else
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#endif
}
static __device__ __forceinline__ float bf16_to_f32(uint16_t h) { return __uint_as_float((uint32_t)h << 16); }

// Byte i is byte n % 8 of y and x (x: the low four), where n is nibble i of the selector's low half; or, if n is 8 or
// more, that byte's sign: 0 or 255.
static __device__ __forceinline__ uint32_t choose_bytes(uint32_t x, uint32_t y, uint32_t selector) {
    uint32_t chosen = 0;
#if HAS_PTX
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(x), "r"(y), "r"(selector));
#else
    for (int i = 0; i < 4; i++) {
        const uint32_t n = selector >> 4 * i & 15, byte = (n & 4 ? y : x) >> n % 4 * 8 & 255;
        chosen |= (n < 8 ? byte : byte < 128 ? 0u : 255u) << 8 * i;
    }
#endif
    return chosen;
}

// ---- memory

// 16 bytes of data that no kernel of this launch writes, and that no thread reads again soon: a weight.
static __device__ __forceinline__ uint4 load_stream(const void *address) {
#if !HAS_PTX
    return *static_cast<const uint4 *>(address);
#else
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(address));
    return x;
#endif
}

// The same for 8 bytes.
static __device__ __forceinline__ uint2 load_stream8(const void *address) {
#if !HAS_PTX
    return *static_cast<const uint2 *>(address);
#else
    uint2 x;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(address));
    return x;
#endif
}

// Makes the compiler compute x here: before the streaming loads that follow, which keep their place.
static __device__ __forceinline__ void compute_now(uint32_t &x) {
#if !HAS_PTX
    (void)x;
#else
    asm volatile("" : "+r"(x));
#endif
}

// Returns x, but hides its origin from the compiler, which then keeps x in a register instead of recomputing it in each
// iteration of a loop to save one. All lanes call it. The compiler sees through a shuffle of a uniform value, so the
// lane's number makes it differ.
static __device__ __forceinline__ uint32_t kept(uint32_t x) {
    const uint32_t lane = threadIdx.x % WARP_LANES;
    return __shfl_sync(FULL_WARP, x + lane, (int)lane) - lane;
}

// Starts to load the line of an address of global memory into the L2 cache.
static __device__ __forceinline__ void prefetch_l2(const void *address) {
#if !HAS_PTX
    (void)address;
#else
    asm volatile("prefetch.global.L2 [%0];" : : "l"(__cvta_generic_to_global(address)));
#endif
}

// Copies 16 bytes from global to shared memory, both aligned to 16, in the background. copy_async_commit ends a group
// of a thread's copies. copy_async_wait<n> returns when all but its last n groups are there; other threads see them
// after the next barrier.
static __device__ __forceinline__ void copy_async(void *shared, const void *global) {
#if defined(LLAMAC_EMULATOR)
    ::emulator::copy_async(shared, global, 16);
#elif DEVICE_AT_LEAST(800)
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(global) : "memory");
#else
    *static_cast<uint4 *>(shared) = *static_cast<const uint4 *>(global);
#endif
}
// The same at `offset` bytes from both addresses, if `condition`. The copies of a thread that differ in these alone
// have one address to compute, and no jumps.
template <int offset>
static __device__ __forceinline__ void copy_async_if(bool condition, unsigned char *shared,
                                                     const unsigned char *global) {
#if defined(LLAMAC_EMULATOR) || !DEVICE_AT_LEAST(800)
    if (condition) copy_async(shared + offset, global + offset);
#else
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("{ .reg .pred is_copied; setp.ne.u32 is_copied, %3, 0; "
                 "@is_copied cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16; }"
                 : : "r"(to), "l"(global), "n"(offset), "r"((unsigned)condition) : "memory");
#endif
}
// The same for 4 bytes.
static __device__ __forceinline__ void copy_async4(void *shared, const void *global) {
#if defined(LLAMAC_EMULATOR)
    ::emulator::copy_async(shared, global, 4);
#elif DEVICE_AT_LEAST(800)
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(to), "l"(global) : "memory");
#else
    *static_cast<uint32_t *>(shared) = *static_cast<const uint32_t *>(global);
#endif
}
static __device__ __forceinline__ void copy_async_commit() {
#if defined(LLAMAC_EMULATOR)
    ::emulator::copy_async_commit();
#elif DEVICE_AT_LEAST(800)
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}
template <int groups> static __device__ __forceinline__ void copy_async_wait() {
#if defined(LLAMAC_EMULATOR)
    ::emulator::copy_async_wait(groups);
#elif DEVICE_AT_LEAST(800)
    asm volatile("cp.async.wait_group %0;" : : "n"(groups) : "memory");
#endif
}

// ---- kernels that overlap
//
// The driver may start a kernel while earlier ones of its stream still run (llamac/gpu/early_launch.py). Such a kernel
// calls wait_for_earlier before it reads or writes anything that is not constant, in all threads or at least in one
// that every launch has; after it, everything that earlier kernels wrote is there. Reads that follow are plain loads:
// __ldg may be moved ahead of the wait. let_next_start: the kernel that follows may start, once all blocks have called
// it or ended; it still waits for the end of this one.

static __device__ __forceinline__ void wait_for_earlier() {
#if HAS_PTX && DEVICE_AT_LEAST(900)
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
static __device__ __forceinline__ void let_next_start() {
#if HAS_PTX && DEVICE_AT_LEAST(900)
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

// ---- warps: every lane calls these

static __device__ __forceinline__ int warp_sum(int x) {
#if DEVICE_AT_LEAST(800) || defined(LLAMAC_EMULATOR)
    return __reduce_add_sync(FULL_WARP, x);
#else
    for (int bits = WARP_LANES / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(FULL_WARP, x, bits);
    return x;
#endif
}

// Four matrices of 8 rows of 8 numbers of 16 bits, transposed. Lane 8 i + r brings the place of row r of matrix i, in
// bytes from `base`, which is in shared memory: 16 bytes, aligned to 16. In to[i], lane 4 o + q gets the numbers in
// column o of rows 2 q (the low half) and 2 q + 1 of matrix i.
static __device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const unsigned char *base, int place) {
#if HAS_PTX
    const unsigned from = (unsigned)__cvta_generic_to_shared(base) + (unsigned)place;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
#else
    const int lane = threadIdx.x % WARP_LANES;
    for (int i = 0; i < 4; i++) {
        to[i] = 0;
        for (int r = 0; r < 2; r++) {
            const int row = __shfl_sync(FULL_WARP, place, 8 * i + 2 * (lane % 4) + r);
            to[i] |= (uint32_t)((const uint16_t *)(const void *)(base + row))[lane / 4] << 16 * r;
        }
    }
#endif
}

// sums += A B, exactly: A has 16 rows and 32 columns of int8, B 32 rows and 8 columns, sums 16 rows and 8 columns of
// int32. With g = lane / 4 and q = lane % 4, each word four bytes in ascending order, a lane holds
//     a[0]     row g, columns 4 q to 4 q + 3 of A         b[0]          column g, rows 4 q to 4 q + 3 of B
//     a[1]     row g + 8, the same columns                b[1]          column g, rows 4 q + 16 to 4 q + 19
//     a[2, 3]  as a[0, 1], columns 4 q + 16 and on        sums[0, 1]    row g, columns 2 q and 2 q + 1
//                                                         sums[2, 3]    row g + 8, the same columns
static __device__ __forceinline__ void mma_s8(int (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(LLAMAC_EMULATOR)
    ::emulator::multiply_s8(sums, a, b);
#elif DEVICE_AT_LEAST(800)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif DEVICE_AT_LEAST(750)
    for (int part = 0; part < 4; part++) {   // of the rows, and of the columns of A
        const int row = part % 2, column = part / 2;
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(sums[2 * row]), "+r"(sums[2 * row + 1]) : "r"(a[row + 2 * column]), "r"(b[column]));
    }
#else
    const int lane = threadIdx.x % WARP_LANES;   // no tensor cores for int8
    for (int q = 0; q < 4; q++)
        for (int part = 0; part < 4; part++) {
            const int x = (int)__shfl_sync(FULL_WARP, a[part], lane / 4 * 4 + q);
            for (int i = 0; i < 2; i++) {
                const int y = (int)__shfl_sync(FULL_WARP, b[part / 2], (2 * (lane % 4) + i) * 4 + q);
                sums[2 * (part % 2) + i] = __dp4a(x, y, sums[2 * (part % 2) + i]);
            }
        }
#endif
}
#endif
