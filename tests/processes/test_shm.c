/* test_shm.c - collectives between processes of one machine: what they compute, and who is named
   when one of the processes dies, stops, or does something else. That the table is a table like any
   other is tested in test_coll.c. */

#include <inttypes.h>
#include <pthread.h>
#include <sys/resource.h>
#include "grads.h"
#include "meeting.h"
#include "numbers.h"

enum { MOST = 9 };

static dp_ctx *shm_open_with(meeting *m, int device_count, int timeout_ms)
{
    static const dp_coll_ops *colls[2];
    colls[0] = dp_shm_coll();
    dp_ctx *ctx = NULL;
    dp_info info;
    CHECK_OK(
        dp_open(&(dp_config){.colls = colls,
                             .device_count = device_count,
                             .timeout_ms = timeout_ms,
                             .bootstrap = {meeting_all_gather, m, m->process, m->process_count}},
                &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, "shared memory");
    return ctx;
}

/* ---- what is computed: element i of rank r is sent[r][i % CYCLE] ----------------------------- */

typedef enum lies { OWN, SENT_SHARED, RECEIVED_SHARED, SHARED, SHARED_IN_SOME, LIES } lies;

typedef enum verb { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, VERBS } verb;

typedef struct call {
    verb verb;
    dp_dtype dtype;
    dp_op op;
    size_t count, off; /* bytes that all buffers lie off */
    int root;
    bool in_place;
    double scale;
    lies lies; /* what of it is in memory that all processes see */
} call;

typedef struct world {
    meeting *m;
    dp_ctx *ctx;
    dp_info info;
    char sent[MOST][CYCLE * 8], reduced[CYCLE * 8];
    char *send[2][MOST], *recv[2][MOST]; /* own, shared */
    size_t room;
} world;

static void world_open(world *w, meeting *m, int device_count, size_t room)
{
    memset(w, 0, sizeof(*w));
    w->m = m;
    w->ctx = shm_open_with(m, device_count, 0);
    CHECK_OK(dp_info_get(w->ctx, &w->info));
    CHECK(w->info.rank_count <= MOST);
    w->room = room;
    dp_scope *scope = dp_scope_begin(w->ctx);
    for (int i = 0; i < device_count; i++) {
        w->send[0][i] = malloc(room);
        w->recv[0][i] = malloc(room);
        w->send[1][i] = dp_shared_alloc(scope, room);
        w->recv[1][i] = dp_shared_alloc(scope, room);
        CHECK(w->send[0][i] != NULL && w->recv[0][i] != NULL);
        CHECK(w->send[1][i] != NULL && w->recv[1][i] != NULL);
    }
}

static void world_close(world *w)
{
    for (int i = 0; i < w->info.local_count; i++) {
        free(w->send[0][i]);
        free(w->recv[0][i]);
    }
    dp_close(w->ctx);
}

/* Digits that do not fit, so that the bits tell in which order they were added. */
static void make_numbers(world *w, const call *c, uint64_t state)
{
    const void *in[MOST];
    void *out = w->reduced;
    for (int r = 0; r < w->info.rank_count; r++) {
        in[r] = w->sent[r];
        for (size_t i = 0; i < CYCLE; i++) {
            uint64_t u = test_random(&state);
            number n = c->dtype <= DP_BF16   ? ldexpl((number)(int64_t)u, (int)(u % 5) - 63)
                       : c->dtype == DP_BOOL ? (number)(u & 1)
                                             : (number)(u % 50);
            number_put(c->dtype, w->sent[r], i, n);
        }
    }
    if (c->verb == ALL_REDUCE || c->verb == REDUCE_SCATTER)
        number_kernel(&(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                        .op = c->op == DP_OP_MEAN ? DP_OP_SUM : c->op,
                                        .dtype = c->dtype,
                                        .count = CYCLE,
                                        .out = &out,
                                        .in = in,
                                        .out_count = 1,
                                        .in_count = (size_t)w->info.rank_count,
                                        .alpha = c->scale,
                                        .beta = c->op == DP_OP_MEAN ? w->info.rank_count : 1});
}

static dp_status issue(const world *w, const call *c, const dp_part *parts)
{
    switch (c->verb) {
    case ALL_REDUCE:
        if (c->scale < 1)
            return dp_all_reduce_scaled(w->ctx, parts, c->count, c->dtype, c->op, c->scale);
        return dp_all_reduce(w->ctx, parts, c->count, c->dtype, c->op);
    case BROADCAST:
        return dp_broadcast(w->ctx, parts, c->count, c->dtype, c->root);
    case ALL_GATHER:
        return dp_all_gather(w->ctx, parts, c->count, c->dtype);
    case REDUCE_SCATTER:
        return dp_reduce_scatter(w->ctx, parts, c->count, c->dtype, c->op);
    case ALL_TO_ALL:
    case VERBS:
        break;
    }
    return dp_all_to_all(w->ctx, parts, c->count, c->dtype);
}

static dp_part part_of(world *w, const call *c, int i)
{
    size_t size = dp_dtype_bytes(c->dtype), rank = (size_t)(w->info.rank_first + i);
    size_t ranks = (size_t)w->info.rank_count, own = rank * c->count * size;
    bool many = c->verb == REDUCE_SCATTER || c->verb == ALL_TO_ALL;
    bool some = c->lies == SHARED || (c->lies == SHARED_IN_SOME && w->m->process % 2 == 0);
    char *send = w->send[some || c->lies == SENT_SHARED][i] + c->off;
    dp_part part = {.send = send, .recv = w->recv[some || c->lies == RECEIVED_SHARED][i] + c->off};
    CHECK((many || c->verb == ALL_GATHER ? ranks : 1) * c->count * size + c->off <= w->room);
    if (c->in_place && c->verb != ALL_TO_ALL) {
        part.recv = send + (c->verb == REDUCE_SCATTER ? own : 0);
        part.send = send + (c->verb == ALL_GATHER ? own : 0);
    }
    if (c->verb != BROADCAST || c->root == w->info.rank_first + i)
        lay_cycles((char *)(uintptr_t)part.send, w->sent[rank], 0, (many ? ranks : 1) * c->count,
                   size);
    return part;
}

static void check_part(const world *w, const call *c, int i, const dp_part *part, char *want)
{
    size_t size = dp_dtype_bytes(c->dtype), rank = (size_t)(w->info.rank_first + i);
    size_t block = c->count * size, count = c->count;
    if (c->verb == ALL_REDUCE)
        lay_cycles(want, w->reduced, 0, count, size);
    else if (c->verb == REDUCE_SCATTER)
        lay_cycles(want, w->reduced, rank * count, count, size);
    else if (c->verb == BROADCAST)
        lay_cycles(want, w->sent[c->root], 0, count, size);
    for (int r = 0; r < w->info.rank_count && (c->verb == ALL_GATHER || c->verb == ALL_TO_ALL); r++)
        lay_cycles(want + (size_t)r * block, w->sent[r], c->verb == ALL_TO_ALL ? rank * count : 0,
                   count, size);
    size_t blocks = c->verb == ALL_GATHER || c->verb == ALL_TO_ALL ? (size_t)w->info.rank_count : 1;
    if (memcmp(part->recv, want, blocks * block) == 0)
        return;
    size_t k = 0;
    while (((const char *)part->recv)[k] == want[k])
        k++;
    test_fail(__FILE__, __LINE__,
              "verb %d, %s, op %d, count %zu, root %d, off %zu, in place %d, lies %d: rank %zu of "
              "%d, element %zu is %.17Lg, wanted %.17Lg",
              (int)c->verb, dp_dtype_name(c->dtype), (int)c->op, c->count, c->root, c->off,
              c->in_place, (int)c->lies, rank, w->info.rank_count, k / size,
              number_get(c->dtype, part->recv, k / size), number_get(c->dtype, want, k / size));
}

static void check_call(world *w, const call *c, uint64_t state)
{
    dp_part parts[MOST];
    char *want = malloc(w->room);
    CHECK(want != NULL);
    make_numbers(w, c, state);
    for (int i = 0; i < w->info.local_count; i++)
        parts[i] = part_of(w, c, i);
    CHECK_OK(issue(w, c, parts));
    for (int i = 0; i < w->info.local_count; i++)
        check_part(w, c, i, &parts[i], want);
    free(want);
}

static const size_t small_counts[] = {0, 1, 3, 64, 1001};

static void every_form(meeting *m, int device_count)
{
    static world w;
    world_open(&w, m, device_count, (1001 * MOST + 8) * 8);
    for (int v = 0; v < VERBS; v++) {
        bool reduces = v == ALL_REDUCE || v == REDUCE_SCATTER;
        for (int i = 0; i < DP_DTYPE_COUNT * 5 * 5; i++) {
            call c = {.verb = (verb)v,
                      .dtype = (dp_dtype)(i % DP_DTYPE_COUNT),
                      .op = (dp_op)(i / DP_DTYPE_COUNT % 5),
                      .count = small_counts[i / DP_DTYPE_COUNT / 5],
                      .off = (size_t)i % 3,
                      .root = i % w.info.rank_count,
                      .in_place = i / 7 % 2 == 1,
                      .scale = 1};
            if ((reduces || c.op == DP_OP_SUM) && (c.dtype != DP_BOOL || c.op != DP_OP_MEAN))
                check_call(&w, &c, test_seed() + (uint64_t)i);
        }
    }
    world_close(&w);
}

static void one_each(meeting *m)
{
    every_form(m, 1);
}

static void two_each(meeting *m)
{
    every_form(m, 2);
}

static void one_two_three(meeting *m)
{
    every_form(m, 1 + m->process);
}

TEST_SLOW(every_form_between_processes_of_one_device, 60)
{
    in_processes(2, one_each);
    in_processes(4, one_each);
}

TEST_SLOW(every_form_between_processes_of_two_devices, 60)
{
    in_processes(2, two_each);
}

TEST_SLOW(every_form_between_processes_of_one_two_and_three_devices, 60)
{
    in_processes(3, one_two_three);
}

/* Counts at the borders: of what goes at once, of the smallest and the largest pieces, of all
   slots; and large and small ones in turn, so that what one left behind meets the next. */
static void every_border(meeting *m, int device_count)
{
    static const size_t borders[] = {65536, 65536 / 3, 98304, 262144, 1048576, 3000000};
    static world w;
    world_open(&w, m, device_count, ((size_t)6 << 20) + 8);
    uint64_t state = test_seed();
    for (int i = 0; i < 120 / test_stride(); i++) {
        uint64_t u = test_random(&state);
        call c = {.verb = (verb)(u % VERBS),
                  .dtype = (dp_dtype)(u / 7 % DP_DTYPE_COUNT),
                  .op = (dp_op)(u / 71 % 5),
                  .off = u / 357 % 2,
                  .root = (int)(u / 715 % (unsigned)w.info.rank_count),
                  .in_place = u / 7151 % 2,
                  .scale = 1,
                  .lies = (lies)(u / 273009 % LIES)};
        size_t bytes = borders[u / 14303 % 6], size = dp_dtype_bytes(c.dtype);
        c.count = bytes / size + u / 91003 % 3 - 1;
        if (c.verb > BROADCAST)
            c.count /= (size_t)w.info.rank_count;
        if (i % 3 == 2)
            c.count = u % 300;
        if (c.dtype == DP_BOOL && c.op == DP_OP_MEAN)
            c.op = DP_OP_MAX;
        if (c.verb == ALL_REDUCE && c.dtype <= DP_BF16 && u / 11 % 2)
            c.scale = 0.25;
        check_call(&w, &c, u);
    }
    for (int i = 0; i < VERBS * LIES * 2; i++) {
        call c = {.verb = (verb)(i % VERBS),
                  .dtype = DP_F32,
                  .op = DP_OP_SUM,
                  .count = 30001,
                  .root = i % w.info.rank_count,
                  .in_place = i / VERBS % 2 == 1,
                  .scale = 1,
                  .lies = (lies)(i / VERBS / 2)};
        check_call(&w, &c, test_seed() + (uint64_t)i);
    }
    world_close(&w);
}

static void borders_one(meeting *m)
{
    every_border(m, 1);
}

static void borders_two(meeting *m)
{
    every_border(m, 2);
}

static void borders_mixed(meeting *m)
{
    every_border(m, 3 - m->process);
}

TEST_SLOW(pieces_end_where_they_should_2x1, 60)
{
    in_processes(2, borders_one);
}

TEST_SLOW(pieces_end_where_they_should_4x1, 60)
{
    in_processes(4, borders_one);
}

TEST_SLOW(pieces_end_where_they_should_2x2, 60)
{
    in_processes(2, borders_two);
}

TEST_SLOW(pieces_end_where_they_should_3_2_1, 60)
{
    in_processes(3, borders_mixed);
}

/* ---- who is named ---------------------------------------------------------------------------- */

enum { COUNT = 25, LARGE = 700000 };

static float *numbers(void)
{
    static float *room;
    room = room != NULL ? room : test_room(2 * LARGE * sizeof *room);
    return room;
}

static dp_status sum_up(dp_ctx *ctx, size_t count)
{
    const dp_part part = {.send = numbers(), .recv = numbers()};
    return dp_all_reduce(ctx, &part, count, DP_F32, DP_OP_SUM);
}

static dp_part shared_part(dp_ctx *ctx)
{
    float *data = dp_shared_alloc(dp_scope_begin(ctx), LARGE * sizeof *data);
    CHECK(data != NULL);
    memset(data, 0, LARGE * sizeof *data);
    return (dp_part){.send = data, .recv = data};
}

/* KiB of buffers that this process has touched. */
static long buffers_touched(void)
{
    long touched = 0, size = 0;
    bool ours = false;
    char line[512];
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL) {
        long kib = 0;
        if (strstr(line, "-") != NULL && strchr(line, ':') != NULL && strchr(line, '/') != NULL)
            ours = strstr(line, "memfd:dp") != NULL;
        else if (sscanf(line, "Size: %ld", &size) == 1)
            ours = ours && size < 1 << 20; /* and not the heap */
        else if (ours && sscanf(line, "Rss: %ld", &kib) == 1)
            touched += kib;
    }
    fclose(maps);
    return touched;
}

static void nothing_is_copied(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    const dp_part part = shared_part(ctx);
    CHECK_OK(sum_up(ctx, COUNT));
    long before = buffers_touched();
    for (int i = 0; i < 3; i++)
        CHECK_OK(dp_all_reduce(ctx, &part, LARGE, DP_F32, DP_OP_SUM));
    CHECK(buffers_touched() - before < 64);
    CHECK_OK(sum_up(ctx, LARGE));
    CHECK(buffers_touched() - before > 256);
    dp_close(ctx);
}

TEST(what_lies_in_shared_memory_is_not_copied)
{
    in_processes(3, nothing_is_copied);
}

static bool is_shared(const void *data)
{
    uintptr_t first = 0, end = 0;
    bool shared = false;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL)
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &first, &end) == 2 && (uintptr_t)data >= first &&
            (uintptr_t)data < end)
            shared = strstr(line, "memfd:dp") != NULL;
    fclose(maps);
    return shared;
}

static dp_status give_one(dp_call *now)
{
    now->out = DP_DICT(now->scope, {"loss", dp_float(1)});
    return DP_OK;
}

static const void *seen[2]; /* gradients, by device */
static int first_rank;

static dp_status add_its_rank(dp_call *now)
{
    float *grad = dp_grad(now, 0);
    seen[now->device.index] = grad;
    for (size_t i = 0; i < LARGE; i++)
        grad[i] += (float)(first_rank + now->device.index + 1);
    return DP_OK;
}

/* Of a module, packed or not, and of its replica on a second device. */
static void gradients_are_shared(meeting *m)
{
    const dp_method methods[] = {{"forward", give_one}, {"backward", add_its_rank}};
    const dp_param_config weight = {.name = "w", .ndim = 1, .shape = {LARGE}};
    for (int packed = 0; packed < 2; packed++) {
        dp_ctx *ctx = shm_open_with(m, 2, TIMEOUT_MS);
        dp_module *net = NULL, *wrapper = NULL;
        dp_tensor grad;
        dp_value log;
        first_rank = dp_rank(ctx);
        CHECK_OK(dp_module_create(ctx,
                                  &(dp_module_config){.methods = methods,
                                                      .method_count = 2,
                                                      .params = &weight,
                                                      .param_count = 1,
                                                      .packed = packed == 1},
                                  &net));
        CHECK_OK(dp_distributed(net, NULL, &wrapper));
        dp_scope *step = dp_scope_begin(ctx);
        const dp_tensor rows = dp_wrap_const((const float[]){1, 1}, DP_F32, DP_SHAPE(2));
        dp_value batch = DP_DICT(step, {"x", dp_of(step, &rows)});
        CHECK_OK(dp_train_step(wrapper, step, batch, NULL, &log));
        CHECK_OK(dp_owner_grad(wrapper, 0, 0, &grad));
        CHECK(is_shared(grad.data) && !is_shared(dp_scope_alloc(dp_scope_begin(ctx), LARGE)));
        for (size_t i = 0; i < LARGE; i++)
            CHECK_F64(((const float *)grad.data)[i], 2.5, 0);
        CHECK(seen[0] != seen[1] && is_shared(seen[0]) && is_shared(seen[1]));
        dp_close(ctx);
    }
}

TEST(gradients_lie_in_shared_memory)
{
    in_processes(2, gradients_are_shared);
}

/* Without addresses for memory that all see there is memory of its own, and the same sums. */
static void few_addresses(meeting *m)
{
    struct rlimit limit;
    CHECK_INT(getrlimit(RLIMIT_AS, &limit), 0);
    limit.rlim_cur = (rlim_t)2 << 30;
    if (m->process == 1)
        CHECK_INT(setrlimit(RLIMIT_AS, &limit), 0);
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    const dp_part part = shared_part(ctx);
    float *data = part.recv;
    for (size_t i = 0; i < LARGE; i++)
        data[i] = (float)(i % 1000) + (float)m->process;
    long before = buffers_touched();
    CHECK_OK(dp_all_reduce(ctx, &part, LARGE, DP_F32, DP_OP_SUM));
    CHECK(buffers_touched() - before > 256);
    for (size_t i = 0; i < LARGE; i++)
        CHECK_F64(data[i], 2 * (double)(i % 1000) + 1, 0);
    dp_close(ctx);
}

TEST(memory_that_one_process_cannot_see_is_copied)
{
    if (WITH_ASAN || WITH_TSAN)
        test_skip("sanitizers take more addresses than there are");
    in_processes(2, few_addresses);
}

/* Where it is in what the others wait for, that is not told twice. */
static void check_told_once(void)
{
    unsigned collective = 0, in = 0;
    const char *begun = strstr(dp_last_error(), "collective ");
    const char *place = strstr(dp_last_error(), "it is in ");
    if (begun == NULL || place == NULL || sscanf(begun, "collective %u", &collective) != 1)
        return;
    if (sscanf(place, "it is in %u", &in) == 1)
        CHECK(in != collective);
    else
        CHECK_SAYS(place, "it is in that one");
}

/* Rank 1 is named for what comes of this, which is the last of the job. */
static void check_ends(dp_ctx *ctx, dp_status (*work)(dp_ctx *ctx), const char *what, int most_ms)
{
    double start = now_ms();
    check_named(ctx, work(ctx), start, most_ms, 1, what);
    check_told_once();
    dp_close(ctx);
}

static dp_status go_on(dp_ctx *ctx)
{
    dp_status status = DP_OK;
    const dp_part part = shared_part(ctx);
    for (int i = 0; i < 100000 && status == DP_OK; i++)
        status = i % 20 == 9 ? dp_all_reduce(ctx, &part, LARGE, DP_F32, DP_OP_SUM)
                             : sum_up(ctx, i % 20 == 19 ? LARGE : COUNT);
    return status;
}

static dp_status once(dp_ctx *ctx)
{
    return sum_up(ctx, COUNT);
}

/* Steps of a model whose gradients all processes see: buckets travel while it computes. */
static dp_status train_on(dp_ctx *ctx)
{
    dp_part part = shared_part(ctx);
    dp_reducer *reducer = NULL;
    const dp_block block = {DP_F32, LARGE, &part.recv};
    dp_reducer_config config = one_by_one;
    config.blocks = &block;
    config.block_count = 1;
    config.ranges = layers(LARGE / LAYERS);
    config.range_count = LAYERS;
    config.reduction = DP_MEAN_RANKS;
    dp_status status = dp_reducer_create(ctx, &config, &reducer);
    while (status == DP_OK) {
        status = dp_reducer_begin(reducer, NULL);
        for (uint32_t i = 0; i < LAYERS && status == DP_OK; i++)
            status = dp_reducer_ready(reducer, 0, i, NULL);
        if (status == DP_OK)
            status = dp_reducer_finish(reducer);
    }
    return status;
}

static void one_is_killed_in_a_step(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    signal_soon(m, SIGKILL);
    check_ends(ctx, train_on, "has died", SOON_MS);
}

static void one_is_killed(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    signal_soon(m, SIGKILL);
    check_ends(ctx, go_on, "has died", SOON_MS);
}

static void one_is_stopped(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    signal_soon(m, SIGSTOP);
    check_ends(ctx, go_on, "did not come within 2000 ms", LATE_MS);
}

TEST_SLOW(a_process_that_is_killed_is_named, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 10; i++) {
        moment = (int)(test_random(&state) % 200000);
        in_processes_but(2 + i % 3, 1, one_is_killed);
    }
}

TEST_SLOW(a_process_that_is_killed_in_a_step_is_named, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 10; i++) {
        moment = (int)(test_random(&state) % 50000);
        in_processes_but(2 + i % 3, 1, one_is_killed_in_a_step);
    }
}

TEST_SLOW(a_process_that_is_stopped_is_named, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 3; i++) {
        moment = (int)(test_random(&state) % 100000);
        in_processes_but(2 + i, 1, one_is_stopped);
    }
}

static dp_ctx *open_for_an_end(meeting *m)
{
    return shm_open_with(m, 1, END_TIMEOUT_MS);
}

TEST_SLOW(ends_are_the_same_over_shared_memory, 60)
{
    check_ends_over(open_for_an_end);
}

/* Slow is not dead. */
static void one_is_slow(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    for (int i = 0; i < 4; i++) {
        if (m->process == i % m->process_count)
            rest(300);
        CHECK_OK(sum_up(ctx, i % 2 ? LARGE : COUNT));
    }
    dp_close(ctx);
}

TEST_SLOW(a_process_that_is_slow_is_waited_for, 60)
{
    in_processes(3, one_is_slow);
}

static int difference;

static dp_status another(dp_ctx *ctx)
{
    const dp_part part = {.send = numbers(), .recv = numbers()};
    switch (difference) {
    case 0:
        return dp_all_reduce(ctx, &part, COUNT + 1, DP_F32, DP_OP_SUM);
    case 1:
        return dp_all_reduce(ctx, &part, COUNT, DP_F64, DP_OP_SUM);
    case 2:
        return dp_all_reduce(ctx, &part, COUNT, DP_F32, DP_OP_MAX);
    case 3:
        return dp_broadcast(ctx, &part, COUNT, DP_F32, 0);
    case 4:
        return dp_all_reduce_scaled(ctx, &part, COUNT, DP_F32, DP_OP_SUM, 0.5);
    default:
        return dp_all_reduce(ctx, &part, LARGE, DP_F32, DP_OP_SUM);
    }
}

/* With three ranks, the one is named that the two others do not agree with; with two, both are. */
static void one_differs(meeting *m)
{
    static const char *const said[] = {"26 f32",    "25 f64",          "(max)",
                                       "broadcast", "(sum times 0.5)", "700000 f32"};
    static const char first[] = "collective 2: rank 1 (process 1";
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    CHECK_OK(sum_up(ctx, COUNT));
    double start = now_ms();
    dp_status status = m->process == 1 ? another(ctx) : once(ctx);
    if (m->process_count > 2) {
        dp_failure_info failure;
        CHECK_SAYS(dp_last_error(), first);
        CHECK(dp_failure(ctx, &failure));
        CHECK_SAYS(failure.text, first);
    }
    check_named(ctx, status, start, SOON_MS, 1, said[difference]);
    dp_close(ctx);
}

TEST_SLOW(a_process_that_does_something_else_is_named, 60)
{
    for (difference = 0; difference < 6; difference++) {
        in_processes(2, one_differs);
        in_processes(3, one_differs);
    }
}

static void roots_differ(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    const dp_part part = {.send = numbers(), .recv = numbers()};
    CHECK_ERROR(dp_broadcast(ctx, &part, 5, DP_F32, m->process == 1), DP_ERR_REMOTE, "(root 1)");
    dp_close(ctx);
}

TEST(another_root_is_another_collective)
{
    in_processes(3, roots_differ);
}

static void one_closes(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    CHECK_OK(sum_up(ctx, COUNT));
    if (m->process == 1)
        dp_close(ctx);
    else
        check_ends(ctx, once, "has closed its context", SOON_MS);
}

/* Without a word: as if killed. */
static void one_leaves(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    CHECK_OK(sum_up(ctx, COUNT));
    if (m->process != 1)
        check_ends(ctx, once, "has died", SOON_MS);
}

TEST_SLOW(a_process_that_closes_early_is_told_from_one_that_dies, 60)
{
    in_processes(2, one_closes);
    in_processes(3, one_closes);
    in_processes(3, one_leaves);
}

/* Who has all that it needs does not mind that others have gone. */
static void all_close(meeting *m)
{
    for (int i = 0; i < 20; i++) {
        dp_ctx *ctx = shm_open_with(m, 1 + i % 2, TIMEOUT_MS);
        const dp_part parts[] = {{.send = numbers(), .recv = numbers()},
                                 {.send = numbers() + LARGE, .recv = NULL}};
        CHECK_OK(dp_all_reduce(ctx, parts, i % 3 == 0 ? LARGE : COUNT, DP_F32, DP_OP_MAX));
        dp_close(ctx);
    }
}

TEST_SLOW(all_close_at_their_own_time, 60)
{
    in_processes(2, all_close);
    in_processes(4, all_close);
}

static void *abort_soon(void *user)
{
    rest(100);
    dp_abort(user, DP_ERR_ABORTED, "enough after %d steps", 3);
    return NULL;
}

/* From another thread; it releases this process and all others. */
static void one_aborts(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, 30000);
    pthread_t thread;
    wait_for_all(m);
    if (m->process == 1) {
        CHECK_INT(pthread_create(&thread, NULL, abort_soon, ctx), 0);
        CHECK_STATUS(go_on(ctx), DP_ERR_ABORTED);
        pthread_join(thread, NULL);
        dp_close(ctx);
    } else {
        check_ends(ctx, m->process == 0 ? go_on : once, "enough after 3 steps", SOON_MS);
    }
}

/* It is heard without a collective, too. */
static void one_aborts_alone(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    CHECK_OK(sum_up(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 1)
        dp_abort(ctx, DP_ERR_DEVICE, "lost it");
    for (int i = 0; i < 1000 && dp_wait(ctx) == DP_OK; i++)
        rest(2);
    CHECK_ERROR(dp_wait(ctx), DP_ERR_DEVICE, "lost it");
    dp_close(ctx);
}

/* A device that is lost ends the job for all, and nobody has to wait for the time-out. */
static dp_status lost_sync(dp_stream *stream)
{
    (void)stream;
    return dp_error(DP_ERR_DEVICE, "the cable is out");
}

static void one_loses_its_device(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, 30000);
    dp_device_ops lost = *dp_cpu();
    dp_stream *stream = dp_local_stream(ctx, 0);
    CHECK_OK(sum_up(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 1) {
        lost.stream_sync = lost_sync;
        stream->dev->ops = &lost;
        rest(100); /* the others wait for it already */
        CHECK_ERROR(dp_wait(ctx), DP_ERR_DEVICE, "the cable is out");
        stream->dev->ops = dp_cpu();
        if (test_timeout_scale() < 4)
            rest((int)(SOON_MS * test_timeout_scale()) + 1000); /* they need not wait for that */
        dp_close(ctx);
    } else {
        check_ends(ctx, once, "the cable is out", SOON_MS);
    }
}

TEST_SLOW(a_failure_reaches_all, 60)
{
    in_processes(3, one_loses_its_device);
}

TEST_SLOW(an_abort_reaches_all, 60)
{
    in_processes(2, one_aborts);
    in_processes(3, one_aborts_alone);
}

/* ---- what stays ------------------------------------------------------------------------------ */

TEST_SLOW(nothing_is_left_behind, 60)
{
    int before = count_names("/dev/shm", "dp-");
    in_processes(2, all_close);
    moment = 20000;
    in_processes_but(3, 1, one_is_killed);
    check_names(before);
}

/* A child may only close, and its end is not its parent's. */
static void parents(meeting *m)
{
    dp_ctx *ctx = shm_open_with(m, 1, TIMEOUT_MS);
    int status = 0;
    CHECK_OK(sum_up(ctx, COUNT));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_STATUS(sum_up(ctx, COUNT), DP_ERR_STATE);
        dp_close(ctx);
        exit(EXIT_SUCCESS);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    rest(m->process == 0 ? 100 : 0);
    CHECK_OK(sum_up(ctx, LARGE));
    dp_close(ctx);
}

TEST_SLOW(children_of_fork_only_close, 60)
{
    in_processes(2, parents);
}

/* Two contexts at once, and one that lives while another goes. */
static void two_contexts(meeting *m)
{
    dp_ctx *a = shm_open_with(m, 1, TIMEOUT_MS), *b = shm_open_with(m, 1, TIMEOUT_MS);
    CHECK_OK(sum_up(a, COUNT));
    CHECK_OK(sum_up(b, LARGE));
    dp_close(a);
    rest(m->process == 1 ? 100 : 0);
    CHECK_OK(sum_up(b, COUNT));
    dp_close(b);
}

TEST_SLOW(contexts_share_nothing, 60)
{
    in_processes(3, two_contexts);
}
