/* self_check.c - is a model's backward right, and is it the same on any number of devices?
   First of a model as it is (mlp.h), then with a mistake that only several devices show.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 examples/self_check.c dp.o -o self_check -lpthread -lm
   Prints:
   as it is: nothing found, ... gradients are what the loss does
   mistaken: dp_self_check: gradient of 'fc1.weight' differs at [0, 0]: ... 4 times as large */

#include "../dp.h"
#include "../dp_check.h"
#include "mlp.h"
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 32, INPUTS = 20, HIDDEN = 16, CLASSES = 5 };

/* A mean over the rows, but of one device's part: with four devices, gradients are four times as
   large. */
static dp_status backward_with_a_mistake(dp_call *call)
{
    DP_TRY(mlp_backward(call));
    for (size_t i = MLP_W1; i <= MLP_B2; i++) {
        dp_tensor grad = dp_grad_tensor(call, i);
        DP_TRY(dp_axpby(call->ctx, 1 / (double)call->row_count, &grad, 0, NULL, &grad));
    }
    return DP_OK;
}

static dp_status with_a_mistake(dp_ctx *ctx, const mlp *shape, dp_module **out)
{
    static const dp_method methods[] = {{"forward", mlp_forward},
                                        {"backward", backward_with_a_mistake}};
    const dp_param_config params[] = {
        [MLP_W1] = {.name = "fc1.weight", .ndim = 2, .shape = {INPUTS, HIDDEN}},
        [MLP_B1] = {.name = "fc1.bias", .ndim = 1, .shape = {HIDDEN}},
        [MLP_W2] = {.name = "fc2.weight", .ndim = 2, .shape = {HIDDEN, CLASSES}},
        [MLP_B2] = {.name = "fc2.bias", .ndim = 1, .shape = {CLASSES}}};
    DP_TRY(dp_module_create(ctx,
                            &(dp_module_config){.name = "mlp",
                                                .methods = methods,
                                                .method_count = 2,
                                                .params = params,
                                                .param_count = 4,
                                                .state = shape},
                            out));
    return mlp_randomize(*out);
}

static dp_value make_batch(dp_scope *scope)
{
    static float image[ROWS * INPUTS];
    static int64_t label[ROWS];
    for (int i = 0; i < ROWS * INPUTS; i++)
        image[i] = (float)(i * 7919 % 1009) / 1009;
    for (int i = 0; i < ROWS; i++)
        label[i] = i % CLASSES;
    return DP_DICT(scope, {"image", dp_array(scope, image, DP_F32, DP_SHAPE(ROWS, INPUTS))},
                   {"label", dp_array(scope, label, DP_I64, DP_SHAPE(ROWS))});
}

static void check(const char *what, dp_module *net)
{
    dp_check_report report;
    dp_scope *scope = dp_scope_begin(dp_module_ctx(net));
    dp_status status = dp_self_check(net, make_batch(scope), NULL, &report);
    if (status == DP_OK)
        printf("%s: nothing found, %zu gradients are what the loss does\n", what, report.moved);
    else
        printf("%s: %s\n", what, dp_last_error());
    dp_scope_end(scope);
}

int main(void)
{
    static const mlp shape = {INPUTS, HIDDEN, CLASSES};
    dp_ctx *ctx;
    dp_module *net, *wrong;
    DP_CHECK(dp_open(&(dp_config){.device_count = 4}, &ctx));
    DP_CHECK(mlp_create(ctx, &shape, &net));
    DP_CHECK(with_a_mistake(ctx, &shape, &wrong));
    check("as it is", net);
    check("mistaken", wrong);
    dp_close(ctx);
    return 0;
}
