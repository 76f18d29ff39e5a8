/* dp/group.h - v0.2.0 - some processes of a job as a job of their own - MIT licence

   Part of dp.h, which includes it. A group is a context like any other. Only the way in which its
   processes meet is different: not by what a launcher says, but by what they tell each other in the
   context of which they are a part.

   CONTENTS (search for the tag)
     >>introductions what all processes tell each other
     >>group         how those with the same number meet
*/

#ifndef DP__ROOMS
#error "dp/group.h is a part of dp.h: include dp.h"
#else

/* ==== >>introductions ===========================================================================
   Every process learns who is in its group, where the first of them will listen, and a secret that
   only this job knows.                                                                          */

typedef struct dp__group_introduction {
    int64_t group; /* -1: in none */
    uint64_t machine;
    dp__key secret;
    char host[DP__PLACE_BYTES]; /* its address for other machines; "": not known */
} dp__group_introduction;

enum { DP__CARD_WORDS = sizeof(dp__group_introduction) / sizeof(int64_t) };
_Static_assert(sizeof(dp__group_introduction) == DP__CARD_WORDS * sizeof(int64_t) &&
                   sizeof(dp__key) == 2 * sizeof(uint64_t),
               "a card travels as numbers, and has no gaps");

typedef struct dp__group {
    const char *fn;
    dp_ctx *ctx;
    int number;
    int process, process_count;                  /* in the group */
    const dp__group_introduction *introductions; /* by the ranks of ctx */
    dp_config config;
    dp_ctx *made;
} dp__group;

static dp_status dp__group_introduction_make(const dp__group *group, dp__group_introduction *out)
{
    *out = (dp__group_introduction){.group = group->number, .machine = dp__os_machine()};
    if (group->ctx->world.tree != NULL)
        DP_TRY(dp__far_host(group->ctx->world.tree, out->host, sizeof out->host));
    if (group->number < 0 || dp__os_secret((uint64_t *)&out->secret, sizeof out->secret))
        return DP_OK;
    return dp_error(DP_ERR_UNSUPPORTED,
                    "%s: the system has no random numbers for the secret of a group: neither "
                    "getentropy nor /dev/urandom gives any",
                    group->fn);
}

static const dp__group_introduction *dp__group_introduction_of(const dp__group *group, int process)
{
    const dp__job *job = group->ctx->world.job;
    return &group->introductions[job != NULL ? job->firsts[process] : 0];
}

/* Counts who is in the group; returns the first of them. */
static const dp__group_introduction *dp__group_meet(dp__group *group, bool *out_far)
{
    const dp_info *info = &group->ctx->info;
    const dp__group_introduction *own = dp__group_introduction_of(group, info->process),
                                 *first = NULL;
    *out_far = false;
    for (int p = 0; p < info->process_count; p++) {
        const dp__group_introduction *introduction = dp__group_introduction_of(group, p);
        if (introduction->group != own->group)
            continue;
        first = first != NULL ? first : introduction;
        group->process += p < info->process;
        group->process_count++;
        *out_far = *out_far || introduction->machine != own->machine;
    }
    return first;
}

/* A process whose connections all stay inside its machine has the address of another one there. */
static const char *dp__group_address(const dp__group *group, const dp__group_introduction *first)
{
    const char *host = first->host;
    for (int p = 0; p < group->ctx->info.process_count && host[0] == '\0'; p++) {
        const dp__group_introduction *introduction = dp__group_introduction_of(group, p);
        if (introduction->machine == first->machine)
            host = introduction->host;
    }
    return host;
}

/* ==== >>group ==================================================================================
   From the introductions to a context. All processes of the job take part in each step, whatever
   group they are in, and hear how it went: so all groups are opened or none is.                  */

/* Returns how long its processes may take to meet: no longer than those that wait for it in ctx
   have, see dp__group_opened. A wrong one is found later. */
static int dp__group_timeout_ms(const dp__group *group)
{
    int own = group->config.timeout_ms, all = group->ctx->config.timeout_ms;
    return own > 0 && own < all ? own : all;
}

/* dp__launch.rest: fails if the job of all has failed, or one of the group has died before all have
   met. */
DP__COLD static dp_status dp__group_rests(void *user, int ms)
{
    const dp__group *group = user;
    dp__job *job = group->ctx->world.job;
    char who[DP__WHO_BYTES];
    if (ms > 0)
        dp__os_sleep_ms(ms);
    dp__job_looks(job); /* it waits, and is no process that does not answer */
    DP_TRY(dp__job_heard(job));
    for (int p = 0; p < job->process_count; p++)
        if (dp__group_introduction_of(group, p)->group == group->number && p != job->process &&
            !dp__is_alive(job, p))
            return dp__job_fail(job, DP_ERR_REMOTE, p, "%s: %s has died", group->fn,
                                dp__who(job, p, who));
    return DP_OK;
}

/* As if a launcher had said it. */
static dp_status dp__group_launch(dp__group *group, const dp__group_introduction *first, bool far,
                                  dp__launch *out)
{
    out->rest = dp__group_rests;
    out->user = group;
    out->key = first->secret;
    out->numbered = out->agreed = out->met_before = true;
    snprintf(out->where, sizeof out->where, "in group %d", group->number);
    if (far) {
        const char *host = dp__group_address(group, first);
        if (host[0] == '\0')
            return dp_error(DP_ERR_UNSUPPORTED,
                            "%s: group %d is on several machines, and this job has met by a "
                            "bootstrap of yours, so that no address is known: open it by dp_open "
                            "with another bootstrap",
                            group->fn, group->number);
        snprintf(out->host, sizeof out->host, "%s", host);
        DP_TRY(dp__launch_ports(out));
        DP_TRY(dp__launch_interface(out));
        out->port = dp__launch_port(out);
    }
    dp__launch_name(out);
    return DP_OK;
}

/* Asks MPI for a communicator, where it has brought the processes together. */
static dp_status dp__group_join_line(dp__group *group, dp__launch *launch, dp__mpi_links **out)
{
    bool meant;
    dp_bootstrap split;
    dp_config *config = &group->config;
    DP_TRY(dp__backend_mpi->split(group->ctx->world.mpi_links, group->number, &split));
    config->bootstrap = split;
    dp_status status = DP_OK;
    if (group->number >= 0)
        status = dp__backend_mpi->join(config, dp__group_timeout_ms(group), launch, &meant, out);
    launch->name = "group";
    dp__backend_mpi->drop(&split);
    return status;
}

static dp_status dp__group_open(dp__group *group)
{
    bool far;
    dp__tree *tree = NULL;
    dp__mpi_links *links = NULL;
    dp_ctx *made = NULL;
    const dp__group_introduction *first = dp__group_meet(group, &far);
    dp__launch launch = {
        .name = "group", .process = group->process, .process_count = group->process_count};
    dp__group_resolve(group->ctx, group->process_count, &group->config);
    if (dp__backend_mpi != NULL && group->ctx->world.mpi_links != NULL) {
        DP_TRY(dp__group_join_line(group, &launch, &links));
    } else if (group->number >= 0 && group->process_count > 1) {
        DP_TRY(dp__group_launch(group, first, far, &launch));
        DP_TRY(dp__join_tree(&group->config, &launch, dp__group_timeout_ms(group), &tree));
        launch.rest = NULL; /* all have met; what the context keeps of this outlives the group */
    }
    if (group->number < 0)
        return DP_OK;
    DP_TRY(dp__open_met(&group->config, &launch, tree, links, &made));
    dp__log_opened(made);
    group->made = made;
    return DP_OK;
}

/* How a step went, to all and from all. Who has only heard of another's failure lets that one speak
   first. It fails no job: a group is none of ctx's business. */
static dp_status dp__group_agree(const dp__group *group, dp_status own)
{
    bool echo = own == DP_ERR_REMOTE || own == DP_ERR_TIMEOUT;
    char text[DP__TEXT_BYTES];
    snprintf(text, sizeof text, "%s", dp__unnamed(group->fn, dp__open_error()));
    dp_status status = own == DP_OK || echo ? DP_OK : dp_error(own, "%s", text);
    status = dp_agree(group->ctx, status);
    if (status == DP_OK)
        status = dp_agree(group->ctx, own == DP_OK ? DP_OK : dp_error(own, "%s", text));
    if (status == DP_OK)
        return DP_OK;
    return dp_error(status, "%s: %s", group->fn, dp__unnamed("dp_agree", dp_last_error()));
}

/* Tells all whether it was opened. Who waits here has more patience than the time-out: a meeting
   that fails is over before those that wait for its end give up, and name one that is in it.
   Whatever time is left, its last step has a while, and then asks who is missing. */
static dp_status dp__group_opened(const dp__group *group, dp_status own)
{
    dp__journal *journal = group->ctx->lanes[DP__CALLER].journal;
    if (journal != NULL)
        journal->patience_ms = 3 * DP__GRACE_MS;
    dp_status status = dp__group_agree(group, own);
    if (journal != NULL)
        journal->patience_ms = 0;
    return status;
}

static dp_status dp__group_run(dp__group *group, const dp__group_introduction *own,
                               dp__group_introduction *introductions)
{
    const dp_coll_call call = {.verb = DP_ALL_GATHER, .count = DP__CARD_WORDS, .dtype = DP_I64};
    DP_TRY(dp__numbers(group->fn, group->ctx, call, own, introductions));
    group->introductions = introductions;
    return dp__group_opened(group, dp__group_open(group));
}

DP_API dp_status dp__open_group(dp_ctx *ctx, int number, const dp_config *config,
                                size_t config_bytes, int version, dp_ctx **out)
{
    dp__group group = {.fn = "dp_open_group", .ctx = ctx, .number = number};
    dp__group_introduction own = {.group = number};
    DP_TRY(dp__check_ctx(group.fn, ctx));
    DP_TRY(dp__check_pointer(group.fn, "out", out));
    DP_TRY(dp__check_caller(group.fn, config_bytes, version));
    if (config != NULL)
        group.config = *config;
    size_t bytes = (size_t)ctx->info.rank_count * sizeof own;
    dp__group_introduction *introductions =
        dp__host_alloc(&ctx->host, bytes, _Alignof(dp__group_introduction));
    dp_status status = dp__check_group(group.fn, number, &group.config);
    if (status == DP_OK && introductions == NULL)
        status = dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %d ranks", group.fn,
                          ctx->info.rank_count);
    if (status == DP_OK)
        status = dp__group_introduction_make(&group, &own);
    status = dp__group_agree(&group, status);
    if (status == DP_OK)
        status = dp__group_run(&group, &own, introductions);
    dp__host_free(&ctx->host, introductions);
    if (status != DP_OK)
        dp_close(group.made);
    DP_TRY(status);
    *out = group.made;
    return DP_OK;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
