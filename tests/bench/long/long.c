/* long.c - all-reduces of two processes, of so many MiB each, so many times:

       DP_PROCESS=0 DP_PROCESS_COUNT=2 DP_ADDR=host:port long MIB ROUNDS

   Process 0 prints how many ms each one took, after one that does not count. long.py runs both over
   a long link. */

#define DP_IMPLEMENTATION
#include "../../../dp.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

int main(int argc, char **argv)
{
    size_t count = argc == 3 ? (size_t)atoi(argv[1]) << 18 : 0;
    int rounds = argc == 3 ? atoi(argv[2]) : 0;
    float *data = calloc(count, sizeof *data);
    const dp_part part = {.send = data, .recv = data};
    dp_ctx *ctx;
    if (count == 0 || data == NULL)
        return EXIT_FAILURE;
    DP_CHECK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    for (int i = 0; i <= rounds; i++) {
        for (size_t k = 0; k < count; k++)
            data[k] = (float)(k % 1000);
        DP_CHECK(dp_barrier(ctx));
        double begun = now_ms();
        DP_CHECK(dp_all_reduce(ctx, &part, count, DP_F32, DP_OP_SUM));
        double ms = now_ms() - begun;
        for (size_t k = 0; k < count; k += 997)
            if (data[k] != 2 * (float)(k % 1000))
                return EXIT_FAILURE;
        if (dp_rank(ctx) == 0 && i > 0)
            printf("%.1f\n", ms);
    }
    dp_close(ctx);
    free(data);
    return EXIT_SUCCESS;
}
