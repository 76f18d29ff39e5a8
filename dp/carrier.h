/* dp/carrier.h - v0.2.0 - the table that carries bytes between processes - MIT licence

   Part of dp.h, which includes it. Where processes share no memory a carrier brings the bytes of
   collectives (dp/mesh.h) and of messages (dp/mailbox.h). TCP is one (dp/tcp.h), MPI another
   (dp_mpi.h), and tests/pipes.h shows how little one needs. Shared memory is the level below, and
   needs none (dp/shm.h, >>pipes in dp/mailbox.h).

   CONTENTS (search for the tag)
     >>loads    bytes from each process to each
     >>packets  bytes from one process to another
     >>carrying a carrier, and what it is called with
     >>idling   until something has come that does not wake anybody
*/

#ifndef DP__ROOMS
#error "dp/carrier.h is a part of dp.h: include dp.h"
#else

/* ==== >>loads ==================================================================================
   A step of a collective: from each process to each. `to` says where in `out` lies what another one
   gets, and `from` where in `in` goes what it gives. All of that stays as it is until the load has
   ended.                                                                                        */

enum { DP__LOADS = 4 /* of an endpoint, under way at once */ };

typedef struct dp__counts { /* bytes by process */
    int *counts, *places;
} dp__counts;

typedef struct dp__load {
    dp__counts to, from;
    const char *out;
    char *in;
    bool
        same; /* all get the same bytes; this process' own may lie in their place in `in` already */
    bool even; /* and all give as many, in order */
    int place; /* among those of its endpoint, from 0: it is begun again after its end */
    /* ----------------------------------------------------------------------- the carrier's -- */
    int left;              /* parts that have not gone or not come; 0: it has ended */
    uint64_t number;       /* how many were begun before, */
    struct dp__load *next; /* and which one after it */
} dp__load;

/* ==== >>packets ================================================================================
   Messages are packets: a header, and data that follows some of them. A packet says itself which
   bytes move next, so that a carrier reads nothing in it. Packets that a process sends to another
   one arrive in order; answers may overtake the others.                                         */

enum { DP__REQUEST_TINY = 64 /* so many bytes travel with an offer */ };

typedef struct dp__offer { /* what is sent, or expected */
    uint64_t reply; /* where the answer goes: the number of the message, or a place in memory */
    uint64_t place, room; /* where the data lies in shared memory, or will: SIZE_MAX: not there */
    uint64_t count;
    int32_t from, to, tag, dtype; /* from: or DP_ANY_RANK; to: ~to, where it is the library's */
} dp__offer;

typedef enum dp__header_kind {
    DP__HEADER_OFFERED,
    DP__HEADER_WANTED,
    DP__HEADER_DONE,
    DP__HEADER_REFUSED,
    DP__HEADER_DATA, /* follows */
    DP__HEADER_LEFT  /* nothing follows; of what the job has failed, if it has: tag, from, tiny */
} dp__header_kind;

typedef struct dp__header { /* an offer or an answer as it travels */
    int32_t kind, reserved;
    dp__offer is; /* what is sent, or was expected */
    char tiny[DP__REQUEST_TINY];
} dp__header;

typedef struct dp__packet {
    struct dp__packet *next;     /* the carrier's, as long as it has the packet */
    char *at;                    /* the bytes that move next, */
    size_t left;                 /* and how many */
    bool data;                   /* they follow the header, */
    bool answers;                /* which answers another one */
    struct dp__request *request; /* whose data it is; or NULL */
    dp__header header;           /* the number of the message is the same at both ends: is.reply */
} dp__packet;

/* ==== >>carrying ===============================================================================
   A carrier is called with an endpoint, which is for the collectives of a lane or for the messages
   of a context. It moves bytes while one of its functions is called, never by itself. All functions
   of an endpoint are called by one thread at a time. None of them waits, but for connect and
   progress, and for 0.2 s close.                                                                */

typedef struct dp__endpoint {
    const struct dp__carrier *carrier;
    void *own; /* the carrier's */
    dp__job *job;
    dp__journal *journal;        /* of collectives; or NULL */
    struct dp__mailbox *mailbox; /* of messages; or NULL */
    int process, process_count;
    bool far;        /* of collectives: there are several machines */
    bool broken;     /* something that was begun will not end */
    const char *why; /* `open` says here why it cannot carry messages, which is no failure */
} dp__endpoint;

typedef struct dp__carrier {
    /* Gets what an endpoint needs, alone. */
    dp_status (*open)(dp__endpoint *endpoint);
    /* Moves what can be moved. One that sleeps waits for that, at most so long. */
    dp_status (*progress)(dp__endpoint *endpoint, int timeout_ms);
    /* Undoes `open` and `connect`, as far as they came. False: memory that it was given may still
       be in use. */
    bool (*close)(dp__endpoint *endpoint);
    bool sleeps; /* a thread in `progress` is woken when something can be moved */
    /* ------------------------------------------------------------------------- collectives -- */
    /* Connects it with those of all other processes, which call this, too. NULL: `open` has. */
    dp_status (*connect)(dp__endpoint *endpoint);
    /* Begins a load, with the part that a process has for itself. All processes begin the same
       ones in the same order, and in this order they end. */
    dp_status (*begin)(dp__endpoint *endpoint, dp__load *load);
    /* Returns a process that a load waits for, from 1; 0, as without this: it is not known. */
    unsigned (*lacks)(const dp__endpoint *endpoint, const dp__load *load);
    /* ------------------------------------------------------- messages, if it carries those -- */
    /* Begins to send a packet, which is the carrier's until dp__packet_sent says that it is not, or
       dp__packet_end. What comes goes to dp__packet_received. */
    dp_status (*send)(dp__endpoint *endpoint, int process, dp__packet *packet);
    size_t packet_bytes; /* of one, if the carrier has something behind it; else 0 */
    /* ---------------------------------------------------------------------------- optional -- */
    /* Begins to connect to a process to which something will be sent. */
    dp_status (*reach)(dp__endpoint *endpoint, int process);
    /* Returns DP__LEFT or DP__DEAD: the process has ended, and all that it had sent has come;
       `known`: as the job knows it, and as it is without this. */
    int (*presence)(const dp__endpoint *endpoint, int process, int known);
    /* Says why nothing is sent to a process, or received from it, as far as that is known: "; ...".
       Returns whose fault that is; -1, as without this: it is not known. */
    int (*excuse)(const dp__endpoint *endpoint, int process, bool receives, char *text,
                  size_t room);
    /* Closes, in a child of fork, its copies of connections. */
    void (*let_go)(dp__endpoint *endpoint);
} dp__carrier;

/* ---- what a carrier calls, beside those of dp/mesh.h that its dp_coll_ops has: dp__mesh_open,
   dp__mesh_close, dp__mesh_run_call ------------------------------------------------------------ */

/* Gets a packet for what comes, or fails the job. */
static dp_status dp__packet_take(dp__endpoint *endpoint, dp__packet **out);

/* Notes that so many of the bytes at packet->at have gone. Returns true if that was all: then the
   packet is not the carrier's any more. */
static bool dp__packet_sent(dp__endpoint *endpoint, dp__packet *packet, size_t bytes);

/* Notes that so many have come to packet->at. A header that is whole is read here, and so is what
   follows it; then the packet waits for the next header, unless packet->data says that it is not
   through. */
static dp_status dp__packet_received(dp__endpoint *endpoint, int process, dp__packet *packet,
                                     size_t bytes);

/* Gives back a packet that will not be sent, or that nothing comes to any more; or NULL. */
static void dp__packet_end(dp__endpoint *endpoint, dp__packet *packet);

/* Fails as nothing comes from a process any more. Others may know why, see dp__journal_reason. */
static dp_status dp__endpoint_lost(const dp__endpoint *endpoint, int process)
{
    char doing[DP__DOING_BYTES], who[DP__WHO_BYTES];
    const dp__journal *journal = endpoint->journal;
    (void)dp_error(DP_ERR_REMOTE, "%s: the connection to %s has ended",
                   dp__doing(journal, (unsigned)journal->now.seq, doing),
                   dp__who(journal->job, process, who));
    dp__of_thread.culprit = journal->job->firsts[process] + 1;
    return DP_ERR_REMOTE;
}

/* ==== >>idling =================================================================================
   A thread that waits for what wakes nobody looks again and again: first without a pause, then
   yielding the core in between, and after a while with short sleeps between bursts. Where a carrier
   sleeps it looks without that for a short while, as to be woken takes longer.                  */

enum {
    DP__IDLE_TRIES = 64, /* without a pause */
    DP__IDLE_BURST = 16, /* between two sleeps */
    DP__IDLE_AWAKE_NS = 1000000,
    DP__IDLE_NAP_NS = 50000,   /* at first */
    DP__IDLE_REST_NS = 500000, /* at most */
    DP__IDLE_SPIN_NS = 20000,  /* until a carrier sleeps, */
    DP__IDLE_LOOK_MS = 4       /* and for how long */
};

typedef struct dp__idle_wait {
    unsigned tries;
    uint64_t begun;
    dp__wait look;
} dp__idle_wait;

/* The longer a wait has taken, the less a longer nap matters. */
static uint64_t dp__idle_nap_ns(uint64_t waited)
{
    uint64_t nap = waited / (DP__IDLE_AWAKE_NS / DP__IDLE_NAP_NS);
    return nap < DP__IDLE_REST_NS ? nap : DP__IDLE_REST_NS;
}

/* Rests between two looks. False: it is not worth while to ask yet whether to go on waiting. */
static bool dp__idle(dp__idle_wait *wait)
{
    if (wait->tries++ < DP__IDLE_TRIES) {
        dp__os_pause();
        return false;
    }
    uint64_t now = dp__os_now_ns();
    if (wait->begun == 0)
        wait->begun = now;
    if (now - wait->begun < DP__IDLE_AWAKE_NS || wait->tries % DP__IDLE_BURST != 0)
        dp__os_yield();
    else
        dp__os_sleep_ns(dp__idle_nap_ns(now - wait->begun));
    return true;
}

/* Returns how long the next look may sleep. */
static int dp__idle_ms(dp__idle_wait *wait)
{
    uint64_t now = dp__os_now_ns();
    if (wait->begun == 0)
        wait->begun = now;
    return now - wait->begun < DP__IDLE_SPIN_NS ? 0 : DP__IDLE_LOOK_MS;
}

/* Makes one look of a wait. `out_asks`: it is time to ask whether to go on waiting. */
static dp_status dp__endpoint_look(dp__endpoint *endpoint, dp__idle_wait *wait, bool *out_asks)
{
    const dp__carrier *carrier = endpoint->carrier;
    bool first = wait->tries == 0;
    *out_asks = carrier->sleeps || (!first && dp__idle(wait));
    wait->tries += first;
    return carrier->progress(endpoint, carrier->sleeps ? dp__idle_ms(wait) : 0);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
