// SPDX-License-Identifier: MIT
// kv_pages.h - memory for pages of the KV cache, cut from slabs that are large enough for huge pages of the system:
// attention goes through all of a cache for each token, and with pages of 4 KB it waits for their translation.
#ifndef LLAMAC_KV_PAGES_H
#define LLAMAC_KV_PAGES_H
#include <stdint.h>
#include "mem.h"

struct kv_pages {
    size_t page_bytes;        // a multiple of 64
    int per_slab;
    struct kv_slab *slabs;    // those with pages in use
};

// For at most `most` pages of page_bytes.
struct kv_pages kv_pages_of(size_t page_bytes, size_t most);
// A zeroed page, or NULL and an error.
uint8_t *kv_page_take(struct kv_pages *pages, llamac_error *err);
// A slab goes with its last page.
void kv_page_give(struct kv_pages *pages, uint8_t *page);
#endif
