// SPDX-License-Identifier: MIT
// kv_pages.h - the pages of the KV caches of a model's sessions: reference-counted, in one pool with a byte budget.
//
// Only a page with a single reference may be written. Pages are allocated from slabs that are large enough for the
// system's huge pages: attention reads a whole cache for each token, and with pages of 4 KB it would stall on address
// translation.
//
// The pages of a pool can be in the memory of a device. Host memory then contains only their headers: a page is the
// address after its header, without content.
//
// All functions may be called by several threads at once, with one exception: the owner of the only reference to a page
// must not release it while another thread adds a reference.
#ifndef LLAMAC_KV_PAGES_H
#define LLAMAC_KV_PAGES_H
#include <stdint.h>
#include "device.h"
#include "mem.h"

struct kv_pool {
    size_t budget;            // bytes of pages; 0: no limit
    size_t bytes;             // of the pages in use
    struct kv_slab *slabs;    // slabs with a free page, unordered
    const llamac_device *device;   // the device that stores the pages; NULL: host memory
};

// Returns a page with any content and one reference. On failure returns NULL and fills err. max_pages: the maximum
// number of pages of this size that the caller needs, which bounds the size of a new slab.
//
// Pages are not cleared, because attention discards results from positions without a stored key. A page uses physical
// memory once a thread has written to it.
uint8_t *kv_page_alloc(struct kv_pool *pool, size_t page_bytes, size_t max_pages, llamac_error *err);
// Adds a reference. Returns the page.
uint8_t *kv_page_share(uint8_t *page);
// Returns whether a page has more than one reference. If it has one, only the caller can add another.
int kv_page_is_shared(const uint8_t *page);
// Returns the number of references, which other threads can change.
int kv_page_references(const uint8_t *page);
// Drops a reference. The last one returns the page to its slab, and the last page of a slab frees the slab.
void kv_page_release(uint8_t *page);
size_t kv_page_bytes(const uint8_t *page);
const struct kv_pool *kv_page_pool(const uint8_t *page);
// Returns the address of a page's content on the device.
uint64_t kv_page_address(const uint8_t *page);

// Copy the whole content of a page: to another page of the pool, to host memory, and from host memory. They fail only
// if the device fails; they then return -1 and fill err.
int kv_page_copy(uint8_t *to, const uint8_t *from, llamac_error *err);
int kv_page_read(void *to, const uint8_t *from, llamac_error *err);
int kv_page_write(uint8_t *to, const void *from, llamac_error *err);

// Adds up the bytes of pages, counting repeated pages once. Holds the process-wide lock from start to end.
struct kv_count { uint64_t mark; size_t bytes; };
struct kv_count kv_count_start(void);
void kv_count_page(struct kv_count *count, uint8_t *page);
size_t kv_count_end(const struct kv_count *count);

// Return pool->bytes, and by how much the pool would exceed its budget with more bytes; set pool->budget. Pages in use
// are kept.
size_t kv_pool_bytes(const struct kv_pool *pool);
size_t kv_pool_excess(struct kv_pool *pool, size_t more);
void kv_pool_set_budget(struct kv_pool *pool, size_t bytes);
#endif
