/* dp/listener.h - v0.2.0 - where a process can be reached, and who has come - MIT licence

   Part of dp.h, which includes it. A process listens at an address. Whoever connects there sends a
   request, which says for what the connection is, gets a challenge with the listener's proof, and
   sends its own (dp/tree.h, >>wire). Until then nothing that it sends is trusted, and no thread
   blocks on it. Then whoever serves its kind of connections takes it.

   Those that are pending may be many, and may come from anywhere: one that sends anything but a
   request is closed, and one that is silent is replaced by a later one.

   A flood of strangers keeps no process of the job out. At a name inside the machine, whose queue
   may be full, one that connects tries again every millisecond (dp__connect_at), and keeps its
   place once it has one. Each look takes DP__ACCEPT_MAX out of the queue, and replaces those that
   have sent no request for longest. So one that found the queue empty has DP__PENDING_MAX /
   DP__ACCEPT_MAX looks to send its own. After that only those that have asked too are replaced
   before it.

   Some connections get an answer, and are closed: any thread can send it. So while a process
   computes its watchdog does, and what came for others waits until a thread looks that serves it.

   CONTENTS (search for the tag)
     >>listening where, and for what
     >>pending   until a connection has proved that it is of the job
     >>looking   what a look does
*/

#ifndef DP__ROOMS
#error "dp/listener.h is a part of dp.h: include dp.h"
#else

/* ==== >>listening ============================================================================= */

enum {
    DP__PENDING_MAX = 256,
    DP__LISTENER_WATCHED = 1 + DP__PENDING_MAX,
    DP__ACCEPT_MAX = 64, /* in a look */
    DP__PENDING_MS = 5000,
    DP__QUIET_MS = 500,
    DP__LEFT_MS = 60000,   /* until a thread looks that serves it; then it is closed */
    DP__ASKS_MAX = 16,     /* that have asked for an answer, and have sent no proof yet */
    DP__LISTENER_LOOKS = 3 /* a connection, a request and a proof */
};

typedef struct dp__pending {
    int fd;
    bool asked;  /* its request has come, */
    bool proved; /* and its proof: it waits until it is taken */
    size_t got;  /* bytes received of the current message */
    unsigned char said[sizeof(dp__join_request)];
    dp__join_request request;
    uint64_t nonce, came_ns;
} dp__pending;

typedef struct dp__service { /* of one kind of connections */
    bool open;               /* they may come */
    bool at_once; /* a request comes with its proof, and says whom it means: see dp/tcp.h */
    bool patient; /* one that has asked stays longer than DP__PENDING_MS */
    int expected; /* so many may come at the same time */
    dp__key key;
    int process;                                                         /* who is meant */
    bool (*declines)(const void *user, const dp__join_request *request); /* or NULL: none */
    /* Sends all that one who has the key gets, without a wait. It is closed then, and any thread
       that looks may do this. NULL: connections stay until somebody takes them. */
    void (*answers)(const void *user, int fd);
    const void *user;
} dp__service;

typedef struct dp__listener { /* of several threads: each looks for what it serves */
    dp__lock lock;
    int fd; /* -1: it does not listen */
    dp__os_address at;
    dp__service services[DP__CONNECTION_KINDS];
    dp__pending *pending;
    int pending_capacity;
    atomic_int pending_count;
    int lookers;      /* threads that are between a list and what it tells */
    atomic_bool full; /* there were no more files: those that are pending come in first, or go, */
    bool rests;       /* and the next look accepts none */
    atomic_int rejected; /* connections of another job: without the right bytes, or proof */
} dp__listener;

/* Returns a listener that does not listen. */
static dp__listener dp__listener_none(void)
{
    return (dp__listener){.lock = DP__LOCK_INITIALIZER, .fd = -1};
}

/* Makes room for strangers, and for all that are expected. */
static dp_status dp__listener_reserve(dp__listener *listener)
{
    int capacity = DP__PENDING_MAX;
    for (int i = 0; i < DP__CONNECTION_KINDS; i++)
        capacity += listener->services[i].expected;
    if (capacity <= listener->pending_capacity)
        return DP_OK;
    dp__pending *pending = dp__os_alloc((size_t)capacity * sizeof *pending, 64, NULL);
    if (pending == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d connections", capacity);
    if (listener->pending_count > 0)
        memcpy(pending, listener->pending, (size_t)listener->pending_count * sizeof *pending);
    dp__os_free(listener->pending, 0, NULL);
    listener->pending = pending;
    listener->pending_capacity = capacity;
    return DP_OK;
}

/* Removes a connection that is closed, or that somebody has taken; the last one gets its place. */
static void dp__pending_remove(dp__listener *listener, int place)
{
    listener->pending[place] = listener->pending[listener->pending_count - 1];
    listener->pending_count--;
}

static void dp__pending_close(dp__listener *listener, int place)
{
    dp__os_close(listener->pending[place].fd);
    dp__pending_remove(listener, place);
}

/* Lets connections of that kind in from now on, if there is memory. */
static dp_status dp__listener_serve(dp__listener *listener, dp__connection_kind kind,
                                    dp__service service)
{
    service.open = true;
    dp__lock_enter(&listener->lock);
    listener->services[kind] = service;
    dp_status status = dp__listener_reserve(listener);
    dp__lock_leave(&listener->lock);
    return status;
}

/* Lets no more of them in: those of that kind that are pending are closed. */
static void dp__listener_end(dp__listener *listener, dp__connection_kind kind)
{
    dp__lock_enter(&listener->lock);
    listener->services[kind] = (dp__service){.open = false};
    for (int i = listener->pending_count; i-- > 0;)
        if (listener->pending[i].asked && listener->pending[i].request.kind == kind)
            dp__pending_close(listener, i);
    dp__lock_leave(&listener->lock);
}

/* Closes everything; its name inside the machine stays. No other thread looks by then. */
static void dp__listener_hang_up(dp__listener *listener)
{
    dp__os_drop(&listener->fd);
    while (listener->pending_count > 0)
        dp__pending_close(listener, listener->pending_count - 1);
}

static void dp__listener_close(dp__listener *listener)
{
    if (listener->fd >= 0)
        dp__os_forget(&listener->at);
    dp__listener_hang_up(listener);
    dp__os_free(listener->pending, 0, NULL);
    *listener = dp__listener_none();
}

/* Gives its place to another one that has none; those that are pending come again. */
static void dp__listener_move(dp__listener *to, dp__listener *from)
{
    to->fd = from->fd;
    to->at = from->at;
    from->fd = -1;
    dp__listener_close(from);
}

/* ==== >>pending =============================================================================== */

/* Returns how many bytes a pending connection has to send next. */
static size_t dp__pending_bytes(const dp__pending *pending)
{
    return pending->asked ? sizeof(uint64_t) : sizeof(dp__join_request);
}

/* Returns the service that a request, which is untrusted, asks for; NULL: there is none. */
static const dp__service *dp__requested_service(const dp__listener *listener,
                                                const dp__join_request *request)
{
    if (request->magic != DP__JOIN_MAGIC || request->kind >= DP__CONNECTION_KINDS)
        return NULL;
    const dp__service *service = &listener->services[request->kind];
    bool meant = !service->at_once || request->listens == (uint64_t)service->process;
    return service->open && meant ? service : NULL;
}

/* Returns true if a request has come that no thread could answer so far: see
   dp__listener_answer. */
static bool dp__pending_waits(const dp__pending *pending)
{
    return !pending->asked && pending->got == sizeof(dp__join_request);
}

/* Returns the service for which a connection has come, as far as it has said; or NULL. */
static const dp__service *dp__pending_service(const dp__listener *listener,
                                              const dp__pending *pending)
{
    dp__join_request request = pending->request;
    if (dp__pending_waits(pending))
        memcpy(&request, pending->said, sizeof request);
    return dp__requested_service(listener, &request);
}

/* Returns true if a connection gets an answer, from any thread that looks. */
static bool dp__pending_gets_answer(const dp__listener *listener, const dp__pending *pending)
{
    const dp__service *service = dp__pending_service(listener, pending);
    return service != NULL && service->answers != NULL;
}

/* Returns true if a connection is for a thread that takes it, or may be: then one that only
   answers leaves it as it has come. */
static bool dp__pending_is_others(const dp__listener *listener, const dp__pending *pending)
{
    dp__join_request request;
    memcpy(&request, pending->said, sizeof request);
    bool is_one = request.magic == DP__JOIN_MAGIC && request.kind < DP__CONNECTION_KINDS;
    return (pending->asked || (dp__pending_waits(pending) && is_one)) &&
           !dp__pending_gets_answer(listener, pending);
}

/* Lets the one go first that has waited longest for an answer, and has sent no proof, if these are
   too many. */
static void dp__pending_limit(dp__listener *listener)
{
    int count = 0;
    dp__pending *first = NULL;
    for (int i = 0; i < listener->pending_count; i++) {
        dp__pending *pending = &listener->pending[i];
        if (!pending->asked || !dp__pending_gets_answer(listener, pending))
            continue;
        count++;
        first = first == NULL || pending->came_ns < first->came_ns ? pending : first;
    }
    if (count > DP__ASKS_MAX)
        first->came_ns = 0;
}

/* Answers a request; false: the connection is of no use. */
static bool dp__pending_answer(dp__listener *listener, dp__pending *pending)
{
    const dp__join_request *request = &pending->request;
    memcpy(&pending->request, pending->said, sizeof pending->request);
    const dp__service *service = dp__requested_service(listener, request);
    listener->rejected += request->magic != DP__JOIN_MAGIC;
    if (service == NULL || (service->declines != NULL && service->declines(service->user, request)))
        return false;
    pending->asked = true;
    if (service->answers != NULL)
        dp__pending_limit(listener);
    pending->nonce = service->at_once ? DP__LISTENER_NONCE : dp__os_random();
    dp__challenge challenge = {DP__CHALLENGE_MAGIC, DP_VERSION, pending->nonce,
                               dp__proof(service->key, request, pending->nonce, false)};
    return dp__os_send(pending->fd, &challenge, sizeof challenge) == (ptrdiff_t)sizeof challenge;
}

/* Checks a proof; false: the connection is of another job. */
static bool dp__pending_prove(dp__listener *listener, dp__pending *pending)
{
    uint64_t proof;
    const dp__service *service = &listener->services[pending->request.kind];
    const dp__key key = service->key;
    memcpy(&proof, pending->said, sizeof proof);
    pending->proved = proof == dp__proof(key, &pending->request, pending->nonce, true);
    listener->rejected += !pending->proved && service->answers == NULL;
    if (pending->proved && service->answers != NULL)
        service->answers(service->user, pending->fd);
    return pending->proved && service->answers == NULL;
}

/* Reads from a pending connection; false: it is of no use. `all`: this thread serves all kinds;
   else a request of another kind stays as it has come. */
static bool dp__pending_read(dp__listener *listener, dp__pending *pending, bool all)
{
    size_t left = dp__pending_bytes(pending) - pending->got;
    ptrdiff_t got = left > 0 ? dp__os_receive(pending->fd, pending->said + pending->got, left) : 0;
    if (got < 0) { /* it closed: its key is another one */
        listener->rejected += pending->asked && !dp__pending_gets_answer(listener, pending);
        return false;
    }
    pending->got += (size_t)got;
    if ((size_t)got < left)
        return true;
    if (!all && dp__pending_waits(pending) && dp__pending_is_others(listener, pending))
        return true;
    if (left == 0)
        pending->came_ns = dp__os_now_ns(); /* nobody could answer it before */
    pending->got = 0;
    return pending->asked ? dp__pending_prove(listener, pending)
                          : dp__pending_answer(listener, pending);
}

/* Returns false if nothing has come for long. One that has asked may be of this job, and held up:
   it takes itself for let in once it has sent its proof. One that has proved that it is has been
   let in, however long the thread that takes it is in something else. */
static bool dp__pending_stays(const dp__listener *listener, const dp__pending *pending)
{
    bool patient = pending->proved ||
                   (pending->asked && listener->services[pending->request.kind].patient);
    uint64_t most_ms = listener->full ? DP__QUIET_MS : DP__PENDING_MS;
    return (patient && !listener->full) || dp__os_now_ns() - pending->came_ns < most_ms * 1000000;
}

/* Returns true as long as a connection stays that a look for answers leaves to others. */
static bool dp__pending_is_left(const dp__pending *pending)
{
    return !dp__pending_waits(pending) ||
           dp__os_now_ns() - pending->came_ns < DP__LEFT_MS * (uint64_t)1000000;
}

/* Returns true if `a` is replaced sooner than `b`: one with a request may be of this job, and one
   with a proof is. */
static bool dp__pending_goes_first(const dp__pending *a, const dp__pending *b)
{
    int a_is = (a->asked || dp__pending_waits(a)) + a->proved;
    int b_is = (b->asked || dp__pending_waits(b)) + b->proved;
    return a_is != b_is ? a_is < b_is : a->came_ns < b->came_ns;
}

/* Returns the connection that is replaced first. */
static int dp__pending_first(const dp__listener *listener)
{
    int place = listener->pending_count - 1;
    for (int i = place - 1; i >= 0; i--)
        if (dp__pending_goes_first(&listener->pending[i], &listener->pending[place]))
            place = i;
    return place;
}

/* Keeps a connection that has come. If there is no place left, another one is replaced. */
static void dp__pending_hold(dp__listener *listener, int fd)
{
    if (listener->pending_count == listener->pending_capacity)
        dp__pending_close(listener, dp__pending_first(listener));
    listener->pending[listener->pending_count] =
        (dp__pending){.fd = fd, .came_ns = dp__os_now_ns()};
    listener->pending_count++; /* in this order, as a child of fork closes all of them */
}

/* ==== >>looking ================================================================================
   Whoever looks waits for the listener and for what is pending, and for more of its own. A thread
   that only answers does not look while another one does, and keeps the lock: so it closes nothing
   that another one waits for.                                                                    */

/* Lists what is waited for, under the lock. */
static int dp__listener_list(dp__listener *listener, dp__os_watch *watch, int most)
{
    int count = 1;
    bool rests = listener->rests || (listener->full && listener->pending_count > 0);
    listener->rests = false;
    watch[0] = (dp__os_watch){.fd = rests ? -1 : listener->fd, .events = DP__CAN_READ};
    for (int i = 0; i < listener->pending_count && count < most; i++) {
        const dp__pending *pending = &listener->pending[i];
        bool waits = dp__pending_waits(pending); /* no more comes, and it is to be read at once */
        watch[count++] = (dp__os_watch){.fd = pending->proved ? -1 : pending->fd,
                                        .events = waits ? DP__CAN_WRITE : DP__CAN_READ};
    }
    return count;
}

/* Begins a look, which dp__listener_look ends: lists what is waited for, at most `most`. Returns
   how many these are. */
static int dp__listener_watch(dp__listener *listener, dp__os_watch *watch, int most)
{
    dp__lock_enter(&listener->lock);
    listener->lookers++;
    int count = dp__listener_list(listener, watch, most);
    dp__lock_leave(&listener->lock);
    return count;
}

/* Accepts those that connect, under the lock: only so many at once, since those accepted are served
   first. Returns false if there are no more files. */
static bool dp__listener_admit(dp__listener *listener, int from)
{
    bool full = false;
    int fd = 0;
    for (int i = 0; i < DP__ACCEPT_MAX && fd >= 0; i++) {
        fd = dp__os_accept(from, &full);
        if (fd >= 0 && (!dp__os_is_local(&listener->at) || dp__os_same_user(fd)))
            dp__pending_hold(listener, fd);
        else
            dp__os_close(fd);
    }
    listener->full = listener->rests = full;
    return !full;
}

static bool dp__listener_accept(dp__listener *listener, int from)
{
    dp__lock_enter(&listener->lock);
    bool room = dp__listener_admit(listener, from);
    dp__lock_leave(&listener->lock);
    return room;
}

/* Reads what has come, as the list tells, and accepts those that connect, under the lock. It goes
   backwards, because the last one takes the place of one that is removed; where another thread has
   looked meanwhile, one that it has moved is read in vain. Returns as dp__listener_admit. */
static bool dp__listener_read(dp__listener *listener, const dp__os_watch *watch, int count,
                              bool all)
{
    int last = count - 1 < listener->pending_count ? count - 1 : listener->pending_count;
    for (int i = last; i-- > 0;) {
        dp__pending *pending = &listener->pending[i];
        bool comes = watch[1 + i].revents != 0 || watch[1 + i].fd != pending->fd;
        bool others = !all && dp__pending_is_others(listener, pending);
        bool stays = others                      ? dp__pending_is_left(pending)
                     : comes && !pending->proved ? dp__pending_read(listener, pending, all)
                                                 : dp__pending_stays(listener, pending);
        if (!stays)
            dp__pending_close(listener, i);
    }
    if (watch[0].fd >= 0 && watch[0].revents == 0)
        listener->full = false; /* nobody connects any more */
    return watch[0].revents == 0 || dp__listener_admit(listener, listener->fd);
}

/* Ends a look: reads what has come, and serves all kinds of connections. Returns false if there are
   no more files. */
static bool dp__listener_look(dp__listener *listener, const dp__os_watch *watch, int count)
{
    dp__lock_enter(&listener->lock);
    listener->lookers--;
    bool room = dp__listener_read(listener, watch, count, true);
    dp__lock_leave(&listener->lock);
    return room;
}

/* Answers those that ask, for a thread that takes no connections: those that are for others it
   leaves as they have come, so that whoever takes them finds them as if nobody had looked. Does not
   wait. There is room for DP__LISTENER_WATCHED in the list. */
static void dp__listener_answer(dp__listener *listener, dp__os_watch *watch)
{
    dp__lock_enter(&listener->lock);
    for (int i = 0; i < DP__LISTENER_LOOKS && (i == 0 || listener->pending_count > 0) &&
                    listener->lookers == 0;
         i++) {
        int count = dp__listener_list(listener, watch, DP__LISTENER_WATCHED);
        dp__os_poll(watch, count, 0);
        (void)dp__listener_read(listener, watch, count, false);
    }
    dp__lock_leave(&listener->lock);
}

/* Takes one of that kind that has proved that it is of the job; false: there is none. */
static bool dp__listener_take(dp__listener *listener, dp__connection_kind kind, dp__pending *out)
{
    bool found = false;
    dp__lock_enter(&listener->lock);
    for (int i = 0; i < listener->pending_count && !found; i++) {
        *out = listener->pending[i];
        found = out->proved && out->request.kind == kind;
        if (found)
            dp__pending_remove(listener, i);
    }
    dp__lock_leave(&listener->lock);
    return found;
}

/* Returns true if one of that kind has asked, and is about to prove that it is of the job. */
static bool dp__listener_is_asked(dp__listener *listener, dp__connection_kind kind)
{
    bool asked = false;
    dp__lock_enter(&listener->lock);
    for (int i = 0; i < listener->pending_count; i++) {
        const dp__pending *pending = &listener->pending[i];
        asked = asked || (pending->asked && !pending->proved && pending->request.kind == kind);
    }
    dp__lock_leave(&listener->lock);
    return asked;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
