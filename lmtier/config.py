"""Settings: one frozen dataclass for a cache and one for its server, from TOML, the environment or a dict.

A later source overrides an earlier one: the defaults, the file (an argument, or `LMTIER_CONFIG_FILE`), the
environment (`LMTIER_CHUNK_TOKENS=128`, `LMTIER_SERVE_HTTP=…`), the arguments of the caller. An unknown key
is an error. `load` and `load_server` also return the source of each value. In the file a server's settings
are the table [serve].

Whatever is given, the answer is settings or a ConfigError of one short sentence, soon: what is read, and each
text and number in it, has a bound.
"""

from __future__ import annotations

import difflib
import os
import re
import select
import stat
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, unquote

from lmtier.errors import ConfigError, excerpt, log, size_text, without_secrets
from lmtier.format.compression import CODECS, RAW, WORDS
from lmtier.format.layout import PAGE
from lmtier.format.sealing import SEALS
from lmtier.rules.lifetimes import FOREVER, MAX_TTL
from lmtier.rules.policy import POLICIES
from lmtier.rules.shares import Share, parse
from lmtier.rules.worth import AUTO, WORTH

ENV_PREFIX = "LMTIER_"
TOKEN_VARIABLE = "LMTIER_TOKEN"
REDIS_PASSWORD_VARIABLE = "LMTIER_REDIS_PASSWORD"
WRITES = ("always", "reused", "evicted", "auto", "never")
WEAR = ("writes_per_day", "drive_writes_per_day", "drive", "endurance")
VERIFY = ("off", "sample", "always")
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
MAX_SIZE = (1 << 63) - 1
_MOST_BYTES = 256 << 10  # of a file of settings, or of a secret's
_MOST_LETTERS = 4096  # of the URL of a tier
_MOST_TIERS = 32
_LONGEST_NUMBER = 40  # letters
_FILE_SECONDS = 10.0  # for who writes a secret into a pipe
# TOML's parser takes a time that is quadratic in the dots of a key. No setting has more than two.
_TEXTS = re.compile(
    r'''"""(?s:.*?)(?:"""|\Z)|"(?:[^"\\\n]|\\.)*+(?:"|$)|#.*''' r"|'''(?s:.*?)(?:'''|\Z)|'[^'\n]*+(?:'|$)",
    re.MULTILINE,
)
_DOTS = re.compile(r"(?:\.[^.\n,={}\[\]]*+){9}")
# What Kubernetes puts into every container beside a Service whose name begins with lmtier.
_KUBERNETES = re.compile(
    r"LMTIER_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    r"|LMTIER_(\w+_)?PORT=(tcp|udp|sctp)://.*"
)
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str | int) -> int:
    """Bytes: 4GiB, 4G, 1048576. The units GiB and G are powers of 1024, the units GB powers of 1000."""
    number, unit = _number(text)
    if unit not in _SIZE_UNITS:
        raise ConfigError(f"{excerpt(text)} is not a size; write it like 4GiB, 512MiB or 1048576")
    if (nbytes := int(Decimal(number) * _SIZE_UNITS[unit])) > MAX_SIZE:
        raise ConfigError(f"{excerpt(text)} is not a size; the largest is 8 EiB")
    return nbytes


def parse_seconds(text: str | float) -> float:
    """Seconds: 200ms, 2s, 7d."""
    number, unit = _number(text)
    if unit not in _TIME_UNITS:
        raise ConfigError(f"{excerpt(text)} is not a time; write it like 200ms, 30s or 7d, or as seconds")
    if (seconds := float(number) * _TIME_UNITS[unit]) > MAX_TTL:
        raise ConfigError(f"{excerpt(text)} is not a time; the longest is 100 years")
    return seconds


def _number(text: object) -> tuple[str, str]:
    """A number and its unit. Two words that are no unit: it is none."""
    try:
        word = str(text).strip().lower()
    except ValueError:  # a number of more digits than Python writes
        word = ""
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", word) if len(word) <= _LONGEST_NUMBER else None
    return ("?", "?") if parsed is None else (parsed[1], parsed[2])


def read_text(what: str, file: str | os.PathLike[str], *, is_secret: bool = False) -> str:
    """A file of settings, or of a secret, which may be a pipe and is read to the end of its first line.

    A pipe of settings is refused: it would be empty when the next ones are read from it.
    """
    until, data = time.monotonic() + _FILE_SECONDS, b""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise ConfigError(f"{what}: it is a directory, not a file")
            if is_secret and stat.S_ISREG(mode):
                check_privacy(what, mode)
            if (is_pipe := stat.S_ISFIFO(mode)) and not is_secret:
                raise ConfigError(f"{what}: it is a pipe, not a file")
            while len(data) <= _MOST_BYTES and not (is_secret and b"\n" in data):
                if is_pipe and not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise ConfigError(f"{what}: nothing came through this pipe for {_FILE_SECONDS:g} s")
                if not (data_read := os.read(descriptor, _MOST_BYTES + 1)):
                    break
                data += data_read
        finally:
            os.close(descriptor)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{what}: it has more than {_MOST_BYTES >> 10} KiB")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    except ValueError:  # or a NUL in the name, which is no file's
        raise ConfigError(f"{what}: it is not text in UTF-8") from None


def check_privacy(what: str, mode: int) -> None:
    """Refuse the file of a secret that others may change, and warn of one that every user may read.

    Containers get secrets as files that every user may read, so that is no reason to refuse.
    """
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{what}: other users may write to it; chmod 600 it")
    if mode & stat.S_IROTH:
        log.warning("lmtier: %s: other users may read it; chmod 600 it", what)


def with_option(url: str, name: str, value: str) -> str:
    """A tier's URL with another value of one option."""
    head, _, query = url.partition("?")
    options = [pair for pair in query.split("&") if pair and pair.partition("=")[0] != name]
    return f"{head}?{'&'.join([*options, f'{name}={quote(value, safe=chr(58) + chr(47))}'])}"


def read_price(text: str) -> tuple[str, float, str] | None:
    """A price, and what stands before and after the number: $2.50, 2.10 €. None: it is no price."""
    parsed = re.fullmatch(r"\s*([^\d\s+-]*)\s*(\d+(?:\.\d+)?)\s*([^\d\s]*)\s*", text[: _LONGEST_NUMBER + 1])
    return None if parsed is None or len(text) > _LONGEST_NUMBER else (parsed[1], float(parsed[2]), parsed[3])


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` or `; known: a, b`, to end a sentence about an unknown word."""
    names = sorted(known)
    close = difflib.get_close_matches(word[:_LONGEST_NUMBER], names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


def first_line(option: str, file: str | Path) -> str:
    """The secret in the first line of a file, without the line's end. `option` named the file, for errors."""
    text = read_text(f"{option} {file}", file, is_secret=True)
    line = re.split(r"\r?\n|\r", text, maxsplit=1)[0]
    if not line.strip():
        raise ConfigError(f"{option} {file}: its first line is empty; write the secret there")
    return line


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier URL, taken apart.

    `scheme://location?capacity=…&write=…&policy=…&codec=…&seal=…&its own options`
    """

    url: str = field(repr=False)
    scheme: str
    location: str = field(repr=False)
    capacity: int | None = None
    write: str = "always"
    policy: str = "auto"
    codec: str = RAW
    writes_per_day: int | None = None
    """Bytes. The options drive_writes_per_day= and drive= are converted to this."""
    endurance: int | None = None
    """Bytes that can still be written to the drive according to its maker. It is only used for a gauge."""
    ttl: float = FOREVER
    """Seconds for which this tier may serve a chunk."""
    seal: str = ""
    key: str = field(default="", repr=False)
    """Where the keys are that seal its objects. A command may hold a password."""
    tenants: str = ""
    """The directory of the keys of tenants, if each has its own."""
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"tier {without_secrets(self.url)!r}"

    @property
    def base_url(self) -> str:
        """What two settings of one tier have in common."""
        return f"{self.scheme}://{self.location}"

    @classmethod
    def parse(cls, url: str) -> TierSpec:
        if len(url) > _MOST_LETTERS:  # before anything looks at it, to show it too
            raise ConfigError(f"tier {url[:9]!r}…: its URL has more than {_MOST_LETTERS} letters")
        head, _, query = url.partition("?")
        scheme, separator, location = head.partition("://")
        tier = f"tier {without_secrets(url)!r}"
        if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
            raise ConfigError(f"{tier} is not a URL; write it like disk:///var/lib/lmtier?capacity=500GiB")
        try:
            pairs = parse_qsl(query, strict_parsing=bool(query), keep_blank_values=True)
        except ValueError:
            raise ConfigError(f"{tier}: options must read name=value&name=value") from None
        options = dict(pairs)
        if len(options) != len(pairs):
            raise ConfigError(f"{tier}: an option is given twice")
        capacity = options.pop("capacity", None)
        ttl = _ttl(tier, options.pop("ttl", "0"))
        rules = []
        choices = (
            *(("write", "always", WRITES), ("policy", "auto", POLICIES)),
            *(("codec", RAW, WORDS), ("seal", "", SEALS)),
        )
        if empty := [name for name in ("seal", "key", "tenants") if options.get(name) == ""]:
            raise ConfigError(f"{tier}: {empty[0]}= is empty; write its value, or leave it out")
        for name, default, allowed in choices:
            rules.append(value := options.pop(name, default))
            if value not in allowed:
                words = [word for word in allowed if word]
                raise ConfigError(f"{tier}: unknown {name}={value}{suggest(value, words)}")
        size = None if capacity is None else _size(tier, "capacity", capacity)
        if not (place := unquote(location)).isprintable():
            raise ConfigError(f"{tier}: the name of a place has no characters that cannot be printed")
        if size == 0:
            raise ConfigError(f"{tier}: capacity=0 holds nothing; leave the tier out instead")
        wear, (write, policy, codec, seal) = _wear(tier, size, options), rules
        key, tenants = options.pop("key", ""), options.pop("tenants", "")
        if bool(seal) != bool(key) or (tenants and not seal):
            raise ConfigError(f"{tier}: seal= and key= go together, and tenants= goes with them")
        sealing = seal, key, tenants
        return cls(url, scheme, place, size, write, policy, codec, *wear, ttl, *sealing, options)


def _size(tier: str, name: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{tier}: {name}={error}") from None


def _ttl(tier: str, text: str) -> float:
    """0 means no limit, as in older URLs of Redis tiers."""
    try:
        seconds = parse_seconds(text)
    except ConfigError as error:
        raise ConfigError(f"{tier}: ttl={error}") from None
    if 0 < seconds < 0.001:
        raise ConfigError(f"{tier}: ttl={text!r} is less than 1 ms; write it like 7d")
    return seconds or FOREVER


def _wear(tier: str, capacity: int | None, options: dict[str, str]) -> tuple[int | None, int | None]:
    """The bytes that may be written in a day and in all. Removes the options that it reads from `options`."""
    wear_options = {option: options.pop(option) for option in WEAR if option in options}
    times = wear_options.pop("drive_writes_per_day", None)
    if times is not None and not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", times):
        raise ConfigError(f"{tier}: drive_writes_per_day={excerpt(times)} is not a number; write it like 0.5")
    sizes = {option: _size(tier, option, value) for option, value in wear_options.items()}
    if 0 in sizes.values() or (times is not None and not float(times)):
        raise ConfigError(
            f"{tier}: drive, endurance and the budgets must be more than 0; to write nothing, use write=never"
        )
    if times is None:
        if "drive" in sizes:
            raise ConfigError(
                f"{tier}: drive= only has a meaning with drive_writes_per_day=; add that or remove drive="
            )
        return sizes.get("writes_per_day"), sizes.get("endurance")
    if "writes_per_day" in sizes:
        raise ConfigError(f"{tier}: give writes_per_day= or drive_writes_per_day=, not both")
    drive = sizes.get("drive", capacity)
    if drive is None:
        raise ConfigError(f"{tier}: drive_writes_per_day= needs the drive's size, like drive=4TiB")
    return max(1, int(Decimal(times) * drive)), sizes.get("endurance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a cache. `tiers` is the list of storage URLs, the fastest tier first."""

    chunk_tokens: int = 256
    """Tokens per chunk. A chunk is the unit that is named, stored and found; it is whole engine blocks."""
    tiers: Sequence[str] = field(default=("cpu://?capacity=1GiB",), repr=False)  # may hold passwords
    shares: Sequence[Share] = ()
    """The part of every tier that is reserved for a tenant, by its cache salt: tenant-a=0.3 b=20%."""
    load_deadline: float = 2.0
    """Seconds after which a request stops waiting for lower tiers and computes instead."""
    worth: str = AUTO
    """Whether to load chunks that the engine would compute sooner. auto: no, once both are measured.
    always: yes. never: nothing is loaded at all, only saved."""
    verify: str = "sample"
    """Compare fingerprints of the engine's raw blocks after a load: off, sample (1 of 64) or always."""
    hugepages: bool = True
    """Ask for transparent huge pages for the slab: gathers of small blocks run up to twice as fast."""
    prefault: bool = True
    """Touch the slab's pages in the background at start."""
    queue_length: int = 4096
    """Chunks that may wait to be written, per tier. Further chunks are dropped and counted."""

    def __post_init__(self) -> None:
        for each in fields(self):  # people write a list of tiers, or "2s"
            object.__setattr__(self, each.name, _convert(each.name, getattr(self, each.name), "arguments"))
        for name, maximum in (("chunk_tokens", 1 << 20), ("queue_length", 1 << 40)):
            if not 1 <= getattr(self, name) <= maximum:
                raise ConfigError(f"{name}={excerpt(getattr(self, name))}: must be 1 to {maximum}")
        if len(self.tiers) > _MOST_TIERS:
            raise ConfigError(f"tiers: {len(self.tiers)} are too many; at most {_MOST_TIERS} are possible")
        if self.verify not in VERIFY:
            raise ConfigError(f"unknown verify={excerpt(self.verify)}{suggest(self.verify, VERIFY)}")
        if self.worth not in WORTH:
            raise ConfigError(f"unknown worth={excerpt(self.worth)}{suggest(self.worth, WORTH)}")
        if self.load_deadline <= 0:
            raise ConfigError(f"load_deadline={self.load_deadline}: must be more than 0 seconds")
        specs = self.all_tiers
        schemes = [spec.scheme for spec in specs]
        if schemes[:1] == ["gpu"]:
            del schemes[0]
        if schemes[:1] != ["cpu"] or {"cpu", "gpu"} & {*schemes[1:]}:
            raise ConfigError(
                "tiers: the list needs exactly one cpu:// tier, above every disk or remote one, and below a "
                "gpu:// one if there is one; "
                f"got {', '.join(map(without_secrets, self.tiers)) or 'an empty list'}"
            )
        for spec in specs:
            if spec.scheme in ("cpu", "gpu", "disk") and spec.capacity is None:
                misspelt = difflib.get_close_matches("capacity", spec.options, n=1)
                hint = f"; {misspelt[0]!r} is no option of it" if misspelt else ""
                raise ConfigError(f"{spec} needs a capacity, like ?capacity=32GiB{hint}")
            if spec.scheme == "disk" and spec.location and spec.location[0] not in "/~":
                raise ConfigError(
                    f"{spec}: the directory is relative, and a server may start in another one; "
                    f"write disk://{Path(spec.location).absolute()}"
                )
            if spec.scheme in ("cpu", "gpu"):
                _check_memory(spec)
        disks = [
            os.path.realpath(os.path.expanduser(spec.location))
            for spec in specs
            if spec.scheme == "disk" and spec.location
        ]
        if twice := [place for place in disks if disks.count(place) > 1]:
            raise ConfigError(
                f"tiers: two disk tiers have the directory {twice[0]}; give each its own, or remove one"
            )
        gpu, (cpu, *_) = self.gpu, self.cache_tiers
        if gpu is not None and (gpu.capacity or 0) > (cpu.capacity or 0):
            raise ConfigError(
                f"{gpu} is larger than {without_secrets(cpu.url)!r}: it holds copies "
                "of chunks of that tier, so a part of it would stay empty; choose a smaller capacity"
            )

    @property
    def all_tiers(self) -> tuple[TierSpec, ...]:
        return _parsed(tuple(self.tiers))

    @property
    def gpu(self) -> TierSpec | None:
        """The tier in the engine's own GPU memory. It holds copies only."""
        return next((spec for spec in self.all_tiers if spec.scheme == "gpu"), None)

    @property
    def cache_tiers(self) -> tuple[TierSpec, ...]:
        """The tiers of a cache, `cpu` first. They exclude the GPU tier, which only holds copies of chunks."""
        return tuple(spec for spec in self.all_tiers if spec.scheme != "gpu")

    @property
    def approximation(self) -> str:
        """The lossy codecs of its tiers. They are part of every key."""
        words = {spec.codec for spec in self.all_tiers}
        return ",".join(sorted(word for word in words if word in CODECS and not CODECS[word].is_exact))


@lru_cache(maxsize=64)
def _parsed(tiers: tuple[str, ...]) -> tuple[TierSpec, ...]:
    """Once for each list: the settings are read again and again."""
    return tuple(TierSpec.parse(url) for url in tiers)


def _check_memory(spec: TierSpec) -> None:
    """A memory tier has a capacity, a policy and a ttl. Any other option in its URL is a mistake."""
    extra = {*spec.options, *(["write"] if spec.write != "always" else [])}
    extra |= {"writes_per_day"} if spec.writes_per_day else set()
    extra |= {"endurance"} if spec.endurance else set()
    extra |= {"codec"} if spec.codec != RAW else set()
    extra |= {"seal"} if spec.seal else set()
    if extra:
        hint = suggest(min(extra), ("capacity", "policy", "ttl"))
        raise ConfigError(f"{spec}: unknown option {min(extra)!r}{hint}")
    if spec.location:
        raise ConfigError(f"{spec}: memory has no path; write {spec.scheme}://?capacity=32GiB")
    if spec.capacity is not None and spec.capacity < PAGE:
        raise ConfigError(
            f"{spec}: a capacity of {size_text(spec.capacity)} is less than a page of {size_text(PAGE)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a server listens, who may connect, and how long it waits for them. Empty: it does not listen."""

    listen: str = "127.0.0.1:6380"
    """For Redis clients and for engines on other hosts."""
    unix: str = ""
    """For engines on this host, which also map the slab. Its owner and root need no token."""
    http: str = "127.0.0.1:9470"
    """For browsers and Prometheus."""
    http_names: str = ""
    """Names of this host by which browsers may ask without a token, if it has more than its own."""
    token_file: str = ""
    """Clients must send its first line with AUTH or Authorization: Bearer. Or set LMTIER_TOKEN."""
    look_token_file: str = ""
    """With this token a client may only look: the page, metrics, reports."""
    admin_token_file: str = ""
    """Only with this token a client may clear, pin, flush and change settings."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    """Clients must present a certificate that is signed by this one."""
    insecure: bool = False
    """Serve every user of this host, and beyond it if it listens there, without a token or certificate."""
    clients: int = 10_000
    """The most connections at a time."""
    patience: float = 30.0
    """Seconds without a byte after which a client in the middle of a request is disconnected; 1 second if
    room is short."""
    grace: float = 10.0
    """Seconds that the server has to finish after a signal to stop."""
    linger: float = 0.0
    """Seconds without an engine after which the server stops by itself; 0: never."""
    kv_events: str = ""
    """A ZMQ address where routers subscribe to the chunks that enter and leave the tiers: tcp://*:5557."""
    kv_events_replay: str = ""
    """A ZMQ address where they ask for the events that they missed: tcp://*:5558."""
    kv_events_topic: str = ""
    log_level: str = "info"
    """debug, info, warning or error. Lines of the audit are always written."""
    log_format: str = "text"
    """text, or json: one object a line."""
    request_log: str = ""
    """A file that records the lookups of engines, to replay them: keys and lengths, no text."""
    gpu_hour: str = ""
    """What an hour of an engine's GPUs costs, like 3.5 or $2.50: what hits save is shown in money too."""

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(
                self, each.name, _convert(each.name, getattr(self, each.name), "arguments", ServerConfig)
            )
        for name in ("clients", "patience", "grace"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"serve: {name}={getattr(self, name)}: must be more than 0")
        if self.clients > 1 << 20:
            raise ConfigError(f"serve: clients={excerpt(self.clients)}: at most {1 << 20} are possible")
        for name, choices in (("log_level", LEVELS), ("log_format", FORMATS)):
            if getattr(self, name) not in choices:
                value = getattr(self, name)
                raise ConfigError(f"serve: unknown {name}={excerpt(value)}{suggest(value, choices)}")
        if self.gpu_hour and read_price(self.gpu_hour) is None:
            price = excerpt(self.gpu_hour)
            raise ConfigError(f"serve: gpu_hour={price} is no price; write it like $2.50 or 2.10 €")
        if self.kv_events_replay and not self.kv_events:
            raise ConfigError("serve: kv_events_replay needs kv_events; set that too, or remove it")
        if not (self.listen or self.unix or self.http):
            raise ConfigError("serve: there is no address to listen on; set listen, unix or http")
        for name in ("listen", "http"):
            if getattr(self, name):
                host_and_port(getattr(self, name), f"serve: {name}")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_ca and not self.tls_cert):
            raise ConfigError("serve: TLS needs tls_cert and tls_key; tls_ca is only used with them")


def host_and_port(address: str, what: str) -> tuple[str, int]:
    """Reads host:port, [::1]:port or :port. The last means every address of this host."""
    parsed = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]*)):(\d{1,5})", address)
    if not parsed or int(parsed[3]) > 65535:
        raise ConfigError(
            f"{what}={excerpt(address)} is not an address; write it like 127.0.0.1:6380 or [::1]:6380"
        )
    return parsed[1] or parsed[2], int(parsed[3])


def _convert(name: str, value: Any, origin: str, cls: type = Config) -> Any:
    """Converts `value` to the type of field `name`. Strings are read as people write them: "2s", "4GiB"."""
    field = next(setting for setting in fields(cls) if setting.name == name)
    if name == "shares":
        return parse(value)  # its error says more than "does not fit"
    kind: type = type(field.default)
    try:
        if name == "tiers":
            urls = tuple(value.split() if isinstance(value, str) else value)
            if not all(isinstance(url, str) for url in urls):
                raise TypeError
            return urls
        if kind is bool:
            words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
            return value if isinstance(value, bool) else words[str(value).lower()]
        if kind is str and not (isinstance(value, str) and value.isprintable()):
            raise TypeError
        if kind is float:
            return parse_seconds(value)
        if kind is int and (isinstance(value, (bool, float)) or not str(value).strip().isdigit()):
            raise ValueError
        return kind(value)
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        shown = "…" if name == "tiers" else excerpt(value)  # a URL may hold a password
        why = f"expected {_FORMS.get(name) or _FORMS.get(kind)}"
        if isinstance(error, ConfigError):
            why = f"it {str(error).removeprefix(shown).lstrip()}"
        raise ConfigError(f"{name}={shown} from {origin} does not fit: {why}") from None


_FORMS: dict[object, str] = {
    "tiers": "a list of URLs, or one text with spaces between them",
    bool: "true or false",
    int: "a whole number",
    str: "a text of characters that can be printed",
}
"""What a setting expects, by its name or its type."""


Settings = TypeVar("Settings", Config, ServerConfig)
Origins: TypeAlias = "dict[str, str]"


def load(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Config, Origins]:
    """The effective settings of a cache, and for each the origin of its value."""
    return _load(Config, file, os.environ if env is None else env, overrides or {})


def load_server(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[ServerConfig, Origins]:
    """The effective settings of a server, and for each the origin of its value."""
    return _load(ServerConfig, file, os.environ if env is None else env, overrides or {})


def _load(
    cls: type[Settings],
    file: str | os.PathLike[str] | None,
    env: Mapping[str, str],
    overrides: Mapping[str, Any],
) -> tuple[Settings, Origins]:
    file = file or env.get(f"{ENV_PREFIX}CONFIG_FILE")
    settings_by_origin = {str(file): _from_file(cls, file)} if file else {}
    settings_by_origin |= {"environment": _from_environment(cls, env), "arguments": overrides}
    names = {each.name for each in fields(cls)}
    values: dict[str, Any] = {}
    origins = dict.fromkeys((each.name for each in fields(cls)), "default")
    for origin, settings in settings_by_origin.items():
        for name, value in settings.items():
            if name not in names:
                choices = {_as_variable(cls, each) if origin == "environment" else each for each in names}
                word = _as_variable(cls, name) if origin == "environment" else name
                raise ConfigError(f"unknown setting {excerpt(word)} in {origin}{suggest(word, choices)}")
            values[name] = _convert(name, value, origin, cls)
            origins[name] = origin
    return cls(**values), origins


def _from_file(cls: type[Settings], file: str | os.PathLike[str]) -> Mapping[str, Any]:
    subject = f"configuration file {file}"
    text = read_text(subject, file)
    if _DOTS.search(_TEXTS.sub("", text)):
        raise ConfigError(f"{subject}: a key in it has too many dots")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{subject}: it is nested too deeply") from None
    except ValueError as error:  # also a number of more digits than Python reads
        raise ConfigError(f"{subject}: {str(error).partition(';')[0]}") from None
    serve = table.pop("serve", {})
    if not isinstance(serve, dict):
        raise ConfigError(f"configuration file {file}: [serve] must be a table")
    return serve if cls is ServerConfig else table


def _from_environment(cls: type[Settings], env: Mapping[str, str]) -> Mapping[str, str]:
    prefix = _as_variable(cls, "")
    others = {f"{ENV_PREFIX}CONFIG_FILE", TOKEN_VARIABLE, REDIS_PASSWORD_VARIABLE}
    variables = (
        name
        for name in env
        if name.startswith(prefix) and name not in others and not _KUBERNETES.fullmatch(f"{name}={env[name]}")
    )
    is_server = cls is ServerConfig
    return {
        name.removeprefix(prefix).lower(): env[name]
        for name in variables
        if is_server or not name.startswith(_as_variable(ServerConfig, ""))
    }


def _as_variable(cls: type, name: str) -> str:
    return f"{ENV_PREFIX}{'SERVE_' if cls is ServerConfig else ''}{name.upper()}"
