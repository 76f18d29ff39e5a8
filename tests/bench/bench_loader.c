/* bench_loader.c - C16: a loader whose workers sleep, as if they decoded, against threads that do
   nothing but sleep. */

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include "bench.h"
/* clang-format off */
#include "../../dp_data.h"
/* clang-format on */

enum { WORKERS = 8, BATCH = 32, SAMPLES = 512, FLOATS = 64, MS = 1000000 };

typedef struct pictures {
    dp_ctx *ctx;
    dp_loader *loader;
    team *sleepers;
    const void *rows[SAMPLES]; /* where each sample was written */
    int moved;                 /* samples that are elsewhere in the batch */
} pictures;

static dp_status decode(dp_sample *sample, void *user)
{
    pictures *p = user;
    nanosleep(&(struct timespec){.tv_nsec = MS}, NULL);
    for (int i = 0; i < FLOATS; i++)
        ((float *)sample->rows[0])[i] = (float)sample->index;
    p->rows[sample->index] = sample->rows[0];
    return DP_OK;
}

static void look_for(pictures *p, const dp_batch *batch)
{
    const dp_tensor *x;
    must(dp_as_tensor(dp_get(batch->value, "x"), "x", DP_F32, 2, &x));
    for (int64_t i = 0; i < batch->count; i++) {
        const float *row = (const float *)x->data + i * FLOATS;
        p->moved += p->rows[batch->indices[i]] != row || row[0] < (float)batch->indices[i];
    }
}

/* The batches of one epoch, from the first that is asked for; none is read ahead before. */
static double load_once(void *user)
{
    pictures *p = user;
    double start = now_ns();
    for (bool ended = false; !ended;) {
        dp_scope *step = dp_scope_begin(p->ctx);
        dp_batch batch;
        must(dp_loader_next(p->loader, step, &batch));
        ended = batch.ended;
        if (!ended)
            look_for(p, &batch);
        dp_scope_end(step);
    }
    return now_ns() - start;
}

static void sleep_part(int part, int part_count, void *user)
{
    (void)part;
    (void)user;
    for (int i = 0; i < SAMPLES / part_count; i++)
        nanosleep(&(struct timespec){.tv_nsec = MS}, NULL);
}

static double sleep_once(void *user)
{
    pictures *p = user;
    team_wake(p->sleepers);
    double start = now_ns();
    team_run(p->sleepers, sleep_part, NULL);
    double spent = now_ns() - start;
    team_sleep(p->sleepers);
    return spent;
}

void rows_c16(void)
{
    static const dp_field x = {"x", DP_F32, 1, {FLOATS}};
    pictures *p = calloc(1, sizeof *p);
    if (p == NULL)
        abort();
    p->ctx = open_devices(2);
    p->sleepers = team_new(WORKERS);
    must(dp_loader_create(p->ctx,
                          &(dp_loader_config){.sampler = {.count = SAMPLES},
                                              .batch = BATCH,
                                              .read = decode,
                                              .user = p,
                                              .fields = &x,
                                              .field_count = 1,
                                              .worker_count = WORKERS},
                          &p->loader));
    entrant e[] = {{.once = load_once, .user = p}, {.once = sleep_once, .user = p}};
    take_turns(e, 2);
    report_speed("C16 512 samples of 1 ms, 8 workers, batch 32", &e[0].times, NULL, &e[1].times,
                 0.95);
    report_count("C16 rows that were copied into the batch", p->moved, 0, "");
    dp_loader_destroy(p->loader);
    team_free(p->sleepers);
    dp_close(p->ctx);
    free(p);
}
