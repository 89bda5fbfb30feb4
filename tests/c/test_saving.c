// SPDX-License-Identifier: MIT
// test_saving.c - saved pages continue a sequence with the same bits; wrong pages are refused.
#include "common.h"
#include "open_shape.h"
#include "saving.h"

enum { MOST_PAGES = 64, MOST_GROUPS = 4 };
static void extend(llamac_session *s, int sequence, int n, float *logits) {
    llamac_row *rows = take(sizeof *rows * (size_t)n);
    const int start = llamac_length(s, sequence);
    for (int i = 0; i < n; i++)
        rows[i] = (llamac_row){ token_at(0, start + i, vocab), sequence, start + i, i == n - 1 };
    CHECK(!llamac_eval(s, rows, n, logits, NULL, &err), "%s", err.message);
    free(rows);
}

// A sequence outside of a session: its first positions and copies of its pages.
struct saved { int length, n_pages; int32_t first[MOST_GROUPS]; uint8_t *copies[MOST_PAGES]; int groups[MOST_PAGES]; };

static int group_count(const llamac_session *s) {
    llamac_group info;
    int n = 0;
    while (llamac_group_at(s, n, &info)) n++;
    return n;
}

static struct saved save(llamac_session *s, int sequence) {
    struct saved saved = { .length = llamac_length(s, sequence) };
    for (int g = 0; g < group_count(s); g++) {
        llamac_group info;
        CHECK(llamac_group_at(s, g, &info) == 1, "group %d", g);
        const int start = saved.first[g] = llamac_first_position(s, sequence, g);
        for (int p = start / KV_PAGE; p < ceil_div(saved.length, KV_PAGE); p++) {
            llamac_page *page = llamac_hold_page(s, sequence, g, p, &err);
            CHECK(page, "%s", err.message);
            saved.groups[saved.n_pages] = g;
            uint8_t *copy = saved.copies[saved.n_pages++] = take(info.page_bytes);
            CHECK(!llamac_copy_page(s, g, page, max_int(0, start - p * KV_PAGE),
                                    min_int(KV_PAGE, saved.length - p * KV_PAGE), copy, &err), "%s", err.message);
            llamac_drop_page(page);
        }
    }
    return saved;
}

static int restore(llamac_session *s, int sequence, const struct saved *saved) {
    llamac_page *pages[MOST_PAGES] = { 0 };
    for (int i = 0; i < saved->n_pages; i++) {
        size_t bytes;
        pages[i] = llamac_take_page(s, saved->groups[i], &err);
        CHECK(pages[i], "%s", err.message);
        void *data = llamac_page_data(pages[i], &bytes);
        memcpy(data, saved->copies[i], bytes);
    }
    const int failed = llamac_restore(s, sequence, saved->length, saved->first, pages, (size_t)saved->n_pages, &err);
    for (int i = 0; i < saved->n_pages; i++) llamac_drop_page(pages[i]);
    return failed;
}
static void discard(struct saved *saved) {
    for (int i = 0; i < saved->n_pages; i++) free(saved->copies[i]);
}

static void check_round_trip(const struct tiny_shape *shape, int kv_dtype, int length, int removed) {
    open_shape(shape);
    llamac_session *s = open_session(model, 1, kv_dtype, 1, NULL);
    llamac_session *other = open_session(model, 2, kv_dtype, up_to_threads(2), "scalar");
    float *logits = take_floats(1, vocab), *found = take_floats(1, vocab);
    extend(s, 0, length, logits);
    if (removed && llamac_shift(s, 0, 5, 5 + removed, &err)) CHECK(0, "%s", err.message);
    struct saved saved = save(s, 0);
    extend(other, 1, 70, found);   // is replaced
    CHECK(!restore(other, 1, &saved), "%s", err.message);
    CHECK(llamac_length(other, 1) == length - removed, "length %d", llamac_length(other, 1));
    CHECK(llamac_shortest_length(other, 1) == llamac_shortest_length(s, 0), "the shortest length");
    struct saved again = save(other, 1);
    CHECK(again.n_pages == saved.n_pages, "%d pages became %d", saved.n_pages, again.n_pages);
    for (int i = 0; i < saved.n_pages && i < again.n_pages; i++) {
        llamac_group info;
        llamac_group_at(s, saved.groups[i], &info);
        CHECK(!memcmp(saved.copies[i], again.copies[i], info.page_bytes), "page %d changed", i);
    }
    for (int step = 0; step < 3; step++) {
        extend(s, 0, 40, logits);
        extend(other, 1, 40, found);
        CHECK(!memcmp(logits, found, sizeof(float) * (size_t)vocab), "dtype %d, length %d, step %d", kv_dtype, length,
              step);
    }
    discard(&saved), discard(&again);
    free(logits), free(found);
    llamac_session_close(&s), llamac_session_close(&other);
    close_shape();
}

static void restored_sequences_continue_with_the_same_bits(void) {
    static const int dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 }, lengths[] = { 1, 63, 64, 150 };
    struct tiny_shape windowed = tiny_experts;
    windowed.context = 1300;
    for (size_t d = 0; d < ARRAY_LEN(dtypes); d += (size_t)sparser(2)) {
        for (size_t i = 0; i < ARRAY_LEN(lengths); i += (size_t)sparser(3))
            check_round_trip(&tiny_llama, dtypes[d], lengths[i], 0);
        check_round_trip(&tiny_gpt2, dtypes[d], 100, 0);
        check_round_trip(&tiny_latent, dtypes[d], 100, 0);
        check_round_trip(&windowed, dtypes[d], 600, 0);
        check_round_trip(&tiny_llama, dtypes[d], 150, 30);
        check_round_trip(&windowed, dtypes[d], 700, 50);
    }
}

// What memory held before does not appear in copies.
static void copies_show_only_their_positions(void) {
    open_shape(&tiny_llama);
    static const int dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };
    for (size_t d = 0; d < ARRAY_LEN(dtypes); d++) {
        llamac_session *s = open_session(model, 1, dtypes[d], 1, NULL);
        float *logits = take_floats(1, vocab);
        extend(s, 0, 64, logits);
        struct saved whole = save(s, 0);
        CHECK(!llamac_truncate(s, 0, 20, &err), "%s", err.message);
        struct saved cut = save(s, 0);
        llamac_group info;
        llamac_group_at(s, 0, &info);
        llamac_page *page = llamac_take_page(s, 0, &err);
        CHECK(page, "%s", err.message);
        size_t bytes, kept = 0, different = 0;
        memset(llamac_page_data(page, &bytes), 0xee, info.page_bytes);
        uint8_t *copy = take(info.page_bytes);
        CHECK(!llamac_copy_page(s, 0, page, 3, 3, copy, &err), "%s", err.message);
        for (size_t i = 0; i < bytes; i++) kept += copy[i] != 0;
        CHECK(kept == 0, "%zu bytes of no position", kept);
        CHECK(!llamac_copy_page(s, 0, page, 3, 4, copy, &err), "%s", err.message);
        for (size_t i = 0; i < bytes; i++) kept += copy[i] != 0;
        CHECK(kept > 0 && kept <= bytes / KV_PAGE, "%zu bytes of a position, of %zu in the page", kept, bytes);
        for (size_t i = 0; i < bytes; i++) different += cut.copies[0][i] && cut.copies[0][i] != whole.copies[0][i];
        CHECK(different == 0, "%zu bytes differ", different);
        llamac_drop_page(page);
        discard(&whole), discard(&cut);
        free(copy), free(logits);
        llamac_session_close(&s);
    }
    close_shape();
}

// Sequences that shared a page share it again.
static void pages_are_shared_and_counted_once(void) {
    open_shape(&tiny_llama);
    llamac_session *s = open_session(model, 3, 0, 1, NULL);
    float *logits = take_floats(1, vocab), *expected = take_floats(1, vocab);
    extend(s, 0, 100, logits);
    CHECK(!llamac_fork(s, 1, s, 0, 90, &err), "%s", err.message);
    llamac_page *pages[2], *same = llamac_hold_page(s, 1, 0, 0, &err);
    for (int p = 0; p < 2; p++) pages[p] = llamac_hold_page(s, 0, 0, p, &err);
    CHECK(same == pages[0], "the address of a shared page");
    size_t bytes;
    (void)llamac_page_data(same, &bytes);
    llamac_drop_page(same);
    CHECK(llamac_held_bytes(s) == 2 * bytes && llamac_kv_bytes(model) == 2 * bytes, "%zu bytes", llamac_held_bytes(s));
    CHECK(!llamac_restore(s, 2, 80, (const int32_t[]){ 0 }, pages, 2, &err), "%s", err.message);
    CHECK(!llamac_truncate(s, 0, 0, &err) && !llamac_truncate(s, 1, 0, &err), "%s", err.message);
    CHECK(llamac_held_bytes(s) == 2 * bytes, "%zu bytes", llamac_held_bytes(s));
    extend(s, 0, 80, logits), extend(s, 0, 5, logits), extend(s, 2, 5, expected);   // copies its last page
    CHECK(!memcmp(logits, expected, sizeof(float) * (size_t)vocab), "a shared page changed");
    for (int p = 0; p < 2; p++) llamac_drop_page(pages[p]);
    CHECK(!llamac_restore(s, 2, 0, (const int32_t[]){ 0 }, NULL, 0, &err), "%s", err.message);
    CHECK(!llamac_truncate(s, 0, 0, &err) && llamac_held_bytes(s) == 0, "%zu bytes", llamac_held_bytes(s));
    free(logits), free(expected);
    llamac_session_close(&s);
    close_shape();
}

static void expect_error(int failed, const char *part) {
    CHECK(failed && strstr(err.message, part), "'%s' does not contain '%s'", err.message, part);
    err.message[0] = 0;
}

static void wrong_arguments_are_refused(void) {
    struct tiny_shape windowed = tiny_experts;
    windowed.context = 400;
    open_shape(&windowed);
    llamac_session *s = open_session(model, 1, 0, 1, NULL), *f32 = open_session(model, 1, LLAMAC_F32, 1, NULL);
    float *logits = take_floats(1, vocab);
    extend(s, 0, 70, logits);
    const size_t before = llamac_kv_bytes(model);
    llamac_page *pages[4];
    for (int p = 0; p < 4; p++) pages[p] = llamac_hold_page(s, 0, p / 2, p % 2, &err);
    const int32_t zero[] = { 0, 0 };
    llamac_group info;
    CHECK(group_count(s) == 2 && !llamac_group_at(s, -1, &info), "groups");
    CHECK(llamac_first_position(s, 1, 0) == -1 && llamac_first_position(s, 0, 2) == -1, "no such group");
    expect_error(!llamac_hold_page(s, 1, 0, 0, &err), "sequence is 1, expected 0 to 0");
    expect_error(!llamac_hold_page(s, 0, 2, 0, &err), "group is 2, expected 0 to 1");
    expect_error(!llamac_hold_page(s, 0, 0, 2, &err), "page is 2, but sequence 0 has pages 0 to 1 of group 0");
    expect_error(!llamac_hold_page(s, 0, 0, -1, &err), "page is -1");
    expect_error(!llamac_take_page(s, -1, &err), "group is -1");
    uint8_t *copy = take(1 << 20);
    expect_error(llamac_copy_page(s, 0, pages[0], 0, KV_PAGE + 1, copy, &err), "a range within 0 to 64");
    expect_error(llamac_copy_page(s, 0, pages[0], 3, 2, copy, &err), "positions 3 to 2");
    expect_error(llamac_copy_page(f32, 0, pages[0], 0, 1, copy, &err), "but pages of group 0 have");
    llamac_test_fail_allocation(1);
    expect_error(llamac_copy_page(s, 0, pages[0], 0, 1, copy, &err), "the stored bytes of a page");
    llamac_test_fail_allocation(0);
    free(copy);
    expect_error(llamac_restore(s, 1, 70, zero, pages, 4, &err), "sequence is 1");
    expect_error(llamac_restore(s, 0, -1, zero, pages, 4, &err), "length is -1");
    expect_error(llamac_restore(s, 0, 401, zero, pages, 4, &err), "into a context of 400");
    expect_error(llamac_restore(s, 0, 70, zero, pages, 3, &err), "there are 3 pages, but 70 positions need 4");
    expect_error(llamac_restore(s, 0, 70, (const int32_t[]){ 1, 0 }, pages, 4, &err), "group 0 begins at position 1");
    expect_error(llamac_restore(s, 0, 70, (const int32_t[]){ 0, 63 }, pages, 4, &err),
                 "group 1 begins at position 63, expected 0 to 62");
    expect_error(llamac_restore(s, 0, 70, (const int32_t[]){ 0, -1 }, pages, 4, &err), "position -1");
    expect_error(llamac_restore(f32, 0, 70, zero, pages, 4, &err), "page 0 is not a page of group 0");
    CHECK(llamac_length(s, 0) == 70 && llamac_length(f32, 0) == 0, "a refused call changed a sequence");
    CHECK(!llamac_restore(s, 0, 70, (const int32_t[]){ 0, 62 }, pages, 4, &err), "%s", err.message);
    for (int p = 0; p < 4; p++) llamac_drop_page(pages[p]);
    CHECK(llamac_kv_bytes(model) == before, "%zu bytes", llamac_kv_bytes(model));
    llamac_set_kv_budget(model, before);
    expect_error(!llamac_take_page(s, 0, &err), "does not fit");
    llamac_session_close(&s), llamac_session_close(&f32);
    free(logits);
    close_shape();
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(restored_sequences_continue_with_the_same_bits);
    RUN(copies_show_only_their_positions);
    RUN(pages_are_shared_and_counted_once);
    RUN(wrong_arguments_are_refused);
    return finish_tests("test_saving");
}
