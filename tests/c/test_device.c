// SPDX-License-Identifier: MIT
// test_device.c - sessions on a device: the plan has the bits of the graph, in every stage; forks, windows, shifts,
// drafts and saving work on pages that the core cannot read; a device that fails changes nothing.
#include "common.h"
#include "host_device.h"
#include "saving.h"
#include "session.h"
#include "tiny_model.h"

static struct tiny_file file;
static llamac_model *model;
static struct host_device device;
static int vocab;

enum { MOST_FACTORS = 1000 };
static float *factors[MOST_FACTORS];   // of adapters
static int n_factors;

static void open_shape(const struct tiny_shape *shape) {
    file = tiny_model(shape);
    model = open_model(file);
    vocab = shape->vocab;
    host_device_open(&device, model);
}
static void close_shape(void) {
    CHECK(llamac_kv_bytes(model) == 0, "%zu bytes of pages leak", llamac_kv_bytes(model));
    host_device_close(&device);
    llamac_model_close(&model);
    free(file.data);
    while (n_factors) free(factors[--n_factors]);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
}

// Two sessions that get the same calls: one on the device, and the one that it must equal.
struct twins { llamac_session *on_device, *plain; };
static struct twins open_twins(llamac_session_options options) {
    struct twins t;
    options.threads = 1;
    t.plain = open_session_with(model, options);
    options.on_device = 1;
    t.on_device = open_session_with(model, options);
    return t;
}
static void close_twins(struct twins *t) { llamac_session_close(&t->on_device), llamac_session_close(&t->plain); }

static void check_same(const float *of_device, const float *expected, size_t n, const char *what, int layer) {
    size_t i = 0;
    while (i < n && !memcmp(&of_device[i], &expected[i], sizeof(float))) i++;
    CHECK(i == n, "%s of layer %d: number %zu is %.9g, expected %.9g", what, layer, i, (double)of_device[i],
          (double)expected[i]);
}

static void eval_twins(struct twins *t, const llamac_row *rows, int n) {
    float *a = take_floats(n, vocab), *b = take_floats(n, vocab);
    CHECK(!llamac_eval(t->on_device, rows, n, a, NULL, &err), "%s", err.message);
    CHECK(!llamac_eval(t->plain, rows, n, b, NULL, &err), "%s", err.message);
    check_same(a, b, (size_t)n * (size_t)vocab, "logits", -1);
    free(a), free(b);
}

// n rows of one sequence or, mixed, of the first two.
static void append_twins(struct twins *t, int sequence, int n, int mixed) {
    llamac_row *rows = take(sizeof *rows * (size_t)n);
    int lengths[2] = { llamac_length(t->plain, 0), llamac_length(t->plain, 1) };
    for (int i = 0; i < n; i++) {
        const int s = mixed && i % 3 == 0 ? 1 - sequence : sequence;
        rows[i] = (llamac_row){ token_at(s, lengths[s], vocab), s, lengths[s], i % 2 == n % 2 };
        lengths[s]++;
    }
    eval_twins(t, rows, n);
    free(rows);
}

// Every stage of every layer. types: (n), of an encoder, which has no logits.
static void observe_rows(struct twins *t, const llamac_row *rows, int n, const int32_t *types) {
    int per_layer, count = 0;
    llamac_observation observations[2][LLAMAC_N_STAGES * 8];
    size_t widths[LLAMAC_N_STAGES * 8];
    const int n_layers = (int)model->config->n_layers;
    for (int stage = 0; stage < LLAMAC_N_STAGES; stage++) {
        if (types && stage == LLAMAC_STAGE_LOGITS) continue;
        const size_t width = llamac_stage_width(t->plain, stage, &per_layer);
        for (int l = 0; l < (per_layer ? n_layers : 1) && width; l++, count++) {
            widths[count] = width;
            for (int i = 0; i < 2; i++)
                observations[i][count] = (llamac_observation){ stage, l, take_floats(n, (int)width) };
        }
    }
    float *logits = types ? NULL : take_floats(n, vocab);
    for (int i = 0; i < 2; i++) {
        const llamac_eval_options options = { .observations = observations[i], .n_observations = count,
                                              .types = types };
        CHECK(!llamac_eval(i ? t->plain : t->on_device, rows, n, logits, &options, &err), "%s", err.message);
    }
    for (int i = 0; i < count; i++) {
        const llamac_observation *o = &observations[0][i];
        check_same(o->out, observations[1][i].out, (size_t)n * widths[i], llamac_stage_name(o->stage), o->layer);
        free(o->out), free(observations[1][i].out);
    }
    free(logits);
}
static void observe_twins(struct twins *t, int n) {
    llamac_row *rows = take(sizeof *rows * (size_t)n);
    const int start = llamac_length(t->plain, 0);
    for (int i = 0; i < n; i++) rows[i] = (llamac_row){ token_at(0, start + i, vocab), 0, start + i, 1 };
    observe_rows(t, rows, n, NULL);
    free(rows);
}

// An encoder's texts of these lengths, at most 3. mixed: the rows of the second and the third one alternate.
static void text_twins(struct twins *t, const int *lengths, int n_texts, int mixed) {
    int n = 0, total = 0, at[3] = { 0 };
    for (int i = 0; i < n_texts; i++) total += lengths[i];
    llamac_row *rows = take(sizeof *rows * (size_t)total);
    int32_t *types = take(sizeof *types * (size_t)total);
    for (int i = 0; i < n_texts; i++)
        for (int left = lengths[i] - at[i]; left > 0; left--) {
            int s = i;
            if (mixed && i == 1 && n % 2 && at[2] < lengths[2]) s = 2, left++;
            types[n] = n % 3;
            rows[n++] = (llamac_row){ token_at(s, at[s], vocab), s, at[s], 1 };
            at[s]++;
        }
    observe_rows(t, rows, total, types);
    free(rows), free(types);
    for (int i = 0; i < n_texts; i++) {
        CHECK(llamac_length(t->on_device, i) == lengths[i], "length %d", llamac_length(t->on_device, i));
        CHECK(!llamac_truncate(t->on_device, i, 0, &err) && !llamac_truncate(t->plain, i, 0, &err), "%s", err.message);
    }
}

static void draft_twins(struct twins *t, int sequence, uint64_t *state) {
    enum { N = 7 };
    llamac_draft drafts[N];
    float a[N * 128], b[N * 128];
    for (int i = 0; i < N; i++) {
        int parent = i - 1;
        while (parent >= 0 && random_below(state, 3) == 0) parent = drafts[parent].parent;
        drafts[i] = (llamac_draft){ random_below(state, vocab), sequence, parent, 1 };
    }
    CHECK(!llamac_eval_drafts(t->on_device, drafts, N, a, NULL, &err), "%s", err.message);
    CHECK(!llamac_eval_drafts(t->plain, drafts, N, b, NULL, &err), "%s", err.message);
    check_same(a, b, N * (size_t)vocab, "logits of drafts", -1);
    const int chosen = random_below(state, N);
    CHECK(!llamac_accept(t->on_device, chosen, &err) && !llamac_accept(t->plain, chosen, &err), "%s", err.message);
}

// Sigmoids, groups and biases for the choice in all layers, which have attention.
static struct tiny_shape with_routers(void) {
    struct tiny_shape shape = tiny_mixers;
    shape.mixers = 2;
    return shape;
}

static struct tiny_shape with_chunks(void) {
    struct tiny_shape shape = with_routers();
    shape.chunks = 1, shape.window = 9;
    return shape;
}

static void plans_have_the_bits_of_the_graph(void) {
    struct tiny_shape gated_last = tiny_mamba, normed_inside = tiny_llama, gated_heads = tiny_recurrent,
                      ternary = tiny_few_bits, rounded = tiny_mixed;
    gated_last.mamba = STATE_NORM_BEFORE_GATE, normed_inside.sub_norms = 1, gated_heads.recurrent = 2;
    ternary.sub_norms = rounded.sub_norms = 2;
    const struct tiny_shape routers = with_routers(), chunks = with_chunks();
    const struct tiny_shape *const shapes[] = { &tiny_llama, &tiny_experts, &tiny_gpt2, &tiny_mixed, &tiny_exact,
                                                &tiny_q8, &tiny_features, &tiny_layered, &tiny_mixture,
                                                &routers, &chunks, &tiny_mixers, &tiny_recurrent, &tiny_mamba,
                                                &gated_last, &tiny_beside, &tiny_parts, &normed_inside, &gated_heads,
                                                &tiny_latent, &ternary, &rounded, &tiny_distant };
    static const int kv_dtypes[] = { LLAMAC_F16, LLAMAC_Q8, LLAMAC_F32 };
    for (int i = 0; i < (int)ARRAY_LEN(shapes) + 1; i += sparser(2)) {
        struct tiny_shape shape = *shapes[i % (int)ARRAY_LEN(shapes)];
        if (i == (int)ARRAY_LEN(shapes)) shape.norm_after_rope = 1, shape.rope_dim = 6;
        open_shape(&shape);
        struct twins t = open_twins((llamac_session_options){
            .n_sequences = 2, .kv_dtype = kv_dtypes[i % 3], .numerics = i == 4 ? LLAMAC_FAST : LLAMAC_EXACT });
        observe_twins(&t, 5);
        append_twins(&t, 0, 61, 1);
        append_twins(&t, 1, 1, 0);
        uint64_t state = 3;
        draft_twins(&t, 0, &state);
        observe_twins(&t, 2);
        close_twins(&t);
        close_shape();
    }
}

// On the CPU, 300 rows are two chunks; on a device, a text is in one.
static void plans_have_the_bits_of_encoders(void) {
    static const int kv_dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };
    for (int i = 0; i < 4; i++) {
        open_shape(i % 2 ? &tiny_biased : &tiny_encoder);
        struct twins t = open_twins((llamac_session_options){ .n_sequences = 3, .kv_dtype = kv_dtypes[i % 3] });
        text_twins(&t, (int[]){ 9, 40, 21 }, 3, 0);
        CHECK(device.forwards == 1, "%d chunks", device.forwards);
        text_twins(&t, (int[]){ 230, 9, 40 }, 3, 1);
        CHECK(device.forwards == 3, "%d chunks", device.forwards - 1);
        if (i < 2) text_twins(&t, (int[]){ 300, 1, 257 }, 3, 0);
        CHECK(device.forwards == (i < 2 ? 6 : 3), "%d chunks", device.forwards - 3);
        close_twins(&t);
        close_shape();
    }
}

static float *random_factor(size_t bytes, uint64_t *state) {
    float *x = factors[n_factors++] = take(bytes);
    for (size_t i = 0; i < bytes / sizeof *x; i++) x[i] = 0.4f * random_float(state);
    return x;
}

// Adapts two of three matrices of the file, with ranks of 1 to 4, some with scales.
static void adapt_matrices(void) {
    llamac_slot slot;
    llamac_slot_iterator slots = { .config = model->config, .layers = model->file.layers };
    uint64_t state = 7;
    for (size_t i = 0; i < model->file.n_tensors && llamac_slot_next(&slots, &slot);) {
        if (strcmp(model->file.tensors[i].name, slot.name)) continue;
        i++;
        const int is_of_heads = strstr(slot.name, "attn_k_b.") || strstr(slot.name, "attn_v_b.");
        if (!slot.is_matrix || is_of_heads || i % 3 == 0) continue;
        const uint64_t rank = 1 + random_below(&state, 4);
        const int is_embedding = strstr(slot.name, "embedding.weight") != NULL;
        const size_t a_bytes = is_embedding ? llamac_matrix_bytes(LLAMAC_F32, slot.columns, rank)
                                            : llamac_matrix_bytes(LLAMAC_F32, rank, slot.columns),
                     b_bytes = llamac_matrix_bytes(LLAMAC_F32, slot.rows, rank),
                     n_scales = i % 4 || is_embedding ? 0 : (size_t)slot.rows;
        const float *a = random_factor(a_bytes, &state), *b = random_factor(b_bytes, &state),
                    *scales = n_scales ? random_factor(sizeof(float) * n_scales, &state) : NULL;
        CHECK(!llamac_model_adapt(model, slot.name, (int)rank, a, a_bytes, b, b_bytes, scales, n_scales, &err), "%s",
              err.message);
    }
}

static void plans_have_the_bits_of_adapters(void) {
    struct tiny_shape rounded = tiny_mixed;
    rounded.sub_norms = 2;
    const struct tiny_shape routers = with_routers();
    const struct tiny_shape *const shapes[] = { &tiny_experts, &tiny_gpt2, &tiny_features, &tiny_layered, &tiny_mixture,
                                                &routers, &tiny_mixers, &tiny_recurrent, &tiny_mamba,
                                                &tiny_beside, &tiny_parts, &tiny_latent, &rounded, &tiny_encoder };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        file = tiny_model(shapes[i]);
        model = open_model(file);
        vocab = shapes[i]->vocab;
        adapt_matrices();
        CHECK(n_factors > 10, "%d factors", n_factors);
        host_device_open(&device, model);
        struct twins t = open_twins((llamac_session_options){ .n_sequences = 2 });
        if (model->config->two_sided) {
            text_twins(&t, (int[]){ 9, 31 }, 2, 0);
        } else {
            observe_twins(&t, 5);
            append_twins(&t, 0, 31, 1);
            append_twins(&t, 1, 1, 0);
        }
        close_twins(&t);
        close_shape();
    }
}

// 300 rows are two chunks; observers and logits continue in the second.
static void evals_of_several_chunks_continue(void) {
    struct tiny_shape shape = tiny_llama;
    shape.n_layers = 1;
    open_shape(&shape);
    struct twins t = open_twins((llamac_session_options){ .n_sequences = 2 });
    observe_twins(&t, 300);
    CHECK(device.reads == 0 && device.writes == 0 && device.copies == 0, "pages were copied");
    close_twins(&t);
    close_shape();
}

// The same pages, as saved.
static void check_pages(struct twins *t, int sequence) {
    llamac_group group;
    const int length = llamac_length(t->plain, sequence);
    CHECK(llamac_length(t->on_device, sequence) == length, "length %d", llamac_length(t->on_device, sequence));
    for (int g = 0; llamac_group_at(t->plain, g, &group); g++)
        for (int p = llamac_first_position(t->plain, sequence, g) / KV_PAGE; p * KV_PAGE < length; p++) {
            uint8_t *bytes[2];
            const int last = min_int(length - p * KV_PAGE, KV_PAGE);
            for (int i = 0; i < 2; i++) {
                llamac_session *s = i ? t->plain : t->on_device;
                llamac_page *page = llamac_hold_page(s, sequence, g, p, &err);
                bytes[i] = take(group.page_bytes);
                CHECK(page && !llamac_copy_page(s, g, page, 0, last, bytes[i], &err), "%s", err.message);
                llamac_drop_page(page);
            }
            CHECK(!memcmp(bytes[0], bytes[1], group.page_bytes), "page %d of group %d", p, g);
            free(bytes[0]), free(bytes[1]);
        }
}

// Saves a sequence of the device's session, and restores it from memory in another sequence of both.
static void save_twins(struct twins *t, int from, int to) {
    llamac_group group;
    llamac_page *pages[2][64];
    int32_t starts[8];
    size_t n = 0;
    const int length = llamac_length(t->plain, from);
    for (int g = 0; llamac_group_at(t->plain, g, &group); g++) {
        starts[g] = llamac_first_position(t->on_device, from, g);
        for (int p = starts[g] / KV_PAGE; p * KV_PAGE < length; p++, n++) {
            llamac_page *page = llamac_hold_page(t->on_device, from, g, p, &err);
            uint8_t *bytes = take(group.page_bytes);
            size_t size;
            CHECK(!llamac_page_data(page, &size) && size == group.page_bytes, "a device's page has %zu bytes", size);
            CHECK(!llamac_read_page(page, bytes, &err), "%s", err.message);
            for (int i = 0; i < 2; i++) {
                pages[i][n] = llamac_take_page(i ? t->plain : t->on_device, g, &err);
                CHECK(pages[i][n] && !llamac_write_page(pages[i][n], bytes, &err), "%s", err.message);
            }
            llamac_drop_page(page);
            free(bytes);
        }
    }
    if (n)
        CHECK(llamac_restore(t->on_device, to, length, starts, pages[1], n, &err) &&
              strstr(err.message, "is not a page of group"), "%s", err.message);
    CHECK(!llamac_restore(t->on_device, to, length, starts, pages[0], n, &err), "%s", err.message);
    CHECK(!llamac_restore(t->plain, to, length, starts, pages[1], n, &err), "%s", err.message);
    for (size_t i = 0; i < 2 * n; i++) llamac_drop_page(pages[i / n][i % n]);
}

static void cut_twins(struct twins *t, int sequence, uint64_t *state) {
    const int least = llamac_shortest_length(t->plain, sequence), length = llamac_length(t->plain, sequence);
    const int to = least + random_below(state, length - least + 1);
    CHECK(!llamac_truncate(t->on_device, sequence, to, &err) && !llamac_truncate(t->plain, sequence, to, &err), "%s",
          err.message);
}
static void fork_twins(struct twins *t, int to, int from, int length) {
    CHECK(!llamac_fork(t->on_device, to, t->on_device, from, length, &err), "%s", err.message);
    CHECK(!llamac_fork(t->plain, to, t->plain, from, length, &err), "%s", err.message);
}
static void shift_twins(struct twins *t, int sequence, uint64_t *state) {
    const int begin = random_below(state, llamac_length(t->plain, sequence) + 1);
    const int by = random_below(state, llamac_longest_shift(t->plain, sequence, begin) + 1);
    CHECK(!llamac_shift(t->on_device, sequence, begin, begin + by, &err), "%s", err.message);
    CHECK(!llamac_shift(t->plain, sequence, begin, begin + by, &err), "%s", err.message);
}

static void any_calls_leave_the_same_pages(void) {
    for (int round = 0; round < 2; round++) {
        struct tiny_shape shape = round ? tiny_experts : tiny_llama;
        shape.n_layers = 2, shape.dtype = LLAMAC_F32, shape.context = 900;
        open_shape(&shape);
        uint64_t state = 3 + (uint64_t)round;
        struct twins t = open_twins((llamac_session_options){ .n_sequences = 2, .kv_dtype = round ? LLAMAC_F16
                                                                                                  : LLAMAC_Q8 });
        if (round) append_twins(&t, 0, 500, 0);   // windows drop pages
        for (int i = 0; i < 40; i++) {
            const int s = random_below(&state, 2), length = llamac_length(t.plain, s);
            switch (length > 600 ? 1 : random_below(&state, 6)) {
            case 0: append_twins(&t, s, 1 + random_below(&state, 40), random_below(&state, 2)); break;
            case 1: cut_twins(&t, s, &state); break;
            case 2: fork_twins(&t, 1 - s, s, length); append_twins(&t, s, 2, 1); break;
            case 3: shift_twins(&t, s, &state); break;
            case 4: draft_twins(&t, s, &state); break;
            default: save_twins(&t, s, 1 - s); break;
            }
            check_pages(&t, 0), check_pages(&t, 1);
        }
        CHECK(device.copies && device.reads && device.writes, "%d copies, %d reads, %d writes", device.copies,
              device.reads, device.writes);
        llamac_session_info a, b;
        llamac_session_describe(t.on_device, &a), llamac_session_describe(t.plain, &b);
        CHECK(a.kv_bytes == b.kv_bytes, "%zu bytes, expected %zu", a.kv_bytes, b.kv_bytes);
        close_twins(&t);
        close_shape();
    }
}

// Runs a call with each callback failing in turn. The call must fail, and its sequences must not change.
enum call { EVAL, DRAFTS, SHIFT, CALLS };
static int run_call(llamac_session *s, enum call call, float *logits) {
    const llamac_row rows[] = { { 5, 0, 70, 0 }, { 6, 0, 71, 1 } };
    const llamac_draft drafts[] = { { 1, 0, -1, 0 }, { 2, 0, 0, 1 }, { 3, 0, -1, 0 } };
    switch (call) {
    case EVAL: return llamac_eval(s, rows, 2, logits, NULL, &err);
    case DRAFTS: return llamac_eval_drafts(s, drafts, 3, logits, NULL, &err);
    default: return llamac_shift(s, 0, 3, 10, &err);
    }
}

static void a_device_that_fails_changes_nothing(void) {
    struct tiny_shape shape = tiny_llama;
    shape.n_layers = 1;
    open_shape(&shape);
    for (enum call call = 0; call < CALLS; call++) {
        float *expected = take_floats(1, vocab), *logits = take_floats(1, vocab);
        int failed = 1, tries = 0;
        for (long n = 0; failed; n++, tries++) {
            struct twins t = open_twins((llamac_session_options){ .n_sequences = 2 });
            append_twins(&t, 0, 70, 0);
            fork_twins(&t, 1, 0, 70);   // the last page is shared: it is copied
            llamac_session_info info;
            llamac_session_describe(t.on_device, &info);
            const size_t most = llamac_kv_bytes(model) + (call == EVAL ? info.page_bytes : 0);   // the copy remains
            const int writes = device.writes;
            device.calls = 0, device.fail_at = n;
            failed = run_call(t.on_device, call, n ? logits : expected) || !n;
            device.fail_at = 0;
            const int is_lost = call == SHIFT && device.writes > writes && failed && n;
            CHECK(!n || !failed || (err.code == LLAMAC_DEVICE_FAILED && !strcmp(err.message, "the device is lost")),
                  "%s", err.message);
            CHECK(!n || !failed || llamac_length(t.on_device, 0) == (is_lost ? 0 : 70), "length %d",
                  llamac_length(t.on_device, 0));
            if (n && failed && !is_lost) {
                CHECK(llamac_kv_bytes(model) <= most, "%zu bytes, at most %zu", llamac_kv_bytes(model), most);
                CHECK(!run_call(t.on_device, call, logits), "retried: %s", err.message);
                CHECK(call == SHIFT || !memcmp(logits, expected, sizeof(float) * (size_t)vocab), "call %ld", n);
                CHECK(!run_call(t.plain, call, logits), "%s", err.message);
                check_pages(&t, 0);
            }
            close_twins(&t);
        }
        CHECK(tries > 2, "call %d calls the device %d times", (int)call, tries - 1);
        free(expected), free(logits);
    }
    close_shape();
}

static void any_allocation_can_fail(void) {
    open_shape(&tiny_llama);
    int failed = 1;
    for (long n = 1; failed && n < 50; n++) {
        struct twins t = open_twins((llamac_session_options){ .n_sequences = 2 });
        append_twins(&t, 0, 70, 0);
        fork_twins(&t, 1, 0, 70);
        llamac_test_fail_allocation(n);
        failed = run_call(t.on_device, SHIFT, NULL);
        llamac_test_fail_allocation(0);
        CHECK(!failed || (err.code == LLAMAC_NO_MEMORY && llamac_length(t.on_device, 0) == 70), "%s", err.message);
        CHECK(!failed || !run_call(t.on_device, SHIFT, NULL), "%s", err.message);
        CHECK(!run_call(t.plain, SHIFT, NULL), "%s", err.message);
        check_pages(&t, 0), check_pages(&t, 1);
        close_twins(&t);
    }
    CHECK(!failed, "more than 50 allocations");
    close_shape();
}

static void evals_on_a_device_are_cancelled(void) {
    open_shape(&tiny_llama);
    struct twins t = open_twins((llamac_session_options){ .n_sequences = 2 });
    append_twins(&t, 0, 3, 0);
    const llamac_row row = { 1, 0, 3, 0 };
    const llamac_draft draft = { 1, 0, -1, 0 };
    int32_t cancel = 0;
    int done = 5;
    const llamac_eval_options options = { .cancel = &cancel, .rows_done = &done };
    for (int i = 0; i < 2; i++) {   // the device gives up; it is not asked
        device.cancels = !i, cancel = i;
        const int forwards = device.forwards;
        CHECK(llamac_eval(t.on_device, &row, 1, NULL, &options, &err) && err.code == LLAMAC_CANCELLED && done == 0 &&
              !strcmp(err.message, "cancelled: 0 of 1 rows were computed and kept"), "%s", err.message);
        CHECK(llamac_eval_drafts(t.on_device, &draft, 1, NULL, &options, &err) && err.code == LLAMAC_CANCELLED, "%s",
              err.message);
        CHECK(device.forwards == forwards + (i ? 0 : 2), "%d chunks", device.forwards - forwards);
    }
    device.cancels = 0;
    append_twins(&t, 0, 3, 0);
    close_twins(&t);
    close_shape();
}

static void sessions_of_both_kinds_share_nothing(void) {
    file = tiny_model(&tiny_llama);
    model = open_model(file);
    vocab = tiny_llama.vocab;
    llamac_session *s;
    const llamac_session_options options = { .n_sequences = 1, .threads = 1, .on_device = 1 };
    CHECK(llamac_session_open(&s, model, &options, &err) && strstr(err.message, "no device"), "%s", err.message);
    llamac_set_kv_budget(model, 1 << 20);
    host_device_open(&device, model);
    CHECK(llamac_model_use_device(model, &device.callbacks, &err) && strstr(err.message, "already"), "%s", err.message);
    struct twins t = open_twins((llamac_session_options){ .n_sequences = 2 });
    append_twins(&t, 0, 3, 0);
    CHECK(llamac_fork(t.plain, 1, t.on_device, 0, 3, &err) && strstr(err.message, "on a device"), "%s", err.message);
    llamac_session_info info;
    llamac_session_describe(t.plain, &info);
    CHECK(llamac_kv_bytes(model) == 2 * info.page_bytes, "%zu bytes of pages", llamac_kv_bytes(model));
    llamac_set_kv_budget(model, info.page_bytes);   // of each kind
    llamac_row rows[62];
    for (int i = 0; i < 62; i++) rows[i] = (llamac_row){ 1, 0, 3 + i, 0 };
    CHECK(llamac_eval(t.on_device, rows, 62, NULL, NULL, &err) && err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    append_twins(&t, 0, 3, 0);
    close_twins(&t);
    close_shape();
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(plans_have_the_bits_of_the_graph);
    RUN(plans_have_the_bits_of_encoders);
    RUN(plans_have_the_bits_of_adapters);
    RUN(evals_of_several_chunks_continue);
    RUN(any_calls_leave_the_same_pages);
    RUN(a_device_that_fails_changes_nothing);
    RUN(any_allocation_can_fail);
    RUN(evals_on_a_device_are_cancelled);
    RUN(sessions_of_both_kinds_share_nothing);
    return finish_tests("test_device");
}
