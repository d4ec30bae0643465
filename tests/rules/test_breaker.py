"""A breaker opens after failures in a row, pauses for longer after each probe, and remembers its outage."""

from lmtier.rules.breaker import Breaker, Outage


def test_it_remembers_its_last_outage():
    now = [100.0]
    breaker = Breaker(lambda: now[0])
    assert breaker.outage is None
    for number in range(Breaker.FAILURES - 1):
        breaker.record(False, f"error {number}")
    assert breaker.outage is None, "so few are no outage"
    breaker.record(False, "refused")
    assert breaker.outage == Outage(100.0, None, "refused")
    now[0] = 160.0
    breaker.record(False, "no answer in time")
    assert breaker.outage == Outage(100.0, None, "no answer in time"), "still the same one"
    breaker.record(True)
    assert breaker.outage == Outage(100.0, 160.0, "no answer in time")
    now[0] = 200.0
    breaker.record(True)
    assert breaker.outage == Outage(100.0, 160.0, "no answer in time")
    for _ in range(Breaker.FAILURES):
        breaker.record(False, "full")
    assert breaker.outage == Outage(200.0, None, "full")


def test_only_a_failed_probe_makes_the_next_pause_longer():
    """Jobs that were in flight when it opened tell of the same outage."""
    now = [100.0]
    breaker = Breaker(lambda: now[0])
    for _ in range(Breaker.FAILURES + 9):
        breaker.record(False, "refused")
    now[0] += Breaker.PAUSES[0]
    assert breaker.allows()
    breaker.sent()
    assert not breaker.allows(), "one probe at a time"
    breaker.record(False, "refused")
    now[0] += Breaker.PAUSES[0]
    assert not breaker.allows()
    now[0] += Breaker.PAUSES[1] - Breaker.PAUSES[0]
    assert breaker.allows()


def test_another_kind_of_job_does_not_end_an_outage():
    """A disk without its directory deletes all day, and a Redis without room too."""
    now = [100.0]
    breaker = Breaker(lambda: now[0])
    for _ in range(Breaker.FAILURES):
        breaker.record(False, "no such directory", "store")
        breaker.record(True, kind="delete")
    assert breaker.is_open, "deletions that work hide no stores that fail"
    for _ in range(3):
        now[0] += 10.0
        assert breaker.allows()
        breaker.sent()
        breaker.record(True, kind="delete")
        assert breaker.allows(), "a store may be tried at once"
        breaker.sent()
        breaker.record(False, "no such directory", "store")
    assert breaker.outage == Outage(100.0, None, "no such directory")
    breaker.record(False, "refused", "delete")
    breaker.record(True, kind="delete")
    assert breaker.outage.until == 130.0, "what failed too shows that it works"
