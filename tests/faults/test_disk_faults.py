"""The disk tier when the disk, the system or a neighbour misbehaves: a miss with a reason, nothing left."""

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest

from lmtier.config import Config, TierSpec
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError, TierError
from lmtier.format.layout import PAGE, Layout, Name, form_of
from lmtier.format.objects import EVERYTHING
from lmtier.rules.fullness import FULL_PAUSE
from lmtier.testing import (
    FaultyModule,
    Sample,
    delete,
    load,
    lookup,
    opaque_layout,
    replace_start,
    sample,
    scan,
    store,
)
from lmtier.tiers.base import Reason
from lmtier.tiers.registry import open_tier
from lmtier_backends import disk
from lmtier_backends.disk import DiskTier, Fault, verify

FILE_CALLS = {
    *("open", "close", "fstat", "stat", "ftruncate", "posix_fallocate", "preadv", "pwritev"),
    *("rename", "scandir", "unlink", "utime"),
}
ERRNOS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE, errno.EROFS)


def path_of(root: Path, name: Name) -> Path:
    return root / name.key.hex()[-2:] / str(name)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def partial_files(root: Path) -> list[str]:
    return os.listdir(root / "partial")


def assert_stored(tier: DiskTier, *objects: Sample) -> None:
    for each in objects:
        done, got = load(tier, each.name, each.room)
        assert done.ok == {each.name: each.header}, done
        assert got == each.payload


# ---- whose directory it is


FULL = ("lock", "partial", *(f"{i:02x}" for i in range(256)))


@pytest.mark.parametrize(
    "entries",
    [
        ("letters",),
        ("lost+found", ".snapshot"),
        ("lock",),
        ("lock", "partial"),  # as apt's
        ("00", "7f", "ff"),  # as npm's and git's
        (*FULL[2:], "index"),
        (*FULL[1:], "index"),
    ],
)
def test_a_directory_of_others_is_left_alone_unless_adopted(tmp_path: Path, entries: tuple[str, ...]):
    root = tmp_path / "root"
    for name in entries:
        (root / name).mkdir(parents=True)
    if "lock" in entries:
        (root / "lock").rmdir()
        (root / "lock").write_text("another program")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(TierError, match=r"holds other things, such as '.*': name .* or set adopt=yes"):
        DiskTier(root)
    with pytest.raises(TierError, match="is not the directory of a disk tier"):
        verify(root)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    DiskTier(root, adopt=True).close()
    DiskTier(root).close()  # it is ours now


def test_our_directory_stays_ours_whatever_lies_beside_it(tmp_path: Path):
    (tmp_path / "lost+found").mkdir()
    each = sample(1)
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, each)
    (tmp_path / "notes").write_text("")
    with closing(DiskTier(tmp_path)) as tier:
        assert_stored(tier, each)
    (tmp_path / "notes").unlink()
    for path in [tmp_path / "partial", *tmp_path.glob("??")]:  # as a program that deletes what is empty
        if not os.listdir(path):
            path.rmdir()
    with closing(DiskTier(tmp_path)) as tier:
        assert_stored(tier, each)


@pytest.mark.parametrize("made", [0, 1, 7, 257])
def test_a_start_that_was_killed_leaves_a_directory_of_ours(tmp_path: Path, made: int):
    for name in FULL[1 : 1 + made]:
        (tmp_path / name).mkdir()
    DiskTier(tmp_path).close()


@pytest.mark.parametrize("root", ["/", "//", "/../..", "/tmp/..", "link"])
def test_the_root_of_the_system_is_refused_even_if_adopted(tmp_path: Path, root: str):
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(ConfigError, match="/ is the root of the whole system: name a directory in it"):
        DiskTier(tmp_path / root, adopt=True)


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path: Path):
    root = tmp_path / "small"
    root.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(root)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_a_full_disk_fails_stores_only(small_disk: Path):
    objects = [sample(i, 1 << 20) for i in range(12)]
    with closing(DiskTier(small_disk)) as tier:
        done = store(tier, *objects)
        kept = [each for each in objects if each.name in done.ok]
        assert 5 <= len(kept) < 8
        assert set(done.failed.values()) == {Reason.FULL}
        assert partial_files(small_disk) == []
        assert_stored(tier, *kept)
        late = next(each for each in objects if each.name in done.failed)
        assert store(tier, late).failed == {late.name: Reason.FULL}
        # The place of an evicted object is enough, and so is room that was freed.
        assert store(tier, late, replaces=kept[0].name).ok
        delete(tier, kept[1].name)
        assert store(tier, kept[0]).ok
        assert_stored(tier, late, kept[0], *kept[2:])
        assert scan(tier).keys() == {each.name for each in (late, kept[0], *kept[2:])}


def test_a_full_disk_can_be_opened_and_read(small_disk: Path):
    each = sample(1)
    with closing(DiskTier(small_disk)) as tier:
        store(tier, each)
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(PAGE)):
            pass
    assert os.statvfs(small_disk).f_bavail == 0
    with closing(DiskTier(small_disk)) as tier:
        assert_stored(tier, each)
        assert scan(tier).keys() == {each.name}


CHUNK = Layout.uniform(
    layers=4, heads=4, head_dim=128, dtype="bf16", block_tokens=16, chunk_tokens=16, packing="token"
)  # 128 KiB
FORM = form_of(CHUNK, (CHUNK.whole,))


def tiers_of(root: Path) -> list[str]:
    return ["cpu://?capacity=8MiB", f"disk://{root}?capacity=1GiB"]


def save(cache: Cache, name: str, count: int) -> list[bytes]:
    keys = [sha256(f"{name}{i}".encode()).digest() for i in range(count)]
    reservation = cache.reserve(keys, FORM)
    assert len(reservation.chunks) == count
    for key, offsets in reservation.places:
        cache.slab.view(offsets[0], 32)[:] = key
    cache.commit(reservation)
    return keys


def finds(cache: Cache, keys: list[bytes]) -> bool:
    """Whether the disk has all of them, as they were."""
    for entry in cache.index.entries():
        cache.memory.discard(entry.key)
    match = cache.wait(cache.match(keys, FORM))
    assert set(match.sources) <= {"disk"}
    right = [bytes(cache.slab.view(entry.offsets[0], 32)) == entry.key for entry in match.run]
    cache.release(match)
    return right == [True] * len(keys)


def test_a_capacity_beyond_the_file_system_is_limited(small_disk: Path, caplog):
    """Somebody else's files take what we had, and give it back."""
    now = [0.0]
    tiers = ("cpu://?capacity=8MiB", f"disk://{small_disk}/kv?capacity=1GiB&policy=lru")
    config = Config(tiers=tiers, chunk_tokens=16, prefault=False, load_deadline=30.0)
    with Cache(config, clock=lambda: now[0]) as cache:
        assert "capacity=1 GiB is more than the storage has: the tier uses 8 MiB" in caplog.text
        for turn in range(4):  # 3 MiB each
            keys = save(cache, f"turn{turn}", 24)
            assert cache.flush()
            assert finds(cache, keys)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(PAGE)):
                pass
        for _ in cache.lower[0].clear(EVERYTHING, force=True):
            pass
        assert cache.flush()
        with filler.open("ab", buffering=0) as file:  # half of what we had
            file.write(bytes(4 << 20))
        for turn in range(6):
            keys = save(cache, f"less{turn}", 16)
            assert cache.flush(), "written, each in the place of another"
            assert finds(cache, keys)
        before = cache.stats()["disk"]["chunks"]
        assert 16 <= before < 32
        filler.unlink()
        now[0] += FULL_PAUSE
        keys = save(cache, "more", 24) + save(cache, "again", 8)
        assert cache.flush()
        assert finds(cache, keys[:24])
        assert cache.stats()["disk"]["chunks"] == before + 32
        cache.check()
    assert partial_files(small_disk / "kv") == []


# ---- the nth system call fails


def fail_each_call(root: Path, scenario: Callable[[FaultyModule], None]) -> int:
    """Run `scenario` with each of its file calls failing in each way; return how many runs that took."""
    runs = 0
    for code in ERRNOS:
        nth = 1
        while True:

            def fail(name: str, code: int = code) -> None:
                raise OSError(code, os.strerror(code), name)

            faulty = FaultyModule(os, FILE_CALLS, nth, fail)
            scenario(faulty)
            assert partial_files(root) == []
            runs += 1
            if len(faulty.made) < nth:
                break
            nth += 1
        assert nth > 3
    return runs


def test_any_failing_call_of_a_store_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old, new, other = sample(1, 4 * PAGE), sample(2, 6 * PAGE), sample(3)
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, other)
        before = open_files()

        def scenario(faulty: FaultyModule) -> None:
            store(tier, old)
            delete(tier, new.name)
            with monkeypatch.context() as patched:
                patched.setattr(disk, "os", faulty)
                done = store(tier, new, replaces=old.name)
            assert open_files() == before
            assert not path_of(tmp_path, old.name).exists()
            assert path_of(tmp_path, new.name).exists() == bool(done.ok)
            assert done.ok.keys() | done.failed.keys() == {new.name}
            assert store(tier, new).ok
            assert_stored(tier, new, other)

        assert fail_each_call(tmp_path, scenario) > 30


def test_any_failing_call_of_a_load_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    each = sample(1)
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, each)
        before = open_files()

        def scenario(faulty: FaultyModule) -> None:
            with monkeypatch.context() as patched:
                patched.setattr(disk, "os", faulty)
                done, got = load(tier, each.name, each.room)
            assert done.ok.keys() | done.failed.keys() == {each.name}
            assert got == each.payload if done.ok else Reason.ABSENT not in done.failed.values()
            assert open_files() == before
            assert_stored(tier, each)

        assert fail_each_call(tmp_path, scenario) > 15


def test_any_failing_call_at_start_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    each = sample(1)
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, each)
    before = open_files()

    def scenario(faulty: FaultyModule) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(disk, "os", faulty)
            try:
                tier = DiskTier(tmp_path)
            except TierError as error:
                assert str(tmp_path) in str(error)  # noqa: PT017 - most runs raise, the last does not
            else:
                tier.close()
        assert open_files() == before
        with closing(DiskTier(tmp_path)) as tier:
            assert_stored(tier, each)

    assert fail_each_call(tmp_path, scenario) > 15


@pytest.mark.parametrize("piece", [PAGE, 3 * PAGE])
def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int):
    def short(call):
        def some(fd: int, buffers, offset: int):
            return call(fd, [buffers[0][:piece]], offset)

        return some

    each = sample(1, 20 * PAGE)
    with closing(DiskTier(tmp_path)) as tier:
        monkeypatch.setattr(os, "pwritev", short(os.pwritev))
        monkeypatch.setattr(os, "preadv", short(os.preadv))
        assert store(tier, each).ok
        assert_stored(tier, each)


def test_a_disk_that_takes_nothing_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    each = sample(1)
    with closing(DiskTier(tmp_path)) as tier:
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
        assert store(tier, each).failed == {each.name: Reason.ERROR}
        assert partial_files(tmp_path) == []


# ---- who may open it


def test_a_second_opener_is_refused(tmp_path: Path):
    with closing(DiskTier(tmp_path)):
        with pytest.raises(TierError, match=f"open in process {os.getpid()}"):
            DiskTier(tmp_path)
        script = f"from lmtier_backends.disk import DiskTier; DiskTier({str(tmp_path)!r})"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, env=env, check=False)
        assert other.returncode == 1
        assert f"InUseError: disk tier: {tmp_path} is open in process {os.getpid()}".encode() in other.stderr
    DiskTier(tmp_path).close()


def test_a_place_that_is_no_directory_is_named(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    for root in (file, file / "below"):
        with pytest.raises(TierError, match=re.escape(f"cannot use {root}: ")):
            DiskTier(root)
    DiskTier(tmp_path / "root").close()
    (tmp_path / "root" / "7f").rmdir()
    (tmp_path / "root" / "7f").symlink_to(tmp_path)
    with pytest.raises(TierError, match="7f in it is not a directory"):
        DiskTier(tmp_path / "root")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: str, *_) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(TierError, match=re.escape(f"cannot use {tmp_path}/new: Permission denied; it must")):
        DiskTier(tmp_path / "new")


def test_no_threads_is_a_mistake(tmp_path: Path):
    with pytest.raises(ConfigError, match="readers=0"):
        DiskTier(tmp_path, readers=0)


def test_a_missing_directory_is_named_and_is_one_outage(tmp_path: Path, caplog):
    """What is deleted there succeeds, because nothing is there, and shows nothing."""
    root, layout = tmp_path / "kv", opaque_layout(PAGE)
    form, url = form_of(layout, (layout.whole,)), f"disk://{root}?capacity=16MiB"
    keys = [sha256(bytes([number])).digest() for number in range(60)]

    def save(cache: Cache, key: bytes) -> None:
        cache.commit(cache.reserve([key], form))
        cache.flush(timeout=0.05)

    with Cache(Config(tiers=["cpu://?capacity=4MiB", url], chunk_tokens=1, prefault=False)) as cache:
        (below,) = cache.lower
        breaker = below.store_breaker
        for key in keys[:10]:
            save(cache, key)
        assert cache.flush()
        shutil.rmtree(root)
        saved, deleted = iter(keys[10:]), iter(keys[:10])
        while not breaker.is_open:
            save(cache, next(saved))
        assert breaker.outage is not None
        began = breaker.outage.since
        for key in deleted:
            below.discard(key, ())
            save(cache, next(saved))
        assert breaker.is_open
        assert breaker.outage == (began, None, f"No such file or directory: {root}")
    said = [record.getMessage() for record in caplog.records if record.name == "lmtier"]
    assert [line for line in said if "keeps failing" in line] == [
        f"lmtier: tier disk: store keeps failing and is paused for now: No such file or directory: {root}"
    ]
    assert not [line for line in said if "works again" in line]


# ---- what is in the directory


def test_nobody_else_can_read(tmp_path: Path):
    each = sample(1)
    before = os.umask(0)
    try:
        with closing(DiskTier(tmp_path / "root")) as tier:
            store(tier, each)
    finally:
        os.umask(before)
    for path in (tmp_path / "root", *(tmp_path / "root").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


STRANGER = 54321


def make_foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving files away needs root")
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@pytest.mark.parametrize("where", [".", "7f", "partial"])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, where: str):
    root = tmp_path / "root"
    DiskTier(root).close()
    make_foreign(root / where)
    with pytest.raises(TierError, match=re.escape(f"{root / where} belongs to user {STRANGER}")):
        DiskTier(root)
    with pytest.raises(TierError, match="trust_others=true"):
        open_tier(TierSpec.parse(f"disk://{root}?capacity=1GiB"))
    open_tier(TierSpec.parse(f"disk://{root}?capacity=1GiB&trust_others=true")).close()


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o1777])
@pytest.mark.parametrize("where", [".", "7f", "partial"])
def test_a_directory_writable_by_others_is_refused(tmp_path: Path, where: str, mode: int):
    root = tmp_path / "root"
    DiskTier(root).close()
    (root / where).chmod(mode)
    said = f"{root / where} may be written by other users (mode {mode & 0o777:o})"
    with pytest.raises(TierError, match=re.escape(said)):
        DiskTier(root)
    DiskTier(root, trust_others=True).close()
    (root / where).chmod(0o755)
    DiskTier(root).close()


def test_a_new_directory_in_a_public_one_is_ours(tmp_path: Path):
    """It is held open: what others make of its path meanwhile does not matter."""
    tmp_path.chmod(0o777)
    each, forged = sample(1), sample(2)
    with closing(DiskTier(tmp_path / "kv")) as tier:
        store(tier, each)
        (tmp_path / "kv").rename(tmp_path / "ours")
        theirs = path_of(tmp_path / "kv", forged.name)
        theirs.parent.mkdir(parents=True)
        theirs.write_bytes(forged.at_rest())
        assert_stored(tier, each)
        assert load(tier, forged.name, forged.room)[0].failed == {forged.name: Reason.ABSENT}
        assert scan(tier).keys() == lookup(tier, each.name, forged.name).keys() == {each.name}
        assert store(tier, sample(3)).ok
    assert path_of(tmp_path / "ours", sample(3).name).exists()
    make_foreign(tmp_path / "kv")
    with pytest.raises(TierError, match="belongs to user"):
        DiskTier(tmp_path / "kv")


@pytest.mark.unsealed
@pytest.mark.parametrize("how", ["foreign", "writable"])
def test_a_file_that_others_may_have_written_is_not_served(tmp_path: Path, how: str):
    ours, theirs = sample(1), [sample(i) for i in range(2, 5)]

    def forge(number: int) -> None:
        path = path_of(tmp_path, theirs[number].name)
        path.write_bytes(theirs[number].at_rest())
        path.chmod(0o600 if how == "foreign" else 0o620)
        if how == "foreign":
            make_foreign(path)

    with closing(DiskTier(tmp_path)) as tier:
        store(tier, ours)
        forge(0)
        assert load(tier, theirs[0].name, theirs[0].room)[0].failed == {theirs[0].name: Reason.CORRUPT}
        forge(1)
        assert lookup(tier, ours.name, theirs[1].name).keys() == {ours.name}
        assert scan(tier).keys() == {ours.name}
        assert not path_of(tmp_path, theirs[1].name).exists(), "it has room of ours"
        forge(2)
        assert store(tier, theirs[2]).ok
        assert path_of(tmp_path, theirs[2].name).stat().st_uid == os.geteuid()
        assert_stored(tier, ours, theirs[2])
    forge(0)
    with closing(DiskTier(tmp_path, trust_others=True)) as tier:
        assert_stored(tier, ours, theirs[0])
        assert theirs[0].name in scan(tier)


def test_an_existing_root_keeps_its_mode(tmp_path: Path):
    tmp_path.chmod(0o755)
    DiskTier(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "00").stat().st_mode & 0o777 == 0o700


def test_partial_files_go_at_start_and_nothing_else(tmp_path: Path):
    DiskTier(tmp_path).close()
    (tmp_path / "partial" / str(sample(1).name)).write_bytes(b"half")
    (tmp_path / "partial" / "probe").write_bytes(b"")
    (tmp_path / "partial" / "notes.txt").write_bytes(b"of somebody")
    DiskTier(tmp_path).close()
    assert partial_files(tmp_path) == ["notes.txt"]


def test_a_symbolic_link_is_not_followed(tmp_path: Path):
    each, outside = sample(1), tmp_path / "outside"
    outside.write_bytes(each.at_rest())
    with closing(DiskTier(tmp_path / "root")) as tier:
        place = path_of(tmp_path / "root", each.name)
        place.symlink_to(outside)
        assert lookup(tier, each.name) == scan(tier) == {}
        assert load(tier, each.name, each.room)[0].failed == {each.name: Reason.CORRUPT}
        assert not place.is_symlink()
        partial = tmp_path / "root" / "partial" / str(each.name)
        partial.symlink_to(outside)
        assert store(tier, each).failed == {each.name: Reason.ERROR}
        assert not partial.is_symlink()
        place.symlink_to(outside)
        assert store(tier, each).ok
        assert not place.is_symlink()
    assert outside.read_bytes() == each.at_rest()


def test_a_scan_keeps_foreign_files_and_drops_broken_ones(tmp_path: Path, caplog):
    sound, empty, short, odd = (sample(i) for i in range(4))
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, sound)
        path_of(tmp_path, empty.name).write_bytes(b"")
        path_of(tmp_path, short.name).write_bytes(bytes(PAGE))
        path_of(tmp_path, odd.name).write_bytes(bytes(2 * PAGE + 1))
        home = path_of(tmp_path, sound.name)
        foreign = [
            tmp_path / "notes",
            home.with_name("README"),
            home.with_name(home.name + ".tmp"),
            home.with_name(home.name.replace("L0-1", "L00-1")),
            (tmp_path / ("00" if home.parent.name != "00" else "01")) / home.name,
        ]
        for path in foreign:
            path.write_bytes(b"")
        (tmp_path / "lost+found").mkdir()  # of the file system
        assert scan(tier).keys() == {sound.name}
        assert tier.foreign_entries == len(foreign)
        assert all(path.exists() for path in foreign)
        assert not any(path_of(tmp_path, each.name).exists() for each in (empty, short, odd))
        assert [record.message for record in caplog.records] == [
            f"lmtier: 5 foreign entries in {tmp_path} are left alone"
        ]


def test_a_damaged_file_of_a_tebibyte_costs_no_other_object(tmp_path: Path, caplog):
    """It is the youngest, and fits into the capacity: what counts is what its header says it can be."""
    with Cache(
        Config(tiers=tiers_of(tmp_path), chunk_tokens=16, prefault=False, load_deadline=30.0)
    ) as cache:
        keys = save(cache, "a", 8)
        assert cache.flush()
    sound = path_of(tmp_path, Name(keys[0], CHUNK.whole))
    huge = [Name(keys[0][:4] + bytes([i]) * 28, CHUNK.whole) for i in range(4)]
    for name in huge:
        path_of(tmp_path, name).write_bytes(sound.read_bytes())  # of another object
        os.truncate(path_of(tmp_path, name), 1 << 40)
    path_of(tmp_path, huge[1]).write_bytes(b"")  # no header
    os.truncate(path_of(tmp_path, huge[1]), 1 << 40)
    os.truncate(sound, 1 << 40)  # a sound header, of a smaller object
    tiers = [tiers_of(tmp_path)[0], f"disk://{tmp_path}?capacity=2TiB"]
    with Cache(Config(tiers=tiers, chunk_tokens=16, prefault=False, load_deadline=30.0)) as cache:
        assert cache.flush()
        assert cache.stats()["disk"] | {"capacity": 0} == {
            "chunks": 7,
            "used": 7 * FORM.stored_bytes,
            "capacity": 0,
        }
        assert finds(cache, keys[1:])
    assert not any(path_of(tmp_path, name).exists() for name in [*huge, Name(keys[0], CHUNK.whole)])
    assert sum("is corrupt, deleting it" in each.message for each in caplog.records) == 5


def test_one_file_of_each_size_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    real = os.preadv

    def count(fd: int, buffers, offset: int) -> int:
        read.append(fd)
        return real(fd, buffers, offset)

    objects = [sample(i, PAGE * (1 + i % 3)) for i in range(30)]
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, *(replace_start(each, b"same") for each in objects))
        monkeypatch.setattr(os, "preadv", count)
        assert len(scan(tier)) == 30
        assert len(read) == 3


def test_a_file_that_goes_during_a_scan_is_no_error(tmp_path: Path):
    objects = [sample(i) for i in range(20)]
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, *objects)
        found = []
        for name, _ in tier.scan():
            found.append(name)
            tier.delete([each.name for each in objects if each.name not in found])
        assert 1 <= len(found) < len(objects)


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two files beside sound ones: the system cannot read the inode of one, and does not delete the other."""
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, *(sample(i) for i in range(4)))
    sick, fixed = path_of(tmp_path, sample(0).name), path_of(tmp_path, sample(1).name)
    os.truncate(fixed, 0)
    scandir, unlink = os.scandir, os.unlink

    class Sick:
        name = sick.name

        def stat(self, **_) -> None:
            raise OSError(errno.EIO, "Input/output error", self.name)

    @contextmanager
    def listed(place: int):
        with scandir(place) as entries:
            yield (Sick() if entry.name == sick.name else entry for entry in entries)

    def refuse(path: str, **place) -> None:
        if path.endswith(fixed.name):
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path, **place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", listed)
        patch.setattr(os, "unlink", refuse)
        yield sick, fixed


def test_a_file_that_the_system_refuses_costs_no_other(tmp_path: Path, refused, caplog):
    with closing(DiskTier(tmp_path)) as tier:
        assert scan(tier).keys() == {sample(2).name, sample(3).name}
        assert tier.foreign_entries == 2
    assert caplog.text.count("the system refuses to examine or delete files") == 1
    assert all(path.exists() for path in refused)


@pytest.mark.unsealed
def test_verify_names_what_the_system_refuses_and_goes_on(tmp_path: Path, refused):
    sick, fixed = refused
    report = verify(tmp_path, fix=True)
    assert (report.ok, report.fixed) == (2, 0)
    found = {finding.path: finding for finding in report.findings}
    assert found.keys() == {sick, fixed}
    assert (found[sick].fault, found[sick].reason) == (Fault.UNREADABLE, "Input/output error")
    assert found[fixed].fault is Fault.CORRUPT
    assert found[fixed].reason.endswith("; it cannot be deleted: Operation not permitted")


@pytest.mark.unsealed
def test_an_unreadable_directory_ends_a_scan_and_is_named(tmp_path: Path, monkeypatch):
    """What it holds is not known: to serve without it would bring deleted values back one day."""
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, *(sample(i) for i in range(2)))
    sick = path_of(tmp_path, sample(0).name).parent
    opens = os.open

    def refuse(path: str, *given, **place) -> int:
        if path == sick.name:
            raise OSError(errno.EIO, "Input/output error", path)
        return opens(path, *given, **place)

    monkeypatch.setattr(os, "open", refuse)
    with closing(DiskTier(tmp_path)) as tier, pytest.raises(OSError, match=f"Input/output error: '{sick}'"):
        list(tier.scan())
    (finding,) = verify(tmp_path).findings
    assert (finding.path, finding.fault) == (sick, Fault.UNREADABLE)


# ---- direct I/O


@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_without_direct_io_it_is_buffered_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, call: str
):
    real = getattr(os, call)
    direct: set[int] = set()

    def refuse_open(path, flags, *mode, **place):
        if call == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real(path, flags, *mode, **place)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def refuse_write(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("probe"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, call, refuse_open if call == "open" else refuse_write)
    each = sample(1, PAGE + 5)
    with closing(DiskTier(tmp_path)) as tier:
        assert store(tier, each).ok
        assert_stored(tier, each)
        assert repr(tier) == f"<DiskTier {tmp_path} buffered>"
        assert partial_files(tmp_path) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no direct I/O" in record.message


def test_tmpfs_works_whether_it_has_direct_io_or_not(small_disk: Path, caplog):
    each = sample(1, 5 * PAGE)
    with closing(DiskTier(small_disk)) as tier:
        assert store(tier, each).ok
        assert_stored(tier, each)
    assert len(caplog.records) <= 1


# ---- verification


@pytest.mark.unsealed
def test_verify_names_what_is_wrong_and_mends_what_it_may(tmp_path: Path):
    objects = [sample(i, PAGE * (1 + i)) for i in range(8)]
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, *objects)
    flipped, truncated, longer, swapped, empty = (path_of(tmp_path, each.name) for each in objects[:5])
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    os.truncate(truncated, PAGE)
    os.truncate(longer, 1 << 40)
    swapped.write_bytes(objects[7].at_rest())
    os.truncate(empty, 0)
    orphan = tmp_path / "partial" / str(objects[6].name)
    orphan.write_bytes(b"half")
    foreign, link = tmp_path / "README", path_of(tmp_path, sample(50).name)
    foreign.write_bytes(b"")
    link.symlink_to(path_of(tmp_path, objects[7].name))
    used = path_of(tmp_path, objects[7].name).stat().st_mtime_ns
    steps: list[tuple[int, int]] = []

    report = verify(tmp_path, progress=lambda done, of: steps.append((done, of)))
    assert (report.ok, report.fixed) == (3, 0)
    assert report.nbytes == sum(PAGE + each.room for each in objects[5:])
    assert steps == [(i, 10) for i in range(1, 11)]
    found = {finding.path: finding.fault for finding in report.findings}
    assert found == {
        **dict.fromkeys((flipped, truncated, longer, swapped, empty), Fault.CORRUPT),
        orphan: Fault.ORPHANED,
        foreign: Fault.FOREIGN,
        link: Fault.FOREIGN,
    }
    reasons = {finding.path: finding.reason for finding in report.findings}
    assert reasons[flipped] == "payload checksum differs"
    assert reasons[longer] == f"the file has {1 << 40} bytes, but its header says {4 * PAGE}"
    assert path_of(tmp_path, objects[7].name).stat().st_mtime_ns == used

    assert verify(tmp_path, fix=True).fixed == 6
    after = verify(tmp_path)
    assert (after.ok, after.count(Fault.FOREIGN), len(after.findings)) == (3, 2, 2)
    with closing(DiskTier(tmp_path)) as tier:
        assert_stored(tier, *objects[5:])


@pytest.mark.unsealed
def test_verify_accepts_objects_of_one_page(tmp_path: Path):
    """Their headers and payloads were read into one buffer: each was said to be corrupt, and deleted."""
    root = tmp_path / "kv"
    with closing(DiskTier(root)) as tier:
        store(tier, *(sample(i, PAGE) for i in range(9)))
    report = verify(root, fix=True)
    assert (report.ok, report.findings) == (9, [])


def test_verify_leaves_what_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    each = sample(1)
    with closing(DiskTier(tmp_path)) as tier:
        store(tier, each)

    def refuse(*_) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    (finding,) = verify(tmp_path, fix=True).findings
    assert (finding.fault, finding.reason) == (Fault.UNREADABLE, "Input/output error")
    assert finding.path.exists()


def test_verify_refuses_what_is_in_use_or_no_tier(tmp_path: Path):
    with pytest.raises(TierError, match="is not the directory of a disk tier"):
        verify(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with closing(DiskTier(tmp_path)), pytest.raises(TierError, match="open in process"):
        verify(tmp_path)
