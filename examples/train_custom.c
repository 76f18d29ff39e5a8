/* train_custom.c - training on the devices of custom_device.h, in two processes.

   The host does not reach their memory, and no table of collectives knows them: so gradients go
   through the host. The parameters get the same bits as on CPU devices.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/train_custom.c dp.o -o train_custom -lpthread -lm
   Prints:
   cpu: 2 processes, shared memory, ...% right
   toy: 2 processes, shared memory, through the host, ...% right
   the same bits */

#define _DEFAULT_SOURCE /* for MAP_ANONYMOUS */
#include "custom_device.h"
#include "../dp_train.h"
#include "pictures.h"
#include <math.h>
#include <sys/mman.h>

enum { BATCH = 128, STEPS = 64, WEIGHT = 0, BIAS = 1 };

typedef struct job {
    bool on_toys;
    uint64_t *out; /* of both processes: a hash of the parameters */
} job;

static bool on_toys; /* as this process' job has it */

/* What a driver would do for a kernel of a toy: see where the bytes are. */
static void *at(const dp_call *call, const void *data)
{
    return on_toys ? toy_flip(call->stream->dev, data) : (void *)(uintptr_t)data;
}

/* ---- the model: one layer and softmax -------------------------------------------------------- */

typedef struct tape {
    const float *x;
    const int64_t *label;
    float *p;
    int64_t rows;
} tape;

/* One row: probabilities of the classes. */
static void classify(float *p, const float *x, const float *weight, const float *bias)
{
    float top = 0, sum = 0;
    for (int c = 0; c < CLASSES; c++) {
        p[c] = bias[c];
        for (int k = 0; k < PIXELS; k++)
            p[c] += x[k] * weight[k * CLASSES + c];
        top = c == 0 ? p[c] : fmaxf(top, p[c]);
    }
    for (int c = 0; c < CLASSES; c++)
        sum += p[c] = expf(p[c] - top);
    for (int c = 0; c < CLASSES; c++)
        p[c] /= sum;
}

static dp_status forward(dp_call *call)
{
    const dp_tensor *x, *label;
    dp_tensor p, loss, right;
    DP_TRY(dp_call_tensor(call, "image", DP_F32, 2, &x));
    DP_TRY(dp_call_tensor(call, "label", DP_I64, 1, &label));
    int64_t rows = x->shape[0];
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows, CLASSES), &p));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows), &loss));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows), &right));
    tape *kept = dp_scope_alloc(call->scope, sizeof *kept);
    if (kept == NULL)
        return DP_ERR_NO_MEMORY;
    *kept = (tape){at(call, x->data), at(call, label->data), at(call, p.data), rows};
    float *losses = at(call, loss.data), *rights = at(call, right.data);
    for (int64_t i = 0; i < rows; i++) {
        float *own = kept->p + i * CLASSES, of_label = 0;
        classify(own, kept->x + i * PIXELS, at(call, dp_param(call, WEIGHT)),
                 at(call, dp_param(call, BIAS)));
        of_label = own[kept->label[i]];
        losses[i] = -logf(of_label + 1e-30f);
        rights[i] = 1;
        for (int c = 0; c < CLASSES; c++)
            rights[i] = own[c] > of_label ? 0 : rights[i];
    }
    call->saved = kept;
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)},
                        {"right", dp_of(call->scope, &right)});
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    const tape *kept = call->saved;
    float *weight = at(call, dp_grad(call, WEIGHT)), *bias = at(call, dp_grad(call, BIAS));
    dp_tensor grad;
    DP_TRY(dp_call_out_grad(call, "loss", &grad));
    const float *of_loss = at(call, grad.data);
    for (int64_t i = 0; i < kept->rows; i++)
        for (int c = 0; c < CLASSES; c++) {
            float d = kept->p[i * CLASSES + c] - (float)(c == kept->label[i]);
            bias[c] += d * of_loss[i];
            for (int k = 0; k < PIXELS; k++)
                weight[k * CLASSES + c] += d * of_loss[i] * kept->x[i * PIXELS + k];
        }
    return DP_OK;
}

static dp_status model_create(dp_ctx *ctx, dp_module **out)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    static const dp_param_config params[] = {
        [WEIGHT] = {.name = "weight", .ndim = 2, .shape = {PIXELS, CLASSES}},
        [BIAS] = {.name = "bias", .ndim = 1, .shape = {CLASSES}}};
    const dp_module_config config = {
        .name = "layer", .methods = methods, .method_count = 2, .params = params, .param_count = 2};
    return dp_module_create(ctx, &config, out);
}

/* ---- training -------------------------------------------------------------------------------- */

static dp_status hash_params(dp_module *net, uint64_t *out)
{
    static unsigned char bytes[PIXELS * CLASSES * sizeof(float)]; /* of the largest */
    *out = 0;
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(net, i, &info));
        size_t count = (size_t)dp_tensor_count(&info.data) * sizeof(float);
        DP_TRY(dp_read(dp_module_ctx(net), &info.data, bytes, count));
        for (size_t k = 0; k < count; k++)
            *out = (*out ^ bytes[k]) * 0x100000001b3u;
    }
    return DP_OK;
}

static dp_status train(void *user) /* in a process of its own */
{
    const dp_distributed_config config = {.reduction = DP_MEAN_SAMPLES};
    const job *own = user;
    const dp_device_ops *const backends[] = {own->on_toys ? toy_device() : dp_cpu(), NULL};
    dp_optim *sgd;
    dp_ctx *ctx;
    dp_info info;
    dp_module *net, *par;
    double right = 0;
    load_pictures();
    on_toys = own->on_toys;
    DP_TRY(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &ctx));
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(model_create(ctx, &net));
    DP_TRY(dp_distributed(net, &config, &par));
    DP_TRY(dp_optim_create(par, &(dp_optim_config){.rule = dp_sgd(), .hyper.lr = 0.1}, &sgd));
    int rows = BATCH / info.process_count;
    for (int i = 0; i < STEPS; i++) {
        int first = i * BATCH % PICTURES + info.process * rows;
        dp_scope *step = dp_scope_begin(ctx);
        dp_value image = dp_array(step, pictures[first], DP_F32, DP_SHAPE(rows, PIXELS));
        dp_value label = dp_array(step, &labels[first], DP_I64, DP_SHAPE(rows));
        dp_value log, batch = DP_DICT(step, {"image", image}, {"label", label});
        DP_TRY(dp_train_step(par, step, batch, sgd, &log));
        DP_TRY(dp_item(ctx, dp_get(log, "right"), &right));
        dp_scope_end(step);
    }
    DP_TRY(hash_params(net, &own->out[info.process]));
    if (info.process == 0)
        printf("%s: %d processes, %s, %.0f %% right\n", info.device_backend, info.process_count,
               info.coll_backend, 100 * right);
    dp_close(ctx);
    return DP_OK;
}

int main(void)
{
    uint64_t *out =
        mmap(NULL, 4 * sizeof *out, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (out == MAP_FAILED)
        return 1;
    DP_CHECK(dp_spawn(2, train, &(job){.on_toys = false, .out = out}));
    DP_CHECK(dp_spawn(2, train, &(job){.on_toys = true, .out = out + 2}));
    bool same = out[0] == out[1] && out[0] == out[2] && out[0] == out[3];
    printf("%s\n", same ? "the same bits" : "other bits");
    return same ? 0 : 1;
}
