// SPDX-License-Identifier: MIT
// device_chunk.c - the information that a device needs about its chunk: observers, page tables. See device.h.
#include "device.h"

#include "common.h"
#include "error.h"
#include "eval.h"

float *llamac_chunk_observer(const llamac_chunk *chunk, int stage, int layer) {
    return observer_of(chunk->eval, stage, layer);
}

int llamac_chunk_tables(const llamac_chunk *chunk, int32_t *table_of, int32_t *last_table_of, int32_t *sequences) {
    int n = 0;
    for (int r = 0; r < chunk->n_rows; r++) {
        const int sequence = chunk->rows[r].sequence;
        int table = n - 1;   // rows of a sequence are usually adjacent
        while (table >= 0 && sequences[table] != sequence) table--;
        if (table < 0) sequences[table = n++] = sequence;
        table_of[r] = table;
        // the branches of a draft are adjacent, and each has its own row, so their numbers are consecutive
        last_table_of[r] = table + (chunk->last_branches ? chunk->last_branches[r] - sequence : 0);
    }
    return n;
}

void llamac_chunk_ends(const llamac_chunk *chunk, int32_t *ends) {
    const struct llamac_session *s = chunk->session;
    for (int r = 0; r < chunk->n_rows; r++)
        ends[r] = s->model->config->two_sided ? session_sequence(s, chunk->rows[r].sequence)->target
                                              : chunk->rows[r].position + (s->keys_of == s);
}

void llamac_chunk_viewpoints(const llamac_chunk *chunk, int32_t *viewpoints) {
    const struct llamac_session *s = chunk->session;
    for (int r = 0; r < chunk->n_rows; r++) viewpoints[r] = chunk->rows[r].position;
    for (int l = 0; s->keys_of != s && l < (int)s->model->config->n_layers; l++) {
        const int window = (int)s->model->layers[l].record->window, group = s->kv_layers[l].group;
        if (!window) continue;   // layers with windows read one layer of the trunk: same `start`
        for (int r = 0; r < chunk->n_rows; r++) {
            const int start = session_sequence(s->keys_of, chunk->rows[r].sequence)->kv[group].start;
            viewpoints[r] = max_int(chunk->rows[r].position, start + assistant_window(window) - 1);
        }
    }
}

int llamac_chunk_segments(const llamac_chunk *chunk, llamac_segment *segments) {
    const struct llamac_session *s = chunk->session;
    for (int i = 0; i < s->n_segments; i++) {
        const struct state_segment *g = &s->segments[i];
        segments[i] = (llamac_segment){ g->first, g->last, g->from ? kv_page_address(g->from) : 0,
                                        kv_page_address(g->to) };
    }
    return s->n_segments;
}

void llamac_page_addresses(const llamac_session *s, int sequence, int group, int n_pages, uint64_t *addresses) {
    const struct kv_table *kv = &session_sequence(s->keys_of, sequence)->kv[group];
    for (int p = 0; p < n_pages; p++)
        addresses[p] = p >= kv->first && p < kv->end ? kv_page_address(kv->pages[p]) : 0;
}

int llamac_states_on_device(llamac_session *s, int are_there, llamac_error *err) {
    if (are_there && !s->device) return bad_argument(err, "the session is on the CPU, and its hidden states are not");
    s->states_on_device = are_there != 0;
    return 0;
}

int llamac_layer_count(const llamac_session *s) { return (int)s->model->config->n_layers; }

llamac_kv_place llamac_kv_place_of(const llamac_session *s, int layer) {
    const struct kv_layer *kv = &s->kv_layers[layer];
    return (llamac_kv_place){ kv->group, kv->offset, kv->head_bytes, kv->value_offset, kv->state_offset };
}
