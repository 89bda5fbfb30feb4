// SPDX-License-Identifier: MIT
// test_shift.c - positions removed from the middle of a sequence: the keys that move against a float64 reference, and
// everything else bit for bit.
#include "common.h"
#include "kernels.h"
#include "open_shape.h"

static const struct tiny_shape partial_rope = {
    .dim = 48, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .head_dim = 70, .ffn_dim = 52, .vocab = 101,
    .context = 700, .dtype = LLAMAC_F32, .biases = 1, .rope_dim = 26,
};
static const struct tiny_shape windowed = {
    .dim = 40, .n_layers = 4, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = 101,
    .context = 1300, .dtype = LLAMAC_BF16, .biases = 1, .experts = 5, .window = 9,
};

// Appends n tokens to a sequence; logits: of the last row.
static void extend(llamac_session *s, int sequence, int n, float *logits) {
    llamac_row *rows = take(sizeof *rows * (size_t)n);
    const int start = llamac_length(s, sequence);
    for (int i = 0; i < n; i++)
        rows[i] = (llamac_row){ token_at(0, start + i, vocab), sequence, start + i, i == n - 1 };
    CHECK(!llamac_eval(s, rows, n, logits, NULL, &err), "%s", err.message);
    free(rows);
}

// ---- what a sequence holds

// The numbers of one layer: (length, n_kv_heads, head_dim) keys, then as many values. `start`: the first position held.
struct held { int start, length, heads, dim; float *keys, *values; };

static struct held held(const llamac_session *s, int sequence, int l) {
    const struct heads heads = model->layers[l].heads;
    const int length = llamac_length(s, sequence), start = s->sequences[sequence].kv[s->kv_layers[l].group].start;
    struct held h = { start, length, heads.n_kv, heads.dim, take_floats(length, heads.n_kv * heads.dim),
                      take_floats(length, heads.n_kv * heads.dim) };
    for (int p = start; p < length; p++)
        for (int head = 0; head < heads.n_kv; head++) {
            const struct kv_view kv = session_kv(s, sequence, l, head);
            const uint8_t *page = session_page(s, sequence, l, p);
            const size_t at = (size_t)((p * heads.n_kv + head) * heads.dim);
            s->kernels->load_key[s->kv_dtype](page + kv.key_offset, p % KV_PAGE, heads.dim, h.keys + at);
            s->kernels->load_value[s->kv_dtype](page + kv.value_offset, p % KV_PAGE, heads.dim, h.values + at);
        }
    return h;
}
static void drop(struct held *h) { free(h->keys), free(h->values); }

// Rotates a key that was rotated for position `from` to position `to`, in double.
static void turn(const float *key, const struct config *c, const float *inv_freq, int from, int to, double *out) {
    const int half = (int)c->rope_dim[0] / 2, dim = (int)c->head_dim;
    for (int d = 0; d < dim; d++) out[d] = (double)key[d];
    for (int j = 0; j < half; j++) {
        const double angle = (double)((float)to * inv_freq[j]) - (double)((float)from * inv_freq[j]);
        const double a = (double)key[j], b = (double)key[j + half];
        out[j] = a * cos(angle) - b * sin(angle), out[j + half] = b * cos(angle) + a * sin(angle);
    }
}

// The largest error of dimension d that storing a key allows, after rotating in f32. q8 has a scale per 32 dimensions.
static double allowed(int dtype, const double *key, int dim, int d, int rotated) {
    if (d >= (rotated + 31) / 32 * 32 || (dtype != LLAMAC_Q8 && d >= rotated)) return 0;
    double largest = 0;
    for (int i = d / 32 * 32; i < dim && i < d / 32 * 32 + 32; i++) largest = fmax(largest, fabs(key[i]));
    const double steps[] = { [LLAMAC_F32] = 0, [LLAMAC_F16] = 0x1p-11, [LLAMAC_Q8] = 0.501 / 127 };
    return largest * (steps[dtype] + 4e-7) + 0x1p-24;
}

// Checks that `after` is `before` without positions [begin, begin + by).
static void check_moved(int dtype, int l, const struct held *before, const struct held *after, int begin, int by) {
    const struct config *c = model->config;
    const int rotated = model->layers[l].record->rope < 0 ? 0 : (int)c->rope_dim[0], dim = before->dim;
    const size_t bytes = sizeof(float) * (size_t)dim;
    double *expected = take(sizeof(double) * (size_t)dim);
    CHECK(after->length == before->length - by, "length %d", after->length);
    for (int p = after->start; p < after->length; p++)
        for (int head = 0; head < before->heads; head++) {
            const int from = p < begin ? p : p + by;
            const size_t old = (size_t)((from * before->heads + head) * dim),
                         new = (size_t)((p * before->heads + head) * dim);
            CHECK(from >= before->start, "layer %d: position %d was not held", l, from);
            CHECK(!memcmp(after->values + new, before->values + old, bytes), "layer %d: value %d", l, p);
            if (p < begin) {
                CHECK(!memcmp(after->keys + new, before->keys + old, bytes), "layer %d: kept key %d", l, p);
                continue;
            }
            turn(before->keys + old, c, model->rope[0].inv_freq, from, p, expected);
            for (int d = 0; d < dim; d++) {
                const double off = fabs((double)after->keys[new + (size_t)d] - expected[d]);
                CHECK(off <= allowed(dtype, expected, dim, d, rotated), "layer %d: key %d is off by %g", l, p, off);
            }
        }
    free(expected);
}

// Shifts a sequence of a session and checks all layers.
static void check_shift(llamac_session *s, int sequence, int begin, int end) {
    const int n_layers = (int)model->config->n_layers;
    struct held before[8], after;
    for (int l = 0; l < n_layers; l++) before[l] = held(s, sequence, l);
    CHECK(!llamac_shift(s, sequence, begin, end, &err), "%s", err.message);
    for (int l = 0; l < n_layers; l++) {
        after = held(s, sequence, l);
        check_moved(s->kv_dtype, l, &before[l], &after, begin, end - begin);
        drop(&before[l]), drop(&after);
    }
}

// ---- tests

static void moved_keys_are_rotated(void) {
    static const struct { int length, begin, end; } cases[] = {
        { 300, 4, 150 }, { 300, 0, 64 }, { 300, 64, 128 }, { 300, 130, 131 }, { 200, 1, 199 }, { 70, 5, 69 },
        { 300, 100, 300 }, { 130, 0, 127 },
    };
    static const int dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };
    const struct tiny_shape *shapes[] = { &tiny_llama, &partial_rope };
    for (size_t k = 0; k < ARRAY_LEN(shapes); k++) {
        open_shape(shapes[k]);
        float *logits = take_floats(1, vocab);
        for (size_t d = 0; d < ARRAY_LEN(dtypes); d++)
            for (size_t i = 0; i < ARRAY_LEN(cases); i += (size_t)sparser(8)) {
                llamac_session *s = open_session(model, 1, dtypes[d], 1, NULL);
                extend(s, 0, cases[i].length, logits);
                check_shift(s, 0, cases[i].begin, cases[i].end);
                extend(s, 0, 80, logits);   // into new pages
                check_shift(s, 0, 3, 50);
                llamac_session_close(&s);
            }
        free(logits);
        close_shape();
    }
}

// The logits after two shifts, by each kernel set and number of threads.
static void the_bits_are_the_same_everywhere(void) {
    open_shape(&partial_rope);
    float *logits = take_floats(1, vocab), *expected = take_floats(1, vocab);
    static const int dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };
    for (size_t d = 0; d < ARRAY_LEN(dtypes); d += (size_t)sparser(2)) {
        const int most = up_to_threads(5), step = 2 * sparser(4);
        int n = 0, supported;
        const char *isa;
        for (size_t i = 0; (isa = llamac_isa_at(i, &supported)); i++)
            for (int threads = sparse && i % 2 ? most : 1; supported && threads <= most; threads += step, n++) {
                llamac_session *s = open_session(model, 1, dtypes[d], threads, isa);
                extend(s, 0, sparse ? 300 : 600, logits);
                CHECK(!llamac_shift(s, 0, 7, 200, &err), "%s", err.message);
                extend(s, 0, 20, logits);
                CHECK(!llamac_shift(s, 0, 7, 100, &err), "%s", err.message);
                extend(s, 0, 1, n ? logits : expected);
                CHECK(!n || !memcmp(logits, expected, sizeof(float) * (size_t)vocab), "%s, %d threads", isa, threads);
                llamac_session_close(&s);
            }
    }
    free(logits), free(expected);
    close_shape();
}

static void forks_are_left_alone(void) {
    open_shape(&tiny_llama);
    float *logits = take_floats(1, vocab), *plain = take_floats(1, vocab), *shifted = take_floats(1, vocab);
    const size_t bytes = sizeof(float) * (size_t)vocab;
    llamac_session *s = open_session(model, 3, LLAMAC_F16, 1, NULL);
    llamac_session *alone = open_session(model, 1, LLAMAC_F16, 1, NULL);
    extend(alone, 0, 290, logits);
    CHECK(!llamac_shift(alone, 0, 70, 120, &err), "%s", err.message);
    extend(alone, 0, 9, shifted);
    CHECK(!llamac_truncate(alone, 0, 0, &err), "%s", err.message);
    extend(alone, 0, 290, logits), extend(alone, 0, 5, plain);

    extend(s, 0, 290, logits);
    CHECK(!llamac_fork(s, 1, s, 0, 290, &err) && !llamac_fork(s, 2, s, 0, 128, &err), "%s", err.message);
    const size_t before = llamac_kv_bytes(model), page = s->groups[0].page_bytes;
    check_shift(s, 1, 70, 120);   // pages 1 to 3 are copied, page 4 is released
    CHECK(llamac_kv_bytes(model) == before + 3 * page, "%zu pages more", (llamac_kv_bytes(model) - before) / page);
    extend(s, 1, 9, logits);
    CHECK(!memcmp(logits, shifted, bytes), "the shifted fork");
    CHECK(!llamac_fork(s, 1, s, 0, 290, &err), "%s", err.message);
    check_shift(s, 0, 70, 120);   // now the source
    extend(s, 0, 9, logits);
    CHECK(!memcmp(logits, shifted, bytes), "the shifted source");
    extend(s, 1, 5, logits);
    CHECK(!memcmp(logits, plain, bytes), "the fork of the shifted source");
    CHECK(!llamac_truncate(s, 1, 0, &err) && !llamac_truncate(s, 2, 0, &err), "%s", err.message);
    const size_t own = llamac_kv_bytes(model);
    check_shift(s, 0, 10, 20);
    CHECK(llamac_kv_bytes(model) == own, "a shift of pages that nobody shares takes memory");
    llamac_session_close(&s), llamac_session_close(&alone);
    free(logits), free(plain), free(shifted);
    close_shape();
}

static void windows_limit_shifts(void) {
    open_shape(&windowed);
    float *logits = take_floats(1, vocab), *expected = take_floats(1, vocab);
    const int window = windowed.window;
    llamac_session *s = open_session(model, 2, 0, up_to_threads(2), NULL);
    extend(s, 0, 1200, logits);
    const int start = s->sequences[0].kv[1].start;   // 896
    CHECK(start > 800 && start % KV_PAGE == 0, "start %d", start);
    // the kept prefix is not held by layers with windows: the moved positions must fill the window
    CHECK(llamac_longest_shift(s, 0, 10) == 1201 - window - 10, "%d", llamac_longest_shift(s, 0, 10));
    CHECK(llamac_longest_shift(s, 0, 1000) == 200, "%d", llamac_longest_shift(s, 0, 1000));
    CHECK(llamac_longest_shift(s, 0, 1201) == -1 && llamac_longest_shift(s, 2, 0) == -1, "no such position");
    CHECK(llamac_shift(s, 0, 10, 1195, &err) && strstr(err.message, "remove at most 1182"), "%s", err.message);
    CHECK(llamac_length(s, 0) == 1200 && s->sequences[0].kv[1].start == start, "%s", err.message);
    static const struct { int begin, end; } cases[] = {
        { 10, 1192 }, { 10, 500 }, { 0, 900 }, { 0, 64 }, { 63, 65 }, { 950, 1100 }, { 905, 1200 }, { 1100, 1101 },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        CHECK(!llamac_fork(s, 1, s, 0, 1200, &err), "%s", err.message);
        check_shift(s, 1, cases[i].begin, cases[i].end);
        const struct kv_table *kv = &s->sequences[1].kv[1];
        const int length = llamac_length(s, 1), by = cases[i].end - cases[i].begin;
        const int begin = cases[i].begin, shortest = llamac_shortest_length(s, 1);
        CHECK(kv->start == (start > begin ? max_int(begin, start - by) : start), "start %d", kv->start);
        CHECK(kv->first == kv->start / KV_PAGE && kv->end == ceil_div(length, KV_PAGE), "%d to %d", kv->first, kv->end);
        CHECK(shortest == (kv->start ? kv->start + window - 1 : 0), "%d", shortest);
        extend(s, 1, 1, expected);
        // the same with pages of its own
        llamac_session *own = open_session(model, 1, 0, 1, NULL);
        extend(own, 0, 1200, logits);
        CHECK(!llamac_shift(own, 0, cases[i].begin, cases[i].end, &err), "%s", err.message);
        extend(own, 0, 1, logits);
        CHECK(!memcmp(logits, expected, sizeof(float) * (size_t)vocab), "case %zu", i);
        const int more = min_int(300, 1299 - length);
        extend(s, 1, more, expected), extend(own, 0, more, logits);
        CHECK(!memcmp(logits, expected, sizeof(float) * (size_t)vocab), "case %zu: a window's pages later", i);
        llamac_session_close(&own);
    }
    extend(s, 0, 50, logits);
    CHECK(!llamac_shift(s, 0, 0, 1250, &err) && llamac_length(s, 0) == 0, "removes all: %s", err.message);
    llamac_session_close(&s);
    free(logits), free(expected);
    close_shape();
}

static void impossible_shifts_are_refused(void) {
    open_shape(&tiny_gpt2);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    CHECK(llamac_shift_check(model, &err) && err.code == LLAMAC_UNSUPPORTED, "%s", err.message);
    CHECK(strstr(err.message, "learned positions") && llamac_shift(s, 0, 0, 0, &err), "%s", err.message);
    llamac_session_close(&s);
    close_shape();

    open_shape(&tiny_llama);
    CHECK(!llamac_shift_check(model, &err), "%s", err.message);
    s = open_session(model, 1, 0, 1, NULL);
    float *logits = take_floats(1, vocab);
    extend(s, 0, 20, logits);
    static const int ranges[][2] = { { -1, 3 }, { 5, 4 }, { 5, 21 }, { 21, 21 } };
    for (size_t i = 0; i < ARRAY_LEN(ranges); i++)
        CHECK(llamac_shift(s, 0, ranges[i][0], ranges[i][1], &err) && strstr(err.message, "within 0 to 20"), "%s",
              err.message);
    CHECK(llamac_shift(s, 1, 0, 0, &err) && strstr(err.message, "sequence is 1, expected 0 to 0"), "%s", err.message);
    CHECK(!llamac_shift(s, 0, 7, 7, &err) && llamac_length(s, 0) == 20, "%s", err.message);
    const llamac_draft draft = { 1, 0, -1, 0 };
    CHECK(!llamac_eval_drafts(s, &draft, 1, NULL, NULL, &err) && !llamac_shift(s, 0, 2, 3, &err), "%s", err.message);
    CHECK(llamac_accept(s, 0, &err) && llamac_length(s, 0) == 19, "drafts of before a shift are discarded");
    llamac_session_close(&s);
    free(logits);
    close_shape();
}

// A norm after RoPE: the root mean square commutes with rotations if its weights do.
static void norms_after_rope_must_commute(void) {
    struct tiny_shape shape = tiny_llama;
    shape.norm_after_rope = 1;
    file = tiny_model(&shape);
    vocab = shape.vocab;
    float *logits = take_floats(1, vocab);
    for (int even = 0; even < 2; even++) {
        model = open_model(file);
        for (int l = 0; l < shape.n_layers && even; l++) {
            union { const float *read; float *write; } weights = { model->layers[l].attn_k_norm };
            for (int i = 0; i < shape.head_dim; i++) weights.write[i] = 0.75f;
        }
        llamac_session *s = open_session(model, 1, LLAMAC_F32, 1, NULL);
        extend(s, 0, 100, logits);
        if (even) check_shift(s, 0, 4, 40);
        else CHECK(llamac_shift(s, 0, 4, 40, &err) && err.code == LLAMAC_UNSUPPORTED && llamac_length(s, 0) == 100,
                   "%s", err.message);
        llamac_session_close(&s);
        llamac_model_close(&model);
    }
    free(logits);
    free(file.data);
}

// Fails each allocation of a shift of shared pages, and runs out of the budget.
static void a_failed_shift_changes_nothing(void) {
    open_shape(&windowed);
    float *logits = take_floats(1, vocab), *plain = take_floats(1, vocab), *expected = take_floats(1, vocab);
    const size_t bytes = sizeof(float) * (size_t)vocab;
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    extend(s, 0, 700, logits);
    llamac_session *first = open_session(model, 1, 0, 1, NULL);
    CHECK(!llamac_fork(first, 0, s, 0, 700, &err), "%s", err.message);
    extend(first, 0, 1, plain);
    CHECK(!llamac_fork(first, 0, s, 0, 700, &err) && !llamac_shift(first, 0, 5, 300, &err), "%s", err.message);
    extend(first, 0, 1, expected);
    llamac_session_close(&first);
    int failed = 1;
    for (long n = 0; failed && n < 60; n++) {
        llamac_session *other = open_session(model, 1, 0, 1, NULL);
        CHECK(!llamac_fork(other, 0, s, 0, 700, &err), "%s", err.message);
        const size_t before = llamac_kv_bytes(model);
        if (n == 0) llamac_set_kv_budget(model, before + 3 * s->groups[0].page_bytes);
        llamac_test_fail_allocation(n);
        failed = llamac_shift(other, 0, 5, 300, &err);
        llamac_test_fail_allocation(0);
        llamac_set_kv_budget(model, 0);
        CHECK(failed || n, "a shift beyond the budget");
        if (failed) {
            CHECK(err.code == LLAMAC_NO_MEMORY && llamac_length(other, 0) == 700, "%s", err.message);
            CHECK(llamac_kv_bytes(model) == before, "allocation %ld: %zu bytes", n, llamac_kv_bytes(model) - before);
            extend(other, 0, 1, logits);
            CHECK(!memcmp(logits, plain, bytes), "allocation %ld: the sequence has changed", n);
            CHECK(!llamac_truncate(other, 0, 700, &err) && !llamac_shift(other, 0, 5, 300, &err), "%s", err.message);
        }
        extend(other, 0, 1, logits);
        CHECK(!memcmp(logits, expected, bytes), "allocation %ld", n);
        llamac_session_close(&other);
    }
    CHECK(!failed, "more than 60 allocations");
    llamac_session_close(&s);
    free(logits), free(plain), free(expected);
    close_shape();
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(moved_keys_are_rotated);
    RUN(the_bits_are_the_same_everywhere);
    if (!emulated) {   // what does not depend on the processor
        RUN(forks_are_left_alone);
        RUN(windows_limit_shifts);
        RUN(impossible_shifts_are_refused);
        RUN(norms_after_rope_must_commute);
        RUN(a_failed_shift_changes_nothing);
    }
    return finish_tests("test_shift");
}
