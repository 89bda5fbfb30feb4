// SPDX-License-Identifier: MIT
// kernels_delta.h - the kernels of recurrent layers: the convolution over positions, the norm of q and k, the delta
// rule (Yang et al. 2024), and Mamba 2's recurrence (Dao and Gu 2024). Part of kernels_template.h; kernels.h specifies
// what they compute.

// Rows and vectors of Mamba 2's recurrence that share a part of the state: as many as the registers hold.
#if defined(__AVX512F__)
enum { SCAN_ROWS = 4, SCAN_VECTORS = 2 };
#else
enum { SCAN_ROWS = 2, SCAN_VECTORS = 1 };
#endif

// taps: the number of taps, all of which have inputs; 0: there are c->width taps, and some may have none.
SPECIALIZED void convolve_taps(const int taps, const struct convolve *c) {
    const int width = taps ? taps : c->width;
    FOR_VECTORS(c->channels, v16 sum = c->bias ? LOAD(c->bias + i) : v16_set1(0);
                for (int t = 0; t < width; t++)
                    if (taps || c->inputs[t])
                        sum = v16_fma(LOAD(c->weights + (size_t)t * c->weight_stride + i), LOAD(c->inputs[t] + i), sum);
                STORE(c->out + i, c->is_silu ? v16_activate(ACTIVATION_SILU, sum) : sum));
}

static void convolve(const struct convolve *c) {
    if (c->width == 4 && c->inputs[0]) convolve_taps(4, c);   // the oldest is the first to be missing
    else convolve_taps(0, c);
}

static void unit_norm(float *x, int n, float eps, float factor) {
    v16 squares = v16_set1(0), v;
    FOR_VECTORS(n, v = LOAD(x + i); squares = v16_fma(v, v, squares));
    const v16 scale = v16_set1(factor / sqrtf(v16_reduce_add(squares) + eps));
    FOR_VECTORS(n, STORE(x + i, v16_mul(LOAD(x + i), scale)));
}

// All rows for 16 C columns of the state, which are adjacent in memory and stay in the L1 cache. The state is
// multiplied by the decay twice, with the same result, instead of being stored in between.
SPECIALIZED void delta_columns(const int C, const struct delta_rule *d, int column) {
    float *const states = d->state + (size_t)column * (size_t)d->key_dim;
    for (int r = 0; r < d->n_rows; r++) {
        const size_t row = (size_t)r * d->row_stride;
        const float *q = d->q + row, *k = d->k + row, *v = d->v + row + column;
        const v16 decay = v16_set1(d->decay[(size_t)r * d->gate_stride]),
                  beta = v16_set1(d->beta[(size_t)r * d->gate_stride]);
        float *const out = d->out + (size_t)r * d->out_stride + column, *state = states;
        v16 sums[4];
        UNROLL for (int c = 0; c < C; c++) sums[c] = v16_set1(0);
        for (int i = 0; i < d->key_dim; i++, state += 16 * C)
            UNROLL for (int c = 0; c < C; c++)
                sums[c] = v16_fma_scalar(v16_mul(v16_load(state + 16 * c), decay), k[i], sums[c]);
        v16 change[4];
        UNROLL for (int c = 0; c < C; c++) {
            change[c] = v16_mul(v16_sub(v16_load(v + 16 * c), sums[c]), beta);
            sums[c] = v16_set1(0);
        }
        state = states;
        for (int i = 0; i < d->key_dim; i++, state += 16 * C)
            UNROLL for (int c = 0; c < C; c++) {
                const v16 s = v16_fma_scalar(change[c], k[i], v16_mul(v16_load(state + 16 * c), decay));
                v16_store(state + 16 * c, s);
                sums[c] = v16_fma_scalar(s, q[i], sums[c]);
            }
        UNROLL for (int c = 0; c < C; c++) v16_store(out + 16 * c, sums[c]);
    }
}

static void delta_rule(const struct delta_rule *d) {
    int column = 0;
    for (; column + 64 <= d->value_dim; column += 64) delta_columns(4, d, column);
    for (; column < d->value_dim; column += 16) delta_columns(1, d, column);
}

// ---- the gates of Mamba 2, in the compiler's own vectors, because the SIMD layer has no doubles

#if defined(__AVX512F__)
enum { GATE_LANES = 8 };
#elif defined(__AVX2__)
enum { GATE_LANES = 4 };
#else
enum { GATE_LANES = 2 };
#endif
typedef float gate_f32 __attribute__((vector_size(4 * GATE_LANES)));
typedef double gate_f64 __attribute__((vector_size(8 * GATE_LANES)));
typedef int64_t gate_i64 __attribute__((vector_size(8 * GATE_LANES)));

INLINE gate_f64 gate_select(gate_i64 condition, gate_f64 x, gate_f64 y) {
    return (gate_f64)(((gate_i64)x & condition) | ((gate_i64)y & ~condition));
}

// exp_negative, by the same operations in the same order.
INLINE gate_f64 gate_exp(gate_f64 x) {
    const gate_i64 inside = x > -700.0;
    x = (gate_f64)((gate_i64)x & inside);
    const gate_f64 shifted = x * EXP_LOG2_E + EXP_SHIFT, n = shifted - EXP_SHIFT;
    const gate_f64 r = (x - n * EXP_LN2_HIGH) - n * EXP_LN2_LOW;
    gate_f64 p = (gate_f64){ 0 } + 1.0;
    UNROLL for (int i = 13; i >= 1; i--) p = 1.0 + p * r / (double)i;
    return (gate_f64)((gate_i64)(p * (gate_f64)(((gate_i64)shifted + 1023) << 52)) & inside);
}

// log_positive of 1 to 2, likewise.
INLINE gate_f64 gate_log(gate_f64 x) {
    const gate_i64 above = x > 0x1.6a09e667f3bcdp0;
    const gate_f64 m = gate_select(above, x / 2.0, x), z = (m - 1.0) / (m + 1.0), z2 = z * z;
    gate_f64 sum = { 0 };
    UNROLL for (int i = 21; i >= 1; i -= 2) sum = sum * z2 + 1.0 / i;
    const gate_f64 ln2 = (gate_f64){ 0 } + 0x1.62e42fefa39efp-1;
    return (gate_f64)((gate_i64)ln2 & above) + 2.0 * z * sum;
}

// decay[i] and step[i] of GATE_LANES heads.
INLINE void gate_heads(const struct ssm_gates *g, const float *bias, const float *rate, float *decay, float *step) {
    gate_f32 x, b, a;
    memcpy(&x, decay, sizeof x), memcpy(&b, bias, sizeof b), memcpy(&a, rate, sizeof a);
    const gate_f64 sum = __builtin_convertvector(x + b, gate_f64), zero = { 0 }, one = zero + 1.0;
    const gate_f64 rest = gate_log(1.0 + gate_exp(gate_select(sum < 0.0, sum, -sum)));
    gate_f64 t = gate_select(sum < 0.0, rest, sum + rest);
    const gate_f64 least = zero + (double)g->step_min, most = zero + (double)g->step_max;
    t = gate_select(t < least, least, t);   // a NaN stays a NaN
    if (g->step_max > 0) t = gate_select(t > most, most, t);
    const gate_f64 exponent = __builtin_convertvector(a, gate_f64) * t;
    const gate_f64 power = gate_select(exponent > 0.0, one, gate_exp(exponent));
    const gate_f32 found = __builtin_convertvector(gate_select(exponent == exponent, power, exponent), gate_f32),
                   length = __builtin_convertvector(t, gate_f32);
    memcpy(decay, &found, sizeof found), memcpy(step, &length, sizeof length);
}

static void ssm_gates(const struct ssm_gates *g) {
    int i = 0;
    for (; i + GATE_LANES <= g->n; i += GATE_LANES) gate_heads(g, g->bias + i, g->rate + i, g->decay + i, g->step + i);
    if (i == g->n) return;
    float bias[GATE_LANES] = { 0 }, rate[GATE_LANES] = { 0 }, decay[GATE_LANES] = { 0 }, step[GATE_LANES];
    const size_t bytes = sizeof(float) * (size_t)(g->n - i);
    memcpy(bias, g->bias + i, bytes), memcpy(rate, g->rate + i, bytes), memcpy(decay, g->decay + i, bytes);
    gate_heads(g, bias, rate, decay, step);
    memcpy(g->decay + i, decay, bytes), memcpy(g->step + i, step, bytes);
}

// ---- Mamba 2's recurrence

// R rows for 16 C columns. A part of the state is loaded and stored once for all of these rows.
SPECIALIZED void ssm_scan_rows(const int R, const int C, const struct ssm_scan *s, int row, int column) {
    const size_t group = 16 * (size_t)s->state_dim, stride = s->row_stride, first = (size_t)row * stride;
    float *state = s->state + (size_t)column * (size_t)s->state_dim;
    const float *const x = s->x + first + column;
    v16 inputs[SCAN_ROWS][SCAN_VECTORS], sums[SCAN_ROWS][SCAN_VECTORS], decays[SCAN_ROWS];
    UNROLL for (int r = 0; r < R; r++) {
        decays[r] = v16_set1(s->decay[(size_t)(row + r) * s->gate_stride]);
        const v16 step = v16_set1(s->step[(size_t)(row + r) * s->gate_stride]);
        UNROLL for (int j = 0; j < C; j++) {
            inputs[r][j] = v16_mul(v16_load(x + (size_t)r * stride + 16 * j), step);
            sums[r][j] = v16_set1(0);
        }
    }
    const float *b = s->b + first, *c = s->c + first;
    for (int i = 0; i < s->state_dim; i++, state += 16, b++, c++) {
        v16 parts[SCAN_VECTORS];
        UNROLL for (int j = 0; j < C; j++) parts[j] = v16_load(state + (size_t)j * group);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int j = 0; j < C; j++) {
                parts[j] = v16_fma_scalar(inputs[r][j], b[(size_t)r * stride], v16_mul(parts[j], decays[r]));
                sums[r][j] = v16_fma_scalar(parts[j], c[(size_t)r * stride], sums[r][j]);
            }
        UNROLL for (int j = 0; j < C; j++) v16_store(state + (size_t)j * group, parts[j]);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < C; j++)
            v16_store(s->out + (size_t)(row + r) * s->out_stride + column + 16 * j,
                      v16_fma_scalar(v16_load(x + (size_t)r * stride + 16 * j), s->skip, sums[r][j]));
}

SPECIALIZED void ssm_scan_columns(const int C, const struct ssm_scan *s, int column) {
    int row = 0;
    for (; row + SCAN_ROWS <= s->n_rows; row += SCAN_ROWS) ssm_scan_rows(SCAN_ROWS, C, s, row, column);
    for (; row < s->n_rows; row++) ssm_scan_rows(1, C, s, row, column);
}

static void ssm_scan(const struct ssm_scan *s) {
    int column = 0;
    for (; column + 16 * SCAN_VECTORS <= s->head_dim; column += 16 * SCAN_VECTORS)
        ssm_scan_columns(SCAN_VECTORS, s, column);
    for (; column < s->head_dim; column += 16) ssm_scan_columns(1, s, column);
}
