/* test_compress.c - dp_local.h: sums of gradients in 8 or 4 bits, or of low rank. */

#include <float.h>
#include <math.h>
#include "methods.h"
/* clang-format off */
#include "examples/custom_device.h"
#include "ranked.h"
#include "dp_local.h"
/* clang-format on */

enum { MOST = 1000, BLOCK = 128 };

/* ---- the same by the words of the manual ----------------------------------------------------- */

typedef struct model { /* of all ranks */
    int bits, ranks;
    size_t count, each;
    float grads[RANKS][MOST]; /* of this pass */
    float own[RANKS][MOST + 2 * RANKS], part[RANKS][MOST];
    float sum[MOST + 2 * RANKS];
    float arrived[MOST], parts[MOST]; /* in the middle of a pass */
} model;

static model *model_of(int bits, int ranks, size_t count)
{
    model *m = test_room(sizeof *m);
    m->bits = bits;
    m->ranks = ranks;
    m->count = count;
    m->each = (count + (size_t)ranks - 1) / (size_t)ranks;
    m->each += m->each % 2;
    return m;
}

static size_t model_bytes(const model *m)
{
    return (m->each + BLOCK - 1) / BLOCK * 4 + (m->each * (size_t)m->bits + 7) / 8;
}

/* x becomes what is kept, `out` what arrives. */
static void model_send(const model *m, float *x, float *out)
{
    for (size_t at = 0; at < m->each; at += BLOCK) {
        float scale = 0;
        for (size_t i = at; i < m->each && i < at + BLOCK; i++)
            scale = isfinite(x[i]) ? fmaxf(scale, fabsf(x[i])) : NAN;
        for (size_t i = at; i < m->each && i < at + BLOCK; i++)
            if (!isfinite(x[i]))
                scale = NAN;
        scale /= m->bits == 8 ? 127 : 7;
        for (size_t i = at; i < m->each && i < at + BLOCK; i++) {
            out[i] = scale > 0 ? rintf(x[i] / scale) * scale : 0 * scale;
            x[i] = isnan(scale) ? 0 : x[i] - out[i];
        }
    }
}

/* The gradients become their sum, times `factor`. */
static void model_pass(model *m, float factor)
{
    for (int r = 0; r < m->ranks; r++)
        for (size_t k = 0; k < m->count; k++)
            m->own[r][k] += m->grads[r][k];
    for (int p = 0; p < m->ranks; p++) {
        memset(m->parts, 0, sizeof m->parts);
        for (int r = 0; r < m->ranks; r++) {
            model_send(m, m->own[r] + (size_t)p * m->each, m->arrived);
            for (size_t k = 0; k < m->each; k++)
                m->parts[k] += m->arrived[k];
        }
        for (size_t k = 0; k < m->each; k++)
            m->part[p][k] += m->parts[k] * factor;
        model_send(m, m->part[p], m->sum + (size_t)p * m->each);
    }
}

static void draw(model *m, uint64_t *seed)
{
    for (int r = 0; r < m->ranks; r++)
        for (size_t k = 0; k < m->count; k++) {
            float unit = (float)(test_random(seed) >> 40) / (1 << 23) - 1;
            m->grads[r][k] = k % 7 == 3 ? 0 : unit * (k % 5 == 0 ? 1e-3f : 1);
        }
}

/* ---- passes ---------------------------------------------------------------------------------- */

static dp_compressor *compressor_of(dp_ctx *ctx, int bits)
{
    dp_compressor *compressor = NULL;
    CHECK_OK(dp_compressor_create(ctx, &(dp_compressor_config){.bits = bits}, &compressor));
    return compressor;
}

static void begin(grads *g, dp_ctx *ctx, size_t count, dp_compressor *compressor,
                  dp_reduction reduction)
{
    grads_begin(g, ctx, count);
    grads_create(g, (dp_reducer_config){.reduction = reduction,
                                        .buckets = {.hook = dp_compress, .hook_user = compressor}});
}

static dp_status pass(const grads *g, const model *m)
{
    for (int i = 0; i < g->info.local_count; i++)
        memcpy(g->local[i], m->grads[g->info.rank_first + i], m->count * sizeof(float));
    CHECK_OK(dp_reducer_begin(g->reducer, NULL));
    report(g, 0);
    return dp_reducer_finish(g->reducer);
}

/* NaNs have many bits. */
static void check_sum(const grads *g, const model *m)
{
    for (int i = 0; i < g->info.local_count; i++)
        for (size_t k = 0; k < m->count; k++)
            CHECK_F64(g->local[i][k], m->sum[k], 0);
}

static void exact(dp_ctx *ctx, int bits, size_t count, dp_reduction reduction)
{
    uint64_t seed = test_seed();
    dp_compressor *compressor = compressor_of(ctx, bits);
    grads g;
    begin(&g, ctx, count, compressor, reduction);
    model *m = model_of(bits, g.info.rank_count, count);
    float factor = reduction == DP_MEAN_RANKS ? 1 / (float)m->ranks : 1;
    for (int i = 0; i < 4; i++) {
        draw(m, &seed);
        if (i == 2 && count > 100)
            m->grads[m->ranks - 1][count - 1] = INFINITY;
        model_pass(m, factor);
        CHECK_OK(pass(&g, m));
        check_sum(&g, m);
        CHECK_INT(info_of(g.reducer).last.bytes, (size_t)(m->ranks + 1) * model_bytes(m));
    }
    if (count > 300) /* the block of the last element, and no other */
        CHECK(isnan(g.local[0][count - 1]) == false && isfinite(g.local[0][0]));
    CHECK_OK(dp_reducer_destroy(g.reducer));
    dp_compressor_destroy(compressor);
    for (int i = 0; i < g.info.local_count; i++)
        free(g.local[i]);
}

static const size_t counts[] = {1, 2, 3, 5, 127, 128, 129, 257, 777, MOST};

static void exact_all(dp_ctx *ctx)
{
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        exact(ctx, 8, counts[c], DP_SUM_RANKS);
        exact(ctx, 4, counts[c], DP_MEAN_RANKS);
    }
    dp_close(ctx);
}

static void exact_in_processes(meeting *m)
{
    exact_all(open_job(m, 1, dp_cpu()));
}

static void exact_on_two_each(meeting *m)
{
    exact_all(open_job(m, 2, dp_cpu()));
}

TEST_SLOW(sums_are_exactly_those_of_the_manual, 60)
{
    exact_all(open_here(2));
    exact_all(open_here(3));
    in_processes(2, exact_in_processes);
    in_processes(3, exact_in_processes);
    in_processes(2, exact_on_two_each);
    in_processes_on(dp_cpu(), 3, exact_in_processes);
}

/* ---- worked values --------------------------------------------------------------------------- */

static void worked(dp_ctx *ctx)
{
    static const float first[2][3] = {{7, 1, 0.25f}, {-14, 2, 2}};
    dp_compressor *compressor = compressor_of(ctx, 4);
    grads g;
    begin(&g, ctx, 3, compressor, DP_SUM_RANKS);
    model *m = model_of(4, 2, 3);
    memcpy(m->grads[0], first[0], sizeof first[0]);
    memcpy(m->grads[1], first[1], sizeof first[1]);
    CHECK_OK(pass(&g, m));
    /* Part 0 is {7, 1} and {-14, 2}: scales 1 and 2, sums {-7, 3}; part 1 is {0.25} and {2}. */
    for (int i = 0; i < g.info.local_count; i++) {
        CHECK_F64(g.local[i][0], -7, 0);
        CHECK_F64(g.local[i][1], 3, 0);
        CHECK_F64(g.local[i][2], 2.25, 1e-6);
    }
    CHECK_INT(info_of(g.reducer).last.bytes, 3 * (4 + 1));
    grads_end(&g);
}

static void worked_in_processes(meeting *m)
{
    worked(open_job(m, 1, dp_cpu()));
}

TEST(worked_values)
{
    worked(open_here(2));
    in_processes(2, worked_in_processes);
}

/* A gradient that rounds to nothing comes later: the sum of all passes is right. */
static void small_ones(meeting *meet)
{
    enum { PASSES = 60 };
    double sum = 0;
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    dp_compressor *compressor = compressor_of(ctx, 4);
    grads g;
    begin(&g, ctx, 10, compressor, DP_MEAN_RANKS);
    model *m = model_of(4, 2, 10);
    for (int r = 0; r < 2; r++)
        for (size_t k = 0; k < 10; k++)
            m->grads[r][k] = k == 0 ? 1 : 0.01f;
    for (int i = 0; i < PASSES; i++) {
        CHECK_OK(pass(&g, m));
        sum += (double)g.local[0][1];
        CHECK(i > 0 || !(fabsf(g.local[0][1]) > 0));
    }
    CHECK_F64(sum, PASSES * 0.01, 2.0 / 14 + 0.01);
    grads_end(&g);
}

TEST(small_gradients_come_later)
{
    in_processes(2, small_ones);
}

/* A block of 8 bits holds the largest float, whose 127th part times 127 may be more than that. */
static void large_ones(meeting *meet)
{
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    dp_compressor *compressor = compressor_of(ctx, 8);
    grads g;
    begin(&g, ctx, 4, compressor, DP_SUM_RANKS);
    model *m = model_of(8, 2, 4);
    m->grads[0][0] = FLT_MAX, m->grads[1][1] = -FLT_MAX, m->grads[0][2] = FLT_MAX / 2;
    CHECK_OK(pass(&g, m));
    for (int k = 0; k < 4; k++) {
        static const double want[] = {1, -1, 0.5, 0};
        CHECK_F64((double)g.local[0][k] / (double)FLT_MAX, want[k], 0.005);
    }
    grads_end(&g);
}

TEST(the_largest_gradients_stay_finite)
{
    in_processes(2, large_ones);
}

/* Nothing is rounded, and what is reduced may have any dtype. */
TEST(alone_nothing_is_rounded)
{
    grads g;
    dp_ctx *ctx = open_here(1);
    begin(&g, ctx, 3, compressor_of(ctx, 4), DP_MEAN_RANKS);
    model *m = model_of(4, 1, 3);
    m->grads[0][0] = 0.1f, m->grads[0][1] = 1e-30f, m->grads[0][2] = 1;
    CHECK_OK(pass(&g, m));
    CHECK_BYTES(g.local[0], m->grads[0], 3 * sizeof(float));
    grads_end(&g);
}

/* ---- other dtypes, other buckets ------------------------------------------------------------- */

enum { KINDS = 4 };

typedef struct kinds {
    double f64[3];
    uint16_t f16[3], bf16[3];
    int32_t i32[3];
} kinds;

static void all_kinds(dp_ctx *ctx)
{
    static kinds own[RANKS];
    void *local[KINDS][RANKS];
    dp_reducer *reducer = NULL;
    for (size_t i = 0; i < RANKS; i++) {
        own[i] =
            (kinds){{7, 1, -3}, {0x4700, 0x3c00, 0xc200}, {0x40e0, 0x3f80, 0xc040}, {7, 1, -3}};
        local[0][i] = own[i].f64, local[1][i] = own[i].f16;
        local[2][i] = own[i].bf16, local[3][i] = own[i].i32;
    }
    const dp_block blocks[KINDS] = {{DP_F64, 3, local[0]},
                                    {DP_F16, 3, local[1]},
                                    {DP_BF16, 3, local[2]},
                                    {DP_I32, 3, local[3]}};
    CHECK_OK(dp_reducer_create(
        ctx,
        &(dp_reducer_config){.blocks = blocks,
                             .block_count = KINDS,
                             .reduction = DP_SUM_RANKS,
                             .buckets = {.hook = dp_compress, .hook_user = compressor_of(ctx, 4)}},
        &reducer));
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    for (int i = 0; i < 2; i++)
        for (uint32_t unit = 0; unit < KINDS; unit++)
            CHECK_OK(dp_reducer_ready(reducer, i, unit, NULL));
    CHECK_OK(dp_reducer_finish(reducer));
    for (int i = 0; i < 2; i++) {
        static const double sums[3] = {14, 2, -6};
        static const uint16_t halves[3] = {0x4b00, 0x4000, 0xc600},
                              shorts[3] = {0x4160, 0x4000, 0xc0c0};
        static const int32_t whole[3] = {14, 2, -6};
        CHECK_BYTES(own[i].f64, sums, sizeof sums);
        CHECK_BYTES(own[i].f16, halves, sizeof halves);
        CHECK_BYTES(own[i].bf16, shorts, sizeof shorts);
        CHECK_BYTES(own[i].i32, whole, sizeof whole);
    }
    dp_close(ctx);
}

TEST(gradients_of_any_dtype)
{
    all_kinds(open_here(2));
}

/* Buckets have other ranges after the first pass; what was kept for others is not added. */
static void regrouped(meeting *meet)
{
    static const dp_range ranges[] = {{.unit = 0, .count = 3},
                                      {.unit = 1, .first = 3, .count = 3},
                                      {.unit = 2, .first = 6, .count = 3},
                                      {.unit = 3, .first = 9, .count = 3}};
    static const float at_first[12] = {7, 0.25f, 7, 7, 0.25f, 7, 7, 0.25f, 7, 7, 0.25f, 7};
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    dp_compressor *compressor = compressor_of(ctx, 4);
    grads g;
    grads_begin(&g, ctx, 12);
    grads_create(&g, (dp_reducer_config){.reduction = DP_MEAN_RANKS,
                                         .ranges = ranges,
                                         .range_count = 4,
                                         .buckets = {.first_bytes = 24,
                                                     .bytes = 24,
                                                     .hook = dp_compress,
                                                     .hook_user = compressor}});
    check_buckets(g.reducer, "0 1 | 2 3");
    for (int i = 0; i < 4; i++) {
        memcpy(g.local[0], at_first, sizeof at_first);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        report(&g, 3), report(&g, 1), report(&g, 0), report(&g, 2);
        CHECK_OK(dp_reducer_finish(g.reducer));
        for (int k = 0; k < 12; k++) /* kept from the second on: 0.25, 0.5 (to even), 0.75 */
            CHECK_F64(g.local[0][k], k % 3 != 1 ? 7 : i == 3 ? 1 : 0, 0);
    }
    check_buckets(g.reducer, "3 1 | 0 2");
    grads_end(&g);
}

TEST(what_was_kept_is_of_the_same_ranges)
{
    in_processes(2, regrouped);
}

/* A reducer that comes after another one, and has its address, begins with nothing. */
static void one_after_another(meeting *meet)
{
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    dp_compressor *compressor = compressor_of(ctx, 4);
    model *m = model_of(4, 2, 3);
    grads g;
    for (int r = 0; r < 2; r++)
        m->grads[r][0] = 7, m->grads[r][1] = 0.375f;
    grads_begin(&g, ctx, 3);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(dp_reducer_destroy(g.reducer));
        grads_create(
            &g, (dp_reducer_config){.reduction = DP_MEAN_RANKS,
                                    .buckets = {.hook = dp_compress, .hook_user = compressor}});
        for (int k = 0; k < 2; k++) { /* 0.375, and then twice that */
            CHECK_OK(pass(&g, m));
            CHECK_F64(g.local[0][0], 7, 0);
            CHECK_F64(g.local[0][1], k, 0);
        }
    }
    grads_end(&g);
}

TEST(what_was_kept_is_of_the_same_reducer)
{
    in_processes(2, one_after_another);
}

/* Wherever a reducer lies: after each of these another one stays there. */
TEST(what_was_kept_goes_with_its_reducer)
{
    enum { COUNT = 1 << 18, TIMES = 8 };
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    size_t first = 0;
    grads g;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 2, .allocator = test_allocator_of(&counter)}, &ctx));
    dp_compressor *compressor = compressor_of(ctx, 8);
    grads_begin(&g, ctx, COUNT);
    for (int i = 0; i < TIMES; i++) {
        grads_create(
            &g, (dp_reducer_config){.reduction = DP_MEAN_RANKS,
                                    .buckets = {.hook = dp_compress, .hook_user = compressor}});
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        report(&g, 0);
        CHECK_OK(dp_reducer_finish(g.reducer));
        CHECK_OK(dp_reducer_destroy(g.reducer));
        grads_create(&g, (dp_reducer_config){.reduction = DP_MEAN_RANKS});
        first = i == 0 ? counter.live_bytes : first;
    }
    CHECK(counter.live_bytes - first < COUNT * sizeof(float));
    grads_end(&g);
    CHECK_NO_LEAKS(&counter);
}

static dp_status by_turns(const dp_bucket *bucket, void *user)
{
    dp_compressor *const *now = user;
    return dp_compress(bucket, *now);
}

/* Gradients whose bucket goes by the compressor that `now` is. 4 bits lose the second one. */
static model *begin_turns(grads *g, dp_ctx *ctx, dp_compressor **now)
{
    model *m = model_of(4, 2, 3);
    for (int r = 0; r < 2; r++)
        m->grads[r][0] = 7, m->grads[r][1] = 0.375f;
    grads_begin(g, ctx, 3);
    grads_create(g, (dp_reducer_config){.reduction = DP_MEAN_RANKS,
                                        .buckets = {.hook = by_turns, .hook_user = now}});
    return m;
}

/* Each begins with nothing. */
TEST(compressors_take_turns)
{
    dp_ctx *ctx = open_here(2);
    dp_compressor *four = compressor_of(ctx, 4), *eight = compressor_of(ctx, 8), *now = four;
    grads g;
    model *m = begin_turns(&g, ctx, &now);
    for (int i = 0; i < 4; i++) {
        now = i % 2 == 0 ? four : eight;
        CHECK_OK(pass(&g, m));
        CHECK_F64(g.local[0][0], 7, 1e-6);
        CHECK_F64(g.local[0][1], i % 2 == 0 ? 0 : 7 * 7.0 / 127, 1e-6);
    }
    grads_end(&g);
}

/* It has the same memory, and other bits: it begins with nothing. */
TEST(a_compressor_at_the_place_of_another_is_another)
{
    dp_ctx *ctx = open_here(2);
    dp_compressor *now = compressor_of(ctx, 4);
    const void *place = now;
    grads g;
    model *m = begin_turns(&g, ctx, &now);
    CHECK_OK(pass(&g, m));
    CHECK_F64(g.local[0][1], 0, 1e-6);
    dp_compressor_destroy(now);
    now = compressor_of(ctx, 8);
    CHECK(now == place);
    CHECK_OK(pass(&g, m));
    CHECK_F64(g.local[0][1], 7 * 7.0 / 127, 1e-6);
    grads_end(&g);
}

/* ---- a wrapper ------------------------------------------------------------------------------- */

/* A matrix, and a vector that does not fill its place in the block. */
static const dp_param_config wide_params[] = {{.name = "w", .ndim = 2, .shape = {10, 7}},
                                              {.name = "v", .ndim = 1, .shape = {7}},
                                              {.name = "seen", .buffer = true}};

static void wrapped_by(dp_ctx *ctx, dp_compressor_config config)
{
    static const plan how;
    dp_compressor *small = NULL;
    dp_module *par = NULL;
    dp_module *net = make_net_of(
        ctx, (dp_module_config){.state = &how, .params = wide_params, .param_count = 3});
    config.module = config.rank > 0 ? net : NULL;
    CHECK_OK(dp_compressor_create(ctx, &config, &small));
    CHECK_OK(dp_distributed(
        net,
        &(dp_distributed_config){.ignored = config.ignored,
                                 .ignored_count = config.ignored_count,
                                 .buckets = {.hook = dp_compress, .hook_user = small}},
        &par));
    for (int i = 0; i < 3; i++) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_value log;
        CHECK_OK(dp_train_step(par, step, a_part_each(ctx, step), NULL, &log));
        for (size_t p = config.ignored_count; p < 2; p++) {
            float got[70];
            dp_tensor grad;
            CHECK_OK(dp_owner_grad(par, 0, p, &grad));
            CHECK_OK(dp_read(ctx, &grad, got, (size_t)dp_tensor_count(&grad) * sizeof *got));
            for (int64_t k = 0; k < dp_tensor_count(&grad); k++)
                CHECK_F64(got[k], 1.5, 1e-5);
        }
        CHECK_OK(dp_zero_grad(par));
        dp_scope_end(step);
    }
    dp_close(ctx);
}

static void wrapped(meeting *meet)
{
    wrapped_by(open_job(meet, 1, dp_cpu()), (dp_compressor_config){.bits = 4});
    wrapped_by(open_job(meet, 1, dp_cpu()), (dp_compressor_config){.rank = 1});
    wrapped_by(
        open_job(meet, 1, dp_cpu()),
        (dp_compressor_config){.rank = 1, .ignored = (const char *[]){"w"}, .ignored_count = 1});
}

TEST(a_wrapper_sends_less)
{
    in_processes(2, wrapped);
}

/* ---- low rank -------------------------------------------------------------------------------- */

/* Units: a matrix, a vector, one that would not get half as small, and one of three dims. */
enum { M_ROWS = 12, M_COLS = 10, M_ALL = 120, V_ALL = 7, S_ALL = 4, T_ROWS = 4, T_ALL = 96 };
enum { LOW = M_ALL + V_ALL + S_ALL + T_ALL, LOW_V = M_ALL, LOW_S = LOW_V + V_ALL };
enum { LOW_T = LOW_S + S_ALL };

static const dp_range low_ranges[] = {{.unit = 0, .count = M_ALL},
                                      {.unit = 1, .first = LOW_V, .count = V_ALL},
                                      {.unit = 2, .first = LOW_S, .count = S_ALL},
                                      {.unit = 3, .first = LOW_T, .count = T_ALL}};

static dp_module *low_net(dp_ctx *ctx)
{
    const dp_param_config params[] = {
        {.name = "m", .ndim = 2, .shape = {M_ROWS, M_COLS}},
        {.name = "frozen", .ndim = 2, .shape = {3, 3}, .frozen = true},
        {.name = "v", .ndim = 1, .shape = {V_ALL}},
        {.name = "mean", .ndim = 1, .shape = {2}, .buffer = true},
        {.name = "none", .ndim = 2, .shape = {0, 3}},
        {.name = "s", .ndim = 2, .shape = {2, 2}},
        {.name = "t", .ndim = 3, .shape = {T_ROWS, 3, 8}}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "low", .params = params, .param_count = 7}, &net));
    return net;
}

static void low_begin(grads *g, dp_ctx *ctx, int rank, int64_t start, dp_reduction reduction)
{
    dp_compressor *low = NULL;
    CHECK_OK(dp_compressor_create(
        ctx, &(dp_compressor_config){.rank = rank, .module = low_net(ctx), .start = start}, &low));
    grads_begin(g, ctx, LOW);
    grads_create(g, (dp_reducer_config){.reduction = reduction,
                                        .ranges = low_ranges,
                                        .range_count = 4,
                                        .buckets = {.hook = dp_compress, .hook_user = low}});
}

static dp_status low_pass(const grads *g, const model *m)
{
    for (int i = 0; i < g->info.local_count; i++)
        memcpy(g->local[i], m->grads[g->info.rank_first + i], LOW * sizeof(float));
    CHECK_OK(dp_reducer_begin(g->reducer, NULL));
    for (uint32_t unit = 0; unit < 4; unit++)
        report(g, unit);
    return dp_reducer_finish(g->reducer);
}

/* What Q is at first: by the column and the place. */
static double drawn_at(uint64_t column, uint64_t j)
{
    uint64_t word = (column * M_COLS + j + 1) * 0x9e3779b97f4a7c15u;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
    word = (word ^ word >> 27) * 0x94d049bb133111ebu;
    return (double)(word >> 40) / (1 << 23) - 1;
}

typedef struct powers { /* PowerSGD of the first matrix, in f64 */
    int ranks, rank;
    double own[RANKS][M_ALL], q[4][M_COLS], p[4][M_ROWS], sum[M_ALL];
} powers;

static void powers_orthonormal(powers *w)
{
    for (int k = 0; k < w->rank; k++) {
        double norm = 0;
        for (int l = 0; l < k; l++) {
            double dot = 0;
            for (int i = 0; i < M_ROWS; i++)
                dot += w->p[k][i] * w->p[l][i];
            for (int i = 0; i < M_ROWS; i++)
                w->p[k][i] -= dot * w->p[l][i];
        }
        for (int i = 0; i < M_ROWS; i++)
            norm += w->p[k][i] * w->p[k][i];
        for (int i = 0; i < M_ROWS; i++)
            w->p[k][i] /= sqrt(norm);
    }
}

static void powers_pass(powers *w, const model *m)
{
    memset(w->p, 0, sizeof w->p);
    for (int r = 0; r < w->ranks; r++)
        for (int at = 0; at < M_ALL; at++) {
            w->own[r][at] += (double)m->grads[r][at];
            for (int k = 0; k < w->rank; k++)
                w->p[k][at / M_COLS] += w->own[r][at] * w->q[k][at % M_COLS];
        }
    powers_orthonormal(w);
    memset(w->q, 0, sizeof w->q);
    for (int r = 0; r < w->ranks; r++)
        for (int at = 0; at < M_ALL; at++)
            for (int k = 0; k < w->rank; k++)
                w->q[k][at % M_COLS] += w->own[r][at] * w->p[k][at / M_COLS];
    for (int at = 0; at < M_ALL; at++) {
        w->sum[at] = 0;
        for (int k = 0; k < w->rank; k++)
            w->sum[at] += w->p[k][at / M_COLS] * w->q[k][at % M_COLS];
        for (int r = 0; r < w->ranks; r++)
            w->own[r][at] -= w->sum[at] / w->ranks;
    }
}

static double low_sum(const model *m, size_t k)
{
    double sum = 0;
    for (int r = 0; r < m->ranks; r++)
        sum += (double)m->grads[r][k];
    return sum;
}

/* With rank 2 only the first matrix is sent as two others; with 1 the last one is, too. */
static void low_exact(dp_ctx *ctx, int rank, dp_reduction reduction)
{
    uint64_t seed = test_seed();
    grads g;
    low_begin(&g, ctx, rank, 0, reduction);
    model *m = model_of(8, g.info.rank_count, LOW);
    double factor = reduction == DP_MEAN_RANKS ? 1.0 / m->ranks : 1;
    powers *w = test_room(sizeof *w);
    w->ranks = m->ranks;
    w->rank = rank;
    for (int k = 0; k < rank; k++)
        for (int j = 0; j < M_COLS; j++)
            w->q[k][j] = drawn_at((uint64_t)k, (uint64_t)j);
    for (int i = 0; i < 4; i++) {
        size_t sent = V_ALL + S_ALL + (size_t)rank * (M_ROWS + M_COLS);
        sent += rank == 1 ? T_ROWS + T_ALL / T_ROWS : T_ALL;
        draw(m, &seed);
        CHECK_OK(low_pass(&g, m));
        powers_pass(w, m);
        for (int l = 0; l < g.info.local_count; l++) {
            for (size_t k = 0; k < M_ALL; k++)
                CHECK_F64(g.local[l][k], w->sum[k] * factor, 1e-4);
            for (size_t k = M_ALL; k < (rank == 1 ? LOW_T : LOW); k++)
                CHECK_F64(g.local[l][k], low_sum(m, k) * factor, 1e-5);
            CHECK_BYTES(g.local[l], g.local[0], LOW * sizeof(float));
        }
        CHECK_INT(info_of(g.reducer).last.bytes, sent * sizeof(float));
    }
    grads_end(&g);
}

static void low_in_processes(meeting *meet)
{
    low_exact(open_job(meet, 1, dp_cpu()), 1, DP_SUM_RANKS);
    low_exact(open_job(meet, 1, dp_cpu()), 2, DP_MEAN_RANKS);
}

TEST(gradients_of_low_rank_are_those_of_power_sgd)
{
    low_exact(open_here(2), 1, DP_MEAN_RANKS);
    low_exact(open_here(3), 2, DP_SUM_RANKS);
    in_processes(2, low_in_processes);
    in_processes(3, low_in_processes);
}

/* Some passes are as they would be without; then what has the rank arrives as a whole. After a pass
   of zeros, or of a NaN, too. */
static void low_by_and_by(dp_ctx *ctx)
{
    grads g;
    low_begin(&g, ctx, 1, 2, DP_SUM_RANKS);
    model *m = model_of(8, g.info.rank_count, LOW);
    for (int i = 0; i < 7; i++) {
        bool poisoned = i == 4, zeros = i == 2, plain = i < 2;
        for (int r = 0; r < m->ranks; r++)
            for (size_t k = 0; k < LOW; k++) /* rows and columns that differ by a factor */
                m->grads[r][k] =
                    zeros ? 0
                          : (float)(k < M_ALL ? (k / M_COLS + 1) * (k % M_COLS + 2) : k % 7) *
                                (float)(r + i + 1);
        if (plain)
            m->grads[0][5] = 77;
        if (poisoned)
            m->grads[m->ranks - 1][5] = NAN;
        CHECK_OK(low_pass(&g, m));
        for (int l = 0; l < g.info.local_count; l++) {
            for (size_t k = 0; k < LOW_T; k++) {
                double want = poisoned && k < M_ALL ? (double)NAN : low_sum(m, k);
                CHECK_F64(g.local[l][k], want, plain ? 0 : 1e-5 * fabs(low_sum(m, k)) + 1e-3);
            }
            for (size_t k = LOW_T; k < LOW && !plain; k++)
                CHECK(isfinite(g.local[l][k]));
        }
        CHECK(plain == (info_of(g.reducer).last.bytes == LOW * sizeof(float)));
    }
    grads_end(&g);
}

static void low_by_and_by_in_processes(meeting *meet)
{
    low_by_and_by(open_job(meet, 1, dp_cpu()));
}

TEST(low_rank_begins_and_begins_again)
{
    low_by_and_by(open_here(2));
    in_processes(2, low_by_and_by_in_processes);
}

/* What has not the rank comes later, and all processes have the same bits. */
static float *results; /* that all processes see */

static void low_in_the_long_run(meeting *meet)
{
    enum { PASSES = 40 };
    static double sum[LOW];
    uint64_t seed = test_seed();
    float *shared = results;
    grads g;
    low_begin(&g, open_job(meet, 1, dp_cpu()), 2, 0, DP_MEAN_RANKS);
    model *m = model_of(8, 2, LOW);
    draw(m, &seed);
    for (int i = 0; i < PASSES; i++) {
        CHECK_OK(low_pass(&g, m));
        for (size_t k = 0; k < LOW; k++)
            sum[k] += (double)g.local[0][k];
        memcpy(shared + meet->process * LOW, g.local[0], LOW * sizeof(float));
        wait_for_all(meet);
        CHECK_BYTES(shared, shared + LOW, LOW * sizeof(float));
        wait_for_all(meet);
    }
    for (size_t k = 0; k < LOW; k++)
        CHECK_F64(sum[k] / PASSES, low_sum(m, k) / 2, 0.25);
    grads_end(&g);
}

TEST(nothing_is_lost_by_a_low_rank)
{
    results = shared_memory(2 * LOW * sizeof *results);
    in_processes(2, low_in_the_long_run);
}

/* Numbers that differ by a power of 2, however large or small, arrive as such: to the last bit. */
static void low_of_any_size(meeting *meet)
{
    static const int sizes[] = {0, 80, 100, -80};
    static float first[4][LOW];
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    model *m = model_of(8, 2, LOW);
    for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
        uint64_t seed = 1;
        grads g;
        low_begin(&g, ctx, 2, 0, DP_SUM_RANKS);
        for (int i = 0; i < 4; i++) {
            draw(m, &seed);
            for (int r = 0; r < 2; r++)
                for (size_t k = 0; k < LOW; k++)
                    m->grads[r][k] = ldexpf(m->grads[r][k], sizes[p]);
            CHECK_OK(low_pass(&g, m));
            for (size_t k = 0; k < LOW; k++) {
                if (p == 0)
                    first[i][k] = g.local[0][k];
                CHECK_F64(ldexp((double)g.local[0][k], -sizes[p]), (double)first[i][k], 0);
            }
        }
        CHECK_OK(dp_reducer_destroy(g.reducer));
        free(g.local[0]);
    }
    dp_close(ctx);
}

TEST(low_rank_keeps_gradients_of_any_size)
{
    in_processes(2, low_of_any_size);
}

/* ---- failures -------------------------------------------------------------------------------- */

typedef struct reluctant {
    dp_compressor *inner;
    bool now;
} reluctant;

static dp_status fails_before(const dp_bucket *bucket, void *user)
{
    const reluctant *r = user;
    return r->now ? dp_error(DP_ERR_USER, "not now") : dp_compress(bucket, r->inner);
}

/* One rank forgets what it has kept, and the other does not. */
static void forgetful(meeting *meet)
{
    for (int rank = 0; rank < 2; rank++) {
        dp_ctx *ctx = open_job(meet, 1, dp_cpu());
        reluctant hook = {0};
        grads g;
        CHECK_OK(dp_compressor_create(
            ctx, &(dp_compressor_config){.rank = rank, .module = rank > 0 ? low_net(ctx) : NULL},
            &hook.inner));
        grads_begin(&g, ctx, LOW);
        grads_create(&g,
                     (dp_reducer_config){.reduction = DP_SUM_RANKS,
                                         .ranges = low_ranges,
                                         .range_count = 4,
                                         .buckets = {.hook = fails_before, .hook_user = &hook}});
        model *m = model_of(8, 2, LOW);
        for (int i = 0; i < 5; i++) {
            for (size_t k = 0; k < M_ALL; k++)
                m->grads[i % 2][k] = (float)((k / M_COLS + 1) * (k % M_COLS + 1)) / 128;
            hook.now = i == 2 && meet->process == 1;
            if (i == 2)
                CHECK_ERROR(low_pass(&g, m), DP_ERR_USER, "it failed on rank 1: not now");
            else
                CHECK_OK(low_pass(&g, m));
            for (size_t k = 0; k < M_ALL && i != 2; k++)
                CHECK_F64(g.local[0][k], low_sum(m, k), rank > 0 ? 1e-4 : 0.05);
            memcpy(results + meet->process * LOW, g.local[0], LOW * sizeof(float));
            wait_for_all(meet);
            CHECK(i == 2 || memcmp(results, results + LOW, LOW * sizeof(float)) == 0);
            wait_for_all(meet);
        }
        grads_end(&g);
    }
}

TEST(ranks_that_forget_have_the_same_results)
{
    results = shared_memory(2 * LOW * sizeof *results);
    in_processes(2, forgetful);
}

/* The same with low rank: what has the rank arrives all the same. */
TEST(every_allocation_of_low_rank_fails_once)
{
    bool fired = true;
    for (size_t at = 1; fired; at++) {
        test_allocator counter = {0};
        dp_compressor *low = NULL;
        dp_ctx *ctx = NULL;
        grads g;
        CHECK_OK(dp_open(&(dp_config){.device_count = 2,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        const dp_compressor_config config = {.rank = 1, .module = low_net(ctx)};
        counter.fail_at = counter.call_count + at;
        dp_status status = dp_compressor_create(ctx, &config, &low);
        fired = counter.fail_count > 0;
        counter.fail_at = 0;
        CHECK_STATUS(status, fired ? DP_ERR_NO_MEMORY : DP_OK);
        if (fired)
            CHECK_OK(dp_compressor_create(ctx, &config, &low));
        grads_begin(&g, ctx, LOW);
        grads_create(&g, (dp_reducer_config){.reduction = DP_SUM_RANKS,
                                             .ranges = low_ranges,
                                             .range_count = 4,
                                             .buckets = {.hook = dp_compress, .hook_user = low}});
        model *m = model_of(8, 2, LOW);
        for (size_t k = 0; k < M_ALL; k++)
            m->grads[1][k] = (float)((k / M_COLS + 1) * (k % M_COLS + 1));
        counter.fail_at = fired ? 0 : counter.call_count + at;
        status = low_pass(&g, m);
        fired = counter.fail_count > 0;
        counter.fail_at = 0;
        if (status != DP_OK)
            CHECK_ERROR(status, DP_ERR_USER, "failed on rank 0: dp_compress: ");
        CHECK_OK(low_pass(&g, m));
        for (size_t k = 0; k < M_ALL; k++)
            CHECK_F64(g.local[0][k], m->grads[1][k], 1e-3);
        CHECK_OK(dp_reducer_destroy(g.reducer));
        dp_compressor_destroy(low);
        dp_close(ctx);
        free(g.local[0]), free(g.local[1]);
        CHECK_NO_LEAKS(&counter);
    }
}

/* Where memory is missing the pass fails, and the next one begins with nothing kept. */
TEST(every_allocation_fails_once)
{
    bool fired = true;
    for (size_t at = 1; fired; at++) {
        test_allocator counter = {0};
        dp_ctx *ctx = NULL;
        dp_compressor *compressor = NULL;
        uint64_t seed = test_seed();
        grads g;
        CHECK_OK(dp_open(&(dp_config){.device_count = 2,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        model *m = model_of(8, 2, 300);
        counter.fail_at = counter.call_count + at;
        dp_status status = dp_compressor_create(ctx, NULL, &compressor);
        if (status != DP_OK) {
            CHECK_STATUS(status, DP_ERR_NO_MEMORY);
            CHECK_OK(dp_compressor_create(ctx, NULL, &compressor));
        }
        size_t fail_at = counter.fail_at;
        counter.fail_at = 0;
        begin(&g, ctx, 300, compressor, DP_SUM_RANKS);
        draw(m, &seed);
        if (fail_at > 0 && counter.fail_count == 0)
            counter.fail_at = counter.call_count + at;
        status = pass(&g, m);
        fired = counter.fail_count > 0;
        counter.fail_at = 0;
        if (status == DP_OK)
            model_pass(m, 1);
        else
            CHECK_ERROR(status, DP_ERR_USER, "failed on rank 0: dp_compress: ");
        model_pass(m, 1);
        CHECK_OK(pass(&g, m));
        check_sum(&g, m);
        size_t calls = counter.call_count;
        CHECK_OK(pass(&g, m));
        CHECK_INT(counter.call_count, calls);
        CHECK_OK(dp_reducer_destroy(g.reducer));
        dp_compressor_destroy(compressor);
        dp_close(ctx);
        free(g.local[0]), free(g.local[1]);
        CHECK_NO_LEAKS(&counter);
    }
}

TEST(wrong_arguments_are_named)
{
    dp_compressor *compressor = NULL, *other = NULL;
    dp_ctx *ctx = open_here(2), *foreign = open_here(2), *toys = open_on(toy_device(), 2);
    grads g;
    CHECK_ERROR(dp_compressor_create(NULL, NULL, &compressor), DP_ERR_INVALID, "ctx is NULL");
    CHECK_ERROR(dp_compressor_create(ctx, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_compressor_create(ctx, &(dp_compressor_config){.bits = 5}, &compressor),
                DP_ERR_INVALID, "dp_compressor_create: bits is 5, not 8 or 4");
    CHECK_ERROR(dp_compressor_create(toys, NULL, &compressor), DP_ERR_UNSUPPORTED,
                "dp_compressor_create: the host does not reach the memory of 'toy");
    const struct {
        dp_compressor_config config;
        const char *says;
    } wrong[] = {{{.rank = -1}, "dp_compressor_create: rank is -1, which is below 0"},
                 {{.rank = 1, .bits = 8}, "bits and rank are both set"},
                 {{.rank = 1, .start = -1}, "start is -1, which is below 0"},
                 {{.bits = 4, .start = 3}, "start is 3, but there is no rank"},
                 {{.rank = 1}, "module is not one of this context"},
                 {{.rank = 1, .module = low_net(ctx), .ignored_count = 2},
                  "ignored_count is 2, but ignored is NULL"},
                 {{.ignored = (const char *[]){"v"}, .ignored_count = 1},
                  "ignored_count is 1, but there is no rank"},
                 {{.rank = 1,
                   .module = low_net(ctx),
                   .ignored = (const char *[]){"v", "x"},
                   .ignored_count = 2},
                  "'low' has no parameter 'x'"},
                 {{.rank = 1, .module = low_net(foreign)}, "module is not one of this context"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK_ERROR(dp_compressor_create(ctx, &wrong[i].config, &compressor), DP_ERR_INVALID,
                    wrong[i].says);
    CHECK(compressor == NULL);
    CHECK_ERROR(dp_compress(NULL, NULL), DP_ERR_INVALID, "dp_compress: bucket is NULL");
    CHECK_ERROR(dp_compress(&(dp_bucket){.ctx = ctx}, NULL), DP_ERR_INVALID,
                "dp_compress: compressor is NULL");
    other = compressor_of(foreign, 8);
    model *m = model_of(8, 2, 3);
    begin(&g, ctx, 3, other, DP_SUM_RANKS);
    CHECK_ERROR(pass(&g, m), DP_ERR_USER, "dp_compress: the compressor is of another context");
    CHECK_OK(dp_reducer_destroy(g.reducer));
    CHECK_OK(dp_compressor_create(ctx, &(dp_compressor_config){.rank = 1, .module = low_net(ctx)},
                                  &other));
    grads_create(&g, (dp_reducer_config){.reduction = DP_SUM_RANKS,
                                         .buckets = {.hook = dp_compress, .hook_user = other}});
    CHECK_ERROR(pass(&g, m), DP_ERR_USER,
                "dp_compress: unit 0 has 3 elements, which is no parameter of the module");
    CHECK_OK(dp_reducer_destroy(g.reducer));
    m = model_of(8, 2, M_ALL + 16);
    free(g.local[0]), free(g.local[1]);
    begin(&g, ctx, M_ALL + 16, other, DP_SUM_RANKS);
    CHECK_ERROR(pass(&g, m), DP_ERR_USER, "unit 0 has 136 elements, which is no parameter");
    CHECK_OK(dp_reducer_destroy(g.reducer));
    free(g.local[0]), free(g.local[1]);
    begin(&g, ctx, M_ALL + 15, other, DP_SUM_RANKS);
    CHECK_OK(pass(&g, m = model_of(8, 2, M_ALL + 15)));
    dp_compressor_destroy(NULL);
    dp_close(foreign), dp_close(toys);
    grads_end(&g);
}
