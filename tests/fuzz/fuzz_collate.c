/* fuzz_collate.c - samples of one structure from bytes, some with other sizes or one odd leaf, are
   collated. A model says beforehand whether they can be; afterwards every sample is found again in
   the batch, what surrounds it is padding, and the batch is scattered. */

#include "fuzz.h"

enum { MAX_SAMPLES = 6 };

typedef struct samples {
    const dp_value *items;
    size_t count, per_group;
} samples;

/* Child number `index` of every sample. */
static samples children(const samples *all, uint32_t index, dp_value out[MAX_SAMPLES])
{
    for (size_t i = 0; i < all->count; i++) {
        out[i] = fuzz_child(all->items[i], index);
    }
    return (samples){out, all->count, all->per_group};
}

static int pad_dims(const dp_container *container)
{
    return container->pad_dims == 0 ? 2 : container->pad_dims;
}

/* ---- the model ------------------------------------------------------------------------------- */

static bool same_tensors(const samples *all)
{
    for (size_t i = 0; i < all->count; i++) {
        if (!fuzz_same_shape(all->items[i].as.t, all->items[0].as.t)) {
            return false;
        }
    }
    return true;
}

/* Can the containers be stacked, as far as their shapes go? */
static bool can_stack(const dp_container *a, const dp_container *b)
{
    int dims = pad_dims(a);
    if (a->data.kind != DP_TENSOR || b->data.kind != DP_TENSOR) {
        return false;
    }
    const dp_tensor *x = a->data.as.t, *y = b->data.as.t;
    if (fuzz_same_shape(x, y)) {
        return dims == DP_PAD_NONE || x->ndim > dims;
    }
    return dims != DP_PAD_NONE && x->dtype == y->dtype && x->ndim == y->ndim && x->ndim > dims &&
           memcmp(x->shape, y->shape, (size_t)(x->ndim - dims) * sizeof(x->shape[0])) == 0;
}

/* A flag that is padded, as `b` is larger somewhere, is padded with 0 or 1. */
static bool can_pad(const dp_container *a, const dp_container *b)
{
    const dp_tensor *x = a->data.as.t, *y = b->data.as.t;
    bool larger = false;
    for (int d = 0; d < x->ndim; d++) {
        larger = larger || y->shape[d] > x->shape[d];
    }
    return !larger || x->dtype != DP_BOOL || a->padding_value < 2;
}

/* All pairs of a group. */
static bool can_collate_containers(const samples *all)
{
    const dp_container *first = all->items[0].as.c;
    for (size_t i = 0; first->stack && !first->cpu_only && i < all->count; i++) {
        for (size_t j = i / all->per_group * all->per_group; j <= i; j++) {
            const dp_container *a = all->items[i].as.c, *b = all->items[j].as.c;
            if (!can_stack(a, b) || !can_pad(a, b) || !can_pad(b, a)) {
                return false;
            }
        }
    }
    return true;
}

static bool can_collate(const samples *all)
{
    dp_value first = all->items[0], next[MAX_SAMPLES];
    for (size_t i = 0; i < all->count; i++) {
        if (all->items[i].kind != first.kind || all->items[i].count != first.count) {
            return false;
        }
    }
    if (first.kind == DP_NONE || first.kind == DP_OPAQUE) {
        return false;
    } else if (first.kind == DP_TENSOR) {
        return same_tensors(all);
    } else if (first.kind == DP_CONTAINER) {
        return can_collate_containers(all);
    }
    for (uint32_t i = 0; i < first.count; i++) {
        samples inner = children(all, i, next);
        if (!can_collate(&inner)) {
            return false;
        }
    }
    return true;
}

/* ---- the batch ------------------------------------------------------------------------------- */

static void check_numbers(const samples *all, dp_dtype dtype, dp_value batch)
{
    const dp_tensor *tensor;
    FUZZ_CHECK(dp_as_tensor(batch, "batch", dtype, 1, &tensor) == DP_OK);
    FUZZ_CHECK(tensor->shape[0] == (int64_t)all->count && dp_is_contiguous(tensor));
    for (size_t i = 0; i < all->count; i++) {
        dp_value want = all->items[i];
        const char *got = (const char *)tensor->data + i * dp_dtype_bytes(dtype);
        FUZZ_CHECK(dtype == DP_BOOL ? *got == (char)want.as.b
                                    : memcmp(got, &want.as.i, sizeof(want.as.i)) == 0);
    }
}

static void check_stacked(fuzz *in, const samples *all, dp_value batch)
{
    dp_tensor row;
    FUZZ_CHECK(batch.kind == DP_TENSOR && batch.as.t->shape[0] == (int64_t)all->count);
    for (size_t i = 0; i < all->count; i++) {
        FUZZ_CHECK(dp_select(batch.as.t, 0, (int64_t)i, &row) == DP_OK);
        FUZZ_CHECK(fuzz_same_tensor(in->ctx, &row, all->items[i].as.t));
    }
}

/* Element number `index` of a row; whether it is one of the sample's. */
static bool element_at(const dp_tensor *row, const dp_tensor *sample, int64_t index, dp_tensor *out)
{
    bool inside = true;
    *out = *row;
    for (int d = row->ndim - 1; d >= 0; d--) {
        int64_t at = index % row->shape[d];
        FUZZ_CHECK(dp_narrow(out, d, at, 1, out) == DP_OK);
        inside = inside && at < sample->shape[d];
        index /= row->shape[d];
    }
    return inside;
}

/* A corner of the row is the sample, all else is its padding. */
static void check_padded(fuzz *in, const dp_tensor *row, const dp_container *container)
{
    const dp_tensor *sample = container->data.as.t;
    dp_tensor corner = *row, element;
    double number;
    for (int d = 0; d < sample->ndim; d++) {
        FUZZ_CHECK(row->shape[d] >= sample->shape[d]);
        FUZZ_CHECK(dp_narrow(&corner, d, 0, sample->shape[d], &corner) == DP_OK);
    }
    FUZZ_CHECK(fuzz_same_tensor(in->ctx, &corner, sample));
    for (int64_t i = 0; i < dp_tensor_count(row); i++) {
        if (!element_at(row, sample, i, &element)) {
            FUZZ_CHECK(dp_item(in->ctx, dp_of(in->scope, &element), &number) == DP_OK);
            FUZZ_CHECK(number == container->padding_value);
        }
    }
}

/* The group that begins with sample `first`: a tensor whose sizes are the group's largest. */
static void check_group(fuzz *in, const samples *all, size_t first, size_t count, dp_value group)
{
    int64_t most[DP_MAX_DIMS] = {0};
    dp_tensor row;
    FUZZ_CHECK(group.kind == DP_TENSOR && group.as.t->shape[0] == (int64_t)count);
    for (size_t i = 0; i < count; i++) {
        const dp_container *c = all->items[first + i].as.c;
        FUZZ_CHECK(dp_select(group.as.t, 0, (int64_t)i, &row) == DP_OK);
        FUZZ_CHECK(row.ndim == c->data.as.t->ndim && row.dtype == c->data.as.t->dtype);
        for (int d = 0; d < row.ndim; d++) {
            int64_t size = c->data.as.t->shape[d];
            most[d] = size > most[d] ? size : most[d];
        }
        check_padded(in, &row, c);
    }
    for (int d = 0; d < group.as.t->ndim - 1; d++) {
        FUZZ_CHECK(group.as.t->shape[d + 1] == most[d]);
    }
}

static void check_container(fuzz *in, const samples *all, dp_value batch)
{
    const dp_container *first = all->items[0].as.c, *c = batch.as.c;
    size_t groups = (all->count + all->per_group - 1) / all->per_group;
    FUZZ_CHECK(batch.kind == DP_CONTAINER && c->data.kind == DP_LIST && c->data.count == groups);
    FUZZ_CHECK(c->stack == first->stack && c->cpu_only == first->cpu_only);
    FUZZ_CHECK(pad_dims(c) == pad_dims(first));
    for (size_t at = 0, group = 0; group < groups; group++, at += all->per_group) {
        size_t rest = all->count - at, count = rest < all->per_group ? rest : all->per_group;
        dp_value made = c->data.as.items[group];
        if (c->stack && !c->cpu_only) {
            check_group(in, all, at, count, made);
            continue;
        }
        FUZZ_CHECK(made.kind == DP_LIST && made.count == count);
        for (size_t i = 0; i < count; i++) {
            FUZZ_CHECK(fuzz_same(in->ctx, made.as.items[i], all->items[at + i].as.c->data));
        }
    }
}

static void check_batch(fuzz *in, const samples *all, dp_value batch)
{
    dp_value first = all->items[0], next[MAX_SAMPLES];
    if (first.kind == DP_INT) {
        check_numbers(all, DP_I64, batch);
    } else if (first.kind == DP_FLOAT) {
        check_numbers(all, DP_F64, batch);
    } else if (first.kind == DP_BOOLEAN) {
        check_numbers(all, DP_BOOL, batch);
    } else if (first.kind == DP_TENSOR) {
        check_stacked(in, all, batch);
    } else if (first.kind == DP_CONTAINER) {
        check_container(in, all, batch);
    } else if (first.kind == DP_STRING) {
        FUZZ_CHECK(batch.kind == DP_LIST && batch.count == all->count);
        for (size_t i = 0; i < all->count; i++) {
            FUZZ_CHECK(fuzz_same(in->ctx, batch.as.items[i], all->items[i]));
        }
    } else {
        FUZZ_CHECK(batch.kind == (first.kind == DP_DICT ? DP_DICT : DP_LIST));
        FUZZ_CHECK(batch.count == first.count);
        for (uint32_t i = 0; i < first.count; i++) {
            samples inner = children(all, i, next);
            check_batch(in, &inner, fuzz_child(batch, i));
        }
    }
}

/* ---- an input -------------------------------------------------------------------------------- */

static void collate(fuzz *in)
{
    dp_value items[MAX_SAMPLES], batch, parts;
    size_t count = 1 + (size_t)fuzz_next(in, MAX_SAMPLES), per_group = (size_t)fuzz_next(in, 4);
    int rows = fuzz_next(in, 6), odd_sample = fuzz_next(in, 32), odd = fuzz_next(in, 8);
    int more[MAX_SAMPLES][2];
    for (size_t i = 0; i < count; i++) {
        more[i][0] = fuzz_next(in, 3);
        more[i][1] = fuzz_next(in, 3);
    }
    size_t start = in->at;
    for (size_t i = 0; i < count; i++) {
        fuzz_shape shape = {.rows = rows, .more = {more[i][0], more[i][1]}, .seed = (int)i};
        shape.odd = odd_sample == (int)i + 1 ? odd : -1;
        in->at = start;
        items[i] = fuzz_value(in, &shape, 0);
    }
    samples all = {items, count, per_group ? per_group : 1};
    dp_status status = dp_collate(in->scope, items, count, per_group, &batch);
    FUZZ_CHECK((status == DP_OK) == can_collate(&all));
    if (status != DP_OK) {
        fuzz_check_failure(status);
        return;
    }
    check_batch(in, &all, batch);
    status = dp_scatter(in->ctx, in->scope, batch, NULL, &parts);
    if (status != DP_OK) {
        fuzz_check_failure(status);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    fuzz in = {.data = data, .bytes = bytes};
    in.ctx = fuzz_ctx(fuzz_next(&in, 2) == 1);
    in.scope = dp_scope_begin(in.ctx);
    collate(&in);
    dp_scope_end(in.scope);
    return 0;
}
