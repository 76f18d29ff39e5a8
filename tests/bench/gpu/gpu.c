/* gpu.c - figures of one GPU: dp.h beside CUDA's plain calls, in turn, in one run.

     build/gpu/bench [MiB=256] [ROUNDS=15]     one round: only to see that it runs

   A block has MiB; the limit of what runs on the GPU is a copy of the same bytes inside it,
   measured here. What could not be measured is absent in the table, and the exit status is 1. */

#define DP_IMPLEMENTATION
#include "../../../dp_cuda.h"
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#if defined(TEST_SIM)
#include "../../sim/sim.h"
enum { SIMULATED = 1 };
static void simulate(void)
{
    sim_set_device_count(1);
}
#else
enum { SIMULATED = 0 };
static void simulate(void)
{
}

/* Of tests/cuda_calls.c, which is linked in for calls of graphs: there is no runtime. */
_Noreturn void test_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(1);
}
#endif

enum { TENSORS = 400, ROUNDS_MAX = 99, SECONDS_MOST = 40 };

#define MUST(call)                                                                                 \
    do {                                                                                           \
        if ((call) != DP_OK) {                                                                     \
            fprintf(stderr, "gpu.c:%d: %s\n", __LINE__, dp_last_error());                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define MUST_CUDA(call)                                                                            \
    do {                                                                                           \
        cudaError_t code = (call);                                                                 \
        if (code != cudaSuccess) {                                                                 \
            fprintf(stderr, "gpu.c:%d: %s\n", __LINE__, dp__cuda.cudaGetErrorString(code));        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static int rounds = 15;
static size_t block_bytes = (size_t)256 << 20;
static dp_ctx *ctx;
static dp_scope *scope;
static cudaStream_t stream;

/* ---- measuring ------------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct task {
    void (*run)(struct task *task);
    int repeats;
    const dp_tensor *dst, *src;
    const dp_kernel_args *kernel;
    void *to;
    const void *from;
    size_t bytes, pitch_to, pitch_from, rows;
    int kind;
    double median; /* seconds of one run */
} task;

static void wait_all(void)
{
    MUST(dp_wait(ctx));
}

static int often(int count)
{
    return rounds > 1 ? count : 1 + count / 100;
}

/* In turn: the first, the second, the first ... */
static void in_turn(task *const *tasks, int count)
{
    static double times[4][ROUNDS_MAX];
    for (int round = -2; round < rounds; round++)
        for (int t = 0; t < count; t++) {
            int repeats = tasks[t]->repeats > 0 ? tasks[t]->repeats : 1;
            double begin = seconds();
            for (int i = 0; i < repeats; i++)
                tasks[t]->run(tasks[t]);
            wait_all();
            if (round >= 0)
                times[t][round] = (seconds() - begin) / repeats;
        }
    for (int t = 0; t < count; t++) {
        qsort(times[t], (size_t)rounds, sizeof times[t][0], by_size);
        tasks[t]->median = times[t][rounds / 2];
    }
}

static void line(const char *row, const char *what, double ours, const char *unit, double ratio,
                 double target, bool at_most)
{
    bool met = at_most ? ratio <= target : ratio >= target;
    printf("%-4s %-54s %10.3f %-5s %8.3f  %s%-7g %s\n", row, what, ours, unit, ratio,
           at_most ? "<=" : ">=", target, met ? "ok" : "short");
}

/* ---- tasks ----------------------------------------------------------------------------------- */

static void run_copy(task *t)
{
    MUST(dp_copy(ctx, t->dst, t->src, NULL));
}

static void run_raw(task *t)
{
    MUST_CUDA(
        dp__cuda.cudaMemcpyAsync(t->to, t->from, t->bytes, (enum cudaMemcpyKind)t->kind, stream));
}

static void run_raw_2d(task *t)
{
    MUST_CUDA(dp__cuda.cudaMemcpy2DAsync(t->to, t->pitch_to, t->from, t->pitch_from, t->bytes,
                                         t->rows, (enum cudaMemcpyKind)t->kind, stream));
}

/* By as many threads as the library has. */
static void run_memcpy(task *t)
{
    dp__cuda_fill_all(&ctx->host, t->to, t->from, t->bytes);
}

static void run_kernel(task *t)
{
    MUST(dp_kernel_run(ctx, 0, t->kernel));
}

static dp_tensor on_device(int64_t rows, int64_t cols)
{
    dp_tensor tensor;
    MUST(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(rows, cols), &tensor));
    MUST(dp_fill(ctx, &tensor, dp_float(0.5)));
    return tensor;
}

static int64_t elements(void)
{
    return (int64_t)(block_bytes / sizeof(float));
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void *pinned(size_t bytes)
{
    void *data = NULL;
    MUST_CUDA(dp__cuda.cudaHostAlloc(&data, bytes, cudaHostAllocPortable));
    memset(data, 1, bytes);
    return data;
}

static void host_to_device(const char *row, const char *what, void *host, size_t bytes)
{
    dp_tensor dst = on_device(1, (int64_t)(bytes / sizeof(float)));
    dp_tensor src = dp_wrap(host, DP_F32, DP_SHAPE(1, (int64_t)(bytes / sizeof(float))));
    task ours = {.run = run_copy, .dst = &dst, .src = &src};
    task raw = {.run = run_raw,
                .to = dst.data,
                .from = host,
                .bytes = bytes,
                .kind = cudaMemcpyHostToDevice};
    in_turn((task *[]){&ours, &raw}, 2);
    if (bytes >= (size_t)1 << 20)
        line(row, what, (double)bytes / ours.median * 1e-9, "GB/s", raw.median / ours.median, 0.99,
             false);
    else
        line(row, what, (ours.median - raw.median) * 1e6, "us", (ours.median - raw.median) * 1e6, 2,
             true);
}

static void rows_in(void)
{
    void *host = pinned(block_bytes), *pageable = malloc(block_bytes), *other = malloc(block_bytes);
    if (pageable == NULL || other == NULL)
        exit(1);
    memset(pageable, 1, block_bytes);
    memset(other, 1, block_bytes);
    host_to_device("G1", "copy in, pinned, over one cudaMemcpyAsync", host, block_bytes);
    host_to_device("G1", "copy in, pinned, 64 KiB, more than cudaMemcpyAsync", host, 64 << 10);
    dp_tensor dst = on_device(1, elements());
    dp_tensor src = dp_wrap(pageable, DP_F32, DP_SHAPE(1, elements()));
    task ours = {.run = run_copy, .dst = &dst, .src = &src};
    task raw = {.run = run_raw,
                .to = dst.data,
                .from = pageable,
                .bytes = block_bytes,
                .kind = cudaMemcpyHostToDevice};
    task fast = raw,
         local = {.run = run_memcpy, .to = other, .from = pageable, .bytes = block_bytes};
    fast.from = host;
    raw = SIMULATED ? fast : raw; /* to the simulator pageable memory is an error */
    in_turn((task *[]){&ours, &raw, &fast, &local}, 4);
    double bound = fast.median > local.median ? fast.median : local.median;
    line("G2", "copy in, pageable, over min(pinned, the threads' memcpy)",
         (double)block_bytes / ours.median * 1e-9, "GB/s", bound / ours.median, 0.85, false);
    line("G2", "copy in, pageable, over cudaMemcpyAsync of it",
         (double)block_bytes / ours.median * 1e-9, "GB/s", raw.median / ours.median, 1.5, false);
    task out = {.run = run_copy, .dst = &src, .src = &dst}, raw_out = raw;
    raw_out.to = SIMULATED ? host : pageable;
    raw_out.from = dst.data;
    raw_out.kind = cudaMemcpyDeviceToHost;
    in_turn((task *[]){&out, &raw_out}, 2);
    line("G2", "copy out, pageable, over cudaMemcpyAsync of it",
         (double)block_bytes / out.median * 1e-9, "GB/s", raw_out.median / out.median, 1.5, false);
    free(pageable);
    free(other);
}

/* Half of the columns of a block, inside the GPU. */
static void half_of_columns(const char *what, int64_t row_bytes, double target, bool scatters)
{
    int64_t cols = row_bytes / (int64_t)sizeof(float), rows = elements() / (2 * cols);
    dp_tensor whole = on_device(rows, 2 * cols), half, dense = on_device(rows, cols);
    size_t bytes = (size_t)(rows * row_bytes);
    MUST(dp_narrow(&whole, 1, cols, cols, &half));
    task ours = {.run = run_copy,
                 .repeats = often(8),
                 .dst = scatters ? &dense : &half,
                 .src = scatters ? &half : &dense};
    task raw = {.run = run_raw,
                .repeats = often(8),
                .to = dense.data,
                .from = whole.data,
                .bytes = bytes,
                .kind = cudaMemcpyDeviceToDevice};
    task raw_2d = {.run = run_raw_2d,
                   .repeats = often(8),
                   .to = ours.dst->data,
                   .from = ours.src->data,
                   .pitch_to = (size_t)row_bytes * (scatters ? 1 : 2),
                   .pitch_from = (size_t)row_bytes * (scatters ? 2 : 1),
                   .bytes = (size_t)row_bytes,
                   .rows = (size_t)rows,
                   .kind = cudaMemcpyDeviceToDevice};
    bool small = row_bytes < 4096;
    in_turn((task *[]){&ours, small ? &raw_2d : &raw}, 2);
    line("G3", what, 2 * (double)bytes / ours.median * 1e-9, "GB/s",
         (small ? raw_2d.median : raw.median) / ours.median, target, false);
}

/* Seconds that a copy of one byte inside the GPU takes, read and write counted. */
static double seconds_per_byte(void)
{
    dp_tensor a = on_device(1, elements()), b = on_device(1, elements());
    task raw = {.run = run_raw,
                .repeats = often(8),
                .to = a.data,
                .from = b.data,
                .bytes = block_bytes,
                .kind = cudaMemcpyDeviceToDevice};
    in_turn((task *[]){&raw}, 1);
    return raw.median / (2.0 * (double)block_bytes);
}

static dp_kernel_args args_of(dp_kernel kernel, void *const *out, size_t out_count,
                              const void *const *in, size_t in_count, size_t count)
{
    return (dp_kernel_args){.kernel = kernel,
                            .op = DP_OP_SUM,
                            .dtype = DP_F32,
                            .in_dtype = DP_F32,
                            .count = count,
                            .out = out,
                            .in = in,
                            .out_count = out_count,
                            .in_count = in_count,
                            .alpha = 1,
                            .beta = 1,
                            .numbers = {1e-3, 1e-2, 0.1, 0.9, 0.1, 1, 1e-8}};
}

static void against_limit(const char *row, const char *what, const dp_kernel_args *kernel,
                          double blocks, double target)
{
    task ours = {.run = run_kernel, .repeats = often(8), .kernel = kernel};
    double limit = seconds_per_byte() * blocks * (double)block_bytes;
    in_turn((task *[]){&ours}, 1);
    line(row, what, blocks * (double)block_bytes / ours.median * 1e-9, "GB/s", limit / ours.median,
         target, false);
}

static void rows_kernels(void)
{
    dp_tensor blocks[5];
    void *out[3];
    const void *in[4];
    for (int i = 0; i < 5; i++)
        blocks[i] = on_device(1, elements());
    for (int i = 0; i < 4; i++)
        in[i] = blocks[i].data;
    out[0] = blocks[4].data;
    size_t count = (size_t)elements();
    dp_kernel_args reduce = args_of(DP_KERNEL_REDUCE, out, 1, in, 4, count);
    against_limit("G5", "gradients of 4 devices into one block, over 5 N bytes", &reduce, 5, 0.92);
    for (int i = 0; i < 3; i++)
        out[i] = blocks[i].data;
    in[0] = blocks[3].data;
    dp_kernel_args sgd = args_of(DP_KERNEL_SGD, out, 2, in, 1, count);
    dp_kernel_args adamw = args_of(DP_KERNEL_ADAMW, out, 3, in, 1, count);
    against_limit("G6", "SGD with momentum, over 5 N bytes", &sgd, 5, 0.90);
    against_limit("G6", "AdamW, over 7 N bytes", &adamw, 7, 0.90);
    void *result[1] = {blocks[4].data};
    dp_kernel_args stats = args_of(DP_KERNEL_STATS, result, 1, in, 1, count);
    against_limit("G7", "sum of squares and found-inf, over N bytes", &stats, 1, 0.85);
}

/* AdamW on 400 tensors of 1 Ki to 400 Ki elements: as sets of one kernel, and a launch each. */
static void *mixed_out[TENSORS][3];
static const void *mixed_in[TENSORS];
static size_t mixed_counts[TENSORS];

static double mixed_make(void)
{
    double bytes = 0;
    int64_t scale = (int64_t)(block_bytes >> 18);
    for (int i = 0; i < often(TENSORS); i++) {
        int64_t count = (1 + (i * 7919) % TENSORS) * (scale > 0 ? scale : 1);
        for (int k = 0; k < 3; k++)
            mixed_out[i][k] = on_device(1, count).data;
        mixed_in[i] = on_device(1, count).data;
        mixed_counts[i] = (size_t)count;
        bytes += (double)count * sizeof(float);
    }
    return bytes;
}

static dp_kernel_args adamw_of_mixed(void)
{
    dp_kernel_args all = args_of(DP_KERNEL_ADAMW, mixed_out[0], 3, mixed_in, 1, 0);
    all.set_count = (size_t)often(TENSORS);
    all.counts = mixed_counts;
    return all;
}

static void run_each(task *t)
{
    dp_kernel_args one = *t->kernel;
    for (size_t i = 0; i < t->kernel->set_count; i++) {
        one.set_count = 0;
        one.count = mixed_counts[i];
        one.out = mixed_out[i];
        one.in = &mixed_in[i];
        MUST(dp_kernel_run(ctx, 0, &one));
    }
}

static void rows_mixed(void)
{
    double limit = seconds_per_byte() * 7 * mixed_make();
    const dp_kernel_args all = adamw_of_mixed();
    task together = {.run = run_kernel, .repeats = often(8), .kernel = &all},
         each = {.run = run_each, .repeats = often(8), .kernel = &all};
    in_turn((task *[]){&together, &each}, 2);
    line("G6", "AdamW on 400 tensors of mixed sizes, over 7 N bytes", together.median * 1e6, "us",
         limit / together.median, 0.90, false);
    printf("     a launch each: %.3f us, %.3f\n", each.median * 1e6, limit / each.median);
}

/* ---- wrapper and steady step ----------------------------------------------------------------- */

static dp_status forward(dp_call *call)
{
    call->out = dp_at(call->args, 0);
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    call->args_grad = dp_none();
    return DP_OK;
}

static dp_module *empty_net(void)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    dp_module *net = NULL;
    MUST(dp_module_create(
        ctx, &(dp_module_config){.name = "empty", .methods = methods, .method_count = 2}, &net));
    return net;
}

static dp_module *nets[2];
static dp_value batch;

static void run_step(task *t)
{
    dp_scope *step = dp_scope_begin(ctx);
    dp_value out;
    MUST(dp_invoke(nets[t->kind], step, "forward", batch, dp_none(), NULL, &out, NULL));
    dp_scope_end(step);
}

static void rows_wrapper(void)
{
    dp_tensor x = on_device(64, 64);
    batch = DP_LIST_OF(scope, dp_of(scope, &x));
    nets[0] = empty_net();
    MUST(dp_data_parallel(nets[0], NULL, &nets[1]));
    task bare = {.run = run_step, .kind = 0, .repeats = often(1000)};
    task wrapped = {.run = run_step, .kind = 1, .repeats = often(1000)};
    in_turn((task *[]){&bare, &wrapped}, 2);
    double more = (wrapped.median - bare.median) * 1e6;
    line("G4", "dp_data_parallel of one GPU, more than the module", more, "us", more, 1.5, true);
}

/* Everything that a steady step must not do passes one of these. */
static long forbidden, waited;
static struct dp__cuda plain;

static cudaError_t counted_malloc(void **out, size_t bytes)
{
    forbidden++;
    return plain.cudaMalloc(out, bytes);
}
static cudaError_t counted_free(void *data)
{
    forbidden++;
    return plain.cudaFree(data);
}
static cudaError_t counted_host_alloc(void **out, size_t bytes, unsigned flags)
{
    forbidden++;
    return plain.cudaHostAlloc(out, bytes, flags);
}
static cudaError_t counted_stream_sync(cudaStream_t native)
{
    waited++;
    return plain.cudaStreamSynchronize(native);
}
static cudaError_t counted_event_sync(cudaEvent_t event)
{
    waited++;
    return plain.cudaEventSynchronize(event);
}
static cudaError_t counted_event_create(cudaEvent_t *out, unsigned flags)
{
    forbidden++;
    return plain.cudaEventCreateWithFlags(out, flags);
}
static cudaError_t counted_stream_create(cudaStream_t *out, unsigned flags, int priority)
{
    forbidden++;
    return plain.cudaStreamCreateWithPriority(out, flags, priority);
}
static nvrtcResult counted_compile(nvrtcProgram program, int count, const char *const *options)
{
    forbidden++;
    return plain.nvrtcCompileProgram(program, count, options);
}

/* Scatter over 4 devices of one GPU from pinned memory, add up, gather. */
static void steady_step(dp_ctx *four, const dp_tensor *images)
{
    dp_scope *step = dp_scope_begin(four);
    dp_value parts, whole, sum;
    MUST(dp_scatter(four, step, dp_of(step, images), NULL, &parts));
    MUST(dp_gather(four, step, parts, NULL, &whole));
    MUST(dp_reduce_add(four, step, parts, NULL, &sum));
    dp_scope_end(step);
}

static void rows_steady(void)
{
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    dp_ctx *four = NULL;
    MUST(dp_open(
        &(dp_config){.backends = backends, .device_count = 4, .devices = (const int[]){0, 0, 0, 0}},
        &four));
    dp_tensor images = dp_wrap(pinned(1 << 20), DP_F32, DP_SHAPE(64, 4096));
    for (int i = 0; i < 5; i++)
        steady_step(four, &images);
    plain = dp__cuda;
    dp__cuda.cudaMalloc = counted_malloc;
    dp__cuda.cudaFree = counted_free;
    dp__cuda.cudaHostAlloc = counted_host_alloc;
    dp__cuda.cudaStreamSynchronize = counted_stream_sync;
    dp__cuda.cudaEventSynchronize = counted_event_sync;
    dp__cuda.cudaEventCreateWithFlags = counted_event_create;
    dp__cuda.cudaStreamCreateWithPriority = counted_stream_create;
    dp__cuda.nvrtcCompileProgram = counted_compile;
    for (int i = 0; i < 20; i++)
        steady_step(four, &images);
    dp__cuda = plain;
    line("G8", "allocations and creations in 20 steady steps", (double)forbidden, "calls",
         (double)forbidden, 0, true);
    line("G8", "waits in them, for 4 copies from pinned memory a step", (double)waited, "calls",
         (double)waited, 0, true);
    dp_close(four);
}

/* ---- captured -------------------------------------------------------------------------------- */

/* A batch from pinned memory, AdamW on all tensors, the norm of the batch. */
static void small_step(const dp_tensor *images, const dp_tensor *on_gpu, const dp_tensor *norm)
{
    const dp_kernel_args all = adamw_of_mixed();
    const void *in[] = {on_gpu->data};
    void *out[] = {norm->data};
    const dp_kernel_args stats =
        args_of(DP_KERNEL_STATS, out, 1, in, 1, (size_t)dp_tensor_count(on_gpu));
    MUST(dp_copy(ctx, on_gpu, images, NULL));
    MUST(dp_kernel_run(ctx, 0, &all));
    MUST(dp_kernel_run(ctx, 0, &stats));
}

static void rows_captured(void)
{
    dp_tensor images = dp_wrap(pinned(1 << 20), DP_F32, DP_SHAPE(64, 4096));
    dp_tensor on_gpu = on_device(64, 4096), norm = on_device(1, 4);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    double plain_time[ROUNDS_MAX], replay[ROUNDS_MAX];
    (void)mixed_make();
    wait_all();
    MUST_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    small_step(&images, &on_gpu, &norm);
    MUST_CUDA(cudaStreamEndCapture(stream, &graph));
    MUST_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = -2; round < rounds; round++) {
        double begin = seconds();
        small_step(&images, &on_gpu, &norm);
        double enqueued = seconds() - begin;
        wait_all();
        begin = seconds();
        MUST_CUDA(cudaGraphLaunch(exec, stream));
        if (round >= 0) {
            plain_time[round] = enqueued;
            replay[round] = seconds() - begin;
        }
        wait_all();
    }
    qsort(plain_time, (size_t)rounds, sizeof *plain_time, by_size);
    qsort(replay, (size_t)rounds, sizeof *replay, by_size);
    line("G10", "replay of a captured step, host time", replay[rounds / 2] * 1e6, "us",
         replay[rounds / 2] * 1e6, 10, true);
    printf("     the same step enqueued: %.3f us\n", plain_time[rounds / 2] * 1e6);
}

/* ---- the same bits --------------------------------------------------------------------------- */

enum { SHARDS = 8 };
static dp_ctx *shard_ctx[2];
static dp_part shard_parts[2][SHARDS];

static void run_all_reduce(task *t)
{
    MUST(dp_all_reduce(shard_ctx[t->kind], shard_parts[t->kind], t->bytes / sizeof(float), DP_F32,
                       DP_OP_SUM));
    MUST(dp_wait(shard_ctx[t->kind]));
}

/* Gradients of eight: devices that share the GPU, and shards, whose sums do not depend on how many
   GPUs there are. */
static void rows_same_bits(void)
{
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    const dp_config configs[2] = {
        {.backends = backends, .device_count = SHARDS, .devices = (const int[SHARDS]){0}},
        {.backends = backends, .device_count = 1, .shards = SHARDS}};
    const size_t bytes = block_bytes / SHARDS;
    for (int k = 0; k < 2; k++) {
        MUST(dp_open(&configs[k], &shard_ctx[k]));
        dp_scope *own = dp_scope_begin(shard_ctx[k]);
        for (int i = 0; i < SHARDS; i++) {
            dp_tensor block;
            MUST(dp_tensor_new(own, dp_local_device(shard_ctx[k], i), DP_F32,
                               DP_SHAPE((int64_t)(bytes / sizeof(float))), &block));
            MUST(dp_fill(shard_ctx[k], &block, dp_float(0.5)));
            shard_parts[k][i] = (dp_part){.send = block.data, .recv = block.data};
        }
    }
    task devices = {.run = run_all_reduce, .kind = 0, .bytes = bytes};
    task shards = {.run = run_all_reduce, .kind = 1, .bytes = bytes};
    in_turn((task *[]){&devices, &shards}, 2);
    line("G12", "gradients of 8 shards, over those of 8 devices", shards.median * 1e6, "us",
         shards.median / devices.median, 1.1, true);
    for (int k = 0; k < 2; k++)
        dp_close(shard_ctx[k]);
}

/* ---- main ------------------------------------------------------------------------------------ */

static void open_it(double *out_bare, double *out_opened)
{
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    const dp_config config = {.backends = backends, .device_count = 1};
    CUcontext bare = NULL;
    double begin = seconds();
    if (dp__cuda_ready() != DP_OK ||
        dp__cuda.call_cuDevicePrimaryCtxRetain(&bare, 0) != CUDA_SUCCESS) {
        fprintf(stderr, "%s\n", dp_last_error());
        exit(1);
    }
    *out_bare = seconds() - begin;
    begin = seconds();
    MUST(dp_open(&config, &ctx));
    *out_opened = seconds() - begin;
    (void)dp__cuda.call_cuDevicePrimaryCtxRelease(0);
    stream = dp_cuda_stream(dp_local_stream(ctx, 0));
    MUST(dp__cuda_enter(&dp__cuda_gpus[0])); /* for the plain calls, to the end */
}

static double bare_seconds, opened_seconds;

static void rows_open(void)
{
    printf("a bare context takes %.3f s\n", bare_seconds);
    line("G9", "dp_open, with a context there already", opened_seconds, "s", opened_seconds, 0.5,
         true);
    printf("a copy inside the GPU: %.0f GB/s, read and write\n", 1e-9 / seconds_per_byte());
}

static _Noreturn void run_rows(void (*rows)(void))
{
    open_it(&bare_seconds, &opened_seconds);
    scope = dp_scope_begin(ctx);
    rows();
    dp_scope_end(scope);
    dp_close(ctx);
    exit(0);
}

/* False: it has not ended in time, and so was killed. It may hang where not even that ends it. */
static bool ends(pid_t child, int *out_status)
{
    for (double end = seconds() + SECONDS_MOST; seconds() < end; poll(NULL, 0, 10))
        if (waitpid(child, out_status, WNOHANG) == child)
            return true;
    kill(child, SIGKILL);
    return false;
}

/* Rows have a process of their own: what fails or hangs in it leaves the others alone. */
static bool measured(const char *names, void (*rows)(void))
{
    int status = 0;
    pid_t child = fork();
    if (child == 0)
        run_rows(rows);
    bool ended = child > 0 && ends(child, &status);
    if (ended && WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    if (!ended)
        printf("%s: absent from here on, it takes more than %d s\n", names, SECONDS_MOST);
    else if (WIFSIGNALED(status))
        printf("%s: absent from here on, signal %d\n", names, WTERMSIG(status));
    else
        printf("%s: absent from here on, as said above\n", names);
    return false;
}

static void rows_columns(void)
{
    half_of_columns("scatter along dim 1, rows of 4 KiB, over a plain copy", 4096, 0.9, true);
    half_of_columns("gather along dim 1, rows of 4 KiB, over a plain copy", 4096, 0.8, false);
    half_of_columns("scatter along dim 1, rows of 64 B, over one 2-D copy", 64, 5, true);
}

int main(int argc, char **argv)
{
    if (argc > 1 && atoi(argv[1]) > 0)
        block_bytes = (size_t)atoi(argv[1]) << 20;
    if (argc > 2 && atoi(argv[2]) > 0 && atoi(argv[2]) < ROUNDS_MAX)
        rounds = atoi(argv[2]);
    static const struct {
        const char *names;
        void (*rows)(void);
    } parts[] = {{"G9", rows_open},    {"G1, G2", rows_in},          {"G3", rows_columns},
                 {"G4", rows_wrapper}, {"G5, G6, G7", rows_kernels}, {"G6", rows_mixed},
                 {"G8", rows_steady},  {"G10", rows_captured},       {"G12", rows_same_bits}};
    bool all = true;
    if (SIMULATED)
        simulate();
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* what there is stays when the rest is cut off */
    printf("blocks of %zu MiB, medians of %d rounds\n", block_bytes >> 20, rounds);
    printf("%-4s %-54s %10s %-5s %8s  %-9s\n", "row", "what", "dp.h", "", "ratio", "target");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        all = measured(parts[i].names, parts[i].rows) && all;
    printf("G11  two or more GPUs: absent\n");
    return !all;
}
