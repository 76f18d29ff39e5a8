"""One job, what happens to it, and whether all its processes take it as they should."""

import glob
import os
import random
import re
import signal
import subprocess
import time

import wire
from plan import BUILD, GRACE_S, HARMLESS, TO_A_PROCESS


def parse(path):
    """What a process has said: [(time, word, rest)]."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(" ", 2) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []
    return [(float(line[0]), line[1], line[2] if len(line) > 2 else "") for line in lines]


def content(path):
    """Of a file of the kernel's; "" where the process, or the thread, is gone."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def doing(pid):
    """Its program and its state."""
    found = re.search(r"[(](.*)[)] (.)", content(f"/proc/{pid}/stat"))
    return found.groups() if found else ("gone", "X")


def waiting(pid):
    """Where each of its threads waits."""
    threads = glob.glob(f"/proc/{pid}/task/*/wchan")
    return " ".join(content(thread) for thread in threads)


class Trial:
    def __init__(self, plan, directory, isolated):
        self.plan, self.directory, self.isolated = plan, directory, isolated
        self.disk = os.path.join(directory, "disk")
        self.tmp = os.path.join(directory, "tmp")
        self.launched = {}  # process id: Popen
        self.ended = {}  # process id: status of wait
        self.wire = None
        self.wrong = []
        self.fault_at = self.continued_at = None
        self.before = self.traces()

    # ---- the job ----

    def environment(self, process=None):
        plan, env = self.plan, {k: v for k, v in os.environ.items() if not k.startswith("DP_")}
        env.update(TMPDIR=self.tmp, FAULTS_TIMEOUT=str(int(plan.timeout * 1000)),
                   FAULTS_LATE=",".join(map(str, plan.late)))
        if plan.secret:
            env["DP_SECRET"] = f"secret of {plan.seed}"
        if plan.launcher == "2 hosts":
            env["FAULTS_TREE"] = "1"
        if plan.apart and plan.mpirun == "mpich":
            env.update(UCX_TLS="tcp,self", UCX_NET_DEVICES=wire.DEVICE)
        if plan.build != "plain" and plan.opening:
            env["FAULTS_MPI"] = "1"
        if process is not None:
            address = {"@name": f"@faults-{plan.seed}", "host:port": f"127.0.0.1:{plan.port}",
                       "2 hosts": f"{wire.ADDRESSES[0]}:{plan.port}"}[plan.launcher]
            env.update(DP_LAUNCH="dp", DP_PROCESS=str(process), DP_PROCESS_COUNT=str(plan.count),
                       DP_ADDR=address)
        return env

    def worker(self):
        """On two hosts each process knows which one it is on."""
        program = os.path.join(BUILD, self.plan.build, "worker")
        if not self.plan.apart:
            return program
        return self.script("here", 'DP_MACHINE=$(ip netns identify $$) exec "%s" "$@"' % program)

    def script(self, name, text):
        path = os.path.join(self.directory, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{text}\n")
        os.chmod(path, 0o755)
        return path

    def on_host(self, i):
        return ["ip", "netns", "exec", wire.HOSTS[i]] if self.plan.apart else []

    def mpirun(self):
        plan, words = self.plan, self.on_host(0) + [f"mpirun.{self.plan.mpirun}"]
        hosts = [f"{a}:{plan.count // 2}" for a in wire.ADDRESSES]
        agent = self.script("agent", """\
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
case $host in %s) n=%s ;; *) n=%s ;; esac
exec ip netns exec $n sh -c "$*\"""" % (wire.ADDRESSES[0], *wire.HOSTS))
        if plan.mpirun == "openmpi":
            words += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            words += ["--enable-recovery"] if plan.goes_on else []
            if plan.apart:
                net = f"{wire.ADDRESSES[0]}/24"
                words += ["--mca", "plm_rsh_agent", agent, "--mca", "btl", "self,tcp",
                          "--mca", "btl_tcp_if_include", net, "--mca", "oob_tcp_if_include", net,
                          "-H", ",".join(hosts)]
                for name in self.environment():
                    words += ["-x", name] if name.startswith(("FAULTS_", "DP_")) else []
        else:
            words += ["-disable-auto-cleanup"] if plan.goes_on else []
            if plan.apart:
                words += ["-launcher", "ssh", "-launcher-exec", agent, "-iface", wire.DEVICE,
                          "-hosts", ",".join(wire.ADDRESSES), "-ppn", str(plan.count // 2)]
        return words + ["-np", str(plan.count)]

    def launch(self, words, env):
        with open(os.path.join(self.directory, "printed"), "ab") as out:
            child = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                     stderr=subprocess.STDOUT, cwd=self.directory,
                                     start_new_session=True)
        self.launched[child.pid] = child

    def start(self):
        plan, train = self.plan, [self.worker(), "train", self.directory]
        if plan.launcher == "dp_spawn":
            self.launch([train[0], "spawn", str(plan.count), self.directory], self.environment())
        elif plan.mpirun != "plain":
            self.launch(self.mpirun() + train, self.environment())
        else:
            for process in range(plan.count):
                self.launch(self.on_host(plan.host_of(process)) + train, self.environment(process))

    # ---- what has been said, and who lives ----

    def said(self, process):
        return parse(os.path.join(self.directory, str(process)))

    def printed(self):
        path = os.path.join(self.directory, "printed")
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def find(self, process, word):
        return next((line for line in self.said(process) if line[1] == word), None)

    def have(self, word, processes=None):
        return all(self.find(p, word) for p in processes or range(self.plan.count))

    def id_of(self, process):
        begun = self.find(process, "begun")
        return int(begun[2]) if begun else 0

    def reap(self):
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.ended[pid] = status
        except ChildProcessError:
            pass

    def alive(self):
        """Process ids: of all that is in this trial's namespace, or of all that it knows."""
        self.reap()
        if self.isolated:
            return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
        own = {self.id_of(p) for p in range(self.plan.count)} | set(self.launched)
        return {pid for pid in own - {0} - set(self.ended) if os.path.exists(f"/proc/{pid}")}

    def until(self, condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.reap()
            time.sleep(0.005)
        return True

    # ---- the fault ----

    def signal(self, number):
        self.until(lambda: self.id_of(self.plan.target), 10 * self.plan.scale)
        try:
            os.kill(self.id_of(self.plan.target), number)
        except ProcessLookupError:
            if number != signal.SIGCONT or not self.plan.ends_others():
                self.wrong.append("the process had ended before anything happened to it")

    def fill_disk(self):
        path = os.path.join(self.disk, "filler")
        with open(path, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1024))
            except OSError:
                pass
        if self.plan.frees:
            time.sleep(0.5)
            os.unlink(path)

    def disturb(self):
        plan, kind = self.plan, self.plan.kind
        numbers = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP,
                   "calls": signal.SIGRTMIN + 1, "exits": signal.SIGRTMIN + 2}
        first = re.match(r"\w+", kind)[0]
        self.fault_at = time.monotonic()
        if first in numbers:
            self.signal(numbers[first])
            self.fault_at = time.monotonic()
            if "continued" in kind:
                time.sleep(plan.pause if kind in HARMLESS else plan.timeout + GRACE_S * plan.scale)
                self.signal(signal.SIGCONT)
                self.continued_at = time.monotonic()
        elif kind == "disk full":
            self.fill_disk()
        elif kind == "5 % of packets lost":
            self.wire.loss = 0.05
            time.sleep(3)
            self.wire.loss = 0
        elif kind == "packets 200 ms late":
            self.wire.delay = 0.2
            time.sleep(2)
            self.wire.delay = 0
        elif kind == "network device down":
            self.wire.take_away(plan.direction)
        else:
            self.wire.blocked = {0, 1} if "direction" not in kind else {plan.direction}
            if kind == "link cut for 2 s":
                time.sleep(2)
                self.wire.blocked = set()

    # ---- the verdict ----

    def limit_of(self, process):
        """When this process has to have returned."""
        since = max(self.fault_at, (self.find(process, "opens") or (0,))[0])
        if process == self.plan.target and self.continued_at:
            since = self.continued_at
        return since + self.plan.timeout + GRACE_S * self.plan.scale

    def survivors(self):
        plan = self.plan
        dead = plan.kind.startswith(("killed", "stopped for", "stopped inside", "exits"))
        return [p for p in range(plan.count) if not (dead and p == plan.target)]

    def culprits(self, process):
        """Whom this process may name."""
        plan = self.plan
        if plan.kind in TO_A_PROCESS and plan.mpirun != "plain" and plan.ends_others():
            return {plan.target} | {p for p in range(plan.count) if not self.find(p, "end")}
        if plan.kind in TO_A_PROCESS:
            return {plan.target}
        if plan.kind == "link cut in one direction":  # one side hears the other's sentence
            return set(range(plan.count))
        return {p for p in range(plan.count) if plan.host_of(p) != plan.host_of(process)}

    def statuses(self):
        kind = self.plan.kind
        if kind == "calls dp_abort" and self.plan.launcher == "2 hosts":
            return {"DP_ERR_ABORTED", "DP_ERR_REMOTE"}  # a table of one's own may not carry it on
        if kind == "calls dp_abort":
            return {"DP_ERR_ABORTED"}
        if kind in ("killed (-9)", "exits without dp_close") and self.plan.mpirun == "plain":
            return {"DP_ERR_REMOTE"}
        return {"DP_ERR_REMOTE", "DP_ERR_TIMEOUT"}

    def judge_sentence(self, who, culprits, rest):
        """STATUS RANK SENTENCE; a rank is a process here."""
        status, rank, sentence = (rest + "  ").split(" ", 2)
        named = re.search(r"process(?:es)? (\d+)", sentence)
        if status not in self.statuses():
            self.wrong.append(f"{who} returned {status}")
        excused = who == f"process {self.plan.target}" and (
            self.plan.kind in ("calls dp_abort", "stopped, continued too late"))
        if self.plan.kind == "link cut in one direction":  # answers may come, and no data
            excused = "all processes have begun it" in sentence
        if not excused and (named is None or int(named[1]) not in culprits):
            self.wrong.append(f"{who} names {named[0] if named else 'nobody'}")
        tree = self.plan.launcher == "2 hosts"  # that table says nothing of ranks
        if not tree and not excused and int(rank) >= 0 and int(rank) not in culprits:
            self.wrong.append(f"{who} blames rank {rank}")

    def judge_process(self, process):
        end, closed = self.find(process, "end"), self.find(process, "closed")
        who = f"process {process}"
        if self.plan.kind in HARMLESS:
            if end is None or not end[2].startswith("DP_OK") or closed is None:
                self.wrong.append(f"{who} did not come to its end")
            return
        if end is None:
            if not self.plan.ends_others():
                self.wrong.append(f"{who} did not return")
            return
        if closed is None and not self.plan.ends_others():
            self.wrong.append(f"{who} did not close")
        late = (closed or end)[0] - self.limit_of(process)
        if late > 0:
            self.wrong.append(f"{who} returned {late:.1f} s too late")
        self.judge_sentence(who, self.culprits(process), end[2])

    def judge_spawn(self):
        end = self.find("spawn", "end")
        harmless = self.plan.kind in HARMLESS
        if end is None:
            self.wrong.append("dp_spawn did not return")
        elif harmless and not end[2].startswith("DP_OK"):
            self.wrong.append(f"dp_spawn: {end[2]}")
        elif not harmless and not re.search(rf"process {self.plan.target}\b", end[2]):
            self.wrong.append("dp_spawn does not name it")

    def judge_saves(self):
        """All have heard the same of every checkpoint."""
        told = [[(word, rest.split(" ")[0]) for _, word, rest in self.said(p)
                 if word in ("kept", "refused")] for p in range(self.plan.count)]
        if self.plan.kind in HARMLESS and any(t != told[0] for t in told):
            self.wrong.append("the processes do not agree on what was kept")

    def judge_checkpoint(self):
        path = os.path.join(self.disk, "last.safetensors")
        kept = [int(rest) for p in range(self.plan.count) for _, word, rest in self.said(p)
                if word == "kept"]
        if not os.path.exists(path):
            if kept:
                self.wrong.append("the checkpoint is gone")
            return
        got = subprocess.run([os.path.join(BUILD, "plain", "worker"), "check", path],
                             capture_output=True, text=True, check=False)
        if got.returncode != 0:
            self.wrong.append(f"the checkpoint is not whole: {got.stdout}{got.stderr}")
            return
        last = max(kept, default=0)  # that all know of, or else the one after it
        if int(got.stdout) not in (last, last + 10):
            self.wrong.append(f"the checkpoint is of step {got.stdout.strip()}, not {last}")

    def traces(self):
        """What could be left behind, but for processes; only in places of its own."""
        found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if self.isolated}
        for i in range(2 if self.wire else 1 if self.isolated else 0):
            table = [*(self.on_host(i) if self.wire else []), "cat", "/proc/net/unix"]
            sockets = subprocess.run(table, capture_output=True, text=True, check=True).stdout
            found |= set(re.findall(r"@dp-\S*", sockets))
        for directory in (self.tmp, self.disk):
            found |= {os.path.join(directory, name) for name in os.listdir(directory)}
        return found

    def judge_traces(self):
        allowed = r"/last\.safetensors$|/filler$"
        if self.plan.kind not in HARMLESS:
            allowed += r"|/last\.safetensors\.part$"
        if self.plan.mpirun != "plain":  # what MPI itself forgets where a process is killed
            allowed += r"|/(ompi|vader|pmix|mpich|mpi)[^/]*$|/tmp/"
        for name in sorted(self.traces() - self.before):
            if not re.search(allowed, name):
                self.wrong.append(f"{name} is left behind")

    def is_over(self):
        """All processes are gone, but for one that was stopped for ever; dp_spawn has ended that
        one too, and is gone itself. When an mpirun ends is its own affair, and so is MPI_Finalize
        of MPICH over TCP, which often does not return in programs without dp.h either."""
        plan, rest = self.plan, self.alive()
        if plan.mpirun != "plain":
            rest = {pid for pid in rest if doing(pid) in [("worker", s) for s in "RSDT"]}
        if plan.launcher != "dp_spawn" and "stopped" in plan.kind and "continued" not in plan.kind:
            rest -= {self.id_of(plan.target)}
        if plan.launcher == "2 hosts, MPICH":
            rest -= {self.id_of(p) for p in range(plan.count) if self.find(p, "closed")}
        return not rest

    def end_all(self):
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.until(lambda: not self.alive(), 5)

    def run(self):
        plan = self.plan
        if plan.apart:
            self.wire = wire.Wire(random.Random(plan.seed))
        self.start()
        ready = (lambda: self.id_of(plan.target)) if plan.opening else (lambda: self.have("open"))
        if not self.until(ready, 30 * plan.scale):
            self.wrong.append("the job did not begin")
        else:
            time.sleep(plan.moment)
            self.disturb()
            self.watch()
        self.end_all()
        if self.fault_at is not None:
            for process in self.survivors():
                self.judge_process(process)
            if plan.launcher == "dp_spawn":
                self.judge_spawn()
            self.judge_saves()
            self.judge_checkpoint()
            self.judge_traces()
        for process in [*range(plan.count), "spawn"]:
            self.wrong += [rest for _, word, rest in self.said(process) if word == "broken"]

    def watch(self):
        """Until the job is over."""
        plan, slack = self.plan, 2 if self.plan.launcher == "dp_spawn" else 0  # its own grace
        slack += 5 if plan.mpirun != "plain" else 0
        if plan.kind in HARMLESS:
            limit = time.monotonic() + 60 * plan.scale
        else:
            limit = max(self.limit_of(p) for p in range(plan.count)) + slack * plan.scale
        if not self.until(self.is_over, max(0.5, limit - time.monotonic())):
            names = {self.id_of(p): str(p) for p in range(plan.count)}
            for pid in sorted(self.alive()):
                self.wrong.append(f"still there at the end: {names.get(pid, pid)}, "
                                  f"{' '.join(doing(pid))} {waiting(pid)}")
            self.until(self.is_over, 5 * plan.scale)

    def sentences(self):
        lines = []
        for process in [*range(self.plan.count), "spawn"]:
            for at, word, rest in self.said(process)[-4:]:
                since = at - (self.fault_at or at)
                lines.append(f"{process}: {since:+.3f} s {word} {rest}")
        return lines + [f"printed: {line}" for line in self.printed().splitlines()[-20:]]
