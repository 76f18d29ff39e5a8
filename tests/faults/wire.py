"""Two hosts on this machine: network namespaces, joined by a cable that can be cut.

The cable is this process: each host has a tap device, and a thread carries the frames from one to
the other; late, slowly, not all of them, in one direction only, or none. That needs no module of the kernel
but tun, and no tool but ip."""

import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time

HOSTS = ("host1", "host2")
ADDRESSES = ("10.79.0.1", "10.79.0.2")
DEVICE = "wire"

TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x1002


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class Wire:
    def __init__(self, rng):
        self.rng = rng
        self.loss = 0.0
        self.delay = 0.0
        self.rate = 0.0  # bytes a second, each way; 0: as many as come
        self.blocked = set()  # directions: 0 is from the first host to the second
        self.taps = [self._host(i) for i in range(2)]
        threading.Thread(target=self._carry, daemon=True).start()

    @staticmethod
    def _host(i):
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        name = f"tap{i}"
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP_NO_PI))
        ip("netns", "add", HOSTS[i])
        ip("link", "set", name, "netns", HOSTS[i], "name", DEVICE)
        ip("-n", HOSTS[i], "addr", "add", f"{ADDRESSES[i]}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            ip("-n", HOSTS[i], "link", "set", device, "up")
        return tap

    @staticmethod
    def take_away(i):
        ip("-n", HOSTS[i], "link", "set", DEVICE, "down")

    def _carry(self):
        under_way, count, free = [], 0, [0.0, 0.0]
        while True:
            rest = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select(self.taps, [], [], rest)
            for tap in ready:
                direction = self.taps.index(tap)
                frame = self._read(tap)
                if frame and direction not in self.blocked and self.rng.random() >= self.loss:
                    count += 1
                    free[direction] = max(free[direction], time.monotonic())
                    free[direction] += len(frame) / self.rate if self.rate > 0 else 0
                    due = free[direction] + self.delay
                    heapq.heappush(under_way, (due, count, 1 - direction, frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(under_way)
                self._write(self.taps[to], frame)

    @staticmethod
    def _read(tap):
        try:
            return os.read(tap, 65536)
        except OSError:  # the device is down
            time.sleep(0.001)
            return b""

    @staticmethod
    def _write(tap, frame):
        try:
            os.write(tap, frame)
        except OSError:
            pass
