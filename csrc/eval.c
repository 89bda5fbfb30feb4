// SPDX-License-Identifier: MIT
// eval.c - llamac_eval: checks the rows, reserves memory, and sends chunks of rows through the graph. After that, only
// a device can fail.
#include "eval.h"

#include "common.h"
#include "error.h"
#include "mem.h"

// Checks that each row continues its sequence. lengths (n_sequences) receives the sequences' lengths after all rows.
static int check_rows(const struct llamac_session *s, const llamac_row *rows, int n, int *lengths, llamac_error *err) {
    const uint32_t vocab_size = s->model->config->vocab_size;
    const int is_beside = s->keys_of != s;   // rows are not appended: each is at the position after the trunk's last
    for (int i = 0; i < s->n_sequences; i++) lengths[i] = s->keys_of->sequences[i].length;
    for (int r = 0; r < n; r++) {
        const llamac_row *row = &rows[r];
        if (row->sequence < 0 || row->sequence >= s->n_sequences)
            return bad_argument(err, "row %d: sequence is %d, expected 0 to %d", r, row->sequence, s->n_sequences - 1);
        if (row->token < 0 || (uint32_t)row->token >= vocab_size)
            return bad_argument(err, "row %d: token is %d, expected 0 to %u", r, row->token, vocab_size - 1);
        if (row->position != lengths[row->sequence])
            return bad_argument(err, "row %d: position is %d, but sequence %d continues at %d", r, row->position,
                                row->sequence, lengths[row->sequence]);
        if (is_beside && !row->position)
            return bad_argument(err, "row %d: sequence %d of the trunk has no positions to draft from", r,
                                row->sequence);
        if (s->model->config->two_sided && s->sequences[row->sequence].length)
            return bad_argument(err, "row %d: sequence %d has %d positions, but an encoder computes whole sequences: "
                                "truncate it to 0", r, row->sequence, s->sequences[row->sequence].length);
        if (row->position >= s->context)
            return err_set(err, LLAMAC_CONTEXT_FULL, "row %d: position %d does not fit the context of %d positions", r,
                           row->position, s->context);
        lengths[row->sequence] += !is_beside;
    }
    return 0;
}

static int check_observations(const struct llamac_session *s, const llamac_eval_options *options, llamac_error *err) {
    const int n_layers = (int)s->model->config->n_layers;
    if (options->n_observations < 0 || (options->n_observations && !options->observations))
        return bad_argument(err, "n_observations is %d%s, expected 0 or more, and 0 without observations",
                            options->n_observations, options->observations ? "" : " and observations is NULL");
    for (int i = 0; i < options->n_observations; i++) {
        const llamac_observation *o = &options->observations[i];
        int per_layer = 0;
        if (s->keys_of != s && (o->stage == LLAMAC_STAGE_CACHE_K || o->stage == LLAMAC_STAGE_CACHE_V))
            return bad_argument(err, "observation %d: the layers of the drafter store no keys and values", i);
        llamac_stage_width(s, o->stage, &per_layer);
        if (!o->out || !llamac_stage_name(o->stage) || (per_layer && (o->layer < 0 || o->layer >= n_layers)))
            return bad_argument(err, "observation %d: there is no stage %d in layer %d, or no buffer for it", i,
                                o->stage, o->layer);
        for (int j = 0; j < i; j++) {
            const llamac_observation *earlier = &options->observations[j];
            if (earlier->stage == o->stage && (!per_layer || earlier->layer == o->layer))
                return bad_argument(err, "observation %d: observation %d already has stage %s of layer %d", i, j,
                                    llamac_stage_name(o->stage), o->layer);
        }
    }
    return 0;
}

static const llamac_eval_options no_options;

struct eval eval_of(struct llamac_session *s, int n, const llamac_eval_options *options) {
    const llamac_eval_options *o = options ? options : &no_options;
    return (struct eval){ .session = s, .observations = o->observations, .n_observations = o->n_observations,
                          .inputs = o->inputs, .states = o->states, .types = o->types, .hidden = o->hidden,
                          .first_hidden = n - o->n_hidden, .cancel = { .request = o->cancel },
                          .end_layer = (int)s->model->config->n_layers };
}

// Returns how many of the next rows are whole sequences: as many sequences as fit into `most` rows, but at least one.
// n: the number of rows of the eval.
static int whole_sequences(const struct eval *e, int n, int most) {
    int open = 0, whole = 0;   // open: sequences that have begun but not ended
    for (int r = 0; e->first_row + r < n && (r < most || !whole); r++) {
        const llamac_row *row = &e->rows[r];
        open += (row->position == 0) - (row->position + 1 == e->session->sequences[row->sequence].target);
        if (!open) whole = r + 1;
    }
    return whole;
}

struct pool_job eval_chunk(struct eval *e, const llamac_row *rows, int n, float *logits) {
    const size_t vocab_size = e->session->model->config->vocab_size;
    e->first_row += e->n_rows;
    e->first_wanted += e->n_wanted;
    e->rows = rows + e->first_row;
    e->logits = logits ? logits + (size_t)e->first_wanted * vocab_size : NULL;
    e->n_rows = e->n_wanted = 0;
    int most = min_int(n - e->first_row, chunk_rows(e->session)), most_wanted = most;
    if (e->session->device && e->session->model->config->two_sided) most = most_wanted = whole_sequences(e, n, most);
    else if (e->session->device) most_wanted = CHUNK_ROWS;   // the device's memory holds their logits
    while (e->n_rows < most && e->n_wanted < most_wanted)
        e->n_wanted += e->rows[e->n_rows++].want_logits != 0;
    return (struct pool_job){ e->session->threads, e->n_rows <= SHORT_ROWS, forward, e };
}

// The widths of the hidden states that a device reads and returns.
struct eval_widths { size_t inputs, hidden; };
static struct eval_widths widths_of(const struct eval *e) {
    const struct llamac_model *m = e->session->model;
    const size_t dim = m->config->dim, states = states_dim(m) ? (size_t)states_dim(m) : dim;
    if (is_eagle(m)) return (struct eval_widths){ e->states ? FORMAT_EAGLE_STATES * states : dim, dim };
    return (struct eval_widths){ states, e->session->has_layer_states ? FORMAT_EAGLE_STATES * dim : states };
}

int eval_on_device(struct eval *e, llamac_error *err) {
    const llamac_device *device = e->session->device;
    const struct llamac_model *m = e->session->model;
    const struct eval_widths widths = widths_of(e);
    const float *const inputs = e->states ? e->states : e->inputs;
    const int first_hidden = max_int(0, e->first_hidden - e->first_row),
              n_hidden = e->hidden ? max_int(0, e->n_rows - first_hidden) : 0;
    const llamac_chunk chunk = {
        .session = e->session, .rows = e->rows, .n_rows = e->n_rows, .n_wanted = e->n_wanted,
        .last_branches = e->last_branches, .types = e->types ? e->types + e->first_row : NULL, .logits = e->logits,
        .n_observations = e->n_observations, .cancel = e->cancel.request, .eval = e,
        .is_mtp = m->is_mtp, .drafter = m->config->drafter ? m : NULL, .after_draft = is_eagle(m) && !e->states,
        .state_layers = e->session->has_layer_states ? e->session->eagle_layers : NULL,
        .input_width = (int)widths.inputs, .hidden_width = (int)widths.hidden,
        .inputs = inputs ? inputs + (size_t)e->first_row * widths.inputs : NULL, .n_hidden = n_hidden,
        .states_on_device = e->session->states_on_device,
        .hidden = n_hidden ? e->hidden + (size_t)(e->first_row + first_hidden - e->first_hidden) * widths.hidden : NULL,
    };
    llamac_error of_device = { 0 };
    if (cancelled(&e->cancel) || !device->forward(device->context, &chunk, &of_device)) return 0;
    e->cancel.seen |= of_device.code == LLAMAC_CANCELLED;
    if (err) *err = of_device;
    return -1;
}

int eval_cancelled(const struct eval *e, int n, llamac_error *err) {
    return err_set(err, LLAMAC_CANCELLED, "cancelled: %d of %d rows were computed and kept", e->first_row, n);
}

// Appends the rows of a computed chunk to their sequences.
static void append_rows(const struct eval *e) {
    struct llamac_session *s = e->session;
    if (s->keys_of != s) return;
    for (int r = 0; r < e->n_rows; r++) {
        struct sequence *q = &s->sequences[e->rows[r].sequence];
        session_set_length(q, q->length + 1);
    }
    for (int r = 0; r < e->n_rows; r++)
        if (!r || e->rows[r].sequence != e->rows[r - 1].sequence) session_slide(s, e->rows[r].sequence);
}

// Checks the rows and reserves memory for all of them.
static int prepare_rows(struct llamac_session *s, const llamac_row *rows, int n, llamac_error *err) {
    int *lengths = mem_alloc((size_t)s->n_sequences, sizeof *lengths, "the sequences' lengths", err);
    if (!lengths) return -1;
    int failed = check_rows(s, rows, n, lengths, err), longest = 1;
    for (int i = 0; i < s->n_sequences && !failed; i++) longest = max_int(longest, lengths[i]);
    failed = failed || (!s->device && session_reserve_rows(s, min_int(n, chunk_rows(s)), longest, err));
    failed = failed || (s->keys_of == s && session_check_room(s, lengths, n, err));
    for (int i = 0; i < s->n_sequences && !failed && s->keys_of == s; i++) {
        s->sequences[i].target = lengths[i];
        failed = session_reserve_pages(s, i, lengths[i], err) ||
                 session_reserve_state(s, &s->sequences[i], lengths[i], n, err);
    }
    mem_free(lengths);
    return failed ? -1 : 0;
}

static int check_types(const struct llamac_model *m, const int32_t *types, int n, llamac_error *err) {
    const int n_types = max_int(1, (int)m->config->n_types);
    for (int r = 0; types && r < n; r++)
        if (types[r] < 0 || types[r] >= n_types)
            return bad_argument(err, "row %d: type is %d, expected 0 to %d", r, types[r], n_types - 1);
    return 0;
}

// Checks the hidden states that rows need, and those that the caller wants.
static int check_states(const struct llamac_session *s, int n, const llamac_eval_options *o, llamac_error *err) {
    const int has_inputs = o->inputs != NULL, has_states = o->states != NULL, needs_inputs = states_dim(s->model) > 0;
    const char *owner = s->trunk ? "a drafter" : "the MTP layer";
    if (has_inputs && s->device && !needs_inputs)
        return err_set(err, LLAMAC_UNSUPPORTED, "the session is on a device, and only the CPU reads inputs");
    if (is_eagle(s->model)) {
        if (n && has_inputs == has_states)
            return bad_argument(err, "the session belongs to %s, whose rows need hidden states: "
                                "either inputs or states", owner);
    } else {
        if (needs_inputs && n && !has_inputs)
            return bad_argument(err, "the session belongs to %s, whose rows need hidden states: inputs is NULL", owner);
        if (has_states)
            return bad_argument(err, "states is set, but the session does not belong to an EAGLE-3 head");
    }
    if (o->hidden && (o->n_hidden < 0 || o->n_hidden > n))
        return bad_argument(err, "n_hidden is %d, expected 0 to n_rows %d", o->n_hidden, n);
    return 0;
}

// Checks that the model has what is wanted of its end: hidden states for drafts, and logits or the normed rows.
static int check_logits(const struct config *c, const llamac_row *rows, int n, const float *logits,
                        const llamac_eval_options *o, llamac_error *err) {
    const char *kind = format_kind_without_logits(c);
    int wanted = 0, observed[LLAMAC_N_STAGES] = { 0 };
    if (o->hidden && kind)
        return err_set(err, LLAMAC_UNSUPPORTED, "the model is %s, which has no hidden states for drafts", kind);
    for (int i = 0; i < o->n_observations; i++) observed[o->observations[i].stage] = 1;
    for (int r = 0; r < n; r++) wanted += rows[r].want_logits != 0;
    if (wanted && kind && (logits || !observed[LLAMAC_STAGE_OUTPUT_NORM]))
        return err_set(err, LLAMAC_UNSUPPORTED, "the model is %s, which has no next token: it only %s", kind,
                       c->scores_pairs ? "scores texts (rerank)" : "embeds texts (embed)");
    if (wanted && !logits && (observed[LLAMAC_STAGE_LOGITS] || !observed[LLAMAC_STAGE_OUTPUT_NORM]))
        return bad_argument(err, "%d rows want logits, but there is no buffer for them", wanted);
    return 0;
}

int eval_check(const struct llamac_session *s, const llamac_row *rows, int n, const float *logits,
               const llamac_eval_options *options, llamac_error *err) {
    const llamac_eval_options *o = options ? options : &no_options;
    if (n < 0) return bad_argument(err, "n_rows is %d, expected 0 or more", n);
    if (check_observations(s, o, err) || check_types(s->model, o->types, n, err)) return -1;
    return check_states(s, n, o, err) || check_logits(s->model->config, rows, n, logits, o, err) ? -1 : 0;
}

// Computes all chunks of one part of a layer. Returns -1 after a cancellation.
static int run_layer(struct eval *e, const llamac_row *rows, int n, enum part part, int layer) {
    struct llamac_session *s = e->session;
    e->part = part, e->first_layer = layer, e->end_layer = layer + 1;
    e->first_row = e->n_rows = e->first_wanted = e->n_wanted = 0;
    while (e->first_row + e->n_rows < n) {
        const struct pool_job job = eval_chunk(e, rows, n, NULL);
        if (!cancelled(&e->cancel)) pool_run(&job, &s->contention[run_kind(e)], &e->cancel);
        if (e->cancel.seen) return -1;
    }
    return 0;
}

// Computes an encoder's rows, of more than one chunk: each layer for all rows before the next one (enum part).
static int eval_by_layer(struct eval *e, const llamac_row *rows, int n, llamac_error *err) {
    const struct config *c = e->session->model->config;
    const enum part rest = e->n_observations ? PART_ALL : PART_QUERIES;   // observers read k and v, too
    int failed = 0;
    e->stream = mem_alloc((size_t)n * c->dim, sizeof(float), "the residual stream of all rows", err);
    if (!e->stream) return -1;
    for (int l = 0; l < (int)c->n_layers && !failed; l++)
        failed = run_layer(e, rows, n, PART_KEYS, l) || run_layer(e, rows, n, rest, l);
    mem_free(e->stream);
    e->first_row = 0, e->rows = rows, e->n_rows = n;
    if (failed) return eval_cancelled(e, n, err);
    append_rows(e);
    return 0;
}

int llamac_eval(llamac_session *s, const llamac_row *rows, int n_rows, float *logits,
                const llamac_eval_options *options, llamac_error *err) {
    int done = 0, failed = eval_check(s, rows, n_rows, logits, options, err);
    if (!failed) {
        session_discard_drafts(s);
        failed = prepare_rows(s, rows, n_rows, err);
    }
    struct eval e = eval_of(s, n_rows, options);
    if (!failed && n_rows > chunk_rows(s) && s->model->config->two_sided && !s->device) {
        failed = eval_by_layer(&e, rows, n_rows, err);
        done = failed ? 0 : n_rows;
    }
    while (!failed && done < n_rows) {
        const struct pool_job job = eval_chunk(&e, rows, n_rows, logits);
        session_begin_chunk(s, e.rows, e.n_rows);
        if (s->device) failed = eval_on_device(&e, err);
        else if (!cancelled(&e.cancel)) pool_run(&job, &s->contention[run_kind(&e)], &e.cancel);
        if (e.cancel.seen) failed = eval_cancelled(&e, n_rows, err);
        session_end_chunk(s, !failed);
        if (failed) break;
        append_rows(&e);
        done += e.n_rows;
    }
    if (options && options->rows_done) *options->rows_done = done;
    // frees the pages of rows that were not computed
    for (int i = 0; i < s->n_sequences && failed; i++) session_trim_pages(s, i);
    return failed;
}
