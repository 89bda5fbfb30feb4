// SPDX-License-Identifier: MIT
// epilogue.cuh - what products of all dtypes share: which rows and which matrix a block of threads multiplies, and what
// happens to a sum (struct gemm and `epilogue` of csrc/kernels.h and kernels_template.h).
#ifndef LLAMAC_EPILOGUE_CUH
#define LLAMAC_EPILOGUE_CUH
#include "inputs.cuh"

// A matrix, and what is applied to its outputs: a row of the table of experts (launches.py).
struct matrix {
    const unsigned char *strips;    // NULL: none
    const float *scales, *bias;     // (rows) or NULL
};
// A tile of rows of one product: row_of_tile of 0 to count - 1, and the expert that multiplies them.
struct row_tile { int expert, first, count; };
// In a product of heads, the gridDim.z heads take the place of experts. The rows are those of the first row's heads,
// then those of the next row's heads, so the rows of one head are gridDim.z apart. Otherwise gridDim.z is 1.
static __device__ __forceinline__ int row_of_tile(const row_tile &tile, int t) {
    return tile.first + t * (int)gridDim.z;
}

// One of the matrices that a launch multiplies with the same inputs. They have the same dtype and columns.
struct part {
    matrix w;
    const matrix *experts;          // NULL; or in place of w, matrices of the same shape
    float *y;                       // (m, rows): receives the outputs
    int rows;                       // 0: there is no such part
};
enum { MOST_PARTS = 3 };
#define PART_PARAMETERS(n) \
    const unsigned char *strips##n, const float *scales##n, const float *bias##n, const matrix *experts##n, \
    float *y##n, int rows##n
#define PART_ARGUMENTS(n) { { strips##n, scales##n, bias##n }, experts##n, y##n, rows##n }

// Parameters of all products.
//     parts                  the matrices. The blocks of threads along y are those of the first, then of the next ones
//     tiles                  with experts that are not heads: the rows are pairs, sorted by expert, and tiles divides
//                            them (experts_tiles.cu). A tile of a matrix that is NULL does nothing
//     inputs                 packed by pack.cu, or floats; x_rows: (m), the row of inputs of each row; NULL: the same
//     m, columns             rows of the product, or of each head; columns of the matrices
//     accumulate             ADD_TO_Y: the outputs are added to y
//     copy                   (m, rows) or NULL: for an observer, receives the outputs before row_weights, or with
//                            ADD_TO_COPY they are added to it; only with one part
//     row_weights            (m) or NULL: multiply the outputs
#define PRODUCT_PARAMETERS \
    PART_PARAMETERS(0), PART_PARAMETERS(1), PART_PARAMETERS(2), const row_tile *tiles, const unsigned char *inputs, \
    const int *x_rows, int m, int columns, int accumulate, float *copy, const float *row_weights
#define PRODUCT_ARGUMENTS \
    { PART_ARGUMENTS(0), PART_ARGUMENTS(1), PART_ARGUMENTS(2) }, tiles, inputs, x_rows, m, columns, accumulate, copy, \
    row_weights
enum accumulate { ADD_TO_Y = 1, ADD_TO_COPY = 2 };
struct product {
    part parts[MOST_PARTS];
    const row_tile *tiles;
    const unsigned char *inputs;
    const int *x_rows;
    int m, columns, accumulate;
    float *copy;
    const float *row_weights;
};

// What a block of threads computes: `outputs` outputs of a matrix, from `outputs * index` on, for a tile of rows.
struct block_part {
    matrix w;
    float *y;
    int rows, index;
    row_tile tile;
};

// The block's part, with a tile of at most `most` rows. Called before the sums and again after them, it takes no
// registers in between: all of it comes from the parameters and from where the block is.
template <int most> static __device__ __forceinline__ block_part block_part_of(const product &p, int outputs) {
    uint32_t index = blockIdx.y;
    compute_now(index);
    part chosen = p.parts[0];
#pragma unroll
    for (int i = 1; i < MOST_PARTS; i++) {
        const unsigned blocks = (unsigned)(chosen.rows + outputs - 1) / outputs;
        if (index < blocks) break;
        index -= blocks;
        chosen = p.parts[i];
    }
    block_part to = { chosen.w, chosen.y, chosen.rows, (int)index, {} };
    if (!p.tiles) {
        const int first = (int)blockIdx.x * most;
        to.tile = { (int)blockIdx.z, first * (int)gridDim.z + (int)blockIdx.z, min(most, p.m - first) };
        if (chosen.experts) to.w = chosen.experts[blockIdx.z];
        return to;
    }
    to.tile = p.tiles[blockIdx.x];
    if (to.tile.count) to.w = chosen.experts[to.tile.expert];
    if (!to.w.strips) to.tile.count = 0;
    return to;
}
static __device__ __forceinline__ int input_row(const product &p, int row) { return p.x_rows ? p.x_rows[row] : row; }

// Where a sum belongs: output o of row t. Nowhere if t is negative.
struct place { int t, o; };

// The outputs of n sums of the block's part, which are already multiplied by row scales. place_of(i): the place of sum
// i. A part has fewer than 2^31 outputs (MOST_NUMBERS of buffers.py): wider indices would take more registers than a
// thread has.
template <int n, class PlaceOf>
static __device__ __forceinline__ void finish(const product &p, const block_part &to, float (&sums)[n],
                                              const PlaceOf &place_of) {
    uint32_t rows = to.rows;
    const auto for_all = [&](const auto &f) {
        compute_now(rows);   // each loop recomputes its addresses, which take no registers in between
#pragma unroll
        for (int i = 0; i < n; i++) {
            const place at = place_of(i);
            if (at.t >= 0) f(sums[i], at, at.t * rows + at.o);
        }
    };
    if (to.w.scales) for_all([&](float &sum, place at, uint32_t) { sum = __fmul_rn(sum, to.w.scales[at.o]); });
    if (to.w.bias) for_all([&](float &sum, place at, uint32_t) { sum = __fadd_rn(sum, to.w.bias[at.o]); });
    if (p.copy && p.accumulate & ADD_TO_COPY)
        for_all([&](float &sum, place, uint32_t i) { p.copy[i] = __fadd_rn(p.copy[i], sum); });
    else if (p.copy)
        for_all([&](float &sum, place, uint32_t i) { p.copy[i] = sum; });
    if (p.row_weights) for_all([&](float &sum, place at, uint32_t) { sum = __fmul_rn(sum, p.row_weights[at.t]); });
    if (p.accumulate & ADD_TO_Y) for_all([&](float &sum, place, uint32_t i) { sum = __fadd_rn(to.y[i], sum); });
    for_all([&](float &sum, place, uint32_t i) { to.y[i] = sum; });
}
#endif
