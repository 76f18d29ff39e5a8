/* test_cuda_capture.c - streams that the user captures: memory that is wanted meanwhile, other
   threads, and captures that fail half-way. What a captured collective computes is in
   test_cuda_several.c. */

#include "test.h"

#if defined(TEST_CUDA)
#include <cuda.h>
#include <pthread.h>
#include "cuda_device.h"

enum { GLOBAL = cudaStreamCaptureModeGlobal, MODES = cudaStreamCaptureModeRelaxed + 1 };
enum { SLAB = 8 << 20 }; /* floats; as much as a slab has */

static dp_ctx *open_on(int gpus)
{
    dp_ctx *ctx = NULL;
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    const dp_coll_ops *const colls[] = {dp_cuda_coll(), NULL};
    cuda_gpus(gpus);
    CHECK_OK(
        dp_open(&(dp_config){.backends = backends, .colls = colls, .device_count = gpus}, &ctx));
    return ctx;
}

static void make(dp_scope *scope, dp_ctx *ctx, int rank, int64_t count, dp_tensor *out)
{
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, rank), DP_F32, 1, &count, out));
}

static double last_of(dp_ctx *ctx, const dp_tensor *tensor)
{
    dp_tensor last;
    float number = -1;
    CHECK_OK(dp_narrow(tensor, 0, tensor->shape[0] - 1, 1, &last));
    CHECK_OK(dp_read(ctx, &last, &number, sizeof number));
    return number;
}

static cudaStream_t capture_begin(dp_ctx *ctx, int mode)
{
    cudaStream_t native = dp_cuda_stream(dp_local_stream(ctx, 0));
    CHECK_INT(cudaStreamBeginCapture(native, (enum cudaStreamCaptureMode)mode), cudaSuccess);
    return native;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Twice the last of x. Nothing of this size was there before: it is allocated in the capture. */
static cudaGraphExec_t capture_twice(dp_ctx *ctx, dp_scope *scope, const dp_tensor *x, int rank,
                                     int mode, dp_tensor *out)
{
    dp_tensor beside;
    long before = cuda_allocs();
    cudaStream_t native = capture_begin(ctx, mode);
    make(scope, ctx, rank, SLAB + 1000 * (mode + 1), &beside);
    make(scope, ctx, 0, SLAB + 1000 * (mode + 1), out);
    CHECK(cuda_allocs() == -1 || cuda_allocs() == before + 2);
    CHECK_OK(dp_axpby(ctx, 2, x, 0, NULL, out));
    return capture_end(native);
}

static void memory_in_a_capture(int gpus, int mode)
{
    dp_ctx *ctx = open_on(gpus);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y;
    make(scope, ctx, 0, SLAB + 1000 * (mode + 1), &x);
    CHECK_OK(dp_fill(ctx, &x, dp_float(1)));
    CHECK_OK(dp_wait(ctx));
    cudaGraphExec_t graph = capture_twice(ctx, scope, &x, gpus - 1, mode, &y);
    for (int i = 3; i < 5; i++) {
        CHECK_OK(dp_fill(ctx, &x, dp_float(i)));
        CHECK_INT(cudaGraphLaunch(graph, dp_cuda_stream(dp_local_stream(ctx, 0))), cudaSuccess);
        CHECK_F64(last_of(ctx, &y), 2 * i, 0);
    }
    CHECK_INT(cudaGraphExecDestroy(graph), cudaSuccess);
    dp_scope_end(scope);
    dp_close(ctx);
    cuda_check_leaks();
}

TEST_SLOW(memory_is_allocated_in_a_capture, 30)
{
    for (int mode = 0; mode < MODES; mode++)
        memory_in_a_capture(1, mode);
}

TEST_SLOW(memory_of_another_gpu_is_allocated_in_a_capture, 30)
{
    for (int mode = 0; mode < MODES; mode++)
        memory_in_a_capture(2, mode);
}

/* The first sum among three GPUs gives each a receive buffer, which their slabs cannot hold. */
static void first_sum_in_a_capture(int mode)
{
    enum { GPUS = 3, COUNT = 100003 };
    dp_ctx *ctx = open_on(GPUS);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensors[GPUS], beside;
    dp_part parts[GPUS];
    for (int r = 0; r < GPUS; r++) {
        make(scope, ctx, r, COUNT, &tensors[r]);
        for (int i = 0; i < 4; i++) /* most of the slab */
            make(scope, ctx, r, SLAB / 32 * 7, &beside);
        parts[r] = (dp_part){tensors[r].data, tensors[r].data, NULL};
        for (int from = 0; from < r; from++) { /* pairs are checked */
            CHECK_OK(dp_copy(ctx, &tensors[r], &tensors[from], NULL));
            CHECK_OK(dp_copy(ctx, &tensors[from], &tensors[r], NULL));
        }
    }
    CHECK_OK(dp_wait(ctx));
    long before = cuda_allocs();
    cudaStream_t native = capture_begin(ctx, mode);
    CHECK_OK(dp_all_reduce(ctx, parts, COUNT, DP_F32, DP_OP_SUM));
    CHECK(cuda_allocs() == -1 || cuda_allocs() == before + GPUS);
    cudaGraphExec_t graph = capture_end(native);
    for (int i = 1; i < 3; i++) {
        for (int r = 0; r < GPUS; r++)
            CHECK_OK(dp_fill(ctx, &tensors[r], dp_float(i + 10 * r)));
        CHECK_OK(dp_wait(ctx));
        CHECK_INT(cudaGraphLaunch(graph, native), cudaSuccess);
        CHECK_OK(dp_wait(ctx));
        for (int r = 0; r < GPUS; r++)
            CHECK_F64(last_of(ctx, &tensors[r]), 3 * i + 30, 0);
    }
    CHECK_OK(dp_all_reduce(ctx, parts, COUNT, DP_F32, DP_OP_MAX));
    CHECK(cuda_allocs() == -1 || cuda_allocs() == before + GPUS);
    CHECK_INT(cudaGraphExecDestroy(graph), cudaSuccess);
    dp_scope_end(scope);
    dp_close(ctx);
    cuda_check_leaks();
}

TEST_SLOW(a_first_sum_is_captured, 30)
{
    cuda_pairs_directly(3);
    for (int mode = 0; mode < MODES; mode++)
        first_sum_in_a_capture(mode);
}

/* A copy reads pinned memory of the host; what is captured of it nobody waits for. One from before
   the capture is over when the scope has ended. */
TEST(a_scope_ends_in_a_capture)
{
    enum { COUNT = 1001 };
    const int64_t shape[] = {COUNT};
    dp_ctx *ctx = open_on(1);
    dp_dev *dev = dp_local_stream(ctx, 0)->dev;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x;
    void *memory = NULL, *other = NULL;
    make(scope, ctx, 0, COUNT, &x);
    CHECK_OK(dp_cuda()->host_alloc(dev, COUNT * sizeof(float), &memory));
    CHECK_OK(dp_cuda()->host_alloc(dev, COUNT * sizeof(float), &other));
    dp_tensor there = dp_wrap(memory, DP_F32, 1, shape);
    dp_tensor before = dp_wrap(other, DP_F32, 1, shape);
    for (int i = 0; i < COUNT; i++)
        ((float *)memory)[i] = 5;
    for (int early = 0; early < 2; early++) {
        if (early) /* and is still under way */
            CHECK_OK(dp_copy(ctx, &x, &before, NULL));
        cudaStream_t native = capture_begin(ctx, GLOBAL);
        dp_scope *inner = dp_scope_begin(ctx);
        dp_tensor y;
        make(inner, ctx, 0, COUNT, &y);
        CHECK_OK(dp_copy(ctx, &y, &there, NULL));
        CHECK_OK(dp_axpby(ctx, 1, &y, 0, NULL, &x));
        dp_scope_end(inner);
        memset(other, 0xff, COUNT * sizeof(float));
        cudaGraphExec_t graph = capture_end(native);
        CHECK_OK(dp_fill(ctx, &x, dp_float(0)));
        CHECK_INT(cudaGraphLaunch(graph, native), cudaSuccess);
        CHECK_F64(last_of(ctx, &x), 5, 0);
        CHECK_INT(cudaGraphExecDestroy(graph), cudaSuccess);
    }
    dp_scope_end(scope);
    dp_cuda()->host_free(dev, memory, COUNT * sizeof(float));
    dp_cuda()->host_free(dev, other, COUNT * sizeof(float));
    dp_close(ctx);
    cuda_check_leaks();
}

/* ---- other threads --------------------------------------------------------------------------- */

/* All that a context does: memory of its own, copies, waits, and its end. */
static void *live(void *gpus)
{
    dp_ctx *ctx = open_on(*(int *)gpus);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensors[2];
    dp_part parts[2];
    float numbers[1000];
    for (int i = 0; i < 1000; i++)
        numbers[i] = (float)i;
    for (int r = 0; r < *(int *)gpus; r++) {
        CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, r), numbers, DP_F32, 1,
                                (const int64_t[]){1000}, &tensors[r]));
        parts[r] = (dp_part){tensors[r].data, tensors[r].data, NULL};
    }
    CHECK_OK(dp_all_reduce(ctx, parts, 1000, DP_F32, DP_OP_SUM));
    CHECK_OK(dp_wait(ctx));
    CHECK_F64(last_of(ctx, &tensors[0]), 999 * *(int *)gpus, 0);
    dp_scope_end(scope);
    dp_close(ctx);
    return NULL;
}

/* A capture in global mode forbids to other threads what is potentially unsafe. */
static void captures_beside(int gpus, int mode)
{
    dp_ctx *ctx = open_on(gpus);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x;
    pthread_t thread;
    make(scope, ctx, 0, 1001, &x);
    CHECK_OK(dp_fill(ctx, &x, dp_float(1)));
    CHECK_OK(dp_wait(ctx));
    cudaStream_t native = capture_begin(ctx, mode);
    CHECK_OK(dp_axpby(ctx, 2, &x, 0, NULL, &x));
    CHECK_INT(pthread_create(&thread, NULL, live, &gpus), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_OK(dp_axpby(ctx, 2, &x, 0, NULL, &x));
    cudaGraphExec_t graph = capture_end(native);
    CHECK_OK(dp_fill(ctx, &x, dp_float(3)));
    CHECK_INT(cudaGraphLaunch(graph, native), cudaSuccess);
    CHECK_F64(last_of(ctx, &x), 12, 0);
    CHECK_INT(cudaGraphExecDestroy(graph), cudaSuccess);
    dp_scope_end(scope);
    dp_close(ctx);
    cuda_check_leaks();
}

TEST_SLOW(another_thread_works_beside_a_capture, 30)
{
    for (int mode = 0; mode < MODES; mode++)
        captures_beside(1, mode);
}

TEST_SLOW(another_thread_works_on_two_gpus_beside_a_capture, 30)
{
    cuda_pairs_directly(2); /* and checks the pair */
    for (int mode = 0; mode < MODES; mode++)
        captures_beside(2, mode);
}

/* ---- the thread's mode ----------------------------------------------------------------------- */

static int mode_swapped(int mode)
{
    enum cudaStreamCaptureMode other = (enum cudaStreamCaptureMode)mode;
    CHECK_INT(cudaThreadExchangeStreamCaptureMode(&other), cudaSuccess);
    return (int)other;
}

/* Calls of the library leave it as it was, nested ones too, and those that are refused. */
TEST_SLOW(the_mode_of_the_thread_stays, 30)
{
    int gpus = 2;
    cuda_pairs_directly(gpus);
    for (int mode = 0; mode < MODES; mode++) {
        (void)mode_swapped(mode);
        (void)live(&gpus);
        CHECK_INT(mode_swapped(GLOBAL), mode);
        (void)mode_swapped(mode);
        dp_ctx *ctx = open_on(1);
        cudaStream_t native = capture_begin(ctx, cudaStreamCaptureModeRelaxed);
        CHECK_ERROR(dp_wait(ctx), DP_ERR_STATE, "a wait cannot be captured");
        cudaGraphExec_t graph = capture_end(native);
        CHECK_INT(cudaGraphExecDestroy(graph), cudaSuccess);
        dp_close(ctx);
        CHECK_INT(mode_swapped(GLOBAL), mode);
    }
    cuda_check_leaks();
}

#if defined(TEST_SIM)
/* ---- captures that fail ---------------------------------------------------------------------- */

/* What can be captured among two GPUs, and memory. */
static dp_status step(dp_ctx *ctx, const dp_tensor *tensors)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor more;
    dp_part parts[2];
    dp_status status =
        dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, DP_SHAPE(2 * SLAB), &more);
    for (int r = 0; r < 2; r++)
        parts[r] = (dp_part){tensors[r].data, tensors[r].data, NULL};
    if (status == DP_OK)
        status = dp_all_reduce(ctx, parts, 1000, DP_F32, DP_OP_SUM);
    if (status == DP_OK)
        status = dp_broadcast(ctx, parts, 1000, DP_F32, 1);
    if (status == DP_OK)
        status = dp_copy(ctx, &tensors[1], &tensors[0], NULL);
    if (status == DP_OK)
        status = dp_axpby(ctx, 0.5, &tensors[0], 0, NULL, &tensors[0]);
    dp_scope_end(scope);
    return status;
}

/* One call of it fails with an error of captures: an error of that call, which breaks the capture.
   The context goes on. */
static bool fails_in_a_capture(dp_ctx *ctx, const dp_tensor *tensors, long n, int code)
{
    cudaGraph_t graph = NULL;
    cudaStream_t native = capture_begin(ctx, GLOBAL);
    sim_fail_at(n, code, false);
    dp_status status = step(ctx, tensors);
    bool fired = sim_fault_fired();
    sim_fail_at(0, 0, false);
    CHECK(status == DP_OK || status == DP_ERR_STATE);
    CHECK_INT(cudaStreamEndCapture(native, &graph),
              fired ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    CHECK_INT(cudaGetLastError(), fired ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    CHECK(!dp_failure(ctx, NULL));
    CHECK_OK(dp_fill(ctx, &tensors[0], dp_float((double)n)));
    CHECK_OK(dp_fill(ctx, &tensors[1], dp_float((double)n)));
    CHECK_OK(step(ctx, tensors));
    CHECK_F64(last_of(ctx, &tensors[0]), (double)n, 0);
    CHECK_INT(sim_finding_count(NULL), 0);
    return fired;
}

TEST_SLOW(every_call_breaks_a_capture, 60)
{
    cuda_pairs_directly(2);
    dp_ctx *ctx = open_on(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensors[2];
    for (int r = 0; r < 2; r++)
        make(scope, ctx, r, 1000, &tensors[r]);
    CHECK_OK(dp_fill(ctx, &tensors[0], dp_float(1)));
    CHECK_OK(dp_fill(ctx, &tensors[1], dp_float(1)));
    CHECK_OK(step(ctx, tensors)); /* pairs are checked */
    CHECK_OK(dp_wait(ctx));
    for (int code = 900; code < 909; code++)
        for (long n = 1; fails_in_a_capture(ctx, tensors, n, code); n += test_step())
            continue;
    dp_scope_end(scope);
    dp_close(ctx);
    sim_check_leaks();
}
#endif /* TEST_SIM */
#endif /* TEST_CUDA */
