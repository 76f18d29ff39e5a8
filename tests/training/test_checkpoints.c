/* test_checkpoints.c - dp_save.h's savers: files that are written beside training, and which of
   them are kept. Each test has a folder of its own, in which it is. */

#define _GNU_SOURCE /* P_tmpdir */
#include <math.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
/* clang-format off */
#include "folder.h"
#include "training.h"
#include "meeting.h"
#include "refusal.h"
/* clang-format on */

static dp_saver *saver_of(dp_ctx *ctx, const dp_saver_config *config)
{
    dp_saver *saver = NULL;
    CHECK_OK(dp_saver_create(ctx, config, &saver));
    return saver;
}

static dp_saver *saver_at(dp_ctx *ctx, const char *path)
{
    return saver_of(ctx, &(dp_saver_config){.path = path});
}

/* {'n': number}, on disk when this returns. */
static void keep(dp_ctx *ctx, dp_saver *saver, int64_t n, double score)
{
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_saver_save(saver, n, DP_DICT(scope, {"n", dp_int(n)}),
                           DP_DICT(scope, {"loss", dp_float(score)})));
    CHECK_OK(dp_saver_wait(saver));
    dp_scope_end(scope);
}

/* What is in the file that is loaded. */
static int64_t kept(dp_ctx *ctx, dp_saver *saver, int64_t which)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    CHECK_OK(dp_saver_load(saver, scope, which, &got));
    int64_t n = dp_get(got, "n").as.i;
    dp_scope_end(scope);
    return n;
}

static int in_order(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* All there is in a folder. */
static void check_folder(const char *folder, const char *want)
{
    static char names[64][256], all[64 * 256];
    int count = 0;
    DIR *directory = opendir(folder);
    CHECK(directory != NULL);
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;)
        if (entry->d_name[0] != '.')
            snprintf(names[count++], sizeof names[0], "%s", entry->d_name);
    closedir(directory);
    qsort(names, (size_t)count, sizeof names[0], in_order);
    all[0] = '\0';
    for (int i = 0; i < count; i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i > 0 ? " " : "", names[i]);
    CHECK_STR(all, want);
}

/* ---- what is written, and when --------------------------------------------------------------- */

/* Smaller ones, larger ones, and one without any tensor. */
static const char *const values[] = {
    "{'a': f32[3], 'b': [bool[3]=1 0 1, i64[]=5, (u8[2], 1.5)], '__metadata__': {'k': 'v'}}",
    "{'w': f16[2,2], 'none': f32[0,3]}", "{}", "{'epoch': 3}",
    "{'w': f64[100,100], 'x': f32[7], 'text': 'x'}"};

TEST_BACKENDS(files_are_those_of_a_save_that_waits)
{
    const dp_device device = dp_local_device(ctx, TREE_DEVICES - 1);
    enter_folder();
    dp_saver *saver = saver_at(ctx, "own");
    for (int turn = 0; turn < 2; turn++)
        for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
            dp_scope *step = dp_scope_begin(ctx);
            dp_value value = tree_on(ctx, step, tree_of(step, values[i]), device);
            CHECK_OK(dp_saver_save(saver, 0, value, dp_none()));
            CHECK_OK(dp_file_write(ctx, "other", value));
            dp_scope_end(step);
            CHECK_OK(dp_saver_wait(saver));
            check_same_files("own", "other");
        }
    check_folder(".", "other own");
    dp_saver_destroy(saver);
}

/* More than the piece that is written at once; rows that lie apart, or are one row. */
TEST_BACKENDS(large_tensors_of_any_strides)
{
    dp_tensor large, across, same;
    enter_folder();
    dp_saver *saver = saver_at(ctx, "own");
    float *numbers = test_room(600000 * sizeof *numbers);
    for (int i = 0; i < 600000; i++)
        numbers[i] = (float)i;
    CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, 1), numbers, DP_F32, DP_SHAPE(600, 1000),
                            &large));
    CHECK_OK(dp_transpose(&large, 0, 1, &across));
    CHECK_OK(dp_narrow(&large, 0, 0, 1, &same));
    same.shape[0] = 300;
    same.stride[0] = 0;
    dp_value value = DP_DICT(scope, {"large", dp_of(scope, &large)},
                             {"across", dp_of(scope, &across)}, {"same", dp_of(scope, &same)});
    CHECK_OK(dp_saver_save(saver, 0, value, dp_none()));
    CHECK_OK(dp_saver_wait(saver));
    CHECK_OK(dp_file_write(ctx, "other", value));
    check_same_files("own", "other");
}

static sem_t arrived, go;

static void stop_here(void)
{
    sem_post(&arrived);
    while (sem_wait(&go) != 0)
        continue;
}

/* The next fsync waits until pass() is called. */
static void stop_at_sync(int at)
{
    CHECK_INT(sem_init(&arrived, 0, 0), 0);
    CHECK_INT(sem_init(&go, 0, 0), 0);
    refuse((struct refusal){.call = "fsync", .at = at, .hook = stop_here});
}

static void pass(void)
{
    CHECK_INT(sem_post(&go), 0);
}

/* While the file of three steps is being written three more are made, and it has none of them. */
TEST_BACKENDS(training_goes_on_while_a_file_is_written)
{
    training whole = train_begin(ctx, false, false), t = train_begin(ctx, false, false);
    training later = train_begin(ctx, false, false);
    enter_folder();
    dp_saver *saver = saver_at(ctx, "beside");
    train_steps(&whole, 0, 6);
    train_save(&whole, "whole", 6);
    train_steps(&t, 0, 3);
    train_save(&t, "half", 3);
    dp_scope *step = dp_scope_begin(ctx);
    dp_value value = train_value(&t, step, 3, dp_optim_view);
    stop_at_sync(1);
    CHECK_OK(dp_saver_save(saver, 3, value, dp_none()));
    dp_scope_end(step);
    CHECK_INT(sem_wait(&arrived), 0);
    train_steps(&t, 3, 6);
    CHECK(access("beside", F_OK) != 0);
    CHECK(access("beside.part", F_OK) == 0);
    pass();
    CHECK_OK(dp_saver_wait(saver));
    check_same_files("beside", "half");
    train_save(&t, "end", 6);
    check_same_files("end", "whole");
    step = dp_scope_begin(ctx);
    CHECK_OK(dp_saver_load(saver, step, DP_SAVER_LAST, &value));
    CHECK_INT(train_go_on(&later, value), 3);
    dp_scope_end(step);
    train_steps(&later, 3, 6);
    train_save(&later, "later", 6);
    check_same_files("later", "whole");
}

static bool rested;

static void rest_here(void)
{
    rest(50);
    rested = true;
}

/* The one before is on disk when a save, a wait, a load or an end returns. */
TEST(each_call_waits_for_the_file_before)
{
    dp_value got;
    for (int way = 0; way < 5; way++) {
        dp_ctx *ctx = open_cpus(1);
        dp_scope *scope = dp_scope_begin(ctx);
        if (way == 0)
            enter_folder();
        dp_saver *saver = saver_at(ctx, "file");
        rested = false;
        refuse((struct refusal){.call = "fsync", .at = 1, .hook = rest_here});
        CHECK_OK(dp_saver_save(saver, 1, DP_DICT(scope, {"n", dp_int(way)}), dp_none()));
        if (way == 0)
            CHECK_OK(dp_saver_save(saver, 2, DP_DICT(scope, {"n", dp_int(way)}), dp_none()));
        else if (way == 1)
            CHECK_OK(dp_saver_wait(saver));
        else if (way == 2)
            CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_LAST, &got));
        else if (way == 3)
            dp_saver_destroy(saver);
        if (way < 4)
            CHECK(rested);
        dp_close(ctx);
        CHECK(rested);
        ctx = open_cpus(1);
        scope = dp_scope_begin(ctx);
        CHECK_OK(dp_file_read(ctx, scope, "file", &got));
        CHECK_INT(dp_get(got, "n").as.i, way);
        dp_close(ctx);
    }
    check_folder(".", "file");
}

static int gone; /* a process that has a context only from its parent */

TEST(a_child_of_fork_leaves_the_thread_alone)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    enter_folder();
    dp_saver *saver = saver_at(ctx, "file");
    stop_at_sync(1);
    CHECK_OK(dp_saver_save(saver, 1, DP_DICT(scope, {"n", dp_int(1)}), dp_none()));
    CHECK_INT(sem_wait(&arrived), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_ERROR(dp_saver_wait(saver), DP_ERR_STATE, "dp_saver_wait: the context belongs to");
        dp_saver_destroy(saver);
        dp_close(ctx);
        _exit(EXIT_SUCCESS);
    }
    CHECK_INT(waitpid(child, &gone, 0), child);
    CHECK_INT(gone, 0);
    pass();
    CHECK_OK(dp_saver_wait(saver));
    check_folder(".", "file");
    dp_close(ctx);
}

/* Ten saves take as much memory as two. */
TEST(a_copy_is_allocated_once)
{
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    dp_tensor large;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 1, .allocator = test_allocator_of(&counter)}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    size_t calls = 0;
    enter_folder();
    CHECK_OK(dp_tensor_new(scope, (dp_device){0, 0}, DP_F32, 1, (int64_t[]){1 << 20}, &large));
    CHECK_OK(dp_fill(ctx, &large, dp_float(1)));
    dp_saver *saver = saver_of(ctx, &(dp_saver_config){.path = "s*"});
    for (int i = 0; i < 10; i++) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_value value = DP_DICT(step, {"large", dp_of(step, &large)}, {"i", dp_int(i)});
        CHECK_OK(dp_saver_save(saver, i, value, dp_none()));
        dp_scope_end(step);
        CHECK_OK(dp_saver_wait(saver));
        calls = i == 1 ? counter.call_count : calls;
    }
    CHECK_INT(counter.call_count, calls);
    CHECK(counter.peak_bytes < 2 * sizeof(float) * (1 << 20) + (1 << 20));
    check_folder(".", "s9");
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* ---- which files are kept -------------------------------------------------------------------- */

#define NONE (double)NAN

static const struct keeping {
    int last;
    const char *best_by;
    bool most;
    double scores[6]; /* of the numbers 0, 5, 10 ... */
    const char *want;
} keepings[] = {
    {0, NULL, false, {1, 2, 3}, "10"},
    {1, NULL, false, {1, 2, 3, 4}, "15"},
    {2, NULL, false, {1, 2, 3, 4}, "10 15"},
    {9, NULL, false, {1, 2, 3}, "0 10 5"},
    {-1, NULL, false, {1, 2, 3, 4, 5, 6}, "0 10 15 20 25 5"},
    {0, "loss", false, {3, 2, 4}, "10-loss=4 5-loss=2"},
    {0, "loss", true, {3, 4, 2}, "10-loss=2 5-loss=4"},
    {1, "loss", false, {3, 4, 2}, "10-loss=2"},
    {2, "loss", false, {1, 4, 3, 2}, "0-loss=1 10-loss=3 15-loss=2"},
    {2, "loss", false, {4, 4, 1, 2}, "10-loss=1 15-loss=2"},
    {2, "loss", false, {4, 1, 2, 3}, "10-loss=2 15-loss=3 5-loss=1"},
    {3, "loss", false, {4, 2, 1, 3, 5, 6}, "10-loss=1 15-loss=3 20-loss=5 25-loss=6"},
    {-1, "loss", false, {2, 1, 3}, "0-loss=2 10-loss=3 5-loss=1"},
    {1, "loss", false, {2, 2, 2}, "0-loss=2 10-loss=2"}, /* the first of equal ones */
    {1, "loss", false, {2, NONE, 3}, "0-loss=2 10-loss=3"},
    {1, "loss", false, {2, (double)-INFINITY, NONE}, "0-loss=2 10"},
    {1, "loss", true, {NONE, NONE, NONE}, "10"},
    {1, "loss", false, {-1, -2, -1.5}, "10-loss=-1.5 5-loss=-2"},
    {1, "loss", true, {-1, -2, -1.5}, "0-loss=-1 10-loss=-1.5"},
    {1, "loss", false, {0.1, 1e-9, 1e300}, "10-loss=1e+300 5-loss=1e-09"},
    {1, "loss", false, {0.30000000000000004, 0.3, 123456.789}, "10-loss=123456.789 5-loss=0.3"}};

/* In one run, and in as many runs as there are saves. */
static void check_keeping(dp_ctx *ctx, const struct keeping *k, bool again)
{
    const dp_saver_config config = {
        .path = "run/*", .last = k->last, .best_by = k->best_by, .best_is_most = k->most};
    dp_saver *saver = saver_of(ctx, &config);
    int count = 6;
    while (!(fabs(k->scores[count - 1]) > 0) && !isnan(k->scores[count - 1]))
        count--;
    for (int i = 0; i < count; i++) {
        keep(ctx, saver, 5 * i, k->scores[i]);
        CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 5 * i);
        if (again) {
            dp_saver_destroy(saver);
            saver = saver_of(ctx, &config);
            CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 5 * i);
        }
    }
    check_folder("run", k->want);
    dp_saver_destroy(saver);
}

TEST_SLOW(the_newest_are_kept_and_the_best, 30)
{
    dp_ctx *ctx = open_cpus(1);
    enter_folder();
    for (size_t i = 0; i < sizeof keepings / sizeof keepings[0]; i++)
        for (int again = 0; again < 2; again++) {
            CHECK_INT(mkdir("run", 0777), 0);
            check_keeping(ctx, &keepings[i], again);
            CHECK_INT(system("rm -r run"), 0);
        }
    dp_close(ctx);
}

/* A number comes back from a name to its last bit: the larger of two neighbours loses. */
TEST(scores_are_exact_in_names)
{
    dp_ctx *ctx = open_cpus(1);
    uint64_t state = test_seed();
    enter_folder();
    for (int i = 0; i < 100; i++) {
        double score = 0, other;
        while (!isnormal(score)) {
            uint64_t bits = test_random(&state);
            memcpy(&score, &bits, sizeof score);
        }
        other = nextafter(score, (double)-INFINITY);
        dp_saver *saver =
            saver_of(ctx, &(dp_saver_config){.path = "s-*.st", .last = 3, .best_by = "loss"});
        keep(ctx, saver, 1, score);
        keep(ctx, saver, 2, other);
        keep(ctx, saver, 3, score);
        CHECK_INT(kept(ctx, saver, DP_SAVER_BEST), 2);
        dp_saver_destroy(saver);
        CHECK_INT(system("rm s-*.st"), 0);
    }
    dp_close(ctx);
}

/* Not the names of a saver, or not of this one: the number of another entry is in it. */
static const char *const strangers[] = {
    "s-.st",
    "s-01.st",
    "s-1",
    "s-1.st2",
    "t-1.st",
    "s-1x.st",
    "s-+1.st",
    "s- 1.st",
    "s--1.st",
    "s-1-loss.st",
    "s-1-loss=.st",
    "s-1-loss=x.st",
    "s-1-loss= 1.st",
    "s-1loss=1.st",
    "s-1-loss=1e.st",
    "s-1-loss=1-.st",
    "s-1234567890123456789.st",
    "s-1-acc=0.5.st",
    "s-1-=0.st",
    "s-1.st.part2",
    "s-1-loss=0000000000000000000000000000000000000000000000000000000000000001.st"};

TEST(other_files_are_left_alone)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    enter_folder();
    CHECK_INT(mkdir("in", 0777), 0);
    CHECK_INT(chdir("in"), 0);
    for (size_t i = 0; i < sizeof strangers / sizeof strangers[0]; i++)
        put_file(strangers[i], "x", 1);
    CHECK_INT(unlink("s-1-acc=0.5.st"), 0);
    CHECK_INT(unlink("s-1-=0.st"), 0);
    const dp_saver_config config = {.path = "s-*.st", .best_by = "loss"};
    dp_saver *saver = saver_of(ctx, &config);
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_LAST, &got), DP_ERR_NO_FILE,
                "dp_saver_load: 's-*.st': there is no such file");
    put_file("s-1-acc=0.5.st", "x", 1);
    put_file("s-1-=0.st", "x", 1);
    for (int i = 0; i < 3; i++)
        keep(ctx, saver, i, i + 1);
    CHECK_INT(count_names(".", ""), sizeof strangers / sizeof strangers[0] + 2);
    for (size_t i = 0; i < sizeof strangers / sizeof strangers[0]; i++)
        CHECK(access(strangers[i], F_OK) == 0);
    CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 2);
    CHECK_INT(kept(ctx, saver, DP_SAVER_BEST), 0);
    dp_saver_destroy(saver);
    CHECK_INT(rename("s-2-loss=3.st", "s-2-acc=3.st"), 0); /* still where a run has come to */
    saver = saver_of(ctx, &config);
    CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 2);
    keep(ctx, saver, 3, 9);
    CHECK(access("s-2-acc=3.st", F_OK) == 0);
    CHECK(access("s-0-loss=1.st", F_OK) == 0);
    saver = saver_of(ctx, &(dp_saver_config){.path = "s-*.st"}); /* which has no entry at all */
    keep(ctx, saver, 4, 0);
    keep(ctx, saver, 5, 0);
    CHECK(access("s-3-loss=9.st", F_OK) == 0);
    CHECK(access("s-4.st", F_OK) != 0);
    dp_close(ctx);
}

/* Parts that a killed process has left go, and those that are being written stay. */
TEST(parts_that_nobody_writes_go)
{
    dp_ctx *ctx = open_cpus(1);
    enter_folder();
    CHECK_INT(mkdir("run", 0777), 0);
    put_file("run/s7.part", "half", 4);
    put_file("run/s8-loss=4.part", "half", 4);
    put_file("run/s9.part", "half", 4);
    put_file("run/t9.part", "half", 4);
    put_file("run/.part", "half", 4);
    int other = open("run/s9.part", O_RDWR);
    CHECK_INT(flock(other, LOCK_EX), 0);
    dp_saver *saver = saver_of(ctx, &(dp_saver_config){.path = "run/s*", .last = -1});
    keep(ctx, saver, 1, 0);
    check_folder("run", "s1 s9.part t9.part");
    CHECK(access("run/.part", F_OK) == 0);
    close(other);
    keep(ctx, saver, 2, 0);
    check_folder("run", "s1 s2 t9.part");
    dp_close(ctx);
}

static void another_begins(void)
{
    CHECK_INT(unlink("s7.part"), 0);
    put_file("s7.part", "theirs", 6);
}

/* Its name was seen when it was that of a part that nobody wrote. */
TEST(a_part_that_another_has_just_begun_stays)
{
    dp_ctx *ctx = open_cpus(1);
    enter_folder();
    put_file("s7.part", "half", 4);
    dp_saver *saver = saver_at(ctx, "s*");
    refuse((struct refusal){.call = "flock", .at = 2, .hook = another_begins});
    keep(ctx, saver, 1, 0);
    check_folder(".", "s1 s7.part");
    keep(ctx, saver, 2, 0);
    check_folder(".", "s2");
    dp_close(ctx);
}

/* The file that was saved last, whatever the scores are, and whatever is kept. */
TEST(a_number_that_is_saved_again_has_one_file)
{
    static const int lasts[] = {1, 3, -1};
    dp_ctx *ctx = open_cpus(1);
    enter_folder();
    put_file("s48-acc=1", "x", 1);
    for (int i = 0; i < 3; i++) {
        dp_saver *saver =
            saver_of(ctx, &(dp_saver_config){.path = "s*", .last = lasts[i], .best_by = "loss"});
        keep(ctx, saver, 48, 0.9);
        check_folder(".", "s48-acc=1 s48-loss=0.9");
        keep(ctx, saver, 48, 0.5);
        check_folder(".", "s48-acc=1 s48-loss=0.5");
        keep(ctx, saver, 48, 9);
        check_folder(".", "s48-acc=1 s48-loss=9");
        CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 48);
        keep(ctx, saver, 48, (double)NAN);
        check_folder(".", "s48 s48-acc=1");
        dp_saver_destroy(saver);
        CHECK_INT(unlink("s48"), 0);
    }
    dp_close(ctx);
}

/* ---- where an earlier run has come to -------------------------------------------------------- */

static heard warned;

static void hear_warnings(const dp_log_record *record, void *user)
{
    (void)user;
    if (record->level == DP_LOG_WARN)
        snprintf(warned.lines[warned.count++], sizeof warned.lines[0], "%s", record->text);
}

TEST(a_run_goes_on_from_the_newest_that_can_be_read)
{
    dp_ctx *ctx = NULL;
    dp_value got;
    const dp_saver_config config = {.path = "./s*", .last = 4, .best_by = "loss"};
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .log = {.fn = hear_warnings}}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    enter_folder();
    dp_saver *saver = saver_of(ctx, &config);
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_LAST, &got), DP_ERR_NO_FILE,
                "dp_saver_load: './s*': there is no such file");
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_BEST, &got), DP_ERR_NO_FILE, "no such file");
    for (int i = 1; i <= 4; i++)
        keep(ctx, saver, i, 5 - i);
    CHECK_INT(kept(ctx, saver, 2), 2);
    CHECK_ERROR(dp_saver_load(saver, scope, 5, &got), DP_ERR_NO_FILE,
                "dp_saver_load: './s*': there is none with the number 5");
    CHECK_ERROR(dp_saver_save(saver, 3, DP_DICT(scope, {"n", dp_int(3)}), dp_none()),
                DP_ERR_INVALID,
                "dp_saver_save: './s*': number 3 comes after 4, which is kept already: to go on");
    dp_saver_destroy(saver);
    put_file("s4-loss=1", "7 bytes", 7);
    put_file("s3-loss=2", "half", 4);
    saver = saver_of(ctx, &config);
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_BEST, &got), DP_ERR_FILE,
                "dp_saver_load: './s*': dp_checkpoint_load: './s4-loss=1': 7 bytes are not");
    CHECK_ERROR(dp_saver_load(saver, scope, 4, &got), DP_ERR_FILE, "7 bytes are not");
    CHECK_INT(warned.count, 0);
    CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 2);
    CHECK_INT(warned.count, 2);
    CHECK_SAYS(warned.lines[0],
               "dp_saver_load takes an older file: dp_checkpoint_load: './s4-loss=1': 7");
    CHECK_SAYS(warned.lines[1], "'./s3-loss=2': 4 bytes are not");
    keep(ctx, saver, 3, 0.5); /* instead of one that cannot be read, and beside another */
    check_folder(".", "s1-loss=4 s2-loss=3 s3-loss=0.5 s4-loss=1");
    CHECK_INT(kept(ctx, saver, DP_SAVER_BEST), 3);
    for (int i = 1; i <= 3; i++) {
        char name[40];
        static const char *const names[] = {"s1-loss=4", "s2-loss=3", "s3-loss=0.5"};
        snprintf(name, sizeof name, "%s", names[i - 1]);
        put_file(name, "x", 1);
    }
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_LAST, &got), DP_ERR_FILE,
                "dp_saver_load: './s*': dp_checkpoint_load: './s4-loss=1': 7 bytes are not");
    dp_close(ctx);
}

/* The newest is a link that leads nowhere, and then a file with what there is no dtype for. */
TEST(whatever_the_newest_lacks_an_older_one_is_taken)
{
    static const char odd[] = "\x3a\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F8_E5M2\",\"shape\":[1],"
                              "\"data_offsets\":[0,1]}}x";
    dp_ctx *ctx = NULL;
    dp_value got;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .log = {.fn = hear_warnings}}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    enter_folder();
    warned.count = 0;
    dp_saver *saver = saver_at(ctx, "s*");
    keep(ctx, saver, 1, 0);
    CHECK_INT(symlink("/nowhere/x", "s9"), 0);
    CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 1);
    CHECK_INT(rename("s1", "1"), 0);
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_LAST, &got), DP_ERR_FILE,
                "'s9': it cannot be opened: No such file");
    CHECK_INT(rename("1", "s1"), 0);
    CHECK_INT(unlink("s9"), 0);
    put_file("s9", odd, sizeof odd - 1);
    CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 1);
    CHECK_INT(unlink("s1"), 0);
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_LAST, &got), DP_ERR_UNSUPPORTED, "F8_E5M2");
    CHECK_INT(warned.count, 4);
    CHECK_SAYS(warned.lines[1], "dp_saver_load takes an older file: dp_checkpoint_load: 's9': it");
    CHECK_SAYS(warned.lines[2], "F8_E5M2");
    dp_close(ctx);
}

/* A file without a * is always the same. */
TEST(one_file_is_replaced)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    enter_folder();
    dp_saver *saver = saver_at(ctx, "file");
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_LAST, &got), DP_ERR_NO_FILE,
                "'file': it cannot be opened: No such file or directory");
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_BEST, &got), DP_ERR_INVALID,
                "dp_saver_load: number is -2");
    CHECK_ERROR(dp_saver_load(saver, scope, 1, &got), DP_ERR_INVALID, "number is 1");
    put_file("file.part", "what a process that was killed has left, which is longer than all", 65);
    keep(ctx, saver, 7, 0);
    keep(ctx, saver, 5, 0); /* numbers are not looked at */
    CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 5);
    check_folder(".", "file");
    dp_close(ctx);
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static void move_away(void)
{
    CHECK_INT(rename("run", "away"), 0);
}

static const struct step { /* of a save, which fails */
    struct refusal refusal;
    const char *says;
    const char *after; /* files that are there then */
} steps[] = {
    {{"flock", 1, EWOULDBLOCK, NULL},
     "another process, or thread, is writing 'run/2.part'",
     "1 2.part"},
    {{"ftruncate", 1, EIO, NULL}, "cannot empty 'run/2.part': Input/output error", "1 2.part"},
    {{"fsync", 1, ENOSPC, NULL}, "cannot write 'run/2.part': No space left on device", "1"},
    {{"rename", 1, EIO, NULL}, "cannot rename 'run/2.part': Input/output error", "1"},
    {{"fsync", 2, EIO, NULL}, "cannot make sure of the name in 'run/': Input/output", "1 2"},
    {{"unlink", 1, EACCES, NULL}, "cannot remove 'run/1': Permission denied", "1 2"},
    {{"unlink", 1, ENOENT, NULL}, NULL, "1 2"},
    {{"fsync", 2, 0, move_away}, "cannot read the folder 'run/': No such file", "1 2"}};

static dp_status save_two(dp_saver *saver, dp_scope *scope)
{
    DP_TRY(dp_saver_save(saver, 2, tree_of(scope, "{'n': 2, 'x': f32[4]}"), dp_none()));
    return dp_saver_wait(saver);
}

TEST(every_step_of_a_save_fails)
{
    dp_ctx *ctx = open_cpus(1);
    enter_folder();
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_INT(mkdir("run", 0777), 0);
        dp_saver *saver = saver_at(ctx, "run/*");
        keep(ctx, saver, 1, 0);
        int files = open_files(), threads = count_threads();
        refuse(steps[i].refusal);
        dp_status status = save_two(saver, scope);
        refuse((struct refusal){.call = NULL});
        CHECK_STATUS(status, steps[i].says != NULL ? DP_ERR_FILE : DP_OK);
        if (steps[i].says != NULL)
            CHECK_SAYS(dp_last_error(), steps[i].says);
        if (access("away", F_OK) == 0)
            CHECK_INT(rename("away", "run"), 0);
        CHECK_OK(dp_saver_wait(saver)); /* it is told once, by the save or the wait */
        CHECK_INT(open_files(), files);
        while (count_threads() > threads) /* the system takes a moment to forget one */
            rest(1);
        check_folder("run", steps[i].after);
        CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), access("run/2", F_OK) == 0 ? 2 : 1);
        CHECK_OK(save_two(saver, scope));
        check_folder("run", "2");
        CHECK_INT(system("rm -r run"), 0);
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* Nobody but root may always start one more. */
TEST(thread_that_cannot_start_is_told_by_the_next_call)
{
    struct rlimit limit, none;
    CHECK(geteuid() != 0 || setuid(65534) == 0);
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value value = DP_DICT(scope, {"n", dp_int(2)});
    dp_saver *saver = saver_at(ctx, "s*");
    keep(ctx, saver, 1, 0);
    int files = open_files();
    CHECK_INT(getrlimit(RLIMIT_NPROC, &limit), 0);
    none = limit;
    none.rlim_cur = 0;
    CHECK_INT(setrlimit(RLIMIT_NPROC, &none), 0);
    CHECK_OK(dp_saver_save(saver, 2, value, dp_none()));
    CHECK_INT(setrlimit(RLIMIT_NPROC, &limit), 0);
    dp_status status = dp_saver_wait(saver);
    if (status == DP_OK) {
        leave_folder();
        SKIP("the number of threads cannot be limited here");
    }
    CHECK_STATUS(status, DP_ERR_NO_MEMORY);
    CHECK_SAYS(dp_last_error(), "dp_saver_wait: 's*': cannot start a thread: ");
    check_folder(".", "s1");
    CHECK_INT(open_files(), files);
    CHECK_OK(dp_saver_wait(saver));
    keep(ctx, saver, 2, 0);
    check_folder(".", "s2");
    dp_close(ctx);
}

static void another_saves(void)
{
    put_file("s2-loss=9", "theirs", 6);
}

/* Of the same number, with another score: before the file is in its place, and after. */
TEST(what_another_saves_meanwhile_stays)
{
    static const struct step moments[] = {{{"open", 1, 0, another_saves}, NULL, ""},
                                          {{"fsync", 1, 0, another_saves}, NULL, ""},
                                          {{"fsync", 2, 0, another_saves}, NULL, "s2-loss=1 "}};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log = DP_DICT(scope, {"loss", dp_int(1)});
    enter_folder();
    for (size_t i = 0; i < sizeof moments / sizeof moments[0]; i++) {
        char want[64];
        dp_saver *saver = saver_of(ctx, &(dp_saver_config){.path = "s*", .best_by = "loss"});
        keep(ctx, saver, 1, 5);
        refuse(moments[i].refusal);
        CHECK_OK(dp_saver_save(saver, 2, DP_DICT(scope, {"n", dp_int(2)}), log));
        CHECK_ERROR(dp_saver_wait(saver), DP_ERR_FILE,
                    "dp_saver_wait: 's*': another process has saved 's2-loss=9' while this one "
                    "saved 's2-loss=1', and that file stays");
        snprintf(want, sizeof want, "s1-loss=5 %ss2-loss=9", moments[i].after);
        check_folder(".", want);
        keep(ctx, saver, 3, 0);
        check_folder(".", "s3-loss=0");
        dp_saver_destroy(saver);
        CHECK_INT(unlink("s3-loss=0"), 0);
    }
    dp_close(ctx);
}

/* No room: files may grow to that size and no further, and training goes on. */
static void save_within(rlim_t most, bool fits)
{
    int status = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dp_ctx *ctx = open_cpus(1);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_tensor large;
        dp_saver *saver = saver_of(ctx, &(dp_saver_config){.path = "s*", .last = 3});
        CHECK_OK(dp_tensor_new(scope, (dp_device){0, 0}, DP_F64, DP_SHAPE(300000), &large));
        CHECK_OK(dp_fill(ctx, &large, dp_float(1)));
        dp_value value = DP_DICT(scope, {"large", dp_of(scope, &large)});
        CHECK_INT(setrlimit(RLIMIT_FSIZE, &(struct rlimit){most, most}), 0);
        CHECK_OK(dp_saver_save(saver, 2, value, dp_none()));
        if (fits)
            CHECK_OK(dp_saver_wait(saver));
        else
            CHECK_ERROR(dp_saver_wait(saver), DP_ERR_FILE,
                        "dp_saver_wait: 's*': cannot write 's2.part': File too large");
        _exit(EXIT_SUCCESS);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    check_folder(".", fits ? "s1 s2" : "s1");
}

TEST(a_full_disk_leaves_the_old_files)
{
    dp_ctx *ctx = open_cpus(1);
    const rlim_t limits[] = {0, 7, 100, 4096, 1 << 20, 2399999};
    enter_folder();
    dp_saver *saver = saver_of(ctx, &(dp_saver_config){.path = "s*", .last = 3});
    keep(ctx, saver, 1, 0);
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        save_within(limits[i], false);
    CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 1);
    save_within(2400200, true);
    dp_close(ctx);
}

/* The failure of a save is returned by the next one, which begins; what is wrong with that is
   returned by the one after it. */
TEST(a_save_tells_of_the_one_before)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got, value = DP_DICT(scope, {"n", dp_int(1)});
    const char *says = "dp_saver_save: 's*': cannot write 's1.part': Input/output error";
    enter_folder();
    dp_saver *saver = saver_at(ctx, "s*");
    refuse((struct refusal){.call = "fsync", .at = 1, .error = EIO});
    CHECK_OK(dp_saver_save(saver, 1, value, dp_none()));
    CHECK_ERROR(dp_saver_save(saver, 2, value, dp_none()), DP_ERR_FILE, says);
    CHECK_OK(dp_saver_save(saver, 3, value, dp_none()));
    CHECK_OK(dp_saver_wait(saver));
    check_folder(".", "s3");
    says = "dp_saver_save: 's*': cannot write 's4.part': Input/output error";
    refuse((struct refusal){.call = "fsync", .at = 1, .error = EIO});
    CHECK_OK(dp_saver_save(saver, 4, value, dp_none()));
    CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_LAST, &got)); /* tells nothing, forgets nothing */
    CHECK_ERROR(dp_saver_save(saver, 5, dp_int(5), dp_none()), DP_ERR_FILE, says);
    CHECK_ERROR(dp_saver_save(saver, 6, value, dp_none()), DP_ERR_INVALID,
                "dp_saver_save: 's*': the value is not a dict");
    CHECK_OK(dp_saver_wait(saver));
    check_folder(".", "s6");
    dp_close(ctx);
}

static const struct wrong {
    dp_saver_config config;
    dp_status status;
    const char *says;
} wrongs[] = {
    {{0}, DP_ERR_INVALID, "dp_saver_create: path is NULL"},
    {{.path = ""}, DP_ERR_INVALID, "path is no name of a file"},
    {{.path = "in/"}, DP_ERR_INVALID, "path is no name of a file"},
    {{.path = "a*b*"}, DP_ERR_INVALID, "'a*b*': there is one * at most, in the name of the file"},
    {{.path = "*/b"}, DP_ERR_INVALID, "there is one * at most, in the name of the file"},
    {{.path = "a", .last = 2}, DP_ERR_INVALID, "'a': several files are to be kept, and there is"},
    {{.path = "a", .last = -1}, DP_ERR_INVALID, "several files are to be kept"},
    {{.path = "a", .best_by = "x"}, DP_ERR_INVALID, "several files are to be kept"},
    {{.path = "*", .best_is_most = true}, DP_ERR_INVALID, "best_is_most is set, and best_by is"},
    {{.path = "*", .best_by = ""}, DP_ERR_INVALID, "best_by is '', which cannot be in a name"},
    {{.path = "*", .best_by = "a/b"}, DP_ERR_INVALID, "best_by is 'a/b', which cannot be in a"},
    {{.path = "*", .best_by = "a\n"}, DP_ERR_INVALID, "best_by is 'a?', which cannot be in a"},
    {{.path = "none/*"}, DP_ERR_FILE, "'none/*': cannot read the folder 'none/': No such file"}};

TEST(calls_that_make_no_sense)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got, value = DP_DICT(scope, {"n", dp_int(1)}), log = DP_DICT(scope, {"x", dp_int(1)});
    dp_saver *saver = NULL;
    enter_folder();
    for (size_t i = 0; i < sizeof wrongs / sizeof wrongs[0]; i++)
        CHECK_ERROR(dp_saver_create(ctx, &wrongs[i].config, &saver), wrongs[i].status,
                    wrongs[i].says);
    const dp_saver_config config = {.path = "s*", .best_by = "loss"};
    CHECK_ERROR(dp_saver_create(NULL, &config, &saver), DP_ERR_INVALID, "dp_saver_create: ctx");
    CHECK_ERROR(dp_saver_create(ctx, NULL, &saver), DP_ERR_INVALID, "dp_saver_create: config");
    CHECK_ERROR(dp_saver_create(ctx, &config, NULL), DP_ERR_INVALID, "dp_saver_create: out");
    CHECK(saver == NULL);
    saver = saver_of(ctx, &config);
    CHECK_ERROR(dp_saver_save(NULL, 1, value, log), DP_ERR_INVALID, "dp_saver_save: saver is NULL");
    CHECK_ERROR(dp_saver_save(saver, -1, value, log), DP_ERR_INVALID, "number is -1");
    CHECK_ERROR(dp_saver_save(saver, INT64_MAX, value, log), DP_ERR_INVALID, "number is 922");
    CHECK_ERROR(dp_saver_save(saver, 1, value, log), DP_ERR_INVALID,
                "dp_saver_save: 's*': the log has no number 'loss'");
    CHECK_ERROR(dp_saver_save(saver, 1, value, dp_int(2)), DP_ERR_INVALID, "no number 'loss'");
    CHECK_ERROR(dp_saver_save(saver, 1, dp_none(), dp_none()), DP_ERR_INVALID, "is not a dict");
    CHECK_ERROR(dp_saver_wait(NULL), DP_ERR_INVALID, "dp_saver_wait: saver is NULL");
    CHECK_ERROR(dp_saver_load(NULL, scope, 1, &got), DP_ERR_INVALID, "dp_saver_load: saver");
    CHECK_ERROR(dp_saver_load(saver, NULL, 1, &got), DP_ERR_INVALID, "dp_saver_load: scope");
    CHECK_ERROR(dp_saver_load(saver, scope, 1, NULL), DP_ERR_INVALID, "dp_saver_load: out");
    CHECK_ERROR(dp_saver_load(saver, scope, -3, &got), DP_ERR_INVALID, "number is -3");
    dp_saver_destroy(NULL);
    CHECK_OK(dp_saver_save(saver, INT64_MAX / 10, value, dp_none()));
    CHECK_OK(dp_saver_wait(saver));
    check_folder(".", "s922337203685477580");
    CHECK_INT(kept(ctx, saver, DP_SAVER_LAST), 1);
    dp_close(ctx);
}

/* Saves for as long as it lives. */
static void save_for_ever(void)
{
    static float numbers[40000];
    dp_ctx *ctx = open_cpus(1);
    dp_saver *saver = saver_of(ctx, &(dp_saver_config){.path = "s*", .last = 2, .best_by = "loss"});
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    dp_status status = dp_saver_load(saver, scope, DP_SAVER_LAST, &got);
    int64_t n = status == DP_OK ? dp_get(got, "n").as.i + 1 : 1;
    CHECK(status == DP_OK || status == DP_ERR_NO_FILE);
    dp_scope_end(scope);
    for (;; n++) {
        scope = dp_scope_begin(ctx);
        for (int k = 0; k < 40000; k++)
            numbers[k] = (float)n;
        dp_value all = dp_array(scope, numbers, DP_F32, 1, (int64_t[]){40000});
        CHECK_OK(dp_saver_save(saver, n, DP_DICT(scope, {"x", all}, {"n", dp_int(n)}),
                               DP_DICT(scope, {"loss", dp_float(n == 3 ? 0 : 1.0 / (double)n)})));
        dp_scope_end(scope);
    }
}

/* Whenever it is killed, the newest is whole, the best is there, and little else. */
TEST_SLOW(kill_9_leaves_whole_files, 30)
{
    dp_ctx *ctx = open_cpus(1);
    uint64_t state = test_seed();
    enter_folder();
    for (int i = 0; i < 12; i++) {
        dp_value got;
        kill_beside(save_for_ever, "s3-loss=0", &state, 9000000);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_saver *saver =
            saver_of(ctx, &(dp_saver_config){.path = "s*", .last = 2, .best_by = "loss"});
        CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_LAST, &got));
        const float *x = dp_get(got, "x").as.t->data;
        for (int k = 0; k < 40000; k++)
            CHECK_F64(x[k], dp_get(got, "n").as.i, 0);
        CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_BEST, &got));
        CHECK_INT(dp_get(got, "n").as.i, 3);
        dp_scope_end(scope);
        CHECK(count_names(".", "") <= 5); /* two, the best, one too many, a part */
        dp_saver_destroy(saver);
    }
    dp_close(ctx);
}

/* ---- several processes ----------------------------------------------------------------------- */

static void save_in_job(meeting *m)
{
    dp_ctx *ctx = open_job(m, 2, dp_cpu());
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value value = dp_none(), got, log = dp_none();
    dp_saver *saver = NULL;
    const dp_saver_config none = {.path = m->process == 0 ? "none/*" : "*"};
    const dp_saver_config config = {.path = "job-*", .best_by = "loss", .last = 2};
    CHECK_ERROR(dp_saver_create(ctx, &none, &saver), DP_ERR_FILE,
                "rank 0: cannot read the folder 'none/': No such file");
    saver = saver_of(ctx, &config);
    CHECK_ERROR(dp_saver_load(saver, scope, DP_SAVER_LAST, &got), DP_ERR_NO_FILE,
                "dp_saver_load: 'job-*': rank 0: there is no such file");
    if (m->process == 0) {
        value =
            tree_on(ctx, scope, tree_of(scope, "{'a': f32[3], 'n': 1}"), dp_local_device(ctx, 1));
        log = DP_DICT(scope, {"loss", dp_float(1)});
    }
    CHECK_OK(dp_saver_save(saver, 1, value, log));
    CHECK_OK(dp_saver_wait(saver));
    dp_close(ctx);
}

static void tell_in_job(meeting *m)
{
    dp_ctx *ctx = open_job(m, 2, dp_cpu());
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got, value = m->process == 0 ? DP_DICT(scope, {"n", dp_int(2)}) : dp_none();
    dp_value log = DP_DICT(scope, {"loss", dp_float(2)});
    dp_saver *saver = saver_of(ctx, &(dp_saver_config){.path = "job-*", .best_by = "loss"});
    CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_LAST, &got));
    CHECK_TREE(ctx, got, "{'a': f32[3]=0 1 2, 'n': 1}");
    if (m->process == 0)
        refuse((struct refusal){.call = "fsync", .at = 1, .error = ENOSPC});
    CHECK_OK(dp_saver_save(saver, 2, value, log));
    CHECK_ERROR(dp_saver_save(saver, 3, value, log), DP_ERR_FILE,
                "dp_saver_save: 'job-*': rank 0: cannot write 'job-2-loss=2.part': No space left");
    CHECK_ERROR(dp_saver_save(saver, 4, dp_int(4), log), DP_ERR_INVALID,
                "dp_saver_save: 'job-*': rank 0: the value is not a dict");
    CHECK_ERROR(dp_saver_save(saver, 2, value, log), DP_ERR_INVALID,
                "dp_saver_save: 'job-*': rank 0: number 2 comes after 3");
    CHECK_OK(dp_saver_wait(saver));
    CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_BEST, &got));
    CHECK_INT(dp_get(got, "n").as.i, 1);
    CHECK_OK(dp_saver_load(saver, scope, 3, &got));
    CHECK_INT(dp_get(got, "n").as.i, 2);
    CHECK_OK(dp_barrier(ctx));
    if (m->process == 0)
        put_file("job-9", "7 bytes", 7);
    CHECK_OK(dp_saver_load(saver, scope, DP_SAVER_LAST, &got));
    CHECK_INT(dp_get(got, "n").as.i, 2);
    CHECK_ERROR(dp_saver_load(saver, scope, 9, &got), DP_ERR_FILE, "7 bytes are not a safetensors");
    CHECK_OK(dp_barrier(ctx));
    dp_saver_destroy(saver);
    dp_close(ctx);
}

static void hear_how_it_went(const char *gpus)
{
    enter_folder();
    if (gpus != NULL)
        on_gpus(gpus, save_in_job);
    else
        in_processes(3, save_in_job);
    check_folder(".", "job-1-loss=1");
    if (gpus != NULL)
        on_gpus(gpus, tell_in_job);
    else
        in_processes(3, tell_in_job);
    check_folder(".", "job-1-loss=1 job-3-loss=2 job-9");
}

TEST(all_processes_hear_how_it_went)
{
    hear_how_it_went(NULL);
}

#if defined(TEST_SIM)
TEST(all_processes_hear_how_it_went_on_gpus)
{
    hear_how_it_went("223");
}
#endif

static struct job {
    bool sharded, shared; /* state of the optimizer; parameters */
} job;

/* Steps go on while the file is written: those of others, too, who may write to parameters that
   process 0 has copied. */
static void train_on(meeting *m)
{
    dp_config config = config_of(m, 2);
    dp_ctx *ctx = NULL;
    config.colls = NULL;
    config.shards = 8;
    CHECK_OK(dp_open(&config, &ctx));
    training t = train_begin(ctx, job.sharded, job.shared);
    dp_saver *saver = saver_of(ctx, &(dp_saver_config){.path = "s*", .last = 2});
    for (int step = 0; step < 6; step++) {
        dp_scope *scope = dp_scope_begin(ctx);
        train_steps(&t, step, step + 1);
        CHECK_OK(dp_saver_save(saver, step + 1, train_value(&t, scope, step + 1, dp_optim_view),
                               dp_none()));
        dp_scope_end(scope);
    }
    CHECK_OK(dp_saver_wait(saver));
    dp_close(ctx);
}

static void train_alone(const char *path, int last)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .shards = 8}, &ctx));
    training t = train_begin(ctx, false, false);
    train_steps(&t, 0, last);
    train_save(&t, path, last);
    dp_close(ctx);
}

TEST_SLOW(a_file_is_that_of_one_device, 30)
{
    enter_folder();
    train_alone("five", 5);
    train_alone("six", 6);
    for (int way = 0; way < 3; way++) {
        job = (struct job){.sharded = way > 0, .shared = way == 2};
        in_processes(2, train_on);
        check_same_files("s5", "five");
        check_same_files("s6", "six");
        CHECK_INT(unlink("s5") + unlink("s6"), 0);
    }
    check_folder(".", "five six");
}

/* Whoever waits for process 0 is told every 64 MiB that it writes: process 0 comes to its wait in
   time for that in one try of many. */
static void wait_for_long(meeting *m)
{
    static char lines[4000];
    dp_ctx *ctx = open_job(m, 1, dp_cpu());
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor rows = tree_tensor(scope, DP_F64, 2, (int64_t[]){1, 1 << 17}, 0);
    dp_value value = dp_none();
    dp_saver *saver = saver_at(ctx, "long");
    bool told = false;
    rows.shape[0] = 67;
    rows.stride[0] = 0;
    if (m->process == 0)
        value = DP_DICT(scope, {"rows", dp_of(scope, &rows)});
    for (int i = 0; i < 50 && !told; i++) {
        char want[40];
        int before = 0;
        dp_recent_collectives(ctx, lines, sizeof lines);
        if (sscanf(lines, "collective %d", &before) != 1)
            before = 0;
        if (m->process == 0)
            refuse((struct refusal){.call = "fsync", .at = 1, .hook = rest_here});
        CHECK_OK(dp_saver_save(saver, i, value, dp_none()));
        CHECK_OK(dp_saver_wait(saver));
        dp_recent_collectives(ctx, lines, sizeof lines);
        snprintf(want, sizeof want, "collective %d, broadcast of ", before + 4);
        told = strstr(lines, want) != NULL;
        snprintf(want, sizeof want, "collective %d, broadcast of ", before + 5);
        CHECK(strstr(lines, want) == NULL);
    }
    CHECK(told);
    dp_close(ctx);
}

TEST_SLOW(waiting_process_learns_of_a_long_write, 30)
{
    enter_folder();
    in_processes(2, wait_for_long);
    check_folder(".", "long");
}

/* ---- no memory ------------------------------------------------------------------------------- */

static dp_status all_of_it(dp_ctx *ctx, dp_scope *scope, dp_value value, dp_saver **saver)
{
    dp_value got;
    DP_TRY(dp_saver_create(ctx, &(dp_saver_config){.path = "s*", .last = 2, .best_by = "loss"},
                           saver));
    DP_TRY(dp_saver_save(*saver, 2, value, dp_none()));
    DP_TRY(dp_saver_wait(*saver));
    DP_TRY(dp_saver_save(*saver, 3, DP_DICT(scope, {"n", dp_int(3)}, {"v", value}, {"w", value}),
                         dp_none()));
    DP_TRY(dp_saver_load(*saver, scope, DP_SAVER_LAST, &got));
    return dp_saver_wait(*saver);
}

/* Every allocation in turn: nothing leaks, there is a file that can be read, and the next save, for
   which there is memory, makes another. */
static void fail_each(bool poison)
{
    test_allocator counter = {0};
    dp_config config = {
        .device_count = 2, .poison = poison, .allocator = test_allocator_of(&counter)};
    bool fired = true;
    for (size_t at = 1; fired; at += (size_t)test_step()) {
        dp_ctx *ctx = NULL;
        counter = (test_allocator){0};
        CHECK_OK(dp_open(&config, &ctx));
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value value = tree_of(scope, "{'n': 2, 'w': f32[3000]}");
        dp_saver *saver = NULL, *first = saver_at(ctx, "s*");
        CHECK_OK(dp_saver_save(first, 1, tree_of(scope, "{'n': 1}"), dp_none()));
        CHECK_OK(dp_saver_wait(first));
        dp_saver_destroy(first);
        counter.fail_at = counter.call_count + at;
        dp_status status = all_of_it(ctx, scope, value, &saver);
        fired = counter.fail_count > 0;
        counter.fail_at = 0;
        CHECK(status == DP_OK || (fired && status == DP_ERR_NO_MEMORY));
        CHECK(count_names(".", "") <= 2);
        if (saver != NULL) {
            CHECK_OK(dp_saver_save(saver, 4, value, dp_none()));
            CHECK_OK(dp_saver_wait(saver));
            CHECK_OK(dp_file_write(ctx, "other", value));
            check_same_files("s4", "other");
            CHECK_INT(unlink("other"), 0);
        }
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
        ctx = open_cpus(1);
        first = saver_of(ctx, &(dp_saver_config){.path = "s*", .last = 3});
        CHECK(kept(ctx, first, DP_SAVER_LAST) >= 1);
        CHECK(count_names(".", "") <= 2);
        dp_close(ctx);
        CHECK_INT(system("rm s*"), 0);
    }
}

TEST_SLOW(every_allocation_fails_once, 60)
{
    enter_folder();
    fail_each(false);
    fail_each(true);
}
