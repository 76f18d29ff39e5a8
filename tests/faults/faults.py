#!/usr/bin/env python3
"""faults.py - what becomes of a job when something happens to a process, the disk or the network.

  faults.py [--trials N] [--seed FIRST] [--jobs J] [--scale S] [--only WORD]...
  faults.py --smoke [--jobs J] [--scale S]

A trial starts a job of 2 to 8 processes (worker.c) by one of the launchers, does one thing to it at
a random moment, and looks at what every process says, how long it took, and what is left behind.
Its seed decides all of that (plan.py). Each trial runs in namespaces of its own (processes, mounts,
network, System V memory): it sees what it has left, disturbs nobody, and takes all with it when it
ends, however it ends. Without the right to make them there is no second host and no full disk, and
memory and sockets that are left are not looked for.

J trials run at a time, which mostly wait. S stretches time-outs, and the seconds beyond them, for a
machine that is busy. WORD: only those of whose kind or launcher it is a part."""

import argparse
import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

from plan import BUILD, CELLS, GRACE_S, LAUNCHERS, TIMEOUT_S, Plan
from plan import TO_A_PROCESS, TO_THE_DISK, TO_THE_NETWORK
from trial import Trial

DISK_BYTES = 1 << 20

ISOLATED = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child",
            "--mount-proc"]


def can_isolate():
    return subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode == 0


def trial(seed, scale, isolated):
    """In namespaces of its own: prints what came of it."""
    plan = Plan(seed, scale)
    if isolated:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    directory = tempfile.mkdtemp(prefix=f"{seed}-", dir=BUILD)
    for name in ("disk", "tmp"):
        os.mkdir(os.path.join(directory, name))
    if isolated:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs",
                        os.path.join(directory, "disk")], check=True)
    job = Trial(plan, directory, isolated)
    job.run()
    print(json.dumps({"seed": seed, "kind": plan.kind, "launcher": plan.launcher, "plan": str(plan),
                      "wrong": job.wrong, "sentences": job.sentences()}), flush=True)


# ---- many of them --------------------------------------------------------------------------------


class Trials:
    def __init__(self, options):
        self.options = options
        self.isolated = can_isolate()
        self.running = set()
        self.over = False
        self.lock = threading.Lock()

    def why_not(self, plan):
        if plan.mpirun != "plain" and shutil.which(f"mpirun.{plan.mpirun}") is None:
            return f"no mpirun.{plan.mpirun}"
        if not os.path.exists(os.path.join(BUILD, plan.build, "worker")):
            return f"no compiler for {plan.build}"
        if not self.isolated and (plan.apart or plan.kind in TO_THE_DISK):
            return "no right to make namespaces"
        return None

    def one(self, seed):
        plan = Plan(seed, self.options.scale)
        result = {"seed": seed, "kind": plan.kind, "launcher": plan.launcher, "plan": str(plan)}
        why_not = self.why_not(plan)
        if why_not or self.over:
            return {**result, "skipped": why_not or "interrupted"}
        words = [*(ISOLATED if self.isolated else []), sys.executable, os.path.abspath(__file__),
                 "--trial", str(seed), "--scale", str(self.options.scale)]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with self.lock:
            self.running.add(child)
        try:
            out, err = child.communicate(timeout=150 * self.options.scale)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            err += "the trial itself did not end"
        with self.lock:
            self.running.discard(child)
        self.tidy(seed)
        if self.over:
            return {**result, "skipped": "interrupted"}
        try:
            return json.loads(out)
        except ValueError:
            return {**result, "wrong": ["the trial broke"], "sentences": err.splitlines()[-20:]}

    @staticmethod
    def tidy(seed):
        for name in os.listdir(BUILD):
            if name.startswith(f"{seed}-"):
                shutil.rmtree(os.path.join(BUILD, name), ignore_errors=True)

    def stop(self):
        with self.lock:
            self.over = True
            for child in self.running:
                child.kill()

    def seeds(self):
        """Of the trials that were asked for; of a few, in which all kinds and launchers occur, but
        for what depends on MPICH's own behaviour."""
        only, seed = self.options.only, self.options.seed
        if self.options.smoke:
            yield from (s + (CELLS[s][1] == "2 hosts, MPICH") for s in range(0, len(CELLS), 5))
            return
        while True:
            words = CELLS[seed % len(CELLS)]
            if all(any(o in word for word in words) for o in only):
                yield seed
            seed += 1

    def run(self):
        results = []
        seeds = [seed for seed, _ in zip(self.seeds(), range(self.options.trials))]
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            try:
                for result in pool.map(self.one, seeds):
                    results.append(result)
                    show(result)
            except KeyboardInterrupt:
                self.stop()
        return results


def show(result):
    name = f"{result['kind']}, {result['launcher']}, seed {result['seed']}"
    if "skipped" in result:
        print(f"ok - {name} # SKIP {result['skipped']}", flush=True)
    elif not result["wrong"]:
        print(f"ok - {name}", flush=True)
    else:
        print(f"not ok - {name}", flush=True)
        for line in [f"plan: {result['plan']}", *result["wrong"], *result["sentences"]]:
            print(f"#   {line}", flush=True)


def table(results):
    """By what happened, and who had started the processes: so many of so many were right."""

    def entry(kind, launcher):
        tried = [r["wrong"] for r in results
                 if (r["kind"], r["launcher"]) == (kind, launcher) and "wrong" in r]
        return f"{tried.count([])} of {len(tried)}" if tried else ""

    print("\n| what happens | " + " | ".join(LAUNCHERS) + " |")
    print("|---" * (1 + len(LAUNCHERS)) + "|")
    for kind in TO_A_PROCESS + TO_THE_DISK + TO_THE_NETWORK:
        print(f"| {kind} | " + " | ".join(entry(kind, launcher) for launcher in LAUNCHERS) + " |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=len(CELLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1))
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--trial", type=int)
    options = parser.parse_args()
    if options.trial is not None:
        trial(options.trial, options.scale, os.getpid() == 1)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    results = Trials(options).run()
    if not options.smoke:
        table(results)
    tried = [r for r in results if "wrong" in r]
    bad = [r for r in tried if r["wrong"]]
    print(f"\n{len(tried) - len(bad)} of {len(tried)}, {len(results) - len(tried)} skipped, "
          f"time-outs of {TIMEOUT_S * options.scale:g} s and {GRACE_S * options.scale:g} s beyond")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
