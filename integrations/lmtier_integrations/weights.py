"""What names a model of which an engine tells no more than where it lies."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from lmtier_integrations.identity import weights_in


def weights_of(model: str, revision: str | None = None) -> str:
    """The content of a folder, with its configuration, or the commit of a hub; empty if neither is known."""
    if not (weights := weights_in(model)):
        return revision if revision and re.fullmatch("[0-9a-f]{40}", revision) else ""
    config = Path(model, "config.json")
    return hashlib.sha256(weights.encode() + (config.read_bytes() if config.is_file() else b"")).hexdigest()
