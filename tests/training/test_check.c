/* test_check.c - dp_check.h: models with planted bugs, each of which is found and named. */

#include "tree.h"
/* clang-format off */
#include <stdatomic.h>
#include "nets.h"
#include "dp_check.h"
/* clang-format on */

enum { ROWS = 12, IN = 3, OUT = 2, W = 0, B = 1, SEEN = 2, IDLE = 3, DEAD = 4 };

/* ---- y = tanh(x * w + b), and what may be wrong with it ------------------------------------- */

typedef enum bug {
    NONE,
    ROWS_TWICE,     /* the gradient of w is divided by the rows, though dy is */
    BIAS_HALF,      /* the gradient of b is half of what it should be */
    ONE_ELEMENT,    /* that of w is wrong in one place */
    INPUT_SIGN,     /* that of x has the wrong sign */
    BATCH_MEAN,     /* the output depends on the other rows of the part */
    REPLICA_NUMBER, /* and on which replica it is */
    COUNTS_CALLS,   /* and on a state that lasts */
    KIND,           /* an output that is something else on replicas */
    FAILS,
    FAILS_BACK,
    NOT_A_NUMBER,
    LAST_ROW, /* the last row of a part is left out of the gradient of w */
    WORDS
} bug;

typedef enum form { PLAIN, LOSS, SUM, DICT, IMAGES, NUMBER } form;

typedef struct model { /* the module's state */
    bug bug;
    form form;
    bool steep; /* abs(x * w + b) in place of tanh */
} model;

typedef struct memo {
    int64_t rows;
    double x[ROWS][IN], y[ROWS][OUT], z[ROWS][OUT];
} memo;

static atomic_int calls_of_all;

static dp_status read_as_f64(const dp_call *call, const dp_tensor *tensor, double *out)
{
    dp_tensor wide;
    DP_TRY(dp_tensor_new(call->scope, tensor->device, DP_F64, tensor->ndim, tensor->shape, &wide));
    if (dp_tensor_count(tensor) == 0)
        return DP_OK;
    DP_TRY(dp_cast(call->ctx, &wide, tensor));
    return dp_read(call->ctx, &wide, out, (size_t)dp_tensor_count(tensor) * sizeof *out);
}

static dp_value made(const dp_call *call, dp_dtype dtype, const double *from, int ndim,
                     const int64_t *shape)
{
    dp_tensor wide, tensor;
    if (dp_tensor_from(call->scope, call->device, from, DP_F64, ndim, shape, &wide) != DP_OK ||
        dp_tensor_new(call->scope, call->device, dtype, ndim, shape, &tensor) != DP_OK ||
        dp_cast(call->ctx, &tensor, &wide) != DP_OK)
        return dp_string(NULL, "");
    return dp_of(call->scope, &tensor);
}

static dp_status memo_fill(const dp_call *call, const dp_tensor *x, memo *own)
{
    const model *how = call->state;
    double w[IN][OUT], b[OUT], mean = 0;
    dp_tensor weight = dp_param_tensor(call, W), bias = dp_param_tensor(call, B);
    own->rows = x->shape[0];
    DP_TRY(read_as_f64(call, x, &own->x[0][0]));
    DP_TRY(read_as_f64(call, &weight, &w[0][0]));
    DP_TRY(read_as_f64(call, &bias, b));
    for (int64_t r = 0; r < own->rows && how->bug == BATCH_MEAN; r++)
        mean += own->x[r][0] / (double)own->rows;
    for (int64_t r = 0; r < own->rows; r++)
        for (int o = 0; o < OUT; o++) {
            own->z[r][o] = b[o] + mean;
            for (int i = 0; i < IN; i++)
                own->z[r][o] += own->x[r][i] * w[i][o];
            own->y[r][o] = how->steep ? fabs(own->z[r][o]) : tanh(own->z[r][o]);
            if (how->bug == REPLICA_NUMBER)
                own->y[r][o] += (double)call->replica;
            if (how->bug == COUNTS_CALLS)
                own->y[r][o] += atomic_fetch_add(&calls_of_all, 1);
            if (how->bug == NOT_A_NUMBER && r == 1)
                own->y[r][o] = (double)NAN;
        }
    return DP_OK;
}

/* The loss is the mean of y * y, or their sum. */
static double loss_of(const memo *own, bool sum)
{
    double loss = 0;
    for (int64_t r = 0; r < own->rows; r++)
        for (int o = 0; o < OUT; o++)
            loss += own->y[r][o] * own->y[r][o];
    return sum || own->rows == 0 ? loss : loss / (double)own->rows;
}

static dp_status model_out(dp_call *call, const memo *own, dp_dtype dtype)
{
    const model *how = call->state;
    dp_value images[ROWS],
        y = made(call, dtype, &own->y[0][0], 2, (const int64_t[]){own->rows, OUT});
    double loss = loss_of(own, how->form == SUM);
    call->out = y;
    if (how->form == LOSS || how->form == SUM)
        call->out = made(call, dtype, &loss, 0, NULL);
    if (how->form == NUMBER)
        call->out = dp_float(loss);
    if (how->form == DICT)
        call->out = DP_DICT(call->scope, {"y", y}, {"loss_sq", made(call, dtype, &loss, 0, NULL)},
                            {"rows", dp_int(ROWS)}, {"mode", dp_string(call->scope, "loss")},
                            {"what", dp_none()});
    for (int64_t r = 0; r < own->rows && how->form == IMAGES; r++)
        images[r] = made(call, dtype, own->y[r], 1, (const int64_t[]){OUT});
    if (how->form == IMAGES)
        call->out = dp_list_make(call->scope, DP_LIST, images, (size_t)own->rows);
    if (how->bug == KIND && call->replica > 0)
        call->out = dp_int(1);
    if (how->bug == WORDS)
        call->out = dp_string(call->scope, call->replica > 0 ? "b" : "a");
    return call->out.kind == DP_ERROR ? DP_ERR_NO_MEMORY : DP_OK;
}

static dp_status model_forward(dp_call *call)
{
    const model *how = call->state;
    const dp_tensor *x;
    dp_tensor seen = dp_buffer_tensor(call, SEEN);
    memo *own = dp_scope_alloc(call->scope, sizeof *own);
    if (own == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    if (how->bug == FAILS)
        return dp_error(DP_ERR_USER, "no forward today");
    DP_TRY(call->kwargs.kind == DP_DICT ? dp_call_tensor(call, "x", DP_DTYPE_ANY, 2, &x)
                                        : dp_call_arg(call, 0, DP_DTYPE_ANY, 2, &x));
    DP_TRY(memo_fill(call, x, own));
    DP_TRY(dp_fill(call->ctx, &seen, dp_float(77))); /* a forward that changes a buffer */
    call->saved = own;
    return model_out(call, own, (dp_dtype)x->dtype);
}

/* Of y, whatever the output was. */
static dp_status model_dy(const dp_call *call, const memo *own, double dy[ROWS][OUT])
{
    const model *how = call->state;
    double loss = 0;
    dp_tensor grad;
    if (how->form == PLAIN) {
        DP_TRY(dp_call_out_grad(call, NULL, &grad));
        return read_as_f64(call, &grad, &dy[0][0]);
    }
    if (how->form == IMAGES) {
        for (size_t r = 0; r < dp_count(call->grad); r++)
            DP_TRY(read_as_f64(call, dp_at(call->grad, r).as.t, dy[r]));
        return DP_OK;
    }
    if (how->form == DICT)
        CHECK_INT(dp_get(call->grad, "y").kind, DP_NONE);
    DP_TRY(dp_call_out_grad(call, how->form == DICT ? "loss_sq" : NULL, &grad));
    DP_TRY(read_as_f64(call, &grad, &loss));
    for (int64_t r = 0; r < own->rows; r++)
        for (int o = 0; o < OUT; o++)
            dy[r][o] = 2 * own->y[r][o] * loss / (how->form == SUM ? 1 : (double)own->rows);
    return DP_OK;
}

static dp_status grad_add(const dp_call *call, size_t param, double *numbers)
{
    dp_tensor grad = dp_grad_tensor(call, param);
    dp_value own = made(call, (dp_dtype)grad.dtype, numbers, grad.ndim, grad.shape);
    if (own.kind == DP_ERROR)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    return dp_axpby(call->ctx, 1, &grad, 1, own.as.t, &grad);
}

static dp_status model_backward(dp_call *call)
{
    const model *how = call->state;
    const memo *own = call->saved;
    double dy[ROWS][OUT], w[IN][OUT], dw[IN][OUT] = {{0}}, db[OUT] = {0}, dx[ROWS][IN] = {{0}};
    dp_tensor weight = dp_param_tensor(call, W);
    if (how->bug == FAILS_BACK)
        return dp_error(DP_ERR_USER, "no backward today");
    DP_TRY(read_as_f64(call, &weight, &w[0][0]));
    DP_TRY(model_dy(call, own, dy));
    for (int64_t r = 0; r < own->rows; r++)
        for (int o = 0; o < OUT; o++) {
            double y = own->y[r][o], g = dy[r][o];
            g *= how->steep ? (own->z[r][o] < 0 ? -1 : 1) : 1 - y * y;
            db[o] += how->bug == BIAS_HALF ? g / 2 : g;
            for (int i = 0; i < IN; i++) {
                double part = how->bug == ROWS_TWICE ? g / (double)own->rows : g;
                dw[i][o] += how->bug == LAST_ROW && r + 1 == own->rows ? 0 : part * own->x[r][i];
                dx[r][i] += how->bug == INPUT_SIGN ? -g * w[i][o] : g * w[i][o];
            }
        }
    dw[2][1] += how->bug == ONE_ELEMENT ? 0.5 : 0;
    DP_TRY(grad_add(call, W, &dw[0][0]));
    DP_TRY(grad_add(call, B, db));
    dp_value in =
        made(call, (dp_dtype)weight.dtype, &dx[0][0], 2, (const int64_t[]){own->rows, IN});
    if (in.kind == DP_ERROR)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    if (call->kwargs.kind == DP_DICT)
        call->kwargs_grad = DP_DICT(call->scope, {"x", in});
    else
        call->args_grad = DP_TUPLE_OF(call->scope, in);
    return DP_OK;
}

static dp_module *model_of(dp_ctx *ctx, const model *state, dp_dtype dtype, int rank)
{
    static const dp_method methods[] = {{"forward", model_forward}, {"backward", model_backward}};
    const dp_param_config params[] = {
        [W] = {.name = "w", .dtype = dtype, .ndim = 2, .shape = {IN, OUT}},
        [B] = {.name = "b", .dtype = dtype, .ndim = 1, .shape = {OUT}},
        [SEEN] = {.name = "seen", .buffer = true},
        [IDLE] = {.name = "idle", .ndim = 1, .shape = {2}, .frozen = true},
        [DEAD] = {.name = "dead", .dtype = dtype, .ndim = 1, .shape = {2}}};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "model",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 5,
                                                  .state = state,
                                                  .local_rank = rank},
                              &module));
    for (size_t p = 0; p < 5; p++) {
        dp_scope *scope = dp_scope_begin(ctx);
        const double numbers[] = {0.5, -0.25, 0.375, 1, -0.75, 0.125};
        dp_tensor data, grad, wide;
        CHECK_OK(dp_params_edit(module, p, &data, &grad));
        CHECK_OK(dp_tensor_from(scope, data.device, numbers, DP_F64, data.ndim, data.shape, &wide));
        CHECK_OK(dp_cast(ctx, &data, &wide));
        if (grad.data != NULL)
            CHECK_OK(dp_fill(ctx, &grad, dp_float(3)));
        dp_scope_end(scope);
    }
    return module;
}

static dp_value batch_of(dp_scope *scope, dp_dtype dtype, bool named)
{
    static const int64_t shape[] = {ROWS, IN};
    double *x = dp_scope_alloc(scope, ROWS * IN * sizeof *x);
    float *narrow = dp_scope_alloc(scope, ROWS * IN * sizeof *narrow);
    for (int i = 0; i < ROWS * IN; i++) {
        x[i] = (double)((i * 5) % 13 - 6) / 8 + 0.03;
        narrow[i] = (float)x[i];
    }
    dp_value value = dtype == DP_F64 ? dp_array(scope, x, DP_F64, 2, shape)
                                     : dp_array(scope, narrow, DP_F32, 2, shape);
    return named ? DP_DICT(scope, {"x", value}) : DP_TUPLE_OF(scope, value);
}

/* All bytes of a module, its gradients' too. */
static size_t bytes_of(dp_module *module, char *out)
{
    size_t done = 0;
    for (size_t p = 0; p < dp_module_param_count(module); p++) {
        dp_tensor of[2];
        CHECK_OK(dp_params_edit(module, p, &of[0], &of[1]));
        for (int i = 0; i < 2; i++) {
            size_t bytes = (size_t)dp_tensor_count(&of[i]) * dp_dtype_bytes((dp_dtype)of[i].dtype);
            if (of[i].data == NULL || bytes == 0)
                continue;
            CHECK_OK(dp_read(dp_module_ctx(module), &of[i], out + done, bytes));
            done += bytes;
        }
    }
    return done;
}

/* The module is as it was, whatever comes of the check. */
static dp_status check_of(dp_ctx *ctx, const model *how, dp_dtype dtype,
                          const dp_check_config *config, dp_check_report *report)
{
    char before[512], after[512];
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *module = model_of(ctx, how, dtype, 1);
    size_t bytes = bytes_of(module, before);
    atomic_store(&calls_of_all, 0);
    dp_status status =
        dp_self_check(module, batch_of(scope, dtype, how->form == DICT), config, report);
    CHECK_INT(bytes_of(module, after), bytes);
    CHECK_BYTES(after, before, bytes);
    dp_scope_end(scope);
    CHECK_OK(dp_module_destroy(module));
    return status;
}

/* ---- nothing wrong --------------------------------------------------------------------------- */

TEST_BACKENDS(right_models_pass)
{
    static const form forms[] = {PLAIN, LOSS, SUM, DICT, IMAGES, NUMBER};
    for (size_t i = 0; i < 6; i++)
        for (int k = 0; k < 2; k++) {
            const model how = {.form = forms[i]};
            dp_check_report report;
            CHECK_OK(check_of(ctx, &how, k == 0 ? DP_F32 : DP_F64,
                              &(dp_check_config){.replicas = k == 0 ? 3 : 0}, &report));
            CHECK(report.compared >= (size_t)(1 + IN * OUT + OUT + 2 + ROWS * IN));
            CHECK(report.moved >= (size_t)(IN * OUT + OUT + 2 + 8));
            CHECK_INT(report.undecided, 0);
            CHECK_STR(report.name, "");
        }
}

/* Uneven parts: the mean is weighted by rows. */
TEST_BACKENDS(means_are_weighted_by_rows)
{
    static const model how = {.form = LOSS};
    dp_check_report report;
    CHECK_OK(check_of(ctx, &how, DP_F64, &(dp_check_config){.replicas = 5}, &report));
    CHECK_OK(check_of(ctx, &how, DP_F64, &(dp_check_config){.replicas = 12}, NULL));
    CHECK_OK(check_of(ctx, &how, DP_F64, &(dp_check_config){.replicas = 40}, NULL));
}

TEST(one_device_has_two_replicas)
{
    static const model right = {0}, wrong = {.bug = BATCH_MEAN};
    dp_ctx *ctx = NULL;
    dp_check_report report;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_self_check(model_of(ctx, &right, DP_F32, 0), batch_of(scope, DP_F32, false), NULL,
                           &report));
    CHECK_ERROR(dp_self_check(model_of(ctx, &wrong, DP_F32, 0), batch_of(scope, DP_F32, false),
                              NULL, &report),
                DP_ERR_MISMATCH, "dp_self_check: output differs at [0, 0]");
    CHECK_SAYS(dp_last_error(), "on 2 replicas");
    dp_close(ctx);
}

TEST_BACKENDS(self_check_looks_inside_a_wrapper)
{
    static const model wrong = {.bug = BIAS_HALF};
    dp_module *module = model_of(ctx, &wrong, DP_F64, 0), *par;
    CHECK_OK(dp_data_parallel(module, NULL, &par));
    CHECK_ERROR(dp_self_check(par, batch_of(scope, DP_F64, false), NULL, NULL), DP_ERR_MISMATCH,
                "gradient of 'b'");
}

/* Where abs has its kink nothing is said, but a wrong gradient elsewhere is found. */
TEST_BACKENDS(kinks_are_no_bugs)
{
    static const model steep = {.steep = true};
    dp_check_report report;
    CHECK_OK(check_of(ctx, &steep, DP_F32, NULL, &report));
    CHECK(report.moved + report.undecided >= (size_t)(IN * OUT + OUT + 2 + 8));
    CHECK(report.moved > report.undecided);
    static const model wrong = {.steep = true, .bug = INPUT_SIGN};
    CHECK_ERROR(check_of(ctx, &wrong, DP_F32, NULL, &report), DP_ERR_MISMATCH,
                "gradient of argument 0 at [");
}

/* abs at 0, where its gradient is what one likes. */
TEST_BACKENDS(a_kink_at_the_very_place_is_no_bug)
{
    static const model steep = {.steep = true};
    static const float zeros[ROWS * IN];
    dp_module *module = model_of(ctx, &steep, DP_F32, 0);
    dp_check_report report;
    CHECK_OK(dp_params_write(module, B, zeros, OUT * sizeof *zeros));
    dp_value x = dp_array(scope, zeros, DP_F32, DP_SHAPE(ROWS, IN));
    CHECK_OK(dp_self_check(module, DP_TUPLE_OF(scope, x), NULL, &report));
    CHECK(report.undecided >= OUT);
    CHECK(report.moved >= IN * OUT); /* the weights of nothing */
}

/* A sum over rows that each have a kink somewhere: large moves go over some of them. */
TEST_BACKENDS(kinks_nearby_are_gone_round)
{
    static const model steep = {.steep = true}, wrong = {.steep = true, .bug = BIAS_HALF};
    float x[ROWS * IN];
    dp_check_report report;
    for (int i = 0; i < ROWS * IN; i++)
        x[i] = (float)(i * 7 % 36 - 18) / 4096;
    for (int i = 0; i < 2; i++) {
        dp_module *module = model_of(ctx, i == 0 ? &steep : &wrong, DP_F32, 0);
        CHECK_OK(dp_params_write(module, B, (const float[]){0.0011f, -0.0007f}, 2 * sizeof *x));
        dp_value batch = DP_TUPLE_OF(scope, dp_array(scope, x, DP_F32, DP_SHAPE(ROWS, IN)));
        dp_status status = dp_self_check(module, batch, NULL, &report);
        CHECK_STATUS(status, i == 0 ? DP_OK : DP_ERR_MISMATCH);
        CHECK(i > 0 || report.moved > report.undecided);
    }
}

/* ---- bugs ------------------------------------------------------------------------------------ */

typedef struct finding {
    model how;
    dp_check_config config;
    const char *says;
} finding;

static const finding findings[] = {
    {{ROWS_TWICE, PLAIN, 0}, {.replicas = 2}, "gradient of 'w' differs at [0, 0]: "},
    {{ROWS_TWICE, PLAIN, 0}, {.replicas = 2}, "; all of it is 2 times as large"},
    {{ROWS_TWICE, PLAIN, 0}, {.no_replicas = true}, "gradient of 'w' at [0, 0] is "},
    {{BIAS_HALF, PLAIN, 0}, {0}, "gradient of 'b' at [0] is "},
    {{BIAS_HALF, LOSS, 0}, {0}, "gradient of 'b' at [0] is "},
    {{ONE_ELEMENT, PLAIN, 0}, {.replicas = 2}, "gradient of 'w' differs at [2, 1]: "},
    {{ONE_ELEMENT, PLAIN, 0}, {.no_replicas = true}, "gradient of 'w' at [2, 1] is "},
    {{LAST_ROW, PLAIN, 0}, {.replicas = 2}, "gradient of 'w' differs at [0, 0]: "},
    {{LAST_ROW, SUM, 0}, {.no_replicas = true}, "gradient of 'w' at [0, 0] is "},
    {{INPUT_SIGN, PLAIN, 0}, {0}, "gradient of argument 0 at [0, 0] is "},
    {{INPUT_SIGN, DICT, 0}, {0}, "gradient of argument 'x' at [0, 0] is "},
    {{BATCH_MEAN, PLAIN, 0}, {0}, "output differs at [0, 0]: "},
    {{BATCH_MEAN, DICT, 0}, {0}, "output 'y' differs at [0, 0]: "},
    {{BATCH_MEAN, IMAGES, 0}, {0}, "output 0 differs at [0]: "},
    {{BATCH_MEAN, LOSS, 0}, {0}, "output differs: "},
    {{REPLICA_NUMBER, PLAIN, 0}, {.replicas = 2}, "output differs at [6, 0]: "},
    {{REPLICA_NUMBER, IMAGES, 0}, {.replicas = 3}, "output 4 differs at [0]: "},
    {{COUNTS_CALLS, PLAIN, 0}, {0}, "in another on the same device"},
    {{KIND, PLAIN, 0}, {0}, "output is not of the same kind on one device and on"},
    {{WORDS, PLAIN, 0}, {.only_outputs = true}, "output differs: 'a' on one device, 'b' on"},
    {{FAILS, PLAIN, 0}, {0}, "no forward today"},
    {{FAILS_BACK, PLAIN, 0}, {0}, "no backward today"},
    {{NOT_A_NUMBER, PLAIN, 0}, {.no_replicas = true}, "gradient of 'w' at [0, 0] is nan"},
};

TEST_BACKENDS(planted_bugs_are_found)
{
    for (size_t i = 0; i < sizeof findings / sizeof findings[0]; i++)
        for (int k = 0; k < 2; k++) {
            const finding *own = &findings[i];
            bool fails = own->how.bug == FAILS || own->how.bug == FAILS_BACK;
            dp_check_report report;
            CHECK_ERROR(check_of(ctx, &own->how, k == 0 ? DP_F32 : DP_F64, &own->config, &report),
                        fails ? DP_ERR_USER : DP_ERR_MISMATCH, own->says);
            if (!fails && own->how.bug != KIND && own->how.bug != WORDS)
                CHECK(strncmp(own->says, report.name, strlen(report.name)) == 0 ||
                      own->says[0] == ';' || own->says[0] == 'i');
        }
}

/* 12 rows on one device, 6 on each of two: the gradient of w is twice as large there. */
TEST_BACKENDS(report_names_the_number_that_differs)
{
    static const model how = {.bug = ROWS_TWICE};
    dp_check_report report;
    CHECK_ERROR(check_of(ctx, &how, DP_F64, &(dp_check_config){.replicas = 2}, &report),
                DP_ERR_MISMATCH, "on 2 replicas");
    CHECK_STR(report.name, "gradient of 'w'");
    CHECK_INT(report.ndim, 2);
    CHECK_INT(report.position[0], 0);
    CHECK_INT(report.position[1], 0);
    CHECK_F64(report.found, 2 * report.expected, 1e-12);
    CHECK_ERROR(check_of(ctx, &how, DP_F64, &(dp_check_config){.no_replicas = true}, &report),
                DP_ERR_MISMATCH, "when that number is moved by");
    CHECK_F64(report.found * ROWS, report.expected, 1e-5 * fabs(report.expected));
}

/* What is skipped is not found. */
TEST_BACKENDS(parts_of_it_can_be_left_out)
{
    static const model half = {.bug = BIAS_HALF}, mean = {.bug = BATCH_MEAN},
                       back = {.bug = FAILS_BACK};
    dp_check_report report;
    CHECK_OK(check_of(ctx, &half, DP_F32, &(dp_check_config){.no_differences = true}, &report));
    CHECK_INT(report.moved, 0);
    CHECK_OK(check_of(ctx, &mean, DP_F32,
                      &(dp_check_config){.no_replicas = true, .no_differences = true}, &report));
    CHECK_INT(report.compared, 0);
    CHECK_OK(check_of(ctx, &back, DP_F32, &(dp_check_config){.only_outputs = true}, &report));
    CHECK_INT(report.compared, ROWS * OUT);
    CHECK_OK(check_of(ctx, &(model){0}, DP_F32, &(dp_check_config){.samples = 1}, &report));
    CHECK_INT(report.moved, 4);
}

/* Sums over rows in another order: near, but not the same bits. */
TEST_BACKENDS(exactly_the_same_bits_on_demand)
{
    static const model how = {0};
    dp_check_report report;
    CHECK_OK(check_of(ctx, &how, DP_F32, NULL, &report));
    CHECK_ERROR(check_of(ctx, &how, DP_F32, &(dp_check_config){.exact = true}, &report),
                DP_ERR_MISMATCH, "gradient of '");
    CHECK_ERROR(check_of(ctx, &(model){.bug = REPLICA_NUMBER}, DP_F32,
                         &(dp_check_config){.replicas = 2}, &report),
                DP_ERR_MISMATCH, "output");
    CHECK_OK(check_of(ctx, &(model){.bug = REPLICA_NUMBER}, DP_F32,
                      &(dp_check_config){.replicas = 2, .tolerance = 10, .no_differences = true},
                      &report));
    CHECK_ERROR(check_of(ctx, &how, DP_F32,
                         &(dp_check_config){.tolerance = DP_ZERO, .no_differences = true}, &report),
                DP_ERR_MISMATCH, "gradient of '");
}

/* ---- mean_grads: backward divides by its rows, and takes a number --------------------------- */

static dp_status mean_backward(dp_call *call)
{
    const memo *own = call->saved;
    double dw[IN][OUT] = {{0}}, db[OUT] = {0};
    for (int64_t r = 0; r < own->rows; r++)
        for (int o = 0; o < OUT; o++) {
            double y = own->y[r][o], g = 2 * y * (1 - y * y) / (double)own->rows;
            db[o] += *(const bug *)call->state == BIAS_HALF ? g / 2 : g;
            for (int i = 0; i < IN; i++)
                dw[i][o] += g * own->x[r][i];
        }
    DP_TRY(grad_add(call, W, &dw[0][0]));
    return grad_add(call, B, db);
}

TEST_BACKENDS(models_that_divide_by_themselves)
{
    static const dp_method methods[] = {{"forward", model_forward}, {"backward", mean_backward}};
    static const model right = {.form = DICT}, wrong = {.form = DICT, .bug = BIAS_HALF},
                       bare = {.form = LOSS}, number = {.form = NUMBER};
    static const model *const all[] = {&right, &bare, &number, &wrong};
    static const float numbers[] = {0.5f, -0.25f, 0.375f, 1, -0.75f, 0.125f};
    const dp_param_config params[] = {{.name = "w", .ndim = 2, .shape = {IN, OUT}},
                                      {.name = "b", .ndim = 1, .shape = {OUT}},
                                      {.name = "seen", .buffer = true}};
    for (int i = 0; i < 4; i++) {
        dp_module *module = NULL;
        CHECK_OK(dp_module_create(ctx,
                                  &(dp_module_config){.name = "mean",
                                                      .methods = methods,
                                                      .method_count = 2,
                                                      .params = params,
                                                      .param_count = 3,
                                                      .mean_grads = true,
                                                      .state = all[i]},
                                  &module));
        CHECK_OK(dp_params_write(module, W, numbers, sizeof numbers));
        dp_status status = dp_self_check(module, batch_of(scope, DP_F32, i == 0 || i == 3),
                                         &(dp_check_config){.replicas = 5}, NULL);
        CHECK_STATUS(status, i < 3 ? DP_OK : DP_ERR_MISMATCH);
        if (i == 3)
            CHECK_SAYS(dp_last_error(), "gradient of 'b' at [");
    }
}

/* ---- bad input, no memory -------------------------------------------------------------------- */

TEST_BACKENDS(calls_that_make_no_sense)
{
    static const model how = {0};
    dp_module *module = model_of(ctx, &how, DP_F32, 0);
    dp_value batch = batch_of(scope, DP_F32, false);
    CHECK_ERROR(dp_self_check(NULL, batch, NULL, NULL), DP_ERR_INVALID,
                "dp_self_check: not a module");
    CHECK_ERROR(dp_self_check(module, dp_int(3), NULL, NULL), DP_ERR_INVALID,
                "batch is not a dict, list or tuple");
    CHECK_ERROR(dp_self_check(module, dp_list_make(NULL, DP_LIST, NULL, 0), NULL, NULL),
                DP_ERR_INVALID, "dp_list_make");
    CHECK_ERROR(dp_self_check(module, batch, &(dp_check_config){.tolerance = -1}, NULL),
                DP_ERR_INVALID, "tolerance is -1");
    CHECK_ERROR(dp_self_check(module, batch, &(dp_check_config){.tolerance = HUGE_VAL}, NULL),
                DP_ERR_INVALID, "tolerance is inf");
    CHECK_ERROR(dp_self_check(module, batch, &(dp_check_config){.replicas = 1}, NULL),
                DP_ERR_INVALID, "replicas is 1, not 2 or more");
    CHECK_ERROR(dp_self_check(module, batch, &(dp_check_config){.replicas = -2}, NULL),
                DP_ERR_INVALID, "replicas is -2");
    CHECK_ERROR(dp_self_check(module, batch, &(dp_check_config){.method = "train"}, NULL),
                DP_ERR_UNSUPPORTED, "'model' has no method 'train'");
    CHECK_OK(dp_self_check(module, batch, NULL, NULL));
}

TEST(each_allocation_may_fail)
{
    static const model how = {.form = DICT};
    bool failed = true;
    for (size_t at = 1; failed; at += (size_t)test_step()) {
        test_allocator counter = {0};
        dp_ctx *ctx = NULL;
        char before[512], after[512];
        CHECK_OK(dp_open(&(dp_config){.device_count = 2,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        dp_scope *scope = dp_scope_begin(ctx);
        dp_module *module = model_of(ctx, &how, DP_F32, 0);
        dp_value batch = batch_of(scope, DP_F32, true);
        size_t bytes = bytes_of(module, before);
        counter.fail_at = counter.call_count + at;
        dp_status status = dp_self_check(module, batch, &(dp_check_config){.samples = 1}, NULL);
        failed = counter.fail_count > 0;
        CHECK_STATUS(status, failed ? DP_ERR_NO_MEMORY : DP_OK);
        CHECK_INT(bytes_of(module, after), bytes);
        CHECK_BYTES(after, before, bytes);
        CHECK_OK(dp_module_destroy(module)); /* nothing uses it any more */
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}
