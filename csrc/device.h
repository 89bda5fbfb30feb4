// SPDX-License-Identifier: MIT
// device.h - sessions on a device: their KV pages are in device memory, and the device computes their chunks of rows.
//
// The core does the bookkeeping: sequences, lists of pages, forks, windows, drafts. It never accesses device memory
// directly but calls the device's copy functions. To compute a chunk, a device executes the model's plan (plan.h).
// Errors: as in llamac.h.
#ifndef LLAMAC_DEVICE_H
#define LLAMAC_DEVICE_H
#include "llamac.h"

typedef struct llamac_chunk llamac_chunk;

// The callbacks of a device. Each receives `context` as its first argument. Several threads may call them at once; the
// core holds no lock during a call. Addresses are nonzero device addresses. Functions that return int return 0 on
// success. On failure they return -1 and fill err, which is not NULL. Errors: LLAMAC_DEVICE_FAILED, LLAMAC_NO_MEMORY.
typedef struct {
    void *context;
    int most_rows;   // of a chunk, at least LLAMAC_MAX_DRAFTS; an encoder's text may have more
    size_t mtp_kv_budget;   // bytes of pages of all sessions of the model's MTP layer; 0: no limit
    // Returns the address of uninitialized memory, a multiple of 64. On failure returns 0 and fills err.
    uint64_t (*alloc)(void *context, size_t bytes, llamac_error *err);
    void (*free)(void *context, uint64_t address);
    // Copy within the device, from the device to the host, and from the host to the device. Copies and `forward` take
    // effect in the order of the calls.
    int (*copy)(void *context, uint64_t to, uint64_t from, size_t bytes, llamac_error *err);
    int (*read)(void *context, void *to, uint64_t from, size_t bytes, llamac_error *err);
    int (*write)(void *context, uint64_t to, const void *from, size_t bytes, llamac_error *err);
    // Computes a chunk: stores the keys and values of its rows, fills chunk->logits, chunk->hidden and the observers'
    // buffers. On failure the rows count as not computed. Additional error: LLAMAC_CANCELLED, if *chunk->cancel was
    // set.
    int (*forward)(void *context, const llamac_chunk *chunk, llamac_error *err);
} llamac_device;

// Lets sessions of a model and of its MTP layer open on a device (on_device of llamac_session_options). The device also
// computes the sessions of drafters that have a session there as their trunk. It reads the trunk's pages for assistants
// and stores the pages of EAGLE-3 heads. Call this at most once. The device is borrowed until llamac_model_close.
// Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_NO_MEMORY.
int llamac_model_use_device(llamac_model *model, const llamac_device *device, llamac_error *err);

// As llamac_kv_bytes and llamac_set_kv_budget, for the pages on the device alone. The limit is in force until
// llamac_set_kv_budget is called again. Without a device, there are no such pages and the limit has no effect.
size_t llamac_device_kv_bytes(const llamac_model *model);
void llamac_set_device_kv_budget(llamac_model *model, size_t bytes);
// Says whether `inputs`, `states` and `hidden` of a session's evals (llamac_eval_options) are addresses in the memory
// of its device, which alone accesses them; at first they are not. Errors: LLAMAC_BAD_ARGUMENT: not on a device.
int llamac_states_on_device(llamac_session *session, int are_there, llamac_error *err);
// Limits the bytes of pages on the device of all sessions of EAGLE-3 heads that draft for a model; 0: no limit.
void llamac_set_head_kv_budget(llamac_model *model, size_t bytes);

// ---- chunks

// Chunks of an encoder consist of whole sequences, because its rows attend to later positions.
struct llamac_chunk {
    const llamac_session *session;
    const llamac_row *rows;          // (n_rows); of drafts, `sequence` is a branch, n_sequences or more
    int n_rows, n_wanted;            // n_wanted: the number of rows that want logits
    // (n_rows), or NULL if the rows are not drafts: a draft's keys and values are stored in all branches from its row's
    // sequence to this one, inclusive
    const int *last_branches;
    const int32_t *types;            // (n_rows), or NULL: all are 0
    float *logits;                   // (n_wanted, vocab_size); NULL: only output_norm is wanted
    int is_mtp;                      // 1: the plan belongs to the model's MTP layer
    const llamac_model *drafter;     // the drafter that computes the chunk (llamac_plan_open_drafter); or NULL
    int after_draft;                 // 1: the inputs of an EAGLE-3 head are its own states, after a draft
    const int *state_layers;         // (3), or NULL: of a session with an EAGLE-3 head, see
                                     // llamac_plan_open_trunk
    int input_width, hidden_width;   // of a row of inputs, and of hidden
    const float *inputs;             // (n_rows, input_width): LLAMAC_BUFFER_STATES (plan.h) of an MTP layer or a
                                     // drafter; or NULL
    float *hidden;                   // (n_hidden, hidden_width): receives LLAMAC_BUFFER_HIDDEN of the last rows
    int n_hidden;
    int states_on_device;            // 1: inputs and hidden are addresses in the device's memory
    int n_observations;              // 0: llamac_chunk_observer finds none
    const int32_t *cancel;           // another thread sets it to nonzero to cancel the chunk; or NULL
    const void *eval;                // internal to the core
};

// Returns the observer's buffer for a stage: (n_rows or n_wanted, llamac_stage_width), or NULL without an observer.
float *llamac_chunk_observer(const llamac_chunk *chunk, int stage, int layer);

// Numbers the sequences of a chunk's rows, and so its page tables, in the order of their first row; for drafts, in the
// order of branches.
//     table_of         (n_rows): receives the number of each row's sequence
//     last_table_of    (n_rows): receives the number of the last branch that stores the row; table_of[r] without
//                      drafts
//     sequences        (n_rows): receives the sequence of each number
// Returns the number of sequences.
int llamac_chunk_tables(const llamac_chunk *chunk, int32_t *table_of, int32_t *last_table_of, int32_t *sequences);

// Writes to ends (n_rows) the end of the positions that each row sees in layers without a window: the position after
// its own; in an encoder, the one after the last of its sequence; in an assistant, its own.
void llamac_chunk_ends(const llamac_chunk *chunk, int32_t *ends);

// Writes to viewpoints (n_rows) the position from which each row sees others (llamac_attend_step): its own or, in an
// assistant, one from which its windows begin at the first position that the trunk still has.
void llamac_chunk_viewpoints(const llamac_chunk *chunk, int32_t *viewpoints);

// Rows [first, last) of a chunk, adjacent rows of a sequence: recurrent layers continue from the state at the address
// `from` (0: zeros) and write the state after the rows to `to`, which may be `from`. `from` may be the `to` of an
// earlier segment. A draft is a segment, which continues from its parent's.
typedef struct { int32_t first, last; uint64_t from, to; } llamac_segment;
// Writes the segments of a chunk, in the order of their rows; every row is in one. segments: (n_rows). Returns their
// number, or 0 if the model has no recurrent layers.
int llamac_chunk_segments(const llamac_chunk *chunk, llamac_segment *segments);

// Writes the addresses of a sequence's pages of a group of layers. Page p holds the positions from p * page_positions
// on.
//     sequence    may be a branch while its chunk is computed; of an assistant, the pages are those of its trunk
//     addresses   (n_pages): receives addresses, or 0 where the sequence has no page
void llamac_page_addresses(const llamac_session *session, int sequence, int group, int n_pages, uint64_t *addresses);

// Returns the number of layers.
int llamac_layer_count(const llamac_session *session);

// Where a page stores a layer's keys and values: the keys of KV head h are at offset + h * head_bytes, its values are
// value_offset bytes after its keys (kernels.h). Layers that share keys and values have the same place. A layer without
// attention has group -1. A recurrent layer's part of a state begins at state_offset.
typedef struct { int group; size_t offset, head_bytes, value_offset, state_offset; } llamac_kv_place;
// The session must have the layer.
llamac_kv_place llamac_kv_place_of(const llamac_session *session, int layer);
#endif
