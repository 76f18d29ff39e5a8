/* reduce_gpt.c - an existing loop like that of llm.c (gpt.h), on two devices with a reducer.

   The program has one block of parameters and one of gradients, in which the layers interleave:
   one tensor after another, each with a slice of every layer. It adds up the gradients of some
   small batches before each update. A reducer is told which slices make up a layer, and backward
   tells it which layer is done; the rest of the loop stays as it was. Lines with "+" are what a
   program with one device per process has to add; with several processes the buckets travel while
   backward goes on.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/reduce_gpt.c dp.o -o reduce_gpt -lpthread -lm
   Prints:
   as it was:      loss ... -> ...
   with a reducer: loss ... -> ..., 2 devices
   buckets: 3 2 | 1 0 | 4
   largest difference of a parameter: ... */

#include "../dp.h"
#include "gpt.h"
#include <stdio.h>

enum { LAYERS = 4, CONTEXT = 16, VOCABULARY = 13, STEPS = 20, DEVICES = 2 };
enum { ROWS = 2, BATCHES = 4 }; /* of a small batch; small batches per update */

static const gpt_shape shape = {LAYERS, 2, 32, CONTEXT, VOCABULARY};
static const float rate = 0.05f;

static uint8_t tokens[BATCHES][ROWS * CONTEXT], targets[BATCHES][ROWS * CONTEXT];

/* Letters that count up, each row from a different one. */
static void fill_batches(void)
{
    for (int batch = 0; batch < BATCHES; batch++)
        for (int i = 0; i < ROWS * CONTEXT; i++) {
            int first = batch * ROWS + i / CONTEXT;
            tokens[batch][i] = (uint8_t)((first + i) % VOCABULARY);
            targets[batch][i] = (uint8_t)((first + i + 1) % VOCABULARY);
        }
}

static float *block_create(void)
{
    float *block = calloc(gpt_param_count(&shape), sizeof *block);
    if (block == NULL)
        exit(EXIT_FAILURE);
    return block;
}

static float *params_create(void)
{
    float *params = block_create();
    gpt_begin(params, &shape);
    return params;
}

static gpt model_create(float *params)
{
    gpt g = {0};
    if (!gpt_tape_create(&g, &shape, ROWS))
        exit(EXIT_FAILURE);
    gpt_point(g.params, &shape, params);
    gpt_point(g.grads, &shape, block_create());
    return g;
}

/* ---- the program as it was ------------------------------------------------------------------- */

static float step_as_it_was(gpt *g)
{
    float loss = 0;
    gpt_zero_grad(g);
    for (int batch = 0; batch < BATCHES; batch++) {
        loss += gpt_forward(g, tokens[batch], targets[batch], ROWS) / BATCHES;
        gpt_backward(g);
    }
    gpt_update(g, rate / BATCHES, 0, gpt_param_count(&shape));
    return loss;
}

/* ---- with a reducer -------------------------------------------------------------------------- */

typedef struct replica {
    gpt model;
    int rank, batch;
    float loss;
    struct trainer *trainer;
} replica;

typedef struct trainer {
    dp_ctx *ctx;
    dp_reducer *reducer;
    replica replicas[DEVICES];
} trainer;

/* Unit l is layer l: its slice of each tensor. The embeddings are the last unit. */
static size_t make_ranges(dp_range *ranges)
{
    size_t n = 0, first = 0;
    for (int tensor = 0; tensor < GPT_TENSORS; first += gpt_count(&shape, tensor++)) {
        bool layered = tensor != GPT_EMBED && tensor != GPT_PLACE;
        size_t parts = layered ? LAYERS : 1, count = gpt_count(&shape, tensor) / parts;
        for (uint32_t l = 0; l < parts; l++)
            ranges[n++] = (dp_range){
                .unit = layered ? l : LAYERS, .first = first + l * count, .count = count};
    }
    return n;
}

static dp_reducer *reducer_create(const trainer *t)
{
    dp_range ranges[GPT_TENSORS * LAYERS];
    void *grads[DEVICES];
    dp_reducer *reducer;
    for (int i = 0; i < DEVICES; i++)
        grads[i] = t->replicas[i].model.grads[0];
    const dp_block block = {DP_F32, gpt_param_count(&shape), grads};
    DP_CHECK(
        dp_reducer_create(t->ctx, /* + */
                          &(dp_reducer_config){.name = "gpt",
                                               .blocks = &block,
                                               .block_count = 1,
                                               .ranges = ranges,
                                               .range_count = make_ranges(ranges),
                                               .reduction = DP_MEAN_RANKS,
                                               .buckets = {.first_bytes = 80000, .bytes = 90000}},
                          &reducer));
    return reducer;
}

static void layer_done(void *user, int layer)
{
    const replica *r = user;
    DP_CHECK(dp_reducer_ready(r->trainer->reducer, r->rank, (uint32_t)layer, NULL)); /* + */
}

static dp_status compute(int rank, dp_scope *scope, void *user)
{
    trainer *t = user;
    replica *r = &t->replicas[rank];
    const int batch = r->batch++ * DEVICES + rank;
    (void)scope;
    r->loss += gpt_forward(&r->model, tokens[batch], targets[batch], ROWS) / BATCHES;
    gpt_backward(&r->model);
    return DP_OK;
}

static float step_with_a_reducer(trainer *t)
{
    float loss = 0;
    for (int i = 0; i < DEVICES; i++) {
        gpt_zero_grad(&t->replicas[i].model);
        t->replicas[i].loss = 0;
        t->replicas[i].batch = 0;
    }
    for (int batch = 0; batch < BATCHES / DEVICES; batch++) {
        const dp_reduce_pass pass = {.no_sync = batch < BATCHES / DEVICES - 1};
        DP_CHECK(dp_reducer_begin(t->reducer, &pass)); /* + */
        DP_CHECK(dp_run(t->ctx, NULL, compute, t));
        DP_CHECK(dp_reducer_finish(t->reducer)); /* + */
    }
    gpt_update(&t->replicas[0].model, rate * DEVICES / BATCHES, 0, gpt_param_count(&shape));
    for (int i = 0; i < DEVICES; i++)
        loss += t->replicas[i].loss;
    return loss;
}

static void trainer_create(trainer *t, float *params)
{
    *t = (trainer){0};
    DP_CHECK(dp_open(&(dp_config){.device_count = DEVICES}, &t->ctx)); /* + */
    for (int i = 0; i < DEVICES; i++) { /* one block of parameters, as all are in this process */
        t->replicas[i] = (replica){.model = model_create(params), .rank = i, .trainer = t};
        t->replicas[i].model.layer_done = layer_done;
        t->replicas[i].model.user = &t->replicas[i];
    }
    t->reducer = reducer_create(t);
}

/* ---- both ------------------------------------------------------------------------------------ */

static void print_buckets(const dp_reducer *reducer)
{
    dp_reducer_info info;
    dp_bucket_info bucket;
    DP_CHECK(dp_reducer_info_get(reducer, &info));
    printf("buckets:");
    for (size_t b = 0; b < info.bucket_count; b++) {
        DP_CHECK(dp_reducer_bucket_get(reducer, b, &bucket));
        printf("%s", b > 0 ? " |" : "");
        for (size_t i = 0; i < bucket.unit_count; i++)
            printf(" %u", (unsigned)bucket.units[i]);
    }
    printf("\n");
}

int main(void)
{
    static trainer t;
    float *params[2] = {params_create(), params_create()}, loss[2][2] = {{0}}, worst = 0;
    gpt alone = model_create(params[0]);
    fill_batches();
    trainer_create(&t, params[1]);
    for (int step = 0; step < STEPS; step++) {
        loss[0][step > 0] = step_as_it_was(&alone);
        loss[1][step > 0] = step_with_a_reducer(&t);
    }
    printf("as it was:      loss %.3f -> %.3f\n", (double)loss[0][0], (double)loss[0][1]);
    printf("with a reducer: loss %.3f -> %.3f, %d devices\n", (double)loss[1][0],
           (double)loss[1][1], DEVICES);
    print_buckets(t.reducer);
    for (size_t i = 0; i < gpt_param_count(&shape); i++)
        worst = fmaxf(worst, fabsf(params[0][i] - params[1][i]));
    printf("largest difference of a parameter: %.1e\n", (double)worst);
    dp_close(t.ctx); /* + and the reducer with it */
    for (int i = 0; i < DEVICES; i++) {
        free(t.replicas[i].model.grads[0]);
        free(t.replicas[i].model.tape);
    }
    free(alone.grads[0]);
    free(alone.tape);
    free(params[0]);
    free(params[1]);
    return worst < 1e-4f ? EXIT_SUCCESS : EXIT_FAILURE;
}
