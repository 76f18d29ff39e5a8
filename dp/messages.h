/* dp/messages.h - v0.2.0 - messages from one rank to another - MIT licence

   Part of dp.h, which includes it. It holds what a process knows of its messages and of those that
   others offer, which of them belong together, and two ways for their bytes: shared memory, and
   connections over TCP. Another one is in dp_mpi.h.

   CONTENTS (search for the tag)
     >>parcels   what is known of a message
     >>matching  which receive an offer is for
     >>lines     offers, answers and bytes in shared memory
     >>slips     offers and answers that travel
     >>channels  connections over TCP, made when they are needed
     >>traffic   slips and bytes on them
     >>looking   whether it makes sense to wait for a message
     >>beginning checks, and what a message needs
     >>ending    the public edge
*/

#ifndef DP__ROOMS
#error "dp/messages.h is a part of dp.h: include dp.h"
#else

/* ==== >>parcels ================================================================================
   A message is a parcel, from its beginning until its end is told to the user. The sender offers
   it: from whom, to whom, tag, dtype and count. The receiver keeps offers until it expects them, so
   that none is in the way of another. When it does, the bytes travel, and an answer ends the
   sender's part. Nothing else is ever waited for: whatever is in a process' hands it can finish, or
   give back, by itself.

   Bytes lie in memory that the host reaches, row-major: the tensor's own, or a copy (`stage`). */

enum {
    DP__PARCEL_TINY = 64,     /* so many bytes travel with the offer */
    DP__PARCELS_AT_ONCE = 16, /* in the first block; each further one is twice as large */
    DP__PARCEL_BLOCKS = 32,
    DP__PARCELS_LOOKED_AT = 16, /* by one look */
    DP__PARCEL_DOUBTS = 2, /* looks after which a process that is gone has nothing more to say */
    DP__PARCEL_TEXT = 128,
    DP__EXCUSE_BYTES = DP__HOST_BYTES + DP__WHO_BYTES
};

typedef struct dp__offer { /* what is sent, or expected */
    uint64_t reply;        /* where the answer goes, as the carrier counts */
    uint64_t place, room;  /* where the data lies in shared memory, or will: SIZE_MAX: not there */
    uint64_t count;
    int32_t from, to, tag, dtype; /* from: or DP_ANY_RANK; to: ~to, where it is the library's */
} dp__offer;

typedef enum dp__slip_kind {
    DP__SLIP_OFFERED,
    DP__SLIP_WANTED,
    DP__SLIP_DONE,
    DP__SLIP_REFUSED,
    DP__SLIP_DATA, /* follows */
    DP__SLIP_LEFT  /* nothing follows; of what the job has failed, if it has: tag, from, tiny */
} dp__slip_kind;

typedef struct dp__slip { /* an offer or an answer as it travels */
    int32_t kind, reserved;
    dp__offer is; /* what is sent, or was expected */
    char tiny[DP__PARCEL_TINY];
} dp__slip;

enum { DP__OFFER_WORDS = sizeof(dp__offer) / sizeof(uint64_t) };
_Static_assert(DP__OFFER_WORDS * sizeof(uint64_t) == sizeof(dp__offer), "an offer is words");

typedef struct dp__parcels { /* a list, the oldest first */
    struct dp__parcel *first, *last;
} dp__parcels;

typedef struct dp__parcel {
    struct dp__parcel *prev, *next;
    dp__parcels *list;   /* that it is in; or NULL */
    uint64_t number;     /* of the message; 0: somebody else's, whose offer has arrived */
    dp__offer is, other; /* other: of the one that does not fit, or of the one that was taken */
    dp_scope *stage;     /* holds the data, if the tensor's memory cannot */
    char *data;
    size_t bytes, moved;
    int process; /* at the other end; -1: any */
    bool receives;
    bool awaited; /* by dp_messages_end */
    dp_status status;
    unsigned doubts;
    void *wire;       /* what the carrier has of it */
    dp_tensor tensor; /* with a stage, to receive */
    char tiny[DP__PARCEL_TINY];
} dp__parcel;

typedef struct dp__post {
    dp_ctx *ctx;
    dp__job *job;                      /* NULL: one process */
    const struct dp__carrier *carrier; /* NULL: there is no way to others */
    void *carried;                     /* the carrier's */
    dp_scope *scope;                   /* as long as the context: what is here lies there */
    int process, process_count;
    dp__parcel *blocks[DP__PARCEL_BLOCKS];
    int block_count;
    dp__parcels spare;             /* to be used again */
    dp__parcels expected, arrived; /* receives, and offers, that have not met */
    dp__parcels offered;           /* sends to other processes that are not done */
    dp__parcels fetched;           /* receives whose data is on its way, with slips */
    bool moved;                    /* something has happened since this was last false */
    bool flows;                    /* a part of what is awaited has moved since the last look */
    dp_status failed;              /* of the carrier, while others wait */
    dp__wait wait;                 /* of those who only test */
    unsigned looks, turns;         /* turns: of those that may be any rank */
    dp_message *awaited;           /* by dp_messages_end */
    size_t awaited_count;
} dp__post;

/* How bytes get to another process. All functions are called by the context's thread. */
typedef struct dp__carrier {
    /* Gets what sending this needs, so that nothing is lacking later. Nobody knows of it. */
    dp_status (*prepare)(dp__post *post, dp__parcel *send);
    void (*discard)(dp__post *post, dp__parcel *send); /* the counterpart, also when it is done */
    dp_status (*offer)(dp__post *post, dp__parcel *send);
    /* Bring the data of what was taken, which ends with dp__parcel_received. */
    dp_status (*fetch)(dp__post *post, dp__parcel *receive);
    /* All is here, or (fits false) it is not what was expected: to the sender, whose part ends. */
    dp_status (*answer)(dp__post *post, const dp__parcel *receive, bool fits);
    dp_status (*advance)(dp__post *post); /* what can go on without waiting does: see moved */
    dp_status (*wait)(dp__post *post);    /* until something has moved; see dp__post_rest */
    /* ------------------------------------------------------- where slips travel: see >>slips -- */
    dp_status (*slip)(dp__post *post, int process, const dp__slip *slip); /* in order */
    dp_status (*data)(dp__post *post, dp__parcel *parcel); /* to who wants it, or from who has it */
    /* ---------------------------------------------------------------------------- optional -- */
    void (*close)(dp__post *post);  /* not where others may still read what this process wrote */
    void (*let_go)(dp__post *post); /* in a child of fork: it closes its copies of connections */
    /* DP__LEFT, DP__DEAD: the process has ended, and all that it had said has been heard; `known`:
       as the job knows it. */
    int (*presence)(const dp__post *post, int process, int known);
    /* Why nothing has moved, as far as it is known: "; ...". Returns whose fault that is; -1: that
       is not known. */
    int (*excuse)(const dp__post *post, const dp__parcel *parcel, char *text, size_t room);
} dp__carrier;

/* Counts messages of all contexts so far: no two have the same number. */
static _Atomic uint64_t dp__message_numbers;

static void dp__parcel_add(dp__parcels *list, dp__parcel *parcel)
{
    parcel->list = list;
    parcel->next = NULL;
    parcel->prev = list->last;
    if (list->last != NULL)
        list->last->next = parcel;
    else
        list->first = parcel;
    list->last = parcel;
}

static void dp__parcel_remove(dp__parcel *parcel)
{
    dp__parcels *list = parcel->list;
    if (list == NULL)
        return;
    if (parcel->prev != NULL)
        parcel->prev->next = parcel->next;
    else
        list->first = parcel->next;
    if (parcel->next != NULL)
        parcel->next->prev = parcel->prev;
    else
        list->last = parcel->prev;
    parcel->list = NULL;
}

static size_t dp__parcels_in(int block)
{
    return (size_t)DP__PARCELS_AT_ONCE << block;
}

static void dp__parcels_more(dp__post *post)
{
    size_t count = dp__parcels_in(post->block_count);
    dp__parcel *block = NULL;
    if (post->block_count < DP__PARCEL_BLOCKS)
        block = dp__scope_bytes(post->scope, count * sizeof *block, 64);
    if (block == NULL)
        return;
    memset(block, 0, count * sizeof *block);
    post->blocks[post->block_count++] = block;
    for (size_t i = 0; i < count; i++)
        dp__parcel_add(&post->spare, &block[i]);
}

/* NULL: there is no memory. */
static dp__parcel *dp__parcel_new(dp__post *post)
{
    if (post->spare.first == NULL)
        dp__parcels_more(post);
    dp__parcel *parcel = post->spare.first;
    if (parcel == NULL)
        return NULL;
    dp__parcel_remove(parcel);
    memset(parcel, 0, offsetof(dp__parcel, tensor));
    parcel->process = -1;
    parcel->status = DP_PENDING;
    return parcel;
}

static void dp__parcel_free(dp__post *post, dp__parcel *parcel)
{
    parcel->number = 0;
    parcel->stage = NULL;
    dp__parcel_add(&post->spare, parcel);
}

/* Returns the parcel of a message of this context that has not ended for the user; else NULL: the
   message may be of another context, whose memory may be gone. */
static dp__parcel *dp__parcel_of(const dp__post *post, const dp_message *message)
{
    dp__parcel *parcel = NULL;
    for (int i = 0; post != NULL && i < post->block_count && parcel == NULL; i++) {
        uintptr_t place = (uintptr_t)message->state - (uintptr_t)post->blocks[i];
        if (place < dp__parcels_in(i) * sizeof *parcel && place % sizeof *parcel == 0)
            parcel = message->state;
    }
    return parcel != NULL && parcel->number == message->number ? parcel : NULL;
}

static int dp__offer_to(const dp__offer *offer)
{
    return offer->to < 0 ? ~offer->to : offer->to;
}

static bool dp__has_left(const dp__post *post, int process)
{
    return atomic_load(&dp__progress_of(post->job, process)->presence) == DP__LEFT;
}

/* Returns true if a process has died, which the system may have to be asked. */
static bool dp__has_died(const dp__post *post, int process)
{
    return process != post->process && !dp__has_left(post, process) &&
           !dp__is_alive(post->job, process);
}

/* DP__LEFT, DP__DEAD: the process has ended, as far as messages go. */
static int dp__post_presence(const dp__post *post, int process, bool died)
{
    int known = died ? DP__DEAD : atomic_load(&dp__progress_of(post->job, process)->presence);
    bool hears = post->carrier != NULL && post->carrier->presence != NULL;
    return hears ? post->carrier->presence(post, process, known) : known;
}

/* "25 f32 from rank 1 to rank 0 with tag 5" */
static const char *dp__parcel_text(const dp__parcel *parcel, char *text)
{
    char from[32] = "any rank";
    if (parcel->is.from != DP_ANY_RANK)
        snprintf(from, sizeof from, "rank %d", (int)parcel->is.from);
    snprintf(text, DP__PARCEL_TEXT, "%llu %s from %s to rank %d with tag %d",
             (unsigned long long)parcel->is.count, dp_dtype_name((dp_dtype)parcel->is.dtype), from,
             dp__offer_to(&parcel->is), (int)parcel->is.tag);
    return text;
}

/* Says, in the same words on both sides, what does not fit. */
static dp_status dp__parcel_mismatch(const dp__parcel *parcel)
{
    const dp__offer *sent = parcel->receives ? &parcel->other : &parcel->is;
    const dp__offer *expected = parcel->receives ? &parcel->is : &parcel->other;
    return dp_error(DP_ERR_MISMATCH,
                    "rank %d has sent %llu %s to rank %d with tag %d, which expected %llu %s",
                    (int)sent->from, (unsigned long long)sent->count,
                    dp_dtype_name((dp_dtype)sent->dtype), dp__offer_to(sent), (int)sent->tag,
                    (unsigned long long)expected->count, dp_dtype_name((dp_dtype)expected->dtype));
}

/* Its end, which the user is told when he asks. */
static void dp__parcel_end(dp__post *post, dp__parcel *parcel, dp_status status)
{
    dp__parcel_remove(parcel);
    parcel->status = status;
    post->moved = true;
}

/* Ends what was sent: it has arrived, or did not fit, and `other` is what was expected. */
static void dp__parcel_sent(dp__post *post, dp__parcel *send, bool fits)
{
    dp__parcel_end(post, send, fits ? DP_OK : DP_ERR_MISMATCH);
}

static dp_status dp__parcel_unpack(dp__post *post, dp__parcel *receive)
{
    if (receive->stage == NULL)
        return DP_OK;
    const dp_tensor stage = dp__tensor_like(receive->data, (dp_device){0, 0},
                                            (dp_dtype)receive->tensor.dtype, receive->tensor.ndim,
                                            receive->tensor.shape);
    return dp__shared_failure(post->ctx,
                              dp__copy_tensor(post->ctx, &receive->tensor, &stage, NULL));
}

/* All of it is in `data`. Fails if the job does. */
static dp_status dp__parcel_received(dp__post *post, dp__parcel *receive)
{
    dp_status status = dp__parcel_unpack(post, receive);
    receive->is.from = receive->other.from;
    dp__parcel_end(post, receive, status);
    return dp_status_class(status) == DP_CLASS_JOB ? status : DP_OK;
}

/* ==== >>matching ===============================================================================
   Offers and receives meet by rank and tag, each time the oldest first.                         */

static bool dp__offer_is_for(const dp__offer *offer, const dp__offer *expected)
{
    return offer->to == expected->to && offer->tag == expected->tag &&
           (expected->from == DP_ANY_RANK || expected->from == offer->from);
}

/* Both are of this process. */
static dp_status dp__parcels_meet_here(dp__post *post, dp__parcel *receive, dp__parcel *send,
                                       bool fits)
{
    send->other = receive->is;
    if (fits && receive->bytes > 0)
        memmove(receive->data, send->data, receive->bytes);
    dp__parcel_sent(post, send, fits);
    if (fits)
        return dp__parcel_received(post, receive);
    dp__parcel_end(post, receive, DP_ERR_MISMATCH);
    return DP_OK;
}

static dp_status dp__parcels_meet_far(dp__post *post, dp__parcel *receive, dp__parcel *offer,
                                      bool fits)
{
    bool tiny = receive->bytes <= DP__PARCEL_TINY;
    receive->process = offer->process;
    if (fits && receive->bytes > 0 && tiny)
        memcpy(receive->data, offer->tiny, receive->bytes);
    dp__parcel_free(post, offer);
    if (fits && !tiny)
        return post->carrier->fetch(post, receive);
    if (fits)
        DP_TRY(dp__parcel_received(post, receive));
    else
        dp__parcel_end(post, receive, DP_ERR_MISMATCH);
    return post->carrier->answer(post, receive, fits);
}

/* Neither is in a list. */
static dp_status dp__parcels_meet(dp__post *post, dp__parcel *receive, dp__parcel *offer)
{
    bool fits = receive->is.count == offer->is.count && receive->is.dtype == offer->is.dtype;
    receive->other = offer->is;
    return offer->number != 0 ? dp__parcels_meet_here(post, receive, offer, fits)
                              : dp__parcels_meet_far(post, receive, offer, fits);
}

static bool dp__parcels_belong(const dp__parcel *a, const dp__parcel *b)
{
    return a->receives ? dp__offer_is_for(&b->is, &a->is) : dp__offer_is_for(&a->is, &b->is);
}

/* A receive waits for its offer, an offer for its receive. */
static dp_status dp__parcel_match(dp__post *post, dp__parcel *parcel)
{
    dp__parcel *other = parcel->receives ? post->arrived.first : post->expected.first;
    post->moved = true;
    while (other != NULL && !dp__parcels_belong(parcel, other))
        other = other->next;
    if (other == NULL) {
        dp__parcel_add(parcel->receives ? &post->expected : &post->arrived, parcel);
        return DP_OK;
    }
    dp__parcel_remove(other);
    return parcel->receives ? dp__parcels_meet(post, parcel, other)
                            : dp__parcels_meet(post, other, parcel);
}

/* From another process, which a carrier has heard. */
static dp_status dp__offer_arrived(dp__post *post, int process, const dp__offer *is,
                                   const char *tiny)
{
    dp__parcel *offer = dp__parcel_new(post);
    if (offer == NULL)
        return dp__shared_failure(
            post->ctx, dp_error(DP_ERR_NO_MEMORY, "no memory for what process %d sends", process));
    offer->is = *is;
    offer->process = process;
    memcpy(offer->tiny, tiny, sizeof offer->tiny);
    return dp__parcel_match(post, offer);
}

/* ==== >>lines ==================================================================================
   Between processes of one machine. Each has, behind its part of the board, a line for every other
   one, which only it writes. It holds its last offer, and counts: offers made and offers taken out
   of the other's line, after which there is room for the next one; pieces made and pieces taken.

   What lies in the heap is copied from there by the receiver, or to there by the sender. The rest
   goes in pieces through a room in the sender's heap, one for each process that it sends to, taken
   from the heap when it is first needed: so a process that computes keeps back only what is for
   itself. Of the messages that need the room the receiver wants one at a time.

   An answer is written into memory of the sender's, which each message has for itself until it is
   done: so it never waits for anything. But if a message was expected, and is done as soon as it is
   heard of, the line says so: another one would cost as much as the whole message.              */

enum {
    DP__ROOM_PIECE = 64 << 10, /* that fits into an L2 cache twice */
    DP__ROOM_PIECES = 4,
    DP__ROOM_PIECE_ALONE = 2 << 10, /* where there is no heap */
    DP__ANSWERS = 64,               /* taken from the heap at once */
    DP__ANSWERS_ALONE = 256
};

typedef enum dp__answered {
    DP__ANSWER_NONE,
    DP__ANSWER_WANTED,
    DP__ANSWER_DONE,
    DP__ANSWER_REFUSED
} dp__answered;

#define DP__HEARD_DONE UINT64_MAX

typedef struct dp__answer {
    _Alignas(64) atomic_uint what;
    int32_t dtype;
    uint64_t count;          /* refused: what was expected */
    uint64_t place;          /* wanted: where to write it; SIZE_MAX: through the room */
    struct dp__answer *next; /* the sender's, of those that wait for no answer */
} dp__answer;

typedef struct dp__pipe {
    _Alignas(128) atomic_uint offers;
    atomic_uint heard; /* of the other's, times 2; plus 1: and the last one is done */
    atomic_uint made, took;
    _Atomic uint64_t offer[DP__OFFER_WORDS];
    _Alignas(64) char tiny[DP__PARCEL_TINY];
} dp__pipe;
_Static_assert(sizeof(dp__pipe) == 128, "it is two lines of a cache");

typedef struct dp__desk { /* of a process */
    _Alignas(128) atomic_uint bell;
    atomic_uint sleepers; /* others ring if it sleeps */
    dp__pipe pipes[];     /* to every process */
} dp__desk;

typedef struct dp__desk_peer {
    unsigned offers, heard, made, took; /* the own counts; offers and heard times 2 */
    unsigned known;                     /* the other's `heard` */
    dp__parcel *last;                   /* that was offered, and may not have been heard */
    uint64_t hears;                     /* the reply of the offer that is being heard */
    dp__parcels queue;                  /* to be offered */
    dp__parcels wanted;                 /* to be received in pieces, one after the other */
    char *room;
} dp__desk_peer;

typedef struct dp__desks {
    dp__desk *own;
    dp__answer *answers; /* that are free */
    size_t piece;
    unsigned missed;
    bool spin;
    dp__desk_peer peers[];
} dp__desks;

static size_t dp__desk_bytes(int process_count)
{
    return sizeof(dp__desk) + (size_t)process_count * sizeof(dp__pipe);
}

/* Without a heap answers and rooms lie behind the lines. */
static dp__desk_sizes dp__desk_sizes_of(int process_count)
{
    size_t desk = dp__desk_bytes(process_count);
    size_t rooms = (size_t)process_count * DP__ROOM_PIECES * DP__ROOM_PIECE_ALONE;
    return (dp__desk_sizes){desk, desk + DP__ANSWERS_ALONE * sizeof(dp__answer) + rooms};
}

static dp__desks *dp__desks_here(const dp__post *post)
{
    return post->carried;
}

/* Behind a process' entries. */
static dp__desk *dp__desk_of(const dp__post *post, int process)
{
    size_t entries = (size_t)DP__LANES * DP__KEPT * sizeof(dp__entry);
    return (void *)(dp__behind_board(post->job, process) + entries);
}

/* From this process to another one, and back. */
static dp__pipe *dp__pipe_to(const dp__post *post, int process)
{
    return &dp__desks_here(post)->own->pipes[process];
}

static dp__pipe *dp__pipe_from(const dp__post *post, int process)
{
    return &dp__desk_of(post, process)->pipes[post->process];
}

static void *dp__place_at(const dp__post *post, uint64_t place)
{
    return (char *)post->job->shared.data + place;
}

/* For others; SIZE_MAX: it does not lie in the heap. */
static uint64_t dp__place_of(const dp__post *post, const void *data, size_t bytes)
{
    bool there = dp__heap_place(&post->ctx->heap, data, bytes) != SIZE_MAX;
    return there ? (uint64_t)((const char *)data - (const char *)post->job->shared.data) : SIZE_MAX;
}

/* A word of this process changes, for which another one may wait. */
static void dp__pipe_tell(const dp__post *post, int process, atomic_uint *word, unsigned value)
{
    dp__desk *desk = dp__desk_of(post, process);
    atomic_store(word, value);
    if (atomic_load(&desk->sleepers) == 0)
        return;
    atomic_fetch_add(&desk->bell, 1);
    dp__os_word_wake(&desk->bell);
}

/* ---- sending --------------------------------------------------------------------------------- */

static void dp__answers_add(dp__desks *desks, dp__answer *answers, int count)
{
    for (int i = 0; i < count; i++) {
        answers[i].next = desks->answers;
        desks->answers = &answers[i];
    }
}

static dp_status dp__answer_take(dp__post *post, dp__answer **out)
{
    dp__desks *desks = dp__desks_here(post);
    void *more = NULL;
    if (desks->answers == NULL && post->ctx->heap.shared == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for more than %d messages at once",
                        (int)DP__ANSWERS_ALONE);
    if (desks->answers == NULL) {
        DP_TRY(dp__heap_take(post->ctx, &post->ctx->heap, DP__ANSWERS * sizeof(dp__answer), 64,
                             &more));
        dp__answers_add(desks, more, DP__ANSWERS);
    }
    *out = desks->answers;
    desks->answers = (*out)->next;
    atomic_store_explicit(&(*out)->what, DP__ANSWER_NONE, memory_order_relaxed);
    return DP_OK;
}

static dp_status dp__desk_room(dp__post *post, dp__desk_peer *peer)
{
    void *room = NULL;
    if (peer->room == NULL)
        DP_TRY(dp__heap_take(post->ctx, &post->ctx->heap, (size_t)DP__ROOM_PIECES * DP__ROOM_PIECE,
                             64, &room));
    peer->room = room != NULL ? room : peer->room;
    return DP_OK;
}

static dp_status dp__desk_prepare(dp__post *post, dp__parcel *send)
{
    dp__answer *answer = NULL;
    dp__desk_peer *peer = &dp__desks_here(post)->peers[send->process];
    send->is.room = SIZE_MAX;
    send->is.place = dp__place_of(post, send->data, send->bytes);
    if (send->bytes > DP__PARCEL_TINY && send->is.place == SIZE_MAX) {
        DP_TRY(dp__desk_room(post, peer));
        send->is.room = (uint64_t)(peer->room - (char *)post->job->shared.data);
    }
    DP_TRY(dp__answer_take(post, &answer));
    send->wire = answer;
    send->is.reply = (uint64_t)((char *)answer - (char *)post->job->shared.data);
    return DP_OK;
}

static void dp__desk_discard(dp__post *post, dp__parcel *send)
{
    if (send->wire != NULL)
        dp__answers_add(dp__desks_here(post), send->wire, 1);
}

/* If the other one has heard the last offer. */
static void dp__offer_next(dp__post *post, int process)
{
    dp__desk_peer *peer = &dp__desks_here(post)->peers[process];
    dp__parcel *send = peer->queue.first;
    dp__pipe *pipe = dp__pipe_to(post, process);
    if (send == NULL || peer->known / 2 != peer->offers / 2)
        return;
    dp__parcel_remove(send);
    dp__parcel_add(&post->offered, send);
    if (send->bytes > 0 && send->bytes <= DP__PARCEL_TINY)
        memcpy(pipe->tiny, send->data, send->bytes);
    dp__words_store(pipe->offer, &send->is, DP__OFFER_WORDS);
    peer->offers += 2;
    peer->last = send;
    dp__pipe_tell(post, process, &pipe->offers, peer->offers);
    post->moved = true;
}

/* The last offer was, and may be done. */
static void dp__offer_heard(dp__post *post, int process)
{
    dp__desk_peer *peer = &dp__desks_here(post)->peers[process];
    unsigned heard = atomic_load(&dp__pipe_from(post, process)->heard);
    if (heard == peer->known)
        return;
    peer->known = heard;
    if (heard % 2 == 1)
        dp__parcel_sent(post, peer->last, true);
}

static dp_status dp__desk_offer(dp__post *post, dp__parcel *send)
{
    dp__parcel_add(&dp__desks_here(post)->peers[send->process].queue, send);
    dp__offer_next(post, send->process);
    return DP_OK;
}

/* As far as there is room. */
static void dp__pieces_give(dp__post *post, dp__parcel *send, const dp__answer *answer)
{
    dp__desks *desks = dp__desks_here(post);
    dp__desk_peer *peer = &desks->peers[send->process];
    dp__pipe *pipe = dp__pipe_to(post, send->process);
    const dp__pipe *back = dp__pipe_from(post, send->process);
    bool direct = answer->place != SIZE_MAX;
    while (send->moved < send->bytes &&
           (direct || peer->made - atomic_load(&back->took) < DP__ROOM_PIECES)) {
        size_t left = send->bytes - send->moved;
        size_t bytes = direct || left < desks->piece ? left : desks->piece;
        char *to = direct ? dp__place_at(post, answer->place)
                          : peer->room + peer->made % DP__ROOM_PIECES * desks->piece;
        memcpy(to, send->data + send->moved, bytes);
        send->moved += bytes;
        dp__pipe_tell(post, send->process, &pipe->made, ++peer->made);
        post->moved = true;
    }
}

static void dp__answer_read(dp__post *post, dp__parcel *send)
{
    const dp__answer *answer = send->wire;
    unsigned what = atomic_load(&answer->what);
    if (what == DP__ANSWER_WANTED)
        dp__pieces_give(post, send, answer);
    if (what < DP__ANSWER_DONE)
        return;
    send->other = send->is;
    send->other.dtype = what == DP__ANSWER_REFUSED ? answer->dtype : send->is.dtype;
    send->other.count = what == DP__ANSWER_REFUSED ? answer->count : send->is.count;
    dp__parcel_sent(post, send, what == DP__ANSWER_DONE);
}

/* ---- receiving ------------------------------------------------------------------------------- */

static void dp__answer_write(dp__post *post, const dp__parcel *receive, dp__answered what)
{
    dp__answer *answer = dp__place_at(post, receive->other.reply);
    answer->dtype = receive->is.dtype;
    answer->count = receive->is.count;
    answer->place = dp__place_of(post, receive->data, receive->bytes);
    dp__pipe_tell(post, receive->process, &answer->what, what);
}

static dp_status dp__desk_answer(dp__post *post, const dp__parcel *receive, bool fits)
{
    dp__desk_peer *peer = &dp__desks_here(post)->peers[receive->process];
    if (fits && receive->other.reply == peer->hears)
        peer->hears = DP__HEARD_DONE;
    else
        dp__answer_write(post, receive, fits ? DP__ANSWER_DONE : DP__ANSWER_REFUSED);
    return DP_OK;
}

static dp_status dp__desk_fetch(dp__post *post, dp__parcel *receive)
{
    dp__parcels *wanted = &dp__desks_here(post)->peers[receive->process].wanted;
    if (receive->other.place != SIZE_MAX) {
        memcpy(receive->data, dp__place_at(post, receive->other.place), receive->bytes);
        DP_TRY(dp__parcel_received(post, receive));
        return dp__desk_answer(post, receive, true);
    }
    dp__parcel_add(wanted, receive);
    if (wanted->first == receive)
        dp__answer_write(post, receive, DP__ANSWER_WANTED);
    return DP_OK;
}

/* Takes the pieces that have been made of the one that is wanted. */
static void dp__pieces_take(dp__post *post, int process, dp__parcel *receive)
{
    dp__desks *desks = dp__desks_here(post);
    dp__desk_peer *peer = &desks->peers[process];
    dp__pipe *pipe = dp__pipe_to(post, process);
    const dp__pipe *from = dp__pipe_from(post, process);
    bool direct = dp__place_of(post, receive->data, receive->bytes) != SIZE_MAX;
    while (receive->moved < receive->bytes && peer->took != atomic_load(&from->made)) {
        size_t left = receive->bytes - receive->moved;
        size_t bytes = direct || left < desks->piece ? left : desks->piece;
        const char *room = dp__place_at(post, receive->other.room);
        if (!direct)
            memcpy(receive->data + receive->moved,
                   room + peer->took % DP__ROOM_PIECES * desks->piece, bytes);
        receive->moved += bytes;
        dp__pipe_tell(post, process, &pipe->took, ++peer->took);
        post->moved = true;
    }
}

static dp_status dp__wanted_advance(dp__post *post, int process)
{
    dp__parcels *wanted = &dp__desks_here(post)->peers[process].wanted;
    dp__parcel *receive = wanted->first;
    if (receive == NULL)
        return DP_OK;
    dp__pieces_take(post, process, receive);
    if (receive->moved < receive->bytes)
        return DP_OK;
    DP_TRY(dp__parcel_received(post, receive));
    DP_TRY(dp__desk_answer(post, receive, true));
    if (wanted->first != NULL)
        dp__answer_write(post, wanted->first, DP__ANSWER_WANTED);
    return DP_OK;
}

static dp_status dp__offer_hear(dp__post *post, int process)
{
    dp__desk_peer *peer = &dp__desks_here(post)->peers[process];
    const dp__pipe *from = dp__pipe_from(post, process);
    char tiny[DP__PARCEL_TINY];
    dp__offer offer;
    if (atomic_load(&from->offers) == peer->heard)
        return DP_OK;
    dp__words_load(&offer, from->offer, DP__OFFER_WORDS);
    memcpy(tiny, from->tiny, sizeof tiny);
    peer->heard += 2;
    peer->hears = offer.reply;
    dp_status status = dp__offer_arrived(post, process, &offer, tiny);
    dp__pipe_tell(post, process, &dp__pipe_to(post, process)->heard,
                  peer->heard + (peer->hears == DP__HEARD_DONE));
    peer->hears = 0;
    return status;
}

static dp_status dp__desk_advance(dp__post *post)
{
    for (int i = 1; i < post->process_count; i++) {
        int p = (post->process + i) % post->process_count;
        DP_TRY(dp__offer_hear(post, p));
        dp__offer_heard(post, p);
        DP_TRY(dp__wanted_advance(post, p));
        dp__offer_next(post, p);
    }
    for (dp__parcel *send = post->offered.first, *next; send != NULL; send = next) {
        next = send->next;
        dp__answer_read(post, send);
    }
    return DP_OK;
}

static bool dp__desk_moved(void *what)
{
    dp__post *post = what;
    if (post->failed == DP_OK)
        post->failed = dp__desk_advance(post);
    return post->moved || post->failed != DP_OK;
}

static dp_status dp__post_rest(void *what, dp__wait *wait);

static dp_status dp__desk_wait(dp__post *post)
{
    dp__desks *desks = dp__desks_here(post);
    const dp__watch watch = {.there = dp__desk_moved,
                             .rest = dp__post_rest,
                             .what = post,
                             .word = &desks->own->bell,
                             .sleepers = &desks->own->sleepers,
                             .missed = &desks->missed,
                             .look_ns = post->job->look_ns};
    DP_TRY(dp__watch_until(&watch, desks->spin));
    return post->failed;
}

static const dp__carrier dp__desk_carrier = {
    .prepare = dp__desk_prepare,
    .discard = dp__desk_discard,
    .offer = dp__desk_offer,
    .fetch = dp__desk_fetch,
    .answer = dp__desk_answer,
    .advance = dp__desk_advance,
    .wait = dp__desk_wait,
};

static dp_status dp__desk_open(dp__post *post)
{
    size_t count = (size_t)post->process_count;
    size_t bytes = sizeof(dp__desks) + count * sizeof(dp__desk_peer);
    dp__desks *desks = dp__scope_bytes(post->scope, bytes, 64);
    if (desks == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for messages");
    memset(desks, 0, bytes);
    desks->own = dp__desk_of(post, post->process);
    desks->piece = DP__ROOM_PIECE;
    desks->spin = dp__job_has_cores(post->job, post->process_count);
    post->carried = desks;
    post->carrier = &dp__desk_carrier;
    if (post->ctx->heap.shared != NULL)
        return DP_OK;
    char *behind = (char *)desks->own + dp__desk_bytes(post->process_count);
    dp__answers_add(desks, (void *)behind, DP__ANSWERS_ALONE);
    behind += DP__ANSWERS_ALONE * sizeof(dp__answer);
    desks->piece = DP__ROOM_PIECE_ALONE;
    for (size_t p = 0; p < count; p++)
        desks->peers[p].room = behind + p * DP__ROOM_PIECES * DP__ROOM_PIECE_ALONE;
    return DP_OK;
}

/* ==== >>slips ==================================================================================
   Where no memory is shared, offers and answers are slips: small, and in order. The data of what is
   wanted follows.                                                                               */

static dp_status dp__slip_offered(dp__post *post, const dp__parcel *send)
{
    dp__slip slip = {.kind = DP__SLIP_OFFERED, .is = send->is};
    if (send->bytes > 0 && send->bytes <= sizeof slip.tiny)
        memcpy(slip.tiny, send->data, send->bytes);
    return post->carrier->slip(post, send->process, &slip);
}

static dp_status dp__slip_offer(dp__post *post, dp__parcel *send)
{
    send->is.reply = send->number;
    dp__parcel_add(&post->offered, send);
    return dp__slip_offered(post, send);
}

static dp_status dp__slip_reply(dp__post *post, const dp__parcel *receive, dp__slip_kind kind)
{
    dp__slip slip = {.kind = (int32_t)kind, .is = receive->is};
    slip.is.reply = receive->other.reply;
    return post->carrier->slip(post, receive->process, &slip);
}

static dp_status dp__slip_answer(dp__post *post, const dp__parcel *receive, bool fits)
{
    return dp__slip_reply(post, receive, fits ? DP__SLIP_DONE : DP__SLIP_REFUSED);
}

static dp_status dp__slip_fetch(dp__post *post, dp__parcel *receive)
{
    dp__parcel_add(&post->fetched, receive);
    DP_TRY(post->carrier->data(post, receive));
    return dp__slip_reply(post, receive, DP__SLIP_WANTED);
}

/* The data is here. */
static dp_status dp__slip_fetched(dp__post *post, dp__parcel *receive)
{
    DP_TRY(dp__parcel_received(post, receive));
    return dp__slip_answer(post, receive, true);
}

static dp_status dp__slip_read(dp__post *post, int from, const dp__slip *slip)
{
    dp__parcel *send = post->offered.first;
    if (slip->kind == DP__SLIP_OFFERED)
        return dp__offer_arrived(post, from, &slip->is, slip->tiny);
    while (send != NULL && (send->number != slip->is.reply || send->process != from))
        send = send->next;
    if (send == NULL)
        return dp_error(DP_ERR_INTERNAL, "process %d answers what was never sent", from);
    if (slip->kind == DP__SLIP_WANTED)
        return post->carrier->data(post, send);
    send->other = slip->is;
    dp__parcel_sent(post, send, slip->kind == DP__SLIP_DONE);
    return DP_OK;
}

/* ==== >>channels ================================================================================
   Two connections to each process (>>office in dp/tcp.h). A process sends on its own, which it
   makes for the first message; the answers come back there. Until the other one has proved what it
   is the connection may be lost, by the network for example: then it is made again, and all offers
   are sent anew. A process that takes nothing any more may have said something before, which is
   still to be read. Who closes says so at the end of both; where a connection ends without that,
   who expects something from its process expects it in vain.                                    */

enum {
    DP__CHANNEL_FLUSH_MS = 200,
    DP__CHANNEL_ONCE = 4 << 20, /* bytes, then others have their turn, and who only tests goes on */
    DP__CHANNEL_CALL_MS = 100,  /* what a network needs for a connection; else it comes later */
    DP__CHANNEL_AGAIN_MS = 20,
    DP__CHANNEL_NEWS_MS = 300, /* after an end without a word: others may still say why */
    DP__CHANNEL_GREET_MS = 1   /* so often who has come is looked at, until it is known who it is */
};

typedef struct dp__sheet { /* on its way */
    struct dp__sheet *next;
    const dp__parcel *send; /* whose data follows; or NULL */
    size_t sent;            /* bytes, of both */
    dp__slip slip;
} dp__sheet;

typedef struct dp__channel {
    int fd;            /* -1: it has not been made, or has ended */
    bool deaf;         /* it takes nothing any more */
    bool met;          /* the other end has proved what it is */
    bool left;         /* and has said that it goes */
    uint64_t lost_ns;  /* its end is believed then, where that was not said */
    dp__call *call;    /* this process has called, and was not answered yet */
    uint64_t again_ns; /* it calls again then, and sends all offers anew; 0: it need not */
    dp__sheet *first, *last;
    dp__slip in;
    size_t got;          /* bytes of `in` */
    dp__parcel *filling; /* whose data comes; or NULL */
} dp__channel;

typedef struct dp__channels {
    dp__office *office;
    dp__sheet *spare;
    dp__os_watch *watch; /* channels that there are, and the office */
    int *watched;        /* which channels */
    int count;
    dp__channel of[]; /* to each process this one's own, then each other's own */
} dp__channels;

static dp__channels *dp__channels_of(const dp__post *post)
{
    return post->carried;
}

/* Returns the channel for what a process sends, or for its `answers`. */
static dp__channel *dp__channel_to(const dp__post *post, int process, bool answers)
{
    return &dp__channels_of(post)->of[process + (answers ? post->process_count : 0)];
}

static void dp__sheet_give(dp__post *post, dp__sheet *sheet)
{
    dp__channels *channels = dp__channels_of(post);
    if (sheet == NULL)
        return;
    sheet->next = channels->spare;
    channels->spare = sheet;
}

static dp_status dp__sheet_take(dp__post *post, dp__sheet **out)
{
    dp__channels *channels = dp__channels_of(post);
    dp__sheet *sheet = channels->spare;
    if (sheet != NULL)
        channels->spare = sheet->next;
    else
        sheet = dp__os_alloc(sizeof *sheet, 64, NULL);
    if (sheet == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a message");
    *sheet = (dp__sheet){.send = NULL};
    *out = sheet;
    return DP_OK;
}

static void dp__channel_drop(dp__post *post, dp__channel *channel)
{
    while (channel->first != NULL) {
        dp__sheet *sheet = channel->first;
        channel->first = sheet->next;
        dp__sheet_give(post, sheet);
    }
}

static void dp__channel_deafen(dp__post *post, dp__channel *channel)
{
    channel->deaf = true;
    dp__channel_drop(post, channel);
}

static void dp__channel_end(dp__post *post, dp__channel *channel)
{
    int fd = channel->fd;
    dp__channel_deafen(post, channel);
    channel->fd = -1; /* before a child of fork could close what has the number next */
    dp__os_close(fd);
    dp__os_free(channel->call, 0, NULL);
    channel->call = NULL;
}

static bool dp__channel_calls(const dp__channel *channel)
{
    return channel->call != NULL && !channel->call->asked;
}

/* A connection that nobody has answered on: a network may have lost it, or nobody is there. */
static void dp__channel_fail(dp__post *post, int process)
{
    dp__channel *channel = dp__channel_to(post, process, false);
    dp__channel_end(post, channel);
    channel->deaf = dp__has_left(post, process);
    channel->again_ns = channel->deaf ? 0 : dp__os_after_ms(DP__CHANNEL_AGAIN_MS);
}

static void dp__channel_ask(dp__post *post, int process)
{
    const dp__channel *channel = dp__channel_to(post, process, false);
    const dp__port *port = &dp__channels_of(post)->office->port;
    if (!dp__call_ask(channel->call, port, process, channel->fd))
        dp__channel_fail(post, process);
}

/* There is a way to that process, or will be: within so long what is said goes at once. */
DP__COLD static dp_status dp__channel_reach(dp__post *post, int process, int ms)
{
    dp__channel *channel = dp__channel_to(post, process, false);
    if (channel->fd >= 0 || channel->deaf || channel->again_ns != 0)
        return DP_OK;
    channel->call = dp__os_alloc(sizeof *channel->call, 64, NULL);
    if (channel->call == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a message");
    *channel->call = (dp__call){.asked = false};
    dp_status status = dp__office_call(dp__channels_of(post)->office, process, &channel->fd);
    if (channel->fd < 0)
        dp__channel_fail(post, process);
    else if (dp__os_ready(channel->fd, DP__CAN_WRITE, ms))
        dp__channel_ask(post, process);
    if (status != DP_OK) /* nobody has heard of it */
        channel->again_ns = 0;
    return status;
}

/* ==== >>traffic =================================================================================
   On its own connection a process sends offers, with data between them, what was wanted first
   before the rest.                                                                              */

/* As much as goes now. */
static void dp__channel_send(dp__post *post, dp__channel *channel)
{
    size_t once = 0;
    while (channel->first != NULL && channel->fd >= 0 && !dp__channel_calls(channel) &&
           once < DP__CHANNEL_ONCE) {
        dp__sheet *sheet = channel->first;
        bool data = sheet->sent >= sizeof sheet->slip;
        size_t all = sizeof sheet->slip + (sheet->send != NULL ? sheet->send->bytes : 0);
        const char *from = data ? sheet->send->data + (sheet->sent - sizeof sheet->slip)
                                : (const char *)&sheet->slip + sheet->sent;
        ptrdiff_t sent = dp__os_send(channel->fd, from,
                                     data ? all - sheet->sent : sizeof sheet->slip - sheet->sent);
        if (sent < 0 && channel->call == NULL) /* else it is called again */
            dp__channel_deafen(post, channel);
        if (sent <= 0)
            return;
        sheet->sent += (size_t)sent;
        once += (size_t)sent;
        post->flows = post->flows || (data && sheet->send->awaited);
        if (sheet->sent < all)
            continue;
        channel->first = sheet->next;
        dp__sheet_give(post, sheet);
    }
}

static void dp__channel_add(dp__post *post, dp__channel *channel, dp__sheet *sheet)
{
    bool alone = channel->first == NULL;
    if (channel->deaf) {
        dp__sheet_give(post, sheet);
        return;
    }
    sheet->next = NULL;
    if (alone)
        channel->first = sheet;
    else
        channel->last->next = sheet;
    channel->last = sheet;
    if (alone)
        dp__channel_send(post, channel);
}

static dp_status dp__channel_slip(dp__post *post, int process, const dp__slip *slip)
{
    dp__sheet *sheet = NULL;
    DP_TRY(dp__shared_failure(post->ctx, dp__sheet_take(post, &sheet)));
    sheet->slip = *slip;
    dp__channel_add(post, dp__channel_to(post, process, slip->kind != DP__SLIP_OFFERED), sheet);
    return DP_OK;
}

static dp_status dp__channel_prepare(dp__post *post, dp__parcel *send)
{
    dp__sheet *sheet = NULL;
    DP_TRY(dp__channel_reach(post, send->process, DP__CHANNEL_CALL_MS));
    DP_TRY(dp__sheet_take(post, &sheet));
    send->wire = sheet;
    return DP_OK;
}

static void dp__channel_discard(dp__post *post, dp__parcel *parcel)
{
    dp__sheet_give(post, parcel->wire);
    parcel->wire = NULL;
}

/* Sends data; what is received comes by itself. */
static dp_status dp__channel_data(dp__post *post, dp__parcel *parcel)
{
    dp__sheet *sheet = parcel->wire;
    if (parcel->receives)
        return DP_OK;
    if (sheet == NULL)
        return dp_error(DP_ERR_INTERNAL, "process %d wants data twice", parcel->process);
    parcel->wire = NULL;
    sheet->slip = (dp__slip){.kind = DP__SLIP_DATA, .is = parcel->is};
    sheet->send = parcel;
    dp__channel_add(post, dp__channel_to(post, parcel->process, false), sheet);
    return DP_OK;
}

/* Takes a farewell: a process that goes because the job has failed may be the first to say so. */
static dp_status dp__slip_left(const dp__post *post, const dp__slip *slip)
{
    dp__job *job = post->job;
    int rank = slip->is.from;
    if (slip->is.tag == DP_OK || rank < 0 || rank >= job->firsts[job->process_count])
        return DP_OK;
    DP_TRY(dp__job_heard(job)); /* the whole sentence may be here already */
    return dp__job_fail(job, (dp_status)slip->is.tag, dp__process_of(job, rank), "%.*s",
                        (int)sizeof slip->tiny, slip->tiny);
}

/* A slip has come, or (DATA) what follows it is to come. */
static dp_status dp__channel_read(dp__post *post, dp__channel *channel, int process)
{
    dp__parcel *receive = post->fetched.first;
    channel->got = 0;
    channel->left = channel->in.kind == DP__SLIP_LEFT;
    if (channel->left)
        return dp__slip_left(post, &channel->in);
    if (channel->in.kind != DP__SLIP_DATA)
        return dp__slip_read(post, process, &channel->in);
    while (receive != NULL &&
           (receive->process != process || receive->other.reply != channel->in.is.reply))
        receive = receive->next;
    if (receive == NULL)
        return dp_error(DP_ERR_INTERNAL, "process %d sends what nobody wants", process);
    channel->filling = receive;
    return DP_OK;
}

/* Receives what has come. */
static dp_status dp__channel_receive(dp__post *post, dp__channel *channel, int process)
{
    ptrdiff_t got;
    for (size_t once = 0; once < DP__CHANNEL_ONCE; once += (size_t)got) {
        dp__parcel *receive = channel->filling;
        size_t left = receive != NULL ? receive->bytes - receive->moved
                                      : sizeof channel->in - channel->got;
        got = dp__os_receive(channel->fd,
                             receive != NULL ? receive->data + receive->moved
                                             : (char *)&channel->in + channel->got,
                             left);
        if (got < 0) {
            channel->lost_ns = dp__os_after_ms(DP__CHANNEL_NEWS_MS);
            dp__channel_end(post, channel);
        }
        if (got <= 0)
            return DP_OK;
        post->flows = post->flows || (receive != NULL && receive->awaited);
        if (receive != NULL)
            receive->moved += (size_t)got;
        else
            channel->got += (size_t)got;
        if ((size_t)got < left)
            continue;
        channel->filling = NULL;
        DP_TRY(receive != NULL ? dp__slip_fetched(post, receive)
                               : dp__channel_read(post, channel, process));
    }
    return DP_OK;
}

static dp__os_watch dp__channel_watch(const dp__channel *channel)
{
    bool calls = dp__channel_calls(channel), sends = calls || channel->first != NULL;
    return (dp__os_watch){
        .fd = channel->fd,
        .events = (short)((calls ? 0 : DP__CAN_READ) | (sends ? DP__CAN_WRITE : 0))};
}

/* Reads what comes, once the other end has proved what it is. */
static dp_status dp__channel_hear(dp__post *post, dp__channel *channel, int process)
{
    if (channel->call != NULL) {
        const dp__port *port = &dp__channels_of(post)->office->port;
        dp_status status = dp__call_hear(channel->call, port, channel->fd);
        if (status == DP_ERR_REMOTE)
            dp__channel_fail(post, process);
        if (status != DP_OK)
            return DP_OK;
        dp__os_free(channel->call, 0, NULL);
        channel->call = NULL;
        channel->met = true;
    }
    return dp__channel_receive(post, channel, process);
}

static dp_status dp__channel_go_on(dp__post *post, int place, int events)
{
    dp__channel *channel = &dp__channels_of(post)->of[place];
    bool calls = dp__channel_calls(channel);
    if (calls && events != 0)
        dp__channel_ask(post, place);
    if ((events & DP__CAN_WRITE) != 0)
        dp__channel_send(post, channel);
    bool comes = !calls && (events & ~DP__CAN_WRITE) != 0 && channel->fd >= 0;
    return comes ? dp__channel_hear(post, channel, place % post->process_count) : DP_OK;
}

/* Those that call. */
DP__COLD static dp_status dp__channels_let_in(dp__post *post)
{
    dp__channels *channels = dp__channels_of(post);
    int before = channels->office->port.server.taken;
    DP_TRY(dp__shared_failure(post->ctx, dp__office_look(channels->office)));
    bool some = channels->office->port.server.taken != before;
    for (int p = 0; p < post->process_count && some; p++) {
        int fd = dp__office_take(channels->office, p);
        if (fd >= 0)
            *dp__channel_to(post, p, true) = (dp__channel){.fd = fd, .met = true};
    }
    return DP_OK;
}

/* Sends all offers again, as those from before the other end had proved what it is may be lost. */
DP__COLD static dp_status dp__channel_again(dp__post *post, int process)
{
    dp__channel *channel = dp__channel_to(post, process, false);
    if (dp__os_ms_until(channel->again_ns) > 0)
        return DP_OK;
    channel->again_ns = 0;
    dp__channel_drop(post, channel);
    if (dp__channel_reach(post, process, 0) != DP_OK)
        channel->again_ns = dp__os_after_ms(DP__CHANNEL_AGAIN_MS);
    for (dp__parcel *send = post->offered.first; send != NULL; send = send->next)
        if (send->process == process && channel->fd >= 0)
            DP_TRY(dp__slip_offered(post, send));
    return DP_OK;
}

static int dp__channels_watch(dp__channels *channels)
{
    int count = 0;
    for (int i = 0; i < channels->count; i++) {
        if (channels->of[i].fd < 0)
            continue;
        channels->watch[count] = dp__channel_watch(&channels->of[i]);
        channels->watched[count++] = i;
    }
    return count;
}

/* Wait at most so long until something can move, and move it. */
static dp_status dp__channels_look(dp__post *post, int timeout_ms)
{
    dp__channels *channels = dp__channels_of(post);
    const dp__server *server = &channels->office->port.server;
    bool greets = server->pending_count > 0, full = server->full;
    for (int p = 0; p < post->process_count; p++)
        if (channels->of[p].again_ns != 0)
            DP_TRY(dp__channel_again(post, p));
    int count = dp__channels_watch(channels);
    dp__os_watch *watch = channels->watch, *door = watch + count;
    *door = (dp__os_watch){.fd = full ? -1 : server->listener, .events = DP__CAN_READ};
    if (greets && timeout_ms > DP__CHANNEL_GREET_MS)
        timeout_ms = DP__CHANNEL_GREET_MS;
    int some = dp__os_poll(watch, count + 1, timeout_ms);
    for (int i = 0; i < count && some > 0; i++)
        DP_TRY(dp__channel_go_on(post, channels->watched[i], watch[i].revents));
    return greets || full || door->revents != 0 ? dp__channels_let_in(post) : DP_OK;
}

static dp_status dp__channels_advance(dp__post *post)
{
    return dp__channels_look(post, 0);
}

static dp_status dp__channels_wait(dp__post *post)
{
    dp__wait wait = {0};
    uint64_t begun_ns = dp__os_now_ns();
    for (;;) {
        DP_TRY(dp__channels_look(post, dp__cable_rest_ms(begun_ns)));
        if (post->moved)
            return DP_OK;
        DP_TRY(dp__post_rest(post, &wait));
    }
}

/* Why this process goes, if the job has failed: the sentence, or, if that is too long, whose fault
   it is. */
static dp__slip dp__last_slip(const dp__post *post)
{
    const dp__board *board = post->job->board;
    dp__slip slip = {.kind = DP__SLIP_LEFT};
    char who[DP__WHO_BYTES];
    if (atomic_load(&board->failed) != 2)
        return slip;
    slip.is.tag = board->status;
    slip.is.from = board->rank;
    if (strlen(board->text) < sizeof slip.tiny)
        strcpy(slip.tiny, board->text);
    else
        snprintf(slip.tiny, sizeof slip.tiny, "%s is to blame",
                 dp__who(post->job, dp__process_of(post->job, board->rank), who));
    return slip;
}

/* Answers that are on their way still go. What this process has sent may lie in memory that has
   gone already: where that is under way, nothing more can be said. */
static void dp__channel_leave(dp__post *post, dp__channel *channel, bool answers,
                              const dp__slip *last, uint64_t until_ns)
{
    while (answers && channel->first != NULL && dp__os_ms_until(until_ns) > 0) {
        dp__os_ready(channel->fd, DP__CAN_WRITE, dp__os_ms_until(until_ns));
        dp__channel_send(post, channel);
    }
    bool between = channel->first == NULL || channel->first->sent == 0;
    if (channel->fd >= 0 && between && !dp__channel_calls(channel))
        (void)dp__wire_send(channel->fd, last, sizeof *last, until_ns);
    dp__channel_end(post, channel);
}

DP__COLD static void dp__channels_close(dp__post *post)
{
    dp__channels *channels = dp__channels_of(post);
    const dp__slip last = dp__last_slip(post);
    uint64_t until_ns = dp__os_after_ms(DP__CHANNEL_FLUSH_MS);
    for (int i = 0; i < channels->count; i++)
        dp__channel_leave(post, &channels->of[i], i >= post->process_count, &last, until_ns);
    for (int i = 0; i < post->block_count; i++)
        for (size_t k = 0; k < dp__parcels_in(i); k++)
            dp__channel_discard(post, &post->blocks[i][k]);
    while (channels->spare != NULL) {
        dp__sheet *sheet = channels->spare;
        channels->spare = sheet->next;
        dp__os_free(sheet, 0, NULL);
    }
}

static void dp__channels_let_go(dp__post *post)
{
    dp__channels *channels = dp__channels_of(post);
    for (int i = 0; i < channels->count; i++)
        dp__os_drop(&channels->of[i].fd);
}

/* Returns the presence of a process, by what has come on connections: that is in order with the
   last answers, and needs nobody to pass it on. Only a process that has died sends nothing more. */
static int dp__channel_presence(const dp__post *post, int process, int known)
{
    bool left = known == DP__LEFT, broke = false;
    for (int answers = 0; answers < 2; answers++) {
        const dp__channel *channel = dp__channel_to(post, process, answers != 0);
        bool silent = channel->met && !channel->left;
        if (silent && channel->fd >= 0 && known != DP__DEAD)
            return DP__INSIDE;
        left = left || channel->left;
        broke = broke || (silent && dp__os_ms_until(channel->lost_ns) == 0);
    }
    return left ? DP__LEFT : broke ? DP__DEAD : known;
}

DP__COLD static int dp__channel_excuse(const dp__post *post, const dp__parcel *parcel, char *text,
                                       size_t room)
{
    const dp__port *port = &dp__channels_of(post)->office->port;
    int process = parcel->process;
    char who[DP__WHO_BYTES];
    if (parcel->receives && port->server.full)
        snprintf(text, room, "; %s may open no more files than %llu",
                 dp__who(post->job, post->process, who), (unsigned long long)dp__os_files_limit());
    if (parcel->receives)
        return port->server.full ? post->process : -1;
    const dp__channel *own = dp__channel_to(post, process, false);
    if (own->call != NULL || own->again_ns != 0)
        snprintf(text, room, "; nobody has answered at %s, port %d", dp__port_host(port, process),
                 (int)port->seats[process].port);
    return -1;
}

DP__COLD static dp_status dp__channels_open(dp__post *post, dp__office *office)
{
    static const dp__carrier carrier = {
        .prepare = dp__channel_prepare,
        .discard = dp__channel_discard,
        .offer = dp__slip_offer,
        .fetch = dp__slip_fetch,
        .answer = dp__slip_answer,
        .advance = dp__channels_advance,
        .wait = dp__channels_wait,
        .close = dp__channels_close,
        .slip = dp__channel_slip,
        .data = dp__channel_data,
        .let_go = dp__channels_let_go,
        .presence = dp__channel_presence,
        .excuse = dp__channel_excuse,
    };
    size_t count = 2 * (size_t)post->process_count;
    dp__channels *channels =
        dp__scope_bytes(post->scope, sizeof *channels + count * sizeof(dp__channel), 64);
    dp__os_watch *watch = dp__scope_bytes(post->scope, (count + 1) * sizeof *watch, 64);
    int *watched = dp__scope_bytes(post->scope, count * sizeof *watched, 64);
    if (channels == NULL || watch == NULL || watched == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for messages");
    *channels =
        (dp__channels){.office = office, .watch = watch, .watched = watched, .count = (int)count};
    dp__port_raise(&office->port);
    for (size_t i = 0; i < count; i++)
        channels->of[i] = (dp__channel){.fd = -1};
    post->carried = channels;
    post->carrier = &carrier;
    return DP_OK;
}

/* ==== >>looking ================================================================================
   Who waits looks every few milliseconds whether the other end of a message is still there. What it
   had said before it went may be on its way: so it is looked at more than once.                 */

/* "25 f32 from rank 1 to rank 0 with tag 5: rank 1 (process 1, pid 4242) has died"; process -1: it
   may be anybody; culprit -1: nobody is known to be to blame. */
static dp_status dp__parcel_blame(const dp__post *post, const dp__parcel *parcel, dp_status status,
                                  int process, int culprit, const char *what)
{
    char text[DP__PARCEL_TEXT], who[DP__WHO_BYTES] = "whoever sends it";
    if (process >= 0)
        (void)dp__who(post->job, process, who);
    return dp__job_fail(post->job, status, culprit >= 0 ? culprit : post->process, "%s: %s %s",
                        dp__parcel_text(parcel, text), who, what);
}

/* Looks whether the process at the other end is gone; if that may be any, at another one each time,
   and a message is lost only when none is left, or one has died. */
static dp_status dp__parcel_look(dp__post *post, dp__parcel *parcel)
{
    int process = parcel->process, left = 0;
    for (int p = 0; p < post->process_count && process < 0; p++)
        left += p == post->process || dp__post_presence(post, p, false) == DP__LEFT;
    if (process < 0)
        process = (int)(post->turns++ % (unsigned)post->process_count);
    bool died = dp__has_died(post, process);
    int presence = dp__post_presence(post, process, died);
    bool dead = presence == DP__DEAD;
    bool alone = parcel->process < 0 ? left == post->process_count : presence == DP__LEFT;
    if (!alone && !dead)
        return DP_OK;
    if (parcel->doubts++ < DP__PARCEL_DOUBTS)
        return DP_OK;
    int named = dead || parcel->process >= 0 ? process : -1;
    return dp__parcel_blame(post, parcel, DP_ERR_REMOTE, named, named,
                            died                   ? "has died"
                            : dead                 ? "is gone: the connection to it has ended"
                            : parcel->process >= 0 ? "has closed its context"
                                                   : "is not among those that are left");
}

/* Returns a process that has died, or is silent; -1: there is none. */
DP__COLD static int dp__post_silent(const dp__post *post, uint64_t since_ns)
{
    int silent = -1;
    for (int p = post->process_count - 1; p >= 0; p--) {
        if (dp__has_died(post, p))
            return p;
        if (dp__is_silent(post->job, p, since_ns) && !dp__has_left(post, p))
            silent = p;
    }
    return silent >= 0 ? dp__first_silent(post->job, silent, since_ns) : -1;
}

/* The time is up: for whom do all wait in the end? Where that is not known, and the other end does
   not wait for this process, one that is silent is to blame. */
DP__COLD static dp_status dp__parcel_late(const dp__post *post, const dp__parcel *parcel)
{
    char excuse[DP__EXCUSE_BYTES] = "", what[DP__LATE_BYTES + DP__EXCUSE_BYTES];
    int named = parcel->process, lacks = -1;
    uint64_t since_ns;
    DP_TRY(dp__job_call(post->job, &since_ns));
    if (post->carrier->excuse != NULL)
        lacks = post->carrier->excuse(post, parcel, excuse, sizeof excuse);
    int root = dp__wait_root(post->job, DP__CALLER, named, since_ns);
    if (root == DP__UNKNOWN)
        root = dp__post_silent(post, since_ns);
    if (root < 0)
        root = dp__longest_away(post->job);
    (void)dp__late_text(post->job, post->job->timeout_ms, named, lacks < 0 ? root : -1, since_ns,
                        what);
    (void)dp__append(what, sizeof what, strlen(what), "%s", excuse);
    return dp__parcel_blame(post, parcel, DP_ERR_TIMEOUT, named,
                            lacks >= 0  ? lacks
                            : root >= 0 ? root
                                        : named,
                            what);
}

DP__COLD static dp_status dp__post_late(const dp__post *post)
{
    for (size_t i = 0; i < post->awaited_count; i++) {
        const dp__parcel *parcel = dp__parcel_of(post, &post->awaited[i]);
        if (parcel != NULL && parcel->status == DP_PENDING)
            return dp__parcel_late(post, parcel);
    }
    return DP_OK;
}

/* Says for whom this process waits; -1: for none any more, or for any. */
static void dp__post_awaits(const dp__post *post, int process)
{
    atomic_uint *awaits = &dp__progress_of(post->job, post->process)->tracks[DP__CALLER].awaits;
    if (atomic_load_explicit(awaits, memory_order_relaxed) != (unsigned)(process + 1))
        atomic_store(awaits, (unsigned)(process + 1));
}

/* Returns for whom a message waits, which is this process if nobody can call it; -1: for any. */
static int dp__parcel_awaits(const dp__post *post, const dp__parcel *parcel)
{
    char text[DP__EXCUSE_BYTES];
    int lacks = -1;
    if (parcel->process != post->process && post->carrier->excuse != NULL)
        lacks = post->carrier->excuse(post, parcel, text, sizeof text);
    return lacks >= 0 ? lacks : parcel->process;
}

/* Returns one of the messages that are awaited, with each look another one if there are many; NULL:
   it is done. */
static dp__parcel *dp__post_turn(dp__post *post)
{
    dp__parcel *parcel = dp__parcel_of(post, &post->awaited[post->looks++ % post->awaited_count]);
    return parcel != NULL && parcel->status == DP_PENDING ? parcel : NULL;
}

static dp_status dp__post_look(dp__post *post)
{
    size_t count = post->awaited_count < DP__PARCELS_LOOKED_AT ? post->awaited_count
                                                               : DP__PARCELS_LOOKED_AT;
    dp__parcel *some[DP__PARCELS_LOOKED_AT];
    bool waits = false;
    int awaited = -1;
    for (size_t i = 0; i < count; i++) {
        some[i] = dp__post_turn(post);
        waits = waits || some[i] != NULL;
        if (some[i] != NULL && some[i]->process != post->process && awaited < 0)
            awaited = dp__parcel_awaits(post, some[i]);
    }
    if (waits)
        dp__post_awaits(post, awaited);
    dp__job_looks(post->job);
    DP_TRY(dp__job_heard(post->job));
    for (size_t i = 0; i < count; i++)
        if (some[i] != NULL)
            DP_TRY(dp__parcel_look(post, some[i]));
    return DP_OK;
}

/* In a loop that waits for something to move. */
static dp_status dp__post_rest(void *what, dp__wait *wait)
{
    dp__post *post = what;
    uint64_t waited_ns;
    if (!dp__wait_looks(wait, post->job->look_ns, &waited_ns))
        return DP_OK;
    DP_TRY(dp__post_look(post));
    if (post->flows)
        atomic_store(&wait->waited_ns, waited_ns = 0);
    post->flows = false;
    uint64_t timeout_ns = (uint64_t)post->job->timeout_ms * 1000000;
    if (post->job->shared.data == NULL && waited_ns > timeout_ns / 2 && !wait->asked) {
        wait->asked = true; /* who answers when the time is up may have been away until then */
        (void)dp__job_ask(post->job);
    }
    return waited_ns >= timeout_ns ? dp__post_late(post) : DP_OK;
}

/* ==== >>beginning ==============================================================================
   Checks, and what a message needs, before anybody hears of it.                                 */

static dp_status dp__post_fill(dp_ctx *ctx, dp_scope *scope)
{
    dp__post *post = dp__scope_bytes(scope, sizeof *post, 64);
    if (post == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for messages");
    *post = (dp__post){.ctx = ctx,
                       .job = ctx->job,
                       .scope = scope,
                       .process = ctx->info.process,
                       .process_count = ctx->info.process_count};
    if (ctx->job != NULL && ctx->job->shared.data != NULL)
        DP_TRY(dp__desk_open(post));
    else if (ctx->mpi_links != NULL && dp__backend_mpi != NULL)
        DP_TRY(dp__backend_mpi->post(post));
    else if (ctx->office != NULL && ctx->office->why[0] == '\0')
        DP_TRY(dp__channels_open(post, ctx->office));
    ctx->post = post;
    return DP_OK;
}

/* Made by the first message. */
static dp_status dp__post_open(dp_ctx *ctx)
{
    dp_scope *scope;
    if (ctx->post != NULL)
        return DP_OK;
    DP_TRY(dp__temp_begin(ctx, &scope));
    dp_status status = dp__post_fill(ctx, scope);
    if (status != DP_OK)
        dp__scope_end(scope);
    return status;
}

static void dp__post_close(dp_ctx *ctx)
{
    if (ctx->post != NULL && ctx->post->carrier != NULL && ctx->post->carrier->close != NULL)
        ctx->post->carrier->close(ctx->post);
}

static void dp__post_let_go(dp__post *post)
{
    if (post != NULL && post->carrier != NULL && post->carrier->let_go != NULL)
        post->carrier->let_go(post);
}

/* Keeps what lies in a scope where it is until the process ends. */
DP__MAYBE_UNUSED static void dp__scope_keep(const dp_scope *scope)
{
    if (scope->home != NULL)
        scope->home->kept = true;
    for (dp__block *block = scope->blocks; block != NULL; block = block->next)
        block->kept = true;
}

/* Returns true if messages have begun that the user has not ended. */
static bool dp__post_has_messages(const dp__post *post)
{
    bool some = false;
    for (int i = 0; post != NULL && i < post->block_count; i++)
        for (size_t k = 0; k < dp__parcels_in(i); k++)
            some = some || post->blocks[i][k].number != 0;
    return some;
}

/* The job has failed, and is made anew: no message of it goes on, and nobody is told of one that is
   done. */
static void dp__post_forget(dp_ctx *ctx)
{
    dp__post *post = ctx->post;
    if (post == NULL)
        return;
    dp__post_close(ctx);
    for (int i = 0; i < post->block_count; i++)
        for (size_t k = 0; k < dp__parcels_in(i); k++)
            if (post->blocks[i][k].stage != NULL)
                post->blocks[i][k].stage->lost = true;
    post->scope->lost = true;
    ctx->post = NULL;
}

static dp_status dp__message_check(const char *fn, dp_ctx *ctx, const dp_message *message)
{
    dp__device *device;
    bool any = message->receives && message->peer == DP_ANY_RANK;
    DP_TRY(dp__check_placed(fn, ctx, "tensor", &message->tensor, &device));
    if (message->receives)
        DP_TRY(dp__check_writable(fn, "tensor", &message->tensor));
    DP_TRY(dp__check_rank(fn, ctx, "local_rank", message->local_rank));
    if (!any && (message->peer < 0 || message->peer >= ctx->info.rank_count))
        return dp_error(DP_ERR_INVALID, "%s: peer is %d, there are %d ranks", fn, message->peer,
                        ctx->info.rank_count);
    return DP_OK;
}

/* Row-major memory that the host reaches: the tensor's own, or as much that others see, too. */
static dp_status dp__parcel_stage(dp__post *post, dp__parcel *parcel, const dp_tensor *tensor)
{
    dp_ctx *ctx = post->ctx;
    bool own = dp__is_host(dp__device_of(ctx, tensor->device)) && dp__is_dense(tensor);
    void *data = tensor->data;
    if (!own && parcel->bytes > 0) {
        DP_TRY(dp__temp_begin(ctx, &parcel->stage));
        if (ctx->heap.shared != NULL)
            DP_TRY(dp__scope_block(parcel->stage, &ctx->shared_pool, parcel->bytes, &data));
        else
            data = dp__scope_bytes(parcel->stage, parcel->bytes, 64);
        if (data == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for a copy of a message");
    }
    parcel->data = data;
    if (parcel->stage == NULL)
        return DP_OK;
    parcel->tensor = *tensor;
    if (parcel->receives)
        return DP_OK;
    const dp_tensor stage = dp__tensor_like(data, (dp_device){0, 0}, (dp_dtype)tensor->dtype,
                                            tensor->ndim, tensor->shape);
    return dp__copy_tensor(ctx, &stage, tensor, NULL);
}

static dp_status dp__parcel_fill(dp__post *post, dp__parcel *parcel, const dp_message *message,
                                 bool ours)
{
    const dp_ctx *ctx = post->ctx;
    int own = ctx->info.rank_first + message->local_rank,
        to = message->receives ? own : message->peer;
    parcel->receives = message->receives;
    parcel->is = (dp__offer){.count = (uint64_t)dp__count(&message->tensor),
                             .from = message->receives ? message->peer : own,
                             .to = ours ? ~to : to,
                             .tag = message->tag,
                             .dtype = message->tensor.dtype};
    parcel->bytes = dp__bytes(&message->tensor);
    if (message->peer != DP_ANY_RANK || post->job == NULL)
        parcel->process = post->job != NULL ? dp__process_of(post->job, message->peer) : 0;
    if (parcel->process != post->process && post->carrier == NULL)
        return dp_error(DP_ERR_UNSUPPORTED, "nothing carries messages between these processes: %s",
                        ctx->office != NULL ? ctx->office->why
                                            : "they have met through an MPI that was initialised "
                                              "below MPI_THREAD_SERIALIZED");
    DP_TRY(dp__parcel_stage(post, parcel, &message->tensor));
    if (parcel->receives || parcel->process == post->process)
        return DP_OK;
    return post->carrier->prepare(post, parcel);
}

/* It is as if it had never been begun, or is done. */
static dp_status dp__parcel_drop(dp__post *post, dp__parcel *parcel, dp_status status)
{
    dp__parcel_remove(parcel);
    if (post->carrier != NULL)
        post->carrier->discard(post, parcel);
    status = dp__temp_end(parcel->stage, NULL, status);
    dp__parcel_free(post, parcel);
    return status;
}

static dp_status dp__message_make(dp__post *post, dp_message *message, bool ours)
{
    dp__parcel *parcel = dp__parcel_new(post);
    if (parcel == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a message");
    dp_status status = dp__parcel_fill(post, parcel, message, ours);
    if (status != DP_OK)
        return dp__parcel_drop(post, parcel, status);
    parcel->number = atomic_fetch_add(&dp__message_numbers, 1) + 1;
    message->state = parcel;
    message->number = parcel->number;
    message->status = DP_PENDING;
    return DP_OK;
}

static dp_status dp__message_start(dp__post *post, const dp_message *message)
{
    dp__parcel *parcel = message->state;
    bool here = parcel->receives || parcel->process == post->process;
    return here ? dp__parcel_match(post, parcel) : post->carrier->offer(post, parcel);
}

/* `ours`: not the user's, and no receive of his, from whatever rank, is for them. */
static dp_status dp__messages_begin(const char *fn, dp_ctx *ctx, dp_message *messages, size_t count,
                                    bool ours)
{
    dp_status status = DP_OK;
    size_t made = 0;
    for (size_t i = 0; i < count; i++) {
        DP_TRY(dp__message_check(fn, ctx, &messages[i]));
        if (dp__parcel_of(ctx->post, &messages[i]) != NULL)
            return dp_error(DP_ERR_STATE, "%s: message %zu has begun, and was not ended", fn, i);
    }
    DP_TRY(dp__post_open(ctx));
    while (made < count && status == DP_OK) {
        status = dp__message_make(ctx->post, &messages[made], ours);
        made += status == DP_OK;
    }
    for (size_t i = 0; i < made && status != DP_OK; i++) {
        status = dp__parcel_drop(ctx->post, messages[i].state, status);
        messages[i].state = NULL;
        messages[i].number = 0;
        messages[i].status = status;
    }
    for (size_t i = 0; i < count && status == DP_OK; i++)
        status = dp__message_start(ctx->post, &messages[i]);
    return status;
}

/* ==== >>ending =================================================================================
   The public edge.                                                                              */

static dp_status dp__messages_check(const char *fn, dp_ctx *ctx, const dp_message *messages,
                                    size_t count)
{
    DP_TRY(dp__check_ctx(fn, ctx));
    return count > 0 ? dp__check_pointer(fn, "messages", messages) : DP_OK;
}

DP_API dp_status dp_messages_begin(dp_ctx *ctx, dp_message *messages, size_t count)
{
    DP_TRY(dp__messages_check(__func__, ctx, messages, count));
    DP_TRY(dp__enter(__func__, ctx));
    return dp__exit(__func__, ctx, dp__messages_begin(__func__, ctx, messages, count, false));
}

/* How a message went, once: DP_PENDING, or the user has it now. */
static dp_status dp__message_collect(dp__post *post, dp_message *message)
{
    dp__parcel *parcel = dp__parcel_of(post, message);
    if (parcel == NULL && message->status == DP_PENDING)
        return dp_error(DP_ERR_STATE, "two of these are copies of one message");
    if (parcel == NULL)
        return message->status == DP_OK
                   ? DP_OK
                   : dp_error(message->status, "%s", dp_status_text(message->status));
    if (parcel->status == DP_PENDING)
        return DP_PENDING;
    message->status = parcel->status;
    message->state = NULL;
    if (parcel->receives && parcel->status == DP_OK)
        message->peer = (int)parcel->is.from;
    if (parcel->status == DP_ERR_MISMATCH)
        (void)dp__parcel_mismatch(parcel);
    else if (parcel->status != DP_OK)
        (void)dp_error(parcel->status, "%s", dp_status_text(parcel->status));
    return dp__parcel_drop(post, parcel, message->status);
}

/* The first failure, once all are done. */
static dp_status dp__messages_collect(dp__post *post, dp_message *messages, size_t count)
{
    dp_status first = DP_OK;
    char said[DP__TEXT_BYTES];
    for (size_t i = 0; i < count; i++) {
        const dp__parcel *parcel = dp__parcel_of(post, &messages[i]);
        if (parcel != NULL && parcel->status == DP_PENDING)
            return DP_PENDING;
    }
    for (size_t i = 0; i < count; i++) {
        dp_status status = dp__message_collect(post, &messages[i]);
        if (first != DP_OK || status == DP_OK)
            continue;
        first = status;
        memcpy(said, dp_last_error(), sizeof said);
    }
    return first == DP_OK ? DP_OK : dp_error(first, "%s", said);
}

static dp_status dp__messages_begun(const char *fn, const dp__post *post,
                                    const dp_message *messages, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bool lost = messages[i].status == DP_PENDING && dp__parcel_of(post, &messages[i]) == NULL;
        if (post == NULL || messages[i].number == 0 || lost)
            return dp_error(DP_ERR_STATE, "%s: message %zu was not begun in this context", fn, i);
    }
    return DP_OK;
}

/* Nobody but this process could end it, which is about to wait. */
static dp_status dp__messages_alone(const char *fn, const dp__post *post,
                                    const dp_message *messages, size_t count)
{
    char text[DP__PARCEL_TEXT];
    for (size_t i = 0; i < count; i++) {
        const dp__parcel *parcel = dp__parcel_of(post, &messages[i]);
        if (parcel != NULL && parcel->status == DP_PENDING && parcel->process == post->process)
            return dp_error(DP_ERR_STATE,
                            "%s: %s: the other end is of this process, too, and has "
                            "not been begun",
                            fn, dp__parcel_text(parcel, text));
    }
    return DP_OK;
}

static dp_status dp__post_advance(dp__post *post)
{
    post->moved = false;
    if (post->carrier == NULL)
        return DP_OK;
    if (post->job != NULL && dp__job_is_lost(post->job))
        return dp__job_heard(post->job);
    return post->carrier->advance(post);
}

static dp_status dp__messages_wait(dp__post *post, dp_message *messages, size_t count)
{
    dp_status status = dp__post_advance(post);
    post->awaited = messages;
    post->awaited_count = count;
    for (size_t i = 0; i < count; i++) {
        dp__parcel *parcel = dp__parcel_of(post, &messages[i]);
        if (parcel != NULL)
            parcel->awaited = true;
    }
    while (status == DP_OK) {
        status = dp__messages_collect(post, messages, count);
        if (status != DP_PENDING)
            break;
        post->moved = false;
        status = post->carrier->wait(post);
    }
    post->awaited = NULL;
    post->awaited_count = 0;
    if (post->job != NULL)
        dp__post_awaits(post, -1);
    return status;
}

/* In this thread's row of the timeline. */
static void dp__messages_trace(const dp__post *post, const dp_message *messages, size_t count)
{
    char text[DP__PARCEL_TEXT], name[DP__PARCEL_TEXT + 32];
    const dp__parcel *parcel = count > 0 ? dp__parcel_of(post, &messages[0]) : NULL;
    if (!dp__trace_is_on())
        return;
    size_t used = dp__append(name, sizeof name, 0, "%s",
                             parcel != NULL ? dp__parcel_text(parcel, text) : "messages");
    if (count > 1)
        (void)dp__append(name, sizeof name, used, " and %zu more", count - 1);
    dp_trace_begin(name);
}

static dp_status dp__messages_end(const char *fn, dp_ctx *ctx, dp_message *messages, size_t count)
{
    dp__post *post = ctx->post;
    DP_TRY(dp__messages_begun(fn, post, messages, count));
    if (count == 0)
        return DP_OK;
    DP_TRY(dp__messages_alone(fn, post, messages, count));
    dp__messages_trace(post, messages, count);
    dp_status status = dp__messages_wait(post, messages, count);
    dp_trace_end();
    return status;
}

DP_API dp_status dp_messages_end(dp_ctx *ctx, dp_message *messages, size_t count)
{
    DP_TRY(dp__messages_check(__func__, ctx, messages, count));
    DP_TRY(dp__enter(__func__, ctx));
    return dp__exit(__func__, ctx, dp__messages_end(__func__, ctx, messages, count));
}

static dp_status dp__messages_test(const char *fn, dp_ctx *ctx, dp_message *messages, size_t count)
{
    dp__post *post = ctx->post;
    uint64_t waited_ns;
    DP_TRY(dp__messages_begun(fn, post, messages, count));
    if (post == NULL)
        return DP_OK;
    DP_TRY(dp__post_advance(post));
    dp_status status = dp__messages_collect(post, messages, count);
    if (status != DP_PENDING && post->job != NULL)
        dp__post_awaits(post, -1);
    if (status != DP_PENDING || post->job == NULL ||
        !dp__wait_looks(&post->wait, post->job->look_ns, &waited_ns))
        return status;
    post->awaited = messages;
    post->awaited_count = count;
    dp_status look = dp__post_look(post);
    post->awaited = NULL;
    post->awaited_count = 0;
    return look != DP_OK ? look : status;
}

DP_API dp_status dp_messages_test(dp_ctx *ctx, dp_message *messages, size_t count)
{
    DP_TRY(dp__messages_check(__func__, ctx, messages, count));
    DP_TRY(dp__enter(__func__, ctx));
    dp_status status = dp__messages_test(__func__, ctx, messages, count);
    bool pending = status == DP_PENDING;
    status = dp__exit(__func__, ctx, pending ? DP_OK : status);
    return pending && status == DP_OK ? DP_PENDING : status;
}

static dp_status dp__message_whole(const char *fn, dp_ctx *ctx, dp_message *message)
{
    DP_TRY(dp__messages_begin(fn, ctx, message, 1, false));
    dp_status status = dp__messages_end(fn, ctx, message, 1);
    if (status == DP_ERR_STATE && message->state != NULL) /* nothing has happened */
        return dp__parcel_drop(ctx->post, message->state, status);
    return status;
}

static dp_status dp__message_one(const char *fn, dp_ctx *ctx, const dp_tensor *tensor, int peer,
                                 int tag, bool receives)
{
    DP_TRY(dp__check_ctx(fn, ctx));
    DP_TRY(dp__check_pointer(fn, "tensor", tensor));
    dp_message message = {.tensor = *tensor,
                          .local_rank = tensor->device.backend != 0 ? tensor->device.index : 0,
                          .peer = peer,
                          .tag = tag,
                          .receives = receives};
    DP_TRY(dp__enter(fn, ctx));
    return dp__exit(fn, ctx, dp__message_whole(fn, ctx, &message));
}

DP_API dp_status dp_send(dp_ctx *ctx, const dp_tensor *tensor, int to, int tag)
{
    return dp__message_one(__func__, ctx, tensor, to, tag, false);
}

DP_API dp_status dp_recv(dp_ctx *ctx, const dp_tensor *tensor, int from, int tag)
{
    return dp__message_one(__func__, ctx, tensor, from, tag, true);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
