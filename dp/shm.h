/* dp/shm.h - v0.1.0 - collectives between processes of one machine - MIT licence

   Part of dp.h, which includes it. It holds the table dp_shm_coll(), for jobs in which all ranks
   are CPU devices of processes of one machine. Its calls to the system are in dp/os.h.

   CONTENTS (search for the tag)
     >>control  the memory that the processes share
     >>failing  the first failure, in words, for all
     >>waiting  for another process, but not for one that is gone
     >>meeting  whether all issue the same collective
     >>folding  reductions
     >>moving   broadcast, all_gather, all_to_all
     >>joining  from a config to a communicator, and the table
*/

#ifndef DP__ROOMS
#error "dp/shm.h is a part of dp.h: include dp.h"
#else

/* ==== >>control ================================================================================
   Every process has a record in the shared memory (a few cache lines that only it writes) and a
   buffer, through which its bytes go to others. Lines that are written at different times lie
   apart.

   A collective begins with a note in every record, which says what the collective is. No process
   goes on before all have written the same. Each record has two notes, used in turn, because a
   process may begin the next collective while another still reads this one's note. It cannot begin
   the one after that, for which it needs the slow process. For the same reason each buffer has two
   places for small data, which is written before the note and needs no other step. Large data goes
   in pieces through the slots of the buffer, which are all free when a collective begins. `made`
   and `taken` count pieces over all collectives and never decrease.

   The limit: an all-reduce of N bytes over R ranks reads and writes every rank's buffer once, which
   takes at least 2 N R bytes divided by the bandwidth of memory. The traffic through the shared
   buffers comes on top of that. But a slot is read soon after it was written, so it stays in shared
   caches.                                                                                      */

/* Sizes were tried on 2 cores. With 4 slots and a lag of 2, a MiB takes twice as long: a
   process that is disturbed for a moment stops all others. */
enum {
    DP__SHM_SMALL_BYTES = 64 << 10,
    DP__SHM_SLOT_BYTES = 64 << 10, /* a piece at most: with its operands it fits into an L2 cache */
    DP__SHM_PIECE_BYTES = 32 << 10, /* and at least: a step has to be worth a look at other lines */
    DP__SHM_PIECES = 8,             /* into which large data is cut, so that all have work early */
    DP__SHM_SLOTS = 8,
    DP__SHM_LAG = 3, /* pieces that a process makes before it takes the result of the first */
    DP__SHM_PAGES = 64 << 10 /* a multiple of every system's page */
};

typedef enum dp__shm_word {
    DP__SHM_NOTE_0,
    DP__SHM_NOTE_1,
    DP__SHM_MADE,
    DP__SHM_TAKEN
} dp__shm_word;

typedef struct dp__shm_note {     /* what a process begins */
    _Alignas(64) atomic_uint seq; /* written last */
    dp__signature is;
    dp__label label; /* for sentences; written when it changes */
} dp__shm_note;

typedef enum dp__shm_state { DP__SHM_OUTSIDE, DP__SHM_INSIDE, DP__SHM_LEFT } dp__shm_state;

typedef struct dp__shm_member {
    dp__shm_note notes[2];
    _Alignas(128) atomic_uint made; /* neighbours of a line are fetched with it */
    _Alignas(128) atomic_uint taken;
    _Alignas(128) atomic_uint done; /* the last collective that it has finished */
    atomic_int state;
    atomic_int process_id;
    atomic_int waits_for, waits_word; /* while it sleeps; -1: it does not */
    atomic_uint waits_value;
    atomic_uint said_after; /* the collective that was begun last when it said what is below */
    char said[160];         /* of a call that failed; "": none did */
} dp__shm_member;

typedef struct dp__shm_control {
    _Alignas(128) atomic_uint sleepers; /* too many, once a process has died in its sleep */
    _Alignas(128) atomic_uint failed;   /* 1: the text is being written, 2: it is there */
    int32_t status, rank;               /* of the first failure: where it is from */
    char text[DP__TEXT_BYTES];
    dp__shm_member members[];
} dp__shm_control;

enum { DP__SHM_SUMS = 32 }; /* one for each digit of a number of ranks */

typedef struct dp__shm_run { /* ranks first .. end - 1, and what is to the left of them */
    int part, first, end;
    int taken, taken_end; /* sums of others */
    bool onto;            /* what runs before have made of this part lies in between */
} dp__shm_run;

typedef struct dp__shm_tree { /* what a process does of it: see >>folding */
    dp__shm_run runs[2 * DP__SHM_SUMS];
    int run_count;
    int processes[DP__SHM_SUMS], places[DP__SHM_SUMS]; /* whose slots have what it takes, where */
    int taken_count;
    int next;  /* the process that is the last one to take what this leaves */
    int parts; /* of a slot: the most sums that any process leaves */
    size_t part_bytes;
} dp__shm_tree;

typedef struct dp__shm_comm {
    dp_comm base;
    const dp_comm *face; /* the communicator that the context knows: mostly this one */
    const dp__simd *simd;
    dp__shared shared;
    dp__shm_control *control;
    int process, process_count;
    int rank_first, local_count, rank_count;
    int *firsts;     /* the first rank of every process, and rank_count at the end */
    unsigned seq;    /* collectives so far */
    unsigned steps;  /* pieces of all of them, for the process that had the most */
    unsigned missed; /* spins in a row that ran out */
    bool spin;
    int timeout_ms;
    dp__shm_tree tree;
    unsigned labels[2]; /* of the own notes, as the journal counts them */
    unsigned kept;      /* notes that a buffer keeps, where it is for nothing else; else 0 */
    const void **in;    /* rank_count + 1 */
    void **out;
    float *wide; /* a slot for each local rank: halves under way, in f32 */
} dp__shm_comm;
_Static_assert(offsetof(dp__shm_comm, base) == 0, "a dp_comm is the head of its communicator");

typedef struct dp__shm_call { /* one collective */
    dp__shm_comm *comm;
    dp_coll_call asked;
    size_t size; /* bytes of an element */
} dp__shm_call;

static size_t dp__shm_pages(size_t bytes)
{
    return (bytes + DP__SHM_PAGES - 1) / DP__SHM_PAGES * DP__SHM_PAGES;
}

static size_t dp__shm_control_bytes(int process_count)
{
    return dp__shm_pages(sizeof(dp__shm_control) + (size_t)process_count * sizeof(dp__shm_member));
}

static size_t dp__shm_buffer_bytes(void)
{
    return dp__shm_pages(2 * DP__SHM_SMALL_BYTES + DP__SHM_SLOTS * DP__SHM_SLOT_BYTES);
}

static size_t dp__shm_bytes(int process_count)
{
    return dp__shm_control_bytes(process_count) + (size_t)process_count * dp__shm_buffer_bytes();
}

static char *dp__shm_buffer(const dp__shm_comm *comm, int process)
{
    return (char *)comm->control + dp__shm_control_bytes(comm->process_count) +
           (size_t)process * dp__shm_buffer_bytes();
}

/* For small data, of the collective that is under way. */
static char *dp__shm_small(const dp__shm_comm *comm, int process)
{
    return dp__shm_buffer(comm, process) + comm->seq % 2 * DP__SHM_SMALL_BYTES;
}

static char *dp__shm_slot(const dp__shm_comm *comm, int process, size_t piece)
{
    return dp__shm_buffer(comm, process) + 2 * DP__SHM_SMALL_BYTES +
           piece % DP__SHM_SLOTS * DP__SHM_SLOT_BYTES;
}

static dp__shm_comm *dp__shm_of(dp_comm *comm)
{
    return (dp__shm_comm *)comm;
}

static dp__shm_member *dp__shm_own(const dp__shm_comm *comm)
{
    return &comm->control->members[comm->process];
}

static int dp__shm_ranks(const dp__shm_comm *comm, int process)
{
    return comm->firsts[process + 1] - comm->firsts[process];
}

static atomic_uint *dp__shm_word_of(const dp__shm_comm *comm, int process, int word)
{
    dp__shm_member *member = &comm->control->members[process];
    if (word == DP__SHM_MADE)
        return &member->made;
    return word == DP__SHM_TAKEN ? &member->taken : &member->notes[word == DP__SHM_NOTE_1].seq;
}

/* A word counts up. A sleeper is counted before it looks at the word for the last time, and the
   count is read after the word was written: so one of the two sees the other. */
static void dp__shm_tell(const dp__shm_comm *comm, atomic_uint *word, unsigned value)
{
    atomic_store(word, value);
    if (atomic_load(&comm->control->sleepers) != 0)
        dp__os_word_wake(word);
}

/* ==== >>failing ================================================================================
   The first process to find a failure writes it for all into the shared memory, so that every
   process returns the same sentence. The sentence names the rank at fault, the collective, and what
   that rank did last.                                                                          */

enum { DP__SHM_WORDS_BYTES = 96, DP__SHM_LAST_BYTES = DP__WORDS_BYTES + 224 };

static const char *dp__shm_note_text(const dp__shm_note *note, char *text)
{
    return dp__issue_text(&note->is, &note->label, text);
}

/* "rank 3 (process 1, pid 4242)" */
static const char *dp__shm_who(const dp__shm_comm *comm, int process, char *text)
{
    int first = comm->firsts[process], last = comm->firsts[process + 1] - 1, used = 0;
    int pid = atomic_load(&comm->control->members[process].process_id);
    if (first == last)
        used = snprintf(text, DP__SHM_WORDS_BYTES, "rank %d", first);
    else
        used = snprintf(text, DP__SHM_WORDS_BYTES, "ranks %d to %d", first, last);
    snprintf(text + used, DP__SHM_WORDS_BYTES - (size_t)used, " (process %d, pid %d)", process,
             pid);
    return text;
}

static bool dp__shm_same(const dp__shm_note *a, const dp__shm_note *b)
{
    return memcmp(&a->is, &b->is, sizeof a->is) == 0;
}

/* As its user counts: the pieces of a collective have one number. */
static unsigned dp__shm_number(const dp__shm_note *note)
{
    return note->is.number != 0 ? (unsigned)note->is.number : atomic_load(&note->seq);
}

/* The note of the collective that a process began last. */
static const dp__shm_note *dp__shm_last_note(const dp__shm_member *member)
{
    unsigned a = atomic_load(&member->notes[0].seq), b = atomic_load(&member->notes[1].seq);
    return &member->notes[(int)(b - a) > 0];
}

/* "it is in 7, all_reduce of 25 f32 (sum)" */
static void dp__shm_last_text(const dp__shm_comm *comm, int process, char *text, size_t room)
{
    char words[DP__WORDS_BYTES];
    size_t used;
    const dp__shm_member *member = &comm->control->members[process];
    const dp__shm_note *note = dp__shm_last_note(member);
    const dp__shm_note *own = &dp__shm_own(comm)->notes[comm->seq % 2];
    unsigned seq = atomic_load(&note->seq);
    bool piece = note->is.number != 0 && seq != comm->seq; /* another one than this process has */
    bool here = (piece || seq == comm->seq) && comm->seq == atomic_load(&own->seq) &&
                dp__shm_same(note, own);
    bool done = atomic_load(&member->done) == seq && !(here && piece);
    if (seq == 0)
        used = dp__append(text, room, 0, "it has begun none");
    else if (here && !done)
        used = dp__append(text, room, 0, "it is in that one");
    else
        used = dp__append(text, room, 0, "%s %u, %s", done ? "its last one was" : "it is in",
                          dp__shm_number(note), dp__shm_note_text(note, words));
    if (member->said[0] != '\0' && atomic_load(&member->said_after) == seq && (done || seq == 0))
        (void)dp__append(text, room, used, ", and then a call failed: %.159s", member->said);
}

static dp_status dp__shm_failed(const dp__shm_comm *comm)
{
    dp__shm_control *control = comm->control;
    for (int i = 0; i < 100 && atomic_load(&control->failed) != 2; i++)
        dp__os_word_wait(&control->failed, 1, 2000000);
    if (atomic_load(&control->failed) != 2)
        return dp_error(DP_ERR_REMOTE, "another process failed and died before it could report the "
                                       "reason");
    dp__thread.culprit = control->rank + 1;
    return dp_error((dp_status)control->status, "%s", control->text);
}

static void dp__shm_wake_all(const dp__shm_comm *comm)
{
    dp__os_word_wake(&comm->control->failed);
    for (int p = 0; p < comm->process_count; p++)
        for (int word = DP__SHM_NOTE_0; word <= DP__SHM_TAKEN; word++)
            dp__os_word_wake(dp__shm_word_of(comm, p, word));
}

/* Because of `rank`, unless another failure was first. */
DP_PRINTF(4, 5)
static void dp__shm_fail(const dp__shm_comm *comm, dp_status status, int rank, const char *format,
                         ...)
{
    dp__shm_control *control = comm->control;
    unsigned none = 0;
    va_list args;
    if (!atomic_compare_exchange_strong(&control->failed, &none, 1))
        return;
    va_start(args, format);
    vsnprintf(control->text, sizeof control->text, format, args);
    va_end(args);
    control->status = status;
    control->rank = rank;
    atomic_store(&control->failed, 2);
    dp__shm_wake_all(comm);
}

/* "collective 8, all_reduce of 25 f32 (sum): rank 1 (process 1, pid 4242) died; ..." */
static dp_status dp__shm_blame_for(const dp__shm_comm *comm, const char *collective,
                                   dp_status status, int process, const char *what)
{
    char who[DP__SHM_WORDS_BYTES], last[DP__SHM_LAST_BYTES];
    dp__shm_last_text(comm, process, last, sizeof last);
    dp__shm_fail(comm, status, comm->firsts[process], "%s: %s %s; %s", collective,
                 dp__shm_who(comm, process, who), what, last);
    return dp__shm_failed(comm);
}

static dp_status dp__shm_blame(const dp__shm_comm *comm, dp_status status, int process,
                               const char *what)
{
    char own[DP__WORDS_BYTES], collective[DP__WORDS_BYTES + 32];
    const dp__shm_note *note = &dp__shm_own(comm)->notes[comm->seq % 2];
    snprintf(collective, sizeof collective, "collective %u, %s", dp__shm_number(note),
             dp__shm_note_text(note, own));
    return dp__shm_blame_for(comm, collective, status, process, what);
}

/* This process has failed: the others hear why. What another one is to blame for names that one
   already. */
static void dp__shm_tell_failure(const dp__shm_comm *comm, dp_status status, int rank,
                                 const char *text)
{
    char who[DP__SHM_WORDS_BYTES];
    if (rank == comm->rank_first)
        dp__shm_fail(comm, status, rank, "%s failed: %s", dp__shm_who(comm, comm->process, who),
                     text);
    else
        dp__shm_fail(comm, status, rank, "%s", text);
}

/* The job of this process has failed, by dp_abort or otherwise. */
static void dp__shm_pass_on(const dp__shm_comm *comm)
{
    const dp_ctx *ctx = dp__ctx_of(comm->base.host);
    int failed = atomic_load_explicit(&ctx->failed, memory_order_acquire);
    if (failed != DP_OK)
        dp__shm_tell_failure(comm, (dp_status)failed, ctx->failed_rank, ctx->failed_text);
}

/* ==== >>waiting ================================================================================
   A wait spins if there is a core for every thread of all the processes, and sleeps otherwise; as
   in a team, it learns how long to spin. A sleeper wakes up every few milliseconds and looks
   whether it still makes sense to wait. Time for which this process itself was stopped does not
   count. */

enum {
    DP__SHM_LOOK_NS = 4000000,
    DP__SHM_LATE_NS = 100000000 /* the most that one sleep counts for */
};

typedef struct dp__shm_need {
    int process;
    int word; /* dp__shm_word, at least `value` */
    unsigned value;
} dp__shm_need;

static bool dp__shm_reached(const dp__shm_comm *comm, const dp__shm_need *need)
{
    const atomic_uint *word = dp__shm_word_of(comm, need->process, need->word);
    return (int)(atomic_load_explicit(word, memory_order_acquire) - need->value) >= 0;
}

static bool dp__shm_spin(dp__shm_comm *comm, const dp__shm_need *need)
{
    uint64_t until = 0;
    do {
        for (int i = 0; i < 16; i++) {
            if (dp__shm_reached(comm, need)) {
                comm->missed = 0;
                return true;
            }
            dp__os_pause();
        }
        until = until != 0 ? until : dp__os_now_ns() + dp__gate_patience(comm->missed);
    } while (dp__os_now_ns() < until);
    comm->missed++;
    return false;
}

/* The process that all wait for in the end: it waits for nobody, or could go on and does not. */
static int dp__shm_culprit(const dp__shm_comm *comm, int process)
{
    int at = process;
    for (int hops = 0; hops < comm->process_count; hops++) {
        const dp__shm_member *member = &comm->control->members[at];
        dp__shm_need need = {atomic_load(&member->waits_for), atomic_load(&member->waits_word),
                             atomic_load(&member->waits_value)};
        if (need.process < 0 || dp__shm_reached(comm, &need))
            return at;
        at = need.process;
    }
    return process;
}

/* One with the id of this process is alive, and so is one that has left its lock to another
   context. */
static bool dp__shm_alive(const dp__shm_comm *comm, int process)
{
    int pid = atomic_load(&comm->control->members[process].process_id);
    for (int p = 0; p < comm->process_count; p++) {
        const dp__shm_member *member = &comm->control->members[p];
        bool same = p == comm->process || atomic_load(&member->state) == DP__SHM_LEFT;
        if (p != process && same && atomic_load(&member->process_id) == pid)
            return true;
    }
    return dp__os_shared_held(&comm->shared, process);
}

/* Whether it makes sense to go on waiting. */
static dp_status dp__shm_look(const dp__shm_comm *comm, const dp__shm_need *need, uint64_t waited)
{
    char text[64];
    bool left = atomic_load(&comm->control->members[need->process].state) == DP__SHM_LEFT;
    bool dead = !left && !dp__shm_alive(comm, need->process);
    if (dp__shm_reached(comm, need)) /* it got there before it ended */
        return DP_OK;
    if (atomic_load(&comm->control->failed) != 0) /* also where this process was aborted */
        return dp__shm_failed(comm);
    if (left)
        return dp__shm_blame(comm, DP_ERR_REMOTE, need->process, "has closed its context");
    if (dead)
        return dp__shm_blame(comm, DP_ERR_REMOTE, need->process, "has died");
    if (waited < (uint64_t)comm->timeout_ms * 1000000)
        return DP_OK;
    snprintf(text, sizeof text, "did not come within %d ms", comm->timeout_ms);
    return dp__shm_blame(comm, DP_ERR_TIMEOUT, dp__shm_culprit(comm, need->process), text);
}

static void dp__shm_say_wait(const dp__shm_comm *comm, const dp__shm_need *need)
{
    dp__shm_member *member = dp__shm_own(comm);
    atomic_store(&member->waits_for, -1);
    atomic_store(&member->waits_word, need->word);
    atomic_store(&member->waits_value, need->value);
    atomic_store(&member->waits_for, need->process);
}

static dp_status dp__shm_sleep(const dp__shm_comm *comm, const dp__shm_need *need)
{
    atomic_uint *word = dp__shm_word_of(comm, need->process, need->word);
    uint64_t waited = 0, last = dp__os_now_ns();
    dp_status status = DP_OK;
    dp__shm_say_wait(comm, need);
    atomic_fetch_add(&comm->control->sleepers, 1);
    while (status == DP_OK) {
        unsigned seen = atomic_load(word);
        if (dp__shm_reached(comm, need))
            break;
        dp__os_word_wait(word, seen, DP__SHM_LOOK_NS);
        uint64_t now = dp__os_now_ns(), slept = now - last;
        if (slept < DP__SHM_LOOK_NS / 2)
            continue;
        waited += slept < DP__SHM_LATE_NS ? slept : DP__SHM_LATE_NS;
        last = now;
        status = dp__shm_look(comm, need, waited);
    }
    atomic_fetch_sub(&comm->control->sleepers, 1);
    atomic_store(&dp__shm_own(comm)->waits_for, -1);
    return status;
}

static dp_status dp__shm_wait(dp__shm_comm *comm, int process, int word, unsigned value)
{
    const dp__shm_need need = {process, word, value};
    if (dp__shm_reached(comm, &need) || (comm->spin && dp__shm_spin(comm, &need)))
        return DP_OK;
    return dp__shm_sleep(comm, &need);
}

/* For all other processes. */
static dp_status dp__shm_wait_all(dp__shm_comm *comm, int word, unsigned value)
{
    for (int i = 1; i < comm->process_count; i++)
        DP_TRY(dp__shm_wait(comm, (comm->process + i) % comm->process_count, word, value));
    return DP_OK;
}

/* ==== >>meeting ================================================================================
   How a collective begins: each process writes its small data, then its note. When all notes are
   written they are compared. After that every process knows that all do the same.              */

static dp__shm_note *dp__shm_note_of(const dp__shm_comm *comm, int process)
{
    if (comm->kept > 0)
        return (void *)(dp__shm_buffer(comm, process) +
                        comm->seq % comm->kept * sizeof(dp__shm_note));
    return &comm->control->members[process].notes[comm->seq % 2];
}

/* How many ranks have written the same as this process. */
static int dp__shm_votes(const dp__shm_comm *comm, int process)
{
    int votes = 0;
    for (int p = 0; p < comm->process_count; p++)
        if (dp__shm_same(dp__shm_note_of(comm, p), dp__shm_note_of(comm, process)))
            votes += dp__shm_ranks(comm, p);
    return votes;
}

/* The first process that does not do what most do is to blame. */
static dp_status dp__shm_differs(const dp__shm_comm *comm)
{
    char who[2][DP__SHM_WORDS_BYTES], what[2][DP__WORDS_BYTES];
    int most = 0, odd = 0;
    for (int p = 1; p < comm->process_count; p++)
        if (dp__shm_votes(comm, p) > dp__shm_votes(comm, most))
            most = p;
    while (dp__shm_same(dp__shm_note_of(comm, odd), dp__shm_note_of(comm, most)))
        odd++;
    dp__shm_fail(
        comm, DP_ERR_REMOTE, comm->firsts[odd],
        "collective %u: %s has issued %s, and %s %s: all must make the same calls in the "
        "same order",
        dp__shm_number(dp__shm_note_of(comm, comm->process)), dp__shm_who(comm, odd, who[0]),
        dp__shm_note_text(dp__shm_note_of(comm, odd), what[0]), dp__shm_who(comm, most, who[1]),
        dp__shm_note_text(dp__shm_note_of(comm, most), what[1]));
    return dp__shm_failed(comm);
}

/* What the journal says of the collective that begins. */
static void dp__shm_label(dp__shm_comm *comm, dp__shm_note *note)
{
    const dp__ring *ring = dp__ring_of(comm->face);
    if (ring == NULL || comm->labels[comm->seq % 2] == ring->labels)
        return;
    note->label = ring->now.label;
    comm->labels[comm->seq % 2] = ring->labels;
}

/* What this process begins is written down, for all to read. */
static const dp__shm_note *dp__shm_note_down(dp__shm_comm *comm, dp__signature is)
{
    dp__shm_note *note = &dp__shm_own(comm)->notes[comm->seq % 2];
    note->is = is;
    dp__shm_label(comm, note);
    dp__shm_tell(comm, &note->seq, comm->seq);
    return note;
}

/* Until all have begun this collective; DP_OK: it is the same one. */
static dp_status dp__shm_meet(const dp__shm_call *call)
{
    dp__shm_comm *comm = call->comm;
    int word = comm->seq % 2 == 0 ? DP__SHM_NOTE_0 : DP__SHM_NOTE_1;
    const dp__signature is = dp__sign(dp__ring_of(comm->face), &call->asked);
    const dp__shm_note *note = dp__shm_note_down(comm, is);
    bool same = true;
    DP_TRY(dp__shm_wait_all(comm, word, comm->seq));
    for (int p = 0; p < comm->process_count; p++)
        same = same && dp__shm_same(note, dp__shm_note_of(comm, p));
    return same ? DP_OK : dp__shm_differs(comm);
}

/* A process has a row of blocks for the others. */
static size_t dp__shm_block_bytes(const dp__shm_call *call)
{
    size_t blocks = call->asked.verb == DP_REDUCE_SCATTER ? (size_t)call->comm->rank_count : 1;
    return call->asked.count * call->size * blocks;
}

static size_t dp__shm_blocks(const dp__shm_call *call, int process)
{
    const dp__shm_comm *comm = call->comm;
    size_t ranks = (size_t)dp__shm_ranks(comm, process);
    if (call->asked.verb == DP_BROADCAST)
        return call->asked.root >= comm->firsts[process] &&
               call->asked.root < comm->firsts[process + 1];
    if (call->asked.verb == DP_ALL_TO_ALL)
        return ranks * ((size_t)comm->rank_count - ranks);
    return ranks;
}

/* Bytes in the row of the process that has the most. */
static size_t dp__shm_most_bytes(const dp__shm_call *call)
{
    size_t most = 0;
    for (int p = 0; p < call->comm->process_count; p++) {
        size_t blocks = dp__shm_blocks(call, p);
        most = blocks > most ? blocks : most;
    }
    return most * dp__shm_block_bytes(call);
}

/* In an all_to_all: from which local rank of `process` block `block` is, and for which rank. */
static void dp__shm_address(const dp__shm_call *call, int process, size_t block, size_t *out_from,
                            size_t *out_to)
{
    const dp__shm_comm *comm = call->comm;
    size_t ranks = (size_t)dp__shm_ranks(comm, process);
    size_t others = (size_t)comm->rank_count - ranks, first = (size_t)comm->firsts[process];
    *out_from = block / others;
    *out_to = block % others + (block % others >= first ? ranks : 0);
}

static const char *dp__shm_source(const dp__shm_call *call, size_t block)
{
    size_t from = block, to = 0;
    if (call->asked.verb == DP_BROADCAST)
        from = (size_t)(call->asked.root - call->comm->rank_first);
    if (call->asked.verb == DP_ALL_TO_ALL)
        dp__shm_address(call, call->comm->process, block, &from, &to);
    return (const char *)call->asked.local[from].send + to * dp__shm_block_bytes(call);
}

/* Bytes first .. first + bytes - 1 of this process' row. */
static void dp__shm_pack(const dp__shm_call *call, size_t first, size_t bytes, char *out)
{
    size_t each = dp__shm_block_bytes(call);
    for (size_t done = 0, run; done < bytes; done += run) {
        size_t block = (first + done) / each, at = (first + done) % each;
        run = each - at < bytes - done ? each - at : bytes - done;
        memcpy(out + done, dp__shm_source(call, block) + at, run);
    }
}

static bool dp__shm_is_small(const dp__shm_call *call)
{
    return dp__shm_most_bytes(call) <= DP__SHM_SMALL_BYTES;
}

static dp_status dp__shm_begin(const dp__shm_call *call)
{
    dp__shm_comm *comm = call->comm;
    if (atomic_load(&comm->control->failed) != 0)
        return dp__shm_failed(comm);
    comm->seq++;
    size_t own = dp__shm_blocks(call, comm->process) * dp__shm_block_bytes(call);
    if (dp__shm_is_small(call))
        dp__shm_pack(call, 0, own, dp__shm_small(comm, comm->process));
    return dp__shm_meet(call);
}

/* Bytes of a piece, a multiple of every element. */
static size_t dp__shm_piece(size_t bytes)
{
    size_t piece = bytes / DP__SHM_PIECES / 4096 * 4096;
    if (piece < DP__SHM_PIECE_BYTES)
        return DP__SHM_PIECE_BYTES;
    return piece < DP__SHM_SLOT_BYTES ? piece : DP__SHM_SLOT_BYTES;
}

/* A process that had fewer pieces than others catches up: words that stay behind for long would
   look as if they were ahead, once the count has wrapped around. */
static void dp__shm_end(const dp__shm_call *call, size_t steps)
{
    dp__shm_comm *comm = call->comm;
    dp__shm_member *member = dp__shm_own(comm);
    comm->steps += (unsigned)steps;
    atomic_store_explicit(&member->done, comm->seq, memory_order_relaxed);
    if (steps > 0) {
        atomic_store_explicit(&member->made, comm->steps, memory_order_release);
        atomic_store_explicit(&member->taken, comm->steps, memory_order_release);
    }
}

/* ==== >>folding ================================================================================
   Reductions add all ranks in one binary tree, however the ranks are spread over processes. Every
   process reads small data from all buffers. Large data goes through the processes in rank order, a
   piece at a time. Each process adds the parts of the tree that its ranks complete: sums of 1, 2,
   4, ... ranks that begin at a multiple of their number, as the binary digits of its last rank say.
   It makes alone those that lie in its own ranks; the first may have its left parts in the slots of
   earlier processes. A process takes the sums it needs and leaves the sums it has made. The last
   process makes the whole, which the others copy from its buffer. If all have the same number of
   ranks, a power of two, each leaves one sum. Every sum is read once, and all processes work at the
   same time on different pieces. Each reads and writes a piece as often as if it had a slice of its
   own to add up.

   Halves are f32 between the processes, so that they are rounded once.                         */

static unsigned dp__shm_top(unsigned bits) /* the place of the highest one */
{
    unsigned top = 0;
    while (bits >> top > 1)
        top++;
    return top;
}

/* When all ranks below some number are added, as far as the tree allows, there is a sum for each
   binary one of this number, the largest first. A process leaves those alone that stand for digits
   above the highest one in which the numbers before and behind it differ. The last one makes the
   whole of all.

   3, 4 and 2 ranks: the first process leaves 0+1 and 2, as 3 is binary 11. The second one takes
   both and leaves 0..3, 4+5 and 6, as 7 is 111. The third takes these and makes
   ((0..3) + ((4+5) + (6+7))) + 8. */
static unsigned dp__shm_touched(const dp__shm_comm *comm, int process)
{
    unsigned before = (unsigned)comm->firsts[process], behind = (unsigned)comm->firsts[process + 1];
    return process + 1 == comm->process_count ? ~0u : (2u << dp__shm_top(before ^ behind)) - 1;
}

/* How many sums a process leaves. */
static int dp__shm_sum_count(const dp__shm_comm *comm, int process)
{
    unsigned behind = (unsigned)comm->firsts[process + 1];
    return process + 1 == comm->process_count
               ? 1
               : (int)dp__bits(behind & dp__shm_touched(comm, process));
}

/* Of what is before a process it takes the sum that stands for digit `level`. */
static void dp__shm_plan_take(dp__shm_comm *comm, unsigned level)
{
    dp__shm_tree *tree = &comm->tree;
    int process = 0, end = (int)((unsigned)comm->rank_first >> level << level);
    while (comm->firsts[process + 1] < end)
        process++;
    unsigned left = (unsigned)comm->firsts[process + 1] & dp__shm_touched(comm, process);
    tree->processes[tree->taken_count] = process;
    tree->places[tree->taken_count++] = (int)dp__bits(left >> level) - 1;
}

/* The first sum that a process leaves, of the ranks up to `end` and what it takes. Each run adds as
   many ranks as the subtree has on their left, and what came of it to those on the left. */
static void dp__shm_plan_first(dp__shm_comm *comm, int end)
{
    dp__shm_tree *tree = &comm->tree;
    unsigned left = (unsigned)comm->rank_first & dp__shm_touched(comm, comm->process);
    dp__shm_run run = {.first = comm->rank_first, .end = end, .taken = tree->taken_count};
    for (; run.first < end; run.first = run.end, run.onto = true) {
        int size = run.first & -run.first;
        bool alone = left == 0 && !run.onto;
        run.end = !alone && size < end - run.first ? run.first + size : end;
        run.taken_end = run.taken;
        for (; left != 0 && (run.end == end || (left & -left) < (unsigned)(run.end & -run.end));
             left &= left - 1)
            run.taken--;
        tree->runs[tree->run_count++] = run;
    }
}

static void dp__shm_plan(dp__shm_comm *comm)
{
    dp__shm_tree *tree = &comm->tree;
    int last = comm->process_count - 1;
    unsigned touched = dp__shm_touched(comm, comm->process), top = dp__shm_top(touched);
    unsigned before = (unsigned)comm->rank_first & touched;
    unsigned behind = (unsigned)comm->firsts[comm->process + 1], left = behind & touched;
    *tree = (dp__shm_tree){.next = comm->process + 1, .parts = 1};
    for (int p = 0; p < last; p++)
        tree->parts = tree->parts > dp__shm_sum_count(comm, p) ? tree->parts
                                                               : dp__shm_sum_count(comm, p);
    tree->part_bytes = DP__SHM_SLOT_BYTES / (size_t)tree->parts / 64 * 64;
    while (tree->next < last && (unsigned)comm->firsts[tree->next + 1] >> top == behind >> top)
        tree->next++;
    for (unsigned level = DP__SHM_SUMS; level-- > 0;)
        if (before >> level & 1)
            dp__shm_plan_take(comm, level);
    if (comm->process == last) {
        dp__shm_plan_first(comm, comm->rank_count);
        return;
    }
    for (int part = 0, first = 0; left != 0; part++, first = (int)behind & ~(int)left) {
        left &= ~(1u << dp__shm_top(left));
        if (part == 0)
            dp__shm_plan_first(comm, (int)(behind & ~left));
        else
            tree->runs[tree->run_count++] =
                (dp__shm_run){.part = part, .first = first, .end = (int)(behind & ~left)};
    }
}

static dp_kernel_args dp__shm_reduction(const dp__shm_call *call, size_t count, bool last)
{
    const dp__shm_comm *comm = call->comm;
    return (dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                            .op = call->asked.op == DP_OP_MEAN ? DP_OP_SUM : call->asked.op,
                            .dtype = call->asked.dtype,
                            .in_dtype = call->asked.dtype,
                            .count = count,
                            .out = comm->out,
                            .in = comm->in,
                            .alpha = last ? call->asked.scale : 1,
                            .beta = last && call->asked.op == DP_OP_MEAN ? comm->rank_count : 1};
}

static void dp__shm_kernel(const dp__shm_comm *comm, const dp_kernel_args *args)
{
    dp__cpu_run(comm->base.host, comm->simd, args);
}

/* The places of the local ranks that want a result, `at` bytes further on; how many there are. */
static size_t dp__shm_wanted(const dp__shm_call *call, size_t at)
{
    size_t count = 0;
    for (int i = 0; i < call->comm->local_count; i++)
        if (call->asked.local[i].recv != NULL)
            call->comm->out[count++] = (char *)call->asked.local[i].recv + at;
    return count;
}

/* Reduce from the small data, at an offset of `at` bytes in what every rank has sent. */
static void dp__shm_reduce_inputs(const dp__shm_call *call, size_t at, size_t out_count)
{
    dp__shm_comm *comm = call->comm;
    dp_kernel_args args = dp__shm_reduction(call, call->asked.count, true);
    size_t each = dp__shm_block_bytes(call);
    for (int p = 0; p < comm->process_count; p++)
        for (int r = comm->firsts[p]; r < comm->firsts[p + 1]; r++)
            comm->in[r] = dp__shm_small(comm, p) + (size_t)(r - comm->firsts[p]) * each + at;
    args.in_count = (size_t)comm->rank_count;
    args.out_count = out_count;
    if (out_count > 0)
        dp__shm_kernel(comm, &args);
}

static void dp__shm_reduce_small(const dp__shm_call *call)
{
    dp__shm_comm *comm = call->comm;
    if (call->asked.verb == DP_ALL_REDUCE) {
        dp__shm_reduce_inputs(call, 0, dp__shm_wanted(call, 0));
        return;
    }
    for (int i = 0; i < comm->local_count; i++) {
        comm->out[0] = call->asked.local[i].recv;
        dp__shm_reduce_inputs(call, (size_t)(comm->rank_first + i) * call->asked.count * call->size,
                              comm->out[0] != NULL);
    }
}

typedef struct dp__shm_fold { /* a large reduction */
    const dp__shm_call *call;
    size_t count, piece; /* elements: of all, of a piece */
    size_t steps;
    bool wide; /* halves */
    bool last; /* of the processes */
} dp__shm_fold;

static size_t dp__shm_fold_count(const dp__shm_fold *fold, size_t step)
{
    size_t left = fold->count - step * fold->piece;
    return left < fold->piece ? left : fold->piece;
}

static float *dp__shm_wide(const dp__shm_comm *comm, int local_rank)
{
    return comm->wide + (size_t)local_rank * (DP__SHM_SLOT_BYTES / sizeof(float));
}

/* What the local ranks send, as f32. */
static void dp__shm_widen(const dp__shm_fold *fold, size_t at, size_t count)
{
    const dp__shm_comm *comm = fold->call->comm;
    for (int i = 0; i < comm->local_count; i++) {
        const void *in = (const char *)fold->call->asked.local[i].send + at;
        void *out = dp__shm_wide(comm, i);
        dp_kernel_args args = {.kernel = DP_KERNEL_CAST,
                               .dtype = DP_F32,
                               .in_dtype = fold->call->asked.dtype,
                               .count = count,
                               .out = &out,
                               .in = &in,
                               .out_count = 1,
                               .in_count = 1};
        dp__shm_kernel(comm, &args);
    }
}

static void dp__shm_narrow(const dp__shm_fold *fold, size_t count, void *out)
{
    const void *in = fold->call->comm->wide;
    dp_kernel_args args = {.kernel = DP_KERNEL_CAST,
                           .dtype = fold->call->asked.dtype,
                           .in_dtype = DP_F32,
                           .count = count,
                           .out = &out,
                           .in = &in,
                           .out_count = 1,
                           .in_count = 1};
    dp__shm_kernel(fold->call->comm, &args);
}

static char *dp__shm_part(const dp__shm_comm *comm, int process, int part, size_t step)
{
    size_t each = comm->tree.part_bytes;
    return dp__shm_slot(comm, process, step) + (size_t)part * each;
}

/* What this process makes of a part of its slot; the last one adds halves up aside. */
static void *dp__shm_made(const dp__shm_fold *fold, size_t step, int part)
{
    dp__shm_comm *comm = fold->call->comm;
    return fold->wide && fold->last ? (void *)comm->wide
                                    : dp__shm_part(comm, comm->process, part, step);
}

static void dp__shm_fold_run(const dp__shm_fold *fold, size_t step, const dp__shm_run *run)
{
    const dp__shm_call *call = fold->call;
    dp__shm_comm *comm = call->comm;
    const dp__shm_tree *tree = &comm->tree;
    size_t count = dp__shm_fold_count(fold, step), at = step * fold->piece * call->size;
    bool whole = fold->last && run->end == comm->rank_count;
    dp_kernel_args args = dp__shm_reduction(call, count, whole);
    void *made = dp__shm_made(fold, step, run->part);
    for (int i = run->taken; i < run->taken_end; i++)
        comm->in[args.in_count++] = dp__shm_part(comm, tree->processes[i], tree->places[i], step);
    if (run->onto)
        comm->in[args.in_count++] = made;
    args.heads = args.in_count;
    for (int i = run->first - comm->rank_first; i < run->end - comm->rank_first; i++)
        comm->in[args.in_count++] = fold->wide ? (void *)dp__shm_wide(comm, i)
                                               : (const char *)call->asked.local[i].send + at;
    if (whole && !fold->wide && call->asked.verb == DP_ALL_REDUCE)
        args.out_count = dp__shm_wanted(call, at);
    comm->out[args.out_count++] = made;
    if (fold->wide)
        args.dtype = args.in_dtype = DP_F32;
    dp__shm_kernel(comm, &args);
}

static void dp__shm_fold_piece(const dp__shm_fold *fold, size_t step)
{
    const dp__shm_call *call = fold->call;
    dp__shm_comm *comm = call->comm;
    size_t count = dp__shm_fold_count(fold, step);
    if (fold->wide)
        dp__shm_widen(fold, step * fold->piece * call->size, count);
    for (int i = 0; i < comm->tree.run_count; i++)
        dp__shm_fold_run(fold, step, &comm->tree.runs[i]);
    if (fold->wide && fold->last)
        dp__shm_narrow(fold, count, dp__shm_slot(comm, comm->process, step));
}

/* Copy what the local ranks want of a piece of the result. */
static void dp__shm_fold_out(const dp__shm_fold *fold, size_t step)
{
    const dp__shm_call *call = fold->call;
    const dp__shm_comm *comm = call->comm;
    const char *slot = dp__shm_slot(comm, comm->process_count - 1, step);
    size_t first = step * fold->piece * call->size;
    size_t end = first + dp__shm_fold_count(fold, step) * call->size;
    for (int i = 0; i < comm->local_count; i++) {
        bool whole = call->asked.verb == DP_ALL_REDUCE;
        size_t block = whole ? end : call->asked.count * call->size;
        size_t base = whole ? 0 : (size_t)(comm->rank_first + i) * block;
        size_t from = base > first ? base : first, to = base + block < end ? base + block : end;
        if (from < to && call->asked.local[i].recv != NULL)
            memcpy((char *)call->asked.local[i].recv + (from - base), slot + (from - first),
                   to - from);
    }
}

/* This process' work on a piece, as soon as it can be done. */
static dp_status dp__shm_fold_make(const dp__shm_fold *fold, size_t step)
{
    dp__shm_comm *comm = fold->call->comm;
    unsigned now = comm->steps + (unsigned)step + 1, freed = now - DP__SHM_SLOTS;
    for (int i = 0; i < comm->tree.taken_count; i++)
        DP_TRY(dp__shm_wait(comm, comm->tree.processes[i], DP__SHM_MADE, now));
    if (step >= DP__SHM_SLOTS && fold->last)
        DP_TRY(dp__shm_wait_all(comm, DP__SHM_TAKEN, freed));
    else if (step >= DP__SHM_SLOTS)
        DP_TRY(dp__shm_wait(comm, comm->tree.next, DP__SHM_MADE, freed));
    dp__shm_fold_piece(fold, step);
    dp__shm_tell(comm, &dp__shm_own(comm)->made, now);
    if (fold->last && (fold->wide || fold->call->asked.verb != DP_ALL_REDUCE))
        dp__shm_fold_out(fold, step);
    return DP_OK;
}

static dp_status dp__shm_fold_take(const dp__shm_fold *fold, size_t step)
{
    dp__shm_comm *comm = fold->call->comm;
    unsigned now = comm->steps + (unsigned)step + 1;
    if (fold->last)
        return DP_OK;
    DP_TRY(dp__shm_wait(comm, comm->process_count - 1, DP__SHM_MADE, now));
    dp__shm_fold_out(fold, step);
    dp__shm_tell(comm, &dp__shm_own(comm)->taken, now);
    return DP_OK;
}

static dp_status dp__shm_reduce_large(const dp__shm_call *call, size_t *out_steps)
{
    const dp__shm_comm *comm = call->comm;
    dp__shm_fold fold = {.call = call,
                         .count = dp__shm_block_bytes(call) / call->size,
                         .wide = call->asked.dtype == DP_F16 || call->asked.dtype == DP_BF16,
                         .last = comm->process == comm->process_count - 1};
    size_t size = fold.wide ? sizeof(float) : call->size;
    size_t part = comm->tree.part_bytes;
    size_t piece = dp__shm_piece(fold.count * size);
    fold.piece = (piece < part ? piece : part) / size;
    fold.steps = (fold.count + fold.piece - 1) / fold.piece;
    for (size_t i = 0; i < fold.steps + DP__SHM_LAG; i++) {
        if (i < fold.steps)
            DP_TRY(dp__shm_fold_make(&fold, i));
        if (i >= DP__SHM_LAG)
            DP_TRY(dp__shm_fold_take(&fold, i - DP__SHM_LAG));
    }
    *out_steps = fold.steps;
    return DP_OK;
}

static dp_status dp__shm_reduce(const dp__shm_call *call)
{
    size_t steps = 0;
    DP_TRY(dp__shm_begin(call));
    if (dp__shm_is_small(call))
        dp__shm_reduce_small(call);
    else
        DP_TRY(dp__shm_reduce_large(call, &steps));
    dp__shm_end(call, steps);
    return DP_OK;
}

/* ==== >>moving =================================================================================
   The other collectives move bytes. Every process writes the row of blocks that others want, once,
   and each takes from the rows of the others what is for its ranks. Data that stays in a process
   goes from buffer to buffer. */

/* Bytes of block `block` of a process' row, from `at` on, to the local ranks that want them. */
static void dp__shm_deliver(const dp__shm_call *call, int process, size_t block, size_t at,
                            const char *data, size_t bytes)
{
    const dp__shm_comm *comm = call->comm;
    size_t each = dp__shm_block_bytes(call), from = block, to = 0;
    if (call->asked.verb == DP_ALL_TO_ALL)
        dp__shm_address(call, process, block, &from, &to);
    if (call->asked.verb != DP_BROADCAST)
        at += ((size_t)comm->firsts[process] + from) * each;
    for (int i = 0; i < comm->local_count; i++) {
        bool its = call->asked.verb != DP_ALL_TO_ALL || to == (size_t)(comm->rank_first + i);
        if (its && call->asked.local[i].recv != NULL)
            memcpy((char *)call->asked.local[i].recv + at, data, bytes);
    }
}

static void dp__shm_unpack(const dp__shm_call *call, int process, size_t first, size_t bytes,
                           const char *data)
{
    size_t each = dp__shm_block_bytes(call);
    for (size_t done = 0, run; done < bytes; done += run) {
        size_t block = (first + done) / each, at = (first + done) % each;
        run = each - at < bytes - done ? each - at : bytes - done;
        dp__shm_deliver(call, process, block, at, data + done, run);
    }
}

/* From the local ranks to the local ranks. */
static void dp__shm_move_here(const dp__shm_call *call)
{
    const dp__shm_comm *comm = call->comm;
    size_t each = dp__shm_block_bytes(call);
    for (int i = 0; i < comm->local_count; i++)
        for (int k = 0; k < comm->local_count; k++) {
            const char *from = call->asked.local[i].send;
            char *to = call->asked.local[k].recv;
            if (to == NULL ||
                (call->asked.verb == DP_BROADCAST && call->asked.root != comm->rank_first + i))
                continue;
            if (call->asked.verb == DP_ALL_TO_ALL)
                from += (size_t)(comm->rank_first + k) * each;
            if (call->asked.verb != DP_BROADCAST)
                to += (size_t)(comm->rank_first + i) * each;
            if (from != to)
                memcpy(to, from, each);
        }
}

typedef struct dp__shm_rows {
    const dp__shm_call *call;
    size_t piece;
} dp__shm_rows;

/* Bytes of a process' piece, 0 after the end of its row. */
static size_t dp__shm_row_bytes(const dp__shm_rows *rows, int process, size_t step)
{
    size_t all = dp__shm_blocks(rows->call, process) * dp__shm_block_bytes(rows->call);
    size_t first = step * rows->piece;
    if (first >= all)
        return 0;
    return all - first < rows->piece ? all - first : rows->piece;
}

static dp_status dp__shm_give(const dp__shm_rows *rows, size_t step)
{
    dp__shm_comm *comm = rows->call->comm;
    unsigned now = comm->steps + (unsigned)step + 1;
    size_t bytes = dp__shm_row_bytes(rows, comm->process, step);
    if (bytes == 0)
        return DP_OK;
    if (step >= DP__SHM_SLOTS)
        DP_TRY(dp__shm_wait_all(comm, DP__SHM_TAKEN, now - DP__SHM_SLOTS));
    dp__shm_pack(rows->call, step * rows->piece, bytes, dp__shm_slot(comm, comm->process, step));
    dp__shm_tell(comm, &dp__shm_own(comm)->made, now);
    return DP_OK;
}

/* From all others, each beginning with its successor: so not all read from the same one. */
static dp_status dp__shm_take(const dp__shm_rows *rows, size_t step)
{
    dp__shm_comm *comm = rows->call->comm;
    unsigned now = comm->steps + (unsigned)step + 1;
    for (int i = 1; i < comm->process_count; i++) {
        int from = (comm->process + i) % comm->process_count;
        size_t bytes = dp__shm_row_bytes(rows, from, step);
        if (bytes == 0)
            continue;
        DP_TRY(dp__shm_wait(comm, from, DP__SHM_MADE, now));
        dp__shm_unpack(rows->call, from, step * rows->piece, bytes, dp__shm_slot(comm, from, step));
    }
    dp__shm_tell(comm, &dp__shm_own(comm)->taken, now);
    return DP_OK;
}

static dp_status dp__shm_move_large(const dp__shm_call *call, size_t *out_steps)
{
    size_t most = dp__shm_most_bytes(call);
    dp__shm_rows rows = {call, dp__shm_piece(most)};
    size_t steps = (most + rows.piece - 1) / rows.piece;
    for (size_t i = 0; i < steps + DP__SHM_LAG; i++) {
        if (i < steps)
            DP_TRY(dp__shm_give(&rows, i));
        if (i >= DP__SHM_LAG)
            DP_TRY(dp__shm_take(&rows, i - DP__SHM_LAG));
    }
    *out_steps = steps;
    return DP_OK;
}

static void dp__shm_move_small(const dp__shm_call *call)
{
    const dp__shm_comm *comm = call->comm;
    for (int p = 0; p < comm->process_count; p++)
        if (p != comm->process)
            dp__shm_unpack(call, p, 0, dp__shm_blocks(call, p) * dp__shm_block_bytes(call),
                           dp__shm_small(comm, p));
}

static dp_status dp__shm_move(const dp__shm_call *call)
{
    size_t steps = 0;
    DP_TRY(dp__shm_begin(call));
    dp__shm_move_here(call);
    if (dp__shm_is_small(call))
        dp__shm_move_small(call);
    else
        DP_TRY(dp__shm_move_large(call, &steps));
    dp__shm_end(call, steps);
    return DP_OK;
}

static dp_status dp__shm_coll_run(dp_comm *comm, const dp_coll_call *asked)
{
    const dp__shm_call call = {dp__shm_of(comm), *asked, dp_dtype_bytes(asked->dtype)};
    return dp__rules[asked->verb].reduces ? dp__shm_reduce(&call) : dp__shm_move(&call);
}

/* ==== >>joining ================================================================================
   From a config to a communicator. Every step is agreed upon by all processes, including those that
   failed in it, so that all fail together. */

typedef struct dp__shm_card { /* what a process tells the others */
    uint64_t cores[DP__SHARED_CPU_WORDS];
    dp__shared_name name;
    int32_t status, local_count;
    char text[200];
} dp__shm_card;

typedef struct dp__shm_join {
    const dp_bootstrap *boot;
    dp__shm_comm *comm;
    dp__shm_card own, *all;
} dp__shm_join;

static bool dp__shm_fits(const dp_comm_config *config)
{
    return config->bootstrap != NULL && config->host_memory && config->one_machine;
}

static dp_status dp__shm_agree(dp__shm_join *join, dp_status own)
{
    const dp_bootstrap *boot = join->boot;
    join->own.status = (int32_t)own;
    snprintf(join->own.text, sizeof join->own.text, "%.199s", own != DP_OK ? dp__open_error() : "");
    dp_status status = dp__boot_gather(boot, &join->own, join->all, sizeof join->own);
    if (own != DP_OK)
        return dp_error(own, "%s", join->own.text);
    DP_TRY(status);
    for (int p = 0; p < boot->process_count; p++)
        if (join->all[p].status != DP_OK)
            return dp_error(DP_ERR_REMOTE, "process %d: %.199s", p, join->all[p].text);
    return DP_OK;
}

static void dp__shm_free(dp__shm_comm *comm)
{
    const dp_host *host = comm->base.host;
    dp__os_shared_close(&comm->shared);
    host->free(host, comm->firsts);
    host->free(host, comm->in);
    host->free(host, comm->out);
    host->free(host, comm->wide);
    host->free(host, comm);
}

static dp_status dp__shm_new(const dp_host *host, const dp_comm_config *config, dp__shm_comm **out)
{
    size_t ranks = (size_t)config->rank_count, local = (size_t)config->local_count;
    size_t processes = (size_t)config->bootstrap->process_count;
    const dp__simd *simd = NULL;
    DP_TRY(dp__simd_choose(&simd));
    dp__shm_comm *comm = host->alloc(host, sizeof *comm, _Alignof(dp__shm_comm));
    if (comm == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: no memory for a communicator");
    *comm =
        (dp__shm_comm){.base = {dp_shm_coll(), host},
                       .simd = simd,
                       .shared = {.fd = -1},
                       .process = config->bootstrap->process,
                       .process_count = config->bootstrap->process_count,
                       .rank_first = config->rank_first,
                       .local_count = config->local_count,
                       .rank_count = config->rank_count,
                       .timeout_ms = config->timeout_ms,
                       .firsts = host->alloc(host, (processes + 1) * sizeof(int), _Alignof(int)),
                       .in = host->alloc(host, (ranks + 1) * sizeof(void *), _Alignof(void *)),
                       .out = host->alloc(host, (local + 1) * sizeof(void *), _Alignof(void *)),
                       .wide = host->alloc(host, local * DP__SHM_SLOT_BYTES, 64)};
    if (comm->firsts == NULL || comm->in == NULL || comm->out == NULL || comm->wide == NULL) {
        dp__shm_free(comm);
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: no memory for a communicator");
    }
    comm->face = &comm->base;
    *out = comm;
    return DP_OK;
}

static int dp__shm_count_bits(const uint64_t *words)
{
    int count = 0;
    for (int i = 0; i < DP__SHARED_CPU_WORDS; i++)
        for (uint64_t left = words[i]; left != 0; left &= left - 1)
            count++;
    return count;
}

/* Learn from what all have told which ranks each has, and whether there is a core for every thread.
   If a quota leaves this process fewer cores than its mask has, all processes share that quota. */
static void dp__shm_learn(const dp__shm_join *join)
{
    dp__shm_comm *comm = join->comm;
    uint64_t cores[DP__SHARED_CPU_WORDS] = {0};
    int first = 0, quota = dp__os_core_count(), threads = 0;
    for (int p = 0; p < comm->process_count; p++) {
        comm->firsts[p] = first;
        first += join->all[p].local_count;
        threads += join->all[p].local_count;
        for (int i = 0; i < DP__SHARED_CPU_WORDS; i++)
            cores[i] |= join->all[p].cores[i];
    }
    comm->firsts[comm->process_count] = first;
    dp__shm_plan(comm);
    bool own = comm->base.host->thread_count(comm->base.host) >= comm->local_count;
    bool limited = quota < dp__shm_count_bits(join->own.cores) && threads > quota;
    comm->spin = own && !limited && threads <= dp__shm_count_bits(cores);
}

static void dp__shm_sit(dp__shm_comm *comm)
{
    comm->control = comm->shared.data;
    dp__shm_member *member = dp__shm_own(comm);
    atomic_store(&member->waits_for, -1);
    atomic_store(&member->process_id, dp__os_process_id());
    atomic_store(&member->state, DP__SHM_INSIDE);
}

/* Each process reserves the pages of its own buffer, so that they are near it. */
static dp_status dp__shm_enter(dp__shm_join *join, bool named, bool made)
{
    dp__shm_comm *comm = join->comm;
    size_t control = dp__shm_control_bytes(comm->process_count), buffer = dp__shm_buffer_bytes();
    size_t all = dp__shm_bytes(comm->process_count);
    if (made && comm->process == 0) {
        DP_TRY(dp__os_shared_make(named, all, &comm->shared, &join->own.name));
        return dp__os_shared_reserve(&comm->shared, 0, control);
    }
    if (made)
        return DP_OK;
    if (comm->process != 0)
        DP_TRY(dp__os_shared_find(&join->all[0].name, all, &comm->shared));
    DP_TRY(dp__os_shared_hold(&comm->shared, comm->process));
    DP_TRY(dp__os_shared_reserve(&comm->shared, control + (size_t)comm->process * buffer, buffer));
    dp__shm_sit(comm);
    return DP_OK;
}

/* One way to get shared memory: the first process makes it, the others open it. */
static dp_status dp__shm_try(dp__shm_join *join, bool named)
{
    join->own.name = (dp__shared_name){.fd = -1};
    dp_status status = dp__shm_agree(join, dp__shm_enter(join, named, true));
    if (status == DP_OK)
        status = dp__shm_agree(join, dp__shm_enter(join, named, false));
    if (join->own.name.path[0] != '\0')
        dp__os_shared_unlink(join->own.name.path);
    if (status != DP_OK)
        dp__os_shared_close(&join->comm->shared);
    return status;
}

static dp_status dp__shm_join_all(dp__shm_join *join, const dp_host *host,
                                  const dp_comm_config *config)
{
    join->own.local_count = config->local_count;
    dp__os_cores(join->own.cores);
    DP_TRY(dp__shm_agree(join, dp__shm_new(host, config, &join->comm)));
    dp__shm_learn(join);
    dp_status status = dp__shm_try(join, false);
    if (status == DP_OK)
        return DP_OK;
    host->log(host, DP_LOG_INFO, dp_last_error());
    return dp__shm_try(join, true);
}

/* With room for the cards of all: without that this process could not tell the others that it has
   no memory. */
static dp_status dp__shm_open_with(dp__shm_card *room, const dp_host *host,
                                   const dp_comm_config *config, dp_comm **out)
{
    dp__shm_join join = {.boot = config->bootstrap, .all = room};
    dp_status status = dp__shm_join_all(&join, host, config);
    if (status == DP_OK)
        *out = &join.comm->base;
    else if (join.comm != NULL)
        dp__shm_free(join.comm);
    return status;
}

static dp_status dp__shm_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    size_t bytes = (size_t)config->bootstrap->process_count * sizeof(dp__shm_card);
    dp__shm_card *room = dp__os_alloc(bytes, _Alignof(dp__shm_card), NULL);
    if (room == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: no memory to ask the others");
    dp_status status = dp__shm_open_with(room, host, config, out);
    dp__os_free(room, bytes, NULL);
    return status;
}

/* It takes part in nothing more. */
static void dp__shm_leave(dp_comm *comm)
{
    dp__shm_comm *own = dp__shm_of(comm);
    atomic_store(&dp__shm_own(own)->state, DP__SHM_LEFT);
    dp__shm_wake_all(own);
}

/* Others may still read what this process has made: the memory is theirs too. */
static void dp__shm_close(dp_comm *comm)
{
    dp__shm_leave(comm);
    dp__shm_free(dp__shm_of(comm));
}

static void dp__shm_abort(dp_comm *comm)
{
    dp__shm_pass_on(dp__shm_of(comm));
}

static dp_status dp__shm_poll(dp_comm *comm)
{
    const dp__shm_comm *own = dp__shm_of(comm);
    return atomic_load(&own->control->failed) != 0 ? dp__shm_failed(own) : DP_OK;
}

static void dp__shm_say(dp_comm *comm, const char *text)
{
    dp__shm_member *member = dp__shm_own(dp__shm_of(comm));
    dp__label_put(member->said, sizeof member->said, text);
    atomic_store(&member->said_after, atomic_load(&dp__shm_last_note(member)->seq));
}

DP_API const dp_coll_ops *dp_shm_coll(void)
{
    static const dp_coll_ops ops = {.size = sizeof(dp_coll_ops),
                                    .name = "shared memory",
                                    .fits = dp__shm_fits,
                                    .open = dp__shm_open,
                                    .close = dp__shm_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__shm_coll_run,
                                    .abort = dp__shm_abort,
                                    .poll = dp__shm_poll,
                                    .say = dp__shm_say};
    return &ops;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
