/* fuzz_scatter.c - a value from bytes is scattered and gathered. A model says beforehand whether it
   can be; afterwards nothing is lost, doubled or in another place. */

#include "fuzz.h"

typedef enum verdict { GOOD, BAD, EITHER } verdict;

typedef struct model {
    const dp_scatter_config *how;
    size_t most;  /* parts that containers allow, or devices */
    size_t parts; /* so far the least */
    int64_t rows; /* of the first tensor, -1 before it; fixed: of all groups */
    int64_t sizes[FUZZ_DEVICES];
    bool fixed; /* containers have said how many samples each part has */
    bool grouped;
    bool bad;
} model;

/* One device gets all as it is. */
static bool is_whole(const model *m)
{
    return m->how->local_rank_count == 1 && m->most == 1;
}

static bool has_dim(const model *m, const dp_tensor *tensor)
{
    return m->how->cut.dim >= -tensor->ndim && m->how->cut.dim < tensor->ndim;
}

static int64_t row_count(const model *m, const dp_tensor *tensor)
{
    return tensor->shape[m->how->cut.dim < 0 ? m->how->cut.dim + tensor->ndim : m->how->cut.dim];
}

/* How the rows of a tensor fall; false when it cannot be cut. */
static bool cut(const model *m, const dp_tensor *tensor, int64_t *rows, size_t *parts)
{
    if (!has_dim(m, tensor)) {
        return false;
    } else if (!m->fixed) {
        return dp_split_rows(row_count(m, tensor), m->how->local_rank_count, &m->how->cut, rows,
                             parts) == DP_OK;
    }
    memcpy(rows, m->sizes, sizeof m->sizes);
    *parts = m->most;
    return row_count(m, tensor) == m->rows;
}

/* A group is a tensor, or a list or tuple of groups. */
static bool is_group(dp_value value)
{
    bool good = value.kind == DP_TENSOR || fuzz_is_sequence(value);
    for (uint32_t i = 0; good && i < value.count; i++) {
        good = is_group(fuzz_child(value, i));
    }
    return good;
}

static size_t group_count(const dp_container *container)
{
    return container->data.kind == DP_LIST ? container->data.count : 1;
}

static dp_value group_at(const dp_container *container, size_t i)
{
    return container->data.kind == DP_LIST ? container->data.as.items[i] : container->data;
}

static bool group_samples(const dp_container *container, int64_t *out)
{
    memset(out, 0, FUZZ_DEVICES * sizeof *out);
    for (size_t i = 0; i < group_count(container); i++) {
        dp_value group = group_at(container, i);
        bool rows = group.kind == DP_TENSOR && group.as.t->ndim > 0;
        if (container->data.kind != DP_LIST || (!rows && group.kind != DP_LIST)) {
            return false;
        }
        out[i] = rows ? group.as.t->shape[0] : group.count;
    }
    return true;
}

/* The first to count its samples decides, the others are like it. */
static void count_samples(model *m, const int64_t *samples)
{
    const int64_t *others = m->how->cut.split == DP_SPLIT_SIZES ? m->how->cut.sizes : samples;
    size_t devices = m->how->local_rank_count;
    others = m->fixed ? m->sizes : others;
    m->bad = devices > 1 && memcmp(samples, others, devices * sizeof *samples) != 0;
    if (m->fixed) {
        return;
    }
    memcpy(m->sizes, samples, sizeof m->sizes);
    m->fixed = true;
    m->rows = 0;
    for (size_t i = 0; i < FUZZ_DEVICES; i++) {
        m->rows += samples[i];
    }
}

static void count_container(model *m, const dp_container *container)
{
    dp_value data = container->data;
    int64_t samples[FUZZ_DEVICES];
    size_t count = group_count(container);
    m->bad = m->bad || (data.kind != DP_LIST && data.kind != DP_TENSOR) ||
             count > m->how->local_rank_count || (m->grouped && count != m->most);
    for (size_t i = 0; !m->bad && !container->cpu_only && i < count; i++) {
        m->bad = !is_group(group_at(container, i));
    }
    if (!m->bad) {
        m->grouped = true;
        m->most = count;
        if (group_samples(container, samples)) {
            count_samples(m, samples);
        }
    }
}

static void count_tensor(model *m, const dp_tensor *tensor)
{
    int64_t rows[FUZZ_DEVICES];
    size_t parts = m->parts;
    m->bad = m->bad || (!is_whole(m) && !cut(m, tensor, rows, &parts));
    m->parts = parts < m->parts ? parts : m->parts;
    if (!m->bad && !is_whole(m) && !m->fixed) {
        m->bad = m->how->cut.split != DP_SPLIT_CHUNK && m->rows >= 0 &&
                 m->rows != row_count(m, tensor);
        m->rows = row_count(m, tensor);
    }
}

static void count_parts(model *m, dp_kind kind, dp_value value)
{
    if (value.kind == kind && kind == DP_TENSOR) {
        count_tensor(m, value.as.t);
    } else if (value.kind == kind) {
        count_container(m, value.as.c);
    }
    for (uint32_t i = 0; i < value.count; i++) {
        count_parts(m, kind, fuzz_child(value, i));
    }
}

/* A part with rows that no entry of the result would have. */
static bool loses(const model *m, dp_value value)
{
    bool lost = false;
    int64_t rows[FUZZ_DEVICES];
    size_t parts;
    if (value.kind == DP_TENSOR && !is_whole(m) && cut(m, value.as.t, rows, &parts)) {
        for (size_t i = m->parts; i < parts; i++) {
            lost = lost || rows[i] > 0;
        }
    } else if (value.kind == DP_CONTAINER) {
        lost = group_count(value.as.c) > m->parts;
    }
    for (uint32_t i = 0; i < value.count; i++) {
        lost = lost || loses(m, fuzz_child(value, i));
    }
    return lost;
}

/* ---- the parts, against views of the whole --------------------------------------------------- */

static void check_tensor(fuzz *in, const model *m, const dp_tensor *whole, const dp_value *parts,
                         size_t count)
{
    int64_t rows[FUZZ_DEVICES] = {0}, first = 0;
    size_t made = 1;
    dp_tensor want = *whole;
    FUZZ_CHECK(is_whole(m) || cut(m, whole, rows, &made));
    for (size_t i = 0; i < count; i++) {
        FUZZ_CHECK(parts[i].kind == DP_TENSOR);
        const dp_tensor *part = parts[i].as.t;
        dp_device device = dp_local_device(in->ctx, m->how->local_ranks[i]);
        FUZZ_CHECK(is_whole(m) ||
                   dp_narrow(whole, m->how->cut.dim, first, rows[i], &want) == DP_OK);
        FUZZ_CHECK(fuzz_same_tensor(in->ctx, part, &want));
        FUZZ_CHECK(part->device.backend == device.backend && part->device.index == device.index);
        if (in->ctx == fuzz_ctx(false) && dp_tensor_count(part) > 0) {
            FUZZ_CHECK(part->data == want.data);
        }
        first += rows[i];
    }
    for (size_t i = count; i < made; i++) {
        FUZZ_CHECK(rows[i] == 0);
    }
}

static void check_parts(fuzz *in, const model *m, dp_value whole, const dp_value *parts,
                        size_t count)
{
    dp_value children[FUZZ_DEVICES];
    if (whole.kind == DP_TENSOR) {
        check_tensor(in, m, whole.as.t, parts, count);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        if (whole.kind == DP_CONTAINER) {
            dp_value group = group_at(whole.as.c, i);
            FUZZ_CHECK(fuzz_same(in->ctx, parts[i], group));
            FUZZ_CHECK(!whole.as.c->cpu_only || parts[i].as.i == group.as.i);
        } else if (whole.count == 0) {
            FUZZ_CHECK(fuzz_same(in->ctx, parts[i], whole));
        } else {
            FUZZ_CHECK(parts[i].kind == whole.kind && parts[i].count == whole.count);
        }
    }
    for (uint32_t child = 0; child < whole.count; child++) {
        for (size_t i = 0; i < count; i++) {
            children[i] = fuzz_child(parts[i], child);
            FUZZ_CHECK(whole.kind != DP_DICT ||
                       strcmp(whole.as.pairs[child].key, parts[i].as.pairs[child].key) == 0);
        }
        check_parts(in, m, fuzz_child(whole, child), children, count);
    }
}

/* ---- and back -------------------------------------------------------------------------------- */

/* Tensors and nones come back; numbers cannot be joined; the groups of a container need not be of
   one structure, nor does a tensor that was not cut have the dim. */
static verdict judge_gather(const model *m, dp_value value)
{
    verdict worst = GOOD;
    if (value.kind == DP_CONTAINER || (value.kind == DP_TENSOR && !has_dim(m, value.as.t))) {
        return EITHER;
    } else if (value.kind != DP_NONE && value.kind != DP_TENSOR && value.kind != DP_DICT &&
               !fuzz_is_sequence(value)) {
        return BAD;
    }
    for (uint32_t i = 0; i < value.count; i++) {
        verdict inner = judge_gather(m, fuzz_child(value, i));
        worst = worst == BAD || inner == GOOD ? worst : inner;
    }
    return worst;
}

static void check_gather(fuzz *in, const model *m, dp_value whole, dp_value list)
{
    int rank = fuzz_next(in, FUZZ_DEVICES), host = fuzz_next(in, 2);
    const dp_gather_config back = {
        .local_rank = rank, .to_host = host == 1, .dim = m->how->cut.dim};
    dp_value out;
    dp_status status = dp_gather(in->ctx, in->scope, list, &back, &out);
    if (status != DP_OK) {
        fuzz_check_failure(status);
    }
    verdict want = judge_gather(m, whole);
    FUZZ_CHECK(want == EITHER || (want == GOOD) == (status == DP_OK));
    FUZZ_CHECK(want != GOOD || fuzz_same(in->ctx, out, whole));
}

/* As arguments, the parts are the same; keywords there are none. */
static void check_kwargs(fuzz *in, const dp_scatter_config *how, dp_value args, dp_value list)
{
    dp_value out_args, out_kwargs;
    if (!fuzz_is_sequence(args) || args.count == 0) {
        return;
    }
    FUZZ_CHECK(dp_scatter_kwargs(in->ctx, in->scope, args, dp_none(), how, &out_args,
                                 &out_kwargs) == DP_OK);
    FUZZ_CHECK(fuzz_same(in->ctx, out_args, list));
    FUZZ_CHECK(out_kwargs.kind == DP_LIST && out_kwargs.count == list.count);
    for (uint32_t i = 0; i < list.count; i++) {
        FUZZ_CHECK(out_kwargs.as.items[i].kind == DP_DICT && out_kwargs.as.items[i].count == 0);
    }
}

/* Weights are looked at before the value is. */
static bool judge(model *m, dp_value value)
{
    int64_t rows[FUZZ_DEVICES];
    size_t parts;
    m->bad = m->how->cut.split == DP_SPLIT_WEIGHTS &&
             dp_split_rows(0, m->how->local_rank_count, &m->how->cut, rows, &parts) != DP_OK;
    count_parts(m, DP_CONTAINER, value);
    m->parts = m->most;
    count_parts(m, DP_TENSOR, value);
    return !m->bad && !loses(m, value);
}

static void scatter(fuzz *in, const dp_scatter_config *how, int rows)
{
    fuzz_shape shape = {.rows = rows, .odd = -1};
    dp_value value = fuzz_value(in, &shape, 0), list;
    model m = {.how = how, .most = how->local_rank_count, .rows = -1};
    bool good = judge(&m, value);
    dp_status status = dp_scatter(in->ctx, in->scope, value, how, &list);
    FUZZ_CHECK(good == (status == DP_OK));
    if (status != DP_OK) {
        fuzz_check_failure(status);
        return;
    }
    FUZZ_CHECK(list.kind == DP_LIST && list.count == m.parts);
    check_parts(in, &m, value, list.as.items, list.count);
    check_kwargs(in, how, value, list);
    if (m.parts > 0) {
        check_gather(in, &m, value, list);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    fuzz in = {.data = data, .bytes = bytes};
    int ranks[FUZZ_DEVICES], rows = 0;
    int64_t sizes[FUZZ_DEVICES];
    double weights[FUZZ_DEVICES];
    dp_scatter_config how = {.local_ranks = ranks};
    in.ctx = fuzz_ctx(fuzz_next(&in, 2) == 1);
    in.scope = dp_scope_begin(in.ctx);
    how.local_rank_count = 1 + (size_t)fuzz_next(&in, FUZZ_DEVICES);
    how.cut.dim = (fuzz_next(&in, 8) + 3) % 8 - 3; /* 0 is 0 */
    how.cut.split = (dp_split)fuzz_next(&in, 4);
    int first = fuzz_next(&in, FUZZ_DEVICES);
    for (size_t i = 0; i < how.local_rank_count; i++) {
        ranks[i] = (first + (int)i) % FUZZ_DEVICES;
        int size = fuzz_next(&in, 3);
        sizes[i] = size;
        weights[i] = size;
        rows += size;
    }
    how.cut.sizes = how.cut.split == DP_SPLIT_SIZES ? sizes : NULL;
    how.cut.weights = how.cut.split == DP_SPLIT_WEIGHTS ? weights : NULL;
    if (how.cut.sizes != NULL || how.cut.weights != NULL)
        how.cut.split_count = how.local_rank_count;
    rows = how.cut.split == DP_SPLIT_SIZES ? rows + (fuzz_next(&in, 16) == 1) : fuzz_next(&in, 8);
    scatter(&in, &how, rows);
    dp_scope_end(in.scope);
    return 0;
}
