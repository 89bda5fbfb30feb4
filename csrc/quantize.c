// SPDX-License-Identifier: MIT
// quantize.c - quantizes f32 rows to strips of q8, q4 and q4s. Each block gets the scale, and with it the grid, of
// least weighted error. With feedback (GPTQ: Frantar et al. 2022) the columns to the right compensate the rounding
// error of a column.
//
// A row's bytes depend on the row alone, not on the machine or on which thread quantizes which strip. Rows are
// computed in units of their scale D, in which block scales are integers.
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "fpenv.h"
#include "llamac.h"
#include "mem.h"

enum {
    GRIDS = 4,
    // cells of width 1/2 on [-40, 40); midpoints of codes are multiples of 1/2, so a cell has one nearest code
    GRID_CELLS = 160,
    MAX_CODE = 32, MAX_CODE_Q8 = 127, MAX_SCALE = 127,
    MAX_WEIGHT = 124 * MAX_CODE,   // largest |s * c|: the code -32 is on grid 0, whose scales are multiples of 4
    MAX_WEIGHT_Q8 = MAX_SCALE * MAX_CODE_Q8,
    MAX_COLUMNS = 1 << 24, // as in the tensor record
    CANDIDATES = 6,        // scales that are tried with feedback inside the block
};
static const float MIN_MAGNITUDE = 0x1p-100f;   // a row whose magnitudes are all smaller is quantized to zeros

// The nearest code to each cell: its value for the error, and its nibble.
struct grid { float code[GRID_CELLS]; uint8_t nibble[GRID_CELLS]; };

static void grid_init(struct grid *grid, int offset) {
    for (int i = 0, q = 0; i < GRID_CELLS; i++) {
        // compares the cell's center with the midpoint of codes q and q + 1, in quarter units
        while (q < 15 && 2 * i + 1 - 2 * GRID_CELLS / 2 > 2 * (q4_codebook[q] + q4_codebook[q + 1] + 2 * offset)) q++;
        grid->code[i] = (float)(q4_codebook[q] + offset);
        grid->nibble[i] = (uint8_t)q;
    }
}

// The cell of x / scale, clamped to the grid. twice_inverse: 2 / scale.
INLINE int grid_cell(float x, float twice_inverse) {
    float t = x * twice_inverse + (float)(GRID_CELLS / 2);
    t = t > 0 ? t : 0;
    t = t < (float)GRID_CELLS - 0.5f ? t : (float)GRID_CELLS - 0.5f;
    return (int)t;
}

// A block of one row, the columns that share a scale: n targets and the weights of their errors, both zero-padded to
// 32. With feedback, a target is the original value plus the errors it compensates, and `feedback` points to the
// block's part of the feedback matrix; otherwise feedback is NULL.
struct block {
    float x[GROUP_COLUMNS], weight[GROUP_COLUMNS];
    int n;
    const float *original, *feedback;
    size_t stride;   // of feedback
};

// The weighted squared error of 16 values with their nearest codes. GCC vectorizes the loops in this form.
INLINE float nearest_error(const float *x, const float *weight, float scale, const float *code) {
    const float twice_inverse = 2 / scale;
    int cell[16];
    float error[16];
    for (int i = 0; i < 16; i++) cell[i] = grid_cell(x[i], twice_inverse);
    for (int i = 0; i < 16; i++) error[i] = code[cell[i]];
    for (int i = 0; i < 16; i++) {
        const float difference = x[i] - scale * error[i];
        error[i] = weight[i] * (difference * difference);
    }
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) error[i] += error[i + half];
    return error[0];
}

// Chooses the codes of a block from left to right. With feedback, each column's error is passed on to the columns
// after it; without, these are the nearest codes. Writes nibbles and dequantized values; returns the weighted squared
// error.
static float assign_codes(const struct block *b, float scale, const struct grid *grid, uint8_t *nibbles,
                          float *values) {
    const float twice_inverse = 2 / scale;
    float target[GROUP_COLUMNS], error = 0;
    for (int i = 0; i < b->n; i++) target[i] = b->x[i];
    for (int i = 0; i < b->n; i++) {
        const int cell = grid_cell(target[i], twice_inverse);
        nibbles[i] = grid->nibble[cell];
        values[i] = scale * grid->code[cell];
        const float difference = target[i] - values[i];
        error += b->weight[i] * (difference * difference);
        if (!b->feedback) continue;
        const float total_error = b->original[i] - values[i];
        const float *row = b->feedback + (size_t)i * b->stride;
        for (int j = i + 1; j < b->n; j++) target[j] += total_error * row[j];
    }
    return error;
}

// The best scales so far, in ascending order of error.
struct candidates { int scale[CANDIDATES], n, capacity; float error[CANDIDATES]; };

static void insert_candidate(struct candidates *c, int scale, float error) {
    if (c->n == c->capacity && error >= c->error[c->capacity - 1]) return;
    int at = c->n < c->capacity ? c->n++ : c->capacity - 1;
    for (; at > 0 && error < c->error[at - 1]; at--)
        c->error[at] = c->error[at - 1], c->scale[at] = c->scale[at - 1];
    c->error[at] = error, c->scale[at] = scale;
}

// Tries the scales of one sign and one grid. `max` is the block's largest magnitude; side: whether it maps to a
// negative (-1) or a positive (1) code. Tried are the scales that put `max` between 0.64 and `clip` times the grid's
// last code on that side. Larger scales leave codes unused, smaller ones clip too much: this range contains nearly
// all optima.
static void search_scales(const struct block *b, int is_32_wide, float max, int side, int sign, int offset, float clip,
                          const struct grid *grid, struct candidates *c) {
    const float end = (float)(side < 0 ? MAX_CODE - offset : q4_codebook[15] + offset);
    const float low = max / (clip * end), high = max / (0.64f * end);
    // magnitudes whose low two bits, with the sign applied, select this grid
    const int residue = sign < 0 ? (GRIDS - offset) % GRIDS : offset;
    int size = low < MAX_SCALE ? (int)low : MAX_SCALE - GRIDS + 1;
    size += (residue - size % GRIDS + GRIDS) % GRIDS;
    for (; size <= MAX_SCALE && ((float)size <= high || size < GRIDS); size += GRIDS) {
        if (!size) continue;
        const float scale = (float)(sign * size);
        float error = nearest_error(b->x, b->weight, scale, grid->code);
        if (is_32_wide && (c->n < c->capacity || error < c->error[c->n - 1]))
            error += nearest_error(b->x + 16, b->weight + 16, scale, grid->code);
        insert_candidate(c, sign * size, error);
    }
}

// Quantizes a q4 or q4s block: writes nibbles and dequantized values, returns the scale.
static int fit_block(const struct block *b, int is_32_wide, float clip, const struct grid *grids, uint8_t *nibbles,
                     float *values) {
    float max = 0, zero_error = 0;   // zero_error: of the scale 0
    int negative = 0;
    for (int i = 0; i < b->n; i++) {
        const float a = b->x[i] < 0 ? -b->x[i] : b->x[i];
        if (a > max) max = a, negative = b->x[i] < 0;
        zero_error += b->weight[i] * (b->x[i] * b->x[i]);
    }
    memset(nibbles, 0, GROUP_COLUMNS);
    memset(values, 0, sizeof(float) * GROUP_COLUMNS);
    if (max == 0) return 0;
    struct candidates c = { .capacity = b->feedback ? CANDIDATES : 1 };
    insert_candidate(&c, 0, zero_error);
    // the largest value may map to a negative code, where the scale has the opposite sign, or to a positive one
    for (int offset = 0; offset < GRIDS; offset++)
        for (int side = -1; side <= 1; side += 2) {
            const int sign = negative ? -side : side;
            search_scales(b, is_32_wide, max, side, sign, offset, clip, &grids[offset], &c);
        }
    int best = c.scale[0];
    if (b->feedback) {
        float least = 3.4e38f;
        for (int i = 0; i < c.n; i++) {
            const int s = c.scale[i];
            const float e = s ? assign_codes(b, (float)s, &grids[s & 3], nibbles, values) : zero_error;
            if (e < least) best = s, least = e;
        }
    }
    memset(nibbles, 0, GROUP_COLUMNS);
    memset(values, 0, sizeof(float) * GROUP_COLUMNS);
    if (best) assign_codes(b, (float)best, &grids[best & 3], nibbles, values);
    return best;
}

INLINE int nearest_q8(float x, float inverse) {
    float v = x * inverse;
    v = v > -MAX_CODE_Q8 ? v : -MAX_CODE_Q8;
    v = v < MAX_CODE_Q8 ? v : MAX_CODE_Q8;
    return (int)((v + 0x1.8p23f) - 0x1.8p23f);   // to nearest even
}

// Quantizes a q8 block: writes code bytes, returns the scale. Codes are uniform, so the best scale is the smallest
// that does not clip or one of the two below it.
static int fit_block_q8(const struct block *b, uint8_t *bytes) {
    float max = 0;
    for (int i = 0; i < b->n; i++) {
        const float a = b->x[i] < 0 ? -b->x[i] : b->x[i];
        max = a > max ? a : max;
    }
    int best = 0;
    float least = 3.4e38f;
    const int no_clip = min_int(MAX_SCALE, (int)(max / MAX_CODE_Q8) + 1);
    for (int s = no_clip; max > 0 && s >= max_int(1, no_clip - 2); s--) {
        const float scale = (float)s, inverse = 1 / scale;
        float error = 0;
        for (int i = 0; i < b->n; i++) {
            const float difference = b->x[i] - scale * (float)nearest_q8(b->x[i], inverse);
            error += b->weight[i] * (difference * difference);
        }
        if (error < least) least = error, best = s;
    }
    const float inverse = best ? 1 / (float)best : 0;
    for (int i = 0; i < b->n; i++) bytes[i] = (uint8_t)(Q8_OFFSET + (best ? nearest_q8(b->x[i], inverse) : 0));
    return best;
}

// ---- strips

// Parameters and buffers for quantizing a strip.
struct strip {
    int dtype, columns;
    const float *weight;            // (columns)
    const float *feedback;          // (columns, columns) or NULL
    const struct grid *grids;
    float clip;
    float *originals, *targets;     // (16, columns): the values in units of D; the same plus the errors they compensate
    float *errors;                  // (16, 128), with feedback: of the current block of 128 columns
};

static void store_code(uint8_t *codes, int dtype, int row, int column, uint8_t code) {
    if (dtype == LLAMAC_Q8) codes[column / 4 * LINE_BYTES + 4 * row + column % 4] = code;
    else codes[column / 8 * LINE_BYTES + 4 * row + column % 4] |= (uint8_t)(column % 8 < 4 ? code : code << 4);
}

// Quantizes n columns of one row, starting at `first`: one block of 128 columns of the file format.
static void quantize_block(const struct strip *p, int row, int first, int n, uint8_t *scales, uint8_t *codes) {
    const int per_scale = scale_columns(p->dtype);
    const float *original = p->originals + (size_t)row * (size_t)p->columns;
    float *x = p->targets + (size_t)row * (size_t)p->columns;
    for (int k = 0; k < n; k += per_scale) {
        uint8_t found[GROUP_COLUMNS];
        float values[GROUP_COLUMNS];
        const size_t at = (size_t)(first + k);
        struct block b = {
            .n = min_int(per_scale, n - k), .original = original + at,
            .feedback = p->feedback ? p->feedback + at * (size_t)p->columns + at : NULL, .stride = (size_t)p->columns,
        };
        memcpy(b.x, x + at, sizeof(float) * (size_t)b.n);
        memcpy(b.weight, p->weight + at, sizeof(float) * (size_t)b.n);
        const int s = p->dtype == LLAMAC_Q8 ? fit_block_q8(&b, found)
                                            : fit_block(&b, per_scale == 32, p->clip, p->grids, found, values);
        scales[k / per_scale * STRIP_ROWS + row] = (uint8_t)(int8_t)s;
        for (int i = 0; i < b.n; i++) store_code(codes, p->dtype, row, k + i, found[i]);
        if (!p->feedback) continue;
        // the rest of the 128 columns compensates now; propagate_errors updates the columns after them
        for (int i = 0; i < b.n; i++) {
            const float error = p->errors[row * BLOCK_COLUMNS + k + i] = original[at + (size_t)i] - values[i];
            const float *feedback = p->feedback + (at + (size_t)i) * (size_t)p->columns;
            for (int j = first + k + b.n; j < first + n; j++) x[j] += error * feedback[j];
        }
    }
}

typedef float v4 __attribute__((vector_size(16), aligned(4)));

// targets[row][j] += sum over i of errors[row][i] * feedback[i][j], for the columns j after a block of 128. Four rows
// by eight columns at a time.
static void propagate_errors(const struct strip *p, int first, int n) {
    const size_t columns = (size_t)p->columns;
    const float *feedback = p->feedback + (size_t)first * columns;
    size_t j = (size_t)(first + n);
    for (; j + 8 <= columns; j += 8)
        for (int row = 0; row < STRIP_ROWS; row += 4) {
            v4 sum[4][2];
            float *x = p->targets + (size_t)row * columns + j;
            for (int r = 0; r < 4; r++)
                for (int h = 0; h < 2; h++) memcpy(&sum[r][h], x + (size_t)r * columns + 4 * (size_t)h, 16);
            for (int i = 0; i < n; i++) {
                v4 f[2];
                memcpy(f, feedback + (size_t)i * columns + j, 32);
                for (int r = 0; r < 4; r++) {
                    const float e = p->errors[(row + r) * BLOCK_COLUMNS + i];
                    const v4 error = { e, e, e, e };
                    for (int h = 0; h < 2; h++) sum[r][h] += error * f[h];
                }
            }
            for (int r = 0; r < 4; r++)
                for (int h = 0; h < 2; h++) memcpy(x + (size_t)r * columns + 4 * (size_t)h, &sum[r][h], 16);
        }
    for (; j < columns; j++)
        for (int row = 0; row < STRIP_ROWS; row++)
            for (int i = 0; i < n; i++)
                p->targets[(size_t)row * columns + j] +=
                    p->errors[row * BLOCK_COLUMNS + i] * feedback[(size_t)i * columns + j];
}

// The row scale D under which the row's largest magnitude is the largest representable |s * c|, and its inverse. Both
// are 0 for a row below MIN_MAGNITUDE.
static float row_scale(const float *x, int n, int dtype, float *inverse) {
    float max = 0;
    for (int i = 0; i < n; i++) {
        const float a = x[i] < 0 ? -x[i] : x[i];
        max = a > max ? a : max;
    }
    const float largest = (float)(dtype == LLAMAC_Q8 ? MAX_WEIGHT_Q8 : MAX_WEIGHT);
    *inverse = max < MIN_MAGNITUDE ? 0 : largest / max;
    return max < MIN_MAGNITUDE ? 0 : max / largest;
}

static void quantize_strip(const struct strip *p, const float *w, int rows, uint8_t *out) {
    const int columns = p->columns;
    float scales[STRIP_ROWS] = { 0 };
    memset(p->originals, 0, sizeof(float) * STRIP_ROWS * (size_t)columns);
    for (int r = 0; r < rows; r++) {
        const float *from = w + (size_t)r * (size_t)columns;
        float inverse, *to = p->originals + (size_t)r * (size_t)columns;
        scales[r] = row_scale(from, columns, p->dtype, &inverse);
        for (int k = 0; k < columns; k++) to[k] = from[k] * inverse;
    }
    memcpy(p->targets, p->originals, sizeof(float) * STRIP_ROWS * (size_t)columns);
    memcpy(out, scales, sizeof scales);
    out += LINE_BYTES;
    for (int first = 0; first < columns; first += BLOCK_COLUMNS) {
        const int n = min_int(BLOCK_COLUMNS, columns - first), groups = ceil_div(n, GROUP_COLUMNS);
        uint8_t *codes = out + block_scale_bytes(p->dtype, groups);
        memset(out, 0, block_scale_bytes(p->dtype, groups));
        memset(codes, p->dtype == LLAMAC_Q8 ? Q8_OFFSET : 0, (size_t)groups * group_code_bytes(p->dtype));
        if (p->feedback) memset(p->errors, 0, sizeof(float) * STRIP_ROWS * BLOCK_COLUMNS);
        for (int r = 0; r < rows; r++)
            if (scales[r] > 0) quantize_block(p, r, first, n, out, codes);
        if (p->feedback) propagate_errors(p, first, n);
        out += block_bytes(p->dtype, groups);
    }
}

int llamac_quantize(int dtype, const float *w, size_t rows, size_t columns, const float *importance,
                    const float *feedback, void *out, llamac_error *err) {
    if (!dtype_is_quantized(dtype) || !llamac_dtype_name(dtype))
        return bad_argument(err, "dtype is %d, expected q8, q4 or q4s (%d to %d)", dtype, LLAMAC_Q8, LLAMAC_Q4S);
    if (columns < 1 || columns > MAX_COLUMNS)
        return bad_argument(err, "columns is %zu, expected 1 to %d", columns, MAX_COLUMNS);
    if (feedback && dtype == LLAMAC_Q8) return bad_argument(err, "q8 is quantized without feedback: expected NULL");
    const size_t strip_bytes = dtype_strip_bytes(dtype, columns);
    struct grid grids[GRIDS];
    for (int i = 0; i < GRIDS; i++) grid_init(&grids[i], i);
    float *buffer = mem_alloc(2 * STRIP_ROWS * columns + columns + STRIP_ROWS * BLOCK_COLUMNS, sizeof(float),
                             "quantizing a strip", err);
    if (!buffer) return -1;
    float *ones = buffer + 2 * STRIP_ROWS * columns;
    for (size_t k = 0; k < columns; k++) ones[k] = 1;
    const struct strip p = {
        .dtype = dtype, .columns = (int)columns, .weight = importance ? importance : ones, .feedback = feedback,
        .grids = grids, .clip = importance ? 1.25f : 1.12f,
        .originals = buffer, .targets = buffer + STRIP_ROWS * columns, .errors = ones + columns,
    };
    const fp_control saved = fp_control_reset();
    for (size_t first = 0; first < rows; first += STRIP_ROWS)
        quantize_strip(&p, w + first * columns, (int)(rows - first < STRIP_ROWS ? rows - first : STRIP_ROWS),
                       (uint8_t *)out + first / STRIP_ROWS * strip_bytes);
    fp_control_restore(saved);
    mem_free(buffer);
    return 0;
}
