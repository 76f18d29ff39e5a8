/* grads.h - a reducer over one block of f32 a rank, on any devices, with layers as units. */

#ifndef GRADS_H
#define GRADS_H

#include <time.h>
#include "meeting.h"

enum { RANKS = 8 };

typedef struct grads { /* of the local ranks */
    dp_ctx *ctx;
    dp_info info;
    dp_reducer *reducer;
    float *local[RANKS];
    dp_tensor own[RANKS]; /* devices with memory of their own: what `local` is a copy of */
    bool has_own;
    size_t count;
} grads;

static inline void grads_push(const grads *g)
{
    const int64_t shape = (int64_t)g->count;
    for (int i = 0; i < g->info.local_count && g->has_own; i++) {
        dp_tensor host = dp_wrap(g->local[i], DP_F32, 1, &shape);
        CHECK_OK(dp_copy(g->ctx, &g->own[i], &host, NULL));
    }
}

static inline void grads_pull(const grads *g)
{
    for (int i = 0; i < g->info.local_count && g->has_own; i++) {
        CHECK_OK(dp_read(g->ctx, &g->own[i], g->local[i], g->count * sizeof(float)));
    }
}

static inline void grads_begin(grads *g, dp_ctx *ctx, size_t count)
{
    const int64_t shape = (int64_t)count;
    dp_device_info device;
    memset(g, 0, sizeof *g);
    g->ctx = ctx;
    g->count = count;
    CHECK_OK(dp_info_get(ctx, &g->info));
    CHECK_OK(dp_device_info_get(ctx, 0, &device));
    g->has_own = !device.host_memory;
    dp_scope *scope = dp_scope_begin(ctx); /* ends with the context */
    for (int i = 0; i < g->info.local_count; i++) {
        g->local[i] = calloc(count + 1, sizeof(float));
        CHECK(g->local[i] != NULL);
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, 1, &shape, &g->own[i]));
    }
    grads_push(g);
}

static inline void grads_create(grads *g, dp_reducer_config config)
{
    void *local[RANKS];
    for (int i = 0; i < g->info.local_count; i++) {
        local[i] = g->has_own ? g->own[i].data : g->local[i];
    }
    dp_block block = {DP_F32, g->count, local};
    config.blocks = &block;
    config.block_count = 1;
    CHECK_OK(dp_reducer_create(g->ctx, &config, &g->reducer));
    memset(local, 0, sizeof local); /* it was copied */
}

static inline void grads_end(grads *g)
{
    CHECK_OK(dp_reducer_destroy(g->reducer));
    dp_close(g->ctx);
    for (int i = 0; i < g->info.local_count; i++) {
        free(g->local[i]);
    }
}

/* Add value * (rank + 1) to every element: what backward of such a loss does. */
static inline void grads_add(const grads *g, float value)
{
    grads_pull(g);
    for (int i = 0; i < g->info.local_count; i++) {
        for (size_t k = 0; k < g->count; k++) {
            g->local[i][k] += value * (float)(g->info.rank_first + i + 1);
        }
    }
    grads_push(g);
}

static inline void grads_fill(const grads *g, float value)
{
    for (int i = 0; i < g->info.local_count; i++) {
        for (size_t k = 0; k < g->count; k++) {
            g->local[i][k] = value;
        }
    }
    grads_push(g);
}

static inline void check_all(const grads *g, double want)
{
    grads_pull(g);
    for (int i = 0; i < g->info.local_count; i++) {
        for (size_t k = 0; k < g->count; k++) {
            CHECK_F64(g->local[i][k], want, fabs(want) * 1e-6);
        }
    }
}

static inline void report(const grads *g, uint32_t unit)
{
    for (int i = 0; i < g->info.local_count; i++) {
        CHECK_OK(dp_reducer_ready(g->reducer, i, unit, NULL));
    }
}

static inline dp_reducer_info info_of(const dp_reducer *reducer)
{
    dp_reducer_info info;
    CHECK_OK(dp_reducer_info_get(reducer, &info));
    return info;
}

/* "7 6 5 | 4 3 2 1 0" */
static inline void check_buckets(const dp_reducer *reducer, const char *want)
{
    char text[256] = "";
    dp_bucket_info bucket;
    for (size_t b = 0; b < info_of(reducer).bucket_count; b++) {
        CHECK_OK(dp_reducer_bucket_get(reducer, b, &bucket));
        for (size_t i = 0; i < bucket.unit_count; i++) {
            size_t used = strlen(text);
            snprintf(text + used, sizeof text - used, "%s%s%u", b > 0 && i == 0 ? " | " : "",
                     i > 0 ? " " : "", (unsigned)bucket.units[i]);
        }
    }
    CHECK_STR(text, want);
}

static inline dp_ctx *open_here(int device_count)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = device_count}, &ctx));
    return ctx;
}

static inline dp_ctx *open_on(const dp_device_ops *ops, int device_count)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = device_count}, &ctx));
    return ctx;
}

/* Does what the reducer does without a hook. */
static inline dp_status plain_hook(const dp_bucket *bucket, void *user)
{
    (void)user;
    return dp_bucket_all_reduce(bucket, bucket->local, bucket->count, bucket->dtype, bucket->op,
                                bucket->scale);
}

enum { LAYERS = 8, LAYER = 90000 };

static inline const dp_range *layers(size_t count)
{
    static dp_range ranges[LAYERS];
    for (uint32_t i = 0; i < LAYERS; i++) {
        ranges[i] = (dp_range){.unit = i, .first = i * count, .count = count};
    }
    return ranges;
}

/* A bucket each, which travels as soon as it is reported. */
static const dp_reducer_config one_by_one = {.buckets = {.first_bytes = 1, .bytes = 1}};

static inline void layers_begin(grads *g, dp_ctx *ctx, size_t count, dp_reducer_config config)
{
    grads_begin(g, ctx, LAYERS * count);
    config.ranges = layers(count);
    config.range_count = LAYERS;
    config.reduction = DP_MEAN_RANKS;
    grads_create(g, config);
}

static inline void backward(const grads *g)
{
    for (uint32_t unit = LAYERS; unit-- > 0;) {
        report(g, unit);
    }
}

static inline void one_pass(const grads *g)
{
    CHECK_OK(dp_reducer_begin(g->reducer, NULL));
    backward(g);
    CHECK_OK(dp_reducer_finish(g->reducer));
}

/* So many buckets have travelled by themselves. */
static inline void await_early(const dp_reducer *reducer, size_t count)
{
    double most = PATIENCE_MS * test_timeout_scale();
    for (int ms = 0; ms < most && info_of(reducer).early_count < count; ms++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    CHECK_INT(info_of(reducer).early_count, count);
}

static inline void check_unit(const grads *g, uint32_t unit, double want_of_0, double step)
{
    size_t each = g->count / LAYERS;
    grads_pull(g);
    for (int i = 0; i < g->info.local_count; i++) {
        double want = want_of_0 + step * (g->info.rank_first + i);
        for (size_t k = 0; k < each; k++) {
            CHECK_F64(g->local[i][unit * each + k], want, 1e-6);
        }
    }
}

#endif /* GRADS_H */
