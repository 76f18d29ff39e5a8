/* segmenter.h - model and loss of segmentation_criterion.c, as their user would write them. */

#ifndef SEGMENTER_H
#define SEGMENTER_H

#include "../dp.h"
#include <math.h>

enum { COLORS = 3, CLASSES = 8, PIXELS = 256 * 512 };

/* scores[image, pixel, class] = color[image, pixel, :] * weight[:, class] */
static dp_status net_forward(dp_call *call)
{
    const dp_tensor *color;
    dp_tensor scores;
    DP_TRY(dp_call_arg(call, 0, DP_F32, 3, &color));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32,
                         DP_SHAPE(color->shape[0], PIXELS, CLASSES), &scores));
    const float *x = color->data, *w = dp_param(call, 0);
    float *out = scores.data;
    for (int64_t i = 0; i < color->shape[0] * PIXELS * CLASSES; i++) {
        const float *own = x + i / CLASSES * COLORS;
        int64_t c = i % CLASSES;
        out[i] = own[0] * w[c] + own[1] * w[CLASSES + c] + own[2] * w[2 * CLASSES + c];
    }
    call->saved = (void *)(uintptr_t)color;
    call->out = dp_of(call->scope, &scores);
    return DP_OK;
}

static dp_status net_backward(dp_call *call)
{
    const dp_tensor *color = call->saved, *grad;
    DP_TRY(dp_as_tensor(call->grad, "gradient of the scores", DP_F32, 3, &grad));
    const float *x = color->data, *g = grad->data;
    double sums[COLORS * CLASSES] = {0};
    for (int64_t i = 0; i < color->shape[0] * PIXELS * CLASSES; i++)
        for (int k = 0; k < COLORS; k++)
            sums[k * CLASSES + i % CLASSES] += (double)(x[i / CLASSES * COLORS + k] * g[i]);
    float *gw = dp_grad(call, 0);
    for (int i = 0; i < COLORS * CLASSES; i++)
        gw[i] += (float)sums[i];
    return DP_OK;
}

/* Mean over the pixels of the squared distance to one hot score. */
static dp_status loss_forward(dp_call *call)
{
    const dp_tensor *scores, *target;
    dp_tensor loss;
    double sum = 0;
    DP_TRY(dp_call_arg(call, 0, DP_F32, 3, &scores));
    DP_TRY(dp_call_arg(call, 1, DP_U8, 2, &target));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 0, NULL, &loss));
    const float *s = scores->data;
    const uint8_t *t = target->data;
    int64_t count = dp_tensor_count(scores);
    for (int64_t i = 0; i < count; i++)
        sum += pow((double)s[i] - (i % CLASSES == t[i / CLASSES]), 2);
    *(float *)loss.data = (float)(sum / (double)count);
    call->out = dp_of(call->scope, &loss);
    return DP_OK;
}

static dp_status loss_backward(dp_call *call)
{
    const dp_tensor *scores, *target;
    dp_tensor grad;
    double each = 0;
    DP_TRY(dp_call_arg(call, 0, DP_F32, 3, &scores));
    DP_TRY(dp_call_arg(call, 1, DP_U8, 2, &target));
    DP_TRY(dp_item(call->ctx, call->grad, &each));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 3, scores->shape, &grad));
    int64_t count = dp_tensor_count(scores);
    for (int64_t i = 0; i < count; i++)
        ((float *)grad.data)[i] = (float)(2 * each / (double)count) *
                                  (((const float *)scores->data)[i] -
                                   (i % CLASSES == ((const uint8_t *)target->data)[i / CLASSES]));
    call->args_grad = DP_LIST_OF(call->scope, dp_of(call->scope, &grad), dp_none());
    return DP_OK;
}

static dp_status segmenter_create(dp_ctx *ctx, dp_module **out)
{
    static const dp_method methods[] = {{"forward", net_forward}, {"backward", net_backward}};
    static const dp_param_config weight = {.name = "weight", .ndim = 2, .shape = {COLORS, CLASSES}};
    return dp_module_create(ctx,
                            &(dp_module_config){.name = "segmenter",
                                                .methods = methods,
                                                .method_count = 2,
                                                .params = &weight,
                                                .param_count = 1},
                            out);
}

static dp_status loss_create(dp_ctx *ctx, dp_module **out)
{
    static const dp_method methods[] = {{"forward", loss_forward}, {"backward", loss_backward}};
    return dp_module_create(
        ctx, &(dp_module_config){.name = "loss", .methods = methods, .method_count = 2}, out);
}

#endif /* SEGMENTER_H */
