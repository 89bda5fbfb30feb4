// SPDX-License-Identifier: MIT
// quantize.c - weights to the strips of q8, q4 and q4s: for each block the scale with the least error of all that make sense, and
// with it the grid; with feedback, what rounding a column costs is made up for in the columns after it.
//
// Nothing here depends on the machine or on who computes which strip: a row's bytes follow from the row alone. A row is computed in units of its
// scale D, in which the scales of blocks are whole numbers.
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "fpenv.h"
#include "llamac.h"
#include "mem.h"

enum {
    GRIDS = 4,
    GRID_STEPS = 160,      // half units from -40 to 40: between the codes' midpoints, which are multiples of a half, the nearest is the same
    TOP_CODE = 32, TOP_CODE_Q8 = 127, TOP_SCALE = 127,
    LARGEST = 124 * TOP_CODE, LARGEST_Q8 = TOP_SCALE * TOP_CODE_Q8,   // |s * c|; the code -32 needs a scale that is a multiple of 4
    MAX_COLUMNS = 1 << 24, // as in the tensor record
    FINALISTS = 6,         // scales that are tried with feedback within the block
};
static const float NEXT_TO_NOTHING = 0x1p-100f;   // a row whose numbers are all smaller becomes zeros

// The nearest code to the middle of each half unit: as a number for the error, and as the nibble that is stored.
struct grid { float code[GRID_STEPS]; uint8_t nibble[GRID_STEPS]; };

static void make_grid(struct grid *grid, int offset) {
    for (int i = 0, q = 0; i < GRID_STEPS; i++) {
        while (q < 15 && 2 * i + 1 - 2 * GRID_STEPS / 2 > 2 * (q4_codebook[q] + q4_codebook[q + 1] + 2 * offset)) q++;   // in quarter units
        grid->code[i] = (float)(q4_codebook[q] + offset);
        grid->nibble[i] = (uint8_t)q;
    }
}

INLINE int grid_step(float x, float twice_inverse) {
    float t = x * twice_inverse + (float)(GRID_STEPS / 2);
    t = t > 0 ? t : 0;
    t = t < (float)GRID_STEPS - 0.5f ? t : (float)GRID_STEPS - 0.5f;
    return (int)t;
}

// A block of a row on its way: n numbers and their weights in the error, both filled up with zeros to 32. With feedback: what the numbers
// were before they took over what others had left, and the triangle of feedback among them; else NULL.
struct block {
    float x[GROUP_COLUMNS], weight[GROUP_COLUMNS];
    int n;
    const float *original, *feedback;
    size_t stride;
};

// The error of 16 numbers with the nearest codes. The loops are what compilers turn into vectors.
INLINE float nearest_error(const float *x, const float *weight, float step, const float *code) {
    const float twice_inverse = 2 / step;
    int at[16];
    float error[16];
    for (int i = 0; i < 16; i++) at[i] = grid_step(x[i], twice_inverse);
    for (int i = 0; i < 16; i++) error[i] = code[at[i]];
    for (int i = 0; i < 16; i++) {
        const float left = x[i] - step * error[i];
        error[i] = weight[i] * (left * left);
    }
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) error[i] += error[i + half];
    return error[0];
}

// Codes in order; what rounding leaves of each number is handed on. Without feedback these are the nearest codes. Writes nibbles and the
// weights' values; returns the error.
static float assign(const struct block *b, float step, const struct grid *grid, uint8_t *nibbles, float *values) {
    const float twice_inverse = 2 / step;
    float target[GROUP_COLUMNS], error = 0;
    for (int i = 0; i < b->n; i++) target[i] = b->x[i];
    for (int i = 0; i < b->n; i++) {
        const int at = grid_step(target[i], twice_inverse);
        nibbles[i] = grid->nibble[at];
        values[i] = step * grid->code[at];
        const float left = target[i] - values[i];
        error += b->weight[i] * (left * left);
        if (!b->feedback) continue;
        const float whole = b->original[i] - values[i];
        const float *row = b->feedback + (size_t)i * b->stride;
        for (int j = i + 1; j < b->n; j++) target[j] += whole * row[j];
    }
    return error;
}

struct finalists { int scale[FINALISTS], n, most; float error[FINALISTS]; };

static void consider(struct finalists *f, int scale, float error) {
    if (f->n == f->most && error >= f->error[f->most - 1]) return;
    int at = f->n < f->most ? f->n++ : f->most - 1;
    for (; at > 0 && error < f->error[at - 1]; at--) f->error[at] = f->error[at - 1], f->scale[at] = f->scale[at - 1];
    f->error[at] = error, f->scale[at] = scale;
}

// Tries every scale of one sign and grid under which the block's largest number, `top`, comes to lie between a multiple of the grid's last
// code that clips it and one that leaves codes unused: 0.64 to 1.12 holds nearly all that are ever the best.
static void try_scales(const struct block *b, int wide, float top, int side, int sign, int offset, float clip, const struct grid *grid, struct finalists *f) {
    const float end = (float)(side < 0 ? TOP_CODE - offset : q4_codebook[15] + offset);
    const float low = top / (clip * end), high = top / (0.64f * end);
    // sizes whose lowest bits, with the sign, choose this grid
    const int residue = sign < 0 ? (GRIDS - offset) % GRIDS : offset;
    int size = low < TOP_SCALE ? (int)low : TOP_SCALE - GRIDS + 1;
    size += (residue - size % GRIDS + GRIDS) % GRIDS;
    for (; size <= TOP_SCALE && ((float)size <= high || size < GRIDS); size += GRIDS) {
        if (!size) continue;
        const float step = (float)(sign * size);
        float error = nearest_error(b->x, b->weight, step, grid->code);
        if (wide && (f->n < f->most || error < f->error[f->n - 1])) error += nearest_error(b->x + 16, b->weight + 16, step, grid->code);
        consider(f, sign * size, error);
    }
}

// The scale of a block of q4 or q4s, and its codes.
static int fit_block(const struct block *b, int wide, float clip, const struct grid *grids, uint8_t *nibbles, float *values) {
    float top = 0, nothing = 0;
    int negative = 0;
    for (int i = 0; i < b->n; i++) {
        const float a = b->x[i] < 0 ? -b->x[i] : b->x[i];
        if (a > top) top = a, negative = b->x[i] < 0;
        nothing += b->weight[i] * (b->x[i] * b->x[i]);
    }
    memset(nibbles, 0, GROUP_COLUMNS);
    memset(values, 0, sizeof(float) * GROUP_COLUMNS);
    if (top == 0) return 0;
    struct finalists f = { .most = b->feedback ? FINALISTS : 1 };
    consider(&f, 0, nothing);
    // the largest number may become a negative code (its scale has the other sign) or a positive one
    for (int offset = 0; offset < GRIDS; offset++)
        for (int side = -1; side <= 1; side += 2) {
            const int sign = negative ? -side : side;
            try_scales(b, wide, top, side, sign, offset, clip, &grids[offset], &f);
        }
    int best = f.scale[0];
    if (b->feedback) {
        float least = 3.4e38f;
        for (int i = 0; i < f.n; i++) {
            const float e = f.scale[i] ? assign(b, (float)f.scale[i], &grids[f.scale[i] & 3], nibbles, values) : nothing;
            if (e < least) best = f.scale[i], least = e;
        }
    }
    memset(nibbles, 0, GROUP_COLUMNS);
    memset(values, 0, sizeof(float) * GROUP_COLUMNS);
    if (best) assign(b, (float)best, &grids[best & 3], nibbles, values);
    return best;
}

INLINE int nearest_q8(float x, float inverse) {
    float v = x * inverse;
    v = v > -TOP_CODE_Q8 ? v : -TOP_CODE_Q8;
    v = v < TOP_CODE_Q8 ? v : TOP_CODE_Q8;
    return (int)((v + 0x1.8p23f) - 0x1.8p23f);   // to nearest even
}

// The same of q8: codes are the nearest whole numbers, so that few scales come into question.
static int fit_block_q8(const struct block *b, uint8_t *bytes) {
    float top = 0;
    for (int i = 0; i < b->n; i++) {
        const float a = b->x[i] < 0 ? -b->x[i] : b->x[i];
        top = a > top ? a : top;
    }
    int best = 0;
    float least = 3.4e38f;
    const int enough = min_int(TOP_SCALE, (int)(top / TOP_CODE_Q8) + 1);
    for (int s = enough; top > 0 && s >= max_int(1, enough - 2); s--) {
        const float step = (float)s, inverse = 1 / step;
        float error = 0;
        for (int i = 0; i < b->n; i++) {
            const float left = b->x[i] - step * (float)nearest_q8(b->x[i], inverse);
            error += b->weight[i] * (left * left);
        }
        if (error < least) least = error, best = s;
    }
    const float inverse = best ? 1 / (float)best : 0;
    for (int i = 0; i < b->n; i++) bytes[i] = (uint8_t)(Q8_OFFSET + (best ? nearest_q8(b->x[i], inverse) : 0));
    return best;
}

// ---- strips

// What the rows of a strip share, and the memory that they need.
struct strip {
    int dtype, columns;
    const float *weight;            // (columns)
    const float *feedback;          // (columns, columns) or NULL
    const struct grid *grids;
    float clip;
    float *originals, *targets;     // (16, columns): the numbers; and with what was left before them
    float *errors;                  // (16, 128), with feedback: of the block
};

static void store_code(uint8_t *codes, int dtype, int row, int column, uint8_t code) {
    if (dtype == LLAMAC_Q8) codes[column / 4 * LINE_BYTES + 4 * row + column % 4] = code;
    else codes[column / 8 * LINE_BYTES + 4 * row + column % 4] |= (uint8_t)(column % 8 < 4 ? code : code << 4);
}

// One row of one block of n columns from `first` on.
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
        const int s = p->dtype == LLAMAC_Q8 ? fit_block_q8(&b, found) : fit_block(&b, per_scale == 32, p->clip, p->grids, found, values);
        scales[k / per_scale * STRIP_ROWS + row] = (uint8_t)(int8_t)s;
        for (int i = 0; i < b.n; i++) store_code(codes, p->dtype, row, k + i, found[i]);
        if (!p->feedback) continue;
        // the rest of the 128 columns takes over what is left; what lies behind them, when all of them are done
        for (int i = 0; i < b.n; i++) {
            const float whole = p->errors[row * BLOCK_COLUMNS + k + i] = original[at + (size_t)i] - values[i];
            const float *share = p->feedback + (at + (size_t)i) * (size_t)p->columns;
            for (int j = first + k + b.n; j < first + n; j++) x[j] += whole * share[j];
        }
    }
}

typedef float four __attribute__((vector_size(16), aligned(4)));

// x[row][j] += sum over i of errors[row][i] * feedback[i][j] for the columns behind a block, four rows by eight columns at a time.
static void hand_on(const struct strip *p, int first, int n) {
    const size_t columns = (size_t)p->columns;
    const float *feedback = p->feedback + (size_t)first * columns;
    size_t j = (size_t)(first + n);
    for (; j + 8 <= columns; j += 8)
        for (int row = 0; row < STRIP_ROWS; row += 4) {
            four sum[4][2];
            float *x = p->targets + (size_t)row * columns + j;
            for (int r = 0; r < 4; r++) for (int h = 0; h < 2; h++) memcpy(&sum[r][h], x + (size_t)r * columns + 4 * (size_t)h, 16);
            for (int i = 0; i < n; i++) {
                four share[2];
                memcpy(share, feedback + (size_t)i * columns + j, 32);
                for (int r = 0; r < 4; r++) {
                    const float e = p->errors[(row + r) * BLOCK_COLUMNS + i];
                    const four whole = { e, e, e, e };
                    for (int h = 0; h < 2; h++) sum[r][h] += whole * share[h];
                }
            }
            for (int r = 0; r < 4; r++) for (int h = 0; h < 2; h++) memcpy(x + (size_t)r * columns + 4 * (size_t)h, &sum[r][h], 16);
        }
    for (; j < columns; j++)
        for (int row = 0; row < STRIP_ROWS; row++)
            for (int i = 0; i < n; i++) p->targets[(size_t)row * columns + j] += p->errors[row * BLOCK_COLUMNS + i] * feedback[(size_t)i * columns + j];
}

// The unit in which a row's largest number is the largest there is, and its inverse; both 0 for a row of next to nothing.
static float row_unit(const float *x, int n, int dtype, float *inverse) {
    float top = 0;
    for (int i = 0; i < n; i++) {
        const float a = x[i] < 0 ? -x[i] : x[i];
        top = a > top ? a : top;
    }
    const float largest = (float)(dtype == LLAMAC_Q8 ? LARGEST_Q8 : LARGEST);
    *inverse = top < NEXT_TO_NOTHING ? 0 : largest / top;
    return top < NEXT_TO_NOTHING ? 0 : top / largest;
}

static void quantize_strip(const struct strip *p, const float *w, int rows, uint8_t *out) {
    const int columns = p->columns;
    float units[STRIP_ROWS] = { 0 };
    memset(p->originals, 0, sizeof(float) * STRIP_ROWS * (size_t)columns);
    for (int r = 0; r < rows; r++) {
        const float *from = w + (size_t)r * (size_t)columns;
        float inverse, *to = p->originals + (size_t)r * (size_t)columns;
        units[r] = row_unit(from, columns, p->dtype, &inverse);
        for (int k = 0; k < columns; k++) to[k] = from[k] * inverse;
    }
    memcpy(p->targets, p->originals, sizeof(float) * STRIP_ROWS * (size_t)columns);
    memcpy(out, units, sizeof units);
    out += LINE_BYTES;
    for (int first = 0; first < columns; first += BLOCK_COLUMNS) {
        const int n = min_int(BLOCK_COLUMNS, columns - first), groups = ceil_div(n, GROUP_COLUMNS);
        uint8_t *codes = out + block_scale_bytes(p->dtype, groups);
        memset(out, 0, block_scale_bytes(p->dtype, groups));
        memset(codes, p->dtype == LLAMAC_Q8 ? Q8_OFFSET : 0, (size_t)groups * group_code_bytes(p->dtype));
        if (p->feedback) memset(p->errors, 0, sizeof(float) * STRIP_ROWS * BLOCK_COLUMNS);
        for (int r = 0; r < rows; r++)
            if (units[r] > 0) quantize_block(p, r, first, n, out, codes);
        if (p->feedback) hand_on(p, first, n);
        out += block_bytes(p->dtype, groups);
    }
}

int llamac_quantize(int dtype, const float *w, size_t rows, size_t columns, const float *importance, const float *feedback, void *out, llamac_error *err) {
    const size_t strip_bytes = dtype_is_quantized(dtype) ? dtype_strip_bytes(dtype, columns) : 0;
    if (!strip_bytes || columns > MAX_COLUMNS)
        return err_set(err, LLAMAC_BAD_ARGUMENT, "a matrix of %zu columns cannot be quantized to dtype %d", columns, dtype);
    if (feedback && dtype == LLAMAC_Q8) return err_set(err, LLAMAC_BAD_ARGUMENT, "q8 is quantized without feedback");
    struct grid grids[GRIDS];
    for (int i = 0; i < GRIDS; i++) make_grid(&grids[i], i);
    float *numbers = mem_take(2 * STRIP_ROWS * columns + columns + STRIP_ROWS * BLOCK_COLUMNS, sizeof(float), "a strip that is quantized", err);
    if (!numbers) return -1;
    float *ones = numbers + 2 * STRIP_ROWS * columns;
    for (size_t k = 0; k < columns; k++) ones[k] = 1;
    const struct strip p = {
        .dtype = dtype, .columns = (int)columns, .weight = importance ? importance : ones, .feedback = feedback, .grids = grids,
        .clip = importance ? 1.25f : 1.12f,
        .originals = numbers, .targets = numbers + STRIP_ROWS * columns, .errors = ones + columns,
    };
    const fp_control saved = fp_enter();
    for (size_t first = 0; first < rows; first += STRIP_ROWS)
        quantize_strip(&p, w + first * columns, (int)(rows - first < STRIP_ROWS ? rows - first : STRIP_ROWS), (uint8_t *)out + first / STRIP_ROWS * strip_bytes);
    fp_leave(saved);
    mem_give(numbers);
    return 0;
}
