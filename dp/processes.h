/* dp/processes.h - v0.2.0 - what dp.h needs of the other processes of a job - MIT licence

   Part of dp.h, which includes it. Here is the surface: words for collectives, and functions with
   their promises. The rooms between processes, from dp/job.h to dp/recover.h, keep them; or
   dp/alone.h does, for a program that has one process (DP_ONE_PROCESS). No other room knows more
   of those than this, so that they can be left out.

   CONTENTS (search for the tag)
     >>words   what a collective is, to compare, and in words
     >>journal what this process begins and ends, which others see
     >>others  to meet them, to share with them, to leave
*/

#ifndef DP__ROOMS
#error "dp/processes.h is a part of dp.h: include dp.h"
#else

/* ==== >>words ==================================================================================
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

typedef struct dp__signature { /* what has to be the same on all ranks */
    int32_t verb, dtype, op, root;
    uint32_t reducer, bucket; /* see dp__purpose */
    uint64_t count;
    double scale;
} dp__signature;

/* Names the reducer and the bucket that collectives are for, each counted from 1; 0: none, or all.
   So what has the same size cannot be taken for something else. */
typedef struct dp__purpose {
    const char *what; /* lasts as long as the purpose; or NULL */
    uint32_t reducer, bucket;
} dp__purpose;

static const dp__purpose dp__no_purpose;

enum { DP__LABEL_BYTES = 64 }; /* of what a purpose is called */

static const char *const dp__verb_names[] = {[DP_ALL_REDUCE] = "all_reduce",
                                             [DP_BROADCAST] = "broadcast",
                                             [DP_ALL_GATHER] = "all_gather",
                                             [DP_REDUCE_SCATTER] = "reduce_scatter",
                                             [DP_ALL_TO_ALL] = "all_to_all"};
static const char *const dp__op_names[] = {"sum", "mean", "prod", "min", "max"};

/* "all_reduce of 25 f32 (sum)" */
static size_t dp__signature_text(const dp__signature *is, char *text, size_t room)
{
    size_t used = dp__append(text, room, 0, "%s of %llu %s", dp__verb_names[is->verb],
                             (unsigned long long)is->count, dp_dtype_name((dp_dtype)is->dtype));
    if (is->verb == DP_BROADCAST)
        return dp__append(text, room, used, " (root %d)", (int)is->root);
    if (!dp__rules[is->verb].reduces)
        return used;
    if (!(is->scale >= 1 && is->scale <= 1))
        return dp__append(text, room, used, " (%s times %g)", dp__op_names[is->op], is->scale);
    return dp__append(text, room, used, " (%s)", dp__op_names[is->op]);
}

/* Makes the signature of a call. It is compared byte by byte: all NaN are the same one. */
static dp__signature dp__sign(const dp_coll_call *call, dp__purpose purpose)
{
    return (dp__signature){.verb = (int32_t)call->verb,
                           .dtype = (int32_t)call->dtype,
                           .op = (int32_t)call->op,
                           .root = call->root,
                           .reducer = purpose.reducer,
                           .bucket = purpose.bucket,
                           .count = call->count,
                           .scale = isnan(call->scale) ? (double)NAN : call->scale};
}

/* ==== >>journal ==================================================================================
   Each lane has a journal, where there are other processes: see dp/job.h.                       */

/* Sets what the collectives to come are for, until this is called again. Returns what they were
   for. For the one thread that uses the lane. */
static dp__purpose dp__journal_for(const dp__lane *lane, dp__purpose purpose);

/* Notes that a table is about to be called. Fails if the job has failed. */
static dp_status dp__journal_begin(const dp__lane *lane, const char *by, const dp_coll_call *call);

/* Notes that the table has returned; returns the same, or what has failed elsewhere before. */
static dp_status dp__journal_end(const dp__lane *lane, dp_status status);

/* Returns why the job has failed, if another process has said so. */
static dp_status dp__journal_heard(const dp__lane *lane);

/* Returns for how long a lane has waited for others that began a collective later. For the one
   thread that uses the lane. */
static uint64_t dp__journal_waited_ns(const dp__lane *lane);

/* Adds to `out` what is known of who comes last. */
static void dp__job_late(const dp_ctx *ctx, dp_late_info *out);

/* ==== >>others ===================================================================================
   To meet them, to share with them, to leave.                                                   */

typedef struct dp__share { /* a part of something that `count` processes divide */
    int place, count;
} dp__share;

typedef struct dp__neighbours {
    dp__share machine, cores; /* among the processes of its machine; of these cores */
    dp__share machines;       /* its machine among all */
} dp__neighbours;

static const dp__neighbours dp__no_neighbours = {{0, 1}, {0, 1}, {0, 1}};

enum { DP__CARRIERS = 3 };

/* Gets the tables that carry collectives between processes, at most DP__CARRIERS. Returns how many
   there are. */
static int dp__carriers(const dp_coll_ops **out);

typedef struct dp__open_attempt { /* what is known of a job while a context opens */
    const char *launcher;         /* see dp_info */
    dp__neighbours near;
    uint64_t epoch; /* when process 0 began to open it, by the clock on the wall */
    struct dp__meeting *meeting;
} dp__open_attempt;

/* Joins the job that the environment or the config names, and opens a context with its processes:
   by dp__open_ctx. */
static dp_status dp__open_joined(const dp_config *config, dp_ctx **out);

/* Opens, with the other processes, what they have together, so that all get a context or none.
   `status`: how it went here so far; ctx is NULL if there is none. */
static dp_status dp__open_with_others(dp__open_attempt *opening, dp_ctx *ctx, dp_status status);

/* Returns true if this process has come to a job later, and gets the others' numbers. */
static bool dp__catches_up(const dp_ctx *ctx);

/* Makes the parameters of a wrapper those of all processes of a machine, where there are several.
   All ranks have the same numbers in them. */
static dp_status dp__params_share(const char *fn, dp_scope *temp, dp_module *wrapper);

static const dp__failing dp__failing_job; /* what other processes hear of failures */

/* Ends the thread that looks at the others while this process does not: see dp/watchdog.h. */
static void dp__watchdog_end(dp_ctx *ctx);

/* The steps of dp_close. Tells the others that this process takes part in nothing more; ends what
   messages there are; closes the connections; gives back what may be in use until all memory of
   the context has gone. `own` is false in a child of fork: they belong to the parent. */
static void dp__job_leave(const dp_ctx *ctx);
static void dp__mailbox_close(dp_ctx *ctx);
static void dp__world_close(dp_ctx *ctx, bool own);
static void dp__world_free(dp_ctx *ctx, bool own);

/* Closes, in a child of fork, what the parent listens at. */
static void dp__world_let_go(const dp_ctx *ctx);

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
