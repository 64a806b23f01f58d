"""Standard output and error that may go away: a reader such as `head` has seen enough, or Ctrl-C ended `tee`
together with the run.

What is written then is dropped. A run must save its last step although nobody listens, and no command prints
a traceback for it. Nor does one for a character that the terminal's encoding lacks: in ASCII × is x, and what
has no such form is a question mark.

The last lines are kept for a crash report. Under the launcher they are in a file, too, where they outlive a
rank that is killed.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)  # the reader has ended; the terminal was closed

LOGS = "MEGALITE_LOG_DIR"
"""Environment variable: where the launcher wants the last lines of its ranks."""
KEPT = 16 << 10  # bytes
JOB = "job"
RETURN_FILE = "return"
"""Name of a file in LOGS that tells the launcher that lost places for ranks are healthy again."""


class Recent:
    """A file with at least the last bytes that this process printed, and at most 16 times as many."""

    def __init__(self) -> None:
        self._data, self._lock = b"", Lock()
        self._file: BinaryIO | None = None

    def keep_in(self, path: Path) -> None:
        with suppress(OSError):
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (until the process ends)

    def add(self, data: bytes) -> None:
        with self._lock, suppress(OSError, ValueError):
            self._data = (self._data + data)[-KEPT:]
            if self._file is not None:
                if self._file.tell() > 16 * KEPT:
                    self._file.seek(0)
                    self._file.truncate()
                    data = self._data
                self._file.write(data)

    def lines(self) -> list[str]:
        return _lines(self._data)


RECENT = Recent()


def log_of(directory: Path, rank: int) -> list[str]:
    """Return the last lines printed by a rank of the launcher, or an empty text if none were kept."""
    with suppress(OSError):
        return _lines(_log(directory, str(rank)).read_bytes()[-KEPT:])
    return []


def note_job(job: str) -> None:
    """Tell the launcher the id of the job, which is the same on all nodes."""
    if LOGS in os.environ:
        with suppress(OSError):
            Path(os.environ[LOGS], JOB).write_text(job, encoding="utf-8")


def job_of(directory: Path) -> str:
    """Return the job of the launcher's ranks, or an empty text if no rank has started it."""
    with suppress(OSError):
        return (directory / JOB).read_text(encoding="utf-8")
    return ""


PLAIN = {
    "×": "x",
    "–": "-",
    "—": "-",
    "…": "...",
    "·": "*",
    "→": "->",
    "±": "+-",
    "█": "#",
    "“": '"',
    "”": '"',
}
"""Character that a terminal's encoding may lack → what is printed instead."""


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler that replaces characters the encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(
        PLAIN.get(character, "?") for character in error.object[error.start : error.end]
    ), error.end


codecs.register_error("megalite.plain", _plain)


def _log(directory: Path, rank: str) -> Path:
    return directory / f"rank_{rank}.log"


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="replace").replace("\r", "\n").splitlines()


class _Descriptor(io.FileIO):
    """A file descriptor whose reader may go away."""

    def write(self, data: object, /) -> int:
        RECENT.add(bytes(data))  # type: ignore[call-overload]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno not in GONE:
                raise
            return memoryview(data).nbytes  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Keep running if a reader of stdout or stderr goes away or the encoding lacks a character.

    Only the output that cannot be written is lost. Streams that were replaced are left alone.
    """
    if LOGS in os.environ and "RANK" in os.environ:
        RECENT.keep_in(_log(Path(os.environ[LOGS]), os.environ["RANK"]))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            reopened = _reopened(stream)
            setattr(sys, name, reopened)
            setattr(sys, f"__{name}__", reopened)


def _reopened(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Reopen a stream with the same settings, replacing characters that cannot be encoded."""
    stream.flush()
    descriptor = _Descriptor(stream.fileno(), "w", closefd=False)
    descriptor.name = stream.name
    buffer, line = io.BufferedWriter(descriptor), stream.line_buffering or stream.write_through
    return io.TextIOWrapper(
        buffer, stream.encoding, "megalite.plain", line_buffering=line, write_through=stream.write_through
    )
