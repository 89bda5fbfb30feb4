// SPDX-License-Identifier: MIT
// shift.c - removes positions from the middle of a sequence: later positions move down, and their keys are rotated.
//
// One thread moves each KV head of a layer, in ascending order of positions. Each slot is read before it is
// overwritten, so unshared pages are updated in place. Shared pages are replaced with new ones, which are all allocated
// before anything moves. Pages on a device are copied to host memory, updated there, and copied back.
#include <string.h>
#include "common.h"
#include "error.h"
#include "mem.h"
#include "pool.h"
#include "rope.h"
#include "session.h"

enum { ROTATED_AT_ONCE = 256 };   // positions whose rotations are in memory at once

// The pages of one group: the new ones of positions from first * KV_PAGE on are targets[first] to targets[end - 1].
// Page i of the content that moves is from[i] in memory, and goes to to[i]: the pages themselves, or copies of those on
// a device.
struct moved_pages { uint8_t **targets; int first, end; uint8_t **from, **to, **copies, *memory; };

struct shift {
    struct llamac_session *session;
    int sequence, begin, by, length;   // of the new sequence; positions from `begin` on come from `by` later
    struct moved_pages *pages;         // (n_groups)
    float *rotations;                  // (RoPE tables, ROTATED_AT_ONCE, head_dim): rope_dim / 2 cosines, then as many
                                       // sines
};

// ---- checks

// Returns whether the norm of a layer's keys commutes with their rotation. A rotation preserves the root mean square of
// a head; the weights must be equal for both elements of each rotated pair.
static int norm_commutes(const struct llamac_model *m, int l) {
    const struct layer *layer = &m->layers[l];
    const int half = (int)m->config->rope_dim[layer->record->rope] / 2;
    const float *weight = layer->attn_k_norm;
    for (int j = 0; j < half && weight; j++)
        if (weight[j] != weight[j + half]) return 0;   // also NaNs
    return 1;
}

int llamac_shift_check(const llamac_model *m, llamac_error *err) {
    const struct config *c = m->config;
    if (c->two_sided)
        return err_set(err, LLAMAC_UNSUPPORTED, "cannot shift: this model is an encoder, whose rows see all positions");
    if (c->position == POSITION_LEARNED)
        return err_set(err, LLAMAC_UNSUPPORTED, "cannot shift: this model has learned positions, and its keys and "
                       "values cannot move to others");
    if (m->max_channels)
        return err_set(err, LLAMAC_UNSUPPORTED, "cannot shift: this model has recurrent layers, whose state cannot "
                       "forget single positions");
    if (!c->qk_norm_after_rope) return 0;
    for (int l = 0; l < (int)c->n_layers; l++)
        if (m->layers[l].kv_source == l && m->layers[l].record->rope >= 0 && !norm_commutes(m, l))
            return err_set(err, LLAMAC_UNSUPPORTED, "cannot shift: layer %d norms its keys after RoPE in a way that "
                           "does not commute with it, so stored keys cannot be rotated again", l);
    return 0;
}

// Returns the maximum number of positions that can be removed from `begin` on. Group g then starts at llamac_shift's
// `start`, and the next token must not see earlier positions.
static int longest(const struct llamac_session *s, const struct sequence *q, int begin) {
    int most = q->length - begin;
    for (int g = 0; g < s->n_groups; g++)
        if (q->kv[g].start)
            most = min_int(most, q->length + 1 - s->groups[g].window - min_int(begin, q->kv[g].start));
    return max_int(most, 0);
}

int llamac_longest_shift(const llamac_session *s, int sequence, int begin) {
    return begin < 0 || begin > llamac_length(s, sequence) ? -1 : longest(s, &s->sequences[sequence], begin);
}

static int check_range(const struct llamac_session *s, int sequence, int begin, int end, llamac_error *err) {
    const int length = llamac_length(s, sequence);
    if (length < 0) return bad_argument(err, "sequence is %d, expected 0 to %d", sequence, s->n_sequences - 1);
    if (begin < 0 || end < begin || end > length)
        return bad_argument(err, "cannot remove positions %d to %d: expected a range within 0 to %d, the sequence's "
                            "length", begin, end, length);
    const int most = longest(s, &s->sequences[sequence], begin);
    if (end - begin > most && end - begin < length)
        return bad_argument(err, "cannot remove positions %d to %d: layers with a window have dropped positions that "
                            "the next token would see then; remove at most %d from position %d on", begin, end, most,
                            begin);
    return 0;
}

// ---- pages

// Chooses the target of each page of a group: the page itself, or a new one if the page is shared or missing.
static int take_targets(struct shift *x, int g, llamac_error *err) {
    struct llamac_session *s = x->session;
    const struct kv_group *group = &s->groups[g];
    const struct kv_table *kv = &session_sequence(s, x->sequence)->kv[g];
    struct moved_pages *pages = &x->pages[g];
    const int first_moved = max_int(x->begin, kv->start - x->by);
    pages->targets = mem_alloc((size_t)ceil_div(s->context, KV_PAGE), sizeof *pages->targets, "a list of pages", err);
    if (!pages->targets) return -1;
    pages->from = kv->pages, pages->to = pages->targets;
    pages->first = pages->end = first_moved / KV_PAGE;
    for (; pages->end < ceil_div(x->length, KV_PAGE); pages->end++) {
        uint8_t *page = pages->end < kv->first ? NULL : kv->pages[pages->end];
        if (!page || kv_page_is_shared(page)) {
            uint8_t *copy = session_take_page(s, group, err);
            if (!copy) return -1;
            if (page && pages->end * KV_PAGE < x->begin && !s->device) memcpy(copy, page, group->page_bytes);
            page = copy;
        }
        pages->targets[pages->end] = page;
    }
    return 0;
}

// Releases the pages that were allocated for a shift that failed.
static void drop_targets(struct shift *x, int g) {
    const struct kv_table *kv = &session_sequence(x->session, x->sequence)->kv[g];
    const struct moved_pages *pages = &x->pages[g];
    for (int i = pages->first; i < pages->end; i++)
        if (i < kv->first || pages->targets[i] != kv->pages[i])
            session_release_page(x->session, &x->session->groups[g], pages->targets[i]);
}

// Replaces a group's pages with the targets, and releases the old ones.
static void install_targets(struct shift *x, int g) {
    struct kv_table *kv = &session_sequence(x->session, x->sequence)->kv[g];
    const struct moved_pages *pages = &x->pages[g];
    for (int i = max_int(pages->first, kv->first); i < kv->end; i++)
        if (i >= pages->end || pages->targets[i] != kv->pages[i])
            session_release_page(x->session, &x->session->groups[g], kv->pages[i]);
    for (int i = pages->first; i < pages->end; i++) kv->pages[i] = pages->targets[i];
    if (kv->start > x->begin) {
        kv->start = max_int(x->begin, kv->start - x->by);
        kv->first = kv->start / KV_PAGE;
    }
    kv->end = kv->wanted = pages->end;
}

// Copies a group's pages from the device. They are updated in place, because content is read before it is overwritten.
static int read_copies(struct shift *x, int g, llamac_error *err) {
    const struct kv_table *kv = &session_sequence(x->session, x->sequence)->kv[g];
    struct moved_pages *pages = &x->pages[g];
    const size_t bytes = x->session->groups[g].page_bytes;
    const int end = max_int(kv->end, pages->end);
    pages->copies = mem_alloc((size_t)end, sizeof *pages->copies, "a list of pages", err);
    if (!pages->copies) return -1;
    pages->memory = mem_alloc_huge((size_t)(end - pages->first) * bytes, "copies of a device's pages", err);
    if (!pages->memory) return -1;
    pages->from = pages->to = pages->copies;
    for (int i = pages->first; i < end; i++) {
        pages->copies[i] = pages->memory + (size_t)(i - pages->first) * bytes;
        if (i >= kv->first && i < kv->end && kv_page_read(pages->copies[i], kv->pages[i], err)) return -1;
    }
    return 0;
}

static int write_copies(const struct moved_pages *pages, llamac_error *err) {
    for (int i = pages->first; i < pages->end; i++)
        if (kv_page_write(pages->targets[i], pages->copies[i], err)) return -1;
    return 0;
}

static void free_pages(struct moved_pages *pages) {
    mem_free(pages->targets);
    mem_free(pages->copies);
    mem_free(pages->memory);
}

// ---- moving

// The slot of a position: the keys or values of a KV head in a page, and the index in it.
struct place { uint8_t *at; int slot; };

// Copies the groups of codes from `group` on of a key in q8, because requantizing unrotated values would change them.
static void copy_key_codes(struct place from, struct place to, int head_dim, int group) {
    const int groups = ceil_div(head_dim, GROUP_COLUMNS);
    const size_t strip_bytes = kv_key_strip_bytes(LLAMAC_Q8, head_dim);
    const uint8_t *source = from.at + (size_t)(from.slot / STRIP_ROWS) * strip_bytes;
    uint8_t *target = to.at + (size_t)(to.slot / STRIP_ROWS) * strip_bytes;
    const size_t from_row = (size_t)(from.slot % STRIP_ROWS), to_row = (size_t)(to.slot % STRIP_ROWS);
    for (; group < groups; group++) {
        const int first = group / BLOCK_GROUPS * BLOCK_GROUPS, in_block = min_int(BLOCK_GROUPS, groups - first);
        const size_t block = (size_t)(first / BLOCK_GROUPS) * block_bytes(LLAMAC_Q8_0, BLOCK_GROUPS);
        const size_t scales = block + (size_t)(group - first) * STRIP_ROWS * sizeof(uint16_t);
        const size_t codes = block + block_scale_bytes(LLAMAC_Q8_0, in_block) +
                             (size_t)(group - first) * group_code_bytes(LLAMAC_Q8_0);
        memcpy(target + scales + 2 * to_row, source + scales + 2 * from_row, sizeof(uint16_t));
        for (size_t line = 0; line < group_code_bytes(LLAMAC_Q8_0); line += LINE_BYTES)
            memcpy(target + codes + line + 4 * to_row, source + codes + line + 4 * from_row, 4);
    }
}

static void copy_value(int dtype, struct place from, struct place to, int value_dim) {
    if (dtype == LLAMAC_Q8) {
        memcpy(to.at + 2 * to.slot, from.at + 2 * from.slot, sizeof(uint16_t));
        for (int d = 0; d < padded_head_dim(value_dim); d++)
            to.at[kv_value_code_offset(to.slot, d)] = from.at[kv_value_code_offset(from.slot, d)];
        return;
    }
    const size_t column_bytes = kv_value_strip_bytes(dtype) / KV_PAGE;
    for (int strip = 0; strip < padded_head_dim(value_dim) / STRIP_ROWS; strip++) {
        const size_t start = (size_t)strip * kv_value_strip_bytes(dtype);
        memcpy(to.at + start + (size_t)to.slot * column_bytes, from.at + start + (size_t)from.slot * column_bytes,
               column_bytes);
    }
}

static float *rotation_of(const struct shift *x, int table, int index) {
    return x->rotations + ((size_t)table * ROTATED_AT_ONCE + (size_t)index) * x->session->model->config->head_dim;
}

// Moves one key. rotation: NULL if the layer has no RoPE. key: (head_dim), for the numbers.
static void move_key(const struct llamac_session *s, struct place from, struct place to, int head_dim,
                     const float *rotation, int half, float *key) {
    const int is_q8 = s->kv_dtype == LLAMAC_Q8;
    if (rotation || !is_q8) {
        s->kernels->load_key[s->kv_dtype](from.at, from.slot, head_dim, key);
        if (rotation) s->kernels->rotate(key, rotation, rotation + half, half);
        s->kernels->store_key[s->kv_dtype](to.at, to.slot, head_dim, key);
    }
    if (is_q8) copy_key_codes(from, to, head_dim, rotation ? ceil_div(2 * half, GROUP_COLUMNS) : 0);
}

// Moves the positions from `first` on, at most ROTATED_AT_ONCE, of one KV head of a layer.
static void move_head(const struct shift *x, int l, int head, int first, int last, float *key) {
    const struct llamac_session *s = x->session;
    const struct layer *layer = &s->model->layers[l];
    const struct kv_view kv = session_kv(s, x->sequence, l, head);
    const struct moved_pages *pages = &x->pages[s->kv_layers[l].group];
    const int table = layer->record->rope, half = table < 0 ? 0 : (int)s->model->config->rope_dim[table] / 2;
    const int start = session_sequence(s, x->sequence)->kv[s->kv_layers[l].group].start;
    for (int p = max_int(first, start - x->by); p < last; p++) {
        uint8_t *source = pages->from[(p + x->by) / KV_PAGE], *target = pages->to[p / KV_PAGE];
        const int from = (p + x->by) % KV_PAGE, to = p % KV_PAGE;
        move_key(s, (struct place){ source + kv.key_offset, from }, (struct place){ target + kv.key_offset, to },
                 layer->heads.dim, table < 0 ? NULL : rotation_of(x, table, p - first), half, key);
        copy_value(s->kv_dtype, (struct place){ source + kv.value_offset, from },
                   (struct place){ target + kv.value_offset, to }, layer->heads.value_dim);
    }
}

// A member's share of the rotations, then of the heads, for ROTATED_AT_ONCE positions at a time.
static void move(void *argument, const struct member *member) {
    const struct shift *x = argument;
    const struct llamac_model *m = x->session->model;
    float *key = x->session->scratch.threads[member->index].attention;
    for (int first = x->begin; first < x->length; first += ROTATED_AT_ONCE) {
        const int n = min_int(ROTATED_AT_ONCE, x->length - first);
        int i, last;
        pool_share(member, n, &i, &last);
        for (; i < last; i++)
            for (uint32_t t = 0; t < m->config->n_rope; t++) {
                const int half = (int)m->config->rope_dim[t] / 2, to = first + i;
                float *cosines = rotation_of(x, (int)t, i);
                rope_turns(to + x->by, to, session_inv_freq(x->session, t), half, cosines, cosines + half);
            }
        pool_barrier(member);
        int heads = 0, from, until;
        for (uint32_t l = 0; l < m->config->n_layers; l++)
            heads += m->layers[l].kv_source == (int)l ? m->layers[l].heads.n_kv : 0;
        pool_share(member, heads, &from, &until);
        for (int l = 0, h = 0; l < (int)m->config->n_layers; l++)
            for (int head = 0; m->layers[l].kv_source == l && head < m->layers[l].heads.n_kv; head++, h++)
                if (h >= from && h < until) move_head(x, l, head, first, first + n, key);
        pool_barrier(member);
        pool_pause(member);
    }
}

// Allocates the memory for a shift and moves the positions. On failure nothing changes.
static int move_positions(struct shift *x, llamac_error *err) {
    struct llamac_session *s = x->session;
    const struct config *c = s->model->config;
    if (session_reserve_rows(s, 1, 1, err)) return -1;   // scratch for the current number of threads
    x->rotations = mem_alloc((size_t)c->n_rope * ROTATED_AT_ONCE * c->head_dim + 1, sizeof *x->rotations, "rotations",
                             err);
    x->pages = x->rotations ? mem_alloc((size_t)s->n_groups, sizeof *x->pages, "lists of pages", err) : NULL;
    if (!x->pages) return -1;
    for (int g = 0; g < s->n_groups; g++)
        if (take_targets(x, g, err) || (s->device && read_copies(x, g, err))) return -1;
    pool_run(&(struct pool_job){ s->threads, 0, move, x }, &s->contention[RUN_MANY_ROWS], NULL);
    return 0;
}

int llamac_shift(llamac_session *s, int sequence, int begin, int end, llamac_error *err) {
    if (llamac_shift_check(s->model, err) || check_range(s, sequence, begin, end, err)) return -1;
    struct sequence *q = &s->sequences[sequence];
    if (begin == end) return 0;
    if (end == q->length && (begin == 0 || begin >= llamac_shortest_length(s, sequence)))
        return llamac_truncate(s, sequence, begin, err);
    session_discard_drafts(s);
    struct shift x = { .session = s, .sequence = sequence, .begin = begin, .by = end - begin,
                       .length = q->length - (end - begin) };
    const int failed = move_positions(&x, err);
    int lost = 0;   // whether the device failed while the moved content was copied back
    for (int g = 0; g < s->n_groups && s->device && !failed && !lost; g++) lost = write_copies(&x.pages[g], err);
    for (int g = 0; x.pages && g < s->n_groups; g++) {
        (failed ? drop_targets : install_targets)(&x, g);
        free_pages(&x.pages[g]);
    }
    if (!failed) session_set_length(q, lost ? 0 : x.length);
    if (lost) session_trim_pages(s, sequence);
    mem_free(x.pages);
    mem_free(x.rotations);
    return failed || lost ? -1 : 0;
}
