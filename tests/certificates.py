"""Certificates for TLS, each signed by itself."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certify(cert: Path, key: Path, names: str = "DNS:localhost") -> None:
    """A certificate for these names, and its key."""
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subject = ["-subj", "/CN=localhost", "-addext", f"subjectAltName={names}"]
    command = ["openssl", "req", *kind, *subject, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
