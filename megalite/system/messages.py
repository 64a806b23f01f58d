"""Lines and files for the user, from a run that must go on without them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from megalite.system.files import replacing, unique_name


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, to stderr by default, in one write, since other ranks print too.

    A stream that cannot be written costs the line and not the run: its file may be on a disk that is full,
    its reader may be gone.
    """
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(f"{text}\n", end="", file=stream or sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: 1 file, 2,000 files."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def flush_output() -> None:
    """Flush stdout and stderr before os._exit. Output that cannot be written is lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def write_or_say(path: Path, write: Callable[[Path], object], *, shared: bool = False) -> bool:
    """Write the file of an instrument atomically, creating its directory.

    If that fails, print one line. Returns whether the file was written.

    Args:
        shared: several processes may write the file at the same time.
    """
    # the ending stays: some writers compress by it
    fresh_path = path.with_name(unique_name(path) if shared else f".new.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, fresh_path) as fresh:
            write(fresh)
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror or error}")
        return False
    return True
