/* test_cuda_fault.c - a kernel of the user's that faults, on a real GPU: who hears of it, what they
   hear, and that nobody waits for ever. What the simulator makes of that is in test_cuda.c. */

#include "test.h"

#if defined(TEST_CUDA) && !defined(TEST_SIM)
#include "cuda_device.h"
#if defined(TEST_NCCL)
#include "one_gpu.h"
#endif

/* PTX, which the driver compiles: a store to where nothing is. */
static const char fault_text[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                                 ".visible .entry fault()\n{\n"
                                 "    .reg .b64 %rd<2>;\n    .reg .b32 %r<2>;\n"
                                 "    mov.u64 %rd1, 64;\n    mov.u32 %r1, 1;\n"
                                 "    st.global.u32 [%rd1], %r1;\n    ret;\n}\n";

static const char is_lost[] =
    ": an illegal memory access was encountered (700): the GPU is lost to "
    "this process: start a new one";

static void fault_on(const dp_stream *stream)
{
    cudaLibrary_t library;
    cudaKernel_t kernel;
    const dim3 one = {1, 1, 1};
    void *none[1] = {NULL};
    CHECK_INT(cudaSetDevice(dp_cuda_ordinal(stream)), cudaSuccess);
    CHECK_INT(cudaLibraryLoadData(&library, fault_text, NULL, NULL, 0, NULL, NULL, 0), cudaSuccess);
    CHECK_INT(cudaLibraryGetKernel(&kernel, library, "fault"), cudaSuccess);
    CHECK_INT(cudaLaunchKernel((const void *)kernel, one, one, none, 0, dp_cuda_stream(stream)),
              cudaSuccess);
}

static dp_ctx *open_two(void)
{
    static const int both[] = {0, 0};
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    dp_ctx *ctx = NULL;
    (void)cuda_device_available(1);
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 2, .devices = both}, &ctx));
    return ctx;
}

/* The job has failed, everything says so, and can be closed; the GPU stays lost. */
static void check_lost(dp_ctx *ctx)
{
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    dp_failure_info failure;
    dp_ctx *other = NULL;
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, DP_ERR_DEVICE);
    CHECK_SAYS(failure.text, is_lost);
    CHECK_STATUS(dp_wait(ctx), DP_ERR_DEVICE);
    dp_close(ctx);
    CHECK_ERROR(dp_open(&(dp_config){.backends = backends}, &other), DP_ERR_NO_DEVICE,
                "GPU 0 is lost to this process, since it faulted or hung");
    CHECK_OK(dp_open(
        &(dp_config){.backends = (const dp_device_ops *const[]){dp_cpu(), NULL}, .device_count = 2},
        &other));
    dp_close(other);
}

TEST_SLOW(a_wait_tells_of_a_fault, 60)
{
    dp_ctx *ctx = open_two();
    dp_scope *scope = dp_scope_begin(ctx);
    fault_on(dp_local_stream(ctx, 1));
    CHECK_ERROR(dp_wait(ctx), DP_ERR_DEVICE, is_lost);
    dp_scope_end(scope);
    check_lost(ctx);
}

TEST_SLOW(a_read_tells_of_a_fault, 60)
{
    float numbers[4] = {0};
    dp_tensor data, host = dp_wrap(numbers, DP_F32, DP_SHAPE(4));
    dp_ctx *ctx = open_two();
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(4), &data));
    CHECK_OK(dp_copy(ctx, &data, &host, NULL));
    fault_on(dp_local_stream(ctx, 0));
    CHECK_ERROR(dp_read(ctx, &data, numbers, sizeof numbers), DP_ERR_DEVICE, is_lost);
    dp_scope_end(scope);
    check_lost(ctx);
}

static dp_status forward(dp_call *call)
{
    if (call->local_rank == 1)
        fault_on(call->stream);
    call->out = dp_at(call->args, 0);
    return DP_OK;
}

TEST_SLOW(a_pass_tells_of_a_fault, 60)
{
    static const dp_method methods[] = {{"forward", forward}};
    float numbers[64] = {0};
    dp_module *net = NULL, *par = NULL;
    dp_value out = dp_none();
    dp_ctx *ctx = open_two();
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "faulty", .methods = methods, .method_count = 1}, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value batch = DP_LIST_OF(scope, dp_array(scope, numbers, DP_F32, DP_SHAPE(64)));
    dp_status status = dp_invoke(par, scope, "forward", batch, dp_none(), NULL, &out, NULL);
    status = status == DP_OK ? dp_wait(ctx) : status;
    CHECK_INT(status, DP_ERR_DEVICE);
    CHECK_SAYS(dp_last_error(), is_lost);
    dp_scope_end(scope);
    check_lost(ctx);
}

#if defined(TEST_NCCL)
/* Processes 0 and 2 hear of what process 1's kernel did, though NCCL waits for it. */
static void one_faults(meeting *m)
{
    dp_ctx *ctx = one_gpu_open(m, 20000);
    if (ctx == NULL)
        return;
    CHECK_OK(end_sum(ctx, 25));
    if (m->process == 1)
        fault_on(dp_local_stream(ctx, 0));
    double start = end_now_ms();
    dp_status status = end_sum(ctx, 1000000);
    CHECK_INT(status, DP_ERR_DEVICE);
    CHECK_SAYS(dp_last_error(), is_lost);
    if (m->process != 1) {
        CHECK_SAYS(dp_last_error(), "rank 1 (process 1, pid ");
        CHECK(end_now_ms() - start < END_SOON_MS * test_timeout_scale());
    }
    dp_close(ctx);
}

TEST_SLOW(other_processes_hear_of_a_fault, 120)
{
    on_one_gpu(3, one_faults);
}
#endif
#endif
