"""What benches over a long or slow link share: two hosts joined by the cable of tests/faults/wire.py, in
namespaces of their own, so that nothing of it is left."""

import argparse
import os
import random
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../faults"))
import wire  # noqa: E402

ISOLATED = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
MTU = 9000


def options(doc, rate, rounds):
    """A parser of what all have: Mbit/s each way, ms there and back, how often each way has its turn."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("program")
    parser.add_argument("--rate", type=float, default=rate)
    parser.add_argument("--delay", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    return parser


def lay(args):
    """Joins the hosts for as long as this program runs."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run/netns"], check=False)
    cable = wire.Wire(random.Random(0))
    cable.delay, cable.rate = args.delay / 2e3, args.rate * 1e6 / 8
    for host in wire.HOSTS:
        wire.ip("-n", host, "link", "set", wire.DEVICE, "mtu", str(MTU))


def measure_apart(measure, args):
    """Calls measure(args) in namespaces of its own: this program calls itself there."""
    if args.isolated:
        measure(args)
    else:
        sys.exit(subprocess.run([*ISOLATED, sys.executable, *sys.argv, "--isolated"],
                                check=False).returncode)
