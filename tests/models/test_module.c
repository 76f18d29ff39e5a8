/* test_module.c - modules: what they are made of, where their parameters lie, and their end. */

#include "lazy.h"
#include "nets.h"

static const net_shape by_rows = {0};

static const dp_method forward_only[] = {{"forward", give_none}};

static dp_module *make(dp_ctx *ctx, dp_module_config config)
{
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx, &config, &module));
    return module;
}

/* A module with one parameter of so many floats. */
static dp_module *leaf(dp_ctx *ctx, const char *name, const char *param, int64_t count)
{
    const dp_param_config params[] = {{.name = param, .ndim = 1, .shape = {count}}};
    return make(ctx, (dp_module_config){.name = name, .params = params, .param_count = 1});
}

static const char *name_of(dp_module *module, size_t param)
{
    dp_param_info info;
    CHECK_OK(dp_module_param(module, param, &info));
    return info.name;
}

static void check_names(dp_module *module, const char *want)
{
    char text[256] = "";
    for (size_t i = 0; i < dp_module_param_count(module); i++) {
        strcat(strcat(text, i > 0 ? " " : ""), name_of(module, i));
    }
    CHECK_STR(text, want);
}

/* ---- names and trees ------------------------------------------------------------------------- */

TEST_BACKENDS(names_are_paths)
{
    dp_module *inner = leaf(ctx, "layer1", "weight", 2);
    dp_module *middle = make(ctx, (dp_module_config){.name = "body",
                                                     .children = &inner,
                                                     .child_count = 1,
                                                     .params = net_params,
                                                     .param_count = 2});
    dp_module *const both[] = {middle, leaf(ctx, "head", "weight", 3)};
    dp_module *net = make(ctx, (dp_module_config){.name = "net",
                                                  .children = both,
                                                  .child_count = 2,
                                                  .methods = forward_only,
                                                  .method_count = 1});
    dp_module *par = NULL;
    size_t found = 99;
    check_names(net, "body.w body.b body.layer1.weight head.weight");
    check_names(middle, "w b layer1.weight");
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    check_names(par, "body.w body.b body.layer1.weight head.weight"); /* no "module." */
    CHECK_OK(dp_module_find(par, "head.weight", &found));
    CHECK_INT(found, 3);
    CHECK_ERROR(dp_module_find(net, "tail", &found), DP_ERR_INVALID,
                "'net' has no parameter 'tail'; there are 'body.w', 'body.b', "
                "'body.layer1.weight', 'head.weight'");
    CHECK_STR(dp_module_name(net), "net");
}

TEST(config_strings_and_arrays_are_copied)
{
    char name[] = "net", method[] = "forward", param[] = "w";
    dp_method methods[] = {{method, give_none}};
    dp_param_config params[] = {{.name = param, .ndim = 1, .shape = {2}}};
    dp_ctx *ctx;
    dp_value out;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_module *net = make(ctx, (dp_module_config){.name = name,
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .params = params,
                                                  .param_count = 1});
    name[0] = method[0] = param[0] = '?';
    memset(methods, 0, sizeof methods);
    memset(params, 0, sizeof params);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    CHECK_STR(dp_module_name(net), "net");
    check_names(net, "w");
    dp_close(ctx);
}

/* Each can be counted, their sum cannot: it wrapped to 0, and parameters had no memory. */
/* A sentence has room for some names, and counts the others. */
TEST_BACKENDS(as_many_names_as_fit)
{
    enum { COUNT = 40 };
    static char names[COUNT][16];
    static dp_param_config params[COUNT];
    size_t found;
    for (int i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], i == 18 ? "p" : "weight.%02d", i);
        params[i] = (dp_param_config){.name = names[i]};
    }
    dp_module *net =
        make(ctx, (dp_module_config){.name = "net", .params = params, .param_count = COUNT});
    CHECK_ERROR(
        dp_module_find(net, "bias", &found), DP_ERR_INVALID,
        "dp_module_find: 'net' has no parameter 'bias'; there are 'weight.00', 'weight.01'");
    CHECK_ERROR(dp_module_find(net, "bias", &found), DP_ERR_INVALID, "'weight.13' and 26 more");
    for (int length = 7; length <= 8; length++) { /* to the last byte */
        snprintf(names[14], sizeof names[14], "%.*s", length, "abcdefgh");
        net = make(ctx, (dp_module_config){.name = "net", .params = params, .param_count = COUNT});
        CHECK_ERROR(dp_module_find(net, "bias", &found), DP_ERR_INVALID,
                    length == 7 ? "'weight.13', 'abcdefg' and 25 more" : "'weight.13' and 26 more");
    }
}

TEST_BACKENDS(parameters_of_more_bytes_than_there_are)
{
    enum { COUNT = 4 };
    static const char *const names[COUNT] = {"a", "b", "c", "d"};
    dp_param_config params[COUNT];
    dp_param_info info;
    for (int i = 0; i < COUNT; i++) /* rounded up to the alignment: 2^62 */
        params[i] = (dp_param_config){
            .name = names[i], .dtype = DP_U8, .ndim = 1, .shape = {INT64_MAX / 2}};
    for (size_t count = 1; count <= COUNT; count++) {
        dp_module *net =
            make(ctx, (dp_module_config){.name = "net", .params = params, .param_count = count});
        CHECK_STATUS(dp_module_param(net, 0, &info), DP_ERR_NO_MEMORY);
        CHECK_STATUS(dp_zero_grad(net), DP_ERR_NO_MEMORY);
        if (count > 1)
            CHECK_ERROR(dp_module_param(net, 0, &info), DP_ERR_NO_MEMORY,
                        "the parameters of 'net' have more bytes than can be counted");
        CHECK_OK(dp_module_destroy(net));
    }
}

TEST_BACKENDS(wrong_modules)
{
    static const dp_method no_name[] = {{NULL, give_none}}, no_fn[] = {{"forward", NULL}};
    static const dp_method twice[] = {{"a", give_none}, {"a", give_none}};
    static const dp_param_config bad_shape[] = {{.name = "w", .ndim = 1, .shape = {-1}}};
    static const dp_param_config same[] = {{.name = "w"}, {.name = "w"}};
    static const dp_param_config unnamed[] = {{.ndim = 0}};
    static const dp_param_config tied[] = {{.name = "w", .same_as = "v"}};
    static const dp_param_config to_itself[] = {{.name = "w", .same_as = "w"}};
    static float memory[2];
    const dp_param_config owned[] = {{.name = "v"}, {.name = "w", .same_as = "v", .data = memory}};
    const dp_param_config frozen[] = {{.name = "w", .frozen = true, .grad = memory}};
    dp_module *child = leaf(ctx, "child", "w", 2), *const pair[] = {child, child};
    const struct {
        dp_module_config config;
        const char *want;
    } table[] = {
        {{.name = ""}, "'' is not a name"},
        {{.name = "a.b"}, "'a.b' is not a name"},
        {{.local_rank = 99}, "local_rank is 99"},
        {{.methods = no_name, .method_count = 1}, "a method has no name"},
        {{.methods = no_fn, .method_count = 1}, "method 'forward' has no function"},
        {{.methods = twice, .method_count = 2}, "method 'a' is there twice"},
        {{.method_count = 1}, "method_count is 1 and methods is NULL"},
        {{.param_count = 1}, "param_count is 1 and params is NULL"},
        {{.child_count = 1}, "child_count is 1 and children is NULL"},
        {{.methods = twice}, "method_count is 0 and methods is given"},
        {{.params = same}, "param_count is 0 and params is given"},
        {{.children = pair}, "child_count is 0 and children is given"},
        {{.params = same, .param_count = SIZE_MAX}, "param_count is"},
        {{.methods = twice, .method_count = (SIZE_MAX >> 4) + 2}, "method_count is"},
        {{.children = pair, .child_count = SIZE_MAX, .wraps = child}, "child_count is"},
        {{.params = bad_shape, .param_count = 1}, "size -1"},
        {{.params = same, .param_count = 2}, "parameter 'w' is there twice"},
        {{.params = unnamed, .param_count = 1}, "a parameter has no name"},
        {{.params = tied, .param_count = 1},
         "same_as of 'w' is 'v', which does not exist; there is 'w'"},
        {{.params = to_itself, .param_count = 1}, "which does not exist"},
        {{.params = owned, .param_count = 2}, "'w' has both same_as and memory of its own"},
        {{.params = frozen, .param_count = 1}, "'w' is frozen, or a buffer"},
        {{.children = pair, .child_count = 2}, "two children are called 'child'"},
    };
    dp_module *out = NULL;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        CHECK_ERROR(dp_module_create(ctx, &table[i].config, &out), DP_ERR_INVALID, table[i].want);
    }
    CHECK_ERROR(dp_module_create(NULL, &table[0].config, &out), DP_ERR_INVALID, "ctx is NULL");
    CHECK_ERROR(dp_module_create(ctx, NULL, &out), DP_ERR_INVALID, "config is NULL");
    CHECK_ERROR(dp_module_create(ctx, &(dp_module_config){.name = "a"}, NULL), DP_ERR_INVALID,
                "out is NULL");
    CHECK(out == NULL);
    dp_module *parent = make(ctx, (dp_module_config){.children = &child, .child_count = 1});
    const dp_module_config other = {.name = "other", .children = &child, .child_count = 1};
    CHECK_ERROR(dp_module_create(ctx, &other, &out), DP_ERR_INVALID,
                "'child' is a child of 'module' already");
    CHECK_OK(dp_module_destroy(parent));
}

TEST_BACKENDS(modules_of_two_contexts_and_too_large_ones)
{
    dp_module *child = leaf(ctx, "child", "w", 2), *out = NULL;
    const dp_module_config other = {.name = "other", .children = &child, .child_count = 1};
    dp_ctx *elsewhere = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &elsewhere));
    CHECK_ERROR(dp_module_create(elsewhere, &other, &out), DP_ERR_INVALID,
                "'child' is of another context");
    dp_close(elsewhere);
    static const dp_param_config huge[] = {{.name = "a", .ndim = 1, .shape = {INT64_MAX / 8}},
                                           {.name = "b", .ndim = 1, .shape = {INT64_MAX / 8}}};
    const dp_module_config block = {.params = huge, .param_count = 2, .packed = true};
    CHECK_ERROR(dp_module_create(ctx, &block, &out), DP_ERR_INVALID,
                "the block is larger than can be counted");
}

/* ---- memory ---------------------------------------------------------------------------------- */

static char *data_of(dp_module *module, const char *name, bool grad)
{
    dp_tensor data, own;
    size_t param = 0;
    CHECK_OK(dp_module_find(module, name, &param));
    CHECK_OK(dp_params_edit(module, param, &data, &own));
    return grad ? own.data : data.data;
}

/* The last parameter comes first, each on a line of its own, gradients likewise. */
TEST_BACKENDS(parameters_lie_in_blocks)
{
    dp_module *const children[] = {leaf(ctx, "a", "w", 3), leaf(ctx, "b", "w", 17)};
    const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {5}},
                                      {.name = "f", .ndim = 1, .shape = {4}, .frozen = true},
                                      {.name = "d", .dtype = DP_F64, .ndim = 1, .shape = {2}}};
    dp_module *net =
        make(ctx, (dp_module_config){
                      .children = children, .child_count = 2, .params = params, .param_count = 3});
    char *last = data_of(net, "b.w", false), *grad = data_of(net, "b.w", true);
    CHECK(data_of(net, "a.w", false) == last + 128);
    CHECK(data_of(net, "f", false) == last + 192);
    CHECK(data_of(net, "w", false) == last + 256);
    CHECK(data_of(net, "a.w", true) == grad + 128);
    CHECK(data_of(net, "w", true) == grad + 192); /* what is frozen has none */
    CHECK(data_of(net, "f", true) == NULL);
    CHECK_INT((uintptr_t)last % 64, 0);
    CHECK(data_of(children[1], "w", false) == last); /* the child's own view of it */
}

TEST_BACKENDS(memory_never_moves)
{
    dp_module *child = leaf(ctx, "child", "w", 3);
    char *before = data_of(child, "w", false);
    const float three[] = {1, 2, 3};
    float got[3];
    CHECK_OK(dp_params_write(child, 0, three, sizeof three));
    dp_module *net = make(ctx, (dp_module_config){.children = &child, .child_count = 1});
    CHECK(data_of(net, "child.w", false) == before);
    net_numbers(ctx, net, false, got);
    CHECK_BYTES(got, three, sizeof three);
}

/* Of the user's wrapper: the library's ask for the memory when they are made. */
TEST_BACKENDS(wrapped_module_outlives_its_tree)
{
    const float three[] = {1, 2, 3};
    float got[3];
    dp_module *net = leaf(ctx, "net", "w", 3);
    dp_module *user = make(ctx, (dp_module_config){.name = "user", .wraps = net});
    dp_module *top = make(ctx, (dp_module_config){.children = &user, .child_count = 1});
    char *memory = data_of(top, "user.w", false);
    CHECK_OK(dp_params_write(top, 0, three, sizeof three));
    CHECK_OK(dp_module_destroy(top));
    CHECK(data_of(leaf(ctx, "next", "w", 3), "w", false) != memory);
    net_numbers(ctx, net, false, got);
    CHECK_BYTES(got, three, sizeof three);
}

TEST_BACKENDS(parameters_begin_as_zeros_and_are_written)
{
    float got[NET_PARAMS], zero[NET_PARAMS] = {0}, one[2] = {5, 6};
    dp_tensor data, grad;
    dp_param_info info;
    dp_module *net =
        make(ctx, (dp_module_config){.params = net_params, .param_count = 2, .local_rank = 2});
    net_numbers(ctx, net, false, got);
    CHECK_BYTES(got, zero, sizeof zero);
    CHECK_OK(dp_params_write(net, 1, one, sizeof one));
    CHECK_OK(dp_params_edit(net, 1, &data, &grad));
    CHECK_INT(data.device.index, 2);
    CHECK_OK(dp_fill(ctx, &grad, dp_float(3)));
    net_numbers(ctx, net, true, got);
    CHECK_F64(got[NET_PARAMS - 1], 3, 0);
    CHECK_OK(dp_zero_grad(net));
    net_numbers(ctx, net, true, got);
    CHECK_BYTES(got, zero, sizeof zero);
    CHECK_OK(dp_module_param(net, 1, &info));
    CHECK(info.data.read_only && info.data.data == data.data);
    CHECK_OK(dp_params_changed(net));
    CHECK_ERROR(dp_params_write(net, 1, one, 4), DP_ERR_INVALID, "'b' has 8 bytes, not 4");
    CHECK_ERROR(dp_params_write(net, 1, NULL, 8), DP_ERR_INVALID, "host is NULL");
    CHECK_ERROR(dp_params_edit(net, 2, &data, &grad), DP_ERR_INVALID,
                "parameter 2, 'module' has 2");
    CHECK_ERROR(dp_module_param(net, 7, &info), DP_ERR_INVALID, "parameter 7");
    CHECK_ERROR(dp_params_edit(net, 0, NULL, NULL), DP_ERR_INVALID, "out_data is NULL");
    CHECK_ERROR(dp_zero_grad(NULL), DP_ERR_INVALID, "module is NULL");
    CHECK_ERROR(dp_params_changed(NULL), DP_ERR_INVALID, "module is NULL");
}

TEST_BACKENDS(numbers_that_were_written_may_go)
{
    float numbers[] = {1, 2, 3}, got[3];
    const float want[] = {1, 2, 3};
    dp_module *net = leaf(ctx, "net", "w", 3);
    CHECK_OK(dp_params_write(net, 0, numbers, sizeof numbers));
    memset(numbers, 0, sizeof numbers);
    net_numbers(ctx, net, false, got);
    CHECK_BYTES(got, want, sizeof want);
}

/* From a table that reads as late as it may. */
TEST(numbers_that_were_written_may_go_lazy)
{
    tree_run(tree_body_numbers_that_were_written_may_go, lazy_device(toy_device()));
}

/* ---- ties ------------------------------------------------------------------------------------ */

TEST_BACKENDS(a_parameter_without_elements_is_written_too)
{
    dp_module *net = leaf(ctx, "net", "w", 0);
    CHECK_OK(dp_params_write(net, 0, NULL, 0));
    CHECK_ERROR(dp_params_write(net, 0, "x", 1), DP_ERR_INVALID,
                "dp_params_write: 'w' has 0 bytes, not 1");
    net = leaf(ctx, "net", "w", 1);
    CHECK_ERROR(dp_params_write(net, 0, NULL, 0), DP_ERR_INVALID,
                "dp_params_write: 'w' has 4 bytes, not 0");
    CHECK_ERROR(dp_params_write(net, 0, NULL, 4), DP_ERR_INVALID, "dp_params_write: host is NULL");
}

TEST_BACKENDS(tied_parameters_are_one)
{
    dp_module *const children[] = {leaf(ctx, "embed", "w", 4), leaf(ctx, "decode", "w", 4)};
    const dp_param_config params[] = {
        {.name = "v", .ndim = 1, .shape = {4}},
        {.name = "v2", .ndim = 1, .shape = {4}, .same_as = "v"},
        {.name = "decode.w", .ndim = 1, .shape = {4}, .same_as = "embed.w"}};
    dp_module *net = make(ctx, (dp_module_config){.children = children,
                                                  .child_count = 2,
                                                  .params = params,
                                                  .param_count = 3,
                                                  .methods = forward_only,
                                                  .method_count = 1});
    CHECK_INT(dp_module_param_count(net), 2);
    CHECK(data_of(net, "v", false) == data_of(net, "v2", false));
    CHECK(data_of(net, "embed.w", true) == data_of(net, "decode.w", true));
    CHECK(data_of(children[0], "w", false) == data_of(children[1], "w", false));
    dp_module *par = NULL;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_INT(dp_module_param_count(par), 2);
}

TEST_BACKENDS(wrong_ties_change_nothing)
{
    dp_module *child = leaf(ctx, "child", "w", 4), *out = NULL;
    const dp_param_config longer[] = {{.name = "v", .ndim = 1, .shape = {4}},
                                      {.name = "child.w", .ndim = 1, .shape = {4}, .same_as = "v"},
                                      {.name = "u", .ndim = 1, .shape = {5}, .same_as = "v"}};
    const dp_param_config late[] = {{.name = "v", .ndim = 1, .shape = {4}},
                                    {.name = "child.w", .ndim = 1, .shape = {4}, .same_as = "v"}};
    const dp_param_config hidden[] = {{.name = "child.w", .ndim = 1, .shape = {4}}};
    dp_module_config config = {
        .children = &child, .child_count = 1, .params = longer, .param_count = 3};
    CHECK_ERROR(dp_module_create(ctx, &config, &out), DP_ERR_INVALID, "both must be alike");
    config.params = hidden;
    config.param_count = 1;
    CHECK_ERROR(dp_module_create(ctx, &config, &out), DP_ERR_INVALID,
                "a child has a parameter 'child.w' too");
    (void)data_of(child, "w", false); /* the tie above was not made: it has memory of its own */
    config.params = late;
    config.param_count = 2;
    CHECK_ERROR(dp_module_create(ctx, &config, &out), DP_ERR_STATE, "'child.w' already has memory");
    config.params = late;
    config.param_count = 1;
    CHECK_OK(dp_module_create(ctx, &config, &out));
}

/* A tied parameter's gradient is the sum over all its names, on every number of devices. */
static dp_param_config vector(const char *name, const char *same_as, void *data)
{
    return (dp_param_config){
        .name = name, .ndim = 1, .shape = {4}, .same_as = same_as, .data = data};
}

static dp_module *family(dp_ctx *ctx, const char *name, const dp_param_config *params, size_t count,
                         dp_module *const *children, size_t child_count)
{
    return make(ctx, (dp_module_config){.name = name,
                                        .params = params,
                                        .param_count = count,
                                        .children = children,
                                        .child_count = child_count});
}

/* A parent of `children` with these parameters cannot be made. */
static void refuse_ties(dp_ctx *ctx, const dp_param_config *params, size_t count,
                        dp_module *const *children, size_t child_count, dp_status status,
                        const char *why)
{
    dp_module *out = NULL;
    const dp_module_config config = {.params = params,
                                     .param_count = count,
                                     .children = child_count > 0 ? children : NULL,
                                     .child_count = child_count};
    CHECK_ERROR(dp_module_create(ctx, &config, &out), status, why);
    CHECK(out == NULL);
}

/* A child's w, and t which is the same. */
static dp_module *twins(dp_ctx *ctx, const char *name, void *data)
{
    const dp_param_config params[] = {vector("w", NULL, data), vector("t", "w", NULL)};
    return family(ctx, name, params, 2, NULL, 0);
}

/* However deep the parameters lie, all levels between list one less. */
TEST_BACKENDS(a_tie_is_known_on_every_level)
{
    const dp_param_config two[] = {vector("a", NULL, NULL), vector("b", NULL, NULL)};
    const dp_param_config tie[] = {vector("middle.inner.b", "middle.inner.a", NULL)};
    dp_module *inner = family(ctx, "inner", two, 2, NULL, 0);
    dp_module *middle = family(ctx, "middle", NULL, 0, &inner, 1);
    CHECK_INT(dp_module_param_count(middle), 2);
    check_names(family(ctx, "outer", tie, 1, &middle, 1), "middle.inner.b");
    check_names(middle, "inner.a");
    check_names(inner, "a");
}

TEST_BACKENDS(ties_of_ties)
{
    static float memory[4];
    void *own = tree_host_memory(ctx) ? memory : NULL;
    dp_module *const children[] = {twins(ctx, "a", NULL), twins(ctx, "b", NULL),
                                   twins(ctx, "c", own)};
    const dp_param_config params[] = {
        vector("u", "v", NULL),     vector("v", "a.t", NULL), /* a chain to a child's */
        vector("b.t", "u", NULL),                             /* a child's to it */
        vector("a.w", "c.t", NULL),                           /* all of it to another child's */
        vector("b.w", "c.w", NULL), vector("x", "b.t", NULL)};
    dp_module *net = family(ctx, "net", params, 6, children, 3);
    const char *const names[] = {"u", "v", "x", "a.w", "a.t", "b.w", "b.t", "c.w", "c.t"};
    for (size_t i = 0; i < 9; i++) {
        CHECK(data_of(net, names[i], false) == data_of(net, "u", false));
        CHECK(data_of(net, names[i], true) == data_of(net, "u", true));
    }
    for (size_t i = 0; i < 3; i++) {
        CHECK(data_of(children[i], "t", false) == data_of(net, "u", false));
        CHECK_INT(dp_module_param_count(children[i]), 1);
    }
    CHECK(own == NULL || data_of(net, "u", false) == own);
    CHECK_INT(dp_module_param_count(net), 1);
}

/* Through a name that has no memory of its own, to one that has. */
TEST_BACKENDS(ties_lose_no_memory)
{
    static float first[4], second[4];
    const dp_param_config one[] = {vector("v", NULL, NULL), vector("a.t", "v", NULL)};
    const dp_param_config two[] = {vector("a.t", "b.t", NULL)};
    const dp_param_config chain[] = {vector("c.w", "a.w", NULL), vector("c.t", "b.w", NULL)};
    dp_module *children[] = {twins(ctx, "a", NULL), twins(ctx, "b", NULL), twins(ctx, "c", NULL)};
    (void)data_of(children[0], "t", false); /* the library's */
    (void)data_of(children[1], "t", false);
    for (int own = 0; own < 2; own++) {
        refuse_ties(ctx, one, 2, children, 1, DP_ERR_STATE,
                    "'a.t' already has memory, so it cannot share that of 'v'");
        refuse_ties(ctx, two, 1, children, 2, DP_ERR_STATE,
                    "'a.t' already has memory, so it cannot share that of 'b.t'");
        /* c.w has a's memory when c.t comes, which would lose that */
        refuse_ties(ctx, chain, 2, children, 3, DP_ERR_STATE,
                    "'c.t' already has memory, so it cannot share that of 'b.w'");
        children[0] = twins(ctx, "a", first); /* the user's */
        children[1] = twins(ctx, "b", second);
    }
    CHECK(data_of(children[2], "w", false) != data_of(children[0], "w", false)); /* as it was */
    CHECK(data_of(children[2], "w", false) == data_of(children[2], "t", false));
}

TEST_BACKENDS(tied_parameters_are_alike)
{
    dp_param_config near = vector("w", NULL, NULL), far = near, cold = near, kept = near;
    cold.frozen = kept.buffer = true;
    dp_module *far_child = make(
        ctx, (dp_module_config){.name = "far", .params = &far, .param_count = 1, .local_rank = 1});
    dp_module *children[] = {family(ctx, "near", &near, 1, NULL, 0), far_child,
                             family(ctx, "cold", &cold, 1, NULL, 0),
                             family(ctx, "kept", &kept, 1, NULL, 0)};
    dp_param_config own[] = {vector("v", "far.w", NULL),       vector("near.w", "far.w", NULL),
                             vector("near.w", "cold.w", NULL), vector("near.w", "kept.w", NULL),
                             vector("near.w", "v", NULL),      vector("far.w", "v", NULL)};
    refuse_ties(ctx, &own[0], 1, children, 4, DP_ERR_INVALID,
                "'v' is f32 (4) on local rank 0, same_as 'far.w' is f32 (4) on local rank 1");
    refuse_ties(ctx, &own[1], 1, children, 4, DP_ERR_INVALID,
                "'near.w' is f32 (4) on local rank 0");
    refuse_ties(ctx, &own[2], 1, children, 4, DP_ERR_INVALID, "both must be alike, frozen");
    refuse_ties(ctx, &own[3], 1, children, 4, DP_ERR_INVALID, "both must be alike, frozen");
    const dp_param_config to_far[] = {vector("v", NULL, NULL), own[5]};
    refuse_ties(ctx, to_far, 2, children, 4, DP_ERR_INVALID,
                "'far.w' is f32 (4) on local rank 1, same_as 'v' is f32 (4) on local rank 0");
    /* what a tie says of itself is looked at too */
    dp_param_config lying[] = {vector("v", NULL, NULL), own[4]};
    lying[1].shape[0] = 5;
    refuse_ties(ctx, lying, 2, children, 4, DP_ERR_INVALID, "'near.w' is f32 (5)");
    lying[1] = own[4];
    lying[1].dtype = DP_F64;
    refuse_ties(ctx, lying, 2, children, 4, DP_ERR_INVALID, "'near.w' is f64 (4)");
    lying[1] = own[4];
    dp_module *net = family(ctx, "net", lying, 2, children, 4);
    CHECK(data_of(net, "near.w", false) == data_of(net, "v", false));
}

/* Wrappers keep lists of what shares memory; what is tied to may be gone before what is wrapped. */
TEST_BACKENDS(wrapped_parameters_cannot_be_tied)
{
    const dp_param_config two[] = {vector("x", NULL, NULL), vector("y", NULL, NULL)};
    dp_module *net = family(ctx, "net", two, 2, NULL, 0), *out = NULL, *user = NULL;
    const dp_param_config inside[] = {vector("x", "y", NULL)};
    const dp_param_config outside[] = {vector("v", NULL, NULL), vector("x", "v", NULL)};
    const dp_param_config above[] = {vector("net.x", "net.y", NULL)};
    const dp_param_config around[] = {vector("user.x", "user.y", NULL)};
    const dp_param_config shared[] = {vector("v", "x", NULL)};
    dp_module_config config = {.name = "user", .wraps = net, .params = inside, .param_count = 1};
    CHECK_ERROR(dp_module_create(ctx, &config, &out), DP_ERR_STATE,
                "'x' cannot be tied to 'y' any more: 'net' is wrapped");
    config.params = outside;
    config.param_count = 2;
    CHECK_ERROR(dp_module_create(ctx, &config, &out), DP_ERR_STATE,
                "'x' cannot be tied to 'v' any more: 'net' is wrapped");
    config.params = shared; /* what is wrapped keeps its memory, and lives longer */
    config.param_count = 1;
    CHECK_OK(dp_module_create(ctx, &config, &user));
    refuse_ties(ctx, above, 1, &net, 1, DP_ERR_STATE,
                "'net.x' cannot be tied to 'net.y' any more: 'net' is wrapped");
    refuse_ties(ctx, around, 1, &user, 1, DP_ERR_STATE,
                "'user.x' cannot be tied to 'user.y' any more: 'net' is wrapped");
    const dp_param_config to_it[] = {vector("u", "user.x", NULL)};
    dp_module *top = family(ctx, "top", to_it, 1, &user, 1);
    CHECK(data_of(top, "u", true) == data_of(net, "x", true));
    CHECK(data_of(user, "v", false) == data_of(net, "x", false));
    CHECK(data_of(net, "y", false) != data_of(net, "x", false));
    CHECK_OK(dp_module_destroy(top));
    CHECK_OK(dp_zero_grad(net));
    const dp_param_config after[] = {vector("net.x", NULL, NULL)};
    refuse_ties(ctx, after, 1, &net, 1, DP_ERR_INVALID, "a child has a parameter 'net.x' too");
}

static dp_status tied_backward(dp_call *call)
{
    const float one = 1, ten = 10;
    TRY(net_add(call, dp_grad(call, 0), &one, 1));
    return net_add(call, dp_grad(call, 1), &ten, 1);
}

TEST_BACKENDS(gradients_of_tied_parameters_are_summed)
{
    static const dp_method methods[] = {{"forward", give_none}, {"backward", tied_backward}};
    const dp_param_config params[] = {{.name = "v", .ndim = 1, .shape = {1}},
                                      {.name = "u", .ndim = 1, .shape = {1}, .same_as = "v"}};
    static const int ranks[] = {0, 1, 2};
    float grad;
    dp_value out;
    dp_pass *pass;
    dp_module *par = NULL, *net = make(ctx, (dp_module_config){.methods = methods,
                                                               .method_count = 2,
                                                               .params = params,
                                                               .param_count = 2});
    CHECK_OK(dp_data_parallel(
        net, &(dp_parallel_config){.local_ranks = ranks, .local_rank_count = 3}, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[3],)"), dp_none(), NULL, &out,
                       &pass));
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
    net_numbers(ctx, net, true, &grad);
    CHECK_F64(grad, 33, 0);
}

/* ---- copies, flags, wrappers ----------------------------------------------------------------- */

TEST_BACKENDS(a_copy_is_a_tree_of_its_own)
{
    dp_module *child = net_create(ctx, &by_rows, 0), *copy = NULL;
    dp_module *net = make(ctx, (dp_module_config){.name = "outer",
                                                  .children = &child,
                                                  .child_count = 1,
                                                  .methods = forward_only,
                                                  .method_count = 1});
    float before[NET_PARAMS], after[NET_PARAMS];
    dp_param_info info;
    CHECK_OK(dp_module_copy(net, 3, &copy));
    check_names(copy, "net.w net.b");
    net_numbers(ctx, net, false, before);
    net_numbers(ctx, copy, false, after);
    CHECK_BYTES(after, before, sizeof before);
    CHECK_OK(dp_module_param(copy, 0, &info));
    CHECK_INT(info.data.device.index, 3);
    CHECK(data_of(copy, "net.w", false) != data_of(net, "net.w", false));
    dp_module *par = NULL;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_ERROR(dp_module_copy(par, 0, &copy), DP_ERR_UNSUPPORTED, "'data_parallel' is a wrapper");
    CHECK_ERROR(dp_module_copy(net, 77, &copy), DP_ERR_INVALID, "local_rank is 77");
    CHECK_ERROR(dp_module_copy(net, 0, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_module_destroy(copy));
}

TEST_BACKENDS(wrappers_are_known)
{
    dp_module *net = net_create(ctx, &by_rows, 0), *par = NULL;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    dp_module *own = make(ctx, (dp_module_config){.name = "own", .wraps = par});
    CHECK(!dp_is_wrapper(net) && dp_is_wrapper(par) && dp_is_wrapper(own));
    CHECK(dp_unwrap(net) == net && dp_unwrap(par) == net && dp_unwrap(own) == net);
    CHECK(!dp_is_wrapper(NULL) && dp_unwrap(NULL) == NULL);
    check_names(own, "w b");
}

static bool seen_training;

static dp_status note_training(dp_call *call)
{
    seen_training = call->training;
    call->out = dp_none();
    return DP_OK;
}

TEST(the_training_flag_reaches_all)
{
    static const dp_method methods[] = {{"forward", note_training}};
    dp_ctx *ctx;
    dp_value out;
    dp_module *par = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    dp_module *net = make(ctx, (dp_module_config){.methods = methods, .method_count = 1});
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    dp_scope *scope = dp_scope_begin(ctx);
    for (int on = 1; on >= 0; on--) {
        CHECK_OK(dp_module_train(par, on == 1));
        CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
        CHECK_INT(seen_training, on);
        CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
        CHECK_INT(seen_training, on);
    }
    CHECK_ERROR(dp_module_train(NULL, true), DP_ERR_INVALID, "module is NULL");
    dp_close(ctx);
}

/* ---- states of their own --------------------------------------------------------------------- */

typedef struct owner { /* counts what replica_create made */
    int live, created;
    size_t order[8];
    bool fails;
} owner;

static dp_status own_create(const dp_replica_info *info, void **own)
{
    owner *all = (owner *)(uintptr_t)info->state;
    if (all->fails) {
        return dp_error(DP_ERR_USER, "no state for replica %zu", info->replica);
    }
    all->order[all->created++] = info->replica;
    all->live++;
    if (*info->shared == NULL) {
        *info->shared = all;
    }
    *own = *info->shared;
    return DP_OK;
}

static void own_destroy(void *own)
{
    ((owner *)own)->live--;
}

static dp_status check_own(dp_call *call)
{
    call->out = dp_none();
    return call->own == call->state ? DP_OK : dp_error(DP_ERR_USER, "own is not what was made");
}

TEST_BACKENDS(every_replica_has_a_state_of_its_own)
{
    static const dp_method methods[] = {{"forward", check_own}};
    static const int ranks[] = {0, 1, 2};
    owner all = {0};
    dp_value out;
    dp_module *par = NULL, *again = NULL;
    dp_module_config config = {.name = "net",
                               .methods = methods,
                               .method_count = 1,
                               .state = &all,
                               .replica_create = own_create,
                               .replica_destroy = own_destroy};
    const dp_parallel_config three = {.local_ranks = ranks, .local_rank_count = 3};
    dp_module *net = make(ctx, config);
    CHECK_INT(all.live, 1);
    CHECK_OK(dp_data_parallel(net, &three, &par));
    CHECK_INT(all.live, 3);
    CHECK_INT(all.order[0], 0);
    CHECK_INT(all.order[2], 2);
    CHECK_OK(
        dp_invoke(par, scope, "forward", tree_of(scope, "(f32[3],)"), dp_none(), NULL, &out, NULL));
    all.fails = true;
    CHECK_ERROR(dp_data_parallel(net, &three, &again), DP_ERR_USER,
                "replica_create of 'net', replica 1: no state for replica 1");
    CHECK_ERROR(dp_module_create(ctx, &config, &again), DP_ERR_USER, "replica 0");
    CHECK_OK(dp_module_destroy(par));
    CHECK_INT(all.live, 1);
    CHECK_OK(dp_module_destroy(net));
    CHECK_INT(all.live, 0);
}

/* What was copied before the part that cannot be is gone again. */
TEST_BACKENDS(a_copy_is_whole_or_not_there)
{
    dp_module *net = net_create(ctx, &by_rows, 0), *par = NULL, *copy = NULL;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    static owner all; /* lives as long as the context */
    all = (owner){0};
    dp_module *children[] = {make(ctx, (dp_module_config){.name = "first",
                                                          .state = &all,
                                                          .replica_create = own_create,
                                                          .replica_destroy = own_destroy}),
                             par};
    dp_module *outer =
        make(ctx, (dp_module_config){.name = "outer", .children = children, .child_count = 2});
    (void)scope;
    CHECK_INT(all.live, 1);
    CHECK_ERROR(dp_module_copy(outer, 1, &copy), DP_ERR_UNSUPPORTED, "is a wrapper");
    CHECK_INT(all.created, 2);
    CHECK_INT(all.live, 1);
    CHECK(copy == NULL);
}

/* ---- the end --------------------------------------------------------------------------------- */

TEST_BACKENDS(module_in_use_is_not_destroyed)
{
    dp_module *child = net_create(ctx, &by_rows, 0), *par = NULL;
    dp_module *net = make(ctx, (dp_module_config){.name = "outer",
                                                  .children = &child,
                                                  .child_count = 1,
                                                  .methods = forward_only,
                                                  .method_count = 1});
    dp_value out;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_ERROR(dp_module_destroy(child), DP_ERR_STATE, "'net' is a child of 'outer'");
    CHECK_ERROR(dp_module_destroy(net), DP_ERR_STATE, "'outer' is wrapped");
    CHECK_OK(dp_module_destroy(par));
    CHECK_ERROR(dp_invoke(par, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL),
                DP_ERR_STATE, "the module was destroyed");
    CHECK_ERROR(dp_module_destroy(par), DP_ERR_STATE, "was destroyed already");
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    dp_module *on_child = NULL;
    CHECK_OK(dp_data_parallel(child, NULL, &on_child));
    CHECK_ERROR(dp_module_destroy(net), DP_ERR_STATE, "'net' is wrapped");
    CHECK_OK(dp_module_destroy(on_child));
    CHECK_OK(dp_module_destroy(net));
    CHECK_INT(dp_module_param_count(net), 0);
    CHECK_STR(dp_module_name(net), "");
    CHECK_OK(dp_module_destroy(NULL));
}

static dp_module *doomed[3]; /* a parent and its children */

static dp_status doom(const dp_replica_info *info, void **own)
{
    *own = (void *)(uintptr_t)info->state;
    return DP_OK;
}

static void look_at_the_doomed(void *own)
{
    ++*(int *)own;
    for (int i = 0; i < 3; i++) {
        CHECK(dp_module_name(doomed[i])[0] == '\0');
        CHECK_ERROR(dp_module_train(doomed[i], true), DP_ERR_STATE, "the module was destroyed");
    }
}

/* The whole tree is gone for whom its end calls. */
TEST_BACKENDS(a_tree_ends_at_once)
{
    int ends = 0;
    dp_module_config config = {.name = "child",
                               .state = &ends,
                               .replica_create = doom,
                               .replica_destroy = look_at_the_doomed};
    (void)scope;
    doomed[1] = make(ctx, config);
    config.name = "sister";
    doomed[2] = make(ctx, config);
    config.name = "parent";
    config.children = &doomed[1];
    config.child_count = 2;
    doomed[0] = make(ctx, config);
    CHECK_OK(dp_module_destroy(doomed[0]));
    CHECK_INT(ends, 3);
}

TEST(closing_ends_modules_and_wrappers)
{
    test_allocator counter = {0};
    owner all = {0};
    dp_ctx *ctx;
    dp_module *par = NULL;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 3, .allocator = test_allocator_of(&counter)}, &ctx));
    dp_module *child = net_create(ctx, &by_rows, 0);
    dp_module *net = make(ctx, (dp_module_config){.children = &child,
                                                  .child_count = 1,
                                                  .methods = forward_only,
                                                  .method_count = 1,
                                                  .state = &all,
                                                  .replica_create = own_create,
                                                  .replica_destroy = own_destroy});
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_INT(all.live, 3);
    dp_close(ctx);
    CHECK_INT(all.live, 0);
    CHECK_NO_LEAKS(&counter);
}

TEST(modules_that_come_and_go_take_no_more_memory)
{
    test_allocator counter = {0};
    size_t calls = 0;
    dp_ctx *ctx;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 3, .allocator = test_allocator_of(&counter)}, &ctx));
    for (int i = 0; i < 50; i++) {
        dp_module *par = NULL, *net = net_create(ctx, &by_rows, 0);
        CHECK_OK(dp_data_parallel(net, NULL, &par));
        CHECK_OK(dp_module_destroy(par));
        CHECK_OK(dp_module_destroy(net));
        calls = i == 2 ? counter.call_count : calls;
    }
    CHECK_INT(counter.call_count, calls);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* ---- every allocation fails once ------------------------------------------------------------- */

static dp_status whole_life(dp_ctx *ctx, dp_scope *scope)
{
    static const float x[4 * NET_IN];
    dp_module *net = NULL, *copy = NULL, *par = NULL;
    dp_pass *pass;
    dp_value out, log;
    dp_input_grad grads;
    dp_tensor tensor = dp_wrap_const(x, DP_F32, DP_SHAPE(4, NET_IN));
    TRY(dp_module_create(ctx,
                         &(dp_module_config){.name = "net",
                                             .methods = net_methods,
                                             .method_count = 2,
                                             .params = net_params,
                                             .param_count = 2,
                                             .state = &by_rows},
                         &net));
    TRY(dp_module_copy(net, 0, &copy));
    TRY(dp_data_parallel(copy, NULL, &par));
    TRY(dp_invoke(par, scope, "forward", DP_LIST_OF(scope, dp_of(scope, &tensor)), dp_none(), NULL,
                  &out, &pass));
    TRY(dp_backward(pass, dp_float(1), &grads));
    dp_status status = dp_train_step(par, scope, DP_LIST_OF(scope, dp_of(scope, &tensor)), NULL,
                                     &log); /* its output is no dict */
    return status == DP_ERR_INVALID ? DP_OK : status;
}

static dp_status easy_create(const dp_replica_info *info, void **own)
{
    *own = (void *)(uintptr_t)info->state;
    return DP_OK;
}

static void easy_destroy(void *own)
{
    CHECK(own == &by_rows);
}

/* Replicas meet, and return a list of losses. */
static dp_status meeting_forward(dp_call *call)
{
    dp_value loss;
    float *sum = dp_scope_alloc(call->scope, sizeof *sum);
    if (sum == NULL) {
        return DP_ERR_NO_MEMORY;
    }
    *sum = 1;
    TRY(dp_call_all_reduce(call, sum, sum, 1, DP_F32, DP_OP_SUM));
    CHECK_F64(*sum, call->replica_count, 0);
    TRY(net_new(call, sum, 0, NULL, &loss));
    call->out =
        DP_DICT(call->scope, {"loss", DP_LIST_OF(call->scope, loss, dp_int(3))}, {"acc", loss});
    return DP_OK;
}

static dp_status meeting_backward(dp_call *call)
{
    CHECK_F64(dp_at(dp_get(call->grad, "loss"), 0).as.f * (double)call->replica_count, 1, 0);
    return dp_grad(call, 0) != NULL ? DP_OK : DP_ERR_NO_MEMORY;
}

/* A tree with states of their own, whose replicas meet in a step. */
static dp_status life_of_a_tree(dp_ctx *ctx, dp_scope *scope)
{
    static const dp_method methods[] = {{"forward", meeting_forward},
                                        {"backward", meeting_backward}};
    static const float x[2] = {0};
    dp_module *inner = NULL, *net = NULL, *par = NULL;
    dp_tensor tensor = dp_wrap_const(x, DP_F32, DP_SHAPE(2));
    dp_value log;
    dp_module_config config = {.name = "inner", .params = net_params, .param_count = 2};
    TRY(dp_module_create(ctx, &config, &inner));
    config = (dp_module_config){.name = "net",
                                .methods = methods,
                                .method_count = 2,
                                .params = net_params,
                                .param_count = 2,
                                .children = &inner,
                                .child_count = 1,
                                .state = &by_rows,
                                .replica_create = easy_create,
                                .replica_destroy = easy_destroy};
    TRY(dp_module_create(ctx, &config, &net));
    TRY(dp_data_parallel(net, NULL, &par));
    TRY(dp_train_step(par, scope, DP_LIST_OF(scope, dp_of(scope, &tensor)), NULL, &log));
    CHECK_STR(tree_text(ctx, log), "{'loss': f64[]=5, 'acc': f64[]=2}");
    return DP_OK;
}

static dp_status both_lives(dp_ctx *ctx, dp_scope *scope)
{
    TRY(whole_life(ctx, scope));
    return life_of_a_tree(ctx, scope);
}

static void every_allocation_fails(bool poison)
{
    size_t calls = SIZE_MAX;
    for (size_t at = 1; at <= calls; at += (size_t)test_step()) {
        test_allocator counter = {.fail_at = at};
        dp_ctx *ctx = NULL;
        const dp_config config = {
            .device_count = 2, .poison = poison, .allocator = test_allocator_of(&counter)};
        dp_status status = dp_open(&config, &ctx);
        if (status == DP_OK) {
            dp_scope *scope = dp_scope_begin(ctx);
            status = both_lives(ctx, scope);
            dp_scope_end(scope);
            scope = dp_scope_begin(ctx);
            if (counter.fail_count > 0) {
                CHECK_OK(both_lives(ctx, scope)); /* the next try works */
            }
            dp_close(ctx);
        }
        CHECK_STATUS(status, counter.fail_count > 0 ? DP_ERR_NO_MEMORY : DP_OK);
        CHECK_NO_LEAKS(&counter);
        calls = counter.fail_count > 0 ? calls : 0;
    }
}

TEST_SLOW(every_allocation_may_fail, 60)
{
    every_allocation_fails(false);
}

/* Then each piece of a scope is an allocation. */
TEST_SLOW(every_allocation_may_fail_in_poison, 60)
{
    every_allocation_fails(true);
}
