"""The directory in memory for copies of a run's state, which the ranks make and a launcher keeps.

It outlives the ranks and is removed with the launcher. That of a launcher that was killed is removed by the
next launcher on the machine: its name contains the process.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megalite.checkpoint import copies
from megalite.launch.run_lock import machine_id, start_of


@contextmanager
def memory_directory(place: Path | None = None) -> Iterator[dict[str, str]]:
    """Create the directory until the end of the block. Yields its environment variable, or nothing where
    there is no such memory; ranks then choose a directory themselves.

    Args:
        place: where; None: in MEGALITE_COPIES or /dev/shm.
    """
    if place is None:
        place = copies.place()
        if copies.PLACE_VARIABLE in os.environ:
            with suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        yield {}
        return
    # process numbers mean something else in another container, which may have the same memory
    machine = f"megalite-{hashlib.sha256(machine_id().encode()).hexdigest()[:12]}"
    _remove_abandoned(place, machine)
    prefix = f"{machine}-{os.getpid()}-{start_of(os.getpid())}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as directory:
        yield {copies.DIRECTORY: directory}


def _remove_abandoned(place: Path, machine: str) -> None:
    """Remove directories whose launcher has ended."""
    for directory in place.glob(f"{machine}-*"):
        parts = re.fullmatch(r"(\d+)-(\d+)-.*", directory.name.removeprefix(f"{machine}-"))
        if parts is not None and start_of(int(parts[1])) != int(parts[2]):
            shutil.rmtree(directory, ignore_errors=True)
