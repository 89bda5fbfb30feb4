// SPDX-License-Identifier: MIT
// quantize_template.h - quantizes strips of f32 rows to q8, q6, and the dtypes with grids: q4, q4s, q3 and q2. Each
// block gets the scale, and with it the grid, of least weighted error. With feedback (GPTQ: Frantar et al. 2022) the
// columns to the right compensate the rounding error of a column.
//
// The 16 rows of a strip are the lanes of a v16, so no sum crosses lanes, and a row's bytes depend on the row alone.
// Every step is a rounded single-precision operation in a fixed order: each SIMD layer gives the same bytes. Rows are
// computed in units of their scale D, in which block scales are integers.

enum {
    GRIDS = 4,
    MAX_CODE_Q8 = 127,
    MAX_GRID_0_SCALE = 124,        // grid 0, which has the code of the largest magnitude, has multiples of 4
};
static const float MIN_MAGNITUDE = 0x1p-100f;   // a row whose magnitudes are all smaller is quantized to zeros
// Where the search for the least error begins. It is below infinity, the error of excluded candidates, so these never
// win.
static const float WORSE_THAN_ANY = 3.4e38f;

// A task, and what the positions of values mean: codes[g] gives the codes of grid g, nibbles the nibbles of grid 0.
struct quantizer {
    const struct quantize *task;
    struct code_values values;
    code_table codes[GRIDS], nibbles;
    struct code_cells cells[GRIDS];
};

static void init_quantizer(struct quantizer *q, const struct quantize *task) {
    int8_t values[16];
    q->task = task;
    if (!dtype_has_grids(task->dtype)) return;
    q->values = code_values_of(task->dtype);
    for (int i = 0; i < 16; i++) values[i] = (int8_t)i;
    code_table_init(&q->nibbles, q->values, values, 0);
    for (int offset = 0; offset < GRIDS; offset++) {
        code_cells_init(&q->cells[offset], q->values, offset);
        for (int i = 0; i < 16; i++) values[i] = (int8_t)(q->values.at[i] + offset);
        code_table_init(&q->codes[offset], q->values, values, offset);
    }
}

// A strip that is being quantized. Columns are padded with zeros to whole groups.
struct strip {
    const struct quantizer *q;
    float scales[STRIP_ROWS];      // D of each row
    float *originals;              // (padded columns, 16): the values in units of D
    float *targets;                // with feedback: the same plus the errors they compensate; otherwise `originals`
    float *errors;                 // with feedback, (128, 16): of the current block of 128 columns
    uint8_t *out;                  // the next block's bytes
};

#include "quantize_search.h"

// ---- dtypes with grids: the codes

// The nibbles of up to four targets, and the values they stand for. A scale of 0 gives zeros.
INLINE void nearest_nibbles(const struct quantizer *q, const struct grid *g, const v16 *x, v16 *nibbles, v16 *values) {
    v16 position[4], code[4];
    const v16 zero = v16_set1(0), magnitude = v16_abs(g->scale), two = v16_set1(2);
    UNROLL for (int i = 0; i < 4; i++) {
        position[i] = v16_add(v16_mul(x[i], g->twice_inverse), v16_set1((float)(CODE_POSITIONS / 2)));
        // exact, except far below all codes
        position[i] = v16_sub(position[i], v16_mul(two, g->offset));
    }
    v16_nearest_codes(code_lut_load(&q->nibbles), position, nibbles);
    v16_nearest_codes(code_lut_load(&q->codes[0]), position, code);
    UNROLL for (int i = 0; i < 4; i++) {
        nibbles[i] = v16_select_less(zero, magnitude, nibbles[i], zero);
        values[i] = v16_mul(g->scale, v16_add(code[i], g->offset));
    }
}

// Without feedback: the nearest codes.
static void assign_codes(const struct quantizer *q, const struct block *b, v16 scale, int8_t *nibbles) {
    const struct grid g = grid_of(scale);
    for (int k = 0; k < b->n; k += 4) {
        v16 x[4], found[4], values[4];
        for (int i = 0; i < 4; i++) x[i] = v16_load(lanes(b->x, k + i));
        nearest_nibbles(q, &g, x, found, values);
        for (int i = 0; i < 4 && k + i < b->n; i++) v16_store_int8(nibbles + STRIP_ROWS * (k + i), found[i]);
    }
}

// With feedback: chooses codes from left to right and passes each column's error on to the columns after it. Returns
// the weighted squared error.
static v16 assign_compensated(const struct quantizer *q, const struct block *b, v16 scale, int8_t *nibbles,
                              float *values) {
    const struct grid g = grid_of(scale);
    float targets[GROUP_COLUMNS * STRIP_ROWS];
    memcpy(targets, b->x, sizeof(float) * STRIP_ROWS * (size_t)b->n);
    v16 error = v16_set1(0);
    for (int k = 0; k < b->n; k++) {
        const v16 target = v16_load(lanes(targets, k));
        const v16 x[4] = { target, target, target, target };
        v16 found[4], value[4];
        nearest_nibbles(q, &g, x, found, value);
        v16_store_int8(nibbles + STRIP_ROWS * k, found[0]);
        v16_store(values + STRIP_ROWS * k, value[0]);
        const v16 difference = v16_sub(target, value[0]);
        error = v16_add(error, v16_mul(v16_set1(b->weight[k]), v16_mul(difference, difference)));
        const v16 total = v16_sub(v16_load(lanes(b->originals, k)), value[0]);
        const float *row = b->feedback + (size_t)k * b->stride;
        for (int j = k + 1; j < b->n; j++)
            v16_store(targets + STRIP_ROWS * j,
                      v16_add(v16_load(lanes(targets, j)), v16_mul(total, v16_set1(row[j]))));
    }
    return error;
}

// The candidate that gives the least error when errors are compensated inside the block.
static v16 best_compensated(const struct quantizer *q, const struct block *b, const struct candidates *c,
                            v16 zero_error, int8_t *nibbles, float *values) {
    const v16 infinity = v16_set1(__builtin_inff()), zero = v16_set1(0);
    v16 best = zero, least = v16_set1(WORSE_THAN_ANY);
    for (int i = 0; i < CANDIDATES; i++) {
        v16 error = assign_compensated(q, b, c->scale[i], nibbles, values);
        error = v16_select_less(zero, v16_abs(c->scale[i]), error, zero_error);
        error = v16_select_less(c->error[i], infinity, error, infinity);   // fewer candidates than CANDIDATES
        best = v16_select_less(error, least, c->scale[i], best);
        least = v16_select_less(error, least, error, least);
    }
    return best;
}

// Quantizes a block with feedback: writes nibbles and dequantized values; returns the scales.
static v16 fit_compensated(const struct quantizer *q, const struct block *b, int width, int8_t *nibbles,
                           float *values) {
    const struct peaks peaks = find_peaks(b);
    struct candidates c;
    start_candidates(&c, peaks.zero_error);
    if (width == 16) search_16_feedback(b, q, &peaks, &c);
    else search_32_feedback(b, q, &peaks, &c);
    const v16 best = best_compensated(q, b, &c, peaks.zero_error, nibbles, values);
    assign_compensated(q, b, best, nibbles, values);
    return best;
}

// ---- q8 and q6: linear codes

// The codes of a dtype with linear codes: -32 to 31 in q6; -127 to 127 in q8, where -128 is not used.
INLINE int lowest_code(const int dtype) { return -min_int(dtype_table[dtype].offset, MAX_CODE_Q8); }
INLINE int highest_code(const int dtype) { return dtype_table[dtype].offset - 1; }
INLINE v16 nearest_linear(const int dtype, v16 x, v16 inverse) {
    v16 v = v16_max(v16_mul(x, inverse), v16_set1((float)lowest_code(dtype)));
    v = v16_min(v, v16_set1((float)highest_code(dtype)));
    return v16_sub(v16_add(v, v16_set1(0x1.8p23f)), v16_set1(0x1.8p23f));   // to nearest even
}

// Quantizes a block of linear codes: writes codes, returns the scales. Codes are uniform, so the best scale has nearly
// the smallest size that does not clip; that size and the two below it are tried. Where codes reach further below 0
// than above (q6), both signs of the scale are tried, first the one that maps the largest magnitude to the lowest code.
INLINE v16 fit_block_linear(const int dtype, const struct block *b, int8_t *codes) {
    enum { SIZES = 3 };
    const v16 zero = v16_set1(0), one = v16_set1(1), infinity = v16_set1(__builtin_inff());
    const int signs = lowest_code(dtype) == -highest_code(dtype) ? 1 : 2;
    v16 max = zero, sign = one;
    for (int i = 0; i < b->n; i++) {
        const v16 x = v16_load(lanes(b->x, i)), a = v16_abs(x);
        if (signs == 2) sign = v16_select_less(max, a, v16_select_less(x, zero, one, v16_set1(-1)), sign);
        max = v16_max(a, max);
    }
    v16 scale[2 * SIZES], inverse[2 * SIZES], error[2 * SIZES];
    UNROLL for (int side = 0; side < signs; side++) {
        float size[STRIP_ROWS];
        v16_store(size, v16_div(max, v16_set1((float)(side ? highest_code(dtype) : -lowest_code(dtype)))));
        for (int r = 0; r < STRIP_ROWS; r++) size[r] = (float)min_int(MAX_SCALE, (int)size[r] + 1);
        const v16 to_sign = side ? v16_sub(zero, sign) : sign;
        UNROLL for (int j = 0; j < SIZES; j++) {
            const v16 tried = v16_sub(v16_load(size), v16_set1((float)j));
            scale[SIZES * side + j] = v16_mul(to_sign, tried);
            inverse[SIZES * side + j] = v16_mul(to_sign, v16_div(one, v16_max(tried, one)));
            error[SIZES * side + j] = v16_select_less(tried, one, infinity, zero);
        }
    }
    for (int i = 0; i < b->n; i++) {
        const v16 x = v16_load(lanes(b->x, i)), weight = v16_set1(b->weight[i]);
        UNROLL for (int j = 0; j < signs * SIZES; j++) {
            const v16 difference = v16_sub_exact_product(x, scale[j], nearest_linear(dtype, x, inverse[j]));
            error[j] = v16_add(error[j], v16_mul(weight, v16_mul(difference, difference)));
        }
    }
    v16 best = zero, best_inverse = zero, least = v16_set1(WORSE_THAN_ANY);
    UNROLL for (int j = 0; j < signs * SIZES; j++) {
        const v16 found = v16_select_less(zero, max, error[j], infinity);
        best = v16_select_less(found, least, scale[j], best);
        best_inverse = v16_select_less(found, least, inverse[j], best_inverse);
        least = v16_select_less(found, least, found, least);
    }
    for (int i = 0; i < b->n; i++)
        v16_store_int8(codes + STRIP_ROWS * i, nearest_linear(dtype, v16_load(lanes(b->x, i)), best_inverse));
    return best;
}
static v16 fit_block_q8(const struct block *b, int8_t *codes) { return fit_block_linear(LLAMAC_Q8, b, codes); }
static v16 fit_block_q6(const struct block *b, int8_t *codes) { return fit_block_linear(LLAMAC_Q6, b, codes); }

// ---- strips

INLINE void store_words(uint8_t *to, const uint32_t *words) {
    for (int r = 0; r < STRIP_ROWS; r++)   // little-endian, whatever the processor
        for (int i = 0; i < 4; i++) to[4 * r + i] = (uint8_t)(words[r] >> 8 * i);
}

// Arranges the codes of one group, (32, 16), in lines (dtype.h).
static void store_codes(int dtype, const int8_t *codes, uint8_t *to) {
    const int bits = dtype_table[dtype].code_bits;
    const uint32_t bytes = 0x01010101u, offset = bytes * dtype_table[dtype].offset;
    const uint32_t mask = bytes * ((1u << bits) - 1);
    uint32_t words[GROUP_COLUMNS / 4][STRIP_ROWS];   // [l][r]: row r, columns 4 l to 4 l + 3
    for (int l = 0; l < GROUP_COLUMNS / 4; l++) {
        const uint8_t *c = (const uint8_t *)codes + STRIP_ROWS * 4 * l;
        for (int r = 0; r < STRIP_ROWS; r++)   // plus the offset, modulo 2^bits
            words[l][r] = (((uint32_t)c[r] | (uint32_t)c[16 + r] << 8 | (uint32_t)c[32 + r] << 16 |
                            (uint32_t)c[48 + r] << 24) ^ offset) & mask;
    }
    if (bits == 8) {
        for (int l = 0; l < GROUP_COLUMNS / 4; l++) store_words(to + LINE_BYTES * l, words[l]);
        return;
    }
    uint32_t stored[STRIP_ROWS];
    for (int h = 0; h < 2 && bits < 4; h++) {   // the low 2 bits
        memset(stored, 0, sizeof stored);
        for (int v = 0; v < 4; v++)
            for (int r = 0; r < STRIP_ROWS; r++)
                stored[r] |= (words[4 * h + v][r] & bytes * 3) << (v / 2 * 2 + v % 2 * 4);
        store_words(to + LINE_BYTES * h, stored);
    }
    memset(stored, 0, sizeof stored);
    for (int l = 0; l < 8 && bits == 3; l++)
        for (int r = 0; r < STRIP_ROWS; r++) stored[r] |= (words[l][r] >> 2 & bytes) << (l / 2 + l % 2 * 4);
    if (bits == 3) store_words(to + LINE_BYTES * 2, stored);
    for (int l = 0; l < 4 && bits >= 4; l++) {
        for (int r = 0; r < STRIP_ROWS; r++)
            stored[r] = (words[2 * l][r] & bytes * 15) | (words[2 * l + 1][r] & bytes * 15) << 4;
        store_words(to + LINE_BYTES * l, stored);
    }
    for (int h = 0; h < 2 && bits == 6; h++) {   // the high bits
        memset(stored, 0, sizeof stored);
        for (int v = 0; v < 4; v++)
            for (int r = 0; r < STRIP_ROWS; r++) stored[r] |= (words[4 * h + v][r] >> 4 & bytes * 3) << 2 * v;
        store_words(to + LINE_BYTES * (4 + h), stored);
    }
}

// The rest of a block of 128 columns, up to column `end`, compensates the errors of the n columns at `at`.
// compensate_later updates the columns after the block.
static void compensate_block(const struct strip *s, int block, int at, int n, int end, const float *values) {
    const size_t columns = (size_t)s->q->task->columns;
    float *errors = s->errors + STRIP_ROWS * (at - block);
    for (int i = 0; i < n; i++)
        v16_store(errors + STRIP_ROWS * i, v16_sub(v16_load(lanes(s->originals, at + i)),
                                                   v16_load(lanes(values, i))));
    for (int j = at + n; j < end; j++) {
        v16 target = v16_load(lanes(s->targets, j));
        for (int i = 0; i < n; i++)
            target = v16_add(target, v16_mul(v16_load(lanes(errors, i)),
                                             v16_set1(s->q->task->feedback[(size_t)(at + i) * columns + (size_t)j])));
        v16_store(s->targets + STRIP_ROWS * j, target);
    }
}

// The n columns from `first` on, which share a scale.
INLINE struct block block_at(const struct strip *s, int first, int n) {
    const struct quantize *task = s->q->task;
    const size_t stride = (size_t)task->columns;
    return (struct block){
        .x = lanes(s->targets, first), .originals = lanes(s->originals, first), .weight = task->weight + first,
        .feedback = task->feedback ? task->feedback + (size_t)first * stride + (size_t)first : NULL,
        .stride = stride, .n = n,
    };
}

// The scales of blocks without feedback, in n columns from `first` on.
static void find_scales(const struct strip *s, int first, int n, v16 *scales) {
    const struct quantizer *q = s->q;
    const int width = scale_columns(q->task->dtype), all = q->task->is_weighted ? 0 : n / width;
    if (all) find_scales_sorted(q, lanes(s->targets, first), width, all, scales);
    for (int i = all; i * width < n; i++) {
        const struct block b = block_at(s, first + i * width, min_int(width, n - i * width));
        scales[i] = best_scales(q, &b, width);
    }
}

// Quantizes n columns starting at `first`: one block of 128 columns of the file format.
static void quantize_block(struct strip *s, int first, int n) {
    const struct quantizer *q = s->q;
    const struct quantize *task = q->task;
    const int groups = ceil_div(n, GROUP_COLUMNS), per_scale = scale_columns(task->dtype);
    uint8_t *scales = s->out, *codes = s->out + block_scale_bytes(task->dtype, groups);
    v16 known[MAX_SPANS];
    memset(scales, 0, block_scale_bytes(task->dtype, groups));
    if (task->feedback) memset(s->errors, 0, sizeof(float) * STRIP_ROWS * BLOCK_COLUMNS);
    else if (dtype_has_grids(task->dtype)) find_scales(s, first, n, known);
    for (int group = 0; group < groups; group++) {
        int8_t found[GROUP_COLUMNS * STRIP_ROWS] = { 0 };
        for (int k = group * GROUP_COLUMNS; k < min_int(n, (group + 1) * GROUP_COLUMNS); k += per_scale) {
            const struct block b = block_at(s, first + k, min_int(per_scale, n - k));
            int8_t *to = found + STRIP_ROWS * (k - group * GROUP_COLUMNS);
            float values[GROUP_COLUMNS * STRIP_ROWS];
            v16 best;
            if (task->dtype == LLAMAC_Q8) best = fit_block_q8(&b, to);
            else if (task->dtype == LLAMAC_Q6) best = fit_block_q6(&b, to);
            else if (task->feedback) best = fit_compensated(q, &b, per_scale, to, values);
            else assign_codes(q, &b, best = known[k / per_scale], to);
            v16_store_int8((int8_t *)scales + k / per_scale * STRIP_ROWS, best);
            if (task->feedback) compensate_block(s, first, first + k, b.n, first + n, values);
        }
        store_codes(task->dtype, found, codes + (size_t)group * group_code_bytes(task->dtype));
    }
    s->out += block_bytes(task->dtype, groups);
}

// targets[j] += sum over i of errors[i] * feedback[i][j], for T columns from j on. i: the block's n columns from
// `first` on.
INLINE void compensate_columns(const struct strip *s, int first, int n, int j, const int T) {
    const size_t columns = (size_t)s->q->task->columns;
    const float *feedback = s->q->task->feedback + (size_t)first * columns + (size_t)j;
    v16 sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = v16_load(lanes(s->targets, j + t));
    for (int i = 0; i < n; i++, feedback += columns) {
        const v16 error = v16_load(lanes(s->errors, i));
        UNROLL for (int t = 0; t < T; t++) sum[t] = v16_add(sum[t], v16_mul(error, v16_set1(feedback[t])));
    }
    UNROLL for (int t = 0; t < T; t++) v16_store(s->targets + STRIP_ROWS * (j + t), sum[t]);
}

// All strips pass through a piece of the feedback matrix while it is in the cache.
static void compensate_later(const struct strip *strips, int n_strips, int first, int n) {
    int j = first + n;
    const int columns = strips[0].q->task->columns;
    for (; j + 8 <= columns; j += 8)
        for (int i = 0; i < n_strips; i++) compensate_columns(&strips[i], first, n, j, 8);
    for (; j < columns; j++)
        for (int i = 0; i < n_strips; i++) compensate_columns(&strips[i], first, n, j, 1);
}

// The row scale D under which the row's largest magnitude is the largest representable |s * c|, and its inverse. Both
// are 0 for a row below MIN_MAGNITUDE.
static float row_scale(const float *x, int n, int dtype, float *inverse) {
    v16 peak = v16_set1(0);
    for (int k = 0; k < n; k += 16) peak = v16_max(v16_abs(v16_load_n(x + k, min_int(16, n - k))), peak);
    const int most = dtype_has_grids(dtype) ? MAX_GRID_0_SCALE * -code_values_of(dtype).at[0]
                                            : MAX_SCALE * -lowest_code(dtype);
    const float max = v16_reduce_max(peak), largest = (float)most;
    *inverse = max < MIN_MAGNITUDE ? 0 : largest / max;
    return max < MIN_MAGNITUDE ? 0 : max / largest;
}

// Fills `originals` and `scales` from up to 16 rows.
static void load_strip(struct strip *s, const float *w, int rows) {
    const int columns = s->q->task->columns, padded = ceil_div(columns, GROUP_COLUMNS) * GROUP_COLUMNS;
    float inverses[STRIP_ROWS] = { 0 };
    memset(s->scales, 0, sizeof s->scales);
    for (int r = 0; r < rows; r++)
        s->scales[r] = row_scale(w + (size_t)r * (size_t)columns, columns, s->q->task->dtype, &inverses[r]);
    for (int first = 0; first < padded; first += 16) {   // one cache line of each row at a time
        float *to = s->originals + STRIP_ROWS * first;
        const int n = max_int(0, min_int(16, columns - first));
        if (rows < STRIP_ROWS || n < 16) memset(to, 0, sizeof(float) * STRIP_ROWS * 16);
        for (int r = 0; r < rows; r++) {
            const float *from = w + (size_t)r * (size_t)columns + (size_t)first, inverse = inverses[r];
            for (int k = 0; k < n; k++) to[STRIP_ROWS * k + r] = from[k] * inverse;
        }
    }
}

static void quantize_strips(const struct quantize *task) {
    struct quantizer quantizer;
    init_quantizer(&quantizer, task);
    const struct quantizer *q = &quantizer;
    const int padded = ceil_div(task->columns, GROUP_COLUMNS) * GROUP_COLUMNS;
    const size_t floats = STRIP_ROWS * (size_t)padded;
    struct strip strips[QUANTIZE_STRIPS];
    const int most = task->feedback ? QUANTIZE_STRIPS : 1;
    for (size_t row = 0; row < task->rows;) {
        int n_strips = 0;
        float *scratch = task->scratch;
        for (; n_strips < most && row < task->rows; n_strips++, row += STRIP_ROWS) {
            struct strip *s = &strips[n_strips];
            *s = (struct strip){ .q = q, .originals = scratch, .targets = scratch,
                                 .out = task->out + row / STRIP_ROWS * task->strip_bytes };
            const size_t left = task->rows - row;
            load_strip(s, task->w + row * (size_t)task->columns, left < STRIP_ROWS ? (int)left : STRIP_ROWS);
            memcpy(s->out, s->scales, LINE_BYTES);
            s->out += LINE_BYTES;
            if (!task->feedback) continue;
            s->targets = s->originals + floats, s->errors = s->targets + floats;
            memcpy(s->targets, s->originals, sizeof(float) * floats);
            scratch += quantize_strip_floats(task->columns, 1);
        }
        for (int first = 0; first < task->columns; first += BLOCK_COLUMNS) {
            const int n = min_int(BLOCK_COLUMNS, task->columns - first);
            for (int i = 0; i < n_strips; i++) quantize_block(&strips[i], first, n);
            if (task->feedback) compensate_later(strips, n_strips, first, n);
        }
    }
}
