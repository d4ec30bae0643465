"""What a bucket holds, as far as this process knows: lists of names, and what it wrote and missed since.

A lookup must not ask S3 about each key. So there is a list for each model, the names that begin with the
same four bytes, and a lookup is answered from it. A list is fetched by a thread, a page of 1,000 names at a
time. Names are few: an object of 32 MiB is usual, so a page stands for 32 GiB.

    first lookup of a model     fetches its list, and waits for it, but no longer than `patience`
    a lookup that misses        has the list fetched again, if it is older than `refresh`; it does not wait
    no lookup, or all are hits  nothing is fetched

A list may be wrong in both directions. A name that others stored since is a miss until the next list. A name
that others deleted is found, and missed when it is read; then it leaves the list. What is read is checked,
so a wrong list never becomes a wrong answer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lmtier.errors import log
from lmtier.format.layout import Name
from lmtier.threads import start_thread
from lmtier.tiers.base import Stat

_MODEL = 4
"""The bytes of a key that name its model."""
_MOST_LISTS = 256
_MOST_NAMES = 1 << 20
"""In all lists, some 250 bytes each."""
_MOST_PAGES = 4 * _MOST_NAMES // 1000
"""The most pages of one list: names that are not ours count too."""
_SHARE = 9
"""After a list that took a second, the next one waits for so many: fetching takes a tenth of the time."""
_MAX_PAGE_SECONDS = 0.1
"""The most seconds that count for a page. If it took longer, the server was away."""

Found = dict[Name, Stat]


@dataclass(slots=True, eq=False)
class _Listing:
    prefix: bytes
    names: Found = field(default_factory=dict)
    is_fetched: bool = False
    """Whether it was fetched."""
    first_wanted_at: float = 0.0
    """When the first lookup asked for it."""
    refetch_at: float = 0.0
    """When it may be fetched again."""
    changes_while_fetching: dict[Name, Stat | None] | None = None
    """What this process did while it is being fetched. None: it is not."""
    problem: OSError | None = None
    """Why it could not be fetched."""


class Catalogue:
    def __init__(
        self,
        fetch: Callable[[bytes, str], tuple[Sequence[tuple[Name, Stat]], str]],
        patience: float,
        refresh: float,
    ) -> None:
        """`fetch` returns a page of the names that begin with some bytes, and where the next one begins."""
        self._fetch = fetch
        self._patience = patience
        self._refresh = refresh
        self._changed = threading.Condition()
        self._lists: OrderedDict[bytes, _Listing] = OrderedDict()
        self._wanted: OrderedDict[bytes, _Listing] = OrderedDict()
        self._closed = False
        self.fetched = 0
        """Pages."""
        self._thread = start_thread("lmtier-s3-list", self._work)

    def find(self, names: Sequence[Name]) -> Found:
        """The part of `names` that is listed. Raises OSError if their list cannot be fetched."""
        with self._changed:
            lists = {prefix: self._list(prefix) for prefix in {name.key[:_MODEL] for name in names}}
            self._wait_for([each for each in lists.values() if not each.is_fetched])
            found = {name: stat for name in names if (stat := lists[name.key[:_MODEL]].names.get(name))}
            if len(found) < len(names):
                now = time.monotonic()
                self._want(each for each in lists.values() if each.is_fetched and each.refetch_at <= now)
            return found

    def note(self, names: Iterable[Name], stat: Stat | None) -> None:
        """These were stored, or are gone."""
        with self._changed:
            for name in names:
                listing = self._list(name.key[:_MODEL])
                if listing.changes_while_fetching is not None:
                    listing.changes_while_fetching[name] = stat
                _put(listing.names, name, stat)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._patience)

    def _list(self, prefix: bytes) -> _Listing:
        if prefix not in self._lists:
            self._lists[prefix] = _Listing(prefix)
            while len(self._lists) > _MOST_LISTS:
                self._wanted.pop(self._lists.popitem(last=False)[0], None)
        self._lists.move_to_end(prefix)
        return self._lists[prefix]

    def _want(self, lists: Iterable[_Listing]) -> None:
        for listing in lists:
            if listing.changes_while_fetching is None and listing.prefix not in self._wanted:
                self._wanted[listing.prefix] = listing
                self._changed.notify_all()

    def _wait_for(self, lists: Sequence[_Listing]) -> None:
        """Each list is waited for once: a long one must not delay every lookup."""
        now = time.monotonic()
        for listing in lists:
            listing.problem = None
            listing.first_wanted_at = listing.first_wanted_at or now
        self._want(lists)
        for listing in lists:
            until = listing.first_wanted_at + self._patience
            while not (listing.is_fetched or listing.problem or self._closed) and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())
            if listing.problem is not None:
                listing.first_wanted_at = 0.0
                raise listing.problem

    # ---- the thread

    def _work(self) -> None:
        while (listing := self._next()) is not None:
            began, pages_before = time.monotonic(), self.fetched
            problem: OSError | None = None
            try:
                names = self._all(listing.prefix)
            except OSError as error:
                problem = error
            except Exception as error:  # noqa: BLE001 - the thread's edge; lookups count it
                problem = ConnectionError(repr(error))
            with self._changed:
                changes, listing.changes_while_fetching = listing.changes_while_fetching or {}, None
                ended = time.monotonic()
                counted_seconds = min(ended - began, _MAX_PAGE_SECONDS * (self.fetched - pages_before))
                listing.refetch_at = ended + max(self._refresh, _SHARE * counted_seconds)
                listing.problem = problem
                if problem is None:
                    for name, stat in changes.items():
                        _put(names, name, stat)
                    listing.names, listing.is_fetched = names, True
                self._changed.notify_all()

    def _next(self) -> _Listing | None:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed)
            if self._closed:
                return None
            _, listing = self._wanted.popitem(last=False)
            listing.changes_while_fetching = {}
            return listing

    def _all(self, prefix: bytes) -> Found:
        found: Found = {}
        next_token, pages_before = "", self.fetched
        while True:
            page, next_token = self._fetch(prefix, next_token)
            self.fetched += 1
            found.update(page)
            if not next_token:
                return found
            if self._closed:
                raise ConnectionError("closed")
            listed_names = len(found) + sum(len(listing.names) for listing in self._others(prefix))
            if listed_names > _MOST_NAMES or self.fetched - pages_before == _MOST_PAGES:
                log.warning("lmtier: s3: of more than %d objects, the rest is not listed", _MOST_NAMES)
                return found

    def _others(self, prefix: bytes) -> list[_Listing]:
        with self._changed:
            return [listing for listing in self._lists.values() if listing.prefix != prefix]


def _put(names: Found, name: Name, stat: Stat | None) -> None:
    if stat is None:
        names.pop(name, None)
    else:
        names[name] = stat
