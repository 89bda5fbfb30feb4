// SPDX-License-Identifier: MIT
// regroup.c - rearranges GGUF's blocks into strips of 16 rows and back. No number changes: the strips hold the blocks'
// own scales, minimums and codes, so `llamac_ungroup` restores every bit.
//
// A group of 32 columns of 16 rows passes through 8 x 16 words: byte i of word [k][r] is the code of column 4 k + i of
// row r. With rows in the last dimension, compilers vectorize the loops over rows.
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "llamac.h"

enum { CODE_WORDS = GROUP_COLUMNS / 4, MAX_BLOCK_BYTES = 210, MAX_COLUMNS = 1 << 24 };

// How a block stores the bits of its codes above the low four.
enum high_bits {
    HIGH_NONE,
    HIGH_MASK,     // 32 columns: bit c of a word belongs to column c
    HIGH_PLANES,   // a byte belongs to the columns c, c + 32, c + 64, ...: its lowest bits to column c
};
// How a block of 256 columns stores the scales of its spans.
enum packed_scales {
    SCALES_NONE,
    SCALES_PLAIN,      // one int8 after another
    SCALES_6_BIT,      // 8 scales and 8 minimums of 6 bits in 12 bytes
    SCALES_SPLIT,      // 8 scales of 6 bits, plus 32: 16 bits with the high 2 bits of each, then 4 bytes of low nibbles
};

// How GGUF packs a block. Offsets are in bytes from its start; fields that a type lacks are 0.
struct packing {
    uint16_t columns, bytes;
    uint8_t scale_at, minimum_at;   // f16 or e8m0: of the whole block, or of its spans' scales (d, d_min)
    uint8_t scales, scales_at;      // enum packed_scales
    uint8_t codes_at;               // the low four bits of the codes, or all 8
    uint8_t nibble_distance;        // columns c and c + this share a byte; 0: a byte per column
    uint8_t high, high_at;          // enum high_bits
};

static const struct packing packings[LLAMAC_N_DTYPES] = {
    [LLAMAC_Q4_0] = { .columns = 32, .bytes = 18, .codes_at = 2, .nibble_distance = 16 },
    [LLAMAC_Q4_1] = { .columns = 32, .bytes = 20, .minimum_at = 2, .codes_at = 4, .nibble_distance = 16 },
    [LLAMAC_Q5_0] = { .columns = 32, .bytes = 22, .codes_at = 6, .nibble_distance = 16, .high = HIGH_MASK,
                      .high_at = 2 },
    [LLAMAC_Q5_1] = { .columns = 32, .bytes = 24, .minimum_at = 2, .codes_at = 8, .nibble_distance = 16,
                      .high = HIGH_MASK, .high_at = 4 },
    [LLAMAC_Q8_0] = { .columns = 32, .bytes = 34, .codes_at = 2 },
    [LLAMAC_Q4_K] = { .columns = 256, .bytes = 144, .minimum_at = 2, .scales = SCALES_6_BIT, .scales_at = 4,
                      .codes_at = 16, .nibble_distance = 32 },
    [LLAMAC_Q5_K] = { .columns = 256, .bytes = 176, .minimum_at = 2, .scales = SCALES_6_BIT, .scales_at = 4,
                      .codes_at = 48, .nibble_distance = 32, .high = HIGH_PLANES, .high_at = 16 },
    [LLAMAC_Q6_K] = { .columns = 256, .bytes = 210, .scale_at = 208, .scales = SCALES_PLAIN, .scales_at = 192,
                      .nibble_distance = 64, .high = HIGH_PLANES, .high_at = 128 },
    [LLAMAC_IQ4_NL] = { .columns = 32, .bytes = 18, .codes_at = 2, .nibble_distance = 16 },
    [LLAMAC_IQ4_XS] = { .columns = 256, .bytes = 136, .scales = SCALES_SPLIT, .scales_at = 2, .codes_at = 8,
                        .nibble_distance = 16 },
    [LLAMAC_MXFP4] = { .columns = 32, .bytes = 17, .codes_at = 1, .nibble_distance = 16 },
};

static inline uint32_t load32(const uint8_t *p) { uint32_t x; memcpy(&x, p, 4); return x; }
static inline void store32(uint8_t *p, uint32_t x) { memcpy(p, &x, 4); }
static inline void or32(uint8_t *p, uint32_t x) { store32(p, load32(p) | x); }

// ---- GGUF's blocks <-> codes

// The place of 4 codes' low bits in a block: an offset in bytes, and a shift.
struct place { size_t at; int shift; };

INLINE struct place low_place(const struct packing *p, int group, int k) {
    const int column = group * GROUP_COLUMNS + 4 * k, distance = p->nibble_distance;
    if (!distance) return (struct place){ (size_t)(p->codes_at + column), 0 };
    const int byte = column / (2 * distance) * distance + column % distance;
    return (struct place){ (size_t)(p->codes_at + byte), column / distance % 2 * 4 };
}

// The place of the bits above the low four; bits: how many each code has there.
INLINE struct place high_place(const struct packing *p, int group, int k, int bits) {
    if (p->high == HIGH_MASK) return (struct place){ (size_t)p->high_at, 4 * k };
    const int per_byte = 8 / bits;   // groups that share bytes
    return (struct place){ (size_t)(p->high_at + group / per_byte * GROUP_COLUMNS + 4 * k), group % per_byte * bits };
}

// Reads a group's codes from the rows' blocks. block: 16 pointers; valid: all ones for rows that exist, else 0.
INLINE void read_codes(int dtype, const uint8_t *const *block, const uint32_t *valid, int group,
                       uint32_t code[CODE_WORDS][STRIP_ROWS]) {
    const struct packing *p = &packings[dtype];
    const int high_bits = dtype_table[dtype].code_bits - 4;
    uint32_t raw[CODE_WORDS][STRIP_ROWS];
    const int words = p->nibble_distance == 16 ? CODE_WORDS / 2 : CODE_WORDS;   // each holds one or two sets of codes
    UNROLL for (int k = 0; k < words; k++) {
        const size_t at = low_place(p, group, k).at;
        UNROLL for (int r = 0; r < STRIP_ROWS; r++) raw[k][r] = load32(block[r] + at);
    }
    UNROLL for (int k = 0; k < CODE_WORDS; k++) {
        const int shift = low_place(p, group, k).shift;
        const uint32_t *from = raw[k % words];
        for (int r = 0; r < STRIP_ROWS; r++)
            code[k][r] = p->nibble_distance ? from[r] >> shift & 0x0f0f0f0f : (from[r] ^ 0x80808080) & valid[r];
    }
    if (p->high == HIGH_MASK) {
        UNROLL for (int r = 0; r < STRIP_ROWS; r++) raw[0][r] = load32(block[r] + p->high_at);
        UNROLL for (int k = 0; k < CODE_WORDS; k++)
            for (int r = 0; r < STRIP_ROWS; r++) {
                const uint32_t bits = raw[0][r] >> 4 * k & 15;   // one per column: spread them over 4 bytes
                code[k][r] |= ((bits | bits << 7 | bits << 14 | bits << 21) & 0x01010101) << 4;
            }
    }
    if (p->high == HIGH_PLANES) {
        UNROLL for (int k = 0; k < CODE_WORDS; k++) {
            const struct place high = high_place(p, group, k, high_bits);
            UNROLL for (int r = 0; r < STRIP_ROWS; r++) raw[k][r] = load32(block[r] + high.at);
            for (int r = 0; r < STRIP_ROWS; r++)
                code[k][r] |= (raw[k][r] >> high.shift & (high_bits == 1 ? 0x01010101 : 0x03030303)) << 4;
        }
    }
}

// The inverse, for the first `rows` rows; the blocks were zero.
INLINE void write_codes(int dtype, uint8_t *const *block, int rows, int group,
                        const uint32_t code[CODE_WORDS][STRIP_ROWS]) {
    const struct packing *p = &packings[dtype];
    const int high_bits = dtype_table[dtype].code_bits - 4;
    UNROLL for (int k = 0; k < CODE_WORDS; k++) {
        const struct place low = low_place(p, group, k);
        const struct place high = p->high ? high_place(p, group, k, high_bits) : low;
        for (int r = 0; r < rows; r++) {
            if (!p->nibble_distance) {
                store32(block[r] + low.at, code[k][r] ^ 0x80808080);
                continue;
            }
            or32(block[r] + low.at, (code[k][r] & 0x0f0f0f0f) << low.shift);
            const uint32_t bits = code[k][r] >> 4 & (high_bits == 1 ? 0x01010101 : 0x03030303);
            if (p->high == HIGH_MASK)
                or32(block[r] + high.at, ((bits | bits >> 7 | bits >> 14 | bits >> 21) & 15) << high.shift);
            if (p->high == HIGH_PLANES) or32(block[r] + high.at, bits << high.shift);
        }
    }
}

// ---- codes <-> lines

INLINE void put_line(uint8_t *line, const uint32_t word[STRIP_ROWS]) { memcpy(line, word, LINE_BYTES); }
INLINE void get_line(uint32_t word[STRIP_ROWS], const uint8_t *line) { memcpy(word, line, LINE_BYTES); }

INLINE void write_lines(int bits, uint32_t code[CODE_WORDS][STRIP_ROWS], uint8_t *lines) {
    if (bits == 8) {
        UNROLL for (int k = 0; k < CODE_WORDS; k++) put_line(lines + k * LINE_BYTES, code[k]);
        return;
    }
    UNROLL for (int j = 0; j < 4; j++) {
        uint32_t line[STRIP_ROWS];
        for (int r = 0; r < STRIP_ROWS; r++)
            line[r] = (code[2 * j][r] & 0x0f0f0f0f) | (code[2 * j + 1][r] & 0x0f0f0f0f) << 4;
        put_line(lines + j * LINE_BYTES, line);
    }
    const int high = bits - 4, per_line = high ? 8 / high : 0;   // words that share a line
    UNROLL for (int h = 0; h < high; h++) {
        uint32_t line[STRIP_ROWS] = { 0 };
        UNROLL for (int v = 0; v < per_line; v++)
            for (int r = 0; r < STRIP_ROWS; r++)
                line[r] |= (code[h * per_line + v][r] >> 4 & (high == 1 ? 0x01010101 : 0x03030303)) << high * v;
        put_line(lines + (4 + h) * LINE_BYTES, line);
    }
}

INLINE void read_lines(int bits, const uint8_t *lines, uint32_t code[CODE_WORDS][STRIP_ROWS]) {
    if (bits == 8) {
        for (int k = 0; k < CODE_WORDS; k++) get_line(code[k], lines + k * LINE_BYTES);
        return;
    }
    uint32_t line[STRIP_ROWS];
    for (int j = 0; j < 4; j++) {
        get_line(line, lines + j * LINE_BYTES);
        for (int r = 0; r < STRIP_ROWS; r++) {
            code[2 * j][r] = line[r] & 0x0f0f0f0f;
            code[2 * j + 1][r] = line[r] >> 4 & 0x0f0f0f0f;
        }
    }
    const int high = bits - 4, per_line = high ? 8 / high : 0;
    for (int h = 0; h < high; h++) {
        get_line(line, lines + (4 + h) * LINE_BYTES);
        for (int v = 0; v < per_line; v++)
            for (int r = 0; r < STRIP_ROWS; r++)
                code[h * per_line + v][r] |= (line[r] >> high * v & (high == 1 ? 0x01010101 : 0x03030303)) << 4;
    }
}

// ---- scales

// The spans' scales and minimums of a block of 256 columns, one byte per span. All 8 minimums are 0 without minimums.
struct spans { uint8_t scale[16], minimum[8]; };

INLINE void read_spans(const struct packing *p, const uint8_t *block, struct spans *s) {
    const uint8_t *q = block + p->scales_at;
    if (p->scales == SCALES_PLAIN) memcpy(s->scale, q, 16);
    if (p->scales == SCALES_6_BIT) {
        const uint32_t a = load32(q), b = load32(q + 4), c = load32(q + 8);
        store32(s->scale, a & 0x3f3f3f3f);
        store32(s->scale + 4, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030));
        store32(s->minimum, b & 0x3f3f3f3f);
        store32(s->minimum + 4, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030));
    }
    if (p->scales == SCALES_SPLIT)
        for (int j = 0; j < 8; j++) {
            const int high = q[j / 4] >> (j % 4 * 2) & 3, low = q[2 + j / 2] >> (j % 2 * 4) & 15;
            s->scale[j] = (uint8_t)((high << 4 | low) - 32);
        }
}

INLINE void write_spans(const struct packing *p, const struct spans *s, uint8_t *block) {
    uint8_t *q = block + p->scales_at;
    if (p->scales == SCALES_PLAIN) memcpy(q, s->scale, 16);
    if (p->scales == SCALES_6_BIT) {
        const uint32_t low_s = load32(s->scale), high_s = load32(s->scale + 4);
        const uint32_t low_m = load32(s->minimum), high_m = load32(s->minimum + 4);
        store32(q, (low_s & 0x3f3f3f3f) | (high_s & 0x30303030) << 2);
        store32(q + 4, (low_m & 0x3f3f3f3f) | (high_m & 0x30303030) << 2);
        store32(q + 8, (high_s & 0x0f0f0f0f) | (high_m & 0x0f0f0f0f) << 4);
    }
    if (p->scales == SCALES_SPLIT)
        for (int j = 0; j < 8; j++) {
            const int code = (s->scale[j] + 32) & 63;
            q[j / 4] |= (uint8_t)(code >> 4 << (j % 4 * 2));
            q[2 + j / 2] |= (uint8_t)((code & 15) << (j % 2 * 4));
        }
}

// Writes the first `rows` elements of 2 bytes. Returns whether all f16 are finite.
INLINE int copy_f16(uint8_t *to, const uint8_t *const *block, size_t at, int rows) {
    int finite = 1;
    for (int r = 0; r < rows; r++) {
        memcpy(to + 2 * r, block[r] + at, 2);
        finite &= (block[r][at + 1] & 0x7c) != 0x7c;
    }
    return finite;
}

// e8m0 stands for 2^(byte - 128), and codes reach 12: from this byte on, weights can exceed f32. 255 is NaN.
enum { E8M0_TOO_LARGE = 253 };

// ---- strips

// Writes the scale area of a block of a strip. blocks: [group][row], where groups of one GGUF block have the same
// pointers. Returns whether all scales are finite.
INLINE int write_scales(int dtype, const uint8_t *const (*blocks)[STRIP_ROWS], int rows, int groups, uint8_t *out) {
    const struct packing *p = &packings[dtype];
    const struct dtype_info *info = &dtype_table[dtype];
    uint8_t *scales = out + scales_offset(dtype), *minimums = out + minimums_offset(dtype, groups);
    int finite = 1;
    if (info->has_super_scales) {
        finite &= copy_f16(out, blocks[0], p->scale_at, rows);
        if (info->has_minimums) finite &= copy_f16(out + 2 * STRIP_ROWS, blocks[0], p->minimum_at, rows);
        const int spans = groups * (GROUP_COLUMNS / info->scale_columns);
        for (int r = 0; r < rows; r++) {
            struct spans s;
            read_spans(p, blocks[0][r], &s);
            for (int j = 0; j < spans; j++) scales[j * STRIP_ROWS + r] = s.scale[j];
            for (int j = 0; info->has_minimums && j < spans; j++) minimums[j * STRIP_ROWS + r] = s.minimum[j];
        }
        return finite;
    }
    for (int g = 0; g < groups; g++) {
        if (info->scale == SCALE_E8M0) {
            for (int r = 0; r < rows; r++) {
                scales[g * STRIP_ROWS + r] = blocks[g][r][p->scale_at];
                finite &= blocks[g][r][p->scale_at] < E8M0_TOO_LARGE;
            }
            continue;
        }
        finite &= copy_f16(scales + g * 2 * STRIP_ROWS, blocks[g], p->scale_at, rows);
        if (info->has_minimums)
            finite &= copy_f16(minimums + g * 2 * STRIP_ROWS, blocks[g], p->minimum_at, rows);
    }
    return finite;
}

// The inverse of write_scales. The blocks were zero.
INLINE void read_scales(int dtype, const uint8_t *from, int rows, int groups, uint8_t *const (*blocks)[STRIP_ROWS]) {
    const struct packing *p = &packings[dtype];
    const struct dtype_info *info = &dtype_table[dtype];
    const uint8_t *scales = from + scales_offset(dtype), *minimums = from + minimums_offset(dtype, groups);
    for (int r = 0; r < rows; r++) {
        if (info->has_super_scales) {
            struct spans s = { { 0 }, { 0 } };
            for (int j = 0; j < groups * (GROUP_COLUMNS / info->scale_columns); j++) {
                s.scale[j] = scales[j * STRIP_ROWS + r];
                if (info->has_minimums) s.minimum[j] = minimums[j * STRIP_ROWS + r];
            }
            memcpy(blocks[0][r] + p->scale_at, from + 2 * r, 2);
            if (info->has_minimums) memcpy(blocks[0][r] + p->minimum_at, from + 2 * (STRIP_ROWS + r), 2);
            write_spans(p, &s, blocks[0][r]);
            continue;
        }
        for (int g = 0; g < groups; g++) {
            if (info->scale == SCALE_E8M0) {
                blocks[g][r][p->scale_at] = scales[g * STRIP_ROWS + r];
                continue;
            }
            memcpy(blocks[g][r] + p->scale_at, scales + 2 * (g * STRIP_ROWS + r), 2);
            if (info->has_minimums)
                memcpy(blocks[g][r] + p->minimum_at, minimums + 2 * (g * STRIP_ROWS + r), 2);
        }
    }
}

enum { MAX_GROUPS = 8 };   // of a block of a strip

// The offset in a row of the GGUF block that holds a column, and the column's group in that block.
INLINE size_t block_offset(const struct packing *p, int column) {
    return (size_t)(column / p->columns) * p->bytes;
}
INLINE int group_in_block(const struct packing *p, int column) { return column % p->columns / GROUP_COLUMNS; }

// Regroups one strip of up to 16 rows. Returns whether all scales are finite.
INLINE int regroup_strip(int dtype, const uint8_t *from, size_t row_bytes, int rows, int columns, uint8_t *out) {
    static const uint8_t zeros[MAX_BLOCK_BYTES];
    const struct packing *p = &packings[dtype];
    const int bits = dtype_table[dtype].code_bits;
    uint32_t valid[STRIP_ROWS], code[CODE_WORDS][STRIP_ROWS];
    const uint8_t *blocks[MAX_GROUPS][STRIP_ROWS];
    int finite = 1;
    for (int r = 0; r < STRIP_ROWS; r++) valid[r] = r < rows ? 0xffffffff : 0;
    for (int first = 0; first < columns; first += block_columns(dtype)) {
        const int groups = min_int(block_columns(dtype), columns - first) / GROUP_COLUMNS;
        const size_t scale_bytes = block_scale_bytes(dtype, groups);
        for (int g = 0; g < groups; g++)
            for (int r = 0; r < STRIP_ROWS; r++)
                blocks[g][r] = r < rows ? from + (size_t)r * row_bytes + block_offset(p, first + g * GROUP_COLUMNS)
                                        : zeros;
        memset(out, 0, scale_bytes);
        finite &= write_scales(dtype, blocks, rows, groups, out);
        out += scale_bytes;
        for (int g = 0; g < groups; g++) {
            read_codes(dtype, blocks[g], valid, group_in_block(p, first + g * GROUP_COLUMNS), code);
            write_lines(bits, code, out);
            out += group_code_bytes(dtype);
        }
    }
    return finite;
}

INLINE void ungroup_strip(int dtype, const uint8_t *from, size_t row_bytes, int rows, int columns, uint8_t *out) {
    const struct packing *p = &packings[dtype];
    uint32_t code[CODE_WORDS][STRIP_ROWS];
    uint8_t *blocks[MAX_GROUPS][STRIP_ROWS];
    memset(out, 0, row_bytes * (size_t)rows);
    for (int first = 0; first < columns; first += block_columns(dtype)) {
        const int groups = min_int(block_columns(dtype), columns - first) / GROUP_COLUMNS;
        for (int g = 0; g < groups; g++)
            for (int r = 0; r < rows; r++)
                blocks[g][r] = out + (size_t)r * row_bytes + block_offset(p, first + g * GROUP_COLUMNS);
        read_scales(dtype, from, rows, groups, blocks);
        from += block_scale_bytes(dtype, groups);
        for (int g = 0; g < groups; g++) {
            read_lines(dtype_table[dtype].code_bits, from, code);
            write_codes(dtype, blocks[g], rows, group_in_block(p, first + g * GROUP_COLUMNS), code);
            from += group_code_bytes(dtype);
        }
    }
}

// One function per dtype: the loops above are compiled for its constants.
#define REGROUPED_DTYPES(X) \
    X(LLAMAC_Q4_0) X(LLAMAC_Q4_1) X(LLAMAC_Q5_0) X(LLAMAC_Q5_1) X(LLAMAC_Q8_0) X(LLAMAC_Q4_K) X(LLAMAC_Q5_K) \
    X(LLAMAC_Q6_K) X(LLAMAC_IQ4_NL) X(LLAMAC_IQ4_XS) X(LLAMAC_MXFP4)

static int regroup_any(int dtype, const uint8_t *from, size_t row_bytes, int rows, int columns, uint8_t *out) {
#define CASE(D) case D: return regroup_strip(D, from, row_bytes, rows, columns, out);
    switch (dtype) { REGROUPED_DTYPES(CASE) default: return 0; }
#undef CASE
}

static void ungroup_any(int dtype, const uint8_t *from, size_t row_bytes, int rows, int columns, uint8_t *out) {
#define CASE(D) case D: ungroup_strip(D, from, row_bytes, rows, columns, out); return;
    switch (dtype) { REGROUPED_DTYPES(CASE) default: return; }
#undef CASE
}

size_t llamac_gguf_row_bytes(int dtype, uint64_t columns) {
    if (dtype <= 0 || dtype >= LLAMAC_N_DTYPES || !packings[dtype].columns) return 0;
    if (columns < 1 || columns > MAX_COLUMNS || columns % packings[dtype].columns) return 0;
    return (size_t)columns / packings[dtype].columns * packings[dtype].bytes;
}

// Checks the arguments of a conversion and computes the size of a row of blocks and of a strip.
static int check_sizes(int dtype, size_t rows, size_t columns, size_t blocks_size, size_t strips_size,
                       size_t *row_bytes, size_t *strip_bytes, llamac_error *err) {
    *row_bytes = llamac_gguf_row_bytes(dtype, columns);
    if (!*row_bytes)
        return bad_argument(err, "dtype is %d and columns is %zu, expected a GGUF dtype (%d to %d) and whole blocks",
                            dtype, columns, LLAMAC_Q4_0, LLAMAC_MXFP4);
    *strip_bytes = dtype_strip_bytes(dtype, columns);
    uint64_t needed;
    if (mul_overflows(rows, *row_bytes, &needed) || needed != blocks_size)
        return bad_argument(err, "the blocks have %zu bytes, expected %zu rows of %zu", blocks_size, rows,
                            *row_bytes);
    if (strips_size != llamac_matrix_bytes(dtype, rows, columns))
        return bad_argument(err, "the strips have %zu bytes, expected %zu", strips_size,
                            llamac_matrix_bytes(dtype, rows, columns));
    return 0;
}

int llamac_regroup(int dtype, const void *blocks, size_t blocks_size, size_t rows, size_t columns, void *strips,
                   size_t strips_size, llamac_error *err) {
    size_t row_bytes, strip_bytes;
    if (check_sizes(dtype, rows, columns, blocks_size, strips_size, &row_bytes, &strip_bytes, err)) return -1;
    int finite = 1;
    for (size_t first = 0; first < rows; first += STRIP_ROWS) {
        const int n = rows - first < STRIP_ROWS ? (int)(rows - first) : STRIP_ROWS;
        finite &= regroup_any(dtype, (const uint8_t *)blocks + first * row_bytes, row_bytes, n, (int)columns,
                              (uint8_t *)strips + first / STRIP_ROWS * strip_bytes);
    }
    return finite;
}

int llamac_ungroup(int dtype, const void *strips, size_t strips_size, size_t rows, size_t columns, void *blocks,
                   size_t blocks_size, llamac_error *err) {
    size_t row_bytes, strip_bytes;
    if (check_sizes(dtype, rows, columns, blocks_size, strips_size, &row_bytes, &strip_bytes, err)) return -1;
    for (size_t first = 0; first < rows; first += STRIP_ROWS) {
        const int n = rows - first < STRIP_ROWS ? (int)(rows - first) : STRIP_ROWS;
        ungroup_any(dtype, (const uint8_t *)strips + first / STRIP_ROWS * strip_bytes, row_bytes, n, (int)columns,
                    (uint8_t *)blocks + first * row_bytes);
    }
    return 0;
}
