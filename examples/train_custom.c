/* train_custom.c - train_spawn.c on the devices of custom_device.h, in two processes.

   The host does not reach their memory, and no table of collectives knows them: so gradients go
   through the host. The parameters get the same bits as on CPU devices.

   Build: cc -std=c11 -O2 examples/train_custom.c -o train_custom -pthread -lm
   Prints:
   cpu: 2 processes, shared memory, ...% right
   toy: 2 processes, shared memory, through the host, ...% right
   the same bits */

#define DP_IMPLEMENTATION
#include "custom_device.h"
#include "mlp.h"
#include "pictures.h"
#include <sys/mman.h>

enum { BATCH = 128, STEPS = 64 };

typedef struct job {
    bool on_toys;
    uint64_t *out; /* of both processes: a hash of the parameters */
} job;

/* What a driver would do for a kernel: see where the bytes are. */
static void *reach(const dp_call *call, const void *data)
{
    return toy_flip(call->stream->dev, data);
}

static dp_status update(dp_optim *optim, dp_module *net)
{
    dp_tensor data, grad;
    (void)optim;
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        DP_TRY(dp_params_edit(net, i, &data, &grad));
        DP_TRY(dp_axpby(dp_module_ctx(net), 1, &data, -0.1, &grad, &data));
    }
    return dp_zero_grad(net);
}

static dp_status hash_params(dp_module *net, uint64_t *out)
{
    static unsigned char bytes[PIXELS * 128 * sizeof(float)]; /* of the largest */
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
    static const mlp shape = {PIXELS, 128, CLASSES};
    static const dp_optim_ops ops = {.size = sizeof ops, .update = update};
    const dp_distributed_config config = {.reduction = DP_MEAN_SAMPLES};
    const job *own = user;
    const dp_device_ops *const backends[] = {own->on_toys ? toy_device() : dp_cpu(), NULL};
    dp_optim sgd = {&ops};
    dp_ctx *ctx;
    dp_info info;
    dp_module *net, *par;
    double right = 0;
    load_pictures();
    mlp_reach = own->on_toys ? reach : NULL;
    DP_TRY(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &ctx));
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(mlp_create(ctx, &shape, &net));
    DP_TRY(dp_distributed(net, &config, &par));
    int rows = BATCH / info.process_count;
    for (int i = 0; i < STEPS; i++) {
        int first = i * BATCH % PICTURES + info.process * rows;
        dp_scope *step = dp_scope_begin(ctx);
        dp_value image = dp_array(step, pictures[first], DP_F32, DP_SHAPE(rows, PIXELS));
        dp_value label = dp_array(step, &labels[first], DP_I64, DP_SHAPE(rows));
        dp_value log, batch = DP_DICT(step, {"image", image}, {"label", label});
        DP_TRY(dp_train_step(par, step, batch, &sgd, &log));
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
