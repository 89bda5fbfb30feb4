// SPDX-License-Identifier: MIT
// products_float.cu - products with f32, f16 and bf16. Each output is one chain of fused multiply-adds over ascending
// columns, in one thread: no other order gives its bits.
#include "epilogue.cuh"

template <int dtype> struct float_of {
    static constexpr int bytes = dtype == LLAMAC_F32 ? 4 : 2;
    static __device__ __forceinline__ float load(const unsigned char *p) {
        if (dtype == LLAMAC_F32) return *(const float *)(const void *)p;
        const uint16_t x = *(const uint16_t *)(const void *)p;
        return dtype == LLAMAC_F16 ? f16_to_f32(x) : bf16_to_f32(x);
    }
};
static __device__ __forceinline__ const float *float_row(const product &p, int row) {
    return (const float *)(const void *)p.inputs + (size_t)input_row(p, row) * p.columns;
}

// ---- few rows

enum { FEW_ROWS = 8, FEW_STRIPS = 2, FEW_THREADS = 128, FEW_COLUMNS = 64 };   // columns of a stage

template <int dtype> struct few_stage {
    static constexpr int strip_bytes = (int)FEW_COLUMNS * STRIP_ROWS * float_of<dtype>::bytes;
    static constexpr int pieces = strip_bytes / 16;
    __align__(16) unsigned char strips[FEW_STRIPS][strip_bytes + 64];   // strips in different banks
    __align__(16) float x[FEW_ROWS][FEW_COLUMNS];
};

// Starts copying columns from `start` on.
template <int dtype>
static __device__ __forceinline__ void copy_stage(few_stage<dtype> &to, const product &p, const row_tile &tile,
                                                  int start) {
    const size_t bytes = float_strip_bytes(dtype, p.columns), at = (size_t)start * STRIP_ROWS * float_of<dtype>::bytes;
#pragma unroll
    for (int i = threadIdx.x; i < FEW_STRIPS * few_stage<dtype>::pieces; i += FEW_THREADS) {
        const int strip = i / few_stage<dtype>::pieces, piece = i % few_stage<dtype>::pieces * 16,
                  index = blockIdx.y * FEW_STRIPS + strip;
        if (index * STRIP_ROWS < p.rows && at + piece < bytes)
            copy_async(&to.strips[strip][piece], p.w.strips + index * bytes + at + piece);
    }
    for (int i = threadIdx.x; i < tile.count * FEW_COLUMNS; i += FEW_THREADS) {
        const int t = i / FEW_COLUMNS, k = i % FEW_COLUMNS;
        if (start + k < p.columns) copy_async4(&to.x[t][k], float_row(p, tile.first + t) + start + k);
    }
}

// sums[r] += weights times row r for `columns` columns. w: the lane's weight of the first column.
template <int dtype, int rows>
static __device__ __forceinline__ void add_products(float (&sums)[2], const unsigned char *w,
                                                    const float *const (&x)[2], int columns) {
    constexpr int step = STRIP_ROWS * float_of<dtype>::bytes;
    int k = 0;
#pragma unroll 4
    for (; k + 4 <= columns; k += 4, w += 4 * step) {
        float4 values[rows];
#pragma unroll
        for (int r = 0; r < rows; r++) values[r] = *(const float4 *)(const void *)(x[r] + k);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float weight = float_of<dtype>::load(w + i * step);
#pragma unroll
            for (int r = 0; r < rows; r++) sums[r] = __fmaf_rn(weight, element(values[r], i), sums[r]);
        }
    }
    for (; k < columns; k++, w += step)
        for (int r = 0; r < rows; r++) sums[r] = __fmaf_rn(float_of<dtype>::load(w), x[r][k], sums[r]);
}

// A block of threads computes the 32 outputs of strips 2 * blockIdx.y and the next for tile blockIdx.x, of at most 8
// rows. Warp w computes rows w and w + 4, a lane each output; all threads copy weights ahead of use. Threads: 128.
// Equals gemm of csrc/kernels_template.h.
//
// Budget: a step of the chains takes 4 to 5 cycles, so a matrix of n columns at least 2.5 ns * n on an H100; reading
// 16-bit weights takes longer from 4000 rows on. Until then the chain is the limit, and cannot be shortened.
template <int dtype> static __device__ __forceinline__ void product_few(product p) {
    constexpr int stages_n = dtype == LLAMAC_F32 ? 4 : 6;
    __shared__ few_stage<dtype> stages[stages_n];
    const row_tile tile = tile_of(p, blockIdx.x, FEW_ROWS);
    if (!tile.count) return;
    const int warp = threadIdx.x / WARP_LANES, strip = threadIdx.x % WARP_LANES / STRIP_ROWS,
              o = threadIdx.x % STRIP_ROWS, n = (p.columns + FEW_COLUMNS - 1) / FEW_COLUMNS,
              row = (blockIdx.y * FEW_STRIPS + strip) * STRIP_ROWS + o;
    float sums[2] = { 0, 0 };
    for (int i = 0; i < stages_n - 1; i++) {
        if (i < n) copy_stage(stages[i], p, tile, i * FEW_COLUMNS);
        copy_async_commit();
    }
    for (int i = 0; i < n; i++) {
        copy_async_wait<stages_n - 2>();
        __syncthreads();   // this stage is there, and nobody reads the one before
        if (i + stages_n - 1 < n)
            copy_stage(stages[(i + stages_n - 1) % stages_n], p, tile, (i + stages_n - 1) * FEW_COLUMNS);
        copy_async_commit();
        if (warp >= tile.count || row >= p.rows) continue;
        const few_stage<dtype> &stage = stages[i % stages_n];
        const unsigned char *w = stage.strips[strip] + o * float_of<dtype>::bytes;
        const float *const x[2] = { stage.x[warp], stage.x[warp + FEW_ROWS / 2] };   // the second may not exist
        const int columns = min((int)FEW_COLUMNS, p.columns - i * FEW_COLUMNS);
        if (warp + FEW_ROWS / 2 < tile.count) add_products<dtype, 2>(sums, w, x, columns);
        else add_products<dtype, 1>(sums, w, x, columns);
    }
    finish(p, sums, [&](int i) {
        const int t = warp + i * FEW_ROWS / 2;
        return place{ t < tile.count && row < p.rows ? tile.first + t : -1, row };
    });
}

// ---- many rows

enum {
    MANY_ROWS = 64, MANY_STRIPS = 8, MANY_OUTPUTS = MANY_STRIPS * STRIP_ROWS, MANY_THREADS = 256, MANY_COLUMNS = 16,
    ROW_STRIDE = MANY_ROWS + 4,                                          // of x, for other banks
    PIECE = MANY_OUTPUTS * MANY_COLUMNS / MANY_THREADS,                  // weights that a thread copies: half a column
    X_PIECE = MANY_ROWS * MANY_COLUMNS / MANY_THREADS, THREAD_ROWS = 4, THREAD_OUTPUTS = 8,
};
static_assert(PIECE == STRIP_ROWS / 2 && X_PIECE == 4, "the pieces below");

// A block of threads computes the 128 outputs of strips 8 * blockIdx.y and on for tile blockIdx.x, of at most 64 rows:
// a thread 4 rows, and outputs 4 i to 4 i + 3 of both halves. Threads: 256. Equals gemm of csrc/kernels_template.h.
//
// Budget: per thread and column 32 fused multiply-adds and 3 loads of 16 bytes from shared memory: 80% of the peak of
// 32-bit multiply-adds, 50 TFLOPS on an H100.
template <int dtype> static __device__ __forceinline__ void product_many(product p) {
    __shared__ __align__(16) float weights[MANY_COLUMNS][MANY_OUTPUTS], x[MANY_COLUMNS][ROW_STRIDE];
    const row_tile tile = tile_of(p, blockIdx.x, MANY_ROWS);
    if (!tile.count) return;
    // what the thread copies: 8 weights of a column of a strip, and 4 columns of a row
    constexpr int bytes = float_of<dtype>::bytes;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES, column = lane / 2,
              first = lane % 2 * PIECE, strip = blockIdx.y * MANY_STRIPS + warp;
    const size_t start_of_strip = strip * STRIP_ROWS < p.rows ? strip * float_strip_bytes(dtype, p.columns) : 0;
    const unsigned char *from = p.w.strips + start_of_strip + (column * STRIP_ROWS + first) * bytes;
    const int row = threadIdx.x / (MANY_COLUMNS / X_PIECE), x_column = threadIdx.x % (MANY_COLUMNS / X_PIECE) * X_PIECE;
    const float *x_from = row < tile.count ? float_row(p, tile.first + row) : nullptr;
    uint4 next[bytes / 2];
    float x_next[X_PIECE];
    const auto load = [&](int start) {
#pragma unroll
        for (int i = 0; i < bytes / 2; i++)
            if (start + column < p.columns)
                next[i] = load_stream(from + (size_t)start * STRIP_ROWS * bytes + 16 * i);
#pragma unroll
        for (int i = 0; i < X_PIECE; i++)
            x_next[i] = x_from && start + x_column + i < p.columns ? x_from[start + x_column + i] : 0;
    };
    // what it computes
    const int output = threadIdx.x % 16 * (THREAD_OUTPUTS / 2), own_row = threadIdx.x / 16 * THREAD_ROWS;
    float sums[THREAD_ROWS * THREAD_OUTPUTS] = {};
    load(0);
    for (int start = 0; start < p.columns; start += MANY_COLUMNS) {
        if (start) __syncthreads();
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            weights[column][warp * STRIP_ROWS + first + i] =
                float_of<dtype>::load((const unsigned char *)next + i * bytes);
#pragma unroll
        for (int i = 0; i < X_PIECE; i++) x[x_column + i][row] = x_next[i];
        __syncthreads();
        load(start + MANY_COLUMNS);
        const int columns = min((int)MANY_COLUMNS, p.columns - start);
#pragma unroll
        for (int k = 0; k < MANY_COLUMNS; k++) {
            if (k >= columns) break;
            const float4 a = *(const float4 *)(const void *)&weights[k][output],
                         b = *(const float4 *)(const void *)&weights[k][MANY_OUTPUTS / 2 + output],
                         c = *(const float4 *)(const void *)&x[k][own_row];
            const float w[] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w }, v[] = { c.x, c.y, c.z, c.w };
#pragma unroll
            for (int t = 0; t < THREAD_ROWS; t++)
#pragma unroll
                for (int o = 0; o < THREAD_OUTPUTS; o++)
                    sums[t * THREAD_OUTPUTS + o] = __fmaf_rn(w[o], v[t], sums[t * THREAD_OUTPUTS + o]);
        }
    }
    finish(p, sums, [&](int i) {
        const int t = own_row + i / THREAD_OUTPUTS, o = i % THREAD_OUTPUTS,
                  half = o / (THREAD_OUTPUTS / 2) * (MANY_OUTPUTS / 2),
                  to = blockIdx.y * MANY_OUTPUTS + half + output + o % (THREAD_OUTPUTS / 2);
        return place{ t < tile.count && to < p.rows ? tile.first + t : -1, to };
    });
}

#define PRODUCTS(name, dtype) \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) product_##name##_few(PRODUCT_PARAMETERS) { \
        product_few<dtype>({ PRODUCT_ARGUMENTS }); \
    } \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2) product_##name##_many(PRODUCT_PARAMETERS) { \
        product_many<dtype>({ PRODUCT_ARGUMENTS }); \
    }
PRODUCTS(f32, LLAMAC_F32)
PRODUCTS(f16, LLAMAC_F16)
PRODUCTS(bf16, LLAMAC_BF16)
