/* selftest.c - does the simulator find what it should? Programs with one bug each, which must be
   found under its name, and programs without, which must pass. Each runs in a process of its own.

     planted NAME: found                                                                          */

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cuda.h"
#include "cuda_runtime_api.h"
#include "grid.h"
#include "nccl.h"
#include "nvrtc.h"
#include "sim.h"

enum { BYTES = 1 << 16 };

/* What programs have: two streams and an event on the first GPU, one of each on the second. */
static cudaStream_t a, b, far;
static cudaEvent_t event, far_event;
static char *x, *y, *far_x; /* device memory */
static char *pinned;
static cudaLibrary_t library;
static CUresult (*push)(CUcontext);
static CUresult (*pop)(CUcontext *);
static CUcontext near_context, far_context;

static void *entry(const char *name)
{
    void *fn = NULL;
    enum cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion(name, &fn, 12080, cudaEnableDefault, &result);
    return fn;
}

static CUcontext context_of(CUdevice device)
{
    CUcontext context = NULL;
    CUresult (*retain)(CUcontext *, CUdevice);
    void *fn = entry("cuDevicePrimaryCtxRetain");
    memcpy(&retain, &fn, sizeof fn);
    retain(&context, device);
    return context;
}

static void set_up(void)
{
    void *push_fn = entry("cuCtxPushCurrent"), *pop_fn = entry("cuCtxPopCurrent");
    void *device = NULL, *second = NULL, *third = NULL, *host = NULL;
    CUcontext popped;
    int count;
    cudaGetDeviceCount(&count);
    memcpy(&push, &push_fn, sizeof push_fn);
    memcpy(&pop, &pop_fn, sizeof pop_fn);
    far_context = context_of(1);
    near_context = context_of(0);
    push(far_context);
    cudaStreamCreateWithPriority(&far, cudaStreamNonBlocking, 0);
    cudaEventCreateWithFlags(&far_event, cudaEventDisableTiming);
    cudaMalloc(&third, BYTES);
    pop(&popped);
    push(near_context);
    cudaStreamCreateWithPriority(&a, cudaStreamNonBlocking, 0);
    cudaStreamCreateWithPriority(&b, cudaStreamNonBlocking, 0);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaMalloc(&device, BYTES);
    cudaMalloc(&second, BYTES);
    cudaHostAlloc(&host, BYTES, cudaHostAllocPortable);
    cudaLibraryLoadData(&library, "sim sm_90", NULL, NULL, 0, NULL, NULL, 0);
    x = device;
    y = second;
    far_x = third;
    pinned = host;
}

static void release(CUdevice device)
{
    CUresult (*drop)(CUdevice);
    void *fn = entry("cuDevicePrimaryCtxRelease");
    memcpy(&drop, &fn, sizeof fn);
    drop(device);
}

/* Everything given back, as a correct program does. */
static void clean_up(void)
{
    CUcontext popped;
    cudaStreamSynchronize(a);
    cudaStreamSynchronize(b);
    cudaStreamSynchronize(far);
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
    cudaEventDestroy(event);
    cudaFree(x);
    cudaFree(y);
    cudaFreeHost(pinned);
    cudaLibraryUnload(library);
    pop(&popped);
    push(far_context);
    cudaStreamDestroy(far);
    cudaEventDestroy(far_event);
    cudaFree(far_x);
    pop(&popped);
    release(0);
    release(1);
    sim_check_leaks();
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void in(void *dst, cudaStream_t stream)
{
    cudaMemcpyAsync(dst, pinned, BYTES, cudaMemcpyHostToDevice, stream);
}

static void out(const void *src, cudaStream_t stream)
{
    cudaMemcpyAsync(pinned, src, BYTES, cudaMemcpyDeviceToHost, stream);
}

/* 64 bytes of any kind. */
static void some(void *dst, const void *src, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    cudaMemcpyAsync(dst, src, 64, kind, stream);
}

static void inside(void *dst, const void *src, cudaStream_t stream)
{
    cudaMemcpyAsync(dst, src, BYTES, cudaMemcpyDeviceToDevice, stream);
}

static void record(cudaStream_t stream)
{
    cudaEventRecord(event, stream);
}

static void wait_on(cudaStream_t stream)
{
    cudaStreamWaitEvent(stream, event, 0);
}

/* Fill `count` floats. */
static void fill(void *dst, size_t count, cudaStream_t stream)
{
    static _Alignas(16) char params[SIM_PARAM_BYTES];
    void *arguments[] = {params};
    cudaKernel_t kernel = NULL;
    sim_fill_params(params, dst, count);
    cudaLibraryGetKernel(&kernel, library, "dp_cuda_fill");
    cudaLaunchKernel((const void *)kernel, (dim3){1, 1, 1}, (dim3){256, 1, 1}, arguments, 0,
                     stream);
}

static void use_far(void)
{
    CUcontext popped;
    pop(&popped);
    push(far_context);
}

static volatile char sink;

/* In another thread, which has a context. */
static void (*elsewhere)(void);
static void *run_elsewhere(void *unused)
{
    CUcontext popped;
    push(near_context);
    elsewhere();
    cudaGetLastError();
    pop(&popped);
    return unused;
}
static void in_a_thread(void (*fn)(void))
{
    pthread_t thread;
    elsewhere = fn;
    pthread_create(&thread, NULL, run_elsewhere, NULL);
    pthread_join(thread, NULL);
}

/* ---- kernels -----------------------------------------------------------------------------------

   Written as for CUDA. Each touches `bytes` at `data`.                                           */

typedef struct numbers {
    int *data;
    size_t bytes, count;
} numbers;

typedef struct __attribute__((aligned(16))) four {
    int at[4];
} four;

static unsigned here(void)
{
    return blockIdx.x * blockDim.x + threadIdx.x;
}

/* Each lane's number, added up in a tree. */
static void add_lanes(const numbers *p, bool before_tree, bool in_tree)
{
    dp_shared int sums[256];
    sums[threadIdx.x] = (int)threadIdx.x;
    if (before_tree)
        __syncthreads();
    for (unsigned half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
        if (in_tree)
            __syncthreads();
    }
    if (threadIdx.x == 0)
        p->data[blockIdx.x] = sums[0];
}
static void adds_up(const void *p)
{
    add_lanes(p, true, true);
}
static void adds_up_too_early(const void *p)
{
    add_lanes(p, false, true);
}
static void adds_up_without_steps(const void *p)
{
    add_lanes(p, true, false);
}
static void turns_around(const void *arguments) /* and writes again what others still read */
{
    const numbers *p = arguments;
    dp_shared int row[256];
    for (int round = 0; round < 2; round++) {
        row[threadIdx.x] = (int)threadIdx.x + round;
        __syncthreads();
        p->data[(unsigned)round * 256 + threadIdx.x] = row[255 - threadIdx.x];
    }
}
static void half_waits(const void *arguments)
{
    const numbers *p = arguments;
    if (threadIdx.x < 128)
        __syncthreads();
    p->data[threadIdx.x] = 1;
}
static void some_wait_twice(const void *arguments)
{
    const numbers *p = arguments;
    __syncthreads();
    if (threadIdx.x == 7)
        __syncthreads();
    p->data[threadIdx.x] = 1;
}
static void reads_what_was_never_written(const void *arguments)
{
    const numbers *p = arguments;
    dp_shared int sum[1];
    sum[0] += 1;
    p->data[threadIdx.x] = sum[0];
}
static void forgets_its_block(const void *arguments)
{
    const numbers *p = arguments;
    p->data[threadIdx.x] = (int)here();
}
static void strides(const void *arguments)
{
    const numbers *p = arguments;
    for (unsigned i = here(); i < p->count; i += gridDim.x * blockDim.x)
        p->data[i] = (int)i;
}
static void shifts_in_place(const void *arguments)
{
    const numbers *p = arguments;
    p->data[here()] = p->data[here() + 1];
}
static void looks_from_the_middle(const void *arguments) /* at one who was before it, either way */
{
    const numbers *p = arguments;
    if (threadIdx.x == 100 || threadIdx.x == 155)
        p->data[threadIdx.x] = 1;
    if (threadIdx.x == 128)
        p->data[0] = (p->data[100] == 1) + (p->data[155] == 1);
}
static void reads_behind(const void *arguments)
{
    const numbers *p = arguments;
    if (here() == 0)
        p->data[0] = p->data[p->bytes / 4 + 8];
}
static void writes_behind(const void *arguments)
{
    const numbers *p = arguments;
    p->data[here()] = 1;
}
static void writes_before(const void *arguments)
{
    const numbers *p = arguments;
    p->data[-1] = 1;
}
static void four_at_a_time(const void *arguments)
{
    const numbers *p = arguments;
    ((volatile four *)(void *)p->data)[here()].at[0] = 5;
}

static size_t numbers_ranges(const void *arguments, sim_range *out)
{
    const numbers *p = arguments;
    *out = (sim_range){p->data, p->bytes, 4, true};
    return 1;
}

static sim_lane_fn *planted_lane;

static bool numbers_run(const void *arguments, char *const *at, const sim_launch *launch)
{
    numbers p = *(const numbers *)arguments;
    p.data = (int *)(void *)at[0];
    return sim_grid_run(planted_lane, &p, launch->blocks, launch->lanes, launch->order);
}

static cudaKernel_t kernel_of(sim_lane_fn *lane)
{
    cudaKernel_t kernel = NULL;
    planted_lane = lane;
    sim_add_kernel(&(sim_kernel){"planted", numbers_ranges, numbers_run});
    cudaLibraryGetKernel(&kernel, library, "planted");
    return kernel;
}

/* On `bytes` bytes at `data`, with 256 lanes a block. */
static void launch(sim_lane_fn *lane, void *data, size_t bytes, unsigned blocks)
{
    static _Alignas(16) char params[SIM_PARAM_BYTES];
    void *arguments[] = {params};
    const numbers own = {data, bytes, bytes / 4};
    memcpy(params, &own, sizeof own);
    cudaLaunchKernel((const void *)kernel_of(lane), (dim3){blocks, 1, 1}, (dim3){256, 1, 1},
                     arguments, 0, a);
}

/* ---- planted --------------------------------------------------------------------------------- */

static void missing_wait_after_write(void)
{
    in(x, a);
    inside(y, x, b);
}
static void missing_wait_two_writers(void)
{
    in(x, a);
    fill(x, 8, b);
}
static void missing_wait_before_write(void)
{
    inside(y, x, a);
    in(x, b);
}
static void missing_wait_of_a_kernel(void)
{
    fill(x, 8, a);
    inside(y, x, b);
}
static void event_recorded_too_early(void)
{
    record(a);
    in(x, a);
    wait_on(b);
    inside(y, x, b);
}
static void event_waited_too_late(void)
{
    in(x, a);
    record(a);
    inside(y, x, b);
    wait_on(b);
}
static void event_on_the_wrong_stream(void)
{
    in(x, a);
    record(b);
    wait_on(b);
    inside(y, x, b);
}
static void event_recorded_once_only(void)
{
    in(x, a);
    record(a);
    wait_on(b);
    inside(y, x, b);
    in(x, a);
    inside(y, x, b);
}
static void slot_reused_too_early(void)
{
    in(x, a);
    out(y, b);
}
static void reduced_before_backward(void)
{
    fill(x, 8, a);
    record(a);
    fill(x + 16, 8, a);
    wait_on(b);
    inside(y, x, b);
}
static void sync_of_the_wrong_stream(void)
{
    out(x, a);
    cudaStreamSynchronize(b);
    sink = pinned[5];
}
static void host_reads_too_early(void)
{
    out(x, a);
    sink = pinned[0];
}
static void host_writes_in_flight(void)
{
    in(x, a);
    pinned[9] = 1;
}
static void host_reads_device_memory(void)
{
    sink = x[0];
}
static void host_writes_device_memory(void)
{
    x[0] = 1;
}
static void copy_beyond_the_end(void)
{
    cudaMemcpyAsync(x + 1, pinned, BYTES, cudaMemcpyHostToDevice, a);
}
static void kernel_beyond_the_end(void)
{
    fill(x, BYTES / 4 + 1, a);
}
static void bytes_for_elements(void)
{
    fill(x, BYTES, a);
}
static void kernel_in_the_middle_of_an_element(void)
{
    fill(x + 2, 8, a);
}
static void use_after_free(void)
{
    cudaFree(x);
    in(x, a);
}
static void free_twice(void)
{
    cudaFree(x);
    cudaFree(x);
}
static void free_in_flight(void)
{
    in(x, a);
    cudaFree(x);
}
static void free_of_the_middle(void)
{
    cudaFree(x + 512);
}
static void free_of_pinned_memory(void)
{
    cudaFree(pinned);
}
static void operand_of_another_device(void)
{
    fill(far_x, 8, a);
}
static void wrong_current_device(void)
{
    use_far();
    fill(x, 8, a);
}
static void event_of_another_device(void)
{
    cudaEventRecord(far_event, a);
}
static void wait_for_nothing(void)
{
    wait_on(a);
}
static void sync_with_nothing(void)
{
    cudaEventSynchronize(event);
}
static void stream_after_destroy(void)
{
    cudaStreamDestroy(b);
    in(x, b);
}
static void event_after_destroy(void)
{
    cudaEventDestroy(event);
    record(a);
}
static void pageable_copy(void)
{
    static char own[64];
    some(x, own, cudaMemcpyHostToDevice, a);
}
static void copy_of_the_wrong_kind(void)
{
    some(x, pinned, cudaMemcpyDeviceToDevice, a);
}
static void default_stream(void)
{
    some(x, y, cudaMemcpyDeviceToDevice, NULL);
}
static void no_context(void)
{
    CUcontext c;
    void *p;
    pop(&c);
    cudaMalloc(&p, 64);
}
static void pointer_from_nowhere(void)
{
    some((void *)(uintptr_t)0x1230, x, cudaMemcpyDeviceToHost, a);
}
static void pitch_below_the_row(void)
{
    cudaMemcpy2DAsync(x, 64, y, 256, 128, 4, cudaMemcpyDeviceToDevice, a);
}
static void context_released_twice(void)
{
    release(1);
    release(1);
}
static void memory_leak(void)
{
    void *p;
    cudaMalloc(&p, 64);
    clean_up();
}
static void stream_leak(void)
{
    cudaStream_t s;
    cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, 0);
    clean_up();
}
static void event_leak(void)
{
    cudaEvent_t e;
    cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    clean_up();
}
static void context_left_current(void)
{
    push(near_context);
    clean_up();
}

static void wait_where_only_enqueueing(void)
{
    in(x, a);
    sim_enqueue_only(true);
    cudaStreamSynchronize(a);
}
static void allocation_in_a_step(void)
{
    void *data = NULL;
    sim_enqueue_only(true);
    cudaMalloc(&data, BYTES);
}
static void begin_for_all(void)
{
    cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal);
}
static void query_during_capture(void)
{
    record(b);
    in_a_thread(begin_for_all);
    cudaEventQuery(event);
}
static void wait_during_capture(void)
{
    in_a_thread(begin_for_all);
    cudaStreamSynchronize(b);
}
static void peer_without_access(void)
{
    cudaMemcpyPeerAsync(x, 0, far_x, 1, BYTES, a);
}
static void peer_of_another_device(void)
{
    cudaDeviceEnablePeerAccess(1, 0);
    cudaMemcpyPeerAsync(x, 0, y, 1, BYTES, a);
}

/* ---- planted: kernels ------------------------------------------------------------------------ */

static void no_barrier_before_the_tree(void)
{
    launch(adds_up_too_early, x, 4, 1);
}
static void no_barrier_in_the_tree(void)
{
    launch(adds_up_without_steps, x, 4, 1);
}
static void no_barrier_before_writing_again(void)
{
    launch(turns_around, x, 2048, 1);
}
static void barrier_of_half_a_block(void)
{
    launch(half_waits, x, 1024, 1);
}
static void one_barrier_more(void)
{
    launch(some_wait_twice, x, 1024, 1);
}
static void shared_memory_as_it_comes(void)
{
    launch(reads_what_was_never_written, x, 1024, 1);
}
static void all_blocks_on_one_place(void)
{
    launch(forgets_its_block, x, 4096, 4);
}
static void lanes_read_what_others_write(void)
{
    for (int i = 0; i < 4096; i++)
        pinned[i] = (char)(i / 4);
    cudaMemcpyAsync(x, pinned, 4096, cudaMemcpyHostToDevice, a);
    launch(shifts_in_place, x, 257 * 4, 1);
}
static void lanes_that_only_a_shuffle_tells(void)
{
    memset(pinned, 0, 1024);
    for (int k = 0; k < 12; k++) {
        cudaMemcpyAsync(x, pinned, 1024, cudaMemcpyHostToDevice, a);
        launch(looks_from_the_middle, x, 1024, 1);
    }
}
static void kernel_reads_behind_its_operand(void)
{
    launch(reads_behind, x, 1024, 1);
}
static void kernel_writes_behind_its_operand(void)
{
    launch(writes_behind, x, 1020, 1);
}
static void kernel_writes_before_its_operand(void)
{
    launch(writes_before, x + 512, 1024, 1);
}
static void wide_access_that_is_not_aligned(void)
{
    launch(four_at_a_time, x + 8, 4096, 1);
}
static void launch_of_no_block(void)
{
    launch(strides, x, 1024, 0);
}
static void kernel_after_unload(void)
{
    const cudaKernel_t kernel = kernel_of(strides);
    static char params[SIM_PARAM_BYTES];
    void *arguments[] = {params};
    cudaLibraryUnload(library);
    cudaLaunchKernel((const void *)kernel, (dim3){1, 1, 1}, (dim3){256, 1, 1}, arguments, 0, a);
}
static void library_unloaded_twice(void)
{
    cudaLibraryUnload(library);
    cudaLibraryUnload(library);
}
static void library_leak(void)
{
    cudaLibrary_t other;
    cudaLibraryLoadData(&other, "sim sm_90", NULL, NULL, 0, NULL, NULL, 0);
    clean_up();
}
static void unknown_architecture(void)
{
    nvrtcProgram program;
    const char *option = "--gpu-architecture=sm_80";
    nvrtcCreateProgram(&program, "", "", 0, NULL, NULL);
    nvrtcCompileProgram(program, 1, &option);
}

/* ---- planted: flags, captures, errors -------------------------------------------------------- */

static void stream_that_blocks(void)
{
    cudaStream_t s;
    cudaStreamCreateWithPriority(&s, 0, 0);
}
static void flags_of_a_stream(void)
{
    cudaStream_t s;
    cudaStreamCreateWithPriority(&s, 2, 0);
}
static void uses_cuda(void *user)
{
    cudaMemcpyAsync(user, pinned, BYTES, cudaMemcpyHostToDevice, b);
}
static void host_function_that_uses_cuda(void)
{
    cudaLaunchHostFunc(a, uses_cuda, x);
    cudaStreamSynchronize(a);
}
static void event_with_timing(void)
{
    cudaEvent_t e;
    cudaEventCreateWithFlags(&e, 0);
}
static void flags_of_an_event(void)
{
    cudaEvent_t e;
    cudaEventCreateWithFlags(&e, cudaEventDisableTiming | 0x40);
}
static void flags_of_a_wait(void)
{
    record(a);
    cudaStreamWaitEvent(b, event, 2);
}
static void flags_of_pinned_memory(void)
{
    void *p;
    cudaHostAlloc(&p, 64, 0x80);
}
static void pinned_for_another_device(void)
{
    void *p;
    cudaHostAlloc(&p, 64, 0);
    use_far();
    cudaMemcpyAsync(far_x, p, 64, cudaMemcpyHostToDevice, far);
}
static void host_writes_behind_pinned_memory(void)
{
    void *p;
    cudaHostAlloc(&p, 100, cudaHostAllocPortable);
    ((char *)p)[100] = 1;
    cudaFreeHost(p);
}
static void host_touches_the_page_behind(void)
{
    pinned[BYTES] = 1;
}
static void event_taken_for_ready(void)
{
    for (int i = 0; i < 3; i++) {
        out(x, a);
        record(a);
        cudaEventQuery(event);
        cudaGetLastError();
        sink = pinned[0];
    }
}
static void write_on_the_own_stream(void)
{
    in(x, cudaStreamPerThread);
}
static void streams_of_two_threads(void)
{
    write_on_the_own_stream();
    in_a_thread(write_on_the_own_stream);
}
static void legacy_stream(void)
{
    in(x, cudaStreamLegacy);
}
static void error_left_behind(void)
{
    void *p;
    CUcontext c;
    cudaMalloc(&p, (size_t)1 << 50);
    pop(&c);
}
static void not_ready_left_behind(void)
{
    CUcontext c;
    do {
        in(x, a);
        record(a);
    } while (cudaEventQuery(event) != cudaErrorNotReady);
    pop(&c);
}
static void begin_capture(void)
{
    cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal);
}
static void capture_of_nothing_joined(void)
{
    cudaGraph_t graph;
    begin_capture();
    record(a);
    wait_on(b);
    inside(y, x, b);
    cudaStreamEndCapture(a, &graph);
}
static void capture_waits_for_others(void)
{
    in(x, b);
    record(b);
    begin_capture();
    wait_on(a);
}
static void capture_ended_elsewhere(void)
{
    cudaGraph_t graph;
    begin_capture();
    record(a);
    wait_on(b);
    cudaStreamEndCapture(b, &graph);
}
static void end_capture(void)
{
    cudaGraph_t graph;
    cudaStreamEndCapture(a, &graph);
}
static void capture_ended_by_another_thread(void)
{
    begin_capture();
    in_a_thread(end_capture);
}
static void captures_that_meet(void)
{
    begin_capture();
    cudaStreamBeginCapture(b, cudaStreamCaptureModeThreadLocal);
    record(a);
    wait_on(b);
}
static void relax(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
}
static void sync_of_a_captured_stream(void)
{
    begin_capture();
    relax();
    cudaStreamSynchronize(a);
}
static void sync_of_a_captured_event(void)
{
    begin_capture();
    record(a);
    relax();
    cudaEventSynchronize(event);
}
static void query_of_a_captured_event(void)
{
    begin_capture();
    record(a);
    relax();
    cudaEventQuery(event);
}
static void wait_for_a_capture_that_ended(void)
{
    cudaGraph_t graph;
    begin_capture();
    record(a);
    cudaStreamEndCapture(a, &graph);
    wait_on(b);
}
static void allocation_in_a_capture(void)
{
    void *p;
    begin_capture();
    cudaMalloc(&p, 64);
}
static void capture_that_does_not_end(void)
{
    begin_capture();
    clean_up();
}

static void hang(void)
{
    sim_set_peer(0, 1, SIM_PEER_HANGS);
    cudaDeviceEnablePeerAccess(1, 0);
    cudaMemcpyPeerAsync(x, 0, far_x, 1, BYTES, a);
}
static void sync_of_what_hangs(void)
{
    hang();
    cudaStreamSynchronize(a);
}
static void free_beside_what_hangs(void)
{
    hang();
    cudaFree(y);
}
static void event_of_what_hangs(void)
{
    hang();
    record(a);
    wait_on(b);
    record(b);
    cudaEventSynchronize(event);
}

/* ---- correct --------------------------------------------------------------------------------- */

static void one_stream(void)
{
    in(x, a);
    inside(y, x, a);
    out(y, a);
    cudaStreamSynchronize(a);
    sink = pinned[0];
}
static void two_streams(void)
{
    in(x, a);
    record(a);
    wait_on(b);
    inside(y, x, b);
}
static void there_and_back(void)
{
    in(x, a);
    record(a);
    wait_on(b);
    inside(y, x, b);
    record(b);
    wait_on(a);
    in(x, a);
}
static void by_the_host(void)
{
    in(x, a);
    cudaStreamSynchronize(a);
    inside(y, x, b);
}
static void by_an_event(void)
{
    in(x, a);
    record(a);
    cudaEventSynchronize(event);
    inside(y, x, b);
    pinned[0] = 1;
}
static void readers_together(void)
{
    in(x, a);
    record(a);
    wait_on(b);
    inside(y, x, a);
    some(pinned, x, cudaMemcpyDeviceToHost, b);
    cudaStreamSynchronize(b);
}
static void apart_in_one_block(void)
{
    fill(x, 8, a);
    fill(x + 64, 8, b);
}
static void kernels_in_order(void)
{
    fill(x, 8, a);
    fill(x, 8, a);
    fill(x, BYTES / 4, a);
}
static void over_two_devices(void)
{
    in(x, a);
    record(a);
    use_far();
    cudaStreamWaitEvent(far, event, 0);
    cudaMemcpyAsync(far_x, x, BYTES, cudaMemcpyDeviceToDevice, far);
    cudaEventRecord(far_event, far);
    CUcontext popped;
    pop(&popped);
    push(near_context);
    cudaStreamWaitEvent(a, far_event, 0);
    in(x, a);
}
static void peers(void)
{
    cudaDeviceEnablePeerAccess(1, 0);
    cudaMemcpyPeerAsync(x, 0, far_x, 1, BYTES, a);
}
static void enqueue_on_b(void)
{
    in(y, b);
    inside(x, y, b);
}
static void captured(void)
{
    begin_for_all();
    in_a_thread(enqueue_on_b);
    end_capture();
}
static void ring_of_slots(void)
{
    for (int i = 0; i < 8; i++) {
        memset(pinned, i, BYTES);
        in(x, i % 2 ? a : b);
        record(i % 2 ? a : b);
        cudaEventSynchronize(event);
    }
}
static void transitive(void)
{
    in(x, a);
    record(a);
    wait_on(b);
    record(b);
    use_far();
    cudaStreamWaitEvent(far, event, 0);
    some(far_x, x, cudaMemcpyDeviceToDevice, far);
    CUcontext popped;
    pop(&popped);
    push(near_context);
}

static int first_of(const void *device)
{
    int number;
    cudaMemcpyAsync(pinned, device, sizeof number, cudaMemcpyDeviceToHost, a);
    cudaStreamSynchronize(a);
    memcpy(&number, pinned, sizeof number);
    return number;
}

static void must_be(int got, int want)
{
    if (got != want)
        fprintf(stderr, "sim: wrong number: %d, not %d\n", got, want);
}
static void barriers(void)
{
    launch(adds_up, x, 12, 3);
    must_be(first_of(x), 255 * 128);
    must_be(first_of(x + 8), 255 * 128);
}
static void blocks_in_strides(void)
{
    launch(strides, x, 3000, 2);
    must_be(first_of(x + 2996), 749);
}
static void wide_accesses(void)
{
    launch(four_at_a_time, x + 16, 4096, 1);
    must_be(first_of(x + 16 + 4080), 5);
}
static void memory_begins_as_nan(void)
{
    must_be(first_of(x + 400), -1);
}
static void asked_until_ready(void)
{
    for (int i = 0; i < 8; i++) {
        out(x, a);
        record(a);
        while (cudaEventQuery(event) == cudaErrorNotReady)
            cudaGetLastError();
        pinned[0] = 1;
    }
}
static void capture_of_two_streams(void)
{
    cudaGraph_t graph;
    in(x, a);
    begin_capture();
    record(a);
    wait_on(b);
    inside(y, x, b);
    record(b);
    wait_on(a);
    inside(x, y, a);
    must_be((int)cudaStreamEndCapture(a, &graph), cudaSuccess);
    must_be((int)cudaStreamSynchronize(a), cudaSuccess);
}
/* What the documentation of cudaThreadExchangeStreamCaptureMode says of each mode of the capture,
   and of the thread that asks. */
static enum cudaStreamCaptureMode of_thread;
static int allocated; /* what cudaMalloc says */
static void allocate(void)
{
    void *p = NULL;
    enum cudaStreamCaptureMode mode = of_thread;
    cudaThreadExchangeStreamCaptureMode(&mode);
    allocated = (int)cudaMalloc(&p, 64);
    cudaFree(p);
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaGetLastError();
}
static void modes(void)
{
    enum { GLOBAL = cudaStreamCaptureModeGlobal, RELAXED = cudaStreamCaptureModeRelaxed };
    sim_hush(true);
    for (int i = 0; i < 18; i++) {
        const int of_capture = i / 2 % 3, own = i % 2;
        cudaGraph_t graph = NULL;
        of_thread = (enum cudaStreamCaptureMode)(i / 6);
        bool refused = own ? of_capture != RELAXED && i / 6 != RELAXED
                           : of_capture == GLOBAL && i / 6 == GLOBAL;
        cudaStreamBeginCapture(a, (enum cudaStreamCaptureMode)of_capture);
        if (own)
            allocate();
        else
            in_a_thread(allocate);
        must_be(allocated, refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
        must_be((int)cudaStreamEndCapture(a, &graph),
                refused ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
        must_be(graph == NULL, refused);
        must_be(sim_finding_count("in capture") > 0, refused);
        sim_forget_findings();
    }
    cudaGetLastError();
    sim_hush(false);
}
static void broken_capture_takes_no_more_work(void)
{
    cudaGraph_t graph;
    enum cudaStreamCaptureStatus status;
    sim_hush(true);
    begin_capture();
    record(a);
    wait_on(b);
    of_thread = cudaStreamCaptureModeThreadLocal;
    allocate();
    for (int i = 0; i < 2; i++) {
        cudaStream_t stream = i == 0 ? a : b;
        must_be((int)cudaStreamIsCapturing(stream, &status), cudaSuccess);
        must_be((int)status, cudaStreamCaptureStatusInvalidated);
        must_be((int)cudaMemcpyAsync(x, y, 64, cudaMemcpyDeviceToDevice, stream),
                cudaErrorStreamCaptureInvalidated);
        must_be((int)cudaEventRecord(event, stream), cudaErrorStreamCaptureInvalidated);
    }
    must_be((int)cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
    sim_hush(false);
    sim_forget_findings();
    cudaGetLastError();
    in(x, a);
    record(a);
    wait_on(b);
    inside(y, x, b);
}
static void a_captured_event_stays_so(void)
{
    cudaGraph_t graph;
    begin_capture();
    record(a);
    must_be((int)cudaStreamEndCapture(a, &graph), cudaSuccess);
    must_be((int)cudaEventSynchronize(event), cudaErrorCapturedEvent);
    must_be((int)cudaEventQuery(event), cudaErrorCapturedEvent);
    cudaGetLastError();
    record(a);
    must_be((int)cudaEventSynchronize(event), cudaSuccess);
}
static void two_captures(void)
{
    cudaGraph_t graphs[2];
    cudaGraphExec_t again;
    memset(pinned, 5, BYTES);
    in(y, a);
    cudaStreamSynchronize(a);
    begin_capture();
    cudaStreamBeginCapture(b, cudaStreamCaptureModeGlobal);
    some(x, y, cudaMemcpyDeviceToDevice, a);
    fill(x + 64, 8, b);
    must_be((int)cudaStreamEndCapture(a, &graphs[0]), cudaSuccess);
    must_be((int)cudaStreamEndCapture(b, &graphs[1]), cudaSuccess);
    cudaStreamSynchronize(b);
    must_be((int)cudaGraphInstantiate(&again, graphs[0], 0), cudaSuccess);
    memset(pinned, 6, BYTES);
    in(x, a);
    must_be((int)cudaGraphLaunch(again, a), cudaSuccess);
    must_be(first_of(x), 0x05050505);
    must_be(first_of(x + 64), 0x06060606); /* that is the other's */
    cudaGraphExecDestroy(again);
    cudaGraphDestroy(graphs[0]);
    cudaGraphDestroy(graphs[1]);
}
static void the_stream_of_a_thread(void)
{
    cudaStream_t own = cudaStreamPerThread;
    cudaGraph_t graph;
    int device = -1;
    memset(pinned, 3, BYTES);
    in(x, own);
    must_be((int)cudaStreamBeginCapture(own, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    inside(y, x, own);
    must_be((int)cudaStreamEndCapture(own, &graph), cudaSuccess);
    out(y, own);
    must_be((int)cudaStreamSynchronize(own), cudaSuccess);
    must_be(pinned[BYTES - 1], 3);
    must_be((int)cudaStreamGetDevice(own, &device), cudaSuccess);
    must_be(device, 0);
    use_far();
    cudaMemcpyAsync(far_x, pinned, BYTES, cudaMemcpyHostToDevice, own);
    must_be((int)cudaStreamSynchronize(own), cudaSuccess);
    must_be((int)cudaStreamGetDevice(own, &device), cudaSuccess);
    must_be(device, 1);
    CUcontext popped;
    pop(&popped);
    push(near_context);
}
static void a_graph_is_launched_twice(void)
{
    cudaGraph_t graph;
    cudaGraphExec_t again;
    begin_capture();
    inside(y, x, a);
    must_be((int)cudaStreamEndCapture(a, &graph), cudaSuccess);
    must_be((int)cudaGraphInstantiate(&again, graph, 0), cudaSuccess);
    must_be((int)cudaGraphDestroy(graph), cudaSuccess);
    for (char i = 1; i < 3; i++) {
        memset(pinned, i, BYTES);
        in(x, a);
        must_be((int)cudaGraphLaunch(again, a), cudaSuccess);
        out(y, a);
        must_be((int)cudaStreamSynchronize(a), cudaSuccess);
        must_be(pinned[BYTES - 1], i);
    }
    must_be((int)cudaGraphExecDestroy(again), cudaSuccess);
}
static void append_3(void *user)
{
    *(int *)user = *(int *)user * 10 + 3;
}
static void append_7(void *user)
{
    *(int *)user = *(int *)user * 10 + 7;
}
static void host_functions_run_in_order(void)
{
    int seen = 0;
    cudaGraph_t graph;
    cudaGraphExec_t again;
    begin_capture();
    cudaLaunchHostFunc(a, append_3, &seen);
    inside(y, x, a);
    cudaLaunchHostFunc(a, append_7, &seen);
    must_be((int)cudaStreamEndCapture(a, &graph), cudaSuccess);
    cudaStreamSynchronize(a);
    seen = 0;
    must_be((int)cudaGraphInstantiate(&again, graph, 0), cudaSuccess);
    must_be((int)cudaGraphDestroy(graph), cudaSuccess);
    must_be((int)cudaGraphLaunch(again, a), cudaSuccess);
    cudaLaunchHostFunc(a, append_3, &seen);
    cudaStreamSynchronize(a);
    must_be((int)cudaGraphExecDestroy(again), cudaSuccess);
    must_be(seen, 373);
}
static void pinned_for_both_devices(void)
{
    in(x, a);
    cudaStreamSynchronize(a);
    use_far();
    cudaMemcpyAsync(far_x, pinned, BYTES, cudaMemcpyHostToDevice, far);
    CUcontext popped;
    pop(&popped);
    push(near_context);
}
static void libraries_are_counted(void)
{
    cudaLibrary_t other;
    long loads = sim_library_loads();
    cudaLibraryLoadData(&other, "sim compute_75", NULL, NULL, 0, NULL, NULL, 0);
    must_be((int)(sim_library_loads() - loads), 1);
    cudaLibraryUnload(other);
    must_be((int)cudaLibraryLoadData(&other, "sim sm_75", NULL, NULL, 0, NULL, NULL, 0),
            cudaErrorNoKernelImageForDevice);
    must_be((int)cudaLibraryLoadData(&other, "sim compute_120", NULL, NULL, 0, NULL, NULL, 0),
            cudaErrorNoKernelImageForDevice);
    cudaGetLastError();
}
static void a_device_is_lost(void)
{
    sim_lose_device(0, cudaErrorIllegalAddress);
    must_be((int)cudaStreamSynchronize(a), cudaErrorIllegalAddress);
    must_be((int)cudaGetLastError(), cudaErrorIllegalAddress);
    must_be((int)cudaGetLastError(), cudaErrorIllegalAddress); /* it stays */
    use_far();
    must_be((int)cudaStreamSynchronize(far), cudaSuccess);
    CUcontext popped;
    pop(&popped);
    push(near_context);
}

/* ---- deferred -------------------------------------------------------------------------------- */

/* The same bugs seen another way: with work that is done later, in any order that is allowed, what
   nothing orders shows as a wrong number with some seed, and what is right never does. The findings
   are not asked. */
enum { TWICE = 3 }; /* no bug: records of one event on two streams, reached in any order */

static bool wrong_number(bool waits, int bug)
{
    memset(pinned, 1, BYTES);
    in(x, a);
    in(y, a);
    cudaStreamSynchronize(a);
    memset(pinned, 7, BYTES);
    in(x, a);
    record(bug == 1 ? b : a);
    if (waits || bug == 1)
        wait_on(b);
    if (bug == TWICE) {
        record(a);
        record(b);
        wait_on(a);
    }
    inside(y, x, b);
    if (bug == 2)
        fill(x, 8, a);
    cudaStreamSynchronize(a);
    cudaStreamSynchronize(b);
    memset(pinned, 0, BYTES);
    out(y, b);
    cudaStreamSynchronize(b);
    return pinned[0] != 7 || pinned[BYTES - 1] != 7;
}

static bool shows(bool waits, int bug)
{
    bool shown = false;
    for (unsigned seed = 1; seed < 200 && !shown; seed++) {
        sim_defer(seed);
        shown = wrong_number(waits, bug);
    }
    sim_defer(0);
    sim_forget_findings();
    return shown;
}

static void must_show(bool waits, int bug)
{
    sim_hush(true);
    bool shown = shows(waits, bug);
    sim_hush(false);
    if (shown)
        fprintf(stderr, "sim: wrong number: with some seed\n");
    exit(shown);
}
static void deferred_missing_wait(void)
{
    must_show(false, 0);
}
static void deferred_wait_for_the_wrong_stream(void)
{
    must_show(true, 1);
}
static void deferred_overwritten_too_early(void)
{
    must_show(true, 2);
}
static void deferred_in_order(void)
{
    if (shows(true, 0))
        fprintf(stderr, "sim: wrong number: though all is ordered\n");
}
static void deferred_recorded_on_two_streams(void)
{
    if (shows(true, TWICE))
        fprintf(stderr, "sim: wrong number: though all is ordered\n");
}

#include "planted_nccl.h"

/* clang-format off */
#define PLANTED(name, finding) {#name, finding, name, false}
#define CORRECT(name)          {#name, NULL, name, false}
#define PLANTED_ALONE(name, finding) {#name, finding, name, true}
static const struct program {
    const char *name, *finding; /* NULL: there must be none */
    void (*run)(void);
    bool alone; /* without devices */
} programs[] = {
    PLANTED(missing_wait_after_write, "race"), PLANTED(missing_wait_two_writers, "race"),
    PLANTED(missing_wait_before_write, "race"), PLANTED(missing_wait_of_a_kernel, "race"),
    PLANTED(event_recorded_too_early, "race"), PLANTED(event_waited_too_late, "race"),
    PLANTED(event_on_the_wrong_stream, "race"), PLANTED(event_recorded_once_only, "race"),
    PLANTED(slot_reused_too_early, "race"), PLANTED(reduced_before_backward, "race"),
    PLANTED(sync_of_the_wrong_stream, "host in flight"),
    PLANTED(host_reads_too_early, "host in flight"),
    PLANTED(host_writes_in_flight, "host in flight"),
    PLANTED(host_reads_device_memory, "host on device"),
    PLANTED(host_writes_device_memory, "host on device"),
    PLANTED(copy_beyond_the_end, "out of bounds"), PLANTED(kernel_beyond_the_end, "out of bounds"),
    PLANTED(bytes_for_elements, "out of bounds"),
    PLANTED(kernel_in_the_middle_of_an_element, "misaligned"),
    PLANTED(use_after_free, "use after free"),
    PLANTED(free_twice, "double free"), PLANTED(free_in_flight, "free in flight"),
    PLANTED(free_of_the_middle, "bad free"), PLANTED(free_of_pinned_memory, "bad free"),
    PLANTED(operand_of_another_device, "wrong device"),
    PLANTED(wrong_current_device, "wrong device"),
    PLANTED(event_of_another_device, "event of another device"),
    PLANTED(wait_for_nothing, "wait for nothing"), PLANTED(sync_with_nothing, "wait for nothing"),
    PLANTED(stream_after_destroy, "stream after destroy"),
    PLANTED(event_after_destroy, "event after destroy"), PLANTED(pageable_copy, "pageable"),
    PLANTED(copy_of_the_wrong_kind, "wrong kind"), PLANTED(default_stream, "legacy stream"),
    PLANTED(no_context, "no context"), PLANTED(pointer_from_nowhere, "pageable"),
    PLANTED(pitch_below_the_row, "bad pitch"),
    PLANTED(context_released_twice, "context released twice"), PLANTED(memory_leak, "leak"),
    PLANTED(stream_leak, "leak"), PLANTED(event_leak, "leak"),
    PLANTED(context_left_current, "leak"),
    PLANTED(wait_where_only_enqueueing, "blocks"), PLANTED(allocation_in_a_step, "blocks"),
    PLANTED(query_during_capture, "in capture"), PLANTED(wait_during_capture, "in capture"),
    PLANTED(peer_without_access, "peer without access"),
    PLANTED(peer_of_another_device, "wrong device"),
    PLANTED(no_barrier_before_the_tree, "order of lanes"),
    PLANTED(no_barrier_in_the_tree, "order of lanes"),
    PLANTED(no_barrier_before_writing_again, "order of lanes"),
    PLANTED(barrier_of_half_a_block, "barrier of some"),
    PLANTED(one_barrier_more, "barrier of some"),
    PLANTED(shared_memory_as_it_comes, "order of lanes"),
    PLANTED(all_blocks_on_one_place, "order of lanes"),
    PLANTED(lanes_read_what_others_write, "order of lanes"),
    PLANTED(lanes_that_only_a_shuffle_tells, "order of lanes"),
    PLANTED(kernel_reads_behind_its_operand, "out of bounds"),
    PLANTED(kernel_writes_behind_its_operand, "out of bounds"),
    PLANTED(kernel_writes_before_its_operand, "out of bounds"),
    PLANTED(wide_access_that_is_not_aligned, "misaligned"),
    PLANTED(launch_of_no_block, "bad launch"),
    PLANTED(kernel_after_unload, "library after unload"),
    PLANTED(library_unloaded_twice, "library after unload"), PLANTED(library_leak, "leak"),
    PLANTED(unknown_architecture, "unknown architecture"),
    PLANTED(stream_that_blocks, "blocking stream"), PLANTED(flags_of_a_stream, "unknown flags"),
    PLANTED(host_function_that_uses_cuda, "CUDA in a host function"),
    PLANTED(event_with_timing, "event with timing"), PLANTED(flags_of_an_event, "unknown flags"),
    PLANTED(flags_of_a_wait, "unknown flags"), PLANTED(flags_of_pinned_memory, "unknown flags"),
    PLANTED(pinned_for_another_device, "not portable"),
    PLANTED(host_writes_behind_pinned_memory, "host out of bounds"),
    PLANTED(host_touches_the_page_behind, "host out of bounds"),
    PLANTED(event_taken_for_ready, "host in flight"),
    PLANTED(error_left_behind, "error left behind"),
    PLANTED(not_ready_left_behind, "error left behind"),
    PLANTED(capture_of_nothing_joined, "in capture"),
    PLANTED(capture_waits_for_others, "in capture"),
    PLANTED(capture_ended_elsewhere, "in capture"),
    PLANTED(wait_for_a_capture_that_ended, "in capture"),
    PLANTED(allocation_in_a_capture, "in capture"), PLANTED(capture_that_does_not_end, "leak"),
    PLANTED(capture_ended_by_another_thread, "in capture"),
    PLANTED(captures_that_meet, "in capture"), PLANTED(sync_of_a_captured_stream, "in capture"),
    PLANTED(sync_of_a_captured_event, "in capture"),
    PLANTED(query_of_a_captured_event, "in capture"),
    PLANTED(streams_of_two_threads, "race"), PLANTED(legacy_stream, "legacy stream"),
    PLANTED(sync_of_what_hangs, "waits for ever"),
    PLANTED(free_beside_what_hangs, "waits for ever"),
    PLANTED(event_of_what_hangs, "waits for ever"),
    PLANTED(deferred_missing_wait, "wrong number"),
    PLANTED(deferred_wait_for_the_wrong_stream, "wrong number"),
    PLANTED(deferred_overwritten_too_early, "wrong number"),
    PLANTED(unequal_counts, "unequal collectives"), PLANTED(unequal_verbs, "unequal collectives"),
    PLANTED(unequal_roots, "unequal collectives"),
    PLANTED(unequal_operations, "unequal collectives"),
    PLANTED(unequal_types, "unequal collectives"),
    PLANTED(unequal_counts_of_processes, "unequal collectives"),
    PLANTED(unequal_letters, "unequal send and recv"),
    PLANTED(send_that_nobody_receives, "send without recv"),
    PLANTED(recv_that_nobody_sends, "recv without send"),
    PLANTED(group_left_open, "group left open"),
    PLANTED(group_left_open_by_a_thread, "group left open"),
    PLANTED(group_open_after_a_failed_init, "group left open"),
    PLANTED(group_ended_twice, "group end without start"),
    PLANTED(used_before_its_init_is_done, "communicator in progress"),
    PLANTED(used_before_its_group_is_done, "communicator in progress"),
    PLANTED(used_after_finalize, "communicator in progress"),
    PLANTED(stream_used_before_its_group_is_done, "stream in progress"),
    PLANTED(stream_of_another_rank, "wrong device"),
    PLANTED(memory_of_another_rank, "wrong device"), PLANTED(memory_of_the_host, "wrong device"),
    PLANTED(sum_beyond_the_end, "out of bounds"), PLANTED(operands_that_meet, "overlap"),
    PLANTED(gathered_into_itself, "overlap"), PLANTED(calls_that_meet, "overlap"),
    PLANTED(missing_wait_before_a_sum, "race"), PLANTED(missing_wait_after_a_sum, "race"),
    PLANTED(communicator_of_two_threads, "two threads"),
    PLANTED(aborted_while_a_group_is_open, "two threads"),
    PLANTED(used_while_an_abort_hangs, "two threads"),
    PLANTED(wait_for_a_rank_that_never_comes, "waits for ever"),
    PLANTED(wait_behind_a_rank_that_never_comes, "waits for ever"),
    PLANTED(free_beside_a_rank_that_never_comes, "waits for ever"),
    PLANTED(wait_after_an_asynchronous_error, "waits for ever"),
    PLANTED(wait_beside_a_lost_device, "waits for ever"),
    PLANTED(wait_for_a_process_that_ended, "waits for ever"),
    PLANTED(wait_for_a_process_that_never_comes, "waits for ever"),
    PLANTED(destroyed_without_finalize, "destroy without finalize"),
    PLANTED(destroyed_before_finalize_is_done, "destroy without finalize"),
    PLANTED(communicator_leak, "leak"), PLANTED(used_after_abort, "communicator after abort"),
    PLANTED(used_after_destroy, "communicator after destroy"),
    PLANTED(operation_used_after_destroy, "redop after destroy"),
    PLANTED(operation_of_another_communicator, "bad argument"),
    PLANTED(no_such_rank, "bad argument"),
    PLANTED(allocation_beside_a_sum, "allocation in flight"),
    PLANTED(pinned_allocation_beside_a_sum, "allocation in flight"),
    PLANTED(communicator_beside_a_sum, "allocation in flight"),
    PLANTED(library_loaded_beside_a_sum, "allocation in flight"),
    PLANTED(init_where_only_enqueueing, "blocks"),
    PLANTED(capture_of_two_gpus, "capture of several GPUs"),
    PLANTED(blocking_communicator, "blocking communicator"),
    PLANTED(communicator_without_context, "no context"),
    PLANTED_ALONE(unique_id_without_a_device, "no device"),
    CORRECT(of_two_ranks), CORRECT(of_one_rank), CORRECT(of_all_types), CORRECT(scaled_first),
    CORRECT(in_place), CORRECT(from_a_root), CORRECT(letters_both_ways),
    CORRECT(over_two_streams), CORRECT(ordered_by_a_collective), CORRECT(the_same_gpu_twice),
    CORRECT(one_gpu_of_two_hosts), CORRECT(one_comes_later), CORRECT(waiting_until_an_abort),
    CORRECT(an_asynchronous_error), CORRECT(calls_that_fail),
    CORRECT(abort_beside_a_lost_device), CORRECT(allocation_after_a_sum),
    CORRECT(allocation_after_finalize),
    CORRECT(calls_are_counted), CORRECT(capture_of_one_gpu), CORRECT(two_processes),
    CORRECT(several_in_a_group), CORRECT(one_group_on_two_streams), CORRECT(streams_by_turns),
    CORRECT(finalize_waits), CORRECT(a_rank_that_never_joins), CORRECT(connected_late),
    CORRECT(added_in_any_order), CORRECT(a_rank_leaves_early),
    CORRECT(the_host_waits_elsewhere), CORRECT(one_process_aborts),
    CORRECT(one_stream), CORRECT(two_streams), CORRECT(there_and_back), CORRECT(by_the_host),
    CORRECT(by_an_event), CORRECT(readers_together), CORRECT(apart_in_one_block),
    CORRECT(kernels_in_order), CORRECT(over_two_devices), CORRECT(ring_of_slots),
    CORRECT(transitive), CORRECT(peers), CORRECT(captured), CORRECT(deferred_in_order),
    CORRECT(deferred_recorded_on_two_streams), CORRECT(barriers), CORRECT(blocks_in_strides),
    CORRECT(wide_accesses), CORRECT(memory_begins_as_nan), CORRECT(asked_until_ready),
    CORRECT(modes), CORRECT(broken_capture_takes_no_more_work), CORRECT(a_captured_event_stays_so),
    CORRECT(two_captures), CORRECT(the_stream_of_a_thread),
    CORRECT(capture_of_two_streams), CORRECT(a_graph_is_launched_twice),
    CORRECT(host_functions_run_in_order),
    CORRECT(pinned_for_both_devices),
    CORRECT(libraries_are_counted), CORRECT(a_device_is_lost),
};
/* clang-format on */

/* What the program's process says of itself; with a seed its work is deferred. */
static size_t run(const struct program *program, unsigned seed, char *said, size_t bytes,
                  int *out_status)
{
    int ends[2];
    size_t used = 0;
    ssize_t got = 1;
    if (pipe(ends) != 0)
        exit(2);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        alarm(20); /* what hangs fails */
        sim_set_device_count(2);
        sim_nccl_connects_late(false);
        sim_defer(seed);
        if (!program->alone)
            set_up();
        program->run();
        if (program->finding == NULL)
            clean_up();
        exit(0);
    }
    close(ends[1]);
    while (got > 0 && used + 1 < bytes) {
        got = read(ends[0], said + used, bytes - 1 - used);
        used += got > 0 ? (size_t)got : 0;
    }
    said[used] = '\0';
    close(ends[0]);
    waitpid(child, out_status, 0);
    return used;
}

/* As it should. */
static bool behaves(const struct program *program, unsigned seed, char *said, size_t bytes)
{
    char wanted[64];
    int status = 0;
    run(program, seed, said, bytes, &status);
    if (program->finding == NULL)
        return said[0] == '\0' && status == 0;
    snprintf(wanted, sizeof wanted, "sim: %s:", program->finding);
    return strstr(said, wanted) != NULL && status != 0;
}

/* What is correct is so at any time. */
int main(void)
{
    int failed = 0, passed = 0;
    setvbuf(stdout, NULL, _IOLBF, 0); /* or the children say it again */
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        const struct program *program = &programs[i];
        char said[4096];
        bool good = behaves(program, 0, said, sizeof said);
        if (program->finding == NULL)
            good = good && behaves(program, (unsigned)i + 1, said, sizeof said);
        printf("%s - %s %s: %s\n", good ? "ok" : "not ok",
               program->finding != NULL ? "planted" : "correct", program->name,
               program->finding == NULL ? (good ? "passes" : "is accused")
               : good                   ? "found"
                                        : "MISSED");
        if (!good)
            printf("# wanted \"%s\", got: %s\n", program->finding != NULL ? program->finding : "",
                   said);
        passed += good;
        failed += !good;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
