/* conv.h - a small convolutional net as its user would write it: a convolution with stride 2,
   ReLU, a full layer, softmax, cross-entropy. Its memory has to be host memory. */

#ifndef CONV_H
#define CONV_H

#include "../dp.h"
#include <math.h>

enum { CONV_KINDS = 10, SIDE = 28, KERNEL = 5, MAPS = 6, OUT = 12, UNITS = MAPS * OUT * OUT };
enum { CONV, CONV_BIAS, FULL, FULL_BIAS };

typedef struct conv_tape { /* of a row, for backward */
    float h[UNITS], p[CONV_KINDS];
} conv_tape;

/* Where a kernel's element meets a unit of a map: every second pixel. */
static int conv_pixel(int unit, int k)
{
    return (unit / OUT * 2 + k / KERNEL) * SIDE + unit % OUT * 2 + k % KERNEL;
}

static void conv_forward_row(const dp_call *call, const float *x, conv_tape *t)
{
    const float *w = dp_param(call, CONV), *full = dp_param(call, FULL);
    for (int u = 0; u < UNITS; u++) {
        float sum = ((const float *)dp_param(call, CONV_BIAS))[u / (OUT * OUT)];
        for (int k = 0; k < KERNEL * KERNEL; k++)
            sum += w[u / (OUT * OUT) * KERNEL * KERNEL + k] * x[conv_pixel(u % (OUT * OUT), k)];
        t->h[u] = fmaxf(sum, 0);
    }
    float all = 0;
    for (int c = 0; c < CONV_KINDS; c++) {
        float sum = ((const float *)dp_param(call, FULL_BIAS))[c];
        for (int u = 0; u < UNITS; u++)
            sum += full[c * UNITS + u] * t->h[u];
        all += t->p[c] = expf(fminf(sum, 60));
    }
    for (int c = 0; c < CONV_KINDS; c++)
        t->p[c] /= all;
}

/* image [rows, 784], label [rows] -> {loss, right}, both [rows] */
static dp_status conv_forward(dp_call *call)
{
    const dp_tensor *x, *label;
    dp_tensor loss, right;
    DP_TRY(dp_call_shaped(call, "image", DP_F32, DP_SHAPE(-1, SIDE * SIDE), &x));
    DP_TRY(dp_call_shaped(call, "label", DP_I64, DP_SHAPE(x->shape[0]), &label));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 1, x->shape, &loss));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 1, x->shape, &right));
    conv_tape *t = call->saved = dp_scope_alloc(call->scope, (size_t)x->shape[0] * sizeof *t);
    for (int64_t i = 0; t != NULL && i < x->shape[0]; i++) {
        int64_t own = ((const int64_t *)label->data)[i], best = 0;
        conv_forward_row(call, (const float *)x->data + i * SIDE * SIDE, &t[i]);
        for (int c = 1; c < CONV_KINDS; c++)
            best = t[i].p[c] > t[i].p[best] ? c : best;
        ((float *)loss.data)[i] = -logf(fmaxf(t[i].p[own], 1e-20F));
        ((float *)right.data)[i] = best == own;
    }
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)},
                        {"right", dp_of(call->scope, &right)});
    return t != NULL ? DP_OK : DP_ERR_NO_MEMORY;
}

static void conv_backward_row(const dp_call *call, const float *x, const conv_tape *t,
                              const float *d)
{
    float *w = dp_grad(call, CONV), *bias = dp_grad(call, CONV_BIAS), *full = dp_grad(call, FULL);
    for (int c = 0; c < CONV_KINDS; c++)
        ((float *)dp_grad(call, FULL_BIAS))[c] += d[c];
    for (int u = 0; u < UNITS; u++) {
        float dh = 0;
        for (int c = 0; c < CONV_KINDS; c++) {
            dh += ((const float *)dp_param(call, FULL))[c * UNITS + u] * d[c];
            full[c * UNITS + u] += t->h[u] * d[c];
        }
        for (int k = 0; t->h[u] > 0 && k < KERNEL * KERNEL; k++)
            w[u / (OUT * OUT) * KERNEL * KERNEL + k] += x[conv_pixel(u % (OUT * OUT), k)] * dh;
        bias[u / (OUT * OUT)] += t->h[u] > 0 ? dh : 0;
    }
}

static dp_status conv_backward(dp_call *call)
{
    const dp_tensor *x, *label;
    const conv_tape *t = call->saved;
    float each = (float)dp_get(call->grad, "loss").as.f; /* of each row's loss */
    DP_TRY(dp_call_tensor(call, "image", DP_F32, 2, &x));
    DP_TRY(dp_call_tensor(call, "label", DP_I64, 1, &label));
    for (int64_t i = 0; i < x->shape[0]; i++) {
        float d[CONV_KINDS];
        for (int c = 0; c < CONV_KINDS; c++)
            d[c] = (t[i].p[c] - (c == ((const int64_t *)label->data)[i])) * each;
        conv_backward_row(call, (const float *)x->data + i * SIDE * SIDE, &t[i], d);
    }
    return DP_OK;
}

/* The same numbers at each start. */
static dp_status conv_begin(dp_module *net)
{
    unsigned seed = 1;
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        dp_tensor data;
        DP_TRY(dp_params_edit(net, i, &data, NULL));
        for (int64_t k = 0; k < dp_tensor_count(&data) && i % 2 == 0; k++) {
            seed = seed * 1664525u + 1013904223u;
            ((float *)data.data)[k] = ((float)(seed >> 8) / (1 << 24) - 0.5F) *
                                      (i == CONV ? 0.4F : 0.1F);
        }
    }
    return DP_OK;
}

static dp_status conv_create(dp_ctx *ctx, dp_module **out)
{
    static const dp_method methods[] = {{"forward", conv_forward}, {"backward", conv_backward}};
    static const dp_param_config params[] = {
        {.name = "conv.weight", .ndim = 3, .shape = {MAPS, KERNEL, KERNEL}},
        {.name = "conv.bias", .ndim = 1, .shape = {MAPS}},
        {.name = "full.weight", .ndim = 2, .shape = {CONV_KINDS, UNITS}},
        {.name = "full.bias", .ndim = 1, .shape = {CONV_KINDS}}};
    DP_TRY(dp_module_create(ctx,
                            &(dp_module_config){.name = "conv",
                                                .methods = methods,
                                                .method_count = 2,
                                                .params = params,
                                                .param_count = 4,
                                                .packed = true},
                            out));
    return conv_begin(*out);
}

#endif /* CONV_H */
