// SPDX-License-Identifier: MIT
// saving.h - access to the pages of the KV cache, for saving and restoring sequences.
//
// A page holds page_positions (llamac_session_info) positions of a group of layers. Its bytes depend on the model, the
// tokens and the dtype of the KV cache, but not on the kernel set or the number of threads. A page saved by one process
// can therefore continue a sequence in another process with the same bits. Errors, threads and memory: as in llamac.h.
#ifndef LLAMAC_SAVING_H
#define LLAMAC_SAVING_H
#include "llamac.h"

// A page of the KV cache. The caller owns a reference: until the caller drops it, the page does not change and its
// memory is not freed. Drop all pages before closing their model.
typedef struct llamac_page llamac_page;

// Layers with the same shape of keys and values and the same lifetime of positions. The recurrent layers are the last
// group, which has 0 KV heads and begins at position 0. Its pages are the states that a sequence keeps, the latest
// first: page 0 is the state after all positions.
typedef struct {
    int window;            // positions that the layers see; 0: all
    int n_kv_heads, head_dim;
    size_t page_bytes;
} llamac_group;

// Fills *info with a description of a group of layers. Returns 1, or 0 if there is no such group.
int llamac_group_at(const llamac_session *session, int group, llamac_group *info);

// Returns the first position of a sequence that a group of layers still stores: 0, or more if the layers have a window
// and have dropped earlier positions. Returns -1 if there is no such sequence or group.
int llamac_first_position(const llamac_session *session, int sequence, int group);

// Returns the number of positions after which a sequence has the state of the recurrent layers with this index; -1: it
// has fewer states.
int llamac_state_length(const llamac_session *session, int sequence, int index);

// Returns the page of a group that holds positions from `index` * page_positions on, or the state with this index.
// Sequences that share it return the same address. On failure returns NULL. Error: LLAMAC_BAD_ARGUMENT.
llamac_page *llamac_hold_page(llamac_session *session, int sequence, int group, int index, llamac_error *err);

// Returns a new, uninitialized page of a group for the caller to fill. On failure returns NULL.
// Errors: LLAMAC_BAD_ARGUMENT; LLAMAC_NO_MEMORY if an allocation fails or the model's budget is exhausted.
llamac_page *llamac_take_page(const llamac_session *session, int group, llamac_error *err);

// Returns the content of a page; NULL if it is on a device. *bytes receives its size. Only a page of llamac_take_page
// that has not been restored may be written.
void *llamac_page_data(llamac_page *page, size_t *bytes);

// Copy the whole content of a page, which may be on a device, to `out` and from `data`. Errors: those of the device.
int llamac_read_page(llamac_page *page, void *out, llamac_error *err);
int llamac_write_page(llamac_page *page, const void *data, llamac_error *err);

// Copies a page to `out`, which has the group's page_bytes. Bytes that do not belong to the positions [first, last) of
// the page become 0, so a copy depends only on its positions and does not leak earlier memory content.
// Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_NO_MEMORY, those of a device.
int llamac_copy_page(const llamac_session *session, int group, llamac_page *page, int first, int last, void *out,
                     llamac_error *err);

// Drops the caller's reference to a page.
void llamac_drop_page(llamac_page *page);

// Replaces the content of a sequence with `length` positions in these pages. The caller keeps its references.
//     first_positions   (groups): the first stored position of each group, as llamac_first_position returns it
//     pages             (n_pages): those of the first group in ascending order, then those of the next group, ...; of
//                       the recurrent layers only the state after all positions
// Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_CONTEXT_FULL: nothing has changed.
int llamac_restore(llamac_session *session, int sequence, int length, const int32_t *first_positions,
                   llamac_page *const *pages, size_t n_pages, llamac_error *err);

// Adds earlier states of the recurrent layers to a sequence that llamac_restore has just restored, which can then be
// cut to them. If the session keeps fewer states, it drops some of them. The caller keeps its references.
//     lengths   (n): the number of positions before each state, descending, less than the sequence's length
//     pages     (n)
// Error: LLAMAC_BAD_ARGUMENT: nothing has changed.
int llamac_restore_states(llamac_session *session, int sequence, const int32_t *lengths, llamac_page *const *pages,
                          size_t n, llamac_error *err);

// Checks that llamac_restore, and llamac_restore_states after it, will succeed with these arguments, so that several
// sequences can be replaced, or none. Changes nothing.
//     pages     (n_pages + n_states): those for llamac_restore, then the earlier states
//     lengths   (n_states): of the earlier states
// Errors: those of the two.
int llamac_check_restore(const llamac_session *session, int sequence, int length, const int32_t *first_positions,
                         llamac_page *const *pages, size_t n_pages, const int32_t *lengths, size_t n_states,
                         llamac_error *err);

// Returns the bytes of the pages of a session's sequences. A shared page counts once.
size_t llamac_held_bytes(const llamac_session *session);
#endif
