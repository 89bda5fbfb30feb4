// SPDX-License-Identifier: MIT
// kernels_attention.h - KV cache stores, softmax, and attention over the paged KV cache. Part of kernels_template.h.
// The order of operations is specified at struct attend in kernels.h.

// ---- KV cache. Per layer and head a page holds the keys, KV_PAGE / 16 strips of 16 positions with head_dim columns,
// then the values, strips of 16 dimensions with KV_PAGE columns. kernels.h describes q8.

// Stores 16 floats. f16 saturates.
INLINE void kv_store16(const int dtype, void *p, v16 x) {
    if (dtype == LLAMAC_F32) v16_store(p, x);
    else v16_store_f16(p, v16_max(v16_set1(-65504.0f), v16_min(v16_set1(65504.0f), x)));   // NaN passes
}
// The q8 scale of n numbers, and its inverse. Both are 0 if all magnitudes are below 2^-100.
INLINE uint16_t q8_scale(const float *x, int n, float *inverse) {
    const float exact = input_scale(x, n, INT8_LIMIT, inverse), limited = exact > 65504 ? 65504 : exact;
    uint16_t scale = f16_from_f32(limited);
    scale = (uint16_t)(scale + (f32_from_f16(scale) < limited));   // rounds up
    if (*inverse > 0) *inverse = 1 / f32_from_f16(scale);
    return scale;
}
// Up to 16 codes, as q8_0 stores them.
INLINE void q8_codes(const float *x, int n, float inverse, uint8_t codes[16]) {
    const v16 limit = v16_set1(INT8_LIMIT), zero = v16_set1(0);
    const v16 code = inverse > 0 ? v16_mul(v16_load_n(x, n), v16_set1(inverse)) : zero;
    v16_store_int8((int8_t *)codes, v16_max(v16_sub(zero, limit), v16_min(limit, code)));
    for (int i = 0; i < 16; i++) codes[i] = (uint8_t)(codes[i] + Q8_OFFSET);
}
INLINE void quantize_key(uint8_t *keys, int slot, int head_dim, const float *x) {
    uint8_t *block = keys + (size_t)(slot / STRIP_ROWS) * kv_key_strip_bytes(LLAMAC_Q8, head_dim);
    const int r = slot % STRIP_ROWS;
    for (int k = 0; k < head_dim; k += BLOCK_COLUMNS) {
        const int n = min_int(BLOCK_COLUMNS, head_dim - k), groups = ceil_div(n, GROUP_COLUMNS);
        uint8_t *const lines = block + block_scale_bytes(LLAMAC_Q8_0, groups);
        for (int j = 0; j < n; j += GROUP_COLUMNS) {
            float inverse;
            const uint16_t scale = q8_scale(x + k + j, min_int(GROUP_COLUMNS, n - j), &inverse);
            memcpy(block + j / GROUP_COLUMNS * STRIP_ROWS * 2 + 2 * r, &scale, 2);
            for (int i = j; i < min_int(n, j + GROUP_COLUMNS); i += 16) {
                uint8_t codes[16];
                q8_codes(x + k + i, min_int(16, n - i), inverse, codes);
                for (int l = 0; l < 4; l++) memcpy(lines + (i / 4 + l) * LINE_BYTES + 4 * r, codes + 4 * l, 4);
            }
        }
        block += block_bytes(LLAMAC_Q8_0, groups);
    }
}
INLINE void store_key(const int dtype, uint8_t *keys, int slot, int head_dim, const float *x) {
    if (dtype == LLAMAC_Q8) { quantize_key(keys, slot, head_dim, x); return; }
    const size_t size = element_bytes(dtype);
    uint8_t *p = keys + (size_t)(slot / STRIP_ROWS) * kv_key_strip_bytes(dtype, head_dim) +
                 (size_t)(slot % STRIP_ROWS) * size;
    union { float f32[16]; uint16_t f16[16]; uint8_t bytes[64]; } converted;
    for (int d = 0; d < head_dim; d += 16) {
        const int n = min_int(16, head_dim - d);
        kv_store16(dtype, &converted, v16_load_n(x + d, n));
        for (int i = 0; i < n; i++) memcpy(p + (size_t)(d + i) * 16 * size, converted.bytes + (size_t)i * size, size);
    }
}
INLINE void load_key(const int dtype, const uint8_t *keys, int slot, int head_dim, float *x) {
    const size_t strip_bytes = kv_key_strip_bytes(dtype, head_dim);
    if (dtype == LLAMAC_Q8) gather_quant(LLAMAC_Q8_0, keys, strip_bytes, slot, head_dim, x);
    else gather_float(dtype, keys, strip_bytes, slot, head_dim, x);
}
INLINE void quantize_value(uint8_t *values, int slot, int head_dim, const float *x) {
    float inverse;
    const uint16_t scale = q8_scale(x, head_dim, &inverse);
    memcpy(values + 2 * slot, &scale, 2);
    for (int d = 0; d < head_dim; d += 16) {
        uint8_t codes[16];
        q8_codes(x + d, min_int(16, head_dim - d), inverse, codes);
        for (int i = 0; i < 16; i++) values[kv_value_code_offset(slot, d + i)] = codes[i];
    }
}
INLINE void store_value(const int dtype, uint8_t *values, int slot, int head_dim, const float *x) {
    if (dtype == LLAMAC_Q8) { quantize_value(values, slot, head_dim, x); return; }
    const size_t column_bytes = STRIP_ROWS * element_bytes(dtype);
    for (int d = 0; d < head_dim; d += 16)
        kv_store16(dtype, values + (size_t)(slot + d / 16 * KV_PAGE) * column_bytes,
                   v16_load_n(x + d, min_int(16, head_dim - d)));
}
INLINE void load_value(const int dtype, const uint8_t *values, int slot, int head_dim, float *x) {
    const float scale = dtype == LLAMAC_Q8 ? f32_from_f16(((const uint16_t *)(const void *)values)[slot]) : 0;
    for (int d = 0; d < head_dim; d++)
        x[d] = dtype == LLAMAC_Q8
                   ? scale * (float)(values[kv_value_code_offset(slot, d)] - Q8_OFFSET)
                   : element(dtype, values + (size_t)((d / 16 * KV_PAGE + slot) * 16 + d % 16) * element_bytes(dtype));
}
#define KV_ACCESS(name, dtype) \
    static void store_key_##name(uint8_t *keys, int slot, int head_dim, const float *x) { \
        store_key(dtype, keys, slot, head_dim, x); \
    } \
    static void store_value_##name(uint8_t *values, int slot, int head_dim, const float *x) { \
        store_value(dtype, values, slot, head_dim, x); \
    } \
    static void load_key_##name(const uint8_t *keys, int slot, int head_dim, float *x) { \
        load_key(dtype, keys, slot, head_dim, x); \
    } \
    static void load_value_##name(const uint8_t *values, int slot, int head_dim, float *x) { \
        load_value(dtype, values, slot, head_dim, x); \
    }
KV_ACCESS(f32, LLAMAC_F32)
KV_ACCESS(f16, LLAMAC_F16)
KV_ACCESS(q8, LLAMAC_Q8)

// ---- attention

// Products with values read their inputs, the softmax numerators, in place: one row of ATTENTION_BLOCK floats per
// query.
PANEL_KERNEL(panel_kernel_f32_values, multiply_panel, micro_kernel_float, LLAMAC_F32, ATTENTION_BLOCK)
PANEL_KERNEL(panel_kernel_f16_values, multiply_panel, micro_kernel_float, LLAMAC_F16, ATTENTION_BLOCK)

enum {
    PREFETCH_COLUMNS = 16,    // columns of a page multiplied between two rounds of prefetching
    UNPACK_MIN_PANELS = 3,    // from this many panels, a page is converted to f32 once for all of them
};

// The scratch memory of one call. width: padded_head_dim.
struct attend_buffers {
    float *scores;          // (queries, ATTENTION_BLOCK), then exp(score - max)
    float *o;               // per panel (width / 16, queries of the panel, 16)
    float *unpack_buffer;   // keys or values of one page
    float *sums;            // scores of one panel for one page; later, in q8, its packed numerators
    float *row;             // (width): o of one query
};
INLINE struct attend_buffers attend_buffers(const struct attend *a) {
    const struct attend_layout l = attend_layout(a->head_dim);
    return (struct attend_buffers){ .scores = a->scratch, .o = a->scratch + l.o, .sums = a->scratch + l.sums,
                                    .unpack_buffer = a->scratch + l.unpack_buffer, .row = a->scratch + l.row };
}

// Queries [first, first + n): one panel. Together they see positions [begin, end); each of them sees [shared_begin,
// shared_end).
struct query_panel { int first, n, begin, shared_begin, shared_end, end; };
INLINE struct query_panel query_panel(const struct attend *a, int i) {
    const int first = panel_start(a->n_queries, PANEL_ROWS, i);
    struct query_panel q = { .first = first, .n = panel_start(a->n_queries, PANEL_ROWS, i + 1) - first,
                             .begin = a->begin[first], .shared_end = a->end[first] };
    for (int t = first; t < first + q.n; t++) {
        q.begin = min_int(q.begin, a->begin[t]), q.shared_begin = max_int(q.shared_begin, a->begin[t]);
        q.shared_end = min_int(q.shared_end, a->end[t]), q.end = max_int(q.end, a->end[t]);
    }
    q.shared_end = max_int(q.shared_end, q.shared_begin);   // disjoint windows share nothing
    return q;
}

// Pages are scattered, and hardware prefetchers start over in each. So the next page is prefetched into L2, a few
// lines at a time, while the current one is multiplied.
struct prefetch { const uint8_t *next, *end; int lines; };
INLINE void prefetch_lines(struct prefetch *a) {
    for (int i = 0; i < a->lines && a->next < a->end; i++, a->next += LINE_BYTES) __builtin_prefetch(a->next, 0, 2);
}

// The strips of the keys or values of one page, and the panel kernels that read them, by height.
struct page_matrix { panel_kernel *const *kernels; const uint8_t *data; size_t strip_bytes, column_bytes; };
INLINE struct page_matrix page_matrix(const int dtype, const int values, const uint8_t *data, int strips, int columns,
                                      int unpacked, float *unpack_buffer) {
    panel_kernel *const *as_f32 = values ? panel_kernel_f32_values : panel_kernel_f32;
    panel_kernel *const *as_f16 = values ? panel_kernel_f16_values : panel_kernel_f16;
    const size_t strip_bytes = float_strip_bytes(dtype, columns), column_bytes = 16 * element_bytes(dtype);
    const size_t unpacked_bytes = float_strip_bytes(LLAMAC_F32, columns);
    if (dtype == LLAMAC_F32) return (struct page_matrix){ as_f32, data, strip_bytes, column_bytes };
    if (!unpacked) return (struct page_matrix){ as_f16, data, strip_bytes, column_bytes };
    uint8_t *const to = (uint8_t *)unpack_buffer;
    for (int s = 0; s < strips; s++)
        unpack_f16(data + (size_t)s * strip_bytes, columns, to + (size_t)s * unpacked_bytes);
    return (struct page_matrix){ as_f32, to, unpacked_bytes, LINE_BYTES };
}
// sums[strip][T][16] += m x. x_step: floats from the inputs of one column to those of the next.
INLINE void page_gemm(const struct page_matrix *m, int T, int strips, int columns, const float *x, int x_step,
                      float *sums, struct prefetch *prefetch) {
    for (int k = 0; k < columns; k += PREFETCH_COLUMNS) {
        prefetch_lines(prefetch);
        m->kernels[T](m->data + (size_t)k * m->column_bytes, m->strip_bytes, strips, x + (size_t)k * (size_t)x_step,
                      min_int(PREFETCH_COLUMNS, columns - k), sums);
    }
}

// One block of positions for all queries of a call. Positions in a block count from its start.
struct kv_block {
    const struct attend *a;
    const struct attend_buffers *memory;
    int begin, n, end;     // positions [begin, begin + n); `end` is the end of the last block
    int first_page;        // start of the first page that any query sees
    int panels;
    float m[ATTENTION_QUERIES], l[ATTENTION_QUERIES];   // per query: max score, sum of exp(score - m)
};
// A position relative to the block, clamped to [0, n].
INLINE int in_block(const struct kv_block *b, int position) { return max_int(0, min_int(b->n, position - b->begin)); }
INLINE const uint8_t *block_page(const struct kv_block *b, int i, int values) {
    return b->a->kv.pages[(b->begin + i) / KV_PAGE] + (values ? b->a->kv.value_offset : b->a->kv.key_offset);
}
// What is read after the keys or values of the page at i: those of the next page; after the block's keys its values;
// after its values the next block's keys.
INLINE struct prefetch next_page(const struct kv_block *b, int i, int values, int columns) {
    const int more = i + KV_PAGE < b->n, is_last_block = values && b->begin + b->n >= b->end;
    if (is_last_block && !more) return (struct prefetch){ 0 };
    const uint8_t *next = block_page(b, more ? i + KV_PAGE : values ? b->n : b->first_page, more ? values : !values);
    const size_t bytes = b->a->kv.value_offset - b->a->kv.key_offset;
    return (struct prefetch){ next, next + bytes,
                              ceil_div((int)(bytes / LINE_BYTES), b->panels * ceil_div(columns, PREFETCH_COLUMNS)) };
}

// sums[strip][T][16] = keys times queries, for `strips` strips of a page's keys.
INLINE void multiply_keys(const int dtype, const struct page_matrix *keys, struct query_panel q,
                          int strips, const struct attend *a, struct prefetch *prefetch, float *sums) {
    const size_t words = kv_query_words(dtype, a->head_dim);
    const void *x = (const int32_t *)a->q + (size_t)q.first * words;
    memset(sums, 0, sizeof(float) * 16 * (size_t)(strips * q.n));
    if (dtype != LLAMAC_Q8) {
        page_gemm(keys, q.n, strips, a->head_dim, x, q.n, sums, prefetch);
        return;
    }
    prefetch_lines(prefetch);
    panel_kernel_q8_0[q.n](keys->data, keys->strip_bytes, strips, x, a->head_dim, sums);
}

// scores[query][position in the block], for the strips of positions that some query of a panel sees.
INLINE void block_scores(const int dtype, const struct kv_block *b) {
    const struct attend *a = b->a;
    float *const sums = b->memory->sums;
    for (int i = b->first_page; i < b->n; i += KV_PAGE) {
        struct prefetch prefetch = next_page(b, i, 0, dtype == LLAMAC_Q8 ? 1 : a->head_dim);
        const uint8_t *const data = block_page(b, i, 0);
        struct page_matrix keys = { .data = data, .strip_bytes = kv_key_strip_bytes(dtype, a->head_dim) };
        if (dtype != LLAMAC_Q8)
            keys = page_matrix(dtype, 0, data, ceil_div(min_int(KV_PAGE, b->n - i), STRIP_ROWS), a->head_dim,
                               b->panels >= UNPACK_MIN_PANELS, b->memory->unpack_buffer);
        for (int j = 0; j < b->panels; j++) {
            const struct query_panel q = query_panel(a, j);
            const int first = max_int(0, in_block(b, q.begin) - i) / STRIP_ROWS;
            const int last = ceil_div(max_int(0, min_int(KV_PAGE, in_block(b, q.end) - i)), STRIP_ROWS);
            const int strips = last - first;
            if (strips <= 0) continue;
            struct page_matrix visible = keys;
            visible.data += (size_t)first * keys.strip_bytes;
            multiply_keys(dtype, &visible, q, strips, a, &prefetch, sums);
            for (int s = 0; s < strips; s++)
                for (int t = 0; t < q.n; t++)
                    v16_store(b->memory->scores + (q.first + t) * ATTENTION_BLOCK + i + 16 * (first + s),
                              v16_load(sums + 16 * (s * q.n + t)));
        }
    }
}

// scores[0, n) = exp(score - max). The buffer is padded to a multiple of 16 floats.
INLINE void softmax_numerators(float *scores, int n, float *max, float *sum) {
    const v16 minus_infinity = v16_set1(-__builtin_inff()), zero = v16_set1(0);
    v16 top = minus_infinity, total = zero, e;
    FOR_VECTORS(n, top = v16_max(top, KEEP(v16_load(scores + i), minus_infinity)));
    const v16 m = v16_set1(*max = v16_reduce_max(top));
    FOR_VECTORS(n, e = KEEP(v16_exp(v16_sub(v16_load(scores + i), m)), zero);
                v16_store(scores + i, e); total = v16_add(total, e));
    *sum = v16_reduce_add(total);
}

static void softmax(float *x, int n) {
    float max, sum;
    softmax_numerators(x, n, &max, &sum);
    const v16 divisor = v16_set1(sum);
    FOR_VECTORS(n, STORE(x + i, v16_div(LOAD(x + i), divisor)));
}

// A query's biases of the 16 keys whose distances from it are `distance` and the 15 after it.
INLINE v16 load_biases(const struct attend *a, int query, int distance) {
    const float *biases = a->biases[query];
    const int most = a->bias_distance;
    if (distance >= -most && distance + 15 <= most) return v16_load(biases + distance);
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = biases[max_int(-most, min_int(most, distance + i))];
    return v16_load(x);
}

// Adds the biases to one query's scores of positions [first, last) of a block, and caps them. Those before `first` in
// its vector become -inf, since softmax_numerators reads whole vectors.
INLINE void adjust_scores(const struct kv_block *b, int query, float *scores, int first, int last) {
    const struct attend *a = b->a;
    const int start = first / 16 * 16;
    const v16 cap = v16_set1(a->soft_cap);
    if (a->biases[query])
        for (int i = start; i < last; i += 16)
            v16_store(scores + i, v16_add(v16_load(scores + i),
                                          load_biases(a, query, b->begin + i - a->position[query])));
    if (a->soft_cap > 0)
        for (int i = start; i < last; i += 16) v16_store(scores + i, v16_soft_cap(v16_load(scores + i), cap));
    for (int i = start; i < first; i++) scores[i] = -__builtin_inff();
}

// row += sum of p * v over positions [first, last), for one query.
INLINE void add_values(const int dtype, const struct kv_block *b, int query, int first, int last, float *row) {
    const int strips = padded_head_dim(b->a->value_dim) / 16;
    struct prefetch none = { 0 };
    for (int i = first, n; i < last; i += n) {
        n = min_int(last - i, KV_PAGE - i % KV_PAGE);
        const uint8_t *data = block_page(b, i, 1) + (size_t)(i % KV_PAGE) * 16 * element_bytes(dtype);
        const struct page_matrix values = page_matrix(dtype, 1, data, strips, KV_PAGE, 0, NULL);
        page_gemm(&values, 1, strips, n, b->memory->scores + query * ATTENTION_BLOCK + i, 1, row, &none);
    }
}
// Copies o of one query out of its panel, and back.
INLINE void load_row(const struct kv_block *b, struct query_panel q, int t) {
    const int width = padded_head_dim(b->a->value_dim);
    for (int s = 0; s < width / 16; s++)
        v16_store(b->memory->row + 16 * s, v16_load(b->memory->o + q.first * width + 16 * (s * q.n + t)));
}
INLINE void store_row(const struct kv_block *b, struct query_panel q, int t) {
    const int width = padded_head_dim(b->a->value_dim);
    for (int s = 0; s < width / 16; s++)
        v16_store(b->memory->o + q.first * width + 16 * (s * q.n + t), v16_load(b->memory->row + 16 * s));
}

// o of each panel over ascending positions: first, query by query, the positions before the shared range; then the
// shared range for all queries together. `attend` adds the positions after it, query by query. So a NaN at a position
// that a query does not see cannot reach its result.
INLINE void block_values(const int dtype, const struct kv_block *b) {
    const struct attend *a = b->a;
    const int width = padded_head_dim(a->value_dim);
    memset(b->memory->o, 0, sizeof(float) * (size_t)(a->n_queries * width));
    for (int j = 0; j < b->panels; j++) {
        const struct query_panel q = query_panel(a, j);
        const int shared_begin = in_block(b, q.shared_begin);
        if (in_block(b, q.begin) == shared_begin) continue;
        for (int t = 0; t < q.n; t++) {
            load_row(b, q, t);
            add_values(dtype, b, q.first + t, in_block(b, a->begin[q.first + t]),
                       min_int(shared_begin, in_block(b, a->end[q.first + t])), b->memory->row);
            store_row(b, q, t);
        }
    }
    for (int i = b->first_page; i < b->n; i += KV_PAGE) {
        struct prefetch prefetch = next_page(b, i, 1, KV_PAGE);
        const struct page_matrix values = page_matrix(dtype, 1, block_page(b, i, 1), width / 16, KV_PAGE,
                                                      b->panels >= UNPACK_MIN_PANELS, b->memory->unpack_buffer);
        for (int j = 0; j < b->panels; j++) {
            const struct query_panel q = query_panel(a, j);
            const int first = max_int(0, in_block(b, q.shared_begin) - i);
            const int last = min_int(KV_PAGE, in_block(b, q.shared_end) - i);
            if (last <= first) continue;
            struct page_matrix shared = values;
            shared.data += (size_t)first * values.column_bytes;
            page_gemm(&shared, q.n, width / 16, last - first,
                      b->memory->scores + q.first * ATTENTION_BLOCK + i + first, 1, b->memory->o + q.first * width,
                      &prefetch);
        }
    }
}

// Packs one query's numerators of the page at i, times the values' scales.
INLINE void pack_numerators(const struct kv_block *b, int query, int i, struct panel_row to) {
    const float *p = b->memory->scores + query * ATTENTION_BLOCK + i;
    const uint16_t *scales = (const uint16_t *)(const void *)block_page(b, i, 1);
    const int first = in_block(b, b->a->begin[query]) - i, last = in_block(b, b->a->end[query]) - i;
    float scaled[KV_PAGE];
    for (int j = 0; j < KV_PAGE; j += 16) {
        const int from = max_int(j, first), end = min_int(j + 16, last);
        if (end - from == 16) {
            v16_store(scaled + j, v16_mul(v16_load(p + j), v16_load_f16(scales + j)));
            continue;
        }
        v16_store(scaled + j, v16_set1(0));
        for (int k = from; k < end; k++) scaled[k] = p[k] * f32_from_f16(scales[k]);
    }
    pack_page(to, scaled);
}
// o of each panel in q8.
INLINE void block_values_q8(const struct kv_block *b) {
    const struct attend *a = b->a;
    const int width = padded_head_dim(a->value_dim);
    _Static_assert(KV_PAGE / 2 + 2 * KV_PAGE / GROUP_COLUMNS + 1 <= KV_PAGE, "numerators fit the memory of scores");
    int32_t *const panel = (int32_t *)(void *)b->memory->sums;
    memset(b->memory->o, 0, sizeof(float) * (size_t)(a->n_queries * width));
    for (int i = b->first_page; i < b->n; i += KV_PAGE) {
        struct prefetch prefetch = next_page(b, i, 1, 1);
        const uint8_t *const codes = block_page(b, i, 1) + kv_value_scale_bytes(LLAMAC_Q8);
        for (int j = 0; j < b->panels; j++) {
            const struct query_panel q = query_panel(a, j);
            if (in_block(b, q.end) <= i || in_block(b, q.begin) >= i + KV_PAGE) continue;
            for (int t = 0; t < q.n; t++) pack_numerators(b, q.first + t, i, (struct panel_row){ panel, q.n, t });
            prefetch_lines(&prefetch);
            panel_kernel_q8_values[q.n](codes, kv_value_strip_bytes(LLAMAC_Q8), width / 16, panel, KV_PAGE,
                                   b->memory->o + q.first * width);
        }
    }
}

INLINE float exp_scalar(float x) { float y[16]; v16_store(y, v16_exp(v16_set1(x))); return y[0]; }

// Merges a block's (m, l, o) into the running values. The first block is copied.
INLINE void merge_block(int first, float m, float l, const float *o, int n, float *run_m, float *run_l, float *run_o) {
    if (first) {
        *run_m = m, *run_l = l;
        memcpy(run_o, o, sizeof(float) * (size_t)n);
        return;
    }
    const float max = *run_m > m ? *run_m : m, run_scale = exp_scalar(*run_m - max), scale = exp_scalar(m - max);
    const v16 run_scales = v16_set1(run_scale), scales = v16_set1(scale);
    for (int i = 0; i < n; i += 16)
        v16_store(run_o + i, v16_fma(v16_load(o + i), scales, v16_mul(v16_load(run_o + i), run_scales)));
    *run_l = fused_multiply_add(l, scale, *run_l * run_scale);
    *run_m = max;
}

// Stores what merge_block would merge; o NULL: the query does not see the block.
INLINE void store_partial(const struct attend *a, int block, int query, float m, float l, const float *o) {
    const size_t floats = partial_floats(a->value_dim);
    float *to = a->partials + ((size_t)block * (size_t)a->n_queries + (size_t)query) * floats;
    to[PARTIAL_M] = m, to[PARTIAL_L] = l, to[PARTIAL_VISIBLE] = o != NULL;
    if (o) memcpy(to + PARTIAL_O, o, sizeof(float) * (floats - PARTIAL_O));
}

// Merges the query's sink, if it has one, and divides by the sum. zeros: (width), overwritten.
INLINE void finish_query(const struct attend *a, int query, float m, float l, float *zeros) {
    const int width = padded_head_dim(a->value_dim);
    float *out = a->out + (size_t)query * (size_t)width;
    if (a->has_sinks) {
        memset(zeros, 0, sizeof(float) * (size_t)width);
        merge_block(0, a->sinks[query], 1, zeros, width, &m, &l, out);
    }
    const v16 divisor = v16_set1(l);
    for (int i = 0; i < width; i += 16) v16_store(out + i, v16_div(v16_load(out + i), divisor));
}

static void attend_merge(const struct attend *a, const float *partials, int n_blocks) {
    const struct attend_buffers memory = attend_buffers(a);
    const int width = padded_head_dim(a->value_dim);
    const size_t floats = partial_floats(a->value_dim);
    for (int t = 0; t < a->n_queries; t++) {
        float m = 0, l = 0;
        for (int block = 0, first = 1; block < n_blocks; block++) {
            const float *p = partials + ((size_t)block * (size_t)a->n_queries + (size_t)t) * floats;
            if (p[PARTIAL_VISIBLE] == 0) continue;
            merge_block(first, p[PARTIAL_M], p[PARTIAL_L], p + PARTIAL_O, width, &m, &l,
                        a->out + (size_t)t * (size_t)width);
            first = 0;
        }
        finish_query(a, t, m, l, memory.row);
    }
}

INLINE void attend(const int dtype, const struct attend *a) {
    const int width = padded_head_dim(a->value_dim);
    const struct attend_buffers memory = attend_buffers(a);
    struct kv_block b = { .a = a, .memory = &memory, .panels = panel_count(a->n_queries, PANEL_ROWS) };
    float run_m[ATTENTION_QUERIES] = { 0 }, run_l[ATTENTION_QUERIES] = { 0 };
    int begin = a->begin[0];
    for (int t = 0; t < a->n_queries; t++) b.end = max_int(b.end, a->end[t]), begin = min_int(begin, a->begin[t]);
    if (a->partials) b.end = min_int(b.end, a->to), begin = max_int(begin, a->from);
    for (b.begin = begin / ATTENTION_BLOCK * ATTENTION_BLOCK; b.begin < b.end && !cancelled(a->cancel);
         b.begin += ATTENTION_BLOCK) {
        b.n = min_int(ATTENTION_BLOCK, b.end - b.begin);
        b.first_page = in_block(&b, begin) / KV_PAGE * KV_PAGE;
        block_scores(dtype, &b);
        for (int t = 0; t < a->n_queries; t++) {
            float *scores = memory.scores + t * ATTENTION_BLOCK;
            const int first = in_block(&b, a->begin[t]), last = in_block(&b, a->end[t]), start = first / 16 * 16;
            if (first == last) continue;
            adjust_scores(&b, t, scores, first, last);
            if (a->scores)
                memcpy(a->scores + (size_t)t * a->scores_stride + b.begin + first, scores + first,
                       sizeof(float) * (size_t)(last - first));
            else softmax_numerators(scores + start, last - start, &b.m[t], &b.l[t]);
        }
        if (a->scores) continue;
        if (dtype == LLAMAC_Q8) block_values_q8(&b);
        else block_values(dtype, &b);
        for (int j = 0; j < b.panels; j++) {
            const struct query_panel q = query_panel(a, j);
            for (int t = 0; t < q.n; t++) {
                const int i = q.first + t, last = in_block(&b, a->end[i]);
                const int visible = in_block(&b, a->begin[i]) != last;
                if (visible) {
                    load_row(&b, q, t);
                    if (dtype != LLAMAC_Q8) add_values(dtype, &b, i, in_block(&b, q.shared_end), last, memory.row);
                }
                if (a->partials)
                    store_partial(a, (b.begin - a->from) / ATTENTION_BLOCK, i, b.m[i], b.l[i],
                                  visible ? memory.row : NULL);
                else if (visible)
                    merge_block(a->begin[i] >= b.begin, b.m[i], b.l[i], memory.row, width, &run_m[i], &run_l[i],
                                a->out + (size_t)i * (size_t)width);
            }
        }
    }
    for (int t = 0; t < a->n_queries && !a->scores && !a->partials; t++)
        finish_query(a, t, run_m[t], run_l[t], memory.row);
}
static void attend_f32(const struct attend *a) { attend(LLAMAC_F32, a); }
static void attend_f16(const struct attend *a) { attend(LLAMAC_F16, a); }
static void attend_q8(const struct attend *a) { attend(LLAMAC_Q8, a); }
