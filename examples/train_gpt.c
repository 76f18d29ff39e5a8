/* train_gpt.c - an existing training program (gpt.h) on every core, in two ways.

   "by hand": the program keeps its loop. Every device has gradients and a tape of its own, and all
   share the parameters; dp_run computes each device's rows, one all_reduce takes the mean, and
   every device updates its share of the block.

   "as a module": two methods of a few lines call the same functions, and dp_train_step does the
   rest. This way also works on GPUs and in any wrapper.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/train_gpt.c dp.o -o train_gpt -lpthread -lm
   Prints:
   ... parameters, batches of 9 rows of 32 tokens
   as it was:   loss ... -> ... -> ..., ... ms a step
   by hand:     loss ... -> ... -> ..., ... ms a step, ... devices
   as a module: loss ... -> ... -> ..., ... ms a step, ... devices
   largest difference of a parameter: ... */

#include "../dp.h"
#include "gpt.h"
#include <stdio.h>
#include <time.h>

enum { ROWS = 9, CONTEXT = 32, VOCABULARY = 16, STEPS = 30, DEVICES = 8 };

static const gpt_shape shape = {2, 4, 64, CONTEXT, VOCABULARY};
static const float rate = 0.05f;

/* ---- the program as it was: one device ------------------------------------------------------- */

static uint8_t tokens[ROWS * CONTEXT], targets[ROWS * CONTEXT];

/* Drawn again for every step. */
static void next_batch(int step)
{
    gpt_draw((unsigned)step, ROWS, CONTEXT, tokens, targets);
}

static float step_as_it_was(gpt *g)
{
    float loss = gpt_forward(g, tokens, targets, ROWS);
    gpt_zero_grad(g);
    gpt_backward(g);
    gpt_update(g, rate, 0, gpt_param_count(&shape));
    return loss;
}

/* ---- by hand --------------------------------------------------------------------------------- */

typedef struct team {
    dp_ctx *ctx;
    gpt replicas[DEVICES]; /* one block of parameters for all; gradients and a tape for each */
    dp_part grads[DEVICES];
    double rows[DEVICES], losses[DEVICES];
} team;

/* [readme-gpt-hand */
static dp_status compute(int rank, dp_scope *scope, void *user)
{
    team *t = user;
    gpt *g = &t->replicas[rank];
    int64_t first, rows = dp_local_share(t->ctx, rank, ROWS, &first);
    (void)scope;
    gpt_zero_grad(g);
    if (rows > 0) {
        t->losses[rank] =
            gpt_forward(g, tokens + first * CONTEXT, targets + first * CONTEXT, (int)rows);
        gpt_backward(g);
    }
    t->rows[rank] = (double)rows;
    return DP_OK;
}

static dp_status update(int rank, dp_scope *scope, void *user)
{
    team *t = user;
    int64_t first, count;
    (void)scope;
    count = dp_local_share(t->ctx, rank, (int64_t)gpt_param_count(&shape), &first);
    gpt_update(&t->replicas[rank], rate, (size_t)first, (size_t)count);
    return DP_OK;
}

static double step_by_hand(team *t, int devices)
{
    double loss = 0;
    DP_CHECK(dp_run(t->ctx, NULL, compute, t));
    DP_CHECK(dp_all_reduce_weighted(t->ctx, t->grads, t->rows, gpt_param_count(&shape), DP_F32));
    DP_CHECK(dp_run(t->ctx, NULL, update, t));
    for (int i = 0; i < devices; i++)
        loss += t->losses[i] * t->rows[i] / ROWS;
    return loss;
}
/* readme-gpt-hand] */

/* ---- as a module ----------------------------------------------------------------------------- */

/* [readme-gpt-module */
static dp_status forward(dp_call *call)
{
    gpt *g = call->own; /* a tape for each replica: see create_tape */
    const dp_tensor *in, *out;
    DP_TRY(dp_call_tensor(call, "tokens", DP_U8, 2, &in));
    DP_TRY(dp_call_tensor(call, "targets", DP_U8, 2, &out));
    gpt_point(g->params, &shape, (float *)(uintptr_t)dp_param_block(call)); /* only read */
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
/* readme-gpt-module] */

static dp_status create_tape(const dp_replica_info *info, void **own)
{
    gpt *g = calloc(1, sizeof *g);
    (void)info;
    *own = g;
    if (g == NULL || !gpt_tape_create(g, &shape, ROWS)) {
        free(g);
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a tape");
    }
    return DP_OK;
}

static void destroy_tape(void *own)
{
    free(((gpt *)own)->tape);
    free(own);
}

static dp_status create_module(dp_ctx *ctx, float *block, dp_module **out)
{
    static const char *const names[GPT_TENSORS] = {"embed", "place", "qkv", "proj", "up", "down"};
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    dp_param_config params[GPT_TENSORS] = {0};
    for (int i = 0; i < GPT_TENSORS; i++)
        params[i] = (dp_param_config){
            .name = names[i], .ndim = 1, .shape = {(int64_t)gpt_count(&shape, i)}};
    return dp_module_create(ctx,
                            &(dp_module_config){.name = "gpt",
                                                .methods = methods,
                                                .method_count = 2,
                                                .params = params,
                                                .param_count = GPT_TENSORS,
                                                .replica_create = create_tape,
                                                .replica_destroy = destroy_tape,
                                                .packed = true, /* one block, as gpt.h has it */
                                                .block = block,
                                                .mean_grads = true}, /* as gpt_backward does */
                            out);
}

typedef struct sgd { /* the program's own optimizer; dp_train_step knows its first member */
    dp_optim base;
    dp_ctx *ctx;
} sgd;

static dp_status sgd_update(dp_optim *optim, dp_module *module)
{
    dp_tensor data, grad;
    for (size_t i = 0; i < dp_module_param_count(module); i++) {
        DP_TRY(dp_params_edit(module, i, &data, &grad));
        DP_TRY(dp_axpby(((const sgd *)optim)->ctx, 1, &data, -(double)rate, &grad, &data));
    }
    return DP_OK;
}

static double step_as_module(dp_ctx *ctx, dp_module *par, dp_optim *optim)
{
    double loss;
    dp_value log;
    dp_scope *step = dp_scope_begin(ctx);
    dp_value batch = DP_DICT(step,
                             {"tokens", dp_array(step, tokens, DP_U8, DP_SHAPE(ROWS, CONTEXT))},
                             {"targets", dp_array(step, targets, DP_U8, DP_SHAPE(ROWS, CONTEXT))});
    DP_CHECK(dp_train_step(par, step, batch, optim, &log));
    DP_CHECK(dp_item(ctx, dp_get(log, "loss"), &loss));
    dp_scope_end(step);
    return loss;
}

/* ---- all three, from the same numbers -------------------------------------------------------- */

static double began;

static void show(const char *name, int step, double loss, int devices)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    double ms = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    began = step == 0 ? ms : began; /* the first step warms up */
    if (step == 0)
        printf("%-12s loss %.3f", name, loss);
    else if (step % (STEPS / 2) == 0)
        printf(" -> %.3f", loss);
    if (step == STEPS && devices > 0)
        printf(", %.1f ms a step, %d devices\n", (ms - began) / STEPS, devices);
    else if (step == STEPS)
        printf(", %.1f ms a step\n", (ms - began) / STEPS);
}

static float *numbers(void)
{
    float *block = malloc(gpt_param_count(&shape) * sizeof *block);
    if (block != NULL)
        gpt_begin(block, &shape);
    return block;
}

static void train_as_it_was(float *block, float *grads)
{
    gpt g = {0};
    if (block == NULL || grads == NULL || !gpt_tape_create(&g, &shape, ROWS))
        exit(1);
    gpt_point(g.params, &shape, block);
    gpt_point(g.grads, &shape, grads);
    for (int i = 0; i <= STEPS; i++) {
        next_batch(i);
        show("as it was:", i, (double)step_as_it_was(&g), 0);
    }
    free(g.tape);
}

static void train_by_hand(dp_ctx *ctx, float *block, int devices)
{
    static team t;
    t.ctx = ctx;
    for (int i = 0; i < devices; i++) {
        float *grads = malloc(gpt_param_count(&shape) * sizeof *grads);
        if (block == NULL || grads == NULL || !gpt_tape_create(&t.replicas[i], &shape, ROWS))
            exit(1);
        gpt_point(t.replicas[i].params, &shape, block);
        gpt_point(t.replicas[i].grads, &shape, grads);
        t.grads[i] = (dp_part){.send = grads, .recv = grads};
    }
    for (int i = 0; i <= STEPS; i++) {
        next_batch(i);
        show("by hand:", i, step_by_hand(&t, devices), devices);
    }
    for (int i = 0; i < devices; i++) {
        free(t.grads[i].recv);
        free(t.replicas[i].tape);
    }
}

static void train_as_module(dp_ctx *ctx, float *block, int devices)
{
    static const dp_optim_ops sgd_ops = {.head = DP_TABLE(dp_optim_ops), .update = sgd_update};
    sgd optim = {{&sgd_ops}, ctx};
    dp_module *net, *par;
    DP_CHECK(create_module(ctx, block, &net));
    DP_CHECK(dp_data_parallel(net, NULL, &par));
    for (int i = 0; i <= STEPS; i++) {
        next_batch(i);
        show("as a module:", i, step_as_module(ctx, par, &optim.base), devices);
    }
}

int main(void)
{
    float *one = numbers(), *two = numbers(), *three = numbers(), *grads = numbers();
    float most = 0;
    dp_ctx *ctx;
    dp_info info;
    DP_CHECK(dp_open(NULL, &ctx)); /* at most DEVICES CPU devices */
    DP_CHECK(dp_info_get(ctx, &info));
    printf("%zu parameters, batches of %d rows of %d tokens\n", gpt_param_count(&shape), ROWS,
           CONTEXT);
    train_as_it_was(one, grads);
    train_by_hand(ctx, two, info.local_count);
    train_as_module(ctx, three, info.local_count);
    for (size_t i = 0; i < gpt_param_count(&shape); i++)
        most = fmaxf(most, fmaxf(fabsf(one[i] - two[i]), fabsf(one[i] - three[i])));
    printf("largest difference of a parameter: %.1e\n", (double)most);
    dp_close(ctx);
    free(one), free(two), free(three), free(grads);
    return most < 1e-3f ? 0 : 1;
}
