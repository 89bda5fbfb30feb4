// SPDX-License-Identifier: MIT
// kv_pages.h - the pages of the KV caches of a model's sessions: reference-counted, in one pool with a byte budget.
//
// A page belongs to everyone who holds a reference, and only a page with a single reference may be written. Pages are
// cut from slabs that are large enough for the system's huge pages: attention reads a whole cache for each token, and
// with pages of 4 KB it would wait for address translation.
//
// The pages of a pool can lie in the memory of a device. The core's memory then holds only their headers: a page is the
// address after its header, without content.
//
// All functions may be called by several threads at once, with one exception: the owner of the only reference to a page
// must not release it while another thread shares it.
#ifndef LLAMAC_KV_PAGES_H
#define LLAMAC_KV_PAGES_H
#include <stdint.h>
#include "device.h"
#include "mem.h"

struct kv_pool {
    size_t budget;            // bytes of pages; 0: no limit
    size_t bytes;             // of the pages that someone holds
    struct kv_slab *slabs;    // those with room for a page, in no order
    const llamac_device *device;   // where the pages lie; NULL: in the core's memory
};

// Returns a page with any content and one reference. max_pages: the caller will not need more pages of this size, so a
// new slab does not have more.
//
// Attention drops what it computes from positions that no key was stored for, so a page is not cleared. It costs memory
// when it is first written, by the thread that writes it. On failure returns NULL and fills err.
uint8_t *kv_page_alloc(struct kv_pool *pool, size_t page_bytes, size_t max_pages, llamac_error *err);
// Adds a reference. Returns the page.
uint8_t *kv_page_share(uint8_t *page);
// Whether there is more than one reference. While the answer is no, only the caller can change it.
int kv_page_is_shared(const uint8_t *page);
// Drops a reference. The last one returns the page to its slab, and the last page of a slab frees the slab.
void kv_page_release(uint8_t *page);
size_t kv_page_bytes(const uint8_t *page);
const struct kv_pool *kv_page_pool(const uint8_t *page);
// Returns the address of a page's content on the device.
uint64_t kv_page_address(const uint8_t *page);

// Copy the whole content of a page: to another page of the pool, to memory, and from memory. They fail only if the
// device does: then they return -1 and fill err.
int kv_page_copy(uint8_t *to, const uint8_t *from, llamac_error *err);
int kv_page_read(void *to, const uint8_t *from, llamac_error *err);
int kv_page_write(uint8_t *to, const void *from, llamac_error *err);

// Adds up the bytes of pages, each once, however often it is given. The process's lock is held from start to end.
struct kv_count { uint64_t mark; size_t bytes; };
struct kv_count kv_count_start(void);
void kv_count_page(struct kv_count *count, uint8_t *page);
size_t kv_count_end(const struct kv_count *count);

// Returns pool->bytes. Sets pool->budget; pages in use stay in use.
size_t kv_pool_bytes(const struct kv_pool *pool);
void kv_pool_set_budget(struct kv_pool *pool, size_t bytes);
#endif
