/* dp/parallel.h - v0.2.0 - one model on many devices - MIT licence

   Part of dp.h, which includes it. A batch is cut, replicas run, outputs are gathered; backward
   goes the other way. The wrappers of one process, losses where the outputs are, and dp_train_step.

   CONTENTS (search for the tag)
     >>padding    rows that parts were filled up with, and that do not count
     >>parallel   arguments are cut, replicas run, outputs are gathered
     >>invoking   a module behind its face or by itself; children of a call
     >>outgrads   gradients of outputs: each replica gets its own
     >>backward   replicas run; gradients of inputs, and of parameters
     >>replay     a pass that is checked, part by part
     >>criterion  losses where the outputs are
     >>faces      the wrappers
     >>losses     of a step: their weights, their gradients as numbers, what is logged
     >>stepping   dp_train_step, dp_predict_step
*/

#ifndef DP__ROOMS
#error "dp/parallel.h is a part of dp.h: include dp.h"
#else

/* ==== >>padding ==================================================================================
   Values of a part that was filled up to some size.                                             */

typedef struct dp__unpadder { /* maps a value of a replica */
    dp__mapper mapper;
    const dp_pass *pass;
    size_t r;
    double number; /* of dp__padded_leaf */
    bool found;    /* some tensor has padding */
} dp__unpadder;

static dp_status dp__real_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    const dp__unpadder *own = (const dp__unpadder *)mapper;
    *out = value;
    if (value.kind != DP_TENSOR)
        return DP_OK;
    const dp_tensor part = dp__real_part(own->pass, own->r, value.as.t);
    return dp__of(mapper->scope, &part, out);
}

/* Makes of what replica r has returned a value without padding. */
static dp_status dp__real_value(const dp_pass *pass, size_t r, dp_value value, dp_value *out)
{
    dp__unpadder own = {{.scope = pass->scope, .leaf = dp__real_leaf}, pass, r, 0, false};
    *out = value;
    return dp__has_padding(pass, r) ? dp__map(&own.mapper, value, out) : DP_OK;
}

/* Makes a gradient of `like`, all zero; *rows are its real rows. */
static dp_status dp__padded_grad(const dp_pass *pass, size_t r, const dp_tensor *like,
                                 dp_tensor *out, dp_tensor *rows)
{
    const dp_call *call = &pass->records[r].call;
    DP_TRY(dp__tensor_as(pass->scope, dp__call_device(call), like, out));
    DP_TRY(dp__fill_tensor(pass->ctx, dp__call_device(call), out, 0));
    *rows = dp__real_part(pass, r, out);
    return DP_OK;
}

/* A gradient that is `number` in each element; where `like` has padding, in real rows only. */
static dp_status dp__number_grad(const dp_pass *pass, size_t r, const dp_tensor *like,
                                 double number, dp_value *out)
{
    int dim = 0;
    uint64_t bits = 0;
    dp_tensor grad, rows;
    *out = dp_float(number);
    if (dp__real_rows(pass, r, like, &dim) < 0 || !dp__is_float((dp_dtype)like->dtype))
        return DP_OK;
    DP_TRY(dp__number_bits(pass->ctx, "the gradient", *out, (dp_dtype)like->dtype, &bits));
    DP_TRY(dp__padded_grad(pass, r, like, &grad, &rows));
    DP_TRY(dp__fill_tensor(pass->ctx, dp__call_device(&pass->records[r].call), &rows, bits));
    return dp__of(pass->scope, &grad, out);
}

static dp_status dp__padded_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp__unpadder *own = (dp__unpadder *)mapper;
    bool number = value.kind == DP_INT || value.kind == DP_FLOAT;
    *out = number ? dp_float(own->number) : dp_none();
    if (value.kind != DP_TENSOR)
        return DP_OK;
    DP_TRY(dp__number_grad(own->pass, own->r, value.as.t, own->number, out));
    own->found = own->found || out->kind == DP_TENSOR;
    return DP_OK;
}

/* Spreads the gradient of a number over a whole output; *out stays a number if nothing in it has
   padding. */
static dp_status dp__number_grads(const dp_pass *pass, size_t r, dp_value output, double number,
                                  dp_value *out)
{
    dp__unpadder own = {
        {.scope = pass->scope, .leaf = dp__padded_leaf, .plain = true}, pass, r, number, false};
    dp_value all = dp_none();
    if (dp__has_padding(pass, r))
        DP_TRY(dp__map(&own.mapper, output, &all));
    *out = own.found ? all : dp_float(number);
    return DP_OK;
}

/* ==== >>parallel =================================================================================
   Several records at once: arguments are cut, every replica's thread runs its record, outputs are
   gathered; backward goes the other way. Errors: the first in replica order.                    */

typedef void dp__stage(dp__record *record);

typedef struct dp__runner {
    const dp_pass *pass;
    dp__record *records;
    const int *threads; /* of the records */
    size_t count;
    dp__stage *stage;
    const dp__telling *telling;
} dp__runner;
_Static_assert(sizeof(dp__runner) <= DP__JOB_BYTES, "a runner fits into the team");

static void dp__stage_forward(dp__record *record)
{
    record->status = dp__record_forward(record, record->pass->method);
}

static dp_status dp__record_step(dp__record *record);

static void dp__stage_step(dp__record *record)
{
    record->status = dp__record_step(record);
}

/* to = from * by / over; both dense, of one device. */
static dp_status dp__scale_flat(dp_ctx *ctx, const dp_tensor *from, double by, double over,
                                const dp_tensor *to)
{
    const void *in = from->data;
    return dp__sum(ctx, dp__device_of(ctx, to->device), &in, 1, by, over, to);
}

/* Returns how a replica's parameters, gradients or buffers lie. */
static const dp__layout *dp__record_layout(const dp__record *record, dp__sort sort)
{
    const dp_pass *pass = record->pass;
    return pass->face != NULL ? &pass->face->layouts[sort] : &pass->runs->layouts[sort];
}

static size_t dp__record_range_count(const dp__record *record, dp__sort sort)
{
    return dp__record_layout(record, sort)->range_count;
}

static dp_tensor dp__record_range(const dp__record *record, dp__sort sort, size_t i)
{
    dp_tensor range =
        dp__range_in(record->pass->runs, dp__record_layout(record, sort), i, record->memory);
    if (record->call.replica > 0)
        range.device = record->call.device;
    return range;
}

/* Copies what a replica has, range by range, into the scope of the pass. */
static dp_status dp__record_keep(const dp__record *record, dp__sort sort, dp_tensor **out)
{
    size_t count = dp__record_range_count(record, sort);
    const dp_call *call = &record->call;
    *out = dp__scope_bytes(call->scope, count * sizeof **out, _Alignof(dp_tensor));
    if (*out == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu %s", count, dp__sort_names[sort]);
    if (sort == DP__GRADS) /* those of an earlier pass are no gradients */
        DP_TRY(dp__grad_groups_zero(call->ctx, record->memory));
    for (size_t i = 0; i < count; i++) {
        dp_tensor range = dp__record_range(record, sort, i), *copy = &(*out)[i];
        DP_TRY(dp__tensor_as(call->scope, dp__call_device(call), &range, copy));
        DP_TRY(dp__copy_tensor(call->ctx, copy, &range, NULL));
    }
    return DP_OK;
}

static dp_status dp__record_put_back(const dp__record *record, dp__sort sort, const dp_tensor *kept)
{
    for (size_t i = 0; i < dp__record_range_count(record, sort); i++) {
        const dp_tensor range = dp__record_range(record, sort, i);
        DP_TRY(dp__copy_tensor(record->call.ctx, &range, &kept[i], NULL));
    }
    return DP_OK;
}

/* mean_grads: what this pass is to be added to makes room for what its backward writes. *out:
   range by range, in the pass' scope; NULL: there is nothing. Replicas that are summed begin with
   zeros, but for the original. */
static dp_status dp__record_set_aside(const dp__record *record, dp_tensor **out)
{
    const dp_call *call = &record->call;
    *out = NULL;
    bool summed = dp__ops(record->pass->face)->weight == NULL;
    if (!record->pass->adds || (call->replica > 0 && summed))
        return DP_OK;
    DP_TRY(dp__record_keep(record, DP__GRADS, out));
    for (size_t i = 0; i < dp__record_range_count(record, DP__GRADS); i++) {
        const dp_tensor range = dp__record_range(record, DP__GRADS, i);
        DP_TRY(dp__fill_tensor(call->ctx, dp__call_device(call), &range, 0));
    }
    return DP_OK;
}

/* mean_grads: this replica's gradients, times its share of the samples and the pass' factor; and
   what was set aside. */
static dp_status dp__record_weigh(const dp__record *record, const dp_tensor *aside)
{
    const dp_pass *pass = record->pass;
    const dp__face_ops *ops = dp__ops(pass->face);
    double total = dp__weight_total(pass), over = total > 0 && ops->weight == NULL ? total : 1;
    double by = ops->weight != NULL ? pass->factor * ops->weight(pass, record->call.replica)
                : pass->count > 1   ? pass->factor * record->call.weight
                                    : pass->factor * over;
    bool scales = by < over || by > over;
    size_t count = scales || aside != NULL ? dp__record_range_count(record, DP__GRADS) : 0;
    for (size_t i = 0; i < count; i++) {
        dp_tensor range = dp__record_range(record, DP__GRADS, i);
        if (scales)
            DP_TRY(dp__scale_flat(pass->ctx, &range, by, over, &range));
        if (aside == NULL)
            continue;
        const dp_tensor *both[] = {&range, &aside[i]};
        DP_TRY(dp__add_up(pass->ctx, record->call.scope, both, 2, dp__call_device(&record->call),
                          &range));
    }
    return DP_OK;
}

/* A replica's backward, and what mean_grads asks for around it. Gradients that it did not touch
   must not be summed as they are. */
static dp_status dp__record_grads(dp__record *record)
{
    dp_tensor *aside = NULL;
    DP_TRY(dp__record_set_aside(record, &aside));
    DP_TRY(dp__record_backward(record));
    if (record->outer == NULL)
        DP_TRY(dp__grad_groups_zero(record->call.ctx, record->memory));
    return record->pass->runs->mean_grads ? dp__record_weigh(record, aside) : DP_OK;
}

static void dp__stage_backward(dp__record *record)
{
    const dp__face_ops *ops = dp__ops(record->pass->face);
    record->status = dp__record_grads(record);
    if (record->status == DP_OK && record->pass->checked &&
        !ops->over_ranks) /* else some may be on their way */
        record->status = dp__check_grads(record);
    if (record->status == DP_OK && ops->ran_backward != NULL && !record->absent)
        record->status = ops->ran_backward(record);
}

/* Runs a stage of a replica whose rank has no rows, where other processes may have no replica for
   such a rank. Its methods run so that they take part in sums over ranks. If they succeed, buffers
   and gradients are as before, its samples count for nothing, and its rank reports no gradient. */
static void dp__record_leave_nothing(dp__record *record, dp__stage *stage)
{
    dp_tensor *buffers = NULL, *grads = NULL;
    bool backward = stage == dp__stage_backward;
    record->status = dp__record_keep(record, DP__BUFFERS, &buffers);
    if (record->status == DP_OK && backward)
        record->status = dp__record_keep(record, DP__GRADS, &grads);
    if (record->status == DP_OK)
        stage(record);
    if (!backward) /* there other replicas read it */
        record->call.weight = 0;
    if (record->status == DP_OK)
        record->status = dp__record_put_back(record, DP__BUFFERS, buffers);
    if (record->status == DP_OK && backward)
        record->status = dp__record_put_back(record, DP__GRADS, grads);
}

static void dp__record_run(dp__record *record, dp__stage *stage)
{
    dp__fetch_ahead(record, sizeof *record);
    record->text = NULL;
    if (record->leaves_nothing)
        dp__record_leave_nothing(record, stage);
    else
        stage(record);
    if (record->status != DP_OK)
        record->text = dp__copy_text(record->call.scope, dp_last_error());
    if (record->pass->ctx->late != NULL)
        record->done_ns = dp__os_now_ns();
    if (record->pass->count > 1)
        record->left_behind = dp__meet_leave(
            record->pass->ctx, (size_t)(record - record->pass->records), record->status);
}

static void dp__runner_part(int thread, void *user)
{
    const dp__runner *runner = user;
    dp__fetch_ahead(runner->pass, sizeof *runner->pass);
    if (thread > 0 && runner->telling != NULL)
        dp__telling_worker(runner->telling);
    for (size_t r = 0; r < runner->count; r++)
        if (runner->threads[r] == thread)
            dp__record_run(&runner->records[r], runner->stage);
}

/* The first failure in replica order; one that only waited for another that failed comes last. */
static dp_status dp__pass_result(const dp_pass *pass)
{
    const dp__record *worst = NULL;
    for (size_t r = 0; r < pass->count; r++) {
        const dp__record *record = &pass->records[r];
        if (record->status != DP_OK &&
            (worst == NULL || (worst->left_behind && !record->left_behind)))
            worst = record;
    }
    if (worst == NULL)
        return DP_OK;
    const char *text = worst->text != NULL ? worst->text : dp_status_text(worst->status);
    if (pass->alone)
        return dp_error(worst->status, "%s", text);
    return dp_error(worst->status, "replica %zu on %s %d: %s", (size_t)(worst - pass->records),
                    pass->ctx->info.device_backend, worst->call.local_rank, text);
}

static int dp__pass_threads(const dp_pass *pass)
{
    int count = 1;
    for (size_t r = 0; r < pass->count; r++)
        if (pass->face->threads[r] + 1 > count)
            count = pass->face->threads[r] + 1;
    return count;
}

/* Returns true if each replica has a device of its own and the same to do, so that none has to be
   late. */
static bool dp__pass_is_even(const dp_pass *pass)
{
    bool even = pass->face->own_devices;
    for (size_t r = 1; r < pass->count && pass->rows != NULL; r++)
        even = even && pass->rows[r] == pass->rows[0];
    return even;
}

/* Counts which of the devices, that have all begun at once, was done last. */
static void dp__pass_late(const dp_pass *pass, uint64_t begun_ns, dp__stage *stage)
{
    dp__late_devices *late = pass->ctx->late;
    dp__late_part part = stage == dp__stage_backward ? DP__LATE_BACKWARD : DP__LATE_FORWARD;
    late->last_ns = begun_ns;
    for (size_t r = 0; r < pass->count; r++)
        if (pass->records[r].done_ns > late->last_ns)
            late->last_ns = pass->records[r].done_ns;
    for (size_t r = 0; r < pass->count; r++)
        dp__late_device(late, pass->records[r].call.local_rank, part, begun_ns,
                        pass->records[r].done_ns);
    if (dp__late_count(&late->is))
        dp__late_devices_judge(pass->ctx);
}

/* One record runs on the calling thread; what it calls may use the context. */
static dp_status dp__pass_run(const char *fn, dp_pass *pass, dp__stage *stage)
{
    dp_ctx *ctx = pass->ctx;
    dp__telling telling;
    if (pass->count == 1) {
        const dp__telling *told = NULL;
        if (ctx->info.local_count == 1) /* else this part has the threads of all */
            told = dp__telling_begin(ctx, &telling);
        dp__record_run(pass->records, stage);
        dp__telling_end(told);
        return dp__pass_result(pass);
    }
    dp__runner runner = {pass, pass->records, pass->face->threads, pass->count, stage, NULL};
    DP_TRY(dp__enter(fn, ctx));
    dp_status ordered = dp__replicas_order(pass->face, pass->count, true);
    if (ordered != DP_OK)
        return dp__exit(fn, ctx, ordered);
    int threads = dp__pass_threads(pass);
    if (threads > 1 && !dp__team_enter(ctx->team))
        return dp__exit(fn, ctx, dp_error(DP_ERR_STATE, "another thread is inside this context"));
    dp__meet_begin_pass(pass);
    uint64_t begun_ns = ctx->late != NULL ? dp__os_now_ns() : 0;
    if (threads > 1) {
        runner.telling = dp__telling_begin(ctx, &telling);
        dp__team_run(ctx->team, threads, dp__runner_part,
                     dp__team_job(ctx->team, &runner, sizeof runner));
        dp__telling_end(runner.telling);
        dp__team_exit(ctx->team);
    } else {
        dp__runner_part(0, &runner);
    }
    dp__meet_end_pass(ctx);
    dp_status status = dp__pass_result(pass);
    if (ctx->late != NULL && status == DP_OK && dp__pass_is_even(pass))
        dp__pass_late(pass, begun_ns, stage);
    ordered = dp__replicas_order(pass->face, pass->count, false);
    return dp__exit(fn, ctx, status != DP_OK ? status : ordered);
}

/* ---- cutting arguments ----------------------------------------------------------------------- */

/* Returns true if ranks must compute alike however they are spread over processes. */
static bool dp__has_shards(const dp__face *face)
{
    return face->ctx->config.shards > 0 && face->ops->over_ranks;
}

/* Positional and named arguments are cut together, so that no replica goes without. */
static dp_status dp__cut_make(dp__plan *plan, const dp__invocation *invocation,
                              const dp__face *face, const dp_scatter_config *how)
{
    char where[160];
    bool even = how->cut.split != DP_SPLIT_CHUNK && how->cut.split != DP_SPLIT_SIZES;
    *plan = (dp__plan){.fn = invocation->fn,
                       .ctx = face->ctx,
                       .scope = invocation->scope,
                       .how = how,
                       .roots = {invocation->args, invocation->kwargs}};
    DP_TRY(dp__plan_begin(plan));
    DP_TRY(dp__plan_make(plan, plan->roots, 2));
    if (plan->parts == 0)
        return dp_error(DP_ERR_INVALID, "%s has no groups: there is nothing to run",
                        dp__plan_name(plan, plan->parts_by, where, sizeof where));
    if (plan->rows_of != NULL && plan->groups_of == NULL && even)
        plan->parts = plan->needed > 0 ? plan->needed : 1; /* the last ones have no rows */
    if (dp__is_nothing(invocation->args) && dp__is_nothing(invocation->kwargs) &&
        !dp__has_shards(face))
        plan->parts = 1;
    return DP_OK;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Replica r gets its arguments, its memory, and the thread that is to run it. */
static void dp__pass_record(const dp_pass *pass, const dp__invocation *invocation, size_t r,
                            dp_value args, dp_value kwargs)
{
    const dp__face *face = pass->face;
    dp__record *record = &pass->records[r];
    dp__invocation own = *invocation;
    own.args = args;
    own.kwargs = kwargs;
    if (!pass->alone)
        own.scope = invocation->scope->replicas[face->threads[r]];
    record->memory = &face->replicas[r];
    record->place = dp__layers(face->inner, face->runs);
    dp__call_begin(record, &own, face->runs, dp__replica_device(face, r));
    record->call.replica = r;
    record->call.replica_count = pass->count;
}

static void dp__pass_rows(dp_pass *pass, int64_t *rows)
{
    int64_t first = 0, total = 0;
    pass->rows = rows;
    for (size_t r = 0; rows != NULL && r < pass->count; r++)
        total += rows[r];
    for (size_t r = 0; rows != NULL && r < pass->count; r++) {
        dp_call *call = &pass->records[r].call;
        call->row_first = first;
        call->row_count = rows[r];
        call->row_total = total;
        call->weight = (double)rows[r];
        pass->records[r].absent = rows[r] == 0;
        pass->records[r].leaves_nothing = rows[r] == 0 && dp__has_shards(pass->face);
        first += rows[r];
    }
}

static dp_status dp__pass_cut(const dp__invocation *invocation, dp__face *face, dp_pass **out)
{
    dp__plan plan;
    int64_t *rows = NULL;
    if (face->ops->allows != NULL)
        DP_TRY(face->ops->allows(face, invocation->method));
    DP_TRY(dp__cut_make(&plan, invocation, face, &face->how));
    DP_TRY(dp__pass_make(invocation, face->runs, face, plan.parts, out));
    for (size_t r = 0; r < (*out)->count; r++) {
        dp_value args = dp_none(), kwargs = dp_none();
        DP_TRY(dp__part_make(&plan, invocation->args, r, &args));
        DP_TRY(dp__part_make(&plan, invocation->kwargs, r, &kwargs));
        dp__pass_record(*out, invocation, r, args, kwargs);
    }
    DP_TRY(dp__plan_sizes(&plan, &rows));
    (*out)->part_rows = rows != NULL ? dp__plan_fills(&plan) : 0;
    dp__pass_rows(*out, rows);
    return DP_OK;
}

/* A list that holds, after its last item, how the batch was cut; see dp__pass_outputs. */
static bool dp__is_outputs(dp_value value)
{
    return dp__has_flag(value, DP__LIST_OF_OUTPUTS);
}

/* A list of what the records have, in replica order. */
static dp_status dp__pass_outputs(const dp_pass *pass, dp_value *out)
{
    dp_value *items = dp__scope_bytes(pass->scope, (pass->count + 1) * sizeof *items, 8);
    if (items == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu outputs", pass->count);
    for (size_t r = 0; r < pass->count; r++)
        DP_TRY(dp__real_value(pass, r, pass->records[r].call.out, &items[r]));
    items[pass->count] = dp_opaque(pass->rows); /* for a criterion: how the batch was cut */
    DP_TRY(dp__list_out("the outputs", DP_LIST, items, pass->count, out));
    *out = dp__marked(*out, DP__LIST_OF_OUTPUTS);
    return DP_OK;
}

static dp_status dp__pass_gather(const dp_pass *pass, dp_value list, dp_value *out)
{
    return dp__gather(pass->scope, list, pass->face->output, pass->face->how.cut.dim, out);
}

static dp_status dp__pass_out(const dp_pass *pass, dp_value *out)
{
    dp_value list = dp_none();
    if (pass->alone)
        return dp__real_value(pass, 0, pass->records[0].call.out, out);
    DP_TRY(dp__pass_outputs(pass, &list));
    if (pass->keeps) {
        *out = list;
        return DP_OK;
    }
    return pass->face->ops->join(pass, list, out);
}

static dp_status dp__invoke_face(const dp__invocation *invocation, dp__face *face, dp_value *out,
                                 dp_pass **out_pass)
{
    dp_pass *pass = NULL;
    dp_trace_begin("scatter");
    dp_status status = face->ops->cut(invocation, face, &pass);
    dp_trace_end();
    DP_TRY(status);
    pass->keeps = invocation->keeps || face->ops->join == NULL;
    dp__check_decide(pass);
    DP_TRY(dp__replicas_update(face, pass->count));
    if (face->ops->before != NULL)
        DP_TRY(face->ops->before(pass, invocation));
    *out_pass = pass;
    dp_trace_begin("forward");
    status = dp__pass_run(invocation->fn, pass,
                          invocation->mode != NULL ? dp__stage_step : dp__stage_forward);
    dp_trace_end();
    dp_trace_begin("gather");
    if (status == DP_OK)
        status = dp__pass_out(pass, out);
    dp_trace_end();
    pass->number = dp__pass_number(face->ctx);
    dp__idle_count(face, pass);
    return face->ops->after != NULL ? face->ops->after(pass, invocation, status) : status;
}

/* ==== >>invoking ===============================================================================
   A module runs behind its face, or by itself; a method runs children of its module.            */

static dp_status dp__check_request(const dp__invocation *invocation, const dp_value *out)
{
    const char *fn = invocation->fn;
    DP_TRY(dp__check_pointer(fn, "method", invocation->method));
    DP_TRY(dp__check_scope_of(fn, invocation->scope, invocation->module->ctx));
    DP_TRY(dp__check_args(fn, invocation->args, invocation->kwargs));
    DP_TRY(dp__check_pointer(fn, "out", out));
    if ((unsigned)invocation->config.compute_dtype >= DP_DTYPE_COUNT)
        return dp__check_dtype(fn, invocation->config.compute_dtype);
    return DP_OK;
}

/* A wrapper needs its devices for itself; a module on one device may run beside the others. */
static dp_status dp__check_runs(const char *fn, dp_module *module)
{
    DP_TRY(dp__check_module(fn, module));
    DP_TRY(dp__check_unedited(fn, module));
    bool wide = module->ops->needs_all || (module->face != NULL && module->face->count > 1);
    dp_status status = wide ? dp__check_alone(fn, module->ctx) : dp__check_unshared(fn, module);
    const dp__frame *frame = status != DP_OK ? dp__frame_of(module->ctx, true) : NULL;
    if (frame != NULL && frame->call != NULL)
        return dp_error(status, "%s; dp_call_child runs a child in the replica", dp_last_error());
    return status;
}

/* A module where it is: in the replica of the method that asked for it, or on its own device. */
static dp_status dp__invoke_plain(const dp__invocation *invocation, dp_module *runs, dp_value *out,
                                  dp_pass **out_pass)
{
    dp_ctx *ctx = runs->ctx;
    dp_pass *pass = NULL;
    dp__record *outer = invocation->outer;
    if (outer == NULL) /* else it is ready, and replicas are here at the same time */
        DP_TRY(dp__module_ready(runs));
    if (outer != NULL && runs->mean_grads && invocation->wants_pass)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "'%s' has mean_grads and is run by a method of '%s', whose other gradients "
                        "are not weighted by samples",
                        runs->name, outer->call.module->name);
    DP_TRY(dp__pass_make(invocation, runs, NULL, 1, &pass));
    dp__record *record = pass->records;
    record->memory = outer != NULL ? outer->memory : &runs->memory;
    if (outer != NULL) {
        record->slot_first = outer->slot_first + invocation->child->slot_first;
        record->place = outer->place + invocation->child->place_first +
                        dp__layers(invocation->child->module, runs);
    }
    bool apart = outer != NULL &&
                 outer->memory->grad_groups != NULL; /* in a replica, on its device */
    int rank = apart ? outer->call.local_rank : runs->local_rank;
    dp__call_begin(record, invocation, runs, &ctx->devices[rank]);
    dp__check_decide(pass);
    *out_pass = pass;
    DP_TRY(invocation->mode != NULL ? dp__record_step(record)
                                    : dp__record_forward(record, pass->method));
    *out = record->call.out;
    pass->number = dp__pass_number(ctx);
    return DP_OK;
}

/* The module of a request behind a face, or by itself if the face is NULL. */
static dp_status dp__invoke_by(const dp__invocation *invocation, dp__face *face, dp_value *out,
                               dp_pass **out_pass)
{
    dp_module *module = invocation->module;
    dp_value value = dp_none();
    dp_pass *pass = NULL;
    if (out_pass != NULL)
        *out_pass = NULL;
    dp_status status = face != NULL
                           ? dp__invoke_face(invocation, face, &value, &pass)
                           : dp__invoke_plain(invocation, dp__runs_of(module), &value, &pass);
    if (status == DP_OK) {
        *out = value;
        if (out_pass != NULL && pass->records[0].call.grad_enabled)
            *out_pass = pass;
    }
    return dp__leave(invocation->fn, module->ctx, status);
}

static dp_status dp__invoke(const dp__invocation *invocation, dp_value *out, dp_pass **out_pass)
{
    DP_TRY(dp__check_request(invocation, out));
    bool inside = invocation->outer != NULL && /* a wrapper has this replica's device alone */
                  dp__frame_of(invocation->module->ctx, true) != NULL;
    return dp__invoke_by(invocation, inside ? NULL : invocation->module->face, out, out_pass);
}

DP_API dp_status dp_invoke(dp_module *module, dp_scope *scope, const char *method, dp_value args,
                           dp_value kwargs, const dp_pass_config *config, dp_value *out,
                           dp_pass **out_pass)
{
    static const dp_pass_config zero;
    DP_TRY(dp__check_runs(__func__, module));
    dp__invocation invocation = {.fn = __func__,
                                 .module = module,
                                 .method = method,
                                 .scope = scope,
                                 .args = args,
                                 .kwargs = kwargs,
                                 .config = config != NULL ? *config : zero,
                                 .wants_pass = out_pass != NULL};
    return dp__invoke(&invocation, out, out_pass);
}

/* `name` NULL: what the module wraps, which is its last child. */
static const dp__child *dp__child_find(const dp_module *module, const char *name)
{
    if (name == NULL)
        return module->wraps != NULL ? &module->children[module->child_count - 1] : NULL;
    size_t at = 0;
    bool found = dp__index_find(&module->child_names, name, strlen(name), &at);
    return found ? &module->children[at] : NULL;
}

DP_API dp_status dp_call_child(dp_call *call, const char *child, const char *method, dp_value args,
                               dp_value kwargs, dp_value *out, dp_pass **out_pass)
{
    DP_TRY(dp__check_call(__func__, call));
    const dp__child *found = dp__child_find(call->module, child);
    if (found == NULL && child == NULL)
        return dp_error(DP_ERR_INVALID, "%s: child is NULL, and '%s' wraps nothing", __func__,
                        call->module->name);
    if (found == NULL) {
        dp__names names = {.count = 0};
        for (size_t i = 0; i < call->module->child_count; i++)
            dp__names_add(&names, call->module->children[i].module->name);
        return dp__no_such(DP_ERR_INVALID, &names, "%s: '%s' has no child '%s'", __func__,
                           call->module->name, child);
    }
    dp__invocation invocation = {
        .fn = __func__,
        .module = dp__child_through(call->record->pass->module, call->module,
                                    (size_t)(found - call->module->children)),
        .method = method,
        .scope = call->scope,
        .args = args,
        .kwargs = kwargs,
        .config = {.no_sync = call->record->pass->no_sync, .compute_dtype = call->compute_dtype},
        .wants_pass = out_pass != NULL,
        .outer = call->record,
        .child = found};
    return dp__invoke(&invocation, out, out_pass);
}

/* ==== >>outgrads =================================================================================
   Outputs that were gathered have gradients that are cut: every replica gets the gradient of its
   own output. Numbers and none can stand for tensors anywhere.                                  */

/* How a gradient is compared with what forward returned, and cut as that was gathered. */
typedef struct dp__grad_cut {
    const dp_pass *pass;
    dp_scope *scope;
    dp__device *device;  /* of the replica that gets it */
    size_t first;        /* the replica that the first output is of */
    size_t count, index; /* among the outputs that were gathered; else 1 and 0 */
    bool gathered;
    int dim;
} dp__grad_cut;

/* An output without its padding. */
static dp_tensor dp__grad_seen(const dp__grad_cut *cut, const dp_value *outs, size_t i)
{
    return dp__real_part(cut->pass, cut->first + i, outs[i].as.t);
}

/* The gathered tensor that replica `index` put rows into; *out_first: the first of its rows. */
static dp_tensor dp__grad_whole(const dp__grad_cut *cut, const dp_value *outs, int dim,
                                int64_t *out_first)
{
    int64_t first = 0, total = 0;
    dp_tensor whole = *outs[cut->index].as.t;
    for (size_t i = 0; i < cut->count; i++) {
        int64_t rows = whole.ndim > 0 ? dp__grad_seen(cut, outs, i).shape[dim] : 1;
        first += i < cut->index ? rows : 0;
        total += rows;
    }
    whole.ndim = whole.ndim > 0 ? whole.ndim : 1; /* 0-dim outputs were gathered as a vector */
    whole.shape[dim] = total;
    *out_first = first;
    return whole;
}

static dp_status dp__grad_tensor(const dp__grad_cut *cut, const dp_tensor *grad,
                                 const dp_value *outs, const dp__path *path, dp_value *out)
{
    char a[96], b[96];
    int64_t first = 0;
    const dp_tensor *made = outs[cut->index].as.t;
    const dp_tensor seen = dp__grad_seen(cut, outs, cut->index), *own = &seen;
    int dim = cut->dim < 0 ? cut->dim + (own->ndim > 0 ? own->ndim : 1) : cut->dim;
    dp_tensor part = *grad, whole = cut->gathered ? dp__grad_whole(cut, outs, dim, &first) : *own;
    if (grad->dtype != own->dtype || !dp__same_shape(grad, &whole))
        return dp__path_error(DP_ERR_MISMATCH, path,
                              " of the gradient is %s (%s), of the output %s "
                              "(%s)",
                              dp__dtype_names[grad->dtype], dp__shape_text(grad, a, sizeof a),
                              dp__dtype_names[own->dtype], dp__shape_text(&whole, b, sizeof b));
    if (dp__device_of(cut->scope->ctx, grad->device) == NULL)
        return dp__path_error(DP_ERR_INVALID, path,
                              " of the gradient is on no device of this "
                              "context");
    if (cut->gathered)
        dp__narrow_here(&part, dim, first, own->ndim > 0 ? own->shape[dim] : 1);
    part.ndim = own->ndim;
    if (!dp__same_shape(own, made)) {
        dp_tensor rows, from = part;
        DP_TRY(dp__padded_grad(cut->pass, cut->first + cut->index, made, &part, &rows));
        DP_TRY(dp__copy_tensor(cut->pass->ctx, &rows, &from, NULL));
    }
    DP_TRY(dp__place(cut->scope, &part, cut->device));
    return dp__of(cut->scope, &part, out);
}

static dp_status dp__grad_part(const dp__grad_cut *cut, dp_value grad, const dp_value *outs,
                               const dp__path *path, dp_value *out);

static dp_status dp__grad_sequence(const dp__grad_cut *cut, dp_value grad, const dp_value *outs,
                                   const dp__path *path, dp_value *out)
{
    char text[32];
    dp_value own = outs[cut->index];
    dp_value *column = dp__scope_bytes(cut->scope, cut->count * sizeof *column, 8);
    dp_value *items = dp__scope_bytes(cut->scope, grad.count * sizeof *items, 8);
    if (column == NULL || items == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a gradient");
    if (!dp__is_sequence(own) || own.count != grad.count)
        return dp__path_error(DP_ERR_MISMATCH, path,
                              " of the gradient has %u entr%s, the output is %s",
                              (unsigned)grad.count, grad.count == 1 ? "y" : "ies",
                              dp__value_text(own, text, sizeof text));
    for (uint32_t i = 0; i < grad.count; i++) {
        for (size_t k = 0; k < cut->count; k++)
            column[k] = outs[k].as.items[i];
        DP_TRY(dp__grad_part(cut, grad.as.items[i], column, &(dp__path){path, NULL, i}, &items[i]));
    }
    *out = dp__sequence((dp_kind)grad.kind, items, grad.count, grad.depth);
    return DP_OK;
}

static dp_status dp__grad_dict(const dp__grad_cut *cut, dp_value grad, const dp_value *outs,
                               const dp__path *path, dp_value *out)
{
    dp_value *column = dp__scope_bytes(cut->scope, cut->count * sizeof *column, 8);
    dp_pair *pairs = dp__scope_bytes(cut->scope, grad.count * sizeof *pairs, 8);
    dp__finder *finders = dp__finders(cut->scope, outs, cut->count);
    if (column == NULL || pairs == NULL || finders == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a gradient");
    for (uint32_t i = 0; i < grad.count; i++) {
        const char *key = grad.as.pairs[i].key;
        for (size_t k = 0; k < cut->count; k++) {
            const dp_pair *found = NULL;
            if (outs[k].kind == DP_DICT)
                DP_TRY(dp__finder_find(&finders[k], cut->scope, key, &found));
            if (found == NULL) {
                dp__names names = dp__keys_of(outs[k]);
                char where[160];
                return dp__no_such(DP_ERR_MISMATCH, &names,
                                   "%s of the gradient has key '%s', the output has not",
                                   dp__path_text(path, where, sizeof where), key);
            }
            column[k] = found->value;
        }
        pairs[i].key = key;
        DP_TRY(dp__grad_part(cut, grad.as.pairs[i].value, column, &(dp__path){path, key, 0},
                             &pairs[i].value));
    }
    *out = dp__dict_of(pairs, grad.count, grad.depth);
    return DP_OK;
}

/* `outs` are what the replicas put there, of one structure if they were gathered. */
static dp_status dp__grad_part(const dp__grad_cut *cut, dp_value grad, const dp_value *outs,
                               const dp__path *path, dp_value *out)
{
    *out = grad;
    switch ((dp_kind)grad.kind) {
    case DP_NONE:
        return DP_OK;
    case DP_INT:
    case DP_FLOAT:
        return dp__has_padding(cut->pass, cut->first + cut->index)
                   ? dp__number_grads(cut->pass, cut->first + cut->index, outs[cut->index],
                                      grad.kind == DP_INT ? (double)grad.as.i : grad.as.f, out)
                   : DP_OK;
    case DP_TENSOR:
        if (outs[cut->index].kind == DP_TENSOR)
            return dp__grad_tensor(cut, grad.as.t, outs, path, out);
        break;
    case DP_LIST:
    case DP_TUPLE:
        return dp__grad_sequence(cut, grad, outs, path, out);
    case DP_DICT:
        return dp__grad_dict(cut, grad, outs, path, out);
    case DP_ERROR:
    case DP_BOOLEAN:
    case DP_STRING:
    case DP_CONTAINER:
    case DP_OPAQUE:
        break;
    }
    return dp__path_error(DP_ERR_MISMATCH, path, " of the gradient is %s, of the output %s",
                          dp__a_kind(grad.kind), dp__a_kind(outs[cut->index].kind));
}

static bool dp__is_number(dp_value value)
{
    return value.kind == DP_INT || value.kind == DP_FLOAT || value.kind == DP_NONE;
}

/* Put replica r's gradient into its call: its rows of a gathered output, else all of it. */
static dp_status dp__grad_give(const dp_pass *pass, size_t r, dp_value grad, const dp_value *outs,
                               const dp__path *path)
{
    dp_call *call = &pass->records[r].call;
    const dp__face_ops *ops = pass->alone ? NULL : pass->face->ops;
    bool gathered = ops != NULL && !pass->keeps && ops->out_grad == NULL;
    const dp__grad_cut cut = {.pass = pass,
                              .scope = pass->scope,
                              .device = dp__call_device(call),
                              .first = gathered ? 0 : r,
                              .count = gathered ? pass->count : 1,
                              .index = gathered ? r : 0,
                              .gathered = gathered,
                              .dim = gathered ? pass->face->how.cut.dim : 0};
    DP_TRY(dp__grad_part(&cut, grad, gathered ? outs : outs + r, path, &call->grad));
    return ops != NULL && ops->out_grad != NULL ? ops->out_grad(pass, r, call->grad, &call->grad)
                                                : DP_OK;
}

/* Of the mean over what a method returned: each element has its share of 1. */
static dp_status dp__mean_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    const dp__unpadder *own = (const dp__unpadder *)mapper;
    bool tensor = value.kind == DP_TENSOR, number = value.kind == DP_INT || value.kind == DP_FLOAT;
    int64_t count = number;
    if (tensor) {
        const dp_tensor rows = dp__real_part(own->pass, own->r, value.as.t);
        count = dp__count(&rows);
    }
    *out = count > 0 ? dp_float(1 / (double)count) : dp_none();
    return tensor && count > 0
               ? dp__number_grad(own->pass, own->r, value.as.t, 1 / (double)count, out)
               : DP_OK;
}

/* With mean_grads the number is for the library. */
static dp_status dp__means_give(const dp_pass *pass)
{
    for (size_t r = 0; r < pass->count; r++) {
        dp__unpadder own = {
            {.scope = pass->scope, .leaf = dp__mean_leaf, .plain = true}, pass, r, 0, false};
        DP_TRY(dp__map(&own.mapper, pass->records[r].call.out, &pass->records[r].call.grad));
    }
    return DP_OK;
}

/* Put what dp_backward was given into the calls; if it does not fit, nothing else has happened. */
static dp_status dp__grads_give(const dp_pass *pass, dp_value grad)
{
    bool kept = pass->keeps && !pass->alone, list = kept && dp__is_sequence(grad);
    if (pass->runs->mean_grads)
        return dp__means_give(pass);
    dp_value *outs = dp__scope_bytes(pass->scope, pass->count * sizeof *outs, 8);
    if (outs == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a gradient");
    if (kept && !list && !dp__is_number(grad))
        return dp_error(DP_ERR_MISMATCH,
                        "the gradient is %s: outputs were not gathered, so it must be a list with "
                        "one entry per replica",
                        dp__a_kind(grad.kind));
    if (list && grad.count != pass->count)
        return dp_error(DP_ERR_MISMATCH, "the gradient is a list of %u, the pass has %zu replica%s",
                        (unsigned)grad.count, pass->count, dp__s(pass->count));
    for (size_t r = 0; r < pass->count; r++)
        outs[r] = pass->records[r].call.out;
    for (size_t r = 0; r < pass->count; r++) {
        const dp__path place = {NULL, NULL, r};
        DP_TRY(dp__grad_give(pass, r, list ? grad.as.items[r] : grad, outs, list ? &place : NULL));
    }
    return DP_OK;
}

/* ==== >>backward ===============================================================================
   What a pass did goes back: replicas run, gradients of inputs are joined, those of parameters
   summed.                                                                                        */

typedef struct dp__back_gatherer {
    dp__gatherer gatherer; /* beside it are the inputs as they came, and as each replica had them */
    const dp_pass *pass;
} dp__back_gatherer;

/* A gradient goes where its input was. That of a single replica is moved, not joined. */
static dp_status dp__back_leaf(dp__zipper *zipper, const dp_value *values, const dp__path *path,
                               dp_value *out)
{
    dp__back_gatherer *back = (dp__back_gatherer *)zipper;
    dp_value input = zipper->beside[0];
    back->gatherer.target = input.kind == DP_TENSOR
                                ? dp__device_of(back->gatherer.ctx, input.as.t->device)
                                : dp__call_device(&back->pass->records[0].call);
    dp_value *real = dp__values(zipper->scope, zipper->count);
    if (real == NULL)
        return DP_ERR_NO_MEMORY;
    for (size_t r = 0; r < zipper->count; r++)
        DP_TRY(dp__real_value(back->pass, r, values[r], &real[r]));
    if (zipper->count > 1 || values[0].kind != DP_TENSOR)
        return dp__gather_leaf(zipper, real, path, out);
    dp_tensor moved = *real[0].as.t;
    DP_TRY(dp__place(zipper->scope, &moved, back->gatherer.target));
    return dp__of(zipper->scope, &moved, out);
}

static dp_status dp__none_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    (void)mapper;
    *out = value.kind == DP_TENSOR ? dp_none() : value;
    return DP_OK;
}

/* What replica r, which gave none, would have given where another one gave `model`: zeros of the
   size of its own input, in the same structure. */
static dp_status dp__back_zeros(const dp__back_gatherer *back, size_t r, dp_value model,
                                dp_value *out)
{
    dp_scope *scope = back->pass->scope;
    dp__mapper mapper = {.scope = scope, .leaf = dp__none_leaf};
    const dp__device *device = dp__call_device(&back->pass->records[r].call);
    dp_value input = back->gatherer.zipper.beside[1 + r];
    dp_tensor zeros;
    if (model.kind != DP_TENSOR || input.kind != DP_TENSOR)
        return dp__map(&mapper, model, out);
    DP_TRY(dp__tensor_make(scope, device, (dp_dtype)model.as.t->dtype, input.as.t->ndim,
                           input.as.t->shape, &zeros));
    DP_TRY(dp__fill_tensor(scope->ctx, device, &zeros, 0));
    return dp__of(scope, &zeros, out);
}

static dp_status dp__back_fill(dp__zipper *zipper, dp_value *values)
{
    dp_value model = dp_none();
    for (size_t r = 0; r < zipper->count && model.kind == DP_NONE; r++)
        model = values[r];
    for (size_t r = 0; r < zipper->count && model.kind != DP_NONE; r++)
        if (values[r].kind == DP_NONE)
            DP_TRY(dp__back_zeros((dp__back_gatherer *)zipper, r, model, &values[r]));
    return DP_OK;
}

/* The replicas' gradients, all of one structure, become that of what was cut; own: what each
   had. */
static dp_status dp__inputs_gather(const dp_pass *pass, dp_value inputs, const dp_value *own,
                                   dp_value *grads, dp_value *out)
{
    dp_value *beside = dp__values(pass->scope, pass->count + 1);
    if (beside == NULL)
        return DP_ERR_NO_MEMORY;
    beside[0] = inputs;
    memcpy(beside + 1, own, pass->count * sizeof *own);
    dp__back_gatherer back = {
        .gatherer = {.zipper = {.scope = pass->scope,
                                .count = pass->count,
                                .noun = "replica",
                                .beside = beside,
                                .beside_count = pass->count + 1,
                                .leaf = dp__back_leaf,
                                .fill = dp__back_fill},
                     .ctx = pass->ctx,
                     .dim = pass->face->how.cut.dim,
                     .parts = dp__scope_bytes(pass->scope, pass->count * sizeof(dp_tensor *), 8)},
        .pass = pass};
    if (back.gatherer.parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for the gradients of inputs");
    DP_TRY(dp__back_fill(&back.gatherer.zipper, grads));
    return dp__zip(&back.gatherer.zipper, grads, NULL, out);
}

static dp_status dp__input_grad(const dp_pass *pass, dp_input_grad *out)
{
    dp_value *args = dp__values(pass->scope, pass->count),
             *kwargs = dp__values(pass->scope, pass->count);
    dp_value *own_args = dp__values(pass->scope, pass->count),
             *own_kwargs = dp__values(pass->scope, pass->count);
    if (args == NULL || kwargs == NULL || own_args == NULL || own_kwargs == NULL)
        return DP_ERR_NO_MEMORY;
    for (size_t r = 0; r < pass->count; r++) {
        const dp_call *call = &pass->records[r].call;
        args[r] = call->args_grad;
        kwargs[r] = call->kwargs_grad;
        own_args[r] = call->args;
        own_kwargs[r] = call->kwargs;
    }
    DP_TRY(dp__inputs_gather(pass, pass->kwargs, own_kwargs, kwargs, &out->kwargs));
    return pass->face->ops->args_grad != NULL
               ? pass->face->ops->args_grad(pass, own_args, args, &out->args)
               : dp__inputs_gather(pass, pass->args, own_args, args, &out->args);
}

/* ---- the pass -------------------------------------------------------------------------------- */

/* Backward in all replicas, summed into the original. */
static dp_status dp__backward_summed(const char *fn, dp_pass *pass)
{
    dp_scope *temp = NULL;
    for (size_t r = 0; r < pass->count; r++)
        pass->face->replicas[r].pass++;
    dp_status status = dp__pass_run(fn, pass, dp__stage_backward);
    if (status == DP_OK)
        status = dp__temp_begin(pass->ctx, &temp);
    dp_trace_begin("sum of gradients");
    if (status == DP_OK && pass->count > 1)
        status = dp__replicas_reduce(pass->face, temp, pass->count);
    dp_trace_end();
    return dp__torn_by(pass->runs, dp__temp_end(temp, NULL, status));
}

static dp_status dp__backward_face(const char *fn, dp_pass *pass, dp_input_grad *out)
{
    for (size_t r = 0; r < pass->count; r++)
        pass->records[r].call.input_grad_wanted = out != NULL;
    DP_TRY(pass->face->ops->backward(fn, pass));
    return out != NULL ? dp__input_grad(pass, out) : DP_OK;
}

static dp_status dp__backward_plain(dp_pass *pass, dp_input_grad *out)
{
    dp__record *record = pass->records;
    dp_call *call = &record->call;
    call->input_grad_wanted = out != NULL;
    dp_status status = dp__record_grads(record);
    if (status == DP_OK && record->pass->checked)
        status = dp__check_grads(record);
    DP_TRY(record->outer == NULL ? dp__torn_by(pass->runs, status) : status);
    if (out != NULL)
        *out = (dp_input_grad){call->args_grad, call->kwargs_grad};
    return DP_OK;
}

static dp_status dp__pass_replay(const char *fn, const dp_pass *pass);

/* The gradients of outputs are in the calls already. */
static dp_status dp__backward_run(const char *fn, dp_pass *pass, dp_input_grad *out)
{
    if (pass->records[0].outer == NULL)
        DP_TRY(dp__grads_claim(pass->module));
    dp_trace_begin("backward");
    dp_status status = pass->face != NULL ? dp__backward_face(fn, pass, out)
                                          : dp__backward_plain(pass, out);
    dp_trace_end();
    bool looks = pass->ctx->checks.every > 0 || pass->ctx->info.process_count > 1;
    if (status != DP_OK || !looks || !dp__is_asked(pass))
        return status;
    status = dp__check_after(pass);
    if (status == DP_OK && pass->checked && !dp__ops(pass->face)->over_ranks)
        status = dp__pass_replay(fn, pass);
    return dp__torn_by(pass->runs, status);
}

/* A pass that dp_call_child made in a replica goes backward in that replica's backward, where the
   gradients of all are summed. */
static dp_status dp__check_turn(const char *fn, const dp_pass *pass)
{
    const dp__record *record = dp__outermost(pass->records);
    const dp__frame *frame = dp__frame_of(pass->ctx, true);
    if (pass->count > 1)
        return dp__check_alone(fn, pass->ctx);
    if (record->pass->count == 1)
        return dp__check_runs(fn, pass->module);
    if (frame == NULL || frame->call != &record->call || !record->in_backward)
        return dp_error(DP_ERR_STATE,
                        "%s: this pass of '%s' is part of replica %zu of '%s': call dp_backward in "
                        "that one's backward",
                        fn, pass->runs->name, record->call.replica, record->call.module->name);
    return DP_OK;
}

DP__UNCHECKED static bool dp__is_pass(const dp_pass *pass) /* as dp__is_call */
{
    return pass->head.magic == DP__PASS_LIVE;
}

static dp_status dp__check_pass(const char *fn, const dp_pass *pass)
{
    if (pass == NULL)
        return dp_error(DP_ERR_INVALID,
                        "%s: pass is NULL: the forward was asked for none, or ran "
                        "without gradients",
                        fn);
    if (!dp__is_pass(pass))
        return dp_error(DP_ERR_STATE, "%s: this is not a pass, or its scope has ended", fn);
    DP_TRY(dp__check_ctx(fn, pass->ctx));
    if (pass->module->magic != DP__MODULE_LIVE || pass->module->serial != pass->serial)
        return dp_error(DP_ERR_STATE, "%s: the module of this pass was destroyed", fn);
    DP_TRY(dp__check_turn(fn, pass));
    if (pass->used)
        return dp_error(DP_ERR_STATE, "%s: this pass of '%s' had its backward already", fn,
                        pass->runs->name);
    if (pass->backward == NULL)
        return dp__no_method(DP_ERR_UNSUPPORTED, fn, pass->runs, "backward");
    return DP_OK;
}

/* The parameters that the forward has read are those that backward reads: on devices with memory of
   their own the other replicas still have these. */
static dp_status dp__check_unwritten(const dp_pass *pass)
{
    const dp_module *runs = pass->runs;
    if (atomic_load_explicit(&pass->ctx->written, memory_order_relaxed) < pass->number)
        return DP_OK;
    for (size_t home = 0; home < runs->listed_count; home++)
        if (dp__param_at(runs, home)->written >= pass->number)
            return dp_error(DP_ERR_STATE,
                            "'%s' of '%s' was edited after the forward, but this backward needs "
                            "its old numbers",
                            dp__name_at(runs, home), runs->name);
    return DP_OK;
}

/* From here on the pass is used. With mean_grads the number is for the library: backward gets the
   gradient of its own mean. */
static dp_status dp__backward_begin(dp_pass *pass, dp_value grad)
{
    if (pass->runs->mean_grads && !dp__is_number(grad))
        return dp_error(DP_ERR_INVALID, "'%s' has mean_grads: its gradient is a number, not %s",
                        pass->runs->name, dp__a_kind(grad.kind));
    bool inner = pass->face == NULL && pass->records[0].outer != NULL; /* whose tree has begun */
    DP_TRY(dp__check_unwritten(pass));
    if (pass->ctx->checks.every > 0)
        DP_TRY(dp__check_before(pass));
    if (!inner)
        DP_TRY(dp__grads_begin(pass->runs, pass->no_sync, &pass->adds));
    pass->used = true;
    if (pass->runs->mean_grads)
        pass->factor = grad.kind == DP_FLOAT ? grad.as.f
                       : grad.kind == DP_INT ? (double)grad.as.i
                                             : 0;
    return DP_OK;
}

/* What fails here while other processes are in the same backward fails there too, and the pass is
   over. */
static dp_status dp__backward_end(const char *fn, dp_pass *pass, dp_status status)
{
    if (status != DP_OK && dp__is_joint(pass->face, pass->synced))
        pass->used = true;
    const dp__face_ops *ops = dp__ops(pass->face);
    return ops->end != NULL ? ops->end(fn, pass->face, pass->synced, status) : status;
}

DP_API dp_status dp_backward(dp_pass *pass, dp_value grad, dp_input_grad *out)
{
    dp_input_grad inputs = {dp_none(), dp_none()};
    DP_TRY(dp__check_pass(__func__, pass));
    DP_TRY(dp__check_unedited(__func__, pass->module));
    if (dp__ops(pass->face)->begin != NULL)
        pass->face->ops->begin(pass->face, true);
    dp_status status = dp__check_value(__func__, "grad", grad);
    pass->scaled = grad.kind == DP_FLOAT && grad.as.f > 1;
    if (status == DP_OK)
        status = dp__grads_give(pass, grad);
    if (status == DP_OK)
        status = dp__backward_begin(pass, grad);
    if (status == DP_OK)
        status = dp__backward_run(__func__, pass, out != NULL ? &inputs : NULL);
    status = dp__backward_end(__func__, pass, status);
    if (status == DP_OK && out != NULL)
        *out = inputs;
    if (status == DP_OK)
        dp__step_count(pass->ctx);
    return dp__leave(__func__, pass->ctx, status);
}

/* ==== >>replay =================================================================================
   A pass that is checked has its methods run again, one replica at a time: what they do alone shows
   what they did to each other, and gradients that begin as NaN show what is not added to. Nothing
   of it stays: buffers and gradients are put back. A method that talks to other replicas or ranks
   cannot run by itself; and of one that gives other numbers each time nothing can be said.       */

typedef struct dp__replay {
    const char *fn;
    const dp_pass *pass;     /* what has run */
    dp_pass *shadow;         /* what runs again, in a scope of its own */
    size_t which;            /* the replica that does, */
    bool backward;           /* and what */
    double fill;             /* gradients begin as that */
    dp_value *args, *kwargs; /* of each replica, before its data are preprocessed */
    dp_tensor *made;         /* what they are then, range by range */
    size_t home;             /* the parameter whose gradient was set; or DP__NO_SLOT */
    dp__bad set;             /* where, and to what */
} dp__replay;

static dp_status dp__replay_fill(const dp__record *record, double number)
{
    for (size_t i = 0; i < dp__record_range_count(record, DP__GRADS); i++) {
        uint64_t bits = 0;
        const dp_tensor range = dp__record_range(record, DP__GRADS, i);
        DP_TRY(dp__number_bits(record->call.ctx, "a check", dp_float(number), (dp_dtype)range.dtype,
                               &bits));
        DP_TRY(dp__fill_tensor(record->call.ctx, dp__call_device(&record->call), &range, bits));
    }
    return DP_OK;
}

/* Looks for an element that was NaN and is not: an addition would have left it so. */
static dp_status dp__replay_look(const dp__record *record, dp__replay *replay)
{
    const dp_module *runs = record->pass->runs;
    for (size_t home = 0; home < runs->listed_count && replay->home == DP__NO_SLOT; home++) {
        const dp__param *root = dp__param_at(runs, home);
        dp_tensor grad = root->data;
        if (!dp__is_of_sort(root, DP__GRADS) || !dp__is_float((dp_dtype)grad.dtype))
            continue;
        grad.data = *record->memory->grad[runs->listed[home]];
        grad.device = record->call.replica > 0 ? record->call.device : grad.device;
        DP_TRY(dp__number_find(record->call.ctx, &grad, true, &replay->set));
        replay->home = replay->set.at >= 0 ? home : DP__NO_SLOT;
    }
    return DP_OK;
}

static dp_status dp__replay_backward(dp__record *record, dp__replay *replay)
{
    dp_tensor *kept = NULL;
    DP_TRY(dp__record_keep(record, DP__GRADS, &kept));
    dp_status status = dp__replay_fill(record, replay->fill);
    if (status == DP_OK)
        status = dp__record_backward(record);
    if (status == DP_OK)
        status = dp__record_keep(record, DP__GRADS, &replay->made);
    if (status == DP_OK && isnan(replay->fill))
        status = dp__replay_look(record, replay);
    dp_status back = dp__record_put_back(record, DP__GRADS, kept);
    return status != DP_OK ? status : back;
}

/* Also if a method fails, its buffers are as before. */
static dp_status dp__replay_record(dp__record *record, dp__replay *replay)
{
    dp_tensor *buffers = NULL;
    DP_TRY(dp__record_keep(record, DP__BUFFERS, &buffers));
    dp__of_thread.replays = true;
    dp_status status = replay->backward ? dp__replay_backward(record, replay)
                       : record->pass->mode != NULL
                           ? dp__record_step(record)
                           : dp__record_forward(record, record->pass->method);
    dp__of_thread.replays = false;
    dp_status back = dp__record_put_back(record, DP__BUFFERS, buffers);
    return status != DP_OK ? status : back;
}

static void dp__stage_replay(dp__record *record)
{
    dp__replay *replay = record->pass->replay;
    if (record->call.replica == replay->which)
        record->status = dp__replay_record(record, replay);
}

/* Runs a forward or a backward of one replica, which leaves nothing behind. */
static dp_status dp__replay_run(dp__replay *replay, size_t which, bool backward)
{
    dp_pass *shadow = replay->shadow;
    dp_call *call = &shadow->records[which].call;
    replay->which = which;
    replay->backward = backward;
    if (backward) {
        call->grad = replay->pass->records[which].call.grad;
        call->input_grad_wanted = replay->pass->records[which].call.input_grad_wanted;
    } else {
        call->args = replay->args[which];
        call->kwargs = replay->kwargs[which];
        call->saved = NULL;
    }
    return dp__pass_run(replay->fn, shadow, dp__stage_replay);
}

/* Makes a pass of the same rows for the same replicas. */
static dp_status dp__replay_make(dp__replay *replay, dp_scope *temp)
{
    const dp_pass *pass = replay->pass;
    dp__invocation invocation = {.fn = replay->fn,
                                 .module = pass->module,
                                 .method = pass->method->name,
                                 .scope = temp,
                                 .args = pass->args,
                                 .kwargs = pass->kwargs,
                                 .config.compute_dtype = pass->records[0].call.compute_dtype,
                                 .wants_pass = true,
                                 .mode = pass->mode};
    if (pass->face != NULL) {
        DP_TRY(
            pass->face->ops->cut(&invocation, (dp__face *)(uintptr_t)pass->face, &replay->shadow));
    } else {
        DP_TRY(dp__pass_make(&invocation, pass->runs, NULL, 1, &replay->shadow));
        replay->shadow->records[0].memory = &pass->runs->memory;
        dp__call_begin(replay->shadow->records, &invocation, pass->runs,
                       &pass->ctx->devices[pass->runs->local_rank]);
    }
    replay->args = dp__values(temp, pass->count);
    replay->kwargs = dp__values(temp, pass->count);
    if (replay->args == NULL || replay->kwargs == NULL)
        return DP_ERR_NO_MEMORY;
    for (size_t r = 0; r < replay->shadow->count; r++) {
        replay->args[r] = replay->shadow->records[r].call.args;
        replay->kwargs[r] = replay->shadow->records[r].call.kwargs;
        replay->shadow->records[r].leaves_nothing = true;
    }
    replay->shadow->replay = replay;
    return DP_OK;
}

/* Hashes the gradients that the first replica makes after its forward, or after those of the first
   two. */
static dp_status dp__replay_grads(dp__replay *replay, size_t forwards, uint64_t *out)
{
    *out = dp__hash_first;
    for (size_t r = 0; r < forwards; r++)
        DP_TRY(dp__replay_run(replay, r, false));
    DP_TRY(dp__replay_run(replay, 0, true));
    size_t count = dp__record_range_count(replay->shadow->records, DP__GRADS);
    for (size_t i = 0; i < count; i++) {
        uint64_t hash = 0;
        DP_TRY(dp__numbers_hash(replay->pass->ctx, &replay->made[i], &hash));
        *out = dp__hash(*out, &hash, sizeof hash);
    }
    return DP_OK;
}

/* Finds a gradient that is set. */
static dp_status dp__replay_adds(dp__replay *replay)
{
    char where[128];
    uint64_t unused;
    const dp_module *runs = replay->pass->runs;
    replay->fill = (double)NAN;
    replay->home = DP__NO_SLOT;
    DP_TRY(dp__replay_grads(replay, 1, &unused));
    if (replay->home == DP__NO_SLOT)
        return DP_OK;
    return dp__finding(
        replay->pass->ctx,
        "the backward of '%s' sets the gradient of '%s', to %s, and has to add to "
        "it (+=), as other passes do, and other uses of the parameter; for one that "
        "sets all there is dp_module_config.mean_grads",
        runs->name, dp__name_at(runs, replay->home),
        dp__bad_text(&dp__param_at(runs, replay->home)->data, replay->set, where, sizeof where));
}

/* Finds what a forward keeps for its backward where another replica's does, too. */
static dp_status dp__replay_keeps(dp__replay *replay)
{
    uint64_t alone, after_other, again;
    replay->fill = 0;
    DP_TRY(dp__replay_grads(replay, 1, &alone));
    DP_TRY(dp__replay_grads(replay, 2, &after_other));
    if (alone == after_other)
        return DP_OK;
    DP_TRY(dp__replay_grads(replay, 1, &again));
    if (alone != again)
        return DP_OK;
    return dp__finding(replay->pass->ctx,
                       "the backward of replica 0 of '%s' gives other gradients if the forward of "
                       "replica 1 has run before it: both keep something in the same memory, such "
                       "as a static variable; call->saved and replica_create are for that",
                       replay->pass->runs->name);
}

/* Finds a forward that has given something else beside the others than it gives alone. Buffers are
   others by now. */
static dp_status dp__replay_beside(dp__replay *replay)
{
    const dp_pass *pass = replay->pass;
    uint64_t beside, alone, again;
    bool buffers = pass->runs->layouts[DP__BUFFERS].range_count > 0;
    for (size_t r = 0; r < pass->count && !buffers; r++) {
        const dp_value *out = &replay->shadow->records[r].call.out;
        DP_TRY(dp__data_hash(pass->ctx, pass->records[r].call.out, &beside));
        DP_TRY(dp__replay_run(replay, r, false));
        DP_TRY(dp__data_hash(pass->ctx, *out, &alone));
        if (alone == beside)
            continue;
        DP_TRY(dp__replay_run(replay, r, false));
        DP_TRY(dp__data_hash(pass->ctx, *out, &again));
        if (alone != again)
            return DP_OK;
        return dp__finding(pass->ctx,
                           "the forward of replica %zu of '%s' has returned something else beside "
                           "the other replicas than it returns alone: they write to the same "
                           "memory, such as a static variable",
                           r, pass->runs->name);
    }
    return DP_OK;
}

static dp_status dp__replay_all(dp__replay *replay)
{
    uint64_t before, after;
    const dp_pass *pass = replay->pass;
    DP_TRY(dp__batch_hash(pass, &before));
    DP_TRY(dp__replay_adds(replay));
    DP_TRY(dp__batch_hash(pass, &after));
    if (before != after)
        return dp__finding(pass->ctx,
                           "the methods of '%s' write to the batch that they are given: the next "
                           "pass gets other rows",
                           pass->runs->name);
    if (pass->count < 2)
        return DP_OK;
    DP_TRY(dp__replay_keeps(replay));
    return dp__replay_beside(replay);
}

/* Returns true if a backward would have no gradient to add to. */
static bool dp__learns_nothing(const dp_module *module)
{
    bool learns = false;
    for (size_t home = 0; home < module->listed_count && !learns; home++)
        learns = dp__is_of_sort(dp__param_at(module, home), DP__GRADS);
    return !learns;
}

/* Runs the methods of a pass again, where that is possible, and compares. Methods of a module that
   has no gradients here add to some elsewhere, and would do so twice. */
static dp_status dp__pass_replay(const char *fn, const dp_pass *pass)
{
    char text[DP__TEXT_BYTES];
    dp_ctx *ctx = pass->ctx;
    dp_scope *temp = NULL;
    dp__replay replay = {.fn = fn, .pass = pass};
    bool rows = pass->rows == NULL || pass->rows[0] > 0;
    if (pass->records[0].outer != NULL || pass->runs->mean_grads || ctx->world.mailbox != NULL ||
        !rows || dp__find_method(pass->runs, "backward") == NULL || dp__learns_nothing(pass->runs))
        return DP_OK;
    memcpy(text, dp__of_thread.text, sizeof text);
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__replay_make(&replay, temp);
    if (status == DP_OK)
        status = dp__replay_all(&replay);
    status = dp__temp_end(temp, NULL, status);
    if (status == DP_OK || status == DP_ERR_CHECK || dp_status_class(status) == DP_CLASS_JOB)
        return status;
    dp__log(ctx, DP_LOG_INFO, "'%s' cannot be run again to be checked: %s", pass->runs->name,
            dp__of_thread.text);
    memcpy(dp__of_thread.text, text, sizeof text);
    return DP_OK;
}

/* ==== >>criterion ================================================================================
   Losses where the outputs are: a criterion's replicas take the list that dp_model_parallel made,
   and targets cut by the sizes that come with it.                                                */

/* The outputs, one per replica; `rows`: how the batch was cut, if the list still says so. */
static dp_status dp__criterion_outputs(const dp__invocation *invocation, const dp__face *face,
                                       const dp_value **out, size_t *out_count, int64_t **out_rows)
{
    char text[32];
    dp_value args = invocation->args;
    if (!dp__is_sequence(args) || args.count == 0)
        return dp_error(DP_ERR_INVALID, "a criterion's first argument is the list of outputs");
    const dp_value *first = &args.as.items[0];
    bool ours = dp__is_outputs(*first);
    *out_rows = ours ? first->as.items[first->count].as.p : NULL;
    *out = first;
    *out_count = 1;
    if (face->count == 1 && !ours)
        return DP_OK;
    if (first->kind != DP_LIST || first->count == 0 || first->count > face->count)
        return dp_error(DP_ERR_MISMATCH, "the outputs are %s, there %s %zu device%s",
                        dp__value_text(*first, text, sizeof text), face->count == 1 ? "is" : "are",
                        face->count, dp__s(face->count));
    *out = first->as.items;
    *out_count = first->count;
    return DP_OK;
}

/* (output, targets...), where a tuple of outputs counts as several arguments. */
static dp_status dp__criterion_args(const dp_pass *pass, size_t r, dp_value output,
                                    dp_value targets, dp_value *out)
{
    bool many = output.kind == DP_TUPLE;
    const dp_value *outputs = many ? output.as.items : &output;
    uint32_t count = many ? output.count : 1;
    dp_value *items = dp__scope_bytes(pass->scope, (count + targets.count) * sizeof *items, 8);
    dp__parter parter = {
        .mapper = {.scope = pass->scope, .leaf = dp__part_group_leaf},
        .plan = &(dp__plan){.fn = "dp_invoke", .ctx = pass->ctx, .scope = pass->scope},
        .device = dp__replica_device(pass->face, r)};
    if (items == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %u arguments", (unsigned)count);
    for (uint32_t i = 0; i < count; i++)
        DP_TRY(dp__map(&parter.mapper, outputs[i], &items[i]));
    for (uint32_t i = 0; i < targets.count; i++)
        items[count + i] = targets.as.items[i];
    return dp__list_out("args", DP_TUPLE, items, count + targets.count, out);
}

/* What replica r was given as the model's output. */
static dp_value dp__criterion_output(const dp_pass *pass, size_t r)
{
    dp_value first = pass->args.as.items[0];
    return dp__is_outputs(first) || !pass->alone ? first.as.items[r] : first;
}

/* Targets are cut as the outputs were, where that is known, else as the config says. */
static dp_status dp__criterion_plan(dp__plan *plan, const dp__invocation *targets,
                                    const dp__face *face, size_t count, const int64_t *rows,
                                    dp_scatter_config *how)
{
    bool nothing = dp__is_nothing(targets->args) && dp__is_nothing(targets->kwargs);
    *how = face->how;
    if (rows != NULL) {
        how->local_rank_count = how->cut.split_count = count;
        how->cut.split = DP_SPLIT_SIZES;
        how->cut.sizes = rows;
        how->cut.weights = NULL;
        how->cut.part_rows = 0;
    }
    dp_status status = dp__cut_make(plan, targets, face, how);
    if ((status == DP_ERR_INVALID || status == DP_ERR_MISMATCH) && rows != NULL)
        return dp_error(DP_ERR_MISMATCH, "the targets cannot be cut as the outputs were: %s",
                        dp__unnamed(targets->fn, dp_last_error()));
    if (status == DP_OK && plan->parts < count && !nothing)
        return dp_error(DP_ERR_MISMATCH, "the targets make %zu part%s, the outputs are %zu",
                        plan->parts, dp__s(plan->parts), count);
    if (status == DP_OK && plan->needed > count)
        return dp_error(DP_ERR_MISMATCH, "the targets have rows in %zu parts, the outputs are %zu",
                        plan->needed, count);
    return status;
}

static dp_status dp__criterion_cut(const dp__invocation *invocation, dp__face *face, dp_pass **out)
{
    dp__plan plan;
    dp_scatter_config how;
    size_t count = 0;
    int64_t *rows = NULL;
    const dp_value *outputs = NULL;
    DP_TRY(dp__criterion_outputs(invocation, face, &outputs, &count, &rows));
    dp__invocation rest = *invocation; /* the targets */
    rest.args = dp__sequence(DP_TUPLE, invocation->args.as.items + 1, invocation->args.count - 1,
                             invocation->args.depth);
    DP_TRY(dp__criterion_plan(&plan, &rest, face, count, rows, &how));
    DP_TRY(dp__pass_make(invocation, face->runs, face, count, out));
    for (size_t r = 0; r < count; r++) {
        dp_value args = dp_none(), kwargs = dp_none();
        DP_TRY(dp__part_make(&plan, rest.args, r, &args));
        DP_TRY(dp__part_make(&plan, rest.kwargs, r, &kwargs));
        DP_TRY(dp__criterion_args(*out, r, outputs[r], args, &args));
        dp__pass_record(*out, invocation, r, args, kwargs);
    }
    if (rows == NULL)
        DP_TRY(dp__plan_sizes(&plan, &rows));
    dp__pass_rows(*out, rows);
    return DP_OK;
}

/* The weight of replica r's loss, and the sum of all weights. */
static double dp__criterion_weight(const dp_pass *pass, size_t r, double *total)
{
    bool weighted = pass->face->mean_of_samples;
    *total = 0;
    for (size_t i = 0; i < pass->count; i++)
        *total += weighted ? pass->records[i].call.weight : 1;
    if (weighted && *total > 0)
        return pass->records[r].call.weight;
    *total = *total > 0 ? *total : (double)pass->count;
    return 1;
}

typedef struct dp__scaler { /* tensors and numbers of a tree times a number, on a device */
    dp__mapper mapper;
    dp__device *device;
    double by, over;
} dp__scaler;

static dp_status dp__scale_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    const dp__scaler *scaler = (const dp__scaler *)mapper;
    dp_ctx *ctx = mapper->scope->ctx;
    *out = value;
    if (dp__is_number(value) && value.kind != DP_NONE)
        *out = dp_float((value.kind == DP_INT ? (double)value.as.i : value.as.f) * scaler->by /
                        scaler->over);
    if (value.kind != DP_TENSOR)
        return DP_OK;
    dp_tensor from = *value.as.t, to;
    DP_TRY(dp__place(mapper->scope, &from, scaler->device));
    DP_TRY(dp__contiguous(mapper->scope, &from, &from));
    DP_TRY(dp__tensor_as(mapper->scope, scaler->device, &from, &to));
    DP_TRY(dp__scale_flat(ctx, &from, scaler->by, scaler->over, &to));
    return dp__of(mapper->scope, &to, out);
}

static dp_status dp__scale(dp_scope *scope, dp_value value, dp__device *device, double by,
                           double over, dp_value *out)
{
    dp__scaler scaler = {{.scope = scope, .leaf = dp__scale_leaf, .plain = true}, device, by, over};
    return dp__map(&scaler.mapper, value, out);
}

/* Sum of weight * loss, divided by the sum of the weights. A loss of weight 0, such as that of no
   rows, is left out, whatever it is. */
static dp_status dp__criterion_mean(const dp_pass *pass, dp_value list, dp_value *out)
{
    double total = 0;
    uint32_t count = 0;
    dp_scope *temp = NULL;
    dp__device *output = pass->face->output;
    dp_value sum = dp_none();
    dp_value *items = dp__scope_bytes(pass->scope, pass->count * sizeof *items, 8);
    if (items == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu losses", pass->count);
    for (size_t r = 0; r < pass->count; r++) {
        double weight = dp__criterion_weight(pass, r, &total);
        items[count] = list.as.items[r];
        if (pass->face->mean_of_samples && weight > 0)
            DP_TRY(dp__scale(pass->scope, list.as.items[r], dp__call_device(&pass->records[r].call),
                             weight, 1, &items[count]));
        count += weight > 0;
    }
    DP_TRY(dp__temp_begin(pass->ctx, &temp));
    dp_status status = dp__reduce_add(
        pass->scope, temp, dp__sequence(DP_LIST, items, count, list.depth), output, &sum);
    status = dp__temp_end(temp, NULL, status);
    return status == DP_OK ? dp__scale(pass->scope, sum, output, 1, total, out) : status;
}

/* d mean / d loss of replica r, times the gradient of the mean. */
static dp_status dp__criterion_grad(const dp_pass *pass, size_t r, dp_value grad, dp_value *out)
{
    double total = 0, weight = dp__criterion_weight(pass, r, &total);
    return dp__scale(pass->scope, grad, dp__call_device(&pass->records[r].call), weight, total,
                     out);
}

/* args_grad of a replica, taken apart: gradients of the outputs that it had, and of targets. */
static dp_status dp__criterion_split(const dp_pass *pass, size_t r, dp_value grads,
                                     dp_value *out_output, dp_value *out_targets)
{
    char text[32];
    const dp_call *call = &pass->records[r].call;
    uint32_t targets = pass->args.count - 1, outputs = call->args.count - targets;
    bool many = dp__criterion_output(pass, r).kind == DP_TUPLE;
    *out_output = *out_targets = dp_none();
    if (grads.kind == DP_NONE)
        return DP_OK;
    if (!dp__is_sequence(grads) || grads.count != call->args.count)
        return dp_error(DP_ERR_MISMATCH, "args_grad of replica %zu is %s, it had %u arguments", r,
                        dp__value_text(grads, text, sizeof text), (unsigned)call->args.count);
    *out_output = many ? dp__sequence(DP_TUPLE, grads.as.items, outputs, grads.depth)
                       : grads.as.items[0];
    *out_targets = dp__sequence(DP_TUPLE, grads.as.items + outputs, targets, grads.depth);
    return DP_OK;
}

/* In the form of the arguments: the list of outputs has a list of gradients, which stay where they
   are; those of targets are gathered. */
static dp_status dp__criterion_inputs(const dp_pass *pass, const dp_value *own, dp_value *grads,
                                      dp_value *out)
{
    uint32_t targets = pass->args.count - 1;
    dp_value *outputs = dp__values(pass->scope, pass->count),
             *rest = dp__values(pass->scope, pass->count);
    dp_value *own_rest = dp__values(pass->scope, pass->count),
             *items = dp__values(pass->scope, targets + 1);
    dp_value gathered = dp_none(), ignored;
    if (outputs == NULL || rest == NULL || own_rest == NULL || items == NULL)
        return DP_ERR_NO_MEMORY;
    for (size_t r = 0; r < pass->count; r++) {
        DP_TRY(dp__criterion_split(pass, r, own[r], &ignored, &own_rest[r]));
        DP_TRY(dp__criterion_split(pass, r, grads[r], &outputs[r], &rest[r]));
    }
    dp_value inputs = dp__sequence(DP_TUPLE, pass->args.as.items + 1, targets, pass->args.depth);
    DP_TRY(dp__inputs_gather(pass, inputs, own_rest, rest, &gathered));
    for (uint32_t i = 0; i < targets; i++)
        items[1 + i] = dp_at(gathered, i);
    items[0] = outputs[0];
    if (dp__is_outputs(pass->args.as.items[0]) || !pass->alone)
        DP_TRY(dp__list_out("the gradients", DP_LIST, outputs, pass->count, &items[0]));
    return dp__list_out("the gradients", DP_TUPLE, items, targets + 1, out);
}

DP_API dp_status dp_all_reduce_list(dp_ctx *ctx, dp_scope *scope, dp_value list,
                                    const dp_scatter_config *how, dp_value *out_list)
{
    how = how != NULL ? how : &dp__scatter_default;
    dp_scope *temp = NULL;
    dp_value sum = dp_none(), all = dp_none();
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_alone(__func__, ctx));
    DP_TRY(dp__check_scope_of(__func__, scope, ctx));
    DP_TRY(dp__check_list(__func__, list));
    DP_TRY(dp__check_pointer(__func__, "out_list", out_list));
    DP_TRY(dp__check_ranks(__func__, ctx, how));
    if (list.count != dp__rank_count(ctx, how))
        return dp_error(DP_ERR_MISMATCH, "%s: a list of %u for %zu device%s", __func__,
                        (unsigned)list.count, dp__rank_count(ctx, how),
                        dp__s(dp__rank_count(ctx, how)));
    dp_status status = dp__temp_begin(ctx, &temp);
    if (status == DP_OK)
        status = dp__reduce_add(scope, temp, list, &ctx->devices[dp__rank_at(how, 0)], &sum);
    if (status == DP_OK)
        status = dp__replicate(scope, sum, how, &all);
    return dp__leave_with(__func__, ctx, dp__temp_end(temp, NULL, status), all, out_list);
}

/* ==== >>faces ====================================================================================
   The wrappers: a config becomes a face, and a module around it. How they differ stands in a table
   for each kind.                                                                                */

/* mmcv's rule: the module's own steps know nothing of other replicas. */
static dp_status dp__container_allows(const dp__face *face, const char *method)
{
    bool own_step = strcmp(method, "train_step") == 0 || strcmp(method, "val_step") == 0;
    if (own_step && face->count > 1)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "'%s' runs on a single device, this wrapper has %zu: dp_train_step trains "
                        "on all of them",
                        method, face->count);
    return DP_OK;
}

static const dp__face_ops dp__data_face = {
    .cut = dp__pass_cut, .join = dp__pass_gather, .backward = dp__backward_summed};

static const dp__face_ops dp__container_face = {.allows = dp__container_allows,
                                                .cut = dp__pass_cut,
                                                .join = dp__pass_gather,
                                                .backward = dp__backward_summed};

static const dp__face_ops dp__model_face = {.cut = dp__pass_cut, .backward = dp__backward_summed};

static dp_status dp__criterion_step(const dp_module *wrapper)
{
    (void)wrapper;
    return dp_error(DP_ERR_UNSUPPORTED, "a criterion alone cannot be trained");
}

static const dp__face_ops dp__criterion_face = {
    .output_on_one = true,
    .no_prediction = "a criterion alone predicts nothing",
    .no_padding = "a criterion gets outputs and targets without padding",
    .allows_step = dp__criterion_step,
    .cut = dp__criterion_cut,
    .join = dp__criterion_mean,
    .out_grad = dp__criterion_grad,
    .backward = dp__backward_summed,
    .args_grad = dp__criterion_inputs};

/* Devices of very different strength wait for each other: warns of it, and says whether it did. */
static bool dp__warn_balance(const dp__face *face, bool memory)
{
    const dp_device_info *low = NULL, *high = NULL;
    double least = 0, most = 0;
    for (size_t r = 0; r < face->count; r++) {
        const dp_device_info *info = &dp__replica_device(face, r)->info;
        double own = memory ? (double)info->bytes_total : (double)info->compute_units;
        low = r == 0 || own < least ? info : low;
        high = r == 0 || own > most ? info : high;
        least = low == info ? own : least;
        most = high == info ? own : most;
    }
    if (!(least < 0.75 * most))
        return false;
    dp__log(face->ctx, DP_LOG_WARN,
            "'%s' has less than 75 %% of the %s of '%s': the others will wait for it; local_ranks "
            "can leave it out",
            low->name, memory ? "memory" : "compute units", high->name);
    return true;
}

static dp_status dp__face_ranks(const char *fn, dp__face *face, const dp_parallel_config *config)
{
    dp_scatter_config how = {.local_ranks = config->local_ranks,
                             .local_rank_count = config->local_rank_count,
                             .cut = config->cut};
    DP_TRY(dp__check_ranks(fn, face->ctx, &how));
    face->count = dp__rank_count(face->ctx, &how);
    DP_TRY(dp__check_split(fn, &how.cut, face->count));
    if (how.cut.split == DP_SPLIT_PADDED && face->ops->no_padding != NULL)
        return dp_error(DP_ERR_UNSUPPORTED, "%s: %s", fn, face->ops->no_padding);
    if (how.cut.dim < -DP_MAX_DIMS || how.cut.dim >= DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "%s: dim is %d, a tensor has at most %d dims", fn,
                        how.cut.dim, DP_MAX_DIMS);
    int *ranks = dp__array(face->scope, face->count, sizeof *ranks);
    int64_t *sizes = dp__array(face->scope, face->count, sizeof *sizes);
    double *weights = dp__array(face->scope, face->count, sizeof *weights);
    face->threads = dp__array(face->scope, face->count, sizeof *face->threads);
    if (ranks == NULL || sizes == NULL || weights == NULL || face->threads == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu devices", face->count);
    for (size_t r = 0; r < face->count; r++)
        ranks[r] = dp__rank_at(&how, r);
    if (how.cut.sizes != NULL)
        how.cut.sizes = memcpy(sizes, how.cut.sizes, face->count * sizeof *sizes);
    if (how.cut.weights != NULL)
        how.cut.weights = memcpy(weights, how.cut.weights, face->count * sizeof *weights);
    how.local_ranks = ranks;
    how.local_rank_count = face->count;
    face->how = how;
    return DP_OK;
}

/* Each device's own thread. Replicas of a device that is there twice have other threads too, if it
   works on the host; else they would use its stream at the same time, so they take turns. */
static void dp__face_threads(dp__face *face)
{
    int threads = face->ctx->info.local_count;
    bool on_host = dp__is_host(dp__replica_device(face, 0));
    face->own_threads = true;
    for (size_t r = 0; r < face->count; r++) {
        face->threads[r] = dp__rank_at(&face->how, r);
        for (size_t k = 0; k < r; k++)
            face->own_threads = face->own_threads && face->threads[k] != face->threads[r];
    }
    face->own_devices = face->own_threads;
    if (face->own_threads || !on_host)
        return;
    face->own_threads = face->count <= (size_t)threads;
    for (size_t r = 0; r < face->count; r++)
        face->threads[r] = (int)(r % (size_t)threads);
}

static dp_status dp__face_output(const char *fn, dp__face *face, const dp_parallel_config *config)
{
    dp_gather_config how = {.local_rank = dp__rank_at(&face->how, 0),
                            .to_host = config->output_to_host};
    dp__device *output = NULL;
    bool listed = config->output_to_host;
    if (config->output_rank != NULL)
        how.local_rank = *config->output_rank;
    DP_TRY(dp__check_output(fn, face->ctx, "output_rank", &how, &output));
    for (size_t r = 0; r < face->count; r++)
        listed = listed || dp__rank_at(&face->how, r) == how.local_rank;
    if (face->ops->output_on_one && !listed)
        return dp_error(DP_ERR_INVALID,
                        "output_rank %d is none of local_ranks: the losses are added up on one of "
                        "their devices",
                        how.local_rank);
    face->output = output;
    return DP_OK;
}

/* The whole tree must be on the first device. Parameters are where their module is. */
static dp_status dp__check_home(const dp_module *module, int first)
{
    if (module->local_rank != first)
        return dp_error(DP_ERR_INVALID,
                        "'%s' is on local rank %d, the first of the devices is local rank %d",
                        module->name, module->local_rank, first);
    for (size_t i = 0; i < module->child_count; i++)
        DP_TRY(dp__check_home(module->children[i].module, first));
    return DP_OK;
}

static bool dp__has_foreign(const dp_module *module)
{
    bool found = false;
    for (size_t i = 0; i < module->param_count && !module->announces_changes; i++)
        found = found || module->params[i].foreign;
    for (size_t i = 0; i < module->child_count && !found; i++)
        found = dp__has_foreign(module->children[i].module);
    return found;
}

static dp_status dp__check_wrappable(const dp_module *module)
{
    if (module->ops->no_wrapper != NULL)
        return dp_error(DP_ERR_UNSUPPORTED, "'%s' %s", module->name, module->ops->no_wrapper);
    for (size_t i = 0; i < module->child_count; i++)
        DP_TRY(dp__check_wrappable(module->children[i].module));
    return DP_OK;
}

/* `own`: the config of a face over all ranks, else NULL. */
static dp_status dp__face_make(const char *fn, dp_scope *scope, dp_module *module,
                               const dp__face_ops *ops, const dp_parallel_config *config,
                               const void *own, dp__face **out)
{
    static const dp_parallel_config zero;
    dp__face *face = dp__array(scope, 1, sizeof *face);
    if (face == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a wrapper");
    config = config != NULL ? config : &zero;
    *face = (dp__face){.ops = ops,
                       .ctx = module->ctx,
                       .scope = scope,
                       .inner = module,
                       .runs = dp__runs_of(module),
                       .mean_of_samples = config->mean_of_samples,
                       .foreign = dp__has_foreign(module)};
    DP_TRY(dp__check_wrappable(module));
    if (dp__find_method(face->runs, "forward") == NULL)
        return dp__no_method(DP_ERR_INVALID, fn, face->runs, "forward");
    DP_TRY(dp__face_ranks(fn, face, config));
    DP_TRY(dp__face_output(fn, face, config));
    DP_TRY(dp__check_home(module, dp__rank_at(&face->how, 0)));
    dp__face_threads(face);
    if (ops->prepare != NULL)
        DP_TRY(ops->prepare(fn, face, own));
    DP_TRY(dp__replicas_make(face));
    *out = face;
    return DP_OK;
}

/* The wrapper and its face, or nothing. */
static dp_status dp__wrapper_make(const char *fn, const char *name, dp_module *module,
                                  const dp__face_ops *ops, const dp_parallel_config *config,
                                  const void *own, dp_module **out)
{
    dp_module *wrapper = NULL;
    dp__face *face = NULL;
    dp_module_config plain = {.name = name, .wraps = module, .local_rank = module->local_rank};
    dp_status status = dp__module_make(module->ctx, &plain, &wrapper);
    if (status == DP_OK)
        status = dp__face_make(fn, wrapper->scope, module, ops, config, own, &face);
    if (status == DP_OK) {
        wrapper->face = face;
        wrapper->ops = ops;
        if (!dp__warn_balance(face, true))
            (void)dp__warn_balance(face, false);
        *out = wrapper;
    } else if (wrapper != NULL) {
        dp__module_end(wrapper);
    }
    return status;
}

static dp_status dp__wrap(const char *fn, const char *name, dp_module *module,
                          const dp__face_ops *ops, const dp_parallel_config *config,
                          dp_module **out)
{
    DP_TRY(dp__check_module(fn, module));
    DP_TRY(dp__check_alone(fn, module->ctx));
    DP_TRY(dp__check_pointer(fn, "out", out));
    return dp__leave(fn, module->ctx, dp__wrapper_make(fn, name, module, ops, config, NULL, out));
}

DP_API dp_status dp_data_parallel(dp_module *module, const dp_parallel_config *config,
                                  dp_module **out)
{
    return dp__wrap(__func__, "data_parallel", module, &dp__data_face, config, out);
}

DP_API dp_status dp_container_parallel(dp_module *module, const dp_parallel_config *config,
                                       dp_module **out)
{
    return dp__wrap(__func__, "container_parallel", module, &dp__container_face, config, out);
}

DP_API dp_status dp_model_parallel(dp_module *module, const dp_parallel_config *config,
                                   dp_module **out)
{
    return dp__wrap(__func__, "model_parallel", module, &dp__model_face, config, out);
}

DP_API dp_status dp_criterion_parallel(dp_module *criterion, const dp_parallel_config *config,
                                       dp_module **out)
{
    return dp__wrap(__func__, "criterion_parallel", criterion, &dp__criterion_face, config, out);
}

DP_API dp_status dp_meta_test_parallel(dp_module *module, dp_module **out)
{
    DP_TRY(dp__check_module(__func__, module));
    dp_parallel_config config = {.local_ranks = &module->local_rank, .local_rank_count = 1};
    return dp__wrap(__func__, "meta_test_parallel", module, &dp__data_face, &config, out);
}

DP_API dp_status dp_data_parallel_once(dp_module *module, dp_scope *scope, const char *method,
                                       dp_value args, dp_value kwargs,
                                       const dp_parallel_config *config, dp_value *out,
                                       dp_pass **out_pass)
{
    dp__face *face = NULL;
    DP_TRY(dp__check_module(__func__, module));
    DP_TRY(dp__check_alone(__func__, module->ctx));
    dp__invocation invocation = {.fn = __func__,
                                 .module = module,
                                 .method = method,
                                 .scope = scope,
                                 .args = args,
                                 .kwargs = kwargs,
                                 .wants_pass = out_pass != NULL};
    DP_TRY(dp__check_request(&invocation, out));
    dp_status status = dp__face_make(__func__, scope, module, &dp__data_face, config, NULL, &face);
    if (status != DP_OK)
        return dp__leave(__func__, module->ctx, status);
    return dp__invoke_by(&invocation, face, out, out_pass);
}

DP_API dp_status dp_wrapper_info_get(const dp_module *wrapper, dp_wrapper_info *out)
{
    DP_TRY(dp__check_module(__func__, wrapper));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (wrapper->face == NULL)
        return dp_error(DP_ERR_INVALID, "%s: '%s' is not a wrapper of the library's", __func__,
                        wrapper->name);
    const dp__face *face = wrapper->face;
    *out = (dp_wrapper_info){.local_ranks = face->how.local_ranks,
                             .local_rank_count = face->count,
                             .output = face->output->id,
                             .dim = face->how.cut.dim};
    return DP_OK;
}

/* ==== >>losses ===================================================================================
   Of dp_train_step: losses, weights, gradients as numbers, the log; of both steps, the data.    */

/* A dict becomes kwargs, a list or tuple args. */
static dp_status dp__step_data(dp_value data, const char *from, dp_value *args, dp_value *kwargs)
{
    *args = *kwargs = dp_none();
    if (data.kind != DP_DICT && !dp__is_sequence(data))
        return dp_error(DP_ERR_INVALID, "%s is %s, not a dict, a list or a tuple", from,
                        dp__a_kind(data.kind));
    *(data.kind == DP_DICT ? kwargs : args) = data;
    return DP_OK;
}

/* kwargs and the mode. */
static dp_status dp__step_mode(dp_scope *scope, const char *name, dp_value kwargs, dp_value *out)
{
    dp_pair *pairs = dp__scope_bytes(scope, (kwargs.count + 1) * sizeof *pairs, 8);
    dp_value mode = {.kind = DP_STRING, .as.s = name};
    if (pairs == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %u arguments", (unsigned)kwargs.count);
    if (kwargs.kind == DP_DICT && dp__find(kwargs, "mode") != NULL)
        return dp_error(DP_ERR_INVALID,
                        "the data has a key 'mode', which the step itself adds for the forward, as "
                        "'%s': give yours another name",
                        name);
    if (kwargs.count > 0)
        memcpy(pairs, kwargs.as.pairs, kwargs.count * sizeof *pairs);
    pairs[kwargs.count] = (dp_pair){"mode", mode};
    *out = dp__dict_of(pairs, kwargs.count + 1, kwargs.count > 0 ? kwargs.depth : 1);
    return DP_OK;
}

static bool dp__is_scalar(dp_value value)
{
    return value.kind == DP_INT || value.kind == DP_FLOAT || value.kind == DP_BOOLEAN;
}

/* A number becomes a tensor on the host; the rest stays, and is checked with its key. */
static dp_status dp__loss_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp_scope *scope = mapper->scope;
    dp_tensor tensor;
    bool whole = value.kind != DP_FLOAT;
    *out = value;
    if (!dp__is_scalar(value))
        return DP_OK;
    double number = !whole ? value.as.f : (double)(value.kind == DP_INT ? value.as.i : value.as.b);
    DP_TRY(dp__tensor_make(scope, &scope->ctx->host_device, DP_F64, 0, NULL, &tensor));
    memcpy(tensor.data, &number, sizeof number);
    return dp__of(scope, &tensor, out);
}

/* What the forward returned as a dict of tensors and lists of them: a loss alone gets the key
   "loss". */
static dp_status dp__record_losses(dp__record *record)
{
    const dp_call *call = &record->call;
    dp__mapper mapper = {.scope = call->scope, .leaf = dp__loss_leaf, .plain = true};
    bool bare = call->out.kind == DP_TENSOR || dp__is_scalar(call->out);
    if (!bare && call->out.kind != DP_DICT)
        return dp_error(DP_ERR_INVALID,
                        "%s.forward returned %s; the step needs a dict with a key that holds "
                        "'loss', or a loss",
                        call->module->name, dp__a_kind(call->out.kind));
    const dp_pair alone = {"loss", call->out};
    return dp__map(&mapper, bare ? dp__dict_of(&alone, 1, 1) : call->out, &record->losses);
}

/* One replica's "preprocess", if it has one, and its forward. */
static dp_status dp__record_step(dp__record *record)
{
    dp_call *call = &record->call;
    const char *mode = record->pass->mode;
    const dp_method *method = dp__find_method(call->module, "preprocess");
    bool training = call->training, loss = strcmp(mode, "loss") == 0;
    if (method != NULL) {
        call->training = training && loss; /* it augments data for training alone */
        DP_TRY(dp__record_forward(record, method));
        call->training = training;
        call->saved = NULL;
        DP_TRY(dp__step_data(call->out, "what preprocess returned", &call->args, &call->kwargs));
    }
    DP_TRY(dp__step_mode(call->scope, mode, call->kwargs, &call->kwargs));
    DP_TRY(dp__record_forward(record, record->pass->method));
    return loss ? dp__record_losses(record) : DP_OK;
}

/* The tensors of one entry of the losses. */
static dp_status dp__entry_tensors(const dp_pair *entry, const dp_value **out, uint32_t *out_count)
{
    bool list = dp__is_sequence(entry->value);
    *out = list ? entry->value.as.items : &entry->value;
    *out_count = list ? entry->value.count : 1;
    for (uint32_t i = 0; i < *out_count; i++)
        if ((*out)[i].kind != DP_TENSOR || dp_tensor_count((*out)[i].as.t) < 0)
            return dp_error(DP_ERR_INVALID, "'%s' is not a tensor or list of tensors", entry->key);
    return DP_OK;
}

static bool dp__is_loss(const char *key)
{
    return strstr(key, "loss") != NULL;
}

/* Losses of all replicas have the same keys, and as many tensors under each. */
static dp_status dp__check_losses(const dp_pass *pass)
{
    bool any = false;
    dp_value first = pass->records[0].losses;
    for (size_t r = 0; r < pass->count; r++) {
        dp_value own = pass->records[r].losses;
        if (own.count != first.count)
            return dp_error(DP_ERR_MISMATCH,
                            "forward of replica %zu returned %u losses and log entries, that of "
                            "replica 0 %u",
                            r, (unsigned)own.count, (unsigned)first.count);
        dp__finder finder = {.dict = own};
        for (uint32_t i = 0; i < first.count; i++) {
            const dp_value *tensors = NULL;
            uint32_t count = 0, wanted = 0;
            const dp_pair *entry = NULL;
            DP_TRY(dp__finder_find(&finder, pass->scope, first.as.pairs[i].key, &entry));
            if (entry != NULL) {
                DP_TRY(dp__entry_tensors(&first.as.pairs[i], &tensors, &wanted));
                DP_TRY(dp__entry_tensors(entry, &tensors, &count));
            }
            if (entry == NULL || count != wanted)
                return dp_error(DP_ERR_MISMATCH, "'%s' of replica %zu is not as in replica 0",
                                first.as.pairs[i].key, r);
            any = any || dp__is_loss(first.as.pairs[i].key);
        }
    }
    if (any)
        return DP_OK;
    dp__names names = dp__keys_of(first);
    return dp__no_such(DP_ERR_INVALID, &names, "no key of what forward returned holds 'loss'");
}

/* The weight of each element of a tensor of replica r, without padding, in the mean over all. */
static double dp__element_share(const dp_pass *pass, size_t r, const dp_tensor *tensor,
                                double total)
{
    const dp_tensor rows = dp__real_part(pass, r, tensor);
    double count = (double)dp__count(&rows), weight = pass->records[r].call.weight;
    return weight > 0 && count > 0 ? weight / total / count : 0;
}

/* d loss / d output of replica r, times `factor`: numbers, since all elements have the same weight;
   for a loss alone one number. */
static dp_status dp__step_grad(const dp_pass *pass, size_t r, double factor, dp_value *out)
{
    dp_value losses = pass->records[r].losses;
    double own = pass->records[r].call.weight, total = dp__weight_total(pass);
    bool means = pass->runs->mean_grads; /* of its own rows: the rest is done to what it writes */
    if (means)
        total = own;
    else if (dp__ops(pass->face)->weight != NULL) /* weight / total is its share */
        total = own / pass->face->ops->weight(pass, r);
    factor = means ? 1 : factor;
    dp_pair *pairs = dp__scope_bytes(pass->scope, losses.count * sizeof *pairs, 8);
    if (pairs == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %u gradients", (unsigned)losses.count);
    for (uint32_t i = 0; i < losses.count; i++) {
        const dp_pair *entry = &losses.as.pairs[i];
        const dp_value *tensors = NULL;
        uint32_t count = 0;
        DP_TRY(dp__entry_tensors(entry, &tensors, &count));
        dp_value *items = dp__scope_bytes(pass->scope, count * sizeof *items, 8);
        if (items == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %u gradients", (unsigned)count);
        for (uint32_t k = 0; k < count; k++) {
            const dp_tensor *loss = tensors[k].as.t;
            items[k] = dp_none();
            if (dp__is_loss(entry->key))
                DP_TRY(dp__number_grad(
                    pass, r, loss, factor * dp__element_share(pass, r, loss, total), &items[k]));
        }
        bool list = dp__is_sequence(entry->value);
        pairs[i].key = entry->key;
        pairs[i].value = list ? dp__sequence((dp_kind)entry->value.kind, items, count, 1)
                              : items[0];
    }
    *out = pass->records[r].call.out.kind == DP_DICT ? dp__dict_of(pairs, losses.count, 2)
                                                     : pairs[0].value;
    return DP_OK;
}

/* ---- the log --------------------------------------------------------------------------------- */

/* share * the sum of a tensor's elements, on its device. */
static dp_status dp__log_share(const dp_pass *pass, size_t r, const dp_tensor *tensor, double share,
                               dp_tensor *out)
{
    dp_ctx *ctx = pass->ctx;
    const dp__device *device = dp__device_of(ctx, tensor->device);
    const dp_tensor rows = dp__real_part(pass, r, tensor);
    dp_tensor dense, wide;
    if (device == NULL)
        return dp_error(DP_ERR_INVALID, "a loss of replica %zu is on no device of this context", r);
    DP_TRY(dp__contiguous(pass->scope, &rows, &dense));
    DP_TRY(dp__tensor_make(pass->scope, device, DP_F64, dense.ndim, dense.shape, &wide));
    DP_TRY(dp__tensor_make(pass->scope, device, DP_F64, 0, NULL, out));
    DP_TRY(dp__cast_flat(ctx, device, wide.data, DP_F64, dense.data, (dp_dtype)dense.dtype,
                         (size_t)dp__count(&dense)));
    const void *in = wide.data;
    dp_kernel_args args =
        dp__kernel_args(DP_KERNEL_TOTAL, DP_F64, (size_t)dp__count(&dense), &out->data, &in);
    args.alpha = share;
    return dp__kernel(ctx, device, device->stream, &args);
}

/* The sum of scalars from anywhere, on one device. */
static dp_status dp__log_sum(const dp_pass *pass, const dp_tensor *scalars, size_t count,
                             dp__device *device, dp_tensor *out)
{
    const dp_tensor **parts = dp__scope_bytes(pass->scope, count * sizeof *parts, 8);
    if (parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu losses", count);
    DP_TRY(dp__tensor_make(pass->scope, device, DP_F64, 0, NULL, out));
    if (count == 0)
        return dp__fill_tensor(pass->ctx, device, out, 0);
    for (size_t i = 0; i < count; i++)
        parts[i] = &scalars[i];
    return dp__add_up(pass->ctx, pass->scope, parts, count, device, out);
}

/* One entry over all replicas: its mean, with each replica weighted. */
static dp_status dp__log_entry(const dp_pass *pass, dp__finder *finders, const dp_pair *entry,
                               dp__device *device, dp_tensor *out)
{
    const dp_value *tensors = NULL;
    const dp_pair *own = NULL;
    uint32_t each = 0;
    size_t count = 0;
    double total = dp__weight_total(pass);
    DP_TRY(dp__entry_tensors(entry, &tensors, &each));
    dp_tensor *scalars = dp__scope_bytes(pass->scope, pass->count * each * sizeof *scalars, 8);
    if (scalars == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu losses", pass->count);
    for (size_t r = 0; r < pass->count; r++) {
        DP_TRY(dp__finder_find(&finders[r], pass->scope, entry->key, &own));
        DP_TRY(dp__entry_tensors(own, &tensors, &each));
        for (uint32_t k = 0; k < each; k++) {
            double share = dp__element_share(pass, r, tensors[k].as.t, total);
            if (share > 0)
                DP_TRY(dp__log_share(pass, r, tensors[k].as.t, share, &scalars[count++]));
        }
    }
    return dp__log_sum(pass, scalars, count, device, out);
}

/* "loss" first, then the entries; one that is itself called "loss" is only part of the sum. */
static dp_status dp__step_log(const dp_pass *pass, dp_value *out)
{
    dp_value losses = pass->records[0].losses;
    size_t loss_count = 0, pair_count = 1;
    dp__device *device = dp__call_device(&pass->records[0].call);
    dp_tensor *scalars = dp__scope_bytes(pass->scope, losses.count * sizeof *scalars, 8), sum;
    dp_pair *pairs = dp__scope_bytes(pass->scope, (losses.count + 1) * sizeof *pairs, 8);
    dp__finder *finders = dp__scope_bytes(pass->scope, pass->count * sizeof *finders, 8);
    if (scalars == NULL || pairs == NULL || finders == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for the log");
    for (size_t r = 0; r < pass->count; r++)
        finders[r] = (dp__finder){.dict = pass->records[r].losses};
    if (pass->face != NULL)
        device = pass->face->output;
    for (uint32_t i = 0; i < losses.count; i++) {
        const char *key = losses.as.pairs[i].key;
        dp_tensor mean;
        DP_TRY(dp__log_entry(pass, finders, &losses.as.pairs[i], device, &mean));
        if (dp__is_loss(key))
            scalars[loss_count++] = mean;
        if (strcmp(key, "loss") == 0)
            continue;
        pairs[pair_count].key = key;
        DP_TRY(dp__of(pass->scope, &mean, &pairs[pair_count++].value));
    }
    DP_TRY(dp__log_sum(pass, scalars, loss_count, device, &sum));
    pairs[0].key = "loss";
    DP_TRY(dp__of(pass->scope, &sum, &pairs[0].value));
    *out = dp__dict_of(pairs, pair_count, 1);
    return DP_OK;
}

/* ==== >>stepping =================================================================================
   The two steps, and the optimizer's part in one.                                               */

/* Takes the place of a "backward" that a module need not have. */
static dp_status dp__no_backward(dp_call *call)
{
    (void)call;
    return DP_OK;
}

static dp_status dp__step_backward(dp_pass *pass, double factor)
{
    pass->scaled = factor > 1;
    static const dp_method none = {"backward", dp__no_backward};
    if (pass->backward == NULL && dp__learns_nothing(pass->runs))
        pass->backward = &none;
    DP_TRY(dp__check_pass("dp_train_step", pass));
    DP_TRY(dp__backward_begin(pass, dp_float(factor)));
    for (size_t r = 0; r < pass->count; r++)
        DP_TRY(dp__step_grad(pass, r, factor, &pass->records[r].call.grad));
    return dp__backward_run("dp_train_step", pass, NULL);
}

/* What the optimizer's functions depend on. */
static dp__frame dp__optim_frame(const dp__invocation *invocation, const char *method)
{
    return (dp__frame){.what = "the optimizer's",
                       .name = method,
                       .ctx = invocation->module->ctx,
                       .scope = invocation->scope,
                       .module = invocation->module};
}

static dp_status dp__optim_begin(dp_optim *optim, dp__invocation *invocation)
{
    dp__frame frame = dp__optim_frame(invocation, "begin");
    if (!DP_HAS(dp_optim_ops, optim->ops, begin))
        return DP_OK;
    dp__frame_enter(&frame);
    return dp__frame_leave(&frame,
                           optim->ops->begin(optim, invocation->module, &invocation->config));
}

static dp_status dp__optim_factor(dp_optim *optim, const dp__invocation *invocation, double *out)
{
    dp__frame frame = dp__optim_frame(invocation, "loss_factor");
    if (!DP_HAS(dp_optim_ops, optim->ops, loss_factor))
        return DP_OK;
    dp__frame_enter(&frame);
    return dp__frame_leave(&frame, optim->ops->loss_factor(optim, out));
}

static dp_status dp__optim_update(dp_optim *optim, const dp__invocation *invocation)
{
    dp__frame frame = dp__optim_frame(invocation, "update");
    dp__frame_enter(&frame);
    return dp__frame_leave(&frame, optim->ops->update(optim, invocation->module));
}

static dp_status dp__step_take(dp__invocation *invocation, dp_value data)
{
    DP_TRY(dp__check_value(invocation->fn, "data", data));
    return dp__step_data(data, "data", &invocation->args, &invocation->kwargs);
}

/* Forward, the log, backward. */
static dp_status dp__step_pass(dp__invocation *invocation, dp_value data, double factor,
                               dp_value *out_log)
{
    dp_module *module = invocation->module;
    dp_pass *pass = NULL;
    dp_value losses = dp_none();
    if (data.kind == DP_NONE && module->ops->idle != NULL)
        return module->ops->idle(invocation, module->face);
    DP_TRY(dp__step_take(invocation, data));
    if (module->ops->allows_step != NULL)
        DP_TRY(module->ops->allows_step(module));
    DP_TRY(module->face != NULL ? dp__invoke_face(invocation, module->face, &losses, &pass)
                                : dp__invoke_plain(invocation, module, &losses, &pass));
    DP_TRY(dp__check_losses(pass));
    DP_TRY(dp__step_log(pass, out_log));
    return invocation->config.no_grad ? DP_OK : dp__step_backward(pass, factor);
}

/* With other ranks only the optimizer says whether this step is reduced: before that they cannot be
   told but by failing the job. */
static dp_status dp__step_begin(dp__invocation *invocation, dp_optim *optim, double *out_factor)
{
    const dp_module *module = invocation->module;
    if (optim == NULL)
        return DP_OK;
    dp_status status = dp__optim_begin(optim, invocation);
    if (status == DP_OK)
        status = dp__optim_factor(optim, invocation, out_factor);
    return dp__is_joint(module->face, true) ? dp__shared_failure(module->ctx, status) : status;
}

static dp_status dp__step(dp__invocation *invocation, dp_value data, dp_optim *optim,
                          dp_value *out_log)
{
    const dp__face *face = invocation->module->face;
    const dp__face_ops *ops = invocation->module->ops;
    double factor = 1;
    DP_TRY(ops->check_data != NULL ? ops->check_data(face, data) : dp__step_take(invocation, data));
    DP_TRY(dp__step_begin(invocation, optim, &factor));
    if (ops->begin != NULL)
        ops->begin(face, false);
    dp_status status = dp__step_pass(invocation, data, factor, out_log);
    DP_TRY(ops->end_step != NULL ? ops->end_step(invocation, face, data, status) : status);
    return optim != NULL ? dp__optim_update(optim, invocation) : DP_OK;
}

static dp__invocation dp__step_request(const char *fn, dp_module *module, dp_scope *scope,
                                       const char *mode)
{
    return (dp__invocation){.fn = fn,
                            .module = module,
                            .method = "forward",
                            .scope = scope,
                            .args = dp_none(),
                            .kwargs = dp_none(),
                            .mode = mode};
}

static dp_status dp__check_optim(const char *fn, const dp_optim *optim)
{
    const dp_optim_ops *ops = optim != NULL ? optim->ops : NULL;
    if (ops != NULL && !DP_FITS(dp_optim_ops, ops))
        return dp_error(DP_ERR_INVALID,
                        "%s: optim has a table of layout %u and size %u, the implementation's have "
                        "layout %d and size %zu: it was compiled with another dp.h, or its head is "
                        "not DP_TABLE",
                        fn, ops->head.layout, ops->head.size, DP_LAYOUT, sizeof *ops);
    if (optim != NULL && (ops == NULL || !DP_HAS(dp_optim_ops, ops, update)))
        return dp_error(DP_ERR_INVALID, "%s: optim has no update", fn);
    return DP_OK;
}

DP_API dp_status dp_train_step(dp_module *module, dp_scope *scope, dp_value data, dp_optim *optim,
                               dp_value *out_log)
{
    dp_value log = dp_none();
    DP_TRY(dp__check_runs(__func__, module));
    dp__invocation invocation = dp__step_request(__func__, module, scope, "loss");
    invocation.wants_pass = invocation.keeps = true;
    DP_TRY(dp__check_request(&invocation, out_log));
    DP_TRY(dp__check_optim(__func__, optim));
    dp_trace_begin(__func__);
    dp_status status = dp__step(&invocation, data, optim, &log);
    dp_trace_end();
    if (status == DP_OK)
        dp__step_count(module->ctx);
    return dp__leave_with(__func__, module->ctx, status, log, out_log);
}

DP_API dp_status dp_predict_step(dp_module *module, dp_scope *scope, dp_value data, dp_value *out)
{
    DP_TRY(dp__check_runs(__func__, module));
    dp__invocation invocation = dp__step_request(__func__, module, scope, "predict");
    DP_TRY(dp__check_request(&invocation, out));
    dp_status status = dp__step_take(&invocation, data);
    if (status == DP_OK && module->ops->no_prediction != NULL)
        status = dp_error(DP_ERR_UNSUPPORTED, "%s", module->ops->no_prediction);
    return status == DP_OK ? dp__invoke_by(&invocation, module->face, out, NULL)
                           : dp__leave(__func__, module->ctx, status);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
