"""Hints: what engines, routers and agents say of the future of KV, as versioned actions. No I/O.

The envelope has the shape of vLLM's: `protocol_version`, `message_id` and `actions`, each with `action_id`,
`action_type`, `action_version` and `payload`. vLLM defines no actions; docs/HINTS.md has lmtier's. An action
that is not known here is for someone else, so it is counted and ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lmtier.errors import MisuseError
from lmtier.format.keys import KEY_BYTES
from lmtier.rules.lifetimes import MAX_TTL

PROTOCOL = "1"
VERSION = "1"
MAX_BYTES = 1 << 18
"""The most bytes of an envelope."""
MAX_ACTIONS = 64
MAX_NAME = 128
MAX_PIN = 86_400.0
"""Seconds that a hint pins for at most, and usually: who may send hints keeps no room for ever."""
MAX_REMEMBERED = 1 << 16
"""The most ids of actions that are remembered."""

PIN, RETAIN, TTL, PREFETCH, RELEASE = "pin", "retain", "ttl", "prefetch", "release"
END, WAIT, DEMOTE = "session_end", "session_wait", "demote"
ACTIONS: Final = (PIN, RETAIN, TTL, PREFETCH, RELEASE, END, WAIT, DEMOTE)
OTHER = "other"
"""All actions that are not known, in the metric."""
DONE, REPEATED, UNKNOWN, REFUSED = "done", "repeated", "unknown", "refused"
RESULTS: Final = (DONE, REPEATED, UNKNOWN, REFUSED)

_PAYLOAD = {
    PIN: {"seconds"},
    RETAIN: {"seconds"},
    TTL: {"seconds"},
    PREFETCH: {"seconds", "source"},
    RELEASE: set(),
    END: set(),
    WAIT: {"for"},
    DEMOTE: set(),
}
"""The fields of each payload, beside `session` and `keys`."""


@dataclass(frozen=True, slots=True)
class Action:
    id: str
    type: str
    version: str = VERSION
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return self.type in ACTIONS and self.version == VERSION

    def target(self, session: str) -> tuple[str, tuple[bytes, ...]]:
        """The session that it is about, `session` unless it names one; or the keys. Raises MisuseError."""
        unknown = set(self.payload) - _PAYLOAD[self.type] - {"session", "keys"}
        if unknown:
            raise MisuseError(f"{self.type} does not know {min(unknown)!r}")
        keys = self.payload.get("keys", [])
        if not isinstance(keys, list):
            raise MisuseError("keys are a list of hexadecimal strings")
        try:
            key_bytes = tuple(map(bytes.fromhex, keys))
        except (TypeError, ValueError):
            raise MisuseError("keys are a list of hexadecimal strings") from None
        if any(len(key) != KEY_BYTES for key in key_bytes) or len(set(key_bytes)) < len(key_bytes):
            raise MisuseError(f"each key has {KEY_BYTES} bytes, and occurs once")
        name = self.payload.get("session", "" if key_bytes else session)
        if not is_name(name) and (name or not key_bytes):
            raise MisuseError(f"{self.type} needs the name of a session, of 1 to {MAX_NAME} characters")
        if key_bytes and (name or self.type in (END, WAIT)):
            raise MisuseError(f"{self.type} takes a session" + ("" if name == "" else ", or keys, not both"))
        return name, key_bytes

    def about(self, session: str) -> str:
        """The session that it is about, or its first key, as the audit shows it. Empty: it is no text."""
        keys = self.payload.get("keys")
        about = keys[0] if isinstance(keys, list) and keys else self.payload.get("session", session)
        return about if isinstance(about, str) else ""

    def seconds(self, usual: float | None, most: float = MAX_TTL) -> float | None:
        value = self.payload.get("seconds", usual)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            longest = "100 years" if most == MAX_TTL else "a day; `lmtier pin` pins for longer"
            raise MisuseError(f"{self.type}: seconds must be more than 0, and at most {longest}")
        return float(value)

    @property
    def source(self) -> str:
        """The host whose memory has it; empty: none is named."""
        name = self.payload.get("source", "")
        if name != "" and not is_name(name):
            raise MisuseError(f"{self.type}: the source is the name of a tier, as host:port")
        return str(name)


class ActionResult(NamedTuple):
    """What became of an action."""

    action_id: str
    action_type: str
    result: str
    """One of RESULTS."""
    why: str = ""


def is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()


def actions_of(envelope: object) -> list[Action]:
    """The actions of an envelope. Raises MisuseError, in a sentence, if it has another shape."""
    if not isinstance(envelope, dict):
        raise MisuseError("an envelope of hints is a JSON object")
    if not is_name(envelope.get("protocol_version")) or not is_name(envelope.get("message_id")):
        raise MisuseError("an envelope of hints has a protocol_version and a message_id, both of them text")
    actions = envelope.get("actions")
    if not isinstance(actions, list) or len(actions) > MAX_ACTIONS:
        raise MisuseError(f"an envelope of hints has a list of at most {MAX_ACTIONS} actions")
    is_ours = envelope["protocol_version"].split(".")[0] == PROTOCOL
    return [_action(each, is_ours) for each in actions]


def _action(item: object, is_ours: bool) -> Action:
    if not isinstance(item, dict):
        raise MisuseError("an action is a JSON object")
    fields = [item.get(name) for name in ("action_id", "action_type", "action_version")]
    payload = item.get("payload", {})
    if not all(map(is_name, fields)) or not isinstance(payload, dict):
        raise MisuseError(
            "an action has an action_id, an action_type and an action_version, all of them text, and a"
            " payload"
        )
    number, kind, version = map(str, fields)
    return Action(number, kind, version if is_ours else "", payload)


def envelope(message_id: str, *actions: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """An envelope of actions, each with its type and its payload."""
    return {
        "protocol_version": PROTOCOL,
        "message_id": message_id,
        "actions": [
            {
                "action_id": f"{message_id}/{number}",
                "action_type": kind,
                "action_version": VERSION,
                "payload": dict(payload),
            }
            for number, (kind, payload) in enumerate(actions)
        ],
    }


class DoneActions:
    """The ids of actions that were done, by tenant, so that a repeated one has no effect."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._ids: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def has(self, tenant: bytes, action_id: str) -> bool:
        return (tenant, action_id) in self._ids

    def add(self, tenant: bytes, action_id: str) -> None:
        self._ids[tenant, action_id] = None
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)
