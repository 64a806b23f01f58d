"""A headless Chromium, spoken to over a pipe (the DevTools protocol), for tests that need to know what a page looks
like."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)
OFFLINE = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars")


class Browser:
    """One page of a browser. `problems`: what its console has said since the page was opened, and uncaught errors."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, os.fdopen(read, "rb")
        self._number, self._pending = 0, b""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command. Events that arrive before it are looked at."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters, **getattr(self, "_session", {})}
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            pass
        assert "error" not in message, message
        return message["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = os.read(self._read.fileno(), 1 << 16)
            assert data, "the browser has ended"
            self._pending += data
        first, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(json.dumps(message["params"]))
        return message

    def open(self, url: str, width: int, height: int, dark: bool) -> None:
        """Open a page in a window of this size and wait until it is there."""
        self.problems.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(b64decode(data))


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A running browser, with a profile of its own in `directory`."""
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    # beyond 3 and 4, where they have to be
    theirs = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 50) for each in (to_read, from_write)]

    def place() -> None:
        for number, each in enumerate(theirs, start=3):
            os.dup2(each, number)

    assert PROGRAM is not None
    command = [PROGRAM, *OPTIONS, *OFFLINE, f"--user-data-dir={directory / 'profile'}"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, preexec_fn=place, close_fds=False, **quiet)
    for each in (to_read, from_write, *theirs):
        os.close(each)
    try:
        yield Browser(to_write, from_read)
    finally:
        os.close(to_write)  # it ends with its pipe
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
