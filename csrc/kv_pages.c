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
    struct kv_slab *next, **link;   // the next slab with room, and what points to this one; NULL if there is no room
    uint8_t *free_list;       // freed pages; each starts with the address of the next
    size_t page_bytes;
    int n_pages, in_use;
    int n_touched;            // pages that have ever been in use, the first ones of the slab
};
struct page_header { struct kv_slab *slab; int references; uint64_t mark; };   // mark: of the last count
_Static_assert(sizeof(struct kv_slab) <= HEADER_BYTES && sizeof(struct page_header) <= HEADER_BYTES, "headers");

static struct page_header *header_of(const uint8_t *page) {
    return (struct page_header *)(void *)(uintptr_t)(page - HEADER_BYTES);
}

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
    if (page) memcpy(&slab->free_list, page, sizeof slab->free_list);
    else page = (uint8_t *)slab + 2 * HEADER_BYTES + (size_t)slab->n_touched++ * (HEADER_BYTES + page_bytes);
    if (++slab->in_use == slab->n_pages) remove_slab(slab);
    *header_of(page) = (struct page_header){ .slab = slab, .references = 1 };
    return page;
}

// Returns the slab if the caller shall free it.
static struct kv_slab *return_page(struct kv_pool *pool, uint8_t *page) {
    struct kv_slab *slab = header_of(page)->slab;
    memcpy(page, &slab->free_list, sizeof slab->free_list);
    slab->free_list = page;
    if (slab->in_use-- == slab->n_pages) insert_slab(pool, slab);
    if (slab->in_use) return NULL;
    remove_slab(slab);
    return slab;
}

static struct kv_slab *new_slab(size_t page_bytes, size_t max_pages, llamac_error *err) {
    const size_t stride = HEADER_BYTES + page_bytes, fit = SLAB_BYTES / stride, n = fit < max_pages ? fit : max_pages;
    const int n_pages = n ? (int)n : 1;
    struct kv_slab *slab = mem_alloc_huge(HEADER_BYTES + (size_t)n_pages * stride, "pages of the KV cache", err);
    if (!slab) return NULL;
    *slab = (struct kv_slab){ .page_bytes = page_bytes, .n_pages = n_pages };
    mem_count_object(1);
    return slab;
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
        struct kv_slab *slab = new_slab(page_bytes, max_pages, err);   // takes long: without the lock
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
    if (page) memset(page, POISON, page_bytes);   // also what an earlier sequence left there
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

void kv_page_release(struct kv_pool *pool, uint8_t *page) {
    if (__atomic_sub_fetch(&header_of(page)->references, 1, __ATOMIC_ACQ_REL)) return;
    pool_lock();
    __atomic_store_n(&pool->bytes, pool->bytes - header_of(page)->slab->page_bytes, __ATOMIC_RELAXED);
    struct kv_slab *emptied = return_page(pool, page);
    pool_unlock();
    if (!emptied) return;
    mem_free(emptied);
    mem_count_object(-1);
}

size_t kv_page_bytes(const uint8_t *page) { return header_of(page)->slab->page_bytes; }

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

void kv_pool_set_budget(struct kv_pool *pool, size_t bytes) {
    pool_lock();
    pool->budget = bytes;
    pool_unlock();
}
