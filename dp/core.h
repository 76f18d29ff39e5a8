/* dp/core.h - v0.2.0 - what everything stands on - MIT licence

   Part of dp.h, which includes it. All private structs, the log, the timeline, memory
   that goes with scopes, and the work on tensors.

   CONTENTS (search for the tag)
     >>platform  headers, poison
     >>state     all private structs
     >>trace     what threads and streams did, for $DP_TRACE
     >>errors    live contexts, the failure of a job
     >>frames    which of the user's functions a thread is inside
     >>log       records
     >>host      what a backend is lent
     >>poison    memory that nobody may use
     >>pool      blocks that are kept and reused
     >>scopes    lifetimes on top of the pools
     >>checks    what a user passes in
     >>views     shapes and strides
     >>kernels   on a device, or by the host for it
     >>copy      any strides, any two devices
     >>chains    from one device to several others
     >>operands  what may be read and written together
     >>compute   copy, fill, cast, axpby, statistics, read
     >>names     where each of many names is
*/

#ifndef DP__ROOMS
#error "dp/core.h is a part of dp.h: include dp.h"
#else

/* ==== >>platform ===============================================================================
   Headers, and the few macros. What follows makes no system call.                                */

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DP_ASSERT /* for bugs of dp.h itself, never for what a user passes in */
#include <assert.h>
#define DP_ASSERT(condition) assert(condition)
#endif

/* Memory that nobody uses is poisoned under AddressSanitizer. */
#if defined(__SANITIZE_ADDRESS__)
#define DP__ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DP__ASAN
#endif
#endif
#ifdef DP__ASAN /* DP__UNCHECKED: functions that read freed memory to detect a stale handle */
#define DP__UNCHECKED __attribute__((no_sanitize("address")))
enum { DP__RED_ZONE_BYTES = 16 };
void __asan_poison_memory_region(void const volatile *data, size_t bytes);
void __asan_unpoison_memory_region(void const volatile *data, size_t bytes);
static void dp__poison(const void *data, size_t bytes)
{
    __asan_poison_memory_region(data, bytes);
}
static void dp__unpoison(const void *data, size_t bytes)
{
    __asan_unpoison_memory_region(data, bytes);
}
#else
#define DP__UNCHECKED
enum { DP__RED_ZONE_BYTES = 0 };
static void dp__poison(const void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
}
static void dp__unpoison(const void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
}
#endif

/* ==== >>state ==================================================================================
   All private structs. A context owns devices, pools, scopes; a scope owns blocks.              */

enum {
    DP__WORDS_BYTES = 256, /* what a collective is, in words */
    DP__LIVE_MAX = 1024,   /* contexts that may be open at the same time */
    DP__CLASS_COUNT = 320,
    DP__CHUNK_BYTES = 32 << 10,     /* from which a scope cuts small things */
    DP__SMALL_BYTES = 4 << 10,      /* larger things get a block of their own */
    DP__PACKED_RUN_BYTES = 4 << 10, /* shorter runs are packed by a device that can */
    DP__CHAIN_PIECE = 512 << 10,    /* what devices pass on is cut into: pieces of at least this, */
    DP__CHAIN_PIECES = 32,          /* at most so many */
    DP__COALESCE_BYTES = 10 << 20,
    DP__STAGE_BYTES = 1 << 20,  /* in which collectives go through the host */
    DP__OPERANDS_MAX = 1 << 20, /* of a REDUCE */
    DP__TIMEOUT_MS = 60000
};

#define DP__SCOPE_LIVE   0x5c09e0dbu /* dp_scope.magic */
#define DP__SCOPE_ENDING 0x5c09e0deu

typedef struct dp__tracked { /* in front of what dp_host.alloc gives */
    struct dp__tracked *prev, *next;
    size_t bytes, offset; /* of the whole; of the user's part */
} dp__tracked;

typedef struct dp__block {                /* memory of a pool, in a scope or in a free list */
    struct dp__block *next, *made_before; /* made_before: the context's list of all blocks */
    struct dp__pool *pool;
    void *data;
    size_t bytes; /* capacity: the size of its class */
    size_t given; /* bytes that somebody may use; with poison a fence is behind them */
    int class_;
    bool everybodys; /* other processes have it too: see dp__sharing */
    bool kept;       /* somebody may still read or write it: it is never freed */
} dp__block;

typedef enum dp__source { /* of a pool's memory */
                          DP__FROM_ALLOCATOR,
                          DP__FROM_HEAP,  /* the context's */
                          DP__FROM_PAGES, /* which only this process has */
                          DP__FROM_DEVICE,
                          DP__FROM_HOST_ALLOC /* of the device */
} dp__source;

typedef struct dp__pool {
    dp__source source;
    struct dp__device *device; /* of the last two sources */
    dp__block *free[DP__CLASS_COUNT];
} dp__pool;

typedef struct dp__heap { /* memory that all processes of the machine see: each gives out a part */
    const dp__shared *shared;    /* NULL: there is none */
    size_t first, each;          /* bytes before the parts, and of each */
    int process;                 /* the own one, which has the own part */
    size_t used;                 /* of it; under the context's lock */
    struct dp__heap_room *rooms; /* those that this process has made */
} dp__heap;

typedef struct dp__reads {      /* copies that read host memory, on the streams of one kind */
    dp_event *done;             /* after the last of them */
    const dp_stream *stream;    /* on which that is */
    atomic_uint marked, waited; /* how often it was recorded; up to which record was waited */
} dp__reads;

typedef struct dp__device {
    dp_dev *dev;
    dp_device id;
    int local_rank; /* -1: the host */
    dp_device_info info;
    dp_stream *stream, *own_stream; /* in use; made by the core */
    dp_event *done;                 /* orders another stream after this one */
    dp__reads reads[2];             /* on the compute stream; on others */
    dp__pool pool;
} dp__device;

typedef struct dp__deferred {
    struct dp__deferred *next;
    void (*fn)(void *user);
    void *user;
} dp__deferred;

enum { /* dp__pass_head.kind */
       DP__PASS_PLAIN = 1,
       DP__PASS_SPREAD = 2, /* parts of it lie in the scope's replicas */
       DP__PASS_INNER = 4,  /* it is part of another pass, which may lie in the scope around */
       DP__PASS_ANY = 7
};

typedef struct dp__pass_head { /* what a scope knows about a pass */
    uint32_t magic;
    unsigned kind;
    struct dp__pass_head *next;
} dp__pass_head;

struct dp_scope {
    uint32_t magic;
    dp_ctx *ctx;
    dp_scope *parent, *first_child, *prev, *next; /* next: of the free list too */
    dp__block *home;                              /* its first chunk, which it keeps when idle */
    dp__block *blocks;                            /* others, chunks among them, the newest first */
    char *cursor, *limit;                         /* of the newest chunk */
    dp_scope *made_before;                        /* the context's list of all scopes */
    dp__deferred *deferred;
    dp_scope **replicas;   /* one child per local rank, made by the first dp_run */
    dp__pass_head *passes; /* that lie in it */
    bool lost;             /* a call that the job's failure ended has left it */
};

/* Figures of a process, for those outside of it. A step is one that has ended; what it takes is a
   mean in which the last ones count most. */
typedef enum dp__figure {
    DP__OPENED_NS,
    DP__RECOVERIES,
    DP__STEPS,
    DP__STEPPED_NS, /* when the last one ended */
    DP__STEP_NS,
    DP__FIGURES
} dp__figure;

typedef struct dp__slot { /* of one local rank under dp_run */
    dp__activity activity;
    dp_status status;
    bool behind; /* it has failed because another one did */
    char text[DP__TEXT_BYTES];
} dp__slot;

/* What rooms above do when a call or the job fails: the front door hands it in. */
typedef struct dp__failing {
    /* What this process has begun, for the sentence, and for the log. */
    void (*here)(const dp_ctx *ctx, char *text, size_t bytes);
    void (*log)(const dp_ctx *ctx);
    void (*say)(dp_ctx *ctx, const char *text); /* a call has failed, and the job has not */
    void (*tell)(dp_ctx *ctx); /* to other processes, why the job has failed here */
} dp__failing;

typedef struct dp__lane_rank { /* a local rank on a lane that has a thread */
    dp_stream *stream;
    dp_event *reported; /* what the stream has to come after; NULL: its work is done when a call
                           returns, as the host reaches the memory */
    dp_stream *last;    /* on which the rank has reported; it comes after those before */
} dp__lane_rank;

typedef struct dp__lane { /* where collectives travel: a communicator, for one thread at a time */
    dp_ctx *ctx;
    dp_comm *comm;               /* NULL: nothing travels here */
    dp_comm *carrier;            /* the same, or what carries for it: see >>staging */
    struct dp__journal *journal; /* what was begun lately, with several processes; else NULL */
    dp_part *parts;              /* local ranks, streams filled in */
    dp__lane_rank *ranks;        /* local ranks; NULL: they travel on their compute streams */
    dp__courier *courier;        /* its thread, started by the first reducer; NULL: the caller's */
    dp__activity activity;       /* of the courier */
    atomic_bool carrying;        /* a thread does: the courier, or the one that waits for it */
    dp_reducer *riding; /* passes to reduce, the oldest first; under the context's lock, as is
                               all state of a pass */
} dp__lane;

/* The courier's collectives must not mix with those of the user's threads. */
enum { DP__CALLER, DP__COURIER, DP__LANES };

enum { DP__TAG_BYTES = 40, DP__TAG_WORDS = DP__TAG_BYTES / sizeof(uint64_t) };

typedef struct dp__threads dp__threads; /* see dp/threads.h */

/* Holds what a context has of its job: all zero if it has one process, but for messages. A recovery
   makes another one, and a group has one of its own. */
typedef struct dp__world {
    struct dp__job *job;
    struct dp__job *shown;     /* of one that is alone: what those outside see; or NULL */
    dp__activity *activity;    /* of the first device, where other processes see it; or NULL */
    _Atomic uint64_t *figures; /* the context's, where they are seen; or NULL */
    dp__heap heap;
    dp__heap near; /* for what this machine's processes share, where the job has several machines */
    int sharings;  /* how many wrappers share their parameters with other processes */
    int edits;     /* of parameters that are shared: how many are open */
    dp_part *wires;                  /* room for what processes tell each other */
    size_t wire_bytes;               /* on each device */
    dp_scope *wires_scope;           /* where they lie */
    struct dp__tree *tree;           /* to the others, where a launcher named them; else NULL */
    struct dp__mpi_links *mpi_links; /* the same, where MPI has brought them together */
    struct dp__mailbox *mailbox;     /* messages; NULL before the first one */
    struct dp__port *port;           /* where others connect; NULL: memory or MPI carries all */
    struct dp__voter *voter;       /* with which those that are left agree who they are; or NULL */
    struct dp__watchdog *watchdog; /* looks while this process does not; or NULL */
} dp__world;

typedef struct dp__apart { /* see dp/checks.h */
    uint64_t exchanges;    /* dp__exchanges, when the last backward ended, */
    uint64_t forward;      /* and which forward that was of; 0: there was none yet */
    unsigned updates;      /* since the last exchange */
    bool said;
} dp__apart;

enum { DP__SENTENCE_BYTES = 256 };

typedef struct dp__checks { /* see dp/checks.h */
    unsigned every;         /* the first step and each of so many are checked; 0: none is */
    bool warns;             /* what is found is logged, and no error */
    char damage[DP__SENTENCE_BYTES]; /* the first that is known of, under the lock; "": none */
} dp__checks;

struct dp_ctx {
    dp_host host; /* first: a backend's dp_host is the context's head */
    const dp__failing *failing;
    dp_config config;
    dp_info info;
    unsigned fork_count;
    int cores;    /* that this process might use before its threads were bound to some */
    bool limited; /* by a quota, to fewer than its mask has */
    bool traced;
    dp__lock lock; /* pools, scope lists, tracked blocks, failure */
    dp__tracked *tracked;
    dp__device host_device; /* the CPU table; also does what other devices cannot */
    dp__device *devices;    /* stb_ds array, reserved once */
    dp__pool host_pool, pinned_pool, shared_pool, page_pool;
    dp__team *team;        /* NULL in a world of one device */
    struct dp__meet *meet; /* where its threads come together: see dp/meet.h */
    dp__os_bound bound;    /* the thread that opened this, where it keeps to some nodes */
    dp__threads *threads;  /* libraries that are told how many; NULL: none */
    bool threads_sought;   /* they have been looked for */
    dp__slot *slots;
    dp__lane lanes[DP__LANES];
    _Atomic uint64_t spent_ns[DP__LATE_PARTS]; /* in passes: see dp/late.h */
    dp__late_devices *late; /* NULL: there is one device, or they take turns on fewer cores */
    atomic_uint tags;       /* how often dp_tag was called */
    _Atomic uint64_t tag[DP__TAG_WORDS]; /* the last one, word by word: see dp/job.h */
    dp_dev **commed;     /* the devices that lanes were opened for, and as often the host's */
    dp__world world;     /* the other processes */
    dp__lock world_lock; /* of the ways to them, while the context is open */
    dp_scope *scopes;    /* live ones without a parent */
    dp_scope *idle;      /* ended ones */
    dp_scope *lost;      /* ended after the job had failed: see dp/recover.h */
    dp_scope *all_scopes;
    dp__block *all_blocks;
    dp_module *idle_modules;       /* destroyed, to be reused */
    dp_module *over_ranks;         /* wrappers by dp_distributed, the oldest first */
    uint32_t wrappers;             /* how many dp_distributed has made: their numbers */
    uint32_t reducers;             /* the same of reducers that all processes have made */
    atomic_ullong forwards;        /* with a pass, that have returned */
    atomic_ullong written;         /* how many of them had, at the last edit of a parameter */
    atomic_ullong torn;            /* how many backwards have failed */
    uint64_t figures[DP__FIGURES]; /* that outlive a recovery */
    dp__apart apart;               /* backwards whose gradients stay in this process */
    dp__checks checks;
    atomic_bool entered; /* a dp_run, a collective or a pass of several replicas is under way */
    atomic_int inside;   /* threads in the user's functions, except those under `entered` */
    atomic_int failed;   /* a dp_status of the JOB class, or DP_OK */
    atomic_bool told;    /* and the program knows: see dp/watchdog.h */
    atomic_int relayed;  /* the device that is shown in place of the first one; 0: none is */
    int failed_rank;
    char failed_text[DP__TEXT_BYTES];
    char failed_here[DP__WORDS_BYTES];
};
_Static_assert(offsetof(struct dp_ctx, host) == 0, "dp_host is the head of a context");

/* ==== >>trace ==================================================================================
   $DP_TRACE: a line for each beginning and each end, of what threads and streams do. All of it
   belongs to the process, as threads and files do: contexts that are opened with it share it. The
   processes of a machine append whole lines to one file, which the first of them makes anew before
   they meet. A child of fork begins anew.                                                       */

enum {
    DP__TRACE_BYTES = 1 << 16, /* written at once */
    DP__TRACE_LINE = 512,      /* of a line, at most */
    DP__TRACE_NAME = 240,      /* of a name in it, with what is escaped */
    DP__TRACE_OLD = 250000000, /* nanoseconds after which a line is written with the next one */
    /* Rows are numbered from here on: the streams of each lane, then threads, of which there may be
       any number. */
    DP__TRACE_STREAMS = 1,
    DP__TRACE_LANE = 10000,
    DP__TRACE_THREADS = DP__LANES * DP__TRACE_LANE
};

typedef struct dp__mark { /* what is to be written when a stream gets there */
    struct dp__mark *next;
    int row;
    char phase;
    char name[];
} dp__mark;

static struct {
    dp__lock lock; /* of all that follows; nobody waits under it */
    atomic_bool on;
    unsigned fork_count; /* of the process that opened it */
    int contexts;        /* that use the file */
    int file;            /* -1: none */
    unsigned files;      /* opened so far: each has to be told what a row is */
    char *path;          /* of the last one */
    int process, threads;
    uint64_t start;   /* of time: when process 0 opened, by this machine's steady clock */
    uint64_t written; /* when */
    char *bytes;      /* to be written */
    size_t used;
    dp__mark *marks;                /* never freed: a graph may hold them */
    void (*push)(const char *name); /* a profiler that listens, or NULL */
    void (*pop)(void);
} dp__trace = {.lock = DP__LOCK_INITIALIZER, .file = -1};

static _Thread_local struct {
    char who[24]; /* "device 1", or "": a thread of the user's */
    int place;    /* where it is shown, from the top */
    int row;
    unsigned files;
} dp__traced;

static bool dp__trace_is_on(void)
{
    return atomic_load_explicit(&dp__trace.on, memory_order_relaxed);
}

static void dp__trace_off(void)
{
    dp__os_drop(&dp__trace.file);
    dp__os_free(dp__trace.bytes, DP__TRACE_BYTES, NULL);
    dp__trace.bytes = NULL;
    dp__trace.used = 0;
    atomic_store_explicit(&dp__trace.on, dp__trace.push != NULL, memory_order_relaxed);
}

/* When the disk is full, nothing more is written. */
static void dp__trace_write(void)
{
    bool done = dp__trace.used == 0 ||
                dp__os_file_put(dp__trace.file, dp__trace.bytes, dp__trace.used);
    dp__trace.used = 0;
    dp__trace.written = dp__os_now_ns();
    if (!done)
        dp__trace_off();
}

static void dp__trace_flush(void)
{
    dp__lock_enter(&dp__trace.lock);
    if (dp__trace.file >= 0)
        dp__trace_write();
    dp__lock_leave(&dp__trace.lock);
}

DP_PRINTF(1, 2) static void dp__trace_line(const char *format, ...)
{
    va_list args;
    if (dp__trace.used + DP__TRACE_LINE > DP__TRACE_BYTES)
        dp__trace_write();
    if (dp__trace.file < 0)
        return;
    va_start(args, format);
    int bytes = vsnprintf(dp__trace.bytes + dp__trace.used, DP__TRACE_LINE, format, args);
    va_end(args);
    dp__trace.used += (size_t)bytes;
}

#define DP__TRACE_META "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":"

static void dp__trace_row(int row, int place, const char *who)
{
    dp__trace_line("," DP__TRACE_META "\"thread_name\",\"args\":{\"name\":\"%s\"}}\n",
                   dp__trace.process, row, who);
    dp__trace_line("," DP__TRACE_META "\"thread_sort_index\",\"args\":{\"sort_index\":%d}}\n",
                   dp__trace.process, row, place);
}

/* Who this thread is, if it has not said so before. */
DP_PRINTF(2, 3) static void dp__trace_who(int place, const char *format, ...)
{
    va_list args;
    if (dp__traced.who[0] != '\0')
        return;
    va_start(args, format);
    vsnprintf(dp__traced.who, sizeof dp__traced.who, format, args);
    va_end(args);
    dp__traced.place = place;
}

static int dp__trace_thread(void)
{
    if (dp__traced.row != 0 && dp__traced.files == dp__trace.files)
        return dp__traced.row;
    dp__traced.files = dp__trace.files;
    dp__traced.row = DP__TRACE_THREADS + dp__trace.threads++;
    dp__trace_who(2 * DP__TRACE_THREADS, "thread %d", dp__trace.threads);
    dp__trace_row(dp__traced.row, dp__traced.place, dp__traced.who);
    return dp__traced.row;
}

/* None: too long for what it says, half of a surrogate pair, too large, or cut short. */
DP_API size_t dp_utf8_bytes(const char *text)
{
    const unsigned char *at = (const unsigned char *)(text != NULL ? text : "\xff");
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t count = *at < 0x80 ? 1 : *at >= 0xF0 ? 4 : *at >= 0xE0 ? 3 : *at >= 0xC0 ? 2 : 0;
    uint32_t code = count > 1 ? *at & (0x7FU >> count) : *at;
    for (size_t i = 1; i < count; i++) {
        if ((at[i] & 0xC0) != 0x80)
            return 0;
        code = code << 6 | (at[i] & 0x3F);
    }
    bool half = code >= 0xD800 && code < 0xE000;
    return *at < 0xF8 && code >= least[count] && !half && code <= 0x10FFFF ? count : 0;
}

DP_API bool dp_is_utf8(const char *text)
{
    size_t count = dp_utf8_bytes(text);
    while (count > 0 && *text != '\0')
        count = dp_utf8_bytes(text += count);
    return count > 0;
}

/* As the inside of a JSON string, cut where there is no room. */
static const char *dp__trace_name(const char *text, char *out)
{
    size_t used = 0;
    while (*text != '\0' && used + sizeof "\\u0000" <= DP__TRACE_NAME) {
        size_t count = dp_utf8_bytes(text);
        bool plain = count > 0 && (unsigned char)*text >= ' ' && *text != '"' && *text != '\\';
        if (plain)
            memcpy(out + used, text, count);
        else
            snprintf(out + used, sizeof "\\u0000", "\\u%04x", (unsigned)(unsigned char)*text);
        used += plain ? count : strlen("\\u0000");
        text += plain ? count : 1;
    }
    out[used] = '\0';
    return out;
}

/* An end (E) has no name. In row 0: in this thread's. Under the lock. */
static void dp__trace_event(int row, char phase, const char *name)
{
    char text[DP__TRACE_NAME];
    uint64_t now = dp__os_now_ns(), at = now > dp__trace.start ? now - dp__trace.start : 0;
    if (dp__trace.file < 0)
        return;
    row = row != 0 ? row : dp__trace_thread();
    dp__trace_line(",{\"ph\":\"%c\",\"pid\":%d,\"tid\":%d,\"ts\":%llu.%03u%s%s%s}\n", phase,
                   dp__trace.process, row, (unsigned long long)(at / 1000), (unsigned)(at % 1000),
                   *name != '\0' ? ",\"name\":\"" : "", dp__trace_name(name, text),
                   *name != '\0' ? "\"" : "");
    if (now > dp__trace.written + DP__TRACE_OLD && dp__trace.file >= 0)
        dp__trace_write();
}

DP_API void dp_trace_begin(const char *name)
{
    if (!dp__trace_is_on())
        return;
    name = name != NULL && *name != '\0' ? name : "(no name)";
    dp__lock_enter(&dp__trace.lock);
    dp__trace_event(0, 'B', name);
    void (*push)(const char *) = dp__trace.push;
    dp__lock_leave(&dp__trace.lock);
    if (push != NULL)
        push(name);
}

DP_API void dp_trace_end(void)
{
    if (!dp__trace_is_on())
        return;
    dp__lock_enter(&dp__trace.lock);
    dp__trace_event(0, 'E', "");
    void (*pop)(void) = dp__trace.pop;
    dp__lock_leave(&dp__trace.lock);
    if (pop != NULL)
        pop();
}

/* ---- streams --------------------------------------------------------------------------------- */

static void dp__mark_reached(void *user)
{
    const dp__mark *mark = user;
    dp__lock_enter(&dp__trace.lock);
    dp__trace_event(mark->row, mark->phase, mark->name);
    dp__lock_leave(&dp__trace.lock);
}

/* NULL: there is no memory. */
static dp__mark *dp__mark_of(int row, char phase, const char *name)
{
    dp__mark *mark = dp__trace.marks;
    while (mark != NULL &&
           (mark->row != row || mark->phase != phase || strcmp(mark->name, name) != 0))
        mark = mark->next;
    size_t bytes = strlen(name) + 1;
    if (mark != NULL || (mark = dp__os_alloc(sizeof *mark + bytes, 8, NULL)) == NULL)
        return mark;
    *mark = (dp__mark){.next = dp__trace.marks, .row = row, .phase = phase};
    memcpy(mark->name, name, bytes);
    return dp__trace.marks = mark;
}

/* What the stream does next begins, or what it has done last ends: in its own time, where the table
   can tell. A failure is met again by whatever comes next. */
static void dp__trace_stream(dp_stream *stream, int row, char phase, const char *name)
{
    const dp_device_ops *ops = stream->dev->ops;
    if (!dp__trace_is_on() || !DP_HAS(dp_device_ops, ops, host_call))
        return;
    dp__lock_enter(&dp__trace.lock);
    dp__mark *mark = dp__trace.file >= 0 ? dp__mark_of(row, phase, name) : NULL;
    dp__lock_leave(&dp__trace.lock);
    if (mark != NULL)
        (void)ops->host_call(stream, dp__mark_reached, mark);
}

/* ---- the file -------------------------------------------------------------------------------- */

/* From a backend that has found a profiler. */
DP__MAYBE_UNUSED static void dp__trace_listen(void (*push)(const char *name), void (*pop)(void))
{
    dp__lock_enter(&dp__trace.lock);
    dp__trace.push = push;
    dp__trace.pop = pop;
    atomic_store_explicit(&dp__trace.on, true, memory_order_relaxed);
    dp__lock_leave(&dp__trace.lock);
}

/* What a parent had open is the parent's, with what it has not written. */
static void dp__trace_own(void)
{
    if (dp__trace.fork_count != dp__os_fork_count()) {
        dp__trace_off();
        dp__trace.contexts = 0;
    }
    dp__trace.fork_count = dp__os_fork_count();
}

static bool dp__trace_knows(const char *path)
{
    return dp__trace.path != NULL && strcmp(dp__trace.path, path) == 0;
}

/* By the first process of a machine, before the others open: what an earlier run has left in the
   file goes. It is no whole JSON text: a bracket is missing at its end, as viewers allow. */
static dp_status dp__trace_make(int process)
{
    const char *path = dp__os_env("DP_TRACE");
    char first[DP__TRACE_LINE];
    if (path == NULL)
        return DP_OK;
    dp__lock_enter(&dp__trace.lock);
    dp__trace_own();
    bool there = dp__trace.contexts > 0 || dp__trace_knows(path);
    dp__lock_leave(&dp__trace.lock);
    if (there)
        return DP_OK;
    int bytes = snprintf(first, sizeof first,
                         "[" DP__TRACE_META "\"process_name\",\"args\":{\"name\":\"process\"}}\n",
                         process, 0);
    int file = dp__os_file_append(path, true);
    bool done = file >= 0 && dp__os_file_put(file, first, (size_t)bytes);
    int why = dp__os_why();
    dp__os_close(file);
    return done ? DP_OK
                : dp_error(DP_ERR_FILE, "dp_open: $DP_TRACE: '%s': %s", path, dp__os_why_text(why));
}

/* `epoch`: when process 0 opened, by the clock on the wall. */
static bool dp__trace_open(const char *path, const dp_ctx *ctx, uint64_t epoch)
{
    bool knows = dp__trace_knows(path);
    size_t bytes = strlen(path) + 1;
    char *own = knows ? dp__trace.path : dp__os_alloc(bytes, 8, NULL);
    dp__trace.bytes = dp__os_alloc(DP__TRACE_BYTES, 64, NULL);
    if (own != NULL && dp__trace.bytes != NULL)
        dp__trace.file = dp__os_file_append(path, false);
    if (!knows && own != NULL) {
        dp__os_free(dp__trace.path, 0, NULL);
        dp__trace.path = memcpy(own, path, bytes);
        dp__trace.start = dp__os_now_ns() - (dp__os_wall_ns() - epoch);
    }
    if (dp__trace.file < 0) {
        dp__trace_off();
        return false;
    }
    dp__trace.files++;
    dp__trace.threads = 0;
    dp__trace.process = ctx->info.process;
    dp__trace.written = dp__os_now_ns();
    dp__trace_line("," DP__TRACE_META "\"process_name\",\"args\":{\"name\":\"process %d\"}}\n",
                   ctx->info.process, 0, ctx->info.process);
    dp__trace_who(0, "caller, device 0");
    atomic_store_explicit(&dp__trace.on, true, memory_order_relaxed);
    return true;
}

static int dp__lane_row(const dp__lane *lane, int local_rank)
{
    return DP__TRACE_STREAMS + (int)(lane - lane->ctx->lanes) * DP__TRACE_LANE + local_rank;
}

static void dp__trace_streams(const dp__lane *lane, const char *what)
{
    char name[48];
    for (int i = 0; i < lane->ctx->info.local_count; i++) {
        int row = dp__lane_row(lane, i);
        snprintf(name, sizeof name, "%s %d", what, i);
        if (!lane->ctx->devices[i].info.host_memory)
            dp__trace_row(row, DP__TRACE_LANE + row, name);
    }
}

static void dp__trace_join(dp_ctx *ctx, uint64_t epoch)
{
    static const char *const streams[DP__LANES] = {"stream of device", "courier's stream, device"};
    const char *path = dp__os_env("DP_TRACE");
    if (path == NULL)
        return;
    dp__lock_enter(&dp__trace.lock);
    dp__trace_own();
    ctx->traced = dp__trace.contexts > 0 || dp__trace_open(path, ctx, epoch);
    dp__trace.contexts += ctx->traced;
    for (int i = 0; ctx->traced && i < DP__LANES; i++)
        dp__trace_streams(&ctx->lanes[i], streams[i]);
    dp__lock_leave(&dp__trace.lock);
}

static void dp__trace_leave(const dp_ctx *ctx)
{
    if (!ctx->traced)
        return;
    dp__lock_enter(&dp__trace.lock);
    if (dp__trace.file >= 0)
        dp__trace_write();
    if (--dp__trace.contexts == 0)
        dp__trace_off();
    dp__lock_leave(&dp__trace.lock);
}

/* ==== >>errors =================================================================================
   Whether a context is live, and the one sticky failure of a job.                                */

/* Read without the lock: the value of a pointer alone tells whether its context is live. */
static _Atomic(dp_ctx *) dp__live[DP__LIVE_MAX];
static dp__lock dp__live_lock = DP__LOCK_INITIALIZER;

/* More of a text that has `used` bytes already; how many it has now. */
DP_PRINTF(4, 5)
static size_t dp__append(char *text, size_t room, size_t used, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int more =
        vsnprintf(used < room ? text + used : NULL, used < room ? room - used : 0, format, args);
    va_end(args);
    return used + (more > 0 ? (size_t)more : 0);
}

DP_API void dp__check_failed(const char *file, int line)
{
    char text[DP__TEXT_BYTES + 256];
    snprintf(text, sizeof text, "%s:%d: %s\n", file, line, dp__of_thread.text);
    dp__os_write(text);
    exit(1);
}

/* The sentence of this thread is set aside while a function of the user's runs, so that if it fails
   without setting one, an older sentence is not taken for its own. */
static char dp__sentence_hide(void)
{
    char first = dp__of_thread.text[0];
    dp__of_thread.text[0] = '\0';
    return first;
}

static bool dp__is_failure(dp_status status) /* one of the list */
{
    return status < DP_OK && status >= DP_ERR_CHECK;
}

static dp_status dp__sentence_after(char first, dp_status status)
{
    if (status != DP_OK && !dp__is_failure(status))
        status = DP_ERR_USER;
    if (status == DP_OK && dp__of_thread.text[0] == '\0')
        dp__of_thread.text[0] = first;
    else if (status != DP_OK && dp__of_thread.text[0] == '\0')
        dp_error(status, "%s", dp_status_text(status));
    return status;
}

static bool dp__is_live(const dp_ctx *ctx)
{
    for (int i = 0; i < DP__LIVE_MAX; i++)
        if (atomic_load_explicit(&dp__live[i], memory_order_relaxed) == ctx)
            return true;
    return false;
}

/* Put `now` in the place of `before`; NULL is an empty place. */
static bool dp__live_swap(dp_ctx *before, dp_ctx *now)
{
    bool found = false;
    dp__lock_enter(&dp__live_lock);
    for (int i = 0; i < DP__LIVE_MAX && !found; i++) {
        found = atomic_load(&dp__live[i]) == before;
        if (found)
            atomic_store(&dp__live[i], now);
    }
    dp__lock_leave(&dp__live_lock);
    return found;
}

/* Around a fork nobody holds a lock, so the child finds all lists whole. */
static void dp__before_fork(void)
{
    dp__lock_enter(&dp__live_lock);
    for (int i = 0; i < DP__LIVE_MAX; i++)
        if (atomic_load(&dp__live[i]) != NULL)
            dp__lock_enter(&atomic_load(&dp__live[i])->lock);
    dp__lock_enter(&dp__trace.lock);
}

static void dp__after_fork(void)
{
    dp__lock_leave(&dp__trace.lock);
    for (int i = 0; i < DP__LIVE_MAX; i++)
        if (atomic_load(&dp__live[i]) != NULL)
            dp__lock_leave(&atomic_load(&dp__live[i])->lock);
    dp__lock_leave(&dp__live_lock);
}

/* Only for contexts that are live and of this process, even if the job has failed. */
static dp_status dp__check_open(const char *fn, const dp_ctx *ctx)
{
    dp__of_thread.fresh = false;
    dp__of_thread.culprit = 0;
    if (ctx == NULL)
        return dp_error(DP_ERR_INVALID, "%s: ctx is NULL", fn);
    if (!dp__is_live(ctx))
        return dp_error(DP_ERR_STATE, "%s: the context is closed", fn);
    if (ctx->fork_count != dp__os_fork_count())
        return dp_error(DP_ERR_STATE,
                        "%s: the context belongs to the parent process; after fork "
                        "a child may only close it",
                        fn);
    return DP_OK;
}

/* A sentence for one that names the function already. */
DP__COLD static const char *dp__unnamed(const char *fn, const char *text)
{
    size_t length = strlen(fn);
    bool named = strncmp(text, fn, length) == 0 && strncmp(text + length, ": ", 2) == 0;
    return named ? text + length + 2 : text;
}

/* This thread's sentence begins with the function's name; what another process says of the same
   function does not name it again. */
DP__COLD static void dp__name_once(const char *fn)
{
    static const char before[] = ") failed: "; /* "rank 1 (process 1, pid 4242) failed: " */
    char *text = dp__of_thread.text, *at = strstr(text, before);
    if (at == NULL)
        return;
    at += sizeof before - 1;
    const char *rest = dp__unnamed(fn, at);
    memmove(at, rest, strlen(rest) + 1);
}

/* Notes that the program is about to learn that the job has failed; a function that the context has
   called is not the program, nor is a thread of the library's. */
DP__COLD static void dp__tell_program(const dp_ctx *ctx)
{
    if (dp__of_thread.frames == NULL && dp__of_thread.lane == NULL)
        atomic_store(&((dp_ctx *)(uintptr_t)ctx)->told, true);
}

DP__COLD static dp_status dp__failed_before(const char *fn, const dp_ctx *ctx, dp_status status)
{
    dp__tell_program(ctx);
    return dp_error(status, "%s: the job failed: %s", fn, dp__unnamed(fn, ctx->failed_text));
}

DP__APART static dp_status dp__check_ctx(const char *fn, const dp_ctx *ctx)
{
    DP_TRY(dp__check_open(fn, ctx));
    int failed = atomic_load_explicit(&ctx->failed, memory_order_acquire);
    return failed == DP_OK ? DP_OK : dp__failed_before(fn, ctx, (dp_status)failed);
}

/* The library itself calls the private one, as of the others below: of a static function a compiler
   knows which registers it leaves alone, which is 11 KiB of the object. */
DP_API dp_status dp_check_ctx(const char *fn, const dp_ctx *ctx)
{
    return dp__check_ctx(fn, ctx);
}

DP__APART static dp_status dp__check_pointer(const char *fn, const char *what, const void *pointer)
{
    if (pointer == NULL)
        return dp_error(DP_ERR_INVALID, "%s: %s is NULL", fn, what);
    return DP_OK;
}

DP_API dp_status dp_check_pointer(const char *fn, const char *what, const void *pointer)
{
    return dp__check_pointer(fn, what, pointer);
}

/* True: it is the first failure. */
static bool dp__job_failed(dp_ctx *ctx, dp_status status, const char *text)
{
    dp__lock_enter(&ctx->lock);
    bool first = atomic_load(&ctx->failed) == DP_OK;
    if (first) {
        ctx->failed_rank = dp__of_thread.culprit > 0 ? dp__of_thread.culprit - 1
                                                     : ctx->info.rank_first;
        snprintf(ctx->failed_text, sizeof ctx->failed_text, "%s", text);
        ctx->failing->here(ctx, ctx->failed_here, sizeof ctx->failed_here);
        atomic_store_explicit(&ctx->failed, (int)status, memory_order_release);
    }
    dp__lock_leave(&ctx->lock);
    return first;
}

static void dp__comm_abort(dp_comm *comm)
{
    if (comm != NULL && DP_HAS(dp_coll_ops, comm->ops, abort))
        comm->ops->abort(comm);
}

/* Who waits for this process, elsewhere or here, waits in vain. */
static void dp__job_end(dp_ctx *ctx, dp_status status, const char *text)
{
    bool first = dp__job_failed(ctx, status, text);
    if (first)
        ctx->failing->tell(ctx);
    for (int i = 0; i < DP__LANES; i++)
        dp__comm_abort(ctx->lanes[i].comm);
    for (int i = 0; ctx->team != NULL && i < ctx->team->thread_count; i++)
        dp__team_wake(ctx->team, i);
    if (first) {
        ctx->failing->log(ctx);
        dp__trace_flush();
    }
    for (int i = 0; i < DP__LANES; i++) {
        dp__lock_enter(&ctx->lock);
        dp__courier *courier = ctx->lanes[i].courier;
        dp__lock_leave(&ctx->lock);
        if (courier != NULL)
            dp__courier_report(courier);
    }
}

/* The sentence of a public function begins with its name. */
DP__APART static dp_status dp__named(const char *fn, dp_status status)
{
    if (status == DP_OK || strncmp(dp__of_thread.text, fn, strlen(fn)) == 0)
        return status;
    return dp_error(status, "%s: %s", fn, dp__of_thread.text);
}

DP_API dp_status dp_error_in(const char *fn, dp_status status)
{
    return dp__named(fn, status);
}

DP__COLD static dp_status dp__no_memory(void)
{
    return dp_error(DP_ERR_NO_MEMORY, "no memory");
}

DP_API dp_status dp_no_memory(void)
{
    return dp__no_memory();
}

/* On the way out of a public function that called deeper. Failures of the JOB class stick, for the
   other processes too. */
DP__APART static dp_status dp__leave(const char *fn, dp_ctx *ctx, dp_status status)
{
    if (status == DP_OK)
        return DP_OK;
    if (!dp__of_thread.fresh) /* a table that failed without a sentence */
        dp_error(status, "%s", dp_status_text(status));
    dp__named(fn, status);
    dp__name_once(fn);
    if (dp_status_class(status) == DP_CLASS_JOB) {
        dp__tell_program(ctx);
        dp__job_end(ctx, status, dp_last_error());
    } else {
        ctx->failing->say(ctx, dp_last_error());
    }
    return status;
}

/* The result of a wait. A device that cannot be waited for is lost, whatever its table says, except
   that now is not the time. */
static dp_status dp__waited(dp_status status)
{
    if (status == DP_OK || status == DP_ERR_STATE || dp_status_class(status) == DP_CLASS_JOB)
        return status;
    return dp_error(DP_ERR_DEVICE, "the device cannot be waited for: %s",
                    dp__of_thread.fresh ? dp__of_thread.text : dp_status_text(status));
}

DP__APART static dp_status dp__sync(dp_stream *stream)
{
    return dp__waited(stream->dev->ops->stream_sync(stream));
}

static bool dp__has_failed(const dp_ctx *ctx)
{
    return atomic_load_explicit(&ctx->failed, memory_order_acquire) != DP_OK;
}

DP_API bool dp_failure(const dp_ctx *ctx, dp_failure_info *out)
{
    if (dp__check_open("dp_failure", ctx) != DP_OK)
        return false;
    int failed = atomic_load_explicit(&ctx->failed, memory_order_acquire);
    if (failed != DP_OK)
        dp__tell_program(ctx);
    if (failed != DP_OK && out != NULL)
        *out = (dp_failure_info){(dp_status)failed, ctx->failed_rank, ctx->failed_text,
                                 ctx->failed_here};
    return failed != DP_OK;
}

DP_API void dp_abort(dp_ctx *ctx, dp_status why, const char *format, ...)
{
    char text[DP__TEXT_BYTES];
    va_list args;
    if (dp__check_open("dp_abort", ctx) != DP_OK)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format != NULL ? format : "dp_abort was called", args);
    va_end(args);
    if (!dp__is_failure(why) || dp_status_class(why) != DP_CLASS_JOB)
        why = DP_ERR_ABORTED;
    dp__tell_program(ctx);
    dp__job_end(ctx, why, text);
}

/* ==== >>frames =================================================================================
   Each call of a user's function leaves a frame on the stack of its thread, which says what the
   function depends on. Whatever would take that away looks here first. Functions that run on all
   devices at the same time also hold ctx->entered, which every thread sees.                     */

typedef struct dp__frame {
    const char *what, *name, *method; /* "the method", the names of module and method, or NULL */
    dp_ctx *ctx;
    const dp_scope *scope;   /* has to stay as long as this runs; NULL: none */
    const dp_module *module; /* so does its tree, with what it wraps; NULL: none */
    const dp_call *call;     /* of a method */
    int local_rank;
    bool together;          /* others like it run at the same time */
    bool owns_device;       /* but none of them on this device */
    bool on_all;            /* a hook: it works on the streams that it was given */
    bool counted;           /* in ctx->inside; not the courier's, whom dp_close waits for */
    bool fresh;             /* of dp__of_thread, to be put back */
    bool unseen;            /* nobody waits for it */
    bool padded;            /* `what` is all of its name, and has DP__ACTIVITY_NAME bytes */
    char first;             /* first progress message of the sentence that was set aside */
    dp__activity *activity; /* where it is shown */
    uint64_t since_ns;
    const struct dp__frame *outer;
} dp__frame;

static const char *dp__frame_text(const dp__frame *frame, char *text, size_t bytes)
{
    if (frame->name == NULL)
        snprintf(text, bytes, "%s", frame->what);
    else
        snprintf(text, bytes, "%s '%s%s%s'", frame->what, frame->name,
                 frame->method != NULL ? "." : "", frame->method != NULL ? frame->method : "");
    return text;
}

static void dp__frame_trace(const dp__frame *frame, char phase)
{
    char name[160];
    dp_ctx *ctx = frame->ctx;
    if (frame->together && frame->local_rank > 0)
        dp__trace_who(frame->local_rank, "device %d", frame->local_rank);
    if (phase == 'E')
        dp_trace_end();
    else if (frame->method != NULL)
        snprintf(name, sizeof name, "%s.%s", frame->name, frame->method);
    else
        dp__frame_text(frame, name, sizeof name);
    if (phase == 'B')
        dp_trace_begin(name);
    if (frame->method != NULL)
        dp__trace_stream(ctx->devices[frame->local_rank].stream,
                         dp__lane_row(&ctx->lanes[DP__CALLER], frame->local_rank), phase,
                         phase == 'B' ? name : "");
}

/* ---- what devices are in, as others see it --------------------------------------------------- */

/* Returns where it is shown what a device of this process is in. */
static dp__activity *dp__activity_of(const dp_ctx *ctx, int device)
{
    bool seen = device == 0 && ctx->world.activity != NULL;
    return seen ? ctx->world.activity : &ctx->slots[device].activity;
}

/* Writes "logreg.forward", "the hook of logreg" or "a function under dp_run", as far as there is
   room; snprintf would take longer than some functions do. */
static void dp__activity_name(const dp__frame *frame, char *text, size_t most)
{
    bool both = frame->name != NULL;
    const char *const parts[] = {frame->method != NULL ? "" : frame->what,
                                 both && frame->method == NULL ? " " : "", both ? frame->name : "",
                                 frame->method != NULL ? "." : "",
                                 frame->method != NULL ? frame->method : ""};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        for (const char *at = parts[i]; *at != '\0' && most > 0; at++, most--)
            *text++ = *at;
}

/* Shows that a device is in the function of a frame; NULL: in none. */
DP__APART static void dp__activity_show(dp__activity *activity, const dp__frame *frame)
{
    uint64_t words[DP__ACTIVITY_WORDS] = {0};
    if (frame != NULL && frame->padded)
        memcpy(words, frame->what, sizeof words);
    else if (frame != NULL)
        dp__activity_name(frame, (char *)words, sizeof words - 1);
    dp__activity_put(activity, words, frame != NULL ? dp__thread_number() : 0,
                     frame != NULL ? frame->since_ns : 0);
}

/* Shows a frame that begins on this thread, if somebody could wait for it: another device, another
   process, or the caller for its courier. */
static void dp__frame_show(dp__frame *frame)
{
    const dp__frame *outer = frame->outer;
    const dp_ctx *ctx = frame->ctx;
    dp__lane *lane = dp__of_thread.lane;
    bool same = outer != NULL && outer->ctx == ctx, carries = lane != NULL && lane->ctx == ctx;
    bool alone = ctx->info.local_count == 1 && ctx->world.activity == NULL;
    bool nobody = (alone || lane != NULL) && !carries; /* waits for it */
    frame->unseen = frame->unseen || nobody || (same && outer->unseen);
    if (frame->unseen)
        return;
    if (carries && dp__of_thread.beside)
        frame->activity = &lane->activity;
    else
        frame->activity = same && !frame->together ? outer->activity
                                                   : dp__activity_of(ctx, frame->local_rank);
    frame->since_ns = dp__os_coarse_ns();
    dp__activity_show(frame->activity, frame);
}

/* Shows in a place what this thread is in there; NULL: in nothing. */
static void dp__frame_again(const dp__frame *frame, dp__activity *activity)
{
    bool there = frame != NULL && frame->activity == activity && !frame->unseen;
    dp__activity_show(activity, there ? frame : NULL);
}

/* Shows the one around it again. */
static void dp__frame_hide(const dp__frame *frame)
{
    if (!frame->unseen)
        dp__frame_again(frame->outer, frame->activity);
}

/* Returns a lookout that warns at a quarter of the time-out. */
static dp__lookout dp__lookout_of(const dp_ctx *ctx,
                                  void (*look)(void *user, uint64_t waited_ns, bool warns),
                                  void *user)
{
    return (dp__lookout){look, user, (uint64_t)ctx->config.timeout_ms * 250000};
}

/* Shows other processes, in place of what the first device is in, what that one waits for: another
   device, or (0) the courier. NULL: it waits no longer. By the thread of the first device. */
DP__COLD static void dp__activity_relay(dp_ctx *ctx, int device, const dp__activity *awaited)
{
    uint64_t words[DP__ACTIVITY_WORDS], since;
    int thread;
    dp__activity *seen = ctx->world.activity;
    if (seen == NULL)
        return;
    atomic_store(&ctx->relayed, awaited != NULL ? device : 0);
    if (awaited == NULL)
        dp__frame_again(dp__of_thread.frames, seen);
    else if ((since = dp__activity_get(awaited, words, &thread)) != 0)
        dp__activity_put(seen, words, thread, since);
}

DP_API void dp_doing(dp_ctx *ctx, const char *what)
{
    uint64_t words[DP__ACTIVITY_WORDS] = {0};
    if (dp__check_open(__func__, ctx) != DP_OK || ctx->world.activity == NULL ||
        dp__of_thread.frames != NULL)
        return;
    snprintf((char *)words, sizeof words, "%s", what != NULL ? what : "");
    dp__activity_put(ctx->world.activity, words, dp__thread_number(),
                     words[0] != 0 ? dp__os_coarse_ns() : 0);
}

/* Sets a figure, by the one thread that calls into the context, and shows it where it is seen. */
static void dp__figure_set(dp_ctx *ctx, dp__figure figure, uint64_t number)
{
    ctx->figures[figure] = number;
    if (ctx->world.figures != NULL)
        atomic_store_explicit(&ctx->world.figures[figure], number, memory_order_relaxed);
}

/* Shows all of them in a new place. */
DP__COLD static void dp__figures_begin(dp_ctx *ctx, _Atomic uint64_t *seen)
{
    ctx->world.figures = seen;
    if (ctx->figures[DP__OPENED_NS] == 0)
        ctx->figures[DP__OPENED_NS] = dp__os_now_ns();
    for (int i = 0; i < DP__FIGURES; i++)
        dp__figure_set(ctx, (dp__figure)i, ctx->figures[i]);
}

/* Counts a step that has ended. Those inside of the user's functions are parts of another one. */
static void dp__step_count(dp_ctx *ctx)
{
    uint64_t steps = ctx->figures[DP__STEPS], mean = ctx->figures[DP__STEP_NS];
    if (ctx->world.figures == NULL || dp__of_thread.frames != NULL)
        return;
    uint64_t now = dp__os_now_ns(), took = now - ctx->figures[DP__STEPPED_NS];
    if (steps > 0)
        dp__figure_set(ctx, DP__STEP_NS, steps > 1 ? mean - mean / 8 + took / 8 : took);
    dp__figure_set(ctx, DP__STEPPED_NS, now);
    dp__figure_set(ctx, DP__STEPS, steps + 1);
}

static void dp__frame_enter(dp__frame *frame)
{
    frame->outer = dp__of_thread.frames;
    frame->counted = !frame->together && dp__of_thread.lane == NULL &&
                     (frame->outer == NULL || frame->outer->ctx != frame->ctx);
    if (frame->counted)
        atomic_fetch_add_explicit(&frame->ctx->inside, 1, memory_order_relaxed);
    frame->fresh = dp__of_thread.fresh;
    frame->first = dp__sentence_hide();
    dp__of_thread.frames = frame;
    dp__frame_show(frame);
    if (dp__trace_is_on())
        dp__frame_trace(frame, 'B');
}

/* `status` is what the function returned; this returns one of the list, with a sentence. */
static dp_status dp__frame_leave(const dp__frame *frame, dp_status status)
{
    if (dp__trace_is_on())
        dp__frame_trace(frame, 'E');
    dp__frame_hide(frame);
    dp__of_thread.frames = frame->outer;
    if (frame->counted)
        atomic_fetch_sub_explicit(&frame->ctx->inside, 1, memory_order_relaxed);
    if (status == DP_OK && dp__of_thread.text[0] == '\0') /* an error may be on its way past this */
        dp__of_thread.fresh = frame->fresh;
    status = dp__sentence_after(frame->first, status);
    dp__of_thread.fresh = dp__of_thread.fresh || status != DP_OK; /* whatever succeeded since */
    return status;
}

/* The innermost function of this context that this thread is in; NULL: none. `together`: the one
   that runs on all devices at the same time. */
static const dp__frame *dp__frame_of(const dp_ctx *ctx, bool together)
{
    const dp__frame *frame = dp__of_thread.frames;
    while (frame != NULL && (frame->ctx != ctx || (together && !frame->together)))
        frame = frame->outer;
    return frame;
}

static dp_status dp__busy(const char *fn, const dp_ctx *ctx)
{
    char text[160];
    const dp__frame *frame = dp__frame_of(ctx, true);
    if (frame == NULL)
        return dp_error(DP_ERR_STATE,
                        "%s: another thread's dp_run, pass or collective is under way in this "
                        "context",
                        fn);
    return dp_error(DP_ERR_STATE,
                    "%s: %s called it on local rank %d while the other devices run too: only "
                    "functions that run alone may call it",
                    fn, dp__frame_text(frame, text, sizeof text), frame->local_rank);
}

/* Whether all devices are in use by one call. A hook that the courier calls has not entered: only
   its frame tells. */
static bool dp__is_shared(const dp_ctx *ctx)
{
    return atomic_load_explicit(&ctx->entered, memory_order_relaxed) ||
           dp__frame_of(ctx, true) != NULL;
}

/* For what changes things that all devices use. */
static dp_status dp__check_alone(const char *fn, const dp_ctx *ctx)
{
    return dp__is_shared(ctx) ? dp__busy(fn, ctx) : DP_OK;
}

DP_API dp_status dp_check_alone(const char *fn, const dp_ctx *ctx)
{
    DP_TRY(dp__check_open(fn, ctx));
    return dp__check_alone(fn, ctx);
}

/* For work on a device: while others run too, a function keeps to its own. */
static dp_status dp__check_own(const char *fn, const dp_ctx *ctx, int local_rank)
{
    char text[160];
    const dp__frame *frame = dp__frame_of(ctx, true);
    if (frame == NULL || frame->on_all || frame->local_rank == local_rank)
        return DP_OK;
    return dp_error(DP_ERR_STATE,
                    "%s: %s runs on local rank %d, and this is the device of local rank %d, which "
                    "others use at the same time",
                    fn, dp__frame_text(frame, text, sizeof text), frame->local_rank, local_rank);
}

static dp_status dp__enter(const char *fn, dp_ctx *ctx)
{
    if (dp__frame_of(ctx, true) != NULL ||
        atomic_exchange_explicit(&ctx->entered, true, memory_order_acquire))
        return dp__busy(fn, ctx);
    return DP_OK;
}

static dp_status dp__exit(const char *fn, dp_ctx *ctx, dp_status status)
{
    atomic_store_explicit(&ctx->entered, false, memory_order_release);
    if (status == DP_OK) /* the job may have failed meanwhile: then the result is void */
        return dp__check_ctx(fn, ctx);
    return dp__leave(fn, ctx, status);
}

/* A method that runs once more, to be checked, has no partners: nobody else runs it. */
static dp_status dp__check_replays(const char *fn)
{
    return dp__of_thread.replays ? dp_error(DP_ERR_UNSUPPORTED, "%s: in a replay", fn) : DP_OK;
}

/* ==== >>log ====================================================================================
   Records go to the user's function, or to stderr as $DP_DEBUG says.                            */

static const char *const dp__level_names[] = {"", "error", "warn", "info", "trace"};

static dp_level dp__level_of(const char *text)
{
    for (int level = DP_LOG_ERROR; level <= DP_LOG_TRACE; level++)
        if (text != NULL && strcmp(text, dp__level_names[level]) == 0)
            return (dp_level)level;
    return DP_LOG_DEFAULT;
}

DP_API void dp_log_stderr(const dp_log_record *record, void *user)
{
    char line[DP__TEXT_BYTES + 64];
    (void)user;
    if (record == NULL)
        return;
    bool known = record->level >= DP_LOG_ERROR && record->level <= DP_LOG_TRACE;
    snprintf(line, sizeof line, "[dp %d %s] %s\n", record->rank,
             known ? dp__level_names[record->level] : "log",
             record->text != NULL ? record->text : "");
    dp__os_write(line);
}

static bool dp__log_wants(const dp_ctx *ctx, dp_level level)
{
    return ctx->config.log.fn != NULL && level <= ctx->config.log.level;
}

DP_PRINTF(3, 4) static void dp__log(const dp_ctx *ctx, dp_level level, const char *format, ...)
{
    char text[DP__TEXT_BYTES], said[DP__TEXT_BYTES]; /* which may be on its way to the user */
    va_list args;
    if (!dp__log_wants(ctx, level))
        return;
    bool fresh = dp__of_thread.fresh;
    memcpy(said, dp__of_thread.text, sizeof said);
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    int rank = ctx->info.rank_count > 0 ? ctx->info.rank_first : -1;
    dp__frame frame = {.what = "the log function", .ctx = (dp_ctx *)(uintptr_t)ctx, .unseen = true};
    dp__frame_enter(&frame);
    ctx->config.log.fn(&(dp_log_record){level, rank, text}, ctx->config.log.user);
    (void)dp__frame_leave(&frame, DP_OK);
    memcpy(dp__of_thread.text, said, sizeof said);
    dp__of_thread.fresh = fresh;
}

/* Warns once a process, whose `said` that is. If there is no log it goes to stderr: for what makes
   all work useless or slow, and cannot be seen otherwise. */
static void dp__warn_all(const dp_ctx *ctx, atomic_bool *said, const char *text)
{
    bool silent = ctx->config.log.fn == NULL;
    if ((!silent && !dp__log_wants(ctx, DP_LOG_WARN)) || atomic_exchange(said, true))
        return;
    if (silent)
        dp_log_stderr(&(dp_log_record){DP_LOG_WARN,
                                       ctx->info.rank_count > 0 ? ctx->info.rank_first : -1, text},
                      NULL);
    else
        dp__log(ctx, DP_LOG_WARN, "%s", text);
}

/* ==== >>host ===================================================================================
   What a backend gets: memory that the context keeps track of (a child of fork can free it without
   asking the backend, and dp_close names what a backend forgot), the log, the workers.          */

static dp_ctx *dp__ctx_of(const dp_host *host)
{
    return (dp_ctx *)(uintptr_t)host; /* the tables see it const; it is a context's head */
}

static void *dp__raw_alloc(const dp_ctx *ctx, size_t bytes, size_t align)
{
    return ctx->config.allocator.alloc(bytes, align, ctx->config.allocator.user);
}

static void dp__raw_free(const dp_ctx *ctx, void *data, size_t bytes)
{
    ctx->config.allocator.free(data, bytes, ctx->config.allocator.user);
}

static void *dp__host_alloc(const dp_host *host, size_t bytes, size_t align)
{
    dp_ctx *ctx = dp__ctx_of(host);
    size_t offset = align > sizeof(dp__tracked) ? align : sizeof(dp__tracked);
    char *whole = bytes <= SIZE_MAX - offset ? dp__raw_alloc(ctx, bytes + offset, offset) : NULL;
    if (whole == NULL)
        return NULL;
    dp__tracked *head = (dp__tracked *)(void *)(whole + offset - sizeof(dp__tracked));
    *head = (dp__tracked){.bytes = bytes + offset, .offset = offset};
    dp__lock_enter(&ctx->lock);
    head->next = ctx->tracked;
    if (ctx->tracked != NULL)
        ctx->tracked->prev = head;
    ctx->tracked = head;
    dp__lock_leave(&ctx->lock);
    return whole + offset;
}

static void dp__tracked_free(dp_ctx *ctx, dp__tracked *head)
{
    if (head->prev != NULL)
        head->prev->next = head->next;
    else
        ctx->tracked = head->next;
    if (head->next != NULL)
        head->next->prev = head->prev;
    dp__raw_free(ctx, (char *)head + sizeof *head - head->offset, head->bytes);
}

static void dp__host_free(const dp_host *host, void *data)
{
    dp_ctx *ctx = dp__ctx_of(host);
    if (data == NULL)
        return;
    dp__lock_enter(&ctx->lock);
    dp__tracked_free(ctx, (dp__tracked *)data - 1);
    dp__lock_leave(&ctx->lock);
}

static void dp__host_log(const dp_host *host, dp_level level, const char *text)
{
    dp__log(dp__ctx_of(host), level, "%s", text);
}

static int dp__host_thread_count(const dp_host *host)
{
    const dp_ctx *ctx = dp__ctx_of(host);
    return ctx->team != NULL ? ctx->team->share_count : 1;
}

static void dp__host_parallel(const dp_host *host, int part_count, void (*fn)(int, void *),
                              void *user)
{
    dp_ctx *ctx = dp__ctx_of(host);
    if (ctx->team == NULL || part_count < 2 || dp__of_thread.lane != NULL ||
        !dp__team_enter(ctx->team)) {
        for (int part = 0; part < part_count; part++)
            fn(part, user);
        return;
    }
    dp__team_share(ctx->team, part_count, fn, user);
    dp__team_exit(ctx->team);
}

static bool dp__host_aborted(const dp_host *host)
{
    return atomic_load_explicit(&dp__ctx_of(host)->failed, memory_order_relaxed) != DP_OK;
}

static dp_host dp__host_make(void)
{
    return (dp_host){.size = sizeof(dp_host),
                     .alloc = dp__host_alloc,
                     .free = dp__host_free,
                     .log = dp__host_log,
                     .parallel = dp__host_parallel,
                     .thread_count = dp__host_thread_count,
                     .aborted = dp__host_aborted};
}

/* ==== >>poison =================================================================================
   With dp_config.poison, host memory that nobody may use has bytes that are NaN as a float of any
   size: what a scope has given back, what nobody has written yet, and a fence behind each piece. So
   a read of it is seen in what is computed, and a write when the block is looked at again.      */

enum { DP__POISON = 0xFF, DP__FENCE_BYTES = 64, DP__RESTING = 8 };

static bool dp__pool_is_host(const dp__pool *pool)
{
    return pool->source != DP__FROM_DEVICE || pool->device->info.host_memory;
}

/* Returns true if no other process, and no device on its own, uses a pool's memory. */
static bool dp__pool_is_poisoned(const dp_ctx *ctx, const dp__pool *pool)
{
    return ctx->config.poison && dp__pool_is_host(pool) && pool->source != DP__FROM_HEAP &&
           pool->source != DP__FROM_PAGES;
}

/* Returns how many bytes a piece takes. */
static size_t dp__fenced_bytes(const dp_ctx *ctx, const dp__pool *pool, size_t bytes)
{
    bool fence = dp__pool_is_poisoned(ctx, pool) && bytes <= SIZE_MAX - DP__FENCE_BYTES;
    return fence ? bytes + DP__FENCE_BYTES : bytes;
}

/* Keeps the first of what nobody may have written, for the next check, and logs each. */
DP__COLD static void dp__damaged(dp_ctx *ctx, size_t given, size_t at)
{
    char text[DP__SENTENCE_BYTES];
    if (given > 0)
        snprintf(text, sizeof text,
                 "something was written behind a piece of %zu bytes, at byte %zu from its begin: "
                 "seen as its scope ended",
                 given, at);
    else
        snprintf(text, sizeof text,
                 "something was written to memory of a scope that had ended, at byte %zu of a "
                 "piece: seen as another scope got it",
                 at);
    dp__log(ctx, DP_LOG_ERROR, "%s", text);
    dp__lock_enter(&ctx->lock);
    if (ctx->checks.damage[0] == '\0')
        memcpy(ctx->checks.damage, text, sizeof text);
    dp__lock_leave(&ctx->lock);
}

/* Looks whether a block is as it was filled, behind the bytes that somebody may use. */
static void dp__poison_look(dp_ctx *ctx, const dp__block *block, size_t given)
{
    const unsigned char *bytes = block->data;
    size_t at = given;
    while (at < block->bytes && bytes[at] == DP__POISON)
        at++;
    if (at < block->bytes)
        dp__damaged(ctx, given, at);
}

/* ==== >>pool ===================================================================================
   Blocks of the host, of pinned memory, of the heap that processes share, of pages that they may
   come to share, and of each device. A block's size is rounded up to its class (eight classes per
   power of two, so at most 1/8 is lost) and stays there: a step that repeats itself finds all its
   blocks in the free lists. Device blocks are reused in the order of the compute stream. The
   context's lock guards the lists.                                                              */

static bool dp__mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static bool dp__class_of(size_t bytes, int *out_class, size_t *out_bytes)
{
    if (bytes <= 256) {
        *out_class = 0;
        *out_bytes = 256;
        return true;
    }
    unsigned long long last = bytes - 1;
    int exponent = 63 - __builtin_clzll(last), shift = exponent - 3;
    *out_class = 1 + (exponent - 8) * 8 + (int)((last >> shift) & 7);
    *out_bytes = ((bytes - 1) >> shift << shift) + ((size_t)1 << shift);
    return *out_class < DP__CLASS_COUNT;
}

static size_t dp__align_up(size_t bytes, size_t align)
{
    return (bytes + align - 1) & ~(align - 1);
}

static char *dp__heap_part(const dp__heap *heap, int process)
{
    return (char *)heap->shared->data + heap->first + (size_t)process * heap->each;
}

/* Where memory lies in the own part; SIZE_MAX: not there. */
static size_t dp__heap_place(const dp__heap *heap, const void *data, size_t bytes)
{
    if (heap->shared == NULL)
        return SIZE_MAX;
    uintptr_t place = (uintptr_t)data - (uintptr_t)dp__heap_part(heap, heap->process);
    return place < heap->each && bytes <= heap->each - place ? (size_t)place : SIZE_MAX;
}

/* It is never given back: blocks of the pool are used again. A part begins with a page. */
static dp_status dp__heap_take(dp_ctx *ctx, dp__heap *heap, size_t bytes, size_t align, void **out)
{
    size_t room = dp__align_up(bytes, align);
    dp__lock_enter(&ctx->lock);
    size_t place = dp__align_up(heap->used, align);
    size_t at = heap->first + (size_t)heap->process * heap->each + place;
    bool fits = place <= heap->each && room <= heap->each - place;
    heap->used = fits ? place + room : heap->used;
    dp__lock_leave(&ctx->lock);
    if (!fits)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: no room for %zu bytes", bytes);
    DP_TRY(dp__os_shared_reserve(heap->shared, at, room));
    dp__os_shared_dump(heap->shared, at, room, true);
    *out = (char *)heap->shared->data + at;
    return DP_OK;
}

/* Blocks of pages never lie next to each other, as if they were one: that would be so in some
   processes only. */
static size_t dp__block_pages(size_t bytes)
{
    return dp__align_up(bytes + 64, DP__SHARED_PAGE);
}

/* *out is NULL, and stays NULL if a table returns DP_OK but gives no memory. */
static dp_status dp__pool_fetch(dp_ctx *ctx, const dp__pool *pool, size_t bytes, void **out)
{
    const dp__device *device = pool->device;
    switch (pool->source) {
    case DP__FROM_ALLOCATOR:
        *out = dp__raw_alloc(ctx, bytes, 64);
        break;
    case DP__FROM_HEAP:
        DP_TRY(dp__heap_take(ctx, &ctx->world.heap, bytes, 64, out));
        break;
    case DP__FROM_PAGES:
        *out = dp__os_pages_make(dp__block_pages(bytes));
        break;
    case DP__FROM_DEVICE:
        DP_TRY(device->dev->ops->alloc(device->dev, bytes, out));
        break;
    case DP__FROM_HOST_ALLOC:
        DP_TRY(device->dev->ops->host_alloc(device->dev, bytes, out));
        break;
    }
    return *out != NULL ? DP_OK : dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
}

static void dp__pool_return(dp_ctx *ctx, const dp__block *block)
{
    const dp__device *device = block->pool->device;
    switch (block->pool->source) {
    case DP__FROM_ALLOCATOR:
        dp__raw_free(ctx, block->data, block->bytes);
        break;
    case DP__FROM_HEAP: /* which goes as a whole */
        break;
    case DP__FROM_PAGES:
        dp__os_pages_free(block->data, dp__block_pages(block->bytes));
        break;
    case DP__FROM_DEVICE:
        device->dev->ops->free(device->dev, block->data, block->bytes);
        break;
    case DP__FROM_HOST_ALLOC:
        device->dev->ops->host_free(device->dev, block->data, block->bytes);
        break;
    }
}

static dp_status dp__block_make(dp_ctx *ctx, dp__pool *pool, int class_, size_t bytes,
                                dp__block **out)
{
    dp__block *block = dp__raw_alloc(ctx, sizeof *block, _Alignof(dp__block));
    if (block == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", sizeof *block);
    *block = (dp__block){.pool = pool, .bytes = bytes, .given = bytes, .class_ = class_};
    dp_status status = dp__pool_fetch(ctx, pool, bytes, &block->data);
    if (status != DP_OK) {
        dp__raw_free(ctx, block, sizeof *block);
        return status;
    }
    if (dp__pool_is_poisoned(ctx, pool))
        memset(block->data, DP__POISON, block->bytes);
    dp__lock_enter(&ctx->lock);
    block->made_before = ctx->all_blocks;
    ctx->all_blocks = block;
    dp__lock_leave(&ctx->lock);
    *out = block;
    return DP_OK;
}

/* Returns true if blocks stay free for a while, where steps are checked: a late read of one would
   find what the next piece of that size has. */
static bool dp__pool_rests(const dp_ctx *ctx, const dp__pool *pool)
{
    return ctx->checks.every > 0 && dp__pool_is_poisoned(ctx, pool);
}

/* Returns the first free block; NULL: there is none. Under the context's lock. */
static dp__block *dp__block_reuse(const dp_ctx *ctx, dp__pool *pool, int class_)
{
    dp__block *first = pool->free[class_], *block = first;
    for (int i = 0; i < DP__RESTING && block != NULL && dp__pool_rests(ctx, pool); i++)
        block = block->next;
    if (block != NULL)
        pool->free[class_] = first->next;
    return block != NULL ? first : NULL;
}

static dp_status dp__block_take(dp_ctx *ctx, dp__pool *pool, size_t bytes, dp__block **out)
{
    int class_;
    size_t capacity;
    if (!dp__class_of(bytes, &class_, &capacity))
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
    dp__lock_enter(&ctx->lock);
    dp__block *block = dp__block_reuse(ctx, pool, class_);
    dp__lock_leave(&ctx->lock);
    if (block == NULL)
        return dp__block_make(ctx, pool, class_, capacity, out);
    block->next = NULL;
    if (dp__pool_is_poisoned(ctx, pool)) {
        dp__unpoison(block->data, block->bytes);
        dp__poison_look(ctx, block, 0);
        dp__poison(block->data, block->bytes);
    }
    block->given = block->bytes;
    *out = block;
    return DP_OK;
}

/* What the host can see is poisoned before it goes back. */
static void dp__blocks_wipe(dp_ctx *ctx, dp__block *blocks)
{
    for (dp__block *block = blocks; block != NULL; block = block->next) {
        if (!dp__pool_is_host(block->pool) || block->everybodys)
            continue;
        if (dp__pool_is_poisoned(ctx, block->pool)) {
            dp__unpoison(block->data, block->bytes);
            dp__poison_look(ctx, block, block->given);
            memset(block->data, DP__POISON, block->bytes);
        }
        dp__poison(block->data, block->bytes);
    }
}

/* The last one given is the first to be used; of those that rest, the last. Under the lock. */
static void dp__blocks_give(const dp_ctx *ctx, dp__block *blocks)
{
    while (blocks != NULL) {
        dp__block *block = blocks, **list = &block->pool->free[block->class_];
        blocks = block->next;
        while (*list != NULL && dp__pool_rests(ctx, block->pool))
            list = &(*list)->next;
        block->next = *list;
        *list = block;
    }
}

/* All blocks of the context, wherever they are. */
static void dp__blocks_free(dp_ctx *ctx, bool ask_devices)
{
    while (ctx->all_blocks != NULL) {
        dp__block *block = ctx->all_blocks;
        ctx->all_blocks = block->made_before;
        if (dp__pool_is_host(block->pool))
            dp__unpoison(block->data, block->bytes);
        if (!block->kept && (ask_devices || block->pool->source == DP__FROM_ALLOCATOR ||
                             block->pool->source == DP__FROM_PAGES))
            dp__pool_return(ctx, block);
        dp__raw_free(ctx, block, sizeof *block);
    }
}

/* ==== >>scopes ===================================================================================
   Small things are cut from chunks, larger ones are blocks; all but the first chunk go back to the
   pools when the scope ends. An ended scope waits in ctx->idle to be reused. Links between
   scopes are under the context's lock, since children may be used by other threads than their
   parent.                                                                                       */

DP__APART static dp_status dp__check_scope(const char *fn, const dp_scope *scope)
{
    if (scope == NULL && dp__of_thread.scope_status == DP_ERR_NO_MEMORY)
        return dp_error(DP_ERR_NO_MEMORY, "%s: scope is NULL, there was no memory to begin it", fn);
    if (scope == NULL && dp_status_class(dp__of_thread.scope_status) == DP_CLASS_JOB)
        return dp_error(dp__of_thread.scope_status,
                        "%s: scope is NULL, the job had failed before it was begun", fn);
    if (scope == NULL)
        return dp_error(DP_ERR_INVALID, "%s: scope is NULL", fn);
    if (scope->magic != DP__SCOPE_LIVE)
        return dp_error(DP_ERR_STATE, "%s: the scope %s", fn,
                        scope->magic == DP__SCOPE_ENDING ? "is ending" : "has ended");
    return dp__check_open(fn, scope->ctx);
}

DP__APART static dp_status dp__check_scope_of(const char *fn, const dp_scope *scope,
                                              const dp_ctx *ctx)
{
    DP_TRY(dp__check_scope(fn, scope));
    if (scope->ctx != ctx)
        return dp_error(DP_ERR_INVALID, "%s: the scope is of another context", fn);
    return DP_OK;
}

static void dp__scope_cut_from(dp_scope *scope, const dp__block *chunk)
{
    scope->cursor = chunk->data;
    scope->limit = scope->cursor + chunk->bytes;
    dp__poison(chunk->data, chunk->bytes);
}

static dp_status dp__scope_chunk(dp_scope *scope, size_t bytes)
{
    dp__block *chunk = NULL;
    DP_TRY(dp__block_take(scope->ctx, &scope->ctx->host_pool, bytes, &chunk));
    if (scope->home == NULL) {
        scope->home = chunk;
    } else {
        chunk->next = scope->blocks;
        scope->blocks = chunk;
    }
    dp__scope_cut_from(scope, chunk);
    return DP_OK;
}

static dp_status dp__scope_block(dp_scope *scope, dp__pool *pool, size_t bytes, void **out)
{
    dp__block *block = NULL;
    DP_TRY(dp__block_take(scope->ctx, pool, dp__fenced_bytes(scope->ctx, pool, bytes), &block));
    block->given = bytes;
    block->next = scope->blocks;
    scope->blocks = block;
    if (dp__pool_is_host(pool))
        dp__unpoison(block->data, bytes);
    *out = block->data;
    return DP_OK;
}

/* `bytes` is 1 to DP__SMALL_BYTES. Under AddressSanitizer a gap follows each piece. With poison
   each piece has a block of its own, and there are no chunks. */
static void *dp__scope_cut(dp_scope *scope, size_t bytes, size_t align)
{
    uintptr_t at = dp__align_up((uintptr_t)scope->cursor, align);
    char *data = (char *)at;
    if (at + bytes > (uintptr_t)scope->limit) {
        void *block = NULL;
        if (scope->ctx->config.poison)
            return dp__scope_block(scope, &scope->ctx->host_pool, bytes, &block) == DP_OK ? block
                                                                                          : NULL;
        if (dp__scope_chunk(scope, DP__CHUNK_BYTES) != DP_OK)
            return NULL;
        data = scope->cursor; /* chunks are 64-byte aligned */
    }
    scope->cursor = data + bytes;
    bool room = scope->limit - scope->cursor > DP__RED_ZONE_BYTES;
    scope->cursor = room ? scope->cursor + DP__RED_ZONE_BYTES : scope->limit;
    dp__unpoison(data, bytes);
    return data;
}

static void *dp__scope_bytes(dp_scope *scope, size_t bytes, size_t align)
{
    void *data = NULL;
    if (bytes <= DP__SMALL_BYTES)
        return dp__scope_cut(scope, bytes > 0 ? bytes : 1, align);
    return dp__scope_block(scope, &scope->ctx->host_pool, bytes, &data) == DP_OK ? data : NULL;
}

static void dp__scope_link(dp_scope *scope, dp_scope *parent) /* under the context's lock */
{
    dp_scope **list = parent != NULL ? &parent->first_child : &scope->ctx->scopes;
    scope->parent = parent;
    scope->prev = NULL;
    scope->next = *list;
    if (*list != NULL)
        (*list)->prev = scope;
    *list = scope;
}

/* Passes of these kinds that lie in a scope are no longer valid. */
static void dp__passes_end(const dp_scope *scope, unsigned kinds)
{
    for (dp__pass_head *pass = scope->passes; pass != NULL; pass = pass->next)
        if (pass->kind & kinds)
            pass->magic = 0;
}

static void dp__scope_unlink(dp_scope *scope) /* under the context's lock */
{
    dp_scope **list = scope->parent != NULL ? &scope->parent->first_child : &scope->ctx->scopes;
    if (scope->prev != NULL)
        scope->prev->next = scope->next;
    else
        *list = scope->next;
    if (scope->next != NULL)
        scope->next->prev = scope->prev;
    dp_scope **replicas = scope->parent != NULL ? scope->parent->replicas : NULL;
    for (int i = 0; replicas != NULL && i < scope->ctx->info.local_count; i++) {
        if (replicas[i] != scope)
            continue;
        replicas[i] = NULL; /* the next dp_run makes another */
        dp__passes_end(scope->parent, DP__PASS_SPREAD);
        dp__passes_end(scope, DP__PASS_INNER);
    }
}

/* Idle scopes for those of `out` that are NULL, as far as there are any. */
static void dp__scopes_reuse(dp_ctx *ctx, dp_scope *parent, dp_scope **out, size_t count)
{
    dp__lock_enter(&ctx->lock);
    for (size_t i = 0; i < count && ctx->idle != NULL; i++) {
        if (out[i] != NULL)
            continue;
        out[i] = ctx->idle;
        ctx->idle = out[i]->next;
        dp__scope_link(out[i], parent);
        out[i]->magic = DP__SCOPE_LIVE;
        out[i]->lost = false;
    }
    dp__lock_leave(&ctx->lock);
}

static dp_scope *dp__scope_make(dp_ctx *ctx, dp_scope *parent)
{
    dp_scope *scope = dp__raw_alloc(ctx, sizeof *scope, _Alignof(dp_scope));
    if (scope == NULL)
        return NULL;
    *scope = (dp_scope){.magic = DP__SCOPE_LIVE, .ctx = ctx};
    dp__lock_enter(&ctx->lock);
    scope->made_before = ctx->all_scopes;
    ctx->all_scopes = scope;
    dp__scope_link(scope, parent);
    dp__lock_leave(&ctx->lock);
    return scope;
}

static dp_scope *dp__scope_open(dp_ctx *ctx, dp_scope *parent)
{
    dp_scope *scope = NULL;
    dp__scopes_reuse(ctx, parent, &scope, 1);
    return scope != NULL ? scope : dp__scope_make(ctx, parent);
}

static dp_scope *dp__scope_try_open(const char *fn, dp_ctx *ctx, dp_scope *parent)
{
    dp_scope *scope = dp__scope_open(ctx, parent);
    if (scope == NULL)
        dp__of_thread.scope_status = dp_error(DP_ERR_NO_MEMORY, "%s: no memory for a scope", fn);
    return scope;
}

DP_API dp_scope *dp_scope_begin(dp_ctx *ctx)
{
    dp__of_thread.scope_status = dp__check_ctx(__func__, ctx);
    if (dp__of_thread.scope_status != DP_OK)
        return NULL;
    return dp__scope_try_open(__func__, ctx, NULL);
}

DP_API dp_status dp_scope_check(const dp_scope *scope)
{
    return dp__check_scope(__func__, scope);
}

DP_API dp_scope *dp_scope_child(dp_scope *parent)
{
    dp__of_thread.scope_status = dp__check_scope(__func__, parent);
    if (dp__of_thread.scope_status != DP_OK)
        return NULL;
    return dp__scope_try_open(__func__, parent->ctx, parent);
}

/* Under the lock. */
static dp_status dp__reads_mark(dp__reads *reads, const dp_device_ops *ops, dp_stream *stream)
{
    bool pending = atomic_load(&reads->marked) != atomic_load(&reads->waited);
    if (pending && reads->stream != stream) /* the event is about to leave that stream */
        DP_TRY(ops->event_wait(stream, reads->done));
    DP_TRY(ops->event_record(reads->done, stream));
    reads->stream = stream;
    atomic_fetch_add(&reads->marked, 1);
    return DP_OK;
}

/* A copy that was enqueued on `stream` reads host memory. One event stands for all such copies of
   the device's compute stream, another for those of other streams. Replicas that share a device
   have threads of their own. */
static dp_status dp__mark_read(dp_ctx *ctx, dp__device *device, dp_stream *stream)
{
    dp__lock_enter(&ctx->lock);
    dp_status status =
        dp__reads_mark(&device->reads[stream == device->stream ? 0 : 1], device->dev->ops, stream);
    dp__lock_leave(&ctx->lock);
    return status;
}

static dp_status dp__wait_marked(const dp__device *device, dp__reads *reads)
{
    unsigned marked = atomic_load(&reads->marked);
    if (marked == atomic_load(&reads->waited))
        return DP_OK;
    DP_TRY(dp__waited(device->dev->ops->event_sync(reads->done)));
    atomic_store(&reads->waited, marked); /* only now: others take it that the wait is over */
    return DP_OK;
}

static void dp__wait_reads(dp_ctx *ctx, dp__device *device)
{
    bool fresh = dp__of_thread.fresh; /* an error may be on its way out past this */
    dp__of_thread.fresh = false;
    dp__of_thread.culprit = 0;
    dp_status status = dp__wait_marked(device, &device->reads[0]);
    if (status == DP_OK)
        status = dp__wait_marked(device, &device->reads[1]);
    if (status == DP_OK)
        dp__of_thread.fresh = fresh;
    (void)dp__leave("dp_scope_end", ctx, status);
}

/* A copy may still read host memory of the scope. */
static void dp__scope_wait_reads(const dp_scope *scope)
{
    dp_ctx *ctx = scope->ctx;
    bool empty = scope->home == NULL && scope->blocks == NULL;
    for (int i = 0; !empty && i < ctx->info.local_count && !dp__has_failed(ctx); i++)
        dp__wait_reads(ctx, &ctx->devices[i]);
}

static void dp__scope_run_deferred(dp_scope *scope)
{
    dp__frame frame = {.what = "a deferred function", .ctx = scope->ctx, .scope = scope};
    dp__frame_enter(&frame);
    while (scope->deferred != NULL) {
        dp__deferred *deferred = scope->deferred;
        scope->deferred = deferred->next;
        deferred->fn(deferred->user);
    }
    (void)dp__frame_leave(&frame, DP_OK);
}

/* What it held is forgotten. */
static void dp__scope_wipe(dp_scope *scope)
{
    dp__blocks_wipe(scope->ctx, scope->blocks);
    dp__blocks_wipe(scope->ctx, scope->home);
    if (scope->home != NULL)
        dp__scope_cut_from(scope, scope->home);
}

/* Ends all that it holds, except the blocks themselves; it has no children any more. When the job
   has failed a device may do what was enqueued at any later time: no memory is touched then. */
static void dp__scope_empty(dp_scope *scope)
{
    scope->magic = DP__SCOPE_ENDING;
    dp__passes_end(scope, DP__PASS_ANY);
    scope->passes = NULL;
    if (scope->deferred != NULL)
        dp__scope_run_deferred(scope);
    dp__scope_wait_reads(scope);
    scope->magic = 0;
    if (!dp__has_failed(scope->ctx))
        dp__scope_wipe(scope);
}

/* For reuse; when the job has failed they are lost. Under the context's lock. */
static void dp__scopes_give(dp_ctx *ctx, dp_scope *scopes)
{
    dp_scope **list = dp__has_failed(ctx) ? &ctx->lost : &ctx->idle;
    while (scopes != NULL) {
        dp_scope *scope = scopes;
        scopes = scope->next;
        if (list == &ctx->idle) {
            dp__blocks_give(ctx, scope->blocks);
            scope->blocks = NULL;
            scope->replicas = NULL;
        }
        scope->next = *list;
        *list = scope;
    }
}

static dp_scope *dp__scope_leaf(dp_scope *scope)
{
    while (scope->first_child != NULL)
        scope = scope->first_child;
    return scope;
}

/* Leaf by leaf, without recursion: chains of children may be long. Scopes inside have no links to
   scopes of other threads, so the lock is taken once for all. The last to end is the first to be
   reused: in a step that repeats itself each scope plays the same part again. NULL is fine. */
static void dp__scope_end(dp_scope *scope)
{
    dp_scope *inside = NULL, **last = &inside;
    if (scope == NULL)
        return;
    for (dp_scope *leaf = dp__scope_leaf(scope); leaf != scope;) {
        dp_scope *parent = leaf->parent;
        dp__scope_empty(leaf);
        dp__scope_unlink(leaf);
        leaf->next = NULL;
        *last = leaf;
        last = &leaf->next;
        leaf = dp__scope_leaf(parent);
    }
    dp__scope_empty(scope);
    dp__lock_enter(&scope->ctx->lock);
    dp__scope_unlink(scope);
    scope->next = NULL;
    dp__scopes_give(scope->ctx, inside);
    dp__scopes_give(scope->ctx, scope);
    dp__lock_leave(&scope->ctx->lock);
}

static dp_status dp__temp_begin(dp_ctx *ctx, dp_scope **out)
{
    *out = dp__scope_open(ctx, NULL);
    return *out != NULL ? DP_OK : dp_error(DP_ERR_NO_MEMORY, "no memory for a scope");
}

/* A call that fails half-way may have left work in any stream that it could use: the compute
   streams and `stream` (or NULL). That work is waited for before its memory is reused; a stream
   that cannot be waited for now has none that runs, and refused what was to come. A failure of the
   JOB class waits for nothing, since no memory is reused after it. */
static dp_status dp__drain(dp_ctx *ctx, dp_stream *stream, dp_status status)
{
    char text[DP__TEXT_BYTES];
    dp_status synced = DP_OK;
    bool fresh = dp__of_thread.fresh;
    if (status == DP_OK || dp_status_class(status) == DP_CLASS_JOB)
        return status;
    memcpy(text, dp__of_thread.text, sizeof text);
    dp__of_thread.fresh = false;
    if (stream != NULL)
        synced = dp__sync(stream);
    for (int i = 0; i < ctx->info.local_count && synced == DP_OK; i++)
        synced = dp__sync(ctx->devices[i].stream);
    if (dp_status_class(synced) == DP_CLASS_JOB)
        return synced;
    memcpy(dp__of_thread.text, text, sizeof text);
    dp__of_thread.fresh = fresh;
    return status;
}

/* End a temporary scope that work on the compute streams and on `stream` (or NULL) used; NULL is
   fine. Work that cannot be waited for keeps its memory: the scope is lost. */
DP__APART static dp_status dp__temp_end(dp_scope *temp, dp_stream *stream, dp_status status)
{
    if (temp == NULL)
        return status;
    status = dp__drain(temp->ctx, stream, status);
    temp->lost = dp_status_class(status) == DP_CLASS_JOB;
    if (!temp->lost)
        dp__scope_end(temp);
    return status;
}

static bool dp__scope_is_inside(const dp_scope *scope, const dp_scope *outer)
{
    while (scope != NULL && scope != outer)
        scope = scope->parent;
    return scope != NULL;
}

/* OK if no function that this thread is in depends on the scope, or on one inside it. */
static dp_status dp__check_scope_idle(const char *fn, const dp_scope *scope)
{
    char text[160];
    for (const dp__frame *frame = dp__of_thread.frames; frame != NULL; frame = frame->outer)
        if (dp__scope_is_inside(frame->scope, scope))
            return dp_error(DP_ERR_STATE, "%s: the scope is in use by %s, which called this", fn,
                            dp__frame_text(frame, text, sizeof text));
    return DP_OK;
}

DP_API void dp_scope_end(dp_scope *scope)
{
    if (scope == NULL || dp__check_scope(__func__, scope) != DP_OK ||
        dp__check_scope_idle(__func__, scope) != DP_OK)
        return;
    dp__scope_end(scope);
}

DP_API void *dp_scope_alloc(dp_scope *scope, size_t bytes)
{
    if (dp__check_scope(__func__, scope) != DP_OK)
        return NULL;
    void *data = dp__scope_bytes(scope, bytes, 64);
    if (data == NULL)
        dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu bytes", __func__, bytes);
    return data;
}

DP_API dp_status dp_scope_defer(dp_scope *scope, void (*fn)(void *user), void *user)
{
    DP_TRY(dp__check_scope(__func__, scope));
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "%s: fn is NULL", __func__);
    dp__deferred *deferred = dp__scope_cut(scope, sizeof *deferred, _Alignof(dp__deferred));
    if (deferred == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory", __func__);
    *deferred = (dp__deferred){scope->deferred, fn, user};
    scope->deferred = deferred;
    return DP_OK;
}

DP_API dp_status dp_scope_attach(dp_scope *parent, dp_scope *scope)
{
    DP_TRY(dp__check_scope(__func__, parent));
    DP_TRY(dp__check_scope(__func__, scope));
    if (parent->ctx != scope->ctx)
        return dp_error(DP_ERR_INVALID, "%s: the scopes are of two contexts", __func__);
    DP_TRY(dp__check_scope_idle(__func__, scope));
    dp__lock_enter(&parent->ctx->lock);
    bool inside = dp__scope_is_inside(parent, scope);
    if (!inside) {
        dp__scope_unlink(scope);
        dp__scope_link(scope, parent);
    }
    dp__lock_leave(&parent->ctx->lock);
    if (inside)
        return dp_error(DP_ERR_INVALID, "%s: parent is scope itself, or inside it", __func__);
    return DP_OK;
}

/* ==== >>checks =================================================================================
   The public edge: what a user passes in is checked once, here. `fn` is the public function's
   name, with which every sentence begins.                                                       */

DP_API dp_status dp_check_scope(const char *fn, const dp_scope *scope, const dp_ctx *ctx)
{
    return ctx != NULL ? dp__check_scope_of(fn, scope, ctx) : dp__check_scope(fn, scope);
}

DP_API dp_status dp_scope_guard(dp_scope *scope, const char *what, dp_status (*fn)(void *user),
                                void *user)
{
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_pointer(__func__, "what", what));
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "%s: fn is NULL", __func__);
    dp__frame frame = {
        .what = what, .ctx = scope->ctx, .scope = scope, .outer = dp__of_thread.frames};
    dp__of_thread.frames = &frame;
    dp_status status = fn(user);
    dp__of_thread.frames = frame.outer;
    return status;
}

static const char *const dp__kinds[] = {"none",    "an error", "a bool",   "an int",
                                        "a float", "a string", "a tensor", "a container",
                                        "a list",  "a tuple",  "a dict",   "an opaque pointer"};

static const char *dp__a_kind(uint8_t kind)
{
    return kind <= DP_OPAQUE ? dp__kinds[kind] : "of no kind";
}

static bool dp__is_float(dp_dtype dtype)
{
    return dtype == DP_F32 || dtype == DP_F64 || dtype == DP_F16 || dtype == DP_BF16;
}

DP_API bool dp_dtype_is_float(dp_dtype dtype)
{
    return dp__is_float(dtype);
}

static bool dp__is_half(dp_dtype dtype)
{
    return dtype == DP_F16 || dtype == DP_BF16;
}

static size_t dp__size_of(const dp_tensor *tensor)
{
    return dp__dtype_sizes[tensor->dtype];
}

/* "a list of 3", "an int" */
DP__COLD static const char *dp__value_text(dp_value value, char *text, size_t bytes)
{
    if (value.kind == DP_LIST || value.kind == DP_TUPLE || value.kind == DP_DICT)
        snprintf(text, bytes, "%s of %u", dp__a_kind(value.kind), (unsigned)value.count);
    else
        snprintf(text, bytes, "%s", dp__a_kind(value.kind));
    return text;
}

static unsigned dp__bits(unsigned mask)
{
    return (unsigned)__builtin_popcount(mask);
}

static const char *dp__s(size_t count) /* the s of a plural, or "" */
{
    return count == 1 ? "" : "s";
}

typedef struct dp__names { /* a list of them in a sentence, as long as it fits */
    char text[192];
    size_t used, count, shown;
} dp__names;

DP__COLD static void dp__names_add(dp__names *names, const char *name)
{
    size_t room = sizeof names->text - names->used;
    int wrote =
        snprintf(names->text + names->used, room, "%s'%s'", names->count > 0 ? ", " : "", name);
    bool fits = wrote > 0 && (size_t)wrote < room && names->shown == names->count;
    names->used += fits ? (size_t)wrote : 0;
    names->shown += fits;
    names->count++;
    names->text[names->used] = '\0';
}

DP__COLD static dp__names dp__keys_of(dp_value dict)
{
    dp__names names = {.count = 0};
    for (uint32_t i = 0; dict.kind == DP_DICT && i < dict.count; i++)
        dp__names_add(&names, dict.as.pairs[i].key);
    return names;
}

/* There is nothing of this name: the sentence ends with the names that there are. */
DP_PRINTF(3, 4)
DP__COLD static dp_status dp__no_such(dp_status status, const dp__names *names, const char *format,
                                      ...)
{
    char text[DP__TEXT_BYTES], more[48] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (names->count > names->shown)
        snprintf(more, sizeof more, " and %zu more", names->count - names->shown);
    return dp_error(status, "%s; there %s %s%s", text, names->count == 1 ? "is" : "are",
                    names->count > 0 ? names->text : "none", more);
}

static dp_status dp__check_dtype(const char *fn, dp_dtype dtype)
{
    if ((unsigned)dtype >= DP_DTYPE_COUNT)
        return dp_error(DP_ERR_INVALID, "%s: %d is not a dtype", fn, (int)dtype);
    return DP_OK;
}

/* Bytes of a shape, in which a size of 0 counts as 1; false when they cannot be counted. */
static bool dp__shape_bytes(int ndim, const int64_t *shape, size_t size, size_t *out)
{
    bool fits = true;
    *out = size;
    for (int i = 0; i < ndim; i++)
        fits = fits && (shape[i] == 0 || dp__mul(*out, (size_t)shape[i], out));
    return fits && *out <= INT64_MAX / 2;
}

/* Sizes are not negative and their bytes can be counted; out_count: elements. */
static dp_status dp__check_shape(const char *fn, dp_dtype dtype, int ndim, const int64_t *shape,
                                 int64_t *out_count)
{
    size_t bytes = 0;
    bool empty = false;
    DP_TRY(dp__check_dtype(fn, dtype));
    if (ndim < 0 || ndim > DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "%s: %d dims, a tensor has 0 to %d", fn, ndim, DP_MAX_DIMS);
    if (ndim > 0)
        DP_TRY(dp__check_pointer(fn, "shape", shape));
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return dp_error(DP_ERR_INVALID, "%s: size %lld of dim %d is negative", fn,
                            (long long)shape[i], i);
        empty |= shape[i] == 0;
    }
    if (!dp__shape_bytes(ndim, shape, dp__dtype_sizes[dtype], &bytes))
        return dp_error(DP_ERR_INVALID, "%s: the shape has more elements than can be counted", fn);
    *out_count = empty ? 0 : (int64_t)(bytes / dp__dtype_sizes[dtype]);
    return DP_OK;
}

/* Bytes from the first element to the end of the last; false when they cannot be counted. */
static bool dp__extent(int ndim, const int64_t *shape, const int64_t *stride, size_t size,
                       size_t *out)
{
    size_t last = 0, step = 0;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == 0) {
            *out = 0;
            return true;
        }
        if (!dp__mul((size_t)(shape[i] - 1), (size_t)stride[i], &step) ||
            __builtin_add_overflow(last, step, &last))
            return false;
    }
    return !__builtin_add_overflow(last, (size_t)1, &last) && dp__mul(last, size, out) &&
           *out <= INT64_MAX / 2;
}

/* Returns a tensor that every check refuses, in place of one that could not be given: with the
   status of the last error, and a mark of its sentence. */
static dp_tensor dp__no_tensor(void)
{
    const char *text = dp__of_thread.text;
    return (dp_tensor){.dtype = DP_DTYPE_ANY,
                       .shape = {(int64_t)dp__hash(dp__hash_first, text, strlen(text))},
                       .reserved = {(uint8_t)-dp__of_thread.status}};
}

/* Fails as the call did that could not give the tensor. Its sentence may have been replaced. */
DP__COLD static dp_status dp__refuse_no_tensor(const char *fn, const char *what,
                                               const dp_tensor *none)
{
    dp_status status = (dp_status)-none->reserved[0];
    const char *text = dp__of_thread.text;
    if ((int64_t)dp__hash(dp__hash_first, text, strlen(text)) != none->shape[0])
        text = dp_status_text(status);
    return dp_error(status, "%s: there is no %s: %s", fn, what, text);
}

static dp_status dp__check_tensor(const char *fn, const char *what, const dp_tensor *tensor)
{
    size_t bytes = 0, reach = 0;
    DP_TRY(dp__check_pointer(fn, what, tensor));
    if (tensor->dtype == DP_DTYPE_ANY && tensor->reserved[0] != 0)
        return dp__refuse_no_tensor(fn, what, tensor);
    if (tensor->dtype >= DP_DTYPE_COUNT || tensor->ndim > DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "%s: %s is not a tensor (dtype %d, %d dim%s)", fn, what,
                        tensor->dtype, tensor->ndim, dp__s(tensor->ndim));
    for (int i = 0; i < tensor->ndim; i++)
        if ((tensor->shape[i] | tensor->stride[i]) < 0)
            return dp_error(DP_ERR_INVALID, "%s: %s has size %lld and stride %lld in dim %d", fn,
                            what, (long long)tensor->shape[i], (long long)tensor->stride[i], i);
    if (!dp__shape_bytes(tensor->ndim, tensor->shape, dp__size_of(tensor), &bytes))
        return dp_error(DP_ERR_INVALID, "%s: %s has more elements than can be counted", fn, what);
    if (!dp__extent(tensor->ndim, tensor->shape, tensor->stride, dp__size_of(tensor), &reach))
        return dp_error(DP_ERR_INVALID, "%s: the strides of %s reach too far", fn, what);
    if (tensor->data == NULL && reach > 0)
        return dp_error(DP_ERR_INVALID, "%s: %s has %zu element%s and no data", fn, what,
                        bytes / dp__size_of(tensor), dp__s(bytes / dp__size_of(tensor)));
    return DP_OK;
}

static dp_status dp__check_dim(const char *fn, int dim, int ndim, int *out)
{
    if (dim < -ndim || dim >= ndim)
        return dp_error(DP_ERR_INVALID, "%s: dim %d is out of range for %d dim%s", fn, dim, ndim,
                        dp__s((size_t)ndim));
    *out = dim < 0 ? dim + ndim : dim;
    return DP_OK;
}

typedef struct dp__path { /* where a walk is, from the leaf outwards; for sentences */
    const struct dp__path *outer;
    const char *key; /* NULL: index */
    size_t index;
} dp__path;

static const char *dp__path_text(const dp__path *path, char *text, size_t bytes)
{
    const dp__path *trail[DP_MAX_DEPTH + 2];
    size_t depth = 0, used = 0;
    text[0] = '\0';
    for (; path != NULL && depth < DP_MAX_DEPTH + 2; path = path->outer)
        trail[depth++] = path;
    while (depth > 0 && used + 1 < bytes) {
        const dp__path *step = trail[--depth];
        used = step->key != NULL ? dp__append(text, bytes, used, "['%s']", step->key)
                                 : dp__append(text, bytes, used, "[%zu]", step->index);
    }
    if (used == 0)
        snprintf(text, bytes, "the value");
    return text;
}

/* An error whose sentence begins with a place. */
DP_PRINTF(3, 4)
DP__COLD static dp_status dp__path_error(dp_status status, const dp__path *path, const char *format,
                                         ...)
{
    char where[160], text[DP__TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return dp_error(status, "%s%s", dp__path_text(path, where, sizeof where), text);
}

static bool dp__is_zero_or_one(const void *byte) /* any other cannot be read as a bool */
{
    return *(const unsigned char *)byte <= 1;
}

/* Its kind exists, and what it points to is there. */
static bool dp__is_whole(dp_value value)
{
    switch ((dp_kind)value.kind) {
    case DP_BOOLEAN:
        return dp__is_zero_or_one(&value.as);
    case DP_STRING:
    case DP_TENSOR:
        return value.as.p != NULL;
    case DP_CONTAINER:
        return value.as.p != NULL && dp__is_zero_or_one(&value.as.c->stack) &&
               dp__is_zero_or_one(&value.as.c->cpu_only);
    case DP_LIST:
    case DP_TUPLE:
    case DP_DICT:
        return value.as.p != NULL || value.count == 0;
    case DP_NONE:
    case DP_ERROR:
    case DP_INT:
    case DP_FLOAT:
    case DP_OPAQUE:
        return true;
    }
    return false;
}

/* Tensors, containers, lists, tuples and dicts that were made by a constructor carry a mark: a
   flag, and a number that depends on everything else in the value. So one that was changed, or made
   by hand, is recognised as such, whatever is in `reserved`. */
enum { DP__PLAIN_TREE = 1, DP__LIST_OF_OUTPUTS = 2, DP__FLAGS = 3 };

static dp_value dp__marked(dp_value value, unsigned flag)
{
    uint64_t rest = (uint64_t)value.count << 32 | (uint64_t)value.kind << 24 |
                    (uint64_t)value.depth << 16 | flag << 8;
    uint64_t mix = ((uintptr_t)value.as.p + rest) * 0x9e3779b97f4a7c15u;
    value.status = (int8_t)(mix >> 56);
    value.reserved = (uint8_t)((mix >> 48 & 0x78) | 4 | flag); /* neither 0 nor 0xff */
    return value;
}

static bool dp__is_marked(dp_value value)
{
    if (value.reserved == 0) /* as in leaves */
        return false;
    dp_value again = dp__marked(value, value.reserved & DP__FLAGS);
    return again.reserved == value.reserved && again.status == value.status;
}

static bool dp__has_flag(dp_value value, unsigned flag)
{
    return (value.reserved & DP__FLAGS) == flag && dp__is_marked(value);
}

/* What is wrong with a value itself, apart from what is in it. `path` leads to it from `what`. */
DP__COLD static dp_status dp__value_error(const char *fn, const char *what, dp_value value,
                                          const dp__path *path)
{
    char where[160], name[224];
    dp_status status = (dp_status)value.status;
    snprintf(name, sizeof name, "%s%s", what,
             path != NULL ? dp__path_text(path, where, sizeof where) : "");
    if (value.kind == DP_TENSOR && value.as.t != NULL && value.depth <= DP_MAX_DEPTH)
        return dp__check_tensor(fn, name, value.as.t);
    if (value.kind != DP_ERROR)
        return dp_error(DP_ERR_INVALID, "%s: %s is not a value (kind %d, depth %d)", fn, name,
                        value.kind, value.depth);
    if (dp_status_class(status) != DP_CLASS_CALL && status != DP_ERR_NO_MEMORY)
        status = DP_ERR_INVALID;
    return dp_error(status, "%s: %s: %s", fn, name,
                    value.as.s != NULL ? value.as.s : "an error value");
}

/* All of it, but for what is in a container, list, tuple or dict. */
static dp_status dp__check_leaf(const char *fn, const char *what, dp_value value,
                                const dp__path *path)
{
    bool good = value.kind != DP_ERROR && dp__is_whole(value) && value.depth <= DP_MAX_DEPTH;
    if (!good || (value.kind == DP_TENSOR && dp__check_tensor(fn, what, value.as.t) != DP_OK))
        return dp__value_error(fn, what, value, path);
    return DP_OK;
}

static bool dp__same_device(dp_device a, dp_device b)
{
    return a.backend == b.backend && a.index == b.index;
}

/* The device that a tensor names: the host, or a local one. */
DP__APART static dp__device *dp__device_of(dp_ctx *ctx, dp_device id)
{
    if (dp__same_device(id, ctx->host_device.id))
        return &ctx->host_device;
    if (id.index < 0 || id.index >= ctx->info.local_count)
        return NULL;
    return id.backend == ctx->devices[0].id.backend ? &ctx->devices[id.index] : NULL;
}

DP__APART static dp_status dp__check_device(const char *fn, dp_ctx *ctx, dp_device id,
                                            dp__device **out)
{
    *out = dp__device_of(ctx, id);
    if (*out == NULL)
        return dp_error(DP_ERR_INVALID, "%s: {%d, %d} is not a device of this context", fn,
                        (int)id.backend, (int)id.index);
    return *out == &ctx->host_device ? DP_OK : dp__check_own(fn, ctx, (int)id.index);
}

static bool dp__is_local_rank(const dp_ctx *ctx, int local_rank)
{
    return local_rank >= 0 && local_rank < ctx->info.local_count;
}

DP__APART static dp_status dp__check_rank(const char *fn, const dp_ctx *ctx, const char *what,
                                          int local_rank)
{
    if (!dp__is_local_rank(ctx, local_rank))
        return dp_error(DP_ERR_INVALID, "%s: %s is %d, the context has %d device%s", fn, what,
                        local_rank, ctx->info.local_count, dp__s((size_t)ctx->info.local_count));
    return DP_OK;
}

/* Asks tables that can tell. NULL is for the caller to check. */
static dp_status dp__check_owned(const char *fn, const char *what, const dp__device *device,
                                 const void *data)
{
    const dp_device_ops *ops = device->dev->ops;
    if (data == NULL || !DP_HAS(dp_device_ops, ops, owns) || ops->owns(device->dev, data))
        return DP_OK;
    return dp_error(DP_ERR_INVALID,
                    "%s: %s of local rank %d is %p, which is not memory of that device", fn, what,
                    device->local_rank, data);
}

/* ==== >>views ====================================================================================
   Views: arithmetic on shapes and strides. Nothing here touches data.                           */

static const int dp__order_rows[DP_MAX_DIMS] = {0, 1, 2, 3, 4, 5, 6, 7};
static const int dp__order_nhwc[4] = {0, 2, 3, 1}, dp__order_ndhwc[5] = {0, 2, 3, 4, 1};

/* Walking the dims in this order meets the elements one after another. */
static void dp__make_dense_in(dp_tensor *tensor, const int *order)
{
    int64_t step = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        int dim = order[i];
        tensor->stride[dim] = step;
        step *= tensor->shape[dim] > 0 ? tensor->shape[dim] : 1;
    }
}

DP__APART static dp_tensor dp__tensor_like(void *data, dp_device device, dp_dtype dtype, int ndim,
                                           const int64_t *shape)
{
    dp_tensor tensor = {
        .data = data, .device = device, .dtype = (uint8_t)dtype, .ndim = (uint8_t)ndim};
    for (int i = 0; i < ndim; i++)
        tensor.shape[i] = shape[i];
    dp__make_dense_in(&tensor, dp__order_rows);
    return tensor;
}

static dp_tensor dp__flat(void *data, dp_device device, dp_dtype dtype, int64_t count)
{
    return dp__tensor_like(data, device, dtype, 1, &count);
}

DP__APART static int64_t dp__count(const dp_tensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

static size_t dp__bytes(const dp_tensor *tensor)
{
    return (size_t)dp__count(tensor) * dp__size_of(tensor);
}

static size_t dp__span(const dp_tensor *tensor)
{
    size_t bytes = 0;
    return dp__extent(tensor->ndim, tensor->shape, tensor->stride, dp__size_of(tensor), &bytes)
               ? bytes
               : 0;
}

DP_API int64_t dp_tensor_count(const dp_tensor *tensor)
{
    return dp__check_tensor(__func__, "tensor", tensor) == DP_OK ? dp__count(tensor) : -1;
}

/* As dp__make_dense_in makes it. */
DP__APART static bool dp__is_dense_in(const dp_tensor *tensor, const int *order)
{
    int64_t step = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        int dim = order[i];
        if (tensor->shape[dim] == 0)
            return true;
        if (tensor->shape[dim] != 1 && tensor->stride[dim] != step)
            return false;
        step *= tensor->shape[dim];
    }
    return true;
}

static bool dp__is_dense(const dp_tensor *tensor)
{
    return dp__is_dense_in(tensor, dp__order_rows);
}

DP_API bool dp_is_contiguous(const dp_tensor *tensor)
{
    return dp__check_tensor(__func__, "tensor", tensor) == DP_OK && dp__is_dense(tensor);
}

static bool dp__is_channels_last(const dp_tensor *tensor)
{
    if (tensor->ndim == 4)
        return !dp__is_dense(tensor) && dp__is_dense_in(tensor, dp__order_nhwc);
    return tensor->ndim == 5 && !dp__is_dense(tensor) && dp__is_dense_in(tensor, dp__order_ndhwc);
}

static void dp__make_channels_last(dp_tensor *tensor)
{
    dp__make_dense_in(tensor, tensor->ndim == 4 ? dp__order_nhwc : dp__order_ndhwc);
}

static dp_tensor dp__wrap_host(const char *fn, void *data, dp_dtype dtype, int ndim,
                               const int64_t *shape)
{
    int64_t count = 0;
    if (dp__check_shape(fn, dtype, ndim, shape, &count) != DP_OK)
        return dp__no_tensor();
    return dp__tensor_like(data, (dp_device){0, 0}, dtype, ndim, shape);
}

DP_API dp_tensor dp_wrap(void *data, dp_dtype dtype, int ndim, const int64_t *shape)
{
    return dp__wrap_host(__func__, data, dtype, ndim, shape);
}

DP_API dp_tensor dp_wrap_const(const void *data, dp_dtype dtype, int ndim, const int64_t *shape)
{
    dp_tensor tensor = dp__wrap_host(__func__, (void *)(uintptr_t)data, dtype, ndim, shape);
    tensor.read_only = true;
    return tensor;
}

/* `first` and `count` are in range. */
static void dp__narrow_here(dp_tensor *view, int dim, int64_t first, int64_t count)
{
    view->shape[dim] = count;
    if (view->data != NULL && count > 0)
        view->data = (char *)view->data + (size_t)(first * view->stride[dim]) * dp__size_of(view);
}

static dp_tensor dp__narrow(const dp_tensor *tensor, int dim, int64_t first, int64_t count)
{
    dp_tensor view = *tensor;
    dp__narrow_here(&view, dim, first, count);
    return view;
}

DP_API dp_status dp_narrow(const dp_tensor *tensor, int dim, int64_t first, int64_t count,
                           dp_tensor *out)
{
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_dim(__func__, dim, tensor->ndim, &dim));
    if (first < 0 || count < 0 || first > tensor->shape[dim] || count > tensor->shape[dim] - first)
        return dp_error(DP_ERR_INVALID, "%s: %lld elements from %lld on, dim %d has %lld", __func__,
                        (long long)count, (long long)first, dim, (long long)tensor->shape[dim]);
    *out = dp__narrow(tensor, dim, first, count);
    return DP_OK;
}

DP_API dp_status dp_select(const dp_tensor *tensor, int dim, int64_t index, dp_tensor *out)
{
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_dim(__func__, dim, tensor->ndim, &dim));
    if (index < 0 || index >= tensor->shape[dim])
        return dp_error(DP_ERR_INVALID, "%s: index %lld, dim %d has %lld", __func__,
                        (long long)index, dim, (long long)tensor->shape[dim]);
    dp_tensor view = dp__narrow(tensor, dim, index, 1);
    view.ndim--;
    for (int i = dim; i < view.ndim; i++) {
        view.shape[i] = view.shape[i + 1];
        view.stride[i] = view.stride[i + 1];
    }
    view.shape[view.ndim] = view.stride[view.ndim] = 0;
    *out = view;
    return DP_OK;
}

DP_API dp_status dp_transpose(const dp_tensor *tensor, int dim_a, int dim_b, dp_tensor *out)
{
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_dim(__func__, dim_a, tensor->ndim, &dim_a));
    DP_TRY(dp__check_dim(__func__, dim_b, tensor->ndim, &dim_b));
    dp_tensor view = *tensor;
    view.shape[dim_a] = tensor->shape[dim_b];
    view.shape[dim_b] = tensor->shape[dim_a];
    view.stride[dim_a] = tensor->stride[dim_b];
    view.stride[dim_b] = tensor->stride[dim_a];
    *out = view;
    return DP_OK;
}

/* Fill in a size of -1, and check that the new shape has as many elements. */
static dp_status dp__infer_shape(const char *fn, const dp_tensor *tensor, int ndim,
                                 const int64_t *shape, int64_t *out_shape)
{
    int64_t known = 0, count = dp__count(tensor);
    int open = -1;
    if (ndim < 0 || ndim > DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "%s: %d dims, a tensor has 0 to %d", fn, ndim, DP_MAX_DIMS);
    if (ndim > 0)
        DP_TRY(dp__check_pointer(fn, "shape", shape));
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == -1 && open >= 0)
            return dp_error(DP_ERR_INVALID, "%s: dims %d and %d are both -1", fn, open, i);
        out_shape[i] = shape[i] == -1 ? 1 : shape[i];
        open = shape[i] == -1 ? i : open;
    }
    DP_TRY(dp__check_shape(fn, (dp_dtype)tensor->dtype, ndim, out_shape, &known));
    if (open >= 0 && known > 0 && count % known == 0)
        out_shape[open] = count / known;
    else if (open >= 0 || known != count)
        return dp_error(DP_ERR_INVALID, "%s: %lld element%s cannot fill the new shape", fn,
                        (long long)count, dp__s((size_t)count));
    return DP_OK;
}

/* Match runs of old dims with runs of new ones of as many elements; an old run can be cut anew only
   if it lies in memory as one dim. The tensor is not empty, and the view has as many elements. */
static bool dp__restride(const dp_tensor *tensor, dp_tensor *view)
{
    int64_t shape[DP_MAX_DIMS], stride[DP_MAX_DIMS];
    int old_count = 0, old = 0, new = 0;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 1)
            continue;
        shape[old_count] = tensor->shape[i];
        stride[old_count++] = tensor->stride[i];
    }
    while (old < old_count) {
        int64_t have = shape[old++], want = view->shape[new];
        int first = new ++;
        while (have != want) {
            if (want < have) {
                want *= view->shape[new ++];
                continue;
            }
            if (stride[old - 1] != stride[old] * shape[old])
                return false;
            have *= shape[old++];
        }
        view->stride[new - 1] = stride[old - 1];
        for (int i = new - 1; i > first; i--)
            view->stride[i - 1] = view->stride[i] * view->shape[i];
    }
    for (; new < view->ndim; new ++)
        view->stride[new] = 1;
    return true;
}

DP_API dp_status dp_reshape(const dp_tensor *tensor, int ndim, const int64_t *shape, dp_tensor *out)
{
    int64_t sizes[DP_MAX_DIMS] = {0};
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__infer_shape(__func__, tensor, ndim, shape, sizes));
    dp_tensor view =
        dp__tensor_like(tensor->data, tensor->device, (dp_dtype)tensor->dtype, ndim, sizes);
    view.read_only = tensor->read_only;
    if (dp__count(tensor) > 0 && !dp__is_dense(tensor) && !dp__restride(tensor, &view))
        return dp_error(DP_ERR_INVALID,
                        "%s: no strides give the new shape: call dp_contiguous first", __func__);
    *out = view;
    return DP_OK;
}

static dp_status dp__tensor_make(dp_scope *scope, const dp__device *device, dp_dtype dtype,
                                 int ndim, const int64_t *shape, dp_tensor *out)
{
    dp_tensor tensor = dp__tensor_like(NULL, device->id, dtype, ndim, shape);
    size_t bytes = dp__bytes(&tensor);
    dp__pool *pool = (dp__pool *)(uintptr_t)&device->pool;
    if (device->local_rank < 0)
        pool = &scope->ctx->pinned_pool;
    if (bytes <= DP__SMALL_BYTES && dp__pool_is_host(pool) && pool->source != DP__FROM_HOST_ALLOC) {
        tensor.data = dp__scope_cut(scope, bytes > 0 ? bytes : 1, 64);
        if (tensor.data == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
    } else {
        DP_TRY(dp__scope_block(scope, pool, bytes, &tensor.data));
    }
    *out = tensor;
    return DP_OK;
}

/* Of the same dtype and shape, dense. */
static dp_status dp__tensor_as(dp_scope *scope, const dp__device *device, const dp_tensor *like,
                               dp_tensor *out)
{
    return dp__tensor_make(scope, device, (dp_dtype)like->dtype, like->ndim, like->shape, out);
}

/* Memory of a CPU device that the other processes of the machine see, or may come to see, as the
   pool says; if they can see any. */
static dp_status dp__shared_make(dp_scope *scope, const dp__device *device, dp__pool *pool,
                                 size_t bytes, dp_tensor *out)
{
    dp_ctx *ctx = scope->ctx;
    int64_t count = (int64_t)bytes;
    bool seen = ctx->world.heap.shared != NULL ||
                (pool == &ctx->page_pool && ctx->info.machine_count > 1);
    if (!seen || device->dev->ops != ctx->host_device.dev->ops)
        return dp__tensor_make(scope, device, DP_U8, 1, &count, out);
    *out = dp__tensor_like(NULL, device->id, DP_U8, 1, &count);
    return dp__scope_block(scope, pool, bytes, &out->data);
}

DP_API void *dp_shared_alloc(dp_scope *scope, size_t bytes)
{
    void *data = NULL;
    if (dp__check_scope(__func__, scope) != DP_OK)
        return NULL;
    if (scope->ctx->world.heap.shared == NULL)
        data = dp__scope_bytes(scope, bytes, 64);
    else
        (void)dp__scope_block(scope, &scope->ctx->shared_pool, bytes, &data);
    if (data == NULL)
        dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu bytes", __func__, bytes);
    return data;
}

DP_API dp_status dp_tensor_new(dp_scope *scope, dp_device device, dp_dtype dtype, int ndim,
                               const int64_t *shape, dp_tensor *out)
{
    int64_t count = 0;
    dp__device *owner = NULL;
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_ctx(__func__, scope->ctx));
    DP_TRY(dp__check_shape(__func__, dtype, ndim, shape, &count));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_device(__func__, scope->ctx, device, &owner));
    return dp__leave(__func__, scope->ctx, dp__tensor_make(scope, owner, dtype, ndim, shape, out));
}

/* Walks over as many rows at a time as `most` bytes hold; a larger row is a tensor with a dim
   less. */
static dp_status dp__tensor_pieces(const dp_tensor *tensor, size_t most, dp_piece_fn fn, void *user)
{
    size_t bytes = dp__bytes(tensor);
    if (bytes <= most)
        return fn(tensor, bytes, user);
    int64_t rows = tensor->shape[0], each = (int64_t)(most / (bytes / (size_t)rows));
    for (int64_t first = 0; first<rows; first += each> 0 ? each : 1) {
        dp_tensor part;
        if (each == 0)
            DP_TRY(dp_select(tensor, 0, first, &part));
        else
            DP_TRY(dp_narrow(tensor, 0, first, each < rows - first ? each : rows - first, &part));
        DP_TRY(dp__tensor_pieces(&part, most, fn, user));
    }
    return DP_OK;
}

DP_API dp_status dp_tensor_pieces(const dp_tensor *tensor, size_t most, dp_piece_fn fn, void *user)
{
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    if (most < dp__size_of(tensor))
        return dp_error(DP_ERR_INVALID, "%s: %zu bytes do not hold an element of %s", __func__,
                        most, dp__dtype_names[tensor->dtype]);
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "%s: fn is NULL", __func__);
    return dp__tensor_pieces(tensor, most, fn, user);
}

/* ==== >>kernels ================================================================================
   A kernel on a device, by its table if that can, else by the host: where the data is, if the host
   reaches it, or on copies of it.                                                               */

static bool dp__is_host(const dp__device *device)
{
    return device->info.host_memory;
}

static bool dp__all_are_host(const dp_ctx *ctx)
{
    bool host = true;
    for (int i = 0; i < ctx->info.local_count && host; i++)
        host = dp__is_host(&ctx->devices[i]);
    return host;
}

/* Whether the host reaches the memory once nothing that is enqueued uses it. */
static bool dp__is_reached(const dp__device *device)
{
    return device->info.host_memory || device->info.unified;
}

/* Whether work on one may use the memory of the other directly, in the order of streams. */
static bool dp__reaches(const dp__device *a, const dp__device *b)
{
    bool together = a->info.memory != 0 && a->info.memory == b->info.memory;
    return a == b || (dp__is_host(a) && dp__is_host(b)) || (together && a->dev->ops == b->dev->ops);
}

/* The host's own stand-in when a device has no kernel of this kind. */
static dp_status dp__kernel_on_host(dp_ctx *ctx, const dp_kernel_args *args)
{
    const dp__device *host = &ctx->host_device;
    return host->dev->ops->kernel(host->stream, args);
}

/* Of one output and one input; NULL: it has none. */
static dp_kernel_args dp__kernel_args(dp_kernel kernel, dp_dtype dtype, size_t count,
                                      void *const *out, const void *const *in)
{
    return (dp_kernel_args){.kernel = kernel,
                            .dtype = dtype,
                            .in_dtype = dtype,
                            .count = count,
                            .out = out,
                            .in = in,
                            .out_count = 1,
                            .in_count = in != NULL};
}

static bool dp__is_update(const dp_kernel_args *args)
{
    return args->kernel == DP_KERNEL_SGD || args->kernel == DP_KERNEL_ADAMW;
}

static bool dp__makes_sums(const dp_kernel_args *args)
{
    return args->kernel == DP_KERNEL_STATS || args->kernel == DP_KERNEL_TOTAL ||
           args->kernel == DP_KERNEL_CHANNELS;
}

/* Bytes of an element. Sums and gates are f64; the state of an update is f32, f64 for f64. */
static size_t dp__operand_size(const dp_kernel_args *args, bool input, size_t place)
{
    if (input ? dp__is_update(args) && place > 0 : dp__makes_sums(args))
        return sizeof(double);
    if (dp__is_update(args) && place > 0)
        return args->dtype == DP_F64 ? sizeof(double) : sizeof(float);
    return dp__dtype_sizes[input && args->kernel == DP_KERNEL_CAST ? args->in_dtype : args->dtype];
}

static size_t dp__operand_bytes(const dp_kernel_args *args, bool input, size_t place)
{
    const int64_t *shape = input && args->kernel == DP_KERNEL_PAD ? args->in_shape : args->shape;
    const int64_t *stride = input ? args->in_stride : args->out_stride;
    size_t size = dp__operand_size(args, input, place), bytes = 0;
    if (!input && dp__makes_sums(args))
        return args->kernel == DP_KERNEL_STATS      ? 2 * size
               : args->kernel == DP_KERNEL_CHANNELS ? 2 * (size_t)args->shape[1] * size
                                                    : size;
    if (input && dp__is_update(args) && place > 0)
        return 2 * size;
    if (args->kernel != DP_KERNEL_COPY && !(input && args->kernel == DP_KERNEL_PAD))
        return args->count * size;
    return dp__extent(args->ndim, shape, stride, size, &bytes) ? bytes : 0;
}

static size_t dp__set_count(const dp_kernel_args *args)
{
    return args->set_count > 0 ? args->set_count : 1;
}

/* What is asked for of one set. */
static dp_kernel_args dp__set_of(const dp_kernel_args *args, size_t place)
{
    dp_kernel_args set = *args;
    if (args->set_count > 0) {
        set.count = args->counts[place];
        set.out = args->out + place * args->out_count;
        set.in = args->in + place * args->in_count;
        set.set_count = 0;
    }
    return set;
}

static bool dp__zeroes_grad(const dp_kernel_args *args)
{
    return dp__is_update(args) && (args->flags & DP_KERNEL_ZERO_GRAD) != 0;
}

/* Returns true if the kernel of a device can make gradients 0 as it steps. */
static bool dp__knows_zero_grad(const dp__device *device)
{
    const dp_device_ops *ops = device->dev->ops;
    return DP_HAS(dp_device_ops, ops, kernel_flags) &&
           (ops->kernel_flags & DP_KERNEL_ZERO_GRAD) != 0;
}

/* Every operand begins at a multiple of its element's size. */
static bool dp__operands_aligned(const dp_kernel_args *args)
{
    uintptr_t off = 0;
    for (size_t i = 0; i < args->in_count; i++)
        off |= (uintptr_t)args->in[i] % dp__operand_size(args, true, i);
    for (size_t i = 0; i < args->out_count; i++)
        off |= (uintptr_t)args->out[i] % dp__operand_size(args, false, i);
    return off == 0;
}

/* Returns true if a table's own kernel may be given this. A GPU faults where an operand is not
   aligned to its element. */
static bool dp__kernel_fits(const dp__device *device, const dp_kernel_args *args)
{
    return DP_HAS(dp_device_ops, device->dev->ops, kernel) && dp__operands_aligned(args) &&
           (!dp__zeroes_grad(args) || dp__knows_zero_grad(device));
}

/* Bring the operands to the host, compute there, bring the results back. Outputs come along too,
   since a strided one has gaps. Everything is done when this returns. */
static dp_status dp__kernel_bounced(dp_ctx *ctx, dp_scope *temp, const dp__device *device,
                                    dp_stream *stream, const dp_kernel_args *args)
{
    const dp_device_ops *ops = device->dev->ops;
    dp_kernel_args local = *args;
    void **ins = dp__scope_bytes(temp, args->in_count * sizeof *ins, 64);
    void **outs = dp__scope_bytes(temp, args->out_count * sizeof *outs, 64);
    if (ins == NULL || outs == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory to compute on the host");
    for (size_t i = 0; i < args->in_count; i++) {
        size_t bytes = dp__operand_bytes(args, true, i);
        DP_TRY(dp__scope_block(temp, &ctx->pinned_pool, bytes, &ins[i]));
        DP_TRY(ops->copy_out(stream, ins[i], args->in[i], bytes));
    }
    for (size_t i = 0; i < args->out_count; i++) {
        size_t bytes = dp__operand_bytes(args, false, i);
        DP_TRY(dp__scope_block(temp, &ctx->pinned_pool, bytes, &outs[i]));
        DP_TRY(ops->copy_out(stream, outs[i], args->out[i], bytes));
    }
    DP_TRY(dp__sync(stream));
    local.in = (const void *const *)ins;
    local.out = outs;
    DP_TRY(dp__kernel_on_host(ctx, &local));
    for (size_t i = 0; i < args->out_count; i++)
        DP_TRY(ops->copy_in(stream, args->out[i], outs[i], dp__operand_bytes(args, false, i)));
    if (dp__zeroes_grad(args))
        DP_TRY(ops->copy_in(stream, (void *)(uintptr_t)args->in[0], ins[0],
                            dp__operand_bytes(args, true, 0)));
    return dp__sync(stream);
}

/* Runs a kernel: a table's own, or the host's, which take everything. */
static dp_status dp__kernel_one(dp_ctx *ctx, const dp__device *device, dp_stream *stream,
                                const dp_kernel_args *args)
{
    dp_status status = DP_ERR_UNSUPPORTED;
    if (args->count == 0)
        return DP_OK;
    if (args->in_count > DP__OPERANDS_MAX)
        return dp_error(DP_ERR_UNSUPPORTED, "%zu parts to add up, more than %d", args->in_count,
                        DP__OPERANDS_MAX);
    if (dp__kernel_fits(device, args))
        status = device->dev->ops->kernel(stream, args);
    if (status != DP_ERR_UNSUPPORTED)
        return status;
    if (dp__is_reached(device)) {
        DP_TRY(dp__sync(stream));
        return dp__kernel_on_host(ctx, args);
    }
    dp_scope *temp = NULL;
    DP_TRY(dp__temp_begin(ctx, &temp));
    return dp__temp_end(temp, stream, dp__kernel_bounced(ctx, temp, device, stream, args));
}

/* Whether the device's table may be given all sets at once. */
static bool dp__sets_fit(const dp__device *device, const dp_kernel_args *args)
{
    const dp_device_ops *ops = device->dev->ops;
    bool fit = DP_HAS(dp_device_ops, ops, takes_sets);
    for (size_t i = 0; i < dp__set_count(args) && fit; i++) {
        const dp_kernel_args set = dp__set_of(args, i);
        fit = set.count > 0 && dp__kernel_fits(device, &set);
    }
    return fit;
}

static dp_status dp__kernel(dp_ctx *ctx, const dp__device *device, dp_stream *stream,
                            const dp_kernel_args *args)
{
    if (args->set_count == 0)
        return dp__kernel_one(ctx, device, stream, args);
    if (dp__sets_fit(device, args)) {
        dp_status status = device->dev->ops->kernel(stream, args);
        if (status != DP_ERR_UNSUPPORTED)
            return status;
    }
    for (size_t i = 0; i < args->set_count; i++) {
        const dp_kernel_args set = dp__set_of(args, i);
        DP_TRY(dp__kernel_one(ctx, device, stream, &set));
    }
    return DP_OK;
}

/* ==== >>copy ===================================================================================
   From any strides on any device to any strides on any other. Devices that the host reaches copy
   with their kernel; the rest with the table's copies, in runs of bytes that lie together on both
   sides, or packed through the host. Work is ordered on the writing device's stream. */

typedef enum dp__way { DP__WAY_IN, DP__WAY_OUT, DP__WAY_INSIDE } dp__way;

typedef struct dp__copy { /* one copy by a table, both sides as merged dims, innermost last */
    dp__way way;
    const dp__device *device;
    dp_stream *stream;
    size_t run; /* bytes that lie together on both sides */
    int ndim;
    int64_t shape[DP_MAX_DIMS];
    size_t dst_step[DP_MAX_DIMS], src_step[DP_MAX_DIMS]; /* bytes */
} dp__copy;

/* Drop dims of size 1, and merge neighbours that lie as one dim on both sides. */
static void dp__copy_merge(dp__copy *copy, const dp_tensor *dst, const dp_tensor *src)
{
    size_t size = dp__size_of(dst);
    copy->run = size;
    copy->ndim = 0;
    for (int i = 0; i < dst->ndim; i++) {
        if (dst->shape[i] == 1)
            continue;
        size_t dst_step = (size_t)dst->stride[i] * size, src_step = (size_t)src->stride[i] * size;
        int last = copy->ndim - 1;
        if (last >= 0 && copy->dst_step[last] == dst_step * (size_t)dst->shape[i] &&
            copy->src_step[last] == src_step * (size_t)dst->shape[i]) {
            copy->shape[last] *= dst->shape[i];
        } else {
            last = copy->ndim++;
            copy->shape[last] = dst->shape[i];
        }
        copy->dst_step[last] = dst_step;
        copy->src_step[last] = src_step;
    }
    int last = copy->ndim - 1;
    if (last >= 0 && copy->dst_step[last] == size && copy->src_step[last] == size) {
        copy->run = size * (size_t)copy->shape[last];
        copy->ndim--;
    }
}

static dp_status dp__copy_run(const dp__copy *copy, char *dst, const char *src)
{
    const dp_device_ops *ops = copy->device->dev->ops;
    switch (copy->way) {
    case DP__WAY_IN:
        return ops->copy_in(copy->stream, dst, src, copy->run);
    case DP__WAY_OUT:
        return ops->copy_out(copy->stream, dst, src, copy->run);
    case DP__WAY_INSIDE:
        break;
    }
    return ops->copy(copy->stream, dst, src, copy->run);
}

/* Rows of dims[0 .. ndim-1], like an odometer. */
static dp_status dp__copy_runs(const dp__copy *copy, char *dst, const char *src)
{
    int64_t at[DP_MAX_DIMS] = {0};
    const dp_device_ops *ops = copy->device->dev->ops;
    if (copy->ndim == 1 && copy->way == DP__WAY_INSIDE && copy->src_step[0] >= copy->run &&
        DP_HAS(dp_device_ops, ops, copy_2d))
        return ops->copy_2d(copy->stream, dst, copy->dst_step[0], src, copy->src_step[0], copy->run,
                            (size_t)copy->shape[0]);
    for (;;) {
        int dim = copy->ndim - 1;
        DP_TRY(dp__copy_run(copy, dst, src));
        for (; dim >= 0; dim--) {
            dst += copy->dst_step[dim];
            src += copy->src_step[dim];
            if (++at[dim] < copy->shape[dim])
                break;
            dst -= copy->dst_step[dim] * (size_t)copy->shape[dim];
            src -= copy->src_step[dim] * (size_t)copy->shape[dim];
            at[dim] = 0;
        }
        if (dim < 0)
            return DP_OK;
    }
}

static dp_kernel_args dp__copy_args(const dp_tensor *dst, const dp_tensor *src, void *const *out,
                                    const void *const *in)
{
    dp_kernel_args args =
        dp__kernel_args(DP_KERNEL_COPY, (dp_dtype)dst->dtype, (size_t)dp__count(dst), out, in);
    args.ndim = dst->ndim;
    args.shape = dst->shape;
    args.out_stride = dst->stride;
    args.in_stride = src->stride;
    return args;
}

/* Inside one device, or among devices whose memory the host reaches. */
static dp_status dp__copy_inside(dp_ctx *ctx, const dp__device *device, dp_stream *stream,
                                 const dp_tensor *dst, const dp_tensor *src)
{
    dp__copy copy = {.way = DP__WAY_INSIDE, .device = device, .stream = stream};
    dp__copy_merge(&copy, dst, src);
    if (copy.ndim == 0)
        return dp__copy_run(&copy, dst->data, src->data);
    void *out = dst->data;
    const void *in = src->data;
    dp_kernel_args args = dp__copy_args(dst, src, &out, &in);
    bool aligned = dp__operands_aligned(&args);
    if (dp__is_host(device) || (!aligned && copy.run < DP__PACKED_RUN_BYTES))
        return dp__kernel(ctx, device, stream, &args);
    dp_status status = DP_ERR_UNSUPPORTED;
    if (aligned && DP_HAS(dp_device_ops, device->dev->ops, kernel))
        status = device->dev->ops->kernel(stream, &args);
    return status != DP_ERR_UNSUPPORTED ? status : dp__copy_runs(&copy, dst->data, src->data);
}

/* What follows on `stream`, of the same table, comes after what is enqueued on the device's compute
   stream. */
static dp_status dp__order_after(const dp__device *device, dp_stream *stream)
{
    const dp_device_ops *ops = device->dev->ops;
    if (device->stream == stream)
        return DP_OK;
    DP_TRY(ops->event_record(device->done, device->stream));
    return ops->event_wait(stream, device->done);
}

static dp_status dp__copy_across(dp_ctx *ctx, dp__way way, dp__device *device, dp_stream *stream,
                                 const dp_tensor *dst, const dp_tensor *src);

/* Between the host and a device with short runs: the device packs and unpacks with its kernel. */
static dp_status dp__copy_packed(dp_ctx *ctx, dp__way way, dp__device *device, dp_stream *stream,
                                 const dp_tensor *dst, const dp_tensor *src)
{
    bool in = way == DP__WAY_IN;
    dp_scope *temp = NULL;
    dp_tensor packed;
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__tensor_as(temp, device, dst, &packed);
    if (status == DP_OK)
        status = in ? dp__copy_across(ctx, way, device, stream, &packed, src)
                    : dp__copy_inside(ctx, device, stream, &packed, src);
    if (status == DP_OK)
        status = in ? dp__copy_inside(ctx, device, stream, dst, &packed)
                    : dp__copy_across(ctx, way, device, stream, dst, &packed);
    if (status == DP_OK && stream != device->stream)
        status = dp__sync(stream);
    return dp__temp_end(temp, stream, status);
}

static bool dp__packs(const dp__device *device, const dp_tensor *tensor, size_t run)
{
    return run < DP__PACKED_RUN_BYTES && !dp__is_dense(tensor) &&
           DP_HAS(dp_device_ops, device->dev->ops, kernel);
}

/* Between the host and a device. A side of the host's that is not dense is packed, so that a device
   sees as few and as long runs as its own side allows. */
static dp_status dp__copy_across(dp_ctx *ctx, dp__way way, dp__device *device, dp_stream *stream,
                                 const dp_tensor *dst, const dp_tensor *src)
{
    const dp_tensor *host = way == DP__WAY_IN ? src : dst;
    dp__copy copy = {.way = way, .device = device, .stream = stream};
    dp__copy_merge(&copy, dst, src);
    if (copy.ndim > 0 && dp__packs(device, way == DP__WAY_IN ? dst : src, copy.run))
        return dp__copy_packed(ctx, way, device, stream, dst, src);
    if (copy.ndim == 0 || dp__is_dense(host))
        return dp__copy_runs(&copy, dst->data, src->data);
    dp_scope *temp = NULL;
    dp_tensor packed;
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__tensor_as(temp, &ctx->host_device, host, &packed);
    dp__copy_merge(&copy, way == DP__WAY_IN ? dst : &packed, way == DP__WAY_IN ? &packed : src);
    if (status == DP_OK && way == DP__WAY_IN)
        status = dp__copy_inside(ctx, &ctx->host_device, ctx->host_device.stream, &packed, src);
    if (status == DP_OK)
        status = way == DP__WAY_IN ? dp__copy_runs(&copy, dst->data, packed.data)
                                   : dp__copy_runs(&copy, packed.data, src->data);
    if (status == DP_OK) /* the packed copy ends with `temp`, or is about to be read */
        status = dp__sync(stream);
    if (status == DP_OK && way == DP__WAY_OUT)
        status = dp__copy_inside(ctx, &ctx->host_device, ctx->host_device.stream, dst, &packed);
    return dp__temp_end(temp, stream, status);
}

/* Both dense. Whoever gets src's memory next comes after the copy. */
static dp_status dp__peer_dense(const dp__device *to, dp_stream *stream, const dp__device *from,
                                const dp_tensor *dst, const dp_tensor *src)
{
    const dp_device_ops *ops = to->dev->ops;
    DP_TRY(dp__order_after(from, stream));
    DP_TRY(ops->peer_copy(stream, dst->data, from->dev, src->data, dp__bytes(src)));
    DP_TRY(ops->event_record(to->done, stream));
    return ops->event_wait(from->stream, to->done);
}

/* Packed where it is read, unpacked where it is written. */
static dp_status dp__peer_packed(dp_ctx *ctx, dp__device *to, dp_stream *stream, dp__device *from,
                                 const dp_tensor *dst, const dp_tensor *src)
{
    dp_scope *temp = NULL;
    dp_tensor packed_dst = *dst, packed_src = *src;
    bool packs_dst = !dp__is_dense(dst), packs_src = !dp__is_dense(src);
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = DP_OK;
    if (packs_src)
        status = dp__tensor_as(temp, from, src, &packed_src);
    if (status == DP_OK && packs_src)
        status = dp__copy_inside(ctx, from, from->stream, &packed_src, src);
    if (status == DP_OK && packs_dst)
        status = dp__tensor_as(temp, to, dst, &packed_dst);
    if (status == DP_OK)
        status = dp__peer_dense(to, stream, from, &packed_dst, &packed_src);
    if (status == DP_OK && packs_dst)
        status = dp__copy_inside(ctx, to, stream, dst, &packed_dst);
    if (status == DP_OK && packs_dst && stream != to->stream)
        status = dp__sync(stream);
    return dp__temp_end(temp, stream, status);
}

/* From one device to another: directly if the table can, else through the host. */
static dp_status dp__copy_peer(dp_ctx *ctx, dp__device *to, dp_stream *stream, dp__device *from,
                               const dp_tensor *dst, const dp_tensor *src)
{
    const dp_device_ops *ops = to->dev->ops;
    bool dense = dp__is_dense(dst) && dp__is_dense(src);
    dp_scope *temp = NULL;
    dp_tensor host;
    if (ops == from->dev->ops && DP_HAS(dp_device_ops, ops, peer_copy) &&
        (dense || DP_HAS(dp_device_ops, ops, kernel))) {
        dp_status status = dp__peer_packed(ctx, to, stream, from, dst, src);
        if (status != DP_ERR_UNSUPPORTED)
            return status;
    }
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__tensor_as(temp, &ctx->host_device, src, &host);
    if (status == DP_OK)
        status = dp__copy_across(ctx, DP__WAY_OUT, from, from->stream, &host, src);
    if (status == DP_OK)
        status = dp__sync(from->stream);
    if (status == DP_OK)
        status = dp__copy_across(ctx, DP__WAY_IN, to, stream, dst, &host);
    if (status == DP_OK)
        status = dp__sync(stream);
    return dp__temp_end(temp, stream, status);
}

static dp_status dp__copy_on(dp_ctx *ctx, dp_stream *stream, const dp_tensor *dst,
                             const dp_tensor *src)
{
    dp__device *to = dp__device_of(ctx, dst->device), *from = dp__device_of(ctx, src->device);
    if (!dp__is_host(to)) /* earlier work there may still use this memory */
        DP_TRY(dp__order_after(to, stream));
    if (dp__is_host(to) && !dp__is_host(from)) {
        DP_TRY(dp__order_after(from, stream));
        DP_TRY(dp__copy_across(ctx, DP__WAY_OUT, from, stream, dst, src));
        return dp__sync(stream);
    }
    if (!dp__is_host(to) && dp__is_host(from)) {
        DP_TRY(dp__copy_across(ctx, DP__WAY_IN, to, stream, dst, src));
        return dp__mark_read(ctx, to, stream);
    }
    if (to == from || dp__is_host(to))
        return dp__copy_inside(ctx, to, stream, dst, src);
    return dp__copy_peer(ctx, to, stream, from, dst, src);
}

/* An event belongs to a device, so a copy on another one's stream cannot be marked there: it goes
   on the compute stream of the device that writes, between two marks. */
static dp_status dp__copy_for(dp_ctx *ctx, dp_stream *stream, const dp_tensor *dst,
                              const dp_tensor *src)
{
    const dp__device *to = dp__device_of(ctx, dst->device), *from = dp__device_of(ctx, src->device);
    const dp_device_ops *ops = from->dev->ops;
    if (stream->dev != from->dev || dp__is_host(to) || to->dev == from->dev)
        return dp__copy_on(ctx, stream, dst, src);
    DP_TRY(ops->event_record(from->done, stream));
    DP_TRY(ops->event_wait(to->stream, from->done));
    DP_TRY(dp__copy_on(ctx, to->stream, dst, src));
    return dp__order_after(to, stream);
}

/* Shapes and dtypes are the same. stream NULL = the compute stream of the device that writes. When
   a copy has failed, nothing of it still reads or writes. */
static dp_status dp__copy_tensor(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src,
                                 dp_stream *stream)
{
    const dp__device *to = dp__device_of(ctx, dst->device), *from = dp__device_of(ctx, src->device);
    if (dp__count(dst) == 0)
        return DP_OK;
    if (stream == NULL)
        stream = dp__is_host(to) && !dp__is_host(from) ? from->stream : to->stream;
    return dp__drain(ctx, stream, dp__copy_for(ctx, stream, dst, src));
}

/* ==== >>chains ===================================================================================
   From one device to several others.                                                            */

/* Whether each of `outs` can be copied from the one before: dense, on devices of one table that
   copies among them, each once. */
static bool dp__forms_chain(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs, size_t count)
{
    const dp__device *first = dp__device_of(ctx, src->device);
    const dp_device_ops *ops = first->dev->ops;
    bool fits = !dp__is_host(first) && DP_HAS(dp_device_ops, ops, peer_copy) && dp__is_dense(src);
    for (size_t i = 0; i < count && fits; i++) {
        const dp__device *device = dp__device_of(ctx, outs[i].device);
        fits = device != first && device->dev->ops == ops && dp__is_dense(&outs[i]);
        for (size_t k = 0; k < i && fits; k++)
            fits = device != dp__device_of(ctx, outs[k].device);
    }
    return fits && count > 1 && dp__bytes(src) > DP__CHAIN_PIECE;
}

/* A piece from each to the next; what came to a device before is what it passes on. */
static dp_status dp__chain_piece(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs,
                                 size_t count, size_t at, size_t bytes)
{
    const dp_tensor *last = src;
    for (size_t i = 0; i < count; last = &outs[i++]) {
        const dp__device *from = dp__device_of(ctx, last->device);
        const dp__device *to = dp__device_of(ctx, outs[i].device);
        DP_TRY(dp__order_after(from, to->stream));
        DP_TRY(to->dev->ops->peer_copy(to->stream, (char *)outs[i].data + at, from->dev,
                                       (const char *)last->data + at, bytes));
    }
    return DP_OK;
}

static dp_status dp__copy_chain(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs,
                                size_t count)
{
    size_t all = dp__bytes(src), piece = all / DP__CHAIN_PIECES / 512 * 512;
    piece = piece > DP__CHAIN_PIECE ? piece : DP__CHAIN_PIECE;
    for (size_t at = 0; at < all; at += piece)
        DP_TRY(dp__chain_piece(ctx, src, outs, count, at, all - at < piece ? all - at : piece));
    for (size_t i = 0; i < count; i++) { /* who was read goes on after its reader */
        const dp__device *from = dp__device_of(ctx, i == 0 ? src->device : outs[i - 1].device);
        DP_TRY(dp__order_after(dp__device_of(ctx, outs[i].device), from->stream));
    }
    return DP_OK;
}

/* From one device to others. As a chain, a piece after another, each link carries the bytes once:
   one device alone would send them count times. Those that are src itself are left alone. */
static dp_status dp__copy_to_all(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs,
                                 size_t count)
{
    if (dp__forms_chain(ctx, src, outs, count)) {
        dp_status status = dp__drain(ctx, NULL, dp__copy_chain(ctx, src, outs, count));
        if (status != DP_ERR_UNSUPPORTED)
            return status;
    }
    for (size_t i = 0; i < count; i++)
        if (outs[i].data != src->data)
            DP_TRY(dp__copy_tensor(ctx, &outs[i], src, NULL));
    return DP_OK;
}

/* ==== >>operands =================================================================================
   What an operation reads and writes, checked at the public edge: on the right device, writable, of
   one shape, and apart from each other, which is decided exactly for views of one tensor.       */

static dp_status dp__check_placed(const char *fn, dp_ctx *ctx, const char *what,
                                  const dp_tensor *tensor, dp__device **out)
{
    DP_TRY(dp__check_tensor(fn, what, tensor));
    return dp__check_device(fn, ctx, tensor->device, out);
}

/* The dims in which either has more than one step, by their strides, which are the same in both:
   the smallest first. How many there are. */
static int dp__dims_by_stride(const dp_tensor *a, const dp_tensor *b, int *out)
{
    int count = 0;
    for (int i = 0; i < a->ndim; i++) {
        int at = count;
        if (a->shape[i] < 2 && b->shape[i] < 2)
            continue;
        for (; at > 0 && a->stride[out[at - 1]] > a->stride[i]; at--)
            out[at] = out[at - 1];
        out[at] = i;
        count++;
    }
    return count;
}

/* Whether each step of a dim leaps over everything that the smaller steps reach. Strides that
   interleave without meeting do not pass: they are too rare to be worth a search. */
static bool dp__is_spread(const dp_tensor *tensor)
{
    int order[DP_MAX_DIMS], count = dp__dims_by_stride(tensor, tensor, order);
    int64_t reach = 0;
    for (int i = 0; i < count; i++) {
        if (tensor->stride[order[i]] <= reach)
            return false;
        reach += tensor->stride[order[i]] * (tensor->shape[order[i]] - 1);
    }
    return true;
}

/* Writable, and no two elements in one place. */
static dp_status dp__check_writable(const char *fn, const char *what, const dp_tensor *tensor)
{
    if (tensor->read_only)
        return dp_error(DP_ERR_INVALID, "%s: %s is read-only", fn, what);
    if (!dp__is_spread(tensor) && dp__count(tensor) > 0)
        return dp_error(DP_ERR_INVALID,
                        "%s: elements of %s share a place: its strides repeat or "
                        "interleave",
                        fn, what);
    return DP_OK;
}

static bool dp__same_shape(const dp_tensor *a, const dp_tensor *b)
{
    return a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) == 0;
}

DP_API bool dp_same_shape(const dp_tensor *a, const dp_tensor *b)
{
    return dp__check_tensor(__func__, "a", a) == DP_OK &&
           dp__check_tensor(__func__, "b", b) == DP_OK && dp__same_shape(a, b);
}

static const char *dp__shape_text(const dp_tensor *tensor, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < tensor->ndim; i++)
        used =
            dp__append(text, bytes, used, "%s%lld", i > 0 ? "," : "", (long long)tensor->shape[i]);
    return text;
}

static dp_status dp__check_same_shape(const char *fn, const char *what_a, const dp_tensor *a,
                                      const char *what_b, const dp_tensor *b)
{
    char text_a[96], text_b[96];
    if (dp__same_shape(a, b))
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %s is (%s), %s is (%s)", fn, what_a,
                    dp__shape_text(a, text_a, sizeof text_a), what_b,
                    dp__shape_text(b, text_b, sizeof text_b));
}

static dp_status dp__check_same_dtype(const char *fn, const char *what_a, const dp_tensor *a,
                                      const char *what_b, const dp_tensor *b)
{
    if (a->dtype == b->dtype)
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %s is %s, %s is %s", fn, what_a, dp__dtype_names[a->dtype],
                    what_b, dp__dtype_names[b->dtype]);
}

static bool dp__ranges_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    uintptr_t from_a = (uintptr_t)a, from_b = (uintptr_t)b;
    return a_bytes > 0 && b_bytes > 0 && from_a < from_b + b_bytes && from_b < from_a + a_bytes;
}

/* Views with the same strides, both spread: whether one has an element that the other has too,
   `delta` elements further on. dims: as dp__dims_by_stride has them. A step along a dim can be
   counted in two ways: rounded down, or one more and then back. */
static bool dp__boxes_meet(const dp_tensor *a, const dp_tensor *b, const int *dims, int count,
                           int64_t delta)
{
    if (count == 0)
        return delta == 0;
    int dim = dims[count - 1];
    int64_t step = a->stride[dim], down = delta / step - (delta % step < 0);
    for (int64_t at = down; at <= down + 1; at++)
        if (at < a->shape[dim] && -at < b->shape[dim] &&
            dp__boxes_meet(a, b, dims, count - 1, delta - at * step))
            return true;
    return false;
}

static bool dp__same_strides(const dp_tensor *a, const dp_tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->stride, b->stride, sizeof a->stride[0] * a->ndim) == 0;
}

/* Exact for views of one tensor; for others by the bytes they span, which may be too strict. */
static bool dp__overlap(const dp_tensor *a, const dp_tensor *b)
{
    int dims[DP_MAX_DIMS];
    intptr_t apart = (intptr_t)b->data - (intptr_t)a->data, size = (intptr_t)dp__size_of(a);
    if (!dp__ranges_overlap(a->data, dp__span(a), b->data, dp__span(b)))
        return false;
    if (dp__size_of(a) != dp__size_of(b) || !dp__same_strides(a, b) || !dp__is_spread(a) ||
        !dp__is_spread(b) || apart % size != 0)
        return true;
    int count = dp__dims_by_stride(a, b, dims);
    return dp__boxes_meet(a, b, dims, count, apart / size);
}

/* Exactly the same elements may be read and written; a partial overlap is refused. */
static dp_status dp__check_apart(const char *fn, const dp_tensor *dst, const dp_tensor *src)
{
    bool same = dst->data == src->data && dst->dtype == src->dtype && dp__same_shape(dst, src) &&
                dp__same_strides(dst, src);
    if (!same && dp__overlap(dst, src))
        return dp_error(DP_ERR_INVALID, "%s: what is written overlaps what is read", fn);
    return DP_OK;
}

typedef struct dp__pair { /* what is written and what is read, as the caller calls them */
    const char *dst_name, *src_name;
    const dp_tensor *dst, *src;
    dp__device *to, *from; /* filled in */
} dp__pair;

static dp_status dp__check_copy(const char *fn, dp_ctx *ctx, dp__pair *pair)
{
    DP_TRY(dp__check_placed(fn, ctx, pair->dst_name, pair->dst, &pair->to));
    DP_TRY(dp__check_placed(fn, ctx, pair->src_name, pair->src, &pair->from));
    DP_TRY(dp__check_writable(fn, pair->dst_name, pair->dst));
    DP_TRY(dp__check_same_shape(fn, pair->dst_name, pair->dst, pair->src_name, pair->src));
    return dp__check_apart(fn, pair->dst, pair->src);
}

/* ---- kernels --------------------------------------------------------------------------------- */

typedef struct dp__kernel_rule { /* what a kernel takes */
    const char *name;
    size_t out_least, out_most, in_least, in_most;
    unsigned flags;             /* that it knows */
    int number_count;           /* of dp_kernel_args.numbers; all are finite */
    bool floats, doubles;       /* only of these dtypes */
    bool in_place;              /* an output may be an input */
    bool out_shaped, in_shaped; /* by ndim, shape and strides */
} dp__kernel_rule;

static const dp__kernel_rule dp__kernel_rules[] = {
    [DP_KERNEL_COPY] = {"COPY", 1, 1, 1, 1, .out_shaped = true, .in_shaped = true},
    [DP_KERNEL_FILL] = {"FILL", 1, 1, 0, 0, .flags = 0},
    [DP_KERNEL_CAST] = {"CAST", 1, 1, 1, 1, .in_place = true},
    [DP_KERNEL_AXPBY] = {"AXPBY", 1, 1, 1, 2, .floats = true, .in_place = true},
    [DP_KERNEL_REDUCE] = {"REDUCE", 1, INT_MAX, 1, DP__OPERANDS_MAX, .in_place = true},
    [DP_KERNEL_STATS] = {"STATS", 1, 1, 1, 1, .flags = 0},
    [DP_KERNEL_PAD] = {"PAD", 1, 1, 1, 1, .out_shaped = true, .in_shaped = true},
    [DP_KERNEL_TOTAL] = {"TOTAL", 1, 1, 1, 1, .doubles = true},
    [DP_KERNEL_SGD] = {"SGD", 1, 2, 1, 2,
                       DP_KERNEL_NESTEROV | DP_KERNEL_FIRST | DP_KERNEL_MAXIMIZE |
                           DP_KERNEL_ZERO_GRAD,
                       4, .floats = true},
    [DP_KERNEL_ADAMW] = {"ADAMW", 3, 3, 1, 2,
                         DP_KERNEL_L2 | DP_KERNEL_MAXIMIZE | DP_KERNEL_ZERO_GRAD, 7,
                         .floats = true},
    [DP_KERNEL_CHANNELS] = {"CHANNELS", 1, 1, 1, 1, .floats = true, .in_shaped = true}};

static dp_status dp__check_operands(const char *fn, const dp__kernel_rule *rule, const char *what,
                                    const void *array, size_t count, bool input)
{
    size_t least = input ? rule->in_least : rule->out_least;
    size_t most = input ? rule->in_most : rule->out_most;
    if (count < least || count > most)
        return dp_error(DP_ERR_INVALID, "%s: %s_count of %s is %zu, not %zu to %zu", fn, what,
                        rule->name, count, least, most);
    return count > 0 ? dp__check_pointer(fn, what, array) : DP_OK;
}

static dp_status dp__check_kernel_dtype(const char *fn, const dp__kernel_rule *rule,
                                        const dp_kernel_args *args)
{
    DP_TRY(dp__check_dtype(fn, args->dtype));
    if (args->kernel == DP_KERNEL_CAST)
        DP_TRY(dp__check_dtype(fn, args->in_dtype));
    if ((rule->floats && !dp__is_float(args->dtype)) || (rule->doubles && args->dtype != DP_F64))
        return dp_error(DP_ERR_INVALID, "%s: %s is not for %s", fn, rule->name,
                        dp__dtype_names[args->dtype]);
    if ((args->flags & ~rule->flags) != 0)
        return dp_error(DP_ERR_INVALID, "%s: %s has no flags 0x%x", fn, rule->name,
                        args->flags & ~rule->flags);
    return DP_OK;
}

static dp_status dp__check_kernel_numbers(const char *fn, const dp__kernel_rule *rule,
                                          const dp_kernel_args *args)
{
    double alpha = args->alpha, beta = args->beta;
    bool floats = dp__is_float(args->dtype);
    for (int i = 0; i < rule->number_count; i++)
        if (!isfinite(args->numbers[i]))
            return dp_error(DP_ERR_INVALID, "%s: numbers[%d] of %s is %g", fn, i, rule->name,
                            args->numbers[i]);
    if (args->kernel != DP_KERNEL_REDUCE)
        return DP_OK;
    if ((unsigned)args->op > DP_OP_MAX || args->op == DP_OP_MEAN)
        return dp_error(DP_ERR_INVALID, "%s: op of REDUCE is %d", fn, (int)args->op);
    bool whole = !(alpha < 1) && !(alpha > 1) && !(fabs(beta) < 1) && fabs(beta) < 0x1p63 &&
                 !(floor(beta) < beta);
    if (!isfinite(alpha) || !isfinite(beta) || !(fabs(beta) > 0) || (!floats && !whole))
        return dp_error(DP_ERR_INVALID,
                        "%s: REDUCE of %s times alpha %g, divided by beta %g: beta is not 0, and "
                        "for integers alpha is 1 and beta whole",
                        fn, dp__dtype_names[args->dtype], alpha, beta);
    return DP_OK;
}

/* One operand as a tensor; without strides it is dense. */
static dp_status dp__kernel_view(const char *fn, const char *what, const dp_kernel_args *args,
                                 const void *data, const int64_t *shape, const int64_t *stride,
                                 dp_tensor *out)
{
    int64_t count = 0;
    DP_TRY(dp__check_shape(fn, args->dtype, args->ndim, shape, &count));
    *out =
        dp__tensor_like((void *)(uintptr_t)data, (dp_device){0, 0}, args->dtype, args->ndim, shape);
    if (stride != NULL)
        memcpy(out->stride, stride, (size_t)args->ndim * sizeof *stride);
    return dp__check_tensor(fn, what, out);
}

/* The operands of COPY, PAD and CHANNELS have a shape, of which count is the product. */
static dp_status dp__check_kernel_shapes(const char *fn, const dp__kernel_rule *rule,
                                         const dp_kernel_args *args)
{
    bool pad = args->kernel == DP_KERNEL_PAD, copy = args->kernel == DP_KERNEL_COPY;
    const int64_t *in_shape = pad ? args->in_shape : args->shape;
    dp_tensor in = {0}, out = {0};
    if (!rule->in_shaped)
        return DP_OK;
    if (args->kernel == DP_KERNEL_CHANNELS && args->ndim != 3)
        return dp_error(DP_ERR_INVALID, "%s: ndim of CHANNELS is %d, not 3", fn, args->ndim);
    if (rule->out_shaped && args->ndim > 0)
        DP_TRY(dp__check_pointer(fn, "in_stride", args->in_stride));
    if (copy && args->ndim > 0)
        DP_TRY(dp__check_pointer(fn, "out_stride", args->out_stride));
    DP_TRY(dp__kernel_view(fn, "in[0]", args, args->in[0], in_shape,
                           rule->out_shaped ? args->in_stride : NULL, &in));
    if (rule->out_shaped)
        DP_TRY(dp__kernel_view(fn, "out[0]", args, args->out[0], args->shape,
                               copy ? args->out_stride : NULL, &out));
    int64_t count = dp__count(rule->out_shaped ? &out : &in);
    if ((uint64_t)count != args->count)
        return dp_error(DP_ERR_INVALID, "%s: count is %zu, shape has %lld element%s", fn,
                        args->count, (long long)count, dp__s((size_t)count));
    for (int i = 0; pad && i < args->ndim; i++)
        if (in_shape[i] > args->shape[i])
            return dp_error(DP_ERR_INVALID, "%s: in_shape[%d] is %lld, shape[%d] is %lld", fn, i,
                            (long long)in_shape[i], i, (long long)args->shape[i]);
    if (!copy)
        return DP_OK;
    DP_TRY(dp__check_writable(fn, "out[0]", &out));
    return dp__check_apart(fn, &out, &in);
}

/* No output overlaps another, nor an input, unless it is that very input and the rule allows it. */
static dp_status dp__check_kernel_apart(const char *fn, const dp__kernel_rule *rule,
                                        const dp_kernel_args *args)
{
    for (size_t i = 0; i < args->out_count; i++) {
        size_t bytes = dp__operand_bytes(args, false, i);
        for (size_t k = 0; k < i; k++)
            if (dp__ranges_overlap(args->out[i], bytes, args->out[k],
                                   dp__operand_bytes(args, false, k)))
                return dp_error(DP_ERR_INVALID, "%s: out[%zu] overlaps out[%zu]", fn, i, k);
        for (size_t k = 0; k < args->in_count; k++) {
            size_t in_bytes = dp__operand_bytes(args, true, k);
            bool same = rule->in_place && args->out[i] == args->in[k] && bytes == in_bytes;
            if (!same && dp__ranges_overlap(args->out[i], bytes, args->in[k], in_bytes))
                return dp_error(DP_ERR_INVALID, "%s: out[%zu] overlaps in[%zu]", fn, i, k);
        }
    }
    if (dp__zeroes_grad(args) && args->in_count > 1 &&
        dp__ranges_overlap(args->in[0], dp__operand_bytes(args, true, 0), args->in[1],
                           dp__operand_bytes(args, true, 1)))
        return dp_error(DP_ERR_INVALID, "%s: in[0], which becomes 0, overlaps in[1]", fn);
    return DP_OK;
}

/* Checks everything of one set, except where the operands lie. */
static dp_status dp__check_kernel(const char *fn, const dp_kernel_args *args)
{
    size_t kinds = sizeof dp__kernel_rules / sizeof dp__kernel_rules[0], bytes = 0;
    if ((size_t)args->kernel >= kinds)
        return dp_error(DP_ERR_INVALID, "%s: %d is not a kernel", fn, (int)args->kernel);
    const dp__kernel_rule *rule = &dp__kernel_rules[args->kernel];
    DP_TRY(dp__check_kernel_dtype(fn, rule, args));
    DP_TRY(dp__check_operands(fn, rule, "out", args->out, args->out_count, false));
    DP_TRY(dp__check_operands(fn, rule, "in", args->in, args->in_count, true));
    DP_TRY(dp__check_kernel_numbers(fn, rule, args));
    if (args->heads != 0)
        return dp_error(DP_ERR_INVALID, "%s: heads is %zu, not 0", fn, args->heads);
    if (!dp__mul(args->count, sizeof(double), &bytes) || bytes > INT64_MAX / 2)
        return dp_error(DP_ERR_INVALID, "%s: count is %zu, more than can be counted", fn,
                        args->count);
    for (size_t i = 0; args->count > 0 && i < args->out_count + args->in_count; i++) {
        bool input = i >= args->out_count;
        size_t place = input ? i - args->out_count : i;
        if ((input ? args->in[place] : args->out[place]) == NULL)
            return dp_error(DP_ERR_INVALID, "%s: %s[%zu] is NULL", fn, input ? "in" : "out", place);
    }
    DP_TRY(dp__check_kernel_shapes(fn, rule, args));
    return args->count == 0 || args->kernel == DP_KERNEL_COPY
               ? DP_OK
               : dp__check_kernel_apart(fn, rule, args);
}

/* ==== >>compute ==================================================================================
   What touches data, at the public edge: copy, fill, cast, axpby, statistics, read.             */

/* A stream of one of the two devices; between host memory and host memory, one of any device that
   the host reaches. */
static bool dp__may_order(const dp_ctx *ctx, const dp_stream *stream, const dp__pair *pair)
{
    if (stream->dev == pair->to->dev || stream->dev == pair->from->dev)
        return true;
    for (int i = 0; i < ctx->info.local_count; i++)
        if (stream->dev == ctx->devices[i].dev)
            return dp__is_host(&ctx->devices[i]) && dp__is_host(pair->to) &&
                   dp__is_host(pair->from);
    return false;
}

DP_API dp_status dp_copy(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src, dp_stream *stream)
{
    dp__pair pair = {.dst_name = "dst", .src_name = "src", .dst = dst, .src = src};
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_copy(__func__, ctx, &pair));
    DP_TRY(dp__check_same_dtype(__func__, "dst", dst, "src", src));
    if (stream != NULL && !dp__may_order(ctx, stream, &pair))
        return dp_error(DP_ERR_INVALID, "%s: the stream is of another device than the tensors",
                        __func__);
    return dp__leave(__func__, ctx, dp__copy_tensor(ctx, dst, src, stream));
}

static dp_status dp__contiguous(dp_scope *scope, const dp_tensor *tensor, dp_tensor *out)
{
    dp_ctx *ctx = scope->ctx;
    const dp__device *device = dp__device_of(ctx, tensor->device);
    dp_tensor copy;
    if (dp__is_dense(tensor)) {
        *out = *tensor;
        return DP_OK;
    }
    DP_TRY(dp__tensor_as(scope, device, tensor, &copy));
    DP_TRY(dp__copy_tensor(ctx, &copy, tensor, NULL));
    *out = copy;
    return DP_OK;
}

DP_API dp_status dp_contiguous(dp_scope *scope, const dp_tensor *tensor, dp_tensor *out)
{
    dp__device *device = NULL;
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_ctx(__func__, scope->ctx));
    DP_TRY(dp__check_placed(__func__, scope->ctx, "tensor", tensor, &device));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    return dp__leave(__func__, scope->ctx, dp__contiguous(scope, tensor, out));
}

static dp_status dp__cast_on(dp_ctx *ctx, const dp__device *device, dp_stream *stream, void *dst,
                             dp_dtype dtype, const void *src, dp_dtype src_dtype, size_t count)
{
    dp_kernel_args args = dp__kernel_args(DP_KERNEL_CAST, dtype, count, &dst, &src);
    args.in_dtype = src_dtype;
    return dp__kernel(ctx, device, stream, &args);
}

DP__APART static dp_status dp__cast_flat(dp_ctx *ctx, const dp__device *device, void *dst,
                                         dp_dtype dtype, const void *src, dp_dtype src_dtype,
                                         size_t count)
{
    return dp__cast_on(ctx, device, device->stream, dst, dtype, src, src_dtype, count);
}

/* A device that the host does not reach reads a copy in the scope, which stays until it is read. */
static dp_status dp__tensor_from(dp_scope *scope, const dp__device *device, const dp_tensor *src,
                                 dp_tensor *out)
{
    dp_tensor tensor, staged = *src;
    DP_TRY(dp__tensor_as(scope, device, src, &tensor));
    if (!dp__is_host(device)) {
        DP_TRY(dp__tensor_as(scope, &scope->ctx->host_device, src, &staged));
        DP_TRY(dp__copy_tensor(scope->ctx, &staged, src, NULL));
    }
    DP_TRY(dp__copy_tensor(scope->ctx, &tensor, &staged, NULL));
    *out = tensor;
    return DP_OK;
}

DP_API dp_status dp_tensor_from(dp_scope *scope, dp_device device, const void *host, dp_dtype dtype,
                                int ndim, const int64_t *shape, dp_tensor *out)
{
    int64_t count = 0;
    dp__device *owner = NULL;
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_ctx(__func__, scope->ctx));
    DP_TRY(dp__check_shape(__func__, dtype, ndim, shape, &count));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_device(__func__, scope->ctx, device, &owner));
    if (count > 0)
        DP_TRY(dp__check_pointer(__func__, "host", host));
    dp_tensor src = dp_wrap_const(host, dtype, ndim, shape);
    return dp__leave(__func__, scope->ctx, dp__tensor_from(scope, owner, &src, out));
}

/* Elementwise work wants all operands dense and on one device, that of the operands that are read;
   what is not is packed in `temp`. */
typedef struct dp__dense {
    dp_scope *temp;
    dp_tensor out, in[2];
} dp__dense;

static dp_status dp__dense_begin(dp_ctx *ctx, const dp_tensor *out, const dp_tensor *const *in,
                                 int in_count, dp__dense *dense)
{
    const dp__device *device = dp__device_of(ctx, in[0]->device);
    bool packs = !dp__is_dense(out) || !dp__same_device(out->device, in[0]->device);
    DP_TRY(dp__temp_begin(ctx, &dense->temp));
    dp_status status = DP_OK;
    for (int i = 0; i < in_count && status == DP_OK; i++)
        status = dp__contiguous(dense->temp, in[i], &dense->in[i]);
    dense->out = *out;
    if (status == DP_OK && packs)
        status = dp__tensor_as(dense->temp, device, out, &dense->out);
    return status;
}

static dp_status dp__dense_end(dp_ctx *ctx, const dp_tensor *out, dp__dense *dense,
                               dp_status status)
{
    if (status == DP_OK && dense->out.data != out->data)
        status = dp__copy_tensor(ctx, out, &dense->out, NULL);
    return dp__temp_end(dense->temp, NULL, status);
}

static dp_status dp__check_same_device(const char *fn, const char *what, const dp_tensor *a,
                                       const dp_tensor *b)
{
    if (dp__same_device(a->device, b->device))
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %s is on {%d, %d}, the others on {%d, %d}", fn, what,
                    (int)a->device.backend, (int)a->device.index, (int)b->device.backend,
                    (int)b->device.index);
}

/* Copies elements between memory of one shape, whatever the dtypes. `device` has `src`. */
static dp_status dp__cast(dp_ctx *ctx, const dp__device *device, const dp_tensor *dst,
                          const dp_tensor *src)
{
    dp__dense dense = {0};
    if (dst->dtype == src->dtype)
        return dp__copy_tensor(ctx, dst, src, NULL);
    if (dp__count(dst) == 0)
        return DP_OK;
    dp_status status = dp__dense_begin(ctx, dst, &src, 1, &dense);
    if (status == DP_OK)
        status = dp__cast_flat(ctx, device, dense.out.data, (dp_dtype)dst->dtype, dense.in[0].data,
                               (dp_dtype)src->dtype, (size_t)dp__count(dst));
    return dp__dense_end(ctx, dst, &dense, status);
}

DP_API dp_status dp_cast(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src)
{
    dp__pair pair = {.dst_name = "dst", .src_name = "src", .dst = dst, .src = src};
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_copy(__func__, ctx, &pair));
    return dp__leave(__func__, ctx, dp__cast(ctx, pair.from, dst, src));
}

DP_API dp_status dp_tensor_to(dp_scope *scope, dp_device device, dp_dtype dtype,
                              const dp_tensor *from, dp_tensor *out)
{
    int64_t count = 0;
    dp_tensor made;
    dp__device *to = NULL, *source = NULL;
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_ctx(__func__, scope->ctx));
    DP_TRY(dp__check_placed(__func__, scope->ctx, "from", from, &source));
    DP_TRY(dp__check_shape(__func__, dtype, from->ndim, from->shape, &count));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_device(__func__, scope->ctx, device, &to));
    dp_status status = dp__tensor_make(scope, to, dtype, from->ndim, from->shape, &made);
    if (status == DP_OK)
        status = dp__cast(scope->ctx, source, &made, from);
    if (status == DP_OK)
        *out = made;
    return dp__leave(__func__, scope->ctx, status);
}

DP_API dp_status dp_axpby(dp_ctx *ctx, double a, const dp_tensor *x, double b, const dp_tensor *y,
                          const dp_tensor *out)
{
    const dp_tensor *operands[2] = {x, y != NULL ? y : x};
    int operand_count = y != NULL ? 2 : 1;
    dp__device *device = NULL;
    dp__dense dense = {0};
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_placed(__func__, ctx, "out", out, &device));
    DP_TRY(dp__check_writable(__func__, "out", out));
    for (int i = 0; i < operand_count; i++) {
        const char *what = i == 0 ? "x" : "y";
        DP_TRY(dp__check_tensor(__func__, what, operands[i]));
        DP_TRY(dp__check_same_device(__func__, what, operands[i], out));
        DP_TRY(dp__check_same_dtype(__func__, what, operands[i], "out", out));
        DP_TRY(dp__check_same_shape(__func__, what, operands[i], "out", out));
        DP_TRY(dp__check_apart(__func__, out, operands[i]));
    }
    if (!dp__is_float((dp_dtype)out->dtype))
        return dp_error(DP_ERR_INVALID, "%s: %s is not a floating dtype", __func__,
                        dp__dtype_names[out->dtype]);
    dp_status status = dp__dense_begin(ctx, out, operands, operand_count, &dense);
    const void *in[2] = {dense.in[0].data, dense.in[1].data};
    dp_kernel_args args = dp__kernel_args(DP_KERNEL_AXPBY, (dp_dtype)out->dtype,
                                          (size_t)dp__count(out), &dense.out.data, in);
    args.in_count = (size_t)operand_count;
    args.alpha = a;
    args.beta = b;
    if (status == DP_OK)
        status = dp__kernel(ctx, device, device->stream, &args);
    status = dp__dense_end(ctx, out, &dense, status);
    return dp__leave(__func__, ctx, status);
}

static dp_status dp__check_set(const char *fn, const dp__device *device, const dp_kernel_args *args,
                               size_t place)
{
    const dp_kernel_args set = dp__set_of(args, place);
    DP_TRY(dp__check_kernel(fn, &set));
    if (set.in_count > 1 && args->set_count > 0 && set.in[1] != args->in[1])
        return dp_error(DP_ERR_INVALID, "%s: set %zu has another gate than set 0", fn, place);
    for (size_t i = 0; i < set.out_count; i++)
        DP_TRY(dp__check_owned(fn, "an output", device, set.out[i]));
    for (size_t i = 0; i < set.in_count; i++)
        DP_TRY(dp__check_owned(fn, "an input", device, set.in[i]));
    return DP_OK;
}

DP_API dp_status dp_kernel_run(dp_ctx *ctx, int local_rank, const dp_kernel_args *args)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "args", args));
    DP_TRY(dp__check_rank(__func__, ctx, "local_rank", local_rank));
    DP_TRY(dp__check_own(__func__, ctx, local_rank));
    const dp__device *device = &ctx->devices[local_rank];
    if (args->set_count > 0 && !dp__is_update(args))
        return dp_error(DP_ERR_INVALID, "%s: set_count is %zu, and only SGD and ADAMW have sets",
                        __func__, args->set_count);
    if (args->set_count > 0) {
        DP_TRY(dp__check_pointer(__func__, "counts", args->counts));
        DP_TRY(dp__check_pointer(__func__, "out", args->out));
        DP_TRY(dp__check_pointer(__func__, "in", args->in));
    }
    for (size_t i = 0; i < dp__set_count(args); i++)
        DP_TRY(dp__check_set(__func__, device, args, i));
    return dp__leave(__func__, ctx, dp__kernel(ctx, device, device->stream, args));
}

/* Write the bit pattern of `number` as one element into *out, which is 0; refused when the element
   would be a different number (floats round as usual, but a finite number must stay finite). */
static dp_status dp__number_bits(dp_ctx *ctx, const char *fn, dp_value number, dp_dtype dtype,
                                 uint64_t *out)
{
    double as_f64 = 0, back = 0;
    int64_t as_i64 = 0, back_i64 = 0;
    const dp__device *host = &ctx->host_device;
    bool whole = number.kind == DP_INT || number.kind == DP_BOOLEAN;
    if (!whole && number.kind != DP_FLOAT)
        return dp_error(DP_ERR_INVALID, "%s: number is %s", fn, dp__a_kind(number.kind));
    as_i64 = number.kind == DP_BOOLEAN ? number.as.b : number.as.i;
    as_f64 = number.as.f;
    if (whole) {
        DP_TRY(dp__cast_flat(ctx, host, out, dtype, &as_i64, DP_I64, 1));
        DP_TRY(dp__cast_flat(ctx, host, &back_i64, DP_I64, out, dtype, 1));
        DP_TRY(dp__cast_flat(ctx, host, &back, DP_F64, out, dtype, 1));
        if (dp__is_float(dtype) ? isfinite(back) != 0 : back_i64 == as_i64)
            return DP_OK;
        return dp_error(DP_ERR_INVALID, "%s: %lld does not fit %s", fn, (long long)as_i64,
                        dp__dtype_names[dtype]);
    }
    DP_TRY(dp__cast_flat(ctx, host, out, dtype, &as_f64, DP_F64, 1));
    DP_TRY(dp__cast_flat(ctx, host, &back, DP_F64, out, dtype, 1));
    bool same = !(back < as_f64) && !(back > as_f64) && isfinite(as_f64) &&
                as_f64 < 9223372036854775808.0; /* 2^63, to which INT64_MAX is rounded */
    if (dp__is_float(dtype) ? isfinite(back) || !isfinite(as_f64) : same)
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %g does not fit %s", fn, as_f64, dp__dtype_names[dtype]);
}

/* One element, repeated: a copy from stride 0 when the elements do not lie together. */
static dp_status dp__fill_tensor(dp_ctx *ctx, const dp__device *device, const dp_tensor *dst,
                                 uint64_t bits)
{
    static const int64_t one[DP_MAX_DIMS] = {1, 1, 1, 1, 1, 1, 1, 1};
    dp_tensor element = *dst, everywhere = *dst;
    dp_scope *temp = NULL;
    dp_kernel_args args = dp__kernel_args(DP_KERNEL_FILL, (dp_dtype)dst->dtype,
                                          (size_t)dp__count(dst), &element.data, NULL);
    args.fill_bits = bits;
    if (dp__is_dense(dst) || dp__is_channels_last(dst))
        return dp__kernel(ctx, device, device->stream, &args);
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status =
        dp__tensor_make(temp, device, (dp_dtype)dst->dtype, dst->ndim, one, &element);
    args.count = 1;
    if (status == DP_OK)
        status = dp__kernel(ctx, device, device->stream, &args);
    everywhere.data = element.data;
    memset(everywhere.stride, 0, sizeof everywhere.stride);
    if (status == DP_OK)
        status = dp__copy_tensor(ctx, dst, &everywhere, NULL);
    return dp__temp_end(temp, NULL, status);
}

DP_API dp_status dp_fill(dp_ctx *ctx, const dp_tensor *dst, dp_value number)
{
    dp__device *device = NULL;
    uint64_t bits = 0;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_placed(__func__, ctx, "dst", dst, &device));
    DP_TRY(dp__check_writable(__func__, "dst", dst));
    DP_TRY(dp__check_leaf(__func__, "number", number, NULL));
    DP_TRY(dp__number_bits(ctx, __func__, number, (dp_dtype)dst->dtype, &bits));
    return dp__leave(__func__, ctx, dp__fill_tensor(ctx, device, dst, bits));
}

/* The two sums in host memory of `temp`: not on the stack, where a device that cannot be waited for
   might write later. */
static dp_status dp__stats(dp_ctx *ctx, dp_scope *temp, const dp__device *device,
                           const dp_tensor *tensor, const double **out)
{
    static const int64_t two = 2;
    dp_tensor dense, result, host;
    DP_TRY(dp__tensor_make(temp, &ctx->host_device, DP_F64, 1, &two, &host));
    *out = host.data;
    DP_TRY(dp__contiguous(temp, tensor, &dense));
    DP_TRY(dp__tensor_make(temp, device, DP_F64, 1, &two, &result));
    const void *in = dense.data;
    const dp_kernel_args args = dp__kernel_args(DP_KERNEL_STATS, (dp_dtype)tensor->dtype,
                                                (size_t)dp__count(tensor), &result.data, &in);
    DP_TRY(dp__kernel(ctx, device, device->stream, &args));
    return dp__copy_tensor(ctx, &host, &result, NULL);
}

DP_API dp_status dp_tensor_stats(dp_ctx *ctx, const dp_tensor *tensor, dp_stats *out)
{
    const double *sums = NULL;
    dp__device *device = NULL;
    dp_scope *temp = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_placed(__func__, ctx, "tensor", tensor, &device));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (dp__count(tensor) == 0) {
        *out = (dp_stats){.all_finite = true};
        return DP_OK;
    }
    dp_status status = dp__temp_begin(ctx, &temp);
    if (status == DP_OK)
        status = dp__stats(ctx, temp, device, tensor, &sums);
    if (status == DP_OK)
        *out = (dp_stats){.sum_squares = sums[0], .all_finite = !(sums[1] > 0)};
    return dp__leave(__func__, ctx, dp__temp_end(temp, NULL, status));
}

DP_API dp_status dp_read(dp_ctx *ctx, const dp_tensor *src, void *host, size_t bytes)
{
    dp__device *device = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_placed(__func__, ctx, "src", src, &device));
    if (bytes != dp__bytes(src))
        return dp_error(DP_ERR_INVALID, "%s: the tensor has %zu bytes, not %zu", __func__,
                        dp__bytes(src), bytes);
    if (bytes == 0)
        return DP_OK;
    DP_TRY(dp__check_pointer(__func__, "host", host));
    dp_tensor dst =
        dp__tensor_like(host, (dp_device){0, 0}, (dp_dtype)src->dtype, src->ndim, src->shape);
    DP_TRY(dp__check_apart(__func__, &dst, src));
    return dp__leave(__func__, ctx, dp__copy_tensor(ctx, &dst, src, NULL));
}

static dp_status dp__item(dp_ctx *ctx, const dp__device *device, const dp_tensor *tensor,
                          double *out)
{
    const dp__device *host = &ctx->host_device;
    dp_dtype dtype = (dp_dtype)tensor->dtype;
    dp_scope *temp = NULL;
    dp_tensor copy;
    if (dp__is_host(device))
        return dp__cast_flat(ctx, host, out, DP_F64, tensor->data, dtype, 1);
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__tensor_as(temp, host, tensor, &copy);
    if (status == DP_OK)
        status = dp__copy_tensor(ctx, &copy, tensor, NULL);
    if (status == DP_OK)
        status = dp__cast_flat(ctx, host, out, DP_F64, copy.data, dtype, 1);
    return dp__temp_end(temp, NULL, status);
}

DP_API dp_status dp_item(dp_ctx *ctx, dp_value scalar, double *out)
{
    dp__device *device = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_leaf(__func__, "scalar", scalar, NULL));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (scalar.kind == DP_TENSOR) {
        DP_TRY(dp__check_device(__func__, ctx, scalar.as.t->device, &device));
        if (dp__count(scalar.as.t) != 1)
            return dp_error(DP_ERR_INVALID, "%s: the tensor has %lld elements", __func__,
                            (long long)dp__count(scalar.as.t));
        return dp__leave(__func__, ctx, dp__item(ctx, device, scalar.as.t, out));
    }
    if (scalar.kind != DP_INT && scalar.kind != DP_FLOAT && scalar.kind != DP_BOOLEAN)
        return dp_error(DP_ERR_INVALID, "%s: scalar is %s%s", __func__, dp__a_kind(scalar.kind),
                        scalar.kind == DP_NONE ? ", which dp_get gives for a key that is not there"
                                               : "");
    *out = scalar.kind == DP_FLOAT ? scalar.as.f
                                   : (double)(scalar.kind == DP_INT ? scalar.as.i : scalar.as.b);
    return DP_OK;
}

/* ==== >>names ====================================================================================
   Where each of many names is, so that looking one up takes no longer among many than among few: an
   index of names, and a finder for keys that are looked up one after another.                    */

enum { DP__FEW_NAMES = 16 }; /* up to this many are compared one by one */

/* For few names only where they are, for many a table with open addressing. The string maps of
   stb_ds will not do: they crash when memory runs out, and all of them write the seed of the next
   one to one variable, even those of two contexts in two threads. */
typedef struct dp__cell {
    uint32_t hash, number; /* of a name, counted from 1; 0: the cell is free */
} dp__cell;

typedef struct dp__index {
    const char *names; /* where the pointer to the first one is */
    size_t stride;     /* from there to the pointer to the next one, in bytes */
    size_t count;      /* of those that have joined */
    dp__cell *cells;   /* NULL: there are few */
    size_t cell_count; /* a power of two */
} dp__index;

/* How many cells an index of this many names needs: at most two thirds of them will be in use. */
static size_t dp__cell_count(size_t name_count)
{
    size_t count = 1;
    while (count < name_count + name_count / 2)
        count *= 2;
    return name_count > DP__FEW_NAMES ? count : 0;
}

/* An index of no names yet. `room` is for dp__cell_count(count) cells; NULL: as for few names. */
static dp__index dp__index_in(void *room, const void *names, size_t stride, size_t count)
{
    dp__index index = {.names = names, .stride = stride, .cell_count = dp__cell_count(count)};
    if (room != NULL && index.cell_count > 0)
        index.cells = memset(room, 0, index.cell_count * sizeof *index.cells);
    return index;
}

/* False: there is no memory. */
static bool dp__index_make(dp_scope *scope, const void *names, size_t stride, size_t count,
                           dp__index *out)
{
    void *room = dp__scope_bytes(scope, dp__cell_count(count) * sizeof(dp__cell), 8);
    if (room != NULL)
        *out = dp__index_in(room, names, stride, count);
    return room != NULL;
}

static const char *dp__index_name(const dp__index *index, size_t number)
{
    const char *name = NULL;
    memcpy(&name, index->names + number * index->stride, sizeof name);
    return name;
}

static bool dp__index_is(const dp__index *index, size_t number, const char *name, size_t length)
{
    const char *own = dp__index_name(index, number);
    return strncmp(own, name, length) == 0 && own[length] == '\0';
}

/* The cell of a name, or the free one where it would be. Names come from anybody's files: where the
   cells lie makes the hash another one in each index, so that names cannot be chosen to meet. */
static dp__cell *dp__index_cell(const dp__index *index, const char *name, size_t length,
                                uint32_t *out_hash)
{
    uint64_t hash = dp__hash(dp__hash_first ^ (uintptr_t)index->cells, name, length);
    *out_hash = (uint32_t)(hash ^ hash >> 32);
    for (size_t at = *out_hash;; at++) {
        dp__cell *cell = &index->cells[at & (index->cell_count - 1)];
        if (cell->number == 0 ||
            (cell->hash == *out_hash && dp__index_is(index, cell->number - 1, name, length)))
            return cell;
    }
}

static bool dp__index_find(const dp__index *index, const char *name, size_t length,
                           size_t *out_number)
{
    uint32_t hash = 0;
    size_t number = 0;
    if (index->cells != NULL) {
        const dp__cell *cell = dp__index_cell(index, name, length, &hash);
        *out_number = cell->number - 1u;
        return cell->number != 0;
    }
    while (number < index->count && !dp__index_is(index, number, name, length))
        number++;
    *out_number = number;
    return number < index->count;
}

/* The next name joins; false: an equal one has joined before. */
static bool dp__index_add(dp__index *index)
{
    uint32_t hash = 0;
    const char *name = dp__index_name(index, index->count);
    for (size_t i = 0; index->cells == NULL && i < index->count; i++)
        if (strcmp(dp__index_name(index, i), name) == 0)
            return false;
    if (index->cells != NULL) {
        dp__cell *cell = dp__index_cell(index, name, strlen(name), &hash);
        if (cell->number != 0)
            return false;
        *cell = (dp__cell){hash, (uint32_t)index->count + 1};
    }
    index->count++;
    return true;
}

static const dp_pair *dp__find(dp_value dict, const char *key)
{
    for (uint32_t i = 0; i < dict.count; i++)
        if (strcmp(dict.as.pairs[i].key, key) == 0)
            return &dict.as.pairs[i];
    return NULL;
}

typedef struct dp__finder { /* looks for one key after another */
    dp_value dict;
    uint32_t next;   /* where the next one is, if they come in the dict's own order */
    dp__index index; /* made when they do not */
} dp__finder;

static dp_status dp__finder_index(dp__finder *finder, dp_scope *scope)
{
    const dp_value dict = finder->dict;
    if (!dp__index_make(scope, dict.as.pairs, sizeof(dp_pair), dict.count, &finder->index))
        return dp_error(DP_ERR_NO_MEMORY, "no memory to look at a dict of %u",
                        (unsigned)dict.count);
    for (uint32_t i = 0; i < dict.count; i++)
        (void)dp__index_add(&finder->index);
    return DP_OK;
}

/* *out is NULL where there is no such key. */
static dp_status dp__finder_find(dp__finder *finder, dp_scope *scope, const char *key,
                                 const dp_pair **out)
{
    const dp_pair *pairs = finder->dict.as.pairs;
    size_t at = finder->next;
    bool here = at < finder->dict.count && strcmp(pairs[at].key, key) == 0;
    if (!here && finder->index.names == NULL)
        DP_TRY(dp__finder_index(finder, scope));
    if (!here)
        here = dp__index_find(&finder->index, key, strlen(key), &at);
    *out = here ? &pairs[at] : NULL;
    if (here)
        finder->next = (uint32_t)at + 1;
    return DP_OK;
}

/* One for each of several values, NULL where there is no memory. */
static dp__finder *dp__finders(dp_scope *scope, const dp_value *dicts, size_t count)
{
    dp__finder *finders = dp__scope_bytes(scope, count * sizeof *finders, _Alignof(dp__finder));
    for (size_t i = 0; finders != NULL && i < count; i++)
        finders[i] = (dp__finder){.dict = dicts[i]};
    return finders;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
