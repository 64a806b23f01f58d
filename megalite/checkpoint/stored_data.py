"""Data of a checkpoint that is in an object store, and the local stubs of such checkpoints
(`stores.stubs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from megalite.checkpoint.errors import CheckpointError, damaged
from megalite.stores import stubs
from megalite.stores.errors import ConflictError, StoreError
from megalite.stores.object_store import patiently, store_of
from megalite.stores.remote_file import RemoteFile

Result = TypeVar("Result")


@contextmanager
def open_stored(path: Path, size: int) -> Iterator[BinaryIO]:
    """Open the object for which a stub has no file.

    Raises:
        DamagedError: it is missing, has another size, or is replaced while it is read.
        CheckpointError: the store does not answer. An older checkpoint would not help.
    """
    origin = stubs.origin_of(path.parent)
    if origin is None:
        raise damaged(path, f"{size:,} bytes", "no file, and no place of it in a store")
    url = f"{origin[0]}/{path.name}"
    try:
        store = store_of(url)
        entry = patiently(lambda: store.info(url), url)
        if entry is None or entry.size != size:
            raise damaged(url, f"{size:,} bytes", "no object" if entry is None else f"{entry.size:,}")
        yield cast(BinaryIO, RemoteFile(store, url, entry))
    except (FileNotFoundError, ConflictError):
        raise damaged(url, f"{size:,} bytes", "that it was removed or replaced while it was read") from None
    except StoreError as error:
        raise CheckpointError(str(error)) from None


def fetched(path: Path) -> Path:
    """Return the stub of the checkpoint that a URL names. Raises CheckpointError."""
    return _converted(lambda: stubs.fetched(str(path)))


def fetched_run(path: Path) -> Path:
    """Return a directory with stubs of all checkpoints of a run in a store. Raises CheckpointError."""
    return _converted(lambda: stubs.fetched_run(str(path)))


def _converted(action: Callable[[], Result]) -> Result:
    try:
        return action()
    except StoreError as error:
        raise CheckpointError(str(error)) from None
