"""The directory of runs: whether it can be written, its free space and speed, and its clock."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megalite.launch.checkup.finding import Finding

GIB = 1 << 30
BLOCK, MOST_BLOCKS, MOST_S = 4 << 20, 32, 3.0  # written at most: 128 MiB, or what takes 3 seconds
SLOW, LITTLE = 100e6, 20 * GIB  # bytes/s, bytes
APART_S = 2.0  # seconds by which two clocks may differ


def findings(directory: Path) -> Iterator[Finding]:
    """Check a directory, or its nearest existing parent. Test files are removed."""
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    name = f"disk {directory}"
    free = shutil.disk_usage(place).free
    yield Finding(
        f"{name}, free",
        f"{free / GIB:,.1f} GiB",
        *(("note", "A checkpoint takes 12 to 16 bytes per parameter.") if free < LITTLE else ()),
    )
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".megalite_doctor_") as file:
            yield _clock(file.name)
            written, read = _speed(file.fileno())
    except OSError as error:
        yield Finding(
            name,
            f"not writable: {error.strerror or error}",
            "bad",
            "Choose another directory with --run.dir or change its permissions.",
        )
        return
    value = f"{written / 1e6:,.0f} MB/s written and synced, {read / 1e6:,.0f} MB/s read"
    advice = (
        f"A checkpoint of a billion parameters takes {14e9 / written / 60:.0f} minutes. Use a local disk."
    )
    yield Finding(f"{name}, speed", value, *(("note", advice) if written < SLOW else ()))


def _clock(path: str) -> Finding:
    """Compare the clock of the file system, which may be that of a server, with the host's."""
    before = time.time()
    os.utime(path)
    after, stamped = time.time(), os.stat(path).st_mtime
    difference = max(before - stamped, stamped - after, 0.0)
    if difference > APART_S:
        advice = "File times are compared with the clock of the host. Synchronize both with NTP."
        return Finding(
            "clocks", f"clocks of host and file system differ by {difference:,.0f} s", "note", advice
        )
    return Finding("clocks", "clocks of host and file system agree")


def _speed(file: int) -> tuple[float, float]:
    """Measure the speed in bytes/s of writing with fsync, and of reading uncached data."""
    block = os.urandom(BLOCK)
    started, blocks = time.monotonic(), 0
    while blocks < MOST_BLOCKS and (time.monotonic() - started < MOST_S or blocks == 0):
        os.write(file, block)
        blocks += 1
    os.fsync(file)
    written = time.monotonic() - started
    with suppress(AttributeError, OSError):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    started = time.monotonic()
    while os.read(file, BLOCK):
        pass
    return blocks * BLOCK / written, blocks * BLOCK / (time.monotonic() - started)
