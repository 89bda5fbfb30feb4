// SPDX-License-Identifier: MIT
// test_drafter.c - drafter files beside a model: the check of the pair, inputs and states, clusters of tokens, the
// trunk's keys read from forks, batches and after drafts, and failed allocations.
#include <math.h>
#include "common.h"
#include "host_device.h"
#include "open_shape.h"

enum { N = 150, SEQUENCES = 3, CLUSTERS = 7, USED = 3, VOCAB = 16 * CLUSTERS };

static const struct tiny_shape trunk_shape = {
    .dim = 36, .n_layers = 3, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = VOCAB,
    .context = 400, .dtype = LLAMAC_F32, .biases = 1, .window = 20,
};
static const struct tiny_shape drafter_shape = {
    .dim = 24, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 40, .vocab = VOCAB,
    .context = 400, .dtype = LLAMAC_F32, .window = 20, .trunk_dim = 36,
};

static struct tiny_file drafter_file;
static llamac_model *drafter;
static int dim, trunk_dim;
static struct host_device device;   // of the model; the drafter's sessions are where their trunks are

static void open_pair(int clusters) {
    struct tiny_shape shape = drafter_shape;
    shape.clusters = clusters;
    open_shape(&trunk_shape);
    drafter_file = tiny_model(&shape);
    drafter = open_model(drafter_file);
    dim = shape.dim, trunk_dim = shape.trunk_dim;
}
static void open_pair_with_device(int clusters) {
    open_pair(clusters);
    host_device_open(&device, model);
    host_device_add_drafter(&device, drafter, model);
}
static llamac_session *open_trunk(int n_sequences, int kv_dtype, int on_device) {
    return open_session_with(model, (llamac_session_options){ .n_sequences = n_sequences, .threads = 1,
                                                              .kv_dtype = kv_dtype, .on_device = on_device });
}
static void close_pair(void) {
    CHECK(llamac_kv_bytes(drafter) == 0, "%zu bytes of pages leak", llamac_kv_bytes(drafter));
    llamac_model_close(&drafter);
    free(drafter_file.data);
    close_shape();
}
static llamac_session *open_drafter(const llamac_session *trunk, int threads) {
    return open_session_with(drafter, (llamac_session_options){ .n_sequences = trunk->n_sequences, .trunk = trunk,
                                                                .threads = up_to_threads(threads) });
}

// Appends the tokens of positions [first, last) of a sequence. hidden: (trunk_dim), of the last one.
static void append(llamac_session *s, int sequence, int first, int last, float *hidden) {
    llamac_row rows[N];
    for (int i = first; i < last; i++)
        rows[i - first] = (llamac_row){ token_at(sequence, i, vocab), sequence, i, 0 };
    const llamac_eval_options options = { .hidden = hidden, .n_hidden = 1 };
    CHECK(!llamac_eval(s, rows, last - first, NULL, &options, &err), "%s", err.message);
}

// One draft after a sequence: logits (VOCAB), and the state for the next one in place of `state`.
static int draft(llamac_session *s, int token, int sequence, int position, float *state, float *logits) {
    const llamac_row row = { token, sequence, position, 1 };
    float next[64];
    const llamac_eval_options options = { .inputs = state, .hidden = next, .n_hidden = 1 };
    const int failed = llamac_eval(s, &row, 1, logits, &options, &err);
    if (!failed) memcpy(state, next, sizeof(float) * (size_t)trunk_dim);
    return failed;
}
static int best(const float *logits) {
    int found = 0;
    for (int i = 1; i < vocab; i++) if (logits[i] > logits[found]) found = i;
    return found;
}
// Three drafts in a row. results: (3, VOCAB + trunk_dim).
static void drafts(llamac_session *s, int sequence, int length, const float *hidden, float *results) {
    float state[64];
    memcpy(state, hidden, sizeof(float) * (size_t)trunk_dim);
    for (int i = 0, token = token_at(sequence, length, vocab); i < 3; i++, results += vocab + trunk_dim) {
        CHECK(!draft(s, token, sequence, length, state, results), "%s", err.message);
        memcpy(results + vocab, state, sizeof(float) * (size_t)trunk_dim);
        token = best(results);
    }
}

static double weight_of(const struct matrix *m, int row, int column) {
    return weight_at(m->dtype, m->data, m->strip_bytes, m->columns, row, column);
}
static double product_of(const struct matrix *m, int row, const float *x) {
    double sum = 0;
    for (int k = 0; k < m->columns; k++) sum += weight_of(m, row, k) * (double)x[k];
    return sum;
}

// The logits of the tokens in the best clusters, from the normed row; those of the others are less by 1 than the least.
static void reference_logits(const float *normed, double *logits) {
    double scores[CLUSTERS], least = INFINITY;
    int chosen[CLUSTERS] = { 0 };
    for (int c = 0; c < CLUSTERS; c++) scores[c] = product_of(&drafter->drafter.clusters, c, normed);
    for (int n = 0; n < USED; n++) {
        int top = -1;
        for (int c = 0; c < CLUSTERS; c++) if (!chosen[c] && (top < 0 || scores[c] > scores[top])) top = c;
        chosen[top] = 1;
    }
    for (int r = 0; r < VOCAB; r++)
        if (chosen[r / 16]) least = fmin(least, product_of(&drafter->output, r, normed));
    for (int r = 0; r < VOCAB; r++)
        logits[(int)drafter->drafter.output_ids[r]] = chosen[r / 16] ? product_of(&drafter->output, r, normed)
                                                                     : least - 1;
}

static void inputs_states_and_logits_are_as_defined(void) {
    for (int clusters = 0; clusters <= CLUSTERS; clusters += CLUSTERS) {
        open_pair(clusters);
        llamac_session *trunk = open_session(model, 1, 0, 1, NULL), *s = open_drafter(trunk, 2);
        float hidden[64], next[64], first[64], normed[64], logits[VOCAB], copy[VOCAB];
        append(trunk, 0, 0, N, hidden);
        const llamac_row row = { 7, 0, N, 1 };
        const llamac_observation observations[] = {
            { .stage = LLAMAC_STAGE_EMBEDDING, .out = first }, { .stage = LLAMAC_STAGE_OUTPUT_NORM, .out = normed },
            { .stage = LLAMAC_STAGE_LOGITS, .out = copy },
        };
        const llamac_eval_options options = { .inputs = hidden, .hidden = next, .n_hidden = 1,
                                              .observations = observations, .n_observations = 3 };
        CHECK(!llamac_eval(s, &row, 1, logits, &options, &err), "%s", err.message);
        float pair[128];
        for (int k = 0; k < trunk_dim; k++) pair[k] = (float)weight_of(&model->token_embedding, row.token, k);
        memcpy(pair + trunk_dim, hidden, sizeof(float) * (size_t)trunk_dim);
        double worst = 0, expected[VOCAB];
        for (int o = 0; o < dim; o++)
            worst = fmax(worst, fabs(product_of(&drafter->drafter.in, o, pair) - (double)first[o]));
        for (int o = 0; o < trunk_dim; o++)
            worst = fmax(worst, fabs(product_of(&drafter->drafter.out, o, normed) - (double)next[o]));
        if (clusters) reference_logits(normed, expected);
        for (int i = 0; i < VOCAB; i++)
            worst = fmax(worst, fabs((clusters ? expected[i] : product_of(&drafter->output, i, normed)) -
                                     (double)logits[i]));
        CHECK(worst < 1e-5, "%d clusters: off by %g", clusters, worst);
        CHECK(!memcmp(copy, logits, sizeof logits), "the observed logits differ");
        CHECK(llamac_length(s, 0) == 0 && llamac_length(trunk, 0) == N, "a draft was appended");
        llamac_session_close(&s), llamac_session_close(&trunk);
        close_pair();
    }
}

// The same drafts in sessions of other threads, from a fork, from a batch of sequences, and after rejected drafts.
static void the_trunk_decides_and_not_how_it_came_about(void) {
    for (int clusters = 0; clusters <= CLUSTERS; clusters += CLUSTERS) {
        open_pair(clusters);
        const size_t size = 3 * (size_t)(VOCAB + trunk_dim);
        float hidden[SEQUENCES][64], *expected[SEQUENCES], *found = take_floats(3, VOCAB + trunk_dim);
        llamac_session *trunk = open_session(model, 2 * SEQUENCES, 0, 1, NULL), *s = open_drafter(trunk, 1),
                       *other = open_drafter(trunk, 2);
        for (int i = 0; i < SEQUENCES; i++) {
            const int length = N - 40 * i;   // also one that is shorter than a page
            append(trunk, i, 0, length, hidden[i]);
            expected[i] = take_floats(3, VOCAB + trunk_dim);
            drafts(s, i, length, hidden[i], expected[i]);
            CHECK(!i || memcmp(expected[i], expected[0], size * sizeof(float)), "the sequence changes nothing");
            drafts(other, i, length, hidden[i], found);
            CHECK(!memcmp(found, expected[i], size * sizeof(float)), "2 threads, sequence %d", i);
            CHECK(!llamac_fork(trunk, SEQUENCES + i, trunk, i, length, &err), "%s", err.message);
            float state[64], logits[VOCAB];
            memcpy(state, hidden[i], sizeof state);
            CHECK(!draft(other, token_at(i, length, vocab), SEQUENCES + i, length, state, logits), "%s", err.message);
            CHECK(!memcmp(logits, expected[i], sizeof logits), "a fork of sequence %d", i);
        }
        llamac_row rows[2 * SEQUENCES];
        float states[2 * SEQUENCES * 64], batch[2 * SEQUENCES * VOCAB];
        for (int r = 0; r < 2 * SEQUENCES; r++) {
            const int i = r % SEQUENCES;
            rows[r] = (llamac_row){ token_at(i, N - 40 * i, vocab), r, N - 40 * i, 1 };
            memcpy(states + r * trunk_dim, hidden[i], sizeof(float) * (size_t)trunk_dim);
        }
        const llamac_eval_options options = { .inputs = states };
        CHECK(!llamac_eval(other, rows, 2 * SEQUENCES, batch, &options, &err), "%s", err.message);
        for (int r = 0; r < 2 * SEQUENCES; r++)
            CHECK(!memcmp(batch + r * VOCAB, expected[r % SEQUENCES], sizeof(float) * VOCAB), "row %d of a batch", r);

        CHECK(!llamac_truncate(trunk, 0, N - 9, &err), "%s", err.message);
        const llamac_draft chain[] = { { 3, 0, -1, 0 }, { 5, 0, 0, 0 } };
        CHECK(!llamac_eval_drafts(trunk, chain, 2, NULL, NULL, &err), "%s", err.message);
        append(trunk, 0, N - 9, N, hidden[0]);
        drafts(s, 0, N, hidden[0], found);
        CHECK(!memcmp(found, expected[0], size * sizeof(float)), "after a rewind");
        for (int i = 0; i < SEQUENCES; i++) free(expected[i]);
        free(found);
        llamac_session_close(&s), llamac_session_close(&other), llamac_session_close(&trunk);
        close_pair();
    }
}

// On a device, with each number format of the cache; after forks, cuts, drafts and rewinds as far as windows allow.
static void drafts_on_a_device_have_the_same_bits(void) {
    const int kv_dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };
    const size_t size = 3 * (size_t)(VOCAB + 36) * sizeof(float);
    float *results[2] = { take_floats(3, VOCAB + 36), take_floats(3, VOCAB + 36) };
    for (int i = 0; i < 6; i++) {
        open_pair_with_device(i % 2 * CLUSTERS);
        llamac_session *trunks[2], *heads[2];
        float hidden[2][64];
        for (int d = 0; d < 2; d++) {
            trunks[d] = open_trunk(2, kv_dtypes[i / 2], d);
            heads[d] = open_drafter(trunks[d], 1);
        }
        const int forwards = device.forwards;
        for (int length = 1, before = 0; length <= N; before = length, length += 74) {
            for (int d = 0; d < 2; d++) {
                append(trunks[d], 0, before, length, hidden[d]);
                drafts(heads[d], 0, length, hidden[d], results[d]);
            }
            CHECK(!memcmp(hidden[0], hidden[1], sizeof(float) * (size_t)trunk_dim), "hidden states at %d", length);
            CHECK(!memcmp(results[0], results[1], size), "drafts at %d", length);
        }
        CHECK(device.forwards > forwards + 6, "%d passes", device.forwards - forwards);
        llamac_row rows[4];
        float states[4 * 64], logits[2][4 * VOCAB], next[2][3 * 64];
        for (int d = 0; d < 2; d++) {   // a batch of forks and of two rows at one position
            const int length = N - 1;
            CHECK(!llamac_fork(trunks[d], 1, trunks[d], 0, length - 30, &err), "%s", err.message);
            for (int r = 0; r < 4; r++) {
                rows[r] = (llamac_row){ 3 + r, r / 2, r < 2 ? length : length - 30, r != 2 };
                memcpy(states + r * trunk_dim, hidden[d], sizeof(float) * (size_t)trunk_dim);
            }
            const llamac_eval_options options = { .inputs = states, .hidden = next[d], .n_hidden = 3 };
            CHECK(!llamac_eval(heads[d], rows, 4, logits[d], &options, &err), "%s", err.message);
        }
        CHECK(!memcmp(logits[0], logits[1], 3 * VOCAB * sizeof(float)), "logits of a batch");
        CHECK(!memcmp(next[0], next[1], 3 * (size_t)trunk_dim * sizeof(float)), "states of a batch");
        for (int d = 0; d < 2; d++) llamac_session_close(&heads[d]), llamac_session_close(&trunks[d]);
        host_device_close(&device);
        close_pair();
    }
    free(results[0]), free(results[1]);
}

// A trunk that has dropped positions of its window and is then rewound has fewer than a draft's window.
static void a_device_sees_no_positions_that_the_trunk_has_dropped(void) {
    open_pair_with_device(0);
    llamac_session *trunks[2], *heads[2];
    float hidden[2][64], *results[2] = { take_floats(3, VOCAB + 36), take_floats(3, VOCAB + 36) };
    const size_t size = 3 * (size_t)(VOCAB + trunk_dim) * sizeof(float);
    int least = 0;
    for (int d = 0; d < 2; d++) {
        trunks[d] = open_trunk(1, 0, d), heads[d] = open_drafter(trunks[d], 1);
        for (int first = 0; first < 360; first += 120) append(trunks[d], 0, first, first + 120, hidden[d]);
        least = llamac_shortest_length(trunks[d], 0);
        CHECK(!llamac_truncate(trunks[d], 0, least, &err), "%s", err.message);
    }
    CHECK(least > 20, "nothing has been dropped at length %d", least);
    for (int length = least; length < least + 4; length++)
        for (int d = 0; d < 2; d++) {
            if (length > least) append(trunks[d], 0, length - 1, length, hidden[d]);
            drafts(heads[d], 0, length, hidden[d], results[d]);
            if (d) CHECK(!memcmp(results[0], results[1], size), "drafts at %d, from %d on", length, least);
        }
    for (int d = 0; d < 2; d++) llamac_session_close(&heads[d]), llamac_session_close(&trunks[d]), free(results[d]);
    host_device_close(&device);
    close_pair();
}

static void scores_that_are_no_numbers_choose_the_same_clusters_on_a_device(void) {
    open_pair_with_device(CLUSTERS);
    llamac_session *trunks[2], *heads[2];
    float hidden[64], logits[2][VOCAB], state[64];
    for (int d = 0; d < 2; d++) trunks[d] = open_trunk(1, 0, d), heads[d] = open_drafter(trunks[d], 1);
    for (int i = 0; i < 2; i++) {
        for (int d = 0; d < 2; d++) {
            append(trunks[d], 0, 9 * i, 9 * i + 9, hidden);
            memcpy(state, hidden, sizeof state);
            state[0] = i ? NAN : INFINITY;
            CHECK(!draft(heads[d], 3, 0, 9 * i + 9, state, logits[d]), "%s", err.message);
        }
        for (int t = 0; t < VOCAB; t++)
            CHECK(isnan(logits[0][t]) ? isnan(logits[1][t]) : logits[0][t] == logits[1][t], "token %d: %g and %g", t,
                  (double)logits[0][t], (double)logits[1][t]);
    }
    for (int d = 0; d < 2; d++) llamac_session_close(&heads[d]), llamac_session_close(&trunks[d]);
    host_device_close(&device);
    close_pair();
}

// A row sees the positions before its own: all of them, or those up to a window's width before the last one.
static void a_draft_sees_the_positions_of_the_trunk(void) {
    open_pair(0);
    llamac_session *trunk = open_session(model, 1, 0, 1, NULL), *s = open_drafter(trunk, 2);
    const size_t context = (size_t)trunk_shape.context, heads = (size_t)drafter_shape.n_heads;
    float hidden[64], *scores = take_floats((int)heads, (int)context);
    for (int length = 1, before = 0; length <= 150; before = length, length += length < 22 ? 1 : 64) {
        append(trunk, 0, before, length, hidden);
        for (int l = 0; l < 3; l++) {
            const llamac_row row = { 7, 0, length, 0 };
            const llamac_observation observation = { .stage = LLAMAC_STAGE_SCORES, .layer = l, .out = scores };
            const llamac_eval_options options = { .inputs = hidden, .observations = &observation, .n_observations = 1 };
            CHECK(!llamac_eval(s, &row, 1, NULL, &options, &err), "%s", err.message);
            const size_t first = l == 1 ? (size_t)max_int(0, length - 1 - 20) : 0;
            for (size_t i = 0; i < heads * context; i++)
                if (isfinite(scores[i]) != (i % context >= first && i % context < (size_t)length)) {
                    CHECK(0, "length %d, layer %d, position %zu: %g", length, l, i % context, (double)scores[i]);
                    break;
                }
        }
    }
    free(scores);
    llamac_session_close(&s), llamac_session_close(&trunk);
    close_pair();
}

static void check_refusal(struct tiny_shape drafter_like, struct tiny_shape trunk_like, const char *message) {
    open_shape(&trunk_like);
    drafter_file = tiny_model(&drafter_like);
    drafter = open_model(drafter_file);
    llamac_session *trunk = open_session(model, 1, 0, 1, NULL), *s = NULL;
    const llamac_session_options options = { .n_sequences = 1, .threads = 1, .trunk = trunk };
    CHECK(llamac_session_open(&s, drafter, &options, &err) && strstr(err.message, message), "%s", err.message);
    CHECK(!s, "a session");
    llamac_session_close(&trunk);
    close_pair();
}

static void pairs_that_do_not_match_are_refused(void) {
    struct tiny_shape d = drafter_shape, t = trunk_shape;
    d.trunk_dim = 40, check_refusal(d, t, "its trunk_dim is 40, and the model's dim is 36"), d = drafter_shape;
    d.vocab = 128, check_refusal(d, t, "its vocab_size is 128, and the model's vocab_size is 112"), d = drafter_shape;
    d.window = 19, check_refusal(d, t, "its layer 1 has window 19, but layer 1 of the model"), d = drafter_shape;
    d.head_dim = 8, check_refusal(d, t, "its layer 0 has head_dim 8, but layer 2"), d = drafter_shape;
    d.n_kv_heads = 4, check_refusal(d, t, "its layer 0 has KV heads 4, but layer 2 of the model, whose"),
    d = drafter_shape;
    t.window = 0, check_refusal(d, t, "its layer 1 has window 20, and no layer of the model is of this kind");
    t = tiny_latent, t.dim = 36, t.vocab = VOCAB, t.window = 0, d.window = 0, d.n_kv_heads = 1, d.head_dim = 38;
    check_refusal(d, t, "its layer 0 has latents 0, but layer 3 of the model, whose keys it would read, has 32");
    t = tiny_encoder, check_refusal(d, t, "the trunk of a drafter is an encoder");
    check_refusal(trunk_shape, trunk_shape, "the session has a trunk, but its model is not a drafter");
}

static void impossible_sessions_and_rows_are_refused(void) {
    open_pair(CLUSTERS);
    llamac_session *trunk = open_session(model, 1, 0, 1, NULL), *s = NULL;
    const llamac_session_options alone = { .n_sequences = 1, .threads = 1 };
    CHECK(llamac_session_open(&s, drafter, &alone, &err) && err.code == LLAMAC_UNSUPPORTED &&
          strstr(err.message, "the model is a drafter, which cannot run alone"), "%s", err.message);
    const llamac_session_options more = { .n_sequences = 2, .threads = 1, .trunk = trunk };
    CHECK(llamac_session_open(&s, drafter, &more, &err) && strstr(err.message, "at most the trunk's 1"), "%s",
          err.message);
    s = open_drafter(trunk, 1);
    const llamac_session_options beside = { .n_sequences = 1, .threads = 1, .trunk = s };
    llamac_session *second = NULL;
    CHECK(llamac_session_open(&second, drafter, &beside, &err) && strstr(err.message, "is itself a drafter"), "%s",
          err.message);
    float state[64] = { 0 }, logits[VOCAB];
    CHECK(draft(s, 1, 0, 0, state, logits) && strstr(err.message, "has no positions to draft from"), "%s", err.message);
    append(trunk, 0, 0, 5, state);
    CHECK(draft(s, 1, 0, 4, state, logits) && strstr(err.message, "position is 4, but sequence 0 continues at 5"), "%s",
          err.message);
    CHECK(draft(s, VOCAB, 0, 5, state, logits) && strstr(err.message, "token is 112"), "%s", err.message);
    CHECK(draft(s, 1, 1, 5, state, logits) && strstr(err.message, "sequence is 1"), "%s", err.message);
    const llamac_row row = { 1, 0, 5, 0 };
    const llamac_draft root = { 1, 0, -1, 0 };
    CHECK(llamac_eval(s, &row, 1, NULL, NULL, &err) && strstr(err.message, "the session belongs to a drafter"), "%s",
          err.message);
    const llamac_eval_options of_root = { .inputs = state };
    CHECK(llamac_eval_drafts(s, &root, 1, NULL, &of_root, &err) && err.code == LLAMAC_UNSUPPORTED &&
          strstr(err.message, "whose rows are not appended"), "%s", err.message);
    const llamac_observation cache = { .stage = LLAMAC_STAGE_CACHE_V, .out = logits };
    const llamac_eval_options options = { .inputs = state, .observations = &cache, .n_observations = 1 };
    CHECK(llamac_eval(s, &row, 1, NULL, &options, &err) && strstr(err.message, "store no keys and values"), "%s",
          err.message);
    CHECK(!draft(s, 1, 0, 5, state, logits), "%s", err.message);
    llamac_session_close(&s);
    const llamac_session_options on_device = { .n_sequences = 1, .threads = 1, .trunk = trunk, .on_device = 1 };
    CHECK(llamac_session_open(&s, drafter, &on_device, &err) && strstr(err.message, "a drafter is where its trunk is"),
          "%s", err.message);
    llamac_session_close(&trunk);
    close_pair();
}

static void impossible_plans_are_refused(void) {
    llamac_plan plan;
    open_pair(CLUSTERS);
    CHECK(llamac_plan_open(&plan, drafter, 0, &err) && err.code == LLAMAC_UNSUPPORTED &&
          strstr(err.message, "whose plan depends on the model that it drafts for"), "%s", err.message);
    CHECK(llamac_plan_open_drafter(&plan, model, model, 0, &err) && strstr(err.message, "the model is not a drafter"),
          "%s", err.message);
    CHECK(llamac_plan_open_drafter(&plan, drafter, model, 1, &err) && strstr(err.message, "is not an EAGLE-3 head"),
          "%s", err.message);
    CHECK(llamac_plan_open_drafter(&plan, drafter, drafter, 0, &err) && strstr(err.message, "is itself a drafter"),
          "%s", err.message);
    const size_t a_bytes = llamac_matrix_bytes(LLAMAC_F32, 1, 24), b_bytes = llamac_matrix_bytes(LLAMAC_F32, VOCAB, 1);
    float *a = take(a_bytes), *b = take(b_bytes);
    CHECK(!llamac_model_adapt(drafter, "output.weight", 1, a, a_bytes, b, b_bytes, NULL, 0, &err), "%s", err.message);
    CHECK(llamac_plan_open_drafter(&plan, drafter, model, 0, &err) && err.code == LLAMAC_UNSUPPORTED &&
          strstr(err.message, "has an adapter of its output matrix"), "%s", err.message);
    close_pair();
    free(a), free(b);
    struct tiny_shape other = trunk_shape;
    other.dim = 40;
    open_shape(&other);
    drafter_file = tiny_model(&drafter_shape);
    drafter = open_model(drafter_file);
    CHECK(llamac_plan_open_drafter(&plan, drafter, model, 0, &err) && strstr(err.message, "its trunk_dim is 36"), "%s",
          err.message);
    CHECK(!plan.steps, "a plan");
    close_pair();
}

static void any_allocation_can_fail(void) {
    open_pair(CLUSTERS);
    llamac_session *trunk = open_session(model, 1, 0, 1, NULL);
    float hidden[64], expected[VOCAB], logits[VOCAB];
    append(trunk, 0, 0, N, hidden);
    const long before = llamac_live_objects();
    const llamac_session_options options = { .n_sequences = 1, .threads = up_to_threads(2), .trunk = trunk };
    int failed = 1;
    long n = 0;
    for (; failed && n < 80; n++) {   // 0: none fails
        llamac_model *other = NULL;
        llamac_session *s = NULL;
        float state[64];
        memcpy(state, hidden, sizeof state);
        llamac_test_fail_allocation(n);
        failed = llamac_model_open(&other, drafter_file.data, drafter_file.bytes, &err) ||
                 llamac_session_open(&s, other, &options, &err) ||
                 draft(s, 3, 0, N, state, n ? logits : expected);
        llamac_test_fail_allocation(0);
        CHECK(!failed || err.code == LLAMAC_NO_MEMORY, "allocation %ld: %s", n, err.message);
        CHECK(n || !failed, "%s", err.message);
        if (failed && s) CHECK(!draft(s, 3, 0, N, state, logits), "%s", err.message);
        if (s && n) CHECK(!memcmp(logits, expected, sizeof logits), "allocation %ld", n);
        if (!n) failed = 1;
        if (s) llamac_session_close(&s);
        if (other) llamac_model_close(&other);
        CHECK(llamac_live_objects() == before, "allocation %ld: %ld objects", n, llamac_live_objects());
    }
    CHECK(!failed && n > 5, "%ld allocations", n);
    llamac_session_close(&trunk);
    close_pair();
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(inputs_states_and_logits_are_as_defined);
    RUN(the_trunk_decides_and_not_how_it_came_about);
    RUN(drafts_on_a_device_have_the_same_bits);
    RUN(a_device_sees_no_positions_that_the_trunk_has_dropped);
    RUN(scores_that_are_no_numbers_choose_the_same_clusters_on_a_device);
    RUN(a_draft_sees_the_positions_of_the_trunk);
    RUN(pairs_that_do_not_match_are_refused);
    RUN(impossible_sessions_and_rows_are_refused);
    RUN(impossible_plans_are_refused);
    RUN(any_allocation_can_fail);
    return finish_tests("test_drafter");
}
