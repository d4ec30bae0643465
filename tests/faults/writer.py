"""A process to be killed: for each line `root seed kill_at` it forks a child that stores until it dies.

Standard output says, one line each: `pid n`; what a child is about to do (`s number victim`, `d number`),
what was done (`S number victim`, `D number`); `end status`. kill_at n > 0: the child kills itself at its
n-th file call; 0: it waits to be killed.
"""

import itertools
import os
import random
import signal
import sys
import traceback

from lmtier.format.layout import PAGE
from lmtier.testing import FaultyModule, drain, sample, scan
from lmtier.tiers.base import Item, Job, Op
from lmtier_backends import disk
from tests.sealed import seal_if_asked

UNIVERSE = [sample(number, 1 + number * 1777 % (48 * PAGE)) for number in range(120)]
NUMBER = {each.name: number for number, each in enumerate(UNIVERSE)}
CALLS = {"open", "ftruncate", "posix_fallocate", "pwritev", "utime", "close", "rename", "unlink"}
IN_FLIGHT = 6
ROOM = 60


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # below PIPE_BUF: whole or not at all


def work(root: str, seed: int, kill_at: int) -> None:
    if kill_at:

        def die(_: str) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(disk, "os", FaultyModule(os, CALLS, kill_at, die))  # noqa: B010 - mypy knows a module there
    chance = random.Random(seed)
    tier = disk.DiskTier(root, readers=1, writers=2)
    present = {NUMBER[name] for name in scan(tier)}
    absent = set(range(len(UNIVERSE))) - present
    under_way: dict[int, tuple[object, ...]] = {}
    for job in itertools.count():
        if len(under_way) == IN_FLIGHT or not absent:
            for done in drain(tier, 1):
                if done.failed:
                    say("failed", done)
                words = under_way.pop(done.id)
                say(str(words[0]).upper(), *words[1:])
                gone = words[2:] if words[0] == "s" else words[1:]
                absent |= {number for number in gone if isinstance(number, int) and number >= 0}
                if words[0] == "s":
                    present.add(int(str(words[1])))
        victim = chance.choice(sorted(present)) if present else -1
        if victim >= 0 and (chance.random() < 0.2 or not absent):
            present.discard(victim)
            under_way[job] = ("d", victim)
            say("d", victim)
            tier.submit(Job(job, Op.DELETE, (Item(UNIVERSE[victim].name),)))
            continue
        # Mostly new objects, in the place of old ones when it gets crowded; at times one that is there.
        again = present and chance.random() < 0.1
        number = chance.choice(sorted(present if again else absent))
        if again or not (len(present) > ROOM or chance.random() < 0.3):
            victim = -1
        present -= {number, victim}
        absent.discard(number)
        under_way[job] = ("s", number, victim)
        say("s", number, victim)
        replaces = UNIVERSE[victim].name if victim >= 0 else None
        tier.submit(Job(job, Op.STORE, (UNIVERSE[number].item(replaces),)))


def serve() -> None:
    for line in sys.stdin:
        root, seed, kill_at = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                work(root, int(seed), int(kill_at))
            except BaseException:  # noqa: BLE001 - a child that ends by itself fails the test
                traceback.print_exc()
            os._exit(1)
        say("pid", pid)
        say("end", os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    seal_if_asked()
    serve()
