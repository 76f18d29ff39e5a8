/* dp/tcp.h - v0.1.0 - connections between all processes, and collectives over them - MIT licence

   Part of dp.h, which includes it. CPU devices on several machines need nothing but a network:
   every process is connected to every other one, and collectives (dp/mesh.h) travel there, as
   messages do (dp/messages.h).

   The limit: each byte crosses the link of a machine once in each direction (dp/mesh.h). Over
   1 Gbit/s two hosts (network namespaces) add up 25 MiB in 219 ms, with one process on each and
   with two; the link needs 210. Without that limit two processes take 10 ms, and 4 bytes take 6 us
   inside a machine and 37 us between the two hosts, where a thread has to be woken.

   CONTENTS (search for the tag)
     >>cables  from a job to connections
     >>flow   what is under way on them
     >>table  the table
*/

#ifndef DP__ROOMS
#error "dp/tcp.h is a part of dp.h: include dp.h"
#else

/* ==== >>cables ==================================================================================
   Each process opens a port, and all tell each other where it is, and with which key they know each
   other. Then each connects to those before it, and waits for those behind it: process 0 only
   waits, so that none waits in a circle. What may be lacking is there before anybody waits for
   anybody. Who fails while they connect ends its connections, so that others do not wait for it.
   Where two sets are needed they come at one port, one after the other; then it is closed.       */

enum { DP__CABLE_SPIN_NS = 20000, DP__CABLE_LOOK_MS = 4, DP__CABLE_SETS = 3 /* of a job */ };

typedef struct dp__cables {
    dp__job *job;
    dp__seat *seats; /* where the processes listen */
    int *fds[2];     /* of each set, by process; -1: its own */
    int sets;
    bool raised; /* the limit of open files */
    dp__launch launch;
    dp__server server;
} dp__cables;

static void dp__cables_hang_up(dp__cables *cables)
{
    int *fds = cables->fds[0];
    for (int i = 0; fds != NULL && i < cables->sets * cables->job->process_count; i++) {
        dp__os_close(fds[i]);
        fds[i] = -1;
    }
    dp__server_close(&cables->server);
    cables->server = (dp__server){.listener = -1};
}

static void dp__cables_close(dp__cables *cables)
{
    dp__cables_hang_up(cables);
    if (cables->raised)
        dp__os_files_lower();
    dp__os_free(cables->seats, 0, NULL);
    dp__os_free(cables->fds[0], 0, NULL);
}

/* NULL: they have met by a bootstrap of the user's. */
static dp__tree *dp__cables_tree(const dp__job *job)
{
    return job->boot->all_gather == dp__tree_all_gather ? job->boot->user : NULL;
}

static dp_status dp__cables_make(dp__cables *cables)
{
    size_t count = (size_t)cables->job->process_count, all = count * (size_t)cables->sets;
    cables->seats = dp__os_alloc(count * sizeof *cables->seats, _Alignof(dp__seat), NULL);
    cables->fds[0] = dp__os_alloc(all * sizeof *cables->fds[0], sizeof(int), NULL);
    for (size_t i = 0; i < all && cables->fds[0] != NULL; i++)
        cables->fds[0][i] = -1;
    if (cables->seats == NULL || cables->fds[0] == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu connections", all);
    memset(cables->seats, 0, count * sizeof *cables->seats);
    cables->fds[1] = cables->fds[0] + (all - count);
    cables->raised = DP__CABLE_SETS * count > dp__os_files_limit() / 2;
    if (cables->raised)
        dp__os_files_raise(DP__CABLE_SETS * count);
    return DP_OK;
}

/* What depends on this process alone. `far`: there are several machines. */
static dp_status dp__cables_prepare(dp__cables *cables, dp__job *job, int sets, bool far)
{
    *cables = (dp__cables){.job = job, .sets = sets};
    cables->launch = (dp__launch){.name = "cables", .numbered = true, .again = true};
    cables->server = (dp__server){.launch = &cables->launch,
                                  .process = job->process,
                                  .process_count = job->process_count,
                                  .all = true,
                                  .listener = -1,
                                  .job = dp__cables_tree(job)};
    DP_TRY(dp__cables_make(cables));
    DP_TRY(dp__seat_make(&cables->seats[job->process], &cables->launch, dp__cables_tree(job), far,
                         &cables->server));
    return job->process + 1 < job->process_count ? dp__server_open(&cables->server) : DP_OK;
}

/* To those before this process. */
static dp_status dp__cables_call(dp__cables *cables, int *fds, uint64_t until_ns)
{
    const dp__job *job = cables->job;
    dp__join_request request = {.magic = DP__JOIN_MAGIC,
                                .version = DP_VERSION,
                                .process = job->process,
                                .process_count = job->process_count};
    for (int p = 0; p < job->process; p++) {
        const dp__target target = {
            .host = dp__seat_host(cables->seats, job->process_count, job->process, p),
            .port = (int)cables->seats[p].port,
            .port_count = 1,
            .tree = dp__cables_tree(job),
            .listens = true};
        DP_TRY(dp__connect_until(&target, p, cables->launch.key, &request, until_ns, &fds[p]));
    }
    return DP_OK;
}

/* From those behind it. */
static dp_status dp__cables_answer(dp__cables *cables, int *fds, uint64_t until_ns)
{
    dp__server *server = &cables->server;
    if (server->process + 1 == server->process_count)
        return DP_OK;
    server->key = cables->launch.key;
    server->until_ns = until_ns;
    DP_TRY(dp__server_wait(server));
    for (int i = 0; i < server->peer_count; i++) {
        fds[server->process + 1 + i] = server->peers[i].fd;
        server->peers[i] = (dp__peer){.fd = -1};
    }
    server->taken = 0;
    return DP_OK;
}

/* Where they are. All know the same, and say so before one waits for another. */
static dp_status dp__cables_learn(dp__cables *cables)
{
    dp__job *job = cables->job;
    const dp__seat own = cables->seats[job->process];
    DP_TRY(job->gather(job->boot, &own, cables->seats, sizeof own));
    cables->launch.key = cables->seats[0].key;
    return dp__job_agree(job, dp__seats_check(cables->seats, job->process_count, job->process));
}

/* This process gives up: the others hear why. What another one has ended it may say itself. */
static dp_status dp__cables_fail(dp__cables *cables, dp_status status)
{
    dp__tree *tree = dp__cables_tree(cables->job);
    uint64_t until_ns = dp__os_after_ms(status == DP_ERR_REMOTE ? DP__GRACE_MS : 0);
    char why[DP__TEXT_BYTES];
    int culprit;
    memcpy(why, dp_last_error(), sizeof why);
    while (tree != NULL && dp__os_ms_until(until_ns) > 0) {
        DP_TRY(dp__tree_listen(tree, &culprit));
        dp__os_sleep_ms(1);
    }
    if (tree != NULL)
        dp__tree_tell(tree, status, cables->job->process, why);
    return dp_error(status, "%s", why);
}

static dp_status dp__cables_connect(dp__cables *cables)
{
    DP_TRY(dp__cables_learn(cables));
    for (int set = 0; set < cables->sets; set++) {
        uint64_t until_ns = dp__os_after_ms(cables->job->timeout_ms);
        dp_status status = dp__cables_call(cables, cables->fds[set], until_ns);
        if (status == DP_OK)
            status = dp__cables_answer(cables, cables->fds[set], until_ns);
        if (status != DP_OK) {
            status = dp__cables_fail(cables, status);
            dp__cables_hang_up(cables);
        }
        DP_TRY(dp__job_agree(cables->job, status));
    }
    dp__server_close(&cables->server);
    cables->server = (dp__server){.listener = -1};
    return DP_OK;
}

/* How long to sleep until something comes: for a short while not at all. */
static int dp__cable_rest_ms(uint64_t begun_ns)
{
    return dp__os_now_ns() - begun_ns < DP__CABLE_SPIN_NS ? 0 : DP__CABLE_LOOK_MS;
}

/* ==== >>flow ===================================================================================
   What was begun is a load, which has a part for each cable and one from each. A cable carries the
   parts of one load after those of another, either way, and nothing else: as all processes begin
   the same loads in the same order, there are no heads. The system takes what is sent as long as it
   has room, and wakes a process that waits when something has come.                             */

enum {
    DP__TCP_LOADS = 8 /* a power of two: more than there are slots */
};
_Static_assert(DP__TCP_LOADS > DP__MESH_SLOTS + 1, "a slot has ended before it is begun again");

typedef struct dp__tcp_load {
    const dp__mesh_slot *slot;
    const char *out;
    char *in;
    int left; /* parts that have not gone, or not come */
} dp__tcp_load;

typedef struct
    dp__tcp_way { /* of a cable: which load it carries, and how much of its part it has */
    uint64_t load;
    size_t moved;
} dp__tcp_way;

typedef struct dp__tcp {
    dp__cables cables; /* the second set, of the caller's lane alone, is for messages */
    dp__tcp_way *out, *in;
    dp__os_watch *watch;
    int *watched; /* of which processes */
    dp__tcp_load loads[DP__TCP_LOADS];
    uint64_t begun, ended;                /* loads */
    uint64_t in_slot[DP__MESH_SLOTS + 1]; /* what was begun there last */
} dp__tcp;

/* Others may know why, see dp__ring_reason. */
static dp_status dp__tcp_lost(const dp__mesh_comm *comm, int process)
{
    char doing[DP__DOING_BYTES], who[DP__WHO_BYTES];
    const dp__ring *ring = comm->ring;
    (void)dp_error(DP_ERR_REMOTE, "%s: the connection to %s has ended",
                   dp__doing(ring, (unsigned)ring->now.seq, doing),
                   dp__who(ring->job, process, who));
    dp__thread.culprit = ring->job->firsts[process] + 1;
    return DP_ERR_REMOTE;
}

/* As much as goes now, of all loads in turn. */
static dp_status dp__tcp_move(const dp__mesh_comm *comm, int process, bool sends)
{
    dp__tcp *tcp = comm->carrier;
    dp__tcp_way *way = sends ? &tcp->out[process] : &tcp->in[process];
    int fd = tcp->cables.fds[0][process];
    while (way->load < tcp->begun) {
        dp__tcp_load *load = &tcp->loads[way->load % DP__TCP_LOADS];
        const dp__mesh_counts *counts = sends ? &load->slot->to : &load->slot->from;
        size_t place = (size_t)counts->places[process] + way->moved;
        size_t bytes = (size_t)counts->counts[process] - way->moved;
        ptrdiff_t moved = bytes == 0 ? 0
                          : sends    ? dp__os_send(fd, load->out + place, bytes)
                                     : dp__os_receive(fd, load->in + place, bytes);
        if (moved < 0)
            return dp__tcp_lost(comm, process);
        way->moved += (size_t)moved;
        if ((size_t)moved < bytes && (moved == 0 || sends))
            return DP_OK;
        if ((size_t)moved < bytes)
            continue;
        *way = (dp__tcp_way){.load = way->load + 1};
        load->left--;
    }
    return DP_OK;
}

/* Wait at most so long until something can move, and move it. */
static dp_status dp__tcp_look(const dp__mesh_comm *comm, int timeout_ms)
{
    dp__tcp *tcp = comm->carrier;
    int count = 0, processes = comm->process_count;
    for (int p = 0; p < processes; p++) {
        int events = (tcp->out[p].load < tcp->begun ? POLLOUT : 0) |
                     (tcp->in[p].load < tcp->begun ? POLLIN : 0);
        if (events == 0 || p == comm->process)
            continue;
        tcp->watch[count] = (dp__os_watch){.fd = tcp->cables.fds[0][p], .events = (short)events};
        tcp->watched[count++] = p;
    }
    count = count > 0 && dp__os_poll(tcp->watch, count, timeout_ms) > 0 ? count : 0;
    for (int i = 0; i < count; i++) {
        int events = tcp->watch[i].revents;
        bool ends = (events & ~(POLLIN | POLLOUT)) != 0;
        if ((events & POLLOUT) != 0 || (ends && (tcp->watch[i].events & POLLOUT) != 0))
            DP_TRY(dp__tcp_move(comm, tcp->watched[i], true));
        if ((events & POLLIN) != 0 || (ends && (tcp->watch[i].events & POLLIN) != 0))
            DP_TRY(dp__tcp_move(comm, tcp->watched[i], false));
    }
    return DP_OK;
}

/* What was begun last in a slot is all gone, and all there. */
static bool dp__tcp_has_ended(dp__tcp *tcp, const dp__mesh_slot *slot)
{
    while (tcp->ended < tcp->begun && tcp->loads[tcp->ended % DP__TCP_LOADS].left == 0)
        tcp->ended++;
    return tcp->in_slot[slot->place] < tcp->ended;
}

static dp_status dp__tcp_begin(dp__mesh_comm *comm, dp__mesh_slot *slot, bool same, const char *out,
                               char *in)
{
    dp__tcp *tcp = comm->carrier;
    int self = comm->process;
    size_t own = (size_t)slot->to.counts[self];
    char *place = in + slot->from.places[self];
    (void)same;
    if (own > 0 && out + slot->to.places[self] != place)
        memcpy(place, out + slot->to.places[self], own);
    tcp->loads[tcp->begun % DP__TCP_LOADS] =
        (dp__tcp_load){.slot = slot, .out = out, .in = in, .left = 2 * (comm->process_count - 1)};
    tcp->in_slot[slot->place] = tcp->begun++;
    for (int p = 0; p < comm->process_count; p++) {
        bool expects = slot->from.counts[p] > 0; /* else nothing will come that says so */
        if (p != self && tcp->out[p].load + 1 == tcp->begun)
            DP_TRY(dp__tcp_move(comm, p, true));
        if (p != self && tcp->in[p].load + 1 == tcp->begun && !expects)
            DP_TRY(dp__tcp_move(comm, p, false));
    }
    return DP_OK;
}

static dp_status dp__tcp_await(dp__mesh_comm *comm, dp__mesh_slot *slot)
{
    dp__tcp *tcp = comm->carrier;
    dp__wait wait = {0};
    uint64_t begun_ns = dp__os_now_ns();
    for (;;) { /* what comes later goes on meanwhile */
        bool ended = dp__tcp_has_ended(tcp, slot);
        DP_TRY(dp__tcp_look(comm, ended ? 0 : dp__cable_rest_ms(begun_ns)));
        if (dp__tcp_has_ended(tcp, slot))
            return DP_OK;
        DP_TRY(dp__ring_rest(comm->ring, &wait));
    }
}

/* ==== >>table ==================================================================================
   For all processes whose devices' memory the host reaches: after shared memory, and after MPI.  */

static bool dp__tcp_fits(const dp_comm_config *config)
{
    return config->bootstrap != NULL && config->host_memory;
}

static dp_status dp__tcp_prepare(dp__mesh_comm *comm, const dp_comm_config *config)
{
    size_t count = (size_t)comm->process_count;
    dp__tcp *tcp = dp__os_alloc(sizeof *tcp, 64, NULL);
    if (tcp == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a communicator");
    memset(tcp, 0, sizeof *tcp);
    comm->carrier = tcp;
    DP_TRY(dp__cables_prepare(&tcp->cables, comm->ring->job,
                              comm->ring->place == DP__CALLER ? 2 : 1, !config->one_machine));
    tcp->out = dp__os_alloc(2 * count * sizeof *tcp->out, _Alignof(dp__tcp_way), NULL);
    tcp->watch = dp__os_alloc(count * sizeof *tcp->watch, _Alignof(dp__os_watch), NULL);
    tcp->watched = dp__os_alloc(count * sizeof *tcp->watched, sizeof(int), NULL);
    if (tcp->out == NULL || tcp->watch == NULL || tcp->watched == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a communicator");
    memset(tcp->out, 0, 2 * count * sizeof *tcp->out);
    tcp->in = tcp->out + count;
    return DP_OK;
}

static dp_status dp__tcp_connect(dp__mesh_comm *comm)
{
    dp__tcp *tcp = comm->carrier;
    return dp__cables_connect(&tcp->cables);
}

static bool dp__tcp_close(dp__mesh_comm *comm)
{
    dp__tcp *tcp = comm->carrier;
    if (tcp == NULL)
        return true;
    dp__cables_close(&tcp->cables);
    dp__os_free(tcp->out, 0, NULL);
    dp__os_free(tcp->watch, 0, NULL);
    dp__os_free(tcp->watched, 0, NULL);
    dp__os_free(tcp, 0, NULL);
    return true;
}

static const dp__mesh_ops dp__tcp_ops = {.prepare = dp__tcp_prepare,
                                         .connect = dp__tcp_connect,
                                         .begin = dp__tcp_begin,
                                         .await = dp__tcp_await,
                                         .close = dp__tcp_close};

static dp_status dp__tcp_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    return dp__mesh_open(host, config, dp_tcp_coll(), &dp__tcp_ops, out);
}

/* What messages travel on, by process; NULL: another table has the collectives. */
static const int *dp__tcp_messages(const dp_ctx *ctx)
{
    dp_comm *comm = ctx->lanes[DP__CALLER].carrier;
    bool mesh = comm != NULL && comm->ops->run == dp__mesh_run_call;
    if (!mesh || dp__mesh_of(comm)->ops != &dp__tcp_ops)
        return NULL;
    const dp__tcp *tcp = dp__mesh_of(comm)->carrier;
    return tcp->cables.fds[1];
}

DP_API const dp_coll_ops *dp_tcp_coll(void)
{
    static const dp_coll_ops ops = {.size = sizeof(dp_coll_ops),
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
