// SPDX-License-Identifier: MIT
// kv_pages.c - the slabs of the KV cache. See kv_pages.h.
#include "kv_pages.h"

#include <string.h>
#include "common.h"
#include "error.h"
#include "pool.h"

enum {
    SLAB_BYTES = 8 << 20,
    HEADER_BYTES = 64,        // of a slab, and before each page: pages start on a cache line
};

struct kv_slab {
    struct kv_slab *next, **link;   // the list of slabs with a free page; link: NULL if this slab is full
    struct kv_pool *pool;
    uint64_t address;         // of the content of all pages, if it is on a device
    uint8_t *free_list;       // freed pages
    size_t page_bytes;
    int n_pages, in_use;
    int n_touched;            // pages that have ever been in use, the first ones of the slab
};
// mark: of the last count. next_free: in the slab's list.
struct page_header { struct kv_slab *slab; int references; uint64_t mark; uint8_t *next_free; };
_Static_assert(sizeof(struct kv_slab) <= HEADER_BYTES && sizeof(struct page_header) <= HEADER_BYTES, "headers");

static struct page_header *header_of(const uint8_t *page) {
    return (struct page_header *)(void *)(uintptr_t)(page - HEADER_BYTES);
}

// Returns the bytes from one page to the next. For pages on a device, host memory contains only the headers.
static size_t stride_of(const struct kv_slab *slab) {
    return HEADER_BYTES + (slab->pool->device ? 0 : slab->page_bytes);
}
static uint8_t *first_page(struct kv_slab *slab) { return (uint8_t *)slab + 2 * HEADER_BYTES; }

// ---- slabs, under the process's lock

static void insert_slab(struct kv_pool *pool, struct kv_slab *slab) {
    slab->next = pool->slabs, slab->link = &pool->slabs;
    if (slab->next) slab->next->link = &slab->next;
    pool->slabs = slab;
}

static void remove_slab(struct kv_slab *slab) {
    *slab->link = slab->next;
    if (slab->next) slab->next->link = slab->link;
    slab->next = NULL, slab->link = NULL;
}

// Returns NULL if no slab has room for a page of this size.
static uint8_t *take_page(struct kv_pool *pool, size_t page_bytes) {
    struct kv_slab *slab = pool->slabs;
    while (slab && slab->page_bytes != page_bytes) slab = slab->next;
    if (!slab) return NULL;
    uint8_t *page = slab->free_list;
    if (page) slab->free_list = header_of(page)->next_free;
    else page = first_page(slab) + (size_t)slab->n_touched++ * stride_of(slab);
    if (++slab->in_use == slab->n_pages) remove_slab(slab);
    *header_of(page) = (struct page_header){ .slab = slab, .references = 1 };
    return page;
}

// Returns the slab if it has become empty and the caller must free it, otherwise NULL.
static struct kv_slab *return_page(uint8_t *page) {
    struct kv_slab *slab = header_of(page)->slab;
    header_of(page)->next_free = slab->free_list;
    slab->free_list = page;
    if (slab->in_use-- == slab->n_pages) insert_slab(slab->pool, slab);
    if (slab->in_use) return NULL;
    remove_slab(slab);
    return slab;
}

static struct kv_slab *new_slab(struct kv_pool *pool, size_t page_bytes, size_t max_pages, llamac_error *err) {
    const llamac_device *device = pool->device;
    const size_t fit = SLAB_BYTES / (HEADER_BYTES + page_bytes), n = fit < max_pages ? fit : max_pages;
    const int n_pages = n ? (int)n : 1;
    const struct kv_slab new = { .pool = pool, .page_bytes = page_bytes, .n_pages = n_pages };
    const size_t bytes = HEADER_BYTES + (size_t)n_pages * stride_of(&new);
    struct kv_slab *slab = device ? mem_alloc(1, bytes, "headers of the KV cache's pages", err)
                                  : mem_alloc_huge(bytes, "pages of the KV cache", err);
    if (!slab) return NULL;
    *slab = new;
    llamac_error own = { 0 };
    if (device) slab->address = device->alloc(device->context, (size_t)n_pages * page_bytes, &own);
    if (device && !slab->address) {
        mem_free(slab);
        if (err) *err = own;
        return NULL;
    }
    mem_count_object(1);
    return slab;
}

static void free_slab(struct kv_slab *slab) {
    const llamac_device *device = slab->pool->device;
    if (device) device->free(device->context, slab->address);
    mem_free(slab);
    mem_count_object(-1);
}

// ---- pages

// Counts a page. Returns 0 if it exceeds the budget.
static int reserve_bytes(struct kv_pool *pool, size_t bytes) {
    if (pool->budget && (bytes > pool->budget || pool->bytes > pool->budget - bytes)) return 0;
    __atomic_store_n(&pool->bytes, pool->bytes + bytes, __ATOMIC_RELAXED);
    return 1;
}

uint8_t *kv_page_alloc(struct kv_pool *pool, size_t page_bytes, size_t max_pages, llamac_error *err) {
    pool_lock();
    const size_t budget = pool->budget, used = pool->bytes;
    const int within_budget = reserve_bytes(pool, page_bytes);
    uint8_t *page = within_budget ? take_page(pool, page_bytes) : NULL;
    pool_unlock();
    if (!within_budget) {
        err_set(err, LLAMAC_NO_MEMORY,
                "the KV caches of this model may take %zu bytes: %zu are in use and a page of %zu does not fit. "
                "Truncate sequences, close sessions, or raise the budget", budget, used, page_bytes);
        return NULL;
    }
    if (!page) {
        // Without the lock: this is slow, and a device may wait for a thread that waits for the lock.
        struct kv_slab *slab = new_slab(pool, page_bytes, max_pages, err);
        pool_lock();
        if (slab) {
            insert_slab(pool, slab);
            page = take_page(pool, page_bytes);
        } else {
            __atomic_store_n(&pool->bytes, pool->bytes - page_bytes, __ATOMIC_RELAXED);
        }
        pool_unlock();
    }
#if defined(EXACT_BLOCKS)
    if (page && !pool->device) memset(page, POISON, page_bytes);   // also overwrites an earlier sequence's content
#endif
    return page;
}

uint8_t *kv_page_share(uint8_t *page) {
    __atomic_add_fetch(&header_of(page)->references, 1, __ATOMIC_RELAXED);
    return page;
}

// Acquires what other holders did before they released their references.
int kv_page_is_shared(const uint8_t *page) {
    return __atomic_load_n(&header_of(page)->references, __ATOMIC_ACQUIRE) > 1;
}

int kv_page_references(const uint8_t *page) {
    return __atomic_load_n(&header_of(page)->references, __ATOMIC_RELAXED);
}

void kv_page_release(uint8_t *page) {
    if (__atomic_sub_fetch(&header_of(page)->references, 1, __ATOMIC_ACQ_REL)) return;
    pool_lock();
    struct kv_pool *pool = header_of(page)->slab->pool;
    __atomic_store_n(&pool->bytes, pool->bytes - header_of(page)->slab->page_bytes, __ATOMIC_RELAXED);
    struct kv_slab *emptied = return_page(page);
    pool_unlock();
    if (emptied) free_slab(emptied);
}

size_t kv_page_bytes(const uint8_t *page) { return header_of(page)->slab->page_bytes; }
const struct kv_pool *kv_page_pool(const uint8_t *page) { return header_of(page)->slab->pool; }

// ---- content

uint64_t kv_page_address(const uint8_t *page) {
    struct kv_slab *slab = header_of(page)->slab;
    const size_t index = (size_t)(page - first_page(slab)) / stride_of(slab);
    return slab->address + index * slab->page_bytes;
}

// Converts the result of a device function. Unlike the device's, err may be NULL.
static int result_of(int failed, const llamac_error *of_device, llamac_error *err) {
    if (failed && err) *err = *of_device;
    return failed ? -1 : 0;
}

int kv_page_copy(uint8_t *to, const uint8_t *from, llamac_error *err) {
    const llamac_device *d = kv_page_pool(to)->device;
    const size_t bytes = kv_page_bytes(to);
    llamac_error own = { 0 };
    if (d) return result_of(d->copy(d->context, kv_page_address(to), kv_page_address(from), bytes, &own), &own, err);
    memcpy(to, from, bytes);
    return 0;
}

int kv_page_read(void *to, const uint8_t *from, llamac_error *err) {
    const llamac_device *d = kv_page_pool(from)->device;
    llamac_error own = { 0 };
    if (d) return result_of(d->read(d->context, to, kv_page_address(from), kv_page_bytes(from), &own), &own, err);
    memcpy(to, from, kv_page_bytes(from));
    return 0;
}

int kv_page_write(uint8_t *to, const void *from, llamac_error *err) {
    const llamac_device *d = kv_page_pool(to)->device;
    llamac_error own = { 0 };
    if (d) return result_of(d->write(d->context, kv_page_address(to), from, kv_page_bytes(to), &own), &own, err);
    memcpy(to, from, kv_page_bytes(to));
    return 0;
}

// ---- counting

static uint64_t last_mark;   // under the process's lock

struct kv_count kv_count_start(void) {
    pool_lock();
    return (struct kv_count){ .mark = ++last_mark };
}
void kv_count_page(struct kv_count *count, uint8_t *page) {
    struct page_header *header = header_of(page);
    if (header->mark != count->mark) count->bytes += header->slab->page_bytes;
    header->mark = count->mark;
}
size_t kv_count_end(const struct kv_count *count) {
    pool_unlock();
    return count->bytes;
}

size_t kv_pool_bytes(const struct kv_pool *pool) { return __atomic_load_n(&pool->bytes, __ATOMIC_RELAXED); }

size_t kv_pool_excess(struct kv_pool *pool, size_t more) {
    pool_lock();
    const size_t budget = pool->budget, bytes = pool->bytes + more;
    pool_unlock();
    return budget && bytes > budget ? bytes - budget : 0;
}

void kv_pool_set_budget(struct kv_pool *pool, size_t bytes) {
    pool_lock();
    pool->budget = bytes;
    pool_unlock();
}
