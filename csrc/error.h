// SPDX-License-Identifier: MIT
// error.h - how functions report errors. The function that detects an error writes the message; its callers pass it on.
#ifndef LLAMAC_ERROR_H
#define LLAMAC_ERROR_H
#include "llamac.h"

// Fills `err`, which may be NULL, and returns -1. A message names the object, the value found and the value expected.
int err_set(llamac_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define bad_argument(err, ...) err_set(err, LLAMAC_BAD_ARGUMENT, __VA_ARGS__)
#define bad_model(err, ...) err_set(err, LLAMAC_BAD_MODEL, __VA_ARGS__)
#endif
