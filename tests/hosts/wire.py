"""A cable between two new TAP interfaces that delays and loses frames, for kernels without netem.

python -m tests.hosts.wire ONE OTHER     then lines like {"delay": 0.05, "loss": 0.01} on stdin
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from select import select

TUNSETIFF, TAP, BARE = 0x400454CA, 2, 0x1000
FRAME = 1 << 16
WAITING = 4096  # frames that are on their way at most; more are lost, as in a router


class End:
    """An interface, and the frames that are on their way to it."""

    def __init__(self, name: str) -> None:
        self.file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | BARE))
        self.coming: deque[tuple[float, bytes]] = deque()

    def deliver(self, now: float) -> None:
        while self.coming and self.coming[0][0] <= now:
            with suppress(OSError):  # the interface is down
                os.write(self.file, self.coming.popleft()[1])


def carry(one: End, other: End) -> None:
    """Until stdin ends."""
    dice = random.Random(1)
    delay, loss = 0.0, 0.0
    towards = {one.file: other, other.file: one}
    while True:
        due = [end.coming[0][0] for end in towards.values() if end.coming]
        patience = max(0.0, min(due) - time.monotonic()) if due else None
        for file in select([sys.stdin.fileno(), *towards], [], [], patience)[0]:
            if file == sys.stdin.fileno():
                line = sys.stdin.readline()
                if not line:
                    return
                told = json.loads(line)
                delay, loss = told["delay"], told["loss"]
                continue
            coming, until = towards[file].coming, time.monotonic() + delay
            with suppress(BlockingIOError):
                while True:
                    frame = os.read(file, FRAME)
                    if dice.random() >= loss and len(coming) < WAITING:
                        coming.append((until, frame))
        for end in towards.values():
            end.deliver(time.monotonic())


if __name__ == "__main__":
    ends = [End(name) for name in sys.argv[1:]]
    print("ready", flush=True)
    carry(*ends)
