// SPDX-License-Identifier: MIT
// open_shape.h - the model that a test program has open: made from a shape, and checked for leaks when it is closed.
#ifndef LLAMAC_OPEN_SHAPE_H
#define LLAMAC_OPEN_SHAPE_H

#include "session.h"
#include "tiny_model.h"

static struct tiny_file file;
static llamac_model *model;
static int vocab;

static void open_shape(const struct tiny_shape *shape) {
    file = tiny_model(shape);
    model = open_model(file);
    vocab = shape->vocab;
}

static void close_shape(void) {
    CHECK(llamac_kv_bytes(model) == 0, "%zu bytes of pages leak", llamac_kv_bytes(model));
    llamac_model_close(&model);
    free(file.data);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
}

#endif
