/* dp_mpi.h - v0.1.0 - MPI: how processes of many machines meet, and collectives between them, for
   dp.h - MIT licence

   Define DP_USE_MPI, and dp.h includes it; or include it instead of dp.h, or after. Compile the
   file that defines DP_IMPLEMENTATION with mpicc, and link with mpicc; any MPI 3 will do. Other
   files need nothing from MPI.

   WHEN MPI IS USED
   A context meets the other processes through MPI in three cases: mpirun of Open MPI or MPICH, or
   another launcher that sets their variables, or srun --mpi=pmix or =pmi2, has started them;
   DP_LAUNCH=mpi says so; or MPI is already initialised with more than one process. Otherwise, as
   under torchrun or in a single process, this file has no effect, and MPI is not initialised. The
   processes are those of MPI_COMM_WORLD, or of your own communicator: see dp_mpi_bootstrap.

   CPU devices of one machine still use shared memory, which is faster: 25 MiB between two processes
   took 8 ms, and 57 ms with MPI_Allreduce, on a busy machine. With several machines, all use the
   table dp_mpi_coll() here. The processes of a machine then add up large data in shared memory, in
   groups of 2, 4, 8 or more, and each group sends one sum (>>groups). For this the ranks must be
   placed machine by machine, a multiple of the group's size on each; mpirun does so by default.
   Over a link of 1 Gbit/s, two hosts of two processes each add up 25 MiB in 220 ms; the link needs
   210, one sum for each process took 458, and MPI_Allreduce of Open MPI 530 to 630 (network
   namespaces on a busy machine). dp_config.colls overrides this. Messages from one rank to another
   (dp.h, >>messages) go by shared memory on one machine, and by MPI if there are several.

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

   dp_close waits up to 0.2 s for data of messages that is on its way. What takes longer MPI may
   still read or write: the memory of such a message has to last until the process ends.

   BITS
   The ranks of a process are added in a binary tree, then the processes in another, whatever
   algorithm MPI has. If all processes have the same number of ranks, a power of two, that is the
   tree of all ranks, as everywhere (dp.h, >>collectives). f16 and bf16 are added in f32 and rounded
   once. All ranks get the same bits.

   CONTENTS (search for the tag)
     >>world        a communicator of yours, and the table
     >>library      one MPI per process: levels, locks, its end
     >>line         to the other processes: what they tell each other when something fails
     >>patience     waits that end
     >>joining      whether MPI brings the processes together
     >>pieces       how a collective is cut, and how many pieces are under way at once
     >>adding       reductions
     >>groups       large sums, where several processes are on one machine
     >>moving       broadcast, all_gather, all_to_all
     >>slips        messages from one rank to another
     >>table        from a line to a communicator, and the table
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
    int open;            /* lines */
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

/* ==== >>line ===================================================================================
   A communicator of our own, over which a context opens, one thread at a time. When something is
   wrong, and where there is no board, notes also go from one process to another: the first failure
   in words; letters about what each has begun; and, while a context opens, the question of a
   process that has waited too long, in which step each other one is, and the answers. Waiting
   processes listen to them. They are small: MPI sends small messages at once. A line that has
   failed is never freed, as MPI may still read and write what it was given.                     */

enum {
    DP__MPI_NOTES = 0x6470, /* the tag */
    DP__MPI_FLUSH_MS = 200
};

typedef enum dp__mpi_kind {
    DP__MPI_SILENT, /* nothing was heard */
    DP__MPI_FAILED,
    DP__MPI_LETTER,
    DP__MPI_ASKS,
    DP__MPI_ANSWERS
} dp__mpi_kind;

typedef struct dp__mpi_note {
    int32_t kind, status, culprit;
    int32_t step; /* of opening */
    uint64_t run; /* of which line a letter is: another one may have been here before */
    dp__letter letter;
    char text[DP__TEXT_BYTES];
} dp__mpi_note;

struct dp__mpi_line {
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

static bool dp__mpi_send(dp__mpi_line *line, int kind, int to, const dp__letter *letter)
{
    int sent = 0, place = to + (kind == DP__MPI_FAILED ? line->process_count : 0);
    dp__mpi_note *note = &line->out[place];
    if (MPI_Test(&line->sends[place], &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || !sent)
        return false; /* an answer: the question sent before it says the same */
    memset(note, 0, sizeof *note);
    note->kind = kind;
    note->status = (int32_t)atomic_load(&line->failed);
    note->step = line->step;
    note->run = line->run;
    if (letter != NULL)
        note->letter = *letter;
    if (kind != DP__MPI_FAILED)
        return MPI_Isend(note, (int)sizeof *note, MPI_BYTE, to, DP__MPI_NOTES, line->notes,
                         &line->sends[place]) == MPI_SUCCESS;
    note->culprit = line->culprit;
    memcpy(note->text, line->text, sizeof note->text); /* done when it was read: see flush */
    return MPI_Issend(note, (int)sizeof *note, MPI_BYTE, to, DP__MPI_NOTES, line->notes,
                      &line->sends[place]) == MPI_SUCCESS;
}

/* To a process, or (-1) to all others. */
static void dp__mpi_tell(dp__mpi_line *line, int kind, int to, const dp__letter *letter)
{
    dp__lock_enter(&line->lock);
    dp__mpi_enter();
    for (int p = 0; p < line->process_count; p++)
        if (p != line->process && (to < 0 || p == to))
            (void)dp__mpi_send(line, kind, p, letter); /* one that does not hear it will time out */
    dp__mpi_leave();
    dp__lock_leave(&line->lock);
}

/* How many notes MPI still has in its hands. */
static int dp__mpi_unsent(dp__mpi_line *line)
{
    int count = 0;
    dp__lock_enter(&line->lock);
    dp__mpi_enter();
    for (int p = 0; p < 2 * line->process_count; p++) {
        int sent = 0;
        int code = MPI_Test(&line->sends[p], &sent, MPI_STATUS_IGNORE);
        count += code == MPI_SUCCESS && !sent;
    }
    dp__mpi_leave();
    dp__lock_leave(&line->lock);
    return count;
}

/* Wait until all have read what they were told, or for a short time: MPI may hold a note while
   nobody calls it here, and a process that computes only looks when it waits again. */
static void dp__mpi_flush(dp__mpi_line *line)
{
    uint64_t until = dp__os_after_ms(DP__MPI_FLUSH_MS);
    while (dp__mpi_unsent(line) > 0 && dp__os_ms_until(until) > 0)
        dp__os_yield();
}

static dp_status dp__mpi_failure(const dp__mpi_line *line)
{
    return dp_error((dp_status)atomic_load(&line->failed), "%s", line->text);
}

static void dp__mpi_lose(void)
{
    dp__lock_enter(&dp__mpi.lock);
    dp__mpi.lost = true;
    dp__lock_leave(&dp__mpi.lock);
}

/* The first failure stays; true if this is it. */
static bool dp__mpi_note_failure(dp__mpi_line *line, dp_status status, int culprit,
                                 const char *text)
{
    dp__lock_enter(&line->lock);
    bool first = atomic_load(&line->failed) == DP_OK;
    if (first) {
        snprintf(line->text, sizeof line->text, "%s", text);
        line->culprit = culprit;
        atomic_store(&line->failed, (int)status);
    }
    dp__lock_leave(&line->lock);
    dp__mpi_lose();
    return first;
}

/* The others hear of it, unless there was a failure before. dp_last_error stays as it is. */
static void dp__mpi_spread(dp__mpi_line *line, dp_status status, int culprit, const char *text)
{
    if (dp__mpi_note_failure(line, status, culprit, text) && line->notes != MPI_COMM_NULL) {
        dp__mpi_tell(line, DP__MPI_FAILED, -1, NULL);
        dp__mpi_flush(line);
    }
}

/* What dp_last_error says becomes the line's failure, because of `process`; -1: nobody is known to
   be at fault. */
static dp_status dp__mpi_fail(dp__mpi_line *line, dp_status status, int process)
{
    dp__mpi_spread(line, status, process, dp_last_error());
    return dp__mpi_failure(line);
}

static dp_status dp__mpi_broken(dp__mpi_line *line, const char *call, int code)
{
    char said[DP__TEXT_BYTES];
    (void)dp__mpi_error(call, code);
    snprintf(said, sizeof said, "%.*s", (int)sizeof said - 64, dp_last_error());
    return dp__mpi_fail(line, dp_error(DP_ERR_REMOTE, "step %d of meeting: %s", line->step, said),
                        -1);
}

/* One note, if there is one. Before all have come others than we may send something there. */
static int dp__mpi_receive(dp__mpi_line *line, dp__mpi_note *note, int *out_from)
{
    MPI_Status status;
    int there = 0, bytes = 0;
    *out_from = -1;
    dp__lock_enter(&line->ear);
    dp__mpi_enter();
    int code = MPI_Iprobe(MPI_ANY_SOURCE, DP__MPI_NOTES, line->notes, &there, &status);
    if (code == MPI_SUCCESS && there)
        code = MPI_Get_count(&status, MPI_BYTE, &bytes);
    there = there && bytes == (int)sizeof *note;
    if (code == MPI_SUCCESS && there) /* it is here, so this does not block */
        code = MPI_Recv(note, (int)sizeof *note, MPI_BYTE, status.MPI_SOURCE, DP__MPI_NOTES,
                        line->notes, MPI_STATUS_IGNORE);
    dp__mpi_leave();
    dp__lock_leave(&line->ear);
    if (code == MPI_SUCCESS && there)
        *out_from = status.MPI_SOURCE;
    return code;
}

/* Read what others have sent. Letters are for `job`; NULL: a context still opens. */
static dp_status dp__mpi_hear(dp__mpi_line *line, const dp__job *job)
{
    dp__mpi_note note;
    int from = line->notes != MPI_COMM_NULL ? 0 : -1;
    while (from >= 0) {
        int code = dp__mpi_receive(line, &note, &from);
        if (code != MPI_SUCCESS)
            return dp__mpi_broken(line, "MPI_Iprobe", code);
        if (from < 0)
            break;
        if (note.kind == DP__MPI_LETTER) {
            bool asks = job != NULL && note.run == line->run &&
                        dp__letter_read(job, from, &note.letter);
            note.letter = asks ? dp__letter_of(job) : note.letter;
            if (asks)
                dp__mpi_tell(line, DP__MPI_LETTER, from, &note.letter);
            continue;
        }
        if (note.kind == DP__MPI_FAILED) {
            note.text[sizeof note.text - 1] = '\0';
            dp__mpi_note_failure(line, (dp_status)note.status, note.culprit, note.text);
            return dp__mpi_failure(line);
        }
        dp__lock_enter(&line->lock);
        line->heard[from] = note;
        dp__lock_leave(&line->lock);
        if (note.kind == DP__MPI_ASKS)
            dp__mpi_tell(line, DP__MPI_ANSWERS, from, NULL);
    }
    return DP_OK;
}

/* ==== >>patience ===============================================================================
   Nothing blocks. A waiting thread asks MPI again and again, as MPI makes progress only while it is
   called: first without a pause, then yielding the core in between, and after a while with short
   sleeps between bursts. Every few milliseconds it looks whether it still makes sense to wait.  */

enum {
    DP__MPI_TRIES = 64, /* without a pause */
    DP__MPI_BURST = 16, /* between two sleeps */
    DP__MPI_AWAKE_NS = 1000000,
    DP__MPI_NAP_NS = 50000,   /* at first */
    DP__MPI_REST_NS = 500000, /* at most */
    DP__MPI_GRACE_MS = 1000   /* for answers */
};

typedef struct dp__mpi_wait {
    unsigned tries;
    uint64_t begun;
    dp__wait look;
} dp__mpi_wait;

static void dp__mpi_nap(uint64_t ns)
{
    atomic_uint word = 0;
    dp__os_word_wait(&word, 0, ns);
}

/* The longer a wait has taken, the less a longer nap matters. */
static uint64_t dp__mpi_nap_ns(uint64_t waited)
{
    uint64_t nap = waited / (DP__MPI_AWAKE_NS / DP__MPI_NAP_NS);
    return nap < DP__MPI_REST_NS ? nap : DP__MPI_REST_NS;
}

/* The first of so many others that have said nothing (step -1), or are in another step. */
static int dp__mpi_missing(dp__mpi_line *line, int step, int *out_first)
{
    int count = 0;
    dp__lock_enter(&line->lock);
    for (int p = line->process_count - 1; p >= 0; p--) {
        bool silent = line->heard[p].kind == DP__MPI_SILENT;
        if (p != line->process && (step < 0 ? silent : !silent && line->heard[p].step != step)) {
            *out_first = p;
            count++;
        }
    }
    dp__lock_leave(&line->lock);
    return count;
}

/* A process that does not answer computes, sleeps, or is gone. One that has asked has answered. */
static dp_status dp__mpi_ask(dp__mpi_line *line)
{
    int first;
    uint64_t until = dp__os_after_ms(DP__MPI_GRACE_MS);
    dp__mpi_tell(line, DP__MPI_ASKS, -1, NULL);
    do {
        dp__mpi_nap(DP__MPI_NAP_NS);
        DP_TRY(dp__mpi_hear(line, NULL));
    } while (dp__mpi_missing(line, -1, &first) > 0 && dp__os_ms_until(until) > 0);
    return DP_OK;
}

/* While a context opens: who is missing, or else in another step? `why` is said about the first. */
static dp_status dp__mpi_accuse(dp__mpi_line *line, dp_status status, const char *why)
{
    char more[32] = "";
    int first = -1;
    DP_TRY(dp__mpi_ask(line));
    int missing = dp__mpi_missing(line, -1, &first);
    missing = missing > 0 ? missing : dp__mpi_missing(line, line->step, &first);
    if (missing > 1)
        snprintf(more, sizeof more, " and %d more", missing - 1);
    if (missing > 0)
        dp_error(status, "step %d of meeting: process %d of %d%s %s", line->step, first,
                 line->process_count, more, why);
    else
        dp_error(status, "step %d of meeting: all processes are in it: MPI %s", line->step, why);
    return dp__mpi_fail(line, status, first);
}

/* MPI says that a collective has failed: often because others are gone. */
static dp_status dp__mpi_suspect(dp__mpi_line *line, dp__ring *ring, int code)
{
    char text[200];
    (void)dp__mpi_error(line->comm == MPI_COMM_NULL ? "MPI_Comm_idup" : "MPI_Test", code);
    snprintf(text, sizeof text, "does not answer (%.140s)", dp_last_error());
    return ring != NULL ? DP_ERR_REMOTE : dp__mpi_accuse(line, DP_ERR_REMOTE, text);
}

/* While a context opens there is no job yet to look at. */
static dp_status dp__mpi_look(dp__mpi_line *line, dp__wait *wait)
{
    char text[64];
    uint64_t waited_ns;
    if (!dp__wait_looks(wait, DP__LOOK_NS, &waited_ns))
        return DP_OK;
    DP_TRY(dp__mpi_hear(line, NULL));
    if (waited_ns < (uint64_t)line->timeout_ms * 1000000)
        return DP_OK;
    snprintf(text, sizeof text, "did not come within %d ms", line->timeout_ms);
    return dp__mpi_accuse(line, DP_ERR_TIMEOUT, text);
}

/* Between two questions to MPI. False: it is not worth while to look yet. */
static bool dp__mpi_idle(dp__mpi_wait *wait)
{
    if (wait->tries++ < DP__MPI_TRIES) {
        dp__os_pause();
        return false;
    }
    uint64_t now = dp__os_now_ns();
    if (wait->begun == 0)
        wait->begun = now;
    if (now - wait->begun < DP__MPI_AWAKE_NS || wait->tries % DP__MPI_BURST != 0)
        dp__os_yield();
    else
        dp__mpi_nap(dp__mpi_nap_ns(now - wait->begun));
    return true;
}

static dp_status dp__mpi_rest(dp__mpi_line *line, dp__ring *ring, dp__mpi_wait *wait)
{
    if (!dp__mpi_idle(wait))
        return DP_OK;
    return ring != NULL ? dp__ring_rest(ring, &wait->look) : dp__mpi_look(line, &wait->look);
}

/* `ring`: of the collective that waits; NULL: a context opens. */
static dp_status dp__mpi_await(dp__mpi_line *line, dp__ring *ring, MPI_Request *request)
{
    dp__mpi_wait wait = {0};
    for (;;) {
        int done = 0;
        dp__mpi_enter();
        int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        dp__mpi_leave();
        if (code != MPI_SUCCESS)
            return dp__mpi_suspect(line, ring, code);
        if (done)
            return DP_OK;
        DP_TRY(dp__mpi_rest(line, ring, &wait));
    }
}

/* ==== >>joining ================================================================================
   Whether MPI brings the processes together, and the line over which a context opens.           */

static void dp__mpi_line_free(dp__mpi_line *line)
{
    dp__os_free(line->out, 0, NULL);
    dp__os_free(line->heard, 0, NULL);
    dp__os_free(line->sends, 0, NULL);
    line->out = line->heard = NULL;
    line->sends = NULL;
}

/* Only the memory; not the context's, since it outlives one that failed. */
static dp_status dp__mpi_line_alloc(dp__mpi_line *line, int process, int process_count,
                                    int timeout_ms)
{
    size_t notes = (size_t)process_count * sizeof(dp__mpi_note);
    size_t sends = 2 * (size_t)process_count * sizeof(MPI_Request);
    line->comm = line->notes = MPI_COMM_NULL;
    line->process = process;
    line->process_count = process_count;
    line->timeout_ms = timeout_ms;
    line->culprit = -1;
    line->ear = line->lock = (dp__lock)DP__LOCK_INITIALIZER;
    line->out = dp__os_alloc(2 * notes, 64, NULL);
    line->heard = dp__os_alloc(notes, 64, NULL);
    line->sends = dp__os_alloc(sends, 64, NULL);
    if (line->out == NULL || line->heard == NULL || line->sends == NULL) {
        dp__mpi_line_free(line);
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", process_count);
    }
    for (int p = 0; p < 2 * process_count; p++)
        line->sends[p] = MPI_REQUEST_NULL;
    for (int p = 0; p < process_count; p++)
        line->heard[p].kind = DP__MPI_SILENT;
    return DP_OK;
}

static void dp__mpi_tally(int step)
{
    dp__lock_enter(&dp__mpi.lock);
    dp__mpi.open += step;
    dp__lock_leave(&dp__mpi.lock);
}

/* Make a copy of `of`, which all its processes do: they wait for that on the line. */
static dp_status dp__mpi_copy(dp__mpi_line *line, MPI_Comm of, MPI_Comm *coming)
{
    MPI_Request request;
    dp__mpi_enter();
    int code = MPI_Comm_idup(of, coming, &request);
    dp__mpi_leave();
    if (code != MPI_SUCCESS)
        return dp__mpi_error("MPI_Comm_idup", code);
    DP_TRY(dp__mpi_await(line, NULL, &request));
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

/* The job may have failed where MPI had no part in it. A failed line stays. */
static void dp__mpi_line_leave(dp__mpi_line *line, bool job_failed)
{
    bool good = atomic_load(&line->failed) == DP_OK;
    if (job_failed)
        dp__mpi_lose();
    if (!good)
        return;
    dp__mpi_drop(&line->comm);
    dp__mpi_line_free(line);
    dp__os_free(line, 0, NULL);
}

/* dp_bootstrap.all_gather over a line. Its memory is its own, as MPI may write there after a
   failure. */
static dp_status dp__mpi_line_gather(const void *in, void *out, size_t bytes_each, void *user)
{
    dp__mpi_line *line = user;
    MPI_Request request;
    size_t all = bytes_each * (size_t)line->process_count;
    char *room = dp__os_alloc(all + bytes_each, 64, NULL);
    if (room == NULL)
        return dp__mpi_fail(line, dp_error(DP_ERR_REMOTE, "no memory for %zu bytes", all), -1);
    memcpy(room + all, in, bytes_each);
    dp__lock_enter(&line->lock);
    line->step++;
    dp__lock_leave(&line->lock);
    dp__mpi_enter();
    int code = MPI_Iallgather(room + all, (int)bytes_each, MPI_BYTE, room, (int)bytes_each,
                              MPI_BYTE, line->comm, &request);
    dp__mpi_leave();
    if (code != MPI_SUCCESS)
        return dp__mpi_broken(line, "MPI_Iallgather", code);
    DP_TRY(dp__mpi_await(line, NULL, &request));
    memcpy(out, room, all);
    dp__os_free(room, 0, NULL);
    return DP_OK;
}

/* What was said on the line over which a context was opened, while others than MPI's collectives
   carry its bytes. Where MPI serves one thread only nothing is heard: who asks is another one. */
static dp_status dp__mpi_line_hear(dp__mpi_line *line, const dp__job *job, int *out_process)
{
    if (dp__mpi_level() < MPI_THREAD_SERIALIZED)
        return DP_OK;
    dp_status status = atomic_load(&line->failed) != DP_OK ? dp__mpi_failure(line)
                                                           : dp__mpi_hear(line, job);
    *out_process = line->culprit < line->process_count ? line->culprit : -1;
    return status;
}

static void dp__mpi_line_tell(dp__mpi_line *line, dp_status status, int process, const char *text)
{
    if (dp__mpi_level() >= MPI_THREAD_SERIALIZED)
        dp__mpi_spread(line, status, process, text);
}

static void dp__mpi_line_send(dp__mpi_line *line, const dp__letter *letter)
{
    if (dp__mpi_level() >= MPI_THREAD_SERIALIZED)
        dp__mpi_tell(line, DP__MPI_LETTER, -1, letter);
}

/* The same on a communicator of the user, in case they call it; dp_open makes a line from it. */
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

static dp_status dp__mpi_split(dp__mpi_line *line, int group, dp_bootstrap *out)
{
    MPI_Comm comm = MPI_COMM_NULL;
    dp__mpi_enter();
    int code = MPI_Comm_split(line->comm, group < 0 ? MPI_UNDEFINED : group, line->process, &comm);
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
static dp_status dp__mpi_same_job(dp__mpi_line *line, const char *job)
{
    const struct dp__mpi_name {
        uint64_t job, run;
    } own = {job != NULL ? dp__hash(dp__hash_first, job, strlen(job)) : dp__hash_first,
             dp__os_random()};
    size_t count = (size_t)line->process_count;
    struct dp__mpi_name *all = dp__os_alloc(count * sizeof own, sizeof own, NULL);
    if (all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %zu processes", count);
    dp_status status = dp__mpi_line_gather(&own, all, sizeof own, line);
    for (size_t p = 0; p < count && status == DP_OK; p++)
        if (all[p].job != own.job)
            status = dp_error(DP_ERR_MISMATCH,
                              "dp_open: process %d opens a context for job '%s', process %zu one "
                              "for another: all open them in the same order",
                              line->process, job != NULL ? job : "", p);
    line->run = all[0].run;
    dp__os_free(all, 0, NULL);
    return status;
}

static dp_status dp__mpi_line_open(MPI_Comm of, const dp_config *config, int timeout_ms,
                                   dp__mpi_line **out)
{
    int process = 0, process_count = 0;
    dp__mpi_line *line = dp__os_alloc(sizeof *line, 64, NULL);
    if (line == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a communicator");
    memset(line, 0, sizeof *line);
    MPI_Comm_rank(of, &process);
    MPI_Comm_size(of, &process_count);
    dp_status status = dp__mpi_line_alloc(line, process, process_count, timeout_ms);
    line->notes = of;
    if (status == DP_OK)
        status = dp__mpi_copy(line, of, &line->coming);
    if (status == DP_OK)
        status = dp__mpi_hear(line, NULL); /* who comes after the others have given up */
    if (status == DP_OK)
        line->comm = line->notes = line->coming;
    if (status == DP_OK)
        status = dp__mpi_same_job(line, config->job);
    if (status == DP_OK)
        *out = line;
    else
        dp__mpi_line_leave(line, false);
    return status;
}

static dp_status dp__mpi_join(dp_config *config, int timeout_ms, dp__launch *launch,
                              bool *out_meant, dp__mpi_line **out)
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
        status = dp__mpi_line_open(of, config, timeout_ms, out);
    if (status != DP_OK)
        dp_error(status, "dp_open: %s", dp__open_error());
    DP_TRY(status);
    *out_meant = true;
    *launch = found;
    config->bootstrap = (dp_bootstrap){0};
    if (*out != NULL)
        config->bootstrap = (dp_bootstrap){dp__mpi_line_gather, *out, (*out)->process, size};
    return DP_OK;
}

/* ==== >>pieces =================================================================================
   Every collective is cut into pieces that fit into buffers of a fixed size, so that no
   count is too large for MPI, and nothing is allocated. A piece has up to three steps: `begin`
   gives it to MPI, `turn` takes what has arrived, and may give MPI something again, `end` takes
   that. Two pieces are begun before the first is turned, so that one travels while another is
   worked on. All processes take the same steps in the same order, as MPI matches collectives by
   their order.

   Reductions are not left to MPI_Iallreduce: each process gets its slice of every other's piece,
   with MPI_Ialltoallv, adds them up in one pass, scales included, and gives the sums to all, with
   MPI_Iallgatherv. That moves no more bytes than any other way. The order of adding is ours; NaN,
   bool, halves and whole numbers are treated as elsewhere; and Open MPI 4.1's Iallreduce took twice
   as long as its Allreduce. Small data is gathered whole, and added up by everybody. */

enum {
    DP__MPI_BUFFER_BYTES = 2 << 20,
    DP__MPI_SMALL_BYTES = 64 << 10, /* of all processes together */
    DP__MPI_TINY_BYTES = 1 << 10,   /* of one */
    DP__MPI_SLOTS = 3,              /* pieces on the way */
    DP__MPI_SLICE = 16              /* elements: slices begin where vectors do */
};

typedef struct dp__mpi_counts { /* bytes: MPI reads them until the piece has arrived */
    int *counts, *places;
} dp__mpi_counts;

typedef struct dp__mpi_slot {
    char *out, *in, *sums; /* buffers: what is sent, what arrives, what nobody here wants */
    dp__mpi_counts to, from;
    MPI_Request request;
} dp__mpi_slot;

typedef struct dp__mpi_head { /* what a process begins */
    dp__entry entry;
    char data[]; /* as much as is tiny, for that many processes */
} dp__mpi_head;

typedef struct dp__mpi_group { /* of processes that share memory: see >>groups */
    dp__shared shared;
    int each;       /* processes of every group but the last, which may have fewer; 1: none share */
    int own, count; /* the group of this process; how many there are */
    unsigned pieces; /* of all sums so far */
} dp__mpi_group;

typedef struct dp__mpi_comm {
    dp_comm base;
    dp__ring *ring;
    dp__mpi_line *line; /* over which its context has opened */
    MPI_Comm native;
    int process, process_count;
    const dp__simd *simd;
    int rank_first, local_count, rank_count;
    int most;            /* local ranks of any process */
    size_t buffer_bytes; /* that a piece may take */
    size_t stride;       /* bytes of a buffer: slices are rounded up */
    dp__mpi_slot slots[DP__MPI_SLOTS];
    char *heads;       /* of every process, and behind them the own */
    size_t head_bytes; /* of each */
    MPI_Request meeting;
    bool broken; /* MPI may still write where it was told to */
    dp__mpi_group group;
    char *wide;      /* one buffer more: halves on the way, in f32 */
    char *buffers;   /* all of them */
    int *numbers;    /* all of them */
    const void **in; /* of every process, and of local ranks */
    void **out;
} dp__mpi_comm;
_Static_assert(offsetof(dp__mpi_comm, base) == 0, "a dp_comm is the head of its communicator");

typedef struct dp__mpi_call { /* one collective */
    dp__mpi_comm *comm;
    dp_coll_call asked;
    size_t size;  /* bytes of an element */
    size_t piece; /* elements */
    bool wide;    /* halves travel as f32: some process adds its own up first */
} dp__mpi_call;

typedef dp_status (*dp__mpi_step)(const dp__mpi_call *call, size_t step);

typedef struct dp__mpi_steps {
    dp__mpi_step begin, turn, end; /* end may be NULL */
} dp__mpi_steps;

static dp__mpi_comm *dp__mpi_of(dp_comm *comm)
{
    return (void *)comm;
}

static dp__mpi_slot *dp__mpi_slot_of(const dp__mpi_call *call, size_t step)
{
    return &call->comm->slots[step % DP__MPI_SLOTS];
}

static int dp__mpi_ranks(const dp__mpi_comm *comm, int process)
{
    return comm->ring->job->firsts[process + 1] - comm->ring->job->firsts[process];
}

/* Elements of a piece: the last one may have fewer. */
static size_t dp__mpi_count(const dp__mpi_call *call, size_t step)
{
    size_t left = call->asked.count - step * call->piece;
    return left < call->piece ? left : call->piece;
}

static size_t dp__mpi_at(const dp__mpi_call *call, size_t step) /* in bytes, where it begins */
{
    return step * call->piece * call->size;
}

static size_t dp__mpi_wire_bytes(const dp__mpi_call *call) /* of an element that is not added yet */
{
    return call->wide ? sizeof(float) : call->size;
}

static dp_status dp__mpi_given(const char *name, int code)
{
    dp__mpi_leave();
    return code == MPI_SUCCESS ? DP_OK : dp__mpi_error(name, code);
}

/* ---- what all begin ---------------------------------------------------------------------------
   The first message of a collective is the same whatever the collective is: each process tells all
   what it begins. Nobody goes on before that was compared, so what MPI matches is alike. What is
   tiny goes with it, and needs no other message.                                                */

static dp__mpi_head *dp__mpi_head_of(const dp__mpi_comm *comm, int process)
{
    return (void *)(comm->heads + (size_t)process * comm->head_bytes);
}

static bool dp__mpi_is_small(const dp__mpi_call *call)
{
    size_t processes = (size_t)call->comm->process_count;
    return call->asked.count <= DP__MPI_SMALL_BYTES / dp__mpi_wire_bytes(call) / processes;
}

static bool dp__mpi_is_tiny(const dp__mpi_call *call)
{
    size_t locals = (size_t)call->comm->most, processes = (size_t)call->comm->process_count;
    if (call->asked.verb == DP_ALL_GATHER)
        return call->asked.count <= DP__MPI_TINY_BYTES / call->size / locals &&
               call->asked.count <= DP__MPI_SMALL_BYTES / call->size / locals / processes;
    return call->asked.verb == DP_ALL_REDUCE && dp__mpi_is_small(call) &&
           call->asked.count <= DP__MPI_TINY_BYTES / dp__mpi_wire_bytes(call);
}

static dp_status dp__mpi_tell_all(const dp__mpi_call *call, const void *data, size_t bytes)
{
    dp__mpi_comm *comm = call->comm;
    dp__mpi_head *own = dp__mpi_head_of(comm, comm->process_count);
    own->entry = comm->ring->now;
    if (bytes > 0)
        memcpy(own->data, data, bytes);
    dp__mpi_enter();
    return dp__mpi_given("MPI_Iallgather", MPI_Iallgather(own, (int)comm->head_bytes, MPI_BYTE,
                                                          comm->heads, (int)comm->head_bytes,
                                                          MPI_BYTE, comm->native, &comm->meeting));
}

/* All see that they have not begun the same, and say so alike. */
static dp_status dp__mpi_differs(const dp__mpi_comm *comm)
{
    dp__entry *all = dp__os_alloc((size_t)comm->process_count * sizeof *all, 64, NULL);
    if (all == NULL)
        return dp_error(DP_ERR_REMOTE, "the processes have issued different calls");
    for (int p = 0; p < comm->process_count; p++)
        all[p] = dp__mpi_head_of(comm, p)->entry;
    dp_status status = dp__entries_differ(comm->ring->job, (unsigned)comm->ring->now.seq, all);
    dp__os_free(all, 0, NULL);
    return status;
}

static dp_status dp__mpi_hear_all(const dp__mpi_call *call)
{
    dp__mpi_comm *comm = call->comm;
    const dp__entry *own = &dp__mpi_head_of(comm, comm->process_count)->entry;
    DP_TRY(dp__mpi_await(comm->line, comm->ring, &comm->meeting));
    for (int p = 0; p < comm->process_count; p++)
        if (!dp__entries_same(&dp__mpi_head_of(comm, p)->entry, own))
            return dp__mpi_differs(comm);
    return DP_OK;
}

/* ---- pieces on the way ----------------------------------------------------------------------- */

static dp_status dp__mpi_arrive(const dp__mpi_call *call, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    const dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    if (!dp__mpi_is_tiny(call))
        return dp__mpi_await(comm->line, comm->ring, &dp__mpi_slot_of(call, step)->request);
    DP_TRY(dp__mpi_hear_all(call));
    for (int p = 0; p < comm->process_count; p++)
        memcpy(slot->in + slot->from.places[p], dp__mpi_head_of(comm, p)->data,
               (size_t)slot->from.counts[p]);
    return DP_OK;
}

static dp_status dp__mpi_give_all_to_all(const dp__mpi_call *call, const void *out, void *in,
                                         size_t step)
{
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    dp__mpi_enter();
    return dp__mpi_given("MPI_Ialltoallv",
                         MPI_Ialltoallv(out, slot->to.counts, slot->to.places, MPI_BYTE, in,
                                        slot->from.counts, slot->from.places, MPI_BYTE,
                                        call->comm->native, &slot->request));
}

/* `out` NULL: it is in its place already. */
static dp_status dp__mpi_give_all(const dp__mpi_call *call, const void *out, void *in, size_t step)
{
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    int own = slot->from.counts[call->comm->process];
    if (dp__mpi_is_tiny(call))
        return dp__mpi_tell_all(call, out, (size_t)own);
    dp__mpi_enter();
    return dp__mpi_given("MPI_Iallgatherv",
                         MPI_Iallgatherv(out != NULL ? out : MPI_IN_PLACE, own, MPI_BYTE, in,
                                         slot->from.counts, slot->from.places, MPI_BYTE,
                                         call->comm->native, &slot->request));
}

static dp_status dp__mpi_run_steps(const dp__mpi_call *call, const dp__mpi_steps *run)
{
    size_t steps = (call->asked.count + call->piece - 1) / call->piece;
    if (!dp__mpi_is_tiny(call)) {
        DP_TRY(dp__mpi_tell_all(call, NULL, 0));
        DP_TRY(dp__mpi_hear_all(call));
    }
    for (size_t i = 0; i < steps + 2; i++) {
        if (i < steps)
            DP_TRY(run->begin(call, i));
        if (i >= 1 && i - 1 < steps)
            DP_TRY(run->turn(call, i - 1));
        if (i >= 2 && run->end != NULL)
            DP_TRY(run->end(call, i - 2));
    }
    return DP_OK;
}

/* `piece`: elements of a block that fit into what they go through. */
static dp_status dp__mpi_run(dp__mpi_call *call, const dp__mpi_steps *run, size_t piece)
{
    call->piece = piece;
    dp_status status = dp__mpi_run_steps(call, run);
    call->comm->broken = call->comm->broken || status != DP_OK;
    return status;
}

/* ==== >>adding =================================================================================
   A process sends the sum of its local ranks. With one device that is the user's buffer, and is
   sent from there. */

static void dp__mpi_kernel(const dp__mpi_comm *comm, const dp_kernel_args *args)
{
    dp__cpu_run(comm->base.host, comm->simd, args);
}

static void dp__mpi_cast(const dp__mpi_comm *comm, void *out, dp_dtype to, const void *in,
                         dp_dtype from, size_t count)
{
    dp_kernel_args args = {.kernel = DP_KERNEL_CAST,
                           .dtype = to,
                           .in_dtype = from,
                           .count = count,
                           .out = &out,
                           .in = &in,
                           .out_count = 1,
                           .in_count = 1};
    dp__mpi_kernel(comm, &args);
}

/* comm->in becomes comm->out. */
static void dp__mpi_reduce(const dp__mpi_call *call, size_t in_count, size_t out_count,
                           size_t count, bool last)
{
    const dp__mpi_comm *comm = call->comm;
    dp_dtype dtype = call->wide ? DP_F32 : call->asked.dtype;
    bool mean = call->asked.op == DP_OP_MEAN;
    dp_kernel_args args = {.kernel = DP_KERNEL_REDUCE,
                           .op = mean ? DP_OP_SUM : call->asked.op,
                           .dtype = dtype,
                           .in_dtype = dtype,
                           .count = count,
                           .out = comm->out,
                           .in = comm->in,
                           .out_count = out_count,
                           .in_count = in_count,
                           .alpha = last ? call->asked.scale : 1,
                           .beta = last && mean ? comm->rank_count : 1};
    dp__mpi_kernel(comm, &args);
}

/* Halves of the local ranks, as f32, as many at a time as there is room for. */
static void dp__mpi_add_own_halves(const dp__mpi_call *call, size_t at, size_t count, char *out)
{
    const dp__mpi_comm *comm = call->comm;
    size_t most = comm->buffer_bytes / sizeof(float) / (size_t)comm->local_count, run = 0;
    for (size_t done = 0; done < count; done += run) {
        run = count - done < most ? count - done : most;
        for (int i = 0; i < comm->local_count; i++) {
            char *wide = comm->wide + (size_t)i * most * sizeof(float);
            dp__mpi_cast(comm, wide, DP_F32,
                         (const char *)call->asked.local[i].send + at + done * call->size,
                         call->asked.dtype, run);
            comm->in[i] = wide;
        }
        comm->out[0] = out + done * sizeof(float);
        dp__mpi_reduce(call, (size_t)comm->local_count, 1, run, false);
    }
}

/* The sum of the local ranks, `at` bytes further on, to `out`. */
static void dp__mpi_add_own(const dp__mpi_call *call, size_t at, size_t count, char *out)
{
    const dp__mpi_comm *comm = call->comm;
    if (call->wide) {
        dp__mpi_add_own_halves(call, at, count, out);
        return;
    }
    for (int i = 0; i < comm->local_count; i++)
        comm->in[i] = (const char *)call->asked.local[i].send + at;
    comm->out[0] = out;
    if (comm->local_count == 1)
        memcpy(out, comm->in[0], count * call->size);
    else
        dp__mpi_reduce(call, (size_t)comm->local_count, 1, count, false);
}

/* Add the sums of all processes, or groups, in comm->in, into `out_count` places in comm->out. */
static void dp__mpi_add_all(const dp__mpi_call *call, size_t in_count, size_t count,
                            size_t out_count)
{
    const dp__mpi_comm *comm = call->comm;
    void *first = comm->out[0];
    if (out_count == 0 || count == 0)
        return;
    if (!call->wide) {
        dp__mpi_reduce(call, in_count, out_count, count, true);
        return;
    }
    comm->out[0] = comm->wide;
    dp__mpi_reduce(call, in_count, 1, count, true);
    comm->out[0] = first;
    for (size_t i = 0; i < out_count; i++)
        dp__mpi_cast(comm, comm->out[i], call->asked.dtype, comm->wide, DP_F32, count);
}

/* The places of the local ranks that want a result; how many there are. */
static size_t dp__mpi_wanted(const dp__mpi_call *call, size_t at)
{
    size_t count = 0;
    for (int i = 0; i < call->comm->local_count; i++)
        if (call->asked.local[i].recv != NULL)
            call->comm->out[count++] = (char *)call->asked.local[i].recv + at;
    return count;
}

/* Where the sum of the local ranks for a piece is; with several, it is computed if `make`. */
static const char *dp__mpi_own(const dp__mpi_call *call, size_t step, bool make)
{
    const dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t at = dp__mpi_at(call, step);
    if (call->comm->local_count == 1 && !call->wide)
        return (const char *)call->asked.local[0].send + at;
    if (make)
        dp__mpi_add_own(call, at, dp__mpi_count(call, step), slot->out);
    return slot->out;
}

/* Which part of a piece of `count` elements a process adds up. */
static size_t dp__mpi_slice(const dp__mpi_comm *comm, size_t count, int process, size_t *out_first)
{
    size_t each = (count + (size_t)comm->process_count - 1) / (size_t)comm->process_count;
    each = (each + DP__MPI_SLICE - 1) / DP__MPI_SLICE * DP__MPI_SLICE;
    size_t first = (size_t)process * each;
    *out_first = first < count ? first : count;
    return count - *out_first < each ? count - *out_first : each;
}

static dp_status dp__mpi_slices_begin(const dp__mpi_call *call, size_t step)
{
    const dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t count = dp__mpi_count(call, step), wire = dp__mpi_wire_bytes(call), first;
    size_t own = dp__mpi_slice(comm, count, comm->process, &first);
    for (int p = 0; p < comm->process_count; p++) {
        bool other = p != comm->process;
        slot->to.counts[p] = other ? (int)(dp__mpi_slice(comm, count, p, &first) * wire) : 0;
        slot->to.places[p] = other ? (int)(first * wire) : 0;
        slot->from.counts[p] = other ? (int)(own * wire) : 0;
        slot->from.places[p] = (int)((size_t)p * own * wire);
    }
    return dp__mpi_give_all_to_all(call, dp__mpi_own(call, step, true), slot->in, step);
}

/* The first place that wants a piece of the result; a buffer if nobody does. */
static char *dp__mpi_sums(const dp__mpi_call *call, size_t step)
{
    bool wanted = dp__mpi_wanted(call, dp__mpi_at(call, step)) > 0;
    return wanted ? call->comm->out[0] : dp__mpi_slot_of(call, step)->sums;
}

static dp_status dp__mpi_slices_turn(const dp__mpi_call *call, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    char *sums = dp__mpi_sums(call, step);
    size_t count = dp__mpi_count(call, step), wire = dp__mpi_wire_bytes(call), first;
    size_t own = dp__mpi_slice(comm, count, comm->process, &first);
    DP_TRY(dp__mpi_arrive(call, step));
    for (int p = 0; p < comm->process_count; p++)
        comm->in[p] = slot->in + (size_t)p * own * wire;
    comm->in[comm->process] = dp__mpi_own(call, step, false) + first * wire;
    comm->out[0] = sums + first * call->size;
    dp__mpi_add_all(call, (size_t)comm->process_count, own, 1);
    for (int p = 0; p < comm->process_count; p++) {
        slot->from.counts[p] = (int)(dp__mpi_slice(comm, count, p, &first) * call->size);
        slot->from.places[p] = (int)(first * call->size);
    }
    return dp__mpi_give_all(call, NULL, sums, step);
}

static dp_status dp__mpi_slices_end(const dp__mpi_call *call, size_t step)
{
    const char *sums = dp__mpi_sums(call, step);
    size_t wanted = dp__mpi_wanted(call, dp__mpi_at(call, step));
    DP_TRY(dp__mpi_arrive(call, step));
    for (size_t i = 1; i < wanted; i++)
        memcpy(call->comm->out[i], sums, dp__mpi_count(call, step) * call->size);
    return DP_OK;
}

/* Gather all of it from every process. */
static dp_status dp__mpi_small_begin(const dp__mpi_call *call, size_t step)
{
    const dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t bytes = call->asked.count * dp__mpi_wire_bytes(call);
    for (int p = 0; p < comm->process_count; p++) {
        slot->from.counts[p] = (int)bytes;
        slot->from.places[p] = (int)((size_t)p * bytes);
    }
    return dp__mpi_give_all(call, dp__mpi_own(call, step, true), slot->in, step);
}

static dp_status dp__mpi_small_turn(const dp__mpi_call *call, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    const dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t bytes = call->asked.count * dp__mpi_wire_bytes(call);
    DP_TRY(dp__mpi_arrive(call, step));
    for (int p = 0; p < comm->process_count; p++)
        comm->in[p] = slot->in + (size_t)p * bytes;
    dp__mpi_add_all(call, (size_t)comm->process_count, call->asked.count, dp__mpi_wanted(call, 0));
    return DP_OK;
}

static bool dp__mpi_is_half(dp_dtype dtype)
{
    return dtype == DP_F16 || dtype == DP_BF16;
}

/* ==== >>groups =================================================================================
   A group of processes that share memory has one sum to send, and needs one result. So each process
   puts the sum of its ranks into its input buffer in that memory. As above, every process adds up a
   slice of each piece. For a slice of another group, one process of this group, the sender, adds up
   the inputs and sends the sum. The receiver does the same in its own group, adds the sums of the
   groups, and sends the result back to the senders. They put it into the result buffer, which all
   processes of a group read. Equal groups on M machines send 2 (M - 1) / M times the data from each
   machine, however many processes there are.

   Groups do not change a bit. They have 1, 2, 4, 8, ... processes, the last one perhaps fewer, so
   the sum of a group is a whole subtree of the tree of all processes. They are as large as possible
   without spanning two machines.

   A message is still a collective of all processes, though most of its parts are empty, so
   waits, notes and names are as everywhere. `put` and `landed` count the pieces of all sums and
   never decrease. Each buffer has places for three pieces. A process overwrites its input with
   piece n + 3 only after all have landed n, when nobody reads the inputs of n any more; and the
   result with n + 3 only after all have landed n + 1, when all have copied n. */

enum { DP__MPI_INPUT_BYTES = 1 << 20 }; /* of a piece */

typedef struct dp__mpi_mark {
    _Alignas(128) atomic_uint put;    /* into its input */
    _Alignas(128) atomic_uint landed; /* in the result: what it sends or adds */
} dp__mpi_mark;

static int dp__mpi_group_of(const dp__mpi_comm *comm, int process)
{
    return process / comm->group.each;
}

/* The first process of a group; of the one behind the last, process_count. */
static int dp__mpi_group_first(const dp__mpi_comm *comm, int group)
{
    int first = group * comm->group.each;
    return first < comm->process_count ? first : comm->process_count;
}

static int dp__mpi_group_size(const dp__mpi_comm *comm, int group)
{
    return dp__mpi_group_first(comm, group + 1) - dp__mpi_group_first(comm, group);
}

/* Which process of a group sends the slice that `process`, of another one, adds up. */
static int dp__mpi_sender(const dp__mpi_comm *comm, int group, int process)
{
    return dp__mpi_group_first(comm, group) + process % dp__mpi_group_size(comm, group);
}

static dp__mpi_mark *dp__mpi_mark_of(const dp__mpi_comm *comm, int process)
{
    const dp__mpi_group *group = &comm->group;
    return (dp__mpi_mark *)group->shared.data + (process - group->own * group->each);
}

/* The shared memory has marks, the result, and an input for each process of the group, in order. */
static size_t dp__mpi_input_at(const dp__mpi_comm *comm, int place)
{
    size_t marks = (size_t)comm->group.each * sizeof(dp__mpi_mark);
    return (marks + 4095) / 4096 * 4096 + (size_t)place * DP__MPI_SLOTS * DP__MPI_INPUT_BYTES;
}

static char *dp__mpi_shared_at(const dp__mpi_call *call, int place, size_t step)
{
    const dp__mpi_group *group = &call->comm->group;
    size_t slot = (group->pieces + step) % DP__MPI_SLOTS;
    return (char *)group->shared.data + dp__mpi_input_at(call->comm, place) +
           slot * DP__MPI_INPUT_BYTES;
}

static char *dp__mpi_result(const dp__mpi_call *call, size_t step)
{
    return dp__mpi_shared_at(call, 0, step);
}

static char *dp__mpi_input(const dp__mpi_call *call, int process, size_t step)
{
    const dp__mpi_group *group = &call->comm->group;
    return dp__mpi_shared_at(call, 1 + process - group->own * group->each, step);
}

/* Until all in the group have put, or landed, a piece. MPI goes on meanwhile. */
static dp_status dp__mpi_await_group(const dp__mpi_call *call, bool landed, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    const dp__mpi_group *group = &comm->group;
    unsigned value = group->pieces + (unsigned)step + 1;
    int first = dp__mpi_group_first(comm, group->own);
    int end = dp__mpi_group_first(comm, group->own + 1);
    for (int p = first; p < end; p++) {
        dp__mpi_mark *mark = dp__mpi_mark_of(comm, p);
        atomic_uint *word = landed ? &mark->landed : &mark->put;
        dp__mpi_wait wait = {0};
        while ((int)(atomic_load_explicit(word, memory_order_acquire) - value) < 0) {
            DP_TRY(dp__mpi_rest(comm->line, comm->ring, &wait));
        }
    }
    return DP_OK;
}

/* The group's sum of the slice of `process`, to its place in `out`. */
static void dp__mpi_add_group(const dp__mpi_call *call, size_t step, int process, char *out)
{
    const dp__mpi_comm *comm = call->comm;
    int start = dp__mpi_group_first(comm, comm->group.own);
    int members = dp__mpi_group_size(comm, comm->group.own);
    size_t wire = dp__mpi_wire_bytes(call), first;
    size_t count = dp__mpi_slice(comm, dp__mpi_count(call, step), process, &first);
    for (int i = 0; i < members; i++)
        comm->in[i] = dp__mpi_input(call, start + i, step) + first * wire;
    comm->out[0] = out + first * wire;
    if (count > 0)
        dp__mpi_reduce(call, (size_t)members, 1, count, false);
}

/* What goes from this process to the one that adds up a slice, and, `back`, the other way. */
static void dp__mpi_group_counts(const dp__mpi_call *call, size_t step, bool back)
{
    const dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    const dp__mpi_counts *sent = back ? &slot->from : &slot->to;
    const dp__mpi_counts *added = back ? &slot->to : &slot->from;
    int self = comm->process;
    size_t size = back ? call->size : dp__mpi_wire_bytes(call), first;
    size_t count = dp__mpi_count(call, step);
    size_t own = dp__mpi_slice(comm, count, self, &first);
    for (int p = 0; p < comm->process_count; p++) {
        int group = dp__mpi_group_of(comm, p);
        bool away = group != comm->group.own;
        bool mine = away && dp__mpi_sender(comm, comm->group.own, p) == self;
        bool its = away && dp__mpi_sender(comm, group, self) == p;
        size_t bytes = dp__mpi_slice(comm, count, p, &first) * size;
        size_t place = back ? 0 : (size_t)group * own;
        sent->counts[p] = mine ? (int)bytes : 0;
        sent->places[p] = (int)(first * size);
        added->counts[p] = its ? (int)(own * size) : 0;
        added->places[p] = (int)(place * size);
    }
}

static dp_status dp__mpi_group_begin(const dp__mpi_call *call, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    int self = comm->process;
    dp__mpi_add_own(call, dp__mpi_at(call, step), dp__mpi_count(call, step),
                    dp__mpi_input(call, self, step));
    atomic_store_explicit(&dp__mpi_mark_of(comm, self)->put,
                          comm->group.pieces + (unsigned)step + 1, memory_order_release);
    DP_TRY(dp__mpi_await_group(call, false, step));
    dp__mpi_group_counts(call, step, false);
    for (int p = 0; p < comm->process_count; p++)
        if (slot->to.counts[p] > 0)
            dp__mpi_add_group(call, step, p, slot->out);
    return dp__mpi_give_all_to_all(call, slot->out, slot->in, step);
}

static dp_status dp__mpi_group_turn(const dp__mpi_call *call, size_t step)
{
    const dp__mpi_comm *comm = call->comm;
    const dp__mpi_group *group = &comm->group;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    char *result = dp__mpi_result(call, step);
    int self = comm->process;
    size_t wire = dp__mpi_wire_bytes(call), first;
    size_t own = dp__mpi_slice(comm, dp__mpi_count(call, step), self, &first);
    DP_TRY(dp__mpi_arrive(call, step));
    dp__mpi_add_group(call, step, self, slot->out);
    for (int g = 0; g < group->count; g++)
        comm->in[g] = slot->in + (size_t)g * own * wire;
    comm->in[group->own] = slot->out + first * wire;
    comm->out[0] = slot->sums;
    dp__mpi_add_all(call, (size_t)group->count, own, 1);
    memcpy(result + first * call->size, slot->sums, own * call->size);
    dp__mpi_group_counts(call, step, true);
    return dp__mpi_give_all_to_all(call, slot->sums, result, step);
}

static dp_status dp__mpi_group_end(const dp__mpi_call *call, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    size_t wanted = dp__mpi_wanted(call, dp__mpi_at(call, step));
    DP_TRY(dp__mpi_arrive(call, step));
    atomic_store_explicit(&dp__mpi_mark_of(comm, comm->process)->landed,
                          comm->group.pieces + (unsigned)step + 1, memory_order_release);
    DP_TRY(dp__mpi_await_group(call, true, step));
    for (size_t i = 0; i < wanted; i++)
        memcpy(comm->out[i], dp__mpi_result(call, step), dp__mpi_count(call, step) * call->size);
    return DP_OK;
}

/* Halves always travel as f32. */
static dp_status dp__mpi_run_groups(dp__mpi_call *call)
{
    static const dp__mpi_steps steps = {dp__mpi_group_begin, dp__mpi_group_turn, dp__mpi_group_end};
    call->wide = dp__mpi_is_half(call->asked.dtype);
    size_t piece = DP__MPI_INPUT_BYTES / dp__mpi_wire_bytes(call);
    DP_TRY(dp__mpi_run(call, &steps, piece));
    call->comm->group.pieces += (unsigned)((call->asked.count + piece - 1) / piece);
    return DP_OK;
}

/* --- the reductions --------------------------------------------------------------------------- */

static dp_status dp__mpi_all_reduce(dp__mpi_call *call)
{
    static const dp__mpi_steps small = {dp__mpi_small_begin, dp__mpi_small_turn, NULL};
    static const dp__mpi_steps large = {dp__mpi_slices_begin, dp__mpi_slices_turn,
                                        dp__mpi_slices_end};
    const dp__mpi_comm *comm = call->comm;
    call->wide = comm->most > 1 && dp__mpi_is_half(call->asked.dtype);
    size_t wire = dp__mpi_wire_bytes(call), processes = (size_t)comm->process_count;
    if (dp__mpi_is_small(call))
        return dp__mpi_run(call, &small, comm->buffer_bytes / wire / processes);
    if (comm->group.each > 1)
        return dp__mpi_run_groups(call);
    return dp__mpi_run(call, &large, comm->buffer_bytes / wire);
}

/* Blocks are all cut in the same way; a message has a piece of every rank's block. */
static dp_status dp__mpi_scatter_begin(const dp__mpi_call *call, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t count = dp__mpi_count(call, step), bytes = count * dp__mpi_wire_bytes(call);
    size_t each = call->asked.count * call->size, at = dp__mpi_at(call, step);
    for (size_t r = 0; r < (size_t)comm->rank_count; r++)
        dp__mpi_add_own(call, r * each + at, count, slot->out + r * bytes);
    for (int p = 0; p < comm->process_count; p++) {
        slot->to.counts[p] = (int)((size_t)dp__mpi_ranks(comm, p) * bytes);
        slot->to.places[p] = (int)((size_t)comm->ring->job->firsts[p] * bytes);
        slot->from.counts[p] = (int)((size_t)comm->local_count * bytes);
        slot->from.places[p] = (int)((size_t)(p * comm->local_count) * bytes);
    }
    return dp__mpi_give_all_to_all(call, slot->out, slot->in, step);
}

static dp_status dp__mpi_scatter_turn(const dp__mpi_call *call, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    const dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t count = dp__mpi_count(call, step), bytes = count * dp__mpi_wire_bytes(call);
    DP_TRY(dp__mpi_arrive(call, step));
    for (int i = 0; i < comm->local_count; i++) {
        if (call->asked.local[i].recv == NULL)
            continue;
        for (int p = 0; p < comm->process_count; p++)
            comm->in[p] = slot->in + (size_t)(p * comm->local_count + i) * bytes;
        comm->out[0] = (char *)call->asked.local[i].recv + dp__mpi_at(call, step);
        dp__mpi_add_all(call, (size_t)comm->process_count, count, 1);
    }
    return DP_OK;
}

static dp_status dp__mpi_reduce_scatter(dp__mpi_call *call)
{
    static const dp__mpi_steps steps = {dp__mpi_scatter_begin, dp__mpi_scatter_turn, NULL};
    const dp__mpi_comm *comm = call->comm;
    call->wide = comm->most > 1 && dp__mpi_is_half(call->asked.dtype);
    size_t blocks = (size_t)comm->rank_count > (size_t)(comm->process_count * comm->most)
                        ? (size_t)comm->rank_count
                        : (size_t)(comm->process_count * comm->most);
    return dp__mpi_run(call, &steps, comm->buffer_bytes / dp__mpi_wire_bytes(call) / blocks);
}

/* ==== >>moving =================================================================================
   The other collectives move bytes. Data for a process travels once, and is given there to those of
   its ranks that want it. */

/* In the root's process the buffer that MPI reads is that of the root. */
static dp_status dp__mpi_broadcast_begin(const dp__mpi_call *call, size_t step)
{
    dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t bytes = dp__mpi_count(call, step) * call->size, at = dp__mpi_at(call, step);
    int root = call->asked.root - comm->rank_first, process = 0;
    while (comm->ring->job->firsts[process + 1] <= call->asked.root)
        process++;
    for (int i = 0; i < comm->local_count && process == comm->process; i++) {
        const char *from = (const char *)call->asked.local[root].send + at;
        char *to = (char *)call->asked.local[i].recv + at;
        if (from != to)
            memcpy(to, from, bytes);
    }
    dp__mpi_enter();
    return dp__mpi_given("MPI_Ibcast",
                         MPI_Ibcast((char *)call->asked.local[0].recv + at, (int)bytes, MPI_BYTE,
                                    process, comm->native, &slot->request));
}

static dp_status dp__mpi_broadcast_turn(const dp__mpi_call *call, size_t step)
{
    const dp__mpi_comm *comm = call->comm;
    size_t bytes = dp__mpi_count(call, step) * call->size, at = dp__mpi_at(call, step);
    bool here = call->asked.root >= comm->rank_first &&
                call->asked.root < comm->rank_first + comm->local_count;
    DP_TRY(dp__mpi_arrive(call, step));
    for (int i = 1; i < comm->local_count && !here; i++)
        memcpy((char *)call->asked.local[i].recv + at, (const char *)call->asked.local[0].recv + at,
               bytes);
    return DP_OK;
}

static dp_status dp__mpi_broadcast(dp__mpi_call *call)
{
    static const dp__mpi_steps steps = {dp__mpi_broadcast_begin, dp__mpi_broadcast_turn, NULL};
    return dp__mpi_run(call, &steps, call->comm->buffer_bytes / call->size);
}

static dp_status dp__mpi_gather_begin(const dp__mpi_call *call, size_t step)
{
    const dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t bytes = dp__mpi_count(call, step) * call->size, at = dp__mpi_at(call, step);
    for (int p = 0; p < comm->process_count; p++) {
        slot->from.counts[p] = (int)((size_t)dp__mpi_ranks(comm, p) * bytes);
        slot->from.places[p] = (int)((size_t)comm->ring->job->firsts[p] * bytes);
    }
    if (comm->local_count == 1)
        return dp__mpi_give_all(call, (const char *)call->asked.local[0].send + at, slot->in, step);
    for (int i = 0; i < comm->local_count; i++)
        memcpy(slot->out + (size_t)i * bytes, (const char *)call->asked.local[i].send + at, bytes);
    return dp__mpi_give_all(call, slot->out, slot->in, step);
}

static dp_status dp__mpi_gather_turn(const dp__mpi_call *call, size_t step)
{
    const dp__mpi_comm *comm = call->comm;
    const dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t bytes = dp__mpi_count(call, step) * call->size, at = dp__mpi_at(call, step);
    size_t each = call->asked.count * call->size;
    DP_TRY(dp__mpi_arrive(call, step));
    for (int i = 0; i < comm->local_count; i++)
        for (size_t r = 0; r < (size_t)comm->rank_count && call->asked.local[i].recv != NULL; r++)
            memcpy((char *)call->asked.local[i].recv + r * each + at, slot->in + r * bytes, bytes);
    return DP_OK;
}

static dp_status dp__mpi_all_gather(dp__mpi_call *call)
{
    static const dp__mpi_steps steps = {dp__mpi_gather_begin, dp__mpi_gather_turn, NULL};
    const dp__mpi_comm *comm = call->comm;
    return dp__mpi_run(call, &steps, comm->buffer_bytes / call->size / (size_t)comm->rank_count);
}

/* To a process: from each local rank, to each of its ranks. */
static dp_status dp__mpi_exchange_begin(const dp__mpi_call *call, size_t step)
{
    const dp__mpi_comm *comm = call->comm;
    dp__mpi_slot *slot = dp__mpi_slot_of(call, step);
    size_t bytes = dp__mpi_count(call, step) * call->size, at = dp__mpi_at(call, step);
    size_t each = call->asked.count * call->size, locals = (size_t)comm->local_count;
    char *out = slot->out;
    for (int p = 0; p < comm->process_count; p++) {
        size_t first = (size_t)comm->ring->job->firsts[p], ranks = (size_t)dp__mpi_ranks(comm, p);
        slot->to.counts[p] = slot->from.counts[p] = (int)(locals * ranks * bytes);
        slot->to.places[p] = slot->from.places[p] = (int)(locals * first * bytes);
        for (size_t i = 0; i < locals; i++)
            for (size_t k = 0; k < ranks; k++, out += bytes)
                memcpy(out, (const char *)call->asked.local[i].send + (first + k) * each + at,
                       bytes);
    }
    return dp__mpi_give_all_to_all(call, slot->out, slot->in, step);
}

static dp_status dp__mpi_exchange_turn(const dp__mpi_call *call, size_t step)
{
    const dp__mpi_comm *comm = call->comm;
    size_t bytes = dp__mpi_count(call, step) * call->size, at = dp__mpi_at(call, step);
    size_t each = call->asked.count * call->size;
    const char *in = dp__mpi_slot_of(call, step)->in;
    DP_TRY(dp__mpi_arrive(call, step));
    for (size_t r = 0; r < (size_t)comm->rank_count; r++)
        for (int i = 0; i < comm->local_count; i++, in += bytes)
            memcpy((char *)call->asked.local[i].recv + r * each + at, in, bytes);
    return DP_OK;
}

static dp_status dp__mpi_all_to_all(dp__mpi_call *call)
{
    static const dp__mpi_steps steps = {dp__mpi_exchange_begin, dp__mpi_exchange_turn, NULL};
    const dp__mpi_comm *comm = call->comm;
    return dp__mpi_run(call, &steps,
                       comm->buffer_bytes / call->size / (size_t)comm->rank_count /
                           (size_t)comm->most);
}

static dp_status dp__mpi_coll_run(dp_comm *base, const dp_coll_call *asked)
{
    dp__mpi_call call = {
        .comm = dp__mpi_of(base), .asked = *asked, .size = dp_dtype_bytes(asked->dtype)};
    switch (asked->verb) {
    case DP_ALL_REDUCE:
        return dp__mpi_all_reduce(&call);
    case DP_REDUCE_SCATTER:
        return dp__mpi_reduce_scatter(&call);
    case DP_BROADCAST:
        return dp__mpi_broadcast(&call);
    case DP_ALL_GATHER:
        return dp__mpi_all_gather(&call);
    case DP_ALL_TO_ALL:
    case DP_REDUCE_TO:
    case DP_GATHER_TO:
    case DP_SCATTER_FROM:
        break;
    }
    return dp__mpi_all_to_all(&call);
}

/* ==== >>slips ==================================================================================
   Messages from one rank to another (see dp/messages.h) on the line: its slips are offers and
   answers, small, and in order. The data of what is wanted follows with a tag of its own, so that
   two that are under way are not taken for each other. MPI writes and reads slips after a failure,
   too: they are not the context's memory.                                                       */

enum {
    DP__MPI_SLIPS = DP__MPI_NOTES + 1, /* the tag */
    DP__MPI_DATA = DP__MPI_NOTES + 16, /* the first of those for data: MPI has 32,767 at least */
    DP__MPI_DATA_TAGS = 4096,
    DP__MPI_DATA_BYTES = 1 << 30 /* at once: MPI counts in int */
};

typedef enum dp__mpi_slip_kind {
    DP__MPI_OFFERED,
    DP__MPI_WANTED,
    DP__MPI_DONE,
    DP__MPI_REFUSED
} dp__mpi_slip_kind;

typedef struct dp__mpi_slip { /* as it travels */
    int32_t kind, reserved;
    dp__offer is; /* what is sent, or was expected */
    char tiny[DP__PARCEL_TINY];
} dp__mpi_slip;

typedef struct dp__mpi_sheet { /* what MPI has in its hands: a slip, or data */
    struct dp__mpi_sheet *next;
    MPI_Request request; /* MPI_REQUEST_NULL: nothing */
    dp__mpi_slip slip;
} dp__mpi_sheet;

typedef struct dp__mpi_post {
    dp__mpi_line *line;
    dp__mpi_sheet *free, *out; /* out: slips on their way */
    dp__parcels fetched;       /* receives whose data is on its way */
} dp__mpi_post;

static dp__mpi_post *dp__mpi_post_of(const dp__post *post)
{
    return post->carried;
}

static dp_status dp__mpi_sheet_take(dp__post *post, dp__mpi_sheet **out)
{
    dp__mpi_post *own = dp__mpi_post_of(post);
    dp__mpi_sheet *sheet = own->free;
    if (sheet != NULL)
        own->free = sheet->next;
    else
        sheet = dp__os_alloc(sizeof *sheet, 64, NULL);
    if (sheet == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a message");
    memset(sheet, 0, sizeof *sheet);
    sheet->request = MPI_REQUEST_NULL;
    *out = sheet;
    return DP_OK;
}

static void dp__mpi_sheet_give(dp__post *post, dp__mpi_sheet *sheet)
{
    sheet->next = dp__mpi_post_of(post)->free;
    dp__mpi_post_of(post)->free = sheet;
}

/* Whether MPI is through with it. */
static dp_status dp__mpi_sheet_test(dp__mpi_sheet *sheet, bool *out)
{
    int done = 0;
    dp__mpi_enter();
    int code = MPI_Test(&sheet->request, &done, MPI_STATUS_IGNORE);
    dp__mpi_leave();
    *out = done;
    return code == MPI_SUCCESS ? DP_OK : dp__mpi_error("MPI_Test", code);
}

static dp_status dp__mpi_slips_reap(dp__post *post)
{
    dp__mpi_sheet **at = &dp__mpi_post_of(post)->out;
    while (*at != NULL) {
        dp__mpi_sheet *sheet = *at;
        bool done = false;
        DP_TRY(dp__mpi_sheet_test(sheet, &done));
        if (done) {
            *at = sheet->next;
            dp__mpi_sheet_give(post, sheet);
        } else {
            at = &sheet->next;
        }
    }
    return DP_OK;
}

static dp_status dp__mpi_slip_send(dp__post *post, int process, const dp__mpi_slip *slip)
{
    dp__mpi_post *own = dp__mpi_post_of(post);
    dp__mpi_sheet *sheet = NULL;
    DP_TRY(dp__shared_failure(post->ctx, dp__mpi_sheet_take(post, &sheet)));
    sheet->slip = *slip;
    sheet->next = own->out;
    own->out = sheet;
    dp__mpi_enter();
    int code = MPI_Isend(&sheet->slip, (int)sizeof sheet->slip, MPI_BYTE, process, DP__MPI_SLIPS,
                         own->line->comm, &sheet->request);
    dp__mpi_leave();
    return code == MPI_SUCCESS ? DP_OK : dp__mpi_error("MPI_Isend", code);
}

/* The next part of the data, to the other process or from it. */
static dp_status dp__mpi_data(dp__post *post, dp__parcel *parcel)
{
    const dp__mpi_post *own = dp__mpi_post_of(post);
    dp__mpi_sheet *sheet = parcel->wire;
    const dp__offer *offer = parcel->receives ? &parcel->other : &parcel->is;
    size_t left = parcel->bytes - parcel->moved;
    int bytes = left < DP__MPI_DATA_BYTES ? (int)left : DP__MPI_DATA_BYTES;
    int tag = DP__MPI_DATA + (int)(offer->reply % DP__MPI_DATA_TAGS);
    dp__mpi_enter();
    int code = parcel->receives ? MPI_Irecv(parcel->data + parcel->moved, bytes, MPI_BYTE,
                                            parcel->process, tag, own->line->comm, &sheet->request)
                                : MPI_Isend(parcel->data + parcel->moved, bytes, MPI_BYTE,
                                            parcel->process, tag, own->line->comm, &sheet->request);
    dp__mpi_leave();
    parcel->moved += (size_t)bytes;
    return code == MPI_SUCCESS ? DP_OK : dp__mpi_error("MPI_Isend, MPI_Irecv", code);
}

/* Whether all of it has gone, or has come. */
static dp_status dp__mpi_data_go_on(dp__post *post, dp__parcel *parcel, bool *out)
{
    bool done = false;
    DP_TRY(dp__mpi_sheet_test(parcel->wire, &done));
    *out = done && parcel->moved == parcel->bytes;
    post->moved = post->moved || *out;
    return done && !*out ? dp__mpi_data(post, parcel) : DP_OK;
}

static dp_status dp__mpi_prepare(dp__post *post, dp__parcel *send)
{
    dp__mpi_sheet *sheet = NULL;
    DP_TRY(dp__mpi_sheet_take(post, &sheet));
    send->wire = sheet;
    return DP_OK;
}

static void dp__mpi_discard(dp__post *post, dp__parcel *parcel)
{
    dp__mpi_sheet *sheet = parcel->wire;
    if (sheet == NULL)
        return;
    dp__mpi_enter();
    MPI_Wait(&sheet->request, MPI_STATUS_IGNORE); /* the other one has all: it does not block */
    dp__mpi_leave();
    dp__mpi_sheet_give(post, sheet);
    parcel->wire = NULL;
}

static dp_status dp__mpi_offer(dp__post *post, dp__parcel *send)
{
    dp__mpi_slip slip = {.kind = DP__MPI_OFFERED};
    send->is.reply = send->number;
    slip.is = send->is;
    if (send->bytes > 0 && send->bytes <= sizeof slip.tiny)
        memcpy(slip.tiny, send->data, send->bytes);
    dp__parcel_add(&post->offered, send);
    return dp__mpi_slip_send(post, send->process, &slip);
}

static dp_status dp__mpi_reply(dp__post *post, const dp__parcel *receive, dp__mpi_slip_kind kind)
{
    dp__mpi_slip slip = {.kind = (int32_t)kind, .is = receive->is};
    slip.is.reply = receive->other.reply;
    return dp__mpi_slip_send(post, receive->process, &slip);
}

static dp_status dp__mpi_answer(dp__post *post, const dp__parcel *receive, bool fits)
{
    return dp__mpi_reply(post, receive, fits ? DP__MPI_DONE : DP__MPI_REFUSED);
}

static dp_status dp__mpi_fetch(dp__post *post, dp__parcel *receive)
{
    DP_TRY(dp__shared_failure(post->ctx, dp__mpi_prepare(post, receive)));
    dp__parcel_add(&dp__mpi_post_of(post)->fetched, receive);
    DP_TRY(dp__mpi_data(post, receive));
    return dp__mpi_reply(post, receive, DP__MPI_WANTED);
}

static dp_status dp__mpi_slip_read(dp__post *post, int from, const dp__mpi_slip *slip)
{
    dp__parcel *send = post->offered.first;
    if (slip->kind == DP__MPI_OFFERED)
        return dp__offer_arrived(post, from, &slip->is, slip->tiny);
    while (send != NULL && send->number != slip->is.reply)
        send = send->next;
    if (send == NULL)
        return dp_error(DP_ERR_INTERNAL, "process %d answers what was never sent", from);
    if (slip->kind == DP__MPI_WANTED)
        return dp__mpi_data(post, send);
    send->other = slip->is;
    dp__parcel_sent(post, send, slip->kind == DP__MPI_DONE);
    return DP_OK;
}

/* The next slip, if one has come; *out_from is -1 else. */
static dp_status dp__mpi_slip_next(dp__post *post, dp__mpi_slip *slip, int *out_from)
{
    MPI_Comm comm = dp__mpi_post_of(post)->line->comm;
    MPI_Status status;
    int there = 0;
    *out_from = -1;
    dp__mpi_enter();
    int code = MPI_Iprobe(MPI_ANY_SOURCE, DP__MPI_SLIPS, comm, &there, &status);
    if (code == MPI_SUCCESS && there) /* it is here, so this does not block */
        code = MPI_Recv(slip, (int)sizeof *slip, MPI_BYTE, status.MPI_SOURCE, DP__MPI_SLIPS, comm,
                        &status);
    dp__mpi_leave();
    if (code != MPI_SUCCESS)
        return dp__mpi_error("MPI_Iprobe", code);
    *out_from = there ? status.MPI_SOURCE : -1;
    return DP_OK;
}

static dp_status dp__mpi_parcels_go_on(dp__post *post)
{
    for (dp__parcel *send = post->offered.first; send != NULL; send = send->next) {
        dp__mpi_sheet *sheet = send->wire;
        bool gone = false;
        if (sheet->request != MPI_REQUEST_NULL)
            DP_TRY(dp__mpi_data_go_on(post, send, &gone));
    }
    dp__parcel *receive = dp__mpi_post_of(post)->fetched.first, *next;
    for (; receive != NULL; receive = next) {
        bool all = false;
        next = receive->next;
        DP_TRY(dp__mpi_data_go_on(post, receive, &all));
        if (!all)
            continue;
        DP_TRY(dp__parcel_received(post, receive));
        DP_TRY(dp__mpi_answer(post, receive, true));
    }
    return DP_OK;
}

static dp_status dp__mpi_advance(dp__post *post)
{
    dp__mpi_slip slip;
    int from;
    do {
        DP_TRY(dp__mpi_slip_next(post, &slip, &from));
        if (from >= 0)
            DP_TRY(dp__mpi_slip_read(post, from, &slip));
    } while (from >= 0);
    DP_TRY(dp__mpi_parcels_go_on(post));
    return dp__mpi_slips_reap(post);
}

static dp_status dp__mpi_post_wait(dp__post *post)
{
    dp__mpi_wait wait = {0};
    for (;;) {
        DP_TRY(dp__mpi_advance(post));
        if (post->moved)
            return DP_OK;
        if (dp__mpi_idle(&wait))
            DP_TRY(dp__post_rest(post, &wait.look));
    }
}

/* MPI cannot always give back data that is under way: that stays with it. */
static void dp__mpi_data_leave(dp__post *post, dp__parcel *parcel, uint64_t until)
{
    dp__mpi_sheet *sheet = parcel->wire;
    bool done = false;
    if (sheet->request != MPI_REQUEST_NULL && parcel->receives) {
        dp__mpi_enter();
        MPI_Cancel(&sheet->request);
        dp__mpi_leave();
    }
    while (dp__mpi_sheet_test(sheet, &done) == DP_OK && !done && dp__os_ms_until(until) > 0)
        dp__os_yield();
    if (done) {
        dp__mpi_discard(post, parcel);
        return;
    }
    if (parcel->stage != NULL)
        dp__scope_keep(parcel->stage);
    dp__mpi_enter();
    MPI_Request_free(&sheet->request);
    dp__mpi_leave();
}

/* Slips that are still on their way stay with MPI, too. */
static void dp__mpi_post_close(dp__post *post)
{
    dp__mpi_post *own = dp__mpi_post_of(post);
    uint64_t until = dp__os_after_ms(DP__MPI_FLUSH_MS);
    if (!dp__mpi_is_there())
        return;
    while (dp__mpi_slips_reap(post) == DP_OK && own->out != NULL && dp__os_ms_until(until) > 0)
        dp__os_yield();
    for (int i = 0; i < post->block_count; i++)
        for (size_t k = 0; k < dp__parcels_in(i); k++)
            if (post->blocks[i][k].wire != NULL)
                dp__mpi_data_leave(post, &post->blocks[i][k], until);
    while (own->free != NULL) {
        dp__mpi_sheet *sheet = own->free;
        own->free = sheet->next;
        dp__os_free(sheet, 0, NULL);
    }
}

static dp_status dp__mpi_post_open(dp__post *post)
{
    static const dp__carrier carrier = {
        .prepare = dp__mpi_prepare,
        .discard = dp__mpi_discard,
        .offer = dp__mpi_offer,
        .fetch = dp__mpi_fetch,
        .answer = dp__mpi_answer,
        .advance = dp__mpi_advance,
        .wait = dp__mpi_post_wait,
        .close = dp__mpi_post_close,
    };
    if (dp__mpi_level() < MPI_THREAD_SERIALIZED)
        return DP_OK;
    dp__mpi_post *own = dp__scope_bytes(post->scope, sizeof *own, 64);
    if (own == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for messages");
    *own = (dp__mpi_post){.line = post->ctx->line};
    post->carried = own;
    post->carrier = &carrier;
    return DP_OK;
}

/* ==== >>table ==================================================================================
   From a line to a communicator. Every step is agreed upon by all processes, including those that
   failed in it, so that all fail together.                                                      */

static bool dp__mpi_fits(const dp_comm_config *config)
{
    return config->bootstrap != NULL && config->host_memory &&
           config->bootstrap->all_gather == dp__mpi_line_gather;
}

static void dp__mpi_free(dp__mpi_comm *comm)
{
    dp__os_shared_close(&comm->group.shared);
    dp__os_free(comm->buffers, 0, NULL);
    dp__os_free(comm->numbers, 0, NULL);
    dp__os_free(comm->heads, 0, NULL);
    dp__os_free(comm->in, 0, NULL);
    dp__os_free(comm->out, 0, NULL);
    dp__os_free(comm, 0, NULL);
}

static dp_status dp__mpi_full(void)
{
    return dp_error(DP_ERR_NO_MEMORY, "MPI: no memory for a communicator");
}

/* The part that depends on this process alone. */
static dp_status dp__mpi_new(const dp_host *host, const dp_comm_config *config, dp__mpi_comm **out)
{
    const dp__simd *simd = NULL;
    if (dp__mpi_level() < MPI_THREAD_SERIALIZED)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "MPI was initialised with MPI_THREAD_%s, and the thread that carries "
                        "gradients has to call it: ask MPI_Init_thread for MPI_THREAD_MULTIPLE, or "
                        "leave it to dp_open",
                        dp__mpi_level() == MPI_THREAD_FUNNELED ? "FUNNELED" : "SINGLE");
    DP_TRY(dp__simd_choose(&simd));
    dp__mpi_comm *comm = dp__os_alloc(sizeof *comm, 64, NULL);
    if (comm == NULL)
        return dp__mpi_full();
    memset(comm, 0, sizeof *comm);
    comm->base = (dp_comm){dp_mpi_coll(), host};
    comm->simd = simd;
    comm->group.shared.fd = -1;
    comm->ring = dp__ring_opening(dp__job_of(host));
    comm->ring->compared = true;
    comm->line = config->bootstrap->user;
    comm->native = MPI_COMM_NULL;
    comm->process = comm->ring->job->process;
    comm->process_count = comm->ring->job->process_count;
    comm->rank_first = config->rank_first;
    comm->local_count = config->local_count;
    comm->rank_count = config->rank_count;
    *out = comm;
    return DP_OK;
}

/* A piece has at least one element of every block. */
static void dp__mpi_place_buffers(dp__mpi_comm *comm)
{
    size_t processes = (size_t)comm->process_count, stride = comm->stride;
    int *numbers = comm->numbers;
    char *at = comm->buffers;
    for (int i = 0; i < DP__MPI_SLOTS; i++) {
        dp__mpi_slot *slot = &comm->slots[i];
        slot->out = at;
        slot->in = at + stride;
        slot->sums = at + 2 * stride;
        slot->to = (dp__mpi_counts){numbers, numbers + processes};
        slot->from = (dp__mpi_counts){numbers + 2 * processes, numbers + 3 * processes};
        at += 3 * stride;
        numbers += 4 * processes;
    }
    comm->wide = at;
}

/* The largest power of two that divides the place of every process that another machine begins at.
   Where there is one machine, MPI was asked for by name: nothing is shared. */
static void dp__mpi_group_learn(dp__mpi_comm *comm)
{
    dp__mpi_group *group = &comm->group;
    const dp__card *all = comm->ring->job->cards;
    int processes = comm->process_count, begins = 0;
    for (int p = 1; p < processes; p++)
        begins |= all[p].machine != all[p - 1].machine ? p : 0;
    group->each = begins > 0 ? begins & -begins : 1;
    group->own = comm->process / group->each;
    group->count = (processes + group->each - 1) / group->each;
}

/* The part that depends on all processes. */
static dp_status dp__mpi_learn(dp__mpi_comm *comm)
{
    size_t processes = (size_t)comm->process_count;
    comm->numbers = dp__os_alloc(4 * processes * DP__MPI_SLOTS * sizeof(int), 64, NULL);
    if (comm->numbers == NULL)
        return dp__mpi_full();
    for (int p = 0; p < comm->process_count; p++)
        comm->most = dp__mpi_ranks(comm, p) > comm->most ? dp__mpi_ranks(comm, p) : comm->most;
    size_t least = processes * (size_t)comm->most * (size_t)comm->most * sizeof(double);
    comm->buffer_bytes = least > DP__MPI_BUFFER_BYTES ? least : DP__MPI_BUFFER_BYTES;
    comm->stride = comm->buffer_bytes + processes * DP__MPI_SLICE * sizeof(double);
    size_t operands = (processes + (size_t)comm->most) * sizeof(void *);
    comm->buffers = dp__os_alloc((3 * DP__MPI_SLOTS + 1) * comm->stride, 64, NULL);
    comm->in = dp__os_alloc(operands, 64, NULL);
    comm->out = dp__os_alloc(operands, 64, NULL);
    size_t tiny = DP__MPI_SMALL_BYTES / processes;
    tiny = tiny < DP__MPI_TINY_BYTES ? tiny : DP__MPI_TINY_BYTES;
    comm->head_bytes = (sizeof(dp__mpi_head) + tiny + 63) / 64 * 64;
    comm->heads = dp__os_alloc((processes + 1) * comm->head_bytes, 64, NULL);
    if (comm->buffers == NULL || comm->in == NULL || comm->out == NULL || comm->heads == NULL)
        return dp__mpi_full();
    dp__mpi_place_buffers(comm);
    dp__mpi_group_learn(comm);
    return DP_OK;
}

/* The first process of a group makes the memory, and each has its own input. */
static dp_status dp__mpi_group_open(dp__mpi_comm *comm)
{
    dp__shared *shared = &comm->group.shared;
    int first = dp__mpi_group_first(comm, comm->group.own);
    size_t members = (size_t)dp__mpi_group_size(comm, comm->group.own);
    const dp__area area = {.maker = first,
                           .bytes = dp__mpi_input_at(comm, 1 + (int)members),
                           .head = dp__mpi_input_at(comm, 1),
                           .first = dp__mpi_input_at(comm, 1 + comm->process - first),
                           .each = dp__mpi_input_at(comm, 1) - dp__mpi_input_at(comm, 0)};
    DP_TRY(dp__area_open(comm->ring->job, &area, shared));
    dp__os_shared_close(&(dp__shared){.fd = shared->fd}); /* the memory stays */
    shared->fd = -1;
    return DP_OK;
}

/* Where there is no such memory MPI carries everything. */
static dp_status dp__mpi_share(dp__mpi_comm *comm)
{
    const dp_host *host = comm->base.host;
    dp__mpi_group *group = &comm->group;
    dp_status status = group->each > 1 ? dp__mpi_group_open(comm) : DP_OK;
    char text[96];
    if (status != DP_OK && atomic_load(&comm->line->failed) != DP_OK)
        return status;
    if (status != DP_OK)
        host->log(host, DP_LOG_INFO, dp_last_error());
    group->each = status == DP_OK ? group->each : 1;
    snprintf(text, sizeof text, "MPI: %d processes, which share memory in groups of %d",
             comm->process_count, group->each);
    host->log(host, DP_LOG_INFO, text);
    return DP_OK;
}

static dp_status dp__mpi_open_all(dp__mpi_comm *comm)
{
    DP_TRY(dp__job_agree(comm->ring->job, dp__mpi_learn(comm)));
    DP_TRY(dp__mpi_share(comm));
    return dp__mpi_copy(comm->line, comm->line->comm, &comm->native);
}

static dp_status dp__mpi_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp__mpi_comm *comm = NULL;
    const dp__mpi_line *line = config->bootstrap->user;
    dp_status status = dp__job_agree(dp__job_of(host), dp__mpi_new(host, config, &comm));
    if (status == DP_OK && comm != NULL)
        status = dp__mpi_open_all(comm);
    if (status == DP_OK)
        *out = &comm->base;
    else if (comm != NULL && atomic_load(&line->failed) == DP_OK) /* or MPI may still write there */
        comm->base.ops->close(&comm->base);
    return status;
}

static void dp__mpi_close(dp_comm *base)
{
    dp__mpi_comm *comm = dp__mpi_of(base);
    if (comm->broken)
        return;
    dp__mpi_drop(&comm->native);
    dp__mpi_free(comm);
}

DP_API const dp_coll_ops *dp_mpi_coll(void)
{
    static const dp_coll_ops ops = {.size = sizeof(dp_coll_ops),
                                    .name = "MPI",
                                    .fits = dp__mpi_fits,
                                    .open = dp__mpi_open,
                                    .close = dp__mpi_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__mpi_coll_run};
    return &ops;
}

static const dp__mpi_place dp__mpi_here = {
    .join = dp__mpi_join,
    .leave = dp__mpi_line_leave,
    .all_gather = dp__mpi_line_gather,
    .coll = dp_mpi_coll,
    .hear = dp__mpi_line_hear,
    .tell = dp__mpi_line_tell,
    .send = dp__mpi_line_send,
    .split = dp__mpi_split,
    .drop = dp__mpi_drop_split,
    .post = dp__mpi_post_open,
};
static const dp__mpi_place *dp__backend_mpi = &dp__mpi_here; /* dp.h asks for it */

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
