/* survivors.c - one of three processes is killed; the others go on without it.

   After a failure of the job only dp_close is left, and then dp_open: those that live are a job of
   their own. Each has kept the parameters of some good step; dp_distributed gives them those of
   process 0, and one broadcast says which step that was. The batch is cut into fewer parts.

   dp_failure names the rank that failed, the same one everywhere: so all know who is left and which
   number each has now, and tell dp_open by the environment. Whoever starts them must not end the
   rest when one dies: main and srun --kill-on-bad-exit=0 do not, dp_spawn, mpirun and torchrun do.
   With several machines DP_ADDR has to be a port on that of the new process 0.

   Build: cc -std=c11 -O2 examples/survivors.c -o survivors -lpthread -lm
   Prints:
   3 processes, from step 0
   lost process 1: dp_train_step: ...rank 1 (process 1, pid ...) has died...
   2 processes, from step 16
   after 40 steps all have the same parameters
   2 of 3 processes came to the end */

#define DP_IMPLEMENTATION
#include "../dp.h"
#include "mlp.h"
#include "pictures.h"
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

enum { PROCESSES = 3, KILLED = 1, KILLED_AT = 20, SAVE = 8, STEPS = 40, BATCH = 96, HIDDEN = 128 };

static struct checkpoint { /* of this process, in its own memory */
    int64_t step;
    float params[(PIXELS + 1) * HIDDEN + (HIDDEN + 1) * CLASSES];
} saved;

static dp_status copy_params(dp_module *net, bool back)
{
    float *at = saved.params;
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        dp_param_info param;
        DP_TRY(dp_module_param(net, i, &param));
        size_t count = (size_t)dp_tensor_count(&param.data), bytes = count * sizeof *at;
        DP_TRY(back ? dp_params_write(net, i, at, bytes)
                    : dp_read(dp_module_ctx(net), &param.data, at, bytes));
        at += count;
    }
    return DP_OK;
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

static dp_status train_step(dp_module *par, const dp_info *info, int64_t step)
{
    static const dp_optim_ops ops = {.size = sizeof ops, .update = update};
    dp_optim sgd = {&ops};
    int own = BATCH / info->process_count;
    int first = (int)(step % (PICTURES / BATCH)) * BATCH + info->process * own;
    dp_scope *scope = dp_scope_begin(dp_module_ctx(par));
    dp_value image = dp_array(scope, pictures[first], DP_F32, DP_SHAPE(own, PIXELS));
    dp_value label = dp_array(scope, &labels[first], DP_I64, DP_SHAPE(own));
    dp_value log, batch = DP_DICT(scope, {"image", image}, {"label", label});
    dp_status status = dp_train_step(par, scope, batch, &sgd, &log);
    dp_scope_end(scope);
    return status;
}

/* From the checkpoint of process 0 to the end. */
static dp_status train(dp_ctx *ctx)
{
    static const mlp shape = {PIXELS, HIDDEN, CLASSES};
    const dp_distributed_config config = {.reduction = DP_MEAN_SAMPLES};
    int64_t step = saved.step; /* that of process 0 may be another: it may have saved one more */
    dp_info info;
    dp_module *net, *par;
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(mlp_create(ctx, &shape, &net));
    DP_TRY(step > 0 ? copy_params(net, true) : DP_OK);
    DP_TRY(dp_distributed(net, &config, &par));
    DP_TRY(dp_broadcast_i64(ctx, &step, 1, 0));
    if (info.process == 0)
        printf("%d processes, from step %d\n", info.process_count, (int)step);
    for (; step < STEPS; step++) {
        if (step % SAVE == 0) {
            DP_TRY(copy_params(net, false));
            saved.step = step;
        }
        if (step == KILLED_AT && info.process == KILLED && info.process_count == PROCESSES)
            raise(SIGKILL);
        DP_TRY(train_step(par, &info, step));
    }
    DP_TRY(dp_params_compare(par));
    if (info.process == 0)
        printf("after %d steps all have the same parameters\n", STEPS);
    return DP_OK;
}

/* What a launcher would say. A job has a place of its own to meet, or it would be an older one. */
static void say_who(int process, int count)
{
    char number[16], of[16], place[48];
    snprintf(number, sizeof number, "%d", process);
    snprintf(of, sizeof of, "%d", count);
    snprintf(place, sizeof place, "@survivors-%d-%d", (int)getppid(), count);
    setenv("DP_LAUNCH", "dp", 1);
    setenv("DP_PROCESS", number, 1);
    setenv("DP_PROCESS_COUNT", of, 1);
    setenv("DP_ADDR", place, 1);
}

static dp_status train_with_those_left(int process, int count)
{
    for (;;) {
        dp_ctx *ctx;
        dp_failure_info failure;
        say_who(process, count);
        DP_TRY(dp_open(&(dp_config){.device_count = 1}, &ctx)); /* so a process is a rank */
        dp_status status = train(ctx);
        bool lost = status != DP_OK && dp_failure(ctx, &failure) && failure.rank != process;
        process -= lost && process > failure.rank;
        count -= lost;
        if (lost && process == 0)
            printf("lost process %d: %s\n", failure.rank, failure.text);
        dp_close(ctx);
        if (!lost)
            return status;
    }
}

int main(void)
{
    int done = 0, how;
    setvbuf(stdout, NULL, _IOLBF, 0); /* what is not written dies with its process */
    load_pictures();
    for (int process = 0; process < PROCESSES; process++)
        if (fork() == 0) {
            DP_CHECK(train_with_those_left(process, PROCESSES));
            return 0;
        }
    while (wait(&how) > 0)
        done += WIFEXITED(how) && WEXITSTATUS(how) == 0;
    printf("%d of %d processes came to the end\n", done, PROCESSES);
    return done == PROCESSES - 1 ? 0 : 1;
}
