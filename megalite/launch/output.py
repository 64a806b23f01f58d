"""Standard output and error that may go away: a reader such as `head` has seen enough, or Ctrl-C ended `tee` together with the run.

What is written then is dropped. A run must save its last step although nobody listens, and no command prints a traceback for it.
"""

from __future__ import annotations

import errno
import io
import sys

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)  # the reader has ended; the terminal was closed


class _Descriptor(io.FileIO):
    """A descriptor whose reader may end."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno not in GONE:
                raise
            return memoryview(data).nbytes  # type: ignore[arg-type]


def outlive_readers() -> None:
    """From now on a reader of stdout or stderr that ends costs only what it does not read. Streams that were replaced are left alone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            reopened = _reopened(stream)
            setattr(sys, name, reopened)
            setattr(sys, f"__{name}__", reopened)


def _reopened(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, with the same settings."""
    stream.flush()
    descriptor = _Descriptor(stream.fileno(), "w", closefd=False)
    descriptor.name = stream.name
    buffer, line = io.BufferedWriter(descriptor), stream.line_buffering or stream.write_through
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=line, write_through=stream.write_through)
