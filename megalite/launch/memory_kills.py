"""Detect out-of-memory kills on this host, from the kernel log and the counters of the control group.

A process that is killed by SIGKILL cannot report it. The log (/dev/kmsg) names the process, where it may be
read; the control group of a container or of a job counts kills (memory.events of version 2,
memory.oom_control and memory.failcnt of version 1).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

OWN, GROUPS, LOG = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/dev/kmsg")
KILLS = {"memory.events": "oom_kill", "memory.oom_control": "oom_kill", "memory.failcnt": ""}
"""Files of a control group → what their counter is called; the last one has nothing but its counter: how
often the limit was reached."""
LIMITS = ("memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes")
RECORD = 8192  # bytes, at least the longest record of the kernel's log


class MemoryKills:
    """A snapshot of the kernel's counters of out-of-memory kills, for a later comparison.

    Processes that are started afterwards are children of this one.

    Args:
        own, groups, log: where the kernel says in which group this process is, has the groups, and has its
            log.
    """

    def __init__(self, own: Path = OWN, groups: Path = GROUPS, log: Path = LOG):
        self._own, self._groups, self._log = own, groups, log
        self._since, self._before = monotonic(), self._counts()

    def explanation(self, pid: int | None = None) -> str:
        """Describe an out-of-memory kill since the snapshot; empty if there was none.

        The log names the process. The counters are those of all processes of the group: what they say may be
        true of another one.

        Args:
            pid: of the process that was killed; None: only the counters are read.
        """
        if pid is not None and re.search(rf"Killed process {pid}\b", self._messages()):
            return f"out of memory, killed by the kernel ({self._log})"
        for name, count in self._counts().items():
            more = count - self._before.get(name, 0)
            if more > 0:
                killed = (
                    f"the kernel killed {more} process{'es' * (more > 1)} in its container, out of memory "
                    f"({name}, oom_kill)"
                )
                limit = f"its container reached its memory limit ({name})"
                return f"it may have run out of memory: since the start {killed if KILLS[name] else limit}"
        return ""

    def _counts(self) -> dict[str, int]:
        """Return the counters by file.

        `memory.failcnt` is only used if no file counts kills, since a limit may be reached without a kill.
        """
        counts: dict[str, int] = {}
        for group in groups(self._own, self._groups):
            for name, key in KILLS.items():
                with suppress(OSError, ValueError):
                    text = (group / name).read_text(encoding="utf-8")
                    fields = dict(line.split() for line in text.splitlines()) if key else {"": text}
                    if key in fields and not (counts and not key):
                        counts.setdefault(name, int(fields[key]))
        return counts

    def _messages(self) -> str:
        """Read the kernel log; empty if it is not readable.

        A record is `priority,number,microseconds,…;message`.
        """
        text = ""
        with suppress(OSError):
            log = os.open(self._log, os.O_RDONLY | os.O_NONBLOCK)
            try:
                while record := _next(log):
                    text += record
            finally:
                os.close(log)
        recent = (line for line in text.splitlines() if _microseconds(line) >= 1e6 * (self._since - 1))
        return "\n".join(recent)


def _next(log: int) -> str:
    """Return the next record, or an empty text at the end."""
    while True:
        try:
            return os.read(log, RECORD).decode(errors="replace")
        except BlockingIOError:
            return ""
        except BrokenPipeError:  # it was overwritten meanwhile: the oldest one that is left is next
            continue


def _microseconds(line: str) -> float:
    """Return the time of a record since the kernel's start, or -1 for a continuation line."""
    match = re.match(r"\d+,\d+,(\d+),", line)
    return float(match[1]) if match else -1.0


def groups(own: Path = OWN, root: Path = GROUPS) -> list[Path]:
    """Return the directories that may have the memory counters of this control group, the best first."""
    return list(dict.fromkeys(place for place in _places(own, root) if place.is_dir()))


def _places(own: Path, root: Path) -> Iterator[Path]:
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield root / "memory" / path.lstrip("/")
            elif not controllers:
                yield from (root / path.lstrip("/"), root / "unified" / path.lstrip("/"))
    yield from (root, root / "memory")


def describe() -> list[str]:
    """Return the limit, use and counters of this process's control group, one per line."""
    lines: dict[str, str] = {}
    for group in groups():
        for name in (*LIMITS, *KILLS):
            with suppress(OSError):
                lines.setdefault(
                    name,
                    f"container, {name}: "
                    + ", ".join((group / name).read_text(encoding="utf-8").splitlines()),
                )
    return list(lines.values())
