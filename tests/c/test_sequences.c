// SPDX-License-Identifier: MIT
// test_sequences.c - pages of the KV cache: shared by forks, dropped behind windows, limited by a budget, released.
#include "common.h"
#include "kv_pages.h"
#include "open_shape.h"

static struct tiny_shape tiny_windowed(void) {
    struct tiny_shape shape = tiny_experts;
    shape.context = 1300;
    return shape;
}

// Appends n tokens to a sequence in calls of at most `chunk` rows; logits: of the last row. salt: chooses the tokens.
// Returns the eval's result.
static int extend(llamac_session *s, int sequence, int n, int chunk, int salt, float *logits) {
    llamac_row *rows = take(sizeof *rows * (size_t)n);
    const int start = llamac_length(s, sequence);
    for (int i = 0; i < n; i++)
        rows[i] = (llamac_row){ token_at(salt, start + i, vocab), sequence, start + i, i == n - 1 };
    int failed = 0;
    for (int i = 0; i < n && !failed; i += chunk)
        failed = llamac_eval(s, rows + i, min_int(chunk, n - i), logits, NULL, &err);
    free(rows);
    return failed;
}
// The same, computed by a session of its own: `prefix` tokens of salt 0, then n tokens of `salt`.
static void expect(int prefix, int n, int salt, float *logits) {
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    CHECK(!(prefix && extend(s, 0, prefix, prefix, 0, logits)) && !extend(s, 0, n, n, salt, logits), "%s", err.message);
    llamac_session_close(&s);
}
static size_t kv_bytes(const llamac_session *s) {
    llamac_session_info info;
    llamac_session_describe(s, &info);
    return info.kv_bytes;
}

// ---- pages

// Takes pages of several slabs and returns them in random order, with failing allocations in between.
static void pages_are_distinct_and_released(void) {
    enum { MOST = 40, PAGE = 2 << 20, SLOTS = 10 };
    struct kv_pool pool = { 0 };
    uint8_t *taken[SLOTS] = { 0 };
    uint64_t state = 1;
    for (int i = 0; i < 400; i++) {
        const int slot = random_below(&state, SLOTS);
        const size_t bytes = slot % 3 ? PAGE : PAGE / 2;
        uint8_t *page = taken[slot];
        if (page) {
            CHECK(page[0] == 1 + slot && page[bytes - 1] == 1 + slot, "page %d was handed out twice", slot);
            kv_page_release(page);
            taken[slot] = NULL;
            continue;
        }
        llamac_test_fail_allocation(i % 5 ? 0 : 1);
        taken[slot] = page = kv_page_alloc(&pool, bytes, MOST, &err);
        llamac_test_fail_allocation(0);
        if (!page) continue;
        CHECK((uintptr_t)page % 64 == 0, "a page is not aligned");
        page[0] = page[bytes - 1] = (uint8_t)(1 + slot);
    }
    for (int slot = 0; slot < SLOTS; slot++)
        if (taken[slot]) kv_page_release(taken[slot]);
    CHECK(!pool.slabs && !pool.bytes, "a slab without pages was not released");
    CHECK(llamac_live_objects() == 0, "%ld slabs leak", llamac_live_objects());
}

static void the_last_reference_releases_a_page(void) {
    struct kv_pool pool = { 0 };
    uint8_t *page = kv_page_alloc(&pool, 4096, 1, &err);
    CHECK(page && !kv_page_is_shared(page), "a new page is shared");
    CHECK(kv_page_share(page) == page && kv_page_is_shared(page), "not shared");
    kv_page_release(page);
    CHECK(!kv_page_is_shared(page) && pool.bytes == 4096, "%zu bytes", pool.bytes);
    kv_page_release(page);
    CHECK(pool.bytes == 0 && !pool.slabs, "%zu bytes", pool.bytes);
}

// ---- forks

static void check_forks(const struct tiny_shape *shape) {
    open_shape(shape);
    float *logits = take_floats(1, vocab), *expected = take_floats(1, vocab);
    const size_t bytes = sizeof(float) * (size_t)vocab;
    llamac_session *s = open_session(model, 2, 0, 1, NULL), *other = open_session(model, 1, 0, up_to_threads(2), NULL);
    CHECK(!extend(s, 0, 140, 140, 0, logits), "%s", err.message);
    const size_t before = llamac_kv_bytes(model);
    static const int lengths[] = { 0, 1, 63, 64, 65, 128, 139, 140 };
    for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
        const int length = lengths[i];
        CHECK(!llamac_truncate(s, 1, 0, &err) && !llamac_truncate(other, 0, 0, &err), "%s", err.message);
        CHECK(!llamac_fork(s, 1, s, 0, length, &err), "%s", err.message);
        CHECK(!llamac_fork(other, 0, s, 0, length, &err), "%s", err.message);
        CHECK(llamac_kv_bytes(model) == before, "length %d: a fork takes memory", length);
        CHECK(llamac_length(s, 1) == length && llamac_length(other, 0) == length, "length %d", length);
        CHECK(!extend(s, 1, 70, 7, 1, logits), "%s", err.message);
        expect(length, 70, 1, expected);
        CHECK(!memcmp(logits, expected, bytes), "length %d: a fork in the session", length);
        CHECK(!extend(other, 0, 70, 70, 2, logits), "%s", err.message);
        expect(length, 70, 2, expected);
        CHECK(!memcmp(logits, expected, bytes), "length %d: a fork in another session", length);
    }
    CHECK(!extend(s, 0, 3, 3, 0, logits), "%s", err.message);
    expect(0, 143, 0, expected);
    CHECK(!memcmp(logits, expected, bytes), "the source of forks");
    llamac_session_close(&s);   // before the session that shares its pages
    CHECK(!llamac_truncate(other, 0, 100, &err) && !extend(other, 0, 5, 1, 2, logits), "%s", err.message);
    llamac_session_close(&other);
    free(logits), free(expected);
    close_shape();
}

static void forks_give_the_bits_of_computing_again(void) {
    check_forks(&tiny_llama);
    if (emulated) return;
    check_forks(&tiny_experts);
    check_forks(&tiny_gpt2);
    check_forks(&tiny_latent);
    check_forks(&tiny_distant);
}

// The source writes to a shared page after the fork, and before.
static void forks_do_not_see_each_others_writes(void) {
    open_shape(&tiny_llama);
    float *logits = take_floats(1, vocab), *expected = take_floats(1, vocab);
    const size_t bytes = sizeof(float) * (size_t)vocab;
    llamac_session *s = open_session(model, 3, 0, 1, NULL);
    CHECK(!extend(s, 0, 90, 90, 0, logits) && !llamac_fork(s, 1, s, 0, 80, &err), "%s", err.message);
    CHECK(!llamac_truncate(s, 0, 75, &err) && !extend(s, 0, 30, 30, 5, logits), "%s", err.message);
    expect(75, 30, 5, expected);
    CHECK(!memcmp(logits, expected, bytes), "the source");
    CHECK(!llamac_fork(s, 2, s, 1, 78, &err) && !extend(s, 2, 9, 9, 6, logits), "%s", err.message);
    expect(78, 9, 6, expected);
    CHECK(!memcmp(logits, expected, bytes), "the fork of a fork");
    CHECK(!extend(s, 1, 10, 10, 0, logits), "%s", err.message);
    expect(0, 90, 0, expected);
    CHECK(!memcmp(logits, expected, bytes), "the fork");
    for (int i = 0; i < 3; i++) CHECK(!llamac_truncate(s, i, 0, &err), "%s", err.message);
    CHECK(kv_bytes(s) == 0 && llamac_kv_bytes(model) == 0, "%zu bytes", llamac_kv_bytes(model));
    llamac_session_close(&s);
    free(logits), free(expected);
    close_shape();
}

static void impossible_forks_are_refused(void) {
    open_shape(&tiny_llama);
    llamac_session *s = open_session(model, 2, LLAMAC_F32, 1, NULL), *f16 = open_session(model, 1, LLAMAC_F16, 1, NULL);
    const llamac_session_options small = { .n_sequences = 1, .kv_dtype = LLAMAC_F32, .threads = 1, .context = 10 };
    llamac_session *narrow, *fast = open_session_with(model, (llamac_session_options){
        .n_sequences = 1, .kv_dtype = LLAMAC_F32, .threads = 1, .numerics = LLAMAC_FAST });
    float *logits = take_floats(1, vocab);
    CHECK(!llamac_session_open(&narrow, model, &small, &err) && !extend(s, 0, 20, 20, 0, logits), "%s", err.message);
    CHECK(llamac_fork(s, 2, s, 0, 5, &err) && strstr(err.message, "sequence is 2, expected 0 to 1"), "%s", err.message);
    CHECK(llamac_fork(s, 1, s, 3, 5, &err) && strstr(err.message, "sequence is 3, expected 0 to 1"), "%s", err.message);
    CHECK(llamac_fork(s, 1, s, 0, 21, &err) && strstr(err.message, "fork to length 21"), "%s", err.message);
    CHECK(llamac_fork(f16, 0, s, 0, 5, &err) && strstr(err.message, "f16 and f32"), "%s", err.message);
    CHECK(llamac_fork(fast, 0, s, 0, 5, &err) && strstr(err.message, "fast numerics"), "%s", err.message);
    CHECK(llamac_fork(narrow, 0, s, 0, 11, &err) && err.code == LLAMAC_CONTEXT_FULL, "%s", err.message);
    llamac_model *twin = open_model(file);
    llamac_session *foreign = open_session(twin, 1, LLAMAC_F32, 1, NULL);
    CHECK(llamac_fork(foreign, 0, s, 0, 5, &err) && strstr(err.message, "different models"), "%s", err.message);
    CHECK(!llamac_fork(s, 0, s, 0, 5, &err) && llamac_length(s, 0) == 5, "a fork of a sequence to itself truncates it");
    llamac_session_close(&s), llamac_session_close(&f16), llamac_session_close(&narrow);
    llamac_session_close(&fast);
    llamac_session_close(&foreign), llamac_model_close(&twin);
    free(logits);
    close_shape();
}

// ---- windows

static void windows_drop_pages(void) {
    const struct tiny_shape shape = tiny_windowed();
    open_shape(&shape);
    float *logits = take_floats(1, vocab), *expected = take_floats(1, vocab);
    const size_t bytes = sizeof(float) * (size_t)vocab;
    llamac_session *s = open_session(model, 2, 0, up_to_threads(2), NULL);
    CHECK(s->n_groups == 2 && s->groups[0].window == 0 && s->groups[1].window == shape.window, "groups");
    CHECK(!extend(s, 0, 1200, 1200, 0, logits), "%s", err.message);
    expect(0, 1200, 0, expected);
    CHECK(!extend(s, 1, 1200, 50, 0, logits) && !memcmp(logits, expected, bytes), "chunks of 50: %s", err.message);
    for (int q = 0; q < 2; q++) {
        const struct kv_table *full = &s->sequences[q].kv[0], *window = &s->sequences[q].kv[1];
        CHECK(full->first == 0 && full->end == 19 && window->end == 19, "sequence %d", q);
        CHECK(window->end - window->first <= ceil_div(shape.window + KV_REWIND, KV_PAGE) + 1, "pages %d to %d",
              window->first, window->end);
    }
    const size_t held = kv_bytes(s);
    CHECK(!extend(s, 0, 64, 1, 0, logits), "%s", err.message);
    CHECK(kv_bytes(s) == held + s->groups[0].page_bytes, "%zu bytes, then %zu", held, kv_bytes(s));

    // what can be discarded gives the same bits; what cannot is refused and changes nothing
    const int least = llamac_shortest_length(s, 1);
    CHECK(least > 0 && least <= 1200 - KV_REWIND, "shortest length %d", least);
    CHECK(llamac_truncate(s, 1, least - 1, &err) && strstr(err.message, "window"), "%s", err.message);
    CHECK(llamac_fork(s, 0, s, 1, least - 1, &err) && llamac_length(s, 0) == 1264, "%s", err.message);
    CHECK(!llamac_fork(s, 0, s, 1, least, &err) && !extend(s, 0, 40, 40, 3, logits), "%s", err.message);
    expect(least, 40, 3, expected);
    CHECK(!memcmp(logits, expected, bytes), "a fork to the shortest length");
    CHECK(!llamac_truncate(s, 1, least, &err) && !extend(s, 1, 40, 1, 3, logits), "%s", err.message);
    CHECK(!memcmp(logits, expected, bytes), "truncated to the shortest length");
    CHECK(!llamac_truncate(s, 1, 0, &err) && llamac_shortest_length(s, 1) == 0, "%s", err.message);
    CHECK(!extend(s, 1, 9, 9, 0, logits), "%s", err.message);
    expect(0, 9, 0, expected);
    CHECK(!memcmp(logits, expected, bytes), "from the start");
    llamac_session_close(&s);
    free(logits), free(expected);
    close_shape();
}

// A long eval takes pages for the window once and moves them along, also when a fork holds the first ones.
static void long_evals_hold_no_more_than_their_windows(void) {
    struct tiny_shape shape = tiny_windowed();
    shape.n_layers = 2, shape.context = 5000;
    open_shape(&shape);
    float *logits = take_floats(1, vocab);
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    CHECK(!extend(s, 0, 500, 500, 0, logits) && !llamac_fork(s, 1, s, 0, 500, &err), "%s", err.message);
    const size_t full = s->groups[0].page_bytes * (size_t)ceil_div(5000, KV_PAGE),
                 at_once = (size_t)((shape.window + KV_REWIND + chunk_rows(s)) / KV_PAGE + 2) + 8;
    llamac_set_kv_budget(model, full + s->groups[0].page_bytes + s->groups[1].page_bytes * at_once);
    CHECK(!extend(s, 0, 4500, 4500, 0, logits), "%s", err.message);
    llamac_session_close(&s);
    free(logits);
    close_shape();
}

// ---- budgets and failures

static void an_eval_beyond_the_budget_changes_nothing(void) {
    open_shape(&tiny_llama);
    float *logits = take_floats(1, vocab), *expected = take_floats(1, vocab);
    llamac_session *s = open_session(model, 2, 0, 1, NULL), *other = open_session(model, 1, 0, 1, NULL);
    expect(0, 230, 0, expected);
    const size_t page = s->groups[0].page_bytes;
    llamac_set_kv_budget(model, 5 * page + page / 2);
    CHECK(!extend(s, 0, 100, 100, 0, logits) && !extend(other, 0, 100, 100, 0, logits), "%s", err.message);
    CHECK(llamac_kv_bytes(model) == 4 * page, "%zu bytes", llamac_kv_bytes(model));
    CHECK(extend(s, 0, 130, 130, 0, logits) && err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    CHECK(strstr(err.message, "budget") && llamac_length(s, 0) == 100, "%s", err.message);
    CHECK(llamac_kv_bytes(model) == 4 * page && kv_bytes(s) == 2 * page, "%zu bytes", llamac_kv_bytes(model));
    CHECK(!llamac_fork(s, 1, s, 0, 100, &err), "a fork needs no memory: %s", err.message);
    CHECK(!extend(s, 1, 1, 1, 1, logits), "the copy of a page fits: %s", err.message);
    CHECK(extend(other, 0, 64, 64, 0, logits), "beyond the budget");
    CHECK(!llamac_truncate(other, 0, 0, &err) && !llamac_truncate(s, 1, 0, &err), "%s", err.message);
    CHECK(!extend(s, 0, 130, 130, 0, logits), "%s", err.message);
    CHECK(!memcmp(logits, expected, sizeof(float) * (size_t)vocab), "after failures");
    llamac_set_kv_budget(model, 1);
    CHECK(!extend(s, 0, 1, 1, 0, logits), "no further page is needed: %s", err.message);
    CHECK(extend(s, 0, 60, 60, 0, logits), "beyond the budget");
    llamac_set_kv_budget(model, 0);
    CHECK(!extend(s, 0, 60, 60, 0, logits), "%s", err.message);
    llamac_session_close(&s), llamac_session_close(&other);
    free(logits), free(expected);
    close_shape();
}

// Fails each allocation of an eval that copies a shared page, drops pages behind a window, and takes new ones.
static void any_allocation_of_a_forks_eval_can_fail(void) {
    const struct tiny_shape shape = tiny_windowed();
    open_shape(&shape);
    float *logits = take_floats(1, vocab), *expected = take_floats(1, vocab);
    expect(500, 300, 1, expected);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    CHECK(!extend(s, 0, 500, 500, 0, logits), "%s", err.message);
    int failed = 1;
    for (long n = 1; failed && n < 50; n++) {
        llamac_session *other = open_session(model, 2, 0, 1, NULL);
        CHECK(!llamac_fork(other, 1, s, 0, 500, &err), "%s", err.message);
        llamac_test_fail_allocation(n);
        failed = extend(other, 1, 300, 300, 1, logits);
        llamac_test_fail_allocation(0);
        CHECK(!failed || (err.code == LLAMAC_NO_MEMORY && llamac_length(other, 1) == 500), "%s", err.message);
        CHECK(!failed || !extend(other, 1, 300, 300, 1, logits), "allocation %ld: retried: %s", n, err.message);
        CHECK(!memcmp(logits, expected, sizeof(float) * (size_t)vocab), "allocation %ld", n);
        llamac_session_close(&other);
    }
    CHECK(!failed, "more than 50 allocations");
    llamac_session_close(&s);
    free(logits), free(expected);
    close_shape();
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(pages_are_distinct_and_released);
    RUN(the_last_reference_releases_a_page);
    RUN(forks_give_the_bits_of_computing_again);
    RUN(forks_do_not_see_each_others_writes);
    RUN(impossible_forks_are_refused);
    RUN(an_eval_beyond_the_budget_changes_nothing);
    if (!emulated) {   // thousands of rows, for code that does not depend on the processor
        RUN(windows_drop_pages);
        RUN(long_evals_hold_no_more_than_their_windows);
        RUN(any_allocation_of_a_forks_eval_can_fail);
    }
    return finish_tests("test_sequences");
}
