// SPDX-License-Identifier: MIT
// kernels_attention.h - the KV cache, and softmax(q K) V over it. Part of kernels_tmpl.h; the orders stand at struct attend.

// ---- KV cache: a page holds, per layer and head, keys as KV_PAGE / 16 strips of head_dim columns, then values as strips of 16
// dimensions of KV_PAGE columns.

// 16 numbers as the cache holds them: in f32 as they are, in f16 saturated.
INLINE void store16(const int dtype, void *p, v16 x) {
    if (dtype == LLAMAC_F32) v16_store(p, x);
    else v16_store_f16(p, v16_max(v16_set1(-65504.0f), v16_min(v16_set1(65504.0f), x)));   // a NaN passes
}
INLINE void store_key(const int dtype, uint8_t *keys, int slot, int head_dim, const float *x) {
    const size_t size = element_bytes(dtype), strip = float_strip_bytes(dtype, head_dim);
    uint8_t *p = keys + (size_t)(slot / STRIP_ROWS) * strip + (size_t)(slot % STRIP_ROWS) * size;
    union { float f32[16]; uint16_t f16[16]; uint8_t bytes[64]; } sixteen;
    for (int d = 0; d < head_dim; d += 16) {
        const int n = min_int(16, head_dim - d);
        store16(dtype, &sixteen, v16_load_n(x + d, n));
        for (int i = 0; i < n; i++) memcpy(p + (size_t)(d + i) * 16 * size, sixteen.bytes + (size_t)i * size, size);
    }
}
INLINE void store_value(const int dtype, uint8_t *values, int slot, int head_dim, const float *x) {
    const size_t size = element_bytes(dtype);
    for (int d = 0; d < head_dim; d += 16)
        store16(dtype, values + ((size_t)d * KV_PAGE + (size_t)slot * 16) * size, v16_load_n(x + d, min_int(16, head_dim - d)));
}
static void store_key_f32(uint8_t *keys, int slot, int head_dim, const float *x) { store_key(LLAMAC_F32, keys, slot, head_dim, x); }
static void store_key_f16(uint8_t *keys, int slot, int head_dim, const float *x) { store_key(LLAMAC_F16, keys, slot, head_dim, x); }
static void store_value_f32(uint8_t *values, int slot, int head_dim, const float *x) { store_value(LLAMAC_F32, values, slot, head_dim, x); }
static void store_value_f16(uint8_t *values, int slot, int head_dim, const float *x) { store_value(LLAMAC_F16, values, slot, head_dim, x); }

// ---- attention

// Tiles of values: the inputs are softmax numerators as they come, a row per query.
TILES(tiles_f32_values, tile_group, LLAMAC_F32, ATTENTION_BLOCK)
TILES(tiles_f16_values, tile_group, LLAMAC_F16, ATTENTION_BLOCK)

enum {
    FETCH_COLUMNS = 16,    // of a page's products between two looks ahead
    EXPAND_PANELS = 3,     // from so many panels on, a page of f16 becomes f32 once for all of them
};

// What the queries of one call need beside their output.
struct attend_memory {
    float *scores;     // (queries, ATTENTION_BLOCK), then exp(score - max)
    float *o;          // per panel (width / 16, its queries, 16)
    float *unpacked;   // keys or values of one page
    float *sums;       // a panel's scores for one page
    float *row;        // (width): one query's o
};
INLINE struct attend_memory attend_memory(const struct attend *a) {
    const size_t width = (size_t)value_width(a->head_dim);
    struct attend_memory m = { .scores = a->scratch };
    m.o = m.scores + ATTENTION_QUERIES * ATTENTION_BLOCK;
    m.unpacked = m.o + ATTENTION_QUERIES * width;
    m.sums = m.unpacked + KV_PAGE * width;
    m.row = m.sums + KV_PAGE * PANEL_ROWS;
    return m;
}

// Queries [first, first + n) of a call: as many as a tile has rows. All of them see the positions [from, common), some more in [begin, last).
struct query_panel { int first, n, begin, from, common, last; };
INLINE struct query_panel query_panel(const struct attend *a, int i) {
    const int first = panel_start(a->n_queries, i);
    struct query_panel q = { .first = first, .n = panel_start(a->n_queries, i + 1) - first, .begin = a->first[first], .common = a->visible[first] };
    for (int t = first; t < first + q.n; t++) {
        q.begin = min_int(q.begin, a->first[t]), q.from = max_int(q.from, a->first[t]);
        q.common = min_int(q.common, a->visible[t]), q.last = max_int(q.last, a->visible[t]);
    }
    q.common = max_int(q.common, q.from);   // where windows have nothing in common
    return q;
}

// Pages lie far apart, and the hardware's prefetchers start anew in each: while one is multiplied, the next is fetched to the second
// cache, some lines at a time.
struct ahead { const uint8_t *next, *end; int lines; };
INLINE void fetch_some(struct ahead *a) {
    for (int i = 0; i < a->lines && a->next < a->end; i++, a->next += LINE_BYTES) __builtin_prefetch(a->next, 0, 2);
}

// The keys or values of one page, as tiles take them.
struct page_matrix { tile_function *const *tiles; const uint8_t *data; size_t strip_bytes, column_bytes; };
INLINE struct page_matrix page_matrix(const int dtype, const int values, const uint8_t *data, int strips, int columns, int expanded, float *unpacked) {
    tile_function *const *const as_f32 = values ? tiles_f32_values : tiles_f32, *const *const as_f16 = values ? tiles_f16_values : tiles_f16;
    const size_t strip_bytes = float_strip_bytes(dtype, columns), unpacked_bytes = float_strip_bytes(LLAMAC_F32, columns);
    if (dtype == LLAMAC_F32) return (struct page_matrix){ as_f32, data, strip_bytes, LINE_BYTES };
    if (!expanded) return (struct page_matrix){ as_f16, data, strip_bytes, LINE_BYTES / 2 };
    uint8_t *const to = (uint8_t *)unpacked;
    for (int s = 0; s < strips; s++) expand(dtype, data + (size_t)s * strip_bytes, columns, to + (size_t)s * unpacked_bytes);
    return (struct page_matrix){ as_f32, to, unpacked_bytes, LINE_BYTES };
}
// sums[strip][T][16] += over columns; the inputs of one column are `step` numbers after those of the one before.
INLINE void page_products(const struct page_matrix *m, int T, int strips, int columns, const float *x, int step, float *sums, struct ahead *ahead) {
    for (int k = 0; k < columns; k += FETCH_COLUMNS) {
        fetch_some(ahead);
        m->tiles[T](m->data + (size_t)k * m->column_bytes, m->strip_bytes, strips, x + (size_t)k * (size_t)step, min_int(FETCH_COLUMNS, columns - k), sums);
    }
}

// One block of positions for all queries of a call.
struct block {
    const struct attend *a;
    const struct attend_memory *memory;
    int begin, n, last;    // positions [begin, begin + n) of `last` in all
    int page;              // the first of its positions whose page something sees
    int panels;
    float m[ATTENTION_QUERIES], l[ATTENTION_QUERIES];   // the largest score; the sum of exp(score - m)
};
// Where a position lies in the block: 0 if before, n if behind.
INLINE int place_in(const struct block *b, int position) { return max_int(0, min_int(b->n, position - b->begin)); }
INLINE const uint8_t *block_page(const struct block *b, int i, int values) {
    return b->a->kv.pages[(b->begin + i) / KV_PAGE] + (values ? b->a->kv.value_offset : b->a->kv.key_offset);
}
// After a block's keys come its values, after those the next block's keys.
INLINE struct ahead ahead_of(const struct block *b, int i, int values, int columns) {
    const int more = i + KV_PAGE < b->n, over = values && b->begin + b->n >= b->last;
    if (over && !more) return (struct ahead){ 0 };
    const uint8_t *next = block_page(b, more ? i + KV_PAGE : values ? b->n : b->page, more ? values : !values);
    const size_t bytes = b->a->kv.value_offset - b->a->kv.key_offset;
    return (struct ahead){ next, next + bytes, ceil_div((int)(bytes / LINE_BYTES), b->panels * ceil_div(columns, FETCH_COLUMNS)) };
}

// Scores of all positions from the first to the last that a panel sees: scores[query][position in the block].
INLINE void block_scores(const int dtype, const struct block *b) {
    const struct attend *a = b->a;
    float *const sums = b->memory->sums;
    for (int i = b->page; i < b->n; i += KV_PAGE) {
        struct ahead ahead = ahead_of(b, i, 0, a->head_dim);
        const struct page_matrix keys = page_matrix(dtype, 0, block_page(b, i, 0), ceil_div(min_int(KV_PAGE, b->n - i), STRIP_ROWS), a->head_dim,
                                                    b->panels >= EXPAND_PANELS, b->memory->unpacked);
        for (int j = 0; j < b->panels; j++) {
            const struct query_panel q = query_panel(a, j);
            const int first = max_int(0, place_in(b, q.begin) - i) / STRIP_ROWS, last = ceil_div(max_int(0, min_int(KV_PAGE, place_in(b, q.last) - i)), STRIP_ROWS);
            const int strips = last - first;
            if (strips <= 0) continue;
            struct page_matrix some = keys;
            some.data += (size_t)first * keys.strip_bytes;
            memset(sums, 0, sizeof(float) * 16 * (size_t)(strips * q.n));
            page_products(&some, q.n, strips, a->head_dim, a->q + q.first * a->head_dim, q.n, sums, &ahead);
            for (int s = 0; s < strips; s++)
                for (int t = 0; t < q.n; t++)
                    v16_store(b->memory->scores + (q.first + t) * ATTENTION_BLOCK + i + 16 * (first + s), v16_load(sums + 16 * (s * q.n + t)));
        }
    }
}

// scores[0, n) become exp(score - max). Returns max and sum.
INLINE void softmax_block(float *scores, int n, float *max, float *sum) {
    const v16 nothing = v16_set1(-__builtin_inff()), zero = v16_set1(0);
    v16 top = nothing, total = zero, e;
    ROW(n, top = v16_max(top, v16_load(scores + i)), top = v16_max(top, v16_first(v16_load(scores + i), nothing, some)));
    const v16 m = v16_set1(*max = v16_max_lane(top));
    ROW(n, e = exp16(v16_sub(v16_load(scores + i), m)); v16_store(scores + i, e); total = v16_add(total, e),
        e = v16_first(exp16(v16_sub(v16_load(scores + i), m)), zero, some); v16_store(scores + i, e); total = v16_add(total, e));
    *sum = v16_sum(total);
}

static void softmax(float *x, int n) {
    float max, sum;
    softmax_block(x, n, &max, &sum);
    const v16 whole = v16_set1(sum);
    ROW(n, v16_store(x + i, v16_div(v16_load(x + i), whole)), v16_store_n(x + i, v16_div(v16_load_n(x + i, some), whole), some));
}

// The scores of one query, of the places [first, last) of the block; softmax takes whole vectors, and what is before its first score is -inf.
INLINE void finish_scores(const struct attend *a, float *scores, int first, int last) {
    const int start = first / 16 * 16;
    const v16 cap = v16_set1(a->cap);
    if (a->cap > 0) for (int i = start; i < last; i += 16) v16_store(scores + i, cap16(v16_load(scores + i), cap));
    for (int i = start; i < first; i++) scores[i] = -__builtin_inff();
}

// Adds to one query's row of o what the places [first, last) of the block give.
INLINE void row_values(const int dtype, const struct block *b, int query, int first, int last, float *row) {
    const int strips = value_width(b->a->head_dim) / 16;
    struct ahead nothing = { 0 };
    for (int i = first, n; i < last; i += n) {
        n = min_int(last - i, KV_PAGE - i % KV_PAGE);
        const struct page_matrix values = page_matrix(dtype, 1, block_page(b, i, 1) + (size_t)(i % KV_PAGE) * 16 * element_bytes(dtype), strips, KV_PAGE, 0, NULL);
        page_products(&values, 1, strips, n, b->memory->scores + query * ATTENTION_BLOCK + i, 1, row, &nothing);
    }
}
// A query's row of o, which lies in its panel among the others'.
INLINE void load_row(const struct block *b, struct query_panel q, int t) {
    const int width = value_width(b->a->head_dim);
    for (int s = 0; s < width / 16; s++) v16_store(b->memory->row + 16 * s, v16_load(b->memory->o + q.first * width + 16 * (s * q.n + t)));
}
INLINE void store_row(const struct block *b, struct query_panel q, int t) {
    const int width = value_width(b->a->head_dim);
    for (int s = 0; s < width / 16; s++) v16_store(b->memory->o + q.first * width + 16 * (s * q.n + t), v16_load(b->memory->row + 16 * s));
}

// o of each panel, position after position: those before what all its queries see, each by itself, then those together. What comes behind
// is each one's own again (see `attend`): what a query does not see, be it NaN, has no part.
INLINE void block_values(const int dtype, const struct block *b) {
    const struct attend *a = b->a;
    const int width = value_width(a->head_dim);
    memset(b->memory->o, 0, sizeof(float) * (size_t)(a->n_queries * width));
    for (int j = 0; j < b->panels; j++) {
        const struct query_panel q = query_panel(a, j);
        const int from = place_in(b, q.from);
        if (place_in(b, q.begin) == from) continue;
        for (int t = 0; t < q.n; t++) {
            load_row(b, q, t);
            row_values(dtype, b, q.first + t, place_in(b, a->first[q.first + t]), min_int(from, place_in(b, a->visible[q.first + t])), b->memory->row);
            store_row(b, q, t);
        }
    }
    for (int i = b->page; i < b->n; i += KV_PAGE) {
        struct ahead ahead = ahead_of(b, i, 1, KV_PAGE);
        const struct page_matrix values = page_matrix(dtype, 1, block_page(b, i, 1), width / 16, KV_PAGE, b->panels >= EXPAND_PANELS, b->memory->unpacked);
        for (int j = 0; j < b->panels; j++) {
            const struct query_panel q = query_panel(a, j);
            const int first = max_int(0, place_in(b, q.from) - i), last = min_int(KV_PAGE, place_in(b, q.common) - i);
            if (last <= first) continue;
            struct page_matrix some = values;
            some.data += (size_t)first * values.column_bytes;
            page_products(&some, q.n, width / 16, last - first, b->memory->scores + q.first * ATTENTION_BLOCK + i + first, 1, b->memory->o + q.first * width, &ahead);
        }
    }
}

INLINE float exp1(float x) { float y[16]; v16_store(y, exp16(v16_set1(x))); return y[0]; }

// Merges a block's (m, l, o) into the running one; the first block is taken as it is.
INLINE void merge_block(int first, float m, float l, const float *o, int n, float *run_m, float *run_l, float *run_o) {
    if (first) {
        *run_m = m, *run_l = l;
        memcpy(run_o, o, sizeof(float) * (size_t)n);
        return;
    }
    const float top = *run_m > m ? *run_m : m, keep = exp1(*run_m - top), take = exp1(m - top);
    const v16 kept = v16_set1(keep), taken = v16_set1(take);
    for (int i = 0; i < n; i += 16) v16_store(run_o + i, v16_fma(v16_load(o + i), taken, v16_mul(v16_load(run_o + i), kept)));
    *run_l = fused_multiply_add(l, take, *run_l * keep);
    *run_m = top;
}

INLINE void attend(const int dtype, const struct attend *a) {
    const int width = value_width(a->head_dim);
    const struct attend_memory memory = attend_memory(a);
    struct block b = { .a = a, .memory = &memory, .panels = panel_count(a->n_queries) };
    float run_m[ATTENTION_QUERIES] = { 0 }, run_l[ATTENTION_QUERIES] = { 0 };
    int begin = a->first[0];
    for (int t = 0; t < a->n_queries; t++) b.last = max_int(b.last, a->visible[t]), begin = min_int(begin, a->first[t]);
    for (b.begin = begin / ATTENTION_BLOCK * ATTENTION_BLOCK; b.begin < b.last && !cancelled(a->cancel); b.begin += ATTENTION_BLOCK) {
        b.n = min_int(ATTENTION_BLOCK, b.last - b.begin);
        b.page = place_in(&b, begin) / KV_PAGE * KV_PAGE;
        block_scores(dtype, &b);
        for (int t = 0; t < a->n_queries; t++) {
            float *scores = memory.scores + t * ATTENTION_BLOCK;
            const int first = place_in(&b, a->first[t]), last = place_in(&b, a->visible[t]), start = first / 16 * 16;
            if (first == last) continue;
            finish_scores(a, scores, first, last);
            if (a->scores) memcpy(a->scores + (size_t)t * a->scores_stride + b.begin + first, scores + first, sizeof(float) * (size_t)(last - first));
            else softmax_block(scores + start, last - start, &b.m[t], &b.l[t]);
        }
        if (a->scores) continue;
        block_values(dtype, &b);
        for (int j = 0; j < b.panels; j++) {
            const struct query_panel q = query_panel(a, j);
            for (int t = 0; t < q.n; t++) {
                const int i = q.first + t;
                const int last = place_in(&b, a->visible[i]);
                if (place_in(&b, a->first[i]) == last) continue;
                load_row(&b, q, t);
                row_values(dtype, &b, i, place_in(&b, q.common), last, memory.row);
                merge_block(a->first[i] >= b.begin, b.m[i], b.l[i], memory.row, width, &run_m[i], &run_l[i], a->out + (size_t)i * (size_t)width);
            }
        }
    }
    if (a->scores) return;
    for (int t = 0; t < a->n_queries; t++) {
        float *out = a->out + (size_t)t * (size_t)width;
        const v16 whole = v16_set1(run_l[t]);
        for (int i = 0; i < width; i += 16) v16_store(out + i, v16_div(v16_load(out + i), whole));
    }
}
static void attend_f32(const struct attend *a) { attend(LLAMAC_F32, a); }
static void attend_f16(const struct attend *a) { attend(LLAMAC_F16, a); }
