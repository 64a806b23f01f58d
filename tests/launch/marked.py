"""Finds the processes of a test by an environment variable that all of them inherit."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megalite.system.processes import look

MARK = "MEGALITE_TEST_MARK"


def living(mark: str) -> list[int]:
    """The processes that have inherited the mark and have not ended."""
    entry, result = f"{MARK}={mark}".encode(), []
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with suppress(OSError):  # it has ended, or belongs to somebody else
                if entry in (directory / "environ").read_bytes().split(b"\0"):
                    result.append(int(directory.name))
    return [pid for pid in result if look(pid) is not None]
