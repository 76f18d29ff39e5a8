/* dp/value.h - v0.2.0 - trees that are cut, joined and copied - MIT licence

   Part of dp.h, which includes it. It holds the work on whole trees of tensors: they are made,
   looked at, kept, collated from samples, scattered over devices, gathered, replicated and added
   up.

   CONTENTS (search for the tag)
     >>values       constructors
     >>reading      what is in a value
     >>walk         trees rebuilt; keep
     >>collating    groups, stacks, padding
     >>splitting    how rows are divided into parts
     >>cutting      the plan of a scatter
     >>scattering   the parts
     >>gathering    parts become one
     >>replicating  flat blocks, and sums of them
*/

#ifndef DP__ROOMS
#error "dp/value.h is a part of dp.h: include dp.h"
#else

/* ==== >>values ===================================================================================
   Constructors, look-up, deep copies. A value's depth is counted when it is made, so walks need no
   limit of their own.                                                                            */

DP__APART static char *dp__copy_text(dp_scope *scope, const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = dp__scope_bytes(scope, bytes, 1);
    return copy != NULL ? memcpy(copy, text, bytes) : NULL;
}

DP_API char *dp_join_names(dp_scope *scope, const char *outer, const char *inner)
{
    if (dp__check_scope(__func__, scope) != DP_OK ||
        dp__check_pointer(__func__, "inner", inner) != DP_OK)
        return NULL;
    size_t first = outer != NULL ? strlen(outer) + 1 : 0, bytes = strlen(inner) + 1;
    char *joined = dp__scope_bytes(scope, first + bytes, 1);
    if (joined == NULL) {
        dp__named(__func__, dp__no_memory());
        return NULL;
    }
    if (outer != NULL) {
        memcpy(joined, outer, first - 1);
        joined[first - 1] = '.';
    }
    memcpy(joined + first, inner, bytes);
    return joined;
}

/* An error value with this thread's sentence, kept in the scope, or with `lost` if that is not
   possible. */
static dp_value dp__error_value(dp_scope *scope, dp_status status, const char *lost)
{
    dp_value value = dp__leaf(DP_ERROR);
    const char *text = NULL;
    if (scope != NULL && scope->magic == DP__SCOPE_LIVE && status != DP_ERR_NO_MEMORY)
        text = dp__copy_text(scope, dp__of_thread.text);
    value.as.s = text != NULL ? text : lost;
    value.status = (int8_t)status;
    return value;
}

static dp_status dp__full(const char *fn)
{
    return dp_error(DP_ERR_NO_MEMORY, "%s: out of memory", fn);
}

/* What a constructor returns, which has ended with this status. */
static dp_value dp__value_or(dp_scope *scope, dp_status status, dp_value value, const char *lost)
{
    return status == DP_OK ? value : dp__error_value(scope, status, lost);
}

static dp_status dp__string(dp_scope *scope, const char *text, dp_value *out)
{
    const char *copy = dp__copy_text(scope, text);
    if (copy == NULL)
        return dp__full("dp_string");
    *out = dp__leaf(DP_STRING);
    out->as.s = copy;
    return DP_OK;
}

DP_API dp_value dp_string(dp_scope *scope, const char *text)
{
    dp_value value = dp_none();
    dp_status status = dp__check_scope(__func__, scope);
    if (status == DP_OK)
        status = dp__check_pointer(__func__, "text", text);
    if (status == DP_OK)
        status = dp__string(scope, text, &value);
    return dp__value_or(scope, status, value, "dp_string: no scope, or no memory");
}

/* A copy in the scope, and a value of it; the copy may still be changed. NULL: no memory. */
static dp_tensor *dp__of_copy(dp_scope *scope, const dp_tensor *tensor, dp_value *out)
{
    dp_tensor *copy = dp__scope_cut(scope, sizeof *copy, _Alignof(dp_tensor));
    if (copy == NULL)
        return NULL;
    *copy = *tensor;
    dp_value value = dp__leaf(DP_TENSOR);
    value.as.t = copy;
    *out = dp__marked(value, 0);
    return copy;
}

static dp_status dp__of(dp_scope *scope, const dp_tensor *tensor, dp_value *out)
{
    return dp__of_copy(scope, tensor, out) != NULL ? DP_OK : dp__full("dp_of");
}

DP_API dp_value dp_of(dp_scope *scope, const dp_tensor *tensor)
{
    dp_value value = dp_none();
    dp_status status = dp__check_scope(__func__, scope);
    if (status == DP_OK)
        status = dp__check_tensor(__func__, "tensor", tensor);
    if (status == DP_OK)
        status = dp__of(scope, tensor, &value);
    return dp__value_or(scope, status, value, "dp_of: no scope, or no memory");
}

DP_API dp_value dp_array(dp_scope *scope, const void *data, dp_dtype dtype, int ndim,
                         const int64_t *shape)
{
    dp_value value = dp_none();
    dp_tensor tensor;
    int64_t count = 0;
    dp_status status = dp__check_scope(__func__, scope);
    if (status == DP_OK)
        status = dp__check_shape(__func__, dtype, ndim, shape, &count);
    if (status == DP_OK) {
        tensor = dp_wrap_const(data, dtype, ndim, shape);
        status = dp__check_tensor(__func__, "data", &tensor);
    }
    if (status == DP_OK)
        status = dp__of(scope, &tensor, &value);
    return dp__value_or(scope, status, value, "dp_array: no scope, or no memory");
}

/* What holds values: a constructor's arguments, or a value made by hand. */
typedef struct dp__holder {
    const char *fn, *what;
    const dp__path *path;
    uint8_t limit; /* its members are less deep than this */
    uint8_t depth; /* its own, which follows from its members */
} dp__holder;

static dp_status dp__deepen(const char *fn, dp_value member, uint8_t limit, uint8_t *depth)
{
    if (member.depth >= limit)
        return dp_error(DP_ERR_INVALID, "%s: nested deeper than %d", fn, limit);
    if (member.depth + 1 > *depth)
        *depth = (uint8_t)(member.depth + 1);
    return DP_OK;
}

static dp_status dp__check_place(const char *fn, const char *what, dp_value value,
                                 const dp__path *path);

/* Depths decrease from member to member, so walks end. */
static dp_status dp__check_member(dp__holder *holder, dp_value value, const char *key, size_t index)
{
    dp__path path = {holder->path, key, index};
    if (!dp__is_marked(value) && value.depth < holder->limit)
        DP_TRY(dp__check_place(holder->fn, holder->what, value, &path));
    return dp__deepen(holder->fn, value, holder->limit, &holder->depth);
}

static dp_status dp__check_items(dp__holder *holder, const dp_value *items, size_t count)
{
    if (count > UINT32_MAX)
        return dp_error(DP_ERR_INVALID, "%s: %zu items are too many", holder->fn, count);
    if (count > 0)
        DP_TRY(dp__check_pointer(holder->fn, holder->what, items));
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__check_member(holder, items[i], NULL, i));
    return DP_OK;
}

static dp_status dp__check_container(dp__holder *holder, const dp_container *container)
{
    DP_TRY(dp__check_pointer(holder->fn, holder->what, container));
    if (container->pad_dims < DP_PAD_NONE || container->pad_dims > 3)
        return dp_error(DP_ERR_INVALID, "%s: pad_dims is %d, not 1, 2, 3 or DP_PAD_NONE",
                        holder->fn, container->pad_dims);
    return dp__check_member(holder, container->data, "data", 0);
}

static dp_status dp__contain(dp_scope *scope, const dp_container *container, dp_value *out)
{
    dp_value value = dp__leaf(DP_CONTAINER);
    dp_container *copy = dp__scope_cut(scope, sizeof *copy, _Alignof(dp_container));
    if (copy == NULL)
        return dp__full("dp_contain");
    *copy = *container;
    copy->pad_dims = container->pad_dims == 0 ? 2 : container->pad_dims;
    value.as.c = copy;
    value.depth = (uint8_t)(container->data.depth + 1);
    *out = dp__marked(value, 0);
    return DP_OK;
}

DP_API dp_value dp_contain(dp_scope *scope, const dp_container *container)
{
    dp_value value = dp_none();
    dp_status status = dp__check_scope(__func__, scope);
    if (status == DP_OK)
        status = dp__check_container(
            &(dp__holder){.fn = __func__, .what = "container", .limit = DP_MAX_DEPTH}, container);
    if (status == DP_OK)
        status = dp__contain(scope, container, &value);
    return dp__value_or(scope, status, value, "dp_contain: no scope, or no memory");
}

/* Holds neither tensors nor containers. Lists made by hand never count as plain. */
static bool dp__is_plain(dp_value value)
{
    const unsigned plain = 1u << DP_NONE | 1u << DP_BOOLEAN | 1u << DP_INT | 1u << DP_FLOAT |
                           1u << DP_STRING | 1u << DP_OPAQUE;
    return (plain >> value.kind & 1) != 0 || dp__has_flag(value, DP__PLAIN_TREE);
}

/* Returns an array that is all zero. */
DP__APART static void *dp__array(dp_scope *scope, size_t count, size_t bytes)
{
    void *array = dp__scope_bytes(scope, count * bytes, _Alignof(max_align_t));
    return array != NULL ? memset(array, 0, count * bytes) : NULL;
}

/* An array of so many; NULL: no memory, and this is said. */
static dp_value *dp__values(dp_scope *scope, size_t count)
{
    dp_value *values = dp__scope_bytes(scope, count * sizeof *values, _Alignof(dp_value));
    if (values == NULL)
        dp_error(DP_ERR_NO_MEMORY, "no memory for %zu values", count);
    return values;
}

/* A list of the array, which lies in the scope already. */
static dp_value dp__sequence(dp_kind kind, const dp_value *items, size_t count, uint8_t depth)
{
    dp_value value = dp__leaf((uint8_t)kind);
    bool plain = true;
    for (size_t i = 0; i < count && plain; i++)
        plain = dp__is_plain(items[i]);
    value.as.items = items;
    value.count = (uint32_t)count;
    value.depth = depth;
    return dp__marked(value, plain ? DP__PLAIN_TREE : 0);
}

/* The same, of items whose depth is not known. */
static dp_status dp__list_out(const char *fn, dp_kind kind, const dp_value *items, size_t count,
                              dp_value *out)
{
    uint8_t depth = 1;
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__deepen(fn, items[i], DP_MAX_DEPTH, &depth));
    *out = dp__sequence(kind, items, count, depth);
    return DP_OK;
}

static dp_status dp__list(dp_scope *scope, dp_kind kind, const dp_value *items, size_t count,
                          dp_value *out)
{
    dp__holder holder = {.fn = "dp_list_make", .what = "items", .limit = DP_MAX_DEPTH, .depth = 1};
    if (kind != DP_LIST && kind != DP_TUPLE)
        return dp_error(DP_ERR_INVALID, "dp_list_make: kind is neither DP_LIST nor DP_TUPLE");
    DP_TRY(dp__check_items(&holder, items, count));
    dp_value *copy = dp__scope_bytes(scope, count * sizeof *copy, _Alignof(dp_value));
    if (copy == NULL)
        return dp__full("dp_list_make");
    if (count > 0)
        memcpy(copy, items, count * sizeof *copy);
    *out = dp__sequence(kind, copy, count, holder.depth);
    return DP_OK;
}

DP_API dp_value dp_list_make(dp_scope *scope, dp_kind kind, const dp_value *items, size_t count)
{
    dp_value value = dp_none();
    dp_status status = dp__check_scope(__func__, scope);
    if (status == DP_OK)
        status = dp__list(scope, kind, items, count, &value);
    return dp__value_or(scope, status, value, "dp_list_make: no scope, or no memory");
}

/* `room` is for the cells of an index; it may be where the copy of the pairs will be, which is not
   needed until then. NULL: there is no memory, keys are compared one by one. */
static dp_status dp__check_pairs(dp__holder *holder, const dp_pair *pairs, size_t count, void *room)
{
    _Static_assert(sizeof(dp_pair) >= 3 * sizeof(dp__cell), "dp__cell_count(n) is below 3 n");
    _Static_assert(offsetof(dp_pair, key) == 0, "an index reads the key first");
    const char *fn = holder->fn;
    dp__index index = dp__index_in(room, pairs, sizeof *pairs, count);
    for (size_t i = 0; i < count; i++) {
        if (pairs[i].key == NULL)
            return dp_error(DP_ERR_INVALID, "%s: key %zu is NULL", fn, i);
        if (!dp__index_add(&index))
            return dp_error(DP_ERR_INVALID, "%s: key '%s' is there twice", fn, pairs[i].key);
        DP_TRY(dp__check_member(holder, pairs[i].value, pairs[i].key, i));
    }
    return DP_OK;
}

/* A dict made by hand: no copy of its pairs will be made. */
static dp_status dp__check_dict(dp__holder *holder, dp_value dict)
{
    size_t bytes = dp__cell_count(dict.count) * sizeof(dp__cell);
    void *room = bytes > 0 ? dp__os_alloc(bytes, _Alignof(dp__cell), NULL) : NULL;
    dp_status status = dp__check_pairs(holder, dict.as.pairs, dict.count, room);
    dp__os_free(room, bytes, NULL);
    return status;
}

/* Checks that a value made by hand, with its members, is as a constructor would accept it. */
static dp_status dp__check_place(const char *fn, const char *what, dp_value value,
                                 const dp__path *path)
{
    dp__holder holder = {.fn = fn, .what = what, .path = path, .limit = value.depth};
    DP_TRY(dp__check_leaf(fn, what, value, path));
    if (value.kind == DP_CONTAINER)
        return dp__check_container(&holder, value.as.c);
    if (value.kind == DP_LIST || value.kind == DP_TUPLE)
        return dp__check_items(&holder, value.as.items, value.count);
    return value.kind == DP_DICT ? dp__check_dict(&holder, value) : DP_OK;
}

/* The public edge of every function that takes a value. What a constructor made was checked then;
   what was made by hand is checked now, down to its leaves. Behind the edge values are sound. */
static dp_status dp__check_value(const char *fn, const char *what, dp_value value)
{
    return dp__is_marked(value) ? DP_OK : dp__check_place(fn, what, value, NULL);
}

static dp_value dp__dict_of(const dp_pair *pairs, size_t count, uint8_t depth)
{
    dp_value value = dp__leaf(DP_DICT);
    bool plain = true;
    for (size_t i = 0; i < count && plain; i++)
        plain = dp__is_plain(pairs[i].value);
    value.as.pairs = pairs;
    value.count = (uint32_t)count;
    value.depth = depth;
    return dp__marked(value, plain ? DP__PLAIN_TREE : 0);
}

static dp_status dp__dict(dp_scope *scope, const dp_pair *pairs, size_t count, dp_value *out)
{
    dp__holder holder = {.fn = "dp_dict_make", .what = "pairs", .limit = DP_MAX_DEPTH, .depth = 1};
    if (count > UINT32_MAX)
        return dp_error(DP_ERR_INVALID, "dp_dict_make: %zu pairs are too many", count);
    if (count > 0)
        DP_TRY(dp__check_pointer("dp_dict_make", "pairs", pairs));
    dp_pair *copy = dp__scope_bytes(scope, count * sizeof *copy, _Alignof(dp_pair));
    if (copy == NULL)
        return dp__full("dp_dict_make");
    DP_TRY(dp__check_pairs(&holder, pairs, count, copy));
    for (size_t i = 0; i < count; i++) {
        copy[i] = (dp_pair){dp__copy_text(scope, pairs[i].key), pairs[i].value};
        if (copy[i].key == NULL)
            return dp__full("dp_dict_make");
    }
    *out = dp__dict_of(copy, count, holder.depth);
    return DP_OK;
}

DP_API dp_value dp_dict_make(dp_scope *scope, const dp_pair *pairs, size_t count)
{
    dp_value value = dp_none();
    dp_status status = dp__check_scope(__func__, scope);
    if (status == DP_OK)
        status = dp__dict(scope, pairs, count, &value);
    return dp__value_or(scope, status, value, "dp_dict_make: no scope, or no memory");
}

/* ==== >>reading ==================================================================================
   What is in a value.                                                                           */

DP_API dp_status dp_check_value(const char *fn, const char *what, dp_value value)
{
    return dp__check_value(fn, what, value);
}

DP_API dp_status dp_made(dp_value made, dp_value *out)
{
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (made.kind == DP_ERROR)
        return dp_error((dp_status)made.status, "%s", made.as.s);
    *out = made;
    return DP_OK;
}

DP_API dp_value dp_get(dp_value dict, const char *key)
{
    if (dict.kind == DP_ERROR)
        return dict;
    if (dp__check_value(__func__, "dict", dict) != DP_OK)
        return dp__error_value(NULL, DP_ERR_INVALID, "dp_get: dict is not a value");
    const dp_pair *pair = dict.kind == DP_DICT && key != NULL ? dp__find(dict, key) : NULL;
    return pair != NULL ? pair->value : dp_none();
}

static bool dp__is_sequence(dp_value value)
{
    return value.kind == DP_LIST || value.kind == DP_TUPLE;
}

DP_API size_t dp_count(dp_value value)
{
    return dp__is_sequence(value) || value.kind == DP_DICT ? value.count : 0;
}

/* One that is there; and its place, in a walk that has come to `value`. */
static dp_value dp__entry_at(dp_value value, size_t index)
{
    return value.kind == DP_DICT ? value.as.pairs[index].value : value.as.items[index];
}

static dp__path dp__path_in(const dp__path *path, dp_value value, size_t index)
{
    return (dp__path){path, value.kind == DP_DICT ? value.as.pairs[index].key : NULL, index};
}

DP_API dp_value dp_at(dp_value value, size_t index)
{
    if (value.kind == DP_ERROR)
        return value;
    if (dp__check_value(__func__, "value", value) != DP_OK)
        return dp__error_value(NULL, DP_ERR_INVALID, "dp_at: the value is not a value");
    return index < dp_count(value) ? dp__entry_at(value, index) : dp_none();
}

DP_API const char *dp_key_at(dp_value dict, size_t index)
{
    bool found = dict.kind == DP_DICT && dp__check_value(__func__, "dict", dict) == DP_OK &&
                 index < dict.count;
    return found ? dict.as.pairs[index].key : NULL;
}

DP_API const char *dp_text(dp_value string)
{
    return string.kind == DP_STRING ? string.as.s : NULL;
}

static dp_status dp__as_tensor(const char *fn, dp_value value, const char *what, dp_dtype dtype,
                               int ndim, const dp_tensor **out)
{
    DP_TRY(dp__check_pointer(fn, "out", out));
    DP_TRY(dp__check_value(fn, what, value));
    if (dtype != DP_DTYPE_ANY)
        DP_TRY(dp__check_dtype(fn, dtype));
    if (value.kind != DP_TENSOR)
        return dp_error(DP_ERR_INVALID, "%s: %s is %s, not a tensor", fn, what,
                        dp__a_kind(value.kind));
    if (dtype != DP_DTYPE_ANY && value.as.t->dtype != dtype)
        return dp_error(DP_ERR_INVALID, "%s: %s is %s, not %s", fn, what,
                        dp__dtype_names[value.as.t->dtype], dp_dtype_name(dtype));
    if (ndim != -1 && value.as.t->ndim != ndim)
        return dp_error(DP_ERR_INVALID, "%s: %s has %d dim%s, not %d", fn, what, value.as.t->ndim,
                        dp__s(value.as.t->ndim), ndim);
    *out = value.as.t;
    return DP_OK;
}

DP_API dp_status dp_as_tensor(dp_value value, const char *what, dp_dtype dtype, int ndim,
                              const dp_tensor **out)
{
    return dp__as_tensor(__func__, value, what != NULL ? what : "value", dtype, ndim, out);
}

/* A result is for the caller only where there is one. */
static dp_status dp__leave_with(const char *fn, dp_ctx *ctx, dp_status status, dp_value result,
                                dp_value *out)
{
    if (status == DP_OK)
        *out = result;
    return dp__leave(fn, ctx, status);
}

/* ==== >>walk ===================================================================================
   Trees are rebuilt by dp__map (one tree) and dp__zip (several of one structure, side by side); the
   caller says what happens at the leaves. dp_keep is the first of these callers. */

/* Rebuild a tree that was checked: `leaf` maps everything except non-empty lists, tuples and
   dicts. */
typedef struct dp__mapper {
    dp_scope *scope;
    dp_status (*leaf)(struct dp__mapper *mapper, dp_value value, dp_value *out);
    bool plain; /* `leaf` sees plain values too; else they stay as they are */
    bool keys;  /* are copied, else they stay the source's */
} dp__mapper;

static dp_status dp__map(dp__mapper *mapper, dp_value value, dp_value *out);

static dp_status dp__map_sequence(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp_value *items =
        dp__scope_bytes(mapper->scope, value.count * sizeof *items, _Alignof(dp_value));
    if (items == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a list of %u", (unsigned)value.count);
    for (uint32_t i = 0; i < value.count; i++) {
        items[i] = value.as.items[i];
        if (mapper->plain || !dp__is_plain(items[i]))
            DP_TRY(dp__map(mapper, value.as.items[i], &items[i]));
    }
    *out = dp__sequence((dp_kind)value.kind, items, value.count, value.depth);
    return DP_OK;
}

static dp_status dp__map_dict(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp_pair *pairs = dp__scope_bytes(mapper->scope, value.count * sizeof *pairs, _Alignof(dp_pair));
    if (pairs == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a dict of %u", (unsigned)value.count);
    for (uint32_t i = 0; i < value.count; i++) {
        pairs[i].key = value.as.pairs[i].key;
        if (mapper->keys)
            pairs[i].key = dp__copy_text(mapper->scope, pairs[i].key);
        if (pairs[i].key == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for a key");
        pairs[i].value = value.as.pairs[i].value;
        if (mapper->plain || !dp__is_plain(pairs[i].value))
            DP_TRY(dp__map(mapper, value.as.pairs[i].value, &pairs[i].value));
    }
    *out = dp__dict_of(pairs, value.count, value.depth);
    return DP_OK;
}

static dp_status dp__map(dp__mapper *mapper, dp_value value, dp_value *out)
{
    if (dp__is_sequence(value) && value.count > 0)
        return dp__map_sequence(mapper, value, out);
    if (value.kind == DP_DICT && value.count > 0)
        return dp__map_dict(mapper, value, out);
    return mapper->leaf(mapper, value, out);
}

typedef struct dp__map_call {
    dp__mapper mapper;
    dp_map_fn fn;
    void *user;
    bool failed; /* fn, whose sentence stays as it is */
} dp__map_call;

static dp_status dp__map_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp__map_call *call = (dp__map_call *)mapper;
    *out = value;
    if (value.kind != DP_TENSOR && value.kind != DP_CONTAINER)
        return DP_OK;
    dp_status status = call->fn(mapper->scope, value, out, call->user);
    call->failed = status != DP_OK;
    DP_TRY(status);
    DP_TRY(dp__check_value("dp_map", "what fn made", *out));
    if (out->depth > value.depth)
        return dp_error(DP_ERR_INVALID, "fn made a value of depth %d of one of %d", out->depth,
                        value.depth);
    return DP_OK;
}

DP_API dp_status dp_map(dp_scope *scope, dp_value value, dp_map_fn fn, void *user, dp_value *out)
{
    dp__map_call call = {.mapper = {scope, dp__map_leaf, .keys = true}, .fn = fn, .user = user};
    dp_value made = dp_none();
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_value(__func__, "value", value));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "%s: fn is NULL", __func__);
    dp_status status = dp__map(&call.mapper, value, &made);
    if (status == DP_OK)
        *out = made;
    return call.failed ? status : dp__named(__func__, status);
}

/* Several trees of one structure, side by side, become one: `leaf` joins everything except lists,
   tuples and dicts. A difference is a MISMATCH that names the place and the tree. */
typedef struct dp__zipper {
    dp_scope *scope;
    size_t count;
    const char *noun; /* what each tree is */
    bool lists;       /* tuples become lists */
    bool mixed;       /* tuples may stand beside lists, and anything beside a leaf of tree 0 */
    dp_value *beside; /* where the walk is in other trees, as far as they have the same structure */
    size_t beside_count;
    dp_status (*leaf)(struct dp__zipper *zipper, const dp_value *values, const dp__path *path,
                      dp_value *out);
    /* Replaces values that are none by something; NULL: they stay none. */
    dp_status (*fill)(struct dp__zipper *zipper, dp_value *values);
} dp__zipper;

static dp_status dp__zip(dp__zipper *zipper, const dp_value *values, const dp__path *path,
                         dp_value *out);

/* Checks that tree i has no key that tree 0 does not have. */
static dp_status dp__zip_keys(const dp__zipper *zipper, dp__finder *first, size_t i, dp_value own,
                              const dp__path *path)
{
    const dp_pair *pair = NULL;
    for (uint32_t k = 0; k < own.count; k++) {
        DP_TRY(dp__finder_find(first, zipper->scope, own.as.pairs[k].key, &pair));
        if (pair == NULL)
            return dp__path_error(DP_ERR_MISMATCH, path, " has key '%s' in %s %zu, not in %s 0",
                                  own.as.pairs[k].key, zipper->noun, i, zipper->noun);
    }
    return DP_OK;
}

static dp_status dp__zip_check(const dp__zipper *zipper, const dp_value *values,
                               const dp__path *path)
{
    const dp_value *first = values;
    dp__finder keys = {.dict = *first};
    for (size_t i = 0; i < zipper->count; i++) {
        const dp_value *own = &values[i];
        bool fits = dp__is_sequence(*first) ? dp__is_sequence(*own) : first->kind != DP_DICT;
        if (own->kind != first->kind && !(zipper->mixed && fits))
            return dp__path_error(DP_ERR_MISMATCH, path, " is %s in %s 0 and %s in %s %zu",
                                  dp__a_kind(first->kind), zipper->noun, dp__a_kind(own->kind),
                                  zipper->noun, i);
        keys.next = 0;
        if (first->kind == DP_DICT && i > 0)
            DP_TRY(dp__zip_keys(zipper, &keys, i, *own, path));
        if (own->count != first->count && dp__is_sequence(*first))
            return dp__path_error(DP_ERR_MISMATCH, path, " has %u entries in %s 0 and %u in %s %zu",
                                  (unsigned)first->count, zipper->noun, (unsigned)own->count,
                                  zipper->noun, i);
    }
    return DP_OK;
}

static dp_status dp__zip_items(dp__zipper *zipper, const dp_value *values, const dp__path *path,
                               dp_value *column)
{
    for (size_t i = 0; i < zipper->count; i++)
        column[i] = values[i].as.items[path->index];
    return zipper->fill != NULL ? zipper->fill(zipper, column) : DP_OK;
}

static dp_status dp__zip_entries(dp__zipper *zipper, dp__finder *finders, const dp__path *path,
                                 dp_value *column)
{
    const dp_pair *pair = NULL;
    for (size_t i = 0; i < zipper->count; i++) {
        DP_TRY(dp__finder_find(&finders[i], zipper->scope, path->key, &pair));
        if (pair == NULL)
            return dp__path_error(DP_ERR_MISMATCH, path, " is missing in %s %zu", zipper->noun, i);
        column[i] = pair->value;
    }
    return zipper->fill != NULL ? zipper->fill(zipper, column) : DP_OK;
}

/* The values in `beside`, at one key. */
static dp_status dp__zip_beside(dp__zipper *zipper, dp__finder *finders, const char *key)
{
    for (size_t i = 0; i < zipper->beside_count; i++) {
        const dp_pair *pair = NULL;
        if (finders[i].dict.kind == DP_DICT)
            DP_TRY(dp__finder_find(&finders[i], zipper->scope, key, &pair));
        zipper->beside[i] = pair != NULL ? pair->value : dp_none();
    }
    return DP_OK;
}

static dp_status dp__zip_sequence(dp__zipper *zipper, const dp_value *values, const dp__path *path,
                                  dp_value *column, dp_value *out)
{
    uint32_t count = values[0].count;
    uint8_t depth = 1;
    dp_value *items = dp__scope_bytes(zipper->scope, count * sizeof *items, _Alignof(dp_value));
    dp__finder *beside = dp__finders(zipper->scope, zipper->beside, zipper->beside_count);
    if (items == NULL || beside == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a list of %u", (unsigned)count);
    for (uint32_t i = 0; i < count; i++) {
        dp__path inner = {path, NULL, i};
        for (size_t k = 0; k < zipper->beside_count; k++)
            zipper->beside[k] = dp_at(beside[k].dict, i);
        DP_TRY(dp__zip_items(zipper, values, &inner, column));
        DP_TRY(dp__zip(zipper, column, &inner, &items[i]));
        DP_TRY(dp__deepen("the result", items[i], DP_MAX_DEPTH, &depth));
    }
    *out = dp__sequence(zipper->lists ? DP_LIST : (dp_kind)values[0].kind, items, count, depth);
    return DP_OK;
}

static dp_status dp__zip_dict(dp__zipper *zipper, const dp_value *values, const dp__path *path,
                              dp_value *column, dp_value *out)
{
    uint32_t count = values[0].count;
    uint8_t depth = 1;
    dp_pair *pairs = dp__scope_bytes(zipper->scope, count * sizeof *pairs, _Alignof(dp_pair));
    dp__finder *finders = dp__finders(zipper->scope, values, zipper->count);
    dp__finder *beside = dp__finders(zipper->scope, zipper->beside, zipper->beside_count);
    if (pairs == NULL || finders == NULL || beside == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a dict of %u", (unsigned)count);
    for (uint32_t i = 0; i < count; i++) {
        dp__path inner = {path, values[0].as.pairs[i].key, 0};
        DP_TRY(dp__zip_beside(zipper, beside, inner.key));
        DP_TRY(dp__zip_entries(zipper, finders, &inner, column));
        pairs[i].key = dp__copy_text(zipper->scope, inner.key);
        if (pairs[i].key == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for a key");
        DP_TRY(dp__zip(zipper, column, &inner, &pairs[i].value));
        DP_TRY(dp__deepen("the result", pairs[i].value, DP_MAX_DEPTH, &depth));
    }
    *out = dp__dict_of(pairs, count, depth);
    return DP_OK;
}

static dp_status dp__zip(dp__zipper *zipper, const dp_value *values, const dp__path *path,
                         dp_value *out)
{
    DP_TRY(dp__zip_check(zipper, values, path));
    bool sequence = dp__is_sequence(values[0]), dict = values[0].kind == DP_DICT;
    if (!sequence && !dict)
        return zipper->leaf(zipper, values, path, out);
    dp_value *column =
        dp__scope_bytes(zipper->scope, zipper->count * sizeof *column, _Alignof(dp_value));
    if (column == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a column of %zu", zipper->count);
    return sequence ? dp__zip_sequence(zipper, values, path, column, out)
                    : dp__zip_dict(zipper, values, path, column, out);
}

/* Channels-last stays channels-last, all else becomes dense. */
static dp_status dp__copy_on_device(dp_scope *scope, const dp__device *device,
                                    const dp_tensor *tensor, dp_tensor *out)
{
    dp_tensor copy;
    DP_TRY(dp__tensor_as(scope, device, tensor, &copy));
    if (dp__is_channels_last(tensor))
        dp__make_channels_last(&copy);
    DP_TRY(dp__copy_tensor(scope->ctx, &copy, tensor, NULL));
    *out = copy;
    return DP_OK;
}

static dp_status dp__keep_tensor(dp_scope *to, const dp_tensor *tensor, dp_value *out)
{
    dp_tensor copy;
    const dp__device *device = dp__device_of(to->ctx, tensor->device);
    if (device == NULL)
        return dp_error(DP_ERR_INVALID, "a tensor is on no device of this context");
    DP_TRY(dp__copy_on_device(to, device, tensor, &copy));
    if (!dp__is_host(device)) /* the source may be freed before the copy has run */
        DP_TRY(dp__sync(device->stream));
    return dp__of(to, &copy, out);
}

static dp_status dp__keep_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    if (value.kind == DP_TENSOR)
        return dp__keep_tensor(mapper->scope, value.as.t, out);
    if (value.kind == DP_STRING)
        return dp__string(mapper->scope, value.as.s, out);
    if (value.kind != DP_CONTAINER) {
        *out = value;
        if (value.count == 0 && (dp__is_sequence(value) || value.kind == DP_DICT))
            *out = dp__sequence((dp_kind)value.kind, NULL, 0, value.depth); /* without its array */
        return DP_OK;
    }
    dp_container copy = *value.as.c;
    DP_TRY(dp__map(mapper, value.as.c->data, &copy.data));
    return dp__contain(mapper->scope, &copy, out);
}

DP_API dp_status dp_keep(dp_scope *to, dp_value value, dp_value *out)
{
    dp__mapper mapper = {.scope = to, .leaf = dp__keep_leaf, .plain = true, .keys = true};
    dp_value copy = dp_none();
    DP_TRY(dp__check_scope(__func__, to));
    DP_TRY(dp__check_ctx(__func__, to->ctx));
    DP_TRY(dp__check_value(__func__, "value", value));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp_status status = dp__map(&mapper, value, &copy);
    return dp__leave_with(__func__, to->ctx, status, copy, out);
}

/* ==== >>collating ================================================================================
   Samples become a batch. A column is one field of all samples; a group is what one device gets. */

typedef struct dp__collator {
    dp__zipper zipper;
    size_t group;  /* samples in one */
    size_t larger; /* groups at the beginning that have one more */
} dp__collator;

typedef struct dp__stack { /* tensors that become one, padded at the end of their last dims */
    dp_ctx *ctx;
    const dp__device *device;
    const dp_value *samples; /* tensors, or containers of one */
    const uint64_t *pad_bits;
    dp_tensor out;
    atomic_int status;
} dp__stack;

static const dp_tensor *dp__sample_tensor(dp_value sample)
{
    return sample.kind == DP_CONTAINER ? sample.as.c->data.as.t : sample.as.t;
}

static void dp__stack_sample(int sample, void *user)
{
    dp__stack *stack = user;
    const dp_tensor *src = dp__sample_tensor(stack->samples[sample]);
    dp_tensor dst = dp__narrow(&stack->out, 0, sample, 1);
    const void *in = src->data;
    dp_kernel_args args = dp__kernel_args(DP_KERNEL_PAD, (dp_dtype)dst.dtype,
                                          (size_t)dp__count(&dst), &dst.data, &in);
    args.fill_bits = stack->pad_bits[sample];
    args.ndim = dst.ndim - 1;
    args.shape = dst.shape + 1;
    args.in_shape = src->shape;
    args.in_stride = src->stride;
    dp_status status = dp__is_host(stack->device)
                           ? (args.count > 0 ? dp__kernel_on_host(stack->ctx, &args) : DP_OK)
                           : dp__kernel(stack->ctx, stack->device, stack->device->stream, &args);
    if (status != DP_OK)
        atomic_store(&stack->status, (int)status);
}

static dp_status dp__stack_run(dp__stack *stack, size_t count)
{
    const dp_host *host = &stack->ctx->host;
    bool worth = dp__bytes(&stack->out) >= DP__CPU_SLICE_BYTES && count <= INT_MAX;
    atomic_init(&stack->status, DP_OK);
    if (dp__is_host(stack->device) && worth && count >= (size_t)host->thread_count(host))
        host->parallel(host, (int)count, dp__stack_sample, stack);
    else
        for (size_t i = 0; i < count; i++)
            dp__stack_sample((int)i, stack);
    return (dp_status)atomic_load(&stack->status);
}

/* Checks that a sample stacks with the first of its group; `shape` grows for it. */
static dp_status dp__stack_fit(const dp_tensor *first, const dp_tensor *tensor, int pad_dims,
                               size_t sample, const dp__path *path, int64_t *shape)
{
    char a[96], b[96];
    int kept = pad_dims == DP_PAD_NONE ? first->ndim : first->ndim - pad_dims;
    bool same = tensor->dtype == first->dtype && tensor->ndim == first->ndim &&
                dp__same_device(tensor->device, first->device);
    for (int i = 0; same && i < kept; i++)
        same = tensor->shape[i] == first->shape[i];
    if (!same)
        return dp__path_error(
            DP_ERR_MISMATCH, path,
            " of sample %zu is %s (%s), which does not stack with %s "
            "(%s)%s",
            sample, dp__dtype_names[tensor->dtype], dp__shape_text(tensor, a, sizeof a),
            dp__dtype_names[first->dtype], dp__shape_text(first, b, sizeof b),
            dp__same_device(tensor->device, first->device) ? "" : ", on another device");
    for (int i = kept; i < first->ndim; i++)
        if (tensor->shape[i] > shape[i])
            shape[i] = tensor->shape[i];
    return DP_OK;
}

static dp_status dp__stack_pads(const dp__stack *stack, size_t count, size_t first,
                                uint64_t *pad_bits)
{
    for (size_t i = 0; i < count; i++) {
        const dp_tensor *tensor = dp__sample_tensor(stack->samples[i]);
        pad_bits[i] = 0;
        if (stack->samples[i].kind != DP_CONTAINER ||
            memcmp(tensor->shape, stack->out.shape + 1, sizeof(int64_t) * tensor->ndim) == 0)
            continue;
        char what[64];
        snprintf(what, sizeof what, "padding_value of sample %zu", first + i);
        DP_TRY(dp__number_bits(stack->ctx, what, dp_float(stack->samples[i].as.c->padding_value),
                               (dp_dtype)tensor->dtype, &pad_bits[i]));
    }
    return DP_OK;
}

/* `samples` are `count` tensors, or containers of tensors; `first` is the number of the first
   one. */
static dp_status dp__stack_make(const dp__collator *collator, const dp_value *samples, size_t count,
                                size_t first, int pad_dims, const dp__path *path, dp_value *out)
{
    const dp_tensor *head = dp__sample_tensor(samples[0]);
    dp__stack stack = {.ctx = collator->zipper.scope->ctx, .samples = samples};
    int64_t shape[DP_MAX_DIMS + 1] = {(int64_t)count}, unused = 0;
    memcpy(shape + 1, head->shape, sizeof head->shape[0] * head->ndim);
    if (head->ndim == DP_MAX_DIMS)
        return dp__path_error(DP_ERR_INVALID, path, " has %d dims, a stack would have one too many",
                              head->ndim);
    if (pad_dims != DP_PAD_NONE && head->ndim <= pad_dims)
        return dp__path_error(DP_ERR_INVALID, path,
                              " of sample %zu has %d dim%s, pad_dims %d needs more", first,
                              head->ndim, dp__s(head->ndim), pad_dims);
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__stack_fit(head, dp__sample_tensor(samples[i]), pad_dims, first + i, path,
                             shape + 1));
    DP_TRY(dp__check_shape("the stack", (dp_dtype)head->dtype, head->ndim + 1, shape, &unused));
    stack.device = dp__device_of(collator->zipper.scope->ctx, head->device);
    if (stack.device == NULL)
        return dp__path_error(DP_ERR_INVALID, path, " is on no device of this context");
    DP_TRY(dp__tensor_make(collator->zipper.scope, stack.device, (dp_dtype)head->dtype,
                           head->ndim + 1, shape, &stack.out));
    uint64_t *pad_bits = dp__scope_bytes(collator->zipper.scope, count * sizeof *pad_bits, 8);
    if (pad_bits == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a group of %zu", count);
    DP_TRY(dp__stack_pads(&stack, count, first, pad_bits));
    stack.pad_bits = pad_bits;
    DP_TRY(dp__stack_run(&stack, count));
    return dp__of(collator->zipper.scope, &stack.out, out);
}

/* Containers of one column must have the same settings, and hold tensors if they are stacked. */
static dp_status dp__collate_check(const dp__collator *collator, const dp_value *column,
                                   const dp__path *path)
{
    const dp_container *first = column[0].as.c;
    for (size_t i = 0; i < collator->zipper.count; i++) {
        const dp_container *own = column[i].as.c;
        if (own->stack != first->stack || own->cpu_only != first->cpu_only ||
            own->pad_dims != first->pad_dims)
            return dp__path_error(DP_ERR_MISMATCH, path,
                                  ": samples 0 and %zu differ in stack, cpu_only or "
                                  "pad_dims",
                                  i);
        if (first->stack && !first->cpu_only && own->data.kind != DP_TENSOR)
            return dp__path_error(DP_ERR_INVALID, path,
                                  " of sample %zu is to be stacked and holds %s", i,
                                  dp__a_kind(own->data.kind));
    }
    return DP_OK;
}

static dp_status dp__collate_group(const dp__collator *collator, const dp_value *column,
                                   size_t first, size_t count, const dp__path *path, dp_value *out)
{
    const dp_container *head = column[0].as.c;
    int pad_dims = head->pad_dims == 0 ? 2 : head->pad_dims;
    if (head->stack && !head->cpu_only)
        return dp__stack_make(collator, column + first, count, first, pad_dims, path, out);
    dp_value *items = dp__values(collator->zipper.scope, count);
    if (items == NULL)
        return DP_ERR_NO_MEMORY;
    for (size_t i = 0; i < count; i++)
        items[i] = column[first + i].as.c->data;
    return dp__list_out("a sample", DP_LIST, items, count, out);
}

static size_t dp__collate_group_count(const dp__collator *collator)
{
    size_t count = collator->zipper.count, group = collator->group;
    size_t in_larger = collator->larger * (group + 1);
    return count <= in_larger ? (count - 1) / (group + 1) + 1
                              : collator->larger + (count - in_larger - 1) / group + 1;
}

static dp_status dp__collate_containers(const dp__collator *collator, const dp_value *column,
                                        const dp__path *path, dp_value *out)
{
    size_t group_count = dp__collate_group_count(collator), first = 0;
    dp_container batch = *column[0].as.c;
    uint8_t depth = 1;
    DP_TRY(dp__collate_check(collator, column, path));
    dp_value *groups = dp__values(collator->zipper.scope, group_count);
    if (groups == NULL)
        return DP_ERR_NO_MEMORY;
    for (size_t i = 0; i < group_count; i++) {
        size_t size = collator->group + (i < collator->larger);
        size_t left = collator->zipper.count - first, some = size < left ? size : left;
        DP_TRY(dp__collate_group(collator, column, first, some, path, &groups[i]));
        first += some;
    }
    DP_TRY(dp__list_out("a group", DP_LIST, groups, group_count, &batch.data));
    DP_TRY(dp__deepen("the batch", batch.data, DP_MAX_DEPTH, &depth));
    return dp__contain(collator->zipper.scope, &batch, out);
}

static dp_status dp__collate_numbers(const dp__collator *collator, const dp_value *column,
                                     dp_value *out)
{
    int64_t count = (int64_t)collator->zipper.count;
    uint8_t kind = column[0].kind;
    dp_dtype dtype = kind == DP_INT ? DP_I64 : kind == DP_FLOAT ? DP_F64 : DP_BOOL;
    dp_tensor tensor;
    DP_TRY(dp__tensor_make(collator->zipper.scope, &collator->zipper.scope->ctx->host_device, dtype,
                           1, &count, &tensor));
    for (size_t i = 0; i < collator->zipper.count; i++) {
        if (kind == DP_INT)
            ((int64_t *)tensor.data)[i] = column[i].as.i;
        else if (kind == DP_FLOAT)
            ((double *)tensor.data)[i] = column[i].as.f;
        else
            ((bool *)tensor.data)[i] = column[i].as.b;
    }
    return dp__of(collator->zipper.scope, &tensor, out);
}

static dp_status dp__collate_strings(const dp__collator *collator, const dp_value *column,
                                     dp_value *out)
{
    dp_value *items = dp__values(collator->zipper.scope, collator->zipper.count);
    if (items == NULL)
        return DP_ERR_NO_MEMORY;
    for (size_t i = 0; i < collator->zipper.count; i++)
        DP_TRY(dp__string(collator->zipper.scope, column[i].as.s, &items[i]));
    *out = dp__sequence(DP_LIST, items, collator->zipper.count, 1);
    return DP_OK;
}

static dp_status dp__collate_leaf(dp__zipper *zipper, const dp_value *column, const dp__path *path,
                                  dp_value *out)
{
    const dp__collator *collator = (const dp__collator *)zipper;
    switch ((dp_kind)column[0].kind) {
    case DP_CONTAINER:
        return dp__collate_containers(collator, column, path, out);
    case DP_TENSOR:
        return dp__stack_make(collator, column, zipper->count, 0, DP_PAD_NONE, path, out);
    case DP_BOOLEAN:
    case DP_INT:
    case DP_FLOAT:
        return dp__collate_numbers(collator, column, out);
    case DP_STRING:
        return dp__collate_strings(collator, column, out);
    case DP_NONE:
    case DP_OPAQUE:
    case DP_ERROR:
    case DP_LIST:
    case DP_TUPLE:
    case DP_DICT:
        break;
    }
    return dp__path_error(DP_ERR_INVALID, path, " is %s: put it in a container that is cpu_only",
                          dp__a_kind(column[0].kind));
}

static dp_status dp__collate(const char *fn, dp__collator *collator, const dp_value *samples,
                             dp_value *out)
{
    dp__zipper *zipper = &collator->zipper;
    dp_value batch = dp_none();
    DP_TRY(dp__check_scope(fn, zipper->scope));
    DP_TRY(dp__check_ctx(fn, zipper->scope->ctx));
    DP_TRY(dp__check_pointer(fn, "out", out));
    if (zipper->count == 0)
        return dp_error(DP_ERR_INVALID, "%s: 0 samples", fn);
    DP_TRY(dp__check_items(&(dp__holder){.fn = fn, .what = "samples", .limit = DP_MAX_DEPTH + 1},
                           samples, zipper->count));
    zipper->noun = "sample";
    zipper->lists = true;
    dp_status status = dp__zip(zipper, samples, NULL, &batch);
    return dp__leave_with(fn, zipper->scope->ctx, status, batch, out);
}

DP_API dp_status dp_collate(dp_scope *scope, const dp_value *samples, size_t count,
                            size_t samples_per_device, dp_value *out)
{
    dp__collator collator = {.zipper = {.scope = scope, .count = count, .leaf = dp__collate_leaf},
                             .group = samples_per_device > 0 ? samples_per_device : 1};
    return dp__collate(__func__, &collator, samples, out);
}

DP_API dp_status dp_collate_parts(dp_scope *scope, const dp_value *samples, size_t count,
                                  size_t part_count, dp_value *out)
{
    if (part_count == 0)
        return dp_error(DP_ERR_INVALID, "%s: part_count is 0", __func__);
    dp__collator collator = {.zipper = {.scope = scope, .count = count, .leaf = dp__collate_leaf},
                             .group = count / part_count,
                             .larger = count % part_count};
    return dp__collate(__func__, &collator, samples, out);
}

static dp_status dp__pseudo_leaf(dp__zipper *zipper, const dp_value *column, const dp__path *path,
                                 dp_value *out)
{
    (void)path;
    return dp_made(dp_list_make(zipper->scope, DP_LIST, column, zipper->count), out);
}

/* Structures may be mixed, leaves may not. */
static dp_status dp__default_leaf(dp__zipper *zipper, const dp_value *column, const dp__path *path,
                                  dp_value *out)
{
    if (column[0].kind == DP_OPAQUE)
        return dp__pseudo_leaf(zipper, column, path, out);
    zipper->mixed = false;
    dp_status status = dp__zip_check(zipper, column, path);
    zipper->mixed = true;
    return status == DP_OK ? dp__collate_leaf(zipper, column, path, out) : status;
}

DP_API dp_status dp_pseudo_collate(dp_scope *scope, const dp_value *samples, size_t count,
                                   dp_value *out, void *user)
{
    (void)user;
    dp__collator collator = {{scope, count, .leaf = dp__pseudo_leaf, .mixed = true}, .group = 1};
    return dp__collate(__func__, &collator, samples, out);
}

DP_API dp_status dp_default_collate(dp_scope *scope, const dp_value *samples, size_t count,
                                    dp_value *out, void *user)
{
    (void)user;
    dp__collator collator = {{scope, count, .leaf = dp__default_leaf, .mixed = true}, .group = 1};
    return dp__collate(__func__, &collator, samples, out);
}

/* ==== >>splitting ================================================================================
   How rows are divided into parts, and which devices the parts are for.                         */

static const dp_scatter_config dp__scatter_default;
static const dp_gather_config dp__gather_default;

/* n * weight / total, rounded down; what is left goes to the largest remainders, lower parts
   first. */
static void dp__split_weights(const double *weights, int64_t rows, size_t count, int64_t *out)
{
    double total = 0;
    int64_t left = rows;
    for (size_t i = 0; i < count; i++)
        total += weights[i];
    for (size_t i = 0; i < count; i++) {
        double share = floor((double)rows * (weights[i] / total));
        out[i] = share < (double)left ? (int64_t)share : left; /* rounding must not give too much */
        left -= out[i];
    }
    for (; left > 0; left--) {
        size_t best = 0;
        double most = -1;
        for (size_t i = 0; i < count; i++) {
            double rest = (double)rows * (weights[i] / total) - (double)out[i];
            if (weights[i] > 0 && rest > most) {
                most = rest;
                best = i;
            }
        }
        out[best]++;
    }
}

static dp_status dp__check_weights(const char *fn, const double *weights, size_t count)
{
    double total = 0;
    for (size_t i = 0; i < count; i++) {
        if (!(weights[i] >= 0) || !isfinite(weights[i]))
            return dp_error(DP_ERR_INVALID, "%s: weights[%zu] is %g", fn, i, weights[i]);
        total += weights[i];
    }
    if (!(total > 0) || !isfinite(total))
        return dp_error(DP_ERR_INVALID, "%s: the weights add up to %g", fn, total);
    return DP_OK;
}

/* The split exists, and has an entry for each of `count` parts. */
static dp_status dp__check_split(const char *fn, const dp_cut *cut, size_t count)
{
    bool sizes = cut->split == DP_SPLIT_SIZES, weights = cut->split == DP_SPLIT_WEIGHTS;
    bool alike = cut->split == DP_SPLIT_EQUAL || cut->split == DP_SPLIT_PADDED;
    if ((unsigned)cut->split > DP_SPLIT_PADDED)
        return dp_error(DP_ERR_INVALID, "%s: %d is not a split", fn, (int)cut->split);
    if (cut->part_rows < 0 || (cut->part_rows > 0 && !alike))
        return dp_error(DP_ERR_INVALID, "%s: part_rows is %lld%s", fn, (long long)cut->part_rows,
                        alike ? "" : ", and split is not DP_SPLIT_EQUAL or DP_SPLIT_PADDED");
    if ((cut->sizes != NULL && !sizes) || (cut->weights != NULL && !weights))
        return dp_error(DP_ERR_INVALID, "%s: %s is given, and split is not DP_SPLIT_%s", fn,
                        sizes || cut->sizes == NULL ? "weights" : "sizes",
                        sizes || cut->sizes == NULL ? "WEIGHTS" : "SIZES");
    if (sizes)
        DP_TRY(dp__check_pointer(fn, "sizes", cut->sizes));
    if (weights)
        DP_TRY(dp__check_pointer(fn, "weights", cut->weights));
    if (!sizes && !weights && cut->split_count != 0)
        return dp_error(DP_ERR_INVALID,
                        "%s: split_count is %zu, and neither sizes nor weights is given", fn,
                        cut->split_count);
    if ((sizes || weights) && cut->split_count != count)
        return dp_error(DP_ERR_INVALID,
                        "%s: split_count is %zu, %s has an entry for each of %zu "
                        "part%s",
                        fn, cut->split_count, sizes ? "sizes" : "weights", count, dp__s(count));
    for (size_t i = 0; sizes && i < count; i++)
        if (cut->sizes[i] < 0)
            return dp_error(DP_ERR_INVALID, "%s: sizes[%zu] is %lld", fn, i,
                            (long long)cut->sizes[i]);
    return weights ? dp__check_weights(fn, cut->weights, count) : DP_OK;
}

static dp_status dp__check_sizes(const char *fn, const int64_t *sizes, int64_t rows, size_t count)
{
    int64_t total = 0;
    bool over = false;
    for (size_t i = 0; i < count && !over; i++) {
        over = sizes[i] > INT64_MAX - total;
        total += over ? 0 : sizes[i];
    }
    if (!over && total == rows)
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: the sizes add up to %s%lld, not to %lld row%s", fn,
                    over ? "more than " : "", (long long)total, (long long)rows,
                    dp__s((size_t)rows));
}

/* Checks whether parts can have the size that a cut wants all of them to have. */
static dp_status dp__check_part_rows(const char *fn, const dp_cut *cut, int64_t rows, size_t count)
{
    int64_t each = rows / (int64_t)count, rest = rows % (int64_t)count, wanted = cut->part_rows;
    bool equal = cut->split == DP_SPLIT_EQUAL;
    if (equal && rest > 0 && wanted == 0)
        return dp_error(DP_ERR_INVALID, "%s: %lld row%s cannot be cut into %zu equal parts", fn,
                        (long long)rows, dp__s((size_t)rows), count);
    if (wanted == 0 || (equal ? rest == 0 && each == wanted : each + (rest > 0) <= wanted))
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %lld row%s %s %zu part%s of %lld", fn, (long long)rows,
                    dp__s((size_t)rows), equal ? "cannot be cut into" : "do not fit into", count,
                    dp__s(count), (long long)wanted);
}

/* `cut` was checked for `count` parts. */
static dp_status dp__split(const char *fn, const dp_cut *cut, int64_t rows, size_t count,
                           int64_t *out, size_t *out_made)
{
    int64_t parts = (int64_t)count, chunk = rows / parts + (rows % parts != 0), left = rows;
    *out_made = count;
    switch (cut->split) {
    case DP_SPLIT_CHUNK:
        for (int64_t i = 0; i < parts; left -= out[i++])
            out[i] = left < chunk ? left : chunk;
        *out_made = rows > 0 ? (size_t)((rows - 1) / chunk + 1) : count;
        return DP_OK;
    case DP_SPLIT_SIZES:
        DP_TRY(dp__check_sizes(fn, cut->sizes, rows, count));
        memcpy(out, cut->sizes, count * sizeof *out);
        return DP_OK;
    case DP_SPLIT_WEIGHTS:
        dp__split_weights(cut->weights, rows, count, out);
        return DP_OK;
    case DP_SPLIT_EQUAL:
    case DP_SPLIT_PADDED:
        DP_TRY(dp__check_part_rows(fn, cut, rows, count));
        break;
    case DP_SPLIT_BALANCED:
        break;
    }
    for (int64_t i = 0; i < parts; i++)
        out[i] = rows / parts + (i < rows % parts);
    return DP_OK;
}

DP_API dp_status dp_split_rows(int64_t rows, size_t part_count, const dp_cut *cut,
                               int64_t *out_rows, size_t *out_part_count)
{
    size_t made = 0;
    cut = cut != NULL ? cut : &dp__scatter_default.cut;
    if (rows < 0)
        return dp_error(DP_ERR_INVALID, "%s: %lld rows", __func__, (long long)rows);
    if (part_count == 0 || part_count > INT_MAX)
        return dp_error(DP_ERR_INVALID, "%s: %zu parts", __func__, part_count);
    DP_TRY(dp__check_pointer(__func__, "out_rows", out_rows));
    DP_TRY(dp__check_pointer(__func__, "out_part_count", out_part_count));
    DP_TRY(dp__check_split(__func__, cut, part_count));
    DP_TRY(dp__split(__func__, cut, rows, part_count, out_rows, &made));
    *out_part_count = made;
    return DP_OK;
}

static size_t dp__rank_count(const dp_ctx *ctx, const dp_scatter_config *how)
{
    return how->local_ranks != NULL ? how->local_rank_count : (size_t)ctx->info.local_count;
}

static int dp__rank_at(const dp_scatter_config *how, size_t i)
{
    return how->local_ranks != NULL ? how->local_ranks[i] : (int)i;
}

static dp_status dp__check_ranks(const char *fn, const dp_ctx *ctx, const dp_scatter_config *how)
{
    size_t count = dp__rank_count(ctx, how);
    if (how->local_ranks == NULL && how->local_rank_count != 0 && how->local_rank_count != count)
        return dp_error(DP_ERR_INVALID, "%s: local_rank_count is %zu and local_ranks is NULL", fn,
                        how->local_rank_count);
    if (count == 0 || count > INT_MAX)
        return dp_error(DP_ERR_INVALID, "%s: local_ranks is given and local_rank_count is %zu", fn,
                        count);
    for (size_t i = 0; i < count; i++) {
        char what[48];
        int rank = dp__rank_at(how, i);
        if (!dp__is_local_rank(ctx, rank)) {
            snprintf(what, sizeof what, "local_ranks[%zu]", i);
            return dp__check_rank(fn, ctx, what, rank);
        }
        DP_TRY(dp__check_own(fn, ctx, rank));
    }
    return DP_OK;
}

/* ==== >>cutting ==================================================================================
   The plan of a scatter: how many parts there are, how many rows each has, and whether a tree can
   be cut that way without losing anything.                                                      */

typedef struct dp__plan {
    const char *fn;
    dp_ctx *ctx;
    dp_scope *scope;
    const dp_scatter_config *how;
    dp_value roots[2]; /* what is cut together; errors find the paths of leaves in them */
    size_t device_count;
    size_t most;           /* parts that there can be: devices, or groups of the containers */
    const void *groups_of; /* the first container; NULL: there is none */
    const void *rows_of;   /* the container, else the tensor, whose rows count; NULL: none */
    int64_t total;         /* those rows */
    bool fixed;            /* they are samples of groups, so the groups decide `sizes` */
    int64_t rows;          /* for which `sizes` was worked out; -1: none yet */
    int64_t *sizes;        /* of the parts, device_count of them */
    size_t made;           /* parts that `sizes` has */
    size_t parts;          /* least number over the fields so far */
    size_t needed;         /* parts up to the last one with rows, over the fields so far */
    const void *parts_by, *needed_by; /* the fields that `parts` and `needed` come from */
} dp__plan;

/* The place of a leaf in a tree, found by its address. */
static bool dp__leaf_path(dp_value value, const void *leaf, const dp__path *path, char *text,
                          size_t bytes)
{
    bool found = (value.kind == DP_TENSOR || value.kind == DP_CONTAINER) && value.as.p == leaf;
    if (found)
        dp__path_text(path, text, bytes);
    for (size_t i = 0; !found && i < dp_count(value); i++) {
        const dp__path inner = dp__path_in(path, value, i);
        found = dp__leaf_path(dp__entry_at(value, i), leaf, &inner, text, bytes);
    }
    return found;
}

static const char *dp__plan_name(const dp__plan *plan, const void *leaf, char *text, size_t bytes)
{
    if (!dp__leaf_path(plan->roots[0], leaf, NULL, text, bytes) &&
        !dp__leaf_path(plan->roots[1], leaf, NULL, text, bytes))
        snprintf(text, bytes, "a field");
    return text;
}

/* A field makes `made` parts, of which the first `needed` are not empty. */
static void dp__plan_field(dp__plan *plan, size_t made, size_t needed, const void *leaf)
{
    if (made < plan->parts) {
        plan->parts = made;
        plan->parts_by = leaf;
    }
    if (needed > plan->needed) {
        plan->needed = needed;
        plan->needed_by = leaf;
    }
}

/* ---- containers decide ----------------------------------------------------------------------- */

/* A tensor that was never collated is the only group. */
static size_t dp__group_count(const dp_container *container)
{
    return container->data.kind == DP_LIST ? container->data.count : 1;
}

static dp_value dp__group_at(const dp_container *container, size_t i)
{
    return container->data.kind == DP_LIST ? container->data.as.items[i] : container->data;
}

/* Samples in a group, as collate makes it: rows of a tensor, entries of a list; -1: unknown. */
static int64_t dp__group_rows(const dp_container *container, size_t i)
{
    dp_value group = dp__group_at(container, i);
    if (container->data.kind == DP_LIST && group.kind == DP_TENSOR && group.as.t->ndim > 0)
        return group.as.t->shape[0];
    return group.kind == DP_LIST ? (int64_t)group.count : -1;
}

/* One device takes all as it is, unless every part is to have some size. */
static bool dp__plan_is_whole(const dp__plan *plan)
{
    return plan->device_count == 1 && plan->most == 1 && plan->how->cut.part_rows == 0;
}

/* Checks whether parts can have one size, if the cut wants that. */
static dp_status dp__plan_check_groups(const dp__plan *plan, const dp__path *path)
{
    const dp_cut *cut = &plan->how->cut;
    bool equal = cut->split == DP_SPLIT_EQUAL && !dp__plan_is_whole(plan);
    for (size_t i = 0; i < plan->most; i++) {
        int64_t rows = plan->sizes[i],
                wanted = cut->part_rows > 0 ? cut->part_rows : plan->sizes[0];
        if (equal && rows != wanted)
            return dp__path_error(DP_ERR_MISMATCH, path,
                                  " has %lld sample%s in group %zu: each part is to have %lld",
                                  (long long)rows, dp__s((size_t)rows), i, (long long)wanted);
        if (cut->part_rows > 0 && rows > wanted)
            return dp__path_error(DP_ERR_MISMATCH, path,
                                  " has %lld samples in group %zu: part_rows is %lld",
                                  (long long)rows, i, (long long)wanted);
    }
    return DP_OK;
}

/* What a group may hold: tensors, and lists of them. */
static dp_status dp__plan_group(const dp__plan *plan, dp_value value, const dp__path *path)
{
    if (value.kind == DP_TENSOR && dp__device_of(plan->ctx, value.as.t->device) == NULL)
        return dp__path_error(DP_ERR_INVALID, path, " is on no device of this context");
    if (value.kind != DP_TENSOR && !dp__is_sequence(value))
        return dp__path_error(DP_ERR_INVALID, path,
                              " is %s: only tensors go to a device, the rest is for cpu_only",
                              dp__a_kind(value.kind));
    for (uint32_t i = 0; dp__is_sequence(value) && i < value.count; i++)
        DP_TRY(dp__plan_group(plan, value.as.items[i], &(dp__path){path, NULL, i}));
    return DP_OK;
}

/* The first container whose samples can be counted decides how many rows the parts have. */
static dp_status dp__plan_decide(dp__plan *plan, const dp_container *container,
                                 const dp__path *path)
{
    bool sizes = plan->how->cut.split == DP_SPLIT_SIZES && plan->device_count > 1;
    plan->total = 0;
    for (size_t i = 0; i < plan->device_count; i++) {
        plan->sizes[i] = i < plan->most ? dp__group_rows(container, i) : 0;
        if (__builtin_add_overflow(plan->total, plan->sizes[i], &plan->total))
            return dp__path_error(DP_ERR_INVALID, path, ": too many rows");
        if (sizes && plan->sizes[i] != plan->how->cut.sizes[i])
            return dp__path_error(DP_ERR_MISMATCH, path,
                                  " has %lld sample%s in group %zu, and sizes[%zu] is %lld",
                                  (long long)plan->sizes[i], dp__s((size_t)plan->sizes[i]), i, i,
                                  (long long)plan->how->cut.sizes[i]);
    }
    plan->rows_of = container;
    plan->rows = plan->total;
    plan->made = plan->most;
    plan->fixed = true;
    return dp__plan_check_groups(plan, path);
}

/* On one device nothing has to agree. */
static dp_status dp__plan_samples(dp__plan *plan, const dp_container *container,
                                  const dp__path *path)
{
    char where[160];
    for (size_t i = 0; i < plan->most; i++)
        if (dp__group_rows(container, i) < 0)
            return DP_OK;
    if (!plan->fixed)
        return dp__plan_decide(plan, container, path);
    for (size_t i = 0; i < plan->most && !dp__plan_is_whole(plan); i++) {
        int64_t rows = dp__group_rows(container, i);
        if (rows != plan->sizes[i])
            return dp__path_error(DP_ERR_MISMATCH, path,
                                  " has %lld sample%s in group %zu and %s has %lld: they cannot be "
                                  "cut alike",
                                  (long long)rows, dp__s((size_t)rows), i,
                                  dp__plan_name(plan, plan->rows_of, where, sizeof where),
                                  (long long)plan->sizes[i]);
    }
    return DP_OK;
}

static dp_status dp__plan_container(dp__plan *plan, const dp_container *container,
                                    const dp__path *path)
{
    char where[160];
    dp_value data = container->data;
    size_t count = dp__group_count(container);
    if (data.kind != DP_LIST && data.kind != DP_TENSOR)
        return dp__path_error(DP_ERR_INVALID, path,
                              " is a container of %s, not of a list with one entry a "
                              "device: collate makes it",
                              dp__a_kind(data.kind));
    if (count > plan->device_count)
        return dp__path_error(DP_ERR_MISMATCH, path,
                              " has %zu group%s for %zu device%s: groups would be lost", count,
                              dp__s(count), plan->device_count, dp__s(plan->device_count));
    if (plan->groups_of != NULL && count != plan->most)
        return dp__path_error(
            DP_ERR_MISMATCH, path, " has %zu group%s and %s has %zu: they cannot be cut alike",
            count, dp__s(count), dp__plan_name(plan, plan->groups_of, where, sizeof where),
            plan->most);
    if (!container->cpu_only)
        DP_TRY(dp__plan_group(plan, data, path));
    plan->groups_of = plan->groups_of != NULL ? plan->groups_of : container;
    plan->most = count;
    return dp__plan_samples(plan, container, path);
}

/* ---- tensors follow, or the split decides ---------------------------------------------------- */

static dp_status dp__plan_rows(dp__plan *plan, int64_t rows)
{
    if (plan->rows == rows)
        return DP_OK;
    DP_TRY(
        dp__split(plan->fn, &plan->how->cut, rows, plan->device_count, plan->sizes, &plan->made));
    plan->rows = rows;
    return DP_OK;
}

static dp_status dp__plan_tensor(dp__plan *plan, const dp_tensor *tensor, const dp__path *path)
{
    char where[160];
    int dim = plan->how->cut.dim;
    bool has_dim = dim >= -tensor->ndim && dim < tensor->ndim;
    int64_t rows = has_dim ? tensor->shape[dim < 0 ? dim + tensor->ndim : dim] : 0;
    if (dp__device_of(plan->ctx, tensor->device) == NULL)
        return dp__path_error(DP_ERR_INVALID, path, " is on no device of this context");
    if (has_dim && plan->rows_of == NULL) { /* the first one decides, if no container does */
        plan->rows_of = tensor;
        plan->total = rows;
    }
    if (dp__plan_is_whole(plan))
        return DP_OK;
    if (tensor->ndim == 0)
        return dp__path_error(DP_ERR_INVALID, path, " has 0 dims and cannot be cut: pass a number");
    if (!has_dim)
        return dp__path_error(DP_ERR_INVALID, path, " has %d dim%s, dim %d is out of range",
                              tensor->ndim, dp__s(tensor->ndim), dim);
    if (plan->total != rows && (plan->fixed || plan->how->cut.split != DP_SPLIT_CHUNK))
        return dp__path_error(DP_ERR_MISMATCH, path,
                              " has %lld row%s and %s has %lld%s: they cannot be cut alike",
                              (long long)rows, dp__s((size_t)rows),
                              dp__plan_name(plan, plan->rows_of, where, sizeof where),
                              (long long)plan->total, plan->fixed ? " in its groups" : "");
    DP_TRY(dp__plan_rows(plan, rows));
    size_t needed = plan->made;
    while (needed > 0 && plan->sizes[needed - 1] == 0)
        needed--;
    dp__plan_field(plan, plan->made, needed, tensor);
    return DP_OK;
}

/* All leaves of a kind: containers come first. */
static dp_status dp__plan_value(dp__plan *plan, dp_kind kind, dp_value value, const dp__path *path)
{
    if (value.kind == kind)
        return kind == DP_TENSOR ? dp__plan_tensor(plan, value.as.t, path)
                                 : dp__plan_container(plan, value.as.c, path);
    for (size_t i = 0; i < dp_count(value); i++) {
        const dp__path inner = dp__path_in(path, value, i);
        if (!dp__is_plain(dp__entry_at(value, i)))
            DP_TRY(dp__plan_value(plan, kind, dp__entry_at(value, i), &inner));
    }
    return DP_OK;
}

/* For some of the roots: the number of parts is the least over the fields; a field with rows beyond
   it would lose them. */
static dp_status dp__plan_make(dp__plan *plan, const dp_value *values, size_t count)
{
    char needs[160], makes[160];
    plan->parts = plan->most;
    plan->needed = plan->groups_of != NULL ? plan->most : 0;
    plan->parts_by = plan->needed_by = plan->groups_of;
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__plan_value(plan, DP_TENSOR, values[i], NULL));
    if (plan->needed > plan->parts)
        return dp_error(DP_ERR_MISMATCH,
                        "%s has rows in %zu parts, %s makes %zu part%s: rows would be lost",
                        dp__plan_name(plan, plan->needed_by, needs, sizeof needs), plan->needed,
                        dp__plan_name(plan, plan->parts_by, makes, sizeof makes), plan->parts,
                        dp__s(plan->parts));
    return DP_OK;
}

/* Rows of each part; NULL: no field has rows. */
static dp_status dp__plan_sizes(dp__plan *plan, int64_t **out)
{
    *out = plan->rows_of != NULL ? plan->sizes : NULL;
    if (dp__plan_is_whole(plan))
        plan->sizes[0] = plan->total;
    else if (plan->rows_of != NULL)
        DP_TRY(dp__plan_rows(plan, plan->total));
    return DP_OK;
}

/* How many rows each part is filled up to, once `sizes` is known; 0: as many as it has. */
static int64_t dp__plan_fills(const dp__plan *plan)
{
    int64_t rows = plan->how->cut.part_rows;
    if (plan->how->cut.split != DP_SPLIT_PADDED)
        return 0;
    for (size_t i = 0; i < plan->device_count && plan->how->cut.part_rows == 0; i++)
        rows = plan->sizes[i] > rows ? plan->sizes[i] : rows;
    return rows;
}

static dp_status dp__plan_begin(dp__plan *plan)
{
    DP_TRY(dp__check_ranks(plan->fn, plan->ctx, plan->how));
    plan->device_count = dp__rank_count(plan->ctx, plan->how);
    DP_TRY(dp__check_split(plan->fn, &plan->how->cut, plan->device_count));
    plan->most = plan->device_count;
    plan->rows = -1;
    plan->sizes = dp__scope_bytes(plan->scope, plan->device_count * sizeof *plan->sizes, 8);
    if (plan->sizes == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu parts", plan->fn,
                        plan->device_count);
    for (size_t i = 0; i < 2; i++)
        DP_TRY(dp__plan_value(plan, DP_CONTAINER, plan->roots[i], NULL));
    return DP_OK;
}

/* ==== >>scattering ===============================================================================
   Each part of a planned tree is built by itself. On devices that the host reaches a part is a
   view; elsewhere it is copied there.                                                           */

/* Whether a device has what lies on another one as its own. */
static bool dp__sees(const dp__device *device, const dp__device *from)
{
    return from == device || (dp__is_host(from) && dp__is_host(device));
}

/* Makes a tensor visible to a device: as a view if the host reaches both, else as a copy. */
static dp_status dp__place(dp_scope *scope, dp_tensor *tensor, dp__device *device)
{
    const dp__device *from = dp__device_of(scope->ctx, tensor->device);
    if (from == NULL)
        return dp_error(DP_ERR_INVALID, "a tensor is on no device of this context");
    if (dp__sees(device, from)) {
        tensor->device = device->id;
        return DP_OK;
    }
    return dp__copy_on_device(scope, device, tensor, tensor);
}

typedef struct dp__parter { /* maps a tree to its part `index` */
    dp__mapper mapper;
    dp__plan *plan;
    size_t index;
    dp__device *device;
} dp__parter;

/* Copies a part of `whole` to its device, with its last row repeated until it has so many. */
static dp_status dp__part_fill(const dp__parter *parter, const dp_tensor *whole, int dim,
                               int64_t rows, dp_tensor *part)
{
    dp_scope *scope = parter->plan->scope;
    dp_tensor filled = *part, last = part->shape[dim] > 0 ? *part : *whole;
    int64_t own = part->shape[dim], unused = 0;
    filled.shape[dim] = rows;
    DP_TRY(dp__check_shape("a part", (dp_dtype)filled.dtype, filled.ndim, filled.shape, &unused));
    DP_TRY(dp__tensor_as(scope, parter->device, &filled, &filled));
    if (dp__is_channels_last(part))
        dp__make_channels_last(&filled);
    dp_tensor real = dp__narrow(&filled, dim, 0, own),
              rest = dp__narrow(&filled, dim, own, rows - own);
    DP_TRY(dp__copy_tensor(scope->ctx, &real, part, NULL));
    *part = filled;
    if (last.shape[dim] == 0)
        return dp__fill_tensor(scope->ctx, parter->device, &rest, 0);
    dp__narrow_here(&last, dim, last.shape[dim] - 1, 1);
    last.shape[dim] = rows - own;
    last.stride[dim] = 0;
    return dp__copy_tensor(scope->ctx, &rest, &last, NULL);
}

static dp_status dp__part_tensor(dp__parter *parter, const dp_tensor *tensor, dp_value *out)
{
    dp__plan *plan = parter->plan;
    int dim = plan->how->cut.dim < 0 ? plan->how->cut.dim + tensor->ndim : plan->how->cut.dim;
    int64_t first = 0;
    dp_tensor *part = dp__of_copy(plan->scope, tensor, out);
    if (part == NULL)
        return dp__full(plan->fn);
    if (dp__plan_is_whole(plan))
        return dp__place(plan->scope, part, parter->device);
    DP_TRY(dp__plan_rows(plan, tensor->shape[dim]));
    for (size_t i = 0; i < parter->index; i++)
        first += plan->sizes[i];
    dp__narrow_here(part, dim, first, plan->sizes[parter->index]);
    return part->shape[dim] < dp__plan_fills(plan)
               ? dp__part_fill(parter, tensor, dim, dp__plan_fills(plan), part)
               : dp__place(plan->scope, part, parter->device);
}

/* Repeats the last sample of a group, stacked or in a list, until there are so many. */
static dp_status dp__group_fill(const dp__parter *parter, int64_t rows, dp_value *group)
{
    dp_scope *scope = parter->plan->scope;
    if (group->kind == DP_TENSOR) {
        dp_tensor *part = dp__of_copy(scope, group->as.t, group);
        return part != NULL ? dp__part_fill(parter, part, 0, rows, part)
                            : dp__full(parter->plan->fn);
    }
    if (group->count == 0)
        return DP_OK;
    dp_value *items = dp__scope_bytes(scope, (size_t)rows * sizeof *items, _Alignof(dp_value));
    if (items == NULL || rows > UINT32_MAX)
        return dp__full(parter->plan->fn);
    for (int64_t i = 0; i < rows; i++)
        items[i] = group->as.items[i < group->count ? i : group->count - 1];
    return dp__list_out(parter->plan->fn, DP_LIST, items, (size_t)rows, group);
}

/* Inside a group: tensors go to the device whole, lists of them too. */
static dp_status dp__part_group_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp__parter *parter = (dp__parter *)mapper;
    *out = value;
    if (value.kind != DP_TENSOR) /* an empty list */
        return DP_OK;
    dp_tensor *part = dp__of_copy(parter->plan->scope, value.as.t, out);
    if (part == NULL)
        return dp__full(parter->plan->fn);
    return dp__place(parter->plan->scope, part, parter->device);
}

static dp_status dp__part_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp__parter *parter = (dp__parter *)mapper;
    if (value.kind == DP_TENSOR)
        return dp__part_tensor(parter, value.as.t, out);
    if (value.kind != DP_CONTAINER) {
        *out = value;
        return DP_OK;
    }
    dp_value group = dp__group_at(value.as.c, parter->index);
    if (value.as.c->cpu_only) {
        *out = group;
        return DP_OK;
    }
    dp__parter inner = *parter;
    inner.mapper.leaf = dp__part_group_leaf;
    int64_t rows = dp__group_rows(value.as.c, parter->index), fills = dp__plan_fills(parter->plan);
    if (parter->plan->fixed && rows >= 0 && rows < fills)
        DP_TRY(dp__group_fill(parter, fills, &group));
    return dp__map(&inner.mapper, group, out);
}

static dp_status dp__part_make(dp__plan *plan, dp_value value, size_t index, dp_value *out)
{
    dp__device *device = &plan->ctx->devices[dp__rank_at(plan->how, index)];
    dp__parter parter = {.mapper = {.scope = plan->scope, .leaf = dp__part_leaf},
                         .plan = plan,
                         .index = index,
                         .device = device};
    return dp__map(&parter.mapper, value, out);
}

static dp_status dp__scatter_value(dp__plan *plan, dp_value value, dp_value *out_list)
{
    DP_TRY(dp__plan_make(plan, &value, 1));
    dp_value *items = dp__scope_bytes(plan->scope, plan->parts * sizeof *items, _Alignof(dp_value));
    if (items == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parts", plan->parts);
    for (size_t i = 0; i < plan->parts; i++)
        DP_TRY(dp__part_make(plan, value, i, &items[i]));
    return dp__list_out(plan->fn, DP_LIST, items, plan->parts, out_list);
}

DP_API dp_status dp_scatter(dp_ctx *ctx, dp_scope *scope, dp_value value,
                            const dp_scatter_config *how, dp_value *out_list)
{
    how = how != NULL ? how : &dp__scatter_default;
    dp__plan plan = {
        .fn = __func__, .ctx = ctx, .scope = scope, .how = how, .roots = {value, dp_none()}};
    dp_value list = dp_none();
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_scope_of(__func__, scope, ctx));
    DP_TRY(dp__check_value(__func__, "value", value));
    DP_TRY(dp__check_pointer(__func__, "out_list", out_list));
    dp_status status = dp__plan_begin(&plan);
    if (status == DP_OK)
        status = dp__scatter_value(&plan, value, &list);
    return dp__leave_with(__func__, ctx, status, list, out_list);
}

/* Those of a method. */
static dp_status dp__check_args(const char *fn, dp_value args, dp_value kwargs)
{
    DP_TRY(dp__check_value(fn, "args", args));
    DP_TRY(dp__check_value(fn, "kwargs", kwargs));
    if (args.kind != DP_NONE && !dp__is_sequence(args))
        return dp_error(DP_ERR_INVALID, "%s: args is %s, not a tuple", fn, dp__a_kind(args.kind));
    if (kwargs.kind != DP_NONE && kwargs.kind != DP_DICT)
        return dp_error(DP_ERR_INVALID, "%s: kwargs is %s, not a dict", fn,
                        dp__a_kind(kwargs.kind));
    return DP_OK;
}

static bool dp__is_nothing(dp_value value)
{
    return value.kind == DP_NONE ||
           (value.count == 0 && (dp__is_sequence(value) || value.kind == DP_DICT));
}

/* Entries of a list, filled up with `filler` to `count`. */
static dp_status dp__list_pad(dp__plan *plan, dp_value list, size_t count, dp_value filler,
                              dp_value *out)
{
    dp_value *items = dp__scope_bytes(plan->scope, count * sizeof *items, _Alignof(dp_value));
    if (items == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parts", count);
    for (size_t i = 0; i < count; i++)
        items[i] = i < list.count ? list.as.items[i] : filler;
    return dp__list_out(plan->fn, DP_LIST, items, count, out);
}

static dp_status dp__scatter_both(dp__plan *plan, dp_value args, dp_value kwargs,
                                  dp_value *out_args, dp_value *out_kwargs)
{
    dp_value list_args = dp__sequence(DP_LIST, NULL, 0, 1), list_kwargs = list_args;
    if (!dp__is_nothing(args))
        DP_TRY(dp__scatter_value(plan, args, &list_args));
    if (!dp__is_nothing(kwargs))
        DP_TRY(dp__scatter_value(plan, kwargs, &list_kwargs));
    size_t count = list_args.count > list_kwargs.count ? list_args.count : list_kwargs.count;
    DP_TRY(dp__list_pad(plan, list_args, count, dp__sequence(DP_TUPLE, NULL, 0, 1), out_args));
    return dp__list_pad(plan, list_kwargs, count, dp__dict_of(NULL, 0, 1), out_kwargs);
}

DP_API dp_status dp_scatter_kwargs(dp_ctx *ctx, dp_scope *scope, dp_value args, dp_value kwargs,
                                   const dp_scatter_config *how, dp_value *out_args,
                                   dp_value *out_kwargs)
{
    how = how != NULL ? how : &dp__scatter_default;
    dp__plan plan = {
        .fn = __func__, .ctx = ctx, .scope = scope, .how = how, .roots = {args, kwargs}};
    dp_value lists[2] = {dp_none(), dp_none()};
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_scope_of(__func__, scope, ctx));
    DP_TRY(dp__check_args(__func__, args, kwargs));
    DP_TRY(dp__check_pointer(__func__, "out_args", out_args));
    DP_TRY(dp__check_pointer(__func__, "out_kwargs", out_kwargs));
    dp_status status = dp__plan_begin(&plan);
    if (status == DP_OK)
        status = dp__scatter_both(&plan, args, kwargs, &lists[0], &lists[1]);
    if (status == DP_OK) {
        *out_args = lists[0];
        *out_kwargs = lists[1];
    }
    return dp__leave(__func__, ctx, status);
}

/* ==== >>gathering ================================================================================
   The other way: several become one. Also the forms that fill tensors of the caller.            */

static dp_status dp__check_output(const char *fn, dp_ctx *ctx, const char *what,
                                  const dp_gather_config *how, dp__device **out)
{
    *out = &ctx->host_device;
    if (how->to_host)
        return DP_OK;
    DP_TRY(dp__check_rank(fn, ctx, what, how->local_rank));
    DP_TRY(dp__check_own(fn, ctx, how->local_rank));
    *out = &ctx->devices[how->local_rank];
    return DP_OK;
}

/* Checks that tensors can be joined along `dim`; out_rows: their rows together. */
static dp_status dp__check_join(const dp__path *path, const dp_tensor *const *parts, size_t count,
                                int dim, int64_t *out_rows)
{
    char a[96], b[96];
    int64_t rows = 0;
    for (size_t i = 0; i < count; i++) {
        const dp_tensor *first = parts[0], *part = parts[i];
        bool same = part->dtype == first->dtype;
        for (int k = 0; same && k < first->ndim; k++)
            same = k == dim || part->shape[k] == first->shape[k];
        if (!same)
            return dp__path_error(
                DP_ERR_MISMATCH, path, " is %s (%s) in replica 0 and %s (%s) in replica %zu",
                dp__dtype_names[first->dtype], dp__shape_text(first, a, sizeof a),
                dp__dtype_names[part->dtype], dp__shape_text(part, b, sizeof b), i);
        if (__builtin_add_overflow(rows, part->shape[dim], &rows))
            return dp__path_error(DP_ERR_INVALID, path, ": too many rows");
    }
    *out_rows = rows;
    return DP_OK;
}

/* Copies one part's rows into or out of the whole; *first moves on. */
static dp_status dp__copy_rows(dp_ctx *ctx, const dp_tensor *whole, int dim, const dp_tensor *part,
                               bool into_whole, int64_t *first)
{
    dp_tensor view = dp__narrow(whole, dim, *first, part->shape[dim]);
    *first += part->shape[dim];
    return into_whole ? dp__copy_tensor(ctx, &view, part, NULL)
                      : dp__copy_tensor(ctx, part, &view, NULL);
}

typedef struct dp__gatherer {
    dp__zipper zipper;
    dp_ctx *ctx;
    dp__device *target;
    int dim;
    const dp_tensor **parts; /* of the leaf at hand */
} dp__gatherer;

/* 0-dim tensors are joined as if they had one dim of size 1. */
static dp_status dp__gather_scalars(dp__gatherer *gatherer, const dp__path *path)
{
    if (gatherer->dim != 0 && gatherer->dim != -1)
        return dp__path_error(DP_ERR_INVALID, path,
                              " has 0 dims and can be gathered along dim 0 only, not %d",
                              gatherer->dim);
    dp_tensor *vectors =
        dp__scope_bytes(gatherer->zipper.scope, gatherer->zipper.count * sizeof *vectors, 8);
    if (vectors == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu scalars", gatherer->zipper.count);
    for (size_t i = 0; i < gatherer->zipper.count; i++) {
        vectors[i] = *gatherer->parts[i];
        vectors[i].ndim = 1;
        vectors[i].shape[0] = vectors[i].stride[0] = 1;
        gatherer->parts[i] = &vectors[i];
    }
    return DP_OK;
}

/* Whether all tensors of a leaf are channels-last, or without dims. */
static dp_status dp__gather_look(dp__gatherer *gatherer, const dp_value *values,
                                 const dp__path *path, bool *channels_last)
{
    *channels_last = true;
    for (size_t i = 0; i < gatherer->zipper.count; i++) {
        const dp_tensor *part = gatherer->parts[i] = values[i].as.t;
        if (part->ndim != values[0].as.t->ndim)
            return dp__path_error(DP_ERR_MISMATCH, path,
                                  " has %d dim%s in replica 0 and %d in replica %zu",
                                  values[0].as.t->ndim, dp__s(values[0].as.t->ndim), part->ndim, i);
        if (dp__device_of(gatherer->ctx, part->device) == NULL)
            return dp__path_error(DP_ERR_INVALID, path,
                                  " of replica %zu is on no device of this context", i);
        *channels_last = *channels_last && dp__is_channels_last(part);
    }
    return values[0].as.t->ndim == 0 ? dp__gather_scalars(gatherer, path) : DP_OK;
}

static dp_status dp__gather_tensors(dp__gatherer *gatherer, const dp_value *values,
                                    const dp__path *path, dp_value *out)
{
    dp_scope *scope = gatherer->zipper.scope;
    bool channels_last = false;
    int64_t first = 0;
    int dim = gatherer->dim;
    DP_TRY(dp__gather_look(gatherer, values, path, &channels_last));
    dp_tensor joined = *gatherer->parts[0];
    if (dim < -joined.ndim || dim >= joined.ndim)
        return dp__path_error(DP_ERR_INVALID, path, " has %d dim%s, dim %d is out of range",
                              joined.ndim, dp__s(joined.ndim), dim);
    dim = dim < 0 ? dim + joined.ndim : dim;
    int64_t unused = 0;
    DP_TRY(dp__check_join(path, gatherer->parts, gatherer->zipper.count, dim, &joined.shape[dim]));
    DP_TRY(
        dp__check_shape("the result", (dp_dtype)joined.dtype, joined.ndim, joined.shape, &unused));
    DP_TRY(dp__tensor_as(scope, gatherer->target, &joined, &joined));
    if (channels_last)
        dp__make_channels_last(&joined);
    for (size_t i = 0; i < gatherer->zipper.count; i++)
        DP_TRY(dp__copy_rows(gatherer->ctx, &joined, dim, gatherer->parts[i], true, &first));
    return dp__of(scope, &joined, out);
}

static dp_status dp__refuse_leaf(dp_value value, const dp__path *path, const char *verb)
{
    return dp__path_error(DP_ERR_INVALID, path, " is %s, which cannot be %s: return a tensor",
                          dp__a_kind(value.kind), verb);
}

static dp_status dp__gather_leaf(dp__zipper *zipper, const dp_value *values, const dp__path *path,
                                 dp_value *out)
{
    if (values[0].kind == DP_TENSOR)
        return dp__gather_tensors((dp__gatherer *)zipper, values, path, out);
    if (values[0].kind != DP_NONE)
        return dp__refuse_leaf(values[0], path, "gathered");
    *out = dp_none();
    return DP_OK;
}

/* The items of a list become one value, whose tensors are on `target`. */
static dp_status dp__gather(dp_scope *scope, dp_value list, dp__device *target, int dim,
                            dp_value *out)
{
    dp__gatherer gatherer = {
        .zipper = {.scope = scope, .count = list.count, .noun = "replica", .leaf = dp__gather_leaf},
        .ctx = scope->ctx,
        .target = target,
        .dim = dim,
        .parts = dp__scope_bytes(scope, list.count * sizeof *gatherer.parts, 8)};
    if (gatherer.parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %u parts", (unsigned)list.count);
    return dp__zip(&gatherer.zipper, list.as.items, NULL, out);
}

static dp_status dp__check_list(const char *fn, dp_value list)
{
    DP_TRY(dp__check_value(fn, "list", list));
    if (!dp__is_sequence(list) || list.count == 0)
        return dp_error(DP_ERR_INVALID, "%s: list is %s, not a list with one value a replica", fn,
                        dp__is_sequence(list) ? "empty" : dp__a_kind(list.kind));
    return DP_OK;
}

DP_API dp_status dp_gather(dp_ctx *ctx, dp_scope *scope, dp_value list, const dp_gather_config *how,
                           dp_value *out)
{
    how = how != NULL ? how : &dp__gather_default;
    dp__device *target = NULL;
    dp_value result = dp_none();
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_scope_of(__func__, scope, ctx));
    DP_TRY(dp__check_list(__func__, list));
    DP_TRY(dp__check_output(__func__, ctx, "local_rank", how, &target));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp_status status = dp__gather(scope, list, target, how->dim, &result);
    return dp__leave_with(__func__, ctx, status, result, out);
}

/* ---- into tensors of the caller -------------------------------------------------------------- */

/* The last of outs[0 .. last] overlaps none of the others. */
static dp_status dp__check_outs_apart(const char *fn, const dp_tensor *outs, size_t last)
{
    for (size_t i = 0; i < last; i++)
        if (dp__overlap(&outs[i], &outs[last]))
            return dp_error(DP_ERR_INVALID, "%s: out %zu overlaps out %zu", fn, last, i);
    return DP_OK;
}

/* Parts and the whole they make along dim: `whole_is_out` says which of them is written. */
static dp_status dp__check_whole(const char *fn, dp_ctx *ctx, const dp_tensor *parts, size_t count,
                                 int *dim, const dp_tensor *whole, bool whole_is_out)
{
    char what[32], a[96], b[96];
    const char *name = whole_is_out ? "out" : "src";
    int64_t rows = 0;
    dp__device *device = NULL;
    if (count == 0 || count > INT_MAX)
        return dp_error(DP_ERR_INVALID, "%s: %zu tensors", fn, count);
    DP_TRY(dp__check_pointer(fn, whole_is_out ? "parts" : "outs", parts));
    DP_TRY(dp__check_placed(fn, ctx, name, whole, &device));
    DP_TRY(dp__check_dim(fn, *dim, whole->ndim, dim));
    if (whole_is_out)
        DP_TRY(dp__check_writable(fn, name, whole));
    for (size_t i = 0; i < count; i++) {
        snprintf(what, sizeof what, "%s %zu", whole_is_out ? "part" : "out", i);
        DP_TRY(dp__check_placed(fn, ctx, what, &parts[i], &device));
        if (!whole_is_out) {
            DP_TRY(dp__check_writable(fn, what, &parts[i]));
            DP_TRY(dp__check_outs_apart(fn, parts, i));
        }
        dp_tensor like = *whole;
        like.shape[*dim] = parts[i].ndim == whole->ndim ? parts[i].shape[*dim] : 0;
        if (parts[i].dtype != whole->dtype || !dp__same_shape(&like, &parts[i]))
            return dp_error(DP_ERR_INVALID, "%s: %s is %s (%s), %s is %s (%s)", fn, what,
                            dp__dtype_names[parts[i].dtype], dp__shape_text(&parts[i], a, sizeof a),
                            name, dp__dtype_names[whole->dtype],
                            dp__shape_text(whole, b, sizeof b));
        if (dp__overlap(&parts[i], whole))
            return dp_error(DP_ERR_INVALID, "%s: %s overlaps %s", fn, what, name);
        if (__builtin_add_overflow(rows, parts[i].shape[*dim], &rows))
            rows = -1;
    }
    if (rows != whole->shape[*dim])
        return dp_error(DP_ERR_INVALID, "%s: the parts have %lld row%s along dim %d, %s has %lld",
                        fn, (long long)rows, dp__s((size_t)rows), *dim, name,
                        (long long)whole->shape[*dim]);
    return DP_OK;
}

DP_API dp_status dp_scatter_into(dp_ctx *ctx, const dp_tensor *src, int dim, const dp_tensor *outs,
                                 size_t out_count)
{
    int64_t first = 0;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_whole(__func__, ctx, outs, out_count, &dim, src, false));
    dp_status status = DP_OK;
    for (size_t i = 0; i < out_count && status == DP_OK; i++)
        status = dp__copy_rows(ctx, src, dim, &outs[i], false, &first);
    return dp__leave(__func__, ctx, status);
}

DP_API dp_status dp_gather_into(dp_ctx *ctx, const dp_tensor *parts, size_t part_count, int dim,
                                const dp_tensor *out)
{
    int64_t first = 0;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_whole(__func__, ctx, parts, part_count, &dim, out, true));
    dp_status status = DP_OK;
    for (size_t i = 0; i < part_count && status == DP_OK; i++)
        status = dp__copy_rows(ctx, out, dim, &parts[i], true, &first);
    return dp__leave(__func__, ctx, status);
}

DP_API dp_status dp_replicate_into(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs,
                                   size_t out_count)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    if (out_count == 0 || out_count > INT_MAX)
        return dp_error(DP_ERR_INVALID, "%s: %zu tensors", __func__, out_count);
    DP_TRY(dp__check_pointer(__func__, "outs", outs));
    for (size_t i = 0; i < out_count; i++) {
        char name[32];
        dp__pair pair = {.dst_name = name, .src_name = "src", .dst = &outs[i], .src = src};
        snprintf(name, sizeof name, "out %zu", i);
        DP_TRY(dp__check_copy(__func__, ctx, &pair));
        DP_TRY(dp__check_same_dtype(__func__, name, &outs[i], "src", src));
        DP_TRY(dp__check_outs_apart(__func__, outs, i));
    }
    return dp__leave(__func__, ctx, dp__copy_to_all(ctx, src, outs, out_count));
}

/* ==== >>replicating ==============================================================================
   Whole values to several devices, and sums of them back. Tensors of one dtype and device travel as
   one flat block (up to DP__COALESCE_BYTES), and the results are views of it.                   */

typedef struct dp__member { /* one tensor of a tree, and its place in a flat block */
    const dp_tensor *tensor;
    size_t group;
    int64_t offset; /* elements */
} dp__member;

typedef struct dp__flats {
    dp_scope *scope;
    dp__member *members; /* in the order of the walk */
    size_t count, group_count;
    int64_t *group_counts; /* elements of each group */
    size_t next;           /* the member that a walk comes to next */
} dp__flats;

/* Counts the tensors of a tree, and lists them if there is a list. */
static void dp__flats_collect(dp__flats *flats, dp_value value)
{
    if (value.kind == DP_TENSOR && flats->members != NULL)
        flats->members[flats->count].tensor = value.as.t;
    flats->count += value.kind == DP_TENSOR;
    if (value.kind == DP_CONTAINER)
        dp__flats_collect(flats, value.as.c->data);
    for (size_t i = 0; i < dp_count(value); i++)
        dp__flats_collect(flats, dp__entry_at(value, i));
}

/* The open group for tensors like this one: the newest of its dtype and device. */
static bool dp__flats_open(const dp__flats *flats, size_t upto, size_t *out_group)
{
    const dp_tensor *tensor = flats->members[upto].tensor;
    for (size_t i = upto; i > 0; i--) {
        const dp__member *earlier = &flats->members[i - 1];
        if (earlier->tensor->dtype == tensor->dtype &&
            dp__same_device(earlier->tensor->device, tensor->device)) {
            *out_group = earlier->group;
            return true;
        }
    }
    return false;
}

/* A group that would grow beyond the limit is closed first; a larger tensor goes alone. */
static void dp__flats_group(dp__flats *flats)
{
    const size_t limit_bytes = DP__COALESCE_BYTES;
    for (size_t i = 0; i < flats->count; i++) {
        dp__member *member = &flats->members[i];
        size_t size = dp__size_of(member->tensor), bytes = dp__bytes(member->tensor);
        bool open = dp__flats_open(flats, i, &member->group);
        size_t used = open ? (size_t)flats->group_counts[member->group] * size : 0;
        if (!open || (used > 0 && (bytes > limit_bytes || used > limit_bytes - bytes))) {
            member->group = flats->group_count++;
            flats->group_counts[member->group] = 0;
        }
        member->offset = flats->group_counts[member->group];
        flats->group_counts[member->group] += dp__count(member->tensor);
    }
}

static dp_status dp__flats_make(dp__flats *flats, dp_scope *scope, dp_value value)
{
    *flats = (dp__flats){.scope = scope};
    dp__flats_collect(flats, value);
    flats->members = dp__scope_bytes(scope, flats->count * sizeof *flats->members, 8);
    flats->group_counts = dp__scope_bytes(scope, flats->count * sizeof *flats->group_counts, 8);
    if (flats->members == NULL || flats->group_counts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu tensors", flats->count);
    flats->count = 0;
    dp__flats_collect(flats, value);
    for (size_t i = 0; i < flats->count; i++)
        if (dp__device_of(scope->ctx, flats->members[i].tensor->device) == NULL)
            return dp_error(DP_ERR_INVALID, "a tensor is on no device of this context");
    dp__flats_group(flats);
    return DP_OK;
}

static dp_tensor dp__flat_view(const dp_tensor *flat, const dp__member *member)
{
    const dp_tensor *tensor = member->tensor;
    dp_tensor view =
        dp__tensor_like((char *)flat->data + (size_t)member->offset * dp__size_of(flat),
                        flat->device, (dp_dtype)flat->dtype, tensor->ndim, tensor->shape);
    if (dp__is_channels_last(tensor))
        dp__make_channels_last(&view);
    return view;
}

static dp_status dp__flat_new(const dp__flats *flats, dp_scope *scope, size_t group,
                              const dp__device *device, dp_tensor *out)
{
    size_t first = 0;
    while (flats->members[first].group != group)
        first++;
    return dp__tensor_make(scope, device, (dp_dtype)flats->members[first].tensor->dtype, 1,
                           &flats->group_counts[group], out);
}

/* The device of all tensors of a group; NULL when they are not on one device. */
static const dp__device *dp__flat_place(const dp__flats *flats, size_t group)
{
    const dp__device *place = NULL;
    for (size_t i = 0; i < flats->count; i++) {
        const dp__member *member = &flats->members[i];
        const dp__device *own = dp__device_of(flats->scope->ctx, member->tensor->device);
        if (member->group == group && place != NULL && own != place)
            return NULL;
        place = member->group == group ? own : place;
    }
    return place;
}

/* Fill the flat block of one group on `device`: packed where its tensors are and sent in one piece,
   or tensor by tensor if the device can read them, or if they are in several places. */
static dp_status dp__flat_fill(const dp__flats *flats, size_t group, const dp_tensor *flat,
                               const dp__device *device)
{
    dp_ctx *ctx = flats->scope->ctx;
    dp_tensor packed = *flat;
    const dp__device *from = dp__flat_place(flats, group);
    bool near = from == NULL || dp__sees(device, from);
    if (!near)
        DP_TRY(dp__flat_new(flats, flats->scope, group, from, &packed));
    for (size_t i = 0; i < flats->count; i++) {
        const dp__member *member = &flats->members[i];
        dp_tensor view = dp__flat_view(&packed, member);
        if (member->group == group)
            DP_TRY(dp__copy_tensor(ctx, &view, member->tensor, NULL));
    }
    return near ? DP_OK : dp__copy_tensor(ctx, flat, &packed, NULL);
}

typedef struct dp__swapper { /* puts something else in every tensor's place */
    dp__mapper mapper;
    dp__flats *flats;
    const dp_tensor *flat;    /* one per group: by views of these; NULL: by themselves, as */
    const dp__device *device; /* this device sees them */
} dp__swapper;

static dp_status dp__swap_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp__swapper *swapper = (dp__swapper *)mapper;
    *out = value;
    if (value.kind == DP_CONTAINER) {
        dp_container copy = *value.as.c;
        DP_TRY(dp__map(mapper, value.as.c->data, &copy.data));
        return dp__contain(mapper->scope, &copy, out);
    }
    if (value.kind != DP_TENSOR)
        return DP_OK;
    const dp__member *member = &swapper->flats->members[swapper->flats->next++];
    dp_tensor view = *value.as.t;
    if (swapper->flat != NULL)
        view = dp__flat_view(&swapper->flat[member->group], member);
    view.device = swapper->device->id;
    return dp__of(mapper->scope, &view, out);
}

static dp_status dp__swap(dp__flats *flats, dp_value value, const dp_tensor *flat,
                          const dp__device *device, dp_value *out)
{
    dp__swapper swapper = {{.scope = flats->scope, .leaf = dp__swap_leaf}, flats, flat, device};
    flats->next = 0;
    return dp__map(&swapper.mapper, value, out);
}

static dp_status dp__replicate_copy(dp__flats *flats, dp_value value, const dp__device *device,
                                    dp_value *out)
{
    dp_tensor *flat = dp__scope_bytes(flats->scope, flats->group_count * sizeof *flat, 8);
    if (flat == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu blocks", flats->group_count);
    for (size_t group = 0; group < flats->group_count; group++) {
        DP_TRY(dp__flat_new(flats, flats->scope, group, device, &flat[group]));
        DP_TRY(dp__flat_fill(flats, group, &flat[group], device));
    }
    return dp__swap(flats, value, flat, device, out);
}

/* Whether the first device can use the tensors as they are. */
static bool dp__flats_near(const dp__flats *flats, const dp__device *device)
{
    for (size_t i = 0; i < flats->count; i++) {
        const dp__device *from = dp__device_of(flats->scope->ctx, flats->members[i].tensor->device);
        if (!dp__sees(device, from))
            return false;
    }
    return true;
}

static dp_status dp__replicate(dp_scope *scope, dp_value value, const dp_scatter_config *how,
                               dp_value *out_list)
{
    dp_ctx *ctx = scope->ctx;
    dp__flats flats;
    size_t count = dp__rank_count(ctx, how);
    DP_TRY(dp__flats_make(&flats, scope, value));
    dp_value *items = dp__scope_bytes(scope, count * sizeof *items, _Alignof(dp_value));
    if (items == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu replicas", count);
    for (size_t i = 0; i < count; i++) {
        const dp__device *device = &ctx->devices[dp__rank_at(how, i)];
        DP_TRY(i == 0 && dp__flats_near(&flats, device)
                   ? dp__swap(&flats, value, NULL, device, &items[i])
                   : dp__replicate_copy(&flats, value, device, &items[i]));
    }
    return dp__list_out("dp_replicate", DP_LIST, items, count, out_list);
}

DP_API dp_status dp_replicate(dp_ctx *ctx, dp_scope *scope, dp_value value,
                              const dp_scatter_config *how, dp_value *out_list)
{
    how = how != NULL ? how : &dp__scatter_default;
    dp_value list = dp_none();
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_scope_of(__func__, scope, ctx));
    DP_TRY(dp__check_value(__func__, "value", value));
    DP_TRY(dp__check_pointer(__func__, "out_list", out_list));
    DP_TRY(dp__check_ranks(__func__, ctx, how));
    dp_status status = dp__replicate(scope, value, how, &list);
    return dp__leave_with(__func__, ctx, status, list, out_list);
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* Returns what a kernel is asked for: out = the sum of the parts, in a tree, times by / over. */
static dp_kernel_args dp__sum_args(dp_dtype dtype, size_t count, const void *const *parts,
                                   size_t part_count, double by, double over, void *const *out)
{
    dp_kernel_args args = dp__kernel_args(DP_KERNEL_REDUCE, dtype, count, out, parts);
    args.op = DP_OP_SUM;
    args.in_count = part_count;
    args.alpha = by;
    args.beta = over;
    return args;
}

/* Makes the same of a tensor; all parts are dense and where `device` can read them. */
static dp_status dp__sum(dp_ctx *ctx, const dp__device *device, const void *const *parts,
                         size_t count, double by, double over, const dp_tensor *out)
{
    const dp_kernel_args args = dp__sum_args((dp_dtype)out->dtype, (size_t)dp__count(out), parts,
                                             count, by, over, &out->data);
    return dp__kernel(ctx, device, device->stream, &args);
}

/* The part as a dense tensor that `device` can read: itself, until dp__give_back, or a copy in
   `temp`. */
static dp_status dp__bring(dp_scope *temp, const dp_tensor *part, dp__device *device,
                           const void **out)
{
    const dp__device *from = dp__device_of(temp->ctx, part->device);
    dp_tensor dense;
    DP_TRY(dp__contiguous(temp, part, &dense));
    if (from != NULL && dp__reaches(device, from))
        DP_TRY(dp__is_host(from) ? DP_OK : dp__order_after(from, device->stream));
    else
        DP_TRY(dp__place(temp, &dense, device));
    *out = dense.data;
    return DP_OK;
}

/* The part's own device waits for what `device` did with it. */
static dp_status dp__give_back(dp_ctx *ctx, const dp_tensor *part, const dp__device *device)
{
    const dp__device *from = dp__device_of(ctx, part->device);
    bool shared = dp__reaches(device, from) && !dp__is_host(from);
    return shared ? dp__order_after(device, from->stream) : DP_OK;
}

static dp_status dp__add_up(dp_ctx *ctx, dp_scope *temp, const dp_tensor *const *parts,
                            size_t count, dp__device *device, const dp_tensor *out)
{
    dp_tensor dense = *out;
    const void **in = dp__scope_bytes(temp, count * sizeof *in, 8);
    if (in == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parts", count);
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__bring(temp, parts[i], device, &in[i]));
    if (!dp__is_dense(out))
        DP_TRY(dp__tensor_as(temp, device, out, &dense));
    DP_TRY(dp__sum(ctx, device, in, count, 1, 1, &dense));
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__give_back(ctx, parts[i], device));
    return dense.data != out->data ? dp__copy_tensor(ctx, out, &dense, NULL) : DP_OK;
}

typedef struct dp__adder { /* collects the leaves; each result is filled in afterwards */
    dp__zipper zipper;     /* its scope is the results' */
    dp_scope *temp;
    const dp_tensor **parts; /* `count` for each leaf, one leaf after another */
    dp_tensor **results;
    size_t leaf_count;
} dp__adder;

static dp_status dp__add_leaf(dp__zipper *zipper, const dp_value *values, const dp__path *path,
                              dp_value *out)
{
    dp__adder *adder = (dp__adder *)zipper;
    char a[96], b[96];
    *out = dp_none();
    if (values[0].kind == DP_NONE)
        return DP_OK;
    if (values[0].kind != DP_TENSOR)
        return dp__refuse_leaf(values[0], path, "added");
    const dp_tensor *first = values[0].as.t;
    for (size_t i = 0; i < zipper->count; i++) {
        const dp_tensor *part = values[i].as.t;
        if (part->dtype != first->dtype || !dp__same_shape(part, first))
            return dp__path_error(
                DP_ERR_MISMATCH, path, " is %s (%s) in replica 0 and %s (%s) in replica %zu",
                dp__dtype_names[first->dtype], dp__shape_text(first, a, sizeof a),
                dp__dtype_names[part->dtype], dp__shape_text(part, b, sizeof b), i);
        if (dp__device_of(zipper->scope->ctx, part->device) == NULL)
            return dp__path_error(DP_ERR_INVALID, path,
                                  " of replica %zu is on no device of this context", i);
        adder->parts[adder->leaf_count * zipper->count + i] = part;
    }
    DP_TRY(dp__of(zipper->scope, first, out));
    adder->results[adder->leaf_count++] = (dp_tensor *)(uintptr_t)out->as.t;
    return DP_OK;
}

/* Leaf by leaf: if the host reaches all, packing would only cost time. */
static dp_status dp__add_each(dp__adder *adder, dp_ctx *ctx, dp__device *device)
{
    for (size_t leaf = 0; leaf < adder->leaf_count; leaf++) {
        dp_tensor *result = adder->results[leaf];
        DP_TRY(dp__tensor_as(adder->zipper.scope, device, result, result));
        DP_TRY(dp__add_up(ctx, adder->temp, &adder->parts[leaf * adder->zipper.count],
                          adder->zipper.count, device, result));
    }
    return DP_OK;
}

/* One flat block per replica and group, added in one go; the results are views of the sum. */
static dp_status dp__add_flats(dp__adder *adder, dp_ctx *ctx, dp__device *device, dp__flats *flats)
{
    size_t replicas = adder->zipper.count;
    const void **in = dp__scope_bytes(adder->temp, replicas * sizeof *in, 8);
    if (in == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu replicas", replicas);
    for (size_t group = 0; group < flats->group_count; group++) {
        dp_tensor sum, part;
        DP_TRY(dp__flat_new(flats, adder->zipper.scope, group, device, &sum));
        for (size_t i = 0; i < replicas; i++) {
            for (size_t k = 0; k < flats->count; k++)
                flats->members[k].tensor = adder->parts[k * replicas + i];
            DP_TRY(dp__flat_new(flats, flats->scope, group, device, &part));
            DP_TRY(dp__flat_fill(flats, group, &part, device));
            in[i] = part.data;
        }
        DP_TRY(dp__sum(ctx, device, in, replicas, 1, 1, &sum));
        for (size_t k = 0; k < flats->count; k++)
            if (flats->members[k].group == group)
                *adder->results[k] = dp__flat_view(&sum, &flats->members[k]);
    }
    return DP_OK;
}

static dp_status dp__reduce_add(dp_scope *scope, dp_scope *temp, dp_value list, dp__device *device,
                                dp_value *out)
{
    dp__flats flats;
    dp__adder adder = {
        .zipper = {.scope = scope, .count = list.count, .noun = "replica", .leaf = dp__add_leaf},
        .temp = temp};
    DP_TRY(dp__flats_make(&flats, temp, list.as.items[0]));
    adder.parts = dp__scope_bytes(temp, flats.count * list.count * sizeof *adder.parts, 8);
    adder.results = dp__scope_bytes(temp, flats.count * sizeof *adder.results, 8);
    if (adder.parts == NULL || adder.results == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu tensors", flats.count);
    DP_TRY(dp__zip(&adder.zipper, list.as.items, NULL, out));
    return dp__is_host(device) ? dp__add_each(&adder, scope->ctx, device)
                               : dp__add_flats(&adder, scope->ctx, device, &flats);
}

DP_API dp_status dp_reduce_add(dp_ctx *ctx, dp_scope *scope, dp_value list,
                               const dp_gather_config *how, dp_value *out)
{
    how = how != NULL ? how : &dp__gather_default;
    dp__device *device = NULL;
    dp_scope *temp = NULL;
    dp_value sum = dp_none();
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_scope_of(__func__, scope, ctx));
    DP_TRY(dp__check_list(__func__, list));
    DP_TRY(dp__check_output(__func__, ctx, "local_rank", how, &device));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp_status status = dp__temp_begin(ctx, &temp);
    if (status == DP_OK)
        status = dp__reduce_add(scope, temp, list, device, &sum);
    return dp__leave_with(__func__, ctx, dp__temp_end(temp, NULL, status), sum, out);
}

DP_API dp_status dp_reduce_add_into(dp_ctx *ctx, const dp_tensor *parts, size_t part_count,
                                    const dp_tensor *out)
{
    dp__pair pair = {.dst_name = "out", .dst = out};
    dp_scope *temp = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    if (part_count == 0 || part_count > INT_MAX)
        return dp_error(DP_ERR_INVALID, "%s: %zu parts", __func__, part_count);
    DP_TRY(dp__check_pointer(__func__, "parts", parts));
    for (size_t i = 0; i < part_count; i++) {
        char name[32];
        snprintf(name, sizeof name, "part %zu", i);
        pair.src_name = name;
        pair.src = &parts[i];
        DP_TRY(dp__check_copy(__func__, ctx, &pair));
        DP_TRY(dp__check_same_dtype(__func__, name, &parts[i], "out", out));
    }
    if (dp__count(out) == 0)
        return DP_OK;
    DP_TRY(dp__temp_begin(ctx, &temp));
    const dp_tensor **list = dp__scope_bytes(temp, part_count * sizeof *list, 8);
    dp_status status = list != NULL ? DP_OK : dp__no_memory();
    for (size_t i = 0; list != NULL && i < part_count; i++)
        list[i] = &parts[i];
    if (status == DP_OK)
        status = dp__add_up(ctx, temp, list, part_count, pair.to, out);
    return dp__leave(__func__, ctx, dp__temp_end(temp, NULL, status));
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
