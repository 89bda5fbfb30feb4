// SPDX-License-Identifier: MIT
// test_attention.c - the kernels of attention and of the KV cache, of every instruction set that this machine supports:
// the same bits as the scalar kernels, and close to the same formulas in float64.
#include <math.h>
#include "common.h"
#include "kernel_tables.h"

static const int kv_dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };

// The KV cache of one head.
struct cache { uint8_t **pages; int n_pages; size_t key_bytes; };

// The tables take turns.
static void store_position(const struct cache *cache, int dtype, int head_dim, int p, const float *k, const float *v) {
    const struct kernels *table = tables[p % n_tables];
    uint8_t *page = cache->pages[p / KV_PAGE];
    table->store_key[dtype](page, p % KV_PAGE, head_dim, k);
    table->store_value[dtype](page + cache->key_bytes, p % KV_PAGE, head_dim, v);
}

static struct cache fill_cache(int dtype, int head_dim, int positions, const float *k, const float *v) {
    struct cache cache = { .n_pages = ceil_div(positions, KV_PAGE), .key_bytes = kv_keys_bytes(dtype, head_dim) };
    cache.pages = take(sizeof *cache.pages * (size_t)cache.n_pages);
    for (int p = 0; p < cache.n_pages; p++)
        cache.pages[p] = take(cache.key_bytes + kv_values_bytes(dtype, head_dim));
    for (int p = 0; p < positions; p++) store_position(&cache, dtype, head_dim, p, k + p * head_dim, v + p * head_dim);
    return cache;
}
static void free_cache(struct cache cache) {
    for (int i = 0; i < cache.n_pages; i++) free(cache.pages[i]);
    free(cache.pages);
}

// Gives each query a head's biases, and a position. biases: (2, 2 * distance + 1).
static void choose_biases(struct attend *a, const float *biases, int positions, uint64_t *state) {
    for (int i = 0; i < a->n_queries; i++) {
        a->biases[i] = biases + a->bias_distance + (i % 2 ? 2 * a->bias_distance + 1 : 0);
        a->position[i] = random_below(state, 2) ? random_below(state, positions) : a->end[i] - 1;
    }
}

// Gives each query a range of positions: random ends, or those of a prompt with `group` queries per row. Returns the
// first position that any query attends to.
static int choose_ranges(struct attend *a, int positions, uint64_t *state) {
    const int group = (const int[]){ 0, 1, 4, 8 }[random_below(state, 4)];
    for (int i = 0; i < a->n_queries; i++)
        a->end[i] = group ? max_int(1, positions - (a->n_queries - 1) / group + i / group)
                          : 1 + random_below(state, positions);
    a->end[a->n_queries - 1] = positions;
    const int window = (const int[]){ 0, 0, 1, 5, 300 }[random_below(state, 5)];
    int first_visible = positions;
    for (int i = 0; i < a->n_queries; i++) {
        a->begin[i] = window ? max_int(0, a->end[i] - window) : 0;
        first_visible = min_int(first_visible, a->begin[i]);
    }
    a->soft_cap = window % 2 ? 0.5f : 0;
    a->has_sinks = random_below(state, 2);
    for (int i = 0; i < a->n_queries; i++) a->sinks[i] = 4 * random_float(state);
    return first_visible;
}

// o += step * code * v, with the code rounded. slack: |step * v| is added if the code is near a tie.
static void add_rounded(double code, double step, const float *v, int head_dim, double *o, double *slack) {
    const double rounded = rint(code), flip = fabs(fabs(code - rounded) - 0.5) < 2e-3 ? step : 0;
    for (int d = 0; d < head_dim; d++) o[d] += rounded * step * (double)v[d];
    for (int d = 0; d < head_dim; d++) slack[d] += flip * fabs((double)v[d]);
}

// With a cache in q8, numerators times the values' scales have codes. Recomputes o from the numerators p of positions
// [begin, end), whose sum is `sum`, rounded to these codes. slack: how far o may be off because a code is a tie but for
// the errors of floats.
static void round_numerators(const struct cache *cache, int head_dim, const float *v, int begin, int end,
                             const double *p, double sum, double *o, double *slack) {
    for (int d = 0; d < head_dim; d++) o[d] = slack[d] = 0;
    for (int first = begin / KV_PAGE * KV_PAGE; first < end; first += KV_PAGE) {
        const uint16_t *scales = (const void *)(cache->pages[first / KV_PAGE] + cache->key_bytes);
        const int from = max_int(first, begin), to = min_int(first + KV_PAGE, end);
        double top = 0;
        for (int j = from; j < to; j++) {
            const double scaled = p[j] * (double)f32_from_f16(scales[j - first]);
            if (scaled > top) top = scaled;
        }
        for (int j = from; j < to; j++) {
            const double scale = (double)f32_from_f16(scales[j - first]);
            if (scale > 0) add_rounded(p[j] * scale / (top / NUMERATOR_LIMIT), top / NUMERATOR_LIMIT / scale / sum,
                                       v + j * head_dim, head_dim, o, slack);
        }
    }
}

// Queries with different ranges over one head's cache must give the same bits with all tables and one by one, close to
// float64. NaNs at positions outside of a query's range must not reach its output.
static void check_attention(int dtype, int head_dim, int positions, int n_queries, uint64_t *state) {
    const int width = padded_head_dim(head_dim);
    const size_t outputs = (size_t)(n_queries * width);
    float *k = take_floats(positions, head_dim), *v = take_floats(positions, head_dim);
    float *q = take_floats(n_queries, head_dim);
    const size_t words = kv_query_words(dtype, head_dim);
    int32_t *panels = take(sizeof *panels * words * (size_t)n_queries), *alone = take(sizeof *alone * words);
    float *out = take_floats(n_queries, width), *expected = take_floats(n_queries, width);
    float *scratch = take(sizeof(float) * attend_layout(head_dim).end), *nans = take_floats(1, head_dim);
    fill_random(k, (size_t)(positions * head_dim), state), fill_random(v, (size_t)(positions * head_dim), state);
    fill_random(q, (size_t)(n_queries * head_dim), state);
    const int poisoned = random_below(state, 2);   // the last position is NaN; not all queries attend to it
    if (poisoned) k[positions * head_dim - 1] = v[positions * head_dim - 1] = NAN;
    const struct cache cache = fill_cache(dtype, head_dim, positions, k, v);
    struct cancel cancel = { 0 };
    struct attend a = { .cancel = &cancel, .kv = { (const uint8_t *const *)cache.pages, 0, cache.key_bytes },
                        .head_dim = head_dim, .value_dim = head_dim, .n_queries = n_queries, .q = panels, .out = out,
                        .scratch = scratch };
    for (int i = 0; i < n_queries; i++)
        a.begin[i] = 0;
    const int first_visible = choose_ranges(&a, positions, state);
    const int distance = (const int[]){ 0, 1, 7, 8, 130 }[random_below(state, 5)], n_biases = 2 * distance + 1;
    float *biases = take_floats(2, n_biases);   // exactly as many, so that sanitizers see a read past them
    fill_random(biases, (size_t)(2 * n_biases), state);
    a.bias_distance = distance;
    if (distance) choose_biases(&a, biases, positions, state);
    for (int d = 0; d < head_dim; d++) nans[d] = NAN;
    for (int p = 0; p < first_visible; p += 1 + p / 2) store_position(&cache, dtype, head_dim, p, nans, nans);
    for (int t = 0; t < n_tables; t++) {
        const struct kernels *table = tables[t];   // each packs queries in its own form
        for (int i = 0; i < n_queries; i++)
            table->pack[kv_query_type(dtype)](panel_row(panels, n_queries, PANEL_ROWS, words, i), q + i * head_dim,
                                              head_dim);
        table->attend[dtype](&a);
        if (t == 0) memcpy(expected, out, sizeof *out * outputs);
        CHECK(same(out, expected, outputs), "%s differs: dtype %d, head_dim %d, %d positions, %d queries",
              table->name, dtype, head_dim, positions, n_queries);
        for (int i = 0; i < n_queries; i++) {
            struct attend single = a;
            table->pack[kv_query_type(dtype)](panel_row(alone, 1, PANEL_ROWS, words, 0), q + i * head_dim, head_dim);
            single.n_queries = 1, single.q = alone, single.begin[0] = a.begin[i], single.end[0] = a.end[i];
            single.sinks[0] = a.sinks[i], single.biases[0] = a.biases[i], single.position[0] = a.position[i];
            table->attend[dtype](&single);
            CHECK(same(out, expected + i * width, (size_t)head_dim),
                  "%s: query %d alone differs: dtype %d, head_dim %d, %d positions", table->name, i, dtype, head_dim,
                  positions);
        }
    }
    double *p = take(sizeof *p * (size_t)positions), *o = take(sizeof *o * (size_t)head_dim), sum = 0;
    double *slack = take(sizeof *slack * (size_t)head_dim);
    float *rounded = take_floats(1, head_dim);
    for (int i = 0; i < positions * head_dim; i += head_dim) {
        round_to_cache(dtype, 1, head_dim, k + i, k + i);
        round_to_cache(dtype, 0, head_dim, v + i, v + i);
    }
    for (int d = 0; d < head_dim; d++) slack[d] = 0;
    for (int i = 0; i < n_queries; i++) {
        const float *found = expected + i * width;
        const int sees_nan = poisoned && a.end[i] == positions;
        for (int d = 0; d < head_dim; d++)
            rounded[d] = dtype == LLAMAC_Q8 ? (float)input_at(LLAMAC_Q8_0, q + i * head_dim, head_dim, d)
                                            : q[i * head_dim + d];
        if (!sees_nan)
            sum = reference_attention(head_dim, rounded, k, v, a.begin[i], a.end[i], (double)a.soft_cap,
                                      a.has_sinks ? (double)a.sinks[i] : -INFINITY,
                                      distance ? a.biases[i] - distance : NULL, distance, a.position[i], p, o);
        if (!sees_nan && dtype == LLAMAC_Q8)
            round_numerators(&cache, head_dim, v, a.begin[i], a.end[i], p, sum, o, slack);
        for (int d = 0; d < head_dim; d++) {
            if (sees_nan) CHECK(found[d] != found[d], "a NaN at position %d is lost", positions - 1);
            else CHECK(fabs(o[d] - (double)found[d]) < 2e-6 + slack[d], "attention %g, expected %g", (double)found[d],
                       o[d]);
        }
    }
    free_cache(cache);
    free(k), free(v), free(q), free(panels), free(scratch), free(out), free(expected), free(nans), free(p), free(o);
    free(alone), free(rounded), free(slack), free(biases);
}

static void attention_has_the_same_bits(void) {
    uint64_t state = 3;
    for (size_t j = 0; j < ARRAY_LEN(kv_dtypes); j++)
        for (int head_dim = 1; head_dim <= 40; head_dim += 3)
            for (int i = 0; i < 4; i++) {
                const int positions = 1 + random_below(&state, 700);
                const int queries = 1 + random_below(&state, ATTENTION_QUERIES);
                check_attention(kv_dtypes[j], head_dim, positions, queries, &state);
            }
    check_attention(LLAMAC_F16, 64, 1024, 8, &state);
    check_attention(LLAMAC_Q8, 64, 1024, 24, &state);
    check_attention(LLAMAC_F32, 16, 256, 1, &state);
    check_attention(LLAMAC_F32, 16, 257, 2, &state);
}

// ---- keys and values

static void the_f16_cache_clamps_large_values(void) {
    const float x[3] = { 1e6f, -1e6f, 65504.0f };
    for (int t = 0; t < n_tables; t++) {
        uint8_t *page = take(KV_PAGE * 64);
        float decoded[3];
        tables[t]->store_key[LLAMAC_F16](page, 5, 3, x);
        tables[t]->load_key[LLAMAC_F16](page, 5, 3, decoded);
        CHECK(decoded[0] == 65504.0f && decoded[1] == -65504.0f && decoded[2] == 65504.0f, "%s: %g %g", tables[t]->name,
              (double)decoded[0], (double)decoded[1]);
        free(page);
    }
}

// What a cache gives back is what docs/determinism.md says, at most half a code from what was stored.
static void caches_hold_rounded_keys_and_values(void) {
    enum { HEAD_DIM = 37 };
    uint64_t state = 17;
    float x[HEAD_DIM], rounded_key[HEAD_DIM], rounded_value[HEAD_DIM], key[HEAD_DIM], value[HEAD_DIM];
    for (size_t i = 0; i < ARRAY_LEN(kv_dtypes); i++) {
        const int dtype = kv_dtypes[i];
        const size_t key_bytes = kv_keys_bytes(dtype, HEAD_DIM), value_bytes = kv_values_bytes(dtype, HEAD_DIM);
        uint8_t *keys = take(key_bytes), *values = take(value_bytes);
        uint8_t *other_keys = take(key_bytes), *other_values = take(value_bytes);
        for (int slot = 0; slot < KV_PAGE; slot++) {
            fill_random(x, HEAD_DIM, &state);
            for (int d = 0; d < HEAD_DIM; d++) x[d] = ldexpf(x[d], slot - 50);
            round_to_cache(dtype, 1, HEAD_DIM, x, rounded_key), round_to_cache(dtype, 0, HEAD_DIM, x, rounded_value);
            float max = 0;
            for (int d = 0; d < HEAD_DIM; d++) max = fmaxf(max, fabsf(x[d]));
            for (int t = 0; t < n_tables; t++) {
                uint8_t *const k = t ? other_keys : keys, *const v = t ? other_values : values;
                tables[t]->store_key[dtype](k, slot, HEAD_DIM, x), tables[t]->store_value[dtype](v, slot, HEAD_DIM, x);
                tables[t]->load_key[dtype](k, slot, HEAD_DIM, key);
                tables[t]->load_value[dtype](v, slot, HEAD_DIM, value);
                CHECK(same(key, rounded_key, HEAD_DIM) && same(value, rounded_value, HEAD_DIM),
                      "%s: dtype %d, slot %d", tables[t]->name, dtype, slot);
            }
            for (int d = 0; d < HEAD_DIM && dtype == LLAMAC_Q8; d++)
                CHECK(fmaxf(fabsf(key[d] - x[d]), fabsf(value[d] - x[d])) <= max / 254 * (1 + 0x1p-10f) + 0x1p-25f,
                      "%g and %g, stored %g", (double)key[d], (double)value[d], (double)x[d]);
        }
        CHECK(n_tables == 1 || !memcmp(keys, other_keys, key_bytes), "keys: dtype %d", dtype);
        CHECK(n_tables == 1 || !memcmp(values, other_values, value_bytes), "values: dtype %d", dtype);
        free(keys), free(values), free(other_keys), free(other_values);
    }
}

static void the_q8_cache_keeps_zeros_and_nans(void) {
    enum { HEAD_DIM = 20 };   // one scale
    for (int t = 0; t < n_tables; t++) {
        uint8_t *page = take(kv_keys_bytes(LLAMAC_Q8, HEAD_DIM));
        const float extremes[] = { 0, 0x1p-101f, -0x1p-7f, 8.3e6f, 3.4e38f, INFINITY, NAN };
        for (int i = 0; i < (int)ARRAY_LEN(extremes); i++) {
            float x[HEAD_DIM] = { 0 }, decoded[HEAD_DIM];
            x[HEAD_DIM - 1] = extremes[i];
            tables[t]->store_key[LLAMAC_Q8](page, i, HEAD_DIM, x);
            tables[t]->load_key[LLAMAC_Q8](page, i, HEAD_DIM, decoded);
            const float found = decoded[HEAD_DIM - 1];
            if (i < 2) CHECK(found == 0 && decoded[0] == 0, "%s: %g", tables[t]->name, (double)found);
            else if (i == 4) CHECK(found == 65504.0f * 127, "%g", (double)found);
            else if (i < 4) CHECK(fabsf(found / extremes[i] - 1) < 2e-3f && decoded[0] == 0, "%g", (double)found);
            else CHECK(found != found && decoded[0] != decoded[0], "%s hides %g", tables[t]->name, (double)extremes[i]);
        }
        free(page);
    }
}

int main(void) {
    find_tables();
    print_tables();
    RUN(attention_has_the_same_bits);
    RUN(the_f16_cache_clamps_large_values);
    RUN(caches_hold_rounded_keys_and_values);
    RUN(the_q8_cache_keeps_zeros_and_nans);
    return finish_tests("test_attention");
}
