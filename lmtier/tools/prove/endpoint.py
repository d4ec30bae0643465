"""Asks an OpenAI-compatible engine over HTTP: questions, their answers token by token, and what it offers."""

from __future__ import annotations

import base64
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from lmtier.errors import ConfigError, TierError
from lmtier.tools.prove.compare import Choice, Position

Prompt = str | tuple[int, ...]
_LIKELIEST = 5
_PAUSE = 0.5
_BROKEN = OSError, HTTPException
"""What a connection that fails raises. An answer in chunks that is cut is no OSError."""
_EXTRAS: dict[str, Any] = {"ignore_eos": True, "return_tokens_as_token_ids": True}
"""What only vLLM understands: answers have their full length, and each token has one name."""


class NoAnswer(Exception):
    """The engine has refused a question, failed at it, or was too late."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    parent: str
    """The model of an adapter; empty: it is a model itself."""
    longest: int
    """In tokens; 0: it does not say."""


@dataclass(frozen=True, slots=True)
class Query:
    prompt: Prompt
    salt: str = ""
    model: str = ""
    """An adapter; empty: the model that is proven."""
    image: bytes = b""
    tokens: int = 12
    choices: int = 1
    seed: int | None = None
    """Sampled with this seed; None: greedy."""


@dataclass(slots=True)
class Completion:
    choices: list[list[Position]]
    text: list[str]
    first_token_seconds: float = 0.0
    """Seconds until the first token."""
    took: float = 0.0
    prompt_tokens: int = 0
    cached: int | None = None
    """Tokens of the prompt that were not computed; None: the engine does not say."""

    @property
    def choice(self) -> Choice:
        return self.choices[0]


@dataclass
class Endpoint:
    """An engine. All methods may be called from several threads, once `connect` has returned."""

    url: str
    token: str = ""
    name: str = ""
    """The name of the model; empty: the first one that the engine lists."""
    limit: float = 300.0
    """Seconds for one answer."""
    model: ServedModel = field(init=False)
    adapters: tuple[ServedModel, ...] = ()
    offers_salts: bool = False
    capacity: int = 0
    """Tokens of KV that the engine has room for; 0: it does not say."""
    asked: int = 0
    _extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "://" not in self.url:
            raise ConfigError(f"{self.url}: write it as a URL, http://127.0.0.1:8000")
        self.url = self.url.rstrip("/").removesuffix("/v1")

    # ---- what it is

    def connect(self) -> None:
        try:
            model_list = json.loads(self._get("/v1/models"))["data"]
        except (*_BROKEN, ValueError, LookupError, TypeError) as error:
            raise TierError(
                f"{self.url}/v1/models does not answer as an OpenAI API does: {_why(error)}; "
                "is that the URL of an engine that runs?"
            ) from None
        models = [
            ServedModel(entry["id"], entry.get("parent") or "", entry.get("max_model_len") or 0)
            for entry in model_list
        ]
        roots = [entry for entry in models if not entry.parent and self.name in ("", entry.name)]
        if not roots:
            raise ConfigError(f"{self.url} does not serve a model {self.name!r}")
        self.model = roots[0]
        self.adapters = tuple(entry for entry in models if entry.parent == self.model.name)
        with suppress(*_BROKEN):
            self.offers_salts = b'"cache_salt"' in self._get("/openapi.json")
        self.capacity = self._kv_tokens()

    def learn_dialect(self, prompt: Prompt) -> bool:
        """Whether it takes this kind of prompt; with what vLLM alone understands, if it can."""
        for extras in (_EXTRAS, {}):
            self._extras = extras
            try:
                answer = self.ask(Query(prompt, tokens=1))
            except NoAnswer:
                continue
            if answer.choice:
                return True
        return False

    def _kv_tokens(self) -> int:
        """As vLLM's metrics tell it."""
        with suppress(*_BROKEN, ValueError, StopIteration):
            lines = self._get("/metrics").decode().splitlines()
            line = next(each for each in lines if each.startswith("vllm:cache_config_info{"))
            labels = dict(each.split("=", 1) for each in line.partition("{")[2].split("}")[0].split(","))
            return int(labels["num_gpu_blocks"].strip('"')) * int(labels["block_size"].strip('"'))
        return 0

    # ---- questions

    def ask(self, question: Query) -> Completion:
        answer = Completion([[] for _ in range(question.choices)], [""] * question.choices)
        began = time.monotonic()
        self.asked += 1
        with self._open(question) as reply:
            for event in _parts(reply, began + self.limit):
                if usage := event.get("usage"):
                    answer.prompt_tokens = usage.get("prompt_tokens", 0)
                    answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                for choice in event.get("choices", ()):
                    if positions := _positions(choice):
                        answer.first_token_seconds = answer.first_token_seconds or time.monotonic() - began
                        answer.choices[choice["index"]] += positions
                    answer.text[choice["index"]] += (
                        choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    )
        answer.took = time.monotonic() - began
        return answer

    def cut(self, question: Query, after: float) -> None:
        """Ask, and hang up after so many seconds, whatever has come."""
        self.asked += 1
        end = time.monotonic() + after
        patience = max(after, 0.01)
        with suppress(NoAnswer), self._open(question, patience=patience) as reply, suppress(*_BROKEN):
            while time.monotonic() < end and reply.readline():
                pass

    def _open(self, question: Query, *, patience: float | None = None) -> Any:
        body: dict[str, Any] = {
            "model": question.model or self.model.name,
            "max_tokens": question.tokens,
            "temperature": 0 if question.seed is None else 0.8,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extras,
        }
        if question.choices > 1:
            body["n"] = question.choices
        if question.seed is not None:
            body["seed"] = question.seed
        if question.salt:
            body["cache_salt"] = question.salt
        if question.image:
            path = "/v1/chat/completions"
            url = "data:image/png;base64," + base64.b64encode(question.image).decode()
            content = [
                {"type": "text", "text": question.prompt},
                {"type": "image_url", "image_url": {"url": url}},
            ]
            body |= {"messages": [{"role": "user", "content": content}]}
            body |= {"logprobs": True, "top_logprobs": _LIKELIEST}
        else:
            path = "/v1/completions"
            prompt = question.prompt if isinstance(question.prompt, str) else list(question.prompt)
            body |= {"prompt": prompt, "logprobs": _LIKELIEST}
        try:
            return closing(self._send(path, body, self.limit if patience is None else patience))
        except urllib.error.HTTPError as error:
            said = b""
            with error, suppress(*_BROKEN):
                said = error.read(500)
            text = " ".join(said.decode(errors="replace").split())
            raise NoAnswer(f"HTTP {error.code}: {text[:200]}") from None
        except _BROKEN as error:
            raise NoAnswer(f"no connection: {_why(error)}") from None

    # ---- its life

    def post(self, path: str) -> bool:
        """Whether it knows that path, and did what it stands for."""
        try:
            with closing(self._send(path, {}, self.limit)) as reply:
                reply.read()
        except _BROKEN:
            return False
        return True

    def restart(self, command: str) -> None:
        """Run the user's command, and wait until the engine answers again."""
        process = subprocess.run(command, shell=True, check=False, stdin=subprocess.DEVNULL)
        if process.returncode:
            raise ConfigError(f"--restart: `{command}` ended with status {process.returncode}")
        deadline = time.monotonic() + self.limit
        while True:
            try:
                self._get("/v1/models")
                return
            except (*_BROKEN, ValueError) as error:
                if time.monotonic() > deadline:
                    raise TierError(f"--restart: {self.url} does not answer again: {_why(error)}") from None
                time.sleep(_PAUSE)

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._request(path), timeout=min(30.0, self.limit)) as reply:
            found: bytes = reply.read()
        return found

    def _send(self, path: str, body: dict[str, Any], patience: float) -> Any:
        return urllib.request.urlopen(self._request(path, json.dumps(body).encode()), timeout=patience)

    def _request(self, path: str, data: bytes | None = None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        return urllib.request.Request(self.url + path, data, headers)


def _why(error: Exception) -> str:
    """The error of a connection in the system's words."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    if isinstance(error, LookupError | TypeError | json.JSONDecodeError):
        return "it answered something else"
    return getattr(error, "strerror", None) or str(error)


def _parts(reply: Any, end: float) -> Iterator[dict[str, Any]]:
    """The parts of a stream of server-sent events, until it says that it is done."""
    try:
        for line in reply:
            if time.monotonic() > end:
                raise NoAnswer("it did not end in time")
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                return
            part: dict[str, Any] = json.loads(text)
            if "error" in part:
                raise NoAnswer(f"it failed: {str(part['error'])[:200]}")
            yield part
    except (*_BROKEN, ValueError) as error:
        raise NoAnswer(f"the answer broke off: {_why(error)}") from None
    raise NoAnswer("the answer broke off before its end")


def _positions(choice: dict[str, Any]) -> list[Position]:
    """The positions in a part of a completion, or of a chat."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        return [Position(text, {})] if text else []
    if (content := logprobs.get("content")) is not None:
        return [
            Position(each["token"], {top["token"]: top["logprob"] for top in each.get("top_logprobs", ())})
            for each in content
        ]
    return [
        Position(token, dict(likeliest or {}))
        for token, likeliest in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    ]
