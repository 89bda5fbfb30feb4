// SPDX-License-Identifier: MIT
// products.c - prepares rows as inputs of products and computes the products. See products.h.
#include "products.h"

#include <string.h>
#include "clock.h"
#include "common.h"
#include "lora.h"

// ---- rows become inputs of products

void norm_row(const struct worker *w, struct norm_weights norm, const float *x, int width, float *y) {
    const struct kernels *kernels = w->eval->session->kernels;
    const struct config *c = w->eval->session->model->config;
    const int is_rms = c->norm == NORM_RMS;
    (is_rms ? kernels->rms_norm : kernels->layer_norm)(x, norm.weight, norm.bias, c->norm_eps, width, y);
}

// Returns row x plus its branch, in the thread's own row.
static const float *with_branch(const struct worker *w, const float *x, const struct pending_branch *pending, int r,
                                int width) {
    const struct kernels *kernels = w->eval->session->kernels;
    const float scale = w->eval->session->model->config->residual_scale;
    norm_row(w, pending->norm, pending->branch + (size_t)r * (size_t)width, width, w->local->row);
    if (scale != 1) kernels->scale(w->local->row, width, scale, 0);
    kernels->add(x, width, w->local->row);
    if (pending->scale != 1) kernels->scale(w->local->row, width, pending->scale, 0);
    return w->local->row;
}

static float *normed_buffer(const struct worker *w, int n) {
    return is_redundant(n) ? w->local->normed : w->eval->session->scratch.normed;
}
const float *normed_rows(const struct worker *w, int n) { return normed_buffer(w, n); }

struct panels panels_at(const struct worker *w, int local, int m, int first, int total, int width) {
    const struct scratch *shared = &w->eval->session->scratch;
    const size_t rank = (size_t)w->eval->session->model->max_rank;
    void *const *panels = local ? w->local->panels : shared->panels;
    float *lora_projected = local ? w->local->lora_projected : shared->lora_projected;
    struct panels p = { .m = m };
    for (int input = 0; input < N_INPUT_TYPES; input++)
        p.by_input[input] = (int32_t *)panels[input] + (size_t)first * input_words(input, width);
    for (int i = 0; i < MAX_CONSUMERS; i++)
        p.lora_projected[i] = lora_projected + ((size_t)i * (size_t)total + (size_t)first) * rank;
    return p;
}

// Where row r of the panels for an input type is packed.
static struct panel_row input_row(const struct worker *w, const struct panels *p, int input, int width, int r) {
    const int max_height = w->eval->session->kernels->panel_rows[input];
    return panel_row(p->by_input[input], p->m, max_height, input_words(input, width), r);
}

// Packs floats into a row of a panel for a product of m rows.
static void pack(const struct worker *w, int input, struct panel_row to, const float *x, int width, int m) {
    const struct llamac_session *s = w->eval->session;
    pack_input(s->kernels, input, to, x, width, m, s->numerics == LLAMAC_FAST);
}

void pack_row(const struct worker *w, struct consumers consumers, const struct panels *p, const float *x, int width,
              int first, int last, int r) {
    unsigned inputs = 0;   // the input types that the consumers need: bit 1 << type
    int any_adapter = 0, rounds = 0;
    for (int i = 0; i < consumers.n; i++) {
        const struct matrix *m = consumers.matrices[i];
        if (m->data) inputs |= 1u << input_type_of(m->dtype);
        any_adapter |= m->lora != NULL;
        rounds |= m->rounds_inputs;
    }
    const struct kernels *kernels = w->eval->session->kernels;
    const float *const numbers = rounds ? w->local->rounded : x;
    const float scale = rounds ? kernels->round_row(x, width, w->local->rounded) : 0;
    for (int input = 0; input < N_INPUT_TYPES; input++) {
        if (!(inputs & 1u << input)) continue;
        const struct panel_row to = input_row(w, p, input, width, r);
        if (rounds && input == INPUT_INT8) kernels->pack_rounded(to, numbers, width, scale);
        else pack(w, input, to, numbers, width, p->m);
    }
    if (any_adapter) lora_pack_row(w, consumers, p, x, width, first, last, r);
}

enum { MAX_SHARE_GROWTH = 32 };   // a share may grow by 1/32 to consist of whole blocks

int packs_own_columns(const struct worker *w, const struct matrix *consumer, int strips) {
    const int count = w->member->count, even = ceil_div(strips, count),
              most = pool_shares_are_equal(w->member)
                         ? BLOCK_STRIPS * ceil_div(ceil_div(strips, BLOCK_STRIPS), count) : even + BLOCK_STRIPS / 2;
    return !is_redundant(w->eval->n_rows) && !consumer->lora && !consumer->rounds_inputs &&
           MAX_SHARE_GROWTH * (most - even) <= even;
}

void pack_columns(const struct worker *w, const struct matrix *consumer, const struct panels *p, const float *x,
                  int width, int first, int last, int r) {
    const int input = input_type_of(consumer->dtype);
    struct panel_row to = input_row(w, p, input, width, r);
    to.panel += input_words(input, first) * (size_t)to.height;
    if (first < last) pack(w, input, to, x + first, last - first, p->m);
}

// The panels of rows that come from the residual stream.
static struct panels stream_panels(const struct worker *w, const struct rows *rows) {
    struct panels p = panels_at(w, is_redundant(rows->n), rows->n, 0, rows->n, rows->width);
    for (int input = 0; input < N_INPUT_TYPES && !is_redundant(rows->n); input++)
        p.by_input[input] = w->eval->session->scratch.stream_panels[input];
    return p;
}

// Adds a row's pending branch and normalizes the sum. Returns the result, in the thread's own row if it differs from x.
static const float *norm_and_keep(const struct worker *w, const struct rows *rows, const struct norm_step *step,
                                  const float *x, int r) {
    const int writes_shared = !is_redundant(rows->n) || w->member->index == 0;
    const size_t at = (size_t)r * (size_t)rows->width, bytes = sizeof(float) * (size_t)rows->width;
    if (step->pending) {
        x = with_branch(w, x, step->pending, r, rows->width);
        if (writes_shared) memcpy(step->pending->sum + at, x, bytes);
    }
    if (step->norm.weight) {
        norm_row(w, step->norm, x, rows->width, w->local->row);
        x = w->local->row;
    }
    if (step->copy && writes_shared) {
        const size_t width = (size_t)rows->width, to_width = step->copy_width ? step->copy_width : width;
        float *const copy = step->copy + (size_t)r * to_width;
        memcpy(copy, x, bytes);
        memset(copy + width, 0, sizeof(float) * (to_width - width));
    }
    if (step->stream && writes_shared) memcpy(step->stream + at, x, bytes);
    if (step->keep_normed) memcpy(normed_buffer(w, rows->n) + at, x, bytes);
    return x;
}

struct norm_step sub_norm_step(const struct worker *w, int stage, int layer, const float *weight) {
    int per_layer;
    return (struct norm_step){ .norm = { weight, NULL }, .is_inner = 1, .copy = observer_of(w->eval, stage, layer),
                               .copy_width = llamac_stage_width(w->eval->session, stage, &per_layer) };
}

struct panels prepare_inputs(const struct worker *w, struct rows rows, const struct norm_step *step,
                             struct consumers consumers) {
    const int redundant = is_redundant(rows.n);
    const struct panels p = step && !step->is_inner ? stream_panels(w, &rows)
                                                    : panels_at(w, redundant, rows.n, 0, rows.n, rows.width);
    int first = 0, last = rows.n;
    if (!redundant) pool_share(w->member, rows.n, &first, &last);
    for (int r = first; r < last && !cancelled(&w->eval->cancel); r++) {
        const float *x = rows.x + (size_t)(rows.indices ? rows.indices[r] : r) * (size_t)rows.width;
        if (step) x = norm_and_keep(w, &rows, step, x, r);
        pack_row(w, consumers, &p, x, rows.width, first, last, r);
    }
    if (!redundant) pool_barrier(w->member);   // products read rows that other members have packed
    return p;
}

void add_branch(const struct worker *w, const float *x, const struct pending_branch *pending, int n, int width) {
    int first, last;
    pool_share(w->member, n, &first, &last);
    for (int r = first; r < last; r++) {
        const size_t at = (size_t)r * (size_t)width;
        memcpy(pending->sum + at, with_branch(w, x + at, pending, r, width), sizeof(float) * (size_t)width);
    }
    pool_barrier(w->member);   // members read rows that other members have added
}

// ---- products

enum { PIECE_STRIPS = 8 };   // a piece of a product has a multiple of this many strips

// The work of n strips and m inputs. Runs of few rows are bound by reading weights, others by multiplying.
static double work_of(const struct worker *w, const struct matrix *matrix, int n, int m) {
    return is_redundant(w->eval->n_rows) ? (double)n * (double)matrix->strip_bytes : (double)n * matrix->columns * m;
}

struct strips strip_share(const struct worker *w, const struct matrix *m) {
    struct strips share;
    pool_share(w->member, strips_of(m), &share.first, &share.last);
    return share;
}

void divide_strips(const struct worker *w, const struct product *products, int n, struct strips *shares) {
    int total = 0, first, last;
    for (int i = 0; i < n; i++) total += strips_of(products[i].matrix);
    pool_share(w->member, total, &first, &last);
    for (int i = 0; i < n; i++) {
        const int strips = strips_of(products[i].matrix);
        shares[i] = (struct strips){ max_int(first, 0), min_int(last, strips) };
        first -= strips;
        last -= strips;
    }
}

void multiply(const struct worker *w, const struct product *p, const struct panels *x, int add, struct strips strips) {
    const struct matrix *m = p->matrix;
    const int is_measured = w->member->count > 1 && w->member->count <= BALANCED_MAX;
    struct gemm g = {
        .dtype = m->dtype, .w = m->data, .strip_bytes = m->strip_bytes, .rows = m->rows, .columns = m->columns,
        .x = x->by_input[input_type_of(m->dtype)], .m = x->m, .fast = w->eval->session->numerics == LLAMAC_FAST,
        .scales = m->scales, .bias = p->bias, .row_weights = p->row_weights,
        .y = p->y, .y_stride = p->y_stride ? p->y_stride : (size_t)m->rows, .y_rows = p->y_rows, .accumulate = add,
        .copy = p->copy, .accumulate_copy = p->add_copy,
        .scratch = w->local->gemm, .cancel = &w->eval->cancel,
    };
    // the number of pieces must be the same for all members
    const int64_t adds = (int64_t)ceil_div(m->rows, w->member->count) * m->columns * x->m;
    const int pieces = (int)(adds / PAUSE_ADDS_PRODUCT) + 1, n = max_int(strips.last - strips.first, 0);
    const int step = (int)round_up((uint64_t)ceil_div(n, pieces), PIECE_STRIPS);
    for (int i = 0; i < pieces; i++) {
        if (i) pool_pause(w->member);
        g.first = strips.first + min_int(i * step, n);
        g.last = strips.first + min_int((i + 1) * step, n);
        if (g.first >= g.last) continue;
        const int64_t started = is_measured ? now_ns() : 0;
        w->eval->session->kernels->gemm(&g);
        w->local->bytes_read += (uint64_t)(g.last - g.first) * m->strip_bytes;
        if (m->lora) lora_multiply(w, m->lora, &g, x->lora_projected[p->consumer]);
        if (is_measured && !cancelled(g.cancel))
            pace_add(&w->local->paces[run_kind(w->eval)], work_of(w, m, g.last - g.first, g.m), now_ns() - started);
    }
}
