/* dp/job.h - v0.2.0 - the processes of a job: what each has begun, who failed first - MIT licence

   Part of dp.h, which includes it. It knows no table of functions: those that carry collectives
   between processes use it. They carry bytes, and have one wait loop each, which looks here every
   few milliseconds.

   CONTENTS (search for the tag)
     >>entries  what a process has begun, to compare, and in words
     >>members  what each process says of itself
     >>shown    what those outside of the job see
     >>failing  the first failure, in words, for all
     >>blaming  for whom all wait in the end
     >>looking  whether it makes sense to wait for others
     >>watching a word in shared memory, until it changes
     >>journal  what this process begins
     >>lateness who comes last
     >>opening  from a bootstrap to a job
*/

#ifndef DP__ROOMS
#error "dp/job.h is a part of dp.h: include dp.h"
#else

/* ==== >>entries ==================================================================================
   A collective that a process has begun, and what a sentence says about it.                     */

enum { DP__RECENT = 16 };

typedef struct dp__label { /* the same in words */
    char what[DP__LABEL_BYTES], by[24], tag[DP__TAG_BYTES];
} dp__label;

typedef struct dp__entry {
    uint64_t seq; /* its number on its lane */
    dp__signature is;
    uint64_t late; /* about the one before: see >>telling in dp/late.h */
    dp__label label;
} dp__entry;

enum {
    DP__ENTRY_WORDS = sizeof(dp__entry) / sizeof(uint64_t),
    DP__SAME_WORDS = offsetof(dp__entry, late) / sizeof(uint64_t), /* that are compared */
    DP__HEAD_WORDS = offsetof(dp__entry, label) / sizeof(uint64_t) /* a line of a cache */
};
_Static_assert(DP__ENTRY_WORDS * sizeof(uint64_t) == sizeof(dp__entry), "an entry is words");

static void dp__words_store(_Atomic uint64_t *to, const void *from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t word;
        memcpy(&word, (const char *)from + i * sizeof word, sizeof word);
        atomic_store_explicit(&to[i], word, memory_order_relaxed);
    }
}

static void dp__words_load(void *to, const _Atomic uint64_t *from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t word = atomic_load_explicit(&from[i], memory_order_relaxed);
        memcpy((char *)to + i * sizeof word, &word, sizeof word);
    }
}

static void dp__label_put(char *out, size_t room, const char *text)
{
    size_t bytes = text != NULL ? strlen(text) : 0;
    bytes = bytes < room ? bytes : room - 1;
    memset(out, 0, room);
    if (bytes > 0)
        memcpy(out, text, bytes);
}

/* "all_reduce of 73 f32 (mean), bucket 0 of 'net', 'v', in dp_backward, at 'epoch 3'" */
static const char *dp__issue_text(const dp__signature *is, const dp__label *label, char *text)
{
    const size_t room = DP__WORDS_BYTES;
    size_t used = dp__signature_text(is, text, room);
    if (label->what[0] != '\0')
        used = dp__append(text, room, used, ", %.63s", label->what);
    if (is->reducer > 1) /* the name of the first one may be the same */
        used = dp__append(text, room, used, " (reducer %u)", (unsigned)is->reducer);
    if (strncmp(label->by, "dp_", 3) == 0 && strcmp(label->by + 3, dp__verb_names[is->verb]) != 0)
        used = dp__append(text, room, used, ", in %.23s", label->by);
    if (label->tag[0] != '\0')
        (void)dp__append(text, room, used, ", at '%.39s'", label->tag);
    return text;
}

/* ==== >>members ================================================================================
   Every process has a record, which only it writes: what it has begun and what has ended on each of
   its lanes, the caller's and the courier's, and whether it is still there. Where all processes are
   on one machine the records are on a board in shared memory, which all see. Without one, as rooms
   call it, each process has a board to itself, with its own record and what it has heard of others.

   Entries are stored word by word: reading one while it is written gives a mixture of two entries,
   and nothing worse. There are as many as no process can be behind another one: NCCL has up to 128
   under way in each. Where a call has ended when it returns few are used, which stay in caches.  */

enum {
    DP__ASK_NS = 200000000, /* after which others are asked, where there is no board */
    DP__KEPT = 512,
    DP__COMPLAINT_BYTES = 160,
    DP__WHO_BYTES = 96,
    DP__DOING_BYTES = DP__WORDS_BYTES + 32,
    DP__LAST_BYTES = DP__WORDS_BYTES + DP__ACTIVITY_BYTES + 384,
    DP__FAULT_BYTES = 64,
    DP__HOST_NAME_BYTES = 64,
    DP__LATE_BYTES = DP__WHO_BYTES + 2 * DP__FAULT_BYTES
};

typedef enum dp__presence {
    DP__OUTSIDE,
    DP__INSIDE,
    DP__LEFT,
    DP__DEAD,
} dp__presence;

typedef struct dp__lane_progress {               /* of a lane */
    _Alignas(128) atomic_uint begun;             /* neighbours of a line are fetched with it */
    _Alignas(128) atomic_uint ended, said_after; /* said_after: begun last when it said something */
    /* In a wait: for which process' part, from 1; its own: it cannot do its part; 0: that is not
       known. */
    atomic_uint awaits;
    atomic_uint since;         /* which one it waits in, as it was seen to last, */
    _Atomic uint64_t since_ns; /* and since when */
    /* All others waited long for it so often, in all for so long; it waited so long for others. */
    _Atomic uint64_t late, late_ns, waited_ns;
} dp__lane_progress;

typedef struct dp__progress {
    dp__lane_progress tracks[DP__LANES];
    atomic_int presence;
    atomic_uint held;           /* its threads that wait for another context's collectives */
    _Atomic uint64_t looked_ns; /* when it last looked around while it waited */
    /* Without a board: since when a question is unanswered, or 0; how long the last answer took,
       and when it came. */
    _Atomic uint64_t asked_ns, away_ns, back_ns;
    dp__activity activity;          /* of its first device */
    char said[DP__COMPLAINT_BYTES]; /* of a call that failed; "": none did */
    _Atomic uint64_t figures[DP__FIGURES];
    int32_t id, rank, rank_count; /* id: what its system calls it */
    uint32_t here;                /* it is on the machine of the board */
    char host[DP__HOST_NAME_BYTES], address[DP__HOST_NAME_BYTES];
    uint32_t port, unused; /* where it can be asked, at that address; 0: nowhere */
} dp__progress;

typedef struct dp__board_head {     /* see >>shown */
    _Atomic uint64_t magic;         /* it is there once all else is */
    uint32_t layout, version;       /* DP__BOARD_LAYOUT, DP_VERSION */
    int32_t process_count, process; /* process: whose board it is; -1: that of all */
    uint32_t member_bytes, entry_bytes, kept, recent; /* kept, recent: entries of a lane */
    uint64_t members_at, entries_at, each; /* each: from a process' entries to the next one's */
    uint64_t epoch;                        /* the same on all boards of a job */
    char launcher[24];
    _Atomic uint64_t asks[2]; /* the key of those that ask: see dp/asking.h; 0: nobody answers */
} dp__board_head;

typedef struct dp__board {
    dp__board_head head;
    atomic_uint failed;   /* 1: the text is being written, 2: it is there */
    int32_t status, rank; /* of the first failure: where it is from */
    char text[DP__TEXT_BYTES];
    dp__progress members[]; /* and behind them the entries: see dp__entry_of */
} dp__board;

typedef struct dp__wait { /* for others, of any thread */
    _Atomic uint64_t looked_ns, waited_ns;
    unsigned awaits; /* for which process' part, from 1; 0: that is not known */
    bool asked;      /* others were, about it */
} dp__wait;

typedef struct dp__journal {
    struct dp__job *job;
    int place;
    dp__entry now;       /* the last one; like what follows, the writer's */
    const char *by;      /* what its label was made of */
    dp__purpose purpose; /* what is to come is for */
    unsigned tags;       /* seen */
    bool ends_later;     /* the table says what has ended */
    bool compared;       /* and whether all have begun the same */
    uint64_t begun_ns;   /* where it says neither, and may end its wait by itself */
    int patience_ms;     /* beyond the time-out */
    atomic_uint done;    /* calls that have returned */
    atomic_uint odd;     /* in which others seemed to differ */
    atomic_uint late;    /* and of which the time was up, and nobody is known to be at fault */
    atomic_uint asked;   /* and in which they were asked, */
    atomic_uint again;   /* and once more, before a warning */
    atomic_uint warned;  /* and in which a warning has said for whom all wait */
    atomic_uint looks;   /* so far */
    dp__wait wait;       /* of the table's threads */
    dp__late arrivals;   /* where the table compares: the writer's */
} dp__journal;

typedef dp_status dp__gather_fn(const dp_bootstrap *boot, const void *own, void *all, size_t bytes);

typedef struct dp__introduction { /* for dp__job_agree: what every process tells the others */
    int32_t status;
    char text[200];
    dp__shared_name name;
    uint64_t machine;
    dp__cores cores;
    char host[DP__HOST_NAME_BYTES];
} dp__introduction;

typedef struct dp__progress_message { /* a process' record as it travels where there is no board */
    int32_t presence, asks;           /* asks: whoever gets it answers with his own */
    uint32_t ended[DP__LANES], said_after[DP__LANES], awaits[DP__LANES];
    uint32_t held, absent; /* absent: none of its threads waits for others; its watchdog says so */
    dp__entry last[DP__LANES];
    char said[DP__COMPLAINT_BYTES];
    uint64_t in_ns; /* for how long it has been in a function; 0: it is in none */
    int32_t thread, reserved;
    char in[DP__ACTIVITY_NAME]; /* the function */
} dp__progress_message;

typedef struct dp__progress_carrier { /* how processes hear of each other without a board */
    dp_status (*hear)(dp_ctx *ctx, int *out_process); /* the first failure; -1: unknown */
    void (*tell)(dp_ctx *ctx, dp_status status, int process, const char *text); /* with one, too */
    /* Sends to all; false: there is no way. */
    bool (*send)(dp_ctx *ctx, const dp__progress_message *progress);
    int (*next)(const dp_ctx *ctx, int from, int to); /* whom progress messages pass on the way */
} dp__progress_carrier;

typedef struct dp__job {
    dp_ctx *ctx;
    const dp_bootstrap *boot;
    dp__gather_fn *gather;
    dp__introduction introduction, *introductions; /* the own one, of all */
    int process, process_count, timeout_ms;
    uint64_t look_ns; /* so long lies between two looks of who waits */
    int *firsts;      /* of each process: its first rank, and at the end how many ranks there are */
    int *ids;         /* what its system calls it */
    int *twins; /* the next one that is in the same process of a system; itself, if it is alone */
    char *arrivals; /* memory for those of the journals */
    int named;      /* the process that was said to come last; -1: none; under the context's lock */
    dp__board *board;
    dp__shared shared; /* data NULL: the board is this process' own, */
    char why[200];     /* and why, */
    dp__shared own;    /* where it lies then; data NULL: in the host's memory */
    uint64_t epoch;    /* the same in all processes of a job */
    dp__shared near; /* with processes on several machines: of those on this one, if they need it */
    size_t each;     /* bytes of a process behind the board: its entries, and its lines */
    const dp__progress_carrier *carrier;
    dp__lock lock;               /* of the others' records, where there is no board */
    struct dp__job *before;      /* see dp__voter */
    struct dp__metrics *metrics; /* NULL: they are not written */
    dp__journal journals[DP__LANES];
} dp__job;

static dp__progress *dp__progress_of(const dp__job *job, int process)
{
    return &job->board->members[process];
}

static dp__lane_progress *dp__lane_progress_of(const dp__journal *journal, int process)
{
    return &dp__progress_of(journal->job, process)->tracks[journal->place];
}

static dp__lane_progress *dp__own_lane_progress(const dp__journal *journal)
{
    return dp__lane_progress_of(journal, journal->job->process);
}

/* Returns the process of a rank. */
static int dp__process_of(const dp__job *job, int rank)
{
    int process = 0;
    while (job->firsts[process + 1] <= rank)
        process++;
    return process;
}

static int dp__rank_count_of(const dp__job *job, int process)
{
    return job->firsts[process + 1] - job->firsts[process];
}

static size_t dp__board_bytes(int process_count)
{
    return (sizeof(dp__board) + (size_t)process_count * sizeof(dp__progress) + 63) / 64 * 64;
}

/* Returns what a process has behind the board, in shared memory. */
static char *dp__behind_board(const dp__job *job, int process)
{
    return (char *)job->board + dp__board_bytes(job->process_count) + (size_t)process * job->each;
}

/* A board in shared memory has all entries. One of a process' own has its own ones, and behind them
   the last one of each other. */
static _Atomic uint64_t *dp__entry_of(const dp__journal *journal, int process, unsigned seq)
{
    const dp__job *job = journal->job;
    bool seen = job->shared.data != NULL;
    size_t kept = (size_t)journal->place * DP__KEPT;
    size_t place = kept + seq % (journal->ends_later ? DP__KEPT : DP__RECENT);
    _Atomic uint64_t *first = (void *)dp__behind_board(job, seen ? process : 0);
    if (!seen && process != job->process)
        place = (size_t)(DP__LANES * (DP__KEPT + process) + journal->place);
    return first + place * DP__ENTRY_WORDS;
}

/* Gets what a process has begun as number `seq`; false: it is not known. */
static bool dp__entry_get(const dp__journal *journal, int process, unsigned seq, dp__entry *out)
{
    unsigned begun =
        atomic_load_explicit(&dp__lane_progress_of(journal, process)->begun, memory_order_acquire);
    if (seq == 0 || (int)(begun - seq) < 0)
        return false;
    dp__words_load(out, dp__entry_of(journal, process, seq), DP__ENTRY_WORDS);
    return (unsigned)out->seq == seq;
}

static bool dp__entries_same(const dp__entry *a, const dp__entry *b)
{
    return a->seq == b->seq && memcmp(&a->is, &b->is, sizeof a->is) == 0;
}

/* Returns true if a process has begun this as number `seq`, which is at most so long ago as is
   kept. */
static bool dp__entry_matches(const dp__journal *journal, int process, unsigned seq,
                              const dp__entry *own)
{
    uint64_t head[DP__SAME_WORDS];
    dp__words_load(head, dp__entry_of(journal, process, seq), DP__SAME_WORDS);
    return memcmp(head, own, sizeof head) == 0;
}

static bool dp__has_begun(const dp__journal *journal, int process, unsigned seq)
{
    return (int)(atomic_load(&dp__lane_progress_of(journal, process)->begun) - seq) >= 0;
}

static bool dp__has_ended(const dp__journal *journal, int process, unsigned seq)
{
    return (int)(atomic_load(&dp__lane_progress_of(journal, process)->ended) - seq) >= 0;
}

/* Returns true if a process is alive. On a board it holds a lock on its byte of the memory until it
   dies; without one, its connection in the tree has not ended. A context that shares its process
   with this one is alive, and so is one that has left its lock to another one of that process. */
static bool dp__is_alive(const dp__job *job, int process)
{
    for (int p = job->twins[process]; p != process; p = job->twins[p])
        if (p == job->process || atomic_load(&dp__progress_of(job, p)->presence) == DP__LEFT)
            return true;
    return job->shared.data != NULL
               ? dp__os_shared_held(&job->shared, process)
               : atomic_load(&dp__progress_of(job, process)->presence) != DP__DEAD;
}

/* ---- in words -------------------------------------------------------------------------------- */

/* "rank 3 (process 1, pid 4242)" */
static const char *dp__who(const dp__job *job, int process, char *text)
{
    int first = job->firsts[process], last = job->firsts[process + 1] - 1;
    size_t used = dp__append(text, DP__WHO_BYTES, 0, first == last ? "rank %d" : "ranks %d to %d",
                             first, last);
    (void)dp__append(text, DP__WHO_BYTES, used, " (process %d, pid %d)", process,
                     job->ids[process]);
    return text;
}

/* "collective 8, all_reduce of 25 f32 (sum)" */
static const char *dp__doing(const dp__journal *journal, unsigned seq, char *text)
{
    char words[DP__WORDS_BYTES] = "";
    dp__entry own;
    if (dp__entry_get(journal, journal->job->process, seq, &own))
        (void)dp__issue_text(&own.is, &own.label, words);
    snprintf(text, DP__DOING_BYTES, "collective %u, %s", seq, words);
    return text;
}

/* "its last one was 7, all_reduce of 25 f32 (sum)", by one that waits for number `seq` */
static const char *dp__last_text(const dp__journal *journal, unsigned seq, int process, char *text)
{
    char words[DP__WORDS_BYTES] = "";
    size_t used;
    const dp__progress *member = dp__progress_of(journal->job, process);
    unsigned begun = atomic_load(&member->tracks[journal->place].begun);
    bool ended = dp__has_ended(journal, process, begun);
    dp__entry last, own;
    if (dp__entry_get(journal, process, begun, &last))
        (void)dp__issue_text(&last.is, &last.label, words);
    if (begun == 0)
        used = dp__append(text, DP__LAST_BYTES, 0, "it has begun none");
    else if (!ended && begun == seq && dp__entry_get(journal, journal->job->process, seq, &own) &&
             dp__entries_same(&last, &own))
        used = dp__append(text, DP__LAST_BYTES, 0, "it is in that one");
    else
        used = dp__append(text, DP__LAST_BYTES, 0, "%s %u, %s",
                          ended ? "its last one was" : "it is in", begun, words);
    if (member->said[0] != '\0' && ended &&
        atomic_load(&member->tracks[journal->place].said_after) == begun)
        used = dp__append(text, DP__LAST_BYTES, used, ", and then a call failed: %.159s",
                          member->said);
    char activity[DP__ACTIVITY_BYTES];
    if (ended)
        used = dp__append(
            text, DP__LAST_BYTES, used, "%s",
            dp__activity_text(&member->activity, DP__ACTIVITY_LEAST_NS, "; it is in ", activity));
    if (atomic_load(&member->held) > 0)
        (void)dp__append(text, DP__LAST_BYTES, used,
                         ", and it waits to take memory until another context's collectives have "
                         "ended: use both contexts in one thread, in the same order everywhere");
    return text;
}

/* ==== >>shown ===================================================================================
   A board is a file in memory that has no name, but a magic number at its beginning: whoever may
   see what the processes of this user have open (Linux: /proc) finds it and reads it, without their
   help, even if they hang. examples/status.c is such a reader, and has no part of dp.h in it. So
   the layout of what it reads has a number, which changes with dp__board, dp__progress, dp__entry.
   */

static const uint64_t dp__board_magic = 0x6472616f622e7064u; /* "dp.board" */

enum { DP__BOARD_LAYOUT = 2 };
_Static_assert(sizeof(dp__board_head) == 112 && offsetof(dp__board, text) == 124 &&
                   sizeof(dp__lane_progress) == 384 && offsetof(dp__progress, said) == 872 &&
                   sizeof(dp__progress) == 1280 && sizeof(dp__entry) == 184,
               "another layout has another number, here and in examples/status.c");

/* Shows who a process is. */
DP__COLD static void dp__member_show(const dp__job *job, int process)
{
    dp__progress *member = dp__progress_of(job, process);
    const dp__introduction *its = &job->introductions[process];
    member->id = job->ids[process];
    member->rank = job->firsts[process];
    member->rank_count = dp__rank_count_of(job, process);
    member->here = its->machine == job->introduction.machine;
    dp__label_put(member->host, sizeof member->host, its->host);
}

/* Shows what a board is, once it can be read: process 0 does for all, if all have it. */
DP__COLD static void dp__board_show(const dp__job *job)
{
    bool all = job->shared.data != NULL;
    dp__board_head *head = &job->board->head;
    for (int p = 0; p < job->process_count; p++)
        if (p == job->process || !all)
            dp__member_show(job, p);
    if (all && job->process != 0)
        return;
    head->layout = DP__BOARD_LAYOUT;
    head->version = DP_VERSION;
    head->process_count = job->process_count;
    head->process = all ? -1 : job->process;
    head->member_bytes = sizeof(dp__progress);
    head->entry_bytes = sizeof(dp__entry);
    head->kept = DP__KEPT;
    head->recent = DP__RECENT;
    head->members_at = offsetof(dp__board, members);
    head->entries_at = dp__board_bytes(job->process_count);
    head->each = all ? job->each : 0;
    head->epoch = job->epoch;
    dp__label_put(head->launcher, sizeof head->launcher, job->ctx->info.launcher);
    atomic_store_explicit(&head->magic, dp__board_magic, memory_order_release);
}

/* ==== >>failing ================================================================================
   The first process to find a failure writes it for all that share a board: they return the same
   sentence. Between machines the tree carries it (dp/tree.h), and where a death is found in two
   places at once the words differ. A failure found in a collective names the rank, the collective,
   and what that rank did last; one found while processes meet names the process.                */

/* True: it is the first. */
static bool dp__board_fail(dp__board *board, dp_status status, int rank, const char *text)
{
    unsigned none = 0;
    if (!atomic_compare_exchange_strong(&board->failed, &none, 1))
        return false;
    snprintf(board->text, sizeof board->text, "%s", text);
    board->status = status;
    board->rank = rank;
    atomic_store(&board->failed, 2);
    dp__os_word_wake(&board->failed);
    return true;
}

static bool dp__job_is_lost(const dp__job *job)
{
    return atomic_load_explicit(&job->board->failed, memory_order_acquire) != 0;
}

/* Notes the failure that dp_last_error tells. -1: it is not known because of which process. */
static void dp__job_learn(const dp__job *job, dp_status status, int process)
{
    (void)dp__board_fail(job->board, status, job->firsts[process >= 0 ? process : job->process],
                         dp_last_error());
}

/* Why the job has failed, if this process can know. */
static dp_status dp__job_heard(dp__job *job)
{
    dp__board *board = job->board;
    int process = -1;
    dp_status status = DP_OK;
    if (!dp__job_is_lost(job) && job->shared.data == NULL)
        status = job->carrier->hear(job->ctx, &process);
    if (status != DP_OK)
        dp__job_learn(job, status, process);
    if (!dp__job_is_lost(job))
        return DP_OK;
    for (int i = 0; i < 100 && atomic_load(&board->failed) != 2; i++)
        dp__os_word_wait(&board->failed, 1, 2000000);
    if (atomic_load(&board->failed) != 2)
        return dp_error(DP_ERR_REMOTE, "another process failed and died before it could report the "
                                       "reason");
    dp__of_thread.culprit = board->rank + 1;
    return dp_error((dp_status)board->status, "%s", board->text);
}

/* Because of `rank`, unless another failure was first. dp_last_error stays. */
static void dp__job_spread(dp__job *job, dp_status status, int rank, const char *text)
{
    if (dp__board_fail(job->board, status, rank, text))
        job->carrier->tell(job->ctx, status, dp__process_of(job, rank), text);
}

/* Fails the job, and leaves the first failure's sentence. */
DP_PRINTF(4, 5)
static dp_status dp__job_fail(dp__job *job, dp_status status, int process, const char *format, ...)
{
    char text[DP__TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    dp__job_spread(job, status, job->firsts[process], text);
    return dp__job_heard(job);
}

/* "collective 8, all_reduce of 25 f32 (sum): rank 1 (process 1, pid 4242) has died; ..." */
static dp_status dp__job_blame(const dp__journal *journal, unsigned seq, dp_status status,
                               int process, const char *what)
{
    char doing[DP__DOING_BYTES], who[DP__WHO_BYTES], last[DP__LAST_BYTES];
    return dp__job_fail(journal->job, status, process, "%s: %s %s; %s",
                        dp__doing(journal, seq, doing), dp__who(journal->job, process, who), what,
                        dp__last_text(journal, seq, process, last));
}

/* This process has failed: the others hear why. What another one is to blame for names that one
   already. */
static void dp__job_spread_own(dp__job *job, dp_status status, int rank, const char *why)
{
    char who[DP__WHO_BYTES], text[DP__TEXT_BYTES];
    bool own = rank == job->firsts[job->process];
    (void)dp__who(job, job->process, who);
    snprintf(text, sizeof text, "%s%s%.*s", own ? who : "", own ? " failed: " : "",
             DP__TEXT_BYTES - 120, why);
    dp__job_spread(job, status, rank, text);
}

/* The job has failed here: the others hear why. */
static void dp__job_tell(dp_ctx *ctx)
{
    if (ctx->world.job != NULL)
        dp__job_spread_own(ctx->world.job, (dp_status)atomic_load(&ctx->failed), ctx->failed_rank,
                           ctx->failed_text);
}

/* ---- progress messages ----------------------------------------------------------------------- */

/* How long a progress message counts as news, so that its sender need not be asked again: no longer
   than that it is not taken for silent, see dp__journal_missing. */
static uint64_t dp__news_ns(int timeout_ms)
{
    uint64_t part = (uint64_t)timeout_ms * 1000000 / 8;
    return part < DP__ASK_NS ? part : DP__ASK_NS;
}

/* Puts into a progress message what a device is in. Clocks differ, so it says for how long. */
static void dp__activity_tell(const dp__activity *activity, dp__progress_message *out)
{
    uint64_t words[DP__ACTIVITY_WORDS], now = dp__os_now_ns();
    int thread;
    uint64_t since = dp__activity_get(activity, words, &thread);
    if (since == 0)
        return;
    out->in_ns = now > since ? now - since : 1;
    out->thread = thread;
    memcpy(out->in, words, sizeof words);
}

/* Takes it out again. */
static void dp__activity_hear(dp__activity *activity, const dp__progress_message *progress)
{
    uint64_t words[DP__ACTIVITY_WORDS], now = dp__os_now_ns(), ns = progress->in_ns;
    memcpy(words, progress->in, sizeof words);
    dp__activity_put(activity, words, progress->thread, ns != 0 && ns < now ? now - ns : 0);
}

/* The own one. */
static dp__progress_message dp__progress_message_of(const dp__job *job)
{
    const dp__progress *own = dp__progress_of(job, job->process);
    dp__progress_message progress = {.presence = atomic_load(&own->presence),
                                     .held = atomic_load(&own->held),
                                     .absent = dp__of_thread.absent};
    for (int i = 0; i < DP__LANES; i++) {
        unsigned begun = atomic_load(&own->tracks[i].begun);
        (void)dp__entry_get(&job->journals[i], job->process, begun, &progress.last[i]);
        progress.ended[i] = atomic_load(&own->tracks[i].ended);
        progress.said_after[i] = atomic_load(&own->tracks[i].said_after);
        progress.awaits[i] = atomic_load(&own->tracks[i].awaits);
    }
    memcpy(progress.said, own->said, sizeof progress.said);
    dp__activity_tell(&own->activity, &progress);
    return progress;
}

/* Returns true if what a progress message tells can be put in words. */
static bool dp__progress_message_is_sound(const dp__progress_message *progress)
{
    bool sound = progress->in[sizeof progress->in - 1] == '\0';
    for (int i = 0; i < DP__LANES; i++) {
        const dp__signature *is = &progress->last[i].is;
        const dp__label *label = &progress->last[i].label;
        sound = sound && is->verb >= 0 && is->verb < DP_REDUCE_TO && is->op >= 0 &&
                is->op <= DP_OP_MAX && label->what[sizeof label->what - 1] == '\0' &&
                label->by[sizeof label->by - 1] == '\0' &&
                label->tag[sizeof label->tag - 1] == '\0';
    }
    return sound;
}

/* Returns true if a process came back so lately that those behind it may not have been heard of. */
static bool dp__is_back(const dp__job *job, int process, uint64_t now)
{
    uint64_t quarter_ns = (uint64_t)job->timeout_ms * 250000;
    return atomic_load(&dp__progress_of(job, process)->back_ns) + quarter_ns > now;
}

/* Notes that a process has answered, and how long that took, unless an answer shortly before took
   longer: until then it was away. */
static void dp__progress_answered(const dp__job *job, int process)
{
    dp__progress *other = dp__progress_of(job, process);
    uint64_t asked_ns = atomic_exchange(&other->asked_ns, 0), now = dp__os_now_ns();
    bool longer = now - asked_ns > atomic_load(&other->away_ns);
    if (asked_ns != 0 && (longer || !dp__is_back(job, process, now))) {
        atomic_store(&other->away_ns, now - asked_ns);
        atomic_store(&other->back_ns, now);
    }
    atomic_store(&other->looked_ns, now);
}

/* Writes what another process has begun and ended, where there is no board. */
static void dp__lane_progress_put(const dp__journal *journal, int process, unsigned ended,
                                  const dp__entry *last)
{
    dp__lane_progress *track = dp__lane_progress_of(journal, process);
    dp__words_store(dp__entry_of(journal, process, 0), last, DP__ENTRY_WORDS);
    atomic_store(&track->ended, ended);
    atomic_store(&track->begun, (unsigned)last->seq);
}

/* Takes in what another process has sent; it counts as an answer only if a thread that waits has
   sent it. True: it asks. */
static bool dp__progress_message_read(dp__job *job, int process,
                                      const dp__progress_message *progress)
{
    dp__progress *other = dp__progress_of(job, process);
    dp__lock_enter(&job->lock);
    memcpy(other->said, progress->said, sizeof other->said);
    other->said[sizeof other->said - 1] = '\0';
    for (int i = 0; i < DP__LANES; i++) {
        bool sound = progress->awaits[i] <= (uint32_t)job->process_count;
        atomic_store(&other->tracks[i].awaits, sound ? progress->awaits[i] : 0);
        atomic_store(&other->tracks[i].said_after, progress->said_after[i]);
        dp__lane_progress_put(&job->journals[i], process, progress->ended[i], &progress->last[i]);
    }
    dp__activity_hear(&other->activity, progress);
    atomic_store(&other->held, progress->held);
    if (progress->absent == 0)
        dp__progress_answered(job, process);
    atomic_store(&other->presence, progress->presence);
    dp__lock_leave(&job->lock);
    return progress->asks != 0;
}

/* Notes that a process is not there any more; it has died, unless it has said that it goes. */
static void dp__job_miss(dp__job *job, int process)
{
    atomic_int *presence = &dp__progress_of(job, process)->presence;
    dp__lock_enter(&job->lock);
    if (atomic_load(presence) != DP__LEFT)
        atomic_store(presence, DP__DEAD);
    dp__lock_leave(&job->lock);
}

/* Guesses about a process of which nothing has come since: it has begun what has ended here, but
   for what goes from one to the others. */
static void dp__lane_progress_guess(const dp__journal *journal, int process)
{
    dp__entry last;
    unsigned ended = atomic_load(&dp__own_lane_progress(journal)->ended);
    if (dp__has_begun(journal, process, ended) ||
        !dp__entry_get(journal, journal->job->process, ended, &last) ||
        last.is.verb == DP_BROADCAST)
        return;
    dp__lock_enter(&journal->job->lock);
    if (!dp__has_begun(journal, process, ended)) /* more may have come from it meanwhile */
        dp__lane_progress_put(journal, process, ended, &last);
    dp__lock_leave(&journal->job->lock);
}

/* Tells the others, where there is no board, what may not wait until they ask. */
static void dp__progress_message_send(const dp__job *job)
{
    const dp__progress_message own = dp__progress_message_of(job);
    if (job->shared.data == NULL)
        (void)job->carrier->send(job->ctx, &own);
}

/* A call has failed, and the job has not: for those who may come to wait for this process. */
static void dp__job_say(dp_ctx *ctx, const char *text)
{
    if (ctx->world.job == NULL)
        return;
    dp__lock_enter(&ctx->lock);
    dp__progress *own = dp__progress_of(ctx->world.job, ctx->world.job->process);
    dp__label_put(own->said, sizeof own->said, text);
    for (int i = 0; i < DP__LANES; i++)
        atomic_store(&own->tracks[i].said_after, atomic_load(&own->tracks[i].begun));
    dp__lock_leave(&ctx->lock);
    dp__progress_message_send(ctx->world.job);
}

static void dp__job_leave(const dp_ctx *ctx)
{
    dp__job *job = ctx->world.job;
    if (job == NULL)
        return;
    atomic_store(&dp__progress_of(job, job->process)->presence, DP__LEFT);
    dp__progress_message_send(job);
}

/* ==== >>blaming ================================================================================
   When a wait has taken too long, one process is to blame (a death is found in >>looking, by who
   waits). Each says whom it waits for. That leads from one to the next, until one does not wait: it
   has died, computes, or was stopped. A process is silent if it has not looked around for a while,
   as processes do while they wait. Time for which this process was stopped does not count.      */

enum {
    DP__LOOK_NS = 4000000,
    DP__LATE_NS = 100000000,   /* the most that goes by between two looks */
    DP__SILENT_NS = 1000000000 /* who waits has looked since, and answers within */
};

/* Every few milliseconds of a wait: true, and how long it has taken. */
static bool dp__wait_looks(dp__wait *wait, uint64_t look_ns, uint64_t *out_waited_ns)
{
    uint64_t now = dp__os_now_ns(), before = atomic_load(&wait->looked_ns), since = now - before;
    if ((before != 0 && since < look_ns) ||
        !atomic_compare_exchange_strong(&wait->looked_ns, &before, now) || before == 0)
        return false;
    since = since < DP__LATE_NS ? since : DP__LATE_NS;
    *out_waited_ns = atomic_fetch_add(&wait->waited_ns, since) + since;
    return true;
}

/* Notes that this process is there, and waits. While it was stopped, or did something else, nobody
   could answer it: that time does not count. */
static void dp__job_looks(const dp__job *job)
{
    uint64_t now = dp__os_now_ns();
    uint64_t since = now - atomic_exchange(&dp__progress_of(job, job->process)->looked_ns, now);
    bool late = job->shared.data == NULL && since > DP__LATE_NS;
    for (int p = 0; p < job->process_count && late; p++) {
        _Atomic uint64_t *asked_ns = &dp__progress_of(job, p)->asked_ns;
        uint64_t before = atomic_load(asked_ns), then = before + since;
        if (before != 0)
            (void)atomic_compare_exchange_strong(asked_ns, &before, then < now ? then : now);
    }
}

/* Asks those that have no board what they have begun; returns false if there is no way to them. One
   that has just said so does not say it again. */
static bool dp__job_ask(const dp__job *job)
{
    dp__progress_message progress = dp__progress_message_of(job);
    uint64_t now = dp__os_now_ns(), news_ns = now - dp__news_ns(job->timeout_ms);
    for (int p = 0; p < job->process_count; p++) {
        dp__progress *other = dp__progress_of(job, p);
        uint64_t none = 0;
        if (p != job->process && atomic_load(&other->looked_ns) < news_ns)
            (void)atomic_compare_exchange_strong(&other->asked_ns, &none, now);
    }
    progress.asks = 1;
    return job->carrier->send(job->ctx, &progress);
}

static bool dp__is_silent(const dp__job *job, int process, uint64_t since_ns)
{
    return process != job->process &&
           atomic_load(&dp__progress_of(job, process)->looked_ns) < since_ns;
}

/* Asks all whether they are there, and waits for their answers. Returns since when each may be
   expected to have been seen: who was not computes, sleeps, or is gone; 0: none can be asked. */
DP__COLD static dp_status dp__job_call(dp__job *job, uint64_t *out_since_ns)
{
    uint64_t now = dp__os_now_ns(), half = (uint64_t)job->timeout_ms * 500000;
    uint64_t waited_ns = 0;
    bool silent = job->shared.data == NULL;
    dp__wait wait = {0};
    *out_since_ns = now - (silent                 ? dp__news_ns(job->timeout_ms)
                           : half < DP__SILENT_NS ? half
                                                  : DP__SILENT_NS);
    if (silent && !dp__job_ask(job))
        *out_since_ns = 0;
    while (silent && *out_since_ns != 0 && waited_ns < DP__SILENT_NS) {
        dp__os_sleep_ms(1);
        (void)dp__wait_looks(&wait, DP__LOOK_NS, &waited_ns);
        dp__job_looks(job);
        DP_TRY(dp__job_heard(job));
        silent = false;
        for (int p = 0; p < job->process_count; p++)
            silent = silent || (dp__is_alive(job, p) && dp__is_silent(job, p, *out_since_ns));
    }
    return DP_OK;
}

/* Returns true if all are known to have begun number `seq`, and not the same. */
static bool dp__journal_clashes(const dp__journal *journal, unsigned seq)
{
    dp__entry own, other;
    bool same = true, all = dp__entry_get(journal, journal->job->process, seq, &own);
    for (int p = 0; p < journal->job->process_count && all; p++) {
        bool matches = dp__has_begun(journal, p, seq) && dp__entry_matches(journal, p, seq, &own);
        all = matches || dp__entry_get(journal, p, seq, &other);
        same = same && matches;
    }
    return all && !same;
}

/* How many ranks have begun what this process has. */
static int dp__ranks_alike(const dp__job *job, const dp__entry *entries, int process)
{
    int votes = 0;
    for (int p = 0; p < job->process_count; p++)
        votes += dp__entries_same(&entries[p], &entries[process]) ? dp__rank_count_of(job, p) : 0;
    return votes;
}

/* The first process that does not do what most do is to blame. */
static dp_status dp__entries_differ(dp__job *job, unsigned seq, const dp__entry *entries)
{
    char who[2][DP__WHO_BYTES], what[2][DP__WORDS_BYTES];
    int most = 0, odd = 0;
    for (int p = 1; p < job->process_count; p++)
        if (dp__ranks_alike(job, entries, p) > dp__ranks_alike(job, entries, most))
            most = p;
    while (odd < job->process_count - 1 && dp__entries_same(&entries[odd], &entries[most]))
        odd++;
    return dp__job_fail(
        job, DP_ERR_REMOTE, odd,
        "collective %u: %s has issued %s, and %s %s: all must make the same calls in the same "
        "order",
        seq, dp__who(job, odd, who[0]),
        dp__issue_text(&entries[odd].is, &entries[odd].label, what[0]), dp__who(job, most, who[1]),
        dp__issue_text(&entries[most].is, &entries[most].label, what[1]));
}

/* Says what clashes. `seqs`: the number of each process' call; NULL: `seq`. */
static dp_status dp__journal_differs(const dp__journal *journal, unsigned seq, const unsigned *seqs)
{
    dp__job *job = journal->job;
    size_t bytes = (size_t)job->process_count * sizeof(dp__entry);
    dp__entry *entries = dp__os_alloc(bytes, _Alignof(dp__entry), NULL);
    if (entries == NULL)
        return dp__job_fail(job, DP_ERR_REMOTE, job->process,
                            "collective %u: the processes have issued different calls", seq);
    for (int p = 0; p < job->process_count; p++)
        (void)dp__entry_get(journal, p, seqs != NULL ? seqs[p] : seq, &entries[p]);
    dp_status status = dp__entries_differ(job, seq, entries);
    dp__os_free(entries, bytes, NULL);
    return status;
}

/* Returns true if a process answers again, but did not for most of the time for which others wait:
   until then they all waited for it. */
static bool dp__was_away(const dp__job *job, int process, uint64_t now)
{
    const dp__progress *other = dp__progress_of(job, process);
    uint64_t timeout_ns = (uint64_t)job->timeout_ms * 1000000;
    return atomic_load(&other->away_ns) > timeout_ns / 2 && dp__is_back(job, process, now);
}

/* Returns the first process that is silent on the way to one that is: progress messages do not pass
   it, and those that it held up are on their way when it answers again; nor do they pass one that
   has left, behind which nobody is known to be silent. */
DP__COLD static int dp__first_silent(const dp__job *job, int process, uint64_t since_ns)
{
    int on = job->process;
    uint64_t now = dp__os_now_ns();
    while (job->shared.data == NULL && on != process) {
        on = job->carrier->next(job->ctx, on, process);
        if (atomic_load(&dp__progress_of(job, on)->presence) == DP__LEFT)
            return process;
        if (dp__is_silent(job, on, since_ns) || dp__was_away(job, on, now))
            return on;
    }
    return process;
}

static int dp__journal_timeout_ms(const dp__journal *journal)
{
    return journal->job->timeout_ms + journal->patience_ms;
}

/* Returns the process for which all wait in a collective: it has not begun this one, or has and
   does not go on, and is not seen to wait since then. -1: all are in it, and wait. */
DP__COLD static int dp__journal_missing(const dp__journal *journal, unsigned seq, uint64_t since_ns)
{
    const dp__job *job = journal->job;
    int missing[3] = {-1, -1, -1};
    for (int p = job->process_count - 1; p >= 0; p--) {
        bool begun = dp__has_begun(journal, p, seq), silent = dp__is_silent(job, p, since_ns);
        if (!dp__has_ended(journal, p, seq) && (silent || !begun))
            missing[silent ? begun : 2] = p;
    }
    int first = missing[0] >= 0 ? missing[0] : missing[1];
    return first >= 0 ? dp__first_silent(job, first, since_ns) : missing[2];
}

/* Returns whom a process waits for, on this lane or another one: as it says, or as what all have
   begun says; -1: that is not known. */
DP__COLD static int dp__awaited_by(const dp__job *job, int lane, int process, uint64_t since_ns)
{
    const dp__progress *member = dp__progress_of(job, process);
    int awaited = -1;
    for (int i = 0; i < DP__LANES && awaited < 0; i++)
        awaited = (int)atomic_load(&member->tracks[(lane + i) % DP__LANES].awaits) - 1;
    for (int i = 0; i < DP__LANES && awaited < 0; i++) {
        const dp__journal *journal = &job->journals[(lane + i) % DP__LANES];
        unsigned begun = atomic_load(&member->tracks[journal->place].begun);
        if (!dp__has_ended(journal, process, begun))
            awaited = dp__journal_missing(journal, begun, since_ns);
    }
    return awaited;
}

enum { DP__UNKNOWN = -1, DP__CIRCLE = -2 };

/* Returns for whom a process waits in the end, if it waits for one that waits for a third, and so
   on: itself, if it does not wait. DP__CIRCLE: they wait for each other, or for this process. */
DP__COLD static int dp__wait_root(const dp__job *job, int lane, int process, uint64_t since_ns)
{
    for (int i = 0; i < job->process_count && process >= 0; i++) {
        if (process == job->process)
            return DP__CIRCLE;
        if (!dp__is_alive(job, process))
            return process;
        if (dp__is_silent(job, process, since_ns))
            return dp__first_silent(job, process, since_ns);
        int awaited = dp__awaited_by(job, lane, process, since_ns);
        if (awaited == process)
            return process;
        process = awaited;
    }
    return process < 0 ? DP__UNKNOWN : DP__CIRCLE;
}

/* Returns the one that was away for longest, or the first on the way to it that was away as well or
   is silent; -1: none was. */
DP__COLD static int dp__longest_away(const dp__job *job, uint64_t since_ns)
{
    uint64_t now = dp__os_now_ns(), most = 0;
    int away = -1;
    for (int p = 0; p < job->process_count; p++) {
        uint64_t ns = atomic_load(&dp__progress_of(job, p)->away_ns);
        if (dp__was_away(job, p, now) && ns > most) {
            most = ns;
            away = p;
        }
    }
    return away >= 0 ? dp__first_silent(job, away, since_ns) : -1;
}

static const char dp__no_answer[] = "does not answer";

/* Says what is wrong with one that is to blame for a wait. */
DP__COLD static const char *dp__fault_text(const dp__job *job, int process, uint64_t since_ns,
                                           char *text)
{
    const dp__progress *other = dp__progress_of(job, process);
    if (atomic_load(&other->presence) == DP__LEFT)
        return "has closed its context";
    if (!dp__is_alive(job, process))
        return "has died";
    if (atomic_load(&other->tracks[DP__CALLER].awaits) == (unsigned)process + 1)
        return "may open no more files";
    if (dp__is_silent(job, process, since_ns) || atomic_load(&other->away_ns) == 0)
        return dp__no_answer;
    snprintf(text, DP__FAULT_BYTES, "did not answer for %llu ms",
             (unsigned long long)atomic_load(&other->away_ns) / 1000000);
    return text;
}

/* "did not come within 4000 ms", "did not come within 4000 ms, as rank 1 (process 1, pid 4242) has
   died": of one that is waited for; root: whose fault that is, -1: that is not known. */
DP__COLD static const char *dp__late_text(const dp__job *job, int ms, int named, int root,
                                          uint64_t since_ns, char *text)
{
    char who[DP__WHO_BYTES], words[DP__FAULT_BYTES];
    const char *why = root >= 0 ? dp__fault_text(job, root, since_ns, words) : "";
    size_t used = dp__append(text, DP__LATE_BYTES, 0, "did not come within %d ms", ms);
    if (root >= 0 && root != named)
        (void)dp__append(text, DP__LATE_BYTES, used, ", as %s %s", dp__who(job, root, who), why);
    else if (root >= 0 && why != dp__no_answer)
        strcpy(text, why);
    return text;
}

/* Returns for whom all wait in the end; -1: that is not known. What this process lacks says so
   first, then what all have begun, and then who was away. */
DP__COLD static int dp__journal_root(const dp__journal *journal, int missing, uint64_t since_ns)
{
    int lane = journal->place,
        awaited = (int)atomic_load(&dp__own_lane_progress(journal)->awaits) - 1;
    int root = dp__wait_root(journal->job, lane, awaited, since_ns);
    if (root < 0)
        root = dp__wait_root(journal->job, lane, missing, since_ns);
    return root >= 0 ? root : dp__longest_away(journal->job, since_ns);
}

/* The time is up. */
DP__COLD static dp_status dp__journal_late(dp__journal *journal, unsigned seq)
{
    dp__job *job = journal->job;
    char doing[DP__DOING_BYTES], last[DP__LAST_BYTES], who[DP__WHO_BYTES], what[DP__LATE_BYTES];
    uint64_t since_ns;
    int ms = dp__journal_timeout_ms(journal);
    (void)dp__doing(journal, seq, doing);
    DP_TRY(dp__job_call(job, &since_ns));
    if (since_ns == 0)
        return dp__job_fail(job, DP_ERR_TIMEOUT, job->process,
                            "%s: others did not come within %d ms", doing, ms);
    if (dp__journal_clashes(journal, seq))
        return dp__journal_differs(journal, seq, NULL);
    int missing = dp__journal_missing(journal, seq, since_ns);
    int root = dp__journal_root(journal, missing, since_ns);
    bool nobody = root < 0 && missing < 0;
    if (nobody && atomic_exchange(&journal->late, seq) != seq)
        return DP_OK; /* what this process waits for may have come while it asked */
    if (nobody)
        return dp__job_fail(job, DP_ERR_TIMEOUT, job->process,
                            "%s: all processes have begun it, and it did not end within %d ms",
                            doing, ms);
    bool lacks = root >= 0 && (missing < 0 || !dp__has_ended(journal, root, seq));
    int named = lacks ? root : missing;
    return dp__job_fail(job, DP_ERR_TIMEOUT, root >= 0 ? root : named, "%s: %s %s; %s", doing,
                        dp__who(job, named, who),
                        dp__late_text(job, ms, named, root, since_ns, what),
                        dp__last_text(journal, seq, named, last));
}

/* Returns true if a process is on this machine. */
static bool dp__is_near(const dp__job *job, int process)
{
    return job->introductions[process].machine == job->introduction.machine;
}

/* Says once, long before the time is up, for whom all wait. Process 0 does, or process 1 where all
   wait for that one; no other one asks who is at fault, as that asks the kernel. */
DP__COLD static void dp__journal_warn(dp__journal *journal, unsigned seq, uint64_t waited_ns)
{
    const dp__job *job = journal->job;
    char doing[DP__DOING_BYTES], last[DP__LAST_BYTES], who[DP__WHO_BYTES];
    uint64_t since_ns = dp__os_now_ns() - waited_ns;
    int missing = dp__journal_missing(journal, seq, since_ns);
    int root = dp__journal_root(journal, missing, since_ns), named = root >= 0 ? root : missing;
    if (named < 0 || atomic_exchange(&journal->warned, seq) == seq || job->process != (named == 0))
        return;
    dp__log(job->ctx, DP_LOG_WARN, "%s: waits for %s for %.1f s; %s",
            dp__doing(journal, seq, doing), dp__who(job, named, who), (double)waited_ns * 1e-9,
            dp__last_text(journal, seq, named, last));
    if (dp__is_near(job, named))
        dp__activity_ask(&dp__progress_of(job, named)->activity, job->ids[named]);
}

/* ==== >>looking ================================================================================
   Who waits looks here every few milliseconds whether another process has failed, has closed its
   context, has died, or does something else; and who is missing when the time is up.            */

enum {
    DP__LOOKERS = 16,   /* to a core; if there are more each looks less often */
    DP__SEEN_LOOKS = 3, /* who waits has looked since so many should have been */
    DP__PROBES = 64, /* locks that all who wait ask the kernel for, together, between two looks */
    DP__SLICE = 64   /* processes that a look is about, where all share memory */
};

/* If many shared a core, and all looked often, they would keep those that they wait for from it. */
static uint64_t dp__look_ns(int process_count, int core_count)
{
    uint64_t times = (uint64_t)process_count / (uint64_t)(DP__LOOKERS * core_count);
    uint64_t ns = times * DP__LOOK_NS < DP__LATE_NS ? times * DP__LOOK_NS : DP__LATE_NS;
    return ns > DP__LOOK_NS ? ns : DP__LOOK_NS;
}

/* It has looked around a moment ago, while it waited. */
static bool dp__is_seen(const dp__job *job, int process, uint64_t now)
{
    uint64_t looked_ns = atomic_load(&dp__progress_of(job, process)->looked_ns);
    return now < looked_ns + DP__SEEN_LOOKS * job->look_ns;
}

/* It is waited for, as it has not ended this call, and may have died. */
static bool dp__is_doubtful(const dp__journal *journal, int process, unsigned seq, uint64_t now)
{
    const dp__job *job = journal->job;
    bool seen = job->shared.data != NULL && dp__is_seen(job, process, now);
    return process != job->process && !seen && !dp__has_ended(journal, process, seq) &&
           atomic_load(&dp__progress_of(job, process)->presence) != DP__LEFT;
}

/* The processes that a look is about: from `first` on so many, one in `step`, in a circle. */
typedef struct dp__slice {
    int first, count, step;
} dp__slice;

static dp__slice dp__slice_of(dp__journal *journal)
{
    const dp__job *job = journal->job;
    int count = job->process_count;
    unsigned looks = atomic_fetch_add(&journal->looks, 1) + (unsigned)job->process;
    if (job->shared.data == NULL || count <= DP__SLICE)
        return (dp__slice){0, count, 1};
    return (dp__slice){(int)(looks % (unsigned)count), DP__SLICE, count / DP__SLICE | 1};
}

static int dp__slice_at(const dp__job *job, const dp__slice *slice, int i)
{
    return (slice->first + i * slice->step) % job->process_count;
}

/* How many locks of `doubtful` ones this look is to ask for. */
static unsigned dp__probes(const dp__job *job, const dp__slice *slice, unsigned seen,
                           unsigned doubtful)
{
    unsigned waiting = 1 + seen * (unsigned)job->process_count / (unsigned)slice->count;
    return job->shared.data != NULL ? (DP__PROBES + waiting - 1) / waiting : doubtful;
}

/* A process that has died, of those that are waited for; -1: none is known to have. Asking for a
   lock takes the kernel as long as there are locks, and those who ask for locks of one file take
   turns: in a large job in which each asked for all, nobody would do anything else. So those who
   wait share the work: a look is about some processes, and asks for some of their locks, others
   each time, and all together for DP__PROBES or a few more, so that within some looks somebody has
   asked for any. Up to 16 processes each asks for all. */
static int dp__journal_dead(dp__journal *journal, const dp__slice *slice, unsigned seq)
{
    const dp__job *job = journal->job;
    uint64_t now = dp__os_now_ns();
    unsigned doubtful = 0, seen = 0, place = atomic_load(&journal->looks) * 2654435761u >> 8;
    for (int i = 0; i < slice->count; i++) {
        int p = dp__slice_at(job, slice, i);
        doubtful += dp__is_doubtful(journal, p, seq, now);
        seen += p != job->process && dp__is_seen(job, p, now);
    }
    unsigned own = dp__probes(job, slice, seen, doubtful);
    for (int i = 0; i < slice->count && doubtful > 0; i++) {
        int p = dp__slice_at(job, slice, i);
        if (!dp__is_doubtful(journal, p, seq, now))
            continue;
        bool mine = own >= doubtful || place % doubtful < own;
        place++;
        /* until its lock was asked for it may have ended this call, and left */
        if (mine && !dp__is_alive(job, p) && dp__is_doubtful(journal, p, seq, now))
            return p;
    }
    return -1;
}

/* Asks the others, where there is no board, once a wait takes long, and again a moment before who
   may warn says what they are in: by then they may be in something else. */
static void dp__journal_ask(dp__journal *journal, unsigned seq, uint64_t waited_ns)
{
    const dp__job *job = journal->job;
    uint64_t timeout_ns = (uint64_t)dp__journal_timeout_ms(journal) * 1000000;
    bool soon = job->process <= 1 && waited_ns + DP__ASK_NS >= timeout_ns / 4;
    for (int p = 0; p < job->process_count; p++)
        dp__lane_progress_guess(journal, p);
    if (waited_ns <= DP__ASK_NS)
        return;
    bool asks = atomic_exchange(&journal->asked, seq) != seq;
    if ((soon && atomic_exchange(&journal->again, seq) != seq) || asks)
        (void)dp__job_ask(job);
}

/* Shows since when this process has waited in number `seq`. */
DP__COLD static void dp__journal_show(const dp__journal *journal, unsigned seq, uint64_t waited_ns)
{
    dp__lane_progress *own = dp__own_lane_progress(journal);
    atomic_store_explicit(&own->since_ns, dp__os_now_ns() - waited_ns, memory_order_relaxed);
    atomic_store_explicit(&own->since, seq, memory_order_release);
}

/* Looks whether it makes sense to wait for the end of number `seq`, for which this process has
   waited so long. A death counts at once. A difference counts only when two looks find it: a call
   that the table refuses is on the board for a moment. */
static dp_status dp__journal_look(dp__journal *journal, unsigned seq, uint64_t waited_ns)
{
    dp__job *job = journal->job;
    dp__journal_show(journal, seq, waited_ns);
    dp__job_looks(job);
    DP_TRY(dp__job_heard(job));
    if (job->shared.data == NULL)
        dp__journal_ask(journal, seq, waited_ns);
    const dp__slice slice = dp__slice_of(journal);
    for (int i = 0; i < slice.count; i++) {
        int p = dp__slice_at(job, &slice, i);
        bool left = atomic_load(&dp__progress_of(job, p)->presence) == DP__LEFT;
        if (left && !dp__has_begun(journal, p, seq)) /* else it got there before it ended */
            return dp__job_blame(journal, seq, DP_ERR_REMOTE, p, "has closed its context");
    }
    int dead = dp__journal_dead(journal, &slice, seq);
    if (dead >= 0)
        return dp__job_blame(journal, seq, DP_ERR_REMOTE, dead, "has died");
    bool clashes = dp__journal_clashes(journal, seq);
    if (clashes && atomic_exchange(&journal->odd, seq) == seq)
        return dp__journal_differs(journal, seq, NULL);
    uint64_t timeout_ns = (uint64_t)dp__journal_timeout_ms(journal) * 1000000;
    bool late = waited_ns >= timeout_ns, warns = job->process <= 1 && waited_ns >= timeout_ns / 4;
    if (warns && atomic_load(&journal->warned) != seq)
        dp__journal_warn(journal, seq, waited_ns);
    return late ? dp__journal_late(journal, seq) : DP_OK;
}

/* In a loop that waits for the end of what was begun last. */
static dp_status dp__journal_rest(dp__journal *journal, dp__wait *wait)
{
    uint64_t waited_ns;
    if (!dp__wait_looks(wait, journal->job->look_ns, &waited_ns))
        return DP_OK;
    atomic_store(&dp__own_lane_progress(journal)->awaits, wait->awaits);
    return dp__journal_look(journal, atomic_load(&dp__own_lane_progress(journal)->begun),
                            waited_ns);
}

/* Ends a wait that has said for whom it was. */
static void dp__journal_rested(const dp__journal *journal, const dp__wait *wait)
{
    if (wait->awaits != 0)
        atomic_store(&dp__own_lane_progress(journal)->awaits, 0);
}

/* Returns true if there are cores for so many threads of all processes. If a quota leaves this
   process fewer cores than its mask has, all processes share that quota. */
static bool dp__job_has_cores(const dp__job *job, int threads)
{
    dp__cores cores = {{0}};
    for (int p = 0; p < job->process_count; p++)
        dp__cores_join(&cores, &job->introductions[p].cores);
    bool limited = job->ctx->limited && threads > job->ctx->cores;
    return !limited && threads <= dp__cores_count(&cores);
}

/* dp_host.aborted: a table of anybody's looks around where it asks that. */
static bool dp__job_aborted(const dp_host *host)
{
    const dp_ctx *ctx = dp__ctx_of(host);
    if (ctx->world.job == NULL || dp__host_aborted(host))
        return dp__host_aborted(host);
    const dp__lane *lane = dp__of_thread.lane;
    dp__journal *journal = lane != NULL && lane->ctx == ctx ? lane->journal
                                                            : ctx->lanes[DP__CALLER].journal;
    bool waits = atomic_load(&journal->done) != atomic_load(&dp__own_lane_progress(journal)->begun);
    return waits && dp__journal_rest(journal, &journal->wait) != DP_OK;
}

/* A table has failed here, perhaps since another process has. Somebody may be able to say why, if
   he is given some time; what has failed here by itself stays the reason here. */
static dp_status dp__journal_reason(dp__journal *journal, dp_status status)
{
    bool echo = status == DP_ERR_REMOTE || status == DP_ERR_TIMEOUT || status == DP_ERR_ABORTED;
    bool fresh = dp__of_thread.fresh;
    int culprit = dp__of_thread.culprit;
    char said[DP__TEXT_BYTES];
    dp__job *job = journal->job;
    unsigned seq = (unsigned)journal->now.seq;
    if (dp_status_class(status) != DP_CLASS_JOB)
        return status;
    memcpy(said, dp_last_error(), sizeof said);
    uint64_t now = dp__os_now_ns(), until_ns = now + (uint64_t)(echo ? DP__SILENT_NS : 0);
    uint64_t waited_ns = status == DP_ERR_TIMEOUT && journal->begun_ns > 0 ? now - journal->begun_ns
                                                                           : 0;
    dp_status heard = echo ? dp__journal_look(journal, seq, waited_ns) : dp__job_heard(job);
    while (heard == DP_OK && !dp__has_failed(job->ctx) && dp__os_now_ns() < until_ns) {
        dp__os_sleep_ms(10);
        heard = dp__journal_look(journal, seq, 0);
    }
    if (heard != DP_OK && (echo || strcmp(said, dp_last_error()) == 0))
        return heard;
    (void)dp_error(status, "%s", said);
    dp__of_thread.fresh = fresh;
    dp__of_thread.culprit = culprit;
    return status;
}

/* ==== >>watching ===============================================================================
   A wait in shared memory spins if there is a core for every thread of all the processes, for a
   courier's wait also one for every courier, and sleeps otherwise; as in a team, it learns how long
   to spin. After a short while it offers its core to others at every look: the system may have put
   the process it waits for on that core, and moves it only if both want to run. A sleeper wakes up
   every few milliseconds and looks whether it still makes sense to wait.

   A sleeper is counted before it looks for the last time, and who changes the word reads that count
   afterwards: so one of the two sees the other.                                                 */

enum {
    DP__ALONE_NS = 10000,
    DP__WATCH_PATIENCE = 8 /* times a team's: who slept is late by more than that */
};

typedef struct dp__watch {
    bool (*there)(void *what); /* what is waited for has come */
    dp_status (*rest)(void *what, dp__wait *wait);
    void *what;
    atomic_uint *word, *sleepers; /* the word that changes when it comes; who sleeps until then */
    uint64_t *waited_ns;          /* to which a wait is added; or NULL */
    unsigned *missed;             /* spins in a row that ran out */
    uint64_t look_ns;
} dp__watch;

static void dp__watch_waited(const dp__watch *watch, uint64_t ns)
{
    if (watch->waited_ns != NULL)
        *watch->waited_ns += ns;
}

static bool dp__watch_spin(const dp__watch *watch)
{
    uint64_t start = 0, now = 0, patience = dp__gate_patience(*watch->missed);
    do {
        for (int i = 0; i < 16; i++) {
            if (watch->there(watch->what)) {
                *watch->missed = 0;
                dp__watch_waited(watch, now - start);
                return true;
            }
            dp__os_pause();
        }
        now = dp__os_now_ns();
        start = start != 0 ? start : now;
        if (now - start > DP__ALONE_NS)
            dp__os_yield();
    } while (now - start < DP__WATCH_PATIENCE * patience);
    ++*watch->missed;
    dp__watch_waited(watch, now - start);
    return false;
}

static dp_status dp__watch_sleep(const dp__watch *watch)
{
    dp__wait wait = {0};
    uint64_t begun = dp__os_now_ns();
    dp_status status = watch->rest(watch->what, &wait);
    atomic_fetch_add(watch->sleepers, 1);
    while (status == DP_OK) {
        unsigned seen = atomic_load(watch->word);
        if (watch->there(watch->what))
            break;
        dp__os_word_wait(watch->word, seen, watch->look_ns);
        status = watch->there(watch->what) ? DP_OK : watch->rest(watch->what, &wait);
    }
    atomic_fetch_sub(watch->sleepers, 1);
    dp__watch_waited(watch, dp__os_now_ns() - begun);
    return status;
}

static dp_status dp__watch_until(const dp__watch *watch, bool spins)
{
    return spins && dp__watch_spin(watch) ? DP_OK : dp__watch_sleep(watch);
}

/* ==== >>journal ================================================================================
   What this process begins on each lane. It is written by the one thread that uses the lane, and
   read by any.                                                                                  */

DP_API void dp_tag(dp_ctx *ctx, const char *text)
{
    char tag[DP__TAG_BYTES];
    if (dp__check_open(__func__, ctx) != DP_OK)
        return;
    dp__label_put(tag, sizeof tag, text);
    dp__words_store(ctx->tag, tag, DP__TAG_WORDS);
    atomic_fetch_add_explicit(&ctx->tags, 1, memory_order_release);
}

static dp__purpose dp__journal_for(const dp__lane *lane, dp__purpose purpose)
{
    dp__journal *journal = lane->journal;
    if (journal == NULL)
        return (dp__purpose){0};
    dp__purpose before = journal->purpose;
    journal->purpose = purpose;
    journal->by = NULL;
    return before;
}

static void dp__journal_label(dp__journal *journal, const char *by)
{
    dp__label *label = &journal->now.label;
    journal->tags = atomic_load_explicit(&journal->job->ctx->tags, memory_order_acquire);
    journal->by = by;
    dp__label_put(label->what, sizeof label->what, journal->purpose.what);
    dp__label_put(label->by, sizeof label->by, by);
    dp__words_load(label->tag, journal->job->ctx->tag, DP__TAG_WORDS);
}

/* Writes what a table is about to be called for. The label is made anew only where it has changed.
   */
static void dp__journal_write(dp__journal *journal, const char *by, const dp_coll_call *call)
{
    if (journal->by != by ||
        journal->tags != atomic_load_explicit(&journal->job->ctx->tags, memory_order_relaxed))
        dp__journal_label(journal, by);
    journal->now.seq++;
    journal->now.is = dp__sign(call, journal->purpose);
    journal->now.late =
        dp__late_tell(&journal->arrivals, journal->now.seq, journal->job->ctx->spent_ns);
    unsigned seq = (unsigned)journal->now.seq;
    if (!journal->compared && !journal->ends_later)
        journal->begun_ns = dp__os_now_ns();
    atomic_store_explicit(&journal->wait.looked_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&journal->wait.waited_ns, 0, memory_order_relaxed);
    dp__words_store(dp__entry_of(journal, journal->job->process, seq), &journal->now,
                    DP__ENTRY_WORDS);
    atomic_store_explicit(&dp__own_lane_progress(journal)->begun, seq, memory_order_release);
}

static dp_status dp__journal_begin(const dp__lane *lane, const char *by, const dp_coll_call *call)
{
    dp__journal *journal = lane->journal;
    if (journal == NULL)
        return DP_OK;
    if (dp__job_is_lost(journal->job))
        return dp__job_heard(journal->job);
    dp__journal_write(journal, by, call);
    return DP_OK;
}

static dp_status dp__journal_heard(const dp__lane *lane)
{
    return lane->journal != NULL ? dp__job_heard(lane->journal->job) : DP_OK;
}

/* Up to number `seq` all has ended here, so that others have begun it. */
static dp_status dp__journal_ended_to(dp__journal *journal, unsigned seq)
{
    atomic_store_explicit(&dp__own_lane_progress(journal)->ended, seq, memory_order_release);
    bool clashes = !journal->compared && dp__journal_clashes(journal, seq);
    return clashes ? dp__journal_differs(journal, seq, NULL) : DP_OK;
}

/* Leaves out what a table refuses, so that all count alike. */
static dp_status dp__journal_end(const dp__lane *lane, dp_status status)
{
    dp__journal *journal = lane->journal;
    if (journal == NULL)
        return status;
    bool refused = status != DP_OK && dp_status_class(status) == DP_CLASS_CALL;
    journal->now.seq -= refused;
    unsigned seq = (unsigned)journal->now.seq;
    if (refused)
        atomic_store_explicit(&dp__own_lane_progress(journal)->begun, seq, memory_order_release);
    if (status != DP_OK)
        return dp__journal_reason(journal, status);
    atomic_store_explicit(&journal->done, seq, memory_order_release);
    return journal->ends_later ? DP_OK : dp__journal_ended_to(journal, seq);
}

/* NULL: there are no other processes. */
static dp__job *dp__job_of(const dp_host *host)
{
    return dp__ctx_of(host)->world.job;
}

/* Returns the ring of the lane that is opened. */
static dp__journal *dp__journal_opening(dp__job *job)
{
    int lane = DP__CALLER;
    while (lane < DP__LANES - 1 && job->ctx->lanes[lane].comm != NULL)
        lane++;
    return &job->journals[lane];
}

/* The entry that was begun so many before the last one; false: there is none. */
static bool dp__journal_entry(const dp__journal *journal, unsigned age, dp__entry *out)
{
    unsigned begun =
        atomic_load_explicit(&dp__own_lane_progress(journal)->begun, memory_order_acquire);
    return age < begun && age < DP__RECENT &&
           dp__entry_get(journal, journal->job->process, begun - age, out);
}

static bool dp__journal_ended(const dp__journal *journal, const dp__entry *entry)
{
    unsigned done = atomic_load_explicit(&journal->done, memory_order_acquire);
    return (int)(done - (unsigned)entry->seq) >= 0;
}

/* Says what it means that a table's call has returned: a device of its own may do the work later.
   */
static const char *dp__ended_text(const dp__lane *lane)
{
    return lane->carrier != lane->comm || dp__all_are_host(lane->ctx) ? "ended" : "enqueued";
}

/* "collective 8 of the courier, all_reduce of ...: under way" */
static bool dp__journal_line(const dp__lane *lane, unsigned age, char *text, size_t room)
{
    static const char *const whose[DP__LANES] = {"", " of the courier"};
    char words[DP__WORDS_BYTES];
    dp__entry entry;
    if (lane->journal == NULL || !dp__journal_entry(lane->journal, age, &entry))
        return false;
    snprintf(text, room, "collective %llu%s, %s: %s", (unsigned long long)entry.seq,
             whose[lane - lane->ctx->lanes], dp__issue_text(&entry.is, &entry.label, words),
             dp__journal_ended(lane->journal, &entry) ? dp__ended_text(lane) : "under way");
    return true;
}

enum { DP__LINE_ROOM = DP__WORDS_BYTES + 64 };

DP_API size_t dp_recent_collectives(const dp_ctx *ctx, char *text, size_t bytes)
{
    char line[DP__LINE_ROOM];
    size_t used = 0;
    if (text != NULL && bytes > 0)
        text[0] = '\0';
    if (dp__check_open(__func__, ctx) != DP_OK)
        return 0;
    for (int i = 0; i < DP__LANES; i++)
        for (unsigned age = 0; dp__journal_line(&ctx->lanes[i], age, line, sizeof line); age++)
            used = dp__append(text, text != NULL ? bytes : 0, used, "%s\n", line);
    return used;
}

static void dp__journal_log(const dp_ctx *ctx)
{
    char line[DP__LINE_ROOM];
    if (ctx->world.job == NULL || !dp__log_wants(ctx, DP_LOG_ERROR))
        return;
    dp__log(ctx, DP_LOG_ERROR, "the job failed: %s", ctx->failed_text);
    for (int i = 0; i < DP__LANES; i++)
        for (unsigned age = 0; dp__journal_line(&ctx->lanes[i], age, line, sizeof line); age++)
            dp__log(ctx, DP_LOG_ERROR, "%s", line);
}

/* Lists what is under way, the courier's first, or the caller's last. */
static void dp__journal_here(const dp_ctx *ctx, char *text, size_t bytes)
{
    text[0] = '\0';
    for (int i = DP__LANES - 1; i >= 0; i--) {
        dp__entry entry;
        const dp__journal *journal = ctx->lanes[i].journal;
        bool some = journal != NULL && dp__journal_entry(journal, 0, &entry);
        if (some && (i == DP__CALLER || !dp__journal_ended(journal, &entry))) {
            dp__journal_line(&ctx->lanes[i], 0, text, bytes);
            return;
        }
    }
}

static const dp__failing dp__failing_job = {dp__journal_here, dp__journal_log, dp__job_say,
                                            dp__job_tell};

/* ==== >>lateness ===============================================================================
   Puts into words which process comes last, where a table compares what all begin.              */

/* "rank 3 (process 3, pid 42) comes last: all others waited for it, in 60 of ..." */
DP__COLD static void dp__late_warn(const dp__job *job, const dp__late_verdict *verdict)
{
    char who[DP__WHO_BYTES], text[DP__LATE_TEXT];
    dp__log(job->ctx, DP_LOG_WARN, "%s%s", dp__who(job, verdict->process, who),
            dp__late_say(verdict, text));
}

/* Judges a window. Process 0 says who comes last, once, and again when that changes. */
DP__COLD static void dp__journal_judge(dp__journal *journal)
{
    dp__job *job = journal->job;
    dp__late_verdict verdict;
    if (!dp__late_judge(&journal->arrivals, dp__os_now_ns(), &verdict))
        return;
    dp__lock_enter(&job->ctx->lock);
    journal->arrivals.verdict = verdict;
    bool news = verdict.process >= 0 && verdict.process != job->named;
    job->named = news ? verdict.process : job->named;
    dp__lock_leave(&job->ctx->lock);
    if (news && job->process == 0)
        dp__late_warn(job, &verdict);
}

/* Shows in the timeline that this thread waits for a process to begin the same. -1: it is not known
   for which. */
static void dp__journal_trace(const dp__journal *journal, int process, char phase)
{
    char name[32] = "waits for others";
    if (!dp__trace_is_on())
        return;
    if (process >= 0)
        snprintf(name, sizeof name, "waits for rank %d", journal->job->firsts[process]);
    if (phase == 'B')
        dp_trace_begin(name);
    else
        dp_trace_end();
}

/* Notes that all have begun the collective that is under way, and told about the one before. */
static void dp__journal_met(dp__journal *journal)
{
    const dp__late *late = &journal->arrivals;
    dp__lane_progress *own = dp__own_lane_progress(journal);
    bool judges = dp__late_count(&journal->arrivals);
    atomic_store_explicit(&own->late, late->times, memory_order_relaxed);
    atomic_store_explicit(&own->late_ns,
                          atomic_load_explicit(&late->by_others_ns, memory_order_relaxed),
                          memory_order_relaxed);
    atomic_store_explicit(&own->waited_ns,
                          atomic_load_explicit(&late->for_others_ns, memory_order_relaxed),
                          memory_order_relaxed);
    if (judges)
        dp__journal_judge(journal);
}

static uint64_t dp__journal_waited_ns(const dp__lane *lane)
{
    const dp__journal *journal = lane->journal;
    if (journal == NULL)
        return 0;
    return journal->arrivals.waited_ns +
           atomic_load_explicit(&journal->arrivals.for_others_ns, memory_order_relaxed);
}

/* Adds what a lane knows; the lane that says more names the rank. */
static void dp__late_info_add(const dp__job *job, const dp__late *late, dp_late_info *out)
{
    const dp__late_verdict *verdict = &late->verdict;
    double late_s = verdict->last > 0 ? (double)verdict->ns * 1e-9 / verdict->last : 0;
    double longest_s = (double)atomic_load_explicit(&late->longest_ns, memory_order_relaxed) * 1e-9;
    int longest = atomic_load_explicit(&late->longest, memory_order_relaxed);
    out->for_others_s += (double)atomic_load_explicit(&late->for_others_ns, memory_order_relaxed) *
                         1e-9;
    out->by_others_s += (double)atomic_load_explicit(&late->by_others_ns, memory_order_relaxed) *
                        1e-9;
    if (longest >= 0 && longest_s > out->longest_s) {
        out->longest_s = longest_s;
        out->longest_rank = job->firsts[longest];
    }
    if (verdict->process < 0 || late_s * verdict->last <= out->late_s * out->last)
        return;
    out->rank = job->firsts[verdict->process];
    dp__late_info(verdict, out);
}

static void dp__job_late(const dp_ctx *ctx, dp_late_info *out)
{
    dp__job *job = ctx->world.job;
    if (job == NULL)
        return;
    dp__lock_enter(&job->ctx->lock);
    for (int i = 0; i < DP__LANES; i++)
        dp__late_info_add(job, &job->journals[i].arrivals, out);
    dp__lock_leave(&job->ctx->lock);
}

/* ==== >>opening ================================================================================
   From a bootstrap to a job. Every step is agreed upon by all processes, including those that
   failed in it, so that all fail together.                                                      */

/* The last sentence as others are told it: they know which function is under way. */
static const char *dp__open_error(void)
{
    return dp__unnamed("dp_open", dp_last_error());
}

/* Returns one of those that have failed by themselves, or else the first; -1: none has. */
static int dp__job_failed_first(const dp__job *job)
{
    int failed = -1;
    for (int p = job->process_count - 1; p >= 0; p--) {
        bool better = failed < 0 || job->introductions[p].status != DP_ERR_REMOTE ||
                      job->introductions[failed].status == DP_ERR_REMOTE;
        failed = job->introductions[p].status != DP_OK && better ? p : failed;
    }
    return failed;
}

static dp_status dp__job_agree(dp__job *job, dp_status own)
{
    dp__introduction *introduction = &job->introduction;
    introduction->status = (int32_t)own;
    snprintf(introduction->text, sizeof introduction->text, "%.199s",
             own != DP_OK ? dp__open_error() : "");
    dp_status status =
        job->gather(job->boot, introduction, job->introductions, sizeof *introduction);
    if (own != DP_OK && (own != DP_ERR_REMOTE || status != DP_OK))
        return dp_error(own, "%s", introduction->text);
    DP_TRY(status);
    int failed = dp__job_failed_first(job);
    if (failed < 0)
        return DP_OK;
    return failed == job->process ? dp_error(own, "%s", introduction->text)
                                  : dp_error(DP_ERR_REMOTE, "process %d: %.199s", failed,
                                             job->introductions[failed].text);
}

typedef struct dp__area { /* memory that some processes share */
    int maker;            /* makes it, the others open it */
    size_t bytes;
    size_t head;        /* of all: the maker reserves it */
    size_t first, each; /* a process reserves `each` from `first` on, so that this is near it */
} dp__area;

static dp_status dp__area_enter(dp__job *job, const dp__area *area, bool named, bool made,
                                dp__shared *out)
{
    bool maker = job->process == area->maker;
    if (!made && maker)
        DP_TRY(dp__os_shared_make(named, area->bytes, out, &job->introduction.name));
    if (!made)
        return maker ? dp__os_shared_reserve(out, 0, area->head) : DP_OK;
    if (!maker)
        DP_TRY(dp__os_shared_find(&job->introductions[area->maker].name, area->bytes, out));
    DP_TRY(dp__os_shared_hold(out, job->process));
    return dp__os_shared_reserve(out, area->first, area->each);
}

/* One way to get it. */
static dp_status dp__area_try(dp__job *job, const dp__area *area, bool named, dp__shared *out)
{
    job->introduction.name = (dp__shared_name){.fd = -1};
    dp_status status = dp__job_agree(job, dp__area_enter(job, area, named, false, out));
    if (status == DP_OK)
        status = dp__job_agree(job, dp__area_enter(job, area, named, true, out));
    if (job->introduction.name.path[0] != '\0')
        dp__os_shared_unlink(job->introduction.name.path);
    if (status != DP_OK)
        dp__os_shared_close(out);
    return status;
}

static dp_status dp__area_open(dp__job *job, const dp__area *area, dp__shared *out)
{
    *out = (dp__shared){.fd = -1};
    dp_status status = dp__area_try(job, area, false, out);
    if (status == DP_OK)
        return DP_OK;
    dp__log(job->ctx, DP_LOG_INFO, "%s", dp_last_error());
    return dp__area_try(job, area, true, out);
}

/* Before the others know it. */
static dp_status dp__job_make(dp_ctx *ctx, const dp_bootstrap *boot, dp__gather_fn *gather,
                              dp__job **out)
{
    size_t count = (size_t)boot->process_count;
    size_t numbers = (3 * count + 1) * sizeof(int);
    size_t late_bytes = dp__late_bytes(count);
    dp__job *job = dp__host_alloc(&ctx->host, sizeof *job, 64);
    int *firsts = dp__host_alloc(&ctx->host, numbers, sizeof(int));
    dp__introduction *introductions =
        dp__host_alloc(&ctx->host, count * sizeof *introductions, _Alignof(dp__introduction));
    char *arrivals = dp__host_alloc(&ctx->host, DP__LANES * late_bytes, 8);
    if (job == NULL || firsts == NULL || introductions == NULL || arrivals == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %zu processes", count);
    memset(job, 0, sizeof *job);
    memset(firsts, 0, numbers);
    job->ctx = ctx;
    job->boot = boot;
    job->gather = gather;
    job->introductions = introductions;
    job->introduction.machine = dp__os_machine();
    dp__os_host_name(job->introduction.host, sizeof job->introduction.host);
    dp__os_cores_of(0, &job->introduction.cores);
    job->process = boot->process;
    job->process_count = boot->process_count;
    job->timeout_ms = ctx->config.timeout_ms;
    job->look_ns = DP__LOOK_NS;
    dp__lock_init(&job->lock);
    job->firsts = firsts;
    job->ids = firsts + count + 1;
    job->twins = job->ids + count;
    job->shared.fd = job->near.fd = job->own.fd = -1;
    job->named = -1;
    job->arrivals = arrivals;
    for (int i = 0; i < DP__LANES; i++) {
        job->journals[i].job = job;
        job->journals[i].place = i;
        dp__late_open(&job->journals[i].arrivals, job->process, (int)count,
                      arrivals + (size_t)i * late_bytes);
    }
    *out = job;
    return DP_OK;
}

typedef struct dp__system_process { /* a process of a system */
    uint64_t machine;               /* on another one the same id may be another's */
    int id, process;
} dp__system_process;

static int dp__system_process_order(const void *a, const void *b)
{
    const dp__system_process *x = a, *y = b;
    if (x->machine != y->machine)
        return x->machine < y->machine ? -1 : 1;
    return x->id != y->id ? (x->id < y->id ? -1 : 1) : x->process - y->process;
}

/* Contexts of one process of a system become twins: a ring, in order. */
static void dp__job_twins(dp__job *job, dp__system_process *bodies)
{
    int count = job->process_count;
    qsort(bodies, (size_t)count, sizeof *bodies, dp__system_process_order);
    for (int i = 0, first = 0; i < count; i++) {
        bool more = i + 1 < count && bodies[i + 1].machine == bodies[i].machine &&
                    bodies[i + 1].id == bodies[i].id;
        job->ids[bodies[i].process] = bodies[i].id;
        job->twins[bodies[i].process] = bodies[more ? i + 1 : first].process;
        first = more ? first : i + 1;
    }
}

/* Lays out a heap of so many processes, behind so many bytes. A part is as large as the machine's
   memory, since only what is used of it takes any. */
static dp__heap dp__heap_behind(const dp__shared *shared, int process, int count, size_t bytes)
{
    const size_t most = (size_t)1 << (sizeof(size_t) > 4 ? 44 : 28);
    size_t each = most / (size_t)count, memory = dp__os_memory_bytes();
    return (dp__heap){.shared = shared,
                      .first = dp__align_up(bytes, DP__SHARED_PAGE),
                      .each = (each < memory ? each : memory) / DP__SHARED_PAGE * DP__SHARED_PAGE,
                      .process = process};
}

/* A board, and behind it what each process writes: its entries, and so many bytes of lines. */
static dp__area dp__board_area(dp__job *job, size_t lines)
{
    size_t head = dp__board_bytes(job->process_count), count = (size_t)job->process_count;
    job->each = (size_t)DP__LANES * DP__KEPT * sizeof(dp__entry) + lines;
    return (dp__area){.bytes = head + count * job->each,
                      .head = head,
                      .first = head + (size_t)job->process * job->each,
                      .each = job->each};
}

typedef struct dp__outbox_sizes { /* of each process: multiples of two lines of a cache */
    size_t with_heap, alone;
} dp__outbox_sizes;

/* Behind it the heap, if there may be such a large file. */
static dp_status dp__board_share(dp__job *job, const dp__outbox_sizes *lines)
{
    size_t count = (size_t)job->process_count;
    dp__area area = dp__board_area(job, lines->with_heap);
    const dp__heap heap =
        dp__heap_behind(&job->shared, job->process, job->process_count, area.bytes);
    area.bytes = heap.first + count * heap.each;
    if (dp__area_try(job, &area, false, &job->shared) == DP_OK) {
        dp__os_shared_dump(&job->shared, heap.first, count * heap.each, false);
        job->ctx->world.heap = heap;
    } else {
        dp__log(job->ctx, DP_LOG_INFO, "gradients are not in shared memory: %s", dp_last_error());
        area = dp__board_area(job, lines->alone);
        DP_TRY(dp__area_open(job, &area, &job->shared));
    }
    job->board = job->shared.data;
    return DP_OK;
}

/* Makes a board that this process has for itself: as a file in memory, if it can, so that those
   outside see it. */
DP__COLD static dp__board *dp__own_board(dp__job *job)
{
    dp__shared_name name;
    size_t entries = (size_t)(DP__LANES * (DP__KEPT + job->process_count));
    size_t bytes = dp__board_bytes(job->process_count) + entries * sizeof(dp__entry);
    if (dp__os_shared_make(false, bytes, &job->own, &name) == DP_OK &&
        dp__os_shared_reserve(&job->own, 0, bytes) == DP_OK)
        return job->own.data;
    dp__log(job->ctx, DP_LOG_INFO, "no other program sees what this process does: %s",
            dp_last_error());
    dp__os_shared_close(&job->own);
    dp__board *board = dp__host_alloc(&job->ctx->host, bytes, 128);
    return board != NULL ? memset(board, 0, bytes) : NULL;
}

/* Shows those outside, and other processes, what this one is in, on the board that it has. */
static void dp__job_show(dp__job *job)
{
    dp__board_show(job);
    job->ctx->world.activity = &dp__progress_of(job, job->process)->activity;
    dp__figures_begin(job->ctx, dp__progress_of(job, job->process)->figures);
}

/* Opens the board: one that all see, or one of its own, where failures are noticed later. */
static dp_status dp__job_board_open(dp__job *job, bool one_machine, const dp__outbox_sizes *lines,
                                    const dp__progress_carrier *carrier)
{
    bool seen = one_machine && dp__board_share(job, lines) == DP_OK;
    if (one_machine && !seen) {
        snprintf(job->why, sizeof job->why, "%.199s", dp_last_error());
        dp__log(job->ctx, DP_LOG_INFO, "processes do not see what others do: %s", job->why);
    }
    job->carrier = carrier;
    if (seen)
        job->look_ns = dp__look_ns(job->process_count, job->ctx->cores);
    else
        job->board = dp__own_board(job);
    if (job->board != NULL)
        atomic_store(&dp__progress_of(job, job->process)->presence, DP__INSIDE);
    dp_status status = dp__job_agree(
        job,
        job->board != NULL ? DP_OK : dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for a job"));
    if (status != DP_OK) {
        dp__os_shared_close(&job->shared);
        dp__os_shared_close(&job->own);
        return status;
    }
    job->ctx->world.job = job;
    dp__job_show(job);
    for (int i = 0; i < DP__LANES; i++)
        job->ctx->lanes[i].journal = &job->journals[i];
    job->ctx->host.aborted = dp__job_aborted;
    return DP_OK;
}

/* Others may still read what this process has begun: the memory is theirs too. A child of fork has
   it from its parent. */
static void dp__job_close(dp__job *job)
{
    if (job == NULL)
        return;
    dp__os_shared_close(&job->shared);
    dp__os_shared_close(&job->near);
    dp__os_shared_close(&job->own);
}

/* Nobody uses it any more. */
static void dp__job_free(dp__job *job)
{
    if (job == NULL)
        return;
    const dp_host *host = &job->ctx->host;
    if (job->shared.data == NULL && job->own.data == NULL)
        dp__host_free(host, job->board);
    dp__job_close(job);
    dp__host_free(host, job->introductions);
    dp__host_free(host, job->firsts);
    dp__host_free(host, job->arrivals);
    dp__host_free(host, job);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
