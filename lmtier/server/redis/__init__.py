"""The Redis commands on named values. Answers and errors are those of redis.

Other commands get one sentence that says what this server is. There is one database, 0. FLUSHALL deletes the
named values; `lmtier clear` deletes the KV of engines.
"""

from __future__ import annotations

from lmtier.server.commands import Command, Table
from lmtier.server.redis.service import ServerCommands
from lmtier.server.redis.strings import ValueCommands
from lmtier.server.values import Values

_MANY = 1 << 20
"""Names."""
_ONE, _ALL, _PAIRS = (1, 1, 1), (1, -1, 1), (1, -1, 2)


def redis_table(values: Values, service: ServerCommands) -> Table:
    strings = ValueCommands(values)
    reads, writes = ("readonly", "fast"), ("write", "denyoom")
    always = ("loading", "stale", "fast")
    return {
        b"GET": Command(strings.get, 2, reads, _ONE),
        b"MGET": Command(strings.mget, -2, reads, _ALL, max_arguments=_MANY),
        b"GETRANGE": Command(strings.getrange, 4, ("readonly",), _ONE),
        b"STRLEN": Command(strings.strlen, 2, reads, _ONE),
        b"EXISTS": Command(strings.exists, -2, reads, _ALL, max_arguments=_MANY),
        b"MEMORY": Command(strings.memory, -3, ("readonly",), (2, 2, 1)),
        b"TYPE": Command(strings.type, 2, reads, _ONE),
        b"TTL": Command(strings.ttl, 2, reads, _ONE),
        b"PTTL": Command(strings.ttl, 2, reads, _ONE),
        b"DBSIZE": Command(strings.dbsize, 1, reads),
        b"SCAN": Command(strings.scan, -2, ("readonly",)),
        b"KEYS": Command(strings.keys, 2, ("readonly",)),
        b"SET": Command(strings.set, -3, writes, _ONE, range(2, 3)),
        b"SETNX": Command(strings.setnx, 3, (*writes, "fast"), _ONE, range(2, 3)),
        b"SETEX": Command(strings.setex, 4, writes, _ONE, range(3, 4)),
        b"PSETEX": Command(strings.setex, 4, writes, _ONE, range(3, 4)),
        b"GETSET": Command(strings.getset, 3, (*writes, "fast"), _ONE, range(2, 3)),
        b"MSET": Command(strings.mset, -3, writes, _PAIRS, range(2, 1 << 30, 2), max_arguments=_MANY),
        b"GETDEL": Command(strings.getdel, 2, ("write", "fast"), _ONE),
        b"DEL": Command(strings.delete, -2, ("write",), _ALL, max_arguments=_MANY),
        b"UNLINK": Command(strings.delete, -2, ("write", "fast"), _ALL, max_arguments=_MANY),
        b"EXPIRE": Command(strings.expire, -3, ("write", "fast"), _ONE),
        b"PEXPIRE": Command(strings.expire, -3, ("write", "fast"), _ONE),
        b"EXPIREAT": Command(strings.expire, -3, ("write", "fast"), _ONE),
        b"PEXPIREAT": Command(strings.expire, -3, ("write", "fast"), _ONE),
        b"PERSIST": Command(strings.persist, 2, ("write", "fast"), _ONE),
        b"FLUSHALL": Command(strings.flush, -1, ("write",), writes_any_name=True),
        b"FLUSHDB": Command(strings.flush, -1, ("write",), writes_any_name=True),
        b"PING": Command(service.ping, -1, always),
        b"ECHO": Command(service.echo, 2, always),
        b"TIME": Command(service.time, 1, always),
        b"SELECT": Command(service.select, 2, always),
        b"INFO": Command(service.info, -1, always),
        b"COMMAND": Command(service.command, -1, always),
        b"CONFIG": Command(service.config, -2, ("admin", *always)),
        b"CLIENT": Command(service.client, -2, always),
        b"HELLO": Command(service.hello, -1, ("no_auth", *always)),
        b"AUTH": Command(service.auth, -2, ("no_auth", *always)),
        b"QUIT": Command(service.quit, -1, ("no_auth", *always)),
        b"RESET": Command(service.reset, 1, ("no_auth", *always)),
    }
