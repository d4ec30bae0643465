"""The verbs of engines, `LMTIER.*`, declared once: for the server, for rights, and for docs/PROTOCOL.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple


class Verb(NamedTuple):
    """What a verb takes, and who may use it. The server's handler of a verb has its name."""

    fields: str = ""
    """As docs/PROTOCOL.md has them: `[optional]`, and `…` after what is repeated."""
    flag: str = "readonly"
    """As in redis: readonly, write, fast, admin."""
    role: str = "engine"
    """The least role: look, engine or admin."""
    needs_slab: bool = False
    """It is about extents: only who maps the slab may use it."""
    is_audited: bool = False

    @property
    def is_long(self) -> bool:
        """Whether it may have an argument or two for each key."""
        return "…" in self.fields

    @property
    def arity(self) -> int:
        """As in redis: the number of arguments, name included; negative: at least so many."""
        needed = 1 + len(re.sub(r"\[.*?\]|…", "", self.fields).split())
        return -needed if "[" in self.fields or self.is_long else needed


VERBS: Final[Mapping[str, Verb]] = {
    "HELLO": Verb("version [ENGINE secret] [SHARD L0-32H0-4] [NAME text]", "fast"),
    "SLAB": Verb("", "fast", needs_slab=True),
    "FORM": Verb("layout shard … [MODEL identity lora]", "fast"),
    "COST": Verb("fixed token position copy", "fast"),
    "MATCH": Verb("form tokens deadline_ms [SESSION name] [PARENT name] [SOURCE host:port] keys…"),
    "PREFETCH": Verb("match [chunks] [HAS tokens]"),
    "POLL": Verb("match [WAIT]"),
    "RELEASE": Verb("[match …] [VERIFIED compared failed]"),
    "SEEN": Verb("keys…"),
    "TELL": Verb("origin parent keys tokens…"),
    "TRACE": Verb("id traceparent [tracestate]"),
    "RESERVE": Verb("form first [TTL ms] keys…", "write", needs_slab=True),
    "COMMIT": Verb("reservation shard [chunk mark …]", "write", needs_slab=True),
    "ABORT": Verb("reservation shard", "write", needs_slab=True),
    "DISCARD": Verb("keys…", "write", needs_slab=True, is_audited=True),
    "FLUSH": Verb("timeout_ms", "write"),
    "CALL": Verb("path [json …]", role="look"),
    "HAS": Verb("object …"),
    "READ": Verb("object"),
    "TAKEOVER": Verb("version chunk_tokens approximation memory", "admin", role="admin", is_audited=True),
}
