"""Verbs that are nearly right: what an engine would say next, with one thing wrong in it.

Several engines hold sessions with a real server, remember what it granted them, and go on from there: they
match, reserve, commit and release. Two of three verbs are then changed a little: a number by one, a bit of a
key, an id of somebody else or of something finished, an argument too many, another verb.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lmtier.format.layout import Layout
from lmtier.wire.resp import Error, encode_command
from tests.server.process import Served, Wire, secret

CHUNK = 16
LAYOUTS = [
    Layout.uniform(
        layers=layers, heads=2, head_dim=16, dtype=dtype, block_tokens=4, chunk_tokens=CHUNK, packing="token"
    ).to_json()
    for dtype, layers in (("fp16", 2), ("fp16", 4), ("bf16", 2))
]
CUTS = ((b"L0-2H0-2",), (b"L0-2H0-1", b"L0-2H1-2"), (b"L0-1H0-2", b"L1-2H0-2"), (b"L0-4H0-2",))
NUMBERS = (
    *(b"0", b"1", b"-1", b"2", b"15", b"16", b"17", b"255", b"65536", b"65537", b"4294967296"),
    *(b"9223372036854775807", b"9223372036854775808", b"", b"1.5", b"nan", b"1e999", b"0x1"),
)
MARKS = (b"*", b"TTL", b"HAS", b"{}", b"/api/pins", b"ENGINE", b"NAME")
PINS = (b"one", b"two", b"three")
VERBS = {
    "MATCH": 14,
    "RESERVE": 12,
    "COMMIT": 14,
    "ABORT": 2,
    "PREFETCH": 5,
    "POLL": 6,
    "RELEASE": 10,
    "SEEN": 2,
    "COST": 1,
    "FORM": 2,
    "HELLO": 1,
    "SLAB": 1,
    "TELL": 2,
    "TRACE": 1,
    "CALL": 10,
    "DISCARD": 1,
    "FLUSH": 0.2,
}
CALLS = {
    "prefetch": 2,
    "models": 1,
    "pin": 1,
    "unpin": 1,
    "pins": 1,
    "hints": 1,
    "sessions": 1,
    "clear": 0.05,
    "stats": 1,
    "changes": 1,
    "explain": 0.5,
    "check": 0.5,
}


@dataclass
class Engine:
    """One connection, and what it was granted; of what is finished it remembers some."""

    wire: Wire
    forms: int = 0
    matches: deque[int] = field(default_factory=deque)
    saves: deque[tuple[int, tuple[bytes, ...]]] = field(default_factory=deque)
    asked: list[tuple[str, list[bytes]]] = field(default_factory=list)


class Nearly:
    def __init__(self, server: Served, seed: int) -> None:
        self.chance = random.Random(seed)
        self.server = server
        self.lives = 0
        self.engines: list[Engine] = []
        self.begin_all()
        self.sent = self.refused = self.granted = 0
        self.model = self.chance.randbytes(4)
        """Their chunks are of a model of their own."""

    def begin(self, number: int) -> Engine:
        """The first two are ranks of one engine; the last is on another host."""
        local = number < 3
        wire = Wire(self.server.where["unix"]) if local else self.server.connect()
        engine = Engine(wire)
        wire.granted("LMTIER.HELLO", 1, *(("ENGINE", secret(f"one {self.lives}")) if number < 2 else ()))
        for layout, cut in ((LAYOUTS[0], CUTS[0]), (LAYOUTS[0], CUTS[1]), (LAYOUTS[2], CUTS[2])):
            engine.forms = wire.granted("LMTIER.FORM", layout, *cut) + 1
        return engine

    def begin_all(self) -> None:
        self.lives += 1
        self.engines = [self.begin(number) for number in range(4)]

    def close(self) -> None:
        for engine in self.engines:
            engine.wire.close()

    def batch(self, most: int) -> Engine:
        """Say up to `most` verbs at once. The replies are still to be heard."""
        number = self.chance.randrange(len(self.engines))
        if self.chance.random() < 0.002:
            self.restart(number)
        engine = self.engines[number]
        engine.asked = [self.verb(engine) for _ in range(self.chance.randrange(1, most + 1))]
        engine.wire.send(b"".join(encode_command(verb, *args) for verb, args in engine.asked))
        self.sent += len(engine.asked)
        return engine

    def restart(self, number: int) -> None:
        """It dies, and is started again. Of an engine with two ranks one dies, or both.

        A release that is spoilt releases nothing, and what an engine does not know of it holds until it ends:
        an engine that never ended would hold all of the slab after a while.
        """
        dead = [0, 1] if number < 2 and self.chance.random() < 0.5 else [number]
        self.lives += len(dead) > 1
        for each in dead:
            self.engines[each].wire.close()
        for each in dead:
            self.engines[each] = self.begin(each)

    def hear(self, engine: Engine) -> None:
        for verb, args in engine.asked:
            reply = engine.wire.reply()
            if isinstance(reply, Error):
                self.refused += 1
            else:
                self.granted += 1
                self.learn(engine, verb, args, reply)

    def learn(self, engine: Engine, verb: str, args: list[bytes], reply: object) -> None:
        if verb in ("LMTIER.MATCH", "LMTIER.RESERVE") and reply != "OK":
            said = dict(zip(reply[::2], reply[1::2], strict=True)) if isinstance(reply, list) else reply
            assert isinstance(said, dict)
            number = said[b"id"]
            if verb != "LMTIER.RESERVE":
                engine.matches.append(number)
            elif number:
                engine.saves.append((number, CUTS[int(args[0]) % 3]))
        elif verb == "LMTIER.FORM" and isinstance(reply, int):
            engine.forms = max(engine.forms, reply + 1)

    # ---- what is said

    def verb(self, engine: Engine) -> tuple[str, list[bytes]]:
        if len(engine.saves) > 20:  # what it holds others cannot have
            return "LMTIER.ABORT", [b"%d" % engine.saves.popleft()[0], b"*"]
        if len(engine.matches) > 20:
            return "LMTIER.RELEASE", [b"%d" % engine.matches.popleft()]
        (verb,) = self.chance.choices(list(VERBS), list(VERBS.values()))
        args = self.right(engine, verb)
        if self.chance.random() < 0.67 and args[:1] != [b"/api/clear"]:  # without its prefix it clears all
            verb, args = self.spoilt(engine, verb, args)
        return f"LMTIER.{verb}", args

    def keys(self, most: int = 6) -> list[bytes]:
        chain, length = self.chance.randrange(8), self.chance.randint(1, most)
        return [self.model + bytes([chain, number]) + bytes(26) for number in range(length)]

    def number(self, held: deque[int]) -> bytes:
        return b"%d" % (self.chance.choice(held) if held else 1)

    def right(self, engine: Engine, verb: str) -> list[bytes]:
        chance, form = self.chance, b"%d" % self.chance.randrange(max(1, engine.forms))
        match verb:
            case "MATCH":
                keys = self.keys()
                tokens = b"%d" % chance.choice((0, CHUNK * len(keys), CHUNK * len(keys) + 3))
                return [form, tokens, chance.choice((b"0", b"50", b"50", b"-")), *keys]
            case "CALL":
                (name,) = chance.choices(list(CALLS), list(CALLS.values()))
                return [f"/api/{name}".encode(), json.dumps(self.arguments(name)).encode()]
            case "RESERVE":
                ttl = chance.choice(((), (), (b"TTL", b"50")))
                return [form, chance.choice((b"0", b"0", b"1")), *ttl, *self.keys()]
            case "COMMIT":
                number, shards = chance.choice(engine.saves) if engine.saves else (1, CUTS[0])
                marks = chance.choice(((), (), (b"0", b"ab" * 16)))
                return [b"%d" % number, chance.choice(shards), *marks]
            case "ABORT":
                number, shards = chance.choice(engine.saves) if engine.saves else (1, CUTS[0])
                return [b"%d" % number, chance.choice((b"*", *shards))]
            case "PREFETCH":
                return [self.number(engine.matches), *chance.choice(((), (b"2",), (b"HAS", b"16")))]
            case "POLL":
                return [self.number(engine.matches), *chance.choice(((), (b"WAIT",)))]
            case "RELEASE":
                match_id = b"%d" % engine.matches.popleft() if engine.matches else b"1"
                return [match_id, *chance.choice(((), (b"VERIFIED", b"3", b"0")))]
            case "SEEN" | "DISCARD":
                return self.keys(2 if verb == "DISCARD" else 6)
            case "COST":
                return [b"0.01", b"0.0001", b"0", b"0.00001"]
            case "FORM":
                model = (b"MODEL", b'{"model": "m%d"}' % chance.randrange(99), b"")
                return [chance.choice(LAYOUTS), *chance.choice(CUTS), *chance.choice(((), model))]
            case "HELLO":
                return [b"1", b"ENGINE", secret("one").encode()]
            case "TELL":
                tokens = b"".join(chance.randrange(1000).to_bytes(4, "little") for _ in range(CHUNK))
                origin = b'{"identity": {"model": "m%d"}, "lora": "", "salt": ""}' % chance.randrange(9)
                return [origin, b"", self.keys(1)[0], tokens]
            case "TRACE":
                return [self.number(engine.matches), b"00-%032x-%016x-01" % (1, 1)]
            case "FLUSH":
                return [b"20"]
        return []

    def arguments(self, name: str) -> dict[str, Any]:
        """Those of a call."""
        chance = self.chance
        match name:
            case "prefetch":
                identity = {"model": f"m{chance.randrange(99)}"}
                return {"identity": identity, "keys": [key.hex() for key in self.keys()]}
            case "pin":
                keys = [key.hex() for key in self.keys(2)]
                return {"name": chance.choice(PINS).decode(), "keys": keys} | chance.choice(
                    ({}, {"seconds": 0.1})
                )
            case "unpin":
                return {"name": chance.choice(PINS).decode()}
            case "clear":
                return {"prefix": self.model.hex(), "force": chance.random() < 0.5}
            case "explain":
                return {"most": 3}
        return {}

    def spoilt(self, engine: Engine, verb: str, args: list[bytes]) -> tuple[str, list[bytes]]:
        chance, args = self.chance, list(args)
        at = chance.randrange(len(args)) if args else 0
        match chance.randrange(9):
            case 0:
                args.insert(at, chance.choice((*NUMBERS, *MARKS, b"L0-2H0-2", *self.keys(2))))
            case _ if not args:
                args.append(chance.choice(NUMBERS))
            case 1:
                del args[at]
            case 2:
                args[at] = chance.choice((*NUMBERS, *MARKS))
            case 3 if args[at].isdigit():
                args[at] = b"%d" % max(0, int(args[at]) + chance.choice((-1, 1)))
            case 4 if args[at]:
                spoilt = bytearray(args[at])
                spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
                args[at] = bytes(spoilt)
            case 5:
                args[at] = args[at][: chance.randrange(len(args[at]) + 1)]
            case 6:
                other = chance.choice(self.engines)
                args[0] = self.number(
                    other.matches if chance.random() < 0.5 else deque(n for n, _ in other.saves)
                )
            case 7:
                args += args[-chance.randrange(1, 4) :]
            case _:
                verb = chance.choice([each for each in VERBS if each != "FLUSH"])
        return verb, args
