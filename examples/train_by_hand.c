/* train_by_hand.c - data-parallel training with the primitives alone: no module, no wrapper.

   A linear model learns on N devices and again on one; each step scatters a batch, every device
   works out the gradient of its rows, one all_reduce adds the gradients, and every device takes the
   same step. Shown is who got which rows, how long a step took, and that N devices learned what one
   did.

   Build: cc -std=c11 -O2 examples/train_by_hand.c -o train_by_hand -lpthread -lm
   Prints:
   batch of 1003 rows, 64 weights, on ... cores
   device 0: rows 0 to 250
   device 1: rows 251 to 501
   device 2: rows 502 to 752
   device 3: rows 753 to 1002
   4 devices: loss ... to ..., ... us a step
   1 device: loss ... to ..., ... us a step
   largest difference of a weight: ... (single precision rounds at ...) */

#define DP_IMPLEMENTATION
#include "../dp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        if ((call) != DP_OK) {                                                                     \
            fprintf(stderr, "%s\n", dp_last_error());                                              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { ROWS = 1003, WEIGHTS = 64, STEPS = 200, DEVICES = 4 };

static float inputs[ROWS * WEIGHTS], targets[ROWS];

typedef struct trainer {
    dp_value parts;
    float weights[DEVICES][WEIGHTS];
    float grads[DEVICES][WEIGHTS + 1]; /* the loss travels behind the gradient */
} trainer;

static dp_status gradient(int rank, dp_scope *scope, void *user)
{
    trainer *t = user;
    const dp_tensor *x, *y;
    dp_value part = dp_at(t->parts, (size_t)rank);
    float *grad = memset(t->grads[rank], 0, sizeof t->grads[rank]);
    (void)scope;
    if (dp_as_tensor(dp_get(part, "x"), "x", DP_F32, 2, &x) != DP_OK ||
        dp_as_tensor(dp_get(part, "y"), "y", DP_F32, 1, &y) != DP_OK)
        return DP_ERR_INVALID;
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
    dp_part part[DEVICES];
    dp_tensor x = dp_wrap_const(inputs, DP_F32, DP_SHAPE(ROWS, WEIGHTS));
    dp_tensor y = dp_wrap_const(targets, DP_F32, DP_SHAPE(ROWS));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value batch = DP_DICT(scope, {"x", dp_of(scope, &x)}, {"y", dp_of(scope, &y)});
    CHECK(dp_scatter(ctx, scope, batch, NULL, &t->parts));
    CHECK(dp_run(ctx, scope, gradient, t));
    for (int i = 0; i < devices; i++)
        part[i] = (dp_part){.send = t->grads[i], .recv = t->grads[i]};
    CHECK(dp_all_reduce(ctx, part, WEIGHTS + 1, DP_F32, DP_OP_SUM));
    dp_scope_end(scope);
    for (int i = 0; i < devices; i++)
        for (int k = 0; k < WEIGHTS; k++)
            t->weights[i][k] -= 0.5f * t->grads[i][k];
    return t->grads[0][WEIGHTS];
}

static void train(trainer *t, int devices)
{
    struct timespec from, to;
    float first = 0, last = 0;
    dp_ctx *ctx;
    CHECK(dp_open(&(dp_config){.device_count = devices}, &ctx));
    timespec_get(&from, TIME_UTC);
    for (int i = 0; i < STEPS; i++) {
        last = step(ctx, t, devices);
        first = i == 0 ? last : first;
    }
    timespec_get(&to, TIME_UTC);
    double us = (double)(to.tv_sec - from.tv_sec) * 1e6 + (double)(to.tv_nsec - from.tv_nsec) / 1e3;
    printf("%d device%s: loss %.3g to %.3g, %.0f us a step\n", devices, devices > 1 ? "s" : "",
           (double)first, (double)last, us / STEPS);
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

static void show_cut(void)
{
    int64_t rows[DEVICES], first = 0;
    size_t count;
    dp_ctx *ctx;
    dp_info info;
    CHECK(dp_open(NULL, &ctx));
    CHECK(dp_info_get(ctx, &info));
    CHECK(dp_split_rows(NULL, ROWS, DEVICES, rows, &count));
    printf("batch of %d rows, %d weights, on %d cores\n", ROWS, WEIGHTS, info.core_count);
    for (size_t i = 0; i < count; first += rows[i++])
        printf("device %zu: rows %d to %d\n", i, (int)first, (int)(first + rows[i] - 1));
    dp_close(ctx);
}

int main(void)
{
    static trainer many, one;
    float most = 0;
    make_data();
    show_cut();
    train(&many, DEVICES);
    train(&one, 1);
    for (int k = 0; k < WEIGHTS; k++)
        most = fmaxf(most, fabsf(many.weights[0][k] - one.weights[0][k]));
    printf("largest difference of a weight: %.1e (single precision rounds at 6e-08)\n",
           (double)most);
    return most < 1e-5f ? 0 : 1;
}
