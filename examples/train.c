/* train.c - a model of one device on every core, and on every process of a job: what it learns is
   the same.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/train.c dp.o -o train -lpthread -lm
   Run:   ./train, or mpirun -np 2 ./train, or dprun -n 2 ./train
   Prints:
   step 0: loss 2.3..., ... % right
   step 32: loss ..., ... % right
   step 64: loss ..., ... % right
   step 96: loss ..., ... % right
   step 127: loss ..., ... % right */

/* [readme */
#include "../dp_train.h"
#include "mlp.h"      /* the model: a forward, a backward, four parameters; plain C */
#include "pictures.h" /* the data: pictures[4096][784], labels[4096] */

enum { BATCH = 128, STEPS = 128 };

int main(void)
{
    static const mlp shape = {PIXELS, 128, CLASSES};
    dp_ctx *ctx;
    dp_module *net, *par;
    dp_optim *sgd;
    int64_t mine, rows;
    double loss, right;
    load_pictures();
    DP_CHECK(dp_open(NULL, &ctx)); /* one device per core; and the other processes of a job */
    DP_CHECK(mlp_create(ctx, &shape, &net));
    DP_CHECK(dp_everywhere(net, &par)); /* on all of them */
    DP_CHECK(dp_optim_create(par, &(dp_optim_config){.hyper.lr = 0.1}, &sgd));
    DP_CHECK(dp_my_rows(ctx, BATCH, &mine, &rows)); /* alone, all */
    for (int i = 0; i < STEPS; i++) {
        int64_t first = i * BATCH % PICTURES + mine;
        dp_scope *step = dp_scope_begin(ctx); /* what this step makes goes with it */
        dp_value image = dp_array(step, pictures[first], DP_F32, DP_SHAPE(rows, PIXELS));
        dp_value label = dp_array(step, &labels[first], DP_I64, DP_SHAPE(rows));
        dp_value log, batch = DP_DICT(step, {"image", image}, {"label", label});
        DP_CHECK(dp_train_step(par, step, batch, sgd, &log));
        DP_CHECK(dp_log_mean(ctx, step, log, rows, &log)); /* of all processes */
        DP_CHECK(dp_item(ctx, dp_get(log, "loss"), &loss));
        DP_CHECK(dp_item(ctx, dp_get(log, "right"), &right));
        if (dp_rank(ctx) == 0 && (i % 32 == 0 || i == STEPS - 1))
            printf("step %d: loss %.3f, %.0f %% right\n", i, loss, 100 * right);
        dp_scope_end(step);
    }
    dp_close(ctx);
    return 0;
}
/* readme] */
