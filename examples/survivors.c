/* survivors.c - two of four processes are killed while they train. The others go on without them,
   and each picture of the epoch counts once.

   Whoever starts the processes must not end the rest when one dies: main and srun
   --kill-on-bad-exit=0 do not; dp_spawn, mpirun and torchrun do.

   Build: cc -std=c11 -O2 examples/survivors.c -o survivors -lpthread -lm
   Prints:
   without process 0: 3 go on, 1024 pictures are done
   without process 1: 2 go on, 2560 pictures are done
   after 4096 pictures all have the same parameters
   2 of 4 processes came to the end */

#define DP_IMPLEMENTATION
#include "../dp_data.h"
#include "../dp_save.h"
#include "../dp_train.h"
#include "mlp.h"
#include "pictures.h"
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

enum { PROCESSES = 4, BATCH = 32, HIDDEN = 128 };
static dp_ctx *ctx;
static dp_module *par;
static dp_optim *optim;
static dp_loader *loader;
static int64_t done; /* pictures, of all processes */

static dp_status read_picture(dp_sample *sample, void *user)
{
    (void)user;
    memcpy(sample->rows[0], pictures[sample->index], sizeof pictures[0]);
    *(int64_t *)sample->rows[1] = labels[sample->index];
    return DP_OK;
}

static dp_status create(void)
{
    static const mlp shape = {PIXELS, HIDDEN, CLASSES};
    const dp_field fields[] = {{"image", DP_F32, 1, {PIXELS}}, {"label", DP_I64, 0, {0}}};
    const dp_loader_config batches = {.sampler = {.count = PICTURES, .sampling = DP_SAMPLE_EXACT},
                                      .batch = BATCH,
                                      .read = read_picture,
                                      .fields = fields,
                                      .field_count = 2,
                                      .epoch_count = 1};
    dp_module *net;
    DP_TRY(dp_open(&(dp_config){.device_count = 1, .recovers = true}, &ctx));
    DP_TRY(mlp_create(ctx, &shape, &net));
    DP_TRY(dp_distributed(net, &(dp_distributed_config){.reduction = DP_MEAN_SAMPLES}, &par));
    DP_TRY(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 0.1, .momentum = 0.9}}, &optim));
    return dp_loader_create(ctx, &batches, &loader);
}

/* A batch of each process. Some may have one less; without any the epoch has ended. */
static dp_status step(dp_scope *scope, bool *out_end)
{
    dp_batch batch;
    dp_value log;
    DP_TRY(dp_loader_next(loader, scope, &batch));
    int64_t count = batch.count;
    DP_TRY(dp_all_reduce_i64(ctx, &count, 1, DP_OP_SUM));
    *out_end = count == 0;
    if (!*out_end)
        DP_TRY(dp_train_step(par, scope, batch.value, optim, &log));
    done += count;
    return DP_OK;
}

/* What the one has that is furthest becomes that of all. */
static dp_status share(dp_scope *scope)
{
    dp_value model, state, place, all;
    DP_TRY(dp_module_save(par, scope, &model));
    DP_TRY(dp_optim_save(optim, scope, &state));
    DP_TRY(dp_loader_save(loader, scope, &place));
    dp_value own = DP_DICT(scope, {"model", model}, {"optim", state}, {"loader", place},
                           {"done", dp_int(done)});
    DP_TRY(dp_checkpoint_share(ctx, scope, done, own, &all));
    DP_TRY(dp_module_load(par, dp_get(all, "model"), NULL));
    DP_TRY(dp_optim_load(optim, dp_get(all, "optim")));
    DP_TRY(dp_loader_load(loader, dp_get(all, "loader"))); /* what is left is dealt anew */
    done = dp_get(all, "done").as.i;
    return DP_OK;
}

/* With those that are left. `at`: the batch that was lost. */
static dp_status go_on(const dp_loader_info *at)
{
    dp_failure_info why;
    dp_info info;
    int lost = dp_failure(ctx, &why) ? why.rank : -1;
    DP_TRY(dp_recover(ctx));
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(dp_loader_seek(loader, at->epoch, at->number));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = share(scope);
    dp_scope_end(scope);
    if (status == DP_OK && info.process == 0)
        printf("without process %d: %d go on, %d pictures are done\n", lost, info.process_count,
               (int)done);
    return status;
}

static dp_status train(int process)
{
    dp_loader_info at;
    DP_TRY(create());
    for (bool end = false; !end;) {
        if ((process == 0 && done == 1024) || (process == 2 && done == 2560))
            raise(SIGKILL);
        DP_TRY(dp_loader_info_get(loader, &at));
        dp_scope *scope = dp_scope_begin(ctx);
        dp_status status = step(scope, &end);
        dp_scope_end(scope);
        while (status != DP_OK && dp_failure(ctx, NULL))
            status = go_on(&at);
        DP_TRY(status);
    }
    DP_TRY(dp_params_compare(par));
    if (dp_rank(ctx) == 0)
        printf("after %d pictures all have the same parameters\n", (int)done);
    dp_close(ctx);
    return DP_OK;
}

static void say(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}

int main(void)
{
    int ended = 0, how;
    char place[32];
    setvbuf(stdout, NULL, _IOLBF, 0); /* what is not written dies with its process */
    load_pictures();
    snprintf(place, sizeof place, "@survivors-%d", (int)getpid());
    setenv("DP_LAUNCH", "dp", 1); /* this is a launcher */
    setenv("DP_ADDR", place, 1);
    say("DP_PROCESS_COUNT", PROCESSES);
    for (int process = 0; process < PROCESSES; process++)
        if (fork() == 0) {
            say("DP_PROCESS", process);
            DP_CHECK(train(process));
            return 0;
        }
    while (wait(&how) > 0)
        ended += WIFEXITED(how) && WEXITSTATUS(how) == 0;
    printf("%d of %d processes came to the end\n", ended, PROCESSES);
    return ended == PROCESSES - 2 ? 0 : 1;
}
