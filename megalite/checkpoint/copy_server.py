"""Files of copies in memory, read over the network: a server on each rank, and files of other nodes.

A server answers only connections that begin with the token of its job, and reads only files of ranks in its
directory. After the token a connection has any number of requests, each a `_REQUEST` of fixed size. The
answer is the number of bytes that follow, or -1.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from threading import Event, Thread
from typing import Any

from megalite.checkpoint.directories import hidden
from megalite.checkpoint.tensors import file_name
from megalite.config.run_files import step_name

TOKEN_BYTES = 16
TOKEN_S = 5.0
"""Seconds for a connection to send the token: others could hold threads for as long as they like."""
PAUSE_S = 0.5  # after an error, until the next connection is accepted
_REQUEST = struct.Struct("!Q?IQQ")  # step, whether the copy is still being made, rank, offset, bytes
_ANSWER = struct.Struct("!q")
Address = tuple[str, int]


def folder(directory: Path, step: int, unfinished: bool = False) -> Path:
    """Return the directory of a copy, among those in `directory`."""
    place = directory / step_name(step)
    return hidden(place, "saving") if unfinished else place


class CopyServer:
    """A server of this node's copies, on threads.

    Args:
        directory: that of the copies.
        token: the secret of the job, of TOKEN_BYTES bytes.
        timeout: seconds after which a connection without a request is closed.

    Attributes:
        port: where it listens, on every address of the host.
    """

    def __init__(self, directory: Path, token: bytes, timeout: float | None):
        self._directory, self._token, self._timeout = directory, token, timeout
        self._closed = Event()
        self._listener = socket.create_server(("", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, name="megalite-copies", daemon=True).start()

    def close(self) -> None:
        """Accept no further connection."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                link, _ = self._listener.accept()
                Thread(target=self._answer, args=(link,), name="megalite-copy", daemon=True).start()
            except (OSError, RuntimeError):  # closed, or no file descriptor or thread is left for the moment
                self._closed.wait(PAUSE_S)

    def _answer(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            link.settimeout(TOKEN_S)
            if not compare_digest(_received(link, TOKEN_BYTES), self._token):
                return
            link.settimeout(self._timeout)
            while True:
                step, unfinished, rank, offset, size = _REQUEST.unpack(_received(link, _REQUEST.size))
                path = folder(self._directory, step, unfinished) / file_name(rank)
                if not path.is_file():
                    link.sendall(_ANSWER.pack(-1))
                    continue
                with open(path, "rb") as file:
                    size = min(size, max(0, os.fstat(file.fileno()).st_size - offset))
                    link.sendall(_ANSWER.pack(size))
                    if size:
                        link.sendfile(file, offset, size)


class NodeFile:
    """A rank's file of a copy on another node, opened for reading.

    Raises OSError, in every method, if that node does not answer.

    Args:
        address: of a server of the node.
        unfinished: whether the copy is still being made.
        timeout: seconds to wait for an answer.

    Attributes:
        name: the address and the path, for messages.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        step: int,
        rank: int,
        *,
        unfinished: bool = False,
        timeout: float | None,
    ):
        self.name = f"{address[0]}:{folder(Path(), step, unfinished) / file_name(rank)}"
        self._place, self._position = (step, unfinished, rank), 0
        self._link = socket.create_connection(address, timeout)
        self._link.sendall(token)

    def __enter__(self) -> NodeFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def seek(self, position: int) -> int:
        self._position = position
        return position

    def readinto(self, target: Any) -> int:
        """Fill a buffer from the position on, as far as the file reaches, and return the number of bytes."""
        view = memoryview(target).cast("B")
        self._link.sendall(_REQUEST.pack(*self._place, self._position, len(view)))
        (size,) = _ANSWER.unpack(_received(self._link, _ANSWER.size))
        if size < 0:
            raise FileNotFoundError(f"{self.name} is not there any more")
        _fill(self._link, view[:size])
        self._position += size
        return int(size)


def _received(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(link, memoryview(data))
    return bytes(data)


def _fill(link: socket.socket, view: memoryview) -> None:
    while view:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the connection was closed")
        view = view[count:]
