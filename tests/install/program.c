/* program.c - a program of somebody who has installed dp.h, compiled as C and as C++. */

#include <dp.h>
#include <dp_train.h>
#include <stdio.h>
#include <string.h>

/* What is declared, because a package said so, has to be in the library, too. */
#if defined(DP_USE_CUDA)
#define CUDA dp_cuda()->name
#else
#define CUDA "-"
#endif
#if defined(DP_USE_NCCL)
#define NCCL dp_nccl_coll()->name
#else
#define NCCL "-"
#endif
#if defined(DP_USE_MPI)
#define MPI dp_mpi_coll()->name
#else
#define MPI "-"
#endif

/* Returns "mirrors" if the library was compiled with dp_mirror.h, else the end of a sentence. */
static const char *mirrors(void)
{
    static dp_optim_config config;
    dp_optim *optim;
    config.sharded = config.mirrored = true;
    dp_status status = dp_optim_create(NULL, &config, &optim);
    return status == DP_ERR_UNSUPPORTED ? strstr(dp_last_error(), "dp_mirror.h") : "mirrors";
}

int main(void)
{
    static dp_config config;
    static dp_part part[3];
    float own[3] = {1, 2, 3};
    const dp_device_ops *cpu[] = {dp_cpu(), NULL};
    dp_ctx *ctx;
    dp_info info;
    config.backends = cpu;
    config.device_count = 3;
    for (int i = 0; i < 3; i++)
        part[i].send = part[i].recv = &own[i];
    DP_CHECK(dp_open(&config, &ctx));
    DP_CHECK(dp_info_get(ctx, &info));
    DP_CHECK(dp_all_reduce(ctx, part, 1, DP_F32, DP_OP_SUM));
    if (info.process == 0)
        printf("%d ranks by %s: %g %s %s %s %s %s\n", info.rank_count, info.launcher,
               (double)own[0], dp_adamw()->name, mirrors(), CUDA, NCCL, MPI);
    dp_close(ctx);
    return dp_version() == DP_VERSION ? 0 : 1;
}
