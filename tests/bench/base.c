/* base.c - what the benchmarks share with those peers that are programs of dp.h. */

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "bench.h"

double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

void must(dp_status status)
{
    if (status == DP_OK)
        return;
    fprintf(stderr, "bench: %s: %s\n", dp_status_name(status), dp_last_error());
    exit(1);
}

dp_ctx *open_devices(int count)
{
    const int devices[MAX_DEVICES] = {0};
    dp_ctx *ctx;
    must(dp_open(&(dp_config){.device_count = count, .devices = devices}, &ctx));
    return ctx;
}

float *new_floats(size_t bytes)
{
    float *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (data == NULL)
        abort();
    for (size_t i = 0; i < bytes / sizeof(float); i++)
        data[i] = 1;
    return data;
}
