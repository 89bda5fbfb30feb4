// SPDX-License-Identifier: MIT
// kv_pages.h - memory for pages of the KV cache. Pages are cut from slabs that are large enough for the system's huge
// pages: attention reads a whole cache for each token, and with pages of 4 KB it would wait for address translation.
#ifndef LLAMAC_KV_PAGES_H
#define LLAMAC_KV_PAGES_H
#include <stdint.h>
#include "mem.h"

struct kv_pages {
    size_t page_bytes;        // a multiple of 64
    int pages_per_slab;
    struct kv_slab *slabs;    // each has pages in use
};

// Returns an empty allocator for up to max_pages pages.
struct kv_pages kv_pages_make(size_t page_bytes, size_t max_pages);
// Returns a page with any content: attention drops what it computes from positions that no key was stored for. So a
// page costs memory when it is first written, by the thread that writes it. On failure returns NULL and fills err.
uint8_t *kv_page_alloc(struct kv_pages *pages, llamac_error *err);
// Returns a page to its slab, and frees the slab if no page of it is in use.
void kv_page_free(struct kv_pages *pages, uint8_t *page);
#endif
