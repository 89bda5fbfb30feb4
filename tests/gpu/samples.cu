// SPDX-License-Identifier: MIT
// samples.cu - kernels for the tests of the emulator and of the drivers, some of them wrong.
#include "device.cuh"

// y[i] = f x[i] for i < n.
extern "C" __global__ void __launch_bounds__(128) scale(float *y, const float *x, int n, float f) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = __fmul_rn(x[i], f);
}

template <int threads> static __device__ float block_sum(float x) {
    __shared__ float sums[threads];
    sums[threadIdx.x] = x;
    __syncthreads();
    for (unsigned half = threads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

// y[block] = the sum of its 64 values of x, in a tree.
extern "C" __global__ void total(float *y, const float *x) {
    const float sum = block_sum<64>(x[blockIdx.x * 64 + threadIdx.x]);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

// y[i] = x[n - 1 - i] for the n threads of a block, through dynamic shared memory.
extern "C" __global__ void reverse(int *y, const int *x) {
    DYNAMIC_SHARED(memory);
    int *kept = reinterpret_cast<int *>(memory);
    kept[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

// Every warp operation, for one warp: y[operation * 32 + lane].
extern "C" __global__ void warp_operations(int *y, const int *x) {
    const int lane = (int)threadIdx.x, value = x[lane];
    y[lane] = __shfl_sync(FULL_WARP, value, 31 - lane);
    y[32 + lane] = __shfl_xor_sync(FULL_WARP, value, 5);
    y[64 + lane] = __shfl_down_sync(FULL_WARP, value, 3);
    y[96 + lane] = __shfl_up_sync(FULL_WARP, value, 3);
    y[128 + lane] = __shfl_sync(FULL_WARP, value, 1, 8);
    y[160 + lane] = (int)__ballot_sync(FULL_WARP, value > 0);
    y[192 + lane] = __any_sync(FULL_WARP, value > 90) + 2 * __all_sync(FULL_WARP, value > -100);
    y[224 + lane] = warp_sum(value);
    y[256 + lane] = lane < 16 ? __shfl_xor_sync(0xffffu, value, 1) : -1;   // of half a warp
    __syncwarp();
}

// sums (32, 4) = the product of the fragments a (32, 4) and b (32, 2): device.cuh.
extern "C" __global__ void mma(int *sums, const uint32_t *a, const uint32_t *b) {
    int c[4] = {0, 0, 0, 0};
    uint32_t x[4], y[2];
    for (int i = 0; i < 4; i++) x[i] = a[threadIdx.x * 4 + (unsigned)i];
    for (int i = 0; i < 2; i++) y[i] = b[threadIdx.x * 2 + (unsigned)i];
    mma_s8(c, x, y);
    for (int i = 0; i < 4; i++) sums[threadIdx.x * 4 + (unsigned)i] = c[i];
}

// What else device.cuh has: y[lane] = the lane's float of x, through f16, + 1 + the 4th, the 2nd and, after a copy, the
// 8th float of x.
extern "C" __global__ void others(float *y, const float *x) {
    __shared__ __align__(16) float kept[32];
    const int lane = (int)threadIdx.x;
    prefetch_l2(x);
    copy_async4(kept + lane, x + lane);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    const uint4 four = load_stream(x);
    uint2 two = load_stream8(x);
    compute_now(two.y);
    y[lane] = f16_to_f32(f32_to_f16(x[lane])) + bf16_to_f32(0x3f80) + __uint_as_float(four.w) + __uint_as_float(two.y) +
              kept[7];
}

// The last block to arrive adds what all have written to parts: y = the sum of x. count is 0 before and after.
extern "C" __global__ void ticket(int *y, int *parts, unsigned *count, const int *x) {
    if (threadIdx.x > 0) return;
    parts[blockIdx.x] = 2 * x[blockIdx.x];
    __threadfence();
    if (atomicAdd(count, 1u) + 1 < gridDim.x) return;
    __threadfence();
    int sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++) sum += parts[i];
    *y = sum / 2;
    *count = 0;
}

// ---- wrong: only some threads arrive

extern "C" __global__ void some_at_the_barrier(int *y) {
    if (threadIdx.x < 40) __syncthreads();
    y[threadIdx.x] = 1;
}
extern "C" __global__ void two_barriers(int *y) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    y[threadIdx.x] = 1;
}
extern "C" __global__ void some_in_the_shuffle(int *y) {
    if (threadIdx.x != 7) y[threadIdx.x] = __shfl_xor_sync(FULL_WARP, 1, 1);
}
extern "C" __global__ void shuffle_from_outside(int *y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0xffffu, 1, 16);
}

// As `reverse`, in the background: asynchronous copies, all of which must be waited for.
template <int left> static __device__ void reverse_async(int *y, const int *x) {
    DYNAMIC_SHARED(memory);
    int *kept = reinterpret_cast<int *>(memory);
    copy_async(kept + 4 * threadIdx.x, x + 4 * threadIdx.x);
    copy_async_commit();
    copy_async_wait<left>();
    __syncthreads();
    y[threadIdx.x] = kept[4 * blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void reverse_waits(int *y, const int *x) { reverse_async<0>(y, x); }

// ---- wrong: races. As `reverse`, without the barrier; and neighbors in global memory.

extern "C" __global__ void no_barrier(int *y, const int *x) {
    DYNAMIC_SHARED(memory);
    int *kept = reinterpret_cast<int *>(memory);
    kept[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void no_wait(int *y, const int *x) { reverse_async<1>(y, x); }
extern "C" __global__ void no_second_barrier(int *y, const int *x) {
    __shared__ int kept;
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x == 0) kept = x[i];
        __syncthreads();
        y[threadIdx.x] = kept;   // while the first thread goes on
    }
}
extern "C" __global__ void shuffle_is_no_barrier(int *y, const int *x) {
    __shared__ int kept[32];
    kept[threadIdx.x] = x[threadIdx.x];
    if (__any_sync(FULL_WARP, 1)) y[threadIdx.x] = kept[31 - threadIdx.x];
}
extern "C" __global__ void syncwarp_is_one(int *y, const int *x) {
    __shared__ int kept[32];
    kept[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    y[threadIdx.x] = kept[31 - threadIdx.x];
}
extern "C" __global__ void blocks_write_the_same(int *y) {
    if (threadIdx.x == 0) y[0] = (int)blockIdx.x;
}
extern "C" __global__ void blocks_read_each_other(int *y) {
    if (threadIdx.x == 0) y[blockIdx.x] = blockIdx.x > 0 ? y[blockIdx.x - 1] : 1;
}
extern "C" __global__ void no_fence(int *y, int *parts, unsigned *count) {   // as `ticket`
    if (threadIdx.x > 0) return;
    parts[blockIdx.x] = 1;
    if (atomicAdd(count, 1u) + 1 == gridDim.x) *y = parts[0];
}

// ---- wrong: memory

extern "C" __global__ void past_the_end(int *y) { y[threadIdx.x] = 1; }
extern "C" __global__ void past_shared() {
    DYNAMIC_SHARED(memory);
    memory[threadIdx.x + 1] = 1;
}

extern "C" __global__ void past_a_local_array(int *y) {
    int values[4] = {0, 0, 0, 0};
    for (unsigned i = 0; i <= threadIdx.x % 5; i++) values[i] = 1;
    y[threadIdx.x] = values[threadIdx.x % 4];
}

// ---- wrong: arithmetic

extern "C" __global__ void shifts_too_far(int *y) { y[threadIdx.x] = 1 << (threadIdx.x + 8); }

// ---- wrong: what asynchronous copies overwrite is read without a barrier before them, or until they are waited for

extern "C" __global__ void copied_over_too_early(int *y, const int *x) {
    __shared__ __align__(16) int kept[4 * 64];
    for (int i = 0; i < 4; i++) kept[4 * threadIdx.x + i] = x[4 * threadIdx.x + i];
    __syncthreads();
    y[threadIdx.x] = kept[4 * blockDim.x - 1 - threadIdx.x];
    copy_async(kept + 4 * threadIdx.x, x + 4 * threadIdx.x);
    copy_async_commit();
    __syncthreads();
    copy_async_wait<0>();
}
extern "C" __global__ void read_before_it_arrives(int *y, const int *x) {
    __shared__ __align__(16) int kept[4 * 64];
    copy_async(kept + 4 * threadIdx.x, x + 4 * threadIdx.x);
    copy_async_commit();
    __syncthreads();
    y[threadIdx.x] = kept[4 * threadIdx.x];
    copy_async_wait<0>();
}
extern "C" __global__ void added_before_it_arrives(int *y, const int *x) {
    __shared__ __align__(16) int kept[4 * 64];
    copy_async(kept + 4 * threadIdx.x, x + 4 * threadIdx.x);
    copy_async_commit();
    y[threadIdx.x] = atomicAdd(kept + 4 * threadIdx.x, 1);
    copy_async_wait<0>();
}

// ---- wrong: of two warps that read, one writes

extern "C" __global__ void other_warp_reads(int *y, const int *x) {
    __shared__ int kept;
    if (threadIdx.x == 0) kept = x[0];
    __syncthreads();
    y[threadIdx.x] = kept;
    __syncwarp();
    if (threadIdx.x == 0) kept = x[1];
}
