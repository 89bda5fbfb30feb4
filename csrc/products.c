// SPDX-License-Identifier: MIT
// products.c - rows on their way into products, and the products. See products.h.
#include "products.h"

#include <string.h>
#include "common.h"
#include "lora.h"

static void norm_row(const struct worker *w, struct norm_weights norm, const float *x, int width, float *y) {
    const struct llamac_session *s = w->eval->session;
    const struct config *c = s->model->config;
    (c->norm == NORM_RMS ? s->kernels->rms_norm : s->kernels->layer_norm)(x, norm.weight, norm.bias, c->norm_eps,
        width, y);
}

// A row with its branch, in the thread's own row.
static const float *with_branch(const struct worker *w, const float *x, const struct pending *pending, int r,
    int width) {
    const struct llamac_session *s = w->eval->session;
    const float scale = s->model->config->residual_scale;
    norm_row(w, pending->norm, pending->branch + (size_t)r * (size_t)width, width, w->local->row);
    if (scale != 1) s->kernels->scale(w->local->row, width, scale, 0);
    s->kernels->add(x, width, w->local->row);
    return w->local->row;
}

static float *kept(const struct worker *w, int n) {
    return is_redundant(n) ? w->local->kept : w->eval->session->scratch.kept;
}
const float *kept_rows(const struct worker *w, int n) { return kept(w, n); }

struct panels panels_at(const struct worker *w, int redundant, int m, int first, int total, int width) {
    const struct scratch *shared = &w->eval->session->scratch;
    const size_t rank = (size_t)w->eval->session->model->max_rank;
    struct panels p = { .m = m };
    for (int kind = 0; kind < N_INPUT_TYPES; kind++) p.of[kind] = (int32_t *)(redundant ? w->local->panels
        : shared->panels)[kind] + (size_t)first * input_words(kind, width);
    for (int i = 0; i < MAX_READERS; i++) p.lora_x[i] = (redundant ? w->local->lora
        : shared->lora) + ((size_t)i * (size_t)total + (size_t)first) * rank;
    return p;
}

void pack_row(const struct worker *w, struct readers readers, const struct panels *p, const float *x, int width,
    int first, int last, int r) {
    unsigned kinds = 0;
    int adapted = 0;
    for (int i = 0; i < readers.n; i++) kinds |= kind_of(readers.of[i]), adapted |= readers.of[i]->lora != NULL;
    for (int kind = 0; kind < N_INPUT_TYPES; kind++)
        if (kinds & 1u << kind) w->eval->session->kernels->pack[kind](panel_row(p->of[kind], p->m,
            input_words(kind, width), r), x, width);
    if (adapted) lora_take(w, readers, p, x, width, first, last, r);
}

struct panels prepare(const struct worker *w, struct rows rows, struct readers readers) {
    const int redundant = is_redundant(rows.n), tells = !redundant || w->member->index == 0;
    const size_t width = (size_t)rows.width;
    const struct panels p = panels_at(w, redundant, rows.n, 0, rows.n, rows.width);
    int first = 0, last = rows.n;
    if (!redundant) pool_share(w->member, rows.n, &first, &last);
    for (int r = first; r < last && !cancelled(&w->eval->cancel); r++) {
        const float *x = rows.x + (size_t)(rows.picked ? rows.picked[r] : r) * width;
        if (rows.pending) {
            x = with_branch(w, x, rows.pending, r, rows.width);
            if (tells) memcpy(rows.pending->to + (size_t)r * width, x, sizeof(float) * width);
        }
        if (rows.norm.weight) {
            norm_row(w, rows.norm, x, rows.width, w->local->row);
            x = w->local->row;
        }
        if (rows.observed && tells) memcpy(rows.observed + (size_t)r * width, x, sizeof(float) * width);
        if (rows.keep) memcpy(kept(w, rows.n) + (size_t)r * width, x, sizeof(float) * width);
        pack_row(w, readers, &p, x, rows.width, first, last, r);
    }
    if (!redundant) pool_barrier(w->member);
    return p;
}

void add_branch(const struct worker *w, const float *x, const struct pending *pending, int n, int width) {
    int first, last;
    pool_share(w->member, n, &first, &last);
    for (int r = first; r < last; r++) {
        const size_t at = (size_t)r * (size_t)width;
        memcpy(pending->to + at, with_branch(w, x + at, pending, r, width), sizeof(float) * (size_t)width);
    }
    pool_barrier(w->member);
}

void multiply(const struct worker *w, const struct product *p, const struct panels *x, int add, int first_strip,
    int last_strip) {
    const struct gemm g = {
        .w = p->matrix->data, .strip_bytes = p->matrix->strip_bytes, .first = first_strip, .last = last_strip,
        .rows = p->matrix->rows, .columns = p->matrix->columns, .x = x->of[input_type_of(p->matrix->dtype)], .m = x->m,
            .scales = p->matrix->scales, .bias = p->bias,
        .y = p->y, .y_stride = (size_t)p->matrix->rows, .accumulate = add, .row_weights = p->weights, .y_rows = p->to,
            .copy = p->copy,
        .scratch = w->local->gemm, .cancel = &w->eval->cancel,
    };
    w->eval->session->kernels->gemm[p->matrix->dtype](&g);
    if (p->matrix->lora) lora_multiply(w, p->matrix->lora, &g, x->lora_x[p->reader]);
}

void linear(const struct worker *w, const struct product *products, int n, const struct panels *x, int add) {
    int total = 0, first, last;
    for (int i = 0; i < n; i++) total += strips_of(products[i].matrix);
    pool_share(w->member, total, &first, &last);
    for (int i = 0; i < n; i++) {
        const int strips = strips_of(products[i].matrix);
        multiply(w, &products[i], x, add, max_int(first, 0), min_int(last, strips));
        first -= strips, last -= strips;
    }
}

void hidden(const struct worker *w, const struct expert *net, const struct panels *x, float *gate, float *up) {
    const struct llamac_session *s = w->eval->session;
    const int gated = net->gate.data != NULL, dim = net->up.rows;
    int first, last;
    pool_share(w->member, strips_of(&net->up), &first, &last);
    multiply(w, &(struct product){ .matrix = &net->up, .reader = 1, .bias = net->up_bias, .y = up }, x, 0, first, last);
    if (gated) multiply(w, &(struct product){ .matrix = &net->gate, .bias = net->gate_bias, .y = gate }, x, 0, first,
        last);
    first *= STRIP_ROWS, last = min_int(last * STRIP_ROWS, dim);
    for (int r = 0; r < x->m && first < last && !cancelled(&w->eval->cancel); r++) {
        float *u = up + (size_t)r * (size_t)dim + first, *g = gate + (size_t)r * (size_t)dim + first;
        s->kernels->activate((int)s->model->config->activation, gated ? g : u, gated ? u : NULL, last - first, u);
    }
}
