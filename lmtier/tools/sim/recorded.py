"""Recorded sessions of coding agents, one to a JSON file, merged into one trace.

kv-cache-tester and AIPerf (as WEKA_TRACE) use this format. `requests` has a session's requests, each with
its time `t`, its lengths `in` and `out`, and the `hash_ids` of its whole blocks. Between them are sub-agents,
each with own requests. Ids are those of one file. Sessions of a model whose tools and system prompt
have equal lengths begin with the same tokens, as far as a recording without contents can tell.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from heapq import heapreplace
from pathlib import Path
from typing import Any

from lmtier.errors import ConfigError
from lmtier.tools.sim.traces import Trace, TraceRequest


def read_recorded(path: Path, users: int, longest_gap: float) -> Trace:
    """Reads all files of a folder: `users` sessions at a time, each gap of one at most so many seconds.

    A user who ends a session begins the next one.
    """
    files = sorted(path.glob("*.json"))
    if not files:
        raise ConfigError(f"trace {path}: there is no .json file in this folder")
    block_tokens, requests, ids = 0, list[TraceRequest](), dict[Hashable, int]()
    free = [0.0] * users
    """When each user can begin a session: a heap."""
    for file in files:
        try:
            recording = json.loads(file.read_text())
            size = int(recording["block_size"])
            session = sorted(_requests(recording, ids), key=lambda request: request.at)
        except OSError as error:
            raise ConfigError(f"trace {file}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            message = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(f"trace {file}: no recorded session: {message}") from None
        if size <= 0 or block_tokens not in (0, size):
            raise ConfigError(f"trace {file}: block_size is {size}; all files need one size above 0")
        block_tokens = size
        now, last = free[0], session[0].at if session else 0.0
        for request in session:
            now += min(request.at - last, longest_gap)
            last = request.at
            requests.append(request._replace(at=now))
        heapreplace(free, now)
    if not requests:
        raise ConfigError(f"trace {path}: no requests")
    requests.sort(key=lambda request: request.at)
    return Trace(path.name, block_tokens, requests)


def _requests(recording: Mapping[str, Any], ids: dict[Hashable, int]) -> Iterator[TraceRequest]:
    name, block_tokens = str(recording["id"]), max(1, int(recording["block_size"]))
    entries: Sequence[Mapping[str, Any]] = recording["requests"]
    agents = [entry for entry in entries if entry["type"] == "subagent" and entry["requests"]]
    # Some recordings count the time of a sub-agent from its beginning, others from that of the session.
    is_relative = any(float(agent["requests"][0]["t"]) < float(agent["t"]) for agent in agents)
    own = [entry for entry in entries if entry["type"] != "subagent"]
    yield from _of_agent(recording, own, name, "", 0.0, name, block_tokens, ids)
    for number, agent in enumerate(agents, 1):
        start = float(agent["t"]) if is_relative else 0.0
        yield from _of_agent(
            agent, agent["requests"], f"{name}/{number}", name, start, name, block_tokens, ids
        )


def _of_agent(
    agent: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    name: str,
    parent: str,
    start: float,
    file: str,
    block_tokens: int,
    ids: dict[Hashable, int],
) -> Iterator[TraceRequest]:
    beginning = int(agent.get("tool_tokens", 0)), int(agent.get("system_tokens", 0))
    first = entries[0]["hash_ids"][: sum(beginning) // block_tokens] if entries else ()
    names: dict[Hashable, Hashable] = {
        block: (entries[0].get("model"), beginning, number) for number, block in enumerate(first)
    }
    for entry in entries:
        blocks = [ids.setdefault(names.get(block, (file, block)), len(ids)) for block in entry["hash_ids"]]
        at = start + float(entry["t"])
        yield TraceRequest(at, int(entry["in"]), int(entry["out"]), blocks, name, parent)
