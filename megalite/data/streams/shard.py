"""Shards, the files of a stream, and the records in them.

A shard is read in order, from any record on. Each format is a class with the interface `Shard`. Files are
opened by fsspec, so that a path may have any scheme that it knows. If it is remote, accesses are tried again
after any error, for as long as those of token files in a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

import fsspec
import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import DataError
from megalite.data.preparation.contents import (
    UNREADABLE,
    Damage,
    compression_of,
    decompressed,
    reason_of,
)
from megalite.stores.object_store import patiently
from megalite.stores.retried_file import is_local, open_file

Result = TypeVar("Result")
TEXT_KEY = "data.text_key"


class StreamRecord(NamedTuple):
    """A record of a shard.

    Attributes:
        row: its number in the shard, from 0.
        offset: the byte at which it begins, for formats whose records are found that way; else 0.
        content: its text, or tokens that end in EOS.
        problem: why it has none: the rest of a sentence about it, with its space; else empty.
    """

    row: int
    offset: int
    content: str | NDArray[np.integer] = ""
    problem: str = ""


class Shard(Protocol):
    """A file of a stream.

    Attributes:
        path: of the file, for messages.
        identity: what determines its content, as JSON; begins with its name within the stream.
        noun: what a record is called in messages; `first` is the number of the first one.
    """

    path: str
    identity: list[Any]
    noun: str
    first: int

    def records(self, row: int = 0, offset: int = 0) -> Iterator[StreamRecord]:
        """Yield the records from `row` on, which begins at byte `offset`.

        Raises Damage if the file cannot be read.
        """
        ...


def place(shard: Shard, row: int) -> str:
    """Return the name of a record in messages."""
    return f"{shard.path} {shard.noun} {shard.first + row}"


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, bool]]:
    """Open a file and yield its plain stream, and whether that is the file itself and can seek.

    Raises Damage, here or where it is read, or StoreError if a remote file system does not answer.
    """
    system, stripped = filesystem_of(path)
    try:
        with open_file(system, stripped, path) as raw:
            file = cast(BinaryIO, raw)
            kind = compression_of(file.read(6))
            file.seek(0)
            with decompressed(file, kind) as plain:
                yield plain, kind is None
    except UNREADABLE as error:
        raise Damage(reason_of(error)) from None


def filesystem_of(path: str) -> tuple[Any, str]:
    """Return the file system of a path, and the path in it.

    Raises DataError if a package for it is missing.
    """
    try:
        system, stripped = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(
            f"{path} cannot be opened: {reason}. Install the fsspec package of its scheme, such as s3fs for "
            "s3:// or gcsfs for gs://."
        ) from None
    return system, stripped


def asked(system: Any, url: str, action: Callable[[], Result]) -> Result:
    """Run an action of a file system, if it is remote again after errors that may pass.

    Raises:
        FileNotFoundError, or what a local file system raises.
        StoreError: a remote one does not answer.
    """
    return action() if is_local(system) else patiently(action, url)
