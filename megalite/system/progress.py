"""How far a command is: a bar on a terminal, otherwise a line after 2 seconds and then every 10. Only on
stderr, and only on rank 0.

    with Progress() as progress:
        progress("reading", done, total, "B")
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, TextIO

from megalite.system.messages import say

FIRST_S, EVERY_S = 2.0, 10.0  # of the plain lines: from the start of the command, and between them
LOOK_S = 0.5
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Report(Protocol):
    """Callback that library functions use to report progress."""

    def __call__(self, what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        """Report progress.

        Args:
            what: the phase.
            done, total: of its work, in bytes if unit is "B", else counted; total None: unknown.
        """


def silent(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
    """Discard progress reports."""


@dataclass
class Phase:
    """A phase of a command.

    Attributes:
        start: the amount done when it was first reported, if the command resumes.
    """

    what: str
    since: float
    start: int
    done: int
    total: int | None
    unit: str

    def figures(self, now: float) -> str:
        """Return the amount done, the rate, and the remaining time."""
        seconds, gained = now - self.since, self.done - self.start
        if self.total is None and not self.done:
            return f"{duration(seconds)} elapsed"
        parts = [amount(self.done, self.unit)]
        if self.total is not None:
            done = amount(self.done, "B" if self.unit == "B" else "")
            parts = [f"{done} of {amount(self.total, self.unit)} ({self.done / max(self.total, 1):.0%})"]
        if seconds > 0 and gained > 0:
            rate = gained / seconds
            parts.append(f"{amount(rate, self.unit)}/s" if rate >= 1 else f"{duration(1 / rate)} each")
            if self.total is not None:
                parts.append(f"{duration(max(self.total - self.done, 0) / rate)} left")
        return ", ".join(parts)


class Progress:
    """Shows what it is called with, until its block ends. A call costs about a microsecond: a thread shows
    the last one, and keeps the display going while the command is busy.

    Args:
        stream: default: stderr.
        clock: seconds; tests replace it and call `look` themselves.
        quiet: show nothing, as for --json where stderr is no terminal.
    """

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = monotonic, quiet: bool = False
    ):
        self._stream, self._clock = stream or sys.stderr, clock
        self._quiet = quiet or os.environ.get("RANK", "0") != "0"
        self._phase: Phase | None = None
        self._due = clock() + FIRST_S
        self._bar, self._row = None if self._quiet or not self._stream.isatty() else _bar(self._stream), None
        self._over, self._lock = Event(), Lock()

    def __enter__(self) -> Progress:
        if not self._quiet and self._clock is monotonic:
            Thread(target=self._watch, name="megalite-progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()

    def __call__(self, what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        if self._quiet:
            return
        with self._lock:
            if self._phase is None or self._phase.what != what:
                self._phase = Phase(what, self._clock(), done, done, total, unit)
            self._phase.done, self._phase.total = done, total

    def look(self) -> None:
        """Redraw the current phase if it is due."""
        with self._lock:
            now = self._clock()
            if self._phase is None or self._over.is_set():
                return
            if self._bar is not None:
                self._draw(self._phase, now)
            elif now >= self._due:
                self._due = now + EVERY_S
                say(f"{self._phase.what}: {self._phase.figures(now)}", self._stream)

    def _draw(self, phase: Phase, now: float) -> None:
        """Update the bar; one row, since phases follow each other."""
        bar: Any = self._bar
        state = {
            "description": phase.what,
            "completed": phase.done,
            "total": phase.total,
            "figures": phase.figures(now),
        }
        if self._row is None:
            self._row = bar.add_task(phase.what, total=phase.total, figures="")
            bar.start()
        bar.update(self._row, **state)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()


def _bar(stream: TextIO) -> Any:
    """Return a Rich progress bar, which is removed at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    figures = TextColumn("{task.fields[figures]}", markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), figures)
    # stdout may be another file
    return Bar(*columns, console=Console(file=stream), transient=True, redirect_stdout=False)


def amount(value: float, unit: str = "") -> str:
    """Format a count, or bytes if the unit is B: 1,234 or 1.23 GB."""
    if unit == "B":
        scale, name = next(((scale, name) for scale, name in BYTES if value >= scale), (1.0, "B"))
        return f"{value / scale:.3g} {name}" if value < 999.5 * scale else f"{value / scale:.0f} {name}"
    number = f"{value:,.0f}" if isinstance(value, int) or value >= 10 else f"{value:.1f}"
    return f"{number} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Format a duration: 45 s, 3 min 20 s, 2 h 5 min or 3 d 4 h."""
    whole = round(seconds)
    for size, name, smaller, part in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s" if seconds >= 10 else f"{seconds:.2g} s"
