/* segmentation_criterion.c - large outputs that stay where they are.

   A model gives eight numbers for every pixel. Gathered, the outputs of all devices end up on the
   first one, beside its own; with dp_model_parallel and dp_criterion_parallel the loss is worked
   out where each part is, and only one number per device travels. Both give the same gradient.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/segmentation_criterion.c dp.o -o segmentation -lpthread -lm
   Prints:
   gathered:      loss 0.125, outputs on each device: 32.0 8.0 8.0 MiB, memory at most ... MiB
   left in place: loss 0.125, outputs on each device: 8.0 8.0 8.0 MiB, memory at most ... MiB
   largest difference of a gradient: ... */

#include "segmenter.h"
#include <stdio.h>
#include <stdlib.h>

enum { DEVICES = 3, IMAGES = 6 };

static float colors[IMAGES * PIXELS * COLORS];
static uint8_t targets[IMAGES * PIXELS];

static size_t live_bytes, most_bytes; /* what the library has from its allocator */

static void *count_alloc(size_t bytes, size_t align, void *user)
{
    (void)user;
    live_bytes += bytes;
    most_bytes = live_bytes > most_bytes ? live_bytes : most_bytes;
    return aligned_alloc(align < 64 ? 64 : align, (bytes + 63) & ~(size_t)63);
}

static void count_free(void *data, size_t bytes, void *user)
{
    (void)user;
    live_bytes -= data != NULL ? bytes : 0;
    free(data);
}

typedef struct step {
    dp_scope *scope;
    dp_module *net, *loss;
    dp_value batch, target;
    double bytes[DEVICES]; /* of outputs, by device */
    double mean;
} step;

static void count_output(step *s, dp_value output)
{
    s->bytes[output.as.t->device.index] += (double)dp_tensor_count(output.as.t) * sizeof(float);
}

/* The usual way: one tensor on the first device, and the loss there. */
static void gathered(dp_ctx *ctx, step *s)
{
    dp_module *par;
    dp_pass *net_pass, *loss_pass;
    dp_value out, mean;
    dp_input_grad grad;
    DP_CHECK(dp_data_parallel(s->net, NULL, &par));
    DP_CHECK(dp_invoke(par, s->scope, "forward", s->batch, dp_none(), NULL, &out, &net_pass));
    for (int i = 0; i < DEVICES; i++)
        s->bytes[i] += IMAGES / DEVICES * PIXELS * CLASSES * sizeof(float);
    count_output(s, out);
    DP_CHECK(dp_invoke(s->loss, s->scope, "forward", DP_LIST_OF(s->scope, out, s->target),
                       dp_none(), NULL, &mean, &loss_pass));
    DP_CHECK(dp_backward(loss_pass, dp_float(1), &grad));
    DP_CHECK(dp_backward(net_pass, dp_at(grad.args, 0), NULL));
    DP_CHECK(dp_item(ctx, mean, &s->mean));
}

/* [readme-criterion */
static void left_in_place(dp_ctx *ctx, step *s)
{
    dp_module *par, *criterion;
    dp_pass *net_pass, *loss_pass;
    dp_value outs, mean;
    dp_input_grad grad;
    DP_CHECK(dp_model_parallel(s->net, NULL, &par));
    DP_CHECK(dp_criterion_parallel(s->loss, NULL, &criterion));
    DP_CHECK(dp_invoke(par, s->scope, "forward", s->batch, dp_none(), NULL, &outs, &net_pass));
    DP_CHECK(dp_invoke(criterion, s->scope, "forward", DP_LIST_OF(s->scope, outs, s->target),
                       dp_none(), NULL, &mean, &loss_pass));
    DP_CHECK(dp_backward(loss_pass, dp_float(1), &grad)); /* a list again, one per device */
    DP_CHECK(dp_backward(net_pass, dp_at(grad.args, 0), NULL));
    DP_CHECK(dp_item(ctx, mean, &s->mean));
    for (uint32_t i = 0; i < outs.count; i++)
        count_output(s, dp_at(outs, i));
}
/* readme-criterion] */

static void run(const char *name, void (*way)(dp_ctx *ctx, step *s), float *grad)
{
    step s = {0};
    dp_ctx *ctx;
    dp_tensor data, own;
    dp_tensor color = dp_wrap_const(colors, DP_F32, DP_SHAPE(IMAGES, PIXELS, COLORS));
    dp_tensor target = dp_wrap_const(targets, DP_U8, DP_SHAPE(IMAGES, PIXELS));
    most_bytes = 0;
    DP_CHECK(dp_open(
        &(dp_config){.device_count = DEVICES, .allocator = {count_alloc, count_free, NULL}}, &ctx));
    DP_CHECK(segmenter_create(ctx, &s.net));
    DP_CHECK(loss_create(ctx, &s.loss));
    s.scope = dp_scope_begin(ctx);
    s.batch = DP_LIST_OF(s.scope, dp_of(s.scope, &color));
    s.target = dp_of(s.scope, &target);
    way(ctx, &s);
    DP_CHECK(dp_params_edit(s.net, 0, &data, &own));
    DP_CHECK(dp_read(ctx, &own, grad, COLORS * CLASSES * sizeof *grad));
    printf("%-14s loss %.3f, outputs on each device:", name, s.mean);
    for (int i = 0; i < DEVICES; i++)
        printf(" %.1f", s.bytes[i] / (1 << 20));
    printf(" MiB, memory at most %.1f MiB\n", (double)most_bytes / (1 << 20));
    dp_scope_end(s.scope);
    dp_close(ctx);
}

int main(void)
{
    float one[COLORS * CLASSES], two[COLORS * CLASSES], most = 0;
    for (int i = 0; i < IMAGES * PIXELS * COLORS; i++)
        colors[i] = (float)(i * 37 % 101) / 101;
    for (int i = 0; i < IMAGES * PIXELS; i++)
        targets[i] = (uint8_t)(i * 13 % CLASSES);
    run("gathered:", gathered, one);
    run("left in place:", left_in_place, two);
    for (int i = 0; i < COLORS * CLASSES; i++)
        most = fmaxf(most, fabsf(one[i] - two[i]));
    printf("largest difference of a gradient: %.0e\n", (double)most);
    return most < 1e-6f ? 0 : 1;
}
