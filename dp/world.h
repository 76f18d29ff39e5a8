/* dp/world.h - v0.2.0 - what a context knows of its other processes - MIT licence

   Part of dp.h, which includes it. The same questions have one answer, whether processes have met
   by the tree, through MPI or by a bootstrap of the user's.

   CONTENTS (search for the tag)
     >>world what a context knows of its other processes
     >>seats where each process listens, beside the tree
*/

#ifndef DP__ROOMS
#error "dp/world.h is a part of dp.h: include dp.h"
#else

/* ==== >>world ==================================================================================
   The processes of a context, whether they met through the tree, through MPI or through the user's
   bootstrap. They learn of each other's failures, and know which of them share a machine.      */

typedef struct dp__mpi_links dp__mpi_links;

typedef struct dp__mpi_backend { /* what dp_mpi.h has for processes that meet through MPI */
    /* Tells whether MPI has brought processes together, and the config wants it; then there are
       links to the others, as config->bootstrap, unless there are none. */
    dp_status (*join)(dp_config *config, int timeout_ms, dp__launch *launch, bool *out_meant,
                      dp__mpi_links **out);
    void (*leave)(dp__mpi_links *links, bool job_failed);
    dp_status (*all_gather)(const void *in, void *out, size_t bytes_each, void *user);
    const dp_coll_ops *(*coll)(void);
    dp_status (*hear)(dp__mpi_links *links, dp__job *job, int *out_process);
    void (*tell)(dp__mpi_links *links, dp_status status, int process, const char *text);
    void (*send)(dp__mpi_links *links, const dp__progress_message *progress);
    /* A bootstrap for the processes of links that give the same number, until that is dropped; -1
       has none. */
    dp_status (*split)(dp__mpi_links *links, int group, dp_bootstrap *out);
    void (*drop)(dp_bootstrap *boot);
    const struct dp__carrier *carrier;
} dp__mpi_backend;

static const dp__mpi_backend *dp__backend_mpi; /* dp_mpi.h defines it */

/* `own` is false in a child of fork: MPI belongs to the parent. */
static void dp__mpi_links_close(dp__mpi_links *links, bool own, bool job_failed)
{
    if (dp__backend_mpi != NULL && links != NULL && own)
        dp__backend_mpi->leave(links, job_failed);
}

/* Looks, without waiting, whether a failure has come over the tree or by MPI, and returns it.
   *out_process: the process that has caused it; -1: that is not known. */
static dp_status dp__far_hear(dp_ctx *ctx, int *out_process)
{
    dp_status status = DP_OK;
    *out_process = -1;
    dp__lock_enter(&ctx->world_lock);
    if (ctx->world.tree != NULL)
        status = dp__tree_listen(ctx->world.tree);
    if (status != DP_OK)
        *out_process = ctx->world.tree->culprit;
    if (dp__backend_mpi != NULL && ctx->world.mpi_links != NULL)
        status = dp__backend_mpi->hear(ctx->world.mpi_links, ctx->world.job, out_process);
    dp__lock_leave(&ctx->world_lock);
    return status;
}

/* A failure of this process, which all others hear if it is the first. dp_last_error stays. */
static void dp__far_tell(dp_ctx *ctx, dp_status status, int process, const char *text)
{
    dp__lock_enter(&ctx->world_lock);
    if (ctx->world.tree != NULL)
        dp__tree_tell(ctx->world.tree, status, process, text);
    if (dp__backend_mpi != NULL && ctx->world.mpi_links != NULL)
        dp__backend_mpi->tell(ctx->world.mpi_links, status, process, text);
    dp__lock_leave(&ctx->world_lock);
}

/* Sends what this process has begun to all others; false: there is no way to them. Another thread
   that has the links sends the same. */
static bool dp__far_send(dp_ctx *ctx, const dp__progress_message *progress)
{
    dp__lock_enter(&ctx->world_lock);
    if (ctx->world.tree != NULL && dp__tree_enter(ctx->world.tree, false)) {
        dp__tree_report(ctx->world.tree, progress, false);
        dp__tree_leave(ctx->world.tree);
    }
    if (dp__backend_mpi != NULL && ctx->world.mpi_links != NULL)
        dp__backend_mpi->send(ctx->world.mpi_links, progress);
    bool some = ctx->world.tree != NULL || ctx->world.mpi_links != NULL;
    dp__lock_leave(&ctx->world_lock);
    return some;
}

/* Finds the address by which other machines find this process: the user's, or that from which a
   connection to one comes; where a bootstrap of the user's has made none, the usual one. "":
   nothing is known. */
static dp_status dp__far_host(const dp__tree *tree, char *text, size_t room)
{
    dp__launch own = {.name = "far"};
    DP_TRY(dp__launch_interface(&own));
    snprintf(text, room, "%s", own.own);
    for (int i = 0; tree != NULL && i < tree->link_count && text[0] == '\0'; i++)
        dp__os_host_of(tree->links[i].fd, true, text, room);
    if (tree == NULL && text[0] == '\0')
        dp__os_host_usual(text, room);
    return DP_OK;
}

/* Returns the process to which another one passes on what is for a third; by MPI it is that one. */
static int dp__far_next(const dp_ctx *ctx, int from, int to)
{
    return ctx->world.tree != NULL ? dp__towards(from, to, ctx->world.tree->process_count) : to;
}

static void dp__far_begin(dp_ctx *ctx, dp__tree *tree, dp__mpi_links *links)
{
    dp__lock_enter(&ctx->world_lock);
    if (tree != NULL) {
        tree->job = ctx->world.job;
        tree->rest = NULL;
    }
    ctx->world.tree = tree;
    ctx->world.mpi_links = links;
    dp__lock_leave(&ctx->world_lock);
}

/* Meet the processes of a launch. */
static dp_status dp__join_tree(dp_config *config, const dp__launch *launch, int timeout_ms,
                               dp__tree **out)
{
    dp_status status = dp__tree_open(launch, timeout_ms, out);
    if (status != DP_OK)
        dp_error(status, "dp_open: %s", dp__open_error());
    config->bootstrap =
        (dp_bootstrap){dp__tree_all_gather, *out, launch->process, launch->process_count};
    return status;
}

/* Join the world that the environment names, unless the config has another, or wants none. */
static dp_status dp__join(dp_config *config, dp__launch *launch, dp__tree **out,
                          dp__mpi_links **out_line)
{
    int timeout_ms;
    bool own = config->bootstrap.all_gather != NULL, by_mpi = false;
    *out = NULL;
    *out_line = NULL;
    *launch = (dp__launch){.name = own ? "bootstrap" : "none", .process_count = 1};
    DP_TRY(dp__join_timeout(config, &timeout_ms));
    if (config->local_only)
        return DP_OK;
    if (dp__backend_mpi != NULL)
        DP_TRY(dp__backend_mpi->join(config, timeout_ms, launch, &by_mpi, out_line));
    if (own || by_mpi)
        return DP_OK;
    DP_TRY(dp__launch_read(config->job, launch));
    if (launch->process >= launch->process_count)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "dp_open: this process has come later (DP_REJOIN), and the others meet it "
                        "in its first context only: set local_only");
    return launch->process_count > 1 ? dp__join_tree(config, launch, timeout_ms, out) : DP_OK;
}

static bool dp__boot_is_mpi(const dp_bootstrap *boot)
{
    return dp__backend_mpi != NULL && boot->all_gather == dp__backend_mpi->all_gather;
}

/* The library has brought the processes together, and not a bootstrap of the user's. */
static bool dp__boot_is_ours(const dp_bootstrap *boot)
{
    return boot->all_gather == dp__tree_all_gather || dp__boot_is_mpi(boot);
}

/* One round of the bootstrap. A failure in it is a failure of the job, even in a user's. */
static dp_status dp__boot_gather(const dp_bootstrap *boot, const void *own, void *all, size_t bytes)
{
    char first = dp__sentence_hide();
    dp_status status = dp__sentence_after(first, boot->all_gather(own, all, bytes, boot->user));
    if (status == DP_OK)
        return DP_OK;
    if (dp__boot_is_ours(boot))
        return dp_error(status, "dp_open: %s", dp__open_error());
    return dp_error(DP_ERR_REMOTE, "dp_open: bootstrap.all_gather failed: %s", dp__open_error());
}

typedef struct dp__location {
    uint64_t machine, cores;
} dp__location;

/* Returns true if a process is the first of its machine; most are beside another one of it. */
static bool dp__is_first_there(const dp__location *all, int process)
{
    int before = process - 1;
    while (before >= 0 && all[before].machine != all[process].machine)
        before--;
    return before < 0;
}

/* The machine of this process among those of all, in the order of their first processes. */
static dp__share dp__count_machines(const dp__location *all, const dp_bootstrap *boot)
{
    dp__share out = {0, 0};
    for (int i = 0; i < boot->process_count; i++) {
        bool first = dp__is_first_there(all, i);
        if (first && all[i].machine == all[boot->process].machine)
            out.place = out.count;
        out.count += first;
    }
    return out;
}

/* Which processes are on this machine, and which of them may run on the same cores: a launcher that
   has bound its processes to different ones has divided them already. What the launcher says about
   places counts, as it may know things about a machine that containers hide. */
DP__COLD static dp_status dp__find_neighbours(const dp_bootstrap *boot, const dp__launch *launch,
                                              dp__neighbours *out)
{
    dp__location own = {dp__os_machine(), dp__os_affinity()};
    size_t count = (size_t)boot->process_count;
    dp__location *all = dp__os_alloc(count * sizeof own, _Alignof(dp__location), NULL);
    if (all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %zu processes", count);
    dp_status status = dp__boot_gather(boot, &own, all, sizeof own);
    *out = (dp__neighbours){{0, 0}, {0, 0}, {0, 0}};
    for (int i = 0; i < boot->process_count && status == DP_OK; i++) {
        bool near = all[i].machine == own.machine, same = near && all[i].cores == own.cores;
        out->machine.place += near && i < boot->process;
        out->machine.count += near;
        out->cores.place += same && i < boot->process;
        out->cores.count += same;
    }
    if (status == DP_OK)
        out->machines = dp__count_machines(all, boot);
    dp__os_free(all, 0, NULL);
    if (launch->local_count > 0)
        out->machine = (dp__share){launch->local, launch->local_count};
    return status;
}

/* ==== >>seats ==================================================================================
   Where each process listens, beside the tree, and how the others find it.                      */

typedef struct dp__seat { /* and the process that has it, for as long as that lives */
    uint64_t holder;      /* a random number of that process; 0: the seat is empty */
    uint64_t came;        /* the number of the roster with which it came: see dp/members.h */
    uint64_t memory;      /* with a word, that it shares with its machine; 0: none */
    uint64_t machine;
    uint32_t port, limit; /* limit: how many seats it wants there to be */
    dp__key key;
    char host[DP__PLACE_BYTES]; /* its address for other machines; "": not known */
    uint32_t there_only;        /* it listens at that address, and at no other */
    uint32_t connections;       /* that it wants to each process; 0: it does not say */
} dp__seat;
_Static_assert(sizeof(dp__seat) == 128, "what travels has no gaps");

static dp_status dp__seat_key(dp__seat *seat)
{
    if (dp__os_secret((uint64_t *)&seat->key, sizeof seat->key))
        return DP_OK;
    return dp_error(DP_ERR_UNSUPPORTED,
                    "the system has no random numbers for the secret of a job: neither getentropy "
                    "nor /dev/urandom gives any");
}

/* With a port of its own, which only its machine can reach if all processes are there. */
static dp_status dp__seat_make(dp__seat *seat, dp__launch *launch, const dp__tree *tree, bool far,
                               dp__listener *listener)
{
    seat->machine = dp__os_machine();
    snprintf(launch->host, DP__HOST_BYTES, "%s", far ? "0.0.0.0" : "127.0.0.1");
    if (far) {
        DP_TRY(dp__far_host(tree, seat->host, sizeof seat->host));
        DP_TRY(dp__launch_ports(launch));
        DP_TRY(dp__launch_interface(launch));
    }
    seat->there_only = launch->own[0] != '\0';
    DP_TRY(dp__seat_key(seat));
    DP_TRY(dp__listen_within(listener, launch));
    seat->port = (uint32_t)dp__os_port(listener->fd);
    return DP_OK;
}

/* A process whose connections all stay inside its machine has the address of another one there; "":
   there is none. */
static const char *dp__seat_address(const dp__seat *seats, int count, int seat)
{
    const char *host = seats[seat].host;
    for (int s = 0; s < count && host[0] == '\0'; s++)
        if (seats[s].machine == seats[seat].machine)
            host = seats[s].host;
    return host;
}

/* From the place of `own`. */
static const char *dp__seat_host(const dp__seat *seats, int count, int own, int seat)
{
    bool near = seats[seat].machine == seats[own].machine && !seats[seat].there_only;
    return near ? "127.0.0.1" : dp__seat_address(seats, count, seat);
}

/* As dp__os_connect. */
static int dp__seat_connect(const dp__seat *seats, int count, int own, int seat)
{
    dp__os_found found;
    dp__os_look_up(dp__seat_host(seats, count, own, seat), (int)seats[seat].port, true, &found);
    return found.count > 0 ? dp__os_connect(&found.list[0]) : -1;
}

/* Checks that this process can find all that have a port. */
static dp_status dp__seats_check(const dp__seat *seats, int count, int own)
{
    for (int s = 0; s < count; s++)
        if (seats[s].port != 0 && dp__seat_host(seats, count, own, s)[0] == '\0')
            return dp_error(DP_ERR_UNSUPPORTED,
                            "the processes are on several machines, and have met inside one, or by "
                            "a bootstrap of yours, so that no address of process %d is known: set "
                            "DP_INTERFACE",
                            s);
    return DP_OK;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
