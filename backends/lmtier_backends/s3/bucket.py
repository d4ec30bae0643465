"""The requests to one bucket: read, write, delete and list objects. Each call ends by `until`.

A connection is kept for the next call. There are as many as threads that call, and one request at a time is
in flight on each.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import NamedTuple, TypeVar
from xml.sax.saxutils import escape

from lmtier.format.sealing import Buffer
from lmtier_backends.s3.credentials import Credentials
from lmtier_backends.s3.documents import Fields, number_in, parse_xml
from lmtier_backends.s3.http import SMALL, HttpReply, HttpSocket, reason
from lmtier_backends.s3.signing import EMPTY, UNSIGNED, query_of, quoted, sign
from lmtier_backends.sockets import Address, BadReply, connect, printable_excerpt

T = TypeVar("T")
MOST_DELETED = 1000
"""Names in one request, the most that S3 takes."""
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityTooLarge"}
_SKEWED = "RequestTimeTooSkewed"
_RETRYABLE_CODES = {_SKEWED, "InternalError"}
"""What S3 says of a request that should be sent once more. rclone says it of the first stores in a folder."""
_CONDITIONS = {"Tag", "ObjectSizeGreaterThan", "ObjectSizeLessThan"}
"""A rule with these does not go by age alone."""
_DATE = 40  # letters; HTTP's dates have 29
_UNKNOWN = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AccessDenied"}


class S3Error(OSError):
    """The server answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        number = errno.ENOSPC if code in _FULL or status == 507 else errno.EPROTO
        super().__init__(
            number,
            ": ".join(filter(None, (printable_excerpt(code) or reason(status), printable_excerpt(message)))),
        )
        self.status = status
        self.code = code


class ListingPage(NamedTuple):
    """Some names of a bucket, in order."""

    objects: list[tuple[str, int]]
    """Name and bytes of each object."""
    next_token: str
    """Where the next page begins; empty: this is the last one."""


class LifecycleRule(NamedTuple):
    """A lifecycle rule that deletes objects."""

    name: str
    prefix: str
    days: int


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """Where a bucket is."""

    address: Address
    host: str
    """As requests name it."""
    base: str
    """What comes before an object's name in the path of a request."""
    region: str
    tls: ssl.SSLContext | None


class Bucket:
    def __init__(self, place: BucketLocation, credentials: Credentials) -> None:
        self.place = place
        self._credentials = credentials
        self._idle: deque[HttpSocket] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self.skew = 0.0
        """Seconds by which the server's clock is ahead of ours, once it has refused a request for that."""
        self.has_last_call_failed = False
        """Whether the last call has failed."""

    # ---- objects

    def get(self, key: str, into: Sequence[memoryview], until: float, *, start_only: bool) -> int | None:
        """Read an object into memory. Returns its length, or None if it does not exist.

        `start_only`: only so much as `into` takes is asked for, and returned as the length.
        """
        capacity = sum(map(len, into))
        headers = {"Range": f"bytes=0-{capacity - 1}"} if start_only else {}

        def take(wire: HttpSocket, reply: HttpReply) -> int | None:
            if reply.status in (200, 206):
                return wire.fill(reply, into, until)
            problem = self._refusal(wire, reply, until)
            if problem.code == "NoSuchKey":
                return None
            if problem.code == "InvalidRange" and start_only:  # an empty object
                return 0
            raise problem

        return self._ask("GET", key, {}, until, take, headers=headers)

    def put(self, key: str, pieces: Sequence[Buffer], until: float) -> None:
        self._ask("PUT", key, {}, until, self._need_good(until), body=pieces)

    def delete(self, keys: Sequence[str], until: float) -> None:
        """Delete these, some hundreds in a request. A name that does not exist is no error."""
        for first in range(0, len(keys), MOST_DELETED):
            object_elements = "".join(
                f"<Object><Key>{escape(key)}</Key></Object>" for key in keys[first : first + MOST_DELETED]
            )
            body = f"<Delete><Quiet>true</Quiet>{object_elements}</Delete>".encode()
            md5_header = {
                "Content-MD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            }
            text = self._ask("POST", "", {"delete": ""}, until, self._body(until), md5_header, (body,))
            for error in parse_xml(text, "Error", until).rows if text.strip() else ():
                if error.get("Code") != "NoSuchKey":
                    raise S3Error(200, error.get("Code", ""), error.get("Message", ""))

    def page(self, prefix: str, token: str, until: float, most: int = 1000) -> ListingPage:
        """The names that begin with `prefix`, from the page that `token` names on."""
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(most)}
        if token:
            query["continuation-token"] = token
        listing = parse_xml(self._ask("GET", "", query, until, self._body(until)), "Contents", until)
        if listing.root != "ListBucketResult":
            raise BadReply(f"not a list of names: {printable_excerpt(listing.root)}")
        objects = []
        for row in listing.rows:
            key, size = row.get("Key", ""), number_in(row.get("Size", ""))
            if size is None or not key.startswith(prefix):
                raise BadReply(f"not an entry of a list of {prefix}: {printable_excerpt(key)}")
            objects.append((key, size))
        is_truncated = listing.fields.get("IsTruncated") == "true"
        next_token = listing.fields.get("NextContinuationToken", "") if is_truncated else ""
        if is_truncated and (not next_token or not objects or next_token == token):
            raise BadReply("a list of names that ends in the middle")
        return ListingPage(objects, next_token)

    def lifecycle_rules(self, until: float) -> list[LifecycleRule]:
        """The lifecycle rules that delete objects by age alone."""
        try:
            text = self._ask("GET", "", {"lifecycle": ""}, until, self._body(until))
        except S3Error as error:
            if error.code == "NoSuchLifecycleConfiguration":
                return []
            raise
        rules = []
        for row in parse_xml(text, "Rule", until).rows:
            days = number_in(row.get("Expiration/Days", ""))
            if row.get("Status") == "Enabled" and days is not None and not _CONDITIONS & _words(row):
                prefixes = (row.get(field) for field in ("Filter/Prefix", "Filter/And/Prefix", "Prefix"))
                rules.append(LifecycleRule(row.get("ID", ""), next(filter(None, prefixes), ""), days))
        return rules

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    # ---- requests and replies

    def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        until: float,
        read_reply: Callable[[HttpSocket, HttpReply], T],
        headers: Mapping[str, str] = {},
        body: Sequence[Buffer] = (),
    ) -> T:
        """Send a request, once more if the server asks for that. `read_reply` gets the reply."""
        try:
            try:
                result = self._exchange(method, key, query, until, read_reply, headers, body)
            except S3Error as error:
                if error.code not in _RETRYABLE_CODES:
                    raise
                result = self._exchange(method, key, query, until, read_reply, headers, body)
        except OSError:
            self.has_last_call_failed = True
            raise
        self.has_last_call_failed = False
        return result

    def _exchange(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        until: float,
        read_reply: Callable[[HttpSocket, HttpReply], T],
        headers: Mapping[str, str],
        body: Sequence[Buffer],
    ) -> T:
        keys = self._credentials.access_key(until)
        path, query_string = quoted(f"{self.place.base}{key}"), query_of(query)
        payload = (
            UNSIGNED if method == "PUT" else hashlib.sha256(b"".join(body)).hexdigest() if body else EMPTY
        )
        headers_with_host = {"Host": self.place.host, **headers}
        now = time.time() + self.skew
        signed = sign(method, path, query_string, headers_with_host, payload, keys, self.place.region, now)
        lines = [f"{method} {path}{f'?{query_string}' if query_string else ''} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in signed.items()]
        lines += [f"content-length: {sum(map(len, body))}"] if method in ("PUT", "POST") else []
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        wire = self._borrow(until)
        try:
            try:
                reply = wire.ask(head, body, until)
            except ConnectionError:
                if not wire.replies:
                    raise
                # The server ended an idle connection while we began to use it.
                wire.close()
                wire = self._dial(until)
                reply = wire.ask(head, body, until)
            result = read_reply(wire, reply)
        except S3Error as error:
            self._give_back(wire)
            if error.code == _SKEWED:
                self.skew = _time_in(reply) - time.time()
            if error.code in _UNKNOWN:
                self._credentials.refused(keys)
            raise
        except BaseException:
            wire.close()
            raise
        self._give_back(wire)
        return result

    def _need_good(self, until: float) -> Callable[[HttpSocket, HttpReply], None]:
        def take(wire: HttpSocket, reply: HttpReply) -> None:
            if reply.status != 200:
                raise self._refusal(wire, reply, until)
            wire.read(reply, until)

        return take

    def _body(self, until: float) -> Callable[[HttpSocket, HttpReply], bytes]:
        def take(wire: HttpSocket, reply: HttpReply) -> bytes:
            if reply.status != 200:
                raise self._refusal(wire, reply, until)
            return wire.read(reply, until)

        return take

    def _refusal(self, wire: HttpSocket, reply: HttpReply, until: float) -> S3Error:
        body, fields = b"", {}
        try:
            body = wire.read(reply, until, SMALL)
        except ConnectionError:  # its status says enough
            wire.close()
        with suppress(ConnectionError):
            fields = next(iter(parse_xml(body, "Error", until).rows), {})
        code, message = fields.get("Code", ""), fields.get("Message", "")
        if 300 <= reply.status < 400:  # KV goes to no other place than the one that was named
            region = reply.headers.get("x-amz-bucket-region")
            target = f"region={region}" if region else reply.headers.get("location", "elsewhere")
            place = printable_excerpt(target)
            message = f"the server sends us on to {place}; name that place in the URL of the tier"
        return S3Error(reply.status, code, message)

    # ---- connections

    def _borrow(self, until: float) -> HttpSocket:
        while True:
            try:
                wire = self._idle.pop()  # the one that was used last
            except IndexError:
                return self._dial(until)
            if not wire.is_stale():
                return wire
            wire.close()

    def _dial(self, until: float) -> HttpSocket:
        if self._closed:
            raise ConnectionError("closed")
        try:
            return HttpSocket(connect(self.place.address, until, self.place.tls))
        except FileNotFoundError as error:  # in a tier this exception would mean a miss
            raise ConnectionError(str(error)) from None

    def _give_back(self, wire: HttpSocket) -> None:
        with self._lock:
            if self._closed or wire.is_closed or wire.is_stale():
                wire.close()
            else:
                self._idle.append(wire)


def _words(rule: Fields) -> set[str]:
    return {word for path in rule for word in path.split("/")}


def _time_in(reply: HttpReply) -> float:
    with suppress(ValueError, TypeError, LookupError, ArithmeticError):
        return parsedate_to_datetime(reply.headers.get("date", "")[:_DATE]).timestamp()
    return time.time()
