// SPDX-License-Identifier: MIT
// kernels.h - the inner loops, as a table of functions per instruction set. Plain pointers, no threads, no allocation.
//
// Every table computes the same bits: each sum runs in an order that is written down here or in kernels_tmpl.h and does not depend
// on the instruction set, on tile sizes or on who computes it.
//
// Panels. The inputs of a product come as panels of up to PANEL_ROWS rows in which k runs slowest: the T words of one k lie
// side by side, so that a tile reads one short run. m rows make panel_count(m) panels of nearly equal height, one after the other.
// The words of a row, by the kind of input:
//     f32      the numbers
//     int8     for q4, q4s. Per group of 32 columns: 8 words of 4 codes, 2 of starts, the scale d = max|x| / 127
//     int16    for q8. Per block of 128 columns: 2 words per 4 codes, the codes' sum of each group, the scale d = max|x| / 16319
// Codes are x / d, rounded to nearest even. Starts, the order in the words of int16 and the order of a block's words of codes are the
// instruction set's own.
#ifndef LLAMAC_KERNELS_H
#define LLAMAC_KERNELS_H
#include "cancel.h"
#include "common.h"
#include "dtype.h"

enum {
    PANEL_ROWS = 6,          // 6 rows x 16 outputs fill AVX2's registers: 12 sums, 2 weights, 1 input
    GEMM_STRIPS = 4,         // strips that share a panel while it is in the first cache
    GEMM_COLUMNS = 512,      // codes per pass: up to 6 KiB of panel and 18 KiB per strip
    GEMM_COLUMNS_FLOAT = 128,   // floats per pass: a panel and 8 KiB per strip stay in the first cache together
    EXPANDED_STRIP_BYTES = GEMM_COLUMNS / 4 * 128 + GEMM_COLUMNS / GROUP_COLUMNS * 128,   // of a pass, unpacked: codes take the most
    INT8_LIMIT = 127, INT16_LIMIT = 16319,   // of input codes; 127 * 128 + 63 splits into two int8
    KV_PAGE = 64,            // positions of a KV page
    ATTENTION_BLOCK = 256,   // positions of one partial softmax, counted from position 0
    ATTENTION_QUERIES = 4 * PANEL_ROWS,   // that share one reading of keys and values
    BLOCK_PAGES = ATTENTION_BLOCK / KV_PAGE,
    READ_STEP = 64,          // floats of one run of read_block at a time
};

static inline int panel_count(int m) { return (m + PANEL_ROWS - 1) / PANEL_ROWS; }
static inline int panel_start(int m, int panel) { return share_start(m, panel, panel_count(m)); }

enum input { INPUT_F32, INPUT_INT8, INPUT_INT16, N_INPUTS };
static inline int input_of(int dtype) { return !dtype_is_quantized(dtype) ? INPUT_F32 : dtype == LLAMAC_Q8 ? INPUT_INT16 : INPUT_INT8; }
enum { GROUP_WORDS = 8 + 2 + 1 };   // of int8
static inline size_t input_words(int input, int columns) {
    if (input == INPUT_F32) return (size_t)columns;
    const size_t groups = (size_t)ceil_div(columns, GROUP_COLUMNS);
    return input == INPUT_INT8 ? groups * GROUP_WORDS : groups * 17 + (groups + BLOCK_GROUPS - 1) / BLOCK_GROUPS;
}

// The panel of row r, its height and the row's place in it.
struct panel_row { int32_t *panel; int height, place; };
static inline struct panel_row panel_row(void *panels, int m, size_t words, int r) {
    const int n = panel_count(m);
    int p = share_start(n, r, m);
    while (panel_start(m, p + 1) <= r) p++;
    const int start = panel_start(m, p);
    return (struct panel_row){ (int32_t *)panels + (size_t)start * words, panel_start(m, p + 1) - start, r - start };
}

// y[t][o] = the product of row o of w and input t; then (times its scale), then (+ bias), then (times the input's weight), then stored or added. For the outputs of
// strips [first, last).
//
// Float weights: the sum over k ascending of w[o][k] * x[t][k], one fused multiply-add each, starting from 0.
// q4, q4s: per group the exact sum i of s * code * input code; acc = fma(i, d, acc) over groups ascending, from 0; D * acc.
// q8: per group the exact sum i of code * input code, as a float; over a block p = fma(i, s, p), from 0; acc = fma(p, d, acc) over
// blocks ascending, from 0; D * acc.
struct gemm {
    const uint8_t *w;               // strips
    size_t strip_bytes;
    int first, last, rows, columns;
    const void *x;                  // panels of m rows, of the dtype's kind of input
    int m;
    const float *scales;            // (rows) or NULL: what the outputs are multiplied by
    const float *bias;              // (rows) or NULL
    float *y;                       // (m, y_stride)
    size_t y_stride;
    int add;                        // y += instead of y =
    const float *weights;           // (m) or NULL: what each input's outputs are multiplied by
    const int *to;                  // (m) or NULL: the row of y of each input, instead of its own number
    float *copy;                    // NULL, or (m, rows): the product (and bias) by itself, for an observer
    int add_copy;                   // copy += instead of copy =
    void *scratch;                  // gemm_scratch(m) bytes
    struct cancel *cancel;
};
_Static_assert(GEMM_COLUMNS_FLOAT * 64 <= EXPANDED_STRIP_BYTES, "a pass of unpacked floats");
static inline size_t gemm_scratch(int m) { return (size_t)GEMM_STRIPS * (EXPANDED_STRIP_BYTES + sizeof(float) * STRIP_ROWS * (size_t)m); }

// One KV head's pages: keys as strips of 16 positions, values as strips of 16 dimensions whose columns are positions.
struct kv_view {
    const uint8_t *const *pages;    // of the sequence
    size_t key_offset, value_offset;     // of this layer and head in a page
};

// Up to ATTENTION_QUERIES queries that look at one KV head: softmax(q K) V, for each its own positions.
//
// Scores are sums over d ascending, then s = cap tanh(s / cap) where there is a cap. Per block of ATTENTION_BLOCK positions, counted from
// position 0, from empty: m = max, p = exp(score - m), l = sum p as 16 sums by position mod 16 and one fixed tree, o = sum over positions
// ascending of p * v. Blocks are merged in ascending order, from the first in which the query sees a position. What a query does not see has no
// part in its result.
struct attend {
    struct kv_view kv;
    int head_dim, n_queries;
    const float *q;                 // panels of f32, already scaled
    int first[ATTENTION_QUERIES], visible[ATTENTION_QUERIES]; // positions [first, visible) are seen, at least one
    float cap;                      // 0: none
    float *out;                     // (n_queries, value_width(head_dim))
    float *scratch;                 // attend_scratch(head_dim) floats
    float *scores;                  // NULL, or (n_queries, scores_stride): the scores alone, for an observer; then nothing else is done
    size_t scores_stride;
    struct cancel *cancel;
};
static inline int value_width(int head_dim) { return (head_dim + 15) / 16 * 16; }
static inline size_t attend_scratch(int head_dim) {
    const size_t width = (size_t)value_width(head_dim);
    return (size_t)ATTENTION_QUERIES * (ATTENTION_BLOCK + width) + KV_PAGE * (width + PANEL_ROWS) + width;
}

struct kernels {
    const char *name;
    void (*gemm[LLAMAC_N_DTYPES])(const struct gemm *g);
    // Writes a row of `columns` numbers into its place in a panel. As codes, the scale of a group (a block) with a NaN or an infinity
    // becomes a NaN, and so does every sum over that group.
    void (*pack[N_INPUTS])(struct panel_row to, const float *row, int columns);
    void (*attend[LLAMAC_N_DTYPES])(const struct attend *a);
    // Row r of a matrix in strips, times scale, as f32.
    void (*gather[LLAMAC_N_DTYPES])(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y);
    // y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019).
    void (*norm_rms)(const float *x, const float *w, const float *bias, float eps, int n, float *y);
    // y = (x - mean) / sqrt(variance + eps) * w + bias (Ba et al. 2016); bias may be NULL. Norms may write where they read.
    void (*norm_layer)(const float *x, const float *w, const float *bias, float eps, int n, float *y);
    // y = act(gate) * up; up NULL: y = act(gate). By enum activation.
    void (*activate)(int activation, const float *gate, const float *up, int n, float *y);
    void (*add)(const float *x, int n, float *y);   // y += x
    // y *= scale; then y = cap tanh(y / cap), unless cap is 0.
    void (*scale)(float *y, int n, float scale, float cap);
    // x = exp(x - max) / their sum, which is summed as in `attend`. x has room for a multiple of 16 numbers.
    void (*softmax)(float *x, int n);
    // Rotates pairs (x[j], x[j + half]) by the angles whose cosines and sines are given (Su et al. 2021).
    void (*rotate)(float *x, const float *cosines, const float *sines, int half);
    // Writes one position's key or value of one head into its page; f16 saturates at +-65504.
    void (*store_key[LLAMAC_N_DTYPES])(uint8_t *keys, int slot, int head_dim, const float *x);
    void (*store_value[LLAMAC_N_DTYPES])(uint8_t *values, int slot, int head_dim, const float *x);
    // For measuring. Reads a multiple of streams * READ_STEP floats as 1, 2 or 4 runs side by side and returns their sum.
    float (*read_block)(const float *block, size_t floats, int streams);
    // The multiply-adds of products with this kind of input, with operands in the first cache. Returns how many were done.
    double (*peak[N_INPUTS])(int passes, float *result);
};

extern const struct kernels kernels_scalar, kernels_avx2, kernels_avx512, kernels_avx512vnni, kernels_neon, kernels_neon_dotprod,
                            kernels_neon_i8mm;

// The best table of this machine (name NULL), or the named one. NULL and an error if it is unknown or not supported here.
const struct kernels *kernels_select(const char *name, llamac_error *err);
#endif
