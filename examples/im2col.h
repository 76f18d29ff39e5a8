/* im2col.h - a convolutional net as anybody would write it: im2col in loops of OpenMP, matrix
   products by BLAS. Nothing in it knows about devices or says how many threads to use; its memory
   has to be host memory. A pixel's maps lie side by side. */

#ifndef IM2COL_H
#define IM2COL_H

#include "../dp.h"
#include <cblas.h>
#include <math.h>
#include <string.h>

enum { LAYERS = 3, KINDS = 10 };

typedef struct layer { /* a full layer is a kernel as large as the picture */
    int side, maps;    /* of the input, a square */
    int kernel, stride, out, kinds;
} layer;

static const layer layers[LAYERS] = {
    {28, 1, 5, 1, 24, 16}, {24, 16, 6, 2, 10, 32}, {10, 32, 10, 1, 1, KINDS}};

typedef struct tape { /* what backward needs of a forward */
    int rows;
    const int64_t *label;
    float *cols[LAYERS], *out[LAYERS];
} tape;

static int fan_in(const layer *l)
{
    return l->kernel * l->kernel * l->maps;
}

static int spots(const layer *l, int rows)
{
    return rows * l->out * l->out;
}

/* Where a line of a kernel at a spot of the output meets the input. */
static size_t meets(const layer *l, int spot, int line)
{
    int row = spot / (l->out * l->out), y = spot / l->out % l->out * l->stride + line,
        x = spot % l->out * l->stride;
    return (((size_t)row * (size_t)l->side + (size_t)y) * (size_t)l->side + (size_t)x) *
           (size_t)l->maps;
}

static void im2col(const layer *l, const float *in, int rows, float *cols)
{
    int width = l->kernel * l->maps, count = spots(l, rows);
#pragma omp parallel for
    for (int s = 0; s < count; s++)
        for (int k = 0; k < l->kernel; k++)
            memcpy(cols + (size_t)s * (size_t)fan_in(l) + k * width, in + meets(l, s, k),
                   (size_t)width * sizeof *cols);
}

/* And back, where kernels overlap: a row of the batch is one thread's. */
static void col2im(const layer *l, const float *cols, int rows, float *in)
{
    int width = l->kernel * l->maps, each = spots(l, 1);
    memset(in, 0, (size_t)rows * (size_t)(l->side * l->side * l->maps) * sizeof *in);
#pragma omp parallel for
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < each * l->kernel; i++) {
            int spot = r * each + i / l->kernel, k = i % l->kernel;
            const float *from = cols + (size_t)spot * (size_t)fan_in(l) + k * width;
            for (int c = 0; c < width; c++)
                in[meets(l, spot, k) + (size_t)c] += from[c];
        }
}

/* Sums of products become probabilities. */
static void softmax(float *p)
{
    float top = p[0], sum = 0;
    for (int c = 1; c < KINDS; c++)
        top = fmaxf(top, p[c]);
    for (int c = 0; c < KINDS; c++)
        sum += p[c] = expf(p[c] - top);
    for (int c = 0; c < KINDS; c++)
        p[c] /= sum;
}

/* out = cols * weight + bias, and ReLU but for the last layer */
static void layer_forward(const dp_call *call, int i, const float *in, const tape *t)
{
    const layer *l = &layers[i];
    const float *bias = dp_param(call, (size_t)i * 2 + 1);
    int count = spots(l, t->rows), n = l->kinds;
    float *out = t->out[i];
    im2col(l, in, t->rows, t->cols[i]);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, count, n, fan_in(l), 1, t->cols[i],
                fan_in(l), dp_param(call, (size_t)i * 2), n, 0, out, n);
#pragma omp parallel for
    for (int s = 0; s < count; s++)
        for (int c = 0; c < n; c++)
            out[s * n + c] = i + 1 < LAYERS ? fmaxf(out[s * n + c] + bias[c], 0)
                                            : out[s * n + c] + bias[c];
}

/* image [rows, 784], label [rows] -> {loss, right}, both [rows] */
static dp_status forward(dp_call *call)
{
    const dp_tensor *x, *label;
    dp_tensor loss, right;
    DP_TRY(dp_call_tensor(call, "image", DP_F32, 2, &x));
    DP_TRY(dp_call_tensor(call, "label", DP_I64, 1, &label));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 1, x->shape, &loss));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 1, x->shape, &right));
    tape *t = call->saved = dp_scope_alloc(call->scope, sizeof *t);
    if (t == NULL)
        return DP_ERR_NO_MEMORY;
    *t = (tape){.rows = (int)x->shape[0], .label = label->data};
    for (int i = 0; i < LAYERS; i++) {
        size_t count = (size_t)spots(&layers[i], t->rows) * sizeof(float);
        t->cols[i] = dp_scope_alloc(call->scope, count * (size_t)fan_in(&layers[i]));
        t->out[i] = dp_scope_alloc(call->scope, count * (size_t)layers[i].kinds);
        if (t->cols[i] == NULL || t->out[i] == NULL)
            return DP_ERR_NO_MEMORY;
        layer_forward(call, i, i > 0 ? t->out[i - 1] : x->data, t);
    }
    for (int r = 0; r < t->rows; r++) {
        float *p = t->out[LAYERS - 1] + r * KINDS;
        softmax(p);
        ((float *)right.data)[r] = cblas_isamax(KINDS, p, 1) == (size_t)t->label[r];
        ((float *)loss.data)[r] = -logf(p[t->label[r]] + 1e-30f);
    }
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)},
                        {"right", dp_of(call->scope, &right)});
    return DP_OK;
}

/* From the gradient of a layer's output to those of its parameters and of its input. */
static void layer_backward(const dp_call *call, int i, const tape *t)
{
    const layer *l = &layers[i];
    int count = spots(l, t->rows), n = l->kinds;
    float *out_grad = t->out[i], *bias_grad = dp_grad(call, (size_t)i * 2 + 1);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, fan_in(l), n, count, 1, t->cols[i],
                fan_in(l), out_grad, n, 1, dp_grad(call, (size_t)i * 2), n);
    for (int s = 0; s < count; s++)
        for (int c = 0; c < n; c++)
            bias_grad[c] += out_grad[s * n + c];
    if (i == 0)
        return;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, count, fan_in(l), n, 1, out_grad, n,
                dp_param(call, (size_t)i * 2), n, 0, t->cols[i], fan_in(l));
}

static dp_status backward(dp_call *call)
{
    const tape *t = call->saved;
    dp_tensor grad;
    DP_TRY(dp_call_out_grad(call, "loss", &grad));
    for (int k = 0; k < t->rows * KINDS; k++) { /* probabilities become gradients */
        float *p = &t->out[LAYERS - 1][k];
        *p = (*p - (float)(k % KINDS == t->label[k / KINDS])) *
             ((const float *)grad.data)[k / KINDS];
    }
    for (int i = LAYERS - 1; i >= 0; i--) {
        layer_backward(call, i, t);
        if (i == 0)
            break;
        const layer *l = &layers[i];
        int count = t->rows * l->side * l->side * l->maps;
        float *in = dp_scope_alloc(call->scope, (size_t)count * sizeof *in);
        if (in == NULL)
            return DP_ERR_NO_MEMORY;
        col2im(l, t->cols[i], t->rows, in);
#pragma omp parallel for
        for (int k = 0; k < count; k++)
            t->out[i - 1][k] = t->out[i - 1][k] > 0 ? in[k] : 0;
    }
    return DP_OK;
}

/* Small random weights; biases start at 0. */
static dp_status net_create(dp_ctx *ctx, dp_module **out)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    static float w[10 * 10 * 32 * KINDS + 6 * 6 * 16 * 32];
    dp_param_config params[LAYERS * 2] = {{0}};
    const char *names[LAYERS * 2] = {"conv1.weight", "conv1.bias",  "conv2.weight",
                                     "conv2.bias",   "full.weight", "full.bias"};
    for (int i = 0; i < LAYERS; i++) {
        const layer *l = &layers[i];
        params[i * 2] =
            (dp_param_config){.name = names[i * 2], .ndim = 2, .shape = {fan_in(l), l->kinds}};
        params[i * 2 + 1] =
            (dp_param_config){.name = names[i * 2 + 1], .ndim = 1, .shape = {l->kinds}};
    }
    DP_TRY(dp_module_create(ctx,
                            &(dp_module_config){.name = "net",
                                                .methods = methods,
                                                .method_count = 2,
                                                .params = params,
                                                .param_count = LAYERS * 2},
                            out));
    unsigned seed = 7;
    for (size_t i = 0; i < LAYERS; i++) {
        size_t count = (size_t)fan_in(&layers[i]) * (size_t)layers[i].kinds;
        for (size_t k = 0; k < count; k++) {
            seed = seed * 1664525u + 1013904223u;
            w[k] = ((float)(seed >> 8) / (1 << 24) - 0.5f) * 3 / sqrtf((float)fan_in(&layers[i]));
        }
        DP_TRY(dp_params_write(*out, i * 2, w, count * sizeof *w));
    }
    return DP_OK;
}

#endif /* IM2COL_H */
