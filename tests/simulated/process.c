/* process.c - a process of a job: dp.h on the simulated system, and a program that does the steps
   of a plan. It checks all that comes: a sum has one right value, a message says who sent it, when
   and in which job. What happens to it is in its story.                                         */

#define DP_IMPLEMENTATION
#define DP__SYSTEM "tests/simulated/system.h"
#define _Thread_local __attribute__((section("sim_locals")))
#include "dp.h"
#include "dp_save.h"

enum { TRIES = 4, MOST = 3000, MESSAGES = 3, RANKS = 2 * SIM_PROCESSES };

typedef struct task {
    sim_story *story;
    const sim_plan *plan;
    dp_ctx *ctx;
    dp_info info;
    int step;
    bool changed; /* who is in the job, since they told each other */
} task;

/* Finds the part of a library that each thread has. */
extern unsigned char __start_sim_locals[], __stop_sim_locals[];

void sim_thread_locals(void **out_data, size_t *out_bytes);
void sim_main(sim_story *story);

void sim_thread_locals(void **out_data, size_t *out_bytes)
{
    *out_data = __start_sim_locals;
    *out_bytes = (size_t)(__stop_sim_locals - __start_sim_locals);
}

static void wrong(task *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void wrong(task *t, const char *format, ...)
{
    va_list args;
    if (t->story->wrong[0] != '\0')
        return;
    va_start(args, format);
    vsnprintf(t->story->wrong, sizeof t->story->wrong, format, args);
    va_end(args);
}

/* ---- calls: how long each takes -------------------------------------------------------------- */

static void before(task *t, const char *call)
{
    t->story->where = call;
    t->story->called_ns = sim_time();
}

static dp_status after(task *t, dp_status status)
{
    sim_call *longest = &t->story->longest[status != DP_OK];
    uint64_t took = sim_time() - t->story->called_ns;
    if (took > longest->ns)
        *longest = (sim_call){t->story->where, t->story->called_ns, took};
    return status;
}

/* Notes how long a call took that no process can end alone. */
static dp_status after_all(task *t, dp_status status)
{
    if (status == DP_OK)
        sim_went_well(t->info.recoveries, t->story->called_ns);
    return after(t, status);
}

#define CALL(call)     (before(t, #call), after(t, call))
#define CALL_ALL(call) (before(t, #call), after_all(t, call))

/* ---- steps ----------------------------------------------------------------------------------- */

/* Returns a rank's number at place i: small and whole, so that every order of a sum is exact. */
static double part_of(const task *t, int rank, size_t i)
{
    unsigned salt = t->plan->steps[t->step].salt + (unsigned)t->info.recoveries * 13u;
    return (double)((salt + (unsigned)rank * 31u + (unsigned)i * 7u) % 97u);
}

typedef struct rank_sum {
    const task *t;
    float (*mine)[MOST];
    size_t count;
} rank_sum;

static dp_status sum_of_rank(int local_rank, dp_scope *scope, void *user)
{
    const rank_sum *sum = user;
    unsigned salt = sum->t->plan->steps[sum->t->step].salt;
    float *mine = sum->mine[local_rank];
    (void)scope;
    if (local_rank == (int)(salt / 4 % 2))
        sim_pass((uint64_t)(salt % 7) * 300000);
    return dp_rank_all_reduce(sum->t->ctx, mine, mine, sum->count, DP_F32, DP_OP_SUM);
}

/* Each rank calls for itself. A run that has no memory has not begun. */
static dp_status sum_by_ranks(const task *t, float (*mine)[MOST], size_t count)
{
    rank_sum sum = {t, mine, count};
    dp_status status;
    do {
        status = dp_run(t->ctx, NULL, sum_of_rank, &sum);
    } while (status == DP_ERR_NO_MEMORY);
    return status;
}

static dp_status do_sum(task *t)
{
    static float mine[2][MOST];
    size_t count = 1 + t->plan->steps[t->step].size % MOST;
    bool by_ranks = (t->plan->steps[t->step].salt + (unsigned)t->info.process) % 2 == 0;
    dp_part parts[2];
    for (int d = 0; d < t->info.local_count; d++) {
        for (size_t i = 0; i < count; i++)
            mine[d][i] = (float)part_of(t, t->info.rank_first + d, i);
        parts[d] = (dp_part){.send = mine[d], .recv = mine[d]};
    }
    DP_TRY(CALL_ALL(by_ranks ? sum_by_ranks(t, mine, count)
                             : dp_all_reduce(t->ctx, parts, count, DP_F32, DP_OP_SUM)));
    for (int d = 0; d < t->info.local_count; d++)
        for (size_t i = 0; i < count; i++) {
            double sum = 0;
            for (int r = 0; r < t->info.rank_count; r++)
                sum += part_of(t, r, i);
            if ((double)mine[d][i] != sum)
                wrong(t, "step %d: a sum at %zu of %zu is %g, not %g", t->step, i, count,
                      (double)mine[d][i], sum);
        }
    return DP_OK;
}

static dp_status do_agree(task *t)
{
    bool any = false;
    int chosen = (int)(t->plan->steps[t->step].salt % (unsigned)t->info.process_count);
    bool mine = t->plan->steps[t->step].size % 2 != 0 && t->info.process == chosen;
    DP_TRY(CALL_ALL(dp_any(t->ctx, mine, &any)));
    if (any != (t->plan->steps[t->step].size % 2 != 0))
        wrong(t, "step %d: dp_any is wrong", t->step);
    return DP_OK;
}

static dp_status do_gather(task *t)
{
    int64_t mine[3], all[3 * RANKS];
    for (int i = 0; i < 3; i++)
        mine[i] = (int64_t)part_of(t, t->info.process, (size_t)i);
    DP_TRY(CALL_ALL(dp_all_gather_i64(t->ctx, mine, 3, all)));
    for (int r = 0; r < t->info.rank_count; r++)
        for (int i = 0; i < 3; i++)
            if (all[3 * r + i] !=
                (int64_t)part_of(t, r * t->info.process_count / t->info.rank_count, (size_t)i))
                wrong(t, "step %d: what rank %d gathered is wrong", t->step, r);
    return DP_OK;
}

static dp_status do_spread(task *t)
{
    int root = (int)(t->plan->steps[t->step].salt % (unsigned)t->info.rank_count);
    double numbers[4];
    for (size_t i = 0; i < 4; i++)
        numbers[i] = part_of(t, t->info.rank_first, i);
    DP_TRY(CALL_ALL(dp_broadcast_f64(t->ctx, numbers, 4, root)));
    int first = root - root % t->info.local_count;
    for (size_t i = 0; i < 4; i++)
        if (numbers[i] != part_of(t, first, i))
            wrong(t, "step %d: what rank %d spread is wrong", t->step, root);
    return DP_OK;
}

/* A message says who sent it, to whom, in which step, as which of them, and after how many
   recoveries; the rest follows from that. */
static void letter(const task *t, int64_t *words, size_t count, int from, int to, int number)
{
    for (size_t i = 0; i < count; i++)
        words[i] = ((int64_t)from << 48) + ((int64_t)to << 40) + ((int64_t)t->step << 24) +
                   ((int64_t)number << 16) + ((int64_t)t->info.recoveries << 12) +
                   (int64_t)(i % 4093); /* no piece has the words of another one */
}

/* Each rank sends some to the next but `far`. */
static dp_status do_messages(task *t)
{
    static int64_t sent[MESSAGES][MOST], came[MESSAGES][MOST], right[MOST];
    dp_message list[2 * MESSAGES] = {{.tag = 0}};
    int rank = t->info.rank_first, count = t->info.rank_count;
    int far = 1 + (int)(t->plan->steps[t->step].salt % 3u);
    int to = (rank + far * t->info.local_count) % count;
    int from = (rank + (count - far % count) * t->info.local_count) % count;
    size_t words = 1 + t->plan->steps[t->step].size % MOST;
    from = ((rank - far * t->info.local_count) % count + count) % count;
    for (int i = 0; i < MESSAGES; i++) {
        int64_t shape = (int64_t)(i == 1 ? 1 : words);
        letter(t, sent[i], (size_t)shape, rank, to, i);
        memset(came[i], 0xee, sizeof came[i]);
        list[2 * i] = (dp_message){.tensor = dp_wrap(came[i], DP_I64, 1, &shape),
                                   .peer = from,
                                   .tag = i / 2,
                                   .receives = true};
        list[2 * i + 1] =
            (dp_message){.tensor = dp_wrap(sent[i], DP_I64, 1, &shape), .peer = to, .tag = i / 2};
    }
    DP_TRY(CALL(dp_messages_begin(t->ctx, list, 2 * MESSAGES)));
    DP_TRY(CALL(dp_messages_end(t->ctx, list, 2 * MESSAGES)));
    for (int i = 0; i < MESSAGES; i++) {
        size_t n = i == 1 ? 1 : words;
        letter(t, right, n, from, rank, i);
        if (memcmp(right, came[i], n * sizeof right[0]) != 0)
            wrong(t, "step %d: message %d from %d is wrong: %llx, not %llx", t->step, i, from,
                  (unsigned long long)came[i][0], (unsigned long long)right[0]);
    }
    return DP_OK;
}

#include "steps.h"

/* The last word of a file says which job has saved it, and in which step. A job that has not failed
   goes on where a file cannot be written. */
static dp_status do_save(task *t)
{
    static int64_t words[MOST];
    size_t count = 1 + t->plan->steps[t->step].size % MOST;
    int64_t shape = (int64_t)count, stamp = (int64_t)t->info.recoveries << 32 | t->step;
    dp_value saved = dp_none();
    for (size_t i = 0; i < count; i++)
        words[i] = stamp;
    dp_scope *scope = dp_scope_begin(t->ctx);
    DP_TRY(dp_scope_check(scope));
    dp_value value = dp_array(scope, words, DP_I64, 1, &shape);
    dp_status status =
        CALL_ALL(dp_checkpoint_save(t->ctx, SIM_FILE, DP_DICT(scope, {"words", value})));
    if (status == DP_OK)
        sim_has_saved(stamp);
    if (status == DP_OK && t->plan->steps[t->step].salt % 2 == 0)
        status = CALL_ALL(dp_checkpoint_load(t->ctx, scope, SIM_FILE, &saved));
    if (saved.kind != DP_NONE) {
        const int64_t *came = dp_get(saved, "words").as.t->data;
        for (size_t i = 0; i < count; i++)
            if (came[i] != stamp)
                wrong(t, "step %d: a file has %llx, not %llx", t->step, (unsigned long long)came[i],
                      (unsigned long long)stamp);
    }
    dp_scope_end(scope);
    return status == DP_OK || dp_failure(t->ctx, NULL) ? status : DP_OK;
}

/* All learn who is in the job, and go on from the step of the furthest. */
static dp_status share(task *t)
{
    int64_t mine[2] = {sim_process(), t->step}, all[2 * RANKS];
    int roster[SIM_PROCESSES];
    DP_TRY(CALL_ALL(dp_all_gather_i64(t->ctx, mine, 2, all)));
    for (int r = 0; r < t->info.rank_count; r++) {
        roster[r * t->info.process_count / t->info.rank_count] = (int)all[2 * r];
        t->step = all[2 * r + 1] > t->step ? (int)all[2 * r + 1] : t->step;
    }
    sim_is_in(t->info.recoveries, roster, t->info.process_count);
    t->changed = false;
    return DP_OK;
}

static dp_status look(task *t)
{
    DP_TRY(dp_info_get(t->ctx, &t->info));
    t->story->recoveries = t->info.recoveries;
    t->story->rank = t->info.process;
    t->story->count = t->info.process_count;
    return DP_OK;
}

static dp_status do_admit(task *t)
{
    bool came = false;
    if (!t->plan->recovers)
        return DP_OK;
    DP_TRY(CALL(dp_admit(t->ctx, &came)));
    if (!came)
        return DP_OK;
    t->changed = true;
    return look(t);
}

/* Computes for a while; where more is asked for, one of them for a part of the time-out. That is
   less than the others wait for it, which is half of the time-out where they recover meanwhile; so
   it is not done time and again. */
static void compute(const task *t)
{
    unsigned salt = t->plan->steps[t->step].salt;
    int ms = t->plan->timeout_ms < 4000 ? t->plan->timeout_ms : 4000;
    bool again = t->step > 0 && t->plan->steps[t->step - 1].kind == SIM_COMPUTE;
    bool more = t->plan->more && !again && salt % 4 == 0;
    sim_pass((uint64_t)t->plan->steps[t->step].size * 10000);
    if (!more || (int)salt % t->info.process_count != t->info.process)
        return;
    t->story->busy = true;
    sim_pass((uint64_t)ms * 1000000 / (t->plan->recovers ? 20 : 10) * (salt / 4 % 8));
}

static dp_status do_step(task *t)
{
    switch (t->plan->steps[t->step].kind) {
    case SIM_SUM:
        return do_sum(t);
    case SIM_AGREE:
        return do_agree(t);
    case SIM_GATHER:
        return do_gather(t);
    case SIM_SPREAD:
        return do_spread(t);
    case SIM_BARRIER:
        return CALL_ALL(dp_barrier(t->ctx));
    case SIM_MESSAGES:
        return do_messages(t);
    case SIM_ADMIT:
        return do_admit(t);
    case SIM_SAVE:
        return do_save(t);
    case SIM_COMPUTE:
        compute(t);
        return DP_OK;
    case SIM_LARGE:
        return do_large(t);
    case SIM_MAIL:
        return do_mail(t);
    case SIM_GROUP:
        return do_group(t);
    case SIM_REDUCE:
        return do_reduce(t);
    case SIM_STEP_KINDS:
        break;
    }
    return DP_OK;
}

static dp_status go_on(task *t)
{
    while (t->changed || t->step < t->plan->step_count) {
        if (t->changed) {
            DP_TRY(share(t));
            continue;
        }
        DP_TRY(do_step(t));
        t->step++;
        t->story->steps++;
    }
    return t->plan->leaves ? DP_OK : CALL_ALL(dp_barrier(t->ctx));
}

static dp_status recover(task *t)
{
    dp_status status = DP_ERR_STATE;
    for (int i = 0; i < TRIES && status != DP_OK; i++) {
        t->story->tries++;
        status = CALL(dp_recover(t->ctx));
    }
    if (status != DP_OK)
        return status;
    t->changed = true;
    return look(t);
}

/* Does the steps that are left. If the job fails, the judge hears how. */
static dp_status go_on_or_fail(task *t)
{
    dp_failure_info failure;
    dp_status status = go_on(t);
    if (status != DP_OK && dp_failure(t->ctx, &failure))
        sim_has_failed(t->info.recoveries, failure.text, failure.rank / t->plan->device_count);
    return status;
}

static dp_status run(task *t)
{
    dp_status status = go_on_or_fail(t);
    while (status != DP_OK && t->plan->recovers && dp_failure(t->ctx, NULL)) {
        DP_TRY(recover(t));
        status = go_on_or_fail(t);
    }
    return status;
}

/* Comes to where processes of the job are met, as one of them, and proves it by a lie. */
static void forge(const sim_plan *plan)
{
    for (int i = 0; i < 400; i++) {
        dp__challenge challenge;
        dp__os_found found;
        uint64_t lie = sim_random(), until_ns = dp__os_after_ms(100);
        dp__join_request request = {.magic = DP__JOIN_MAGIC,
                                    .version = DP_VERSION,
                                    .nonce = sim_random(),
                                    .process = 1 + i % (plan->process_count - 1),
                                    .process_count = plan->process_count,
                                    .patience_ms = 1000};
        dp__os_look_up("10.0.0.1", 29500 + i / 2 % 16, true, &found);
        int fd = dp__os_connect(&found.list[0]);
        bool open = fd >= 0 && dp__os_ready(fd, DP__CAN_WRITE, 20) &&
                    dp__wire_send(fd, &request, sizeof request, until_ns) == DP_OK &&
                    dp__wire_receive(fd, &challenge, sizeof challenge, until_ns) == DP_OK &&
                    dp__wire_send(fd, &lie, sizeof lie, until_ns) == DP_OK;
        dp__os_sleep_ms(open ? 100 : 1);
        dp__os_close(fd);
    }
}

void sim_main(sim_story *story)
{
    if (sim_env("SIM_FORGES") != NULL) {
        forge(story->plan);
        return;
    }
    int devices[2] = {0, 0};
    task task = {.story = story, .plan = story->plan, .changed = true}, *t = &task;
    dp_config config = {.device_count = story->plan->device_count,
                        .devices = devices,
                        .recovers = story->plan->recovers,
                        .unbound = true,
                        .thread_count = 1,
                        .timeout_ms = story->plan->timeout_ms};
    const dp_device_ops *backends[] = {dp_cpu(), NULL};
    config.backends = backends;
    dp_status status = CALL(dp_open(&config, &t->ctx));
    if (status == DP_OK) {
        story->opened = true;
        status = look(t);
    }
    if (status == DP_OK)
        status = run(t);
    story->failed_ns = sim_time();
    story->tried_ns = story->called_ns;
    story->status = status;
    dp_failure_info failure;
    if (story->opened && dp_failure(t->ctx, &failure) && failure.rank >= 0)
        story->blamed = failure.rank / story->plan->device_count;
    story->done = status == DP_OK;
    if (status != DP_OK) {
        snprintf(story->text, sizeof story->text, "%s", dp_last_error());
        story->lost = t->ctx != NULL && dp_failure(t->ctx, NULL);
        sim_log(story->text);
    }
    const char *where = story->where;
    (void)CALL((dp_close(t->ctx), DP_OK));
    story->where = where;
    story->left_over = sim_leftovers(story->left, sizeof story->left);
}
