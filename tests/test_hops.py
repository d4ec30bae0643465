"""How many calls of ours lie between a caller and the bytes: counted, so that the pages can say it."""

import sys
from pathlib import Path

import numpy as np

import lmtier
from lmtier.client.client import Client
from lmtier.config import Config
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.cache import Cache
from lmtier.format.keys import Identity
from lmtier.format.layout import Layout, form_of
from tests.server.process import Served

OURS = str(Path(lmtier.__file__).parent)
C = 16
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=8, dtype="bf16", block_tokens=4, chunk_tokens=C, packing="token"
)
IN_PROCESS, TO_THE_SOCKET = 4, 7


def depth(frame):
    """How many of lmtier's frames are open here."""
    ours = 0
    while frame is not None:
        ours += frame.f_code.co_filename.startswith(OURS)
        frame = frame.f_back
    return ours


def test_from_a_mover_to_the_bytes(monkeypatch):
    found = []
    copy = np.copyto

    def look_and_copy(*args):
        found.append(depth(sys._getframe(1)))
        copy(*args)

    def hops(work):
        found.clear()
        work()
        return max(found)

    tensors = [np.zeros((40, 2, 4, 16), np.uint16) for _ in range(2)]
    config = Config(tiers=("cpu://?capacity=1MiB",), chunk_tokens=C, prefault=False, verify="off")
    with Cache(config) as cache:
        mover = Mover(
            cache, PagedKV(LAYOUT, LAYOUT.whole, tensors), Identity(model="m"), spare_blocks=range(32, 40)
        )
        monkeypatch.setattr(np, "copyto", look_and_copy)
        chains = [mover.chain([first, *range(2 * C)]) for first in (1, 2)]
        saves = [mover.save(chain, range(9)) for chain in chains]
        counted = [hops(lambda: saves[0].layer(0)), hops(saves[0].all), hops(saves[1].all)]
        for save in saves:
            save.commit()
        loads = [mover.load(mover.match(chain), range(9)) for chain in chains]
        counted += [hops(lambda: loads[0].layer(0)), hops(loads[0].all), hops(loads[1].all)]
        for load in loads:
            load.finish()
    assert max(counted) <= IN_PROCESS, counted


def hops_to(last, work):
    """The deepest that `work` is in lmtier when it calls one of the C functions that `last` names."""
    found = []

    def look(frame, event, function):
        if event == "c_call" and function.__name__ in last:
            found.append(depth(frame))

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return max(found)


def test_from_a_client_to_the_socket(tmp_path):
    served = Served(tmp_path, config={"chunk_tokens": C}, unix=str(tmp_path / "s"))
    form = form_of(LAYOUT, [LAYOUT.whole])
    keys = [bytes([n]) * 32 for n in range(1, 5)]
    with Client(served.where["unix"]) as client:
        reservation = client.reserve(keys, form)
        calls = {
            "commit": lambda: client.commit(reservation),
            "match": lambda: client.release(client.match(keys, form)),
            "reserve": lambda: client.reserve([b"x" * 32], form),
            "seen": lambda: client.touch(keys),
        }
        counted = {name: hops_to({"send", "recv"}, call) for name, call in calls.items()}
    served.kill()
    assert 2 <= max(counted.values()) <= TO_THE_SOCKET, counted
