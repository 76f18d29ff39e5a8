/* in_parts.c - a wrapper of your own, which is a module with a child. It computes its batch in
   parts, one after the other, and keeps nothing of them until backward, which computes each once
   more. So only one part's activations are in memory at a time.

   A scope of its own for each part is all it takes: what the child makes ends with it.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/in_parts.c dp.o -o in_parts -lpthread -lm
   Prints:
   1 part: loss 2.3... to ..., at most ... KiB in use
   8 parts: loss 2.3... to ..., at most ... KiB in use
   largest difference of a weight: 0.0e+00 */

#include "../dp.h"
#include "../dp_train.h"
#include "mlp.h"
#include "pictures.h"
#include <stdatomic.h>
#include <stdlib.h>

enum { BATCH = 2048, STEPS = 8, HIDDEN = 128 };

typedef struct in_parts { /* the wrapper's state */
    int count;
} in_parts;

/* Rows `first` to `last` of each tensor of a dict; the rest of it goes to every part. */
static dp_status rows_of(dp_scope *scope, dp_value batch, int64_t first, int64_t last,
                         dp_value *out)
{
    dp_pair *pairs = dp_scope_alloc(scope, batch.count * sizeof *pairs);
    dp_tensor rows;
    if (pairs == NULL)
        return DP_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < batch.count; i++) {
        pairs[i] = batch.as.pairs[i];
        if (pairs[i].value.kind != DP_TENSOR)
            continue;
        DP_TRY(dp_narrow(pairs[i].value.as.t, 0, first, last - first, &rows));
        pairs[i].value = dp_of(scope, &rows);
    }
    *out = dp_dict_make(scope, pairs, batch.count);
    return DP_OK;
}

/* One part, in call->scope: forward, and backward from the rows of `grads`, if there are any. */
static dp_status run_part(dp_call *call, dp_value outs, const dp_tensor *grads, int64_t first,
                          int64_t last)
{
    dp_value batch, made, part, grad;
    dp_tensor rows;
    dp_pass *pass;
    DP_TRY(rows_of(call->scope, call->kwargs, first, last, &batch));
    DP_TRY(dp_call_child(call, "mlp", "forward", dp_none(), batch, &made, grads ? &pass : NULL));
    if (grads == NULL) {
        DP_TRY(rows_of(call->scope, outs, first, last, &part));
        for (uint32_t i = 0; i < made.count; i++)
            DP_TRY(dp_copy(call->ctx, part.as.pairs[i].value.as.t, made.as.pairs[i].value.as.t,
                           call->stream));
        return DP_OK;
    }
    DP_TRY(dp_narrow(grads, 0, first, last - first, &rows));
    grad = DP_DICT(call->scope, {"loss", dp_of(call->scope, &rows)});
    return dp_backward(pass, grad, NULL);
}

/* All parts, each in a scope that ends with it. */
static dp_status run_parts(dp_call *call, dp_value outs, const dp_tensor *grads)
{
    const in_parts *parts = call->state;
    int64_t rows = dp_get(call->kwargs, "label").as.t->shape[0];
    dp_scope *own = call->scope;
    dp_status status = DP_OK;
    for (int i = 0; i < parts->count && status == DP_OK; i++) {
        call->scope = dp_scope_begin(call->ctx);
        status =
            run_part(call, outs, grads, rows * i / parts->count, rows * (i + 1) / parts->count);
        dp_scope_end(call->scope);
        call->scope = own;
    }
    return status;
}

static dp_status forward(dp_call *call)
{
    const dp_tensor *label;
    dp_tensor loss, right;
    DP_TRY(dp_call_tensor(call, "label", DP_I64, 1, &label));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(label->shape[0]), &loss));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(label->shape[0]), &right));
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)},
                        {"right", dp_of(call->scope, &right)});
    return run_parts(call, call->out, NULL);
}

static dp_status backward(dp_call *call)
{
    dp_tensor grad;
    DP_TRY(dp_call_out_grad(call, "loss", &grad));
    return run_parts(call, dp_none(), &grad);
}

/* Around any module that has the methods of mlp.h and is called "mlp". */
static dp_status in_parts_create(dp_module *net, const in_parts *parts, dp_module **out)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    const dp_module_config config = {.name = "in_parts",
                                     .methods = methods,
                                     .method_count = 2,
                                     .children = &net,
                                     .child_count = 1,
                                     .state = parts};
    return dp_module_create(dp_module_ctx(net), &config, out);
}

typedef struct used { /* memory */
    atomic_size_t now, most;
} used;

static void *take(size_t bytes, size_t align, void *user)
{
    used *memory = user;
    size_t now = atomic_fetch_add(&memory->now, bytes) + bytes;
    for (size_t most = atomic_load(&memory->most); now > most;)
        if (atomic_compare_exchange_weak(&memory->most, &most, now))
            break;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void give(void *data, size_t bytes, void *user)
{
    used *memory = user;
    atomic_fetch_sub(&memory->now, bytes);
    free(data);
}

static void train(int count, float *out_weights, size_t bytes)
{
    static const mlp shape = {PIXELS, HIDDEN, CLASSES};
    const in_parts parts = {count};
    used memory = {0};
    dp_ctx *ctx;
    dp_module *net, *whole, *par;
    dp_optim *sgd;
    dp_tensor data;
    double loss = 0, first = 0;
    DP_CHECK(dp_open(&(dp_config){.allocator = {take, give, &memory}}, &ctx));
    DP_CHECK(mlp_create(ctx, &shape, &net));
    DP_CHECK(in_parts_create(net, &parts, &whole));
    DP_CHECK(dp_data_parallel(whole, NULL, &par)); /* and others go around it */
    DP_CHECK(dp_optim_create(par, &(dp_optim_config){.rule = dp_sgd(), .hyper.lr = 0.1}, &sgd));
    for (int i = 0; i < STEPS; i++) {
        int at = i * BATCH % PICTURES;
        dp_scope *step = dp_scope_begin(ctx);
        dp_value image = dp_array(step, pictures[at], DP_F32, DP_SHAPE(BATCH, PIXELS));
        dp_value label = dp_array(step, &labels[at], DP_I64, DP_SHAPE(BATCH));
        dp_value log, batch = DP_DICT(step, {"image", image}, {"label", label});
        DP_CHECK(dp_train_step(par, step, batch, sgd, &log));
        DP_CHECK(dp_item(ctx, dp_get(log, "loss"), &loss));
        first = i == 0 ? loss : first;
        dp_scope_end(step);
    }
    DP_CHECK(dp_params_edit(whole, 0, &data, NULL));
    DP_CHECK(dp_read(ctx, &data, out_weights, bytes));
    dp_close(ctx);
    printf("%d part%s: loss %.3f to %.3f, at most %zu KiB in use\n", count, count > 1 ? "s" : "",
           first, loss, atomic_load(&memory.most) / 1024);
}

int main(void)
{
    static float whole[PIXELS * HIDDEN], parts[PIXELS * HIDDEN];
    float most = 0;
    load_pictures();
    train(1, whole, sizeof whole);
    train(8, parts, sizeof parts);
    for (int i = 0; i < PIXELS * HIDDEN; i++)
        most = fmaxf(most, fabsf(whole[i] - parts[i]));
    printf("largest difference of a weight: %.1e\n", (double)most);
    return 0;
}
