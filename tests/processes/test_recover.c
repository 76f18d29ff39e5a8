/* test_recover.c - some processes of a job die, and the others go on: who they are then, what stays
   and what does not, and that training counts each sample once. */

#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <arpa/inet.h>
#include <errno.h>
#include <sys/resource.h>
#include "dp_data.h"
#include "dp_local.h"
#include "dp_save.h"
#include "dp_train.h"
#include "examples/custom_device.h"
#include "folder.h"
#include "mortal.h"
#include "refusal.h"

#if defined(TEST_CUDA)
static const char *const carrier = "nccl";
#else
static const char *const carrier = "shared memory";
#endif

/* ---- processes, some of which are killed ----------------------------------------------------- */

static int shards;           /* of all that are opened; 0: none */
static const char *machines; /* a letter each; NULL: they are where they are */

/* TCP carries what goes between them. */
static void use_machine(void)
{
    without_gpus();
    use_tcp();
    set("DP_MACHINE", (char[]){machines[me], '\0'});
    set("DP_INTERFACE", "lo");
}

static void kill_me(void)
{
    raise(SIGKILL);
}

static void stop_me(void)
{
    raise(SIGSTOP);
}

static dp_info info_of(const dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    return info;
}

static dp_ctx *open_recovering(int devices, int timeout_ms)
{
    dp_ctx *ctx;
    dp_config config = {
        .device_count = devices, .recovers = true, .timeout_ms = timeout_ms, .shards = shards};
    if (machines != NULL) {
        use_machine();
    } else {
        use_devices(&config);
        use_name();
    }
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static int64_t sum_of(dp_ctx *ctx, int64_t own)
{
    CHECK_OK(dp_all_reduce_i64(ctx, &own, 1, DP_OP_SUM));
    return own;
}

/* Outside the job, so that no failure reaches who is not through with what came before: all `count`
   that are left. */
static void meet(int count)
{
    static int awaited;
    awaited += count;
    atomic_fetch_add(met, 1);
    wait_for(awaited);
}

/* Until a call has failed, as all do once a process has died. */
static void wait_for_failure(dp_ctx *ctx)
{
    int64_t one = 1;
    while (dp_all_reduce_i64(ctx, &one, 1, DP_OP_SUM) == DP_OK)
        one = 1;
    CHECK(dp_failure(ctx, NULL));
}

static void check_place(dp_ctx *ctx, int process, int count, int devices, int recoveries)
{
    dp_info info = info_of(ctx);
    CHECK_INT(info.process, process);
    CHECK_INT(info.process_count, count);
    CHECK_INT(info.local_count, devices);
    CHECK_INT(info.rank_first, process * devices);
    CHECK_INT(info.rank_count, count * devices);
    CHECK_INT(info.machine_process, process);
    CHECK_INT(info.machine_process_count, count);
    CHECK_INT(info.machine_count, 1);
    CHECK_INT(info.recoveries, recoveries);
    CHECK_STR(info.launcher, "recovery");
    CHECK(!dp_failure(ctx, NULL));
}

typedef struct own_sum {
    dp_ctx *ctx;
    const dp_part *parts;
    size_t count;
} own_sum;

static dp_status sum_for_itself(int local_rank, dp_scope *scope, void *user)
{
    const own_sum *sum = user;
    const dp_part *part = &sum->parts[local_rank];
    (void)scope;
    return dp_rank_all_reduce(sum->ctx, part->send, part->recv, sum->count, DP_F32, DP_OP_MEAN);
}

/* Collectives of tensors of several sizes over all ranks: one call for all, and each rank for
   itself. */
static void check_ranks(dp_ctx *ctx)
{
    static const int64_t sizes[] = {1, 5, 70000};
    static float data[70000];
    dp_info info = info_of(ctx);
    for (size_t s = 0; s < 3; s++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_part parts[4];
        dp_tensor tensors[4];
        for (int i = 0; i < info.local_count; i++) {
            for (int64_t k = 0; k < sizes[s]; k++)
                data[k] = (float)(info.rank_first + i + 1);
            CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, i), data, DP_F32,
                                    DP_SHAPE(sizes[s]), &tensors[i]));
            parts[i] = (dp_part){tensors[i].data, tensors[i].data, NULL};
        }
        CHECK_OK(dp_all_reduce(ctx, parts, (size_t)sizes[s], DP_F32, DP_OP_SUM));
        CHECK_OK(dp_run(ctx, scope, sum_for_itself, &(own_sum){ctx, parts, (size_t)sizes[s]}));
        for (int i = 0; i < info.local_count; i++) {
            CHECK_OK(dp_read(ctx, &tensors[i], data, (size_t)sizes[s] * sizeof *data));
            for (int64_t k = 0; k < sizes[s]; k++)
                CHECK_F64(data[k], info.rank_count * (info.rank_count + 1) / 2, 0);
        }
        dp_scope_end(scope);
    }
    CHECK_OK(dp_barrier(ctx));
}

/* ---- who they are then ----------------------------------------------------------------------- */

static int victim, devices = 1;

static void one_dies(void)
{
    dp_ctx *ctx = open_recovering(devices, TIMEOUT_MS);
    dp_failure_info failure;
    CHECK_INT(info_of(ctx).recoveries, 0);
    CHECK_STR(info_of(ctx).coll_backend, carrier);
    check_ranks(ctx);
    meet(world);
    if (me == victim)
        kill_me();
    wait_for_failure(ctx);
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.rank, victim * devices);
    CHECK_OK(dp_recover(ctx));
    check_place(ctx, me - (me > victim), world - 1, devices, 1);
    CHECK_STR(info_of(ctx).coll_backend, carrier);
    check_ranks(ctx);
    CHECK_INT(sum_of(ctx, me + 1), world * (world + 1) / 2 - victim - 1);
    dp_close(ctx);
}

TEST_SLOW(the_others_go_on_whoever_dies, 60)
{
    for (devices = 1; devices <= 2; devices++)
        for (victim = 0; victim < 3; victim++) {
            start_world(3, one_dies);
            CHECK_INT(end_world(), 1);
        }
}

/* Returns at how many ports of a network this process listens. */
static int ports_here(void)
{
    int count = 0;
    for (int fd = 0; fd < 1000; fd++) {
        struct sockaddr_storage at;
        int listens = 0;
        socklen_t bytes = sizeof listens, at_bytes = sizeof at;
        bool does = getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens;
        count += does && getsockname(fd, (struct sockaddr *)&at, &at_bytes) == 0 &&
                 at.ss_family != AF_UNIX;
    }
    return count;
}

/* Each sends its number to the next one. */
static void send_around(dp_ctx *ctx)
{
    const dp_info info = info_of(ctx);
    int before = (info.process + info.process_count - 1) % info.process_count;
    int32_t out = info.process, in = -1;
    dp_message both[2] = {
        {.tensor = dp_wrap(&out, DP_I32, 0, NULL), .peer = (info.process + 1) % info.process_count},
        {.tensor = dp_wrap(&in, DP_I32, 0, NULL), .peer = before, .receives = true}};
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    CHECK_OK(dp_messages_end(ctx, both, 2));
    CHECK_INT(in, before);
}

/* All that others have to say to a process comes to one port: data, messages, votes, and who meets
   again. Process 0 has another one as soon as others may come later. */
static void one_port(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    CHECK_INT(ports_here(), 1);
    send_around(ctx);
    CHECK_INT(ports_here(), 1);
    meet(world);
    if (me == victim)
        kill_me();
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(ports_here(), 1 + (info_of(ctx).process == 0));
    send_around(ctx);
    CHECK_INT(sum_of(ctx, me + 1), world * (world + 1) / 2 - victim - 1);
    dp_close(ctx);
    CHECK_INT(ports_here(), 0);
}

TEST_SLOW(a_process_has_one_port, 60)
{
    machines = "abcb";
    for (victim = 0; victim < 3; victim++) {
        port = free_port();
        start_world(4, one_port);
        CHECK_INT(end_world(), 1);
    }
}

/* Down to one, and what is left of the job is found by that one alone, too. */
static void all_but_one_die(void)
{
    dp_ctx *ctx = open_recovering(2, TIMEOUT_MS);
    for (int left = world; left > 1; left--) {
        meet(left);
        if (me == world - left)
            kill_me();
        wait_for_failure(ctx);
        CHECK_OK(dp_recover(ctx));
        check_place(ctx, me - (world - left) - 1, left - 1, 2, world - left + 1);
        check_ranks(ctx);
    }
    dp_abort(ctx, DP_ERR_USER, "a reason of its own");
    CHECK_OK(dp_recover(ctx));
    check_place(ctx, 0, 1, 2, world);
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(one_after_another, 60)
{
    start_world(5, all_but_one_die);
    CHECK_INT(end_world(), 4);
}

static void half_die(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    meet(world);
    if (me % 2 == 0)
        kill_me();
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    while (info_of(ctx).process_count > world / 2) { /* some died later than others */
        wait_for_failure(ctx);
        CHECK_OK(dp_recover(ctx));
    }
    check_ranks(ctx);
    CHECK_INT(info_of(ctx).process, me / 2);
    CHECK_INT(info_of(ctx).process_count, world / 2);
    dp_close(ctx);
}

TEST_SLOW(several_die_at_once, 60)
{
    start_world(8, half_die);
    CHECK_INT(end_world(), 4);
}

/* The dead take no turns: the last two do not wait for ten that may have proposed. */
static void most_die(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    meet(world);
    if (me < world - 2)
        kill_me();
    wait_for_failure(ctx);
    rest(100); /* until all are dead */
    double begun = now_ms();
    CHECK_OK(dp_recover(ctx));
    CHECK(now_ms() - begun < 600 * SLOWER * test_timeout_scale());
    check_place(ctx, me - (world - 2), 2, 1, 1);
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(those_after_many_dead_go_on_at_once, 60)
{
    start_world(12, most_die);
    CHECK_INT(end_world(), 10);
}

/* Nobody has died: all go on. */
static void one_aborts(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    for (int i = 0; i < 5; i++) {
        meet(world);
        if (me == i % world)
            dp_abort(ctx, DP_ERR_USER, "number %d", i);
        wait_for_failure(ctx);
        CHECK_OK(dp_recover(ctx));
        check_place(ctx, me, world, 1, i + 1);
    }
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(who_has_failed_and_is_alive_goes_on_too, 60)
{
    start_world(3, one_aborts);
    CHECK_INT(end_world(), 0);
}

#if defined(TEST_SIM)
/* NCCL puts the sum somewhere all the same: 12 MiB. */
static void send_what_nobody_wants(dp_ctx *ctx)
{
    enum { FLOATS = 3 << 20 };
    dp_tensor tensor;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(FLOATS), &tensor));
    const dp_part part = {tensor.data, NULL, NULL};
    CHECK_OK(dp_fill(ctx, &tensor, dp_int(1)));
    CHECK_OK(dp_all_reduce(ctx, &part, FLOATS, DP_F32, DP_OP_SUM));
    CHECK_OK(dp_wait(ctx));
    dp_scope_end(scope);
}

/* What a communicator has taken of a GPU goes back with it: there are two slabs at most, and the
   tensor and the sum that are too large for one. */
static void memory_goes_back(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    for (int i = 0; i < 10; i++) {
        dp_device_info info;
        dp_tensor tensor;
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_I16, DP_SHAPE(9), &tensor));
        CHECK_OK(dp_fill(ctx, &tensor, dp_int(me)));
        const dp_part part = {tensor.data, tensor.data, NULL};
        CHECK_OK(dp_all_reduce(ctx, &part, 9, DP_I16, DP_OP_SUM)); /* of slices */
        CHECK_OK(dp_wait(ctx));
        dp_scope_end(scope);
        send_what_nobody_wants(ctx);
        CHECK_OK(dp_device_info_get(ctx, 0, &info));
        CHECK(info.bytes_total - info.bytes_free <= 96 << 20);
        meet(world);
        if (me == 0)
            dp_abort(ctx, DP_ERR_USER, "number %d", i);
        wait_for_failure(ctx);
        CHECK_OK(dp_recover(ctx));
    }
    dp_close(ctx);
}

TEST_SLOW(memory_of_gpus_goes_back, 60)
{
    for (shards = 0; shards <= 2; shards += 2) {
        start_world(2, memory_goes_back);
        CHECK_INT(end_world(), 0);
    }
}
#endif

/* ---- pieces of memory, where collectives go through the host --------------------------------- */

static int64_t bytes_held;

static void *count_alloc(size_t bytes, size_t align, void *user)
{
    (void)user;
    bytes_held += (int64_t)bytes;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void count_free(void *data, size_t bytes, void *user)
{
    (void)user;
    bytes_held -= data != NULL ? (int64_t)bytes : 0;
    free(data);
}

static size_t memory_mapped(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%zu", &pages) == 1);
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static dp_ctx *open_staged(void)
{
    const dp_coll_ops *const colls[] = {dp_shm_coll(), NULL};
    const dp_device_ops *const toys[] = {toy_device(), NULL};
    dp_config config = {.backends = toys,
                        .colls = colls,
                        .device_count = 2,
                        .recovers = true,
                        .allocator = {count_alloc, count_free, NULL}};
    dp_ctx *ctx;
    use_devices(&config);
    use_name();
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_STR(info_of(ctx).coll_backend, "shared memory, through the host");
    return ctx;
}

enum { SOME_PIECES = 700000 }; /* floats: two pieces, and a part of one */

typedef struct staged {
    dp_part parts[2];
    dp_tensor sums[2];
} staged;

/* Ones on both devices, and room for their sums. */
static staged make_staged(dp_ctx *ctx, dp_scope *scope)
{
    staged own;
    for (int i = 0; i < 2; i++) {
        dp_tensor ones;
        dp_device device = dp_local_device(ctx, i);
        CHECK_OK(dp_tensor_new(scope, device, DP_F32, DP_SHAPE(SOME_PIECES), &ones));
        CHECK_OK(dp_tensor_new(scope, device, DP_F32, DP_SHAPE(SOME_PIECES), &own.sums[i]));
        CHECK_OK(dp_fill(ctx, &ones, dp_float(1)));
        own.parts[i] = (dp_part){ones.data, own.sums[i].data, NULL};
    }
    return own;
}

static dp_status sum_staged(dp_ctx *ctx, const staged *own)
{
    return dp_all_reduce(ctx, own->parts, SOME_PIECES, DP_F32, DP_OP_SUM);
}

static void check_staged(dp_ctx *ctx, const staged *own)
{
    static float sums[SOME_PIECES];
    CHECK_OK(sum_staged(ctx, own));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dp_read(ctx, &own->sums[i], sums, sizeof sums));
        for (int k = 0; k < SOME_PIECES; k++)
            CHECK_F64(sums[k], info_of(ctx).rank_count, 0);
    }
}

/* A process fails now while the other one has pieces under way, and now before that. */
static void fail_in_pieces(void)
{
    enum { TIMES = 24, STEADY = 8 };
    dp_ctx *ctx = open_staged();
    int64_t bytes = 0;
    size_t mapped = 0;
    for (int i = 0; i < TIMES; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        const staged own = make_staged(ctx, scope);
        check_staged(ctx, &own);
        meet(world);
        rest(me == 0 ? i % 3 * 5 : 0);
        if (me == 0)
            dp_abort(ctx, DP_ERR_USER, "again");
        while (sum_staged(ctx, &own) == DP_OK)
            continue;
        dp_scope_end(scope);
        CHECK_OK(dp_recover(ctx));
        bytes = i == STEADY ? bytes_held : bytes;
        mapped = i == STEADY ? memory_mapped() : mapped;
    }
    CHECK_INT(bytes_held, bytes);
    CHECK(memory_mapped() < mapped + (16 << 20));
    dp_close(ctx);
    CHECK_INT(bytes_held, 0);
}

TEST_SLOW(pieces_of_collectives_are_used_again, 60)
{
    start_world(2, fail_in_pieces);
    CHECK_INT(end_world(), 0);
}

/* Streams of the user's are at work on pieces when the job fails, and nobody waits for them after
   that: simulated GPUs see whether what comes next is behind them. */
static void fail_on_own_streams(void)
{
    dp_stream *streams[2];
    dp_ctx *ctx = open_staged();
    dp_scope *scope = dp_scope_begin(ctx);
    const staged own = make_staged(ctx, scope);
    check_staged(ctx, &own);
    for (int i = 0; i < 2; i++) {
        dp_dev *dev = dp_local_stream(ctx, i)->dev;
        CHECK_OK(dev->ops->stream_create(dev, 0, &streams[i]));
        CHECK_OK(dp_use_stream(ctx, i, streams[i]));
    }
    check_staged(ctx, &own);
    meet(world);
    rest(me == 0 ? 50 : 0);
    if (me == 0)
        dp_abort(ctx, DP_ERR_USER, "again");
    CHECK_INT(dp_status_class(sum_staged(ctx, &own)), DP_CLASS_JOB);
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_use_stream(ctx, i, NULL));
    CHECK_OK(dp_recover(ctx));
    check_staged(ctx, &own);
    for (int i = 0; i < 2; i++)
        streams[i]->dev->ops->stream_destroy(streams[i]);
    dp_scope_end(scope);
    dp_close(ctx);
    cuda_check_leaks();
}

TEST_SLOW(pieces_that_streams_use_are_waited_for, 60)
{
    start_world(2, fail_on_own_streams);
    CHECK_INT(end_world(), 0);
}

/* The first one does not come to lead, though it is there for a while. */
static void the_leader_dies(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    meet(world);
    if (me == 3)
        kill_me();
    wait_for_failure(ctx);
    if (me == 0) {
        rest(300);
        kill_me();
    }
    CHECK_OK(dp_recover(ctx));
    check_place(ctx, me - 1, 2, 1, 1);
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(a_leader_that_dies_has_another_after_it, 60)
{
    start_world(4, the_leader_dies);
    CHECK_INT(end_world(), 2);
}

/* Process 3 is stopped, so that process 0 proposes and waits for it; meanwhile that one dies. */
static void who_proposes_dies(void)
{
    dp_ctx *ctx = open_recovering(1, 4000 * SLOWER);
    meet(world);
    if (me == 3)
        raise(SIGSTOP);
    if (me == 0)
        dp_abort(ctx, DP_ERR_USER, "a reason");
    wait_for_failure(ctx);
    atomic_fetch_add(met, 1);
    double begun = now_ms();
    CHECK_OK(dp_recover(ctx));
    CHECK(now_ms() - begun < 3000 * SLOWER);
    check_place(ctx, me - 1, 2, 1, 1);
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(who_proposes_and_dies_is_not_waited_for, 60)
{
    start_world(4, who_proposes_dies);
    wait_for(4 + 3);
    rest(500);
    CHECK_INT(kill(pids[0], SIGKILL), 0);
    finish(pids[1], 1);
    finish(pids[2], 2);
    CHECK_INT(kill(pids[3], SIGKILL), 0);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void admit_too_late(void *ctx)
{
    bool came;
    CHECK_ERROR(dp_admit(ctx, &came), DP_ERR_STATE,
                "dp_admit: the context is in use by a deferred function, which called this");
}

static void refused(void)
{
    bool came = true;
    dp_ctx *ctx, *plain;
    without_gpus();
    use_name();
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 2, .recovers = me == 1}, &plain),
                DP_ERR_MISMATCH, "dp_open: process 1 has config.recovers, process 0 has not");
    set("DP_ADDR", "@another-place");
    set("DP_PROCESS_LIMIT", "4");
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 2, .recovers = true, .shards = 4}, &plain),
                DP_ERR_INVALID, "DP_PROCESS_LIMIT is 4, and with shards a job of 2 does not grow");
    unsetenv("DP_PROCESS_LIMIT");
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .job = "plain"}, &plain));
    meet(world);
    dp_abort(plain, DP_ERR_USER, "why");
    CHECK_ERROR(dp_recover(plain), DP_ERR_STATE,
                "dp_recover: config.recovers was not set, or there was one process");
    dp_close(plain);
    CHECK_ERROR(dp_recover(NULL), DP_ERR_INVALID, "dp_recover: ctx is NULL");
    set("DP_REJOIN", "1");
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1}, &plain), DP_ERR_UNSUPPORTED,
                "dp_open: DP_REJOIN is set, but config.recovers is not");
    CHECK_ERROR(
        dp_open(&(dp_config){.device_count = 1, .recovers = true, .timeout_ms = 300}, &plain),
        DP_ERR_TIMEOUT,
        "dp_open: no job that others can join was found at @another-place within 0.3 s: nobody "
        "listens there; a job does from its first dp_admit or dp_recover on");
    set("DP_LAUNCH", "none");
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1, .recovers = true}, &plain),
                DP_ERR_UNSUPPORTED,
                "dp_open: DP_REJOIN is set, but no launcher has started this process");
    unsetenv("DP_REJOIN");
    unsetenv("DP_LAUNCH");
    use_name();
    set("DP_PROCESS_LIMIT", "1");
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1, .recovers = true, .job = "less"}, &plain),
                DP_ERR_INVALID, "DP_PROCESS_LIMIT is '1', not a whole number from 2 to ");
    set("DP_PROCESS_LIMIT", me == 0 ? "3" : "5");
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1, .recovers = true, .job = "other"}, &plain),
                DP_ERR_MISMATCH,
                "config.recovers: DP_PROCESS_LIMIT is 3 in process 0 and 5 in process 1");
    unsetenv("DP_PROCESS_LIMIT");
    use_name();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .recovers = true}, &ctx));
    CHECK_ERROR(dp_recover(ctx), DP_ERR_STATE, "dp_recover: the job has not failed");
    CHECK_OK(dp_admit(ctx, &came));
    CHECK(!came);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_scope_defer(scope, admit_too_late, ctx));
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(what_cannot_recover_says_why)
{
    start_world(2, refused);
    CHECK_INT(end_world(), 0);
}

/* ---- and when -------------------------------------------------------------------------------- */

static void admit_refused(dp_ctx *ctx, const char *why)
{
    bool came = true;
    CHECK_ERROR(dp_admit(ctx, &came), DP_ERR_STATE, why);
    CHECK(came);
}

static void nobody_is_let_in(dp_ctx *ctx)
{
    bool came = true;
    CHECK_OK(dp_admit(ctx, &came));
    CHECK(!came);
}

/* Of one device, or of two that run together. */
static dp_status admit_inside(int local_rank, dp_scope *scope, void *ctx)
{
    (void)local_rank, (void)scope;
    admit_refused(ctx, "dp_admit: the context is in use by a function under dp_run, which called "
                       "this");
    return DP_OK;
}

static dp_status recover_too_early(int local_rank, dp_scope *scope, void *ctx)
{
    (void)local_rank, (void)scope;
    CHECK_ERROR(dp_recover(ctx), DP_ERR_STATE, "dp_recover: the job has not failed");
    return DP_OK;
}

static dp_status recover_inside(int local_rank, dp_scope *scope, void *ctx)
{
    (void)local_rank, (void)scope;
    dp_abort(ctx, DP_ERR_USER, "again");
    CHECK_ERROR(dp_recover(ctx), DP_ERR_STATE,
                "dp_recover: the context is in use by a function under dp_run, which called this");
    return DP_OK;
}

static dp_status admit_in_forward(dp_call *call)
{
    admit_refused(call->ctx, "dp_admit: the context is in use by method 'eager.forward', which "
                             "called this");
    call->out = dp_none();
    return DP_OK;
}

static dp_status recover_in_backward(dp_call *call)
{
    dp_abort(call->ctx, DP_ERR_USER, "again");
    CHECK_ERROR(dp_recover(call->ctx), DP_ERR_STATE,
                "dp_recover: the context is in use by method 'eager.backward', which called this");
    return DP_OK;
}

/* The forward of a wrapper is open, and then it is not. */
static void inside_methods(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", admit_in_forward},
                                        {"backward", recover_in_backward}};
    dp_module *eager;
    dp_value out;
    dp_pass *pass;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "eager", .methods = methods, .method_count = 2}, &eager));
    CHECK_OK(dp_invoke(eager, scope, "forward", dp_none(), dp_none(), NULL, &out, &pass));
    nobody_is_let_in(ctx);
    meet(world);
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
    dp_scope_end(scope);
}

/* Of each local rank, 1. */
static void in_a_pass(dp_ctx *ctx)
{
    void *local[2];
    dp_reducer *reducer;
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < devices; i++) {
        dp_tensor grads;
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, DP_SHAPE(8), &grads));
        CHECK_OK(dp_fill(ctx, &grads, dp_float(1)));
        local[i] = grads.data;
    }
    const dp_block block = {DP_F32, 8, local};
    CHECK_OK(dp_reducer_create(
        ctx, &(dp_reducer_config){.blocks = &block, .block_count = 1, .reduction = DP_SUM_RANKS},
        &reducer));
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    admit_refused(ctx, "dp_admit: a pass is open");
    for (int i = 0; i < devices; i++)
        CHECK_OK(dp_reducer_ready(reducer, i, 0, NULL));
    CHECK_OK(dp_reducer_finish(reducer));
    nobody_is_let_in(ctx);
    CHECK_OK(dp_reducer_destroy(reducer));
    dp_scope_end(scope);
}

/* To the other process, and from it: they are there, but nobody has asked. */
static void in_messages(dp_ctx *ctx)
{
    float out = (float)me, in = -1;
    dp_message both[2] = {
        {.tensor = dp_wrap(&out, DP_F32, 0, NULL), .peer = (1 - me) * devices},
        {.tensor = dp_wrap(&in, DP_F32, 0, NULL), .peer = (1 - me) * devices, .receives = true}};
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    admit_refused(ctx, "dp_admit: messages have begun, and were not ended");
    CHECK_OK(dp_messages_end(ctx, both, 1));
    admit_refused(ctx, "dp_admit: messages have begun, and were not ended");
    CHECK_OK(dp_messages_end(ctx, &both[1], 1));
    CHECK_F64(in, 1 - me, 0);
    nobody_is_let_in(ctx);
}

static void at_the_wrong_time(void)
{
    dp_ctx *ctx = open_recovering(devices, TIMEOUT_MS), *group;
    CHECK_OK(dp_run(ctx, NULL, admit_inside, ctx));
    CHECK_OK(dp_run(ctx, NULL, recover_too_early, ctx));
    in_a_pass(ctx);
    in_messages(ctx);
    CHECK_OK(dp_open_group(ctx, 0, NULL, &group));
    nobody_is_let_in(ctx);
    inside_methods(ctx);
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx)); /* the group goes on as it was */
    check_place(ctx, me, world, devices, 1);
    check_ranks(ctx);
    check_ranks(group);
    dp_close(group);
    meet(world);
    CHECK_INT(dp_status_class(dp_run(ctx, NULL, recover_inside, ctx)), DP_CLASS_JOB);
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(what_is_under_way_is_ended_first, 60)
{
    for (devices = 1; devices <= 2; devices++) {
        start_world(2, at_the_wrong_time);
        CHECK_INT(end_world(), 0);
    }
}

/* A program for many processes runs with one, too. */
TEST(a_process_that_is_alone_has_nobody_to_let_in)
{
    bool came = true;
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .local_only = true, .recovers = true}, &ctx));
    CHECK_OK(dp_admit(ctx, &came));
    CHECK(!came);
    CHECK_OK(dp_run(ctx, NULL, admit_inside, ctx)); /* as with others */
    CHECK_ERROR(dp_recover(ctx), DP_ERR_STATE, "or there was one process");
    dp_close(ctx);
    came = true;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .local_only = true}, &ctx));
    CHECK_ERROR(dp_admit(ctx, &came), DP_ERR_STATE, "dp_admit: config.recovers was not set");
    CHECK(came);
    dp_close(ctx);
}

/* Process 0 is stopped for so long that the others go on. When it wakes up they are done, and it
   does not go on by itself. */
static void one_sleeps(void)
{
    dp_ctx *ctx = open_recovering(1, me == 0 ? TIMEOUT_MS : 1500 * SLOWER);
    meet(world);
    if (me == 0) {
        raise(SIGSTOP);
        wait_for_failure(ctx);
        CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT,
                    "dp_recover: the others have gone on without this process");
        CHECK(dp_failure(ctx, NULL));
        CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT, "dp_recover: the others have gone on");
        dp_close(ctx);
        return;
    }
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    check_place(ctx, me - 1, 2, 1, 1);
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(who_was_stopped_is_left_behind, 90)
{
    int how;
    start_world(3, one_sleeps);
    finish(pids[1], 1);
    finish(pids[2], 2);
    CHECK_INT(kill(pids[0], SIGCONT), 0);
    CHECK_INT(waitpid(pids[0], &how, 0), pids[0]);
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == EXIT_SUCCESS);
}

/* The first one is stopped. While the second one leads, it wakes up and leads as well: that the
   second one ends the connection does not mean that it has died. All go on, or only the others. */
static void two_lead(void)
{
    dp_ctx *ctx = open_recovering(1, 6000 * SLOWER);
    meet(world);
    if (me == 0)
        raise(SIGSTOP);
    if (me == 2)
        dp_abort(ctx, DP_ERR_USER, "a reason");
    wait_for_failure(ctx);
    dp_status status = dp_recover(ctx);
    if (me > 0 || status == DP_OK) {
        CHECK_OK(status);
        CHECK_INT(info_of(ctx).process_count, me == 0 || info_of(ctx).process_count == 3 ? 3 : 2);
        check_ranks(ctx);
    }
    dp_close(ctx);
}

TEST_SLOW(of_two_that_lead_one_goes_on, 90)
{
    int how;
    start_world(3, two_lead);
    CHECK_INT(waitpid(pids[0], &how, WUNTRACED), pids[0]);
    rest(3600 * SLOWER); /* the others have waited for half of their time, and have some left */
    CHECK_INT(kill(pids[0], SIGCONT), 0);
    CHECK_INT(end_world(), 0);
}

/* Process 0 may open no file more, and begins earlier than the others: it does not take those that
   it cannot connect to for dead. */
static void one_has_no_room(void)
{
    const struct rlimit none = {.rlim_cur = 3, .rlim_max = 3};
    dp_ctx *ctx = open_recovering(1, 3000 * SLOWER);
    meet(world);
    if (me == 0)
        CHECK_INT(setrlimit(RLIMIT_NOFILE, &none), 0);
    if (me == 0 || world == 2)
        dp_abort(ctx, DP_ERR_USER, "a reason");
    wait_for_failure(ctx);
    if (me == 0 && world == 2) {
        for (int i = 0; i < 2; i++) /* nor when it tries again */
            CHECK_ERROR(dp_recover(ctx), DP_ERR_NO_MEMORY,
                        "dp_recover: process 0 has no room for a connection");
    } else if (me == 0) {
        CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT,
                    "the others have gone on without this process");
    } else if (world > 2) {
        rest(500);
        CHECK_OK(dp_recover(ctx));
        check_place(ctx, me - 1, world - 1, 1, 1);
        check_ranks(ctx);
    }
    dp_close(ctx);
    if (me == 0)
        _exit(EXIT_SUCCESS); /* a sanitizer that opens files at the end could not */
}

TEST_SLOW(who_has_no_room_for_connections_does_not_go_on_alone, 60)
{
    for (int count = 2; count <= 3; count++) {
        start_world(count, one_has_no_room);
        CHECK_INT(end_world(), 0);
    }
}

/* ---- several machines ------------------------------------------------------------------------ */

static int far_victims;

static void on_two_machines(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    CHECK_STR(info_of(ctx).coll_backend, "TCP");
    check_sum(ctx);
    meet(world);
    if (me < far_victims)
        kill_me();
    wait_for_failure(ctx);
    if (world == 2) {
        CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT,
                    "dp_recover: process 0 did not come: it may have gone on, so this one cannot");
    } else if (far_victims == 2) { /* who is left is half of them, without the first */
        CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT,
                    "dp_recover: only 2 of 4 processes came, and process 0 did not, among others: "
                    "those may have gone on, so these cannot");
    } else {
        CHECK_OK(dp_recover(ctx));
        CHECK_INT(info_of(ctx).process, me - 1);
        CHECK_INT(info_of(ctx).process_count, 3);
        CHECK_INT(info_of(ctx).machine_count, 2);
        CHECK_STR(info_of(ctx).coll_backend, "TCP");
        CHECK_INT(sum_of(ctx, me), 6);
        check_ranks(ctx);
    }
    dp_close(ctx);
}

TEST_SLOW(between_machines_most_of_them_go_on, 90)
{
    machines = "aabb";
    for (far_victims = 1; far_victims <= 2; far_victims++) {
        port = free_port();
        start_world(4, on_two_machines);
        CHECK_INT(end_world(), far_victims);
    }
    far_victims = 1;
    machines = "ab";
    port = free_port();
    start_world(2, on_two_machines);
    CHECK_INT(end_world(), 1);
}

/* Process 2 is stopped, and process 3 waits for it alone, and hears of the others through it alone:
   that these recover. */
static void one_hears_of_nobody(void)
{
    double given = me;
    dp_ctx *ctx = open_recovering(1, 6000 * SLOWER);
    check_sum(ctx);
    meet(world);
    if (me == 2)
        raise(SIGSTOP);
    rest(200);
    if (me == 0)
        dp_abort(ctx, DP_ERR_USER, "a reason");
    if (me == 3)
        CHECK_ERROR(dp_broadcast_f64(ctx, &given, 1, 2), DP_ERR_REMOTE,
                    " recovers the job, so it has failed there");
    else
        wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(info_of(ctx).process, me - (me > 2));
    CHECK_INT(info_of(ctx).process_count, world - 1);
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(who_waits_for_one_that_is_stopped_hears_that_others_recover, 90)
{
    machines = "abcde";
    port = free_port();
    start_world(5, one_hears_of_nobody);
    for (int p = 0; p < world; p++)
        if (p != 2)
            finish(pids[p], p);
    CHECK_INT(kill(pids[2], SIGKILL), 0);
    CHECK_INT(waitpid(pids[2], NULL, 0), pids[2]);
}

static int stops_at;

/* The last one stops when all have agreed that it goes on, and open the job again. The others go on
   in the same call, and do not use up all their time for it. */
static void one_stops_while_they_recover(void)
{
    dp_ctx *ctx = open_recovering(1, 6000 * SLOWER);
    check_sum(ctx);
    meet(world);
    if (me == 0)
        dp_abort(ctx, DP_ERR_USER, "a reason");
    wait_for_failure(ctx);
    if (me == world - 1)
        refuse((struct refusal){.call = "send", .at = stops_at, .hook = stop_me});
    double begun = now_ms();
    CHECK_OK(dp_recover(ctx));
    CHECK(now_ms() - begun < (6000 + 3000) * SLOWER * test_timeout_scale());
    if (me == world - 1)
        stop_me();
    if (info_of(ctx).process_count == world) {
        wait_for_failure(ctx);
        CHECK_OK(dp_recover(ctx));
    }
    CHECK_INT(info_of(ctx).process_count, world - 1);
    check_ranks(ctx);
    dp_close(ctx);
}

TEST_SLOW(one_that_stops_while_others_meet_it_takes_not_all_their_time, 90)
{
    machines = "abcd";
    for (stops_at = 28; stops_at <= 46; stops_at += 6) {
        int how;
        port = free_port();
        start_world(4, one_stops_while_they_recover);
        for (int p = 0; p < world - 1; p++)
            finish(pids[p], p);
        CHECK_INT(kill(pids[world - 1], SIGKILL), 0);
        CHECK_INT(waitpid(pids[world - 1], &how, 0), pids[world - 1]);
    }
}

/* Of 12 MiB, over and over, until one dies. */
static void sums_of_many(void)
{
    enum { COUNT = 3 << 20 };
    static float data[COUNT];
    const dp_part part = {data, data, NULL};
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    dp_status status = DP_OK;
    while (status == DP_OK) {
        for (size_t i = 0; i < COUNT; i++)
            data[i] = (float)(i % 1000) + (float)me;
        status = dp_all_reduce(ctx, &part, COUNT, DP_F32, DP_OP_SUM);
        atomic_fetch_add(met, 1);
    }
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), "rank 1");
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(info_of(ctx).process_count, world - 1);
    for (size_t i = 0; i < COUNT; i++)
        data[i] = (float)(i % 1000) + (float)me;
    CHECK_OK(dp_all_reduce(ctx, &part, COUNT, DP_F32, DP_OP_SUM));
    for (size_t i = 0; i < COUNT; i++)
        CHECK_F64(data[i], (world - 1) * (double)(i % 1000) + world * (world - 1) / 2 - 1, 0);
    dp_close(ctx);
}

TEST_SLOW(one_dies_in_a_large_sum_between_machines, 90)
{
    static const char *const where[] = {"abc", "aabb", "abab"};
    for (int i = 0; i < 3; i++) {
        port = free_port();
        machines = where[i];
        start_world((int)strlen(machines), sums_of_many);
        wait_for(2 * world);
        rest(3);
        CHECK_INT(kill(pids[1], SIGKILL), 0);
        CHECK_INT(end_world(), 1);
    }
}

/* ---- what stays, and what does not ----------------------------------------------------------- */

enum { WIDE = 600 };

/* Adds up the rows of x, in every element. */
static dp_status adder_forward(dp_call *call)
{
    const dp_tensor *x;
    dp_tensor loss, *kept = dp_scope_alloc(call->scope, sizeof *kept);
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &x));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(x->shape[0]), &loss));
    DP_TRY(dp_fill(call->ctx, &loss, dp_float(0)));
    *kept = *x;
    call->saved = kept;
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)});
    return DP_OK;
}

static atomic_int die_in_backward = -1; /* after so many */

static dp_status add_to(const dp_call *call, size_t param, float sum)
{
    dp_tensor grad = dp_grad_tensor(call, param), more;
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, grad.ndim, grad.shape, &more));
    DP_TRY(dp_fill(call->ctx, &more, dp_float((double)sum)));
    return dp_axpby(call->ctx, 1, &grad, 1, &more, &grad);
}

static dp_status adder_backward(dp_call *call)
{
    const dp_tensor *x = call->saved;
    float rows[16], sum = 0;
    DP_TRY(dp_read(call->ctx, x, rows, (size_t)x->shape[0] * sizeof *rows));
    for (int64_t i = 0; i < x->shape[0]; i++)
        sum += rows[i];
    DP_TRY(add_to(call, 0, sum));
    DP_TRY(dp_grad_ready(call, 0));
    if (atomic_fetch_sub(&die_in_backward, 1) == 0)
        kill_me();
    return add_to(call, 1, sum);
}

static dp_module *adder(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", adder_forward}, {"backward", adder_backward}};
    static const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {WIDE}},
                                             {.name = "v", .ndim = 1, .shape = {1}}};
    const dp_module_config config = {
        .name = "adder", .methods = methods, .method_count = 2, .params = params, .param_count = 2};
    dp_module *module;
    CHECK_OK(dp_module_create(ctx, &config, &module));
    return module;
}

static dp_status adder_step(dp_module *par, dp_optim *optim, dp_scope *scope, float *x, int count)
{
    dp_value log, data = dp_array(scope, x, DP_F32, DP_SHAPE(count));
    return dp_train_step(par, scope, DP_DICT(scope, {"x", data}), optim, &log);
}

static float param_of(dp_module *module, size_t param, size_t element)
{
    float data[WIDE];
    dp_param_info info;
    CHECK_OK(dp_module_param(module, param, &info));
    CHECK_OK(dp_read(dp_module_ctx(module), &info.data, data,
                     (size_t)dp_tensor_count(&info.data) * sizeof *data));
    return data[element];
}

static const dp_distributed_config sums = {.reduction = DP_SUM_RANKS,
                                           .buckets = {.first_bytes = 64, .bytes = 64}};

/* Objects of a program that has lost a process. */
static void objects(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    dp_module *par, *net = adder(ctx);
    dp_optim *optim, *sharded;
    dp_reducer *reducer;
    dp_value kept;
    float x = 1, mine[4] = {1, 2, 3, 4};
    dp_tensor grads;
    dp_scope *outer = dp_scope_begin(ctx), *scope = dp_scope_begin(ctx);
    dp_value four = dp_array(outer, mine, DP_F32, DP_SHAPE(4));
    float *shared = dp_shared_alloc(outer, 4096 * sizeof *shared);
    for (int i = 0; i < 4096; i++)
        shared[i] = (float)i;
    CHECK_OK(dp_tensor_new(outer, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(8), &grads));
    const dp_block block = {DP_F32, 8, &grads.data};
    CHECK_OK(dp_reducer_create(
        ctx, &(dp_reducer_config){.blocks = &block, .block_count = 1, .reduction = DP_SUM_RANKS},
        &reducer));
    CHECK_OK(dp_distributed(net, &sums, &par));
    CHECK_OK(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}}, &optim));
    CHECK_OK(
        dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}, .sharded = true}, &sharded));
    CHECK_OK(adder_step(par, sharded, scope, &x, 1));
    CHECK_F64(param_of(par, 0, WIDE - 1), -3, 0);
    dp_pass *pass;
    dp_value data = DP_DICT(scope, {"x", dp_array(scope, &x, DP_F32, DP_SHAPE(1))}), out;
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), data, NULL, &out, &pass));
    CHECK_OK(dp_reducer_begin(reducer, NULL)); /* a pass is open when the job fails */
    meet(world);
    if (me == 1)
        kill_me();
    wait_for_failure(ctx);
    CHECK_ERROR(dp_scope_check(dp_scope_begin(ctx)), DP_ERR_REMOTE, "the job had failed");
    CHECK_OK(dp_recover(ctx));
    CHECK_STATUS(dp_backward(pass, dp_none(), NULL), DP_ERR_STATE);
    CHECK_ERROR(dp_reducer_begin(reducer, NULL), DP_ERR_STATE, "was made before dp_recover");
    CHECK_OK(dp_reducer_destroy(reducer));
    CHECK_ERROR(dp_optim_step(sharded), DP_ERR_STATE, "dp_optim_step: the state of");
    CHECK_ERROR(dp_optim_save(sharded, scope, &kept), DP_ERR_STATE, "dp_optim_save: the state of");
    CHECK_ERROR(dp_optim_load(sharded, dp_none()), DP_ERR_STATE, "dp_optim_load: the state of");
    dp_optim_destroy(sharded);
    CHECK_OK(adder_step(par, optim, scope, &x, 1));
    CHECK_F64(param_of(par, 0, WIDE - 1), -5, 0);
    CHECK_OK(
        dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}, .sharded = true}, &sharded));
    CHECK_OK(adder_step(par, sharded, scope, &x, 1));
    CHECK_OK(adder_step(par, sharded, scope, &x, 1));
    CHECK_F64(param_of(par, 0, 0), -9, 0);
    CHECK_F64(param_of(par, 1, 0), -9, 0);
    for (int i = 0; i < 4096; i++)
        CHECK_F64(shared[i], i, 0);
    CHECK_F64(((const float *)four.as.t->data)[3], 4, 0);
    CHECK_OK(dp_params_compare(par));
    dp_scope_end(scope);
    dp_scope_end(outer);
    dp_close(ctx);
}

TEST_SLOW(what_stays_and_what_does_not, 60)
{
    start_world(3, objects);
    CHECK_INT(end_world(), 1);
}

/* Pieces of memory that processes share. */
static int count_shared(void)
{
    char line[512];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL)
        count += strstr(line, "/memfd:dp ") != NULL;
    fclose(file);
    return count;
}

/* To this process itself, every other number, so by copies; and nobody asks how it went. */
static void send_and_forget(dp_ctx *ctx)
{
    static float numbers[2][2000];
    const int64_t shape = 1000, stride = 2;
    dp_message both[2];
    for (int i = 0; i < 2; i++) {
        both[i] = (dp_message){.tensor = dp_wrap(numbers[i], DP_F32, 1, &shape),
                               .peer = dp_rank(ctx),
                               .receives = i == 1};
        both[i].tensor.stride[0] = stride;
    }
    CHECK_OK(dp_messages_begin(ctx, both, 2));
}

/* What a step had when the job failed is used again, and so is what a job had. */
static void failing_often(void)
{
    enum { TIMES = 40, STEADY = 10 };
    dp_module *par;
    dp_optim *optim;
    dp_ctx *ctx;
    float x[3] = {1, 2, 3};
    int files = 0, shared = 0;
    int64_t bytes = 0;
    without_gpus();
    use_name();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1,
                                  .recovers = true,
                                  .allocator = {count_alloc, count_free, NULL}},
                     &ctx));
    CHECK_OK(dp_distributed(adder(ctx), &sums, &par));
    CHECK_OK(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}}, &optim));
    for (int i = 0; i < TIMES; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK(dp_scope_alloc(scope, 1 << 20) != NULL);
        CHECK_OK(adder_step(par, optim, scope, x, 3));
        send_and_forget(ctx);
        meet(world);
        if (me == 0)
            dp_abort(ctx, DP_ERR_USER, "again");
        while (adder_step(par, optim, scope, x, 3) == DP_OK)
            continue;
        dp_scope_end(scope);
        CHECK_OK(dp_recover(ctx));
        files = i == STEADY ? open_files() : files;
        bytes = i == STEADY ? bytes_held : bytes;
        shared = i == STEADY ? count_shared() : shared;
    }
    CHECK(open_files() <= files + 2); /* a connection may be pending, which the next look ends */
    CHECK_INT(bytes_held, bytes);
    CHECK_INT(count_shared(), shared);
    dp_close(ctx);
    CHECK_INT(bytes_held, 0);
    CHECK_INT(count_shared(), 0);
}

TEST_SLOW(nothing_is_left_of_a_failure, 60)
{
    start_world(2, failing_often);
    CHECK_INT(end_world(), 0);
}

/* Parameters in memory of the test's, which moves before a failure, and after it. */
static void moving_memory(void)
{
    static float data[3][WIDE], grad[3][WIDE];
    static const dp_method methods[] = {{"forward", adder_forward}, {"backward", adder_backward}};
    const dp_param_config params[] = {
        {.name = "w", .ndim = 1, .shape = {WIDE}, .data = data[0], .grad = grad[0]},
        {.name = "v", .ndim = 1, .shape = {1}}};
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    dp_module *net, *par;
    dp_optim *optim;
    float x = 1;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 2,
                                                  .moves = true},
                              &net));
    CHECK_OK(dp_distributed(net, &sums, &par));
    CHECK_OK(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}}, &optim));
    CHECK_OK(adder_step(par, optim, scope, &x, 1));
    memcpy(data[1], data[0], sizeof data[0]);
    CHECK_OK(dp_params_move(par, 0, data[1], grad[1]));
    for (int i = 0; i < WIDE; i++) /* nobody looks there any more */
        data[0][i] = grad[0][i] = 7;
    CHECK_OK(adder_step(par, optim, scope, &x, 1));
    CHECK_F64(data[1][WIDE - 1], -6, 0);
    meet(world);
    if (me == 1)
        kill_me();
    wait_for_failure(ctx);
    CHECK_STATUS(dp_params_move(par, 0, data[2], NULL), DP_ERR_REMOTE);
    CHECK_OK(dp_recover(ctx));
    CHECK_OK(adder_step(par, optim, scope, &x, 1));
    CHECK_F64(data[1][0], -8, 0);
    memcpy(data[2], data[1], sizeof data[1]);
    CHECK_OK(dp_params_move(par, 0, data[2], grad[2]));
    CHECK_OK(adder_step(par, optim, scope, &x, 1));
    CHECK_F64(data[2][0], -10, 0);
    CHECK_F64(param_of(par, 1, 0), -10, 0);
    for (int i = 0; i < WIDE; i++)
        CHECK(data[0][i] > 6 && grad[0][i] > 6 && data[1][i] < -7 && data[1][i] > -9);
    CHECK_OK(dp_params_compare(par));
    dp_scope_end(scope);
    dp_close(ctx);
}

#if defined(TEST_CUDA)
enum { ON_GPUS = 1 };
#else
enum { ON_GPUS = 0 };
#endif

TEST_SLOW(memory_that_moves_is_found_after_a_failure, 60)
{
    if (ON_GPUS)
        SKIP("memory of the host's is for devices of the host");
    start_world(3, moving_memory);
    CHECK_INT(end_world(), 1);
}

/* ---- a value of the process that is furthest ------------------------------------------------- */

static void share(void)
{
    static float big[3 << 20];
    dp_ctx *ctx = open_recovering(devices, TIMEOUT_MS);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out = dp_none(), again = dp_none();
    for (size_t i = 0; i < sizeof big / sizeof big[0]; i++)
        big[i] = (float)(i % 1000) + (float)me;
    dp_value value = DP_DICT(scope, {"big", dp_array(scope, big, DP_F32, DP_SHAPE(3 << 20))},
                             {"none", dp_array(scope, big, DP_F32, DP_SHAPE(0))},
                             {"who", dp_int(me)},
                             {"list", DP_LIST_OF(scope, dp_string(scope, "a"))});
    CHECK_OK(dp_checkpoint_share(ctx, scope, me == 0 ? 7 : 8, me == 0 ? dp_none() : value, &out));
    CHECK_INT(dp_get(out, "who").as.i, 1);
    CHECK_STR(dp_text(dp_at(dp_get(out, "list"), 0)), "a");
    const dp_tensor *tensor = dp_get(out, "big").as.t;
    CHECK_INT(tensor->shape[0], 3 << 20);
    for (size_t i = 0; i < sizeof big / sizeof big[0]; i++)
        CHECK_F64(((const float *)tensor->data)[i], (float)(i % 1000) + 1, 0);
    CHECK_OK(dp_checkpoint_share(ctx, scope, 3, value, &again)); /* each has its own */
    CHECK_INT(dp_get(again, "who").as.i, me);
    CHECK(((const float *)dp_get(again, "big").as.t->data) != big);
    CHECK_OK(dp_checkpoint_share(ctx, scope, me == 2 ? 0 : -1, me == 2 ? value : dp_none(), &out));
    CHECK_INT(dp_get(out, "who").as.i, 2);
    CHECK_ERROR(dp_checkpoint_share(ctx, scope, -1, value, &out), DP_ERR_INVALID,
                "dp_checkpoint_share: no process has a value: progress is -1 in all");
    CHECK_ERROR(dp_checkpoint_share(ctx, scope, -2, value, &out), DP_ERR_INVALID,
                "dp_checkpoint_share: progress is -2");
    CHECK_ERROR(dp_checkpoint_share(ctx, NULL, 0, value, &out), DP_ERR_INVALID,
                "dp_checkpoint_share: scope is NULL");
    CHECK_ERROR(dp_checkpoint_share(ctx, scope, 0, value, NULL), DP_ERR_INVALID,
                "dp_checkpoint_share: out is NULL");
    CHECK_STATUS(dp_checkpoint_share(ctx, scope, me, dp_int(3), &out),
                 me == 2 ? DP_ERR_INVALID : DP_ERR_INVALID);
    CHECK_INT(dp_get(out, "who").as.i, 2);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST_SLOW(what_the_furthest_has_becomes_that_of_all, 60)
{
    for (devices = 1; devices <= 2; devices++) {
        start_world(3, share);
        CHECK_INT(end_world(), 0);
    }
}

/* ---- what is kept in files, and sums in fewer bits ------------------------------------------- */

static void others_save(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_saver *saver;
    dp_value saved;
    const dp_value first = DP_DICT(scope, {"who", dp_int(me)}, {"save", dp_int(1)});
    const dp_value second = DP_DICT(scope, {"who", dp_int(me)}, {"save", dp_int(2)});
    CHECK_OK(dp_saver_create(ctx, &(dp_saver_config){.path = "step-*.st", .last = 5}, &saver));
    CHECK_OK(dp_saver_save(saver, 10, first, dp_none()));
    CHECK_OK(dp_saver_wait(saver));
    meet(world);
    if (me == 0)
        kill_me();
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    CHECK_STATUS(dp_saver_save(saver, 9, second, dp_none()), DP_ERR_INVALID);
    CHECK_OK(dp_saver_save(saver, 11, second, dp_none()));
    CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_LAST, &saved));
    CHECK_INT(dp_get(saved, "who").as.i, 1);
    CHECK_INT(dp_get(saved, "save").as.i, 2);
    CHECK_OK(dp_saver_load(saver, scope, 10, &saved));
    CHECK_INT(dp_get(saved, "who").as.i, 0);
    dp_saver_destroy(saver);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST_SLOW(another_process_goes_on_saving, 60)
{
    enter_folder();
    start_world(3, others_save);
    CHECK_INT(end_world(), 1);
}

/* What process 0 had begun when it asked the others is dropped, and told once. */
static void one_dies_before_a_save(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    dp_scope *scope = dp_scope_begin(ctx);
    const dp_value value = DP_DICT(scope, {"n", dp_int(1)});
    dp_saver *saver;
    dp_value saved;
    CHECK_OK(dp_saver_create(ctx, &(dp_saver_config){.path = "step-*"}, &saver));
    meet(world);
    if (me == 2)
        kill_me();
    while (dp_saver_save(saver, 5, value, dp_none()) == DP_OK) /* it may die after its answer */
        continue;
    CHECK(dp_failure(ctx, NULL));
    CHECK_OK(dp_recover(ctx));
    CHECK_OK(dp_saver_wait(saver));
    CHECK_INT(count_names(".", "step-5.part"), 0);
    CHECK_OK(dp_saver_save(saver, 6, value, dp_none()));
    CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_LAST, &saved));
    CHECK_INT(count_names(".", ""), 1);
    dp_close(ctx);
}

TEST_SLOW(save_without_all_answers_leaves_nothing, 60)
{
    enter_folder();
    start_world(3, one_dies_before_a_save);
    CHECK_INT(end_world(), 1);
}

static atomic_bool waits;

static void rest_until_waited_for(void)
{
    while (!atomic_load(&waits))
        rest(1);
    rest(50);
}

/* Process 0 still writes when it comes back, and says so every 64 MiB. It comes to its wait in time
   for that in one try of many. */
static void write_all_the_while(void)
{
    static double row[1 << 17];
    static char lines[4000];
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor rows = dp_wrap(row, DP_F64, DP_SHAPE(67, 1 << 17));
    dp_saver *saver;
    char want[40];
    int before = 0;
    rows.stride[0] = 0;
    CHECK_OK(dp_saver_create(ctx, &(dp_saver_config){.path = "long"}, &saver));
    if (me == 0)
        refuse((struct refusal){.call = "fsync", .at = 1, .hook = rest_until_waited_for});
    CHECK_OK(dp_saver_save(saver, 1, DP_DICT(scope, {"rows", dp_of(scope, &rows)}), dp_none()));
    meet(world);
    if (me == 2)
        kill_me();
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(sum_of(ctx, 1), 2);
    dp_recent_collectives(ctx, lines, sizeof lines);
    CHECK_INT(sscanf(lines, "collective %d", &before), 1);
    atomic_store(&waits, true);
    CHECK_OK(dp_saver_wait(saver));
    dp_recent_collectives(ctx, lines, sizeof lines);
    snprintf(want, sizeof want, "collective %d, broadcast of ", before + 2);
    if (me == 1 && strstr(lines, want) != NULL)
        put_file("told", "", 0);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST_SLOW(others_hear_of_a_write_that_goes_on, 90)
{
    enter_folder();
    for (int i = 0; i < 50 && access("told", F_OK) != 0; i++) {
        start_world(3, write_all_the_while);
        CHECK_INT(end_world(), 1);
    }
    CHECK(access("told", F_OK) == 0);
}

#if !defined(TEST_CUDA)
/* Process 0 is stopped at a step of a save, and the others go on without it, save, and end. */
typedef enum how_to_save {
    AS_CHECKPOINT,
    BY_A_SAVER,
    BY_A_SAVER_OF_MANY,
    WAYS_TO_SAVE
} how_to_save;

static const struct step_of_a_save {
    const char *call; /* "": before the first one */
    int at;
    bool locked, asked, late; /* the part is; a saver has asked the others; dp_checkpoint_save, too,
                                 and the names of other files have been looked at */
} steps_of_a_save[] = {
    {"", 0, false, false, false},         {"lstat", 1, false, false, false},
    {"stat", 1, false, false, false},     {"open", 1, false, false, false},
    {"flock", 1, false, false, false},    {"lstat", 2, true, false, false},
    {"ftruncate", 1, true, false, false}, {"write", 1, true, true, false},
    {"fsync", 1, true, true, false},      {"lstat", 3, true, true, true},
    {"rename", 1, true, true, true},
};

static const struct step_of_a_save *save_step;
static how_to_save way_to_save;
static bool saved_before, far_apart; /* far_apart: process 0 is on another machine */

/* {"n": n}, until it is on disk where `wait` is set. Where there are files of several numbers,
   the score is another one in each process. */
static dp_status save_number(dp_ctx *ctx, dp_saver *saver, int n, bool wait)
{
    dp_scope *scope = dp_scope_begin(ctx);
    const dp_value value =
        DP_DICT(scope, {"n", dp_int(n)}, {"recoveries", dp_int(info_of(ctx).recoveries)});
    const dp_value log = DP_DICT(scope, {"loss", dp_int(info_of(ctx).recoveries)});
    dp_status status = way_to_save == AS_CHECKPOINT ? dp_checkpoint_save(ctx, "file", value)
                                                    : dp_saver_save(saver, n, value, log);
    if (status == DP_OK && wait && saver != NULL)
        status = dp_saver_wait(saver);
    dp_scope_end(scope);
    return status;
}

static void one_sleeps_in_a_save(void)
{
    dp_ctx *ctx = open_recovering(1, me == 0 ? TIMEOUT_MS : (int)(2000 * test_timeout_scale()));
    dp_saver *saver = NULL;
    const bool many = way_to_save == BY_A_SAVER_OF_MANY;
    const dp_saver_config config = {
        .path = many ? "file-*" : "file", .last = 1, .best_by = many ? "loss" : NULL};
    if (way_to_save != AS_CHECKPOINT)
        CHECK_OK(dp_saver_create(ctx, &config, &saver));
    if (saved_before)
        CHECK_OK(save_number(ctx, saver, 1, true));
    meet(world);
    if (me == 0 && save_step->at > 0)
        refuse((struct refusal){.call = save_step->call, .at = save_step->at, .hook = stop_me});
    else if (me == 0)
        stop_me();
    if (save_number(ctx, saver, 2, false) == DP_OK) /* a thread is stopped, not the caller */
        wait_for_failure(ctx);
    CHECK(dp_failure(ctx, NULL));
    if (me > 0) {
        CHECK_OK(dp_recover(ctx));
        bool held = save_step->locked && !many;
        CHECK_STATUS(save_number(ctx, saver, 2, true), held ? DP_ERR_FILE : DP_OK);
        CHECK(!held || strstr(dp_last_error(), "another process, or thread, is writing") != NULL);
    }
    dp_close(ctx);
}

static void check_saved(dp_ctx *ctx, const char *path, int n, int recoveries)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value saved;
    CHECK_OK(dp_file_read(ctx, scope, path, &saved));
    CHECK_INT(dp_get(saved, "n").as.i, n);
    CHECK_INT(dp_get(saved, "recoveries").as.i, recoveries);
    dp_scope_end(scope);
}

/* The file of those that have gone on is there. Where they could not write theirs, there is the one
   of before, or that of process 0, if it had asked before it was stopped. */
static void check_newest_stays(void)
{
    dp_ctx *ctx;
    bool asked = way_to_save == AS_CHECKPOINT ? save_step->late : save_step->asked;
    bool one = way_to_save != BY_A_SAVER_OF_MANY;
    CHECK_OK(dp_open(&(dp_config){.local_only = true}, &ctx));
    if (!one) {
        check_saved(ctx, "file-2-loss=1", 2, 1);
        CHECK_INT(access("file-2-loss=0", F_OK) == 0, save_step->late);
        CHECK_INT(count_names(".", ""), 1 + saved_before + save_step->late);
    } else if (!save_step->locked || asked) {
        check_saved(ctx, "file", 2, !save_step->locked);
        CHECK_INT(count_names(".", ""), 1);
    } else {
        if (saved_before)
            check_saved(ctx, "file", 1, 0);
        CHECK_INT(count_names(".", ""), saved_before);
    }
    dp_close(ctx);
}

static void sleep_in_a_save(void)
{
    enter_folder();
    machines = far_apart ? "abb" : NULL;
    port = free_port();
    start_world(3, one_sleeps_in_a_save);
    finish(pids[1], 1);
    finish(pids[2], 2);
    CHECK_INT(kill(pids[0], SIGCONT), 0);
    finish(pids[0], 0);
    check_newest_stays();
}

TEST_SLOW(process_left_behind_replaces_no_newer_file, 120)
{
    enum { STEPS = sizeof steps_of_a_save / sizeof steps_of_a_save[0], TIMES = 3 };
    pid_t trials[STEPS];
    for (int way = 0; way < TIMES * WAYS_TO_SAVE; way++) {
        way_to_save = (how_to_save)(way / TIMES);
        saved_before = way % TIMES > 0;
        far_apart = way % TIMES > 1;
        for (int i = 0; i < STEPS; i++) {
            save_step = &steps_of_a_save[i];
            trials[i] = start(i, sleep_in_a_save);
        }
        for (int i = 0; i < STEPS; i++)
            finish(trials[i], i);
    }
}

/* Sums of what is exact in 8 bits; and local steps, whose sums are a job's. */
static void in_fewer_bits(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par, *plain = adder(ctx);
    dp_compressor *small;
    dp_local *local, *again;
    dp_optim *optim;
    dp_value kept;
    float x = 1;
    CHECK_OK(dp_compressor_create(ctx, &(dp_compressor_config){.bits = 8}, &small));
    CHECK_OK(dp_distributed(
        adder(ctx),
        &(dp_distributed_config){.reduction = DP_SUM_RANKS,
                                 .buckets = {.hook = dp_compress, .hook_user = small}},
        &par));
    CHECK_OK(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}}, &optim));
    CHECK_OK(dp_local_create(plain, &(dp_local_config){.every = 2, .fragments = 2}, &local));
    CHECK_OK(adder_step(par, optim, scope, &x, 1));
    CHECK_F64(param_of(par, 0, WIDE - 1), -3, 1e-4);
    CHECK_OK(dp_local_step(local)); /* a sum is under way */
    meet(world);
    if (me == 2)
        kill_me();
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    for (int i = 1; i <= 3; i++) {
        CHECK_OK(adder_step(par, optim, scope, &x, 1));
        CHECK_F64(param_of(par, 0, WIDE - 1), -3 - 2 * i, 1e-4);
    }
    CHECK_ERROR(dp_local_step(local), DP_ERR_STATE,
                "dp_local_step: 'adder' began local steps before dp_recover");
    CHECK_OK(dp_local_save(local, scope, &kept));
    dp_local_destroy(local);
    CHECK_OK(dp_local_create(plain, &(dp_local_config){.every = 2, .fragments = 2}, &again));
    CHECK_OK(dp_local_load(again, kept));
    for (int i = 0; i < 4; i++)
        CHECK_OK(dp_local_step(again));
    CHECK_OK(dp_local_sync(again));
    dp_local_destroy(again);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST_SLOW(sums_in_fewer_bits_and_local_steps, 60)
{
    start_world(3, in_fewer_bits);
    CHECK_INT(end_world(), 1);
}
#endif

/* ---- training -------------------------------------------------------------------------------- */

enum { SAMPLES = 1000, EPOCHS = 2 };

typedef struct trainer {
    dp_ctx *ctx;
    dp_module *par;
    dp_optim *optim;
    dp_loader *loader;
    int64_t done; /* samples, of all; -1: this process has come back and has nothing yet */
} trainer;

static bool admits; /* all, before each step */

static int64_t number_of(int64_t sample)
{
    return sample % 16 + 1;
}

static dp_status read_number(dp_sample *sample, void *user)
{
    (void)user;
    *(float *)sample->rows[0] = (float)number_of(sample->index) * (shards > 0 ? 0.1F : 1);
    return DP_OK;
}

static dp_status trainer_create(trainer *t, dp_ctx *ctx)
{
    static const dp_field fields[] = {{"x", DP_F32, 0, {0}}};
    const dp_loader_config batches = {
        .sampler = {.count = SAMPLES, .sampling = DP_SAMPLE_EXACT, .seed = 5},
        .batch = shards > 0 ? 4 : 3, /* each shard has as many */
        .together = true,
        .read = read_number,
        .fields = fields,
        .field_count = 1,
        .worker_count = 1};
    *t = (trainer){.ctx = ctx, .done = comes_back ? -1 : 0};
    DP_TRY(dp_distributed(adder(ctx), &sums, &t->par));
    DP_TRY(dp_optim_create(t->par, &(dp_optim_config){.hyper = {.lr = 1}}, &t->optim));
    DP_TRY(dp_loader_create(ctx, &batches, &t->loader));
    atomic_fetch_add(met, 1);
    return DP_OK;
}

static dp_status trainer_step(trainer *t, dp_scope *scope)
{
    dp_batch batch;
    dp_value log;
    DP_TRY(dp_loader_next(t->loader, scope, &batch));
    int64_t count = batch.count;
    DP_TRY(dp_all_reduce_i64(t->ctx, &count, 1, DP_OP_SUM));
    DP_TRY(dp_train_step(t->par, scope, batch.value, t->optim, &log));
    t->done += count;
    return t->done % SAMPLES > 0 ? DP_OK : dp_loader_resume(t->loader, t->done / SAMPLES, 0);
}

/* What the furthest has. */
static dp_status trainer_share(trainer *t, dp_scope *scope)
{
    dp_value model, state, kept;
    DP_TRY(dp_module_save(t->par, scope, &model));
    DP_TRY(dp_optim_save(t->optim, scope, &state));
    dp_value own = DP_DICT(scope, {"model", model}, {"optim", state}, {"done", dp_int(t->done)});
    DP_TRY(dp_checkpoint_share(t->ctx, scope, t->done, own, &kept));
    DP_TRY(dp_module_load(t->par, dp_get(kept, "model"), NULL));
    DP_TRY(dp_optim_load(t->optim, dp_get(kept, "optim")));
    t->done = dp_get(kept, "done").as.i;
    DP_TRY(dp_loader_resume(t->loader, t->done / SAMPLES, t->done % SAMPLES));
    return dp_params_compare(t->par);
}

static float (*ends)[WIDE]; /* with shards: what each has in the end, in memory that all see */

/* Each sample counts once in an epoch: every element is minus their sum. */
static void trainer_check(trainer *t, int64_t epochs)
{
    dp_param_info param;
    int64_t all = 0;
    if (shards > 0) {
        CHECK_OK(dp_module_param(t->par, 0, &param));
        CHECK_OK(dp_read(t->ctx, &param.data, ends[info_of(t->ctx).process], sizeof *ends));
        return;
    }
    for (int64_t i = 0; i < SAMPLES; i++)
        all += epochs * number_of(i);
    CHECK_INT(t->done, epochs * SAMPLES);
    CHECK_F64(param_of(t->par, 0, 0), -all, 0);
    CHECK_F64(param_of(t->par, 0, WIDE - 1), -all, 0);
    CHECK_F64(param_of(t->par, 1, 0), -all, 0);
}

/* Who has died comes again: before the others are through, however long its start takes. */
static dp_status let_in(const trainer *t, bool *changed)
{
    bool alone = true;
    while (alone) {
        dp_info info;
        DP_TRY(dp_admit(t->ctx, changed));
        CHECK_OK(dp_info_get(t->ctx, &info));
        alone = !*changed && info.process_count < world && t->done >= EPOCHS * SAMPLES * 3 / 4;
        rest(alone);
    }
    return DP_OK;
}

/* changed: others have come or gone since the last step. */
static dp_status train_once(trainer *t, dp_scope *scope, bool changed)
{
    if (admits && !changed)
        DP_TRY(let_in(t, &changed));
    if (changed)
        DP_TRY(trainer_share(t, scope));
    return trainer_step(t, scope);
}

static void train(void)
{
    trainer t;
    int tries = 0;
    bool changed = comes_back;
    CHECK_OK(trainer_create(&t, open_recovering(1, TIMEOUT_MS)));
    while (t.done < EPOCHS * SAMPLES) {
        dp_scope *scope = dp_scope_begin(t.ctx);
        dp_status status = train_once(&t, scope, changed);
        dp_scope_end(scope);
        changed = status != DP_OK;
        while (status != DP_OK) {
            if (++tries == 50 || !dp_failure(t.ctx, NULL))
                CHECK_OK(status);
            status = dp_recover(t.ctx);
        }
    }
    trainer_check(&t, EPOCHS);
    dp_close(t.ctx);
    if (!admits)
        return;
    set("DP_SECRET", "of the next one"); /* which who has come back opens like all */
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &t.ctx));
    CHECK_INT(sum_of(t.ctx, me), world * (world - 1) / 2);
    dp_close(t.ctx);
}

static int victims[MOST]; /* -1, or after how many backwards */

static void train_and_die(void)
{
    die_in_backward = victims[me];
    train();
}

TEST_SLOW(each_sample_counts_once, 90)
{
    for (int p = 0; p < MOST; p++)
        victims[p] = -1;
    start_world(3, train_and_die);
    CHECK_INT(end_world(), 0);
    victims[0] = 111; /* with the last sample of an epoch, when the others have had theirs */
    start_world(3, train_and_die);
    CHECK_INT(end_world(), 1);
    victims[0] = 7;
    victims[2] = 40;
    start_world(4, train_and_die);
    CHECK_INT(end_world(), 2);
}

/* ---- a trainer whose module has no parameters ------------------------------------------------ */

enum { OWN_STEPS = 12 };

/* Its numbers are in `own`: `done` steps, each of which has added the sum of all rows. */
typedef struct owner {
    dp_ctx *ctx;
    dp_module *par;
    int64_t done, total, found;
} owner;

static dp_status find_rows(dp_call *call)
{
    owner *own = (owner *)(uintptr_t)call->state;
    const dp_tensor *x;
    int64_t rows[8];
    DP_TRY(dp_call_tensor(call, "x", DP_I64, 1, &x));
    DP_TRY(dp_read(call->ctx, x, rows, (size_t)x->shape[0] * sizeof *rows));
    for (int64_t i = 0; i < x->shape[0]; i++)
        own->found += rows[i];
    if (atomic_fetch_sub(&die_in_backward, 1) == 0)
        kill_me();
    call->out = dp_float(1);
    return DP_OK;
}

static dp_status owner_step(owner *own, dp_scope *scope)
{
    static const int64_t all[] = {1, 2, 3, 4, 5, 6, 7};
    int64_t first, count;
    dp_value log;
    own->found = 0;
    DP_TRY(dp_my_rows(own->ctx, 7, &first, &count));
    dp_value rows = dp_array(scope, all + first, DP_I64, DP_SHAPE(count));
    DP_TRY(dp_train_step(own->par, scope, DP_DICT(scope, {"x", rows}), NULL, &log));
    DP_TRY(dp_all_reduce_i64(own->ctx, &own->found, 1, DP_OP_SUM));
    own->total += own->found;
    own->done++;
    return DP_OK;
}

static dp_status owner_share(owner *own, dp_scope *scope)
{
    dp_value kept,
        mine = DP_DICT(scope, {"done", dp_int(own->done)}, {"total", dp_int(own->total)});
    DP_TRY(dp_checkpoint_share(own->ctx, scope, own->done, mine, &kept));
    own->done = dp_get(kept, "done").as.i;
    own->total = dp_get(kept, "total").as.i;
    return dp_params_compare(own->par); /* there is nothing to compare */
}

static void train_own_numbers(void)
{
    static const dp_method methods[] = {{"forward", find_rows}};
    owner own = {.ctx = open_recovering(1, TIMEOUT_MS)};
    dp_module *net = NULL;
    dp_status status = DP_OK;
    die_in_backward = victims[me];
    CHECK_OK(dp_module_create(
        own.ctx, &(dp_module_config){.methods = methods, .method_count = 1, .state = &own}, &net));
    CHECK_OK(dp_everywhere(net, &own.par));
    for (bool changed = false; own.done < OWN_STEPS; changed = status != DP_OK) {
        dp_scope *scope = dp_scope_begin(own.ctx);
        status = changed ? owner_share(&own, scope) : DP_OK;
        if (status == DP_OK)
            status = owner_step(&own, scope);
        dp_scope_end(scope);
        CHECK(status == DP_OK || dp_failure(own.ctx, NULL));
        if (status != DP_OK)
            CHECK_OK(dp_recover(own.ctx));
    }
    CHECK_INT(own.total, OWN_STEPS * 28);
    dp_close(own.ctx);
}

TEST_SLOW(trainer_without_parameters_goes_on, 60)
{
    for (int p = 0; p < MOST; p++)
        victims[p] = -1;
    victims[0] = 4;
    start_world(3, train_own_numbers);
    CHECK_INT(end_world(), 1);
    victims[1] = 7;
    start_world(3, train_own_numbers);
    CHECK_INT(end_world(), 2);
}

/* ---- who comes back -------------------------------------------------------------------------- */

static void come_back(void)
{
    come_again();
    die_in_backward = -1;
    train();
}

static void one_comes_back(int count, int who, int after)
{
    int how;
    admits = true;
    for (int p = 0; p < MOST; p++)
        victims[p] = p == who ? after : -1;
    start_world(count, train_and_die);
    CHECK_INT(waitpid(pids[who], &how, 0), pids[who]);
    CHECK(WIFSIGNALED(how));
    pids[who] = start(who, come_back);
    CHECK_INT(end_world(), 0);
    admits = false;
}

#if !defined(TEST_CUDA)
TEST_SLOW(who_was_started_again_comes_back_on_several_machines, 90)
{
    for (int who = 0; who < 3; who++) {
        machines = who == 1 ? "abb" : "aba";
        port = free_port();
        one_comes_back(3, who, 5);
    }
}
#endif

TEST_SLOW(who_was_started_again_comes_back, 90)
{
    for (int who = 0; who < 3; who++)
        one_comes_back(3, who, 5);
    one_comes_back(2, 0, 20);
    one_comes_back(2, 1, 1);
}

/* Sums of what is not exact, in one order, whoever adds. */
TEST_SLOW(with_shards_the_bits_are_the_same, 120)
{
    float want[WIDE];
    ends = memory_of_all(4 * sizeof *ends);
    shards = 4;
    for (int run = 0; run < 6; run++) {
        const int counts[] = {2, 2, 2, 4, 4, 4}, who[] = {-1, 0, 1, -1, 0, 2};
        memset(ends, 0, 4 * sizeof *ends);
        if (who[run] < 0) {
            for (int p = 0; p < MOST; p++)
                victims[p] = -1;
            start_world(counts[run], train_and_die);
            CHECK_INT(end_world(), 0);
            memcpy(want, ends[0], sizeof want);
            CHECK_F64(want[0], -1693.6, 0.01);
        } else {
            one_comes_back(counts[run], who[run], 20);
        }
        for (int p = 0; p < counts[run]; p++)
            CHECK_BYTES(ends[p], want, sizeof want);
    }
}

/* Two contexts have one door. */
static void twice(void)
{
    dp_ctx *first = open_recovering(1, TIMEOUT_MS), *second = open_recovering(1, TIMEOUT_MS);
    meet(world);
    if (me == 0)
        kill_me();
    wait_for_failure(second);
    CHECK_OK(dp_recover(second));
    CHECK_INT(sum_of(second, me), 3);
    wait_for_failure(first);
    CHECK_OK(dp_recover(first));
    CHECK_INT(sum_of(first, me), 3);
    dp_close(first);
    dp_close(second);
}

TEST_SLOW(two_contexts_of_one_job_go_on, 60)
{
    start_world(3, twice);
    CHECK_INT(end_world(), 1);
}

/* Nobody comes in the place of one that has died; then somebody does. */
static void whole_or_not(void)
{
    dp_ctx *ctx = open_recovering(1, 3000 * SLOWER);
    bool came = true;
    CHECK_OK(dp_admit(ctx, &came));
    CHECK(!came);
    atomic_fetch_add(met, 1);
    wait_for(world);
    if (me == 1)
        kill_me();
    wait_for_failure(ctx);
    dp_status status = dp_recover(ctx);
    CHECK_ERROR(status, DP_ERR_TIMEOUT,
                "dp_recover: only 3 of 4 processes are here: with shards each has to be replaced "
                "when it has died (DP_REJOIN)");
    atomic_fetch_add(met, 1);
    while (status == DP_ERR_TIMEOUT)
        status = dp_recover(ctx);
    CHECK_OK(status);
    CHECK_INT(info_of(ctx).process_count, 4);
    CHECK_INT(sum_of(ctx, me), 6);
    dp_close(ctx);
}

static void replace(void)
{
    wait_for(7);
    set("DP_REJOIN", "1");
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    CHECK_INT(info_of(ctx).process, 1);
    CHECK_INT(sum_of(ctx, me), 6);
    dp_close(ctx);
}

TEST_SLOW(with_shards_all_wait_for_the_one_that_is_missing, 90)
{
    shards = 4;
    start_world(4, whole_or_not);
    pid_t other = start(1, replace);
    CHECK_INT(end_world(), 1);
    finish(other, 1);
}

/* One has died, another one is stopped, and one waits at the door: these are too few, whichever of
   the two places it would get. Then the one that was stopped wakes up. */
static dp_status until_whole(dp_ctx *ctx)
{
    dp_status status = DP_ERR_TIMEOUT;
    while (dp_status_class(status) == DP_CLASS_JOB)
        status = dp_recover(ctx);
    return status;
}

static void one_sleeps_and_one_dies(void)
{
    dp_ctx *ctx = open_recovering(1, 3000 * SLOWER);
    meet(world);
    if (me == 2)
        raise(SIGSTOP);
    rest(500); /* the one that waits is there by then */
    if (me == 3)
        kill_me();
    wait_for_failure(ctx);
    if (me < 2)
        CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT, "dp_recover: only ");
    atomic_fetch_add(met, 1);
    CHECK_OK(until_whole(ctx));
    CHECK_INT(info_of(ctx).process, me);
    CHECK_INT(sum_of(ctx, me), 6);
    dp_close(ctx);
}

static void wait_for_whom(void)
{
    set("DP_REJOIN", "1");
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    CHECK_INT(info_of(ctx).process, 3);
    CHECK_INT(sum_of(ctx, 3), 6);
    dp_close(ctx);
}

TEST_SLOW(with_shards_who_waits_takes_no_place_before_all_are_there, 90)
{
    int how;
    shards = 4;
    start_world(4, one_sleeps_and_one_dies);
    pid_t other = start(3, wait_for_whom);
    CHECK_INT(waitpid(pids[2], &how, WUNTRACED), pids[2]);
    CHECK(WIFSTOPPED(how));
    wait_for(6);
    CHECK_INT(kill(pids[2], SIGCONT), 0);
    finish(other, 3);
    CHECK_INT(end_world(), 1);
}

/* The first that is left is at the door until one comes in the place of process 0, which leads when
   the next one dies. */
static void two_are_replaced(dp_ctx *ctx, int since)
{
    static const int victims_of[] = {0, 2};
    for (int i = since; i < 2; i++) {
        CHECK_INT(sum_of(ctx, 1), 4);
        atomic_fetch_add(met, 1);
        wait_for(4 * (i + 1));
        if (info_of(ctx).process == victims_of[i])
            kill_me();
        wait_for_failure(ctx);
        CHECK_OK(dp_recover(ctx));
    }
    CHECK_INT(sum_of(ctx, info_of(ctx).process), 6);
    dp_close(ctx);
}

static void all_but_two(void)
{
    two_are_replaced(open_recovering(1, TIMEOUT_MS), 0);
}

static void replace_one(void)
{
    set("DP_REJOIN", "1");
    two_are_replaced(open_recovering(1, TIMEOUT_MS), me == 0 ? 1 : 2);
}

TEST_SLOW(with_shards_one_after_another_is_replaced, 90)
{
    int how;
    shards = 4;
    start_world(4, all_but_two);
    for (int p = 0; p <= 2; p += 2) {
        CHECK_INT(waitpid(pids[p], &how, 0), pids[p]);
        CHECK(WIFSIGNALED(how));
        pids[p] = start(p, replace_one);
    }
    CHECK_INT(end_world(), 0);
}

/* Where all places are taken one more waits, and has the first one that is free. Those that look
   for who has died do not find it there. */
static void come_too_early(void)
{
    set("DP_REJOIN", "1");
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    CHECK_INT(info_of(ctx).process, 2);
    CHECK_INT(sum_of(ctx, 2), 3);
    dp_close(ctx);
}

static void one_waits_for_a_place(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    meet(world);
    for (int i = 0; i < 30; i++) { /* by then it is there */
        bool came = true;
        CHECK_OK(dp_admit(ctx, &came));
        CHECK(!came);
        rest(10);
    }
    meet(world);
    if (me == world - 1)
        kill_me();
    wait_for_failure(ctx);
    double begun = now_ms();
    CHECK_OK(dp_recover(ctx));
    CHECK(now_ms() - begun < TIMEOUT_MS / 3); /* nobody is waited for */
    if (info_of(ctx).process_count < world) {
        bool came = false; /* it was slow */
        while (!came)
            CHECK_OK(dp_admit(ctx, &came));
    }
    CHECK_INT(info_of(ctx).process, me);
    CHECK_INT(sum_of(ctx, me), 3);
    dp_close(ctx);
}

TEST_SLOW(who_comes_before_there_is_a_place_waits, 60)
{
    start_world(3, one_waits_for_a_place);
    finish(start(2, come_too_early), 2);
    CHECK_INT(end_world(), 1);
}

/* Process 2 is stopped, and another one comes in its place. When it wakes up it looks for the
   others just when they look for each other again. */
static void three_of_four(dp_ctx *ctx)
{
    CHECK_INT(sum_of(ctx, 1), 3);
    atomic_fetch_add(met, 1);
    wait_for(7);
    if (info_of(ctx).process == 1)
        dp_abort(ctx, DP_ERR_USER, "again");
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(info_of(ctx).process_count, 3);
    CHECK_INT(sum_of(ctx, 1), 3);
    dp_close(ctx);
}

static void one_sleeps_and_is_replaced(void)
{
    dp_ctx *ctx = open_recovering(1, me == 2 ? TIMEOUT_MS : 3000 * SLOWER);
    meet(world);
    if (me == 2) {
        raise(SIGSTOP);
        wait_for_failure(ctx);
        CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT, "dp_recover: the others have gone on");
        dp_close(ctx);
        return;
    }
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    for (bool came = false; !came; rest(1))
        CHECK_OK(dp_admit(ctx, &came));
    three_of_four(ctx);
}

static void take_its_place(void)
{
    set("DP_REJOIN", "1");
    three_of_four(open_recovering(1, TIMEOUT_MS));
}

TEST_SLOW(who_was_stopped_and_replaced_disturbs_nobody, 90)
{
    start_world(3, one_sleeps_and_is_replaced);
    pid_t other = start(2, take_its_place);
    wait_for(6);
    CHECK_INT(kill(pids[2], SIGCONT), 0);
    rest(500);
    atomic_fetch_add(met, 1);
    finish(other, 2);
    CHECK_INT(end_world(), 0);
}

static int locks_held(void)
{
    int count = 0;
    for (int fd = 0; fd < 200; fd++) {
        char path[64], line[256];
        snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
        FILE *file = fopen(path, "r");
        while (file != NULL && fgets(line, sizeof line, file) != NULL)
            count += strncmp(line, "lock:", 5) == 0;
        if (file != NULL)
            fclose(file);
    }
    return count;
}

/* Process 1 opens the job anew before it closes the context with which it was left behind. */
static void one_opens_again(void)
{
    bool came = false;
    dp_ctx *ctx = open_recovering(1, 6000), *again;
    int locks = locks_held();
    meet(world);
    if (me == 1)
        raise(SIGSTOP);
    if (me == 0)
        dp_abort(ctx, DP_ERR_USER, "a reason");
    wait_for_failure(ctx);
    if (me == 0) {
        CHECK_OK(dp_recover(ctx));
        atomic_fetch_add(met, 1);
        while (!came)
            CHECK_OK(dp_admit(ctx, &came));
        again = ctx;
    } else {
        CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT, "dp_recover: the others have gone on");
        set("DP_REJOIN", "1");
        again = open_recovering(1, TIMEOUT_MS);
        dp_close(ctx);
        CHECK_INT(locks_held(), locks);
    }
    CHECK_INT(sum_of(again, me), 1);
    dp_close(again);
}

TEST_SLOW(who_opens_the_job_again_writes_where_nobody_else_does, 60)
{
    start_world(2, one_opens_again);
    wait_for(3);
    CHECK_INT(kill(pids[1], SIGCONT), 0);
    CHECK_INT(end_world(), 0);
}

/* ---- more than there were ------------------------------------------------------------------*/

enum { LIMIT = 5 };

static const char *listens; /* NULL: at ports of any number; or DP_PORTS */
static bool has_addresses;
static dp_log listener; /* of warnings */

static dp_status open_to_grow(int timeout_ms, dp_ctx **out)
{
    dp_config config = {
        .device_count = 1, .recovers = true, .timeout_ms = timeout_ms, .log = listener};
    set_number("DP_PROCESS_LIMIT", LIMIT);
    if (machines == NULL) {
        use_devices(&config);
        use_name();
        return dp_open(&config, out);
    }
    use_machine();
    if (!has_addresses)
        unsetenv("DP_INTERFACE");
    if (listens != NULL)
        set("DP_PORTS", listens);
    return dp_open(&config, out);
}

static void check_sums(dp_ctx *ctx)
{
    dp_info info = info_of(ctx);
    CHECK_INT(sum_of(ctx, info.process), info.process_count * (info.process_count - 1) / 2);
    check_ranks(ctx);
}

/* Until as many are here as there may be; then one dies. */
static void grow(void)
{
    dp_ctx *ctx;
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx));
    for (int i = 0; listens != NULL && i < 10; i++)
        CHECK_INT(call(port + i), -1);
    check_sums(ctx);
    while (info_of(ctx).process_count < LIMIT) {
        bool came;
        rest(2);
        CHECK_OK(dp_admit(ctx, &came));
        check_sums(ctx);
    }
    int own = info_of(ctx).process;
    atomic_fetch_add(met, 1);
    wait_for(LIMIT);
    if (own == 1)
        kill_me();
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(info_of(ctx).process, own > 1 ? own - 1 : own);
    CHECK_INT(info_of(ctx).process_count, LIMIT - 1);
    check_sums(ctx);
    dp_close(ctx);
}

static void come_later(void)
{
    dp_ctx *ctx;
    set("DP_REJOIN", "1");
    grow();
    CHECK_ERROR(open_to_grow(TIMEOUT_MS, &ctx), DP_ERR_UNSUPPORTED,
                "dp_open: this process has come later (DP_REJOIN)");
}

static void grow_from(int count)
{
    start_world(count, grow);
    for (int p = world; p < LIMIT; p++)
        pids[p] = start(p, come_later);
    world = LIMIT;
    CHECK_INT(end_world(), 1);
}

TEST_SLOW(a_job_grows, 60)
{
    grow_from(2);
    grow_from(1);
}

/* A job that may become larger than the number of files that a process may open. */
static void few_files(void)
{
    struct rlimit few = {.rlim_cur = 256, .rlim_max = 256};
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &few), 0);
    set("DP_PROCESS_LIMIT", "600");
    one_dies();
}

TEST_SLOW(seats_may_be_more_than_files, 60)
{
    victim = 0;
    devices = 1;
    start_world(3, few_files);
    CHECK_INT(end_world(), 1);
}

/* A group has the processes that it has, whatever the job may grow to, and listens for no more. */
static void group_up(void)
{
    dp_ctx *ctx, *group;
    bool came;
    const dp_config config = {.recovers = true, .shards = 4};
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx));
    CHECK_OK(dp_open_group(ctx, me % 2, &config, &group));
    CHECK_INT(sum_of(group, me), me % 2 == 0 ? 2 : 4);
    dp_close(group);
    CHECK_OK(dp_open_group(ctx, 0, &(dp_config){.recovers = true}, &group));
    CHECK_OK(dp_barrier(group));
    int files = open_files();
    CHECK_OK(dp_admit(group, &came));
    CHECK_INT(open_files(), files);
    meet(world);
    if (me == 1)
        kill_me();
    wait_for_failure(group);
    CHECK_OK(dp_recover(group));
    CHECK_INT(sum_of(group, me), 5);
    dp_close(group);
    dp_close(ctx);
}

TEST_SLOW(a_group_does_not_grow, 60)
{
    start_world(4, group_up);
    CHECK_INT(end_world(), 1);
}

#if !defined(TEST_CUDA)
/* A door that cannot open. */
static int warnings;
static char place[64]; /* what they say */

static void count_warnings(const dp_log_record *record, void *user)
{
    (void)user;
    if (strstr(record->text, "no process can come later: ") != NULL) {
        CHECK(strstr(record->text, place) != NULL);
        warnings++;
    }
}

static void admit_nobody(dp_ctx *ctx, int times)
{
    for (int i = 0; i < times; i++) {
        bool came;
        CHECK_OK(dp_admit(ctx, &came));
        CHECK(!came);
    }
}

/* Process 0 of a job has died, and another one is at the door when the job is started anew. */
static void stay_at_the_door(void)
{
    dp_ctx *ctx;
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx));
    meet(world);
    if (me == 0)
        kill_me();
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    admit_nobody(ctx, 1);
    atomic_fetch_add(met, 1);
    wait_for(5);
    dp_close(ctx);
}

static void name_is_taken(void)
{
    dp_ctx *ctx;
    listener = (dp_log){.fn = count_warnings, .level = DP_LOG_WARN};
    snprintf(place, sizeof place, "where they would be awaited, is that of another");
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx));
    admit_nobody(ctx, 1);
    CHECK_INT(warnings, 0);
    int files = open_files();
    admit_nobody(ctx, 8);
    CHECK_INT(open_files(), files);
    CHECK_INT(warnings, me == 0);
    CHECK_OK(dp_barrier(ctx));
    atomic_fetch_add(met, 1);
    dp_close(ctx);
}

TEST_SLOW(a_door_that_another_job_has_is_told_once, 60)
{
    start_world(2, stay_at_the_door);
    wait_for(3);
    pid_t others[] = {start(0, name_is_taken), start(1, name_is_taken)};
    finish(others[0], 0);
    finish(others[1], 1);
    CHECK_INT(end_world(), 1);
}

/* With shards nobody has to call dp_admit. */
static void one_is_missing(void)
{
    dp_ctx *ctx = open_recovering(1, 3000);
    CHECK_OK(dp_barrier(ctx));
    atomic_fetch_add(met, me == 1);
    if (me == 1)
        kill_me();
    wait_for_failure(ctx);
    CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT,
                "dp_recover: only 1 of 2 processes are here: with shards each has to be replaced "
                "when it has died (DP_REJOIN), and none can come: the name 'dp-");
    CHECK_SAYS(dp_last_error(),
               ", where they would be awaited, is that of another process; end it");
    atomic_fetch_add(met, 1);
    dp_close(ctx);
}

TEST_SLOW(a_recovery_says_that_the_door_is_shut, 60)
{
    int how;
    shards = 2;
    start_world(2, stay_at_the_door);
    wait_for(3);
    pid_t others[] = {start(0, one_is_missing), start(1, one_is_missing)};
    CHECK_INT(waitpid(others[1], &how, 0), others[1]);
    CHECK(WIFSIGNALED(how));
    finish(others[0], 0);
    CHECK_INT(end_world(), 1);
}

/* Process 0 has no descriptor left for it, for a while. */
static void files_are_used_up(void)
{
    enum { FILES = 200 };
    dp_ctx *ctx;
    struct rlimit limit, few;
    int files[FILES], count = 0;
    listener = (dp_log){.fn = count_warnings, .level = DP_LOG_WARN};
    snprintf(place, sizeof place, "awaited, cannot be opened: %s", strerror(EMFILE));
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx));
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    few = limit;
    few.rlim_cur = FILES;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (me == 0 && (files[count] = dup(0)) >= 0)
        count++;
    admit_nobody(ctx, 9);
    CHECK_INT(warnings, me == 0);
    while (count > 0)
        close(files[--count]);
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    int before = open_files();
    admit_nobody(ctx, 9);
    CHECK_INT(open_files(), before + (me == 0));
    CHECK_INT(warnings, me == 0);
    dp_close(ctx);
}

TEST_SLOW(a_door_without_a_descriptor_is_told_once, 60)
{
    for (int i = 0; i < 2; i++) {
        port = free_port();
        machines = i == 0 ? NULL : "aa";
        start_world(2, files_are_used_up);
        CHECK_INT(end_world(), 0);
    }
}

TEST_SLOW(a_job_grows_over_machines, 90)
{
    static const char *const where[] = {"aaaaa", "aabca", "abbca"};
    char ports[24];
    for (int i = 0; i < 4; i++) {
        port = free_port();
        snprintf(ports, sizeof ports, "%d-%d", port + 10, port + 50);
        machines = where[i % 3];
        has_addresses = i > 0;
        listens = i == 3 ? ports : NULL;
        grow_from(i == 3 ? 1 : 2);
    }
}

/* It stays there, and says nothing. */
static void come_to_the_door(size_t says)
{
    int fd = -1;
    for (int i = 8; i < 16 && fd < 0; i++) { /* the door is at the first port that was free */
        struct sockaddr_in at = {.sin_family = AF_INET,
                                 .sin_port = htons((uint16_t)(port + i)),
                                 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(fd >= 0);
        if (connect(fd, (const struct sockaddr *)&at, sizeof at) != 0) {
            close(fd);
            fd = -1;
        }
    }
    CHECK(fd >= 0);
    (void)!send(fd, "dkp1", says, MSG_NOSIGNAL); /* as a request begins */
}

static void strangers_come(void)
{
    dp_ctx *ctx;
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx));
    double begun = now_ms();
    for (int i = 0; i <= 100; i++) {
        bool came;
        if (me == 0 && i > 0) /* when there is one */
            come_to_the_door((size_t)(i % 5));
        CHECK_OK(dp_admit(ctx, &came));
        CHECK(!came);
    }
    CHECK(now_ms() - begun < 4000 * test_timeout_scale());
    dp_close(ctx);
}

TEST_SLOW(strangers_at_the_door_are_not_waited_for, 60)
{
    port = free_port();
    machines = "aa";
    start_world(2, strangers_come);
    CHECK_INT(end_world(), 0);
}

/* Connects to all ports of the job again and again, and sends what comes to mind, or nothing. */
static void flood(void)
{
    enum { OPEN = 300 };
    uint64_t state = test_seed();
    int fds[OPEN];
    memset(fds, -1, sizeof fds);
    for (unsigned i = 0;; i++) {
        char noise[100];
        int n = port + 10 + (int)(i % 41);
        if (fds[i % OPEN] >= 0)
            close(fds[i % OPEN]);
        fds[i % OPEN] = call(n);
        for (size_t k = 0; k < sizeof noise; k++)
            noise[k] = (char)test_random(&state);
        if (test_random(&state) % 2 == 0)
            memcpy(noise, "dkp1", 4); /* as a request begins */
        if (fds[i % OPEN] >= 0)
            (void)!send(fds[i % OPEN], noise, test_random(&state) % sizeof noise, MSG_NOSIGNAL);
        if (i == 200)
            atomic_fetch_add(met, 1);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

/* Process 0 is there, and never votes. */
static void go_on_in_a_flood(void)
{
    dp_ctx *ctx;
    CHECK_OK(open_to_grow(4000, &ctx));
    meet(world);
    wait_for(world + 1);
    if (me == 0)
        raise(SIGSTOP);
    if (me == 1)
        dp_abort(ctx, DP_ERR_USER, "a reason");
    wait_for_failure(ctx);
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(info_of(ctx).process_count, world - 1);
    check_sums(ctx);
    dp_close(ctx);
}

TEST_SLOW(strangers_at_all_ports_do_not_keep_a_job_from_going_on, 90)
{
    static const char *const where[] = {"aaa", "abc"};
    char ports[24];
    has_addresses = true;
    for (int i = 0; i < 2; i++) {
        port = free_port();
        snprintf(ports, sizeof ports, "%d-%d", port + 10, port + 50);
        listens = ports;
        machines = where[i];
        start_world(3, go_on_in_a_flood);
        wait_for(3);
        pid_t stranger = start(3, flood);
        finish(pids[1], 1);
        finish(pids[2], 2);
        CHECK_INT(kill(pids[0], SIGKILL), 0);
        CHECK_INT(waitpid(pids[0], NULL, 0), pids[0]);
        CHECK_INT(kill(stranger, SIGKILL), 0);
        CHECK_INT(waitpid(stranger, NULL, 0), stranger);
    }
}

/* Process 1 has the ports of the door until it is known that process 0 has said so, once. */
static void ports_are_taken(void)
{
    dp_ctx *ctx;
    int taken[8];
    for (int i = 0; me == 1 && i < 8; i++)
        while ((taken[i] = listen_at(port + 8 + i)) < 0)
            rest(10); /* another test has it for a moment */
    listener = (dp_log){.fn = count_warnings, .level = DP_LOG_WARN};
    snprintf(place, sizeof place, "ports %d to %d of 127.0.0.1", port + 8, port + 15);
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx)); /* after both have come here */
    admit_nobody(ctx, 1);
    CHECK_INT(warnings, 0);
    admit_nobody(ctx, 8);
    CHECK_INT(warnings, me == 0);
    for (int i = 0; me == 1 && i < 8; i++)
        close(taken[i]);
    CHECK_OK(dp_barrier(ctx));
    admit_nobody(ctx, 1);
    if (me == 0)
        come_to_the_door(0); /* it is open */
    admit_nobody(ctx, 8);
    CHECK_INT(warnings, me == 0);
    dp_close(ctx);
}

TEST_SLOW(a_door_that_cannot_open_says_so_once, 60)
{
    port = free_port_from(12008, 19992) - 8; /* those of the door are free */
    machines = "aa";
    start_world(2, ports_are_taken);
    CHECK_INT(end_world(), 0);
}

static void admit_nobody_until_told(dp_ctx *ctx)
{
    for (int64_t ended = 0; ended == 0;) {
        admit_nobody(ctx, 1);
        ended = atomic_load(met);
        CHECK_OK(dp_all_reduce_i64(ctx, &ended, 1, DP_OP_MAX));
        rest(2);
    }
}

/* Inside a machine they have no addresses. */
static void nobody_comes(void)
{
    dp_ctx *ctx;
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx));
    admit_nobody_until_told(ctx);
    dp_close(ctx);
}

static void come_from_elsewhere(void)
{
    dp_ctx *ctx;
    set("DP_REJOIN", "1");
    CHECK_ERROR(open_to_grow(TIMEOUT_MS, &ctx), DP_ERR_UNSUPPORTED,
                "the job has met inside another machine: set DP_INTERFACE for all");
    atomic_store(met, 1);
}

TEST_SLOW(who_cannot_be_reached_is_not_let_in, 60)
{
    port = free_port();
    machines = "aab";
    has_addresses = false;
    start_world(2, nobody_comes);
    finish(start(2, come_from_elsewhere), 2);
    CHECK_INT(end_world(), 0);
}

/* ---- who comes where it is not let in, and is told why --------------------------------------- */

static void come_in_vain(const char *found)
{
    dp_ctx *ctx;
    const dp_config config = {.device_count = 1, .recovers = true, .timeout_ms = 1500};
    set("DP_REJOIN", "1");
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_TIMEOUT, found);
    CHECK(strncmp(dp_last_error(), "dp_open: ", 9) == 0);
    atomic_store(met, 1);
}

static const char *sentence; /* that it is told at the place of the test */

static void come_by_name(void)
{
    use_name();
    come_in_vain(sentence);
}

static void come_by_tcp(void)
{
    use_tcp();
    come_in_vain(sentence);
}

static void come_with_another_secret(void)
{
    use_tcp();
    set("DP_SECRET", "foe");
    come_in_vain("the listener belongs to another job, or has another DP_SECRET");
}

static void come_to_an_address_nobody_has(void)
{
    use_tcp();
    set("DP_ADDR", "255.255.255.255:7000");
    come_in_vain("no job that others can join was found at 255.255.255.255:7000, ports 7008 to "
                 "7015, within 1.5 s: nobody answers there");
}

TEST_SLOW(who_comes_where_no_job_is_is_told_what_is_there, 60)
{
    char text[200];
    nobody_launched_us();
    world = 1;
    port = free_port_from(12008, 19992) - 8; /* those of the door are free */
    snprintf(text, sizeof text,
             "no job that others can join was found at 127.0.0.1:%d, ports %d to %d, within 1.5 s: "
             "nobody listens there; a job does from its first dp_admit or dp_recover on",
             port, port + 8, port + 15);
    sentence = text;
    met = memory_of_all(sizeof *met);
    finish(start(0, come_by_tcp), 0);
    finish(start(0, come_to_an_address_nobody_has), 0);
    CHECK(listen_at(port + 11) >= 0);
    sentence = "s: a program listens there that does not answer; a job does when it calls dp_admit";
    finish(start(0, come_by_tcp), 0);
}

/* It lets nobody in, as it never calls dp_admit. */
static void open_no_door(void)
{
    dp_ctx *ctx;
    CHECK_OK(open_to_grow(TIMEOUT_MS, &ctx));
    atomic_fetch_add(met, -1);
    wait_for(1);
    dp_close(ctx);
}

TEST_SLOW(who_comes_before_the_door_is_open_is_told_of_the_job, 60)
{
    char text[200];
    start_world(2, open_no_door);
    while (atomic_load(met) != -2)
        rest(1);
    snprintf(text, sizeof text,
             "dp_admit or dp_recover on. There is a process 0 (its process id is %d) whose job has "
             "started already",
             (int)pids[0]);
    sentence = text;
    finish(start(2, come_by_name), 2);
    CHECK_INT(end_world(), 0);
}

/* All its places are taken. */
static void stay_full(void)
{
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    admit_nobody_until_told(ctx);
    dp_close(ctx);
}

TEST_SLOW(who_finds_no_place_is_told_that_a_job_runs, 60)
{
    port = free_port();
    sentence = "the job that runs at @test-";
    start_world(2, stay_full);
    finish(start(2, come_by_name), 2);
    CHECK_INT(end_world(), 0);
    sentence = "s: the others have to call dp_admit, and there has to be room for one more";
    machines = "aa";
    start_world(2, stay_full);
    finish(start(2, come_by_tcp), 2);
    CHECK_INT(end_world(), 0);
    start_world(2, stay_full);
    finish(start(2, come_with_another_secret), 2);
    CHECK_INT(end_world(), 0);
}

TEST_SLOW(who_waits_when_the_job_ends_is_told_so, 60)
{
    sentence = "has not let this process in within 1.5 s, and now nobody listens there";
    start_world(2, stay_full);
    pid_t guest = start(2, come_by_name);
    rest(700);
    atomic_store(met, 1);
    finish(guest, 2);
    CHECK_INT(end_world(), 0);
}
#endif

/* ---- at random moments ----------------------------------------------------------------------- */

static uint64_t seed;

static void random_deaths(int count)
{
    start_world(count, train);
    kill_at_random(&seed);
    (void)end_world();
}

TEST_SLOW(deaths_at_random_moments, 120)
{
    seed = test_seed();
    for (int i = 0; i < 12; i++)
        random_deaths(2 + (int)(test_random(&seed) % 4));
}

/* ---- who come and go ------------------------------------------------------------------------- */

/* How far all are is what they have to keep. */
static dp_status share_steps(dp_ctx *ctx, int64_t *steps, bool came_back)
{
    dp_value all;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = dp_checkpoint_share(ctx, scope, came_back ? -1 : *steps,
                                           DP_DICT(scope, {"steps", dp_int(*steps)}), &all);
    if (status == DP_OK)
        *steps = dp_get(all, "steps").as.i;
    dp_scope_end(scope);
    return status;
}

static dp_status one_step(dp_ctx *ctx, int64_t *steps, bool came_back)
{
    bool came = came_back;
    if (!came_back)
        DP_TRY(dp_admit(ctx, &came));
    if (came)
        DP_TRY(share_steps(ctx, steps, came_back));
    int64_t least = *steps;
    DP_TRY(dp_all_reduce_i64(ctx, &least, 1, DP_OP_MIN));
    CHECK_INT(least, *steps);
    ++*steps;
    return DP_OK;
}

static void come_and_go(void)
{
    int64_t steps = 0;
    bool fresh = comes_back;
    dp_ctx *ctx = open_recovering(1, TIMEOUT_MS);
    while (!atomic_load(&seen->stop)) {
        dp_status status = one_step(ctx, &steps, fresh);
        while (status != DP_OK) {
            if (!dp_failure(ctx, NULL))
                CHECK_OK(status);
            CHECK_OK(dp_recover(ctx));
            status = share_steps(ctx, &steps, fresh);
        }
        fresh = false;
        atomic_store(&seen->counts[me], info_of(ctx).process_count);
    }
    _exit(EXIT_SUCCESS); /* the others may have left */
}

static void come_and_go_again(void)
{
    come_again();
    come_and_go();
}

TEST_SLOW(they_come_and_go, 120)
{
    enum { ROUNDS = 8 };
    seed = test_seed();
    seen = memory_of_all(sizeof *seen);
    start_world(3 + (int)(test_random(&seed) % 3), come_and_go);
    for (int round = 0; round < ROUNDS; round++) {
        bool dead[MOST] = {false};
        wait_for_all_of_them();
        for (int deaths = 1 + (int)(test_random(&seed) % (uint64_t)(world - 1)); deaths > 0;
             deaths--)
            dead[test_random(&seed) % (uint64_t)world] = true;
        for (int p = 0; p < world; p++)
            if (dead[p]) {
                CHECK_INT(kill(pids[p], SIGKILL), 0);
                CHECK_INT(waitpid(pids[p], NULL, 0), pids[p]);
            }
        rest((int)(test_random(&seed) % 20));
        forget_counts();
        for (int p = 0; p < world; p++)
            if (dead[p])
                pids[p] = start(p, come_and_go_again);
    }
    wait_for_all_of_them();
    atomic_store(&seen->stop, true);
    for (int p = 0; p < world; p++) {
        (void)kill(pids[p], SIGKILL); /* one may wait for others that have seen it */
        CHECK_INT(waitpid(pids[p], NULL, 0), pids[p]);
    }
}

/* ---- deaths, stops and returns --------------------------------------------------------------- */

/* A job trains while its processes are killed, stopped for a while, and started again. TEST_ROUNDS
   says how often something happens, to a new job each third time. */
enum { LEFT = 3 }; /* the exit status of a process that was left behind */

static struct {
    atomic_bool calm;        /* from now on nothing happens */
    atomic_int counts[MOST]; /* processes that each sees in the job; 0: not yet */
    atomic_llong furthest;   /* samples that somebody has seen done */
} * trial;

/* The others go on without a process that is stopped for longer. On a busy machine they may leave
   another one behind, which comes back as well. */
static int patience_ms(void)
{
    double scale = test_timeout_scale();
    return (int)(8000 * (scale < 1 ? 1 : scale > 4 ? 4 : scale));
}

/* A part of the job that has gone on by itself would not have what the others have done. */
static void check_not_split(int64_t furthest, int64_t before)
{
    if (furthest > before + 3 * MOST)
        test_fail(__FILE__, __LINE__, "a second job is at %lld when the first one is at %lld",
                  (long long)before, (long long)furthest);
}

/* All are waited for at the end of an epoch, as soon as nothing happens to them any more. */
static dp_status until_calm(trainer *t, dp_scope *scope, bool recovered, bool *out_end)
{
    bool changed = recovered || t->done < 0;
    if (!changed)
        DP_TRY(dp_admit(t->ctx, &changed));
    if (changed)
        DP_TRY(trainer_share(t, scope));
    int64_t calm = atomic_load(&trial->calm), before = t->done;
    DP_TRY(dp_all_reduce_i64(t->ctx, &calm, 1, DP_OP_MIN));
    rest(1);
    if (calm != 0 && t->done % SAMPLES == 0) {
        *out_end = info_of(t->ctx).process_count == world;
        return *out_end ? dp_params_compare(t->par) : DP_OK;
    }
    int64_t furthest = atomic_load(&trial->furthest);
    DP_TRY(trainer_step(t, scope));
    check_not_split(furthest, before);
    long long last = atomic_load(&trial->furthest);
    while (last < t->done && !atomic_compare_exchange_weak(&trial->furthest, &last, t->done))
        continue;
    atomic_store(&trial->counts[me], info_of(t->ctx).process_count);
    return DP_OK;
}

static void train_until_calm(void)
{
    trainer t;
    dp_ctx *ctx;
    dp_config config = {.device_count = 1, .recovers = true, .timeout_ms = patience_ms()};
    bool end = false, recovered = false;
    use_devices(&config);
    use_name();
    dp_status status = dp_open(&config, &ctx);
    if (status == DP_OK)
        status = trainer_create(&t, ctx);
    if (status != DP_OK && comes_back)
        _exit(LEFT); /* those that would have let it in have died, or waited for another one */
    CHECK_OK(status);
    while (!end) {
        dp_scope *scope = dp_scope_begin(ctx);
        status = until_calm(&t, scope, recovered, &end);
        dp_scope_end(scope);
        recovered = status != DP_OK;
        if (recovered && !dp_failure(ctx, NULL))
            CHECK_OK(status);
        if (recovered && dp_recover(ctx) != DP_OK)
            _exit(LEFT);
        end = end && !recovered;
    }
    trainer_check(&t, t.done / SAMPLES);
    dp_close(ctx);
}

static void train_again(void)
{
    come_again();
    train_until_calm();
}

/* Who was killed, or left behind, is started again. True: it has come to the end. */
static bool look_after(int p)
{
    int how = 0;
    if (pids[p] == 0 || waitpid(pids[p], &how, WNOHANG) != pids[p])
        return pids[p] == 0;
    bool was_left = WIFEXITED(how) && WEXITSTATUS(how) == LEFT;
    if (was_left || (WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL)) {
        atomic_store(&trial->counts[p], 0);
        pids[p] = start(p, train_again);
        return false;
    }
    if (!WIFEXITED(how) || WEXITSTATUS(how) != EXIT_SUCCESS)
        test_fail(__FILE__, __LINE__, "process %d of %d ended with status 0x%x", p, world,
                  (unsigned)how);
    pids[p] = 0;
    return true;
}

static void until_all_are_there(void)
{
    for (int there = 0; there < world; rest(1)) {
        there = 0;
        for (int p = 0; p < world; p++)
            there += !look_after(p) && atomic_load(&trial->counts[p]) == world;
    }
}

static uint64_t below(int count)
{
    return test_random(&seed) % (uint64_t)count;
}

/* One may be stopped, and all others may die. If it is stopped for too long, at most one dies. */
static void something_happens(bool too_long)
{
    int stopped = too_long || below(3) == 0 ? (int)below(world) : -1;
    int deaths = too_long ? (int)below(2) : 1 + (int)below(world - 1);
    rest((int)below(30));
    if (stopped >= 0)
        CHECK_INT(kill(pids[stopped], SIGSTOP), 0);
    for (; deaths > 0; deaths--) {
        int who = (int)below(world);
        if (below(3) == 0)
            rest((int)below(5));
        if (who != stopped)
            CHECK_INT(kill(pids[who], SIGKILL), 0);
    }
    if (stopped >= 0) {
        rest((int)below(100));
        rest(too_long ? patience_ms() / 2 + (int)below(patience_ms()) : 0);
        CHECK_INT(kill(pids[stopped], SIGCONT), 0);
    }
    rest((int)below(30));
    for (int p = 0; p < world; p++)
        atomic_store(&trial->counts[p], 0); /* what they have seen before is not what is */
    until_all_are_there();
}

static void random_trial(int rounds)
{
    memset(trial, 0, sizeof *trial);
    start_world(2 + (int)below(7), train_until_calm);
    until_all_are_there();
    for (int round = 0; round < rounds; round++)
        something_happens(round == 2 && below(2) == 0);
    atomic_store(&trial->calm, true);
    for (int ended = 0; ended < world; rest(1)) {
        ended = 0;
        for (int p = 0; p < world; p++)
            ended += look_after(p);
    }
}

TEST_SLOW(deaths_stops_and_returns, 180)
{
    enum { EACH = 3 };
    const char *text = getenv("TEST_ROUNDS");
    int rounds = text != NULL ? atoi(text) : 2 * EACH;
    seed = test_seed();
    trial = memory_of_all(sizeof *trial);
    for (; rounds > 0; rounds -= EACH)
        random_trial(rounds < EACH ? rounds : EACH);
}
