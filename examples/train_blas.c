/* train_blas.c - a net that uses OpenMP and BLAS (im2col.h) learns on two devices. The program says
   nowhere how many threads they may use: while its methods run, each device has its share of the
   cores, and main has the numbers that it had. One device with one thread learns the same.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 -fopenmp examples/train_blas.c dp.o -o train_blas -lopenblas -lpthread -lm
   Prints:
   main: OpenMP ..., OpenBLAS ...
   device 0: OpenMP ..., OpenBLAS ...
   device 1: OpenMP ..., OpenBLAS ...
   2 devices: loss ... to ..., ... steps a second
   1 device, 1 thread: loss ... to ..., ... steps a second
   main: OpenMP ..., OpenBLAS ... */

#include "../dp_train.h"
#include "im2col.h"
#include "pictures.h" /* pictures[4096][784], labels[4096] */
#include <omp.h>
#include <stdlib.h>
#include <time.h>

enum { BATCH = 128, STEPS = 24 };

typedef struct threads {
    int openmp, blas;
} threads;

static threads threads_here(void)
{
    int openmp = omp_get_max_threads(), blas = openblas_get_num_threads();
    return (threads){openmp, openblas_get_parallel() == OPENBLAS_OPENMP ? openmp : blas};
}

static void print_threads(const char *who, threads t)
{
    printf("%s: OpenMP %d, OpenBLAS %d\n", who, t.openmp, t.blas);
}

static dp_status look(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    ((threads *)user)[local_rank] = threads_here();
    return DP_OK;
}

/* Whether each device may use its share, or fewer if the environment says so. */
static bool print_devices(dp_ctx *ctx)
{
    threads own = threads_here(), of[2];
    dp_info info;
    bool good = true;
    DP_CHECK(dp_info_get(ctx, &info));
    DP_CHECK(dp_run(ctx, NULL, look, of));
    for (int i = 0; i < 2; i++) {
        int each = info.threads_per_device;
        print_threads(i == 0 ? "device 0" : "device 1", of[i]);
        good = good && of[i].openmp == (own.openmp < each ? own.openmp : each);
        good = good && of[i].blas == (own.blas < each ? own.blas : each);
    }
    return good;
}

static float step(dp_ctx *ctx, dp_module *par, dp_optim *optim, int i)
{
    dp_scope *scope = dp_scope_begin(ctx);
    int first = i * BATCH % PICTURES;
    double loss;
    dp_value log;
    dp_value batch =
        DP_DICT(scope, {"image", dp_array(scope, pictures[first], DP_F32, DP_SHAPE(BATCH, PIXELS))},
                {"label", dp_array(scope, &labels[first], DP_I64, DP_SHAPE(BATCH))});
    DP_CHECK(dp_train_step(par, scope, batch, optim, &log));
    DP_CHECK(dp_item(ctx, dp_get(log, "loss"), &loss));
    dp_scope_end(scope);
    return (float)loss;
}

/* Returns what all losses come to. */
static float train(dp_ctx *ctx, const char *what)
{
    dp_module *net, *par;
    dp_optim *optim;
    struct timespec from, to;
    float first = 0, last = 0, sum = 0;
    DP_CHECK(net_create(ctx, &net));
    DP_CHECK(dp_data_parallel(net, NULL, &par));
    DP_CHECK(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 0.01}}, &optim));
    timespec_get(&from, TIME_UTC);
    for (int i = 0; i < STEPS; i++) {
        last = step(ctx, par, optim, i);
        first = i == 0 ? last : first;
        sum += last;
    }
    timespec_get(&to, TIME_UTC);
    double s = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) / 1e9;
    printf("%s: loss %.3f to %.3f, %.1f steps a second\n", what, (double)first, (double)last,
           STEPS / s);
    return sum;
}

int main(void)
{
    dp_ctx *ctx;
    threads before = threads_here(), after;
    load_pictures();
    print_threads("main", before);
    DP_CHECK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    bool good = print_devices(ctx);
    float many = train(ctx, "2 devices");
    dp_close(ctx);
    after = threads_here();
    omp_set_num_threads(1); /* one device is left alone: the caller says how many */
    openblas_set_num_threads(1);
    DP_CHECK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    float one = train(ctx, "1 device, 1 thread");
    dp_close(ctx);
    print_threads("main", after);
    good = good && after.openmp == before.openmp && after.blas == before.blas;
    return good && fabsf(many - one) < 0.001f * one ? 0 : 1;
}
