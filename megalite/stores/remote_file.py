"""An object that is read like a file, in ranges."""

from __future__ import annotations

from typing import Any

from megalite.stores.object_store import PIECE, ObjectStore, StoredObject, patiently


class RemoteFile:
    """An object that was opened for reading.

    Small reads that follow each other share a request of `PIECE` bytes; a large one is several requests at
    the same time.

    Attributes:
        name: the URL.
    """

    def __init__(self, store: ObjectStore, url: str, entry: StoredObject):
        self.name = url
        self._store, self._entry = store, entry
        self._position = self._start = 0
        self._buffer = b""

    def seek(self, position: int) -> int:
        self._position = position
        return position

    def readinto(self, target: Any) -> int:
        """Fill a buffer from the position on, as far as the object reaches, and return the number of
        bytes.
        """
        view = memoryview(target).cast("B")
        start, stop = self._position, min(self._position + len(view), self._entry.size)
        if not self._start <= start <= stop <= self._start + len(self._buffer):
            end = min(max(stop, start + PIECE), self._entry.size)
            self._buffer = patiently(
                lambda: self._store.read(self.name, start, end, self._entry.tag), self.name
            )
            self._start = start
        data = self._buffer[start - self._start : stop - self._start]
        view[: len(data)] = data
        self._position = start + len(data)
        return len(data)
