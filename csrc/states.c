// SPDX-License-Identifier: MIT
// states.c - the states of a session's recurrent layers: where evals write them, which earlier ones are kept, and what
// truncating and forking leave of them. See session.h.
//
// A state is a page of the pool: for each recurrent layer, its heads' matrices and the last inputs of its convolution.
// It is never updated while another holder or a cancelled chunk may need it: a chunk reads a sequence's last state and
// writes the new one to a spare page of the sequence. Once the chunk is complete, the page of the old state becomes the
// spare one, unless the old state is kept, shared or missing. An eval of several chunks therefore begins with two spare
// pages. It needs no more, because its later chunks replace states that the eval itself wrote: either their pages
// become spare, or they are kept, and then had pages of their own from the start.
//
// A state cannot be cut. So that a sequence can be truncated, some of its earlier states are kept: at the end of each
// eval of many rows, which is usually the end of a prompt; at the multiple of KEPT_NEAR_END before it, because the next
// prompt often differs in the last few tokens; at every KEPT_EVERY positions; and at the last multiple of KEPT_NEAR_END
// of an answer, because files of prefixes end at such a multiple. Restored states count as ends of prompts.
//
// Each draft has a state of its own until the drafts are discarded, so a sequence can continue after any of them.
#include "common.h"
#include "error.h"
#include "session.h"

enum {
    KEPT_EVERY = 256,
    KEPT_NEAR_END = 64,
    PROMPT_ROWS = 8,             // an eval of so many rows of a sequence is a prompt
    KEPT_BYTES = 256 << 20,      // of a sequence's kept states, if these are at least MIN_KEPT
    MIN_KEPT = 4,
};

int session_max_kept(const struct llamac_session *s) {
    const size_t fit = KEPT_BYTES / max_size(s->state_group.page_bytes, 1);
    return fit < MIN_KEPT ? MIN_KEPT : fit > MAX_KEPT ? MAX_KEPT : (int)fit;
}

int session_max_states(const struct llamac_session *s) {
    // a chunk writes one at each multiple of KEPT_EVERY, one near the end and the last one
    const int spares = 2, of_chunk = chunk_rows(s) / KEPT_EVERY + 2;
    return session_max_kept(s) + spares + of_chunk;
}

// ---- lists of states

static void remove_state(struct llamac_session *s, struct sequence *q, int i) {
    session_release_page(s, &s->state_group, q->states[i].page);
    for (q->n_states--; i < q->n_states; i++) q->states[i] = q->states[i + 1];
}

static void drop_spares(struct llamac_session *s, struct sequence *q, int left) {
    while (q->n_spares > left) session_release_page(s, &s->state_group, q->spares[--q->n_spares]);
}

void session_cut_states(struct llamac_session *s, struct sequence *q, int length) {
    while (q->n_states && q->states[q->n_states - 1].length > length) remove_state(s, q, q->n_states - 1);
    drop_spares(s, q, length > 0);
    if (!length) q->prompt_start = q->prompt_end = 0;
}

// Removes a state. Its page becomes spare if there is room for it.
static void retire_state(struct llamac_session *s, struct sequence *q, int i) {
    uint8_t *page = q->states[i].page;
    if (q->n_spares < (int)ARRAY_LEN(q->spares) && !kv_page_is_shared(page)) {
        session_count_page(s, &s->state_group);
        q->spares[q->n_spares++] = kv_page_share(page);
    }
    remove_state(s, q, i);
}

int session_cut_length(const struct llamac_session *s, const struct sequence *q, int length) {
    if (!s->state_group.page_bytes || length == q->length) return length;
    int cut = 0;
    for (int i = 0; i < q->n_states && q->states[i].length <= length; i++) cut = q->states[i].length;
    return cut;
}

// What is lost with a state. Ends of prompts are worth more than all others. Among equals, the loss is what truncations
// recompute without the state, relative to its distance from the end.
struct loss { int of_prompt; double recomputed; };

static struct loss loss_of(const struct sequence *q, int i) {
    const int before = i ? q->states[i - 1].length : 0, end = q->states[q->n_states - 1].length;
    const double rows = q->states[i + 1].length - before;
    return (struct loss){ q->states[i].kept == KEPT_PROMPT, rows / (end - q->states[i].length + KEPT_NEAR_END) };
}
static int is_less(struct loss a, struct loss b) {
    return a.of_prompt != b.of_prompt ? a.of_prompt < b.of_prompt : a.recomputed < b.recomputed;
}

// Removes the state that is the least loss if there are too many, but none of the last two.
static void thin_out(struct llamac_session *s, struct sequence *q) {
    if (q->n_states <= session_max_kept(s)) return;
    int least = 0;
    for (int i = 1; i < q->n_states - 2; i++)
        if (is_less(loss_of(q, i), loss_of(q, least))) least = i;
    remove_state(s, q, least);
}

// Whether a page is only that of kept states of this session: the pool gets it back once these are dropped.
static int is_droppable(const struct llamac_session *s, const uint8_t *page) {
    int kept = 0;
    for (int i = 0; i < s->n_sequences; i++)
        for (int k = 0; k < s->sequences[i].n_states - 1; k++) kept += s->sequences[i].states[k].page == page;
    return kv_page_references(page) == kept;
}

int session_drop_state(struct llamac_session *s) {
    struct sequence *from = NULL;
    struct loss smallest = { 0 };
    int least = 0;
    for (int i = 0; i < s->n_sequences; i++)
        for (int k = 0; k < s->sequences[i].n_states - 1; k++) {
            struct sequence *q = &s->sequences[i];
            const struct loss loss = loss_of(q, k);
            if ((from && !is_less(loss, smallest)) || !is_droppable(s, q->states[k].page)) continue;
            from = q, least = k, smallest = loss;
        }
    if (from) remove_state(s, from, least);
    return from != NULL;
}

// Makes a state the last one of a sequence. The page of the state before it becomes spare unless that is kept.
static void push_state(struct llamac_session *s, struct sequence *q, struct state state) {
    const struct state *last = q->n_states ? &q->states[q->n_states - 1] : NULL;
    if (q->n_spares && state.page == q->spares[0]) q->spares[0] = q->spares[--q->n_spares];
    if (last && !last->kept) retire_state(s, q, q->n_states - 1);
    for (int i = q->n_states - 1; i >= 0 && state.kept; i--)
        if (q->states[i].kept == KEPT_LATEST) retire_state(s, q, i);
    q->states[q->n_states++] = state;
    thin_out(s, q);
}

void session_share_states(struct llamac_session *to, struct sequence *q, const struct sequence *source, int length) {
    for (int i = 0; i < source->n_states && source->states[i].length <= length; i++) {
        q->states[q->n_states++] = source->states[i];
        session_count_page(to, &to->state_group);
        kv_page_share(source->states[i].page);
    }
    q->prompt_start = source->prompt_start, q->prompt_end = source->prompt_end;
}

void session_set_state(struct llamac_session *s, struct sequence *q, int length, uint8_t *page) {
    q->states[q->n_states++] = (struct state){ .length = length, .kept = KEPT_PROMPT, .page = kv_page_share(page) };
    session_count_page(s, &s->state_group);
}

void session_add_states(struct llamac_session *s, struct sequence *q, const int32_t *lengths, uint8_t *const *pages,
                        int n) {
    q->states[n] = q->states[0];
    q->n_states = n + 1;
    for (int i = 0; i < n; i++) {
        q->states[n - 1 - i] = (struct state){ lengths[i], KEPT_PROMPT, kv_page_share(pages[i]) };
        session_count_page(s, &s->state_group);
    }
    while (q->n_states > session_max_kept(s)) thin_out(s, q);
}

// ---- evals

// Returns how many spare pages a sequence needs for an eval that gives it `rows` of n_rows rows.
static int spares_for(const struct llamac_session *s, int rows, int n_rows) {
    return !rows || !s->state_group.page_bytes ? 0 : rows > 1 && n_rows > CHUNK_ROWS ? 2 : 1;
}

// Returns the bytes that session_drop_state can free.
static size_t droppable_bytes(const struct llamac_session *s) {
    struct kv_count count = kv_count_start();
    for (int i = 0; i < s->n_sequences; i++)
        for (int k = 0; k < s->sequences[i].n_states - 1; k++) {
            uint8_t *page = s->sequences[i].states[k].page;
            if (is_droppable(s, page)) kv_count_page(&count, page);
        }
    return kv_count_end(&count);
}

int session_check_room(const struct llamac_session *s, const int *lengths, int n_rows, llamac_error *err) {
    if (!s->state_group.page_bytes) return 0;
    size_t missing = 0;
    for (int i = 0; i < s->n_sequences; i++) {
        const struct sequence *q = &s->sequences[i];
        const int spares = spares_for(s, lengths[i] - q->length, n_rows) - q->n_spares;
        missing += session_missing_bytes(s, i, lengths[i]) + (size_t)max_int(0, spares) * s->state_group.page_bytes;
    }
    // an eval that needs nothing computes even if the budget is now smaller than what is in use
    const size_t excess = missing ? kv_pool_excess(s->pages, missing) : 0,
                 droppable = excess ? droppable_bytes(s) : 0;
    if (excess <= droppable) return 0;
    return err_set(err, LLAMAC_NO_MEMORY,
                   "with the %zu bytes or more that the eval needs, the KV caches of this model would exceed their "
                   "budget by %zu bytes, and earlier states of recurrent layers take %zu. Truncate sequences, close "
                   "sessions, or raise the budget", missing, excess, droppable);
}

int session_reserve_state(struct llamac_session *s, struct sequence *q, int length, int n_rows, llamac_error *err) {
    const int rows = length - q->length;
    if (!rows || !s->state_group.page_bytes) return 0;
    q->is_prompt = rows >= PROMPT_ROWS;
    if (q->is_prompt && q->length != q->prompt_end) q->prompt_start = q->length;
    // a prompt that is computed in several evals ends where the last one ends
    for (int i = 0; i < q->n_states && q->is_prompt; i++)
        if (q->states[i].length > q->prompt_start && q->states[i].kept) q->states[i].kept = KEPT;
    if (q->is_prompt) q->prompt_end = length;
    for (const int needed = spares_for(s, rows, n_rows); q->n_spares < needed; q->n_spares++) {
        q->spares[q->n_spares] = session_take_page(s, &s->state_group, err);
        if (!q->spares[q->n_spares]) return -1;
    }
    return 0;
}

// Returns whether and why the state after `length` positions is kept.
static int kept_at(const struct sequence *q, int length) {
    const int near_end = (q->target - 1) / KEPT_NEAR_END * KEPT_NEAR_END;
    if (q->is_prompt && (length == q->target || length == near_end)) return KEPT_PROMPT;
    if (length % KEPT_EVERY == 0) return KEPT;
    return !q->is_prompt && length % KEPT_NEAR_END == 0 ? KEPT_LATEST : NOT_KEPT;
}

// Returns the page with the state after all positions of a sequence; NULL: zeros.
static uint8_t *last_state(const struct sequence *q) { return q->n_states ? q->states[q->n_states - 1].page : NULL; }

// Returns the page with a sequence's state before the segments that follow; NULL: zeros.
static uint8_t *state_before(const struct llamac_session *s, int sequence) {
    const struct sequence *q = &s->sequences[sequence];
    for (int i = s->n_segments - 1; i >= 0; i--)
        if (s->segments[i].sequence == sequence) return s->segments[i].to;
    return last_state(q);
}

void session_begin_chunk(struct llamac_session *s, const llamac_row *rows, int n) {
    s->n_segments = 0;
    for (int r = 0, first = 0; r < n && s->state_group.page_bytes; r++) {
        const int sequence = rows[r].sequence, length = rows[r].position + 1;
        struct sequence *q = &s->sequences[sequence];
        const int ends = r + 1 == n || rows[r + 1].sequence != sequence;
        int kept = kept_at(q, length);
        if (!kept && !ends) continue;
        uint8_t *to = kept ? kv_page_alloc(s->pages, s->state_group.page_bytes, 1, NULL) : q->spares[0];
        if (to && kept) session_count_page(s, &s->state_group);
        if (!to && !ends) continue;   // no memory for a state that need not be kept
        if (!to) to = q->spares[0], kept = NOT_KEPT;
        const struct state_segment segment = {
            .sequence = sequence, .first = first, .last = r + 1, .length = length, .kept = kept,
            .from = state_before(s, sequence), .to = to,
        };
        s->segments[s->n_segments++] = segment;
        first = r + 1;
    }
}

// Whether a segment's state was overwritten: it was in a spare page, and the chunk has more rows of its sequence.
static int is_passed(const struct llamac_session *s, int segment) {
    const struct state_segment *g = &s->segments[segment];
    for (int i = segment + 1; !g->kept && i < s->n_segments; i++)
        if (s->segments[i].sequence == g->sequence) return 1;
    return 0;
}

void session_end_chunk(struct llamac_session *s, int computed) {
    for (int i = 0; i < s->n_segments; i++) {
        const struct state_segment *g = &s->segments[i];
        struct sequence *q = &s->sequences[g->sequence];
        if (is_passed(s, i)) continue;
        if (computed) push_state(s, q, (struct state){ .length = g->length, .kept = g->kept, .page = g->to });
        else if (g->kept) session_release_page(s, &s->state_group, g->to);
        if (computed && g->length == q->target) drop_spares(s, q, 1);
    }
    s->n_segments = 0;
}

// ---- drafts

void session_return_draft_states(struct llamac_session *s) {
    for (int i = 0; i < s->n_drafts; i++) {
        uint8_t *page = s->drafts[i].state;
        if (page && kv_page_is_shared(page)) session_release_page(s, &s->state_group, page);   // it was accepted
        else if (page) s->free_states[s->n_free_states++] = page;
    }
}

void session_drop_free_states(struct llamac_session *s) {
    while (s->n_free_states) session_release_page(s, &s->state_group, s->free_states[--s->n_free_states]);
}

// Reuses the pages of the previous drafts: the system would clear new ones, which takes as long as writing the states.
int session_reserve_draft_states(struct llamac_session *s, llamac_error *err) {
    for (int i = 0; i < s->n_drafts && s->state_group.page_bytes; i++) {
        uint8_t **page = &s->drafts[i].state;
        if (s->n_free_states) {
            *page = s->free_states[--s->n_free_states];
            continue;
        }
        // not session_take_page, which may drop kept states: drafts are not worth them
        *page = kv_page_alloc(s->pages, s->state_group.page_bytes, (size_t)s->n_drafts, err);
        if (!*page) return -1;
        session_count_page(s, &s->state_group);
    }
    session_drop_free_states(s);
    return 0;
}

void session_begin_drafts(struct llamac_session *s, const llamac_row *rows) {
    s->n_segments = 0;
    for (int i = 0; i < s->n_drafts && s->state_group.page_bytes; i++) {
        const struct draft *d = &s->drafts[i];
        s->segments[s->n_segments++] = (struct state_segment){
            .sequence = rows[i].sequence, .first = i, .last = i + 1, .length = d->length, .kept = NOT_KEPT,
            .from = d->parent >= 0 ? s->drafts[d->parent].state : last_state(&s->sequences[d->sequence]),
            .to = d->state,
        };
    }
}

void session_accept_states(struct llamac_session *s, int draft) {
    if (!s->state_group.page_bytes) return;
    struct sequence *q = &s->sequences[s->drafts[draft].sequence];
    int path[LLAMAC_MAX_DRAFTS], n = 0;
    for (int i = draft; i >= 0; i = s->drafts[i].parent) path[n++] = i;
    q->is_prompt = 0;
    while (n--) {
        const struct draft *d = &s->drafts[path[n]];
        const int kept = kept_at(q, d->length);
        if (n && !kept) continue;
        session_count_page(s, &s->state_group);
        push_state(s, q, (struct state){ .length = d->length, .kept = kept, .page = kv_page_share(d->state) });
    }
}
