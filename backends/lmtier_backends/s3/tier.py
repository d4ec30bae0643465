"""Objects in a bucket of S3, shared by many hosts. Each call has a deadline.

    <prefix>/<namespace>/<key>.<shard>     header page, then payload: one object of the format, one of S3

A PUT of S3 becomes visible as a whole or not at all, and the last of two writers wins. So an object needs
neither parts nor a marker, and a reader sees one whole write or a miss. S3 takes 5 GiB in one PUT; a chunk of
the largest models takes .3 GiB. Loads are parallel by object, so ranges of one object are read for its
header alone.

lmtier has its own client for this. Its deadlines hold for whole calls, and payloads go between the socket
and the extent without a copy; no library for S3 does both.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from urllib.parse import urlsplit

from lmtier.errors import ConfigError, TierError, log, size_text, without_secrets
from lmtier.format.layout import Name
from lmtier.format.objects import PAGE, CorruptObject, Selector, padded, peek
from lmtier.tiers.base import Item, Stat
from lmtier_backends.options import TimedTier, require, require_common_options
from lmtier_backends.s3.bucket import MOST_DELETED, Bucket, BucketLocation
from lmtier_backends.s3.catalogue import Catalogue
from lmtier_backends.s3.credentials import Credentials, profile_of
from lmtier_backends.sockets import tls_context

_DAY = 86400.0
_HEADERS = 16  # read in one step of a search, so that it can be stopped
_FOREVER = float("inf")
_MOST = 5 << 30
"""Bytes in one PUT, the most that S3 takes."""
_need = partial(require, "s3")


class S3Tier(TimedTier):
    """s3://bucket[/prefix]?endpoint=https://host[:port]&region=…"""

    def __init__(
        self,
        location: str,
        *,
        endpoint: str = "",
        region: str = "",
        style: str = "",
        profile: str = "",
        namespace: str = "default",
        connections: int = 8,
        deadline: float = 2.0,
        refresh: float = 10.0,
        ttl: float = _FOREVER,
        ssl_ca_certs: str = "",
        ssl_check_hostname: bool = True,
    ) -> None:
        bucket, _, prefix = location.partition("/")
        prefix = prefix.strip("/")
        _need(bool(bucket), "which bucket? write it like s3://bucket/prefix?region=eu-central-1")
        _need(
            re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket) is not None, f"{bucket!r} is no bucket"
        )
        require_common_options("s3", namespace, connections, deadline)
        _need(style in ("", "path", "host"), f"style={style!r}: path or host")
        try:
            settings = profile_of(profile)
        except OSError as error:
            raise TierError(f"s3 tier: {error}") from None
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
        region = region or settings.get("region", "us-east-1")
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            endpoint = endpoint or os.environ.get(variable, "")
        place = _place(bucket, endpoint, region, style, (ssl_ca_certs, ssl_check_hostname))
        self._prefix = f"{prefix}/{namespace}/".removeprefix("/")
        self._where = f"s3://{bucket}/{self._prefix}".rstrip("/") + f" at {place.host}"
        self._deadline = deadline
        self._bucket = Bucket(place, Credentials(profile, region))
        # A lookup that takes all the time that a request has finds what cannot be loaded any more. And the
        # cache does not use a tier whose lookups take so long, until it has seen many that are faster.
        self._patience = deadline / 2
        self._catalogue = Catalogue(self._page, self._patience, refresh)
        super().__init__("s3", connections, connections, askers=1)
        self._check_reachable(ttl)

    def __repr__(self) -> str:
        return f"<S3Tier {self._where}>"

    # ---- the functions of a tier

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        until, key = self._call_deadline(), self._key(item.name)
        got = self._bucket.get(key, buffers, until, start_only=len(buffers) == 1)
        if got is None:
            self._catalogue.note([item.name], None)
            raise FileNotFoundError(item.name)
        return got

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        until, nbytes = self._call_deadline(), sum(map(len, buffers))
        if nbytes > _MOST:
            raise ValueError(
                f"an object of {size_text(nbytes)}; S3 takes {size_text(_MOST)}: choose smaller chunk_tokens"
            )
        if item.replaces is not None:
            self._delete([item.replaces], until)
        self._bucket.put(self._key(item.name), buffers, until)
        self._catalogue.note([item.name], Stat(nbytes - PAGE))

    def delete(self, names: Sequence[Name]) -> None:
        self._delete(names, self._call_deadline())

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        if self._bucket.has_last_call_failed:
            # A list goes on answering when its server is gone. Then this question finds out.
            self._bucket.page(self._prefix, "", time.monotonic() + self._patience, most=1)
        return self._catalogue.find(names)

    def clear(self, selector: Selector) -> Iterator[None]:
        """Each page of the list is a step, and ends by `deadline`."""
        if selector.is_prefix:
            return self._search(selector.prefix, list)
        page = memoryview(bytearray(PAGE))

        def covered(names: list[Name]) -> list[Name]:
            concerned = (name for name in names if selector.concerns(name.key))
            return [name for name in concerned if self._is_suspect(selector, name, page)]

        return self._search(selector.prefix, covered, _HEADERS)

    def close(self) -> None:
        self._catalogue.close()  # first, because a lookup may wait for a list
        super().close()
        self._bucket.close()

    # ---- what they stand on

    def _key(self, name: Name) -> str:
        return f"{self._prefix}{name}"

    def _delete(self, names: Sequence[Name], until: float) -> None:
        self._bucket.delete([self._key(name) for name in names], until)
        self._catalogue.note(names, None)

    def _page(self, prefix: bytes, after: str) -> tuple[list[tuple[Name, Stat]], str]:
        page = self._bucket.page(f"{self._prefix}{prefix.hex()}", after, self._call_deadline())
        found = []
        for key, nbytes in page.objects:
            name = Name.parse(key.removeprefix(self._prefix))
            if name is not None and PAGE < nbytes <= _MOST:
                found.append((name, Stat(padded(nbytes - PAGE))))
        return found, page.next_token

    def _search(
        self, prefix: bytes, choose: Callable[[list[Name]], list[Name]], batch_size: int = MOST_DELETED
    ) -> Iterator[None]:
        """Delete what `choose` takes from so many names at a time."""
        next_token = ""
        while True:
            page = self._bucket.page(f"{self._prefix}{prefix.hex()}", next_token, self._call_deadline())
            keys = (key.removeprefix(self._prefix) for key, _ in page.objects)
            names = [name for key in keys if (name := Name.parse(key)) is not None]
            for start in range(0, max(1, len(names)), batch_size):
                if chosen := choose(names[start : start + batch_size]):
                    self.delete(chosen)
                yield
            if not (next_token := page.next_token):
                return

    def _is_suspect(self, suspect: Selector, name: Name, page: memoryview) -> bool:
        try:
            got = self._bucket.get(self._key(name), (page,), self._call_deadline(), start_only=True)
            return got is not None and suspect.covers(name.key, peek(page[:got], name)[0].provenance)
        except CorruptObject:  # a reader will find that out
            return False

    def _check_reachable(self, ttl: float) -> None:
        until = self._call_deadline()
        try:
            self._bucket.page(self._prefix, "", until, most=1)
        except OSError as error:
            log.warning("lmtier: %s cannot be used now, going on without it: %s", self._where, error)
            return
        if ttl == _FOREVER:
            return
        try:
            rules = self._bucket.lifecycle_rules(until)
        except OSError as error:
            log.info("lmtier: %s: its lifecycle rules cannot be read: %s", self._where, error)
            return
        days = min((rule.days for rule in rules if self._prefix.startswith(rule.prefix)), default=0)
        if not days:
            log.warning(
                "lmtier: %s has a ttl, but no lifecycle rule: what has expired stays and costs money",
                self._where,
            )
        elif days * _DAY < ttl:
            log.warning(
                "lmtier: %s: a lifecycle rule deletes after %d days, before the ttl", self._where, days
            )


def _place(bucket: str, endpoint: str, region: str, style: str, tls: tuple[str, bool]) -> BucketLocation:
    url = urlsplit(endpoint or f"https://s3.{region}.amazonaws.com")
    _need(
        url.scheme in ("http", "https") and bool(url.hostname) and not url.username and url.path in ("", "/"),
        f"endpoint={without_secrets(endpoint)!r}: write it like https://host:9000",
    )
    try:
        port = url.port
    except ValueError:
        shown = without_secrets(endpoint)
        raise ConfigError(f"s3 tier: endpoint={shown!r}: the port is not a number up to 65535") from None
    # A certificate for *.host covers no name with further dots.
    is_virtual_host = style == "host" or (not style and not endpoint and "." not in bucket)
    host = f"{bucket}.{url.hostname}" if is_virtual_host else str(url.hostname)
    is_tls = url.scheme == "https"
    ca, check_hostname = tls
    _need(is_tls or not ca, "ssl_ca_certs is for an endpoint with https://")
    context = (
        tls_context("s3", ca or os.environ.get("AWS_CA_BUNDLE", ""), "", "", check_hostname)
        if is_tls
        else None
    )
    address = (host, port or (443 if is_tls else 80))
    base = "/" if is_virtual_host else f"/{bucket}/"
    return BucketLocation(address, f"{host}:{port}" if port else host, base, region, context)
