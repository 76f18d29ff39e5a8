/* spawn.c - four processes on one machine, without a launcher: each opens the job it is part of.

   The same `work` runs on many machines if a launcher starts the program there, and main calls it
   instead: mpirun, srun, torchrun --no_python.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 examples/spawn.c dp.o -o spawn -lpthread -lm
   Prints:
   rank 0 of 4: the sum over all processes is 10
   one that fails: dp_spawn: process 2 of 4: no more paper */

#include "../dp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dp_status work(void *user) /* in a process of its own */
{
    dp_ctx *ctx;
    double number;
    (void)user;
    DP_TRY(dp_open(&(dp_config){.device_count = 1}, &ctx)); /* its environment says who it is */
    number = dp_rank(ctx) + 1;
    DP_TRY(dp_all_reduce_f64(ctx, &number, 1, DP_OP_SUM));
    if (dp_rank(ctx) == 0)
        printf("rank 0 of %d: the sum over all processes is %g\n", dp_rank_count(ctx), number);
    dp_close(ctx);
    return DP_OK;
}

static dp_status print(void *user)
{
    const char *process = getenv("DP_PROCESS");
    (void)user;
    return strcmp(process, "2") == 0 ? dp_error(DP_ERR_USER, "no more paper") : DP_OK;
}

int main(void)
{
    DP_CHECK(dp_spawn(4, work, NULL));
    if (dp_spawn(4, print, NULL) != DP_OK)
        printf("one that fails: %s\n", dp_last_error());
    return 0;
}
