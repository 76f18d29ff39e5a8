/* train.c - a user's model (mlp.h), trained on every device there is.

   Build: cc -std=c11 -O2 examples/train.c -o train -lpthread -lm
   Run:   ./train, or DP_DEVICES=1 ./train to see what one device learns: the same
   Prints:
   step 0: loss 2.3..., ... % right
   step 32: loss ..., ... % right
   step 64: loss ..., ... % right
   step 96: loss ..., ... % right
   step 127: loss ..., ... % right */

/* [readme */
#define DP_IMPLEMENTATION
#include "../dp.h"
#include "mlp.h"      /* the model: a forward, a backward, four parameters; plain C */
#include "pictures.h" /* the data: pictures[4096][784], labels[4096] */

enum { BATCH = 128, STEPS = 128 };

static dp_status update(dp_optim *optim, dp_module *net) /* an optimizer is a function */
{
    dp_tensor data, grad;
    (void)optim;
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        DP_TRY(dp_params_edit(net, i, &data, &grad));
        DP_TRY(dp_axpby(dp_module_ctx(net), 1, &data, -0.1, &grad, &data));
    }
    return dp_zero_grad(net);
}

int main(void)
{
    static const mlp shape = {PIXELS, 128, CLASSES};
    static const dp_optim_ops ops = {.head = DP_TABLE(dp_optim_ops), .update = update};
    dp_optim sgd = {&ops};
    dp_ctx *ctx;
    dp_module *net, *par;
    double loss, right;
    load_pictures();
    DP_CHECK(dp_open(NULL, &ctx)); /* one device per core */
    DP_CHECK(mlp_create(ctx, &shape, &net));
    DP_CHECK(dp_data_parallel(net, NULL, &par)); /* a wrapper is a module too */
    for (int i = 0; i < STEPS; i++) {
        int first = i * BATCH % PICTURES;
        dp_scope *step = dp_scope_begin(ctx); /* what this step makes goes with it */
        dp_value image = dp_array(step, pictures[first], DP_F32, DP_SHAPE(BATCH, PIXELS));
        dp_value label = dp_array(step, &labels[first], DP_I64, DP_SHAPE(BATCH));
        dp_value log, batch = DP_DICT(step, {"image", image}, {"label", label});
        DP_CHECK(dp_train_step(par, step, batch, &sgd, &log));
        DP_CHECK(dp_item(ctx, dp_get(log, "loss"), &loss));
        DP_CHECK(dp_item(ctx, dp_get(log, "right"), &right));
        if (i % 32 == 0 || i == STEPS - 1)
            printf("step %d: loss %.3f, %.0f %% right\n", i, loss, 100 * right);
        dp_scope_end(step);
    }
    dp_close(ctx);
    return 0;
}
/* readme] */
