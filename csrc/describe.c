// SPDX-License-Identifier: MIT
// describe.c - answers queries before the first eval: the versions of the library, and a model's sizes and ids.
#include <string.h>
#include "llamac.h"
#include "model.h"

int llamac_version(void) { return LLAMAC_VERSION; }
int llamac_numerics(void) { return LLAMAC_NUMERICS; }

void llamac_model_describe(const llamac_model *model, llamac_model_info *info) {
    const struct config *c = model->config;
    *info = (llamac_model_info){
        .context = (int)c->context,
        .n_layers = (int)c->n_layers,
        .vocab_size = (int)c->vocab_size,
        .n_token_ids = (int)c->n_token_ids,
        .bos_id = c->bos_id,
        .add_bos = (int)c->add_bos,
        .n_stop_ids = (int)c->n_stop_ids,
        .has_mtp = (int)c->mtp_layers,
        .is_drafter = c->drafter != DRAFTER_NONE,
    };
    memcpy(info->stop_ids, c->stop_ids, sizeof info->stop_ids);
}
