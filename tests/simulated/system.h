/* system.h - the promises of dp/os.h, kept by the simulated system. dp.h includes it in place of
   dp/os_posix.h, as DP__SYSTEM names it. What it has not: OpenMP's functions, dp_spawn, nodes. */

#ifndef DP__ROOMS
#error "system.h is a part of dp.h"
#else

#include "sim.h"
#include <assert.h>

/* ---- atomics are points, as no call of the surface stands between them ----------------------- */

#undef atomic_load_explicit
#undef atomic_load
#undef atomic_store_explicit
#undef atomic_store
#undef atomic_exchange_explicit
#undef atomic_exchange
#undef atomic_fetch_add_explicit
#undef atomic_fetch_add
#undef atomic_fetch_sub_explicit
#undef atomic_fetch_sub
#undef atomic_fetch_or_explicit
#undef atomic_fetch_or
#undef atomic_compare_exchange_strong_explicit
#undef atomic_compare_exchange_strong
#undef atomic_compare_exchange_weak_explicit
#undef atomic_compare_exchange_weak

#define SIM_TYPE(at) __typeof__((void)0, *(at))

#define atomic_load_explicit(at, order)                                                            \
    __extension__({                                                                                \
        __auto_type sim_at = (at);                                                                 \
        SIM_TYPE(sim_at) sim_is;                                                                   \
        sim_tick();                                                                                \
        __atomic_load(sim_at, &sim_is, order);                                                     \
        sim_is;                                                                                    \
    })
#define atomic_store_explicit(at, value, order)                                                    \
    __extension__({                                                                                \
        __auto_type sim_at = (at);                                                                 \
        SIM_TYPE(sim_at) sim_new = (value);                                                        \
        sim_tick();                                                                                \
        __atomic_store(sim_at, &sim_new, order);                                                   \
        sim_tick_behind();                                                                         \
    })
#define atomic_exchange_explicit(at, value, order)                                                 \
    __extension__({                                                                                \
        __auto_type sim_at = (at);                                                                 \
        SIM_TYPE(sim_at) sim_new = (value), sim_was;                                               \
        sim_tick();                                                                                \
        __atomic_exchange(sim_at, &sim_new, &sim_was, order);                                      \
        sim_was;                                                                                   \
    })
#define atomic_compare_exchange_strong_explicit(at, seen, value, order, other)                     \
    __extension__({                                                                                \
        __auto_type sim_at = (at);                                                                 \
        SIM_TYPE(sim_at) sim_new = (value);                                                        \
        sim_tick();                                                                                \
        __atomic_compare_exchange(sim_at, seen, &sim_new, 0, order, other);                        \
    })
#define atomic_fetch_add_explicit(at, value, order)                                                \
    (sim_tick(), __atomic_fetch_add(at, value, order))
#define atomic_fetch_sub_explicit(at, value, order)                                                \
    (sim_tick(), __atomic_fetch_sub(at, value, order))
#define atomic_fetch_or_explicit(at, value, order) (sim_tick(), __atomic_fetch_or(at, value, order))

#define atomic_load(at)             atomic_load_explicit(at, __ATOMIC_SEQ_CST)
#define atomic_store(at, value)     atomic_store_explicit(at, value, __ATOMIC_SEQ_CST)
#define atomic_exchange(at, value)  atomic_exchange_explicit(at, value, __ATOMIC_SEQ_CST)
#define atomic_fetch_add(at, value) atomic_fetch_add_explicit(at, value, __ATOMIC_SEQ_CST)
#define atomic_fetch_sub(at, value) atomic_fetch_sub_explicit(at, value, __ATOMIC_SEQ_CST)
#define atomic_fetch_or(at, value)  atomic_fetch_or_explicit(at, value, __ATOMIC_SEQ_CST)
#define atomic_compare_exchange_strong(at, seen, value)                                            \
    atomic_compare_exchange_strong_explicit(at, seen, value, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
#define atomic_compare_exchange_weak_explicit atomic_compare_exchange_strong_explicit
#define atomic_compare_exchange_weak          atomic_compare_exchange_strong

/* ---- services -------------------------------------------------------------------------------- */

static void *dp__os_alloc(size_t bytes, size_t align, void *user)
{
    void *data = NULL;
    (void)user;
    if (align < sizeof(void *))
        align = sizeof(void *);
    return sim_take() && posix_memalign(&data, align, bytes) == 0 ? data : NULL;
}

static void dp__os_free(void *data, size_t bytes, void *user)
{
    (void)bytes;
    (void)user;
    if (data != NULL)
        sim_give();
    free(data);
}

static const char *dp__os_env(const char *name)
{
    const char *text = sim_env(name);
    return text != NULL && text[0] != '\0' ? text : NULL;
}

static void dp__os_env_set(const char *name, const char *text)
{
    sim_env_set(name, text);
}

static void dp__os_env_drop(const char *name)
{
    sim_env_set(name, NULL);
}

static dp__os_fn dp__os_find(const char *name)
{
    (void)name;
    return NULL;
}

static bool dp__os_print(FILE *file, const char *text, const char *end)
{
    (void)file, (void)end;
    sim_log(text);
    return true;
}

static bool dp__os_is_read(void)
{
    return false;
}

static uint64_t dp__os_now_ns(void)
{
    return sim_now();
}

static uint64_t dp__os_coarse_ns(void)
{
    return dp__os_now_ns();
}

static uint64_t dp__os_wall_ns(void)
{
    return sim_wall();
}

static void dp__os_sleep_ns(uint64_t ns)
{
    if (!sim_interrupted())
        sim_wait("sleeps", NULL, NULL, sim_now() + ns);
}

static void dp__os_pause(void)
{
    sim_pass(500);
}

static void dp__os_yield(void)
{
    sim_pass(2000);
}

static bool dp__os_secret(void *out, size_t bytes)
{
    unsigned char *at = out;
    for (size_t i = 0; i < bytes; i++)
        at[i] = (unsigned char)sim_random();
    return true;
}

static uint64_t dp__os_random(void)
{
    return sim_random();
}

static uint64_t dp__os_memory_bytes(void)
{
    return (uint64_t)8 << 30;
}

static int dp__os_core_count(void)
{
    return 2;
}

static int dp__os_why(void)
{
    return *sim_why();
}

static const char *dp__os_why_text(int why)
{
    return why == SIM_TAKEN      ? "the address is taken"
           : why == SIM_NO_FILES ? "too many files are open"
           : why == SIM_NO_FILE  ? "there is no such file"
                                 : "it is not to be";
}

static bool dp__os_is_taken(int why)
{
    return why == SIM_TAKEN;
}

/* ---- threads --------------------------------------------------------------------------------- */

struct dp__lock {
    bool taken;
};

#define DP__LOCK_INITIALIZER                                                                       \
    {                                                                                              \
        false                                                                                      \
    }

struct dp__wake {
    unsigned count;
};

struct dp__thread {
    int id;
};

static void dp__lock_init(dp__lock *lock)
{
    lock->taken = false;
}

static void dp__lock_fini(dp__lock *lock)
{
    assert(!lock->taken);
}

static bool sim_is_free(void *arg)
{
    return !((const dp__lock *)arg)->taken;
}

static void dp__lock_enter(dp__lock *lock)
{
    sim_tick();
    while (lock->taken)
        sim_wait("waits for a lock", sim_is_free, lock, SIM_NEVER);
    lock->taken = true;
}

static void dp__lock_leave(dp__lock *lock)
{
    assert(lock->taken);
    lock->taken = false;
    sim_tick();
}

static void dp__wake_init(dp__wake *wake)
{
    wake->count = 0;
}

static void dp__wake_fini(dp__wake *wake)
{
    (void)wake;
}

typedef struct sim_sleeper {
    const dp__wake *wake;
    unsigned seen;
} sim_sleeper;

static bool sim_is_woken(void *arg)
{
    const sim_sleeper *sleeper = arg;
    return sleeper->wake->count != sleeper->seen;
}

static void dp__wake_wait(dp__wake *wake, dp__lock *lock, uint64_t until_ns)
{
    sim_tick_behind(); /* who has not the lock may signal now */
    sim_sleeper sleeper = {wake, wake->count};
    lock->taken = false;
    if (!sim_interrupted())
        sim_wait("waits to be woken", sim_is_woken, &sleeper, until_ns);
    dp__lock_enter(lock);
}

static void dp__wake_signal(dp__wake *wake)
{
    wake->count++;
    sim_tick();
}

static int dp__thread_start(dp__thread *out, void *(*fn)(void *user), void *user)
{
    out->id = sim_thread_start(fn, user);
    return out->id < 0 ? SIM_OTHER : 0;
}

static void dp__thread_join(dp__thread thread)
{
    sim_thread_join(thread.id);
}

static void dp__thread_detach(dp__thread thread)
{
    (void)thread;
}

static void dp__os_init(void (*before)(void), void (*after)(void), void (*child)(void))
{
    (void)before, (void)after, (void)child;
}

static unsigned dp__os_fork_count(void)
{
    return 0;
}

/* ---- files ----------------------------------------------------------------------------------- */

static dp_status sim_refused(const char *verb, const char *path)
{
    return dp_error(DP_ERR_FILE, "cannot %s '%.200s': %s", verb, path,
                    dp__os_why_text(dp__os_why()));
}

static int dp__os_file_append(const char *path, bool anew)
{
    (void)path, (void)anew;
    *sim_why() = SIM_OTHER;
    return -1;
}

static bool dp__os_file_put(int file, const void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;)
        done += (size_t)sim_file_write(file, (const char *)data + done, bytes - done, -1);
    return true;
}

static dp_status dp__os_file_open(const char *path, int *out_fd, uint64_t *out_bytes)
{
    bool made = false;
    int fd = sim_file_open(path, false, &made);
    if (fd < 0)
        return dp_error(*sim_why() == SIM_NO_FILE ? DP_ERR_NO_FILE : DP_ERR_FILE,
                        "it cannot be opened: %s", dp__os_why_text(dp__os_why()));
    *out_bytes = sim_file_bytes(fd);
    *out_fd = fd;
    if (*out_bytes > 0)
        return DP_OK;
    sim_close(fd);
    return dp_error(DP_ERR_FILE, "it is empty");
}

static bool dp__os_file_get_at(int file, void *data, size_t bytes, uint64_t at)
{
    return sim_file_read(file, data, bytes, at) == (ptrdiff_t)bytes;
}

static void dp__os_close(int fd)
{
    sim_close(fd);
}

static dp_status dp__os_names(const char *folder, void (*fn)(const char *name, void *user),
                              void *user)
{
    char names[32][96];
    int count = 0;
    size_t bytes = strlen(folder);
    for (const char *path; count < 32 && (path = sim_file_name(count)) != NULL; count++)
        snprintf(names[count], sizeof names[0], "%s", path);
    for (int i = 0; i < count; i++)
        if (strncmp(names[i], folder, bytes) == 0 && names[i][bytes] == '/')
            fn(names[i] + bytes + 1, user);
        else if (strcmp(folder, ".") == 0)
            fn(names[i], user);
    return DP_OK;
}

static dp_status dp__os_remove(const char *path)
{
    (void)sim_file_remove(path);
    return DP_OK;
}

static dp_status dp__os_part_make(dp_scope *scope, const char *target, dp__os_part *out)
{
    size_t room = strlen(target) + sizeof ".part";
    char *path = dp_scope_alloc(scope, room);
    if (path == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    snprintf(path, room, "%s.part", target);
    *out = (dp__os_part){target, path, NULL, -1, {.inode = sim_file_version(target)}};
    return DP_OK;
}

static dp_status dp__os_part_open(dp__os_part *part)
{
    bool made = false;
    part->fd = sim_file_open(part->path, true, &made);
    if (part->fd < 0)
        return sim_refused("create", part->path);
    bool mine = sim_file_lock(part->fd) && sim_file_is_at(part->fd, part->path);
    if (mine)
        sim_file_empty(part->fd);
    else
        dp__os_drop(&part->fd);
    return mine ? DP_OK
                : dp_error(DP_ERR_FILE, "another process, or thread, is writing '%.200s'",
                           part->path);
}

static dp_status dp__os_part_write(const dp__os_part *part, const char *bytes, size_t count)
{
    (void)dp__os_file_put(part->fd, bytes, count);
    return DP_OK;
}

static dp_status dp__os_part_mend(const dp__os_part *part, const char *bytes, size_t count,
                                  uint64_t at)
{
    for (size_t done = 0; done < count;)
        done += (size_t)sim_file_write(part->fd, bytes + done, count - done, (int64_t)(at + done));
    return DP_OK;
}

static dp_status dp__os_part_sync(const dp__os_part *part)
{
    (void)part;
    sim_pass(1000000);
    return DP_OK;
}

static dp_status dp__os_part_end(dp__os_part *part, dp_status status)
{
    uint64_t now = sim_file_version(part->target);
    if (status == DP_OK && now != 0 && now != part->before.inode)
        status = dp_error(DP_ERR_FILE,
                          "another process, or thread, has written '%.200s' "
                          "meanwhile, and that file stays",
                          part->target);
    if (status == DP_OK && !sim_file_rename(part->path, part->target))
        status = sim_refused("rename", part->path);
    if (status != DP_OK && sim_file_is_at(part->fd, part->path))
        (void)sim_file_remove(part->path);
    dp__os_drop(&part->fd);
    return status;
}

static void dp__os_part_clear(const char *path)
{
    bool made = false;
    int fd = sim_file_open(path, false, &made);
    if (fd >= 0 && sim_file_lock(fd) && sim_file_is_at(fd, path))
        (void)sim_file_remove(path);
    sim_close(fd);
}

static int dp__os_kept_open(const char *path, uint64_t *out_bytes)
{
    (void)path;
    *out_bytes = 0;
    return -1;
}

static int dp__os_kept_lock(const char *folder, int wait_ms)
{
    (void)folder, (void)wait_ms;
    return -1;
}

static void dp__os_kept_unlock(int lock)
{
    (void)lock;
}

static bool dp__os_kept_put(const char *path, const void *head, size_t head_bytes, const void *data,
                            size_t bytes)
{
    (void)path, (void)head, (void)head_bytes, (void)data, (void)bytes;
    return false;
}

static bool dp__os_text_put(const char *path, const char *text, size_t bytes)
{
    (void)path, (void)text, (void)bytes;
    return false;
}

static void sim_unmap(void *user)
{
    free(((const dp__os_map *)user)->bytes);
}

static dp_status dp__os_map_open(dp_ctx *ctx, dp_scope *scope, const char *path, dp__os_map *out)
{
    int fd = -1;
    uint64_t bytes = 0;
    dp__os_map *kept = dp_scope_alloc(scope, sizeof *kept);
    *out = (dp__os_map){.ctx = ctx};
    if (kept == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    DP_TRY(dp__os_file_open(path, &fd, &bytes));
    *out = *kept = (dp__os_map){ctx, sim_file_map(fd), (size_t)bytes};
    sim_close(fd);
    dp_status status = dp_scope_defer(scope, sim_unmap, kept);
    if (status != DP_OK)
        free(out->bytes);
    return status;
}

/* ---- nodes: unknown -------------------------------------------------------------------------- */

struct dp__os_near {
    int none;
};

static void dp__os_cores_of(int thread, dp__cores *out)
{
    (void)thread;
    *out = (dp__cores){{3}};
}

static int dp__os_thread(void)
{
    return 0;
}

static bool dp__os_stack_open(void)
{
    return false;
}

static void dp__os_stack_ask(int process, int thread)
{
    (void)process, (void)thread;
}

static bool dp__os_bind(const dp__cores *cores, dp__os_bound *out)
{
    (void)cores;
    out->thread = 0;
    return false;
}

static bool dp__os_rebind(const dp__os_bound *bound, const dp__cores *cores)
{
    (void)bound, (void)cores;
    return false;
}

static bool dp__os_row(dp__row *out)
{
    out->count = out->node_count = 0;
    return false;
}

static int dp__os_node_of(const char *bus_id)
{
    (void)bus_id;
    return -1;
}

static void dp__os_near_begin(int node, dp__os_near *out)
{
    out->none = node;
}

static void dp__os_near_end(const dp__os_near *before)
{
    (void)before;
}

/* ---- sockets: an address is a sim_place ------------------------------------------------------ */

static sim_place sim_at(const dp__os_address *address)
{
    sim_place at;
    memcpy(&at, address->at, sizeof at);
    return at;
}

static dp__os_address sim_address(sim_place at)
{
    dp__os_address address = {.bytes = sizeof at};
    _Static_assert(sizeof at <= sizeof address.at, "it has room");
    memcpy(address.at, &at, sizeof at);
    return address;
}

typedef struct sim_poll {
    dp__os_watch *list;
    int count, ready;
} sim_poll;

static bool sim_any(void *arg)
{
    sim_poll *poll = arg;
    poll->ready = 0;
    for (int i = 0; i < poll->count; i++) {
        dp__os_watch *one = &poll->list[i];
        one->revents = one->fd < 0 ? 0 : (short)sim_events(one->fd, one->events);
        poll->ready += one->revents != 0;
    }
    return poll->ready > 0;
}

static int dp__os_poll(dp__os_watch *list, int count, int timeout_ms)
{
    sim_poll poll = {list, count, 0};
    if (timeout_ms != 0 && sim_interrupted()) {
        for (int i = 0; i < count; i++)
            list[i].revents = 0;
        sim_pass(1000);
        return 0;
    }
    uint64_t until = timeout_ms < 0 ? SIM_NEVER : sim_now() + (uint64_t)timeout_ms * 1000000u;
    sim_wait("polls", sim_any, &poll, until);
    return poll.ready;
}

static dp__os_address dp__os_local(const char *name)
{
    sim_place at = {.inside = true, .machine = -1};
    snprintf(at.name, sizeof at.name, "%s", name);
    return sim_address(at);
}

static bool dp__os_is_local(const dp__os_address *address)
{
    return sim_at(address).inside;
}

static int dp__os_everywhere(int port, dp__os_address out[2])
{
    out[0] = sim_address((sim_place){.machine = -1, .port = port});
    return 1;
}

static dp__os_address dp__os_at_port(const dp__os_address *at, int port)
{
    sim_place other = sim_at(at);
    other.port = port;
    return sim_address(other);
}

static int dp__os_listen(const dp__os_address *address)
{
    sim_place at = sim_at(address);
    return sim_listen(&at);
}

static void dp__os_forget(const dp__os_address *address)
{
    (void)address;
}

static int dp__os_port(int fd)
{
    sim_place own;
    return sim_end_of(fd, true, &own) && !own.inside ? own.port : 0;
}

static int dp__os_accept(int listener, bool *out_full)
{
    return sim_accept(listener, out_full);
}

static int dp__os_connect(const dp__os_address *to)
{
    sim_place at = sim_at(to);
    return sim_connect(&at);
}

static int dp__os_connection(int fd)
{
    return sim_connection(fd);
}

static ptrdiff_t dp__os_send(int fd, const void *data, size_t bytes)
{
    return sim_send(fd, data, bytes);
}

static ptrdiff_t dp__os_receive(int fd, void *data, size_t bytes)
{
    return sim_receive(fd, data, bytes);
}

static bool dp__os_end_sending(int fd)
{
    return fd >= 0 && sim_end_sending(fd);
}

static bool dp__os_owner_of(int fd, dp__os_owner *out)
{
    int peer = fd >= 0 ? sim_peer(fd) : -1;
    *out = (dp__os_owner){1000, 4001 + (uint64_t)peer};
    return peer >= 0;
}

static uint64_t dp__os_user(void)
{
    return 1000;
}

static uint64_t dp__os_files_limit(void)
{
    return 512;
}

static void dp__os_files_raise(size_t more)
{
    (void)more;
}

static void dp__os_files_lower(void)
{
}

/* ---- hosts: 10.0.0.N is machine N - 1, anything else this one -------------------------------- */

static void dp__os_look_up(const char *host, int port, bool number, dp__os_found *out)
{
    int machine = strncmp(host, "10.0.0.", 7) == 0 ? atoi(host + 7) - 1 : -1;
    (void)number;
    *out = (dp__os_found){.count = 1};
    out->list[0] = sim_address((sim_place){.machine = machine, .port = port});
}

static void dp__os_resolve(dp__os_looker *look_up, const char *host, int port, int timeout_ms,
                           dp__os_found *out)
{
    (void)timeout_ms;
    look_up(host, port, false, out);
}

static void dp__os_host_of(int fd, bool own, char *text, size_t room)
{
    sim_place at;
    text[0] = '\0';
    if (sim_end_of(fd, own, &at) && !at.inside)
        snprintf(text, room, "10.0.0.%d", at.machine + 1);
}

static void dp__os_host_usual(char *text, size_t room)
{
    snprintf(text, room, "10.0.0.%d", sim_machine() + 1);
}

static void dp__os_host_name(char *text, size_t room)
{
    snprintf(text, room, "machine-%d", sim_machine());
}

static bool dp__os_interface_find(const char *wanted, dp__os_interface *out, char *others,
                                  size_t room)
{
    snprintf(out->name, sizeof out->name, "eth0");
    dp__os_host_usual(out->address, sizeof out->address);
    snprintf(others, room, "eth0 (%s)", out->address);
    return wanted == NULL || dp__os_interface_fits(out, wanted) > 0;
}

/* ---- processes ------------------------------------------------------------------------------- */

static uint64_t dp__os_resident_bytes(int process)
{
    (void)process;
    return 0;
}

static int dp__os_process_id(void)
{
    return 4001 + sim_process();
}

static uint64_t dp__os_parent(void)
{
    return 1000 + (uint64_t)sim_machine();
}

static uint64_t dp__os_machine(void)
{
    int machine = sim_machine();
    return dp__hash(dp__hash_first, &machine, sizeof machine);
}

static uint64_t dp__os_affinity(void)
{
    return 0;
}

static void *dp__os_common_alloc(size_t bytes)
{
    (void)bytes;
    return NULL;
}

static void dp__os_common_free(void *data, size_t bytes)
{
    (void)data, (void)bytes;
}

static void dp__os_signals_take(void)
{
}

static void dp__os_signals_give_back(void)
{
}

static void dp__os_signal_again(void)
{
}

static int dp__os_asked_to_end(void)
{
    return 0;
}

static const char *dp__os_let_threads_go(void)
{
    return "the simulated system has no fork";
}

static int dp__os_fork(dp__os_child *child)
{
    child->pid = 0;
    return -1;
}

static _Noreturn void dp__os_leave(bool good)
{
    exit(good ? EXIT_SUCCESS : EXIT_FAILURE);
}

static _Noreturn void dp__os_quit(int code)
{
    exit(code);
}

static bool dp__os_ended(dp__os_child *child)
{
    child->unknown = true;
    return true;
}

static void dp__os_end(const dp__os_child *child, bool at_once)
{
    (void)child, (void)at_once;
}

static bool dp__os_stop_on(int number)
{
    (void)number;
    return false;
}

static int dp__os_asked_to_stop(void)
{
    return 0;
}

/* ---- memory between processes ---------------------------------------------------------------- */

static dp_status dp__os_shared_make(bool named, size_t bytes, dp__shared *out,
                                    dp__shared_name *out_name)
{
    uint64_t object = 0;
    void *data = NULL;
    *out_name = (dp__shared_name){.process_id = dp__os_process_id()};
    out->fd = sim_shared_make(bytes, &data, &object);
    if (out->fd < 0)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: none can be made");
    if (named)
        snprintf(out_name->path, sizeof out_name->path, "/sim-%d", (int)object);
    out_name->inode = object;
    out_name->fd = out->fd;
    out->data = data;
    out->bytes = bytes;
    return DP_OK;
}

static dp_status dp__os_shared_find(const dp__shared_name *name, size_t bytes, dp__shared *out)
{
    void *data = NULL;
    out->fd = sim_shared_find(name->inode, bytes, &data);
    if (out->fd < 0)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory of process id %d cannot be opened",
                        (int)name->process_id);
    out->data = data;
    out->bytes = bytes;
    return DP_OK;
}

static void dp__os_shared_unlink(const char *path)
{
    (void)path;
}

static void dp__os_shared_close(dp__shared *shared)
{
    if (shared->data != NULL)
        sim_shared_trim(shared->data, shared->bytes, 0, 0);
    dp__os_close(shared->fd);
    *shared = (dp__shared){.fd = -1};
}

static void dp__os_shared_trim(dp__shared *shared, size_t first, size_t bytes)
{
    sim_shared_trim(shared->data, shared->bytes, first, bytes);
    dp__os_close(shared->fd);
    *shared = (dp__shared){(char *)shared->data + first, bytes, -1};
}

static dp_status dp__os_shared_reserve(const dp__shared *shared, size_t first, size_t bytes)
{
    (void)shared, (void)first, (void)bytes;
    return DP_OK;
}

static void dp__os_shared_dump(const dp__shared *shared, size_t first, size_t bytes, bool dump)
{
    (void)shared, (void)first, (void)bytes, (void)dump;
}

static dp_status dp__os_shared_hold(const dp__shared *shared, int place)
{
    return sim_hold(shared->fd, place)
               ? DP_OK
               : dp_error(DP_ERR_NO_MEMORY, "shared memory: its file cannot be locked");
}

static bool dp__os_shared_held(const dp__shared *shared, int place)
{
    return sim_held(shared->fd, place);
}

static bool dp__os_shared_own(const dp__shared *shared, int place)
{
    return sim_own(shared->fd, place);
}

static void dp__os_word_wait(atomic_uint *word, unsigned seen, uint64_t ns)
{
    sim_word_wait(word, seen, ns);
}

static void dp__os_word_wake(atomic_uint *word)
{
    sim_word_wake(word);
}

/* ---- pages: cannot be exchanged -------------------------------------------------------------- */

enum { DP__PAGES_CHANGE = 0 };

static void *dp__os_pages_make(size_t bytes)
{
    void *data = dp__os_alloc(bytes, DP__SHARED_PAGE, NULL);
    return data != NULL ? memset(data, 0, bytes) : NULL;
}

static void dp__os_pages_free(void *data, size_t bytes)
{
    dp__os_free(data, bytes, NULL);
}

static dp_status dp__os_pages_share(void *data, size_t bytes, const dp__shared *shared,
                                    size_t first)
{
    (void)data, (void)bytes, (void)shared, (void)first;
    return dp_error(DP_ERR_UNSUPPORTED, "pages cannot be exchanged on this system");
}

static bool dp__os_pages_replace(void *data, void *other, size_t bytes)
{
    (void)data, (void)other, (void)bytes;
    return false;
}

#endif /* DP__ROOMS */
