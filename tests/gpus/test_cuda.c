/* test_cuda.c - dp_cuda.h: which devices there are, streams of the user's, several devices on one
   GPU, pairs of GPUs, and on the simulator what happens when CUDA fails. What all tables have in
   common is in test_device.c, what all devices do in the others. */

#define _GNU_SOURCE /* syscall */
#include "test.h"

#if defined(TEST_CUDA)
#include <cuda.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cuda_device.h"
#include "nets.h"
#include "numbers.h"

/* GPUs as they are, none twice. */
static const dp_device_ops *real_gpus(int count)
{
    cuda_gpus(count);
    return dp_cuda();
}

static dp_ctx *open_cuda(int gpus, const int *devices, int count)
{
    dp_ctx *ctx = NULL;
    const dp_device_ops *const backends[] = {real_gpus(gpus), NULL};
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = count, .devices = devices},
                     &ctx));
    return ctx;
}

static void train_once(dp_ctx *ctx, int devices);

/* ---- which devices there are ----------------------------------------------------------------- */

static const char *default_backend(void)
{
    dp_ctx *ctx = NULL;
    dp_info info;
    CHECK_OK(dp_open(NULL, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    dp_close(ctx);
    return info.device_backend;
}

TEST(gpus_come_before_the_cpu)
{
    real_gpus(1);
    CHECK_STR(default_backend(), dp_cuda()->name);
    cuda_check_leaks();
}

/* Pinned memory comes from the GPU's node; the thread's own choice is as it was. */
TEST(the_memory_policy_stays)
{
    unsigned long before[16] = {0}, after[16] = {0};
    int mode_before = -1, mode_after = -1;
    if (syscall(SYS_get_mempolicy, &mode_before, before, 1024, 0, 0) != 0) {
        SKIP("no policies here");
    }
    dp_ctx *ctx = open_cuda(1, NULL, 1);
    CHECK_INT(syscall(SYS_get_mempolicy, &mode_after, after, 1024, 0, 0), 0);
    CHECK_INT(mode_after, mode_before);
    CHECK(memcmp(before, after, sizeof before) == 0);
    dp_close(ctx);
}

#if defined(TEST_SIM)
TEST(pinned_memory_is_near_to_its_gpu)
{
    int mode = 0;
    cuda_alone();
    if (syscall(SYS_get_mempolicy, &mode, NULL, 0, 0, 0) != 0) {
        SKIP("no policies here");
    }
    for (int gpu = 0; gpu < 4; gpu++) {
        dp_ctx *ctx = open_cuda(4, &gpu, 1);
        CHECK_INT(sim_pinned_node(), gpu % 2 - 1);
        dp_close(ctx);
    }
}
#endif

/* ---- streams --------------------------------------------------------------------------------- */

TEST(streams_as_cuda_knows_them)
{
    dp_ctx *ctx = open_cuda(2, (int[]){1, 0}, 2), *cpu = NULL;
    cudaStream_t native = dp_cuda_stream(dp_local_stream(ctx, 0));
    CHECK(native != NULL);
    CHECK_INT(dp_cuda_ordinal(dp_local_stream(ctx, 0)), 1);
    CHECK_INT(dp_cuda_ordinal(dp_local_stream(ctx, 1)), 0);
    const dp_device_ops *const backends[] = {dp_cpu(), NULL};
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &cpu));
    CHECK(dp_cuda_stream(dp_local_stream(cpu, 0)) == NULL && dp_cuda_stream(NULL) == NULL);
    CHECK_INT(dp_cuda_ordinal(dp_local_stream(cpu, 0)), -1);
    CHECK_INT(dp_cuda_ordinal(NULL), -1);
    dp_close(cpu);
    dp_close(ctx);
    cuda_check_leaks();
}

TEST(a_stream_of_the_users)
{
    dp_ctx *ctx = open_cuda(2, NULL, 2);
    dp_stream *own = NULL, *other = NULL;
    cudaStream_t native = dp_cuda_stream(dp_local_stream(ctx, 1));
    CHECK_OK(dp_cuda_adopt(ctx, 1, native, &own)); /* any stream of that GPU */
    CHECK(dp_cuda_stream(own) == native);
    CHECK_OK(dp_use_stream(ctx, 1, own));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensor;
    double number = 0;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, DP_SHAPE(5), &tensor));
    CHECK_OK(dp_fill(ctx, &tensor, dp_float(2.5)));
    CHECK_OK(dp_select(&tensor, 0, 3, &tensor));
    CHECK_OK(dp_item(ctx, dp_of(scope, &tensor), &number));
    CHECK_F64(number, 2.5, 0);
    dp_scope_end(scope);
    CHECK_OK(dp_use_stream(ctx, 1, NULL));
    CHECK_ERROR(dp_cuda_adopt(ctx, 0, native, &other), DP_ERR_INVALID,
                "the stream is of GPU 1, local rank 0 is GPU 0: create one after ");
    CHECK_ERROR(dp_cuda_adopt(ctx, 7, native, &other), DP_ERR_INVALID,
                "local rank 7 is not a device of");
    CHECK_ERROR(dp_use_stream(ctx, 0, own), DP_ERR_INVALID,
                "the stream is not of local rank 0: make it for that rank");
    CHECK_ERROR(dp_cuda_adopt(ctx, 1, NULL, &other), DP_ERR_INVALID,
                "native is NULL, or another default stream: create one");
    CHECK_ERROR(dp_cuda_adopt(ctx, 1, cudaStreamLegacy, &other), DP_ERR_INVALID,
                "native is NULL, or another default stream: create one");
    CHECK_ERROR(dp_cuda_adopt(ctx, 1, cudaStreamPerThread, &other), DP_ERR_INVALID,
                "native is NULL, or another default stream: create one");
    CHECK(other == NULL);
    CHECK_ERROR(dp_cuda_adopt(ctx, 1, native, NULL), DP_ERR_INVALID, "out is NULL");
    dp_cuda_release(own);
    dp_cuda_release(NULL);
    dp_cuda_release(dp_local_stream(ctx, 0)); /* the library's own stays */
    CHECK(dp_cuda_stream(dp_local_stream(ctx, 0)) != NULL);
    dp_close(ctx);
    cuda_check_leaks();
}

/* ---- several devices on one GPU -------------------------------------------------------------- */

static const net_shape by_rows = {0};

static void train_once(dp_ctx *ctx, int devices)
{
    dp_module *net = net_create(ctx, &by_rows, 0), *par = NULL;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value y;
    dp_pass *pass = NULL;
    float grads[NET_PARAMS];
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.local_count, devices);
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[7,3],)"), dp_none(), NULL, &y,
                       &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    net_numbers(ctx, net, true, grads);
    CHECK_F64(grads[NET_PARAMS - 1], 7, 0);
    CHECK_F64(grads[0], 63, 0); /* 0 + 3 + ... + 18 */
    dp_scope_end(scope);
}

TEST(several_devices_on_one_gpu)
{
    for (int count = 1; count <= 5; count++) {
        dp_ctx *ctx = open_cuda(1, (int[]){0, 0, 0, 0, 0}, count);
        train_once(ctx, count);
        dp_close(ctx);
    }
    cuda_check_leaks();
}

TEST(several_contexts_on_one_gpu)
{
    dp_ctx *one = open_cuda(2, (int[]){0, 1}, 2), *two = open_cuda(2, (int[]){1, 1, 0}, 3);
    train_once(one, 2);
    train_once(two, 3);
    dp_close(one);
    train_once(two, 3);
    dp_close(two);
    cuda_check_leaks();
}

/* ---- pairs of GPUs --------------------------------------------------------------------------- */

static char said[1024];

static void listen(const dp_log_record *record, void *user)
{
    (void)user;
    snprintf(said + strlen(said), sizeof said - strlen(said), "%s\n", record->text);
}

static dp_ctx *open_pair(void)
{
    dp_ctx *ctx = NULL;
    const dp_device_ops *const backends[] = {real_gpus(2), NULL};
    const dp_coll_ops *const colls[] = {dp_cuda_coll(), NULL};
    said[0] = '\0';
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .colls = colls,
                                  .device_count = 2,
                                  .log = {listen, NULL, DP_LOG_WARN}},
                     &ctx));
    return ctx;
}

/* 0, 1, 2, ... and 0, 2, 4, ... added up on both GPUs. */
static dp_status add_up(dp_ctx *ctx, int64_t count)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensors[2];
    dp_part parts[2];
    float *numbers = malloc((size_t)count * sizeof *numbers);
    dp_status status = DP_OK;
    for (int rank = 0; rank < 2 && status == DP_OK; rank++) {
        for (int64_t i = 0; i < count; i++)
            numbers[i] = (float)(i * (rank + 1));
        dp_tensor *tensor = &tensors[rank], host;
        host = dp_wrap(numbers, DP_F32, 1, &count);
        status = dp_tensor_new(scope, dp_local_device(ctx, rank), DP_F32, 1, &count, tensor);
        if (status == DP_OK)
            status = dp_copy(ctx, tensor, &host, NULL);
        parts[rank] = (dp_part){tensor->data, tensor->data, NULL};
    }
    if (status == DP_OK)
        status = dp_all_reduce(ctx, parts, (size_t)count, DP_F32, DP_OP_SUM);
    for (int rank = 0; rank < 2 && status == DP_OK; rank++) {
        status = dp_read(ctx, &tensors[rank], numbers, (size_t)count * sizeof *numbers);
        for (int64_t i = 0; i < count && status == DP_OK; i++)
            CHECK_F64(numbers[i], i * 3, 0);
    }
    free(numbers);
    dp_scope_end(scope);
    return status;
}

/* Rank r wants the sum where bit r of `wanted` is set; the others' memory stays as it was. */
static void check_wanted(dp_ctx *ctx, int count, unsigned wanted)
{
    enum { MOST = 300000 };
    static float got[MOST];
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor send[3], recv[3];
    dp_part parts[3];
    const int64_t shape[] = {MOST};
    for (int r = 0; r < count; r++) {
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, r), DP_F32, 1, shape, &send[r]));
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, r), DP_F32, 1, shape, &recv[r]));
        CHECK_OK(dp_fill(ctx, &send[r], dp_float(1 << r)));
        CHECK_OK(dp_fill(ctx, &recv[r], dp_float(-1)));
        parts[r] = (dp_part){send[r].data, wanted >> r & 1 ? recv[r].data : NULL, NULL};
    }
    CHECK_OK(dp_all_reduce(ctx, parts, MOST, DP_F32, DP_OP_SUM));
    for (int r = 0; r < count; r++) {
        CHECK_OK(dp_read(ctx, &recv[r], got, sizeof got));
        for (int i = 0; i < MOST; i += 997)
            CHECK_F64(got[i], wanted >> r & 1 ? (1 << count) - 1 : -1, 0);
    }
    dp_scope_end(scope);
}

TEST_SLOW(a_gpu_that_gives_no_recv_wants_no_sum, 60)
{
    static const int places[][3] = {{0, 0, 0}, {0, 1, 1}, {0, 1, 2}};
    for (int i = 0; i < 3; i++) {
        dp_ctx *ctx = open_cuda(i + 1, places[i], 3);
        for (unsigned wanted = 0; wanted < 8; wanted++)
            check_wanted(ctx, 3, wanted);
        dp_close(ctx);
    }
}

enum {
    SHARDS = 8,
    PERIOD = 1009,
    LONG = 1100 * PERIOD
}; /* in f32 more than a receive buffer has */

static void repeat(char *row, size_t bytes)
{
    for (size_t i = 1; i < LONG / PERIOD; i++)
        memcpy(row + i * bytes, row, bytes);
}

static void add_up_shards(int gpus, dp_dtype dtype, const void *const *rows, const void *want)
{
    const dp_device_ops *const backends[] = {real_gpus(gpus), NULL};
    const int64_t shape[] = {LONG};
    size_t bytes = LONG * dp_dtype_bytes(dtype);
    dp_ctx *ctx = NULL;
    dp_tensor own[SHARDS];
    dp_part parts[SHARDS];
    void *got = malloc(bytes);
    CHECK(got != NULL);
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .shards = SHARDS}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    for (int r = 0; r < SHARDS; r++) {
        CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, r), rows[r], dtype, 1, shape, &own[r]));
        parts[r] = (dp_part){own[r].data, own[r].data, NULL};
    }
    CHECK_OK(dp_all_reduce_scaled(ctx, parts, LONG, dtype, DP_OP_MEAN, 0.3));
    for (int r = 0; r < SHARDS; r++) {
        CHECK_OK(dp_read(ctx, &own[r], got, bytes));
        CHECK_BYTES(got, want, bytes);
    }
    free(got);
    dp_close(ctx);
}

static void add_up_anywhere(dp_dtype dtype)
{
    uint64_t state = test_seed();
    void *rows[SHARDS], *want = malloc(LONG * sizeof(float));
    CHECK(want != NULL);
    for (int r = 0; r < SHARDS; r++) {
        rows[r] = malloc(LONG * sizeof(float));
        CHECK(rows[r] != NULL);
        for (size_t i = 0; i < PERIOD; i++)
            number_put(dtype, rows[r], i, (number)((double)test_random(&state) / 3));
        repeat(rows[r], PERIOD * dp_dtype_bytes(dtype));
    }
    number_kernel(&(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                    .op = DP_OP_SUM,
                                    .dtype = dtype,
                                    .count = PERIOD,
                                    .out = &want,
                                    .in = (const void *const *)rows,
                                    .out_count = 1,
                                    .in_count = SHARDS,
                                    .alpha = 0.3,
                                    .beta = SHARDS});
    repeat(want, PERIOD * dp_dtype_bytes(dtype));
    for (int gpus = 1; gpus < SHARDS; gpus *= 2)
        add_up_shards(gpus, dtype, (const void *const *)rows, want);
    for (int r = 0; r < SHARDS; r++)
        free(rows[r]);
    free(want);
    cuda_check_leaks();
}

TEST_SLOW(shards_give_the_same_bits_on_any_gpus, 60)
{
    add_up_anywhere(DP_F32);
}

TEST_SLOW(shards_of_halves_give_the_same_bits_on_any_gpus, 60)
{
    add_up_anywhere(DP_BF16);
}

TEST(gpus_copy_directly_after_a_check)
{
    cuda_pairs_directly(2);
    dp_ctx *ctx = open_pair();
    CHECK_OK(add_up(ctx, 1000));
    long copies = cuda_peer_copies();
    CHECK(copies != 0);
    CHECK_OK(add_up(ctx, 1));
    CHECK(cuda_peer_copies() - copies < 4); /* no second check */
    CHECK_STR(said, "");
    dp_close(ctx);
    cuda_check_leaks();
}

/* The user wants it so: no warning, and nothing is checked. */
TEST(gpus_may_be_told_to_copy_through_the_host)
{
    setenv("DP_PEERS", "off", 1);
    dp_ctx *ctx = open_pair();
    long copies = cuda_peer_copies();
    CHECK_OK(add_up(ctx, 3 << 20)); /* several pieces, and several rounds of the ring */
    CHECK_OK(add_up(ctx, 1001));
    CHECK_INT(cuda_peer_copies(), copies);
    CHECK_STR(said, "");
    dp_close(ctx);
    cuda_check_leaks();
}

TEST(a_wish_for_peers_that_makes_no_sense)
{
    setenv("DP_PEERS", "no", 1);
    dp_ctx *ctx = open_pair();
    CHECK_OK(add_up(ctx, 1000));
    CHECK(cuda_peer_copies() != 0);
    CHECK_SAYS(said, "DP_PEERS is 'no', not off: GPUs copy directly from each other");
    dp_close(ctx);
    cuda_check_leaks();
}

/* ---- captures -------------------------------------------------------------------------------- */

/* Rank 0's numbers to all, added up, and back, through everything that only enqueues. */
static void enqueue_all(dp_ctx *ctx, const dp_tensor *tensors, int count)
{
    dp_part parts[4];
    for (int i = 0; i < count; i++)
        parts[i] = (dp_part){tensors[i].data, tensors[i].data, NULL};
    CHECK_OK(dp_broadcast(ctx, parts, 1000, DP_F32, 0));
    CHECK_OK(dp_all_reduce(ctx, parts, 1000, DP_F32, DP_OP_MEAN));
    CHECK_OK(dp_reduce_add_into(ctx, tensors, (size_t)count, &tensors[0]));
    CHECK_OK(dp_replicate_into(ctx, &tensors[0], tensors + 1, (size_t)count - 1));
    for (int i = 0; i < count; i++) {
        CHECK_OK(dp_axpby(ctx, 2, &tensors[i], 0, NULL, &tensors[i]));
        CHECK_OK(dp_copy(ctx, &tensors[i], &tensors[(i + 1) % count], NULL));
    }
    CHECK_OK(
        dp_all_reduce(ctx, parts, 1000, DP_F32, DP_OP_MEAN)); /* of the same: all come together */
}

static void fill_all(dp_ctx *ctx, dp_scope *scope, dp_tensor tensors[4])
{
    for (int i = 0; i < 4; i++) {
        CHECK_OK(
            dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, DP_SHAPE(1000), &tensors[i]));
        CHECK_OK(dp_fill(ctx, &tensors[i], dp_float(i + 1)));
    }
}

static void check_all(dp_ctx *ctx, const dp_tensor *tensor, float want)
{
    float numbers[1000];
    CHECK_OK(dp_read(ctx, tensor, numbers, sizeof numbers));
    for (int i = 0; i < 1000; i++)
        CHECK_F64(numbers[i], want, 0);
}

/* The user captures: what only enqueues may be captured, and does the same each time. */
static void capture_all(dp_ctx *ctx)
{
    dp_tensor tensors[4];
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaStream_t native = dp_cuda_stream(dp_local_stream(ctx, 0));
    dp_scope *scope = dp_scope_begin(ctx);
    fill_all(ctx, scope, tensors);
    enqueue_all(ctx, tensors, 4); /* pairs are checked here, and memory is taken */
    CHECK_OK(dp_wait(ctx));
    CHECK_INT(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    enqueue_all(ctx, tensors, 4);
    CHECK_INT(cudaStreamEndCapture(native, &graph), cudaSuccess);
    CHECK_INT(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_OK(dp_fill(ctx, &tensors[0], dp_float(3)));
    for (int times = 0; times < 2; times++)
        CHECK_INT(cudaGraphLaunch(exec, native), cudaSuccess);
    CHECK_OK(dp_wait(ctx));
    for (int i = 0; i < 4; i++)
        check_all(ctx, &tensors[i], 48); /* four times what it was, twice */
    CHECK_INT(cudaGraphExecDestroy(exec), cudaSuccess);
    CHECK_INT(cudaGraphDestroy(graph), cudaSuccess);
    dp_scope_end(scope);
    dp_close(ctx);
    cuda_check_leaks();
}

TEST(steps_can_be_captured)
{
    capture_all(open_cuda(1, (int[]){0, 0, 0, 0}, 4));
}

TEST(steps_of_two_gpus_can_be_captured)
{
    cuda_pairs_directly(2);
    capture_all(open_cuda(2, (int[]){0, 1, 0, 1}, 4));
}

#if defined(TEST_SIM)
/* ---- which devices there are, and are not ---------------------------------------------------- */

TEST(without_gpus_the_cpu_serves)
{
    CHECK_STR(default_backend(), "cpu");
}

TEST(without_a_driver_the_cpu_serves)
{
    real_gpus(2);
    sim_set_driver(0);
    CHECK_STR(default_backend(), "cpu");
}

TEST(an_old_driver_is_none)
{
    const dp_device_ops *const backends[] = {real_gpus(2), NULL};
    dp_ctx *ctx = NULL;
    cuda_alone();
    sim_set_driver(12070);
    CHECK_ERROR(dp_open(&(dp_config){.backends = backends}, &ctx), DP_ERR_NO_DEVICE,
                "the driver is for CUDA 12.7, 12.8 is needed");
    sim_set_driver(12080);
    sim_set_versions(12080, 12080);
    CHECK_OK(dp_open(&(dp_config){.backends = backends}, &ctx));
    dp_close(ctx);
    sim_check_leaks();
}

TEST(a_gpu_that_is_too_old)
{
    const dp_device_ops *const backends[] = {real_gpus(1), NULL};
    dp_ctx *ctx = NULL;
    cuda_alone();
    sim_set_arch(70);
    CHECK_ERROR(dp_open(&(dp_config){.backends = backends}, &ctx), DP_ERR_UNSUPPORTED,
                "architecture 7.0, 7.5 is needed");
    sim_check_leaks();
}

TEST(a_gpu_newer_than_the_compiler)
{
    cuda_alone();
    sim_set_arch(130);
    dp_ctx *ctx = open_cuda(2, NULL, 2);
    train_once(ctx, 2);
    dp_close(ctx);
    sim_check_leaks();
}

TEST(a_gpu_that_is_not_there)
{
    const dp_device_ops *const backends[] = {real_gpus(2), NULL};
    dp_ctx *ctx = NULL;
    CHECK_ERROR(
        dp_open(&(dp_config){.backends = backends, .device_count = 1, .devices = (int[]){2}}, &ctx),
        DP_ERR_NO_DEVICE, "no GPU 2, there are 2");
    CHECK_ERROR(
        dp_open(&(dp_config){.backends = backends, .device_count = 1, .devices = (int[]){-1}},
                &ctx),
        DP_ERR_NO_DEVICE, "there is no GPU -1");
    sim_check_leaks();
}

TEST(gpu_info_has_its_name_and_memory)
{
    dp_ctx *ctx = open_cuda(2, NULL, 2);
    dp_device_info info;
    CHECK_OK(dp_device_info_get(ctx, 1, &info));
    CHECK_STR(info.name, "simulated GPU 1");
    CHECK_STR(info.bus_id, "0000:01:00.0");
    CHECK(info.bytes_total > info.bytes_free && info.bytes_free > 0);
    CHECK(!info.host_memory && info.compute_units > 0);
    dp_close(ctx);
    sim_check_leaks();
}

/* ---- pairs that do not work ------------------------------------------------------------------ */

static void goes_through_the_host(sim_peer forth, sim_peer back, const char *sentence)
{
    sim_set_peer(0, 1, forth);
    sim_set_peer(1, 0, back);
    dp_ctx *ctx = open_pair();
    CHECK_OK(add_up(ctx, 3 << 20)); /* several pieces, and several rounds of the ring */
    long copies = sim_peer_copies();
    CHECK_OK(add_up(ctx, 1001));
    CHECK_INT(sim_peer_copies(), copies);
    CHECK(strstr(said, "GPU 0 does not read GPU 1 directly") != NULL);
    CHECK(strstr(said, "GPU 1 does not read GPU 0 directly") != NULL);
    CHECK(strstr(said, sentence) != NULL);
    dp_close(ctx);
}

TEST(gpus_without_access_go_through_the_host)
{
    goes_through_the_host(SIM_PEER_NONE, SIM_PEER_NONE, "the driver says so");
    sim_check_leaks();
}

TEST(a_pair_that_flips_bytes_goes_through_the_host)
{
    char sentence[64];
    snprintf(sentence, sizeof sentence, "1 of %d words arrive wrong", DP__CUDA_CHECK_BYTES / 4 + 3);
    goes_through_the_host(SIM_PEER_FLIPS, SIM_PEER_FLIPS, sentence);
    sim_check_leaks();
}

/* Pairs are good as long as both contexts live, whichever of them goes. */
TEST(a_gpu_that_comes_again_is_checked_again)
{
    for (int stays = 0; stays < 2; stays++) {
        cuda_pairs_directly(2);
        dp_ctx *holds = open_cuda(2, &stays, 1), *ctx = open_pair();
        CHECK_OK(add_up(ctx, 1000));
        CHECK_STR(said, "");
        dp_close(ctx);
        goes_through_the_host(SIM_PEER_FLIPS, SIM_PEER_FLIPS, "words arrive wrong");
        dp_close(holds);
    }
    sim_check_leaks();
}

TEST(each_direction_is_checked_by_itself)
{
    sim_set_peer(1, 0, SIM_PEER_FLIPS);
    dp_ctx *ctx = open_pair();
    CHECK_OK(add_up(ctx, 1000));
    CHECK(strstr(said, "GPU 0 does not read") == NULL);
    CHECK(strstr(said, "GPU 1 does not read GPU 0") != NULL);
    dp_close(ctx);
    sim_check_leaks();
}

/* Whatever fails in a check: copies go through the host, or the call fails; nothing leaks. */
TEST_SLOW(a_check_fails_anywhere, 60)
{
    bool fired = true;
    for (long n = 1; fired; n += 11 * test_step()) {
        dp_ctx *ctx = open_pair();
        sim_fail_at(n, cudaErrorMemoryAllocation, false);
        (void)add_up(ctx, 100);
        fired = sim_fault_fired();
        sim_fail_at(0, 0, false);
        dp_close(ctx);
        CHECK_INT(sim_finding_count(NULL), 0);
    }
}

/* ---- what a step costs ----------------------------------------------------------------------- */

TEST(a_steady_step_allocates_nothing_on_gpus)
{
    dp_ctx *ctx = open_cuda(2, NULL, 2);
    dp_device_info before, after;
    for (int i = 0; i < 3; i++) {
        train_once(ctx, 2);
    }
    CHECK_OK(dp_device_info_get(ctx, 0, &before));
    dp_module *net = net_create(ctx, &by_rows, 0), *par = NULL;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    for (int i = 0; i < 20; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value y;
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[7,3],)"), dp_none(), NULL,
                           &y, NULL));
        dp_scope_end(scope);
    }
    CHECK_OK(dp_device_info_get(ctx, 0, &after));
    CHECK_INT(after.bytes_free, before.bytes_free);
    dp_close(ctx);
}

static void enqueues_only(dp_ctx *ctx)
{
    dp_tensor tensors[4];
    dp_scope *scope = dp_scope_begin(ctx);
    fill_all(ctx, scope, tensors);
    enqueue_all(ctx, tensors, 4); /* pairs are checked here, and memory is taken */
    sim_enqueue_only(true);
    enqueue_all(ctx, tensors, 4);
    sim_enqueue_only(false);
    check_all(ctx, &tensors[3], 16); /* four times what it was, twice */
    dp_scope_end(scope);
    dp_close(ctx);
    sim_check_leaks();
}

TEST(nothing_waits_among_gpus)
{
    enqueues_only(open_cuda(4, NULL, 4));
}

TEST(nothing_waits_on_one_gpu)
{
    enqueues_only(open_cuda(1, (int[]){0, 0, 0, 0}, 4));
}

/* A stream of the GPU, but not of the context that the runtime uses. */
TEST(a_stream_of_another_context_is_refused)
{
    dp_ctx *ctx = open_cuda(2, NULL, 2);
    dp_stream *stream = NULL;
    cudaStream_t native = NULL;
    CUresult (*push)(CUcontext), (*pop)(CUcontext *);
    CUcontext popped;
    cuda_alone();
    find_entry("cuCtxPushCurrent", &push);
    find_entry("cuCtxPopCurrent", &pop);
    CHECK_INT(push(sim_other_context(1)), CUDA_SUCCESS);
    CHECK_INT(cudaStreamCreateWithPriority(&native, cudaStreamNonBlocking, 0), cudaSuccess);
    CHECK_ERROR(dp_cuda_adopt(ctx, 1, native, &stream), DP_ERR_INVALID,
                "of another context of GPU 1, local rank 1 is GPU 1: create one after cudaSet");
    CHECK_ERROR(dp_cuda_adopt(ctx, 0, native, &stream), DP_ERR_INVALID,
                "the stream is of GPU 1, local rank 0 is GPU 0: create one after cudaSetDevice");
    CHECK(stream == NULL);
    CHECK_INT(cudaStreamDestroy(native), cudaSuccess);
    CHECK_INT(pop(&popped), CUDA_SUCCESS);
    dp_close(ctx);
    sim_check_leaks();
}

/* ---- what CUDA says no to -------------------------------------------------------------------- */

static bool is_among(int code, const int *codes)
{
    while (*codes != 0 && *codes != code)
        codes++;
    return *codes == code;
}

/* Of these driver_types.h says that the process has to be started again; or that the hardware made
   an error that it could not correct. */
static const int sticky[] = {214, 220, 226, 700, 702, 710, 714, 715,
                             716, 717, 718, 719, 721, 810, 911, 0};

static dp_status meaning_of(int code)
{
    static const int no_device[] = {34, 46, 100, 101, 102, 0};
    static const int no_use[] = {35, 36, 209, 221, 222, 223, 801, 802, 803, 804, 0};
    if (is_among(code, no_device))
        return DP_ERR_NO_DEVICE;
    if (is_among(code, no_use))
        return DP_ERR_UNSUPPORTED;
    return code == 2                                    ? DP_ERR_NO_MEMORY
           : code == 800 || (code >= 900 && code < 909) ? DP_ERR_STATE
                                                        : DP_ERR_DEVICE;
}

/* A copy that fails with this code, by the table. */
static dp_status copy_fails(dp_ctx *ctx, const dp_tensor *tensor, int code)
{
    sim_fail_at(1, code, false);
    dp_status status =
        dp_cuda()->copy(dp_local_stream(ctx, 0), tensor->data, (char *)tensor->data + 64, 64);
    sim_fail_at(0, 0, false);
    return status;
}

TEST(cuda_codes_become_statuses)
{
    dp_ctx *ctx = open_cuda(1, NULL, 1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensor;
    char said_so[32];
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(32), &tensor));
    CHECK_OK(dp_fill(ctx, &tensor, dp_float(1)));
    for (int code = 1; code < 1000; code++) {
        if (is_among(code, sticky))
            continue;
        snprintf(said_so, sizeof said_so, "error (%d)", code);
        CHECK_ERROR(copy_fails(ctx, &tensor, code), meaning_of(code),
                    code == 2 ? "out of memory (2)" : said_so);
        CHECK_OK(dp_fill(ctx, &tensor, dp_float(1)));
    }
    CHECK_ERROR(copy_fails(ctx, &tensor, 800), DP_ERR_STATE, "(800): not in a function that");
    CHECK_ERROR(copy_fails(ctx, &tensor, 900), DP_ERR_STATE, "(900): it cannot be captured: call");
    CHECK_ERROR(copy_fails(ctx, &tensor, 901), DP_ERR_STATE, "(901): an earlier call broke the");
    CHECK_ERROR(copy_fails(ctx, &tensor, 905), DP_ERR_STATE, "dp_wait before the capture begins");
    CHECK_ERROR(copy_fails(ctx, &tensor, 906), DP_ERR_STATE, "create the stream with ");
    dp_scope_end(scope);
    dp_close(ctx);
    sim_check_leaks();
}

/* Nothing more is asked of that GPU, and no context has it again. */
TEST(codes_that_cost_the_gpu)
{
    for (int gpu = 0; sticky[gpu] != 0; gpu++) {
        char lost[128];
        dp_ctx *ctx = open_cuda(16, &gpu, 1), *again = NULL;
        dp_scope *scope = dp_scope_begin(ctx);
        dp_tensor tensor;
        const dp_device_ops *const backends[] = {dp_cuda(), NULL};
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(32), &tensor));
        snprintf(lost, sizeof lost,
                 "a simulated error (%d): the GPU is lost to this process: start a new "
                 "one",
                 sticky[gpu]);
        CHECK_ERROR(copy_fails(ctx, &tensor, sticky[gpu]), DP_ERR_DEVICE, lost);
        long calls = sim_call_count();
        CHECK_ERROR(dp_fill(ctx, &tensor, dp_float(1)), DP_ERR_DEVICE, "the GPU is lost");
        dp_scope_end(scope);
        dp_close(ctx);
        CHECK_INT(sim_call_count(), calls);
        snprintf(lost, sizeof lost, "GPU %d is lost to this process", gpu);
        CHECK_ERROR(
            dp_open(&(dp_config){.backends = backends, .device_count = 1, .devices = &gpu}, &again),
            DP_ERR_NO_DEVICE, lost);
    }
}

/* In exclusive mode the driver says so when the context is made. */
TEST(a_gpu_that_another_process_has)
{
    dp_ctx *ctx = NULL;
    const dp_device_ops *const backends[] = {real_gpus(1), NULL};
    cuda_alone();
    sim_refuse_contexts(46);
    CHECK_ERROR(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &ctx),
                DP_ERR_NO_DEVICE,
                "cuDevicePrimaryCtxRetain: a simulated error (46): another process may have the");
    sim_refuse_contexts(0);
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &ctx));
    dp_close(ctx);
    sim_check_leaks();
}

/* Like train_once, but anything may fail. */
static dp_status try_to_train(dp_ctx *ctx, dp_scope *scope)
{
    static const float w[NET_PARAMS] = {1, -1, 2, -2, 3, -3, 1, 2};
    dp_module *net = NULL, *par = NULL;
    dp_value y;
    dp_pass *pass = NULL;
    dp_tensor grad, data;
    float grads[NET_IN * NET_OUT];
    TRY(dp_module_create(ctx,
                         &(dp_module_config){.name = "net",
                                             .methods = net_methods,
                                             .method_count = 2,
                                             .params = net_params,
                                             .param_count = 2,
                                             .state = &by_rows},
                         &net));
    TRY(dp_params_write(net, NET_W, w, NET_IN * NET_OUT * sizeof *w));
    TRY(dp_data_parallel(net, NULL, &par));
    TRY(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[7,3],)"), dp_none(), NULL, &y,
                  &pass));
    TRY(dp_backward(pass, dp_float(1), NULL));
    TRY(dp_params_edit(net, NET_W, &data, &grad));
    TRY(dp_read(ctx, &grad, grads, sizeof grads));
    CHECK_F64(grads[0], 63, 0);
    return DP_OK;
}

static dp_status open_and_train(void)
{
    const dp_device_ops *const backends[] = {real_gpus(2), NULL};
    dp_ctx *ctx = NULL;
    dp_status status = dp_open(&(dp_config){.backends = backends, .device_count = 2}, &ctx);
    if (status == DP_OK) {
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK(scope != NULL);
        status = try_to_train(ctx, scope);
        dp_scope_end(scope);
    }
    CHECK(status == DP_OK || strlen(dp_last_error()) > 0);
    dp_close(ctx);
    return status;
}

/* The nth call fails: an error, no hang, and everything closes. What could not be given back
   because CUDA refused is no leak of ours. */
static void every_call_fails(int code)
{
    bool fired = true;
    sim_set_peer(0, 1, SIM_PEER_NONE); /* see a_check_fails_anywhere */
    sim_set_peer(1, 0, SIM_PEER_NONE);
    for (long n = 1; fired; n += test_step()) {
        sim_fail_at(n, code, false);
        (void)open_and_train();
        fired = sim_fault_fired();
        CHECK_INT(sim_finding_count(NULL), 0);
    }
    sim_fail_at(0, 0, false);
    CHECK_OK(open_and_train());
}

TEST_SLOW(every_call_fails_once, 60)
{
    every_call_fails(cudaErrorUnknown);
}

TEST_SLOW(every_call_runs_out_of_memory, 60)
{
    every_call_fails(cudaErrorMemoryAllocation);
}

/* All calls from the nth on fail, and with them the GPUs are lost: each time in a process of its
   own. Closing asks nothing more of them than this one call did. */
static bool lose_from(long n)
{
    int status = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        sim_fail_at(n, cudaErrorIllegalAddress, true);
        (void)open_and_train();
        _exit(sim_finding_count(NULL) > 0 ? 1 : sim_fault_fired() ? 0 : 2);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) != 1);
    return WEXITSTATUS(status) == 0;
}

TEST_SLOW(a_device_is_lost, 60)
{
    sim_set_peer(0, 1, SIM_PEER_NONE);
    sim_set_peer(1, 0, SIM_PEER_NONE);
    for (long n = 1; lose_from(n); n += 3 * test_step()) {
    }
}

TEST(out_of_memory_is_said_and_survived)
{
    dp_ctx *ctx = NULL;
    dp_tensor tensor;
    sim_set_memory((size_t)64 << 20);
    ctx = open_cuda(1, NULL, 1);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_ERROR(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(1 << 28), &tensor),
                DP_ERR_NO_MEMORY, "out of memory");
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(1 << 10), &tensor));
    CHECK_OK(dp_fill(ctx, &tensor, dp_float(1)));
    dp_scope_end(scope);
    dp_close(ctx);
    sim_check_leaks();
}
#endif /* TEST_SIM */
#endif /* TEST_CUDA */
