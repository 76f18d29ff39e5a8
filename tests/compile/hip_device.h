/* hip_device.h - what hiprtc declares of the device, as far as the kernels of dp_hip.h use it:
   before their text, for a clang that has no HIP beside it. */

#ifndef HIP_DEVICE_H
#define HIP_DEVICE_H

#define __global__           __attribute__((global))
#define __device__           __attribute__((device))
#define __shared__           __attribute__((shared))
#define __forceinline__      inline __attribute__((always_inline))
#define __launch_bounds__(n) __attribute__((amdgpu_flat_work_group_size(1, n)))

struct hip_place {
    unsigned x;
};
#define threadIdx (hip_place{__builtin_amdgcn_workitem_id_x()})
#define blockIdx  (hip_place{__builtin_amdgcn_workgroup_id_x()})
#define blockDim  (hip_place{__builtin_amdgcn_workgroup_size_x()})
#define gridDim   (hip_place{__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()})

#define fabsf __builtin_fabsf
#define fma   __builtin_fma
#define fmaf  __builtin_fmaf
#define fmaxf __builtin_fmaxf
#define sqrt  __builtin_sqrt
#define sqrtf __builtin_sqrtf

/* What waits in it has written, and reads what others have. */
#define __syncthreads()                                                                            \
    (__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"), __builtin_amdgcn_s_barrier(),          \
     __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"))

#endif /* HIP_DEVICE_H */
