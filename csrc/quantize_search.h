// SPDX-License-Identifier: MIT
// quantize_search.h - the search for the scales of dtypes with grids: of all scales that can be best, it finds those of
// least weighted error with the nearest codes. Part of quantize_template.h.
//
// Blocks without weights take two steps. The first computes all errors in integers, with a bound on their inaccuracy.
// The second recomputes, as the definition does, the few that can be the least, so the result is exact.

enum {
    MAX_SPANS = BLOCK_COLUMNS / 16,    // blocks of columns that share a scale, in 128 columns
    MAX_SCALE = 127,
    CANDIDATES = 6,                // scales that are tried with feedback inside the block
    MAX_TRIED = 2 * (MAX_SCALE + 1),   // scales of a block: every size with both signs
    // If the largest magnitude of a block, in units of the first code, is smaller, then rounding down the smallest
    // size that is tried can put values beyond the positions that integers can represent.
    MIN_COARSE = 19,
    COARSE_UNIT = 512,             // integer positions are multiples of 1/512 code
};
// Bounds the error of an integer position, in codes. With values scaled to 32767 and the factor m to at most
// 38 * 512 (the largest magnitude maps to at most 1.06 * 1.12 * 32 in q4, and to less with fewer bits), it is
// (0.5 m / 32768 + 0.5 + 0.5) / 512.
static const float COARSE_ERROR = 1.4f / COARSE_UNIT;

// The columns of a strip that share a scale: n targets, zero-padded to 16 or 32 columns, and their weights.
struct block {
    const float *x, *originals, *weight;
    const float *feedback;         // the block's part of the feedback matrix, or NULL
    size_t stride;                 // of feedback
    int n;
};
INLINE const float *lanes(const float *x, int column) { return x + column * STRIP_ROWS; }

// ---- the error of a scale

// What a scale means for its row: the factor that turns a value into a position, and the grid's offset.
struct grid { v16 scale, twice_inverse, offset; };

// A scale of 0 has the factor 0.
INLINE struct grid grid_of(v16 scale) {
    float numbers[STRIP_ROWS], offsets[STRIP_ROWS];
    v16_store(numbers, scale);
    for (int r = 0; r < STRIP_ROWS; r++) offsets[r] = (float)((int)numbers[r] & (GRIDS - 1));
    const v16 zero = v16_set1(0), magnitude = v16_abs(scale), inverse = v16_div(v16_set1(2), scale);
    return (struct grid){ scale, v16_select_less(zero, magnitude, inverse, zero), v16_load(offsets) };
}

// The weighted squared errors of four columns with their nearest codes. In units of half a code, code 0 has position
// CODE_POSITIONS / 2. scale * code is an integer below 2^24, so the difference is rounded once. any_grid: `codes` are
// those of grid 0, otherwise those of the grid.
INLINE void column_errors(const struct block *b, const int *columns, const struct grid *g, code_lut codes,
                          const int any_grid, v16 *errors) {
    v16 x[4], position[4], code[4];
    UNROLL for (int i = 0; i < 4; i++) {
        x[i] = v16_load(lanes(b->x, columns[i]));
        position[i] = v16_add(v16_mul(x[i], g->twice_inverse), v16_set1((float)(CODE_POSITIONS / 2)));
        // exact, except far below all codes
        if (any_grid) position[i] = v16_sub(position[i], v16_add(g->offset, g->offset));
    }
    v16_nearest_codes(codes, position, code);
    UNROLL for (int i = 0; i < 4; i++) {
        if (any_grid) code[i] = v16_add(code[i], g->offset);
        const v16 difference = v16_sub_exact_product(x[i], g->scale, code[i]);
        errors[i] = v16_mul(v16_set1(b->weight[columns[i]]), v16_mul(difference, difference));
    }
}

// The weighted squared error of a block. Errors of 16 columns are added as a tree: columns i and i + 8, then i + 4,
// i + 2, i + 1.
INLINE v16 nearest_error(const struct block *b, const struct grid *g, code_lut codes, const int any_grid,
                         const int width) {
    v16 total = v16_set1(0);
    for (int first = 0; first < width; first += 16) {
        v16 part[4];
        for (int i = 0; i < 4; i++) {
            const int columns[4] = { first + i, first + i + 8, first + i + 4, first + i + 12 };
            v16 errors[4];
            column_errors(b, columns, g, codes, any_grid, errors);
            part[i] = v16_add(v16_add(errors[0], errors[1]), v16_add(errors[2], errors[3]));
        }
        const v16 sum = v16_add(v16_add(part[0], part[2]), v16_add(part[1], part[3]));
        total = first ? v16_add(total, sum) : sum;
    }
    return total;
}

// ---- the best scales

// The best scales of each row so far, in ascending order of error.
struct candidates { v16 scale[CANDIDATES], error[CANDIDATES]; };

INLINE void insert_candidate(struct candidates *c, const int capacity, v16 scale, v16 error) {
    for (int i = capacity - 1; i > 0; i--) {
        const v16 to_scale = v16_select_less(error, c->error[i - 1], c->scale[i - 1], scale);
        const v16 to_error = v16_select_less(error, c->error[i - 1], c->error[i - 1], error);
        c->scale[i] = v16_select_less(error, c->error[i], to_scale, c->scale[i]);
        c->error[i] = v16_select_less(error, c->error[i], to_error, c->error[i]);
    }
    c->scale[0] = v16_select_less(error, c->error[0], scale, c->scale[0]);
    c->error[0] = v16_select_less(error, c->error[0], error, c->error[0]);
}

static void start_candidates(struct candidates *c, v16 zero_error) {   // zero_error: of the scale 0
    for (int i = 0; i < CANDIDATES; i++) c->scale[i] = v16_set1(0), c->error[i] = v16_set1(__builtin_inff());
    c->error[0] = zero_error;
}

// The largest magnitudes of a block, and the signs of these numbers: -1 or 1. zero_error: the error of the scale 0.
struct peaks { v16 max, sign, zero_error; };
static struct peaks find_peaks(const struct block *b) {
    const v16 zero = v16_set1(0);
    struct peaks p = { zero, v16_set1(1), zero };
    for (int i = 0; i < b->n; i++) {
        const v16 x = v16_load(lanes(b->x, i)), a = v16_abs(x);
        p.sign = v16_select_less(p.max, a, v16_select_less(x, zero, v16_set1(-1), v16_set1(1)), p.sign);
        p.max = v16_max(a, p.max);
        p.zero_error = v16_add(p.zero_error, v16_mul(v16_set1(b->weight[i]), v16_mul(x, x)));
    }
    return p;
}

// Sizes (magnitudes of scales) of one sign and grid that are tried for each row: first, first + GRIDS, ... up to last.
struct sizes { float first[STRIP_ROWS], last[STRIP_ROWS]; int steps; };   // steps: the most of any row

// `max` is the block's largest magnitude, `end` the grid's last code on the side that it maps to, and `sign` the
// scale's sign. Tried are the sizes that put `max` between 0.64 and `clip` times `end`. Larger scales leave codes
// unused, smaller ones clip too much: this range contains nearly all optima.
INLINE void choose_sizes(v16 max, v16 sign, float end, int offset, float clip, struct sizes *to) {
    float low[STRIP_ROWS], high[STRIP_ROWS], signs[STRIP_ROWS];
    v16_store(low, v16_div(max, v16_set1(clip * end)));
    v16_store(high, v16_div(max, v16_set1(0.64f * end)));
    v16_store(signs, sign);
    for (int r = 0; r < STRIP_ROWS; r++) {
        // magnitudes whose low two bits, with the sign applied, select this grid
        const int residue = signs[r] < 0 ? -offset : offset;
        int size = low[r] < (float)MAX_SCALE ? (int)low[r] : MAX_SCALE - GRIDS + 1;
        size += (residue - size) & (GRIDS - 1);
        size = size ? size : GRIDS;
        float last = high[r] > (float)(GRIDS - 1) ? high[r] : (float)(GRIDS - 1);
        last = last < (float)MAX_SCALE ? last : (float)MAX_SCALE;
        last = high[r] > 0 ? last : -1.0f;   // nothing to try for a block of zeros
        to->first[r] = (float)size, to->last[r] = last;
    }
    const float longest = v16_reduce_max(v16_sub(v16_load(to->last), v16_load(to->first)));
    to->steps = longest < 0 ? 0 : (int)longest / GRIDS + 1;
}

// The errors of all scales that are tried, computed in integers, and the least of each row.
struct coarse {
    uint8_t x[GROUP_COLUMNS / 2][LINE_BYTES];   // pairs of columns; each row's largest magnitude is 32767
    v16 factor;                    // divided by a scale, it turns these numbers into positions
    v16 least;
    int n;
    float scale[MAX_TRIED][STRIP_ROWS], error[MAX_TRIED][STRIP_ROWS];
};

static void start_coarse(struct coarse *c, const struct block *b, v16 max) {
    const float unit = 32767.0f;
    const v16 zero = v16_set1(0), inverse = v16_select_less(zero, max, v16_div(v16_set1(unit), max), zero);
    for (int k = 0; k < b->n; k += 2)
        line_store(c->x[k / 2], line_from_floats(v16_mul(v16_load(lanes(b->x, k)), inverse),
                                                 v16_mul(v16_load(lanes(b->x, k + 1)), inverse)));
    c->factor = v16_mul(max, v16_set1((float)COARSE_UNIT * 32768 / unit));
    c->least = v16_set1(__builtin_inff());
    c->n = 0;
}

// What turns the scaled numbers into positions of a scale.
INLINE line coarse_multiplier(const struct coarse *c, v16 scale) {
    const v16 multiplier = v16_div(c->factor, scale);
    return line_from_floats(multiplier, multiplier);
}
// The squared error of a scale with multiplier m. If x and y are vectors of the exact and of these differences, |x - y|
// is at most COARSE_ERROR * |scale| * sqrt(width), and so is the difference of the errors' square roots.
INLINE v16 coarse_error(const struct coarse *c, v16 scale, line m, cells_lut cells, const int width) {
    int16_squares sum = squares_zero();
    UNROLL for (int i = 0; i < width / 2; i += 2) {
        sum = squares_add_nearest(sum, cells, line_scaled(line_load(c->x[i]), m),
                                  line_scaled(line_load(c->x[i + 1]), m));
    }
    return v16_mul(v16_mul(scale, scale), squares_to_floats(sum));
}

// Bounds the sizes that choose_sizes gives for any grid.
INLINE v16 largest_sizes(struct code_values codes, v16 max) {
    return v16_min(v16_mul(max, v16_set1(1 / (0.63f * codes.at[codes.last]))), v16_set1(MAX_SCALE));
}

// Computes the errors that can be least exactly, in the order in which the scales were tried.
INLINE void refine_coarse(struct coarse *c, const struct block *b, const struct quantizer *q, v16 max,
                          struct candidates *to, const int width) {
    // Two times the bound of the square root: once for the scale of least coarse error, once for the best.
    const float bound = 2 * COARSE_ERROR * COARSE_UNIT * sqrtf((float)width);
    float limits[STRIP_ROWS], sizes[STRIP_ROWS];
    int counts[STRIP_ROWS] = { 0 }, rounds = 0;
    v16_store(limits, c->least), v16_store(sizes, largest_sizes(q->values, max));
    for (int r = 0; r < STRIP_ROWS; r++) {
        const float root = sqrtf(limits[r]) + bound * sizes[r];
        limits[r] = root * root;
    }
    const v16 limit = v16_load(limits);
    for (int i = 0; i < c->n; i++)   // each row's scales become a list in place of those already read
        for (unsigned left = v16_mask_less(v16_load(c->error[i]), limit); left; left &= left - 1) {
            const int r = __builtin_ctz(left);
            c->scale[counts[r]++][r] = c->scale[i][r];
        }
    for (int r = 0; r < STRIP_ROWS; r++) rounds = max_int(rounds, counts[r]);
    const code_lut codes = code_lut_load(&q->codes[0]);
    for (int i = 0; i < rounds; i++) {
        for (int r = 0; r < STRIP_ROWS; r++)
            if (i >= counts[r]) c->scale[i][r] = 0;
        const v16 scale = v16_load(c->scale[i]);
        const struct grid g = grid_of(scale);
        const v16 error = nearest_error(b, &g, codes, 1, width);
        insert_candidate(to, 1, scale,
                         v16_select_less(v16_set1(0), v16_abs(scale), error, v16_set1(__builtin_inff())));
    }
}

// Finds the best scales of a block of `width` columns. coarse: NULL, or where to compute errors in integers first: the
// block has no weights and no feedback, and no row's largest magnitude is between 0 and MIN_COARSE first codes.
INLINE void search_scales(const struct block *b, const struct quantizer *q, const struct peaks *peaks,
                          struct candidates *c, struct coarse *coarse, const int capacity, const int width) {
    const v16 infinity = v16_set1(__builtin_inff());
    for (int offset = 0; offset < GRIDS; offset++) {
        const code_lut codes = code_lut_load(&q->codes[offset]);
        const cells_lut cells = cells_lut_load(&q->cells[offset]);
        // the largest value may map to a negative code, where the scale has the opposite sign, or to a positive one
        for (int side = -1; side <= 1; side += 2) {
            const v16 sign = v16_mul(peaks->sign, v16_set1((float)side));
            const float end = (float)(side < 0 ? -q->values.at[0] - offset : q->values.at[q->values.last] + offset);
            struct sizes sizes;
            choose_sizes(peaks->max, sign, end, offset, q->task->clip, &sizes);
            v16 size = v16_load(sizes.first);
            const v16 last = v16_load(sizes.last);
            line next = { 0 };
            if (coarse) next = coarse_multiplier(coarse, v16_mul(sign, size));
            for (int step = 0; step < sizes.steps; step++, size = v16_add(size, v16_set1(GRIDS))) {
                const v16 scale = v16_mul(sign, size);
                if (coarse) {
                    const line m = next;   // divided one step early, which hides the latency
                    next = coarse_multiplier(coarse, v16_mul(sign, v16_add(size, v16_set1(GRIDS))));
                    const v16 error =
                        v16_select_less(last, size, infinity, coarse_error(coarse, scale, m, cells, width));
                    v16_store(coarse->scale[coarse->n], scale), v16_store(coarse->error[coarse->n++], error);
                    coarse->least = v16_min(error, coarse->least);
                } else {
                    const struct grid g = { scale, v16_div(v16_set1(2), scale), v16_set1(0) };
                    const v16 error = nearest_error(b, &g, codes, 0, width);
                    insert_candidate(c, capacity, scale, v16_select_less(last, size, infinity, error));
                }
            }
        }
    }
}

// The variants that exist as functions of their own.
#define SEARCH(name, width, capacity) \
    static __attribute__((noinline)) void name(const struct block *b, const struct quantizer *q, \
                                               const struct peaks *peaks, struct candidates *c) { \
        search_scales(b, q, peaks, c, NULL, capacity, width); \
    }
#define COARSE_SEARCH(name, width) \
    static __attribute__((noinline)) void name(const struct block *b, const struct quantizer *q, \
                                               const struct peaks *peaks, struct candidates *c) { \
        struct coarse coarse; \
        start_coarse(&coarse, b, peaks->max); \
        search_scales(b, q, peaks, c, &coarse, 1, width); \
        refine_coarse(&coarse, b, q, peaks->max, c, width); \
    }
SEARCH(search_16, 16, 1)
SEARCH(search_32, 32, 1)
SEARCH(search_16_feedback, 16, CANDIDATES)
SEARCH(search_32_feedback, 32, CANDIDATES)
COARSE_SEARCH(search_16_coarse, 16)
COARSE_SEARCH(search_32_coarse, 32)
#undef SEARCH
#undef COARSE_SEARCH

// The best scales of a block without feedback.
static v16 best_scales(const struct quantizer *q, const struct block *b, int width) {
    const struct peaks peaks = find_peaks(b);
    const v16 zero = v16_set1(0), least = v16_set1((float)(MIN_COARSE * -q->values.at[0]));
    // rows of zeros do not matter: their largest magnitude counts as large
    const v16 peak = v16_select_less(zero, peaks.max, peaks.max, least);
    const int coarse = !q->task->is_weighted && b->n == width &&
                       v16_reduce_max(v16_sub(least, peak)) <= 0;
    struct candidates c;
    start_candidates(&c, peaks.zero_error);
    if (width == 16) (coarse ? search_16_coarse : search_16)(b, q, &peaks, &c);
    else (coarse ? search_32_coarse : search_32)(b, q, &peaks, &c);
    return c.scale[0];
}

// The best scales of n whole blocks of `width` columns without weights. The larger the largest magnitude of a row, the
// more sizes are tried. So the blocks of all rows are sorted by it, and 16 consecutive ones are searched together.
static void find_scales_sorted(const struct quantizer *q, const float *x, int width, int n, v16 *scales) {
    enum { BUCKETS = 64, BUCKET_WIDTH = 64 };   // the largest |s * c|, 124 * 32, is below their product
    float peaks[MAX_SPANS * STRIP_ROWS], found[MAX_SPANS * STRIP_ROWS], tile[GROUP_COLUMNS * STRIP_ROWS];
    int starts[BUCKETS] = { 0 }, order[MAX_SPANS * STRIP_ROWS];
    for (int i = 0; i < n; i++) {
        v16 max = v16_set1(0);
        for (int k = 0; k < width; k++) max = v16_max(v16_abs(v16_load(lanes(x, i * width + k))), max);
        v16_store(peaks + STRIP_ROWS * i, v16_mul(max, v16_set1(1.0f / BUCKET_WIDTH)));
    }
    for (int i = 0; i < n * STRIP_ROWS; i++)
        if ((int)peaks[i] + 1 < BUCKETS) starts[(int)peaks[i] + 1]++;
    for (int i = 1; i < BUCKETS; i++) starts[i] += starts[i - 1];
    for (int i = 0; i < n * STRIP_ROWS; i++) order[starts[(int)peaks[i]]++] = i;
    for (int first = 0; first < n * STRIP_ROWS; first += STRIP_ROWS) {
        int from[STRIP_ROWS];
        for (int r = 0; r < STRIP_ROWS; r++) {
            const int i = order[first + r];
            from[r] = i / STRIP_ROWS * width * STRIP_ROWS + i % STRIP_ROWS;
        }
        for (int k = 0; k < width; k++)
            for (int r = 0; r < STRIP_ROWS; r++) tile[STRIP_ROWS * k + r] = x[STRIP_ROWS * k + from[r]];
        const struct block b = { .x = tile, .weight = q->task->weight, .n = width };   // every weight is 1
        float best[STRIP_ROWS];
        v16_store(best, best_scales(q, &b, width));
        for (int r = 0; r < STRIP_ROWS; r++) found[order[first + r]] = best[r];
    }
    for (int i = 0; i < n; i++) scales[i] = v16_load(found + STRIP_ROWS * i);
}
