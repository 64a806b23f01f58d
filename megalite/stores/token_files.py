"""Token files in a store: the index and metadata as local copies, the tokens in blocks that are cached.

A block is a range of an object, cached in a file of MEGALITE_CACHE (`url.cache_directory`). Its directory
is named after the URL, the size and the tag of the object, and a file of another length than its block is
not used, so nothing of another version is read. The ranks of a node share the cache: one of them reads a
block, and the others wait for it. The blocks that were used longest ago are removed when there are more
than MEGALITE_CACHE_GB.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.stores.errors import StoreError
from megalite.stores.object_store import DATA_PATIENCE_S, patiently, store_of
from megalite.stores.stubs import alone, copy_object, replace_file
from megalite.stores.url import cache_directory, local, normal

BLOCK = 1 << 20
DEFAULT_GB = 50.0
_TOUCHED_S = 60.0
_SHARE = 20
"""The cache is looked through when this fraction of its limit has been written."""


@cache
def local_prefix(prefix: str) -> str:
    """Copy PREFIX.idx, PREFIX.json and the tokenizer that it names, and return the prefix of the copies.

    Raises:
        StoreError: the store cannot be reached.
    """
    url = normal(prefix)
    store, parent, path = store_of(url), url.rpartition("/")[0], local(cache_directory() / "data", url)
    with alone(path):
        for end in (".idx", ".json"):
            name = f"{url}{end}"
            if (entry := patiently(partial(store.info, name), name)) is not None:
                copy_object(store, name, entry, path.with_name(path.name + end))
            else:
                path.with_name(path.name + end).unlink(missing_ok=True)
        tokenizer = _tokenizer(path.with_name(f"{path.name}.json"))
        for name, entry in patiently(lambda: store.find(parent), url).items() if tokenizer else ():
            if name == tokenizer or name.startswith(f"{tokenizer}/"):
                copy_object(store, f"{parent}/{name}", entry, path.parent / name)
    return str(path)


def _tokenizer(metadata: Path) -> str | None:
    """Return the path of the tokenizer beside a token file, if it has one there."""
    with suppress(OSError, ValueError, AttributeError):
        name = json.loads(metadata.read_text(encoding="utf-8")).get("tokenizer")
        if isinstance(name, str) and name != "byte" and not os.path.isabs(name) and ".." not in name:
            return name
    return None


def missing(prefix: str) -> list[str]:
    """Return the objects of a token file that are not in the store."""
    names, store = [f"{normal(prefix)}{end}" for end in (".bin", ".idx")], store_of(prefix)
    return [name for name in names if patiently(partial(store.info, name), name) is None]


class CachedObject:
    """An object that is read through the cache.

    Attributes:
        size: in bytes.

    Raises:
        StoreError: it is missing, or the store cannot be reached.
    """

    def __init__(self, url: str, block: int = BLOCK):
        self._url, self._block, self._store = normal(url), block, store_of(url)
        entry = patiently(lambda: self._store.info(self._url), self._url)
        if entry is None:
            raise StoreError(f"{self._url} does not exist.")
        self.size, self._tag = entry.size, entry.tag
        key = hashlib.blake2b(f"{self._url} {self.size} {self._tag} {block}".encode(), digest_size=16)
        self._blocks = cache_directory() / "blocks"
        self._directory = self._blocks / key.hexdigest()
        self._used: dict[int, float] = {}
        self._written = 0

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop).

        Raises:
            ConflictError: the object has been replaced.
            StoreError: the store does not answer.
        """
        pieces = []
        for number in range(start // self._block, -(-stop // self._block)):
            low = number * self._block
            pieces.append(self._of_block(number, max(start - low, 0), min(stop - low, self._block)))
        return b"".join(pieces)

    def _of_block(self, number: int, start: int, stop: int) -> bytes:
        data = self._cached(number, start, stop)
        if data is None:
            with self._reader_of(number):
                data = self._cached(number, start, stop)  # another rank may have read it meanwhile
                if data is None:
                    low, high = number * self._block, min((number + 1) * self._block, self.size)
                    whole = patiently(
                        lambda: self._store.read(self._url, low, high, self._tag), self._url, DATA_PATIENCE_S
                    )
                    if len(whole) != high - low:
                        raise StoreError(
                            f"{self._url} gave {len(whole):,} of the bytes {low:,} to {high:,}. Check the "
                            "object."
                        )
                    self._keep(number, whole)
                    data = whole[start:stop]
        return data

    def _cached(self, number: int, start: int, stop: int) -> bytes | None:
        """Return bytes of a block, or None if it is not in the cache."""
        path = self._directory / f"{number:08d}"
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != min(self._block, self.size - number * self._block):
                    return None
                if (now := time.monotonic()) - self._used.get(number, -_TOUCHED_S) >= _TOUCHED_S:
                    self._used[number] = now
                    os.utime(file.fileno())
                return os.pread(file.fileno(), stop - start, start)
        except OSError:
            return None

    def _keep(self, number: int, data: bytes) -> None:
        """Write a block to the cache. A disk that is full costs the block alone."""
        with suppress(OSError):
            replace_file(self._directory / f"{number:08d}", data)
        limit = float(os.environ.get("MEGALITE_CACHE_GB") or DEFAULT_GB) * 1e9
        self._written += len(data)
        if self._written >= limit / _SHARE:
            self._written = 0
            evict(self._blocks, limit)

    @contextmanager
    def _reader_of(self, number: int) -> Iterator[None]:
        """Let one process of the node at a time enter the block."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with open(self._directory / f".{number % 64:02d}", "w", encoding="utf-8") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            yield


def evict(blocks: Path, limit: float) -> None:
    """Remove the blocks that were used longest ago until the cache has at most `limit` bytes."""
    blocks.mkdir(parents=True, exist_ok=True)
    with open(blocks / ".evict", "w", encoding="utf-8") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another rank does it
        entry = []
        for path in blocks.glob("*/[0-9]*"):
            with suppress(OSError):
                status = path.stat()
                entry.append((status.st_mtime_ns, status.st_size, path))
        left = sum(size for _, size, _ in entry)
        for _, size, path in sorted(entry):
            if left <= limit:
                return
            path.unlink(missing_ok=True)
            left -= size


class StoredTokens:
    """The tokens of a token file in a store, in place of an array.

    A slice is another one of these and reads nothing; `astype`, and everything else of an array, reads.

    Attributes:
        file: the object with the tokens.
        dtype: of a token.
    """

    def __init__(self, file: CachedObject, dtype: np.dtype[Any], first: int = 0, count: int | None = None):
        self.file, self.dtype = file, dtype
        self._first = first
        self._count = file.size // dtype.itemsize if count is None else count

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._count * self.dtype.itemsize

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(self._count)
            return StoredTokens(self.file, self.dtype, self._first + start, max(0, stop - start))
        return np.asarray(self)[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        size = self.dtype.itemsize
        data = self.file.read(self._first * size, (self._first + self._count) * size)
        values = np.frombuffer(data, self.dtype)
        return values if dtype is None else values.astype(dtype)

    def astype(self, dtype: Any) -> NDArray[Any]:
        return np.asarray(self).astype(dtype)

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)
