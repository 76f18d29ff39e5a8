/* train_spawn.c - train.c in two processes, each with half of every batch.

   The same `train` runs on many machines if a launcher starts the program there, and main calls it
   instead: mpirun, srun, torchrun --no_python.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/train_spawn.c dp.o -o train_spawn -lpthread -lm
   Prints:
   2 processes, each with 64 pictures a step
   after 64 steps process 0 is ...% right; all have the same parameters
   process 0 of 2, 0 of 2 on this machine; launcher: dp
   rank... of ... on cpu, threads for each: ...; transport: shared memory
   waited for others: ...

   'mlp': 407080 bytes of gradients a rank; mean over samples
     buffers: those of rank 0; unused parameters: an error; ignored: 0
     4 units in 1 bucket of 1048576, then 26214400 bytes; as rank 0 had them ready
     bucket  units        bytes    left ms    took ms  first parameter
          0      4       407104   ...
                 last ms    mean ms  of reduced passes: 64
     forward    ...
     backward   ...
     waited     ...
     travelled  ...
     hidden     ... */

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

static dp_status train(void *user) /* in a process of its own */
{
    static const mlp shape = {PIXELS, 128, CLASSES};
    static const dp_optim_ops ops = {.head = DP_TABLE(dp_optim_ops), .update = update};
    /* divided by the samples of all: what one device would compute from the whole batch */
    const dp_distributed_config config = {.reduction = DP_MEAN_SAMPLES};
    dp_optim sgd = {&ops};
    dp_ctx *ctx;
    dp_info info;
    dp_module *net, *par;
    double right = 0;
    char report[2000];
    (void)user;
    load_pictures();
    DP_TRY(dp_open(NULL, &ctx)); /* its environment says who it is, and what its share is */
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(mlp_create(ctx, &shape, &net));
    DP_TRY(dp_distributed(net, &config, &par)); /* in place of dp_data_parallel */
    int own = BATCH / info.process_count;
    if (dp_rank(ctx) == 0)
        printf("%d processes, each with %d pictures a step\n", info.process_count, own);
    for (int i = 0; i < STEPS; i++) {
        int first = i * BATCH % PICTURES + info.process * own;
        dp_scope *step = dp_scope_begin(ctx);
        dp_value image = dp_array(step, pictures[first], DP_F32, DP_SHAPE(own, PIXELS));
        dp_value label = dp_array(step, &labels[first], DP_I64, DP_SHAPE(own));
        dp_value log, batch = DP_DICT(step, {"image", image}, {"label", label});
        DP_TRY(dp_train_step(par, step, batch, &sgd, &log));
        DP_TRY(dp_item(ctx, dp_get(log, "right"), &right));
        dp_scope_end(step);
    }
    DP_TRY(dp_params_compare(par));
    if (dp_rank(ctx) == 0 && dp_report_text(par, report, sizeof report) > 0)
        printf("after %d steps process 0 is %.0f %% right; all have the same parameters\n%s", STEPS,
               100 * right, report);
    dp_close(ctx);
    return DP_OK;
}

int main(void)
{
    DP_CHECK(dp_spawn(2, train, NULL));
    return 0;
}
