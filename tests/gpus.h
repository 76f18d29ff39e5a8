/* gpus.h - what a test asks of GPUs that may also be compiled without them. */

#ifndef GPUS_H
#define GPUS_H

#if defined(TEST_CUDA)
#include "cuda_device.h"
#else
static inline void cuda_processes(void)
{
}

static inline void cuda_check_leaks(void)
{
}
#endif

#endif /* GPUS_H */
