/* careless.h - a model that makes the mistakes of beginners, one at a time, and what the library
   says of them. For devices whose memory the host reaches. */

#ifndef CARELESS_H
#define CARELESS_H

#include "../dp_train.h"
#include <pthread.h>
#include <stdatomic.h>
#include "meeting.h"

enum { COLUMNS = 4 };

typedef enum fault {
    NO_FAULT,
    ASSIGNS,        /* grad = where it must be += */
    ASSIGNS_ONE,    /* of the bias only */
    SHARES_MEMORY,  /* what a forward keeps for its backward is static */
    SHARES_SCRATCH, /* what a forward uses by itself is static */
    LOSS_IS_NAN,
    LOSS_IS_LATE_NAN, /* from the third forward on */
    GRAD_IS_INF,
    IS_RANDOM,
    READS_BEYOND,
    WRITES_BEYOND,
    READS_UNWRITTEN,
    GRAD_IS_TWICE, /* one of them is twice what it should be */
    MOVES_INPUT    /* a forward writes to its batch */
} fault;

typedef struct careless {
    fault fault;
    dp_dtype dtype; /* of the parameters: DP_F32, or another one with ready gradients of zeros */
} careless;

/* ---- the log --------------------------------------------------------------------------------- */

typedef struct warned { /* of one process */
    char text[2048];    /* records at warn level and above, one a line */
    int count;
} warned;

static pthread_mutex_t hears = PTHREAD_MUTEX_INITIALIZER; /* devices warn at the same time */

static inline void hear_warning(const dp_log_record *record, void *user)
{
    warned *log = user;
    if (record->level > DP_LOG_WARN || strstr(record->text, " comes last: ") != NULL)
        return; /* on a machine that is busy one process may */
    pthread_mutex_lock(&hears);
    size_t used = strlen(log->text);
    log->count++;
    snprintf(log->text + used, sizeof log->text - used, "%s\n", record->text);
    pthread_mutex_unlock(&hears);
}

static inline dp_config config_heard(warned *log, int devices)
{
    *log = (warned){.count = 0};
    return (dp_config){.device_count = devices,
                       .thread_count = devices, /* as if there were as many cores */
                       .log = {.fn = hear_warning, .user = log, .level = DP_LOG_TRACE}};
}

/* ---- the model: loss = mean of (x w + b - y)^2 ----------------------------------------------- */

typedef struct careless_kept {
    int64_t rows;
    const float *x;
    float *apart; /* x w + b - y */
} careless_kept;

static inline fault fault_of(const dp_call *call)
{
    return ((const careless *)call->state)->fault;
}

/* A replica that is slow gives others time to spoil what it shares with them. */
static inline void linger(const dp_call *call)
{
    struct timespec pause = {0, 20000000};
    if (fault_of(call) == SHARES_SCRATCH)
        nanosleep(&pause, NULL);
}

static inline float careless_loss(const dp_call *call, float sum, int64_t rows)
{
    static atomic_int forwards, draws;
    fault own = fault_of(call);
    float loss = rows > 0 ? sum / (float)rows : 0;
    if (own == LOSS_IS_NAN || (own == LOSS_IS_LATE_NAN && atomic_fetch_add(&forwards, 1) >= 2))
        return (float)NAN;
    if (own == IS_RANDOM)
        loss += (float)atomic_fetch_add(&draws, 1);
    return loss;
}

static inline dp_status careless_forward(dp_call *call)
{
    static float shared[256];
    static careless_kept shared_kept;
    const dp_tensor *x, *y;
    float sum = 0, *loss = dp_scope_alloc(call->scope, sizeof *loss);
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 2, &x));
    DP_TRY(dp_call_tensor(call, "y", DP_F32, 1, &y));
    int64_t rows = x->shape[0];
    const float *w = dp_param(call, 0), *b = dp_param(call, 1);
    size_t bytes = (size_t)rows * sizeof(float);
    bool is_static = fault_of(call) == SHARES_MEMORY || fault_of(call) == SHARES_SCRATCH;
    float *apart = is_static ? shared : dp_scope_alloc(call->scope, bytes);
    careless_kept *kept =
        fault_of(call) == SHARES_MEMORY ? &shared_kept : dp_scope_alloc(call->scope, sizeof *kept);
    *kept = (careless_kept){rows, x->data, apart};
    for (int64_t r = 0; r < rows; r++) {
        apart[r] = b[0] - ((const float *)y->data)[r];
        for (int c = 0; c < COLUMNS; c++)
            apart[r] += kept->x[r * COLUMNS + c] * w[c];
    }
    linger(call);
    for (int64_t r = 0; r < rows; r++)
        sum += apart[r] * apart[r];
    if (fault_of(call) == READS_BEYOND)
        sum += apart[rows];
    if (fault_of(call) == WRITES_BEYOND)
        apart[rows] = 1;
    if (fault_of(call) == READS_UNWRITTEN)
        sum += *(float *)dp_scope_alloc(call->scope, sizeof(float));
    if (fault_of(call) == MOVES_INPUT)
        ((float *)(uintptr_t)x->data)[0] += 1;
    if (fault_of(call) == SHARES_SCRATCH) { /* backward gets its own */
        kept->apart = dp_scope_alloc(call->scope, bytes);
        memcpy(kept->apart, shared, bytes);
    }
    *loss = careless_loss(call, sum, rows);
    call->saved = kept;
    dp_tensor scalar = dp_wrap(loss, DP_F32, 0, NULL);
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &scalar)});
    return DP_OK;
}

static inline dp_status careless_backward(dp_call *call)
{
    const careless_kept *kept = call->saved;
    dp_tensor out;
    DP_TRY(dp_call_out_grad(call, "loss", &out));
    float *w = dp_grad(call, 0), *b = dp_grad(call, 1), by = *(const float *)out.data;
    fault own = fault_of(call);
    float sums[COLUMNS + 1] = {0};
    for (int64_t r = 0; r < kept->rows; r++) {
        float own_part = by * 2 * kept->apart[r] / (float)kept->rows;
        for (int c = 0; c < COLUMNS; c++)
            sums[c] += own_part * kept->x[r * COLUMNS + c];
        sums[COLUMNS] += own_part;
    }
    if (own == GRAD_IS_TWICE)
        sums[1] *= 2;
    if (own == GRAD_IS_INF)
        sums[2] = (float)INFINITY;
    for (int c = 0; c < COLUMNS; c++)
        w[c] = own == ASSIGNS ? sums[c] : w[c] + sums[c];
    b[0] = own == ASSIGNS || own == ASSIGNS_ONE ? sums[COLUMNS] : b[0] + sums[COLUMNS];
    return DP_OK;
}

static inline dp_module *careless_create(dp_ctx *ctx, const careless *state)
{
    static const dp_method methods[] = {{"forward", careless_forward},
                                        {"backward", careless_backward}};
    static const dp_param_config params[] = {
        {.name = "w", .dtype = DP_F32, .ndim = 1, .shape = {COLUMNS}},
        {.name = "b", .dtype = DP_F32, .ndim = 1, .shape = {1}}};
    const float w[COLUMNS] = {1, -1, 2, 0.5f};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 2,
                                                  .state = state},
                              &net));
    CHECK_OK(dp_params_write(net, 0, w, sizeof w));
    return net;
}

/* So many rows, of which `seed` says what is in them; they last as long as the scope. */
static inline dp_value careless_batch(dp_scope *scope, int64_t rows, int seed)
{
    float *x = dp_scope_alloc(scope, (size_t)(rows * COLUMNS) * sizeof *x);
    float *y = dp_scope_alloc(scope, (size_t)rows * sizeof *y);
    CHECK(x != NULL && y != NULL);
    for (int64_t i = 0; i < rows * COLUMNS; i++)
        x[i] = (float)((i * 7 + seed * 5) % 11) / 8;
    for (int64_t i = 0; i < rows; i++)
        y[i] = (float)((i * 3 + seed) % 5) / 4;
    return DP_DICT(scope, {"x", dp_array(scope, x, DP_F32, DP_SHAPE(rows, COLUMNS))},
                   {"y", dp_array(scope, y, DP_F32, DP_SHAPE(rows))});
}

static inline dp_optim *careless_optim(dp_module *module)
{
    dp_optim *sgd = NULL;
    CHECK_OK(dp_optim_create(module, &(dp_optim_config){.hyper.lr = 0.01}, &sgd));
    return sgd;
}

/* Steps until one fails, whose status this returns. */
static inline dp_status careless_steps(dp_module *par, dp_optim *optim, int count, int64_t rows,
                                       int seed)
{
    dp_status status = DP_OK;
    for (int i = 0; i < count && status == DP_OK; i++) {
        dp_value log;
        dp_scope *step = dp_scope_begin(dp_module_ctx(par));
        status = dp_train_step(par, step, careless_batch(step, rows, seed + i), optim, &log);
        dp_scope_end(step);
    }
    return status;
}

#endif /* CARELESS_H */
