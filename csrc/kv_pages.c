// SPDX-License-Identifier: MIT
// kv_pages.c - see kv_pages.h.
#include "kv_pages.h"

#include <string.h>
#include "common.h"

enum { SLAB_BYTES = 8 << 20 };

struct kv_slab {
    struct kv_slab *next;
    uint8_t *given_back;      // pages that were in use before, each beginning with the address of the next
    int in_use, untouched;    // pages; those behind `untouched` have never been in use
};
enum { HEAD_BYTES = 64 };
_Static_assert(sizeof(struct kv_slab) <= HEAD_BYTES, "pages begin on a line of the cache");

static uint8_t *first_page(struct kv_slab *slab) { return (uint8_t *)slab + HEAD_BYTES; }

struct kv_pages kv_pages_of(size_t page_bytes, size_t most) {
    const size_t fit = SLAB_BYTES / page_bytes, n = fit < most ? fit : most;
    return (struct kv_pages){ .page_bytes = page_bytes, .per_slab = n ? (int)n : 1 };
}

static struct kv_slab *slab_with_room(struct kv_pages *pages, llamac_error *err) {
    for (struct kv_slab *slab = pages->slabs; slab; slab = slab->next)
        if (slab->in_use < pages->per_slab) return slab;
    struct kv_slab *slab = mem_alloc_huge(HEAD_BYTES + (size_t)pages->per_slab * pages->page_bytes,
        "pages of the KV cache", err);
    if (!slab) return NULL;
    *slab = (struct kv_slab){ .next = pages->slabs };
    return pages->slabs = slab;
}

uint8_t *kv_page_take(struct kv_pages *pages, llamac_error *err) {
    struct kv_slab *slab = slab_with_room(pages, err);
    if (!slab) return NULL;
    uint8_t *page = slab->given_back;
    if (page) memcpy(&slab->given_back, page, sizeof slab->given_back);
    else page = first_page(slab) + (size_t)slab->untouched++ * pages->page_bytes;
    slab->in_use++;
    return memset(page, 0, pages->page_bytes);
}

void kv_page_give(struct kv_pages *pages, uint8_t *page) {
    struct kv_slab **link = &pages->slabs;
    while (page < first_page(*link)
        || page >= first_page(*link) + (size_t)pages->per_slab * pages->page_bytes) link = &(*link)->next;
    struct kv_slab *slab = *link;
    memcpy(page, &slab->given_back, sizeof slab->given_back);
    slab->given_back = page;
    if (--slab->in_use) return;
    *link = slab->next;
    mem_free(slab);
}
