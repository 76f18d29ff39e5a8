/* dp_mpi.h - v0.2.0 - MPI: how processes of many machines meet, and collectives between them, for
   dp.h - MIT licence

   Define DP_USE_MPI, and dp.h includes it; or include it instead of dp.h, or after. Compile the
   file that defines DP_IMPLEMENTATION with mpicc, and link with mpicc; any MPI 3 will do. Other
   files need nothing from MPI.

   WHEN MPI IS USED
   A context meets the other processes through MPI in three cases: mpirun of Open MPI or MPICH, or
   another launcher that sets their variables, or srun --mpi=pmi2 or =pmix (which sets PMIX_RANK),
   has started them; DP_LAUNCH=mpi says so; or MPI is already initialised with more than one
   process. Otherwise, as under torchrun or in a single process, this file has no effect, and MPI is
   not initialised: several machines then use TCP. The processes are those of MPI_COMM_WORLD, or of
   your own communicator: see dp_mpi_bootstrap.

   CPU devices of one machine still use shared memory, which is faster: 25 MiB between two processes
   took 8 ms, and 57 ms with MPI_Allreduce, on a busy machine. With several machines, all use the
   table dp_mpi_coll() here. The processes of a machine then add up large data in shared memory, in
   groups of 2, 4, 8 or more, and each group sends one sum and gets one result (dp/mesh.h). For this
   the ranks must be placed machine by machine, a multiple of the group's size on each; mpirun does
   so by default. Over a link of 1 Gbit/s, two hosts of two processes each add up 25 MiB in 220 ms;
   the link needs 210, one sum for each process took 458, and MPI_Allreduce of Open MPI 530 to 630
   (network namespaces on a busy machine). dp_config.colls overrides this. Messages from one rank to
   another (dp.h, >>messages) go by shared memory on one machine, and by MPI if there are several.

   THREADS
   MPI is asked for MPI_THREAD_MULTIPLE. With MPI_THREAD_SERIALIZED the calls of this file exclude
   each other, and yours must not overlap with them. With a lower level only dp_open calls MPI, on
   the thread that initialised it. That is enough on one machine, where memory is shared. The table
   here needs more, because the courier calls MPI while you compute: it fails with
   DP_ERR_UNSUPPORTED. MPI_Init gives a lower level: call MPI_Init_thread, or leave it to dp_open.

   THE END
   MPI is finalised when the process exits, if dp_open has initialised it, all contexts were closed
   and none has failed; otherwise never. After a failure nothing waits for MPI. The buffers of a
   collective or a message, and shared memory, stay in use until the process ends. mpirun then ends
   all processes, as it does when one dies. If it is told not to (--enable-recovery of Open MPI),
   the others name the dead process: on one machine at once, on several after timeout_ms. If you
   have initialised MPI, the error handler of MPI_COMM_WORLD is yours, and Open MPI calls it for
   failures in our collectives too. With MPI_ERRORS_RETURN this library reports them.

   dp_close waits up to 0.2 s for data of messages that is on its way. After that, MPI may still use
   the memory of messages that were not done: it has to last until the process ends.

   BITS
   The ranks of a process are added in a binary tree, then the processes in another, whatever
   algorithm MPI has. If all processes have the same number of ranks, a power of two, that is the
   tree of all ranks, as everywhere (dp.h, >>collectives). f16 and bf16 are added in f32 and rounded
   once. All ranks get the same bits.

   CONTENTS (search for the tag)
     >>world        a communicator of yours, and the table
     >>library      one MPI per process: levels, locks, its end
     >>links        to the other processes: what they tell each other when something fails
     >>patience     waits that end
     >>joining      whether MPI brings the processes together
     >>loads        what MPI carries of collectives
     >>packets      messages from one rank to another
     >>table        the tables
*/

#define DP__MPI_FIRST_DP /* dp.h must not include this file again */
#include "dp.h"          /* outside the guard, so that DP_IMPLEMENTATION is carried through */
#undef DP__MPI_FIRST_DP

#if !defined(DP_MPI_H) && !defined(DP__REFUSED)
#define DP_MPI_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>world ==================================================================================
   Without any of this, dp_open finds the processes of MPI_COMM_WORLD and the table by itself.   */

/* For dp_config.bootstrap: the processes of a communicator of yours are the job, in its order.
   `communicator` is what MPI_Comm_c2f returns for it. It stays yours; dp_open works on copies. All
   its processes call dp_open. If one does not, the others ask over yours who is there, in messages
   with the tag 25712. */
DP_MUST_USE DP_API dp_status dp_mpi_bootstrap(int communicator, dp_bootstrap *out);

/* CPU devices of processes that have met through MPI. */
DP_API const dp_coll_ops *dp_mpi_coll(void);

#ifdef __cplusplus
}
#endif
#endif /* DP_MPI_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_MPI_IMPLEMENTED)
#define DP_MPI_IMPLEMENTED

#include <mpi.h>

#if MPI_VERSION < 3
#error "dp_mpi.h: MPI 3 or newer: collectives that do not block came with it"
#else

/* ==== >>library ================================================================================
   There is one MPI for a whole process, whoever has initialised it.                             */

typedef struct dp__mpi_library {
    dp__lock lock;       /* around calls, if MPI needs that; and for what follows */
    atomic_int level;    /* MPI_THREAD_..., read without the lock */
    unsigned fork_count; /* of the process in which dp_open initialised it, if it did */
    int open;            /* links */
    bool lost;           /* a job has failed: others may never come to MPI_Finalize */
} dp__mpi_library;

static dp__mpi_library dp__mpi = {.lock = DP__LOCK_INITIALIZER};

static int dp__mpi_level(void)
{
    return atomic_load_explicit(&dp__mpi.level, memory_order_relaxed);
}

/* Around every call except those that are allowed anywhere. No call in between blocks. */
static void dp__mpi_enter(void)
{
    if (dp__mpi_level() < MPI_THREAD_MULTIPLE)
        dp__lock_enter(&dp__mpi.lock);
}

static void dp__mpi_leave(void)
{
    if (dp__mpi_level() < MPI_THREAD_MULTIPLE)
        dp__lock_leave(&dp__mpi.lock);
}

static bool dp__mpi_is_there(void)
{
    int begun = 0, over = 0;
    MPI_Initialized(&begun);
    MPI_Finalized(&over);
    return begun && !over;
}

static dp_status dp__mpi_error(const char *call, int code)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int bytes = 0;
    MPI_Error_string(code, text, &bytes);
    for (char *at = strchr(text, '\n'); at != NULL; at = strchr(at, '\n'))
        *at = ' ';
    return dp_error(DP_ERR_REMOTE, "%s: %.200s", call, text);
}

/* When the process exits. A child of fork has no MPI. */
static void dp__mpi_stop(void)
{
    bool good = dp__mpi.fork_count == dp__os_fork_count() && dp__mpi.open == 0 && !dp__mpi.lost;
    if (good && dp__mpi_is_there())
        MPI_Finalize();
}

static dp_status dp__mpi_init(void)
{
    int level = 0, code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    if (code != MPI_SUCCESS)
        return dp__mpi_error("MPI_Init_thread", code);
    dp__mpi.fork_count = dp__os_fork_count();
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); /* some report all errors there */
    if (atexit(dp__mpi_stop) != 0)
        return dp_error(DP_ERR_NO_MEMORY, "no memory to finalise MPI at the end");
    return DP_OK;
}

/* For the thread that opens a context. */
static dp_status dp__mpi_begin(void)
{
    int over = 0, here = 0, level = 0;
    MPI_Finalized(&over);
    if (over)
        return dp_error(DP_ERR_STATE, "MPI was finalised before, and cannot begin again");
    dp__lock_enter(&dp__mpi.lock);
    dp_status status = dp__mpi_is_there() ? DP_OK : dp__mpi_init();
    if (status == DP_OK)
        MPI_Query_thread(&level);
    atomic_store(&dp__mpi.level, level);
    dp__lock_leave(&dp__mpi.lock);
    DP_TRY(status);
    MPI_Is_thread_main(&here);
    if (dp__mpi_level() < MPI_THREAD_SERIALIZED && !here)
        return dp_error(DP_ERR_STATE, "MPI serves only the thread that initialised it: call "
                                      "dp_open there, or MPI_Init_thread with MPI_THREAD_MULTIPLE");
    return DP_OK;
}

/* ==== >>links ===================================================================================
   A communicator of our own, over which a context opens, one thread at a time. When something is
   wrong, and where there is no board, notes also go from one process to another: the first failure
   in words; progress messages about what each has begun; and, while a context opens, the question
   of a process that has waited too long, in which step each other one is, and the answers. Waiting
   processes listen to them. They are small: MPI sends small messages at once. A link that has
   failed is never freed, as MPI may still read and write what it was given.                      */

enum {
    DP__MPI_NOTES = 0x6470, /* the tag */
    DP__MPI_FLUSH_MS = 200
};

typedef enum dp__mpi_kind {
    DP__MPI_SILENT, /* nothing was heard */
    DP__MPI_FAILED,
    DP__MPI_PROGRESS,
    DP__MPI_ASKS,
    DP__MPI_ANSWERS
} dp__mpi_kind;

typedef struct dp__mpi_note {
    int32_t kind, status, culprit;
    int32_t step; /* of opening */
    uint64_t run; /* of which links a progress message is: another one may have been here before */
    dp__progress_message progress;
    char text[DP__TEXT_BYTES];
} dp__mpi_note;

struct dp__mpi_links {
    MPI_Comm comm;   /* MPI_COMM_NULL before all have come */
    MPI_Comm coming; /* MPI writes here when they have */
    MPI_Comm notes;  /* where notes go: before that the communicator from which it is made */
    int process, process_count, timeout_ms;
    uint64_t run;      /* process 0 draws it */
    int step;          /* of opening, which this process has begun last */
    dp__lock ear;      /* around receiving a note */
    dp__lock lock;     /* of what follows: dp_abort comes from any thread */
    atomic_int failed; /* a dp_status; what follows is complete */
    int culprit;       /* a process; -1: unknown */
    char text[DP__TEXT_BYTES];
    dp__mpi_note *heard; /* one from every process */
    dp__mpi_note *out;   /* one to every process, then those of the failure: MPI may hold a note */
    MPI_Request *sends;  /* until the other side has read it */
};

static bool dp__mpi_send(dp__mpi_links *links, int kind, int to,
                         const dp__progress_message *progress)
{
    int sent = 0, place = to + (kind == DP__MPI_FAILED ? links->process_count : 0);
    dp__mpi_note *note = &links->out[place];
    if (MPI_Test(&links->sends[place], &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || !sent)
        return false; /* an answer: the question sent before it says the same */
    memset(note, 0, sizeof *note);
    note->kind = kind;
    note->status = (int32_t)atomic_load(&links->failed);
    note->step = links->step;
    note->run = links->run;
    if (progress != NULL)
        note->progress = *progress;
    if (kind != DP__MPI_FAILED)
        return MPI_Isend(note, (int)sizeof *note, MPI_BYTE, to, DP__MPI_NOTES, links->notes,
                         &links->sends[place]) == MPI_SUCCESS;
    note->culprit = links->culprit;
    memcpy(note->text, links->text, sizeof note->text); /* done when it was read: see flush */
    return MPI_Issend(note, (int)sizeof *note, MPI_BYTE, to, DP__MPI_NOTES, links->notes,
                      &links->sends[place]) == MPI_SUCCESS;
}

/* To a process, or (-1) to all others. */
static void dp__mpi_tell(dp__mpi_links *links, int kind, int to,
                         const dp__progress_message *progress)
{
    dp__lock_enter(&links->lock);
    dp__mpi_enter();
    for (int p = 0; p < links->process_count; p++)
        if (p != links->process && (to < 0 || p == to))
            (void)dp__mpi_send(links, kind, p,
                               progress); /* one that does not hear it will time out */
    dp__mpi_leave();
    dp__lock_leave(&links->lock);
}

/* How many notes MPI still has in its hands. */
static int dp__mpi_unsent(dp__mpi_links *links)
{
    int count = 0;
    dp__lock_enter(&links->lock);
    dp__mpi_enter();
    for (int p = 0; p < 2 * links->process_count; p++) {
        int sent = 0;
        int code = MPI_Test(&links->sends[p], &sent, MPI_STATUS_IGNORE);
        count += code == MPI_SUCCESS && !sent;
    }
    dp__mpi_leave();
    dp__lock_leave(&links->lock);
    return count;
}

/* Wait until all have read what they were told, or for a short time: MPI may hold a note while
   nobody calls it here, and a process that computes only looks when it waits again. */
static void dp__mpi_flush(dp__mpi_links *links)
{
    uint64_t until = dp__os_after_ms(DP__MPI_FLUSH_MS);
    while (dp__mpi_unsent(links) > 0 && dp__os_ms_until(until) > 0)
        dp__os_yield();
}

static dp_status dp__mpi_failure(const dp__mpi_links *links)
{
    return dp_error((dp_status)atomic_load(&links->failed), "%s", links->text);
}

static void dp__mpi_lose(void)
{
    dp__lock_enter(&dp__mpi.lock);
    dp__mpi.lost = true;
    dp__lock_leave(&dp__mpi.lock);
}

/* The first failure stays; true if this is it. */
static bool dp__mpi_note_failure(dp__mpi_links *links, dp_status status, int culprit,
                                 const char *text)
{
    dp__lock_enter(&links->lock);
    bool first = atomic_load(&links->failed) == DP_OK;
    if (first) {
        snprintf(links->text, sizeof links->text, "%s", text);
        links->culprit = culprit;
        atomic_store(&links->failed, (int)status);
    }
    dp__lock_leave(&links->lock);
    dp__mpi_lose();
    return first;
}

/* The others hear of it, unless there was a failure before. dp_last_error stays as it is. */
static void dp__mpi_spread(dp__mpi_links *links, dp_status status, int culprit, const char *text)
{
    if (dp__mpi_note_failure(links, status, culprit, text) && links->notes != MPI_COMM_NULL) {
        dp__mpi_tell(links, DP__MPI_FAILED, -1, NULL);
        dp__mpi_flush(links);
    }
}

/* Makes dp_last_error the failure of the links, because of `process`; -1: it is not known because
   of whom. */
static dp_status dp__mpi_fail(dp__mpi_links *links, dp_status status, int process)
{
    dp__mpi_spread(links, status, process, dp_last_error());
    return dp__mpi_failure(links);
}

static dp_status dp__mpi_broken(dp__mpi_links *links, const char *call, int code)
{
    char said[DP__TEXT_BYTES];
    (void)dp__mpi_error(call, code);
    snprintf(said, sizeof said, "%.*s", (int)sizeof said - 64, dp_last_error());
    return dp__mpi_fail(links, dp_error(DP_ERR_REMOTE, "step %d of meeting: %s", links->step, said),
                        -1);
}

/* One note, if there is one. Before all have come others than we may send something there. */
static int dp__mpi_receive(dp__mpi_links *links, dp__mpi_note *note, int *out_from)
{
    MPI_Status status;
    int there = 0, bytes = 0;
    *out_from = -1;
    dp__lock_enter(&links->ear);
    dp__mpi_enter();
    int code = MPI_Iprobe(MPI_ANY_SOURCE, DP__MPI_NOTES, links->notes, &there, &status);
    if (code == MPI_SUCCESS && there)
        code = MPI_Get_count(&status, MPI_BYTE, &bytes);
    there = there && bytes == (int)sizeof *note;
    if (code == MPI_SUCCESS && there) /* it is here, so this does not block */
        code = MPI_Recv(note, (int)sizeof *note, MPI_BYTE, status.MPI_SOURCE, DP__MPI_NOTES,
                        links->notes, MPI_STATUS_IGNORE);
    dp__mpi_leave();
    dp__lock_leave(&links->ear);
    if (code == MPI_SUCCESS && there)
        *out_from = status.MPI_SOURCE;
    return code;
}

/* Read what others have sent. Letters are for `job`; NULL: a context still opens. */
static dp_status dp__mpi_hear(dp__mpi_links *links, dp__job *job)
{
    dp__mpi_note note;
    int from = links->notes != MPI_COMM_NULL ? 0 : -1;
    while (from >= 0) {
        int code = dp__mpi_receive(links, &note, &from);
        if (code != MPI_SUCCESS)
            return dp__mpi_broken(links, "MPI_Iprobe", code);
        if (from < 0)
            break;
        if (note.kind == DP__MPI_PROGRESS) {
            bool asks = job != NULL && note.run == links->run &&
                        dp__progress_message_read(job, from, &note.progress);
            note.progress = asks ? dp__progress_message_of(job) : note.progress;
            if (asks)
                dp__mpi_tell(links, DP__MPI_PROGRESS, from, &note.progress);
            continue;
        }
        if (note.kind == DP__MPI_FAILED) {
            note.text[sizeof note.text - 1] = '\0';
            dp__mpi_note_failure(links, (dp_status)note.status, note.culprit, note.text);
            return dp__mpi_failure(links);
        }
        dp__lock_enter(&links->lock);
        links->heard[from] = note;
        dp__lock_leave(&links->lock);
        if (note.kind == DP__MPI_ASKS)
            dp__mpi_tell(links, DP__MPI_ANSWERS, from, NULL);
    }
    return DP_OK;
}

/* ==== >>patience ===============================================================================
   Nothing blocks. A waiting thread asks MPI again and again, as MPI makes progress only while it is
   called. Every few milliseconds it looks whether it still makes sense to wait.                 */

enum { DP__MPI_GRACE_MS = 1000 /* for answers */ };

/* The first of so many others that have said nothing (step -1), or are in another step. */
static int dp__mpi_missing(dp__mpi_links *links, int step, int *out_first)
{
    int count = 0;
    dp__lock_enter(&links->lock);
    for (int p = links->process_count - 1; p >= 0; p--) {
        bool silent = links->heard[p].kind == DP__MPI_SILENT;
        if (p != links->process && (step < 0 ? silent : !silent && links->heard[p].step != step)) {
            *out_first = p;
            count++;
        }
    }
    dp__lock_leave(&links->lock);
    return count;
}

/* A process that does not answer computes, sleeps, or is gone. One that has asked has answered. */
static dp_status dp__mpi_ask(dp__mpi_links *links)
{
    int first;
    uint64_t until = dp__os_after_ms(DP__MPI_GRACE_MS);
    dp__mpi_tell(links, DP__MPI_ASKS, -1, NULL);
    do {
        dp__os_sleep_ns(DP__IDLE_NAP_NS);
        DP_TRY(dp__mpi_hear(links, NULL));
    } while (dp__mpi_missing(links, -1, &first) > 0 && dp__os_ms_until(until) > 0);
    return DP_OK;
}

/* While a context opens: who is missing, or else in another step? `why` is said about the first. */
static dp_status dp__mpi_accuse(dp__mpi_links *links, dp_status status, const char *why)
{
    char more[32] = "";
    int first = -1;
    DP_TRY(dp__mpi_ask(links));
    int missing = dp__mpi_missing(links, -1, &first);
    missing = missing > 0 ? missing : dp__mpi_missing(links, links->step, &first);
    if (missing > 1)
        snprintf(more, sizeof more, " and %d more", missing - 1);
    if (missing > 0)
        dp_error(status, "step %d of meeting: process %d of %d%s %s", links->step, first,
                 links->process_count, more, why);
    else
        dp_error(status, "step %d of meeting: all processes are in it: MPI %s", links->step, why);
    return dp__mpi_fail(links, status, first);
}

/* MPI says that a collective has failed: often because others are gone. */
static dp_status dp__mpi_suspect(dp__mpi_links *links, int code)
{
    char text[200];
    (void)dp__mpi_error(links->comm == MPI_COMM_NULL ? "MPI_Comm_idup" : "MPI_Test", code);
    snprintf(text, sizeof text, "does not answer (%.140s)", dp_last_error());
    return dp__mpi_accuse(links, DP_ERR_REMOTE, text);
}

/* While a context opens there is no job yet to look at. */
static dp_status dp__mpi_look(dp__mpi_links *links, dp__wait *wait)
{
    char text[64];
    uint64_t waited_ns;
    if (!dp__wait_looks(wait, DP__LOOK_NS, &waited_ns))
        return DP_OK;
    DP_TRY(dp__mpi_hear(links, NULL));
    if (waited_ns < (uint64_t)links->timeout_ms * 1000000)
        return DP_OK;
    snprintf(text, sizeof text, "did not come within %d ms", links->timeout_ms);
    return dp__mpi_accuse(links, DP_ERR_TIMEOUT, text);
}

/* Asks whether MPI is done with it. */
static dp_status dp__mpi_test(MPI_Request *request, bool *out)
{
    int done = 0;
    dp__mpi_enter();
    int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
    dp__mpi_leave();
    *out = done;
    return code == MPI_SUCCESS ? DP_OK : dp__mpi_error("MPI_Test", code);
}

/* While a context opens. */
static dp_status dp__mpi_await(dp__mpi_links *links, MPI_Request *request)
{
    dp__idle_wait wait = {0};
    for (;;) {
        int done = 0;
        dp__mpi_enter();
        int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        dp__mpi_leave();
        if (code != MPI_SUCCESS)
            return dp__mpi_suspect(links, code);
        if (done)
            return DP_OK;
        if (dp__idle(&wait))
            DP_TRY(dp__mpi_look(links, &wait.look));
    }
}

/* ==== >>joining ================================================================================
   Whether MPI brings the processes together, and the links over which a context opens.          */

static void dp__mpi_links_free(dp__mpi_links *links)
{
    dp__os_free(links->out, 0, NULL);
    dp__os_free(links->heard, 0, NULL);
    dp__os_free(links->sends, 0, NULL);
    links->out = links->heard = NULL;
    links->sends = NULL;
}

/* Only the memory; not the context's, since it outlives one that failed. */
static dp_status dp__mpi_links_alloc(dp__mpi_links *links, int process, int process_count,
                                     int timeout_ms)
{
    size_t notes = (size_t)process_count * sizeof(dp__mpi_note);
    size_t sends = 2 * (size_t)process_count * sizeof(MPI_Request);
    links->comm = links->notes = MPI_COMM_NULL;
    links->process = process;
    links->process_count = process_count;
    links->timeout_ms = timeout_ms;
    links->culprit = -1;
    links->ear = links->lock = (dp__lock)DP__LOCK_INITIALIZER;
    links->out = dp__os_alloc(2 * notes, 64, NULL);
    links->heard = dp__os_alloc(notes, 64, NULL);
    links->sends = dp__os_alloc(sends, 64, NULL);
    if (links->out == NULL || links->heard == NULL || links->sends == NULL) {
        dp__mpi_links_free(links);
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", process_count);
    }
    for (int p = 0; p < 2 * process_count; p++)
        links->sends[p] = MPI_REQUEST_NULL;
    for (int p = 0; p < process_count; p++)
        links->heard[p].kind = DP__MPI_SILENT;
    return DP_OK;
}

static void dp__mpi_tally(int step)
{
    dp__lock_enter(&dp__mpi.lock);
    dp__mpi.open += step;
    dp__lock_leave(&dp__mpi.lock);
}

/* Make a copy of `of`, which all its processes do: they wait for that on the links. */
static dp_status dp__mpi_copy(dp__mpi_links *links, MPI_Comm of, MPI_Comm *coming)
{
    MPI_Request request;
    dp__mpi_enter();
    int code = MPI_Comm_idup(of, coming, &request);
    dp__mpi_leave();
    if (code != MPI_SUCCESS)
        return dp__mpi_error("MPI_Comm_idup", code);
    DP_TRY(dp__mpi_await(links, &request));
    dp__mpi_enter();
    MPI_Comm_set_errhandler(*coming, MPI_ERRORS_RETURN);
    dp__mpi_leave();
    dp__mpi_tally(1);
    return DP_OK;
}

/* The counterpart; collective in name only, in any MPI that we know. */
static void dp__mpi_drop(MPI_Comm *comm)
{
    if (*comm == MPI_COMM_NULL)
        return;
    dp__mpi_enter();
    if (dp__mpi_is_there())
        MPI_Comm_free(comm);
    dp__mpi_leave();
    dp__mpi_tally(-1);
}

/* The job may have failed where MPI had no part in it. Links that failed stay. */
static void dp__mpi_links_leave(dp__mpi_links *links, bool job_failed)
{
    bool good = atomic_load(&links->failed) == DP_OK;
    if (job_failed)
        dp__mpi_lose();
    if (!good)
        return;
    dp__mpi_drop(&links->comm);
    dp__mpi_links_free(links);
    dp__os_free(links, 0, NULL);
}

/* dp_bootstrap.all_gather over links. Its memory is its own, as MPI may write there after a
   failure. */
static dp_status dp__mpi_links_gather(const void *in, void *out, size_t bytes_each, void *user)
{
    dp__mpi_links *links = user;
    MPI_Request request;
    size_t all = bytes_each * (size_t)links->process_count;
    char *room = dp__os_alloc(all + bytes_each, 64, NULL);
    if (room == NULL)
        return dp__mpi_fail(links, dp_error(DP_ERR_REMOTE, "no memory for %zu bytes", all), -1);
    memcpy(room + all, in, bytes_each);
    dp__lock_enter(&links->lock);
    links->step++;
    dp__lock_leave(&links->lock);
    dp__mpi_enter();
    int code = MPI_Iallgather(room + all, (int)bytes_each, MPI_BYTE, room, (int)bytes_each,
                              MPI_BYTE, links->comm, &request);
    dp__mpi_leave();
    if (code != MPI_SUCCESS)
        return dp__mpi_broken(links, "MPI_Iallgather", code);
    DP_TRY(dp__mpi_await(links, &request));
    memcpy(out, room, all);
    dp__os_free(room, 0, NULL);
    return DP_OK;
}

/* Reads what has come on the links over which a context was opened, while others than MPI's
   collectives carry its bytes. Where MPI serves one thread only it reads nothing: this is another
   thread. */
static dp_status dp__mpi_links_hear(dp__mpi_links *links, dp__job *job, int *out_process)
{
    if (dp__mpi_level() < MPI_THREAD_SERIALIZED)
        return DP_OK;
    dp_status status = atomic_load(&links->failed) != DP_OK ? dp__mpi_failure(links)
                                                            : dp__mpi_hear(links, job);
    *out_process = links->culprit < links->process_count ? links->culprit : -1;
    return status;
}

static void dp__mpi_links_tell(dp__mpi_links *links, dp_status status, int process,
                               const char *text)
{
    if (dp__mpi_level() >= MPI_THREAD_SERIALIZED)
        dp__mpi_spread(links, status, process, text);
}

static void dp__mpi_links_send(dp__mpi_links *links, const dp__progress_message *progress)
{
    if (dp__mpi_level() >= MPI_THREAD_SERIALIZED)
        dp__mpi_tell(links, DP__MPI_PROGRESS, -1, progress);
}

/* Gathers on a communicator of the user, in case they call it; dp_open makes links from it. */
static dp_status dp__mpi_handle_gather(const void *in, void *out, size_t bytes_each, void *user)
{
    MPI_Comm comm = MPI_Comm_f2c((MPI_Fint)(intptr_t)user);
    int code = MPI_Allgather(in, (int)bytes_each, MPI_BYTE, out, (int)bytes_each, MPI_BYTE, comm);
    return code == MPI_SUCCESS ? DP_OK : dp__mpi_error("MPI_Allgather", code);
}

DP_API dp_status dp_mpi_bootstrap(int communicator, dp_bootstrap *out)
{
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (!dp__mpi_is_there())
        return dp_error(DP_ERR_STATE, "%s: MPI is not initialised, or finalised already", __func__);
    MPI_Comm comm = MPI_Comm_f2c((MPI_Fint)communicator);
    if (comm == MPI_COMM_NULL)
        return dp_error(DP_ERR_INVALID, "%s: the communicator is MPI_COMM_NULL", __func__);
    *out =
        (dp_bootstrap){.all_gather = dp__mpi_handle_gather, .user = (void *)(intptr_t)communicator};
    MPI_Comm_rank(comm, &out->process);
    MPI_Comm_size(comm, &out->process_count);
    return DP_OK;
}

static dp_status dp__mpi_split(dp__mpi_links *links, int group, dp_bootstrap *out)
{
    MPI_Comm comm = MPI_COMM_NULL;
    dp__mpi_enter();
    int code =
        MPI_Comm_split(links->comm, group < 0 ? MPI_UNDEFINED : group, links->process, &comm);
    dp__mpi_leave();
    if (code != MPI_SUCCESS)
        return dp__mpi_error("MPI_Comm_split", code);
    *out = (dp_bootstrap){0};
    if (comm == MPI_COMM_NULL)
        return DP_OK;
    dp__mpi_tally(1);
    return dp_mpi_bootstrap((int)MPI_Comm_c2f(comm), out);
}

static void dp__mpi_drop_split(dp_bootstrap *boot)
{
    MPI_Comm comm = MPI_Comm_f2c((MPI_Fint)(intptr_t)boot->user);
    if (boot->all_gather != NULL)
        dp__mpi_drop(&comm);
}

/* As the environment says; `launch` is filled in with what it knows. */
static dp_status dp__mpi_is_meant(dp__launch *launch, bool *out)
{
    const char *only = dp__os_env("DP_LAUNCH");
    const dp__launcher *launcher = NULL;
    int size = 1;
    *out = only != NULL && strcmp(only, "mpi") == 0;
    if (*out)
        return DP_OK;
    if (only == NULL && dp__mpi_is_there())
        MPI_Comm_size(MPI_COMM_WORLD, &size);
    DP_TRY(dp__launcher_find(&launcher));
    bool mpi = launcher != NULL &&
               (strcmp(launcher->name, "openmpi") == 0 || strcmp(launcher->name, "mpich") == 0);
    bool slurm = launcher != NULL && strcmp(launcher->name, "slurm") == 0 &&
                 dp__os_env("PMIX_RANK") != NULL; /* what --mpi=pmi2 sets is mpich's */
    *out = size > 1;
    if (!mpi && !slurm)
        return DP_OK;
    DP_TRY(dp__launch_self(launcher, launch));
    *out = size > 1 || launch->process_count > 1;
    return DP_OK;
}

/* A program that was built with one MPI and started by another's mpirun becomes many worlds of
   one. */
static dp_status dp__mpi_check_size(const dp__launch *launch, bool found, int size)
{
    static char
        version[MPI_MAX_LIBRARY_VERSION_STRING]; /* too large for a stack; always the same */
    int bytes = 0;
    if (!found || launch->process_count == size)
        return DP_OK;
    MPI_Get_library_version(version, &bytes);
    return dp_error(DP_ERR_MISMATCH,
                    "dp_open: %s has started %d processes, and the MPI that this program was built "
                    "with (%.*s) sees %d: start it by that one's mpirun, or set DP_LAUNCH=none",
                    launch->name, launch->process_count, (int)strcspn(version, "\n,"), version,
                    size);
}

/* Check first that all mean the same job. */
static dp_status dp__mpi_same_job(dp__mpi_links *links, const char *job)
{
    const struct dp__mpi_name {
        uint64_t job, run;
    } own = {job != NULL ? dp__hash(dp__hash_first, job, strlen(job)) : dp__hash_first,
             dp__os_random()};
    size_t count = (size_t)links->process_count;
    struct dp__mpi_name *all = dp__os_alloc(count * sizeof own, sizeof own, NULL);
    if (all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %zu processes", count);
    dp_status status = dp__mpi_links_gather(&own, all, sizeof own, links);
    for (size_t p = 0; p < count && status == DP_OK; p++)
        if (all[p].job != own.job)
            status = dp_error(DP_ERR_MISMATCH,
                              "dp_open: process %d opens a context for job '%s', process %zu one "
                              "for another: all open them in the same order",
                              links->process, job != NULL ? job : "", p);
    links->run = all[0].run;
    dp__os_free(all, 0, NULL);
    return status;
}

static dp_status dp__mpi_links_open(MPI_Comm of, const dp_config *config, int timeout_ms,
                                    dp__mpi_links **out)
{
    int process = 0, process_count = 0;
    dp__mpi_links *links = dp__os_alloc(sizeof *links, 64, NULL);
    if (links == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a communicator");
    memset(links, 0, sizeof *links);
    MPI_Comm_rank(of, &process);
    MPI_Comm_size(of, &process_count);
    dp_status status = dp__mpi_links_alloc(links, process, process_count, timeout_ms);
    links->notes = of;
    if (status == DP_OK)
        status = dp__mpi_copy(links, of, &links->coming);
    if (status == DP_OK)
        status = dp__mpi_hear(links, NULL); /* who comes after the others have given up */
    if (status == DP_OK)
        links->comm = links->notes = links->coming;
    if (status == DP_OK)
        status = dp__mpi_same_job(links, config->job);
    if (status == DP_OK)
        *out = links;
    else
        dp__mpi_links_leave(links, false);
    return status;
}

static dp_status dp__mpi_join(dp_config *config, int timeout_ms, dp__launch *launch,
                              bool *out_meant, dp__mpi_links **out)
{
    bool given = config->bootstrap.all_gather == dp__mpi_handle_gather, meant = given;
    dp__launch found = {.name = "mpi", .process_count = 0};
    int size = 1;
    if (config->bootstrap.all_gather != NULL && !given)
        return DP_OK;
    if (!given)
        DP_TRY(dp__mpi_is_meant(&found, &meant));
    if (!meant)
        return DP_OK;
    dp_status status = dp__mpi_begin();
    MPI_Comm of = MPI_COMM_WORLD;
    if (status == DP_OK && given)
        of = MPI_Comm_f2c((MPI_Fint)(intptr_t)config->bootstrap.user);
    if (status == DP_OK)
        MPI_Comm_size(of, &size);
    if (status == DP_OK && !given)
        status = dp__mpi_check_size(&found, found.process_count > 0, size);
    if (status == DP_OK && size > 1)
        status = dp__mpi_links_open(of, config, timeout_ms, out);
    if (status != DP_OK)
        dp_error(status, "dp_open: %s", dp__open_error());
    DP_TRY(status);
    *out_meant = true;
    *launch = found;
    config->bootstrap = (dp_bootstrap){0};
    if (*out != NULL)
        config->bootstrap = (dp_bootstrap){dp__mpi_links_gather, *out, (*out)->process, size};
    return DP_OK;
}

/* ==== >>loads ==================================================================================
   The mesh (dp/mesh.h) cuts collectives into pieces, which MPI's own carry. Each lane has a
   communicator for them.                                                                        */

typedef struct
    dp__mpi_packet { /* MPI may still have it after a failure: it is no context's memory */
    dp__packet is;
    int process;
    MPI_Request request; /* MPI_REQUEST_NULL: nothing */
} dp__mpi_packet;
_Static_assert(offsetof(dp__mpi_packet, is) == 0, "a packet is the head of what MPI has of it");

typedef struct dp__mpi_endpoint {
    dp__mpi_links *links; /* over which its context has opened */
    MPI_Comm native;      /* for loads */
    MPI_Request requests[DP__LOADS];
    dp__load *begun[DP__LOADS]; /* NULL: that has ended */
    dp__packet *in;             /* the next one that comes; or NULL */
    dp__packet *out, *coming;   /* sent, and with data on its way to here */
} dp__mpi_endpoint;

static int dp__mpi_gather(const dp__endpoint *endpoint, const dp__load *load, MPI_Request *request)
{
    const dp__mpi_endpoint *own = endpoint->own;
    int bytes = load->to.counts[endpoint->process];
    const char *out = load->out;
    char *in = load->in;
    const void *from = out == in + load->from.places[endpoint->process] ? MPI_IN_PLACE : out;
    if (load->even)
        return MPI_Iallgather(from, bytes, MPI_BYTE, in, bytes, MPI_BYTE, own->native, request);
    return MPI_Iallgatherv(from, bytes, MPI_BYTE, in, load->from.counts, load->from.places,
                           MPI_BYTE, own->native, request);
}

static dp_status dp__mpi_begin_load(dp__endpoint *endpoint, dp__load *load)
{
    dp__mpi_endpoint *own = endpoint->own;
    MPI_Request *request = &own->requests[load->place];
    dp__mpi_enter();
    int code = load->same ? dp__mpi_gather(endpoint, load, request)
                          : MPI_Ialltoallv(load->out, load->to.counts, load->to.places, MPI_BYTE,
                                           load->in, load->from.counts, load->from.places, MPI_BYTE,
                                           own->native, request);
    dp__mpi_leave();
    load->left = 1;
    own->begun[load->place] = load;
    return code == MPI_SUCCESS
               ? DP_OK
               : dp__mpi_error(load->same ? "MPI_Iallgatherv" : "MPI_Ialltoallv", code);
}

static dp_status dp__mpi_loads_look(dp__mpi_endpoint *own)
{
    for (int i = 0; i < DP__LOADS; i++) {
        bool done = false;
        if (own->begun[i] == NULL)
            continue;
        DP_TRY(dp__mpi_test(&own->requests[i], &done));
        own->begun[i]->left = !done;
        own->begun[i] = done ? NULL : own->begun[i];
    }
    return DP_OK;
}

/* ==== >>packets ==================================================================================
   Messages from one rank to another (dp/mailbox.h) travel on the links. A header is a message of
   MPI's, and so is each part of the data that follows it, with a tag of its own, so that two that
   are under way are not taken for each other.                                                    */

enum {
    DP__MPI_HEADERS = DP__MPI_NOTES + 1, /* the tag */
    DP__MPI_DATA = DP__MPI_NOTES + 16,   /* the first of those for data: MPI has 32,767 at least */
    DP__MPI_DATA_TAGS = 4096,
    DP__MPI_DATA_BYTES = 1 << 30 /* at once: MPI counts in int */
};

static dp__mpi_packet *dp__mpi_packet_of(dp__packet *packet)
{
    return (void *)packet;
}

/* Returns how many bytes of a packet MPI moves next. */
static int dp__mpi_bytes(const dp__packet *packet)
{
    return packet->left < DP__MPI_DATA_BYTES ? (int)packet->left : DP__MPI_DATA_BYTES;
}

/* Gives MPI the next part of a packet. */
static dp_status dp__mpi_part(dp__endpoint *endpoint, dp__packet *packet, bool sends)
{
    const dp__mpi_endpoint *own = endpoint->own;
    dp__mpi_packet *part = dp__mpi_packet_of(packet);
    int bytes = dp__mpi_bytes(packet);
    int tag = packet->data ? DP__MPI_DATA + (int)(packet->header.is.reply % DP__MPI_DATA_TAGS)
                           : DP__MPI_HEADERS;
    part->request = MPI_REQUEST_NULL;
    dp__mpi_enter();
    int code = sends ? MPI_Isend(packet->at, bytes, MPI_BYTE, part->process, tag, own->links->comm,
                                 &part->request)
                     : MPI_Irecv(packet->at, bytes, MPI_BYTE, part->process, tag, own->links->comm,
                                 &part->request);
    dp__mpi_leave();
    return code == MPI_SUCCESS ? DP_OK : dp__mpi_error("MPI_Isend, MPI_Irecv", code);
}

/* Sends what can be sent of a packet. Returns, in `out_gone`, true if that was all. */
static dp_status dp__mpi_packet_send(dp__endpoint *endpoint, dp__packet *packet, bool *out_gone)
{
    bool done = false;
    *out_gone = false;
    for (;;) {
        DP_TRY(dp__mpi_test(&dp__mpi_packet_of(packet)->request, &done));
        if (!done)
            return DP_OK;
        *out_gone = dp__packet_sent(endpoint, packet, (size_t)dp__mpi_bytes(packet));
        if (*out_gone)
            return DP_OK;
        DP_TRY(dp__mpi_part(endpoint, packet, true));
    }
}

static dp_status dp__mpi_send_packet(dp__endpoint *endpoint, int process, dp__packet *packet)
{
    dp__mpi_endpoint *own = endpoint->own;
    bool gone = false;
    dp__mpi_packet_of(packet)->process = process;
    packet->next = own->out;
    own->out = packet;
    DP_TRY(dp__mpi_part(endpoint, packet, true));
    dp__packet *next = packet->next;
    DP_TRY(dp__mpi_packet_send(endpoint, packet, &gone));
    own->out = gone ? next : own->out;
    return DP_OK;
}

static dp_status dp__mpi_out_look(dp__endpoint *endpoint)
{
    dp__mpi_endpoint *own = endpoint->own;
    for (dp__packet **at = &own->out; *at != NULL;) {
        dp__packet *next = (*at)->next;
        bool gone = false;
        DP_TRY(dp__mpi_packet_send(endpoint, *at, &gone));
        if (gone)
            *at = next;
        else
            at = &(*at)->next;
    }
    return DP_OK;
}

/* Receives a header, if one has come; *out_from is -1 else. */
static dp_status dp__mpi_header_next(dp__endpoint *endpoint, dp__packet *packet, int *out_from)
{
    MPI_Comm comm = ((const dp__mpi_endpoint *)endpoint->own)->links->comm;
    MPI_Status status;
    int there = 0;
    *out_from = -1;
    dp__mpi_enter();
    int code = MPI_Iprobe(MPI_ANY_SOURCE, DP__MPI_HEADERS, comm, &there, &status);
    if (code == MPI_SUCCESS && there) /* it is here, so this does not block */
        code = MPI_Recv(packet->at, (int)packet->left, MPI_BYTE, status.MPI_SOURCE, DP__MPI_HEADERS,
                        comm, &status);
    dp__mpi_leave();
    if (code != MPI_SUCCESS)
        return dp__mpi_error("MPI_Iprobe", code);
    *out_from = there ? status.MPI_SOURCE : -1;
    return DP_OK;
}

/* Takes headers that have come, and begins to receive what follows them. */
static dp_status dp__mpi_headers_look(dp__endpoint *endpoint)
{
    dp__mpi_endpoint *own = endpoint->own;
    for (;;) {
        int from;
        if (own->in == NULL)
            DP_TRY(dp__packet_take(endpoint, &own->in));
        dp__packet *packet = own->in;
        DP_TRY(dp__mpi_header_next(endpoint, packet, &from));
        if (from < 0)
            return DP_OK;
        DP_TRY(dp__packet_received(endpoint, from, packet, packet->left));
        if (!packet->data)
            continue;
        dp__mpi_packet_of(packet)->process = from;
        packet->next = own->coming;
        own->coming = packet;
        own->in = NULL;
        DP_TRY(dp__mpi_part(endpoint, packet, false));
    }
}

static dp_status dp__mpi_coming_look(dp__endpoint *endpoint)
{
    dp__mpi_endpoint *own = endpoint->own;
    for (dp__packet **at = &own->coming; *at != NULL;) {
        dp__packet *packet = *at, *next = packet->next;
        bool done = false;
        DP_TRY(dp__mpi_test(&dp__mpi_packet_of(packet)->request, &done));
        if (done)
            DP_TRY(dp__packet_received(endpoint, dp__mpi_packet_of(packet)->process, packet,
                                       (size_t)dp__mpi_bytes(packet)));
        if (done && !packet->data) {
            *at = next;
            dp__packet_end(endpoint, packet);
            continue;
        }
        if (done)
            DP_TRY(dp__mpi_part(endpoint, packet, false));
        at = &packet->next;
    }
    return DP_OK;
}

/* Ends packets of a list which MPI is done with before the time is up. Returns true if that is so
   for all; MPI cannot always give back what is under way, which stays with it. */
static bool dp__mpi_packets_leave(dp__endpoint *endpoint, dp__packet *list, uint64_t until)
{
    bool all = true;
    while (list != NULL) {
        dp__packet *packet = list;
        dp__mpi_packet *part = dp__mpi_packet_of(packet);
        bool done = false;
        list = packet->next;
        while (dp__mpi_test(&part->request, &done) == DP_OK && !done && dp__os_ms_until(until) > 0)
            dp__os_yield();
        if (done)
            dp__packet_end(endpoint, packet);
        all = all && done;
        dp__mpi_enter();
        if (!done)
            MPI_Request_free(&part->request);
        dp__mpi_leave();
    }
    return all;
}

static bool dp__mpi_messages_close(dp__endpoint *endpoint)
{
    dp__mpi_endpoint *own = endpoint->own;
    uint64_t until = dp__os_after_ms(DP__MPI_FLUSH_MS);
    if (!dp__mpi_is_there())
        return false;
    while (dp__mpi_out_look(endpoint) == DP_OK && own->out != NULL && dp__os_ms_until(until) > 0)
        dp__os_yield();
    dp__mpi_enter();
    for (dp__packet *packet = own->coming; packet != NULL; packet = packet->next)
        MPI_Cancel(&dp__mpi_packet_of(packet)->request);
    dp__mpi_leave();
    dp__packet_end(endpoint, own->in);
    bool sent = dp__mpi_packets_leave(endpoint, own->out, until);
    bool came = dp__mpi_packets_leave(endpoint, own->coming, until);
    return sent && came;
}

/* ==== >>table ==================================================================================
   For CPU devices of processes that have met through MPI.                                       */

static bool dp__mpi_fits(const dp_comm_config *config)
{
    return config->bootstrap != NULL && config->host_memory &&
           config->bootstrap->all_gather == dp__mpi_links_gather;
}

static dp_status dp__mpi_open_endpoint(dp__endpoint *endpoint)
{
    bool able = dp__mpi_level() >= MPI_THREAD_SERIALIZED, messages = endpoint->mailbox != NULL;
    if (!able && messages)
        endpoint->why = "they have met through an MPI that was initialised below "
                        "MPI_THREAD_SERIALIZED";
    else if (!able)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "MPI was initialised with MPI_THREAD_%s, and the thread that carries "
                        "gradients has to call it: ask MPI_Init_thread for MPI_THREAD_MULTIPLE, or "
                        "leave it to dp_open",
                        dp__mpi_level() == MPI_THREAD_FUNNELED ? "FUNNELED" : "SINGLE");
    if (!able)
        return DP_OK;
    dp__mpi_endpoint *own = dp__os_alloc(sizeof *own, 64, NULL);
    if (own == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "MPI: no memory for a communicator");
    *own = (dp__mpi_endpoint){.links = messages ? endpoint->job->ctx->world.mpi_links
                                                : endpoint->job->boot->user,
                              .native = MPI_COMM_NULL};
    endpoint->own = own;
    return DP_OK;
}

static dp_status dp__mpi_connect(dp__endpoint *endpoint)
{
    dp__mpi_endpoint *own = endpoint->own;
    return dp__mpi_copy(own->links, own->links->comm, &own->native);
}

/* MPI cannot wake anybody. */
static dp_status dp__mpi_progress(dp__endpoint *endpoint, int timeout_ms)
{
    (void)timeout_ms;
    if (endpoint->mailbox == NULL)
        return dp__mpi_loads_look(endpoint->own);
    DP_TRY(dp__mpi_headers_look(endpoint));
    DP_TRY(dp__mpi_coming_look(endpoint));
    return dp__mpi_out_look(endpoint);
}

/* MPI may still read and write what it was given before something failed. */
static bool dp__mpi_close(dp__endpoint *endpoint)
{
    dp__mpi_endpoint *own = endpoint->own;
    bool done = true;
    if (own == NULL)
        return true;
    if (endpoint->mailbox != NULL)
        done = dp__mpi_messages_close(endpoint);
    else if (endpoint->broken || atomic_load(&own->links->failed) != DP_OK)
        return false;
    dp__mpi_drop(&own->native);
    dp__os_free(own, 0, NULL);
    return done;
}

static const dp__carrier dp__mpi_carrier = {.open = dp__mpi_open_endpoint,
                                            .progress = dp__mpi_progress,
                                            .close = dp__mpi_close,
                                            .connect = dp__mpi_connect,
                                            .begin = dp__mpi_begin_load,
                                            .send = dp__mpi_send_packet,
                                            .packet_bytes = sizeof(dp__mpi_packet)};

static dp_status dp__mpi_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    return dp__mesh_open(host, config, dp_mpi_coll(), &dp__mpi_carrier, out);
}

DP_API const dp_coll_ops *dp_mpi_coll(void)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = "MPI",
                                    .fits = dp__mpi_fits,
                                    .open = dp__mpi_open,
                                    .close = dp__mesh_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__mesh_run_call};
    return &ops;
}

static const dp__mpi_backend dp__mpi_here = {
    .join = dp__mpi_join,
    .leave = dp__mpi_links_leave,
    .all_gather = dp__mpi_links_gather,
    .coll = dp_mpi_coll,
    .hear = dp__mpi_links_hear,
    .tell = dp__mpi_links_tell,
    .send = dp__mpi_links_send,
    .split = dp__mpi_split,
    .drop = dp__mpi_drop_split,
    .carrier = &dp__mpi_carrier,
};
static const dp__mpi_backend *dp__backend_mpi = &dp__mpi_here; /* dp.h asks for it */

#endif /* MPI 3 */
#endif /* DP_IMPLEMENTATION && !DP_MPI_IMPLEMENTED */

/* ------------------------------------------------------------------------------------------------
   MIT licence

   Copyright (c) 2026 the dp.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
   ---------------------------------------------------------------------------------------------- */
