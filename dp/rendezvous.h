/* dp/rendezvous.h - v0.2.0 - how processes connect to process 0 and to each other - MIT licence

   Part of dp.h, which includes it. >>meeting, the last section, tells it in order:

   1. Process 0 listens, at a name inside the machine or at a port. Every other process listens too,
      if it has children in the tree (dp/tree.h), and connects to process 0.
   2. It sends a request, the listener a challenge with a proof, and it its own proof: both have the
      key of the launch, which never travels.
   3. When all have come, process 0 sends each a welcome: its parent's address, a number from which
      they make a new key, and how much time is left.
   4. Each connects to its parent with that key, waits for its children, and sends READY to
      process 0. When all have, that sends GO, and they are in the tree.

   Whoever waits for others names those that do not come: process 0 all, any other its children.

   CONTENTS (search for the tag)
     >>server     who may join, and who may not
     >>awaiting   until all are here, or it is known who is not
     >>address    where processes listen, and that there is one process 0
     >>connecting how a process finds another one
     >>meeting    from a launch to a tree
*/

#ifndef DP__ROOMS
#error "dp/rendezvous.h is a part of dp.h: include dp.h"
#else

/* ==== >>server =================================================================================
   Lets in the processes of the job. A connection that has proved that it is of the job (see
   dp/listener.h) belongs to a peer, and stays open.

   Process 0 keeps a connection to every peer until all have connected to their neighbours. It
   notices any process that ends or fails before that, and tells all others, also those that connect
   within a second after that. It does not look at all of many peers whenever one connection has
   news: meeting would take time with the square of their number. While it opens, process 0 raises
   its limit of open files, where that is low.

   Without a number from a launcher and without a secret, two jobs started at one address cannot be
   told apart. Then some process number comes twice, which is an error for all processes there.
   Process 0 waits a little longer for this when all numbers have come.                           */

enum {
    DP__PEERS_FEW = 64,    /* are looked at each time */
    DP__PEER_NS = 400,     /* else for each of them so long passes; a look at one takes 50 to 100 */
    DP__CALL_LOOK_MS = 10, /* so often it looks whether the job has failed */
    DP__SAID_BYTES = 320
};

typedef struct dp__peer { /* a process behind this one, by one of its connections */
    bool taken, ready;
    int fd; /* -1: the tree has it, or nobody came */
    uint64_t listens;
    char host[DP__PLACE_BYTES];
} dp__peer;

typedef struct dp__server {
    const dp__launch *launch;
    int process, process_count;
    int first; /* of those that may connect */
    bool all;  /* all behind it connect, as to process 0; else only children in the tree do */
    bool any;  /* all others may connect, at any time; nobody is waited for */
    dp__connection_kind kind; /* of the connections that are let in, */
    int each;                 /* and how many of each process; 0: one */
    bool welcomed;            /* all have joined, and connect to their neighbours */
    bool twice;               /* two processes have the same number */
    dp_status failed;         /* no process may join any more: dp_last_error says why */
    dp__tree *tree;           /* gets the connections in the end */
    dp__listener *listener;
    dp__peer *peers; /* of the processes behind this one, in order, `each` of each */
    int peer_count, taken, ready, expected;
    int pending_most; /* for which there is room in a look */
    int rejected;     /* by the listener, before this server began */
    dp__os_watch *watch;
    uint64_t opened_ns, until_ns;
    uint64_t shorter_ns;       /* by how much the others' time has made this one shorter; */
    int earliest;              /* by that of which process */
    uint64_t due_ns, held_ns;  /* when it is to look again; for how long it was held up so far */
    bool extended;             /* it was held up for long, and has had more time than others */
    uint64_t quiet_ns;         /* until then a number may come twice */
    uint64_t peers_ns;         /* not before then are the peers looked at again */
    bool raised;               /* the limit of open files */
    dp__os_watch *more;        /* what else ends a look, of somebody who looks every so often; or */
    int more_count, more_most; /* NULL */
    char said[DP__SAID_BYTES]; /* why the last process was refused */
} dp__server;

/* NULL: that process is none of those that may connect, or it has not that many connections. */
static dp__peer *dp__server_peer(const dp__server *server, int process, int connection)
{
    bool behind = process >= server->first &&
                  process - server->first < server->peer_count / server->each;
    return behind && connection < server->each
               ? &server->peers[(process - server->first) * server->each + connection]
               : NULL;
}

/* dp__service.declines: true if that process has been told that no process may join any more. It
   then comes for another try, before which this process has to be ready; where a number came twice,
   it may be another process. */
static bool dp__server_has_told(const void *user, const dp__join_request *request)
{
    const dp__server *server = user;
    const dp__peer *peer = dp__server_peer(server, request->process, request->connection);
    bool late = peer != NULL && !peer->taken;
    return server->failed != DP_OK && !server->twice && !late;
}

/* Returns how many places a look of the server has for others than those that are pending. */
static size_t dp__server_watched(const dp__server *server)
{
    return 2 + (size_t)server->peer_count + DP__LINKS_MAX + (size_t)server->more_most;
}

/* Lets in, at a listener, those that have the key. */
static dp_status dp__server_serve(dp__server *server, dp__key key)
{
    const dp__service service = {.at_once = server->any,
                                 .patient = !server->any,
                                 .expected = server->expected,
                                 .key = key,
                                 .process = server->process,
                                 .declines = dp__server_has_told,
                                 .user = server};
    return dp__listener_serve(server->listener, server->kind, service);
}

static dp_status dp__server_open(dp__server *server, dp__listener *listener, dp__key key)
{
    server->listener = listener;
    server->first = server->any ? 0 : server->process + 1;
    server->each = server->each > 0 ? server->each : 1;
    int behind = server->all ? server->process_count - server->first
                             : dp__behind(server->process, server->process_count) - 1;
    server->peer_count = behind * server->each;
    server->expected = server->all ? server->peer_count
                                   : dp__child_count(server->process, server->process_count);
    DP_TRY(dp__server_serve(server, key));
    server->pending_most = listener->pending_capacity;
    server->rejected = listener->rejected;
    size_t peers = (size_t)server->peer_count;
    size_t watched = dp__server_watched(server) + (size_t)server->pending_most;
    server->peers = dp__os_alloc((peers + 1) * sizeof *server->peers, 64, NULL);
    server->watch = dp__os_alloc(watched * sizeof *server->watch, 64, NULL);
    for (size_t i = 0; i < peers && server->peers != NULL; i++)
        server->peers[i] = (dp__peer){.fd = -1};
    if (server->peers == NULL || server->watch == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", server->process_count);
    server->raised = server->all && !server->any;
    if (server->raised)
        dp__os_files_raise(peers + DP__PENDING_MAX);
    return DP_OK;
}

/* Closes the connections that nobody has taken over. */
static void dp__server_hang_up(dp__server *server)
{
    for (int i = 0; server->peers != NULL && i < server->peer_count; i++)
        dp__os_drop(&server->peers[i].fd);
}

/* Ends what it has let in, but not the listener, where others may come for something else. */
static void dp__server_close(dp__server *server)
{
    dp__server_hang_up(server);
    if (server->listener != NULL)
        dp__listener_end(server->listener, server->kind);
    if (server->raised)
        dp__os_files_lower();
    dp__os_free(server->peers, 0, NULL);
    dp__os_free(server->watch, 0, NULL);
}

static bool dp__server_twice(dp__server *server, int process)
{
    server->twice = !server->any; /* where bytes that were recorded may come */
    snprintf(server->said, DP__SAID_BYTES,
             "two processes are process %d of %d %s: either two jobs have the same address (give "
             "each its own, or a DP_SECRET), or one of the two has a wrong number",
             process, server->process_count, server->launch->where);
    return false;
}

/* Returns the process whose connection has that place among the peers. */
static int dp__server_process(const dp__server *server, int place)
{
    return server->first + place / server->each;
}

/* Returns true if a process that has the key may join. If not, server->said gets the reason, which
   is not a failure of this process. */
static bool dp__server_admits(dp__server *server, const dp__join_request *request)
{
    int who = request->process;
    const dp__peer *peer = dp__server_peer(server, who, request->connection);
    char *said = server->said;
    if (request->version != DP_VERSION)
        snprintf(said, DP__SAID_BYTES, "process %d has dp.h %d, process %d has %d", who,
                 (int)request->version, server->process, DP_VERSION);
    else if (request->process_count != server->process_count)
        snprintf(said, DP__SAID_BYTES, "process %d counts %d processes, process %d counts %d", who,
                 (int)request->process_count, server->process, server->process_count);
    else if (who == server->process || (peer != NULL && peer->taken))
        return dp__server_twice(server, who);
    else if (request->connection >= server->each)
        snprintf(said, DP__SAID_BYTES, "process %d makes a connection %d, process %d counts %d",
                 who, request->connection, server->process, server->each);
    else if (peer == NULL || (!server->all && dp__parent(who) != server->process))
        snprintf(said, DP__SAID_BYTES, "process %d does not belong behind process %d", who,
                 server->process);
    else
        return true;
    return false;
}

/* The connection belongs to the peer from now on, or to the tree. The first process to arrive has
   waited longest: all have the time that it has left. */
static void dp__server_add(dp__server *server, const dp__pending *pending)
{
    const dp__join_request *request = &pending->request;
    dp__peer *peer = dp__server_peer(server, request->process, request->connection);
    uint64_t until = dp__os_after_ms(pending->request.patience_ms);
    peer->taken = true;
    if (server->all)
        peer->fd = pending->fd;
    else
        dp__tree_link(server->tree, pending->fd, pending->request.process);
    peer->listens = pending->request.listens;
    memcpy(peer->host, pending->request.host, sizeof peer->host);
    peer->host[sizeof peer->host - 1] = '\0';
    if (peer->host[0] == '\0')
        dp__os_host_of(pending->fd, false, peer->host, sizeof peer->host);
    if (until < server->until_ns) {
        server->shorter_ns += server->until_ns - until;
        server->earliest = pending->request.process;
        server->until_ns = until;
    }
    if (server->all && !server->launch->numbered && !server->launch->secret)
        server->quiet_ns = dp__os_after_ms(DP__QUIET_MS);
    server->taken++;
}

/* A process that comes too late is told why. */
static void dp__server_reject(dp__server *server, const dp__pending *pending)
{
    if (!server->twice) {
        dp__server_peer(server, pending->request.process, pending->request.connection)->taken =
            true;
        server->taken++;
    }
    dp__tree_header_failure(pending->fd, server->failed, server->process, dp_last_error());
}

/* Gives a connection that has proved that it is of the job to a peer; or it is told why not. */
static void dp__server_meet(dp__server *server, const dp__pending *pending)
{
    if (server->failed != DP_OK) {
        dp__server_reject(server, pending);
    } else if (dp__server_admits(server, &pending->request)) {
        dp__server_add(server, pending);
        return;
    } else if (!server->any) { /* who calls there does not listen for headers */
        dp__tree_header_failure(pending->fd, DP_ERR_MISMATCH, server->process, server->said);
    }
    dp__os_close(pending->fd);
}

static void dp__server_meet_all(dp__server *server)
{
    dp__pending pending;
    while (dp__listener_take(server->listener, server->kind, &pending))
        dp__server_meet(server, &pending);
}

/* Fails as this process may open no more files, and nobody is pending whose files could be had. */
static dp_status dp__server_full(const dp__server *server)
{
    if (server->listener->pending_count > 0 || server->any) /* they come later */
        return DP_OK;
    return dp_error(DP_ERR_NO_MEMORY,
                    "process %d has %d of %d connections and may open no more files than %llu: "
                    "raise its hard limit (ulimit -Hn, LimitNOFILE of a service) to %d or more",
                    server->process, server->taken, server->expected,
                    (unsigned long long)dp__os_files_limit(), server->expected + DP__PENDING_MAX);
}

/* ==== >>awaiting =================================================================================
   Whoever serves looks at all that has happened, again and again, until all have joined and then
   until all have met their neighbours, or until it has to say who is missing.                    */

/* Returns true if this process still waits for a connection of that one: process 0 awaits all until
   they are welcome, then that they are ready; any other process awaits its children. */
static bool dp__server_misses(const dp__server *server, int process)
{
    bool awaited = server->all || dp__parent(process) == server->process, missing = false;
    for (int i = 0; i < server->each && !missing; i++) {
        const dp__peer *peer = dp__server_peer(server, process, i);
        missing = server->welcomed ? !peer->ready : awaited && !peer->taken;
    }
    return missing;
}

static int dp__server_count_missing(const dp__server *server)
{
    int missing = 0;
    for (int i = 0; i < server->peer_count; i += server->each)
        missing += dp__server_misses(server, dp__server_process(server, i));
    return missing;
}

/* "process 3", "processes 3 and 7", "processes 1, 2 and 40 more" */
static void dp__server_name_missing(const dp__server *server, char *text, size_t room)
{
    int missing = dp__server_count_missing(server), named = 0;
    size_t used = (size_t)snprintf(text, room, missing == 1 ? "process" : "processes");
    for (int i = 0; i < server->peer_count && named < missing; i += server->each) {
        int process = dp__server_process(server, i);
        if (!dp__server_misses(server, process))
            continue;
        const char *before = named == 0 ? "" : named + 1 == missing ? " and" : ",";
        if (named == 8 && missing > 9) {
            snprintf(text + used, room - used, " and %d more", missing - named);
            return;
        }
        used += (size_t)snprintf(text + used, room - used, "%s %d", before, process);
        named++;
    }
}

/* Returns for how long this process was held up; 0: not for much of the time. */
static int dp__server_held_ms(const dp__server *server)
{
    uint64_t most_ns = (server->until_ns - server->opened_ns) / 8;
    return server->held_ns >= most_ns ? (int)(server->held_ns / 1000000) : 0;
}

/* Puts in words that this process came late itself, if it did: others have waited for much of their
   time when they find it. */
static void dp__server_say_late(const dp__server *server, char *text, size_t room)
{
    text[0] = '\0';
    if (server->shorter_ns > (server->until_ns - server->opened_ns) / 4)
        snprintf(text, room, "; process %d itself came %.3g s after process %d", server->process,
                 (double)server->shorter_ns * 1e-9, server->earliest);
}

/* Fails as some did not come. Inside a machine, a process with another secret connects to another
   name, and is not noticed. Those of this job, too, close their connections while this process is
   held up, as those of another job do. */
static dp_status dp__server_timed_out(const dp__server *server)
{
    char missing[160], rejected[80] = "", late[80];
    double seconds = (double)(server->until_ns - server->opened_ns) * 1e-9;
    dp__server_name_missing(server, missing, sizeof missing);
    if (server->welcomed)
        return dp_error(DP_ERR_TIMEOUT,
                        "%s of %d joined, but did not connect to the others within %.3g s", missing,
                        server->process_count, seconds);
    int others = server->listener->rejected - server->rejected;
    if (others > 0 && dp__server_held_ms(server) == 0)
        snprintf(rejected, sizeof rejected,
                 "; connections from another job, or with another DP_SECRET: %d", others);
    else if (server->launch->host[0] == '\0' && !server->launch->agreed)
        strcpy(rejected, "; a process with another DP_SECRET cannot find this one");
    dp__server_say_late(server, late, sizeof late);
    return dp_error(DP_ERR_TIMEOUT, "%s of %d did not come within %.3g s%s%s%s%s%s", missing,
                    server->process_count, seconds, late, rejected,
                    server->said[0] != '\0' ? " (" : "", server->said,
                    server->said[0] != '\0' ? ", and was refused)" : "");
}

/* Adds to a sentence that a process was held up, if it was. */
DP__COLD static dp_status dp__add_held_up(dp_status status, int process, int held_ms)
{
    char why[DP__TEXT_BYTES];
    if (held_ms <= 0)
        return status;
    memcpy(why, dp_last_error(), sizeof why);
    return dp_error(status, "%s; process %d was held up for %.3g s or longer", why, process,
                    held_ms * 1e-3);
}

/* A peer sends nothing until it has connected to its neighbours, or has failed. */
static dp_status dp__server_receive(dp__server *server, int place)
{
    dp__tree_header header, here = {DP__HEADER_MAGIC, DP__HERE, dp__server_held_ms(server), 0, 0};
    dp__peer *peer = &server->peers[place];
    uint64_t until_ns = dp__os_after_ms(DP__GRACE_MS);
    bool sound = dp__wire_receive(peer->fd, &header, sizeof header, until_ns) == DP_OK &&
                 dp__tree_header_is_sound(&header);
    if (sound && header.kind == DP__FAILED)
        return dp__failure_shared(peer->fd, &header);
    sound = sound && server->welcomed;
    if (sound && header.kind == DP__ASK)
        return dp__tree_header_send(peer->fd, &here, NULL, until_ns);
    if (sound && header.kind == DP__READY && !peer->ready) {
        peer->ready = true;
        server->ready++;
        return DP_OK;
    }
    return dp_error(DP_ERR_REMOTE, "process %d of %d joined, and ended before all %s",
                    dp__server_process(server, place), server->process_count,
                    server->welcomed ? "had connected" : "had joined");
}

/* How long the peers are left alone; 0: it is time to look at them. */
static int dp__server_rest_ms(const dp__server *server)
{
    bool many = server->all && server->failed == DP_OK && server->taken > DP__PEERS_FEW;
    return many ? dp__os_ms_until(server->peers_ns) : 0;
}

/* Watch the peers that have joined: those behind this process in the tree may report a failure.
   What comes from those that nobody waits for is for somebody else. */
static int dp__server_watch(dp__server *server, dp__os_watch *watch)
{
    int count = 0;
    if (server->failed != DP_OK || server->any)
        return 0;
    if (!server->all)
        return dp__tree_watch(server->tree, watch);
    server->peers_ns = dp__os_now_ns() + (uint64_t)server->taken * DP__PEER_NS;
    for (int i = 0; i < server->peer_count; i++)
        if (server->peers[i].taken)
            watch[count++] = (dp__os_watch){.fd = server->peers[i].fd, .events = DP__CAN_READ};
    return count;
}

static dp_status dp__server_receive_all(dp__server *server, const dp__os_watch *watch, int count)
{
    if (!server->all)
        return dp__tree_hear_all(server->tree, watch, count, false);
    for (int i = 0, k = 0; i < server->peer_count && k < count; i++)
        if (server->peers[i].taken && watch[k++].revents != 0)
            DP_TRY(dp__server_receive(server, i));
    return DP_OK;
}

static bool dp__server_is_done(const dp__server *server)
{
    if (server->welcomed)
        return server->ready == server->expected;
    return server->taken == server->expected &&
           (dp__os_ms_until(server->quiet_ns) == 0 || dp__os_ms_until(server->until_ns) == 0);
}

static int dp__server_patience(const dp__server *server)
{
    bool quiet = !server->welcomed && server->taken == server->expected && server->more == NULL;
    int ms = dp__os_ms_until(quiet ? server->quiet_ns : server->until_ns);
    bool looks = server->more != NULL || server->launch->rest != NULL;
    int most = looks && !server->listener->full ? DP__CALL_LOOK_MS : DP__QUIET_MS;
    return ms < most ? ms : most;
}

/* Notes for how long this process was held up, if it was; returns the time. */
static uint64_t dp__server_note_time(dp__server *server)
{
    uint64_t now = dp__os_now_ns();
    if (dp__was_held_up(server->due_ns, now))
        server->held_ns += now - server->due_ns;
    server->due_ns = now;
    return now;
}

/* Looks once at everything that has happened. */
static dp_status dp__server_look(dp__server *server)
{
    dp__listener *listener = server->listener;
    dp__os_watch *watch = server->watch, *peers = watch + 1;
    int ms = dp__server_patience(server), rest_ms = dp__server_rest_ms(server);
    int claim = listener->full || server->tree == NULL ? -1 : server->tree->claim;
    int peer_count = rest_ms == 0 ? dp__server_watch(server, peers) : 0;
    dp__os_watch *more = peers + peer_count, *come = more + server->more_count;
    size_t more_bytes = (size_t)server->more_count * sizeof *more;
    watch[0] = (dp__os_watch){.fd = claim, .events = DP__CAN_READ};
    if (more_bytes > 0)
        memcpy(more, server->more, more_bytes);
    int come_count = dp__listener_watch(listener, come, 1 + server->pending_most);
    server->due_ns += (uint64_t)ms * 1000000;
    dp__os_poll(watch, 1 + peer_count + server->more_count + come_count,
                rest_ms > 0 && rest_ms < ms ? rest_ms : ms);
    dp__server_note_time(server);
    if (more_bytes > 0)
        memcpy(server->more, more, more_bytes);
    dp_status status = dp__server_receive_all(server, peers, peer_count);
    bool room = dp__listener_look(listener, come, come_count);
    DP_TRY(status);
    if (watch[0].revents != 0)
        room = dp__listener_accept(listener, claim) && room;
    dp__server_meet_all(server);
    if (server->twice && server->failed == DP_OK)
        return dp_error(DP_ERR_MISMATCH, "%s", server->said);
    return room ? DP_OK : dp__server_full(server);
}

/* All processes that have come are told the reason; so are those that come within a while. */
static dp_status dp__server_fail(dp__server *server, dp_status status)
{
    char why[DP__TEXT_BYTES];
    memcpy(why, dp_last_error(), sizeof why);
    for (int i = 0; i < server->peer_count; i++)
        dp__tree_header_last(&server->peers[i].fd, status, server->process, why);
    server->failed = status;
    server->until_ns = server->quiet_ns =
        dp__os_after_ms(server->launch->met_before ? 0 : DP__GRACE_MS);
    while ((server->twice || server->taken < server->expected) &&
           dp__os_ms_until(server->until_ns) > 0 && dp__server_look(server) == DP_OK) {
    }
    return dp_error(status, "%s", why);
}

/* Begins to wait until server->until_ns. */
static void dp__server_begin(dp__server *server)
{
    server->opened_ns = dp__os_now_ns();
    if (server->opened_ns > server->until_ns) /* it was held up before this */
        server->opened_ns = server->until_ns;
    if (server->due_ns == 0 || !server->all)
        server->due_ns = server->opened_ns;
    server->extended = false;
}

/* Returns true once the time is up; to be asked before each look. A process that was held up has a
   while more, once, and so has one that is about to be joined: it would be named as one that did
   not come. */
static bool dp__server_is_over(dp__server *server)
{
    if (dp__server_note_time(server) < server->until_ns)
        return false;
    if (!server->extended && dp__listener_is_asked(server->listener, server->kind)) {
        server->extended = true;
        server->until_ns = dp__os_after_ms(DP__AGAIN_MS);
        return false;
    }
    bool last = server->extended || dp__server_held_ms(server) == 0;
    return last || dp__ms_left(&server->until_ns, &server->extended) == 0;
}

/* Adds to why others did not come that this process was held up, if it was. */
DP__COLD static dp_status dp__server_held_up(const dp__server *server, dp_status status)
{
    return dp__add_held_up(status, server->process, dp__server_held_ms(server));
}

/* Wait until all are here, or, once they are, until they have met each other. */
DP__COLD static dp_status dp__server_wait(dp__server *server)
{
    dp_status status = DP_OK;
    dp__server_begin(server);
    while (!dp__server_is_done(server) && status == DP_OK) {
        status = dp__server_is_over(server)
                     ? dp__server_held_up(server, dp__server_timed_out(server))
                     : dp__server_look(server);
        if (status == DP_OK)
            status = dp__launch_rest(server->launch, 0);
    }
    return status == DP_OK || !server->all ? status : dp__server_fail(server, status);
}

/* ==== >>address ================================================================================
   Where a process listens. Process 0 does it where the launcher says, and holds a name inside its
   machine, too, which no other can hold: so there is one at an address, whatever port it found
   free. The name stays its own as long as the context is open.                                  */

static bool dp__is_loopback(const char *host)
{
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0;
}

/* A live process at that place answers at once: *out_other is a connection to it. What a dead one
   has left does not. */
static int dp__listen_at(const dp__os_address *at, int *out_other)
{
    int listener = -1;
    *out_other = -1;
    for (int tries = 0; tries < 2 && listener < 0 && *out_other < 0; tries++) {
        *out_other = dp__os_connect(at);
        if (*out_other < 0) {
            dp__os_forget(at);
            listener = dp__os_listen(at);
        }
    }
    return listener;
}

static dp__os_address dp__claim_of(const dp__launch *launch)
{
    char name[DP__PLACE_BYTES + 8];
    snprintf(name, sizeof name, "%s-0", launch->place);
    return dp__os_local(name);
}

/* " (its process id is 4242)", as far as it is known */
static const char *dp__owner_text(const dp__os_owner *owner, char *text, size_t room)
{
    text[0] = '\0';
    if (owner->process != 0)
        snprintf(text, room, " (its process id is %llu)", (unsigned long long)owner->process);
    return text;
}

/* Somebody else has the name of process 0. */
static dp_status dp__claim_is_taken(const dp__launch *launch, const dp__os_owner *owner)
{
    char who[48];
    dp__owner_text(owner, who, sizeof who);
    if (owner->user != dp__os_user())
        return dp_error(
            DP_ERR_MISMATCH,
            "process 0 of %d cannot listen %s: a process of user %llu%s has its name on this "
            "machine. Use another address or DP_SECRET",
            launch->process_count, launch->where, (unsigned long long)owner->user, who);
    return dp_error(DP_ERR_MISMATCH,
                    "process 0 of %d is not the only one %s: another process 0%s has that address. "
                    "Give each job its own address, or a DP_SECRET",
                    launch->process_count, launch->where, who);
}

static dp_status dp__listen_nowhere(int process)
{
    return dp_error(DP_ERR_NO_MEMORY, "process %d cannot open a port, or any more files", process);
}

/* On all interfaces, as the name of a host may mean another address on the host itself; but if it
   says that all are on this machine, only they can connect, and if it is the address of the one
   that is wanted, only who reaches that one. */
static bool dp__listen_on(dp__listener *listener, const dp__launch *launch, const char *host,
                          int port)
{
    dp__os_found found = {.count = 0};
    if (dp__is_loopback(host) || strcmp(host, launch->own) == 0)
        dp__os_look_up(host, port, false, &found);
    else
        found.count = dp__os_everywhere(port, found.list);
    for (int i = 0; i < found.count && listener->fd < 0; i++) {
        listener->at = found.list[i];
        listener->fd = dp__os_listen(&found.list[i]);
    }
    return listener->fd >= 0;
}

static dp_status dp__listen_here(dp__listener *listener, const dp__launch *launch)
{
    dp__os_owner owner = {0, 0};
    int other;
    listener->at = dp__os_local(launch->place);
    listener->fd = dp__listen_at(&listener->at, &other);
    bool known = dp__os_owner_of(other, &owner);
    dp__os_close(other);
    if (listener->fd >= 0)
        return DP_OK;
    return known ? dp__claim_is_taken(launch, &owner) : dp__listen_nowhere(launch->process);
}

static dp_status dp__listen_first(dp__listener *listener, const dp__launch *launch)
{
    if (launch->host[0] == '\0')
        return dp__listen_here(listener, launch);
    for (int i = 0; i < launch->port_count; i++)
        if (dp__listen_on(listener, launch, launch->host, launch->port + i))
            return DP_OK;
    return dp_error(
        DP_ERR_INVALID,
        "process 0 cannot listen at %s: its ports %d to %d are taken; DP_ADDR=host:port "
        "names others",
        launch->host, launch->port, launch->port + launch->port_count - 1);
}

/* Any port, or one of those that there may be. Process 0 of another job, or of this one, may want
   that where it is met and those after it: they come last, and that one at the very end. */
static dp_status dp__listen_within(dp__listener *listener, const dp__launch *launch)
{
    dp__ports ports = launch->ports;
    const char *host = launch->own[0] != '\0' ? launch->own : launch->host;
    int count = ports.last - ports.first + 1;
    int met = dp__launch_may(launch, launch->port) ? launch->port - ports.first : 0;
    if (ports.last == 0)
        return dp__listen_on(listener, launch, host, 0) ? DP_OK
                                                        : dp__listen_nowhere(launch->process);
    for (int i = 1; i <= count; i++)
        if (dp__listen_on(listener, launch, host, ports.first + (met + count - i) % count))
            return DP_OK;
    return dp_error(DP_ERR_INVALID,
                    "process %d cannot listen: the ports of DP_PORTS, %d to %d, are taken. See "
                    "DP_PORTS in dp.h for how many are needed",
                    launch->process, ports.first, ports.last);
}

/* Listens where those behind this process will find it. */
static dp_status dp__listen_behind(dp__listener *listener, const dp__launch *launch,
                                   uint64_t *out_listens)
{
    char place[DP__PLACE_BYTES + 24];
    int other = -1;
    *out_listens = listener->fd >= 0 ? (uint64_t)dp__os_port(listener->fd) : dp__os_random() | 1;
    if (listener->fd >= 0)
        return DP_OK;
    snprintf(place, sizeof place, "%s-%016llx", launch->place, (unsigned long long)*out_listens);
    if (launch->host[0] != '\0') {
        DP_TRY(dp__listen_within(listener, launch));
        *out_listens = (uint64_t)dp__os_port(listener->fd);
        return DP_OK;
    }
    listener->at = dp__os_local(place);
    listener->fd = dp__listen_at(&listener->at, &other);
    dp__os_close(other);
    return listener->fd >= 0 ? DP_OK : dp__listen_nowhere(launch->process);
}

/* ==== >>connecting =============================================================================
   How a process finds and joins another one: process 0 first, then its parent in the tree.       */

typedef struct dp__target { /* where somebody listens */
    const char *host;       /* "": inside this machine, at `place` */
    int port, port_count;
    char place[DP__PLACE_BYTES];
    const dp__launch *launch; /* it is process 0; else NULL */
    dp__tree *tree;           /* who may fail meanwhile; or NULL */
} dp__target;

/* As it was when a round ended; anything else that was found stays. */
static const char dp__refused[] = "nobody listens there";
static const char dp__silent[] = "a program listens there that does not answer";

static const char *dp__lasting(const char *why)
{
    return why == dp__refused || why == dp__silent ? NULL : why;
}

/* false: the listener is not of this job, or did not answer in time. */
static bool dp__handshake(int fd, dp__key key, dp__join_request *request, uint64_t until_ns,
                          const char **out_why)
{
    dp__challenge challenge;
    request->nonce = dp__os_random();
    if (dp__wire_send(fd, request, sizeof *request, until_ns) != DP_OK ||
        dp__wire_receive(fd, &challenge, sizeof challenge, until_ns) != DP_OK ||
        challenge.magic != DP__CHALLENGE_MAGIC)
        return false;
    if (challenge.proof != dp__proof(key, request, challenge.nonce, false)) {
        *out_why = "the listener belongs to another job, or has another DP_SECRET";
        return false;
    }
    uint64_t proof = dp__proof(key, request, challenge.nonce, true);
    return dp__wire_send(fd, &proof, sizeof proof, until_ns) == DP_OK;
}

/* Take the name of process 0. If another process has it and still waits for others, it is told.
   Another context of this process may have it for the same job. */
static dp_status dp__claim(dp__tree *tree, const dp__launch *launch)
{
    dp__join_request request = {DP__JOIN_MAGIC, DP_VERSION, .process_count = launch->process_count};
    dp__os_owner owner = {0, 0};
    const char *why;
    int other;
    tree->claimed = dp__claim_of(launch);
    tree->claim = dp__listen_at(&tree->claimed, &other);
    bool known = dp__os_owner_of(other, &owner);
    bool foreign = known && owner.process != (uint64_t)dp__os_process_id();
    if (foreign)
        (void)dp__handshake(other, launch->key, &request, dp__os_after_ms(DP__GRACE_MS), &why);
    dp__os_close(other);
    if (foreign)
        return dp__claim_is_taken(launch, &owner);
    return known || tree->claim >= 0 ? DP_OK : dp__listen_nowhere(launch->process);
}

static dp_status dp__connect_nowhere(int process)
{
    return dp_error(DP_ERR_NO_MEMORY,
                    "process %d has no room for a connection: it may open no more files than %llu, "
                    "see ulimit -Hn, or LimitNOFILE of a service",
                    process, (unsigned long long)dp__os_files_limit());
}

/* DP_PENDING: nobody of this job is there, or not now. DP_OK: the connection stays. An error: there
   can be none. */
static dp_status dp__connect_at(const dp__os_address *at, dp__key key, dp__join_request *request,
                                uint64_t until_ns, int *out_fd, const char **out_why)
{
    int fd = dp__os_connect(at);
    for (; fd == DP__OS_CROWDED && dp__os_ms_until(until_ns) > 0; fd = dp__os_connect(at))
        dp__os_sleep_ms(1);
    if (fd == DP__OS_FULL)
        return dp__connect_nowhere((int)request->process);
    if (fd == DP__OS_REFUSED)
        *out_why = dp__refused;
    if (fd < 0)
        return DP_PENDING;
    int how = dp__os_ready(fd, DP__CAN_WRITE, dp__os_ms_until(until_ns)) ? dp__os_connection(fd)
                                                                         : -1;
    bool good = how == 0;
    if (how == DP__OS_REFUSED)
        *out_why = dp__refused;
    if (good && dp__os_is_local(at) && !dp__os_same_user(fd)) {
        *out_why = "its place is held by another user of this machine";
        good = false;
    }
    if (good) {
        *out_why = dp__silent; /* unless it says more */
        good = dp__handshake(fd, key, request, until_ns, out_why);
    }
    *out_fd = good ? fd : -1;
    if (!good)
        dp__os_close(fd);
    return good ? DP_OK : DP_PENDING;
}

/* Returns how long a silent one is waited for: longer every round, as it may be busy. Process 0
   takes the first port that it finds free: behind one where nobody listens a silent one is rather
   another program, and process 0 may come to that one at any moment. */
static int dp__patience_ms(int round, bool behind_a_free_one)
{
    return (behind_a_free_one ? 100 : 1000) << (round < 5 ? round : 5);
}

/* Returns how long to rest after a round that was in vain. */
static int dp__pause_ms(int round)
{
    return round < 7 ? 1 << round : 100;
}

/* Try every address and port once. Whoever is silent there gets only its share of what is left to
   those after it and to the next round, as it may be a program that knows nothing about us. */
static dp_status dp__connect_once(const dp__target *target, dp__key key, dp__join_request *request,
                                  int round, uint64_t until_ns, int *out_fd, const char **out_why)
{
    dp__os_found found;
    int rest = dp__os_ms_until(until_ns);
    dp_status status = DP_PENDING;
    if (target->host[0] == '\0') {
        /* One of the job listens there, or another user of the machine. */
        dp__os_address here = dp__os_local(target->place);
        int patience = dp__patience_ms(round, false);
        uint64_t until = dp__os_after_ms(patience < rest ? patience : rest);
        until = target->tree == NULL ? until_ns : until;
        return dp__connect_at(&here, key, request, until, out_fd, out_why);
    }
    dp__os_resolve(dp__os_look_up, target->host, target->port, rest, &found);
    *out_why = found.count == 0 ? found.why : *out_why;
    int count = target->port_count * found.count, refused = 0;
    for (int i = 0; i < count && status == DP_PENDING && dp__os_ms_until(until_ns) > 0; i++) {
        dp__os_address at =
            dp__os_at_port(&found.list[i % found.count], target->port + i / found.count);
        int share = dp__os_ms_until(until_ns) / (count - i + 1);
        int patience = dp__patience_ms(round, refused >= found.count);
        uint64_t until = dp__os_after_ms(patience < share ? patience : share);
        const char *why = NULL;
        status = dp__connect_at(&at, key, request, until, out_fd, &why);
        refused += why == dp__refused;
        if (dp__lasting(why) != NULL || (why == dp__silent && *out_why == NULL))
            *out_why = why;
    }
    if (*out_why == NULL && refused == count)
        *out_why = dp__refused;
    return status;
}

/* Another job may have this address, whose processes have met already; or process 0 of this one is
   on this machine, and could not be reached. It looks at its claim only as long as it waits. */
DP__COLD static const char *dp__claim_text(const dp__launch *launch, char *text, size_t room)
{
    char who[48];
    dp__os_owner owner = {0, 0};
    dp__os_address claim = dp__claim_of(launch);
    int fd = dp__os_connect(&claim);
    text[0] = '\0';
    if (fd >= 0 && dp__os_owner_of(fd, &owner))
        snprintf(text, room, ". There is a process 0%s %s", dp__owner_text(&owner, who, sizeof who),
                 dp__os_is_attended(fd, DP__GRACE_MS) ? "that waits for others"
                                                      : "whose job has started already");
    dp__os_close(fd);
    return text;
}

DP__COLD static dp_status dp__connect_failed(const dp__target *target, int process,
                                             const dp__join_request *request, double seconds,
                                             const char *why)
{
    char claim[128] = "";
    if (target->launch != NULL)
        dp__claim_text(target->launch, claim, sizeof claim);
    if (target->host[0] == '\0' && (target->launch == NULL || target->launch->agreed))
        return dp_error(DP_ERR_TIMEOUT, "process %d of %d was not found within %.3g s", process,
                        (int)request->process_count, seconds);
    if (target->host[0] == '\0')
        return dp_error(
            DP_ERR_TIMEOUT,
            "process %d of %d was not found %s within %.3g s%s%s%s. It may have another DP_SECRET; "
            "if it is on another machine, set DP_ADDR=host:port",
            process, (int)request->process_count, target->launch->where, seconds,
            why != NULL ? ": " : "", why != NULL ? why : "", claim);
    return dp_error(DP_ERR_TIMEOUT,
                    "process %d of %d did not answer at %s, ports %d to %d, within %.3g s%s%s%s",
                    process, (int)request->process_count, target->host, target->port,
                    target->port + target->port_count - 1, seconds, why != NULL ? ": " : "",
                    why != NULL ? why : "", claim);
}

DP__COLD static dp_status dp__connect_until(const dp__target *target, int process, dp__key key,
                                            dp__join_request *request, uint64_t until_ns,
                                            int *out_fd)
{
    uint64_t begin = dp__os_now_ns();
    const char *why = NULL, *found = NULL;
    bool again = false;
    for (int round = 0; dp__ms_left(&until_ns, &again) > 0; round++) {
        why = dp__lasting(why);
        if (target->tree != NULL)
            DP_TRY(dp__tree_listen(target->tree));
        /* There is a try, even if this process was held up on its way to it. */
        uint64_t least_ns = dp__os_after_ms(DP__TRY_MS);
        uint64_t end_ns = until_ns > least_ns ? until_ns : least_ns;
        request->patience_ms = (uint32_t)dp__os_ms_until(end_ns);
        dp_status status = dp__connect_once(target, key, request, round, end_ns, out_fd, &why);
        if (status != DP_PENDING)
            return status;
        found = why != NULL ? why : found;
        int pause = dp__pause_ms(round), rest = dp__os_ms_until(until_ns);
        DP_TRY(dp__launch_rest(target->launch, pause < rest ? pause : rest));
    }
    return dp__connect_failed(target, process, request, (double)(dp__os_now_ns() - begin) * 1e-9,
                              found);
}

/* ==== >>meeting ================================================================================
   Each process connects to process 0, tells it where it listens, and learns its parent when all are
   there. Then the tree is connected from the top. When all processes are in it, they close the
   connections to process 0 that are not part of it.

   A process may miss a neighbour that still waits for process 0 to say where to go. So it asks
   process 0 whether it is there before it names that neighbour, and a process that has waited for
   process 0 in vain tells it so. Process 0, and whoever waits for its children, says in that case
   whether it was held up itself for much of the time, by a signal, by a debugger, or as its machine
   slept: then others may have given up because of it.                                           */

/* Waits until process 0 has sent something, or the time is up; fails if that is in vain. */
static dp_status dp__await_news(const dp__launch *launch, int fd, uint64_t until_ns)
{
    for (;;) {
        int ms = dp__os_ms_until(until_ns), most = DP__TREE_LOOK_MS;
        if (ms == 0 || dp__os_ready(fd, DP__CAN_READ, ms < most ? ms : most))
            return DP_OK;
        DP_TRY(dp__launch_rest(launch, 0));
    }
}

/* Process 0 says when all are here, or why not. */
static dp_status dp__await_welcome(int fd, int process_count, uint64_t until_ns, dp__welcome *out)
{
    dp__tree_header header;
    dp_status status = dp__wire_receive(fd, &header, sizeof header, until_ns);
    if (status == DP_OK && (!dp__tree_header_is_sound(&header) ||
                            (header.kind != DP__WELCOME && header.kind != DP__FAILED)))
        status = DP_ERR_REMOTE;
    if (status == DP_OK && header.kind == DP__FAILED)
        return dp__failure_receive(fd, &header, until_ns);
    if (status == DP_OK)
        status = dp__wire_receive(fd, out, sizeof *out, until_ns);
    out->host[DP__PLACE_BYTES - 1] = '\0';
    if (status == DP_ERR_TIMEOUT)
        return dp_error(status, "process 0 of %d did not report in time whether all have joined",
                        process_count);
    if (status == DP_ERR_REMOTE)
        return dp_error(status, "process 0 of %d ended before all had joined", process_count);
    return status;
}

/* How much longer than process 0 a process waits that stands where this one does in the tree. */
static int dp__depth_ms(int process)
{
    return (int)dp__bits((unsigned)process) * DP__STEP_MS;
}

/* And longer than any of them. */
static int dp__levels_ms(int process_count)
{
    return (dp__child_count(0, process_count) + 1) * DP__STEP_MS;
}

/* All are here, and learn where to go. Who is deepest has most time for it; if one ends meanwhile,
   that is noticed as before. */
static void dp__welcome_all(dp__server *server)
{
    dp__tree_header header = {DP__HEADER_MAGIC, DP__WELCOME, DP_OK, 0, sizeof(dp__welcome)};
    int left_ms = dp__os_ms_until(server->until_ns);
    left_ms = left_ms > DP__GRACE_MS ? left_ms : DP__GRACE_MS;
    dp__welcome welcome = {.run = dp__os_random(), .patience_ms = (uint32_t)left_ms};
    for (int process = 1; process < server->process_count; process++) {
        int parent = dp__parent(process);
        const dp__peer *peer = &server->peers[process - 1];
        const dp__peer *next = parent == 0 ? peer : &server->peers[parent - 1];
        welcome.listens = next->listens;
        memcpy(welcome.host, next->host, sizeof welcome.host);
        (void)dp__tree_header_send(peer->fd, &header, &welcome, dp__os_after_ms(DP__GRACE_MS));
    }
    server->welcomed = true;
    server->tree->ends_ns = dp__os_after_ms(left_ms);
    server->until_ns = dp__os_after_ms((int64_t)left_ms + dp__levels_ms(server->process_count));
}

/* All have met: only those right behind process 0 stay connected to it. */
static void dp__go_all(dp__tree *tree, dp__server *server)
{
    dp__tree_header header = {DP__HEADER_MAGIC, DP__GO, DP_OK, 0, 0};
    for (int process = 1; process < tree->process_count; process++) {
        dp__peer *peer = &server->peers[process - 1];
        (void)dp__tree_header_send(peer->fd, &header, NULL, dp__os_after_ms(DP__GRACE_MS));
        if (dp__parent(process) != 0)
            continue;
        dp__tree_link(tree, peer->fd, process);
        peer->fd = -1;
    }
}

/* As process 0. */
DP__COLD static dp_status dp__meet_first(dp__tree *tree, const dp__launch *launch,
                                         dp__server *server, dp__listener *listener)
{
    server->all = true;
    DP_TRY(dp__server_open(server, listener, launch->key));
    if (launch->listener == NULL) {
        DP_TRY(dp__claim(tree, launch));
        DP_TRY(dp__listen_first(listener, launch));
    }
    DP_TRY(dp__server_wait(server));
    dp__welcome_all(server);
    DP_TRY(dp__server_wait(server));
    dp__go_all(tree, server);
    return DP_OK;
}

/* Returns until when there is time for the rest. What process 0 says may have been on its way for a
   while: `latest_ns` is when it was waited for at most. */
static uint64_t dp__meet_ends_ns(const dp__welcome *welcome, uint64_t latest_ns)
{
    uint64_t ends_ns = dp__os_after_ms(welcome->patience_ms);
    return ends_ns < latest_ns ? ends_ns : latest_ns;
}

/* Fails as a neighbour did not come, or because of process 0, if that does not answer now. */
DP__COLD static dp_status dp__meet_missed(dp__tree *tree, dp_status status, int culprit)
{
    char why[DP__TEXT_BYTES];
    int held_ms = 0;
    memcpy(why, dp_last_error(), sizeof why);
    if (status == DP_ERR_TIMEOUT)
        DP_TRY(dp__tree_probe(tree, &held_ms));
    (void)dp_error(status, "%s", why);
    return dp__tree_fail(tree, NULL, dp__add_held_up(status, 0, held_ms), culprit);
}

/* Connect to the parent, unless that is process 0, with which there is a connection already. */
static dp_status dp__meet_parent(dp__tree *tree, const dp__launch *launch, const dp__welcome *to,
                                 const dp__server *server, dp__key key, dp__join_request *request)
{
    int fd = -1, parent = dp__parent(tree->process);
    if (parent == 0)
        return DP_OK;
    dp__target target = {.host = to->host[0] != '\0' ? to->host : launch->host,
                         .port = (int)(to->listens & DP__PORT_MAX),
                         .port_count = 1,
                         .tree = tree};
    snprintf(target.place, sizeof target.place, "%.40s-%016llx", launch->place,
             (unsigned long long)to->listens);
    dp_status status = dp__connect_until(&target, parent, key, request, server->until_ns, &fd);
    if (status != DP_OK)
        return dp__meet_missed(tree, status, parent);
    dp__tree_link(tree, fd, parent);
    return DP_OK;
}

/* Say that this process has all its neighbours, and wait until all have theirs. Then it needs
   process 0 no more, unless that is its parent. */
static dp_status dp__meet_last(dp__tree *tree, const dp__server *server)
{
    dp__link *first;
    dp__tree_say(tree, &tree->links[0], DP__READY, DP_OK);
    tree->until_ns = server->until_ns; /* process 0 answers as long as others have more time */
    DP_TRY(dp__tree_await(tree, 1, &first));
    if (first->header.kind != DP__GO)
        return dp__tree_lost(tree, first, DP_ERR_REMOTE,
                             "sent bytes that no process of a job sends");
    first->got = 0;
    if (dp__parent(tree->process) != 0) {
        dp__os_close(first->fd);
        memmove(first, first + 1, (size_t)--tree->link_count * sizeof *first);
    }
    tree->first_child = 1;
    return DP_OK;
}

/* As any other. */
DP__COLD static dp_status dp__meet_others(dp__tree *tree, const dp__launch *launch,
                                          dp__server *server, dp__listener *listener)
{
    dp__join_request request = {.magic = DP__JOIN_MAGIC,
                                .version = DP_VERSION,
                                .process = tree->process,
                                .process_count = tree->process_count};
    dp__target first = {.host = launch->host,
                        .port = launch->port,
                        .port_count = launch->port_count,
                        .launch = launch};
    dp__welcome welcome = {0};
    int fd = -1;
    DP_TRY(dp__server_open(server, listener, launch->key));
    memcpy(request.host, launch->own, sizeof request.host);
    if (server->expected > 0)
        DP_TRY(dp__listen_behind(listener, launch, &request.listens));
    memcpy(first.place, launch->place, sizeof first.place);
    DP_TRY(dp__connect_until(&first, 0, launch->key, &request, server->until_ns, &fd));
    dp__tree_link(tree, fd, 0);
    uint64_t latest_ns = server->until_ns + DP__GRACE_MS * (uint64_t)1000000;
    dp_status status = dp__await_news(launch, fd, latest_ns);
    if (status != DP_OK)
        return dp__tree_fail(tree, NULL, status, -1);
    status = dp__await_welcome(fd, tree->process_count, latest_ns, &welcome);
    if (status == DP_ERR_TIMEOUT) /* process 0 may go on, and miss this one */
        return dp__tree_fail(tree, NULL, status, 0);
    DP_TRY(status);
    const dp__key key = dp__key_of_run(launch->key, welcome.run);
    DP_TRY(dp__server_serve(server, key));
    tree->ends_ns = dp__meet_ends_ns(&welcome, latest_ns);
    server->until_ns = tree->ends_ns + (uint64_t)dp__depth_ms(tree->process) * 1000000;
    DP_TRY(dp__meet_parent(tree, launch, &welcome, server, key, &request));
    /* A child that finds nobody knows who is missing: its error comes before this one's. */
    server->until_ns += DP__STEP_MS * (uint64_t)1500000;
    status = dp__server_wait(server);
    return status == DP_OK ? dp__meet_last(tree, server)
                           : dp__meet_missed(tree, status, tree->process);
}

DP__COLD static dp_status dp__tree_open(const dp__launch *launch, int timeout_ms, dp__tree **out)
{
    dp__tree *tree = dp__os_alloc(sizeof *tree, 64, NULL);
    dp__listener own = dp__listener_none(),
                 *listener = launch->listener != NULL ? launch->listener : &own;
    dp__server server = {.launch = launch,
                         .process = launch->process,
                         .process_count = launch->process_count,
                         .until_ns = dp__os_after_ms(timeout_ms),
                         .due_ns = dp__os_now_ns()};
    if (tree == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", launch->process_count);
    server.tree = tree;
    *tree = (dp__tree){.process = launch->process,
                       .process_count = launch->process_count,
                       .timeout_ms = timeout_ms,
                       .rest = launch->rest,
                       .user = launch->user,
                       .claim = -1,
                       .lock = DP__LOCK_INITIALIZER};
    dp_status status = launch->process == 0 ? dp__meet_first(tree, launch, &server, listener)
                                            : dp__meet_others(tree, launch, &server, listener);
    dp__server_close(&server);
    dp__listener_close(&own);
    if (status != DP_OK) {
        dp__tree_close(tree, true);
        return status;
    }
    tree->spare_ns = (uint64_t)dp__os_ms_until(tree->ends_ns) * 1000000;
    *out = tree;
    return DP_OK;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
