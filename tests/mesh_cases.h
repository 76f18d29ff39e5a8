/* mesh_cases.h - what collectives and messages of processes that share no memory (dp/mesh.h) have
   to do, whatever carries their bytes: MPI, or connections over TCP. Who includes it says what
   opens a context, and runs each case in all processes of a job. */

#ifndef MESH_CASES_H
#define MESH_CASES_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "../dp_train.h"
#include "ranked.h"

static int mesh_process, mesh_process_count;
static dp_config mesh_config; /* of every context: its table, and how its processes meet */

static inline dp_ctx *mesh_open(int device_count, int timeout_ms)
{
    dp_config config = mesh_config;
    dp_ctx *ctx = NULL;
    config.device_count = device_count;
    config.timeout_ms = timeout_ms;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static inline int64_t ones_of(dp_ctx *ctx)
{
    int64_t count = 1;
    CHECK_OK(dp_all_reduce_i64(ctx, &count, 1, DP_OP_SUM));
    return count;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

enum { LOCALS = 2 };

static size_t mesh_many = 2500003; /* several pieces, and a rest */

typedef struct job {
    dp_ctx *ctx;
    dp_info info;
    dp_part parts[LOCALS];
} job;

static inline void job_open(job *j)
{
    j->ctx = mesh_open(1 + mesh_process % LOCALS, 0);
    CHECK_OK(dp_info_get(j->ctx, &j->info));
    CHECK_STR(j->info.coll_backend, mesh_config.colls[0]->name);
}

static inline void *room(job *j, int local_rank, size_t elements, size_t size)
{
    (void)j, (void)local_rank;
    void *data = calloc(elements + 1, size);
    CHECK(data != NULL);
    return data;
}

/* What a rank has in place i: small enough for sums of halves. */
static inline int number_of(int rank, size_t i)
{
    return (int)((i * 7 + (size_t)rank * 13) % 31) - 15;
}

static inline int sum_of(const job *j, size_t i)
{
    int sum = 0;
    for (int r = 0; r < j->info.rank_count; r++) {
        sum += number_of(r, i);
    }
    return sum;
}

static inline void rooms_make(job *j, size_t send, size_t recv)
{
    for (int i = 0; i < j->info.local_count; i++) {
        int32_t *data = room(j, i, send, sizeof(int32_t));
        for (size_t k = 0; k < send; k++) {
            data[k] = number_of(j->info.rank_first + i, k);
        }
        j->parts[i] = (dp_part){.send = data, .recv = data};
        if (recv > 0) {
            j->parts[i].recv = room(j, i, recv, sizeof(int32_t));
        }
    }
}

static inline void rooms_free(job *j)
{
    for (int i = 0; i < j->info.local_count; i++) {
        void *recv = j->parts[i].recv;
        uintptr_t send = (uintptr_t)j->parts[i].send;
        if ((uintptr_t)recv != send) {
            free(recv);
        }
        free((void *)send);
    }
}

static inline const int32_t *got_by(const job *j, int local_rank)
{
    return j->parts[local_rank].recv;
}

static inline void sums_of_several_pieces(void)
{
    job j;
    job_open(&j);
    for (int in_place = 0; in_place <= 1; in_place++) {
        rooms_make(&j, mesh_many, in_place ? 0 : mesh_many);
        CHECK_OK(dp_all_reduce(j.ctx, j.parts, mesh_many, DP_I32, DP_OP_SUM));
        for (int i = 0; i < j.info.local_count; i++) {
            for (size_t k = 0; k < mesh_many; k++) {
                CHECK_INT(got_by(&j, i)[k], sum_of(&j, k));
            }
            CHECK(in_place || got_by(&j, i)[mesh_many] == 0);
        }
        rooms_free(&j);
    }
    dp_close(j.ctx);
}

/* Some want the sum, in one process none does; it is the same, also scaled. */
static inline void sums_that_some_want(void)
{
    job j;
    job_open(&j);
    rooms_make(&j, mesh_many, mesh_many);
    for (int wants = 0; wants < mesh_process_count; wants++) {
        dp_part parts[LOCALS] = {j.parts[0], j.parts[1]};
        for (int i = 0; i < j.info.local_count; i++) {
            memset(parts[i].recv, 0, mesh_many * sizeof(int32_t));
            if (wants != mesh_process || (wants == 1 && i == 0)) {
                parts[i].recv = NULL;
            }
        }
        CHECK_OK(dp_all_reduce(j.ctx, parts, mesh_many, DP_I32, DP_OP_SUM));
        for (int i = 0; i < j.info.local_count; i++) {
            for (size_t k = 0; k < mesh_many; k += 997) {
                CHECK_INT(got_by(&j, i)[k], parts[i].recv != NULL ? sum_of(&j, k) : 0);
            }
        }
    }
    rooms_free(&j);
    dp_close(j.ctx);
}

/* 2 bytes each where every process has one device, else f32 on the way. */
static inline void halves_of_several_pieces(void)
{
    for (int devices = 1; devices <= LOCALS; devices++) {
        job j = {.ctx = mesh_open(devices, 0)};
        CHECK_OK(dp_info_get(j.ctx, &j.info));
        for (int i = 0; i < devices; i++) {
            uint16_t *data = room(&j, i, mesh_many, sizeof(uint16_t));
            for (size_t k = 0; k < mesh_many; k++) {
                data[k] = k % 2 ? 0x3f80 : 0x4380; /* 1 and 256 in bf16 */
            }
            j.parts[i] = (dp_part){.send = data, .recv = data};
        }
        CHECK_OK(dp_all_reduce_scaled(j.ctx, j.parts, mesh_many, DP_BF16, DP_OP_MEAN, 2));
        for (size_t k = 0; k < mesh_many; k++) {
            const uint16_t *data = j.parts[0].recv;
            CHECK_INT(data[k], k % 2 ? 0x4000 : 0x4400); /* 2 and 512 */
        }
        rooms_free(&j);
        dp_close(j.ctx);
    }
}

static inline float real_of(int rank, size_t i)
{
    uint64_t state = i % 4099 * 64 + (uint64_t)rank + 1;
    return (float)ldexp((double)(int64_t)test_random(&state), -(int)(i % 41) - 40);
}

static inline float tree_of(int first, int count, size_t i)
{
    int left = 1;
    if (count == 1) {
        return real_of(first, i);
    }
    while (2 * left < count) {
        left *= 2;
    }
    return tree_of(first, left, i) + tree_of(first + left, count - left, i);
}

/* As many ranks in each process, a power of two: they are added in one tree. */
static inline void one_tree(size_t count, int devices)
{
    job j = {.ctx = mesh_open(devices, 0)};
    CHECK_OK(dp_info_get(j.ctx, &j.info));
    for (int i = 0; i < devices; i++) {
        float *data = room(&j, i, count, sizeof(float));
        for (size_t k = 0; k < count; k++) {
            data[k] = real_of(j.info.rank_first + i, k);
        }
        j.parts[i] = (dp_part){.send = data, .recv = data};
    }
    CHECK_OK(dp_all_reduce(j.ctx, j.parts, count, DP_F32, DP_OP_SUM));
    for (size_t k = 0; k < count; k++) {
        float want = tree_of(0, j.info.rank_count, k);
        CHECK_BYTES((const float *)j.parts[devices - 1].recv + k, &want, sizeof want);
    }
    rooms_free(&j);
    dp_close(j.ctx);
}

static inline void ranks_are_added_in_one_tree(void)
{
    for (int devices = 1; devices <= LOCALS; devices *= 2) {
        one_tree(100, devices);
        one_tree(mesh_many / 4, devices);
    }
}

static inline void moves_of_several_pieces(void)
{
    job j;
    job_open(&j);
    size_t each = mesh_many / 4, ranks = (size_t)j.info.rank_count;
    rooms_make(&j, mesh_many, mesh_many);
    CHECK_OK(dp_broadcast(j.ctx, j.parts, mesh_many, DP_I32, j.info.rank_count - 1));
    for (int i = 0; i < j.info.local_count; i++) {
        for (size_t k = 0; k < mesh_many; k++) {
            CHECK_INT(got_by(&j, i)[k], number_of(j.info.rank_count - 1, k));
        }
    }
    rooms_free(&j);
    rooms_make(&j, each * ranks, each * ranks);
    CHECK_OK(dp_all_to_all(j.ctx, j.parts, each, DP_I32));
    for (int i = 0; i < j.info.local_count; i++) {
        for (size_t k = 0; k < each * ranks; k++) {
            size_t own = (size_t)(j.info.rank_first + i) * each;
            CHECK_INT(got_by(&j, i)[k], number_of((int)(k / each), own + k % each));
        }
    }
    CHECK_OK(dp_all_gather(j.ctx, j.parts, each, DP_I32));
    for (int i = 0; i < j.info.local_count; i++) {
        for (size_t k = 0; k < each * ranks; k++) {
            CHECK_INT(got_by(&j, i)[k], number_of((int)(k / each), k % each));
        }
    }
    CHECK_OK(dp_reduce_scatter(j.ctx, j.parts, each, DP_I32, DP_OP_SUM));
    for (int i = 0; i < j.info.local_count; i++) {
        for (size_t k = 0; k < each; k++) {
            size_t own = (size_t)(j.info.rank_first + i) * each;
            CHECK_INT(got_by(&j, i)[k], sum_of(&j, own + k));
        }
    }
    rooms_free(&j);
    dp_close(j.ctx);
}

/* ---- gradients ------------------------------------------------------------------------------- */

enum { UNITS = 5, UNIT = 60000 };

/* The courier's communicator and the caller's, at the same time. */
static inline void check_reducer(dp_ctx *ctx)
{
    static float gradients[LOCALS][UNITS * UNIT];
    void *local[LOCALS] = {gradients[0], gradients[1]};
    dp_block block = {DP_F32, UNITS * UNIT, local};
    dp_range ranges[UNITS];
    dp_reducer *reducer;
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    for (uint32_t u = 0; u < UNITS; u++) {
        ranges[u] = (dp_range){0, u, u * UNIT, UNIT};
    }
    const dp_reducer_config config = {.blocks = &block,
                                      .block_count = 1,
                                      .ranges = ranges,
                                      .range_count = UNITS,
                                      .reduction = DP_MEAN_RANKS,
                                      .buckets = {.first_bytes = 1, .bytes = 1}};
    CHECK_OK(dp_reducer_create(ctx, &config, &reducer));
    for (int pass = 0; pass < 4; pass++) {
        float other[LOCALS] = {1, 1};
        dp_part parts[LOCALS];
        CHECK_OK(dp_reducer_begin(reducer, NULL));
        for (uint32_t u = UNITS; u-- > 0;) {
            for (int i = 0; i < info.local_count; i++) {
                for (size_t k = 0; k < UNIT; k++) {
                    gradients[i][u * UNIT + k] =
                        (float)(number_of(info.rank_first + i, k) * info.rank_count);
                }
                CHECK_OK(dp_reducer_ready(reducer, i, u, NULL));
                parts[i] = (dp_part){.send = &other[i], .recv = &other[i]};
            }
            CHECK_OK(dp_all_reduce(ctx, parts, 1, DP_F32, DP_OP_MAX)); /* beside it */
        }
        CHECK_OK(dp_reducer_finish(reducer));
        for (size_t k = 0; k < UNITS * UNIT; k++) {
            int sum = 0;
            for (int r = 0; r < info.rank_count; r++) {
                sum += number_of(r, k % UNIT);
            }
            CHECK_F64(gradients[info.local_count - 1][k], sum, 0);
        }
    }
    CHECK_OK(dp_reducer_destroy(reducer));
}

static inline void gradients_travel_beside_other_collectives(void)
{
    job j;
    job_open(&j);
    check_reducer(j.ctx);
    dp_close(j.ctx);
}

/* ---- steps of shares ------------------------------------------------------------------------- */

enum { LONG = 70001, SHORT = 37 };

static inline dp_status number_backward(dp_call *call)
{
    dp_info info;
    DP_TRY(dp_info_get(call->ctx, &info));
    for (size_t i = 2; i-- > 0;) {
        dp_tensor grad = dp_grad_tensor(call, i);
        float *numbers = grad.data;
        for (size_t k = 0; k < (size_t)dp_tensor_count(&grad); k++)
            numbers[k] += (float)number_of(info.rank_first, k + i) / 7;
        DP_TRY(dp_grad_ready(call, i));
    }
    return DP_OK;
}

/* A packed module, stepped five times; out: its parameters. */
static inline void steps_of(dp_ctx *ctx, bool sharded, float *out)
{
    static const dp_method methods[] = {{"forward", number_forward}, {"backward", number_backward}};
    static const dp_param_config params[] = {{.name = "long", .ndim = 1, .shape = {LONG}},
                                             {.name = "short", .ndim = 1, .shape = {SHORT}}};
    const dp_optim_config config = {.rule = dp_adamw(), .hyper = {.lr = 0.01}, .sharded = sharded};
    dp_module *net = NULL, *par = NULL;
    dp_optim *optim = NULL;
    dp_tensor data;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 2,
                                                  .packed = true},
                              &net));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.buckets.bytes = 64}, &par));
    CHECK_OK(dp_optim_create(par, &config, &optim));
    for (int step = 0; step < 5; step++) {
        dp_scope *scope = dp_scope_begin(ctx);
        float rows[1] = {0};
        dp_tensor batch = dp_wrap(rows, DP_F32, 1, (int64_t[]){1});
        dp_value log;
        CHECK_OK(
            dp_train_step(par, scope, DP_DICT(scope, {"x", dp_of(scope, &batch)}), optim, &log));
        dp_scope_end(scope);
    }
    CHECK_OK(dp_params_compare(par));
    CHECK_OK(dp_params_edit(net, 0, &data, NULL));
    memcpy(out, data.data, LONG * sizeof(float));
    CHECK_OK(dp_params_edit(net, 1, &data, NULL));
    memcpy(out + LONG, data.data, SHORT * sizeof(float));
    dp_reducer_info info;
    CHECK_OK(dp_reducer_info_get(dp_wrapper_reducer(par), &info));
    CHECK_INT(info.scatters, sharded);
}

static inline void steps_of_shares_are_those_of_the_whole(void)
{
    static float want[LONG + SHORT], got[LONG + SHORT];
    dp_ctx *ctx = mesh_open(1, 0);
    steps_of(ctx, false, want);
    steps_of(ctx, true, got);
    CHECK(fabsf(want[0]) > 0.01f);
    CHECK_BYTES(got, want, sizeof got);
    dp_close(ctx);
}

/* Several contexts at a time, each with lines of its own. */
static inline void two_contexts(void)
{
    dp_ctx *a = mesh_open(1, 0), *b = mesh_open(2, 0);
    check_reducer(b);
    CHECK_OK(dp_barrier(a));
    dp_close(a);
    CHECK_OK(dp_barrier(b));
    dp_close(b);
}

/* ---- machines -------------------------------------------------------------------------------- */

typedef struct said { /* what a context logged of memory: of two communicators */
    int groups[10], refusals;
} said;

static inline void hear_of_memory(const dp_log_record *record, void *user)
{
    said *all = user;
    const char *groups = strstr(record->text, "share memory in groups of ");
    all->groups[groups != NULL ? atoi(groups + 26) : 0]++;
    all->refusals += strstr(record->text, "shared memory: ") != NULL;
}

static inline dp_ctx *open_heard(const char *machine, int device_count, said *all)
{
    dp_config config = mesh_config;
    dp_ctx *ctx = NULL;
    memset(all, 0, sizeof *all);
    config.device_count = device_count;
    config.log = (dp_log){.fn = hear_of_memory, .user = all, .level = DP_LOG_INFO};
    setenv("DP_MACHINE", machine, 1);
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

/* Pieces of memory: each is mapped from its beginning. */
static inline int count_shared(void)
{
    char line[512];
    unsigned long offset = 0;
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        count += strstr(line, "/memfd:dp") != NULL && sscanf(line, "%*s %*s %lx", &offset) == 1 &&
                 offset == 0;
    }
    if (maps != NULL) {
        fclose(maps);
    }
    return count;
}

/* Machines, a letter for each process. */
static inline const char *machine_of(const char *machines)
{
    static char machine[2];
    machine[0] = machines[mesh_process];
    return machine;
}

/* The context's collectives share memory, and so do its courier's; a group of one shares none.
   Processes of one machine see each other on a board; of several each has its own. */
static inline void check_shared(const char *machines, int group)
{
    said all;
    bool one = strspn(machines, (char[]){machines[0], '\0'}) == strlen(machines);
    dp_ctx *ctx = open_heard(machine_of(machines), 1, &all);
    CHECK_INT(all.groups[group], 2);
    CHECK_INT(all.refusals, 0);
    CHECK_INT(count_shared(), (group > 1 ? 2 : one) + !one);
    check_reducer(ctx);
    dp_close(ctx);
    CHECK_INT(count_shared(), 0);
}

/* ---- messages -------------------------------------------------------------------------------- */

enum { EACH_WAY = 20 };

static inline uint64_t message_seed(int from, int to, int i)
{
    uint64_t seed = (uint64_t)((from * 64 + to) * 64 + i + 1) * 0x9e3779b97f4a7c15u;
    return (seed ^ seed >> 29) * 0xbf58476d1ce4e5b9u;
}

static inline size_t message_count(uint64_t seed)
{
    return (size_t)(seed >> 20) % 300000 >> seed % 19;
}

static inline dp_message message_of(dp_scope *scope, int from, int to, int i, bool receives)
{
    uint64_t seed = message_seed(from, to, i);
    size_t count = message_count(seed);
    int32_t *data = dp_scope_alloc(scope, (count + 1) * sizeof *data);
    CHECK(data != NULL);
    for (size_t k = 0; k <= count; k++)
        data[k] = receives ? -1 : (int32_t)(seed + k);
    return (dp_message){.tensor = dp_wrap(data, DP_I32, 1, (int64_t[]){(int64_t)count}),
                        .peer = receives ? from : to,
                        .tag = i % 3,
                        .receives = receives};
}

static inline void check_message(const dp_message *message, int from, int to, int i)
{
    uint64_t seed = message_seed(from, to, i);
    const int32_t *data = message->tensor.data;
    size_t count = message_count(seed);
    CHECK_INT(message->status, DP_OK);
    for (size_t k = 0; k < count; k++)
        CHECK_INT(data[k], (int32_t)(seed + k));
    CHECK_INT(data[count], -1);
}

static inline void everybody_to_everybody(dp_ctx *ctx, int ranks)
{
    dp_scope *scope = dp_scope_begin(ctx);
    size_t count = 0, all = 2 * (size_t)ranks * EACH_WAY;
    dp_message *messages = dp_scope_alloc(scope, all * sizeof *messages);
    CHECK(messages != NULL);
    for (int i = 0; i < EACH_WAY; i++)
        for (int peer = 0; peer < ranks; peer++) {
            messages[count++] = message_of(scope, mesh_process, peer, i, false);
            messages[count++] = message_of(scope, peer, mesh_process, i, true);
        }
    CHECK_OK(dp_messages_begin(ctx, messages, all / 2));
    CHECK_OK(dp_barrier(ctx));
    CHECK_OK(dp_messages_begin(ctx, messages + all / 2, all - all / 2));
    CHECK_OK(dp_messages_end(ctx, messages, all));
    for (size_t i = 1; i < all; i += 2)
        check_message(&messages[i], (int)(i / 2) % ranks, mesh_process, (int)(i / 2) / ranks);
    dp_scope_end(scope);
}

/* What any rank sends, what does not fit, and what comes after it. */
static inline void check_server(dp_ctx *ctx, int ranks)
{
    enum { LARGE = 100000 };
    static int32_t data[LARGE];
    for (int i = 1; i < ranks; i++) {
        dp_tensor tensor = dp_wrap(data, DP_I32, 1, (int64_t[]){i % 2 ? LARGE : 5});
        dp_tensor other = dp_wrap(data, DP_I32, 1, (int64_t[]){7});
        dp_message one = {.tensor = tensor, .peer = DP_ANY_RANK, .tag = i, .receives = true};
        data[LARGE - 1] = i;
        if (mesh_process == i) {
            CHECK_OK(dp_send(ctx, &tensor, 0, i));
            CHECK_ERROR(dp_send(ctx, &tensor, 0, i), DP_ERR_MISMATCH, "which expected 7 i32");
            CHECK_OK(dp_recv(ctx, &other, 0, i));
        } else if (mesh_process == 0) {
            data[LARGE - 1] = 0;
            CHECK_OK(dp_messages_begin(ctx, &one, 1));
            CHECK_OK(dp_messages_end(ctx, &one, 1));
            CHECK_INT(one.peer, i);
            CHECK_INT(data[LARGE - 1], i % 2 ? i : 0);
            CHECK_ERROR(dp_recv(ctx, &other, i, i), DP_ERR_MISMATCH, "which expected 7 i32");
            CHECK_OK(dp_send(ctx, &other, i, i));
        }
    }
}

static inline void check_messages(void)
{
    dp_ctx *ctx = mesh_open(1, 0);
    everybody_to_everybody(ctx, mesh_process_count);
    check_server(ctx, mesh_process_count);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

/* ---- who does something else ----------------------------------------------------------------- */

static inline dp_status add_up(dp_ctx *ctx, size_t count)
{
    static float data[1 << 20];
    const dp_part part = {.send = data, .recv = data};
    return dp_all_reduce(ctx, &part, count, DP_F32, DP_OP_SUM);
}

enum { OTHER_CALLS = 10 };

/* What process 1 does where the others add up 25 f32. */
static inline dp_status something_else(dp_ctx *ctx, int kind)
{
    static double numbers[1000], more[1000];
    const dp_part part = {.send = numbers, .recv = numbers},
                  apart = {.send = numbers, .recv = more};
    switch (kind) {
    case 0:
        return dp_all_reduce(ctx, &part, 26, DP_F32, DP_OP_SUM);
    case 1:
        return dp_all_reduce(ctx, &part, 25, DP_I32, DP_OP_SUM);
    case 2:
        return dp_all_reduce(ctx, &part, 25, DP_F32, DP_OP_MAX);
    case 3:
        return dp_all_reduce_scaled(ctx, &part, 25, DP_F32, DP_OP_SUM, 0.5);
    case 4:
        return dp_broadcast(ctx, &part, 25, DP_F32, 0);
    case 5:
        return dp_all_gather(ctx, &apart, 25, DP_F32);
    case 6:
        return dp_reduce_scatter(ctx, &apart, 25, DP_F32, DP_OP_SUM);
    case 7:
        return dp_all_to_all(ctx, &apart, 25, DP_F32);
    case 8:
        return add_up(ctx, 1 << 20);
    default:
        return dp_barrier(ctx);
    }
}

static const char *const differences[OTHER_CALLS] = {
    "all_reduce of 26 f32 (sum)",
    "all_reduce of 25 i32 (sum)",
    "all_reduce of 25 f32 (max)",
    "all_reduce of 25 f32 (sum times 0.5), in dp_all_reduce_scaled",
    "broadcast of 25 f32 (root 0)",
    "all_gather of 25 f32",
    "reduce_scatter of 25 f32 (sum)",
    "all_to_all of 25 f32",
    "all_reduce of 1048576 f32 (sum)",
    "all_reduce of 1 bool (max), in dp_barrier"};

/* At once: the time-out is far away. */
static inline void check_strays(int kind, bool large)
{
    char one[200], other[200];
    dp_ctx *ctx = mesh_open(1, 60000);
    dp_failure_info failure;
    time_t start = time(NULL);
    CHECK_OK(add_up(ctx, 25));
    dp_tag(ctx, "epoch 3");
    dp_status status = mesh_process == 1 ? something_else(ctx, kind)
                                         : add_up(ctx, large ? 1 << 19 : 25);
    snprintf(one, sizeof one, ") has issued %s, at 'epoch 3', and rank 0 (process 0, pid ",
             differences[kind]);
    snprintf(other, sizeof other,
             ") all_reduce of %d f32 (sum), at 'epoch 3': all must make the same calls in the same "
             "order",
             large ? 1 << 19 : 25);
    CHECK_ERROR(status, DP_ERR_REMOTE, "collective 2: rank 1 (process 1, pid ");
    CHECK_SAYS(dp_last_error(), one);
    CHECK_SAYS(dp_last_error(), other);
    CHECK(time(NULL) - start < 10);
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.rank, 1);
    CHECK_STATUS(dp_barrier(ctx), DP_ERR_REMOTE);
    dp_close(ctx);
}

static inline void other_root(void)
{
    dp_ctx *ctx = mesh_open(1, 60000);
    float data[3] = {0};
    const dp_part part = {.send = data, .recv = data};
    CHECK_ERROR(dp_broadcast(ctx, &part, 3, DP_F32, mesh_process == 1), DP_ERR_REMOTE,
                ") has issued broadcast of 3 f32 (root 1), and rank 0 (process 0, pid ");
    dp_close(ctx);
}

/* ---- what goes in every world ---------------------------------------------------------------- */

typedef struct mesh_case {
    const char *name;
    void (*run)(void);
} mesh_case;

static const mesh_case mesh_cases[] = {
    {"sums_of_several_pieces", sums_of_several_pieces},
    {"sums_that_some_want", sums_that_some_want},
    {"halves_of_several_pieces", halves_of_several_pieces},
    {"ranks_are_added_in_one_tree", ranks_are_added_in_one_tree},
    {"moves_of_several_pieces", moves_of_several_pieces},
    {"gradients_travel_beside_other_collectives", gradients_travel_beside_other_collectives},
    {"steps_of_shares_are_those_of_the_whole", steps_of_shares_are_those_of_the_whole},
    {"two_contexts", two_contexts}};

enum { MESH_CASES = sizeof mesh_cases / sizeof mesh_cases[0] };

#endif /* MESH_CASES_H */
