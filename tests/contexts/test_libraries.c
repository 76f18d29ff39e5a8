/* test_libraries.c - what dp.h has for libraries on top of it: checks of arguments, and sentences
   that begin with the name of the library's function. */

#include <string.h>
#include "methods.h"
#include "test.h"

static dp_ctx *open_devices(int count)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = count}, &ctx));
    return ctx;
}

/* ---- a library ------------------------------------------------------------------------------- */

static dp_status my_inner(dp_status status)
{
    return status == DP_ERR_NO_MEMORY ? dp_no_memory() : dp_error(status, "number %d is odd", 7);
}

static dp_status my_outer(dp_status status)
{
    return dp_error_in(__func__, my_inner(status));
}

static dp_status my_work(dp_ctx *ctx, dp_scope *scope, dp_value value, dp_value *out)
{
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_alone(__func__, ctx));
    DP_TRY(dp_check_scope(__func__, scope, ctx));
    DP_TRY(dp_check_value(__func__, "value", value));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    return dp_error_in(__func__, dp_made(dp_list_make(scope, DP_LIST, &value, 1), out));
}

/* ---- sentences ------------------------------------------------------------------------------- */

TEST(sentences_begin_with_the_name_of_the_function)
{
    CHECK_OK(dp_error_in("my_outer", DP_OK));
    CHECK_ERROR(my_outer(DP_ERR_USER), DP_ERR_USER, "my_outer: number 7 is odd");
    CHECK_ERROR(my_outer(DP_ERR_NO_MEMORY), DP_ERR_NO_MEMORY, "my_outer: no memory");
    CHECK_INT(dp_error_in("my_outer", DP_ERR_NO_MEMORY), DP_ERR_NO_MEMORY);
    CHECK_STR(dp_last_error(), "my_outer: no memory"); /* it stands there once */
}

TEST(what_a_constructor_made_is_a_status)
{
    dp_ctx *ctx = open_devices(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out = dp_int(3);
    CHECK_OK(dp_made(dp_string(scope, "x"), &out));
    CHECK_STR(dp_text(out), "x");
    dp_value wrong = dp_string(scope, NULL);
    (void)dp_error(DP_OK, "%s", "");
    CHECK_ERROR(dp_made(wrong, &out), DP_ERR_INVALID, "dp_string: ");
    CHECK_STR(dp_text(out), "x");
    CHECK_ERROR(dp_made(out, NULL), DP_ERR_INVALID, "dp_made: out is NULL");
    dp_close(ctx);
}

TEST(names_are_joined_by_a_dot)
{
    dp_ctx *ctx = open_devices(1);
    dp_scope *scope = dp_scope_begin(ctx);
    const char inner[] = "weight";
    CHECK_STR(dp_join_names(scope, "layer.0", inner), "layer.0.weight");
    CHECK_STR(dp_join_names(scope, "", inner), ".weight");
    CHECK_STR(dp_join_names(scope, NULL, inner), "weight");
    CHECK(dp_join_names(scope, NULL, inner) != inner);
    CHECK(dp_join_names(scope, "layer", NULL) == NULL);
    CHECK_STR(dp_last_error(), "dp_join_names: inner is NULL");
    dp_close(ctx);
}

TEST(names_are_not_joined_without_memory)
{
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    static char name[1 << 20];
    memset(name, 'x', sizeof name - 1);
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 1, .allocator = test_allocator_of(&counter)}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    counter.fail_at = counter.call_count + 1;
    CHECK(dp_join_names(scope, "a", name) == NULL);
    CHECK_STR(dp_last_error(), "dp_join_names: no memory");
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* ---- checks ---------------------------------------------------------------------------------- */

TEST(checks_speak_for_the_function_that_asks)
{
    dp_ctx *ctx = open_devices(1), *other = open_devices(1);
    dp_scope *scope = dp_scope_begin(ctx), *elsewhere = dp_scope_begin(other);
    dp_value out = dp_none(), forged = {.kind = DP_TENSOR};
    CHECK_OK(my_work(ctx, scope, dp_int(1), &out));
    CHECK_INT(dp_count(out), 1);
    CHECK_ERROR(my_work(NULL, scope, out, &out), DP_ERR_INVALID, "my_work: ctx is NULL");
    CHECK_ERROR(my_work(ctx, NULL, out, &out), DP_ERR_INVALID, "my_work: scope is NULL");
    CHECK_ERROR(my_work(ctx, elsewhere, out, &out), DP_ERR_INVALID,
                "my_work: the scope is of another context");
    CHECK_ERROR(my_work(ctx, scope, forged, &out), DP_ERR_INVALID, "my_work: value");
    CHECK_ERROR(my_work(ctx, scope, dp_string(scope, NULL), &out), DP_ERR_INVALID, "my_work: ");
    CHECK_ERROR(my_work(ctx, scope, out, NULL), DP_ERR_INVALID, "my_work: out is NULL");
    CHECK_OK(dp_check_scope("my_work", elsewhere, NULL));
    dp_close(other);
    CHECK_ERROR(my_work(other, scope, out, &out), DP_ERR_STATE, "my_work: the context is closed");
    dp_abort(ctx, DP_ERR_REMOTE, "rank 7 is gone");
    CHECK_ERROR(my_work(ctx, scope, out, &out), DP_ERR_REMOTE,
                "my_work: the job failed: rank 7 is gone");
    dp_close(ctx);
}

static dp_status ask_inside(int rank, dp_scope *scope, void *user)
{
    dp_value out;
    (void)rank;
    CHECK_ERROR(my_work(user, scope, dp_int(1), &out), DP_ERR_STATE,
                "my_work: a function under dp_run");
    return DP_OK;
}

TEST(what_changes_all_devices_is_refused_while_all_run)
{
    dp_ctx *ctx = open_devices(2);
    CHECK_OK(dp_run(ctx, NULL, ask_inside, ctx));
    dp_close(ctx);
}

/* ---- functions of the library's user --------------------------------------------------------- */

typedef struct guarded {
    dp_ctx *ctx;
    dp_scope *outer, *own, *inner;
    dp_status wanted;
} guarded;

static dp_status try_to_end(void *user)
{
    guarded *g = user;
    dp_scope *const refused[] = {g->own, g->outer};
    for (int i = 0; i < 2; i++) {
        (void)dp_error(DP_OK, "%s", "");
        dp_scope_end(refused[i]);
        CHECK(strstr(dp_last_error(), "in use by a function of mine") != NULL);
        CHECK_OK(dp_scope_check(refused[i]));
    }
    dp_close(g->ctx);
    CHECK_OK(dp_check_ctx("my_work", g->ctx));
    dp_scope_end(g->inner);
    CHECK_ERROR(dp_scope_check(g->inner), DP_ERR_STATE, "has ended");
    return g->wanted == DP_OK ? DP_OK : dp_error(g->wanted, "it does not want to");
}

TEST(a_function_of_the_users_keeps_its_scope)
{
    dp_ctx *ctx = open_devices(1);
    guarded g = {.ctx = ctx, .outer = dp_scope_begin(ctx)};
    g.own = dp_scope_child(g.outer);
    g.inner = dp_scope_child(g.own);
    CHECK_OK(dp_scope_guard(g.own, "a function of mine", try_to_end, &g));
    g.inner = dp_scope_child(g.own);
    g.wanted = DP_ERR_USER;
    CHECK_ERROR(dp_scope_guard(g.own, "a function of mine", try_to_end, &g), DP_ERR_USER,
                "it does not want to");
    CHECK_ERROR(dp_scope_guard(g.own, "a function of mine", NULL, &g), DP_ERR_INVALID,
                "dp_scope_guard: fn is NULL");
    dp_scope_end(g.own);
    CHECK_ERROR(dp_scope_guard(g.own, "a function of mine", try_to_end, &g), DP_ERR_STATE,
                "dp_scope_guard: the scope has ended");
    dp_close(ctx);
}
