/* bench_step.c - C7, C9, C12: what a step costs besides its work. */

#include <pthread.h>
#include <stdlib.h>
#include "bench.h"

/* ---- C7 -------------------------------------------------------------------------------------- */

enum { RUNS = 2000, THREAD_RUNS = 20 };

static dp_status nothing(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank, (void)scope, (void)user;
    return DP_OK;
}

static double run_once(void *user)
{
    dp_ctx *ctx = user;
    double start = 0;
    for (int i = -10; i < RUNS; i++) {
        if (i == 0)
            start = now_ns();
        dp_scope *scope = dp_scope_begin(ctx);
        must(dp_run(ctx, scope, nothing, NULL));
        dp_scope_end(scope);
    }
    return (now_ns() - start) / RUNS;
}

static void *thread_main(void *user)
{
    return user;
}

static double threads_once(void *user)
{
    (void)user;
    double start = now_ns();
    for (int i = 0; i < THREAD_RUNS; i++) {
        pthread_t threads[2];
        for (int k = 0; k < 2; k++) {
            if (pthread_create(&threads[k], NULL, thread_main, NULL) != 0)
                abort();
        }
        for (int k = 0; k < 2; k++)
            pthread_join(threads[k], NULL);
    }
    return (now_ns() - start) / THREAD_RUNS;
}

void rows_c7(void)
{
    dp_ctx *ctx = open_devices(2);
    entrant e[] = {{.once = run_once, .user = ctx}, {.once = threads_once}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    report_time("C7 dp_run of nothing, 2 devices", &e[0].times, 600);
    report_speed("C7 the same, against 2 pthreads", &e[0].times, &e[1].times, NULL, 50);
    dp_close(ctx);
}

/* ---- the step of C9 and C12 ------------------------------------------------------------------ */

enum { ROWS = 64, FEATURES = 16, CLASSES = 10, GRADIENTS = 4096, STEPS = 200 };

typedef struct model {
    dp_ctx *ctx;
    float *images, *gradients[2]; /* of each device, as its outputs */
    int devices;
    dp_value inputs, outputs[2];
} model;

static void open_model(model *m, int devices)
{
    *m = (model){.devices = devices, .ctx = open_devices(devices)};
    m->images = new_floats(sizeof(float) * ROWS * FEATURES);
    for (int i = 0; i < devices; i++)
        m->gradients[i] = new_floats(sizeof(float) * GRADIENTS);
}

static void close_model(model *m)
{
    for (int i = 0; i < m->devices; i++)
        free(m->gradients[i]);
    free(m->images);
    dp_close(m->ctx);
}

static void work(const float *image, int64_t rows, float *output)
{
    for (int64_t i = 0; i < rows; i++) {
        for (int k = 0; k < CLASSES; k++)
            output[i * CLASSES + k] = image[i * FEATURES + k];
    }
}

static dp_status forward(int local_rank, dp_scope *scope, void *user)
{
    model *m = user;
    const dp_tensor *image;
    dp_tensor output;
    dp_value batch = dp_at(m->inputs, (size_t)local_rank);
    must(dp_as_tensor(dp_get(batch, "image"), "image", DP_F32, 2, &image));
    must(dp_tensor_new(scope, image->device, DP_F32, DP_SHAPE(image->shape[0], CLASSES), &output));
    work(image->data, image->shape[0], output.data);
    m->outputs[local_rank] = dp_of(scope, &output);
    return DP_OK;
}

static void step(model *m)
{
    dp_part parts[2];
    dp_value output;
    dp_tensor image = dp_wrap(m->images, DP_F32, DP_SHAPE(ROWS, FEATURES));
    dp_scope *scope = dp_scope_begin(m->ctx);
    dp_value batch = DP_DICT(scope, {"image", dp_of(scope, &image)}, {"epoch", dp_int(1)});
    must(dp_scatter(m->ctx, scope, batch, NULL, &m->inputs));
    must(dp_run(m->ctx, scope, forward, m));
    for (int i = 0; i < m->devices; i++)
        parts[i] = (dp_part){.send = m->gradients[i], .recv = m->gradients[i]};
    must(dp_all_reduce(m->ctx, parts, GRADIENTS, DP_F32, DP_OP_SUM));
    must(dp_gather(m->ctx, scope, dp_list_make(scope, DP_LIST, m->outputs, (size_t)m->devices),
                   NULL, &output));
    dp_scope_end(scope);
}

static double step_once(void *user)
{
    model *m = user;
    double start = 0;
    for (int i = -10; i < STEPS; i++) {
        if (i == 0)
            start = now_ns();
        step(m);
    }
    return (now_ns() - start) / STEPS;
}

/* ---- C9 -------------------------------------------------------------------------------------- */

void rows_c9(void)
{
    model m;
    open_model(&m, 2);
    for (int i = 0; i < STEPS; i++)
        step(&m);
    call_counts before = calls_so_far();
    for (int i = 0; i < STEPS; i++)
        step(&m);
    call_counts after = calls_so_far();
    report_count("C9 heap calls in 200 steps", (double)(after.heap - before.heap), 0, "");
    report_count("C9 mmap, munmap calls in 200 steps", (double)(after.mmaps - before.mmaps), 0, "");
    report_count("C9 threads started in 200 steps", (double)(after.threads - before.threads), 0,
                 "");
    close_model(&m);
}

/* ---- C12 ------------------------------------------------------------------------------------- */

/* The same work without the library; volatile: the compiler must not see through it. */
static double direct_once(void *user)
{
    const model *m = user;
    static float output[ROWS * CLASSES];
    void (*volatile worker)(const float *, int64_t, float *) = work;
    double start = now_ns();
    for (int i = 0; i < STEPS; i++)
        worker(m->images, ROWS, output);
    return (now_ns() - start) / STEPS;
}

void rows_c12(void)
{
    model m;
    call_counts before = calls_so_far();
    open_model(&m, 1);
    entrant e[] = {{.once = step_once, .user = &m}, {.once = direct_once, .user = &m}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    report_extra("C12 step with one device, against none", &e[0].times, &e[1].times, 1000);
    report_count("C12 threads started with one device",
                 (double)(calls_so_far().threads - before.threads), 0, "");
    close_model(&m);
}
