/* test_growth.c - many of everything: what is right for three is right for thousands, and each of
   thousands costs as much as each of a few. Costs are compared as processor time, of as many things
   in few at once and in many, with room for noise: what grows as the square takes MANY / FEW times
   as much. */

#include <stdio.h>
#include <time.h>
#include "nets.h"

enum { FEW = 128, MANY = 8192, TRIES = 5, AT_MOST = 6, NAME = 32 };

static char names[MANY][NAME], reversed_names[MANY][NAME];

static void make_names(size_t count)
{
    for (size_t i = 0; i < count; i++) {
        snprintf(names[i], NAME, "loss%zu", i);
        snprintf(reversed_names[i], NAME, "loss%zu", count - 1 - i);
    }
}

static dp_ctx *two_devices(void)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2, .devices = (const int[]){0, 0}}, &ctx));
    return ctx;
}

/* ---- what things cost ------------------------------------------------------------------------ */

typedef struct task { /* what is done with `count` things */
    dp_ctx *ctx;
    size_t count;
    dp_status (*work)(const struct task *job, dp_scope *scope);
} task;

static double processor_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static double least_ns(const task *job)
{
    double least = 0;
    for (int i = 0; i < TRIES; i++) {
        double start = processor_ns();
        for (size_t k = 0; k < MANY / job->count; k++) {
            dp_scope *scope = dp_scope_begin(job->ctx);
            CHECK_OK(job->work(job, scope));
            dp_scope_end(scope);
        }
        double spent = processor_ns() - start;
        least = i == 0 || spent < least ? spent : least;
    }
    return least;
}

/* MANY at once cost about as much as MANY / FEW times FEW. */
static void check_growth(const char *what, dp_status (*work)(const task *job, dp_scope *scope))
{
    dp_ctx *ctx = two_devices();
    make_names(FEW);
    double few = least_ns(&(task){ctx, FEW, work});
    make_names(MANY);
    double many = least_ns(&(task){ctx, MANY, work});
    if (many > AT_MOST * few)
        test_fail(__FILE__, __LINE__, "%s: %.0f ns each of %d, %.0f ns each of %d", what,
                  few / MANY, FEW, many / MANY, MANY);
    dp_close(ctx);
}

/* ---- dicts ----------------------------------------------------------------------------------- */

/* Key i holds the number i, or a tensor of `rows` of them. */
static dp_value dict_of(dp_scope *scope, size_t count, char (*keys)[NAME], int64_t rows)
{
    const dp_value no_memory = {.kind = DP_ERROR, .status = DP_ERR_NO_MEMORY};
    dp_pair *pairs = dp_scope_alloc(scope, count * sizeof *pairs);
    float *data = dp_scope_alloc(scope, count * (size_t)rows * sizeof *data);
    if (pairs == NULL || data == NULL)
        return no_memory;
    for (size_t i = 0; i < count; i++) {
        size_t number = keys == names ? i : count - 1 - i;
        dp_tensor tensor = dp_wrap(data + i * (size_t)rows, DP_F32, DP_SHAPE(rows));
        for (int64_t k = 0; k < rows; k++)
            data[i * (size_t)rows + (size_t)k] = (float)number;
        pairs[i] = (dp_pair){keys[i], rows > 0 ? dp_of(scope, &tensor) : dp_int((int64_t)number)};
    }
    return dp_dict_make(scope, pairs, count);
}

TEST(duplicate_keys_are_found_wherever_they_are)
{
    const size_t counts[] = {2, 15, 16, 17, 18, 24, 25, 4096};
    dp_ctx *ctx = two_devices();
    dp_scope *scope = dp_scope_begin(ctx);
    static dp_pair pairs[4096];
    make_names(4096);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        size_t count = counts[c];
        const size_t places[][2] = {
            {0, 1}, {0, count - 1}, {count - 2, count - 1}, {count / 3, count / 2}};
        for (size_t i = 0; i < count; i++)
            pairs[i] = (dp_pair){names[i], dp_int((int64_t)i)};
        CHECK_INT(dp_dict_make(scope, pairs, count).kind, DP_DICT);
        for (size_t p = 0; p < 4; p++) {
            char copy[NAME], sentence[2 * NAME];
            size_t first = places[p][0], second = places[p][1];
            if (first == second)
                continue;
            memcpy(copy, names[first], NAME); /* equal, and elsewhere */
            pairs[second].key = copy;
            dp_value wrong = dp_dict_make(scope, pairs, count);
            snprintf(sentence, sizeof sentence, "key '%s' is there twice", copy);
            CHECK_ERROR(dp_keep(scope, wrong, &wrong), DP_ERR_INVALID, sentence);
            pairs[second].key = names[second];
        }
    }
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(many_keys_are_kept_in_their_order)
{
    dp_ctx *ctx = two_devices();
    dp_scope *scope = dp_scope_begin(ctx);
    make_names(4096);
    dp_value dict = dict_of(scope, 4096, names, 0);
    CHECK_INT(dict.count, 4096);
    for (size_t i = 0; i < 4096; i++) {
        CHECK_STR(dict.as.pairs[i].key, names[i]);
        CHECK(dict.as.pairs[i].key != names[i]);
        CHECK_INT(dict.as.pairs[i].value.as.i, i);
    }
    for (size_t i = 0; i < 4096; i += 97)
        CHECK_INT(dp_get(dict, names[i]).as.i, i);
    CHECK_INT(dp_get(dict, "loss4096").kind, DP_NONE);
    dp_scope_end(scope);
    dp_close(ctx);
}

/* Names of which one is the beginning of another. */
TEST(keys_that_begin_alike_are_different)
{
    enum { LONGEST = 64 };
    static char text[LONGEST + 1];
    dp_pair pairs[LONGEST];
    dp_ctx *ctx = two_devices();
    dp_scope *scope = dp_scope_begin(ctx);
    memset(text, 'a', LONGEST);
    for (size_t i = 0; i < LONGEST; i++)
        pairs[i] = (dp_pair){text + i, dp_none()};
    dp_value first = dp_dict_make(scope, pairs, LONGEST), out;
    CHECK_INT(first.kind, DP_DICT);
    for (size_t i = 0; i < LONGEST; i++)
        pairs[i].key = text + LONGEST - 1 - i;
    dp_value list = DP_LIST_OF(scope, first, dp_dict_make(scope, pairs, LONGEST));
    CHECK_OK(dp_gather(ctx, scope, list, NULL, &out));
    CHECK_STR(out.as.pairs[LONGEST - 1].key, "a");
    dp_scope_end(scope);
    dp_close(ctx);
}

static void check_gathered(dp_value out, size_t count, int64_t rows)
{
    CHECK_INT(out.count, count);
    for (size_t i = 0; i < count; i++) {
        const dp_tensor *tensor = NULL;
        CHECK_STR(out.as.pairs[i].key, names[i]);
        CHECK_OK(dp_as_tensor(out.as.pairs[i].value, "x", DP_F32, 1, &tensor));
        CHECK_INT(tensor->shape[0], rows);
        for (int64_t k = 0; k < rows; k++)
            CHECK_F64(((const float *)tensor->data)[k], (double)i, 0);
    }
}

TEST(many_keys_are_gathered_in_any_order)
{
    dp_ctx *ctx = two_devices();
    for (size_t count = 10; count <= 4096; count = count * 8 + 16) {
        dp_scope *scope = dp_scope_begin(ctx);
        make_names(count);
        dp_value dict = dict_of(scope, count, names, 1), out;
        dp_value turned = dict_of(scope, count, reversed_names, 2);
        CHECK_OK(dp_gather(ctx, scope, DP_LIST_OF(scope, dict, dict, turned), NULL, &out));
        check_gathered(out, count, 4);
        CHECK_OK(dp_gather(ctx, scope, DP_LIST_OF(scope, dict, turned, dict, turned), NULL, &out));
        check_gathered(out, count, 6);
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* A key too many is named, and so is one too few, in every order. */
static void check_other_keys(dp_ctx *ctx, size_t count, char (*keys)[NAME])
{
    char sentence[128];
    const size_t places[] = {0, count / 2, count - 1};
    dp_scope *scope = dp_scope_begin(ctx);
    make_names(count);
    dp_value dict = dict_of(scope, count, names, 0), out;
    dp_pair *pairs = dp_scope_alloc(scope, (count + 1) * sizeof *pairs);
    for (size_t p = 0; p < 3; p++) {
        size_t place = places[p];
        for (size_t i = 0; i < count; i++)
            pairs[i] = (dp_pair){keys[i], dp_none()};
        pairs[place].key = "other";
        dp_value wrong = dp_dict_make(scope, pairs, count);
        CHECK_ERROR(dp_gather(ctx, scope, DP_LIST_OF(scope, dict, wrong), NULL, &out),
                    DP_ERR_MISMATCH, "has key 'other' in replica 1, not in replica 0");
        memmove(&pairs[place], &pairs[place + 1], (count - place - 1) * sizeof *pairs);
        wrong = dp_dict_make(scope, pairs, count - 1);
        snprintf(sentence, sizeof sentence, "['%s'] is missing in replica 1", keys[place]);
        dp_value rest = dp_dict_make(scope, pairs, count - 1);
        for (size_t i = 0; i < count; i++)
            pairs[i] = (dp_pair){names[i], dp_none()};
        dict = dp_dict_make(scope, pairs, count);
        CHECK_ERROR(dp_gather(ctx, scope, DP_LIST_OF(scope, dict, rest), NULL, &out),
                    DP_ERR_MISMATCH, sentence);
    }
    dp_scope_end(scope);
}

TEST(keys_that_differ_are_named)
{
    dp_ctx *ctx = two_devices();
    check_other_keys(ctx, 9, names);
    check_other_keys(ctx, 9, reversed_names);
    check_other_keys(ctx, 4096, names);
    check_other_keys(ctx, 4096, reversed_names);
    dp_close(ctx);
}

static dp_status make_dict(const task *job, dp_scope *scope)
{
    dp_pair *pairs = dp_scope_alloc(scope, job->count * sizeof *pairs);
    for (size_t i = 0; i < job->count; i++)
        pairs[i] = (dp_pair){names[i], dp_none()};
    return dp_dict_make(scope, pairs, job->count).kind == DP_DICT ? DP_OK : DP_ERR_USER;
}

static dp_status gather_dicts(const task *job, dp_scope *scope)
{
    dp_value dict = dict_of(scope, job->count, names, 1), out;
    return dp_gather(job->ctx, scope, DP_LIST_OF(scope, dict, dict), NULL, &out);
}

static dp_status gather_turned_dicts(const task *job, dp_scope *scope)
{
    dp_value dict = dict_of(scope, job->count, names, 1), out;
    dp_value turned = dict_of(scope, job->count, reversed_names, 1);
    return dp_gather(job->ctx, scope, DP_LIST_OF(scope, dict, turned), NULL, &out);
}

TEST_SLOW(many_keys_cost_as_much_as_few, 60)
{
    check_growth("a dict made", make_dict);
    check_growth("dicts gathered", gather_dicts);
    check_growth("dicts gathered whose orders differ", gather_turned_dicts);
}

/* ---- dicts of outputs, gradients and losses -------------------------------------------------- */

/* Output `lossI` is the argument of that name; replica 1 gives them in the other order. */
static dp_status echo(dp_call *call)
{
    size_t count = *(const size_t *)call->state;
    dp_pair *pairs = dp_scope_alloc(call->scope, count * sizeof *pairs);
    for (size_t i = 0; i < count; i++)
        pairs[i] = call->kwargs.as.pairs[call->replica == 1 ? count - 1 - i : i];
    call->out = dp_dict_make(call->scope, pairs, count);
    return DP_OK;
}

/* Input gradients are the outputs', as they come: in the order of the gradient. */
static dp_status echo_back(dp_call *call)
{
    size_t count = call->grad.count;
    dp_pair *pairs = dp_scope_alloc(call->scope, count * sizeof *pairs);
    for (size_t i = 0; i < count; i++)
        pairs[i] = call->grad.as.pairs[call->replica == 1 ? count - 1 - i : i];
    call->kwargs_grad = dp_dict_make(call->scope, pairs, count);
    return DP_OK;
}

static dp_module *new_echo(dp_ctx *ctx, const size_t *count)
{
    static const dp_method methods[] = {{"forward", echo}, {"backward", echo_back}};
    dp_module *module = NULL, *par = NULL;
    dp_module_config config = {.methods = methods, .method_count = 2, .state = count};
    CHECK_OK(dp_module_create(ctx, &config, &module));
    CHECK_OK(dp_data_parallel(module, NULL, &par));
    return par;
}

static dp_status pass_of(dp_module *par, dp_scope *scope, size_t count, char (*keys)[NAME],
                         dp_value *out, dp_input_grad *out_grad)
{
    dp_pass *pass = NULL;
    dp_value inputs = dict_of(scope, count, names, 4);
    TRY(dp_invoke(par, "forward", scope, dp_none(), inputs, NULL, out, &pass));
    return dp_backward(pass, dict_of(scope, count, keys, 4), out_grad);
}

TEST(many_keys_come_back_in_any_order)
{
    dp_ctx *ctx = two_devices();
    for (size_t count = 10; count <= 4096; count = count * 8 + 16) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_module *par = new_echo(ctx, &count);
        dp_input_grad inputs;
        dp_value out;
        make_names(count);
        CHECK_OK(pass_of(par, scope, count, names, &out, &inputs));
        check_gathered(out, count, 4);
        check_gathered(inputs.kwargs, count, 4);
        CHECK_OK(pass_of(par, scope, count, reversed_names, &out, &inputs));
        CHECK_STR(inputs.kwargs.as.pairs[0].key, reversed_names[0]);
        for (size_t i = 0; i < count / 2; i++) { /* as the inputs' gradients would be in order */
            dp_pair *pairs = (dp_pair *)(uintptr_t)inputs.kwargs.as.pairs, first = pairs[i];
            pairs[i] = pairs[count - 1 - i];
            pairs[count - 1 - i] = first;
        }
        check_gathered(inputs.kwargs, count, 4);
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* A gradient may leave keys out, also where its dict is large; one too many is named. */
TEST(many_keys_may_be_left_out_of_a_gradient)
{
    enum { COUNT = 512 };
    const size_t count = COUNT;
    dp_ctx *ctx = two_devices();
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par = new_echo(ctx, &count);
    static dp_pair pairs[COUNT];
    dp_input_grad inputs;
    dp_pass *pass = NULL;
    dp_value out;
    make_names(COUNT);
    dp_value given = dict_of(scope, COUNT, names, 4);
    for (size_t i = 0; i < COUNT / 2; i++)
        pairs[i] = given.as.pairs[2 * i + 1];
    CHECK_OK(dp_invoke(par, "forward", scope, dp_none(), given, NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_dict_make(scope, pairs, COUNT / 2), &inputs));
    CHECK_INT(inputs.kwargs.count, COUNT / 2);
    for (size_t i = 0; i < COUNT / 2; i++)
        CHECK_STR(inputs.kwargs.as.pairs[i].key, names[2 * i + 1]);
    pairs[COUNT / 4].key = "other";
    CHECK_OK(dp_invoke(par, "forward", scope, dp_none(), given, NULL, &out, &pass));
    CHECK_ERROR(dp_backward(pass, dp_dict_make(scope, pairs, COUNT / 2), &inputs), DP_ERR_MISMATCH,
                "of the gradient has key 'other', the output has not");
    dp_scope_end(scope);
    dp_close(ctx);
}

static dp_status backward_of_dicts(const task *job, dp_scope *scope)
{
    static dp_module *par;
    static size_t count;
    dp_input_grad inputs;
    dp_value out;
    if (count != job->count) { /* one a context and size; dp_close takes them */
        count = job->count;
        par = new_echo(job->ctx, &count);
    }
    return pass_of(par, scope, count, names, &out, &inputs);
}

/* Those of replica 1 in the other order. */
static dp_status losses(dp_call *call)
{
    size_t count = *(const size_t *)call->state;
    char(*keys)[NAME] = call->replica == 1 ? reversed_names : names;
    call->out = dict_of(call->scope, count, keys, 1);
    return DP_OK;
}

static dp_status losses_back(dp_call *call)
{
    (void)call;
    return DP_OK;
}

static dp_module *new_losses(dp_ctx *ctx, const size_t *count)
{
    static const dp_method methods[] = {{"forward", losses}, {"backward", losses_back}};
    dp_module *module = NULL, *par = NULL;
    dp_module_config config = {.methods = methods, .method_count = 2, .state = count};
    CHECK_OK(dp_module_create(ctx, &config, &module));
    CHECK_OK(dp_data_parallel(module, NULL, &par));
    return par;
}

static dp_status losses_step(dp_module *par, dp_scope *scope, dp_value *log)
{
    static const float x[2] = {1, 2};
    dp_tensor tensor = dp_wrap_const(x, DP_F32, DP_SHAPE(2));
    return dp_train_step(par, scope, DP_DICT(scope, {"x", dp_of(scope, &tensor)}), NULL, log);
}

TEST(many_losses_are_logged_whatever_their_order)
{
    for (size_t count = 10; count <= 1024; count = count * 8 + 16) {
        dp_ctx *ctx = two_devices();
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log;
        double sum = 0, want = 0;
        make_names(count);
        CHECK_OK(losses_step(new_losses(ctx, &count), scope, &log));
        CHECK_INT(log.count, count + 1);
        for (size_t i = 0; i < count; i++) {
            CHECK_STR(log.as.pairs[i + 1].key, names[i]);
            CHECK_F64(*(const double *)log.as.pairs[i + 1].value.as.t->data, (double)i, 0);
            want += (double)i;
        }
        sum = *(const double *)dp_get(log, "loss").as.t->data;
        CHECK_F64(sum, want, 0);
        dp_scope_end(scope);
        dp_close(ctx);
    }
}

static dp_status step_of_losses(const task *job, dp_scope *scope)
{
    static dp_module *par;
    static size_t count;
    dp_value log;
    if (count != job->count) {
        count = job->count;
        par = new_losses(job->ctx, &count);
    }
    return losses_step(par, scope, &log);
}

TEST_SLOW(many_outputs_cost_as_much_as_few, 60)
{
    check_growth("a forward and a backward with dicts", backward_of_dicts);
    check_growth("a step with losses", step_of_losses);
}

/* ---- the nth allocation fails ---------------------------------------------------------------- */

static dp_status work_on_many(dp_ctx *ctx, dp_scope *scope, const size_t *count)
{
    dp_value dict = dict_of(scope, *count, names, 1), out;
    dp_value turned = dict_of(scope, *count, reversed_names, 1);
    return dp_gather(ctx, scope, DP_LIST_OF(scope, dict, turned), NULL, &out);
}

/* All of this once, with one allocation that fails; true when there was one to fail. */
static bool survives(size_t n)
{
    enum { COUNT = 600 };
    const size_t count = COUNT;
    test_allocator counter = {.fail_at = n};
    dp_config config = {.device_count = 2,
                        .devices = (const int[]){0, 0},
                        .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx = NULL;
    dp_status status = dp_open(&config, &ctx);
    for (int i = 0; i < 2 && ctx != NULL; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        status = scope != NULL ? work_on_many(ctx, scope, &count) : DP_ERR_NO_MEMORY;
        dp_scope_end(scope);
        counter.fail_at = 0;
        if (i == 1)
            CHECK_OK(status);
        else if (status != DP_OK)
            CHECK_INT(status, DP_ERR_NO_MEMORY);
    }
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
    return counter.fail_count > 0;
}

TEST_SLOW(the_nth_allocation_fails_with_many, 60)
{
    size_t n = 1;
    make_names(600);
    while (survives(n))
        n++;
    CHECK(n > 20); /* there was something to fail */
}
