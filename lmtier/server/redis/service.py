"""The Redis commands about the connection and the server: HELLO, AUTH, CLIENT, INFO, COMMAND and others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lmtier.server.access import Role, RoleTokens, WrongTokens
from lmtier.server.commands import OK, Argument, Caller, Command, PendingAnswer, Refused, Table
from lmtier.server.connection_table import ConnectedClient
from lmtier.server.redis.arguments import SYNTAX, compile_glob, need_short, read_integer, read_word, shown
from lmtier.wire.resp import Error, Simple, Verbatim

REDIS_VERSION = "7.0.15"
"""The version in INFO and HELLO. Clients choose their commands by it."""
WRONG_PASS = Error("WRONGPASS invalid username-password pair or user is disabled.")
NO_PASS = Error(
    "ERR AUTH <password> called without any password configured for the default user. "
    "Are you sure your configuration is correct?"
)

_CLIENT = ("ID", "GETNAME", "SETNAME", "SETINFO", "INFO", "LIST", "KILL", "NO-EVICT", "NO-TOUCH")


class ServerCommands:
    def __init__(
        self,
        *,
        tokens: Callable[[], RoleTokens],
        wrong: WrongTokens,
        info: Callable[[], Mapping[str, Mapping[str, object]]],
        settings: Callable[[], Mapping[str, str]],
        present: Callable[[], Iterable[ConnectedClient]],
        kill: Callable[[int], bool],
    ) -> None:
        """`info` returns the sections of INFO, `settings` the values of CONFIG GET, `present` the clients.

        `kill` closes the connection of this number, if there is one.
        """
        self._tokens = tokens
        self._wrong = wrong
        self._info = info
        self._settings = settings
        self._present = present
        self._kill = kill
        self.everything: Table = {}
        """All commands of the server, for COMMAND."""

    # ---- the connection

    def ping(self, caller: Caller, args: list[Argument]) -> object:
        if len(args) > 2:
            raise Refused("ERR wrong number of arguments for 'ping' command")
        return bytes(args[1]) if len(args) == 2 else Simple("PONG")

    def echo(self, caller: Caller, args: list[Argument]) -> object:
        return bytes(args[1])

    def time(self, caller: Caller, args: list[Argument]) -> object:
        seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
        return [str(seconds), str(micros)]

    def select(self, caller: Caller, args: list[Argument]) -> object:
        if read_integer(args[1]):
            raise Refused("ERR DB index is out of range")
        return OK

    def auth(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        if len(args) > 3:
            raise Refused(SYNTAX)
        if len(args) == 2 and not self._tokens() and not caller.foreign_reason:
            raise Refused(NO_PASS)
        yield from self._log_in(caller, args[1] if len(args) == 3 else b"default", args[-1])
        return OK

    def _log_in(self, caller: Caller, user: Argument, password: Argument) -> PendingAnswer:
        tokens = self._tokens()
        if caller.foreign_reason and not tokens:
            raise Refused(caller.foreign_reason)
        role = tokens.role_of(bytes(password)) if tokens else Role.ADMIN
        if bytes(user) == b"default" and role:
            caller.role = role
            return
        answer_at = self._wrong.register(caller.kind, caller.address)
        while time.monotonic() < answer_at:
            yield None
        raise Refused(WRONG_PASS)

    def hello(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        resp3, name = caller.resp3, caller.name
        if len(args) > 1:
            version = read_integer(args[1], "ERR Protocol version is not an integer or out of range")
            if version not in (2, 3):
                raise Refused("NOPROTO unsupported protocol version")
            resp3 = version == 3
        options = iter(args[2:])
        for option in options:
            match read_word(option):
                case "AUTH":
                    user, password = next(options, None), next(options, None)
                    if user is None or password is None:
                        raise Refused(_bad_hello(option))
                    yield from self._log_in(caller, user, password)
                case "SETNAME":
                    value = next(options, None)
                    if value is None:
                        raise Refused(_bad_hello(option))
                    name = _client_name(value)
                case _:
                    raise Refused(_bad_hello(option))
        if not caller.role:
            raise Refused(
                caller.foreign_reason
                or "NOAUTH HELLO must be called with the client already authenticated, otherwise the "
                "HELLO AUTH <user> <pass> option can be used to authenticate the client and "
                "select the RESP protocol version at the same time"
            )
        caller.resp3, caller.name = resp3, name
        return {
            "server": "redis",
            "version": REDIS_VERSION,
            "proto": 3 if resp3 else 2,
            "id": caller.id,
            "mode": "standalone",
            "role": "master",
            "modules": [],
        }

    def quit(self, caller: Caller, args: list[Argument]) -> object:
        caller.closing = True
        return OK

    def reset(self, caller: Caller, args: list[Argument]) -> object:
        caller.resp3, caller.name = False, ""
        caller.role = self._tokens().role_without_token(caller.foreign_reason, is_local=caller.is_local)
        return Simple("RESET")

    def client(self, caller: Caller, args: list[Argument]) -> object:
        match read_word(args[1]), args[2:]:
            case "ID", []:
                return caller.id
            case "GETNAME", []:
                return caller.name or None
            case "SETNAME", [name]:
                caller.name = _client_name(name)
                return OK
            case "SETINFO", [attribute, _]:
                if read_word(attribute) not in ("LIB-NAME", "LIB-VER"):
                    raise Refused(f"ERR Unrecognized option '{shown(attribute)}'")
                return OK
            case "INFO", []:
                own = (client for client in self._present() if client.caller is caller)
                return Verbatim("".join(f"{_line(client)}\n" for client in own))
            case "LIST", []:
                return Verbatim("".join(f"{_line(client)}\n" for client in self._present()))
            case "KILL", [address]:
                if not self._kill_where(caller, {"ADDR": bytes(address).decode("latin-1")}):
                    raise Refused("ERR No such client")
                return OK
            case "KILL", [_, _, *_] as filters if len(filters) % 2 == 0:
                options = [bytes(each).decode("latin-1") for each in filters]
                return self._kill_where(
                    caller, dict(zip(map(str.upper, options[::2]), options[1::2], strict=True))
                )
            case (("NO-EVICT" | "NO-TOUCH"), [switch]):
                if read_word(switch) not in ("ON", "OFF"):
                    raise Refused(SYNTAX)
                return OK
        raise Refused(_no_subcommand(args, *_CLIENT))

    def _kill_where(self, caller: Caller, filters: dict[str, str]) -> int:
        """Close the connections to which all of these apply, but not the caller's own."""
        if unknown := filters.keys() - {"ID", "ADDR", "SKIPME"}:
            raise Refused(f"ERR CLIENT KILL knows ID, ADDR and SKIPME here, not {min(unknown)[:32]!r}")
        client_ids = [
            client.caller.id
            for client in self._present()
            if client.caller is not caller
            and filters.get("ID", str(client.caller.id)) == str(client.caller.id)
            and filters.get("ADDR", client.caller.address) == client.caller.address
        ]
        return sum(map(self._kill, client_ids))

    # ---- the server

    def info(self, caller: Caller, args: list[Argument]) -> object:
        wanted = {read_word(arg).lower() for arg in args[1:]} - {"all", "default", "everything"}
        sections = [
            f"# {section}\r\n" + "".join(f"{name}:{value}\r\n" for name, value in fields.items())
            for section, fields in self._info().items()
            if not wanted or section.lower() in wanted
        ]
        return Verbatim("\r\n".join(sections))

    def config(self, caller: Caller, args: list[Argument]) -> object:
        match read_word(args[1]), args[2:]:
            case "GET", [_, *_]:
                need_short(args[2:])
                globs = [compile_glob(bytes(arg).lower()) for arg in args[2:]]
                settings = self._settings().items()
                return {name: value for name, value in settings if any(g.match(name.encode()) for g in globs)}
            case "SET", _:
                raise Refused(
                    "ERR settings change with `lmtier set`, as far as they can while the server runs"
                )
        raise Refused(_no_subcommand(args, "GET"))

    def command(self, caller: Caller, args: list[Argument]) -> object:
        match [read_word(arg) for arg in args[1:]]:
            case []:
                return [_described(name, command) for name, command in self.everything.items()]
            case ["COUNT"]:
                return len(self.everything)
            case ["LIST"]:
                return [name.lower() for name in self.everything]
            case ["DOCS", *names]:
                chosen_names = [name.encode() for name in names] or list(self.everything)
                return {name.lower(): _documented(name) for name in chosen_names if name in self.everything}
            case ["INFO", *names]:
                commands = [(name.encode(), self.everything.get(name.encode())) for name in names]
                return [command and _described(name, command) for name, command in commands]
        raise Refused(_no_subcommand(args, "COUNT", "LIST"))


def _client_name(arg: Argument) -> str:
    if any(byte < 33 or byte > 126 for byte in arg) or len(arg) > 128:
        raise Refused("ERR Client names cannot contain spaces, newlines or special characters.")
    return bytes(arg).decode()


def _line(present: ConnectedClient) -> str:
    caller = present.caller
    name = caller.name.replace(" ", "_")  # engines' names may have blanks, which separate fields here
    return (
        f"id={caller.id} addr={caller.address} name={name} age={present.age} idle={present.idle} db=0 "
        f"kind={caller.kind} resp={3 if caller.resp3 else 2} tot-cmds={caller.command_count} "
        f"cmd={caller.last}"
    )


def _documented(name: bytes) -> dict[str, str]:
    if name.startswith(b"LMTIER."):
        return {"summary": "A verb of lmtier; docs/PROTOCOL.md describes it.", "group": "lmtier"}
    return {
        "summary": f"As in redis {REDIS_VERSION}, on values of up to the memory's size.",
        "group": "string",
    }


def _described(name: bytes, command: Command) -> list[Any]:
    flags = frozenset(map(Simple, command.flags))
    none: frozenset[str] = frozenset()
    # Then: categories, hints, how to find the names, subcommands.
    return [name.lower(), command.arity, flags, *command.keys, none, [], [], []]


def _bad_hello(option: Argument) -> str:
    return f"ERR Syntax error in HELLO option '{shown(option)}'"


def _no_subcommand(args: list[Argument], *subcommands: str) -> str:
    """Why no subcommand takes these arguments."""
    if read_word(args[1]) in subcommands:
        name = f"{read_word(args[0])}|{read_word(args[1])}".lower()
        return f"ERR wrong number of arguments for '{name}' command"
    return f"ERR unknown subcommand '{shown(args[1])}'. Try {read_word(args[0])} HELP."
