"""A real, headless Chromium, driven over its DevTools pipe: JSON between zero bytes, no websocket."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

# DevTools talks on the descriptors 3 and 4, which only the child itself can arrange.
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)


class Browser:
    """One browser with one tab. Whatever a page complains about on its console is in `complaints`."""

    def __init__(self, profile: Path, patience: float = 30.0) -> None:
        program = (
            shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        )
        assert program, "the live page is tested in a real browser: apt-get install chromium"
        self._patience = patience
        self._ids = count(1)
        self._unread = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        pipes = [*os.pipe(), *os.pipe()]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in pipes]
        for fd in pipes:
            os.close(fd)
        theirs_in, self._out, self._in, theirs_out = high
        arguments = [_START, str(theirs_in), str(theirs_out), program, *_FLAGS, f"--user-data-dir={profile}"]
        self._log = (profile.parent / f"{profile.name}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", *arguments, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(OSError, AssertionError):  # it may be gone already
            self.call("Browser.close")
        try:
            self._process.wait(10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            for fd in (self._in, self._out):
                os.close(fd)
            self._log.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command and its result; events that come before it are looked at."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + self._patience
        while True:
            answer = self._read(until)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        got = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, f"{script}: {got['exceptionDetails']}"
        return got["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression as soon as it is true: looked at in every frame of the page."""
        return self.evaluate(
            f"""new Promise((resolve, reject) => {{
                const end = performance.now() + {1000 * self._patience / 2};
                const look = () => {{
                    const value = (() => {script})();
                    if (value) resolve(value);
                    else if (performance.now() > end) reject(new Error("never true"));
                    else setTimeout(look, 20);
                }};
                look();
            }})"""
        )

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.dark(dark)
        self.resize(width, height)
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def resize(self, width: int, height: int) -> None:
        is_phone = width < 700
        screen = {"width": width, "height": height, "deviceScaleFactor": 1.5 if is_phone else 1}
        self.call("Emulation.setDeviceMetricsOverride", **screen, mobile=is_phone)

    def screenshot(self, path: Path) -> None:
        """All of the page, from top to bottom."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def picture(self, path: Path) -> None:
        """What fits on the screen, in a file that is small enough for a repository."""
        shot = self.call("Page.captureScreenshot", format="png")["data"]
        width, height, pixels = self.evaluate(
            f"""(async () => {{
                const image = new Image();
                image.src = "data:image/png;base64,{shot}";
                await image.decode();
                const canvas = new OffscreenCanvas(image.width, image.height);
                const context = canvas.getContext("2d");
                context.drawImage(image, 0, 0);
                const bytes = context.getImageData(0, 0, image.width, image.height).data;
                let text = "";
                for (let at = 0; at < bytes.length; at += 32768)
                    text += String.fromCharCode(...bytes.subarray(at, at + 32768));
                return [image.width, image.height, btoa(text)];
            }})()"""
        )
        rgba = np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 4)
        path.write_bytes(paletted(rgba[:, :, :3]))

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, f"the browser ended; see {self._log.name}"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


def paletted(pixels: np.ndarray) -> bytes:
    """A PNG with 128 colours: a page of text needs no more, and its file is a third."""
    height, width, _ = pixels.shape
    codes = pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    known, index, counts = np.unique(codes, return_inverse=True, return_counts=True)
    colours = np.stack([known >> 16, known >> 8 & 255, known & 255], 1).astype(np.int32)
    palette = colours[np.argsort(-counts)[:128]]
    nearest = np.array([np.abs(palette - each).sum(1).argmin() for each in colours], np.uint8)
    rows = nearest[index.reshape(height, width)]
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette.astype(np.uint8).tobytes()),
        (b"IDAT", zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
        for name, part in parts
    )
