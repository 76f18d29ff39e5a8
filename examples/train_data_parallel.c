/* train_data_parallel.c - a model of the user's (mlp.h), trained on one device and on several.

   The wrapper is all that is new: dp_data_parallel makes a module of a module, and dp_train_step
   does what a step takes. At the end both have learned the same.

   Build: cc -std=c11 -O2 examples/train_data_parallel.c -o train_data_parallel -lpthread -lm
   Run:   ./train_data_parallel [DEVICE ...]      0 1
   Prints:
   4096 pictures of 28 x 28 (...), batches of 128
   1 device:  loss ... -> ..., ... of 100 right, ... ms a step
   2 devices: loss ... -> ..., ... of 100 right, ... ms a step
   largest difference of a parameter: ... */

#define DP_IMPLEMENTATION
#include "mlp.h"
#include "pictures.h"
#include <stdlib.h>
#include <time.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        if ((call) != DP_OK) {                                                                     \
            fprintf(stderr, "%s\n", dp_last_error());                                              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { HIDDEN = 64, BATCH = 128, STEPS = 128 };
enum { PARAMS = (PIXELS + 1) * HIDDEN + (HIDDEN + 1) * CLASSES };

typedef struct sgd { /* an optimizer of the user's; dp_train_step knows its first member */
    dp_optim base;
    dp_ctx *ctx;
    double rate;
} sgd;

static dp_status sgd_update(dp_optim *optim, dp_module *module)
{
    const sgd *own = (const sgd *)optim;
    for (size_t i = 0; i < dp_module_param_count(module); i++) {
        dp_tensor data, grad;
        TRY(dp_params_edit(module, i, &data, &grad));
        TRY(dp_axpby(own->ctx, 1, &data, -own->rate, &grad, &data));
    }
    return dp_zero_grad(module);
}

static const dp_optim_ops sgd_ops = {sizeof sgd_ops, NULL, NULL, sgd_update};

/* All numbers of the model, one parameter after another: in, or out. */
static void copy_numbers(dp_ctx *ctx, dp_module *net, float *numbers, bool in)
{
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        dp_param_info info;
        CHECK(dp_module_param(net, i, &info));
        size_t bytes = (size_t)dp_tensor_count(&info.data) * sizeof *numbers;
        CHECK(in ? dp_params_write(net, i, numbers, bytes)
                 : dp_read(ctx, &info.data, numbers, bytes));
        numbers += bytes / sizeof *numbers;
    }
}

static double now_ms(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static dp_value images_of(dp_scope *scope, int step)
{
    const float *first = pictures[step * BATCH % PICTURES];
    dp_tensor view = dp_wrap_const(first, DP_F32, DP_SHAPE(BATCH, PIXELS));
    return dp_of(scope, &view);
}

static dp_value labels_of(dp_scope *scope, int step)
{
    dp_tensor view = dp_wrap_const(&labels[step * BATCH % PICTURES], DP_I64, DP_SHAPE(BATCH));
    return dp_of(scope, &view);
}

static void show(dp_ctx *ctx, dp_value log, int step, double began)
{
    double loss, right;
    CHECK(dp_item(ctx, dp_get(log, "loss"), &loss));
    CHECK(dp_item(ctx, dp_get(log, "right"), &right));
    if (step % (STEPS / 4) == 0)
        printf(" %.3f ->", loss);
    if (step == STEPS - 1)
        printf(" %.3f, %.0f of 100 right, %.1f ms a step\n", loss, right * 100,
               (now_ms() - began) / STEPS);
}

/* [readme */
static void train(int count, const int *devices, float *numbers)
{
    static const mlp shape = {PIXELS, HIDDEN, CLASSES};
    dp_ctx *ctx;
    dp_module *net, *par;
    CHECK(dp_open(&(dp_config){.device_count = count, .devices = devices}, &ctx));
    CHECK(mlp_create(ctx, &shape, &net));     /* the user's own model */
    CHECK(dp_data_parallel(net, NULL, &par)); /* a wrapper is a module too */
    copy_numbers(ctx, net, numbers, true);
    sgd optim = {{&sgd_ops}, ctx, 0.1};
    double began = now_ms();
    printf("%d device%s loss", count, count > 1 ? "s:" : ": ");
    for (int i = 0; i < STEPS; i++) {
        dp_scope *step = dp_scope_begin(ctx); /* what this step makes goes with it */
        dp_value image = images_of(step, i), label = labels_of(step, i), log;
        dp_value batch = DP_DICT(step, {"image", image}, {"label", label});
        CHECK(dp_train_step(par, step, batch, &optim.base, &log));
        show(ctx, log, i, began);
        dp_scope_end(step);
    }
    copy_numbers(ctx, net, numbers, false);
    dp_close(ctx);
}
/* readme] */

int main(int argc, char **argv)
{
    static float one[PARAMS], many[PARAMS];
    int devices[8] = {0, 1}, count = argc < 2 ? 2 : argc < 10 ? argc - 1 : 8;
    float most = 0;
    unsigned seed = 7;
    for (int i = 0; i < PARAMS; i++) {
        seed = seed * 1664525u + 1013904223u;
        one[i] = many[i] = ((float)(seed >> 8) / (1 << 24) - 0.5f) * 0.1f;
    }
    printf("%d pictures of 28 x 28 (%s), batches of %d\n", PICTURES, load_pictures(), BATCH);
    for (int i = 0; i < count && argc > 1; i++)
        devices[i] = atoi(argv[i + 1]);
    train(1, devices, one);
    train(count, devices, many);
    for (int i = 0; i < PARAMS; i++)
        most = fmaxf(most, fabsf(one[i] - many[i]));
    printf("largest difference of a parameter: %.1e\n", (double)most);
    return most < 1e-3f ? 0 : 1;
}
