/* dp/mesh.h - v0.2.0 - collectives of processes that share no memory - MIT licence

   Part of dp.h, which includes it. How processes on several machines add up, and move data,
   whatever carries their bytes: see dp__carrier.

   CONTENTS (search for the tag)
     >>pieces     how a collective is cut, and how many pieces are under way at once
     >>adding     reductions
     >>groups     sums, where several processes are on one machine
     >>moving     broadcast, all_gather, all_to_all
     >>meshing    from a job to a communicator
*/

#ifndef DP__ROOMS
#error "dp/mesh.h is a part of dp.h: include dp.h"
#else

/* ==== >>pieces =================================================================================
   Every collective is cut into pieces that fit into buffers, whose size stays the same, so that no
   count is too large for what carries it, and nothing is allocated. A piece has up to three steps:
   `begin` sends it, `turn` takes what has arrived, and may send something again, `end` takes that.
   Two pieces are begun before the first is turned, so that one travels while another is worked on.
   All processes take the same steps in the same order: what they send each other has no heads, and
   is matched by its order.

   In a reduction each process gets its slice of every other's piece, adds them up in one pass,
   scales included, and gives the sums to all. That moves no more bytes than any other way. The
   order of adding is ours; NaN, bool, halves and whole numbers are treated as elsewhere. (MPI has
   reductions of its own: Open MPI 4.1's Iallreduce took twice as long as its Allreduce.) Small data
   is gathered whole, and added up by everybody; in groups (>>groups) only what is tiny. */

enum {
    DP__MESH_BUFFER_BYTES = 2 << 20,
    DP__MESH_SMALL_BYTES = 64 << 10,   /* of all processes together */
    DP__MESH_TINY_BYTES = 1 << 10,     /* of one */
    DP__MESH_SLOTS = DP__LOADS - 1,    /* pieces on the way */
    DP__MESH_MEETING = DP__MESH_SLOTS, /* the place of one more slot: what all begin with */
    DP__MESH_TURNS = 2,                /* places for what all begin with, in a group */
    DP__MESH_SLICE = 16,               /* elements: slices begin where vectors do */
    DP__MESH_INPUT_BYTES = 1 << 20,    /* of a piece, in memory that a group shares */
    DP__MESH_SLICE_BYTES = 16 << 10,   /* of a piece, for each process: see dp__mesh_piece_bytes */
    DP__MESH_PIECE_BYTES = 8 << 20     /* the most that a piece grows to for its slices */
};

typedef struct dp__mesh_slot {
    dp__load is;
    char *out, *in, *sums; /* buffers: what is sent, what arrives, what nobody here wants */
} dp__mesh_slot;

typedef struct dp__mesh_head { /* what a process begins */
    dp__entry entry;
    char data[]; /* as much as is tiny, for that many processes */
} dp__mesh_head;

typedef struct dp__mesh_group { /* of processes that share memory: see >>groups */
    dp__shared shared;
    int each;        /* processes of all groups but the last, which may have fewer; 1: none share */
    int own, count;  /* the group of this process; how many there are */
    size_t bytes;    /* of a piece in its memory */
    unsigned pieces; /* that have gone through its memory so far */
    unsigned meetings; /* so far */
} dp__mesh_group;

typedef struct dp__mesh_comm {
    dp_comm base;
    dp__journal *journal;
    dp__endpoint endpoint;
    int process, process_count;
    const dp__simd *simd;
    int rank_first, local_count, rank_count;
    int most;            /* local ranks of any process */
    size_t buffer_bytes; /* that a piece may take */
    size_t stride;       /* bytes of a buffer: slices are rounded up */
    dp__mesh_slot slots[DP__MESH_SLOTS + 1];
    char *heads;       /* of every process: in a group's memory, or own_heads */
    char *own_heads;   /* and behind them this process' own */
    size_t head_bytes; /* of each */
    dp__mesh_group group;
    char *wide;      /* one buffer more: halves on the way, in f32 */
    char *buffers;   /* all of them */
    int *numbers;    /* all of them */
    const void **in; /* of every process, and of local ranks */
    void **out;
} dp__mesh_comm;
_Static_assert(offsetof(dp__mesh_comm, base) == 0, "a dp_comm is the head of its communicator");

typedef struct dp__mesh_call { /* one collective */
    dp__mesh_comm *comm;
    dp_coll_call asked;
    size_t size;  /* bytes of an element */
    size_t piece; /* elements */
    bool wide;    /* halves travel as f32: some process adds its own up first */
    bool blocks;  /* a process makes the blocks of its ranks, not a slice */
} dp__mesh_call;

typedef dp_status (*dp__mesh_step)(const dp__mesh_call *call, size_t step);

typedef struct dp__mesh_steps {
    dp__mesh_step begin, turn, end; /* begin and end may be NULL */
} dp__mesh_steps;

static dp__mesh_comm *dp__mesh_of(dp_comm *comm)
{
    return (void *)comm;
}

static dp__mesh_slot *dp__mesh_slot_of(const dp__mesh_call *call, size_t step)
{
    return &call->comm->slots[step % DP__MESH_SLOTS];
}

/* Elements of a piece: the last one may have fewer. */
static size_t dp__mesh_count(const dp__mesh_call *call, size_t step)
{
    size_t left = call->asked.count - step * call->piece;
    return left < call->piece ? left : call->piece;
}

static size_t dp__mesh_at(const dp__mesh_call *call, size_t step) /* in bytes, where it begins */
{
    return step * call->piece * call->size;
}

/* Returns the size of an element that is not added yet. */
static size_t dp__mesh_wire_bytes(const dp__mesh_call *call)
{
    return call->wide ? sizeof(float) : call->size;
}

/* ---- memory that a group shares -------------------------------------------------------------- */

typedef struct dp__mesh_mark {
    _Alignas(128) atomic_uint said;   /* heads: see below */
    _Alignas(128) atomic_uint heard;  /* of the first process: those of all */
    _Alignas(128) atomic_uint put;    /* into its input: see >>groups */
    _Alignas(128) atomic_uint landed; /* in the result: what it sends or adds */
} dp__mesh_mark;

static int dp__mesh_group_of(const dp__mesh_comm *comm, int process)
{
    return process / comm->group.each;
}

/* The first process of a group; of the one behind the last, process_count. */
static int dp__mesh_group_first(const dp__mesh_comm *comm, int group)
{
    int first = group * comm->group.each;
    return first < comm->process_count ? first : comm->process_count;
}

static int dp__mesh_group_size(const dp__mesh_comm *comm, int group)
{
    return dp__mesh_group_first(comm, group + 1) - dp__mesh_group_first(comm, group);
}

static dp__mesh_mark *dp__mesh_mark_of(const dp__mesh_comm *comm, int process)
{
    const dp__mesh_group *group = &comm->group;
    return (dp__mesh_mark *)group->shared.data + (process - group->own * group->each);
}

/* The shared memory has marks, two times the heads of all processes, the result, and an input for
   each process of the group, in order. */
static size_t dp__mesh_heads_at(const dp__mesh_comm *comm, size_t turn)
{
    size_t marks = (size_t)comm->group.each * sizeof(dp__mesh_mark);
    return marks + turn * (size_t)comm->process_count * comm->head_bytes;
}

static size_t dp__mesh_input_at(const dp__mesh_comm *comm, int place)
{
    return dp__align_up(dp__mesh_heads_at(comm, DP__MESH_TURNS), DP__SHARED_PAGE) +
           (size_t)place * DP__MESH_SLOTS * comm->group.bytes;
}

/* Until that process of the group has got so far. It needs nothing that this one has still to
   send: it waits for pieces before those that are under way here. */
static dp_status dp__mesh_await_mark(dp__mesh_comm *comm, int process, const atomic_uint *word,
                                     unsigned value)
{
    dp__idle_wait wait = {.look = {.awaits = (unsigned)process + 1}};
    while ((int)(atomic_load_explicit(word, memory_order_acquire) - value) < 0)
        if (dp__idle(&wait))
            DP_TRY(dp__journal_rest(comm->journal, &wait.look));
    if (wait.begun != 0)
        dp__journal_rested(comm->journal, &wait.look);
    return DP_OK;
}

/* ---- what travels --------------------------------------------------------------------------- */

static dp_status dp__mesh_begin(dp__mesh_comm *comm, dp__mesh_slot *slot, bool same,
                                const char *out, char *in)
{
    dp__load *load = &slot->is;
    load->same = same;
    load->out = out;
    load->in = in;
    return comm->endpoint.carrier->begin(&comm->endpoint, load);
}

/* Waits until that has ended. What was begun later goes on meanwhile. */
static dp_status dp__mesh_await(dp__mesh_comm *comm, const dp__mesh_slot *slot)
{
    dp__endpoint *endpoint = &comm->endpoint;
    const dp__carrier *carrier = endpoint->carrier;
    dp__idle_wait wait = {0};
    bool asks = false;
    if (slot->is.left == 0)
        return carrier->progress(endpoint, 0);
    for (;;) {
        DP_TRY(dp__endpoint_look(endpoint, &wait, &asks));
        if (slot->is.left == 0)
            break;
        wait.look.awaits = carrier->lacks != NULL ? carrier->lacks(endpoint, &slot->is) : 0;
        if (asks)
            DP_TRY(dp__journal_rest(comm->journal, &wait.look));
    }
    dp__journal_rested(comm->journal, &wait.look);
    return DP_OK;
}

/* ---- what all begin ---------------------------------------------------------------------------
   The first message of a collective is the same whatever the collective is: each process tells all
   what it begins. Nobody goes on before that was compared, so what travels is alike. What is
   tiny goes with it, and needs no other message.

   In a group the first process sends the heads of all, and gets those of the others. Heads take
   turns in two places: who says the next one but one has heard the next one, and so all of the
   group are through with this one.                                                              */

static dp__mesh_head *dp__mesh_head_of(const dp__mesh_comm *comm, int process)
{
    return (void *)(comm->heads + (size_t)process * comm->head_bytes);
}

static bool dp__mesh_is_small(const dp__mesh_call *call)
{
    size_t processes = (size_t)call->comm->process_count;
    return call->asked.count <= DP__MESH_SMALL_BYTES / dp__mesh_wire_bytes(call) / processes;
}

static bool dp__mesh_is_tiny(const dp__mesh_call *call)
{
    size_t locals = (size_t)call->comm->most, processes = (size_t)call->comm->process_count;
    if (call->asked.verb == DP_ALL_GATHER)
        return call->asked.count <= DP__MESH_TINY_BYTES / call->size / locals &&
               call->asked.count <= DP__MESH_SMALL_BYTES / call->size / locals / processes;
    return (call->asked.verb == DP_ALL_REDUCE || call->asked.verb == DP_BROADCAST) &&
           dp__mesh_is_small(call) &&
           call->asked.count <= DP__MESH_TINY_BYTES / dp__mesh_wire_bytes(call);
}

static bool dp__mesh_is_grouped(const dp__mesh_comm *comm)
{
    return comm->group.each > 1;
}

static dp_status dp__mesh_tell_all(const dp__mesh_call *call, const void *data, size_t bytes)
{
    dp__mesh_comm *comm = call->comm;
    dp__mesh_group *group = &comm->group;
    bool grouped = dp__mesh_is_grouped(comm);
    if (grouped)
        comm->heads = (char *)group->shared.data +
                      dp__mesh_heads_at(comm, group->meetings % DP__MESH_TURNS);
    dp__mesh_head *own = dp__mesh_head_of(comm, grouped ? comm->process : comm->process_count);
    own->entry = comm->journal->now;
    if (bytes > 0)
        memcpy(own->data, data, bytes);
    if (!grouped)
        return dp__mesh_begin(comm, &comm->slots[DP__MESH_MEETING], true, (const char *)own,
                              comm->heads);
    atomic_store_explicit(&dp__mesh_mark_of(comm, comm->process)->said, ++group->meetings,
                          memory_order_release);
    return DP_OK;
}

/* From which process on a group hears heads: none of its own, so that what it sends and what it
   receives begin at different places, as MPI wants it. */
static int dp__mesh_first_heard(const dp__mesh_comm *comm)
{
    return comm->group.own == 0 ? dp__mesh_group_first(comm, 1) : 0;
}

/* The first process of a group waits for what all of it say, the others for what that one hears. */
static dp_status dp__mesh_hear_group(dp__mesh_comm *comm)
{
    const dp__mesh_group *group = &comm->group;
    int first = dp__mesh_group_first(comm, group->own);
    int end = dp__mesh_group_first(comm, group->own + 1);
    dp__mesh_slot *slot = &comm->slots[DP__MESH_MEETING];
    dp__mesh_mark *mark = dp__mesh_mark_of(comm, first);
    for (int p = first; p < end && comm->process == first; p++)
        DP_TRY(dp__mesh_await_mark(comm, p, &dp__mesh_mark_of(comm, p)->said, group->meetings));
    DP_TRY(dp__mesh_begin(comm, slot, false, comm->heads + (size_t)first * comm->head_bytes,
                          comm->heads + (size_t)dp__mesh_first_heard(comm) * comm->head_bytes));
    DP_TRY(dp__mesh_await(comm, slot));
    if (comm->process != first)
        return dp__mesh_await_mark(comm, first, &mark->heard, group->meetings);
    atomic_store_explicit(&mark->heard, group->meetings, memory_order_release);
    return DP_OK;
}

/* All see that they have not begun the same, and say so alike. */
static dp_status dp__mesh_differs(const dp__mesh_comm *comm)
{
    dp__entry *all = dp__os_alloc((size_t)comm->process_count * sizeof *all, 64, NULL);
    if (all == NULL)
        return dp_error(DP_ERR_REMOTE, "the processes have issued different calls");
    for (int p = 0; p < comm->process_count; p++)
        all[p] = dp__mesh_head_of(comm, p)->entry;
    dp_status status =
        dp__entries_differ(comm->journal->job, (unsigned)comm->journal->now.seq, all);
    dp__os_free(all, 0, NULL);
    return status;
}

/* Waits until all have begun the same. */
static dp_status dp__mesh_await_all(dp__mesh_comm *comm)
{
    uint64_t begun = dp__os_now_ns();
    dp__journal_trace(comm->journal, -1, 'B');
    dp_status status = dp__mesh_is_grouped(comm)
                           ? dp__mesh_hear_group(comm)
                           : dp__mesh_await(comm, &comm->slots[DP__MESH_MEETING]);
    dp__journal_trace(comm->journal, -1, 'E');
    comm->journal->arrivals.waited_ns += dp__os_now_ns() - begun;
    return status;
}

static dp_status dp__mesh_hear_all(const dp__mesh_call *call)
{
    dp__mesh_comm *comm = call->comm;
    DP_TRY(dp__mesh_await_all(comm));
    for (int p = 0; p < comm->process_count; p++) {
        const dp__entry *entry = &dp__mesh_head_of(comm, p)->entry;
        if (!dp__entries_same(entry, &comm->journal->now))
            return dp__mesh_differs(comm);
        dp__late_hear(&comm->journal->arrivals, p, entry->late);
    }
    dp__journal_met(comm->journal);
    return DP_OK;
}

/* ---- pieces on the way ----------------------------------------------------------------------- */

static dp_status dp__mesh_arrive(const dp__mesh_call *call, size_t step)
{
    dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    if (!dp__mesh_is_tiny(call))
        return dp__mesh_await(comm, slot);
    DP_TRY(dp__mesh_hear_all(call));
    for (int p = 0; p < comm->process_count; p++)
        memcpy(slot->in + slot->is.from.places[p], dp__mesh_head_of(comm, p)->data,
               (size_t)slot->is.from.counts[p]);
    return DP_OK;
}

static dp_status dp__mesh_give_each(const dp__mesh_call *call, const char *out, char *in,
                                    size_t step)
{
    dp__mesh_comm *comm = call->comm;
    return dp__mesh_begin(comm, dp__mesh_slot_of(call, step), false, out, in);
}

/* `out` NULL: it is in its place already. */
static dp_status dp__mesh_give_all(const dp__mesh_call *call, const char *out, char *in,
                                   size_t step)
{
    dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    int own = slot->is.from.counts[comm->process];
    if (dp__mesh_is_tiny(call))
        return dp__mesh_tell_all(call, out, (size_t)own);
    for (int p = 0; p < comm->process_count; p++) {
        slot->is.to.counts[p] = own;
        slot->is.to.places[p] = 0;
    }
    return dp__mesh_begin(comm, slot, true,
                          out != NULL ? out : in + slot->is.from.places[comm->process], in);
}

static dp_status dp__mesh_run_steps(const dp__mesh_call *call, const dp__mesh_steps *how)
{
    size_t steps = (call->asked.count + call->piece - 1) / call->piece;
    if (!dp__mesh_is_tiny(call)) {
        DP_TRY(dp__mesh_tell_all(call, NULL, 0));
        DP_TRY(dp__mesh_hear_all(call));
    }
    for (size_t i = 0; i < steps + 2; i++) {
        if (i < steps && how->begin != NULL)
            DP_TRY(how->begin(call, i));
        if (i >= 1 && i - 1 < steps)
            DP_TRY(how->turn(call, i - 1));
        if (i >= 2 && how->end != NULL)
            DP_TRY(how->end(call, i - 2));
    }
    return DP_OK;
}

/* `piece`: elements of a block that fit into what they go through. */
static dp_status dp__mesh_run(dp__mesh_call *call, const dp__mesh_steps *how, size_t piece)
{
    call->piece = piece;
    dp_status status = dp__mesh_run_steps(call, how);
    call->comm->endpoint.broken = call->comm->endpoint.broken || status != DP_OK;
    return status;
}

/* ==== >>adding =================================================================================
   A process sends the sum of its local ranks. With one device that is the user's buffer, and is
   sent from there. */

/* comm->in becomes comm->out. */
static void dp__mesh_reduce(const dp__mesh_call *call, size_t in_count, size_t out_count,
                            size_t count, bool last)
{
    const dp__mesh_comm *comm = call->comm;
    dp_dtype dtype = call->wide ? DP_F32 : call->asked.dtype;
    dp_kernel_args args = dp__reduction(&call->asked, dtype, count, comm->rank_count, last);
    args.out = comm->out;
    args.in = comm->in;
    args.out_count = out_count;
    args.in_count = in_count;
    dp__cpu_run(comm->base.host, comm->simd, &args);
}

/* Halves of the local ranks, as f32, as many at a time as there is room for. */
static void dp__mesh_add_own_halves(const dp__mesh_call *call, size_t at, size_t count, char *out)
{
    const dp__mesh_comm *comm = call->comm;
    size_t most = comm->buffer_bytes / sizeof(float) / (size_t)comm->local_count, part = 0;
    for (size_t done = 0; done < count; done += part) {
        part = count - done < most ? count - done : most;
        for (int i = 0; i < comm->local_count; i++) {
            char *wide = comm->wide + (size_t)i * most * sizeof(float);
            dp__cpu_run_cast(comm->base.host, comm->simd, wide, DP_F32,
                             (const char *)call->asked.local[i].send + at + done * call->size,
                             call->asked.dtype, part);
            comm->in[i] = wide;
        }
        comm->out[0] = out + done * sizeof(float);
        dp__mesh_reduce(call, (size_t)comm->local_count, 1, part, false);
    }
}

/* The sum of the local ranks, `at` bytes further on, to `out`. */
static void dp__mesh_add_own(const dp__mesh_call *call, size_t at, size_t count, char *out)
{
    const dp__mesh_comm *comm = call->comm;
    if (call->wide) {
        dp__mesh_add_own_halves(call, at, count, out);
        return;
    }
    for (int i = 0; i < comm->local_count; i++)
        comm->in[i] = (const char *)call->asked.local[i].send + at;
    comm->out[0] = out;
    if (comm->local_count == 1)
        memcpy(out, comm->in[0], count * call->size);
    else
        dp__mesh_reduce(call, (size_t)comm->local_count, 1, count, false);
}

/* Adds up what the local ranks have of a whole piece: one block, or each rank's. */
static void dp__mesh_add_own_all(const dp__mesh_call *call, size_t step, char *out)
{
    size_t count = dp__mesh_count(call, step), each = call->asked.count * call->size;
    size_t blocks = call->blocks ? (size_t)call->comm->rank_count : 1;
    for (size_t r = 0; r < blocks; r++)
        dp__mesh_add_own(call, r * each + dp__mesh_at(call, step), count,
                         out + r * count * dp__mesh_wire_bytes(call));
}

/* Add the sums of all processes, or groups, in comm->in, into `out_count` places in comm->out. */
static void dp__mesh_add_all(const dp__mesh_call *call, size_t in_count, size_t count,
                             size_t out_count)
{
    const dp__mesh_comm *comm = call->comm;
    void *first = comm->out[0];
    if (out_count == 0 || count == 0)
        return;
    if (!call->wide) {
        dp__mesh_reduce(call, in_count, out_count, count, true);
        return;
    }
    comm->out[0] = comm->wide;
    dp__mesh_reduce(call, in_count, 1, count, true);
    comm->out[0] = first;
    for (size_t i = 0; i < out_count; i++)
        dp__cpu_run_cast(comm->base.host, comm->simd, comm->out[i], call->asked.dtype, comm->wide,
                         DP_F32, count);
}

/* Returns where the sum of the local ranks for a piece is; with several, it is computed if `make`.
   */
static const char *dp__mesh_own(const dp__mesh_call *call, size_t step, bool make)
{
    const dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t at = dp__mesh_at(call, step);
    if (call->comm->local_count == 1 && !call->wide)
        return (const char *)call->asked.local[0].send + at;
    if (make)
        dp__mesh_add_own(call, at, dp__mesh_count(call, step), slot->out);
    return slot->out;
}

/* Which part of a piece of `count` elements a process adds up. */
static size_t dp__mesh_slice(const dp__mesh_comm *comm, size_t count, int process,
                             size_t *out_first)
{
    size_t each = (count + (size_t)comm->process_count - 1) / (size_t)comm->process_count;
    each = (each + DP__MESH_SLICE - 1) / DP__MESH_SLICE * DP__MESH_SLICE;
    size_t first = (size_t)process * each;
    *out_first = first < count ? first : count;
    return count - *out_first < each ? count - *out_first : each;
}

static dp_status dp__mesh_slices_begin(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t count = dp__mesh_count(call, step), wire = dp__mesh_wire_bytes(call), first;
    size_t own = dp__mesh_slice(comm, count, comm->process, &first);
    for (int p = 0; p < comm->process_count; p++) {
        bool other = p != comm->process;
        slot->is.to.counts[p] = other ? (int)(dp__mesh_slice(comm, count, p, &first) * wire) : 0;
        slot->is.to.places[p] = other ? (int)(first * wire) : 0;
        slot->is.from.counts[p] = other ? (int)(own * wire) : 0;
        slot->is.from.places[p] = (int)((size_t)p * own * wire);
    }
    return dp__mesh_give_each(call, dp__mesh_own(call, step, true), slot->in, step);
}

/* The first place that wants a piece of the result; a buffer if nobody does. */
static char *dp__mesh_sums(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    size_t at = dp__mesh_at(call, step);
    bool wanted = dp__wanted(&call->asked, comm->local_count, at, comm->out) > 0;
    return wanted ? comm->out[0] : dp__mesh_slot_of(call, step)->sums;
}

/* Each process gives the others its slice of the result. */
static dp_status dp__mesh_slices_spread(const dp__mesh_call *call, size_t step)
{
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t count = dp__mesh_count(call, step), first;
    for (int p = 0; p < call->comm->process_count; p++) {
        slot->is.from.counts[p] = (int)(dp__mesh_slice(call->comm, count, p, &first) * call->size);
        slot->is.from.places[p] = (int)(first * call->size);
    }
    return dp__mesh_give_all(call, NULL, dp__mesh_sums(call, step), step);
}

static dp_status dp__mesh_slices_turn(const dp__mesh_call *call, size_t step)
{
    dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    char *sums = dp__mesh_sums(call, step);
    size_t count = dp__mesh_count(call, step), wire = dp__mesh_wire_bytes(call), first;
    size_t own = dp__mesh_slice(comm, count, comm->process, &first);
    DP_TRY(dp__mesh_arrive(call, step));
    for (int p = 0; p < comm->process_count; p++)
        comm->in[p] = slot->in + (size_t)p * own * wire;
    comm->in[comm->process] = dp__mesh_own(call, step, false) + first * wire;
    comm->out[0] = sums + first * call->size;
    dp__mesh_add_all(call, (size_t)comm->process_count, own, 1);
    return dp__mesh_slices_spread(call, step);
}

static void dp__mesh_give_ranks(const dp__mesh_call *call, size_t step, const char *from)
{
    const dp__mesh_comm *comm = call->comm;
    size_t at = dp__mesh_at(call, step);
    size_t wanted = dp__wanted(&call->asked, comm->local_count, at, comm->out);
    for (size_t i = 0; i < wanted; i++)
        if (comm->out[i] != from)
            memcpy(comm->out[i], from, dp__mesh_count(call, step) * call->size);
}

/* To all local ranks that want it, what all ranks have given. */
static void dp__mesh_give_blocks(const dp__mesh_call *call, size_t step, const char *from)
{
    const dp__mesh_comm *comm = call->comm;
    size_t bytes = dp__mesh_count(call, step) * call->size, at = dp__mesh_at(call, step);
    size_t each = call->asked.count * call->size;
    for (int i = 0; i < comm->local_count; i++)
        for (size_t r = 0; r < (size_t)comm->rank_count && call->asked.local[i].recv != NULL; r++)
            memcpy((char *)call->asked.local[i].recv + r * each + at, from + r * bytes, bytes);
}

static dp_status dp__mesh_slices_end(const dp__mesh_call *call, size_t step)
{
    DP_TRY(dp__mesh_arrive(call, step));
    dp__mesh_give_ranks(call, step, dp__mesh_sums(call, step));
    return DP_OK;
}

/* Gather all of it from every process. */
static dp_status dp__mesh_small_begin(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t bytes = call->asked.count * dp__mesh_wire_bytes(call);
    for (int p = 0; p < comm->process_count; p++) {
        slot->is.from.counts[p] = (int)bytes;
        slot->is.from.places[p] = (int)((size_t)p * bytes);
    }
    return dp__mesh_give_all(call, dp__mesh_own(call, step, true), slot->in, step);
}

static dp_status dp__mesh_small_turn(const dp__mesh_call *call, size_t step)
{
    dp__mesh_comm *comm = call->comm;
    const dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t bytes = call->asked.count * dp__mesh_wire_bytes(call);
    DP_TRY(dp__mesh_arrive(call, step));
    for (int p = 0; p < comm->process_count; p++)
        comm->in[p] = slot->in + (size_t)p * bytes;
    dp__mesh_add_all(call, (size_t)comm->process_count, call->asked.count,
                     dp__wanted(&call->asked, comm->local_count, 0, comm->out));
    return DP_OK;
}

/* ==== >>groups =================================================================================
   A group of processes that share memory has one sum to send, and needs one result. So each process
   puts the sum of its ranks into its input buffer in that memory. As above, every process adds up a
   slice of each piece. For a slice of another group, one process of this group, the sender, adds up
   the inputs and sends the sum. The receiver does the same in its own group, adds the sums of the
   groups, and sends the result back to the senders. They put it into the result buffer, which all
   processes of a group read. Equal groups on M machines send 2 (M - 1) / M times the data from each
   machine, however many processes there are.

   reduce_scatter is the first half of this, with the blocks of a process' ranks in place of its
   slice; all_gather is the second half with blocks, and a broadcast with slices.

   Groups do not change a bit. They have 1, 2, 4, 8, ... processes, the last one perhaps fewer, so
   the sum of a group is a whole subtree of the tree of all processes. They are as large as possible
   without spanning two machines.

   Each transfer is still one of all processes, though most of its parts are empty, so that waits,
   notes and names are as everywhere. `put` and `landed` count the pieces of all sums and
   never decrease. Each buffer has places for three pieces. A process overwrites its input with
   piece n + 3 only after all have landed n, when nobody reads the inputs of n any more; and the
   result with n + 3 only after all have landed n + 1, when all have copied n. */

/* Which process of a group sends the slice that `process`, of another one, adds up. */
static int dp__mesh_sender(const dp__mesh_comm *comm, int group, int process)
{
    return dp__mesh_group_first(comm, group) + process % dp__mesh_group_size(comm, group);
}

static char *dp__mesh_shared_at(const dp__mesh_call *call, int place, size_t step)
{
    const dp__mesh_group *group = &call->comm->group;
    size_t slot = (group->pieces + step) % DP__MESH_SLOTS;
    return (char *)group->shared.data + dp__mesh_input_at(call->comm, place) + slot * group->bytes;
}

static char *dp__mesh_result(const dp__mesh_call *call, size_t step)
{
    return dp__mesh_shared_at(call, 0, step);
}

static char *dp__mesh_input(const dp__mesh_call *call, int process, size_t step)
{
    const dp__mesh_group *group = &call->comm->group;
    return dp__mesh_shared_at(call, 1 + process - group->own * group->each, step);
}

/* Until all in the group have put, or landed, a piece. */
static dp_status dp__mesh_await_group(const dp__mesh_call *call, bool landed, size_t step)
{
    dp__mesh_comm *comm = call->comm;
    const dp__mesh_group *group = &comm->group;
    unsigned value = group->pieces + (unsigned)step + 1;
    int first = dp__mesh_group_first(comm, group->own);
    int end = dp__mesh_group_first(comm, group->own + 1);
    for (int p = first; p < end; p++) {
        dp__mesh_mark *mark = dp__mesh_mark_of(comm, p);
        DP_TRY(dp__mesh_await_mark(comm, p, landed ? &mark->landed : &mark->put, value));
    }
    return DP_OK;
}

/* Which part of a piece a process makes: a slice of it, or the blocks of its ranks. */
static size_t dp__mesh_part(const dp__mesh_call *call, size_t step, int process, size_t *out_first)
{
    const dp__mesh_comm *comm = call->comm;
    size_t count = dp__mesh_count(call, step);
    if (!call->blocks)
        return dp__mesh_slice(comm, count, process, out_first);
    *out_first = (size_t)comm->journal->job->firsts[process] * count;
    return (size_t)dp__rank_count_of(comm->journal->job, process) * count;
}

/* The group's sum of the part of `process`, to its place in `out`. */
static void dp__mesh_add_group(const dp__mesh_call *call, size_t step, int process, char *out)
{
    const dp__mesh_comm *comm = call->comm;
    int start = dp__mesh_group_first(comm, comm->group.own);
    int members = dp__mesh_group_size(comm, comm->group.own);
    size_t wire = dp__mesh_wire_bytes(call), first;
    size_t count = dp__mesh_part(call, step, process, &first);
    for (int i = 0; i < members; i++)
        comm->in[i] = dp__mesh_input(call, start + i, step) + first * wire;
    comm->out[0] = out + first * wire;
    if (count > 0)
        dp__mesh_reduce(call, (size_t)members, 1, count, false);
}

/* Counts what goes from this process to the one that makes a part, or, with `back`, the other way.
   */
static void dp__mesh_group_counts(const dp__mesh_call *call, size_t step, bool back)
{
    const dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    const dp__counts *sent = back ? &slot->is.from : &slot->is.to;
    const dp__counts *added = back ? &slot->is.to : &slot->is.from;
    int self = comm->process;
    size_t size = back ? call->size : dp__mesh_wire_bytes(call), first;
    size_t own = dp__mesh_part(call, step, self, &first);
    for (int p = 0; p < comm->process_count; p++) {
        int group = dp__mesh_group_of(comm, p);
        bool away = group != comm->group.own;
        bool mine = away && dp__mesh_sender(comm, comm->group.own, p) == self;
        bool its = away && dp__mesh_sender(comm, group, self) == p;
        size_t bytes = dp__mesh_part(call, step, p, &first) * size;
        size_t place = back ? 0 : (size_t)group * own;
        sent->counts[p] = mine ? (int)bytes : 0;
        sent->places[p] = (int)(first * size);
        added->counts[p] = its ? (int)(own * size) : 0;
        added->places[p] = (int)(place * size);
    }
}

static dp_status dp__mesh_group_begin(const dp__mesh_call *call, size_t step)
{
    dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    int self = comm->process;
    dp__mesh_add_own_all(call, step, dp__mesh_input(call, self, step));
    atomic_store_explicit(&dp__mesh_mark_of(comm, self)->put,
                          comm->group.pieces + (unsigned)step + 1, memory_order_release);
    DP_TRY(dp__mesh_await_group(call, false, step));
    dp__mesh_group_counts(call, step, false);
    for (int p = 0; p < comm->process_count; p++)
        if (slot->is.to.counts[p] > 0)
            dp__mesh_add_group(call, step, p, slot->out);
    return dp__mesh_give_each(call, slot->out, slot->in, step);
}

/* The sum of all groups, of so many elements of the part of this process, from `at` on. */
static void dp__mesh_group_sum(const dp__mesh_call *call, size_t step, size_t at, size_t count,
                               void *out)
{
    const dp__mesh_comm *comm = call->comm;
    const dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t wire = dp__mesh_wire_bytes(call), first;
    size_t own = dp__mesh_part(call, step, comm->process, &first);
    for (int g = 0; g < comm->group.count; g++)
        comm->in[g] = slot->in + ((size_t)g * own + at) * wire;
    comm->in[comm->group.own] = slot->out + (first + at) * wire;
    comm->out[0] = out;
    dp__mesh_add_all(call, (size_t)comm->group.count, count, 1);
}

/* Sends slot->sums, the part that this process has made, to its own group and the others. */
static dp_status dp__mesh_group_spread(const dp__mesh_call *call, size_t step)
{
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    char *result = dp__mesh_result(call, step);
    size_t first, own = dp__mesh_part(call, step, call->comm->process, &first);
    memcpy(result + first * call->size, slot->sums, own * call->size);
    dp__mesh_group_counts(call, step, true);
    return dp__mesh_give_each(call, slot->sums, result, step);
}

static dp_status dp__mesh_group_turn(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t first, own = dp__mesh_part(call, step, call->comm->process, &first);
    DP_TRY(dp__mesh_arrive(call, step));
    dp__mesh_add_group(call, step, call->comm->process, slot->out);
    dp__mesh_group_sum(call, step, 0, own, slot->sums);
    return dp__mesh_group_spread(call, step);
}

/* This process is through with the inputs of a piece, and what it gets is in the result: wait until
   all in the group have come so far. */
static dp_status dp__mesh_group_land(const dp__mesh_call *call, size_t step)
{
    dp__mesh_comm *comm = call->comm;
    atomic_store_explicit(&dp__mesh_mark_of(comm, comm->process)->landed,
                          comm->group.pieces + (unsigned)step + 1, memory_order_release);
    return dp__mesh_await_group(call, true, step);
}

static dp_status dp__mesh_group_end(const dp__mesh_call *call, size_t step)
{
    const char *result = dp__mesh_result(call, step);
    DP_TRY(dp__mesh_arrive(call, step));
    DP_TRY(dp__mesh_group_land(call, step));
    if (call->blocks)
        dp__mesh_give_blocks(call, step, result);
    else
        dp__mesh_give_ranks(call, step, result);
    return DP_OK;
}

static dp_status dp__mesh_run_shared(dp__mesh_call *call, const dp__mesh_steps *how, size_t piece)
{
    DP_TRY(dp__mesh_run(call, how, piece));
    call->comm->group.pieces += (unsigned)((call->asked.count + piece - 1) / piece);
    return DP_OK;
}

/* Halves always travel as f32. */
static dp_status dp__mesh_run_groups(dp__mesh_call *call)
{
    static const dp__mesh_steps steps = {dp__mesh_group_begin, dp__mesh_group_turn,
                                         dp__mesh_group_end};
    call->wide = dp__is_half(call->asked.dtype);
    return dp__mesh_run_shared(call, &steps, call->comm->group.bytes / dp__mesh_wire_bytes(call));
}

/* --- the reductions --------------------------------------------------------------------------- */

static dp_status dp__mesh_all_reduce(dp__mesh_call *call)
{
    static const dp__mesh_steps small = {dp__mesh_small_begin, dp__mesh_small_turn, NULL};
    static const dp__mesh_steps large = {dp__mesh_slices_begin, dp__mesh_slices_turn,
                                         dp__mesh_slices_end};
    const dp__mesh_comm *comm = call->comm;
    call->wide = comm->most > 1 && dp__is_half(call->asked.dtype);
    size_t wire = dp__mesh_wire_bytes(call), processes = (size_t)comm->process_count;
    if (dp__mesh_is_tiny(call) || (dp__mesh_is_small(call) && !dp__mesh_is_grouped(comm)))
        return dp__mesh_run(call, &small, comm->buffer_bytes / wire / processes);
    if (dp__mesh_is_grouped(comm))
        return dp__mesh_run_groups(call);
    return dp__mesh_run(call, &large, comm->buffer_bytes / wire);
}

/* Blocks are all cut in the same way; a message has a piece of every rank's block. */
static dp_status dp__mesh_scatter_begin(const dp__mesh_call *call, size_t step)
{
    dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t count = dp__mesh_count(call, step), bytes = count * dp__mesh_wire_bytes(call);
    dp__mesh_add_own_all(call, step, slot->out);
    for (int p = 0; p < comm->process_count; p++) {
        slot->is.to.counts[p] = (int)((size_t)dp__rank_count_of(comm->journal->job, p) * bytes);
        slot->is.to.places[p] = (int)((size_t)comm->journal->job->firsts[p] * bytes);
        slot->is.from.counts[p] = (int)((size_t)comm->local_count * bytes);
        slot->is.from.places[p] = (int)((size_t)(p * comm->local_count) * bytes);
    }
    return dp__mesh_give_each(call, slot->out, slot->in, step);
}

static dp_status dp__mesh_scatter_turn(const dp__mesh_call *call, size_t step)
{
    dp__mesh_comm *comm = call->comm;
    const dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t count = dp__mesh_count(call, step), bytes = count * dp__mesh_wire_bytes(call);
    DP_TRY(dp__mesh_arrive(call, step));
    for (int i = 0; i < comm->local_count; i++) {
        if (call->asked.local[i].recv == NULL)
            continue;
        for (int p = 0; p < comm->process_count; p++)
            comm->in[p] = slot->in + (size_t)(p * comm->local_count + i) * bytes;
        comm->out[0] = (char *)call->asked.local[i].recv + dp__mesh_at(call, step);
        dp__mesh_add_all(call, (size_t)comm->process_count, count, 1);
    }
    return DP_OK;
}

/* In groups it begins as a sum does, but nobody else gets the parts. */
static dp_status dp__mesh_kept_turn(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    size_t count = dp__mesh_count(call, step);
    DP_TRY(dp__mesh_arrive(call, step));
    dp__mesh_add_group(call, step, comm->process, dp__mesh_slot_of(call, step)->out);
    for (int i = 0; i < comm->local_count; i++) {
        char *to = call->asked.local[i].recv;
        if (to != NULL)
            dp__mesh_group_sum(call, step, (size_t)i * count, count, to + dp__mesh_at(call, step));
    }
    return DP_OK;
}

/* How many blocks a piece has to have room for. */
static size_t dp__mesh_blocks(const dp__mesh_comm *comm)
{
    size_t ranks = (size_t)comm->rank_count, most = (size_t)(comm->process_count * comm->most);
    return ranks > most ? ranks : most;
}

static dp_status dp__mesh_reduce_scatter(dp__mesh_call *call)
{
    static const dp__mesh_steps steps = {dp__mesh_scatter_begin, dp__mesh_scatter_turn, NULL};
    static const dp__mesh_steps shared = {dp__mesh_group_begin, dp__mesh_kept_turn,
                                          dp__mesh_group_land};
    const dp__mesh_comm *comm = call->comm;
    size_t blocks = dp__mesh_blocks(comm);
    bool grouped = dp__mesh_is_grouped(comm);
    call->blocks = true;
    call->wide = (grouped || comm->most > 1) && dp__is_half(call->asked.dtype);
    if (grouped)
        return dp__mesh_run_shared(call, &shared,
                                   comm->group.bytes / dp__mesh_wire_bytes(call) / blocks);
    return dp__mesh_run(call, &steps, comm->buffer_bytes / dp__mesh_wire_bytes(call) / blocks);
}

/* ==== >>moving =================================================================================
   The other collectives move bytes. Data for a process travels once, and is given there to those of
   its ranks that want it. What is broadcast goes out in slices, one to each process, which all pass
   theirs on: so the root sends less than twice of it, however many there are. */

/* The process that a broadcast comes from. */
static int dp__mesh_root(const dp__mesh_call *call)
{
    return dp__process_of(call->comm->journal->job, call->asked.root);
}

/* Returns what is broadcast, in the root's process. */
static const char *dp__mesh_source(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    return (const char *)call->asked.local[call->asked.root - comm->rank_first].send +
           dp__mesh_at(call, step);
}

/* From the root's process to each its slice, or all of what is small. */
static dp_status dp__mesh_broadcast_begin(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    bool whole = dp__mesh_is_small(call);
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    int root = dp__mesh_root(call), self = comm->process;
    size_t count = dp__mesh_count(call, step), all = count * call->size, first;
    size_t own = dp__mesh_slice(comm, count, self, &first) * call->size;
    const char *source = self == root ? dp__mesh_source(call, step) : NULL;
    for (int p = 0; p < comm->process_count; p++) {
        bool sends = self == root && p != root, receives = self != root && p == root;
        size_t slice = dp__mesh_slice(comm, count, p, &first) * call->size;
        slot->is.to.counts[p] = sends ? (int)(whole ? all : slice) : 0;
        slot->is.to.places[p] = whole ? 0 : (int)(first * call->size);
        slot->is.from.counts[p] = receives ? (int)(whole ? all : own) : 0;
        slot->is.from.places[p] = 0;
    }
    if (dp__mesh_is_tiny(call))
        return dp__mesh_tell_all(call, source, source != NULL ? all : 0);
    return dp__mesh_give_each(call, source, slot->in, step);
}

static dp_status dp__mesh_whole_turn(const dp__mesh_call *call, size_t step)
{
    bool root = dp__mesh_root(call) == call->comm->process;
    DP_TRY(dp__mesh_arrive(call, step));
    dp__mesh_give_ranks(call, step,
                        root ? dp__mesh_source(call, step) : dp__mesh_slot_of(call, step)->in);
    return DP_OK;
}

/* Each process passes its slice on, and gets the others': all but the root, which has them. */
static dp_status dp__mesh_parts_turn(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    int root = dp__mesh_root(call), self = comm->process;
    size_t count = dp__mesh_count(call, step), first;
    size_t own = dp__mesh_slice(comm, count, self, &first) * call->size, at = first * call->size;
    DP_TRY(dp__mesh_arrive(call, step));
    if (self == root)
        dp__mesh_give_ranks(call, step, dp__mesh_source(call, step));
    else
        memcpy(dp__mesh_sums(call, step) + at, slot->in, own);
    for (int p = 0; p < comm->process_count; p++) {
        size_t slice = dp__mesh_slice(comm, count, p, &first) * call->size;
        slot->is.to.counts[p] = p != self && p != root ? (int)own : 0;
        slot->is.to.places[p] = self == root ? (int)at : 0;
        slot->is.from.counts[p] = p != self && self != root ? (int)slice : 0;
        slot->is.from.places[p] = (int)(first * call->size);
    }
    return self == root ? dp__mesh_give_each(call, dp__mesh_source(call, step), slot->in, step)
                        : dp__mesh_give_each(call, slot->in, dp__mesh_sums(call, step), step);
}

/* In a group one process gets each slice, for all. */
static dp_status dp__mesh_shared_turn(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    const dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    bool root = dp__mesh_root(call) == comm->process;
    size_t first, own = dp__mesh_slice(comm, dp__mesh_count(call, step), comm->process, &first);
    DP_TRY(dp__mesh_arrive(call, step));
    memcpy(slot->sums, root ? dp__mesh_source(call, step) + first * call->size : slot->in,
           own * call->size);
    return dp__mesh_group_spread(call, step);
}

static dp_status dp__mesh_broadcast(dp__mesh_call *call)
{
    static const dp__mesh_steps whole = {dp__mesh_broadcast_begin, dp__mesh_whole_turn, NULL};
    static const dp__mesh_steps parts = {dp__mesh_broadcast_begin, dp__mesh_parts_turn,
                                         dp__mesh_slices_end};
    static const dp__mesh_steps shared = {dp__mesh_broadcast_begin, dp__mesh_shared_turn,
                                          dp__mesh_group_end};
    const dp__mesh_comm *comm = call->comm;
    size_t piece = comm->buffer_bytes / call->size;
    if (dp__mesh_is_small(call))
        return dp__mesh_run(call, &whole, piece);
    if (!dp__mesh_is_grouped(comm))
        return dp__mesh_run(call, &parts, piece);
    return dp__mesh_run_shared(call, &shared, comm->group.bytes / call->size);
}

static dp_status dp__mesh_gather_begin(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t bytes = dp__mesh_count(call, step) * call->size, at = dp__mesh_at(call, step);
    for (int p = 0; p < comm->process_count; p++) {
        slot->is.from.counts[p] = (int)((size_t)dp__rank_count_of(comm->journal->job, p) * bytes);
        slot->is.from.places[p] = (int)((size_t)comm->journal->job->firsts[p] * bytes);
    }
    if (comm->local_count == 1)
        return dp__mesh_give_all(call, (const char *)call->asked.local[0].send + at, slot->in,
                                 step);
    for (int i = 0; i < comm->local_count; i++)
        memcpy(slot->out + (size_t)i * bytes, (const char *)call->asked.local[i].send + at, bytes);
    return dp__mesh_give_all(call, slot->out, slot->in, step);
}

static dp_status dp__mesh_gather_turn(const dp__mesh_call *call, size_t step)
{
    DP_TRY(dp__mesh_arrive(call, step));
    dp__mesh_give_blocks(call, step, dp__mesh_slot_of(call, step)->in);
    return DP_OK;
}

/* In a group one process gets each block, for all. Nothing begins before its turn: the place of the
   result may still be read (see >>groups). */
static dp_status dp__mesh_blocks_turn(const dp__mesh_call *call, size_t step)
{
    size_t bytes = dp__mesh_count(call, step) * call->size, at = dp__mesh_at(call, step);
    char *own = dp__mesh_slot_of(call, step)->sums;
    for (int i = 0; i < call->comm->local_count; i++)
        memcpy(own + (size_t)i * bytes, (const char *)call->asked.local[i].send + at, bytes);
    return dp__mesh_group_spread(call, step);
}

static dp_status dp__mesh_all_gather(dp__mesh_call *call)
{
    static const dp__mesh_steps steps = {dp__mesh_gather_begin, dp__mesh_gather_turn, NULL};
    static const dp__mesh_steps shared = {NULL, dp__mesh_blocks_turn, dp__mesh_group_end};
    const dp__mesh_comm *comm = call->comm;
    size_t blocks = dp__mesh_blocks(comm);
    call->blocks = true;
    if (dp__mesh_is_grouped(comm) && !dp__mesh_is_tiny(call))
        return dp__mesh_run_shared(call, &shared, comm->group.bytes / call->size / blocks);
    return dp__mesh_run(call, &steps, comm->buffer_bytes / call->size / blocks);
}

/* To a process: from each local rank, to each of its ranks. */
static dp_status dp__mesh_exchange_begin(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    dp__mesh_slot *slot = dp__mesh_slot_of(call, step);
    size_t bytes = dp__mesh_count(call, step) * call->size, at = dp__mesh_at(call, step);
    size_t each = call->asked.count * call->size, locals = (size_t)comm->local_count;
    char *out = slot->out;
    for (int p = 0; p < comm->process_count; p++) {
        size_t first = (size_t)comm->journal->job->firsts[p],
               ranks = (size_t)dp__rank_count_of(comm->journal->job, p);
        slot->is.to.counts[p] = slot->is.from.counts[p] = (int)(locals * ranks * bytes);
        slot->is.to.places[p] = slot->is.from.places[p] = (int)(locals * first * bytes);
        for (size_t i = 0; i < locals; i++)
            for (size_t k = 0; k < ranks; k++, out += bytes)
                memcpy(out, (const char *)call->asked.local[i].send + (first + k) * each + at,
                       bytes);
    }
    return dp__mesh_give_each(call, slot->out, slot->in, step);
}

static dp_status dp__mesh_exchange_turn(const dp__mesh_call *call, size_t step)
{
    const dp__mesh_comm *comm = call->comm;
    size_t bytes = dp__mesh_count(call, step) * call->size, at = dp__mesh_at(call, step);
    size_t each = call->asked.count * call->size;
    const char *in = dp__mesh_slot_of(call, step)->in;
    DP_TRY(dp__mesh_arrive(call, step));
    for (size_t r = 0; r < (size_t)comm->rank_count; r++)
        for (int i = 0; i < comm->local_count; i++, in += bytes)
            memcpy((char *)call->asked.local[i].recv + r * each + at, in, bytes);
    return DP_OK;
}

static dp_status dp__mesh_all_to_all(dp__mesh_call *call)
{
    static const dp__mesh_steps steps = {dp__mesh_exchange_begin, dp__mesh_exchange_turn, NULL};
    const dp__mesh_comm *comm = call->comm;
    return dp__mesh_run(call, &steps,
                        comm->buffer_bytes / call->size / (size_t)comm->rank_count /
                            (size_t)comm->most);
}

static dp_status dp__mesh_run_call(dp_comm *base, const dp_coll_call *asked)
{
    dp__mesh_call call = {
        .comm = dp__mesh_of(base), .asked = *asked, .size = dp_dtype_bytes(asked->dtype)};
    switch (asked->verb) {
    case DP_ALL_REDUCE:
        return dp__mesh_all_reduce(&call);
    case DP_REDUCE_SCATTER:
        return dp__mesh_reduce_scatter(&call);
    case DP_BROADCAST:
        return dp__mesh_broadcast(&call);
    case DP_ALL_GATHER:
        return dp__mesh_all_gather(&call);
    case DP_ALL_TO_ALL:
    case DP_REDUCE_TO:
    case DP_GATHER_TO:
    case DP_SCATTER_FROM:
        break;
    }
    return dp__mesh_all_to_all(&call);
}

/* ==== >>meshing ================================================================================
   From a job to a communicator. Every step is agreed upon by all processes, including those that
   failed in it, so that all fail together.                                                      */

static void dp__mesh_free(dp__mesh_comm *comm)
{
    dp__os_shared_close(&comm->group.shared);
    dp__os_free(comm->buffers, 0, NULL);
    dp__os_free(comm->numbers, 0, NULL);
    dp__os_free(comm->own_heads, 0, NULL);
    dp__os_free(comm->in, 0, NULL);
    dp__os_free(comm->out, 0, NULL);
    dp__os_free(comm, 0, NULL);
}

static dp_status dp__mesh_full(void)
{
    return dp_error(DP_ERR_NO_MEMORY, "no memory for a communicator");
}

/* The part that depends on this process alone. */
static dp_status dp__mesh_new(const dp_host *host, const dp_comm_config *config,
                              const dp_coll_ops *table, const dp__carrier *carrier,
                              dp__mesh_comm **out)
{
    const dp__simd *simd = NULL;
    DP_TRY(dp__simd_choose(&simd));
    dp__mesh_comm *comm = dp__os_alloc(sizeof *comm, 64, NULL);
    if (comm == NULL)
        return dp__mesh_full();
    memset(comm, 0, sizeof *comm);
    comm->base = (dp_comm){table, host};
    comm->simd = simd;
    comm->group.shared.fd = -1;
    comm->journal = dp__journal_opening(dp__job_of(host));
    comm->journal->compared = true;
    comm->process = comm->journal->job->process;
    comm->process_count = comm->journal->job->process_count;
    comm->rank_first = config->rank_first;
    comm->local_count = config->local_count;
    comm->rank_count = config->rank_count;
    comm->endpoint = (dp__endpoint){.carrier = carrier,
                                    .job = comm->journal->job,
                                    .journal = comm->journal,
                                    .process = comm->process,
                                    .process_count = comm->process_count,
                                    .far = !config->one_machine};
    *out = comm;
    return carrier->open(&comm->endpoint);
}

/* A piece has at least one element of every block. */
static void dp__mesh_place_buffers(dp__mesh_comm *comm)
{
    size_t processes = (size_t)comm->process_count, stride = comm->stride;
    int *numbers = comm->numbers;
    char *at = comm->buffers;
    for (int i = 0; i <= DP__MESH_MEETING; i++) {
        dp__mesh_slot *slot = &comm->slots[i];
        slot->is.place = i;
        slot->is.to = (dp__counts){numbers, numbers + processes};
        slot->is.from = (dp__counts){numbers + 2 * processes, numbers + 3 * processes};
        numbers += 4 * processes;
        if (i == DP__MESH_MEETING)
            break;
        slot->out = at;
        slot->in = at + stride;
        slot->sums = at + 2 * stride;
        at += 3 * stride;
    }
    comm->wide = at;
}

/* Lays out what all begin with, which always has the same size. In groups only first processes send
   it. */
static void dp__mesh_place_heads(dp__mesh_comm *comm)
{
    dp__mesh_slot *slot = &comm->slots[DP__MESH_MEETING];
    int own = dp__mesh_group_first(comm, comm->group.own);
    bool grouped = dp__mesh_is_grouped(comm), sends = comm->process == own;
    int heard = grouped ? dp__mesh_first_heard(comm) : 0;
    slot->is.even = !grouped;
    for (int p = 0; p < comm->process_count; p++) {
        int group = dp__mesh_group_of(comm, p);
        bool hears = !grouped || (sends && p != own && p == dp__mesh_group_first(comm, group));
        int to = dp__mesh_group_size(comm, comm->group.own);
        int from = dp__mesh_group_size(comm, group);
        slot->is.to.counts[p] = hears ? to * (int)comm->head_bytes : 0;
        slot->is.to.places[p] = 0;
        slot->is.from.counts[p] = hears ? from * (int)comm->head_bytes : 0;
        slot->is.from.places[p] = hears ? (p - heard) * (int)comm->head_bytes : 0;
    }
}

/* The largest power of two that divides the place of every process that another machine begins at.
   Where there is one machine, this was asked for by name: nothing is shared. Nor is it where a
   piece would have no room for an element of each rank. */
static int dp__mesh_group_learn(const dp__mesh_comm *comm)
{
    const dp__introduction *all = comm->journal->job->introductions;
    bool fits = dp__mesh_blocks(comm) <= comm->group.bytes / sizeof(double);
    int begins = 0;
    for (int p = 1; p < comm->process_count; p++)
        begins |= all[p].machine != all[p - 1].machine ? p : 0;
    return fits && begins > 0 ? begins & -begins : 1;
}

static void dp__mesh_group_set(dp__mesh_comm *comm, int each)
{
    comm->group.each = each;
    comm->group.own = comm->process / each;
    comm->group.count = (comm->process_count + each - 1) / each;
}

/* Each process sends a slice of a piece to each other one. Slices of many processes would be so
   small that each message costs more than its bytes: there pieces grow with the processes. */
static size_t dp__mesh_piece_bytes(size_t usual, size_t processes)
{
    size_t slices = dp__align_up(processes * DP__MESH_SLICE_BYTES, DP__SHARED_PAGE);
    slices = slices < DP__MESH_PIECE_BYTES ? slices : DP__MESH_PIECE_BYTES;
    return slices > usual ? slices : usual;
}

/* The part that depends on all processes. */
static dp_status dp__mesh_learn(dp__mesh_comm *comm)
{
    size_t processes = (size_t)comm->process_count;
    comm->numbers = dp__os_alloc(4 * processes * (DP__MESH_SLOTS + 1) * sizeof(int), 64, NULL);
    if (comm->numbers == NULL)
        return dp__mesh_full();
    for (int p = 0; p < comm->process_count; p++)
        comm->most = dp__rank_count_of(comm->journal->job, p) > comm->most
                         ? dp__rank_count_of(comm->journal->job, p)
                         : comm->most;
    size_t least = processes * (size_t)comm->most * (size_t)comm->most * sizeof(double);
    size_t piece = dp__mesh_piece_bytes(DP__MESH_BUFFER_BYTES, processes);
    comm->buffer_bytes = least > piece ? least : piece;
    comm->group.bytes = dp__mesh_piece_bytes(DP__MESH_INPUT_BYTES, processes);
    comm->stride = comm->buffer_bytes + processes * DP__MESH_SLICE * sizeof(double);
    size_t operands = (processes + (size_t)comm->most) * sizeof(void *);
    comm->buffers = dp__os_alloc((3 * DP__MESH_SLOTS + 1) * comm->stride, 64, NULL);
    comm->in = dp__os_alloc(operands, 64, NULL);
    comm->out = dp__os_alloc(operands, 64, NULL);
    size_t tiny = DP__MESH_SMALL_BYTES / processes;
    tiny = tiny < DP__MESH_TINY_BYTES ? tiny : DP__MESH_TINY_BYTES;
    comm->head_bytes = (sizeof(dp__mesh_head) + tiny + 63) / 64 * 64;
    comm->heads = comm->own_heads = dp__os_alloc((processes + 1) * comm->head_bytes, 64, NULL);
    if (comm->buffers == NULL || comm->in == NULL || comm->out == NULL || comm->heads == NULL)
        return dp__mesh_full();
    dp__mesh_place_buffers(comm);
    dp__mesh_group_set(comm, dp__mesh_group_learn(comm));
    return DP_OK;
}

/* The first process of a group makes the memory, and each has its own input. */
static dp_status dp__mesh_group_open(dp__mesh_comm *comm)
{
    dp__shared *shared = &comm->group.shared;
    int first = dp__mesh_group_first(comm, comm->group.own);
    size_t members = (size_t)dp__mesh_group_size(comm, comm->group.own);
    const dp__area area = {.maker = first,
                           .bytes = dp__mesh_input_at(comm, 1 + (int)members),
                           .head = dp__mesh_input_at(comm, 1),
                           .first = dp__mesh_input_at(comm, 1 + comm->process - first),
                           .each = dp__mesh_input_at(comm, 1) - dp__mesh_input_at(comm, 0)};
    DP_TRY(dp__area_open(comm->journal->job, &area, shared));
    dp__os_shared_close(&(dp__shared){.fd = shared->fd}); /* the memory stays */
    shared->fd = -1;
    return DP_OK;
}

/* Opens the group's memory. Where there is none, all travels, unless the job has failed. */
static dp_status dp__mesh_share(dp__mesh_comm *comm)
{
    const dp_host *host = comm->base.host;
    dp__mesh_group *group = &comm->group;
    dp_status status = group->each > 1 ? dp__mesh_group_open(comm) : DP_OK;
    char text[96];
    if (status != DP_OK) {
        host->log(host, DP_LOG_INFO, dp_last_error());
        DP_TRY(dp__job_agree(comm->journal->job, DP_OK));
    }
    dp__mesh_group_set(comm, status == DP_OK ? group->each : 1);
    snprintf(text, sizeof text, "%s: %d processes, which share memory in groups of %d",
             comm->base.ops->name, comm->process_count, group->each);
    host->log(host, DP_LOG_INFO, text);
    return DP_OK;
}

static dp_status dp__mesh_open_all(dp__mesh_comm *comm)
{
    DP_TRY(dp__job_agree(comm->journal->job, dp__mesh_learn(comm)));
    DP_TRY(dp__mesh_share(comm));
    dp__mesh_place_heads(comm);
    const dp__carrier *carrier = comm->endpoint.carrier;
    return carrier->connect != NULL ? carrier->connect(&comm->endpoint) : DP_OK;
}

static void dp__mesh_close(dp_comm *base)
{
    dp__mesh_comm *comm = dp__mesh_of(base);
    if (comm->endpoint.carrier->close(&comm->endpoint))
        dp__mesh_free(comm);
}

static dp_status dp__mesh_open(const dp_host *host, const dp_comm_config *config,
                               const dp_coll_ops *table, const dp__carrier *carrier, dp_comm **out)
{
    dp__mesh_comm *comm = NULL;
    dp_status status =
        dp__job_agree(dp__job_of(host), dp__mesh_new(host, config, table, carrier, &comm));
    if (status == DP_OK && comm != NULL)
        status = dp__mesh_open_all(comm);
    if (status == DP_OK)
        *out = &comm->base;
    else if (comm != NULL)
        dp__mesh_close(&comm->base);
    return status;
}

/* Returns what carries the collectives of a context's caller; NULL: shared memory, or devices. */
static const dp__carrier *dp__mesh_carrier(const dp_ctx *ctx)
{
    dp_comm *comm = ctx->lanes[DP__CALLER].carrier;
    bool mesh = comm != NULL && comm->ops->run == dp__mesh_run_call;
    return mesh ? dp__mesh_of(comm)->endpoint.carrier : NULL;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
