/* slow.c - the GPT of examples/gpt.h on two processes, in one of several ways to send less, until
   its loss on held-out rows is small enough:

       mpirun -np 2 slow WAY LOSS

   Prints what rank 0 saw: steps, seconds, bytes a step that it gave to collectives, the loss. The
   clock stands still while the loss is looked at. slow.py runs all ways over a slow link. */

#define DP_IMPLEMENTATION
#include "../../../dp_mpi.h"
#include "../../../dp_local.h"
#include "../../../dp_train.h"
#include "../../../examples/gpt.h"
#include <stdio.h>
#include <time.h>

enum { ROWS = 8, HELD_OUT = 32, CONTEXT = 32, VOCABULARY = 16, LOOK = 16, MOST = 4000 };

static const gpt_shape shape = {2, 4, 64, CONTEXT, VOCABULARY};

typedef struct batch {
    uint8_t tokens[HELD_OUT * CONTEXT], targets[HELD_OUT * CONTEXT];
} batch;

static void draw(batch *b, unsigned number, int rows)
{
    gpt_draw(number, rows, CONTEXT, b->tokens, b->targets);
}

/* ---- the model ------------------------------------------------------------------------------- */

static dp_status forward(dp_call *call)
{
    gpt *g = call->own;
    const dp_tensor *in, *out;
    DP_TRY(dp_call_tensor(call, "tokens", DP_U8, 2, &in));
    DP_TRY(dp_call_tensor(call, "targets", DP_U8, 2, &out));
    gpt_point(g->params, &shape, (float *)(uintptr_t)dp_param_block(call));
    call->out = dp_float((double)gpt_forward(g, in->data, out->data, (int)in->shape[0]));
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    gpt *g = call->own;
    gpt_point(g->grads, &shape, dp_grad_block(call));
    gpt_backward(g);
    return DP_OK;
}

static dp_status create_tape(const dp_replica_info *info, void **own)
{
    gpt *g = calloc(1, sizeof *g);
    (void)info;
    *own = g;
    return g != NULL && gpt_tape_create(g, &shape, HELD_OUT)
               ? DP_OK
               : dp_error(DP_ERR_NO_MEMORY, "no memory for a tape");
}

static void destroy_tape(void *own)
{
    free(((gpt *)own)->tape);
    free(own);
}

/* Matrices, so that they may have a low rank. */
static dp_module *create_module(dp_ctx *ctx, float *block)
{
    static const char *const names[GPT_TENSORS] = {"embed", "place", "qkv", "proj", "up", "down"};
    static const int64_t columns[GPT_TENSORS] = {64, 64, 192, 64, 256, 64};
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    dp_param_config params[GPT_TENSORS] = {0};
    dp_module *net = NULL;
    for (int i = 0; i < GPT_TENSORS; i++)
        params[i] =
            (dp_param_config){.name = names[i],
                              .ndim = 2,
                              .shape = {(int64_t)gpt_count(&shape, i) / columns[i], columns[i]}};
    DP_CHECK(dp_module_create(ctx,
                              &(dp_module_config){.name = "gpt",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = GPT_TENSORS,
                                                  .replica_create = create_tape,
                                                  .replica_destroy = destroy_tape,
                                                  .packed = true,
                                                  .block = block,
                                                  .mean_grads = true},
                              &net));
    return net;
}

static float *numbers(void)
{
    float *block = malloc(gpt_param_count(&shape) * sizeof *block);
    if (block != NULL)
        gpt_begin(block, &shape);
    return block;
}

/* ---- the ways -------------------------------------------------------------------------------- */

typedef struct way {
    const char *name;
    dp_dtype wire;
    int bits, rank; /* of a compressor */
    dp_local_config local;
} way;

#define DILOCO .lr = 0.7, .momentum = 0.9, .nesterov = true

static const way ways[] = {
    {.name = "plain"},
    {.name = "bf16", .wire = DP_BF16},
    {.name = "bits8", .bits = 8},
    {.name = "bits4", .bits = 4},
    {.name = "rank4", .rank = 4},
    {.name = "mean4", .local = {.every = 4}},
    {.name = "mean16", .local = {.every = 16}},
    {.name = "diloco16", .local = {.every = 16, DILOCO}},
    {.name = "stream16", .local = {.every = 16, .fragments = 4, .delay = 2, DILOCO}},
    {.name = "diloco16bits4", .bits = 4, .local = {.every = 16, DILOCO}}};

typedef struct job {
    dp_ctx *ctx;
    dp_module *net, *trained;
    dp_local *local; /* NULL: gradients are reduced */
    dp_optim *optim;
} job;

static void set_up(job *j, const way *w, float *block)
{
    dp_compressor_config small = {.bits = w->bits, .rank = w->rank};
    dp_buckets buckets = {.wire = w->wire};
    dp_compressor *compressor = NULL;
    j->net = j->trained = create_module(j->ctx, block);
    small.module = w->rank > 0 ? j->net : NULL;
    if (w->bits > 0 || w->rank > 0) {
        DP_CHECK(dp_compressor_create(j->ctx, &small, &compressor));
        buckets.hook = dp_compress;
        buckets.hook_user = compressor;
    }
    if (w->local.every > 0) {
        dp_local_config local = w->local;
        local.buckets = buckets;
        DP_CHECK(dp_local_create(j->net, &local, &j->local));
    } else {
        DP_CHECK(dp_distributed(j->net, &(dp_distributed_config){.buckets = buckets}, &j->trained));
    }
    DP_CHECK(dp_optim_create(
        j->trained, &(dp_optim_config){.rule = dp_adamw(), .hyper = {.lr = 1e-3}}, &j->optim));
}

static void train(const job *j, const batch *b)
{
    dp_value log;
    dp_scope *step = dp_scope_begin(j->ctx);
    dp_value data =
        DP_DICT(step, {"tokens", dp_array(step, b->tokens, DP_U8, DP_SHAPE(ROWS, CONTEXT))},
                {"targets", dp_array(step, b->targets, DP_U8, DP_SHAPE(ROWS, CONTEXT))});
    DP_CHECK(dp_train_step(j->trained, step, data, j->optim, &log));
    if (j->local != NULL)
        DP_CHECK(dp_local_step(j->local));
    dp_scope_end(step);
}

static double bytes_of(const job *j)
{
    dp_local_info local;
    dp_reducer_info reducer;
    if (j->local == NULL) {
        DP_CHECK(dp_reducer_info_get(dp_wrapper_reducer(j->trained), &reducer));
        return (double)reducer.mean.bytes;
    }
    DP_CHECK(dp_local_info_get(j->local, &local));
    return (double)local.bytes / (double)local.step_count;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    static batch b, held_out;
    const way *w = ways;
    gpt judge = {0};
    job j = {0};
    int step = 0;
    double seconds = 0, loss = 1e9, target = argc > 2 ? strtod(argv[2], NULL) : 0;
    float *block = numbers();
    while (argc < 2 || strcmp(w->name, argv[1]) != 0)
        if (argc < 2 || ++w == ways + sizeof ways / sizeof ways[0])
            return fprintf(stderr, "slow WAY LOSS\n"), 2;
    if (block == NULL || !gpt_tape_create(&judge, &shape, HELD_OUT))
        return 1;
    DP_CHECK(dp_open(&(dp_config){.device_count = 1}, &j.ctx));
    set_up(&j, w, block);
    draw(&held_out, 12345, HELD_OUT);
    gpt_point(judge.params, &shape, block);
    while (loss > target && step < MOST) {
        DP_CHECK(dp_barrier(j.ctx));
        double began = now();
        for (int i = 0; i < LOOK; i++, step++) {
            draw(&b, (unsigned)(2 * step + dp_rank(j.ctx)), ROWS);
            train(&j, &b);
        }
        seconds += now() - began;
        loss = (double)gpt_forward(&judge, held_out.tokens, held_out.targets, HELD_OUT);
        DP_CHECK(dp_broadcast_f64(j.ctx, &loss, 1, 0));
    }
    double bytes = bytes_of(&j);
    if (j.local != NULL) /* nothing is under way when a job ends */
        DP_CHECK(dp_local_sync(j.local));
    if (dp_rank(j.ctx) == 0)
        printf("%d %.3f %.0f %.4f\n", step, seconds, bytes, loss);
    dp_close(j.ctx);
    free(judge.tape);
    free(block);
    return 0;
}
