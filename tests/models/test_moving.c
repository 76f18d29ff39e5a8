/* test_moving.c - parameters in memory of the user's that moves between steps: whatever has to do
   with them finds them, what was there before is neither read nor written any more, and a module
   whose memory stays learns the same bits. */

#include <math.h>
#include <stdatomic.h>
#include "dp_average.h"
#include "dp_local.h"
#include "dp_save.h"
#include "dp_train.h"
#include "examples/custom_device.h"
#include "methods.h"
#include "ranked.h"

/* ---- a model ------------------------------------------------------------------------------------
   Gradients are of the parameters themselves: with s, the sum of a part's rows, s * w and
   s * (v + w). A buffer has the last s, but in a packed module, which has none.                  */

enum { BIG = 2048, WEIGHT = 0, BIAS, LAST, KINDS };

static const int64_t counts[KINDS] = {BIG, BIG, 1};

static dp_status read_all(const dp_call *call, const dp_tensor *tensor, float *out)
{
    return dp_read(call->ctx, tensor, out, (size_t)dp_tensor_count(tensor) * sizeof *out);
}

static dp_status model_forward(dp_call *call)
{
    const bool *has_buffer = call->state;
    const dp_tensor *x;
    dp_tensor last, w = dp_param_tensor(call, WEIGHT), one, y;
    float rows[16], weight = 0;
    double *sum = dp_scope_alloc(call->scope, sizeof *sum);
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &x));
    DP_TRY(read_all(call, x, rows));
    DP_TRY(dp_narrow(&w, 0, 7, 1, &one));
    DP_TRY(read_all(call, &one, &weight));
    *sum = 0;
    for (int64_t i = 0; i < x->shape[0]; i++) {
        *sum += (double)rows[i];
        rows[i] *= weight;
    }
    if (*has_buffer) {
        last = dp_buffer_tensor(call, LAST);
        DP_TRY(dp_fill(call->ctx, &last, dp_float(*sum)));
    }
    DP_TRY(dp_tensor_from(call->scope, call->device, rows, DP_F32, 1, x->shape, &y));
    call->saved = sum;
    call->out = dp_of(call->scope, &y);
    return DP_OK;
}

static dp_status model_backward(dp_call *call)
{
    dp_tensor w = dp_param_tensor(call, WEIGHT), v = dp_param_tensor(call, BIAS);
    dp_tensor gw = dp_grad_tensor(call, WEIGHT), gv = dp_grad_tensor(call, BIAS);
    double sum = *(const double *)call->saved / 64;
    DP_TRY(dp_axpby(call->ctx, 1, &gw, sum, &w, &gw));
    DP_TRY(dp_axpby(call->ctx, 1, &gv, sum, &v, &gv));
    return dp_axpby(call->ctx, 1, &gv, sum, &w, &gv);
}

static const dp_method model_methods[] = {{"forward", model_forward}, {"backward", model_backward}};

typedef enum memory {
    LIBRARYS,
    APART,
    TOGETHER,
    DATA_APART, /* and gradients are the library's */
    DATA_TOGETHER,
    GRADS_APART,
    BLOCK
} memory;

enum { MOST_LEFT = 64 };

typedef struct model {
    dp_ctx *ctx;
    dp_scope *scope;
    memory kind;
    dp_module *net, *par;
    dp_optim *optim;
    dp_tensor here[KINDS][2]; /* where data and gradients are; without data: it is the library's */
    dp_tensor *left;          /* where they were: NaN */
    int left_count;
} model;

static dp_tensor new_memory(const model *m, int64_t count)
{
    dp_tensor made;
    CHECK_OK(dp_tensor_new(m->scope, dp_local_device(m->ctx, 0), DP_F32, 1, &count, &made));
    CHECK_OK(dp_fill(m->ctx, &made, dp_float(0)));
    return made;
}

static void params_of(model *m, dp_param_config *out)
{
    static const char *const names[KINDS] = {"w", "v", "last"};
    dp_tensor whole = new_memory(m, 4 * BIG + 1);
    for (int k = 0; k < KINDS; k++) {
        bool data = m->kind != LIBRARYS && m->kind < GRADS_APART;
        bool grad = k != LAST &&
                    (m->kind == APART || m->kind == TOGETHER || m->kind == GRADS_APART);
        bool together = m->kind == TOGETHER || m->kind == DATA_TOGETHER;
        int place = m->kind == DATA_TOGETHER && k != LAST ? 1 - k : k; /* as the library's lie */
        out[k] = (dp_param_config){
            .name = names[k], .ndim = 1, .shape = {counts[k]}, .buffer = k == LAST};
        if (data)
            m->here[k][0] = new_memory(m, counts[k]);
        if (grad)
            m->here[k][1] = new_memory(m, counts[k]);
        if (data && together) /* right behind each other, until one of them moves */
            CHECK_OK(dp_narrow(&whole, 0, place * BIG, counts[k], &m->here[k][0]));
        if (grad && together)
            CHECK_OK(dp_narrow(&whole, 0, 2 * BIG + 1 + k * BIG, counts[k], &m->here[k][1]));
        out[k].data = m->here[k][0].data;
        out[k].grad = m->here[k][1].data;
    }
}

static void write_numbers(dp_module *net)
{
    static float numbers[BIG];
    for (size_t k = 0; k < dp_module_param_count(net); k++) {
        for (int i = 0; i < BIG; i++)
            numbers[i] = (float)((i * 37 + (int)k * 11) % 101) / 64 - 0.7f;
        CHECK_OK(dp_params_write(net, k, numbers, (size_t)counts[k] * sizeof *numbers));
    }
}

static model make_model(dp_ctx *ctx, memory kind)
{
    static const bool yes = true, no = false;
    model m = {.ctx = ctx, .scope = dp_scope_begin(ctx), .kind = kind};
    dp_param_config params[KINDS];
    dp_module_config config = {.name = "net",
                               .methods = model_methods,
                               .method_count = 2,
                               .params = params,
                               .param_count = kind == BLOCK ? 2 : KINDS,
                               .state = kind == BLOCK ? &no : &yes,
                               .moves = kind != LIBRARYS};
    dp_module *own = NULL;
    m.left = test_room(MOST_LEFT * sizeof *m.left);
    params_of(&m, params);
    if (kind == BLOCK) {
        m.here[0][0] = new_memory(&m, 2 * BIG);
        m.here[0][1] = new_memory(&m, 2 * BIG);
        config.packed = true;
        config.block = m.here[0][0].data;
        config.block_grad = m.here[0][1].data;
    }
    CHECK_OK(dp_module_create(ctx, &config, &own));
    m.net = m.par = own;
    write_numbers(own);
    return m;
}

/* ---- how it moves ---------------------------------------------------------------------------- */

/* Somewhere else, with the numbers that are there; and what was is NaN. */
static void *go_elsewhere(model *m, dp_tensor *place)
{
    dp_tensor there = new_memory(m, dp_tensor_count(place));
    CHECK_OK(dp_copy(m->ctx, &there, place, NULL));
    CHECK_OK(dp_fill(m->ctx, place, dp_float((double)NAN)));
    CHECK(m->left_count < MOST_LEFT);
    m->left[m->left_count++] = *place;
    *place = there;
    return there.data;
}

/* which: a bit for each of data and gradients. */
static void move_param(model *m, int k, unsigned which)
{
    size_t param = 0;
    static const char *const names[KINDS] = {"w", "v", "last"};
    void *data = which & 1 && m->here[k][0].data != NULL ? go_elsewhere(m, &m->here[k][0]) : NULL;
    void *grad = which & 2 && m->here[k][1].data != NULL ? go_elsewhere(m, &m->here[k][1]) : NULL;
    if (data == NULL && grad == NULL)
        return;
    if (m->kind == BLOCK) {
        CHECK_OK(dp_params_move_block(m->net, data, grad));
        return;
    }
    CHECK_OK(dp_module_find(m->par, names[k], &param));
    CHECK_OK(dp_params_move(which == 3 ? m->par : m->net, param, data, grad));
}

static void move_some(model *m, int step)
{
    for (int k = 0; k < (m->kind == BLOCK ? 1 : KINDS); k++)
        move_param(m, k, (unsigned)(step + k) % 4);
}

static void check_left(const model *m)
{
    static float numbers[4 * BIG + 1];
    for (int i = 0; i < m->left_count; i++) {
        size_t count = (size_t)dp_tensor_count(&m->left[i]);
        CHECK_OK(dp_read(m->ctx, &m->left[i], numbers, count * sizeof *numbers));
        for (size_t k = 0; k < count; k++)
            CHECK(isnan(numbers[k]));
    }
}

/* ---- steps ----------------------------------------------------------------------------------- */

static dp_value rows_of(dp_ctx *ctx, dp_scope *scope, int step)
{
    static const float all[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    int64_t first, count;
    CHECK_OK(dp_my_rows(ctx, 3 + step % 5, &first, &count));
    return DP_DICT(scope, {"x", dp_array(scope, all + first, DP_F32, DP_SHAPE(count))});
}

static void pass_of(const model *m, int step, bool no_sync)
{
    dp_scope *scope = dp_scope_begin(m->ctx);
    dp_value out;
    dp_pass *pass;
    CHECK_OK(dp_invoke(m->par, scope, "forward", dp_none(), rows_of(m->ctx, scope, step),
                       &(dp_pass_config){.no_sync = no_sync}, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    dp_scope_end(scope);
}

/* By hand: every owner's on its device. */
static void step_by_hand(const model *m)
{
    for (size_t owner = 0; owner < dp_owner_count(m->par); owner++)
        for (size_t i = 0; i < dp_module_param_count(m->par); i++) {
            dp_tensor data, grad;
            CHECK_OK(dp_owner_edit(m->par, owner, i, &data, NULL));
            CHECK_OK(dp_owner_grad(m->par, owner, i, &grad));
            if (dp_tensor_count(&grad) > 0)
                CHECK_OK(dp_axpby(m->ctx, 1, &data, -0.125, &grad, &data));
        }
    CHECK_OK(dp_zero_grad(m->par));
}

static void numbers_of(const model *m, size_t owner, const char *name, bool grad, float *out)
{
    dp_tensor data;
    size_t param;
    CHECK_OK(dp_module_find(m->par, name, &param));
    if (grad)
        CHECK_OK(dp_owner_grad(m->par, owner, param, &data));
    else
        CHECK_OK(dp_owner_param(m->par, owner, param, &data));
    CHECK_OK(dp_read(m->ctx, &data, out, (size_t)dp_tensor_count(&data) * sizeof *out));
}

static void check_alike(const model *a, const model *b, bool grad)
{
    static float one[BIG], other[BIG];
    static const char *const names[] = {"w", "v"};
    for (size_t owner = 0; owner < dp_owner_count(a->par); owner++)
        for (int k = 0; k < 2; k++) {
            numbers_of(a, owner, names[k], grad, one);
            numbers_of(b, owner, names[k], grad, other);
            CHECK_BYTES(one, other, sizeof one);
        }
}

/* ---- a job: one model stays, the other one moves --------------------------------------------- */

typedef struct way {
    bool ranks; /* dp_distributed; else dp_data_parallel, or nothing on one device */
    dp_distributed_config config;
    bool by_hand;
    dp_optim_config optim;
    bool waits; /* a sum that is not reduced yet moves, too */
} way;

static way how;

static void wrap_model(model *m)
{
    dp_info info = info_here(m->ctx);
    if (how.ranks)
        CHECK_OK(dp_distributed(m->net, &how.config, &m->par));
    else if (info.local_count > 1)
        CHECK_OK(dp_data_parallel(m->net, NULL, &m->par));
    if (!how.by_hand)
        CHECK_OK(dp_optim_create(m->par, &how.optim, &m->optim));
}

static void take_step(model *m, int step)
{
    if (how.waits) {
        pass_of(m, step + 1, true);
        move_some(m, m->kind == LIBRARYS ? 0 : step + 2);
    }
    pass_of(m, step, false);
    move_some(m, m->kind == LIBRARYS ? 0 : step + 1); /* between backward and step */
    if (how.by_hand)
        step_by_hand(m);
    else
        CHECK_OK(dp_optim_step(m->optim));
}

/* In one process more than in another, or none at all. */
static void one_moves(dp_ctx *ctx, memory kind)
{
    model still = make_model(ctx, LIBRARYS), moves = make_model(ctx, kind);
    wrap_model(&still);
    wrap_model(&moves);
    for (int step = 0; step < 5; step++) {
        take_step(&still, step);
        take_step(&moves, step);
        check_alike(&still, &moves, false);
        for (int again = info_here(ctx).process; again < 2; again++)
            move_some(&moves, step);
    }
    CHECK_OK(dp_params_compare(moves.par));
    check_left(&moves);
}

static void every_kind_moves(dp_ctx *ctx)
{
    for (memory kind = APART; kind <= BLOCK; kind++)
        one_moves(ctx, kind);
    dp_close(ctx);
}

static void moves_in_processes(meeting *m)
{
    every_kind_moves(open_over_shm(m, 1 + m->process % 2, 0));
}

static void moves_in_processes_of_one(meeting *m)
{
    every_kind_moves(open_over_shm(m, 1, 0));
}

static const way ways[] = {
    {.by_hand = true},
    {.optim = {.rule = NULL, .hyper = {.lr = 0.1, .momentum = 0.5}}},
    {.ranks = true, .by_hand = true},
    {.ranks = true, .by_hand = true, .waits = true, .config.reduction = DP_SUM_RANKS},
    {.ranks = true,
     .optim = {.hyper = {.lr = 0.1, .momentum = 0.5}},
     .config.reduction = DP_MEAN_SAMPLES},
    {.ranks = true, .optim = {.hyper.lr = 0.1}, .config.buckets = {.first_bytes = 1, .bytes = 1}},
    {.ranks = true, .optim = {.hyper.lr = 0.1}, .config.buckets.wire = DP_BF16},
    {.ranks = true, .optim = {.hyper.lr = 0.1}, .config.buckets.hook = plain_hook}};

TEST_SLOW(whoever_moves_learns_the_same, 60)
{
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        how = ways[i];
        for (int devices = 1; devices <= 3; devices++)
            every_kind_moves(open_here(devices));
        every_kind_moves(open_on(toy_device(), 1));
        every_kind_moves(open_on(toy_device(), 3));
    }
}

TEST_SLOW(whoever_moves_in_a_process_learns_the_same, 60)
{
    for (size_t i = 2; i < sizeof ways / sizeof ways[0]; i++) {
        how = ways[i];
        in_processes(3, moves_in_processes);
        in_processes_on(toy_device(), 2, moves_in_processes);
    }
}

TEST_SLOW(shares_of_what_moves_are_found, 60)
{
    for (int mirrored = 0; mirrored < 2; mirrored++) {
        how = (way){
            .ranks = true,
            .optim = {
                .rule = dp_adam(), .hyper.lr = 0.01, .sharded = true, .mirrored = mirrored == 1}};
        in_processes(2, moves_in_processes_of_one);
        in_processes(4, moves_in_processes_of_one);
    }
}

/* ---- what is there --------------------------------------------------------------------------- */

static dp_status give_ones(dp_call *call)
{
    float *grad = dp_grad(call, 0);
    dp_param_info info;
    CHECK_OK(dp_module_param(call->module, 0, &info));
    for (int64_t i = 0; i < info.data.shape[0]; i++)
        grad[i] += 1;
    return DP_OK;
}

/* Two parameters of three numbers, and one that is tied to the first; a method that adds up the
   first, and one whose backward adds 1 to the gradients of the others. */
enum { A, B, FROZEN, TIED, NONE, FEW };

static double seen_by[RANKS]; /* what each replica has found in `a` */

static dp_status few_forward(dp_call *call)
{
    float numbers[3] = {0, 0, 0};
    dp_tensor a = dp_param_tensor(call, TIED);
    DP_TRY(dp_read(call->ctx, &a, numbers, sizeof numbers));
    seen_by[call->local_rank] = (double)(numbers[0] + numbers[1] + numbers[2]);
    call->out = dp_float(1);
    return DP_OK;
}

static dp_status few_backward(dp_call *call)
{
    DP_TRY(add_to(call, A, 1));
    return add_to(call, B, 2);
}

static const dp_method few_methods[] = {{"forward", few_forward}, {"backward", few_backward}};

static void few_params(dp_param_config *out)
{
    static const char *const names[FEW] = {"a", "b", "frozen", "tied", "none"};
    for (int i = 0; i < FEW; i++)
        out[i] = (dp_param_config){.name = names[i], .ndim = 1, .shape = {i == NONE ? 0 : 3}};
    out[FROZEN].frozen = true;
    out[TIED].same_as = "a";
}

typedef struct few {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_tensor data[2][3], grad[2][3]; /* of `a` and `b`: three places, of which the first is used */
    dp_module *net;
} few;

static dp_tensor three(const few *f, float first)
{
    const float numbers[] = {first, first, first};
    const int64_t count = 3;
    dp_tensor made;
    CHECK_OK(
        dp_tensor_from(f->scope, dp_local_device(f->ctx, 0), numbers, DP_F32, 1, &count, &made));
    return made;
}

static few make_few(dp_ctx *ctx, dp_module_config config)
{
    few f = {.ctx = ctx, .scope = dp_scope_begin(ctx)};
    dp_param_config params[FEW];
    few_params(params);
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 3; k++) {
            f.data[i][k] = three(&f, (float)(10 * i + k));
            f.grad[i][k] = three(&f, 0);
        }
        params[i].data = f.data[i][0].data;
        params[i].grad = f.grad[i][0].data;
    }
    config.name = "net";
    config.methods = config.methods != NULL ? config.methods : few_methods;
    config.method_count = 2;
    config.params = params;
    config.param_count = FEW;
    CHECK_OK(dp_module_create(ctx, &config, &f.net));
    return f;
}

static void check_place(dp_module *module, size_t param, const dp_tensor *data,
                        const dp_tensor *grad)
{
    dp_param_info info;
    dp_tensor own;
    CHECK_OK(dp_module_param(module, param, &info));
    CHECK(info.data.data == data->data);
    CHECK_OK(dp_owner_param(module, 0, param, &own));
    CHECK(own.data == data->data);
    CHECK_OK(dp_owner_grad(module, 0, param, &own));
    CHECK(own.data == grad->data);
}

static double first_of(dp_ctx *ctx, const dp_tensor *tensor)
{
    float numbers[3];
    CHECK_OK(dp_read(ctx, tensor, numbers, sizeof numbers));
    return (double)numbers[0];
}

/* The numbers there may be others: all replicas have them at the next forward, and no backward has
   those of before. */
static void other_numbers(dp_ctx *ctx)
{
    few f = make_few(ctx, (dp_module_config){.moves = true, .announces_changes = true});
    dp_module *par = NULL;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    dp_pass *pass = NULL;
    CHECK_OK(dp_model_parallel(f.net, NULL, &par));
    for (int k = 0; k < 3; k++) {
        if (k > 0)
            CHECK_OK(dp_params_move(par, A, f.data[A][k].data, NULL));
        for (int again = 0; again < 2; again++) {
            memset(seen_by, 0, sizeof seen_by);
            CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL,
                               &out, &pass));
            for (int r = 0; r < info_here(ctx).local_count; r++)
                CHECK_F64(seen_by[r], 3 * k, 0);
        }
        check_place(par, A, &f.data[A][k], &f.grad[A][0]);
        check_place(f.net, A, &f.data[A][k], &f.grad[A][0]);
    }
    CHECK_OK(dp_params_move(f.net, A, f.data[A][2].data, NULL)); /* it is there already */
    CHECK_OK(dp_params_move(f.net, A, NULL, f.grad[A][1].data)); /* nor has the forward seen that */
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    CHECK_F64(first_of(ctx, &f.grad[A][1]), info_here(ctx).local_count, 0);
    CHECK_F64(first_of(ctx, &f.grad[A][0]), 0, 0);
    CHECK_OK(
        dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL, &out, &pass));
    CHECK_OK(dp_params_move(f.net, A, f.data[A][0].data, NULL));
    CHECK_ERROR(dp_backward(pass, dp_float(1), NULL), DP_ERR_STATE,
                "'a' of 'net' was edited after the forward");
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(what_is_there_are_the_numbers)
{
    other_numbers(open_here(1));
    other_numbers(open_here(3));
    other_numbers(open_on(toy_device(), 1));
    other_numbers(open_on(toy_device(), 3));
}

/* Two that change places are in one at a time. A name that is tied moves all that it is tied to. */
static void change_places(dp_ctx *ctx)
{
    few f = make_few(ctx, (dp_module_config){.moves = true});
    dp_module *parent = NULL, *par = NULL;
    size_t tied;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "parent",
                                                  .methods = few_methods,
                                                  .method_count = 1,
                                                  .children = &f.net,
                                                  .child_count = 1},
                              &parent));
    CHECK_OK(dp_module_find(parent, "net.tied", &tied));
    CHECK_OK(dp_params_move(parent, tied, f.data[B][0].data, f.grad[B][0].data));
    CHECK_OK(dp_params_move(parent, B, f.data[A][0].data, f.grad[A][0].data));
    CHECK_OK(dp_model_parallel(f.net, NULL, &par));
    check_place(parent, A, &f.data[B][0], &f.grad[B][0]);
    check_place(par, B, &f.data[A][0], &f.grad[A][0]);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    dp_pass *pass = NULL;
    CHECK_OK(
        dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL, &out, &pass));
    CHECK_F64(seen_by[0], 30, 0);
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    CHECK_F64(first_of(ctx, &f.grad[B][0]), info_here(ctx).local_count, 0);
    CHECK_F64(first_of(ctx, &f.grad[A][0]), 2 * info_here(ctx).local_count, 0);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(two_change_places)
{
    change_places(open_here(2));
    change_places(open_on(toy_device(), 2));
}

/* However they lie at first, each is stepped by itself; a block is one piece, and another one right
   behind it another. */
TEST(neighbours_that_may_part_are_no_stretch)
{
    enum { EACH_OF = 8 };
    static float data[4 * EACH_OF], grad[4 * EACH_OF];
    static const char *const names[] = {"a", "b"};
    for (int moves = 0; moves < 2; moves++) {
        dp_ctx *ctx = open_here(2);
        dp_param_config params[2];
        dp_module *apart = NULL, *blocks[2], *parent = NULL;
        const dp_stretch *all;
        size_t count = 0;
        for (int i = 0; i < 2; i++)
            params[i] = (dp_param_config){.name = names[i],
                                          .ndim = 1,
                                          .shape = {EACH_OF},
                                          .data = data + i * EACH_OF,
                                          .grad = grad + i * EACH_OF};
        CHECK_OK(dp_module_create(
            ctx, &(dp_module_config){.params = params, .param_count = 2, .moves = moves == 1},
            &apart));
        CHECK_OK(dp_module_stretches(apart, &all, &count));
        CHECK_INT(count, moves == 1 ? 2 : 1);
        for (int i = 0; i < 2; i++) {
            params[0].data = params[0].grad = params[1].data = params[1].grad = NULL;
            CHECK_OK(dp_module_create(ctx,
                                      &(dp_module_config){.name = names[i],
                                                          .params = params,
                                                          .param_count = 2,
                                                          .packed = true,
                                                          .block = data + 2 * i * EACH_OF,
                                                          .block_grad = grad + 2 * i * EACH_OF,
                                                          .moves = moves == 1},
                                      &blocks[i]));
        }
        CHECK_OK(dp_module_create(
            ctx, &(dp_module_config){.name = "parent", .children = blocks, .child_count = 2},
            &parent));
        CHECK_OK(dp_module_stretches(parent, &all, &count));
        CHECK_INT(count, moves == 1 ? 2 : 1);
        dp_close(ctx);
    }
}

/* Gradients that others see are added there; one process' leave that memory, and come back. */
static void in_and_out_of_shared_memory(meeting *m)
{
    enum { COUNT = 40000 };
    static float plain[COUNT];
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    float *shared = dp_shared_alloc(scope, sizeof plain);
    static const dp_method methods[] = {{"forward", number_forward}, {"backward", give_ones}};
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {COUNT}, .grad = shared};
    dp_module *net = NULL, *par = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.methods = methods,
                                                  .method_count = 2,
                                                  .params = &param,
                                                  .param_count = 1,
                                                  .moves = true},
                              &net));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = DP_SUM_RANKS}, &par));
    for (int step = 0; step < 6; step++) {
        bool leaves = step % 3 > 0 && m->process == 1;
        float *there = leaves ? plain : shared;
        CHECK_OK(dp_params_move(net, 0, NULL, there));
        CHECK_OK(dp_zero_grad(net));
        CHECK_OK(forward_and_backward(par, 1, false));
        for (int i = 0; i < COUNT; i++)
            CHECK_F64(there[i], 3, 0);
    }
    dp_close(ctx);
}

TEST(gradients_leave_memory_that_others_see)
{
    in_processes(3, in_and_out_of_shared_memory);
}

/* ---- files, averages, local steps ------------------------------------------------------------ */

static const char *const checkpoint = "build/moving.safetensors";

static void keep_and_find(dp_ctx *ctx)
{
    few f = make_few(ctx, (dp_module_config){.moves = true});
    dp_module *par = NULL;
    dp_average *average;
    dp_local *local;
    dp_value kept, saved;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_distributed(f.net, NULL, &par));
    CHECK_OK(dp_average_create(par, NULL, &average));
    CHECK_OK(dp_params_move(par, A, f.data[A][1].data, NULL));
    CHECK_OK(dp_params_move(par, B, f.data[B][2].data, NULL));
    CHECK_OK(dp_average_update(average)); /* the first one copies */
    CHECK_OK(dp_module_save(par, scope, &kept));
    CHECK(dp_get(kept, "a").as.t->data == f.data[A][1].data);
    CHECK_OK(dp_checkpoint_save(ctx, checkpoint, kept));
    CHECK_OK(dp_params_move(par, A, f.data[A][0].data, NULL));
    CHECK_OK(dp_checkpoint_load(ctx, scope, checkpoint, &saved));
    CHECK_OK(dp_module_load(par, saved, NULL)); /* where it is now */
    CHECK_F64(first_of(ctx, &f.data[A][0]), 1, 0);
    CHECK_OK(dp_fill(ctx, &f.data[A][2], dp_float(7)));
    CHECK_OK(dp_params_move(par, A, f.data[A][2].data, NULL));
    CHECK_OK(dp_average_begin(average));
    CHECK_F64(first_of(ctx, &f.data[A][2]), 1, 0);
    CHECK_OK(dp_params_move(par, A, f.data[A][1].data, NULL)); /* in the midst of it */
    CHECK_OK(dp_average_end(average));
    CHECK_F64(first_of(ctx, &f.data[A][1]), 7, 0);
    CHECK_OK(dp_params_compare(par));
    CHECK_OK(dp_module_destroy(par));
    CHECK_OK(dp_local_create(f.net, &(dp_local_config){.every = 1}, &local));
    dp_tensor other = three(&f, (float)info_here(ctx).process);
    CHECK_OK(dp_params_move(f.net, A, other.data, NULL));
    CHECK_OK(dp_local_step(local));
    CHECK_OK(dp_local_sync(local));
    CHECK_F64(first_of(ctx, &other), (info_here(ctx).process_count - 1) / 2.0, 0);
    CHECK_OK(dp_params_compare(f.net));
    dp_scope_end(scope);
    dp_close(ctx);
}

static void keep_in_processes(meeting *m)
{
    keep_and_find(open_over_shm(m, 1, 0));
}

TEST(files_averages_and_local_steps_find_it)
{
    keep_and_find(open_here(1));
    keep_and_find(open_on(toy_device(), 2));
    in_processes(2, keep_in_processes);
}

/* One process' numbers are others: that is found where they are. */
static void differ(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    few f = make_few(ctx, (dp_module_config){.moves = true});
    dp_module *par = NULL;
    CHECK_OK(dp_distributed(f.net, NULL, &par));
    CHECK_OK(dp_params_compare(par));
    CHECK_OK(dp_params_move(f.net, B, f.data[B][m->process].data, NULL));
    CHECK_ERROR(dp_params_compare(par), DP_ERR_MISMATCH, "parameter 'b' f32 [3]");
    CHECK_OK(dp_params_move(f.net, B, f.data[B][0].data, NULL));
    CHECK_OK(dp_params_compare(par));
    dp_close(ctx);
}

TEST(numbers_that_differ_are_found_where_they_are)
{
    in_processes(2, differ);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void refuse_params(dp_ctx *ctx, const few *f)
{
    dp_module *stays = make_few(ctx, (dp_module_config){.moves = false}).net, *copy = NULL;
    void *to = f->data[A][1].data;
    CHECK_ERROR(dp_params_move(NULL, A, to, NULL), DP_ERR_INVALID,
                "dp_params_move: module is NULL");
    CHECK_ERROR(dp_params_move(f->net, 9, to, NULL), DP_ERR_INVALID, "parameter 9, 'net' has 4");
    CHECK_ERROR(dp_params_move(f->net, A, NULL, NULL), DP_ERR_INVALID, "both addresses are NULL");
    CHECK_ERROR(dp_params_move(f->net, FROZEN, to, NULL), DP_ERR_STATE,
                "data of 'frozen' of 'net' is memory of the library's, which does not move");
    CHECK_ERROR(dp_params_move(f->net, FROZEN, NULL, to), DP_ERR_INVALID,
                "'frozen' of 'net' is frozen, or a buffer: it has no grad");
    CHECK_ERROR(dp_params_move(stays, A, to, to), DP_ERR_STATE,
                "'net' was made to stay: dp_module_config.moves is false");
    CHECK_OK(dp_module_copy(f->net, 0, &copy)); /* has memory of the library's */
    CHECK_ERROR(dp_params_move(copy, A, to, NULL), DP_ERR_STATE, "'net' was made to stay");
    check_place(f->net, A, &f->data[A][0], &f->grad[A][0]);
}

static void refuse_blocks(dp_ctx *ctx, const few *f)
{
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {3}};
    dp_module_config config = {.name = "p",
                               .params = &param,
                               .param_count = 1,
                               .methods = few_methods,
                               .method_count = 1,
                               .moves = true};
    dp_module *packed = NULL, *own = NULL, *par = NULL;
    void *to = f->data[A][1].data;
    CHECK_OK(dp_module_create(ctx, &config, &own));
    CHECK_ERROR(dp_params_move(own, 0, to, NULL), DP_ERR_STATE, "memory of the library's");
    config.packed = true;
    config.block = to;
    CHECK_OK(dp_module_create(ctx, &config, &packed));
    CHECK_ERROR(dp_params_move(packed, 0, to, NULL), DP_ERR_STATE,
                "'w' lies in the block of 'p': dp_params_move_block");
    CHECK_ERROR(dp_params_move_block(packed, NULL, NULL), DP_ERR_INVALID,
                "both addresses are NULL");
    CHECK_ERROR(dp_params_move_block(packed, to, to), DP_ERR_STATE,
                "grad of 'w' of 'p' is memory of the library's");
    CHECK_OK(dp_params_move_block(packed, f->data[A][2].data, NULL));
    CHECK_ERROR(dp_params_move_block(f->net, to, NULL), DP_ERR_INVALID, "'net' are not packed");
    CHECK_OK(dp_distributed(packed, NULL, &par));
    CHECK_ERROR(dp_params_move_block(par, to, NULL), DP_ERR_INVALID,
                "'distributed' are not packed");
}

static void refuse(dp_ctx *ctx)
{
    few f = make_few(ctx, (dp_module_config){.moves = true});
    refuse_params(ctx, &f);
    refuse_blocks(ctx, &f);
    dp_close(ctx);
}

TEST(what_does_not_move_is_refused)
{
    refuse(open_here(1));
    refuse(open_on(toy_device(), 2));
}

/* From inside: not while a method of it runs, or of one around it; others may. */
static few mover, moved; /* the module that runs, and another one */
static dp_status inside;

static dp_status move_inside(dp_call *call)
{
    call->out = dp_float(1);
    inside = dp_params_move(mover.net, A, mover.data[A][1].data, NULL);
    return dp_params_move(moved.net, A, moved.data[A][1].data, moved.grad[A][1].data);
}

TEST(methods_move_what_is_not_theirs)
{
    static const dp_method methods[] = {{"forward", move_inside}, {"backward", give_none}};
    dp_ctx *ctx = open_here(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par = NULL;
    dp_value out;
    mover = make_few(ctx, (dp_module_config){.moves = true, .methods = methods});
    moved = make_few(ctx, (dp_module_config){.moves = true});
    CHECK_OK(dp_everywhere(mover.net, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    CHECK_INT(inside, DP_ERR_STATE);
    check_place(mover.net, A, &mover.data[A][0], &mover.grad[A][0]);
    check_place(moved.net, A, &moved.data[A][1], &moved.grad[A][1]);
    CHECK_OK(dp_params_move(mover.net, A, mover.data[A][1].data, NULL));
    dp_scope_end(scope);
    dp_close(ctx);
}

/* A hook runs while gradients travel, perhaps beside a backward. */
static atomic_int refused_in_hook;

static dp_status move_in_hook(const dp_bucket *bucket, void *user)
{
    (void)user;
    if (dp_params_move(mover.net, A, NULL, mover.grad[A][1].data) == DP_ERR_STATE)
        atomic_fetch_add(&refused_in_hook, 1);
    return plain_hook(bucket, NULL);
}

static void move_while_gradients_travel(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = NULL;
    mover = make_few(ctx, (dp_module_config){.moves = true});
    CHECK_OK(dp_distributed(
        mover.net,
        &(dp_distributed_config){.buckets = {.first_bytes = 1, .bytes = 1, .hook = move_in_hook},
                                 .unused_params = DP_UNUSED_FOUND},
        &par));
    for (int step = 1; step <= 3; step++) {
        CHECK_OK(forward_and_backward(par, 1, false));
        CHECK_INT(atomic_load(&refused_in_hook), 2 * step);
    }
    CHECK_F64(first_of(ctx, &mover.grad[A][0]), 3, 0);
    CHECK_F64(first_of(ctx, &mover.grad[A][1]), 0, 0);
    dp_close(ctx);
}

TEST(nothing_moves_while_gradients_travel)
{
    in_processes(2, move_while_gradients_travel);
}

/* After a failure of the job it is not known where anything is. */
TEST(nothing_moves_after_a_failure)
{
    dp_ctx *ctx = open_here(1);
    few f = make_few(ctx, (dp_module_config){.moves = true});
    dp_abort(ctx, DP_ERR_ABORTED, "no more");
    CHECK_ERROR(dp_params_move(f.net, A, f.data[A][1].data, NULL), DP_ERR_ABORTED, "no more");
    dp_close(ctx);
}
