"""Tokens asked and hit by model and by tenant, with a bound on the labels. No I/O.

A key begins with 4 bytes of its model and 4 bytes of its tenant. Engines send the names of their models; the
names of tenants are those of the shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from lmtier.format.keys import NAMESPACE_BYTES, PREFIX_BYTES
from lmtier.observe.follower import CacheObserver, SettledLookup
from lmtier.observe.metrics import Metrics

MOST = 64
"""The most models that have a label each."""
OTHER = "other"


class Breakdown(CacheObserver):
    def __init__(
        self, metrics: Metrics, chunk_tokens: int, tenants: Mapping[bytes, str], name: Callable[[bytes], str]
    ) -> None:
        """`tenants` has the names of those with a share, by their bytes; `name` names a model by its."""
        self._metrics, self._size = metrics, chunk_tokens
        self._tenants, self._name = tenants, name
        self._seen: list[tuple[bytes, int, int]] = []
        self._models: dict[bytes, str] = {}

    def settled(self, lookup: SettledLookup, missed: dict[str, int]) -> None:
        """On the path of a lookup it only notes; `stepped` counts."""
        keys = lookup.keys
        if keys:
            self._seen.append((keys[0][:PREFIX_BYTES], lookup.asked_tokens, len(lookup.sources)))

    def stepped(self) -> None:
        asked, hit = Counter[bytes](), Counter[bytes]()
        seen, self._seen = self._seen, []
        for prefix, tokens, chunks in seen:
            asked[prefix] += tokens
            hit[prefix] += chunks * self._size
        for prefix in asked:
            model = self._model(prefix[:NAMESPACE_BYTES])
            tenant = self._tenants.get(prefix[NAMESPACE_BYTES:], OTHER)
            for outcome, sums in (("asked", asked), ("hit", hit)):
                self._metrics.model_tokens.labels(model, outcome).inc(sums[prefix])
                self._metrics.tenant_tokens.labels(tenant, outcome).inc(sums[prefix])

    def _model(self, namespace: bytes) -> str:
        """The name of a model. It never changes, because it is a label."""
        if namespace not in self._models and len(self._models) < MOST:
            self._models[namespace] = self._name(namespace) or namespace.hex()
        return self._models.get(namespace, OTHER)
