/* dp/mailbox.h - v0.2.0 - what a process knows of its messages - MIT licence

   Part of dp.h, which includes it. It holds the messages of a process and those that others offer,
   which of them belong together, and two ways for their bytes: shared memory, and packets that a
   carrier brings (dp/carrier.h). TCP does that in dp/channels.h, and MPI in dp_mpi.h.

   CONTENTS (search for the tag)
     >>requests  what is known of a message
     >>matching  which receive an offer is for
     >>pipes     offers, answers and bytes in shared memory
     >>headers   offers, answers and data that travel
     >>looking   whether it makes sense to wait for a message
*/

#ifndef DP__ROOMS
#error "dp/mailbox.h is a part of dp.h: include dp.h"
#else

/* ==== >>requests ================================================================================
   A message is a request, from its beginning until its end is told to the user. The sender offers
   it: from whom, to whom, tag, dtype and count. The receiver keeps offers until it expects them, so
   that none is in the way of another. When it does, the bytes travel, and an answer ends the
   sender's part. Nothing else is ever waited for: whatever is in a process' hands it can finish, or
   give back, by itself.

   Bytes lie in memory that the host reaches, row-major: the tensor's own, or a copy (`stage`). */

enum {
    DP__REQUESTS_AT_ONCE = 16, /* in the first block; each further one is twice as large */
    DP__REQUEST_BLOCKS = 32,
    DP__NUMBERS_AT_ONCE = 4096,
    DP__REQUESTS_LOOKED_AT = 16, /* by one look */
    DP__REQUEST_DOUBTS = 2, /* looks after which a process that is gone has nothing more to say */
    DP__REQUEST_TEXT = 128,
    DP__EXCUSE_BYTES = DP__HOST_BYTES + DP__WHO_BYTES
};

enum {
    DP__OFFER_WORDS = sizeof(dp__offer) / sizeof(uint64_t),
    DP__OFFER_LEAST = 2 * sizeof(uint64_t) /* bytes of `place` and `room` */
};
_Static_assert(DP__OFFER_WORDS * sizeof(uint64_t) == sizeof(dp__offer), "an offer is words");

typedef struct dp__requests { /* a list, the oldest first */
    struct dp__request *first, *last;
} dp__requests;

typedef struct dp__request {
    struct dp__request *prev, *next;
    dp__requests *list; /* that it is in; or NULL */
    uint64_t number;    /* of the message; 0: somebody else's, whose offer has arrived */
    dp_scope *stage;    /* holds the data, if the tensor's memory cannot */
    char *data;
    size_t bytes, moved;
    int process; /* at the other end; -1: any */
    bool receives;
    bool awaited;  /* by dp_messages_end */
    bool travels;  /* a carrier has what is sent, */
    bool answered; /* and the other end has it, too */
    dp_status status;
    unsigned doubts;
    void *wire; /* the answer to it in shared memory, or the packet in which it is sent */
    /* The rest is written before it is read. */
    dp__offer is, other; /* other: of the one that does not fit, or of the one that was taken */
    dp_tensor tensor;    /* with a stage, to receive */
    char tiny[DP__REQUEST_TINY];
} dp__request;

typedef struct dp__mailbox {
    dp_ctx *ctx;
    dp__job *job;                  /* NULL: one process */
    struct dp__outboxes *outboxes; /* NULL: no memory is shared */
    dp__endpoint endpoint;         /* then; its carrier is NULL where there is no way to others */
    dp__packet *packets;           /* for it, to be used again */
    dp_scope *scope;               /* as long as the context: what is here lies there */
    int process, process_count;
    dp__request *blocks[DP__REQUEST_BLOCKS];
    int block_count;
    dp__requests spare;             /* to be used again */
    dp__requests expected, arrived; /* receives, and offers, that have not met */
    dp__requests offered;           /* sends to other processes that are not done */
    dp__requests fetched;           /* receives whose data is on its way, with headers */
    bool moved;                     /* something has happened since this was last false */
    bool flows;                     /* a part of what is awaited has moved since the last look */
    dp_status failed;               /* of the carrier, while others wait */
    dp__wait wait;                  /* of those who only test */
    unsigned looks, turns;          /* turns: of those that may be any rank */
    uint64_t numbers;               /* given to messages, of those that are this mailbox' */
    dp_message *awaited;            /* by dp_messages_end */
    size_t awaited_count;
} dp__mailbox;

/* Counts the numbers that mailboxes of all contexts have taken: no two messages have the same. */
static _Atomic uint64_t dp__message_numbers;

static void dp__request_add(dp__requests *list, dp__request *request)
{
    request->list = list;
    request->next = NULL;
    request->prev = list->last;
    if (list->last != NULL)
        list->last->next = request;
    else
        list->first = request;
    list->last = request;
}

static void dp__request_remove(dp__request *request)
{
    dp__requests *list = request->list;
    if (list == NULL)
        return;
    if (request->prev != NULL)
        request->prev->next = request->next;
    else
        list->first = request->next;
    if (request->next != NULL)
        request->next->prev = request->prev;
    else
        list->last = request->prev;
    request->list = NULL;
}

static size_t dp__requests_in(int block)
{
    return (size_t)DP__REQUESTS_AT_ONCE << block;
}

static void dp__requests_more(dp__mailbox *mailbox)
{
    size_t count = dp__requests_in(mailbox->block_count);
    dp__request *block = NULL;
    if (mailbox->block_count < DP__REQUEST_BLOCKS)
        block = dp__scope_bytes(mailbox->scope, count * sizeof *block, 64);
    if (block == NULL)
        return;
    memset(block, 0, count * sizeof *block);
    mailbox->blocks[mailbox->block_count++] = block;
    for (size_t i = 0; i < count; i++)
        dp__request_add(&mailbox->spare, &block[i]);
}

/* NULL: there is no memory. */
static dp__request *dp__request_new(dp__mailbox *mailbox)
{
    if (mailbox->spare.first == NULL)
        dp__requests_more(mailbox);
    dp__request *request = mailbox->spare.first;
    if (request == NULL)
        return NULL;
    dp__request_remove(request);
    memset(request, 0, offsetof(dp__request, is));
    request->process = -1;
    request->status = DP_PENDING;
    return request;
}

static void dp__request_free(dp__mailbox *mailbox, dp__request *request)
{
    request->number = 0;
    request->stage = NULL;
    dp__request_add(&mailbox->spare, request);
}

/* Returns the request of a message of this context that has not ended for the user; else NULL: the
   message may be of another context, whose memory may be gone. */
static dp__request *dp__request_of(const dp__mailbox *mailbox, const dp_message *message)
{
    dp__request *request = NULL;
    for (int i = 0; mailbox != NULL && i < mailbox->block_count && request == NULL; i++) {
        uintptr_t place = (uintptr_t)message->state - (uintptr_t)mailbox->blocks[i];
        if (place < dp__requests_in(i) * sizeof *request && place % sizeof *request == 0)
            request = message->state;
    }
    return request != NULL && request->number == message->number ? request : NULL;
}

static int dp__offer_to(const dp__offer *offer)
{
    return offer->to < 0 ? ~offer->to : offer->to;
}

static bool dp__has_left(const dp__mailbox *mailbox, int process)
{
    return atomic_load(&dp__progress_of(mailbox->job, process)->presence) == DP__LEFT;
}

/* Returns true if a process has died, which the system may have to be asked. */
static bool dp__has_died(const dp__mailbox *mailbox, int process)
{
    return process != mailbox->process && !dp__has_left(mailbox, process) &&
           !dp__is_alive(mailbox->job, process);
}

/* DP__LEFT, DP__DEAD: the process has ended, as far as messages go. */
static int dp__mailbox_presence(const dp__mailbox *mailbox, int process, bool died)
{
    int known = died ? DP__DEAD : atomic_load(&dp__progress_of(mailbox->job, process)->presence);
    const dp__carrier *carrier = mailbox->endpoint.carrier;
    bool hears = carrier != NULL && carrier->presence != NULL;
    return hears ? carrier->presence(&mailbox->endpoint, process, known) : known;
}

/* "25 f32 from rank 1 to rank 0 with tag 5" */
static const char *dp__request_text(const dp__request *request, char *text)
{
    char from[32] = "any rank";
    if (request->is.from != DP_ANY_RANK)
        snprintf(from, sizeof from, "rank %d", (int)request->is.from);
    snprintf(text, DP__REQUEST_TEXT, "%llu %s from %s to rank %d with tag %d",
             (unsigned long long)request->is.count, dp_dtype_name((dp_dtype)request->is.dtype),
             from, dp__offer_to(&request->is), (int)request->is.tag);
    return text;
}

/* Says, in the same words on both sides, what does not fit. */
static dp_status dp__request_mismatch(const dp__request *request)
{
    const dp__offer *sent = request->receives ? &request->other : &request->is;
    const dp__offer *expected = request->receives ? &request->is : &request->other;
    return dp_error(DP_ERR_MISMATCH,
                    "rank %d has sent %llu %s to rank %d with tag %d, which expected %llu %s",
                    (int)sent->from, (unsigned long long)sent->count,
                    dp_dtype_name((dp_dtype)sent->dtype), dp__offer_to(sent), (int)sent->tag,
                    (unsigned long long)expected->count, dp_dtype_name((dp_dtype)expected->dtype));
}

/* Its end, which the user is told when he asks. */
static void dp__request_end(dp__mailbox *mailbox, dp__request *request, dp_status status)
{
    dp__request_remove(request);
    request->status = status;
    mailbox->moved = true;
}

/* Ends what was sent: it has arrived, or did not fit, and `other` is what was expected. */
static void dp__request_sent(dp__mailbox *mailbox, dp__request *send, bool fits)
{
    dp__request_end(mailbox, send, fits ? DP_OK : DP_ERR_MISMATCH);
}

static dp_status dp__request_unpack(dp__mailbox *mailbox, dp__request *receive)
{
    if (receive->stage == NULL)
        return DP_OK;
    const dp_tensor stage = dp__tensor_like(receive->data, (dp_device){0, 0},
                                            (dp_dtype)receive->tensor.dtype, receive->tensor.ndim,
                                            receive->tensor.shape);
    return dp__shared_failure(mailbox->ctx,
                              dp__copy_tensor(mailbox->ctx, &receive->tensor, &stage, NULL));
}

/* All of it is in `data`. Fails if the job does. */
static dp_status dp__request_received(dp__mailbox *mailbox, dp__request *receive)
{
    dp_status status = dp__request_unpack(mailbox, receive);
    receive->is.from = receive->other.from;
    dp__request_end(mailbox, receive, status);
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
static dp_status dp__requests_meet_here(dp__mailbox *mailbox, dp__request *receive,
                                        dp__request *send, bool fits)
{
    send->other = receive->is;
    if (fits && receive->bytes > 0)
        memmove(receive->data, send->data, receive->bytes);
    dp__request_sent(mailbox, send, fits);
    if (fits)
        return dp__request_received(mailbox, receive);
    dp__request_end(mailbox, receive, DP_ERR_MISMATCH);
    return DP_OK;
}

/* Brings the data of what was taken, which ends with dp__request_received. */
static dp_status dp__mailbox_fetch(dp__mailbox *mailbox, dp__request *receive);

/* Tells the sender, whose part ends, that all is here, or (fits false) that it is not what was
   expected. */
static dp_status dp__mailbox_answer(dp__mailbox *mailbox, const dp__request *receive, bool fits);

static dp_status dp__requests_meet_far(dp__mailbox *mailbox, dp__request *receive,
                                       dp__request *offer, bool fits)
{
    bool tiny = receive->bytes <= DP__REQUEST_TINY;
    receive->process = offer->process;
    if (fits && receive->bytes > 0 && tiny)
        memcpy(receive->data, offer->tiny, receive->bytes);
    dp__request_free(mailbox, offer);
    if (fits && !tiny)
        return dp__mailbox_fetch(mailbox, receive);
    if (fits)
        DP_TRY(dp__request_received(mailbox, receive));
    else
        dp__request_end(mailbox, receive, DP_ERR_MISMATCH);
    return dp__mailbox_answer(mailbox, receive, fits);
}

/* Neither is in a list. */
static dp_status dp__requests_meet(dp__mailbox *mailbox, dp__request *receive, dp__request *offer)
{
    bool fits = receive->is.count == offer->is.count && receive->is.dtype == offer->is.dtype;
    receive->other = offer->is;
    return offer->number != 0 ? dp__requests_meet_here(mailbox, receive, offer, fits)
                              : dp__requests_meet_far(mailbox, receive, offer, fits);
}

static bool dp__requests_belong(const dp__request *a, const dp__request *b)
{
    return a->receives ? dp__offer_is_for(&b->is, &a->is) : dp__offer_is_for(&a->is, &b->is);
}

/* A receive waits for its offer, an offer for its receive. */
static dp_status dp__request_match(dp__mailbox *mailbox, dp__request *request)
{
    dp__request *other = request->receives ? mailbox->arrived.first : mailbox->expected.first;
    mailbox->moved = true;
    while (other != NULL && !dp__requests_belong(request, other))
        other = other->next;
    if (other == NULL) {
        dp__request_add(request->receives ? &mailbox->expected : &mailbox->arrived, request);
        return DP_OK;
    }
    dp__request_remove(other);
    return request->receives ? dp__requests_meet(mailbox, request, other)
                             : dp__requests_meet(mailbox, other, request);
}

/* From another process. */
static dp_status dp__offer_arrived(dp__mailbox *mailbox, int process, const dp__offer *is,
                                   const char *tiny)
{
    dp__request *offer = dp__request_new(mailbox);
    if (offer == NULL)
        return dp__shared_failure(
            mailbox->ctx,
            dp_error(DP_ERR_NO_MEMORY, "no memory for what process %d sends", process));
    offer->is = *is;
    offer->process = process;
    memcpy(offer->tiny, tiny, sizeof offer->tiny);
    return dp__request_match(mailbox, offer);
}

/* ==== >>pipes ==================================================================================
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
    _Alignas(64) char tiny[DP__REQUEST_TINY];
} dp__pipe;
_Static_assert(sizeof(dp__pipe) == 128, "it is two lines of a cache");

typedef struct dp__outbox { /* of a process */
    _Alignas(128) atomic_uint bell;
    atomic_uint sleepers; /* others ring if it sleeps */
    dp__pipe pipes[];     /* to every process */
} dp__outbox;

typedef struct dp__outbox_peer {
    unsigned offers, heard, made, took; /* the own counts; offers and heard times 2 */
    unsigned known;                     /* the other's `heard` */
    dp__request *last;                  /* that was offered, and may not have been heard */
    uint64_t hears;                     /* the reply of the offer that is being heard */
    dp__requests queue;                 /* to be offered */
    dp__requests wanted;                /* to be received in pieces, one after the other */
    char *room;
} dp__outbox_peer;

typedef struct dp__outboxes {
    dp__outbox *own;
    dp__answer *answers; /* that are free */
    size_t piece;
    unsigned missed;
    bool spin;
    dp__outbox_peer peers[];
} dp__outboxes;

static size_t dp__outbox_bytes(int process_count)
{
    return sizeof(dp__outbox) + (size_t)process_count * sizeof(dp__pipe);
}

/* Without a heap answers and rooms lie behind the lines. */
static dp__outbox_sizes dp__outbox_sizes_of(int process_count)
{
    size_t outbox = dp__outbox_bytes(process_count);
    size_t rooms = (size_t)process_count * DP__ROOM_PIECES * DP__ROOM_PIECE_ALONE;
    return (dp__outbox_sizes){outbox, outbox + DP__ANSWERS_ALONE * sizeof(dp__answer) + rooms};
}

/* Behind a process' entries. */
static dp__outbox *dp__outbox_of(const dp__mailbox *mailbox, int process)
{
    size_t entries = (size_t)DP__LANES * DP__KEPT * sizeof(dp__entry);
    return (void *)(dp__behind_board(mailbox->job, process) + entries);
}

/* From this process to another one, and back. */
static dp__pipe *dp__pipe_to(const dp__mailbox *mailbox, int process)
{
    return &mailbox->outboxes->own->pipes[process];
}

static dp__pipe *dp__pipe_from(const dp__mailbox *mailbox, int process)
{
    return &dp__outbox_of(mailbox, process)->pipes[mailbox->process];
}

static void *dp__place_at(const dp__mailbox *mailbox, uint64_t place)
{
    return (char *)mailbox->job->shared.data + place;
}

/* For others; SIZE_MAX: it does not lie in the heap. */
static uint64_t dp__place_of(const dp__mailbox *mailbox, const void *data, size_t bytes)
{
    bool there = dp__heap_place(&mailbox->ctx->world.heap, data, bytes) != SIZE_MAX;
    return there ? (uint64_t)((const char *)data - (const char *)mailbox->job->shared.data)
                 : SIZE_MAX;
}

/* A word of this process changes, for which another one may wait. */
static void dp__pipe_tell(const dp__mailbox *mailbox, int process, atomic_uint *word,
                          unsigned value)
{
    dp__outbox *outbox = dp__outbox_of(mailbox, process);
    atomic_store(word, value);
    if (atomic_load(&outbox->sleepers) == 0)
        return;
    atomic_fetch_add(&outbox->bell, 1);
    dp__os_word_wake(&outbox->bell);
}

/* ---- sending --------------------------------------------------------------------------------- */

static void dp__answers_add(dp__outboxes *outboxes, dp__answer *answers, int count)
{
    for (int i = 0; i < count; i++) {
        answers[i].next = outboxes->answers;
        outboxes->answers = &answers[i];
    }
}

static dp_status dp__answer_take(dp__mailbox *mailbox, dp__answer **out)
{
    dp__outboxes *outboxes = mailbox->outboxes;
    void *more = NULL;
    if (outboxes->answers == NULL && mailbox->ctx->world.heap.shared == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for more than %d messages at once",
                        (int)DP__ANSWERS_ALONE);
    if (outboxes->answers == NULL) {
        DP_TRY(dp__heap_take(mailbox->ctx, &mailbox->ctx->world.heap,
                             DP__ANSWERS * sizeof(dp__answer), 64, &more));
        dp__answers_add(outboxes, more, DP__ANSWERS);
    }
    *out = outboxes->answers;
    outboxes->answers = (*out)->next;
    atomic_store_explicit(&(*out)->what, DP__ANSWER_NONE, memory_order_relaxed);
    return DP_OK;
}

static dp_status dp__outbox_room(dp__mailbox *mailbox, dp__outbox_peer *peer)
{
    void *room = NULL;
    if (peer->room == NULL)
        DP_TRY(dp__heap_take(mailbox->ctx, &mailbox->ctx->world.heap,
                             (size_t)DP__ROOM_PIECES * DP__ROOM_PIECE, 64, &room));
    peer->room = room != NULL ? room : peer->room;
    return DP_OK;
}

static dp_status dp__outbox_prepare(dp__mailbox *mailbox, dp__request *send)
{
    dp__answer *answer = NULL;
    dp__outbox_peer *peer = &mailbox->outboxes->peers[send->process];
    send->is.room = SIZE_MAX;
    send->is.place = dp__place_of(mailbox, send->data, send->bytes);
    if (send->bytes > DP__REQUEST_TINY && send->is.place == SIZE_MAX) {
        DP_TRY(dp__outbox_room(mailbox, peer));
        send->is.room = (uint64_t)(peer->room - (char *)mailbox->job->shared.data);
    }
    DP_TRY(dp__answer_take(mailbox, &answer));
    send->wire = answer;
    send->is.reply = (uint64_t)((char *)answer - (char *)mailbox->job->shared.data);
    return DP_OK;
}

static void dp__outbox_discard(dp__mailbox *mailbox, dp__request *send)
{
    if (send->wire != NULL)
        dp__answers_add(mailbox->outboxes, send->wire, 1);
}

/* Writes an offer, and beside it what is small. The least lies in the words in which other offers
   say where their data is, so that all of it travels in one line of a cache. */
static void dp__offer_write(dp__pipe *pipe, const dp__request *send)
{
    dp__offer is = send->is;
    if (send->bytes > DP__OFFER_LEAST && send->bytes <= DP__REQUEST_TINY)
        memcpy(pipe->tiny, send->data, send->bytes);
    else if (send->bytes > 0 && send->bytes <= DP__OFFER_LEAST)
        memcpy((char *)&is + offsetof(dp__offer, place), send->data, send->bytes);
    dp__words_store(pipe->offer, &is, DP__OFFER_WORDS);
}

static void dp__offer_read(const dp__pipe *pipe, dp__offer *out, char *tiny)
{
    dp__words_load(out, pipe->offer, DP__OFFER_WORDS);
    if (out->count * dp_dtype_bytes((dp_dtype)out->dtype) > DP__OFFER_LEAST)
        memcpy(tiny, pipe->tiny, DP__REQUEST_TINY);
    else
        memcpy(tiny, (char *)out + offsetof(dp__offer, place), DP__OFFER_LEAST);
}

/* If the other one has heard the last offer. */
static void dp__offer_next(dp__mailbox *mailbox, int process)
{
    dp__outbox_peer *peer = &mailbox->outboxes->peers[process];
    dp__request *send = peer->queue.first;
    dp__pipe *pipe = dp__pipe_to(mailbox, process);
    if (send == NULL || peer->known / 2 != peer->offers / 2)
        return;
    dp__request_remove(send);
    dp__request_add(&mailbox->offered, send);
    dp__offer_write(pipe, send);
    peer->offers += 2;
    peer->last = send;
    dp__pipe_tell(mailbox, process, &pipe->offers, peer->offers);
    mailbox->moved = true;
}

/* The last offer was, and may be done. */
static void dp__offer_heard(dp__mailbox *mailbox, int process)
{
    dp__outbox_peer *peer = &mailbox->outboxes->peers[process];
    unsigned heard = atomic_load(&dp__pipe_from(mailbox, process)->heard);
    if (heard == peer->known)
        return;
    peer->known = heard;
    if (heard % 2 == 1)
        dp__request_sent(mailbox, peer->last, true);
}

static dp_status dp__outbox_offer(dp__mailbox *mailbox, dp__request *send)
{
    dp__request_add(&mailbox->outboxes->peers[send->process].queue, send);
    dp__offer_next(mailbox, send->process);
    return DP_OK;
}

/* As far as there is room. */
static void dp__pieces_give(dp__mailbox *mailbox, dp__request *send, const dp__answer *answer)
{
    dp__outboxes *outboxes = mailbox->outboxes;
    dp__outbox_peer *peer = &outboxes->peers[send->process];
    dp__pipe *pipe = dp__pipe_to(mailbox, send->process);
    const dp__pipe *back = dp__pipe_from(mailbox, send->process);
    bool direct = answer->place != SIZE_MAX;
    while (send->moved < send->bytes &&
           (direct || peer->made - atomic_load(&back->took) < DP__ROOM_PIECES)) {
        size_t left = send->bytes - send->moved;
        size_t bytes = direct || left < outboxes->piece ? left : outboxes->piece;
        char *to = direct ? dp__place_at(mailbox, answer->place)
                          : peer->room + peer->made % DP__ROOM_PIECES * outboxes->piece;
        memcpy(to, send->data + send->moved, bytes);
        send->moved += bytes;
        dp__pipe_tell(mailbox, send->process, &pipe->made, ++peer->made);
        mailbox->moved = true;
    }
}

static void dp__answer_read(dp__mailbox *mailbox, dp__request *send)
{
    const dp__answer *answer = send->wire;
    unsigned what = atomic_load(&answer->what);
    if (what == DP__ANSWER_WANTED)
        dp__pieces_give(mailbox, send, answer);
    if (what < DP__ANSWER_DONE)
        return;
    send->other = send->is;
    send->other.dtype = what == DP__ANSWER_REFUSED ? answer->dtype : send->is.dtype;
    send->other.count = what == DP__ANSWER_REFUSED ? answer->count : send->is.count;
    dp__request_sent(mailbox, send, what == DP__ANSWER_DONE);
}

/* ---- receiving ------------------------------------------------------------------------------- */

static void dp__answer_write(dp__mailbox *mailbox, const dp__request *receive, dp__answered what)
{
    dp__answer *answer = dp__place_at(mailbox, receive->other.reply);
    answer->dtype = receive->is.dtype;
    answer->count = receive->is.count;
    answer->place = dp__place_of(mailbox, receive->data, receive->bytes);
    dp__pipe_tell(mailbox, receive->process, &answer->what, what);
}

static dp_status dp__outbox_answer(dp__mailbox *mailbox, const dp__request *receive, bool fits)
{
    dp__outbox_peer *peer = &mailbox->outboxes->peers[receive->process];
    if (fits && receive->other.reply == peer->hears)
        peer->hears = DP__HEARD_DONE;
    else
        dp__answer_write(mailbox, receive, fits ? DP__ANSWER_DONE : DP__ANSWER_REFUSED);
    return DP_OK;
}

static dp_status dp__outbox_fetch(dp__mailbox *mailbox, dp__request *receive)
{
    dp__requests *wanted = &mailbox->outboxes->peers[receive->process].wanted;
    if (receive->other.place != SIZE_MAX) {
        memcpy(receive->data, dp__place_at(mailbox, receive->other.place), receive->bytes);
        atomic_thread_fence(memory_order_acquire); /* as in dp__shm_run_direct */
        DP_TRY(dp__job_heard(mailbox->job));
        DP_TRY(dp__request_received(mailbox, receive));
        return dp__outbox_answer(mailbox, receive, true);
    }
    dp__request_add(wanted, receive);
    if (wanted->first == receive)
        dp__answer_write(mailbox, receive, DP__ANSWER_WANTED);
    return DP_OK;
}

/* Takes the pieces that have been made of the one that is wanted. */
static void dp__pieces_take(dp__mailbox *mailbox, int process, dp__request *receive)
{
    dp__outboxes *outboxes = mailbox->outboxes;
    dp__outbox_peer *peer = &outboxes->peers[process];
    dp__pipe *pipe = dp__pipe_to(mailbox, process);
    const dp__pipe *from = dp__pipe_from(mailbox, process);
    bool direct = dp__place_of(mailbox, receive->data, receive->bytes) != SIZE_MAX;
    while (receive->moved < receive->bytes && peer->took != atomic_load(&from->made)) {
        size_t left = receive->bytes - receive->moved;
        size_t bytes = direct || left < outboxes->piece ? left : outboxes->piece;
        const char *room = dp__place_at(mailbox, receive->other.room);
        if (!direct)
            memcpy(receive->data + receive->moved,
                   room + peer->took % DP__ROOM_PIECES * outboxes->piece, bytes);
        receive->moved += bytes;
        dp__pipe_tell(mailbox, process, &pipe->took, ++peer->took);
        mailbox->moved = true;
    }
}

static dp_status dp__wanted_advance(dp__mailbox *mailbox, int process)
{
    dp__requests *wanted = &mailbox->outboxes->peers[process].wanted;
    dp__request *receive = wanted->first;
    if (receive == NULL)
        return DP_OK;
    dp__pieces_take(mailbox, process, receive);
    if (receive->moved < receive->bytes)
        return DP_OK;
    DP_TRY(dp__request_received(mailbox, receive));
    DP_TRY(dp__outbox_answer(mailbox, receive, true));
    if (wanted->first != NULL)
        dp__answer_write(mailbox, wanted->first, DP__ANSWER_WANTED);
    return DP_OK;
}

static dp_status dp__offer_hear(dp__mailbox *mailbox, int process)
{
    dp__outbox_peer *peer = &mailbox->outboxes->peers[process];
    const dp__pipe *from = dp__pipe_from(mailbox, process);
    char tiny[DP__REQUEST_TINY];
    dp__offer offer;
    if (atomic_load(&from->offers) == peer->heard)
        return DP_OK;
    dp__offer_read(from, &offer, tiny);
    peer->heard += 2;
    peer->hears = offer.reply;
    dp_status status = dp__offer_arrived(mailbox, process, &offer, tiny);
    dp__pipe_tell(mailbox, process, &dp__pipe_to(mailbox, process)->heard,
                  peer->heard + (peer->hears == DP__HEARD_DONE));
    peer->hears = 0;
    return status;
}

static dp_status dp__outbox_advance(dp__mailbox *mailbox)
{
    for (int i = 1; i < mailbox->process_count; i++) {
        int p = (mailbox->process + i) % mailbox->process_count;
        DP_TRY(dp__offer_hear(mailbox, p));
        dp__offer_heard(mailbox, p);
        DP_TRY(dp__wanted_advance(mailbox, p));
        dp__offer_next(mailbox, p);
    }
    for (dp__request *send = mailbox->offered.first, *next; send != NULL; send = next) {
        next = send->next;
        dp__answer_read(mailbox, send);
    }
    return DP_OK;
}

static bool dp__outbox_moved(void *what)
{
    dp__mailbox *mailbox = what;
    if (mailbox->failed == DP_OK)
        mailbox->failed = dp__outbox_advance(mailbox);
    return mailbox->moved || mailbox->failed != DP_OK;
}

static dp_status dp__mailbox_rest(void *what, dp__wait *wait);

static dp_status dp__outbox_wait(dp__mailbox *mailbox)
{
    dp__outboxes *outboxes = mailbox->outboxes;
    const dp__watch watch = {.there = dp__outbox_moved,
                             .rest = dp__mailbox_rest,
                             .what = mailbox,
                             .word = &outboxes->own->bell,
                             .sleepers = &outboxes->own->sleepers,
                             .missed = &outboxes->missed,
                             .look_ns = mailbox->job->look_ns};
    DP_TRY(dp__watch_until(&watch, outboxes->spin));
    return mailbox->failed;
}

static dp_status dp__outbox_open(dp__mailbox *mailbox)
{
    size_t count = (size_t)mailbox->process_count;
    size_t bytes = sizeof(dp__outboxes) + count * sizeof(dp__outbox_peer);
    dp__outboxes *outboxes = dp__scope_bytes(mailbox->scope, bytes, 64);
    if (outboxes == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for messages");
    memset(outboxes, 0, bytes);
    outboxes->own = dp__outbox_of(mailbox, mailbox->process);
    outboxes->piece = DP__ROOM_PIECE;
    outboxes->spin = dp__job_has_cores(mailbox->job, mailbox->process_count);
    mailbox->outboxes = outboxes;
    if (mailbox->ctx->world.heap.shared != NULL)
        return DP_OK;
    char *behind = (char *)outboxes->own + dp__outbox_bytes(mailbox->process_count);
    dp__answers_add(outboxes, (void *)behind, DP__ANSWERS_ALONE);
    behind += DP__ANSWERS_ALONE * sizeof(dp__answer);
    outboxes->piece = DP__ROOM_PIECE_ALONE;
    for (size_t p = 0; p < count; p++)
        outboxes->peers[p].room = behind + p * DP__ROOM_PIECES * DP__ROOM_PIECE_ALONE;
    return DP_OK;
}

/* ==== >>headers ==================================================================================
   Where no memory is shared, offers and answers are headers: small, and in order. The data of what
   is wanted follows a header that says so. A header with what follows it is a packet. Who sends has
   one for its data before anybody hears of it, so that nothing is lacking later.                */

/* Makes a packet one of which nothing has moved. */
static void dp__packet_arm(dp__packet *packet)
{
    packet->request = NULL;
    packet->data = false;
    packet->at = (char *)&packet->header;
    packet->left = sizeof packet->header;
}

/* Goes on from the header of a packet to the data of a request. */
static void dp__packet_follow(dp__packet *packet, dp__request *request)
{
    packet->request = request;
    packet->data = true;
    packet->at = request->data;
    packet->left = request->bytes;
}

static dp_status dp__packet_new(dp__mailbox *mailbox, dp__packet **out)
{
    dp__packet *packet = mailbox->packets;
    size_t own = mailbox->endpoint.carrier->packet_bytes, bytes = own > 0 ? own : sizeof *packet;
    if (packet != NULL)
        mailbox->packets = packet->next;
    else
        packet = dp__os_alloc(bytes, 64, NULL);
    if (packet == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a message");
    memset(packet, 0, bytes);
    dp__packet_arm(packet);
    *out = packet;
    return DP_OK;
}

static dp_status dp__packet_take(dp__endpoint *endpoint, dp__packet **out)
{
    dp__mailbox *mailbox = endpoint->mailbox;
    return dp__shared_failure(mailbox->ctx, dp__packet_new(mailbox, out));
}

static void dp__packet_end(dp__endpoint *endpoint, dp__packet *packet)
{
    dp__mailbox *mailbox = endpoint->mailbox;
    if (packet == NULL)
        return;
    dp__request *request = packet->request;
    packet->next = mailbox->packets;
    mailbox->packets = packet;
    if (request == NULL || request->receives)
        return;
    request->travels = false;
    if (request->answered)
        dp__request_sent(mailbox, request, true);
}

/* Notes that so many bytes of a packet have moved. Returns true if the header, or what follows it,
   is whole. */
static bool dp__packet_moved(dp__mailbox *mailbox, dp__packet *packet, size_t bytes)
{
    packet->at += bytes;
    packet->left -= bytes;
    mailbox->flows = mailbox->flows || (packet->data && packet->request->awaited);
    return packet->left == 0;
}

static bool dp__packet_sent(dp__endpoint *endpoint, dp__packet *packet, size_t bytes)
{
    if (!dp__packet_moved(endpoint->mailbox, packet, bytes))
        return false;
    if (packet->request != NULL && !packet->data) {
        dp__packet_follow(packet, packet->request);
        return false;
    }
    dp__packet_end(endpoint, packet);
    return true;
}

static dp_status dp__header_send(dp__mailbox *mailbox, int process, const dp__header *header,
                                 bool answers)
{
    dp__packet *packet = NULL;
    DP_TRY(dp__packet_take(&mailbox->endpoint, &packet));
    packet->header = *header;
    packet->answers = answers;
    return mailbox->endpoint.carrier->send(&mailbox->endpoint, process, packet);
}

static dp_status dp__header_prepare(dp__mailbox *mailbox, dp__request *send)
{
    const dp__carrier *carrier = mailbox->endpoint.carrier;
    dp__packet *packet = NULL;
    if (carrier->reach != NULL)
        DP_TRY(carrier->reach(&mailbox->endpoint, send->process));
    DP_TRY(dp__packet_new(mailbox, &packet));
    send->wire = packet;
    return DP_OK;
}

static void dp__header_discard(dp__mailbox *mailbox, dp__request *send)
{
    dp__packet_end(&mailbox->endpoint, send->wire);
    send->wire = NULL;
}

static dp_status dp__header_offered(dp__mailbox *mailbox, const dp__request *send)
{
    dp__header header = {.kind = DP__HEADER_OFFERED, .is = send->is};
    if (send->bytes > 0 && send->bytes <= sizeof header.tiny)
        memcpy(header.tiny, send->data, send->bytes);
    return dp__header_send(mailbox, send->process, &header, false);
}

static dp_status dp__header_offer(dp__mailbox *mailbox, dp__request *send)
{
    send->is.reply = send->number;
    dp__request_add(&mailbox->offered, send);
    return dp__header_offered(mailbox, send);
}

static dp_status dp__offers_again(dp__endpoint *endpoint, int process)
{
    dp__mailbox *mailbox = endpoint->mailbox;
    for (dp__request *send = mailbox->offered.first; send != NULL; send = send->next)
        if (send->process == process)
            DP_TRY(dp__header_offered(mailbox, send));
    return DP_OK;
}

static dp_status dp__header_reply(dp__mailbox *mailbox, const dp__request *receive,
                                  dp__header_kind kind)
{
    dp__header header = {.kind = (int32_t)kind, .is = receive->is};
    header.is.reply = receive->other.reply;
    return dp__header_send(mailbox, receive->process, &header, true);
}

static dp_status dp__header_answer(dp__mailbox *mailbox, const dp__request *receive, bool fits)
{
    return dp__header_reply(mailbox, receive, fits ? DP__HEADER_DONE : DP__HEADER_REFUSED);
}

static dp_status dp__header_fetch(dp__mailbox *mailbox, dp__request *receive)
{
    dp__request_add(&mailbox->fetched, receive);
    return dp__header_reply(mailbox, receive, DP__HEADER_WANTED);
}

/* Sends the data that another process wants. */
static dp_status dp__header_wanted(dp__mailbox *mailbox, dp__request *send)
{
    dp__packet *packet = send->wire;
    if (packet == NULL)
        return dp_error(DP_ERR_INTERNAL, "process %d wants data twice", send->process);
    send->wire = NULL;
    send->travels = true;
    packet->header = (dp__header){.kind = DP__HEADER_DATA, .is = send->is};
    packet->request = send;
    return mailbox->endpoint.carrier->send(&mailbox->endpoint, send->process, packet);
}

/* Ends what was sent, unless the carrier still has it: what it has there is not the user's yet. */
static void dp__header_done(dp__mailbox *mailbox, dp__request *send, const dp__header *header)
{
    bool fits = header->kind == DP__HEADER_DONE;
    send->other = header->is;
    send->answered = true;
    if (!send->travels)
        dp__request_sent(mailbox, send, fits);
}

/* Finds out where the data goes that follows a header. */
static dp_status dp__header_data(const dp__mailbox *mailbox, int from, dp__packet *packet)
{
    dp__request *receive = mailbox->fetched.first;
    while (receive != NULL &&
           (receive->process != from || receive->other.reply != packet->header.is.reply))
        receive = receive->next;
    if (receive == NULL)
        return dp_error(DP_ERR_INTERNAL, "process %d sends what nobody wants", from);
    dp__packet_follow(packet, receive);
    return DP_OK;
}

/* Takes a farewell: a process that goes because the job has failed may be the first to say so. */
static dp_status dp__header_left(const dp__mailbox *mailbox, const dp__header *header)
{
    dp__job *job = mailbox->job;
    int rank = header->is.from;
    if (header->is.tag == DP_OK || rank < 0 || rank >= job->firsts[job->process_count])
        return DP_OK;
    DP_TRY(dp__job_heard(job)); /* the whole sentence may be here already */
    return dp__job_fail(job, (dp_status)header->is.tag, dp__process_of(job, rank), "%.*s",
                        (int)sizeof header->tiny, header->tiny);
}

static dp_status dp__header_read(dp__mailbox *mailbox, int from, dp__packet *packet)
{
    const dp__header *header = &packet->header;
    dp__request *send = mailbox->offered.first;
    dp__packet_arm(packet);
    if (header->kind == DP__HEADER_OFFERED)
        return dp__offer_arrived(mailbox, from, &header->is, header->tiny);
    if (header->kind == DP__HEADER_DATA)
        return dp__header_data(mailbox, from, packet);
    if (header->kind == DP__HEADER_LEFT)
        return dp__header_left(mailbox, header);
    while (send != NULL && (send->number != header->is.reply || send->process != from))
        send = send->next;
    if (send == NULL)
        return dp_error(DP_ERR_INTERNAL, "process %d answers what was never sent", from);
    if (header->kind == DP__HEADER_WANTED)
        return dp__header_wanted(mailbox, send);
    dp__header_done(mailbox, send, header);
    return DP_OK;
}

static dp_status dp__packet_received(dp__endpoint *endpoint, int process, dp__packet *packet,
                                     size_t bytes)
{
    dp__mailbox *mailbox = endpoint->mailbox;
    dp__request *receive = packet->request;
    if (!dp__packet_moved(mailbox, packet, bytes))
        return DP_OK;
    if (!packet->data)
        return dp__header_read(mailbox, process, packet);
    dp__packet_arm(packet);
    DP_TRY(dp__request_received(mailbox, receive));
    return dp__header_answer(mailbox, receive, true);
}

/* ---- the two ways ---------------------------------------------------------------------------- */

/* Returns true if there is a way to other processes. */
static bool dp__mailbox_reaches(const dp__mailbox *mailbox)
{
    return mailbox->outboxes != NULL || mailbox->endpoint.carrier != NULL;
}

/* Gets what sending this needs. Nobody hears of it. */
static dp_status dp__mailbox_prepare(dp__mailbox *mailbox, dp__request *send)
{
    return mailbox->outboxes != NULL ? dp__outbox_prepare(mailbox, send)
                                     : dp__header_prepare(mailbox, send);
}

/* Undoes that, also when the message has ended. */
static void dp__mailbox_discard(dp__mailbox *mailbox, dp__request *send)
{
    if (mailbox->outboxes != NULL)
        dp__outbox_discard(mailbox, send);
    else if (mailbox->endpoint.carrier != NULL)
        dp__header_discard(mailbox, send);
}

static dp_status dp__mailbox_offer(dp__mailbox *mailbox, dp__request *send)
{
    return mailbox->outboxes != NULL ? dp__outbox_offer(mailbox, send)
                                     : dp__header_offer(mailbox, send);
}

static dp_status dp__mailbox_fetch(dp__mailbox *mailbox, dp__request *receive)
{
    return mailbox->outboxes != NULL ? dp__outbox_fetch(mailbox, receive)
                                     : dp__header_fetch(mailbox, receive);
}

static dp_status dp__mailbox_answer(dp__mailbox *mailbox, const dp__request *receive, bool fits)
{
    return mailbox->outboxes != NULL ? dp__outbox_answer(mailbox, receive, fits)
                                     : dp__header_answer(mailbox, receive, fits);
}

/* Waits until something has moved that a carrier brings. */
static dp_status dp__mailbox_wait(dp__mailbox *mailbox)
{
    dp__idle_wait wait = {0};
    bool asks = false;
    for (;;) {
        DP_TRY(dp__endpoint_look(&mailbox->endpoint, &wait, &asks));
        if (mailbox->moved)
            return DP_OK;
        if (asks)
            DP_TRY(dp__mailbox_rest(mailbox, &wait.look));
    }
}

/* ==== >>looking ================================================================================
   Who waits looks every few milliseconds whether the other end of a message is still there. What it
   had said before it went may be on its way: so it is looked at more than once.                 */

/* "25 f32 from rank 1 to rank 0 with tag 5: rank 1 (process 1, pid 4242) has died"; process -1:
   it may be anybody; culprit -1: nobody is known to be to blame. */
static dp_status dp__request_blame(const dp__mailbox *mailbox, const dp__request *request,
                                   dp_status status, int process, int culprit, const char *what)
{
    char text[DP__REQUEST_TEXT], who[DP__WHO_BYTES] = "whoever sends it";
    if (process >= 0)
        (void)dp__who(mailbox->job, process, who);
    return dp__job_fail(mailbox->job, status, culprit >= 0 ? culprit : mailbox->process,
                        "%s: %s %s", dp__request_text(request, text), who, what);
}

/* Returns the first of the others if all of them have left; -1: one has not. */
static int dp__mailbox_left(const dp__mailbox *mailbox)
{
    for (int p = 0; p < mailbox->process_count; p++)
        if (p != mailbox->process && dp__mailbox_presence(mailbox, p, false) != DP__LEFT)
            return -1;
    return mailbox->process == 0 ? 1 : 0;
}

/* Looks whether the process at the other end is gone; if that may be any, at another one each time,
   and a message is lost only when none is left, or one has died. */
static dp_status dp__request_look(dp__mailbox *mailbox, dp__request *request)
{
    bool any = request->process < 0;
    int process = any ? (int)(mailbox->turns++ % (unsigned)mailbox->process_count)
                      : request->process;
    bool died = dp__has_died(mailbox, process);
    int presence = dp__mailbox_presence(mailbox, process, died);
    bool dead = presence == DP__DEAD;
    int left = dead || (!any && presence != DP__LEFT) ? -1
               : any                                  ? dp__mailbox_left(mailbox)
                                                      : process;
    if ((left < 0 && !dead) || request->doubts++ < DP__REQUEST_DOUBTS)
        return DP_OK;
    process = dead ? process : left;
    return dp__request_blame(mailbox, request, DP_ERR_REMOTE, process, process,
                             died   ? "has died"
                             : dead ? "is gone: the connection to it has ended"
                             : any  ? "has closed its context, and so have all others"
                                    : "has closed its context");
}

/* Returns a process that has died, or is silent; -1: there is none. */
DP__COLD static int dp__mailbox_silent(const dp__mailbox *mailbox, uint64_t since_ns)
{
    int silent = -1;
    for (int p = mailbox->process_count - 1; p >= 0; p--) {
        if (dp__has_died(mailbox, p))
            return p;
        if (dp__is_silent(mailbox->job, p, since_ns) && !dp__has_left(mailbox, p))
            silent = p;
    }
    return silent >= 0 ? dp__first_silent(mailbox->job, silent, since_ns) : -1;
}

/* Says why nothing has moved, as far as a carrier knows. Returns whose fault it is; -1: it is not
   known. */
static int dp__request_excuse(const dp__mailbox *mailbox, const dp__request *request, char *text,
                              size_t room)
{
    const dp__carrier *carrier = mailbox->endpoint.carrier;
    if (carrier == NULL || carrier->excuse == NULL)
        return -1;
    return carrier->excuse(&mailbox->endpoint, request->process, request->receives, text, room);
}

/* The time is up: for whom do all wait in the end? Where that is not known, and the other end does
   not wait for this process, one that is silent is to blame. */
DP__COLD static dp_status dp__request_late(const dp__mailbox *mailbox, const dp__request *request)
{
    char excuse[DP__EXCUSE_BYTES] = "", what[DP__LATE_BYTES + DP__EXCUSE_BYTES];
    int named = request->process;
    uint64_t since_ns;
    DP_TRY(dp__job_call(mailbox->job, &since_ns));
    int lacks = dp__request_excuse(mailbox, request, excuse, sizeof excuse);
    int root = dp__wait_root(mailbox->job, DP__CALLER, named, since_ns);
    if (root == DP__UNKNOWN)
        root = dp__mailbox_silent(mailbox, since_ns);
    if (root < 0)
        root = dp__longest_away(mailbox->job, since_ns);
    (void)dp__late_text(mailbox->job, mailbox->job->timeout_ms, named, lacks < 0 ? root : -1,
                        since_ns, what);
    (void)dp__append(what, sizeof what, strlen(what), "%s", excuse);
    return dp__request_blame(mailbox, request, DP_ERR_TIMEOUT, named,
                             lacks >= 0  ? lacks
                             : root >= 0 ? root
                                         : named,
                             what);
}

DP__COLD static dp_status dp__mailbox_late(const dp__mailbox *mailbox)
{
    for (size_t i = 0; i < mailbox->awaited_count; i++) {
        const dp__request *request = dp__request_of(mailbox, &mailbox->awaited[i]);
        if (request != NULL && request->status == DP_PENDING)
            return dp__request_late(mailbox, request);
    }
    return DP_OK;
}

/* Says for whom this process waits; -1: for none any more, or for any. */
static void dp__mailbox_awaits(const dp__mailbox *mailbox, int process)
{
    atomic_uint *awaits =
        &dp__progress_of(mailbox->job, mailbox->process)->tracks[DP__CALLER].awaits;
    if (atomic_load_explicit(awaits, memory_order_relaxed) != (unsigned)(process + 1))
        atomic_store(awaits, (unsigned)(process + 1));
}

/* Returns for whom a message waits, which is this process if nobody can call it; -1: for any. */
static int dp__request_awaits(const dp__mailbox *mailbox, const dp__request *request)
{
    char text[DP__EXCUSE_BYTES];
    int lacks = -1;
    if (request->process != mailbox->process)
        lacks = dp__request_excuse(mailbox, request, text, sizeof text);
    return lacks >= 0 ? lacks : request->process;
}

/* Returns one of the messages that are awaited, with each look another one if there are many; NULL:
   it is done. */
static dp__request *dp__mailbox_turn(dp__mailbox *mailbox)
{
    dp__request *request =
        dp__request_of(mailbox, &mailbox->awaited[mailbox->looks++ % mailbox->awaited_count]);
    return request != NULL && request->status == DP_PENDING ? request : NULL;
}

static dp_status dp__mailbox_look(dp__mailbox *mailbox)
{
    size_t count = mailbox->awaited_count < DP__REQUESTS_LOOKED_AT ? mailbox->awaited_count
                                                                   : DP__REQUESTS_LOOKED_AT;
    dp__request *some[DP__REQUESTS_LOOKED_AT];
    bool waits = false;
    int awaited = -1;
    for (size_t i = 0; i < count; i++) {
        some[i] = dp__mailbox_turn(mailbox);
        waits = waits || some[i] != NULL;
        if (some[i] != NULL && some[i]->process != mailbox->process && awaited < 0)
            awaited = dp__request_awaits(mailbox, some[i]);
    }
    if (waits)
        dp__mailbox_awaits(mailbox, awaited);
    dp__job_looks(mailbox->job);
    DP_TRY(dp__job_heard(mailbox->job));
    for (size_t i = 0; i < count; i++)
        if (some[i] != NULL)
            DP_TRY(dp__request_look(mailbox, some[i]));
    return DP_OK;
}

/* In a loop that waits for something to move. */
static dp_status dp__mailbox_rest(void *what, dp__wait *wait)
{
    dp__mailbox *mailbox = what;
    uint64_t waited_ns;
    if (!dp__wait_looks(wait, mailbox->job->look_ns, &waited_ns))
        return DP_OK;
    DP_TRY(dp__mailbox_look(mailbox));
    if (mailbox->flows)
        atomic_store(&wait->waited_ns, waited_ns = 0);
    mailbox->flows = false;
    uint64_t timeout_ns = (uint64_t)mailbox->job->timeout_ms * 1000000;
    if (mailbox->job->shared.data == NULL && waited_ns > timeout_ns / 2 && !wait->asked) {
        wait->asked = true; /* who answers when the time is up may have been away until then */
        (void)dp__job_ask(mailbox->job);
    }
    return waited_ns >= timeout_ns ? dp__mailbox_late(mailbox) : DP_OK;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
