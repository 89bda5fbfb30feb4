// SPDX-License-Identifier: MIT
// hip.h - what the kernels use of HIP's headers and of hipRTC, from clang's own builtins, so that clang alone compiles
// them for AMD's GPUs. Of the functions whose names end in _sync, a wave has the lanes that are active.
#ifndef LLAMAC_TESTS_HIP_H
#define LLAMAC_TESTS_HIP_H
#pragma clang force_cuda_host_device begin   // functions of the core's headers are the device's too
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))

struct float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };

struct index3 { unsigned x, y, z; };
#define threadIdx (index3{ __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(), 0 })
#define blockIdx \
    (index3{ __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z() })
#define blockDim (index3{ __builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(), 1 })
#define gridDim \
    (index3{ __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(), \
             __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(), \
             __builtin_amdgcn_grid_size_z() / __builtin_amdgcn_workgroup_size_z() })

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
static inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
template <class T> T __ldg(const T *address) { return *address; }

#define DEVICE static __device__ inline
DEVICE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return __builtin_amdgcn_perm(b, a, selector); }
DEVICE int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int8_t)(a >> i) * (int8_t)(b >> i);
    return sum;
}
DEVICE int __dp2a_lo(int a, int b, int sum) {
    for (int i = 0; i < 2; i++) sum += (int16_t)(a >> 16 * i) * (int8_t)(b >> 8 * i);
    return sum;
}
DEVICE unsigned __dp2a_lo(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 2; i++) sum += (uint16_t)(a >> 16 * i) * (uint8_t)(b >> 8 * i);
    return sum;
}
DEVICE int lane_of_wave() { return __builtin_amdgcn_mbcnt_lo(~0u, 0); }
DEVICE int bits_from(int value, int lane) { return __builtin_amdgcn_ds_bpermute(4 * lane, value); }
template <class T> DEVICE T __shfl_sync(unsigned, T value, int lane) {
    struct words { int word[sizeof(T) / 4]; };
    words from = __builtin_bit_cast(words, value);
    for (int &word : from.word) word = bits_from(word, lane);
    return __builtin_bit_cast(T, from);
}
template <class T> DEVICE T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return __shfl_sync(mask, value, lane_of_wave() ^ bits);
}
template <class T> DEVICE T __shfl_up_sync(unsigned mask, T value, int delta) {
    return __shfl_sync(mask, value, lane_of_wave() < delta ? lane_of_wave() : lane_of_wave() - delta);
}
DEVICE unsigned __ballot_sync(unsigned, int predicate) { return __builtin_amdgcn_uicmp((unsigned)predicate, 0u, 33); }
DEVICE int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
DEVICE void __syncwarp() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront"), __builtin_amdgcn_wave_barrier(); }
DEVICE void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
template <class T> DEVICE T atomicAdd(T *to, T value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
DEVICE double fabs(double x) { return __builtin_fabs(x); }
#undef DEVICE
#endif
