"""Every counter is exact: a test that watches from outside comes to the same numbers."""

import hashlib
import random
from collections import Counter, defaultdict

import prometheus_client
import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError
from lmtier.format.layout import form_of
from lmtier.observe.metrics import DROP_REASONS, LABELS, MISS_REASONS, Metrics
from lmtier.testing import MemoryTier, opaque_layout
from lmtier.tiers.base import Op, Reason

LAYOUT = opaque_layout(8192)  # of one token
FORM = form_of(LAYOUT, (LAYOUT.whole,))
SLAB, DISK = 10, 24
LENGTH = 7
CHAINS = [[hashlib.sha256(b"%d %d" % (chain, i)).digest() for i in range(LENGTH)] for chain in range(7)]


class Watched(MemoryTier):
    """Notes what it was asked, and what it answered; fails at what it is told to."""

    def __init__(self):
        self.broken = set()
        self.jobs = {}
        self.seen: Counter[tuple[Op, str]] = Counter()
        self.failed: Counter[bytes] = Counter()
        """How often each key could not be read since it was stored or read."""
        super().__init__()

    def submit(self, job):
        self.jobs[job.id] = job
        super().submit(job)

    def poll(self):
        finished = super().poll()
        for done in finished:
            job = self.jobs.pop(done.id)
            for item in job.items:
                what = done.failed.get(item.name, "ok")
                self.seen[job.op, what] += 1
                if (job.op, what) == (Op.LOAD, Reason.ERROR):
                    self.failed[item.name.key] += 1
                elif what == "ok":
                    del self.failed[item.name.key]
        return finished

    def read(self, item, buffers):
        if item.name.key in self.broken:
            raise OSError("as told")
        return super().read(item, buffers)

    def write(self, item, buffers):
        if item.name.key in self.broken:
            raise OSError("as told")
        super().write(item, buffers)


class Asked(Watched):
    keeps = False


class World:
    """A cache over two tiers, and what somebody who watches it knows."""

    def __init__(self, write):
        self.tiers = {"disk": Watched(), "redis": Asked()}
        urls = [
            f"cpu://?capacity={SLAB * FORM.slab_bytes}&policy=lru",
            f"disk:///x?capacity={DISK * FORM.stored_bytes}&policy=lru&write={write}",
            "redis://x",
        ]
        opened = dict(zip(urls[1:], self.tiers.values(), strict=True))
        self.cache = Cache(Config(tiers=urls, chunk_tokens=1, prefault=False), tiers=opened)
        self.now: Counter[tuple[str, ...]] = Counter()
        """Samples by name and labels, as they should be."""
        disk = self.cache.lower.owned[0].index
        assert disk is not None
        self.places = {"cpu": self.cache.index, "disk": disk}
        self.ghosts: dict[str, set[bytes]] = {}
        """Who was evicted, and has not come back."""
        for place, index in self.places.items():
            self.watch(place, index)

    def watch(self, place, index):
        """See who is taken out to make room, whoever counts it."""
        add, evict, ghosts = index.add_run, index.evict, self.ghosts.setdefault(place, set())

        def watched_add(keys, *rest):
            ghosts.difference_update(keys)
            return add(keys, *rest)

        def watched_evict(*args, **options):
            victims = evict(*args, **options)
            for victim in victims or ():
                ghosts.add(victim.key)
                can_be_read = self.tiers["disk"].failed[victim.key] < 2
                written = place == "disk" or (victim.key in self.places["disk"] and can_be_read)
                self.now["evictions_total", place, "capacity" if written else "capacity_unwritten"] += 1
            return victims

        index.add_run, index.evict = watched_add, watched_evict

    def settle_down(self):
        self.cache.flush(10)
        assert not any(below.backlog for below in self.cache.lower)

    # ---- what is done

    def save(self, keys, first, commits):
        reservation = self.cache.reserve(keys, FORM, first=first)
        fresh, dropped = len(reservation.chunks), reservation.dropped
        self.now["skipped_tokens_total",] += len(keys) - fresh - dropped
        self.now["dropped_tokens_total", "cpu", "no_room"] += dropped
        if commits:
            if fresh:
                self.cache.commit(reservation)
            self.now["stored_tokens_total", "cpu"] += fresh
        else:
            if fresh:
                self.cache.abort(reservation)
            self.now["dropped_tokens_total", "cpu", "aborted"] += fresh
        self.settle_down()

    def look(self, keys, more, how):
        match = self.cache.match(keys, FORM, tokens=len(keys) + more)
        there = len(match.run)
        while how == "takes two" and match.pending_lookups:
            self.cache.flush(0.01)
        at_once = match.sources[:] if match.is_ready else []
        if how == "waits":
            self.cache.wait(match)
        elif how == "takes two":
            self.cache.prefetch(match, 2)
            self.cache.wait(match)
        if how == "leaves" and not match.is_ready:
            got, found, cut = match.sources[: len(match.run)], match.chunks, "cancelled"
        elif at_once:  # the lookup ended there: what is taken of it is the caller's affair
            got, found, cut = at_once, 0, ""
        else:
            got, found, cut = match.sources, match.found, match.cut_reason
        is_known = how != "leaves" or not match.pending_lookups
        self.now["worth_decisions_total",] += is_known and max(match.chunks, match.found) > there
        self.now["lookups_total",] += 1
        self.now["lookup_seconds_count",] += bool(keys)
        self.now["asked_tokens_total",] += len(keys) + more
        self.now["missed_tokens_total", "partial_chunk"] += more
        for tier in got:
            self.now["hit_tokens_total", tier] += 1
        for i, key in enumerate(keys[len(got) :], len(got)):
            if i < found:
                reason = cut
            elif any(key in index for index in self.places.values()):
                reason = "behind_a_gap"
            else:
                was_there = any(key in ghosts for ghosts in self.ghosts.values())
                reason = "evicted" if was_there else "never_stored"
            self.now["missed_tokens_total", reason] += 1
        self.cache.release(match)
        self.settle_down()

    def forget(self, key):
        if (entry := self.cache.index.get(key)) is not None:
            self.cache.discard(entry.key, entry.form)
        self.settle_down()

    def harm(self, dice):
        """One key that its tier cannot read or write, and one object that is damaged or lost."""
        tier = dice.choice(list(self.tiers.values()))
        tier.broken = {dice.choice(dice.choice(CHAINS))}
        if tier.objects:
            name = dice.choice(sorted(tier.objects))
            if dice.random() < 0.5:
                tier.objects[name] = tier.objects[name][:-1] + b"?"
            else:
                del tier.objects[name]

    # ---- what is told

    def told(self):
        told: dict[tuple[str, ...], float] = defaultdict(float)
        for family in self.cache.metrics.registry.collect():
            for sample in family.samples if family.type in ("counter", "histogram") else ():
                name = sample.name.removeprefix("lmtier_")
                labels = [sample.labels[label] for label in ORDER if label in sample.labels]
                if not name.endswith(("_created", "_bucket", "_seconds_sum")):
                    told[name, *labels] += sample.value
        return told

    def expected(self):
        expected = Counter(self.now)
        for label, tier in self.tiers.items():
            for (op, what), count in tier.seen.items():
                if what != "ok":
                    expected["tier_failures_total", label, op.value, what] += count
                    if op is Op.STORE:
                        expected["dropped_tokens_total", label, what] += count
                elif op in (Op.STORE, Op.LOAD):
                    way = "down" if op is Op.STORE else "up"
                    expected["transfer_bytes_count", label, way] += count
                    expected["transfer_bytes_sum", label, way] += count * FORM.stored_bytes
                    expected["transfer_seconds_count", label, way] += count
                    if op is Op.STORE:
                        expected["stored_tokens_total", label] += count
        for (what, *labels), count in list(expected.items()):
            if what == "dropped_tokens_total":  # a chunk is one token here
                nbytes = FORM.slab_bytes if labels[0] == "cpu" else FORM.stored_bytes
                expected["dropped_objects_total", *labels] = count
                expected["dropped_bytes_total", *labels] = count * nbytes
        return expected


ORDER = ("tier", "op", "direction", "cause", "reason")  # of labels


@pytest.mark.parametrize("seeds", [range(4), range(4, 8), range(8, 12)])
def test_every_counter_is_what_an_observer_counted(seeds):
    kinds = set()
    for seed in seeds:
        kinds |= compare(seed)
    wanted = {"never_stored", "evicted", "behind_a_gap", "partial_chunk", "absent", "corrupt", "error"}
    assert kinds >= wanted | {"cancelled", "not_worth_it", "cpu", "disk", "redis"}, "all kinds were tried"


def compare(seed):
    """After each call of random traffic all counters are right. The tiers and reasons that occurred."""
    dice = random.Random(seed)
    world = World(("always", "reused", "evicted", "always")[seed % 4])
    with world.cache as cache:
        for _ in range(250):
            keys = dice.choice(CHAINS)[: dice.randint(0, LENGTH)]
            match dice.choices(["save", "look", "forget", "seen", "harm"], [5, 8, 0.3, 1, 1])[0]:
                case "save":
                    world.save(keys, dice.choice([0, 0, 0, 2]), dice.random() < 0.9)
                case "look":
                    how = dice.choice(["waits", "waits", "takes two", "leaves"])
                    world.look(keys, dice.randint(0, 2), how)
                case "forget":
                    world.forget(dice.choice(dice.choice(CHAINS)))
                case "seen":
                    cache.touch(keys)
                    world.settle_down()
                case "harm":
                    world.harm(dice)
            told, expected = world.told(), world.expected()
            for name in told.keys() | expected.keys():
                assert told[name] == expected[name], name
            cache.check()
        metrics = cache.metrics
        hit = metrics.sums(metrics.hit_tokens, "tier")
        missed = metrics.sums(metrics.missed_tokens, "reason")
        assert metrics.value("lmtier_asked_tokens_total") == sum(hit.values()) + sum(missed.values())
        assert metrics.value("lmtier_chunks", tier="cpu") == len(cache.index)
        assert metrics.value("lmtier_used_bytes", tier="cpu") == cache.index.used <= SLAB * FORM.slab_bytes
        assert metrics.value("lmtier_leased_bytes") == 0
        dropped = metrics.sums(metrics.dropped_tokens, "reason")
        assert dropped.keys() <= DROP_REASONS.keys()
    return {name for counts in (hit, missed) for name, tokens in counts.items() if tokens}


def test_damage_that_any_read_finds_shows_as_a_rise_from_0():
    """Prometheus sees no rise in a counter that begins at 1."""
    with World("always").cache as cache:
        failures = cache.metrics.sums(cache.metrics.tier_failures, "op", "reason")
        assert failures["load corrupt"] == failures["peek corrupt"] == 0


# ---- what is declared


def test_every_label_is_explained_and_nothing_else_is():
    assert {label for each in Metrics().declared for label in each.labels} == LABELS.keys()


def test_a_reason_that_nobody_declared_is_not_counted():
    metrics = Metrics()
    metrics.settle(1, {}, {"no such reason": 1})
    with pytest.raises(KeyError):
        metrics.count()


def test_a_token_cannot_be_forgotten():
    metrics = Metrics()
    metrics.settle(3, {"cpu": 1}, {"evicted": 1})
    with pytest.raises(AssertionError, match="neither hit nor missed"):
        metrics.count()


def test_the_recent_hit_ratio_covers_a_thousand_lookups():
    metrics = Metrics()
    for _ in range(300):
        metrics.settle(4, {"cpu": 4}, {})
    assert metrics.value("lmtier_recent_hit_ratio") == 1
    for _ in range(900):
        metrics.settle(4, {}, {"evicted": 4})
    assert metrics.value("lmtier_recent_hit_ratio") == pytest.approx(0.1)


def test_a_chunk_of_another_layout_is_dropped_as_foreign():
    other = opaque_layout(4096)
    with World("always").cache as cache:
        cache.commit(cache.reserve(CHAINS[0], FORM))
        assert cache.reserve(CHAINS[0], form_of(other, (other.whole,))).dropped == LENGTH
        dropped = cache.metrics.sums(cache.metrics.dropped_tokens, "reason")
        assert {reason for reason, tokens in dropped.items() if tokens} == {"foreign"} <= DROP_REASONS.keys()


def test_whatever_a_tier_fails_with_is_a_reason():
    assert {reason.value for reason in Reason} <= MISS_REASONS.keys()
    of_loads = {Reason.ABSENT, Reason.CORRUPT, Reason.UNSEALED}
    assert {reason.value for reason in set(Reason) - of_loads} <= DROP_REASONS.keys()


def test_histograms_go_on_after_a_takeover():
    one, other = Metrics(), Metrics()
    for metrics in (one, other):
        for seconds in (1e-5, 1e-3, 0.2, 1e9):
            metrics.lookup_seconds.observe(seconds)
            metrics.transfer_seconds.labels("disk", "up").observe(seconds)
    other.restore(one.dump())
    before = [each for each in one.dump() if each[0] in ("lookup_seconds", "transfer_seconds")]
    after = [each for each in other.dump() if each[0] in ("lookup_seconds", "transfer_seconds")]
    assert len(before) == 2
    assert [each[:2] for each in after] == [each[:2] for each in before]
    for (*_, then), (*_, now) in zip(before, after, strict=True):
        assert now == {part: 2 * number for part, number in then.items()}


def test_a_library_whose_histograms_cannot_go_on_is_refused(monkeypatch):
    class Renamed(prometheus_client.Histogram):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            vars(self).pop("_buckets", None)

    monkeypatch.setattr("lmtier.observe.metrics.Histogram", Renamed)
    with pytest.raises(ConfigError, match="has no _buckets in its Histogram"):
        Metrics()
