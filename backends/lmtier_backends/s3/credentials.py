"""Finds the keys to a bucket where Amazon's own tools look for them, in the same order.

    environment     AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN
    web identity    AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN: a role of a Kubernetes service account
    files           ~/.aws/credentials, ~/.aws/config: keys, or the command of a `credential_process`
    container       AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or _FULL_URI: a role of a task or a pod
    instance        the metadata service of an EC2 instance, version 2

`profile=` names a profile of the files, and skips the two sources before them. Keys are asked for again
before they expire, each minute if they come from files, and after a server has refused them.
"""

from __future__ import annotations

import configparser
import json
import os
import shlex
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from lmtier_backends.s3.documents import parse_xml
from lmtier_backends.s3.http import SMALL, HttpSocket
from lmtier_backends.s3.signing import AccessKey, quoted
from lmtier_backends.sockets import connect, printable_excerpt, seconds_left

_EARLY = 300.0
"""Seconds before their end in which keys are replaced."""
_KEPT = 60.0
"""Seconds after which files are read again, or a host without keys is searched again."""
_NEARBY = 1.0
"""The longest wait for a service of this host: away from EC2 there is none."""
_CONTAINER = "http://169.254.170.2"
_INSTANCE = "http://169.254.169.254"
_ROLES = "/latest/meta-data/iam/security-credentials/"


class Credentials:
    def __init__(self, profile: str, region: str) -> None:
        self._profile = profile
        self._region = region
        self._lock = threading.Lock()
        self._keys: AccessKey | None = None
        self._fresh_until = 0.0
        """In time.time()."""

    def access_key(self, until: float) -> AccessKey:
        """Raises OSError where there are none."""
        # One thread asks. The others wait, unless they have keys that are still good.
        is_old = self._keys is None or time.time() >= self._fresh_until
        if is_old and self._lock.acquire(timeout=0 if self._usable else seconds_left(until)):
            try:
                if time.time() >= self._fresh_until:
                    self._find(until)
            finally:
                self._lock.release()
        if self._keys is None:
            raise ConnectionError(
                "no credentials: not in the environment, in ~/.aws, or from this host's role"
            )
        return self._keys

    @property
    def _usable(self) -> bool:
        return self._keys is not None and time.time() < self._keys.expires

    def refused(self, keys: AccessKey) -> None:
        """A server does not know these. They may have been replaced."""
        if self._keys is keys:
            self._fresh_until = 0.0

    def _find(self, until: float) -> None:
        sources: list[Callable[[float], AccessKey | None]] = [self._files]
        if not self._profile:
            sources = [_environment, self._web_identity, self._files, _container, _instance]
        try:
            keys = next((access_key for source in sources if (access_key := source(until))), None)
        # Of a file, a command or a service; in a tier a FileNotFoundError would mean a miss.
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            subprocess.SubprocessError,
        ) as error:
            if not self._usable:
                raise ConnectionError(
                    f"credentials: {type(error).__name__}: {printable_excerpt(str(error))}"
                ) from None
            keys = None
        now = time.time()
        if keys is None and self._usable:  # what renews them is away for a moment
            self._fresh_until = now + _NEARBY
        elif keys is None or keys.expires == float("inf"):
            self._keys, self._fresh_until = keys, now + _KEPT
        else:
            self._keys = keys
            self._fresh_until = max(keys.expires - _EARLY, min(keys.expires, now + _NEARBY))

    def _files(self, until: float) -> AccessKey | None:
        """Keys of the profile, or what its command prints."""
        profile = profile_of(self._profile)
        if "aws_access_key_id" in profile:
            token = profile.get("aws_session_token", "")
            return AccessKey(profile["aws_access_key_id"], profile["aws_secret_access_key"], token)
        if command := profile.get("credential_process"):
            done = subprocess.run(
                shlex.split(command), capture_output=True, check=True, timeout=seconds_left(until), text=True
            )
            return _from_json(json.loads(done.stdout))
        if self._profile:
            raise ValueError(f"profile {self._profile!r} has no keys")
        return None

    def _web_identity(self, until: float) -> AccessKey | None:
        """Exchange a signed statement of who this is for the keys of a role."""
        file, role = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"), os.environ.get("AWS_ROLE_ARN")
        if not file or not role:
            return None
        url = os.environ.get("AWS_ENDPOINT_URL_STS", f"https://sts.{self._region}.amazonaws.com")
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": role,
            "RoleSessionName": os.environ.get("AWS_ROLE_SESSION_NAME", "lmtier"),
            "WebIdentityToken": Path(file).read_text().strip(),
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        text = _fetch("POST", f"{url.rstrip('/')}/", headers, until, urlencode(form).encode())
        return _from_json(parse_xml(text, "Credentials", until).rows[0])


def profile_of(name: str) -> dict[str, str]:
    """The settings of a profile in the files, by default of the one that AWS_PROFILE names."""
    name = name or os.environ.get("AWS_PROFILE", "default")
    settings: dict[str, str] = {}
    for variable, default_path, sections in (
        ("AWS_CONFIG_FILE", "~/.aws/config", (name, f"profile {name}")),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", (name,)),
    ):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(Path(os.environ.get(variable, default_path)).expanduser(), "utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ConnectionError(f"credentials: {str(error).partition(chr(10))[0]}") from None
        for section in sections:
            if parser.has_section(section):
                settings |= {key: value.strip() for key, value in parser.items(section)}
    return settings


def _environment(until: float) -> AccessKey | None:
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    return AccessKey(key, secret, os.environ.get("AWS_SESSION_TOKEN", "")) if key and secret else None


def _container(until: float) -> AccessKey | None:
    url = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
    if path := os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        url = _CONTAINER + path
    if not url:
        return None
    token = os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
    if file := os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = Path(file).read_text().strip()
    return _from_json(json.loads(_fetch("GET", url, {"Authorization": token} if token else {}, until)))


def _instance(until: float) -> AccessKey | None:
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _INSTANCE).rstrip("/")
    until = min(until, time.monotonic() + _NEARBY)
    try:
        ttl_header = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        session_token = _fetch("PUT", f"{base}/latest/api/token", ttl_header, until).decode("ascii").strip()
        token_header = {"X-aws-ec2-metadata-token": session_token}
        role = _fetch("GET", base + _ROLES, token_header, until).decode("ascii").partition("\n")[0].strip()
        return _from_json(json.loads(_fetch("GET", base + _ROLES + quoted(role), token_header, until)))
    except OSError:  # not an instance, or one without a role
        return None


def _from_json(fields: Mapping[str, Any]) -> AccessKey:
    expiration = fields.get("Expiration")
    expires = datetime.fromisoformat(expiration).timestamp() if expiration else float("inf")
    token = fields.get("SessionToken") or fields.get("Token") or ""
    parts = (fields["AccessKeyId"], fields["SecretAccessKey"], token)
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("keys that are no text")
    return AccessKey(*parts, expires)


def _fetch(method: str, url: str, headers: Mapping[str, str], until: float, body: bytes = b"") -> bytes:
    """The body of a good reply. Raises OSError."""
    parts = urlsplit(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    address = (parts.hostname or "", parts.port or (443 if tls else 80))
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    lines += [*(f"{name}: {value}" for name, value in headers.items()), f"Content-Length: {len(body)}"]
    with closing(HttpSocket(connect(address, until, tls))) as wire:
        reply = wire.ask("\r\n".join([*lines, "", ""]).encode(), (body,), until)
        text = wire.read(reply, until, SMALL)
    if reply.status != 200:
        raise ConnectionError(f"{parts.netloc} answered {reply.status}")
    return text
