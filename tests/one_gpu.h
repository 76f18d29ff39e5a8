/* one_gpu.h - jobs of several processes that share GPU 0, over the real NCCL. A test without it, or
   where NCCL does not do that, is skipped. */

#ifndef ONE_GPU_H
#define ONE_GPU_H

#include "../dp_nccl.h"
#include "cuda_device.h"
#include "meeting.h"

static char *one_gpu_reason; /* why NCCL does not do it */

/* NULL, and the reason: it does not. */
static inline dp_ctx *one_gpu_open(meeting *m, int timeout_ms)
{
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    cuda_device_first(m->process);
    config.colls = (const dp_coll_ops *const[]){dp_nccl_coll(), NULL};
    config.backends = (const dp_device_ops *const[]){dp_cuda(), NULL};
    config.timeout_ms = timeout_ms;
    if (dp_open(&config, &ctx) != DP_OK)
        snprintf(one_gpu_reason, 200, "%.199s", dp_last_error());
    return ctx;
}

/* The process returns at once where one_gpu_open gives NULL. */
static inline void on_one_gpu(int process_count, void (*process)(meeting *m))
{
    cuda_processes();
    one_gpu_reason = shared_memory(200);
    in_processes(process_count, process);
    if (one_gpu_reason[0] != '\0')
        SKIP(one_gpu_reason);
}

#endif /* ONE_GPU_H */
