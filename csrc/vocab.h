// SPDX-License-Identifier: MIT
// vocab.h - the tokenizer's tables: the strings of tokens, the merges of byte pair encoding, added tokens.
//
// vocab.c checks a vocabulary and finds strings and merges, bpe.c encodes words, added_tokens.c finds added tokens in
// text, merge_ranks.c derives merges from scores. All of them only read what they are given. Objects are immutable once
// open, so threads can share them.
#ifndef LLAMAC_VOCAB_H
#define LLAMAC_VOCAB_H
#include <stddef.h>
#include <stdint.h>
#include "llamac.h"

#define VOCAB_NONE UINT32_MAX   // no token, no merge
enum { VOCAB_MAX_TOKENS = 1 << 20, VOCAB_MAX_MERGES = 1 << 21, VOCAB_MAX_TEXT = 1 << 27 };

// What the merges do with a token.
enum { VOCAB_FORMED = 1, VOCAB_JOINED = 2 };   // the result of a merge; a half of one

struct vocab {
    uint32_t n_tokens, n_merges;
    const uint32_t *ends;       // (n_tokens) where each token's string ends in `text`; borrowed, like the next two
    const uint32_t *merges;     // (n_merges, 3) left, right, joined token; best first
    const uint8_t *text;        // UTF-8
    uint32_t *pieces;           // hash table: token + 1 under a tag of the string's hash, or 0
    uint32_t *pairs;            // hash table: index of a merge + 1 under a tag, or 0; NULL before vocab_index
    uint8_t *roles;             // (n_tokens) VOCAB_FORMED, VOCAB_JOINED; NULL before vocab_index
    uint32_t piece_bits, pair_bits;
    uint32_t longest;           // characters of the longest string
};

// Checks the tables and builds the index of strings. An empty string stands for an id without a token.
int vocab_open(struct vocab *v, const uint32_t *ends, size_t n_tokens, const uint32_t *merges, size_t n_merges,
               const uint8_t *text, size_t text_bytes, llamac_error *err);
// Builds the index of merges. Called once, before vocab_rank.
int vocab_index(struct vocab *v, llamac_error *err);
void vocab_close(struct vocab *v);

static inline const uint8_t *vocab_text(const struct vocab *v, uint32_t token, uint32_t *bytes) {
    const uint32_t start = token ? v->ends[token - 1] : 0;
    *bytes = v->ends[token] - start;
    return v->text + start;
}
// The token with this string, or VOCAB_NONE.
uint32_t vocab_find(const struct vocab *v, const uint8_t *text, size_t bytes);
// The same in two steps. Between them the caller can hash other strings, while the table's line comes from memory.
uint64_t vocab_hash(const struct vocab *v, const uint8_t *text, size_t bytes);
uint32_t vocab_find_hashed(const struct vocab *v, uint64_t hash, const uint8_t *text, size_t bytes);
// The rank of the merge of two tokens, or VOCAB_NONE.
uint32_t vocab_rank(const struct vocab *v, uint32_t left, uint32_t right);
// The bytes of the UTF-8 character that begins at a valid position.
static inline uint32_t utf8_bytes(uint8_t first) { return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }
int utf8_valid(const uint8_t *text, size_t bytes);

// ---- encoding

enum { BPE_MAX_PIECE = 1024 };   // characters of a byte-level token

struct bpe {
    const struct vocab *vocab;
    int byte_level;              // symbols are bytes, written in GPT-2's alphabet; otherwise characters
    int byte_fallback;           // a character without a token becomes its bytes' tokens
    int ignore_merges;           // a word that is a token becomes that token
    int fuse_unknown;            // adjacent unknown characters become one token
    uint32_t unknown;            // the token for unknown characters, or VOCAB_NONE: they are dropped
    const uint8_t *hidden;       // (n_tokens) 1: text never becomes this token; NULL: none is hidden
    uint8_t letters[256][2];     // GPT-2's character of each byte
    uint32_t bytes[256];         // the token of each byte, or VOCAB_NONE
    uint32_t ascii[128];         // the token of each ASCII character, or VOCAB_NONE
    uint8_t crossed[4096 / 8];   // hashes of the characters after which a merge joins a piece that begins with U+2581
};

// Fills in `letters` and the members after it; the caller has set the other members and called vocab_index. Fails if
// byte_fallback is set and a byte has no token.
int bpe_open(struct bpe *b, llamac_error *err);
// Encodes words: word i is the bytes from ends[i - 1] to ends[i] of `text`, which is valid UTF-8. `out` has room for as
// many tokens as the text has bytes. Returns their number in *n_out.
int bpe_encode(const struct bpe *b, const uint8_t *text, const size_t *ends, size_t n_words, uint32_t *out,
               size_t *n_out, llamac_error *err);

// ---- added tokens

enum { ADDED_SPECIAL = 1, ADDED_LSTRIP = 2, ADDED_RSTRIP = 4, ADDED_MAX_BYTES = 256 };

struct added_tokens {
    size_t n;
    const uint32_t *ends;        // (n) of the names in `text`; names are sorted, distinct, not empty; borrowed
    const uint8_t *flags;        // (n) borrowed
    const uint8_t *text;         // borrowed
    uint32_t first[257];         // the first name that begins with this byte or a later one
    uint32_t *shorter;           // (n) 1 + the longest other name that is a prefix of this one, or 0
};
struct added_match { size_t start, end; uint32_t index; };
struct added_search { size_t at, done, spaces_start, spaces_end; };   // zero at the start

int added_open(struct added_tokens *a, llamac_error *err);
void added_close(struct added_tokens *a);
// Finds the next added token, the leftmost and of these the longest, as the library tokenizers does. With skip_special,
// special tokens are passed over. Returns 0 if there is none.
int added_next(const struct added_tokens *a, const uint8_t *text, size_t bytes, int skip_special,
               struct added_search *search, struct added_match *match);

// ---- merges from scores

// Lists the merges that SentencePiece's scores imply, best first. `forms` says which tokens merges can form. Returns
// the number of merges, or -1 with LLAMAC_UNSUPPORTED if this vocabulary needs a closer look. The first call has
// merges NULL and returns an upper bound. Threads can list parts: `part` of `n_parts`, each after the one before it.
struct merge_rival { uint32_t x, y, z; };   // (x, y) and (y, z) have equal scores, and (y, z) ranks first
long merge_ranks(const struct vocab *v, const float *scores, const uint8_t *forms, uint32_t part,
                 uint32_t n_parts, uint32_t *merges, struct merge_rival *rivals, size_t max_rivals, size_t *n_rivals,
                 llamac_error *err);
#endif
