"""Tokens by model and by tenant: the labels are bounded, and the sums are those of all lookups."""

import hashlib

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.keys import namespace, tenant
from lmtier.format.layout import form_of
from lmtier.observe.breakdown import MOST, Breakdown
from lmtier.server.report import Report
from lmtier.testing import opaque_layout

LAYOUT = opaque_layout(8192)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def keys(model, salt, count):
    head = namespace(model) + tenant(salt)
    return [head + hashlib.sha256(f"{model}{salt}{i}".encode()).digest()[8:] for i in range(count)]


def look(cache, names):
    cache.release(cache.wait(cache.match(names, FORM)))
    reservation = cache.reserve(names, FORM)
    if reservation.chunks:
        cache.commit(reservation)


def told(cache):
    """The tokens asked and hit, by model and by tenant, in the report."""
    report = Report(cache, list, started=0.0).snapshot()
    return [
        {each["name"]: (each["asked"], each["hit"]) for each in found}
        for found in (report["models"], report["tenants"])
    ]


def test_each_lookup_counts_for_its_model_and_its_tenant():
    with Cache(Config(tiers=["cpu://?capacity=8MiB"], chunk_tokens=1, prefault=False)) as cache:
        names = {namespace("qwen3-8b"): "qwen3-8b"}
        shares = {tenant("a"): "team-a"}
        cache.followers.add(Breakdown(cache.metrics, 1, shares, lambda prefix: names.get(prefix, "")))
        for _ in range(2):
            look(cache, keys("qwen3-8b", "a", 3))
            look(cache, keys("unnamed", "b", 5))
        cache.step()
        unnamed = namespace("unnamed").hex()
        models, tenants = told(cache)
        assert models == {"qwen3-8b": (6, 3), unnamed: (10, 5)}
        assert tenants == {"team-a": (6, 3), "other": (10, 5)}


def test_models_beyond_the_bound_are_counted_together():
    with Cache(Config(tiers=["cpu://?capacity=8MiB"], chunk_tokens=1, prefault=False)) as cache:
        cache.followers.add(Breakdown(cache.metrics, 1, {}, lambda prefix: ""))
        for number in range(MOST + 20):
            look(cache, keys(f"model-{number}", "", 1))
        cache.step()
        models, _ = told(cache)
        assert len(models) == MOST + 1
        assert models["other"] == (20, 0)
        assert sum(asked for asked, _ in models.values()) == MOST + 20
