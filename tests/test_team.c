/* test_team.c - the inner parts of dp_cpu.h that no public function shows: waits that learn, who
   takes which part of the work, and how many cores there are. The implementation is in this file
   once more, static. */

#define DP_STATIC
#define DP_NO_STB_DS_IMPLEMENTATION
#define DP_IMPLEMENTATION
#include "../dp.h"

#include <sys/stat.h>
#include "test.h"

/* ---- how many cores there are ---------------------------------------------------------------- */

#if defined(__linux__)
TEST(a_quota_is_rounded_up_to_cores)
{
    CHECK_INT(dp__quota_cores("200000 100000"), 2);
    CHECK_INT(dp__quota_cores("150000 100000\n"), 2);
    CHECK_INT(dp__quota_cores("100001 100000"), 2);
    CHECK_INT(dp__quota_cores("1000 100000"), 1);
    CHECK_INT(dp__quota_cores("400000\n50000\n"), 8);
}

TEST(what_is_no_quota_limits_nothing)
{
    static const char *const texts[] = {"",
                                        "max 100000",
                                        "max",
                                        "-1\n100000\n",
                                        "100000",
                                        "100000 ",
                                        "100000 x",
                                        "0 100000",
                                        "100000 0",
                                        "100000 -5",
                                        "12x 100000",
                                        "\xff\xfe 1",
                                        "9223372036854775807 1",
                                        "99999999999999999999999999 1"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        CHECK_INT(dp__quota_cores(texts[i]), 0);
    }
    CHECK_INT(dp__quota_cores("1 99999999999999999999999999"), 1);
}

static void check_group(const char *lines, const char *controller, const char *want)
{
    int bytes = 0;
    char path[64] = "";
    const char *got = dp__quota_group(lines, controller, &bytes);
    CHECK_INT(got != NULL, want != NULL);
    if (want != NULL) {
        snprintf(path, sizeof path, "%.*s", bytes, got);
        CHECK_STR(path, want);
    }
}

TEST(groups_are_found_by_their_controller)
{
    const char *both = "12:cpuset:/a\n4:cpuacct,cpu,x:/b/c\n1:name=systemd:/:d\n0::/e\n";
    check_group(both, "cpu", "/b/c");
    check_group(both, "cpuset", "/a");
    check_group(both, "name=systemd", "/:d");
    check_group(both, "", "/e");
    check_group(both, "cp", NULL);
    check_group("0::/", "cpu", NULL);
    check_group("0::/", "", "/");
    check_group("3:cpu:/last", "cpu", "/last");
    check_group("3:cpu:/", "", NULL);
    check_group("", "", NULL);
    check_group("\n\n::\n", "", "");
    check_group("cpu\n7\n7:cpu\n:", "cpu", NULL);
}

static void put(const char *root, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')) != NULL; *at++ = '/') {
        *at = '\0';
        mkdir(path, 0700);
    }
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK_INT(fclose(file), 0);
}

/* A directory that stands for /proc/self and for the mount, both. */
TEST(the_least_quota_of_a_group_and_those_around_it_counts)
{
    char root[] = P_tmpdir "/dp-quota-XXXXXX", remove[sizeof root + 8];
    CHECK(mkdtemp(root) != NULL);
    CHECK_INT(dp__quota_count(root, root), 0);
    put(root, "cgroup", "2:cpu,cpuacct:/out/in\n0::/out/in/none\n");
    CHECK_INT(dp__quota_count(root, root), 0);
    put(root, "cpu/cpu.cfs_quota_us", "-1\n");
    put(root, "cpu/cpu.cfs_period_us", "100000\n");
    CHECK_INT(dp__quota_count(root, root), 0);
    put(root, "cpu/out/cpu.cfs_quota_us", "800000\n");
    put(root, "cpu/out/cpu.cfs_period_us", "100000\n");
    CHECK_INT(dp__quota_count(root, root), 8);
    put(root, "out/in/cpu.max", "max 100000\n");
    CHECK_INT(dp__quota_count(root, root), 8);
    put(root, "out/in/cpu.max", "650000 100000\n");
    CHECK_INT(dp__quota_count(root, root), 7);
    put(root, "out/cpu.max", "900000 100000\n");
    CHECK_INT(dp__quota_count(root, root), 7);
    put(root, "cpu/out/in/cpu.cfs_quota_us", "250000\n");
    put(root, "cpu/out/in/cpu.cfs_period_us", "100000\n");
    CHECK_INT(dp__quota_count(root, root), 3);
    put(root, "cpu.max", "100000 100000\n");
    CHECK_INT(dp__quota_count(root, root), 1);
    snprintf(remove, sizeof remove, "rm -r %s", root);
    CHECK_INT(system(remove), 0);
}

TEST(a_path_that_is_too_long_limits_nothing)
{
    static char lines[3000];
    memset(lines, 'x', sizeof lines - 1);
    memcpy(lines, "0::/", 4);
    CHECK_INT(dp__quota_least(lines, "", "/sys/fs/cgroup"), 0);
}
#endif
