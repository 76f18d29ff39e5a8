/* dp/job.h - v0.1.0 - the processes of a job: what each has begun - MIT licence

   Part of dp.h, which includes it. It knows no table of functions: those that carry collectives
   between processes are made of it.

   CONTENTS (search for the tag)
     >>entries  what a collective is, to compare, and in words
     >>members  processes in words
     >>journal  what was begun lately, for when it fails
*/

#ifndef DP__ROOMS
#error "dp/job.h is a part of dp.h: include dp.h"
#else

/* ==== >>entries ==================================================================================
   What a collective is: what all ranks have to issue alike, and what a sentence says about it.   */

typedef struct dp__rule {
    bool send_all, recv_all;         /* a block for every rank, else one */
    bool send_at_root, recv_at_root; /* matters there only */
    bool reduces;
    bool in_place; /* send's block may be recv's: its own one where there is one for every rank */
    bool recv_optional; /* a rank with no recv wants no result */
    bool one_owner;     /* so it is where all devices are the host's; and there a recv may lie where
                           another local rank sends the same elements */
} dp__rule;

static const dp__rule dp__rules[] = {
    [DP_ALL_REDUCE] = {.reduces = true, .in_place = true, .recv_optional = true},
    [DP_BROADCAST] = {.send_at_root = true, .in_place = true},
    [DP_ALL_GATHER] = {.recv_all = true, .in_place = true, .one_owner = true},
    [DP_REDUCE_SCATTER] = {.send_all = true, .reduces = true, .in_place = true, .one_owner = true},
    [DP_ALL_TO_ALL] = {.send_all = true, .recv_all = true},
    [DP_REDUCE_TO] = {.recv_at_root = true, .reduces = true, .in_place = true},
    [DP_GATHER_TO] = {.recv_all = true, .recv_at_root = true, .in_place = true},
    [DP_SCATTER_FROM] = {.send_all = true, .send_at_root = true, .in_place = true}};

enum { DP__RECENT = 16, DP__LABEL_BYTES = 64 };

typedef struct dp__signature { /* what has to be the same on all ranks */
    int32_t verb, dtype, op, root;
    uint32_t reducer, bucket; /* see dp__purpose */
    uint64_t count;
    double scale;
    uint64_t number; /* a table gets it in pieces: as the journal counts the whole; else 0 */
} dp__signature;

/* What collectives are for: for which reducer, and for which bucket of it, each counted from 1; 0:
   for none, or all. So what has the same size cannot be taken for something else. */
typedef struct dp__purpose {
    const char *what; /* lasts as long as the purpose; or NULL */
    uint32_t reducer, bucket;
} dp__purpose;

typedef struct dp__label { /* the same in words */
    char what[DP__LABEL_BYTES], by[24], tag[DP__TAG_BYTES];
} dp__label;

typedef struct dp__entry {
    uint64_t seq; /* as the table counts */
    dp__signature is;
    dp__label label;
} dp__entry;

enum { DP__ENTRY_WORDS = sizeof(dp__entry) / sizeof(uint64_t) };
_Static_assert(DP__ENTRY_WORDS * sizeof(uint64_t) == sizeof(dp__entry), "an entry is words");

static const char *const dp__verb_names[] = {[DP_ALL_REDUCE] = "all_reduce",
                                             [DP_BROADCAST] = "broadcast",
                                             [DP_ALL_GATHER] = "all_gather",
                                             [DP_REDUCE_SCATTER] = "reduce_scatter",
                                             [DP_ALL_TO_ALL] = "all_to_all"};
static const char *const dp__op_names[] = {"sum", "mean", "prod", "min", "max"};

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

/* "all_reduce of 25 f32 (sum)" */
static size_t dp__signature_text(const dp__signature *is, char *text, size_t room)
{
    size_t used = dp__append(text, room, 0, "%s of %llu %s", dp__verb_names[is->verb],
                             (unsigned long long)is->count, dp_dtype_name((dp_dtype)is->dtype));
    if (is->verb == DP_BROADCAST)
        return dp__append(text, room, used, " (root %d)", (int)is->root);
    if (!dp__rules[is->verb].reduces)
        return used;
    if (is->scale < 1 || is->scale > 1)
        return dp__append(text, room, used, " (%s times %g)", dp__op_names[is->op], is->scale);
    return dp__append(text, room, used, " (%s)", dp__op_names[is->op]);
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
   Who is who.                                                                                   */

/* Of which process a rank is. */
DP__MAYBE_UNUSED static int dp__process_of(const int *firsts, int rank)
{
    int process = 0;
    while (firsts[process + 1] <= rank)
        process++;
    return process;
}

/* "process 2 of 4 (ranks 4 to 5)". firsts: the first rank of every process, and one past the last
   of all; NULL: unknown. */
static const char *dp__process_text(int process, int process_count, const int *firsts, char *text,
                                    size_t bytes)
{
    int used = snprintf(text, bytes, "process %d of %d", process, process_count);
    int first = firsts != NULL ? firsts[process] : 0;
    int last = firsts != NULL ? firsts[process + 1] - 1 : 0;
    size_t room = bytes - (size_t)used;
    if (firsts != NULL && first == last)
        snprintf(text + used, room, " (rank %d)", first);
    else if (firsts != NULL)
        snprintf(text + used, room, " (ranks %d to %d)", first, last);
    return text;
}

/* ==== >>journal ================================================================================
   With several processes each process records the collectives that it has begun lately, for the
   error sentences of a failed job. There is a ring for each of its communicators, written by the
   one thread that uses that communicator and read by any. Entries are stored word by word: reading
   one while it is written gives a mixture of two entries, and nothing worse.                   */

typedef struct dp__ring {
    dp__entry now;         /* the last one; like what follows, the writer's */
    const char *by;        /* what its label was made of */
    dp__purpose purpose;   /* what is to come is for */
    unsigned tags, labels; /* tags seen, labels made */
    bool pieces;           /* of the last one are what tables get: see >>staging */
    atomic_uint begun, done;
    _Atomic uint64_t entries[DP__RECENT][DP__ENTRY_WORDS];
} dp__ring;

static dp_status dp__journal_open(dp_ctx *ctx)
{
    dp__ring *rings = dp__host_alloc(&ctx->host, DP__LANES * sizeof *rings, 64);
    if (rings == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a journal");
    memset(rings, 0, DP__LANES * sizeof *rings);
    for (int i = 0; i < DP__LANES; i++)
        ctx->lanes[i].ring = &rings[i];
    return DP_OK;
}

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

DP_API void dp_tag(dp_ctx *ctx, const char *text)
{
    char tag[DP__TAG_BYTES];
    if (dp__check_open(__func__, ctx) != DP_OK)
        return;
    dp__label_put(tag, sizeof tag, text);
    dp__words_store(ctx->tag, tag, DP__TAG_WORDS);
    atomic_fetch_add_explicit(&ctx->tags, 1, memory_order_release);
}

/* What the collectives to come are for, until this is called again. Returns what they were for. For
   the writer. */
static dp__purpose dp__journal_for(const dp__lane *lane, dp__purpose purpose)
{
    dp__ring *ring = lane->ring;
    if (ring == NULL)
        return (dp__purpose){0};
    dp__purpose before = ring->purpose;
    ring->purpose = purpose;
    ring->by = NULL;
    return before;
}

static void dp__ring_label(const dp_ctx *ctx, dp__ring *ring, const char *by)
{
    dp__label *label = &ring->now.label;
    ring->tags = atomic_load_explicit(&ctx->tags, memory_order_acquire);
    ring->by = by;
    ring->labels++;
    dp__label_put(label->what, sizeof label->what, ring->purpose.what);
    dp__label_put(label->by, sizeof label->by, by);
    dp__words_load(label->tag, ctx->tag, DP__TAG_WORDS);
}

/* Of what a table is asked for on a lane. Pieces have that of the whole. */
static dp__signature dp__sign(const dp__ring *ring, const dp_coll_call *call)
{
    if (ring != NULL && ring->pieces) {
        dp__signature whole = ring->now.is;
        whole.number = ring->now.seq;
        return whole;
    }
    return (dp__signature){.verb = (int32_t)call->verb,
                           .dtype = (int32_t)call->dtype,
                           .op = (int32_t)call->op,
                           .root = call->root,
                           .reducer = ring != NULL ? ring->purpose.reducer : 0,
                           .bucket = ring != NULL ? ring->purpose.bucket : 0,
                           .count = call->count,
                           .scale = call->scale};
}

/* A table is about to be called. The label is made anew only where it has changed. */
static void dp__journal_begin(const dp__lane *lane, const char *by, const dp_coll_call *call)
{
    const dp_ctx *ctx = lane->ctx;
    dp__ring *ring = lane->ring;
    if (ring == NULL)
        return;
    if (ring->by != by || ring->tags != atomic_load_explicit(&ctx->tags, memory_order_relaxed))
        dp__ring_label(ctx, ring, by);
    ring->now.is = dp__sign(ring, call);
    ring->now.seq++;
    dp__words_store(ring->entries[ring->now.seq % DP__RECENT], &ring->now, DP__ENTRY_WORDS);
    atomic_store_explicit(&ring->begun, (unsigned)ring->now.seq, memory_order_release);
}

/* The table has returned. What it has refused counts in no process, so that all count alike. */
static void dp__journal_end(dp__ring *ring, dp_status status)
{
    if (ring == NULL)
        return;
    if (status == DP_OK)
        atomic_store_explicit(&ring->done, (unsigned)ring->now.seq, memory_order_release);
    else if (dp_status_class(status) == DP_CLASS_CALL)
        atomic_store_explicit(&ring->begun, (unsigned)--ring->now.seq, memory_order_release);
}

/* What the journal keeps of a communicator, whose host is a context's; NULL: that keeps none. */
static const dp__ring *dp__ring_of(const dp_comm *comm)
{
    const dp_ctx *ctx = dp__ctx_of(comm->host);
    int lane = DP__LANES - 1;
    while (lane > DP__CALLER && ctx->lanes[lane].carrier != comm)
        lane--;
    return ctx->lanes[lane].ring;
}

/* The entry that was begun so many before the last one; false: there is none. */
static bool dp__ring_entry(const dp__ring *ring, unsigned age, dp__entry *out)
{
    unsigned begun = atomic_load_explicit(&ring->begun, memory_order_acquire);
    if (age >= begun || age >= DP__RECENT)
        return false;
    dp__words_load(out, ring->entries[(begun - age) % DP__RECENT], DP__ENTRY_WORDS);
    return true;
}

static bool dp__ring_ended(const dp__ring *ring, const dp__entry *entry)
{
    unsigned done = atomic_load_explicit(&ring->done, memory_order_acquire);
    return (int)(done - (unsigned)entry->seq) >= 0;
}

static bool dp__all_are_host(const dp_ctx *ctx)
{
    bool host = true;
    for (int i = 0; i < ctx->info.local_count && host; i++)
        host = dp__is_host(&ctx->devices[i]);
    return host;
}

/* What it means that a table's call has returned: a device of its own may do the work later. */
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
    if (lane->ring == NULL || !dp__ring_entry(lane->ring, age, &entry))
        return false;
    snprintf(text, room, "collective %llu%s, %s: %s", (unsigned long long)entry.seq,
             whose[lane - lane->ctx->lanes], dp__issue_text(&entry.is, &entry.label, words),
             dp__ring_ended(lane->ring, &entry) ? dp__ended_text(lane) : "under way");
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
    if (ctx->lanes[DP__CALLER].ring == NULL || !dp__log_wants(ctx, DP_LOG_ERROR))
        return;
    dp__log(ctx, DP_LOG_ERROR, "the job failed: %s", ctx->failed_text);
    for (int i = 0; i < DP__LANES; i++)
        for (unsigned age = 0; dp__journal_line(&ctx->lanes[i], age, line, sizeof line); age++)
            dp__log(ctx, DP_LOG_ERROR, "%s", line);
}

/* What is under way, the courier's first, or was the caller's last. */
static void dp__journal_here(const dp_ctx *ctx, char *text, size_t bytes)
{
    text[0] = '\0';
    for (int i = DP__LANES - 1; i >= 0; i--) {
        dp__entry entry;
        const dp__ring *ring = ctx->lanes[i].ring;
        bool some = ring != NULL && dp__ring_entry(ring, 0, &entry);
        if (some && (i == DP__CALLER || !dp__ring_ended(ring, &entry))) {
            dp__journal_line(&ctx->lanes[i], 0, text, bytes);
            return;
        }
    }
}

/* A call has failed, and others may come to wait for what it would have done. */
static void dp__journal_say(dp_ctx *ctx, const char *text)
{
    dp__lock_enter(&ctx->lock);
    for (int i = 0; i < DP__LANES && ctx->info.process_count > 1; i++) {
        dp_comm *comm = ctx->lanes[i].comm;
        if (comm != NULL && DP_HAS(dp_coll_ops, comm->ops, say))
            comm->ops->say(comm, text);
    }
    dp__lock_leave(&ctx->lock);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
