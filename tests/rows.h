/* rows.h - how lists of cores are read, and a row of cores is divided: parts of >>nodes that no
   public function shows, as no machine of the tests has so many cores. In dp.c, after the
   implementation. */

#include "test.h"

#if defined(__linux__)
#include "nodes.h"

static void check_list(const char *text, const char *want)
{
    dp__cores cores;
    char got[64] = "";
    memset(&cores, 0xff, sizeof cores);
    CHECK(dp__cores_listed(text, &cores));
    for (int core = 0; core < DP__CORES_MAX; core++) {
        if (dp__cores_have(&cores, core)) {
            size_t used = strlen(got);
            snprintf(got + used, sizeof got - used, "%d ", core);
        }
    }
    CHECK_STR(got, want);
}

TEST(lists_name_cores)
{
    check_list("0\n", "0 ");
    check_list("0", "0 ");
    check_list("0-3,8,10-11\n", "0 1 2 3 8 10 11 ");
    check_list("5-5\n", "5 ");
    check_list("63-64,1023\n", "63 64 1023 ");
    check_list("7,3,3-4\n", "3 4 7 ");
    check_list("007\n", "7 ");
    check_list("\n", "");
}

TEST(what_is_no_list_names_nothing)
{
    static const char *const texts[] = {"",
                                        "a\n",
                                        "-1\n",
                                        "1-\n",
                                        "3-1\n",
                                        "0,\n",
                                        ",0\n",
                                        "0,,1\n",
                                        "0 1\n",
                                        "0-1-2\n",
                                        "1024\n",
                                        "0-1024\n",
                                        "99999999999999999999\n",
                                        "0\n\n",
                                        "0\n1\n",
                                        "0x1\n",
                                        "\n0\n",
                                        "+1\n"};
    dp__cores cores;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        CHECK(!dp__cores_listed(texts[i], &cores));
    }
}

TEST(a_row_has_the_cores_node_by_node)
{
    static const int nodes[] = {0, 2, 2, 2, 10, 255}, cores[] = {9, 0, 1, 4, 3, 1023};
    dp__row row;
    topology_put("node10", "cpulist", "3\n"); /* not in order */
    topology_put("node2", "cpulist", "0-1,4\n");
    topology_put("node0", "cpulist", "9\n");
    topology_put("node255", "cpulist", "1023");
    topology_put("node7", "cpulist", "\n"); /* of memory alone */
    topology_put("node256", "cpulist", "8\n");
    topology_put("node", "cpulist", "8\n");
    topology_put("node3x", "cpulist", "8\n");
    topology_put("nodf4", "cpulist", "8\n");
    topology_put("power", "cpulist", "8\n");
    CHECK(dp__os_row(&row));
    CHECK_INT(row.count, 6);
    CHECK_INT(row.node_count, 4);
    for (int i = 0; i < 6; i++) {
        CHECK_INT(row.node[i], nodes[i]);
        CHECK_INT(row.core[i], cores[i]);
    }
    topology_put("node9", "cpulist", NULL); /* whose list cannot be read */
    CHECK(!dp__os_row(&row));
    topology_remove();
    CHECK(!dp__os_row(&row));
    CHECK_INT(row.count, 0);
}

TEST(a_row_has_no_more_cores_than_fit)
{
    dp__row row;
    topology_put("node0", "cpulist", "0-1023\n");
    CHECK(dp__os_row(&row));
    CHECK_INT(row.count, DP__CORES_MAX);
    CHECK_INT(row.core[DP__CORES_MAX - 1], DP__CORES_MAX - 1);
    topology_put("node1", "cpulist", "5\n");
    CHECK(!dp__os_row(&row));
    topology_remove();
}

/* Each second core, as on machines that count them round the nodes. */
TEST(the_longest_list_is_read_and_a_longer_one_is_none)
{
    static char text[4000];
    dp__row row;
    for (int core = 0; core < DP__CORES_MAX; core += 2) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%d", core > 0 ? "," : "", core);
    }
    topology_put("node0", "cpulist", text);
    CHECK(dp__os_row(&row));
    CHECK_INT(row.count, DP__CORES_MAX / 2);
    for (size_t i = 0; i < 2559; i++) { /* as much as is read */
        text[i] = i % 2 == 0 ? '0' : ',';
    }
    text[2559] = '\0';
    topology_put("node0", "cpulist", text);
    CHECK(!dp__os_row(&row));
    topology_remove();
}
#endif

static void check_seats(int cores, int count, const char *want)
{
    char got[128] = "";
    for (int place = 0; place < count; place++) {
        dp__seats seats = dp__seats_of((dp__seats){100, cores}, (dp__share){place, count});
        size_t used = strlen(got);
        snprintf(got + used, sizeof got - used, "%d-%d ", seats.first - 100,
                 seats.first + seats.count - 101);
    }
    CHECK_STR(got, want);
}

TEST(a_row_is_divided_into_parts)
{
    check_seats(1, 1, "0-0 ");
    check_seats(8, 1, "0-7 ");
    check_seats(8, 2, "0-3 4-7 ");
    check_seats(8, 3, "0-2 3-5 6-7 ");
    check_seats(7, 5, "0-1 2-3 4-4 5-5 6-6 ");
    check_seats(3, 3, "0-0 1-1 2-2 ");
    check_seats(2, 3, "0-0 0-0 1-1 ");
    check_seats(3, 5, "0-0 0-0 1-1 1-1 2-2 ");
    check_seats(1, 4, "0-0 0-0 0-0 0-0 ");
}

static const char *nodes_of(const dp__row *row, dp__share process, dp__share device, char *text)
{
    dp__cores nodes = {{0}}, cores;
    dp__seats own = dp__seats_of((dp__seats){0, row->count}, process);
    dp__add_nodes_of(row, dp__seats_of(own, device), &nodes);
    dp__cores_of_nodes(row, &nodes, &cores);
    text[0] = '\0';
    for (int core = 0; core < 64; core++) {
        if (dp__cores_have(&cores, core)) {
            sprintf(text + strlen(text), "%d ", core);
        }
    }
    return text;
}

/* Two nodes of four cores, as they are often counted, and a third one of three. */
TEST(parts_keep_to_whole_nodes)
{
    static const int cores[] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10};
    static const char first[] = "0 2 4 6 ", second[] = "1 3 5 7 ", third[] = "8 9 10 ";
    char text[256];
    dp__row row = {.count = 11, .node_count = 3};
    for (int i = 0; i < 11; i++) {
        row.node[i] = (uint8_t)(i < 4 ? 0 : i < 8 ? 1 : 6);
        row.core[i] = (uint16_t)cores[i];
    }
    const dp__share alone = {0, 1};
    CHECK_STR(nodes_of(&row, alone, alone, text), "0 1 2 3 4 5 6 7 8 9 10 ");
    CHECK_STR(nodes_of(&row, alone, (dp__share){0, 3}, text), first); /* seats 0-3, 4-7, 8-10 */
    CHECK_STR(nodes_of(&row, alone, (dp__share){1, 3}, text), second);
    CHECK_STR(nodes_of(&row, alone, (dp__share){2, 3}, text), third);
    CHECK_STR(nodes_of(&row, (dp__share){0, 2}, alone, text), "0 1 2 3 4 5 6 7 "); /* 0-5 */
    CHECK_STR(nodes_of(&row, (dp__share){1, 2}, alone, text), "1 3 5 7 8 9 10 ");
    CHECK_STR(nodes_of(&row, (dp__share){0, 2}, (dp__share){0, 2}, text), first); /* 0-2 */
    CHECK_STR(nodes_of(&row, (dp__share){0, 2}, (dp__share){1, 2}, text),
              "0 1 2 3 4 5 6 7 "); /* 3-5 */
    CHECK_STR(nodes_of(&row, (dp__share){10, 11}, (dp__share){4, 5}, text), third);
    CHECK_STR(nodes_of(&row, (dp__share){3, 4}, (dp__share){0, 3}, text), third); /* 9-10 */
}
