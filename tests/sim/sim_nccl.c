/* sim_nccl.c - the simulated NCCL, as communicators that do not block behave: see sim.h.

   Calls are collected by threads, in groups; what a group has for a communicator is one launch. It
   is a job of its streams, which takes a step whenever it can: its own part is given to the other
   ranks, theirs are taken. Until all have come it waits, and so does what comes behind it.       */

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "nccl.h"
#include "parts.h"
#include "sim.h"
#include "world.h"

typedef struct op { /* one call */
    world_call call;
    const char *fn;
    const void *send;
    void *recv;
    size_t send_bytes, recv_bytes;
    cudaStream_t stream;
    bool scaled;
    world_number scale;
    const void *scale_at; /* in the device's memory; NULL: it is known */
    enum { WAITS, GIVEN, DONE } state;
    uint64_t number;
} op;

typedef struct launch {
    sim_job job; /* it is one */
    ncclComm_t comm;
    op *ops;
    size_t count;
    bool stalled; /* it will never be done */
    bool done, passed;
    struct launch *next, *next_of_comm;
} launch;

typedef enum comm_magic { LIVE = 0x11fe, ABORTED = 0xab07, DESTROYED = 0xde57 } comm_magic;
typedef enum comm_state { STARTING, READY, LAUNCHING, FINALIZING, FINALIZED } comm_state;

struct ncclComm {
    comm_magic magic;
    comm_state state;
    ncclResult_t error;
    ncclUniqueId id;
    world *world; /* NULL: it has not been joined */
    int rank, ranks, device;
    unsigned denied; /* how often a poll says that it is not ready yet */
    bool broken;     /* its ranks were told different things */
    bool aborting;
    uint64_t given;               /* collectives */
    atomic_int inside;            /* threads */
    const struct group *owner;    /* the open group that has calls for it */
    unsigned awaits[WORLD_RANKS]; /* verbs that ranks have to call for its newest launch */
    cudaStream_t held[SIM_JOB_STREAMS];
    int held_count;
    launch *launches; /* that are not done */
    struct ncclComm *next;
};

typedef struct item { /* of a group */
    enum { CALL, INIT, FINALIZE } kind;
    ncclComm_t comm;
    op op;
} item;

static _Thread_local struct group {
    int depth;
    ncclResult_t error;
    item *items;
    size_t count, room;
    bool known; /* to the thread's end */
} group;

static struct ncclComm *comms;
static launch *launches; /* until the host knows of their end */
static int nccl_version = 22809;
static sim_nccl_counts counts;
static int fail_code;
static long fail_after, fail_seen;
static bool never_arrives, connects_late;
static const char *hanging; /* the function that blocks */
static void (*in_abort)(void);
static struct {
    int from, to;
    sim_peer peer;
} planted;
static enum {
    P2P_UNREAD,
    P2P_ON,
    P2P_OFF
} p2p; /* of the process, from its first communicator on */
static char last_error[256];

static ncclResult_t says(ncclResult_t result, const char *text)
{
    snprintf(last_error, sizeof last_error, "%s", text);
    return result;
}

/* ---- for tests ------------------------------------------------------------------------------- */

void sim_set_nccl(int version)
{
    nccl_version = version;
}

int sim_nccl_version(void)
{
    return nccl_version;
}

void sim_nccl_fail(int code, long after)
{
    sim_lock();
    fail_code = code;
    fail_after = after;
    fail_seen = 0;
    sim_unlock();
}

void sim_nccl_connects_late(bool on)
{
    connects_late = on;
}

void sim_nccl_never_arrives(bool on)
{
    sim_lock();
    never_arrives = on;
    for (ncclComm_t c = comms; c != NULL; c = c->next)
        if (c->world != NULL)
            c->world->meeting->rank[c->rank].absent = on;
    sim_unlock();
}

void sim_nccl_hangs(const char *function)
{
    sim_lock();
    hanging = function;
    sim_unlock();
}

void sim_nccl_in_abort(void (*fn)(void))
{
    sim_lock();
    in_abort = fn;
    sim_unlock();
}

void sim_nccl_pair(int from, int to, sim_peer peer)
{
    planted.from = from;
    planted.to = to;
    planted.peer = peer;
}

sim_nccl_counts sim_nccl_count(void)
{
    return counts;
}

/* ---- redops ---------------------------------------------------------------------------------- */

/* Each has a number that no other had: the newest ones are here. */
enum { REDOPS = 256 };
typedef struct redop {
    int number; /* 0: none, or destroyed */
    ncclComm_t comm;
    ncclDataType_t dtype;
    world_number scale;
    const void *scale_at;
} redop;
static redop redops[REDOPS];

static redop *redop_place(int number)
{
    return &redops[number % REDOPS];
}

static const redop *redop_of(const char *fn, int number)
{
    const redop *own = number > ncclNumOps ? redop_place(number) : NULL;
    if (own != NULL && own->number == number)
        return own;
    sim_find("redop after destroy", "%s with an operation that there is not", fn);
    return NULL;
}

/* What a call may say of its operation; how it scales is set. */
static ncclResult_t find_redop(int number, op *own, ncclComm_t comm)
{
    if (number >= 0 && number < ncclNumOps) {
        own->scaled = number == ncclAvg && world_is_real(own->call.dtype);
        char one[sizeof(double)];
        if (own->scaled) {
            world_store(own->call.dtype, one, (world_number){.real = 1.0 / comm->ranks});
            own->scale = world_load(own->call.dtype, one);
        }
        return ncclSuccess;
    }
    const redop *one = redop_of(own->fn, number);
    if (one == NULL)
        return says(ncclInvalidArgument, "no such operation");
    if (one->comm != comm || (int)one->dtype != own->call.dtype) {
        sim_find("bad argument", "%s with an operation of another communicator or type", own->fn);
        return says(ncclInvalidArgument, "an operation of another communicator or type");
    }
    own->scaled = true;
    own->scale = one->scale;
    own->scale_at = one->scale_at;
    own->call.op = ncclNumOps; /* each rank's has a number of its own */
    return ncclSuccess;
}

/* ---- launches: what they do ------------------------------------------------------------------ */

static world_rank *rank_of(const launch *own, int rank)
{
    return &own->comm->world->meeting->rank[rank];
}

static bool is_letter(const op *own)
{
    return own->call.verb == WORLD_SEND || own->call.verb == WORLD_RECV;
}

/* Collectives of a launch are done one after the other. */
static bool is_turn(const launch *own, const op *one)
{
    bool turn = true;
    for (const op *o = own->ops; o < one; o++)
        turn = turn && (is_letter(o) || o->state == DONE);
    return turn;
}

/* All ranks were told the same, so far. */
static bool is_agreed(const launch *own, const op *one)
{
    static const char *const names[] = {"AllReduce", "Broadcast", "AllGather", "ReduceScatter"};
    int rank = own->comm->rank, other = world_unlike(own->comm->world, rank, one->number);
    if (other < 0 || own->comm->broken)
        return other < 0;
    const world_call *a = &rank_of(own, rank)->calls[one->number % 2];
    const world_call *b = &rank_of(own, other)->calls[one->number % 2];
    sim_find("unequal collectives",
             "number %llu is %s of %zu (dtype %d, op %d, root %d) on rank %d, %s of %zu (dtype %d, "
             "op %d, root %d) on rank %d",
             (unsigned long long)one->number, names[a->verb], a->count, a->dtype, a->op, a->root,
             rank, names[b->verb], b->count, b->dtype, b->op, b->root, other);
    own->comm->broken = true;
    return false;
}

static bool letter_fits(const launch *own, const op *one)
{
    const world_call *sent =
        &own->comm->world->meeting->letters[one->call.root][own->comm->rank].call;
    bool fits = sent->count == one->call.count && sent->dtype == one->call.dtype;
    if (!fits && !own->comm->broken) {
        sim_find("unequal send and recv", "%zu (dtype %d) from rank %d, %zu (dtype %d) on rank %d",
                 sent->count, sent->dtype, one->call.root, one->call.count, one->call.dtype,
                 own->comm->rank);
        own->comm->broken = true;
    }
    return fits;
}

/* Letters of a pair do not overtake each other, whenever the other side looks at them. */
static bool is_next_letter(const launch *own, const op *one)
{
    for (const op *before = own->ops; before < one; before++)
        if (before->call.verb == one->call.verb && before->call.root == one->call.root &&
            before->state != DONE)
            return false;
    return true;
}

static bool op_can_step(const launch *own, const op *one)
{
    const world *where = own->comm->world;
    int rank = own->comm->rank, peer = one->call.root;
    if (one->state == DONE)
        return false;
    if (one->call.verb == WORLD_RECV)
        return is_next_letter(own, one) && world_can_receive(where, peer, rank) &&
               letter_fits(own, one);
    if (one->call.verb == WORLD_SEND && !is_next_letter(own, one))
        return false;
    if (one->call.verb == WORLD_SEND)
        return one->state == GIVEN ? where->meeting->letters[rank][peer].taken >= one->number
                                   : world_can_send(where, rank, peer);
    if (one->state == WAITS)
        return is_turn(own, one);
    return is_agreed(own, one) && world_is_given(where, one->number);
}

/* How directly from that rank: as planted, or as the pair of GPUs is, in one process. */
static bool pair_is(const launch *own, int from, sim_peer peer)
{
    const world_rank *other = rank_of(own, from);
    int rank = own->comm->rank, device = other->device - sim_place(0);
    bool is_planted = planted.peer == peer && from == planted.from && rank == planted.to;
    return (is_planted ||
            (sim_pair(own->comm->device, device) == peer && other->process == getpid())) &&
           p2p == P2P_ON && from != rank && strcmp(other->host, rank_of(own, rank)->host) == 0;
}

static bool hangs(const launch *own)
{
    bool any = false;
    for (int from = 0; from < own->comm->ranks; from++)
        any = any || pair_is(own, from, SIM_PEER_HANGS);
    return any;
}

/* Nothing that it is waiting for can still come. */
static bool is_stalled(const launch *own)
{
    return own->stalled || hangs(own) || own->comm->broken || never_arrives ||
           sim_is_lost(own->comm->device);
}

bool sim_job_can_step(const sim_job *job)
{
    const launch *own = (const launch *)(const void *)job;
    bool can = own->done || own->comm->magic != LIVE;
    if (!can && sim_is_lost(own->comm->device))
        rank_of(own, own->comm->rank)->absent = true;
    if (can || is_stalled(own) || own->comm->launches != own)
        return can;
    for (size_t i = 0; i < own->count && !can; i++)
        can = op_can_step(own, &own->ops[i]);
    return can;
}

/* Its part, scaled, for all who take it. */
static void give(const launch *own, op *one)
{
    const char *at = sim_memory(one->send, one->send_bytes);
    size_t bytes = at != NULL ? one->send_bytes : 0, step = world_bytes(one->call.dtype);
    char *scaled = NULL;
    if (one->scaled && bytes > 0) {
        const char *scale_at = one->scale_at != NULL ? sim_memory(one->scale_at, step) : NULL;
        world_number scale = scale_at != NULL ? world_load(one->call.dtype, scale_at) : one->scale;
        scaled = malloc(bytes);
        for (size_t i = 0; i < bytes; i += step)
            world_store(
                one->call.dtype, scaled + i,
                world_add(one->call.dtype, ncclProd, world_load(one->call.dtype, at + i), scale));
        at = scaled;
    }
    if (one->call.verb == WORLD_SEND)
        one->number =
            world_send(own->comm->world, own->comm->rank, one->call.root, &one->call, at, bytes);
    else
        world_give(own->comm->world, own->comm->rank, &one->call, at, bytes);
    one->state = GIVEN;
    free(scaled);
}

/* What a rank gave, or what all gave together, as it comes over a pair that is not good. */
static void spoil_part(const launch *own, int from, char *part, const char *next, size_t bytes)
{
    static char brought[4 << 10];
    size_t kept = bytes < sizeof brought ? bytes : sizeof brought;
    if (pair_is(own, from, SIM_PEER_FLIPS) || pair_is(own, from, SIM_PEER_LATE))
        part[bytes / 2] ^= 1;
    if (pair_is(own, from, SIM_PEER_LATE))
        sim_mend_later(part + bytes / 2);
    if (pair_is(own, from, SIM_PEER_CROSSED))
        memcpy(part, next, bytes);
    if (pair_is(own, from, SIM_PEER_STALE))
        memcpy(part, brought, kept);
    if (from == planted.from && own->comm->rank == planted.to)
        memcpy(brought, part, kept);
}

static void spoil_parts(const launch *own, const op *one, char *at)
{
    bool gathers = one->call.verb == WORLD_ALL_GATHER;
    bool of_one = one->call.verb == WORLD_RECV || one->call.verb == WORLD_BROADCAST;
    int ranks = own->comm->ranks;
    size_t each = one->recv_bytes / (gathers ? (size_t)ranks : 1);
    for (int from = 0; from < ranks && each > 0; from++)
        if (!of_one || from == one->call.root)
            spoil_part(own, from, at + (gathers ? (size_t)from * each : 0),
                       at + (gathers ? (size_t)((from + 1) % ranks) * each : 0), each);
}

static void take(const launch *own, op *one)
{
    static char nowhere;
    char *at = one->recv_bytes > 0 ? sim_memory(one->recv, one->recv_bytes) : &nowhere;
    char *place = at != NULL ? at : malloc(one->recv_bytes); /* it was freed */
    if (one->call.verb == WORLD_RECV)
        world_receive(own->comm->world, one->call.root, own->comm->rank, place, one->recv_bytes);
    else if (one->call.verb != WORLD_SEND)
        world_take(own->comm->world, own->comm->rank, one->number, place);
    if (one->call.verb != WORLD_SEND)
        spoil_parts(own, one, place);
    one->state = DONE;
    if (at == NULL)
        free(place);
}

/* What is aborted leaves anything in what it was to write. */
static void spoil(const launch *own)
{
    for (size_t i = 0; i < own->count; i++) {
        const op *one = &own->ops[i];
        char *at = one->state != DONE && one->recv_bytes > 0
                       ? sim_memory(one->recv, one->recv_bytes)
                       : NULL;
        if (at != NULL)
            memset(at, 0xff, one->recv_bytes);
    }
}

static void finish(launch *own)
{
    launch **link = &own->comm->launches;
    while (*link != own)
        link = &(*link)->next_of_comm;
    *link = own->next_of_comm;
    own->done = true;
}

static void step_op(launch *own, op *one)
{
    if (one->call.verb == WORLD_RECV || one->state == GIVEN)
        take(own, one);
    else
        give(own, one);
}

bool sim_job_step(sim_job *job)
{
    launch *own = (launch *)(void *)job;
    bool all = true, stepped = false;
    if (own->done)
        return true;
    if (own->comm->magic != LIVE) {
        spoil(own);
        finish(own);
        return true;
    }
    for (size_t i = 0; i < own->count; i++) {
        op *one = &own->ops[i];
        if (!stepped && op_can_step(own, one)) {
            step_op(own, one);
            stepped = true;
        }
        all = all && one->state == DONE;
    }
    if (all)
        finish(own);
    return all;
}

void sim_job_give_back(sim_job *job)
{
    launch *own = (launch *)(void *)job;
    own->passed = true;
}

/* A rank that it needs is not there, or will not come. */
static bool is_missing(const launch *own, int rank, bool came)
{
    const world_rank *other = rank_of(own, rank);
    return !came && (other->absent || other->gone || other->quiet ||
                     world_has_ended(own->comm->world, rank));
}

bool sim_job_never_ends(const sim_job *job)
{
    const launch *own = (const launch *)(const void *)job;
    if (own->done || own->comm->magic != LIVE)
        return false;
    bool never = is_stalled(own);
    for (size_t i = 0; i < own->count && !never; i++) {
        const op *one = &own->ops[i];
        int rank = own->comm->rank, peer = one->call.root;
        if (one->state == DONE)
            continue;
        if (is_letter(one))
            never = is_missing(own, peer,
                               one->call.verb == WORLD_RECV &&
                                   world_can_receive(own->comm->world, peer, rank));
        for (int r = 0; r < own->comm->ranks && !is_letter(one) && !never; r++)
            never = is_missing(own, r, rank_of(own, r)->given > one->number);
    }
    return never;
}

bool sim_nccl_waits(void)
{
    bool waits = false;
    for (ncclComm_t c = comms; c != NULL && !waits; c = c->next)
        waits = c->launches != NULL;
    return waits;
}

/* The host has seen its end, or the communicator's, which is later. */
static bool is_known(const launch *own)
{
    return own->comm->magic != LIVE || own->comm->state == FINALIZED || sim_job_known(&own->job);
}

static void forget_known(void)
{
    for (launch **link = &launches; *link != NULL;) {
        launch *own = *link;
        if (own->passed && is_known(own)) {
            *link = own->next;
            free(own->ops);
            free(own);
        } else {
            link = &own->next;
        }
    }
}

bool sim_nccl_in_flight(void)
{
    bool flies = false;
    for (const launch *l = launches; l != NULL; l = l->next)
        flies = flies || !is_known(l);
    return flies;
}

/* ---- other processes ---------------------------------------------------------------------------

   Ranks of other processes wait for what this one has enqueued, whatever its threads are doing. */

static sem_t pump_work;
static bool pump_started;

static void *pump(void *nothing)
{
    for (;;) {
        while (sem_wait(&pump_work) != 0)
            continue;
        for (bool waits = true; waits;) {
            sim_lock();
            while (sim_run_some())
                continue;
            waits = sim_nccl_waits();
            sim_unlock();
            if (waits)
                usleep(200);
        }
    }
    return nothing;
}

static void start_pump(const world_meeting *meeting)
{
    pthread_t thread;
    bool alone = true;
    for (int r = 0; r < meeting->ranks; r++)
        alone = alone && meeting->rank[r].process == getpid();
    if (alone || pump_started)
        return;
    pump_started = true;
    sem_init(&pump_work, 0, 0);
    pthread_create(&thread, NULL, pump, NULL);
    pthread_detach(thread);
}

/* ---- communicators --------------------------------------------------------------------------- */

/* They are refused, slices of one GPU as well: but from 2.30 on they may be allowed. */
static bool are_twins(const world_rank *a, const world_rank *b)
{
    const char *allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (nccl_version >= 23000 && allowed != NULL && strcmp(allowed, "1") == 0)
        return false;
    return sim_gpu(a->device) == sim_gpu(b->device) && strcmp(a->host, b->host) == 0;
}

static void start(ncclComm_t comm)
{
    const char *host = getenv("NCCL_HOSTID"), *disable = getenv("NCCL_P2P_DISABLE");
    if (p2p == P2P_UNREAD)
        p2p = disable != NULL && strcmp(disable, "1") == 0 ? P2P_OFF : P2P_ON;
    if (never_arrives)
        return;
    comm->world = world_open(comm->id.internal);
    if (comm->world == NULL)
        comm->error = says(ncclRemoteError, "whoever made the unique id is gone");
    else if (!world_join(comm->world, comm->rank, comm->ranks, sim_place(comm->device),
                         host != NULL ? host : ""))
        comm->error = says(ncclInvalidUsage, "ranks disagree about who is who");
}

/* Ranks that have one GPU fail; the others wait for them until they have left. */
static ncclResult_t poll_start(ncclComm_t comm)
{
    const world_rank *ranks = comm->world != NULL ? comm->world->meeting->rank : NULL;
    bool all = ranks != NULL, left = false;
    for (int r = 0; r < comm->ranks && all; r++)
        all = ranks[r].joined;
    if (!all)
        return ncclInProgress;
    for (int r = 0; r < comm->ranks; r++) {
        left = left || (ranks[r].gone && !ranks[r].finalized);
        for (int other = 0; other < comm->ranks; other++)
            if (other != r && are_twins(&ranks[r], &ranks[other])) {
                if (r == comm->rank)
                    return comm->error = says(ncclInvalidUsage, "two ranks have the same GPU");
                all = false;
            }
    }
    if (left)
        return comm->error = says(ncclRemoteError, "a rank has left");
    return all ? ncclSuccess : ncclInProgress;
}

/* Everything that it was told is done, and its neighbours have finalized it too. */
static ncclResult_t poll_finalize(ncclComm_t comm)
{
    const world_rank *ranks = comm->world->meeting->rank;
    bool done = comm->launches == NULL;
    comm->world->meeting->rank[comm->rank].quiet = done;
    for (int r = 0; r < comm->ranks; r++)
        if (strcmp(ranks[r].host, ranks[comm->rank].host) == 0)
            done = done && ranks[r].finalized;
    return done ? ncclSuccess : ncclInProgress;
}

/* Whoever takes part in what the newest launch does has called it, at some time. */
static ncclResult_t poll_launch(ncclComm_t comm)
{
    const world_rank *ranks = comm->world->meeting->rank;
    bool all = true;
    for (int r = 0; r < comm->ranks && connects_late; r++)
        all = all && (comm->awaits[r] & ~ranks[r].calling) == 0;
    return all ? ncclSuccess : ncclInProgress;
}

static void let_go_of_streams(ncclComm_t comm)
{
    for (int i = 0; i < comm->held_count; i++)
        sim_stream_hold(comm->held[i], -1);
    comm->held_count = 0;
}

static void arrive(ncclComm_t comm)
{
    if (comm->state == STARTING)
        start_pump(comm->world->meeting);
    let_go_of_streams(comm);
    comm->state = comm->state == FINALIZING ? FINALIZED : READY;
}

static ncclResult_t poll_comm(ncclComm_t comm)
{
    ncclResult_t result;
    if (fail_code != 0 && fail_seen >= fail_after)
        return (ncclResult_t)fail_code;
    if (comm->error != ncclSuccess || comm->state == READY || comm->state == FINALIZED)
        return comm->error;
    result = comm->state == STARTING    ? poll_start(comm)
             : comm->state == LAUNCHING ? poll_launch(comm)
                                        : poll_finalize(comm);
    if (result == ncclSuccess && comm->denied > 0) {
        comm->denied--;
        result = ncclInProgress;
    }
    if (result == ncclSuccess)
        arrive(comm);
    return result;
}

static void is_in_progress(ncclComm_t comm, comm_state state)
{
    comm->state = state;
    comm->denied = (unsigned)sim_chance(4);
}

static void group_forget(const ncclComm_t comm);

/* It is nobody's any more; what it was doing ends, and nobody hears of it. */
static void end_comm(ncclComm_t comm, comm_magic how)
{
    comm->magic = how;
    group_forget(comm);
    let_go_of_streams(comm);
    while (sim_run_some())
        continue;
    if (comm->world != NULL) {
        comm->world->meeting->rank[comm->rank].gone = true;
        world_close(comm->world);
    }
    comm->world = NULL;
}

static bool is_comm(const char *fn, ncclComm_t comm)
{
    if (comm == NULL)
        sim_find("bad argument", "%s without a communicator", fn);
    else if (comm->magic != LIVE)
        sim_find(comm->magic == ABORTED ? "communicator after abort" : "communicator after destroy",
                 "%s", fn);
    return comm != NULL && comm->magic == LIVE;
}

/* It may be told something now, by this thread. */
static ncclResult_t check_ready(const char *fn, ncclComm_t comm)
{
    if (!is_comm(fn, comm))
        return says(ncclInvalidArgument, "it is no communicator");
    if (comm->owner != NULL && comm->owner != &group)
        sim_find("two threads", "%s, while the communicator is in another thread's group", fn);
    if (comm->error != ncclSuccess)
        return comm->error;
    if (comm->state != READY) {
        sim_find("communicator in progress", "%s, and it was not polled to success", fn);
        return says(ncclInvalidArgument, "the communicator is in progress");
    }
    return ncclSuccess;
}

/* Every call passes here first, and ends with leave(). False: it is one that fails. */
static bool enter_by(bool (*enter_cuda)(const char *), const char *fn, ncclComm_t comm)
{
    bool alone = comm == NULL || atomic_fetch_add(&comm->inside, 1) == 0;
    bool works = enter_cuda(fn);
    if (!alone)
        sim_find("two threads", "%s, while another thread is in a call for it", fn);
    if (!sim_uses_devices())
        sim_find("no device", "%s, before CUDA was asked whether there is a GPU", fn);
    if (nccl_version == 0)
        works = false;
    return works;
}

static bool enter(const char *fn, ncclComm_t comm)
{
    return enter_by(sim_enter, fn, comm);
}

static ncclResult_t leave(ncclComm_t comm, ncclResult_t result)
{
    if (comm != NULL)
        atomic_fetch_sub(&comm->inside, 1);
    sim_unlock();
    return result;
}

/* With the lock, which is open while it hangs. */
static void hang_in(const char *function)
{
    while (hanging != NULL && strcmp(hanging, function) == 0) {
        sim_unlock();
        usleep(1000);
        sim_lock();
    }
}

/* ---- groups: their launches ------------------------------------------------------------------ */

static int place_of(sim_job *job, cudaStream_t stream)
{
    int place = 0;
    while (place < job->count && job->streams[place] != stream)
        place++;
    if (place == SIM_JOB_STREAMS)
        abort();
    if (place == job->count)
        job->streams[job->count++] = stream;
    return place;
}

static bool meet(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const char *first = a, *second = b;
    return a_bytes > 0 && b_bytes > 0 && first < second + b_bytes && second < first + a_bytes;
}

/* Calls of one group are done in any order, or together. */
static void check_apart(const launch *own)
{
    for (size_t i = 0; i < own->count; i++)
        for (size_t k = 0; k < i; k++) {
            const op *a = &own->ops[i], *b = &own->ops[k];
            if (meet(a->recv, a->recv_bytes, b->recv, b->recv_bytes) ||
                meet(a->recv, a->recv_bytes, b->send, b->send_bytes) ||
                meet(a->send, a->send_bytes, b->recv, b->recv_bytes))
                sim_find("overlap", "%s and %s of one group touch the same bytes", b->fn, a->fn);
        }
}

static void touch_operands(launch *own)
{
    for (size_t i = 0; i < own->count; i++) {
        const op *one = &own->ops[i];
        int stream = place_of(&own->job, one->stream);
        if (one->send_bytes > 0)
            (void)sim_job_touch(&own->job, stream, one->send, one->send_bytes, false, one->fn);
        if (one->recv_bytes > 0)
            (void)sim_job_touch(&own->job, stream, one->recv, one->recv_bytes, true, one->fn);
        if (one->scale_at != NULL)
            (void)sim_job_touch(&own->job, stream, one->scale_at, world_bytes(one->call.dtype),
                                false, one->fn);
    }
}

/* What the one writes cannot be there before the other has come to its own. */
static bool gives_to(const launch *from, const launch *to)
{
    bool gives = false;
    for (size_t i = 0; i < from->count; i++) {
        const world_call *call = &from->ops[i].call;
        gives = gives || (call->verb == WORLD_SEND        ? call->root == to->comm->rank
                          : call->verb == WORLD_BROADCAST ? call->root == from->comm->rank
                                                          : call->verb != WORLD_RECV);
    }
    return gives && from != to && from->comm->world == to->comm->world;
}

static void order_launches(launch *const *own, size_t count)
{
    sim_order *orders[WORLD_RANKS];
    for (size_t i = 0; i < count; i++)
        orders[i] = sim_order_begin(&own[i]->job);
    for (size_t i = 0; i < count; i++)
        touch_operands(own[i]);
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < count; k++)
            if (gives_to(own[k], own[i]))
                sim_order_after(&own[i]->job, orders[k]);
    for (size_t i = 0; i < count; i++)
        sim_order_end(&own[i]->job, orders[i]);
}

/* Replays of graphs of several GPUs of one process may wait for each other. */
static void check_captures(launch *const *own, size_t count)
{
    static int capture, device;
    for (size_t i = 0; i < count; i++) {
        int number = sim_stream_capture(own[i]->job.streams[0]);
        if (number == 0)
            continue;
        if (number == capture && device != own[i]->comm->device)
            sim_find("capture of several GPUs", "devices %d and %d", device, own[i]->comm->device);
        capture = number;
        device = own[i]->comm->device;
    }
}

/* By a ring: what each rank's link carries, in microseconds. */
static double time_of(const launch *own)
{
    double bytes = 0, part = 1 - 1.0 / own->comm->ranks;
    for (size_t i = 0; i < own->count; i++) {
        const op *one = &own->ops[i];
        size_t most = one->send_bytes > one->recv_bytes ? one->send_bytes : one->recv_bytes;
        bytes += (double)most * (one->call.verb == WORLD_ALL_REDUCE ? 2 * part
                                 : is_letter(one)                   ? 1
                                                                    : part);
    }
    return 2 + bytes / 350e3;
}

static void append_launch(launch *own)
{
    launch **link = &own->comm->launches;
    while (*link != NULL)
        link = &(*link)->next_of_comm;
    *link = own;
    own->next = launches;
    launches = own;
}

static void hold_streams(const launch *own)
{
    ncclComm_t comm = own->comm;
    comm->held_count = own->job.count;
    for (int i = 0; i < own->job.count; i++) {
        comm->held[i] = own->job.streams[i];
        sim_stream_hold(comm->held[i], 1);
    }
    is_in_progress(comm, LAUNCHING);
}

static void submit_launches(launch *const *own, size_t count)
{
    forget_known();
    for (size_t i = 0; i < count; i++)
        check_apart(own[i]);
    check_captures(own, count);
    order_launches(own, count);
    for (size_t i = 0; i < count; i++)
        append_launch(own[i]);
    for (size_t i = 0; i < count; i++) {
        double us = time_of(own[i]);
        hold_streams(own[i]);
        sim_job_submit(&own[i]->job, us);
    }
    counts.groups += count > 0;
    if (pump_started && count > 0)
        sem_post(&pump_work);
}

static void count_call(const op *own)
{
    long *const places[] = {&counts.all_reduce,     &counts.broadcast, &counts.all_gather,
                            &counts.reduce_scatter, &counts.send,      &counts.recv};
    ++*places[own->call.verb];
    counts.bytes += own->send_bytes;
}

/* A collective is called by all, what is sent is received. */
static void await(ncclComm_t comm, const world_call *own)
{
    int verb = own->verb == WORLD_SEND   ? WORLD_RECV
               : own->verb == WORLD_RECV ? WORLD_SEND
                                         : own->verb;
    comm->world->meeting->rank[comm->rank].calling |= 1U << own->verb;
    for (int r = 0; r < comm->ranks; r++)
        if (verb == own->verb || r == own->root)
            comm->awaits[r] |= 1U << verb;
}

static void add_op(launch *own, const op *one)
{
    await(own->comm, &one->call);
    own->ops = realloc(own->ops, (own->count + 1) * sizeof *own->ops);
    op *mine = &own->ops[own->count++];
    *mine = *one;
    (void)place_of(&own->job, one->stream);
    if (!is_letter(one))
        mine->number = own->comm->given++;
    count_call(one);
    if (fail_code != 0 && fail_seen >= fail_after)
        own->stalled = true;
    fail_seen += fail_code != 0;
}

/* ---- groups ---------------------------------------------------------------------------------- */

static pthread_key_t group_key;

static void thread_ends(void *nothing)
{
    (void)nothing;
    sim_lock();
    if (group.depth > 0)
        sim_find("group left open", "a thread has ended, and %d groups of it have not",
                 group.depth);
    sim_unlock();
    free(group.items);
}

__attribute__((constructor)) static void begin(void)
{
    const char *seed = getenv("SIM_SEED");
    connects_late = seed != NULL && strtoull(seed, NULL, 10) % 2 == 1;
    pthread_key_create(&group_key, thread_ends);
}

static void group_open(void)
{
    if (!group.known)
        pthread_setspecific(group_key, &group);
    group.known = true;
    group.depth++;
}

static void group_add(item own)
{
    if (group.count == group.room) {
        group.room = 2 * group.room + 16;
        group.items = realloc(group.items, group.room * sizeof *group.items);
    }
    group.items[group.count++] = own;
    own.comm->owner = &group;
}

/* What this thread's open group has for it is not done. */
static void group_forget(const ncclComm_t comm)
{
    size_t kept = 0;
    for (size_t i = 0; i < group.count; i++)
        if (group.items[i].comm != comm)
            group.items[kept++] = group.items[i];
    group.count = kept;
}

static void group_fails(ncclResult_t result)
{
    if (group.error == ncclSuccess)
        group.error = result;
}

/* Nothing of it is done. */
static ncclResult_t group_drop(void)
{
    ncclResult_t result = group.error;
    for (size_t i = 0; i < group.count; i++)
        if (group.items[i].kind == INIT && group.items[i].comm->error == ncclSuccess)
            group.items[i].comm->error = result;
    group.error = ncclSuccess;
    group.count = 0;
    return result;
}

static launch *launch_of(launch **own, size_t *count, ncclComm_t comm)
{
    for (size_t i = 0; i < *count; i++)
        if (own[i]->comm == comm)
            return own[i];
    launch *made = calloc(1, sizeof *made);
    made->comm = comm;
    own[(*count)++] = made;
    return made;
}

static ncclResult_t group_close(void)
{
    launch *own[WORLD_RANKS];
    size_t launch_count = 0, count = group.count;
    if (--group.depth > 0)
        return ncclSuccess;
    for (size_t i = 0; i < count; i++)
        group.items[i].comm->owner = NULL;
    if (group.error != ncclSuccess)
        return group_drop();
    group.count = 0;
    for (size_t i = 0; i < count; i++) {
        item *one = &group.items[i];
        if (one->comm->magic != LIVE)
            continue;
        if (one->kind == INIT) {
            start(one->comm);
        } else if (one->kind == FINALIZE) {
            one->comm->world->meeting->rank[one->comm->rank].finalized = true;
            is_in_progress(one->comm, FINALIZING);
        } else {
            add_op(launch_of(own, &launch_count, one->comm), &one->op);
        }
    }
    submit_launches(own, launch_count);
    return count > 0 ? ncclInProgress : ncclSuccess;
}

/* A call outside of groups is a group of its own. */
static ncclResult_t group_call(item own, ncclResult_t result)
{
    group_open();
    if (result == ncclSuccess)
        group_add(own);
    else
        group_fails(result);
    ncclResult_t closed = group_close();
    return result != ncclSuccess ? result : closed;
}

ncclResult_t ncclGroupStart(void)
{
    bool works = enter(__func__, NULL);
    if (works)
        group_open();
    return leave(NULL, works ? ncclSuccess : ncclUnhandledCudaError);
}

ncclResult_t ncclGroupEnd(void)
{
    bool works = enter(__func__, NULL);
    ncclResult_t result;
    if (group.depth == 0) {
        sim_find("group end without start", "%s", __func__);
        return leave(NULL, says(ncclInvalidUsage, "no group was started"));
    }
    if (!works)
        group_fails(says(ncclUnhandledCudaError, "a call of CUDA failed"));
    result = group_close();
    return leave(NULL, result);
}

/* ---- calls: what they are about -------------------------------------------------------------- */

static ncclResult_t wrong(const char *fn, const char *what)
{
    sim_find("bad argument", "%s: %s", fn, what);
    return says(ncclInvalidArgument, what);
}

static ncclResult_t check_operand(const op *own, ncclComm_t comm, const void *pointer, size_t bytes)
{
    int device = bytes > 0 ? sim_memory_device(pointer) : comm->device;
    if (device == comm->device)
        return ncclSuccess;
    sim_find("wrong device", "%s of device %d has an operand %s %d", own->fn, comm->device,
             device == -2 ? "that is not CUDA's," : "on", device);
    return says(ncclInvalidArgument, "memory of another device");
}

/* In place is what NCCL's manual says of each; anything else may not meet. */
static bool is_in_place(const op *own, ncclComm_t comm)
{
    const char *send = own->send, *recv = own->recv;
    size_t rank = (size_t)comm->rank;
    if (own->call.verb == WORLD_ALL_GATHER)
        return send == recv + rank * own->send_bytes;
    if (own->call.verb == WORLD_REDUCE_SCATTER)
        return recv == send + rank * own->recv_bytes;
    return send == recv;
}

static ncclResult_t check_stream(const op *own, ncclComm_t comm)
{
    if (!sim_stream_usable(own->fn, own->stream))
        return says(ncclInvalidArgument, "it is no stream");
    if (sim_stream_device(own->stream) == comm->device)
        return ncclSuccess;
    sim_find("wrong device", "%s of device %d on a stream of %d", own->fn, comm->device,
             sim_stream_device(own->stream));
    return says(ncclInvalidArgument, "a stream of another device");
}

static ncclResult_t check_call(op *own, ncclComm_t comm)
{
    bool is_type = own->call.dtype >= 0 && own->call.dtype <= ncclBfloat16;
    ncclResult_t result = is_type ? check_stream(own, comm) : wrong(own->fn, "no such type here");
    if (result == ncclSuccess)
        result = check_operand(own, comm, own->send, own->send_bytes);
    if (result == ncclSuccess)
        result = check_operand(own, comm, own->recv, own->recv_bytes);
    if (result == ncclSuccess && (own->call.root < 0 || own->call.root >= comm->ranks))
        result = wrong(own->fn, "no such rank");
    if (result == ncclSuccess &&
        (own->call.verb == WORLD_ALL_REDUCE || own->call.verb == WORLD_REDUCE_SCATTER))
        result = find_redop(own->call.op, own, comm);
    if (result == ncclSuccess && meet(own->send, own->send_bytes, own->recv, own->recv_bytes) &&
        !is_in_place(own, comm))
        sim_find("overlap", "%s: what it reads and what it writes, and it is not in place",
                 own->fn);
    return result;
}

static ncclResult_t call(op own, ncclComm_t comm)
{
    bool works = enter(own.fn, comm);
    ncclResult_t result = works ? check_ready(own.fn, comm) : ncclUnhandledCudaError;
    if (result == ncclSuccess)
        result = check_call(&own, comm);
    return leave(comm, group_call((item){CALL, comm, own}, result));
}

static size_t size_of(size_t count, ncclDataType_t dtype)
{
    return dtype <= ncclBfloat16 ? count * world_bytes((int)dtype) : 0;
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op_number, ncclComm_t comm,
                           cudaStream_t stream)
{
    size_t bytes = size_of(count, datatype);
    return call((op){.call = {WORLD_ALL_REDUCE, (int)datatype, (int)op_number, 0, count},
                     .fn = __func__,
                     .send = sendbuff,
                     .send_bytes = bytes,
                     .recv = recvbuff,
                     .recv_bytes = bytes,
                     .stream = stream},
                comm);
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)
{
    size_t bytes = size_of(count, datatype);
    bool gives = comm != NULL && comm->rank == root;
    return call((op){.call = {WORLD_BROADCAST, (int)datatype, 0, root, count},
                     .fn = __func__,
                     .send = sendbuff,
                     .send_bytes = gives ? bytes : 0,
                     .recv = recvbuff,
                     .recv_bytes = bytes,
                     .stream = stream},
                comm);
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)
{
    size_t bytes = size_of(sendcount, datatype), ranks = comm != NULL ? (size_t)comm->ranks : 1;
    return call((op){.call = {WORLD_ALL_GATHER, (int)datatype, 0, 0, sendcount},
                     .fn = __func__,
                     .send = sendbuff,
                     .send_bytes = bytes,
                     .recv = recvbuff,
                     .recv_bytes = ranks * bytes,
                     .stream = stream},
                comm);
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op_number, ncclComm_t comm,
                               cudaStream_t stream)
{
    size_t bytes = size_of(recvcount, datatype), ranks = comm != NULL ? (size_t)comm->ranks : 1;
    return call((op){.call = {WORLD_REDUCE_SCATTER, (int)datatype, (int)op_number, 0, recvcount},
                     .fn = __func__,
                     .send = sendbuff,
                     .send_bytes = ranks * bytes,
                     .recv = recvbuff,
                     .recv_bytes = bytes,
                     .stream = stream},
                comm);
}

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return call((op){.call = {WORLD_SEND, (int)datatype, 0, peer, count},
                     .fn = __func__,
                     .send = sendbuff,
                     .send_bytes = size_of(count, datatype),
                     .stream = stream},
                comm);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return call((op){.call = {WORLD_RECV, (int)datatype, 0, peer, count},
                     .fn = __func__,
                     .recv = recvbuff,
                     .recv_bytes = size_of(count, datatype),
                     .stream = stream},
                comm);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *out, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm)
{
    static int number = ncclNumOps;
    bool works = enter(__func__, comm);
    ncclResult_t result = works ? check_ready(__func__, comm) : ncclUnhandledCudaError;
    if (result == ncclSuccess && datatype > ncclBfloat16)
        result = wrong(__func__, "no such type here");
    if (result != ncclSuccess)
        return leave(comm, result);
    redop *own = redop_place(++number);
    *own = (redop){.number = number, .comm = comm, .dtype = datatype};
    if (residence == ncclScalarDevice)
        own->scale_at = scalar;
    else
        own->scale = world_load((int)datatype, scalar);
    *out = (ncclRedOp_t)number;
    return leave(comm, ncclSuccess);
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t number, ncclComm_t comm)
{
    bool works = enter(__func__, comm);
    bool is = is_comm(__func__, comm);
    const redop *own = is ? redop_of(__func__, (int)number) : NULL;
    if (own == NULL || own->comm != comm)
        return leave(comm, says(ncclInvalidArgument, "no such operation"));
    redop_place((int)number)->number = 0;
    return leave(comm, works ? ncclSuccess : ncclUnhandledCudaError);
}

/* ---- calls: communicators -------------------------------------------------------------------- */

ncclResult_t ncclGetVersion(int *version)
{
    sim_lock();
    if (nccl_version != 0)
        *version = nccl_version;
    sim_unlock();
    return nccl_version != 0 ? ncclSuccess : ncclSystemError;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {"no error",       "unhandled cuda error", "system error",
                                        "internal error", "invalid argument",     "invalid usage",
                                        "remote error",   "in progress"};
    return result < ncclNumResults ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return last_error;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    bool works = enter(__func__, NULL);
    if (!works)
        return leave(NULL, nccl_version == 0 ? ncclSystemError : ncclUnhandledCudaError);
    bool made = world_make(out->internal);
    return leave(NULL, made ? ncclSuccess : says(ncclSystemError, "no memory that is shared"));
}

static ncclResult_t check_config(const ncclConfig_t *config, const void *out, int ranks, int rank)
{
    static const ncclConfig_t usual = NCCL_CONFIG_INITIALIZER;
    bool fits = config == NULL || (config->size == usual.size && config->magic == usual.magic &&
                                   config->version <= usual.version);
    if (config == NULL || config->blocking != 0)
        sim_find("blocking communicator", "whoever waits in NCCL cannot be aborted");
    if (out == NULL || !fits || ranks < 1 || ranks > WORLD_RANKS || rank < 0 || rank >= ranks)
        return wrong("ncclCommInitRankConfig", "rank, number of ranks, or configuration");
    return ncclSuccess;
}

/* It takes memory. Where CUDA fails the thread's group stays open, as with the real one. */
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    bool works = enter_by(sim_enter_allocating, __func__, NULL);
    ncclResult_t result = check_config(config, out, ranks, rank);
    ncclComm_t comm = NULL;
    if (!works) {
        group_open();
        return leave(NULL, says(ncclUnhandledCudaError, "a call of CUDA failed"));
    }
    if (sim_current_device() < 0)
        sim_find("no context", "%s gives the thread a context that it did not have", __func__);
    if (result == ncclSuccess) {
        comm = calloc(1, sizeof *comm);
        comm->magic = LIVE;
        comm->id = id;
        comm->rank = rank;
        comm->ranks = ranks;
        comm->device = sim_current_device() >= 0 ? sim_current_device() : 0;
        comm->next = comms;
        comms = comm;
        is_in_progress(comm, STARTING);
        *out = comm;
    }
    result = group_call((item){.kind = INIT, .comm = comm}, result);
    return leave(NULL, result == ncclSuccess ? ncclInProgress : result);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    bool works = enter(__func__, comm);
    bool is = is_comm(__func__, comm);
    hang_in(__func__);
    if (works && is) {
        if (sim_nccl_waits())
            (void)sim_run_some();
        *out = poll_comm(comm);
    }
    return leave(comm, !is ? ncclInvalidArgument : works ? ncclSuccess : ncclUnhandledCudaError);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    bool works = enter(__func__, comm);
    hang_in(__func__);
    ncclResult_t result = works ? check_ready(__func__, comm) : ncclUnhandledCudaError;
    return leave(comm, group_call((item){.kind = FINALIZE, .comm = comm}, result));
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    bool works = enter_by(sim_enter_allocating, __func__, comm);
    if (!is_comm(__func__, comm))
        return leave(comm, ncclInvalidArgument);
    if (comm->state != FINALIZED)
        sim_find("destroy without finalize", "what it does may not be done, and it may block");
    end_comm(comm, DESTROYED);
    return leave(comm, works ? ncclSuccess : ncclUnhandledCudaError);
}

/* A communicator of the same clique is in a call of another thread. */
static bool others_are_inside(ncclComm_t comm)
{
    bool inside = false;
    for (ncclComm_t c = comms; c != NULL; c = c->next)
        inside = inside || (c != comm && c->magic == LIVE && c->world == comm->world &&
                            c->world != NULL && !c->aborting && atomic_load(&c->inside) > 0);
    return inside;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    bool works = enter(__func__, comm);
    if (!is_comm(__func__, comm))
        return leave(comm, ncclInvalidArgument);
    comm->aborting = true;
    if (others_are_inside(comm) || (comm->owner != NULL && comm->owner != &group))
        sim_find("two threads", "%s, while another thread is in a call or has a group", __func__);
    hang_in(__func__);
    end_comm(comm, ABORTED);
    if (in_abort != NULL) {
        sim_unlock();
        in_abort();
        sim_lock();
    }
    return leave(comm, works ? ncclSuccess : ncclUnhandledCudaError);
}

/* ---- what is left ---------------------------------------------------------------------------- */

static void check_letters(const launch *own)
{
    for (size_t i = 0; i < own->count; i++) {
        const op *one = &own->ops[i];
        if (one->state != DONE && one->call.verb == WORLD_SEND)
            sim_find("send without recv", "from rank %d to rank %d", own->comm->rank,
                     one->call.root);
        if (one->state != DONE && one->call.verb == WORLD_RECV)
            sim_find("recv without send", "from rank %d on rank %d", one->call.root,
                     own->comm->rank);
    }
}

void sim_nccl_check_leaks(void)
{
    for (ncclComm_t c = comms; c != NULL; c = c->next) {
        if (c->magic != LIVE)
            continue;
        sim_find("leak", "a communicator, rank %d of %d", c->rank, c->ranks);
        for (const launch *l = c->launches; l != NULL; l = l->next_of_comm)
            check_letters(l);
    }
    if (group.depth > 0)
        sim_find("group left open", "%d of this thread", group.depth);
}
