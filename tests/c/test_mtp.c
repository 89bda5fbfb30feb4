// SPDX-License-Identifier: MIT
// test_mtp.c - MTP layers: hidden states, the definition of the layer's input, the bits of any division of the rows,
// drafts with rewinds, replaced tensors, and failed allocations; the same bits on a device.
#include <math.h>
#include "common.h"
#include "host_device.h"
#include "kv_pages.h"
#include "open_shape.h"

enum { N = 300, FEW = 20, ROUNDS = 24, MOST = 5 };   // N: more rows than a chunk has

// A text with the hidden states of its positions.
struct text { int tokens[N + 1]; float *hidden; };

static int dim, on_device;   // on_device: of the sessions that are opened
static size_t row_bytes;
static struct host_device device;

static void open_with_mtp(struct tiny_shape shape, int like) {
    shape.mtp = 1 + like;
    open_shape(&shape);
    dim = shape.dim, row_bytes = sizeof(float) * (size_t)dim;
    host_device_open(&device, model);
}
static void close_with_mtp(void) {
    const size_t left = kv_pool_bytes(model->mtp_model->kv) + kv_pool_bytes(model->mtp_model->device_kv);
    CHECK(left == 0, "%zu bytes of pages leak", left);
    host_device_close(&device);
    close_shape();
}
static llamac_session *open_trunk(int threads) {
    return open_session_with(model, (llamac_session_options){ .n_sequences = 1, .threads = up_to_threads(threads),
                                                              .on_device = on_device });
}
static llamac_session *open_mtp(int threads) {
    return open_session_with(model, (llamac_session_options){ .n_sequences = 1, .threads = up_to_threads(threads),
                                                              .mtp = 1, .on_device = on_device });
}
static float *row_of(float *states, int row) { return states + (size_t)row * (size_t)dim; }

// Appends the rows of positions [first, last). inputs: (last, dim), hidden states; the rows are then the MTP layer's.
// hidden: (last, dim), of which these rows are written. logits: of the last row.
static int append(llamac_session *s, const struct text *text, int first, int last, float *inputs, float *logits,
                  float *hidden) {
    llamac_row rows[N];
    const int n = last - first;
    for (int i = 0; i < n; i++) rows[i] = (llamac_row){ text->tokens[first + i + !!inputs], 0, first + i, i == n - 1 };
    const llamac_eval_options options = { .inputs = inputs ? row_of(inputs, first) : NULL,
                                          .hidden = row_of(hidden, first), .n_hidden = n };
    return llamac_eval(s, rows, n, logits, &options, &err);
}
// Computes [0, n) in pieces: of a few rows, of many, or of all.
static void append_pieces(llamac_session *s, const struct text *text, int n, float *inputs, float *logits,
                          float *hidden, uint64_t *state) {
    for (int first = 0, last; first < n; first = last) {
        last = min_int(n, first + 1 + random_below(state, random_below(state, 2) ? 4 : 90));
        CHECK(!append(s, text, first, last, inputs, logits, hidden), "%s", err.message);
    }
}

static struct text make_text(void) {
    struct text text = { .hidden = take_floats(N, dim) };
    for (int i = 0; i <= N; i++) text.tokens[i] = token_at(0, i, vocab);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    float *logits = take_floats(1, vocab);
    CHECK(!append(s, &text, 0, N, NULL, logits, text.hidden), "%s", err.message);
    llamac_session_close(&s);
    free(logits);
    return text;
}

static void check_bits(uint64_t *state) {
    const struct text text = make_text();
    const size_t logit_bytes = sizeof(float) * (size_t)vocab;
    float *hidden = take_floats(N, dim), *found = take_floats(N, dim);
    float *logits = take_floats(1, vocab), *found_logits = take_floats(1, vocab);
    llamac_session *whole = open_mtp(1);
    CHECK(!append(whole, &text, 0, N, text.hidden, logits, hidden), "%s", err.message);
    for (int threads = 0; threads <= 2; threads++) {   // 0: on the device
        on_device = !threads;
        llamac_session *s = open_trunk(max_int(threads, 1)), *mtp = open_mtp(max_int(threads, 1));
        on_device = 0;
        append_pieces(s, &text, N, NULL, found_logits, found, state);
        CHECK(!memcmp(found, text.hidden, N * row_bytes), "hidden states on %d threads", threads);
        append_pieces(mtp, &text, N, text.hidden, found_logits, found, state);
        CHECK(!memcmp(found, hidden, N * row_bytes), "the layer's hidden states on %d threads", threads);
        CHECK(!memcmp(found_logits, logits, logit_bytes), "the layer's logits on %d threads", threads);
        llamac_session_close(&s), llamac_session_close(&mtp);
    }
    llamac_session_close(&whole);
    free(hidden), free(found), free(logits), free(found_logits), free(text.hidden);
}
static void pieces_threads_and_devices_change_no_bits(void) {
    uint64_t state = 3;
    open_with_mtp(tiny_recurrent, 2), check_bits(&state), close_with_mtp();
    open_with_mtp(tiny_latent, 1), check_bits(&state), close_with_mtp();
    open_with_mtp(tiny_mixers, 3), check_bits(&state), close_with_mtp();
}

// y = the RMS norm of x in float64.
static void reference_norm(const double *x, const float *weights, double *y) {
    double sum = 0;
    for (int k = 0; k < dim; k++) sum += x[k] * x[k];
    for (int k = 0; k < dim; k++) y[k] = x[k] / sqrt(sum / dim + (double)model->config->norm_eps) * (double)weights[k];
}
static double weight_of(const struct matrix *matrix, int row, int column) {
    return weight_at(matrix->dtype, matrix->data, matrix->strip_bytes, matrix->columns, row, column);
}

static void the_input_is_the_product_of_the_normed_embedding_and_hidden_state(void) {
    open_with_mtp(tiny_recurrent, 2);
    const struct text text = make_text();
    float *found = take_floats(N, dim), *logits = take_floats(1, vocab);
    llamac_row rows[N];
    for (int i = 0; i < N; i++) rows[i] = (llamac_row){ text.tokens[i + 1], 0, i, i == N - 1 };
    const llamac_observation observation = { .stage = LLAMAC_STAGE_EMBEDDING, .out = found };
    const llamac_eval_options options = { .inputs = text.hidden, .observations = &observation, .n_observations = 1 };
    llamac_session *s = open_mtp(2);
    CHECK(!llamac_eval(s, rows, N, logits, &options, &err), "%s", err.message);
    double worst = 0;
    for (int i = 0; i < N; i++) {
        double pair[2 * 64], x[64];
        for (int k = 0; k < dim; k++) x[k] = weight_of(&model->token_embedding, rows[i].token, k);
        reference_norm(x, model->mtp.embedding_norm, pair);
        for (int k = 0; k < dim; k++) x[k] = (double)row_of(text.hidden, i)[k];
        reference_norm(x, model->mtp.hidden_norm, pair + dim);
        for (int o = 0; o < dim; o++) {
            double sum = 0;
            for (int k = 0; k < 2 * dim; k++) sum += weight_of(&model->mtp.in, o, k) * pair[k];
            worst = fmax(worst, fabs(sum - (double)row_of(found, i)[o]));
        }
    }
    CHECK(worst < 1e-5, "off by %g", worst);
    llamac_session_close(&s);
    free(found), free(logits), free(text.hidden);
    close_with_mtp();
}

static int best(const float *logits) {
    int found = 0;
    for (int i = 1; i < vocab; i++) if (logits[i] > logits[found]) found = i;
    return found;
}

// Drafts n tokens after text->tokens[length - 1], the last of which the model has not computed. known: rows of the
// layer. The rows of the drafts are removed again.
static void draft(llamac_session *mtp, struct text *text, int known, int length, int n, int *tokens) {
    float *logits = take_floats(1, vocab), *own = take_floats(N, dim);
    CHECK(!append(mtp, text, known, length - 1, text->hidden, logits, own), "%s", err.message);
    const float *hidden = row_of(own, length - 2);
    for (int i = 0; i < n; i++) {
        tokens[i] = best(logits);
        if (i == n - 1) break;
        const llamac_row row = { tokens[i], 0, length - 1 + i, 1 };
        const llamac_eval_options options = { .inputs = hidden, .hidden = own, .n_hidden = 1 };
        CHECK(!llamac_eval(mtp, &row, 1, logits, &options, &err), "%s", err.message);
        hidden = own;
    }
    CHECK(!llamac_truncate(mtp, 0, length - 1, &err), "%s", err.message);
    free(logits), free(own);
}

// A text of drafts, of which some are accepted, as a generation makes it. Now and then, the text is cut.
static void check_drafts(uint64_t *state, int with_device) {
    struct text text = { .hidden = take_floats(N, dim) };
    float *states = take_floats(MOST + 1, dim), *logits = take_floats(1, vocab);
    on_device = with_device;
    llamac_session *s = open_trunk(1), *mtp = open_mtp(2);
    on_device = 0;
    int length = 40, known = 0, drafts[MOST], expected[MOST];
    for (int i = 0; i < length; i++) text.tokens[i] = token_at(1, i, vocab);
    CHECK(!append(s, &text, 0, length - 1, NULL, logits, text.hidden), "%s", err.message);
    for (int round = 0; round < ROUNDS / sparser(4) && length + MOST + 1 < N; round++) {
        const int n = 1 + random_below(state, MOST);
        draft(mtp, &text, known, length, n, drafts);
        known = length - 1;
        llamac_draft chain[MOST + 1] = { { text.tokens[length - 1], 0, -1, 1 } };
        for (int i = 0; i < n; i++) chain[i + 1] = (llamac_draft){ drafts[i], 0, i, 0 };
        const llamac_eval_options options = { .hidden = states, .n_hidden = n + 1 };
        CHECK(!llamac_eval_drafts(s, chain, n + 1, logits, &options, &err), "%s", err.message);
        const int accepted = 1 + random_below(state, n + 1);
        for (int i = 0; i < accepted; i++) {
            CHECK(!llamac_accept(s, i, &err), "%s", err.message);
            memcpy(row_of(text.hidden, length - 1), row_of(states, i), row_bytes);
            text.tokens[length++] = i + 1 < accepted ? drafts[i] : random_below(state, vocab);
        }
        if (!model->max_channels && round % 5 == 4) {   // a recurrent layer would compute some rows again
            length -= 6, known = min_int(known, length - 1);
            CHECK(!llamac_truncate(s, 0, length - 1, &err) && !llamac_truncate(mtp, 0, known, &err), "%s", err.message);
            text.tokens[length - 1] = random_below(state, vocab);
            known = min_int(known, length - 2);   // that row's token has changed
            CHECK(!llamac_truncate(mtp, 0, known, &err), "%s", err.message);
        }
    }
    draft(mtp, &text, known, length, MOST, drafts);

    // the same text at once
    llamac_session *again = open_session(model, 1, 0, 1, NULL), *fresh = open_mtp(1);
    struct text other = text;
    other.hidden = take_floats(N, dim);
    CHECK(!append(again, &other, 0, length - 1, NULL, logits, other.hidden), "%s", err.message);
    CHECK(!memcmp(other.hidden, text.hidden, (size_t)(length - 1) * row_bytes), "hidden states of accepted drafts");
    draft(fresh, &other, 0, length, MOST, expected);
    CHECK(!memcmp(drafts, expected, sizeof drafts), "drafts after %d tokens", length);
    llamac_session_close(&s), llamac_session_close(&mtp), llamac_session_close(&again), llamac_session_close(&fresh);
    free(states), free(logits), free(text.hidden), free(other.hidden);
}
static void drafts_after_rewinds_are_those_of_the_text_at_once(void) {
    uint64_t state = 7;
    open_with_mtp(tiny_recurrent, 2), check_drafts(&state, 0), check_drafts(&state, 1), close_with_mtp();
    open_with_mtp(tiny_latent, 1), check_drafts(&state, 0), check_drafts(&state, 1), close_with_mtp();
    open_with_mtp(tiny_experts, 0), check_drafts(&state, 0), close_with_mtp();
}

static void replaced_tensors_and_adapters_reach_the_layer(void) {
    open_with_mtp(tiny_llama, 0);
    const struct text text = make_text();
    float *before = take_floats(N, dim), *after = take_floats(N, dim), *logits = take_floats(1, vocab);
    llamac_session *s = open_mtp(1);
    CHECK(!append(s, &text, 0, N, text.hidden, logits, before), "%s", err.message);
    llamac_session_close(&s);
    float *doubled = take_floats(1, dim);
    for (int k = 0; k < dim; k++) doubled[k] = 2 * model->mtp.output_norm[k];
    CHECK(!llamac_model_replace(model, "mtp.output_norm.weight", LLAMAC_F32, doubled, row_bytes, &err), "%s",
          err.message);
    s = open_mtp(1);
    CHECK(!append(s, &text, 0, N, text.hidden, logits, after), "%s", err.message);
    for (int i = 0; i < N * dim; i++) before[i] *= 2;
    CHECK(!memcmp(after, before, N * row_bytes), "the doubled norm has other results");
    llamac_session_close(&s);
    const size_t a_bytes = llamac_matrix_bytes(LLAMAC_F32, 1, 2 * (uint64_t)dim),
                 b_bytes = llamac_matrix_bytes(LLAMAC_F32, (uint64_t)dim, 1);
    float *a = take(a_bytes), *b = take(b_bytes);
    a[0] = b[0] = 1;   // adds the first input to the first output
    CHECK(!llamac_model_adapt(model, "mtp.in.weight", 1, a, a_bytes, b, b_bytes, NULL, 0, &err), "%s", err.message);
    s = open_mtp(1);
    CHECK(!append(s, &text, 0, N, text.hidden, logits, before), "%s", err.message);
    CHECK(memcmp(before, after, N * row_bytes), "an adapter changed nothing");
    llamac_session_close(&s);
    free(before), free(after), free(logits), free(doubled), free(text.hidden);
    close_with_mtp();
    free(a), free(b);
}

static void impossible_sessions_and_rows_are_refused(void) {
    llamac_session *s;
    const llamac_session_options options = { .n_sequences = 1, .threads = 1, .mtp = 1 };
    open_shape(&tiny_llama);
    CHECK(llamac_session_open(&s, model, &options, &err) && strstr(err.message, "the model has no MTP layer"), "%s",
          err.message);
    close_shape();
    open_with_mtp(tiny_llama, 0);
    s = open_mtp(1);
    const llamac_row row = { 1, 0, 0, 0 };
    const llamac_draft root = { 1, 0, -1, 0 };
    CHECK(llamac_eval(s, &row, 1, NULL, NULL, &err) && strstr(err.message, "rows need hidden states"), "%s",
          err.message);
    CHECK(llamac_eval_drafts(s, &root, 1, NULL, NULL, &err) && strstr(err.message, "rows need hidden states"), "%s",
          err.message);
    float *states = take_floats(2, dim);
    for (int n = -1; n <= 2; n += 3) {
        const llamac_eval_options hidden = { .inputs = states, .hidden = states, .n_hidden = n };
        CHECK(llamac_eval(s, &row, 1, NULL, &hidden, &err) && strstr(err.message, "expected 0 to n_rows 1"), "%s",
              err.message);
    }
    CHECK(llamac_length(s, 0) == 0, "length %d", llamac_length(s, 0));
    llamac_session_close(&s);
    free(states);
    close_with_mtp();
}

// Opening a model and a session of its MTP layer, and an eval: with each allocation failing in turn.
static void any_allocation_can_fail_with(struct tiny_shape shape, int like) {
    open_with_mtp(shape, like);
    const struct text text = make_text();
    const size_t logit_bytes = sizeof(float) * (size_t)vocab;
    float *expected = take_floats(1, vocab), *logits = take_floats(1, vocab), *hidden = take_floats(N, dim);
    const long before = llamac_live_objects();
    const llamac_session_options options = { .n_sequences = 1, .threads = up_to_threads(2), .mtp = 1 };
    int failed = 1;
    long n = 0;
    for (; failed && n < 80; n++) {   // 0: none fails
        llamac_model *other = NULL;
        llamac_session *s = NULL;
        llamac_test_fail_allocation(n);
        failed = llamac_model_open(&other, file.data, file.bytes, &err) ||
                 llamac_session_open(&s, other, &options, &err) ||
                 append(s, &text, 0, FEW, text.hidden, n ? logits : expected, hidden);
        llamac_test_fail_allocation(0);
        CHECK(!failed || err.code == LLAMAC_NO_MEMORY, "allocation %ld: %s", n, err.message);
        CHECK(!failed || !s || llamac_length(s, 0) == 0, "allocation %ld: length %d", n, llamac_length(s, 0));
        CHECK(n || !failed, "%s", err.message);
        if (failed && s) CHECK(!append(s, &text, 0, FEW, text.hidden, logits, hidden), "%s", err.message);
        if (s && n) CHECK(!memcmp(logits, expected, logit_bytes), "allocation %ld", n);
        if (!n) failed = 1;
        if (s) llamac_session_close(&s);
        if (other) CHECK(kv_pool_bytes(other->mtp_model->kv) == 0, "pages leak");
        if (other) llamac_model_close(&other);
        CHECK(llamac_live_objects() == before, "allocation %ld: %ld objects", n, llamac_live_objects());
    }
    CHECK(!failed && n > 5, "%ld allocations", n);
    free(expected), free(logits), free(hidden), free(text.hidden);
    close_with_mtp();
}
static void any_allocation_can_fail(void) {
    any_allocation_can_fail_with(tiny_llama, 0);
    any_allocation_can_fail_with(tiny_mixers, 1);
    any_allocation_can_fail_with(tiny_latent, 0);
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(pieces_threads_and_devices_change_no_bits);
    RUN(the_input_is_the_product_of_the_normed_embedding_and_hidden_state);
    RUN(drafts_after_rewinds_are_those_of_the_text_at_once);
    RUN(replaced_tensors_and_adapters_reach_the_layer);
    RUN(impossible_sessions_and_rows_are_refused);
    RUN(any_allocation_can_fail);
    return finish_tests("test_mtp");
}
