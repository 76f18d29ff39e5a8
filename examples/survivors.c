/* survivors.c - two of four processes are killed while they train. The others go on without them,
   and each picture of the epoch counts once.

   Whoever starts the processes must not end the rest when one dies: main and srun
   --kill-on-bad-exit=0 do not; dp_spawn, mpirun and torchrun do.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/survivors.c dp.o -o survivors -lpthread -lm
   Prints:
   without process 0: 3 go on, 1024 pictures are done
   without process 1: 2 go on, 2560 pictures are done
   after 4096 pictures, each once, all have the same parameters; loss ...
   2 of 4 processes came to the end */

#define _DEFAULT_SOURCE /* for fork, setenv */
#include "training.h"   /* ctx, par, optim, loader, done; create_training, step, share */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROCESSES = 4 };

/* With those that are left. */
static dp_status go_on(void)
{
    dp_failure_info why;
    int lost = dp_failure(ctx, &why) ? why.rank : -1;
    DP_TRY(dp_recover(ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = share(scope);
    dp_scope_end(scope);
    if (status == DP_OK && dp_rank(ctx) == 0)
        printf("without process %d: %d go on, %d pictures are done\n", lost, dp_rank_count(ctx),
               (int)done[0]);
    return status;
}

static dp_status train(int process)
{
    DP_TRY(create_training());
    while (done[0] < PICTURES) {
        if ((process == 0 && done[0] == 1024) || (process == 2 && done[0] == 2560))
            raise(SIGKILL);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_status status = step(scope);
        dp_scope_end(scope);
        while (status != DP_OK && dp_failure(ctx, NULL))
            status = go_on();
        DP_TRY(status);
    }
    DP_TRY(dp_params_compare(par));
    if (dp_rank(ctx) == 0)
        printf("after %d pictures, each %s, all have the same parameters; loss %.2f\n",
               (int)done[0], each_once() ? "once" : "not once", loss);
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
