"""The values of INFO and CONFIG GET."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lmtier._version import __version__
from lmtier.config import ServerConfig, host_and_port
from lmtier.core.cache import Cache
from lmtier.server.connection_table import ConnectionTable
from lmtier.server.ledger import MAX_CLIENT_BYTES
from lmtier.server.redis.service import REDIS_VERSION
from lmtier.server.report import Report
from lmtier.server.values import Values


def info(
    cache: Cache, serving: ServerConfig, report: Report, roster: ConnectionTable, values: Values
) -> Mapping[str, Mapping[str, object]]:
    snapshot = report.snapshot()
    metric = cache.metrics.value
    port = host_and_port(serving.listen, "")[1] if serving.listen else 0
    keys = len(values)
    return {
        "Server": {
            "redis_version": REDIS_VERSION,
            "redis_mode": "standalone",
            "lmtier_version": __version__,
            "process_id": os.getpid(),
            "tcp_port": port,
            "uptime_in_seconds": int(snapshot["counted"]["seconds"]),
        },
        "Clients": {
            "connected_clients": len(roster),
            "blocked_clients": roster.waiting,
            "maxclients": serving.clients,
        },
        "Memory": {
            "used_memory": cache.index.used,
            "used_memory_rss": resident_bytes(),
            "mem_clients_normal": int(metric("lmtier_clients_remember_bytes")),
            "maxmemory": cache.index.capacity,
            "maxmemory_policy": "allkeys-lru",
        },
        "Persistence": {"loading": int(not cache.is_warm)},
        "Stats": {
            "total_connections_received": roster.accepted,
            "total_commands_processed": roster.request_count,
            "instantaneous_ops_per_sec": round(roster.rate),
            "keyspace_hits": int(metric("lmtier_values_total", event="hit")),
            "keyspace_misses": int(metric("lmtier_values_total", event="missed")),
            "expired_keys": int(metric("lmtier_values_total", event="expired")),
            "evicted_keys": sum(snapshot["counted"]["evicted"].values()),
        },
        "Replication": {"role": "master", "connected_slaves": 0},
        "Tiers": {
            tier["tier"]: f"chunks={tier['chunks']},used={tier['used']},capacity={tier['capacity']}"
            for tier in snapshot["tiers"]
        },
        "Keyspace": {"db0": f"keys={keys},expires=0,avg_ttl=0"} if keys else {},
    }


def resident_bytes() -> int:
    """The memory of this process, the slab included as far as it was touched. 0: not known now."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # as many files are open as may be
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def settings(cache: Cache, serving: ServerConfig) -> Mapping[str, str]:
    return {
        "maxmemory": str(cache.index.capacity),
        "maxmemory-policy": "allkeys-lru",
        "maxclients": str(serving.clients),
        "maxmemory-clients": str(MAX_CLIENT_BYTES),
        "save": "",
        "appendonly": "no",
        "databases": "1",
        "chunk-tokens": str(cache.config.chunk_tokens),
    }
