/* train_by_hand.c - data-parallel training with the primitives alone: no module, no wrapper.

   A linear model learns on every core and again on one; each step scatters a batch, every device
   works out the gradient of its rows, one all_reduce adds the gradients, and every device takes the
   same step. The output shows who got which rows, how long a step took, and that N devices learned
   what one did.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/train_by_hand.c dp.o -o train_by_hand -lpthread -lm
   Prints:
   batch of 1003 rows, 64 weights, cut at row ...
   ... loss ... to ..., ... us a step
   ... loss ... to ..., ... us a step
   largest difference of a weight: ... (single precision rounds at ...) */

#include "../dp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROWS = 1003, WEIGHTS = 64, STEPS = 200, MOST = 8 };

static float inputs[ROWS * WEIGHTS], targets[ROWS];

typedef struct trainer {
    dp_value parts;
    float weights[MOST][WEIGHTS];
    float grads[MOST][WEIGHTS + 1]; /* the loss travels after the gradient */
} trainer;

static dp_status gradient(int rank, dp_scope *scope, void *user)
{
    trainer *t = user;
    const dp_tensor *x, *y;
    dp_value part = dp_at(t->parts, (size_t)rank);
    float *grad = memset(t->grads[rank], 0, sizeof t->grads[rank]);
    (void)scope;
    DP_TRY(dp_as_tensor(dp_get(part, "x"), "x", DP_F32, 2, &x));
    DP_TRY(dp_as_tensor(dp_get(part, "y"), "y", DP_F32, 1, &y));
    for (int64_t i = 0; i < x->shape[0]; i++) {
        const float *row = (const float *)x->data + i * WEIGHTS;
        float error = -((const float *)y->data)[i];
        for (int k = 0; k < WEIGHTS; k++)
            error += t->weights[rank][k] * row[k];
        for (int k = 0; k < WEIGHTS; k++)
            grad[k] += error * row[k] / ROWS;
        grad[WEIGHTS] += error * error / ROWS;
    }
    return DP_OK;
}

/* One step; returns the loss before it. */
static float step(dp_ctx *ctx, trainer *t, int devices)
{
    dp_part part[MOST];
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value x = dp_array(scope, inputs, DP_F32, DP_SHAPE(ROWS, WEIGHTS));
    dp_value y = dp_array(scope, targets, DP_F32, DP_SHAPE(ROWS));
    dp_value batch = DP_DICT(scope, {"x", x}, {"y", y});
    DP_CHECK(dp_scatter(ctx, scope, batch, NULL, &t->parts));
    DP_CHECK(dp_run(ctx, scope, gradient, t));
    for (int i = 0; i < devices; i++)
        part[i] = (dp_part){.send = t->grads[i], .recv = t->grads[i]};
    DP_CHECK(dp_all_reduce(ctx, part, WEIGHTS + 1, DP_F32, DP_OP_SUM));
    dp_scope_end(scope);
    for (int i = 0; i < devices; i++)
        for (int k = 0; k < WEIGHTS; k++)
            t->weights[i][k] -= 0.5f * t->grads[i][k];
    return t->grads[0][WEIGHTS];
}

static void train(trainer *t, int devices) /* 0: one per core, at most 8 */
{
    struct timespec from, to;
    float first = 0, last = 0;
    dp_ctx *ctx;
    dp_info info;
    DP_CHECK(dp_open(&(dp_config){.device_count = devices}, &ctx));
    DP_CHECK(dp_info_get(ctx, &info));
    for (int i = 0; devices == 0 && i < info.local_count; i++) {
        int64_t row;
        (void)dp_local_share(ctx, i, ROWS, &row);
        printf("%s%d%s", i > 0 ? ", " : "", (int)row, i == info.local_count - 1 ? "\n" : "");
    }
    timespec_get(&from, TIME_UTC);
    for (int i = 0; i < STEPS; i++) {
        last = step(ctx, t, info.local_count);
        first = i == 0 ? last : first;
    }
    timespec_get(&to, TIME_UTC);
    double us = (double)(to.tv_sec - from.tv_sec) * 1e6 + (double)(to.tv_nsec - from.tv_nsec) / 1e3;
    printf("%d device%s: loss %.3g to %.3g, %.0f us a step\n", info.local_count,
           info.local_count > 1 ? "s" : "", (double)first, (double)last, us / STEPS);
    dp_close(ctx);
}

static void make_data(void)
{
    unsigned seed = 1;
    for (int i = 0; i < ROWS * WEIGHTS; i++) {
        seed = seed * 1664525u + 1013904223u;
        inputs[i] = (float)(seed >> 8) / (float)(1 << 24) - 0.5f;
        targets[i / WEIGHTS] += inputs[i] * (float)(i % WEIGHTS - WEIGHTS / 2) / WEIGHTS;
    }
}

int main(void)
{
    static trainer many, one;
    float most = 0;
    make_data();
    printf("batch of %d rows, %d weights, cut at row ", ROWS, WEIGHTS);
    train(&many, 0);
    train(&one, 1);
    for (int k = 0; k < WEIGHTS; k++)
        most = fmaxf(most, fabsf(many.weights[0][k] - one.weights[0][k]));
    printf("largest difference of a weight: %.1e (single precision rounds at 6e-08)\n",
           (double)most);
    return most < 1e-5f ? 0 : 1;
}
