// SPDX-License-Identifier: MIT
// format_demands.h - the check of fields of a record for which the value of another field leaves one value only.
#ifndef LLAMAC_FORMAT_DEMANDS_H
#define LLAMAC_FORMAT_DEMANDS_H
#include <stddef.h>
#include "llamac.h"

enum { FORMAT_REASON_BYTES = 48 };
struct demand { const char *field; double found, expected; };

// Checks n fields of the record that `where` names in messages. `reason` says what leaves only the expected values:
// "with two_sided 1". Returns 0, or -1 with LLAMAC_BAD_MODEL.
int format_check_demands(const char *where, const struct demand *demands, size_t n, const char *reason,
                         llamac_error *err);
#endif
