"""The memory of another lmtier server, for requests that name it. Nothing is written there or deleted.

The other server sends an object as every tier stores it, with its header and checksum, so it is checked here
like one from Redis. What is deleted there is a miss here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmtier.format.compression import RAW
from lmtier.format.layout import Name
from lmtier.format.objects import PAGE, Selector
from lmtier.format.sealing import SealingKeys
from lmtier.tiers.base import Item, Stat, Tier
from lmtier_backends.redis.connection import accepted
from lmtier_backends.redis.pool import KeyCommand
from lmtier_backends.redis.tier import RedisTier
from lmtier_backends.sockets import Address, BadReply, printable_excerpt

_MOST = 16_384
"""The most names in one question."""
_LARGEST = 1 << 40
"""Bytes of an object: who says that it has more lies."""


class SourceTier(RedisTier):
    """lmtier://[:token@]host[:port]"""

    scheme = "lmtier"
    port = 6380
    variable = "LMTIER_TOKEN"
    EXAMPLE = ":TOKEN@other-host:6380"

    def __init__(
        self,
        location: str,
        *,
        token_file: str = "",
        connections: int = 4,
        deadline: float = 1.0,
        ssl_ca_certs: str = "",
        ssl_certfile: str = "",
        ssl_keyfile: str = "",
        ssl_check_hostname: bool = True,
    ) -> None:
        self._need(
            self.is_encrypted or not (ssl_ca_certs or ssl_certfile or ssl_keyfile),
            "certificates are for lmtiers://",
        )
        super().__init__(
            location,
            password_file=token_file,
            connections=connections,
            deadline=deadline,
            ssl_ca_certs=ssl_ca_certs,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            ssl_check_hostname=ssl_check_hostname,
        )

    # ---- the functions of a tier

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        until = self._call_deadline()
        found: dict[Name, Stat] = {}
        for first in range(0, len(names), _MOST):
            some = names[first : first + _MOST]
            reply = accepted(self._asker.ask([_has(some)], until)[0])
            if not isinstance(reply, list) or [type(size) for size in reply] != [int] * len(some):
                raise BadReply(f"{len(some)} names were answered {printable_excerpt(reply)}")
            found |= {
                name: Stat(nbytes) for name, nbytes in zip(some, reply, strict=True) if 0 < nbytes <= _LARGEST
            }
        return found

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        until = self._call_deadline()
        ask = KeyCommand.of("LMTIER.READ", str(item.name).encode())
        got = self._asker.fetch(ask, buffers, PAGE + len(item.payload), until)
        if got is None:
            raise FileNotFoundError(item.name)
        return int(got)

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        raise OSError("nothing is written to the memory of another server")

    def delete(self, names: Sequence[Name]) -> None:
        """They belong to the other server."""

    def clear(self, selector: Selector) -> Iterator[None]:
        return iter(())

    # ---- the differences from Redis

    def use_codec(self, name: str) -> None:
        self._need(name == RAW, "objects come as they are in memory; remove codec=")

    def use_keys(self, keys: SealingKeys) -> None:
        Tier.use_keys(self, keys)

    def _check_reachable(self) -> None:
        """Hosts may start in any order, and a server that lists itself does not listen yet."""

    def _address(self, text: str, port: int) -> Address:
        address = super()._address(text, port)
        assert isinstance(address, tuple)
        host, number = address
        self.source = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        return address

    def _db_in(self, path: str, db: int) -> int:
        self._need(not path, f"write it like {self.scheme}://{self.EXAMPLE}")
        return 0


class TlsSourceTier(SourceTier):
    """lmtiers://[:token@]host[:port]"""

    scheme = "lmtiers"
    is_encrypted = True


def _has(names: Sequence[Name]) -> KeyCommand:
    return KeyCommand.of("LMTIER.HAS", *(str(name).encode() for name in names))
