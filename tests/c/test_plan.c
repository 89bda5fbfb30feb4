// SPDX-License-Identifier: MIT
// test_plan.c - the plan of a model: every tensor of the file is the operand of one step, and buffers are written
// before they are read. (test_device.c computes plans and compares bits.)
#include "model.h"
#include "plan.h"
#include "tiny_model.h"

static struct tiny_file file;
static llamac_model *model;
static llamac_plan plan;
static int *named;   // per tensor of the file: the operands that are its data

static void name_operand(const llamac_operand *o) {
    if (!o->data) {
        CHECK(o->bytes == 0 && o->offset == -1, "an absent operand has %zu bytes", o->bytes);
        return;
    }
    CHECK(o->offset >= 0 && (const uint8_t *)o->data == file.data + o->offset, "offset %lld", (long long)o->offset);
    for (size_t i = 0; i < model->file.n_tensors; i++) {
        const struct tensor_record *t = &model->file.tensors[i];
        if ((int64_t)t->offset != o->offset) continue;
        CHECK(t->bytes == o->bytes, "%s has %zu bytes in the plan", t->name, o->bytes);
        named[i]++;
        return;
    }
    CHECK(0, "no tensor at offset %lld", (long long)o->offset);
}
static void name_linear(const llamac_linear *l) {
    name_operand(&l->weights), name_operand(&l->bias), name_operand(&l->scales);
    if (l->weights.data)
        CHECK(l->weights.bytes == llamac_matrix_bytes(l->dtype, (uint64_t)l->rows, (uint64_t)l->columns), "shape");
}
static void name_norm(const llamac_norm *n) { name_operand(&n->weight), name_operand(&n->bias); }

static void name_operands(const llamac_step *s) {
    switch (s->op) {
    case LLAMAC_OP_ROPE: name_operand(&s->rope.inv_freq), name_operand(&s->rope.inv_freq_long); break;
    case LLAMAC_OP_EMBED:
        name_linear(&s->embed.tokens), name_linear(&s->embed.types), name_linear(&s->embed.positions);
        name_linear(&s->embed.tokens_adapter.a), name_linear(&s->embed.tokens_adapter.b);
        name_linear(&s->embed.types_adapter.a), name_linear(&s->embed.types_adapter.b);
        name_linear(&s->embed.positions_adapter.a), name_linear(&s->embed.positions_adapter.b);
        break;
    case LLAMAC_OP_NORM:   // hidden states have the norm of the logits
        if (s->norm.output != LLAMAC_BUFFER_HIDDEN) name_norm(&s->norm.norm);
        break;
    case LLAMAC_OP_PRODUCT: name_linear(&s->product.linear); break;
    case LLAMAC_OP_HEAD_PRODUCT: name_linear(&s->head_product.linear); break;
    case LLAMAC_OP_HEADS: name_operand(&s->heads.q_norm), name_operand(&s->heads.k_norm); break;
    case LLAMAC_OP_ATTEND:
        name_operand(&s->attend.sinks);
        if (s->layer == 0) name_operand(&s->attend.biases);   // all layers have the same
        break;
    case LLAMAC_OP_EXPERT_PRODUCT:
        for (int i = 0; i < s->expert_product.n_experts; i++) name_linear(&s->expert_product.linears[i]);
        break;
    case LLAMAC_OP_ADD: name_norm(&s->add.norm); break;
    case LLAMAC_OP_ROUTE: name_operand(&s->route.choice_bias), name_operand(&s->route.factors); break;
    case LLAMAC_OP_CONVOLVE: name_operand(&s->convolve.taps), name_operand(&s->convolve.bias); break;
    case LLAMAC_OP_DELTA_RULE:
        name_operand(&s->delta_rule.decay), name_operand(&s->delta_rule.dt_bias), name_operand(&s->delta_rule.norm);
        break;
    case LLAMAC_OP_SCAN:
        name_operand(&s->scan.decay), name_operand(&s->scan.dt_bias), name_operand(&s->scan.skip);
        break;
    case LLAMAC_OP_LAYER_INPUTS:
        name_linear(&s->layer_inputs.table), name_norm(&s->layer_inputs.norm);
        name_linear(&s->layer_inputs.adapter.a), name_linear(&s->layer_inputs.adapter.b);
        break;
    default: break;
    }
}

static void open_plan(const struct tiny_shape *shape) {
    file = tiny_model(shape);
    model = open_model(file);
    CHECK(!llamac_plan_open(&plan, model, 0, &err), "%s", err.message);
}
static void close_plan(void) {
    llamac_plan_close(&plan);
    CHECK(!plan.steps && !plan.experts && !plan.n_steps, "the plan is not empty");
    llamac_model_close(&model);
    free(file.data);
}

static void every_tensor_is_the_operand_of_one_step(void) {
    const struct tiny_shape *const shapes[] = { &tiny_llama, &tiny_experts, &tiny_gpt2, &tiny_mixed, &tiny_exact,
                                                &tiny_features, &tiny_layered, &tiny_mixture, &tiny_mixers,
                                                &tiny_recurrent, &tiny_mamba, &tiny_beside, &tiny_parts,
                                                &tiny_latent, &tiny_encoder, &tiny_biased, &tiny_distant };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        open_plan(shapes[i]);
        named = take(sizeof *named * model->file.n_tensors);
        for (int step = 0; step < plan.n_steps; step++) name_operands(&plan.steps[step]);
        for (size_t t = 0; t < model->file.n_tensors; t++) {
            const char *name = model->file.tensors[t].name;
            // an encoder has no logits
            const int is_tied = t == 0 && shapes[i]->tied,
                      is_unused = shapes[i]->encoder && !strcmp(name, "output.bias");
            CHECK(named[t] == 1 + is_tied - is_unused, "shape %zu: %s is named %d times", i, name, named[t]);
        }
        free(named);
        close_plan();
    }
}

static void the_plan_of_an_mtp_layer_has_its_tensors_and_the_models_embedding_and_output(void) {
    struct tiny_shape shape = tiny_experts;
    shape.mtp = 1;
    file = tiny_model(&shape);
    model = open_model(file);
    CHECK(!llamac_plan_open(&plan, model, 1, &err), "%s", err.message);
    named = take(sizeof *named * model->file.n_tensors);
    for (int step = 0; step < plan.n_steps; step++) name_operands(&plan.steps[step]);
    char own[16];
    snprintf(own, sizeof own, "layers.%u.", model->config->n_layers);
    for (size_t t = 0; t < model->file.n_tensors; t++) {
        const char *name = model->file.tensors[t].name;
        const int is_own = !strncmp(name, "mtp.", 4) || !strncmp(name, own, strlen(own)),
                  is_shared = strncmp(name, "layers.", 7) && !strstr(name, "norm");
        CHECK(is_own ? named[t] == 1 : !named[t] == !is_shared, "%s is named %d times", name, named[t]);
    }
    free(named);
    close_plan();
    file = tiny_model(&tiny_llama);
    model = open_model(file);
    CHECK(llamac_plan_open(&plan, model, 1, &err) && strstr(err.message, "the model has no MTP layer"), "%s",
          err.message);
    close_plan();
}

static void other_data_of_a_tensor_is_outside_the_file(void) {
    file = tiny_model(&tiny_llama);
    model = open_model(file);
    float *norm = take_floats(1, tiny_llama.dim);
    CHECK(!llamac_model_replace(model, "output_norm.weight", LLAMAC_F32, norm, sizeof(float) * (size_t)tiny_llama.dim,
                                &err), "%s", err.message);
    CHECK(!llamac_plan_open(&plan, model, 0, &err), "%s", err.message);
    int found = 0;
    for (int i = 0; i < plan.n_steps; i++)
        if (plan.steps[i].op == LLAMAC_OP_NORM && plan.steps[i].norm.output == LLAMAC_BUFFER_OUTPUT_NORMED) {
            const llamac_operand *weight = &plan.steps[i].norm.norm.weight;
            found = weight->data == norm && weight->offset == -1;
        }
    CHECK(found, "the plan does not use the other data");
    close_plan();
    free(norm);
}

static void adapters_follow_the_products_of_the_same_inputs(void) {
    file = tiny_model(&tiny_llama);
    model = open_model(file);
    const size_t columns = (size_t)tiny_llama.dim, rows = (size_t)(tiny_llama.n_heads * tiny_llama.head_dim);
    const size_t a_bytes = llamac_matrix_bytes(LLAMAC_F32, 2, columns),
                 b_bytes = llamac_matrix_bytes(LLAMAC_F32, rows, 2);
    float *a = take(a_bytes), *b = take(b_bytes), *scales = take_floats((int)rows, 1);
    CHECK(!llamac_model_adapt(model, "layers.0.attn_q.weight", 2, a, a_bytes, b, b_bytes, scales, rows, &err), "%s",
          err.message);
    CHECK(!llamac_plan_open(&plan, model, 0, &err), "%s", err.message);
    CHECK(plan.widths[LLAMAC_BUFFER_PROJECTED] == 2, "rank %d", plan.widths[LLAMAC_BUFFER_PROJECTED]);
    int first = 0;
    while (plan.steps[first].op != LLAMAC_OP_PRODUCT) first++;
    static const int outputs[] = { LLAMAC_BUFFER_Q, LLAMAC_BUFFER_K, LLAMAC_BUFFER_V, LLAMAC_BUFFER_PROJECTED,
                                   LLAMAC_BUFFER_Q };
    for (int i = 0; i < (int)ARRAY_LEN(outputs); i++) {
        const llamac_product_step *p = &plan.steps[first + i].product;
        CHECK(plan.steps[first + i].op == LLAMAC_OP_PRODUCT && p->output == outputs[i], "output %d", p->output);
        CHECK((p->linear.scales.data == scales) == (i == 0) && p->accumulate == (i == 4), "product %d", i);
        CHECK((p->linear.weights.data == a) == (i == 3) && (p->linear.weights.data == b) == (i == 4), "product %d", i);
    }
    close_plan();
    free(a), free(b), free(scales);
}

static void drafters_are_refused(void) {
    struct tiny_shape shape = tiny_llama;
    shape.eagle = 40, shape.trunk_dim = shape.dim, shape.n_layers = 1;
    file = tiny_model(&shape);
    model = open_model(file);
    CHECK(llamac_plan_open(&plan, model, 0, &err) && err.code == LLAMAC_UNSUPPORTED &&
          strstr(err.message, "the model is a drafter, whose plan depends on the model"), "%s", err.message);
    CHECK(llamac_plan_open_drafter(&plan, model, model, 0, &err) && strstr(err.message, "is itself a drafter"), "%s",
          err.message);
    const int layers[] = { 0, 1, 1 };
    CHECK(llamac_plan_open_trunk(&plan, model, layers, &err) && strstr(err.message, "is itself a drafter"), "%s",
          err.message);
    close_plan();
}

static void layers_that_a_model_does_not_have_are_refused(void) {
    file = tiny_model(&tiny_llama);
    model = open_model(file);
    const int outside[] = { 0, 1, tiny_llama.n_layers + 1 };
    CHECK(llamac_plan_open_trunk(&plan, model, outside, &err) && strstr(err.message, "state_layers[2] is"), "%s",
          err.message);
    close_plan();
}

static void memory_can_run_out(void) {
    file = tiny_model(&tiny_experts);
    model = open_model(file);
    for (long n = 1; n < 3; n++) {
        llamac_test_fail_allocation(n);
        CHECK(llamac_plan_open(&plan, model, 0, &err) && err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    }
    close_plan();
}

int main(void) {
    RUN(every_tensor_is_the_operand_of_one_step);
    RUN(the_plan_of_an_mtp_layer_has_its_tensors_and_the_models_embedding_and_output);
    RUN(other_data_of_a_tensor_is_outside_the_file);
    RUN(adapters_follow_the_products_of_the_same_inputs);
    RUN(drafters_are_refused);
    RUN(layers_that_a_model_does_not_have_are_refused);
    RUN(memory_can_run_out);
    return finish_tests("test_plan");
}
