"""Server of the page of one run for browsers on this machine, before, during and after training.

    GET /           the page, with a script that requests /content every few seconds
    GET /content    the part below the title; 304 if the browser already has it
    anything else   404

The server only listens on 127.0.0.1. A request must contain the name of this machine as its host. Otherwise a
page from elsewhere, whose name resolves to 127.0.0.1 (DNS rebinding), could read the run. All data from the
run is escaped, and the page can only execute its own script.
"""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from time import monotonic, strftime, time
from typing import Any

from megalite.config import run_files
from megalite.monitoring.report.page import content, document, script
from megalite.monitoring.report.run import FILES, RecordedRun, ReportError, read
from megalite.system.progress import duration

HOSTS = ("127.0.0.1", "localhost")
REFRESH_S = 5.0
# time without a step that the page reports, in seconds and in step times
SILENT_S, SILENT_STEPS = 60.0, 10
SHARE = 0.1  # maximum fraction of a core for drawing, because the run may need it
ICON = '<link rel="icon" href="data:,">'  # otherwise browsers ask for /favicon.ico
SCRIPT = """
const main = document.querySelector("main"), note = document.querySelector("#note");
const kept = ["details", ".wide"];
function state() { return kept.map(name => [...main.querySelectorAll(name)].map(each => [each.open, each.scrollLeft])); }
function restore(before, x, y) {
  kept.forEach((name, kind) => main.querySelectorAll(name).forEach((each, index) => {
    const [open, left] = before[kind][index] || [];
    if (open) each.open = true;
    if (left) each.scrollLeft = left;
  }));
  scrollTo(x, y);
}
async function refresh() {
  try {
    const answer = await fetch("content", {headers: {"If-None-Match": main.dataset.tag}, cache: "no-store"});
    if (answer.status === 200) {
      const text = await answer.text(), before = state(), x = scrollX, y = scrollY;
      main.innerHTML = text;
      drawAll();
      main.dataset.tag = answer.headers.get("ETag");
      restore(before, x, y);
    }
    note.textContent = "";
  } catch (error) {
    note.textContent = "The server of this page has stopped or cannot be reached.";
  }
}
setInterval(refresh, REFRESH_MS);
""".replace("REFRESH_MS", str(int(1000 * REFRESH_S)))


def whole_script() -> str:
    """Return the only script that the page can execute."""
    return f"{script()}\n{SCRIPT}"


ALLOWED_SCRIPT = "sha256-" + b64encode(sha256(whole_script().encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src '{ALLOWED_SCRIPT}'; style-src "
    "'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LivePage:
    """Current page of a run.

    It is rendered again when a file of the run has changed, at most a tenth of the time.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = monotonic):
        self.directory, self._clock = directory, clock
        self._lock, self._due = Lock(), clock()
        self._seen: list[Any] = []
        self._content = self._tag = ""

    @property
    def title(self) -> str:
        return self.directory.resolve().name

    def content(self) -> tuple[str, str]:
        """Return the HTML below the title, and a tag that changes with it."""
        with self._lock:
            began, now = self._clock(), self._state()
            if now != self._seen and began >= self._due:
                self._seen, self._content = now, self._drawn()
                self._tag = f'"{sha256(self._content.encode()).hexdigest()[:16]}"'
                ended = self._clock()
                self._due = ended + max(REFRESH_S / 2, (ended - began) / SHARE)
            return self._content, self._tag

    def whole(self) -> str:
        """Return the whole page."""
        body, tag = self.content()
        parts = (
            f"<main data-tag='{tag}'>\n{body}\n</main>\n<p id=\"note\" "
            f'role="status"></p>\n<script>{whole_script()}</script>'
        )
        return document(self.title, parts, ICON)

    def _state(self) -> list[Any]:
        """Return a value that changes with the files of the run, and with each minute without a new step."""
        state: list[Any] = [int(self._silent() // SILENT_S)]
        for name in FILES:
            try:
                status = (self.directory / name).stat()
                state.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                state.append(None)
        return state

    def _drawn(self) -> str:
        lines = [f"as of {strftime('%H:%M:%S')}"]
        try:
            run = read(self.directory)
            body, lines = content([run]), [*lines, *self._silence(run)]
        except ReportError as error:
            body = f"<p>{escape(str(error))}</p>"
        except Exception as error:  # files may be in the middle of being replaced; the next attempt succeeds
            body = f"<p>{escape(f'{type(error).__name__}: {error}')}</p>"
        return f'<p class="state">{escape("; ".join(lines))}</p>\n{body}'

    def _silent(self) -> float:
        """Return the seconds since the last line of metrics, or 0 without any."""
        try:
            return max(time() - (self.directory / run_files.METRICS).stat().st_mtime, 0.0)
        except OSError:
            return 0.0

    def _silence(self, run: RecordedRun) -> list[str]:
        """Return a line if an active run has not written a step for a long time."""
        if run.summary.get("state") != "running" or not run.steps:
            return []
        silent = self._silent()
        if silent < max(SILENT_S, SILENT_STEPS * (run.steps[-1].get("step_time_s") or 0.0)):
            return []
        what = "it may be hanging (run megalite explain), saving or validating, or it may have been killed"
        return [f"no steps written for {duration(silent)}: {what}"]


class LiveServer(ThreadingHTTPServer):
    """Server of a page on 127.0.0.1. `port` 0 selects a free one.

    Raises:
        OSError: the port is in use.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0):
        super().__init__((HOSTS[0], port), _Handler)
        self.page = page

    @property
    def url(self) -> str:
        return f"http://{HOSTS[0]}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect in the middle of a response."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "megalite", ""
    timeout = 30.0

    def do_GET(self) -> None:
        if not self._is_for_us():
            self.send_error(
                HTTPStatus.FORBIDDEN,
                explain="The request is addressed to a host name other than that of this machine.",
            )
        elif self.path == "/":
            self._send(self.server.page.whole())
        elif self.path == "/content":
            body, tag = self.server.page.content()
            same = self.headers.get("If-None-Match") == tag
            self._send("" if same else body, HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK, tag)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _is_for_us(self) -> bool:
        """Return whether the host of a request is this machine.

        Any port is accepted, because the browser may be at the other end of a tunnel (ssh -L).
        """
        hosts = self.headers.get_all("Host") or []
        name, _, port = hosts[0].partition(":") if len(hosts) == 1 else ("", "", "")
        return name in HOSTS and (not port or port.isdecimal())

    def _send(self, text: str, status: HTTPStatus = HTTPStatus.OK, tag: str | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...
