/* dp_mirror.h - v0.2.0 - an optimizer of shares goes on when a process has died - MIT licence

   Include it after dp_train.h, or instead. It declares nothing: where the file that defines
   DP_IMPLEMENTATION includes it, an optimizer may be mirrored. It is a part of dp_train.h, whose
   private names it uses.

       dp_optim *optim;
       dp_optim_create(par, &(dp_optim_config){.rule = dp_adamw(),
                                               .hyper = {.lr = 3e-4},
                                               .sharded = true,
                                               .mirrored = true}, &optim);

   CONTENTS (search for the tag)
     >>mirrored   what happens when a process dies, and what it costs
   and of the implementation
     >>ring       in which process the copy of a share lies
     >>beginning  when a mirrored step is made, whatever happens
     >>moving     state that is cut anew, from those that have it to all
     >>mirrors    when that happens
*/

#include "dp_train.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_MIRROR_H) && defined(DP_H)
#define DP_MIRROR_H

/* ==== >>mirrored ===============================================================================
   With `sharded`, each process has a share of the state that no other process has. If the process
   dies, its share is lost, and after dp_recover the optimizer is not valid any more. With
   `mirrored` another process has a copy of the share: the next one, or one on another machine. It
   gets the gradients of the share, too, and steps the copy by itself: state is never sent. So all
   processes of a machine may die at once, if dp_recover lets the others go on (>>recovery in dp.h).

   After dp_recover or dp_admit, all processes call the optimizer: dp_optim_save, for example. The
   first call puts the state together from shares and copies, and shares it out among the processes
   that are left. It makes parameters equal, too. The program is the same as without `sharded`
   (examples/survivors.c), and so are the numbers, bit by bit.

   A step is made by all processes that live, or by none. Before it begins, each process has the
   gradients that it needs, and waits until all have theirs. What happens if a process dies:
     before that       dp_train_step fails, and everything is as it was before the step.
     after that        dp_train_step succeeds, even if the job has failed; the next call says so.
                       Parameters are void until the first call after dp_recover ends the step.
     while some wait   dp_train_step succeeds in processes that know that all have their gradients.
                       In the others it fails, but the first call after dp_recover makes the step.
   So a program that counts samples by itself takes the counts of the process that is furthest, by
   dp_checkpoint_share, or goes by dp_optim_info.step_count, after that first call. Only the latter
   is right if all processes that were furthest have died since. With `accumulate` the next step
   begins anew: call dp_optim_progress with `done` = step_count * accumulate.

   The cost is memory for the state of twice as many elements and for their gradients (and for their
   parameters, if the host does not reach the memory of devices); and in each step the time to step
   twice as many elements, a barrier, and a message with the gradients of one share, which goes to
   another machine if there are several.

   If a process and the one with its copy die together, or the second one before that first call,
   the call returns STATE in all processes. Then all make a new optimizer, which can load a
   checkpoint.

   A process that comes back by $DP_REJOIN makes its optimizer (all of them, if there are several)
   while the others make their first call after dp_admit (dp_optims_save). A rule of your own must
   make the same of the same numbers in every process.

   INVALID: without `sharded`. UNSUPPORTED: if several devices of a process have parameters of their
   own, or processes share parameters (share_params); if processes have different numbers of
   devices; if nothing carries messages between machines (>>messages in dp.h).                   */
#endif /* DP_MIRROR_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_MIRROR_IMPLEMENTED)
#define DP_MIRROR_IMPLEMENTED

#include <stdlib.h>
#include <string.h>

/* ==== >>ring ====================================================================================
   Of processes whose optimizer is mirrored: each has the copy of the share of the one before.   */

enum { DP__TRAIN_TAG = 0x6d69726f }; /* of messages */

typedef enum dp__train_phase {
    DP__TRAIN_BETWEEN, /* steps */
    DP__TRAIN_READY,   /* the gradients are here, and whether they are everywhere is not known */
    DP__TRAIN_BEGUN    /* they are: the step is made, whatever happens */
} dp__train_phase;

typedef struct dp__train_fact { /* what a process has of a cut */
    int64_t has;                /* 0: nothing; the others are void */
    int64_t process, process_count, steps, skipped;
    int64_t before; /* the process whose shares it has the copy of */
    int64_t ready;  /* it could make one step more */
} dp__train_fact;

struct dp__train_mirror {
    int64_t cut; /* all that have state of the same cut have shares of one whole */
    struct dp__train_optimizer *next; /* NULL; or the cut after it, if it is not known whether all
                                         have their shares of that */
    dp__train_phase phase;
    bool began;         /* the step that was asked for last */
    double factor;      /* of its gradients */
    size_t asked, done; /* calls of the rule in it: so far this time, and those that need not be
                           made again */
    bool spoiled;       /* the rule has failed between two of them */
    bool whole;         /* all that belongs to this cut is here */
    bool far;    /* of devices the host does not reach a gather that fails leaves nothing whole */
    bool voided; /* and so may have been the last one */
    dp_message *messages;
    dp__train_fact *facts; /* by rank */
};

static int dp__train_place_order(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Machine after machine, the next of a process is as far behind it as the largest machine has
   processes. So it is on another machine, unless its machine has more than half of all. */
static dp__train_ring dp__train_ring_of(const dp_info *job, int64_t *places)
{
    int64_t count = job->process_count, on = 0, most = 0, at = 0;
    qsort(places, (size_t)count, sizeof *places, dp__train_place_order);
    for (int64_t i = 0; i < count; i++) {
        on = i > 0 && places[i] / count == places[i - 1] / count ? on + 1 : 1;
        most = on > most ? on : most;
        at = places[i] % count == job->process ? i : at;
    }
    int64_t far = most < count ? most : 1;
    return (dp__train_ring){.before = (int)(places[(at + count - far) % count] % count),
                            .next = (int)(places[(at + far) % count] % count)};
}

static dp_status dp__train_ring_find(dp_ctx *ctx, dp_scope *temp, const dp_info *job,
                                     dp__train_ring *out)
{
    int64_t *places = dp_scope_alloc(temp, (size_t)job->rank_count * sizeof *places);
    const int64_t own = (int64_t)job->machine * job->process_count + job->process;
    DP_TRY(dp_agree(ctx, places != NULL ? DP_OK : dp_no_memory()));
    DP_TRY(dp_all_gather_i64(ctx, &own, 1, places));
    for (int p = 0; p < job->process_count; p++) /* of ranks that a process has, one */
        places[p] = places[p * job->local_count];
    *out = dp__train_ring_of(job, places);
    return DP_OK;
}

/* Checks that something carries messages, by one with nothing in it. If not, no process has another
   answer. */
static dp_status dp__train_mirrored_reach(dp_ctx *ctx, const dp_info *job,
                                          const dp__train_ring *ring)
{
    const int64_t none = 0;
    dp_message both[2];
    for (int i = 0; i < 2; i++)
        both[i] = (dp_message){.tensor = dp_wrap(NULL, DP_U8, 1, &none),
                               .peer = (i == 0 ? ring->next : ring->before) * job->local_count,
                               .tag = DP__TRAIN_TAG,
                               .receives = i == 1};
    dp_status status = dp_messages_begin(ctx, both, 2);
    if (status == DP_OK)
        status = dp_messages_end(ctx, both, 2);
    return status == DP_ERR_UNSUPPORTED ? status : dp__train_alone(ctx, status);
}

/* So that every process knows which ranks the others have, and has a way to the next one. */
static dp_status dp__train_mirrored_begin(dp_ctx *ctx, dp__train_ring *out)
{
    dp_info job;
    DP_TRY(dp_info_get(ctx, &job));
    int64_t most[2] = {job.local_count, -job.local_count};
    DP_TRY(dp_all_reduce_i64(ctx, most, 2, DP_OP_MAX));
    if (most[0] != -most[1])
        return dp_error(DP_ERR_UNSUPPORTED, "mirrored: processes have %lld to %lld devices",
                        (long long)-most[1], (long long)most[0]);
    dp_scope *temp = dp_scope_begin(ctx);
    dp_status status = dp__train_ring_find(ctx, temp, &job, out);
    dp_scope_end(temp);
    return status == DP_OK && job.machine_count > 1 ? dp__train_mirrored_reach(ctx, &job, out)
                                                    : status;
}

static dp_status dp__train_mirrored_check(const dp__train_optimizer *optim)
{
    const dp__train_views *views = &optim->views;
    const char *why = NULL;
    if (!optim->config.sharded)
        return dp_error(DP_ERR_INVALID, "mirrored is set, and sharded is not");
    if (views->owner_count > 1)
        why = "each device of this process has parameters of its own";
    for (size_t s = 0; s < views->span_count && why == NULL; s++)
        if (views->spans[s].once)
            why = "the processes share parameters (share_params)";
    return why == NULL ? DP_OK
                       : dp_error(DP_ERR_UNSUPPORTED, "mirrored: '%s': %s",
                                  dp_module_name(views->module), why);
}

static dp_status dp__train_mirror_make(dp__train_optimizer *optim)
{
    dp__train_views *views = &optim->views;
    const dp_info *job = &views->job;
    size_t local = (size_t)job->local_count, before = (size_t)optim->ring.before;
    dp_device_info device;
    DP_TRY(dp__train_mirrored_check(optim));
    DP_TRY(dp_device_info_get(views->ctx, 0, &device));
    dp__train_mirror *mirror = dp_scope_alloc(optim->scope, sizeof *mirror);
    if (mirror == NULL)
        return dp_no_memory();
    *mirror = (dp__train_mirror){
        .far = !device.host_memory,
        .messages = dp_scope_alloc(optim->scope, 2 * views->span_count * sizeof *mirror->messages),
        .facts = dp_scope_alloc(optim->scope, (size_t)job->rank_count * sizeof *mirror->facts)};
    if (mirror->messages == NULL || mirror->facts == NULL)
        return dp_no_memory();
    optim->mirror = mirror;
    if (job->process_count > 1)
        views->copied = (dp__train_ranks){before * local, (before + 1) * local};
    return DP_OK;
}

static dp_status dp__train_mirror_room(const dp__train_optimizer *optim, dp__train_store *store,
                                       const dp_tensor *first, int64_t kept)
{
    dp_dtype dtype = (dp_dtype)first->dtype;
    DP_TRY(dp_tensor_new(optim->scope, first->device, dtype, 1, &kept, &store->grad));
    if (!optim->mirror->far)
        return DP_OK;
    return dp_tensor_new(optim->scope, first->device, dtype, 1, &kept, &store->param);
}

/* ==== >>beginning ===============================================================================
   A step of a mirrored optimizer: what it waits for, and that it is made then.                  */

/* Parameters that were stepped, before they are gathered; back: after that has failed. */
static dp_status dp__train_params_keep(const dp__train_optimizer *optim, bool back)
{
    const dp__train_views *views = &optim->views;
    for (size_t s = 0; s < views->span_count; s++)
        DP_TRY(dp__train_pieces_copy(views, s, 0, &optim->stores[s].param,
                                     dp__train_data(views, 0, views->spans[s].all.first), back));
    return DP_OK;
}

/* The gradients that a process steps by, but for those that come from another one. */
static dp_status dp__train_grads_keep(const dp__train_optimizer *optim, size_t s, bool all)
{
    const dp__train_views *views = &optim->views;
    const dp__train_run *run = &views->spans[s].all;
    dp__train_piece pieces[DP__TRAIN_PIECES];
    dp__train_pieces(views, run, 0, pieces);
    for (int k = 0; k < DP__TRAIN_PIECES; k++)
        if (k != DP__TRAIN_COPY || all)
            DP_TRY(dp__train_piece_copy(views->ctx, &optim->stores[s].grad,
                                        dp__train_grad(views, 0, run->first), &pieces[k], false));
    return DP_OK;
}

/* Sends the own gradients of each span to the next process of the ring, and receives those of the
   one before. */
static dp_status dp__train_grads_pass_on(const dp__train_optimizer *optim)
{
    const dp__train_views *views = &optim->views;
    dp_message *messages = optim->mirror->messages;
    int next = optim->ring.next * views->job.local_count;
    size_t count = 0;
    for (size_t s = 0; s < views->span_count; s++) {
        const dp_tensor *kept = &optim->stores[s].grad;
        dp__train_piece pieces[DP__TRAIN_PIECES];
        dp__train_pieces(views, &views->spans[s].all, 0, pieces);
        for (int k = DP__TRAIN_OWN; k <= DP__TRAIN_COPY && views->spans[s].each > 0; k++)
            messages[count++] =
                (dp_message){.tensor = dp__train_kept_part(kept, &pieces[k]),
                             .peer = k == DP__TRAIN_OWN ? next : (int)views->copied.first,
                             .tag = DP__TRAIN_TAG,
                             .receives = k == DP__TRAIN_COPY};
    }
    DP_TRY(dp_messages_begin(views->ctx, messages, count));
    return dp_messages_end(views->ctx, messages, count);
}

/* When this succeeds somewhere, every process has what it needs to make the step by itself. */
static dp_status dp__train_meet(dp__train_optimizer *optim, double factor)
{
    const dp__train_views *views = &optim->views;
    dp__train_mirror *mirror = optim->mirror;
    bool passes = views->job.process_count > 1 && dp_grads_are_scattered(views->module);
    for (size_t s = 0; s < views->span_count; s++)
        DP_TRY(dp__train_grads_keep(optim, s, !passes));
    if (passes)
        DP_TRY(dp__train_grads_pass_on(optim));
    if (mirror->far) /* what was summed up has not failed */
        DP_TRY(dp_wait(views->ctx));
    mirror->factor = factor;
    mirror->done = 0;
    mirror->phase = DP__TRAIN_READY;
    DP_TRY(dp_barrier(views->ctx));
    mirror->phase = DP__TRAIN_BEGUN;
    mirror->began = true;
    return DP_OK;
}

/* A rule of somebody's may have done a part of what it was called for. Then the share here is worth
   nothing, and must not get to those who have the copy. */
static dp_status dp__train_begun_step(const dp__train_optimizer *optim)
{
    dp__train_mirror *mirror = optim->mirror;
    mirror->asked = 0;
    dp_status status = dp__train_owners_step(optim, mirror->factor);
    if (status == DP_OK && mirror->far)
        status = dp__train_params_keep(optim, false);
    mirror->voided = mirror->far;
    if (status == DP_OK)
        mirror->phase = DP__TRAIN_BETWEEN;
    else if (!dp__train_is_own(optim->config.rule) || dp_status_class(status) != DP_CLASS_JOB)
        mirror->spoiled = true;
    return mirror->spoiled ? dp__train_alone(optim->views.ctx, status) : status;
}

/* Returns OK for a step that has begun, though the job may have failed since: the rest follows
   dp_recover. */
static dp_status dp__train_begun(const dp__train_optimizer *optim, dp_status status)
{
    const dp__train_mirror *mirror = optim->mirror;
    bool follows = mirror->began && !mirror->spoiled;
    return follows && dp_status_class(status) == DP_CLASS_JOB ? DP_OK : status;
}

static void dp__train_turn_begin(dp__train_optimizer *optim)
{
    optim->mirror->began = false;
}

/* Makes only the rest of a step that was interrupted. */
static dp_status dp__train_rule_rest(const dp__train_optimizer *optim, const dp_rule_args *args,
                                     size_t count)
{
    dp__train_mirror *mirror = optim->mirror;
    if (mirror->asked++ < mirror->done)
        return DP_OK;
    dp_status status = dp__train_rule_call(optim, args, count);
    mirror->done += status == DP_OK;
    return status;
}

static dp_status dp__train_mirrored_steps(dp__train_optimizer *optim, double factor)
{
    dp_ctx *ctx = optim->views.ctx;
    DP_TRY(dp__train_alone(ctx, dp__train_meet(optim, factor)));
    DP_TRY(dp__train_begun_step(optim));
    DP_TRY(dp__train_fetch_all(optim));
    if (!optim->mirror->far)
        return DP_OK;
    DP_TRY(dp_wait(ctx));
    optim->mirror->voided = false;
    return DP_OK;
}

/* ==== >>moving ==================================================================================
   Of each share of a cut those give that have it, or its copy. Parameters are known by number: each
   cut lists them in an order of its own.                                                        */

static dp_status dp__train_lost(const dp__train_views *views, int64_t process, int64_t count)
{
    return dp_error(DP_ERR_STATE,
                    "the state of '%s' was spread over %lld processes, and process %lld is gone "
                    "together with the one that had its copy: make a new optimizer, which can load "
                    "a checkpoint",
                    dp_module_name(views->module), (long long)count, (long long)process);
}

typedef struct dp__train_moving {
    dp__train_optimizer *to;
    dp__train_optimizer *from; /* NULL: this process has nothing of the cut before */
    dp_scope *temp;
    dp__train_fact *facts; /* by rank: what its process has of it */
    int root;              /* a rank whose process has the last step; -1: there is none */
    bool fresh;            /* some process has nothing */
    int64_t *order;        /* of the cut before, as its parameters are listed there: number, span,
                              share */
    size_t *listed;        /* by number: which the parameter is in the next cut */
    dp_tensor whole;       /* room for a span */
    dp_tensor *rooms;      /* of the other local ranks, for what is meant for the first */
} dp__train_moving;

static bool dp__train_has_step(const dp__train_fact *fact, int64_t step)
{
    return fact->has != 0 && (fact->steps == step || (fact->steps == step - 1 && fact->ready != 0));
}

/* Finds the process that has begun the last step; of several, the one that has left out more. */
static void dp__train_furthest(dp__train_moving *own)
{
    int64_t step = -1, skipped = -1;
    int ranks = own->to->views.job.rank_count;
    for (int r = 0; r < ranks; r++)
        if (own->facts[r].has != 0 && own->facts[r].steps > step)
            step = own->facts[r].steps;
    own->root = -1;
    own->fresh = false;
    for (int r = 0; r < ranks; r++) {
        dp__train_fact *fact = &own->facts[r];
        fact->has = dp__train_has_step(fact, step);
        own->fresh = own->fresh || fact->has == 0;
        if (fact->has == 0 || fact->steps < step || fact->skipped <= skipped)
            continue;
        own->root = r;
        skipped = fact->skipped;
    }
}

/* The first rank of a process that has the shares of one of the cut before; -1: nobody has. */
static int dp__train_holder(const dp__train_moving *own, int64_t process)
{
    const dp_info *job = &own->to->views.job;
    int holder = -1;
    for (int r = 0; r < job->rank_count; r += job->local_count) {
        const dp__train_fact *fact = &own->facts[r];
        if (fact->has == 0)
            continue;
        if (fact->process == process)
            return r;
        if (fact->before == process)
            holder = r;
    }
    return holder;
}

/* Makes what this process can of a step that others have begun. */
static dp_status dp__train_catch_up(dp__train_optimizer *optim, int64_t step)
{
    dp__train_mirror *mirror = optim->mirror;
    if (mirror->phase == DP__TRAIN_READY && optim->steps < step) {
        dp__train_count(optim, 1);
        dp__train_rescale(optim, false);
        mirror->phase = DP__TRAIN_BEGUN;
    }
    dp_status status = dp__train_edit(&optim->views, true);
    if (status == DP_OK && mirror->far && mirror->phase != DP__TRAIN_BEGUN) {
        status = dp__train_params_keep(optim, mirror->voided);
        mirror->voided = true; /* by what comes now, should it fail */
    }
    if (mirror->phase != DP__TRAIN_BEGUN)
        return status;
    dp__train_count(optim, -1); /* as they were when it began */
    if (status == DP_OK)
        status = dp__train_begun_step(optim);
    dp__train_count(optim, 1);
    return status;
}

/* ---- what is needed for that ----------------------------------------------------------------- */

static void dp__train_order(const dp__train_views *views, int64_t *order)
{
    for (size_t i = 0; i < views->count; i++) {
        size_t span = views->listed[i].span;
        order[3 * i] = (int64_t)views->listed[i].number;
        order[3 * i + 1] = (int64_t)span;
        order[3 * i + 2] = (int64_t)views->spans[span].each;
    }
}

static dp_status dp__train_moving_make(dp__train_moving *own)
{
    const dp__train_views *views = &own->to->views;
    const int64_t room = DP__TRAIN_STAGE;
    size_t local = (size_t)views->job.local_count;
    own->order = dp_scope_alloc(own->temp, 3 * views->count * sizeof *own->order);
    own->listed = dp_scope_alloc(own->temp, views->count * sizeof *own->listed);
    own->rooms = dp_scope_alloc(own->temp, local * sizeof *own->rooms);
    if (own->order == NULL || own->listed == NULL || own->rooms == NULL)
        return dp_no_memory();
    for (size_t r = 1; r < local; r++)
        DP_TRY(dp_tensor_new(own->temp, dp_local_device(views->ctx, (int)r), DP_I64, 1, &room,
                             &own->rooms[r]));
    for (size_t i = 0; i < views->count; i++)
        own->listed[views->listed[i].number] = i;
    return DP_OK;
}

typedef struct dp__train_old_span { /* of the cut before */
    size_t first, end;              /* as listed there */
    size_t number, count, each;     /* which it is; elements */
    size_t cut;                     /* where the shares end, of `each` elements for a rank */
    const dp_tensor *data;          /* its first parameter */
} dp__train_old_span;

/* Which of the next cut one of the cut before is. */
static size_t dp__train_next_of(const dp__train_moving *own, size_t i)
{
    return own->listed[own->order[3 * i]];
}

/* The one that begins with a parameter, as listed there. */
static dp__train_old_span dp__train_old_span_at(const dp__train_moving *own, size_t first)
{
    const dp__train_views *views = &own->to->views;
    const int64_t *order = own->order;
    size_t each = (size_t)order[3 * first + 2];
    size_t ranks = (size_t)own->facts[own->root].process_count *
                   (size_t)views->job.local_count; /* there */
    dp__train_old_span span = {.first = first,
                               .end = first,
                               .number = (size_t)order[3 * first + 1],
                               .each = each,
                               .cut = each * ranks,
                               .data = dp__train_data(views, 0, dp__train_next_of(own, first))};
    while (span.end < views->count && order[3 * span.end + 1] == order[3 * first + 1])
        span.count += dp__train_elements(views, dp__train_next_of(own, span.end++));
    return span;
}

/* DP_OK: each share is somewhere. */
static dp_status dp__train_all_held(const dp__train_moving *own)
{
    const dp__train_views *views = &own->to->views;
    int64_t count = own->facts[own->root].process_count;
    bool spread = false;
    for (size_t i = 0; i < views->count; i++)
        spread = spread || own->order[3 * i + 2] > 0;
    for (int64_t process = 0; process < count && spread; process++)
        if (dp__train_holder(own, process) < 0)
            return dp__train_lost(views, process, count);
    return DP_OK;
}

static dp_status dp__train_whole_make(dp__train_moving *own)
{
    const dp__train_views *views = &own->to->views;
    int64_t most = 0;
    for (size_t i = 0; i < views->count;) {
        const dp__train_old_span span = dp__train_old_span_at(own, i);
        most = (int64_t)span.count > most ? (int64_t)span.count : most;
        i = span.end;
    }
    return dp_tensor_new(own->temp, dp__train_data(views, 0, 0)->device, DP_I64, 1, &most,
                         &own->whole);
}

/* ---- how it travels -------------------------------------------------------------------------- */

/* Elements of one rank, in place, to all. */
static dp_status dp__train_spread(const dp__train_moving *own, const dp_tensor *all, size_t first,
                                  size_t end, int root)
{
    dp_dtype bits = dp__train_bits((dp_dtype)all->dtype);
    dp_part *parts = own->to->parts;
    size_t local = (size_t)own->to->views.job.local_count;
    for (size_t at = first, some; at < end; at += some) {
        char *data = (char *)all->data + at * dp_dtype_bytes(bits);
        some = local > 1 && end - at > DP__TRAIN_STAGE ? DP__TRAIN_STAGE : end - at;
        parts[0] = (dp_part){.send = data, .recv = data};
        for (size_t r = 1; r < local; r++)
            parts[r] = (dp_part){.send = own->rooms[r].data, .recv = own->rooms[r].data};
        DP_TRY(dp_broadcast(own->to->views.ctx, parts, some, bits, root));
    }
    return DP_OK;
}

static dp_status dp__train_shares_spread(const dp__train_moving *own, const dp_tensor *all,
                                         size_t each)
{
    size_t share = each * (size_t)own->to->views.job.local_count; /* a process' */
    int64_t count = own->facts[own->root].process_count;
    for (int64_t process = 0; process < count; process++)
        DP_TRY(dp__train_spread(own, all, (size_t)process * share, ((size_t)process + 1) * share,
                                dp__train_holder(own, process)));
    return DP_OK;
}

/* Gives what this process has of a span's state. */
static dp_status dp__train_state_give(const dp__train_moving *own, const dp__train_old_span *span,
                                      size_t k, const dp_tensor *all)
{
    const dp__train_optimizer *from = own->from;
    return from == NULL ? DP_OK
                        : dp__train_pieces_copy(&from->views, span->number, 0,
                                                &from->stores[span->number].state[k], all, true);
}

/* The end everybody has; what ranks do not reduce may differ there, and stays. */
static dp_status dp__train_slot_move(const dp__train_moving *own, const dp__train_old_span *span,
                                     size_t k)
{
    const dp__train_views *views = &own->to->views;
    dp_dtype dtype = span->data->dtype == DP_F64 ? DP_F64 : DP_F32;
    dp_tensor all = dp__train_flat(&own->whole, own->whole.data, dtype, span->count), part;
    DP_TRY(dp__train_state_give(own, span, k, &all));
    if (own->fresh) {
        DP_TRY(dp__train_spread(own, &all, span->cut, span->count, own->root));
        DP_TRY(dp__train_state_give(own, span, k, &all));
    }
    DP_TRY(dp__train_shares_spread(own, &all, span->each));
    for (size_t i = span->first, at = 0; i < span->end; i++) {
        size_t next = dp__train_next_of(own, i), count = dp__train_elements(views, next);
        DP_TRY(dp_narrow(&all, 0, (int64_t)at, (int64_t)count, &part));
        DP_TRY(dp__train_state_put(own->to, next, 0, k, &part));
        at += count;
    }
    return DP_OK;
}

/* Sends the end of a span's parameters to those that have nothing of it. */
static dp_status dp__train_end_move(const dp__train_moving *own, const dp__train_old_span *span,
                                    const dp_tensor *data)
{
    const dp__train_views *views = &own->to->views;
    dp_tensor all =
        dp__train_flat(&own->whole, own->whole.data, (dp_dtype)data->dtype, span->count);
    const dp__train_piece end = {span->cut, span->count - span->cut, 0};
    dp_tensor here = dp__train_part(data, &end), there = dp__train_part(&all, &end);
    if (own->from != NULL)
        DP_TRY(dp_copy(views->ctx, &there, &here, NULL));
    DP_TRY(dp__train_spread(own, &all, span->cut, span->count, own->root));
    return own->from != NULL ? DP_OK : dp_copy(views->ctx, &here, &there, NULL);
}

/* Parameters, too: the job may have failed before all had got them. */
static dp_status dp__train_spans_move(const dp__train_moving *own)
{
    const dp__train_views *views = &own->to->views;
    for (size_t i = 0; i < views->count;) {
        const dp__train_old_span span = dp__train_old_span_at(own, i);
        const dp_tensor data =
            dp__train_flat(span.data, span.data->data, (dp_dtype)span.data->dtype, span.count);
        size_t slots = own->to->stores[views->listed[dp__train_next_of(own, i)].span].slots;
        for (size_t k = 0; k < slots; k++)
            DP_TRY(dp__train_slot_move(own, &span, k));
        DP_TRY(dp__train_shares_spread(own, &data, span.each));
        if (own->fresh)
            DP_TRY(dp__train_end_move(own, &span, &data));
        i = span.end;
    }
    return DP_OK;
}

static dp_status dp__train_counts_move(const dp__train_moving *own)
{
    enum { COUNTS = 4 };
    dp__train_optimizer *to = own->to;
    const dp__train_optimizer *from = own->from;
    int64_t *all = own->order; /* which has served */
    int64_t counts[COUNTS] = {0};
    double scale = 0;
    for (size_t i = 0; i < to->views.count && from != NULL; i++)
        all[from->views.listed[i].number] = from->views.listed[i].steps;
    if (from != NULL) {
        const int64_t has[COUNTS] = {from->done, from->steps, from->skipped, from->good};
        memcpy(counts, has, sizeof counts);
        scale = from->scale;
    }
    DP_TRY(dp_broadcast_i64(to->views.ctx, counts, COUNTS, own->root));
    DP_TRY(dp_broadcast_f64(to->views.ctx, &scale, 1, own->root));
    DP_TRY(dp_broadcast_i64(to->views.ctx, all, to->views.count, own->root));
    to->done = counts[0];
    to->steps = counts[1];
    to->skipped = counts[2];
    to->good = counts[3];
    to->scale = scale;
    for (size_t i = 0; i < to->views.count; i++)
        to->views.listed[i].steps = all[to->views.listed[i].number];
    return DP_OK;
}

/* ==== >>mirrors =================================================================================
   The cut before stays until all have their part of the next one. If the job fails again at the end
   of that, some may have the next one alone, and some may have both: then all go on from the next.
   No step is made before all have it.                                                           */

static dp_status dp__train_move(dp__train_moving *own, dp_status status)
{
    enum { WORDS = sizeof(dp__train_fact) / sizeof(int64_t) };
    const dp__train_views *views = &own->to->views;
    union {
        dp__train_fact fact;
        int64_t words[WORDS];
    } mine = {{0}};
    if (own->from != NULL)
        mine.fact = (dp__train_fact){.has = !own->from->mirror->spoiled,
                                     .process = own->from->views.job.process,
                                     .process_count = own->from->views.job.process_count,
                                     .before = own->from->ring.before,
                                     .steps = own->from->steps,
                                     .skipped = own->from->skipped,
                                     .ready = own->from->mirror->phase == DP__TRAIN_READY};
    DP_TRY(dp_all_gather_i64(views->ctx, mine.words, WORDS, &own->facts->has));
    dp__train_furthest(own);
    if (own->root < 0)
        return dp_error(DP_ERR_STATE,
                        "no process has state of '%s': those who lived were in a step in which the "
                        "rule failed: make a new optimizer, which can load a checkpoint",
                        dp_module_name(views->module));
    if (own->facts[views->job.rank_first].has == 0)
        own->from = NULL;
    if (status == DP_OK && own->from != NULL)
        status = dp__train_catch_up(own->from, own->facts[own->root].steps);
    if (status == DP_OK)
        status = dp__train_moving_make(own);
    DP_TRY(dp_agree(views->ctx, status));
    if (own->from != NULL)
        dp__train_order(&own->from->views, own->order);
    DP_TRY(dp_broadcast_i64(views->ctx, own->order, 3 * views->count, own->root));
    DP_TRY(dp__train_all_held(own));
    DP_TRY(dp_agree(views->ctx, dp__train_whole_make(own)));
    DP_TRY(dp__train_spans_move(own));
    return dp__train_counts_move(own);
}

/* The next cut takes the place of that which an optimizer has. */
static void dp__train_become(dp__train_optimizer *optim, dp__train_optimizer *next)
{
    dp_scope *scope = optim->scope;
    next->total = optim->total;
    next->unscaled = optim->unscaled;
    next->overflow = optim->overflow;
    next->has_norm = optim->has_norm;
    next->norm = optim->norm;
    *optim = *next;
    dp_scope_end(scope);
}

/* Which cut those that have state go on from: the last that all of them have. */
static dp_status dp__train_resolve(dp_ctx *ctx, dp__train_optimizer *optim, int64_t *out_cut)
{
    dp__train_optimizer *next = optim != NULL ? optim->mirror->next : NULL;
    int64_t cut = optim != NULL ? optim->mirror->cut : -1;
    int64_t last = next != NULL ? next->mirror->cut : cut;
    int64_t most[2] = {cut, optim != NULL ? -last : INT64_MIN};
    DP_TRY(dp_all_reduce_i64(ctx, most, 2, DP_OP_MAX));
    *out_cut = most[0] < 0 || most[0] > -most[1] ? most[0] : -most[1];
    if (next == NULL)
        return DP_OK;
    optim->mirror->next = NULL;
    if (next->mirror->cut == *out_cut)
        dp__train_become(optim, next);
    else
        dp_scope_end(next->scope);
    return DP_OK;
}

/* Joins those that have made an optimizer at the same time, some of which may have state already.
   before: this process' own, or NULL. */
static dp_status dp__train_mirrors_join(dp__train_optimizer *optim, dp__train_optimizer *before)
{
    dp_ctx *ctx = optim->views.ctx;
    int64_t cut = -1;
    if (optim->staged)
        return dp_error(DP_ERR_UNSUPPORTED, "mirrored: '%s': devices hide parameters",
                        dp_module_name(optim->views.module));
    DP_TRY(dp__train_resolve(ctx, before, &cut));
    optim->mirror->cut = cut + 1;
    if (cut < 0)
        return DP_OK;
    dp__train_moving own = {.to = optim,
                            .from = before != NULL && before->mirror->cut == cut ? before : NULL,
                            .temp = dp_scope_begin(ctx),
                            .facts = optim->mirror->facts};
    dp_status status = dp__train_move(&own, dp_scope_check(own.temp));
    dp_scope_end(own.temp);
    if (status != DP_OK)
        return status;
    optim->mirror->whole = true;
    return dp_agree(ctx, DP_OK);
}

static dp_status dp__train_next_make(const dp__train_optimizer *optim, const dp__train_ring *ring,
                                     dp_scope *scope, dp__train_optimizer **out)
{
    dp__train_optimizer *next = dp_scope_alloc(scope, sizeof *next);
    if (next == NULL)
        return dp_no_memory();
    *next = (dp__train_optimizer){.base = optim->base,
                                  .home = optim->home,
                                  .scope = scope,
                                  .config = optim->config,
                                  .ring = *ring,
                                  .scale = optim->scale};
    *out = next;
    return dp__train_optim_build(optim->views.module, next);
}

static dp_status dp__train_cut_anew(dp__train_optimizer *optim)
{
    dp_ctx *ctx = optim->views.ctx;
    dp__train_optimizer *next = NULL;
    dp__train_ring ring;
    DP_TRY(dp__train_mirrored_begin(ctx, &ring));
    dp_scope *scope = dp_scope_child(optim->home);
    dp_status status = dp_scope_check(scope);
    if (status == DP_OK)
        status = dp__train_next_make(optim, &ring, scope, &next);
    status = dp__train_optim_begin_all(ctx, next, optim, status);
    bool whole = next != NULL && next->mirror != NULL && next->mirror->whole;
    if (status == DP_OK)
        dp__train_become(optim, next);
    else if (whole && dp_status_class(status) == DP_CLASS_JOB)
        optim->mirror->next = next;
    else
        dp_scope_end(scope);
    return status;
}

static const dp__train_mirror_ops dp__train_mirrors = {.begin = dp__train_mirrored_begin,
                                                       .make = dp__train_mirror_make,
                                                       .room = dp__train_mirror_room,
                                                       .join = dp__train_mirrors_join,
                                                       .turn = dp__train_turn_begin,
                                                       .steps = dp__train_mirrored_steps,
                                                       .rule = dp__train_rule_rest,
                                                       .begun = dp__train_begun,
                                                       .cut_anew = dp__train_cut_anew};

#endif /* DP_IMPLEMENTATION && !DP_MIRROR_IMPLEMENTED */

/* ------------------------------------------------------------------------------------------------
   MIT licence

   Copyright (c) 2026 the dp.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
   ---------------------------------------------------------------------------------------------- */
