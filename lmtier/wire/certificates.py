"""Reads the files of TLS into contexts; of a file that is not what it should be, one sentence says so."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import TypeVar

from lmtier.errors import ConfigError

T = TypeVar("T")


def client_context(what: str, ca: str, cert: str, key: str) -> ssl.SSLContext:
    """For a client that trusts `ca`, or what this system trusts, and shows `cert`, if it has one."""
    context = _read(what, ca, lambda: ssl.create_default_context(cafile=ca or None))
    if cert or key:
        _identify(context, what, cert or key, key)
    return context


def server_context(what: str, ca: str, cert: str, key: str) -> ssl.SSLContext:
    """For a server that is `cert`, and wants certificates that `ca` has signed, if that is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _identify(context, what, cert, key)
    if ca:
        _read(what, ca, lambda: context.load_verify_locations(ca))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _identify(context: ssl.SSLContext, what: str, cert: str, key: str) -> None:
    _read(what, cert, lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cert))
    key = key or cert
    lacks = "it has no key in PEM without a passphrase"
    # OpenSSL would ask the terminal for a passphrase.
    _read(what, key, lambda: context.load_cert_chain(cert, key, password=""), lacks, cert)


def _read(
    what: str,
    file: str,
    read: Callable[[], T],
    lacks: str = "it has no certificate in PEM",
    cert: str = "",
) -> T:
    if os.path.exists(file) and not os.path.isfile(file):  # OpenSSL would read a device for ever
        raise ConfigError(f"{what} {file}: it is not a file")
    try:
        return read()
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            lacks = f"it is not the key of {cert}"
        raise ConfigError(f"{what} {file}: {lacks}") from None
    except OSError as error:
        raise ConfigError(f"{what} {file}: {error.strerror}") from None
