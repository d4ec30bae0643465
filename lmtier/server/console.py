"""The commands of a person who looks after a server: one question at a time to it, and its answers as text.

What comes from a server is not believed: every wait has an end, and no byte of it steers the terminal.
"""

from __future__ import annotations

import json
import math
import socket
import ssl
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from types import TracebackType
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from lmtier.config import Serving, host_and_port
from lmtier.curve import FACTORS
from lmtier.errors import ConfigError, LMTierError
from lmtier.explain import Explanation
from lmtier.metrics import MISS_REASONS
from lmtier.server.report import Snapshot, TierNow, Tokens
from lmtier.server.resp import INCOMPLETE, Error, ProtocolError, Replies, command
from lmtier.terminal import Screen, bar, printable, size, span, spark, table

TIMEOUT = 5.0
PORT = 6380
MINUTES = 15.0
"""How far back a server remembers, and `top` looks."""
_CLEARING = 60.0  # a million chunks are not forgotten in TIMEOUT, nor those of a shared tier found
_SHOWN = 20  # clients
_STRANGE = "tells other things than this version of lmtier knows: use the same on both sides"


class Unreachable(LMTierError):
    """A server does not answer, or not as one of ours does. Says what to do about it."""


# ---- where


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is, and what must be shown to it."""

    unix: str = ""
    host: str = ""
    port: int = PORT
    tls: bool = False
    ca: str = ""
    """Who vouches for it; empty: the authorities that this system trusts."""
    is_pinned: bool = False
    """`ca` is its own certificate: its name does not matter."""
    cert: str = ""
    key: str = ""
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        if self.unix:
            return self.unix
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(text: str) -> Address:
    """host:port, a socket's path, unix:///path, redis://[:token@]host[:port] or rediss://, which is TLS."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        if "/" in text:
            return Address(unix=text)
        host, port = host_and_port(text, "address")
        return Address(host=_reachable(host), port=port)
    if scheme == "unix" and rest.startswith("/"):
        return Address(unix=unquote(rest))
    shown = f"{scheme}://{rest.rpartition('@')[2]}"  # a token is not repeated
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", PORT if url.port is None else url.port
    except ValueError:
        host, port = "", 0
    if scheme not in ("redis", "rediss") or not host or url.path not in ("", "/", "/0"):
        raise ConfigError(
            f"address {shown!r}: write it like 127.0.0.1:6380, /run/lmtier/socket, "
            "unix:///run/lmtier/socket, redis://:TOKEN@host:6380, or rediss:// for TLS"
        )
    if url.username and not url.password:
        raise ConfigError(f"address {shown!r}: a token follows a colon, like redis://:TOKEN@host:6380")
    token = unquote(url.password) if url.password else None
    return Address(host=host, port=port, tls=scheme == "rediss", token=token)


def own_address(serving: Serving) -> Address:
    """Of the server that these settings make: the Unix socket if there is one."""
    if serving.unix:
        return Address(unix=serving.unix)
    if not serving.listen:
        raise ConfigError(
            "the settings name neither a Unix socket nor an address to listen on; name a server"
        )
    host, port = host_and_port(serving.listen, "serve: listen")
    address = Address(host=_reachable(host), port=port)
    if not serving.tls_cert:
        return address
    address = replace(address, tls=True, ca=serving.tls_cert, is_pinned=True)
    return replace(address, cert=serving.tls_cert, key=serving.tls_key) if serving.tls_ca else address


def _reachable(host: str) -> str:
    """Where to go for a server that listens on every address."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def first_line(file: str) -> str:
    """A token out of its file."""
    try:
        line = Path(file).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file}: {error}") from None
    if not line:
        raise ConfigError(f"--token-file {file} is empty")
    return line


# ---- one question, one answer


class Remote:
    """A connection that waits for every answer. The token is shown when it is asked for, not before."""

    def __init__(self, address: Address, timeout: float = TIMEOUT) -> None:
        self.address = address
        self._timeout = timeout
        self._replies = Replies()
        self._socket = self._connected()

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(self, *words: str | bytes, timeout: float | None = None) -> Any:
        """The answer to one command; an error is raised, in words that say what to do."""
        timeout = timeout or self._timeout
        reply = self._exchange(words, timeout)
        if isinstance(reply, Error) and reply.startswith("NOAUTH"):
            if self.address.token is None:
                raise self._trouble("asks for a token: give it with --token-file FILE, or in LMTIER_TOKEN")
            if isinstance(shown := self._exchange(("AUTH", self.address.token), timeout), Error):
                raise self._trouble(f"does not take this token: {printable(shown)}")
            reply = self._exchange(words, timeout)
        if isinstance(reply, Error):
            if reply.startswith("ERR unknown command"):
                raise self._trouble("is no lmtier server, or an older one: it speaks Redis and nothing more")
            raise self._trouble(f"answered: {printable(reply)}")
        return reply

    def snapshot(self) -> Snapshot:
        """What the server tells about itself."""
        found = self.json("LMTIER.REPORT")
        tiers = found.get("tiers")
        if (
            Snapshot.__required_keys__ <= found.keys()
            and isinstance(tiers, list)
            and all(isinstance(tier, dict) and TierNow.__required_keys__ <= tier.keys() for tier in tiers)
            and Tokens.__required_keys__ <= found["tokens"].keys()
            and all(isinstance(ratios, dict) for ratios in found["curve"].values())
        ):
            return cast(Snapshot, found)
        raise self._trouble(_STRANGE)

    def history(self) -> list[dict[str, Any]]:
        """Its counters over the last minutes, the oldest first."""
        return list(self.json("LMTIER.HISTORY").get("rows", ()))

    def explanations(self, most: int, *, tokens: bool = False) -> list[Explanation]:
        """Why its last lookups missed, the latest first."""
        words = ("LMTIER.EXPLAIN", str(most), *(("TOKENS",) if tokens else ()))
        found = self.json(*words, kind=list)
        if all(isinstance(each, dict) and Explanation.__required_keys__ <= each.keys() for each in found):
            return cast("list[Explanation]", found)
        raise self._trouble(_STRANGE)

    def json(self, *words: str, kind: type = dict) -> Any:
        reply = self.ask(*words)
        try:
            found = json.loads(reply)
        except (TypeError, ValueError):
            found = None
        if not isinstance(found, kind):
            raise self._trouble(f"is no lmtier server: it answered something else to {words[0]}")
        return _harmless(found)

    def _exchange(self, words: Sequence[str | bytes], timeout: float) -> object:
        until = time.monotonic() + timeout
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(command(*words))
            while (reply := self._replies.next()) is INCOMPLETE:
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                data = self._socket.recv(1 << 16)
                if not data:
                    raise self._trouble(self._hung_up())
                self._replies.feed(data)
        except ProtocolError:
            raise self._trouble(
                "is no lmtier server: it answered something that is not RESP; is that the port of its page, "
                "or of another program?"
            ) from None
        except OSError as error:
            raise self._unreachable(error, timeout) from None
        return reply

    def _connected(self) -> socket.socket:
        address = self.address
        try:
            if address.unix:
                plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    plain.settimeout(self._timeout)
                    plain.connect(address.unix)
                except BaseException:
                    plain.close()
                    raise
                return plain
            context = _context(address) if address.tls else None
            plain = socket.create_connection((address.host, address.port), self._timeout)
            if context is None:
                return plain
            try:
                return context.wrap_socket(plain, server_hostname=address.host)
            except BaseException:
                plain.close()
                raise
        except OSError as error:
            raise self._unreachable(error, self._timeout) from None

    def _hung_up(self) -> str:
        if self.address.unix:
            return "closed the connection; its log may say why"
        if self.address.tls:
            return (
                "closed the connection; if it asks for a certificate of yours, give --cert and --key; "
                "if it has no TLS, write redis://"
            )
        return "closed the connection without an answer; if it asks for TLS, write rediss://"

    def _unreachable(self, error: OSError, timeout: float) -> Unreachable:
        """What an error of the system means here. The order matters: they are all OSError."""
        if isinstance(error, ssl.SSLCertVerificationError):
            said = error.verify_message.rstrip(".")
            return self._trouble(
                f"shows a certificate that is not trusted ({said}): name its authority with --ca"
            )
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return self._trouble(self._hung_up())
        if isinstance(error, ssl.SSLError):
            if "CERTIFICATE_REQUIRED" in (error.reason or "") or "HANDSHAKE_FAILURE" in (error.reason or ""):
                return self._trouble("asks for a certificate of yours: give --cert and --key")
            return self._trouble(
                f"does not speak TLS as we do ({error.reason}): write redis:// if it has none"
            )
        if isinstance(error, socket.gaierror):
            return self._trouble("cannot be found: is the host's name right?")
        if isinstance(error, TimeoutError):
            hint = "; does it speak TLS? If not, write redis://" if self.address.tls else ""
            return self._trouble(f"did not answer within {timeout:g} s{hint}")
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return self._trouble(
                "is not there: is `lmtier serve` running? `lmtier config` shows where it listens"
            )
        if isinstance(error, PermissionError):
            return self._trouble(
                "may be opened by the server's own user only: become that, or use its TCP address"
            )
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            return self._trouble(self._hung_up())
        return self._trouble(f"cannot be reached: {error.strerror or error}")

    def _trouble(self, what: str) -> Unreachable:
        return Unreachable(f"{self.address} {what}")


def _context(address: Address) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.ca or None)
        if address.cert:
            context.load_cert_chain(address.cert, address.key or None)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (address.ca, address.cert, address.key)))
        raise ConfigError(f"TLS with {files}: {error}") from None
    if address.is_pinned:
        context.check_hostname = False
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_harmless(each) for each in value]
    if isinstance(value, dict):
        return {printable(name): _harmless(each) for name, each in value.items()}
    return value


# ---- the answers, as text


def pong(remote: Remote) -> str:
    begin = time.monotonic()
    remote.ask("PING")
    took = time.monotonic() - begin
    return f"{_title(remote.snapshot(), str(remote.address))}; it answered in {took * 1000:.2f} ms"


def clear(
    remote: Remote,
    model: str | None,
    *,
    by: str | None = None,
    since: datetime | None = None,
    force: bool = False,
) -> str:
    """Forget the KV of one model, of one engine, since then; None: of any, ever. Says what is gone."""
    before = remote.snapshot()
    words = ["LMTIER.CLEAR", *(() if model is None else ("NAMESPACE", model))]
    words += () if by is None else ("STOREDBY", by)
    words += () if since is None else ("SINCE", str(int(since.timestamp() * 1000)))
    words += ["FORCE"] if force else []
    remote.ask(*words, "WAIT", str(round(1000 * _CLEARING)), timeout=2 * _CLEARING)
    after = remote.snapshot()
    left = {tier["tier"]: tier["chunks"] or 0 for tier in after["tiers"]}
    counted = {tier["tier"]: tier["chunks"] for tier in before["tiers"] if tier["chunks"] is not None}
    gone = {tier: chunks - left.get(tier, 0) for tier, chunks in counted.items()}
    searched = [tier["tier"] for tier in before["tiers"] if tier["chunks"] is None]
    what = "everything" if model is None else f"the KV of {model}"
    is_part = by is not None or since is not None
    if is_part:
        what = "what" if model is None else f"{what} that"
        what += " was stored" + (f" by {by}" if by is not None else "")
        what += f" since {since:%Y-%m-%d %H:%M:%S %z}" if since is not None else ""
    said = f"forgot {what}: " + ", ".join(
        [*(f"{max(0, count):,} chunks in {tier}" for tier, count in gone.items())]
        + [f"{'such' if is_part else 'whatever'} was in {tier}" for tier in searched]
    )
    if model is not None and not (any(gone.values()) or searched):
        said += "; the name must be the one that its engine gives"
    if after["leased_bytes"] and not force:
        said += f"; what is in use ({size(after['leased_bytes'])}) was kept: --force forgets that too"
    return said


def stats(now: Snapshot, name: str) -> str:
    """Everything since the start, in tables."""
    parts = [
        _title(now, name),
        _tokens_table(now),
        _tiers_table(now),
        *_shares_table(now),
        *_pinned(now),
        _owner(now, now["busy"], now["uptime"]),
    ]
    if now["curve"]:
        parts.append(_curve_table(now, "hit rate if the tier were"))
    if now["clients"]:
        parts.append(_clients_table(now))
    if now["verify_failures"] or now["corrupt"]:
        corrupt, differed = now["corrupt"], now["verify_failures"]
        parts.append(
            f"{corrupt:,} objects were corrupt and deleted; {differed:,} chunks differed in the engine from "
            "what had been saved: see the log."
        )
    return "\n\n".join(parts)


def explained(found: Sequence[Explanation], columns: int) -> str:
    """A line for each lookup, and under it why."""
    if not found:
        return "No lookup missed a whole chunk, as far back as the server remembers."
    rows = [
        (
            f"{span(each['ago'])} ago",
            each["asker"][:24] or "-",
            f"{each['asked']:,}",
            f"{sum(each['hit'].values()):,}",
            f"{each['chunk']:,}",
            f"{each['token']:,}",
            each["reason"],
            f"{each['times']:,}",
        )
        for each in found
    ]
    headers = ("when", "who", "tokens asked", "there", "missed from chunk", "token", "reason", "times")
    first, rule, *lines = table(headers, rows).splitlines()
    parts = [first, rule]
    for line, each in zip(lines, found, strict=True):
        parts += [line, *wrap(each["why"], max(40, columns), initial_indent="  ", subsequent_indent="  ")]
        if each["here"] or each["there"]:
            asked, stood = (", ".join(map(str, each[side])) for side in ("here", "there"))
            parts.append(f"  asked there: {asked}; what stood there: {stood}")
    return "\n".join(parts)


def _title(now: Snapshot, name: str) -> str:
    ready = "ready" if now["ready"] else f"not ready: {now['why_not_ready']}"
    return f"lmtier {now['version']}, {ready}, up {span(now['uptime'])}, at {name}"


def _tokens_table(now: Snapshot) -> str:
    tokens = now["tokens"]
    asked = tokens["asked"]

    def row(what: str, count: int, meaning: str = "") -> tuple[str, ...]:
        return what, f"{count:,}", _percent(count, asked), meaning

    rows = [row("asked", asked, f"in {now['lookups']:,} lookups")]
    rows += [row(f"hit in {tier}", count) for tier, count in tokens["hit"].items()]
    missed = sorted(tokens["missed"].items(), key=lambda each: -each[1])
    rows += [row(f"missed: {why}", count, MISS_REASONS.get(why, "")) for why, count in missed if count]
    rows += [(f"stored in {tier}", f"{count:,}", "-", "") for tier, count in tokens["stored"].items()]
    rows += [
        (f"dropped: {key.replace(' ', ', ')}", f"{count:,}", "-", "should have been stored, and was not")
        for key, count in tokens["dropped"].items()
    ]
    return table(("tokens", "count", "share", ""), rows)


def _tiers_table(now: Snapshot) -> str:
    headers = (
        "tier",
        "used",
        "capacity",
        "full",
        "chunks",
        "up",
        "down",
        "queue",
        "evicted",
        "failed",
        "breaker",
    )
    rows = [
        (
            tier["tier"],
            _bytes(tier["used"]),
            _bytes(tier["capacity"]),
            _percent(tier["used"], tier["capacity"]),
            "-" if tier["chunks"] is None else f"{tier['chunks']:,}",
            size(tier["bytes_up"]),
            size(tier["bytes_down"]),
            f"{tier['queue']:,}",
            f"{tier['evictions']:,}",
            f"{tier['failures']:,}",
            _breaker(tier),
        )
        for tier in now["tiers"]
    ]
    return table(headers, rows)


def _pinned(now: Snapshot) -> list[str]:
    held = [f"{size(tier['pinned'])} of {tier['tier']}" for tier in now["tiers"] if tier["pinned"]]
    return [f"pinned: {', '.join(held)}; `lmtier pins` says by what"] if held else []


def _shares_table(now: Snapshot) -> list[str]:
    rows = [
        (
            tenant,
            tier["tier"],
            _bytes(share["used"]),
            _bytes(share["share"]),
            _percent(share["used"], share["share"]),
            f"{share['evictions']:,}",
        )
        for tier in now["tiers"]
        for tenant, share in tier["shares"].items()
    ]
    return [table(("tenant", "tier", "used", "share", "of it", "evicted"), rows)] if rows else []


def _owner(now: Snapshot, busy: float, seconds: float) -> str:
    """How near the one thread is to its limit, which is a second in a second."""
    each = f"{now['lookup_seconds'] / now['lookups'] * 1e6:,.0f} µs" if now["lookups"] else "-"
    return f"the server's thread was busy {_percent(busy, seconds)} of the time; a lookup takes it {each}"


def _curve_table(now: Snapshot, what: str) -> str:
    """Should I buy more memory?"""
    capacities = {tier["tier"]: tier["capacity"] for tier in now["tiers"]}
    factors = [f"{factor:g}" for factor in FACTORS]
    rows = [
        (
            tier,
            _bytes(capacities.get(tier)),
            *("-" if (ratio := ratios.get(factor)) is None else _percent(ratio, 1) for factor in factors),
        )
        for tier, ratios in now["curve"].items()
    ]
    return table((what, "of", *(f"× {factor}" for factor in factors)), rows)


def _clients_table(now: Snapshot, most: int = _SHOWN) -> str:
    busiest = sorted(now["clients"], key=lambda each: -_moved(each))
    rows = [
        (
            str(each["kind"]),
            str(each["name"] or "-")[:24],
            str(each["address"])[:28],
            span(_number(each["age"])),
            size(int(_number(each["received"]))),
            size(int(_number(each["sent"]))),
        )
        for each in busiest[:most]
    ]
    text = table(("client", "name", "address", "age", "received", "sent"), rows)
    left = len(busiest) - most
    return f"{text}\nand {left:,} more" if left > 0 else text


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _moved(client: Mapping[str, object]) -> float:
    return _number(client["received"]) + _number(client["sent"])


def _percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f} %" if whole and part is not None else "-"


def _bytes(count: int | None) -> str:
    return "-" if count is None else size(count)


def _breaker(tier: TierNow) -> str:
    """Open: it failed so often that it is left alone for a while."""
    states = {"up": tier["breaker_up"], "down": tier["breaker_down"]}
    bad = [f"{state} {way}" for way, state in states.items() if state != "closed"]
    return ", ".join(bad) or ("closed" if tier["warm"] else "scanning")


# ---- top


class Totals(NamedTuple):
    """Counters since the start, at one time."""

    time: float
    asked: int
    hit: Mapping[str, int]
    missed: Mapping[str, int]
    up: Mapping[str, int]
    down: Mapping[str, int]
    busy: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Totals:
        """A row of a server's history."""
        return cls(row["time"], row["asked"], row["hit"], row["missed"], row["up"], row["down"], row["busy"])


def timeline(now: Snapshot, history: Iterable[Mapping[str, Any]]) -> list[Totals]:
    """What is known of the last minutes, the oldest first, the present last."""
    tiers = now["tiers"]
    present = Totals(
        now["time"],
        now["tokens"]["asked"],
        now["tokens"]["hit"],
        now["tokens"]["missed"],
        {tier["tier"]: tier["bytes_up"] for tier in tiers},
        {tier["tier"]: tier["bytes_down"] for tier in tiers},
        now["busy"],
    )
    began = Totals(now["time"] - now["uptime"], 0, {}, {}, {}, {}, 0.0)
    rows = [Totals.of(row) for row in history if began.time < row["time"] < present.time]
    return [began, *rows, present]


def frame(
    now: Snapshot, line: Sequence[Totals], name: str, columns: int, rows: int, trouble: str = ""
) -> list[str]:
    """What `top` shows on a terminal of this size: five questions, in the order in which they are asked."""
    present, times = line[-1], [each.time for each in line]

    def at(ago: float) -> Totals:
        return line[max(0, bisect_right(times, present.time - ago) - 1)]

    latest, past = at(1.5), at(MINUTES * 60)
    since = span(present.time - past.time)
    quits = "  q quits"
    title = _title(now, name)[: max(0, columns - len(quits))] + quits
    head = [
        *([*wrap(trouble, columns, max_lines=2), ""][:2] if trouble else [title, ""]),
        f"saves?   hit rate   now {_hit_rate(latest, present)}   last {since} {_hit_rate(past, present)}   "
        f"since the start {_hit_rate(line[0], present)}",
        spark(_levels(line, times, max(10, columns))),
        "",
    ]
    sources = _sources(latest, past, present, since, columns)
    tiers = _tier_lines(now, latest, present)
    curve = ["", *_curve_table(now, "more memory?").splitlines()] if now["curve"] else []
    few = min(3, len(now["clients"]))  # clients that are seen however long the rest is
    room = rows - len(head) - len(tiers) - len(curve) - few - 4  # blank lines, and the clients' headers
    lines = [*head, *sources[: max(2, room)], "", *tiers, *curve, ""]
    room = rows - len(lines) - 2
    clients = _clients_table(now, room if len(now["clients"]) <= room else max(0, room - 1))
    if now["clients"]:
        lines += clients.splitlines()
    else:
        lines.append("no clients")
    return [each[:columns] for each in lines[:rows]]


def _hit_rate(before: Totals, after: Totals) -> str:
    hit = sum(after.hit.values()) - sum(before.hit.values())
    return _percent(hit, after.asked - before.asked)


def _levels(line: Sequence[Totals], times: Sequence[float], columns: int) -> list[float | None]:
    """The hit rate in equal pieces of the last minutes, or of all its life; None where nobody asked."""
    end = times[-1]
    length = min(MINUTES * 60, max(60.0, end - times[0]))
    edges = [end - length * (columns - i) / columns for i in range(columns + 1)]
    marks = [line[max(0, bisect_right(times, edge) - 1)] for edge in edges]
    levels: list[float | None] = []
    for before, after in pairwise(marks):
        asked = after.asked - before.asked
        hit = sum(after.hit.values()) - sum(before.hit.values())
        levels.append(hit / asked if asked > 0 else None)
    return levels


def _sources(latest: Totals, past: Totals, present: Totals, since: str, columns: int) -> list[str]:
    """Where the tokens came from: the tiers, then the reasons for a miss, the frequent first."""
    seconds = max(present.time - latest.time, 1e-3)
    asked = present.asked - past.asked
    rows = []
    for is_hit, after, recent, old in (
        (True, present.hit, latest.hit, past.hit),
        (False, present.missed, latest.missed, past.missed),
    ):
        found = [
            (key, (count - recent.get(key, 0)) / seconds, count - old.get(key, 0))
            for key, count in after.items()
        ]
        for key, rate, count in sorted(found, key=lambda each: -each[2]):
            if count or is_hit:
                share = count / asked if asked > 0 else 0.0
                label = f"from {key}" if is_hit else f"missed: {key}"
                rows.append((label, f"{rate:,.0f}", f"{count:,}", _percent(count, asked), bar(share, 20)))
    rows = rows or [("nobody asked", "0", "0", "-", bar(0, 20))]
    return table(("why missed?", "a second", f"last {since}", "share", ""), rows).splitlines()


def _tier_lines(now: Snapshot, latest: Totals, present: Totals) -> list[str]:
    seconds = max(present.time - latest.time, 1e-3)

    def rate(after: Mapping[str, int], before: Mapping[str, int], tier: str) -> str:
        moved = max(0, after.get(tier, 0) - before.get(tier, 0))
        return f"{size(round(moved / seconds))}/s" if moved else "-"

    rows = [
        (
            tier["tier"],
            bar((tier["used"] or 0) / (tier["capacity"] or math.inf), 10),
            _percent(tier["used"], tier["capacity"]),
            _bytes(tier["capacity"]),
            rate(present.up, latest.up, tier["tier"]),
            rate(present.down, latest.down, tier["tier"]),
            f"{tier['queue']:,}",
            _breaker(tier),
        )
        for tier in now["tiers"]
    ]
    busy = _percent(max(0.0, present.busy - latest.busy), seconds)
    first, *rest = table(
        ("bottleneck?", "use", "", "of", "up", "down", "queue", "breaker"), rows
    ).splitlines()
    return [f"{first}   (thread {busy} busy)", *rest]


def plain(now: Snapshot, line: Sequence[Totals]) -> str:
    """The present in one line, for a log."""
    present = line[-1]
    latest = line[max(0, bisect_right([each.time for each in line], present.time - 1.5) - 1)]
    seconds = max(present.time - latest.time, 1e-3)
    parts = [
        time.strftime("%H:%M:%S", time.localtime(now["time"])),
        f"hit {_hit_rate(latest, present)} of {(present.asked - latest.asked) / seconds:,.0f} tokens/s",
    ]
    for tier in now["tiers"]:
        name = tier["tier"]
        up, down = (
            (after.get(name, 0) - before.get(name, 0)) / seconds
            for after, before in ((present.up, latest.up), (present.down, latest.down))
        )
        parts.append(
            f"{name} {_percent(tier['used'], tier['capacity'])} full, up {size(round(up))}/s, down "
            f"{size(round(down))}/s, queue {tier['queue']:,}, breaker {_breaker(tier)}"
        )
    return "; ".join([*parts, f"{len(now['clients']):,} clients"])


class Watched:
    """A server as it was when it last answered. One that goes away is looked for again."""

    def __init__(self, address: Address, timeout: float = TIMEOUT) -> None:
        self._address = address
        self._timeout = timeout
        self._remote: Remote | None = None
        self.look()

    def look(self) -> None:
        if self._remote is None:
            self._remote = Remote(self._address, self._timeout)
        try:
            self.now = self._remote.snapshot()
            self.line = timeline(self.now, self._remote.history())
        except Unreachable:
            self.close()
            raise

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
            self._remote = None


def top(address: Address, every: float = 2.0) -> None:
    """A live view until somebody types q."""
    watched = Watched(address, timeout=2.0)  # an error here is said on the usual screen
    trouble = ""
    try:
        with Screen() as screen, suppress(KeyboardInterrupt):
            while True:
                due = time.monotonic() + every
                while (left := due - time.monotonic()) > 0:
                    screen.draw(frame(watched.now, watched.line, str(address), *screen.size, trouble))
                    if screen.key(left) in ("q", "Q"):
                        return
                try:
                    watched.look()
                    trouble = ""
                except Unreachable as error:
                    trouble = str(error)
    finally:
        watched.close()
