// SPDX-License-Identifier: MIT
// profile_steps.c - a profile: costs by layer and step of the graph. See profile.h. A session that does not measure
// pays one comparison for each step.
#include "profile.h"

#include "clock.h"
#include "error.h"
#include "eval.h"

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

int llamac_profile(llamac_session *s, llamac_step_cost *costs, size_t n_costs, llamac_error *err) {
    const size_t expected = costs ? (size_t)LLAMAC_N_STEPS * s->model->config->n_layers : 0;
    if (n_costs != expected) return bad_argument(err, "n_costs is %zu, expected %zu", n_costs, expected);
    s->profile = costs;
    return 0;
}

llamac_step_cost *llamac_costs_of(const llamac_session *session) { return session->profile; }

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
