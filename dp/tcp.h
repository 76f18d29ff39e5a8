/* dp/tcp.h - v0.2.0 - connections between all processes, and collectives over them - MIT licence

   Part of dp.h, which includes it. CPU devices on several machines need nothing but a network:
   every process is connected to every other one, and collectives (dp/mesh.h) travel there. Messages
   (dp/channels.h) have connections of their own, whatever carries the collectives, also those of
   GPUs.

   The limit: each byte crosses the link of a machine once in each direction (dp/mesh.h). Over
   1 Gbit/s two hosts (network namespaces) add up 25 MiB in 219 ms, with one process on each and
   with two; the link needs 210. Without that limit two processes take 10 ms, and 4 bytes take 6 us
   inside a machine and 37 us between the two hosts, where a thread has to be woken.

   Over a long link one connection is slower than that (>>flow). With a round trip of 20 ms, and at
   most 400 KiB of buffers for a connection, 50 MiB over 1 Gbit/s take 4.0 s with one, 1.0 s with 4,
   and 0.64 s with 8; the link needs 0.42 (make bench-long). With 4 MiB of buffers, which fill that
   link, one takes 0.51 s and 8 take 0.45.

   CONTENTS (search for the tag)
     >>ports       where processes find each other
     >>connections connections between all
     >>dialling    connections that are made when somebody has something to say
     >>flow        what is under way on connections
     >>table       the table
*/

#ifndef DP__ROOMS
#error "dp/tcp.h is a part of dp.h: include dp.h"
#else

/* ==== >>ports ===================================================================================
   Where neither memory nor MPI carries everything, each process has one port, the one for votes if
   the job can recover. All gather where these are, and the key, which process 0 has drawn.
   Connections for collectives are made there when a communicator opens, and those for messages at
   any time.                                                                                     */

enum {
    DP__CONNECTIONS_MAX = 64, /* of a lane, to each process */
    DP__MESSAGE_FILES = 2     /* to each process */
};

typedef struct dp__port {
    dp__job *job;
    dp__seat *seats;             /* where the processes listen */
    int connections;             /* of a lane, to each process: see >>flow */
    dp__listener *listener, own; /* in a job that recovers, where its processes vote */
    dp__server server;           /* who comes to this one, with messages */
    dp__launch launch;
    bool raised;      /* the limit of open files */
    dp_status status; /* of opening it here, */
    char said[200];   /* and why that has failed */
    char why[160];    /* why no process has one; "": all have */
} dp__port;

/* NULL: they have met by a bootstrap of the user's. */
static dp__tree *dp__port_tree(const dp__job *job)
{
    const dp_bootstrap *boot = job->boot;
    return boot->all_gather == dp__tree_all_gather ? boot->user : NULL;
}

static void dp__port_shut(dp__port *port)
{
    dp__server_close(&port->server);
    if (port->listener != NULL)
        dp__listener_end(port->listener, DP__FOR_ASKING);
    dp__listener_close(&port->own);
    port->server = (dp__server){.listener = NULL};
}

static void dp__port_free(dp__port *port)
{
    if (port == NULL)
        return;
    dp__port_shut(port);
    if (port->raised)
        dp__os_files_lower();
    dp__os_free(port->seats, 0, NULL);
    dp__os_free(port, 0, NULL);
}

/* Reads $DP_CONNECTIONS; 0: it is not set. */
static dp_status dp__port_wanted(int *out)
{
    *out = 0;
    return dp__os_env("DP_CONNECTIONS") != NULL
               ? dp__env_number("DP_CONNECTIONS", 1, DP__CONNECTIONS_MAX, out)
               : DP_OK;
}

DP__COLD static dp_status dp__port_make(dp__port *port, dp__job *job)
{
    size_t count = (size_t)job->process_count;
    dp__voter *voter = job->ctx->world.voter;
    int wanted;
    *port = (dp__port){.job = job, .own = dp__listener_none()};
    port->listener = voter != NULL ? &voter->listener : &port->own;
    port->launch = (dp__launch){
        .name = "cables", .process = job->process, .numbered = true, .met_before = true};
    port->server = (dp__server){.launch = &port->launch,
                                .process = job->process,
                                .process_count = job->process_count,
                                .all = true,
                                .any = true,
                                .kind = DP__FOR_MESSAGES};
    port->seats = dp__os_alloc(count * sizeof *port->seats, _Alignof(dp__seat), NULL);
    if (port->seats == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu connections", count);
    memset(port->seats, 0, count * sizeof *port->seats);
    DP_TRY(dp__port_wanted(&wanted));
    port->seats[job->process].connections = (uint32_t)wanted;
    /* Nobody else has this key: until all have learned the right one, nobody is let in. */
    (void)dp__os_secret(&port->launch.key, sizeof port->launch.key);
    return dp__server_open(&port->server, port->listener, port->launch.key);
}

/* For connections to all others. */
static void dp__port_raise(dp__port *port)
{
    size_t each = DP__LANES * (size_t)port->connections + DP__MESSAGE_FILES;
    size_t files = each * (size_t)port->job->process_count;
    if (port->raised || files <= dp__os_files_limit() / 2)
        return;
    port->raised = true;
    dp__os_files_raise(files);
}

static dp_status dp__port_open(dp__port *port, bool far)
{
    dp__voter *voter = port->job->ctx->world.voter;
    dp__seat *seat = &port->seats[port->job->process];
    const uint32_t wanted = seat->connections;
    if (voter == NULL)
        return dp__seat_make(seat, &port->launch, dp__port_tree(port->job), far, port->listener);
    *seat = *dp__voter_own(voter);
    seat->connections = wanted;
    return dp__seat_key(seat);
}

/* Takes the number of process 0: a launcher may have given its variables to no other one, and one
   that comes later with another number is no reason for all to fail. */
DP__COLD static void dp__port_count(dp__port *port)
{
    dp__job *job = port->job;
    int own = (int)port->seats[job->process].connections, first = (int)port->seats[0].connections;
    port->connections = first > 0 ? first : 1;
    if (own > 0 && own != port->connections)
        dp__log(job->ctx, DP_LOG_WARN,
                "DP_CONNECTIONS is %d in process %d and %d in process 0%s: the job has %d", own,
                job->process, port->connections, first > 0 ? "" : ", which has not set it",
                port->connections);
}

static dp_status dp__port_learn(dp__port *port)
{
    dp__job *job = port->job;
    const dp__seat own = port->seats[job->process];
    DP_TRY(job->gather(job->boot, &own, port->seats, sizeof own));
    port->launch.key = port->seats[0].key;
    dp__port_count(port);
    return dp__server_serve(&port->server, port->launch.key);
}

static const char *dp__port_host(const dp__port *port, int process)
{
    return dp__seat_host(port->seats, port->job->process_count, port->job->process, process);
}

/* Makes the request with which this process connects to another one. */
static dp__join_request dp__port_request(const dp__port *port, dp__connection_kind kind)
{
    return (dp__join_request){.magic = DP__JOIN_MAGIC,
                              .version = DP_VERSION,
                              .process = port->job->process,
                              .process_count = port->job->process_count,
                              .kind = (uint16_t)kind};
}

/* A child of fork sees the one or the other: see dp__before_fork. */
static dp__port *dp__port_swap(dp_ctx *ctx, dp__port *port)
{
    dp__lock_enter(&ctx->lock);
    dp__port *before = ctx->world.port;
    ctx->world.port = port;
    dp__lock_leave(&ctx->lock);
    return before;
}

static void dp__port_end(dp_ctx *ctx)
{
    dp__port_free(dp__port_swap(ctx, NULL));
}

/* Frees, in a child of fork, a lock that a watchdog may have had, which is not there. */
static void dp__port_forked(dp__port *port)
{
    if (port != NULL)
        dp__lock_init(&port->listener->lock);
}

/* Also in a child of fork, whose own neither the port is nor who has come there. */
static void dp__port_unlisten(const dp_ctx *ctx)
{
    dp__port *port = ctx->world.port;
    if (port == NULL)
        return;
    dp__server_hang_up(&port->server);
    dp__listener_hang_up(&port->own);
}

/* No process has a port, for the reason that it holds. */
static void dp__port_refuse(dp_ctx *ctx)
{
    dp__port_unlisten(ctx);
    if (ctx->info.process == 0)
        dp__log(ctx, DP_LOG_WARN, "no messages: %s", ctx->world.port->why);
}

/* Checks what all know, so that all have a port, or none has. */
DP__COLD static void dp__port_check(dp__port *port, bool far)
{
    const dp__job *job = port->job;
    for (int p = 0; p < job->process_count && port->why[0] == '\0'; p++)
        if (port->seats[p].port == 0)
            snprintf(port->why, sizeof port->why,
                     "process %d has opened no port, and has logged why", p);
        else if (far && dp__seat_address(port->seats, job->process_count, p)[0] == '\0')
            snprintf(port->why, sizeof port->why,
                     "no address of process %d is known: set DP_INTERFACE", p);
}

/* Opens the port, in all processes, unless that was done. Where one cannot be found by the others,
   what needs it fails. `far`: there are several machines. */
DP__COLD static dp_status dp__port_share(dp_ctx *ctx, bool far)
{
    if (ctx->world.port != NULL)
        return DP_OK;
    dp__port *port = dp__os_alloc(sizeof *port, 64, NULL);
    dp_status status = dp__job_agree(
        ctx->world.job, port != NULL ? dp__port_make(port, ctx->world.job)
                                     : dp_error(DP_ERR_NO_MEMORY, "no memory for a port"));
    if (status != DP_OK) {
        dp__port_free(port);
        return status;
    }
    (void)dp__port_swap(ctx, port);
    port->status = dp__port_open(port, far);
    if (port->status != DP_OK) {
        snprintf(port->said, sizeof port->said, "%.199s", dp_last_error());
        dp__log(ctx, DP_LOG_WARN, "no port: %s", port->said);
        port->seats[ctx->info.process].port = 0;
    }
    DP_TRY(dp__port_learn(port));
    dp__port_check(port, far);
    if (port->why[0] != '\0')
        dp__port_refuse(ctx);
    return DP_OK;
}

/* ==== >>connections =============================================================================
   There are as many connections between two processes as $DP_CONNECTIONS says in process 0. They
   have numbers, and a request says its own: so both ends know which one it is, in whatever order
   they come. All are needed: one that is missing is waited for, one that is lost means that the
   process is lost, and all are closed together.

   Each process connects to those before it, all at once, and accepts those behind it meanwhile: so
   the process that an error names did not answer, and did not just wait for another one. Memory and
   files are there before anything waits. A failure while they connect is also sent over these
   connections, as the tree may lead through the process that has failed.                       */

enum { DP__REFUSALS = 8 }; /* in a row: in 0.13 s. It has listened, and has given up */

typedef enum dp__attempt_stage { DP__RESTS, DP__CALLS, DP__ASKS, DP__LET_IN } dp__attempt_stage;

typedef struct dp__attempt { /* of one connection to a process before this one */
    dp__attempt_stage stage;
    int round, refusals;
    int place;         /* among what is watched; -1: it is not */
    uint64_t until_ns; /* then this stage is over */
    const char *why;   /* the last try was in vain; NULL: not known */
    size_t got;        /* bytes of the challenge */
    dp__challenge challenge;
    dp__join_request request;
} dp__attempt;

typedef struct dp__connections {
    dp__job *job;
    bool far; /* there are several machines */
    dp__port *port;
    dp__server server; /* lets them in until all have come; so long there are these two: */
    dp__attempt *attempts;
    dp__os_watch *watch;
    int each;  /* to each process */
    int count; /* of all */
    int *fds;  /* by process, and then by number; -1: its own */
} dp__connections;

/* Returns where those of a process begin. */
static int dp__connections_of(const dp__connections *connections, int process)
{
    return process * connections->each;
}

/* Returns the process to which a connection leads. */
static int dp__connection_process(const dp__connections *connections, int place)
{
    return place / connections->each;
}

static void dp__connections_hang_up(dp__connections *connections)
{
    int *fds = connections->fds;
    for (int i = 0; fds != NULL && i < connections->count; i++)
        dp__os_drop(&fds[i]);
}

static void dp__connections_end(dp__connections *connections)
{
    dp__server_close(&connections->server);
    connections->server = (dp__server){.listener = NULL};
}

static void dp__connections_close(dp__connections *connections)
{
    dp__connections_hang_up(connections);
    dp__connections_end(connections);
    dp__os_free(connections->fds, 0, NULL);
    dp__os_free(connections->attempts, 0, NULL);
    dp__os_free(connections->watch, 0, NULL);
}

static void dp__connections_prepare(dp__connections *connections, dp__job *job, bool far)
{
    connections->job = job;
    connections->far = far;
}

DP__COLD static dp_status dp__connections_make(dp__connections *connections)
{
    dp__job *job = connections->job;
    dp__port *port = connections->port;
    int each = port->connections;
    size_t count = (size_t)job->process_count * (size_t)each;
    connections->each = each;
    connections->count = (int)count;
    connections->fds = dp__os_alloc(count * sizeof *connections->fds, sizeof(int), NULL);
    connections->attempts =
        dp__os_alloc(count * sizeof *connections->attempts, _Alignof(dp__attempt), NULL);
    connections->watch =
        dp__os_alloc(count * sizeof *connections->watch, _Alignof(dp__os_watch), NULL);
    for (size_t i = 0; i < count && connections->fds != NULL; i++)
        connections->fds[i] = -1;
    for (size_t i = 0; i < count && connections->attempts != NULL; i++)
        connections->attempts[i] = (dp__attempt){.place = -1};
    connections->server = (dp__server){.process = job->process,
                                       .process_count = job->process_count,
                                       .all = true,
                                       .kind = DP__FOR_DATA,
                                       .each = each,
                                       .launch = &port->launch,
                                       .more = connections->watch,
                                       .more_most = dp__connections_of(connections, job->process)};
    if (connections->fds == NULL || connections->attempts == NULL || connections->watch == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu connections", count);
    return dp__server_open(&connections->server, port->listener, port->launch.key);
}

/* Lets those in that come to the port of all. */
DP__COLD static dp_status dp__connections_begin(dp__connections *connections)
{
    dp__job *job = connections->job;
    DP_TRY(dp__port_share(job->ctx, connections->far));
    dp__port *port = job->ctx->world.port;
    connections->port = port;
    DP_TRY(dp__connections_make(connections));
    dp__port_raise(port);
    if (port->status != DP_OK)
        return dp_error(port->status, "%s", port->said);
    if (connections->each > 1)
        dp__log(job->ctx, DP_LOG_INFO, "%d connections to each process, for collectives over TCP",
                connections->each);
    return dp__seats_check(port->seats, job->process_count, job->process);
}

/* Gives up a try, and rests before the next one. */
static void dp__attempt_rest(dp__attempt *attempt, int *fd, const char *why)
{
    dp__os_drop(fd);
    attempt->why = why != NULL ? why : attempt->why;
    attempt->refusals = why == dp__refused ? attempt->refusals + 1 : 0;
    attempt->until_ns = dp__os_after_ms(dp__pause_ms(attempt->round++));
    attempt->stage = DP__RESTS;
}

DP__COLD static dp_status dp__attempt_call(const dp__port *port, dp__attempt *attempt, int process,
                                           int *fd)
{
    dp__job *job = port->job;
    *fd = dp__seat_connect(port->seats, job->process_count, job->process, process);
    if (*fd == DP__OS_FULL)
        return dp__connect_nowhere(job->process);
    attempt->until_ns = dp__os_after_ms(dp__patience_ms(attempt->round, false));
    attempt->stage = DP__CALLS;
    if (*fd < 0)
        dp__attempt_rest(attempt, fd, *fd == DP__OS_REFUSED ? dp__refused : NULL);
    return DP_OK;
}

/* Sends the request over a connection that is there, or is not to be had. */
DP__COLD static void dp__attempt_ask(const dp__connections *connections, int place)
{
    dp__attempt *attempt = &connections->attempts[place];
    uint64_t until_ns = connections->server.until_ns;
    int *fd = &connections->fds[place], how = dp__os_connection(*fd);
    attempt->request = dp__port_request(connections->port, DP__FOR_DATA);
    attempt->request.connection = (uint16_t)(place % connections->each);
    attempt->request.nonce = dp__os_random();
    attempt->request.patience_ms = (uint32_t)dp__os_ms_until(until_ns);
    attempt->got = 0;
    attempt->stage = DP__ASKS;
    if (how != 0 || dp__os_send(*fd, &attempt->request, sizeof attempt->request) !=
                        (ptrdiff_t)sizeof attempt->request)
        dp__attempt_rest(attempt, fd, how == DP__OS_REFUSED ? dp__refused : NULL);
}

DP__COLD static void dp__attempt_hear(const dp__port *port, dp__attempt *attempt, int *fd)
{
    dp__challenge *said = &attempt->challenge;
    ptrdiff_t got = dp__os_receive(*fd, (char *)said + attempt->got, sizeof *said - attempt->got);
    attempt->got += got > 0 ? (size_t)got : 0;
    if (got >= 0 && attempt->got < sizeof *said)
        return;
    dp__key key = port->launch.key;
    uint64_t proof = dp__proof(key, &attempt->request, said->nonce, true);
    bool sound = got >= 0 && said->magic == DP__CHALLENGE_MAGIC &&
                 said->proof == dp__proof(key, &attempt->request, said->nonce, false) &&
                 dp__os_send(*fd, &proof, sizeof proof) == (ptrdiff_t)sizeof proof;
    attempt->stage = DP__LET_IN;
    if (!sound)
        dp__attempt_rest(attempt, fd, dp__silent);
}

/* Goes on with an attempt as far as that needs no waiting. */
DP__COLD static dp_status dp__attempt_look(dp__connections *connections, int place)
{
    const dp__port *port = connections->port;
    dp__attempt *attempt = &connections->attempts[place];
    int *fd = &connections->fds[place], process = dp__connection_process(connections, place);
    bool ready = attempt->place >= 0 && connections->watch[attempt->place].revents != 0;
    bool late = attempt->stage != DP__LET_IN && dp__os_ms_until(attempt->until_ns) == 0;
    if (ready && attempt->stage == DP__CALLS)
        dp__attempt_ask(connections, place);
    else if (ready && attempt->stage == DP__ASKS)
        dp__attempt_hear(port, attempt, fd);
    else if (late && attempt->stage != DP__RESTS)
        dp__attempt_rest(attempt, fd, attempt->stage == DP__ASKS ? dp__silent : NULL);
    else if (late)
        return dp__attempt_call(port, attempt, process, fd);
    if (attempt->refusals < DP__REFUSALS)
        return DP_OK;
    return dp_error(DP_ERR_REMOTE, "process %d of %d has closed its port", process,
                    port->job->process_count);
}

/* Returns the first connection by which this process has not been let in; -1: there is none. */
DP__COLD static int dp__connections_watch(dp__connections *connections)
{
    dp__server *server = &connections->server;
    int first = -1;
    server->more_count = 0;
    for (int i = dp__connections_of(connections, server->process) - 1; i >= 0; i--) {
        dp__attempt *attempt = &connections->attempts[i];
        bool open = attempt->stage == DP__CALLS || attempt->stage == DP__ASKS;
        first = attempt->stage != DP__LET_IN ? i : first;
        attempt->place = open ? server->more_count++ : -1;
        if (open)
            connections->watch[attempt->place] = (dp__os_watch){
                .fd = connections->fds[i],
                .events = attempt->stage == DP__CALLS ? DP__CAN_WRITE : DP__CAN_READ};
    }
    return first;
}

/* Fails as the time is up: who is missing is named. */
DP__COLD static dp_status dp__connections_late(const dp__connections *connections, int missing)
{
    const dp__port *port = connections->port;
    const dp__server *server = &connections->server;
    if (missing < 0)
        return dp__server_timed_out(server);
    const dp__join_request request = dp__port_request(port, DP__FOR_DATA);
    int process = dp__connection_process(connections, missing);
    const dp__target target = {.host = dp__port_host(port, process),
                               .port = (int)port->seats[process].port,
                               .port_count = 1};
    return dp__connect_failed(&target, process, &request,
                              (double)(server->until_ns - server->opened_ns) * 1e-9,
                              connections->attempts[missing].why);
}

/* Reads from the tree why the others fail, if they do, and answers now and then that this process
   is there. */
static dp_status dp__connections_listen(dp__tree *tree, uint64_t *answers_ns)
{
    if (dp__os_ms_until(*answers_ns) == 0) {
        dp__tree_stay(tree);
        *answers_ns = dp__os_after_ms(DP__GRACE_MS / 4);
    }
    return dp__tree_listen(tree);
}

/* Visits all before this process and lets in all behind it, until each has met each. */
DP__COLD static dp_status dp__connections_meet(dp__connections *connections, uint64_t until_ns)
{
    dp__server *server = &connections->server;
    dp__tree *tree = dp__port_tree(connections->job);
    dp_status status = DP_OK;
    uint64_t answers_ns = 0;
    int before = dp__connections_of(connections, server->process);
    server->until_ns = until_ns;
    dp__server_begin(server);
    while (status == DP_OK) {
        for (int i = 0; i < before && status == DP_OK; i++)
            status = dp__attempt_look(connections, i);
        int missing = dp__connections_watch(connections);
        if (status == DP_OK && missing < 0 && server->taken == server->expected)
            return DP_OK;
        if (status == DP_OK && tree != NULL)
            status = dp__connections_listen(tree, &answers_ns);
        if (status == DP_OK)
            status = dp__server_is_over(server)
                         ? dp__server_held_up(server, dp__connections_late(connections, missing))
                         : dp__server_look(server);
    }
    return status;
}

/* Keeps the connections of those that have come for as long as the communicator is there. */
static void dp__connections_keep(dp__connections *connections)
{
    dp__server *server = &connections->server;
    int first = dp__connections_of(connections, server->first);
    for (int i = 0; i < server->peer_count; i++) {
        connections->fds[first + i] = server->peers[i].fd;
        server->peers[i].fd = -1;
    }
}

/* Says why to all that are connected. */
DP__COLD static dp_status dp__connections_say(dp__connections *connections, dp_status status,
                                              const char *why)
{
    int own = connections->job->process;
    (void)dp_error(status, "%s", why);
    for (int i = 0; i < dp__connections_of(connections, own); i++)
        if (connections->attempts[i].stage == DP__LET_IN)
            dp__tree_header_last(&connections->fds[i], status, own, why);
    return dp__server_fail(&connections->server, status);
}

/* This process gives up: the others hear why. What another one has ended it may say itself. */
DP__COLD static dp_status dp__connections_fail(dp__connections *connections, dp_status status)
{
    dp__tree *tree = dp__port_tree(connections->job);
    uint64_t until_ns = dp__os_after_ms(status == DP_ERR_REMOTE ? DP__GRACE_MS : 0);
    char why[DP__TEXT_BYTES];
    memcpy(why, dp_last_error(), sizeof why);
    while (tree != NULL && dp__tree_skip(tree) == DP_OK && dp__os_ms_until(until_ns) > 0)
        dp__os_sleep_ms(1);
    dp_status heard = tree != NULL ? dp__tree_listen(tree) : DP_OK;
    if (heard != DP_OK)
        memcpy(why, dp_last_error(), sizeof why);
    else if (tree != NULL)
        dp__tree_tell(tree, status, connections->job->process, why);
    return dp__connections_say(connections, heard != DP_OK ? heard : status, why);
}

/* Connects all, once all have begun. */
DP__COLD static dp_status dp__connections_connect(dp__connections *connections)
{
    dp__job *job = connections->job;
    dp__tree *tree = dp__port_tree(job);
    if (tree != NULL)
        dp__tree_begin(tree);
    uint64_t until_ns = tree != NULL ? dp__tree_until(tree, DP__GRACE_MS)
                                     : dp__os_after_ms(job->timeout_ms);
    dp_status status = dp__connections_meet(connections, until_ns);
    if (tree != NULL)
        dp__tree_end(tree);
    if (status == DP_OK) {
        dp__connections_keep(connections);
    } else {
        status = dp__connections_fail(connections, status);
        dp__connections_hang_up(connections);
        dp__port_shut(connections->port); /* who still calls is refused, and knows */
    }
    dp__connections_end(connections);
    return dp__job_agree(job, status);
}

/* ==== >>dialling =================================================================================
   For messages (dp/channels.h), whatever table has the collectives, a process connects to another
   one when it has something to say for the first time. Nobody waits: the other one may compute for
   a while before it answers. So who calls proves at once that it is of the job, by bytes that serve
   there, and once: a process lets each other one in once. It believes nothing that comes back
   before the other one has proved the same.                                                     */

typedef struct dp__dial { /* to another process, until it has answered */
    bool asked;           /* and anything may be said now */
    size_t got;           /* bytes of the answer */
    dp__join_request request;
    dp__challenge challenge;
} dp__dial;

/* Those that call are let in: what they say first is there in most cases. */
static dp_status dp__port_look(dp__port *port)
{
    dp__server *server = &port->server;
    for (int i = 0; i < DP__LISTENER_LOOKS && (i == 0 || port->listener->pending_count > 0); i++)
        DP_TRY(dp__server_look(server));
    return DP_OK;
}

/* The connection of a process that has come since it was last asked for; -1: it has not. */
static int dp__port_take(dp__port *port, int process)
{
    dp__peer *peer = &port->server.peers[process];
    int fd = peer->fd;
    peer->fd = -1;
    return fd;
}

/* Begin to connect to a process. -1: not now, or nobody is there any more. */
DP__COLD static dp_status dp__port_dial(const dp__port *port, int process, int *out_fd)
{
    int fd = dp__seat_connect(port->seats, port->job->process_count, port->job->process, process);
    *out_fd = fd >= 0 ? fd : -1;
    return fd == DP__OS_FULL ? dp__connect_nowhere(port->job->process) : DP_OK;
}

/* Once it is connected. false: it is not. */
DP__COLD static bool dp__call_ask(dp__dial *call, const dp__port *port, int process, int fd)
{
    struct {
        dp__join_request request;
        uint64_t proof;
    } both = {.request = dp__port_request(port, DP__FOR_MESSAGES)};
    both.request.nonce = dp__os_random();
    both.request.listens = (uint64_t)process; /* who is meant */
    both.proof = dp__proof(port->launch.key, &both.request, DP__LISTENER_NONCE, true);
    call->request = both.request;
    call->asked = true;
    return dp__os_connected(fd) && dp__os_send(fd, &both, sizeof both) == (ptrdiff_t)sizeof both;
}

/* DP_PENDING: the other one has not answered yet. REMOTE: it is none of the job. */
static dp_status dp__call_hear(dp__dial *call, const dp__port *port, int fd)
{
    dp__challenge *answer = &call->challenge;
    ptrdiff_t got = dp__os_receive(fd, (char *)answer + call->got, sizeof *answer - call->got);
    call->got += got > 0 ? (size_t)got : 0;
    if (got >= 0 && call->got < sizeof *answer)
        return DP_PENDING;
    bool sound = got >= 0 && answer->magic == DP__CHALLENGE_MAGIC &&
                 answer->proof ==
                     dp__proof(port->launch.key, &call->request, DP__LISTENER_NONCE, false);
    return sound ? DP_OK : DP_ERR_REMOTE;
}

/* ==== >>flow ===================================================================================
   A load has a part for each connection and one from each. A connection carries the parts of
   one load after those of another, either way, and nothing else: as all processes begin the
   same ones in the same order, there are no heads. The system takes what is sent as long as it has
   room, and wakes a process that waits when something has come.

   Several connections are for links that one does not fill: it has no more under way than its
   window, so that it gets one window across in each round trip, and some networks slow each
   connection down. What a process has for another one is cut into stripes, one for each connection
   between them. Nothing but the number of bytes says where, so both cut alike. A stripe has
   DP__TCP_STRIPE_BYTES or more, if so many are left: small data is all on the first connection, and
   stripes of the last ones may be empty, which moves nothing.                                    */

enum { DP__TCP_STRIPE_BYTES = 16 << 10 };

/* The load that a connection carries, and how much of its part has been moved. */
typedef struct dp__tcp_progress {
    dp__load *at; /* NULL: all that was begun has been moved */
    size_t moved;
} dp__tcp_progress;

typedef struct dp__tcp {
    dp__connections connections;
    dp__tcp_progress *out, *in; /* of each connection */
    dp__os_watch *watch;
    int *watched; /* which connections */
    uint64_t begun;
    dp__load *last; /* that was begun */
} dp__tcp;

/* Returns how much of `bytes` the connection with that number carries, and where it begins. */
static size_t dp__tcp_stripe(size_t bytes, int each, int number, size_t *out_first)
{
    size_t share = (bytes + (size_t)each - 1) / (size_t)each;
    size_t stripe = dp__align_up(share, DP__TCP_STRIPE_BYTES), first = (size_t)number * stripe;
    *out_first = first < bytes ? first : bytes;
    return bytes - *out_first < stripe ? bytes - *out_first : stripe;
}

/* Moves as much as goes now over a connection, of all loads in turn. */
static dp_status dp__tcp_move(const dp__endpoint *endpoint, int connection, bool sends)
{
    dp__tcp *tcp = endpoint->own;
    dp__tcp_progress *way = sends ? &tcp->out[connection] : &tcp->in[connection];
    int fd = tcp->connections.fds[connection], each = tcp->connections.each;
    int process = dp__connection_process(&tcp->connections, connection);
    while (way->at != NULL) {
        dp__load *load = way->at;
        const dp__counts *counts = sends ? &load->to : &load->from;
        size_t first, stripe = dp__tcp_stripe((size_t)counts->counts[process], each,
                                              connection % each, &first);
        size_t place = (size_t)counts->places[process] + first + way->moved;
        size_t bytes = stripe - way->moved;
        ptrdiff_t moved = bytes == 0 ? 0
                          : sends    ? dp__os_send(fd, load->out + place, bytes)
                                     : dp__os_receive(fd, load->in + place, bytes);
        if (moved < 0)
            return dp__endpoint_lost(endpoint, process);
        way->moved += (size_t)moved;
        if ((size_t)moved < bytes && (moved == 0 || sends))
            return DP_OK;
        if ((size_t)moved < bytes)
            continue;
        *way = (dp__tcp_progress){.at = load->next};
        load->left--;
    }
    return DP_OK;
}

/* Waits at most so long until something can move, and moves it. */
static dp_status dp__tcp_advance(dp__endpoint *endpoint, int timeout_ms)
{
    dp__tcp *tcp = endpoint->own;
    int count = 0, all = tcp->connections.count;
    for (int i = 0; i < all; i++) {
        int fd = tcp->connections.fds[i];
        int events = (tcp->out[i].at != NULL ? DP__CAN_WRITE : 0) |
                     (tcp->in[i].at != NULL ? DP__CAN_READ : 0);
        if (events == 0 || fd < 0)
            continue;
        tcp->watch[count] = (dp__os_watch){.fd = fd, .events = (short)events};
        tcp->watched[count++] = i;
    }
    count = count > 0 && dp__os_poll(tcp->watch, count, timeout_ms) > 0 ? count : 0;
    for (int i = 0; i < count; i++) {
        int events = tcp->watch[i].revents;
        bool ends = dp__os_has_ended(events);
        if ((events & DP__CAN_WRITE) != 0 || (ends && (tcp->watch[i].events & DP__CAN_WRITE) != 0))
            DP_TRY(dp__tcp_move(endpoint, tcp->watched[i], true));
        if ((events & DP__CAN_READ) != 0 || (ends && (tcp->watch[i].events & DP__CAN_READ) != 0))
            DP_TRY(dp__tcp_move(endpoint, tcp->watched[i], false));
    }
    return DP_OK;
}

/* Moves what goes at once of a load, on all connections to a process. A stripe that is empty
   has come: nothing else will say so. */
static dp_status dp__tcp_start(const dp__endpoint *endpoint, dp__load *load, int process)
{
    const dp__tcp *tcp = endpoint->own;
    int each = tcp->connections.each, first = dp__connections_of(&tcp->connections, process);
    size_t expected = (size_t)load->from.counts[process];
    for (int i = 0; i < each; i++) {
        dp__tcp_progress *out = &tcp->out[first + i], *in = &tcp->in[first + i];
        size_t at;
        bool comes = in->at == NULL;
        in->at = comes ? load : in->at;
        if (out->at == NULL) {
            out->at = load;
            DP_TRY(dp__tcp_move(endpoint, first + i, true));
        }
        if (comes && dp__tcp_stripe(expected, each, i, &at) == 0)
            DP_TRY(dp__tcp_move(endpoint, first + i, false));
    }
    return DP_OK;
}

static dp_status dp__tcp_begin(dp__endpoint *endpoint, dp__load *load)
{
    dp__tcp *tcp = endpoint->own;
    int self = endpoint->process, others = endpoint->process_count - 1;
    size_t own = (size_t)load->to.counts[self];
    char *place = load->in + load->from.places[self];
    if (own > 0 && load->out + load->to.places[self] != place)
        memcpy(place, load->out + load->to.places[self], own);
    load->left = 2 * tcp->connections.each * others;
    load->number = tcp->begun++;
    load->next = NULL;
    if (tcp->last != NULL && tcp->last != load)
        tcp->last->next = load;
    tcp->last = load;
    for (int p = 0; p < endpoint->process_count; p++)
        if (p != self)
            DP_TRY(dp__tcp_start(endpoint, load, p));
    return DP_OK;
}

/* Returns a process of which a part of that is missing, or which does not take its own: from 1. */
static unsigned dp__tcp_lacks(const dp__endpoint *endpoint, const dp__load *load)
{
    const dp__tcp *tcp = endpoint->own;
    unsigned sender = 0, receiver = 0;
    for (int i = tcp->connections.count - 1; i >= 0; i--) {
        unsigned process = (unsigned)dp__connection_process(&tcp->connections, i) + 1;
        const dp__load *in = tcp->in[i].at, *out = tcp->out[i].at;
        if (in != NULL && in->number <= load->number)
            sender = process;
        if (out != NULL && out->number <= load->number)
            receiver = process;
    }
    return sender != 0 ? sender : receiver;
}

/* ==== >>table ==================================================================================
   For all processes whose devices' memory the host reaches: after shared memory, and after MPI.  */

static bool dp__tcp_fits(const dp_comm_config *config)
{
    return config->bootstrap != NULL && config->host_memory;
}

static dp_status dp__tcp_prepare(dp__endpoint *endpoint)
{
    dp__tcp *tcp = dp__os_alloc(sizeof *tcp, 64, NULL);
    if (tcp == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a communicator");
    memset(tcp, 0, sizeof *tcp);
    endpoint->own = tcp;
    dp__connections_prepare(&tcp->connections, endpoint->job, endpoint->far);
    return DP_OK;
}

/* Makes what may be lacking before any process waits for another one. */
DP__COLD static dp_status dp__tcp_make(dp__tcp *tcp)
{
    DP_TRY(dp__connections_begin(&tcp->connections));
    size_t count = (size_t)tcp->connections.count;
    tcp->out = dp__os_alloc(2 * count * sizeof *tcp->out, _Alignof(dp__tcp_progress), NULL);
    tcp->watch = dp__os_alloc(count * sizeof *tcp->watch, _Alignof(dp__os_watch), NULL);
    tcp->watched = dp__os_alloc(count * sizeof *tcp->watched, sizeof(int), NULL);
    if (tcp->out == NULL || tcp->watch == NULL || tcp->watched == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a communicator");
    memset(tcp->out, 0, 2 * count * sizeof *tcp->out);
    tcp->in = tcp->out + count;
    return DP_OK;
}

static dp_status dp__tcp_connect(dp__endpoint *endpoint)
{
    dp__tcp *tcp = endpoint->own;
    DP_TRY(dp__job_agree(endpoint->job, dp__tcp_make(tcp)));
    return dp__connections_connect(&tcp->connections);
}

static bool dp__tcp_close(dp__endpoint *endpoint)
{
    dp__tcp *tcp = endpoint->own;
    if (tcp == NULL)
        return true;
    dp__connections_close(&tcp->connections);
    dp__os_free(tcp->out, 0, NULL);
    dp__os_free(tcp->watch, 0, NULL);
    dp__os_free(tcp->watched, 0, NULL);
    dp__os_free(tcp, 0, NULL);
    return true;
}

static const dp__carrier dp__tcp_carrier; /* dp/channels.h defines it */

static dp_status dp__tcp_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    return dp__mesh_open(host, config, dp_tcp_coll(), &dp__tcp_carrier, out);
}

static bool dp__tcp_carries(const dp_ctx *ctx)
{
    return dp__mesh_carrier(ctx) == &dp__tcp_carrier;
}

DP_API const dp_coll_ops *dp_tcp_coll(void)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = "TCP",
                                    .fits = dp__tcp_fits,
                                    .open = dp__tcp_open,
                                    .close = dp__mesh_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__mesh_run_call};
    return &ops;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
