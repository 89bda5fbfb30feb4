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
// A tile of rows of one product: rows [first, first + count), and the expert that multiplies them.
struct row_tile { int expert, first, count; };

// Parameters of all products.
//     strips, scales, bias   the matrix, if `experts` is NULL
//     experts, tiles         experts: matrices of the same shape and dtype. The rows are pairs, sorted by expert; tiles
//                            divides them (experts_tiles.cu). A tile of a matrix that is NULL does nothing.
//     inputs                 packed by pack.cu, or floats; x_rows: (m), the row of inputs of each row; NULL: the same
//     m, rows, columns       rows of the product; rows and columns of the matrix
//     y, accumulate          (m, rows): receives the outputs, or with ADD_TO_Y they are added to it
//     copy                   (m, rows) or NULL: for an observer, the same of the outputs before row_weights, ADD_TO_COPY
//     row_weights            (m) or NULL: multiply the outputs
#define PRODUCT_PARAMETERS \
    const unsigned char *strips, const float *scales, const float *bias, const matrix *experts, const row_tile *tiles, \
    const unsigned char *inputs, const int *x_rows, int m, int rows, int columns, float *y, int accumulate, \
    float *copy, const float *row_weights
#define PRODUCT_ARGUMENTS \
    { strips, scales, bias }, experts, tiles, inputs, x_rows, m, rows, columns, y, accumulate, copy, row_weights
enum accumulate { ADD_TO_Y = 1, ADD_TO_COPY = 2 };
struct product {
    matrix w;
    const matrix *experts;
    const row_tile *tiles;
    const unsigned char *inputs;
    const int *x_rows;
    int m, rows, columns;
    float *y;
    int accumulate;
    float *copy;
    const float *row_weights;
};

// Tile `index` of the product, of at most `most` rows. Makes the expert's matrix the product's.
static __device__ __forceinline__ row_tile tile_of(product &p, int index, int most) {
    if (!p.tiles) return { 0, index * most, min(most, p.m - index * most) };
    row_tile tile = p.tiles[index];
    if (tile.count) p.w = p.experts[tile.expert];
    if (!p.w.strips) tile.count = 0;
    return tile;
}
static __device__ __forceinline__ int input_row(const product &p, int row) { return p.x_rows ? p.x_rows[row] : row; }

// Where a sum belongs: output o of row t. Nowhere if t is negative.
struct place { int t, o; };

// The outputs of n sums, which are already multiplied by row scales. place_of(i): the place of sum i.
template <int n, class PlaceOf>
static __device__ __forceinline__ void finish(const product &p, float (&sums)[n], const PlaceOf &place_of) {
    const auto for_all = [&](const auto &f) {
#pragma unroll
        for (int i = 0; i < n; i++) {
            const place at = place_of(i);
            if (at.t >= 0) f(sums[i], at.t, at.o);
        }
    };
    if (p.w.scales) for_all([&](float &sum, int, int o) { sum = __fmul_rn(sum, p.w.scales[o]); });
    if (p.w.bias) for_all([&](float &sum, int, int o) { sum = __fadd_rn(sum, p.w.bias[o]); });
    if (p.copy)
        for_all([&](float &sum, int t, int o) {
            float &to = p.copy[(size_t)t * p.rows + o];
            to = p.accumulate & ADD_TO_COPY ? __fadd_rn(to, sum) : sum;
        });
    if (p.row_weights) for_all([&](float &sum, int t, int) { sum = __fmul_rn(sum, p.row_weights[t]); });
    if (p.accumulate & ADD_TO_Y)
        for_all([&](float &sum, int t, int o) { sum = __fadd_rn(p.y[(size_t)t * p.rows + o], sum); });
    for_all([&](float &sum, int t, int o) { p.y[(size_t)t * p.rows + o] = sum; });
}
#endif
