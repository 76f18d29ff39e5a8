/* planted_nccl.h - programs with NCCL: a part of selftest.c.

   Rank 0 has the first GPU, its stream `a` and its memory `x` and `y`; rank 1 has the second one,
   `far` and `far_x`. They are in one process, or in two.                                         */

#ifndef SIM_PLANTED_NCCL_H
#define SIM_PLANTED_NCCL_H

static ncclComm_t near_comm, far_comm;
static ncclUniqueId unique;

static void use(CUcontext context)
{
    CUcontext popped;
    pop(&popped);
    push(context);
}

static ncclResult_t polled(ncclComm_t comm)
{
    ncclResult_t result = ncclInProgress;
    while (result == ncclInProgress && ncclCommGetAsyncError(comm, &result) == ncclSuccess)
        usleep(10);
    return result;
}

static void poll_both(void)
{
    must_be((int)polled(near_comm), ncclSuccess);
    must_be((int)polled(far_comm), ncclSuccess);
}

static ncclComm_t init(int rank, int ranks)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    config.blocking = 0;
    use(rank == 0 ? near_context : far_context);
    must_be((int)ncclCommInitRankConfig(&comm, ranks, unique, rank, &config), ncclInProgress);
    use(near_context);
    return comm;
}

static void init_both(void)
{
    ncclGetUniqueId(&unique);
    ncclGroupStart();
    near_comm = init(0, 2);
    far_comm = init(1, 2);
    must_be((int)ncclGroupEnd(), ncclInProgress);
}

static void connect_both(void)
{
    init_both();
    poll_both();
}

static void part_both(void)
{
    must_be((int)ncclCommFinalize(near_comm), ncclInProgress);
    must_be((int)ncclCommFinalize(far_comm), ncclInProgress);
    poll_both();
    must_be((int)ncclCommDestroy(near_comm), ncclSuccess);
    must_be((int)ncclCommDestroy(far_comm), ncclSuccess);
}

static void abort_both(void)
{
    ncclCommAbort(near_comm);
    ncclCommAbort(far_comm);
}

static void sync_both(void)
{
    must_be((int)cudaStreamSynchronize(a), cudaSuccess);
    must_be((int)cudaStreamSynchronize(far), cudaSuccess);
}

static ncclResult_t near_sum(size_t count)
{
    return ncclAllReduce(x, x, count, ncclFloat32, ncclSum, near_comm, a);
}

static ncclResult_t far_sum(size_t count)
{
    return ncclAllReduce(far_x, far_x, count, ncclFloat32, ncclSum, far_comm, far);
}

/* In one group, and not yet polled. */
static void begin_sums(size_t near_count, size_t far_count)
{
    ncclGroupStart();
    near_sum(near_count);
    far_sum(far_count);
    must_be((int)ncclGroupEnd(), ncclInProgress);
}

static void sums(void)
{
    begin_sums(64, 64);
    poll_both();
}

/* `bytes` of what `pattern` has come to `dst`. */
static void load(void *dst, const void *pattern, size_t bytes, cudaStream_t stream)
{
    memcpy(pinned, pattern, bytes);
    cudaMemcpyAsync(dst, pinned, bytes, cudaMemcpyHostToDevice, stream);
    cudaStreamSynchronize(stream);
}

static void must_hold(const void *device, const void *want, size_t bytes, cudaStream_t stream)
{
    cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    if (memcmp(pinned, want, bytes) != 0)
        fprintf(stderr, "sim: wrong number: of %zu bytes\n", bytes);
}

/* ---- planted --------------------------------------------------------------------------------- */

static void unequal_counts(void)
{
    connect_both();
    begin_sums(64, 65);
    poll_both();
}
static void unequal_verbs(void)
{
    connect_both();
    ncclGroupStart();
    near_sum(64);
    ncclBroadcast(far_x, far_x, 64, ncclFloat32, 0, far_comm, far);
    ncclGroupEnd();
    poll_both();
}
static void unequal_roots(void)
{
    connect_both();
    ncclGroupStart();
    ncclBroadcast(x, x, 64, ncclFloat32, 1, near_comm, a);
    ncclBroadcast(far_x, far_x, 64, ncclFloat32, 0, far_comm, far);
    ncclGroupEnd();
    poll_both();
}
static void unequal_operations(void)
{
    connect_both();
    ncclGroupStart();
    near_sum(64);
    ncclAllReduce(far_x, far_x, 64, ncclFloat32, ncclMax, far_comm, far);
    ncclGroupEnd();
    poll_both();
}
static void unequal_types(void)
{
    connect_both();
    ncclGroupStart();
    near_sum(64);
    ncclAllReduce(far_x, far_x, 64, ncclInt32, ncclSum, far_comm, far);
    ncclGroupEnd();
    poll_both();
}
static void unequal_letters(void)
{
    connect_both();
    ncclGroupStart();
    ncclSend(x, 64, ncclFloat32, 1, near_comm, a);
    ncclRecv(far_x, 32, ncclFloat32, 0, far_comm, far);
    ncclGroupEnd();
    poll_both();
}
static void send_that_nobody_receives(void)
{
    connect_both();
    ncclSend(x, 64, ncclFloat32, 1, near_comm, a);
    must_be((int)polled(near_comm), ncclSuccess);
    sim_check_leaks();
}
static void recv_that_nobody_sends(void)
{
    connect_both();
    ncclRecv(x, 64, ncclFloat32, 1, near_comm, a);
    must_be((int)polled(near_comm), ncclSuccess);
    sim_check_leaks();
}
static void group_left_open(void)
{
    ncclGroupStart();
    clean_up();
}
static void *opens_a_group(void *nothing)
{
    ncclGroupStart();
    return nothing;
}
static void group_left_open_by_a_thread(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, opens_a_group, NULL);
    pthread_join(thread, NULL);
}
static void group_ended_twice(void)
{
    ncclGroupStart();
    ncclGroupEnd();
    ncclGroupEnd();
}
static void group_open_after_a_failed_init(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    config.blocking = 0;
    ncclGetUniqueId(&unique);
    sim_fail_at(1, cudaErrorUnknown, false);
    must_be((int)ncclCommInitRankConfig(&comm, 1, unique, 0, &config), ncclUnhandledCudaError);
    clean_up();
}
static void used_before_its_init_is_done(void)
{
    init_both();
    near_sum(64);
}
static void used_before_its_group_is_done(void)
{
    connect_both();
    begin_sums(64, 64);
    near_sum(64);
}
static void stream_used_before_its_group_is_done(void)
{
    connect_both();
    begin_sums(64, 64);
    record(a);
}
static void stream_of_another_rank(void)
{
    connect_both();
    ncclAllReduce(x, x, 64, ncclFloat32, ncclSum, near_comm, far);
}
static void memory_of_another_rank(void)
{
    connect_both();
    ncclAllReduce(far_x, x, 64, ncclFloat32, ncclSum, near_comm, a);
}
static void memory_of_the_host(void)
{
    connect_both();
    ncclAllReduce(pinned, x, 64, ncclFloat32, ncclSum, near_comm, a);
}
static void sum_beyond_the_end(void)
{
    connect_both();
    begin_sums(BYTES / 4 + 1, BYTES / 4 + 1);
}
static void operands_that_meet(void)
{
    connect_both();
    ncclAllReduce(x, x + 4, 64, ncclFloat32, ncclSum, near_comm, a);
}
static void gathered_into_itself(void)
{
    connect_both();
    ncclAllGather(x + 256, x, 64, ncclFloat32, near_comm, a); /* which is rank 1's place */
}
static void calls_that_meet(void)
{
    connect_both();
    ncclGroupStart();
    near_sum(64);
    ncclSend(x, 64, ncclFloat32, 1, near_comm, a);
    far_sum(64);
    ncclRecv(far_x + 1024, 64, ncclFloat32, 0, far_comm, far);
    ncclGroupEnd();
}
static void missing_wait_before_a_sum(void)
{
    connect_both();
    inside(x, y, b);
    sums();
}
static void missing_wait_after_a_sum(void)
{
    connect_both();
    sums();
    inside(y, x, b);
}
static void *uses_the_communicator(void *nothing)
{
    near_sum(64);
    return nothing;
}
static void communicator_of_two_threads(void)
{
    pthread_t thread;
    connect_both();
    ncclGroupStart();
    near_sum(64);
    pthread_create(&thread, NULL, uses_the_communicator, NULL);
    pthread_join(thread, NULL);
}
static void *aborts(void *nothing)
{
    ncclCommAbort(near_comm);
    return nothing;
}
static void aborted_while_a_group_is_open(void)
{
    pthread_t thread;
    connect_both();
    ncclGroupStart();
    near_sum(64);
    pthread_create(&thread, NULL, aborts, NULL);
    pthread_join(thread, NULL);
}
static void used_while_an_abort_hangs(void)
{
    pthread_t thread;
    ncclResult_t result;
    connect_both();
    sim_nccl_hangs("ncclCommAbort");
    pthread_create(&thread, NULL, aborts, NULL);
    for (int i = 0; i < 5000 && sim_finding_count("two threads") == 0; i++) {
        ncclCommGetAsyncError(near_comm, &result);
        usleep(1000);
    }
}
static void wait_for_a_rank_that_never_comes(void)
{
    connect_both();
    sim_nccl_mind_hangs(true);
    sim_nccl_never_arrives(true);
    sums();
    cudaStreamSynchronize(a);
}
static void wait_behind_a_rank_that_never_comes(void)
{
    connect_both();
    sim_nccl_mind_hangs(true);
    sim_nccl_never_arrives(true);
    sums();
    record(a);
    wait_on(b);
    cudaStreamSynchronize(b);
}
static void free_beside_a_rank_that_never_comes(void)
{
    connect_both();
    sim_nccl_mind_hangs(true);
    sim_nccl_never_arrives(true);
    sums();
    cudaFree(y);
}
static void wait_beside_a_lost_device(void)
{
    connect_both();
    sim_nccl_mind_hangs(true);
    use(far_context);
    sim_lose_device(1, cudaErrorIllegalAddress);
    cudaGetLastError();
    use(near_context);
    sums();
    cudaStreamSynchronize(a);
}
static void wait_after_an_asynchronous_error(void)
{
    connect_both();
    sim_nccl_mind_hangs(true);
    sim_nccl_fail(ncclRemoteError, 0);
    begin_sums(64, 64);
    must_be((int)polled(near_comm), ncclRemoteError);
    must_be((int)polled(far_comm), ncclRemoteError);
    cudaStreamSynchronize(a);
}
static void destroyed_without_finalize(void)
{
    connect_both();
    ncclCommDestroy(near_comm);
}
static void destroyed_before_finalize_is_done(void)
{
    connect_both();
    ncclCommFinalize(near_comm);
    ncclCommDestroy(near_comm);
}
static void communicator_leak(void)
{
    connect_both();
    clean_up();
}
static void used_after_finalize(void)
{
    connect_both();
    ncclCommFinalize(near_comm);
    near_sum(64);
}
static void used_after_abort(void)
{
    connect_both();
    ncclCommAbort(near_comm);
    near_sum(64);
}
static void used_after_destroy(void)
{
    ncclResult_t result;
    connect_both();
    part_both();
    ncclCommGetAsyncError(near_comm, &result);
}
static void operation_used_after_destroy(void)
{
    ncclRedOp_t half;
    float factor = 0.5F;
    connect_both();
    ncclRedOpCreatePreMulSum(&half, &factor, ncclFloat32, ncclScalarHostImmediate, near_comm);
    ncclRedOpDestroy(half, near_comm);
    ncclAllReduce(x, x, 64, ncclFloat32, half, near_comm, a);
}
static void operation_of_another_communicator(void)
{
    ncclRedOp_t half;
    float factor = 0.5F;
    connect_both();
    ncclRedOpCreatePreMulSum(&half, &factor, ncclFloat32, ncclScalarHostImmediate, near_comm);
    ncclAllReduce(far_x, far_x, 64, ncclFloat32, half, far_comm, far);
}
static void allocation_beside_a_sum(void)
{
    void *p;
    connect_both();
    sums();
    cudaMalloc(&p, 64);
}
static void pinned_allocation_beside_a_sum(void)
{
    void *p;
    connect_both();
    sums();
    cudaStreamSynchronize(a); /* and the other one? */
    cudaHostAlloc(&p, 64, cudaHostAllocPortable);
}
static void communicator_beside_a_sum(void)
{
    connect_both();
    sums();
    ncclGetUniqueId(&unique);
    init(0, 1);
}
static void library_loaded_beside_a_sum(void)
{
    cudaLibrary_t other;
    connect_both();
    sums();
    cudaLibraryLoadData(&other, "sim sm_90", NULL, NULL, 0, NULL, NULL, 0);
}
static void capture_of_two_gpus(void)
{
    connect_both();
    begin_capture();
    record(a);
    cudaStreamWaitEvent(far, event, 0);
    sums();
}
static void blocking_communicator(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclGetUniqueId(&unique);
    ncclCommInitRankConfig(&near_comm, 1, unique, 0, &config);
}
static void communicator_without_context(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    CUcontext popped;
    config.blocking = 0;
    ncclGetUniqueId(&unique);
    pop(&popped);
    ncclCommInitRankConfig(&near_comm, 1, unique, 0, &config);
}
static void no_such_rank(void)
{
    connect_both();
    ncclBroadcast(x, x, 64, ncclFloat32, 2, near_comm, a);
}

static void init_where_only_enqueueing(void)
{
    ncclGetUniqueId(&unique);
    sim_enqueue_only(true);
    near_comm = init(0, 1);
}
static void unique_id_without_a_device(void)
{
    ncclGetUniqueId(&unique);
}

/* ---- correct --------------------------------------------------------------------------------- */

static int descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 256; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}
static void of_two_ranks(void)
{
    static const float mine[] = {1, 2, 3}, theirs[] = {10, 20, 30}, want[] = {11, 22, 33};
    int open_before = descriptors();
    connect_both();
    load(x, mine, sizeof mine, a);
    load(far_x, theirs, sizeof theirs, far);
    begin_sums(3, 3);
    poll_both();
    must_hold(x, want, sizeof want, a);
    must_hold(far_x, want, sizeof want, far);
    part_both();
    must_be(descriptors(), open_before);
}
static void of_one_rank(void)
{
    static const double mine[] = {1, 2, 3};
    ncclGetUniqueId(&unique);
    near_comm = init(0, 1);
    must_be((int)polled(near_comm), ncclSuccess);
    load(x, mine, sizeof mine, a);
    ncclAllReduce(x, y, 3, ncclFloat64, ncclProd, near_comm, a);
    must_be((int)polled(near_comm), ncclSuccess);
    must_hold(y, mine, sizeof mine, a);
    ncclCommFinalize(near_comm);
    must_be((int)polled(near_comm), ncclSuccess);
    ncclCommDestroy(near_comm);
}

/* `bytes` on each rank, reduced. */
static void reduces(ncclDataType_t dtype, ncclRedOp_t op, const void *mine, const void *theirs,
                    const void *want, size_t count, size_t bytes)
{
    load(x, mine, bytes, a);
    load(far_x, theirs, bytes, far);
    ncclGroupStart();
    ncclAllReduce(x, y, count, dtype, op, near_comm, a);
    ncclAllReduce(far_x, far_x, count, dtype, op, far_comm, far);
    ncclGroupEnd();
    poll_both();
    must_hold(y, want, bytes, a);
    must_hold(far_x, want, bytes, far);
}

#define REDUCES(dtype, op, type, ...)                                                              \
    do {                                                                                           \
        static const type at[3][2] = __VA_ARGS__;                                                  \
        reduces(dtype, op, at[0], at[1], at[2], 2, sizeof at[0]);                                  \
    } while (0)

static void of_all_types(void)
{
    connect_both();
    REDUCES(ncclInt8, ncclSum, signed char, {{100, -3}, {100, 1}, {-56, -2}});
    REDUCES(ncclInt8, ncclMin, signed char, {{100, -3}, {101, 1}, {100, -3}});
    REDUCES(ncclUint8, ncclMax, unsigned char, {{200, 3}, {100, 4}, {200, 4}});
    REDUCES(ncclInt32, ncclProd, int, {{-7, 3}, {5, 1 << 30}, {-35, -(1 << 30)}});
    REDUCES(ncclInt32, ncclAvg, int, {{-7, 3}, {2, 4}, {-2, 3}});
    REDUCES(ncclUint32, ncclMin, unsigned, {{1U << 31, 3}, {5, 7}, {5, 3}});
    REDUCES(ncclInt64, ncclMax, int64_t, {{-1, 3}, {-2, 7}, {-1, 7}});
    REDUCES(ncclUint64, ncclSum, uint64_t, {{UINT64_MAX, 3}, {2, 7}, {1, 10}});
    REDUCES(ncclFloat32, ncclAvg, float, {{1, 3}, {2, -7}, {1.5F, -2}});
    REDUCES(ncclFloat64, ncclMax, double, {{1, 3}, {2, -7}, {2, 3}});
    /* 2048 + 1 is a tie, and so is 1 + 2^-11; the smallest one twice; 65504 + 32. */
    REDUCES(ncclFloat16, ncclSum, uint16_t, {{0x6800, 0x3c00}, {0x3c00, 0x1000}, {0x6800, 0x3c00}});
    REDUCES(ncclFloat16, ncclSum, uint16_t, {{0x0001, 0x7bff}, {0x0001, 0x5000}, {0x0002, 0x7c00}});
    REDUCES(ncclFloat16, ncclAvg, uint16_t, {{0x3c00, 0xc000}, {0x4000, 0xc000}, {0x3e00, 0xc000}});
    REDUCES(ncclFloat16, ncclSum, uint16_t, {{0x6800, 0x6801}, {0x4200, 0x3c00}, {0x6802, 0x6802}});
    /* 256 + 1 is a tie; 1 + 3/256 is between. */
    REDUCES(ncclBfloat16, ncclSum, uint16_t,
            {{0x4380, 0x3f80}, {0x3f80, 0x3c40}, {0x4380, 0x3f82}});
    part_both();
}
static void scaled_first(void)
{
    static const float mine[] = {1, 2}, theirs[] = {10, 20}, want[] = {20.5F, 41};
    float half = 0.5F, twice = 2;
    ncclRedOp_t ops[2];
    connect_both();
    for (int i = 0; i < 300; i++) {
        ncclRedOpCreatePreMulSum(&ops[1], &twice, ncclFloat32, ncclScalarHostImmediate, near_comm);
        ncclRedOpDestroy(ops[1], near_comm);
    }
    ncclRedOpCreatePreMulSum(&ops[0], &half, ncclFloat32, ncclScalarHostImmediate, near_comm);
    load(y, &twice, sizeof twice, a);
    load(far_x + 64, &twice, sizeof twice, far);
    ncclRedOpCreatePreMulSum(&ops[1], far_x + 64, ncclFloat32, ncclScalarDevice, far_comm);
    load(x, mine, sizeof mine, a);
    load(far_x, theirs, sizeof theirs, far);
    ncclGroupStart();
    ncclAllReduce(x, x, 2, ncclFloat32, ops[0], near_comm, a);
    ncclAllReduce(far_x, far_x, 2, ncclFloat32, ops[1], far_comm, far);
    ncclRedOpDestroy(ops[0], near_comm);
    ncclRedOpDestroy(ops[1], far_comm);
    ncclGroupEnd();
    poll_both();
    must_hold(x, want, sizeof want, a);
    part_both();
}
static void in_place(void)
{
    static const int mine[] = {1, 2, -1, -1}, theirs[] = {-1, -1, 3, 4}, all[] = {1, 2, 3, 4};
    static const int left[] = {2, 4, 3, 4}, right[] = {1, 2, 6, 8};
    connect_both();
    load(x, mine, sizeof mine, a);
    load(far_x, theirs, sizeof theirs, far);
    ncclGroupStart();
    ncclAllGather(x, x, 2, ncclInt32, near_comm, a);
    ncclAllGather(far_x + 8, far_x, 2, ncclInt32, far_comm, far);
    ncclGroupEnd();
    poll_both();
    must_hold(x, all, sizeof all, a);
    must_hold(far_x, all, sizeof all, far);
    ncclGroupStart();
    ncclReduceScatter(x, x, 2, ncclInt32, ncclSum, near_comm, a);
    ncclReduceScatter(far_x, far_x + 8, 2, ncclInt32, ncclSum, far_comm, far);
    ncclGroupEnd();
    poll_both();
    must_hold(x, left, sizeof left, a);
    must_hold(far_x, right, sizeof right, far);
    part_both();
}
static void from_a_root(void)
{
    static const int theirs[] = {3, 4};
    connect_both();
    load(far_x, theirs, sizeof theirs, far);
    ncclGroupStart();
    ncclBroadcast(NULL, x, 2, ncclInt32, 1, near_comm, a);
    ncclBroadcast(far_x, far_x, 2, ncclInt32, 1, far_comm, far);
    ncclGroupEnd();
    poll_both();
    must_hold(x, theirs, sizeof theirs, a);
    part_both();
}
static void letters_both_ways(void)
{
    static const int mine[] = {1, 2}, theirs[] = {3, 4};
    connect_both();
    load(x, mine, sizeof mine, a);
    load(far_x, theirs, sizeof theirs, far);
    for (int i = 0; i < 3; i++) {
        ncclGroupStart();
        ncclRecv(y, 2, ncclInt32, 1, near_comm, a);
        ncclSend(x, 2, ncclInt32, 1, near_comm, a);
        ncclSend(x + 4, 1, ncclInt32, 1, near_comm, a);
        ncclRecv(far_x + 64, 2, ncclInt32, 0, far_comm, far);
        ncclRecv(far_x + 72, 1, ncclInt32, 0, far_comm, far);
        ncclSend(far_x, 2, ncclInt32, 0, far_comm, far);
        ncclGroupEnd();
        poll_both();
    }
    must_hold(y, theirs, sizeof theirs, a);
    must_hold(far_x + 64, mine, sizeof mine, far);
    must_hold(far_x + 72, mine + 1, sizeof mine[1], far);
    part_both();
}
static void over_two_streams(void)
{
    connect_both();
    inside(x, y, b);
    record(b);
    wait_on(a);
    sums();
    record(a);
    wait_on(b);
    inside(y, x, b);
    sync_both();
    part_both();
}

/* What the other rank's stream did before is before what this one does next. */
static void ordered_by_a_collective(void)
{
    cudaDeviceEnablePeerAccess(1, 0);
    connect_both();
    use(far_context);
    cudaMemcpyAsync(far_x + 1024, pinned, 64, cudaMemcpyHostToDevice, far);
    use(near_context);
    sums();
    cudaMemcpyPeerAsync(y, 0, far_x + 1024, 1, 64, a);
    sync_both();
    part_both();
}
static void the_same_gpu_twice(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclGetUniqueId(&unique);
    ncclGroupStart();
    near_comm = init(0, 2);
    must_be((int)ncclCommInitRankConfig(&far_comm, 2, unique, 1, &config), ncclInProgress);
    ncclGroupEnd();
    must_be((int)polled(near_comm), ncclInvalidUsage);
    must_be((int)polled(far_comm), ncclInvalidUsage);
    abort_both();
}
static void one_gpu_of_two_hosts(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclGetUniqueId(&unique);
    setenv("NCCL_HOSTID", "one", 1);
    near_comm = init(0, 2);
    setenv("NCCL_HOSTID", "two", 1);
    must_be((int)ncclCommInitRankConfig(&far_comm, 2, unique, 1, &config), ncclInProgress);
    poll_both();
    abort_both();
}
static void one_comes_later(void)
{
    static const float mine[] = {1}, theirs[] = {10}, want[] = {11};
    connect_both();
    load(x, mine, sizeof mine, a);
    load(far_x, theirs, sizeof theirs, far);
    near_sum(1);
    must_be((int)polled(near_comm), ncclSuccess);
    inside(y, x, a);
    record(a);
    wait_on(b);
    inside(x, y, b);
    record(b);
    must_be((int)cudaEventQuery(event), cudaErrorNotReady);
    cudaGetLastError();
    far_sum(1);
    must_be((int)polled(far_comm), ncclSuccess);
    must_hold(y, want, sizeof want, b);
    sync_both();
    part_both();
}
static void *aborts_later(void *nothing)
{
    usleep(20000);
    abort_both();
    return nothing;
}
static void waiting_until_an_abort(void)
{
    static const int mine[] = {7};
    pthread_t thread;
    connect_both();
    load(x, mine, sizeof mine, a);
    near_sum(64);
    must_be((int)polled(near_comm), ncclSuccess);
    pthread_create(&thread, NULL, aborts_later, NULL);
    must_be((int)cudaStreamSynchronize(a), cudaSuccess);
    pthread_join(thread, NULL);
    must_be(first_of(x), -1); /* anything */
}
static void an_asynchronous_error(void)
{
    connect_both();
    sums();
    sim_nccl_fail(ncclSystemError, 2);
    begin_sums(64, 64);
    must_be((int)polled(near_comm), ncclSystemError);
    abort_both();
    sync_both();
}
static void abort_beside_a_lost_device(void)
{
    connect_both();
    sums();
    sim_lose_device(1, cudaErrorIllegalAddress);
    near_sum(64);
    must_be((int)polled(near_comm), ncclSuccess);
    record(a);
    must_be((int)cudaEventQuery(event), cudaErrorNotReady);
    cudaGetLastError();
    use(far_context);
    must_be((int)ncclCommAbort(far_comm), ncclUnhandledCudaError);
    use(near_context);
    ncclCommAbort(near_comm);
    must_be((int)cudaStreamSynchronize(a), cudaSuccess);
}
static void calls_that_fail(void)
{
    ncclResult_t result;
    connect_both();
    sim_fail_at(2, cudaErrorUnknown, false);
    ncclGroupStart();
    must_be((int)near_sum(64), ncclUnhandledCudaError);
    far_sum(64);
    must_be((int)ncclGroupEnd(), ncclUnhandledCudaError);
    sim_fail_at(1, cudaErrorUnknown, false);
    must_be((int)ncclCommGetAsyncError(near_comm, &result), ncclUnhandledCudaError);
    part_both();
}
static void allocation_after_a_sum(void)
{
    void *p;
    connect_both();
    sums();
    sync_both();
    cudaMalloc(&p, 64);
    cudaFree(p);
    part_both();
}
static void allocation_after_finalize(void)
{
    void *p;
    connect_both();
    sums();
    ncclCommFinalize(near_comm);
    ncclCommFinalize(far_comm);
    poll_both();
    cudaMalloc(&p, 64);
    cudaFree(p);
    ncclCommDestroy(near_comm);
    ncclCommDestroy(far_comm);
}
static void calls_are_counted(void)
{
    connect_both();
    sums();
    sim_nccl_counts got = sim_nccl_count();
    must_be((int)got.all_reduce, 2);
    must_be((int)got.groups, 1);
    must_be((int)got.bytes, 512);
    abort_both();
}
static void capture_of_one_gpu(void)
{
    cudaGraph_t graph;
    ncclGetUniqueId(&unique);
    near_comm = init(0, 1);
    must_be((int)polled(near_comm), ncclSuccess);
    begin_capture();
    near_sum(64);
    must_be((int)polled(near_comm), ncclSuccess);
    cudaStreamEndCapture(a, &graph);
    ncclCommAbort(near_comm);
}

/* Rank 1 comes to all of them later. */
static void several_in_a_group(void)
{
    static const int mine[] = {1, 2, 3}, theirs[] = {10, 20, 30}, want[] = {11, 22, 33};
    connect_both();
    load(x, mine, sizeof mine, a);
    load(far_x, theirs, sizeof theirs, far);
    ncclGroupStart();
    for (size_t i = 0; i < 3; i++)
        ncclAllReduce(x + 4 * i, y + 4 * i, 1, ncclInt32, ncclSum, near_comm, a);
    ncclGroupEnd();
    must_be((int)polled(near_comm), ncclSuccess);
    for (size_t i = 0; i < 3; i++) {
        ncclAllReduce(far_x + 4 * i, far_x + 4 * i, 1, ncclInt32, ncclSum, far_comm, far);
        must_be((int)polled(far_comm), ncclSuccess);
    }
    must_hold(y, want, sizeof want, a);
    must_hold(far_x, want, sizeof want, far);
    part_both();
}

/* It begins when both have come to it, and both go on when it is done. */
static void one_group_on_two_streams(void)
{
    static const int mine[] = {1}, theirs[] = {10}, want[] = {11};
    connect_both();
    load(far_x, theirs, sizeof theirs, far);
    for (int i = 0; i < 10; i++) {
        load(x, mine, sizeof mine, b);
        load(y, theirs, sizeof theirs, b);
        for (int k = 0; k < 8; k++)
            some(x + 1024, x + 2048, cudaMemcpyDeviceToDevice, a);
        inside(y, x, a); /* and not what it had */
        ncclGroupStart();
        ncclAllReduce(y, y, 1, ncclInt32, ncclSum, near_comm, b);
        ncclBroadcast(x, x, 1, ncclInt32, 0, near_comm, a);
        ncclAllReduce(far_x, far_x + 128, 1, ncclInt32, ncclSum, far_comm, far);
        ncclBroadcast(NULL, far_x + 64, 1, ncclInt32, 0, far_comm, far);
        ncclGroupEnd();
        poll_both();
        inside(x, y, a);
        must_hold(x, want, sizeof want, a);
        sync_both();
        cudaStreamSynchronize(b);
    }
    part_both();
}

/* A communicator's launches keep their order, whatever their streams do. */
static void streams_by_turns(void)
{
    static const int mine[] = {1, 2}, theirs[] = {10, 20}, want[] = {11, 22};
    connect_both();
    for (int i = 0; i < 10; i++) {
        load(x, mine, sizeof mine, a);
        load(y, mine, sizeof mine, b);
        load(far_x, theirs, sizeof theirs, far);
        for (int k = 0; k < 8; k++)
            some(x + 1024, x + 2048, cudaMemcpyDeviceToDevice, a);
        ncclAllReduce(x, x, 1, ncclInt32, ncclSum, near_comm, a);
        must_be((int)polled(near_comm), ncclSuccess);
        ncclAllReduce(y, y, 2, ncclInt32, ncclSum, near_comm, b);
        must_be((int)polled(near_comm), ncclSuccess);
        ncclAllReduce(far_x + 64, far_x + 64, 1, ncclInt32, ncclSum, far_comm, far);
        must_be((int)polled(far_comm), ncclSuccess);
        ncclAllReduce(far_x, far_x, 2, ncclInt32, ncclSum, far_comm, far);
        must_be((int)polled(far_comm), ncclSuccess);
        must_hold(y, want, sizeof want, b);
        sync_both();
    }
    part_both();
}

/* What it says after some time. */
static ncclResult_t says_at_last(ncclComm_t comm)
{
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < 20; i++)
        ncclCommGetAsyncError(comm, &result);
    return result;
}
static void finalize_waits(void)
{
    connect_both();
    ncclCommFinalize(near_comm);
    must_be((int)says_at_last(near_comm), ncclInProgress); /* for the other one */
    ncclCommFinalize(far_comm);
    must_be((int)says_at_last(near_comm), ncclSuccess);
    abort_both();
    connect_both();
    near_sum(64);
    must_be((int)polled(near_comm), ncclSuccess);
    ncclCommFinalize(near_comm);
    ncclCommFinalize(far_comm);
    must_be((int)says_at_last(near_comm), ncclInProgress); /* for what it is doing */
    abort_both();
}
static void a_rank_that_never_joins(void)
{
    ncclGetUniqueId(&unique);
    near_comm = init(0, 2);
    sim_nccl_never_arrives(true);
    far_comm = init(1, 2);
    must_be((int)says_at_last(near_comm), ncclInProgress);
    must_be((int)says_at_last(far_comm), ncclInProgress);
    abort_both();
}
static void connected_late(void)
{
    connect_both();
    sim_nccl_connects_late(true);
    near_sum(64);
    must_be((int)says_at_last(near_comm), ncclInProgress);
    far_sum(64);
    poll_both();
    near_sum(64);
    must_be((int)polled(near_comm), ncclSuccess);
    far_sum(64);
    poll_both();
    sync_both();
    part_both();
}

/* 2^24 + 1 + 1 is one of two numbers, and each place has an order of its own. */
static void added_in_any_order(void)
{
    enum { RANKS = 3, COUNT = 4096 };
    static const float of_ranks[RANKS] = {0x1p24F, 1, 1};
    static const char *const hosts[RANKS] = {"one", "two", "three"};
    static float numbers_of[COUNT];
    const cudaStream_t on[RANKS] = {a, b, far};
    char *const at[RANKS] = {x, y, far_x};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all[RANKS] = {NULL};
    int less = 0;
    config.blocking = 0;
    ncclGetUniqueId(&unique);
    for (int r = 0; r < RANKS; r++) {
        for (int i = 0; i < COUNT; i++)
            numbers_of[i] = of_ranks[r];
        load(at[r], numbers_of, sizeof numbers_of, on[r]);
        setenv("NCCL_HOSTID", hosts[r], 1);
        use(r < 2 ? near_context : far_context);
        ncclCommInitRankConfig(&all[r], RANKS, unique, r, &config);
    }
    use(near_context);
    ncclGroupStart();
    for (int r = 0; r < RANKS; r++) {
        must_be((int)polled(all[r]), ncclSuccess);
        ncclAllReduce(at[r], at[r], COUNT, ncclFloat32, ncclSum, all[r], on[r]);
    }
    ncclGroupEnd();
    for (int r = 0; r < RANKS; r++)
        must_be((int)polled(all[r]), ncclSuccess);
    cudaMemcpyAsync(pinned, at[0], sizeof numbers_of, cudaMemcpyDeviceToHost, a);
    cudaStreamSynchronize(a);
    memcpy(numbers_of, pinned, sizeof numbers_of);
    for (int i = 0; i < COUNT; i++)
        less += numbers_of[i] < 0x1p24F + 2;
    must_be(less > 0 && less < COUNT, true);
    must_hold(at[1], numbers_of, sizeof numbers_of, b); /* the same on all ranks */
    must_hold(at[2], numbers_of, sizeof numbers_of, far);
    for (int r = 0; r < RANKS; r++)
        ncclCommAbort(all[r]);
}
static void a_rank_leaves_early(void)
{
    init_both();
    ncclCommAbort(far_comm);
    must_be((int)polled(near_comm), ncclRemoteError);
    ncclCommAbort(near_comm);
}

/* ---- two processes --------------------------------------------------------------------------- */

/* The other one is rank 1; what it finds is said as well. */
static void in_two_processes(void (*run)(int rank))
{
    ncclGetUniqueId(&unique);
    pid_t child = fork();
    int status = 0;
    if (child == 0) { /* with pinned memory of its own */
        void *own = NULL;
        alarm(20);
        cudaFreeHost(pinned);
        cudaHostAlloc(&own, BYTES, cudaHostAllocPortable);
        pinned = own;
        use(far_context);
        run(1);
        use(near_context);
        clean_up();
        exit(0);
    }
    run(0);
    waitpid(child, &status, 0);
    must_be(status, 0);
}

static ncclComm_t meet_other(int rank)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    config.blocking = 0;
    must_be((int)ncclCommInitRankConfig(&comm, 2, unique, rank, &config), ncclInProgress);
    must_be((int)polled(comm), ncclSuccess);
    return comm;
}

static void sums_with_other(int rank)
{
    const ncclComm_t comm = meet_other(rank);
    const cudaStream_t stream = rank == 0 ? a : far;
    static float numbers_of[1000];
    char *at = rank == 0 ? x : far_x;
    usleep(rank == 0 ? 0 : 20000);
    for (int i = 0; i < 1000; i++)
        numbers_of[i] = (float)rank + 1;
    load(at, numbers_of, sizeof numbers_of, stream);
    for (int i = 0; i < 10; i++) {
        must_be((int)ncclAllReduce(at, at, 1000, ncclFloat32, ncclSum, comm, stream),
                ncclInProgress);
        must_be((int)polled(comm), ncclSuccess);
    }
    for (int i = 0; i < 1000; i++)
        numbers_of[i] = 3 * 512;
    must_hold(at, numbers_of, sizeof numbers_of, stream);
    must_be((int)ncclCommFinalize(comm), ncclInProgress);
    must_be((int)polled(comm), ncclSuccess);
    must_be((int)ncclCommDestroy(comm), ncclSuccess);
}
static void two_processes(void)
{
    in_two_processes(sums_with_other);
}
/* Rank 1 has enqueued its part, and then its host waits for the other one. */
static int between[2], back[2];

static void waits_elsewhere(int rank)
{
    const ncclComm_t comm = meet_other(rank);
    const cudaStream_t stream = rank == 0 ? a : far;
    char *at = rank == 0 ? x : far_x, byte = 0;
    usleep(rank == 0 ? 50000 : 0);
    for (int i = 0; i < 3; i++) {
        ncclAllReduce(at, at, 1000, ncclFloat32, ncclSum, comm, stream);
        must_be((int)polled(comm), ncclSuccess);
    }
    if (rank == 1)
        must_be((int)read(between[0], &byte, 1), 1);
    must_be((int)cudaStreamSynchronize(stream), cudaSuccess);
    if (rank == 0)
        must_be((int)write(between[1], &byte, 1), 1);
    ncclCommAbort(comm);
}
static void the_host_waits_elsewhere(void)
{
    must_be(pipe(between), 0);
    in_two_processes(waits_elsewhere);
}
static void aborts_if_first(int rank)
{
    const ncclComm_t comm = meet_other(rank);
    ncclResult_t result = ncclInProgress;
    char byte = 0;
    if (rank == 1)
        must_be((int)read(between[0], &byte, 1), 1);
    if (rank == 0) {
        ncclAllReduce(x, x, 64, ncclFloat32, ncclSum, comm, a);
        must_be((int)polled(comm), ncclSuccess);
        must_be((int)write(between[1], &byte, 1), 1);
        usleep(50000); /* it does not hear of the abort by itself */
        must_be((int)ncclCommGetAsyncError(comm, &result), ncclSuccess);
        must_be((int)result, ncclSuccess);
        record(a);
        must_be((int)cudaEventQuery(event), cudaErrorNotReady);
        cudaGetLastError();
    }
    ncclCommAbort(comm);
}
static void one_process_aborts(void)
{
    must_be(pipe(between), 0);
    in_two_processes(aborts_if_first);
}
static void differs_with_other(int rank)
{
    const ncclComm_t comm = meet_other(rank);
    size_t count = rank == 0 ? 64 : 32;
    char *at = rank == 0 ? x : far_x;
    ncclAllReduce(at, at, count, ncclFloat32, ncclSum, comm, rank == 0 ? a : far);
    polled(comm);
    for (int i = 0; i < 5000 && sim_finding_count("unequal collectives") == 0; i++)
        usleep(1000);
    ncclCommAbort(comm);
}
static void unequal_counts_of_processes(void)
{
    in_two_processes(differs_with_other);
}
static void leaves_other(int rank)
{
    const ncclComm_t comm = meet_other(rank);
    if (rank == 1)
        _exit(0);
    sim_nccl_mind_hangs(true);
    ncclAllReduce(x, x, 64, ncclFloat32, ncclSum, comm, a);
    polled(comm);
    cudaStreamSynchronize(a);
}
static void never_comes_to_other(int rank)
{
    const ncclComm_t comm = meet_other(rank);
    char byte = 0;
    if (rank == 1) {
        sim_nccl_never_arrives(true);
        must_be((int)write(between[1], &byte, 1), 1);
        must_be((int)read(back[0], &byte, 1), 1);
    } else {
        must_be((int)read(between[0], &byte, 1), 1);
        sim_nccl_mind_hangs(true);
        ncclAllReduce(x, x, 64, ncclFloat32, ncclSum, comm, a);
        polled(comm);
        cudaStreamSynchronize(a);
        must_be((int)write(back[1], &byte, 1), 1);
    }
    ncclCommAbort(comm);
}
static void wait_for_a_process_that_never_comes(void)
{
    must_be(pipe(between) + pipe(back), 0);
    in_two_processes(never_comes_to_other);
}
static void wait_for_a_process_that_ended(void)
{
    in_two_processes(leaves_other);
}

#endif /* SIM_PLANTED_NCCL_H */
