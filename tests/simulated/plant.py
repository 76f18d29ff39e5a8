#!/usr/bin/env python3
"""plant.py - does the simulator find mistakes in the rooms that jobs run through?

     plant.py FOLDER TURN TURNS CC FLAGS...

Each plant changes one place of a room, as a mistake would, and jobs run with what it becomes, one
seed after another, until one breaks a rule that it does not break without the plant. Of TURNS turns,
each has as many plants, and all together have all. Prints TAP, with the seed that has found it.

A plant that takes time, or takes none where the sound library does, makes other runs of all seeds.
So as long as the sound one breaks rules at some seeds, those that are found late, by rule d, f or h,
may have been found by what that one does.

$PLANT: only those whose names match this; $SEEDS: at most so many seeds (10,000); $JOBS: so
many at a time (2)."""

import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "../.."))
PROCESSES, WORKERS = 12, os.environ.get("JOBS") or "2"

PLANTS = [
    # name, room, what stands there, what stands there then

    # ---- launch
    ("half a header is taken for a whole one", "dp/tree.h",
     "    if (link->got < sizeof *header)\n        return DP_OK;\n    if (!dp__tree_header_is_sound",
     "    if (got == 0)\n        return DP_OK;\n    if (!dp__tree_header_is_sound"),
    ("what was sent in part counts as sent", "dp/tree.h",
     "        done += (size_t)sent;\n        if (sent > 0)",
     "        done = sent > 0 ? bytes : done;\n        if (sent > 0)"),
    ("whoever listens there is believed to be of the job", "dp/rendezvous.h",
     "if (challenge.proof != dp__proof(key, request, challenge.nonce, false)) {",
     "if (challenge.proof == 0) {"),
    ("whoever connects is believed to be of the job", "dp/listener.h",
     "proved = proof == dp__proof(key, &pending->request, pending->nonce, true);",
     "proved = proof != 0 || key.low == 0;"),
    ("a failure is not passed on", "dp/tree.h",
     "    if (dp__tree_note(tree, status, process, dp_last_error()))\n        dp__tree_pass_on(tree, teller);",
     "    (void)teller;\n    (void)dp__tree_note(tree, status, process, dp_last_error());"),
    ("whoever passes a failure on is to blame for it", "dp/tree.h",
     "return dp__tree_fail(tree, link, status, header->process);", "return dp__tree_fail(tree, link, status, link->process);"),
    ("who is asked does not answer", "dp/tree.h",
     "        dp__tree_say(tree, link, DP__HERE, link->header.status);\n", ""),
    ("a connection to process 0 has two owners", "dp/rendezvous.h",
     "        dp__tree_link(tree, peer->fd, process);\n        peer->fd = -1;\n", "        dp__tree_link(tree, peer->fd, process);\n"),
    ("a connection that is of no use stays open", "dp/rendezvous.h",
     "    if (!good)\n        dp__os_close(fd);\n    return good ? DP_OK : DP_PENDING;",
     "    return good ? DP_OK : DP_PENDING;"),
    ("the tree stays when opening fails", "dp/rendezvous.h",
     "        dp__tree_close(tree, true);\n        return status;", "        dp__tree_let_go(tree);\n        return status;"),
    ("the neighbour on the way is off by one step", "dp/tree.h",
     "while (process + 2 * step <= to)", "while (process + 2 * step < to)"),
    ("the time of a call is that of the call before", "dp/tree.h",
     "    tree->until_ns = tree->ends_ns;\n    DP_TRY(dp__tree_take_all",
     "    DP_TRY(dp__tree_take_all"),
    ("process 0 is looked for at one port", "dp/rendezvous.h",
     "int count = target->port_count * found.count, refused = 0;", "int count = found.count, refused = 0;"),

    # ---- tcp
    ("a short send ends a part", "dp/tcp.h",
     "        if ((size_t)moved < bytes && (moved == 0 || sends))\n            return DP_OK;\n        if ((size_t)moved < bytes)",
     "        if ((size_t)moved < bytes && moved == 0)\n            return DP_OK;\n        if ((size_t)moved < bytes && !sends)"),
    ("a load ends one part too early", "dp/tcp.h",
     "load->left = 2 * tcp->connections.each * others;", "load->left = 2 * tcp->connections.each * others - 1;"),
    ("parts without bytes are waited for", "dp/tcp.h",
     "        if (comes && dp__tcp_stripe(expected, each, i, &at) == 0)",
     "        if (comes && dp__tcp_stripe(expected, each, i, &at) > 0)"),
    ("half an answer is taken for a whole one", "dp/tcp.h",
     "    if (got >= 0 && call->got < sizeof *answer)", "    if (got == 0)"),
    ("a connection has two owners", "dp/tcp.h",
     "        server->peers[i].fd = -1;\n", ""),
    ("whose connection has ended is off by one", "dp/carrier.h",
     "dp__of_thread.culprit = journal->job->firsts[process] + 1;", "dp__of_thread.culprit = journal->job->firsts[process];"),
    ("a caller is taken again and again", "dp/tcp.h",
     "    int fd = peer->fd;\n    peer->fd = -1;\n", "    int fd = peer->fd;\n"),
    ("who fails to connect leaves without a word", "dp/tcp.h",
     "        status = dp__connections_fail(connections, status);\n        dp__connections_hang_up(connections);\n", ""),
    ("the offices of a job that failed stay open", "dp/tcp.h",
     "    dp__port_shut(port);\n    if (port->raised)", "    if (port->raised)"),

    # ---- mesh
    ("heads of a group take no turns", "dp/mesh.h",
     "dp__mesh_heads_at(comm, group->meetings % DP__MESH_TURNS);", "dp__mesh_heads_at(comm, 0);"),
    ("a head is said before it is written", "dp/mesh.h",
     "    own->entry = comm->journal->now;\n",
     "    if (grouped)\n        atomic_store(&dp__mesh_mark_of(comm, comm->process)->said, group->meetings + 1);\n    own->entry = comm->journal->now;\n"),
    ("nobody waits until the others of a group have landed", "dp/mesh.h",
     "    return dp__mesh_await_group(call, true, step);", "    return DP_OK;"),
    ("inputs of a group are added before they are put", "dp/mesh.h",
     "    DP_TRY(dp__mesh_await_group(call, false, step));\n", ""),
    ("the last one of a group is not waited for", "dp/mesh.h",
     "    for (int p = first; p < end; p++) {\n        dp__mesh_mark *mark", "    for (int p = first; p + 1 < end; p++) {\n        dp__mesh_mark *mark"),
    ("pieces of a collective are not counted", "dp/mesh.h",
     "    call->comm->group.pieces += (unsigned)((call->asked.count + piece - 1) / piece);\n", ""),
    ("each collective begins with the same input", "dp/mesh.h",
     "size_t slot = (group->pieces + step) % DP__MESH_SLOTS;", "size_t slot = step % 1;"),
    ("slices that are passed on begin at the wrong place", "dp/mesh.h",
     "slot->is.to.places[p] = self == root ? (int)at : 0;", "slot->is.to.places[p] = 0;"),
    ("a sum is taken before its parts have come", "dp/mesh.h",
     "    if (!dp__mesh_is_tiny(call))\n        return dp__mesh_await(comm, slot);",
     "    if (!dp__mesh_is_tiny(call))\n        return step > 0 ? DP_OK : dp__mesh_await(comm, slot);"),

    # ---- shm
    ("what a process comes with has one place", "dp/shm.h",
     "turns[comm->seq % 2];", "turns[0];"),
    ("small data has one place", "dp/shm.h",
     "comm->seq % 2 * DP__SHM_SMALL_BYTES;", "0 * DP__SHM_SMALL_BYTES;"),
    ("a process comes before it says with what", "dp/shm.h",
     "    dp__shm_turn_write(dp__shm_turn_of(comm, comm->process), own);\n    dp__shm_tell(comm, DP__SHM_CAME, comm->seq);\n",
     "    dp__shm_tell(comm, DP__SHM_CAME, comm->seq);\n    dp__shm_turn_write(dp__shm_turn_of(comm, comm->process), own);\n"),
    ("a result is copied before it is made", "dp/shm.h",
     "    DP_TRY(dp__shm_wait(comm, comm->process_count - 1, DP__SHM_MADE, now));\n", ""),
    ("a slot of a row is written before all have read it", "dp/shm.h",
     "    if (step >= DP__SHM_SLOTS)\n        DP_TRY(dp__shm_wait_all(comm, DP__SHM_TAKEN, now - DP__SHM_SLOTS));\n", ""),
    ("a sum is taken one piece too early", "dp/shm.h",
     "DP_TRY(dp__shm_wait(comm, comm->tree.processes[i], DP__SHM_MADE, now));", "DP_TRY(dp__shm_wait(comm, comm->tree.processes[i], DP__SHM_MADE, now - 1));"),
    ("a process leaves while others read what it has sent", "dp/shm.h",
     "    DP_TRY(dp__shm_wait_all(comm, DP__SHM_MADE, comm->steps + 1));", "    ;"),
    ("a direct collective counts as no step", "dp/shm.h",
     "        steps = 1;\n", "        steps = 0;\n"),
    ("all but one are waited for", "dp/shm.h",
     "    for (int i = 1; i < comm->process_count; i++)\n        DP_TRY(dp__shm_wait(", "    for (int i = 2; i < comm->process_count; i++)\n        DP_TRY(dp__shm_wait("),

    # ---- job
    ("a later failure is written over the first", "dp/job.h",
     "    if (!atomic_compare_exchange_strong(&board->failed, &none, 1))\n        return false;\n",
     "    (void)none;\n    atomic_store(&board->failed, 1);\n"),
    ("a failure is told before it is written", "dp/job.h",
     "    snprintf(board->text, sizeof board->text, \"%s\", text);\n    board->status = status;",
     "    board->status = status;\n    atomic_store(&board->failed, 2);\n    dp__os_sleep_ns(100000);\n    snprintf(board->text, sizeof board->text, \"%s\", text);"),
    ("a doubt is not looked at again", "dp/job.h",
     "if (mine && !dp__is_alive(job, p) && dp__is_doubtful(journal, p, seq, now))", "if (mine && !dp__is_alive(job, p))"),
    ("who has done its part and left is missed", "dp/job.h",
     "if (left && !dp__has_begun(journal, p, seq))", "if (left && p != job->process)"),
    ("a rank's process is off by one", "dp/job.h",
     "while (job->firsts[process + 1] <= rank)", "while (job->firsts[process + 1] < rank)"),
    ("a wait begins anew at each look", "dp/job.h",
     "*out_waited_ns = atomic_fetch_add(&wait->waited_ns, since) + since;", "*out_waited_ns = since;"),
    ("time for which a process was stopped counts", "dp/job.h",
     "    since = since < DP__LATE_NS ? since : DP__LATE_NS;\n", ""),
    ("who has answered is silent all the same", "dp/job.h",
     "    atomic_store(&other->looked_ns, now);\n", ""),
    ("who hears of a failure takes it for its own", "dp/job.h",
     "job->firsts[process >= 0 ? process : job->process],", "job->firsts[process >= 0 ? job->process : 0],"),
    ("memory stays open that not all could have", "dp/job.h",
     "    if (status != DP_OK)\n        dp__os_shared_close(out);\n    return status;", "    return status;"),

    # ---- messages
    ("half a header is taken for a whole one", "dp/mailbox.h",
     "    if (!dp__packet_moved(mailbox, packet, bytes))\n        return DP_OK;",
     "    if (!dp__packet_moved(mailbox, packet, bytes) && packet->data)\n        return DP_OK;"),
    ("data that was sent in part counts as sent", "dp/mailbox.h",
     "    if (!dp__packet_moved(endpoint->mailbox, packet, bytes))\n        return false;",
     "    if (!dp__packet_moved(endpoint->mailbox, packet, bytes) && !packet->data)\n        return false;"),
    ("tags are not compared", "dp/mailbox.h",
     "return offer->to == expected->to && offer->tag == expected->tag &&", "return offer->to == expected->to &&"),
    ("an offer is written over one that was not heard", "dp/mailbox.h",
     "if (send == NULL || peer->known / 2 != peer->offers / 2)", "if (send == NULL)"),
    ("an answer is told on a pipe that was heard before", "dp/mailbox.h",
     "    peer->hears = 0;\n", ""),
    ("a piece is written over one that was not taken", "dp/mailbox.h",
     "peer->made - atomic_load(&back->took) < DP__ROOM_PIECES)", "peer->made - atomic_load(&back->took) <= DP__ROOM_PIECES)"),
    ("who has left has nothing more to say", "dp/mailbox.h",
     "(left < 0 && !dead) || request->doubts++ < DP__REQUEST_DOUBTS", "left < 0 && !dead"),
    ("offers are not sent anew", "dp/mailbox.h",
     "        if (send->process == process)\n            DP_TRY(dp__header_offered(mailbox, send));\n", "        if (process < 0)\n            DP_TRY(dp__header_offered(mailbox, send));\n"),
    ("what flows is waited for, for ever", "dp/mailbox.h",
     "    mailbox->flows = false;\n", ""),
    ("the request of a call that failed is not freed", "dp/channels.h",
     "    dp__os_close(fd);\n    dp__os_free(channel->call, 0, NULL);\n    channel->call = NULL;", "    dp__os_close(fd);\n    channel->call = NULL;"),
    ("what a dropped message has is not freed", "dp/messages.h",
     "            dp__header_discard(mailbox, request);\n", "            ;\n"),
    ("a message from any rank does not say from which", "dp/mailbox.h",
     "    receive->is.from = receive->other.from;\n", ""),
    ("the next message in pieces is not asked for", "dp/mailbox.h",
     "    if (wanted->first != NULL)\n        dp__answer_write(mailbox, wanted->first, DP__ANSWER_WANTED);\n    return DP_OK;", "    return DP_OK;"),
    ("a receive that is done is offered to the next one", "dp/mailbox.h",
     "    dp__request_remove(other);\n    return request->receives", "    return request->receives"),

    # ---- members, voting, recover
    ("a third is a quorum", "dp/members.h",
     "return 2 * marked > all ||", "return 3 * marked > all ||"),
    ("who is behind is not answered", "dp/members.h",
     "    } else if (vote->number < m->number) {\n        dp__answer_late(m, out, vote);\n", "    } else if (vote->number < m->number) {\n"),
    ("half a vote is taken for a whole one", "dp/voting.h",
     "    if (got < 0 || link->got < bytes)\n", "    if (got <= 0)\n"),
    ("those that may still promise are not waited for", "dp/members.h",
     "if (m->role == DP__ROLE_PREPARES && !dp__is_awaiting(m) && dp__has_promises(m))", "if (m->role == DP__ROLE_PREPARES && dp__has_promises(m))"),
    ("a port stays open when nobody lets its process in", "dp/voting.h",
     "        if (status != DP_OK)\n            dp__listener_close(&rejoining->listener);\n", ""),
    ("found: a late call for the vote before ends a job", "dp/voting.h",
     "link != NULL && ahead < UINT16_MAX / 2", "(void)ahead, link != NULL"),
    ("an empty seat counts as one that is taken", "dp/voting.h",
     "        number += seats[s].holder != 0;\n", "        number++;\n"),
    ("the leader of a roster is whoever was first", "dp/voting.h",
     "    while (roster[leader].holder == 0)\n        leader++;\n", ""),
    ("milliseconds are taken for nanoseconds", "dp/voting.h",
     "left = head->left_ms * (uint64_t)1000000;", "left = head->left_ms;"),
    ("the roster that a process has is news", "dp/voting.h",
     "        if (dp__decision_number(now) <= above)", "        if (dp__decision_number(now) < above)"),
    ("messages of the job that failed stay", "dp/recover.h",
     "    dp__mailbox_forget(ctx);\n", ""),
    ("the job that failed is lost where there is no other", "dp/recover.h",
     "        ctx->world = own->before;\n", ""),
    ("what an attempt has made stays when it fails", "dp/recover.h",
     "    if (ctx->world.job != before->job)\n        dp__job_free(ctx->world.job);\n", ""),
    ("what a recovery takes counts from its last attempt", "dp/recover.h",
     "    own->over = status != DP_OK;\n", "    own->until_ns = dp__os_after_ms(own->ctx->config.timeout_ms);\n    own->over = false;\n"),

    # ---- team
    ("a gate is called before it opens", "dp/team.h",
     "    atomic_fetch_add(&gate->word, 1);\n    dp__gate_call(gate);", "    dp__gate_call(gate);\n    atomic_fetch_add(&gate->word, 1);"),
    ("a sleeper is called without its lock", "dp/team.h",
     "    dp__lock_enter(&gate->lock);\n    dp__lock_leave(&gate->lock);\n    dp__wake_signal", "    dp__wake_signal"),
    ("a courier looks for news after its work", "dp/team.h",
     "        unsigned seen = dp__gate_word(&courier->work);\n        if (atomic_load_explicit(&courier->closing, memory_order_acquire))\n            return NULL;\n        courier->fn(courier->user);",
     "        if (atomic_load_explicit(&courier->closing, memory_order_acquire))\n            return NULL;\n        courier->fn(courier->user);\n        unsigned seen = dp__gate_word(&courier->work);"),

    # ---- found here, and mended: each comes back
    ("found: who waits does not hear that others recover", "dp/voting.h",
     "    if (process < 0)\n        return DP_OK;\n    *out_process = process;\n    return dp_error(DP_ERR_REMOTE, \"%s recovers",
     "    if (process < 0 || process >= 0)\n        return DP_OK;\n    *out_process = process;\n    return dp_error(DP_ERR_REMOTE, \"%s recovers"),
    ("found: one that was let in has no time to meet the others", "dp/meeting.h",
     "    dp__voter_hurry(*voter, timeout_ms);\n", ""),
    ("found: who meets does not hear of votes", "dp/voting.h",
     "        .rest = dp__voter_meets,\n", ""),
    ("found: who is connected does not hear of votes", "dp/rendezvous.h",
     "                       .rest = launch->rest,\n", ""),
    ("found: who has no room for connections goes on alone", "dp/voting.h",
     "return lacks ? voter->full_ns + 4 * voter->step_ns : 0;", "return lacks ? 0 : 0;"),
    ("found: connections have a time-out of their own", "dp/tcp.h",
     "uint64_t until_ns = tree != NULL ? dp__tree_until(tree, DP__GRACE_MS)\n                                     : dp__os_after_ms(job->timeout_ms);",
     "uint64_t until_ns = dp__os_after_ms(job->timeout_ms);"),
    ("found: who ended first is not asked for", "dp/tree.h",
     "    if (meets && link != &tree->links[0])", "    if (meets && link == NULL)"),
    ("found: a child is named that waits for process 0 itself", "dp/rendezvous.h",
     "        DP_TRY(dp__tree_probe(tree, &held_ms));\n", "        (void)dp__tree_probe;\n"),
    ("found: who has waited for process 0 in vain does not tell it", "dp/rendezvous.h",
     "        return dp__tree_fail(tree, NULL, status, 0);\n", "        return status;\n"),
    ("found: who was held up itself names others only", "dp/rendezvous.h",
     "    if (held_ms <= 0)\n", "    if (held_ms != -1)\n"),
    ("found: who was held up gives up before it reads what has come", "dp/tree.h",
     "    if (ms > 0 || *again ||", "    if (ms >= 0 || *again ||"),
    ("found: who was held up before its proof is let go", "dp/listener.h",
     "(pending->asked && listener->services[pending->request.kind].patient);", "false;"),
    ("found: who fails among connections does not hear why those ahead have ended", "dp/tcp.h",
     "dp__tree_skip(tree) == DP_OK", "((void)dp__tree_skip, dp__tree_listen(tree)) == DP_OK"),
    ("found: who waits for the rest of a part is named", "dp/tree.h",
     "uint64_t until_ns = dp__tree_until(tree, DP__GRACE_MS / 2);", "uint64_t until_ns = dp__tree_until(tree, DP__GRACE_MS);"),
    ("found: strangers keep a process from process 0", "dp/rendezvous.h",
     "    return (behind_a_free_one ? 100 : 1000) <<", "    return (behind_a_free_one ? 1000 : 1000) <<"),
    ("found: who meets in a group does not hear of the job", "dp/group.h",
     "    out->rest = dp__group_rests;\n", ""),
    ("found: who meets in a group is not seen to wait", "dp/group.h",
     "    dp__job_looks(job); /* it waits, and is no process that does not answer */\n", ""),
    ("found: a group has all the time of those that wait for it", "dp/group.h",
     "        journal->patience_ms = 3 * DP__GRACE_MS;\n", "        journal->patience_ms = 0;\n"),
    ("found: who is first in a group waits for those that may come", "dp/group.h",
     "out->numbered = out->agreed = out->met_before = true;", "out->numbered = out->agreed = true;"),
    ("found: who waits for a message blames the other end", "dp/mailbox.h",
     "int root = dp__wait_root(mailbox->job, DP__CALLER, named, since_ns);", "int root = DP__CIRCLE;"),
    ("found: who waits for a message does not say so", "dp/mailbox.h",
     "        dp__mailbox_awaits(mailbox, awaited);\n", "        dp__mailbox_awaits(mailbox, -1);\n"),
    ("found: who cannot be called is innocent", "dp/channels.h",
     "return port->listener->full ? endpoint->process : -1;", "return -1;"),
    ("found: who wakes up too late is innocent", "dp/job.h",
     "return root >= 0 ? root : dp__longest_away(journal->job, since_ns);", "return root;"),
    ("found: who is behind one that was away was away", "dp/job.h",
     "    return away >= 0 ? dp__first_silent(job, away, since_ns) : -1;", "    (void)since_ns;\n    return away;"),
    ("found: a short answer hides a long silence", "dp/job.h",
     "    if (asked_ns != 0 && (longer || !dp__is_back(job, process, now))) {",
     "    (void)longer;\n    if (asked_ns != 0) {"),
    ("found: whoever is behind one that has left is silent", "dp/job.h",
     "        if (atomic_load(&dp__progress_of(job, on)->presence) == DP__LEFT)\n            return process;\n", ""),
    ("found: it is not said whose part is missing", "dp/mesh.h",
     "carrier->lacks != NULL ? carrier->lacks(endpoint, &slot->is) : 0;", "0;"),
    ("found: a sum of memory that others use for something else by now is right", "dp/shm.h",
     "    return dp__job_heard(comm->journal->job);", "    return DP_OK;"),
    ("found: a vote that is tried again asks nobody", "dp/voting.h",
     "bool asks = members->role == DP__ROLE_PREPARES || members->role == DP__ROLE_PROPOSES;", "bool asks = false;"),
    ("found: who has proved itself is let go before it is taken", "dp/listener.h",
     "bool patient = pending->proved ||", "bool patient = false ||"),
    ("found: a rank blames its own process for what another rank of it has found", "dp/meet.h",
     "    meet->result_culprit = dp__of_thread.culprit;\n", "    meet->result_culprit = 0;\n"),
]


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, **more)


def copy(folder, header, old, new):
    """The library with a change, in a folder. Returns why there is none, or None."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    shutil.copytree(os.path.join(ROOT, "dp"), os.path.join(folder, "dp"))
    for name in ("dp.h", "dp_cpu.h"):
        shutil.copy(os.path.join(ROOT, name), folder)
    if header is None:
        return None
    path = os.path.join(folder, header)
    whole = open(path).read()
    if whole.count(old) != 1:
        return "what it changes stands %d times in %s" % (whole.count(old), header)
    with open(path, "w") as file:
        file.write(whole.replace(old, new))
    return None


def make(folder, header, old, new, cc):
    """Its processes, compiled against that copy. Returns why there are none, or None."""
    why = copy(folder, header, old, new)
    if why:
        return why
    made = run(cc + ["-w", "-fPIC", "-I" + HERE, "-I.", "-I" + ROOT, "-c",
                     os.path.join(HERE, "process.c"), "-o", "process.o"], cwd=folder)
    if made.returncode == 0:
        made = run(cc[:1] + ["-shared", "process.o", "-o", "process.so", "-lm"], cwd=folder)
    if made.returncode != 0:
        return "it does not compile: " + (made.stderr.strip().splitlines() or ["?"])[0]
    for p in range(PROCESSES):
        shutil.copy(os.path.join(folder, "process.so"), os.path.join(folder, "process%d.so" % p))
    return None


def first_failure(runner, folder, first, count):
    """The first seed of these that breaks a rule, and what it breaks; or None."""
    output = run([runner, "-1", "-l", folder, "-j", WORKERS, str(count), str(first)],
                 errors="replace").stdout
    failed = [(int(seed), rules) for seed, rules in
              re.findall(r"^not ok (\d+) - rule (\w+)", output, re.M)]
    if not failed:
        return None if " passed, 0 failed" in output else (first, "?")
    seed, rules = min(failed)
    report = output[output.index("not ok %d " % seed):].split("\nnot ok ")[0]
    return seed, (re.findall(r"^  \*(.*)", report, re.M) or [rules])[0]


def search(runner, folder, sound, seeds):
    """As above, but for what the sound library does not break, too."""
    seed = 1
    while seed <= seeds:
        found = first_failure(runner, folder, seed, seeds + 1 - seed)
        if not found or not first_failure(runner, sound, found[0], 1):
            return found
        seed = found[0] + 1
    return None


def plant(runner, folder, number, one, cc, seeds):
    """Whether it is found, and how."""
    own = os.path.join(folder, str(number))
    why = make(own, one[1], one[2], one[3], cc)
    found = None if why else search(runner, own, os.path.join(folder, "sound"), seeds)
    shutil.rmtree(own, ignore_errors=True)
    if why or not found:
        return False, why or "nothing is found in %d seeds" % seeds
    return True, "seed %d: %s" % found


def main():
    folder, turn, turns, cc = os.path.abspath(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    runner = os.path.join(ROOT, "build/simulated/run")
    seeds, only = int(os.environ.get("SEEDS") or 10000), os.environ.get("PLANT") or ""
    why = make(os.path.join(folder, "sound"), None, "", "", cc)
    failed = 0
    if why:
        sys.exit(why)
    for number, one in enumerate(PLANTS):
        if number % turns != turn % turns or not re.search(only, one[0]):
            continue
        good, text = plant(runner, folder, number, one, cc, seeds)
        print("%s - planted in %s: %s # %s" % ("ok" if good else "not ok", one[1], one[0], text),
              flush=True)
        failed += not good
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
