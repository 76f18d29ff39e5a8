/* limit.c - what the hardware gives: plain loops, in threads that are kept alive. This file alone
   is compiled for the very machine that it runs on. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bench.h"

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() (void)0
#endif

enum { SPINS = 1 << 14 }; /* until a thread that waits lets others have the core */

typedef struct member {
    team *team;
    pthread_t thread;
    int part;
} member;

struct team {
    team_fn fn; /* NULL: go to sleep */
    void *user;
    int size;
    bool awake, over;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    member members[MAX_DEVICES]; /* the first one is the caller */
    _Alignas(64) atomic_uint ticket;
    _Alignas(64) atomic_uint done;
};

/* ---- the team -------------------------------------------------------------------------------- */

static void spin_while(const atomic_uint *word, unsigned value)
{
    int spins = 0;
    while (atomic_load_explicit(word, memory_order_acquire) == value) {
        RELAX();
        if (++spins == SPINS) {
            sched_yield();
            spins = 0;
        }
    }
}

static void wait_for_members(team *t)
{
    for (unsigned done = 0; done != (unsigned)t->size - 1; done = atomic_load(&t->done))
        spin_while(&t->done, done);
}

/* False: the team is over. */
static bool wait_until_awake(team *t, unsigned *out_ticket)
{
    pthread_mutex_lock(&t->mutex);
    while (!t->awake && !t->over)
        pthread_cond_wait(&t->changed, &t->mutex);
    bool over = t->over;
    pthread_mutex_unlock(&t->mutex);
    *out_ticket = atomic_load(&t->ticket);
    atomic_fetch_add(&t->done, 1);
    return !over;
}

static void *member_main(void *user)
{
    const member *self = user;
    team *t = self->team;
    unsigned ticket;
    while (wait_until_awake(t, &ticket)) {
        team_fn fn;
        do {
            spin_while(&t->ticket, ticket);
            ticket++;
            fn = t->fn;
            if (fn != NULL)
                fn(self->part, t->size, t->user);
            atomic_fetch_add_explicit(&t->done, fn != NULL, memory_order_release);
        } while (fn != NULL);
    }
    return NULL;
}

team *team_new(int size)
{
    team *t = aligned_alloc(64, (sizeof(*t) + 63) / 64 * 64);
    if (t == NULL)
        abort();
    memset(t, 0, sizeof(*t));
    t->size = size;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->changed, NULL);
    for (int i = 1; i < size; i++) {
        member *m = &t->members[i];
        m->team = t;
        m->part = i;
        if (pthread_create(&m->thread, NULL, member_main, m) != 0)
            abort();
    }
    return t;
}

static void change(team *t, bool awake, bool over)
{
    pthread_mutex_lock(&t->mutex);
    t->awake = awake;
    t->over = over;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
}

void team_wake(team *t)
{
    atomic_store(&t->done, 0);
    change(t, true, false);
    wait_for_members(t);
}

void team_sleep(team *t)
{
    change(t, false, false);
    t->fn = NULL;
    atomic_fetch_add(&t->ticket, 1);
}

void team_run(team *t, team_fn fn, void *user)
{
    t->fn = fn;
    t->user = user;
    atomic_store_explicit(&t->done, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->ticket, 1, memory_order_release);
    fn(0, t->size, user);
    wait_for_members(t);
}

void team_free(team *t)
{
    change(t, false, true);
    for (int i = 1; i < t->size; i++)
        pthread_join(t->members[i].thread, NULL);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}

/* ---- what it runs ---------------------------------------------------------------------------- */

typedef float floats __attribute__((vector_size(64)));
enum {
    LANES = sizeof(floats) / sizeof(float),
    AHEAD = 32,     /* floats; to fetch them early pays where memory has to be waited for, */
    FAR_MIN = 16384 /* so not for less than a MiB of them */
};

/* With a buffer_count that is known here the inner loops are none: much the fastest way. */
__attribute__((always_inline)) static inline void sum_all(float *const *data, int buffer_count,
                                                          size_t first, size_t last)
{
    floats *all[MAX_DEVICES];
    for (int b = 0; b < buffer_count; b++)
        all[b] = (floats *)(void *)data[b];
    bool far = last - first >= FAR_MIN;
    for (size_t i = first; i < last; i++) {
        for (int b = 0; far && b < buffer_count; b++)
            __builtin_prefetch(&all[b][i + AHEAD]);
        floats sum = all[0][i];
        for (int b = 1; b < buffer_count; b++)
            sum += all[b][i];
        for (int b = 0; b < buffer_count; b++)
            all[b][i] = sum;
    }
}

void sum_part(int part, int part_count, void *user)
{
    const sum_job *job = user;
    size_t all = job->count / LANES;
    size_t first = all * (size_t)part / (size_t)part_count;
    size_t last = all * ((size_t)part + 1) / (size_t)part_count;
    switch (job->buffer_count) {
    case 2:
        sum_all(job->data, 2, first, last);
        break;
    case 4:
        sum_all(job->data, 4, first, last);
        break;
    case 8:
        sum_all(job->data, 8, first, last);
        break;
    default:
        abort();
    }
}

void copy_part(int part, int part_count, void *user)
{
    const copy_job *job = user;
    size_t first = job->bytes * (size_t)part / (size_t)part_count / 64 * 64;
    size_t last = job->bytes * ((size_t)part + 1) / (size_t)part_count / 64 * 64;
    if (part == part_count - 1)
        last = job->bytes;
    memcpy((char *)job->to + first, (const char *)job->from + first, last - first);
}

/* What a part has of so many vectors. */
static size_t cut(size_t all, int part, int part_count)
{
    return all * (size_t)part / (size_t)part_count;
}

static void sgd_vectors(floats *const *data, size_t first, size_t last)
{
    floats *param = data[0], *grad = data[1], *kept = data[2];
    for (size_t i = first; i < last; i++) {
        floats momentum = kept[i] * 0.9F + grad[i];
        kept[i] = momentum;
        param[i] -= momentum * 1e-6F;
        grad[i] = (floats){0};
    }
}

static void adam_vectors(floats *const *data, size_t first, size_t last)
{
    floats *param = data[0], *grad = data[1], *mean = data[2], *square = data[3];
    for (size_t i = first; i < last; i++) {
        floats own = mean[i] + (grad[i] - mean[i]) * 0.1F, root;
        floats squares = square[i] * 0.999F + grad[i] * grad[i] * 0.001F;
        mean[i] = own;
        square[i] = squares;
        for (int k = 0; k < LANES; k++)
            root[k] = __builtin_sqrtf(squares[k]);
        param[i] = param[i] * 0.9999F - own / (root + 1e-8F) * 1e-6F;
        grad[i] = (floats){0};
    }
}

void step_part(int part, int part_count, void *user)
{
    const step_job *job = user;
    floats *data[4];
    size_t all = job->count / LANES;
    for (int i = 0; i < 4; i++)
        data[i] = (floats *)(void *)job->data[i];
    if (job->adam)
        adam_vectors(data, cut(all, part, part_count), cut(all, part + 1, part_count));
    else
        sgd_vectors(data, cut(all, part, part_count), cut(all, part + 1, part_count));
}

void squares_part(int part, int part_count, void *user)
{
    step_job *job = user;
    const floats *grad = (const floats *)(const void *)job->data[1];
    size_t all = job->count / LANES, last = cut(all, part + 1, part_count);
    floats sum = {0};
    for (size_t i = cut(all, part, part_count); i < last; i++)
        sum += grad[i] * grad[i];
    job->squares[part] = (double)sum[0];
}
