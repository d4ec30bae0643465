"""Three hosts share a store and lose a host, a link and the store: hits come back, and bytes are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN_NETWORK = [
    "unshare",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
]


def can_make_networks() -> bool:
    return (
        subprocess.run([*OWN_NETWORK, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_make_networks(), reason="this system lets no user make network namespaces")
@pytest.mark.parametrize(
    "store",
    [
        pytest.param("redis", marks=pytest.mark.slow),
        *(pytest.param(store, marks=pytest.mark.long) for store in ("redis-cluster", "s3", "mooncake")),
    ],
)
def test_hosts_share_a_store_and_lose_it(tmp_path, store):
    words = [sys.executable, "-m", "tests.hosts.fleet", str(tmp_path / "fleet"), "--store", store]
    done = subprocess.run(
        [*OWN_NETWORK, *words, "--prompts", "4"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 10
    assert sum(row["wrong"] for row in rows) == 0
    print(done.stdout)
