"""A file of any remote file system of fsspec, which is opened again after errors that may pass."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from megalite.stores.errors import ConflictError
from megalite.stores.object_store import DATA_PATIENCE_S, patiently, version_of

Result = TypeVar("Result")
BUFFER = 1 << 16
"""Bytes of the buffer of small reads. The file of fsspec has its own, of what it requests."""


def is_local(system: Any) -> bool:
    """Return whether a file system of fsspec answers without a network, so that its errors do not pass."""
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    return isinstance(system, (LocalFileSystem, MemoryFileSystem))


def open_file(system: Any, path: str, url: str) -> Any:
    """Open a file of a file system of fsspec for reading.

    Args:
        path: in the file system.
        url: for messages.

    Raises:
        FileNotFoundError, or what a local file system raises.
        StoreError: a remote one does not answer; also raised where the file is read.
    """
    if is_local(system):
        return system.open(path, "rb")
    return io.BufferedReader(RetriedFile(system, path, url), BUFFER)


class RetriedFile(io.RawIOBase):
    """A remote file that was opened for reading. It goes on at the same byte after an error.

    Attributes:
        name: the URL.

    Raises:
        FileNotFoundError: it does not exist.
        ConflictError: it was replaced after an error, so that the rest is of another file.
        StoreError: it could not be read for `DATA_PATIENCE_S`.
    """

    def __init__(self, system: Any, path: str, url: str):
        self.name = url
        self._system, self._path = system, path
        self._file: Any = None
        self._position = 0
        self._version: tuple[int | None, str] | None = None
        self._retried(lambda file: None)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._retried(lambda file: file.seekable()))

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: lambda: 0, io.SEEK_CUR: lambda: self._position, io.SEEK_END: self._end}
        self._position = base[whence]() + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")

        def read(file: Any) -> bytes:
            if file.tell() != self._position:
                file.seek(self._position)
            return bytes(file.read(len(view)))

        data = self._retried(read)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._discard()
        super().close()

    def _end(self) -> int:
        return int(self._retried(lambda file: file.seek(0, io.SEEK_END)))

    def _retried(self, action: Callable[[Any], Result]) -> Result:
        def attempt() -> Result:
            if self._file is None:
                self._open()
            try:
                return action(self._file)
            except Exception:
                self._discard()
                raise

        return patiently(attempt, self.name, DATA_PATIENCE_S)

    def _open(self) -> None:
        version = version_of(self._system.info(self._path))
        if self._version not in (None, version):
            raise ConflictError(f"{self.name} has been replaced while it was read. Start again.")
        self._version = version
        self._file = self._system.open(self._path, "rb")

    def _discard(self) -> None:
        """Close the file of fsspec, which an error may have left unusable."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):  # each library has errors of its own
                file.close()
