/* bench_busy.c - C13: a small training step, on a quiet machine and beside others that compute. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench.h"

enum { ROWS = 64, WIDTH = 64, WEIGHTS = WIDTH * WIDTH, STEPS = 400, OTHERS = 2 };

/* ---- the step: y = W x, the loss is the mean of y squared ------------------------------------ */

static float dot(const float *a, const float *b)
{
    float sum[8] = {0};
    for (int i = 0; i < WIDTH; i += 8)
        for (int k = 0; k < 8; k++)
            sum[k] += a[i + k] * b[i + k];
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static void forward_rows(const float *x, int64_t rows, const float *weight, float *loss)
{
    for (int64_t r = 0; r < rows; r++, x += WIDTH) {
        loss[r] = 0;
        for (int i = 0; i < WIDTH; i++) {
            float y = dot(weight + i * WIDTH, x);
            loss[r] += y * y;
        }
    }
}

static void backward_rows(const float *x, int64_t rows, const float *weight, float *grad)
{
    for (int64_t r = 0; r < rows; r++, x += WIDTH) {
        for (int i = 0; i < WIDTH; i++) {
            float y = 2 * dot(weight + i * WIDTH, x);
            for (int k = 0; k < WIDTH; k++)
                grad[i * WIDTH + k] += y * x[k];
        }
    }
}

/* ---- with the library ------------------------------------------------------------------------ */

typedef struct model {
    dp_ctx *ctx;
    dp_module *net, *par;
    float *x;
} model;

static dp_status forward(dp_call *call)
{
    const dp_tensor *x = NULL;
    dp_tensor loss;
    must(dp_call_tensor(call, "x", DP_F32, 2, &x));
    must(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(x->shape[0]), &loss));
    forward_rows(x->data, x->shape[0], dp_param(call, 0), loss.data);
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)});
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    const dp_tensor *x = NULL;
    must(dp_call_tensor(call, "x", DP_F32, 2, &x));
    backward_rows(x->data, x->shape[0], dp_param(call, 0), dp_grad(call, 0));
    return DP_OK;
}

static void open_model(model *m, int devices)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    const dp_param_config weight = {.name = "weight", .ndim = 2, .shape = {WIDTH, WIDTH}};
    *m = (model){.ctx = open_devices(devices), .x = new_floats(sizeof(float) * ROWS * WIDTH)};
    must(dp_module_create(
        m->ctx,
        &(dp_module_config){
            .methods = methods, .method_count = 2, .params = &weight, .param_count = 1},
        &m->net));
    must(dp_data_parallel(m->net, NULL, &m->par));
}

static void close_model(model *m)
{
    dp_close(m->ctx);
    free(m->x);
}

static void train_step(const model *m)
{
    dp_value log;
    dp_scope *scope = dp_scope_begin(m->ctx);
    dp_tensor x = dp_wrap_const(m->x, DP_F32, DP_SHAPE(ROWS, WIDTH));
    dp_value batch = DP_DICT(scope, {"x", dp_of(scope, &x)});
    must(dp_train_step(m->par, scope, batch, NULL, &log));
    must(dp_zero_grad(m->net));
    dp_scope_end(scope);
}

static double steps_once(void *user)
{
    const model *m = user;
    double start = 0;
    for (int i = -10; i < STEPS; i++) {
        if (i == 0)
            start = now_ns();
        train_step(m);
    }
    return (now_ns() - start) / STEPS;
}

/* ---- by hand: two threads and two barriers --------------------------------------------------- */

typedef struct pair {
    pthread_barrier_t begin, end;
    pthread_t thread;
    float *x, *weight, *grads[2], losses[ROWS];
    bool over;
} pair;

static void pair_half(pair *p, int half)
{
    enum { SHARE = ROWS / 2 };
    const float *x = p->x + half * SHARE * WIDTH;
    forward_rows(x, SHARE, p->weight, p->losses + half * SHARE);
    backward_rows(x, SHARE, p->weight, p->grads[half]);
}

static void *pair_main(void *user)
{
    pair *p = user;
    for (;;) {
        pthread_barrier_wait(&p->begin);
        if (p->over)
            return NULL;
        pair_half(p, 1);
        pthread_barrier_wait(&p->end);
    }
}

static void pair_step(pair *p)
{
    pthread_barrier_wait(&p->begin);
    pair_half(p, 0);
    pthread_barrier_wait(&p->end);
    for (int i = 0; i < WEIGHTS; i++)
        p->grads[0][i] += p->grads[1][i];
    memset(p->grads[0], 0, sizeof(float) * WEIGHTS);
    memset(p->grads[1], 0, sizeof(float) * WEIGHTS);
}

static double pair_once(void *user)
{
    pair *p = user;
    double start = 0;
    for (int i = -10; i < STEPS; i++) {
        if (i == 0)
            start = now_ns();
        pair_step(p);
    }
    return (now_ns() - start) / STEPS;
}

static void open_pair(pair *p)
{
    *p =
        (pair){.x = new_floats(sizeof(float) * ROWS * WIDTH),
               .weight = new_floats(sizeof(float) * WEIGHTS),
               .grads = {new_floats(sizeof(float) * WEIGHTS), new_floats(sizeof(float) * WEIGHTS)}};
    pthread_barrier_init(&p->begin, NULL, 2);
    pthread_barrier_init(&p->end, NULL, 2);
    if (pthread_create(&p->thread, NULL, pair_main, p) != 0)
        abort();
}

static void close_pair(pair *p)
{
    p->over = true;
    pthread_barrier_wait(&p->begin);
    pthread_join(p->thread, NULL);
    pthread_barrier_destroy(&p->begin);
    pthread_barrier_destroy(&p->end);
    free(p->x);
    free(p->weight);
    free(p->grads[0]);
    free(p->grads[1]);
}

/* ---- the others ------------------------------------------------------------------------------ */

/* Computes until it is killed, or its parent is gone, whatever became of that. */
static void compute_for_ever(pid_t parent)
{
    volatile unsigned number = 1;
    while (getppid() == parent) {
        for (int i = 0; i < 100000; i++)
            number = number * 1664525u + 1013904223u;
    }
    _exit(0);
}

static void start_others(pid_t others[OTHERS])
{
    pid_t parent = getpid();
    for (int i = 0; i < OTHERS; i++) {
        others[i] = fork();
        if (others[i] == 0)
            compute_for_ever(parent);
    }
}

static void end_others(const pid_t others[OTHERS])
{
    for (int i = 0; i < OTHERS; i++) {
        if (others[i] > 0) {
            kill(others[i], SIGKILL);
            waitpid(others[i], NULL, 0);
        }
    }
}

static void row_quiet(model *two)
{
    pair p;
    open_pair(&p);
    entrant e[] = {{.once = steps_once, .user = two}, {.once = pair_once, .user = &p}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    close_pair(&p);
    report_share("C13 quiet: a small step, against 2 barriers", &e[0].times, &e[1].times, NULL, 1);
}

static void row_busy(model *two, model *one)
{
    pid_t others[OTHERS];
    entrant e[] = {{.once = steps_once, .user = two}, {.once = steps_once, .user = one}};
    start_others(others);
    take_turns(e, sizeof(e) / sizeof(e[0]));
    end_others(others);
    report_share("C13 busy: a small step, against 1 device", &e[0].times, &e[1].times, NULL, 1.3);
}

/* All as programs run that ask for nothing, even where the benchmark itself goes before others. */
void rows_c13(void)
{
    model one, two;
    int policy = sched_getscheduler(0);
    struct sched_param own = {0};
    sched_getparam(0, &own);
    sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){0});
    open_model(&two, 2);
    open_model(&one, 1);
    row_quiet(&two);
    row_busy(&two, &one);
    close_model(&one);
    close_model(&two);
    sched_setscheduler(0, policy, &own);
}
