"""Who may not come in, who asks for too much, and who listens for what others have: rows T17, T19 and T20 of
docs/RELIABILITY.md."""

from __future__ import annotations

import multiprocessing
import random
import resource
import select
import socket
import ssl
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lmtier.client.client import Client
from lmtier.errors import TierError
from lmtier.format.keys import Identity, KeyChain, seed
from lmtier.format.layout import Layout, form_of
from lmtier.server.process import allow_files
from lmtier.wire.resp import Error, encode_command
from tests.certificates import certify
from tests.server.forked import Process
from tests.server.process import MIB, Served, Wire, served, until

# ---- T17: what one tenant has is not to be seen by another


LAYOUT = Layout.uniform(
    layers=1, heads=1, head_dim=16, dtype="fp16", block_tokens=16, chunk_tokens=16, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
MODEL = Identity(model="m", weights="w")
PROMPTS = 200


def keys(salt: str, prompt: int) -> list[bytes]:
    tokens = [prompt * 1000 + i for i in range(512)]
    return KeyChain(seed(MODEL, 16, salt=salt), 16, tokens).keys


def auc(one: list[int], other: list[int]) -> float:
    """How often a random one of `one` took longer than a random one of `other`; 0.5: nobody can tell."""
    ranks = sorted([(value, 1.0) for value in one] + [(value, 0.0) for value in other])
    below = won = 0.0
    at = 0
    while at < len(ranks):
        end = at
        while end < len(ranks) and ranks[end][0] == ranks[at][0]:
            end += 1
        ones = sum(which for _, which in ranks[at:end])
        others = end - at - ones
        won += ones * (below + others / 2)
        below += others
        at = end
    return won / (len(one) * len(other))


@pytest.mark.alone
@pytest.mark.parametrize("below", [False, True], ids=["memory", "memory and disk"])
def test_lookup_times_tell_nothing_of_other_tenants(tmp_path: Path, below: bool):
    """A tenant looks up prompts that another one stored, and prompts that nobody did, 2,000 times each."""
    tiers = ["cpu://?capacity=16MiB", *([f"disk://{tmp_path}/kv?capacity=64MiB"] if below else [])]
    with (
        served(tmp_path, *tiers, config={"chunk_tokens": 16}, unix=str(tmp_path / "socket")) as server,
        Client(server.where["unix"]) as client,
        ExitStack() as stack,
    ):
        for prompt in range(0, PROMPTS, 2):  # the even ones are theirs
            client.commit(client.reserve(keys("theirs", prompt), FORM))
        assert client.flush()
        took: dict[str, list[int]] = {"stored": [], "never stored": [], "own": [], "shorter": []}
        fastest: dict[str, dict[int, int]] = {each: {} for each in took}
        wire = stack.enter_context(Wire(server.where["unix"]))  # a client may know it without asking
        wire.granted("LMTIER.HELLO", 1)
        form = wire.granted("LMTIER.FORM", LAYOUT.to_json(), str(LAYOUT.whole))
        questions = [
            (salt, prompt, keys(salt, prompt)) for salt in ("ours", "theirs") for prompt in range(PROMPTS)
        ]
        for _ in range(20):
            random.Random(len(took["stored"])).shuffle(questions)
            for salt, prompt, asked in questions:
                kinds = ("own", "shorter") if salt == "theirs" else ("stored", "never stored")
                kind = kinds[prompt % 2]
                asked = asked[:1] if kind == "shorter" else asked
                began = time.perf_counter_ns()
                reply = wire.ask("LMTIER.MATCH", form, 0, 0, *asked)
                seconds = time.perf_counter_ns() - began
                said = dict(zip(reply[::2], reply[1::2], strict=True))
                assert bool(said[b"sources"]) == (salt == "theirs" and not prompt % 2)
                wire.granted("LMTIER.RELEASE", said[b"id"])
                took[kind].append(seconds)
                fastest[kind][prompt] = min(seconds, fastest[kind].get(prompt, seconds))
        told = auc(took["stored"], took["never stored"])
        # Of twenty lookups the fastest is hardly disturbed, however busy the machine is.
        shorter = auc(list(fastest["shorter"].values()), list(fastest["never stored"].values()))
        medians = {what: f"{statistics.median(some) / 1000:.1f} µs" for what, some in took.items()}
        print(f"AUC {told:.3f}; of one chunk instead of 32 {shorter:.3f}; medians {medians}")
        assert len(took["stored"]) == len(took["never stored"]) == 2000
        assert abs(told - 0.5) < 0.05  # four standard deviations of 2,000 samples each, and some for load
        assert abs(shorter - 0.5) > 0.05, "what can be told apart is: the clock is fine enough"


# ---- T19: what is too large is refused before it takes memory


HUGE = [
    *(b"*%d\r\n" % count for count in (-2, 1 << 21, 1 << 31, 1 << 63, 10**30)),
    *(b"*2\r\n$3\r\nGET\r\n$%d\r\n" % size for size in (-2, 1 << 31, 1 << 63, 10**30)),
    *(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % size for size in (-2, 1 << 31, (1 << 63) - 1, 10**30)),
    *(b"*2\r\n$%d\r\n" % size for size in (1 << 20, 1 << 31)),
    encode_command("GET", b"k" * 10_000_000),
    encode_command("SET", b"k" * 10_000_000, b"v"),
    encode_command("LMTIER.HELLO", 1) + encode_command("LMTIER.MATCH", 0, 0, 0, bytes(32 * 1_000_000)),
    encode_command("LMTIER.HELLO", 1) + encode_command("LMTIER.SEEN", bytes(32 * 1_000_000)),
    encode_command("LMTIER.HELLO", b"9" * 1_000_000),
    *[encode_command("MGET", *(b"%d" % i for i in range(1_000_000)))] * 3,
    b"GET " + b"x" * 10_000_000 + b"\r\n",
    b"x" * 10_000_000,
]


def test_too_large_frames_are_refused_before_taking_memory(tmp_path: Path):
    with served(tmp_path, "cpu://?capacity=16MiB", config={"chunk_tokens": 16}) as server:
        with server.connect() as wire:
            wire.expect("OK", "SET", "k", "v")
        before, most, longest, refused = server.rss(), 0, 0.0, 0
        for frame in HUGE:
            began = time.monotonic()
            with server.connect() as greedy, server.connect() as other:
                with suppress(OSError):  # the server may have ended the connection before
                    greedy.socket.sendall(frame)
                    greedy.socket.shutdown(socket.SHUT_WR)
                said = b""
                with suppress(ConnectionError):
                    while data := greedy.socket.recv(MIB):
                        said = (said + data)[-1000:]
                refused += b"-" in said or not said
                other.expect("PONG", "PING")
            longest = max(longest, time.monotonic() - began)
            most = max(most, server.rss() - before)
        print(
            f"{len(HUGE)} frames, {refused} refused; {most / MIB:.1f} MiB more at most, "
            f"the longest took {longest:.2f} s"
        )
        with server.connect() as wire:
            wire.expect(b"v", "GET", "k")
        assert refused == len(HUGE)
        assert most < 64 * MIB  # what a million names take that were really sent; the third takes no more


# ---- T20: strangers


TOKEN = "a-token-of-some-length-0123456789"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    for name in ("server", "other"):
        certify(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
    return tmp_path


@pytest.fixture
def locked(certificates: Path) -> Iterator[Served]:
    """With a token, behind TLS."""
    folder = certificates / "run"
    folder.mkdir()
    server = Locked(
        *(folder, "cpu://?capacity=16MiB"),
        token=TOKEN,
        http="127.0.0.1:0",
        tls_cert=str(certificates / "server.crt"),
        tls_key=str(certificates / "server.key"),
    )
    yield server
    server.kill()


class Locked(Served):
    def connect(self, timeout: float = 20.0) -> Wire:
        wire = Wire(self.address, timeout)
        trust = ssl.create_default_context(cafile=str(self.log.parent.parent / "server.crt"))
        wire.socket = trust.wrap_socket(wire.socket, server_hostname="localhost")
        return wire


VERBS = ("GET k", "SET k v", "DEL k", "KEYS *", "INFO", "CONFIG GET *", "CLIENT LIST", "FLUSHALL", "DBSIZE")
OURS = (
    "HELLO 1",
    "CALL /api/stats",
    "CALL /api/clear",
    "CALL /api/check",
    "CALL /api/changes",
    "FLUSH 1",
    "HAS x",
)


def test_without_the_token_nothing_is_told_and_nothing_done(locked: Served):
    wrong = ["", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), TOKEN[::-1], "\0" + TOKEN, "default"]
    refused = 0
    with locked.connect() as wire:
        for verb in (*VERBS, *(f"LMTIER.{word}" for word in OURS)):
            answer = wire.ask(*verb.split())
            assert isinstance(answer, Error), f"{verb} was answered: {answer!r}"
            assert str(answer).startswith("NOAUTH"), answer
            refused += 1
    for each in wrong:
        with locked.connect() as wire:  # all of them take longer than one connection may
            for login in (("AUTH", each), ("AUTH", "default", each), ("HELLO", "3", "AUTH", "default", each)):
                answer = wire.ask(*login)
                assert isinstance(answer, Error), f"{login} opens it"
                refused += 1
    with locked.connect() as wire:
        wire.expect(
            Error("WRONGPASS invalid username-password pair or user is disabled."), "AUTH", "root", TOKEN
        )
        assert str(wire.ask("GET", "k")).startswith("NOAUTH")
        wire.expect("OK", "AUTH", TOKEN)
        wire.expect(None, "GET", "k")
    context = ssl.create_default_context(cafile=str(locked.log.parent.parent / "server.crt"))
    for path in ("/metrics", "/", "/report", "/api", "/healthz"):
        for shown in (None, *wrong[1:5], TOKEN):
            url = f"https://localhost:{locked.where['http'].rpartition(':')[2]}{path}"
            headers = {} if shown is None else {"Authorization": f"Bearer {shown}"}
            status = 200
            try:
                request = urllib.request.Request(url, headers=headers)
                urllib.request.urlopen(request, context=context, timeout=10).close()
            except urllib.error.HTTPError as error:
                error.close()
                status = error.code
            opened = (200, 404) if shown == TOKEN else (200,) if path == "/healthz" else (401,)
            assert status in opened, f"{path} with {shown}: {status}"
            refused += status == 401
    print(f"{refused} requests without the token were refused")
    log = locked.log.read_text()
    assert TOKEN not in log
    assert "Traceback" not in log


def test_clients_without_the_token_lose_their_places(tmp_path: Path):
    with served(tmp_path, token=TOKEN, patience=1.5) as server, server.connect() as known:
        known.expect("OK", "AUTH", TOKEN)
        with server.connect() as one, server.connect() as two:
            assert one.ends()
            assert two.ends()
        known.expect("PONG", "PING")


class Crowd(threading.Thread):
    """Strangers of one host. They take all places that they can get, and come back when they are closed."""

    def __init__(self, address: tuple[str, int], size: int) -> None:
        super().__init__(daemon=True)
        self._address, self._size = address, size
        self._is_over = False
        self.came = 0

    def __enter__(self) -> Crowd:
        self.start()
        until(lambda: self.came > self._size)  # all are in, and one has come back
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.join()

    def run(self) -> None:
        wires, poll = dict[int, socket.socket](), select.poll()
        while not self._is_over:
            while len(wires) < self._size:
                wire = socket.create_connection(self._address)
                wires[wire.fileno()] = wire
                poll.register(wire, select.POLLIN)
                self.came += 1
            for fd, _ in poll.poll(10):
                poll.unregister(fd)
                wires.pop(fd).close()
        for wire in wires.values():
            wire.close()


PLACES, TRIES = 256, 50


def test_strangers_who_take_all_places_keep_no_engine_out(tmp_path: Path):
    """An engine on the Unix socket, and a client that shows the token at once, get in each time."""
    unix = str(tmp_path / "socket")
    with (
        served(tmp_path, token=TOKEN, unix=unix, clients=PLACES) as server,
        Crowd(server.address, PLACES + 4) as crowd,
    ):
        before, refused = crowd.came, 0
        with ExitStack() as stack:
            wires = [stack.enter_context(server.connect()) for _ in range(TRIES)]
            for wire in wires:
                wire.send(encode_command("AUTH", TOKEN))
            for _ in range(TRIES):
                try:
                    Client(unix).close()
                except TierError:
                    refused += 1
            for wire in wires:
                try:
                    refused += wire.reply() != "OK"
                    wire.expect(None, "GET", "name")
                except (EOFError, OSError):
                    refused += 1
        print(f"{2 * TRIES} came, {refused} were refused; {crowd.came - before} strangers came meanwhile")
        assert not refused
        assert crowd.came > before, "the strangers did come back"


def test_clients_without_a_token_leave_places_for_engines(tmp_path: Path):
    unix = str(tmp_path / "socket")
    with served(tmp_path, unix=unix, clients=16) as server, ExitStack() as stack:
        wires = [stack.enter_context(server.connect()) for _ in range(15)]
        for wire in wires:
            wire.expect("PONG", "PING")
        with server.connect() as late:
            assert str(late.reply()).startswith("ERR max number of clients")
        Client(unix).close()


def test_an_unfinished_handshake_loses_its_place(locked: Served):
    """Also where a certificate is asked for and no token, so nothing else shows that it is a stranger."""
    settings = {**locked._serving, "tls_ca": locked._serving["tls_cert"], "clients": 4, "token_file": ""}
    locked.kill()
    locked._serving, locked._token = settings, ""
    process = Process((locked._config, settings), locked.log)
    try:
        host, _, port = process.where(20)["redis"].rpartition(":")
        with ExitStack() as stack:
            wires = [stack.enter_context(Wire((host, int(port)))) for _ in range(4)]
            assert wires[0].ends()
    finally:
        process.kill()
        process.wait(20)


def test_strangers_leave_places_where_files_are_scarce():
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        assert pool.submit(_places_of, 300).result() == 44


def _places_of(files: int) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    return allow_files(10_000)


def test_a_token_that_was_replaced_opens_nothing(tmp_path: Path):
    with served(tmp_path, "cpu://?capacity=16MiB", token="the-old-one") as server:
        (tmp_path / "token").write_text("the-new-one")
        server.process.send_signal(1)

        def old_is_refused() -> bool:
            with server.connect() as wire:
                return isinstance(wire.ask("AUTH", "the-old-one"), Error)

        until(old_is_refused)
        server._token = "the-new-one"
        with server.connect() as wire:
            wire.expect("OK", "AUTH", "the-new-one")


def test_only_tls_that_trusts_and_is_trusted_comes_in(locked: Served, certificates: Path):
    def connect(context: ssl.SSLContext, name: str = "localhost") -> None:
        with (
            socket.create_connection(locked.address, 10) as bare,
            context.wrap_socket(bare, server_hostname=name) as wire,
        ):
            wire.sendall(encode_command("AUTH", TOKEN))
            assert wire.recv(100) == b"+OK\r\n"

    right = ssl.create_default_context(cafile=str(certificates / "server.crt"))
    connect(right)
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(ssl.create_default_context(cafile=str(certificates / "other.crt")))
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(right, "other.example")
    for version in ("tls1", "tls1_1"):  # our own library does not even speak them: openssl is told to
        words = ["openssl", "s_client", "-connect", "{}:{}".format(*locked.address), f"-{version}"]
        done = subprocess.run(
            [*words, "-cipher", "ALL:@SECLEVEL=0"], input=b"PING\r\n", capture_output=True, timeout=20
        )
        assert b"PONG" not in done.stdout
        assert b"Cipher is (NONE)" in done.stdout
    with Wire(locked.address) as plain:
        plain.send(encode_command("AUTH", TOKEN) + encode_command("PING"))
        assert plain.ends()


def test_what_was_said_in_tls_cannot_be_said_again(locked: Served):
    """Somebody on the way records a connection, and sends what the client sent."""
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def forward(source: socket.socket, sink: socket.socket, keep: Callable[[bytes], object]) -> None:
            with suppress(OSError):
                while data := source.recv(MIB):
                    keep(data)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def stand_between() -> None:
            ours, _ = listener.accept()
            with ours, socket.create_connection(locked.address, 10) as theirs:
                back = threading.Thread(target=forward, args=(theirs, ours, len))
                back.start()
                forward(ours, theirs, recorded.extend)
                back.join(10)

        thread = threading.Thread(target=stand_between)
        thread.start()
        trust = ssl.create_default_context(cafile=str(locked.log.parent.parent / "server.crt"))
        with (
            socket.create_connection(listener.getsockname(), 10) as bare,
            trust.wrap_socket(bare, server_hostname="localhost") as wire,
        ):
            wire.sendall(encode_command("AUTH", TOKEN) + encode_command("SET", "k", "v"))
            assert wire.recv(100)
            with suppress(OSError):
                wire.unwrap()
        thread.join(10)
    with locked.connect() as own:
        own.expect("OK", "AUTH", TOKEN)
        own.expect(1, "DEL", "k")
        with Wire(locked.address) as again:
            with suppress(ConnectionError):
                again.send(bytes(recorded))
            assert again.ends()
        own.expect(None, "GET", "k")
