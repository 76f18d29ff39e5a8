#!/usr/bin/env python3
"""An all-reduce of two processes over a long link, by so many connections; see long.c. As root:

    long.py PROGRAM [--rate 1000] [--delay 20] [--window 400] [--mib 50] [--rounds 5] [--counts 1 8]

Two hosts are network namespaces, joined by the cable of tests/faults/wire.py, which carries so many
Mbit/s each way, and whose round trip takes so many ms. What limits one connection is the most KiB that
the two systems let it have in its buffers (net.ipv4.tcp_wmem and tcp_rmem): a tenth of the 4 MiB that
Linux has, as the link has a tenth of 10 Gbit/s. Counts run in turn; the table has medians."""

import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import cable  # noqa: E402
from cable import wire  # noqa: E402

TIMED = 3  # of each job


def settle(host, window):
    most = window << 10
    for setting in (f"net.ipv4.tcp_wmem=4096 16384 {most}", f"net.ipv4.tcp_rmem=4096 {most} {most}"):
        subprocess.run(["ip", "netns", "exec", host, "sysctl", "-qw", setting], check=True)


def run(program, connections, mib):
    jobs = []
    for process, host in enumerate(wire.HOSTS):
        variables = dict(os.environ, DP_LAUNCH="dp", DP_PROCESS=str(process), DP_PROCESS_COUNT="2",
                         DP_ADDR=f"{wire.ADDRESSES[0]}:7000", DP_MACHINE=host,
                         DP_CONNECTIONS=str(connections))
        jobs.append(subprocess.Popen(["ip", "netns", "exec", host, program, str(mib), str(TIMED)],
                                     env=variables, stdout=subprocess.PIPE, text=True))
    words = jobs[0].communicate(timeout=600)[0].split()
    if jobs[1].wait(timeout=60) != 0 or jobs[0].returncode != 0:
        sys.exit(f"{connections} connections: a process has failed")
    return [float(word) for word in words]


def measure(args):
    cable.lay(args)
    for host in wire.HOSTS:
        settle(host, args.window)
    found = {count: [] for count in args.counts}
    for _ in range(args.rounds):
        for count in args.counts:
            found[count] += run(os.path.abspath(args.program), count, args.mib)
            print(f"# {count}: {found[count][-TIMED:]}", file=sys.stderr, flush=True)
    with open("/proc/sys/net/ipv4/tcp_congestion_control", encoding="utf-8") as file:
        control = file.read().strip()
    least = args.mib * 8 * 1.048576 / args.rate * 1e3
    print(f"{args.mib} MiB over {args.rate:g} Mbit/s and {args.delay:g} ms there and back, at most "
          f"{args.window} KiB of buffers for a connection, {control}; the link needs {least:.0f} "
          f"ms:\n\n"
          f"connections  median ms   least    most   as fast")
    base = statistics.median(found[args.counts[0]])
    for count in args.counts:
        median = statistics.median(found[count])
        print(f"{count:11} {median:10.0f} {min(found[count]):7.0f} {max(found[count]):7.0f} "
              f"{base / median:8.2f}x", flush=True)


def main():
    parser = cable.options(__doc__, rate=1000, rounds=5)
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--window", type=int, default=400)
    parser.add_argument("--mib", type=int, default=50)
    cable.measure_apart(measure, parser.parse_args())


main()
