// SPDX-License-Identifier: MIT
// test_bpe.c - a vocabulary's tables, and byte pair encoding against a search that tries every pair.
#include "error.h"
#include "mem.h"
#include "test.h"
#include "vocab.h"

enum { MAX_TOKENS = 2048, MAX_TEXT = 1 << 16, LONGEST = 120 };
#define MARK "\xE2\x96\x81"

static llamac_error err;
static struct {
    uint32_t ends[MAX_TOKENS], merges[3 * MAX_TOKENS];
    uint8_t text[MAX_TEXT];
    uint32_t n_tokens, n_merges, bytes;
} tables;
static struct vocab vocab;

// ---- making vocabularies

static const uint8_t *string_of(uint32_t token, uint32_t *bytes) {
    const uint32_t start = token ? tables.ends[token - 1] : 0;
    *bytes = tables.ends[token] - start;
    return tables.text + start;
}

static uint32_t find_naively(const void *text, size_t bytes) {
    uint32_t other_bytes;
    for (uint32_t i = 0; bytes && i < tables.n_tokens; i++) {
        const uint8_t *other = string_of(i, &other_bytes);
        if (other_bytes == bytes && !memcmp(other, text, bytes)) return i;
    }
    return VOCAB_NONE;
}

static uint32_t add_token(const void *text, size_t bytes) {
    memcpy(tables.text + tables.bytes, text, bytes);
    tables.bytes += (uint32_t)bytes;
    tables.ends[tables.n_tokens] = tables.bytes;
    return tables.n_tokens++;
}
static void add_strings(const char *const *strings, size_t n) {
    for (size_t i = 0; i < n; i++) add_token(strings[i], strlen(strings[i]));
}

static uint32_t find_rank(uint32_t left, uint32_t right) {
    for (uint32_t i = 0; i < tables.n_merges; i++)
        if (tables.merges[3 * i] == left && tables.merges[3 * i + 1] == right) return i;
    return VOCAB_NONE;
}

static void add_merge(uint32_t left, uint32_t right) {
    uint8_t text[2 * LONGEST];
    uint32_t left_bytes, right_bytes;
    const uint8_t *left_text = string_of(left, &left_bytes), *right_text = string_of(right, &right_bytes);
    if (left_bytes + right_bytes > LONGEST || !left_bytes || !right_bytes || find_rank(left, right) != VOCAB_NONE)
        return;
    memcpy(text, left_text, left_bytes);
    memcpy(text + left_bytes, right_text, right_bytes);
    uint32_t joined = find_naively(text, left_bytes + right_bytes);
    if (joined == VOCAB_NONE) joined = add_token(text, left_bytes + right_bytes);
    memcpy(tables.merges + 3 * tables.n_merges++, (uint32_t[]){ left, right, joined }, 3 * sizeof joined);
}

static void clear(void) { tables.n_tokens = tables.n_merges = tables.bytes = 0; }
static int open_vocab(void) {
    return vocab_open(&vocab, tables.ends, tables.n_tokens, tables.merges, tables.n_merges, tables.text, tables.bytes,
                      &err);
}
static void check_refused(const char *message) {
    const int failed = open_vocab() || vocab_index(&vocab, &err);
    CHECK(failed && err.code == LLAMAC_BAD_MODEL && strstr(err.message, message), "%s: %s", message, err.message);
    if (!failed || strstr(message, "merge")) vocab_close(&vocab);
}

// ---- tables

static void a_small_vocabulary(void) {
    clear();
    add_strings((const char *const[]){ "a", "b", "", "\xC3\xA9", "ab" }, 5);
    add_merge(0, 1);
}

static void damaged_tables_are_refused(void) {
    a_small_vocabulary();
    tables.ends[1] = 0;
    check_refused("the string of token 1 ends at byte 0, expected 1 to 6");
    a_small_vocabulary();
    tables.ends[2] = 7;
    check_refused("the string of token 2 ends at byte 7");
    a_small_vocabulary();
    tables.ends[2] = 3;
    check_refused("the string of token 3 begins inside a character");
    a_small_vocabulary();
    tables.bytes++;
    check_refused("the strings end at byte 6 of 7");
    a_small_vocabulary();
    tables.text[2] = 0xC1;
    check_refused("not UTF-8");
    a_small_vocabulary();
    tables.merges[1] = 5;
    check_refused("merge 0 has the token 5, but there are 5 tokens");
    a_small_vocabulary();
    tables.merges[2] = 3;
    check_refused("merge 0: the string of token 3 is not the strings of tokens 0 and 1");
    a_small_vocabulary();
    memcpy(tables.merges + 3, tables.merges, 3 * sizeof *tables.merges), tables.n_merges++;
    check_refused("merges 0 and 1 are equal");
    a_small_vocabulary();
    add_token("ab", 2);
    check_refused("tokens 4 and 5 have the same string");
    const size_t sizes[3][3] = { { VOCAB_MAX_TOKENS + 1, 0, 0 }, { 0, VOCAB_MAX_MERGES + 1, 0 },
                                 { 0, 0, VOCAB_MAX_TEXT + 1 } };
    for (int i = 0; i < 3; i++)   // refused before the tables are read
        CHECK(vocab_open(&vocab, NULL, sizes[i][0], NULL, sizes[i][1], NULL, sizes[i][2], &err) &&
              strstr(err.message, "expected at most 1048576, 2097152, 134217728"), "%s", err.message);
}

// The number of a character in CJK's block, in UTF-8.
static void write_character(uint8_t text[3], uint32_t number) {
    const uint32_t code = 0x4E00 + number;
    text[0] = (uint8_t)(0xE0 | code >> 12), text[1] = (uint8_t)(0x80 | (code >> 6 & 63));
    text[2] = (uint8_t)(0x80 | (code & 63));
}

// A hostile vocabulary whose entries all belong to the first places of a hash table.
static void many_equal_hashes_are_refused(void) {
    enum { N = 1100, BITS = 12, FIRST = 8 };   // the table of N entries has 2^BITS places
    a_small_vocabulary();
    CHECK(!open_vocab(), "%s", err.message);
    clear();
    for (uint32_t i = 0; tables.n_tokens < N; i++) {
        uint8_t text[9];
        for (int k = 0; k < 3; k++) write_character(text + 3 * k, i >> 7 * k & 127);
        if (vocab_hash(&vocab, text, 9) >> (64 - BITS + FIRST) == 0) add_token(text, 9);
    }
    vocab_close(&vocab);
    check_refused("the tokens' strings have too many equal hashes");

    clear();
    const uint64_t mix = 0x9E3779B97F4A7C15u;
    enum { HALVES = 600 };
    for (uint32_t i = 0; i < HALVES; i++) {
        uint8_t text[3];
        write_character(text, i);
        add_token(text, 3);
    }
    for (uint32_t i = 0; i < HALVES * HALVES && tables.n_merges < N; i++) {
        uint64_t h = ((uint64_t)(i / HALVES) << 32 | i % HALVES) * mix;
        h ^= h >> 29;
        if (h * mix >> (64 - BITS + FIRST)) continue;
        uint8_t text[6];
        write_character(text, i / HALVES), write_character(text + 3, i % HALVES);
        const uint32_t merge[3] = { i / HALVES, i % HALVES, add_token(text, 6) };
        memcpy(tables.merges + 3 * tables.n_merges++, merge, sizeof merge);
    }
    check_refused("the merges have too many equal hashes");
}

static void utf8_is_told_from_other_bytes(void) {
    for (uint32_t code = 1; code < 0x110000; code += code < 0x900 || !(code & 0x7FF) ? 1 : 2047) {
        uint8_t text[4] = { (uint8_t)code };
        size_t n = 1;
        if (code >= 0x80) {
            n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
            for (size_t i = n, rest = code; i-- > 0; rest >>= 6)
                text[i] = (uint8_t)(i ? 0x80 | (rest & 63) : (0xF00u >> n & 0xFF) | rest);
        }
        const int is_surrogate = code >= 0xD800 && code < 0xE000;
        CHECK(utf8_valid(text, n) == !is_surrogate, "U+%X", code);
        CHECK(n == 1 || !utf8_valid(text, n - 1), "U+%X without its last byte", code);
    }
    static const char *const invalid[] = {
        "\x80", "\xC0\xAF", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
        "\xF5\x80\x80\x80", "\xFF", "\xC3" "a", "\xE2\x96" "a", "\xF0\x9F\x98" "a",
    };
    for (size_t i = 0; i < ARRAY_LEN(invalid); i++)
        CHECK(!utf8_valid((const uint8_t *)invalid[i], strlen(invalid[i])), "invalid text %zu", i);
}

// ---- encoding

// As bpe_encode, for one word: no hash table, no heap, no cuts.
static size_t encode_naively(const struct bpe *b, const uint8_t *text, size_t bytes, uint32_t *out) {
    const uint8_t none[1] = { 0 };
    size_t n = 0;
    int was_unknown = 0;
#define VISIBLE(token) ((token) != VOCAB_NONE && !(b->hidden ? b->hidden : none)[b->hidden ? (token) : 0])
    for (size_t at = 0, size; at < bytes; at += size) {
        size = b->byte_level ? 1 : utf8_bytes(text[at]);
        const uint32_t token = b->byte_level ? b->bytes[text[at]] : find_naively(text + at, size);
        const int is_known = VISIBLE(token);
        if (is_known) out[n++] = token;
        else if (b->byte_fallback) {
            for (size_t i = 0; i < size; i++) {
                char name[7];
                snprintf(name, sizeof name, "<0x%02X>", text[at + i]);
                out[n++] = find_naively(name, 6);
            }
        } else if (b->unknown != VOCAB_NONE && !(was_unknown && b->fuse_unknown)) {
            out[n++] = b->unknown;
        }
        was_unknown = !is_known;
    }
    for (;;) {
        uint32_t best = VOCAB_NONE;
        size_t where = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            const uint32_t rank = find_rank(out[i], out[i + 1]);
            if (rank >= best || !VISIBLE(out[i]) || !VISIBLE(out[i + 1]) || !VISIBLE(tables.merges[3 * rank + 2]))
                continue;
            best = rank, where = i;
        }
        if (best == VOCAB_NONE) return n;
        out[where] = tables.merges[3 * best + 2];
        memmove(out + where + 1, out + where + 2, (--n - where - 1) * sizeof *out);
    }
#undef VISIBLE
}

// Encodes random texts of a few different symbols as words of random lengths.
static void check_encoding(const struct bpe *b, const char *const *symbols, int n_symbols, uint64_t *state,
                           const char *what) {
    enum { WORDS = 12 };
    static uint8_t text[WORDS * 200 * 4];
    static uint32_t found[sizeof text], expected[sizeof text];
    for (int round = 0; round < (sparse ? 4 : 20); round++) {
        size_t ends[WORDS], bytes = 0, n_expected = 0, n_found;
        for (int word = 0; word < WORDS; word++) {
            const size_t start = bytes;
            for (int left = random_below(state, word % 4 ? 30 : 120); left > 0; left--) {
                const char *symbol = symbols[random_below(state, n_symbols)];
                memcpy(text + bytes, symbol, strlen(symbol));
                bytes += strlen(symbol);
            }
            ends[word] = bytes;
            n_expected += encode_naively(b, text + start, bytes - start, expected + n_expected);
        }
        CHECK(!bpe_encode(b, text, ends, WORDS, found, &n_found, &err), "%s: %s", what, err.message);
        CHECK(n_found == n_expected && !memcmp(found, expected, sizeof *found * n_found),
              "%s, round %d: %zu tokens, expected %zu", what, round, n_found, n_expected);
    }
}

static void random_merges(int n, uint64_t *state) {
    while (n-- > 0)
        add_merge((uint32_t)random_below(state, (int)tables.n_tokens),
                  (uint32_t)random_below(state, (int)tables.n_tokens));
}

static void characters_are_joined_as_a_search_of_all_pairs_does(void) {
    static const char *const known[] = { "a", "b", MARK, "\xC3\xA9", "\xF0\x9F\x98\x80", "" };
    static const char *const written[] = { "a", "b", MARK, "\xC3\xA9", "\xF0\x9F\x98\x80", "c", "\xC3\xA8", MARK };
    uint64_t state = 1;
    for (int seed = 0; seed < (sparse ? 6 : 24); seed++) {
        uint8_t hidden[MAX_TOKENS] = { 0 };
        clear();
        add_strings(known, ARRAY_LEN(known));
        const uint32_t unknown = add_token("<unk>", 5);
        random_merges(4 + 12 * (seed % 4), &state);
        for (uint32_t i = 0; i < tables.n_tokens; i++) hidden[i] = i < 2 || i > 8 ? random_below(&state, 8) == 0 : 0;
        CHECK(!open_vocab() && !vocab_index(&vocab, &err), "%s", err.message);
        for (int kind = 0; kind < 4; kind++) {   // unknown characters: dropped, fused, one token each; hidden tokens
            struct bpe b = { .vocab = &vocab, .unknown = kind ? unknown : VOCAB_NONE, .fuse_unknown = kind == 1,
                             .hidden = kind == 3 ? hidden : NULL };
            CHECK(!bpe_open(&b, &err), "%s", err.message);
            check_encoding(&b, written, ARRAY_LEN(written), &state, "characters");
        }
        vocab_close(&vocab);
    }
}

static void add_bytes(int byte_level) {
    struct bpe b = { .vocab = &vocab, .unknown = VOCAB_NONE };
    clear();
    CHECK(!open_vocab() && !vocab_index(&vocab, &err) && !bpe_open(&b, &err), "%s", err.message);   // for b.letters
    vocab_close(&vocab);
    for (int byte = 0; byte < 256; byte++) {
        char name[7];
        snprintf(name, sizeof name, "<0x%02X>", byte);
        if (byte_level) add_token(b.letters[byte], utf8_bytes(b.letters[byte][0]));
        else add_token(name, 6);
    }
}

static void bytes_are_joined_as_a_search_of_all_pairs_does(void) {
    static const char *const written[] = { "a", " ", "\n", "\xC3\xA9", "\xF0\x9F\x98\x80" };
    uint64_t state = 2;
    for (int seed = 0; seed < (sparse ? 3 : 10); seed++) {
        add_bytes(1);
        CHECK(find_naively("\xC4\xA0", 2) == ' ' && find_naively("\xC4\x8A", 2) == '\n', "GPT-2's space and line end");
        for (int i = 0; i < 30; i++) add_merge((uint32_t)"a \n\xC3\xA9\xF0"[random_below(&state, 6)] & 255,
                                               (uint32_t)" a\xA9\x9F\x98\x80"[random_below(&state, 6)] & 255);
        for (int i = 0; i < 20; i++) {
            const uint32_t *some = tables.merges + 3 * random_below(&state, (int)tables.n_merges);
            add_merge(some[2], tables.merges[3 * random_below(&state, (int)tables.n_merges) + 2]);
        }
        CHECK(!open_vocab() && !vocab_index(&vocab, &err), "%s", err.message);
        struct bpe b = { .vocab = &vocab, .byte_level = 1, .unknown = VOCAB_NONE };
        CHECK(!bpe_open(&b, &err), "%s", err.message);
        check_encoding(&b, written, ARRAY_LEN(written), &state, "bytes");
        vocab_close(&vocab);
    }
}

static void characters_without_a_token_become_their_bytes(void) {
    static const char *const written[] = { "a", "b", "c", "\xC3\xA9", "\xE4\xB8\xAD" };
    uint64_t state = 3;
    add_bytes(0);
    add_strings((const char *const[]){ "a", "b", MARK }, 3);
    for (int i = 0; i < 12; i++) add_merge(256 + (uint32_t)random_below(&state, (int)tables.n_tokens - 256), 256);
    add_merge(0xC3, 0xA9);   // a merge of bytes' tokens
    CHECK(!open_vocab() && !vocab_index(&vocab, &err), "%s", err.message);
    struct bpe b = { .vocab = &vocab, .byte_fallback = 1, .unknown = VOCAB_NONE };
    CHECK(!bpe_open(&b, &err), "%s", err.message);
    check_encoding(&b, written, ARRAY_LEN(written), &state, "fallback");
    uint8_t hidden[MAX_TOKENS] = { [77] = 1 };
    b.hidden = hidden;
    CHECK(bpe_open(&b, &err) && err.code == LLAMAC_UNSUPPORTED && strstr(err.message, "byte 77 has no token"), "%s",
          err.message);
    vocab_close(&vocab);
}

// With ignore_merges a word that is a token becomes it, although no merge leads there.
static void whole_words_become_tokens(void) {
    for (int byte_level = 0; byte_level < 2; byte_level++) {
        add_bytes(byte_level);
        if (!byte_level) add_strings((const char *const[]){ "o", "n", "e", " " }, 4);
        const uint32_t word = byte_level ? add_token("\xC4\xA0one", 5) : add_token(" one", 4);
        CHECK(!open_vocab() && !vocab_index(&vocab, &err), "%s", err.message);
        uint8_t hidden[MAX_TOKENS] = { 0 };
        struct bpe b = { .vocab = &vocab, .byte_level = byte_level, .ignore_merges = 1, .unknown = VOCAB_NONE,
                         .hidden = hidden };
        CHECK(!bpe_open(&b, &err), "%s", err.message);
        const char *text = " one one, one two";
        const size_t ends[] = { 4, 8, 8, 9, 13 };   // the third word is empty; the fourth, a comma, is a byte's token
        uint32_t out[32];
        size_t n;
        CHECK(!bpe_encode(&b, (const uint8_t *)text, ends, 5, out, &n, &err), "%s", err.message);
        CHECK(n == (byte_level ? 4u : 3u) && out[0] == word && out[1] == word && out[n - 1] == word, "%zu tokens", n);
        hidden[word] = 1;
        CHECK(!bpe_encode(&b, (const uint8_t *)text, ends, 1, out, &n, &err) && n == 4, "%zu tokens", n);
        const size_t longer = 8;   // longer than every token
        CHECK(!bpe_encode(&b, (const uint8_t *)text, &longer, 1, out, &n, &err) && n == 8, "%zu tokens", n);
        vocab_close(&vocab);
    }
}

static void tokens_of_bytes_have_a_limit(void) {
    clear();
    for (int i = 0; i < BPE_MAX_PIECE; i++) tables.text[i] = 'a';
    add_token("b", 1);
    memset(tables.text + 1, 'a', BPE_MAX_PIECE + 1);
    tables.bytes = tables.ends[tables.n_tokens++] = BPE_MAX_PIECE + 2;
    CHECK(!open_vocab() && !vocab_index(&vocab, &err), "%s", err.message);
    struct bpe b = { .vocab = &vocab, .byte_level = 1 };
    CHECK(bpe_open(&b, &err) && err.code == LLAMAC_UNSUPPORTED && strstr(err.message, "1025 characters"), "%s",
          err.message);
    vocab_close(&vocab);
}

static int open_and_encode(void) {
    static uint32_t out[400];
    static uint8_t text[400];
    memset(text, 'a', sizeof text);
    const size_t end = sizeof text;
    size_t n;
    struct bpe b = { .vocab = &vocab, .unknown = VOCAB_NONE };
    if (open_vocab()) return -1;
    const int failed = vocab_index(&vocab, &err) || bpe_open(&b, &err) || bpe_encode(&b, text, &end, 1, out, &n, &err);
    vocab_close(&vocab);
    return failed;
}

static void each_allocation_can_fail(void) {
    clear();
    add_strings((const char *const[]){ "a", "aa" }, 2);
    add_merge(0, 0);
    long n = 1;
    for (int failed = 1; failed && n < 20; n++) {
        llamac_test_fail_allocation(n);
        failed = open_and_encode();
        llamac_test_fail_allocation(0);
        CHECK(!failed || err.code == LLAMAC_NO_MEMORY, "allocation %ld: %s", n, err.message);
    }
    CHECK(n == 7, "%ld allocations, expected 5", n - 2);
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(damaged_tables_are_refused);
    RUN(many_equal_hashes_are_refused);
    RUN(utf8_is_told_from_other_bytes);
    RUN(characters_are_joined_as_a_search_of_all_pairs_does);
    RUN(bytes_are_joined_as_a_search_of_all_pairs_does);
    RUN(characters_without_a_token_become_their_bytes);
    RUN(whole_words_become_tokens);
    RUN(tokens_of_bytes_have_a_limit);
    RUN(each_allocation_can_fail);
    return finish_tests("test_bpe");
}
