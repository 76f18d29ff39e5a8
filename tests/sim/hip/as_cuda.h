/* as_cuda.h - after the implementation of dp_hip.h: tests of dp_cuda.h are linked to it under the
   names that they know. */

#ifndef SIM_HIP_AS_CUDA_H
#define SIM_HIP_AS_CUDA_H

struct CUstream_st; /* what the simulator makes is both */

const dp_device_ops *dp_cuda(void)
{
    return dp_hip();
}

const dp_coll_ops *dp_cuda_coll(void)
{
    return dp_hip_coll();
}

struct CUstream_st *dp_cuda_stream(const dp_stream *stream)
{
    return (struct CUstream_st *)dp_hip_stream(stream);
}

int dp_cuda_ordinal(const dp_stream *stream)
{
    return dp_hip_ordinal(stream);
}

dp_status dp_cuda_adopt(dp_ctx *ctx, int local_rank, struct CUstream_st *native, dp_stream **out)
{
    return dp_hip_adopt(ctx, local_rank, (struct ihipStream_t *)native, out);
}

void dp_cuda_release(dp_stream *stream)
{
    dp_hip_release(stream);
}

const dp_coll_ops *dp_nccl_coll(void)
{
    return dp_rccl_coll();
}

int dp_nccl_version(char *text, size_t bytes)
{
    return dp_rccl_version(text, bytes);
}

#endif /* SIM_HIP_AS_CUDA_H */
