// SPDX-License-Identifier: MIT
// bpe.c - byte pair encoding: joins adjacent symbols of a word, the pair with the best rank first, the leftmost of
// equals.
//
// Short words are searched from end to end for each merge. Long words use a heap, so the time is n log n for a text
// without spaces, too. Characters need no pre-tokenizer to be cut into words: no merge joins a piece that begins with
// U+2581 to one that ends with a character outside `crossed`, so text is cut there.
#include "vocab.h"

#include <string.h>
#include "error.h"
#include "mem.h"

enum { SHORT_WORD = 40 };   // symbols; above that the heap is faster

static const uint8_t SPACE_MARK[3] = { 0xE2, 0x96, 0x81 };

static int begins_with_mark(const uint8_t *text, size_t bytes) {
    return bytes >= 3 && !memcmp(text, SPACE_MARK, 3);
}

// A hash of the last character of a string that is not empty.
static uint32_t last_character(const uint8_t *text, size_t bytes) {
    uint32_t code = 0;
    for (uint32_t shift = 0; bytes--; shift += 6) {
        code |= (uint32_t)text[bytes] << shift;
        if ((text[bytes] & 0xC0) != 0x80) break;
    }
    return (code ^ (code >> 12)) & 4095;
}

static int is_crossed(const struct bpe *b, uint32_t token) {
    uint32_t bytes;
    const uint8_t *text = vocab_text(b->vocab, token, &bytes);
    if (!bytes) return 1;
    const uint32_t last = last_character(text, bytes);
    return b->crossed[last / 8] >> (last % 8) & 1;
}

// GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on. In UTF-8, two bytes at
// most.
static void write_alphabet(uint8_t letters[256][2]) {
    uint32_t others = 256;
    for (uint32_t byte = 0; byte < 256; byte++) {
        const int printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
        const uint32_t code = printable ? byte : others++;
        letters[byte][0] = (uint8_t)(code < 0x80 ? code : 0xC0 | code >> 6);
        letters[byte][1] = (uint8_t)(code < 0x80 ? 0 : 0x80 | (code & 63));
    }
}

static uint32_t visible(const struct bpe *b, uint32_t token) {
    return token != VOCAB_NONE && b->hidden && b->hidden[token] ? VOCAB_NONE : token;
}

int bpe_open(struct bpe *b, llamac_error *err) {
    static const char digits[] = "0123456789ABCDEF";
    const struct vocab *v = b->vocab;
    if (b->byte_level && v->longest > BPE_MAX_PIECE)
        return err_set(err, LLAMAC_UNSUPPORTED, "a token has %u characters, expected at most %d", v->longest,
                       BPE_MAX_PIECE);
    write_alphabet(b->letters);
    for (int byte = 0; byte < 256; byte++) {
        uint8_t name[] = "<0x00>";
        size_t n = 6;
        if (b->byte_level) {
            memcpy(name, b->letters[byte], 2);
            n = utf8_bytes(name[0]);
        } else {
            name[3] = (uint8_t)digits[byte >> 4];
            name[4] = (uint8_t)digits[byte & 15];
        }
        b->bytes[byte] = visible(b, vocab_find(v, name, n));
        if (b->byte_fallback && b->bytes[byte] == VOCAB_NONE)
            return err_set(err, LLAMAC_UNSUPPORTED, "byte_fallback is set, but byte %d has no token", byte);
        if (byte < 128) {
            const uint8_t character = (uint8_t)byte;
            b->ascii[byte] = visible(b, vocab_find(v, &character, 1));
        }
    }
    memset(b->crossed, 0, sizeof b->crossed);
    for (uint32_t rank = 0; rank < v->n_merges && !b->byte_level; rank++) {
        uint32_t bytes;
        const uint8_t *right = vocab_text(v, v->merges[3 * (size_t)rank + 1], &bytes);
        if (!begins_with_mark(right, bytes)) continue;
        const uint8_t *left = vocab_text(v, v->merges[3 * (size_t)rank], &bytes);
        if (!bytes) continue;
        const uint32_t last = last_character(left, bytes);
        b->crossed[last / 8] |= (uint8_t)(1 << (last % 8));
    }
    return 0;
}

static uint32_t rank_of(const struct bpe *b, uint32_t left, uint32_t right) {
    const uint32_t rank = vocab_rank(b->vocab, left, right);
    if (rank == VOCAB_NONE || !b->hidden) return rank;
    const uint8_t *hidden = b->hidden;
    return hidden[left] || hidden[right] || hidden[b->vocab->merges[3 * (size_t)rank + 2]] ? VOCAB_NONE : rank;
}

static uint32_t joined(const struct bpe *b, uint32_t rank) { return b->vocab->merges[3 * (size_t)rank + 2]; }

// ---- merging

static size_t merge_short(const struct bpe *b, uint32_t *symbols, size_t n) {
    uint32_t ranks[SHORT_WORD];   // of the pair of each symbol and the next one
    for (size_t i = 0; i + 1 < n; i++) ranks[i] = rank_of(b, symbols[i], symbols[i + 1]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[best]) best = i;
        if (ranks[best] == VOCAB_NONE) break;
        symbols[best] = joined(b, ranks[best]);
        n--;
        memmove(symbols + best + 1, symbols + best + 2, (n - best - 1) * sizeof *symbols);
        memmove(ranks + best, ranks + best + 1, (n - best - 1) * sizeof *ranks);
        if (best + 1 < n) ranks[best] = rank_of(b, symbols[best], symbols[best + 1]);
        if (best > 0) ranks[best - 1] = rank_of(b, symbols[best - 1], symbols[best]);
    }
    return n;
}

// The queue is a heap of (rank, position), the smallest first.
static void queue_push(uint64_t *queue, size_t *n, uint64_t entry) {
    size_t at = (*n)++;
    while (at && queue[(at - 1) / 2] > entry) {
        queue[at] = queue[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    queue[at] = entry;
}

static uint64_t queue_pop(uint64_t *queue, size_t *n) {
    const uint64_t first = queue[0], last = queue[--*n];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= *n) break;
        if (child + 1 < *n && queue[child + 1] < queue[child]) child++;
        if (queue[child] >= last) break;
        queue[at] = queue[child];
        at = child;
    }
    queue[at] = last;
    return first;
}

static void queue_pair(const struct bpe *b, const uint32_t *symbols, uint32_t left, uint32_t right, uint64_t *queue,
                       size_t *n) {
    const uint32_t rank = rank_of(b, symbols[left], symbols[right]);
    if (rank != VOCAB_NONE) queue_push(queue, n, (uint64_t)rank << 32 | left);
}

static int merge_long(const struct bpe *b, uint32_t *symbols, size_t *n_symbols, llamac_error *err) {
    const uint32_t n = (uint32_t)*n_symbols;
    // each merge takes an entry from the queue and adds two at most
    uint64_t *queue = mem_alloc_huge((2 * (size_t)n + 2) * sizeof *queue, "merging a long word", err);
    uint32_t *next = queue ? mem_alloc_huge(2 * (size_t)n * sizeof *next, "merging a long word", err) : NULL;
    if (!next) {
        mem_free(queue);
        return -1;
    }
    uint32_t *previous = next + n;
    size_t queued = 0;
    for (uint32_t i = 0; i < n; i++) {
        next[i] = i + 1;
        previous[i] = i ? i - 1 : VOCAB_NONE;
    }
    for (uint32_t i = 0; i + 1 < n; i++) queue_pair(b, symbols, i, i + 1, queue, &queued);
    while (queued) {
        const uint64_t entry = queue_pop(queue, &queued);
        const uint32_t at = (uint32_t)entry, rank = (uint32_t)(entry >> 32);
        if (symbols[at] == VOCAB_NONE || next[at] == n) continue;
        const uint32_t right = next[at], now = rank_of(b, symbols[at], symbols[right]);
        if (now == VOCAB_NONE || joined(b, now) != joined(b, rank)) continue;   // one of the two has changed
        symbols[at] = joined(b, rank);
        symbols[right] = VOCAB_NONE;
        next[at] = next[right];
        if (next[at] < n) previous[next[at]] = at;
        if (previous[at] != VOCAB_NONE) queue_pair(b, symbols, previous[at], at, queue, &queued);
        if (next[at] < n) queue_pair(b, symbols, at, next[at], queue, &queued);
    }
    size_t kept = 0;
    for (uint32_t i = 0; i < n; i++)
        if (symbols[i] != VOCAB_NONE) symbols[kept++] = symbols[i];
    *n_symbols = kept;
    mem_free(queue);
    mem_free(next);
    return 0;
}

// Merges n symbols at out[*n_out] and appends the result.
static int merge(const struct bpe *b, uint32_t *out, size_t n, size_t *n_out, llamac_error *err) {
    if (n <= SHORT_WORD)
        n = merge_short(b, out + *n_out, n);
    else if (merge_long(b, out + *n_out, &n, err))
        return -1;
    *n_out += n;
    return 0;
}

// ---- symbols

static uint32_t whole_word(const struct bpe *b, const uint8_t *text, size_t bytes) {
    uint8_t word[2 * BPE_MAX_PIECE];
    if (!b->byte_level) return visible(b, vocab_find(b->vocab, text, bytes));
    if (bytes > b->vocab->longest) return VOCAB_NONE;
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        memcpy(word + n, b->letters[text[i]], 2);
        n += utf8_bytes(word[n]);
    }
    return visible(b, vocab_find(b->vocab, word, n));
}

static int encode_word(const struct bpe *b, const uint8_t *text, size_t bytes, uint32_t *out, size_t *n_out,
                       llamac_error *err) {
    if (!bytes) return 0;
    if (b->ignore_merges) {
        const uint32_t token = whole_word(b, text, bytes);
        if (token != VOCAB_NONE) {
            out[(*n_out)++] = token;
            return 0;
        }
    }
    size_t n = 0;
    int unknown = 0;   // the symbols end with an unknown character
    for (size_t at = 0; at < bytes;) {
        uint32_t *symbols = out + *n_out;
        const uint32_t size = b->byte_level ? 1 : utf8_bytes(text[at]);
        const uint32_t symbol = b->byte_level        ? b->bytes[text[at]]
                                : size == 1          ? b->ascii[text[at]]
                                                     : visible(b, vocab_find(b->vocab, text + at, size));
        if (symbol != VOCAB_NONE) {
            if (n && !b->byte_level && begins_with_mark(text + at, bytes - at) &&
                !is_crossed(b, symbols[n - 1])) {
                if (merge(b, out, n, n_out, err)) return -1;
                symbols = out + *n_out;
                n = 0;
            }
            symbols[n++] = symbol;
            unknown = 0;
        } else if (b->byte_fallback) {
            for (uint32_t i = 0; i < size; i++) symbols[n++] = b->bytes[text[at + i]];
        } else if (b->unknown != VOCAB_NONE) {
            if (!unknown || !b->fuse_unknown) symbols[n++] = b->unknown;
            unknown = 1;
        }
        at += size;
    }
    return n ? merge(b, out, n, n_out, err) : 0;
}

int bpe_encode(const struct bpe *b, const uint8_t *text, const size_t *ends, size_t n_words, uint32_t *out,
               size_t *n_out, llamac_error *err) {
    *n_out = 0;
    for (size_t i = 0, start = 0; i < n_words; start = ends[i++])
        if (encode_word(b, text + start, ends[i] - start, out, n_out, err)) return -1;
    return 0;
}
