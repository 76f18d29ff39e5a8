/* nccl.c - the real NCCL, on a machine that may have no GPU: it is found and new enough, and a
   context opens without a call to it. */

#define DP_IMPLEMENTATION
#define DP_USE_NCCL
#include "../../dp.h"
#include <stdio.h>

int main(void)
{
    char text[512];
    dp_ctx *ctx = NULL;
    dp_info info;
    int version = dp_nccl_version(text, sizeof text);
    if (version == 0 || dp_open(NULL, &ctx) != DP_OK || dp_info_get(ctx, &info) != DP_OK) {
        fprintf(stderr, "%s; %s\n", text, dp_last_error());
        return 1;
    }
    printf("NCCL %d (%s), %d devices of %s\n", version, text, info.local_count,
           info.device_backend);
    dp_close(ctx);
    return 0;
}
