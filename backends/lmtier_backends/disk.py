"""Objects as files in one local directory: direct I/O, each visible whole or not at all.

    <root>/lock                    held (flock) by the one tier or verification that has it open
    <root>/<2 hex>/<key>.<shard>   header page, then the payload in whole pages; mtime is the last use
    <root>/partial/<key>.<shard>   being written; renamed into place when complete, swept at start

A kill only leaves files in partial/. A power loss may leave a file whose blocks never reached the disk; its
checksum shows that. The cache above decides which objects to keep, and how many.

Checksums detect damage, not forgery: a user who can write here can make engines read forged KV. So the
directory and each file must belong to this user or to root, and other users must not have write access. The
directory is held open and files are opened relative to it, so it does not matter who can rename it.

Partial files have a separate directory, not a suffix among the objects. So the start finds them without a
scan, and a scan during stores cannot mistake an unfinished file for a leftover.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from lmtier import forks
from lmtier.errors import ConfigError, InUseError, TierError, log
from lmtier.format.layout import Name, Shard
from lmtier.format.objects import (
    PAGE,
    CorruptObject,
    Header,
    Scratch,
    Seal,
    UnsealedObject,
    anonymous,
    check,
    padded,
    peek,
    read_header,
    seal,
)
from lmtier.format.sealing import NoKey
from lmtier.tiers.base import Item, Stat
from lmtier.tiers.blocking import BlockingTier
from lmtier.tiers.keyring import Keyring

LOCK = "lock"
PARTIAL = "partial"
_PROBE = "probe"
_FANS = frozenset(f"{i:02x}" for i in range(256))
_OURS = frozenset({LOCK, PARTIAL, *_FANS})
_EMPTY = "lost+found"  # the only entry of a new file system
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_OTHERS = stat.S_IWGRP | stat.S_IWOTH

# Reads end in this page, so that a file longer than its buffers is noticed without an fstat. It is not used.
_BEYOND = memoryview(mmap.mmap(-1, PAGE))


class DiskTier(BlockingTier):
    def __init__(
        self,
        root: str | Path,
        *,
        readers: int = 8,
        writers: int = 8,
        trust_others: bool = False,
        adopt: bool = False,
        lock: int | None = None,
    ) -> None:
        """`trust_others`: other users may write to the directory, and all of them are trusted.

        `adopt`: use the directory although it holds other things.

        `lock`: the locked file of a process that hands the directory over and does no more I/O in it.
        """
        if readers < 1 or writers < 1:
            raise ConfigError(f"disk tier: readers={readers}, writers={writers}: each must be 1 or more")
        if not str(root):
            raise ConfigError(
                "disk tier: which directory? write it like disk:///var/lib/lmtier?capacity=500GiB"
            )
        self.root = Path(root).expanduser().absolute()  # the process may change its directory
        self.foreign_entries = 0
        """Foreign entries of the directory that the last scan found. They are not touched."""
        self.is_handed_over = (
            lock is not None
        )  # until this process has taken over, the other one may need the lock
        self._owners = None if trust_others else frozenset({0, os.geteuid()})
        self._adopts = adopt
        if os.path.realpath(self.root) == "/":
            raise ConfigError(
                "disk tier: / is the root of the whole system: name a directory in it, like "
                "disk:///var/lib/lmtier?capacity=500GiB"
            )
        try:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            self._root_fd = os.open(self.root, _DIRECTORY)
        except OSError as error:
            raise _unusable(self.root, error) from error
        try:
            self._lock = self._prepare(lock)
        except BaseException as error:
            _let_go(self._root_fd)
            if isinstance(error, OSError):
                raise _unusable(self.root, error) from error
            raise
        super().__init__("disk", readers, writers)

    @property
    def lock(self) -> int | None:
        return self._lock.fileno()

    def _prepare(self, inherited_lock_fd: int | None) -> FileIO:
        """Make all 256 directories at once, so that no store has to check for its own.

        New directories, and a new root, are closed to other users. An existing root keeps its mode: it may be
        a mount point, or the wrong directory by mistake.
        """
        self._need_ours(self.root, os.fstat(self._root_fd))
        if not self._adopts and (foreign := _foreign_entries(self._root_fd)):
            raise TierError(
                f"disk tier: {self.root} holds other things, such as {foreign[0]!r}: name an empty "
                "directory, which may be in it, or set adopt=yes in the tier's URL to use this one"
            )
        for name in (PARTIAL, *sorted(_FANS)):
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root_fd)
            status = os.lstat(name, dir_fd=self._root_fd)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{name} in it is not a directory")
            self._need_ours(self.root / name, status)
        lock = _take_lock(self.root, self._root_fd, os.O_CREAT, inherited_lock_fd)
        try:
            for name in _leftovers(self._root_fd):
                os.unlink(name, dir_fd=self._root_fd)
            self._direct = _probe_direct(self.root, self._root_fd)
            space = os.statvfs(self._root_fd)
        except BaseException:
            lock.close()
            raise
        self.storage_bytes = (space.f_blocks - space.f_bfree + space.f_bavail) * space.f_frsize or None
        return lock

    def _need_ours(self, path: Path, status: os.stat_result) -> None:
        if (why := _not_ours(status, self._owners)) is not None:
            me = os.geteuid()
            raise TierError(
                f"disk tier: {path} {why}, and a user who can write there can forge KV: give it to user {me} "
                f"alone (chown {me}, chmod 700), name a new directory, which may be in it, or set "
                "trust_others=true in the tier's URL"
            )

    def __repr__(self) -> str:
        return f"<DiskTier {self.root} {'O_DIRECT' if self._direct else 'buffered'}>"

    @contextmanager
    def _naming_place(self) -> Iterator[None]:
        """Errors name the place of a file, or the directory if it is a partial file."""
        try:
            yield
        except OSError as error:
            path = error.filename if isinstance(error.filename, str) else ""
            error.filename = str(self.root if path.startswith(PARTIAL) else self.root / path)
            raise

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        with self._naming_place():
            got = _read(self._root_fd, _path(item.name), self._direct, buffers, self._owners)
        self.touch([item])
        return got

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        root_fd, partial_path = self._root_fd, f"{PARTIAL}/{item.name}"
        with self._naming_place():
            if item.replaces is not None:
                # Existing blocks are written faster than new ones, and an unlink of 32 MiB takes 10 ms.
                with suppress(FileNotFoundError):
                    os.rename(_path(item.replaces), partial_path, src_dir_fd=root_fd, dst_dir_fd=root_fd)
            try:
                _write(root_fd, partial_path, self._direct, buffers, item.used or time.time_ns())
                os.rename(partial_path, _path(item.name), src_dir_fd=root_fd, dst_dir_fd=root_fd)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial_path, dir_fd=root_fd)
                raise

    def delete(self, names: Sequence[Name]) -> None:
        with self._naming_place():
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(_path(name), dir_fd=self._root_fd)

    def touch(self, items: Sequence[Item]) -> None:
        for item in items:
            used = item.used or time.time_ns()
            with suppress(OSError):  # an error here only loses the order of use, not the object
                os.utime(_path(item.name), ns=(used, used), dir_fd=self._root_fd, follow_symlinks=False)

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        found = {}
        for name in names:
            with suppress(FileNotFoundError), self._naming_place():
                status = os.stat(_path(name), dir_fd=self._root_fd, follow_symlinks=False)
                if (object_stat := _object_stat(status, self._owners)) is not None:
                    found[name] = object_stat
        return found

    def scan(self) -> Iterator[tuple[Name, Stat]]:
        """All objects. Files that have an object's name but cannot be one are deleted.

        One that the disk or the system refuses costs no other: it is left alone, like a foreign entry.

        One file of each size is read: a damaged file most likely has a unique size, such as a sparse TiB,
        which must not count.
        """
        self.foreign_entries = 0
        checked_sizes: set[tuple[Shard, int]] = set()
        page = memoryview(mmap.mmap(-1, PAGE))
        last_refusal: OSError | None = None
        for path, name, status in _walk(self._root_fd):
            if isinstance(status, OSError):
                if path in _FANS:  # what it holds is not known, and may be what others want deleted
                    with self._naming_place():
                        raise status
                last_refusal = status
            if name is None or isinstance(status, OSError):
                self.foreign_entries += 1
                continue
            object_stat = _object_stat(status, self._owners)
            if object_stat is not None:
                shard_and_size = name.shard, object_stat.nbytes
                if shard_and_size in checked_sizes or self._is_sound(path, name, object_stat, page):
                    checked_sizes.add(shard_and_size)
                    yield name, object_stat
                    continue
            try:
                os.unlink(path, dir_fd=self._root_fd)
            except FileNotFoundError:
                pass  # deleted or replaced meanwhile
            except OSError as error:
                last_refusal = error
                self.foreign_entries += 1
        if last_refusal:
            log.error(
                "lmtier: the system refuses to examine or delete files in %s, such as the last one: %s; they "
                "are left alone, so look at the disk and at their attributes",
                *(self.root, last_refusal),
            )
        if self.foreign_entries:
            log.warning("lmtier: %d foreign entries in %s are left alone", self.foreign_entries, self.root)

    def _is_sound(self, path: str, name: Name, known: Stat, page: memoryview) -> bool:
        """Whether its header says that it is this object, of this size."""
        try:
            _read(self._root_fd, path, self._direct, (page,), self._owners)
            header, _ = peek(page, name)
            if padded(header.stored_nbytes) != known.nbytes:
                raise CorruptObject(f"{known.nbytes} payload bytes, its header says {header.stored_nbytes}")
        except CorruptObject as error:
            log.error("lmtier: %s is corrupt, deleting it: %s", name, error)
            return False
        except FileNotFoundError:
            return False
        except OSError:  # a reader will get the error
            return True
        return True

    def forked(self) -> None:
        super().forked()
        self._leave()

    def close(self) -> None:
        super().close()
        if not self._lock.closed:
            if not self.is_handed_over:  # otherwise the lock is another's too
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child that was forked in C may still have it open
            self._lock.close()
            if not self._left_behind:  # otherwise its thread could write to another file with this number
                self._leave()

    def _leave(self) -> None:
        home, self._root_fd = self._root_fd, -1
        _let_go(home)


# ---- verification


class Fault(StrEnum):
    CORRUPT = "corrupt"
    """It has the name of an object but is not that object. A reader counts a miss and deletes it."""
    UNREADABLE = "unreadable"
    """The disk or the system refused. It is left alone, because only an operator can find out why."""
    ORPHANED = "orphaned"
    """A partial file of a store that never ended."""
    FOREIGN = "foreign"
    """Not a file of lmtier. It is left alone."""
    SEALED = "sealed"
    """Its key is not among those given. It is left alone, unless its deletion is asked for by name."""
    UNSEALED = "unsealed"
    """Keys were given, and it is not sealed. A sealed tier does not serve it."""


_FIXED = (Fault.CORRUPT, Fault.ORPHANED, Fault.UNSEALED)


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    fault: Fault
    reason: str


@dataclass(slots=True)
class Verification:
    """The result of `verify`."""

    ok: int = 0
    nbytes: int = 0
    """File bytes of the sound objects."""
    fixed: int = 0
    resealed: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    """How many objects are sealed with each key, by its id. Empty: not sealed."""
    unchecked: int = 0
    """Sealed objects whose payload could not be checked, because no keys were given. Not in `ok`."""
    findings: list[Finding] = field(default_factory=list)

    def note(self, key_id: bytes, nbytes: int, *, is_checked: bool) -> None:
        """An object without a fault."""
        self.keys[key_id.hex()] += 1
        if key_id and not is_checked:
            self.unchecked += 1
        else:
            self.ok += 1
            self.nbytes += nbytes

    def count(self, fault: Fault) -> int:
        return sum(finding.fault is fault for finding in self.findings)


def verify(
    root: str | Path,
    fix: bool = False,
    progress: Callable[[int, int], None] | None = None,
    *,
    keys: Keyring | None = None,
    reseal: bool = False,
    drop_sealed: bool = False,
) -> Verification:
    """Read every object of a disk tier and report faults. `fix` deletes what is corrupt or orphaned.

    With `keys` seals are checked, and `fix` deletes what is not sealed; `reseal` seals with the current key
    what was sealed with another. `drop_sealed` deletes what no key opens.

    Raises TierError if the directory is not a disk tier's, or a tier has it open. `progress` gets the number
    of checked entries and of all. The order of use does not change.
    """
    root = Path(root)
    report = Verification()

    def found(path: str, fault: Fault, reason: str) -> None:
        if (fix and fault in _FIXED) or (drop_sealed and fault is Fault.SEALED):
            try:
                os.unlink(path, dir_fd=root_fd)
                report.fixed += 1
            except OSError as error:
                reason += f"; it cannot be deleted: {error.strerror or error}"
        report.findings.append(Finding(root / path, fault, reason))

    try:
        root_fd = os.open(root, _DIRECTORY)
    except OSError as error:
        raise TierError(f"{root}: {error.strerror}; give the directory of a disk tier") from error
    try:
        if _foreign_entries(root_fd):  # before the lock of another program is taken
            raise TierError(f"disk tier: {root} is not the directory of a disk tier")
        with _take_lock(root, root_fd, 0):
            try:
                for path in _leftovers(root_fd):
                    found(path, Fault.ORPHANED, "a store that never ended")
                direct = _probe_direct(root, root_fd)
            except OSError as error:
                raise _unusable(root, error) from error
            entries = list(_walk(root_fd))
            checker = _Checker(root_fd, direct, keys)
            for checked_count, (path, name, status) in enumerate(entries, 1):
                try:
                    if isinstance(status, OSError):
                        raise status
                    if name is None:
                        found(path, Fault.FOREIGN, "not the name of an object in its place")
                    else:
                        checker.check(path, name, status.st_size)
                        report.note(checker.key_id, status.st_size, is_checked=keys is not None)
                        if reseal and keys is not None and not keys.is_current(name.key, checker.key_id):
                            checker.reseal(path, status.st_mtime_ns)
                            report.resealed += 1
                except NoKey as error:
                    report.keys[checker.key_id.hex()] += 1
                    found(path, Fault.SEALED, str(error))
                except UnsealedObject as error:
                    report.keys[""] += 1
                    found(path, Fault.UNSEALED, str(error))
                except CorruptObject as error:
                    found(path, Fault.CORRUPT, str(error))
                except OSError as error:
                    found(path, Fault.UNREADABLE, error.strerror or repr(error))
                if progress is not None:
                    progress(checked_count, len(entries))
    finally:
        _let_go(root_fd)
    return report


class _Checker:
    """Reads objects into its own buffers, which grow to the largest one, and checks them."""

    def __init__(self, home: int, direct: int, keys: Keyring | None) -> None:
        self._home, self._direct, self._keys = home, direct, keys
        self._page, self._payload = anonymous(PAGE), anonymous(PAGE)
        self._scratch = Scratch()
        self._header: Header | None = None
        self.key_id = b""
        """The key of the object that was checked last; empty if it is not sealed."""

    def check(self, path: str, name: Name, size: int) -> None:
        """Raise what a reader raises unless `path` holds `name`. Without keys a payload stays unchecked."""
        self.key_id = b""
        _read(self._home, path, self._direct, (self._page,))
        header, seal_or_checksum = read_header(self._page)
        payload_bytes = padded(header.stored_nbytes)
        if size != PAGE + payload_bytes:  # before memory is allocated for a size in a header
            raise CorruptObject(f"the file has {size} bytes, but its header says {PAGE + payload_bytes}")
        if len(self._payload) < payload_bytes:
            self._payload = anonymous(payload_bytes)
        bytes_read = _read(self._home, path, self._direct, (self._page, self._payload[:payload_bytes]))
        if isinstance(seal_or_checksum, Seal):
            self.key_id = seal_or_checksum.key_id
            if self._keys is None:
                peek(self._page, name)
                return
        self._header = check(self._page, self._payload[:payload_bytes], name, bytes_read - PAGE, self._keys)

    def reseal(self, path: str, used: int) -> None:
        """Seal the object that was checked last with the current key, in its place."""
        assert self._header is not None
        body = self._payload[: padded(self._header.stored_nbytes)]
        stored = seal(self._page, self._header, body, self._keys, self._scratch)
        partial_path = f"{PARTIAL}/{self._header.name}"
        _write(self._home, partial_path, self._direct, (self._page, stored), used)
        os.rename(partial_path, path, src_dir_fd=self._home, dst_dir_fd=self._home)


# ---- files


Owners: TypeAlias = "frozenset[int] | None"
"""The users whose files are trusted; None: all users."""


def _path(name: Name) -> str:
    text = str(name)
    return f"{_fan(text)}/{text}"


def _not_ours(status: os.stat_result, owners: Owners) -> str | None:
    """Why other users may have written this file or directory, if so."""
    if owners is None:
        return None
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS:
        return f"may be written by other users (mode {status.st_mode & 0o777:o})"
    return None


def _read(home: int, path: str, direct: int, buffers: Sequence[memoryview], owners: Owners = None) -> int:
    """Fill `buffers` from the file. Returns the bytes read, or more than fit if the file is longer."""
    capacity = sum(map(len, buffers))
    try:
        fd = os.open(path, os.O_RDONLY | direct | _SAFE, dir_fd=home)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptObject("a symbolic link, not a file") from None
        raise
    try:
        if (reason := _not_ours(os.fstat(fd), owners)) is not None:
            raise CorruptObject(f"the file {reason}")
        bytes_read = os.preadv(fd, (*buffers, _BEYOND), 0)
        if bytes_read < capacity:  # a short file, or a short read of a long one
            expected = min(capacity, os.fstat(fd).st_size)
            while bytes_read < expected and (more := os.preadv(fd, _after(buffers, bytes_read), bytes_read)):
                bytes_read += more
        return bytes_read
    finally:
        os.close(fd)


def _write(home: int, path: str, direct: int, buffers: Sequence[memoryview], used: int) -> None:
    """Write exactly `buffers` to `path`, over its existing blocks, with `used` (ns) as the time of last
    use."""
    size = sum(map(len, buffers))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | direct | _SAFE, 0o600, dir_fd=home)
    try:
        old_size = os.fstat(fd).st_size
        if old_size < size:
            os.posix_fallocate(fd, 0, size)  # a full disk fails here, before bytes are written
        elif old_size > size:
            os.ftruncate(fd, size)
        written = os.pwritev(fd, buffers, 0)
        while written < size:
            count = os.pwritev(fd, _after(buffers, written), written)
            if not count:
                raise OSError(errno.EIO, "the disk takes no more bytes", path)
            written += count
        os.utime(fd, ns=(used, used))
    finally:
        os.close(fd)


def _after(buffers: Sequence[memoryview], skip: int) -> list[memoryview]:
    """The rest of `buffers` after their first `skip` bytes."""
    remaining = []
    for buffer in buffers:
        if skip < len(buffer):
            remaining.append(buffer[skip:])
        skip = max(0, skip - len(buffer))
    return remaining


def _object_stat(status: os.stat_result, owners: Owners) -> Stat | None:
    """The Stat of a file. None: it cannot be an object of this tier, whatever it holds."""
    size = status.st_size
    if not stat.S_ISREG(status.st_mode) or size <= PAGE or size % PAGE or _not_ours(status, owners):
        return None
    return Stat(size - PAGE, status.st_mtime_ns)


# ---- the directory


def _foreign_entries(home: int) -> list[str]:
    """What is in a directory that is neither empty nor lmtier's.

    It is lmtier's if all directories and the lock are there: then people may have put something beside them.
    A start that was killed left some of them, `partial` first, and nothing else; one who deletes empty
    directories left some too. Other programs keep files below two digits, or have a `lock` and a `partial`,
    but not both.
    """
    names = set(os.listdir(home)) - {_EMPTY}
    is_unfinished_start = names <= {PARTIAL} or (names <= _OURS and names & _FANS and names - _FANS)
    return [] if names >= _OURS or is_unfinished_start else sorted(names - _OURS) or sorted(names)


def _take_lock(root: Path, home: int, create: int, inherited_fd: int | None = None) -> FileIO:
    try:
        fd = (
            os.dup(inherited_fd)
            if inherited_fd is not None
            else os.open(LOCK, os.O_RDWR | create | _SAFE, 0o600, dir_fd=home)
        )
    except FileNotFoundError as error:
        raise TierError(f"disk tier: {root} is not the directory of a disk tier") from error
    except OSError as error:
        raise _unusable(root, error) from error
    lock = FileIO(fd, "r+")
    forks.close_in_child(lock)  # otherwise a child would keep the directory locked
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner_pid = os.pread(fd, 20, 0).decode("ascii", "replace")
        lock.close()
        raise InUseError(
            f"disk tier: {root} is open in process {owner_pid or 'unknown'}; a directory has one owner: "
            "give this tier another, or stop that process",
        ) from error
    except OSError as error:
        lock.close()
        raise _unusable(root, error) from error
    with suppress(OSError):  # it only improves the message above, and a full disk can still be read
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    return lock


def _unusable(root: Path, error: OSError) -> TierError:
    return TierError(
        f"disk tier: cannot use {root}: {error.strerror}; it must be a directory on a local disk that this "
        "user may write, or one that can be made"
    )


def _probe_direct(root: Path, home: int) -> int:
    """O_DIRECT, or 0 with one warning where the file system refuses it, at open or at the first write."""
    path = f"{PARTIAL}/{_PROBE}"
    try:
        _write(home, path, os.O_DIRECT, (memoryview(mmap.mmap(-1, PAGE)),), 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            log.warning("lmtier: no direct I/O in %s, using the page cache", root)
            return 0
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk can still be read
            raise
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path, dir_fd=home)
    return os.O_DIRECT


def _fan(name: str) -> str:
    """The directory of an object: the last digits of its key. The first digits are the same for a model."""
    return name[62:64]


def _leftovers(home: int) -> list[str]:
    """The partial files with valid names. The lock was just taken, so none is being written."""
    with _listing(home, PARTIAL) as entries:
        names = [entry.name for entry in entries]
    return [f"{PARTIAL}/{name}" for name in names if name == _PROBE or Name.parse(name)]


_WalkedEntry: TypeAlias = "tuple[str, Name | None, os.stat_result | OSError]"
"""A path; its name, unless it has no valid one for its place; its status, or why the system has none."""


def _walk(home: int) -> Iterator[_WalkedEntry]:
    """All entries except partial files and the lock."""
    with _listing(home, ".") as entries:
        for entry in entries:
            if entry.name in _FANS and entry.is_dir(follow_symlinks=False):
                try:
                    with _listing(home, entry.name) as files:
                        for file in files:
                            yield from _classified(file, f"{entry.name}/{file.name}")
                except OSError as error:
                    yield entry.name, None, error
            elif entry.name not in (LOCK, PARTIAL, _EMPTY):
                yield from _classified(entry, entry.name)


def _classified(entry: os.DirEntry[str], path: str) -> Iterator[_WalkedEntry]:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # deleted or replaced meanwhile
        return
    except OSError as error:
        yield path, None, error
        return
    is_ours = path == f"{_fan(entry.name)}/{entry.name}" and stat.S_ISREG(status.st_mode)
    yield path, Name.parse(entry.name) if is_ours else None, status


def _let_go(home: int) -> None:
    with suppress(OSError):  # nothing was written through it
        os.close(home)


@contextmanager
def _listing(home: int, path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
    """The entries of a directory. It stays open, so that their status can be read."""
    fd = os.open(path, _DIRECTORY | os.O_NOFOLLOW, dir_fd=home)
    try:
        with os.scandir(fd) as entries:
            yield entries
    finally:
        os.close(fd)
