// SPDX-License-Identifier: MIT
// profile.h - where the time of a session's evals goes: time and bytes by layer and step of the graph.
#ifndef LLAMAC_PROFILE_H
#define LLAMAC_PROFILE_H
#include "llamac.h"

// The steps of the graph that a profile tells apart, in the order in which they are computed.
enum llamac_step {
    LLAMAC_STEP_EMBED,        // the embeddings of the rows, and their angles

    // once per layer; with parallel branches, the feed-forward network's first two come before attention
    LLAMAC_STEP_ATTN_NORM,    // the norm before attention, and packing its rows
    LLAMAC_STEP_QKV,          // the products q, k and v, and norms over all heads
    LLAMAC_STEP_ATTENTION,    // RoPE, norms of heads, storing keys and values, attention
    LLAMAC_STEP_ATTN_OUT,     // the output projection
    LLAMAC_STEP_FFN_NORM,     // the norm before the feed-forward network, and packing its rows
    LLAMAC_STEP_FFN_UP,       // up to the hidden activations, with the router
    LLAMAC_STEP_FFN_DOWN,     // the down projection

    LLAMAC_STEP_OUTPUT_NORM,  // the last norm
    LLAMAC_STEP_LOGITS,       // the output matrix
    LLAMAC_N_STEPS
};

// Returns "embed", "attn_norm", ..., or NULL if `step` is not an enum llamac_step.
const char *llamac_step_name(int step);

// What a step of a layer has cost so far. ns: time of the calling thread, with its waits for the other threads. bytes:
// weights, keys and values that all threads have read; those that a thread reads again from a cache count again.
typedef struct { uint64_t ns, bytes; } llamac_step_cost;

// Measures the evals of a session from now on, and adds their costs to `costs` (n_layers, LLAMAC_N_STEPS), which must
// live until the session is closed or the next call. Steps outside the layers are in layer 0. NULL, 0: stops measuring.
// Results stay the same. n_costs: the number of elements. For a session on a device, the device adds its costs to
// the array that llamac_costs_of returns. Errors: LLAMAC_BAD_ARGUMENT.
int llamac_profile(llamac_session *session, llamac_step_cost *costs, size_t n_costs, llamac_error *err);

// Returns where the costs of a session are added, or NULL if it does not measure.
llamac_step_cost *llamac_costs_of(const llamac_session *session);

// ---- for the graph (profile_steps.c)

struct worker;
// Starts the clock of a chunk. Every member calls it.
void profile_begin(const struct worker *w);
// Charges a step with the time since the last one, and with the bytes that this member has counted. Every member calls
// it. Does nothing unless the session measures.
void step_done(const struct worker *w, int step, int layer);
#endif
