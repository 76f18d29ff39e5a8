/* test_thread.c - many threads, many rounds: for ThreadSanitizer, and for what only time shows. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "test.h"

enum { MAX_DEVICES = 8, COUNT = 257 };

static dp_ctx *open_devices(int device_count, int thread_count)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = device_count, .thread_count = thread_count}, &ctx));
    return ctx;
}

static pthread_t start(void *(*fn)(void *user), void *user)
{
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, fn, user), 0);
    return thread;
}

static void join(pthread_t thread)
{
    CHECK_INT(pthread_join(thread, NULL), 0);
}

static int rounds(int count) /* fewer where everything is slower */
{
    int scaled = (int)(count / test_timeout_scale());
    return scaled > 5 ? scaled : 5;
}

/* ---- runs and collectives, round after round ------------------------------------------------- */

typedef struct model { /* plain memory, handed from workers to collectives and back */
    dp_ctx *ctx;
    int device_count, step_count, round;
    float gradients[MAX_DEVICES][COUNT];
    float all[MAX_DEVICES][MAX_DEVICES * COUNT];
} model;

static void open_model(model *m, int device_count, int thread_count, int step_count)
{
    m->ctx = open_devices(device_count, thread_count);
    m->device_count = device_count;
    m->step_count = rounds(step_count);
    m->round = 0;
}

static dp_status backward(int local_rank, dp_scope *scope, void *user)
{
    model *m = user;
    float *own = dp_scope_alloc(scope, COUNT * sizeof *own);
    CHECK(own != NULL);
    for (int i = 0; i < COUNT; i++) {
        own[i] = (float)(m->round + local_rank * i);
    }
    memcpy(m->gradients[local_rank], own, COUNT * sizeof *own);
    return DP_OK;
}

static dp_status compare(int local_rank, dp_scope *scope, void *user)
{
    const model *m = user;
    int ranks = m->device_count, sum = ranks * (ranks - 1) / 2;
    (void)scope;
    for (int i = 0; i < COUNT; i++) {
        CHECK_F64(m->gradients[local_rank][i], ranks * m->round + sum * i, 0.0);
        for (int r = 0; r < ranks; r++) {
            CHECK_F64(m->all[local_rank][r * COUNT + i], ranks * m->round + sum * i, 0.0);
        }
    }
    return DP_OK;
}

static void take_step(model *m)
{
    dp_part parts[MAX_DEVICES], gathers[MAX_DEVICES];
    dp_scope *scope = dp_scope_begin(m->ctx);
    for (int i = 0; i < m->device_count; i++) {
        parts[i] = (dp_part){m->gradients[i], m->gradients[i], NULL};
        gathers[i] = (dp_part){m->gradients[i], m->all[i], NULL};
    }
    CHECK_OK(dp_run(m->ctx, scope, backward, m));
    CHECK_OK(dp_all_reduce(m->ctx, parts, COUNT, DP_F32, DP_OP_SUM));
    CHECK_OK(dp_all_gather(m->ctx, gathers, COUNT, DP_F32));
    CHECK_OK(dp_run(m->ctx, scope, compare, m));
    CHECK_OK(dp_barrier(m->ctx));
    dp_scope_end(scope);
    m->round++;
}

static void *train(void *user)
{
    model *m = user;
    for (int i = 0; i < m->step_count; i++) {
        take_step(m);
    }
    return NULL;
}

static void check_training(int device_count, int thread_count)
{
    static model m;
    open_model(&m, device_count, thread_count, 200);
    train(&m);
    dp_close(m.ctx);
}

TEST_SLOW(steps_where_every_thread_has_a_core, 30)
{
    check_training(2, 2);
    check_training(3, 3);
    check_training(4, 8);
    check_training(8, 8);
}

TEST_SLOW(steps_where_threads_outnumber_cores, 30)
{
    check_training(2, 1);
    check_training(3, 2);
    check_training(4, 1);
    check_training(8, 2);
}

TEST_SLOW(steps_of_two_contexts_at_once, 30)
{
    model *models = test_room(2 * sizeof *models);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        open_model(&models[i], 2 + i, 2 - i, 200);
        threads[i] = start(train, &models[i]);
    }
    for (int i = 0; i < 2; i++) {
        join(threads[i]);
        dp_close(models[i].ctx);
    }
}

/* One thread at a time, but not always the same. */
TEST_SLOW(steps_from_one_thread_after_another, 30)
{
    static model m;
    open_model(&m, 3, 3, 10);
    for (int i = rounds(20); i > 0; i--) {
        join(start(train, &m));
    }
    dp_close(m.ctx);
}

TEST_SLOW(contexts_come_and_go_in_several_threads, 30)
{
    model *models = test_room(4 * sizeof *models);
    for (int i = rounds(20); i > 0; i--) {
        pthread_t threads[4];
        for (int k = 0; k < 4; k++) {
            open_model(&models[k], 1 + k, 1 + i % 4, 10);
            threads[k] = start(train, &models[k]);
        }
        for (int k = 0; k < 4; k++) {
            join(threads[k]);
            dp_close(models[k].ctx);
        }
    }
}

/* ---- large work, shared out to the workers --------------------------------------------------- */

TEST_SLOW(large_kernels_are_shared_out, 30)
{
    enum { count = 300001 };
    float *x = test_room(count * sizeof *x), *y = test_room(count * sizeof *y);
    dp_ctx *ctx = open_devices(4, 4);
    dp_tensor tx = dp_wrap(x, DP_F32, 1, (int64_t[]){count});
    dp_tensor ty = dp_wrap(y, DP_F32, 1, (int64_t[]){count});
    for (int round = 1; round <= rounds(60); round++) {
        dp_stats stats;
        CHECK_OK(dp_fill(ctx, &tx, dp_int(round)));
        CHECK_OK(dp_copy(ctx, &ty, &tx, NULL));
        CHECK_OK(dp_axpby(ctx, 2.0, &tx, 1.0, &ty, &ty));
        CHECK_OK(dp_tensor_stats(ctx, &ty, &stats));
        CHECK_F64(stats.sum_squares, 9.0 * round * round * count, 0.0);
        for (int i = 0; i < count; i += 997) {
            CHECK_F64(y[i], 3 * round, 0.0);
        }
    }
    dp_close(ctx);
}

static dp_status fill_own(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    dp_tensor t, u;
    dp_stats stats;
    int64_t shape[] = {200001};
    dp_device device = dp_local_device(ctx, local_rank);
    CHECK_OK(dp_tensor_new(scope, device, DP_F32, 1, shape, &t));
    CHECK_OK(dp_tensor_new(scope, device, DP_F64, 1, shape, &u));
    CHECK_OK(dp_fill(ctx, &t, dp_int(local_rank + 1)));
    CHECK_OK(dp_cast(ctx, &u, &t));
    CHECK_OK(dp_tensor_stats(ctx, &u, &stats));
    CHECK_F64(stats.sum_squares, 200001.0 * (local_rank + 1) * (local_rank + 1), 0.0);
    return DP_OK;
}

TEST_SLOW(large_kernels_inside_a_run, 30)
{
    dp_ctx *ctx = open_devices(4, 4);
    for (int i = rounds(40); i > 0; i--) {
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_run(ctx, scope, fill_own, ctx));
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* ---- scopes from several threads ------------------------------------------------------------- */

typedef struct worker {
    dp_ctx *ctx;
    int number;
} worker;

static void *use_scopes(void *user)
{
    const worker *w = user;
    for (int i = rounds(1000); i > 0; i--) {
        dp_scope *scope = dp_scope_begin(w->ctx), *child = dp_scope_child(scope);
        unsigned char *a = dp_scope_alloc(scope, 3000), *b = dp_scope_alloc(child, 9000);
        dp_tensor tensor;
        CHECK(a != NULL && b != NULL);
        memset(a, w->number, 3000);
        memset(b, w->number, 9000);
        CHECK_OK(dp_tensor_new(scope, dp_local_device(w->ctx, w->number % 2), DP_F32, 1,
                               (int64_t[]){500}, &tensor));
        memset(tensor.data, w->number, 2000);
        dp_value value = dp_of(child, &tensor), kept;
        CHECK_OK(dp_keep(scope, value, &kept));
        CHECK(a[2999] == w->number && b[8999] == w->number);
        CHECK_INT(((const unsigned char *)kept.as.t->data)[1999], w->number);
        if (i % 2 == 0) {
            dp_scope_end(child);
        }
        dp_scope_end(scope);
    }
    return NULL;
}

TEST_SLOW(scopes_begin_and_end_in_many_threads, 30)
{
    worker workers[4];
    pthread_t threads[4];
    dp_ctx *ctx = open_devices(2, 2);
    for (int i = 0; i < 4; i++) {
        workers[i] = (worker){ctx, i + 1};
        threads[i] = start(use_scopes, &workers[i]);
    }
    for (int i = 0; i < 4; i++) {
        join(threads[i]);
    }
    dp_close(ctx);
}

/* A loader makes batches while the trainer runs steps. */
TEST_SLOW(scopes_beside_training, 30)
{
    static model m;
    open_model(&m, 3, 3, 200);
    worker loader = {m.ctx, 7};
    pthread_t thread = start(use_scopes, &loader);
    train(&m);
    join(thread);
    dp_close(m.ctx);
}

typedef struct queue { /* of scopes, from one thread to another */
    dp_ctx *ctx;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    dp_scope *scopes[4];
    dp_value values[4];
    int first, count;
} queue;

static void *produce(void *user)
{
    queue *q = user;
    for (int i = 0; i < rounds(500); i++) {
        dp_scope *scope = dp_scope_begin(q->ctx);
        dp_value value = DP_DICT(scope, {"number", dp_int(i)}, {"text", dp_string(scope, "batch")});
        CHECK_INT(value.kind, DP_DICT);
        pthread_mutex_lock(&q->mutex);
        while (q->count == 4) {
            pthread_cond_wait(&q->changed, &q->mutex);
        }
        int place = (q->first + q->count++) % 4;
        q->scopes[place] = scope;
        q->values[place] = value;
        pthread_cond_broadcast(&q->changed);
        pthread_mutex_unlock(&q->mutex);
    }
    return NULL;
}

static dp_scope *take(queue *q, dp_value *out)
{
    pthread_mutex_lock(&q->mutex);
    while (q->count == 0) {
        pthread_cond_wait(&q->changed, &q->mutex);
    }
    dp_scope *scope = q->scopes[q->first];
    *out = q->values[q->first];
    q->first = (q->first + 1) % 4;
    q->count--;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->mutex);
    return scope;
}

TEST_SLOW(scopes_are_handed_over_through_a_queue, 30)
{
    static queue q;
    q = (queue){.ctx = open_devices(2, 2)};
    CHECK_INT(pthread_mutex_init(&q.mutex, NULL), 0);
    CHECK_INT(pthread_cond_init(&q.changed, NULL), 0);
    pthread_t thread = start(produce, &q);
    for (int i = 0; i < rounds(500); i++) {
        dp_value batch;
        dp_scope *scope = take(&q, &batch), *step = dp_scope_begin(q.ctx);
        CHECK_OK(dp_scope_attach(step, scope));
        CHECK_INT(dp_get(batch, "number").as.i, i);
        CHECK_STR(dp_get(batch, "text").as.s, "batch");
        dp_scope_end(step);
    }
    join(thread);
    dp_close(q.ctx);
}

static void *attach_scopes(void *user)
{
    const worker *w = user;
    for (int i = 0; i < rounds(20000); i++) {
        dp_scope *outer = dp_scope_begin(w->ctx), *inner = dp_scope_begin(w->ctx);
        CHECK_OK(dp_scope_attach(outer, inner));
        dp_scope_end(outer);
    }
    return NULL;
}

TEST_SLOW(scopes_are_attached_in_many_threads, 30)
{
    worker workers[4];
    pthread_t threads[4];
    dp_ctx *ctx = open_devices(2, 2);
    for (int i = 0; i < 4; i++) {
        workers[i] = (worker){ctx, i + 1};
        threads[i] = start(attach_scopes, &workers[i]);
    }
    for (int i = 0; i < 4; i++) {
        join(threads[i]);
    }
    dp_close(ctx);
}

/* ---- errors and abort ------------------------------------------------------------------------ */

static void *make_errors(void *user)
{
    const worker *w = user;
    char want[64];
    for (int i = 0; i < rounds(5000); i++) {
        snprintf(want, sizeof want, "%d of thread %d", i, w->number);
        CHECK_INT(dp_error(DP_ERR_USER, "%d of thread %d", i, w->number), DP_ERR_USER);
        CHECK_STR(dp_last_error(), want);
        CHECK(!dp_failure(w->ctx, NULL));
        CHECK(dp_local_stream(w->ctx, 0) != NULL);
    }
    return NULL;
}

TEST_SLOW(sentences_of_many_threads_do_not_mix, 30)
{
    worker workers[4];
    pthread_t threads[4];
    dp_ctx *ctx = open_devices(2, 2);
    for (int i = 0; i < 4; i++) {
        workers[i] = (worker){ctx, i + 1};
        threads[i] = start(make_errors, &workers[i]);
    }
    for (int i = 0; i < 4; i++) {
        join(threads[i]);
    }
    CHECK_STR(dp_last_error(), "");
    dp_close(ctx);
}

typedef struct killer {
    dp_ctx *ctx;
    atomic_int round;
    int at, number;
} killer;

static void *abort_later(void *user)
{
    killer *k = user;
    while (atomic_load(&k->round) < k->at) {
    }
    dp_abort(k->ctx, DP_ERR_ABORTED, "killed by %d", k->number);
    dp_failure_info failure;
    CHECK(dp_failure(k->ctx, &failure));
    CHECK(strstr(failure.text, "killed by ") != NULL);
    return NULL;
}

static dp_status count_round(int local_rank, dp_scope *scope, void *user)
{
    killer *k = user;
    (void)scope;
    if (local_rank == 0) {
        atomic_fetch_add(&k->round, 1);
    }
    return DP_OK;
}

/* Calls until one says that the job was aborted; from then on all do. */
static void run_until_killed(killer *k)
{
    float data[4][4] = {{0}};
    dp_part parts[4];
    dp_status status = DP_OK;
    for (int i = 0; i < 4; i++) {
        parts[i] = (dp_part){data[i], data[i], NULL};
    }
    while (status == DP_OK) {
        dp_scope *scope = dp_scope_begin(k->ctx);
        if (scope == NULL) {
            break;
        }
        status = dp_run(k->ctx, scope, count_round, k);
        if (status == DP_OK) {
            status = dp_all_reduce(k->ctx, parts, 4, DP_F32, DP_OP_SUM);
        }
        dp_scope_end(scope);
    }
    CHECK_ERROR(dp_barrier(k->ctx), DP_ERR_ABORTED, "killed by ");
    CHECK_ERROR(dp_all_reduce(k->ctx, parts, 4, DP_F32, DP_OP_SUM), DP_ERR_ABORTED, "killed by ");
}

TEST_SLOW(abort_while_collectives_run, 30)
{
    for (int i = 0; i < rounds(20); i++) {
        killer k = {.ctx = open_devices(4, i % 2 == 0 ? 4 : 2), .at = i, .number = 1};
        pthread_t thread = start(abort_later, &k);
        run_until_killed(&k);
        join(thread);
        dp_close(k.ctx);
    }
}

/* Several threads at once: one text wins, whole, and stays. */
TEST_SLOW(abort_from_many_threads, 30)
{
    for (int i = 0; i < rounds(20); i++) {
        killer killers[4];
        pthread_t threads[4];
        dp_ctx *ctx = open_devices(2, 2);
        for (int k = 0; k < 4; k++) {
            killers[k] = (killer){.ctx = ctx, .number = k};
            threads[k] = start(abort_later, &killers[k]);
        }
        for (int k = 0; k < 4; k++) {
            join(threads[k]);
        }
        dp_failure_info failure;
        CHECK(dp_failure(ctx, &failure));
        CHECK(failure.text[0] != '\0' && strstr(failure.text, "killed by ") != NULL);
        dp_close(ctx);
    }
}

/* Misuse from a second thread is told so, and harms nothing. */
static void *intrude(void *user)
{
    killer *k = user;
    float data[4][4] = {{0}};
    dp_part parts[4];
    for (int i = 0; i < 4; i++) {
        parts[i] = (dp_part){data[i], data[i], NULL};
    }
    while (atomic_load(&k->round) < k->at) {
        dp_status status = dp_all_reduce(k->ctx, parts, 4, DP_F32, DP_OP_SUM);
        CHECK(status == DP_OK || status == DP_ERR_STATE);
    }
    return NULL;
}

TEST_SLOW(two_threads_that_call_at_once_are_told_so, 30)
{
    int count = rounds(300);
    killer k = {.ctx = open_devices(4, 2), .at = count};
    pthread_t thread = start(intrude, &k);
    while (atomic_load(&k.round) < count) {
        dp_scope *scope = dp_scope_begin(k.ctx);
        dp_status status = dp_run(k.ctx, scope, count_round, &k);
        CHECK(status == DP_OK || status == DP_ERR_STATE);
        dp_scope_end(scope);
    }
    join(thread);
    CHECK_OK(dp_barrier(k.ctx));
    dp_close(k.ctx);
}

/* ---- contexts side by side ------------------------------------------------------------------- */

static atomic_int counting, meeting;

/* Waits for another context to ask as well. */
static dp_status count_together(const dp_host *host, int *out)
{
    (void)host;
    atomic_fetch_add(&counting, 1);
    for (int i = 0; i < 500 && atomic_load(&counting) < 2; i++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    atomic_fetch_add(&meeting, atomic_load(&counting) == 2);
    *out = 1;
    return DP_OK;
}

static void *open_and_close(void *user)
{
    const dp_device_ops *const *tables = user;
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.backends = tables}, &ctx));
    dp_close(ctx);
    return NULL;
}

/* As the contract says: a table hears one thread at a time of each context, and several of them. */
TEST(contexts_open_at_the_same_time)
{
    static dp_device_ops table;
    const dp_device_ops *tables[] = {&table, NULL};
    table = *dp_cpu();
    table.count = count_together;
    pthread_t other = start(open_and_close, tables);
    open_and_close(tables);
    join(other);
    CHECK_INT(meeting, 2);
}
