/* dp/team.h - v0.2.0 - the threads of a context - MIT licence

   Part of dp.h, which includes it. It asks the system for threads and locks, by dp/os.h.

   CONTENTS (search for the tag)
     >>gate       one thread waits for others
     >>team       the workers of a context: persistent threads, run and shared out
     >>courier    one more, beside the caller
*/

#ifndef DP__ROOMS
#error "dp/team.h is a part of dp.h: include dp.h"
#else

/* ==== >>gate ===================================================================================
   A wait spins for a while, if there is a core for every thread, and then sleeps. If other programs
   compute, the thread that is waited for may need the very core on which the wait spins; so waits
   adapt: see dp__gate_patience.                                                                 */

enum {
    DP__SPIN_NS = 100000, /* the most; to wake a thread that sleeps takes up to half of it */
    DP__SPIN_QUARTERS = 3,
    DP__SPIN_RETRY = 32 /* waits */
};

typedef struct dp__gate { /* one thread waits for the word to change, any thread changes it */
    atomic_uint word;
    atomic_bool asleep;
    unsigned missed; /* by the thread that waits: spins in a row that ran out */
    dp__lock lock;
    dp__wake wake;
} dp__gate;

static void dp__gate_init(dp__gate *gate)
{
    atomic_init(&gate->word, 0);
    atomic_init(&gate->asleep, false);
    gate->missed = 0;
    dp__lock_init(&gate->lock);
    dp__wake_init(&gate->wake);
}

static void dp__gate_fini(dp__gate *gate)
{
    dp__lock_fini(&gate->lock);
    dp__wake_fini(&gate->wake);
}

static unsigned dp__gate_word(dp__gate *gate)
{
    return atomic_load_explicit(&gate->word, memory_order_acquire);
}

/* How long to spin after this many spins that ran out. A few in a row say little: the caller may be
   busy with something else. One spin that pays off restores them all, and after giving up, spinning
   is tried now and then. (Measured: without these trials, or with half a microsecond of them,
   threads that have once begun to sleep go on doing so, each because the other wakes up late.) */
static uint64_t dp__gate_patience(unsigned missed)
{
    const unsigned most = DP__SPIN_QUARTERS, turn = missed % DP__SPIN_RETRY;
    return (uint64_t)DP__SPIN_NS >> 2 * (turn < most ? turn : most);
}

static bool dp__gate_spin(dp__gate *gate, unsigned seen)
{
    uint64_t until = 0; /* the clock is not read before a while has passed */
    do {
        for (int i = 0; i < 16; i++) {
            if (dp__gate_word(gate) != seen) {
                if (gate->missed != 0) /* a store takes the line from the other thread */
                    gate->missed = 0;
                return true;
            }
            dp__os_pause();
        }
        until = until != 0 ? until : dp__os_now_ns() + dp__gate_patience(gate->missed);
    } while (dp__os_now_ns() < until);
    gate->missed++;
    return false;
}

/* Returns when the word has changed, or at a time of dp__os_now_ns; UINT64_MAX: there is none. */
static void dp__gate_wait_until(dp__gate *gate, unsigned seen, bool spin, uint64_t until_ns)
{
    if (dp__gate_word(gate) != seen || (spin && dp__gate_spin(gate, seen)))
        return;
    dp__lock_enter(&gate->lock);
    atomic_store(&gate->asleep, true); /* before the word is read again: see dp__gate_call */
    while (atomic_load(&gate->word) == seen &&
           (until_ns == UINT64_MAX || dp__os_now_ns() < until_ns))
        dp__wake_wait(&gate->wake, &gate->lock, until_ns);
    atomic_store(&gate->asleep, false);
    dp__lock_leave(&gate->lock);
}

static void dp__gate_wait(dp__gate *gate, unsigned seen, bool spin)
{
    dp__gate_wait_until(gate, seen, spin, UINT64_MAX);
}

/* Lets a thread that waits for long look at something. */
typedef struct dp__lookout {
    /* Looks after each DP__LOOKOUT_NS, and once the wait is over, with a waited_ns of 0. `warns`:
       after warn_ns, and each time that the wait was twice as long. NULL: nothing. */
    void (*look)(void *user, uint64_t waited_ns, bool warns);
    void *user;
    uint64_t warn_ns;
} dp__lookout;

enum { DP__LOOKOUT_NS = 100000000 };

/* Returns when the word has changed. */
static void dp__gate_watch(dp__gate *gate, unsigned seen, bool spin, const dp__lookout *lookout)
{
    if (dp__gate_word(gate) != seen || (spin && dp__gate_spin(gate, seen)))
        return;
    uint64_t begun = dp__os_now_ns(), waited = 0, warn = lookout->warn_ns;
    bool looked = false;
    while (lookout->look != NULL && dp__gate_word(gate) == seen) {
        uint64_t left = warn > waited ? warn - waited : 0;
        uint64_t now = begun + waited, slice = left < DP__LOOKOUT_NS ? left : DP__LOOKOUT_NS;
        dp__gate_wait_until(gate, seen, false, now + slice);
        waited = dp__os_now_ns() - begun;
        if (dp__gate_word(gate) != seen)
            break;
        lookout->look(lookout->user, waited, waited >= warn);
        looked = true;
        warn = waited >= warn ? 2 * waited : warn;
    }
    if (looked)
        lookout->look(lookout->user, 0, false);
    dp__gate_wait(gate, seen, false);
}

/* After the word has changed. Both are sequentially ordered, so either the sleeper sees the new
   word or this sees the sleeper. */
static void dp__gate_call(dp__gate *gate)
{
    if (!atomic_load(&gate->asleep))
        return;
    dp__lock_enter(&gate->lock);
    dp__lock_leave(&gate->lock);
    dp__wake_signal(&gate->wake);
}

static void dp__gate_open(dp__gate *gate)
{
    atomic_fetch_add(&gate->word, 1);
    dp__gate_call(gate);
}

/* ==== >>team ===================================================================================
   D devices are D-1 workers and the caller. There are two kinds of work. `run`: thread i does part
   i. `share`: a thread begins with its own parts, the same in every call, which are in its cache,
   and goes on with parts that nobody has begun; a worker that wakes up too late is not waited for.
   dp__team_enter takes the team for one job.

   Order: the job is written before `owed` is released, and read after acquiring it. Fields that are
   written together and read together lie in one cache line: a hand-over takes as long as a few
   lines take from one core to the other. A job that is as the last one was is not written again:
   the threads still have its lines. */

enum { DP__JOB_BYTES = 48 }; /* of dp__team_job */

enum dp__owed { DP__OWES_NOTHING, DP__OWES_ITS_PART, DP__OWES_A_SHARE };

typedef struct dp__worker {
    _Alignas(64) atomic_int owed; /* dp__owed */
    atomic_int next;              /* of its own parts, the first that nobody has begun */
    dp__gate gate;
    struct dp__team *team;
    int index;
    dp__thread thread;
} dp__worker;

typedef struct dp__team {
    int thread_count; /* workers and caller */
    int share_count;  /* how many of the threads have a core */
    bool spin;
    atomic_bool closing;
    dp__lookout lookout; /* of a caller that waits */
    _Alignas(64) atomic_bool busy;
    dp__gate inside; /* its word counts the workers that owe: the caller waits for none */
    _Alignas(64) int part_count; /* the job begins here */
    void (*fn)(int part, void *user);
    void *user;
    char job[DP__JOB_BYTES];
    dp__worker workers[]; /* [0] is the caller's place and never started */
} dp__team;

static void dp__team_leave(dp__team *team)
{
    if (atomic_fetch_sub(&team->inside.word, 1) == 1)
        dp__gate_call(&team->inside);
}

/* Asks for memory that another thread wrote: its lines come together, not one after another. */
static void dp__fetch_ahead(const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)data + i);
}

/* The parts of each thread are consecutive. */
static int dp__team_first(const dp__team *team, int thread, int thread_count)
{
    return (int)((int64_t)team->part_count * thread / thread_count);
}

static int dp__team_sharers(const dp__team *team)
{
    return team->share_count < team->part_count ? team->share_count : team->part_count;
}

/* With one part each the work is short, and a look at another thread's cache line costs a tenth of
   it: only the caller, who waits for all, looks for late ones. */
static void dp__team_take_parts(dp__team *team, int thread)
{
    int sharers = dp__team_sharers(team);
    int owners = thread > 0 && team->part_count == sharers ? 1 : sharers;
    for (int i = 0; i < owners; i++) {
        int owner = (thread + i) % sharers, last = dp__team_first(team, owner + 1, sharers);
        atomic_int *next = &team->workers[owner].next;
        while (atomic_load_explicit(next, memory_order_relaxed) < last) {
            int part = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
            if (part < last)
                team->fn(part, team->user);
        }
    }
}

/* A worker claims its work, or the caller does if the worker is late for a share. */
static bool dp__team_claim(dp__worker *worker, int owed)
{
    return atomic_load_explicit(&worker->owed, memory_order_relaxed) == owed &&
           atomic_compare_exchange_strong_explicit(&worker->owed, &owed, DP__OWES_NOTHING,
                                                   memory_order_acquire, memory_order_relaxed);
}

static void *dp__worker_main(void *user)
{
    dp__worker *worker = user;
    dp__team *team = worker->team;
    for (;;) {
        unsigned seen = dp__gate_word(&worker->gate);
        if (atomic_load_explicit(&team->closing, memory_order_acquire))
            return NULL;
        if (dp__team_claim(worker, DP__OWES_ITS_PART)) {
            team->fn(worker->index, team->user);
            dp__team_leave(team);
        } else if (dp__team_claim(worker, DP__OWES_A_SHARE)) {
            dp__team_take_parts(team, worker->index);
            dp__team_leave(team);
        }
        dp__gate_wait(&worker->gate, seen, team->spin);
    }
}

static bool dp__team_enter(dp__team *team)
{
    return !atomic_exchange_explicit(&team->busy, true, memory_order_acquire);
}

static void dp__team_exit(dp__team *team)
{
    atomic_store_explicit(&team->busy, false, memory_order_release);
}

static void dp__team_drain(dp__team *team)
{
    unsigned inside;
    while ((inside = dp__gate_word(&team->inside)) != 0)
        dp__gate_watch(&team->inside, inside, team->spin, &team->lookout);
}

/* Inside `run`, parts may wait for each other: a thread notes its ticket, looks at what it waits
   for, and sleeps until it is woken or the ticket is out of date, or until a time. */
static unsigned dp__team_ticket(dp__team *team, int thread)
{
    return dp__gate_word(&team->workers[thread].gate);
}

static void dp__team_sleep(dp__team *team, int thread, unsigned seen, uint64_t until_ns)
{
    dp__gate_wait_until(&team->workers[thread].gate, seen, team->spin, until_ns);
}

static void dp__team_wake(dp__team *team, int thread)
{
    dp__gate_open(&team->workers[thread].gate);
}

/* Returns a copy of a few words, for a run to have as `user`: they change more seldom than what
   lies around them on the caller's stack. */
static void *dp__team_job(dp__team *team, const void *job, size_t bytes)
{
    if (memcmp(team->job, job, bytes) != 0)
        memcpy(team->job, job, bytes);
    return team->job;
}

static void dp__team_set(dp__team *team, void (*fn)(int part, void *user), void *user)
{
    if (team->fn != fn)
        team->fn = fn;
    if (team->user != user)
        team->user = user;
}

/* fn(i) on thread i for every i below thread_count; the caller is thread 0 and holds the team. */
static void dp__team_run(dp__team *team, int thread_count, void (*fn)(int part, void *user),
                         void *user)
{
    dp__team_set(team, fn, user);
    atomic_store_explicit(&team->inside.word, (unsigned)thread_count - 1, memory_order_relaxed);
    for (int i = 1; i < thread_count; i++) {
        atomic_store_explicit(&team->workers[i].owed, DP__OWES_ITS_PART, memory_order_release);
        dp__gate_open(&team->workers[i].gate);
    }
    fn(0, user);
    dp__team_drain(team);
}

/* fn(0) .. fn(part_count-1) on whoever is free; the caller holds the team. */
static void dp__team_share(dp__team *team, int part_count, void (*fn)(int part, void *user),
                           void *user)
{
    dp__team_set(team, fn, user);
    if (team->part_count != part_count)
        team->part_count = part_count;
    int sharers = dp__team_sharers(team);
    atomic_store_explicit(&team->inside.word, (unsigned)sharers - 1, memory_order_relaxed);
    for (int i = 0; i < sharers; i++)
        atomic_store_explicit(&team->workers[i].next, dp__team_first(team, i, sharers),
                              memory_order_relaxed);
    for (int i = 1; i < sharers; i++) {
        atomic_store_explicit(&team->workers[i].owed, DP__OWES_A_SHARE, memory_order_release);
        dp__gate_open(&team->workers[i].gate);
    }
    dp__team_take_parts(team, 0);
    for (int i = 1; i < sharers; i++)
        if (dp__team_claim(&team->workers[i], DP__OWES_A_SHARE))
            dp__team_leave(team);
    dp__team_drain(team);
}

static size_t dp__team_bytes(int thread_count)
{
    return sizeof(dp__team) + (size_t)thread_count * sizeof(dp__worker);
}

static void dp__team_stop(dp__team *team, int started)
{
    atomic_store_explicit(&team->closing, true, memory_order_release);
    for (int i = 1; i < started; i++) {
        dp__gate_open(&team->workers[i].gate);
        dp__thread_join(team->workers[i].thread);
        dp__gate_fini(&team->workers[i].gate);
    }
    dp__gate_fini(&team->workers[0].gate);
    dp__gate_fini(&team->inside);
}

static dp_status dp__team_start(dp__team *team)
{
    int failed = 0, i = 1;
    for (; i < team->thread_count && failed == 0; i++) {
        dp__worker *worker = &team->workers[i];
        worker->team = team;
        worker->index = i;
        atomic_init(&worker->owed, DP__OWES_NOTHING);
        dp__gate_init(&worker->gate);
        failed = dp__thread_start(&worker->thread, dp__worker_main, worker);
        if (failed != 0)
            dp__gate_fini(&worker->gate);
    }
    if (failed == 0)
        return DP_OK;
    dp__team_stop(team, i - 1);
    return dp_error(DP_ERR_NO_MEMORY, "dp_open: cannot start worker %d of %d: %s", i - 1,
                    team->thread_count - 1, dp__os_why_text(failed));
}

static dp_status dp__team_open(const dp_host *host, int thread_count, int core_count,
                               dp__team **out)
{
    dp__team *team = host->alloc(host, dp__team_bytes(thread_count), 64);
    if (team == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d workers", thread_count - 1);
    memset(team, 0, dp__team_bytes(thread_count));
    team->thread_count = thread_count;
    team->share_count = thread_count < core_count ? thread_count : core_count;
    team->spin = thread_count <= core_count;
    atomic_init(&team->closing, false);
    atomic_init(&team->busy, false);
    dp__gate_init(&team->inside);
    dp__gate_init(&team->workers[0].gate);
    dp_status status = dp__team_start(team);
    if (status != DP_OK) {
        host->free(host, team);
        return status;
    }
    *out = team;
    return DP_OK;
}

/* Its memory goes with the context. */
static void dp__team_close(dp__team *team)
{
    dp__team_stop(team, team->thread_count);
}

/* ==== >>courier ================================================================================
   A thread beside the caller, for work that has to go on while the caller computes. It calls `fn`,
   and again after each call of dp__courier_wake; `fn` reports what it has done with
   dp__courier_report to the one thread that waits.                                              */

typedef struct dp__courier {
    dp__gate work, news; /* it waits for work, the caller for news */
    bool spin;
    atomic_bool closing;
    void (*fn)(void *user);
    void *user;
    dp__lookout lookout; /* of the caller */
    dp__thread thread;
} dp__courier;

static void *dp__courier_main(void *user)
{
    dp__courier *courier = user;
    for (;;) {
        unsigned seen = dp__gate_word(&courier->work);
        if (atomic_load_explicit(&courier->closing, memory_order_acquire))
            return NULL;
        courier->fn(courier->user);
        dp__gate_wait(&courier->work, seen, courier->spin);
    }
}

static void dp__courier_wake(dp__courier *courier)
{
    dp__gate_open(&courier->work);
}

static void dp__courier_report(dp__courier *courier)
{
    dp__gate_open(&courier->news);
}

/* To wait: note the ticket, look whether all is done, sleep until it is out of date. */
static unsigned dp__courier_ticket(dp__courier *courier)
{
    return dp__gate_word(&courier->news);
}

static void dp__courier_await(dp__courier *courier, unsigned seen)
{
    dp__gate_watch(&courier->news, seen, courier->spin, &courier->lookout);
}

/* spin: there is a core for it. */
static dp_status dp__courier_open(const dp_host *host, bool spin, void (*fn)(void *user),
                                  void *user, const dp__lookout *lookout, dp__courier **out)
{
    dp__courier *courier = host->alloc(host, sizeof *courier, 64);
    if (courier == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a courier");
    courier->spin = spin;
    courier->fn = fn;
    courier->user = user;
    courier->lookout = *lookout;
    atomic_init(&courier->closing, false);
    dp__gate_init(&courier->work);
    dp__gate_init(&courier->news);
    int failed = dp__thread_start(&courier->thread, dp__courier_main, courier);
    if (failed == 0) {
        *out = courier;
        return DP_OK;
    }
    dp__gate_fini(&courier->work);
    dp__gate_fini(&courier->news);
    host->free(host, courier);
    return dp_error(DP_ERR_NO_MEMORY, "cannot start a courier: %s", dp__os_why_text(failed));
}

static void dp__courier_close(const dp_host *host, dp__courier *courier)
{
    atomic_store_explicit(&courier->closing, true, memory_order_release);
    dp__courier_wake(courier);
    dp__thread_join(courier->thread);
    dp__gate_fini(&courier->work);
    dp__gate_fini(&courier->news);
    host->free(host, courier);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
