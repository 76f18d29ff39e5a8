"""What a trial does: all of it follows from its seed."""

import os
import random

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.normpath(os.path.join(HERE, "..", "..", "build", "faults"))

TIMEOUT_S = 2.5  # of the jobs
GRACE_S = 3.0  # beyond it, until all have returned

# What happens: to a process, to the disk, to the network between two hosts.
TO_A_PROCESS = ["killed (-9)", "killed inside dp_open", "stopped for ever",
                "stopped inside dp_open", "stopped, continued in time",
                "stopped, continued too late", "calls dp_abort", "exits without dp_close"]
TO_THE_DISK = ["disk full"]
TO_THE_NETWORK = ["5 % of packets lost", "packets 200 ms late", "link cut for 2 s", "link cut",
                  "link cut in one direction", "network device down"]
HARMLESS = {"stopped, continued in time", "disk full", "5 % of packets lost", "packets 200 ms late",
            "link cut for 2 s"}

# Who starts the processes, and which build of the worker they are.
ON_ONE = {"dp_spawn": "plain", "@name": "plain", "host:port": "plain", "Open MPI alone": "plain",
          "Open MPI": "openmpi", "MPICH": "mpich"}
ON_TWO = {"2 hosts": "plain", "2 hosts, Open MPI": "openmpi", "2 hosts, MPICH": "mpich"}
LAUNCHERS = {**ON_ONE, **ON_TWO}

CELLS = [(kind, launcher) for kind in TO_A_PROCESS + TO_THE_DISK for launcher in LAUNCHERS]
CELLS += [(kind, launcher) for kind in TO_THE_NETWORK for launcher in ON_TWO]


class Plan:
    """What a seed says."""

    def __init__(self, seed, scale):
        rng = random.Random(seed)
        self.seed, self.scale = seed, scale
        self.kind, self.launcher = CELLS[seed % len(CELLS)]
        self.apart = self.launcher in ON_TWO
        self.build = LAUNCHERS[self.launcher]
        self.mpirun = {"Open MPI alone": "openmpi"}.get(self.launcher, self.build)
        self.count = 2 * rng.randint(1, 3) if self.apart else rng.randint(2, 8)
        self.target = rng.randrange(self.count)
        self.opening = "inside dp_open" in self.kind or (
            self.build == "plain" and self.kind in HARMLESS - {"disk full"} and rng.random() < 0.4)
        self.moment = rng.uniform(0, 0.6 if self.opening else 1.0)
        self.late = [rng.choice([0, rng.randrange(500)]) if self.opening else rng.randrange(20)
                     for _ in range(self.count)]
        self.timeout = (8 if self.kind == "link cut for 2 s" else TIMEOUT_S) * scale
        self.pause = rng.uniform(0.1, 1.0)  # of one that is continued in time
        self.secret = rng.random() < 0.5
        self.goes_on = rng.random() < 0.5  # mpirun is told not to end the others
        self.frees = rng.random() < 0.5  # the disk, later
        self.direction = rng.randrange(2)
        self.port = rng.randrange(20000, 30000)

    def __str__(self):
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())

    def ends_others(self):
        """Whether one that dies, or fails, ends the others before they can say why. MPICH's mpirun
        may do so even if it is told not to."""
        return self.launcher == "dp_spawn" or self.mpirun == "mpich" or (
            self.mpirun == "openmpi" and not self.goes_on)

    def host_of(self, process):
        return process * 2 // self.count
