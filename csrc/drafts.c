// SPDX-License-Identifier: MIT
// drafts.c - trees of draft tokens: rows that are computed but not appended, unless one of them is accepted.
//
// Each path from a root to a leaf is a branch: a separate sequence, forked from the sequence that the drafts extend. A
// draft is computed once, in the first branch that contains it; its keys and values are stored in all of them. A
// draft's keys are therefore at their final positions, and attention adds them in the same order: the bits are those of
// appending its path. In depth-first order the branches of a draft are adjacent. The state of recurrent layers after a
// draft is stored once and belongs to the draft.
#include "common.h"
#include "error.h"
#include "eval.h"
#include "mem.h"

_Static_assert((int)LLAMAC_MAX_DRAFTS <= (int)CHUNK_ROWS, "drafts form one chunk");

// Discards the drafts, except for the pages of their states, which it returns to s->free_states.
static void clear_drafts(struct llamac_session *s) {
    for (int i = 0; i < s->n_branches; i++) session_close_sequence(s, &s->branches[i]);
    session_return_draft_states(s);
    mem_free(s->branches);
    mem_free(s->drafts);
    s->branches = NULL, s->drafts = NULL, s->n_branches = s->n_drafts = 0;
}

void session_discard_drafts(struct llamac_session *s) {
    clear_drafts(s);
    session_drop_free_states(s);
}

// Returns whether draft `parent` is draft i or one of its ancestors. -1 is an ancestor of all drafts.
static int is_ancestor(const llamac_draft *drafts, int parent, int i) {
    while (i > parent) i = drafts[i].parent;
    return i == parent;
}

// Checks the drafts. Fills rows, whose sequences are branches; last_branches; and `to`. Returns the number of branches,
// or -1.
static int plan_branches(const struct llamac_session *s, const llamac_draft *drafts, int n, llamac_row *rows,
                         int *last_branches, struct draft *to, llamac_error *err) {
    const uint32_t vocab_size = s->model->config->vocab_size;
    int branches = 0;
    for (int i = 0; i < n; i++) {
        const llamac_draft *d = &drafts[i];
        if (d->sequence < 0 || d->sequence >= s->n_sequences)
            return bad_argument(err, "draft %d: sequence is %d, expected 0 to %d", i, d->sequence, s->n_sequences - 1);
        if (d->token < 0 || (uint32_t)d->token >= vocab_size)
            return bad_argument(err, "draft %d: token is %d, expected 0 to %u", i, d->token, vocab_size - 1);
        if (d->parent < -1 || d->parent >= i || !is_ancestor(drafts, d->parent, i - 1))
            return bad_argument(err, "draft %d: parent is %d, expected %d, one of its ancestors, or -1: drafts are in "
                                "depth-first order", i, d->parent, i - 1);
        if (d->parent >= 0 && drafts[d->parent].sequence != d->sequence)
            return bad_argument(err, "draft %d: sequence is %d, but its parent's is %d", i, d->sequence,
                                drafts[d->parent].sequence);
        const int position = d->parent >= 0 ? to[d->parent].length : s->sequences[d->sequence].length;
        if (position >= s->context)
            return err_set(err, LLAMAC_CONTEXT_FULL, "draft %d: position %d does not fit the context of %d positions",
                           i, position, s->context);
        if (i == 0 || d->parent != i - 1) branches++;
        to[i] = (struct draft){ .sequence = d->sequence, .branch = branches - 1, .parent = d->parent,
                                .length = position + 1 };
        rows[i] = (llamac_row){ d->token, s->n_sequences + branches - 1, position, d->want_logits };
    }
    for (int i = 0; i < n; i++) last_branches[i] = rows[i].sequence;
    for (int i = n - 1; i >= 0; i--)
        if (drafts[i].parent >= 0)
            last_branches[drafts[i].parent] = max_int(last_branches[drafts[i].parent], last_branches[i]);
    return branches;
}

// Forks each branch from its sequence and reserves pages for its drafts. The last draft of a branch is its leaf.
static int open_branches(struct llamac_session *s, int n_branches, llamac_error *err) {
    s->branches = mem_alloc((size_t)n_branches, sizeof *s->branches, "the branches of drafts", err);
    if (!s->branches) return -1;
    for (int i = 0; i < s->n_drafts; i++) {
        const struct draft *d = &s->drafts[i];
        if (i + 1 < s->n_drafts && s->drafts[i + 1].branch == d->branch) continue;
        s->n_branches++;
        if (session_open_sequence(s, &s->branches[d->branch], err)) return -1;
        const int branch = s->n_sequences + d->branch;
        session_share_prefix(s, branch, s, d->sequence, s->sequences[d->sequence].length);
        if (session_reserve_pages(s, branch, d->length, err)) return -1;
    }
    return 0;
}

// Computes drafts, with memory for their rows provided.
static int compute_drafts(struct llamac_session *s, const llamac_draft *drafts, int n, llamac_row *rows,
                          int *last_branches, float *logits, const llamac_eval_options *options, llamac_error *err) {
    const int n_branches = plan_branches(s, drafts, n, rows, last_branches, s->drafts, err);
    if (n_branches < 0 || eval_check(s, rows, n, logits, options, err)) return -1;
    int longest = 1;
    for (int i = 0; i < n; i++) longest = max_int(longest, s->drafts[i].length);
    if ((!s->device && session_reserve_rows(s, n, longest, err)) || session_reserve_draft_states(s, err) ||
        open_branches(s, n_branches, err))
        return -1;
    struct eval e = eval_of(s, n, options);
    e.last_branches = last_branches;
    const struct pool_job job = eval_chunk(&e, rows, n, logits);   // at most LLAMAC_MAX_DRAFTS rows are one chunk
    session_begin_drafts(s, rows);
    const int failed = s->device && eval_on_device(&e, err) && !e.cancel.seen;
    if (!s->device && !cancelled(&e.cancel)) pool_run(&job, &s->contention[run_kind(&e)], &e.cancel);
    session_end_chunk(s, 0);   // the states belong to the drafts
    if (failed) return -1;
    if (e.cancel.seen) return eval_cancelled(&e, n, err);
    for (int i = 0; i < n; i++) session_set_length(&s->branches[s->drafts[i].branch], s->drafts[i].length);
    return 0;
}

int llamac_eval_drafts(llamac_session *s, const llamac_draft *drafts, int n_drafts, float *logits,
                       const llamac_eval_options *options, llamac_error *err) {
    if (options && options->rows_done) *options->rows_done = 0;
    clear_drafts(s);
    if (n_drafts <= 0 || n_drafts > LLAMAC_MAX_DRAFTS) session_drop_free_states(s);
    if (n_drafts < 0 || n_drafts > LLAMAC_MAX_DRAFTS)
        return bad_argument(err, "n_drafts is %d, expected 0 to %d", n_drafts, LLAMAC_MAX_DRAFTS);
    if (!n_drafts) return 0;
    const char *kind = format_kind_without_logits(s->model->config);
    if (kind) return err_set(err, LLAMAC_UNSUPPORTED, "cannot compute drafts: the model is %s", kind);
    if (s->keys_of != s)   // a branch is a fork of a sequence with pages
        return err_set(err, LLAMAC_UNSUPPORTED, "cannot compute trees of drafts: the model is an assistant, whose rows "
                       "are not appended: use llamac_eval");
    llamac_row *rows = mem_alloc((size_t)n_drafts, sizeof *rows, "the rows of drafts", err);
    int *last_branches = rows ? mem_alloc((size_t)n_drafts, sizeof *last_branches, "the branches of drafts", err)
                              : NULL;
    s->drafts = last_branches ? mem_alloc((size_t)n_drafts, sizeof *s->drafts, "the drafts", err) : NULL;
    s->n_drafts = s->drafts ? n_drafts : 0;
    const int failed =
        !s->drafts || compute_drafts(s, drafts, n_drafts, rows, last_branches, logits, options, err);
    if (failed) session_discard_drafts(s);
    else if (options && options->rows_done) *options->rows_done = n_drafts;
    mem_free(rows);
    mem_free(last_branches);
    return failed ? -1 : 0;
}

int llamac_accept(llamac_session *s, int draft, llamac_error *err) {
    if (draft < 0 || draft >= s->n_drafts)
        return bad_argument(err, "draft is %d, but the session has %d: an eval, a truncation, a shift or a fork "
                            "discards drafts", draft, s->n_drafts);
    const struct draft *d = &s->drafts[draft];
    session_share_prefix(s, d->sequence, s, s->n_sequences + d->branch, d->length);
    session_accept_states(s, draft);
    return 0;
}
