#!/usr/bin/env python3
"""Time to a loss over a slow link, for each way to send less; see slow.c. As root:

    slow.py PROGRAM [--loss 0.62] [--rate 100] [--delay 20] [--rounds 1] [WAY...]

Two hosts are network namespaces, joined by the cable of tests/faults/wire.py, which carries so many
Mbit/s each way, and whose round trip takes so many ms. Ways run in turn; the table has medians."""

import os
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import cable  # noqa: E402
from cable import wire  # noqa: E402

WAYS = {
    "plain": "all-reduce of f32",
    "bf16": "all-reduce of bf16 (wire)",
    "bits8": "8 bits (dp_compress)",
    "bits4": "4 bits",
    "rank4": "PowerSGD, rank 4",
    "mean4": "local steps, mean every 4",
    "mean16": "mean every 16",
    "diloco16": "DiLoCo every 16",
    "stream16": "in 4 fragments, 2 steps late",
    "diloco16bits4": "DiLoCo every 16, 4 bits",
}
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
case $host in %s) n=%s ;; *) n=%s ;; esac
exec ip netns exec $n sh -c "$*"
""" % (wire.ADDRESSES[0], *wire.HOSTS)
HERE = '#!/bin/sh\nDP_MACHINE=$(ip netns identify $$) exec "%s" "$@"\n'


def script(folder, name, text):
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, 0o755)
    return path


def run(folder, program, way, loss):
    net = f"{wire.ADDRESSES[0]}/24"
    words = ["ip", "netns", "exec", wire.HOSTS[0], "mpirun.openmpi", "--allow-run-as-root",
             "--bind-to", "none", "--mca", "plm_rsh_agent", script(folder, "agent", AGENT),
             "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", net,
             "--mca", "oob_tcp_if_include", net, "--mca", "mpi_yield_when_idle", "1",
             "-H", ",".join(f"{a}:1" for a in wire.ADDRESSES), "-np", "2",
             script(folder, "here", HERE % program), way, str(loss)]
    out = subprocess.run(words, capture_output=True, text=True, check=False, timeout=1800)
    if out.returncode != 0:
        sys.exit(f"{way}: {out.stdout}{out.stderr}")
    steps, seconds, size, reached = out.stdout.split()
    return int(steps), float(seconds), float(size), float(reached)


def measure(args):
    cable.lay(args)
    found = {way: [] for way in args.ways}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for way in args.ways:
                found[way].append(run(folder, os.path.abspath(args.program), way, args.loss))
                print(f"# {way}: {found[way][-1]}", file=sys.stderr, flush=True)
    print(f"To a loss of {args.loss}, over {args.rate:g} Mbit/s and {args.delay:g} ms there and "
          f"back:\n\n{'':32} steps  seconds  ms a step  bytes a step  against plain")
    base = None
    for way in args.ways:
        steps, seconds, size, reached = (statistics.median(x) for x in zip(*found[way]))
        base = base or seconds
        missed = f"  it stayed at {reached:g}" if reached > args.loss else ""
        print(f"{WAYS[way]:32} {steps:5.0f} {seconds:8.1f} {1e3 * seconds / steps:10.1f} "
              f"{size:13.0f} {base / seconds:13.2f}x{missed}", flush=True)


def main():
    parser = cable.options(__doc__, rate=100, rounds=1)
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    parser.add_argument("--loss", type=float, default=0.62)
    cable.measure_apart(measure, parser.parse_args())


main()
