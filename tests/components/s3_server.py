"""A server with the interface of S3 (moto), and a proxy in front of it that counts requests and fails on demand."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.components.environments import python_of

BUCKET = "bucket"
_SIGNED = {  # moto does not check it, and answers only with it
    "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
}
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length", "host"}


class Request(NamedTuple):
    method: str
    path: str  # with its query

    @property
    def starts_a_save(self) -> bool:
        return self.path.partition("?")[0].endswith(".bin") and self.method in ("PUT", "POST")


class S3Server:
    """What is in the bucket, asked directly."""

    def __init__(self, port: int):
        self.port = port

    def ask(self, path: str, method: str = "GET", body: bytes | None = None) -> bytes:
        headers = _SIGNED | {"Content-Type": "application/octet-stream"}  # without it, moto reads the body as a form
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", body, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
        return content

    def keys(self, prefix: str) -> list[str]:
        query = urllib.parse.urlencode({"list-type": 2, "prefix": prefix})
        return [listed.text or "" for listed in _tags(self.ask(f"{BUCKET}?{query}"), "Key")]

    def read(self, key: str) -> bytes:
        return self.ask(f"{BUCKET}/{key}")

    def write(self, key: str, content: bytes) -> None:
        self.ask(f"{BUCKET}/{key}", "PUT", content)

    def unfinished(self) -> list[str]:
        """The keys of writes in parts that are neither completed nor aborted."""
        return [listed.text or "" for listed in _tags(self.ask(f"{BUCKET}?uploads"), "Key")]


def _tags(content: bytes, name: str) -> Iterator[ElementTree.Element]:
    return (each for each in ElementTree.fromstring(content).iter() if each.tag.rpartition("}")[2] == name)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start moto's server, with a bucket, in an environment of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outside["S3_UPLOAD_PART_MIN_SIZE"] = "1024"  # real ones want 5 MiB
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [python_of("moto"), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env=outside,
            stdout=log,
            stderr=log,
        )
        try:
            server, end = S3Server(port), time.monotonic() + 60
            while True:
                with suppress(OSError):
                    server.ask(BUCKET, "PUT")
                    break
                assert process.poll() is None and time.monotonic() < end, "moto's server did not start"
                time.sleep(0.1)
            yield server
        finally:
            process.kill()
            process.wait()


class Proxy:
    """Forwards requests to a server.

    Attributes:
        requests: those that have arrived.
        before, after: called with each request before it is forwarded, and before its answer is.
        failing: None, "503" for that answer, or "closed" for a connection that is closed without one.
    """

    def __init__(self, server: S3Server):
        self.requests: list[Request] = []
        self.before: Callable[[Request], None] = lambda request: None
        self.after: Callable[[Request], None] = lambda request: None
        self.failing: str | None = None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path)
                proxy.requests.append(request)
                proxy.before(request)
                if proxy.failing is not None:
                    self.close_connection = True
                    if proxy.failing == "503":
                        self.send_error(503)
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
                upstream = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                upstream.request(self.command, self.path, body, headers | {"Host": self.headers["Host"]})
                answer = upstream.getresponse()
                content = answer.read()
                proxy.after(request)
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                with suppress(OSError):  # the client was killed
                    self.wfile.write(content)
                upstream.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # type: ignore[method-assign]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What the SDK of S3 reads."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
            **{"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"},
        }

    def reset(self) -> None:
        self.requests, self.failing = [], None
        self.before = self.after = lambda request: None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, and these."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    listed = [pid]
    for each in listed:
        listed += [child for child, parent in parents.items() if parent == each]
    return listed
