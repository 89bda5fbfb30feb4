// SPDX-License-Identifier: MIT
// slots.h - slots: the weights that a config calls for, with their names, shapes and order in the file.
//
// An iterator visits all slots in order, also those that the config does not call for. The functions below describe its
// current slot.
#ifndef LLAMAC_SLOTS_H
#define LLAMAC_SLOTS_H
#include "format.h"
#include "llamac.h"
#include "model.h"

enum { SLOT_TEXT_BYTES = 128 };

// Moves to the next slot. Returns 0 past the end.
int slot_advance(llamac_slot_iterator *it);

// Whether the config calls for the slot, and whether a file must then have it.
int slot_applies(const llamac_slot_iterator *it);
int slot_is_required(const llamac_slot_iterator *it);

void slot_name(const llamac_slot_iterator *it, char name[FORMAT_NAME_BYTES]);
int slot_is_matrix(const llamac_slot_iterator *it);   // otherwise a vector, which has one row
int slot_is_of_layer(const llamac_slot_iterator *it);   // and not of one of its experts
uint64_t slot_rows(const llamac_slot_iterator *it);
uint64_t slot_columns(const llamac_slot_iterator *it);

// Where a model keeps the slot's `struct matrix`, or its pointer to a vector.
void *slot_target(const llamac_slot_iterator *it, struct llamac_model *m);

// For messages. The first two write which fields of config and layer determine an extent. The third writes which fields
// decide whether the config calls for the slot: ", with NAME VALUE" for each, nothing if no field does.
void slot_describe_rows(const llamac_slot_iterator *it, char text[SLOT_TEXT_BYTES]);
void slot_describe_columns(const llamac_slot_iterator *it, char text[SLOT_TEXT_BYTES]);
void slot_describe_conditions(const llamac_slot_iterator *it, char text[SLOT_TEXT_BYTES]);

#endif
