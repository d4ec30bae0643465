"""Objects in Redis, Valkey or another lmtier server, shared by many hosts: best effort, each call in time.

    lmtier:<namespace>:{<key>.<shard>}               card, header page; then the payload if it is small
    lmtier:<namespace>:{<key>.<shard>}:<nonce>:<n>   part n of a larger payload

A payload moves in parts of 1020 KiB: larger values halve the rate, because the server takes fresh memory
for each, and 1024 KiB with their few bytes of administration take 1280 of it. Each write has a nonce of
its own, in its card and in the names of its parts; the card is written last. So two writers never mix,
and a reader sees one write whole, or a miss: a part that was evicted or has another size ends the object,
and `codec.unseal` has the last word. The braces are a cluster's hash tag: the parts of an object are on
one node, objects spread.

One request at a time is in flight on a connection, because pipelined payloads are slower; the threads
share `connections` of them, and each call ends by `deadline`. That is also why the connections are our
own (redis_wire.py) and not redis-py's, whose time-outs are for one read and begin again with every byte.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import struct
import threading
import time
from binascii import crc_hqx
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

from lmtier.codec import PAGE, CorruptObject, Suspect, padded, peek
from lmtier.errors import ConfigError, TierError
from lmtier.layout import Name
from lmtier.tier import Item, Stat
from lmtier.workers import BlockingTier
from lmtier_backends.redis_wire import (
    Address,
    Argument,
    BadReply,
    Buffer,
    Login,
    Refused,
    Reply,
    Wire,
    command,
    dial,
    left,
)

log = logging.getLogger("lmtier")

PASSWORD_VARIABLE = "LMTIER_REDIS_PASSWORD"
SLOTS = 16384
_HOPS = 5  # a slot moves once, or once more while we look
_MOST_PARTS = 1 << 16
_MOST_LITTER = 4096
_SCANNED = 1000  # names a step: some .2 ms of the server's one thread
_MAGIC = b"lmtier-1"
_CARD = struct.Struct("<8s8sQQ")
_CARD_ASKED = b"*4\r\n$8\r\nGETRANGE\r\n$%%d\r\n%%b\r\n$1\r\n0\r\n$2\r\n%d\r\n" % (_CARD.size - 1)
"""As `command` would write it, which takes ten times as long; a lookup asks it for each key."""
_PORT, _SENTINEL_PORT = 6379, 26379

Ask: TypeAlias = "Callable[[Address, Sequence[Argument], float], Reply]"


class Card(NamedTuple):
    """How an object was written; the first bytes under its name."""

    nonce: bytes
    nbytes: int
    """Payload bytes, whole pages."""
    part: int
    """Payload bytes in each part but the last; 0: the payload follows."""

    def pack(self) -> bytes:
        return _CARD.pack(_MAGIC, *self)

    @classmethod
    def read(cls, data: Buffer) -> Card | None:
        """None: not a card, or one that nobody can have written."""
        if len(data) < _CARD.size:
            return None
        magic, nonce, nbytes, part = _CARD.unpack_from(data)
        if magic != _MAGIC or nbytes % PAGE or part % PAGE or nbytes > part * _MOST_PARTS > 0:
            return None
        return cls(nonce, nbytes, part)

    def spans(self) -> range:
        """Where the parts begin."""
        return range(0, self.nbytes, self.part) if self.part else range(0)

    def names(self, key: bytes) -> list[bytes]:
        return [b"%s:%s:%d" % (key, self.nonce.hex().encode(), n) for n in range(len(self.spans()))]


class Question(NamedTuple):
    """A command about one key, as it goes over the wire."""

    key: bytes
    written: Sequence[Buffer]

    @classmethod
    def of(cls, word: str, key: bytes, *args: Argument) -> Question:
        return cls(key, command(word, key, *args))

    def pieces(self, *, asking: bool) -> Sequence[Buffer]:
        """With the word before it that a node wants to hear which a slot is moving to."""
        return (*command("ASKING"), *self.written) if asking else self.written


class RedisTier(BlockingTier):
    """redis://[user[:password]@]host[:port][/db]"""

    keeps = False
    scheme = "redis"

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
        self._need(connections >= 1, f"connections={connections}: must be 1 or more")
        self._need(deadline > 0, f"deadline={deadline}: must be more than 0 seconds")
        self._need(part >= PAGE and part % PAGE == 0, f"part={part}: must be whole pages of {PAGE} bytes")
        self._need(part <= 256 << 20, f"part={part}: a server takes values of 512 MiB; 1MiB is fastest")
        self._need(
            re.fullmatch(r"[A-Za-z0-9._-]{1,64}", namespace) is not None,
            f"namespace={namespace!r}: up to 64 letters, digits and . _ -",
        )
        is_tls = ssl or self.scheme == "rediss"
        self._need(
            is_tls or not (ssl_ca_certs or ssl_certfile or ssl_keyfile),
            "certificates are for rediss://, or with ssl=true",
        )
        self._need(
            self.scheme == "redis-sentinel" or not (sentinel_username or sentinel_password_file),
            "sentinel_username and sentinel_password_file are for redis-sentinel://",
        )
        user, password, place = _split_login(location, self.scheme)
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
        self._whole = part * 5 // 4  # a little more is not worth a second part
        self._where = f"{self.scheme}://{place} namespace {namespace}"
        self._litter: deque[bytes] = deque(maxlen=_MOST_LITTER)
        """Parts that belong to no object, to be deleted with the next write."""
        tls = _tls(ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname) if is_tls else None

        def login() -> Login:  # for each connection: a password may change while we run
            secret = password or _secret(password_file) or os.environ.get(PASSWORD_VARIABLE, "")
            return Login(user or username, secret, db)

        def sentinel_login() -> Login:
            return Login(sentinel_username, _secret(sentinel_password_file))

        for read in (login, sentinel_login):
            try:
                read()
            except OSError as error:
                raise TierError(f"{self.scheme} tier: password file: {error}") from None
        self._connections = Connections(connections, login, tls, self._lost)
        self._places = self._find_places(hosts, path, sentinel_login, tls)
        super().__init__(self.scheme, connections, connections, askers=1)
        self._try_first()

    EXAMPLE = "cache.example:6379/0"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._where}>"

    # ---- what a tier does

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        until = time.monotonic() + self._deadline
        key = self._key(item.name)
        written = memoryview(bytearray(_CARD.size))
        payload = buffers[1] if len(buffers) > 1 else None
        if payload is None:
            ask = Question.of("GETRANGE", key, 0, _CARD.size + PAGE - 1)
            likely = 0
        else:
            ask = Question.of("GET", key)
            likely = len(payload) if len(payload) <= self._whole else 0
        got = self._fetch(ask, (written, *buffers), _CARD.size + PAGE + likely, until)
        if not got:
            raise FileNotFoundError(item.name)
        card = Card.read(written) if got >= _CARD.size else None
        if card is None:
            raise CorruptObject("no object of lmtier")
        if payload is None or not card.part:
            return int(got) - _CARD.size
        if got != _CARD.size + PAGE:
            raise CorruptObject(f"{got} bytes under the name of an object in parts")
        if card.nbytes <= len(payload):
            self._read_parts(item.name, card, payload[: card.nbytes], until)
        return PAGE + card.nbytes

    def _read_parts(self, name: Name, card: Card, payload: memoryview, until: float) -> None:
        for number, (part, at) in enumerate(zip(card.names(self._key(name)), card.spans(), strict=True)):
            room = payload[at : at + card.part]
            got = self._fetch(Question.of("GET", part), (room,), len(room), until)
            if got is None:  # evicted, or expired; what is left of the object is nobody's
                with suppress(OSError):
                    self._forget(self._key(name), card, until)
                raise FileNotFoundError(name)
            if got != len(room):
                raise CorruptObject(f"part {number} has {got} bytes, not {len(room)}")

    def _forget(self, key: bytes, card: Card, until: float) -> None:
        """Delete an object, if it was not written anew meanwhile."""
        (now,) = self._ask([_card_of(key)], until)
        if now == card.pack():
            self._unlink([key], until)

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        until = time.monotonic() + self._deadline
        page, payload = buffers
        key = self._key(item.name)
        if item.replaces is not None:
            self._unlink([self._key(item.replaces)], until)
        self._tidy(until)
        card = Card(os.urandom(8), len(payload), 0 if len(payload) <= self._whole else self._part)
        names = card.names(key)
        expiry: tuple[Argument, ...] = ("PX", max(1, round(item.lives * 1000))) if item.lives else ()
        try:
            for name, at in zip(names, card.spans(), strict=True):
                part = payload[at : at + card.part]
                _need_ok(self._ask([Question.of("SET", name, part, *expiry)], until)[0])
            whole = (card.pack(), page) if names else (card.pack(), page, payload)
            old, done = self._ask([_card_of(key), Question.of("SET", key, whole, *expiry)], until)
            _need_ok(done)
        except BaseException:
            self._litter.extend(names)
            raise
        if isinstance(old, bytes) and (before := Card.read(old)):
            self._litter.extend(before.names(key))
            with suppress(OSError):
                self._tidy(until)

    def delete(self, names: Sequence[Name]) -> None:
        self._unlink([self._key(name) for name in names], time.monotonic() + self._deadline)

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        until = time.monotonic() + self._deadline
        found = {}
        for name, reply in zip(names, self._ask([_card_of(self._key(n)) for n in names], until), strict=True):
            if isinstance(reply, Refused) and not reply.is_about("WRONGTYPE"):
                raise reply
            if isinstance(reply, bytes) and (card := Card.read(reply)):
                found[name] = Stat(padded(card.nbytes))
        return found

    def clear(self, prefix: bytes) -> Iterator[None]:
        """Parts that belong to no object, too; in steps that each end by `deadline`."""
        return self._search(prefix, self._clear_all)

    def sift(self, suspect: Suspect) -> Iterator[None]:
        return self._search(suspect.prefix, partial(self._clear_some, suspect))

    def _search(self, prefix: bytes, clear: Callable[[list[bytes], float], None]) -> Iterator[None]:
        searched: Sequence[Address] = ()
        # What moves between nodes while they are searched may be on none of them when its turn comes.
        while (homes := self._places.homes(self._by())) != searched:
            searched = homes
            for address in dict.fromkeys(homes):
                pattern = b"%s{%s*" % (self._prefix, prefix.hex().encode())
                yield from self._search_node(address, pattern, clear)

    def _search_node(
        self, address: Address, pattern: bytes, clear: Callable[[list[bytes], float], None]
    ) -> Iterator[None]:
        cursor = b"0"
        while True:
            until = self._by()
            match self._ask_node(address, ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED), until):
                case [bytes(cursor), list(names)]:
                    pass
                case Refused() as refused:
                    raise refused
                case reply:
                    raise BadReply(f"a SCAN was answered {reply!r:.80}")
            clear([name for name in names if isinstance(name, bytes)], until)
            yield
            if cursor == b"0":
                return

    def _clear_all(self, keys: list[bytes], until: float) -> None:
        for reply in self._ask([Question.of("UNLINK", key) for key in keys], until):
            if isinstance(reply, Refused):
                raise reply

    def _clear_some(self, suspect: Suspect, keys: list[bytes], until: float) -> None:
        """Those whose header says so; parts go with their object."""
        objects = [(key, name) for key in keys if (name := self._name(key)) is not None]
        asked = [Question.of("GETRANGE", key, 0, _CARD.size + PAGE - 1) for key, _ in objects]
        doomed = []
        for (key, name), reply in zip(objects, self._ask(asked, until), strict=True):
            with suppress(CorruptObject):  # whoever reads it will see that
                if isinstance(reply, bytes) and suspect.covers(
                    name.key, peek(memoryview(reply)[_CARD.size :], name)[0].made
                ):
                    doomed.append(key)
        self._unlink(doomed, until)

    def _name(self, key: bytes) -> Name | None:
        """Of an object's own key; None: of one of its parts."""
        stem = key[len(self._prefix) :]
        return Name.parse(stem[1:-1].decode(errors="replace")) if stem.endswith(b"}") else None

    def _by(self) -> float:
        return time.monotonic() + self._deadline

    def close(self) -> None:
        super().close()
        self._connections.close()

    def _key(self, name: Name) -> bytes:
        return b"%s{%s}" % (self._prefix, str(name).encode())

    def _unlink(self, keys: Sequence[bytes], until: float) -> None:
        """Delete objects: one round trip, and one more if they have parts."""
        questions: list[Question] = []
        for key in keys:
            questions += (_card_of(key), Question.of("UNLINK", key))
        replies = self._ask(questions, until)
        for key, reply in zip(keys, replies[::2], strict=True):
            if isinstance(reply, bytes) and (card := Card.read(reply)):
                self._litter.extend(card.names(key))
        for reply in replies[1::2]:
            if isinstance(reply, Refused):
                raise reply
        self._tidy(until)

    def _tidy(self, until: float) -> None:
        parts: list[bytes] = []
        with suppress(IndexError):  # several threads may be at it
            while True:
                parts.append(self._litter.popleft())
        if not parts:
            return
        try:
            for reply in self._ask([Question.of("UNLINK", part) for part in parts], until):
                if isinstance(reply, Refused):
                    raise reply
        except BaseException:
            self._litter.extend(parts)
            raise

    # ---- asking

    def _ask(self, questions: Sequence[Question], until: float) -> list[Reply]:
        """The replies to commands on keys: one round trip, to all nodes at once, and one for each move."""
        replies: list[Reply] = [None] * len(questions)
        homes = {i: (self._places.home(each.key, until), False) for i, each in enumerate(questions)}
        for _ in range(_HOPS):
            batches: dict[Address, list[int]] = {}
            for i, (address, _asking) in homes.items():
                batches.setdefault(address, []).append(i)
            with ExitStack() as stack:
                # In one order for all threads, so that none waits for one who waits for it.
                wires = [
                    (stack.enter_context(self._connections.borrow(address, until)), batches[address])
                    for address in sorted(batches, key=str)
                ]
                for wire, numbers in wires:
                    wire.send([p for i in numbers for p in questions[i].pieces(asking=homes[i][1])], until)
                for wire, numbers in wires:
                    for i in numbers:
                        if homes[i][1]:
                            wire.reply(until)
                        replies[i] = wire.reply(until)
            onward = {}
            for i, (address, _asking) in homes.items():
                if isinstance(reply := replies[i], Refused) and (
                    new := self._onward(reply, questions[i].key, address)
                ):
                    onward[i] = new
            if not (homes := onward):
                break
        return replies

    def _ask_node(self, address: Address, args: Sequence[Argument], until: float) -> Reply:
        """The reply to a command that is not about a key."""
        with self._connections.borrow(address, until) as wire:
            wire.send(command(*args), until)
            return wire.reply(until)

    def _fetch(self, ask: Question, into: Sequence[memoryview], likely: int, until: float) -> int | None:
        """A string, straight into memory; its length, None if it is not there."""
        address, asking = self._places.home(ask.key, until), False
        for _ in range(_HOPS):
            with self._connections.borrow(address, until) as wire:
                wire.send(ask.pieces(asking=asking), until)
                if asking:
                    wire.reply(until)
                got = wire.bulk(into, likely, until)
            if not isinstance(got, Refused):
                return got
            if got.is_about("WRONGTYPE"):
                raise CorruptObject("not a string")
            if (new := self._onward(got, ask.key, address)) is None:
                raise got
            address, asking = new
        raise ConnectionError(f"sent from node to node {_HOPS} times")

    def _onward(self, said: Refused, key: bytes, address: Address) -> tuple[Address, bool] | None:
        if said.is_about("READONLY", "MASTERDOWN", "CLUSTERDOWN"):  # the master is another, or soon will be
            self._places.forget(address)
        return self._places.onward(said, key, address)

    def _lost(self, address: Address) -> None:
        self._places.forget(address)

    def _try_first(self) -> None:
        until = time.monotonic() + self._deadline
        try:
            (reply,) = self._ask([_card_of(self._prefix + b"{}")], until)
            if isinstance(reply, Refused):
                raise reply
        except OSError as error:
            log.warning("lmtier: %s cannot be used now, going on without it: %s", self._where, error)

    # ---- what the schemes differ in

    def _find_places(
        self,
        hosts: str,
        path: str,
        sentinel_login: Callable[[], Login],
        tls: ssl.SSLContext | None,
    ) -> Places:
        del path, sentinel_login, tls
        return Places(self._address(hosts, _PORT))

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
        number = int(found[3] or port)
        self._need(0 < number < 65536, f"{text!r} is not a host and port")
        return (found[1] or found[2], number)

    def _addresses(self, text: str, port: int) -> list[Address]:
        return [self._address(each, port) for each in text.split(",")]

    def _need(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise ConfigError(f"{self.scheme} tier: {otherwise}")


class TlsTier(RedisTier):
    """rediss://[user[:password]@]host[:port][/db]"""

    scheme = "rediss"


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

    def _find_places(
        self, hosts: str, path: str, sentinel_login: Callable[[], Login], tls: ssl.SSLContext | None
    ) -> Places:
        def ask(address: Address, args: Sequence[Argument], until: float) -> Reply:
            with closing(dial(address, until, sentinel_login(), tls)) as wire:
                wire.send(command(*args), until)
                return wire.reply(until)

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

    def _find_places(
        self, hosts: str, path: str, sentinel_login: Callable[[], Login], tls: ssl.SSLContext | None
    ) -> Places:
        return Cluster(self._addresses(hosts, _PORT), self._ask_node, self._connections.keep_only)

    def _db_in(self, path: str, db: int) -> int:
        self._need(not path and not db, "a cluster has database 0 only")
        return 0


# ---- where keys live


class Places:
    """One server, for ever the same."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def home(self, key: bytes, until: float) -> Address:
        """The server of `key`."""
        return self._address

    def homes(self, until: float) -> Sequence[Address]:
        """The servers of all keys, as they are now."""
        return (self._address,)

    def onward(self, said: Refused, key: bytes, address: Address) -> tuple[Address, bool] | None:
        """Where to send a command that `address` refused, and whether to say ASKING first."""
        return None

    def forget(self, address: Address) -> None:
        """It failed: look again before the next call."""


class _Learnt(Places):
    """Known to several, of which one is asked; again after a failure."""

    def __init__(
        self, known_to: Iterable[Address], ask: Ask, keep_only: Callable[[Iterable[Address]], None]
    ) -> None:
        self._known_to = list(known_to)
        self._ask = ask
        self._keep_only = keep_only
        self._learning = threading.Lock()
        self._doubtful: Address | None = None
        """The last that failed, asked last."""

    def _learn(self, args: Sequence[Argument], until: float, read: Callable[[Address, Reply], bool]) -> None:
        """Ask one after the other until `read` finds an answer good; the silent get a share of the time."""
        problem: OSError = ConnectionError("nobody to ask")
        for tried, address in enumerate(sorted(self._known_to, key=lambda each: each == self._doubtful)):
            share = left(until) / (len(self._known_to) - tried)
            try:
                reply = self._ask(address, args, time.monotonic() + share)
                if isinstance(reply, Refused):
                    raise reply
                if read(address, reply):
                    return
                problem = ConnectionError(f"{address} does not know")
            except OSError as error:
                problem = error
                self._doubtful = address
        raise problem

    @contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        """One thread asks; the others wait, and know then."""
        if not self._learning.acquire(timeout=left(until)):
            raise TimeoutError("the server did not answer in time")
        try:
            yield
        finally:
            self._learning.release()


class Sentinels(_Learnt):
    """The master, as a sentinel knows it."""

    def __init__(
        self,
        sentinels: Iterable[Address],
        name: str,
        ask: Ask,
        keep_only: Callable[[Iterable[Address]], None],
    ) -> None:
        super().__init__(sentinels, ask, keep_only)
        self._name = name
        self._master: Address | None = None

    def home(self, key: bytes, until: float) -> Address:
        if (master := self._master) is not None:
            return master
        with self._turn(until):
            if self._master is None:
                self._learn(("SENTINEL", "get-master-addr-by-name", self._name), until, self._read)
            master = self._master
        if master is None:
            raise ConnectionError("the master was lost as soon as it was found")
        return master

    def homes(self, until: float) -> Sequence[Address]:
        self._master = None
        return (self.home(b"", until),)

    def forget(self, address: Address) -> None:
        if self._master == address:
            self._master = None

    def _read(self, sentinel: Address, reply: Reply) -> bool:
        match reply:
            case [bytes(host), bytes(port)] if port.isdigit():
                self._master = (host.decode(), int(port))
                self._keep_only([self._master])
                return True
        return False


class Cluster(_Learnt):
    """Which node has which slot."""

    def __init__(
        self, seeds: Iterable[Address], ask: Ask, keep_only: Callable[[Iterable[Address]], None]
    ) -> None:
        super().__init__(seeds, ask, keep_only)
        self._seeds = list(self._known_to)
        self._slots: list[Address | None] | None = None

    def home(self, key: bytes, until: float) -> Address:
        if (slots := self._slots) is None:
            with self._turn(until):
                if self._slots is None:
                    self._learn(("CLUSTER", "SLOTS"), until, self._read)
                slots = self._slots
        address = slots[slot_of(key)] if slots else None
        if address is None:
            self._slots = None
            raise ConnectionError("no node of the cluster has this slot")
        return address

    def homes(self, until: float) -> Sequence[Address]:
        """Slot by slot."""
        with self._turn(until):
            self._learn(("CLUSTER", "SLOTS"), until, self._read)
            slots = self._slots or ()
        homes = tuple(address for address in slots if address is not None)
        if len(homes) < SLOTS:
            raise ConnectionError("some slots are on no node of the cluster")
        return homes

    def onward(self, said: Refused, key: bytes, address: Address) -> tuple[Address, bool] | None:
        match said.text.split():
            case ["MOVED" | "ASK" as word, _, where]:
                host, _, port = where.rpartition(":")
                host = host or address[0]
                if not port.isdigit():
                    return None
                if word == "MOVED" and (slots := self._slots):
                    slots[slot_of(key)] = (host, int(port))
                return (host, int(port)), word == "ASK"
        return None

    def forget(self, address: Address) -> None:
        self._slots = None
        self._doubtful = address

    def _read(self, asked: Address, reply: Reply) -> bool:
        if not isinstance(reply, list) or not reply:
            return False
        slots: list[Address | None] = [None] * SLOTS
        for run in reply:
            match run:
                case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                    name = host.decode() if isinstance(host, bytes) and host not in (b"", b"?") else asked[0]
                    slots[first : last + 1] = [(name, port)] * (last + 1 - first)
                case _:
                    raise BadReply(f"not a run of slots: {run!r}")
        self._slots = slots
        nodes = {address for address in slots if address is not None}
        self._known_to = [*nodes, *(seed for seed in self._seeds if seed not in nodes)]
        self._keep_only(nodes)  # a seed may be one of them by another name
        return True


def slot_of(key: bytes) -> int:
    start = key.find(b"{") + 1
    end = key.find(b"}", start) if start else -1
    return crc_hqx(key[start:end] if end > start else key, 0) % SLOTS


# ---- connections


class Connections:
    """Up to so many to each server, made when they are needed, each lent to one thread at a time."""

    def __init__(
        self,
        most: int,
        login: Callable[[], Login],
        tls: ssl.SSLContext | None,
        lost: Callable[[Address], None],
    ) -> None:
        self._most = most
        self._login = login
        self._tls = tls
        self._lost = lost
        self._lock = threading.Lock()
        self._idle: dict[Address, SimpleQueue[Wire | None]] = {}
        self._closed = False

    @contextmanager
    def borrow(self, address: Address, until: float) -> Iterator[Wire]:
        """Whoever sees an exception lost it: the next to borrow gets a new one."""
        idle = self._of(address)
        try:
            wire = idle.get(timeout=left(until))
        except Empty:
            raise TimeoutError("all connections were busy") from None
        try:
            if wire is not None and wire.is_stale():
                wire.close()
                wire = None
            if wire is None:
                wire = self._dial(address, until)
            yield wire
        except BaseException as error:
            if wire is not None:
                wire.close()
            if isinstance(error, OSError):
                self._lost(address)
            raise
        finally:
            idle.put(wire if wire is not None and not wire.is_closed else None)
            if self._idle.get(address) is not idle:  # nobody asks for this address any more
                _drain(idle)

    def _dial(self, address: Address, until: float) -> Wire:
        try:
            return dial(address, until, self._login(), self._tls)
        except FileNotFoundError as error:  # a socket's or a password's: to a tier that word means a miss
            raise ConnectionError(f"{error.filename or address} is not there") from None

    def keep_only(self, addresses: Iterable[Address]) -> None:
        keep = set(addresses)
        with self._lock:
            gone = [self._idle.pop(address) for address in [*self._idle] if address not in keep]
        for idle in gone:
            _drain(idle)

    def close(self) -> None:
        self._closed = True
        self.keep_only(())

    def _of(self, address: Address) -> SimpleQueue[Wire | None]:
        with self._lock:
            if self._closed:
                raise ConnectionError("closed")
            if address not in self._idle:
                self._idle[address] = SimpleQueue()
                for _ in range(self._most):
                    self._idle[address].put(None)
            return self._idle[address]


def _drain(idle: SimpleQueue[Wire | None]) -> None:
    with suppress(Empty):
        while True:
            if (wire := idle.get_nowait()) is not None:
                wire.close()


# ---- small things


def _card_of(key: bytes) -> Question:
    return Question(key, (_CARD_ASKED % (len(key), key),))


def _need_ok(reply: Reply) -> None:
    if isinstance(reply, Refused):
        raise reply
    if reply != b"OK":
        raise BadReply(f"a SET was answered {reply!r}")


def _split_login(location: str, scheme: str) -> tuple[str, str, str]:
    """User, password, and the rest."""
    if scheme == "unix" and location.startswith("/"):
        return "", "", location
    login, at, place = location.rpartition("@/" if scheme == "unix" else "@")
    place = at[1:] + place
    user, _, password = login.partition(":")
    return user, password, place


def _secret(file: str) -> str:
    text = Path(file).expanduser().read_text("utf-8", "surrogateescape") if file else ""
    return text.partition("\n")[0].strip()


def _tls(ca: str, cert: str, key: str, check_hostname: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca or None)
        context.check_hostname = check_hostname
        if cert or key:
            context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise TierError(f"redis tier: certificates {ca} {cert} {key}: {error}") from None
    return context
