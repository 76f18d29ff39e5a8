/* bench_move.c - C4, C5, C6: values cut, joined and collated on CPU devices. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bench.h"

/* ---- C4 -------------------------------------------------------------------------------------- */

enum { SCATTERS = 500 };

typedef struct cut {
    dp_ctx *ctx;
    dp_value value;
} cut;

static double scatter_once(void *user)
{
    const cut *c = user;
    double start = 0;
    for (int i = -10; i < SCATTERS; i++) {
        if (i == 0)
            start = now_ns();
        dp_value list;
        dp_scope *scope = dp_scope_begin(c->ctx);
        must(dp_scatter(c->ctx, scope, c->value, NULL, &list));
        dp_scope_end(scope);
    }
    return (now_ns() - start) / SCATTERS;
}

/* Bytes of the parts of a tensor that are not where the tensor is. */
static size_t bytes_copied(const cut *c, const dp_tensor *whole)
{
    size_t all = (size_t)dp_tensor_count(whole) * dp_dtype_bytes(whole->dtype), copied = 0;
    uintptr_t first = (uintptr_t)whole->data;
    dp_value list;
    dp_scope *scope = dp_scope_begin(c->ctx);
    must(dp_scatter(c->ctx, scope, dp_of(scope, whole), NULL, &list));
    for (size_t i = 0; i < list.count; i++) {
        const dp_tensor *part;
        must(dp_as_tensor(dp_at(list, i), "part", DP_DTYPE_ANY, -1, &part));
        uintptr_t at = (uintptr_t)part->data;
        if (at < first || at >= first + all)
            copied += (size_t)dp_tensor_count(part) * dp_dtype_bytes(part->dtype);
    }
    dp_scope_end(scope);
    return copied;
}

/* Four tensors among ten leaves. */
static dp_value nested_value(dp_scope *scope, const dp_tensor *image)
{
    dp_tensor label;
    must(dp_select(image, 1, 0, &label));
    dp_value lists = DP_LIST_OF(scope, dp_of(scope, image), dp_of(scope, &label));
    dp_value meta = DP_DICT(
        scope, {"scale", dp_float(0.5)}, {"flip", dp_bool(true)}, {"epoch", dp_int(3)},
        {"size", DP_LIST_OF(scope, dp_int(224), dp_int(224))}, {"name", dp_string(scope, "train")});
    return DP_DICT(scope, {"image", dp_of(scope, image)}, {"label", dp_of(scope, &label)},
                   {"lists", lists}, {"meta", meta});
}

void rows_c4(void)
{
    cut one = {.ctx = open_devices(2)}, nested = {.ctx = one.ctx};
    float *data = new_floats(256 * 784 * sizeof(float));
    dp_tensor image = dp_wrap(data, DP_F32, DP_SHAPE(256, 784));
    dp_scope *scope = dp_scope_begin(one.ctx);
    one.value = dp_of(scope, &image);
    nested.value = nested_value(scope, &image);
    entrant e[] = {{.once = scatter_once, .user = &one}, {.once = scatter_once, .user = &nested}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    report_count("C4 scatter to 2 CPU devices, copied", (double)bytes_copied(&one, &image), 0,
                 " B");
    report_time("C4 scatter of a tensor, with its scope", &e[0].times, 200);
    report_time("C4 scatter of 10 nested leaves", &e[1].times, 600);
    dp_scope_end(scope);
    dp_close(one.ctx);
    free(data);
}

/* ---- what C5 and C6 share: a limit that copies as many bytes --------------------------------- */

typedef struct plain_copy {
    team *team;
    copy_job job;
} plain_copy;

static void open_plain_copy(plain_copy *p, dp_ctx *ctx, size_t bytes)
{
    dp_info info;
    must(dp_info_get(ctx, &info));
    p->team = team_new(info.core_count < MAX_DEVICES ? info.core_count : MAX_DEVICES);
    p->job = (copy_job){.to = new_floats(bytes), .from = new_floats(bytes), .bytes = bytes};
}

static double plain_copy_once(void *user)
{
    plain_copy *p = user;
    team_wake(p->team);
    team_run(p->team, copy_part, &p->job);
    double start = now_ns();
    team_run(p->team, copy_part, &p->job);
    double spent = now_ns() - start;
    team_sleep(p->team);
    return spent;
}

static void close_plain_copy(plain_copy *p)
{
    team_free(p->team);
    free(p->job.to);
    free((void *)(uintptr_t)p->job.from);
}

/* ---- C5 -------------------------------------------------------------------------------------- */

enum { OUTPUTS = 4, OUTPUT_ROWS = 2048, OUTPUT_COLUMNS = 1024 };

typedef struct join {
    dp_ctx *ctx;
    dp_value list;
    int dim;
} join;

static double gather_once(void *user)
{
    const join *j = user;
    double spent = 0;
    for (int i = 0; i < 2; i++) {
        dp_value out;
        double start = now_ns();
        dp_scope *scope = dp_scope_begin(j->ctx);
        must(dp_gather(j->ctx, scope, j->list, &(dp_gather_config){.dim = j->dim}, &out));
        dp_scope_end(scope);
        spent = now_ns() - start;
    }
    return spent;
}

void rows_c5(void)
{
    join rows = {.ctx = open_devices(OUTPUTS), .dim = 0};
    plain_copy limit;
    dp_value outputs[OUTPUTS];
    dp_scope *scope = dp_scope_begin(rows.ctx);
    for (int i = 0; i < OUTPUTS; i++) {
        dp_tensor t;
        must(dp_tensor_new(scope, dp_local_device(rows.ctx, i), DP_F32,
                           DP_SHAPE(OUTPUT_ROWS, OUTPUT_COLUMNS), &t));
        must(dp_fill(rows.ctx, &t, dp_float(i)));
        outputs[i] = dp_of(scope, &t);
    }
    rows.list = dp_list_make(scope, DP_LIST, outputs, OUTPUTS);
    join columns = rows;
    columns.dim = 1;
    open_plain_copy(&limit, rows.ctx,
                    sizeof(float) * OUTPUTS * OUTPUT_ROWS * (size_t)OUTPUT_COLUMNS);
    entrant e[] = {{.once = gather_once, .user = &rows},
                   {.once = gather_once, .user = &columns},
                   {.once = plain_copy_once, .user = &limit}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    report_speed("C5 gather 4 x 8 MiB, dim 0, of memcpy", &e[0].times, NULL, &e[2].times, 0.9);
    report_speed("C5 gather 4 x 8 MiB, dim 1, of memcpy", &e[1].times, NULL, &e[2].times, 0.8);
    close_plain_copy(&limit);
    dp_scope_end(scope);
    dp_close(rows.ctx);
}

/* ---- C6 -------------------------------------------------------------------------------------- */

enum { IMAGES = 32, CHANNELS = 3, SIDE = 224 };

typedef struct pile {
    dp_ctx *ctx;
    dp_value samples[IMAGES];
} pile;

static double collate_once(void *user)
{
    const pile *p = user;
    double spent = 0;
    for (int i = 0; i < 2; i++) {
        dp_value out;
        double start = now_ns();
        dp_scope *scope = dp_scope_begin(p->ctx);
        must(dp_collate(scope, p->samples, IMAGES, IMAGES, &out));
        dp_scope_end(scope);
        spent = now_ns() - start;
    }
    return spent;
}

void rows_c6(void)
{
    pile p = {.ctx = open_devices(2)};
    plain_copy limit;
    size_t bytes = sizeof(float) * CHANNELS * SIDE * SIDE;
    float *data[IMAGES];
    dp_scope *scope = dp_scope_begin(p.ctx);
    for (int i = 0; i < IMAGES; i++) {
        data[i] = new_floats(bytes);
        dp_tensor t =
            dp_wrap(data[i], DP_F32, DP_SHAPE(CHANNELS, SIDE - i * 7 % 64, SIDE - i * 13 % 64));
        dp_container image = {.data = dp_of(scope, &t), .stack = true};
        p.samples[i] = DP_DICT(scope, {"img", dp_contain(scope, &image)});
    }
    open_plain_copy(&limit, p.ctx, bytes * IMAGES);
    entrant e[] = {{.once = collate_once, .user = &p}, {.once = plain_copy_once, .user = &limit}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    report_speed("C6 collate 32 images, of memcpy", &e[0].times, NULL, &e[1].times, 0.85);
    close_plain_copy(&limit);
    for (int i = 0; i < IMAGES; i++)
        free(data[i]);
    dp_scope_end(scope);
    dp_close(p.ctx);
}
