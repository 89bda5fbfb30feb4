// SPDX-License-Identifier: MIT
// test_eagle.c - EAGLE-3 heads: the states that a trunk gives them, the bits of any division of the rows, drafts with
// rewinds, the ids of their logits, devices, refused pairs, and failed allocations.
#include <math.h>
#include "common.h"
#include "host_device.h"
#include "kv_pages.h"
#include "open_shape.h"

enum { N = 300, FEW = 20, ROUNDS = 16, MOST = 5 };   // N: more rows than a chunk has

// Its own embedding and a normed stream; those of the trunk, and the trunk's width; or a norm of each state, norms of q
// and k, and a window in the second of three layers.
static const struct tiny_shape own_head = {
    .dim = 28, .n_layers = 1, .n_heads = 4, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 44, .vocab = 101,
    .context = 400, .dtype = LLAMAC_F32, .eagle = -40, .eagle_norm = EAGLE_IN_NORM_WHOLE,
}, borrowing_head = {
    .dim = 40, .n_layers = 1, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = 101,
    .context = 400, .dtype = LLAMAC_Q8, .eagle = 40,
}, deep_head = {
    .dim = 28, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 44, .vocab = 101,
    .context = 400, .dtype = LLAMAC_F32, .eagle = -40, .eagle_norm = EAGLE_IN_NORM_EACH, .window = 20,
    .norm_after_rope = 1,
};

static struct tiny_file head_file;
static llamac_model *head;
static int trunk_dim, head_dim;

// A text with the states of its positions: (N, 3 trunk_dim).
struct text { int tokens[N + 1]; float *states; };

static void open_pair(const struct tiny_shape *of_head, const struct tiny_shape *of_trunk) {
    open_shape(of_trunk);
    head_file = tiny_model(of_head);
    head = open_model(head_file);
    trunk_dim = of_trunk->dim, head_dim = of_head->dim;
}
static void close_pair(void) {
    CHECK(llamac_kv_bytes(head) == 0, "%zu bytes of pages leak", llamac_kv_bytes(head));
    llamac_model_close(&head);
    free(head_file.data);
    close_shape();
}
static llamac_session *open_trunk(int threads) {
    return open_session_with(model, (llamac_session_options){ .n_sequences = 1, .threads = up_to_threads(threads),
                                                              .drafter = head });
}
static llamac_session *open_head(const llamac_session *trunk, int threads) {
    return open_session_with(head, (llamac_session_options){ .n_sequences = 1, .threads = up_to_threads(threads),
                                                             .trunk = trunk });
}

// Appends the rows of positions [first, last). states: those of the text; the rows are then the head's. hidden: as wide
// as the session's hidden states. logits: of the last row.
static int append(llamac_session *s, const struct text *text, int first, int last, const float *states, float *logits,
                  float *hidden, int width) {
    llamac_row rows[N];
    const int n = last - first;
    for (int i = 0; i < n; i++) rows[i] = (llamac_row){ text->tokens[first + i + !!states], 0, first + i, i == n - 1 };
    const llamac_eval_options options = {
        .states = states ? states + (size_t)first * 3 * (size_t)trunk_dim : NULL,
        .hidden = hidden + (size_t)first * (size_t)width, .n_hidden = n,
    };
    return llamac_eval(s, rows, n, logits, &options, &err);
}
static void append_pieces(llamac_session *s, const struct text *text, int n, const float *states, float *logits,
                          float *hidden, int width, uint64_t *state) {
    for (int first = 0, last; first < n; first = last) {
        last = min_int(n, first + 1 + random_below(state, random_below(state, 2) ? 4 : 90));
        CHECK(!append(s, text, first, last, states, logits, hidden, width), "%s", err.message);
    }
}

static struct text make_text(void) {
    struct text text = { .states = take_floats(N, 3 * trunk_dim) };
    for (int i = 0; i <= N; i++) text.tokens[i] = token_at(0, i, vocab);
    llamac_session *s = open_trunk(1);
    float *logits = take_floats(1, vocab);
    CHECK(!append(s, &text, 0, N, NULL, logits, text.states, 3 * trunk_dim), "%s", err.message);
    llamac_session_close(&s);
    free(logits);
    return text;
}

// The states are the residual stream after some layers, which is what observers of blocks see.
static void check_states(const struct text *text) {
    const int n_layers = (int)model->config->n_layers, after[] = { 2, n_layers / 2, n_layers - 3 };
    float *stages = take_floats(N, trunk_dim), *logits = take_floats(1, vocab), *plain = take_floats(1, vocab);
    llamac_row rows[N];
    for (int i = 0; i < N; i++) rows[i] = (llamac_row){ text->tokens[i], 0, i, i == N - 1 };
    for (int i = 0; i < 3; i++) {
        const llamac_observation observation = { .stage = after[i] ? LLAMAC_STAGE_BLOCK : LLAMAC_STAGE_EMBEDDING,
                                                 .layer = after[i] - 1, .out = stages };
        const llamac_eval_options options = { .observations = &observation, .n_observations = 1 };
        llamac_session *s = open_session(model, 1, 0, 1, NULL);
        CHECK(!llamac_eval(s, rows, N, plain, &options, &err), "%s", err.message);
        llamac_session_close(&s);
        for (size_t r = 0; r < N; r++)
            CHECK(!memcmp(stages + r * (size_t)trunk_dim, text->states + (3 * r + (size_t)i) * (size_t)trunk_dim,
                          sizeof(float) * (size_t)trunk_dim), "state %d of row %zu", i, r);
    }
    llamac_session *s = open_trunk(2);
    float *states = take_floats(N, 3 * trunk_dim);
    CHECK(!append(s, text, 0, N, NULL, logits, states, 3 * trunk_dim), "%s", err.message);
    CHECK(!memcmp(logits, plain, sizeof(float) * (size_t)vocab), "reading states changed the trunk's logits");
    llamac_session_close(&s);
    free(stages), free(logits), free(plain), free(states);
}

// The tiny head's logits are those of the odd ids.
static void check_ids(const float *logits) {
    for (int id = 0; id < vocab; id++) {
        const int is_drafted = id % 2 && id < 2 * (vocab / 2);
        CHECK(is_drafted == (logits[id] > -INFINITY), "logit %d is %g", id, (double)logits[id]);
    }
}

static void check_bits(uint64_t *state) {
    const struct text text = make_text();
    check_states(&text);
    const size_t state_bytes = sizeof(float) * N * 3 * (size_t)trunk_dim,
                 stream_bytes = sizeof(float) * N * (size_t)head_dim;
    float *stream = take_floats(N, head_dim), *found = take_floats(N, max_int(head_dim, 3 * trunk_dim));
    float *logits = take_floats(1, vocab), *found_logits = take_floats(1, vocab);
    llamac_session *trunk = open_trunk(1), *whole = open_head(trunk, 1);
    CHECK(!append(whole, &text, 0, N, text.states, logits, stream, head_dim), "%s", err.message);
    check_ids(logits);
    for (int threads = 1; threads <= 2; threads++) {
        llamac_session *s = open_trunk(threads), *h = open_head(s, threads);
        append_pieces(s, &text, N, NULL, found_logits, found, 3 * trunk_dim, state);
        CHECK(!memcmp(found, text.states, state_bytes), "states on %d threads", threads);
        append_pieces(h, &text, N, text.states, found_logits, found, head_dim, state);
        CHECK(!memcmp(found, stream, stream_bytes), "the head's stream on %d threads", threads);
        CHECK(!memcmp(found_logits, logits, sizeof(float) * (size_t)vocab), "the head's logits on %d threads", threads);
        llamac_session_close(&h), llamac_session_close(&s);
    }
    llamac_session_close(&whole), llamac_session_close(&trunk);
    free(stream), free(found), free(logits), free(found_logits), free(text.states);
}
static void pieces_and_threads_change_no_bits(void) {
    uint64_t state = 3;
    open_pair(&own_head, &tiny_experts), check_bits(&state), close_pair();
    open_pair(&borrowing_head, &tiny_mixers), check_bits(&state), close_pair();
    open_pair(&deep_head, &tiny_experts), check_bits(&state), close_pair();
}

// The logits are the products of the output matrix, scaled and capped, at their ids.
static void check_logits(const float *normed, const float *logits) {
    const struct matrix *m = &head->output;
    const double scale = (double)head->config->logit_scale, cap = (double)head->config->logit_soft_cap;
    double worst = 0;
    for (int o = 0; o < m->rows; o++) {
        double sum = 0;
        for (int k = 0; k < m->columns; k++)
            sum += weight_at(m->dtype, m->data, m->strip_bytes, m->columns, o, k) * (double)normed[k];
        worst = fmax(worst, fabs(cap * tanh(scale * sum / cap) - (double)logits[(int)head->drafter.output_ids[o]]));
    }
    CHECK(worst < 1e-5, "off by %g", worst);
}

// Every row that wants logits gets its own: those of many rows are those of single rows.
static void rows_of_one_eval_have_their_own_logits(void) {
    open_pair(&own_head, &tiny_experts);
    const struct text text = make_text();
    llamac_session *trunk = open_trunk(1), *together = open_head(trunk, 2), *single = open_head(trunk, 1);
    float *logits = take_floats(FEW, vocab), *one = take_floats(1, vocab), *seen = take_floats(FEW, vocab);
    llamac_row rows[FEW];
    for (int i = 0; i < FEW; i++) rows[i] = (llamac_row){ text.tokens[i + 1], 0, i, 1 };
    float *normed = take_floats(FEW, head_dim);
    const llamac_observation observations[] = { { .stage = LLAMAC_STAGE_LOGITS, .out = seen },
                                                { .stage = LLAMAC_STAGE_OUTPUT_NORM, .out = normed } };
    const llamac_eval_options all = { .states = text.states, .observations = observations, .n_observations = 2 };
    CHECK(!llamac_eval(together, rows, FEW, logits, &all, &err), "%s", err.message);
    CHECK(!memcmp(seen, logits, sizeof(float) * FEW * (size_t)vocab), "the observer has other logits");
    for (size_t i = 0; i < FEW; i++) check_logits(normed + i * (size_t)head_dim, logits + i * (size_t)vocab);
    for (int i = 0; i < FEW; i++) {
        const llamac_eval_options options = { .states = text.states + (size_t)i * 3 * (size_t)trunk_dim };
        CHECK(!llamac_eval(single, &rows[i], 1, one, &options, &err), "%s", err.message);
        CHECK(!memcmp(one, logits + (size_t)i * (size_t)vocab, sizeof(float) * (size_t)vocab), "row %d", i);
    }
    llamac_session_close(&together), llamac_session_close(&single), llamac_session_close(&trunk);
    free(logits), free(one), free(seen), free(normed), free(text.states);
    close_pair();
}

static int best(const float *logits) {
    int found = 0;
    for (int i = 1; i < vocab; i++) if (logits[i] > logits[found]) found = i;
    return found;
}

// Drafts n tokens after text->tokens[length - 1], which the trunk has not computed. known: rows of the head. The rows
// of the drafts are removed again.
static void draft(llamac_session *h, const struct text *text, int known, int length, int n, int *tokens) {
    float *logits = take_floats(1, vocab), *own = take_floats(N, head_dim);
    CHECK(!append(h, text, known, length - 1, text->states, logits, own, head_dim), "%s", err.message);
    const float *stream = own + (size_t)(length - 2) * (size_t)head_dim;
    for (int i = 0; i < n; i++) {
        tokens[i] = best(logits);
        if (i == n - 1) break;
        const llamac_row row = { tokens[i], 0, length - 1 + i, 1 };
        const llamac_eval_options options = { .inputs = stream, .hidden = own, .n_hidden = 1 };
        CHECK(!llamac_eval(h, &row, 1, logits, &options, &err), "%s", err.message);
        stream = own;
    }
    CHECK(!llamac_truncate(h, 0, length - 1, &err), "%s", err.message);
    free(logits), free(own);
}

// A text of drafts, of which some are accepted, as a generation makes it.
static void drafts_after_rewinds_are_those_of_the_text_at_once(void) {
    uint64_t state = 7;
    open_pair(&deep_head, &tiny_experts);
    const size_t width = 3 * (size_t)trunk_dim;
    struct text text = { .states = take_floats(N, 3 * trunk_dim) };
    float *states = take_floats(MOST + 1, 3 * trunk_dim), *logits = take_floats(1, vocab);
    llamac_session *s = open_trunk(1), *h = open_head(s, 2);
    int length = 40, known = 0, drafts[MOST], expected[MOST];
    for (int i = 0; i < length; i++) text.tokens[i] = token_at(1, i, vocab);
    CHECK(!append(s, &text, 0, length - 1, NULL, logits, text.states, (int)width), "%s", err.message);
    for (int round = 0; round < ROUNDS / sparser(4); round++) {
        const int n = 1 + random_below(&state, MOST);
        draft(h, &text, known, length, n, drafts);
        known = length - 1;
        llamac_draft chain[MOST + 1] = { { text.tokens[length - 1], 0, -1, 1 } };
        for (int i = 0; i < n; i++) chain[i + 1] = (llamac_draft){ drafts[i], 0, i, 0 };
        const llamac_eval_options options = { .hidden = states, .n_hidden = n + 1 };
        CHECK(!llamac_eval_drafts(s, chain, n + 1, logits, &options, &err), "%s", err.message);
        const int accepted = 1 + random_below(&state, n + 1);
        for (int i = 0; i < accepted; i++) {
            CHECK(!llamac_accept(s, i, &err), "%s", err.message);
            memcpy(text.states + (size_t)(length - 1) * width, states + (size_t)i * width, sizeof(float) * width);
            text.tokens[length++] = i + 1 < accepted ? drafts[i] : random_below(&state, vocab);
        }
    }
    draft(h, &text, known, length, MOST, drafts);

    // the same text at once
    llamac_session *again = open_trunk(1), *fresh = open_head(again, 1);
    struct text other = text;
    other.states = take_floats(N, (int)width);
    CHECK(!append(again, &other, 0, length - 1, NULL, logits, other.states, (int)width), "%s", err.message);
    const size_t bytes = (size_t)(length - 1) * width * sizeof(float);
    CHECK(!memcmp(other.states, text.states, bytes), "states of accepted drafts");
    draft(fresh, &other, 0, length, MOST, expected);
    CHECK(!memcmp(drafts, expected, sizeof drafts), "drafts after %d tokens", length);
    llamac_session_close(&h), llamac_session_close(&s), llamac_session_close(&fresh), llamac_session_close(&again);
    free(states), free(logits), free(text.states), free(other.states);
    close_pair();
}

// ---- on a device

enum { OBSERVED = 4 };
static const llamac_observation observed[OBSERVED] = {
    { .stage = LLAMAC_STAGE_EMBEDDING }, { .stage = LLAMAC_STAGE_ATTN_NORM }, { .stage = LLAMAC_STAGE_OUTPUT_NORM },
    { .stage = LLAMAC_STAGE_LOGITS },
};

// What a head computes: its streams and the last logits of a text, then of three drafts after it with their stages.
struct results { float *streams, *logits, *own, *stages; };
static struct results take_results(void) {
    return (struct results){ take_floats(N, head_dim), take_floats(4, vocab), take_floats(4, head_dim),
                             take_floats(3 * OBSERVED, max_int(vocab, head_dim)) };
}
static void free_results(struct results *r) { free(r->streams), free(r->logits), free(r->own), free(r->stages); }

static void compute(llamac_session *h, const struct text *text, uint64_t *state, struct results *to) {
    const size_t dim = (size_t)head_dim, size = (size_t)max_int(vocab, head_dim);
    append_pieces(h, text, N, text->states, to->logits, to->streams, head_dim, state);
    memcpy(to->own, to->streams + (N - 1) * dim, sizeof(float) * dim);
    for (int i = 0; i < 3; i++) {
        llamac_observation observations[OBSERVED];
        for (size_t o = 0; o < OBSERVED; o++) {
            observations[o] = observed[o];
            observations[o].out = to->stages + ((size_t)i * OBSERVED + o) * size;
        }
        const llamac_row row = { best(to->logits + i * vocab), 0, N + i, 1 };
        const llamac_eval_options options = {
            .inputs = to->own + i * head_dim, .hidden = to->own + (i + 1) * head_dim, .n_hidden = 1,
            .observations = observations, .n_observations = OBSERVED,
        };
        CHECK(!llamac_eval(h, &row, 1, to->logits + (i + 1) * vocab, &options, &err), "%s", err.message);
    }
}

static void check_device(struct host_device *device, uint64_t *state) {
    host_device_open(device, model);
    host_device_add_drafter(device, head, model);
    const struct text text = make_text();
    const size_t state_bytes = sizeof(float) * N * 3 * (size_t)trunk_dim, floats = sizeof(float);
    float *found = take_floats(N, 3 * trunk_dim), *logits = take_floats(1, vocab);
    llamac_session *trunks[2], *heads[2];
    struct results results[2];
    for (int d = 0; d < 2; d++) {
        trunks[d] = open_session_with(model, (llamac_session_options){ .n_sequences = 1, .threads = 1, .drafter = head,
                                                                       .on_device = d });
        heads[d] = open_head(trunks[d], 1);
        append_pieces(trunks[d], &text, N, NULL, logits, found, 3 * trunk_dim, state);
        CHECK(!memcmp(found, text.states, state_bytes), "states, on a device: %d", d);
        const int forwards = device->forwards;
        results[d] = take_results();
        compute(heads[d], &text, state, &results[d]);
        CHECK((device->forwards > forwards + 3) == d, "%d passes", device->forwards - forwards);
    }
    check_ids(results[1].logits);
    CHECK(!memcmp(results[0].streams, results[1].streams, floats * N * (size_t)head_dim), "streams of a text");
    CHECK(!memcmp(results[0].logits, results[1].logits, floats * 4 * (size_t)vocab), "logits");
    CHECK(!memcmp(results[0].own, results[1].own, floats * 4 * (size_t)head_dim), "streams of drafts");
    for (size_t i = 0; i < 3 * OBSERVED; i++) {
        const size_t at = i * (size_t)max_int(vocab, head_dim);
        const size_t width = (size_t)(i % OBSERVED == OBSERVED - 1 ? vocab : head_dim);
        CHECK(!memcmp(results[0].stages + at, results[1].stages + at, floats * width), "stage %zu", i);
    }
    float last[2][3 * 64];   // the states of the last row alone
    for (int d = 0; d < 2; d++) {
        const llamac_row rows[] = { { 5, 0, N, 0 }, { 6, 0, N + 1, 0 } };
        const llamac_eval_options options = { .hidden = last[d], .n_hidden = 1 };
        CHECK(!llamac_eval(trunks[d], rows, 2, NULL, &options, &err), "%s", err.message);
    }
    CHECK(!memcmp(last[0], last[1], floats * 3 * (size_t)trunk_dim), "the states of the last row");
    CHECK(!llamac_truncate(heads[1], 0, 0, &err), "%s", err.message);
    llamac_set_head_kv_budget(model, 1);
    CHECK(append(heads[1], &text, 0, 1, text.states, logits, found, head_dim) && err.code == LLAMAC_NO_MEMORY, "%s",
          err.message);
    for (int d = 0; d < 2; d++) {
        llamac_session_close(&heads[d]), llamac_session_close(&trunks[d]);
        free_results(&results[d]);
    }
    host_device_close(device);
    free(found), free(logits), free(text.states);
}
static void a_device_computes_the_same_bits(void) {
    static struct host_device device;
    uint64_t state = 5;
    open_pair(&own_head, &tiny_experts), check_device(&device, &state), close_pair();
    open_pair(&borrowing_head, &tiny_mixers), check_device(&device, &state), close_pair();
    open_pair(&deep_head, &tiny_experts), check_device(&device, &state), close_pair();
}

static void refuse(const llamac_model *of, llamac_session_options options, const char *expected) {
    llamac_session *s;
    options.n_sequences = 1, options.threads = 1;
    CHECK(llamac_session_open(&s, of, &options, &err) && strstr(err.message, expected), "%s: %s", expected,
          err.message);
}
static void impossible_pairs_and_rows_are_refused(void) {
    struct tiny_shape shape = borrowing_head;
    open_pair(&shape, &tiny_experts);
    CHECK(llamac_model_adapt(head, "token_embedding.weight", 1, "", 0, "", 0, NULL, 0, &err) &&
          strstr(err.message, "the model has no matrix token_embedding.weight"), "%s", err.message);
    llamac_session *trunk = open_trunk(1), *h = open_head(trunk, 1);
    refuse(head, (llamac_session_options){ 0 }, "which cannot run alone");
    refuse(model, (llamac_session_options){ .trunk = trunk }, "its model is not a drafter");
    refuse(model, (llamac_session_options){ .drafter = model }, "it is not an EAGLE-3 head");
    refuse(head, (llamac_session_options){ .trunk = h }, "itself a drafter");
    refuse(head, (llamac_session_options){ .trunk = trunk, .mtp = 1 }, "the model has no MTP layer");
    refuse(head, (llamac_session_options){ .trunk = trunk, .on_device = 1 }, "a drafter is where its trunk is");
    const llamac_row row = { 1, 0, 0, 0 };
    float *states = take_floats(1, 3 * trunk_dim);
    const llamac_eval_options both = { .inputs = states, .states = states }, of_head = { .states = states };
    CHECK(llamac_eval(h, &row, 1, NULL, NULL, &err) && strstr(err.message, "either inputs or"), "%s", err.message);
    CHECK(llamac_eval(h, &row, 1, NULL, &both, &err) && strstr(err.message, "either inputs or"), "%s", err.message);
    CHECK(llamac_eval(trunk, &row, 1, NULL, &of_head, &err) && strstr(err.message, "belong to an EAGLE-3 head"), "%s",
          err.message);
    llamac_session_close(&h), llamac_session_close(&trunk);
    free(states);
    close_pair();
    shape.eagle = 44;
    open_pair(&shape, &tiny_experts);
    refuse(model, (llamac_session_options){ .drafter = head }, "of dim 44 and vocab_size 101, and the model has 40");
    close_pair();
    shape = borrowing_head, shape.dim = 36;
    open_pair(&shape, &tiny_experts);
    refuse(model, (llamac_session_options){ .drafter = head }, "dim 36 and no token_embedding.weight");
    close_pair();
    shape = borrowing_head, shape.vocab = 99;
    open_pair(&shape, &tiny_experts);
    refuse(model, (llamac_session_options){ .drafter = head }, "vocab_size 99, and the model has 40 and 101");
    close_pair();
    struct tiny_shape few = tiny_experts;
    few.n_layers = 2;
    open_pair(&borrowing_head, &few);
    refuse(model, (llamac_session_options){ .drafter = head }, "after -1 layers, and the model has 2");
    close_pair();
}

static void any_allocation_can_fail(void) {
    open_pair(&own_head, &tiny_experts);
    const struct text text = make_text();
    llamac_session *trunk = open_trunk(1);
    float *expected = take_floats(1, vocab), *logits = take_floats(1, vocab), *stream = take_floats(N, head_dim);
    const llamac_session_options options = { .n_sequences = 1, .threads = up_to_threads(2), .trunk = trunk };
    const long before = llamac_live_objects();
    int failed = 1;
    long n = 0;
    for (; failed && n < 80; n++) {   // 0: none fails
        llamac_session *s = NULL;
        llamac_test_fail_allocation(n);
        failed = llamac_session_open(&s, head, &options, &err) ||
                 append(s, &text, 0, FEW, text.states, n ? logits : expected, stream, head_dim);
        llamac_test_fail_allocation(0);
        CHECK(!failed || err.code == LLAMAC_NO_MEMORY, "allocation %ld: %s", n, err.message);
        if (!failed) CHECK(!n || !memcmp(logits, expected, sizeof(float) * (size_t)vocab), "allocation %ld", n);
        if (s) llamac_session_close(&s);
        CHECK(llamac_live_objects() == before, "allocation %ld: objects leak", n);
        if (!n) failed = 1;
    }
    CHECK(n > 4 && !failed, "%ld allocations", n);
    llamac_session_close(&trunk);
    free(expected), free(logits), free(stream), free(text.states);
    close_pair();
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(pieces_and_threads_change_no_bits);
    RUN(rows_of_one_eval_have_their_own_logits);
    RUN(drafts_after_rewinds_are_those_of_the_text_at_once);
    RUN(a_device_computes_the_same_bits);
    RUN(impossible_pairs_and_rows_are_refused);
    RUN(any_allocation_can_fail);
    return finish_tests("test_eagle");
}
