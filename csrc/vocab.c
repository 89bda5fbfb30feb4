// SPDX-License-Identifier: MIT
// vocab.c - checks a vocabulary's tables, and finds strings and merges by hashing.
//
// Hash tables are built when a vocabulary is opened: for 262,144 tokens with 515,000 merges this takes 30 ms, and a
// file needs no hash function in its format. A table in which a search would take long is an error, so a hostile
// vocabulary cannot make encoding slow.
#include "vocab.h"

#include <string.h>
#include "error.h"
#include "mem.h"

enum { MAX_PROBES = 1024 };   // real vocabularies need fewer than 100
enum { AHEAD = 12 };          // entries between the prefetch of a table's line and its use
enum { PIECE_BITS = 21, PAIR_BITS = 22 };   // of an entry; with the others as a tag, few searches read strings
_Static_assert(VOCAB_MAX_TOKENS < 1 << PIECE_BITS && VOCAB_MAX_MERGES < 1 << PAIR_BITS, "entries fit below their tags");

static const uint64_t MIX = 0x9E3779B97F4A7C15u;

static uint64_t hash_text(const uint8_t *text, size_t bytes) {
    uint64_t h = bytes * MIX, word = 0;
    for (; bytes >= 8; text += 8, bytes -= 8) {
        memcpy(&word, text, 8);
        h = (h ^ word) * MIX;
        h ^= h >> 32;
    }
    if (bytes) {
        word = 0;
        memcpy(&word, text, bytes);
        h = (h ^ word) * MIX;
        h ^= h >> 32;
    }
    return h * MIX;
}

static uint64_t hash_pair(uint32_t left, uint32_t right) {
    uint64_t h = (((uint64_t)left << 32) | right) * MIX;
    h ^= h >> 29;
    return h * MIX;
}

// An entry without its tag, and the tag of a hash, from bits that do not choose the first place to look.
static inline uint32_t entry_of(uint32_t tagged, int bits) { return tagged & (((uint32_t)1 << bits) - 1); }
static inline uint32_t tag_of(uint64_t hash, int bits) { return (uint32_t)(hash >> 8) >> bits << bits; }
static inline int has_tag(uint32_t tagged, uint64_t hash, int bits) {
    return !((tagged ^ (uint32_t)(hash >> 8)) >> bits);
}

// The number of bits of an index into a hash table that is at most half full.
static uint32_t table_bits(size_t n) {
    uint32_t bits = 4;
    while (((size_t)1 << bits) < 2 * n) bits++;
    return bits;
}

int utf8_valid(const uint8_t *text, size_t bytes) {
    for (size_t i = 0; i < bytes;) {
        const uint8_t c = text[i];
        if (c < 0x80) { i++; continue; }
        const uint32_t n = utf8_bytes(c);
        if (c < 0xC2 || c > 0xF4 || n > bytes - i) return 0;
        for (uint32_t k = 1; k < n; k++)
            if ((text[i + k] & 0xC0) != 0x80) return 0;
        const uint8_t second = text[i + 1];
        if ((c == 0xE0 && second < 0xA0) || (c == 0xED && second > 0x9F) || (c == 0xF0 && second < 0x90) ||
            (c == 0xF4 && second > 0x8F))
            return 0;
        i += n;
    }
    return 1;
}

static uint32_t characters(const uint8_t *text, size_t bytes) {
    uint32_t n = 0;
    for (size_t i = 0; i < bytes; i++) n += (text[i] & 0xC0) != 0x80;
    return n;
}

static int check_tables(const struct vocab *v, size_t text_bytes, llamac_error *err) {
    uint32_t end = 0;
    for (uint32_t i = 0; i < v->n_tokens; i++) {
        if (v->ends[i] < end || v->ends[i] > text_bytes)
            return bad_model(err, "the string of token %u ends at byte %u, expected %u to %zu", i, v->ends[i], end,
                             text_bytes);
        if (end < text_bytes && (v->text[end] & 0xC0) == 0x80)
            return bad_model(err, "the string of token %u begins inside a character", i);
        end = v->ends[i];
    }
    if (end != text_bytes) return bad_model(err, "the strings end at byte %u of %zu", end, text_bytes);
    if (!utf8_valid(v->text, text_bytes)) return bad_model(err, "the strings are not UTF-8");
    for (size_t i = 0; i < 3 * (size_t)v->n_merges; i++)
        if (v->merges[i] >= v->n_tokens)
            return bad_model(err, "merge %zu has the token %u, but there are %u tokens", i / 3, v->merges[i],
                             v->n_tokens);
    return 0;
}

static int index_pieces(struct vocab *v, llamac_error *err) {
    v->piece_bits = table_bits(v->n_tokens);
    const uint32_t mask = ((uint32_t)1 << v->piece_bits) - 1;
    v->pieces = mem_alloc((size_t)mask + 1, sizeof *v->pieces, "the index of tokens", err);
    if (!v->pieces) return -1;
    uint64_t hashes[AHEAD] = { 0 };   // of the next tokens
    for (uint32_t i = 0; i < v->n_tokens + AHEAD; i++) {
        uint32_t bytes, probes = 0, other_bytes;
        const uint32_t token = i - AHEAD;
        const uint64_t hash = hashes[i % AHEAD];
        if (i < v->n_tokens) {
            const uint8_t *text = vocab_text(v, i, &bytes);
            hashes[i % AHEAD] = vocab_hash(v, text, bytes);
        }
        if (i < AHEAD) continue;
        const uint8_t *text = vocab_text(v, token, &bytes);
        if (!bytes) continue;
        const uint32_t length = characters(text, bytes);
        if (length > v->longest) v->longest = length;
        uint32_t at = (uint32_t)(hash >> (64 - v->piece_bits));
        for (; v->pieces[at]; at = (at + 1) & mask) {
            if (has_tag(v->pieces[at], hash, PIECE_BITS)) {
                const uint32_t other = entry_of(v->pieces[at], PIECE_BITS) - 1;
                const uint8_t *other_text = vocab_text(v, other, &other_bytes);
                if (other_bytes == bytes && !memcmp(other_text, text, bytes))
                    return bad_model(err, "tokens %u and %u have the same string", other, token);
            }
            if (++probes == MAX_PROBES) return bad_model(err, "the tokens' strings have too many equal hashes");
        }
        v->pieces[at] = tag_of(hash, PIECE_BITS) | (token + 1);
    }
    return 0;
}

int vocab_open(struct vocab *v, const uint32_t *ends, size_t n_tokens, const uint32_t *merges, size_t n_merges,
               const uint8_t *text, size_t text_bytes, llamac_error *err) {
    if (n_tokens > VOCAB_MAX_TOKENS || n_merges > VOCAB_MAX_MERGES || text_bytes > VOCAB_MAX_TEXT)
        return bad_model(err, "%zu tokens, %zu merges, %zu bytes of strings: expected at most %d, %d, %d", n_tokens,
                         n_merges, text_bytes, VOCAB_MAX_TOKENS, VOCAB_MAX_MERGES, VOCAB_MAX_TEXT);
    *v = (struct vocab){ .n_tokens = (uint32_t)n_tokens, .n_merges = (uint32_t)n_merges, .ends = ends,
                         .merges = merges, .text = text };
    if (check_tables(v, text_bytes, err) || index_pieces(v, err)) {
        vocab_close(v);
        return -1;
    }
    return 0;
}

// Whether the joined token's string is the two halves' strings.
static int is_joined(const struct vocab *v, const uint32_t *merge) {
    uint32_t left, right, bytes;
    const uint8_t *left_text = vocab_text(v, merge[0], &left), *right_text = vocab_text(v, merge[1], &right);
    const uint8_t *text = vocab_text(v, merge[2], &bytes);
    return left && right && bytes == left + right && !memcmp(text, left_text, left) &&
           !memcmp(text + left, right_text, right);
}

static int index_pairs(struct vocab *v, llamac_error *err) {
    v->pair_bits = table_bits(v->n_merges);
    const uint32_t mask = ((uint32_t)1 << v->pair_bits) - 1;
    v->roles = mem_alloc(v->n_tokens, 1, "the roles of tokens", err);
    v->pairs = v->roles ? mem_alloc((size_t)mask + 1, sizeof *v->pairs, "the index of merges", err) : NULL;
    if (!v->pairs) return -1;
    for (uint32_t rank = 0; rank < v->n_merges; rank++) {
        const uint32_t *merge = v->merges + 3 * (size_t)rank;
        const uint64_t hash = hash_pair(merge[0], merge[1]);
        uint32_t probes = 0;
        if (rank + AHEAD < v->n_merges) {
            const uint32_t *later = merge + 3 * AHEAD;
            __builtin_prefetch(&v->pairs[hash_pair(later[0], later[1]) >> (64 - v->pair_bits)], 1);
            __builtin_prefetch(v->text + v->ends[later[2]]);
        }
        uint32_t at = (uint32_t)(hash >> (64 - v->pair_bits));
        if (!is_joined(v, merge))
            return bad_model(err, "merge %u: the string of token %u is not the strings of tokens %u and %u", rank,
                             merge[2], merge[0], merge[1]);
        for (; v->pairs[at]; at = (at + 1) & mask) {
            if (has_tag(v->pairs[at], hash, PAIR_BITS)) {
                const uint32_t other = entry_of(v->pairs[at], PAIR_BITS) - 1;
                if (!memcmp(v->merges + 3 * (size_t)other, merge, 2 * sizeof *merge))
                    return bad_model(err, "merges %u and %u are equal", other, rank);
            }
            if (++probes == MAX_PROBES) return bad_model(err, "the merges have too many equal hashes");
        }
        v->pairs[at] = tag_of(hash, PAIR_BITS) | (rank + 1);
        v->roles[merge[0]] |= VOCAB_JOINED;
        v->roles[merge[1]] |= VOCAB_JOINED;
        v->roles[merge[2]] |= VOCAB_FORMED;
    }
    return 0;
}

static void close_index(struct vocab *v) {
    mem_free(v->pairs);
    mem_free(v->roles);
    v->pairs = NULL;
    v->roles = NULL;
}

int vocab_index(struct vocab *v, llamac_error *err) {
    if (!index_pairs(v, err)) return 0;
    close_index(v);
    return -1;
}

void vocab_close(struct vocab *v) {
    close_index(v);
    mem_free(v->pieces);
    v->pieces = NULL;
}

uint64_t vocab_hash(const struct vocab *v, const uint8_t *text, size_t bytes) {
    const uint64_t hash = hash_text(text, bytes);
    __builtin_prefetch(&v->pieces[hash >> (64 - v->piece_bits)]);
    return hash;
}

uint32_t vocab_find_hashed(const struct vocab *v, uint64_t hash, const uint8_t *text, size_t bytes) {
    const uint32_t mask = ((uint32_t)1 << v->piece_bits) - 1;
    uint32_t at = (uint32_t)(hash >> (64 - v->piece_bits)), found_bytes;
    for (; bytes && v->pieces[at]; at = (at + 1) & mask) {
        if (!has_tag(v->pieces[at], hash, PIECE_BITS)) continue;
        const uint32_t token = entry_of(v->pieces[at], PIECE_BITS) - 1;
        const uint8_t *found = vocab_text(v, token, &found_bytes);
        if (found_bytes == bytes && !memcmp(found, text, bytes)) return token;
    }
    return VOCAB_NONE;
}

uint32_t vocab_find(const struct vocab *v, const uint8_t *text, size_t bytes) {
    return vocab_find_hashed(v, hash_text(text, bytes), text, bytes);
}

uint32_t vocab_rank(const struct vocab *v, uint32_t left, uint32_t right) {
    const uint32_t mask = ((uint32_t)1 << v->pair_bits) - 1;
    const uint64_t hash = hash_pair(left, right);
    uint32_t at = (uint32_t)(hash >> (64 - v->pair_bits));
    for (; v->pairs[at]; at = (at + 1) & mask) {
        if (!has_tag(v->pairs[at], hash, PAIR_BITS)) continue;
        const uint32_t rank = entry_of(v->pairs[at], PAIR_BITS) - 1;
        const uint32_t *merge = v->merges + 3 * (size_t)rank;
        if (merge[0] == left && merge[1] == right) return rank;
    }
    return VOCAB_NONE;
}
