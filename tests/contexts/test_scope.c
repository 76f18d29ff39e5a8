/* test_scope.c - lifetimes: blocks, children, defer, attach, keep, hand-over, reuse, poison. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "test.h"

static dp_ctx *open_counted(int count, test_allocator *counter)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = count, .allocator = test_allocator_of(counter)},
                     &ctx));
    return ctx;
}

static void close_counted(dp_ctx *ctx, const test_allocator *counter)
{
    dp_close(ctx);
    CHECK_NO_LEAKS(counter);
}

static dp_scope *begin(dp_ctx *ctx)
{
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK(scope != NULL);
    return scope;
}

static dp_scope *child_of(dp_scope *parent)
{
    dp_scope *scope = dp_scope_child(parent);
    CHECK(scope != NULL);
    return scope;
}

static void *alloc_filled(dp_scope *scope, size_t bytes, int with)
{
    void *data = dp_scope_alloc(scope, bytes);
    CHECK(data != NULL);
    CHECK_INT((uintptr_t)data % 64, 0);
    return memset(data, with, bytes);
}

static void check_filled(const void *data, size_t bytes, int with)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) {
        CHECK_INT(p[i], with);
    }
}

/* ---- alloc ----------------------------------------------------------------------------------- */

TEST(alloc_gives_aligned_memory_of_any_size)
{
    const size_t sizes[] = {0,
                            1,
                            2,
                            63,
                            64,
                            65,
                            127,
                            128,
                            129,
                            1000,
                            4095,
                            4096,
                            4097,
                            65535,
                            65536,
                            65537,
                            100000,
                            1u << 20,
                            (1u << 20) + 1,
                            5u << 20};
    enum { count = sizeof sizes / sizeof sizes[0] };
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    for (int round = 0; round < 3; round++) {
        dp_scope *scope = begin(ctx);
        void *data[count];
        for (size_t i = 0; i < count; i++) {
            data[i] = alloc_filled(scope, sizes[i], (int)i);
        }
        for (size_t i = 0; i < count; i++) {
            check_filled(data[i], sizes[i], (int)i);
            for (size_t k = 0; k < i; k++) {
                CHECK(data[i] != data[k]);
            }
        }
        dp_scope_end(scope);
    }
    close_counted(ctx, &counter);
}

TEST(alloc_of_nothing_gives_pointers_of_their_own)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    dp_scope *scope = begin(ctx);
    void *a = dp_scope_alloc(scope, 0), *b = dp_scope_alloc(scope, 0);
    CHECK(a != NULL && b != NULL);
    unsigned char *c = alloc_filled(scope, 1, 7);
    CHECK(dp_scope_alloc(scope, 0) != NULL);
    CHECK_INT(c[0], 7);
    dp_scope_end(scope);
    close_counted(ctx, &counter);
}

static void *alloc_below_a_gib(size_t bytes, size_t align, void *user)
{
    dp_allocator *inner = user;
    return bytes > (size_t)1 << 30 ? NULL : inner->alloc(bytes, align, inner->user);
}

static void free_below_a_gib(void *data, size_t bytes, void *user)
{
    dp_allocator *inner = user;
    inner->free(data, bytes, inner->user);
}

TEST(alloc_of_too_much_says_so)
{
    const size_t sizes[] = {SIZE_MAX,          SIZE_MAX - 1,   SIZE_MAX - 63,   SIZE_MAX - 64,
                            SIZE_MAX - 65,     SIZE_MAX - 128, SIZE_MAX - 4096, SIZE_MAX / 2 + 1,
                            SIZE_MAX / 2 - 63, (size_t)1 << 40};
    test_allocator counter = {0};
    dp_allocator inner = test_allocator_of(&counter);
    dp_ctx *ctx;
    CHECK_OK(dp_open(
        &(dp_config){.device_count = 1, .allocator = {alloc_below_a_gib, free_below_a_gib, &inner}},
        &ctx));
    dp_scope *scope = begin(ctx);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        CHECK_INT(dp_error(DP_ERR_USER, "stale"), DP_ERR_USER);
        CHECK(dp_scope_alloc(scope, sizes[i]) == NULL);
        CHECK(strncmp(dp_last_error(), "dp_scope_alloc: ", 16) == 0);
        alloc_filled(scope, 100, 1);
    }
    dp_scope_end(scope);
    close_counted(ctx, &counter);
}

TEST(thousands_of_blocks_keep_apart)
{
    enum { count = 5000 };
    static unsigned char *data[count];
    static size_t bytes[count];
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    uint64_t random = test_seed();
    for (int round = 0; round < 2; round++) {
        dp_scope *scope = begin(ctx);
        for (size_t i = 0; i < count; i++) {
            bytes[i] = test_random(&random) % (i % 50 == 0 ? 20000 : 200);
            data[i] = alloc_filled(scope, bytes[i], (int)(i & 255));
        }
        for (size_t i = 0; i < count; i++) {
            check_filled(data[i], bytes[i], (int)(i & 255));
        }
        dp_scope_end(scope);
    }
    close_counted(ctx, &counter);
}

TEST(a_null_scope_is_refused_by_name)
{
    dp_tensor tensor;
    dp_value value;
    CHECK(dp_scope_alloc(NULL, 1) == NULL);
    CHECK(strncmp(dp_last_error(), "dp_scope_alloc: ", 16) == 0);
    CHECK(dp_scope_child(NULL) == NULL);
    CHECK(strncmp(dp_last_error(), "dp_scope_child: ", 16) == 0);
    CHECK_ERROR(dp_keep(NULL, dp_int(1), &value), DP_ERR_INVALID, "dp_keep: ");
    CHECK_ERROR(dp_tensor_new(NULL, (dp_device){0, 0}, DP_F32, 0, NULL, &tensor), DP_ERR_INVALID,
                "dp_tensor_new: ");
    dp_scope_end(NULL);
}

/* A program that does not look at dp_scope_begin's result still learns the reason. */
TEST(a_null_scope_for_want_of_memory_says_so)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    dp_tensor tensor;
    counter.fail_at = counter.call_count + 1;
    counter.keep_failing = true;
    dp_scope *scope;
    do {
        scope = dp_scope_begin(ctx); /* dp_close ends those that there is memory for */
    } while (scope != NULL);
    CHECK_ERROR(dp_tensor_new(scope, (dp_device){0, 0}, DP_F32, 0, NULL, &tensor), DP_ERR_NO_MEMORY,
                "dp_tensor_new: ");
    CHECK_INT(dp_string(scope, "text").status, DP_ERR_NO_MEMORY);
    CHECK_ERROR(dp_scope_check(scope), DP_ERR_NO_MEMORY, "dp_scope_check: scope is NULL");

    counter.fail_at = 0;
    counter.keep_failing = false;
    scope = begin(ctx);
    CHECK_OK(dp_scope_check(scope));
    CHECK_ERROR(dp_tensor_new(NULL, (dp_device){0, 0}, DP_F32, 0, NULL, &tensor), DP_ERR_INVALID,
                "dp_tensor_new: ");
    dp_scope_end(scope);
    close_counted(ctx, &counter);
}

/* ---- children -------------------------------------------------------------------------------- */

typedef struct diary { /* the order in which deferred functions were called */
    int entries[64];
    int count;
} diary;

typedef struct note {
    diary *in;
    int number;
} note;

static void write_note(void *user)
{
    note *n = user;
    CHECK(n->in->count < 64);
    n->in->entries[n->in->count++] = n->number;
}

static void check_diary(const diary *d, const char *want)
{
    char got[65] = "";
    for (int i = 0; i < d->count; i++) {
        got[i] = (char)('a' + d->entries[i]);
    }
    CHECK_STR(got, want);
}

static void defer_note(dp_scope *scope, note *notes, int number)
{
    CHECK_OK(dp_scope_defer(scope, write_note, &notes[number]));
}

static void make_notes(diary *d, note *notes, int count)
{
    d->count = 0;
    for (int i = 0; i < count; i++) {
        notes[i] = (note){d, i};
    }
}

TEST(defer_is_last_in_first_out)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[26];
    make_notes(&d, notes, 26);
    dp_scope *scope = begin(ctx);
    for (int i = 0; i < 26; i++) {
        defer_note(scope, notes, i);
    }
    CHECK_INT(d.count, 0);
    dp_scope_end(scope);
    check_diary(&d, "zyxwvutsrqponmlkjihgfedcba");

    scope = begin(ctx); /* what was deferred once is not called again */
    dp_scope_end(scope);
    CHECK_INT(d.count, 26);
    close_counted(ctx, &counter);
}

/* With poison each has a block of its own. */
/* What is attached counts as new. */
TEST(children_end_the_newest_first)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[4];
    make_notes(&d, notes, 4);
    dp_scope *scope = begin(ctx), *inside[3];
    defer_note(scope, notes, 0);
    for (int i = 0; i < 3; i++) {
        inside[i] = dp_scope_child(scope);
        CHECK(inside[i] != NULL);
        defer_note(inside[i], notes, i + 1);
    }
    CHECK_OK(dp_scope_attach(scope, inside[1]));
    dp_scope_end(scope);
    check_diary(&d, "cdba");
    close_counted(ctx, &counter);
}

TEST(defer_out_of_memory)
{
    test_allocator counter = {0};
    dp_config config = {
        .device_count = 1, .poison = true, .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx;
    diary d;
    note notes[2];
    make_notes(&d, notes, 2);
    CHECK_OK(dp_open(&config, &ctx));
    dp_scope *scope = begin(ctx);
    counter.fail_at = counter.call_count + 1;
    CHECK_ERROR(dp_scope_defer(scope, write_note, &notes[0]), DP_ERR_NO_MEMORY,
                "dp_scope_defer: no memory");
    defer_note(scope, notes, 1);
    dp_scope_end(scope);
    check_diary(&d, "b");
    close_counted(ctx, &counter);
}

TEST(a_parent_ends_its_children_first)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[6];
    make_notes(&d, notes, 6);
    dp_scope *parent = begin(ctx);
    defer_note(parent, notes, 0);
    dp_scope *child = child_of(parent);
    defer_note(child, notes, 1);
    dp_scope *grandchild = child_of(child);
    defer_note(grandchild, notes, 2);
    defer_note(child, notes, 3);
    defer_note(parent, notes, 4);
    dp_scope_end(parent);
    check_diary(&d, "cdbea");
    close_counted(ctx, &counter);
}

TEST(a_child_may_end_earlier)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[5];
    make_notes(&d, notes, 5);
    dp_scope *parent = begin(ctx), *children[4];
    void *own = alloc_filled(parent, 1000, 9);
    for (int i = 0; i < 4; i++) {
        children[i] = child_of(parent);
        alloc_filled(children[i], 1000, i);
        defer_note(children[i], notes, i);
    }
    defer_note(parent, notes, 4);
    dp_scope_end(children[1]); /* from the middle, the front, the back */
    dp_scope_end(children[0]);
    dp_scope_end(children[3]);
    check_diary(&d, "bad");
    check_filled(own, 1000, 9);
    dp_scope_end(parent);
    check_diary(&d, "badce");
    close_counted(ctx, &counter);
}

/* No recursion over what the user nests. */
TEST(a_chain_of_many_generations_ends)
{
    enum { depth = 10000 };
    static dp_scope *chain[depth];
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[2];
    for (int round = 0; round < 2; round++) {
        make_notes(&d, notes, 2);
        chain[0] = begin(ctx);
        defer_note(chain[0], notes, 0);
        for (int i = 1; i < depth; i++) {
            chain[i] = child_of(chain[i - 1]);
            CHECK(dp_scope_alloc(chain[i], 10) != NULL);
        }
        defer_note(chain[depth - 1], notes, 1);
        dp_scope_end(chain[round == 0 ? depth / 2 : 0]);
        check_diary(&d, round == 0 ? "b" : "ba");
        dp_scope_end(round == 0 ? chain[0] : NULL);
        check_diary(&d, "ba");
    }
    close_counted(ctx, &counter);
}

TEST(a_scope_may_have_many_children)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    for (int round = 0; round < 2; round++) {
        dp_scope *parent = begin(ctx);
        for (int i = 0; i < 5000; i++) {
            dp_scope *child = child_of(parent);
            CHECK(dp_scope_alloc(child, 10) != NULL);
            if (i % 3 == 0) {
                dp_scope_end(child);
            }
        }
        dp_scope_end(parent);
    }
    close_counted(ctx, &counter);
}

/* ---- defer during the end -------------------------------------------------------------------- */

typedef struct late { /* what a deferred function finds and does in the scope that is ending */
    dp_scope *scope;
    const unsigned char *bytes;
    note *then;
    int calls;
    dp_status status;
} late;

static void look_at_memory(void *user)
{
    late *l = user;
    check_filled(l->bytes, 3000, 0x42);
    l->calls++;
}

TEST(defer_is_called_before_the_memory_goes)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    dp_scope *scope = begin(ctx);
    late *l = dp_scope_alloc(scope, sizeof *l);
    CHECK(l != NULL);
    *l = (late){.bytes = alloc_filled(scope, 3000, 0x42)};
    CHECK_OK(dp_scope_defer(scope, look_at_memory, l));
    dp_scope_end(scope);
    close_counted(ctx, &counter);
}

static void defer_more(void *user)
{
    late *l = user;
    l->calls++;
    l->status = dp_scope_defer(l->scope, write_note, l->then);
}

/* Taken and called, or refused: what must not happen is that it is taken and forgotten. */
TEST(defer_during_the_end_is_not_lost)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[2];
    make_notes(&d, notes, 2);
    dp_scope *scope = begin(ctx);
    late l = {.scope = scope, .then = &notes[1]};
    defer_note(scope, notes, 0);
    CHECK_OK(dp_scope_defer(scope, defer_more, &l));
    dp_scope_end(scope);
    CHECK_INT(l.calls, 1);
    if (l.status == DP_OK) {
        CHECK_INT(d.count, 2);
    } else {
        CHECK_STATUS(l.status, DP_ERR_STATE);
        check_diary(&d, "a");
    }
    close_counted(ctx, &counter);
}

static void use_ending_scope(void *user)
{
    late *l = user;
    l->calls++;
    void *data = dp_scope_alloc(l->scope, 100000);
    if (data != NULL) {
        memset(data, 1, 100000);
    }
    dp_scope *child = dp_scope_child(l->scope);
    if (child != NULL) {
        CHECK(dp_scope_alloc(child, 100000) != NULL);
    }
    dp_scope_end(l->scope); /* it is ending already */
}

TEST(a_deferred_function_may_do_what_it_likes)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    for (int round = 0; round < 3; round++) {
        diary d;
        note notes[1];
        make_notes(&d, notes, 1);
        dp_scope *parent = begin(ctx), *scope = child_of(parent);
        late l = {.scope = scope};
        defer_note(scope, notes, 0);
        CHECK_OK(dp_scope_defer(scope, use_ending_scope, &l));
        dp_scope_end(round == 0 ? parent : scope);
        CHECK_INT(l.calls, 1);
        check_diary(&d, "a");
        dp_scope_end(round == 0 ? NULL : parent);
    }
    close_counted(ctx, &counter);
}

static void end_other(void *user)
{
    dp_scope_end(user);
}

TEST(a_deferred_function_may_end_another_scope)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    dp_scope *scope = begin(ctx), *other = begin(ctx);
    alloc_filled(other, 1000, 1);
    CHECK_OK(dp_scope_defer(scope, end_other, other));
    dp_scope_end(scope);
    close_counted(ctx, &counter);
}

/* ---- attach ---------------------------------------------------------------------------------- */

TEST(an_attached_scope_ends_with_its_new_parent)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[3];
    make_notes(&d, notes, 3);
    dp_scope *step = begin(ctx), *batch = begin(ctx), *inner = child_of(batch);
    defer_note(step, notes, 0);
    defer_note(batch, notes, 1);
    defer_note(inner, notes, 2);
    void *data = alloc_filled(batch, 1000, 5);
    CHECK_OK(dp_scope_attach(step, batch));
    check_filled(data, 1000, 5);
    CHECK_INT(d.count, 0);
    dp_scope_end(step);
    check_diary(&d, "cba");
    close_counted(ctx, &counter);
}

TEST(an_attached_scope_may_end_earlier)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[2];
    make_notes(&d, notes, 2);
    dp_scope *step = begin(ctx), *batch = begin(ctx);
    defer_note(step, notes, 0);
    defer_note(batch, notes, 1);
    CHECK_OK(dp_scope_attach(step, batch));
    dp_scope_end(batch);
    check_diary(&d, "b");
    dp_scope_end(step);
    check_diary(&d, "ba");
    close_counted(ctx, &counter);
}

TEST(a_child_can_be_attached_elsewhere)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    diary d;
    note notes[3];
    make_notes(&d, notes, 3);
    dp_scope *first = begin(ctx), *second = begin(ctx), *child = child_of(first);
    defer_note(first, notes, 0);
    defer_note(second, notes, 1);
    defer_note(child, notes, 2);
    CHECK_OK(dp_scope_attach(second, child));
    CHECK_OK(dp_scope_attach(second, child)); /* where it is already */
    dp_scope_end(first);
    check_diary(&d, "a");
    alloc_filled(child, 1000, 1);
    dp_scope_end(second);
    check_diary(&d, "acb");
    close_counted(ctx, &counter);
}

TEST(attach_refuses_circles)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    dp_scope *a = begin(ctx), *b = child_of(a), *c = child_of(b), *d = child_of(c);
    CHECK_ERROR(dp_scope_attach(a, a), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_ERROR(dp_scope_attach(b, a), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_ERROR(dp_scope_attach(d, a), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_ERROR(dp_scope_attach(d, b), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_ERROR(dp_scope_attach(d, d), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_OK(dp_scope_attach(a, d)); /* upwards is fine */
    CHECK_OK(dp_scope_attach(d, b));
    dp_scope_end(a);
    close_counted(ctx, &counter);
}

TEST(attach_refuses_other_contexts_and_null)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter), *other = open_counted(1, &counter);
    dp_scope *scope = begin(ctx), *foreign = begin(other);
    CHECK_ERROR(dp_scope_attach(scope, foreign), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_ERROR(dp_scope_attach(foreign, scope), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_ERROR(dp_scope_attach(scope, NULL), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_ERROR(dp_scope_attach(NULL, scope), DP_ERR_INVALID, "dp_scope_attach: ");
    CHECK_ERROR(dp_scope_attach(NULL, NULL), DP_ERR_INVALID, "dp_scope_attach: ");
    dp_scope_end(scope);
    dp_scope_end(foreign);
    dp_close(other);
    close_counted(ctx, &counter);
}

/* ---- keep ------------------------------------------------------------------------------------ */

typedef struct sample { /* what a value is made of, so that it can be spoilt after it was kept */
    float numbers[6];
    dp_tensor view; /* turned: 3 x 2 of the numbers' 2 x 3 */
    int opaque;
    dp_value value;
} sample;

static void make_sample(dp_scope *scope, sample *out)
{
    for (int i = 0; i < 6; i++) {
        out->numbers[i] = (float)i;
    }
    dp_tensor rows = dp_wrap(out->numbers, DP_F32, 2, (int64_t[]){2, 3});
    CHECK_OK(dp_transpose(&rows, 0, 1, &out->view));
    dp_container box = {
        .data = dp_of(scope, &rows), .padding_value = 0.5, .pad_dims = 1, .stack = true};
    dp_value list[] = {dp_int(-5), dp_of(scope, &out->view), dp_string(scope, "a word"), dp_none(),
                       dp_bool(true)};
    dp_pair pairs[] = {
        {"list", dp_list_make(scope, DP_LIST, list, 5)},
        {"tuple", dp_list_make(scope, DP_TUPLE, list, 2)},
        {"box", dp_contain(scope, &box)},
        {"number", dp_float(2.5)},
        {"thing", dp_opaque(&out->opaque)},
        {"empty", dp_dict_make(scope, NULL, 0)},
    };
    out->value = dp_dict_make(scope, pairs, 6);
    CHECK_INT(out->value.kind, DP_DICT);
}

static void check_kept_tensor(const dp_tensor *tensor, const sample *from, bool turned)
{
    CHECK_INT(tensor->ndim, 2);
    CHECK_INT(tensor->dtype, DP_F32);
    for (int64_t i = 0; i < tensor->shape[0]; i++) {
        for (int64_t k = 0; k < tensor->shape[1]; k++) {
            const float *data = tensor->data;
            const float *at = data + i * tensor->stride[0] + k * tensor->stride[1];
            CHECK(data < from->numbers || data >= from->numbers + 6);
            CHECK_F64(*at, turned ? i + 3 * k : 3 * i + k, 0.0);
        }
    }
}

static void check_kept(dp_value kept, const sample *from)
{
    CHECK_INT(kept.kind, DP_DICT);
    CHECK_INT(kept.count, 6);
    dp_value list = dp_get(kept, "list"), tuple = dp_get(kept, "tuple"), box = dp_get(kept, "box");
    CHECK(list.kind == DP_LIST && list.count == 5 && tuple.kind == DP_TUPLE && tuple.count == 2);
    CHECK_INT(dp_at(list, 0).as.i, -5);
    check_kept_tensor(dp_at(list, 1).as.t, from, true);
    check_kept_tensor(dp_at(tuple, 1).as.t, from, true);
    CHECK_STR(dp_at(list, 2).as.s, "a word");
    CHECK(dp_at(list, 3).kind == DP_NONE && dp_at(list, 4).as.b);
    CHECK_INT(box.kind, DP_CONTAINER);
    CHECK(box.as.c->stack && !box.as.c->cpu_only);
    CHECK_INT(box.as.c->pad_dims, 1);
    CHECK_F64(box.as.c->padding_value, 0.5, 0.0);
    check_kept_tensor(box.as.c->data.as.t, from, false);
    CHECK_F64(dp_get(kept, "number").as.f, 2.5, 0.0);
    CHECK(dp_get(kept, "thing").as.p == &from->opaque);
    CHECK(dp_get(kept, "empty").kind == DP_DICT && dp_get(kept, "empty").count == 0);
}

TEST(keep_copies_all_of_it)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(2, &counter);
    for (int round = 0; round < 3; round++) {
        dp_scope *to = begin(ctx), *from = begin(ctx);
        sample s;
        dp_value kept;
        make_sample(from, &s);
        CHECK_OK(dp_keep(to, s.value, &kept));
        dp_scope_end(from);
        memset(s.numbers, 0x7f, sizeof s.numbers);
        from = begin(ctx); /* takes the blocks of the one that ended */
        for (int i = 0; i < 100; i++) {
            alloc_filled(from, 200, 0x7f);
        }
        check_kept(kept, &s);
        dp_scope_end(from);
        check_kept(kept, &s);
        dp_scope_end(to);
    }
    close_counted(ctx, &counter);
}

TEST(keep_moves_what_a_device_made)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(3, &counter);
    for (int rank = 0; rank < 3; rank++) {
        dp_scope *to = begin(ctx), *from = child_of(to);
        dp_device device = dp_local_device(ctx, rank);
        dp_tensor tensor;
        dp_value kept;
        float host[50];
        CHECK_OK(dp_tensor_new(from, device, DP_F32, 1, (int64_t[]){50}, &tensor));
        CHECK_OK(dp_fill(ctx, &tensor, dp_int(rank)));
        CHECK_OK(dp_keep(to, dp_of(from, &tensor), &kept));
        CHECK_OK(dp_fill(ctx, &tensor, dp_int(99)));
        dp_scope_end(from);
        CHECK_INT(kept.kind, DP_TENSOR);
        CHECK_INT(kept.as.t->device.backend, device.backend);
        CHECK_INT(kept.as.t->device.index, device.index);
        CHECK_OK(dp_read(ctx, kept.as.t, host, sizeof host));
        CHECK_F64(host[49], rank, 0.0);
        dp_scope_end(to);
    }
    close_counted(ctx, &counter);
}

TEST(keep_takes_leaves_and_refuses_errors)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    dp_scope *scope = begin(ctx);
    dp_value kept, wrong = dp_string(NULL, "nowhere");
    CHECK_OK(dp_keep(scope, dp_none(), &kept));
    CHECK_INT(kept.kind, DP_NONE);
    CHECK_OK(dp_keep(scope, dp_int(INT64_MIN), &kept));
    CHECK_INT(kept.as.i, INT64_MIN);
    CHECK_INT(wrong.kind, DP_ERROR);
    CHECK_STATUS(dp_keep(scope, wrong, &kept), DP_ERR_INVALID);
    dp_value list = dp_list_make(scope, DP_LIST, &wrong, 1);
    CHECK_STATUS(dp_keep(scope, list, &kept), DP_ERR_INVALID);
    dp_scope_end(scope);
    close_counted(ctx, &counter);
}

TEST(keep_in_the_same_scope_is_a_copy)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    dp_scope *scope = begin(ctx);
    sample s;
    dp_value kept;
    make_sample(scope, &s);
    CHECK_OK(dp_keep(scope, s.value, &kept));
    CHECK(kept.as.pairs != s.value.as.pairs);
    memset(s.numbers, 0x7f, sizeof s.numbers);
    check_kept(kept, &s);
    dp_scope_end(scope);
    close_counted(ctx, &counter);
}

TEST(keep_takes_the_deepest_value)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    dp_scope *to = begin(ctx), *from = begin(ctx);
    dp_value value = dp_int(1), kept;
    for (int i = 0; i < DP_MAX_DEPTH; i++) {
        value = dp_list_make(from, DP_LIST, &value, 1);
    }
    CHECK_INT(value.depth, DP_MAX_DEPTH);
    CHECK_OK(dp_keep(to, value, &kept));
    dp_scope_end(from);
    for (int i = 0; i < DP_MAX_DEPTH; i++) {
        CHECK_INT(kept.kind, DP_LIST);
        kept = dp_at(kept, 0);
    }
    CHECK_INT(kept.as.i, 1);
    dp_scope_end(to);
    close_counted(ctx, &counter);
}

/* ---- hand-over ------------------------------------------------------------------------------- */

typedef struct parcel {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_value value;
} parcel;

static void *load_batch(void *user)
{
    parcel *p = user;
    int64_t shape[] = {1000};
    dp_tensor tensor;
    p->scope = begin(p->ctx);
    CHECK_OK(dp_tensor_new(p->scope, (dp_device){0, 0}, DP_I32, 1, shape, &tensor));
    int32_t *data = tensor.data;
    for (int i = 0; i < 1000; i++) {
        data[i] = i;
    }
    p->value = dp_dict_make(p->scope, &(dp_pair){"x", dp_of(p->scope, &tensor)}, 1);
    return NULL;
}

TEST(a_loaders_batch_joins_the_step)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(2, &counter);
    for (int round = 0; round < 20; round++) {
        parcel p = {.ctx = ctx};
        pthread_t thread;
        dp_scope *step = begin(ctx);
        CHECK_INT(pthread_create(&thread, NULL, load_batch, &p), 0);
        CHECK_INT(pthread_join(thread, NULL), 0);
        CHECK_OK(dp_scope_attach(step, p.scope));
        const dp_tensor *x;
        CHECK_OK(dp_as_tensor(dp_get(p.value, "x"), "x", DP_I32, 1, &x));
        CHECK_INT(((const int32_t *)x->data)[999], 999);
        dp_scope_end(step);
    }
    close_counted(ctx, &counter);
}

static void *end_scope(void *user)
{
    parcel *p = user;
    alloc_filled(p->scope, 100, 1);
    dp_scope_end(p->scope);
    return NULL;
}

TEST(another_thread_may_end_a_scope)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    for (int round = 0; round < 20; round++) {
        parcel p = {.ctx = ctx, .scope = begin(ctx)};
        pthread_t thread;
        alloc_filled(p.scope, 100000, 1);
        CHECK_INT(pthread_create(&thread, NULL, end_scope, &p), 0);
        CHECK_INT(pthread_join(thread, NULL), 0);
    }
    close_counted(ctx, &counter);
}

/* ---- reuse ----------------------------------------------------------------------------------- */

static void do_nothing(void *user)
{
    (void)user;
}

static dp_status work_in_scope(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    dp_tensor tensor;
    dp_scope *child = child_of(scope);
    alloc_filled(child, 3000, 1);
    CHECK_OK(dp_tensor_new(child, dp_local_device(ctx, local_rank), DP_F32, 2, (int64_t[]){30, 40},
                           &tensor));
    CHECK_OK(dp_fill(ctx, &tensor, dp_int(1)));
    return DP_OK;
}

static void take_step(dp_ctx *ctx)
{
    dp_scope *step = begin(ctx), *child = child_of(step), *batch = begin(ctx);
    dp_tensor tensor;
    dp_value kept;
    sample s;
    for (size_t bytes = 1; bytes < 4000000; bytes *= 3) {
        alloc_filled(step, bytes, 1);
        alloc_filled(child, bytes + 70, 1);
    }
    for (int rank = 0; rank < 3; rank++) {
        CHECK_OK(dp_tensor_new(step, dp_local_device(ctx, rank), DP_F64, 2, (int64_t[]){100, 70},
                               &tensor));
        CHECK_OK(dp_fill(ctx, &tensor, dp_int(1)));
    }
    CHECK_OK(dp_scope_defer(child, do_nothing, NULL));
    make_sample(child, &s);
    CHECK_OK(dp_keep(step, s.value, &kept));
    dp_scope_end(child);
    CHECK_OK(dp_scope_attach(step, batch));
    alloc_filled(batch, 12345, 1);
    CHECK_OK(dp_run(ctx, step, work_in_scope, ctx));
    dp_scope_end(step);
}

TEST(a_steady_step_allocates_nothing)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(3, &counter);
    for (int i = 0; i < 3; i++) {
        take_step(ctx); /* a scope that is begun again may have another part, and cut more */
    }
    size_t calls = counter.call_count;
    CHECK(calls > 0);
    for (int i = 0; i < 100; i++) {
        take_step(ctx);
        CHECK_INT(counter.call_count, calls);
    }
    close_counted(ctx, &counter);
}

TEST(two_scopes_at_a_time_are_steady_too)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    size_t calls = 0;
    for (int i = 0; i < 50; i++) {
        dp_scope *a = begin(ctx), *b = begin(ctx);
        alloc_filled(a, 100000, 1);
        alloc_filled(b, 100000, 2);
        dp_scope_end(a);
        a = begin(ctx);
        alloc_filled(a, 100000, 3);
        dp_scope_end(b);
        dp_scope_end(a);
        CHECK(i == 0 || calls == counter.call_count);
        calls = counter.call_count;
    }
    close_counted(ctx, &counter);
}

/* One large step must not make every later step pay, nor each a little more. */
TEST(memory_does_not_grow_from_step_to_step)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(1, &counter);
    uint64_t random = test_seed();
    size_t peak = 0;
    for (int i = 0; i < 2000; i++) {
        dp_scope *scope = begin(ctx);
        for (int k = 0; k < 20; k++) {
            alloc_filled(scope, test_random(&random) % 20000, 1);
        }
        dp_scope_end(scope);
        if (i == 1000) {
            peak = counter.peak_bytes;
        }
    }
    CHECK(counter.peak_bytes <= peak + peak / 4);
    CHECK(counter.peak_bytes < 4u << 20);
    close_counted(ctx, &counter);
}

/* ---- poison ---------------------------------------------------------------------------------- */

TEST(poison_fills_what_is_given_back)
{
    if (WITH_ASAN) {
        SKIP("reading memory that was given back is what ASan reports");
    }
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2, .poison = true}, &ctx));
    for (int round = 0; round < 3; round++) {
        dp_scope *scope = begin(ctx), *child = child_of(scope);
        dp_tensor tensor;
        const unsigned char *data = alloc_filled(scope, 1000, 0x11);
        const unsigned char *of_child = alloc_filled(child, 100, 0x22);
        CHECK_OK(
            dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, 1, (int64_t[]){64}, &tensor));
        memset(tensor.data, 0x33, 256);
        dp_scope_end(child);
        check_filled(of_child, 100, 0xff);
        check_filled(data, 1000, 0x11);
        dp_scope_end(scope);
        check_filled(data, 1000, 0xff);
        check_filled(tensor.data, 256, 0xff);
    }
    dp_close(ctx);
}

static void hear_error(const dp_log_record *record, void *user)
{
    char *text = user;
    if (record->level == DP_LOG_ERROR)
        snprintf(text, 256, "%s", record->text);
}

/* Memory that nobody wrote, and what lies behind a piece, is NaN; what is written there is told. */
TEST(poison_fills_what_nobody_wrote)
{
    if (WITH_ASAN) {
        SKIP("ASan reports it first");
    }
    dp_ctx *ctx;
    char said[256] = "";
    CHECK_OK(dp_open(
        &(dp_config){.device_count = 1, .poison = true, .log = {.fn = hear_error, .user = said}},
        &ctx));
    for (int round = 0; round < 2; round++) {
        dp_scope *scope = begin(ctx);
        for (size_t bytes = 1; bytes < 20000; bytes = bytes * 3 + 1) {
            unsigned char *data = dp_scope_alloc(scope, bytes);
            check_filled(data, bytes + 64, 0xff);
            memset(data, 0, bytes);
            check_filled(data + bytes, 64, 0xff);
        }
        dp_scope_end(scope);
    }
    CHECK_STR(said, "");
    dp_scope *scope = begin(ctx);
    unsigned char *data = dp_scope_alloc(scope, 100);
    data[103] = 0;
    dp_scope_end(scope);
    CHECK_SAYS(said, "something was written behind a piece of 100 bytes, at byte 103");
    said[0] = '\0';
    data[7] = 1; /* which had ended */
    scope = begin(ctx);
    CHECK(dp_scope_alloc(scope, 100) == data);
    CHECK_SAYS(said, "something was written to memory of a scope that had ended, at byte 7");
    dp_close(ctx);
}

/* ---- use after the end, seen by ASan --------------------------------------------------------- */

typedef unsigned char *(*stale_fn)(dp_ctx *ctx); /* gives a pointer that is no longer valid */

static unsigned char *stale_block(dp_ctx *ctx)
{
    dp_scope *scope = begin(ctx);
    unsigned char *data = alloc_filled(scope, 100, 1);
    dp_scope_end(scope);
    return data;
}

static unsigned char *stale_large_block(dp_ctx *ctx)
{
    dp_scope *scope = begin(ctx);
    unsigned char *data = alloc_filled(scope, 1u << 20, 1);
    dp_scope_end(scope);
    return data;
}

static unsigned char *stale_tensor(dp_ctx *ctx)
{
    dp_scope *scope = begin(ctx);
    dp_tensor tensor;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_U8, 1, (int64_t[]){100}, &tensor));
    dp_scope_end(scope);
    return tensor.data;
}

static unsigned char *stale_in_child(dp_ctx *ctx)
{
    dp_scope *scope = begin(ctx), *child = child_of(scope);
    unsigned char *data = alloc_filled(child, 100, 1);
    dp_scope_end(child);
    alloc_filled(scope, 3, 1);
    return data;
}

static void write_stale(stale_fn make, int output)
{
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    unsigned char *volatile data = make(ctx);
    CHECK(dup2(output, STDERR_FILENO) == STDERR_FILENO);
    data[50] = 7;
}

/* ASan ends a child that writes through a stale pointer, and says why. */
static void check_reported(stale_fn make)
{
    char text[2048];
    FILE *file = tmpfile();
    CHECK(file != NULL);
    pid_t child = fork();
    if (child == 0) {
        write_stale(make, fileno(file));
        _exit(EXIT_SUCCESS);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS);
    CHECK(strstr(text, "AddressSanitizer: ") != NULL);
    CHECK(strstr(text, "poison") != NULL || strstr(text, "use-after-free") != NULL);
}

TEST(use_after_the_end_is_reported)
{
    if (!WITH_ASAN) {
        SKIP("not built with ASan");
    }
    check_reported(stale_block);
    check_reported(stale_large_block);
    check_reported(stale_tensor);
    check_reported(stale_in_child);
}

/* Blocks that are reused can be used from end to end. */
TEST(memory_that_is_handed_out_again_is_whole)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(2, &counter);
    uint64_t random = test_seed();
    for (int i = 0; i < 300; i++) {
        dp_scope *scope = begin(ctx), *child = child_of(scope);
        for (int k = 0; k < 10; k++) {
            alloc_filled(k % 2 == 0 ? scope : child, test_random(&random) % 70000, 1);
        }
        dp_scope_end(scope);
    }
    close_counted(ctx, &counter);
}
