// SPDX-License-Identifier: MIT
// steps.c - a profile: costs by layer and step of the graph. See profile.h. A session that does not measure
// pays one comparison for each step.
#include "profile.h"

#include <string.h>

#include "clock.h"
#include "error.h"
#include "eval.h"
#include "mem.h"

static const char *const names[LLAMAC_N_STEPS] = {
    [LLAMAC_STEP_EMBED] = "embed",
    [LLAMAC_STEP_ATTN_NORM] = "attn_norm",
    [LLAMAC_STEP_QKV] = "qkv",
    [LLAMAC_STEP_ATTENTION] = "attention",
    [LLAMAC_STEP_ATTN_OUT] = "attn_out",
    [LLAMAC_STEP_FFN_NORM] = "ffn_norm",
    [LLAMAC_STEP_FFN_UP] = "ffn_up",
    [LLAMAC_STEP_FFN_DOWN] = "ffn_down",
    [LLAMAC_STEP_OUTPUT_NORM] = "output_norm",
    [LLAMAC_STEP_LOGITS] = "logits",
};

const char *llamac_step_name(int step) { return step >= 0 && step < LLAMAC_N_STEPS ? names[step] : NULL; }

static size_t costs_bytes(const struct llamac_session *s) {
    return sizeof(llamac_step_cost) * LLAMAC_N_STEPS * s->model->config->n_layers;
}

int llamac_profile_start(llamac_session *s, llamac_error *err) {
    if (s->device) return err_set(err, LLAMAC_UNSUPPORTED, "the session is on a device, and only the CPU is profiled");
    if (s->profile) {
        memset(s->profile, 0, costs_bytes(s));
        return 0;
    }
    s->profile = mem_alloc(1, costs_bytes(s), "the profile", err);
    return s->profile ? 0 : -1;
}

void llamac_profile_costs(const llamac_session *s, llamac_step_cost *costs) {
    if (s->profile) memcpy(costs, s->profile, costs_bytes(s));
    else memset(costs, 0, costs_bytes(s));
}

void profile_begin(const struct worker *w) {
    if (!w->eval->session->profile) return;
    w->local->bytes_read = 0;
    if (w->member->index == 0) w->local->step_began = now_ns();
}

void step_done(const struct worker *w, int step, int layer) {
    if (!w->eval->session->profile) return;
    llamac_step_cost *cost = &w->eval->session->profile[layer * LLAMAC_N_STEPS + step];
    __atomic_fetch_add(&cost->bytes, w->local->bytes_read, __ATOMIC_RELAXED);
    w->local->bytes_read = 0;
    if (w->member->index != 0) return;
    const int64_t now = now_ns();
    cost->ns += (uint64_t)(now - w->local->step_began);
    w->local->step_began = now;
}
