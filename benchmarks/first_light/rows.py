"""What a part of first-light reports: rows, which are plain data, each with a name and a verdict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.report import ROOT

Verdict = Literal["passed", "failed", "measured", "note", "missing", "absent"]
"""passed, failed: a proof. measured: figures. note: worth knowing. missing: an error or no time. absent: not
possible on this machine."""
Kind = Literal["proof", "measurement"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """What a part knows of the machine and of what has been done.

    Attributes:
        gpus: the names of the visible GPUs; empty in a rehearsal.
        ends: when the part's time is over, on the clock of time.monotonic.
        earlier: the rows of earlier parts, by part.
        calibrate: the device file to write.
    """

    gpus: tuple[str, ...]
    rehearse: bool
    short: bool
    ends: float
    earlier: dict[str, list[Row]]
    calibrate: str | None = None

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def sized(self, real: int, rehearsed: int) -> int:
        return rehearsed if self.rehearse else real


def row(name: str, verdict: Verdict, detail: str = "", **figures: Any) -> Row:
    """detail: the row in words, for the table."""
    return {"name": name, "verdict": verdict, "detail": detail, **figures}


def absent(name: str, reason: str) -> Row:
    """A row for what only another machine can show."""
    return row(name, "absent", f"not available on this machine: {reason}")


def guarded(name: str, kind: Kind, act: Callable[[], Row]) -> Row:
    """The row that `act` returns; if it raises, a row with the traceback: a proof that ends so has failed."""
    try:
        return act()
    except Exception as error:  # the next row may succeed
        return failure(name, kind, error)


def failure(name: str, kind: Kind, error: BaseException) -> Row:
    """The row of an error, with the end of its traceback, in which no path of this machine remains."""
    trace = "".join(traceback.format_exception(error)).replace(f"{ROOT}/", "")
    lines = str(error).strip().splitlines()
    detail = f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
    return row(name, "failed" if kind == "proof" else "missing", detail, traceback=trace[-4000:])
