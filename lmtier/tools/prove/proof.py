"""The proof: each stage asks questions whose answers must agree, and records those that do not.

A reference is the first answer to a prompt, under a salt that no other question has, so that nothing could
have been reused for it. How far references of one prompt lie apart is measured first: an engine is seldom
exact. Then each prompt is asked again in every way in which a cache serves it.

An engine without salts is asked again after its cache is emptied. Then only an answer for which it reused
nothing shows how far it moves alone.
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from queue import Empty, SimpleQueue
from typing import TypeVar

from lmtier.errors import LMTierError
from lmtier.threads import start_thread
from lmtier.tools.prove.compare import Noise, distance
from lmtier.tools.prove.endpoint import Completion, Endpoint, NoAnswer, Query
from lmtier.tools.prove.prompts import PlantedPrompt, PromptWriter, image, length

T = TypeVar("T")
R = TypeVar("R")

RESET = "/reset_prefix_cache"
"""vLLM's, in its development mode: it empties the engine's own prefix cache, and no cache below it."""
_SETTLE = 0.5
"""Seconds after which an engine has stored what it computed."""
_TEMPLATE = 64
"""Tokens that prompts may have in common, such as those of a chat template."""
_SLOWER = 0.5
"""A first token in less than this part of the time that the reference took is a sign of reuse."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is asked. `short` takes about a minute on a small engine, the whole one some more."""

    prompts: int
    longest: int
    partings: int
    aborted: int
    convoy: int
    convoy_tokens: int
    crowds: tuple[int, ...]

    @classmethod
    def whole(cls) -> Effort:
        return cls(12, 4000, 24, 100, 50, 10_000, (8, 32))

    @classmethod
    def short(cls) -> Effort:
        return cls(4, 1400, 6, 12, 8, 1400, (8,))


@dataclass(frozen=True, slots=True)
class Difference:
    """One answer that is wrong, or that did not come."""

    stage: str
    what: str
    prompt: str
    wanted: str = ""
    got: str = ""
    moved: float = 0.0


@dataclass(slots=True)
class Stage:
    """A row of the report."""

    name: str
    asked: int = 0
    compared: int = 0
    reusing: int = 0
    """Comparisons whose second answer was computed from reused KV."""
    reused: int = 0
    """Tokens of those, where the engine says how many."""
    largest: float = 0.0
    findings: list[Difference] = field(default_factory=list)
    note: str = ""
    is_tested: bool = True
    seconds: float = 0.0


@dataclass(slots=True)
class Case:
    """A question, and its reference."""

    question: Query
    code: str
    reference: Completion


class Proof:
    def __init__(
        self,
        engine: Endpoint,
        plan: Effort,
        *,
        seed: int | None = None,
        reset: str = RESET,
        restart: str = "",
        baseline: Endpoint | None = None,
    ) -> None:
        self.engine, self.effort, self.baseline = engine, plan, baseline
        self._reset, self._restart = reset, restart
        self._has_new_prompts = seed is None
        """Whether no cache can have these prompts from an earlier run."""
        self._seed = secrets.randbits(31) if seed is None else seed
        self._dice = random.Random(self._seed)
        self.author = PromptWriter(self._seed, writes_text=True)
        self.noise = Noise()
        self.sensitivity = 0.0
        """How far an answer moves if one early word is another: the smallest that was seen."""
        self._reach = inf
        """Half of the median of those that were seen, if early words matter."""
        self.needles = [0, 0, 0]
        """Facts that were asked for, found in references, and found again."""
        self.throughput: dict[str, float] = {}
        self.stages: list[Stage] = []
        self.is_whole = False
        """Whether all stages have run: it was not interrupted, and did not end with the first finding."""
        self._stage = Stage("")
        self._cases: list[Case] = []
        self._run = secrets.token_hex(8)
        """Names its salts: with the same seed, the next run has others."""
        self._salts = 0
        self._can_reset = False
        self._resets_by_flooding = False
        """Whether the reset is by asking so much else that the engine's own cache forgets."""

    @property
    def findings(self) -> list[Difference]:
        return [finding for stage in self.stages for finding in stage.findings]

    @property
    def wrong(self) -> list[Difference]:
        """The findings but for those that may be rounding.

        Where rounding was not measured, a difference counts if it is half as large as that of another word.
        """
        if self.noise.pairs:
            return self.findings
        return [each for each in self.findings if not each.moved or self._reach <= each.moved < inf]

    @property
    def reusing(self) -> int:
        return sum(stage.reusing for stage in self.stages)

    def run(self, report: Callable[[str], None] = lambda _: None, *, first: bool = False) -> None:
        """`report` is called with the name of each stage when it begins. `first`: end with its findings."""
        self._begin()
        for name, stage in self._table:
            if first and self.wrong:
                return
            self._stage = Stage(name)
            self.stages.append(self._stage)
            report(name)
            began, asked = time.monotonic(), self.engine.asked
            stage()
            self._stage.seconds = time.monotonic() - began
            self._stage.asked = self.engine.asked - asked
        self.is_whole = True

    @property
    def _table(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("the engine alone", self._alone),
            ("one early word is another", self._control),
            ("asked again at once", self._again),
            ("restored", self._restored),
            *((f"restored, {crowd} at a time", self._crowd(crowd)) for crowd in self.effort.crowds),
            ("prompts that part inside a block", self._partings),
            ("another salt", self._other_salts),
            ("sampled with a seed", self._sampled),
            ("adapters", self._adapters),
            ("images", self._images),
            ("many abort", self._storm),
            ("a convoy with one prefix", self._convoy),
            ("more than the engine has room for", self._starved),
            ("nothing to reuse", self._fresh),
            ("after a restart", self._after_restart),
        ]

    @property
    def size(self) -> int:
        """The number of stages."""
        return len(self._table)

    # ---- asking

    def _begin(self) -> None:
        """Find out what kind of prompt the engine takes, and how its own cache is emptied."""
        text = self.author.prompt(40).prompt
        ids = PromptWriter(self._seed, writes_text=False)
        if not self.engine.learn_dialect(text):
            if not self.engine.learn_dialect(ids.prompt(40).prompt):
                # Its own words for why, of the plainest question.
                self.engine.ask(Query(text, tokens=1))
            self.author = ids
        self._can_reset = bool(self._reset) and self.engine.post(self._reset)
        self._resets_by_flooding = not self._can_reset and 0 < self.engine.capacity <= 2_000_000
        self._can_reset |= self._resets_by_flooding

    def _length(self, share: float) -> int:
        """The length of a prompt: a share of the longest that this plan or the engine takes."""
        longest = self.engine.model.longest or self.effort.longest * 2
        return max(64, int(share * min(self.effort.longest, longest * 0.7)))

    def _salt(self) -> str:
        self._salts += 1
        return f"prove-{self._run}-{self._salts}" if self.engine.offers_salts else ""

    def _ask(self, question: Query) -> Completion | None:
        """None: there was no answer, which is a finding."""
        try:
            answer = self.engine.ask(question)
        except NoAnswer as error:
            self._record_finding(str(error), question)
            return None
        if not answer.choice:
            self._record_finding("the answer is empty", question)
            return None
        return answer

    def _ask_all(self, questions: Sequence[Query], at_a_time: int) -> list[Completion | None]:
        return together(self._ask, questions, at_a_time)

    def _record_finding(
        self,
        what: str,
        question: Query | None = None,
        wanted: Completion | None = None,
        got: Completion | None = None,
        moved: float = 0.0,
    ) -> None:
        prompt = _excerpt(question) if question else ""
        self._stage.findings.append(
            Difference(self._stage.name, what, prompt, _said(wanted), _said(got), moved)
        )

    def _case(self, made: PlantedPrompt, **how: object) -> Case | None:
        """Ask for the first time, where salts are offered under a new one."""
        question = Query(made.prompt, **how)  # type: ignore[arg-type]
        reference = self._ask(replace(question, salt=self._salt()))
        if reference is None:
            return None
        shares = question.choices > 1  # they may share their prompt's KV with each other
        if self.engine.offers_salts and not shares and (reference.cached or 0) > _TEMPLATE:
            self._record_finding(
                f"{reference.cached} tokens were reused for a prompt that was never asked before", question
            )
        return Case(question, made.code, reference)

    def _compare(self, case: Case, answer: Completion | None, *, widens: bool = False) -> None:
        """`widens`: what differs here says what the engine alone does."""
        if answer is None:
            return
        stage, reference = self._stage, case.reference
        moved = max(map(distance, reference.choices, answer.choices))
        stage.compared += 1
        stage.largest = max(stage.largest, moved)
        if self._reused(case, answer):
            stage.reusing += 1
            stage.reused += answer.cached or 0
        if widens:
            self.noise.learn(moved)
        elif moved > self.noise.limit:
            self._record_finding("the answer is another one", case.question, reference, answer, moved)

    def _reused(self, case: Case, answer: Completion) -> bool:
        if answer.cached is not None:
            return answer.cached > _TEMPLATE
        return answer.first_token_seconds < _SLOWER * case.reference.first_token_seconds

    def _is_anew(self, case: Case, answer: Completion) -> bool:
        """Without salts only the engine itself can say so: a cache below may be slow."""
        return not self._reused(case, answer) and (self.engine.offers_salts or answer.cached is not None)

    def _compare_all(self, cases: Sequence[Case], at_a_time: int = 1) -> None:
        for case, answer in zip(
            cases, self._ask_all([each.question for each in cases], at_a_time), strict=True
        ):
            self._compare(case, answer)

    def _skip(self, why: str) -> None:
        self._stage.is_tested, self._stage.note = False, why

    def _reset_engine_cache(self) -> bool:
        """Empty the engine's own prefix cache, so that what is reused comes from below it.

        False: that cannot be done.
        """
        if not self._can_reset:
            self._skip(
                "the engine's own cache cannot be emptied: start vLLM with VLLM_SERVER_DEV_MODE=1, or say how"
                " with --reset"
            )
            return False
        time.sleep(_SETTLE)
        if not self._resets_by_flooding:
            return self.engine.post(self._reset)
        size = self._length(1.0)
        flooding_queries = [
            Query(self.author.prompt(size).prompt, salt=self._salt(), tokens=1)
            for _ in range(1 + self.engine.capacity * 5 // 4 // size)
        ]
        self._ask_all(flooding_queries, 4)
        return True

    # ---- stages

    def _alone(self) -> None:
        """The same prompts again, computed anew: one after the other, and together."""
        for number in range(self.effort.prompts):
            # Two of each length: what is named by length alone is found.
            share = 0.2 + 0.8 * (number // 2 * 2) / self.effort.prompts
            case = self._case(self.author.prompt(self._length(share), asks_for=number % 3))
            if case is not None:
                self._cases.append(case)
        for at_a_time in (1, 8):
            if not self.engine.offers_salts and not self._reset_engine_cache():
                return
            again = [replace(each.question, salt=self._salt()) for each in self._cases]
            for case, answer in zip(self._cases, self._ask_all(again, at_a_time), strict=True):
                if answer is not None and self._is_anew(case, answer):
                    self._compare(case, answer, widens=True)
        if not self.noise.pairs:
            self._stage.note = "its noise is not known: for each answer it may have reused something"
            return
        self._stage.note = (
            f"log-probabilities move by {self.noise.largest:.2g} at most"
            if self.noise.is_known
            else "it answers one prompt in two ways, and does not say how near they are"
        )

    def _control(self) -> None:
        """Whether an early word matters to the answer: otherwise agreement would say little."""
        if not self.noise.is_known:
            self._skip("the engine alone answers one prompt in two ways")
            return
        moves = self._moves()
        if moves and min(moves) <= self.noise.limit and self.author.writes_text:
            # A model that has no use for these words: ids that are drawn evenly may move it.
            ids = PromptWriter(self._seed, writes_text=False)
            if self.engine.learn_dialect(ids.prompt(40).prompt):
                self.author, self._cases, self.noise = ids, [], Noise()
                self._alone()
                moves = self._moves()
        self.sensitivity = min(moves, default=0.0)
        if self.sensitivity <= self.noise.limit:
            self._skip("one early word does not move the answers: agreement says little about early tokens")
            return
        self._reach = statistics.median(moves) / 2
        if self.sensitivity == inf:
            self._stage.note = "it makes another answer"
        else:
            self._stage.note = f"it moves the answer by {self.sensitivity:.2g} at least"

    def _moves(self) -> list[float]:
        distances = []
        for case in self._cases[:4]:
            altered_prompt = self.author.with_one_change(PlantedPrompt(case.question.prompt), 0.15)
            answer = self._ask(replace(case.question, prompt=altered_prompt, salt=self._salt()))
            if answer is not None:
                distances.append(distance(case.reference.choice, answer.choice))
        return distances

    def _again(self) -> None:
        """First without a salt, then at once again."""
        is_unknown = self.engine.offers_salts and self._has_new_prompts
        for case, answer in zip(self._cases, self._ask_all(self._questions(), 1), strict=True):
            if is_unknown and answer is not None and (answer.cached or 0) > _TEMPLATE:
                self._record_finding(
                    f"{answer.cached} tokens were reused that were only ever asked under another salt",
                    case.question,
                )
            self._compare(case, answer)
        self._compare_all(self._cases)

    def _questions(self) -> list[Query]:
        return [each.question for each in self._cases]

    def _restored(self) -> None:
        if self._reset_engine_cache():
            self._compare_all(self._cases)
            self._count_needles()

    def _count_needles(self) -> None:
        for case in self._cases:
            if case.code:
                self.needles[0] += 1
                self.needles[1] += case.code in case.reference.text[0]
        for case, answer in zip(self._cases, self._ask_all(self._questions(), 1), strict=True):
            if case.code and answer is not None:
                self.needles[2] += case.code in answer.text[0]

    def _crowd(self, at_a_time: int) -> Callable[[], None]:
        def stage() -> None:
            if self._reset_engine_cache():
                cases = self._cases * (1 + (at_a_time - 1) // max(1, len(self._cases)))
                self._compare_all(cases[: max(at_a_time, len(self._cases))], at_a_time)

        return stage

    def _partings(self) -> None:
        """One prompt is stored; then others that have its first words, up to each of these places."""
        base = self.author.prompt(self._length(0.6))
        total = length(base.prompt)
        branch_points = {16, 17, 31, 255, 256, 257, 511, 513, total // 2, total - 2}
        branch_points = {point for point in branch_points if 2 < point < total - 1}
        while len(branch_points) < min(self.effort.partings, total - 4):
            branch_points.add(self._dice.randrange(3, total - 1))
        chosen = self._dice.sample(sorted(branch_points), min(self.effort.partings, len(branch_points)))
        if not self.engine.offers_salts:
            self._skip("the engine has no salts, so such prompts have no reference")
            return
        branches = [self.author.diverging_after(base, place) for place in sorted(chosen)]
        branches.append(self.author.with_one_change(base, 0.15))  # most of its chunks have the same tokens
        cases = [case for prompt in branches if (case := self._case(PlantedPrompt(prompt))) is not None]
        self._ask(Query(base.prompt))
        for _ in range(2):  # at first from what the base has stored, then from what each has added to it
            if self._can_reset:
                self._reset_engine_cache()
            self._compare_all(cases)

    def _other_salts(self) -> None:
        """What one tenant asked is not reused for another one."""
        if not self.engine.offers_salts:
            self._skip("the engine has no salts")
            return
        times = []
        for case in self._cases[:4]:
            answer = self._ask(replace(case.question, salt=self._salt()))
            self._compare(case, answer)
            if answer is None:
                continue
            times.append(answer.first_token_seconds / case.reference.first_token_seconds)
            if (answer.cached or 0) > _TEMPLATE:
                self._record_finding(f"{answer.cached} tokens of another salt were reused", case.question)
        if self._stage.compared and self._cases[0].reference.cached is None:
            slow = statistics.median(times)
            self._stage.note = f"the first token takes {slow:.2f} of the time of the first ask"

    def _sampled(self) -> None:
        cases = []
        for number in range(2):
            made = self.author.prompt(self._length(0.5))
            case = self._case(made, choices=3, seed=self._seed + number)
            if case is not None:
                cases.append(case)
        self._compare_all(cases)
        self._compare_all(cases)
        if self._can_reset and self._reset_engine_cache():
            self._compare_all(cases)

    def _adapters(self) -> None:
        """The same prompts with each adapter and without: each must answer as it did alone."""
        if not self.engine.adapters:
            self._skip("the engine lists no adapters")
            return
        cases = []
        for _ in range(2):
            made = self.author.prompt(self._length(0.6))
            for model in ("", *(each.name for each in self.engine.adapters[:3])):
                if (case := self._case(made, model=model)) is not None:
                    cases.append(case)
        self._compare_all(cases)
        if self._can_reset and self._reset_engine_cache():
            self._compare_all(cases)

    def _images(self) -> None:
        """Two images under one text, each first under a new salt."""
        made = self.author.prompt(self._length(0.5)) if self.author.writes_text else None
        text = made.prompt if made is not None else "w5 w6"
        pictures = [image(self._seed + number) for number in range(2)]
        try:
            self.engine.ask(Query(text, salt=self._salt(), image=pictures[0], tokens=1))
        except NoAnswer as error:
            self._skip(f"the engine takes no images ({str(error)[:60]}…)")
            return
        cases = [
            case for each in pictures if (case := self._case(PlantedPrompt(text), image=each)) is not None
        ]
        if (
            len(cases) == 2
            and distance(cases[0].reference.choice, cases[1].reference.choice) <= self.noise.limit
        ):
            self._stage.note = "the model answers both images alike: little is proven"
        for order in (cases, cases[::-1]):
            self._compare_all(order)
            if self._can_reset:
                self._reset_engine_cache()
        self._compare_all(cases)

    def _storm(self) -> None:
        """Streams that are cut at any moment; afterwards all is as before."""
        usual_seconds = statistics.median([each.reference.took for each in self._cases] or [1.0])
        case_queries = self._questions()
        questions = [
            self._dice.choice(case_queries)
            if case_queries and number % 2
            else Query(self.author.prompt(self._length(0.8)).prompt, tokens=64)
            for number in range(self.effort.aborted)
        ]
        hang_up_times = [self._dice.uniform(0, 1.5 * usual_seconds) for _ in questions]
        cuts = list(zip(questions, hang_up_times, strict=True))
        together(lambda each: self.engine.cut(*each), cuts, 16)
        if self._can_reset:
            self._reset_engine_cache()
        self._compare_all(self._cases)

    def _convoy(self) -> None:
        """Many requests with one long prefix, all at once; four of them have a reference."""
        longest = self.engine.model.longest or self.effort.convoy_tokens * 2
        base = self.author.prompt(min(self.effort.convoy_tokens, int(longest * 0.7)))
        near_end = length(base.prompt) - 40
        members = [self.author.diverging_after(base, near_end) for _ in range(self.effort.convoy)]
        cases = [case for each in members[:4] if (case := self._case(PlantedPrompt(each))) is not None]
        self._ask(Query(base.prompt))
        if self._can_reset:
            self._reset_engine_cache()
        questions = [case.question for case in cases] + [Query(each) for each in members[4:]]
        self._all_together(cases, questions)

    def _starved(self) -> None:
        if not self.engine.capacity:
            self._skip("the engine does not say how many tokens it has room for")
            return
        size = self._length(1.0)
        count = self.engine.capacity * 3 // 2 // size + 1
        if count > 4 * self.effort.convoy:
            self._skip(f"it has room for {self.engine.capacity:,} tokens: too many to fill in this plan")
            return
        prompts = [self.author.prompt(size) for _ in range(count)]
        cases = [case for each in prompts[:4] if (case := self._case(each)) is not None]
        self._all_together(
            cases, [case.question for case in cases] + [Query(each.prompt) for each in prompts[4:]]
        )

    def _all_together(self, cases: Sequence[Case], questions: Sequence[Query]) -> None:
        answers = self._ask_all(questions, len(questions))
        for case, answer in zip(cases, answers, strict=False):
            self._compare(case, answer)
        times = sorted(each.first_token_seconds for each in answers if each is not None)
        if times:
            self._stage.note = (
                f"{len(times)} of {len(questions)} answered; first token after"
                f" {statistics.median(times):.2f} s (median), {times[-1]:.2f} s (last)"
            )

    def _fresh(self) -> None:
        """Throughput of prompts that have nothing in common; beside a baseline, if one is given."""
        asks: dict[str, Callable[[Query], Completion | None]] = {"engine": self._ask}
        if self.baseline is not None:
            self.baseline.learn_dialect(self.author.prompt(40).prompt)
            asks["baseline"] = _asking(self.baseline)
        for name, ask in asks.items():
            questions = [
                Query(self.author.prompt(self._length(0.7)).prompt) for _ in range(2 * self.effort.prompts)
            ]
            began = time.monotonic()
            answers = [each for each in together(ask, questions, 8) if each is not None]
            tokens = sum(each.prompt_tokens + len(each.choice) for each in answers)
            self.throughput[name] = tokens / (time.monotonic() - began)
        parts = [f"{value:,.0f} tokens/s" for value in self.throughput.values()]
        self._stage.note = " beside a baseline of ".join(parts)

    def _after_restart(self) -> None:
        if not self._restart:
            self._skip("say how to restart the engine with --restart COMMAND")
            return
        time.sleep(_SETTLE)
        try:
            self.engine.restart(self._restart)
        except LMTierError as error:
            self._record_finding(str(error))
            return
        self._compare_all(self._cases)
        self._compare_all(self._cases)


def together(work: Callable[[T], R], items: Sequence[T], at_a_time: int) -> list[R]:
    """The results of `work` for these items, in their order; so many run at once."""
    results: dict[int, R] = {}
    left = SimpleQueue[int]()
    for number in range(len(items)):
        left.put(number)

    def take() -> None:
        with suppress(Empty):
            while True:
                number = left.get_nowait()
                results[number] = work(items[number])

    threads = [start_thread("lmtier prove", take) for _ in range(min(at_a_time, len(items)) - 1)]
    take()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(items))]


def _asking(engine: Endpoint) -> Callable[[Query], Completion | None]:
    """What another engine does not answer is no finding."""

    def ask(question: Query) -> Completion | None:
        with suppress(NoAnswer):
            return engine.ask(question)
        return None

    return ask


def _excerpt(question: Query) -> str:
    prompt = question.prompt
    text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
    parts: Iterable[str] = (
        f"{length(prompt)} words or tokens",
        f"adapter {question.model}" if question.model else "",
        f"salt {question.salt}" if question.salt else "",
        "an image" if question.image else "",
        f"seed {question.seed}, n={question.choices}" if question.seed is not None else "",
        f"“{text[:40]} … {text[-40:]}”",
    )
    return ", ".join(filter(None, parts))


def _said(answer: Completion | None) -> str:
    if answer is None:
        return ""
    return " | ".join(" ".join(each.token for each in choice) for choice in answer.choices)
