// SPDX-License-Identifier: MIT
// ops.c - operations of the graph on plain arrays. See ops.h.
#include "ops.h"

#include <string.h>
#include "common.h"
#include "fpenv.h"
#include "rope.h"
#include "sampler.h"
#include "session.h"

// ---- rows, on the calling thread

int llamac_op_norm(int is_rms, const float *x, size_t n, int width, const float *weight, const float *bias, float eps,
                   const char *isa, float *y, llamac_error *err) {
    const struct kernels *kernels = kernels_select(isa, err);
    if (!kernels) return -1;
    const fp_control saved = fp_control_reset();
    for (size_t at = 0; at < n * (size_t)width; at += (size_t)width)
        (is_rms ? kernels->rms_norm : kernels->layer_norm)(x + at, weight, bias, eps, width, y + at);
    fp_control_restore(saved);
    return 0;
}

int llamac_op_softmax(const float *x, size_t n, int width, const char *isa, float *y, llamac_error *err) {
    const struct kernels *kernels = kernels_select(isa, err);
    if (!kernels) return -1;
    const size_t bytes = sizeof(float) * (size_t)width;
    float *row = mem_alloc(round_up((uint64_t)width, 16), sizeof(float), "a row of a softmax", err);   // padded
    if (!row) return -1;
    const fp_control saved = fp_control_reset();
    for (size_t at = 0; at < n * (size_t)width; at += (size_t)width) {
        memcpy(row, x + at, bytes);
        kernels->softmax(row, width);
        memcpy(y + at, row, bytes);
    }
    fp_control_restore(saved);
    mem_free(row);
    return 0;
}

int llamac_op_activate(int activation, const float *x, size_t n, int width, const char *isa, float *y,
                       llamac_error *err) {
    const struct kernels *kernels = kernels_select(isa, err);
    if (!kernels) return -1;
    const fp_control saved = fp_control_reset();
    for (size_t at = 0; at < n * (size_t)width; at += (size_t)width)
        kernels->activate(activation, x + at, NULL, width, y + at);
    fp_control_restore(saved);
    return 0;
}

int llamac_op_rope(float *x, size_t n, size_t n_heads, int head_dim, const int32_t *positions, const float *inv_freq,
                   int half, float factor, const char *isa, llamac_error *err) {
    const struct kernels *kernels = kernels_select(isa, err);
    if (!kernels) return -1;
    float *cosines = mem_alloc(2 * (size_t)half, sizeof(float), "the angles of RoPE", err);
    if (!cosines) return -1;
    const fp_control saved = fp_control_reset();
    for (size_t r = 0; r < n; r++) {
        rope_angles(positions[r], inv_freq, half, factor, cosines, cosines + half);
        for (size_t h = 0; h < n_heads; h++, x += head_dim) kernels->rotate(x, cosines, cosines + half, half);
    }
    fp_control_restore(saved);
    mem_free(cosines);
    return 0;
}

int llamac_op_gather(int dtype, const void *w, int columns, const int32_t *rows, size_t n, const char *isa, float *y,
                     llamac_error *err) {
    const struct kernels *kernels = kernels_select(isa, err);
    if (!kernels) return -1;
    const size_t strip_bytes = dtype_strip_bytes(dtype, (uint64_t)columns);
    const fp_control saved = fp_control_reset();
    for (size_t i = 0; i < n; i++) kernels->gather[dtype](w, strip_bytes, rows[i], columns, y + i * (size_t)columns);
    fp_control_restore(saved);
    return 0;
}

int llamac_op_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position, const char *isa,
                     void *scratch, llamac_error *err) {
    const struct kernels *kernels = kernels_select(isa, err);
    return kernels ? sample_with(kernels, logits, n, sampling, position, NULL, scratch, err) : -1;
}

// ---- operations of the thread team

static void run_team(int threads, pool_work *work, void *job) {
    struct contention contention = { 0 };
    pool_run(&(struct pool_job){ threads, 0, work, job }, &contention, NULL);
}

struct quantize_job {
    int dtype, columns;
    const float *w, *importance;
    size_t rows, strip_bytes;
    const char *isa;
    uint8_t *out;
    int failed;
    llamac_error *err;   // of the first thread that failed
};

static void quantize_share(void *argument, const struct member *member) {
    struct quantize_job *job = argument;
    const size_t strips = (job->rows + STRIP_ROWS - 1) / STRIP_ROWS;
    int first, last;
    pool_share(member, (int)strips, &first, &last);
    if (first >= last) return;
    const size_t row = (size_t)first * STRIP_ROWS, end = (size_t)last * STRIP_ROWS;
    llamac_error err;
    if (!llamac_quantize(job->dtype, job->w + row * (size_t)job->columns, (end < job->rows ? end : job->rows) - row,
                         (size_t)job->columns, job->importance, NULL, job->isa,
                         job->out + (size_t)first * job->strip_bytes, &err))
        return;
    pool_lock();
    if (!job->failed && job->err) *job->err = err;
    job->failed = 1;
    pool_unlock();
}

int llamac_op_quantize(int dtype, const float *w, size_t rows, int columns, const float *importance, const char *isa,
                       int threads, void *out, llamac_error *err) {
    if (session_check_threads(threads, err)) return -1;
    struct quantize_job job = {
        .dtype = dtype, .columns = columns, .w = w, .importance = importance, .rows = rows,
        .strip_bytes = dtype_strip_bytes(dtype, (uint64_t)columns), .isa = isa, .out = out, .err = err,
    };
    run_team(threads, quantize_share, &job);
    return job.failed ? -1 : 0;
}

struct product_job {
    const llamac_op_product *p;
    const struct kernels *kernels;
    size_t strip_bytes, scratch_bytes;
    int32_t *panels;          // of up to CHUNK_ROWS inputs
    uint8_t *scratch;         // (threads, scratch_bytes)
    struct cancel cancel;     // never requested
};

static void pack_inputs(const struct product_job *job, size_t from, int m, int first, int last) {
    const llamac_op_product *p = job->p;
    const struct kernels *kernels = job->kernels;
    const int input = input_type_of(p->dtype);
    for (int r = first; r < last; r++) {
        const float *x = p->x + (from + (size_t)r) * (size_t)p->columns;
        const struct panel_row to =
            panel_row(job->panels, m, kernels->panel_rows[input], input_words(input, p->columns), r);
        pack_input(kernels, input, to, x, p->columns, m, p->numerics == LLAMAC_FAST);
    }
}

static void product_share(void *argument, const struct member *member) {
    struct product_job *job = argument;
    const llamac_op_product *p = job->p;
    for (size_t from = 0; from < p->n; from += CHUNK_ROWS) {
        const int m = p->n - from < CHUNK_ROWS ? (int)(p->n - from) : CHUNK_ROWS;
        int first, last;
        pool_share(member, m, &first, &last);
        pack_inputs(job, from, m, first, last);
        pool_barrier(member);   // products read rows that other members have packed
        pool_share(member, ceil_div(p->rows, STRIP_ROWS), &first, &last);
        const struct gemm g = {
            .dtype = p->dtype, .w = p->w, .strip_bytes = job->strip_bytes, .first = first, .last = last,
            .rows = p->rows, .columns = p->columns, .x = job->panels, .m = m, .fast = p->numerics == LLAMAC_FAST,
            .bias = p->bias, .y = p->y + from * (size_t)p->rows, .y_stride = (size_t)p->rows,
            .scratch = job->scratch + (size_t)member->index * job->scratch_bytes, .cancel = &job->cancel,
        };
        if (first < last) job->kernels->gemm(&g);
        pool_barrier(member);   // the next rows overwrite the panels
    }
}

int llamac_op_matmul(const llamac_op_product *p, const char *isa, int threads, llamac_error *err) {
    struct product_job job = {
        .p = p, .kernels = kernels_select(isa, err), .strip_bytes = dtype_strip_bytes(p->dtype, (uint64_t)p->columns),
    };
    if (!job.kernels || session_check_threads(threads, err)) return -1;
    const size_t m = p->n < CHUNK_ROWS ? p->n : CHUNK_ROWS;
    job.scratch_bytes = round_up(gemm_scratch_bytes((int)m), LINE_BYTES);
    job.panels = mem_alloc(m * input_words(input_type_of(p->dtype), p->columns), sizeof(int32_t),
                           "the inputs of a product", err);
    if (!job.panels) return -1;
    job.scratch = mem_alloc((size_t)threads, job.scratch_bytes, "a product", err);
    if (job.scratch) run_team(threads, product_share, &job);
    mem_free(job.scratch);
    mem_free(job.panels);
    return job.scratch ? 0 : -1;
}

struct attention_job {
    const llamac_op_attention *a;
    const struct kernels *kernels;
    int n_pages;
    size_t keys_bytes, head_bytes, page_bytes, memory_floats;
    uint8_t *cache;             // (n_pages, page_bytes): in each page the keys, then the values of each KV head
    const uint8_t **pages;      // (n_pages)
    float *memory;              // (threads, memory_floats): the parts of tile_layout
    struct cancel cancel;       // never requested
};

// Stores the keys and values of one KV head in one page.
static void fill_page(const struct attention_job *job, int head, int page) {
    const llamac_op_attention *a = job->a;
    uint8_t *keys = job->cache + (size_t)page * job->page_bytes + (size_t)head * job->head_bytes;
    const int first = page * KV_PAGE, n = min_int(KV_PAGE, a->n_positions - first);
    for (int slot = 0; slot < n; slot++) {
        const size_t at =
            ((size_t)(first + slot) * (size_t)a->n_kv_heads + (size_t)head) * (size_t)a->head_dim;
        job->kernels->store_key[a->kv_dtype](keys, slot, a->head_dim, a->k + at);
        job->kernels->store_value[a->kv_dtype](keys + job->keys_bytes, slot, a->head_dim, a->v + at);
    }
}

// Where query t of a KV head is in q and out. The queries of a head are ordered by row, then by query head.
static size_t query_offset(const llamac_op_attention *a, int head, int t) {
    const int group = a->n_heads / a->n_kv_heads;
    return ((size_t)(t / group) * (size_t)a->n_heads + (size_t)(head * group + t % group)) * (size_t)a->head_dim;
}

// Computes queries [first, last) of a KV head, at most ATTENTION_QUERIES.
static void attend_queries(struct attention_job *job, int head, int first, int last, float *memory) {
    const llamac_op_attention *a = job->a;
    const struct tile_layout layout = tile_layout(a->kv_dtype, a->head_dim);
    const int group = a->n_heads / a->n_kv_heads, n = last - first, width = padded_head_dim(a->head_dim);
    struct attend tile = {
        .kv = { job->pages, (size_t)head * job->head_bytes, (size_t)head * job->head_bytes + job->keys_bytes },
        .head_dim = a->head_dim, .value_dim = a->head_dim, .n_queries = n, .q = memory, .soft_cap = a->soft_cap,
        .has_sinks = a->sinks != NULL, .out = memory + layout.out, .scratch = memory + layout.scratch,
        .cancel = &job->cancel,
    };
    float *const scaled = tile.out;   // until `attend` overwrites it
    for (int t = 0; t < n; t++) {
        const float *q = a->q + query_offset(a, head, first + t);
        const struct panel_row to = panel_row(memory, n, PANEL_ROWS, kv_query_words(a->kv_dtype, a->head_dim), t);
        for (int d = 0; d < a->head_dim; d++) scaled[d] = q[d] * a->scale;
        job->kernels->pack[kv_query_type(a->kv_dtype)](to, scaled, a->head_dim);
        tile.begin[t] = a->begin[(first + t) / group];
        tile.end[t] = a->end[(first + t) / group];
        if (a->sinks) tile.sinks[t] = a->sinks[head * group + (first + t) % group];
    }
    job->kernels->attend[a->kv_dtype](&tile);
    for (int t = 0; t < n; t++)
        memcpy(a->out + query_offset(a, head, first + t), tile.out + (size_t)t * (size_t)width,
               sizeof(float) * (size_t)a->head_dim);
}

static void attention_share(void *argument, const struct member *member) {
    struct attention_job *job = argument;
    const llamac_op_attention *a = job->a;
    float *memory = job->memory + (size_t)member->index * job->memory_floats;
    int first, last;
    pool_share(member, a->n_kv_heads * job->n_pages, &first, &last);
    for (int i = first; i < last; i++) fill_page(job, i / job->n_pages, i % job->n_pages);
    pool_barrier(member);   // queries read pages that other members have filled
    const int queries = a->n_queries * (a->n_heads / a->n_kv_heads), tiles = ceil_div(queries, ATTENTION_QUERIES);
    pool_share(member, a->n_kv_heads * tiles, &first, &last);
    for (int i = first; i < last; i++)
        attend_queries(job, i / tiles, share_start(queries, i % tiles, tiles),
                       share_start(queries, i % tiles + 1, tiles), memory);
}

int llamac_op_attend(const llamac_op_attention *a, const char *isa, int threads, llamac_error *err) {
    struct attention_job job = {
        .a = a, .kernels = kernels_select(isa, err), .n_pages = ceil_div(a->n_positions, KV_PAGE),
        .keys_bytes = kv_keys_bytes(a->kv_dtype, a->head_dim),
        .memory_floats = round_up(tile_layout(a->kv_dtype, a->head_dim).end, LINE_BYTES / sizeof(float)),
    };
    if (!job.kernels || session_check_threads(threads, err)) return -1;
    job.head_bytes = job.keys_bytes + kv_values_bytes(a->kv_dtype, a->head_dim);
    job.page_bytes = (size_t)a->n_kv_heads * job.head_bytes;
    job.cache = mem_alloc((size_t)job.n_pages, job.page_bytes, "keys and values", err);
    job.pages = job.cache ? mem_alloc((size_t)job.n_pages, sizeof *job.pages, "the list of pages", err) : NULL;
    job.memory = job.pages ? mem_alloc((size_t)threads, sizeof(float) * job.memory_floats, "attention", err) : NULL;
    const int is_ready = job.memory != NULL;
    for (int i = 0; is_ready && i < job.n_pages; i++) job.pages[i] = job.cache + (size_t)i * job.page_bytes;
    if (is_ready) run_team(threads, attention_share, &job);
    mem_free(job.memory);
    mem_free(job.pages);
    mem_free(job.cache);
    return is_ready ? 0 : -1;
}
