"""Signs requests as S3 wants it: AWS Signature Version 4, in a header.

The body of an object is not part of the signature (UNSIGNED-PAYLOAD). lmtier checks every object with
its own checksums when it reads it, and a sha256 takes longer than sending the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

UNSIGNED = "UNSIGNED-PAYLOAD"
_SENDABLE = re.compile("[ -~]{0,16384}")
EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Credentials."""

    id: str
    secret: str
    token: str = ""
    """The token of temporary credentials."""
    expires: float = float("inf")
    """In time.time()."""

    def __post_init__(self) -> None:
        # They become lines of a request. Who says what they are may lie.
        if not all(_SENDABLE.fullmatch(part) for part in (self.id, self.token)):
            raise ValueError("a key that cannot be sent")

    def __repr__(self) -> str:
        return f"AccessKey({self.id!r})"


def quoted(path: str) -> str:
    return quote(path, safe="/-_.~")


def query_of(pairs: Mapping[str, str]) -> str:
    return "&".join(f"{quote(name, safe='-_.~')}={quote(pairs[name], safe='-_.~')}" for name in sorted(pairs))


def sign(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    payload: str,
    keys: AccessKey,
    region: str,
    now: float,
) -> dict[str, str]:
    """The headers to send instead of `headers`, which must name the host. `payload` is its hash."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    signed = {name.lower(): value for name, value in headers.items()}
    signed |= {"x-amz-content-sha256": payload, "x-amz-date": stamp}
    if keys.token:
        signed["x-amz-security-token"] = keys.token
    names = sorted(signed)
    signed_names = ";".join(names)
    lines = [method, path, query, *(f"{name}:{signed[name]}" for name in names), "", signed_names, payload]
    request_hash = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    string_to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{request_hash}"
    key = _key_of_day(keys.secret, stamp[:8], region)
    signature = hmac.new(key, string_to_sign.encode(), hashlib.sha256).hexdigest()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.id}/{scope}, SignedHeaders={signed_names}, Signature={signature}"
    )
    return signed


@lru_cache(maxsize=8)
def _key_of_day(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
