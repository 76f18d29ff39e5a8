/* blas.c - a step of examples/im2col.h, a net that uses OpenMP and OpenBLAS, for the driver in
   bench.c: in a process of its own, as the driver is to run without these libraries.

       peer_blas

   Says "ready" and OpenBLAS' version; then, for each line "HOW BYTES CALLS" on the standard input,
   makes one step that does not count, and CALLS that do, and answers with the nanoseconds that one
   took. HOW is
     naive   two devices, and nothing is said about threads
     tuned   two devices; each and main have told the libraries by hand to use one thread
     alone   one device, whose libraries use one thread
   Ends with its input. */

#define DP_IMPLEMENTATION
#include "../../../dp_train.h"
#include "../../../examples/im2col.h"
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BATCH = 128, PIXELS = 28 * 28, WAYS = 3 };

typedef struct way {
    const char *name;
    int devices, each; /* each: dp_config.threads_per_device */
    bool one;          /* thread, said by hand */
    dp_ctx *ctx;
    dp_module *par;
    dp_optim *optim;
} way;

static way ways[WAYS] = {{.name = "naive", .devices = 2},
                         {.name = "tuned", .devices = 2, .each = -1, .one = true},
                         {.name = "alone", .devices = 1, .each = -1, .one = true}};
static float pictures[BATCH][PIXELS];
static int64_t labels[BATCH];
static int openmp_usual, blas_usual;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static dp_status say_one(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank, (void)scope, (void)user;
    omp_set_num_threads(1);
    return DP_OK;
}

static void begin(way *w)
{
    dp_module *net;
    DP_CHECK(dp_open(
        &(dp_config){.device_count = w->devices, .threads_per_device = w->each, .local_only = true},
        &w->ctx));
    if (w->one)
        DP_CHECK(dp_run(w->ctx, NULL, say_one, NULL));
    DP_CHECK(net_create(w->ctx, &net));
    DP_CHECK(dp_data_parallel(net, NULL, &w->par));
    DP_CHECK(dp_optim_create(w->par, &(dp_optim_config){.hyper = {.lr = 1e-6}}, &w->optim));
}

static void step(way *w)
{
    dp_scope *scope = dp_scope_begin(w->ctx);
    dp_value log, batch = DP_DICT(
                      scope, {"image", dp_array(scope, pictures, DP_F32, DP_SHAPE(BATCH, PIXELS))},
                      {"label", dp_array(scope, labels, DP_I64, DP_SHAPE(BATCH))});
    DP_CHECK(dp_train_step(w->par, scope, batch, w->optim, &log));
    dp_scope_end(scope);
}

static double serve(way *w, int calls)
{
    omp_set_num_threads(w->one ? 1 : openmp_usual);
    openblas_set_num_threads(w->one ? 1 : blas_usual);
    step(w);
    double start = now();
    for (int i = 0; i < calls; i++)
        step(w);
    return (now() - start) / calls;
}

int main(void)
{
    char line[128], how[16];
    unsigned seed = 1;
    openmp_usual = omp_get_max_threads();
    blas_usual = openblas_get_num_threads();
    for (int i = 0; i < BATCH * PIXELS; i++) {
        seed = seed * 1664525u + 1013904223u;
        pictures[i / PIXELS][i % PIXELS] = (float)(seed >> 8) / (1 << 24);
        labels[i / PIXELS] = i / PIXELS % KINDS;
    }
    for (int i = 0; i < WAYS; i++)
        begin(&ways[i]);
    printf("ready %s\n", openblas_get_config());
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin) != NULL) {
        size_t bytes;
        int calls, i = 0;
        if (sscanf(line, "%15s %zu %d", how, &bytes, &calls) != 3)
            break;
        while (i < WAYS - 1 && strcmp(ways[i].name, how) != 0)
            i++;
        printf("%.1f\n", serve(&ways[i], calls));
        fflush(stdout);
    }
    for (int i = 0; i < WAYS; i++)
        dp_close(ways[i].ctx);
    return 0;
}
