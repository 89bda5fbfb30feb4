// SPDX-License-Identifier: MIT
// test_tokens.c - added tokens in text, and merges that scores imply, against searches that follow the definitions.
#include "test.h"
#include "vocab.h"

enum { MAX = 600, MAX_TEXT = 1 << 18 };

static llamac_error err;

// ---- added tokens

struct name { uint8_t text[8]; size_t bytes; uint8_t flags; };

static int compare_names(const void *a, const void *b) {
    const struct name *x = a, *y = b;
    const int order = memcmp(x->text, y->text, x->bytes < y->bytes ? x->bytes : y->bytes);
    return order ? order : x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

// Appends one of the symbols that names and texts consist of: letters, and spaces of one to three bytes.
static size_t append_symbol(uint8_t *text, uint64_t *state) {
    static const char *const symbols[] = { "a", "b", "<", " ", "\n", "\xC2\xA0", "\xE3\x80\x80", "\xC3\xA9",
                                           "\xF0\x9F\x98\x80", "\xE1\x9A\x80", "\xC2\x85", "\xE2\x80\xA9", "\x1F" };
    const char *symbol = symbols[random_below(state, ARRAY_LEN(symbols))];
    memcpy(text, symbol, strlen(symbol));
    return strlen(symbol);
}

static int is_space(const uint8_t *text, size_t bytes) {
    static const char *const spaces[] = { " ", "\n", "\xC2\xA0", "\xE3\x80\x80", "\xE1\x9A\x80", "\xC2\x85",
                                          "\xE2\x80\xA9" };
    for (size_t i = 0; i < ARRAY_LEN(spaces); i++)
        if (bytes == strlen(spaces[i]) && !memcmp(text, spaces[i], bytes)) return 1;
    return 0;
}

// The longest name at a place of a text, or -1.
static int name_here(const struct name *names, int n, const uint8_t *text, size_t bytes) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (names[i].bytes <= bytes && !memcmp(names[i].text, text, names[i].bytes) &&
            (best < 0 || names[i].bytes > names[best].bytes))
            best = i;
    return best;
}

static size_t match_naively(const struct name *names, int n, const uint8_t *text, size_t bytes, int skip_special,
                            struct added_match *out) {
    size_t found = 0, done = 0;
    for (size_t at = 0; at < bytes;) {
        const int i = name_here(names, n, text + at, bytes - at);
        if (i < 0) { at++; continue; }
        struct added_match match = { at, at + names[i].bytes, (uint32_t)i };
        at = match.end;
        if (skip_special && names[i].flags & ADDED_SPECIAL) continue;
        for (size_t from; names[i].flags & ADDED_LSTRIP && match.start > done; match.start = from) {
            for (from = match.start - 1; from > done && (text[from] & 0xC0) == 0x80;) from--;
            if (!is_space(text + from, match.start - from)) break;
        }
        if (names[i].flags & ADDED_LSTRIP && match.start < done) match.start = done;
        for (size_t size; names[i].flags & ADDED_RSTRIP && match.end < bytes; match.end += size) {
            size = utf8_bytes(text[match.end]);
            if (!is_space(text + match.end, size)) break;
        }
        if (match.start > match.end) match.start = match.end;
        done = match.end;
        if (match.start < match.end) out[found++] = match;
    }
    return found;
}

// Opens the names, which have to stay until the tokens are closed.
static int open_names(const struct name *names, int n, struct added_tokens *a) {
    static uint32_t name_ends[MAX];
    static uint8_t flags[MAX], joined[8 * MAX];
    uint32_t bytes = 0;
    for (int i = 0; i < n; i++) {
        memcpy(joined + bytes, names[i].text, names[i].bytes);
        name_ends[i] = bytes += (uint32_t)names[i].bytes;
        flags[i] = names[i].flags;
    }
    *a = (struct added_tokens){ .n = (size_t)n, .ends = name_ends, .flags = flags, .text = joined };
    return added_open(a, &err);
}

static void added_tokens_are_found_as_a_search_of_all_places_does(void) {
    uint64_t state = 1;
    for (int round = 0; round < (sparse ? 100 : 600); round++) {
        struct name names[30];
        int n = 0;
        for (int wanted = random_below(&state, 30); n < wanted;) {
            struct name name = { .flags = (uint8_t)random_below(&state, 8) };
            for (int left = 1 + random_below(&state, 3); left > 0 && name.bytes <= 4; left--)
                name.bytes += append_symbol(name.text + name.bytes, &state);
            int is_new = 1;
            for (int i = 0; i < n; i++) is_new &= compare_names(&names[i], &name) != 0;
            if (is_new) names[n++] = name;
            else wanted--;
        }
        qsort(names, (size_t)n, sizeof *names, compare_names);
        struct added_tokens a;
        CHECK(!open_names(names, n, &a), "%s", err.message);
        uint8_t text[300];
        size_t bytes = 0;
        while (bytes < 200) bytes += append_symbol(text + bytes, &state);
        for (int skip = 0; skip < 2; skip++) {
            struct added_match expected[300], match;
            struct added_search search = { 0 };
            const size_t n_expected = match_naively(names, n, text, bytes, skip, expected);
            size_t found = 0;
            for (; added_next(&a, text, bytes, skip, &search, &match); found++)
                CHECK(found < n_expected && match.start < match.end && match.start == expected[found].start &&
                      match.end == expected[found].end && match.index == expected[found].index,
                      "round %d, match %zu: token %u, bytes %zu to %zu", round, found, match.index, match.start,
                      match.end);
            CHECK(found == n_expected, "round %d: %zu matches, expected %zu", round, found, n_expected);
            CHECK(!added_next(&a, text, bytes, skip, &search, &match), "a match after the last one");
        }
        added_close(&a);
    }
}

static void names_have_an_order(void) {
    const struct name unordered[] = { { "b", 1, 0 }, { "a", 1, 0 } }, equal[] = { { "a", 1, 0 }, { "a", 1, 0 } },
                      empty[] = { { "", 0, 0 } };
    struct added_tokens a;
    CHECK(open_names(unordered, 2, &a) && strstr(err.message, "added token 1: 1 bytes, or not in order"), "%s",
          err.message);
    CHECK(open_names(equal, 2, &a), "equal names");
    CHECK(open_names(empty, 1, &a) && strstr(err.message, "added token 0: 0 bytes"), "%s", err.message);
    static const uint8_t long_name[ADDED_MAX_BYTES + 1], flags[1];
    const uint32_t end = sizeof long_name;
    a = (struct added_tokens){ .n = 1, .ends = &end, .flags = flags, .text = long_name };
    CHECK(added_open(&a, &err) && strstr(err.message, "257 bytes"), "%s", err.message);
    llamac_test_fail_allocation(1);
    CHECK(open_names(unordered, 1, &a) && err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    llamac_test_fail_allocation(0);
}

// ---- merges from scores

static uint32_t ends[MAX];
static uint8_t text[MAX_TEXT], forms[MAX];
static float scores[MAX];
static uint32_t n_tokens, n_bytes;
static struct vocab vocab;

static void add_piece(const void *piece, size_t bytes, float score) {
    memcpy(text + n_bytes, piece, bytes);
    ends[n_tokens] = n_bytes += (uint32_t)bytes;
    forms[n_tokens] = 1;
    scores[n_tokens++] = score;
}
static void add_run(size_t bytes, float score) {
    memset(text + n_bytes, 'a', bytes);
    add_piece(text + n_bytes, bytes, score);
}
static void clear(void) { n_tokens = n_bytes = 0; }
static void open_pieces(void) {
    CHECK(!vocab_open(&vocab, ends, n_tokens, NULL, 0, text, n_bytes, &err), "%s", err.message);
}

struct merge { uint32_t left, right, piece, left_length; };

static int compare_merges(const void *a, const void *b) {
    const struct merge *x = a, *y = b;
    if (scores[x->piece] != scores[y->piece]) return scores[x->piece] > scores[y->piece] ? -1 : 1;
    if (x->left_length != y->left_length) return x->left_length > y->left_length ? -1 : 1;
    return x->piece < y->piece ? -1 : x->piece > y->piece;
}

// All splits of all pieces into two others, the best first.
static size_t merges_naively(struct merge *out) {
    size_t n = 0;
    for (uint32_t piece = 0; piece < n_tokens; piece++) {
        uint32_t bytes, length = 0;
        const uint8_t *string = vocab_text(&vocab, piece, &bytes);
        for (uint32_t cut = 0; forms[piece] && cut < bytes; cut++) {
            if ((string[cut] & 0xC0) == 0x80) continue;
            const uint32_t left = vocab_find(&vocab, string, cut), before = length++;
            const uint32_t right = vocab_find(&vocab, string + cut, bytes - cut);
            if (left != VOCAB_NONE && right != VOCAB_NONE)
                out[n++] = (struct merge){ left, right, piece, before };
        }
    }
    qsort(out, n, sizeof *out, compare_merges);
    return n;
}

static void scores_imply_all_splits_the_best_first(void) {
    static const char *const characters[] = { "a", "b", "\xC3\xA9", "\xE2\x96\x81" };
    static struct merge expected[MAX * 8];
    static uint32_t merges[3 * MAX * 8];
    static struct merge_rival rivals[MAX * 64], whole_rivals[MAX * 64];
    uint64_t state = 4;
    for (int round = 0; round < (sparse ? 20 : 80); round++) {
        clear();
        for (size_t i = 0; i < ARRAY_LEN(characters); i++)
            add_piece(characters[i], strlen(characters[i]), random_float(&state));
        while (n_tokens < 60) {
            uint8_t piece[32];
            size_t bytes = 0;
            for (int left = 2 + random_below(&state, 4); left > 0; left--) {
                const char *character = characters[random_below(&state, ARRAY_LEN(characters))];
                memcpy(piece + bytes, character, strlen(character));
                bytes += strlen(character);
            }
            int is_new = 1;
            for (uint32_t i = 0, start = 0; i < n_tokens; start = ends[i++])
                is_new &= ends[i] - start != bytes || memcmp(text + start, piece, bytes) != 0;
            const float score = round % 3 == 0 ? -(float)n_tokens : (float)random_below(&state, round % 3 * 20);
            if (is_new) add_piece(piece, bytes, score);
            if (round % 4 == 3) forms[n_tokens - 1] = (uint8_t)(random_below(&state, 4) > 0);
        }
        open_pieces();
        const size_t n = merges_naively(expected);
        size_t n_rivals = 0, n_parts_rivals = 0, at = 0;
        const long bound = merge_ranks(&vocab, scores, forms, 0, 1, NULL, NULL, 0, NULL, &err);
        CHECK(bound >= (long)n, "%ld merges at most, expected %zu", bound, n);
        for (uint32_t n_parts = 1; n_parts < 6; n_parts += 2) {
            at = n_parts_rivals = 0;
            for (uint32_t part = 0; part < n_parts; part++) {
                const long found = merge_ranks(&vocab, scores, forms, part, n_parts, merges + 3 * at,
                                               rivals + n_parts_rivals, MAX * 64 - n_parts_rivals, &n_rivals, &err);
                CHECK(found >= 0, "%s", err.message);
                at += (size_t)found;
                n_parts_rivals += n_rivals;
            }
            CHECK(at == n, "%u parts: %zu merges, expected %zu", n_parts, at, n);
            for (size_t i = 0; i < n; i++)
                CHECK(!memcmp(merges + 3 * i, &expected[i], 3 * sizeof *merges), "%u parts, merge %zu: %u %u %u",
                      n_parts, i, merges[3 * i], merges[3 * i + 1], merges[3 * i + 2]);
            if (n_parts == 1) memcpy(whole_rivals, rivals, sizeof *rivals * n_parts_rivals);
            CHECK(!memcmp(whole_rivals, rivals, sizeof *rivals * n_parts_rivals), "%u parts: other rivals", n_parts);
        }
        size_t count = 0;   // (x, y) after (y, z), with equal scores
        for (size_t i = 0; i < n; i++)
            for (size_t k = 0; k < i; k++)
                count += scores[expected[k].piece] == scores[expected[i].piece] &&
                         expected[k].left == expected[i].right;
        CHECK(count == n_parts_rivals, "%zu rivals, expected %zu", n_parts_rivals, count);
        for (size_t i = 0; i < n_parts_rivals; i++) {
            int is_first = 0, is_second = 0;
            for (size_t k = 0; k < n; k++) {
                is_first |= expected[k].left == rivals[i].x && expected[k].right == rivals[i].y;
                is_second |= expected[k].left == rivals[i].y && expected[k].right == rivals[i].z;
            }
            CHECK(is_first && is_second, "rivals %u %u %u are no merges", rivals[i].x, rivals[i].y, rivals[i].z);
        }
        if (count > 0) CHECK(merge_ranks(&vocab, scores, forms, 0, 1, merges, rivals, count - 1, &n_rivals, &err) < 0 &&
                             strstr(err.message, "equal scores"), "%s", err.message);
        vocab_close(&vocab);
    }
}

static void check_irregular(const char *message) {
    static uint32_t merges[3 * MAX_TEXT];
    static struct merge_rival rivals[MAX_TEXT];
    size_t n_rivals;
    open_pieces();
    CHECK(merge_ranks(&vocab, scores, forms, 0, 1, merges, rivals, MAX_TEXT, &n_rivals, &err) < 0 &&
          err.code == LLAMAC_UNSUPPORTED && strstr(err.message, message), "%s: %s", message, err.message);
    vocab_close(&vocab);
}

static void irregular_vocabularies_are_left_to_the_caller(void) {
    clear();
    add_piece("a", 1, NAN);
    check_irregular("not finite");
    clear();
    add_piece("a", 1, 0), add_piece("ab", 2, 1);
    check_irregular("a character is not a piece");
    clear();
    add_piece("b", 1, 0), add_piece("ab", 2, 1);
    check_irregular("a character is not a piece");
    clear();
    add_piece("a", 1, 0), add_run(1025, 1);
    check_irregular("a piece is too long");
    clear();   // a run of n has n - 1 splits of n characters: 42 million in all
    for (size_t n = 1; n <= 500; n++) add_run(n, -(float)n);
    check_irregular("too many merges");
}

static void each_allocation_can_fail(void) {
    uint32_t merges[30];
    struct merge_rival rivals[10];
    size_t n_rivals;
    clear();
    add_piece("a", 1, 0), add_piece("aa", 2, 1);
    open_pieces();
    long n = 1;
    for (long found = -1; found < 0 && n < 20; n++) {
        llamac_test_fail_allocation(n);
        found = merge_ranks(&vocab, scores, forms, 0, 1, merges, rivals, 10, &n_rivals, &err);
        llamac_test_fail_allocation(0);
        CHECK(found == 1 || err.code == LLAMAC_NO_MEMORY, "allocation %ld: %s", n, err.message);
    }
    CHECK(n == 6, "%ld allocations, expected 4", n - 2);
    vocab_close(&vocab);
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(added_tokens_are_found_as_a_search_of_all_places_does);
    RUN(names_have_an_order);
    RUN(scores_imply_all_splits_the_best_first);
    RUN(irregular_vocabularies_are_left_to_the_caller);
    RUN(each_allocation_can_fail);
    return finish_tests("test_tokens");
}
