"""Three hosts share a store, and lose a host, a link and the store, or frames. No byte is wrong."""

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
    ("store", "story", "rows"),
    [
        pytest.param("redis", "failing", 10, marks=pytest.mark.slow),
        pytest.param("redis", "far", 3, marks=pytest.mark.slow),
        pytest.param(None, "sources", 4, marks=pytest.mark.slow),
        *(
            pytest.param(store, story, rows, marks=pytest.mark.long)
            for store in ("redis-cluster", "s3", "mooncake")
            for story, rows in (("failing", 10), ("far", 3))
        ),
    ],
)
def test_hosts_share_a_store(tmp_path, store, story, rows):
    if story == "far" and not Path("/dev/net/tun").exists():
        pytest.skip("this system has no TAP interfaces")
    words = [sys.executable, "-m", "tests.hosts.fleet", str(tmp_path / "fleet")]
    words += ["--story", story, "--prompts", "4", *(["--store", store] if store else [])]
    done = subprocess.run([*OWN_NETWORK, *words], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(seen) == rows
    assert sum(row["wrong"] for row in seen) == 0
    print(done.stdout)
