// SPDX-License-Identifier: MIT
// test_states.c - recurrent layers: the same bits however an input is computed, and states that are kept, cut, forked,
// restored and abandoned.
#include "common.h"
#include "open_shape.h"
#include "saving.h"

enum { N = 200 };
static float *expected;   // (N, vocab): the logits of sequence 0, computed at once with the scalar kernels
static const struct tiny_shape *expected_of;   // the shape they belong to

static void open_with(const struct tiny_shape *shape) {
    open_shape(shape);
    if (expected_of == shape) return;
    free(expected);
    expected = take_floats(N, vocab);
    expected_of = shape;
    llamac_session *s = open_session(model, 1, 0, 1, "scalar");
    prefill(s, 0, N, vocab, expected);
    llamac_session_close(&s);
}
static void open_recurrent(void) { open_with(&tiny_recurrent); }

// Appends the tokens [from, to) of sequence 0's text to a sequence, and compares their logits.
static void append(llamac_session *s, int sequence, int from, int to, const char *what) {
    llamac_row *rows = take(sizeof *rows * (size_t)(to - from + 1));
    float *logits = take_floats(to - from + 1, vocab);
    for (int i = from; i < to; i++) rows[i - from] = (llamac_row){ token_at(0, i, vocab), sequence, i, 1 };
    CHECK(!llamac_eval(s, rows, to - from, logits, NULL, &err), "%s: %s", what, err.message);
    CHECK(!memcmp(logits, expected + (size_t)(from * vocab), sizeof(float) * (size_t)((to - from) * vocab)),
          "%s: positions %d to %d", what, from, to);
    free(rows), free(logits);
}

static void the_state_moves_the_logits(void) {
    open_recurrent();
    const struct layer *layer = &model->layers[0];
    CHECK(layer->record->mixer == MIXER_DELTA_NET && layer->state_qkv.data, "the first layer is not recurrent");
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    float *logits = take_floats(1, vocab);
    const llamac_row row = { token_at(0, 9, vocab), 0, 0, 1 };
    CHECK(!llamac_eval(s, &row, 1, logits, NULL, &err), "%s", err.message);
    CHECK(memcmp(logits, expected + 9 * vocab, sizeof(float) * (size_t)vocab), "the logits ignore the past");
    for (int i = 0; i < N * vocab; i++)
        if (!(expected[i] > -1e3f && expected[i] < 1e3f)) CHECK(0, "logit %d is %g", i, (double)expected[i]);
    llamac_session_close(&s);
    free(logits);
    close_shape();
}

// Each kernel set computes each chunk, with one of the numbers of threads: another one in the next kernel set.
static void every_way_to_compute_gives_the_same_bits(const struct tiny_shape *shape) {
    open_with(shape);
    static const int chunks[] = { 1, 2, 3, 5, 7, 64, N };
    const int n_chunks = ARRAY_LEN(chunks);
    int supported;
    const char *isa;
    for (int i = 0; (isa = llamac_isa_at((size_t)i, &supported)); i++)
        for (int c = sparse ? i % n_chunks : 0; supported && c < n_chunks; c += sparser(n_chunks)) {
            const int chunk = chunks[c], threads = 1 + (i + c) % up_to_threads(3);
            llamac_session *s = open_session(model, 1, 0, threads, isa);
            for (int from = 0; from < N; from += chunk) append(s, 0, from, min_int(N, from + chunk), isa);
            llamac_session_close(&s);
        }
    close_shape();
}

// Rows of several sequences in one chunk, also interleaved, with other sequences' tokens beside them.
static void batches_give_the_same_bits(const struct tiny_shape *shape) {
    open_with(shape);
    llamac_session *s = open_session(model, 3, 0, up_to_threads(2), NULL);
    llamac_row rows[12];
    float *logits = take_floats(12, vocab);
    for (int at = 0, each = 2; at + each <= N; at += each, each = 4) {   // kept states are amid a sequence's rows
        static const int order[12] = { 0, 1, 0, 0, 2, 2, 1, 2, 0, 1, 1, 2 };
        int next[3] = { at, at, at }, n = 0;
        for (int i = 0; i < 12; i++) {
            const int q = order[i], position = next[q]++;
            const llamac_row row = { token_at(q == 1 ? 5 : 0, position, vocab), q, position, 1 };
            if (position < at + each) rows[n++] = row;
        }
        CHECK(!llamac_eval(s, rows, n, logits, NULL, &err), "%s", err.message);
        for (int i = 0; i < n; i++)
            if (rows[i].sequence != 1)
                CHECK(!memcmp(logits + i * vocab, expected + rows[i].position * vocab, sizeof(float) * (size_t)vocab),
                      "sequence %d, position %d", rows[i].sequence, rows[i].position);
    }
    free(logits);
    llamac_session_close(&s);
    close_shape();
}

static void sequences_are_cut_to_kept_states_only(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    append(s, 0, 0, 100, "a prompt");
    for (int i = 100; i < 110; i++) append(s, 0, i, i + 1, "an answer");
    static const int cuts[][2] = { { 110, 110 }, { 109, 100 }, { 100, 100 }, { 99, 64 }, { 63, 0 }, { 0, 0 } };
    for (size_t i = 0; i < ARRAY_LEN(cuts); i++) {
        const int cut = llamac_cut_length(s, 0, cuts[i][0]);
        CHECK(cut == cuts[i][1], "cut to %d: %d, expected %d", cuts[i][0], cut, cuts[i][1]);
    }
    CHECK(llamac_cut_length(s, 0, 111) == -1 && llamac_cut_length(s, 2, 0) == -1, "a length that does not exist");
    CHECK(llamac_shortest_length(s, 0) == 110, "%d", llamac_shortest_length(s, 0));
    CHECK(llamac_truncate(s, 0, 109, &err) && strstr(err.message, "known after 100 positions, not after 109"), "%s",
          err.message);
    CHECK(llamac_fork(s, 1, s, 0, 99, &err) && strstr(err.message, "known after 64 positions"), "%s", err.message);
    CHECK(!llamac_fork(s, 1, s, 0, 64, &err), "%s", err.message);
    CHECK(!llamac_truncate(s, 0, 100, &err), "%s", err.message);
    append(s, 0, 100, 105, "after a truncation");
    append(s, 1, 64, 90, "a fork");
    CHECK(!llamac_fork(s, 1, s, 0, 105, &err), "%s", err.message);
    append(s, 0, 105, 120, "the source of a fork");
    append(s, 1, 105, 120, "a fork of the whole");
    CHECK(!llamac_truncate(s, 1, 0, &err) && !llamac_truncate(s, 0, 0, &err), "%s", err.message);
    CHECK(llamac_kv_bytes(model) == 0, "%zu bytes of empty sequences", llamac_kv_bytes(model));
    append(s, 0, 0, 70, "from the start");
    llamac_session_close(&s);
    close_shape();
}

// A prompt of many evals ends once. Long answers do not push out the state at its end.
static void the_end_of_the_prompt_stays(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    for (int from = 0; from < 150; from += 10) append(s, 0, from, from + 10, "a prompt");
    llamac_row row = { .want_logits = 0 };
    for (row.position = 150; row.position < 1200; row.position++) {
        row.token = token_at(0, row.position, vocab);
        CHECK(!llamac_eval(s, &row, 1, NULL, NULL, &err), "%s", err.message);
    }
    CHECK(llamac_cut_length(s, 0, 255) == 150 && llamac_cut_length(s, 0, 149) >= 128, "%d, %d",
          llamac_cut_length(s, 0, 255), llamac_cut_length(s, 0, 149));
    CHECK(llamac_cut_length(s, 0, 1199) == 1152 && llamac_cut_length(s, 0, 1151) == 1024, "%d, %d",
          llamac_cut_length(s, 0, 1199), llamac_cut_length(s, 0, 1151));
    const size_t state = s->state_group.page_bytes, bytes = llamac_held_bytes(s);
    CHECK(s->sequences[0].n_states <= session_max_kept(s) && bytes >= 5 * state, "%d states, %zu bytes",
          s->sequences[0].n_states, bytes);
    CHECK(!llamac_truncate(s, 0, 150, &err), "%s", err.message);
    append(s, 0, 150, N, "after the prompt");
    llamac_session_close(&s);
    close_shape();
}

static void a_cancelled_eval_changes_no_state(void) {
    open_recurrent();
    for (int threads = 1; threads <= up_to_threads(2); threads++) {
        llamac_session *s = open_session(model, 1, 0, threads, NULL);
        append(s, 0, 0, 70, "before");
        llamac_row rows[60];
        const int32_t cancel = 1;
        for (int i = 0; i < 60; i++) rows[i] = (llamac_row){ token_at(3, i, vocab), 0, 70 + i, 0 };
        session_begin_chunk(s, rows, 0);
        CHECK(llamac_eval(s, rows, 60, NULL, &(llamac_eval_options){ .cancel = &cancel }, &err), "not cancelled");
        CHECK(llamac_length(s, 0) == 70, "%d", llamac_length(s, 0));
        append(s, 0, 70, 140, "after");
        llamac_session_close(&s);
    }
    close_shape();
}

// A prompt of several chunks, and the logits of its rows, computed at once.
static int n_long;
static llamac_row *long_rows;
static float *long_expected, *long_found;   // (n_long, vocab)

static void open_long(const struct tiny_shape *shape) {
    open_shape(shape);
    n_long = sparse && !model->max_experts ? 600 : 900;   // at least two chunks from 300 on
    long_expected = take_floats(n_long, vocab), long_found = take_floats(n_long, vocab);
    long_rows = take(sizeof *long_rows * (size_t)n_long);
    for (int p = 0; p < n_long; p++) long_rows[p] = (llamac_row){ token_at(0, p, vocab), 0, p, 1 };
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    CHECK(!llamac_eval(s, long_rows, n_long, long_expected, NULL, &err), "%s", err.message);
    llamac_session_close(&s);
}
static void close_long(void) {
    free(long_rows), free(long_expected), free(long_found);
    close_shape();
}

// Compares the logits of rows [from, from + n) in long_found.
static void check_long(int from, int n, const char *what) {
    CHECK(!memcmp(long_found, long_expected + from * vocab, sizeof(float) * (size_t)(n * vocab)), "%s: %d rows from %d",
          what, n, from);
}

// Empties the two sequences of a session, which must leave nothing.
static void close_emptied(llamac_session *s) {
    CHECK(!llamac_truncate(s, 0, 0, &err) && !llamac_truncate(s, 1, 0, &err), "%s", err.message);
    CHECK(s->kv_bytes == 0 && llamac_kv_bytes(model) == 0, "%zu, %zu bytes of empty sequences", s->kv_bytes,
          llamac_kv_bytes(model));
    llamac_session_close(&s);
}

// Chunks of a long prompt that begin and end where no state is kept, also without memory for kept states.
static void long_prompts_continue_from_any_length(const struct tiny_shape *shape) {
    open_long(shape);
    static const int starts[] = { 1, 100, 300, 300 };
    for (size_t i = sparse ? ARRAY_LEN(starts) - 2 : 0; i < ARRAY_LEN(starts); i++) {
        const int start = starts[i], is_tight = i + 1 == ARRAY_LEN(starts);
        llamac_session *s = open_session(model, 2, 0, 1, NULL);
        CHECK(!llamac_eval(s, long_rows, start, long_found, NULL, &err) && !llamac_fork(s, 1, s, 0, start, &err), "%s",
              err.message);
        const int pages = n_long / KV_PAGE + 1 - start / KV_PAGE;   // of which one replaces a shared one
        if (is_tight)
            llamac_set_kv_budget(model, llamac_kv_bytes(model) + (size_t)pages * s->groups[0].page_bytes +
                                 s->state_group.page_bytes);
        CHECK(!llamac_eval(s, long_rows + start, n_long - start, long_found, NULL, &err), "%s", err.message);
        llamac_set_kv_budget(model, 0);
        check_long(start, n_long - start, "chunks");
        CHECK(s->sequences[0].n_spares == 1, "%d spare pages after the eval", s->sequences[0].n_spares);
        CHECK(!is_tight || llamac_cut_length(s, 0, n_long - 1) <= start, "%d", llamac_cut_length(s, 0, n_long - 1));
        close_emptied(s);
    }
    close_long();
}
static void long_prompts_with_delta_nets(void) { long_prompts_continue_from_any_length(&tiny_recurrent); }
static void long_prompts_with_experts(void) { long_prompts_continue_from_any_length(&tiny_parts); }

// Kernels whose products request, after some of them, that the eval be cancelled.
static struct {
    void (*gemm)(const struct gemm *g);
    struct kernels table;
    int32_t left, request;
} stopping;

static void stopping_gemm(const struct gemm *g) {
    if (!__atomic_sub_fetch(&stopping.left, 1, __ATOMIC_RELAXED))
        __atomic_store_n(&stopping.request, 1, __ATOMIC_RELAXED);
    stopping.gemm(g);
}

// Computes rows of sequence 0 with kernels that cancel the eval after some products; 0: never. Returns the number of
// products. *done receives the number of rows that stay.
static int eval_until(llamac_session *s, const llamac_row *rows, int n, int products, float *logits, int *done) {
    const struct kernels *kernels = s->kernels;
    stopping.gemm = kernels->gemm, stopping.table = *kernels, stopping.table.gemm = stopping_gemm;
    stopping.left = products ? products : INT32_MAX, stopping.request = 0;
    s->kernels = &stopping.table;
    const llamac_eval_options options = { .cancel = &stopping.request, .rows_done = done };
    const int failed = llamac_eval(s, rows, n, logits, &options, &err);
    CHECK(failed ? products && err.code == LLAMAC_CANCELLED : !products, "%d products: %s", products, err.message);
    s->kernels = kernels;
    return INT32_MAX - stopping.left;
}

// An eval of several chunks is cancelled at many points, with and without a state before it and with a shared one. What
// stays is whole chunks; the rest, and what follows a cut, has the bits of an eval that was not cancelled.
static void cancelled_long_prompts_continue(const struct tiny_shape *shape) {
    open_long(shape);
    enum { POINTS = 7 };
    static const int starts[] = { 0, 100, 300 };
    for (size_t i = sparse ? ARRAY_LEN(starts) - 1 : 0; i < ARRAY_LEN(starts); i++) {
        const int start = starts[i], is_shared = i == 2;
        int products = 0;
        for (int point = 0; point <= POINTS; point += sparser(4)) {
            llamac_session *s = open_session(model, 2, 0, point ? 1 + point % up_to_threads(2) : 1, NULL);
            CHECK(!start || !llamac_eval(s, long_rows, start, long_found, NULL, &err), "%s", err.message);
            CHECK(!is_shared || !llamac_fork(s, 1, s, 0, start, &err), "%s", err.message);
            int done, last = products * point / (POINTS + 1);
            const int n = eval_until(s, long_rows + start, n_long - start, last, long_found, &done);
            if (!point) products = n;
            const int at = start + done, whole = at == n_long || done % chunk_rows(s) == 0;
            CHECK(llamac_length(s, 0) == at && whole && (point > 0) == (at < n_long), "%d rows from %d on", done,
                  start);
            CHECK(s->sequences[0].n_spares <= 1, "%d spare pages", s->sequences[0].n_spares);
            CHECK(at == n_long || !llamac_eval(s, long_rows + at, n_long - at, long_found + done * vocab, NULL, &err),
                  "%s", err.message);
            check_long(start, n_long - start, "a cancelled eval and the rest");
            const int cut = llamac_cut_length(s, 0, at - (at > 0)), more = min_int(n_long - cut, 20);
            CHECK(!llamac_truncate(s, 0, cut, &err), "%s", err.message);
            CHECK(!llamac_eval(s, long_rows + cut, more, long_found, NULL, &err), "%s", err.message);
            check_long(cut, more, "after a cut");
            close_emptied(s);
        }
    }
    close_long();
}
static void cancelled_prompts_with_delta_nets(void) { cancelled_long_prompts_continue(&tiny_recurrent); }
static void cancelled_prompts_with_mamba(void) { cancelled_long_prompts_continue(&tiny_mamba); }
static void cancelled_prompts_with_short_convolutions(void) { cancelled_long_prompts_continue(&tiny_mixers); }
static void cancelled_prompts_with_experts(void) { cancelled_long_prompts_continue(&tiny_parts); }

static void kept_states_make_room(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    append(s, 0, 0, 100, "a prompt");
    llamac_set_kv_budget(model, llamac_kv_bytes(model) + s->groups[0].page_bytes);
    append(s, 1, 0, 10, "without room");
    CHECK(llamac_cut_length(s, 0, 99) == 0 && llamac_cut_length(s, 0, 100) == 100, "%d",
          llamac_cut_length(s, 0, 99));
    llamac_set_kv_budget(model, 0);
    append(s, 0, 100, 120, "after");
    llamac_session_close(&s);
    close_shape();
}

// An eval that cannot succeed drops no states, and another one drops those that are the smallest loss.
static void kept_states_make_room_one_at_a_time(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    append(s, 0, 0, N, "a prompt");
    append(s, 1, 0, 100, "another prompt");
    llamac_row rows[60];
    for (int i = 0; i < 60; i++) rows[i] = (llamac_row){ 1, 1, 100 + i, 0 };
    const size_t used = llamac_kv_bytes(model);
    llamac_set_kv_budget(model, used - 2 * s->state_group.page_bytes);
    CHECK(llamac_eval(s, rows, 60, NULL, NULL, &err) && err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    CHECK(llamac_length(s, 1) == 100 && llamac_kv_bytes(model) == used, "%zu, %zu", llamac_kv_bytes(model), used);
    CHECK(llamac_cut_length(s, 0, N - 1) == 192 && llamac_cut_length(s, 1, 99) == 64, "%d, %d",
          llamac_cut_length(s, 0, N - 1), llamac_cut_length(s, 1, 99));

    llamac_set_kv_budget(model, used);
    llamac_error unused = { .message = "unused" };
    CHECK(!llamac_eval(s, rows, 60, NULL, NULL, &unused), "%s", unused.message);
    CHECK(!strcmp(unused.message, "unused") && !unused.code, "%s", unused.message);
    CHECK(llamac_cut_length(s, 0, N - 1) == 192 && llamac_cut_length(s, 1, 99) == 0, "%d, %d",
          llamac_cut_length(s, 0, N - 1), llamac_cut_length(s, 1, 99));

    // a row that needs no memory is computed also if the budget is less than what is in use
    for (int i = 0; i < 2; i++) {
        llamac_set_kv_budget(model, (size_t)i);
        const llamac_row row = { 1, 1, 160 + i, 0 };
        CHECK(!llamac_eval(s, &row, 1, NULL, NULL, &err), "%s", err.message);
    }
    llamac_set_kv_budget(model, 0);
    llamac_session_close(&s);
    close_shape();
}

// States whose memory another session uses are not dropped. Those that sequences of the session share are.
static void shared_states_make_room_together(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 2, 0, 1, NULL), *other = open_session(model, 1, 0, 1, NULL);
    append(s, 0, 0, 100, "a prompt");
    CHECK(!llamac_fork(s, 1, s, 0, 100, &err) && !llamac_fork(other, 0, s, 0, 100, &err), "%s", err.message);
    const size_t page = s->groups[0].page_bytes;
    const llamac_row both[] = { { 1, 0, 100, 0 }, { 1, 1, 100, 0 } };
    llamac_set_kv_budget(model, llamac_kv_bytes(model) + page);
    CHECK(llamac_eval(s, both, 2, NULL, NULL, &err) && err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    CHECK(llamac_cut_length(s, 0, 99) == 64 && llamac_cut_length(s, 1, 99) == 64, "%d, %d",
          llamac_cut_length(s, 0, 99), llamac_cut_length(s, 1, 99));
    llamac_session_close(&other);

    // one copy of the partial page that the two share, and a state for each, of which sequence 0 has a spare page
    llamac_set_kv_budget(model, llamac_kv_bytes(model) + page);
    CHECK(!llamac_eval(s, both, 2, NULL, NULL, &err), "%s", err.message);
    CHECK(llamac_cut_length(s, 0, 99) == 0 && llamac_cut_length(s, 1, 99) == 0, "%d, %d",
          llamac_cut_length(s, 0, 99), llamac_cut_length(s, 1, 99));
    llamac_set_kv_budget(model, 0);
    llamac_session_close(&s);
    close_shape();
}

static void a_restored_state_continues(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    append(s, 0, 0, 70, "before");
    llamac_group info;
    CHECK(llamac_group_at(s, 1, &info) && info.n_kv_heads == 0 && info.page_bytes == s->state_group.page_bytes &&
          !llamac_group_at(s, 2, &info), "the states are not the last group");
    llamac_page *pages[3];
    for (int i = 0; i < 3; i++) {
        pages[i] = llamac_hold_page(s, 0, i / 2, i % 2, &err);
        CHECK(pages[i], "%s", err.message);
    }
    static const int32_t first_positions[2];
    CHECK(llamac_restore(s, 1, 70, first_positions, pages, 2, &err) && strstr(err.message, "need 3"), "%s",
          err.message);
    CHECK(llamac_restore(s, 1, 70, first_positions, (llamac_page *[]){ pages[0], pages[1], pages[0] }, 3, &err) &&
          strstr(err.message, "is not a state"), "%s", err.message);
    CHECK(!llamac_restore(s, 1, 70, first_positions, pages, 3, &err), "%s", err.message);
    append(s, 0, 70, 90, "the source");
    append(s, 1, 70, 90, "restored");
    for (int i = 0; i < 3; i++) llamac_drop_page(pages[i]);
    llamac_session_close(&s);
    close_shape();
}

// A sequence that is restored with its earlier states can be cut to them, and to its own length.
static void earlier_states_are_restored(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    append(s, 0, 0, 70, "a prompt");
    append(s, 0, 70, 72, "an answer");
    static const int32_t first_positions[2], lengths[] = { 70, 64, 0 };
    llamac_page *pages[5], *many[MAX_KEPT];
    int32_t descending[MAX_KEPT];
    for (int i = 0; i < 5; i++) {
        pages[i] = llamac_hold_page(s, 0, i >= 2, i < 2 ? i : i - 2, &err);
        CHECK(pages[i], "%s", err.message);
        if (i >= 2) CHECK(llamac_state_length(s, 0, i - 2) == (i == 2 ? 72 : lengths[i - 3]), "state %d", i - 2);
    }
    CHECK(llamac_state_length(s, 0, 3) == -1 && llamac_state_length(s, 0, -1) == -1 &&
          llamac_state_length(s, 2, 0) == -1, "a state that does not exist");
    CHECK(!llamac_hold_page(s, 0, 1, 3, &err) && strstr(err.message, "sequence 0 has 3 states"), "%s", err.message);
    CHECK(llamac_restore_states(s, 0, lengths, pages + 3, 2, &err) && strstr(err.message, "was not just restored"),
          "%s", err.message);
    CHECK(!llamac_restore(s, 1, 72, first_positions, pages, 3, &err), "%s", err.message);
    const size_t before = llamac_kv_bytes(model);
    static const struct { int32_t lengths[2]; const char *expected; } wrong[] = {
        { { 72, 64 }, "state 0 is after 72 positions, expected 1 to 71" },
        { { 64, 64 }, "state 1 is after 64 positions, expected 1 to 63" },
        { { 64, 0 }, "state 1 is after 0 positions" },
    };
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++)
        CHECK(llamac_restore_states(s, 1, wrong[i].lengths, pages + 3, 2, &err) &&
              strstr(err.message, wrong[i].expected), "%s", err.message);
    CHECK(llamac_restore_states(s, 1, lengths, pages, 2, &err) && strstr(err.message, "page 0 is not a state"), "%s",
          err.message);
    CHECK(llamac_check_restore(s, 0, 72, first_positions, pages, 3, wrong[0].lengths, 2, &err) &&
          strstr(err.message, wrong[0].expected), "%s", err.message);
    CHECK(!llamac_check_restore(s, 0, 72, first_positions, pages, 3, lengths, 2, &err), "%s", err.message);
    CHECK(llamac_length(s, 0) == 72 && s->sequences[0].n_states == 3, "a check changed a sequence");
    for (int i = 0; i < MAX_KEPT; i++) many[i] = pages[3], descending[i] = 71 - i;
    CHECK(llamac_restore_states(s, 1, descending, many, MAX_KEPT, &err) && strstr(err.message, "at most 15"), "%s",
          err.message);
    CHECK(llamac_kv_bytes(model) == before, "a refused state stayed");
    CHECK(!llamac_restore_states(s, 1, lengths, pages + 3, 2, &err), "%s", err.message);
    append(s, 1, 72, 150, "restored");
    for (int i = 0; i < 3; i++) {
        const int to = i ? lengths[i - 1] : 72;
        CHECK(!llamac_truncate(s, 1, to, &err), "%s", err.message);
        append(s, 1, to, 90, "after a cut to a restored state");
    }
    CHECK(!llamac_restore(s, 1, 72, first_positions, pages, 3, &err), "%s", err.message);
    CHECK(!llamac_restore_states(s, 1, descending, many, MAX_KEPT - 1, &err), "%s", err.message);
    CHECK(s->sequences[1].n_states == session_max_kept(s), "%d states", s->sequences[1].n_states);
    append(s, 1, 72, 80, "one state too many");   // of 57 to 72, 58 is the one that others replace best
    CHECK(s->sequences[1].n_states == session_max_kept(s), "%d states", s->sequences[1].n_states);
    for (int length = 57; length <= 72; length++)
        CHECK(llamac_cut_length(s, 1, length) == length - (length == 58), "%d: %d", length,
              llamac_cut_length(s, 1, length));
    for (int i = 0; i < 5; i++) llamac_drop_page(pages[i]);
    llamac_session_close(&s);
    CHECK(llamac_kv_bytes(model) == 0, "%zu bytes", llamac_kv_bytes(model));
    close_shape();
}

// An accepted draft continues its sequence, whose states at multiples of 256 stay, as without drafts.
static void accepted_drafts_keep_states(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 2, 0, up_to_threads(2), NULL);
    llamac_session *alone = open_session(model, 1, 0, 1, NULL);
    float *logits = take_floats(10, vocab), *one = take_floats(1, vocab);
    for (int at = 0; at < 520; ) {
        llamac_draft drafts[10];
        for (int i = 0; i < 10; i++) drafts[i] = (llamac_draft){ token_at(0, at + i, vocab), 0, i - 1, 1 };
        drafts[7].token = (drafts[7].token + 1) % vocab;   // wrong
        CHECK(!llamac_eval_drafts(s, drafts, 10, logits, NULL, &err), "%s", err.message);
        const int right = 1 + at % 7;
        CHECK(!llamac_accept(s, right / 2, &err) && !llamac_accept(s, right - 1, &err), "%s", err.message);
        for (int i = 0; i < right; i++, at++) {
            const llamac_row row = { token_at(0, at, vocab), 0, at, 1 };
            CHECK(!llamac_eval(alone, &row, 1, one, NULL, &err), "%s", err.message);
            CHECK(!memcmp(one, logits + i * vocab, sizeof(float) * (size_t)vocab), "position %d", at);
        }
        CHECK(llamac_length(s, 0) == at, "%d", llamac_length(s, 0));
        for (int length = at; length >= 0; length -= 5)
            CHECK(llamac_cut_length(s, 0, length) == llamac_cut_length(alone, 0, length), "%d of %d: %d, %d", length,
                  at, llamac_cut_length(s, 0, length), llamac_cut_length(alone, 0, length));
    }
    CHECK(!llamac_truncate(s, 0, 256, &err), "%s", err.message);
    CHECK(!llamac_truncate(s, 0, 0, &err) && !llamac_truncate(alone, 0, 0, &err), "%s", err.message);
    CHECK(llamac_kv_bytes(model) == 0, "%zu bytes of empty sequences", llamac_kv_bytes(model));
    free(logits), free(one);
    llamac_session_close(&s), llamac_session_close(&alone);
    close_shape();
}

// Without memory for the states there are no drafts, and the kept states stay.
static void drafts_take_no_kept_states(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    append(s, 0, 0, 100, "a prompt");
    llamac_set_kv_budget(model, llamac_kv_bytes(model) + s->state_group.page_bytes);
    const llamac_draft drafts[] = { { 1, 0, -1, 0 }, { 2, 0, 0, 0 } };
    CHECK(llamac_eval_drafts(s, drafts, 2, NULL, NULL, &err) && err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    CHECK(llamac_cut_length(s, 0, 99) == 64, "%d", llamac_cut_length(s, 0, 99));
    llamac_set_kv_budget(model, llamac_kv_bytes(model) + 2 * s->state_group.page_bytes);   // none for the last page
    CHECK(llamac_eval_drafts(s, drafts, 2, NULL, NULL, &err) && err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    CHECK(llamac_cut_length(s, 0, 99) == 64, "%d", llamac_cut_length(s, 0, 99));
    llamac_set_kv_budget(model, 0);

    // drafts use the pages of those before them, of which nothing stays after the last ones
    const size_t before = llamac_kv_bytes(model);
    CHECK(!llamac_eval_drafts(s, drafts, 2, NULL, NULL, &err), "%s", err.message);
    const size_t with_drafts = llamac_kv_bytes(model);
    CHECK(with_drafts >= before + 2 * s->state_group.page_bytes, "%zu, %zu", before, with_drafts);
    llamac_set_kv_budget(model, with_drafts);
    CHECK(!llamac_eval_drafts(s, drafts, 2, NULL, NULL, &err), "%s", err.message);
    CHECK(!llamac_eval_drafts(s, drafts, 1, NULL, NULL, &err), "%s", err.message);
    CHECK(llamac_kv_bytes(model) == with_drafts - s->state_group.page_bytes, "%zu", llamac_kv_bytes(model));
    CHECK(!llamac_eval_drafts(s, NULL, 0, NULL, NULL, &err), "%s", err.message);
    CHECK(llamac_kv_bytes(model) == before, "%zu, %zu", before, llamac_kv_bytes(model));
    llamac_set_kv_budget(model, 0);
    append(s, 0, 100, 120, "after");
    llamac_session_close(&s);
    close_shape();
}

static void what_a_state_cannot_do_is_refused(void) {
    open_recurrent();
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    append(s, 0, 0, 20, "before");
    CHECK(llamac_shift(s, 0, 2, 4, &err) && err.code == LLAMAC_UNSUPPORTED && strstr(err.message, "recurrent layers"),
          "%s", err.message);
    append(s, 0, 20, 40, "after");
    llamac_session_close(&s);
    close_shape();
}

static void every_way_with_delta_nets(void) { every_way_to_compute_gives_the_same_bits(&tiny_recurrent); }
static void every_way_with_short_convolutions(void) { every_way_to_compute_gives_the_same_bits(&tiny_mixers); }
static void every_way_with_mamba(void) { every_way_to_compute_gives_the_same_bits(&tiny_mamba); }
static void batches_with_delta_nets(void) { batches_give_the_same_bits(&tiny_recurrent); }
static void every_way_with_both_mixers(void) { every_way_to_compute_gives_the_same_bits(&tiny_beside); }
static void batches_with_both_mixers(void) { batches_give_the_same_bits(&tiny_beside); }
static void every_way_with_parts(void) { every_way_to_compute_gives_the_same_bits(&tiny_parts); }
static void batches_with_parts(void) { batches_give_the_same_bits(&tiny_parts); }
static void batches_with_mamba(void) { batches_give_the_same_bits(&tiny_mamba); }
static void batches_with_short_convolutions(void) { batches_give_the_same_bits(&tiny_mixers); }

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(every_way_with_short_convolutions);
    RUN(batches_with_short_convolutions);
    RUN(every_way_with_mamba);
    RUN(batches_with_mamba);
    RUN(every_way_with_both_mixers);
    RUN(batches_with_both_mixers);
    RUN(every_way_with_parts);
    RUN(batches_with_parts);
    RUN(the_state_moves_the_logits);
    RUN(every_way_with_delta_nets);
    RUN(batches_with_delta_nets);
    if (!emulated) {   // what does not depend on the processor
        RUN(sequences_are_cut_to_kept_states_only);
        RUN(the_end_of_the_prompt_stays);
        RUN(a_cancelled_eval_changes_no_state);
        RUN(long_prompts_with_delta_nets);
        RUN(long_prompts_with_experts);
        RUN(cancelled_prompts_with_delta_nets);
        RUN(cancelled_prompts_with_mamba);
        RUN(cancelled_prompts_with_short_convolutions);
        RUN(cancelled_prompts_with_experts);
        RUN(kept_states_make_room);
    RUN(kept_states_make_room_one_at_a_time);
    RUN(shared_states_make_room_together);
        RUN(a_restored_state_continues);
        RUN(earlier_states_are_restored);
        RUN(accepted_drafts_keep_states);
        RUN(drafts_take_no_kept_states);
        RUN(what_a_state_cannot_do_is_refused);
    }
    free(expected);
    return finish_tests("test_states");
}
