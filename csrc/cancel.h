// SPDX-License-Identifier: MIT
// cancel.h - cancellation of a running eval. The tile loops poll the caller's flag. Once one thread has seen it set,
// all threads stop, even if the caller clears it again.
#ifndef LLAMAC_CANCEL_H
#define LLAMAC_CANCEL_H
#include <stdint.h>

struct cancel {
    const int32_t *request;   // the caller's flag, or NULL
    int32_t seen;             // whether a thread has seen it set
};

static inline int cancelled(struct cancel *c) {
    if (__atomic_load_n(&c->seen, __ATOMIC_RELAXED)) return 1;
    if (!c->request || !__atomic_load_n(c->request, __ATOMIC_RELAXED)) return 0;
    __atomic_store_n(&c->seen, 1, __ATOMIC_RELAXED);
    return 1;
}
#endif
