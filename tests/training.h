/* training.h - a small model that is trained, saved and loaded: AdamW, and steps that are the same
   however many ranks there are. */

#ifndef TRAINING_H
#define TRAINING_H

#include "nets.h"
#include "../dp_save.h"
#include "../dp_train.h"

typedef struct training {
    dp_ctx *ctx;
    dp_module *par;
    dp_optim *optim;
} training;

static inline training train_begin(dp_ctx *ctx, bool sharded, bool shared)
{
    static const net_shape shape = {0};
    training t = {.ctx = ctx};
    CHECK_OK(dp_distributed(
        net_create(ctx, &shape, 0),
        &(dp_distributed_config){.reduction = DP_SUM_RANKS, .share_params = shared}, &t.par));
    CHECK_OK(dp_optim_create(
        t.par, &(dp_optim_config){.rule = dp_adamw(), .hyper = {.lr = 0.01}, .sharded = sharded},
        &t.optim));
    return t;
}

static inline void train_steps(const training *t, int first, int last)
{
    dp_info info;
    CHECK_OK(dp_info_get(t->ctx, &info));
    for (int step = first; step < last; step++) {
        dp_scope *scope = dp_scope_begin(t->ctx);
        dp_pass *pass = NULL;
        dp_value out, rows = net_rows_of(scope, &info, step);
        CHECK_OK(dp_invoke(t->par, scope, "forward", rows, dp_none(), NULL, &out, &pass));
        CHECK_OK(dp_backward(pass, dp_float(0.125), NULL));
        CHECK_OK(dp_optim_step(t->optim));
        CHECK_OK(dp_wait(t->ctx));
        dp_scope_end(scope);
    }
}

/* With copies of the optimizer's state (dp_optim_save), or views of it (dp_optim_view). */
static inline dp_value train_value(const training *t, dp_scope *scope, int64_t epoch,
                                   dp_status (*save)(dp_optim *, dp_scope *, dp_value *))
{
    dp_value model, state;
    CHECK_OK(dp_module_save(t->par, scope, &model));
    CHECK_OK(save(t->optim, scope, &state));
    return DP_DICT(scope, {"model", model}, {"optim", state}, {"epoch", dp_int(epoch)});
}

static inline void train_save(const training *t, const char *path, int64_t epoch)
{
    dp_scope *scope = dp_scope_begin(t->ctx);
    CHECK_OK(dp_checkpoint_save(t->ctx, path, train_value(t, scope, epoch, dp_optim_save)));
    dp_scope_end(scope);
}

/* From what was saved: its epoch. */
static inline int64_t train_go_on(const training *t, dp_value saved)
{
    CHECK_OK(dp_module_load(t->par, dp_get(saved, "model"), NULL));
    CHECK_OK(dp_optim_load(t->optim, dp_get(saved, "optim")));
    return dp_get(saved, "epoch").as.i;
}

static inline int64_t train_load(const training *t, const char *path)
{
    dp_scope *scope = dp_scope_begin(t->ctx);
    dp_value saved;
    CHECK_OK(dp_checkpoint_load(t->ctx, scope, path, &saved));
    int64_t epoch = train_go_on(t, saved);
    dp_scope_end(scope);
    return epoch;
}

#endif /* TRAINING_H */
