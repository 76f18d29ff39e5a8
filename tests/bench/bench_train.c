/* bench_train.c - C15: optimizers of dp_train.h on CPU devices. */

#include <stdio.h>
#include <stdlib.h>
#include "bench.h"
/* clang-format off */
#include "../../dp_train.h"
/* clang-format on */

/* A step of dp.h's makes gradients zero, too, as the next backward adds to them; so does the limit.
   torch forgets its gradients instead, and its backward makes new ones. */
enum { PARAMS = 2, STEPPED = 25 << 20 }; /* floats: 100 MiB */

typedef struct stepping {
    dp_module *module;
    dp_optim *optim;
    team *team;
    step_job job;
    bool clips;
} stepping;

static double step_once(void *user)
{
    const stepping *s = user;
    for (size_t i = 0; i < PARAMS; i++) {
        dp_tensor data, grad; /* whoever is given a gradient has used it */
        must(dp_params_edit(s->module, i, &data, &grad));
    }
    double start = now_ns();
    must(dp_optim_step(s->optim));
    return now_ns() - start;
}

static double plain_step_once(void *user)
{
    stepping *s = user;
    team_wake(s->team);
    double start = now_ns();
    if (s->clips)
        team_run(s->team, squares_part, &s->job);
    team_run(s->team, step_part, &s->job);
    double spent = now_ns() - start;
    team_sleep(s->team);
    return spent;
}

static dp_module *stepped_module(dp_ctx *ctx)
{
    const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {STEPPED - 1000}},
                                      {.name = "b", .ndim = 1, .shape = {1000}}};
    dp_module *module = NULL;
    must(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "stepped", .params = params, .param_count = PARAMS, .packed = true},
        &module));
    return module;
}

static void report_step(dp_ctx *ctx, const char *what, const char *torch, dp_optim_config config)
{
    char row[80];
    dp_info info;
    must(dp_info_get(ctx, &info));
    dp_module *module = stepped_module(ctx);
    stepping s = {.module = module, .clips = config.clip.norm > 0};
    s.team = team_new(info.core_count < MAX_DEVICES ? info.core_count : MAX_DEVICES);
    s.job = (step_job){.count = STEPPED, .adam = config.rule == dp_adamw()};
    for (int i = 0; i < 4; i++)
        s.job.data[i] = new_floats(STEPPED * sizeof(float));
    must(dp_optim_create(module, &config, &s.optim));
    must(dp_optim_step(s.optim));
    question asked = {"torch_optim", torch, STEPPED, 1},
             other = {"torch_other_optim", torch, STEPPED, 1};
    entrant e[] = {{.once = step_once, .user = &s},
                   {.once = peer_once, .user = &asked},
                   {.once = plain_step_once, .user = &s},
                   {.once = peer_once, .user = &other}};
    take_turns(e, bench.torch != NULL ? 4 : 3);
    snprintf(row, sizeof row, "C15 %s, 100 MiB, over its limit", what);
    report_speed(row, &e[0].times, NULL, &e[2].times, 0.85);
    snprintf(row, sizeof row, "C15 %s, 100 MiB, over torch", what);
    report_speed(row, &e[0].times, &e[1].times, NULL, 1);
    if (bench.torch != NULL) {
        snprintf(row, sizeof row, "C15 %s, over %.20s", what, peer_library(other.peer));
        report_speed(row, &e[0].times, &e[3].times, NULL, 1);
    }
    dp_optim_destroy(s.optim);
    must(dp_module_destroy(module));
    team_free(s.team);
    for (int i = 0; i < 4; i++)
        free(s.job.data[i]);
}

void rows_c15(void)
{
    dp_ctx *ctx = open_devices(2);
    const dp_hyper sgd = {.lr = 1e-6, .momentum = 0.9}, adam = {.lr = 1e-6, .weight_decay = 0.1};
    report_step(ctx, "SGD with momentum", "sgd", (dp_optim_config){.hyper = sgd});
    report_step(ctx, "AdamW", "adamw", (dp_optim_config){.rule = dp_adamw(), .hyper = adam});
    report_step(ctx, "the same, clipped by norm", "sgd_clipped",
                (dp_optim_config){.hyper = sgd, .clip = {.norm = 1}});
    dp_close(ctx);
}
