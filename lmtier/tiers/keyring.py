"""The keys of a tier that seals: where they come from, and a directory with a key for each tenant.

    key=file:PATH      one key a line, 64 hexadecimal digits; read again when the file changes
    key=command:…      what a program prints, in the same form: a key management service
    key=env:NAME       a variable of the environment, in the same form

The first key seals new objects. The others only open what was sealed with them before. With `tenants=DIR`,
an object is sealed with a key of its tenant, and these keys only wrap the keys of tenants:

    DIR/lock           held (flock) while a file is changed
    DIR/<8 hex>        the tenant, as in its keys; one line for each key, the newest last: FORMAT, generation,
                       id of the key that wraps it, salt, wrapped key; all but the generation in hexadecimal
    DIR/forgotten      tombstones, one line for each: TOMBSTONE, the tenant, its generation from then on, the
                       time; it only grows

So a tenant whose file is destroyed cannot be read by anyone, also not from a backup of the tier. The
tombstone comes first: from then on a key of an earlier generation is refused, also if its file is still there
or was put back. No key is ever part of a message.
"""

from __future__ import annotations

import base64
import binascii
import errno
import fcntl
import os
import re
import shlex
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lmtier.config import read_text
from lmtier.errors import ConfigError, TierError, log
from lmtier.format.keys import NO_TENANT, tenant_of
from lmtier.format.sealing import (
    SECRET_BYTES,
    BadSeal,
    NoKey,
    SealingKeys,
    Secret,
    TenantKeys,
    Tombstone,
    library,
    new_salt,
)

FORMAT = "lmtier-tenant-2"
TOMBSTONE = "lmtier-forgotten-1"
LOCK = "lock"
FORGOTTEN = "forgotten"
_COMMAND_SECONDS = 30.0
_LOCK_SECONDS = 5.0
_AGAIN = 60.0
"""The least seconds between two runs of a command."""
_HOW = "write file:PATH, command:PROGRAM or env:NAME"
_OTHERS = stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH

Stamp = tuple[int, ...]


class Keyring(SealingKeys):
    def __init__(self, source: str, tenants: str = "", where: str = "key") -> None:
        """`where` begins each message: which tier this is for. Raises ConfigError."""
        library()
        self._where = where
        self._kind, separator, self._place = source.partition(":")
        if not separator or self._kind not in _READERS or not self._place:
            raise ConfigError(f"{where}: key= names a place of keys, and is no key itself; {_HOW}")
        if self._kind == "file":
            self._place = str(Path(self._place).expanduser())
        self._reading = threading.Lock()
        self._stamp: Stamp | None = None
        self._read_at = time.monotonic()
        self._secrets: dict[bytes, Secret] = {}
        self._secrets = self._read()
        self._tenants = TenantKeyFiles(Path(tenants).expanduser(), self._known) if tenants else None

    def __repr__(self) -> str:
        return f"<Keyring {', '.join(key_id.hex() for key_id in self._secrets)}>"

    @property
    def tenants(self) -> TenantKeyFiles | None:
        return self._tenants

    # ---- for the threads of tiers

    def sealing_secret(self, key: bytes) -> Secret:
        secrets = self._known()
        first = next(iter(secrets.values()))
        return first if self._tenants is None else self._tenants.to_seal(tenant_of(key), first)

    def opening_secret(self, key: bytes, key_id: bytes) -> Secret | None:
        tenants = self._tenants
        if tenants is not None and (secret := tenants.to_open(tenant_of(key), key_id)) is not None:
            return secret
        # Without tenants=, or sealed before it was set.
        if (secret := self._known().get(key_id)) is None and self._kind != "env":
            secret = self._known(is_missing=True).get(key_id)
            if secret is None and tenants is not None:  # what wraps the tenant's key may be known now
                secret = tenants.to_open(tenant_of(key), key_id)
        return secret

    # ---- for people

    def is_current(self, key: bytes, key_id: bytes) -> bool:
        """Whether new objects under this name are sealed with this key."""
        return self.sealing_secret(key).id == key_id

    # ---- the source

    def _known(self, *, is_missing: bool = False) -> dict[bytes, Secret]:
        """The keys, by id, the current one first. Reads them again if they may have changed.

        One thread reads. Only those who miss a key wait for it: a command may take long.
        """
        if self._reading.acquire(blocking=is_missing):
            try:
                if self._is_due(is_missing):
                    self._read_at, before = time.monotonic(), self._secrets
                    self._secrets = secrets = self._read()
                    for retired in before.keys() - secrets.keys():
                        before[retired].erase()
            except ConfigError as error:  # a file in the middle of a change, a service that is down
                log.error("lmtier: %s; the keys stay as they were", error)
            finally:
                self._reading.release()
        return self._secrets

    def _is_due(self, is_missing: bool) -> bool:
        if self._kind == "file":
            with suppress(OSError):  # a missing file changes nothing: the keys are known
                return _stamp(os.stat(self._place)) != self._stamp
        return is_missing and time.monotonic() - self._read_at > _AGAIN

    def _read(self) -> dict[bytes, Secret]:
        if self._kind == "file":
            with suppress(OSError):
                self._stamp = _stamp(os.stat(self._place))
        text = _READERS[self._kind](self._place, self._where)
        secrets: dict[bytes, Secret] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if (line := line.strip()) and not line.startswith("#"):
                secret = Secret(_key_in(line, f"{self._where}: line {number} of the keys"))
                secrets[secret.id] = self._secrets.get(secret.id, secret)
        if not secrets:
            raise ConfigError(f"{self._where}: no key is there; put one in: openssl rand -hex 32")
        return secrets


def _key_in(line: str, where: str) -> bytes:
    with suppress(ValueError, binascii.Error):
        key = bytes.fromhex(line) if len(line) == 2 * SECRET_BYTES else base64.b64decode(line, validate=True)
        if len(key) == SECRET_BYTES:
            return key
    raise ConfigError(f"{where} is not a key; write 64 hexadecimal digits, as from openssl rand -hex 32")


def _from_file(path: str, where: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ConfigError(f"{where}: {path}: {error.strerror}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{where}: other users may write to {path}; chmod 600 it")
    if mode & _OTHERS:
        log.warning("lmtier: other users may read the keys in %s; chmod 600 it", path)
    return read_text(f"{where}: {path}", path)


def _from_command(command: str, where: str) -> str:
    try:
        child = subprocess.run(
            shlex.split(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{where}: the command for keys took more than {_COMMAND_SECONDS:g} s") from None
    except (OSError, ValueError) as error:
        message = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: the command for keys cannot run: {message}") from None
    if child.returncode:
        raise ConfigError(
            f"{where}: the command for keys ended with status {child.returncode}; run it yourself to see why"
        )
    return child.stdout.decode("ascii", "replace")


def _from_environment(name: str, where: str) -> str:
    if name not in os.environ:
        raise ConfigError(f"{where}: the environment has no {name}")
    return os.environ[name]


_READERS = {"file": _from_file, "command": _from_command, "env": _from_environment}


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode


# ---- tenants


class _Wrapped(NamedTuple):
    """A key of a tenant, and how it is wrapped."""

    by: bytes
    line: str
    secret: Secret | None
    """None: the key that wraps it is not known."""


class _File(NamedTuple):
    stamp: Stamp
    keys: tuple[_Wrapped, ...]
    """The keys of the tenant's generation."""
    known: frozenset[bytes]
    """The ids of all wrapping keys when it was read: what a retired one wraps is not kept."""


class _Line(NamedTuple):
    """A line of a tenant's file."""

    generation: int
    by: bytes
    salt: bytes
    wrapped: bytes


class TenantKeyFiles(TenantKeys):
    """A file of wrapped keys for each tenant. Several processes and hosts may share the directory.

    A file only grows, so overwriting it reaches the bytes of all of its keys. Who makes or destroys a key, or
    writes a tombstone, holds the lock: no key is made between a tombstone and the destruction of the file.
    """

    def __init__(self, root: Path, known: Callable[[], dict[bytes, Secret]]) -> None:
        """`known` returns the keys that may wrap others."""
        self._root = root
        self._known = known
        self._lock = threading.Lock()
        self._files: dict[bytes, _File] = {}
        self.forgotten: Mapping[bytes, Tombstone] = {}
        self._forgotten_stamp: Stamp | None = None
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.place = str(root.resolve())
            status = root.stat()
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"tenants={root}: other users may write there; chown it, and chmod 700 it")
            os.close(os.open(root / FORGOTTEN, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.read_tombstones()
        except OSError as error:
            raise ConfigError(f"tenants={root}: {error.strerror}") from None
        self.dropped = {tenant: tombstone.generation for tenant, tombstone in self.forgotten.items()}

    def to_seal(self, tenant: bytes, wrapping: Secret) -> Secret:
        """The tenant's key that is wrapped with `wrapping`, made now if there is none."""
        with self._lock:
            self._notice()
            self._refuse(tenant)
            if (secret := self._wrapped_by(tenant, wrapping)) is not None:
                return secret
        with self._alone(), self._lock:  # in this order: readers wait for no other process
            self._read_forgotten()  # it may have been forgotten while this thread waited
            self._refuse(tenant)
            self._destroy_leftovers(tenant)
            if (secret := self._wrapped_by(tenant, wrapping)) is None:  # or another one made it
                secret = self._make(tenant, wrapping)
            return secret

    def to_open(self, tenant: bytes, key_id: bytes) -> Secret | None:
        with self._lock:
            self._notice()
            if (secret := self._with_id(self._kept(tenant), key_id)) is None:
                secret = self._with_id(self._read(tenant), key_id)
            return secret

    @staticmethod
    def _with_id(file: _File | None, key_id: bytes) -> Secret | None:
        found = (wrapped.secret for wrapped in file.keys if wrapped.secret is not None) if file else ()
        return next((secret for secret in found if secret.id == key_id), None)

    # ---- tombstones

    def forget(self, tenant: bytes) -> int:
        try:
            with self._alone(), self._lock:
                self._read_forgotten()
                self._bury(tenant)
                self._read_forgotten()
                return self._destroy(tenant)
        except OSError as error:
            raise TierError(f"tenants={self._root}: {tenant.hex()} stays: {error.strerror}") from None

    def read_tombstones(self) -> bool:
        with self._lock:
            before = self.forgotten
            if not self._read_forgotten():
                return False
            news = [tenant for tenant, tombstone in self.forgotten.items() if before.get(tenant) != tombstone]
        try:
            for tenant in news:
                if self._path(tenant).exists():
                    with self._alone(), self._lock:
                        self._destroy_leftovers(tenant)
        except OSError as error:  # they are refused nevertheless
            log.error("lmtier: tenants=%s: keys of a forgotten tenant stay: %s", self._root, error)
        return True

    def _destroy_leftovers(self, tenant: bytes) -> None:
        """Who wrote the tombstone died before the keys were destroyed, or an administrator put them back."""
        file = self._read(tenant)
        if tenant in self.forgotten and file is not None and not file.keys:
            self._destroy(tenant)

    def _notice(self) -> None:
        """Read the tombstones if there are new ones. All that an object costs here is this look."""
        with suppress(FileNotFoundError):  # what is known stays
            if _stamp(os.stat(self._root / FORGOTTEN)) != self._forgotten_stamp:
                self._read_forgotten()

    def _read_forgotten(self) -> bool:
        """Returns whether there are new ones. A generation never goes back, whatever became of the file."""
        try:
            # Opened, because a network file system asks its server then.
            with open(self._root / FORGOTTEN, encoding="ascii", errors="replace") as file:
                stamp = _stamp(os.fstat(file.fileno()))
                if stamp == self._forgotten_stamp:
                    return False
                text = file.read()
        except FileNotFoundError:
            return False
        found = dict(self.forgotten)
        for line in text.splitlines():
            if re.fullmatch(rf"{TOMBSTONE} [0-9a-f]{{8}} [0-9]{{1,18}} [0-9]{{1,18}}", line):
                _, tenant_hex, generation, at = line.split()
                tombstone, tenant = Tombstone(int(generation), int(at)), bytes.fromhex(tenant_hex)
                if tenant == NO_TENANT:  # named values would be found no more, and none deletes them
                    continue
                if tenant not in found or tombstone.generation > found[tenant].generation:
                    found[tenant] = tombstone
        self._forgotten_stamp = stamp
        if found == self.forgotten:
            return False
        changed_tenants = [tenant for tenant in found if found[tenant] != self.forgotten.get(tenant)]
        self.forgotten = found
        for tenant in changed_tenants:
            self._drop(tenant)
        return True

    def _generation(self, tenant: bytes) -> int:
        stone = self.forgotten.get(tenant)
        return 0 if stone is None else stone.generation

    def _refuse(self, tenant: bytes) -> None:
        if self.dropped.get(tenant, 0) < self._generation(tenant):
            raise NoKey(f"tenant {tenant.hex()} was forgotten, and what is from before is not stored again")

    def _bury(self, tenant: bytes) -> None:
        line = f"{TOMBSTONE} {tenant.hex()} {self._generation(tenant) + 1} {time.time_ns() // 1_000_000}"
        os.close(self._append(self._root / FORGOTTEN, line))
        self._sync()

    # ---- files

    def _path(self, tenant: bytes) -> Path:
        return self._root / tenant.hex()

    def _wrapped_by(self, tenant: bytes, wrapping: Secret) -> Secret | None:
        """The newest key of the tenant that `wrapping` wraps, as far as is known.

        Hosts change their keys one by one, so another host may have made the last line.
        """
        file = self._kept(tenant)
        lines = reversed(file.keys) if file is not None else ()
        return next((each.secret for each in lines if each.by == wrapping.id and each.secret), None)

    def _kept(self, tenant: bytes) -> _File | None:
        """The tenant's file as it was read, unless the wrapping keys are others now."""
        file = self._files.get(tenant)
        if file is None or file.known != self._known().keys():
            file = self._read(tenant)
        return file

    def _read(self, tenant: bytes) -> _File | None:
        """The tenant's file as it is now. What has left it is erased from memory."""
        wrapping_keys, before = self._known(), self._files.get(tenant)
        try:
            stamp = _stamp(os.stat(self._path(tenant)))
        except FileNotFoundError:
            self._drop(tenant)
            return None
        if before is not None and before.stamp == stamp and before.known == wrapping_keys.keys():
            return before
        lines = self._path(tenant).read_text("ascii", "replace").splitlines()
        had = {each.line: each.secret for each in before.keys if each.by in wrapping_keys} if before else {}
        keys = tuple(
            _Wrapped(parts.by, line, had.get(line) or _unwrapped(parts, tenant, wrapping_keys))
            for line in lines
            if (parts := _parts(line)) is not None and parts.generation >= self._generation(tenant)
        )
        current_secrets = {each.secret for each in keys}
        for each in before.keys if before else ():
            if each.secret is not None and each.secret not in current_secrets:
                each.secret.erase()
        self._files[tenant] = file = _File(stamp, keys, frozenset(wrapping_keys))
        return file

    def _make(self, tenant: bytes, wrapping: Secret) -> Secret:
        secret, salt, generation = Secret(os.urandom(SECRET_BYTES)), new_salt(), self._generation(tenant)
        wrapped = secret.wrapped_by(wrapping, salt, _about(tenant, generation, wrapping.id))
        line = f"{FORMAT} {generation} {wrapping.id.hex()} {salt.hex()} {wrapped.hex()}"
        fd = self._append(self._path(tenant), line)
        stamp = _stamp(os.fstat(fd))
        os.close(fd)
        self._sync()
        before = self._files.get(tenant)
        before = before or _File(stamp, (), frozenset(self._known()))
        self._files[tenant] = before._replace(
            stamp=stamp, keys=(*before.keys, _Wrapped(wrapping.id, line, secret))
        )
        return secret

    @staticmethod
    def _append(path: Path, line: str) -> int:
        """Write the line to the disk. Returns the open file."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            is_torn = size and os.pread(fd, 1, size - 1) != b"\n"  # by a kill or a power loss
            os.write(fd, ("\n" if is_torn else "").encode() + line.encode() + b"\n")
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _destroy(self, tenant: bytes) -> int:
        self._drop(tenant)
        try:
            fd = os.open(self._path(tenant), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            size = os.fstat(fd).st_size
            lines = os.pread(fd, size, 0).decode("ascii", "replace").splitlines()
            os.pwrite(fd, bytes(size), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.unlink(self._path(tenant))
        self._sync()
        return sum(_parts(line) is not None for line in lines)

    def _drop(self, tenant: bytes) -> None:
        if (file := self._files.pop(tenant, None)) is not None:
            for wrapped in file.keys:
                if wrapped.secret is not None:
                    wrapped.secret.erase()

    def _sync(self) -> None:
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process changes a file meanwhile. TimeoutError: another one does not end."""
        fd = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + _LOCK_SECONDS
        try:
            while not _locked(fd):
                if time.monotonic() > until:
                    raise TimeoutError(errno.ETIMEDOUT, f"another process holds {self._root / LOCK}")
                time.sleep(0.01)  # flock has no deadline
            yield
        finally:
            os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parts(line: str) -> _Line | None:
    """None: it is no line of a tenant's file."""
    if not re.fullmatch(rf"{FORMAT} [0-9]{{1,18}} [0-9a-f]{{16}} [0-9a-f]{{64}} [0-9a-f]{{96}}", line):
        return None
    _, generation, *parts = line.split()
    return _Line(int(generation), *map(bytes.fromhex, parts))


def _about(tenant: bytes, generation: int, by: bytes) -> bytes:
    return FORMAT.encode() + tenant + generation.to_bytes(8, "big") + by


def _unwrapped(parts: _Line, tenant: bytes, wrapping_keys: Mapping[bytes, Secret]) -> Secret | None:
    if (wrapping := wrapping_keys.get(parts.by)) is None:
        return None
    try:
        return wrapping.unwrap(parts.wrapped, parts.salt, _about(tenant, parts.generation, parts.by))
    except BadSeal:
        log.error("lmtier: a key of tenant %s is damaged; what it sealed cannot be read", tenant.hex())
        return None
