"""What a tracker is: a client that stores measurements, and the identifier under which it knows the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megalite.config.schema import Config
from megalite.system.files import replacing, write_synced


@dataclass(frozen=True)
class Measurement:
    """Numbers of a line of metrics.jsonl, by name.

    Attributes:
        time: seconds since the epoch, when the line was written. A client may send it much later.
    """

    step: int
    scalars: Mapping[str, float]
    time: float


class Client(Protocol):
    """Connection of a library to the service or files that store metrics.

    A client is used by one thread. Its methods may take any time and raise any error.
    """

    def log(self, measurements: Sequence[Measurement]) -> None: ...

    def close(self, failed: bool) -> None:
        """End the tracked run, which has failed or not. It can be opened again."""


class TrackedRun:
    """A run as a tracker knows it: its directory, its options, and its identifier, which a file there keeps.

    Args:
        file: name of the file in `run_dir`.
        starts: whether the run starts at step 0, and is a new one for the tracker.
    """

    def __init__(self, run_dir: Path, config: Config, file: str, starts: bool):
        self.run_dir, self.config = run_dir, config
        self._path, self._starts = run_dir / file, starts

    @property
    def identity(self) -> str | None:
        """The recorded identifier, or None for a run that the tracker does not know."""
        if self._starts or not self._path.exists():
            return None
        return self._path.read_text(encoding="utf-8").strip() or None

    @identity.setter
    def identity(self, identity: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as fresh:
            write_synced(fresh, identity)
        self._starts = False
