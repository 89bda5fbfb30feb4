// SPDX-License-Identifier: MIT
// kernels.h - the interface of the compute kernels: one table of functions per instruction set. Kernels take plain
// pointers; they start no threads and allocate nothing.
//
// Every table computes the same bits. The order of each sum is specified here or in kernels_template.h and does not
// depend on the instruction set, on tile sizes or on the thread that computes it.
//
// Panels. The inputs of a product are packed into panels: m rows form consecutive panels of nearly equal height. A
// panel has up to PANEL_ROWS rows; kernel sets with matrix tiles allow more for int16 inputs (`panel_rows` of the
// table). In a panel the column index k varies slowest: the words of one k for all T rows are adjacent, so that a
// micro-kernel reads one contiguous run. In a panel of more than PANEL_ROWS rows, the code words of a group are instead
// adjacent for each row, as tile loads require (int16_word_index in kernels_quant.h). The 32-bit words of a row depend
// on the input type:
//     INPUT_F32     the floats
//     INPUT_BF16    for bf16: the floats
//     INPUT_INT8    for q4, q4s, q3, q2 and t2. Per group of 32 columns: 8 words of 4 codes, 2 compensation terms, the
//                   scale d = max|x| / 127
//     INPUT_INT16   for all other quantized dtypes. Per block of 128 columns: 2 words per 4 codes; per group the sum
//                   of its codes and the sum of the first 16; the scale d = max|x| / 16319
// A code is x / d rounded to nearest even.
//
// With fast numerics, an int16 code is the product f h of an 8-bit code h and a factor f that a group of 32 columns
// shares: f = 1 + floor(max|x / d| / FAST_LIMIT), and h = (x / d) / f rounded to nearest even. So |h| is at most
// 127, and f at most 128. All kernels multiply these codes like any int16 codes, with the same bits. For products of
// many rows, a kernel set may instead use `narrow` panels, which store h and f: the exact integer sum of c * f h is f
// times the sum of c * h. With exact numerics, panels for products of many rows may contain pairs (kernels_pairs.h).
//
// With fast numerics, INPUT_BF16 are floats rounded to bf16, to nearest even, and 0 below FAST_BF16_MIN. For
// products of many rows, a kernel set may pack two of them into a word (kernels_bf16.h).
//
// Each instruction set defines its own compensation terms, its own arrangement of int16 codes in words, and its own
// order of the code words of a block (see simd_scalar.h).
#ifndef LLAMAC_KERNELS_H
#define LLAMAC_KERNELS_H
#include "cancel.h"
#include "common.h"
#include "dtype.h"
#include "kv_layout.h"

enum {
    PANEL_ROWS = 6,             // 6 rows x 16 outputs fill AVX2's registers: 12 accumulators, 2 weights, 1 input
    GEMM_STRIPS = 4,            // strips computed together against one panel that stays in L1 (a strip group)
    GEMM_KC = 512,              // columns per pass, quantized (KC in BLIS): up to 6 KiB of panel and 18 KiB per strip
    GEMM_KC_FLOAT = 128,        // columns per pass, float: a panel and 8 KiB per strip fit L1 together
    UNPACKED_STRIP_BYTES = GEMM_KC / 4 * 128 + GEMM_KC / GROUP_COLUMNS * 128,   // one pass, unpacked, at most
    INT8_LIMIT = 127,           // largest input code
    INT16_LIMIT = 16319,        // 127 * 128 + 63: splits into 128 h + l with h and l in int8
    ATTENTION_QUERIES = 4 * PANEL_ROWS,   // queries per call of `attend`, which share one read of keys and values
    READ_STEP = 64,             // floats that read_block takes from one stream at a time
};

// Less than 127.5, so that no intermediate rounding gives an h of 128; at least 16319 / 128, so that f h fits.
#define FAST_LIMIT 127.49609375f
#define FAST_BF16_MIN 0x1p-64f
#define ROUNDED_ROW_MIN 1e-5f   // of round_row: smaller magnitudes count as this one

static inline int input_type_of(int dtype) { return dtype_table[dtype].input; }
static inline int is_float_input(int input) { return input == INPUT_F32 || input == INPUT_BF16; }
enum {
    GROUP_WORDS = 8 + 2 + 1,        // INPUT_INT8: codes, compensation terms, scale
    INT16_GROUP_WORDS = 16 + 4,     // INPUT_INT16: codes, sums or other terms; a scale per block follows
};
// Words of one row in a panel.
static inline size_t input_words(int input, int columns) {
    if (is_float_input(input)) return (size_t)columns;
    const size_t groups = (size_t)ceil_div(columns, GROUP_COLUMNS);
    return input == INPUT_INT8 ? groups * GROUP_WORDS
                               : groups * INT16_GROUP_WORDS + (groups + BLOCK_GROUPS - 1) / BLOCK_GROUPS;
}

// m rows form panels of up to `max_height` rows; panel p starts at row panel_start.
static inline int panel_count(int m, int max_height) { return ceil_div(m, max_height); }
static inline int panel_start(int m, int max_height, int p) { return share_start(m, p, panel_count(m, max_height)); }

// The panel that contains row r of m rows, the panel's height, and the row's index in it. words: input_words of a row.
struct panel_row { int32_t *panel; int height, row; };
static inline struct panel_row panel_row(void *panels, int m, int max_height, size_t words, int r) {
    int p = share_start(panel_count(m, max_height), r, m);
    while (panel_start(m, max_height, p + 1) <= r) p++;
    const int start = panel_start(m, max_height, p), height = panel_start(m, max_height, p + 1) - start;
    return (struct panel_row){ (int32_t *)panels + (size_t)start * words, height, r - start };
}

// y[t][o] = dot(row o of w, input t), for the outputs o of strips [first, last). Then, in this order: times the
// output's scale, plus the output's bias, times the input's weight. The result is stored or added.
//
// Float weights: fused multiply-adds of w[o][k] * x[t][k] over ascending k, starting at 0. With int8 inputs: per group
// the exact integer i = sum of s * c * input code; acc = fma(i, d, acc) over ascending groups, starting at 0; the
// result is D * acc. Other quantized dtypes (S, M and c as in dtype.h; S without the row scale): for each span of
// columns that share a scale, the exact integers i = sum of c * input code and n = sum of input codes; over the
// ascending spans of 128 columns, starting at 0, p = fma(i, S, p) and then, with minimums, p = fma(n, M, p); acc =
// fma(p, d, acc) over ascending blocks of 128 columns, starting at 0; the result is acc, with row scales D * acc. i, S
// and M are rounded to floats first. (S and M need no rounding in any GGUF file.)
struct gemm {
    int dtype;
    const uint8_t *w;               // strips
    size_t strip_bytes;
    int first, last, rows, columns;
    const void *x;                  // panels of m rows, of the dtype's input type
    int m;
    int fast;                       // whether pack_input has rounded x, if it is INPUT_INT16 or INPUT_BF16
    const float *scales;            // (rows) or NULL: multiply the outputs
    const float *bias;              // (rows) or NULL
    float *y;                       // (m, y_stride)
    size_t y_stride;
    int accumulate;                 // y += instead of y =
    const float *row_weights;       // (m) or NULL: factor of each input's outputs
    const int *y_rows;              // (m) or NULL: the row of y that each input's outputs go to; NULL: row t
    float *copy;                    // NULL, or (m, rows) for an observer: the outputs before row_weights
    int accumulate_copy;            // copy += instead of copy =
    void *scratch;                  // gemm_scratch_bytes(m) bytes
    struct cancel *cancel;
};
_Static_assert(GEMM_KC_FLOAT * 64 <= UNPACKED_STRIP_BYTES, "the scratch holds a pass of f32 weights");
static inline size_t gemm_scratch_bytes(int m) {
    return (size_t)GEMM_STRIPS * (UNPACKED_STRIP_BYTES + sizeof(float) * STRIP_ROWS * (size_t)m);
}

// The input type of queries. With a q8 cache, queries are quantized to int16, like inputs of products with q8_0.
static inline int kv_query_type(int dtype) { return dtype == LLAMAC_Q8 ? INPUT_INT16 : INPUT_F32; }
static inline size_t kv_query_words(int dtype, int head_dim) { return input_words(kv_query_type(dtype), head_dim); }

// One KV head of one layer in a sequence's pages.
struct kv_view {
    const uint8_t *const *pages;
    size_t key_offset, value_offset;   // in each page
};

// softmax(q K) V for up to ATTENTION_QUERIES queries of one KV head, each with its own range of positions.
//
// A score is a sum over ascending d; with q8 it is computed like a product with q8_0 (struct gemm). If there are
// biases, that of the distance between the two positions is added. If there is a cap, s = soft_cap tanh(s / soft_cap)
// follows. Blocks of ATTENTION_BLOCK positions start at multiples of it. Per block: m = max score, p = exp(score - m),
// l = sum of p as 16 partial sums by position mod 16 reduced by v16_reduce_add, o = sum of p * v over ascending
// positions, starting at 0. With q8, o = fma(i, d, o) over ascending pages: the p * scale of a page, 0 where the query
// does not see the position, become codes of 0 to NUMERATOR_LIMIT with one scale d, rounded like inputs of products; i
// is the exact integer sum of code * code over the page, which is below 2^24. Blocks are merged in ascending order
// (online softmax: Milakov and Gimelshein 2018), starting with the first block that contains a visible position; a sink
// is merged last, as a block with m = the sink, l = 1 and o = 0. Values at positions outside a query's range never
// enter its arithmetic, not even multiplied by 0.
struct attend {
    struct kv_view kv;
    int head_dim, value_dim, n_queries;   // numbers of a key, and of a value: at most head_dim
    const void *q;                  // panels of the cache's query type, already multiplied by the attention scale
    int begin[ATTENTION_QUERIES], end[ATTENTION_QUERIES];   // each query sees positions [begin, end), at least one
    float soft_cap;                 // 0: none
    int has_sinks;
    float sinks[ATTENTION_QUERIES]; // with has_sinks: one more logit of each query's softmax, without a value
    // NULL, or per query the biases of distances -bias_distance to bias_distance, from its own position to a key's. The
    // pointer is to that of distance 0. Larger distances have the bias of the largest.
    const float *biases[ATTENTION_QUERIES];
    int bias_distance, position[ATTENTION_QUERIES];   // with biases
    float *out;                     // (n_queries, padded_head_dim(value_dim))
    // NULL: `attend` computes all blocks and out. Otherwise it computes the blocks of positions [from, to), multiples
    // of ATTENTION_BLOCK or past the end, and stores m, l and o of each: (blocks, n_queries,
    // partial_floats(value_dim)). attend_merge then computes out.
    int from, to;
    float *partials;
    float *scratch;                 // attend_layout(head_dim).end floats
    float *scores;                  // NULL; or (n_queries, scores_stride): only compute the scores, for an observer
    size_t scores_stride;
    struct cancel *cancel;
};
// Where the parts of a call's scratch memory begin, in floats, after the scores. `end`: floats of all parts.
struct attend_layout { size_t o, unpack_buffer, sums, row, end; };
static inline struct attend_layout attend_layout(int head_dim) {
    const size_t width = (size_t)padded_head_dim(head_dim);
    struct attend_layout l = { .o = (size_t)ATTENTION_QUERIES * ATTENTION_BLOCK };
    l.unpack_buffer = l.o + ATTENTION_QUERIES * width;
    l.sums = l.unpack_buffer + KV_PAGE * width;
    l.row = l.sums + KV_PAGE * PANEL_ROWS;
    l.end = l.row + width;
    return l;
}

// A causal convolution of one position for `channels` adjacent channels, each on its own: sum = fma(weight, input, sum)
// over the taps, the oldest first, from the bias or 0; y = silu(sum), or the sum itself.
struct convolve {
    int width, channels, is_silu;
    const float *const *inputs;     // (width): the channels of each tap; NULL before the first position: no fma
    const float *weights;           // (width, weight_stride)
    size_t weight_stride;
    const float *bias;              // (channels), or NULL
    float *out;                     // (channels)
};

// The delta rule for one head and consecutive rows: S is a matrix (key_dim, value_dim), updated in place. It is stored
// as groups of 64 columns, then groups of 16 for the rest: (key_dim, columns) each. For each row, S = S decay; m = S^T
// k and later o = S^T q as fused multiply-adds over ascending key dimensions from 0; change = (v - m) beta; S =
// fma(change, k, S); o goes to `out`.
struct delta_rule {
    int key_dim, value_dim, n_rows;
    float *state;
    const float *q, *k, *v;         // of the first row; rows are row_stride floats apart
    size_t row_stride;
    const float *decay, *beta;      // one number per row, gate_stride floats apart
    size_t gate_stride;
    float *out;                     // (n_rows, value_dim), rows out_stride floats apart
    size_t out_stride;
};

// The gates of n adjacent heads of Mamba 2 in one row, in double as gates.h defines them, then rounded: step =
// softplus(decay + bias), at least step_min and, if step_max > 0, at most step_max; decay = decay_of(rate, step).
struct ssm_gates {
    int n;
    float step_min, step_max;
    const float *bias, *rate;       // (n)
    float *decay, *step;            // (n); decay is updated in place
};

// The recurrence of a Mamba 2 head (Dao and Gu 2024) over consecutive rows: S is a matrix (state_dim, head_dim),
// updated in place and stored as groups of 16 columns: (state_dim, 16) each. For each row, with u = x step: S =
// fma(u, b, S decay); o = S^T c as fused multiply-adds over ascending state dimensions from 0; out = fma(x, skip, o).
struct ssm_scan {
    int state_dim, head_dim, n_rows;
    float *state;
    const float *x, *b, *c;         // of the first row; rows are row_stride floats apart
    size_t row_stride;
    const float *decay, *step;      // one number per row, gate_stride floats apart
    size_t gate_stride;
    float skip;
    float *out;                     // (n_rows, head_dim), rows out_stride floats apart
    size_t out_stride;
};

// Quantizes rows of w to strips of q8, q6, q4, q4s, q3 or q2 (quantize_template.h). QUANTIZE_STRIPS strips are
// quantized together.
enum { QUANTIZE_STRIPS = 4 };
struct quantize {
    int dtype, columns;
    size_t rows, strip_bytes;
    const float *w;                 // (rows, columns)
    const float *weight;            // (columns), then zeros up to a whole group: the weights of squared errors
    int is_weighted;                // whether any weight differs from 1
    const float *feedback;          // (columns, columns) or NULL
    float clip;                     // the smallest scale tried maps the largest magnitude to clip * the last code
    float *scratch;                 // QUANTIZE_STRIPS * quantize_strip_floats(columns, feedback != NULL) floats
    uint8_t *out;
};
static inline size_t quantize_strip_floats(int columns, int has_feedback) {
    const size_t padded = (size_t)ceil_div(columns, GROUP_COLUMNS) * GROUP_COLUMNS;
    return STRIP_ROWS * (has_feedback ? 2 * padded + BLOCK_COLUMNS : padded);
}

// Arrays are indexed by dtype or input type. Entries that do not apply are NULL: attend, store_* and load_* exist only
// for the dtypes of the KV cache.
struct kernels {
    const char *name;
    // The maximum height of a panel of a product's inputs. Panels of queries have up to PANEL_ROWS.
    int panel_rows[N_INPUT_TYPES];
    void (*gemm)(const struct gemm *g);
    // Packs a row of `columns` floats into a panel. If a group (int8) or block (int16) contains a NaN or an infinity,
    // its scale becomes NaN, and so does every sum over it.
    void (*pack[N_INPUT_TYPES])(struct panel_row to, const float *row, int columns);
    // Packs a row of INPUT_INT16 for `gemm`, rounded as above if `fast` is set. m: the rows of the product, which
    // decide whether panels are narrow or contain pairs.
    void (*pack_int16_product)(struct panel_row to, const float *row, int columns, int m, int fast);
    // The same for INPUT_BF16, rounded.
    void (*pack_bf16)(struct panel_row to, const float *row, int columns, int m);
    void (*attend[LLAMAC_N_DTYPES])(const struct attend *a);
    // Merges the partial results of all blocks that any query sees.
    void (*attend_merge)(const struct attend *a, const float *partials, int n_blocks);
    // Converts row `row` of a matrix in strips to f32.
    void (*gather[LLAMAC_N_DTYPES])(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y);
    // y = x rounded to integers from -127 to 127 times a scale, which it returns: the largest magnitude, at least 1e-5,
    // over 127. The scale is NaN, and so is y, if x contains a NaN or an infinity. y may be x.
    float (*round_row)(const float *x, int n, float *y);
    // Packs a row for INPUT_INT8, of integers times the scale that round_row returned for the whole row.
    void (*pack_rounded)(struct panel_row to, const float *row, int columns, float scale);
    // y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019); bias is ignored. y may be x.
    void (*rms_norm)(const float *x, const float *w, const float *bias, float eps, int n, float *y);
    // y = (x - mean) / sqrt(variance + eps) * w + bias (Ba et al. 2016); bias may be NULL. y may be x.
    void (*layer_norm)(const float *x, const float *w, const float *bias, float eps, int n, float *y);
    // y = act(gate) * up, or act(gate) if up is NULL. activation: enum activation.
    void (*activate)(int activation, const float *gate, const float *up, int n, float *y);
    // y = xIELU(y) with the softplus of its learned numbers (functions.h). activate does not compute this activation.
    void (*xielu)(float *y, int n, float alpha_p, float alpha_n);
    void (*add)(const float *x, int n, float *y);   // y += x
    void (*gate)(float *y, const float *gate, int n);   // y /= 1 + exp(-gate)
    // y = min(max(y, low), high) + offset. A NaN stays a NaN.
    void (*clamp)(float *y, int n, float low, float high, float offset);
    // y *= scale; then y = cap tanh(y / cap) unless cap is 0.
    void (*scale)(float *y, int n, float scale, float cap);
    // x = softmax(x), summed in the order of `attend`. The buffer of x is padded to a multiple of 16 floats.
    void (*softmax)(float *x, int n);
    // For sampling. maxima[b] = the maximum of block b of n floats, -inf if all are NaN. `block` is a multiple of 16.
    // Returns the maximum of all.
    float (*block_maxima)(const float *x, int n, int block, float *maxima);
    // For sampling. y = (float)exp_negative((double)(x - largest) / temperature), 0 where that is NaN. Returns the sum;
    // its order of additions is unspecified. x and y do not overlap.
    double (*exponentials)(const float *x, int n, float largest, float temperature, float *y);
    // Rotates the pairs (x[j], x[j + half]) by angles given as cosines and sines (RoPE, Su et al. 2021).
    void (*rotate)(float *x, const float *cosines, const float *sines, int half);
    void (*convolve)(const struct convolve *c);
    // x = x * (factor / sqrt(sum of x^2 + eps)), the sum in the order of the norms.
    void (*unit_norm)(float *x, int n, float eps, float factor);
    void (*delta_rule)(const struct delta_rule *d);
    void (*ssm_gates)(const struct ssm_gates *g);
    void (*ssm_scan)(const struct ssm_scan *s);
    // Stores one position's key or value of one head in its page. f16 saturates at +-65504, q8 at 127 times as much. In
    // q8 a scale is 0 if all its magnitudes are below 2^-100, and NaN if any is NaN or infinite.
    void (*store_key[LLAMAC_N_DTYPES])(uint8_t *keys, int slot, int head_dim, const float *x);
    void (*store_value[LLAMAC_N_DTYPES])(uint8_t *values, int slot, int head_dim, const float *x);
    // Reads it back.
    void (*load_key[LLAMAC_N_DTYPES])(const uint8_t *keys, int slot, int head_dim, float *x);
    void (*load_value[LLAMAC_N_DTYPES])(const uint8_t *values, int slot, int head_dim, float *x);
    void (*quantize)(const struct quantize *q);
    // For `llamac bench`. Reads `floats` floats, a multiple of streams * READ_STEP, as 1, 2 or 4 concurrent streams.
    // Returns their sum.
    float (*read_block)(const float *block, size_t floats, int streams);
    // For `llamac bench`. Runs the multiply-adds of products of many rows with this input type, exact or fast, on
    // operands in L1. Returns their number.
    double (*peak[N_INPUT_TYPES][2])(int passes, float *result);
};

// Packs a row of a product of m rows. fast: whether inputs of INPUT_INT16 and INPUT_BF16 are rounded.
static inline void pack_input(const struct kernels *kernels, int input, struct panel_row to, const float *row,
                              int columns, int m, int fast) {
    if (input == INPUT_INT16) kernels->pack_int16_product(to, row, columns, m, fast);
    else if (input == INPUT_BF16 && fast) kernels->pack_bf16(to, row, columns, m);
    else kernels->pack[input](to, row, columns);
}

// Tests that do not depend on the kernels define LLAMAC_SCALAR_ONLY, which compiles in a fraction of the time.
#if defined(__x86_64__) && !defined(LLAMAC_SCALAR_ONLY)
#define HAS_KERNELS_X86
#elif defined(__aarch64__) && !defined(LLAMAC_SCALAR_ONLY)
#define HAS_KERNELS_NEON
#endif
// Builds with compilers older than GCC 11 and Clang 12 define LLAMAC_NO_AVXVNNI and leave out that table.
#if defined(HAS_KERNELS_X86) && !defined(LLAMAC_NO_AVXVNNI)
#define HAS_KERNELS_AVXVNNI
#endif
// Likewise LLAMAC_NO_AMX. AMX needs permission from the system, which llamac requests only on Linux.
#if defined(HAS_KERNELS_X86) && defined(__linux__) && !defined(LLAMAC_NO_AMX)
#define HAS_KERNELS_AMX
#endif
extern const struct kernels kernels_scalar, kernels_avx2, kernels_avxvnni, kernels_avx512, kernels_avx512vnni;
extern const struct kernels kernels_amx;
extern const struct kernels kernels_neon, kernels_neon_dotprod, kernels_neon_i8mm;

// Returns the named table, or the best table for this processor if name is NULL. If the named table is unknown or
// unsupported, returns NULL and fills err.
const struct kernels *kernels_select(const char *name, llamac_error *err);
// Returns the best table for this processor, which is determined once.
const struct kernels *kernels_best(void);
#endif
