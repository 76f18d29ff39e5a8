/* dp/late.h - v0.2.0 - which process or device comes last - MIT licence

   Part of dp.h, which includes it. All enter a collective, so all wait for the one that comes last;
   by its own time that one is the only one that looks well. So each tells, with what it begins, how
   long it had to wait when the one before began. Then all know the same: the shortest wait is that
   of the last to come, and what lies between it and the next one is how long *all* others waited
   for that one alone. No clock is compared with another one.

   The devices of a process are counted in the same way, one by one for each forward and backward.

   This room has the numbers, and the words for them: dp/job.h carries those of processes, and those
   of devices come from dp/parallel.h and dp/meet.h.

   CONTENTS (search for the tag)
     >>telling   a wait, as it travels
     >>counting  who came last, in a window
     >>judging   whether it is always the same one, and in what it spends its time
     >>devices   those of a process
*/

#ifndef DP__ROOMS
#error "dp/late.h is a part of dp.h: include dp.h"
#else

enum {
    DP__LATE_TEXT = 200,
    DP__LATE_WAITS = 1024,      /* of all for one, in a window, */
    DP__LATE_LOOK = 64,         /* which is judged after so many */
    DP__LATE_ENOUGH = 48,       /* that are long have to be there: see >>judging */
    DP__LATE_LEAST_NS = 100000, /* what is shorter does not count */
    DP__LATE_WAIT_SHIFT = 6,    /* a wait travels in units of 64 ns: up to 274 s, */
    DP__LATE_SPENT_SHIFT = 14,  /* and time that was spent in units of 16 us, modulo 9 hours */
    DP__LATE_SPENT_MASK = 0x7fffffff
};

typedef enum dp__late_part {
    DP__LATE_FORWARD,
    DP__LATE_BACKWARD,
    DP__LATE_PARTS, /* that are measured */
    DP__LATE_ELSEWHERE = DP__LATE_PARTS
} dp__late_part;

typedef struct dp__late_process { /* what a process has spent in the window, as it has told */
    uint32_t first[DP__LATE_PARTS], now[DP__LATE_PARTS];
    bool told[DP__LATE_PARTS];
} dp__late_process;

typedef struct dp__late_wait { /* of all others for one process */
    int process;
    uint32_t wait; /* in the units in which it travels */
} dp__late_wait;

typedef struct dp__late_verdict {
    int process;          /* -1: nobody comes last again and again */
    unsigned waits, last; /* long ones of all for one; those for this one */
    uint64_t ns;          /* for how long, together */
    uint64_t window_ns;   /* how long the window has been open */
    dp__late_part part;   /* where it spends more time than the others */
} dp__late_verdict;

typedef struct dp__late { /* of a lane: of the one thread that uses it */
    int process, count;
    dp__late_process *processes;
    uint64_t waited_ns;   /* when the collective that is under way began */
    uint32_t least, next; /* of the waits that were told for the one before */
    int last;             /* whose is the least */
    dp__late_wait *waits; /* in the window */
    int wait_count;
    uint64_t since_ns;                            /* when the window was opened */
    _Atomic uint64_t for_others_ns, by_others_ns; /* waits since the context was opened */
    uint32_t times;                               /* all others waited long for this one */
    _Atomic uint64_t longest_ns;                  /* that all others waited for one process, */
    atomic_int longest;                           /* and for which; -1: for none */
    dp__late_verdict verdict;                     /* the last one; under the context's lock */
} dp__late;

static void dp__late_window(dp__late *late, uint64_t now)
{
    memset(late->processes, 0, (size_t)late->count * sizeof *late->processes);
    late->wait_count = 0;
    late->since_ns = now;
}

/* Returns the bytes that are needed for so many processes, a multiple of 8. */
static size_t dp__late_bytes(size_t count)
{
    return (DP__LATE_WAITS * sizeof(dp__late_wait) + count * sizeof(dp__late_process) + 7) / 8 * 8;
}

static void dp__late_open(dp__late *late, int process, int count, void *memory)
{
    *late = (dp__late){.process = process,
                       .count = count,
                       .waits = memory,
                       .processes = (void *)((dp__late_wait *)memory + DP__LATE_WAITS),
                       .least = UINT32_MAX,
                       .next = UINT32_MAX,
                       .verdict = {.process = -1}};
    atomic_store(&late->longest, -1);
    dp__late_window(late, dp__os_now_ns());
}

/* ==== >>telling ================================================================================
   One word: the wait, and in turn what was spent in forward and in backward so far.             */

static void dp__late_add(_Atomic uint64_t *sum, uint64_t more) /* by its only writer */
{
    uint64_t before = atomic_load_explicit(sum, memory_order_relaxed);
    atomic_store_explicit(sum, before + more, memory_order_relaxed);
}

static uint64_t dp__late_word(uint64_t wait_ns, uint64_t part, uint64_t spent_ns)
{
    uint64_t wait = wait_ns >> DP__LATE_WAIT_SHIFT;
    uint64_t spent = spent_ns >> DP__LATE_SPENT_SHIFT & DP__LATE_SPENT_MASK;
    return part << 63 | spent << 32 | (wait < UINT32_MAX ? wait : UINT32_MAX);
}

/* Begins collective number `seq`. Returns the word about the one before. */
static uint64_t dp__late_tell(dp__late *late, uint64_t seq, const _Atomic uint64_t *spent_ns)
{
    uint64_t waited_ns = late->waited_ns, part = seq % DP__LATE_PARTS;
    dp__late_add(&late->for_others_ns, waited_ns);
    late->waited_ns = 0;
    return dp__late_word(waited_ns, part,
                         atomic_load_explicit(&spent_ns[part], memory_order_relaxed));
}

/* ==== >>counting ============================================================================== */

/* Takes what a process tells. */
static void dp__late_hear(dp__late *late, int process, uint64_t word)
{
    uint32_t wait = (uint32_t)word, spent = (uint32_t)(word >> 32) & DP__LATE_SPENT_MASK;
    dp__late_process *its = &late->processes[process];
    int part = (int)(word >> 63);
    if (wait < late->least) {
        late->next = late->least;
        late->least = wait;
        late->last = process;
    } else if (wait < late->next) {
        late->next = wait;
    }
    its->first[part] = its->told[part] ? its->first[part] : spent;
    its->told[part] = true;
    its->now[part] = spent;
}

/* Counts a collective, about which all have told. Returns true if it is time to judge. */
static bool dp__late_count(dp__late *late)
{
    const dp__late_wait wait = {late->last, late->next - late->least};
    uint64_t ns = (uint64_t)wait.wait << DP__LATE_WAIT_SHIFT;
    late->least = late->next = UINT32_MAX;
    if (late->count < 2)
        return false;
    if (wait.process == late->process)
        dp__late_add(&late->by_others_ns, ns);
    if (ns < DP__LATE_LEAST_NS)
        return false;
    late->times += wait.process == late->process;
    if (ns > atomic_load_explicit(&late->longest_ns, memory_order_relaxed)) {
        atomic_store_explicit(&late->longest_ns, ns, memory_order_relaxed);
        atomic_store_explicit(&late->longest, wait.process, memory_order_relaxed);
    }
    late->waits[late->wait_count++] = wait;
    return late->wait_count % DP__LATE_LOOK == 0;
}

/* ==== >>judging ================================================================================
   Any machine has short waits, each for another process. So only waits count that are long beside
   the mean, and one process is named if four in five of these are for it, and that is worth a word:
   of 48 for two that are alike, 39 are for the same one once in 10^5 times. The time of all is the
   same: what the late one does not spend more than others in forward or in backward, it spends
   elsewhere.                                                                                     */

/* Returns how much more than others a process has spent in a part of the window. */
static int64_t dp__late_excess(const dp__late *late, int process, int part)
{
    int64_t own = 0, others = 0;
    for (int p = 0; p < late->count; p++) {
        const dp__late_process *its = &late->processes[p];
        int64_t spent = (its->now[part] - its->first[part]) & DP__LATE_SPENT_MASK;
        own = p == process ? spent : own;
        others += p == process ? 0 : spent;
    }
    return (own - others / (late->count - 1)) * ((int64_t)1 << DP__LATE_SPENT_SHIFT);
}

static dp__late_part dp__late_where(const dp__late *late, int process, uint64_t late_ns)
{
    int64_t forward = dp__late_excess(late, process, DP__LATE_FORWARD);
    int64_t backward = dp__late_excess(late, process, DP__LATE_BACKWARD);
    int64_t elsewhere = (int64_t)late_ns - forward - backward;
    if (elsewhere >= forward && elsewhere >= backward)
        return DP__LATE_ELSEWHERE;
    return forward >= backward ? DP__LATE_FORWARD : DP__LATE_BACKWARD;
}

/* Returns the wait in which the mean nanosecond of all waits is spent: a few long ones count for
   more than many short ones. */
static double dp__late_mean(const dp__late *late)
{
    double sum = 0, squares = 0;
    for (int i = 0; i < late->wait_count; i++) {
        double wait = late->waits[i].wait;
        sum += wait;
        squares += wait * wait;
    }
    return sum > 0 ? squares / sum : 0;
}

/* Returns the waits that are long beside the mean: all, and those for one process. */
static dp__late_verdict dp__late_long(const dp__late *late, int process)
{
    dp__late_verdict verdict = {.process = process};
    double least = dp__late_mean(late) / 4;
    for (int i = 0; i < late->wait_count; i++) {
        const dp__late_wait *wait = &late->waits[i];
        if (wait->wait < least)
            continue;
        verdict.waits++;
        verdict.last += wait->process == process;
        verdict.ns += wait->process == process ? (uint64_t)wait->wait << DP__LATE_WAIT_SHIFT : 0;
    }
    return verdict;
}

/* Returns the process for which more was waited than for all others, if there is one. */
static int dp__late_most(const dp__late *late)
{
    int most = -1;
    int64_t ahead = -1;
    for (int i = 0; i < late->wait_count; i++) {
        const dp__late_wait *wait = &late->waits[i];
        ahead += wait->process == most ? (int64_t)wait->wait : -(int64_t)wait->wait;
        most = ahead < 0 ? wait->process : most;
        ahead = ahead < 0 ? -ahead : ahead;
    }
    return most;
}

/* Judges a window. Returns false if there is no verdict yet; else the next one is opened. */
DP__COLD static bool dp__late_judge(dp__late *late, uint64_t now, dp__late_verdict *out)
{
    *out = dp__late_long(late, dp__late_most(late));
    out->window_ns = now - late->since_ns;
    bool same = out->waits >= DP__LATE_ENOUGH && 5 * out->last >= 4 * out->waits;
    bool named = same && 20 * out->ns >= out->window_ns;
    if (!named && late->wait_count < DP__LATE_WAITS)
        return false;
    out->part = named ? dp__late_where(late, out->process, out->ns) : DP__LATE_ELSEWHERE;
    out->process = named ? out->process : -1;
    dp__late_window(late, now);
    return true;
}

static const char *const dp__late_parts[] = {"in forward", "in backward",
                                             "outside of forward and backward"};

/* " comes last: all others waited for it, in 60 of the last 64 times that they waited for one,
   30.1 ms each, 1.8 s of 15 s, which it spends in forward" */
DP__COLD static const char *dp__late_say(const dp__late_verdict *verdict, char *text)
{
    snprintf(
        text, DP__LATE_TEXT,
        " comes last: all others waited for it, in %u of the last %u times that they waited for "
        "one, %.1f ms each, %.3g s of %.3g s, which it spends %s",
        verdict->last, verdict->waits, (double)verdict->ns * 1e-6 / verdict->last,
        (double)verdict->ns * 1e-9, (double)verdict->window_ns * 1e-9,
        dp__late_parts[verdict->part]);
    return text;
}

/* Tells a verdict that names one: all but the rank. */
static void dp__late_info(const dp__late_verdict *verdict, dp_late_info *out)
{
    out->waits = (int)verdict->waits;
    out->last = (int)verdict->last;
    out->late_s = (double)verdict->ns * 1e-9 / verdict->last;
    out->where = dp__late_parts[verdict->part];
}

/* ==== >>devices ================================================================================
   Nobody has to tell anything: who waits for all devices of a process sees when each is done.    */

typedef struct dp__late_devices {
    dp__late is;      /* of devices in place of processes */
    int named;        /* the one that a line was about last; -1: none was */
    uint64_t last_ns; /* when the last one was done */
    uint64_t spent_ns[][DP__LATE_PARTS];
} dp__late_devices;

static size_t dp__late_devices_bytes(size_t count)
{
    return sizeof(dp__late_devices) + count * sizeof(uint64_t[DP__LATE_PARTS]) +
           dp__late_bytes(count);
}

static void dp__late_devices_open(dp__late_devices *late, int count)
{
    memset(late, 0, dp__late_devices_bytes((size_t)count));
    late->named = -1;
    dp__late_open(&late->is, -1, count, &late->spent_ns[count]);
}

/* Takes when a device was done with a part that all began at once. */
static void dp__late_device(dp__late_devices *late, int device, dp__late_part part,
                            uint64_t begun_ns, uint64_t done_ns)
{
    uint64_t *spent_ns = &late->spent_ns[device][part];
    *spent_ns += done_ns - begun_ns;
    dp__late_hear(&late->is, device, dp__late_word(late->last_ns - done_ns, part, *spent_ns));
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
