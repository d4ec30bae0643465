"""Objects in Redis, Valkey or another lmtier server, shared by many hosts. Each call has a deadline.

    lmtier:<namespace>:{<key>.<shard>}               card, header page; then the payload if it is small
    lmtier:<namespace>:{<key>.<shard>}:<nonce>:<n>   part n of a larger payload

A payload is split into parts of 1020 KiB. Larger values halve the rate, because the server allocates new
memory for each, and a value of 1024 KiB with its overhead takes 1280 KiB. Each write has its own nonce, in
its card and in the names of its parts. The card is written last. So two writers never mix, and a reader sees
one whole write or a miss. A part that was evicted, or has another size, makes the object a miss, and
`objects.unseal` checks the rest. The braces are a cluster's hash tag: the parts of an object are on one node,
and objects are spread over the nodes.

One request at a time is in flight on a connection, because pipelined payloads are slower. The threads share
`connections` of them, and each call ends by `deadline`. That is also why lmtier has its own connections
(wire.py) and does not use redis-py, whose time-outs are per read and restart with every byte.
"""

from __future__ import annotations

import os
import re
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lmtier.errors import TierError, log
from lmtier.format.keys import NAMESPACE_BYTES
from lmtier.format.layout import Name
from lmtier.format.objects import PAGE, CorruptObject, Selector, padded, peek
from lmtier.tiers.base import Item, Stat
from lmtier.wire.resp import Argument, Buffer, Error, encode_command_parts
from lmtier_backends.options import TimedTier, require, require_common_options
from lmtier_backends.redis.connection import ErrorReply, Login, accepted, dial
from lmtier_backends.redis.pool import Connections, KeyCommand, KeyCommandRouter
from lmtier_backends.redis.server_map import Cluster, Sentinels, ServerMap
from lmtier_backends.sockets import Address, BadReply, printable_excerpt, tls_context

PASSWORD_VARIABLE = "LMTIER_REDIS_PASSWORD"
PORT = 6379
_SENTINEL_PORT = 26379
_MOST_LITTER = 4096
_SCANNED = 1000  # names per step: some .2 ms of the server's single thread
_MOST_PARTS = 1 << 16
_MOST_PART = 256 << 20
_TOGETHER = 4096  # names deleted in one round trip
_CURSOR = re.compile(b"[0-9]{1,20}")
_MAGIC = b"lmtier-1"
_CARD = struct.Struct("<8s8sQQ")
CARD_BYTES = _CARD.size
_CARD_ASKED = b"*4\r\n$8\r\nGETRANGE\r\n$%%d\r\n%%b\r\n$1\r\n0\r\n$2\r\n%d\r\n" % (CARD_BYTES - 1)
"""The encoded request, ten times faster than the encoder. A lookup sends it for each key."""


class Manifest(NamedTuple):
    """The first bytes under the name of an object: how it was written."""

    nonce: bytes
    nbytes: int
    """Payload bytes, whole pages."""
    part_bytes: int
    """Payload bytes in each part except the last; 0: the payload follows the header."""

    def pack(self) -> bytes:
        return _CARD.pack(_MAGIC, *self)

    @classmethod
    def read(cls, data: Buffer) -> Manifest | None:
        """None: not a card, or an impossible one."""
        if len(data) < CARD_BYTES:
            return None
        magic, nonce, nbytes, part = _CARD.unpack_from(data)
        if magic != _MAGIC or nbytes % PAGE or part % PAGE or part > _MOST_PART:
            return None
        if nbytes > (part * _MOST_PARTS or 2 * _MOST_PART):
            return None
        return cls(nonce, nbytes, part)

    def offsets(self) -> range:
        """Where the parts begin."""
        return range(0, self.nbytes, self.part_bytes) if self.part_bytes else range(0)

    def part_keys(self, key: bytes) -> list[bytes]:
        return [b"%s:%s:%d" % (key, self.nonce.hex().encode(), n) for n in range(len(self.offsets()))]


class RedisTier(TimedTier):
    """redis://[user[:password]@]host[:port][/db]"""

    scheme = "redis"
    is_encrypted = False
    port = PORT
    variable = PASSWORD_VARIABLE
    """The environment variable with the password, if nothing else gives one."""

    def __init__(
        self,
        location: str,
        *,
        username: str = "",
        password_file: str = "",
        db: int = 0,
        namespace: str = "default",
        connections: int = 4,
        deadline: float = 1.0,
        part: int = 1020 << 10,
        ssl: bool = False,
        ssl_ca_certs: str = "",
        ssl_certfile: str = "",
        ssl_keyfile: str = "",
        ssl_check_hostname: bool = True,
        sentinel_username: str = "",
        sentinel_password_file: str = "",
    ) -> None:
        require_common_options(self.scheme, namespace, connections, deadline)
        self._need(part >= PAGE and part % PAGE == 0, f"part={part}: must be whole pages of {PAGE} bytes")
        self._need(part <= _MOST_PART, f"part={part}: a server takes values of 512 MiB; 1MiB is fastest")
        is_tls = ssl or self.is_encrypted
        self._need(
            is_tls or not (ssl_ca_certs or ssl_certfile or ssl_keyfile),
            "certificates are for rediss://, or with ssl=true",
        )
        self._need(
            self.scheme == "redis-sentinel" or not (sentinel_username or sentinel_password_file),
            "sentinel_username and sentinel_password_file are for redis-sentinel://",
        )
        user, password, place = split_login(location, self.scheme)
        self._need(not (user and username), "the user is given twice, before the @ and as username=")
        self._need(
            not (password and password_file), "the password is given twice, before the @ and as a file"
        )
        self._need(bool(place), f"which server? write it like {self.scheme}://{self.EXAMPLE}")
        hosts, path = self._split_path(place)
        db = self._db_in(path, db)
        self._prefix = f"lmtier:{namespace}:".encode()
        self._deadline = deadline
        self._part = part
        self._largest_single_value = part * 5 // 4  # a second part does not pay for a few more bytes
        self._where = f"{self.scheme}://{place}" + f" namespace {namespace}" * (namespace != "default")
        self._orphaned_parts: deque[tuple[bytes, Manifest]] = deque(maxlen=_MOST_LITTER)
        """Objects that are gone but for their parts, which are to be deleted with a later write."""
        self._orphans_retry_at = 0.0
        """A node that has some did not answer. Until then other nodes do not wait for it."""
        certificates = (ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname)
        tls = tls_context(self.scheme, *certificates) if is_tls else None

        def login() -> Login:  # read for each connection, because a password may change
            secret = password or secret_in(password_file) or os.environ.get(self.variable, "")
            return Login(user or username, secret, db)

        def sentinel_login() -> Login:
            return Login(sentinel_username, secret_in(sentinel_password_file))

        for make_login in (login, sentinel_login):
            try:
                make_login()
            except OSError as error:
                raise TierError(f"{self.scheme} tier: password file: {error}") from None
        self._connections = Connections(connections, login, tls)
        self._homes = self._make_server_map(hosts, path, sentinel_login, tls)
        self._connections.lost = self._homes.invalidate
        self._asker = KeyCommandRouter(self._connections, self._homes)
        super().__init__(self.scheme, connections, connections, askers=1)
        self._check_reachable()

    EXAMPLE = "cache.example:6379/0"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._where}>"

    # ---- the functions of a tier

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        until = self._call_deadline()
        key = self._key(item.name)
        card_bytes = memoryview(bytearray(CARD_BYTES))
        payload = buffers[1] if len(buffers) > 1 else None
        if payload is None:
            command = KeyCommand.of("GETRANGE", key, 0, CARD_BYTES + PAGE - 1)
            likely = 0
        else:
            command = KeyCommand.of("GET", key)
            likely = len(payload) if len(payload) <= self._largest_single_value else 0
        bytes_read = self._asker.fetch(command, (card_bytes, *buffers), CARD_BYTES + PAGE + likely, until)
        if not bytes_read:
            raise FileNotFoundError(item.name)
        card = Manifest.read(card_bytes) if bytes_read >= CARD_BYTES else None
        if card is None:
            raise CorruptObject("no object of lmtier")
        if payload is None or not card.part_bytes:
            return int(bytes_read) - CARD_BYTES
        if bytes_read != CARD_BYTES + PAGE:
            raise CorruptObject(f"{bytes_read} bytes under the name of an object in parts")
        if card.nbytes <= len(payload):
            self._read_parts(item.name, card, payload[: card.nbytes], until)
        return PAGE + card.nbytes

    def _read_parts(self, name: Name, card: Manifest, payload: memoryview, until: float) -> None:
        for number, (part_key, offset) in enumerate(
            zip(card.part_keys(self._key(name)), card.offsets(), strict=True)
        ):
            part_view = payload[offset : offset + card.part_bytes]
            got = self._asker.fetch(KeyCommand.of("GET", part_key), (part_view,), len(part_view), until)
            if got is None:  # evicted or expired; the rest of the object is useless
                with suppress(OSError):
                    self._delete_unless_rewritten(self._key(name), card, until)
                raise FileNotFoundError(name)
            if got != len(part_view):
                raise CorruptObject(f"part {number} has {got} bytes, not {len(part_view)}")

    def _delete_unless_rewritten(self, key: bytes, card: Manifest, until: float) -> None:
        """Delete an object, unless it was written again since."""
        (current_card,) = self._asker.ask([_card_of(key)], until)
        if current_card == card.pack():
            self._unlink([key], until)

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        until = self._call_deadline()
        page, payload = buffers
        key = self._key(item.name)
        if item.replaces is not None:
            self._unlink([self._key(item.replaces)], until)
        self._delete_orphaned_parts(until)
        card = Manifest(
            os.urandom(8), len(payload), 0 if len(payload) <= self._largest_single_value else self._part
        )
        part_keys = card.part_keys(key)
        expiry: tuple[Argument, ...] = ("PX", max(1, round(item.lives * 1000))) if item.lives else ()
        try:
            for part_key, offset in zip(part_keys, card.offsets(), strict=True):
                part = payload[offset : offset + card.part_bytes]
                _need_ok(self._asker.ask([KeyCommand.of("SET", part_key, part, *expiry)], until)[0])
            value = (card.pack(), page) if part_keys else (card.pack(), page, payload)
            old, done = self._asker.ask([_card_of(key), KeyCommand.of("SET", key, value, *expiry)], until)
            _need_ok(done)
        except BaseException:
            if part_keys:
                self._orphaned_parts.append((key, card))
            raise
        if isinstance(old, bytes) and (old_card := Manifest.read(old)):
            with suppress(OSError):
                self._unlink_parts([(key, old_card)], until)

    def delete(self, names: Sequence[Name]) -> None:
        self._unlink([self._key(name) for name in names], self._call_deadline())

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        until = self._call_deadline()
        found = {}
        for name, reply in zip(
            names, self._asker.ask([_card_of(self._key(n)) for n in names], until), strict=True
        ):
            if isinstance(reply, Error) and reply.code != "WRONGTYPE":
                raise ErrorReply(reply)
            if isinstance(reply, bytes) and (card := Manifest.read(reply)):
                found[name] = Stat(padded(card.nbytes))
        return found

    def clear(self, selector: Selector) -> Iterator[None]:
        """Also deletes parts that belong to no object. Each step ends by `deadline`."""
        start = selector.prefix.hex()
        if selector.is_prefix:
            return self._search(start, self._clear_all)
        if len(selector.tenants) == 1 and len(selector.prefix) <= NAMESPACE_BYTES:
            start = start.ljust(2 * NAMESPACE_BYTES, "?") + next(iter(selector.tenants)).hex()
        return self._search(start, partial(self._clear_some, selector))

    def _search(self, start: str, clear: Callable[[list[bytes], float], None]) -> Iterator[None]:
        searched_servers: Sequence[Address] = ()
        # Keys that move between nodes during a search may be missed on both, so search again.
        while (servers := self._homes.all_servers(self._call_deadline())) != searched_servers:
            searched_servers = servers
            for address in dict.fromkeys(servers):
                pattern = b"%s{%s*" % (self._prefix, start.encode())
                yield from self._search_node(address, pattern, clear)

    def _search_node(
        self, address: Address, pattern: bytes, clear: Callable[[list[bytes], float], None]
    ) -> Iterator[None]:
        cursor = b""
        while True:
            until = self._call_deadline()
            match self._connections.ask(
                address, ("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _SCANNED), until
            ):
                case [bytes(onward), list(names)] if _CURSOR.fullmatch(onward) and cursor != onward:
                    cursor = onward
                case Error() as error:
                    raise ErrorReply(error)
                case reply:
                    raise BadReply(f"a SCAN was answered {printable_excerpt(reply)}")
            clear([name for name in names if isinstance(name, bytes)], until)
            yield
            if cursor == b"0":
                return

    def _clear_all(self, keys: Iterable[bytes], until: float) -> None:
        remaining = iter(keys)
        while batch := [KeyCommand.of("UNLINK", key) for key in islice(remaining, _TOGETHER)]:
            for reply in self._asker.ask(batch, until):
                accepted(reply)

    def _clear_some(self, suspect: Selector, keys: list[bytes], until: float) -> None:
        """Delete the objects whose headers are suspect, with their parts.

        Of a tenant who leaves, delete all parts: their object may be gone.
        """
        matching = [(key, name) for key in keys if (name := self._name(key)) and suspect.concerns(name.key)]
        objects = [(key, name) for key, name in matching if key.endswith(b"}")]
        header_commands = [KeyCommand.of("GETRANGE", key, 0, CARD_BYTES + PAGE - 1) for key, _ in objects]
        suspects = []
        for (key, name), reply in zip(objects, self._asker.ask(header_commands, until), strict=True):
            if isinstance(reply, Error) and reply.code != "WRONGTYPE":  # it may be suspect
                raise ErrorReply(reply)
            with suppress(CorruptObject):  # a reader will find that out
                if isinstance(reply, bytes) and suspect.covers(
                    name.key, peek(memoryview(reply)[CARD_BYTES:], name)[0].provenance
                ):
                    suspects.append(key)
        self._unlink(suspects, until)
        if not suspect.needs_headers:
            self._clear_all([key for key, _ in matching if not key.endswith(b"}")], until)

    def _name(self, key: bytes) -> Name | None:
        """The name of the object that has this key, or a part with this key."""
        stem, _, _ = key[len(self._prefix) + 1 :].partition(b"}")
        return Name.parse(stem.decode(errors="replace"))

    def close(self) -> None:
        super().close()
        self._connections.close()

    def _key(self, name: Name) -> bytes:
        return b"%s{%s}" % (self._prefix, str(name).encode())

    def _unlink(self, keys: Sequence[bytes], until: float) -> None:
        """Delete objects: one round trip, and one more if they have parts."""
        commands: list[KeyCommand] = []
        for key in keys:
            commands += (_card_of(key), KeyCommand.of("UNLINK", key))
        replies = self._asker.ask(commands, until)
        cards = [Manifest.read(reply) if isinstance(reply, bytes) else None for reply in replies[::2]]
        self._unlink_parts([(key, card) for key, card in zip(keys, cards, strict=True) if card], until)
        for reply in replies[1::2]:
            accepted(reply)
        self._delete_orphaned_parts(until)

    def _unlink_parts(self, objects: Sequence[tuple[bytes, Manifest]], until: float) -> None:
        try:
            self._clear_all((name for key, card in objects for name in card.part_keys(key)), until)
        except BaseException:
            self._orphaned_parts.extend(objects)
            raise

    def _delete_orphaned_parts(self, until: float) -> None:
        """Delete what belongs to no object, as far as that can be done soon."""
        until = min(until, time.monotonic() + self._deadline / 4)
        with suppress(IndexError):  # several threads may do this at once
            while self._orphans_retry_at < time.monotonic() < until:
                orphan = self._orphaned_parts.popleft()
                try:
                    self._unlink_parts([orphan], until)
                except OSError:
                    self._orphans_retry_at = time.monotonic() + self._deadline

    def _check_reachable(self) -> None:
        until = self._call_deadline()
        try:
            accepted(self._asker.ask([_card_of(self._prefix + b"{}")], until)[0])
        except OSError as error:
            log.warning("lmtier: %s does not work now; the server runs without it: %s", self._where, error)

    # ---- the differences between the schemes

    def _make_server_map(
        self,
        hosts: str,
        path: str,
        sentinel_login: Callable[[], Login],
        tls: ssl.SSLContext | None,
    ) -> ServerMap:
        del path, sentinel_login, tls
        return ServerMap(self._address(hosts, self.port))

    def _split_path(self, place: str) -> tuple[str, str]:
        hosts, _, path = place.partition("/")
        return hosts, path

    def _db_in(self, path: str, db: int) -> int:
        self._need(path.isdecimal() or not path, f"/{path} is not the number of a database")
        self._need(not (path and db), "the database is given twice, after the / and as db=")
        return int(path or db)

    def _address(self, text: str, port: int) -> Address:
        found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]@/\s]+))(?::(\d{1,5}))?", text)
        self._need(found is not None, f"{text!r} is not a host and port")
        assert found is not None
        port_number = int(found[3] or port)
        self._need(0 < port_number < 65536, f"{text!r} is not a host and port")
        return (found[1] or found[2], port_number)

    def _addresses(self, text: str, port: int) -> list[Address]:
        return [self._address(each, port) for each in text.split(",")]

    def _need(self, condition: bool, otherwise: str) -> None:
        require(self.scheme, condition, otherwise)


# ---- the other schemes


class TlsTier(RedisTier):
    """rediss://[user[:password]@]host[:port][/db]"""

    scheme = "rediss"
    is_encrypted = True


class UnixTier(RedisTier):
    """unix://[user[:password]@]/path?db=0"""

    scheme = "unix"
    EXAMPLE = "/run/redis/redis.sock"

    def _split_path(self, place: str) -> tuple[str, str]:
        self._need(place.startswith("/"), f"write it like unix://{self.EXAMPLE}")
        return place, ""

    def _address(self, text: str, port: int) -> Address:
        return text


class SentinelTier(RedisTier):
    """redis-sentinel://[user[:password]@]sentinel[:port],sentinel[:port]/master[/db]"""

    scheme = "redis-sentinel"
    EXAMPLE = "host1:26379,host2:26379/mymaster"

    def _make_server_map(
        self, hosts: str, path: str, sentinel_login: Callable[[], Login], tls: ssl.SSLContext | None
    ) -> ServerMap:
        def ask(address: Address, args: Sequence[Argument], until: float) -> Any:
            with closing(dial(address, until, sentinel_login(), tls)) as wire:
                wire.send(encode_command_parts(*args), until)
                return wire.read_reply(until)

        sentinels = self._addresses(hosts, _SENTINEL_PORT)
        return Sentinels(sentinels, path.split("/")[0], ask, self._connections.keep_only)

    def _db_in(self, path: str, db: int) -> int:
        master, _, number = path.partition("/")
        self._need(bool(master), f"which master? write it like redis-sentinel://{self.EXAMPLE}")
        return super()._db_in(number, db)


class ClusterTier(RedisTier):
    """redis-cluster://[user[:password]@]node[:port],node[:port]"""

    scheme = "redis-cluster"
    EXAMPLE = "host1:6379,host2:6379"

    def _make_server_map(
        self, hosts: str, path: str, sentinel_login: Callable[[], Login], tls: ssl.SSLContext | None
    ) -> ServerMap:
        return Cluster(self._addresses(hosts, PORT), self._connections.ask, self._connections.keep_only)

    def _db_in(self, path: str, db: int) -> int:
        self._need(not path and not db, "a cluster has database 0 only")
        return 0


# ---- requests and replies


def _card_of(key: bytes) -> KeyCommand:
    return KeyCommand(key, (_CARD_ASKED % (len(key), key),))


def _need_ok(reply: Any) -> None:
    if accepted(reply) != "OK":
        raise BadReply(f"a SET was answered {printable_excerpt(reply)}")


# ---- credentials


def split_login(location: str, scheme: str) -> tuple[str, str, str]:
    """User, password, and the rest."""
    if scheme == "unix" and location.startswith("/"):
        return "", "", location
    login, at, place = location.rpartition("@/" if scheme == "unix" else "@")
    place = at[1:] + place
    user, _, password = login.partition(":")
    return user, password, place


def secret_in(file: str) -> str:
    try:
        text = Path(file).expanduser().read_text("utf-8", "surrogateescape") if file else ""
    except FileNotFoundError:  # in a tier this exception would mean a miss
        raise ConnectionError(f"{file} does not exist") from None
    return text.partition("\n")[0].strip()
