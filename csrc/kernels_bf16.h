// SPDX-License-Identifier: MIT
// kernels_bf16.h - products of many rows with inputs of fast numerics and bf16 weights, two columns at a time. Part of
// kernels_template.h, for kernel sets that define SIMD_BF16_PAIRS; kernels.h specifies these inputs.
//
// The instruction makes two fused multiply-adds, of the earlier column first, so the sums have the bits of all other
// kernels, except that it treats subnormal numbers as 0. There are none if all weights are 0 or at least MIN_WEIGHT:
// these inputs are 0 or at least FAST_BF16_MIN, so the products, and with them the sums, are multiples of 2^-126.
// If a pass meets a smaller weight, it and the strip's later passes use two multiply-adds instead.
//
// A word holds the inputs of two columns, the first in its upper half, and a line of unpacked weights the same for
// the 16 rows of a strip. Each BLOCK_COLUMNS of a panel begin where they begin in a panel of floats, which is twice as
// long.

// The bits of x, rounded. A NaN stays a quiet NaN. Without branches, so that compilers vectorize it.
INLINE uint32_t rounded_bf16(float x) {
    const uint32_t bits = f32_bits(x), nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    const uint32_t number = fabsf(x) < FAST_BF16_MIN ? 0 : nearest;
    return x == x ? number : (bits & 0xffff0000) | 0x7fc00000;
}

#if defined(SIMD_BF16_PAIRS)
enum { MIN_WEIGHT = (127 - 48) << 7 };   // 2^-48 as a bf16
// Where an unpacked strip says whether it has contained smaller weights.
enum { SMALL_WEIGHTS_AT = UNPACKED_STRIP_BYTES - LINE_BYTES };
_Static_assert((int)GEMM_KC_FLOAT == (int)BLOCK_COLUMNS, "a pass is a block, whose words are adjacent");
_Static_assert(GEMM_KC_FLOAT / 2 * LINE_BYTES <= SMALL_WEIGHTS_AT, "a strip's lines do not reach what follows them");

INLINE int uses_bf16_pairs(int m) { return m >= MANY_ROWS && bf16_pairs_are_faster(); }

static void pack_bf16_pairs(struct panel_row to, const float *row, int columns) {
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        int32_t *const block = to.panel + (size_t)k * (size_t)to.height + to.row;
        const int n = min_int(BLOCK_COLUMNS, columns - k);
        uint32_t rounded[BLOCK_COLUMNS + 1];
        for (int i = 0; i < n; i++) rounded[i] = rounded_bf16(row[k + i]);
        rounded[n] = 0;
        for (int i = 0; i < n; i += 2) block[i / 2 * to.height] = (int32_t)(rounded[i] | rounded[i + 1] >> 16);
    }
}

INLINE void clear_small_weights(uint8_t *strip) { memset(strip + SMALL_WEIGHTS_AT, 0, sizeof(int32_t)); }
INLINE int has_small_weights(const uint8_t *strip) {
    int32_t has;
    memcpy(&has, strip + SMALL_WEIGHTS_AT, sizeof has);
    return has;
}

static __attribute__((noinline)) void unpack_bf16_pairs(const uint8_t *w, int columns, uint8_t *to) {
    line least = line_set1(-1);
    for (int k = 0; k < columns; k += 2) {
        const uint16_t *const p = (const uint16_t *)(const void *)w + STRIP_ROWS * k;
        const line pairs = k + 1 < columns ? bf16_pairs_load(p, 2) : bf16_pairs_load(p, 1);
        least = bf16_pairs_least(least, pairs);
        line_store(to + k / 2 * LINE_BYTES, pairs);
    }
    const int32_t has_small = has_small_weights(to) || bf16_pairs_any_below(least, MIN_WEIGHT);
    memcpy(to + SMALL_WEIGHTS_AT, &has_small, sizeof has_small);
}

INLINE void multiply_bf16_pairs(const int exactly, const int S, const int T, const uint8_t *w, size_t strip_bytes,
                                const int32_t *x, int columns, float *sums) {
    v16 c[GEMM_STRIPS][PANEL_ROWS];
    FOR_TILE(i, t) c[i][t] = v16_load(sums + 16 * (i * T + t));
    for (int k = 0; k < columns; k += 2, w += LINE_BYTES, x += T)
        UNROLL for (int i = 0; i < S; i++) {
            const line pairs = line_load(w + (size_t)i * strip_bytes);
            UNROLL for (int t = 0; t < T; t++)
                c[i][t] = exactly ? v16_fma_bf16_pairs(pairs, x[t], c[i][t]) : v16_dot_bf16_pairs(pairs, x[t], c[i][t]);
        }
    FOR_TILE(i, t) v16_store(sums + 16 * (i * T + t), c[i][t]);
}

INLINE void micro_kernel_bf16_pairs(const int dtype, const int variant, const int S, const int T, const uint8_t *w,
                                    size_t strip_bytes, const void *inputs, int columns, float *sums) {
    (void)dtype, (void)variant;
    int exactly = !has_bf16_pairs();
    UNROLL for (int i = 0; i < S; i++) exactly |= has_small_weights(w + (size_t)i * strip_bytes);
    if (exactly) multiply_bf16_pairs(1, S, T, w, strip_bytes, inputs, columns, sums);
    else multiply_bf16_pairs(0, S, T, w, strip_bytes, inputs, columns, sums);
}
MANY_ROWS_KERNEL(panel_kernel_bf16_pairs, multiply_panel, micro_kernel_bf16_pairs, LLAMAC_BF16, 1)
#else
static panel_kernel *const *const panel_kernel_bf16_pairs = NULL;
static unpack_function *const unpack_bf16_pairs = NULL;
INLINE int uses_bf16_pairs(int m) { (void)m; return 0; }
INLINE void pack_bf16_pairs(struct panel_row to, const float *row, int columns) { (void)to, (void)row, (void)columns; }
INLINE void clear_small_weights(uint8_t *strip) { (void)strip; }
#endif

// A row of a product of m rows, rounded.
static void pack_bf16(struct panel_row to, const float *row, int columns, int m) {
    if (uses_bf16_pairs(m)) {
        pack_bf16_pairs(to, row, columns);
        return;
    }
    float *p = (float *)(void *)to.panel + to.row;
    for (int k = 0; k < columns; k++) p[(size_t)k * (size_t)to.height] = f32_from_bits(rounded_bf16(row[k]));
}
