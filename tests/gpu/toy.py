"""A paged engine of one small model, whose answers prove the per-layer hooks, whole steps and CUDA graphs.

What is captured, and on which streams copies go, is a machine's: `Cuda`, or `Simulated` for CPU tensors. The
engine enqueues steps and waits for none of them: it is one step ahead, sampled tokens stay on the device, and
blocks that a request gives back are taken by the next one at once.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lmtier.config import Config
from lmtier.copy.cuda.device import CudaDevice
from lmtier.copy.cuda.mover import CudaMover
from lmtier.copy.cuda.page_lock import PageLock
from lmtier.copy.cuda.paging import CudaKV
from lmtier.copy.cuda.streams import StreamPair
from lmtier.core.cache import Cache
from lmtier.format.keys import Identity, KeyChain
from lmtier.format.layout import Layout, padded
from tests.cuda_device import SimulatedDevice
from tests.gpu.late import DELAYS, Late

Deed: TypeAlias = "Callable[[], object]"
Ints: TypeAlias = "npt.NDArray[np.int64]"
LAYOUTS = ("NHD", "HND", "BLHNC")
GRAPHS = ("off", "pieces", "whole")
"""Nothing is captured; all of a layer but its attention, as engines do; or a whole step."""


# ---- machines


class Machine(Protocol):
    """Where the engine computes."""

    where: str

    def device(self, memory: Sequence[torch.Tensor]) -> Any:
        """A new one, with lanes of its own, for copies to and from this memory."""

    def serves(self, device: Any) -> None:
        """The canary has run."""

    def lock_pages(self, device: Any, memory: memoryview) -> PageLock: ...

    def send(self, to: torch.Tensor, values: Ints) -> None:
        """Copy integers to the device, without a wait for it."""

    def recorder(self) -> Callable[[Deed], Deed]:
        """Makes of a deed what does the same again, with the same memory. One for an engine."""

    def mark(self) -> Callable[[], object]:
        """What holds this thread until all that was computed so far is done."""

    def never_waiting(self) -> Any:
        """A context in which it is an error to wait for the device."""

    def synchronize(self) -> None: ...


class Cuda:
    """The GPU. `late`: a seed, by which the engine and the lanes sleep before what they do."""

    where = "cuda"

    def __init__(self, late: int | None = None) -> None:
        self._late = None if late is None else random.Random(late)
        self._side: Any = torch.cuda.Stream()

    def device(self, memory: Sequence[torch.Tensor]) -> CudaDevice:
        device = CudaDevice()
        if self._late is not None:
            for name in ("store", "load"):
                lane: Any = getattr(device, name)
                kernels, copies = (
                    Late(device, each.stream, self._late) for each in (lane.kernels, lane.copies)
                )
                setattr(device, name, StreamPair(kernels, copies, lane.stores))
        return device

    def serves(self, device: CudaDevice) -> None:
        pass

    def lock_pages(self, device: CudaDevice, memory: memoryview) -> PageLock:
        return device.lock_pages(memory)

    def send(self, to: torch.Tensor, values: Ints) -> None:
        if self._late is not None:
            torch.cuda._sleep(self._late.choice(DELAYS))
        # Pinned memory that was freed is given out again only after copies from it are done.
        pinned = torch.empty(len(values), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = values
        to.copy_(pinned, non_blocking=True)

    def recorder(self) -> Callable[[Deed], Deed]:
        gc.collect()  # graphs of engines that are gone hold memory
        return partial(self._capture, torch.cuda.graph_pool_handle())

    def _capture(self, pool: Any, deed: Deed) -> Deed:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for _ in range(2):  # kernels are loaded, and workspaces taken, when they are first used
                deed()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._side, capture_error_mode="thread_local"):
            deed()
        return graph.replay

    def mark(self) -> Callable[[], object]:
        event: Any = torch.cuda.Event()
        event.record()
        synchronize: Callable[[], object] = event.synchronize
        return synchronize

    @contextmanager
    def never_waiting(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Simulated:
    """CPU tensors: the engine computes at once, copies go on late. `without`: an edge that is left out."""

    where = "cpu"

    PACE = (*[0] * 19, 1)  # copies fall far behind, until something waits for them

    def __init__(self, seed: int = 0, *, without: str = "", pace: Sequence[int] = PACE) -> None:
        self._seed, self._without, self._pace = seed, without, pace

    def device(self, memory: Sequence[torch.Tensor]) -> SimulatedDevice:
        self._seed += 1
        device = SimulatedDevice(self._seed, host_computes=True, is_recorded=False, pace=self._pace)
        device.keep(*[each.view(-1).view(torch.uint8).numpy() for each in memory])
        return device

    def serves(self, device: SimulatedDevice) -> None:
        device.without = self._without

    def lock_pages(self, device: SimulatedDevice, memory: memoryview) -> PageLock:
        pinning = PageLock(memory, lambda *_: None, lambda _: None)
        pinning.start()
        return pinning

    def send(self, to: torch.Tensor, values: Ints) -> None:
        to.copy_(torch.from_numpy(values))

    def recorder(self) -> Callable[[Deed], Deed]:
        def capture(deed: Deed) -> Deed:
            deed()  # a GPU must have done it once, too
            with Tape() as tape:
                deed()
            replay: Deed = tape.replay
            return replay

        return capture

    def mark(self) -> Callable[[], object]:
        return lambda: None

    def never_waiting(self) -> Any:
        return Guard()

    def synchronize(self) -> None:
        pass


class Guard(TorchDispatchMode):
    """Refuses what would wait for a GPU, or could not be captured."""

    refused = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.refused, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class Tape(Guard):
    """As a CUDA graph does: the same operations on the same memory, whatever Python has come to think."""

    def __init__(self) -> None:
        super().__init__()
        self._deeds: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        views = any(each.alias_info is not None for each in func._schema.returns)
        if func._schema.is_mutable or not views:
            self._deeds.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, made in self._deeds:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                pairs = zip(made, again, strict=True) if isinstance(made, tuple) else [(made, again)]
                for old, new in pairs:
                    old.copy_(new)


# ---- the model and its memory


@dataclass(frozen=True)
class Spec:
    """A decoder, and how much an engine of it does at a time."""

    layers: int = 3
    heads: int = 4
    """Of keys and values, and of queries."""
    head_dim: int = 16
    inner: int = 128
    vocab: int = 512
    dtype: torch.dtype = torch.bfloat16
    block_tokens: int = 4
    chunk_tokens: int = 8
    step_tokens: int = 8
    """Of a prompt. If it is a chunk, what follows a hit is computed in the shapes of a cold prompt."""
    slots: int = 3
    """Requests at a time."""
    longest: int = 48
    """Tokens of a request, whole blocks."""
    blocks: int = 40

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def layout(self) -> Layout:
        return Layout.uniform(
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            dtype={torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype],
            block_tokens=self.block_tokens,
            chunk_tokens=self.chunk_tokens,
            packing="token",
        )


LARGE = Spec(
    layers=8,
    heads=8,
    head_dim=128,
    inner=4096,
    vocab=4096,
    block_tokens=16,
    chunk_tokens=64,
    step_tokens=64,
    slots=4,
    longest=640,
    blocks=160,
)
"""For scenarios on a GPU."""
LONG = replace(LARGE, chunk_tokens=256, step_tokens=1024, slots=8, longest=4352, blocks=8 * 272 + 600)
"""For figures."""


class Model:
    """Random weights. Queries are large, so that attention is to few tokens, and all depends on those."""

    def __init__(self, spec: Spec, where: str, seed: int = 0) -> None:
        dice = torch.Generator(where).manual_seed(seed)

        def made(*shape: int, scale: float | None = None, dtype: torch.dtype = spec.dtype) -> torch.Tensor:
            weights = torch.randn(*shape, generator=dice, device=where)
            return (weights * (shape[0] ** -0.5 if scale is None else scale)).to(dtype)

        hidden = spec.hidden
        self.embed, self.place = made(spec.vocab, hidden, scale=1.0), made(spec.longest, hidden, scale=0.5)
        self.qkv = [made(hidden, 3 * hidden) for _ in range(spec.layers)]
        self.out = [made(hidden, hidden, scale=2 * hidden**-0.5) for _ in range(spec.layers)]
        self.up = [made(hidden, spec.inner) for _ in range(spec.layers)]
        self.down = [made(spec.inner, hidden) for _ in range(spec.layers)]
        self.head = made(hidden, spec.vocab, dtype=torch.float32)


def declared(spec: Spec, name: str, where: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """An engine's KV tensors [blocks, heads, tokens, K | V] of each layer, and the memory they lie in."""
    blocks, heads, tokens, width = spec.blocks, spec.heads, spec.block_tokens, 2 * spec.head_dim
    if name == "BLHNC":
        whole = torch.zeros(blocks, spec.layers, heads, tokens, width, dtype=spec.dtype, device=where)
        return list(whole.unbind(1)), [whole]
    shape = (blocks, tokens, heads, width) if name == "NHD" else (blocks, heads, tokens, width)
    memory = [torch.zeros(shape, dtype=spec.dtype, device=where) for _ in range(spec.layers)]
    return [each.transpose(1, 2) if name == "NHD" else each for each in memory], memory


def norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Step:
    """One shape of step: sequences of so many rows. Its inputs stay where they are; zeros are padding.

    What padding writes goes to block 0, slot 0 and answer 0, which nobody has.
    """

    def __init__(self, engine: Engine, sequences: int, rows: int) -> None:
        spec, machine = engine.spec, engine.machine
        self.sequences, self.rows, self._machine = sequences, rows, machine
        self._engine, self._model, self._spec = engine, engine.model, spec
        each = rows, rows, rows, spec.longest // spec.block_tokens, 1, 1, 1
        self._sizes = [sequences * count for count in each]
        self.inputs = torch.zeros(sum(self._sizes), dtype=torch.int64, device=machine.where)
        parts = self.inputs.split(self._sizes)
        self.ids, self.places, self.blocks, self.tables = (part.view(sequences, -1) for part in parts[:4])
        self.picks, self.slots, self.answers = parts[4:]
        self.x, self.q, self.mixed = (
            torch.zeros(sequences, rows, spec.hidden, dtype=spec.dtype, device=machine.where) for _ in "xqm"
        )
        self._heads = torch.arange(spec.heads, device=machine.where)
        self._keys = torch.arange(spec.longest, device=machine.where)
        self._sequences = torch.arange(sequences, device=machine.where)
        layers = range(spec.layers)
        self._whole: Deed | None = None
        if engine.graphs == "whole":
            self._whole = engine.capture(self._all)
            return
        self._before = [engine.capture(partial(self._compute_kv, n)) for n in layers]
        self._after = [engine.capture(partial(self._finish, n)) for n in layers]

    def fill(self, rows: Sequence[Row]) -> None:
        """The inputs of the next run. What is not among `rows` is padding."""
        spec, filled = self._spec, np.zeros(len(self.inputs), np.int64)
        parts = np.split(filled, np.cumsum(self._sizes)[:-1])
        ids, places, blocks, tables = (part.reshape(self.sequences, -1) for part in parts[:4])
        picks, slots, answers = parts[4:]
        for row in rows:
            at, length = row.number, row.end - row.start
            where = np.arange(row.start, row.end)
            ids[at, :length], places[at, :length] = row.ids, where
            blocks[at, :length] = np.array(row.blocks)[where // spec.block_tokens]
            tables[at, : len(row.blocks)] = row.blocks
            picks[at], slots[at], answers[at] = length - 1, row.slot, row.answer
        self._machine.send(self.inputs, filled)

    def run(self, load: Any, save: Any, *, layerwise: bool) -> None:
        """With hooks between layers, or around all of it."""
        if load is not None and not layerwise:
            load.all()
        if self._whole is not None:
            assert not layerwise, "there is nothing between the layers of one graph"
            self._whole()
        else:
            for n in range(self._spec.layers):
                if load is not None and layerwise:
                    load.layer(n)
                self._before[n]()
                self._attend(n)
                self._after[n]()
                if save is not None and layerwise:
                    save.layer(n)
        if save is not None and not layerwise:
            save.all()

    # ---- what may be captured: static memory alone

    def _all(self) -> None:
        for n in range(self._spec.layers):
            self._compute_kv(n)
            self._attend(n)
            self._finish(n)

    def _compute_kv(self, n: int) -> None:
        model, spec = self._model, self._spec
        if n == 0:
            last = self._engine.last[self.slots].unsqueeze(1)
            ids = torch.where(self.ids < 0, last, self.ids)  # a token that the host has not seen
            self.x.copy_(model.embed[ids] + model.place[self.places])
        q, k, v = (norm(self.x) @ model.qkv[n]).chunk(3, -1)
        self.q.copy_(q)
        kv = torch.cat([each.reshape(-1, spec.heads, spec.head_dim) for each in (k, v)], -1)
        blocks, offsets = self.blocks.view(-1, 1), self.places.view(-1, 1) % spec.block_tokens
        self._engine.tensors[n][blocks, self._heads, offsets] = kv

    def _attend(self, n: int) -> None:
        spec, many = self._spec, self.sequences
        kv = self._engine.tensors[n][self.tables].permute(0, 2, 1, 3, 4)
        k, v = kv.reshape(many, spec.heads, spec.longest, -1).chunk(2, -1)
        q = self.q.view(many, self.rows, spec.heads, spec.head_dim).transpose(1, 2)
        scores = (q @ k.transpose(-1, -2)).float() * (3 * spec.head_dim**-0.5)
        is_later = self._keys > self.places.view(many, 1, self.rows, 1)
        weights = scores.masked_fill(is_later, float("-inf")).softmax(-1).to(spec.dtype)
        self.mixed.copy_((weights @ v).transpose(1, 2).reshape(self.mixed.shape))

    def _finish(self, n: int) -> None:
        model, engine = self._model, self._engine
        self.x.add_(self.mixed @ model.out[n])
        self.x.add_(F.silu(norm(self.x) @ model.up[n]) @ model.down[n])
        if n == self._spec.layers - 1:
            rows = norm(self.x[self._sequences, self.picks]).float()
            scores, ids = (rows @ model.head).max(-1)
            engine.last[self.slots] = ids
            engine.answers[self.answers] = ids
            engine.scores[self.answers] = scores


@dataclass
class Row:
    """What one sequence has in a step: tokens [start, end), -1 for the one that was sampled last."""

    number: int
    ids: Sequence[int]
    start: int
    end: int
    blocks: list[int]
    slot: int = 0
    answer: int = 0


# ---- the engine


@dataclass
class Request:
    prompt: list[int]
    wanted: int
    slot: int
    first_answer: int
    """Where its answer begins."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    made: int = 0
    loaded: int = 0
    load: Any = None
    chain: KeyChain | None = None


@dataclass
class Answers:
    tokens: list[list[int]]
    scores: list[list[float]]
    loaded: list[int]
    """Tokens of each prompt that were not computed."""
    loads: list[Any]

    @property
    def believed(self) -> bool:
        """Whether all that was loaded is what had been saved. Known when the mover is drained."""
        return all(load.done and load.tokens == n for load, n in zip(self.loads, self.loaded, strict=True))

    def same_as(self, other: Answers) -> bool:
        return (self.tokens, self.scores) == (other.tokens, other.scores)


def _as_it_is(deed: Deed) -> Deed:
    return deed


class Engine:
    """Serves requests from paged memory; with a cache, once it is connected to one."""

    MOST = 1024  # tokens of all answers that are asked for together

    def __init__(
        self, machine: Machine, model: Model, spec: Spec, layout: str, graphs: str, seed: int = 0
    ) -> None:
        self.machine, self.model, self.spec, self.graphs = machine, model, spec, graphs
        self.tensors, self.memory = declared(spec, layout, machine.where)
        self.last = torch.zeros(spec.slots + 1, dtype=torch.int64, device=machine.where)
        self.answers = torch.zeros(self.MOST + 1, dtype=torch.int64, device=machine.where)
        self.scores = torch.zeros(self.MOST + 1, device=machine.where)
        self.capture = machine.recorder() if graphs != "off" else _as_it_is
        self.prefills = Step(self, 1, spec.step_tokens)
        self.decodes = Step(self, spec.slots, 1)
        self.random = random.Random(seed)
        self.free = list(range(1, spec.blocks))
        self.random.shuffle(self.free)
        self.mover: CudaMover | None = None
        self.layerwise = False
        self._ahead: deque[Callable[[], object]] = deque()

    @contextmanager
    def connected(
        self, cache: Cache, *, layerwise: bool, pins: bool = True, **way: Any
    ) -> Iterator[CudaMover]:
        """Save to this cache and load from it."""
        machine, layout = self.machine, self.spec.layout
        device = machine.device(self.memory)
        kv = CudaKV(layout, layout.whole, self.tensors, device, **way)
        spare = self.free[: 2 * layout.blocks + 2]
        mover = CudaMover(cache, kv, IDENTITY, spare_blocks=spare, layerwise=layerwise)
        pinning = machine.lock_pages(device, cache.slab.view(0, cache.slab.capacity)) if pins else None
        if pinning is not None:
            pinning.wait()
            assert not pinning.failure, pinning.failure
        machine.serves(device)
        self.mover, self.layerwise = mover, layerwise
        try:
            yield mover
            mover.drain()
        finally:
            self.mover, self.layerwise = None, False
            machine.synchronize()
            if pinning is not None:
                pinning.close()

    def answer(self, prompts: Sequence[list[int]], wanted: int) -> Answers:
        """The next tokens of each."""
        spec = self.spec
        assert len(prompts) * wanted <= self.MOST
        requests = [
            Request(prompt, wanted, 1 + number % spec.slots, 1 + number * wanted)
            for number, prompt in enumerate(prompts)
        ]
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            with self.machine.never_waiting(), torch.no_grad():
                self._admit(waiting, running)
                self._step(running)
                for done in [each for each in running if each.made == wanted]:
                    running.remove(done)
                    self.give_back(done.blocks)
                if self.mover is not None:
                    self.mover.poll()
            self.keep_pace()
        return self._collect(requests, wanted)

    def take(self, tokens: int) -> list[int]:
        """Those that were given back last come first."""
        return [self.free.pop() for _ in range(-(-tokens // self.spec.block_tokens))]

    def give_back(self, blocks: list[int]) -> None:
        self.free += self.random.sample(blocks, len(blocks))

    def keep_pace(self) -> None:
        """Hold this thread until it is one step ahead of the device, not more."""
        self._ahead.append(self.machine.mark())
        if len(self._ahead) > 1:
            self._ahead.popleft()()

    def decode(self, requests: Sequence[Request]) -> None:
        """One more token of each."""
        rows = []
        for each in requests:
            at = each.computed
            answer = each.first_answer + each.made if each.made < each.wanted else 0
            rows.append(Row(each.slot - 1, [-1], at, at + 1, each.blocks, each.slot, answer))
            each.computed, each.made = at + 1, each.made + 1
        self.decodes.fill(rows)
        self.decodes.run(None, None, layerwise=self.layerwise)

    def _admit(self, waiting: deque[Request], running: list[Request]) -> None:
        """The next in line, if there is room for it."""
        if not waiting or waiting[0].slot in {each.slot for each in running}:
            return
        tokens = len(waiting[0].prompt) + waiting[0].wanted
        if -(-tokens // self.spec.block_tokens) > len(self.free):
            return
        request = waiting.popleft()
        request.blocks = self.take(tokens)
        running.append(request)
        if self.mover is not None:
            self.mover.order_before_reuse(request.blocks)
            match = self.mover.match(self.mover.chain(request.prompt))
            request.load = self.mover.load(match, request.blocks)
            request.chain = self.mover.chain([])
            request.computed = request.loaded = request.load.tokens

    def _step(self, running: Sequence[Request]) -> None:
        """A part of one prompt, and one token of every request whose prompt is computed."""
        ready = [each for each in running if each.made]
        for request in running:
            if not request.made:
                self._prefill(request)
                break
        if ready:
            self.decode(ready)

    def _prefill(self, request: Request) -> None:
        start, prompt = request.computed, request.prompt
        end = min(start + self.spec.step_tokens, len(prompt))
        row = Row(0, prompt[start:end], start, end, request.blocks)
        request.computed = end
        if end == len(prompt):
            row.slot, row.answer, request.made = request.slot, request.first_answer, 1
        self.prefills.fill([row])
        is_first = start == request.loaded
        with ExitStack() as hooks:
            load = save = None
            if self.mover is not None and request.chain is not None:
                if is_first:
                    load = hooks.enter_context(request.load)
                request.chain.extend(prompt[request.chain.tokens : end])
                save = hooks.enter_context(self.mover.save(request.chain, request.blocks))
            self.prefills.run(load, save, layerwise=self.layerwise)

    def _collect(self, requests: Sequence[Request], wanted: int) -> Answers:
        tokens, scores = (
            each[1 : 1 + len(requests) * wanted].view(-1, wanted).tolist()
            for each in (self.answers, self.scores)
        )
        loads = [request.load for request in requests if request.load is not None]
        return Answers(tokens, scores, [request.loaded for request in requests][: len(loads)], loads)


# ---- scenarios

IDENTITY = Identity(model="toy", weights="random")


def prompts_of(spec: Spec, seed: int, count: int = 4) -> list[list[int]]:
    """Of different lengths, some of which begin alike."""
    dice, size = random.Random(seed), spec.chunk_tokens
    most = spec.longest // size - 2
    common = [dice.randrange(spec.vocab) for _ in range(2 * size)]
    lengths = [dice.randint(2, most) * size + dice.randint(1, size) for _ in range(count)]
    return [
        [*(common if number % 2 else []), *(dice.randrange(spec.vocab) for _ in range(length))][:length]
        for number, length in enumerate(lengths)
    ]


@dataclass
class Outcome:
    """The answers to the same prompts, and what the cache has counted."""

    alone: Answers
    """Without any cache."""
    others: dict[str, Answers]
    verified: int
    failures: int
    promised: int
    """Tokens that hits bring."""

    @property
    def wrong(self) -> list[str]:
        """In which ways answers differ, or less was loaded than there is."""
        found = [name for name, each in self.others.items() if not each.same_as(self.alone)]
        found += [f"{name}: not believed" for name, each in self.others.items() if not each.believed]
        found += [
            f"{name}: {sum(each.loaded)} of {self.promised} tokens loaded"
            for name, each in self.others.items()
            if name != "cold" and sum(each.loaded) != self.promised
        ]
        return [*found, *(["fingerprints differ"] if self.failures else [])]


def scenario(
    engine: Engine,
    folder: Path,
    *,
    layerwise: bool,
    seed: int = 0,
    wanted: int = 4,
    verify: str = "always",
    only: Sequence[str] = ("cold", "hit", "from copies", "restored"),
    **way: Any,
) -> Outcome:
    """Answers without a cache; cold; hit, when others have had the blocks; from copies; and from a disk."""
    spec = engine.spec
    prompts, between = prompts_of(spec, seed), prompts_of(spec, seed + 1)
    size = padded(spec.layout.nbytes(spec.layout.whole))
    room = sum(len(each) // spec.chunk_tokens for each in [*prompts, *between]) * size
    disk = f"disk://{folder}/kv?capacity={4 * room + (1 << 20)}&write=always"
    promised = sum((len(each) - 1) // spec.chunk_tokens * spec.chunk_tokens for each in prompts)
    alone = engine.answer(prompts, wanted)
    found: dict[str, Answers] = {}
    counted = {"lmtier_verified_total": 0.0, "lmtier_verify_failures_total": 0.0}

    @contextmanager
    def cache(*urls: str) -> Iterator[Cache]:
        settings: dict[str, Any] = {"chunk_tokens": spec.chunk_tokens, "verify": verify, "worth": "always"}
        tiers = [url.replace("ROOM", str(2 * room)) for url in urls]
        with Cache(Config(tiers=tiers, load_deadline=60, prefault=False, **settings)) as made:
            yield made
            for name in counted:
                counted[name] += made.metrics.value(name)
            made.check()
            assert made.index.leased_bytes == 0

    def forget() -> None:
        """What the engine's memory holds."""
        for each in engine.memory:
            each.fill_(1)

    cpu = "cpu://?capacity=ROOM"
    with cache(cpu, disk) as made:
        with engine.connected(made, layerwise=layerwise, **way) as mover:
            found["cold"] = engine.answer(prompts, wanted)
            engine.answer(between, wanted)
            mover.drain()
            forget()
            found["hit"] = engine.answer(prompts, wanted)
        assert made.flush()
    if "from copies" in only:
        near = cache("gpu://?capacity=ROOM&policy=lru", cpu)
        with near as made, engine.connected(made, layerwise=layerwise, **way) as mover:
            for _ in range(2):  # a load leaves copies, a save does not
                engine.answer(prompts, wanted)
                mover.drain()
                forget()
            erase(made)
            found["from copies"] = engine.answer(prompts, wanted)
    if "restored" in only:
        forget()
        with cache(cpu, disk) as made, engine.connected(made, layerwise=layerwise, **way):
            found["restored"] = engine.answer(prompts, wanted)
    found = {name: found[name] for name in only}
    verified, failures = map(int, counted.values())
    return Outcome(alone, found, verified, failures, promised)


def erase(cache: Cache) -> None:
    """The bytes of all chunks in the slab: who answers right has not read them."""
    for entry in cache.index.entries():
        for offset, size in zip(entry.offsets, entry.form.sizes, strict=True):
            cache.slab.view(offset, size)[:] = bytes(size)
