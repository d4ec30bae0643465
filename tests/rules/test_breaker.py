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
