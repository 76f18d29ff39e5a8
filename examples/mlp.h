/* mlp.h - a model as its user would write it: two layers, ReLU, softmax, cross-entropy. Nothing in
   it knows about devices; its memory has to be host memory. */

#ifndef MLP_H
#define MLP_H

#include "../dp.h"
#include <math.h>
#include <string.h>

enum { MLP_W1, MLP_B1, MLP_W2, MLP_B2 };

typedef struct mlp { /* all replicas read it */
    int inputs, hidden, classes;
} mlp;

typedef struct mlp_tape { /* what backward needs of a forward */
    const float *x;
    const int64_t *label;
    float *h, *p;
    int64_t rows;
} mlp_tape;

/* out[rows, n] = bias + x[rows, m] * w[m, n] */
static void mlp_layer(float *restrict out, const float *x, const float *w, const float *bias,
                      int64_t rows, int m, int n)
{
    for (int64_t i = 0; i < rows; i++, out += n, x += m) {
        memcpy(out, bias, (size_t)n * sizeof *out);
        for (int k = 0; k < m; k++)
            for (int j = 0; x[k] != 0 && j < n; j++)
                out[j] += x[k] * w[k * n + j];
    }
}

/* dw += x' * d, db += d, summed over the rows */
static void mlp_layer_grad(float *restrict dw, float *restrict db, const float *x, const float *d,
                           int64_t rows, int m, int n)
{
    for (int64_t i = 0; i < rows; i++, x += m, d += n) {
        for (int k = 0; k < m; k++)
            for (int j = 0; x[k] != 0 && j < n; j++)
                dw[k * n + j] += x[k] * d[j];
        for (int j = 0; j < n; j++)
            db[j] += d[j];
    }
}

/* Logits become probabilities; returns whether the label's is the greatest. */
static bool mlp_softmax(float *p, int classes, int64_t label)
{
    float top = p[0], sum = 0;
    for (int c = 1; c < classes; c++)
        top = fmaxf(top, p[c]);
    bool right = !(p[label] < top);
    for (int c = 0; c < classes; c++)
        sum += p[c] = expf(p[c] - top);
    for (int c = 0; c < classes; c++)
        p[c] /= sum;
    return right;
}

/* image [rows, inputs] and label [rows] -> {loss, right}, both [rows] */
static dp_status mlp_forward(dp_call *call)
{
    const mlp *net = call->state;
    const dp_tensor *x, *label;
    dp_tensor h, p, loss, right;
    DP_TRY(dp_call_shaped(call, "image", DP_F32, DP_SHAPE(-1, net->inputs), &x));
    int64_t rows = x->shape[0];
    DP_TRY(dp_call_shaped(call, "label", DP_I64, DP_SHAPE(rows), &label));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows, net->hidden), &h));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows, net->classes), &p));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows), &loss));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows), &right));
    mlp_tape *tape = dp_scope_alloc(call->scope, sizeof *tape);
    if (tape == NULL)
        return DP_ERR_NO_MEMORY;
    *tape = (mlp_tape){x->data, label->data, h.data, p.data, rows};
    mlp_layer(tape->h, tape->x, dp_param(call, MLP_W1), dp_param(call, MLP_B1), rows, net->inputs,
              net->hidden);
    for (int64_t i = 0; i < rows * net->hidden; i++)
        tape->h[i] = fmaxf(tape->h[i], 0);
    mlp_layer(tape->p, tape->h, dp_param(call, MLP_W2), dp_param(call, MLP_B2), rows, net->hidden,
              net->classes);
    for (int64_t i = 0; i < rows; i++) {
        float *own = tape->p + i * net->classes;
        ((float *)right.data)[i] = mlp_softmax(own, net->classes, tape->label[i]);
        ((float *)loss.data)[i] = -logf(own[tape->label[i]] + 1e-30f);
    }
    call->saved = tape;
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)},
                        {"right", dp_of(call->scope, &right)});
    return DP_OK;
}

/* From the gradient of each row's loss to those of the parameters. */
static dp_status mlp_backward(dp_call *call)
{
    const mlp *net = call->state;
    const mlp_tape *tape = call->saved;
    const float *w2 = dp_param(call, MLP_W2);
    dp_tensor grad;
    DP_TRY(dp_call_out_grad(call, "loss", &grad));
    float *dh = dp_scope_alloc(call->scope, sizeof(float) * (size_t)(tape->rows * net->hidden));
    if (dh == NULL)
        return DP_ERR_NO_MEMORY;
    for (int64_t i = 0; i < tape->rows * net->classes; i++) { /* probabilities become gradients */
        int64_t row = i / net->classes;
        tape->p[i] -= (float)(i % net->classes == tape->label[row]);
        tape->p[i] *= ((const float *)grad.data)[row];
    }
    for (int64_t i = 0; i < tape->rows * net->hidden; i++) {
        const float *d = tape->p + i / net->hidden * net->classes;
        dh[i] = 0;
        for (int c = 0; tape->h[i] > 0 && c < net->classes; c++)
            dh[i] += d[c] * w2[i % net->hidden * net->classes + c];
    }
    mlp_layer_grad(dp_grad(call, MLP_W2), dp_grad(call, MLP_B2), tape->h, tape->p, tape->rows,
                   net->hidden, net->classes);
    DP_TRY(dp_grad_ready(call, MLP_W2)); /* with other processes it may travel meanwhile */
    mlp_layer_grad(dp_grad(call, MLP_W1), dp_grad(call, MLP_B1), tape->x, dh, tape->rows,
                   net->inputs, net->hidden);
    return DP_OK;
}

/* Small random numbers in the weights; biases start at 0. */
static dp_status mlp_randomize(dp_module *module)
{
    unsigned seed = 7;
    for (size_t i = MLP_W1; i <= MLP_W2; i += MLP_W2 - MLP_W1) {
        dp_param_info info;
        DP_TRY(dp_module_param(module, i, &info));
        size_t count = (size_t)dp_tensor_count(&info.data);
        dp_scope *temp = dp_scope_begin(dp_module_ctx(module));
        float *w = dp_scope_alloc(temp, count * sizeof *w);
        for (size_t k = 0; w != NULL && k < count; k++) {
            seed = seed * 1664525u + 1013904223u;
            w[k] = ((float)(seed >> 8) / (1 << 24) - 0.5f) * 0.1f;
        }
        dp_status status = dp_params_write(module, i, w, count * sizeof *w);
        dp_scope_end(temp);
        DP_TRY(status);
    }
    return DP_OK;
}

static dp_status mlp_create(dp_ctx *ctx, const mlp *net, dp_module **out)
{
    static const dp_method methods[] = {{"forward", mlp_forward}, {"backward", mlp_backward}};
    const dp_param_config params[] = {
        [MLP_W1] = {.name = "fc1.weight", .ndim = 2, .shape = {net->inputs, net->hidden}},
        [MLP_B1] = {.name = "fc1.bias", .ndim = 1, .shape = {net->hidden}},
        [MLP_W2] = {.name = "fc2.weight", .ndim = 2, .shape = {net->hidden, net->classes}},
        [MLP_B2] = {.name = "fc2.bias", .ndim = 1, .shape = {net->classes}}};
    const dp_module_config config = {.name = "mlp",
                                     .methods = methods,
                                     .method_count = 2,
                                     .params = params,
                                     .param_count = 4,
                                     .state = net};
    DP_TRY(dp_module_create(ctx, &config, out));
    return mlp_randomize(*out);
}

#endif /* MLP_H */
