/* bench_parallel.c - C7, C9, C10, C12 once more, of modules and dp_data_parallel. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench.h"

enum { ROWS = 64, COLUMNS = 16, STEPS = 200, BIG = 8 << 20 /* floats of a parameter */ };

/* ---- a module that does nearly nothing ------------------------------------------------------- */

static const void *last_output; /* of a single replica */

static dp_status forward(dp_call *call)
{
    const dp_tensor *x = NULL;
    dp_tensor out;
    must(dp_call_tensor(call, "x", DP_F32, 2, &x));
    must(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(x->shape[0]), &out));
    for (int64_t i = 0; i < x->shape[0]; i++)
        ((float *)out.data)[i] = ((const float *)x->data)[i * COLUMNS];
    if (call->replica_count == 1)
        last_output = out.data;
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &out)});
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    float *grad = dp_grad(call, 0);
    for (size_t i = 0; i < *(const size_t *)call->state; i++)
        grad[i] += 1;
    return DP_OK;
}

static dp_status empty(dp_call *call)
{
    call->out = dp_none();
    return DP_OK;
}

static dp_module *new_module(dp_ctx *ctx, const size_t *count)
{
    static const dp_method methods[] = {
        {"forward", forward}, {"backward", backward}, {"empty", empty}};
    const dp_param_config weight = {.name = "weight", .ndim = 1, .shape = {(int64_t)*count}};
    dp_module *module = NULL;
    must(dp_module_create(ctx,
                          &(dp_module_config){.methods = methods,
                                              .method_count = 3,
                                              .params = &weight,
                                              .param_count = 1,
                                              .state = count},
                          &module));
    return module;
}

typedef struct model {
    dp_ctx *ctx;
    dp_module *net, *par;
    dp_module *used; /* one of them */
    float *x;
} model;

static void open_model(model *m, int devices, const size_t *count)
{
    *m = (model){.ctx = open_devices(devices), .x = new_floats(sizeof(float) * ROWS * COLUMNS)};
    m->net = new_module(m->ctx, count);
    must(dp_data_parallel(m->net, NULL, &m->par));
    m->used = m->par;
}

static void close_model(model *m)
{
    dp_close(m->ctx);
    free(m->x);
}

static dp_value batch_of(const model *m, dp_scope *scope)
{
    dp_tensor x = dp_wrap_const(m->x, DP_F32, DP_SHAPE(ROWS, COLUMNS));
    return DP_DICT(scope, {"x", dp_of(scope, &x)});
}

static void train_step(model *m)
{
    dp_value log;
    dp_scope *scope = dp_scope_begin(m->ctx);
    must(dp_train_step(m->used, scope, batch_of(m, scope), NULL, &log));
    must(dp_zero_grad(m->net));
    dp_scope_end(scope);
}

/* One forward, of steps that have a scope each. */
static double invoke_once(void *user)
{
    model *m = user;
    dp_scope *outer = dp_scope_begin(m->ctx);
    dp_value out, batch = batch_of(m, outer);
    double start = 0;
    for (int i = -10; i < STEPS; i++) {
        if (i == 0)
            start = now_ns();
        dp_scope *scope = dp_scope_begin(m->ctx);
        must(dp_invoke(m->used, scope, "empty", dp_none(), batch, NULL, &out, NULL));
        dp_scope_end(scope);
    }
    double each = (now_ns() - start) / STEPS;
    dp_scope_end(outer);
    return each;
}

/* ---- the rows -------------------------------------------------------------------------------- */

static const size_t small = 4096, big = BIG;

void rows_p7(void)
{
    model m;
    open_model(&m, 2, &small);
    entrant e[] = {{.once = invoke_once, .user = &m}};
    take_turns(e, 1);
    report_time("C7 dp_data_parallel of an empty module, 2 devices", &e[0].times, 600);
    close_model(&m);
}

void rows_p9(void)
{
    model m;
    open_model(&m, 2, &small);
    for (int i = 0; i < STEPS; i++)
        train_step(&m);
    call_counts before = calls_so_far();
    for (int i = 0; i < STEPS; i++)
        train_step(&m);
    call_counts after = calls_so_far();
    report_count("C9 heap calls in 200 training steps", (double)(after.heap - before.heap), 0, "");
    report_count("C9 mmap, munmap calls in 200 training steps",
                 (double)(after.mmaps - before.mmaps), 0, "");
    report_count("C9 threads started in 200 training steps",
                 (double)(after.threads - before.threads), 0, "");
    close_model(&m);
}

static double resident_mib(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%*d %ld", &pages) != 1)
        pages = 0;
    if (file != NULL)
        fclose(file);
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / (1 << 20);
}

/* MiB that a model of 32 MiB takes on 4 devices, in a process of its own. */
static double memory_of_steps(void)
{
    int pipes[2];
    double mib = -1;
    if (pipe(pipes) != 0)
        return mib;
    pid_t child = fork();
    if (child == 0) {
        model m;
        double before = resident_mib();
        open_model(&m, 4, &big);
        for (int i = 0; i < 3; i++)
            train_step(&m);
        mib = resident_mib() - before;
        _exit(write(pipes[1], &mib, sizeof mib) == sizeof mib ? 0 : 1);
    }
    close(pipes[1]);
    if (child < 0 || read(pipes[0], &mib, sizeof mib) != sizeof mib)
        mib = -1;
    close(pipes[0]);
    if (child > 0)
        waitpid(child, NULL, 0);
    return mib;
}

/* Parameters once, gradients four times, and nothing else that counts. */
void rows_p10(void)
{
    const double one = BIG * sizeof(float) / (double)(1 << 20);
    report_count("C10 memory of 32 MiB of parameters, 4 devices", memory_of_steps(), 5 * one * 1.05,
                 " MiB");
}

/* The wrapper hands the module's own output on. */
static int outputs_copied(model *m)
{
    dp_value out;
    dp_scope *scope = dp_scope_begin(m->ctx);
    must(dp_invoke(m->used, scope, "forward", dp_none(), batch_of(m, scope), NULL, &out, NULL));
    int copied = dp_get(out, "loss").as.t->data != last_output;
    dp_scope_end(scope);
    return copied;
}

void rows_p12(void)
{
    model m, plain;
    open_model(&m, 1, &small);
    plain = m;
    plain.used = m.net;
    entrant e[] = {{.once = invoke_once, .user = &m}, {.once = invoke_once, .user = &plain}};
    take_turns(e, 2);
    report_extra("C12 dp_data_parallel on one device, against the module", &e[0].times, &e[1].times,
                 1000);
    report_count("C12 outputs copied by dp_data_parallel on one device", outputs_copied(&m), 0, "");
    close_model(&m);
}
