/* test_cuda_order.c - order on GPUs: copies on streams of the user's, a stream that becomes the
   compute stream while others are busy, memory of the host that a device still reads, staged copies
   of odd lengths, rows. On simulated GPUs each also with work that is done late, in many orders. */

#include "test.h"

#if defined(TEST_CUDA)
#include <cuda.h>
#include "cuda_device.h"
#include "nets.h"

enum { SIDE = 40000 }; /* elements */

static const net_shape by_rows = {0};

static dp_ctx *open_on(int gpus, const int *devices, int count)
{
    dp_ctx *ctx = NULL;
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    const dp_coll_ops *const colls[] = {dp_cuda_coll(), NULL}; /* no thread calls beside this one */
    cuda_gpus(gpus);
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .colls = colls,
                                  .device_count = count,
                                  .devices = devices,
                                  .thread_count = 7},
                     &ctx));
    return ctx;
}

static dp_ctx *open_gpus(int gpus)
{
    return open_on(gpus, NULL, gpus);
}

static void in_all_orders(int gpus, void (*run)(dp_ctx *ctx))
{
    for (unsigned order = 0; order < CUDA_ORDERS; order++) {
        cuda_order(order);
        dp_ctx *ctx = open_gpus(gpus);
        run(ctx);
        dp_close(ctx);
    }
    cuda_check_leaks();
}

static void make(dp_scope *scope, dp_ctx *ctx, int rank, dp_tensor *out)
{
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, rank), DP_F32, DP_SHAPE(SIDE), out));
}

/* All elements are `want`. */
static void check_all(dp_ctx *ctx, const dp_tensor *tensor, float want)
{
    static float got[SIDE];
    size_t count = (size_t)dp_tensor_count(tensor);
    CHECK_OK(dp_read(ctx, tensor, got, count * sizeof *got));
    for (size_t i = 0; i < count; i++)
        CHECK_F64(got[i], want, 0);
}

/* ---- a stream of the user's ------------------------------------------------------------------ */

typedef struct side {
    dp_stream *stream;
    cudaStream_t native, compute;
    cudaEvent_t event;
    void *memory; /* NULL: none */
} side;

static CUresult (*push)(CUcontext);
static CUresult (*pop)(CUcontext *);

/* The context of GPU 0 is current until side_close. */
static side side_open(dp_ctx *ctx)
{
    side own = {.compute = dp_cuda_stream(dp_local_stream(ctx, 0))};
    CUresult (*retain)(CUcontext *, CUdevice);
    CUcontext context;
    find_entry("cuCtxPushCurrent", &push);
    find_entry("cuCtxPopCurrent", &pop);
    find_entry("cuDevicePrimaryCtxRetain", &retain);
    CHECK_INT(retain(&context, 0), CUDA_SUCCESS);
    CHECK_INT(push(context), CUDA_SUCCESS);
    CHECK_INT(cudaStreamCreateWithPriority(&own.native, cudaStreamNonBlocking, 0), cudaSuccess);
    CHECK_INT(cudaEventCreateWithFlags(&own.event, cudaEventDisableTiming), cudaSuccess);
    CHECK_OK(dp_cuda_adopt(ctx, 0, own.native, &own.stream));
    return own;
}

static void side_close(side *own)
{
    CUresult (*release)(CUdevice);
    CUcontext popped;
    find_entry("cuDevicePrimaryCtxRelease", &release);
    CHECK_INT(cudaStreamSynchronize(own->native), cudaSuccess);
    dp_cuda_release(own->stream);
    CHECK_INT(cudaFree(own->memory), cudaSuccess);
    CHECK_INT(cudaEventDestroy(own->event), cudaSuccess);
    CHECK_INT(cudaStreamDestroy(own->native), cudaSuccess);
    CHECK_INT(pop(&popped), CUDA_SUCCESS);
    CHECK_INT(release(0), CUDA_SUCCESS);
}

/* What follows a copy on a stream of theirs, users order themselves. */
static void side_joins(const side *own)
{
    CHECK_INT(cudaEventRecord(own->event, own->native), cudaSuccess);
    CHECK_INT(cudaStreamWaitEvent(own->compute, own->event, 0), cudaSuccess);
}

/* Both sides were just written on the compute stream, and are written again right behind. */
static void copy_beside(dp_ctx *ctx)
{
    side own = side_open(ctx);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y;
    make(scope, ctx, 0, &x);
    make(scope, ctx, 0, &y);
    for (int i = 1; i < 4; i++) {
        CHECK_OK(dp_fill(ctx, &x, dp_float(i)));
        CHECK_OK(dp_fill(ctx, &y, dp_float(-i)));
        CHECK_OK(dp_copy(ctx, &y, &x, own.stream));
        side_joins(&own);
        CHECK_OK(dp_fill(ctx, &x, dp_float(100)));
        check_all(ctx, &y, (float)i);
    }
    dp_scope_end(scope);
    side_close(&own);
}

TEST(a_copy_on_a_side_stream)
{
    in_all_orders(1, copy_beside);
}

/* The device still reads or writes what the copy replaces, the host reads what is just made. */
static void copy_in_and_out_beside(dp_ctx *ctx)
{
    static float host[SIDE];
    const int64_t shape[] = {SIDE};
    side own = side_open(ctx);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y, there = dp_wrap(host, DP_F32, 1, shape);
    make(scope, ctx, 0, &x);
    make(scope, ctx, 0, &y);
    for (int i = 1; i < 4; i++) {
        for (int k = 0; k < SIDE; k++)
            host[k] = (float)i;
        CHECK_OK(dp_fill(ctx, &x, dp_float(-i)));
        CHECK_OK(dp_copy(ctx, &y, &x, NULL)); /* reads x on the compute stream */
        CHECK_OK(dp_copy(ctx, &x, &there, own.stream));
        side_joins(&own);
        check_all(ctx, &x, (float)i);
        check_all(ctx, &y, (float)-i);
        CHECK_OK(dp_fill(ctx, &y, dp_float(10 * i)));
        CHECK_OK(dp_copy(ctx, &there, &y, own.stream));
        CHECK_F64(host[0], 10 * i, 0);
        CHECK_F64(host[SIDE - 1], 10 * i, 0);
    }
    dp_scope_end(scope);
    side_close(&own);
}

TEST(copies_in_and_out_on_a_side_stream)
{
    in_all_orders(1, copy_in_and_out_beside);
}

/* Every third column: packed on the way, in memory that the compute stream may still use. */
static void copy_columns_beside(dp_ctx *ctx)
{
    enum { ROWS = 300, COLS = 3 };
    static float host[ROWS];
    const int64_t shape[] = {ROWS};
    side own = side_open(ctx);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y, column, other, there = dp_wrap(host, DP_F32, 1, shape);
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(ROWS, COLS), &x));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(ROWS, COLS), &y));
    CHECK_OK(dp_fill(ctx, &y, dp_float(7)));
    CHECK_OK(dp_select(&y, 1, 1, &other));
    for (int i = 1; i < 4; i++) {
        CHECK_OK(dp_select(&x, 1, i % COLS, &column));
        CHECK_OK(dp_copy(ctx, &there, &column, NULL)); /* leaves such memory behind */
        CHECK_OK(dp_fill(ctx, &x, dp_float(i)));
        CHECK_OK(dp_copy(ctx, &there, &column, own.stream));
        CHECK_F64(host[0] + host[ROWS - 1], 2 * i, 0);
        for (int k = 0; k < ROWS; k++)
            host[k] = (float)(k + i);
        CHECK_OK(dp_copy(ctx, &column, &there, own.stream));
        CHECK_OK(dp_copy(ctx, &there, &other, NULL)); /* takes it again */
        CHECK_F64(host[0] + host[ROWS - 1], 14, 0);
        side_joins(&own);
        CHECK_OK(dp_copy(ctx, &there, &column, NULL));
        for (int k = 0; k < ROWS; k++)
            CHECK_F64(host[k], k + i, 0);
    }
    dp_scope_end(scope);
    side_close(&own);
}

TEST(columns_on_a_side_stream)
{
    in_all_orders(1, copy_columns_beside);
}

/* Work goes on on another stream, behind what the one before still has to do; forth and back. */
static void use_behind_work(dp_ctx *ctx)
{
    side own = side_open(ctx);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y;
    make(scope, ctx, 0, &x);
    make(scope, ctx, 0, &y);
    for (int i = 1; i < 4; i++) {
        CHECK_OK(dp_fill(ctx, &x, dp_float(i)));
        CHECK_OK(dp_use_stream(ctx, 0, own.stream));
        CHECK_OK(dp_copy(ctx, &y, &x, NULL));
        CHECK_OK(dp_fill(ctx, &x, dp_float(-1)));
        CHECK_OK(dp_use_stream(ctx, 0, NULL));
        CHECK_OK(dp_axpby(ctx, 2, &y, 1, &x, &y));
        check_all(ctx, &y, (float)(2 * i - 1));
    }
    dp_scope_end(scope);
    side_close(&own);
}

TEST(a_stream_is_used_behind_pending_work)
{
    in_all_orders(1, use_behind_work);
}

/* A stream goes with work in it, and the memory that this uses goes next. */
static void leave_work(dp_ctx *ctx, bool fails)
{
    dp_stream *stream = NULL;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y;
    make(scope, ctx, 0, &x);
    make(scope, ctx, 0, &y);
    CHECK_OK(dp_fill(ctx, &x, dp_float(1)));
    CHECK_OK(dp_cuda()->stream_create(dp_local_stream(ctx, 0)->dev, 0, &stream));
    CHECK_OK(dp_copy(ctx, &y, &x, stream));
    if (fails)
        dp_abort(ctx, DP_ERR_ABORTED, NULL);
    dp_cuda()->stream_destroy(stream);
    dp_scope_end(scope);
}

static void leave_work_behind(dp_ctx *ctx)
{
    leave_work(ctx, false);
}

static void leave_work_of_a_job_that_fails(dp_ctx *ctx)
{
    leave_work(ctx, true);
}

TEST(a_stream_goes_with_work_in_it)
{
    in_all_orders(1, leave_work_behind);
    in_all_orders(1, leave_work_of_a_job_that_fails);
}

/* ---- memory of the host ---------------------------------------------------------------------- */

/* Pinned memory is read later, on the compute stream and on another; after dp_wait it is free. */
static void wait_for_readers(dp_ctx *ctx)
{
    const int64_t shape[] = {SIDE};
    dp_dev *dev = dp_local_stream(ctx, 0)->dev;
    void *memory[2] = {NULL, NULL};
    side own = side_open(ctx);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y;
    make(scope, ctx, 0, &x);
    make(scope, ctx, 0, &y);
    for (int k = 0; k < 2; k++)
        CHECK_OK(dp_cuda()->host_alloc(dev, SIDE * sizeof(float), &memory[k]));
    for (int i = 1; i < 4; i++) {
        for (int k = 0; k < SIDE; k++)
            ((float *)memory[0])[k] = ((float *)memory[1])[k] = (float)i;
        dp_tensor first = dp_wrap(memory[0], DP_F32, 1, shape);
        dp_tensor second = dp_wrap(memory[1], DP_F32, 1, shape);
        CHECK_OK(dp_copy(ctx, &x, &first, NULL));
        CHECK_OK(dp_copy(ctx, &y, &second, own.stream));
        CHECK_OK(dp_wait(ctx));
        memset(memory[0], 0, SIDE * sizeof(float));
        CHECK_INT(cudaStreamSynchronize(own.native), cudaSuccess);
        memset(memory[1], 0, SIDE * sizeof(float));
        check_all(ctx, &x, (float)i);
        check_all(ctx, &y, (float)i);
    }
    dp_scope_end(scope);
    for (int k = 0; k < 2; k++)
        dp_cuda()->host_free(dev, memory[k], SIDE * sizeof(float));
    side_close(&own);
}

TEST(pinned_memory_is_free_after_a_wait)
{
    in_all_orders(1, wait_for_readers);
}

/* Work of the user's on the compute stream writes to it. */
static void wait_for_writers(dp_ctx *ctx)
{
    dp_stream *stream = dp_local_stream(ctx, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x;
    void *memory = NULL;
    make(scope, ctx, 0, &x);
    CHECK_OK(dp_cuda()->host_alloc(stream->dev, SIDE * sizeof(float), &memory));
    for (int i = 1; i < 4; i++) {
        CHECK_OK(dp_fill(ctx, &x, dp_float(i)));
        CHECK_OK(dp_cuda()->copy_out(stream, memory, x.data, SIDE * sizeof(float)));
        CHECK_OK(i == 1 ? dp_wait(ctx) : dp_barrier(ctx));
        CHECK_F64(((float *)memory)[SIDE - 1], i, 0);
    }
    dp_scope_end(scope);
    dp_cuda()->host_free(stream->dev, memory, SIDE * sizeof(float));
}

TEST(pinned_memory_is_written_before_a_wait_is_over)
{
    in_all_orders(1, wait_for_writers);
    in_all_orders(2, wait_for_writers);
}

#if defined(TEST_SIM)
/* A copy that failed does not read it any more, on whatever stream. */
TEST(every_call_of_a_copy_of_pinned_memory_fails)
{
    const int64_t shape[] = {SIDE};
    void *memory = NULL;
    dp_ctx *ctx = open_gpus(1);
    side own = side_open(ctx);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x;
    make(scope, ctx, 0, &x);
    CHECK_OK(dp_cuda()->host_alloc(own.stream->dev, SIDE * sizeof(float), &memory));
    dp_tensor there = dp_wrap(memory, DP_F32, 1, shape);
    for (int beside = 0; beside < 2; beside++) {
        bool fired = true;
        for (long n = 1; fired; n++) {
            sim_fail_at(n, cudaErrorMemoryAllocation, false);
            dp_status status = dp_copy(ctx, &x, &there, beside ? own.stream : NULL);
            fired = sim_fault_fired();
            sim_fail_at(0, 0, false);
            if (status == DP_OK) {
                CHECK_OK(dp_wait(ctx));
                CHECK_INT(cudaStreamSynchronize(own.native), cudaSuccess);
            }
            memset(memory, 0, SIDE * sizeof(float));
        }
    }
    dp_scope_end(scope);
    dp_cuda()->host_free(own.stream->dev, memory, SIDE * sizeof(float));
    side_close(&own);
    dp_close(ctx);
    cuda_check_leaks();
}
#endif

/* Parameters are written from memory that the GPU reads where it is. */
static void write_pinned(dp_ctx *ctx)
{
    const size_t bytes = NET_IN * NET_OUT * sizeof(float);
    dp_dev *dev = dp_local_stream(ctx, 0)->dev;
    dp_module *net = net_create(ctx, &by_rows, 0);
    float numbers[NET_PARAMS];
    void *memory = NULL;
    CHECK_OK(dp_cuda()->host_alloc(dev, bytes, &memory));
    for (int i = 1; i < 4; i++) {
        for (int k = 0; k < NET_IN * NET_OUT; k++)
            ((float *)memory)[k] = (float)(i + k);
        CHECK_OK(dp_params_write(net, NET_W, memory, bytes));
        memset(memory, 0, bytes);
        net_numbers(ctx, net, false, numbers);
        CHECK_F64(numbers[0], i, 0);
    }
    dp_cuda()->host_free(dev, memory, bytes);
}

TEST(pinned_numbers_that_were_written_may_go)
{
    in_all_orders(1, write_pinned);
}

/* What was kept needs its source no more: memory on the GPU, but not the library's. */
static void keep_foreign(dp_ctx *ctx)
{
    const int64_t shape[] = {SIDE};
    side own = side_open(ctx);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value kept;
    CHECK_INT(cudaMalloc(&own.memory, SIDE * sizeof(float)), cudaSuccess);
    dp_tensor source = dp_wrap(own.memory, DP_F32, 1, shape);
    source.device = dp_local_device(ctx, 0);
    CHECK_OK(dp_fill(ctx, &source, dp_float(3)));
    CHECK_OK(dp_keep(scope, dp_of(scope, &source), &kept));
    CHECK_INT(cudaFree(own.memory), cudaSuccess);
    own.memory = NULL;
    check_all(ctx, kept.as.t, 3);
    dp_scope_end(scope);
    side_close(&own);
}

TEST(the_source_of_what_was_kept_may_go)
{
    in_all_orders(1, keep_foreign);
}

/* A user's stream still copies from the ring, to memory of the user's, when the context closes. */
TEST(a_context_closes_behind_its_ring)
{
    static float host[SIDE];
    const int64_t shape[] = {SIDE};
    for (unsigned order = 0; order < CUDA_ORDERS; order++) {
        cuda_order(order);
        dp_ctx *ctx = open_gpus(1);
        side own = side_open(ctx);
        CHECK_INT(cudaMalloc(&own.memory, sizeof host), cudaSuccess);
        dp_tensor there = dp_wrap(own.memory, DP_F32, 1, shape),
                  here = dp_wrap(host, DP_F32, 1, shape);
        there.device = dp_local_device(ctx, 0);
        CHECK_OK(dp_copy(ctx, &there, &here, own.stream));
        dp_cuda_release(own.stream);
        own.stream = NULL;
        dp_close(ctx);
        side_close(&own);
    }
    cuda_check_leaks();
}

/* A scope's host memory is read until its end, whichever streams read it. */
static void end_with_readers(dp_ctx *ctx)
{
    side own[2] = {side_open(ctx), side_open(ctx)};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x[3];
    for (int k = 0; k < 3; k++)
        make(scope, ctx, 0, &x[k]);
    for (int i = 1; i < 5; i++) { /* each scope gets the memory of the one before, and fills it */
        dp_scope *inner = dp_scope_begin(ctx);
        dp_tensor host;
        CHECK_OK(dp_tensor_new(inner, (dp_device){0}, DP_F32, DP_SHAPE(SIDE), &host));
        CHECK_OK(dp_fill(ctx, &host, dp_float(i)));
        if (i % 2 == 0)
            CHECK_OK(dp_copy(ctx, &x[2], &host, NULL));
        for (int k = 0; k < 2; k++)
            CHECK_OK(dp_copy(ctx, &x[k], &host, own[k].stream));
        dp_scope_end(inner);
    }
    for (int k = 0; k < 2; k++)
        side_joins(&own[k]);
    for (int k = 0; k < 3; k++)
        check_all(ctx, &x[k], 4);
    dp_scope_end(scope);
    side_close(&own[1]);
    side_close(&own[0]);
}

TEST(a_scope_ends_behind_its_readers)
{
    in_all_orders(1, end_with_readers);
}

/* ---- staging --------------------------------------------------------------------------------- */

/* In parts of seven threads that are not equal, in pieces of which the last is short, or alone. */
static void stage(dp_ctx *ctx)
{
    static const size_t lengths[] = {1,       63,       262145,          1835007,         1835009,
                                     2097151, 2097152,  2097153,         5 * 1048576 + 7, 8388608,
                                     8388609, 10485759, 12 * 1048576 + 1};
    static unsigned char own[13 << 20], got[sizeof own];
    for (size_t i = 0; i < sizeof own; i++)
        own[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const int64_t shape[] = {(int64_t)lengths[i]};
        dp_scope *scope = dp_scope_begin(ctx);
        dp_tensor x, y, from = dp_wrap(own + i, DP_U8, 1, shape);
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_U8, 1, shape, &x));
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_U8, 1, shape, &y));
        CHECK_OK(dp_copy(ctx, &x, &from, NULL));
        CHECK_OK(dp_copy(ctx, &y, &x, NULL)); /* over the host, between two GPUs */
        memset(got, 0xee, lengths[i] + 1);
        CHECK_OK(dp_read(ctx, &y, got, lengths[i]));
        CHECK_BYTES(got, own + i, lengths[i]);
        CHECK_INT(got[lengths[i]], 0xee);
        dp_scope_end(scope);
    }
}

static void stage_on(int gpus, const int *devices)
{
    for (unsigned order = 0; order < (CUDA_ORDERS + 1) / 2; order++) {
        cuda_order(order);
        dp_ctx *ctx = open_on(gpus, devices, 2);
        stage(ctx);
        dp_close(ctx);
    }
    cuda_check_leaks();
}

TEST_SLOW(staged_lengths_of_unequal_parts, 60)
{
    cuda_pairs(2, false);
    stage_on(2, NULL);
}

TEST_SLOW(staged_lengths_on_one_gpu, 60)
{
    stage_on(1, (const int[]){0, 0});
}

/* Between two GPUs over the host, on a slot that was just used; what is read is written again. */
static void over_the_host(dp_ctx *ctx)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x[2], y[2];
    for (int r = 0; r < 2; r++) {
        make(scope, ctx, r, &x[r]);
        make(scope, ctx, r, &y[r]);
    }
    for (int i = 1; i < 12; i++) {
        CHECK_OK(dp_fill(ctx, &x[i % 2], dp_float(i)));
        CHECK_OK(dp_fill(ctx, &y[1 - i % 2], dp_float(-i)));
        CHECK_OK(dp_copy(ctx, &y[1 - i % 2], &x[i % 2], NULL));
        CHECK_OK(dp_fill(ctx, &x[i % 2], dp_float(1000)));
        if (i % 4 == 3)
            check_all(ctx, &y[1 - i % 2], (float)i);
    }
    dp_scope_end(scope);
}

TEST(copies_over_the_host_are_in_order)
{
    cuda_pairs(2, false);
    in_all_orders(2, over_the_host);
}

/* A long copy has all slots, and the other GPU writes to one of them behind it: what the host gives
   next does not go there too, where it is not waited for. */
static void host_behind_the_other_gpu(dp_ctx *ctx)
{
    enum { SLOTS = 1 << 21 }; /* all of them */
    static float numbers[SLOTS], got[SLOTS], few[SIDE];
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor all, from, x, y;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(SLOTS), &all));
    make(scope, ctx, 1, &from);
    make(scope, ctx, 0, &x);
    make(scope, ctx, 0, &y);
    for (int i = 1; i < 5; i++) {
        for (size_t k = 0; k < SLOTS; k++)
            numbers[k] = (float)(k % 1009 + (size_t)i);
        for (size_t k = 0; k < SIDE; k++)
            few[k] = (float)-i;
        const dp_tensor in = dp_wrap(numbers, DP_F32, DP_SHAPE(SLOTS));
        const dp_tensor some = dp_wrap(few, DP_F32, DP_SHAPE(SIDE));
        CHECK_OK(dp_fill(ctx, &from, dp_float(i)));
        CHECK_OK(dp_copy(ctx, &all, &in, NULL));
        CHECK_OK(dp_copy(ctx, &x, &from, NULL));
        CHECK_OK(dp_copy(ctx, &y, &some, NULL));
        CHECK_OK(dp_read(ctx, &all, got, sizeof got));
        CHECK_BYTES(got, numbers, sizeof got);
        check_all(ctx, &x, (float)i);
        check_all(ctx, &y, (float)-i);
    }
    dp_scope_end(scope);
}

TEST(host_memory_behind_copies_over_the_host)
{
    cuda_pairs(2, false);
    in_all_orders(2, host_behind_the_other_gpu);
}

#if defined(TEST_SIM)
/* Whatever call fails on the way, what was under way in a slot is over before the slot is used
   again, by the host or by the other GPU. */
TEST_SLOW(a_copy_over_the_host_fails_anywhere, 60)
{
    enum { COUNT = 3 << 18, HALF = COUNT / 2 }; /* two pieces */
    static float numbers[COUNT];
    bool fired = true;
    sim_set_peer(0, 1, SIM_PEER_NONE);
    sim_set_peer(1, 0, SIM_PEER_NONE);
    sim_defer(0);
    dp_ctx *ctx = open_gpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(COUNT), &x));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, DP_SHAPE(COUNT), &y));
    CHECK_OK(dp_fill(ctx, &x, dp_float(3)));
    CHECK_OK(dp_copy(ctx, &y, &x, NULL)); /* the pair has been looked at */
    for (long n = 1; fired; n++) {
        CHECK_OK(dp_wait(ctx));
        sim_fail_at(n, cudaErrorMemoryAllocation, false);
        dp_status status = dp_copy(ctx, &y, &x, NULL);
        fired = sim_fault_fired();
        sim_fail_at(0, 0, false);
        CHECK_INT(status, fired ? DP_ERR_NO_MEMORY : DP_OK);
        CHECK_OK(dp_fill(ctx, &x, dp_float((double)n)));
        CHECK_OK(dp_copy(ctx, &y, &x, NULL));
        CHECK_OK(dp_copy(ctx, &x, &y, NULL)); /* two pieces each: all four slots */
        CHECK_OK(dp_copy(ctx, &y, &x, NULL));
        CHECK_OK(dp_read(ctx, &y, numbers, sizeof numbers));
        CHECK_F64(numbers[0] + numbers[HALF] + numbers[COUNT - 1], 3 * n, 0);
        CHECK_INT(sim_finding_count(NULL), 0);
    }
    dp_scope_end(scope);
    dp_close(ctx);
    cuda_check_leaks();
}
#endif

/* ---- rows ------------------------------------------------------------------------------------ */

typedef struct rows {
    size_t row, count, to_pitch, from_pitch, to_skip, from_skip;
} rows;

enum { ROOM = 4 << 20 };

static void check_rows(dp_ctx *ctx, dp_tensor *to, dp_tensor *from, const rows *r)
{
    static unsigned char source[ROOM], want[ROOM], got[ROOM];
    dp_stream *stream = dp_local_stream(ctx, 0);
    size_t whole = r->count == 0 ? 0 : (r->count - 1) * r->from_pitch + r->row + r->from_skip;
    for (size_t i = 0; i < whole; i++)
        source[i] = (unsigned char)(i * 2654435761u >> 11);
    memset(want, 7, sizeof want);
    for (size_t k = 0; k < r->count; k++)
        memcpy(want + r->to_skip + k * r->to_pitch, source + r->from_skip + k * r->from_pitch,
               r->row);
    CHECK_OK(dp_fill(ctx, to, dp_int(7)));
    CHECK_OK(dp_cuda()->copy_in(stream, from->data, source, whole));
    CHECK_OK(dp_cuda()->copy_2d(stream, (char *)to->data + r->to_skip, r->to_pitch,
                                (char *)from->data + r->from_skip, r->from_pitch, r->row,
                                r->count));
    CHECK_OK(dp_read(ctx, to, got, sizeof got));
    CHECK_BYTES(got, want, sizeof got);
}

TEST_SLOW(rows_of_odd_lengths_and_pitches, 60)
{
    static const rows cases[] = {{1, 1, 1, 1, 0, 0},
                                 {1, 9, 3, 5, 1, 2},
                                 {3, 7, 3, 3, 0, 1},
                                 {17, 31, 19, 23, 1, 0},
                                 {64, 5, 64, 72, 0, 8},
                                 {255, 4, 257, 256, 0, 0},
                                 {255, 3, 255, 511, 5, 3},
                                 {256, 1, 256, 256, 0, 0},
                                 {256, 33, 260, 300, 4, 4},
                                 {257, 11, 259, 263, 1, 7},
                                 {1000, 9, 1001, 1003, 1, 1},
                                 {4096, 40, 4096, 5000, 0, 16},
                                 {300, 2, 1 << 20, 300, 0, 0},
                                 {300, 3, 1 << 20, (1 << 20) + 4, 0, 0},
                                 {301, 3, (1 << 20) + 1, 301, 3, 0}};
    dp_ctx *ctx = open_gpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor to, from;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_U8, DP_SHAPE(ROOM), &to));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_U8, DP_SHAPE(ROOM), &from));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_rows(ctx, &to, &from, &cases[i]);
    dp_scope_end(scope);
    dp_close(ctx);
    cuda_check_leaks();
}

/* ---- everything, late ------------------------------------------------------------------------ */

/* A forward and a backward, then a parameter is written while replicas may still read it. */
static void train(dp_ctx *ctx)
{
    static const float w[NET_PARAMS] = {1, -1, 2, -2, 3, -3, 1, 2};
    dp_module *net = net_create(ctx, &by_rows, 0), *par = NULL;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    for (int step = 0; step < 2; step++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value y;
        dp_pass *pass = NULL;
        float grads[NET_PARAMS];
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[13,3],)"), dp_none(), NULL,
                           &y, &pass));
        CHECK_OK(dp_backward(pass, dp_float(1), NULL));
        net_numbers(ctx, net, true, grads);
        CHECK_F64(grads[NET_PARAMS - 1], 13 * (step + 1), 0);
        CHECK_F64(grads[0], 234 * (step + 1), 0); /* 0 + 3 + ... + 36 */
        CHECK_OK(dp_params_write(net, NET_W, w, NET_IN * NET_OUT * sizeof *w));
        dp_scope_end(scope);
    }
}

TEST_SLOW(training_on_gpus_that_are_late, 60)
{
    static const int gpus[] = {1, 3, 4, 8};
    (void)cuda_device_available(8); /* few pairs copy directly: to check them takes long */
    for (int i = 0; i < 4; i++)
        in_all_orders(gpus[i], train);
}
#endif
