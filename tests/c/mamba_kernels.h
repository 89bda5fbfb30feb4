// SPDX-License-Identifier: MIT
// mamba_kernels.h - the kernels of Mamba 2: the same bits with all tables, and the recurrence against double. Part of
// test_kernels.c.
#ifndef LLAMAC_MAMBA_KERNELS_H
#define LLAMAC_MAMBA_KERNELS_H
#include <math.h>
#include "common.h"
#include "gates.h"
#include "kernel_tables.h"

// Compares Mamba 2's recurrence of n rows with the same in double, all tables, and rows one by one with all at once.
static void check_ssm_scan(int state_dim, int head_dim, int n, uint64_t *state) {
    const size_t wide = (size_t)(head_dim + 2 * state_dim), cells = (size_t)(state_dim * head_dim),
                 size = (size_t)(n * head_dim);
    float *rows = take_floats(n, (int)wide), *gates = take_floats(n, 2), *start = take_floats(state_dim, head_dim),
          *found = take_floats(state_dim, head_dim), *expected = take_floats(state_dim, head_dim),
          *out = take_floats(n, head_dim), *first = take_floats(n, head_dim);
    double *exact = take(cells * sizeof *exact);
    fill_random(rows, (size_t)n * wide, state), fill_random(gates, 2 * (size_t)n, state);
    fill_random(start, cells, state);
    for (int r = 0; r < n; r++) gates[2 * r] = fabsf(gates[2 * r]);   // the decay, up to 1
    struct ssm_scan s = {
        .state_dim = state_dim, .head_dim = head_dim, .x = rows, .b = rows + head_dim,
        .c = rows + head_dim + state_dim, .row_stride = wide, .decay = gates, .step = gates + 1, .gate_stride = 2,
        .skip = 0.75f, .out_stride = (size_t)head_dim,
    };
    for (int t = 0; t < n_tables; t++)
        for (int alone = 0; alone < 2; alone++) {
            memcpy(found, start, cells * sizeof *found);
            for (int r = 0; r < n; r += alone ? 1 : n) {
                struct ssm_scan part = s;
                part.n_rows = alone ? 1 : n, part.state = found, part.out = out + r * head_dim;
                part.x += (size_t)r * wide, part.b += (size_t)r * wide, part.c += (size_t)r * wide;
                part.decay += 2 * r, part.step += 2 * r;
                tables[t]->ssm_scan(&part);
            }
            if (t == 0 && !alone) {
                memcpy(expected, found, cells * sizeof *found);
                memcpy(first, out, size * sizeof *out);
            }
            CHECK(same(found, expected, (int)cells) && same(out, first, (int)size), "%s: %d rows, (%d, %d)",
                  tables[t]->name, n, state_dim, head_dim);
        }
    double error = 0, largest = 0;
    for (int p = 0; p < head_dim; p++) {   // a state is stored as groups of 16 columns
        for (int i = 0; i < state_dim; i++) exact[i] = (double)start[p / 16 * 16 * state_dim + 16 * i + p % 16];
        for (int r = 0; r < n; r++) {
            const float *row = rows + (size_t)r * wide, *b = row + head_dim, *c = b + state_dim;
            double y = (double)row[p] * 0.75;
            for (int i = 0; i < state_dim; i++) {
                exact[i] = exact[i] * (double)gates[2 * r] + (double)row[p] * (double)gates[2 * r + 1] * (double)b[i];
                y += exact[i] * (double)c[i];
            }
            error = fmax(error, fabs(y - (double)first[r * head_dim + p]));
            largest = fmax(largest, fabs(y));
        }
    }
    CHECK(error <= 2e-6 * largest, "%d rows, (%d, %d): %g of %g", n, state_dim, head_dim, error, largest);
    free(rows), free(gates), free(start), free(found), free(expected), free(out), free(first), free(exact);
}

// The gates are those of gates.h, also for numbers without a softplus.
static void the_gates_of_mamba_are_the_same_everywhere(void) {
    enum { HEADS = 67, ROUNDS = 40 };
    static const float odd[] = { 0, -0.0f, INFINITY, -INFINITY, NAN, 1e-30f, -1e-30f, 88, -88, -800, 800, 3e38f };
    uint64_t state = 9;
    float inputs[HEADS], bias[HEADS], rate[HEADS], decay[HEADS], step[HEADS];
    for (int round = 0; round < ROUNDS; round++) {
        fill_random(inputs, HEADS, &state), fill_random(bias, HEADS, &state), fill_random(rate, HEADS, &state);
        for (int i = 0; i < HEADS; i++) {
            inputs[i] *= round % 3 ? 20 : 0.01f, rate[i] = -fabsf(rate[i]) * (round % 2 ? 16 : 1);
            if (i % 5 == 0) inputs[i] = odd[(i / 5 + round) % (int)ARRAY_LEN(odd)];
            if (i % 11 == 0) rate[i] = odd[(i / 11 + round) % (int)ARRAY_LEN(odd)];
        }
        const int n = round ? 1 + random_below(&state, HEADS) : HEADS;
        const float least = round % 4 ? 0 : 0.5f, most = round % 5 ? 0 : 2;
        for (int t = 0; t < n_tables; t++) {
            memcpy(decay, inputs, sizeof decay), memset(step, 0, sizeof step);
            tables[t]->ssm_gates(&(struct ssm_gates){
                .n = n, .step_min = least, .step_max = most, .bias = bias, .rate = rate, .decay = decay, .step = step,
            });
            for (int i = 0; i < n; i++) {
                double size = softplus((double)(inputs[i] + bias[i]));
                if (size < (double)least) size = (double)least;
                if (most > 0 && size > (double)most) size = (double)most;
                const float expected[2] = { decay_of(rate[i], size), (float)size }, found[2] = { decay[i], step[i] };
                for (int k = 0; k < 2; k++)
                    CHECK(!memcmp(&found[k], &expected[k], sizeof(float)) || (isnan(found[k]) && isnan(expected[k])),
                          "%s: %s of %g, %g, %g: %g, expected %g", tables[t]->name, k ? "step" : "decay",
                          (double)inputs[i], (double)bias[i], (double)rate[i], (double)found[k], (double)expected[k]);
            }
            CHECK(n == HEADS || (!memcmp(&decay[n], &inputs[n], sizeof(float)) && step[n] == 0) ||
                  isnan(inputs[n]), "%s: more than %d heads", tables[t]->name, n);
        }
    }
}

static void the_recurrence_of_mamba_is_accurate_everywhere(void) {
    uint64_t state = 6;
    static const int sizes[][2] = { { 16, 16 }, { 128, 64 }, { 32, 80 }, { 48, 112 } };
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++)
        for (int n = 1; n <= 11; n += sparser(2)) check_ssm_scan(sizes[i][0], sizes[i][1], n, &state);
}
#endif
