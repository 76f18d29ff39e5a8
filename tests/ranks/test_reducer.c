/* test_reducer.c - gradients of the user's made equal on all ranks, of one process or several. */

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include "methods.h"
#include "examples/custom_device.h"
#include "grads.h"
#include "lazy.h"

/* ---- worked values --------------------------------------------------------------------------- */

/* torch: loss sum*(rank+1), then 10*(rank+1) without sync, then 100*(rank+1). */
static void steps_of_torch(dp_ctx *ctx)
{
    const dp_reduce_pass local = {.no_sync = true};
    grads g;
    grads_begin(&g, ctx, 37);
    grads_create(&g, (dp_reducer_config){.name = "net", .reduction = DP_MEAN_RANKS});
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    grads_add(&g, 1);
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 1.5);
    CHECK_OK(dp_reducer_begin(g.reducer, &local));
    grads_add(&g, 10);
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    grads_pull(&g);
    for (int i = 0; i < g.info.local_count; i++) {
        CHECK_F64(g.local[i][36], g.info.rank_first + i == 0 ? 11.5 : 21.5, 0);
    }
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    grads_add(&g, 100);
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 166.5);
    grads_end(&g);
}

static void torch_in_processes(meeting *m)
{
    steps_of_torch(open_job(m, 1, dp_cpu()));
}

static void torch_on_toys(meeting *m)
{
    steps_of_torch(open_job(m, 1, toy_device()));
}

TEST(worked_values_in_one_process)
{
    steps_of_torch(open_here(2));
}

TEST(worked_values_in_two_processes)
{
    in_processes(2, torch_in_processes);
    in_processes(2, torch_on_toys);
    in_processes_on(toy_device(), 2, torch_on_toys);
}

/* 2^15 twice is more than f16 has; its mean is not. */
static void halves_stay_finite(dp_ctx *ctx)
{
    uint16_t data[RANKS][3];
    void *local[RANKS];
    dp_reducer *reducer;
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    for (int i = 0; i < info.local_count; i++) {
        data[i][0] = data[i][1] = data[i][2] = 0x7800;
        local[i] = data[i];
    }
    CHECK_OK(dp_reducer_create(ctx,
                               &(dp_reducer_config){.blocks = &(dp_block){DP_F16, 3, local},
                                                    .block_count = 1,
                                                    .reduction = DP_MEAN_RANKS},
                               &reducer));
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    for (int i = 0; i < info.local_count; i++) {
        CHECK_OK(dp_reducer_ready(reducer, i, 0, NULL));
    }
    CHECK_OK(dp_reducer_finish(reducer));
    for (int i = 0; i < info.local_count; i++) {
        CHECK_INT(data[i][2], 0x7800);
    }
    dp_close(ctx); /* and the reducer with it */
}

static void halves_in_processes(meeting *m)
{
    halves_stay_finite(open_job(m, 1, dp_cpu()));
}

TEST(f16_does_not_overflow)
{
    halves_stay_finite(open_here(2));
    in_processes(2, halves_in_processes);
}

TEST(a_sum_is_a_sum)
{
    grads g;
    grads_begin(&g, open_here(3), 1001);
    grads_create(&g, (dp_reducer_config){.reduction = DP_SUM_RANKS});
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    grads_add(&g, 1);
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 6);
    grads_end(&g);
}

/* ---- samples --------------------------------------------------------------------------------- */

/* Rank r has r samples in the first two passes, of which only the second is reduced. */
static void uneven_samples(dp_ctx *ctx)
{
    double samples[RANKS];
    grads g;
    grads_begin(&g, ctx, 5);
    grads_create(&g, (dp_reducer_config){.reduction = DP_MEAN_SAMPLES});
    double all = g.info.rank_count * (g.info.rank_count - 1) / 2;
    for (int i = 0; i < g.info.local_count; i++) {
        samples[i] = g.info.rank_first + i;
    }
    for (int step = 0; step < 3; step++) { /* each begins to count anew */
        grads_fill(&g, (float)all);
        CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){true, samples}));
        CHECK_OK(dp_reducer_finish(g.reducer));
        CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){false, samples}));
        report(&g, 0);
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_all(&g, g.info.rank_count / 2.0);
        CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){false, samples}));
        grads_fill(&g, (float)all);
        report(&g, 0);
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_all(&g, g.info.rank_count);
    }
    grads_end(&g);
}

static void samples_in_processes(meeting *m)
{
    uneven_samples(open_job(m, 1 + m->process % 2, dp_cpu()));
}

TEST(samples_of_all_ranks_divide)
{
    uneven_samples(open_here(2));
    uneven_samples(open_here(5));
    in_processes(2, samples_in_processes);
}

TEST(samples_in_a_world_of_one)
{
    const double samples = 8;
    grads g;
    grads_begin(&g, open_here(1), 9);
    grads_create(&g, (dp_reducer_config){.reduction = DP_MEAN_SAMPLES});
    CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){false, &samples}));
    grads_add(&g, 4);
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 0.5);
    grads_end(&g);
}

TEST(wrong_samples)
{
    const double below[] = {1, -1}, none[] = {0, 0}, nan[] = {(double)NAN, 1};
    const double huge[] = {(double)INFINITY, 1};
    const double good[] = {3, 1}, most[] = {1e308, 1e308};
    grads g;
    grads_begin(&g, open_here(2), 1);
    grads_create(&g, (dp_reducer_config){.reduction = DP_MEAN_SAMPLES});
    for (int no_sync = 0; no_sync < 2; no_sync++) {
        const char *fn = "dp_reducer_begin: local rank 0 has ";
        CHECK_ERROR(dp_reducer_begin(g.reducer, &(dp_reduce_pass){no_sync, NULL}), DP_ERR_INVALID,
                    "dp_reducer_begin: samples is NULL");
        CHECK_ERROR(dp_reducer_begin(g.reducer, &(dp_reduce_pass){no_sync, below}), DP_ERR_INVALID,
                    "dp_reducer_begin: local rank 1 has -1 samples");
        CHECK_ERROR(dp_reducer_begin(g.reducer, &(dp_reduce_pass){no_sync, nan}), DP_ERR_INVALID,
                    fn);
        CHECK_ERROR(dp_reducer_begin(g.reducer, &(dp_reduce_pass){no_sync, huge}), DP_ERR_INVALID,
                    fn);
    }
    CHECK_ERROR(dp_reducer_begin(g.reducer, NULL), DP_ERR_INVALID, "samples is NULL");
    CHECK_ERROR(dp_reducer_begin(g.reducer, &(dp_reduce_pass){.samples = none}), DP_ERR_INVALID,
                "dp_reducer_begin: all ranks together have 0 samples");
    CHECK_ERROR(dp_reducer_begin(g.reducer, &(dp_reduce_pass){.samples = most}), DP_ERR_INVALID,
                "dp_reducer_begin: all ranks together have inf samples");
    grads_fill(&g, 8);
    CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){.samples = good}));
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 4); /* nothing of the wrong calls was counted */
    grads_end(&g);
}

static void one_has_wrong_samples(meeting *m)
{
    const double wrong = -3, good = 2;
    const dp_reduce_pass pass = {.samples = m->process == 1 ? &wrong : &good};
    grads g;
    grads_begin(&g, open_job(m, 1, dp_cpu()), 1);
    grads_create(&g, (dp_reducer_config){.reduction = DP_MEAN_SAMPLES});
    if (m->process == 1) {
        CHECK_ERROR(dp_reducer_begin(g.reducer, &pass), DP_ERR_INVALID, "has -3 samples");
    } else {
        CHECK_ERROR(dp_reducer_begin(g.reducer, &pass), DP_ERR_MISMATCH, "another rank's samples");
    }
    CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){.samples = &good}));
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    grads_end(&g);
}

TEST(wrong_samples_of_one_process_are_known_to_all)
{
    in_processes(3, one_has_wrong_samples);
}

/* ---- buckets --------------------------------------------------------------------------------- */

static void regrouped_once(dp_ctx *ctx)
{
    grads g;
    dp_bucket_info bucket;
    layers_begin(&g, ctx, LAYER, (dp_reducer_config){0});
    check_buckets(g.reducer, "0 1 2 | 3 4 5 6 7");
    CHECK_OK(dp_reducer_begin(g.reducer, &(dp_reduce_pass){.no_sync = true}));
    backward(&g);
    CHECK_OK(dp_reducer_finish(g.reducer));
    CHECK(!info_of(g.reducer).regrouped);
    one_pass(&g);
    CHECK(info_of(g.reducer).regrouped);
    check_buckets(g.reducer, "7 6 5 | 4 3 2 1 0");
    CHECK_OK(dp_reducer_bucket_get(g.reducer, 0, &bucket));
    CHECK_INT(bucket.bytes, 1080000);
    CHECK_INT(bucket.dtype, DP_F32);
    CHECK_OK(dp_reducer_bucket_get(g.reducer, 1, &bucket));
    CHECK_INT(bucket.bytes, 1800000);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    for (uint32_t unit = 0; unit < LAYERS; unit++) {
        report(&g, unit);
    }
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_buckets(g.reducer, "7 6 5 | 4 3 2 1 0");
    grads_end(&g);
}

TEST(buckets_follow_the_first_reduced_pass)
{
    regrouped_once(open_here(2));
    regrouped_once(open_here(1));
}

/* All other ranks report in another order: rank 0's counts. */
static void rank_0_decides(meeting *m)
{
    grads g;
    layers_begin(&g, open_job(m, 1, dp_cpu()), 100,
                 (dp_reducer_config){.buckets = {.first_bytes = 1000, .bytes = 801}});
    check_buckets(g.reducer, "0 1 2 | 3 4 5 | 6 7");
    for (int pass = 0; pass < 3; pass++) {
        grads_fill(&g, 0);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        grads_add(&g, 1);
        for (uint32_t i = 0; i < LAYERS; i++) {
            report(&g, m->process == 0 ? LAYERS - 1 - i : (i * 3 + (uint32_t)m->process) % LAYERS);
        }
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_all(&g, (g.info.rank_count + 1) / 2.0);
    }
    check_buckets(g.reducer, "7 6 5 | 4 3 2 | 1 0");
    grads_end(&g);
}

TEST(reports_in_different_orders)
{
    in_processes(2, rank_0_decides);
    in_processes(4, rank_0_decides);
}

TEST(caps)
{
    const struct {
        size_t first, other;
        const char *want;
    } cases[] = {{1, 1, "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7"},
                 {400, 400, "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7"},
                 {401, 800, "0 1 | 2 3 | 4 5 | 6 7"},
                 {400, 1200, "0 | 1 2 3 | 4 5 6 | 7"},
                 {0, 1, "0 1 2 3 4 5 6 7"},
                 {1, 0, "0 | 1 2 3 4 5 6 7"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        grads g;
        layers_begin(&g, open_here(1), 100,
                     (dp_reducer_config){
                         .buckets = {.first_bytes = cases[i].first, .bytes = cases[i].other}});
        check_buckets(g.reducer, cases[i].want);
        grads_end(&g);
    }
}

/* ---- overlap --------------------------------------------------------------------------------- */

/* A bucket is reduced while this thread, which has not finished, only looks at it. */
static void first_bucket_travels_early(meeting *m)
{
    grads g;
    layers_begin(&g, open_job(m, 1, dp_cpu()), 100,
                 (dp_reducer_config){.buckets = {.first_bytes = 400, .bytes = 400}});
    one_pass(&g);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    grads_fill(&g, (float)m->process);
    for (uint32_t unit = LAYERS; unit-- > LAYERS / 2;) {
        report(&g, unit);
    }
    await_early(g.reducer, LAYERS / 2);
    for (uint32_t unit = LAYERS / 2; unit-- > 0;) {
        report(&g, unit);
    }
    CHECK_OK(dp_reducer_finish(g.reducer));
    CHECK(info_of(g.reducer).early_count >= LAYERS / 2);
    check_all(&g, (m->process_count - 1) / 2.0);
    grads_end(&g);
}

TEST(buckets_travel_before_finish)
{
    in_processes(2, first_bucket_travels_early);
    in_processes(4, first_bucket_travels_early);
    in_processes_on(toy_device(), 4, first_bucket_travels_early);
}

/* Collectives of the user's, and work of all devices, while the courier is at work. */
static void others_work_meanwhile(meeting *m)
{
    float ones[2] = {1, 1};
    const dp_part parts[] = {{.send = &ones[0], .recv = &ones[0]},
                             {.send = &ones[1], .recv = &ones[1]}};
    grads g;
    layers_begin(&g, open_job(m, 2, dp_cpu()), 40000, one_by_one);
    for (int pass = 0; pass < 3; pass++) {
        ones[0] = ones[1] = 1;
        grads_fill(&g, 3);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        for (uint32_t unit = LAYERS; unit-- > 0;) {
            report(&g, unit);
            CHECK_OK(dp_run(g.ctx, NULL, run_nothing, NULL));
            CHECK_OK(dp_all_reduce(g.ctx, parts, 1, DP_F32, DP_OP_MEAN));
        }
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_all(&g, 3);
        CHECK_F64(ones[1], 1, 0);
    }
    grads_end(&g);
}

TEST(the_courier_leaves_workers_and_collectives_to_the_caller)
{
    in_processes(2, others_work_meanwhile);
}

enum { TWO = 2, EACH = 4 /* buckets */ };

static void two_begin(grads *g, dp_ctx *ctx)
{
    for (int i = 0; i < TWO; i++) {
        layers_begin(&g[i], ctx, 50,
                     (dp_reducer_config){.buckets = {.first_bytes = 400, .bytes = 400}});
        CHECK_INT(info_of(g[i].reducer).bucket_count, EACH);
        one_pass(&g[i]);
    }
}

static void two_passes_begin(grads *g)
{
    for (int i = 0; i < TWO; i++) {
        grads_fill(&g[i], 0);
        grads_add(&g[i], (float)i + 1);
        CHECK_OK(dp_reducer_begin(g[i].reducer, NULL));
    }
}

static void two_end(grads *g)
{
    CHECK_OK(dp_reducer_destroy(g[1].reducer));
    free(g[1].local[0]);
    grads_end(&g[0]);
}

/* Both are complete: the older one travels, and when it is finished the other. */
static void older_first(meeting *m)
{
    static grads g[TWO];
    two_begin(g, open_job(m, 1, dp_cpu()));
    for (int pass = 0; pass < 3; pass++) {
        two_passes_begin(g);
        for (uint32_t unit = LAYERS; unit-- > 0;) { /* each process in an order of its own */
            report(&g[m->process], unit);
            report(&g[!m->process], unit);
        }
        await_early(g[0].reducer, EACH);
        CHECK_INT(info_of(g[1].reducer).early_count, 0);
        CHECK_OK(dp_reducer_finish(g[0].reducer));
        await_early(g[1].reducer, EACH);
        CHECK_OK(dp_reducer_finish(g[1].reducer));
        CHECK_INT(info_of(g[1].reducer).early_count, EACH);
        check_all(&g[0], 1.5);
        check_all(&g[1], 3);
    }
    two_end(g);
}

/* A pass inside another: it cannot wait for the older one, of which process 1 has nothing yet. */
static void younger_first(meeting *m)
{
    static grads g[TWO];
    two_begin(g, open_job(m, 1, dp_cpu()));
    for (int pass = 0; pass < 3; pass++) {
        two_passes_begin(g);
        if (m->process == 0) {
            backward(&g[0]);
        }
        backward(&g[1]);
        CHECK_OK(dp_reducer_finish(g[1].reducer));
        CHECK_INT(info_of(g[1].reducer).early_count, 0);
        check_all(&g[1], 3);
        if (m->process == 1) {
            backward(&g[0]);
        }
        await_early(g[0].reducer, EACH);
        CHECK_OK(dp_reducer_finish(g[0].reducer));
        check_all(&g[0], 1.5);
    }
    two_end(g);
}

/* Three, of which the one in the middle goes first: nobody loses its place. */
static void middle_first(meeting *m)
{
    static const int order[] = {1, 0, 2};
    static grads g[3];
    dp_ctx *ctx = open_job(m, 1, dp_cpu());
    for (int i = 0; i < 3; i++) {
        layers_begin(&g[i], ctx, 50, (dp_reducer_config){.buckets.first_bytes = 1});
    }
    for (int pass = 0; pass < 3; pass++) {
        for (int i = 0; i < 3; i++) {
            grads_fill(&g[i], 0);
            grads_add(&g[i], (float)i);
            CHECK_OK(dp_reducer_begin(g[i].reducer, NULL));
            backward(&g[i]);
        }
        CHECK_OK(dp_reducer_finish(g[order[0]].reducer));
        CHECK_OK(dp_reducer_finish(g[order[1]].reducer));
        await_early(g[2].reducer, info_of(g[2].reducer).bucket_count);
        CHECK_OK(dp_reducer_finish(g[order[2]].reducer));
        for (int i = 0; i < 3; i++) {
            check_all(&g[i], 1.5 * i);
        }
    }
    for (int i = 1; i < 3; i++) {
        CHECK_OK(dp_reducer_destroy(g[i].reducer));
        free(g[i].local[0]);
    }
    grads_end(&g[0]);
}

TEST(several_reducers_at_the_same_time)
{
    in_processes(2, older_first);
    in_processes(2, younger_first);
    in_processes(2, middle_first);
    in_processes_on(toy_device(), 2, middle_first);
}

/* ---- layouts --------------------------------------------------------------------------------- */

enum { KINDS = 3, DEEP = 4 };

/* Layers that interleave, as in llm.c: tensor after tensor, each with a slice of every layer; the
   embeddings come first in memory and last in backward. */
static size_t interleaved(dp_range *ranges)
{
    static const size_t counts[KINDS] = {3, 17, 1};
    size_t n = 0, at = 11;
    ranges[n++] = (dp_range){.unit = DEEP, .count = 11};
    for (size_t kind = 0; kind < KINDS; at += counts[kind++] * DEEP) {
        for (uint32_t layer = 0; layer < DEEP; layer++) {
            ranges[n++] = (dp_range){
                .unit = layer, .first = at + layer * counts[kind], .count = counts[kind]};
        }
    }
    CHECK_INT(at, 95);
    return n;
}

static void one_block_of_many_layers(dp_ctx *ctx)
{
    dp_range ranges[1 + KINDS * DEEP];
    grads g;
    grads_begin(&g, ctx, 95);
    grads_create(&g, (dp_reducer_config){.ranges = ranges,
                                         .range_count = interleaved(ranges),
                                         .reduction = DP_MEAN_RANKS,
                                         .buckets = {.first_bytes = 100, .bytes = 168}});
    check_buckets(g.reducer, "0 1 | 2 3 | 4");
    for (int pass = 0; pass < 3; pass++) {
        grads_fill(&g, 0);
        grads_add(&g, 2);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        for (uint32_t layer = DEEP; layer-- > 0;) {
            report(&g, layer);
        }
        report(&g, DEEP);
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_all(&g, g.info.rank_count + 1);
        check_buckets(g.reducer, "3 2 | 1 0 | 4");
    }
    grads_end(&g);
}

static void many_layers_in_processes(meeting *m)
{
    one_block_of_many_layers(open_job(m, 1 + m->process, dp_cpu()));
}

static void many_layers_on_toys(meeting *m)
{
    one_block_of_many_layers(open_job(m, 2, m->process == 0 ? dp_cpu() : toy_device()));
}

TEST(layers_interleave_as_in_llm_c)
{
    one_block_of_many_layers(open_here(1));
    one_block_of_many_layers(open_here(3));
    in_processes(2, many_layers_in_processes);
    in_processes(2, many_layers_on_toys);
    in_processes_on(toy_device(), 2, many_layers_in_processes);
}

/* Units with memory of several dtypes: what travels together has one. */
typedef struct mixture {
    float f32[7];
    double f64[5];
    int32_t i32[4];
} mixture;

static void several_dtypes(dp_ctx *ctx)
{
    static mixture data[RANKS];
    void *f32[RANKS], *f64[RANKS], *i32[RANKS];
    const dp_block blocks[] = {{DP_F32, 7, f32}, {DP_F64, 5, f64}, {DP_I32, 4, i32}, {0}};
    const dp_range ranges[] = {{1, 1, 3, 2}, {0, 1, 0, 4}, {1, 0, 0, 3}, {2, 2, 1, 3},
                               {0, 0, 4, 3}, {2, 1, 0, 1}, {3, 3, 0, 0}, {1, 3, 5, 0}};
    dp_reducer *reducer;
    dp_bucket_info bucket;
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    for (int i = 0; i < info.local_count; i++) {
        f32[i] = data[i].f32;
        f64[i] = data[i].f64;
        i32[i] = data[i].i32;
    }
    CHECK_OK(dp_reducer_create(ctx,
                               &(dp_reducer_config){.blocks = blocks,
                                                    .block_count = 4,
                                                    .ranges = ranges,
                                                    .range_count = 8,
                                                    .reduction = DP_SUM_RANKS},
                               &reducer));
    CHECK_INT(info_of(reducer).unit_count, 4);
    check_buckets(reducer, "1 2 | 0 1 3 | 0 1 3");
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < info.local_count; i++) {
            for (int k = 0; k < 7; k++) {
                data[i].f32[k] = 0.5f;
                data[i].f64[k % 5] = 0.25;
                data[i].i32[k % 4] = 3;
            }
        }
        CHECK_OK(dp_reducer_begin(reducer, NULL));
        for (uint32_t unit = 4; unit-- > 0;) {
            for (int i = 0; i < info.local_count; i++) {
                CHECK_OK(dp_reducer_ready(reducer, i, unit, NULL));
            }
        }
        CHECK_OK(dp_reducer_finish(reducer));
        for (int i = 0; i < info.local_count; i++) {
            for (int k = 0; k < 7; k++) {
                CHECK_F64(data[i].f32[k], 0.5 * info.rank_count, 0);
                CHECK_F64(data[i].f64[k % 5], 0.25 * info.rank_count, 0);
                CHECK_INT(data[i].i32[k % 4], 3 * info.rank_count);
            }
        }
    }
    CHECK_OK(dp_reducer_bucket_get(reducer, 0, &bucket));
    CHECK_INT(bucket.dtype, DP_I32);
    CHECK_INT(bucket.bytes, 16);
    dp_close(ctx);
}

static void dtypes_in_processes(meeting *m)
{
    several_dtypes(open_job(m, 1, dp_cpu()));
    (void)m;
}

TEST(units_of_several_dtypes)
{
    several_dtypes(open_here(2));
    in_processes(2, dtypes_in_processes);
}

static void no_units_at_all(dp_ctx *ctx)
{
    dp_reducer *reducer;
    dp_bucket_info bucket;
    CHECK_OK(dp_reducer_create(ctx, &(dp_reducer_config){.reduction = DP_MEAN_RANKS}, &reducer));
    CHECK_INT(info_of(reducer).bucket_count, 0);
    for (int pass = 0; pass < 2; pass++) {
        CHECK_OK(dp_reducer_begin(reducer, NULL));
        CHECK_ERROR(dp_reducer_ready(reducer, 0, 0, NULL), DP_ERR_INVALID, "unit 0, '' has 0");
        CHECK_OK(dp_reducer_finish(reducer));
    }
    CHECK_ERROR(dp_reducer_bucket_get(reducer, 0, &bucket), DP_ERR_INVALID, "has 0");
    CHECK_OK(dp_reducer_destroy(reducer));
    dp_close(ctx);
}

static void no_units_in_processes(meeting *m)
{
    no_units_at_all(open_job(m, 1, dp_cpu()));
}

TEST(no_units)
{
    no_units_at_all(open_here(1));
    no_units_at_all(open_here(2));
    in_processes(2, no_units_in_processes);
}

/* Memory between ranges belongs to nobody, and stays as it is. */
TEST(gaps_are_left_alone)
{
    const dp_range ranges[] = {{.unit = 0, .first = 1, .count = 2},
                               {.unit = 1, .first = 5, .count = 1}};
    grads g;
    grads_begin(&g, open_here(2), 7);
    grads_create(
        &g, (dp_reducer_config){.ranges = ranges, .range_count = 2, .reduction = DP_SUM_RANKS});
    grads_add(&g, 1);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    report(&g, 1);
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    const float want[] = {2, 3, 3, 2, 2, 3, 2};
    CHECK_BYTES(g.local[1], want, sizeof want);
    grads_end(&g);
}

/* ---- devices with memory of their own -------------------------------------------------------- */

static void on_devices(const dp_device_ops *ops)
{
    const int64_t count = 1000;
    dp_tensor tensors[3], fresh[3];
    void *local[3];
    dp_stream *streams[3];
    dp_reducer *reducer;
    dp_ctx *ctx = open_on(ops, 3);
    static float got[1000];
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, 1, &count, &tensors[i]));
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, 1, &count, &fresh[i]));
        local[i] = tensors[i].data;
        dp_dev *dev = dp_local_stream(ctx, i)->dev;
        CHECK_OK(dev->ops->stream_create(dev, 0, &streams[i]));
    }
    const dp_range ranges[] = {{.unit = 0, .count = 333}, {.unit = 1, .first = 333, .count = 667}};
    CHECK_OK(dp_reducer_create(ctx,
                               &(dp_reducer_config){.blocks = &(dp_block){DP_F32, 1000, local},
                                                    .block_count = 1,
                                                    .ranges = ranges,
                                                    .range_count = 2,
                                                    .reduction = DP_MEAN_RANKS},
                               &reducer));
    for (int pass = 0; pass < 3; pass++) {
        CHECK_OK(dp_reducer_begin(reducer, NULL));
        for (int i = 0; i < 3; i++) {
            CHECK_OK(dp_fill(ctx, &fresh[i], dp_float(i + 1)));
            CHECK_OK(dp_copy(ctx, &tensors[i], &fresh[i], streams[i]));
            CHECK_OK(dp_reducer_ready(reducer, i, 1, NULL));
            CHECK_OK(dp_reducer_ready(reducer, i, 0, streams[i])); /* and so unit 1 */
        }
        CHECK_OK(dp_reducer_finish(reducer));
        for (int i = 0; i < 3; i++) {
            CHECK_OK(dp_read(ctx, &tensors[i], got, sizeof got));
            CHECK_F64(got[332], 2, 0);
            CHECK_F64(got[999], 2, 0);
        }
    }
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    CHECK_ERROR(dp_reducer_ready(reducer, 0, 0, streams[1]), DP_ERR_INVALID,
                "the stream is not of local rank 0");
    for (int i = 0; i < 3; i++) {
        streams[i]->dev->ops->stream_destroy(streams[i]);
    }
    dp_close(ctx);
}

TEST(devices_with_memory_of_their_own)
{
    on_devices(toy_device());
    on_devices(lazy_device(toy_device()));
}

/* ---- from many threads ----------------------------------------------------------------------- */

typedef struct reporter {
    const grads *g;
    int local_rank;
    uint64_t seed;
} reporter;

/* All units of a local rank, in an order of its own, each just after it was written to. */
static void report_shuffled(const grads *g, int local_rank, uint64_t seed)
{
    uint32_t units[LAYERS];
    for (uint32_t i = 0; i < LAYERS; i++) {
        uint32_t k = (uint32_t)(test_random(&seed) % (i + 1));
        units[i] = units[k];
        units[k] = i;
    }
    for (int i = 0; i < LAYERS; i++) {
        size_t each = g->count / LAYERS;
        float *data = g->local[local_rank] + units[i] * each;
        for (size_t k = 0; k < each; k++) {
            data[k] = (float)(g->info.rank_first + local_rank + 1);
        }
        CHECK_OK(dp_reducer_ready(g->reducer, local_rank, units[i], NULL));
    }
}

static void *reporter_main(void *user)
{
    const reporter *r = user;
    report_shuffled(r->g, r->local_rank, r->seed);
    return NULL;
}

static void report_from_threads(const grads *g, uint64_t seed)
{
    pthread_t threads[RANKS];
    reporter reporters[RANKS];
    for (int i = 0; i < g->info.local_count; i++) {
        reporters[i] = (reporter){g, i, seed + (uint64_t)i};
        CHECK_INT(pthread_create(&threads[i], NULL, reporter_main, &reporters[i]), 0);
    }
    for (int i = 0; i < g->info.local_count; i++) {
        pthread_join(threads[i], NULL);
    }
}

static dp_status report_in_run(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    report_shuffled(user, local_rank, test_seed());
    return DP_OK;
}

static void many_threads(dp_ctx *ctx)
{
    grads g;
    layers_begin(&g, ctx, 60, (dp_reducer_config){.buckets = {.first_bytes = 1, .bytes = 500}});
    for (int pass = 0; pass < 10; pass++) {
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        if (pass % 2 == 0) {
            report_from_threads(&g, test_seed() + (uint64_t)pass);
        } else {
            CHECK_OK(dp_run(ctx, NULL, report_in_run, &g));
        }
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_all(&g, (g.info.rank_count + 1) / 2.0);
    }
    grads_end(&g);
}

static void many_threads_in_processes(meeting *m)
{
    many_threads(open_job(m, 3, dp_cpu()));
}

TEST_SLOW(ready_from_many_threads, 30)
{
    many_threads(open_here(RANKS)); /* more than there are cores, on most machines */
    in_processes(2, many_threads_in_processes);
}

static dp_status backward_method(dp_call *call)
{
    const grads *g = call->state;
    report_shuffled(g, call->local_rank, test_seed());
    return DP_OK;
}

static dp_status forward_method(dp_call *call)
{
    call->out = dp_at(call->args, 0);
    return DP_OK;
}

TEST(ready_from_methods)
{
    const dp_method methods[] = {{"forward", forward_method}, {"backward", backward_method}};
    const float x[4] = {1, 2, 3, 4};
    grads g;
    dp_module *net, *par;
    dp_pass *pass;
    dp_value out;
    layers_begin(&g, open_here(2), 10, (dp_reducer_config){0});
    dp_module_config config = {.name = "net", .methods = methods, .method_count = 2, .state = &g};
    CHECK_OK(dp_module_create(g.ctx, &config, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    dp_scope *scope = dp_scope_begin(g.ctx);
    dp_value batch = dp_array(scope, x, DP_F32, DP_SHAPE(4));
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    CHECK_OK(
        dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, batch), dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 1.5);
    grads_end(&g);
}

/* ---- what is not reported -------------------------------------------------------------------- */

static const char *const names[LAYERS] = {"h.0", "h.1", "h.2", "h.3", "h.4", "h.5", "h.6", "h.7"};

static void report_but(const grads *g, uint32_t from, uint32_t to, int rank)
{
    for (int i = 0; i < g->info.local_count; i++) {
        for (uint32_t unit = 0; unit < LAYERS; unit++) {
            bool left_out = unit >= from && unit < to && g->info.rank_first + i == rank;
            if (!left_out) {
                CHECK_OK(dp_reducer_ready(g->reducer, i, unit, NULL));
            }
        }
    }
}

static void a_missing_report(dp_ctx *ctx)
{
    grads g;
    layers_begin(
        &g, ctx, 10,
        (dp_reducer_config){.name = "gpt", .unit_names = names, .buckets.first_bytes = 40});
    for (int again = 0; again < 2; again++) {
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        report_but(&g, 2, 5, 1);
        CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH,
                    "dp_reducer_finish: rank 1 did not report unit 2 'h.2' of 'gpt' in this pass "
                    "(see dp_reducer_config.unused_units): gradients are void");
        CHECK(info_of(g.reducer).regrouped == (again > 0));
        grads_fill(&g, 0);
        grads_add(&g, 1);
        one_pass(&g);
        check_all(&g, (g.info.rank_count + 1) / 2.0);
    }
    grads_end(&g);
}

static void a_missing_report_in_processes(meeting *m)
{
    a_missing_report(open_job(m, 1 + m->process % 2, dp_cpu()));
}

TEST(a_unit_that_a_rank_does_not_report)
{
    a_missing_report(open_here(2));
    in_processes(2, a_missing_report_in_processes);
    in_processes(4, a_missing_report_in_processes);
}

/* Not everything came, the pass is void; in the next one each bucket travels when it is full. */
static void full_again(meeting *m)
{
    grads g;
    layers_begin(&g, open_job(m, 1, dp_cpu()), 100,
                 (dp_reducer_config){.buckets = {.first_bytes = 400, .bytes = 400}});
    one_pass(&g);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    report_but(&g, 2, 5, 1);
    CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH, "rank 1 did not report unit 2");
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    backward(&g);
    await_early(g.reducer, LAYERS);
    CHECK_OK(dp_reducer_finish(g.reducer));
    grads_end(&g);
}

TEST(buckets_fill_again_after_a_pass_that_was_not_whole)
{
    in_processes(2, full_again);
}

/* Ranks of one process know what each other has reported: the sum is all that they exchange. */
TEST(one_process_asks_nobody_what_was_reported)
{
    static const dp_unused modes[] = {DP_UNUSED_ERROR, DP_UNUSED_FOUND, DP_UNUSED_FIXED};
    for (int i = 0; i < 3; i++) {
        const dp_coll_ops *const colls[] = {decorate_coll(dp_cpu_coll()), NULL};
        dp_ctx *ctx = NULL;
        grads g;
        CHECK_OK(dp_open(&(dp_config){.device_count = 2, .colls = colls}, &ctx));
        layers_begin(&g, ctx, 10, (dp_reducer_config){.unused_units = modes[i]});
        one_pass(&g);
        int before = deco_calls(DECO_coll_run);
        one_pass(&g);
        CHECK_INT(deco_calls(DECO_coll_run) - before, 1);
        grads_end(&g);
        CHECK_DECORATOR();
    }
}

/* Unit 3 is reported by nobody, unit 5 not by rank 1. */
static void units_may_be_left_out(dp_ctx *ctx)
{
    const dp_reduce_pass local = {.no_sync = true};
    grads g;
    layers_begin(&g, ctx, 10,
                 (dp_reducer_config){.unused_units = DP_UNUSED_FOUND,
                                     .buckets = {.first_bytes = 100, .bytes = 120}});
    double mean = (g.info.rank_count + 1) / 2.0;
    for (int pass = 0; pass < 3; pass++) {
        grads_fill(&g, 0);
        grads_add(&g, 1);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        for (int i = 0; i < g.info.local_count; i++) {
            for (uint32_t unit = LAYERS; unit-- > 0;) {
                if (unit != 3 && (unit != 5 || g.info.rank_first + i != 1)) {
                    CHECK_OK(dp_reducer_ready(g.reducer, i, unit, NULL));
                }
            }
        }
        CHECK_OK(dp_reducer_finish(g.reducer));
        for (uint32_t unit = 0; unit < LAYERS; unit++) {
            check_unit(&g, unit, unit == 3 ? 1 : mean, unit == 3);
            CHECK(dp_reducer_used(g.reducer, unit) == (unit != 3));
        }
    }
    check_buckets(g.reducer, "7 6 5 | 4 2 1 | 0 3");
    grads_fill(&g, 0); /* a report without sync counts in the next reduction */
    grads_add(&g, 1);
    CHECK_OK(dp_reducer_begin(g.reducer, &local));
    report(&g, 3);
    CHECK_OK(dp_reducer_finish(g.reducer));
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_unit(&g, 3, mean, 0);
    check_unit(&g, 4, 1, 1);
    CHECK(dp_reducer_used(g.reducer, 3) && !dp_reducer_used(g.reducer, 4));
    grads_fill(&g, 0);
    grads_add(&g, 1);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL)); /* but not in the one after that */
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_unit(&g, 3, 1, 1);
    grads_end(&g);
}

static void left_out_in_processes(meeting *m)
{
    units_may_be_left_out(open_job(m, 1, dp_cpu()));
}

static void left_out_on_toys(meeting *m)
{
    units_may_be_left_out(open_job(m, 1 + m->process, toy_device()));
}

/* Several that rank 0 did not report come in the order of the config. */
TEST(units_left_over_come_last_in_their_order)
{
    grads g;
    layers_begin(&g, open_here(1), 10,
                 (dp_reducer_config){.unused_units = DP_UNUSED_FOUND,
                                     .buckets = {.first_bytes = 1, .bytes = 1}});
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    for (uint32_t unit = LAYERS; unit-- > 0;)
        if (unit != 1 && unit != 3 && unit != 6)
            report(&g, unit);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_buckets(g.reducer, "7 | 5 | 4 | 2 | 0 | 1 | 3 | 6");
    grads_end(&g);
}

TEST(units_that_nobody_reports_stay)
{
    units_may_be_left_out(open_here(2));
    in_processes(2, left_out_in_processes);
    in_processes(3, left_out_in_processes);
    in_processes(2, left_out_on_toys);
    in_processes_on(toy_device(), 2, left_out_on_toys);
}

/* Nobody uses unit 3, rank 1 not unit 5 either, and rank 0 not unit 0. */
static bool is_fixed(int rank, uint32_t unit)
{
    return unit != 3 && (unit != 5 || rank != 1) && (unit != 0 || rank != 0);
}

static void report_fixed_but(const grads *g, int rank, uint32_t left_out)
{
    for (int i = 0; i < g->info.local_count; i++) {
        for (uint32_t unit = LAYERS; unit-- > 0;) {
            int own = g->info.rank_first + i;
            if (is_fixed(own, unit) && (own != rank || unit != left_out)) {
                CHECK_OK(dp_reducer_ready(g->reducer, i, unit, NULL));
            }
        }
    }
}

static void report_fixed(const grads *g)
{
    report_fixed_but(g, -1, 0);
}

static void fixed_pass_begin(const grads *g)
{
    grads_fill(g, 0);
    grads_add(g, 1);
    CHECK_OK(dp_reducer_begin(g->reducer, NULL));
}

static void check_fixed(const grads *g)
{
    double mean = (g->info.rank_count + 1) / 2.0;
    for (uint32_t unit = 0; unit < LAYERS; unit++) {
        check_unit(g, unit, unit == 3 ? 1 : mean, unit == 3);
    }
}

static void fixed_begin(grads *g, dp_ctx *ctx)
{
    layers_begin(g, ctx, 10,
                 (dp_reducer_config){.name = "net",
                                     .unit_names = names,
                                     .unused_units = DP_UNUSED_FIXED,
                                     .buckets = {.first_bytes = 80, .bytes = 80}});
}

static void fixed_units(dp_ctx *ctx)
{
    const dp_reduce_pass local = {.no_sync = true};
    grads g;
    fixed_begin(&g, ctx);
    CHECK_OK(dp_reducer_begin(g.reducer, &local)); /* nothing is reduced, so nothing is fixed */
    CHECK_OK(dp_reducer_finish(g.reducer));
    for (int pass = 0; pass < 4; pass++) {
        if (pass % 2 != 0) {
            CHECK_OK(dp_reducer_begin(g.reducer, &local));
            report_fixed(&g);
            CHECK_OK(dp_reducer_finish(g.reducer));
        }
        fixed_pass_begin(&g);
        report_fixed(&g);
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_fixed(&g);
    }
    grads_end(&g);
}

static void fixed_in_processes(meeting *m)
{
    fixed_units(open_job(m, 1 + m->process, dp_cpu()));
}

static void fixed_on_toys(meeting *m)
{
    fixed_units(open_job(m, 1, toy_device()));
}

TEST(units_of_the_first_pass_are_those_of_all)
{
    fixed_units(open_here(2));
    in_processes(2, fixed_in_processes);
    in_processes(2, fixed_on_toys);
}

/* ---- ranks that have nothing to report ------------------------------------------------------- */

enum { NOBODY = 0, PASSES = 6 };

/* One bit a rank: who is absent in a pass. In the first one not all are there, so it fixes nothing;
   in the last but one nobody is. */
static unsigned who_is_absent(int pass, int rank_count)
{
    const unsigned all = (1u << rank_count) - 1, last = 1u << (rank_count - 1);
    const unsigned in_order[PASSES] = {last, NOBODY, 1, NOBODY, all, last};
    return in_order[pass];
}

static bool reports(dp_unused rule, int rank, uint32_t unit)
{
    return rule == DP_UNUSED_ERROR || is_fixed(rank, unit);
}

/* Whoever is absent counts as zeros, and nobody else waits for it. */
static void absent_pass(const grads *g, dp_unused rule, unsigned absent)
{
    double sum = 0;
    bool used[LAYERS] = {false};
    for (int rank = 0; rank < g->info.rank_count; rank++) {
        bool here = (absent >> rank & 1) == 0;
        sum += here ? rank + 1 : 0;
        for (uint32_t unit = 0; unit < LAYERS; unit++)
            used[unit] = used[unit] || (here && reports(rule, rank, unit));
    }
    grads_fill(g, 0);
    grads_pull(g);
    for (int i = 0; i < g->info.local_count; i++)
        for (size_t k = 0; k < g->count && (absent >> (g->info.rank_first + i) & 1) == 0; k++)
            g->local[i][k] = (float)(g->info.rank_first + i + 1);
    grads_push(g);
    CHECK_OK(dp_reducer_begin(g->reducer, NULL));
    for (int i = 0; i < g->info.local_count; i++) {
        int rank = g->info.rank_first + i;
        if ((absent >> rank & 1) != 0)
            CHECK_OK(dp_reducer_absent(g->reducer, i));
        for (uint32_t unit = LAYERS; unit-- > 0 && (absent >> rank & 1) == 0;)
            if (reports(rule, rank, unit))
                CHECK_OK(dp_reducer_ready(g->reducer, i, unit, NULL));
    }
    if (rule == DP_UNUSED_ERROR && g->info.process_count > 1)
        await_early(g->reducer, LAYERS);
    CHECK_OK(dp_reducer_finish(g->reducer));
    for (uint32_t unit = 0; unit < LAYERS; unit++) {
        if (rule == DP_UNUSED_ERROR || (used[unit] && dp_reducer_used(g->reducer, unit)))
            check_unit(g, unit, sum / g->info.rank_count, 0);
        if (rule == DP_UNUSED_FOUND)
            CHECK(dp_reducer_used(g->reducer, unit) == used[unit]);
        CHECK(dp_reducer_used(g->reducer, unit) || rule != DP_UNUSED_ERROR);
    }
}

static void absent_at_times(dp_ctx *ctx, dp_unused rule)
{
    grads g;
    layers_begin(&g, ctx, 10,
                 (dp_reducer_config){.unused_units = rule,
                                     .unit_names = names,
                                     .buckets = {.first_bytes = 1, .bytes = 1}});
    for (int pass = 0; pass < PASSES; pass++)
        absent_pass(&g, rule, who_is_absent(pass, g.info.rank_count));
    CHECK(dp_reducer_used(g.reducer, 3) == (rule == DP_UNUSED_ERROR));
    CHECK(!dp_reducer_used(g.reducer, LAYERS));
    CHECK_STR(dp_last_error(), "dp_reducer_used: unit 8, '' has 8");
    grads_end(&g);
}

static void absent_in_processes(meeting *m)
{
    for (int rule = DP_UNUSED_ERROR; rule <= DP_UNUSED_FIXED; rule++)
        absent_at_times(open_job(m, 1 + m->process, dp_cpu()), (dp_unused)rule);
}

static void absent_on_toys(meeting *m)
{
    for (int rule = DP_UNUSED_ERROR; rule <= DP_UNUSED_FIXED; rule++)
        absent_at_times(open_job(m, 1, toy_device()), (dp_unused)rule);
}

TEST(ranks_may_be_absent)
{
    for (int rule = DP_UNUSED_ERROR; rule <= DP_UNUSED_FIXED; rule++) {
        absent_at_times(open_here(1), (dp_unused)rule);
        absent_at_times(open_here(3), (dp_unused)rule);
    }
    in_processes(2, absent_in_processes);
    in_processes(2, absent_on_toys);
}

/* What an absent rank has from a pass without a reduction counts. */
static void absent_after_a_pass_without_sync(meeting *m)
{
    const dp_reduce_pass local = {.no_sync = true};
    grads g;
    layers_begin(&g, open_job(m, 1, dp_cpu()), 10,
                 (dp_reducer_config){.unused_units = DP_UNUSED_FOUND});
    for (int pass = 0; pass < 2; pass++) {
        grads_fill(&g, 0);
        grads_add(&g, 1);
        CHECK_OK(dp_reducer_begin(g.reducer, &local));
        if (pass == 0)
            report_fixed(&g);
        else
            CHECK_OK(dp_reducer_absent(g.reducer, 0));
        CHECK_OK(dp_reducer_finish(g.reducer));
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        CHECK_OK(dp_reducer_absent(g.reducer, 0));
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_unit(&g, 4, pass == 0 ? 1.5 : 1, pass != 0);
        CHECK(dp_reducer_used(g.reducer, 4) == (pass == 0));
    }
    grads_end(&g);
}

TEST(what_an_absent_rank_had_before_counts)
{
    in_processes(2, absent_after_a_pass_without_sync);
}

/* What has been fixed is reported in the pass that is reduced, or its rank is absent from that. */
TEST(absence_without_a_reduction_hides_nothing)
{
    const dp_reduce_pass local = {.no_sync = true};
    grads g;
    fixed_begin(&g, open_here(2));
    for (int pass = 0; pass < 3; pass++) {
        if (pass == 1) {
            CHECK_OK(dp_reducer_begin(g.reducer, &local));
            CHECK_OK(dp_reducer_absent(g.reducer, 1));
            CHECK_OK(dp_reducer_finish(g.reducer));
        }
        fixed_pass_begin(&g);
        for (uint32_t unit = LAYERS; unit-- > 0;)
            for (int i = 0; i < 2; i++)
                if (is_fixed(i, unit) && (pass != 1 || i == 0))
                    CHECK_OK(dp_reducer_ready(g.reducer, i, unit, NULL));
        if (pass == 1)
            CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH,
                        "rank 1 did not report unit 0");
        else
            CHECK_OK(dp_reducer_finish(g.reducer));
        if (pass != 1)
            check_fixed(&g);
    }
    grads_end(&g);
}

TEST(absence_is_said_once_and_instead)
{
    grads g;
    layers_begin(&g, open_here(2), 10, (dp_reducer_config){.name = "net"});
    CHECK_ERROR(dp_reducer_absent(g.reducer, 0), DP_ERR_STATE,
                "dp_reducer_absent: no pass of 'net' is open");
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    CHECK_OK(dp_reducer_ready(g.reducer, 0, 5, NULL));
    CHECK_ERROR(dp_reducer_absent(g.reducer, 0), DP_ERR_STATE,
                "dp_reducer_absent: local rank 0 has reported unit 5 in this pass");
    CHECK_OK(dp_reducer_absent(g.reducer, 1));
    CHECK_ERROR(dp_reducer_absent(g.reducer, 1), DP_ERR_STATE,
                "dp_reducer_absent: local rank 1 is absent from this pass of 'net' already");
    CHECK_ERROR(dp_reducer_ready(g.reducer, 1, 5, NULL), DP_ERR_STATE,
                "dp_reducer_ready: local rank 1 is absent from this pass of 'net' already");
    CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH, "rank 0 did not report unit 0");
    absent_pass(&g, DP_UNUSED_ERROR, 2);
    grads_end(&g);
}

/* Nobody waits for what is not expected: from the second pass on all buckets travel early. */
static void fixed_units_travel(meeting *m)
{
    grads g;
    fixed_begin(&g, open_job(m, 1, dp_cpu()));
    for (int pass = 0; pass < 3; pass++) {
        fixed_pass_begin(&g);
        report_fixed(&g);
        if (pass > 0) {
            await_early(g.reducer, info_of(g.reducer).bucket_count);
        }
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_fixed(&g);
    }
    check_buckets(g.reducer, "7 6 | 5 4 | 2 1 | 0 3");
    grads_end(&g);
}

TEST(unexpected_units_are_not_waited_for)
{
    in_processes(2, fixed_units_travel);
}

static void fixed_units_change(dp_ctx *ctx)
{
    const dp_reduce_pass local = {.no_sync = true};
    grads g;
    fixed_begin(&g, ctx);
    for (int again = 0; again < 2; again++) {
        fixed_pass_begin(&g);
        report_fixed(&g);
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_fixed(&g);
        fixed_pass_begin(&g);
        report_fixed_but(&g, 1, 2);
        CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH,
                    "dp_reducer_finish: rank 1 did not report unit 2 'h.2' of 'net' in this pass, "
                    "but in the first one");
        fixed_pass_begin(&g);
        report_fixed(&g);
        if (g.info.rank_first == 0) {
            CHECK_OK(dp_reducer_ready(g.reducer, 0, 3, NULL));
        }
        CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH,
                    "dp_reducer_finish: rank 0 reported unit 3 'h.3' of 'net' in this pass, but "
                    "not in the first one: gradients are void");
        CHECK_OK(dp_reducer_begin(g.reducer, &local)); /* it would be lost */
        if (g.info.rank_first == 0) {
            CHECK_OK(dp_reducer_ready(g.reducer, 0, 3, NULL));
        }
        CHECK_OK(dp_reducer_finish(g.reducer));
        fixed_pass_begin(&g);
        report_fixed(&g);
        CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH, "rank 0 reported unit 3");
    }
    grads_end(&g);
}

static void change_in_processes(meeting *m)
{
    fixed_units_change(open_job(m, 1, dp_cpu()));
}

TEST(a_change_of_fixed_units_is_named)
{
    fixed_units_change(open_here(2));
    in_processes(2, change_in_processes);
    in_processes(3, change_in_processes);
}

/* ---- misuse ---------------------------------------------------------------------------------- */

TEST(calls_in_the_wrong_order)
{
    grads g;
    dp_reducer_info info;
    layers_begin(&g, open_here(2), 1, (dp_reducer_config){.name = "net", .unit_names = names});
    CHECK_ERROR(dp_reducer_ready(g.reducer, 0, 0, NULL), DP_ERR_STATE,
                "dp_reducer_ready: no pass of 'net' is open");
    CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_STATE,
                "dp_reducer_finish: no pass of 'net' is open");
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    CHECK_ERROR(dp_reducer_begin(g.reducer, NULL), DP_ERR_STATE,
                "dp_reducer_begin: a pass of 'net' is open");
    CHECK_ERROR(dp_reducer_destroy(g.reducer), DP_ERR_STATE,
                "dp_reducer_destroy: a pass of 'net' is open");
    CHECK_OK(dp_reducer_ready(g.reducer, 1, 3, NULL));
    CHECK_ERROR(dp_reducer_ready(g.reducer, 1, 3, NULL), DP_ERR_STATE,
                "dp_reducer_ready: local rank 1 reported unit 3 'h.3' twice");
    CHECK_ERROR(dp_reducer_ready(g.reducer, 2, 3, NULL), DP_ERR_INVALID, "local_rank is 2");
    CHECK_ERROR(dp_reducer_ready(g.reducer, -1, 3, NULL), DP_ERR_INVALID, "local_rank is -1");
    CHECK_ERROR(dp_reducer_ready(g.reducer, 0, LAYERS, NULL), DP_ERR_INVALID, "unit 8, 'net' has");
    CHECK_ERROR(dp_reducer_ready(g.reducer, 0, 1, dp_local_stream(g.ctx, 1)), DP_ERR_INVALID,
                "stream is not of local rank 0");
    CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH, "rank 0 did not report unit 0");
    CHECK_ERROR(dp_reducer_ready(g.reducer, 0, 0, NULL), DP_ERR_STATE, "no pass");
    one_pass(&g);
    CHECK_ERROR(dp_reducer_info_get(g.reducer, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_reducer_bucket_get(g.reducer, 0, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_reducer_destroy(g.reducer));
    CHECK_ERROR(dp_reducer_destroy(g.reducer), DP_ERR_STATE,
                "dp_reducer_destroy: the reducer was destroyed already");
    CHECK_ERROR(dp_reducer_begin(g.reducer, NULL), DP_ERR_STATE, "destroyed already");
    CHECK_ERROR(dp_reducer_ready(g.reducer, 0, 0, NULL), DP_ERR_STATE, "destroyed already");
    CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_STATE, "destroyed already");
    CHECK_ERROR(dp_reducer_info_get(g.reducer, &info), DP_ERR_STATE, "destroyed already");
    CHECK_OK(dp_reducer_destroy(NULL));
    CHECK_ERROR(dp_reducer_begin(NULL, NULL), DP_ERR_INVALID, "dp_reducer_begin: reducer is NULL");
    CHECK_ERROR(dp_reducer_ready(NULL, 0, 0, NULL), DP_ERR_INVALID, "reducer is NULL");
    CHECK_ERROR(dp_reducer_info_get(NULL, &info), DP_ERR_INVALID, "reducer is NULL");
    g.reducer = NULL;
    grads_end(&g);
}

typedef struct misplaced {
    grads g;
    const dp_reducer_config *config;
    dp_reducer *other;
} misplaced;

static dp_status call_from_inside(int local_rank, dp_scope *scope, void *user)
{
    misplaced *m = user;
    dp_reducer *other = NULL;
    (void)scope;
    CHECK_ERROR(dp_reducer_begin(m->other, NULL), DP_ERR_STATE,
                "dp_reducer_begin: a function under dp_run");
    CHECK_ERROR(dp_reducer_finish(m->g.reducer), DP_ERR_STATE,
                "dp_reducer_finish: a function under dp_run");
    CHECK_ERROR(dp_reducer_destroy(m->other), DP_ERR_STATE,
                "dp_reducer_destroy: a function under dp_run");
    CHECK_ERROR(dp_reducer_create(m->g.ctx, m->config, &other), DP_ERR_STATE,
                "dp_reducer_create: a function under dp_run");
    CHECK(other == NULL);
    return dp_reducer_ready(m->g.reducer, local_rank, 0, NULL);
}

TEST(calls_in_the_wrong_place)
{
    const dp_reducer_config config = {.reduction = DP_SUM_RANKS};
    misplaced m = {.config = &config};
    grads_begin(&m.g, open_here(2), 5);
    grads_create(&m.g, config);
    CHECK_OK(dp_reducer_create(m.g.ctx, &config, &m.other));
    CHECK_OK(dp_reducer_begin(m.g.reducer, NULL));
    grads_fill(&m.g, 1);
    CHECK_OK(dp_run(m.g.ctx, NULL, call_from_inside, &m));
    CHECK_OK(dp_reducer_finish(m.g.reducer));
    check_all(&m.g, 2);
    grads_end(&m.g);
}

static void check_refused(dp_ctx *ctx, dp_reducer_config config, const char *part)
{
    dp_reducer *reducer = NULL;
    CHECK_ERROR(dp_reducer_create(ctx, &config, &reducer), DP_ERR_INVALID, part);
    CHECK(strncmp(dp_last_error(), "dp_reducer_create: ", 19) == 0);
    CHECK(reducer == NULL);
}

static dp_reducer_config with_ranges(const dp_block *blocks, const dp_range *ranges, size_t count)
{
    return (dp_reducer_config){.blocks = blocks,
                               .block_count = 2,
                               .ranges = ranges,
                               .range_count = count,
                               .reduction = DP_MEAN_RANKS};
}

TEST(wrong_ranges)
{
    float a[2][6], b[2][3];
    const dp_block blocks[] = {{DP_F32, 6, (void *[]){a[0], a[1]}},
                               {DP_F32, 3, (void *[]){b[0], b[1]}}};
    const struct {
        dp_range ranges[3];
        const char *part;
    } cases[] = {
        {{{0, 0, 0, 6}, {1, 1, 0, 4}, {0}}, "range 1, 4 elements from 0 on, goes beyond block 1"},
        {{{0, 0, 7, 0}, {0}, {0}}, "range 0, 0 elements from 7 on"},
        {{{0, 0, 2, SIZE_MAX}, {0}, {0}}, "goes beyond block 0, which has 6"},
        {{{2, 0, 0, 1}, {0}, {0}}, "range 0 is of block 2, there are 2"},
        {{{0, 1, 2, 2}, {0, 0, 0, 3}, {1, 2, 0, 1}}, "unit 0 at 0 overlaps that of unit 1 at 2"},
        {{{0, 0, 1, 2}, {0, 0, 1, 2}, {1, 1, 0, 1}}, "at 1 overlaps that of unit 0 at 1"},
        {{{0, 0, 0, 3}, {0, 2, 2, 2}, {1, 1, 1, 1}}, "unit 0 at 0 overlaps that of unit 2 at 2"},
        {{{0, 0, 0, 5}, {0, 1, 2, 0}, {0, 2, 4, 2}}, "unit 0 at 0 overlaps that of unit 2 at 4"},
        {{{0, 0, 0, 1}, {0, 2, 1, 1}, {0, 2, 2, 1}},
         "unit 1 has no range (units 0 to 2 must each have one)"},
        {{{0, 3, 0, 1}, {0}, {0}}, "range 0 is of unit 3"}};
    dp_ctx *ctx = open_here(2);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_refused(ctx, with_ranges(blocks, cases[i].ranges, 3), cases[i].part);
    }
    check_refused(ctx, with_ranges(blocks, NULL, 3), "ranges is NULL");
    check_refused(ctx, with_ranges(blocks, cases[0].ranges, SIZE_MAX), "than can be counted");
    check_refused(ctx, with_ranges(NULL, cases[0].ranges, 3), "blocks is NULL");
    dp_close(ctx);
}

TEST(a_range_of_nothing_may_be_anywhere)
{
    const dp_range ranges[] = {
        {0, 0, 0, 8}, {0, 1, 5, 0}, {0, 2, 0, 0}, {0, 3, 8, 2}, {0, 4, 8, 0}};
    grads g;
    grads_begin(&g, open_here(2), 10);
    grads_create(
        &g, (dp_reducer_config){.ranges = ranges, .range_count = 5, .reduction = DP_SUM_RANKS});
    grads_add(&g, 1);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    for (uint32_t unit = 5; unit-- > 0;)
        report(&g, unit);
    CHECK_OK(dp_reducer_finish(g.reducer));
    check_all(&g, 3);
    grads_end(&g);
}

TEST(wrong_blocks)
{
    float a[6];
    void *apart[] = {a, a + 3}, *same[] = {a, a + 2}, *none[] = {a, NULL};
    const char *const unit_names[] = {NULL};
    dp_block block = {DP_F32, 3, apart};
    dp_reducer_config config = {.blocks = &block, .block_count = 1, .reduction = DP_SUM_RANKS};
    dp_ctx *ctx = open_here(2);
    dp_reducer *reducer = NULL;
    block.dtype = (dp_dtype)77;
    check_refused(ctx, config, "77 is not a dtype");
    block = (dp_block){DP_F32, 3, same};
    check_refused(ctx, config, "block 0 of local rank 1 overlaps that of local rank 0");
    block.local = none;
    check_refused(ctx, config, "block 0 of local rank 1 is NULL");
    block.local = NULL;
    check_refused(ctx, config, "block 0: local is NULL");
    block = (dp_block){DP_F32, SIZE_MAX / 4, apart};
    check_refused(ctx, config, "more elements than can be counted");
    block = (dp_block){DP_I32, 3, apart};
    config.unit_names = unit_names;
    check_refused(ctx, config, "unit_names[0] is NULL");
    config.unit_names = NULL;
    config.reduction = DP_MEAN_SAMPLES;
    check_refused(ctx, config, "block 0 is i32: a mean would be cut");
    config.reduction = DP_MEAN_RANKS;
    check_refused(ctx, config, "block 0 is i32: a mean would be cut");
    for (int reduction = -1; reduction <= 4; reduction += reduction < 0 ? 1 : 4) {
        config.reduction = (dp_reduction)reduction;
        check_refused(ctx, config, "not DP_SUM_RANKS, DP_MEAN_RANKS or DP_MEAN_SAMPLES");
    }
    config.reduction = DP_SUM_RANKS;
    config.unused_units = (dp_unused)3;
    check_refused(ctx, config, "unused_units is 3, not DP_UNUSED_ERROR, _FOUND or _FIXED");
    config.unused_units = DP_UNUSED_FIXED;
    CHECK_ERROR(dp_reducer_create(ctx, NULL, &reducer), DP_ERR_INVALID, "config is NULL");
    CHECK_ERROR(dp_reducer_create(ctx, &config, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_reducer_create(ctx, &config, &reducer));
    dp_close(ctx);
}

/* ---- ranks that disagree --------------------------------------------------------------------- */

static const char *const differences[] = {
    "rank 1 has block 0 of 8 f16, rank 0 has block 0 of 8 f32",
    "rank 1 has block 0 of 7 f32, rank 0 has block 0 of 8 f32",
    "rank 1 has 2 elements from 0 on of block 0 for unit 0 'a', rank 0 has 3 elements from 0 on of "
    "block 0 for unit 0 'a'",
    "rank 1 has 2 elements from 5 on of block 0 for unit 0 'a', rank 0 has 2 elements from 5 on of "
    "block 0 for unit 1 'b'",
    "rank 1 has reduction DP_SUM_RANKS, rank 0 has reduction DP_MEAN_RANKS",
    "rank 1 has buckets.first_bytes 3, rank 0 has buckets.first_bytes 1048576",
    "rank 1 has buckets.bytes 3, rank 0 has buckets.bytes 26214400",
    "rank 1 has unused_units DP_UNUSED_FOUND, rank 0 has unused_units DP_UNUSED_ERROR",
    "rank 1 has 1 elements from 4 on of block 0 for unit 1 'c', rank 0 has 1 elements from 4 on of "
    "block 0 for unit 1 'b'",
    NULL};

static void create_another(meeting *m, dp_ctx *ctx, int difference)
{
    static const char *const unit_names[] = {"a", "b"}, *const other[] = {"a", "c"};
    const int64_t count = 8;
    const bool odd = m->process == 1;
    char want[200];
    dp_tensor data;
    dp_scope *scope = dp_scope_begin(ctx); /* ends with the context */
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &data));
    const dp_block block = {odd && difference == 0 ? DP_F16 : DP_F32,
                            odd && difference == 1 ? 7u : 8u, (void *[]){data.data}};
    const dp_range ranges[] = {{0, 0, 0, odd && difference == 2 ? 2u : 3u},
                               {0, odd && difference == 3 ? 0u : 1u, 5, 2},
                               {0, 1, 4, 1}};
    const dp_reducer_config config = {
        .blocks = &block,
        .block_count = 1,
        .ranges = ranges,
        .range_count = 3,
        .unit_names = odd && difference == 8 ? other : unit_names,
        .reduction = odd && difference == 4 ? DP_SUM_RANKS : DP_MEAN_RANKS,
        .buckets = {.first_bytes = odd && difference == 5 ? 3 : 0,
                    .bytes = odd && difference == 6 ? 3 : 0},
        .unused_units = odd && difference == 7 ? DP_UNUSED_FOUND : DP_UNUSED_ERROR};
    dp_reducer *reducer = NULL;
    if (differences[difference] == NULL) {
        CHECK_OK(dp_reducer_create(ctx, &config, &reducer));
        CHECK_OK(dp_reducer_destroy(reducer));
        return;
    }
    snprintf(want, sizeof want, "dp_reducer_create: %s", differences[difference]);
    CHECK_STATUS(dp_reducer_create(ctx, &config, &reducer), DP_ERR_MISMATCH);
    CHECK_STR(dp_last_error(), want);
    CHECK(reducer == NULL);
}

static void another_reducer(meeting *m)
{
    dp_ctx *ctx = open_job(m, 1, dp_cpu());
    for (int difference = 0; difference < 10; difference++) {
        create_another(m, ctx, difference);
    }
    dp_close(ctx);
}

static void a_wrong_reducer(meeting *m)
{
    const dp_reducer_config config = {.reduction = DP_SUM_RANKS,
                                      .range_count = m->process == m->process_count - 1};
    dp_ctx *ctx = open_job(m, 1, dp_cpu());
    dp_reducer *reducer = NULL;
    char want[64];
    snprintf(want, sizeof want, "dp_reducer_create: rank %d: ranges is NULL", m->process_count - 1);
    CHECK_STATUS(dp_reducer_create(ctx, &config, &reducer), DP_ERR_INVALID);
    CHECK_STR(dp_last_error(), want);
    dp_close(ctx);
}

TEST(ranks_create_different_reducers)
{
    in_processes(2, another_reducer);
    in_processes(3, another_reducer);
    in_processes(2, a_wrong_reducer);
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* The others fail in the bucket that they wait for, and say so from then on. */
static void one_leaves(meeting *m)
{
    grads g;
    layers_begin(&g, open_job(m, 1, dp_cpu()), 10, (dp_reducer_config){0});
    one_pass(&g);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    if (m->process != 1)
        backward(&g);
    wait_for_all(m); /* nobody leaves while another one still reports */
    if (m->process != 1) {
        CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_ABORTED,
                    ") failed: dp_close: in an open pass");
        CHECK(dp_failure(g.ctx, NULL));
        CHECK_STATUS(dp_reducer_begin(g.reducer, NULL), DP_ERR_ABORTED);
        CHECK_STATUS(dp_reducer_ready(g.reducer, 0, 0, NULL), DP_ERR_ABORTED);
    }
    dp_close(g.ctx); /* process 1 in an open pass */
    free(g.local[0]);
}

/* By the library's own tables, behind the failure of another job: there rank 0 is to blame, here it
   is who leaves. */
static void one_leaves_two_jobs(meeting *m)
{
    dp_ctx *here, *other;
    dp_config config = config_of(m, 1), second = config_of(m->second, 1);
    dp_failure_info failure;
    grads g;
    config.colls = second.colls = NULL;
    CHECK_OK(dp_open(&config, &here));
    CHECK_OK(dp_open(&second, &other));
    layers_begin(&g, here, 10, one_by_one);
    one_pass(&g);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    if (m->process == 0) {
        backward(&g);
        dp_abort(other, DP_ERR_ABORTED, "no more of this"); /* from now on process 1 may leave */
        while (!dp_failure(here, &failure)) { /* the courier is waiting for process 1 */
            rest(1);
        }
        CHECK_INT(failure.rank, 1);
        CHECK_SAYS(failure.text, "rank 1 (process 1, pid ");
        CHECK_SAYS(failure.text, "failed: dp_close: in an open pass");
        CHECK_STATUS(dp_reducer_finish(g.reducer), DP_ERR_ABORTED);
    } else {
        CHECK_ERROR(dp_barrier(other), DP_ERR_ABORTED, "no more of this");
    }
    dp_close(here);
    dp_close(other);
    free(g.local[0]);
}

TEST(a_process_closes_in_an_open_pass)
{
    in_processes(2, one_leaves);
    in_processes(2, one_leaves_two_jobs);
}

/* One that was joined may be seen for a moment longer. */
static void check_threads(int want)
{
    for (int ms = 0; ms < PATIENCE_MS && count_threads() > want; ms++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    CHECK_INT(count_threads(), want);
}

/* A courier comes with the first reducer and goes with the context. */
static void one_courier(meeting *m)
{
    int before = count_threads(), open;
    dp_ctx *ctx = open_job(m, 2, dp_cpu());
    dp_reducer *reducers[2];
    open = count_threads();
    for (int i = 0; i < 2; i++) {
        CHECK_OK(
            dp_reducer_create(ctx, &(dp_reducer_config){.reduction = DP_SUM_RANKS}, &reducers[i]));
        CHECK_INT(count_threads(), open + 1);
    }
    dp_close(ctx);
    check_threads(before);
}

static void no_courier(int device_count)
{
    dp_ctx *ctx = open_here(device_count);
    dp_reducer *reducer;
    int before = count_threads();
    CHECK_OK(dp_reducer_create(ctx, &(dp_reducer_config){.reduction = DP_SUM_RANKS}, &reducer));
    CHECK_INT(count_threads(), before);
    dp_close(ctx);
}

TEST(a_courier_for_several_processes_only)
{
    no_courier(1);
    no_courier(2);
    in_processes(2, one_courier);
}

/* What the courier fails with, finish returns. */
enum { COUNT_FAILS = 77, COUNT_IS_SLOW = 78, COUNT_IS_MUTE = 79 };
static bool is_slow;

static dp_status fail_to_reduce(dp_comm *comm, const dp_coll_call *call)
{
    if (call->verb != DP_ALL_REDUCE)
        return meeting_coll()->run(comm, call);
    size_t count = call->count;
    if (count == COUNT_IS_SLOW && is_slow) {
        nanosleep(&(struct timespec){.tv_sec = 2}, NULL);
    }
    if (count == COUNT_FAILS) {
        return dp_error(DP_ERR_NO_MEMORY, "no buffer for %zu", count);
    }
    if (count == COUNT_IS_MUTE) {
        return DP_ERR_NO_MEMORY;
    }
    return boot_coll()->run(comm, call);
}

static dp_status failing_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    static dp_coll_ops ops;
    dp_status status = meeting_coll()->open(host, config, out);
    ops = *meeting_coll();
    ops.run = fail_to_reduce;
    if (status == DP_OK) {
        (*out)->ops = &ops;
    }
    return status;
}

static dp_ctx *open_failing_with(meeting *m, dp_log log)
{
    dp_coll_ops ops = *meeting_coll();
    const dp_coll_ops *const colls[] = {&ops, NULL};
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    ops.open = failing_open;
    config.colls = colls;
    config.log = log;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static dp_ctx *open_failing(meeting *m)
{
    return open_failing_with(m, (dp_log){.fn = NULL});
}

static void a_bucket_fails_by(meeting *m, size_t count, const char *part)
{
    grads g;
    grads_begin(&g, open_failing(m), count);
    grads_create(&g, (dp_reducer_config){.reduction = DP_SUM_RANKS});
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    report(&g, 0);
    dp_status status = dp_reducer_finish(g.reducer);
    if (status != DP_ERR_REMOTE) /* the other process may have failed, and left, before */
        CHECK_STATUS(status, DP_ERR_INTERNAL);
    CHECK(status == DP_ERR_REMOTE || strstr(dp_last_error(), part) != NULL);
    CHECK(dp_failure(g.ctx, NULL));
    grads_end(&g);
}

static void a_bucket_fails(meeting *m)
{
    a_bucket_fails_by(m, COUNT_FAILS, "no buffer for 77 (DP_ERR_NO_MEMORY)");
}

static void a_bucket_fails_mute(meeting *m)
{
    a_bucket_fails_by(m, COUNT_IS_MUTE, "out of memory (DP_ERR_NO_MEMORY)");
}

TEST(a_bucket_that_fails_is_the_jobs_failure)
{
    in_processes(2, a_bucket_fails);
    in_processes(2, a_bucket_fails_mute);
}

/* A log that takes its time. */
static void write_slowly(const dp_log_record *record, void *user)
{
    atomic_int *lines = user;
    if (record->level != DP_LOG_ERROR)
        return;
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    atomic_fetch_add(lines, 1);
}

static void close_while_the_courier_logs(meeting *m)
{
    atomic_int lines = 0;
    grads g;
    const dp_log slow = {.fn = write_slowly, .user = &lines, .level = DP_LOG_ERROR};
    layers_begin(&g, open_failing_with(m, slow), COUNT_FAILS, one_by_one);
    dp_ctx *ctx = g.ctx;
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    report(&g, 0);
    while (!dp_failure(g.ctx, NULL))
        sched_yield();
    grads_end(&g);
    CHECK(!dp_failure(ctx, NULL));
    CHECK_SAYS(dp_last_error(), "closed");
    CHECK(atomic_load(&lines) > 1);
}

TEST(closing_waits_for_the_couriers_log)
{
    in_processes(2, close_while_the_courier_logs);
}

static void *abort_soon(void *user)
{
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    dp_abort(user, DP_ERR_ABORTED, "by another thread");
    return NULL;
}

/* The courier of process 0 waits for a slow one; who waits for it need not. */
static void abort_while_a_bucket_travels(meeting *m)
{
    struct timespec start, end;
    pthread_t thread;
    grads g;
    is_slow = m->process == 1;
    layers_begin(&g, open_failing(m), COUNT_IS_SLOW, one_by_one);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    report(&g, 0);
    rest(100); /* until the courier is in it */
    if (m->process == 0) {
        clock_gettime(CLOCK_MONOTONIC, &start);
        CHECK_INT(pthread_create(&thread, NULL, abort_soon, g.ctx), 0);
        CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_ABORTED, "by another thread");
        clock_gettime(CLOCK_MONOTONIC, &end);
        pthread_join(thread, NULL);
        CHECK(end.tv_sec - start.tv_sec < 2);
    } else {
        dp_status status = dp_reducer_finish(g.reducer);
        CHECK(status == DP_OK || status == DP_ERR_ABORTED);
    }
    grads_end(&g);
}

TEST(abort_releases_who_waits_for_the_courier)
{
    in_processes(2, abort_while_a_bucket_travels);
}

/* Nobody comes to the bucket that the courier of process 0 is in: closing does not wait for it. */
static void close_while_a_bucket_travels(meeting *m)
{
    char closed = 0;
    grads g;
    dp_ctx *ctx = NULL;
    dp_config config = config_of(m, 1);
    config.colls = NULL; /* the library's own can be interrupted */
    config.timeout_ms = 30000;
    CHECK_OK(dp_open(&config, &ctx));
    layers_begin(&g, ctx, 9, one_by_one);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    if (m->process == 0) {
        report(&g, 0);
        rest(100);
        double start = now_ms();
        dp_close(ctx);
        CHECK(now_ms() - start < SOON_MS * test_timeout_scale());
        CHECK_OK(meeting_send(m->ends[1][0], &closed, 1));
    } else {
        CHECK_OK(meeting_receive(m->ends[1][1], &closed, 1));
        dp_close(ctx);
    }
    free(g.local[0]);
}

TEST(closing_does_not_wait_for_a_bucket)
{
    in_processes(2, close_while_a_bucket_travels);
}

static int comms_opened, comms_closed;

static void counting_close(dp_comm *comm)
{
    comms_closed++;
    meeting_coll()->close(comm);
}

/* The courier's communicator, a context's second one, cannot be had in process 1. */
static dp_status counting_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    static dp_coll_ops ops;
    ops = *meeting_coll();
    ops.close = counting_close;
    CHECK_OK(meeting_coll()->open(host, config, out));
    (*out)->ops = &ops;
    if (++comms_opened < 2 || config->bootstrap->process == 0)
        return DP_OK;
    counting_close(*out);
    *out = NULL;
    return dp_error(DP_ERR_NO_MEMORY, "no socket for a courier");
}

static void no_comm_for_the_courier(meeting *m)
{
    dp_coll_ops ops = *meeting_coll();
    const dp_coll_ops *const colls[] = {&ops, NULL};
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    ops.open = counting_open;
    config.colls = colls;
    CHECK_STATUS(dp_open(&config, &ctx), m->process == 1 ? DP_ERR_NO_MEMORY : DP_ERR_REMOTE);
    CHECK_INT(comms_opened, 2);
    CHECK_INT(comms_closed, 2);
}

TEST(communicators_of_the_courier_are_closed)
{
    in_processes(2, no_comm_for_the_courier);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static dp_status create_and_use(dp_ctx *ctx)
{
    static float data[2][95];
    dp_range ranges[1 + KINDS * DEEP];
    const dp_block block = {DP_F32, 95, (void *[]){data[0], data[1]}};
    const dp_reducer_config config = {.name = "net",
                                      .blocks = &block,
                                      .block_count = 1,
                                      .ranges = ranges,
                                      .range_count = interleaved(ranges),
                                      .unit_names = names,
                                      .reduction = DP_MEAN_RANKS};
    dp_reducer *reducer = NULL;
    dp_status status = dp_reducer_create(ctx, &config, &reducer);
    CHECK((status == DP_OK) == (reducer != NULL));
    if (status != DP_OK) {
        return status;
    }
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    for (uint32_t unit = 0; unit <= DEEP; unit++) {
        CHECK_OK(dp_reducer_ready(reducer, 0, unit, NULL));
        CHECK_OK(dp_reducer_ready(reducer, 1, unit, NULL));
    }
    CHECK_OK(dp_reducer_finish(reducer));
    return dp_reducer_destroy(reducer);
}

/* With poison each piece of a scope has a block of its own, so that many can fail. */
TEST(every_allocation_fails_once)
{
    size_t failures = 0;
    for (int poison = 0; poison < 2; poison++) {
        for (bool failed = true; failed; failures += failed) {
            test_allocator counter = {0};
            dp_ctx *ctx = NULL;
            CHECK_OK(dp_open(&(dp_config){.device_count = 2,
                                          .poison = poison,
                                          .allocator = test_allocator_of(&counter)},
                             &ctx));
            counter.fail_at = counter.call_count + 1 + failures % 1000;
            failed = create_and_use(ctx) == DP_ERR_NO_MEMORY;
            CHECK(failed == (counter.fail_count > 0));
            CHECK_OK(create_and_use(ctx));
            dp_close(ctx);
            CHECK_NO_LEAKS(&counter);
        }
        CHECK(failures > 0);
        failures = 1000;
    }
}

static void steady_passes(dp_ctx *ctx, test_allocator *counter)
{
    size_t calls = 0;
    grads g;
    layers_begin(&g, ctx, 500,
                 (dp_reducer_config){.buckets.first_bytes = 2000, .unused_units = DP_UNUSED_FOUND});
    for (int pass = 0; pass < 6; pass++) {
        calls = pass == 3 ? counter->call_count : calls;
        one_pass(&g);
    }
    CHECK_INT(counter->call_count, calls);
    grads_end(&g);
    CHECK_NO_LEAKS(counter);
}

static void steady_in_processes(meeting *m)
{
    test_allocator counter = {0};
    dp_config config = config_of(m, 2);
    dp_ctx *ctx;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(dp_open(&config, &ctx));
    steady_passes(ctx, &counter);
}

TEST(a_steady_pass_allocates_nothing)
{
    test_allocator counter = {0};
    dp_ctx *ctx;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 3, .allocator = test_allocator_of(&counter)}, &ctx));
    steady_passes(ctx, &counter);
    in_processes(2, steady_in_processes);
    in_processes_on(toy_device(), 2, steady_in_processes);
}

/* A world of one has no courier, and nothing to wait for. */
TEST(a_world_of_one_only_keeps_count)
{
    grads g;
    layers_begin(&g, open_here(1), 10, (dp_reducer_config){0});
    grads_fill(&g, 7);
    one_pass(&g);
    check_all(&g, 7);
    CHECK_INT(info_of(g.reducer).early_count, 0);
    CHECK_INT(info_of(g.reducer).last.bytes, 0);
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_MISMATCH, "rank 0 did not report unit 0");
    grads_end(&g);
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_worked_values, 60)
{
    on_gpus("11", torch_in_processes);
    on_gpus("12", samples_in_processes);
    on_gpus("111", one_has_wrong_samples);
    on_gpus("13", many_layers_in_processes);
    on_gpus("21", no_units_in_processes);
}

TEST_SLOW(cuda_nccl_reports_in_different_orders, 60)
{
    on_gpus("11", rank_0_decides);
    on_gpus("1111", rank_0_decides);
    on_gpus("31", rank_0_decides);
}

TEST_SLOW(cuda_nccl_buckets_travel_before_finish, 60)
{
    on_gpus("11", first_bucket_travels_early);
    on_gpus("22", first_bucket_travels_early);
}

TEST_SLOW(cuda_nccl_several_reducers_at_the_same_time, 60)
{
    on_gpus("11", older_first);
    on_gpus("11", younger_first);
    on_gpus("11", middle_first);
}

TEST_SLOW(cuda_nccl_a_unit_that_a_rank_does_not_report, 60)
{
    on_gpus("12", a_missing_report_in_processes);
    on_gpus("111", a_missing_report_in_processes);
    on_gpus("11", full_again);
}

TEST_SLOW(cuda_nccl_units_that_nobody_reports_stay, 60)
{
    on_gpus("111", left_out_in_processes);
    on_gpus("12", left_out_in_processes);
}

TEST_SLOW(cuda_nccl_units_of_the_first_pass_are_those_of_all, 60)
{
    on_gpus("21", fixed_in_processes);
    on_gpus("11", fixed_units_travel);
    on_gpus("111", change_in_processes);
}

TEST_SLOW(cuda_nccl_ranks_create_different_reducers, 60)
{
    on_gpus("111", another_reducer);
    on_gpus("11", a_wrong_reducer);
}

TEST_SLOW(cuda_nccl_a_process_closes_in_an_open_pass, 60)
{
    on_gpus("11", one_leaves_two_jobs);
    on_gpus("11", close_while_a_bucket_travels);
}

TEST_SLOW(cuda_nccl_a_steady_pass_allocates_nothing, 60)
{
    on_gpus("12", steady_in_processes);
}
#endif
