// SPDX-License-Identifier: MIT
// saving.c - hands out the pages of sequences and builds sequences from pages. See saving.h.
#include "saving.h"

#include <string.h>
#include "common.h"
#include "error.h"
#include "mem.h"
#include "session.h"

static uint8_t *bytes_of(llamac_page *page) { return (uint8_t *)page; }
static llamac_page *page_of(uint8_t *bytes) { return (llamac_page *)(void *)bytes; }
static int has_states(const struct llamac_session *s) { return s->state_group.page_bytes > 0; }
static int is_state_group(const struct llamac_session *s, int group) { return has_states(s) && group == s->n_groups; }
static const struct kv_group *group_of(const struct llamac_session *s, int group) {
    return is_state_group(s, group) ? &s->state_group : &s->groups[group];
}
static int end_page(int length) { return ceil_div(length, KV_PAGE); }

static int check_group(const struct llamac_session *s, int group, llamac_error *err) {
    const int last = s->n_groups - 1 + has_states(s);
    if (group < 0 || group > last) return bad_argument(err, "group is %d, expected 0 to %d", group, last);
    return 0;
}

static int check_sequence(const struct llamac_session *s, int sequence, llamac_error *err) {
    if (sequence < 0 || sequence >= s->n_sequences)
        return bad_argument(err, "sequence is %d, expected 0 to %d", sequence, s->n_sequences - 1);
    return 0;
}

int llamac_group_at(const llamac_session *s, int group, llamac_group *info) {
    if (check_group(s, group, NULL)) return 0;
    const struct kv_group *g = group_of(s, group);
    *info = (llamac_group){ g->window, g->n_kv_heads, g->head_dim, g->page_bytes };
    return 1;
}

int llamac_first_position(const llamac_session *s, int sequence, int group) {
    if (check_sequence(s, sequence, NULL) || check_group(s, group, NULL)) return -1;
    return is_state_group(s, group) ? 0 : s->sequences[sequence].kv[group].start;
}

// Returns the state with an index, counted from the latest; NULL: there is none.
static const struct state *state_at(const struct llamac_session *s, int sequence, int index) {
    const struct sequence *q = &s->sequences[sequence];
    return index >= 0 && index < q->n_states ? &q->states[q->n_states - 1 - index] : NULL;
}

int llamac_state_length(const llamac_session *s, int sequence, int index) {
    const struct state *state = check_sequence(s, sequence, NULL) ? NULL : state_at(s, sequence, index);
    return state ? state->length : -1;
}

// ---- pages

llamac_page *llamac_hold_page(llamac_session *s, int sequence, int group, int index, llamac_error *err) {
    if (check_sequence(s, sequence, err) || check_group(s, group, err)) return NULL;
    const struct sequence *q = &s->sequences[sequence];
    if (is_state_group(s, group)) {
        const struct state *state = state_at(s, sequence, index);
        if (state) return page_of(kv_page_share(state->page));
        bad_argument(err, "page is %d, but sequence %d has %d states", index, sequence, q->n_states);
        return NULL;
    }
    const struct kv_table *kv = &q->kv[group];
    const int end = min_int(kv->end, end_page(q->length));
    if (index < kv->first || index >= end) {
        bad_argument(err, "page is %d, but sequence %d has pages %d to %d of group %d", index, sequence, kv->first,
                     end - 1, group);
        return NULL;
    }
    return page_of(kv_page_share(kv->pages[index]));
}

llamac_page *llamac_take_page(const llamac_session *s, int group, llamac_error *err) {
    if (check_group(s, group, err)) return NULL;
    const size_t max_pages = (size_t)s->n_sequences * (size_t)end_page(s->context);
    return page_of(kv_page_alloc(s->pages, group_of(s, group)->page_bytes, max_pages, err));
}

void *llamac_page_data(llamac_page *page, size_t *bytes) {
    *bytes = kv_page_bytes(bytes_of(page));
    return kv_page_pool(bytes_of(page))->device ? NULL : page;
}

int llamac_read_page(llamac_page *page, void *out, llamac_error *err) { return kv_page_read(out, bytes_of(page), err); }
int llamac_write_page(llamac_page *page, const void *data, llamac_error *err) {
    return kv_page_write(bytes_of(page), data, err);
}

void llamac_drop_page(llamac_page *page) { kv_page_release(bytes_of(page)); }

// Copies a state, with zeros between the layers' parts.
static int copy_state(const struct llamac_session *s, uint8_t *page, uint8_t *out, llamac_error *err) {
    if (kv_page_read(out, page, err)) return -1;
    for (int l = 0; l < (int)s->model->config->n_layers; l++) {
        const struct layer_record *r = s->model->layers[l].record;
        if (!is_recurrent_layer(r)) continue;
        const size_t bytes = session_state_bytes(s->model, r);
        memset(out + s->kv_layers[l].state_offset + bytes, 0, round_up(bytes, STATE_ALIGNMENT) - bytes);
    }
    return 0;
}

// The bytes of one KV head in a page: its keys, then its values.
static size_t head_bytes(const struct llamac_session *s, const struct kv_group *g) {
    return kv_keys_bytes(s->kv_dtype, g->head_dim) + kv_values_bytes(s->kv_dtype, g->value_dim);
}

// Returns a mask of a head's bytes: 0xff for those of the positions [first, last), 0 for the others. All heads of a
// group store a position in the same bytes. The caller frees the mask.
//
// Finds the bytes by storing zeros at the positions, in a head filled with 0x00 and in one filled with 0xff: stored
// bytes are equal in both. This needs no second description of the layouts, which differ by dtype.
static uint8_t *mask_of_positions(const struct llamac_session *s, const struct kv_group *g, int first, int last,
                                  llamac_error *err) {
    const size_t keys = kv_keys_bytes(s->kv_dtype, g->head_dim), head = head_bytes(s, g);
    const size_t zeros = round_up((size_t)g->head_dim * sizeof(float), LINE_BYTES);
    uint8_t *memory = mem_alloc(round_up(2 * head, LINE_BYTES) + zeros, 1, "the stored bytes of a page", err);
    if (!memory) return NULL;
    uint8_t *const filled[2] = { memory, memory + head };
    const float *zero = (const float *)(const void *)(memory + round_up(2 * head, LINE_BYTES));
    memset(filled[1], 0xff, head);
    for (int slot = first; slot < last; slot++)
        for (int i = 0; i < 2; i++) {
            s->kernels->store_key[s->kv_dtype](filled[i], slot, g->head_dim, zero);
            s->kernels->store_value[s->kv_dtype](filled[i] + keys, slot, g->value_dim, zero);
        }
    for (size_t i = 0; i < head; i++) filled[0][i] = filled[0][i] == filled[1][i] ? 0xff : 0;
    return memory;
}

int llamac_copy_page(const llamac_session *s, int group, llamac_page *page, int first, int last, void *out,
                     llamac_error *err) {
    if (check_group(s, group, err)) return -1;
    const struct kv_group *g = group_of(s, group);
    if (kv_page_bytes(bytes_of(page)) != g->page_bytes)
        return bad_argument(err, "the page has %zu bytes, but pages of group %d have %zu",
                            kv_page_bytes(bytes_of(page)), group, g->page_bytes);
    if (first < 0 || last < first || last > KV_PAGE)
        return bad_argument(err, "cannot copy positions %d to %d of a page, expected a range within 0 to %d", first,
                            last, KV_PAGE);
    if (is_state_group(s, group)) return copy_state(s, bytes_of(page), out, err);
    uint8_t *mask = mask_of_positions(s, g, first, last, err);
    if (!mask) return -1;
    const int failed = kv_page_read(out, bytes_of(page), err);
    const size_t head = head_bytes(s, g);
    for (size_t at = 0; at < g->page_bytes && !failed; at += head)
        for (size_t i = 0; i < head; i++) ((uint8_t *)out)[at + i] &= mask[i];
    mem_free(mask);
    return failed;
}

// ---- sequences

static int is_page_of(const struct llamac_session *s, llamac_page *page, const struct kv_group *g) {
    return page && kv_page_bytes(bytes_of(page)) == g->page_bytes && kv_page_pool(bytes_of(page)) == s->pages;
}

// Checks the first positions and the pages of all groups.
static int check_pages(const struct llamac_session *s, int length, const int32_t *first_positions,
                       llamac_page *const *pages, size_t n_pages, llamac_error *err) {
    size_t n = 0;
    for (int i = 0; i < s->n_groups; i++) {
        const struct kv_group *g = &s->groups[i];
        const int start = first_positions[i], most = g->window && length ? max_int(0, length + 1 - g->window) : 0;
        if (start < 0 || start > most)
            return bad_argument(err, "group %d begins at position %d, expected 0 to %d: the token after %d positions "
                                "would see earlier ones", i, start, most, length);
        for (int p = start / KV_PAGE; p < end_page(length); p++, n++)
            if (n < n_pages && !is_page_of(s, pages[n], g))
                return bad_argument(err, "page %zu is not a page of group %d", n, i);
    }
    if (has_states(s) && length) {
        if (n < n_pages && !is_page_of(s, pages[n], &s->state_group))
            return bad_argument(err, "page %zu is not a state", n);
        n++;
    }
    if (n != n_pages) return bad_argument(err, "there are %zu pages, but %d positions need %zu", n_pages, length, n);
    return 0;
}

// Checks the states before the one after all positions.
static int check_states(const struct llamac_session *s, int length, const int32_t *lengths, llamac_page *const *pages,
                        size_t n, llamac_error *err) {
    if (n >= MAX_KEPT) return bad_argument(err, "there are %zu earlier states, expected at most %d", n, MAX_KEPT - 1);
    for (size_t i = 0; i < n; i++) {
        const int most = (i ? lengths[i - 1] : length) - 1;
        if (lengths[i] < 1 || lengths[i] > most)
            return bad_argument(err, "state %zu is after %d positions, expected 1 to %d", i, lengths[i], most);
        if (!is_page_of(s, pages[i], &s->state_group)) return bad_argument(err, "page %zu is not a state", i);
    }
    return 0;
}

int llamac_check_restore(const llamac_session *s, int sequence, int length, const int32_t *first_positions,
                         llamac_page *const *pages, size_t n_pages, const int32_t *lengths, size_t n_states,
                         llamac_error *err) {
    if (check_sequence(s, sequence, err)) return -1;
    if (length < 0) return bad_argument(err, "length is %d, expected 0 to %d", length, s->context);
    if (length > s->context)
        return err_set(err, LLAMAC_CONTEXT_FULL, "cannot restore %d positions into a context of %d", length,
                       s->context);
    if (check_pages(s, length, first_positions, pages, n_pages, err)) return -1;
    return n_states ? check_states(s, length, lengths, pages + n_pages, n_states, err) : 0;
}

int llamac_restore(llamac_session *s, int sequence, int length, const int32_t *first_positions,
                   llamac_page *const *pages, size_t n_pages, llamac_error *err) {
    if (llamac_check_restore(s, sequence, length, first_positions, pages, n_pages, NULL, 0, err)) return -1;
    session_discard_drafts(s);
    session_set_pages(s, sequence, length, first_positions, (uint8_t *const *)pages);
    return 0;
}

int llamac_restore_states(llamac_session *s, int sequence, const int32_t *lengths, llamac_page *const *pages, size_t n,
                          llamac_error *err) {
    if (check_sequence(s, sequence, err)) return -1;
    struct sequence *q = &s->sequences[sequence];
    if (!n) return 0;
    if (q->n_states != 1)
        return bad_argument(err, "sequence %d has %d states, expected one: it was not just restored", sequence,
                            q->n_states);
    if (check_states(s, q->length, lengths, pages, n, err)) return -1;
    session_discard_drafts(s);
    session_add_states(s, q, lengths, (uint8_t *const *)pages, (int)n);
    return 0;
}

// Marks the pages of sequences with a new mark, and adds up those that did not have it.
size_t llamac_held_bytes(const llamac_session *s) {
    struct kv_count count = kv_count_start();
    for (int i = 0; i < s->n_sequences; i++)
        for (int g = 0; g < s->n_groups; g++) {
            const struct kv_table *kv = &s->sequences[i].kv[g];
            for (int p = kv->first; p < kv->end; p++) kv_count_page(&count, kv->pages[p]);
        }
    for (int i = 0; i < s->n_sequences; i++) {
        for (int k = 0; k < s->sequences[i].n_states; k++) kv_count_page(&count, s->sequences[i].states[k].page);
        for (int k = 0; k < s->sequences[i].n_spares; k++) kv_count_page(&count, s->sequences[i].spares[k]);
    }
    return kv_count_end(&count);
}
