"""A process that forks: its child gets nothing that others wait for, and no call of the child hangs."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from lmtier.client.client import Client
from lmtier.config import Config, TierSpec
from lmtier.copy.copy_threads import CopyThreads
from lmtier.core.cache import Cache
from lmtier.errors import MisuseError, TierError
from lmtier.testing import sample, store
from lmtier.tiers.base import Item, Job, Op
from lmtier.tiers.registry import open_tier
from lmtier_backends.disk import DiskTier
from tests.core.test_cache import ONE, ROOM, C, cpu, disk, holds_right_bytes, keys, look
from tests.core.test_cache import store as save
from tests.redis_process import RedisServer
from tests.server.process import served, until
from tests.stopwatch import Stopwatch

SECONDS = 20.0


def fork(work: Callable[[], None]) -> int:
    """The child's process id. It ends with 0 if `work` raises nothing."""
    with warnings.catch_warnings():  # that there are threads is what this is about
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        signal.alarm(int(SECONDS))
        work()
    except BaseException:  # noqa: BLE001 - the end of this process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def in_child(work: Callable[[], None]) -> None:
    assert os.waitpid(fork(work), 0)[1] == 0


@contextmanager
def child_of_a_killed_parent(script: str, *arguments: str) -> Iterator[None]:
    """After the script the process forks, and is killed; its child lives on."""
    code = f"{script}\nimport os, time\nif child := os.fork():\n    print(child, flush=True)\ntime.sleep(60)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *arguments]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, env=env)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        yield
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    tiers = (cpu(20), disk(tmp_path / "kv"))
    with Cache(Config(tiers=tiers, chunk_tokens=C, prefault=False, load_deadline=30.0), shared=True) as cache:
        save(cache, keys(3))
        assert cache.flush()
        yield cache
        assert look(cache, keys(3)) == ["cpu"] * 3
        save(cache, keys(3, "afterwards"))
        assert cache.flush()
        cache.check()


def public(thing: object) -> set[str]:
    methods = inspect.getmembers(type(thing), inspect.isfunction)
    return {name for name, _ in methods if not name.startswith("_")}


def test_a_cache_is_a_dead_object_in_a_child(cache: Cache, tmp_path: Path):
    match = cache.match(keys(3), ONE)

    def use() -> None:
        for name in public(cache) - {"close"}:
            with pytest.raises(MisuseError, match=f"belongs to process {os.getppid()}"):
                getattr(cache, name)()
        for tier in (below.tier for below in cache.lower):
            with pytest.raises(MisuseError, match="a forked child must open its own"):
                tier.submit(Job(1, Op.SCAN, ()))
        watch = Stopwatch()
        with cache:
            pass
        cache.close()
        assert watch.seconds() < 1
        with pytest.raises(TierError, match=f"open in process {os.getppid()}"):
            DiskTier(tmp_path / "kv")
        with Cache(Config(tiers=(cpu(4),), chunk_tokens=C, prefault=False)) as own:
            save(own, keys(2))
            assert look(own, keys(2)) == ["cpu"] * 2

    assert len(public(cache)) > 20
    in_child(use)
    with pytest.raises(TierError, match=f"open in process {os.getpid()}"):
        DiskTier(tmp_path / "kv")
    assert holds_right_bytes(cache, match)
    cache.release(match)


def test_a_child_of_a_child_has_nothing_either(cache: Cache):
    def use() -> None:
        with pytest.raises(MisuseError):
            cache.step()

    in_child(lambda: in_child(use))


def test_a_child_of_a_child_has_its_own_connection(tmp_path: Path):
    with (
        served(tmp_path, unix=str(tmp_path / "socket"), config={"chunk_tokens": C}) as server,
        Client(server.where["unix"]) as client,
    ):
        client.commit(client.reserve(keys(3), ONE))

        def use() -> None:
            held = client.match(keys(3), ONE)
            assert held.chunks == 3
            in_child(lambda: connect(client))
            client.release(held)

        in_child(use)


def connect(client: Client) -> None:
    assert client.stats()


def test_a_slab_is_not_that_of_a_child(cache: Cache):
    """Private or shared: what a child does to it is seen by nobody, and it keeps none of its memory."""

    def spoil() -> None:
        view = cache.slab.view(0, 20 * ROOM)
        assert bytes(view) == bytes(20 * ROOM)
        view[:] = b"x" * len(view)
        maps = Path("/proc/self/maps").read_text()
        assert "lmtier-slab" not in maps
        assert "lmtier-presence" not in maps

    in_child(spoil)


def open_files() -> set[str]:
    """What they are, with their numbers."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            place = f"/proc/self/fd/{fd}"
            found.add(f"{os.readlink(place)} {os.stat(place).st_ino}")
    return found


def test_a_child_holds_no_socket_lock_or_file_of_its_parent(tmp_path: Path):
    redis = RedisServer(tmp_path / "redis")
    try:
        with served(tmp_path, unix=str(tmp_path / "socket")) as server:
            before = open_files()
            tiers = (cpu(20), disk(tmp_path / "kv"), f"redis://127.0.0.1:{redis.port}")
            config = Config(tiers=tiers, chunk_tokens=C, prefault=False)
            with Cache(config, shared=True) as cache, Client(server.where["unix"]) as client:
                save(cache, keys(5))
                assert cache.flush()
                mine = {each for each in open_files() - before if not each.startswith(("anon_inode", "/dev"))}
                kinds = {"socket:", "lmtier-slab", "kv/lock"}
                assert all(any(kind in each for each in mine) for kind in kinds), mine

                def look_round() -> None:
                    assert open_files() & mine == set()

                in_child(look_round)
                assert client.stats()
                assert look(cache, keys(5)) == ["cpu"] * 5
    finally:
        redis.kill()


def test_a_child_ignores_what_its_parent_closed_before(tmp_path: Path):
    """Others have these numbers now."""
    with served(tmp_path, unix=str(tmp_path / "socket")) as server:
        cache = Cache(
            Config(tiers=(cpu(20), disk(tmp_path / "kv")), chunk_tokens=C, prefault=False), shared=True
        )
        client = Client(server.where["unix"])
        client.close()
        cache.close()
        ends = [end for _ in range(40) for end in os.pipe()]

        def all_are_open() -> None:
            for end in ends:
                os.fstat(end)

        in_child(all_are_open)
        for end in ends:
            os.close(end)


def test_a_killed_owner_frees_its_directory_despite_a_child(tmp_path: Path):
    script = (
        "import sys\nfrom lmtier import Cache, Config\n"
        "cache = Cache(Config(tiers=('cpu://?capacity=1MiB', sys.argv[1]), prefault=False))"
    )

    def is_free() -> bool:
        with suppress(TierError):
            DiskTier(tmp_path / "kv").close()
            return True
        return False

    with child_of_a_killed_parent(script, f"disk://{tmp_path}/kv?capacity=1MiB"):
        until(is_free)  # the child may not have begun


def test_a_killed_engine_frees_its_memory_despite_a_child(tmp_path: Path):
    script = (
        "import sys\nfrom lmtier.client.client import Client\nfrom tests.core.test_cache import ONE, keys\n"
        "client = Client(sys.argv[1])\n"
        "reservation = client.reserve(keys(4), ONE)\nassert len(reservation.chunks) == 4"
    )
    settings = {"chunk_tokens": C}
    with served(tmp_path, config=settings, unix=str(tmp_path / "socket")) as server:
        address = server.where["unix"]
        with Client(address) as other, child_of_a_killed_parent(script, address):
            until(lambda: other.stats()["cpu"]["used"] == 0)


@pytest.mark.parametrize("what", ["disk", "redis"])
def test_a_child_cannot_use_its_parents_tier_or_disturb_it(tmp_path: Path, what: str):
    redis = RedisServer(tmp_path / "redis")
    url = {"disk": f"disk://{tmp_path}/kv?capacity=1GiB", "redis": f"redis://127.0.0.1:{redis.port}"}[what]
    each = sample(1)
    try:
        with closing(open_tier(TierSpec.parse(url))) as tier:
            assert store(tier, each).ok

            def use() -> None:
                with pytest.raises(MisuseError, match="this tier belongs to process"):
                    tier.submit(Job(1, Op.LOAD, (Item(each.name, each.payload),)))
                tier.close()

            in_child(use)
            assert store(tier, each).ok
    finally:
        redis.kill()


def test_a_crew_copies_in_a_child_too():
    crew = CopyThreads(2)
    done: list[int] = []

    def use() -> None:
        for _ in range(50):
            done.clear()
            crew.run([lambda: done.append(1)] * 7)
            assert len(done) == 7
        crew.close()

    crew.run([lambda: done.append(1)] * 7)
    in_child(use)
    crew.close()
