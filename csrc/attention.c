// SPDX-License-Identifier: MIT
// attention.c - one layer's attention for a chunk of rows: RoPE, the KV cache, and queries against it.
//
//     q, k, v -> norms of heads -> rotate -> cache -> tiles of queries of one KV head -> softmax(q K) V -> mix
//
// The threads share a list of tiles, ordered by KV head. If each thread's share consists of whole heads, the thread
// reads only the part of the cache that it wrote itself, so no barrier is needed between writing and reading.
#include <math.h>
#include <string.h>
#include "common.h"
#include "eval.h"
#include "rope.h"

// A run of rows [first, last) of the chunk that belong to one sequence.
struct run { int first, last; };

static int next_run(const struct eval *e, struct run *run) {
    run->first = run->last;
    if (run->first >= e->n_rows) return 0;
    while (run->last < e->n_rows && e->rows[run->last].sequence == e->rows[run->first].sequence) run->last++;
    return 1;
}

static const struct layer *layer_of(const struct eval *e, int l) { return &e->session->model->layers[l]; }

// Query heads per KV head.
static int group_size(const struct eval *e, int l) {
    return layer_of(e, l)->heads.n / layer_of(e, l)->heads.n_kv;
}

static float *q_of(const struct eval *e, int l, int row, int q_head) {
    const struct heads *heads = &layer_of(e, l)->heads;
    return e->session->scratch.q + ((size_t)row * (size_t)heads->n + (size_t)q_head) * (size_t)heads->dim;
}

// ---- RoPE and cache

static float *angles_of(const struct eval *e, uint32_t table, int row) {
    const struct scratch *scratch = &e->session->scratch;
    const size_t head_dim = e->session->model->config->head_dim;
    return scratch->angles + ((size_t)table * (size_t)scratch->rows + (size_t)row) * head_dim;
}

void attention_prepare(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct config *c = e->session->model->config;
    int first, last;
    pool_share(w->member, e->n_rows, &first, &last);
    for (uint32_t t = 0; t < c->n_rope; t++) {
        const int half = (int)c->rope_dim[t] / 2;
        const float *inv_freq = session_inv_freq(e->session, t);
        for (int r = first; r < last; r++) {
            float *angles = angles_of(e, t, r);
            rope_angles(e->rows[r].position, inv_freq, half, c->rope_attention_factor[t], angles, angles + half);
        }
    }
}

// Normalizes n heads of `dim` floats, each separately, if the layer does. x: the heads from `head` on.
static void norm_heads(const struct llamac_session *s, const float *weight, int head, int n, int dim, float *x) {
    const struct config *c = s->model->config;
    if (!weight || c->qk_norm == QK_NORM_WHOLE) return;
    for (int i = 0; i < n; i++, x += dim) {
        if (c->qk_norm == QK_NORM_LAYER_HEAD)
            s->kernels->layer_norm(x, weight + (head + i) * dim, NULL, c->norm_eps, dim, x);
        else
            s->kernels->rms_norm(x, weight, NULL, c->norm_eps, dim, x);
    }
}

// Computes what is stored as the value of a row's KV head from the products of attn_k and attn_v.
static void make_value(const struct llamac_session *s, const struct layer *layer, const float *k, float *v) {
    const int head_dim = layer->heads.dim;
    const float n = (float)head_dim;
    if (layer->record->v_is_k) memcpy(v, k, sizeof(float) * (size_t)head_dim);
    if (layer->record->v_norm == V_NORM_HEAD)
        s->kernels->unit_norm(v, head_dim, n * s->model->config->norm_eps, sqrtf(n));
}

// Normalizes a row's queries of one KV head's group and, if the layer has its own keys, the key.
static void norm_group(const struct eval *e, int l, int head, float *k, float *q) {
    const struct llamac_session *s = e->session;
    const struct layer *layer = layer_of(e, l);
    const int group = layer->heads.n / layer->heads.n_kv, head_dim = layer->heads.dim;
    if (computes_keys(e, l)) norm_heads(s, layer->attn_k_norm, head, 1, head_dim, k);
    if (computes_queries(e)) norm_heads(s, layer->attn_q_norm, head * group, group, head_dim, q);
}

// Normalizes and rotates a row's key of one KV head and the queries of its group. Stores the key and the value in the
// cache, unless the layer reads those of another layer. A draft's key and value are stored in all of its branches.
static void rotate_and_store(const struct worker *w, int l, int head, int row) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const struct layer *layer = layer_of(e, l);
    const int head_dim = layer->heads.dim, group = group_size(e, l), table = layer->record->rope;
    const int sequence = e->rows[row].sequence, position = e->rows[row].position, has_keys = computes_keys(e, l);
    const int value_dim = layer->heads.value_dim;
    const size_t kv_head = (size_t)row * (size_t)layer->heads.n_kv + (size_t)head;
    float *q = q_of(e, l, row, head * group), *k = s->scratch.k + kv_head * (size_t)head_dim,
          *v = s->scratch.v + kv_head * (size_t)value_dim;
    if (has_keys) make_value(s, layer, k, v);
    if (!c->qk_norm_after_rope) norm_group(e, l, head, k, q);
    if (table >= 0) {
        const int half = (int)c->rope_dim[table] / 2;
        const float *angles = angles_of(e, (uint32_t)table, row);
        if (has_keys) s->kernels->rotate(k, angles, angles + half, half);
        for (int g = 0; g < group && computes_queries(e); g++)
            s->kernels->rotate(q + g * head_dim, angles, angles + half, half);
    }
    if (c->qk_norm_after_rope) norm_group(e, l, head, k, q);
    if (!has_keys) return;
    for (int i = sequence; i <= (e->last_branches ? e->last_branches[row] : sequence); i++) {
        const struct kv_view kv = session_kv(s, i, l, head);
        uint8_t *page = session_page(s, i, l, position);
        s->kernels->store_key[s->kv_dtype](page + kv.key_offset, position % KV_PAGE, head_dim, k);
        s->kernels->store_value[s->kv_dtype](page + kv.value_offset, position % KV_PAGE, value_dim, v);
    }
}

// ---- queries

// Queries [first, last) of a run for one KV head, ordered by row, then by head of the group: the input of one `attend`.
struct tile { struct run run; int head, first, last, index, count; };

// Advances to the next tile of at most `limit` queries, in the order of KV heads. Returns 0 after the last. Start with
// a tile of zeros.
static int next_tile(const struct eval *e, int l, int limit, struct tile *tile) {
    if (++tile->index >= tile->count) {
        if (!next_run(e, &tile->run)) {
            if (++tile->head >= layer_of(e, l)->heads.n_kv) return 0;
            tile->run = (struct run){ 0 };
            next_run(e, &tile->run);
        }
        tile->index = 0;
        tile->count = ceil_div((tile->run.last - tile->run.first) * group_size(e, l), limit);
    }
    const int queries = (tile->run.last - tile->run.first) * group_size(e, l);
    tile->first = share_start(queries, tile->index, tile->count);
    tile->last = share_start(queries, tile->index + 1, tile->count);
    return 1;
}

static int count_tiles(const struct eval *e, int l, int limit) {
    int n = 0;
    for (struct tile tile = { 0 }; next_tile(e, l, limit, &tile);) n++;
    return n;
}

// Return the row and the query head of query t of a tile.
static int row_of_query(const struct tile *tile, int group, int t) {
    return tile->run.first + (tile->first + t) / group;
}
static int head_of_query(const struct tile *tile, int group, int t) {
    return tile->head * group + (tile->first + t) % group;
}

// Returns the first position that a row attends to. An assistant's row sees the positions before its own that its trunk
// still has. With a window, it sees only the last of these and, before that one, as many as the window is wide.
static int first_visible(const struct eval *e, int l, int row) {
    const struct llamac_session *s = e->session;
    const struct layer_record *record = s->model->layers[l].record;
    const int window = (int)record->window, position = e->rows[row].position;
    if (s->keys_of != s)
        return max_int(window ? position - 1 - window : 0,
                       session_sequence(s->keys_of, e->rows[row].sequence)->kv[s->kv_layers[l].group].start);
    if (record->window_chunks) return position - position % window;
    return window ? max_int(0, position + 1 - window) : 0;
}

// Returns the end of the positions that a row attends to.
static int visible_end(const struct eval *e, int l, int row) {
    const struct llamac_session *s = e->session;
    const int position = e->rows[row].position, window = (int)layer_of(e, l)->record->window;
    if (!s->model->config->two_sided) return position + (s->keys_of == s);
    const int end = session_sequence(s, e->rows[row].sequence)->target;
    return window ? min_int(position + window, end) : end;
}

// Returns the factor of a row's queries.
static float query_scale(const struct llamac_session *s, int l, int position) {
    const struct layer_record *record = s->model->layers[l].record;
    const float scale = s->model->config->attention_scale;
    if (record->query_beta == 0) return scale;
    return scale * rope_query_scale(position + (int)record->query_offset, record->query_beta,
                                    (int)record->query_context);
}

// Returns the biases of a query head, as struct attend has them, or NULL.
static const float *biases_of(const struct llamac_session *s, int q_head) {
    const int distance = (int)s->model->config->bias_distance;
    return distance ? s->model->distance_bias + (size_t)q_head * (size_t)(2 * distance + 1) + distance : NULL;
}

// Scales a row's query and packs it in the format that the cache's `attend` reads. scaled: (head_dim), receives the
// scaled query.
static void pack_query(const struct eval *e, int l, int row, int q_head, float *scaled, struct panel_row to) {
    const struct llamac_session *s = e->session;
    const int head_dim = layer_of(e, l)->heads.dim;
    const float *q = q_of(e, l, row, q_head), scale = query_scale(s, l, e->rows[row].position);
    for (int d = 0; d < head_dim; d++) scaled[d] = q[d] * scale;
    s->kernels->pack[kv_query_type(s->kv_dtype)](to, scaled, head_dim);
}

// Packs the tile's queries into panels and describes them to `attend`.
static struct attend load_queries(const struct eval *e, int l, const struct tile *tile, float *panels,
                                  float *scaled) {
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const int group = group_size(e, l), head_dim = layer_of(e, l)->heads.dim, n = tile->last - tile->first;
    const float *sinks = s->model->layers[l].attn_sinks;
    struct attend a = {
        .kv = session_kv(s, e->rows[tile->run.first].sequence, l, tile->head),
        .head_dim = head_dim, .value_dim = layer_of(e, l)->heads.value_dim, .n_queries = n, .q = panels,
        .soft_cap = c->attention_soft_cap, .has_sinks = sinks != NULL, .bias_distance = (int)c->bias_distance,
    };
    for (int t = 0; t < n; t++) {
        const int row = row_of_query(tile, group, t), position = e->rows[row].position;
        pack_query(e, l, row, head_of_query(tile, group, t), scaled,
                   panel_row(panels, n, PANEL_ROWS, kv_query_words(s->kv_dtype, head_dim), t));
        if (sinks) a.sinks[t] = sinks[head_of_query(tile, group, t)];
        a.biases[t] = biases_of(s, head_of_query(tile, group, t));
        a.position[t] = position;
        a.begin[t] = first_visible(e, l, row);
        a.end[t] = visible_end(e, l, row);
    }
    return a;
}

// Multiplies a head's result by the sigmoids of its gates: one for each of its n numbers, or one for all of them.
static void gate_head(const struct kernels *kernels, float *result, const float *gates, int n_gates, int n) {
    enum { SPREAD = 64 };
    float spread[SPREAD];
    if (n_gates == n) {
        kernels->gate(result, gates, n);
        return;
    }
    for (int i = 0; i < SPREAD; i++) spread[i] = *gates;
    for (int i = 0; i < n; i += SPREAD) kernels->gate(result + i, spread, min_int(SPREAD, n - i));
}

// Copies the results of a tile to mix, each multiplied by the sigmoid of its gate if the layer has gates.
static void store_mix(const struct eval *e, int l, const struct tile *tile, const float *out) {
    const size_t dim = (size_t)layer_of(e, l)->heads.value_dim, n_heads = (size_t)layer_of(e, l)->heads.n;
    const int group = group_size(e, l), width = padded_head_dim((int)dim);
    for (int t = 0; t < tile->last - tile->first; t++) {
        const size_t row = (size_t)row_of_query(tile, group, t), q_head = (size_t)head_of_query(tile, group, t);
        float *mix = e->session->scratch.mix + (row * n_heads + q_head) * dim;
        memcpy(mix, out + t * width, sizeof(float) * dim);
        if (!layer_of(e, l)->attn_gate.data) continue;
        const size_t gates = (size_t)layer_of(e, l)->attn_gate.rows / n_heads;   // of a head
        gate_head(e->session->kernels, mix, e->session->scratch.attn_gate + (row * n_heads + q_head) * gates,
                  (int)gates, (int)dim);
    }
}

// Prepares a call of `attend` in the thread's memory.
static struct attend prepare_tile(const struct worker *w, int l, const struct tile *tile) {
    float *const memory = w->local->attention;
    const struct tile_layout layout = tile_layout(w->eval->session->kv_dtype, layer_of(w->eval, l)->heads.dim);
    struct attend a = load_queries(w->eval, l, tile, memory, memory + layout.out);
    a.out = memory + layout.out;
    a.scratch = memory + layout.scratch;
    a.cancel = &w->eval->cancel;
    return a;
}

// Counts the keys and values of positions [from, to) that a tile reads.
static void count_read(const struct worker *w, int l, int from, int to) {
    w->local->bytes_read += (uint64_t)(to - from) * w->eval->session->kv_layers[l].head_bytes / KV_PAGE;
}

static void attend_tile(const struct worker *w, int l, const struct tile *tile) {
    const struct llamac_session *s = w->eval->session;
    const struct attend a = prepare_tile(w, l, tile);
    count_read(w, l, a.begin[0], a.end[a.n_queries - 1]);
    s->kernels->attend[s->kv_dtype](&a);
    store_mix(w->eval, l, tile, a.out);
}

// The blocks of positions that the queries of a tile attend to: n blocks from `first` on.
struct blocks { int first, n; };
static struct blocks blocks_of(const struct eval *e, int l, const struct tile *tile) {
    const int group = group_size(e, l), first_row = row_of_query(tile, group, 0),
              last_row = row_of_query(tile, group, tile->last - tile->first - 1);
    const int first = first_visible(e, l, first_row) / ATTENTION_BLOCK;
    return (struct blocks){ first, ceil_div(visible_end(e, l, last_row), ATTENTION_BLOCK) - first };
}

// Computes blocks [first, last) of a tile. The thread that completes the last block of a tile merges all of them.
static void attend_blocks(const struct worker *w, int l, const struct tile *tile, struct blocks blocks, int first,
                          int last, float *partials, int *finished) {
    const struct llamac_session *s = w->eval->session;
    struct attend a = prepare_tile(w, l, tile);
    a.from = (blocks.first + first) * ATTENTION_BLOCK;
    a.to = (blocks.first + last) * ATTENTION_BLOCK;
    a.partials = partials + (size_t)(first * a.n_queries) * partial_floats(a.value_dim);
    count_read(w, l, max_int(a.from, a.begin[0]), min_int(a.to, a.end[a.n_queries - 1]));
    s->kernels->attend[s->kv_dtype](&a);
    // also after a cancellation, so that the count returns to 0
    if (__atomic_add_fetch(finished, last - first, __ATOMIC_ACQ_REL) < blocks.n) return;
    __atomic_store_n(finished, 0, __ATOMIC_RELAXED);
    s->kernels->attend_merge(&a, partials, blocks.n);
    store_mix(w->eval, l, tile, a.out);
}

// Splits the blocks of all tiles among the threads.
static void attend_split(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct scratch *scratch = &e->session->scratch;
    int total = 0, first, last, start = 0, n_tiles = 0;
    for (struct tile tile = { 0 }; next_tile(e, l, ATTENTION_QUERIES, &tile);)
        total += blocks_of(e, l, &tile).n;
    pool_share(w->member, total, &first, &last);
    const size_t floats = partial_floats(layer_of(e, l)->heads.value_dim);
    float *partials = scratch->partials;
    for (struct tile tile = { 0 }; next_tile(e, l, ATTENTION_QUERIES, &tile); n_tiles++) {
        const struct blocks blocks = blocks_of(e, l, &tile);
        const int begin = max_int(first - start, 0), end = min_int(last - start, blocks.n);
        if (begin < end) attend_blocks(w, l, &tile, blocks, begin, end, partials, scratch->finished + n_tiles);
        start += blocks.n;
        partials += (size_t)blocks.n * (size_t)(tile.last - tile.first) * floats;
    }
}

// Returns the number of tiles that a thread computes between two pauses, which takes a few milliseconds.
static int tiles_per_pause(const struct eval *e, int l, int limit) {
    int positions = 0;
    for (int r = 0; r < e->n_rows; r++) positions = max_int(positions, visible_end(e, l, r));
    const int64_t adds = (int64_t)2 * limit * positions * layer_of(e, l)->heads.dim;
    return (int)(PAUSE_ADDS_ATTENTION / adds) + 1;
}

void attention_store(const struct worker *w, int l) {
    struct eval *e = w->eval;
    int first, last;
    pool_share(w->member, layer_of(e, l)->heads.n_kv * e->n_rows, &first, &last);
    for (int r = first; r < last && !cancelled(&e->cancel); r++)
        rotate_and_store(w, l, r / e->n_rows, r % e->n_rows);
}

void attention(const struct worker *w, int l) {
    struct eval *e = w->eval;
    const int whole_heads = has_whole_heads(w, layer_of(e, l)->heads.n_kv);
    int first, last, i = 0;
    attention_store(w, l);
    if (!whole_heads) pool_barrier(w->member);   // queries read keys and values that other members have stored
    if (!whole_heads && e->n_rows <= REDUNDANT_ROWS) {
        attend_split(w, l);
        return;
    }
    // smaller tiles if the larger ones would not occupy all threads evenly
    const int count = w->member->count, large = count_tiles(e, l, ATTENTION_QUERIES);
    const int is_even = large % count == 0 && pool_shares_are_equal(w->member);
    const int limit = is_even || large >= 4 * count ? ATTENTION_QUERIES : PANEL_ROWS;
    const int total = count_tiles(e, l, limit), per_pause = tiles_per_pause(e, l, limit);
    int pauses = ceil_div(total, count) / per_pause;   // the same number for all members
    pool_share(w->member, total, &first, &last);
    for (struct tile tile = { 0 }; next_tile(e, l, limit, &tile); i++) {
        if (i < first || i >= last) continue;
        if (!cancelled(&e->cancel)) attend_tile(w, l, &tile);
        if (pauses > 0 && (i + 1 - first) % per_pause == 0) pool_pause(w->member), pauses--;
    }
    while (pauses-- > 0) pool_pause(w->member);
}

// ---- stages computed only for observers

void observe_cache(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    float *keys = observer_of(e, LLAMAC_STAGE_CACHE_K, l), *values = observer_of(e, LLAMAC_STAGE_CACHE_V, l);
    if (!keys && !values) return;
    const struct config *c = s->model->config;
    const int heads = layer_of(e, l)->heads.n_kv, head_dim = layer_of(e, l)->heads.dim,
              value_dim = layer_of(e, l)->heads.value_dim;
    const size_t width = (size_t)c->n_kv_heads * c->head_dim, keys_used = (size_t)(heads * head_dim),
                 values_used = (size_t)(heads * value_dim);
    for (int i = 0; w->member->index == 0 && i < e->n_rows * heads; i++) {
        const int row = i / heads, position = e->rows[row].position, slot = position % KV_PAGE;
        const struct kv_view kv = session_kv(s, e->rows[row].sequence, l, i % heads);
        const uint8_t *page = kv.pages[position / KV_PAGE];
        float *const key = keys ? keys + (size_t)row * width : NULL,
              *const value = values ? values + (size_t)row * width : NULL;
        if (key)
            s->kernels->load_key[s->kv_dtype](page + kv.key_offset, slot, head_dim, key + i % heads * head_dim);
        if (value)
            s->kernels->load_value[s->kv_dtype](page + kv.value_offset, slot, value_dim, value + i % heads * value_dim);
        if (i % heads) continue;
        if (key) memset(key + keys_used, 0, sizeof(float) * (width - keys_used));
        if (value) memset(value + values_used, 0, sizeof(float) * (width - values_used));
    }
    pool_barrier(w->member);
}

void observe_scores(const struct worker *w, int l) {
    struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    float *scores = observer_of(e, LLAMAC_STAGE_SCORES, l);
    if (!scores) return;
    const int heads = (int)c->n_heads, head_dim = layer_of(e, l)->heads.dim;
    const size_t stride = (size_t)s->context;
    float *panel = w->local->attention;
    float *scaled = panel + kv_query_words(s->kv_dtype, head_dim), *scratch = scaled + head_dim;
    // one query at a time, because the observer wants one row per query; the sums have the same order as in `attention`
    for (int i = 0; w->member->index == 0 && i < e->n_rows * heads; i++) {
        const int row = i / heads, q_head = i % heads, position = e->rows[row].position;
        float *to = scores + (size_t)i * stride;
        for (int p = 0; p < s->context; p++) to[p] = -INFINITY;
        if (q_head >= layer_of(e, l)->heads.n) continue;   // another layer has more heads
        pack_query(e, l, row, q_head, scaled,
                   panel_row(panel, 1, PANEL_ROWS, kv_query_words(s->kv_dtype, head_dim), 0));
        const struct attend a = {
            .kv = session_kv(s, e->rows[row].sequence, l, q_head / group_size(e, l)),
            .head_dim = head_dim, .value_dim = layer_of(e, l)->heads.value_dim, .n_queries = 1, .q = panel,
            .begin = { first_visible(e, l, row) }, .end = { visible_end(e, l, row) },
            .soft_cap = c->attention_soft_cap, .scratch = scratch, .biases = { biases_of(s, q_head) },
            .bias_distance = (int)c->bias_distance, .position = { position },
            .scores = to, .scores_stride = stride, .cancel = &e->cancel,
        };
        s->kernels->attend[s->kv_dtype](&a);
    }
    pool_barrier(w->member);
}
