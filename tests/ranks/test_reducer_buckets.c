/* test_reducer_buckets.c - how the buckets of a reducer travel: in place, flat, as halves, by
   hooks. */

#include <pthread.h>
#include <stdatomic.h>
#include "methods.h"
#include "examples/custom_device.h"
#include "decorator.h"
#include "grads.h"
#include "lazy.h"

static dp_ctx *ctx_of(meeting *m, int device_count, const dp_device_ops *ops)
{
    return m != NULL ? open_job(m, device_count, ops) : open_here(device_count);
}

/* ---- halves on the wire ---------------------------------------------------------------------- */

/* torch's fp16_compress gives 0.14990234375 for 0.1 and 0.2. */
static void halves(dp_ctx *ctx, dp_dtype wire, dp_reduction reduction, double want)
{
    grads g;
    grads_begin(&g, ctx, 13);
    grads_create(&g, (dp_reducer_config){.reduction = reduction, .buckets.wire = wire});
    for (int pass = 0; pass < 2; pass++) {
        grads_fill(&g, 0);
        grads_add(&g, 0.1f);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        report(&g, 0);
        CHECK_OK(dp_reducer_finish(g.reducer));
        grads_pull(&g);
        for (int i = 0; i < g.info.local_count; i++) {
            for (size_t k = 0; k < g.count; k++) {
                CHECK_F64(g.local[i][k], want, 0);
            }
        }
    }
    grads_end(&g);
}

static void halves_in_processes(meeting *m)
{
    halves(ctx_of(m, 1, dp_cpu()), DP_F16, DP_MEAN_RANKS, 0.14990234375);
}

static void short_halves_in_processes(meeting *m)
{
    halves(ctx_of(m, 1, dp_cpu()), DP_BF16, DP_MEAN_RANKS, 0.150390625);
}

static void halves_on_toys(meeting *m)
{
    halves(ctx_of(m, 1, toy_device()), DP_F16, DP_SUM_RANKS, 0.2998046875);
}

TEST(halves_on_the_wire)
{
    halves(open_here(2), DP_F16, DP_MEAN_RANKS, 0.14990234375);
    halves(open_here(2), DP_BF16, DP_MEAN_RANKS, 0.150390625);
    halves(open_here(2), DP_F16, DP_SUM_RANKS, 0.2998046875);
    in_processes(2, halves_in_processes);
    in_processes(2, short_halves_in_processes);
    in_processes(2, halves_on_toys);
    in_processes_on(toy_device(), 2, halves_on_toys);
}

/* Alone nothing travels, so nothing is rounded. */
TEST(no_wire_in_a_world_of_one)
{
    halves(open_here(1), DP_F16, DP_MEAN_RANKS, (double)0.1f);
}

typedef struct kinds { /* of every dtype that matters */
    float f32[3];
    double f64[3];
    uint16_t f16[3];
    int32_t i32[3];
} kinds;

/* Only what is wider travels in halves; what f16 cannot hold is infinite, and bf16 can. */
static void every_dtype(dp_ctx *ctx, dp_dtype wire, bool hooked)
{
    static kinds data[RANKS];
    void *local[4][RANKS];
    dp_reducer *reducer;
    dp_bucket_info bucket;
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    for (int i = 0; i < info.local_count; i++) {
        data[i] = (kinds){.f32 = {1, 70000, 0.125f + 0x1p-20f},
                          .f64 = {3, -70000, 0x1p-30},
                          .f16 = {0x3c01, 0, 0},
                          .i32 = {1, 70001, -3}};
        local[0][i] = data[i].f32;
        local[1][i] = data[i].f64;
        local[2][i] = data[i].f16;
        local[3][i] = data[i].i32;
    }
    const dp_block blocks[] = {
        {DP_F32, 3, local[0]}, {DP_F64, 3, local[1]}, {DP_F16, 3, local[2]}, {DP_I32, 3, local[3]}};
    CHECK_OK(dp_reducer_create(
        ctx,
        &(dp_reducer_config){.blocks = blocks,
                             .block_count = 4,
                             .reduction = DP_SUM_RANKS,
                             .buckets = {.wire = wire, .hook = hooked ? plain_hook : NULL}},
        &reducer));
    CHECK_OK(dp_reducer_bucket_get(reducer, 1, &bucket));
    CHECK_INT(bucket.dtype, DP_F64);
    CHECK_INT(bucket.bytes, 24);
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    for (uint32_t unit = 0; unit < 4; unit++) {
        for (int i = 0; i < info.local_count; i++) {
            CHECK_OK(dp_reducer_ready(reducer, i, unit, NULL));
        }
    }
    CHECK_OK(dp_reducer_finish(reducer));
    const kinds *got = &data[info.local_count - 1];
    bool half = wire == DP_F16;
    CHECK_F64(got->f32[0], 2, 0);
    CHECK_F64(got->f32[1], half ? (double)INFINITY : 140288, 0);
    CHECK_F64(got->f32[2], 0.25, 0);
    CHECK_F64(got->f64[0], 6, 0);
    CHECK_F64(got->f64[1], half ? -(double)INFINITY : -140288, 0);
    CHECK_F64(got->f64[2], half ? 0 : 0x1p-29, 0);
    CHECK_INT(got->f16[0], 0x4001);
    CHECK_INT(got->i32[1], 140002);
    CHECK_INT(got->i32[2], -6);
    CHECK_INT(info_of(reducer).last.bytes, (3 + 3 + 3) * 2 + 3 * 4);
    dp_close(ctx);
}

static void every_dtype_in_processes(meeting *m)
{
    every_dtype(ctx_of(m, 1, dp_cpu()), DP_F16, false);
}

static void every_dtype_by_hook(meeting *m)
{
    every_dtype(ctx_of(m, 1, dp_cpu()), DP_BF16, true);
}

TEST(only_wide_dtypes_travel_as_halves)
{
    every_dtype(open_here(2), DP_F16, false);
    every_dtype(open_here(2), DP_BF16, false);
    in_processes(2, every_dtype_in_processes);
    every_dtype(open_here(2), DP_F16, true); /* the others are hooked as they lie */
    in_processes(2, every_dtype_by_hook);
}

/* ---- layouts, flat or not -------------------------------------------------------------------- */

enum { SHORTS = 300, SHORT = 10, GAP = 3, SHORTS_EACH = 10, SHORT_UNITS = SHORTS / SHORTS_EACH };

/* Many short ranges with gaps; a unit has ten of them, far apart. */
static const dp_range *short_ranges(void)
{
    static dp_range ranges[SHORTS];
    for (uint32_t i = 0; i < SHORTS; i++) {
        ranges[i] = (dp_range){
            .unit = i % SHORT_UNITS, .first = i * (SHORT + GAP), .count = i % 7 == 0 ? 0 : SHORT};
    }
    return ranges;
}

/* Unit 5 is used by nobody where units may be left out. */
static bool is_used(uint32_t unit, dp_unused unused)
{
    return unused == DP_UNUSED_ERROR || unit != 5;
}

static void check_shorts(const grads *g, dp_unused unused)
{
    const dp_range *ranges = short_ranges();
    grads_pull(g);
    for (int i = 0; i < g->info.local_count; i++) {
        float own = (float)(g->info.rank_first + i + 1), mean = (float)(g->info.rank_count + 1) / 2;
        for (size_t k = 0; k < g->count; k++) {
            const dp_range *range = &ranges[k / (SHORT + GAP)];
            bool inside = k < range->first + range->count && is_used(range->unit, unused);
            CHECK_F64(g->local[i][k], inside ? mean : own, 0);
        }
    }
}

static void short_passes(dp_ctx *ctx, dp_reducer_config config)
{
    grads g;
    grads_begin(&g, ctx, SHORTS * (SHORT + GAP));
    config.ranges = short_ranges();
    config.range_count = SHORTS;
    config.reduction = DP_MEAN_RANKS;
    config.buckets.first_bytes = 1000;
    config.buckets.bytes = 3000;
    grads_create(&g, config);
    for (int pass = 0; pass < 4; pass++) {
        grads_fill(&g, 0);
        grads_add(&g, 1);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        for (uint32_t unit = SHORT_UNITS; unit-- > 0;) {
            if (is_used(unit, config.unused_units)) {
                report(&g, unit);
            }
        }
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_shorts(&g, config.unused_units);
    }
    CHECK(info_of(g.reducer).regrouped);
    grads_end(&g);
}

static void all_ways(meeting *m, int device_count, const dp_device_ops *ops)
{
    for (int unused = DP_UNUSED_ERROR; unused <= DP_UNUSED_FIXED; unused++) {
        for (int way = 0; way < 4; way++) {
            short_passes(
                ctx_of(m, device_count, ops),
                (dp_reducer_config){.unused_units = (dp_unused)unused,
                                    .buckets = {.wire = way % 2 != 0 ? DP_F16 : DP_F32,
                                                .hook = way / 2 != 0 ? plain_hook : NULL}});
        }
    }
}

static void all_ways_in_processes(meeting *m)
{
    all_ways(m, 1 + m->process, dp_cpu());
}

static void all_ways_on_toys(meeting *m)
{
    all_ways(m, 2 - m->process, toy_device());
}

TEST_SLOW(short_ranges_in_all_ways, 30)
{
    all_ways(NULL, 1, dp_cpu());
    all_ways(NULL, 3, dp_cpu());
    all_ways(NULL, 2, lazy_device(toy_device()));
    in_processes(2, all_ways_in_processes);
    in_processes(2, all_ways_on_toys);
    in_processes_on(toy_device(), 2, all_ways_on_toys);
}

/* ---- counted collectives --------------------------------------------------------------------- */

static atomic_int all_reduce_count;

static dp_status counted_all_reduce(dp_comm *comm, const dp_coll_call *call)
{
    atomic_fetch_add(&all_reduce_count, call->dtype != DP_I64); /* which only speaks */
    return boot_coll()->run(comm, call);
}

static dp_status (*all_reduce_of_test)(dp_comm *comm,
                                       const dp_coll_call *call) = counted_all_reduce;

static dp_status run_of_test(dp_comm *comm, const dp_coll_call *call)
{
    return call->verb == DP_ALL_REDUCE ? all_reduce_of_test(comm, call)
                                       : meeting_coll()->run(comm, call);
}

static dp_status counted_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    static dp_coll_ops ops;
    dp_status status = meeting_coll()->open(host, config, out);
    ops = *meeting_coll();
    ops.run = run_of_test;
    if (status == DP_OK) {
        (*out)->ops = &ops;
    }
    return status;
}

static dp_ctx *open_counted(meeting *m, int device_count)
{
    dp_coll_ops ops = *meeting_coll();
    const dp_coll_ops *const colls[] = {&ops, NULL};
    dp_config config = config_of(m, device_count);
    dp_ctx *ctx = NULL;
    ops.open = counted_open;
    config.colls = colls;
    config.thread_count = device_count; /* whatever this process' share of the machine is */
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static pthread_t part_threads[4];

static void note_thread(int part, void *user)
{
    (void)user;
    part_threads[part] = pthread_self();
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* others might take the next part */
}

/* Workers are the caller's: they do nothing for the courier. */
static dp_status alone_all_reduce(dp_comm *comm, const dp_coll_call *call)
{
    const pthread_t *main = &part_threads[3];
    if (call->dtype == DP_F32 && pthread_equal(pthread_self(), *main) == 0) {
        comm->host->parallel(comm->host, 3, note_thread, NULL);
        for (int part = 0; part < 3; part++) {
            CHECK(pthread_equal(part_threads[part], pthread_self()) != 0);
        }
        atomic_fetch_add(&all_reduce_count, 1);
    }
    bool alone = call->dtype == DP_F64;
    for (int i = 0; i < 100 && alone; i++) { /* a worker may wake up too late */
        comm->host->parallel(comm->host, 3, note_thread, NULL);
        alone = pthread_equal(part_threads[0], part_threads[1]) != 0 &&
                pthread_equal(part_threads[1], part_threads[2]) != 0;
    }
    CHECK(!alone);
    return boot_coll()->run(comm, call);
}

static void courier_works_alone(meeting *m)
{
    grads g;
    all_reduce_of_test = alone_all_reduce;
    part_threads[3] = pthread_self();
    layers_begin(&g, open_counted(m, 2), 5, one_by_one);
    atomic_store(&all_reduce_count, 0);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    for (uint32_t unit = 0; unit < LAYERS; unit++) {
        report(&g, unit);
        await_early(g.reducer, unit + 1 < LAYERS ? unit + 1 : unit);
    }
    CHECK_OK(dp_reducer_finish(g.reducer));
    CHECK(atomic_load(&all_reduce_count) >= LAYERS - 1); /* the last one may be the caller's */
    double numbers[2] = {1, 1}; /* and afterwards the caller has its workers, whoever has carried */
    const dp_part parts[2] = {{.send = &numbers[0], .recv = &numbers[0]},
                              {.send = &numbers[1], .recv = &numbers[1]}};
    CHECK_OK(dp_all_reduce(g.ctx, parts, 1, DP_F64, DP_OP_SUM));
    grads_end(&g);
}

TEST(workers_do_nothing_for_the_courier)
{
    in_processes(2, courier_works_alone);
}

/* Runs of so many floats, with gaps, in one bucket: how many collectives it takes. */
static int collectives_of(dp_ctx *ctx, size_t run_count, size_t length, dp_dtype wire)
{
    dp_range ranges[8];
    grads g;
    for (uint32_t i = 0; i < run_count; i++) {
        ranges[i] = (dp_range){.unit = i, .first = i * (length + 1), .count = length};
    }
    grads_begin(&g, ctx, run_count * (length + 1));
    grads_create(&g, (dp_reducer_config){.ranges = ranges,
                                         .range_count = run_count,
                                         .reduction = DP_SUM_RANKS,
                                         .buckets.wire = wire});
    for (int pass = 0; pass < 2; pass++) {
        grads_fill(&g, 1);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        atomic_store(&all_reduce_count, 0);
        for (uint32_t i = 0; i < run_count; i++) {
            report(&g, i);
        }
        CHECK_OK(dp_reducer_finish(g.reducer));
        CHECK_F64(g.local[0][run_count * (length + 1) - 2], 2, 0);
        CHECK_INT(info_of(g.reducer).last.bytes,
                  run_count * length * (wire == DP_F32 ? sizeof(float) : 2));
    }
    CHECK_OK(dp_reducer_destroy(g.reducer));
    free(g.local[0]);
    return atomic_load(&all_reduce_count);
}

enum { SHORT_RUN = 4096 /* f32 that are not short any more */ };

static void counted(meeting *m)
{
    dp_ctx *ctx = open_counted(m, 1);
    CHECK_INT(collectives_of(ctx, 8, 3, DP_F32), 1);
    CHECK_INT(collectives_of(ctx, 1, 3, DP_F32), 1);
    CHECK_INT(collectives_of(ctx, 2, SHORT_RUN - 1, DP_F32), 1);
    CHECK_INT(collectives_of(ctx, 2, SHORT_RUN, DP_F32), 2);
    CHECK_INT(collectives_of(ctx, 8, SHORT_RUN, DP_F32), 8);
    CHECK_INT(collectives_of(ctx, 8, SHORT_RUN, DP_BF16), 1);
    dp_close(ctx);
}

TEST(a_bucket_of_short_runs_is_one_collective)
{
    in_processes(2, counted);
}

/* Where memory that other processes see, of those blocks that no scope has given back, goes on. */
static size_t shared_end(dp_ctx *ctx)
{
    char *next = dp_shared_alloc(dp_scope_begin(ctx), 1);
    CHECK(next != NULL);
    return (size_t)(uintptr_t)next;
}

/* Bytes that a reducer of these runs takes, also of memory that other processes see. */
static size_t room_of(dp_ctx *ctx, const test_allocator *counter, size_t length,
                      dp_reducer_config config)
{
    dp_range ranges[8];
    void *local[RANKS] = {0};
    dp_info info;
    dp_reducer *reducer;
    const dp_block block = {DP_F32, 8 * (length + 1), local};
    CHECK_OK(dp_info_get(ctx, &info));
    for (int i = 0; i < info.local_count; i++) {
        local[i] = malloc(block.count * sizeof(float));
    }
    for (uint32_t i = 0; i < 8; i++) {
        ranges[i] = (dp_range){.unit = i, .first = i * (length + 1), .count = length};
    }
    config.blocks = &block;
    config.block_count = 1;
    config.ranges = ranges;
    config.range_count = 8;
    config.reduction = DP_SUM_RANKS;
    size_t shared = shared_end(ctx), before = counter->live_bytes;
    CHECK_OK(dp_reducer_create(ctx, &config, &reducer));
    size_t after = counter->live_bytes;
    shared = info.process_count > 1 ? shared_end(ctx) - shared : 0;
    for (int i = 0; i < info.local_count; i++) {
        free(local[i]);
    }
    return after - before + shared;
}

enum { LONG_RUN = 100000, SPARE = 150000 /* bytes for lists and the like */ };

static dp_ctx *open_metered(meeting *m, test_allocator *counter)
{
    dp_config config = m != NULL ? config_of(m, 1) : (dp_config){.device_count = 2};
    dp_ctx *ctx = NULL;
    *counter = (test_allocator){0};
    config.allocator = test_allocator_of(counter);
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_reducer_create(ctx, &(dp_reducer_config){.reduction = DP_SUM_RANKS},
                               &(dp_reducer *){0}));
    return ctx;
}

/* Flat memory is for what may have to be flat, and holds one bucket: up to its cap and the largest
   unit. */
static void room_for_flat_buckets(meeting *m)
{
    const size_t run = LONG_RUN * sizeof(float), locals = m != NULL ? 1 : 2;
    const dp_reducer_config caps = {.buckets = {.first_bytes = run + 4, .bytes = 2 * run}};
    dp_reducer_config config = caps;
    test_allocator counter;
    dp_ctx *ctx = open_metered(m, &counter);
    CHECK(room_of(ctx, &counter, LONG_RUN, caps) < SPARE);
    CHECK(room_of(ctx, &counter, SHORT_RUN - 1, (dp_reducer_config){0}) <
          SPARE + (m != NULL ? 8 * SHORT_RUN * sizeof(float) * 5 / 4 : 0));
    config.buckets.wire = DP_F16;
    size_t halves = room_of(ctx, &counter, LONG_RUN, config);
    CHECK(halves >= locals * 3 * run / 2);
    CHECK(halves < locals * (3 * run / 2) * 5 / 4 + SPARE);
    config.buckets.wire = DP_F32;
    config.buckets.hook = plain_hook;
    size_t whole = room_of(ctx, &counter, LONG_RUN, config);
    CHECK(whole >= locals * 3 * run && whole < locals * 3 * run * 5 / 4 + SPARE);
    config.buckets.bytes = SIZE_MAX;
    size_t all = room_of(ctx, &counter, LONG_RUN, config);
    CHECK(all >= locals * 8 * run && all < locals * 8 * run * 5 / 4 + SPARE);
    dp_close(ctx);
}

TEST(flat_memory_is_one_bucket)
{
    room_for_flat_buckets(NULL);
    in_processes(2, room_for_flat_buckets);
}

/* ---- what a hook gets ------------------------------------------------------------------------ */

typedef struct witness {
    grads *g;
    pthread_t main;
    size_t calls;
    bool on_main; /* the first bucket was */
    dp_dtype dtype;
} witness;

/* Two buckets: units 0 and 1, which are one run, then 2 and 3, which are not. */
static dp_status look(const dp_bucket *bucket, void *user)
{
    witness *w = user;
    const float *own = (const float *)bucket->local[0].recv;
    CHECK_INT(bucket->index, w->calls % 2);
    CHECK(bucket->is_last == (bucket->index == 1));
    CHECK(bucket->ctx == w->g->ctx && bucket->reducer == w->g->reducer);
    CHECK_INT(bucket->dtype, w->dtype);
    CHECK_INT(bucket->info.dtype, DP_F32);
    CHECK_INT(bucket->op, DP_OP_MEAN);
    CHECK_F64(bucket->scale, 1, 0);
    CHECK_INT(bucket->info.unit_count, 2);
    CHECK_INT(bucket->info.units[0], bucket->index * 2 + (w->calls >= 2)); /* regrouped */
    CHECK_INT(bucket->count, bucket->index == 0 ? 8 : 5);
    CHECK_INT(bucket->info.range_count, 2);
    CHECK_INT(bucket->info.ranges[0].first, bucket->index == 0 ? 0 : 9);
    CHECK_INT(bucket->info.ranges[1].unit, bucket->index == 0 ? 1 : 3);
    for (int i = 0; i < w->g->info.local_count; i++) {
        CHECK(bucket->local[i].send == bucket->local[i].recv);
        CHECK(bucket->local[i].stream->dev == dp_local_stream(w->g->ctx, i)->dev);
    }
    if (w->dtype == DP_F32 && !w->g->has_own) {
        for (size_t k = 0; k < bucket->count; k++) {
            CHECK_F64(own[k], w->g->info.rank_first + 1, 0);
        }
        CHECK((own == w->g->local[0]) == (bucket->index == 0)); /* no copy of what is one run */
    }
    if (bucket->index == 0)
        w->on_main = pthread_equal(pthread_self(), w->main) != 0;
    w->calls++;
    return plain_hook(bucket, NULL);
}

static const dp_range four_units[] = {{.unit = 0, .count = 3},
                                      {.unit = 1, .first = 3, .count = 5},
                                      {.unit = 2, .first = 9, .count = 1},
                                      {.unit = 3, .first = 12, .count = 4}};

static void hook_begin(grads *g, dp_ctx *ctx, dp_reducer_config config)
{
    grads_begin(g, ctx, 16);
    config.name = "net";
    config.ranges = four_units;
    config.range_count = 4;
    config.buckets.first_bytes = config.buckets.bytes = 21;
    config.reduction = DP_MEAN_RANKS;
    grads_create(g, config);
}

/* early: so many buckets travel before the last units are reported. */
static dp_status hook_pass_after(const grads *g, size_t early)
{
    grads_fill(g, 0);
    grads_add(g, 1);
    CHECK_OK(dp_reducer_begin(g->reducer, NULL));
    report(g, 1);
    report(g, 0);
    if (early > 0)
        await_early(g->reducer, early);
    report(g, 3);
    report(g, 2);
    return dp_reducer_finish(g->reducer);
}

static dp_status hook_pass(const grads *g)
{
    return hook_pass_after(g, 0);
}

static void check_hook_pass(const grads *g)
{
    double mean = (g->info.rank_count + 1) / 2.0;
    grads_pull(g);
    for (int i = 0; i < g->info.local_count; i++) {
        CHECK_F64(g->local[i][0], mean, 0);
        CHECK_F64(g->local[i][7], mean, 0);
        CHECK_F64(g->local[i][8], g->info.rank_first + i + 1, 0);
        CHECK_F64(g->local[i][9], mean, 0);
        CHECK_F64(g->local[i][15], mean, 0);
    }
}

static void looked_at(dp_ctx *ctx, dp_dtype wire, bool on_main)
{
    grads g;
    witness w = {.g = &g, .main = pthread_self(), .dtype = wire};
    hook_begin(&g, ctx,
               (dp_reducer_config){.buckets = {.wire = wire, .hook = look, .hook_user = &w}});
    check_buckets(g.reducer, "0 1 | 2 3");
    for (int pass = 0; pass < 3; pass++) {
        CHECK_OK(hook_pass_after(&g, !on_main));
        check_hook_pass(&g);
        CHECK(w.on_main == on_main);
        CHECK_INT(w.calls, 2 * (pass + 1));
    }
    check_buckets(g.reducer, "1 0 | 3 2");
    CHECK_INT(info_of(g.reducer).last.bytes, 13 * dp_dtype_bytes(wire));
    grads_end(&g);
}

static void looked_at_in_processes(meeting *m)
{
    looked_at(open_job(m, 2, dp_cpu()), DP_F32, false);
}

static void halves_looked_at(meeting *m)
{
    looked_at(open_job(m, 1, dp_cpu()), DP_F16, false);
}

static void looked_at_on_toys(meeting *m)
{
    looked_at(open_job(m, 1, toy_device()), DP_F32, true);
}

TEST(a_hook_gets_each_bucket)
{
    looked_at(open_here(1), DP_F32, true);
    looked_at(open_here(2), DP_F32, true);
    looked_at(open_here(2), DP_BF16, true);
    in_processes(2, looked_at_in_processes);
    in_processes(2, halves_looked_at);
    in_processes(2, looked_at_on_toys);
    in_processes_on(toy_device(), 2, looked_at_on_toys);
}

/* A pass that is finished before an older one is the caller's, and so are its hooks. */
static void two_are_looked_at(meeting *m)
{
    static grads g[2];
    dp_ctx *ctx = open_job(m, 1, dp_cpu());
    witness w[2];
    for (int i = 0; i < 2; i++) {
        w[i] = (witness){.g = &g[i], .main = pthread_self(), .dtype = DP_F16};
        hook_begin(
            &g[i], ctx,
            (dp_reducer_config){.buckets = {.wire = DP_F16, .hook = look, .hook_user = &w[i]}});
    }
    for (int pass = 0; pass < 3; pass++) {
        for (int i = 0; i < 2; i++) {
            grads_fill(&g[i], 0);
            grads_add(&g[i], 1);
            CHECK_OK(dp_reducer_begin(g[i].reducer, NULL));
        }
        for (int i = 1; i >= 0; i--) {
            report(&g[i], 1);
            report(&g[i], 0);
            if (i == 0)
                await_early(g[i].reducer, 1);
            report(&g[i], 3);
            report(&g[i], 2);
            CHECK_OK(dp_reducer_finish(g[i].reducer));
            check_hook_pass(&g[i]);
            CHECK(w[i].on_main == (i == 1));
            CHECK_INT(w[i].calls, 2 * (pass + 1));
        }
    }
    CHECK_OK(dp_reducer_destroy(g[1].reducer));
    free(g[1].local[0]);
    grads_end(&g[0]);
}

TEST(hooks_of_two_reducers)
{
    in_processes(2, two_are_looked_at);
}

/* Unit 0 is used by nobody: zeros in the bucket, and nothing goes back. */
static dp_status zeros_first(const dp_bucket *bucket, void *user)
{
    size_t *calls = user;
    float *data = bucket->local[0].recv;
    CHECK_INT(bucket->count, 8);
    CHECK_INT(bucket->info.unit_count, 2);
    for (size_t i = 0; i < 8; i++) {
        CHECK_F64(data[i], i < 3 ? 0 : 2, 0);
    }
    data[0] = 77;
    ++*calls;
    return plain_hook(bucket, NULL);
}

static void a_unit_is_unused(dp_ctx *ctx)
{
    size_t calls = 0;
    grads g;
    hook_begin(&g, ctx,
               (dp_reducer_config){.unused_units = DP_UNUSED_FOUND,
                                   .buckets = {.hook = zeros_first, .hook_user = &calls}});
    for (size_t pass = 1; pass < 4; pass++) { /* units 2 and 3 are a bucket that does not travel */
        grads_fill(&g, 2);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        report(&g, 1);
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_all(&g, 2);
        CHECK_INT(calls, pass);
    }
    grads_end(&g);
}

static void unused_in_processes(meeting *m)
{
    a_unit_is_unused(open_job(m, 1, dp_cpu()));
}

TEST(unused_units_are_zeros_for_a_hook)
{
    a_unit_is_unused(open_here(1));
    in_processes(2, unused_in_processes);
}

/* ---- hooks that compress --------------------------------------------------------------------- */

/* Whole numbers in bytes, added up as i32, of one local rank. */
static dp_status as_bytes(const dp_bucket *bucket, void *user)
{
    int32_t whole[16];
    float *data = bucket->local[0].recv;
    const dp_part part = {.send = whole, .recv = whole};
    (void)user;
    for (size_t i = 0; i < bucket->count; i++) {
        whole[i] = (int32_t)(data[i] * 4);
    }
    DP_TRY(dp_bucket_all_reduce(bucket, &part, bucket->count, DP_I32, DP_OP_SUM, 1));
    for (size_t i = 0; i < bucket->count; i++) {
        data[i] = (float)whole[i] / 8;
    }
    return DP_OK;
}

/* Scaled by the greatest, then gathered: each rank adds up for itself. */
static dp_status quantized(const dp_bucket *bucket, void *user)
{
    float most = 0, *data = bucket->local[0].recv;
    uint8_t own[16], all[32];
    const dp_part one = {.send = &most, .recv = &most}, part = {.send = own, .recv = all};
    (void)user;
    for (size_t i = 0; i < bucket->count; i++) {
        most = data[i] > most ? data[i] : most;
    }
    DP_TRY(dp_bucket_all_reduce(bucket, &one, 1, DP_F32, DP_OP_MAX, 1));
    for (size_t i = 0; i < bucket->count; i++) {
        own[i] = (uint8_t)(data[i] / most * 100);
    }
    DP_TRY(dp_bucket_all_gather(bucket, &part, bucket->count, DP_U8));
    for (size_t i = 0; i < bucket->count; i++) {
        data[i] = (float)(all[i] + all[bucket->count + i]) * most / 200;
    }
    return DP_OK;
}

static void compressed_by(meeting *m, dp_status (*hook)(const dp_bucket *bucket, void *user),
                          size_t bytes)
{
    grads g;
    hook_begin(&g, open_job(m, 1, dp_cpu()), (dp_reducer_config){.buckets.hook = hook});
    for (int pass = 0; pass < 3; pass++) {
        CHECK_OK(hook_pass(&g));
        check_hook_pass(&g);
        CHECK_INT(info_of(g.reducer).last.bytes, bytes);
    }
    grads_end(&g);
}

static void whole_numbers(meeting *m)
{
    compressed_by(m, as_bytes, 13 * sizeof(int32_t));
}

static void gathered_bytes(meeting *m)
{
    compressed_by(m, quantized, 13 + 2 * sizeof(float));
}

/* Each rank adds up a part of its own: 7 of the first bucket's bytes, padded, go to each. */
static dp_status in_parts(const dp_bucket *bucket, void *user)
{
    size_t each = (bucket->count + 1) / 2;
    float *data = bucket->local[0].recv;
    uint8_t own[16] = {0}, parts[16], all[16];
    const dp_part to = {.send = own, .recv = parts}, from = {.send = parts, .recv = all};
    (void)user;
    for (size_t i = 0; i < bucket->count; i++) {
        own[i] = (uint8_t)(data[i] * 4);
    }
    DP_TRY(dp_bucket_all_to_all(bucket, &to, each, DP_U8));
    for (size_t i = 0; i < each; i++) {
        parts[i] = (uint8_t)(parts[i] + parts[each + i]);
    }
    DP_TRY(dp_bucket_all_gather(bucket, &from, each, DP_U8));
    for (size_t i = 0; i < bucket->count; i++) {
        data[i] = (float)all[i] / 8;
    }
    return DP_OK;
}

/* What is sent to all counts for each of them: 2 * 4 + 4 of the first bucket, 2 * 3 + 3. */
static void parts_of_bytes(meeting *m)
{
    compressed_by(m, in_parts, 2 * 4 + 4 + 2 * 3 + 3);
}

TEST(hooks_that_compress)
{
    in_processes(2, whole_numbers);
    in_processes(2, gathered_bytes);
    in_processes(2, parts_of_bytes);
}

/* With a scale: what the library itself would do for samples. */
static void samples_by_hook(dp_ctx *ctx)
{
    double samples[RANKS];
    grads g;
    grads_begin(&g, ctx, 5);
    grads_create(&g, (dp_reducer_config){.reduction = DP_MEAN_SAMPLES, .buckets.hook = plain_hook});
    for (int i = 0; i < g.info.local_count; i++) {
        samples[i] = 2;
    }
    grads_fill(&g, 3);
    CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){.samples = samples}));
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 1.5);
    grads_end(&g);
}

static void samples_in_processes(meeting *m)
{
    samples_by_hook(open_job(m, 2, dp_cpu()));
}

TEST(a_hook_may_scale)
{
    samples_by_hook(open_here(1));
    samples_by_hook(open_here(3));
    in_processes(2, samples_in_processes);
}

/* A hook works on all devices, whichever thread it is called on. */
static dp_status doubled(const dp_bucket *bucket, void *user)
{
    dp_info info;
    CHECK_OK(dp_info_get(bucket->ctx, &info));
    for (int i = 0; i < info.local_count; i++) {
        dp_tensor part = dp_wrap(bucket->local[i].recv, DP_F32, DP_SHAPE((int64_t)bucket->count));
        part.device = dp_local_device(bucket->ctx, i);
        dp_status status = dp_axpby(bucket->ctx, 2, &part, 0, &part, &part);
        if (status != DP_OK)
            return status;
    }
    return plain_hook(bucket, user);
}

static void double_by_hook(dp_ctx *ctx)
{
    grads g;
    grads_begin(&g, ctx, 7);
    grads_create(&g, (dp_reducer_config){.reduction = DP_MEAN_RANKS, .buckets.hook = doubled});
    grads_fill(&g, 1.25f);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 2.5);
    grads_end(&g);
}

static void double_in_processes(meeting *m)
{
    double_by_hook(open_job(m, 2, dp_cpu()));
}

TEST(a_hook_works_on_all_devices)
{
    double_by_hook(open_here(3));
    double_by_hook(open_on(toy_device(), 3));
    in_processes(2, double_in_processes);
}

/* ---- hooks that fail ------------------------------------------------------------------------- */

typedef enum fault {
    NO_FAULT,
    FAILS,
    FAILS_LATE,
    FAILS_MUTE,
    NO_COLLECTIVE,
    OTHER_COUNT,
    OTHER_DTYPE,
    OTHER_OP,
    OTHER_SCALE,
    OTHER_VERB,
    WRONG_CALL,
    FAULTS
} fault;

typedef struct culprit {
    fault now;
    int rank; /* -1: all are */
    int rank_first;
    size_t calls;
} culprit;

static dp_status do_wrong(const dp_bucket *bucket, fault now)
{
    float *data = bucket->local[0].recv;
    const dp_part part = {.send = data + 6, .recv = data}, none = {0};
    switch (now) {
    case FAILS:
        return dp_error(DP_ERR_INVALID, "no %s", "room");
    case FAILS_LATE:
        DP_TRY(plain_hook(bucket, NULL));
        return dp_error(DP_ERR_TIMEOUT, "too late");
    case FAILS_MUTE:
        return (dp_status)7;
    case OTHER_COUNT:
        return dp_bucket_all_reduce(bucket, bucket->local, 1, DP_F32, DP_OP_MEAN, 1);
    case OTHER_DTYPE:
        return dp_bucket_all_reduce(bucket, bucket->local, bucket->count, DP_I32, DP_OP_MEAN, 1);
    case OTHER_OP:
        return dp_bucket_all_reduce(bucket, bucket->local, bucket->count, DP_F32, DP_OP_MAX, 1);
    case OTHER_SCALE:
        return dp_bucket_all_reduce(bucket, bucket->local, bucket->count, DP_F32, DP_OP_MEAN, 0.5);
    case OTHER_VERB:
        CHECK_ERROR(dp_bucket_all_gather(bucket, &part, 2, DP_F32), DP_ERR_MISMATCH,
                    "dp_bucket_all_gather: the hook of 'net', bucket 0: rank ");
        CHECK_STATUS(plain_hook(bucket, NULL), DP_ERR_MISMATCH); /* it is too late */
        return DP_OK;
    case WRONG_CALL:
        CHECK_ERROR(dp_bucket_all_reduce(bucket, NULL, 1, DP_F32, DP_OP_SUM, 1), DP_ERR_INVALID,
                    "dp_bucket_all_reduce: local is NULL");
        CHECK_ERROR(dp_bucket_all_reduce(bucket, bucket->local, 1, DP_I32, DP_OP_SUM, 2),
                    DP_ERR_INVALID, "dp_bucket_all_reduce: i32 would be cut");
        CHECK_ERROR(dp_bucket_all_gather(NULL, &part, 1, DP_F32), DP_ERR_INVALID,
                    "dp_bucket_all_gather: bucket is NULL");
        return dp_bucket_all_reduce(bucket, &none, 1, DP_F32, DP_OP_SUM, 1);
    case NO_FAULT:
    case NO_COLLECTIVE:
    case FAULTS:
        break;
    }
    return DP_OK;
}

static dp_status faulty_hook(const dp_bucket *bucket, void *user)
{
    culprit *c = user;
    c->calls++;
    if (c->now != NO_FAULT && (c->rank < 0 || c->rank == c->rank_first)) {
        return do_wrong(bucket, c->now);
    }
    return plain_hook(bucket, NULL);
}

/* What finish says on all ranks if the hook of one is to blame, and where one process does all;
   NULL: nothing is wrong. */
typedef struct blame {
    const char *says, *alone;
    dp_status status;
} blame;

static const blame blames[FAULTS] = {
    [FAILS] = {"bucket 0: it failed on rank 1: no room: gradients are void",
               "bucket 0: it failed on rank 0: no room", DP_ERR_USER},
    [FAILS_LATE] = {"bucket 0: it failed on rank 1: too late",
                    "bucket 0: it failed on rank 0: too late", DP_ERR_USER},
    [FAILS_MUTE] = {"bucket 0: it failed on rank 1: a function of the user's failed",
                    "bucket 0: it failed on rank 0: a function of the user's failed", DP_ERR_USER},
    [NO_COLLECTIVE] = {"bucket 0: rank 1 returns, rank 0 all-reduces 8 f32, mean",
                       "bucket 0: it returned without a collective", DP_ERR_MISMATCH},
    [OTHER_COUNT] = {"rank 1 all-reduces 1 f32, mean, rank 0 all-reduces 8 f32, mean", NULL,
                     DP_ERR_MISMATCH},
    [OTHER_DTYPE] = {"rank 0 all-reduces 8 f32, mean, rank 1 all-reduces 8 i32, mean", NULL,
                     DP_ERR_MISMATCH},
    [OTHER_OP] = {"rank 0 all-reduces 8 f32, mean, rank 1 all-reduces 8 f32, max", NULL,
                  DP_ERR_MISMATCH},
    [OTHER_SCALE] = {"rank 1 scales by 0.5, rank 0 scales by 1", NULL, DP_ERR_MISMATCH},
    [OTHER_VERB] = {"rank 0 all-reduces 8 f32, mean, rank 1 all-gathers 2 f32:", NULL,
                    DP_ERR_MISMATCH},
    [WRONG_CALL] = {"it failed on rank 1: dp_bucket_all_reduce: send of local rank 0 is NULL",
                    "it failed on rank 0: dp_bucket_all_reduce: send of local rank 0 is NULL",
                    DP_ERR_USER}};

/* One rank does wrong in one pass; the next pass works. */
static void one_is_wrong(meeting *m)
{
    culprit c = {.rank = 1};
    grads g;
    hook_begin(&g, open_job(m, 1, dp_cpu()),
               (dp_reducer_config){.buckets = {.hook = faulty_hook, .hook_user = &c}});
    c.rank_first = g.info.rank_first;
    for (fault f = NO_FAULT; f < FAULTS; f++) {
        const blame *b = &blames[f];
        if (b->says == NULL) {
            continue;
        }
        c.now = f;
        c.calls = 0;
        CHECK_ERROR(hook_pass(&g), b->status, b->says);
        CHECK(strncmp(dp_last_error(), "dp_reducer_finish: the hook of 'net', bucket 0: ", 48) ==
              0);
        CHECK(!dp_failure(g.ctx, NULL));
        CHECK_INT(c.calls, 1); /* the second bucket did not travel */
        c.now = NO_FAULT;
        CHECK_OK(hook_pass(&g));
        check_hook_pass(&g);
    }
    grads_end(&g);
}

TEST_SLOW(a_hook_that_is_wrong_on_one_rank, 30)
{
    in_processes(2, one_is_wrong);
    in_processes(3, one_is_wrong);
    in_processes_on(toy_device(), 3, one_is_wrong);
}

static void all_are_wrong(dp_ctx *ctx)
{
    culprit c = {.rank = -1};
    grads g;
    hook_begin(&g, ctx, (dp_reducer_config){.buckets = {.hook = faulty_hook, .hook_user = &c}});
    for (fault f = NO_FAULT; f < FAULTS; f++) {
        if (blames[f].alone == NULL || (g.info.rank_first > 0 && f != NO_COLLECTIVE)) {
            continue;
        }
        c.now = f;
        CHECK_ERROR(hook_pass(&g), DP_ERR_USER, blames[f].alone);
        c.now = NO_FAULT;
        CHECK_OK(hook_pass(&g));
        check_hook_pass(&g);
    }
    grads_end(&g);
}

static void all_wrong_in_processes(meeting *m)
{
    culprit c = {.rank = -1};
    grads g;
    hook_begin(&g, open_job(m, 1, dp_cpu()),
               (dp_reducer_config){.buckets = {.hook = faulty_hook, .hook_user = &c}});
    c.now = FAILS; /* all say what the first one does */
    CHECK_ERROR(hook_pass(&g), DP_ERR_USER, "bucket 0: it failed on rank 0: no room");
    c.now = NO_COLLECTIVE;
    CHECK_ERROR(hook_pass(&g), DP_ERR_USER, "bucket 0: it returned without a collective");
    c.now = NO_FAULT;
    CHECK_OK(hook_pass(&g));
    check_hook_pass(&g);
    grads_end(&g);
}

TEST(a_hook_that_is_wrong_everywhere)
{
    all_are_wrong(open_here(1));
    all_are_wrong(open_here(2));
    in_processes(2, all_wrong_in_processes);
}

/* ---- what a hook may call -------------------------------------------------------------------- */

typedef struct intruder {
    grads *g;
    dp_reducer *other;
    const dp_bucket *bucket; /* of the last call */
    dp_bucket copy;
} intruder;

static void *use_from_elsewhere(void *user)
{
    CHECK_ERROR(plain_hook(user, NULL), DP_ERR_STATE,
                "dp_bucket_all_reduce: it is for the hook of 'net', which this is not in");
    return NULL;
}

static dp_status intrude(const dp_bucket *bucket, void *user)
{
    intruder *in = user;
    dp_ctx *ctx = bucket->ctx;
    dp_reducer *reducer = NULL;
    pthread_t thread;
    float one = 1;
    const dp_part parts[] = {{.send = &one, .recv = &one}, {.send = &one, .recv = &one}};
    CHECK_ERROR(dp_all_reduce(ctx, parts, 1, DP_F32, DP_OP_SUM), DP_ERR_STATE,
                "dp_all_reduce: the hook of 'net' called it");
    CHECK_ERROR(dp_run(ctx, NULL, run_nothing, NULL), DP_ERR_STATE, "dp_run: the hook of 'net'");
    CHECK_ERROR(dp_reducer_begin(in->other, NULL), DP_ERR_STATE, "the hook of 'net' called it");
    CHECK_ERROR(dp_reducer_finish(bucket->reducer), DP_ERR_STATE, "the hook of 'net' called it");
    CHECK_ERROR(dp_reducer_destroy(in->other), DP_ERR_STATE, "the hook of 'net' called it");
    CHECK_ERROR(dp_reducer_create(ctx, &(dp_reducer_config){.reduction = DP_SUM_RANKS}, &reducer),
                DP_ERR_STATE, "the hook of 'net' called it");
    dp_close(ctx);
    CHECK(strstr(dp_last_error(), "in use by the hook of 'net'") != NULL);
    CHECK_INT(pthread_create(&thread, NULL, use_from_elsewhere, (void *)(uintptr_t)bucket), 0);
    pthread_join(thread, NULL);
    CHECK_STR(info_of(bucket->reducer).name, "net");
    in->bucket = bucket;
    in->copy = *bucket;
    return plain_hook(&in->copy, NULL); /* a copy does as well */
}

static void intruded(dp_ctx *ctx)
{
    grads g;
    intruder in = {.g = &g};
    CHECK_OK(dp_reducer_create(ctx, &(dp_reducer_config){.reduction = DP_SUM_RANKS}, &in.other));
    hook_begin(&g, ctx, (dp_reducer_config){.buckets = {.hook = intrude, .hook_user = &in}});
    CHECK_OK(hook_pass(&g));
    check_hook_pass(&g);
    CHECK_ERROR(plain_hook(in.bucket, NULL), DP_ERR_STATE, "which this is not in");
    CHECK_ERROR(plain_hook(&in.copy, NULL), DP_ERR_STATE, "which this is not in");
    CHECK_OK(dp_reducer_destroy(g.reducer));
    CHECK_ERROR(plain_hook(&in.copy, NULL), DP_ERR_STATE, "the reducer was destroyed already");
    g.reducer = NULL;
    grads_end(&g);
}

static void intruded_in_processes(meeting *m)
{
    intruded(open_job(m, 1, dp_cpu()));
}

TEST(calls_in_and_around_a_hook)
{
    intruded(open_here(2));
    in_processes(2, intruded_in_processes);
}

/* ---- the job fails in a hook ----------------------------------------------------------------- */

static dp_status leave_or_reduce(const dp_bucket *bucket, void *user)
{
    const meeting *m = user;
    if (m->process == 1) {
        _exit(EXIT_SUCCESS);
    }
    dp_status status = plain_hook(bucket, NULL);
    CHECK(dp_status_class(status) == DP_CLASS_JOB);
    return DP_OK; /* that is not the hook's to decide */
}

static void one_leaves_in_its_hook(meeting *m)
{
    grads g;
    hook_begin(&g, open_job(m, 1, dp_cpu()),
               (dp_reducer_config){.buckets = {.hook = leave_or_reduce, .hook_user = m}});
    wait_for_all(m);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    for (uint32_t unit = 0; unit < 4; unit++) { /* it may have happened before the last of them */
        dp_status status = dp_reducer_ready(g.reducer, 0, unit, NULL);
        CHECK(status == DP_OK || status == DP_ERR_REMOTE);
    }
    CHECK_STATUS(dp_reducer_finish(g.reducer), DP_ERR_REMOTE);
    CHECK(dp_failure(g.ctx, NULL));
    grads_end(&g);
}

TEST(a_process_leaves_in_a_hook)
{
    in_processes(2, one_leaves_in_its_hook);
    in_processes(3, one_leaves_in_its_hook);
}

/* ---- ranks that disagree, and memory --------------------------------------------------------- */

static void other_travel(meeting *m)
{
    const int64_t count = 8;
    dp_tensor data;
    dp_ctx *ctx = open_job(m, 1, dp_cpu());
    dp_scope *scope = dp_scope_begin(ctx); /* ends with the context */
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &data));
    const dp_block block = {DP_F32, 8, (void *[]){data.data}};
    for (int difference = 0; difference < 3; difference++) {
        bool odd = m->process == 1;
        const dp_reducer_config config = {
            .blocks = &block,
            .block_count = 1,
            .reduction = DP_SUM_RANKS,
            .buckets = {.wire = odd && difference == 0 ? DP_F16 : DP_BF16,
                        .hook = odd && difference == 1 ? NULL : plain_hook}};
        dp_reducer *reducer = NULL;
        dp_status status = dp_reducer_create(ctx, &config, &reducer);
        CHECK_INT(status, difference == 2 ? DP_OK : DP_ERR_MISMATCH);
        if (difference < 2)
            CHECK_STR(dp_last_error(),
                      difference == 0
                          ? "dp_reducer_create: rank 1 has wire f16, rank 0 has wire bf16"
                          : "dp_reducer_create: rank 1 has no hook, rank 0 has a hook");
    }
    dp_close(ctx);
}

TEST(ranks_with_another_wire_or_hook)
{
    in_processes(2, other_travel);
}

TEST(wires_that_are_none)
{
    static const dp_dtype wrong[] = {DP_F64, DP_I8, DP_BOOL, (dp_dtype)99, (dp_dtype)-1};
    dp_ctx *ctx = open_here(1);
    dp_reducer *reducer = NULL;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_ERROR(dp_reducer_create(
                        ctx,
                        &(dp_reducer_config){.reduction = DP_SUM_RANKS, .buckets.wire = wrong[i]},
                        &reducer),
                    DP_ERR_INVALID, "not 0, DP_F16 or DP_BF16");
    }
    dp_close(ctx);
}

static dp_status create_and_use(dp_ctx *ctx, dp_reducer_config config)
{
    static float data[2][16];
    const dp_block block = {DP_F32, 16, (void *[]){data[0], data[1]}};
    dp_reducer *reducer = NULL;
    config.blocks = &block;
    config.block_count = 1;
    config.ranges = four_units;
    config.range_count = 4;
    config.reduction = DP_SUM_RANKS;
    DP_TRY(dp_reducer_create(ctx, &config, &reducer));
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    for (uint32_t unit = 0; unit < 4; unit++) {
        CHECK_OK(dp_reducer_ready(reducer, 0, unit, NULL));
        CHECK_OK(dp_reducer_ready(reducer, 1, unit, NULL));
    }
    CHECK_OK(dp_reducer_finish(reducer));
    return dp_reducer_destroy(reducer);
}

TEST(every_allocation_fails_once)
{
    const dp_reducer_config config = {.buckets = {.wire = DP_F16, .hook = plain_hook}};
    bool failed = true;
    size_t failures = 0;
    for (; failed; failures += failed) {
        test_allocator counter = {0};
        dp_ctx *ctx = NULL;
        CHECK_OK(dp_open(&(dp_config){.device_count = 2,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        counter.fail_at = counter.call_count + 1 + failures;
        failed = create_and_use(ctx, config) == DP_ERR_NO_MEMORY;
        CHECK(failed == (counter.fail_count > 0));
        CHECK_OK(create_and_use(ctx, config));
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
    CHECK(failures > 10);
}

static const dp_coll_ops *const *colls_of_dp(void)
{
    static const dp_coll_ops *colls[2];
    colls[0] = dp_shm_coll();
    return colls;
}

/* The nth call of process 1's allocator fails: either both know that it could not create it, or the
   job is over for both. */
static void one_has_no_memory(meeting *m)
{
    const dp_reducer_config config = {.buckets = {.wire = DP_BF16, .hook = plain_hook}};
    bool failed = true;
    size_t failures = 0;
    for (; failed; failures++) {
        test_allocator counter = {0};
        dp_config open = config_of(m, 2);
        dp_ctx *ctx = NULL;
        open.colls = colls_of_dp();
        open.poison = true;
        open.allocator = test_allocator_of(&counter);
        CHECK_OK(dp_open(&open, &ctx));
        counter.fail_at = m->process == 1 ? counter.call_count + 1 + failures : 0;
        dp_status status = create_and_use(ctx, config);
        failed = status != DP_OK;
        CHECK(m->process == 0 || failed == (counter.fail_count > 0));
        if (dp_status_class(status) == DP_CLASS_JOB) {
            CHECK(dp_failure(ctx, NULL));
        } else if (failed) {
            CHECK_INT(status, DP_ERR_NO_MEMORY);
            CHECK(strstr(dp_last_error(), "dp_reducer_create: rank 2: ") == dp_last_error());
            CHECK_OK(create_and_use(ctx, config));
        }
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
    CHECK(failures > 10);
}

TEST_SLOW(no_memory_in_one_process, 30)
{
    in_processes(2, one_has_no_memory);
}

static dp_status try_to_use(dp_ctx *ctx, dp_reducer_config config)
{
    static float data[16]; /* the courier may be at it until dp_close */
    const dp_block block = {DP_F32, 16, (void *[]){data}};
    dp_reducer *reducer = NULL;
    for (int i = 0; i < 16; i++) {
        data[i] = 3;
    }
    config.blocks = &block;
    config.block_count = 1;
    config.ranges = four_units;
    config.range_count = 4;
    config.reduction = DP_SUM_RANKS;
    DP_TRY(dp_reducer_create(ctx, &config, &reducer));
    DP_TRY(dp_reducer_begin(reducer, NULL));
    for (uint32_t unit = 0; unit < 4; unit++) {
        DP_TRY(dp_reducer_ready(reducer, 0, unit, NULL));
    }
    DP_TRY(dp_reducer_finish(reducer));
    CHECK_F64(data[15], 6, 0);
    return dp_reducer_destroy(reducer);
}

/* The nth call of process 1's table fails, on its thread or on the courier's: both learn of it,
   unless the other one has all that it needs by then. */
static void one_table_fails(meeting *m, dp_reducer_config config)
{
    char fired[2] = {0, 1}, own = 1;
    for (long n = 1; fired[1] != 0; n++) {
        const dp_device_ops *const backends[] = {decorate_device(dp_cpu()), NULL};
        dp_config open = config_of(m, 1);
        dp_ctx *ctx = NULL;
        open.colls = colls_of_dp();
        open.backends = backends;
        CHECK_OK(dp_open(&open, &ctx));
        deco.fail_with = DP_ERR_NO_MEMORY;
        deco.fail_at = m->process == 1 ? deco.call_count + n : 0;
        dp_status status = try_to_use(ctx, config);
        bool over = dp_status_class(status) == DP_CLASS_JOB;
        if (m->process == 1) {
            CHECK(deco.fired == (status != DP_OK));
            CHECK(over || status == (deco.fired ? DP_ERR_NO_MEMORY : DP_OK));
        } else {
            CHECK(over || status == DP_OK || status == DP_ERR_NO_MEMORY);
        }
        own = deco.fired;
        dp_close(ctx);
        CHECK_DECORATOR();
        CHECK_OK(meeting_all_gather(&own, fired, 1, m));
    }
}

static void one_table_fails_flat(meeting *m)
{
    one_table_fails(m, (dp_reducer_config){0});
}

static void one_table_fails_in_halves(meeting *m)
{
    one_table_fails(m, (dp_reducer_config){.buckets.wire = DP_F16});
}

static void one_table_fails_by_hook(meeting *m)
{
    one_table_fails(m, (dp_reducer_config){.buckets = {.wire = DP_F16, .hook = plain_hook}});
}

TEST_SLOW(the_nth_call_fails_in_one_process, 60)
{
    in_processes(2, one_table_fails_flat);
    in_processes(2, one_table_fails_in_halves);
    in_processes(2, one_table_fails_by_hook);
}

static void steady(dp_ctx *ctx, test_allocator *counter, dp_reducer_config config)
{
    size_t calls = 0;
    grads g;
    hook_begin(&g, ctx, config);
    for (int pass = 0; pass < 6; pass++) {
        calls = pass == 3 ? counter->call_count : calls;
        CHECK_OK(hook_pass(&g));
    }
    CHECK_INT(counter->call_count, calls);
    grads_end(&g);
    CHECK_NO_LEAKS(counter);
}

static void steady_in_processes(meeting *m)
{
    for (int way = 0; way < 3; way++) {
        test_allocator counter = {0};
        dp_config config = config_of(m, 2);
        dp_ctx *ctx;
        config.allocator = test_allocator_of(&counter);
        CHECK_OK(dp_open(&config, &ctx));
        steady(ctx, &counter,
               (dp_reducer_config){.buckets = {.wire = way == 1 ? DP_F16 : DP_F32,
                                               .hook = way == 2 ? plain_hook : NULL},
                                   .unused_units = DP_UNUSED_FIXED});
    }
}

TEST(a_steady_pass_allocates_nothing)
{
    in_processes(2, steady_in_processes);
}

/* A stream of the user's goes when its pass is finished: the next pass knows nothing of it. */
TEST(a_stream_goes_after_its_pass)
{
    dp_ctx *ctx = open_on(decorate_device(toy_device()), 2);
    dp_stream *streams[2];
    grads g;
    hook_begin(&g, ctx, (dp_reducer_config){.unused_units = DP_UNUSED_FOUND});
    for (int i = 0; i < 2; i++) {
        dp_dev *dev = dp_local_stream(ctx, i)->dev;
        CHECK_OK(dev->ops->stream_create(dev, 0, &streams[i]));
    }
    grads_fill(&g, 1);
    for (int pass = 0; pass < 2; pass++) { /* in the second one nobody reports unit 0 */
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        for (int i = 0; i < 2 && pass == 0; i++) {
            CHECK_OK(dp_reducer_ready(g.reducer, i, 0, streams[i]));
        }
        report(&g, 1);
        CHECK_OK(dp_reducer_finish(g.reducer));
        CHECK_OK(dp_wait(ctx));
        for (int i = 0; i < 2 && pass == 0; i++) {
            streams[i]->dev->ops->stream_destroy(streams[i]);
        }
    }
    grads_end(&g);
    CHECK_DECORATOR();
}

/* Calls of the table in a pass of one unit, which travels as it lies. */
static size_t calls_of_a_pass(meeting *m, dp_reducer_config config)
{
    const dp_device_ops *const backends[] = {decorate_device(dp_cpu()), NULL};
    dp_config open = config_of(m, 1);
    dp_ctx *ctx = NULL;
    grads g;
    size_t before = 0, after = 0;
    open.backends = backends;
    CHECK_OK(dp_open(&open, &ctx));
    grads_begin(&g, ctx, 5);
    config.reduction = DP_SUM_RANKS;
    grads_create(&g, config);
    for (int pass = 0; pass < 2; pass++) { /* regrouped in the first one */
        before = deco.log_count;
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        report(&g, 0);
        CHECK_OK(dp_reducer_finish(g.reducer));
        after = deco.log_count;
    }
    grads_end(&g);
    CHECK_DECORATOR();
    return after - before;
}

/* The caller's streams are the caller's: on the courier ranks speak by plain memory. The table of
   collectives, which copies here, is called twice more. */
static void courier_speaks_in_memory(meeting *m)
{
    size_t plain = calls_of_a_pass(m, (dp_reducer_config){0});
    size_t hooked = calls_of_a_pass(m, (dp_reducer_config){.buckets.hook = plain_hook});
    CHECK_INT(hooked - plain, 2 * 4); /* copy_out, copy_in, and a wait for each of them */
}

TEST(the_courier_leaves_streams_to_the_caller)
{
    in_processes(2, courier_speaks_in_memory);
}

/* ---- to the first local rank ----------------------------------------------------------------- */

/* Nothing is written to others, unless a hook does. */
static void reduce_to_first(dp_ctx *ctx)
{
    const dp_reducer_config configs[] = {{.to_first = true},
                                         {.to_first = true, .buckets.first_bytes = 1},
                                         {.to_first = true, .buckets.wire = DP_F16},
                                         {.to_first = true, .unused_units = DP_UNUSED_FOUND},
                                         {.to_first = true, .buckets.hook = plain_hook}};
    for (size_t c = 0; c < sizeof configs / sizeof *configs; c++) {
        grads g;
        layers_begin(&g, ctx, c == 1 ? 5000 : 3, configs[c]);
        double mean = (g.info.rank_count + 1) / 2.0;
        for (int step = 1; step < 4; step++) {
            grads_fill(&g, 0);
            grads_add(&g, (float)step);
            one_pass(&g);
            grads_pull(&g);
            for (int i = 0; i < g.info.local_count; i++) {
                bool reduced = i == 0 || configs[c].buckets.hook != NULL;
                double want = step * (reduced ? mean : g.info.rank_first + i + 1);
                for (size_t k = 0; k < g.count; k++)
                    CHECK_F64(g.local[i][k], want, 1e-6 * want);
            }
        }
        CHECK_OK(dp_reducer_destroy(g.reducer));
        for (int i = 0; i < g.info.local_count; i++)
            free(g.local[i]);
    }
    dp_close(ctx);
}

static void reduce_to_first_of_each(meeting *m)
{
    reduce_to_first(open_job(m, 1 + m->process, dp_cpu()));
}

TEST(results_for_the_first_local_rank)
{
    for (int devices = 1; devices <= 4; devices++)
        reduce_to_first(open_here(devices));
    reduce_to_first(open_on(toy_device(), 3));
    in_processes(3, reduce_to_first_of_each);
}

/* ---- times ----------------------------------------------------------------------------------- */

static dp_status slow_hook(const dp_bucket *bucket, void *user)
{
    const int *ms = user;
    rest(ms[bucket->index]);
    return plain_hook(bucket, NULL);
}

/* The first bucket travels while this thread sleeps, the second while it waits in finish. */
static void timed(meeting *m)
{
    const int ms[] = {30, 60};
    grads g;
    hook_begin(
        &g, open_job(m, 1, dp_cpu()),
        (dp_reducer_config){.buckets = {.hook = slow_hook, .hook_user = (void *)(uintptr_t)ms}});
    CHECK_F64(info_of(g.reducer).last.travel_s, 0, 0);
    CHECK_OK(hook_pass(&g));
    double begun = now_ms();
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    report(&g, 1);
    report(&g, 0);
    await_early(g.reducer, 1);
    report(&g, 3);
    report(&g, 2);
    rest(20);
    double before_finish = now_ms() - begun;
    CHECK_OK(dp_reducer_finish(g.reducer));
    dp_reduce_times last = info_of(g.reducer).last;
    CHECK(last.compute_s >= 0.030 && last.compute_s < 5);
    CHECK(last.travel_s >= 0.090 && last.travel_s < 5);
    CHECK(last.hidden_s >= 0.030 && last.hidden_s <= last.travel_s);
    CHECK(last.hidden_s * 1e3 <= before_finish + 1); /* however busy the machine is */
    CHECK(last.finish_s > 0 && last.finish_s < 5);
    CHECK(last.hidden_s + last.finish_s > last.travel_s - 1e-6);
    CHECK_INT(last.bytes, 13 * sizeof(float));
    CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){.no_sync = true}));
    CHECK_OK(dp_reducer_finish(g.reducer)); /* is no reduced pass */
    CHECK_F64(info_of(g.reducer).last.travel_s, last.travel_s, 0);
    grads_end(&g);
}

static void timed_here(dp_ctx *ctx)
{
    const int ms[] = {10, 20};
    grads g;
    hook_begin(
        &g, ctx,
        (dp_reducer_config){.buckets = {.hook = slow_hook, .hook_user = (void *)(uintptr_t)ms}});
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    for (uint32_t unit = 0; unit < 4; unit++) {
        rest(unit == 3 ? 10 : 0);
        report(&g, unit);
    }
    CHECK_OK(dp_reducer_finish(g.reducer));
    dp_reduce_times last = info_of(g.reducer).last;
    CHECK(last.compute_s >= 0.010 && last.compute_s < 5);
    CHECK(last.travel_s >= 0.030 && last.travel_s <= last.finish_s);
    CHECK(last.finish_s < 5);
    CHECK_F64(last.hidden_s, 0, 0);
    grads_end(&g);
}

TEST(times_of_a_pass)
{
    timed_here(open_here(1));
    timed_here(open_here(2));
    in_processes(2, timed);
}

/* Nothing was reported, so there was nothing to compute. */
TEST(times_of_a_pass_without_reports)
{
    grads g;
    hook_begin(&g, open_here(2), (dp_reducer_config){.unused_units = DP_UNUSED_FOUND});
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    CHECK_OK(dp_reducer_finish(g.reducer));
    CHECK_F64(info_of(g.reducer).last.compute_s, 0, 0);
    CHECK_INT(info_of(g.reducer).last.bytes, 0);
    grads_end(&g);
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_halves_on_the_wire, 60)
{
    on_gpus("11", halves_in_processes);
    on_gpus("11", short_halves_in_processes);
}

TEST_SLOW(cuda_nccl_short_ranges_in_all_ways, 60)
{
    on_gpus("12", all_ways_in_processes);
}

TEST_SLOW(cuda_nccl_a_hook_gets_each_bucket, 60)
{
    on_gpus("11", looked_at_on_toys);
    on_gpus("21", looked_at_on_toys);
}

TEST_SLOW(cuda_nccl_a_hook_may_scale_and_work, 60)
{
    on_gpus("12", samples_in_processes);
    on_gpus("21", double_in_processes);
}

TEST_SLOW(cuda_nccl_a_hook_that_is_wrong, 60)
{
    on_gpus("11", one_is_wrong);
    on_gpus("111", one_is_wrong);
    on_gpus("11", all_wrong_in_processes);
}

TEST_SLOW(cuda_nccl_calls_in_and_around_a_hook, 60)
{
    on_gpus("11", intruded_in_processes);
}

TEST_SLOW(cuda_nccl_a_process_leaves_in_a_hook, 60)
{
    on_gpus("11", one_leaves_in_its_hook);
    on_gpus("111", one_leaves_in_its_hook);
}

TEST_SLOW(cuda_nccl_ranks_with_another_wire_or_hook, 60)
{
    on_gpus("11", other_travel);
}

TEST_SLOW(cuda_nccl_a_steady_pass_allocates_nothing, 60)
{
    on_gpus("21", steady_in_processes);
}

TEST_SLOW(cuda_nccl_results_for_the_first_local_rank, 60)
{
    on_gpus("123", reduce_to_first_of_each);
}
#endif
