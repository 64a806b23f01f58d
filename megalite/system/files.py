"""Files that have their name only when they are complete, and errors of the operating system in words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, fresh: Path | None = None) -> Iterator[Path]:
    """Yield the path of a new file that replaces `path` at the end of the block.

    It is in the same directory. After an error `path` is unchanged.

    Args:
        fresh: the path of the new file; by default a hidden name that is the same for every process.
    """
    fresh = fresh or path.with_name(f".{path.name}.new")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def unique_name(path: Path) -> str:
    """Return a hidden name for a new file that replaces `path`, for files with several writers.

    No other process or thread has it, on any host. The ending is that of `path`.
    """
    return f".{os.urandom(8).hex()}.{path.name}"


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until its content is on disk. Its name is on disk only once its directory is
    synced, too."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, text: str) -> None:
    """Write a file in place of another, which is there until the new one is complete."""
    temporary = path.with_name(f"{path.name}.partial")
    write_synced(temporary, text)
    os.replace(temporary, path)


def reserve(file: int, size: int) -> None:
    """Extend an empty file to a size, with its space on the disk if the file system can reserve it.

    Raises:
        OSError: there is not so much room.
    """
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.truncate(file, size)


def os_error_text(error: OSError, path: Path | None = None) -> str:
    """Format an operating system error as path and reason, without its number.

    Args:
        path: named in place of the error's own path.
    """
    if error.strerror is None:
        return str(error)
    shown = path or error.filename
    return error.strerror if shown is None else f"{os.fsdecode(shown)}: {error.strerror}"
