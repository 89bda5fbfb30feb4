// SPDX-License-Identifier: MIT
// kernels_delta.h - the kernels of recurrent layers: the convolution over positions, the norm of q and k, the delta
// rule (Yang et al. 2024), and Mamba 2's recurrence (Dao and Gu 2024). Part of kernels_template.h; kernels.h specifies
// what they compute.

enum { SCAN_ROWS = 4 };   // of Mamba 2's recurrence that share a part of the state

static void convolve(const struct convolve *c) {
    FOR_VECTORS(c->channels, v16 sum = c->bias ? LOAD(c->bias + i) : v16_set1(0);
                for (int t = 0; t < c->width; t++)
                    if (c->inputs[t])
                        sum = v16_fma(LOAD(c->weights + (size_t)t * c->weight_stride + i), LOAD(c->inputs[t] + i), sum);
                STORE(c->out + i, c->is_silu ? v16_activate(ACTIVATION_SILU, sum) : sum));
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

// R rows for 16 C columns. A part of the state is loaded and stored once for all of these rows.
SPECIALIZED void ssm_scan_rows(const int R, const int C, const struct ssm_scan *s, int row, int column) {
    const size_t group = 16 * (size_t)s->state_dim, stride = s->row_stride, first = (size_t)row * stride;
    float *state = s->state + (size_t)column * (size_t)s->state_dim;
    const float *const x = s->x + first + column;
    v16 inputs[4][2], sums[4][2], decays[4];
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
        v16 parts[2];
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
    for (; column + 32 <= s->head_dim; column += 32) ssm_scan_columns(2, s, column);
    for (; column < s->head_dim; column += 16) ssm_scan_columns(1, s, column);
}
