#!/usr/bin/env python3
"""plant.py - does the explorer find what violates the claims of dp/members.h?

     plant.py FOLDER TURN TURNS CC FLAGS...

Each plant changes one place of dp/members.h, and the explorer has to find a violation in what it
becomes. Of TURNS turns, each has as many plants, and all together have all. Prints TAP."""

import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

PLANTS = [
    # name, what stands there, what stands there then
    ("any half is a quorum", "(2 * marked == all && first >= 0 && (marks[first] & mark) != 0)", "2 * marked == all"),
    ("a third is a quorum", "return 2 * marked > all ||", "return 3 * marked > all ||"),
    ("a proposer needs no promises", "return dp__roster_memory(dp__roster_of(m), m->count) != 0 ||\n           dp__is_quorum(dp__roster_of(m), m->count, dp__marks_of(m), DP__MARK_SAID);", "return true;"),
    ("a promise does not say what was accepted", ".other = m->accepted,", ".other = 0,"),
    ("a proposer forgets what it has accepted itself", "m->best = m->accepted;", "m->best = 0;"),
    ("the last that was accepted is proposed", "if (vote->other > m->best) {", "if (vote->other > 0) {"),
    ("the first that was accepted is proposed", "if (vote->other > m->best) {", "if (vote->other > 0 && m->best == 0) {"),
    ("ballots of two owners are equal", "return round << 32 | (uint64_t)(seat + 1);", "return round << 32 | (uint64_t)(seat > 9) | 1;"),
    ("what was promised is forgotten", "    m->promised = ballot;\n    dp__members_wait", "    dp__members_wait"),
    ("a lower ballot is accepted", "if (vote->ballot < m->promised) {\n        dp__reject(m, out, vote);\n        return;\n    }\n    dp__promise(m, out, vote->ballot);\n    m->accepted", "dp__promise(m, out, vote->ballot);\n    m->accepted"),
    ("a promise for another ballot counts", "if (m->role != DP__ROLE_PREPARES || vote->ballot != m->ballot)", "if (m->role != DP__ROLE_PREPARES)"),
    ("an acceptance of another ballot counts", "if (m->role != DP__ROLE_PROPOSES || vote->ballot != m->ballot)", "if (m->role != DP__ROLE_PROPOSES)"),
    ("votes of lower numbers count", "} else if (vote->number < m->number) {", "} else if (vote->number + 1 < m->number) {"),
    ("what was accepted for one number stays for the next", "m->promised = m->accepted = m->ballot", "m->promised = m->ballot"),
    ("newcomers outvote the others", "!dp__is_quorum(places, m->count, dp__marks_of(m), DP__MARK_SAID))", "false)"),
    ("who was let in counts as a newcomer again", "    dp__newcomers_forget(m);\n", ""),
    ("who has left goes on", "vote->number > m->number && m->role != DP__ROLE_LEFT &&\n            (m->number", "vote->number > m->number &&\n            (m->number"),
    ("who is not in the roster meets the others", "seat >= 0 ? DP__ROLE_MEETS : DP__ROLE_LEFT;", "DP__ROLE_MEETS;"),
    ("a decision is taken twice", "if (vote->number > m->number && m->role != DP__ROLE_LEFT &&", "if (vote->number >= m->number && m->role != DP__ROLE_LEFT &&"),
    ("who has promised runs again", "if (m->role == DP__ROLE_MEETS)\n            m->role = DP__ROLE_RUNS;", "if (m->role == DP__ROLE_MEETS || m->role == DP__ROLE_WAITS)\n            m->role = DP__ROLE_RUNS;"),
    ("who runs promises, and goes on", "    dp__members_wait(m, out, DP__FOR_PROPOSER);", "    if (m->role != DP__ROLE_RUNS)\n        dp__members_wait(m, out, DP__FOR_PROPOSER);"),
    ("who has claimed a word takes its own roster", "dp__adopt(m, out, event->vote.number, event->vote.places);", "dp__adopt(m, out, m->number + 1, dp__proposed_of(m));"),
    ("the words of two machines decide one number", "        if (places[s].memory != places[first].memory)\n            return 0;\n", ""),
    ("one without a word counts as one that shares it", "first = first < 0 ? s : first;", "first = first < 0 || places[first].memory == 0 ? s : first;"),
    ("who is behind is not answered", "    } else if (vote->number < m->number) {\n        dp__answer_late(m, out, vote);\n", "    } else if (vote->number < m->number) {\n"),
    ("a proposer waits for ever", "    else if (m->role == DP__ROLE_PREPARES || m->role == DP__ROLE_PROPOSES)\n        dp__members_wait(m, out, DP__FOR_AGAIN);\n", ""),
    ("a proposer that may go on waits for those that are gone", "    else if (m->role == DP__ROLE_PREPARES && dp__has_promises(m))\n        dp__propose(m, out);\n", ""),
]



def run(command):
    return subprocess.run(command, capture_output=True, text=True)


def found(output):
    """The steps to the violation, and the claim."""
    steps = re.search(r"^#   (\d+) steps$", output, re.M)
    claim = [line[4:] for line in output.splitlines() if line.startswith("#   (")]
    return "%s steps: %s" % (steps[1], claim[0]) if steps and claim else None


def plant(folder, number, old, new, cc):
    """What the explorer finds; None: nothing. Or why it cannot be tried."""
    whole = open(os.path.join(HERE, "../../dp/members.h")).read()
    header = os.path.abspath(os.path.join(folder, "members_%d.h" % number))
    program = os.path.join(folder, "explore_%d" % number)
    if whole.count(old) != 1:
        return None, "what it changes stands %d times in dp/members.h" % whole.count(old)
    with open(header, "w") as file:
        file.write(whole.replace(old, new))
    made = run(cc + ["-w", '-DMEMBERS="%s"' % header, os.path.join(HERE, "explore.c"), "-o", program])
    if made.returncode != 0:
        return None, "it does not compile: " + made.stderr.strip().splitlines()[0]
    way = found(run([program, "--first"]).stdout)
    return way, way or "nothing is found"


def main():
    folder, turn, turns, cc = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    os.makedirs(folder, exist_ok=True)
    failed = 0
    for number, (name, old, new) in enumerate(PLANTS):
        if number % turns != turn % turns:
            continue
        way, text = plant(folder, number, old, new, cc)
        print("%s - planted: %s # %s" % ("ok" if way else "not ok", name, text), flush=True)
        failed += not way
    sys.exit(failed > 0)


main()
