"""Objects as files in one local directory: direct I/O, each visible whole or not at all.

    <root>/lock                    held (flock) by the one tier or verification that has it open
    <root>/<2 hex>/<key>.<shard>   header page, then the payload in whole pages; mtime is the last use
    <root>/partial/<key>.<shard>   being written; renamed into place when complete, swept at start

A kill leaves files in partial/ and nothing else. A power loss may leave a file whose blocks never
reached the disk; its checksum tells. What to keep, and how much of it, is decided above.

Partial files have a directory of their own, not a suffix beside the objects: so start-up finds them
without a scan, and a scan that runs beside stores cannot take a file under way for a leftover.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from io import FileIO
from pathlib import Path

from lmtier.codec import PAGE, CorruptObject, check, padded, read_header
from lmtier.errors import ConfigError, TierError
from lmtier.layout import Name
from lmtier.tier import Item, Stat
from lmtier.workers import BlockingTier

log = logging.getLogger("lmtier")

LOCK = "lock"
PARTIAL = "partial"
_PROBE = "probe"
_FANS = frozenset(f"{i:02x}" for i in range(256))
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC

# Reads end in this page, so that a file longer than its buffers shows without an fstat. Nobody reads it.
_BEYOND = memoryview(mmap.mmap(-1, PAGE))


class DiskTier(BlockingTier):
    def __init__(self, root: str | Path, *, readers: int = 8, writers: int = 8) -> None:
        if readers < 1 or writers < 1:
            raise ConfigError(f"disk tier: readers={readers}, writers={writers}: each must be 1 or more")
        if not str(root):
            raise ConfigError(
                "disk tier: which directory? write it like disk:///var/lib/lmtier?capacity=500GiB"
            )
        self.root = Path(root).expanduser().absolute()  # the process may change its directory
        self.foreign = 0
        """Entries of the directory that are not ours, as the last scan saw it. They are left alone."""
        try:
            _make_directories(self.root)
        except OSError as error:
            raise _unusable(self.root, error) from error
        self._lock = _take_lock(self.root, os.O_CREAT)
        try:
            for entry in _leftovers(self.root):
                os.unlink(entry.path)
            self._direct = _probe_direct(self.root)
        except OSError as error:
            self._lock.close()
            raise _unusable(self.root, error) from error
        super().__init__("disk", readers, writers)

    def __repr__(self) -> str:
        return f"<DiskTier {self.root} {'O_DIRECT' if self._direct else 'buffered'}>"

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        got = _read(self._path(item.name), self._direct, buffers)
        self.touch([item])
        return got

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        partial = f"{self.root}/{PARTIAL}/{item.name}"
        if item.replaces is not None:
            # Blocks that exist are written faster than new ones, and an unlink of 32 MiB takes 10 ms.
            with suppress(FileNotFoundError):
                os.rename(self._path(item.replaces), partial)
        try:
            _write(partial, self._direct, buffers, item.used or time.time_ns())
            os.rename(partial, self._path(item.name))
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def delete(self, names: Sequence[Name]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(self._path(name))

    def touch(self, items: Sequence[Item]) -> None:
        for item in items:
            used = item.used or time.time_ns()
            with suppress(OSError):  # the order of use is worth less than the object
                os.utime(self._path(item.name), ns=(used, used), follow_symlinks=False)

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        found = {}
        for name in names:
            with suppress(FileNotFoundError):
                status = _object_stat(os.stat(self._path(name), follow_symlinks=False))
                if status is not None:
                    found[name] = status
        return found

    def scan(self) -> Iterator[tuple[Name, Stat]]:
        self.foreign = 0
        for entry, name in _walk(self.root):
            if name is None:
                self.foreign += 1
                continue
            try:
                if (status := _object_stat(entry.stat(follow_symlinks=False))) is not None:
                    yield name, status
                else:
                    os.unlink(entry.path)
            except FileNotFoundError:  # deleted or replaced meanwhile
                pass
        if self.foreign:
            log.warning("lmtier: %d entries in %s are foreign, left alone", self.foreign, self.root)

    def close(self) -> None:
        super().close()
        if not self._lock.closed:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child keeps the file open, and the lock with it
            self._lock.close()

    def _path(self, name: Name) -> str:
        text = str(name)
        return f"{self.root}/{_fan(text)}/{text}"


# ---- verification


class Fault(StrEnum):
    CORRUPT = "corrupt"
    """Has the name of an object and is not that object. A reader treats it as a miss and deletes it."""
    UNREADABLE = "unreadable"
    """The disk or the system refused; left alone, because only a person can tell why."""
    ORPHANED = "orphaned"
    """A partial file of a store that never ended."""
    FOREIGN = "foreign"
    """Not ours; left alone."""


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    fault: Fault
    reason: str


@dataclass(slots=True)
class Report:
    """What `verify` saw."""

    ok: int = 0
    nbytes: int = 0
    """File bytes of the objects that are ok."""
    fixed: int = 0
    findings: list[Finding] = field(default_factory=list)

    def count(self, fault: Fault) -> int:
        return sum(finding.fault is fault for finding in self.findings)


def verify(root: str | Path, fix: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read every object of a disk tier and say what is wrong with it; `fix` deletes corrupt and orphaned.

    Raises TierError if the directory is not a disk tier's, or a tier has it open. `progress` gets the
    number of entries done and of all. The order of use is left as it was.
    """
    root = Path(root)
    report = Report()

    def found(path: str, fault: Fault, reason: str) -> None:
        report.findings.append(Finding(Path(path), fault, reason))
        if fix and fault in (Fault.CORRUPT, Fault.ORPHANED):
            os.unlink(path)
            report.fixed += 1

    with _take_lock(root, 0):
        try:
            for entry in _leftovers(root):
                found(entry.path, Fault.ORPHANED, "a store that never ended")
            direct = _probe_direct(root)
        except OSError as error:
            raise _unusable(root, error) from error
        entries = list(_walk(root))
        page = payload = memoryview(mmap.mmap(-1, PAGE))
        for number, (entry, name) in enumerate(entries, 1):
            try:
                if name is None:
                    found(entry.path, Fault.FOREIGN, "not the name of an object in its place")
                else:
                    payload = _check(entry.path, name, direct, page, payload)
                    report.ok += 1
                    report.nbytes += entry.stat(follow_symlinks=False).st_size
            except CorruptObject as error:
                found(entry.path, Fault.CORRUPT, str(error))
            except OSError as error:
                found(entry.path, Fault.UNREADABLE, error.strerror or repr(error))
            if progress is not None:
                progress(number, len(entries))
    return report


def _check(path: str, name: Name, direct: int, page: memoryview, payload: memoryview) -> memoryview:
    """Raise CorruptObject unless `path` holds `name`; return the buffer, grown if it had to be."""
    _read(path, direct, (page,))
    need = padded(read_header(page)[0].at_rest)
    size = os.stat(path, follow_symlinks=False).st_size
    if size != PAGE + need:  # before memory is taken on a header's word
        raise CorruptObject(f"the file has {size} bytes, its header says {PAGE + need}")
    if len(payload) < need:
        payload = memoryview(mmap.mmap(-1, need))
    got = _read(path, direct, (page, payload[:need]))
    check(page, payload[:need], name, got - PAGE)
    return payload


# ---- files


def _read(path: str, direct: int, buffers: Sequence[memoryview]) -> int:
    """Fill `buffers` from the file; return the bytes that arrived, or more than fit if it is longer."""
    room = sum(map(len, buffers))
    try:
        fd = os.open(path, os.O_RDONLY | direct | _SAFE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptObject("a symbolic link, not a file") from None
        raise
    try:
        got = os.preadv(fd, (*buffers, _BEYOND), 0)
        if got < room:  # a short file, or a short read of a long one
            end = min(room, os.fstat(fd).st_size)
            while got < end and (more := os.preadv(fd, _after(buffers, got), got)):
                got += more
        return got
    finally:
        os.close(fd)


def _write(path: str, direct: int, buffers: Sequence[memoryview], used: int) -> None:
    """Make `path` exactly `buffers`, over whatever blocks it has, last used at `used` (ns)."""
    size = sum(map(len, buffers))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | direct | _SAFE, 0o600)
    try:
        had = os.fstat(fd).st_size
        if had < size:
            os.posix_fallocate(fd, 0, size)  # a full disk says so here, before the bytes move
        elif had > size:
            os.ftruncate(fd, size)
        done = os.pwritev(fd, buffers, 0)
        while done < size:
            more = os.pwritev(fd, _after(buffers, done), done)
            if not more:
                raise OSError(errno.EIO, "the disk takes no more bytes", path)
            done += more
        os.utime(fd, ns=(used, used))
    finally:
        os.close(fd)


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after their first `done` bytes."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def _object_stat(status: os.stat_result) -> Stat | None:
    """None: this cannot be an object, whatever it holds."""
    size = status.st_size
    if not stat.S_ISREG(status.st_mode) or size <= PAGE or size % PAGE:
        return None
    return Stat(size - PAGE, status.st_mtime_ns)


# ---- the directory


def _make_directories(root: Path) -> None:
    """All 256 at once, so that no store has to ask whether its directory is there.

    They and `root` are closed to other users when made here. An existing `root` keeps its mode: it may
    be a mount point, or somebody's by mistake.
    """
    os.makedirs(root, mode=0o700, exist_ok=True)
    for name in (PARTIAL, *_FANS):
        with suppress(FileExistsError):
            os.mkdir(f"{root}/{name}", 0o700)
        if not stat.S_ISDIR(os.lstat(f"{root}/{name}").st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{name} in it is not a directory")


def _take_lock(root: Path, create: int) -> FileIO:
    try:
        fd = os.open(root / LOCK, os.O_RDWR | create | _SAFE, 0o600)
    except FileNotFoundError as error:
        raise TierError(f"disk tier: {root} is not the directory of a disk tier") from error
    except OSError as error:
        raise _unusable(root, error) from error
    lock = FileIO(fd, "r+")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(fd, 20, 0).decode("ascii", "replace")
        lock.close()
        raise TierError(
            f"disk tier: {root} is open in process {owner or 'unknown'}; a directory has one owner: "
            "give this tier another, or stop that process"
        ) from error
    except OSError as error:
        lock.close()
        raise _unusable(root, error) from error
    with suppress(OSError):  # it only makes the message above better, and a full disk can still be read
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    return lock


def _unusable(root: Path, error: OSError) -> TierError:
    return TierError(
        f"disk tier: cannot use {root}: {error.strerror}; it must be a directory on a local disk that this "
        "user may write, or one that can be made"
    )


def _probe_direct(root: Path) -> int:
    """O_DIRECT, or 0 with one warning where the file system refuses it, at open or at the first write."""
    path = f"{root}/{PARTIAL}/{_PROBE}"
    try:
        _write(path, os.O_DIRECT, (memoryview(mmap.mmap(-1, PAGE)),), 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            log.warning("lmtier: no direct I/O in %s, using the page cache", root)
            return 0
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk can still be read
            raise
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return os.O_DIRECT


def _fan(name: str) -> str:
    """The directory of an object: the last digits of its key. The first are the same for a whole model."""
    return name[62:64]


def _leftovers(root: Path) -> list[os.DirEntry[str]]:
    """Partial files; none is under way while the lock was just taken. Never anything with another name."""
    with os.scandir(root / PARTIAL) as entries:
        return [entry for entry in entries if entry.name == _PROBE or Name.parse(entry.name)]


def _walk(root: Path) -> Iterator[tuple[os.DirEntry[str], Name | None]]:
    """Every entry beside the partial files and the lock; None: not an object's name in its place."""
    with os.scandir(root) as entries:
        top = list(entries)
    for directory in top:
        if directory.name in (LOCK, PARTIAL):
            continue
        if directory.name not in _FANS or not directory.is_dir(follow_symlinks=False):
            yield directory, None
            continue
        with os.scandir(directory.path) as entries:
            for entry in entries:
                ours = _fan(entry.name) == directory.name and entry.is_file(follow_symlinks=False)
                yield entry, Name.parse(entry.name) if ours else None
