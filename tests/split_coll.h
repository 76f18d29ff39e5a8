/* split_coll.h - tables for several processes, like dp_shm_coll(), on trial in one: the ranks of a
   context are dealt out to members, each of which is a thread with a context of its own, as a
   process would have one. So every suite for tables runs over them. */

#ifndef SPLIT_COLL_H
#define SPLIT_COLL_H

#include <pthread.h>
#include <string.h>
#include "test.h"

const dp_coll_ops *pipes_coll(void); /* see pipes.h */

enum { SPLIT_MEMBERS = 8, SPLIT_RANKS = 64, SPLIT_CARD = 1024 };

typedef struct split_comm split_comm;

typedef struct split_member {
    split_comm *all;
    int place, first, count; /* its ranks */
    dp_ctx *ctx;
    pthread_t thread;
    dp_status status;
    char text[512];
} split_member;

struct split_comm {
    dp_comm base;
    int members;
    split_member member[SPLIT_MEMBERS];
    char cards[SPLIT_MEMBERS * SPLIT_CARD];
    pthread_barrier_t meet;
    dp_status (*run)(split_member *m); /* what the members do */
    const dp_coll_call *call;
};

static int split_ranks_each = 2; /* the first member has one */

static const dp_coll_ops *split_table; /* what carries between them */

static inline const dp_coll_ops *split_coll(const dp_coll_ops *table, int ranks_each);

static inline dp_status split_gather(const void *in, void *out, size_t bytes_each, void *user)
{
    const split_member *m = user;
    CHECK(bytes_each <= SPLIT_CARD);
    memcpy(m->all->cards + (size_t)m->place * bytes_each, in, bytes_each);
    pthread_barrier_wait(&m->all->meet);
    memcpy(out, m->all->cards, bytes_each * (size_t)m->all->members);
    pthread_barrier_wait(&m->all->meet);
    return DP_OK;
}

static inline void *split_main(void *user)
{
    split_member *m = user;
    m->status = m->all->run(m);
    if (m->status != DP_OK)
        strncpy(m->text, dp_last_error(), sizeof m->text - 1);
    return NULL;
}

static inline dp_status split_run(split_comm *all, dp_status (*run)(split_member *m))
{
    all->run = run;
    for (int i = 1; i < all->members; i++)
        CHECK_INT(pthread_create(&all->member[i].thread, NULL, split_main, &all->member[i]), 0);
    split_main(&all->member[0]);
    for (int i = 1; i < all->members; i++)
        CHECK_INT(pthread_join(all->member[i].thread, NULL), 0);
    for (int i = 0; i < all->members; i++)
        if (all->member[i].status != DP_OK)
            return dp_error(all->member[i].status, "%s", all->member[i].text);
    return DP_OK;
}

static inline dp_status split_open_one(split_member *m)
{
    const dp_device_ops *const backends[] = {dp_cpu(), NULL};
    const dp_coll_ops *const colls[] = {split_table, NULL};
    return dp_open(&(dp_config){.backends = backends,
                                .colls = colls,
                                .device_count = m->count,
                                .bootstrap = {split_gather, m, m->place, m->all->members}},
                   &m->ctx);
}

static inline void split_close(dp_comm *comm)
{
    split_comm *all = (split_comm *)comm;
    for (int i = 0; i < all->members; i++)
        dp_close(all->member[i].ctx);
    pthread_barrier_destroy(&all->meet);
    comm->host->free(comm->host, comm);
}

static inline bool split_fits(const dp_comm_config *config)
{
    return config->bootstrap == NULL && config->host_memory;
}

static inline dp_status split_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    split_comm *all = host->alloc(host, sizeof(*all), _Alignof(split_comm));
    if (all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "split: no memory");
    memset(all, 0, sizeof(*all));
    all->base = (dp_comm){split_coll(split_table, split_ranks_each), host};
    for (int first = 0, count; first < config->local_count; first += count) {
        split_member *m = &all->member[all->members];
        int left = config->local_count - first;
        count = first == 0 ? 1 : left < split_ranks_each ? left : split_ranks_each;
        *m = (split_member){.all = all, .place = all->members++, .first = first, .count = count};
    }
    pthread_barrier_init(&all->meet, NULL, (unsigned)all->members);
    dp_status status = split_run(all, split_open_one);
    *out = &all->base;
    if (status != DP_OK)
        split_close(&all->base);
    return status;
}

static inline dp_status split_one(split_member *m)
{
    const dp_coll_call *call = m->all->call;
    dp_part parts[SPLIT_RANKS];
    for (int i = 0; i < m->count; i++) {
        parts[i] = call->local[m->first + i];
        parts[i].stream = NULL;
    }
    CHECK(call->verb == DP_ALL_REDUCE || (call->scale >= 1 && call->scale <= 1));
    if (call->verb == DP_BROADCAST)
        return dp_broadcast(m->ctx, parts, call->count, call->dtype, call->root);
    if (call->verb == DP_ALL_GATHER)
        return dp_all_gather(m->ctx, parts, call->count, call->dtype);
    if (call->verb == DP_REDUCE_SCATTER)
        return dp_reduce_scatter(m->ctx, parts, call->count, call->dtype, call->op);
    if (call->verb == DP_ALL_TO_ALL)
        return dp_all_to_all(m->ctx, parts, call->count, call->dtype);
    if (call->scale >= 1 && call->scale <= 1)
        return dp_all_reduce(m->ctx, parts, call->count, call->dtype, call->op);
    return dp_all_reduce_scaled(m->ctx, parts, call->count, call->dtype, call->op, call->scale);
}

static inline dp_status split_coll_run(dp_comm *comm, const dp_coll_call *call)
{
    split_comm *all = (split_comm *)comm;
    all->call = call;
    return split_run(all, split_one);
}

static inline const dp_coll_ops *split_coll(const dp_coll_ops *table, int ranks_each)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = "split",
                                    .fits = split_fits,
                                    .open = split_open,
                                    .close = split_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = split_coll_run};
    split_table = table;
    split_ranks_each = ranks_each;
    test_needs_processes(2);
    return &ops;
}

#endif /* SPLIT_COLL_H */
