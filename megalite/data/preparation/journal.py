"""The journal from which an interrupted preparation resumes, and the lock of a PREFIX.

A process that is killed leaves its temporary files and the journal, which says how far they are right. A
later preparation of the same inputs with the same tokenizer and options continues there; any other begins
anew. After an error or Ctrl-C nothing is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from megalite import __version__
from megalite.data.indexed import DataError
from megalite.data.preparation.writer import temporary
from megalite.system.files import replacing, write_synced

SAVE_S = 5.0  # seconds between saves: a kill loses at most this much work

Note = Callable[[str], None]
"""Called with a line for the user."""


def key_of(*parts: Any) -> str:
    """Return a hash of everything that the result of a preparation depends on."""
    return sha256(json.dumps([__version__, *parts], default=str).encode()).hexdigest()


def digest(path: Path) -> str:
    """Return the hash of a file's content, or an empty string if it is not a file."""
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


class Journal:
    """The journal of a preparation of PREFIX.

    A context manager, which is entered with the lock of PREFIX. It removes the journal on exit unless `kept`
    is set.

    Attributes:
        state: what an interrupted preparation with the same key has saved; None if there is none.
        foreign: there is one with another key, which this one replaces.
        kept: leave the journal, since a later start can continue.
    """

    def __init__(self, prefix: Path, key: str):
        self._prefix, self._key, self._path, self.kept = prefix, key, temporary(prefix, "journal"), False
        self._saved = time.monotonic()
        self.state: dict[str, Any] | None = None
        self.foreign = False

    def due(self) -> bool:
        """Return whether the next save is due."""
        return time.monotonic() - self._saved >= SAVE_S

    def save(self, state: dict[str, Any], others: list[Path]) -> None:
        """Save the state atomically.

        Args:
            others: temporary files of other names, which a preparation with another key removes.
        """
        with replacing(self._path, temporary(self._prefix, "journal.new")) as fresh:
            write_synced(
                fresh,
                json.dumps({"key": self._key, "state": state, "others": [str(path) for path in others]}),
            )
        self._saved = time.monotonic()

    def reject(self) -> None:
        """Start over because the temporary files have changed, although the key matches."""
        self.state, self.foreign = None, True
        self._clear({})

    def _read(self) -> dict[str, Any]:
        try:
            journal = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return journal if isinstance(journal, dict) else {}

    def _clear(self, journal: dict[str, Any]) -> None:
        for path in [
            *self._prefix.parent.glob(temporary(self._prefix, "*").name),
            *map(Path, journal.get("others", [])),
        ]:
            if path != temporary(self._prefix, "lock"):
                path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        """Read the journal, or remove what an interrupted preparation with another key has left."""
        journal = self._read()
        self.state = journal["state"] if journal.get("key") == self._key else None
        self.foreign = bool(journal) and self.state is None
        if self.state is None:
            self._clear(journal)
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.kept:
            self._path.unlink(missing_ok=True)


@contextmanager
def locked(prefix: Path) -> Iterator[None]:
    """Hold the lock of PREFIX. The kernel releases it when the process ends, however it ends.

    Raises DataError if another process prepares PREFIX.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    path = temporary(prefix, "lock")
    while True:
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise DataError(
                    f"--output {prefix} is being written by {holder}. Wait until it finishes, or choose "
                    "another PREFIX."
                ) from None
            except OSError:
                pass  # a file system without locks: two preparations are then not noticed
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue  # its holder has just removed it
            try:
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                yield
            finally:
                path.unlink(missing_ok=True)
            return
