"""Objects of a store: list, read, write, delete. Paths are URLs.

An object is visible when all of it is written, and is replaced as a whole. A write of a large object is in
parts, which are invisible until the last request.

Credentials, endpoints and regions are those of the SDK of each store: environment variables, profiles, the
metadata service of a machine (docs/stores.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megalite.config.errors import ConfigError
from megalite.stores.errors import ConflictError, StoreError, reason
from megalite.stores.url import PACKAGES, normal, protocol_of

Result = TypeVar("Result")
PATIENCE_S = 60.0
"""Seconds for which reads, and the accesses at a start, are tried again."""
DATA_PATIENCE_S = 300.0
"""Seconds for which a run tries again to read its data."""
PIECE = 8 << 20
"""Bytes of one request of a read; larger ranges are read with several requests at the same time."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_TAGS = ("generation", "ETag", "etag", "md5Hash", "content_md5", "mtime", "created")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


class StoredObject(NamedTuple):
    """What a store says of an object.

    Attributes:
        size: in bytes.
        tag: changes with the content: a generation, an ETag or, if the store has neither, a time.
        modified: seconds since the epoch, by the clock of the store.
    """

    size: int
    tag: str
    modified: float


class ObjectStore:
    """A store. Methods raise what its library raises, and FileNotFoundError for an object that is not there.

    Attributes:
        conditional: whether `replace` works. False once a store with the interface of S3 has answered that it
            lacks conditional writes.
    """

    conditional = False

    def __init__(self, fs: Any, protocol: str):
        self.fs, self.protocol = fs, protocol

    def path(self, url: str) -> str:
        """Return the name of an object for the library."""
        return str(self.fs._strip_protocol(url))

    def info(self, url: str) -> StoredObject | None:
        """Return what the store says of an object, or None if it is not there."""
        try:
            entry = self.fs.info(self.path(url))
        except FileNotFoundError:
            return None
        return _object(entry) if entry.get("type", "file") == "file" else None

    def find(self, url: str) -> dict[str, StoredObject]:
        """Return the objects below a URL by the rest of their names."""
        base = self.path(url).rstrip("/") + "/"
        try:
            entries = self.fs.find(base.rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {
            name.removeprefix(base): _object(entry)
            for name, entry in sorted(entries.items())
            if name.startswith(base) and entry.get("type", "file") == "file"
        }

    def read(self, url: str, start: int = 0, end: int | None = None, tag: str | None = None) -> bytes:
        """Return the bytes [start, end) of an object; end = None: all of them.

        Args:
            tag: that of the object when it was opened. A store that can compare it raises ConflictError if
                the object has been replaced.
        """
        path = self.path(url)
        if end is None:
            return bytes(self.fs.cat_file(path))
        starts = list(range(start, end, PIECE))
        pieces = self.fs.cat_ranges(
            [path] * len(starts), starts, [min(at + PIECE, end) for at in starts], on_error="raise"
        )
        return b"".join(pieces)

    def write(self, url: str, data: bytes) -> None:
        """Write a small object."""
        self._commit(url, lambda file: file.write(data))

    def replace(self, url: str, data: bytes, known: str | None) -> str | None:
        """Write a small object if it is still the one that is known.

        Args:
            known: the tag of the object that is replaced; None: there is none.

        Returns:
            its tag; None, with nothing written, by a store that is not `conditional`.

        Raises:
            ConflictError: another process has written it.
        """
        return None

    def upload(self, file: Path, url: str, part_bytes: int) -> None:
        """Write an object from a file, in parts of at least `part_bytes` if the store has parts."""
        if self.protocol in ("memory", "file"):
            data = file.read_bytes()
            self._commit(url, lambda target: target.write(data))
        else:
            self.fs.put_file(str(file), self.path(url))

    def delete(self, urls: Sequence[str]) -> None:
        """Delete objects. One that is not there is not an error."""
        for url in urls:
            try:
                self.fs.rm_file(self.path(url))
            except FileNotFoundError:
                continue

    def abort_uploads(self, url: str) -> int:
        """Discard the parts of unfinished writes of objects below a URL, and return the number of writes.

        Stores other than S3 discard them by themselves, a week later.
        """
        return 0

    def _replaced(self, url: str, data: bytes) -> str:
        """Return the tag of what a conditional write has met, if it is the data, or raise ConflictError.

        A lost answer makes a second try fail; the content then shows that the first one has succeeded.
        """
        entry = self.info(url)
        if entry is not None and self.read(url) == data:
            return entry.tag
        raise ConflictError(f"{url} has been written by another process.")

    def _commit(self, url: str, write: Callable[[Any], object]) -> None:
        """Write an object that becomes visible as a whole, also where objects are files."""
        path = self.path(url)
        if self.protocol == "file":
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        file = self.fs.open(path, "wb", **({"autocommit": False} if self.protocol == "file" else {}))
        with file:
            write(file)
        if self.protocol == "file":
            file.commit()


def version_of(entry: dict[str, Any]) -> tuple[int | None, str]:
    """Return the size and the tag of a file in what fsspec says of it; both change with its content."""
    tag = next((str(entry[key]) for key in _TAGS if entry.get(key) is not None), "")
    return entry.get("size"), tag


def _object(entry: dict[str, Any]) -> StoredObject:
    when = next((entry[key] for key in _TIMES if entry.get(key) is not None), 0.0)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    return StoredObject(
        int(entry["size"]),
        version_of(entry)[1],
        when.timestamp() if isinstance(when, datetime) else float(when),
    )


def store_of(url: str | Path) -> ObjectStore:
    """Return the store of a URL.

    Raises:
        StoreError: its package is not installed.
    """
    return _connected(protocol_of(url), normal(url).partition("://")[2].partition("/")[0])


@cache
def _connected(protocol: str, bucket: str) -> ObjectStore:
    try:
        from fsspec.core import url_to_fs

        # listings must show what other processes have written
        options: dict[str, Any] = {"use_listings_cache": False}
        fs, _ = url_to_fs(f"{protocol}://{bucket}", **options)
    except ImportError:
        raise StoreError(
            f"{protocol}://{bucket} requires the package {PACKAGES[protocol]}. Install it with "
            "`pip install 'megalite[stores]'`."
        ) from None
    return _class_for(protocol)(fs, protocol)


def _class_for(protocol: str) -> type[ObjectStore]:
    package = PACKAGES[protocol]
    if package == "s3fs":
        from megalite.stores.s3 import S3Store

        return S3Store
    if package == "gcsfs":
        from megalite.stores.gcs import GcsStore

        return GcsStore
    if package == "adlfs":
        from megalite.stores.azure import AzureStore

        return AzureStore
    return ObjectStore


def patiently(action: Callable[[], Result], url: str, seconds: float = PATIENCE_S) -> Result:
    """Run an action, again after errors that may pass, with growing pauses.

    Args:
        seconds: after which the error is final.

    Raises:
        FileNotFoundError, ConfigError: at once.
        StoreError: the store did not answer in time, or does not permit it.
    """
    pause, end = _FIRST_PAUSE_S, time.monotonic() + seconds
    while True:
        try:
            return action()
        except (FileNotFoundError, ConfigError):
            raise
        except PermissionError as error:
            raise StoreError(
                f"{url}: access is denied ({reason(error)}). Credentials are those of the store's SDK, for "
                "S3 for example AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            ) from error
        except Exception as error:  # each library has errors of its own
            if time.monotonic() + pause > end:
                raise StoreError(
                    f"{url} could not be reached for {seconds:.0f} s ({reason(error)}). Check the network, "
                    "the bucket and, for another endpoint, its variable such as AWS_ENDPOINT_URL."
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
