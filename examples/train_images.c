/* train_images.c - a small convolutional net (conv.h) learns to tell pictures, on all devices of
   all processes. Killed and started again, it ends with the same bytes as if it had not been. What
   it keeps is written while it goes on.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/train_images.c dp.o -o train_images -lpthread -lm
   Run:   ./train_images [FILE], mpirun -np 2 ./train_images FILE; to go on, the same again
   Prints:
   64 steps: ... % right, ... % by the averaged parameters */

#include "../dp_average.h"
#include "../dp_data.h"
#include "../dp_save.h"
#include "../dp_train.h"
#include "conv.h"
#include "pictures.h" /* pictures[4096][784], labels[4096] */
#include <signal.h>
#include <string.h>

enum { BATCH = 64, ACCUMULATE = 2, EPOCHS = 2, KEPT_EVERY = 16, TESTED = 512 };
static dp_ctx *ctx;
static dp_module *par;
static dp_optim *optim;
static dp_average *average;
static dp_loader *loader;
static dp_saver *saver; /* NULL: nothing is kept */
static dp_progress progress = {.epoch_count = EPOCHS};
static dp_info info;

static dp_status read_sample(dp_sample *sample, void *user)
{
    (void)user;
    memcpy(sample->rows[0], pictures[sample->index], sizeof pictures[0]);
    *(int64_t *)sample->rows[1] = labels[sample->index];
    return DP_OK;
}

static void create(const char *file)
{
    const dp_field fields[] = {{"image", DP_F32, 1, {PIXELS}}, {"label", DP_I64, 0, {0}}};
    const dp_loader_config batches = {.sampler = {.count = PICTURES, .seed = 1},
                                      .batch = BATCH,
                                      .read = read_sample,
                                      .fields = fields,
                                      .field_count = 2,
                                      .worker_count = 2};
    const dp_optim_config steps = {
        .rule = dp_adamw(),
        .hyper = {.lr = 0.005, .weight_decay = 0.01},
        .schedule = {.warmup = 8, .decay = DP_DECAY_COSINE, .total = 64, .end_factor = 0.1},
        .accumulate = ACCUMULATE, /* gradients of two batches make a step */
        .clip = {.norm = 2}};
    dp_module *net;
    DP_CHECK(conv_create(ctx, &net));
    DP_CHECK(dp_distributed(net, &(dp_distributed_config){.reduction = DP_MEAN_SAMPLES}, &par));
    DP_CHECK(dp_optim_create(par, &steps, &optim));
    DP_CHECK(dp_average_create(par, &(dp_average_config){.momentum = 0.05}, &average));
    DP_CHECK(dp_loader_create(ctx, &batches, &loader));
    if (file != NULL)
        DP_CHECK(dp_saver_create(ctx, &(dp_saver_config){.path = file}, &saver));
}

static void keep(int64_t number)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value model, steps, averages, place;
    DP_CHECK(dp_module_save(par, scope, &model));
    DP_CHECK(dp_optim_view(optim, scope, &steps));
    DP_CHECK(dp_average_view(average, scope, &averages));
    DP_CHECK(dp_loader_save(loader, scope, &place));
    DP_CHECK(dp_saver_save(saver, number,
                           DP_DICT(scope, {"model", model}, {"optim", steps}, {"average", averages},
                                   {"loader", place}),
                           dp_none()));
    dp_scope_end(scope);
}

static void go_on(const char *file)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value kept;
    dp_status status = dp_saver_load(saver, scope, DP_SAVER_LAST, &kept);
    if (status != DP_ERR_NO_FILE) {
        DP_CHECK(status);
        DP_CHECK(dp_module_load(par, dp_get(kept, "model"), NULL));
        DP_CHECK(dp_optim_load(optim, dp_get(kept, "optim")));
        DP_CHECK(dp_average_load(average, dp_get(kept, "average")));
        DP_CHECK(dp_loader_load(loader, dp_get(kept, "loader")));
    }
    if (dp_rank(ctx) == 0)
        printf("from %s\n", status == DP_ERR_NO_FILE ? "the beginning" : file);
    dp_scope_end(scope);
}

/* One batch, if there is one; false: the epoch has ended. */
static bool train(bool *out_stop)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_batch batch;
    dp_value log;
    DP_CHECK(dp_loader_next(loader, scope, &batch));
    if (!batch.ended) {
        DP_CHECK(dp_train_step(par, scope, batch.value, optim, &log));
        DP_CHECK(dp_average_update(average));
        dp_progress_step(&progress, ctx, batch.epoch, batch.number + 1, batch.count, log);
        if (batch.number % ACCUMULATE == ACCUMULATE - 1)
            DP_CHECK(dp_stop_requested(ctx, out_stop));
        if (saver != NULL && (*out_stop || (batch.number + 1) % KEPT_EVERY == 0))
            keep(batch.epoch * progress.step_count + batch.number + 1);
    }
    dp_scope_end(scope);
    return !batch.ended;
}

/* Each process looks at its part of the pictures; all get to know how all of them went. */
static double percent_right(void)
{
    int first = TESTED * info.process / info.process_count;
    int count = TESTED * (info.process + 1) / info.process_count - first;
    int64_t seen[2] = {0, count};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value image = dp_array(scope, pictures[first], DP_F32, DP_SHAPE(count, PIXELS)), out;
    dp_value label = dp_array(scope, &labels[first], DP_I64, DP_SHAPE(count));
    DP_CHECK(dp_predict_step(par, scope, DP_DICT(scope, {"image", image}, {"label", label}), &out));
    for (int i = 0; i < info.local_count; i++) {
        const dp_tensor *own;
        dp_value part = dp_part_of(ctx, out, i);
        if (part.kind == DP_NONE) /* there are fewer pictures than devices */
            continue;
        DP_CHECK(dp_as_tensor(dp_get(part, "right"), "right", DP_F32, 1, &own));
        for (int64_t k = 0; k < own->shape[0]; k++)
            seen[0] += ((const float *)own->data)[k] > 0;
    }
    dp_scope_end(scope);
    DP_CHECK(dp_all_reduce_i64(ctx, seen, 2, DP_OP_SUM));
    return 100.0 * (double)seen[0] / (double)seen[1];
}

static void report(bool stopped)
{
    dp_optim_info steps;
    DP_CHECK(dp_optim_info_get(optim, &steps));
    double right = stopped ? 0 : percent_right(), averaged = 0;
    if (!stopped) {
        DP_CHECK(dp_average_begin(average));
        averaged = percent_right();
    }
    if (dp_rank(ctx) == 0 && stopped)
        printf("stopped after %d steps\n", (int)steps.step_count);
    else if (dp_rank(ctx) == 0)
        printf("%d steps: %.0f %% right, %.0f %% by the averaged parameters\n",
               (int)steps.step_count, right, averaged);
}

int main(int argc, char **argv)
{
    const char *file = argc > 1 ? argv[1] : NULL;
    dp_loader_info at;
    bool stop = false;
    DP_CHECK(dp_stop_on_signal(SIGTERM));
    load_pictures();
    DP_CHECK(dp_open(NULL, &ctx));
    DP_CHECK(dp_info_get(ctx, &info));
    create(file);
    if (saver != NULL)
        go_on(file);
    DP_CHECK(dp_loader_info_get(loader, &at));
    progress.step_count = at.batch_count;
    for (int64_t epoch = at.epoch; epoch < EPOCHS && !stop;)
        epoch += !train(&stop);
    dp_progress_end(&progress);
    if (saver != NULL)
        DP_CHECK(dp_saver_wait(saver));
    report(stop);
    dp_close(ctx);
    return 0;
}
