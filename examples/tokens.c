/* tokens.c - sequences of different lengths: a gradient is the mean over all tokens of a step, on
   any number of devices and processes, and when two passes make one step.

   Each device has other rows, and these have more or fewer tokens. So the mean of the devices'
   means is not that over tokens, nor is the mean of two passes' means. A forward that says how many
   tokens its mean is over mends both: call->weight. The log wants to know it, too.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/tokens.c dp.o -o tokens -lpthread -lm
   Run:   ./tokens
          DP_DEVICES=3 ./tokens
          dprun -n 2 ./tokens
   Prints:
   one loop over all tokens:  loss 0.5893
   means weighted by tokens:  loss 0.5893, the same table
   means weighted by rows:    loss ..., another table: off by up to ... */

#include "../dp_train.h"
#include <math.h>
#include <stdio.h>

enum { WORDS = 24, LONGEST = 64, BATCH = 7, PASSES = 2, STEPS = 24, ROWS = BATCH * PASSES * STEPS };

static int64_t text[ROWS][LONGEST + 1], length[ROWS]; /* length[r] words have one that follows */
static const double rate = 10;

/* Few rows are long, and what follows a word is another one in long rows. */
static void make_text(void)
{
    unsigned seed = 1;
    for (int r = 0; r < ROWS; r++) {
        seed = seed * 1664525u + 1013904223u;
        double u = (seed >> 8) / (double)(1 << 24);
        length[r] = 1 + (int64_t)((LONGEST - 1) * u * u * u);
        text[r][0] = r % WORDS;
        for (int64_t i = 0; i < length[r]; i++)
            text[r][i + 1] = (text[r][i] + (length[r] > 8 ? 3 : 5)) % WORDS;
    }
}

/* The model: a table of how well each word follows each. Sums -log p over the tokens of some rows,
   and adds `by` times the gradient of that sum to `grad`. */
static double run_rows(const float *table, const int64_t *words, const int64_t *lengths,
                       int64_t rows, float by, float *grad)
{
    double sum = 0;
    for (int64_t r = 0; r < rows; r++, words += LONGEST + 1)
        for (int64_t i = 0; i < lengths[r]; i++) {
            const float *logits = table + words[i] * WORDS;
            float p[WORDS], all = 0;
            for (int w = 0; w < WORDS; w++)
                all += p[w] = expf(logits[w]);
            sum -= (double)logf(p[words[i + 1]] / all);
            for (int w = 0; grad != NULL && w < WORDS; w++)
                grad[words[i] * WORDS + w] += by * (p[w] / all - (float)(w == words[i + 1]));
        }
    return sum;
}

static int64_t count_tokens(const int64_t *lengths, int64_t rows)
{
    int64_t tokens = 0;
    for (int64_t r = 0; r < rows; r++)
        tokens += lengths[r];
    return tokens;
}

/* ---- on one device, without dp.h ------------------------------------------------------------- */

/* As a loop adds gradients of passes up: sums over tokens, divided by the tokens of all of them. */
static double one_loop(float *table)
{
    double loss = 0;
    for (int step = 0; step < STEPS; step++) {
        float grad[WORDS * WORDS] = {0};
        int64_t tokens = 0;
        for (int pass = 0; pass < PASSES; pass++) {
            int at = (step * PASSES + pass) * BATCH;
            int64_t own = count_tokens(&length[at], BATCH);
            loss = run_rows(table, text[at], &length[at], BATCH, 1, grad) / (double)own;
            tokens += own;
        }
        for (int i = 0; i < WORDS * WORDS; i++)
            table[i] -= (float)(rate * (double)grad[i] / (double)tokens);
    }
    return loss;
}

/* ---- on all devices of all processes --------------------------------------------------------- */

/* text [rows, LONGEST + 1] and length [rows] -> the mean over the tokens of these rows */
static dp_status forward(dp_call *call)
{
    const bool *by_tokens = call->state;
    const dp_tensor *words, *lengths;
    dp_tensor loss;
    DP_TRY(dp_call_tensor(call, "text", DP_I64, 2, &words));
    DP_TRY(dp_call_tensor(call, "length", DP_I64, 1, &lengths));
    int64_t rows = lengths->shape[0], tokens = count_tokens(lengths->data, rows);
    double sum = run_rows(dp_param(call, 0), words->data, lengths->data, rows, 0, NULL);
    float mean = tokens > 0 ? (float)(sum / (double)tokens) : 0; /* a device may have no rows */
    if (*by_tokens)
        call->weight = (double)tokens; /* this is all */
    DP_TRY(dp_tensor_from(call->scope, call->device, &mean, DP_F32, 0, NULL, &loss));
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)});
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    const dp_tensor *words, *lengths;
    dp_tensor grad;
    DP_TRY(dp_call_tensor(call, "text", DP_I64, 2, &words));
    DP_TRY(dp_call_tensor(call, "length", DP_I64, 1, &lengths));
    DP_TRY(dp_call_out_grad(call, "loss", &grad));
    int64_t rows = lengths->shape[0], tokens = count_tokens(lengths->data, rows);
    float by = tokens > 0 ? *(const float *)grad.data / (float)tokens : 0;
    run_rows(dp_param(call, 0), words->data, lengths->data, rows, by, dp_grad(call, 0));
    return DP_OK;
}

static dp_status create(dp_ctx *ctx, const bool *by_tokens, dp_module **out)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    static const dp_param_config table = {.name = "table", .ndim = 2, .shape = {WORDS, WORDS}};
    const dp_module_config config = {.name = "words",
                                     .methods = methods,
                                     .method_count = 2,
                                     .params = &table,
                                     .param_count = 1,
                                     .state = by_tokens};
    return dp_module_create(ctx, &config, out);
}

/* Returns the loss of the last pass: of all processes, as the gradients are. */
static double train(dp_ctx *ctx, const bool *by_tokens, float *table)
{
    dp_module *net, *par;
    dp_optim *sgd;
    dp_tensor data;
    int64_t mine, rows;
    double loss = 0;
    DP_CHECK(create(ctx, by_tokens, &net));
    DP_CHECK(dp_everywhere(net, &par));
    DP_CHECK(
        dp_optim_create(par, &(dp_optim_config){.hyper.lr = rate, .accumulate = PASSES}, &sgd));
    DP_CHECK(dp_my_rows(ctx, BATCH, &mine, &rows));
    for (int pass = 0; pass < PASSES * STEPS; pass++) {
        int64_t at = pass * BATCH + mine, tokens = count_tokens(&length[at], rows);
        dp_scope *step = dp_scope_begin(ctx);
        dp_value words = dp_array(step, text[at], DP_I64, DP_SHAPE(rows, LONGEST + 1));
        dp_value lengths = dp_array(step, &length[at], DP_I64, DP_SHAPE(rows));
        dp_value log, batch = DP_DICT(step, {"text", words}, {"length", lengths});
        DP_CHECK(dp_train_step(par, step, batch, sgd, &log));
        DP_CHECK(dp_log_mean(ctx, step, log, *by_tokens ? tokens : rows, &log));
        DP_CHECK(dp_item(ctx, dp_get(log, "loss"), &loss));
        dp_scope_end(step);
    }
    DP_CHECK(dp_params_edit(net, 0, &data, NULL));
    DP_CHECK(dp_read(ctx, &data, table, WORDS * WORDS * sizeof *table));
    return loss;
}

static double difference(const float *a, const float *b)
{
    double most = 0;
    for (int i = 0; i < WORDS * WORDS; i++)
        most = fmax(most, fabs((double)(a[i] - b[i])));
    return most;
}

static void tell(const char *weights, double loss, double off)
{
    printf("means weighted by %s loss %.4f, ", weights, loss);
    if (off < 1e-5)
        printf("the same table\n");
    else
        printf("another table: off by up to %.2f\n", off);
}

int main(void)
{
    static const bool by_tokens = true, by_rows = false;
    static float wanted[WORDS * WORDS], table[WORDS * WORDS], naive[WORDS * WORDS];
    dp_ctx *ctx;
    make_text();
    DP_CHECK(dp_open(NULL, &ctx));
    double alone = one_loop(wanted);
    double right = train(ctx, &by_tokens, table), wrong = train(ctx, &by_rows, naive);
    if (dp_rank(ctx) == 0) {
        printf("one loop over all tokens:  loss %.4f\n", alone);
        tell("tokens: ", right, difference(table, wanted));
        tell("rows:   ", wrong, difference(naive, wanted));
    }
    dp_close(ctx);
    return 0;
}
