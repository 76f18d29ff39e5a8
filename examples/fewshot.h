/* fewshot.h - the model of meta_test.c, as its user would write it: a linear classifier that is
   trained from scratch for every task. */

#ifndef FEWSHOT_H
#define FEWSHOT_H

#include "../dp.h"
#include <math.h>
#include <string.h>

enum { WAYS = 5, FEATURES = 16 };

typedef struct shots { /* the samples of a forward; p: how likely each class is */
    const float *x;
    const int64_t *label;
    float *p;
    int64_t rows;
} shots;

static dp_status read_shots(dp_call *call, shots *out)
{
    const dp_tensor *x, *label;
    const float *w = dp_param(call, 0);
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 2, &x));
    DP_TRY(dp_call_tensor(call, "label", DP_I64, 1, &label));
    *out = (shots){x->data, label->data, NULL, x->shape[0]};
    out->p = dp_scope_alloc(call->scope, (size_t)(out->rows * WAYS) * sizeof *out->p);
    for (int64_t i = 0; out->p != NULL && i < out->rows; i++) {
        float *p = out->p + i * WAYS, sum = 0;
        for (int c = 0; c < WAYS; c++) {
            p[c] = 0;
            for (int k = 0; k < FEATURES; k++)
                p[c] += out->x[i * FEATURES + k] * w[c * FEATURES + k];
            sum += p[c] = expf(p[c]);
        }
        for (int c = 0; c < WAYS; c++)
            p[c] /= sum;
    }
    return out->p != NULL ? DP_OK : DP_ERR_NO_MEMORY;
}

/* mode "support": the mean loss. mode "query": how many of the samples are classified correctly. */
static dp_status fewshot_forward(dp_call *call)
{
    dp_tensor out;
    shots *s = dp_scope_alloc(call->scope, sizeof *s);
    const char *mode = dp_text(dp_get(call->kwargs, "mode"));
    bool query = mode != NULL && strcmp(mode, "query") == 0;
    double loss = 0, right = 0;
    if (s == NULL)
        return DP_ERR_NO_MEMORY;
    DP_TRY(read_shots(call, s));
    for (int64_t i = 0; i < s->rows; i++) {
        const float *p = s->p + i * WAYS;
        int best = 0;
        for (int c = 1; c < WAYS; c++)
            best = p[c] > p[best] ? c : best;
        loss -= log((double)p[s->label[i]]) / (double)s->rows;
        right += best == s->label[i];
    }
    loss = query ? right : loss;
    DP_TRY(dp_tensor_from(call->scope, call->device, &loss, DP_F64, 0, NULL, &out));
    call->saved = s;
    call->out = dp_of(call->scope, &out);
    return DP_OK;
}

static dp_status fewshot_backward(dp_call *call)
{
    const shots *s = call->saved;
    float *gw = dp_grad(call, 0);
    double each = 0;
    DP_TRY(dp_item(call->ctx, call->grad, &each));
    for (int64_t i = 0; i < s->rows * WAYS; i++) {
        int64_t row = i / WAYS, c = i % WAYS;
        float d = (float)(each / (double)s->rows) * (s->p[i] - (float)(c == s->label[row]));
        for (int k = 0; k < FEATURES; k++)
            gw[c * FEATURES + k] += d * s->x[row * FEATURES + k];
    }
    return DP_OK;
}

/* A new task begins: what was learned before is forgotten. */
static dp_status fewshot_forget(dp_call *call)
{
    dp_tensor w;
    DP_TRY(dp_params_edit(call->module, 0, &w, NULL));
    call->out = dp_none();
    return dp_fill(call->ctx, &w, dp_float(0));
}

static dp_status fewshot_create(dp_ctx *ctx, dp_module **out)
{
    static const dp_method methods[] = {{"forward", fewshot_forward},
                                        {"backward", fewshot_backward},
                                        {"before_forward_support", fewshot_forget}};
    static const dp_param_config w = {.name = "head", .ndim = 2, .shape = {WAYS, FEATURES}};
    return dp_module_create(ctx,
                            &(dp_module_config){.name = "fewshot",
                                                .methods = methods,
                                                .method_count = 3,
                                                .params = &w,
                                                .param_count = 1},
                            out);
}

#endif /* FEWSHOT_H */
