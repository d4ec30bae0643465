"""The unfinished jobs of a tier: the callback of each, which are late, and whether the tier is trusted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from lmtier.errors import log
from lmtier.format.layout import Name
from lmtier.format.objects import EVERYTHING, Selector
from lmtier.observe.metrics import Metrics
from lmtier.rules.breaker import Breaker
from lmtier.tiers.base import Done, Item, Job, Op, Reason, Tier

_OLDEST = 64
"""Only this many of the oldest jobs are checked for being late: there may be a deletion for every chunk."""


@dataclass(eq=False, slots=True)
class _Unfinished:
    op: Op
    names: tuple[Name, ...]
    then: Callable[[Done], None]
    since: float
    """When it was submitted, or one before it in the queue last came back: until then it may have waited."""
    breaker: Breaker


class Jobs:
    def __init__(
        self,
        label: str,
        tier: Tier,
        metrics: Metrics,
        patience: float,
        is_excused: Callable[[Op, Done], bool],
    ) -> None:
        """`is_excused`: the job failed because the storage is full, which is no fault of the tier."""
        self._label = label
        self._tier = tier
        self._metrics = metrics
        self._patience = patience
        self._is_excused = is_excused
        self.up, self.down, self.clearing, self.searching = Breaker(), Breaker(), Breaker(), Breaker()
        self.deleting_again = Breaker()
        """The breaker of repeated deletions. Some objects never go, which tells nothing of others."""
        self._jobs = OrderedDict[int, _Unfinished]()
        """By number, the oldest first."""
        self.last = 0
        """The number of the last submitted job."""
        self._overdue: set[int] = set()
        """The late jobs that were counted as failures."""
        self._came: dict[tuple[Breaker, Op], float] = {}
        """When a job of each kind last came back. Lookups may go on while reads hang, and deletions while
        stores hang."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_moving(self) -> bool:
        """Whether the oldest job may still come back in time."""
        oldest = next(iter(self._jobs.values()), None)
        return oldest is not None and self._silence(oldest) <= self._patience

    @property
    def is_silent(self) -> bool:
        """Whether it has jobs, and has finished nothing for too long."""
        oldest = next(iter(self._jobs.values()), None)
        if oldest is None:
            return False
        return time.monotonic() - max([oldest.since, *self._came.values()]) >= self._patience

    def submit(
        self,
        op: Op,
        items: tuple[Item, ...],
        then: Callable[[Done], None],
        deadline: float | None = None,
        selector: Selector = EVERYTHING,
        is_again: bool = False,
    ) -> None:
        self.last += 1
        job = Job(self.last, op, items, deadline, selector)
        names = tuple(item.name for item in items)
        breaker = self._breaker(op) if selector.is_prefix else self.searching
        breaker = self.deleting_again if is_again else breaker
        self._jobs[job.id] = _Unfinished(op, names, then, time.monotonic(), breaker)
        breaker.sent()
        self._tier.submit(job)

    def poll(self) -> int:
        """Apply the results of the tier. Returns the number of jobs."""
        finished = self._tier.poll()
        now = time.monotonic()
        oldest_done_by_queue: dict[Breaker, int] = {}
        for done in finished:
            job = self._jobs.pop(done.id)
            breaker = self._queue(job)
            oldest_done_by_queue[breaker] = min(done.id, oldest_done_by_queue.get(breaker, done.id))
            self._came[job.breaker, job.op] = now
            self._overdue.discard(done.id)
            if job.op in (Op.STORE, Op.LOAD, Op.PEEK, Op.DELETE, Op.TOUCH):
                for name in job.names:  # a name that is not ok is a miss, also if the tier gave no reason
                    if name not in done.ok:
                        done.failed.setdefault(name, Reason.ERROR)
            self._record(job, done)
            job.then(done)
        for job_id, job in islice(self._jobs.items(), _OLDEST if finished else 0):
            if job_id > oldest_done_by_queue.get(self._queue(job), job_id):
                job.since = now
        return len(finished)

    def blame_late_ones(self) -> None:
        """Each late job counts as a failure of the tier, once.

        A job that waits while others of its kind, or before it, come back is not late: lmtier itself has
        queued so many.
        """
        now = time.monotonic()
        for job_id, job in islice(self._jobs.items(), _OLDEST):
            if now - job.since < self._patience:
                continue
            times = 1 if job.op in (Op.LOAD, Op.PEEK, Op.LOOKUP) else 10  # a large write may take longer
            is_late = self._silence(job) > self._patience * times
            if is_late and job_id not in self._overdue and job.op not in (Op.SCAN, Op.CLEAR):
                self._overdue.add(job_id)
                self._metrics.tier_failures.labels(self._label, job.op.value, "overdue").inc()
                self._judge(job, False, "jobs do not come back")

    def _silence(self, job: _Unfinished) -> float:
        """Seconds of this job in which none of its kind has come back, and none before it."""
        last_return = self._came.get((job.breaker, job.op), job.since)
        return time.monotonic() - max(job.since, last_return)

    def _queue(self, job: _Unfinished) -> Breaker:
        """The breaker of the jobs with which it waits."""
        return self.down if job.breaker is self.deleting_again else job.breaker

    def _breaker(self, op: Op) -> Breaker:
        if op is Op.CLEAR:  # a user may lack the permission for it
            return self.clearing
        return self.up if op in (Op.LOAD, Op.PEEK, Op.LOOKUP, Op.SCAN) else self.down

    def _record(self, job: _Unfinished, done: Done) -> None:
        """Count failures and update the breaker. Absent and corrupt objects are no fault of the tier.

        Nor is a long queue: what only waited tells nothing. While the breaker is open it does, because it may
        be the probe, which has to end.
        """
        for reason in done.failed.values():
            reason_label = "waited" if reason is Reason.DEADLINE and done.has_waited else reason
            self._metrics.tier_failures.labels(self._label, job.op.value, reason_label).inc()
        if done.has_waited and not job.breaker.is_open:
            return
        faults = {Reason.FULL, Reason.ERROR, Reason.DEADLINE} & set(done.failed.values())
        if Reason.FULL in faults and self._is_excused(job.op, done):
            faults.discard(Reason.FULL)
        self._judge(job, not (faults or (done.error and not done.failed)), done.error)

    def _judge(self, job: _Unfinished, ok: bool, error: str) -> None:
        op, breaker = job.op, job.breaker
        was_open = breaker.is_open
        breaker.record(ok, error, op.value)
        if breaker.is_open and not was_open:
            log.warning(
                "lmtier: tier %s: %s keeps failing and is paused for now: %s", self._label, op.value, error
            )
        elif was_open and not breaker.is_open:
            log.info("lmtier: tier %s: %s works again", self._label, op.value)
        if ok and breaker is self.deleting_again and self.down.is_open:
            self._judge(replace(job, breaker=self.down), True, "")  # so other deletions work too
