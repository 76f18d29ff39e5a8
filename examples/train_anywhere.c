/* train_anywhere.c - one program, alone on every core or as a process of any launcher's job.

   Whoever starts it decides: nobody, mpirun, srun, torchrun. With config.shards all of them learn
   the same, to the last bit: the number at the end is always this one, on the same data.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/train_anywhere.c dp.o -o train_anywhere -lpthread -lm
   Run:   ./train_anywhere
          mpirun -np 2 ./train_anywhere
          srun -n 2 ./train_anywhere
          torchrun --no_python --nproc-per-node 2 ./train_anywhere
          or in two terminals, each with DP_PROCESS_COUNT=2 DP_ADDR=localhost:7000,
          DP_PROCESS=0 ./train_anywhere and DP_PROCESS=1 ./train_anywhere
   Prints:
   parameters after 64 steps add up to ... */

#include "../dp.h"
#include "mlp.h"
#include "pictures.h"

enum { BATCH = 128, STEPS = 64 };

static dp_status update(dp_optim *optim, dp_module *net)
{
    dp_tensor data, grad;
    (void)optim;
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        DP_TRY(dp_params_edit(net, i, &data, &grad));
        DP_TRY(dp_axpby(dp_module_ctx(net), 1, &data, -0.1, &grad, &data));
    }
    return dp_zero_grad(net);
}

/* Each process reads its own part of the batch. */
static dp_status step(dp_ctx *ctx, dp_module *par, dp_optim *optim, int i)
{
    dp_info info;
    dp_value log;
    DP_TRY(dp_info_get(ctx, &info));
    int own = BATCH / info.process_count, first = i * BATCH % PICTURES + info.process * own;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value image = dp_array(scope, pictures[first], DP_F32, DP_SHAPE(own, PIXELS));
    dp_value label = dp_array(scope, &labels[first], DP_I64, DP_SHAPE(own));
    dp_value batch = DP_DICT(scope, {"image", image}, {"label", label});
    dp_status status = dp_train_step(par, scope, batch, optim, &log);
    dp_scope_end(scope);
    return status;
}

static dp_status add_up(dp_ctx *ctx, dp_module *net, double *sum)
{
    dp_scope *scope = dp_scope_begin(ctx);
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        dp_tensor data;
        DP_TRY(dp_params_edit(net, i, &data, NULL));
        size_t count = (size_t)dp_tensor_count(&data);
        float *numbers = dp_scope_alloc(scope, count * sizeof *numbers);
        DP_TRY(dp_read(ctx, &data, numbers, count * sizeof *numbers));
        for (size_t k = 0; k < count; k++)
            *sum += (double)numbers[k];
    }
    dp_scope_end(scope);
    return DP_OK;
}

int main(void)
{
    static const mlp shape = {PIXELS, 128, CLASSES};
    static const dp_optim_ops ops = {.head = DP_TABLE(dp_optim_ops), .update = update};
    const dp_distributed_config config = {.reduction = DP_MEAN_SAMPLES};
    dp_optim sgd = {&ops};
    dp_ctx *ctx;
    dp_module *net, *par;
    double sum = 0;
    load_pictures();
    DP_CHECK(dp_open(&(dp_config){.shards = 4}, &ctx)); /* 4 ranks, however many processes */
    DP_CHECK(mlp_create(ctx, &shape, &net));
    DP_CHECK(dp_distributed(net, &config, &par));
    for (int i = 0; i < STEPS; i++)
        DP_CHECK(step(ctx, par, &sgd, i));
    DP_CHECK(add_up(ctx, net, &sum));
    if (dp_rank(ctx) == 0)
        printf("parameters after %d steps add up to %.9g\n", STEPS, sum);
    dp_close(ctx);
    return 0;
}
