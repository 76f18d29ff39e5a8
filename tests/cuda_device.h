/* cuda_device.h - CUDA devices for tests: the simulator's. */

#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include "../dp_cuda.h"
#include "sim/sim.h"

/* The table, when that many GPUs are there. Without this call there are none, so that a test that
   asks for no backend gets the CPU. */
static inline const dp_device_ops *cuda_device(int count)
{
    sim_set_device_count(count);
    return dp_cuda();
}

#endif /* CUDA_DEVICE_H */
