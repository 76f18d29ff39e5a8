/* test_complexity.c - many of everything: what is right for three is right for thousands, and each
   of thousands costs as much as each of a few. Costs are compared as processor time, of as many
   things in few at once and in many, with room for noise and caches: what grows as the square takes
   MANY / FEW times as much. */

#define _GNU_SOURCE /* P_tmpdir */
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#include "decorator.h"
#include "nets.h"
/* clang-format off */
#include "dp_save.h"
/* clang-format on */

enum { FEW = 128, MANY = 8192, TRIES = 5, NAME = 32 };

static char (*names)[NAME], (*reversed_names)[NAME];

static void make_names(size_t count)
{
    if (names == NULL) {
        names = test_room(MANY * sizeof *names);
        reversed_names = test_room(MANY * sizeof *reversed_names);
    }
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

/* One of MANY costs at most so many times one of FEW. */
static void check_growth(const char *what, dp_status (*work)(const task *job, dp_scope *scope),
                         double at_most)
{
    dp_ctx *ctx = two_devices();
    make_names(FEW);
    double few = least_ns(&(task){ctx, FEW, work});
    make_names(MANY);
    double many = least_ns(&(task){ctx, MANY, work});
    if (many > at_most * few)
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
            wrong = (dp_value){.kind = DP_DICT, .count = (uint32_t)count, .depth = 1};
            wrong.as.pairs = pairs; /* made by hand */
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

/* Keys that come in the order of the first dict are found one behind the other; only others need
   an index, and memory for it. */
TEST(keys_in_their_order_need_no_index)
{
    enum { COUNT = 200 };
    size_t calls[2];
    make_names(COUNT);
    for (int turned = 0; turned < 2; turned++) {
        test_allocator counter = {0};
        dp_ctx *ctx;
        dp_value out;
        CHECK_OK(dp_open(&(dp_config){.device_count = 2,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value first = dict_of(scope, COUNT, names, 1);
        dp_value second = dict_of(scope, COUNT, turned ? reversed_names : names, 1);
        size_t before = counter.call_count;
        CHECK_OK(dp_gather(ctx, scope, DP_LIST_OF(scope, first, second), NULL, &out));
        calls[turned] = counter.call_count - before;
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
    CHECK(calls[0] < calls[1]);
}

TEST(keys_that_differ_are_named)
{
    dp_ctx *ctx = two_devices();
    make_names(4096);
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

static dp_status keep_hand_made_dict(const task *job, dp_scope *scope)
{
    dp_pair *pairs = dp_scope_alloc(scope, job->count * sizeof *pairs);
    dp_value dict = {.kind = DP_DICT, .count = (uint32_t)job->count, .depth = 1};
    for (size_t i = 0; i < job->count; i++)
        pairs[i] = (dp_pair){names[i], dp_none()};
    dict.as.pairs = pairs;
    return dp_keep(scope, dict, &dict);
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

/* Everything has a cost there that is not the library's. */
static void skip_where_all_is_slow(void)
{
    if (test_stride() > 4)
        SKIP("costs are measured without a thread sanitizer");
}

TEST_SLOW(many_keys_cost_as_much_as_few, 60)
{
    skip_where_all_is_slow();
    check_growth("a dict made", make_dict, 10);
    check_growth("a dict made by hand kept", keep_hand_made_dict, 10);
    check_growth("dicts gathered", gather_dicts, 10);
    check_growth("dicts gathered whose orders differ", gather_turned_dicts, 10);
}

/* Names whose hash, FNV-1a of 64 bits folded to 32, ends in the same bits but for four. */
static void make_names_that_meet(size_t count)
{
    make_names(0);
    for (unsigned long long i = 0, made = 0; made < count; i++) {
        uint64_t hash = 14695981039346656037u;
        char *name = names[made];
        int length = snprintf(name, NAME, "%llx", i);
        for (int k = 0; k < length; k++)
            hash = (hash ^ (unsigned char)name[k]) * 1099511628211u;
        made += ((hash ^ hash >> 32) & (2 * MANY - 1)) < 16;
    }
}

/* A safetensors file of empty tensors with these names. */
static void write_names(const char *path, size_t count)
{
    FILE *file = fopen(path, "wb");
    uint64_t bytes = 0;
    CHECK(file != NULL && fwrite(&bytes, sizeof bytes, 1, file) == 1);
    for (size_t i = 0; i < count; i++)
        fprintf(file, "%c\"%s\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                i == 0 ? '{' : ',', names[i]);
    fputc('}', file);
    bytes = (uint64_t)ftell(file) - sizeof bytes;
    rewind(file);
    CHECK(fwrite(&bytes, sizeof bytes, 1, file) == 1);
    CHECK_INT(fclose(file), 0);
}

static char header_path[64];

static dp_status read_names(const task *job, dp_scope *scope)
{
    dp_value out;
    TRY(dp_file_read(job->ctx, scope, header_path, &out));
    return out.count == job->count ? DP_OK : DP_ERR_USER;
}

/* The file of somebody who knows how names are looked up. */
TEST_SLOW(names_that_are_chosen_to_meet_cost_no_more, 60)
{
    skip_where_all_is_slow();
    dp_ctx *ctx = two_devices();
    double spent[2];
    snprintf(header_path, sizeof header_path, "%s/dp-names-%ld", P_tmpdir, (long)getpid());
    for (int meet = 0; meet < 2; meet++) {
        if (meet)
            make_names_that_meet(MANY);
        else
            make_names(MANY);
        write_names(header_path, MANY);
        spent[meet] = least_ns(&(task){ctx, MANY, read_names});
    }
    CHECK_INT(unlink(header_path), 0);
    if (spent[1] > 3 * spent[0])
        test_fail(__FILE__, __LINE__, "%.0f ns each of usual names, %.0f ns each of chosen ones",
                  spent[0] / MANY, spent[1] / MANY);
    dp_close(ctx);
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
    TRY(dp_invoke(par, scope, "forward", dp_none(), inputs, NULL, out, &pass));
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
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), given, NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_dict_make(scope, pairs, COUNT / 2), &inputs));
    CHECK_INT(inputs.kwargs.count, COUNT / 2);
    for (size_t i = 0; i < COUNT / 2; i++)
        CHECK_STR(inputs.kwargs.as.pairs[i].key, names[2 * i + 1]);
    pairs[COUNT / 4].key = "other";
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), given, NULL, &out, &pass));
    CHECK_ERROR(dp_backward(pass, dp_dict_make(scope, pairs, COUNT / 2), &inputs), DP_ERR_MISMATCH,
                "of the gradient has key 'other', the output has not");
    dp_scope_end(scope);
    dp_close(ctx);
}

/* Gradients are the inputs themselves; replica 1 has none for every third one, and turns the order
   round. */
static dp_status inputs_back(dp_call *call)
{
    size_t count = call->kwargs.count;
    bool other = call->replica == 1;
    dp_pair *pairs = dp_scope_alloc(call->scope, count * sizeof *pairs);
    for (size_t i = 0; i < count; i++) {
        pairs[i] = call->kwargs.as.pairs[other ? count - 1 - i : i];
        if (other && i % 3 == 0)
            pairs[i].value = dp_none();
    }
    call->kwargs_grad = dp_dict_make(call->scope, pairs, count);
    return DP_OK;
}

/* None of a replica is zeros of the size of its own input, wherever that stands. */
TEST(none_among_many_gradients_is_zeros)
{
    enum { COUNT = 100 };
    static const dp_method methods[] = {{"forward", give_none}, {"backward", inputs_back}};
    static float ones[4 * 7];
    static dp_pair pairs[COUNT];
    dp_ctx *ctx = two_devices();
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *module = NULL, *par = NULL;
    dp_pass *pass = NULL;
    dp_value out;
    dp_input_grad inputs;
    make_names(COUNT);
    for (size_t i = 0; i < sizeof ones / sizeof *ones; i++)
        ones[i] = 1;
    for (size_t i = 0; i < COUNT; i++)
        pairs[i] =
            (dp_pair){names[i], dp_array(scope, ones, DP_F32, DP_SHAPE(4, 1 + (int64_t)i % 7))};
    dp_value given = dp_dict_make(scope, pairs, COUNT);
    CHECK_OK(
        dp_module_create(ctx, &(dp_module_config){.methods = methods, .method_count = 2}, &module));
    CHECK_OK(dp_data_parallel(module, NULL, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), given, NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_none(), &inputs));
    for (size_t i = 0; i < COUNT; i++) {
        const dp_tensor *tensor = NULL;
        int64_t columns = 1 + (int64_t)i % 7;
        bool none = (COUNT - 1 - i) % 3 == 0;
        CHECK_OK(dp_as_tensor(dp_get(inputs.kwargs, names[i]), "x", DP_F32, 2, &tensor));
        CHECK_INT(tensor->shape[0], 4);
        CHECK_INT(tensor->shape[1], columns);
        for (int64_t k = 0; k < 4 * columns; k++)
            CHECK_F64(((const float *)tensor->data)[k], none && k >= 2 * columns ? 0 : 1, 0);
    }
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

static dp_module *new_losses(dp_ctx *ctx, const size_t *count)
{
    static const dp_method methods[] = {{"forward", losses}, {"backward", no_gradient}};
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
    skip_where_all_is_slow();
    check_growth("a forward and a backward with dicts", backward_of_dicts, 10);
    check_growth("a step with losses", step_of_losses, 10);
}

/* ---- modules --------------------------------------------------------------------------------- */

static dp_param_config *params; /* MANY */
static dp_module *children[MANY];

/* `count` parameters of `floats` floats. */
static void make_params(size_t count, int64_t floats)
{
    params = params != NULL ? params : test_room(MANY * sizeof *params);
    for (size_t i = 0; i < count; i++)
        params[i] = (dp_param_config){.name = names[i], .ndim = 1, .shape = {floats}};
}

static const dp_method no_methods[] = {{"forward", give_none}};

static dp_status make_module(dp_ctx *ctx, size_t count, dp_module **out)
{
    dp_module_config config = {.name = "net",
                               .methods = no_methods,
                               .method_count = 1,
                               .params = params,
                               .param_count = count};
    return dp_module_create(ctx, &config, out);
}

/* A parent of `count` children with a parameter "w" each. */
static dp_status make_parent(dp_ctx *ctx, size_t count, const dp_param_config *own,
                             size_t own_count, dp_module **out)
{
    static const dp_param_config w = {.name = "w", .ndim = 1, .shape = {1}};
    dp_module_config config = {.params = &w, .param_count = 1};
    for (size_t i = 0; i < count; i++) {
        config.name = names[i];
        TRY(dp_module_create(ctx, &config, &children[i]));
    }
    config = (dp_module_config){.name = "parent",
                                .methods = no_methods,
                                .method_count = 1,
                                .params = own_count > 0 ? own : NULL,
                                .param_count = own_count,
                                .children = children,
                                .child_count = count};
    return dp_module_create(ctx, &config, out);
}

TEST(duplicate_parameters_are_found_wherever_they_are)
{
    const size_t counts[] = {2, 16, 17, 18, 4096};
    dp_ctx *ctx = two_devices();
    dp_module *module = NULL;
    make_names(4096);
    make_params(4096, 1);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        size_t count = counts[c];
        const size_t places[][2] = {{0, 1}, {0, count - 1}, {count - 2, count - 1}};
        for (size_t p = 0; p < 3; p++) {
            char copy[NAME], sentence[2 * NAME];
            memcpy(copy, names[places[p][0]], NAME);
            params[places[p][1]].name = copy;
            snprintf(sentence, sizeof sentence, "parameter '%s' is there twice", copy);
            CHECK_ERROR(make_module(ctx, count, &module), DP_ERR_INVALID, sentence);
            params[places[p][1]].name = names[places[p][1]];
        }
        CHECK_OK(make_module(ctx, count, &module));
        CHECK_INT(dp_module_param_count(module), count);
    }
    dp_close(ctx);
}

TEST(duplicate_children_are_found_wherever_they_are)
{
    const size_t counts[] = {2, 16, 17, 18, 4096};
    dp_ctx *ctx = two_devices();
    dp_module *parent = NULL;
    make_names(4096);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        size_t count = counts[c];
        const size_t places[][2] = {{0, 1}, {0, count - 1}, {count - 2, count - 1}};
        for (size_t p = 0; p < 3; p++) {
            char kept[NAME], sentence[2 * NAME];
            memcpy(kept, names[places[p][1]], NAME);
            memcpy(names[places[p][1]], names[places[p][0]], NAME);
            snprintf(sentence, sizeof sentence, "two children are called '%s'",
                     names[places[p][0]]);
            CHECK_ERROR(make_parent(ctx, count, NULL, 0, &parent), DP_ERR_INVALID, sentence);
            memcpy(names[places[p][1]], kept, NAME);
        }
        CHECK_OK(make_parent(ctx, count, NULL, 0, &parent));
        CHECK_INT(dp_module_param_count(parent), count);
    }
    dp_close(ctx);
}

static void check_param(dp_module *module, size_t param, const char *name)
{
    dp_param_info info;
    size_t found = 0;
    CHECK_OK(dp_module_param(module, param, &info));
    CHECK_STR(info.name, name);
    CHECK_OK(dp_module_find(module, name, &found));
    CHECK_INT(found, param);
}

TEST(many_parameters_are_found_by_name)
{
    char name[2 * NAME];
    dp_ctx *ctx = two_devices();
    dp_module *module = NULL, *parent = NULL, *par = NULL;
    size_t found = 0;
    make_names(4096);
    make_params(4096, 1);
    CHECK_OK(make_module(ctx, 4096, &module));
    CHECK_OK(make_parent(ctx, 4096, params, 4096, &parent));
    CHECK_OK(dp_data_parallel(parent, NULL, &par));
    for (size_t i = 0; i < 4096; i++) {
        check_param(module, i, names[i]);
        check_param(parent, i, names[i]);
        snprintf(name, sizeof name, "loss%zu.w", i);
        check_param(parent, 4096 + i, name);
        check_param(par, 4096 + i, name);
    }
    const char *const none[] = {"", ".", "w", "loss4096", "loss4096.w", "loss1.", "loss1.w.w", "."};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        CHECK_ERROR(dp_module_find(par, none[i], &found), DP_ERR_INVALID, "has no parameter");
    CHECK_ERROR(dp_module_find(par, "parent.loss1", &found), DP_ERR_INVALID, "has no parameter");
    dp_close(ctx);
}

/* A wrapper that is a child has a name; what it wraps has none. */
TEST(names_go_through_wrappers)
{
    dp_ctx *ctx = two_devices();
    dp_module *module = NULL, *par = NULL, *outer = NULL;
    size_t found = 9;
    make_names(2);
    make_params(2, 1);
    params[1].name = "a.b";
    CHECK_OK(make_module(ctx, 2, &module));
    CHECK_OK(dp_data_parallel(module, NULL, &par));
    const dp_param_config own = {.name = "loss0", .ndim = 1, .shape = {1}};
    dp_module_config config = {
        .params = &own, .param_count = 1, .children = &par, .child_count = 1};
    CHECK_OK(dp_module_create(ctx, &config, &outer));
    CHECK_OK(dp_module_find(outer, "loss0", &found));
    CHECK_INT(found, 0);
    CHECK_OK(dp_module_find(outer, "data_parallel.loss0", &found));
    CHECK_INT(found, 1);
    CHECK_OK(dp_module_find(outer, "data_parallel.a.b", &found));
    CHECK_INT(found, 2);
    CHECK_ERROR(dp_module_find(outer, "data_parallel.net.loss0", &found), DP_ERR_INVALID, "");
    CHECK_ERROR(dp_module_find(outer, "a.b", &found), DP_ERR_INVALID, "");
    dp_close(ctx);
}

/* Chains of ties in both directions, and two that become one. */
TEST(many_parameters_are_tied)
{
    enum { COUNT = 4096 };
    dp_ctx *ctx = two_devices();
    dp_module *module = NULL;
    dp_param_info first, info;
    make_names(COUNT);
    make_params(COUNT, 1);
    for (size_t i = 1; i < COUNT / 2; i++)
        params[i].same_as = names[i - 1];
    for (size_t i = COUNT / 2; i + 1 < COUNT; i++)
        params[i].same_as = names[i + 1];
    CHECK_OK(make_module(ctx, COUNT, &module));
    CHECK_INT(dp_module_param_count(module), 2);
    check_param(module, 0, names[0]);
    check_param(module, 1, names[COUNT / 2]);
    for (size_t i = 0; i < COUNT; i++) {
        size_t found = 9;
        CHECK_OK(dp_module_find(module, names[i], &found));
        CHECK_INT(found, i / (COUNT / 2));
    }
    params[COUNT - 1].same_as = names[3];
    CHECK_OK(make_module(ctx, COUNT, &module));
    CHECK_INT(dp_module_param_count(module), 1);
    CHECK_OK(dp_module_param(module, 0, &first));
    CHECK_OK(dp_module_param(module, 0, &info));
    CHECK(info.data.data == first.data.data);
    dp_close(ctx);
}

/* The parameters of children are tied to each other: their parents, and they, list them once. */
TEST(ties_change_the_lists_of_children)
{
    enum { COUNT = 256 };
    dp_ctx *ctx = two_devices();
    dp_module *net = NULL, *copy = NULL, *outer = NULL;
    static dp_param_config ties[COUNT];
    static char tied[COUNT][2 * NAME + 8];
    make_names(COUNT);
    make_params(COUNT, 1);
    CHECK_OK(make_module(ctx, COUNT, &net));
    CHECK_INT(dp_module_param_count(net), COUNT);
    for (size_t i = 0; i < COUNT; i++)
        snprintf(tied[i], sizeof tied[i], "net.loss%zu", i);
    for (size_t i = 0; i < COUNT; i += 2) /* every second one to the one before it */
        ties[i / 2] =
            (dp_param_config){.name = tied[i + 1], .ndim = 1, .shape = {1}, .same_as = tied[i]};
    dp_module_config config = {
        .params = ties, .param_count = COUNT / 2, .children = &net, .child_count = 1};
    CHECK_OK(dp_module_create(ctx, &config, &outer));
    CHECK_INT(dp_module_param_count(outer), COUNT / 2);
    CHECK_INT(dp_module_param_count(net), COUNT / 2);
    for (size_t i = 0; i < COUNT; i++) {
        size_t found = 0;
        CHECK_OK(dp_module_find(net, names[i], &found));
        CHECK_INT(found, i / 2);
    }
    CHECK_OK(dp_module_copy(outer, 1, &copy));
    CHECK_INT(dp_module_param_count(copy), COUNT / 2);
    dp_close(ctx);
}

/* ---- steps of modules ------------------------------------------------------------------------ */

/* Which gradients a replica adds to. */
static bool is_touched(size_t param, size_t replica)
{
    return param % 3 != replica + 1;
}

static dp_status one_loss(dp_call *call)
{
    static const float one = 1;
    dp_tensor loss;
    TRY(dp_tensor_new(call->scope, call->device, DP_F32, 0, NULL, &loss));
    memcpy(loss.data, &one, sizeof one);
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)});
    return DP_OK;
}

/* Adds i + 1 to each element of gradient i; the last layer comes first. */
static dp_status touch(dp_call *call)
{
    for (size_t i = *(const size_t *)call->state; i-- > 0;) {
        dp_tensor grad;
        if (params[i].frozen || params[i].buffer || !is_touched(i, call->replica))
            continue;
        grad = dp_grad_tensor(call, i);
        for (int64_t k = 0; k < dp_tensor_count(&grad); k++) {
            if (grad.dtype == DP_F64)
                ((double *)grad.data)[k] += (double)(i + 1);
            else
                ((float *)grad.data)[k] += (float)(i + 1);
        }
    }
    return DP_OK;
}

static const dp_method step_methods[] = {{"forward", one_loss}, {"backward", touch}};

static dp_module *make_net(dp_ctx *ctx, size_t count, dp_module **out_par)
{
    static size_t kept_count;
    dp_module *net = NULL;
    dp_module_config config = {.name = "net",
                               .methods = step_methods,
                               .method_count = 2,
                               .params = params,
                               .param_count = count,
                               .state = &kept_count};
    kept_count = count;
    CHECK_OK(dp_module_create(ctx, &config, &net));
    CHECK_OK(dp_data_parallel(net, NULL, out_par));
    return net;
}

/* A step with a row for each of eight devices. */
static dp_status take_step(dp_module *par, dp_scope *scope)
{
    static const float rows[8];
    dp_value log, x = dp_array(scope, rows, DP_F32, DP_SHAPE(8));
    return dp_train_step(par, scope, DP_DICT(scope, {"x", x}), NULL, &log);
}

static double element(const dp_tensor *tensor, int64_t i)
{
    return tensor->dtype == DP_F64 ? ((const double *)tensor->data)[i]
                                   : (double)((const float *)tensor->data)[i];
}

static void check_grads(dp_module *net, size_t count, size_t replicas, int steps)
{
    for (size_t i = 0; i < count; i++) {
        dp_tensor data, grad;
        double want = 0;
        for (size_t r = 0; r < replicas; r++)
            want += is_touched(i, r) ? (double)(i + 1) * steps : 0;
        CHECK_OK(dp_params_edit(net, i, &data, &grad));
        bool has_grad = !params[i].frozen && !params[i].buffer;
        CHECK_INT(dp_tensor_count(&grad), has_grad ? params[i].shape[0] : 0);
        for (int64_t k = 0; k < dp_tensor_count(&grad); k++)
            CHECK_F64(element(&grad, k), want, 0);
    }
}

/* Of every size, two dtypes, and some in memory of the user's: neighbours, and alone. */
TEST(gradients_of_many_parameters_are_added_up)
{
    enum { COUNT = 600 };
    float *own = test_room(2 * COUNT * 200 * sizeof *own);
    float *up = own, *down = own + 2 * COUNT * 200;
    dp_ctx *ctx = NULL;
    dp_module *par = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 4, .devices = (const int[]){0, 0, 0, 0}}, &ctx));
    make_names(COUNT);
    make_params(COUNT, 1);
    for (size_t i = 0; i < COUNT; i++) {
        int64_t floats = i % 7 == 0 ? 0 : i % 50 == 49 ? 40000 : (int64_t)(i * 37 % 200 + 1);
        params[i] = (dp_param_config){.name = names[i], .ndim = 1, .shape = {floats}};
        params[i].dtype = i % 4 == 1 ? DP_F64 : DP_F32;
        params[i].frozen = i % 11 == 10;
        params[i].buffer = i % 13 == 12;
        if (i % 5 > 1 || i % 4 == 1 || i % 50 == 49 || params[i].frozen || params[i].buffer)
            continue;
        down -= i < COUNT / 2 ? 0 : floats; /* neighbours that go up, and down */
        params[i].grad = i < COUNT / 2 ? up : down;
        up += i < COUNT / 2 ? floats : 0;
    }
    dp_module *net = make_net(ctx, COUNT, &par);
    for (int round = 0; round < 2; round++) {
        for (int step = 1; step <= 3; step++) {
            dp_scope *scope = dp_scope_begin(ctx);
            CHECK_OK(take_step(par, scope));
            dp_scope_end(scope);
            check_grads(net, COUNT, 4, step);
        }
        CHECK_OK(dp_zero_grad(net));
        check_grads(net, COUNT, 4, 0);
    }
    dp_close(ctx);
}

/* Gradients that touch each other are zeroed together, and nothing that lies between others is. */
TEST(zero_grad_leaves_what_lies_between)
{
    enum { COUNT = 8 };
    static float own[2 * COUNT];
    static const size_t places[COUNT] = {1, 2, 4, 7, 6, 5, 9, 14};
    dp_ctx *ctx = two_devices();
    dp_module *par = NULL;
    make_names(COUNT);
    make_params(COUNT, 1);
    for (size_t i = 0; i < COUNT; i++)
        params[i].grad = &own[places[i]];
    dp_module *net = make_net(ctx, COUNT, &par);
    for (size_t i = 0; i < 2 * COUNT; i++)
        own[i] = 5;
    CHECK_OK(dp_zero_grad(net));
    for (size_t i = 0; i < 2 * COUNT; i++) {
        bool is_gradient = false;
        for (size_t k = 0; k < COUNT; k++)
            is_gradient = is_gradient || places[k] == i;
        CHECK_F64(own[i], is_gradient ? 0 : 5, 0);
    }
    dp_close(ctx);
}

/* What comes right behind a gradient is a parameter, which is no part of the sum. */
TEST(a_gradient_ends_where_a_parameter_begins)
{
    static float own[] = {1, 0, 7};
    const dp_config config = {.device_count = 2, .devices = (const int[]){0, 0}, .poison = true};
    dp_ctx *ctx = NULL;
    dp_module *par = NULL;
    CHECK_OK(dp_open(&config, &ctx));
    dp_scope *used = dp_scope_begin(ctx); /* so that what the library gets next is no zeros */
    for (int i = 0; i < 64; i++)
        CHECK(dp_scope_alloc(used, 64) != NULL);
    dp_scope_end(used);
    make_names(2);
    make_params(2, 1);
    params[0].data = &own[0];
    params[0].grad = &own[1];
    params[1].data = &own[2];
    params[1].frozen = true;
    dp_module *net = make_net(ctx, 2, &par);
    CHECK_OK(take_step(par, dp_scope_begin(ctx)));
    check_grads(net, 2, 2, 1);
    CHECK_F64(own[2], 7, 0);
    CHECK_OK(dp_zero_grad(net));
    check_grads(net, 2, 2, 0);
    CHECK_F64(own[2], 7, 0);
    dp_close(ctx);
}

/* Kernels that the tables are asked for by a step and dp_zero_grad. */
static int kernels_of_step(size_t count)
{
    const dp_device_ops *const backends[] = {decorate_device(dp_cpu()), NULL};
    dp_ctx *ctx = NULL;
    dp_module *par = NULL;
    dp_config config = {.backends = backends, .device_count = 2, .devices = (const int[]){0, 0}};
    CHECK_OK(dp_open(&config, &ctx));
    make_names(count);
    make_params(count, 16);
    dp_module *net = make_net(ctx, count, &par);
    int before = deco_calls(DECO_kernel);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(take_step(par, scope));
    dp_scope_end(scope);
    CHECK_OK(dp_zero_grad(net));
    int after = deco_calls(DECO_kernel);
    dp_close(ctx);
    CHECK_DECORATOR();
    return after - before;
}

TEST(many_gradients_are_zeroed_together)
{
    int few = kernels_of_step(4), many = kernels_of_step(4096);
    if (many > few + 8)
        test_fail(__FILE__, __LINE__, "%d kernels for 4 parameters, %d for 4096", few, many);
}

/* ---- changes --------------------------------------------------------------------------------- */

/* Every replica's parameter. */
static dp_status read_w(dp_call *call)
{
    float w = 0;
    TRY(net_read(call, dp_param(call, 0), &w, 1));
    return net_new(call, &w, 0, NULL, &call->out);
}

static void check_replicas(dp_ctx *ctx, dp_module *par, double want)
{
    static const float rows[TREE_DEVICES];
    double numbers[TREE_DEVICES];
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out, x = dp_array(scope, rows, DP_F32, DP_SHAPE(TREE_DEVICES));
    const dp_tensor *tensor = NULL;
    float got[TREE_DEVICES];
    CHECK_OK(dp_invoke(par, scope, "forward", DP_LIST_OF(scope, x), dp_none(), NULL, &out, NULL));
    CHECK_OK(dp_as_tensor(out, "w", DP_F32, 1, &tensor));
    CHECK_OK(dp_read(ctx, tensor, got, sizeof got));
    for (size_t i = 0; i < TREE_DEVICES; i++) {
        numbers[i] = (double)got[i];
        CHECK_F64(numbers[i], want, 0);
    }
    dp_scope_end(scope);
}

/* A parameter is written to by way of any module that has it: replicas of all others follow. */
TEST_BACKENDS(a_change_reaches_all_who_have_the_parameter)
{
    static const dp_method methods[] = {{"forward", read_w}};
    static const dp_param_config w = {.name = "w", .ndim = 1, .shape = {1}};
    static const dp_param_config tie = {.name = "a.w", .ndim = 1, .shape = {1}, .same_as = "b.w"};
    static const char *const child_names[] = {"a", "b", "c"};
    dp_module *modules[3], *pars[3], *parent = NULL;
    dp_module_config config = {
        .methods = methods, .method_count = 1, .params = &w, .param_count = 1};
    (void)scope;
    for (size_t i = 0; i < 3; i++) {
        config.name = child_names[i];
        CHECK_OK(dp_module_create(ctx, &config, &modules[i]));
    }
    config =
        (dp_module_config){.params = &tie, .param_count = 1, .children = modules, .child_count = 3};
    CHECK_OK(dp_module_create(ctx, &config, &parent));
    CHECK_INT(dp_module_param_count(parent), 2);
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(dp_data_parallel(modules[i], NULL, &pars[i]));
        check_replicas(ctx, pars[i], 0);
    }
    for (int round = 1; round < 4; round++) {
        const float number = (float)round;
        CHECK_OK(dp_params_write(round % 2 == 1 ? parent : modules[2], round % 2 == 1 ? 1 : 0,
                                 &number, sizeof number));
        check_replicas(ctx, pars[2], round);
        CHECK_OK(dp_params_write(parent, 0, &number, sizeof number));
        check_replicas(ctx, pars[0], round);
        check_replicas(ctx, pars[1], round);
    }
}

/* ---- what modules cost ----------------------------------------------------------------------- */

/* One that stays for as long as a size is measured; dp_close takes it. */
static dp_module *kept_net(const task *job, dp_module **out_par)
{
    static dp_module *net, *par;
    static dp_ctx *ctx;
    static size_t count;
    if (count != job->count || ctx != job->ctx) {
        ctx = job->ctx;
        count = job->count;
        make_params(count, 16);
        net = make_net(ctx, count, &par);
    }
    *out_par = par;
    return net;
}

static dp_status make_and_wrap(const task *job, dp_scope *scope)
{
    dp_module *net = NULL, *par = NULL, *copy = NULL;
    (void)scope;
    make_params(job->count, 16);
    TRY(make_module(job->ctx, job->count, &net));
    TRY(dp_module_copy(net, 1, &copy));
    TRY(dp_data_parallel(net, NULL, &par));
    TRY(dp_module_destroy(par));
    TRY(dp_module_destroy(copy));
    return dp_module_destroy(net);
}

static dp_status make_and_wrap_children(const task *job, dp_scope *scope)
{
    dp_module *parent = NULL, *par = NULL, *copy = NULL;
    (void)scope;
    TRY(make_parent(job->ctx, job->count, NULL, 0, &parent));
    TRY(dp_module_copy(parent, 1, &copy));
    TRY(dp_data_parallel(parent, NULL, &par));
    TRY(dp_module_destroy(par));
    TRY(dp_module_destroy(copy));
    return dp_module_destroy(parent);
}

/* All tied to the first one, in pairs of a parent's and a child's names. */
static dp_status make_tied(const task *job, dp_scope *scope)
{
    static char(*tied)[NAME + 8];
    dp_module *net = NULL, *parent = NULL;
    (void)scope;
    tied = tied != NULL ? tied : test_room(MANY * sizeof *tied);
    make_params(job->count, 1);
    TRY(make_module(job->ctx, job->count, &net));
    for (size_t i = 0; i < job->count; i++) {
        snprintf(tied[i], sizeof tied[i], "net.loss%zu", i);
        params[i].name = tied[i];
        params[i].same_as = tied[0];
    }
    dp_module_config config = {
        .params = params + 1, .param_count = job->count - 1, .children = &net, .child_count = 1};
    TRY(dp_module_create(job->ctx, &config, &parent));
    CHECK_INT(dp_module_param_count(parent), 1);
    return dp_module_destroy(parent);
}

/* Each tied to the next, which is not tied yet: a chain. */
static dp_status make_chain(const task *job, dp_scope *scope)
{
    dp_module *net = NULL;
    (void)scope;
    make_params(job->count, 1);
    for (size_t i = 0; i + 1 < job->count; i++)
        params[i].same_as = names[i + 1];
    TRY(make_module(job->ctx, job->count, &net));
    CHECK_INT(dp_module_param_count(net), 1);
    return dp_module_destroy(net);
}

static dp_status step_and_zero(const task *job, dp_scope *scope)
{
    dp_module *par = NULL, *net = kept_net(job, &par);
    TRY(take_step(par, scope));
    return dp_zero_grad(net);
}

static dp_status find_and_write(const task *job, dp_scope *scope)
{
    static const float numbers[16];
    dp_module *par = NULL, *net = kept_net(job, &par);
    (void)scope;
    for (size_t i = 0; i < job->count; i++) {
        size_t found = 0;
        TRY(dp_module_find(par, names[i], &found));
        TRY(dp_params_write(net, found, numbers, sizeof numbers));
    }
    return DP_OK;
}

/* Each parameter of a tree of as many modules. */
static dp_status write_to_children(const task *job, dp_scope *scope)
{
    static dp_module *parent;
    static size_t count;
    const float number = 0;
    (void)scope;
    if (count != job->count) {
        count = job->count;
        TRY(make_parent(job->ctx, count, NULL, 0, &parent));
    }
    for (size_t i = 0; i < count; i++)
        TRY(dp_params_write(parent, i, &number, sizeof number));
    return DP_OK;
}

TEST_SLOW(many_parameters_cost_as_much_as_few, 60)
{
    skip_where_all_is_slow();
    check_growth("modules made, copied and wrapped", make_and_wrap, 10);
    check_growth("modules with ties", make_tied, 10);
    check_growth("modules with a chain of ties", make_chain, 10);
    check_growth("a step", step_and_zero, 3); /* what it costs of its own is shared by few */
    check_growth("parameters found and written", find_and_write, 10);
}

TEST_SLOW(many_children_cost_as_much_as_few, 60)
{
    skip_where_all_is_slow();
    check_growth("trees made, copied and wrapped", make_and_wrap_children, 10);
    check_growth("parameters of children written", write_to_children, 10);
}

/* ---- the nth allocation fails ---------------------------------------------------------------- */

static dp_status work_on_many(dp_ctx *ctx, dp_scope *scope, const size_t *count)
{
    dp_value dict = dict_of(scope, *count, names, 1), out;
    dp_value turned = dict_of(scope, *count, reversed_names, 1);
    dp_module *net = NULL, *parent = NULL, *par = NULL;
    TRY(dp_gather(ctx, scope, DP_LIST_OF(scope, dict, turned), NULL, &out));
    TRY(make_module(ctx, *count, &net));
    TRY(dp_data_parallel(net, NULL, &par));
    TRY(make_parent(ctx, 20, NULL, 0, &parent));
    return dp_data_parallel(parent, NULL, &par);
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
    make_params(600, 16);
    while (survives(n))
        n += (size_t)test_step();
    CHECK(n > 20); /* there was something to fail */
}
