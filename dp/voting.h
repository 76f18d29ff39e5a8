/* dp/voting.h - v0.2.0 - how the processes of a job agree on who goes on - MIT licence

   Part of dp.h, which includes it. dp/members.h decides what is sent, and what it means; this room
   sends it. A process that may recover has one port from dp_open to dp_close, for votes, data and
   messages. After a failure the members connect to each other there, and vote. A process that waits
   in a collective looks there, too: a vote may be the only sign that the job has failed.

   This room decides how long a vote waits, and for which members; that makes it fast, never unsafe.
   A process that refuses a connection, or cannot be reached for a while, is not waited for. One
   that can be connected to and does not answer computes, or is stopped: half of the time is for it.

   CONTENTS (search for the tag)
     >>decision  a word of a machine's memory: who claims it first has decided
     >>votes     what travels
     >>joining   where processes wait that come later
     >>voter     what a process votes with
     >>links     connections to the other members
     >>acting    what dp/members.h asks for, and when it has waited long enough
     >>voting    from a failure to a roster
     >>hearing   that others vote
     >>rejoining from outside to a seat
*/

#ifndef DP__ROOMS
#error "dp/voting.h is a part of dp.h: include dp.h"
#else

/* ==== >>decision =================================================================================
   Memory without a name (so on Linux only; elsewhere all vote as between machines) that the
   processes of one machine share for as long as one of them lives, whatever becomes of the job: a
   word {number, row}, and rows with rosters. A process writes a roster into a row of its own, and
   then exchanges the word. It has two rows, as the word may point to one of them.

   Its rows are those of a ticket that it holds by a lock, which the kernel releases when it has
   died, with its children by fork: while it is only stopped, nobody else writes there. Contexts of
   one process have tickets of their own.                                                         */

typedef struct dp__decision_page {
    uint64_t id; /* of this memory: random, not 0 */
    _Alignas(64) atomic_ullong decision;
} dp__decision_page;

typedef struct dp__decision_handle { /* by which another process of the machine finds it */
    dp__shared_name name;
    uint64_t machine;
    uint32_t count, tickets; /* of seats; of processes that hold a row at the same time */
} dp__decision_handle;
_Static_assert(sizeof(dp__decision_handle) == sizeof(dp__shared_name) + 16 &&
                   sizeof(dp__decision_handle) <= sizeof(dp__seat),
               "what travels has no gaps, and has room where a roster has");

typedef struct dp__decision {
    dp__shared shared; /* data NULL: there is none */
    dp__decision_handle handle;
    int ticket;
} dp__decision;

enum { DP__WORD_SPARE = 64 }; /* tickets of those that come later, or are stopped for ever */

static size_t dp__decision_row_bytes(const dp__decision_handle *handle)
{
    return dp__align_up((size_t)handle->count * sizeof(dp__seat), 64);
}

static size_t dp__decision_bytes(const dp__decision_handle *handle)
{
    uint64_t rows = 2 * (uint64_t)handle->tickets * dp__decision_row_bytes(handle);
    return rows < SIZE_MAX / 2 ? dp__align_up(DP__SHARED_PAGE + (size_t)rows, DP__SHARED_PAGE) : 0;
}

static size_t dp__decision_row_at(const dp__decision_handle *handle, uint32_t row)
{
    return DP__SHARED_PAGE + row * dp__decision_row_bytes(handle);
}

static dp__decision_page *dp__decision_page_of(const dp__decision *decision)
{
    return decision->shared.data;
}

static uint64_t dp__decision_id(const dp__decision *decision)
{
    return decision->shared.data != NULL ? dp__decision_page_of(decision)->id : 0;
}

static uint64_t dp__decision_number(uint64_t decision)
{
    return decision >> 32;
}

/* Takes rows of its own. Returns false if none are free. */
static bool dp__decision_enter(dp__decision *decision)
{
    const dp__decision_handle *handle = &decision->handle;
    int ticket = 0, count = (int)handle->tickets;
    while (ticket < count && !dp__os_shared_own(&decision->shared, ticket))
        ticket++;
    decision->ticket = ticket;
    return ticket < count &&
           dp__os_shared_reserve(&decision->shared,
                                 dp__decision_row_at(handle, 2 * (uint32_t)ticket),
                                 2 * dp__decision_row_bytes(handle)) == DP_OK;
}

/* Closes the memory if this process cannot use it: then it votes as between machines. */
static void dp__decision_settle(dp__decision *decision, bool usable)
{
    decision->handle.name.process_id = dp__os_process_id();
    decision->handle.name.fd = decision->shared.fd;
    if (!usable)
        dp__os_shared_close(&decision->shared);
}

/* Makes the memory of a machine, which begins with roster 1. */
static void dp__decision_make(dp__decision *decision, int count, int processes)
{
    char first = dp__sentence_hide();
    decision->handle = (dp__decision_handle){.machine = dp__os_machine(),
                                             .count = (uint32_t)count,
                                             .tickets = 2 * (uint32_t)processes + DP__WORD_SPARE};
    size_t bytes = dp__decision_bytes(&decision->handle);
    bool made = bytes > 0 &&
                dp__os_shared_make(false, bytes, &decision->shared, &decision->handle.name) ==
                    DP_OK &&
                dp__os_shared_reserve(&decision->shared, 0, DP__SHARED_PAGE) == DP_OK;
    if (made) {
        dp__decision_page_of(decision)->id = dp__os_random() | 1;
        atomic_init(&dp__decision_page_of(decision)->decision, (uint64_t)1 << 32);
    }
    dp__decision_settle(decision, made && dp__decision_enter(decision));
    (void)dp__sentence_after(first, DP_OK);
}

/* Opens what another process of the machine has made, for so many seats. */
static void dp__decision_find(dp__decision *decision, const dp__decision_handle *handle, int count)
{
    char first = dp__sentence_hide();
    decision->handle = *handle;
    bool found = handle->tickets > 0 && handle->count == (uint32_t)count &&
                 dp__os_shared_find(&handle->name, dp__decision_bytes(handle), &decision->shared) ==
                     DP_OK;
    dp__decision_settle(decision, found && dp__decision_enter(decision));
    (void)dp__sentence_after(first, DP_OK);
}

static atomic_ullong *dp__decision_row(const dp__decision *decision, uint32_t row)
{
    return (void *)((char *)decision->shared.data + dp__decision_row_at(&decision->handle, row));
}

static size_t dp__decision_row_words(const dp__decision *decision)
{
    return decision->handle.count * sizeof(dp__seat) / sizeof(uint64_t);
}

/* Reads the roster of the word if its number is above this one; returns its number, or 0. */
static uint64_t dp__decision_read(const dp__decision *decision, uint64_t above, dp__seat *out)
{
    if (decision->shared.data == NULL)
        return 0;
    dp__decision_page *page = dp__decision_page_of(decision);
    for (;;) {
        uint64_t now = atomic_load(&page->decision);
        if (dp__decision_number(now) <= above)
            return 0;
        atomic_ullong *row = dp__decision_row(decision, (uint32_t)now);
        for (size_t i = 0; i < dp__decision_row_words(decision); i++) {
            uint64_t part = atomic_load_explicit(&row[i], memory_order_relaxed);
            memcpy((char *)out + i * sizeof part, &part, sizeof part);
        }
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load(&page->decision) == now) /* else its row may have been written anew */
            return dp__decision_number(now);
    }
}

/* Makes this the roster of that number, unless the word has come as far already. */
static void dp__decision_claim(const dp__decision *decision, uint64_t number,
                               const dp__seat *roster)
{
    dp__decision_page *page = dp__decision_page_of(decision);
    unsigned long long now = atomic_load(&page->decision);
    uint32_t row = 2 * (uint32_t)decision->ticket;
    row += (uint32_t)now == row;
    atomic_thread_fence(memory_order_release); /* who reads what is written sees the word of now */
    for (size_t i = 0; i < dp__decision_row_words(decision); i++) {
        uint64_t part;
        memcpy(&part, (const char *)roster + i * sizeof part, sizeof part);
        atomic_store_explicit(&dp__decision_row(decision, row)[i], part, memory_order_relaxed);
    }
    while (dp__decision_number(now) < number &&
           !atomic_compare_exchange_weak(&page->decision, &now, number << 32 | row)) {
    }
}

/* ==== >>votes ==================================================================================
   A vote is its head and, where it names a roster, all seats of that.                            */

enum {
    DP__VOTE_MAGIC = 0x31707664,
    DP__VOTE_SEND_MS = 200,
    DP__GREET_MS = 300,
    DP__MEET_LEAST_MS = 1000, /* who is of the roster comes to meet the others by then */
    DP__MEET_MOST_MS = 5000
};

typedef struct dp__vote_head {
    uint32_t magic, count; /* seats that follow: all, or none */
    int32_t kind, seat;    /* see dp__vote */
    uint64_t holder, number, ballot, other;
    uint32_t left_ms;  /* the time that its sender has to come to an end */
    uint32_t wrappers; /* of its sender, which newcomers have to make, too */
} dp__vote_head;
_Static_assert(sizeof(dp__vote_head) == 56, "what travels has no gaps");

/* Beside those of dp/members.h: a process that proposed ends without a roster, and this is why. */
enum { DP__VOTE_WHY = DP__VOTE_DECIDED + 1 };

static size_t dp__vote_bytes(const dp__vote_head *head)
{
    return head->kind == DP__VOTE_WHY ? DP__SAID_BYTES : head->count * sizeof(dp__seat);
}

/* Returns false if the other side does not take it: then the connection is of no use any more. */
static bool dp__vote_post(int fd, const dp__vote_head *head, const void *body)
{
    uint64_t until_ns = dp__os_after_ms(DP__VOTE_SEND_MS);
    return dp__wire_send(fd, head, sizeof *head, until_ns) == DP_OK &&
           dp__wire_send(fd, body, dp__vote_bytes(head), until_ns) == DP_OK;
}

/* Returns true if a head can be of this job: its numbers decide how much memory is used, and which
   seats are looked at. */
static bool dp__vote_is_sound(const dp__vote_head *head, int count)
{
    bool lists = head->kind == DP__VOTE_ACCEPT || head->kind == DP__VOTE_DECIDED ||
                 (head->kind == DP__VOTE_PROMISE && head->other != 0);
    return head->magic == DP__VOTE_MAGIC && head->kind >= 0 && head->kind <= DP__VOTE_WHY &&
           head->seat >= 0 && head->seat < count && dp__ballot_seat(head->ballot) < count &&
           head->count == (lists ? (uint32_t)count : 0);
}

/* Ends the texts of seats that have come. */
static void dp__seats_end(dp__seat *seats, int count)
{
    for (int s = 0; s < count; s++)
        seats[s].host[sizeof seats[s].host - 1] = '\0';
}

/* ==== >>joining =================================================================================
   From the first dp_admit or dp_recover on, process 0 listens at a place that follows from what the
   launcher has said. With shards, so does a process that proposes. A process that comes later waits
   there until the others let it in and a seat is free.                                         */

typedef struct dp__newcomer { /* one that waits */
    int fd;                   /* -1: there is none */
    dp__seat seat;
} dp__newcomer;

typedef struct dp__join_reply { /* to one that has proved that it is of this job */
    uint32_t magic;
    int32_t status; /* a failure: it can never be let in, and `text` is why */
    uint32_t count, reserved;
    dp__decision_handle decision; /* tickets 0: it is on another machine, or there is none */
    char text[DP__SAID_BYTES];
} dp__join_reply;
_Static_assert(sizeof(dp__join_reply) == 16 + sizeof(dp__decision_handle) + DP__SAID_BYTES,
               "what travels has no gaps");

enum { DP__JOIN_PORT_BYTES = DP__HOST_BYTES + 256 };

typedef struct dp__join_port {
    dp__launch launch;     /* where it is; its place is "": nowhere */
    dp__listener listener; /* of the process that is there */
    dp__os_watch *watch;
    int tries; /* calls of dp_admit in a row that have not opened it */
    int why;   /* it is shut: see dp__os_why; < 0: another one listens there; 0: it is open */
    int count; /* of seats, and of newcomers at most */
    dp__newcomer *newcomers; /* in no order */
} dp__join_port;

static void dp__join_port_close(dp__join_port *port)
{
    dp__listener_hang_up(&port->listener);
    for (int g = 0; g < port->count; g++)
        dp__os_drop(&port->newcomers[g].fd);
}

/* Gives its name back, so that another process can have it. */
static void dp__join_port_leave(dp__join_port *port)
{
    if (port->listener.fd >= 0)
        dp__os_forget(&port->listener.at);
    dp__join_port_close(port);
}

/* Returns a place behind the ports where the processes of the launch may meet, with a key of its
   own. Where they have told each other the key, as in a group, nobody else can come. */
static dp__launch dp__join_port_of(const dp__launch *launch)
{
    dp__launch port = *launch;
    if (launch->place[0] == '\0' || launch->agreed)
        return (dp__launch){.place = ""};
    port.key = dp__key_with(launch->key, "door");
    if (launch->ports.last != 0)
        port.port = dp__launch_port(&port);
    else
        port.port += port.port + 2 * DP__PORTS <= DP__PORT_MAX ? DP__PORTS : -DP__PORTS;
    dp__launch_name(&port);
    return port;
}

static bool dp__join_port_is_shut(const dp__join_port *port)
{
    return port->listener.fd < 0 && port->launch.place[0] != '\0';
}

static void dp__join_port_open(dp__join_port *port)
{
    const dp__launch *at = &port->launch;
    dp__listener *listener = &port->listener;
    int other = -1;
    if (!dp__join_port_is_shut(port))
        return;
    listener->at = dp__os_local(at->place);
    if (at->host[0] == '\0')
        listener->fd = dp__listen_at(&listener->at, &other);
    for (int i = 0; at->host[0] != '\0' && i < at->port_count && listener->fd < 0; i++)
        (void)dp__listen_on(listener, at, at->host, at->port + i);
    port->why = other >= 0 ? -1 : dp__os_why();
    dp__os_close(other);
    if (dp__listener_serve(listener, DP__FOR_JOINING, (dp__service){.key = at->key}) != DP_OK)
        dp__listener_hang_up(listener);
}

/* Writes why it is shut. */
static const char *dp__join_port_text(const dp__join_port *port, char *text, size_t room)
{
    const dp__launch *at = &port->launch;
    bool named = at->host[0] == '\0', taken = port->why < 0 || dp__os_is_taken(port->why);
    const char *why = !taken  ? "cannot be opened: "
                      : named ? "is that of another process; end it"
                              : "are taken; free one, or set DP_PORTS to a range with a free one, "
                                "for all";
    int used = named ? snprintf(text, room, "the name '%s'", at->place)
                     : snprintf(text, room, "ports %d to %d of %s", at->port,
                                at->port + at->port_count - 1, at->host);
    snprintf(text + used, room - (size_t)used, ", where they would be awaited, %s%s", why,
             taken ? "" : dp__os_why_text(port->why));
    return text;
}

/* Answers one that is of this job with what it needs to be let in, or why it never can be. Its seat
   then says whether it has the memory of this machine. */
static bool dp__newcomer_invite(int fd, const dp__seat *own, bool reachable,
                                const dp__decision *decision, dp__seat *seat, uint64_t until_ns)
{
    dp__join_reply to = {.magic = DP__VOTE_MAGIC, .count = own->limit};
    bool near = seat->machine == own->machine;
    if (!near && !reachable) {
        to.status = DP_ERR_UNSUPPORTED;
        snprintf(to.text, sizeof to.text,
                 "the job has met inside another machine: set DP_INTERFACE for all, and "
                 "DP_ADDR=host:port, so that its processes have addresses");
    } else if (near && decision->shared.data != NULL) {
        to.decision = decision->handle;
    }
    return dp__wire_send(fd, &to, sizeof to, until_ns) == DP_OK && to.status == DP_OK &&
           dp__wire_receive(fd, &seat->memory, sizeof seat->memory, until_ns) == DP_OK;
}

/* ==== >>voter ==================================================================================
   What a process votes with: a port, what it knows of the members, connections to them, the word
   of its machine, the join port.                                                                 */

typedef enum dp__vote_link_stage {
    DP__STAGE_DIALS, /* this process has begun to connect, */
    DP__STAGE_ASKS,  /* and has sent its request */
    DP__STAGE_TALKS  /* each knows who the other is: votes go both ways */
} dp__vote_link_stage;

typedef struct dp__vote_link {
    int fd; /* -1: none */
    dp__vote_link_stage stage;
    int seat;
    uint64_t holder;   /* of that seat, to whom it goes or from whom it comes */
    uint16_t number;   /* the last bits of that of its roster, as it called; see >>hearing */
    uint64_t since_ns; /* it was begun; without one: it was tried last */
    size_t got;        /* bytes of what comes */
    int watched;       /* its place in dp__voter.watch; 0: it was not connected then */
    dp__join_request request;
    dp__challenge challenge;
    dp__vote_head head;
    bool headed; /* the head has come, */
    void *body;  /* and what follows is awaited; or NULL */
} dp__vote_link;

typedef enum dp__absence { DP__HERE_MAYBE, DP__OUT_OF_REACH, DP__REFUSED_US } dp__absence;

typedef struct dp__voter {
    dp__launch launch; /* its key is that of all */
    int count;
    bool whole;        /* the job goes on only if no seat is empty */
    uint32_t wrappers; /* that newcomers have to make, too, before anything else */
    uint32_t unmade;   /* of a newcomer: how many of those it has yet to make */
    dp__members *members;
    dp__actions actions;
    dp__listener listener;
    dp__seat *read; /* room for a roster */
    dp__decision decision;
    dp__join_port port;
    dp__vote_link *links; /* to each seat, from each seat */
    dp__os_watch *watch;
    unsigned char *absent; /* a dp__absence of each seat */
    dp__vote asked;        /* the last one that was spread; */
    bool asks;             /* who comes later gets it, too */
    uint64_t begun_ns, until_ns;
    uint64_t others_ns; /* the first of those that have promised has to come to an end by then */
    char why[DP__SAID_BYTES]; /* one that proposed has ended */
    dp__wait_kind wait;
    uint64_t waits_ns, ends_ns; /* since when, and until when */
    uint64_t step_ns;           /* see dp__step_measure */
    uint64_t full_ns;           /* when it had no room for a connection or a vote last; 0: never */
    uint64_t seed;
    int again;              /* ballots that have failed */
    uint64_t heard_ns;      /* since when another one is known to vote while this one runs; or 0 */
    bool raised;            /* the limit of open files */
    size_t bytes;           /* of all this */
    struct dp__job *before; /* the jobs that were: their memory may be in use */
} dp__voter;

static int dp__vote_links_count(const dp__voter *voter)
{
    return 2 * voter->count;
}

static dp__seat *dp__voter_roster(const dp__voter *voter)
{
    return dp__roster_of(voter->members);
}

static dp__seat *dp__voter_own(const dp__voter *voter)
{
    return &dp__voter_roster(voter)[voter->members->seat];
}

/* Counts the holders of the seats before this one: the number of its process. */
static int dp__seat_number(const dp__seat *seats, int seat)
{
    int number = 0;
    for (int s = 0; s < seat; s++)
        number += seats[s].holder != 0;
    return number;
}

static void dp__vote_link_end(dp__vote_link *link)
{
    dp__os_drop(&link->fd);
    dp__os_free(link->body, 0, NULL);
    link->body = NULL;
    link->got = 0;
    link->headed = false;
}

static void dp__vote_links_end(dp__voter *voter)
{
    if (voter->raised)
        dp__os_files_lower();
    voter->raised = false;
    for (int i = 0; i < dp__vote_links_count(voter); i++)
        dp__vote_link_end(&voter->links[i]);
}

/* Closes all ports: the others go on without this process. */
static void dp__voter_unlisten(dp__voter *voter)
{
    if (voter == NULL)
        return;
    dp__listener_hang_up(&voter->listener);
    dp__vote_links_end(voter);
    dp__join_port_close(&voter->port);
}

/* Closes a voter; `own`: not in a child of fork, which has copies. */
static void dp__voter_close(dp__voter *voter, bool own)
{
    if (voter == NULL)
        return;
    if (own)
        dp__join_port_leave(&voter->port);
    dp__voter_unlisten(voter);
    dp__listener_close(&voter->listener);
    dp__listener_close(&voter->port.listener);
    dp__os_shared_close(&voter->decision.shared);
    dp__os_free(voter, voter->bytes, NULL);
}

enum { DP__VOTE_WATCHED = 1 + DP__PENDING_MAX }; /* at a listener */

/* Makes a voter while there is memory: a process without any still has to find out who is left. */
static dp__voter *dp__voter_make(const dp__launch *launch, int seat, int count)
{
    size_t seats = (size_t)count, links = 2 * seats;
    size_t members = dp__align_up(dp__members_bytes(count), _Alignof(max_align_t));
    size_t watched = links + 2 * (size_t)DP__VOTE_WATCHED;
    size_t bytes = sizeof(dp__voter) + links * sizeof(dp__vote_link) +
                   seats * (sizeof(dp__seat) + sizeof(dp__newcomer)) + members +
                   watched * sizeof(dp__os_watch) + seats;
    dp__voter *voter = dp__os_alloc(bytes, _Alignof(max_align_t), NULL);
    if (voter == NULL)
        return NULL;
    memset(voter, 0, bytes);
    voter->bytes = bytes;
    voter->count = voter->port.count = count;
    voter->links = (dp__vote_link *)(voter + 1);
    voter->read = (dp__seat *)(voter->links + links);
    voter->port.newcomers = (dp__newcomer *)(voter->read + count);
    voter->members = (dp__members *)(voter->port.newcomers + count);
    voter->watch = (void *)((char *)voter->members + members);
    voter->port.watch = voter->watch + links + DP__VOTE_WATCHED;
    voter->absent = (unsigned char *)(voter->watch + watched);
    voter->listener = voter->port.listener = dp__listener_none();
    voter->decision.shared.fd = -1;
    voter->seed = dp__os_random() | 1;
    for (size_t i = 0; i < links; i++)
        voter->links[i].fd = -1;
    for (int g = 0; g < count; g++)
        voter->port.newcomers[g].fd = -1;
    voter->port.launch = dp__join_port_of(launch);
    voter->members->count = count;
    voter->members->seat = seat;
    voter->members->holder = dp__os_random() | 1;
    if (dp__listener_reserve(&voter->listener) == DP_OK &&
        dp__listener_reserve(&voter->port.listener) == DP_OK)
        return voter;
    dp__voter_close(voter, true);
    return NULL;
}

/* Gives this process a port and a seat, which nobody else knows yet. */
static dp_status dp__voter_seat(dp__voter *voter, const dp__tree *tree, bool far)
{
    dp__members *members = voter->members;
    dp__seat *seat = dp__voter_own(voter);
    voter->launch.process = members->seat;
    seat->holder = members->holder;
    seat->limit = (uint32_t)voter->count;
    return dp__seat_make(seat, &voter->launch, tree, far, &voter->listener);
}

/* Reads $DP_PROCESS_LIMIT: the job may have more processes later than it has now. */
static dp_status dp__voter_limit(const dp__launch *launch, int count, bool whole, int *out)
{
    *out = count;
    if (dp__os_env("DP_PROCESS_LIMIT") != NULL && !launch->agreed)
        DP_TRY(dp__env_number("DP_PROCESS_LIMIT", count, DP__PROCESSES_MAX, out));
    return !whole || *out == count
               ? DP_OK
               : dp_error(DP_ERR_INVALID,
                          "DP_PROCESS_LIMIT is %d, and with shards a job of %d does not grow", *out,
                          count);
}

/* Makes a voter while a context opens. It is closed with the context, however that goes. */
static dp_status dp__voter_open(const dp_bootstrap *boot, const dp__launch *launch, dp__share near,
                                bool far, bool whole, dp__voter **out)
{
    bool by_tree = boot->all_gather == dp__tree_all_gather;
    if (dp__boot_is_mpi(boot))
        return dp_error(DP_ERR_UNSUPPORTED,
                        "config.recovers: MPI has brought the processes together, and it ends them "
                        "all when one of them dies");
    int limit;
    DP_TRY(dp__voter_limit(launch, boot->process_count, whole, &limit));
    *out = dp__voter_make(launch, boot->process, limit);
    if (*out == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", limit);
    (*out)->whole = whole;
    (*out)->members->whole = whole;
    if (near.place == 0)
        dp__decision_make(&(*out)->decision, limit, near.count);
    return dp__voter_seat(*out, by_tree ? boot->user : NULL, far);
}

static dp__key dp__vote_link_key(const dp__voter *voter, uint64_t holder)
{
    return dp__key_of_run(voter->launch.key, holder);
}

/* Lets in those that vote, once the key of all is known. */
static void dp__voter_serve(dp__voter *voter)
{
    const dp__service service = {.key = dp__vote_link_key(voter, voter->members->holder)};
    (void)dp__listener_serve(&voter->listener, DP__FOR_VOTES, service); /* there is memory */
}

/* Makes these members roster 1, in which this process runs. */
static void dp__voter_begin(dp__voter *voter, int members)
{
    dp__seat *roster = dp__voter_roster(voter);
    voter->launch.key = roster[0].key; /* that of the first one becomes that of all */
    for (int s = 0; s < members; s++) {
        roster[s].key = roster[0].key;
        roster[s].came = 1;
    }
    voter->members->number = 1;
    voter->members->role = DP__ROLE_RUNS;
    dp__voter_serve(voter);
}

/* Opens the memory that another process of this machine has made. */
static void dp__voter_share(dp__voter *voter, const dp__decision_handle *all, int count)
{
    int own = voter->members->seat, maker = 0;
    while (maker < count && (all[maker].tickets == 0 || all[maker].machine != all[own].machine))
        maker++;
    if (maker == count || maker == own)
        return;
    dp__os_shared_close(&voter->decision.shared); /* two may have thought that they are the first */
    dp__decision_find(&voter->decision, &all[maker], voter->count);
}

/* Tells all which memory this process shares, and where it listens, as they do. */
static dp_status dp__voter_meet(const dp_bootstrap *boot, dp__voter *voter)
{
    dp__seat *roster = dp__voter_roster(voter), own = *dp__voter_own(voter);
    dp__decision_handle *all = (dp__decision_handle *)voter->read,
                        handle = {.machine = own.machine};
    if (voter->decision.shared.data != NULL)
        handle = voter->decision.handle;
    DP_TRY(dp__boot_gather(boot, &handle, all, sizeof handle));
    dp__voter_share(voter, all, boot->process_count);
    own.memory = dp__decision_id(&voter->decision);
    DP_TRY(dp__boot_gather(boot, &own, roster, sizeof own));
    for (int s = 1; s < boot->process_count; s++)
        if (roster[s].limit != roster[0].limit)
            return dp_error(DP_ERR_MISMATCH,
                            "config.recovers: DP_PROCESS_LIMIT is %d in process 0 and %d in "
                            "process %d",
                            (int)roster[0].limit, (int)roster[s].limit, s);
    dp__voter_begin(voter, boot->process_count);
    return dp__seats_check(roster, boot->process_count, voter->members->seat);
}

/* ---- at the join port ------------------------------------------------------------------------ */

/* Opens the join port if this is process 0, which proposes first. Another one may have to leave it:
   then those that wait come again. */
static void dp__join_port_keep(dp__voter *voter)
{
    if (dp__seat_number(dp__voter_roster(voter), voter->members->seat) == 0)
        dp__join_port_open(&voter->port);
    else
        dp__join_port_leave(&voter->port);
}

/* Keeps the connection of one that is of this job, and can be let in. */
static void dp__join_port_greet(dp__voter *voter, const dp__pending *pending, uint64_t until_ns)
{
    dp__join_port *port = &voter->port;
    int fd = pending->fd, slot = 0;
    dp__newcomer newcomer = {.fd = fd};
    const dp__seat *own = dp__voter_own(voter);
    bool reachable =
        dp__seat_address(dp__voter_roster(voter), voter->count, voter->members->seat)[0] != '\0';
    while (slot < voter->count && port->newcomers[slot].fd >= 0)
        slot++;
    if (slot == voter->count || pending->request.version != DP_VERSION ||
        dp__wire_receive(fd, &newcomer.seat, sizeof newcomer.seat, until_ns) != DP_OK ||
        !dp__newcomer_invite(fd, own, reachable, &voter->decision, &newcomer.seat, until_ns)) {
        dp__os_close(fd);
        return;
    }
    dp__seats_end(&newcomer.seat, 1);
    newcomer.seat.limit = own->limit;
    newcomer.seat.key = voter->launch.key;
    port->newcomers[slot] = newcomer;
}

/* Looks who has come, again while one is about to prove that it is of the job; returns how many
   wait. */
static int dp__join_port_attend(dp__voter *voter)
{
    enum { PROOF_MS = 20 };
    char none;
    dp__join_port *port = &voter->port;
    dp__listener *listener = &port->listener;
    uint64_t until_ns = dp__os_after_ms(PROOF_MS);
    int count = 0, ms = 0;
    for (bool soon = listener->fd >= 0; soon;) {
        int watched = dp__listener_watch(listener, port->watch, DP__VOTE_WATCHED);
        int before = listener->pending_count;
        dp__pending pending;
        dp__os_poll(port->watch, watched, ms);
        (void)dp__listener_look(listener, port->watch, watched);
        while (dp__listener_take(listener, DP__FOR_JOINING, &pending))
            dp__join_port_greet(voter, &pending, dp__os_after_ms(DP__GREET_MS));
        bool asked = dp__listener_is_asked(listener, DP__FOR_JOINING);
        ms = asked ? dp__os_ms_until(until_ns) : 0;
        soon = ms > 0 || listener->pending_count > before;
    }
    for (int g = 0; g < port->count; g++) {
        dp__newcomer *newcomer = &port->newcomers[g];
        if (newcomer->fd >= 0 && dp__os_receive(newcomer->fd, &none, 1) < 0)
            dp__os_drop(&newcomer->fd);
        count += newcomer->fd >= 0;
    }
    return count;
}

/* Returns true if one can be let in now. */
static bool dp__join_port_look(dp__voter *voter)
{
    return dp__join_port_attend(voter) > 0 &&
           dp__seat_number(dp__voter_roster(voter), voter->count) < voter->count;
}

/* ==== >>links ==================================================================================
   Connections between members. A process connects to another one's port, and each proves that it
   is of the job, and who it is: the key is made from that of the job and the holder whom it is for,
   so that a process that has got the port of another one since does not pass for it.           */

enum { DP__REDIAL_MS = 50, DP__REACH_MS = 1500 };

static void dp__voter_step(dp__voter *voter, const dp__members_event *event, dp__vote_link *from);

static int dp__left_ms(const dp__voter *voter)
{
    return dp__os_ms_until(voter->until_ns);
}

/* Notes what a connection tells of a member; of who had its seat before it, it tells nothing. */
static void dp__member_is(dp__voter *voter, const dp__vote_link *link, dp__absence absence)
{
    int seat = link->seat;
    if (link->holder != dp__voter_roster(voter)[seat].holder)
        return;
    bool before = voter->absent[seat] != DP__HERE_MAYBE, now = absence != DP__HERE_MAYBE;
    voter->absent[seat] = (unsigned char)absence;
    if (before != now)
        dp__voter_step(
            voter, &(dp__members_event){.kind = now ? DP__ON_ABSENT : DP__ON_PRESENT, .seat = seat},
            NULL);
}

static uint64_t dp__reach_ns(const dp__voter *voter)
{
    uint64_t quarter = (voter->until_ns - voter->begun_ns) / 4;
    uint64_t reach = DP__REACH_MS * (uint64_t)1000000 + voter->step_ns;
    return reach < quarter ? reach : quarter;
}

/* Begins to connect to a member, but not again and again. */
static void dp__vote_link_dial(dp__voter *voter, int seat)
{
    dp__vote_link *link = &voter->links[seat];
    const dp__seat *roster = dp__voter_roster(voter);
    uint64_t now = dp__os_now_ns();
    if (link->holder != roster[seat].holder)
        dp__vote_link_end(link);
    if (link->fd >= 0 || now - link->since_ns < DP__REDIAL_MS * (uint64_t)1000000)
        return;
    int fd = dp__seat_connect(roster, voter->count, voter->members->seat, seat);
    *link = (dp__vote_link){.fd = fd < 0 ? -1 : fd,
                            .stage = DP__STAGE_DIALS,
                            .seat = seat,
                            .holder = roster[seat].holder,
                            .since_ns = now};
    if (fd == DP__OS_FULL)
        voter->full_ns = now;
    else if (fd == DP__OS_REFUSED)
        dp__member_is(voter, link, DP__REFUSED_US);
    else if (fd == -1 && now - voter->begun_ns > dp__reach_ns(voter))
        dp__member_is(voter, link, DP__OUT_OF_REACH);
}

/* Returns a connection to a member over which votes can go, or NULL. */
static dp__vote_link *dp__vote_link_to(const dp__voter *voter, int seat)
{
    for (int way = 0; way < 2; way++) {
        dp__vote_link *link = &voter->links[way * voter->count + seat];
        if (link->fd >= 0 && link->stage == DP__STAGE_TALKS &&
            link->holder == dp__voter_roster(voter)[seat].holder)
            return link;
    }
    return NULL;
}

static dp__vote_head dp__vote_head_of(const dp__voter *voter, const dp__vote *vote)
{
    return (dp__vote_head){.magic = DP__VOTE_MAGIC,
                           .count = vote->places != NULL ? (uint32_t)voter->count : 0,
                           .kind = vote->kind,
                           .seat = vote->seat,
                           .holder = vote->holder,
                           .number = vote->number,
                           .ballot = vote->ballot,
                           .other = vote->other,
                           .left_ms = (uint32_t)dp__left_ms(voter),
                           .wrappers = voter->wrappers};
}

static void dp__vote_link_send(dp__voter *voter, dp__vote_link *link, const dp__vote *vote)
{
    dp__vote_head head = dp__vote_head_of(voter, vote);
    if (!dp__vote_post(link->fd, &head, vote->places))
        dp__vote_link_end(link);
}

/* Sends one that has proved who it is what all were asked. */
static void dp__vote_link_talks(dp__voter *voter, dp__vote_link *link)
{
    link->stage = DP__STAGE_TALKS;
    if (link->holder != dp__voter_roster(voter)[link->seat].holder)
        return;
    dp__member_is(voter, link, DP__HERE_MAYBE);
    if (voter->asks && link->fd >= 0)
        dp__vote_link_send(voter, link, &voter->asked);
}

/* Returns 1 if all of it has come, 0 if it may come yet, -1 if the connection has ended. */
static int dp__vote_link_fill(dp__vote_link *link, void *to, size_t bytes)
{
    ptrdiff_t got = dp__os_receive(link->fd, (char *)to + link->got, bytes - link->got);
    link->got = got < 0 ? 0 : link->got + (size_t)got;
    if (got < 0 || link->got < bytes)
        return got < 0 ? -1 : 0;
    link->got = 0;
    return 1;
}

/* Sets how long a vote may take from one process to another: it follows from how long handshakes
   take, as a machine may be busy or a link slow, and from the count of members. */
static void dp__step_measure(dp__voter *voter, uint64_t handshake_ns)
{
    uint64_t step = (100 + (uint64_t)voter->count / 4) * 1000000 + 2 * handshake_ns;
    uint64_t most = (voter->until_ns - voter->begun_ns) / 16;
    step = step < most ? step : most;
    voter->step_ns = step > voter->step_ns ? step : voter->step_ns;
}

/* Takes a connection that this process has begun a step further; false: it is over. */
static bool dp__vote_link_call(dp__voter *voter, dp__vote_link *link)
{
    if (link->stage == DP__STAGE_DIALS) {
        int how = dp__os_connection(link->fd);
        if (how != 0) {
            dp__member_is(voter, link, how == DP__OS_REFUSED ? DP__REFUSED_US : DP__OUT_OF_REACH);
            return false;
        }
        link->request = (dp__join_request){.magic = DP__JOIN_MAGIC,
                                           .version = DP_VERSION,
                                           .kind = DP__FOR_VOTES,
                                           .nonce = dp__os_random(),
                                           .process = voter->members->seat,
                                           .process_count = voter->count,
                                           .listens = voter->members->holder,
                                           .connection = (uint16_t)voter->members->number};
        link->stage = DP__STAGE_ASKS;
        return dp__os_send(link->fd, &link->request, sizeof link->request) ==
               (ptrdiff_t)sizeof link->request;
    }
    int got = dp__vote_link_fill(link, &link->challenge, sizeof link->challenge);
    if (got <= 0)
        return got == 0;
    dp__key key = dp__vote_link_key(voter, link->holder);
    uint64_t nonce = link->challenge.nonce, proof = dp__proof(key, &link->request, nonce, true);
    if (link->challenge.proof != dp__proof(key, &link->request, nonce, false)) {
        dp__member_is(voter, link, DP__REFUSED_US); /* another one listens there by now */
        return false;
    }
    if (dp__os_send(link->fd, &proof, sizeof proof) != (ptrdiff_t)sizeof proof)
        return false;
    dp__step_measure(voter, dp__os_now_ns() - link->since_ns);
    dp__vote_link_talks(voter, link);
    return link->fd >= 0;
}

/* Gives one that has proved who it is the place of its seat. */
static void dp__vote_link_seat(dp__voter *voter, const dp__pending *pending)
{
    const dp__join_request *request = &pending->request;
    if (request->version != DP_VERSION || request->process_count != voter->count ||
        request->process < 0 || request->process >= voter->count) {
        dp__os_close(pending->fd);
        return;
    }
    dp__vote_link *link = &voter->links[voter->count + request->process];
    dp__vote_link_end(link);
    *link = (dp__vote_link){.fd = pending->fd,
                            .seat = request->process,
                            .holder = request->listens,
                            .number = request->connection,
                            .since_ns = pending->came_ns};
    dp__vote_link_talks(voter, link);
}

/* Makes an event of what has come. */
static dp__members_event dp__vote_event(const dp__vote_head *head, dp__seat *seats, int count)
{
    if (head->count > 0)
        dp__seats_end(seats, count);
    return (dp__members_event){.kind = DP__ON_VOTE,
                               .vote = {.kind = head->kind,
                                        .seat = head->seat,
                                        .holder = head->holder,
                                        .number = head->number,
                                        .ballot = head->ballot,
                                        .other = head->other,
                                        .places = head->count > 0 ? seats : NULL}};
}

/* Does what a member has sent. Whoever has promised is told what came of it before its time is
   over, and has time to try itself. */
static void dp__vote_link_take(dp__voter *voter, dp__vote_link *link, void *body)
{
    const dp__vote_head *head = &link->head;
    if (head->kind == DP__VOTE_WHY) {
        if (voter->why[0] == '\0' && head->number == voter->members->number &&
            dp__is_of_roster(voter->members, head->seat, head->holder))
            snprintf(voter->why, sizeof voter->why, "%.*s", DP__SAID_BYTES - 1, (const char *)body);
        return;
    }
    if (head->kind == DP__VOTE_PROMISE && voter->members->role == DP__ROLE_PREPARES &&
        head->ballot == voter->members->ballot) {
        uint64_t now = dp__os_now_ns(), left = head->left_ms * (uint64_t)1000000;
        voter->others_ns = now + left < voter->others_ns ? now + left : voter->others_ns;
        voter->ends_ns = now + left / 2 < voter->ends_ns ? now + left / 2 : voter->ends_ns;
    }
    const dp__members_event event = dp__vote_event(head, body, voter->count);
    dp__voter_step(voter, &event, link);
}

/* Receives what a member sends; false: the connection is over. */
static bool dp__vote_link_hear(dp__voter *voter, dp__vote_link *link)
{
    dp__vote_head *head = &link->head;
    int got = link->headed ? 1 : dp__vote_link_fill(link, head, sizeof *head);
    if (got <= 0 || (!link->headed && !dp__vote_is_sound(head, voter->count)))
        return got == 0;
    link->headed = true;
    size_t bytes = dp__vote_bytes(head);
    if (bytes > 0 && link->body == NULL) {
        link->body = dp__os_alloc(bytes, _Alignof(dp__seat), NULL);
        voter->full_ns = link->body == NULL ? dp__os_now_ns() : voter->full_ns;
    }
    if (bytes > 0)
        got = link->body != NULL ? dp__vote_link_fill(link, link->body, bytes) : -1;
    if (got <= 0)
        return got == 0;
    void *body = link->body;
    link->body = NULL;
    link->headed = false;
    dp__vote_link_take(voter, link, body);
    dp__os_free(body, 0, NULL);
    return link->fd >= 0;
}

static bool dp__vote_link_serve(dp__voter *voter, dp__vote_link *link)
{
    switch (link->stage) {
    case DP__STAGE_DIALS:
    case DP__STAGE_ASKS:
        return dp__vote_link_call(voter, link);
    case DP__STAGE_TALKS:
        return dp__vote_link_hear(voter, link);
    }
    return false;
}

/* Gives up a call that takes too long to begin: then it is tried again. */
static void dp__vote_link_late(dp__voter *voter, dp__vote_link *link)
{
    uint64_t age = dp__os_now_ns() - link->since_ns;
    if (link->stage != DP__STAGE_DIALS || age <= dp__reach_ns(voter))
        return;
    dp__vote_link_end(link);
    dp__member_is(voter, link, DP__OUT_OF_REACH);
}

/* Lists, behind the first few, what is connected and nothing else: poll refuses a list that is
   longer than the number of files that may be open. As long as this process runs, votes stay
   unread. */
static int dp__vote_links_list(dp__voter *voter, int count)
{
    bool runs = voter->members->role == DP__ROLE_RUNS;
    for (int i = 0; i < dp__vote_links_count(voter); i++) {
        dp__vote_link *link = &voter->links[i];
        bool dials = link->stage == DP__STAGE_DIALS;
        bool looks = link->fd >= 0 && !(runs && link->stage == DP__STAGE_TALKS);
        link->watched = looks ? count : 0;
        if (looks)
            voter->watch[count++] =
                (dp__os_watch){.fd = link->fd, .events = dials ? DP__CAN_WRITE : DP__CAN_READ};
    }
    return count;
}

/* Looks once at all connections, for so long at most. */
static void dp__vote_links_look(dp__voter *voter, int ms)
{
    dp__pending pending;
    dp__os_watch *watch = voter->watch;
    int come_count = dp__listener_watch(&voter->listener, watch, DP__VOTE_WATCHED);
    dp__os_poll(watch, dp__vote_links_list(voter, come_count), ms);
    for (int i = 0; i < dp__vote_links_count(voter); i++) {
        dp__vote_link *link = &voter->links[i];
        if (link->fd < 0 || link->watched == 0)
            continue;
        if (watch[link->watched].revents == 0)
            dp__vote_link_late(voter, link);
        else if (!dp__vote_link_serve(voter, link))
            dp__vote_link_end(link);
    }
    if (!dp__listener_look(&voter->listener, watch, come_count))
        voter->full_ns = dp__os_now_ns();
    while (dp__listener_take(&voter->listener, DP__FOR_VOTES, &pending))
        dp__vote_link_seat(voter, &pending);
}

/* ==== >>acting =================================================================================
   What dp/members.h asks for is done at once, but for waiting.                                   */

enum { DP__AGAIN_MOST = 6, DP__WINDOW = 4 };

/* Counts the members before this one that may be there: they propose first. Connects to the first
   few of them, and to more the longer that nothing comes. */
static int dp__lower_await(dp__voter *voter)
{
    int place = 0, asked = 0;
    uint64_t steps = (dp__os_now_ns() - voter->waits_ns) / voter->step_ns;
    int window = DP__WINDOW << (steps < 20 ? steps : 20);
    for (int s = 0; s < voter->members->seat; s++) {
        if (dp__voter_roster(voter)[s].holder == 0)
            continue;
        if (asked < window && dp__vote_link_to(voter, s) == NULL)
            dp__vote_link_dial(voter, s);
        asked += voter->absent[s] != DP__REFUSED_US;
        place += voter->absent[s] == DP__HERE_MAYBE;
    }
    return place;
}

/* Returns a time that is longer the more often a ballot has failed, and random, so that of two that
   stand in each other's way one comes through; an eighth of the whole at most, as others wait for a
   quarter of it to see the next ballot. */
static uint64_t dp__again_ns(dp__voter *voter)
{
    voter->again += voter->again < DP__AGAIN_MOST;
    uint64_t most = voter->step_ns << voter->again, all = voter->until_ns - voter->begun_ns;
    most = most < all / 8 ? most : all / 8;
    voter->seed = voter->seed * 6364136223846793005u + 1442695040888963407u;
    return voter->step_ns + (voter->seed >> 16) % (most + 1);
}

static uint64_t dp__wait_ns(dp__voter *voter, dp__wait_kind wait)
{
    uint64_t left = (uint64_t)dp__left_ms(voter) * 1000000;
    uint64_t quarter = (voter->until_ns - voter->begun_ns) / 4;
    switch (wait) {
    case DP__FOR_TURN:
        return left; /* see dp__due_ns */
    case DP__FOR_PROPOSER:
        return left / 4 * 3 > quarter ? left / 4 * 3 : quarter;
    case DP__FOR_ANSWERS:
        return voter->members->role == DP__ROLE_PREPARES ? left / 2 : 8 * voter->step_ns;
    case DP__FOR_AGAIN:
        return dp__again_ns(voter);
    }
    return 0;
}

static void dp__voter_wait(dp__voter *voter, dp__wait_kind wait)
{
    voter->wait = wait;
    voter->waits_ns = dp__os_now_ns();
    voter->ends_ns = voter->waits_ns + dp__wait_ns(voter, wait);
}

/* Sends to all that this process is connected to, those of the roster before among them. */
static void dp__head_spread(dp__voter *voter, const dp__vote_head *head, const void *body)
{
    for (int i = 0; i < 2 * voter->count; i++) {
        dp__vote_link *link = &voter->links[i];
        if (link->fd >= 0 && link->stage == DP__STAGE_TALKS && !dp__vote_post(link->fd, head, body))
            dp__vote_link_end(link);
    }
}

static void dp__vote_spread(dp__voter *voter, const dp__vote *vote)
{
    dp__vote_head head = dp__vote_head_of(voter, vote);
    dp__head_spread(voter, &head, vote->places);
}

static bool dp__has_proposed(const dp__voter *voter)
{
    int32_t role = voter->members->role;
    return role == DP__ROLE_PREPARES || (role == DP__ROLE_WAITS && voter->wait == DP__FOR_AGAIN);
}

/* Tells the others why what this process has proposed came to nothing. */
static void dp__why_spread(dp__voter *voter)
{
    char why[DP__SAID_BYTES] = "";
    const dp__members *members = voter->members;
    dp__vote vote = {.kind = DP__VOTE_WHY,
                     .seat = members->seat,
                     .holder = members->holder,
                     .number = members->number};
    dp__vote_head head = dp__vote_head_of(voter, &vote);
    snprintf(why, sizeof why, "%.*s", DP__SAID_BYTES - 1, dp_last_error());
    if (dp__has_proposed(voter))
        dp__head_spread(voter, &head, why);
}

/* Tells those that wait at the join port, and have got a seat; with the word of a machine also the
   others, as nobody else does. */
static void dp__decided_tell(dp__voter *voter, bool all)
{
    const dp__members *members = voter->members;
    dp__seat *roster = dp__voter_roster(voter);
    dp__vote vote = {.kind = DP__VOTE_DECIDED,
                     .seat = members->seat,
                     .holder = members->holder,
                     .number = members->number,
                     .places = roster};
    dp__vote_head head = dp__vote_head_of(voter, &vote);
    if (all)
        dp__head_spread(voter, &head, roster);
    for (int g = 0; g < voter->count; g++) {
        dp__newcomer *newcomer = &voter->port.newcomers[g];
        if (newcomer->fd < 0 || dp__roster_find(roster, voter->count, newcomer->seat.holder) < 0)
            continue; /* all seats are taken: it waits on */
        (void)dp__vote_post(newcomer->fd, &head, roster);
        dp__os_drop(&newcomer->fd);
    }
}

static bool dp__decision_look(dp__voter *voter)
{
    dp__members_event event = {.kind = DP__ON_CLAIMED, .vote = {.places = voter->read}};
    event.vote.number = dp__decision_read(&voter->decision, voter->members->number, voter->read);
    if (event.vote.number == 0)
        return false;
    dp__voter_step(voter, &event, NULL);
    return true;
}

static void dp__voter_act(dp__voter *voter, const dp__action *action, dp__vote_link *from)
{
    switch ((dp__action_kind)action->kind) {
    case DP__DO_REPLY:
        if (from != NULL && from->fd >= 0)
            dp__vote_link_send(voter, from, &action->vote);
        break;
    case DP__DO_SPREAD:
        if (action->vote.kind == DP__VOTE_PREPARE)
            voter->others_ns = UINT64_MAX; /* none has promised yet */
        voter->asked = action->vote;
        voter->asks = true;
        dp__vote_spread(voter, &action->vote);
        break;
    case DP__DO_WAIT:
        voter->asks = voter->asks && action->wait == DP__FOR_ANSWERS;
        dp__voter_wait(voter, (dp__wait_kind)action->wait);
        break;
    case DP__DO_CLAIM:
        dp__decision_claim(&voter->decision, voter->members->number + 1,
                           dp__proposed_of(voter->members));
        break; /* and then it is looked at */
    case DP__DO_MEET:
        voter->asks = false;
        voter->again = 0;
        memset(voter->absent, DP__HERE_MAYBE, (size_t)voter->count);
        dp__decided_tell(voter, from == NULL);
        break;
    case DP__DO_GIVE_UP:
        break;
    }
}

static void dp__voter_step(dp__voter *voter, const dp__members_event *event, dp__vote_link *from)
{
    dp__members_step(voter->members, event, &voter->actions);
    for (int i = 0; i < voter->actions.count; i++)
        dp__voter_act(voter, &voter->actions.list[i], from);
}

/* ==== >>voting =================================================================================
   The loop of a process: what comes, and what is due.                                            */

/* Tells dp/members.h who waits at the join port. Where the job has to be whole, that is looked at
   again and again, and one more that has come is reason to try again. */
static void dp__newcomers_look(dp__voter *voter)
{
    int count = 0, before = 0;
    memset(voter->read, 0, (size_t)voter->count * sizeof *voter->read);
    for (int g = 0; g < voter->count; g++) {
        if (voter->port.newcomers[g].fd >= 0)
            voter->read[count++] = voter->port.newcomers[g].seat;
        before += dp__newcomers_of(voter->members)[g].holder != 0;
    }
    dp__voter_step(
        voter, &(dp__members_event){.kind = DP__ON_KNOCKED, .vote = {.places = voter->read}}, NULL);
    if (count > before && voter->wait == DP__FOR_AGAIN)
        voter->ends_ns = 0;
}

/* Lets newcomers come while this process proposes, if the job needs them. */
static void dp__join_port_watch(dp__voter *voter)
{
    if (!voter->whole || !dp__has_proposed(voter))
        return;
    dp__join_port_open(&voter->port);
    (void)dp__join_port_attend(voter);
    dp__newcomers_look(voter);
}

static void dp__vote_begin(dp__voter *voter, uint64_t until_ns)
{
    dp__members *members = voter->members;
    bool in_job = members->role == DP__ROLE_RUNS || members->role == DP__ROLE_MEETS;
    bool asks = members->role == DP__ROLE_PREPARES || members->role == DP__ROLE_PROPOSES;
    voter->begun_ns = dp__os_now_ns();
    voter->until_ns = until_ns;
    voter->others_ns = UINT64_MAX;
    voter->full_ns = 0;
    voter->why[0] = '\0';
    voter->step_ns = 1;
    dp__step_measure(voter, 0);
    memset(voter->absent, DP__HERE_MAYBE, (size_t)voter->count);
    dp__marks_clear(members, DP__MARK_GONE);
    if (members->role == DP__ROLE_MEETS) /* who had no room to meet others has none to vote */
        dp__vote_links_end(voter);
    if (!voter->raised)
        dp__os_files_raise((size_t)dp__vote_links_count(voter) + DP__VOTE_WATCHED);
    voter->raised = true;
    dp__newcomers_look(voter);
    if (in_job)
        dp__voter_step(voter, &(dp__members_event){.kind = DP__ON_FAILED}, NULL);
    else /* it may have promised while it met others; a ballot of the last vote goes on */
        dp__voter_wait(voter, asks                     ? DP__FOR_ANSWERS
                              : members->promised != 0 ? DP__FOR_PROPOSER
                                                       : DP__FOR_TURN);
}

/* Connects a process that proposes to all members. */
static void dp__members_dial(dp__voter *voter)
{
    const dp__members *members = voter->members;
    if (members->role != DP__ROLE_PREPARES && members->role != DP__ROLE_PROPOSES)
        return;
    for (int s = 0; s < voter->count; s++)
        if (s != members->seat && dp__voter_roster(voter)[s].holder != 0 &&
            dp__vote_link_to(voter, s) == NULL)
            dp__vote_link_dial(voter, s);
}

/* Lets a process that waits for one that proposed, and has ended, wait for its turn. */
static void dp__proposer_watch(dp__voter *voter)
{
    int proposer = dp__ballot_seat(voter->members->promised);
    if (voter->wait == DP__FOR_PROPOSER && proposer >= 0 &&
        dp__vote_link_to(voter, proposer) == NULL)
        dp__voter_wait(voter, DP__FOR_TURN);
}

/* Returns until when a process proposes nothing since it has no room for connections: it does not
   know who is there. The others do not wait for it any longer than for another that is silent. */
static uint64_t dp__room_ns(const dp__voter *voter)
{
    bool lacks = voter->full_ns != 0 && voter->members->role == DP__ROLE_PREPARES;
    return lacks ? voter->full_ns + 4 * voter->step_ns : 0;
}

/* Returns when what is waited for has taken too long. A turn comes a step later while some are
   pending, as one may propose, and no later than that: strangers come, too. */
static uint64_t dp__due_ns(dp__voter *voter)
{
    if (voter->wait != DP__FOR_TURN)
        return voter->ends_ns > dp__room_ns(voter) ? voter->ends_ns : dp__room_ns(voter);
    uint64_t turn_ns = voter->waits_ns + (uint64_t)dp__lower_await(voter) * voter->step_ns;
    return turn_ns + (voter->listener.pending_count > 0 ? voter->step_ns : 0);
}

/* Returns true if those that could make a quorum have died, or have been out of reach for long. */
static bool dp__is_hopeless(const dp__voter *voter)
{
    dp__members *members = voter->members;
    bool dead = true;
    if (members->role != DP__ROLE_PREPARES || dp__is_awaiting(members) || dp__has_promises(members))
        return false;
    for (int s = 0; s < voter->count; s++)
        dead = dead && voter->absent[s] != DP__OUT_OF_REACH;
    return dead || dp__os_now_ns() - voter->begun_ns > (voter->until_ns - voter->begun_ns) / 4;
}

/* Returns true if a member has come to vote. */
static bool dp__has_come(const dp__voter *voter, int seat)
{
    return seat == voter->members->seat || dp__vote_link_to(voter, seat) != NULL;
}

/* Fails with shards if there is not one for each seat: who has died may come back to its own. */
static dp_status dp__check_seated(const dp__voter *voter)
{
    int here = 0;
    for (int s = 0; s < voter->count; s++)
        here += (dp__voter_roster(voter)[s].holder != 0 && dp__has_come(voter, s)) +
                (voter->port.newcomers[s].fd >= 0);
    if (!voter->whole || here >= voter->count)
        return DP_OK;
    char why[DP__JOIN_PORT_BYTES] = "";
    bool shut = dp__join_port_is_shut(&voter->port) && voter->port.why != 0;
    return dp_error(DP_ERR_TIMEOUT,
                    "only %d of %d processes are here: with shards each has to be replaced when it "
                    "has died (DP_REJOIN)%s%s",
                    here, voter->count, shut ? ", and none can come: " : "",
                    shut ? dp__join_port_text(&voter->port, why, sizeof why) : "");
}

/* Names the first one that is missing, if too few have come. */
static dp_status dp__no_quorum(const dp__voter *voter)
{
    const dp__seat *roster = dp__voter_roster(voter);
    unsigned char *here = voter->absent; /* the vote is over */
    int all = dp__seat_number(roster, voter->count), came = 0, one = -1;
    for (int s = 0; s < voter->count; s++) {
        here[s] = roster[s].holder != 0 && dp__has_come(voter, s);
        came += here[s];
        one = one < 0 && roster[s].holder != 0 && !here[s] ? s : one;
    }
    if (one < 0 || dp__roster_memory(roster, voter->count) != 0 ||
        dp__is_quorum(roster, voter->count, here, 1))
        return dp_error(DP_ERR_TIMEOUT, "the processes that are left have not agreed in time");
    one = dp__seat_number(roster, one);
    if (all == 2)
        return dp_error(DP_ERR_TIMEOUT,
                        "process %d did not come: it may have gone on, so this one cannot", one);
    return dp_error(DP_ERR_TIMEOUT,
                    "only %d of %d processes came, and process %d did not, among others: those may "
                    "have gone on, so these cannot",
                    came, all, one);
}

/* Returns true if this process has no time left. One that proposes ends a little before the first
   of those that have promised, so that they know why. */
static bool dp__is_over(const dp__voter *voter)
{
    enum { ANSWER_MS = 200 };
    bool first = dp__has_proposed(voter) && !dp__is_awaiting(voter->members);
    return dp__left_ms(voter) <= (voter->why[0] != '\0' ? 2 * ANSWER_MS : 0) ||
           (first && dp__os_ms_until(voter->others_ns) < ANSWER_MS);
}

/* Returns DP_PENDING while nothing is decided. */
static dp_status dp__vote_status(const dp__voter *voter)
{
    if (voter->members->role == DP__ROLE_MEETS)
        return DP_OK;
    if (voter->members->role == DP__ROLE_LEFT)
        return dp_error(DP_ERR_TIMEOUT, "the others have gone on without this process");
    if (!dp__is_over(voter) && !dp__is_hopeless(voter))
        return DP_PENDING;
    if (voter->why[0] != '\0')
        return dp_error(DP_ERR_TIMEOUT, "%s", voter->why);
    if (voter->full_ns != 0 && dp__os_now_ns() - voter->full_ns < dp__reach_ns(voter))
        return dp__connect_nowhere(dp__seat_number(dp__voter_roster(voter), voter->members->seat));
    DP_TRY(dp__check_seated(voter));
    return dp__no_quorum(voter);
}

/* Votes until there is a roster with this process, which then has to meet the others of it; or
   until it is known that there is none, or the time is over. */
static dp_status dp__voter_vote(dp__voter *voter, uint64_t until_ns)
{
    enum { LOOK_MS = 20 }; /* so often the word is looked at */
    dp_status status = DP_PENDING;
    dp__vote_begin(voter, until_ns);
    while (status == DP_PENDING) {
        bool claimed = dp__decision_look(voter);
        dp__join_port_watch(voter);
        dp__members_dial(voter);
        dp__proposer_watch(voter);
        int ms = dp__os_ms_until(dp__due_ns(voter));
        dp__vote_links_look(voter, claimed ? 0 : ms < LOOK_MS ? ms : LOOK_MS);
        if (dp__os_now_ns() >= dp__due_ns(voter))
            dp__voter_step(voter, &(dp__members_event){.kind = DP__ON_TIMER}, NULL);
        status = dp__vote_status(voter);
    }
    if (status != DP_OK) {
        dp__why_spread(voter);
        dp__vote_links_end(voter);
    }
    return status;
}

/* dp__launch.rest: answers votes while this process meets the others. One that has adopted the
   roster, and votes again, does not come; and one that has not may be told of it here. Votes are
   answered when they come, as the others wait for an answer no longer than it takes to come. */
DP__COLD static dp_status dp__voter_meets(void *user, int ms)
{
    dp__voter *voter = user;
    uint64_t until_ns = dp__os_after_ms(ms);
    do {
        dp__vote_links_look(voter, dp__os_ms_until(until_ns));
    } while (voter->members->role == DP__ROLE_MEETS && dp__os_ms_until(until_ns) > 0);
    return voter->members->role == DP__ROLE_MEETS
               ? DP_OK
               : dp_error(DP_ERR_REMOTE, "a process has failed before all had met again");
}

/* Describes how those of the roster meet: as they did at first, but where they vote. Their leader
   is process 0. */
static dp_status dp__voter_launch(dp__voter *voter, dp__launch *out)
{
    const dp__seat *roster = dp__voter_roster(voter);
    int leader = 0;
    bool far = false;
    while (roster[leader].holder == 0)
        leader++;
    for (int s = 0; s < voter->count; s++)
        far = far || (roster[s].holder != 0 && roster[s].machine != roster[leader].machine);
    *out = (dp__launch){
        .name = "recovery",
        .process = dp__seat_number(roster, voter->members->seat),
        .process_count = dp__seat_number(roster, voter->count),
        .port = (int)roster[leader].port,
        .port_count = 1,
        .listener = &voter->listener,
        .key = dp__key_of_run(dp__key_with(voter->launch.key, "roster"), voter->members->number),
        .numbered = true,
        .agreed = true,
        .met_before = true,
        .rest = dp__voter_meets,
        .user = voter};
    snprintf(out->host, sizeof out->host, "%s",
             far ? dp__seat_address(roster, voter->count, leader)
                 : dp__seat_host(roster, voter->count, voter->members->seat, leader));
    snprintf(out->where, sizeof out->where, "after a failure");
    return dp__launch_interface(out);
}

/* Notes how long a process that was let in has to meet the others: it answers votes meanwhile, and
   whoever asks waits for the rest no longer than for that. */
static void dp__voter_hurry(dp__voter *voter, int timeout_ms)
{
    voter->begun_ns = dp__os_now_ns();
    voter->until_ns = dp__os_after_ms(timeout_ms);
}

/* Notes that all of the roster have met. Returns how many rosters there were before it. */
static int dp__voter_met(dp__voter *voter)
{
    dp__voter_step(voter, &(dp__members_event){.kind = DP__ON_MET}, NULL);
    dp__vote_links_end(voter);
    dp__join_port_keep(voter);
    return (int)(voter->members->number - 1);
}

/* Returns true if the others have made the wrapper that is made here now, and counts it. */
static bool dp__voter_catches_up(dp__voter *voter)
{
    bool behind = voter != NULL && voter->unmade > 0;
    if (behind)
        voter->unmade--;
    return behind;
}

/* ==== >>hearing ================================================================================
   In a job that runs, a process may wait for one that is stopped, or on whose way news of a failure
   gets no further, while others recover already. They connect to its port, as they vote.         */

enum { DP__HEARD_MS = 1000 };

/* How long another one may vote before that counts: in dp_admit all vote once each has heard that
   somebody waits, one a moment later than another. An eighth of timeout_ms at most, as those that
   vote wait for half of it. */
static uint64_t dp__heard_ns(int timeout_ms)
{
    int most = timeout_ms / 8;
    return (uint64_t)(most < DP__HEARD_MS ? most : DP__HEARD_MS) * 1000000;
}

/* Returns the seat of a member that has connected to vote for the next roster, or a later one; -1:
   none has. A call for the vote before may come when all have met, and nobody reads its end. */
static int dp__caller_seat(const dp__voter *voter)
{
    for (int seat = 0; seat < voter->count; seat++) {
        const dp__vote_link *link = dp__vote_link_to(voter, seat);
        uint16_t ahead = link != NULL ? (uint16_t)(link->number - (uint16_t)voter->members->number)
                                      : 0;
        if (link != NULL && ahead < UINT16_MAX / 2)
            return seat;
    }
    return -1;
}

/* Returns the process that has left the job for a vote; -1: none is known to have. */
static int dp__voter_deserted(dp__voter *voter, int timeout_ms)
{
    if (voter == NULL || voter->members->role != DP__ROLE_RUNS)
        return -1;
    dp__vote_links_look(voter, 0);
    int seat = dp__caller_seat(voter);
    uint64_t now = dp__os_now_ns();
    if (seat < 0 || voter->heard_ns == 0)
        voter->heard_ns = seat >= 0 ? now : 0;
    bool long_ago = seat >= 0 && now - voter->heard_ns >= dp__heard_ns(timeout_ms);
    return long_ago ? dp__seat_number(dp__voter_roster(voter), seat) : -1;
}

/* dp__progress_carrier.hear: by the connections of the job, and at the port. */
static dp_status dp__voter_hear(dp_ctx *ctx, int *out_process)
{
    char who[DP__WHO_BYTES];
    DP_TRY(dp__far_hear(ctx, out_process));
    dp__lock_enter(&ctx->world_lock);
    int process = dp__voter_deserted(ctx->world.voter, ctx->config.timeout_ms);
    dp__lock_leave(&ctx->world_lock);
    if (process < 0)
        return DP_OK;
    *out_process = process;
    return dp_error(DP_ERR_REMOTE, "%s recovers the job, so it has failed there",
                    dp__who(ctx->world.job, process, who));
}

/* Carries failures and progress between processes, by the tree or by MPI; looks at the port, too.
   */
static const dp__progress_carrier dp__job_carrier = {dp__voter_hear, dp__far_tell, dp__far_send,
                                                     dp__far_next};

/* ==== >>rejoining ===============================================================================
   A process that comes later waits at the join port until the others let it in.               */

enum { DP__REJOIN_MS = 10 };

typedef struct dp__rejoining {
    const dp__launch *launch;
    dp__launch port, own; /* own: where it listens itself */
    dp__seat seat;
    dp__listener listener;
    bool far;
    uint32_t wrappers; /* of the others */
} dp__rejoining;

/* Gives this process a new holder, port and seat. An earlier try may have been given a seat without
   its knowledge, so it never comes twice with the same holder. Nobody has the key of its port: one
   that connects there knew another process with that number, and learns that this is not it. */
static dp_status dp__rejoin_seat(dp__rejoining *rejoining)
{
    dp__service nobody = {.open = true};
    rejoining->own = (dp__launch){.name = ""};
    rejoining->seat = (dp__seat){.holder = dp__os_random() | 1};
    (void)dp__os_secret(&nobody.key, sizeof nobody.key);
    DP_TRY(dp__seat_make(&rejoining->seat, &rejoining->own, NULL, rejoining->far,
                         &rejoining->listener));
    return dp__listener_serve(&rejoining->listener, DP__FOR_VOTES, nobody);
}

/* Receives what the job sends, and looks at its own port until that comes. */
static dp_status dp__rejoin_receive(dp__rejoining *rejoining, int fd, void *to, size_t bytes,
                                    uint64_t until_ns)
{
    dp__os_watch watch[1 + DP__VOTE_WATCHED];
    do {
        int count = dp__listener_watch(&rejoining->listener, watch + 1, DP__VOTE_WATCHED);
        watch[0] = (dp__os_watch){.fd = fd, .events = DP__CAN_READ};
        dp__os_poll(watch, 1 + count, dp__os_ms_until(until_ns));
        (void)dp__listener_look(&rejoining->listener, watch + 1, count);
        if (watch[0].revents != 0)
            return dp__wire_receive(fd, to, bytes, until_ns);
    } while (dp__os_ms_until(until_ns) > 0);
    return DP_PENDING;
}

/* Takes the reply: it opens the memory of the machine, and tells whether it has it. */
static dp_status dp__rejoin_enter(dp__rejoining *rejoining, int fd, uint64_t until_ns,
                                  dp__voter **out)
{
    dp__join_reply reply;
    if (dp__rejoin_receive(rejoining, fd, &reply, sizeof reply, until_ns) != DP_OK ||
        reply.magic != DP__VOTE_MAGIC)
        return DP_PENDING;
    reply.text[sizeof reply.text - 1] = '\0';
    if (dp__is_failure((dp_status)reply.status))
        return dp_error((dp_status)reply.status, "%s", reply.text);
    if (reply.count < 2 || reply.count > DP__PROCESSES_MAX)
        return DP_PENDING;
    *out = dp__voter_make(rejoining->launch, -1, (int)reply.count);
    if (*out == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", (int)reply.count);
    dp__decision_find(&(*out)->decision, &reply.decision, (*out)->count);
    rejoining->seat.memory = dp__decision_id(&(*out)->decision);
    const uint64_t memory = rejoining->seat.memory;
    return dp__wire_send(fd, &memory, sizeof memory, until_ns) == DP_OK ? DP_OK : DP_PENDING;
}

/* Waits for the roster that has a seat for this process, and becomes a member. */
static dp_status dp__rejoin_await(dp__rejoining *rejoining, dp__voter *voter, int fd,
                                  uint64_t until_ns)
{
    dp__vote_head head;
    dp__members *members = voter->members;
    size_t bytes = (size_t)voter->count * sizeof *voter->read;
    members->holder = rejoining->seat.holder;
    members->role = DP__ROLE_WAITS;
    if (dp__rejoin_receive(rejoining, fd, &head, sizeof head, until_ns) != DP_OK ||
        !dp__vote_is_sound(&head, voter->count) || head.kind != DP__VOTE_DECIDED ||
        dp__wire_receive(fd, voter->read, bytes, until_ns) != DP_OK)
        return DP_PENDING;
    const dp__members_event event = dp__vote_event(&head, voter->read, voter->count);
    dp__voter_step(voter, &event, NULL);
    if (members->role != DP__ROLE_MEETS)
        return DP_PENDING;
    voter->launch = rejoining->own;
    voter->launch.key = dp__voter_own(voter)->key;
    rejoining->wrappers = head.wrappers;
    return DP_OK;
}

/* Returns DP_PENDING if the others have not let this process in now. */
static dp_status dp__rejoin_once(dp__rejoining *rejoining, int round, uint64_t until_ns,
                                 bool *out_met, const char **out_why, dp__voter **out)
{
    const dp__launch *port = &rejoining->port;
    dp__seat *own = &rejoining->seat;
    dp__target target = {.host = port->host, .port = port->port, .port_count = port->port_count};
    dp__join_request request = {
        .magic = DP__JOIN_MAGIC, .version = DP_VERSION, .kind = DP__FOR_JOINING};
    int fd = -1;
    memcpy(target.place, port->place, sizeof target.place);
    *out = NULL;
    DP_TRY(dp__connect_once(&target, port->key, &request, round, until_ns, &fd, out_why));
    *out_met = true;
    dp_status status = dp__rejoin_seat(rejoining);
    if (own->host[0] == '\0')
        dp__os_host_of(fd, true, own->host, sizeof own->host);
    if (status == DP_OK && dp__wire_send(fd, own, sizeof *own, until_ns) != DP_OK)
        status = DP_PENDING;
    if (status == DP_OK)
        status = dp__rejoin_enter(rejoining, fd, until_ns, out);
    if (status == DP_OK && *out != NULL)
        status = dp__rejoin_await(rejoining, *out, fd, until_ns);
    dp__os_close(fd);
    return status;
}

/* Says what was found all the time. A job that is there listens only once it has let others in or
   has recovered, and answers only when it looks for them. */
DP__COLD static dp_status dp__rejoin_found(const dp__launch *launch, const dp__launch *port,
                                           double seconds, const char *found)
{
    char ports[48] = "", claim[128];
    const char *advice = found == dp__refused
                             ? "; a job does from its first dp_admit or dp_recover on"
                         : found == dp__silent ? "; a job does when it calls dp_admit"
                                               : "";
    if (port->host[0] != '\0')
        snprintf(ports, sizeof ports, ", ports %d to %d,", port->port,
                 port->port + port->port_count - 1);
    return dp_error(DP_ERR_TIMEOUT,
                    "no job that others can join was found %s%s within %.3g s: %s%s%s",
                    launch->where, ports, seconds, found != NULL ? found : "nobody answers there",
                    advice, dp__claim_text(launch, claim, sizeof claim));
}

/* Fails where a process of the job has answered, but has not let this one in. */
DP__COLD static dp_status dp__rejoin_waited(const dp__launch *launch, double seconds, bool gone)
{
    return dp_error(DP_ERR_TIMEOUT,
                    "the job that %s %s has not let this process in within %.3g s%s",
                    gone ? "ran" : "runs", launch->where, seconds,
                    gone ? ", and now nobody listens there"
                         : ": the others have to call dp_admit, and there has to be room for one "
                           "more");
}

/* Waits until the others let this process in. Whatever is there, it waits: a job that recovers, or
   has just begun, may come there later. */
static dp_status dp__rejoin_until(dp__rejoining *rejoining, int timeout_ms, uint64_t until_ns,
                                  dp__voter **out)
{
    const char *why = NULL, *found = NULL;
    bool met = false;
    for (int round = 0; dp__os_ms_until(until_ns) > 0; round++) {
        bool now = false;
        why = dp__lasting(why);
        dp_status status = dp__rejoin_once(rejoining, round, until_ns, &now, &why, out);
        met = met || now;
        found = now ? NULL : why != NULL ? why : found;
        if (status != DP_OK && *out != NULL)
            dp__voter_close(*out, true);
        if (status != DP_OK)
            dp__listener_close(&rejoining->listener);
        if (status != DP_PENDING)
            return status;
        dp__os_sleep_ms(DP__REJOIN_MS);
    }
    return met ? dp__rejoin_waited(rejoining->launch, timeout_ms * 1e-3, found == dp__refused)
               : dp__rejoin_found(rejoining->launch, &rejoining->port, timeout_ms * 1e-3, found);
}

/* Makes a voter of this process, which has come later; it is of the roster, and has to meet the
   others. */
static dp_status dp__rejoin(const dp__launch *launch, bool far, int timeout_ms, uint64_t until_ns,
                            dp__voter **out)
{
    dp__rejoining rejoining = {.launch = launch,
                               .port = dp__join_port_of(launch),
                               .listener = dp__listener_none(),
                               .far = far};
    DP_TRY(dp__rejoin_until(&rejoining, timeout_ms, until_ns, out));
    dp__listener_move(&(*out)->listener, &rejoining.listener);
    dp__voter_serve(*out);
    (*out)->unmade = rejoining.wrappers;
    return DP_OK;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
