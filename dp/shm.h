/* dp/shm.h - v0.2.0 - collectives between processes of one machine - MIT licence

   Part of dp.h, which includes it. It holds the table dp_shm_coll(), for jobs in which all ranks
   are CPU devices of processes of one machine. Its calls to the system are in dp/os.h.

   CONTENTS (search for the tag)
     >>buffers  the memory that the processes share
     >>waiting  for another process
     >>meeting  whether all issue the same collective
     >>folding  reductions
     >>moving   broadcast, all_gather, all_to_all
     >>direct   the same of what lies in the heap of the processes
     >>joining  from a config to a communicator, and the table
*/

#ifndef DP__ROOMS
#error "dp/shm.h is a part of dp.h: include dp.h"
#else

/* ==== >>buffers ================================================================================
   Every process has words in the shared memory, which only it writes, and a buffer, through which
   its bytes go to others. Words that are written at different times lie on lines of their own.

   No process goes on in a collective before all have come to it and have begun the same. What a
   process comes with has two places, used in turn, and needs no other step: what it has begun, and
   small data, the smallest beside it, so that all of it travels to another core at once. A process
   may come to the next collective while another still reads what it wrote for this one. It cannot
   come to the one after that, for which it needs the slow process. Large data goes in pieces
   through the slots of the buffer, which are all free when a collective begins. `came`, `made` and
   `taken` count over all collectives and never decrease.

   The limit: an all-reduce of N bytes over R ranks reads and writes every rank's buffer once, which
   takes at least 2 N R bytes divided by the bandwidth of memory. The traffic through the shared
   buffers comes on top of that. But a slot is read soon after it was written, so it stays in shared
   caches.                                                                                      */

/* Sizes were tried on 2 cores. With 4 slots and a lag of 2, a MiB takes twice as long: a
   process that is disturbed for a moment stops all others. */
enum {
    DP__SHM_LEAST_BYTES = 8,
    DP__SHM_TINY_BYTES = 64,
    DP__SHM_SMALL_BYTES = 64 << 10,
    DP__SHM_SLOT_BYTES = 64 << 10, /* a piece at most: with its operands it fits into an L2 cache */
    DP__SHM_PIECE_BYTES = 32 << 10, /* and at least: a step has to be worth a look at other lines */
    DP__SHM_PIECES = 8,             /* into which large data is cut, so that all have work early */
    DP__SHM_SLOTS = 8,
    DP__SHM_LAG = 3 /* pieces that a process makes before it takes the result of the first */
};

/* DP__SHM_CAME is in a process' turns. */
typedef enum dp__shm_word { DP__SHM_MADE, DP__SHM_TAKEN, DP__SHM_WORDS, DP__SHM_CAME } dp__shm_word;

typedef struct dp__shm_turn {
    _Alignas(128) atomic_uint came;            /* neighbours of a line are fetched with it */
    atomic_uint seq;                           /* what it has begun: the number, modulo 2^32, */
    _Atomic uint64_t head[DP__HEAD_WORDS - 1]; /* and the others of its entry's first words */
    char least[DP__SHM_LEAST_BYTES];
    _Alignas(64) char tiny[DP__SHM_TINY_BYTES];
} dp__shm_turn;
_Static_assert(sizeof(dp__shm_turn) == 128, "it is two lines of a cache");

typedef struct dp__shm_member {
    dp__shm_turn turns[2];
    struct {
        _Alignas(128) atomic_uint at;
    } words[DP__SHM_WORDS];
} dp__shm_member;

typedef struct dp__shm_control {
    _Alignas(128) atomic_uint sleepers; /* too many, once a process has died in its sleep */
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

typedef struct dp__shm_location { /* where a rank's memory lies in the heap of its process */
    size_t send, recv;
} dp__shm_location;

#define DP__SHM_UNWANTED (SIZE_MAX - 1) /* and SIZE_MAX: elsewhere */

typedef struct dp__shm_comm {
    dp_comm base;
    dp__journal *journal;
    const dp__simd *simd;
    dp__shared shared;
    dp__shm_control *control;
    const dp__heap *heap; /* NULL: all large data goes through buffers */
    int process, process_count;
    int rank_first, local_count, rank_count;
    const int *firsts; /* of the job */
    unsigned seq;      /* collectives so far */
    unsigned steps;    /* pieces of all of them, for the process that had the most */
    unsigned missed;   /* spins in a row that ran out */
    bool spin, spare;  /* there are cores for all who compute; for couriers beside them */
    dp__shm_tree tree;
    unsigned *seqs;  /* of each process */
    const void **in; /* rank_count + 1 */
    void **out;      /* as many */
    float *wide;     /* a slot for each local rank: halves under way, in f32 */
} dp__shm_comm;
_Static_assert(offsetof(dp__shm_comm, base) == 0, "a dp_comm is the head of its communicator");

typedef struct dp__shm_call { /* one collective */
    dp__shm_comm *comm;
    const dp_coll_call *asked;
    size_t size; /* bytes of an element */
    size_t most; /* bytes in the row of the process that has the most */
} dp__shm_call;

static size_t dp__shm_control_bytes(int process_count)
{
    return dp__align_up(sizeof(dp__shm_control) + (size_t)process_count * sizeof(dp__shm_member),
                        DP__SHARED_PAGE);
}

static size_t dp__shm_buffer_bytes(void)
{
    return dp__align_up(2 * DP__SHM_SMALL_BYTES + DP__SHM_SLOTS * DP__SHM_SLOT_BYTES,
                        DP__SHARED_PAGE);
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

static dp__shm_turn *dp__shm_turn_of(const dp__shm_comm *comm, int process)
{
    return &comm->control->members[process].turns[comm->seq % 2];
}

/* For small data, of the collective that is under way. */
static char *dp__shm_small(const dp__shm_call *call, int process)
{
    const dp__shm_comm *comm = call->comm;
    if (call->most <= DP__SHM_LEAST_BYTES)
        return dp__shm_turn_of(comm, process)->least;
    if (call->most <= DP__SHM_TINY_BYTES)
        return dp__shm_turn_of(comm, process)->tiny;
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

static atomic_uint *dp__shm_word_of(const dp__shm_comm *comm, int process, int word)
{
    return word == DP__SHM_CAME ? &dp__shm_turn_of(comm, process)->came
                                : &comm->control->members[process].words[word].at;
}

/* A word counts up. The sleepers are read after it was written. */
static void dp__shm_tell(const dp__shm_comm *comm, int which, unsigned value)
{
    atomic_uint *word = dp__shm_word_of(comm, comm->process, which);
    atomic_store(word, value);
    if (atomic_load(&comm->control->sleepers) != 0)
        dp__os_word_wake(word);
}

/* ==== >>waiting ================================================================================
   For another process: see >>watching in dp/job.h.                                              */

typedef struct dp__shm_need {
    const dp__shm_comm *comm;
    int process;
    int word; /* dp__shm_word, at least `value` */
    unsigned value;
} dp__shm_need;

static bool dp__shm_reached(void *what)
{
    const dp__shm_need *need = what;
    const atomic_uint *word = dp__shm_word_of(need->comm, need->process, need->word);
    return (int)(atomic_load_explicit(word, memory_order_acquire) - need->value) >= 0;
}

static dp_status dp__shm_rest(void *what, dp__wait *wait)
{
    return dp__journal_rest(((const dp__shm_need *)what)->comm->journal, wait);
}

static dp_status dp__shm_wait(dp__shm_comm *comm, int process, int word, unsigned value)
{
    dp__shm_need need = {comm, process, word, value};
    bool meets = word == DP__SHM_CAME;
    if (dp__shm_reached(&need))
        return DP_OK;
    const dp__watch watch = {.there = dp__shm_reached,
                             .rest = dp__shm_rest,
                             .what = &need,
                             .word = dp__shm_word_of(comm, process, word),
                             .sleepers = &comm->control->sleepers,
                             .waited_ns = meets ? &comm->journal->arrivals.waited_ns : NULL,
                             .missed = &comm->missed,
                             .look_ns = comm->journal->job->look_ns};
    if (meets)
        dp__journal_trace(comm->journal, process, 'B');
    dp_status status = dp__watch_until(&watch, dp__of_thread.beside ? comm->spare : comm->spin);
    if (meets)
        dp__journal_trace(comm->journal, process, 'E');
    return status;
}

/* For all other processes. */
static dp_status dp__shm_wait_all(dp__shm_comm *comm, int word, unsigned value)
{
    for (int i = 1; i < comm->process_count; i++)
        DP_TRY(dp__shm_wait(comm, (comm->process + i) % comm->process_count, word, value));
    return DP_OK;
}

/* ==== >>meeting ================================================================================
   How a collective begins: each process writes its small data, and then it comes. When all are here
   they compare what each has begun. After that every process knows that all do the same.        */

/* Writes what this process has begun. */
static void dp__shm_turn_write(dp__shm_turn *turn, const dp__entry *entry)
{
    atomic_store_explicit(&turn->seq, (unsigned)entry->seq, memory_order_relaxed);
    dp__words_store(turn->head, &entry->is, DP__HEAD_WORDS - 1);
}

/* Reads what another one has begun, whose number is near that of `own`. */
static void dp__shm_turn_read(const dp__shm_turn *turn, const dp__entry *own, dp__entry *out)
{
    unsigned seq = atomic_load_explicit(&turn->seq, memory_order_relaxed);
    out->seq = own->seq + (uint64_t)(int64_t)(int)(seq - (unsigned)own->seq);
    dp__words_load(&out->is, turn->head, DP__HEAD_WORDS - 1);
}

/* Waits until all have come to this collective; DP_OK: it is the same one. */
static dp_status dp__shm_meet(const dp__shm_call *call)
{
    dp__shm_comm *comm = call->comm;
    const dp__entry *own = &comm->journal->now;
    bool same = true;
    dp__shm_turn_write(dp__shm_turn_of(comm, comm->process), own);
    dp__shm_tell(comm, DP__SHM_CAME, comm->seq);
    DP_TRY(dp__shm_wait_all(comm, DP__SHM_CAME, comm->seq));
    for (int p = 0; p < comm->process_count; p++) /* it comes while heads are compared */
        __builtin_prefetch(dp__shm_small(call, p));
    for (int p = 0; p < comm->process_count; p++) {
        dp__entry begun;
        dp__shm_turn_read(dp__shm_turn_of(comm, p), own, &begun);
        comm->seqs[p] = (unsigned)begun.seq;
        same = same && dp__entries_same(&begun, own);
        dp__late_hear(&comm->journal->arrivals, p, begun.late);
    }
    dp__journal_met(comm->journal);
    return same ? DP_OK : dp__journal_differs(comm->journal, (unsigned)own->seq, comm->seqs);
}

/* A process has a row of blocks for the others. */
static size_t dp__shm_block_bytes(const dp__shm_call *call)
{
    size_t blocks = call->asked->verb == DP_REDUCE_SCATTER ? (size_t)call->comm->rank_count : 1;
    return call->asked->count * call->size * blocks;
}

static size_t dp__shm_blocks(const dp__shm_call *call, int process)
{
    const dp__shm_comm *comm = call->comm;
    size_t ranks = (size_t)dp__rank_count_of(comm->journal->job, process);
    if (call->asked->verb == DP_BROADCAST)
        return call->asked->root >= comm->firsts[process] &&
               call->asked->root < comm->firsts[process + 1];
    if (call->asked->verb == DP_ALL_TO_ALL)
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

/* From which local rank of `process` block `block` of its row is; and, in an all_to_all, for which
   rank. */
static void dp__shm_address(const dp__shm_call *call, int process, size_t block, size_t *out_from,
                            size_t *out_to)
{
    const dp__shm_comm *comm = call->comm;
    size_t ranks = (size_t)dp__rank_count_of(comm->journal->job, process);
    size_t first = (size_t)comm->firsts[process];
    size_t others = (size_t)comm->rank_count - ranks;
    *out_from = call->asked->verb == DP_BROADCAST ? (size_t)call->asked->root - first : block;
    *out_to = 0;
    if (call->asked->verb != DP_ALL_TO_ALL)
        return;
    *out_from = block / others;
    *out_to = block % others + (block % others >= first ? ranks : 0);
}

static const char *dp__shm_source(const dp__shm_call *call, size_t block)
{
    size_t from, to;
    dp__shm_address(call, call->comm->process, block, &from, &to);
    return (const char *)call->asked->local[from].send + to * dp__shm_block_bytes(call);
}

/* Bytes first .. first + bytes - 1 of this process' row. */
static void dp__shm_pack(const dp__shm_call *call, size_t first, size_t bytes, char *out)
{
    size_t each = dp__shm_block_bytes(call);
    for (size_t done = 0, part; done < bytes; done += part) {
        size_t block = (first + done) / each, at = (first + done) % each;
        part = each - at < bytes - done ? each - at : bytes - done;
        memcpy(out + done, dp__shm_source(call, block) + at, part);
    }
}

static bool dp__shm_is_small(const dp__shm_call *call)
{
    return call->most <= DP__SHM_SMALL_BYTES;
}

static dp__shm_location *dp__shm_places(const dp__shm_call *call, int process)
{
    return (void *)dp__shm_small(call, process);
}

static void dp__shm_places_put(const dp__shm_call *call)
{
    const dp__shm_comm *comm = call->comm;
    const dp__rule *rule = &dp__rules[call->asked->verb];
    size_t each = call->asked->count * call->size, all = each * (size_t)comm->rank_count;
    for (int i = 0; i < comm->local_count; i++) {
        const dp_part *part = &call->asked->local[i];
        size_t send = dp__heap_place(comm->heap, part->send, rule->send_all ? all : each);
        size_t recv = dp__heap_place(comm->heap, part->recv, rule->recv_all ? all : each);
        dp__shm_places(call, comm->process)[i] =
            (dp__shm_location){send, part->recv != NULL ? recv : DP__SHM_UNWANTED};
    }
}

static dp_status dp__shm_begin(const dp__shm_call *call)
{
    dp__shm_comm *comm = call->comm;
    comm->seq++;
    size_t own = dp__shm_blocks(call, comm->process) * dp__shm_block_bytes(call);
    if (dp__shm_is_small(call))
        dp__shm_pack(call, 0, own, dp__shm_small(call, comm->process));
    else if (comm->heap != NULL)
        dp__shm_places_put(call);
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
    comm->steps += (unsigned)steps;
    for (int word = DP__SHM_MADE; word <= DP__SHM_TAKEN && steps > 0; word++)
        atomic_store_explicit(dp__shm_word_of(comm, comm->process, word), comm->steps,
                              memory_order_release);
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

/* Takes, of what is before a process, the sum that stands for digit `level`. */
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

/* So many elements of all ranks: comm->in to comm->out. */
static void dp__shm_add(const dp__shm_call *call, size_t count, size_t out_count)
{
    const dp__shm_comm *comm = call->comm;
    dp_kernel_args args =
        dp__reduction(call->asked, call->asked->dtype, count, comm->rank_count, true);
    args.out = comm->out;
    args.in = comm->in;
    args.in_count = (size_t)comm->rank_count;
    args.out_count = out_count;
    if (count > 0 && out_count > 0)
        dp__cpu_run(comm->base.host, comm->simd, &args);
}

/* Reduce from the small data, at an offset of `at` bytes in what every rank has sent. */
static void dp__shm_reduce_inputs(const dp__shm_call *call, size_t at, size_t out_count)
{
    const dp__shm_comm *comm = call->comm;
    size_t each = dp__shm_block_bytes(call);
    for (int p = 0; p < comm->process_count; p++)
        for (int r = comm->firsts[p]; r < comm->firsts[p + 1]; r++)
            comm->in[r] = dp__shm_small(call, p) + (size_t)(r - comm->firsts[p]) * each + at;
    dp__shm_add(call, call->asked->count, out_count);
}

static void dp__shm_reduce_small(const dp__shm_call *call)
{
    dp__shm_comm *comm = call->comm;
    if (call->asked->verb == DP_ALL_REDUCE) {
        dp__shm_reduce_inputs(call, 0, dp__wanted(call->asked, comm->local_count, 0, comm->out));
        return;
    }
    for (int i = 0; i < comm->local_count; i++) {
        comm->out[0] = call->asked->local[i].recv;
        dp__shm_reduce_inputs(call,
                              (size_t)(comm->rank_first + i) * call->asked->count * call->size,
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

/* Converts what the local ranks send to f32. */
static void dp__shm_widen(const dp__shm_fold *fold, size_t at, size_t count)
{
    const dp__shm_comm *comm = fold->call->comm;
    for (int i = 0; i < comm->local_count; i++)
        dp__cpu_run_cast(comm->base.host, comm->simd, dp__shm_wide(comm, i), DP_F32,
                         (const char *)fold->call->asked->local[i].send + at,
                         fold->call->asked->dtype, count);
}

static char *dp__shm_part(const dp__shm_comm *comm, int process, int part, size_t step)
{
    size_t each = comm->tree.part_bytes;
    return dp__shm_slot(comm, process, step) + (size_t)part * each;
}

/* Returns where this process puts the sum of a part of its slot; the last one adds halves up aside.
   */
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
    dp_dtype dtype = fold->wide ? DP_F32 : call->asked->dtype;
    dp_kernel_args args = dp__reduction(call->asked, dtype, count, comm->rank_count, whole);
    args.out = comm->out;
    args.in = comm->in;
    void *made = dp__shm_made(fold, step, run->part);
    for (int i = run->taken; i < run->taken_end; i++)
        comm->in[args.in_count++] = dp__shm_part(comm, tree->processes[i], tree->places[i], step);
    if (run->onto)
        comm->in[args.in_count++] = made;
    args.heads = args.in_count;
    for (int i = run->first - comm->rank_first; i < run->end - comm->rank_first; i++)
        comm->in[args.in_count++] = fold->wide ? (void *)dp__shm_wide(comm, i)
                                               : (const char *)call->asked->local[i].send + at;
    if (whole && !fold->wide && call->asked->verb == DP_ALL_REDUCE)
        args.out_count = dp__wanted(call->asked, comm->local_count, at, comm->out);
    comm->out[args.out_count++] = made;
    dp__cpu_run(comm->base.host, comm->simd, &args);
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
        dp__cpu_run_cast(comm->base.host, comm->simd, dp__shm_slot(comm, comm->process, step),
                         call->asked->dtype, comm->wide, DP_F32, count);
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
        bool whole = call->asked->verb == DP_ALL_REDUCE;
        size_t block = whole ? end : call->asked->count * call->size;
        size_t base = whole ? 0 : (size_t)(comm->rank_first + i) * block;
        size_t from = base > first ? base : first, to = base + block < end ? base + block : end;
        if (from < to && call->asked->local[i].recv != NULL)
            memcpy((char *)call->asked->local[i].recv + (from - base), slot + (from - first),
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
    dp__shm_tell(comm, DP__SHM_MADE, now);
    if (fold->last && (fold->wide || fold->call->asked->verb != DP_ALL_REDUCE))
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
    dp__shm_tell(comm, DP__SHM_TAKEN, now);
    return DP_OK;
}

static dp_status dp__shm_reduce_large(const dp__shm_call *call, size_t *out_steps)
{
    const dp__shm_comm *comm = call->comm;
    dp__shm_fold fold = {.call = call,
                         .count = dp__shm_block_bytes(call) / call->size,
                         .wide = dp__is_half(call->asked->dtype),
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

/* ==== >>moving =================================================================================
   The other collectives move bytes. Every process writes the row of blocks that others want, once,
   and each takes from the rows of the others what is for its ranks. Data that stays in a process
   goes from buffer to buffer. */

/* Bytes of block `block` of a process' row, from `at` on, to the local ranks that want them. */
static void dp__shm_deliver(const dp__shm_call *call, int process, size_t block, size_t at,
                            const char *data, size_t bytes)
{
    const dp__shm_comm *comm = call->comm;
    size_t each = dp__shm_block_bytes(call), from, to;
    dp__shm_address(call, process, block, &from, &to);
    if (call->asked->verb != DP_BROADCAST)
        at += ((size_t)comm->firsts[process] + from) * each;
    for (int i = 0; i < comm->local_count; i++) {
        bool its = call->asked->verb != DP_ALL_TO_ALL || to == (size_t)(comm->rank_first + i);
        if (its && call->asked->local[i].recv != NULL)
            memcpy((char *)call->asked->local[i].recv + at, data, bytes);
    }
}

static void dp__shm_unpack(const dp__shm_call *call, int process, size_t first, size_t bytes,
                           const char *data)
{
    size_t each = dp__shm_block_bytes(call);
    for (size_t done = 0, part; done < bytes; done += part) {
        size_t block = (first + done) / each, at = (first + done) % each;
        part = each - at < bytes - done ? each - at : bytes - done;
        dp__shm_deliver(call, process, block, at, data + done, part);
    }
}

/* From the local ranks to the local ranks. */
static void dp__shm_move_here(const dp__shm_call *call)
{
    const dp__shm_comm *comm = call->comm;
    size_t each = dp__shm_block_bytes(call);
    for (int i = 0; i < comm->local_count; i++)
        for (int k = 0; k < comm->local_count; k++) {
            const char *from = call->asked->local[i].send;
            char *to = call->asked->local[k].recv;
            if (to == NULL ||
                (call->asked->verb == DP_BROADCAST && call->asked->root != comm->rank_first + i))
                continue;
            if (call->asked->verb == DP_ALL_TO_ALL)
                from += (size_t)(comm->rank_first + k) * each;
            if (call->asked->verb != DP_BROADCAST)
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
    dp__shm_tell(comm, DP__SHM_MADE, now);
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
    dp__shm_tell(comm, DP__SHM_TAKEN, now);
    return DP_OK;
}

static dp_status dp__shm_move_large(const dp__shm_call *call, size_t *out_steps)
{
    dp__shm_rows rows = {call, dp__shm_piece(call->most)};
    size_t steps = (call->most + rows.piece - 1) / rows.piece;
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
                           dp__shm_small(call, p));
}

/* ==== >>direct =================================================================================
   Large data that lies in the heap of the processes is used where it is: no buffer is written. In
   place of small data each process has written where its own lies, so all know the same of all, and
   all do this or none does. Each adds up a slice of what all ranks send, in one pass as between the
   devices of one process, and writes the sum to all who want it, or it takes what is for its ranks.
   Nobody leaves before all have done so. But a process may be stopped until the others have given
   it up, and use their memory for something else: so it asks in the end whether the job has failed.
   Then it has read what may be wrong, and nothing that it writes reaches the others once they have
   recovered (dp__os_shared_trim).

   The limit: bytes of all ranks, read once and written once.                                    */

/* Only a sum that all get is written by others. */
static bool dp__shm_is_direct(const dp__shm_call *call)
{
    const dp__shm_comm *comm = call->comm;
    bool rooted = dp__rules[call->asked->verb].send_at_root;
    bool direct = comm->heap != NULL;
    for (int p = 0; p < comm->process_count && direct; p++)
        for (int r = comm->firsts[p]; r < comm->firsts[p + 1]; r++) {
            const dp__shm_location *place = &dp__shm_places(call, p)[r - comm->firsts[p]];
            bool sends = !rooted || r == call->asked->root;
            direct = direct && !(sends && place->send == SIZE_MAX) &&
                     !(call->asked->verb == DP_ALL_REDUCE && place->recv == SIZE_MAX);
        }
    return direct;
}

/* Lists what all ranks send, from `at` bytes on, as operands. */
static void dp__shm_senders(const dp__shm_call *call, size_t at)
{
    const dp__shm_comm *comm = call->comm;
    for (int p = 0; p < comm->process_count; p++)
        for (int r = comm->firsts[p]; r < comm->firsts[p + 1]; r++)
            comm->in[r] = dp__heap_part(comm->heap, p) +
                          dp__shm_places(call, p)[r - comm->firsts[p]].send + at;
}

/* Lists where those ranks that want a sum get it; returns how many there are. */
static size_t dp__shm_receivers(const dp__shm_call *call, size_t at)
{
    const dp__shm_comm *comm = call->comm;
    size_t count = 0;
    for (int p = 0; p < comm->process_count; p++)
        for (int i = 0; i < dp__rank_count_of(comm->journal->job, p); i++) {
            size_t place = dp__shm_places(call, p)[i].recv;
            if (place != DP__SHM_UNWANTED)
                comm->out[count++] = dp__heap_part(comm->heap, p) + place + at;
        }
    return count;
}

/* Slices begin where lines of a cache do, if the memory does. */
static void dp__shm_reduce_direct(const dp__shm_call *call)
{
    const dp__shm_comm *comm = call->comm;
    size_t all = call->asked->count, processes = (size_t)comm->process_count;
    size_t each = (all / processes + 64) / 64 * 64, first = each * (size_t)comm->process;
    if (call->asked->verb == DP_ALL_REDUCE) {
        first = first < all ? first : all;
        dp__shm_senders(call, first * call->size);
        dp__shm_add(call, all - first < each ? all - first : each,
                    dp__shm_receivers(call, first * call->size));
        return;
    }
    for (int i = 0; i < comm->local_count; i++) {
        dp__shm_senders(call, (size_t)(comm->rank_first + i) * all * call->size);
        comm->out[0] = call->asked->local[i].recv;
        dp__shm_add(call, all, comm->out[0] != NULL);
    }
}

static void dp__shm_move_direct(const dp__shm_call *call)
{
    const dp__shm_comm *comm = call->comm;
    size_t each = dp__shm_block_bytes(call);
    for (int i = 1; i < comm->process_count; i++) {
        int p = (comm->process + i) % comm->process_count;
        for (size_t block = 0; block < dp__shm_blocks(call, p); block++) {
            size_t from, to;
            dp__shm_address(call, p, block, &from, &to);
            const char *sent = dp__heap_part(comm->heap, p) + dp__shm_places(call, p)[from].send +
                               to * each;
            dp__shm_deliver(call, p, block, 0, sent, each);
        }
    }
}

static dp_status dp__shm_run_direct(const dp__shm_call *call)
{
    dp__shm_comm *comm = call->comm;
    if (dp__rules[call->asked->verb].reduces)
        dp__shm_reduce_direct(call);
    else
        dp__shm_move_direct(call);
    dp__shm_tell(comm, DP__SHM_MADE, comm->steps + 1);
    DP_TRY(dp__shm_wait_all(comm, DP__SHM_MADE, comm->steps + 1));
    atomic_thread_fence(memory_order_acquire); /* what was read is older than what is asked now */
    return dp__job_heard(comm->journal->job);
}

static dp_status dp__shm_coll_run(dp_comm *comm, const dp_coll_call *asked)
{
    dp__shm_call call = {dp__shm_of(comm), asked, dp_dtype_bytes(asked->dtype), 0};
    call.most = dp__shm_most_bytes(&call);
    bool reduces = dp__rules[asked->verb].reduces;
    size_t steps = 0;
    DP_TRY(dp__shm_begin(&call));
    if (!reduces)
        dp__shm_move_here(&call);
    if (dp__shm_is_small(&call)) {
        if (reduces)
            dp__shm_reduce_small(&call);
        else
            dp__shm_move_small(&call);
    } else if (dp__shm_is_direct(&call)) {
        DP_TRY(dp__shm_run_direct(&call));
        steps = 1;
    } else {
        DP_TRY(reduces ? dp__shm_reduce_large(&call, &steps) : dp__shm_move_large(&call, &steps));
    }
    dp__shm_end(&call, steps);
    return DP_OK;
}

/* ==== >>joining ================================================================================
   From a config to a communicator.                                                              */

static bool dp__shm_fits(const dp_comm_config *config)
{
    return config->bootstrap != NULL && config->host_memory && config->one_machine;
}

static void dp__shm_free(dp__shm_comm *comm)
{
    const dp_host *host = comm->base.host;
    dp__os_shared_close(&comm->shared);
    host->free(host, comm->seqs);
    host->free(host, comm->in);
    host->free(host, comm->out);
    host->free(host, comm->wide);
    host->free(host, comm);
}

static dp_status dp__shm_new(const dp_host *host, const dp_comm_config *config, dp__shm_comm **out)
{
    size_t ranks = (size_t)config->rank_count, local = (size_t)config->local_count;
    dp__journal *journal = dp__journal_opening(dp__job_of(host));
    const dp__simd *simd = NULL;
    DP_TRY(dp__simd_choose(&simd));
    if (journal->job->shared.data == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s", journal->job->why);
    dp__shm_comm *comm = host->alloc(host, sizeof *comm, _Alignof(dp__shm_comm));
    if (comm == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: no memory for a communicator");
    *comm = (dp__shm_comm){
        .base = {dp_shm_coll(), host},
        .journal = journal,
        .simd = simd,
        .shared = {.fd = -1},
        .process = journal->job->process,
        .process_count = journal->job->process_count,
        .rank_first = config->rank_first,
        .local_count = config->local_count,
        .rank_count = config->rank_count,
        .firsts = journal->job->firsts,
        .seqs = host->alloc(host, (size_t)journal->job->process_count * sizeof(unsigned),
                            _Alignof(unsigned)),
        .in = host->alloc(host, (ranks + 1) * sizeof(void *), _Alignof(void *)),
        .out = host->alloc(host, (ranks + 1) * sizeof(void *), _Alignof(void *)),
        .wide = host->alloc(host, local * DP__SHM_SLOT_BYTES, 64)};
    *out = comm;
    if (comm->seqs == NULL || comm->in == NULL || comm->out == NULL || comm->wide == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: no memory for a communicator");
    journal->compared = true;
    return DP_OK;
}

static void dp__shm_learn(dp__shm_comm *comm)
{
    const dp_host *host = comm->base.host;
    int threads = comm->rank_count;
    dp__shm_plan(comm);
    comm->spin = host->thread_count(host) >= comm->local_count &&
                 dp__job_has_cores(comm->journal->job, threads);
    comm->spare = comm->spin &&
                  dp__job_has_cores(comm->journal->job, threads + comm->process_count);
}

/* If there is one, and room for the places of all ranks. */
static const dp__heap *dp__shm_heap(const dp__job *job)
{
    const dp__heap *heap = &job->ctx->world.heap;
    size_t room = DP__SHM_SMALL_BYTES / sizeof(dp__shm_location);
    for (int p = 0; p < job->process_count; p++)
        if ((size_t)dp__rank_count_of(job, p) > room)
            return NULL;
    return heap->shared != NULL ? heap : NULL;
}

static dp_status dp__shm_join(dp__shm_comm *comm)
{
    dp__job *job = comm->journal->job;
    size_t control = dp__shm_control_bytes(job->process_count), buffer = dp__shm_buffer_bytes();
    const dp__area area = {.bytes = dp__shm_bytes(job->process_count),
                           .head = control,
                           .first = control + (size_t)job->process * buffer,
                           .each = buffer};
    DP_TRY(dp__area_open(job, &area, &comm->shared));
    comm->control = comm->shared.data;
    comm->heap = dp__shm_heap(job);
    dp__shm_learn(comm);
    return DP_OK;
}

static dp_status dp__shm_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp__shm_comm *comm = NULL;
    dp__job *job = dp__job_of(host);
    if (job == NULL)
        return dp_error(DP_ERR_UNSUPPORTED, "shared memory: there are no other processes");
    dp_status status = dp__job_agree(job, dp__shm_new(host, config, &comm));
    if (status == DP_OK && comm != NULL)
        status = dp__shm_join(comm);
    if (status == DP_OK)
        *out = &comm->base;
    else if (comm != NULL)
        dp__shm_free(comm);
    return status;
}

/* Others may still read what this process has made: the memory is theirs too. */
static void dp__shm_close(dp_comm *comm)
{
    dp__shm_free(dp__shm_of(comm));
}

DP_API const dp_coll_ops *dp_shm_coll(void)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = "shared memory",
                                    .fits = dp__shm_fits,
                                    .open = dp__shm_open,
                                    .close = dp__shm_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__shm_coll_run};
    return &ops;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
