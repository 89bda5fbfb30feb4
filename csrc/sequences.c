// SPDX-License-Identifier: MIT
// sequences.c - a session's sequences: the assignment of layers to groups of pages, and growing, sliding along windows,
// truncating and forking sequences. See session.h.
#include <string.h>
#include "common.h"
#include "error.h"
#include "mem.h"
#include "session.h"

// ---- groups of layers

// Adds a recurrent layer to the page of states.
static void add_recurrent_layer(struct llamac_session *s, int l) {
    s->kv_layers[l].state_offset = s->state_group.page_bytes;
    s->state_group.page_bytes += round_up(session_state_bytes(s->model, s->model->layers[l].record), STATE_ALIGNMENT);
}

// Returns the largest window of the layers that read a layer's keys and values; 0 if any of them sees all positions, or
// if rows see later positions, whose keys and values are stored first.
static int window_of_readers(const struct llamac_model *m, int l) {
    int window = m->config->two_sided ? 0 : (int)m->layers[l].record->window;
    for (int i = l + 1; i < (int)m->config->n_layers && window; i++)
        if (m->layers[i].kv_source == l)
            window = m->layers[i].record->window ? max_int(window, (int)m->layers[i].record->window) : 0;
    return window;
}

// Adds a layer to the group with its shape and window.
static void add_layer(struct llamac_session *s, int l) {
    const struct heads heads = s->model->layers[l].heads;
    const int window = window_of_readers(s->model, l);
    struct kv_layer *kv = &s->kv_layers[l];
    kv->value_offset = kv_keys_bytes(s->kv_dtype, heads.dim);
    kv->head_bytes = kv->value_offset + kv_values_bytes(s->kv_dtype, heads.value_dim);
    while (kv->group < s->n_groups) {
        const struct kv_group *g = &s->groups[kv->group];
        if (g->window == window && g->head_dim == heads.dim && g->value_dim == heads.value_dim &&
            g->n_kv_heads == heads.n_kv)
            break;
        kv->group++;
    }
    struct kv_group *g = &s->groups[kv->group];
    if (kv->group == s->n_groups) {
        *g = (struct kv_group){ .window = window, .head_dim = heads.dim, .value_dim = heads.value_dim,
                                .n_kv_heads = heads.n_kv };
        s->n_groups++;
    }
    kv->offset = g->page_bytes;
    g->page_bytes += (size_t)heads.n_kv * kv->head_bytes;
}

int session_open_sequence(const struct llamac_session *s, struct sequence *q, llamac_error *err) {
    const size_t table = (size_t)ceil_div(s->context, KV_PAGE);
    q->kv = mem_alloc((size_t)max_int(s->n_groups, 1), sizeof *q->kv, "a sequence's lists of pages", err);
    for (int g = 0; q->kv && g < s->n_groups; g++) {
        q->kv[g].pages = mem_alloc(table, sizeof(uint8_t *), "a sequence's list of pages", err);
        if (!q->kv[g].pages) return -1;
    }
    return q->kv ? 0 : -1;
}

int session_open_sequences(struct llamac_session *s, llamac_error *err) {
    const size_t n_layers = s->model->config->n_layers;
    s->kv_layers = mem_alloc(n_layers, sizeof *s->kv_layers, "the layers' places in pages", err);
    s->groups = s->kv_layers ? mem_alloc(n_layers, sizeof *s->groups, "the groups of layers", err) : NULL;
    if (!s->groups) return -1;
    for (int l = 0; l < (int)n_layers; l++) {
        const int source = s->model->layers[l].kv_source;
        if (source == l) add_layer(s, l);
        else if (s->keys_of != s)
            s->kv_layers[l] = s->trunk->kv_layers[session_trunk_layer(s->model, l, s->trunk->model)];
        else s->kv_layers[l] = source < 0 ? (struct kv_layer){ .group = -1 } : s->kv_layers[source];
        if (is_recurrent_layer(s->model->layers[l].record)) add_recurrent_layer(s, l);
    }
    if (s->state_group.page_bytes) {
        s->segments = mem_alloc((size_t)chunk_rows(s), sizeof *s->segments, "the segments of chunks", err);
        if (!s->segments) return -1;
    }
    s->sequences = mem_alloc((size_t)s->n_sequences, sizeof *s->sequences, "the sequences", err);
    for (int i = 0; s->sequences && i < s->n_sequences; i++)
        if (session_open_sequence(s, &s->sequences[i], err)) return -1;
    return s->sequences ? 0 : -1;
}

void session_close_sequences(struct llamac_session *s) {
    session_discard_drafts(s);
    for (int i = 0; s->sequences && i < s->n_sequences; i++) session_close_sequence(s, &s->sequences[i]);
    mem_free(s->sequences);
    mem_free(s->segments);
    mem_free(s->groups);
    mem_free(s->kv_layers);
}

// ---- pages

// Other threads may read sizes and lengths during an eval.
static void count_pages(struct llamac_session *s, const struct kv_group *g, int change) {
    __atomic_store_n(&s->kv_bytes, s->kv_bytes + (size_t)change * g->page_bytes, __ATOMIC_RELAXED);
}
void session_count_page(struct llamac_session *s, const struct kv_group *g) { count_pages(s, g, 1); }
void session_set_length(struct sequence *q, int length) { __atomic_store_n(&q->length, length, __ATOMIC_RELAXED); }

uint8_t *session_take_page(struct llamac_session *s, const struct kv_group *g, llamac_error *err) {
    const size_t max_pages = (size_t)s->n_sequences * (size_t)ceil_div(s->context, KV_PAGE);
    llamac_error own = { 0 };   // `err` stays as it is if dropped states make room
    uint8_t *page = kv_page_alloc(s->pages, g->page_bytes, max_pages, &own);
    // drafts do not evict kept states: their branches share those, and may be rejected
    while (!page && !s->n_branches && session_drop_state(s))
        page = kv_page_alloc(s->pages, g->page_bytes, max_pages, &own);
    if (page) count_pages(s, g, 1);
    else if (err) *err = own;
    return page;
}
void session_release_page(struct llamac_session *s, const struct kv_group *g, uint8_t *page) {
    kv_page_release(page);
    count_pages(s, g, -1);
}
static void release_from(struct llamac_session *s, const struct kv_group *g, struct kv_table *kv, int first) {
    while (kv->end > max_int(first, kv->first)) session_release_page(s, g, kv->pages[--kv->end]);
    if (kv->end > first) kv->first = kv->end = 0;
    if (kv->end == 0) kv->start = 0;
}

void session_close_sequence(struct llamac_session *s, struct sequence *q) {
    for (int g = 0; q->kv && g < s->n_groups; g++) {
        release_from(s, &s->groups[g], &q->kv[g], 0);
        mem_free(q->kv[g].pages);
    }
    session_cut_states(s, q, 0);
    mem_free(q->kv);
}

// Returns the first page that a sequence of this length keeps.
static int first_kept_page(const struct kv_group *g, int length) {
    return g->window ? max_int(0, length + 1 - g->window - KV_REWIND) / KV_PAGE : 0;
}

// Returns the number of pages that a windowed group needs to compute a chunk.
static int pages_at_once(const struct llamac_session *s, const struct kv_group *g) {
    return (g->window + KV_REWIND + chunk_rows(s)) / KV_PAGE + 2;
}

// Returns where the pages of a table end before an eval that computes positions up to `length`. A windowed group gets
// no more than it needs at once: while chunks are computed, session_slide moves pages that left the window to the end.
static int reserved_end(const struct llamac_session *s, const struct kv_group *g, const struct kv_table *kv,
                        int length) {
    const int wanted = ceil_div(length, KV_PAGE);
    return g->window ? min_int(wanted, kv->end + pages_at_once(s, g)) : wanted;
}

static int append_pages(struct llamac_session *s, const struct kv_group *g, struct kv_table *kv, int length,
                        llamac_error *err) {
    const int end = reserved_end(s, g, kv, length);
    kv->wanted = ceil_div(length, KV_PAGE);
    while (kv->end < end) {
        uint8_t *page = session_take_page(s, g, err);
        if (!page) return -1;
        kv->pages[kv->end++] = page;
    }
    return 0;
}

size_t session_pages_limit(const struct llamac_session *s, int length) {
    size_t bytes = 0;
    for (int i = 0; i < s->n_groups; i++) {
        const struct kv_group *g = &s->groups[i];
        const int pages = ceil_div(length, KV_PAGE);   // a window keeps fewer pages than a chunk adds
        bytes += (size_t)(g->window ? min_int(pages, 2 * pages_at_once(s, g)) : pages) * g->page_bytes;
    }
    return bytes + (size_t)(length ? session_max_states(s) : 0) * s->state_group.page_bytes;
}

// Replaces the partial page at the end of a sequence with a copy if it is shared.
static int own_last_page(struct llamac_session *s, const struct kv_group *g, struct kv_table *kv, int length,
                         llamac_error *err) {
    uint8_t **last = &kv->pages[length / KV_PAGE];
    if (length % KV_PAGE == 0 || !kv_page_is_shared(*last)) return 0;
    uint8_t *copy = session_take_page(s, g, err);
    if (!copy) return -1;
    const int failed = kv_page_copy(copy, *last, err);
    session_release_page(s, g, failed ? copy : *last);
    if (!failed) *last = copy;
    return failed;
}

size_t session_missing_bytes(const struct llamac_session *s, int sequence, int length) {
    const struct sequence *q = &s->sequences[sequence];
    size_t bytes = 0;
    for (int i = 0; i < s->n_groups && length > q->length; i++) {
        const struct kv_group *g = &s->groups[i];
        bytes += (size_t)max_int(0, reserved_end(s, g, &q->kv[i], length) - q->kv[i].end) * g->page_bytes;
    }
    return bytes;
}

int session_reserve_pages(struct llamac_session *s, int sequence, int length, llamac_error *err) {
    struct sequence *q = session_sequence(s, sequence);
    if (length == q->length) return 0;
    for (int g = 0; g < s->n_groups; g++)
        if (own_last_page(s, &s->groups[g], &q->kv[g], q->length, err) ||
            append_pages(s, &s->groups[g], &q->kv[g], length, err))
            return -1;
    return 0;
}

void session_trim_pages(struct llamac_session *s, int sequence) {
    struct sequence *q = session_sequence(s, sequence);
    for (int g = 0; g < s->n_groups; g++)
        release_from(s, &s->groups[g], &q->kv[g], ceil_div(q->length, KV_PAGE));
    session_cut_states(s, q, q->length);
}

void session_slide(struct llamac_session *s, int sequence) {
    struct sequence *q = session_sequence(s, sequence);
    for (int i = 0; i < s->n_groups; i++) {
        const struct kv_group *g = &s->groups[i];
        struct kv_table *kv = &q->kv[i];
        for (const int first = first_kept_page(g, q->length); kv->first < first; kv->first++) {
            uint8_t *page = kv->pages[kv->first];
            if (kv->end < kv->wanted && !kv_page_is_shared(page)) kv->pages[kv->end++] = page;
            else session_release_page(s, g, page);
        }
        kv->start = max_int(kv->start, kv->first * KV_PAGE);
    }
}

// ---- truncating and forking

// Returns the smallest length other than 0 at which all layers of attention still have the positions that the next row
// sees.
static int window_limit(const struct llamac_session *s, const struct sequence *q) {
    int length = 0;
    for (int g = 0; g < s->n_groups; g++)
        if (q->kv[g].start) length = max_int(length, q->kv[g].start + s->groups[g].window - 1);
    return length;
}

// Returns the smallest length from which on a sequence can be cut to any length.
static int shortest(const struct llamac_session *s, const struct sequence *q) {
    return s->state_group.page_bytes ? q->length : window_limit(s, q);
}

int llamac_length(const llamac_session *s, int sequence) {
    if (sequence < 0 || sequence >= s->n_sequences) return -1;
    return __atomic_load_n(&s->sequences[sequence].length, __ATOMIC_RELAXED);
}

int llamac_shortest_length(const llamac_session *s, int sequence) {
    return llamac_length(s, sequence) < 0 ? -1 : shortest(s, &s->sequences[sequence]);
}

int llamac_cut_length(const llamac_session *s, int sequence, int length) {
    if (length < 0 || length > llamac_length(s, sequence)) return -1;
    const struct sequence *q = &s->sequences[sequence];
    const int cut = session_cut_length(s, q, length);
    return cut >= window_limit(s, q) ? cut : 0;
}

// Checks that a sequence can be cut to its first `length` positions. action: "truncate" or "fork".
static int check_cut(const struct llamac_session *s, int sequence, int length, const char *action, llamac_error *err) {
    const int now = llamac_length(s, sequence);
    if (now < 0) return bad_argument(err, "sequence is %d, expected 0 to %d", sequence, s->n_sequences - 1);
    if (length < 0 || length > now)
        return bad_argument(err, "cannot %s to length %d: expected 0 to %d, the sequence's length", action, length,
                            now);
    const struct sequence *q = &s->sequences[sequence];
    const int least = window_limit(s, q), cut = session_cut_length(s, q, length);
    if (cut < length)
        return bad_argument(err, "cannot %s to length %d: the recurrent layers' state is known after %d positions, not "
                            "after %d", action, length, cut, length);
    if (length && length < least)
        return bad_argument(err, "cannot %s to length %d: layers with a window have dropped positions that the next "
                            "token would see; expected 0 or %d to %d", action, length, least, now);
    return 0;
}

int llamac_truncate(llamac_session *s, int sequence, int length, llamac_error *err) {
    if (check_cut(s, sequence, length, "truncate", err)) return -1;
    session_discard_drafts(s);
    session_set_length(&s->sequences[sequence], length);
    session_trim_pages(s, sequence);
    return 0;
}

// Checks that two sessions can share pages: they must compute the same bits for the same tokens.
static int check_alike(const struct llamac_session *a, const struct llamac_session *b, llamac_error *err) {
    const struct config *c = a->model->config;
    if (a->model != b->model) return bad_argument(err, "cannot fork: the sessions belong to different models");
    if (a->kv_dtype != b->kv_dtype)
        return bad_argument(err, "cannot fork: the KV caches are in %s and %s", llamac_dtype_name(a->kv_dtype),
                            llamac_dtype_name(b->kv_dtype));
    if (a->pages != b->pages)
        return bad_argument(err, "cannot fork: one of the sessions is on a device, the other one is not");
    if (a->numerics != b->numerics)
        return bad_argument(err, "cannot fork: one of the sessions has fast numerics, the other one exact numerics");
    for (uint32_t t = 0; t < c->n_rope; t++) {
        if (session_uses_long_rope(a, t) != session_uses_long_rope(b, t))
            return bad_argument(err, "cannot fork: with contexts of %d and %d positions the sessions use different "
                                "RoPE tables", a->context, b->context);
    }
    return 0;
}

void session_share_prefix(struct llamac_session *to, int to_sequence, const struct llamac_session *from,
                          int from_sequence, int length) {
    struct sequence *q = session_sequence(to, to_sequence), *source = session_sequence(from, from_sequence);
    session_set_length(q, 0);
    session_trim_pages(to, to_sequence);
    for (int g = 0; g < to->n_groups; g++) {
        struct kv_table *kv = &q->kv[g];
        kv->first = kv->end = length ? source->kv[g].first : 0;
        kv->start = length ? source->kv[g].start : 0;
        while (kv->end < ceil_div(length, KV_PAGE)) {
            kv->pages[kv->end] = kv_page_share(source->kv[g].pages[kv->end]);
            kv->end++;
            count_pages(to, &to->groups[g], 1);
        }
        kv->wanted = kv->end;
    }
    session_share_states(to, q, source, length);
    session_set_length(q, length);
    session_slide(to, to_sequence);
}

void session_set_pages(struct llamac_session *s, int sequence, int length, const int32_t *first_positions,
                       uint8_t *const *pages) {
    struct sequence *q = session_sequence(s, sequence);
    session_set_length(q, 0);
    session_trim_pages(s, sequence);
    for (int g = 0; g < s->n_groups; g++) {
        struct kv_table *kv = &q->kv[g];
        kv->start = first_positions[g];
        kv->first = kv->end = kv->start / KV_PAGE;
        while (kv->end < ceil_div(length, KV_PAGE)) {
            kv->pages[kv->end++] = kv_page_share(*pages++);
            count_pages(s, &s->groups[g], 1);
        }
        kv->wanted = kv->end;
    }
    if (s->state_group.page_bytes && length) session_set_state(s, q, length, *pages);
    session_set_length(q, length);
}

int llamac_fork(llamac_session *to, int to_sequence, const llamac_session *from, int from_sequence, int length,
                llamac_error *err) {
    if (to_sequence < 0 || to_sequence >= to->n_sequences)
        return bad_argument(err, "sequence is %d, expected 0 to %d", to_sequence, to->n_sequences - 1);
    if (check_alike(to, from, err) || check_cut(from, from_sequence, length, "fork", err)) return -1;
    if (length > to->context)
        return err_set(err, LLAMAC_CONTEXT_FULL, "cannot fork %d positions into a context of %d", length, to->context);
    if (to == from && to_sequence == from_sequence) return llamac_truncate(to, to_sequence, length, err);
    session_discard_drafts(to);
    session_share_prefix(to, to_sequence, from, from_sequence, length);
    return 0;
}
