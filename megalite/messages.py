"""Lines for the user from a run that must go on without them."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, to stderr by default, in one write, since other ranks print too.

    A stream that cannot be written costs the line and not the run: its file may be on a disk that is full, its reader may be gone.
    """
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(f"{text}\n", end="", file=stream or sys.stderr, flush=True)
