// SPDX-License-Identifier: MIT
// merge_ranks.c - derives ranked merges from the scores of SentencePiece's BPE.
//
// Every split of a piece into two other pieces is a merge with that piece's score. Merges are ordered by score, then by
// the length of the left half, the longest first, then by piece. llamac/text/vocabulary/spm.py documents the rules; it
// handles every vocabulary that this function leaves to it, and words the errors.
#include "vocab.h"

#include <stdlib.h>
#include <string.h>
#include "error.h"
#include "mem.h"

enum { MAX_PIECE = 1024, MAX_MERGED = 1 << 25 };   // characters of a piece, and of all merges

struct ordered { float score; uint32_t piece; };
struct split { uint32_t left_length, left, right, piece; };

static int compare_pieces(const void *a, const void *b) {
    const struct ordered *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->piece < y->piece ? -1 : x->piece > y->piece;
}

static int compare_splits(const void *a, const void *b) {
    const struct split *x = a, *y = b;
    if (x->left_length != y->left_length) return x->left_length > y->left_length ? -1 : 1;
    return x->piece < y->piece ? -1 : x->piece > y->piece;
}

static int irregular(llamac_error *err, const char *what) { return err_set(err, LLAMAC_UNSUPPORTED, "%s", what); }

// Appends the splits of a piece, the longest left half first. Returns their number.
static long split_piece(const struct vocab *v, uint32_t piece, struct split *out, uint32_t *length, llamac_error *err) {
    uint32_t cuts[MAX_PIECE], bytes, n = 0;
    uint64_t left_hashes[MAX_PIECE], right_hashes[MAX_PIECE];
    const uint8_t *text = vocab_text(v, piece, &bytes);
    for (uint32_t i = 0; i < bytes; i++) {
        if ((text[i] & 0xC0) == 0x80) continue;
        if (n == MAX_PIECE) return irregular(err, "a piece is too long");
        cuts[n++] = i;
    }
    *length = n;
    for (uint32_t cut = n; cut-- > 1;) {
        left_hashes[cut] = vocab_hash(v, text, cuts[cut]);
        right_hashes[cut] = vocab_hash(v, text + cuts[cut], bytes - cuts[cut]);
    }
    long found = 0;
    for (uint32_t cut = n; cut-- > 1;) {
        const uint32_t left = vocab_find_hashed(v, left_hashes[cut], text, cuts[cut]);
        if (left == VOCAB_NONE && cut > 1) continue;
        const uint32_t right = vocab_find_hashed(v, right_hashes[cut], text + cuts[cut], bytes - cuts[cut]);
        if (left != VOCAB_NONE && right != VOCAB_NONE)
            out[found++] = (struct split){ cut, left, right, piece };
        else if (cut == n - 1 || right != VOCAB_NONE)
            return irregular(err, "a character is not a piece");
    }
    return found;
}

// Finds pairs of merges of equal scores in which the right half of the later is the left half of the earlier.
static int find_rivals(const struct split *group, size_t n, uint32_t *heads, uint32_t *next, struct merge_rival *rivals,
                       size_t max_rivals, size_t *n_rivals) {
    for (size_t i = 0; i < n; i++) {   // heads: 1 + the last split whose left half is a piece; next: the one before
        for (uint32_t at = heads[group[i].right]; at; at = next[at - 1]) {
            if (*n_rivals == max_rivals) return -1;
            rivals[(*n_rivals)++] = (struct merge_rival){ group[i].left, group[i].right, group[at - 1].right };
        }
        next[i] = heads[group[i].left];
        heads[group[i].left] = (uint32_t)i + 1;
    }
    for (size_t i = 0; i < n; i++) heads[group[i].left] = 0;
    return 0;
}

// Where a part of the ordered pieces begins. Pieces with one score are in the same part.
static size_t part_begin(const struct ordered *pieces, size_t n, uint32_t part, uint32_t n_parts) {
    size_t at = n * part / n_parts;
    while (at > 0 && at < n && pieces[at].score == pieces[at - 1].score) at++;
    return at;
}

long merge_ranks(const struct vocab *v, const float *scores, const uint8_t *forms, uint32_t part, uint32_t n_parts,
                 uint32_t *merges, struct merge_rival *rivals, size_t max_rivals, size_t *n_rivals, llamac_error *err) {
    size_t n_pieces = 0, bound = 0, n = 0, characters = 0;
    for (uint32_t i = 0; i < v->n_tokens; i++) {
        uint32_t bytes;
        vocab_text(v, i, &bytes);
        if (!(scores[i] - scores[i] == 0)) return irregular(err, "a score is not finite");
        if (!forms[i]) continue;
        n_pieces++;
        bound += bytes;
    }
    if (bound > (size_t)4 * MAX_MERGED) return irregular(err, "the pieces are too long");
    if (!merges) return (long)bound;
    struct ordered *pieces = mem_alloc(n_pieces + 1, sizeof *pieces, "ordering pieces", err);
    struct split *splits = pieces ? mem_alloc_huge((bound + 1) * sizeof *splits, "ordering merges", err) : NULL;
    uint32_t *heads = splits ? mem_alloc(v->n_tokens, sizeof *heads, "comparing merges", err) : NULL;
    uint32_t *next = heads ? mem_alloc_huge((bound + 1) * sizeof *next, "comparing merges", err) : NULL;
    long result = next ? 0 : -1;
    for (uint32_t i = 0; result == 0 && i < v->n_tokens; i++)
        if (forms[i]) pieces[n++] = (struct ordered){ scores[i], i };
    int sorted = 1;
    for (size_t i = 1; result == 0 && i < n_pieces; i++) sorted &= compare_pieces(&pieces[i - 1], &pieces[i]) < 0;
    if (result == 0 && !sorted) qsort(pieces, n_pieces, sizeof *pieces, compare_pieces);
    *n_rivals = n = 0;
    const size_t end = result == 0 ? part_begin(pieces, n_pieces, part + 1, n_parts) : 0;
    size_t first = result == 0 ? part_begin(pieces, n_pieces, part, n_parts) : 0;
    for (size_t last; result == 0 && first < end; first = last) {
        struct split *group = splits + n;
        size_t group_n = 0;
        for (last = first; result == 0 && last < n_pieces && pieces[last].score == pieces[first].score; last++) {
            uint32_t length;
            const long found = split_piece(v, pieces[last].piece, group + group_n, &length, err);
            if (found < 0) result = -1;
            else group_n += (size_t)found, characters += (size_t)found * length;
        }
        if (result == 0 && characters > MAX_MERGED) result = irregular(err, "there are too many merges");
        if (result < 0) break;
        if (last - first > 1) qsort(group, group_n, sizeof *group, compare_splits);
        if (find_rivals(group, group_n, heads, next, rivals, max_rivals, n_rivals))
            result = irregular(err, "too many pieces have equal scores");
        n += group_n;
    }
    for (size_t i = 0; result == 0 && i < n; i++) {
        merges[3 * i] = splits[i].left;
        merges[3 * i + 1] = splits[i].right;
        merges[3 * i + 2] = splits[i].piece;
    }
    mem_free(pieces);
    mem_free(splits);
    mem_free(heads);
    mem_free(next);
    return result < 0 ? -1 : (long)n;
}
