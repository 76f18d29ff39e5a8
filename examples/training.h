/* training.h - what survivors.c and elastic.c train: the net of mlp.h, to tell the pictures of
   pictures.h. A batch of each process makes a step, and each picture of an epoch counts once,
   whoever dies or comes. */

#ifndef TRAINING_H
#define TRAINING_H

#include "../dp_data.h"
#include "../dp_save.h"
#include "../dp_train.h"
#include "mlp.h"
#include "pictures.h"
#include <string.h>

static dp_ctx *ctx;
static dp_module *par;
static dp_optim *optim;
static dp_loader *loader;
static double loss = 2.3; /* of many steps of this process */
static int64_t done[2];   /* by all: pictures, and the sum of their numbers. -1: nothing yet */

static dp_status read_picture(dp_sample *sample, void *user)
{
    (void)user;
    memcpy(sample->rows[0], pictures[sample->index], sizeof pictures[0]);
    *(int64_t *)sample->rows[1] = labels[sample->index];
    return DP_OK;
}

static dp_status create_training(void)
{
    static const mlp shape = {PIXELS, 128, CLASSES};
    const dp_optim_config momentum = {.hyper = {.lr = 0.1, .momentum = 0.9}};
    const dp_field fields[] = {{"image", DP_F32, 1, {PIXELS}}, {"label", DP_I64, 0, {0}}};
    const dp_loader_config batches = {.sampler = {.count = PICTURES, .sampling = DP_SAMPLE_EXACT},
                                      .batch = 32,
                                      .read = read_picture,
                                      .fields = fields,
                                      .field_count = 2};
    dp_module *net;
    load_pictures();
    DP_TRY(dp_open(&(dp_config){.device_count = 1, .recovers = true}, &ctx));
    DP_TRY(mlp_create(ctx, &shape, &net));
    DP_TRY(dp_distributed(net, &(dp_distributed_config){.reduction = DP_MEAN_SAMPLES}, &par));
    DP_TRY(dp_optim_create(par, &momentum, &optim));
    return dp_loader_create(ctx, &batches, &loader);
}

/* Of a step of all: how many pictures it has, and the sum of their numbers. */
static dp_status count_pictures(const dp_batch *batch, int64_t out[2])
{
    out[0] = batch->count;
    out[1] = 0;
    for (int64_t i = 0; i < batch->count; i++)
        out[1] += batch->indices[i];
    return dp_all_reduce_i64(ctx, out, 2, DP_OP_SUM);
}

/* The log of a step without pictures is none. */
static dp_status note_loss(dp_value log)
{
    double now = loss;
    if (log.kind != DP_NONE)
        DP_TRY(dp_item(ctx, dp_get(log, "loss"), &now));
    loss += (now - loss) / 16;
    return DP_OK;
}

/* A batch of each process. Some have their last one when others have one more. */
static dp_status step(dp_scope *scope)
{
    dp_batch batch;
    dp_value log;
    int64_t counts[2];
    DP_TRY(dp_loader_next(loader, scope, &batch));
    DP_TRY(count_pictures(&batch, counts));
    DP_TRY(dp_train_step(par, scope, batch.value, optim, &log));
    done[0] += counts[0];
    done[1] += counts[1];
    return note_loss(log);
}

/* What the process that is furthest has becomes that of all, and what is left of its epoch is dealt
   anew. */
static dp_status share(dp_scope *scope)
{
    dp_value model, state, all, counts = dp_array(scope, done, DP_I64, DP_SHAPE(2));
    DP_TRY(dp_module_save(par, scope, &model));
    DP_TRY(dp_optim_save(optim, scope, &state));
    dp_value own = DP_DICT(scope, {"model", model}, {"optim", state}, {"done", counts});
    DP_TRY(dp_checkpoint_share(ctx, scope, done[0], own, &all));
    DP_TRY(dp_module_load(par, dp_get(all, "model"), NULL));
    DP_TRY(dp_optim_load(optim, dp_get(all, "optim")));
    memcpy(done, dp_get(all, "done").as.t->data, sizeof done);
    DP_TRY(dp_loader_resume(loader, done[0] / PICTURES, done[0] % PICTURES));
    return dp_params_compare(par);
}

/* Of all that are done. */
static bool each_once(void)
{
    return done[1] == done[0] * (PICTURES - 1) / 2;
}

#endif /* TRAINING_H */
