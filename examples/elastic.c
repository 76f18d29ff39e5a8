/* elastic.c - two of four processes are killed while they train. The others go on, dprun starts
   them again, and they join. Each picture of an epoch counts once.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/elastic.c dp.o -o elastic -lpthread -lm
   Run:   ./dprun -n 4 --respawn 8 ./elastic
   Prints:
   [0] epoch 0: 4096 pictures, each once; all have the same parameters; loss ...
   [0] epoch 1: 4096 pictures, each once; all have the same parameters; loss ...
   [0] epoch 2: 4096 pictures, each once; all have the same parameters; loss ... */

#include "training.h" /* ctx, par, optim, loader, done; create_training, step, share */
#include <signal.h>
#include <stdlib.h>

enum { MEMBERS = 4, EPOCHS = 3 };

/* A step of all. changed: other processes have come or gone since the last one. */
static dp_status train(dp_scope *scope, bool changed)
{
    if (!changed)
        DP_TRY(dp_admit(ctx, &changed));
    if (changed)
        DP_TRY(share(scope));
    if (done[0] % PICTURES == 0 && dp_rank_count(ctx) < MEMBERS)
        return DP_OK; /* an epoch begins with all of them */
    DP_TRY(step(scope));
    if (done[0] % PICTURES > 0)
        return DP_OK;
    DP_TRY(dp_params_compare(par));
    if (dp_rank(ctx) == 0)
        printf("epoch %d: %d pictures, %s; all have the same parameters; loss %.2f\n",
               (int)(done[0] / PICTURES) - 1, PICTURES,
               each_once() ? "each once" : "but not each once", loss);
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
