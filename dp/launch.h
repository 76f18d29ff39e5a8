/* dp/launch.h - v0.2.0 - what a launcher says, and dp_spawn - MIT licence

   Part of dp.h, which includes it. A launcher says in the environment which process this is, how
   many there are, and where they meet. dp_spawn is the launcher for one machine.

   CONTENTS (search for the tag)
     >>keys  what was found, and what only processes of one job know
     >>place where the processes meet
     >>spawn processes without a launcher
*/

#ifndef DP__ROOMS
#error "dp/launch.h is a part of dp.h: include dp.h"
#else

/* ==== >>keys =====================================================================================
   What was found in the environment; what only processes of one job know.                       */

enum {
    DP__PORT_MAX = 65535,
    DP__PORTS = 8,          /* from the first on, where another program may have taken the first */
    DP__PORT_FIRST = 20000, /* of those that process 0 takes if no one says which */
    DP__PORT_LAST = 29999,
    DP__HOST_BYTES = 256,
    DP__PLACE_BYTES = 64,
    DP__WHERE_BYTES = 80
};

typedef struct dp__key { /* what only processes of one job know */
    uint64_t low, high;
} dp__key;

typedef struct dp__ports { /* from the first to the last; 0: whatever is free */
    int first, last;
} dp__ports;

typedef struct dp__launch { /* what was found */
    const char *name;
    int process, process_count;
    int local, local_count;    /* local_count 0: the launcher does not say */
    char host[DP__HOST_BYTES]; /* of process 0; "": all meet at a place inside this machine */
    int port, port_count;
    char where[DP__WHERE_BYTES];   /* the same in words */
    struct dp__listener *listener; /* with which each process does already; or NULL */
    dp__ports ports;               /* where processes listen that no one has told where */
    char own[DP__PLACE_BYTES];     /* at which address this one does; "": at all that it has */
    char place[DP__PLACE_BYTES];   /* a name inside this machine */
    dp__key key;
    bool numbered;   /* the launcher has told this job from all others */
    bool agreed;     /* the processes have told each other the key: none has another one */
    bool secret;     /* or the user has */
    bool met_before; /* and look for each other at the same time */
    /* Lets so much time pass while others are awaited; fails if that is in vain. Or NULL. */
    dp_status (*rest)(void *user, int ms);
    void *user;
} dp__launch;

static uint64_t dp__rotated(uint64_t word, int bits)
{
    return word << bits | word >> (64 - bits);
}

static void dp__sip_rounds(uint64_t v[4], int count)
{
    for (int i = 0; i < count; i++) {
        v[0] += v[1], v[2] += v[3];
        v[1] = dp__rotated(v[1], 13) ^ v[0], v[3] = dp__rotated(v[3], 16) ^ v[2];
        v[0] = dp__rotated(v[0], 32);
        v[2] += v[1], v[0] += v[3];
        v[1] = dp__rotated(v[1], 17) ^ v[2], v[3] = dp__rotated(v[3], 21) ^ v[0];
        v[2] = dp__rotated(v[2], 32);
    }
}

/* SipHash-2-4: nobody can make the number without the key, whatever they have overheard. */
static uint64_t dp__sip(dp__key key, const void *data, size_t bytes)
{
    const unsigned char *in = data;
    uint64_t v[4] = {key.low ^ 0x736f6d6570736575u, key.high ^ 0x646f72616e646f6du,
                     key.low ^ 0x6c7967656e657261u, key.high ^ 0x7465646279746573u};
    for (size_t at = 0; at <= bytes; at += 8) {
        bool last = bytes - at < 8;
        uint64_t word = last ? (uint64_t)bytes << 56 : 0;
        for (size_t i = 0; i < (last ? bytes - at : 8); i++)
            word |= (uint64_t)in[at + i] << 8 * i;
        v[3] ^= word;
        dp__sip_rounds(v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    dp__sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* The key of those who know the old one and this text. */
static dp__key dp__key_with(dp__key key, const char *text)
{
    size_t bytes = text != NULL ? strlen(text) : 0;
    dp__key turned = {~key.high, key.low};
    return (dp__key){dp__sip(key, text, bytes), dp__sip(turned, text, bytes)};
}

static dp__key dp__key_of_run(dp__key key, uint64_t run)
{
    char text[24];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)run);
    return dp__key_with(key, text);
}

/* ==== >>place ==================================================================================
   Where process 0 is, and at which addresses and ports this process may listen.                 */

/* "PORT", or "PORT-PORT": the first and the last of a range. */
static dp_status dp__launch_ports(dp__launch *launch)
{
    const char *text = dp__os_env("DP_PORTS"), *at = text;
    dp__ports *ports = &launch->ports;
    if (text == NULL)
        return DP_OK;
    ports->first = ports->last = dp__number_below(&at, DP__PORT_MAX + 1);
    if (*at == '-') {
        at++;
        ports->last = dp__number_below(&at, DP__PORT_MAX + 1);
    }
    if (*at != '\0' || ports->first <= 0 || ports->last < ports->first)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_PORTS is '%s', neither a port from 1 to %d nor a range of "
                        "them like 20000-20031",
                        text, DP__PORT_MAX);
    return DP_OK;
}

/* Finds the address that the others are told. Process 0 is found by its name, and need not know it.
   */
static dp_status dp__launch_interface(dp__launch *launch)
{
    const char *wanted = dp__os_env("DP_INTERFACE");
    dp__os_interface found;
    char others[200];
    if (wanted == NULL)
        return DP_OK;
    if (!dp__os_interface_find(wanted, &found, others, sizeof others))
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_INTERFACE is '%s', and no interface of this machine has a "
                        "name or an address that begins so. There are %s",
                        wanted, others[0] != '\0' ? others : "none, or it may open no more files");
    memcpy(launch->own, found.address, sizeof launch->own);
    return DP_OK;
}

/* "HOST:PORT", "[HOST]:PORT" where the host has colons itself, or "@NAME" for a place inside this
   machine. */
static dp_status dp__launch_address(dp__launch *launch, const char *text)
{
    const char *colon = strrchr(text, ':'), *at = colon != NULL ? colon + 1 : "";
    bool bracket = colon != NULL && text[0] == '[' && colon[-1] == ']';
    size_t bytes = colon != NULL ? (size_t)(colon - text) - (bracket ? 2 : 0) : 0;
    int port;
    snprintf(launch->where, sizeof launch->where, "at %s", text);
    if (text[0] == '@' && text[1] != '\0') {
        launch->key = dp__key_with(launch->key, text);
        return DP_OK;
    }
    port = dp__number_below(&at, DP__PORT_MAX + 1);
    if (bytes == 0 || bytes >= DP__HOST_BYTES || *at != '\0' || port <= 0)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_ADDR is '%s', not host:port with a port from 1 to %d, nor "
                        "@name",
                        text, DP__PORT_MAX);
    memcpy(launch->host, text + bracket, bytes);
    launch->host[bytes] = '\0';
    launch->port = port;
    return DP_OK;
}

/* torchrun's own store may use its port: our first one is the next. */
static dp_status dp__launch_master(dp__launch *launch, const dp__launcher *launcher)
{
    const char *host = dp__os_env(launcher->host);
    bool has_port = dp__os_env(launcher->port) != NULL;
    if (host == NULL || !has_port)
        return dp__half_a_set(launcher->count, host == NULL ? launcher->host : launcher->port);
    if (strlen(host) >= DP__HOST_BYTES)
        return dp_error(DP_ERR_INVALID, "dp_open: %s is longer than the name of any host: '%.64s'",
                        launcher->host, host);
    strcpy(launch->host, host);
    DP_TRY(dp__env_number(launcher->port, 1, DP__PORT_MAX - 1, &launch->port));
    launch->port++;
    snprintf(launch->where, sizeof launch->where, "at %.60s:%d", host, launch->port);
    return DP_OK;
}

/* The first name of a list like "node[01-03,7],other". */
static void dp__first_host(const char *list, char *out, size_t room)
{
    size_t bytes = 0;
    bool skips = false, inside = false;
    for (; *list != '\0' && (inside || *list != ',') && bytes + 1 < room; list++) {
        if (*list == '[' || *list == ']')
            inside = *list == '[', skips = false;
        else if (inside && (*list == '-' || *list == ','))
            skips = true;
        else if (!skips)
            out[bytes++] = *list;
    }
    out[bytes] = '\0';
}

/* The launcher itself is what its processes have in common: it has made the connections that it
   left to them, even if there is a shell in between; else it is taken to be the parent. */
static uint64_t dp__launcher_id(const dp__launcher *launcher)
{
    int fd = -1;
    dp__os_owner maker = {0, 0};
    if (launcher->channel != NULL && dp__os_env(launcher->channel) != NULL &&
        dp__env_number(launcher->channel, 0, INT_MAX - 1, &fd) == DP_OK)
        (void)dp__os_owner_of(fd, &maker);
    return maker.process != 0 ? maker.process : dp__os_parent();
}

/* The launcher says none: the number of the job chooses one, and leaves room for the next ones. */
static int dp__launch_port(const dp__launch *launch)
{
    dp__ports ports = {DP__PORT_FIRST, DP__PORT_LAST};
    if (launch->ports.last != 0)
        ports = launch->ports;
    int choices = ports.last - ports.first + 2 - DP__PORTS;
    uint64_t drawn = dp__sip(launch->key, "port", 4);
    return ports.first + (choices > 1 ? (int)(drawn % (uint64_t)choices) : 0);
}

/* When no address is given: the machines of a Slurm step have names; else all processes have to be
   on one machine, and the job's key is the name of the place where they meet. */
static dp_status dp__launch_place(dp__launch *launch, const dp__launcher *launcher)
{
    const char *nodes = dp__os_env("SLURM_STEP_NUM_NODES"),
               *list = dp__os_env("SLURM_STEP_NODELIST");
    bool far = launch->local_count != 0 && launch->local_count < launch->process_count;
    strcpy(launch->where, "on this machine");
    if (launcher->step != NULL && list != NULL && (nodes == NULL || strcmp(nodes, "1") != 0)) {
        dp__first_host(list, launch->host, sizeof launch->host);
        launch->port = dp__launch_port(launch);
        snprintf(launch->where, sizeof launch->where, "at %.60s:%d", launch->host, launch->port);
        return DP_OK;
    }
    if (far)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "dp_open: %s says that %d of %d processes are on this machine, and not "
                        "where process 0 is: set DP_ADDR=host:port, the host where process 0 runs "
                        "and a port that is free there",
                        launcher->name, launch->local_count, launch->process_count);
    if (!launch->numbered)
        launch->key = dp__key_of_run(launch->key, dp__launcher_id(launcher));
    launch->numbered = true;
    return DP_OK;
}

static bool dp__launch_may(const dp__launch *launch, int port)
{
    return port >= launch->ports.first && port <= launch->ports.last;
}

/* Names inside a machine are each user's own; who meets over a network may be another user. */
static void dp__launch_name(dp__launch *launch)
{
    char user[24] = "";
    bool far = launch->host[0] != '\0';
    int last = dp__launch_may(launch, launch->port) ? launch->ports.last : DP__PORT_MAX;
    launch->port_count = last - launch->port + 1;
    if (launch->port_count > DP__PORTS)
        launch->port_count = DP__PORTS;
    if (far) /* ranges of ports overlap */
        launch->key = dp__key_of_run(launch->key, (uint64_t)launch->port);
    if (!far)
        snprintf(user, sizeof user, "%llu-", (unsigned long long)dp__os_user());
    snprintf(launch->place, sizeof launch->place, "dp-%s%016llx", user,
             (unsigned long long)dp__sip(launch->key, "place", 5));
}

DP__COLD static dp_status dp__launch_where(dp__launch *launch, const dp__launcher *launcher)
{
    const char *address = dp__os_env("DP_ADDR");
    DP_TRY(dp__launch_ports(launch));
    if (address != NULL)
        DP_TRY(dp__launch_address(launch, address));
    else if (launcher->host != NULL)
        DP_TRY(dp__launch_master(launch, launcher));
    else if (launcher == &dp__launchers[0])
        return dp__half_a_set(launcher->count, "DP_ADDR");
    else
        DP_TRY(dp__launch_place(launch, launcher));
    dp__launch_name(launch);
    return launch->host[0] != '\0' ? dp__launch_interface(launch) : DP_OK;
}

/* Which process of how many this is. */
DP__COLD static dp_status dp__launch_self(const dp__launcher *launcher, dp__launch *out)
{
    out->name = launcher->name;
    DP_TRY(dp__launcher_place(launcher, &out->process, &out->process_count));
    if (launcher->local_count != NULL)
        DP_TRY(
            dp__env_place(launcher->local, launcher->local_count, &out->local, &out->local_count));
    else if (dp__os_env(launcher->local) != NULL)
        DP_TRY(dp__env_number(launcher->local, 0, out->process_count - 1, &out->local));
    if (out->local_count > out->process_count)
        return dp_error(
            DP_ERR_INVALID, "dp_open: %s is %d and %s is %d: more on this machine than in all",
            launcher->local_count, out->local_count, launcher->count, out->process_count);
    return DP_OK;
}

/* Lets so much time pass, and fails if it is known by then that it is in vain to await others. */
static dp_status dp__launch_rest(const dp__launch *launch, int ms)
{
    if (launch != NULL && launch->rest != NULL)
        return launch->rest(launch->user, ms);
    if (ms > 0)
        dp__os_sleep_ms(ms);
    return DP_OK;
}

/* A world of one needs no address, unless others come later. */
static bool dp__launch_is_alone(const dp__launch *launch)
{
    return launch->process_count == 1 && !dp__comes_later() &&
           dp__os_env("DP_PROCESS_LIMIT") == NULL;
}

/* Reads what the launcher says, and of which job. */
DP__COLD static dp_status dp__launch_read(const char *job, dp__launch *out)
{
    const dp__launcher *launcher;
    *out = (dp__launch){.name = "none", .process_count = 1};
    DP_TRY(dp__launcher_find(&launcher));
    if (launcher == NULL)
        return DP_OK;
    DP_TRY(dp__launch_self(launcher, out));
    if (dp__launch_is_alone(out))
        return DP_OK;
    out->secret = dp__os_env("DP_SECRET") != NULL;
    out->key = dp__key_with(dp__key_with(out->key, dp__os_env("DP_SECRET")), launcher->name);
    for (int i = 0; i < 2 && launcher->job[i] != NULL; i++) {
        const char *number = dp__os_env(launcher->job[i]);
        out->key = dp__key_with(out->key, number);
        out->numbered = out->numbered || (number != NULL && strcmp(number, "none") != 0);
    }
    if (launcher->again != NULL)
        out->key = dp__key_with(out->key, dp__os_env(launcher->again));
    out->key = dp__key_with(out->key, job);
    return dp__launch_where(out, launcher);
}

/* ==== >>spawn ==================================================================================
   The launcher for one machine: it forks, tells each child with the usual variables which process
   of how many it is, and waits for all. The first that fails ends the others.                   */

enum {
    DP__SPAWN_WORDS_MS = 300, /* after the first failure: others may find who it was, and log it */
    DP__SPAWN_GRACE_MS = 2000 /* from the request to end to the end by force */
};

typedef struct dp__exit_report { /* of a child, in memory that it shares with its parent */
    atomic_int said;             /* all that follows: its function has returned */
    int32_t status;
    char text[DP__TEXT_BYTES];
} dp__exit_report;

typedef struct dp__children {
    int count, left;
    dp__os_child *children;
    dp__exit_report *words;
    bool ending;       /* they were told to end */
    uint64_t until_ns; /* when they are told to end, or made to; 0: nobody has failed */
    dp_status status;
    char text[DP__TEXT_BYTES + 64];
} dp__children;

static atomic_bool dp__spawning; /* signals belong to the whole process */

static void dp__env_set_number(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    dp__os_env_set(name, text);
}

static _Noreturn void dp__spawn_run(dp__exit_report *words, int process, int count,
                                    const char *secret, dp_status (*fn)(void *user), void *user)
{
    char place[40];
    snprintf(place, sizeof place, "@%s", secret);
    dp__os_env_set("DP_LAUNCH", dp__launchers[0].name);
    dp__env_set_number("DP_PROCESS", process);
    dp__env_set_number("DP_PROCESS_COUNT", count);
    dp__env_set_number("DP_LOCAL_PROCESS", process);
    dp__env_set_number("DP_LOCAL_PROCESS_COUNT", count);
    dp__os_env_set("DP_ADDR", place);
    dp__os_env_set("DP_SECRET", secret);
    dp__os_env_drop("DP_REJOIN"); /* the new ones begin; this one may have come later */
    atomic_store(&dp__spawning, false);
    dp__of_thread.text[0] = '\0';
    int own = dp__os_process_id();
    dp_status status = dp__sentence_after('\0', fn(user));
    if (dp__os_process_id() != own) /* fn has forked, and this is not the process to speak */
        dp__os_leave(status == DP_OK);
    words->status = (int32_t)status;
    if (status != DP_OK)
        memcpy(words->text, dp__of_thread.text, sizeof words->text);
    atomic_store(&words->said, 1);
    dp__os_leave(status == DP_OK);
}

/* Says how a process failed that has not said it: its function has not returned, whatever the exit
   status is, or it was ended after that. */
static void dp__spawn_speak_for(const dp__os_child *child, dp__exit_report *words)
{
    words->status = DP_ERR_USER;
    if (child->unknown)
        snprintf(words->text, sizeof words->text,
                 "it ended, and how is not known: its parent has waited for any child");
    else if (child->by_signal != 0)
        snprintf(words->text, sizeof words->text, "it was ended by signal %d", child->by_signal);
    else
        snprintf(words->text, sizeof words->text,
                 "it ended with exit status %d before its function returned", child->code);
}

/* Notes whether a process that has ended failed, and if so, whether it was the first or the cause:
   REMOTE and TIMEOUT may be only the echo of another process' failure. */
static void dp__spawn_judge(dp__children *all, int process)
{
    dp__exit_report *words = &all->words[process];
    const dp__os_child *child = &all->children[process];
    bool said = atomic_load(&words->said) != 0, echo;
    bool spoke = said && (words->status != DP_OK || child->by_signal == 0);
    if (!spoke)
        dp__spawn_speak_for(child, words);
    words->text[sizeof words->text - 1] = '\0';
    if (words->status == DP_OK || (all->ending && !spoke))
        return;
    echo = words->status == DP_ERR_REMOTE || words->status == DP_ERR_TIMEOUT;
    if (all->status != DP_OK && (echo || dp_status_class(all->status) != DP_CLASS_JOB))
        return;
    all->status = (dp_status)words->status;
    snprintf(all->text, sizeof all->text, "process %d of %d: %s", process, all->count, words->text);
    if (!all->ending)
        all->until_ns = dp__os_after_ms(DP__SPAWN_WORDS_MS);
}

/* Tell all to end, and kill those that do not. */
static void dp__spawn_end(dp__children *all)
{
    if (all->until_ns == 0 || dp__os_ms_until(all->until_ns) > 0)
        return;
    for (int i = 0; i < all->count; i++)
        dp__os_end(&all->children[i], all->ending);
    all->ending = true;
    all->until_ns = dp__os_after_ms(DP__SPAWN_GRACE_MS);
}

static void dp__spawn_wait(dp__children *all)
{
    while (all->left > 0) {
        for (int i = 0; i < all->count; i++) {
            dp__os_child *child = &all->children[i];
            if (child->pid == 0 || !dp__os_ended(child))
                continue;
            dp__spawn_judge(all, i);
            all->left--;
        }
        if (dp__os_asked_to_end() != 0 && all->status == DP_OK) {
            all->status = DP_ERR_ABORTED;
            snprintf(all->text, sizeof all->text, "ended by signal %d", dp__os_asked_to_end());
            all->until_ns = dp__os_now_ns();
        }
        dp__spawn_end(all);
        if (all->left > 0)
            dp__os_sleep_ms(2 + all->count / 8);
    }
}

DP__COLD static dp_status dp__spawn_all(dp__children *all, dp_status (*fn)(void *user), void *user)
{
    char secret[36];
    uint64_t drawn[2];
    memset(all->children, 0, (size_t)all->count * sizeof *all->children);
    if (!dp__os_secret(drawn, sizeof drawn))
        return dp_error(DP_ERR_UNSUPPORTED,
                        "dp_spawn: the system has no random numbers for the secret of the new "
                        "processes: neither getentropy nor /dev/urandom gives any");
    snprintf(secret, sizeof secret, "%016llx%016llx", (unsigned long long)drawn[0],
             (unsigned long long)drawn[1]);
    for (int i = 0; i < all->count && all->status == DP_OK; i++) {
        int forked = dp__os_fork(&all->children[i]);
        if (forked == 0)
            dp__spawn_run(&all->words[i], i, all->count, secret, fn, user);
        all->left += forked > 0;
        if (forked < 0) {
            all->status = DP_ERR_NO_MEMORY;
            snprintf(all->text, sizeof all->text, "the system has no room for %d processes",
                     all->count);
            all->until_ns = dp__os_now_ns();
        }
    }
    dp__spawn_wait(all);
    return all->status == DP_OK ? DP_OK : dp_error(all->status, "dp_spawn: %s", all->text);
}

DP__COLD DP_API dp_status dp_spawn(int count, dp_status (*fn)(void *user), void *user)
{
    DP_TRY(dp__spawn_check(count, fn));
    if (atomic_exchange(&dp__spawning, true))
        return dp_error(DP_ERR_STATE, "dp_spawn: another thread is inside dp_spawn");
    size_t bytes = (size_t)count * sizeof(dp__os_child);
    size_t said = (size_t)count * sizeof(dp__exit_report);
    dp__children all = {.count = count,
                        .children = dp__os_alloc(bytes, 64, NULL),
                        .words = dp__os_common_alloc(said)};
    dp__os_signals_take();
    dp_status status =
        all.children != NULL && all.words != NULL
            ? dp__spawn_all(&all, fn, user)
            : dp_error(DP_ERR_NO_MEMORY, "dp_spawn: no memory for %d processes", count);
    dp__os_signals_give_back();
    dp__os_free(all.children, bytes, NULL);
    if (all.words != NULL)
        dp__os_common_free(all.words, said);
    atomic_store(&dp__spawning, false);
    dp__os_signal_again();
    return status;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
