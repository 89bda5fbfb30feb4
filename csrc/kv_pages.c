// SPDX-License-Identifier: MIT
// kv_pages.c - the slabs of the KV cache. See kv_pages.h.
#include "kv_pages.h"

#include <string.h>
#include "common.h"

enum {
    SLAB_BYTES = 8 << 20,
    SLAB_HEADER_BYTES = 64,   // the pages after it start on a cache line
};

struct kv_slab {
    struct kv_slab *next;
    uint8_t *free_list;       // freed pages; each starts with the address of the next
    int in_use;               // pages
    int n_touched;            // pages that have ever been in use, the first ones of the slab
};
_Static_assert(sizeof(struct kv_slab) <= SLAB_HEADER_BYTES, "the header of a slab");

static uint8_t *first_page(struct kv_slab *slab) { return (uint8_t *)slab + SLAB_HEADER_BYTES; }

struct kv_pages kv_pages_make(size_t page_bytes, size_t max_pages) {
    const size_t fit = SLAB_BYTES / page_bytes, n = fit < max_pages ? fit : max_pages;
    return (struct kv_pages){ .page_bytes = page_bytes, .pages_per_slab = n ? (int)n : 1 };
}

static struct kv_slab *find_slab_with_room(struct kv_pages *pages, llamac_error *err) {
    for (struct kv_slab *slab = pages->slabs; slab; slab = slab->next)
        if (slab->in_use < pages->pages_per_slab) return slab;
    const size_t bytes = SLAB_HEADER_BYTES + (size_t)pages->pages_per_slab * pages->page_bytes;
    struct kv_slab *slab = mem_alloc_huge(bytes, "pages of the KV cache", err);
    if (!slab) return NULL;
    *slab = (struct kv_slab){ .next = pages->slabs };
    return pages->slabs = slab;
}

uint8_t *kv_page_alloc(struct kv_pages *pages, llamac_error *err) {
    struct kv_slab *slab = find_slab_with_room(pages, err);
    if (!slab) return NULL;
    uint8_t *page = slab->free_list;
    if (page) memcpy(&slab->free_list, page, sizeof slab->free_list);
    else page = first_page(slab) + (size_t)slab->n_touched++ * pages->page_bytes;
    slab->in_use++;
#if defined(EXACT_BLOCKS)
    memset(page, POISON, pages->page_bytes);   // also what an earlier sequence left there
#endif
    return page;
}

void kv_page_free(struct kv_pages *pages, uint8_t *page) {
    const size_t slab_bytes = (size_t)pages->pages_per_slab * pages->page_bytes;
    struct kv_slab **link = &pages->slabs;
    while (page < first_page(*link) || page >= first_page(*link) + slab_bytes) link = &(*link)->next;
    struct kv_slab *slab = *link;
    memcpy(page, &slab->free_list, sizeof slab->free_list);
    slab->free_list = page;
    if (--slab->in_use) return;
    *link = slab->next;
    mem_free(slab);
}
