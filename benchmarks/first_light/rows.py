"""Rows that a part of first-light reports: plain data, each with a name and a verdict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.report import ROOT

Verdict = Literal["passed", "failed", "measured", "note", "missing", "absent"]
"""Verdicts of a row.

passed, failed: a proof. measured: figures. note: information. missing: an error or out of time. absent: not
available on this machine.
"""
Kind = Literal["proof", "measurement"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """Information for a part about the machine and earlier parts.

    Attributes:
        gpus: names of the visible GPUs; empty in a rehearsal.
        ends: end of the part's time, on the clock of time.monotonic.
        earlier: rows of earlier parts, by part.
        calibrate: path of the device file to write.
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
        """Return the remaining seconds."""
        return self.ends - time.monotonic()

    def sized(self, real: int, rehearsed: int) -> int:
        return rehearsed if self.rehearse else real


def row(name: str, verdict: Verdict, detail: str = "", **figures: Any) -> Row:
    """Return a row. `detail` describes it in the table."""
    return {"name": name, "verdict": verdict, "detail": detail, **figures}


def absent(name: str, reason: str) -> Row:
    """Return a row for something that is not available on this machine."""
    return row(name, "absent", f"not available on this machine: {reason}")


def guarded(name: str, kind: Kind, act: Callable[[], Row]) -> Row:
    """Return the row of `act` or, if it raises, a row with the traceback, which is a failure for a proof."""
    try:
        return act()
    except Exception as error:  # the next row may succeed
        return failure(name, kind, error)


def failure(name: str, kind: Kind, error: BaseException) -> Row:
    """Return the row of an error with the end of its traceback, without paths of this machine."""
    trace = "".join(traceback.format_exception(error)).replace(f"{ROOT}/", "")
    lines = str(error).strip().splitlines()
    detail = f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
    return row(name, "failed" if kind == "proof" else "missing", detail, traceback=trace[-4000:])
