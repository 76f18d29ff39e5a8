/* steps.c - a job that counts its steps, keeps the count in a checkpoint after each, and goes on
   until there is a file FOLDER/enough. What is asked of it by tests/slurm/slurm.sh:

   steps FOLDER */

#define DP_IMPLEMENTATION
#include "../../dp_save.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void keep(dp_ctx *ctx, const char *file, int64_t step)
{
    dp_scope *scope = dp_scope_begin(ctx);
    DP_CHECK(dp_checkpoint_save(ctx, file, DP_DICT(scope, {"step", dp_int(step)})));
    dp_scope_end(scope);
}

static int64_t kept(dp_ctx *ctx, const char *file)
{
    int64_t step = 0;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value all;
    dp_status status = dp_checkpoint_load(ctx, scope, file, &all);
    if (status != DP_ERR_NO_FILE) {
        DP_CHECK(status);
        step = dp_get(all, "step").as.i;
    }
    dp_scope_end(scope);
    return step;
}

int main(int argc, char **argv)
{
    char file[300], enough[300], host[100] = "";
    dp_ctx *ctx;
    dp_info info;
    int64_t ended = 0;
    if (argc != 2)
        return 2;
    snprintf(file, sizeof file, "%s/steps.dp", argv[1]);
    snprintf(enough, sizeof enough, "%s/enough", argv[1]);
    gethostname(host, sizeof host - 1);
    setvbuf(stdout, NULL, _IOLBF, 0);
    DP_CHECK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    DP_CHECK(dp_info_get(ctx, &info));
    int64_t step = kept(ctx, file);
    printf("process %d of %d on %s by %s is %d, from step %lld\n", info.process, info.process_count,
           host, info.launcher, (int)getpid(), (long long)step);
    while (ended == 0) {
        float n = (float)info.process + 1;
        const dp_part part = {.send = &n, .recv = &n};
        const float want = (float)(info.process_count * (info.process_count + 1)) / 2;
        DP_CHECK(dp_all_reduce(ctx, &part, 1, DP_F32, DP_OP_SUM));
        DP_CHECK(n == want ? DP_OK : dp_error(DP_ERR_USER, "the sum is %g", (double)n));
        keep(ctx, file, ++step);
        printf("step %lld\n", (long long)step);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        ended = info.process == 0 && access(enough, F_OK) == 0;
        DP_CHECK(dp_all_reduce_i64(ctx, &ended, 1, DP_OP_MAX));
    }
    printf("ended after step %lld\n", (long long)step);
    dp_close(ctx);
    return EXIT_SUCCESS;
}
