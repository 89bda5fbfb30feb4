// SPDX-License-Identifier: MIT
// added_tokens.c - finds added tokens in text: the leftmost, and of these the longest.
//
// The names are sorted, so the last name that is not greater than the text begins with every name that the text begins
// with. Names have at most ADDED_MAX_BYTES, so the work at each position is bounded.
#include "vocab.h"

#include <string.h>
#include "error.h"
#include "mem.h"

static const uint8_t *name_at(const struct added_tokens *a, size_t i, size_t *bytes) {
    const size_t start = i ? a->ends[i - 1] : 0;
    *bytes = a->ends[i] - start;
    return a->text + start;
}

static int begins_with(const uint8_t *text, size_t bytes, const uint8_t *prefix, size_t prefix_bytes) {
    return bytes >= prefix_bytes && !memcmp(text, prefix, prefix_bytes);
}

// Orders a name and a text; a name that is a prefix of the text is not greater.
static int is_greater(const uint8_t *name, size_t name_bytes, const uint8_t *text, size_t bytes) {
    const int order = memcmp(name, text, name_bytes < bytes ? name_bytes : bytes);
    return order > 0 || (order == 0 && name_bytes > bytes);
}

int added_open(struct added_tokens *a, llamac_error *err) {
    a->shorter = mem_alloc(a->n + 1, sizeof *a->shorter, "the added tokens", err);
    if (!a->shorter) return -1;
    size_t byte = 0;
    for (size_t i = 0; i < a->n; i++) {
        size_t bytes, other_bytes;
        const uint8_t *name = name_at(a, i, &bytes), *other = i ? name_at(a, i - 1, &other_bytes) : NULL;
        if (!bytes || bytes > ADDED_MAX_BYTES || (other && !is_greater(name, bytes, other, other_bytes))) {
            added_close(a);
            return bad_argument(err, "added token %zu: %zu bytes, or not in order", i, bytes);
        }
        for (; byte <= name[0]; byte++) a->first[byte] = (uint32_t)i;
        size_t before = i;   // the previous name, then its prefixes, the longest first
        for (; before; before = a->shorter[before - 1]) {
            other = name_at(a, before - 1, &other_bytes);
            if (begins_with(name, bytes, other, other_bytes)) break;
        }
        a->shorter[i] = (uint32_t)before;
    }
    for (; byte <= 256; byte++) a->first[byte] = (uint32_t)a->n;
    return 0;
}

void added_close(struct added_tokens *a) {
    mem_free(a->shorter);
    a->shorter = NULL;
}

// Returns 1 + the longest name that is a prefix of the text, or 0. Writes its length.
static uint32_t longest_at(const struct added_tokens *a, const uint8_t *text, size_t bytes, size_t *length) {
    uint32_t low = a->first[text[0]], high = a->first[text[0] + 1];   // the first name that is greater is in between
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const uint8_t *name = name_at(a, middle, length);
        if (is_greater(name, *length, text, bytes)) high = middle;
        else low = middle + 1;
    }
    while (low) {
        const uint8_t *name = name_at(a, low - 1, length);
        if (begins_with(text, bytes, name, *length)) return low;
        if (name[0] != text[0]) return 0;
        low = a->shorter[low - 1];
    }
    return 0;
}

// The bytes of a White_Space character at `at`, or 0.
static size_t space_bytes(const uint8_t *text, size_t bytes, size_t at) {
    const uint8_t *p = text + at;
    if (p[0] < 0x80) return p[0] == ' ' || (p[0] >= 9 && p[0] <= 13);
    const uint32_t n = utf8_bytes(p[0]);
    if (n > bytes - at || n == 4) return 0;
    const uint32_t code = n == 2 ? (p[0] & 31u) << 6 | (p[1] & 63u)
                                 : (p[0] & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
    return code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 ||
           code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000 ? n : 0;
}

// Where the spaces begin that end at `end`; not before `from`.
static size_t spaces_before(const uint8_t *text, size_t from, size_t end) {
    while (end > from) {
        size_t at = end - 1;
        while (at > from && (text[at] & 0xC0) == 0x80) at--;
        if (space_bytes(text, end, at) != end - at) break;
        end = at;
    }
    return end;
}

// Where the spaces end that begin at `at`. Remembers a run, so overlapping searches read it once.
static size_t spaces_after(const uint8_t *text, size_t bytes, size_t at, struct added_search *search) {
    if (at >= search->spaces_start && at < search->spaces_end) return search->spaces_end;
    search->spaces_start = at;
    for (size_t n; at < bytes && (n = space_bytes(text, bytes, at)) > 0;) at += n;
    return search->spaces_end = at;
}

int added_next(const struct added_tokens *a, const uint8_t *text, size_t bytes, int skip_special,
               struct added_search *search, struct added_match *match) {
    for (size_t at = search->at; at < bytes; at++) {
        if (a->first[text[at]] == a->first[text[at] + 1]) continue;
        size_t length;
        const uint32_t found = longest_at(a, text + at, bytes - at, &length);
        if (!found) continue;
        const uint8_t flags = a->flags[found - 1];
        if (skip_special && flags & ADDED_SPECIAL) {
            at += length - 1;
            continue;
        }
        *match = (struct added_match){ at, at + length, found - 1 };
        search->at = match->end;
        if (flags & ADDED_LSTRIP && at > search->done) match->start = spaces_before(text, search->done, at);
        if (flags & ADDED_RSTRIP) match->end = spaces_after(text, bytes, match->end, search);
        if (flags & ADDED_LSTRIP && at < search->done)   // a name made of spaces that the last match's RSTRIP took
            match->start = match->end < search->done ? match->end : search->done;
        search->done = match->end;
        if (match->start < match->end) return 1;
        at = search->at - 1;  // the last match has taken all of it
    }
    search->at = bytes;
    return 0;
}
