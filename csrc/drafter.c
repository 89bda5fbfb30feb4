// SPDX-License-Identifier: MIT
// drafter.c - drafts from hidden states, by MTP layers and drafter files: the check of a drafter's trunk, the input
// from embeddings and hidden states, the states for the next draft, and the logits of clusters of tokens.
//
// Here and in eagle.c, a state is a hidden state of the trunk, never the state of a recurrent layer.
#include <math.h>
#include <string.h>
#include "common.h"
#include "error.h"
#include "gates.h"
#include "products.h"

// ---- a drafter's file and its trunk

int session_trunk_layer(const struct llamac_model *drafter, int layer, const struct llamac_model *trunk) {
    const int has_window = drafter->layers[layer].record->window > 0;
    int found = -1;
    for (int l = 0; l < (int)trunk->config->n_layers; l++)
        if (trunk->layers[l].kv_source == l && (trunk->layers[l].record->window > 0) == has_window) found = l;
    return found;
}

// Checks that an assistant's layers can read the keys and values of the trunk's layers.
static int check_keys(const struct llamac_model *drafter, const struct llamac_model *trunk, llamac_error *err) {
    for (int l = 0; l < (int)drafter->config->n_layers; l++) {
        const struct layer *layer = &drafter->layers[l];
        const int source = session_trunk_layer(drafter, l, trunk);
        if (source < 0)
            return bad_argument(err, "the drafter does not belong to this model: its layer %d has window %u, and no "
                                "layer of the model is of this kind", l, layer->record->window);
        const struct layer *of_trunk = &trunk->layers[source];
        const struct { const char *name; int found, expected; } equal[] = {
            { "window", (int)layer->record->window, (int)of_trunk->record->window },
            { "KV heads", layer->heads.n_kv, of_trunk->heads.n_kv },
            { "head_dim", layer->heads.dim, of_trunk->heads.dim },
            { "latents", 0, (int)of_trunk->record->kv_lora_rank },
        };
        for (size_t i = 0; i < ARRAY_LEN(equal); i++)
            if (equal[i].found != equal[i].expected)
                return bad_argument(err, "the drafter does not belong to this model: its layer %d has %s %d, but layer "
                                    "%d of the model, whose keys it would read, has %d", l, equal[i].name,
                                    equal[i].found, source, equal[i].expected);
    }
    return 0;
}

int session_check_pair(const struct llamac_model *drafter, const struct llamac_model *trunk, llamac_error *err) {
    const struct config *c = drafter->config, *of_trunk = trunk->config;
    const char *kind = format_kind_without_logits(of_trunk);
    if (trunk->is_mtp || of_trunk->drafter || kind)
        return bad_argument(err, "the trunk of a drafter is %s, expected a language model",
                            kind ? kind : "itself a drafter");
    const struct { const char *name; uint32_t found, expected; } equal[] = {
        { "trunk_dim", c->trunk_dim, of_trunk->dim }, { "vocab_size", c->vocab_size, of_trunk->vocab_size },
    };
    for (size_t i = 0; i < ARRAY_LEN(equal); i++)
        if (equal[i].found != equal[i].expected)
            return bad_argument(err, "the drafter does not belong to this model: its %s is %u, and the model's %s is "
                                "%u", equal[i].name, equal[i].found, i ? "vocab_size" : "dim", equal[i].expected);
    int layers[FORMAT_EAGLE_STATES];
    return reads_trunk_keys(c) ? check_keys(drafter, trunk, err) : session_check_head(drafter, trunk, layers, err);
}

int session_check_trunk(const struct llamac_model *drafter, const struct llamac_session *trunk, llamac_error *err) {
    const struct config *c = drafter->config;
    if (!c->drafter && trunk) return bad_argument(err, "the session has a trunk, but its model is not a drafter");
    if (!c->drafter) return 0;
    if (!trunk)
        return err_set(err, LLAMAC_UNSUPPORTED, "the model is a drafter, which cannot run alone: it predicts tokens "
                       "of another model. Open that model, with this one as its draft_model (--draft)");
    return session_check_pair(drafter, trunk->model, err);
}

// ---- hidden states in and out

void states_in(const struct worker *w, float *x) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    const struct matrix *in = m->is_mtp ? &m->mtp.in : &m->drafter.in;
    const int dim = states_dim(m), n = e->n_rows;
    float *const pairs = e->session->scratch.draft_inputs;
    int first, last;
    pool_share(w->member, n, &first, &last);
    for (int r = first; r < last; r++) {
        float *embedding = pairs + 2 * (size_t)r * (size_t)dim, *hidden = embedding + dim;
        const float *state = e->inputs + (size_t)(e->first_row + r) * (size_t)dim;
        token_embedding(w, e->rows[r].token, embedding);
        if (m->is_mtp) {
            norm_row(w, (struct norm_weights){ m->mtp.embedding_norm, NULL }, embedding, dim, embedding);
            norm_row(w, (struct norm_weights){ m->mtp.hidden_norm, NULL }, state, dim, hidden);
        } else {
            memcpy(hidden, state, sizeof(float) * (size_t)dim);
        }
    }
    pool_barrier(w->member);   // the product reads rows that other members have written
    const struct rows rows = { .x = pairs, .n = n, .width = 2 * dim };
    const struct panels inputs = prepare_inputs(w, rows, NULL, (struct consumers){ { in }, 1 });
    const struct product product = { .matrix = in, .y = x };
    multiply(w, &product, &inputs, 0, strip_share(w, in));
}

void states_out(const struct worker *w, const float *x) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    const int first = max_int(0, e->first_hidden - e->first_row), n = e->n_rows - first;
    if (n <= 0) return;
    const size_t dim = m->config->dim, trunk_dim = m->config->trunk_dim;
    const struct rows rows = { .x = x + (size_t)first * dim, .n = n, .width = (int)dim };
    const struct norm_step step = { .norm = { m->output_norm, NULL } };
    const struct panels inputs = prepare_inputs(w, rows, &step, (struct consumers){ { &m->drafter.out }, 1 });
    const struct product out = {
        .matrix = &m->drafter.out, .y = e->hidden + (size_t)(e->first_row + first - e->first_hidden) * trunk_dim,
    };
    multiply(w, &out, &inputs, 0, strip_share(w, &m->drafter.out));
    pool_barrier(w->member);   // the logits overwrite the panels
}

// ---- logits of clusters

// Chooses the clusters that rank first, in this order. Of clusters with equal scores, the first wins.
static void choose_clusters(const struct llamac_session *s) {
    const int n = (int)s->model->config->n_clusters, used = (int)s->model->config->clusters_used;
    const float *score = s->scratch.cluster_scores;
    int *best = s->scratch.clusters;
    for (int i = 0, found = 0; i < n; i++) {
        if (found == used && !ranks_before(score[i], score[best[used - 1]])) continue;
        int at = found < used ? found++ : used - 1;
        for (; at && ranks_before(score[i], score[best[at - 1]]); at--) best[at] = best[at - 1];
        best[at] = i;
    }
}

static int rows_of_cluster(const struct config *c) { return (int)(c->vocab_size / c->n_clusters); }

// Returns the logit of all tokens outside the chosen clusters, which is less than any logit in these clusters. It is
// NaN only if all of these are.
static float other_logit(const struct llamac_session *s) {
    const struct config *c = s->model->config;
    const int rows = rows_of_cluster(c);
    float least = NAN;
    for (uint32_t i = 0; i < c->clusters_used; i++)
        for (int r = s->scratch.clusters[i] * rows, end = r + rows; r < end; r++)
            if (ranks_before(least, s->scratch.in_clusters[r])) least = s->scratch.in_clusters[r];
    return least - 1;
}

// Writes the logits of the chosen clusters to the ids of their tokens.
static void spread_clusters(const struct llamac_session *s, float *logits) {
    const struct config *c = s->model->config;
    const int rows = rows_of_cluster(c);
    for (uint32_t i = 0; i < c->clusters_used; i++)
        for (int r = s->scratch.clusters[i] * rows, end = r + rows; r < end; r++) {
            const float id = s->model->drafter.output_ids[r];
            if (id >= 0 && id < (float)c->vocab_size) logits[(int)id] = s->scratch.in_clusters[r];
        }
}

// Computes this thread's share of the products of the chosen clusters, in their order in the output matrix.
static void multiply_clusters(const struct worker *w, const struct panels *inputs) {
    const struct scratch *scratch = &w->eval->session->scratch;
    const struct llamac_model *m = w->eval->session->model;
    const struct config *c = m->config;
    const struct product product = { .matrix = &m->output, .consumer = 1, .bias = m->output_bias,
                                     .y = scratch->in_clusters };
    const int strips = rows_of_cluster(c) / STRIP_ROWS;
    int first, last;
    pool_share(w->member, (int)c->clusters_used * strips, &first, &last);
    for (int i = 0; i < (int)c->clusters_used; i++) {
        const int start = scratch->clusters[i] * strips, from = max_int(first - i * strips, 0),
                  to = min_int(last - i * strips, strips);
        multiply(w, &product, inputs, 0, (struct strips){ start + from, start + to });
    }
}

void clustered_logits(const struct worker *w, const float *x) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct llamac_model *m = s->model;
    const int dim = (int)m->config->dim, vocab_size = (int)m->config->vocab_size;
    float *const norm_observer = observer_of(e, LLAMAC_STAGE_OUTPUT_NORM, 0),
          *const observer = observer_of(e, LLAMAC_STAGE_LOGITS, 0);
    const struct consumers consumers = { { &m->drafter.clusters, &m->output }, 2 };
    const struct product scores = { .matrix = &m->drafter.clusters, .y = s->scratch.cluster_scores };
    int first, last;
    pool_share(w->member, vocab_size, &first, &last);
    for (int r = 0, wanted = 0; r < e->n_rows; r++) {
        if (!e->rows[r].want_logits) continue;
        float *const logits = e->logits + (size_t)wanted * (size_t)vocab_size;
        const struct rows row = { .x = x, .indices = &r, .n = 1, .width = dim };
        const struct norm_step step = { .norm = { m->output_norm, NULL },
                                        .copy = norm_observer ? norm_observer + (size_t)wanted * (size_t)dim : NULL };
        const struct panels inputs = prepare_inputs(w, row, &step, consumers);
        multiply(w, &scores, &inputs, 0, strip_share(w, &m->drafter.clusters));
        pool_barrier(w->member);   // the choice reads all scores
        if (w->member->index == 0) choose_clusters(s);
        pool_barrier(w->member);   // all members read the choice
        multiply_clusters(w, &inputs);
        pool_barrier(w->member);   // any member may have computed the least logit
        const float other = other_logit(s);
        for (int i = first; i < last; i++) logits[i] = other;
        pool_barrier(w->member);   // the next step overwrites logits of all members
        if (w->member->index == 0) spread_clusters(s, logits);
        pool_barrier(w->member);   // the observer's copy includes them
        if (observer && first < last)
            memcpy(observer + (size_t)wanted * (size_t)vocab_size + first, logits + first,
                   sizeof(float) * (size_t)(last - first));
        wanted++;
    }
}
