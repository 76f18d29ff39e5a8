/* elastic.c - two of four processes are killed while they train. The others go on, dprun starts
   them again, and they join. Each picture of an epoch counts once.

   Build: cc -std=c11 -O2 examples/elastic.c -o elastic -lpthread -lm
   Run:   ./dprun -n 4 --respawn 8 ./elastic
   Prints:
   [0] epoch 0: 4096 pictures, each once; all have the same parameters; loss ...
   [0] epoch 1: 4096 pictures, each once; all have the same parameters; loss ...
   [0] epoch 2: 4096 pictures, each once; all have the same parameters; loss ... */

#define DP_IMPLEMENTATION
#include "../dp_save.h"
#include "training.h" /* ctx, par, optim, loader: create_training makes them */
#include <signal.h>
#include <stdlib.h>

enum { MEMBERS = 4, EPOCHS = 3 };
static int64_t done[2]; /* by all: pictures, and the sum of their numbers. -1: nothing yet */

/* What the process that is furthest has becomes that of all. */
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

/* A step of all. changed: other processes have come or gone since the last one. */
static dp_status train(dp_scope *scope, bool changed)
{
    dp_batch batch;
    dp_value log;
    int64_t step[2];
    if (!changed)
        DP_TRY(dp_admit(ctx, &changed));
    if (changed)
        DP_TRY(share(scope));
    if (done[0] % PICTURES == 0 && dp_rank_count(ctx) < MEMBERS)
        return DP_OK;                              /* an epoch begins with all of them */
    DP_TRY(dp_loader_next(loader, scope, &batch)); /* the last one of some may be empty */
    DP_TRY(count_pictures(&batch, step));
    DP_TRY(dp_train_step(par, scope, batch.value, optim, &log));
    done[0] += step[0];
    done[1] += step[1];
    DP_TRY(note_loss(log));
    if (done[0] % PICTURES > 0)
        return DP_OK;
    DP_TRY(dp_params_compare(par));
    if (dp_rank(ctx) == 0)
        printf("epoch %d: %d pictures, %s; all have the same parameters; loss %.2f\n",
               (int)(done[0] / PICTURES) - 1, PICTURES,
               done[1] == done[0] * (PICTURES - 1) / 2 ? "each once" : "but not each once", loss);
    return dp_loader_resume(loader, done[0] / PICTURES, 0);
}

int main(void)
{
    bool again = getenv("DP_REJOIN") != NULL, changed = again;
    DP_CHECK(create_training());
    done[0] = again ? -1 : 0;
    while (done[0] < EPOCHS * PICTURES) {
        int rank = again ? 0 : dp_rank(ctx);
        if ((rank == 3 && done[0] > 1000) || (rank == 2 && done[0] > 5000))
            raise(SIGKILL);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_status status = train(scope, changed);
        dp_scope_end(scope);
        changed = status != DP_OK && dp_failure(ctx, NULL);
        DP_CHECK(changed ? dp_recover(ctx) : status);
    }
    dp_close(ctx);
    return 0;
}
